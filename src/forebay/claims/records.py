"""What a claim publishes to every process of the node: who has it, and which directories it takes.

Directories are compared by device and inode, so two names of one directory, or of one inside the other, are recognised in spite of
links, bind mounts and letter case.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import os
import pwd
import re
import stat
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple, TypeAlias

from forebay import errors
from forebay._kernel import host

VERSION = 1
LARGEST = 1 << 24  # bytes of a record that are read: any user may write one
_GET_FLAGS = 0x80086601  # FS_IOC_GETFLAGS
_CASEFOLD = 0x40000000
_HEAD = struct.Struct("=8sI")  # the kind of file, and the number of marks that follow
_MAGIC = b"claim 1\n"
_ACCESS_LIST = "system.posix_acl_access"
_NOBODY = 65534  # also whoever has no number in this user namespace
_PROCESS = re.compile(r"process \d+")
Level: TypeAlias = tuple[int, int]  # device and inode


# -- directories -------------------------------------------------------------------------------------------------------


class ClaimedPath(NamedTuple):
    """A directory that may not exist yet. ``path``: absolute, links resolved; ``names``: its parts, in lower case where the file
    system ignores case; ``levels``: device and inode of the root and of each part that exists, from the top."""

    path: str
    names: tuple[str, ...]
    levels: tuple[Level, ...]


def canonical(path: str | os.PathLike[str]) -> ClaimedPath:
    """Return the directory that a path means now. Raises OSError for an impossible name."""
    whole = os.path.realpath(os.path.abspath(os.fspath(path)))
    names = tuple(name for name in whole.split("/") if name)
    levels = _levels(names)
    deepest = "/" + "/".join(names[: len(levels) - 1])
    if len(levels) <= len(names) and _ignores_case(deepest):
        names = _folded(names, deepest)
    return ClaimedPath(whole, names, levels)


def _levels(names: tuple[str, ...]) -> tuple[Level, ...]:
    levels, path = list[Level](), "/"
    for name in (*names, ""):
        try:
            status = os.stat(path)
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            break  # the rest is compared by name
        levels.append((status.st_dev, status.st_ino))
        path = os.path.join(path, name)
    return tuple(levels)


def _folded(names: tuple[str, ...], deepest: str) -> tuple[str, ...]:
    """Return the names, in lower case where their directory ignores case. ``deepest``: the last of their directories that exists."""
    parts, folds, path = [], False, "/"
    for name in names:
        if path == "/" or path == deepest or os.path.isdir(path):
            folds = _ignores_case(path)
        parts.append(name.casefold() if folds else name)
        path = os.path.join(path, name)
    return tuple(parts)


def _ignores_case(directory: str) -> bool:
    """Whether names in the directory ignore case: according to its flags, or because its own name does."""
    try:
        fd = host.open_fd(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False  # unreadable: names are compared as they are
    try:
        flags: int = struct.unpack("l", fcntl.ioctl(fd, _GET_FLAGS, bytes(struct.calcsize("l"))))[0]
    except OSError:
        flags = 0  # the file system has no such flags
    finally:
        os.close(fd)
    if flags & _CASEFOLD:
        return True
    parent, name = os.path.split(directory)
    swapped = name.swapcase()
    try:
        return swapped != name and os.path.samefile(directory, os.path.join(parent, swapped))
    except OSError:
        return False


def marks(directories: Iterable[ClaimedPath]) -> frozenset[int]:
    """Return hashes that rule out quickly that directories overlap: of the directories (even), and of what is above them as each
    directory above sees it (odd). Each directory counts as above itself."""
    own, above = set(), set()
    for directory in directories:
        for depth, level in enumerate(directory.levels):
            mark = zlib.crc32(b"%d:%d" % level)
            above.add(mark | 1)
            for name in directory.names[depth:]:
                mark = zlib.crc32(os.fsencode(name) + b"/", mark)
                above.add(mark | 1)
            own.add(mark & ~1)
    return frozenset(own | above)


def opposite(marks: Iterable[int]) -> frozenset[int]:
    """Return the marks of which directories have one that overlap those with these marks."""
    return frozenset(mark ^ 1 for mark in marks)


def overlap(a: ClaimedPath, b: ClaimedPath) -> bool:
    """Whether they are one directory, or one lies inside the other."""
    return any(rest[: len(other)] == other[: len(rest)] for rest, other in _below_common(a, b))


def same(a: ClaimedPath, b: ClaimedPath) -> bool:
    """Whether they are one directory."""
    return any(rest == other for rest, other in _below_common(a, b))


def is_above(a: ClaimedPath, b: ClaimedPath) -> bool:
    """Whether ``b`` lies inside ``a``, and is not the same directory."""
    return not same(a, b) and any(rest == other[: len(rest)] for rest, other in _below_common(a, b))


def may_write(uid: int, directory: ClaimedPath) -> bool:
    """Whether a user may write to a directory, or to the one in which it would be created; True where that cannot be known."""
    path = directory.path
    try:
        while not os.path.exists(path):
            path = os.path.dirname(path)
        status = os.stat(path)
        if uid in (0, _NOBODY, status.st_uid) or status.st_mode & stat.S_IWOTH or _ACCESS_LIST in os.listxattr(path):
            return True
    except OSError as error:
        if error.errno != errno.ENOTSUP:  # a file system without access lists
            return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    try:
        user = pwd.getpwuid(uid)
    except KeyError:
        return True  # its groups are not known here
    return status.st_gid in os.getgrouplist(user.pw_name, user.pw_gid)


def _below_common(a: ClaimedPath, b: ClaimedPath) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return the parts of both paths below each directory that both have in common."""
    if a.levels[-1:] == b.levels[-1:]:
        return [(a.names[len(a.levels) - 1 :], b.names[len(b.levels) - 1 :])]
    depths = {level: depth for depth, level in enumerate(b.levels)}
    return [(a.names[depth:], b.names[depths[level] :]) for depth, level in enumerate(a.levels) if level in depths]


