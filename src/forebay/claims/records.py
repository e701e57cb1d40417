"""What a claim tells of itself to everybody on the node: who has it, and which directories it takes.

A directory is known by what the kernel calls it: two that are one, or lie one inside the other, are found whatever they are called,
so links, bind mounts and letter case cost nothing.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import pwd
import re
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from forebay import errors

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


VERSION = 1
LARGEST = 1 << 24  # bytes of a record that are looked at: anybody may write one
_HEAD = struct.Struct("=8sI")  # of what kind, and how many marks of its places follow
_MAGIC = b"claim 1\n"
_PROCESS = re.compile(r"process \d+")


class ClaimedStream(NamedTuple):
    """One directory of a claim. ``remote``: where its files come from, free of secrets. ``shared``: it is only read."""

    place: ClaimedPath
    remote: str | None
    shared: bool = False


class Beside(NamedTuple):
    """What a claim has outside of its directory, to be removed with it. ``landmark``: the file that must still be ours for that, which is
    another name or a copy of the file ``landmark`` in the claim's directory. ``paths``: the other files."""

    paths: tuple[str, ...]
    landmark: str


class Record(NamedTuple):
    """``job`` as people know it, and ``how`` we do; ``key``: the name or number of the claim in it. ``pid``, ``space`` (PID namespace),
    ``ticks`` (its start), ``mounts`` (mount namespace), ``host``, ``command``: of who registered it, at ``start`` (seconds since 1970)."""

    prefix: int
    job: str
    how: str
    key: str
    uid: int
    host: str
    pid: int
    space: int
    ticks: int
    mounts: int
    start: float
    command: str
    streams: tuple[ClaimedStream, ...]
    world: dict[str, Any] | None
    beside: Beside | None = None
    version: int = VERSION

    @property
    def owner(self) -> str:
        """The job in words for people."""
        return owner(self.job)

    @property
    def user(self) -> str:
        """The user's name here; the number where it has none."""
        return user_name(self.uid)

    def dump(self) -> bytes:
        """As it is kept: marks of its places, by which others see quickly that it does not concern them, then JSON. Raises `ConfigError`
        for more than others would read."""
        told = marks(stream.place for stream in self.streams).told
        text = json.dumps(self._asdict(), separators=(",", ":"), allow_nan=False).encode()
        data = _HEAD.pack(_MAGIC, len(told)) + array("I", told).tobytes() + text
        if len(data) > LARGEST:
            raise errors.ConfigError(
                f"{len(self.streams):,} directories: what a claim tells of them takes {len(data):,} bytes, at most {LARGEST:,} are read: "
                "claim a directory above them", name="dirs", value=len(self.streams),
            )  # fmt: skip
        return data


def length_of_marks(data: bytes) -> int:
    """Up to where the marks go in what begins like this."""
    return _HEAD.size + 4 * int.from_bytes(data[_HEAD.size - 4 : _HEAD.size], sys.byteorder)


def may_meet(data: bytes, asked: frozenset[int]) -> bool:
    """Whether a place of the record could overlap with one whose marks ask. False is certain. ``data``: its beginning."""
    end = length_of_marks(data)
    if not data.startswith(_MAGIC) or len(data) < end:
        return True
    return not asked.isdisjoint(memoryview(data)[_HEAD.size : end].cast("I"))


def load(data: bytes) -> Record | None:
    """The record; None where it is damaged, or of a version that is not known."""
    try:
        magic, marks = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            return None
        found = json.loads(data[_HEAD.size + 4 * marks :])
        if found["version"] != VERSION:
            return None
        found["streams"] = tuple(_stream(*stream) for stream in found["streams"])
        if found["beside"] is not None:
            paths, landmark = found["beside"]
            found["beside"] = Beside(tuple(map(os.fspath, paths)), os.fspath(landmark))
        record = Record(**found)
    except (struct.error, ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return record if _is_sound(record) else None


def owner(job: str) -> str:
    """A job in words for people."""
    return f"the job of {job}" if _PROCESS.match(job) else f"job {job}"


def _stream(place: Any, remote: Any, shared: Any) -> ClaimedStream:
    path, names, levels = place
    if not (isinstance(path, str) and (remote is None or isinstance(remote, str)) and all(isinstance(name, str) for name in names)):
        raise ValueError("not a stream")
    return ClaimedStream(ClaimedPath(path, tuple(names), tuple((int(dev), int(ino)) for dev, ino in levels)), remote, bool(shared))


def _is_sound(record: Record) -> bool:
    words = (record.job, record.how, record.key, record.host, record.command)
    numbers = (record.prefix, record.uid, record.pid, record.space, record.ticks, record.mounts)
    return (
        all(type(word) is str for word in words)
        and all(type(number) is int for number in numbers)
        and isinstance(record.start, float | int)
        and (record.world is None or isinstance(record.world, dict))
    )


@functools.cache
def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
