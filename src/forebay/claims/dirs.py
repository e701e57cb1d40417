"""Which directory a path means, whatever it is called: two that are one, or lie one inside the other, are found by what the kernel
calls them. So links, bind mounts and letter case cost nothing."""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS
_CASEFOLD = 0x40000000
Level: TypeAlias = tuple[int, int]  # device and inode


class ClaimedPath(NamedTuple):
    """A directory that may not be there yet. ``path``: absolute, links resolved; ``names``: its parts, in lower case where the file
    system makes no difference; ``levels``: device and inode of the root and of each part that is there, from the top."""

    path: str
    names: tuple[str, ...]
    levels: tuple[Level, ...]


def canonical(path: str | os.PathLike[str]) -> ClaimedPath:
    """The place that a path means now. Raises OSError for a name that cannot be."""
    whole = os.path.realpath(os.path.abspath(os.fspath(path)))
    names = tuple(name for name in whole.split("/") if name)
    levels = _levels(names)
    if len(levels) <= len(names) and _ignores_case("/" + "/".join(names[: len(levels) - 1])):
        names = _folded(names, levels)
    return ClaimedPath(whole, names, levels)


def _levels(names: tuple[str, ...]) -> tuple[Level, ...]:
    found, path = [_level("/")], ""
    for name in names:
        path += "/" + name
        try:
            found.append(_level(path))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            break  # what we may not look at is told by its name
    return tuple(found)


def _level(path: str) -> Level:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _folded(names: tuple[str, ...], levels: tuple[Level, ...]) -> tuple[str, ...]:
    """The names, those in lower case that lie in a directory which makes no difference."""
    deepest = "/" + "/".join(names[: len(levels) - 1])
    parts, folds, path = [], False, "/"
    for name in names:
        if path == "/" or path == deepest or os.path.isdir(path):
            folds = _ignores_case(path)
        parts.append(name.casefold() if folds else name)
        path = os.path.join(path, name)
    return tuple(parts)


def _ignores_case(directory: str) -> bool:
    """Whether a name in it may be spelled in capitals: because it says so, or because the directory itself may."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False  # not ours to read: names are taken as they are
    try:
        flags: int = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(struct.calcsize("l"))))[0]
    except OSError:
        flags = 0  # this file system has no such flags
    finally:
        os.close(fd)
    if flags & _CASEFOLD:
        return True
    above, name = os.path.split(directory)
    other = name.swapcase()
    try:
        return other != name and os.path.samefile(directory, os.path.join(above, other))
    except OSError:
        return False


class Marks(NamedTuple):
    """Numbers that show quickly where places cannot overlap. ``told``: of the places (even), and of what is above them as each directory
    above sees it (odd). ``asked``: the same with the last bit turned: where two overlap, what one tells is among what the other asks."""

    told: frozenset[int]
    asked: frozenset[int]


def marks(wanted: Iterable[ClaimedPath]) -> Marks:
    """The marks of places. Above each is itself too."""
    places, above = set(), set()
    for place in wanted:
        for depth, level in enumerate(place.levels):
            mark = zlib.crc32(b"%d:%d" % level)
            above.add(mark | 1)
            for name in place.names[depth:]:
                mark = zlib.crc32(os.fsencode(name) + b"/", mark)
                above.add(mark | 1)
            places.add(mark & ~1)
    told = frozenset(places | above)
    return Marks(told, frozenset(mark ^ 1 for mark in told))


def overlap(a: ClaimedPath, b: ClaimedPath) -> bool:
    """Whether they are one directory, or one lies inside the other."""
    return any(rest[: len(other)] == other[: len(rest)] for rest, other in _common(a, b))


def same(a: ClaimedPath, b: ClaimedPath) -> bool:
    """Whether they are one directory."""
    return any(rest == other for rest, other in _common(a, b))


def _common(a: ClaimedPath, b: ClaimedPath) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """What each has below the directories that both have above them, or are."""
    if a.levels[-1:] == b.levels[-1:]:
        return [(a.names[len(a.levels) - 1 :], b.names[len(b.levels) - 1 :])]
    there = {level: depth for depth, level in enumerate(b.levels)}
    return [(a.names[depth:], b.names[there[level] :]) for depth, level in enumerate(a.levels) if level in there]
