"""The names of Streaming's shared memory and lock files on a node, and which of them are in use.

A job of Streaming has a number, under which it has memory in /dev/shm and two lock files in the temporary directory. The block
``locals`` holds its local directories: four bytes with the total length, the paths separated by zero bytes, the number. A length of 0
means that it gave them up. A process that uses a block has it open or mapped for writing, which the kernel shows to every user.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import signal
import struct
import tempfile
from collections.abc import Container, Iterable, Iterator
from pathlib import Path

from forebay._kernel import host
from forebay.adapters.streaming.shared import SHM
from forebay.claims import claim_files
from forebay.claims.claim_files import MARKER

LOCALS = "locals"
MEMORY = (
    LOCALS, "barrier", "next_epoch", "cache_usage", "shard_states", "shard_access_times", "resume", "epoch_shape", "epoch_data",
)  # fmt: skip
LOCK_FILES = ("barrier_filelock", "cache_filelock")
_LONGEST = 4 << 20  # bytes of `locals`: more than a thousand paths of the greatest length
_NAME = re.compile(r"(\d{6,})_(\w+)")
_LENGTH = struct.Struct("=i")
_SET_SIGNAL = 10  # F_SETSIG
_MAPPED = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)")


def name_of(prefix: int, what: str) -> str:
    return f"{prefix:06}_{what}"


def paths_of(prefix: int) -> list[str]:
    """Return all files that a job of this number may have; that of ``locals`` comes first."""
    memory = [f"{SHM}/{name_of(prefix, what)}" for what in MEMORY]
    return memory + [os.path.join(tempfile.gettempdir(), name_of(prefix, what)) for what in LOCK_FILES]


def is_free(prefix: int) -> bool:
    """Whether no file has this number."""
    return not any(map(os.path.lexists, paths_of(prefix)))


def prefixes() -> list[int]:
    """Return the numbers of all existing files."""
    numbers = set()
    for directory, kinds in ((SHM, MEMORY), (tempfile.gettempdir(), LOCK_FILES)):
        matches = map(_NAME.fullmatch, os.listdir(directory))
        numbers |= {int(match[1]) for match in matches if match is not None and match[2] in kinds}
    return sorted(numbers)


def pack(directories: Iterable[str], prefix: int) -> bytes:
    text = "\0".join([*directories, str(prefix)]).encode(errors="surrogateescape")
    return _LENGTH.pack(_LENGTH.size + len(text)) + text


def create_linked(path: str, content: bytes, directory: int) -> None:
    """Create the marker of a claim in its ``directory``, and link it to ``path``; a copy if that is on another file system."""
    claim_files.make_file(directory, MARKER, len(content), content)
    try:
        host.link(MARKER, path, directory)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        fd = host.create_unnamed(Path(path).parent, 0o600)
        try:
            host.allocate(fd, 0, len(content))
            host.pwrite(fd, content, 0)
            host.give_name(fd, path)  # only now: no process would recognise an incomplete copy
        finally:
            os.close(fd)


def unpack(data: bytes) -> list[str]:
    """Return the directories; none if they were given up, or the data are no such block."""
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    return data[_LENGTH.size : max(length, _LENGTH.size)].decode(errors="surrogateescape").split("\0")[:-1]


def give_up(view: memoryview) -> None:
    """Mark the directories in the block as given up."""
    _LENGTH.pack_into(view, 0, 0)


def directories_of_others(ours: Container[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the directories of each job whose number is not in ``ours``, if this user may read them."""
    for name in os.listdir(SHM):
        match = _NAME.fullmatch(name)
        if match is not None and match[2] == LOCALS and int(match[1]) not in ours:
            with contextlib.suppress(OSError):
                yield int(match[1]), unpack(host.read_small(f"{SHM}/{name}", _LONGEST) or b"")


# -- in use ------------------------------------------------------------------------------------------------------------


def is_used(path: str, *, here: bool = True) -> bool:
    """Whether a process may have this file open or mapped for writing; without ``here``, a process other than this one.
    Raises OSError if it is no readable file."""
    fd = host.open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _is_open_nowhere(fd):
            return False
        file = os.fstat(fd)
    finally:
        os.close(fd)
    if here or not _is_mapped(file, "self"):
        return True
    return any(_is_mapped(file, pid) for pid in os.listdir("/proc") if pid.isdecimal() and int(pid) != os.getpid())


def _is_open_nowhere(fd: int) -> bool:
    """Whether the kernel grants a read lease, which it refuses if any process, in any container, has the file open for writing."""
    try:
        fcntl.fcntl(fd, _SET_SIGNAL, signal.SIGURG)  # a process that opens it in between causes a signal: one that does nothing
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False  # it is in use; or this system has no leases, and that cannot be known
    return True


def _is_mapped(file: os.stat_result, pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as maps:
            parts = [match for match in map(_MAPPED.match, maps) if match is not None and int(match[3]) == file.st_ino]
    except OSError:
        return False  # it ended, or belongs to another user, who cannot map our memory
    return any(os.makedev(int(match[1], 16), int(match[2], 16)) == file.st_dev for match in parts)


def remove_unused(ours: Container[int]) -> list[int]:
    """Remove the files that jobs left, except for numbers in ``ours`` and those with a file that another process uses or another user owns.

    Returns the numbers that are free now. The caller prevents that a claim is registered meanwhile."""
    return [prefix for prefix in prefixes() if prefix not in ours and _remove_unused(prefix)]


def _remove_unused(prefix: int) -> bool:
    paths = [path for path in paths_of(prefix) if os.path.lexists(path)]
    try:
        if any(os.lstat(path).st_uid != os.geteuid() or is_used(path, here=False) for path in paths):
            return False
        for path in paths:
            host.unlink(path)
    except OSError:
        return False  # unreadable for this user
    return True