# -- records -----------------------------------------------------------------------------------------------------------


class ClaimedStream(NamedTuple):
    """One directory of a claim. ``remote``: where its files come from, without secrets. ``shared``: the job only reads it."""

    directory: ClaimedPath
    remote: str | None
    shared: bool = False


class ExternalFiles(NamedTuple):
    """Files of a claim outside its directory, which are removed with it. ``marker``: a link to, or a copy of, the marker in the claim's
    directory; the files are removed only if it is still the claim's. ``paths``: the other files."""

    paths: tuple[str, ...]
    marker: str


class Record(NamedTuple):
    """The published description of a claim. The names of the fields are the keys of the file.

    ``job``: its name for people; ``how``: where the job was taken from; ``key``: the name or number of the claim in the job. ``pid``,
    ``space`` (PID namespace), ``ticks`` (its start), ``mounts`` (mount namespace), ``host`` and ``command`` describe the process that
    registered the claim, at ``start`` (seconds since 1970)."""

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
    beside: ExternalFiles | None = None
    version: int = VERSION

    def dump(self) -> bytes:
        """Return the contents of the file: the marks of its directories, which spare other processes parsing the rest, then JSON.
        Raises `ConfigError` if that is more than other processes would read."""
        stored = marks(stream.directory for stream in self.streams)
        text = json.dumps(self._asdict(), separators=(",", ":"), allow_nan=False).encode()
        data = _HEAD.pack(_MAGIC, len(stored)) + array("I", stored).tobytes() + text
        if len(data) > LARGEST:
            raise errors.ConfigError(
                f"the description of {len(self.streams):,} directories takes {len(data):,} bytes, more than the {LARGEST:,} that a claim "
                "may have: claim a directory above them", name="dirs", value=len(self.streams),
            )  # fmt: skip
        return data


def length_of_marks(data: bytes) -> int:
    """Return where the marks end in a record that begins with ``data``."""
    return _HEAD.size + 4 * int.from_bytes(data[_HEAD.size - 4 : _HEAD.size], sys.byteorder)


def may_overlap(data: bytes, sought: frozenset[int]) -> bool:
    """Whether a directory of the record that begins with ``data`` may have one of the marks. False is certain."""
    end = length_of_marks(data)
    if not data.startswith(_MAGIC) or len(data) < end:
        return True
    return not sought.isdisjoint(memoryview(data)[_HEAD.size : end].cast("I"))


def load(data: bytes) -> Record | None:
    """Parse a record; None if it is damaged or of an unknown version."""
    if not data.startswith(_MAGIC):
        return None
    try:
        fields = json.loads(data[length_of_marks(data) :])
        if fields["version"] != VERSION:
            return None
        fields["streams"] = tuple(_stream(*stream) for stream in fields["streams"])
        if fields["beside"] is not None:
            paths, marker = fields["beside"]
            fields["beside"] = ExternalFiles(tuple(map(os.fspath, paths)), os.fspath(marker))
        record = Record(**fields)
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return record if _is_sound(record) else None


def owner(job: str) -> str:
    """Return a job as messages name it."""
    return f"the job of {job}" if _PROCESS.match(job) else f"job {job}"


def _stream(directory: Any, remote: Any, shared: Any) -> ClaimedStream:
    path, names, levels = directory
    if not (isinstance(path, str) and (remote is None or isinstance(remote, str)) and all(isinstance(name, str) for name in names)):
        raise ValueError("not a stream")
    return ClaimedStream(ClaimedPath(path, tuple(names), tuple((int(dev), int(ino)) for dev, ino in levels)), remote, bool(shared))


def _is_sound(record: Record) -> bool:
    texts = (record.job, record.how, record.key, record.host, record.command)
    numbers = (record.prefix, record.uid, record.pid, record.space, record.ticks, record.mounts)
    return (
        all(type(text) is str for text in texts)
        and all(type(number) is int for number in numbers)
        and isinstance(record.start, float | int)
        and (record.world is None or isinstance(record.world, dict))
    )


@functools.cache
def user_name(uid: int) -> str:
    """Return the user's name on this machine; the number if there is none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
