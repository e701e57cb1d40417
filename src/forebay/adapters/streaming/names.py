"""What Streaming calls its things on a node, and which of them are in use.

A job of Streaming has a number, and under it memory in /dev/shm and two lock files in the temporary directory. The piece ``locals``
tells its local directories: four bytes with the length of all, the paths with zero bytes in between, the number. A length of 0 means
that they were given up. A process that uses a piece has it open or mapped to be written, and that the kernel tells, whoever asks.
"""

from __future__ import annotations

import contextlib
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

LOCALS = "locals"
MEMORY = (
    LOCALS, "barrier", "next_epoch", "cache_usage", "shard_states", "shard_access_times", "resume", "epoch_shape", "epoch_data",
)  # fmt: skip
LOCK_FILES = ("barrier_filelock", "cache_filelock")
_NAME = re.compile(r"(\d{6,})_(\w+)")
_LENGTH = struct.Struct("=i")
_SET_SIGNAL = 10  # F_SETSIG
_MAPPED = re.compile(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ ([0-9a-f]+):([0-9a-f]+) (\d+)")


def name_of(prefix: int, what: str) -> str:
    return f"{prefix:06}_{what}"


def paths_of(prefix: int) -> list[str]:
    """All files that a job of this number may have; that of ``locals`` is the first."""
    memory = [f"{SHM}/{name_of(prefix, what)}" for what in MEMORY]
    return memory + [os.path.join(tempfile.gettempdir(), name_of(prefix, what)) for what in LOCK_FILES]


def is_free(prefix: int) -> bool:
    """Whether nothing is called by this number."""
    return not any(map(os.path.lexists, paths_of(prefix)))


def prefixes() -> list[int]:
    """The numbers that anything is called by."""
    found = set()
    for directory, kinds in ((SHM, MEMORY), (tempfile.gettempdir(), LOCK_FILES)):
        matches = map(_NAME.fullmatch, os.listdir(directory))
        found |= {int(match[1]) for match in matches if match is not None and match[2] in kinds}
    return sorted(found)


def pack(directories: Iterable[str], prefix: int) -> bytes:
    text = "\0".join([*directories, str(prefix)]).encode(errors="surrogateescape")
    return _LENGTH.pack(_LENGTH.size + len(text)) + text


def unpack(data: bytes) -> list[str]:
    """The directories; none where they were given up, or where it is no such piece."""
    length = _LENGTH.unpack_from(data)[0] if len(data) >= _LENGTH.size else 0
    return data[_LENGTH.size : max(length, _LENGTH.size)].decode(errors="surrogateescape").split("\0")[:-1]


def give_up(view: memoryview) -> None:
    """Say in the piece that the directories are given up."""
    _LENGTH.pack_into(view, 0, 0)


def directories_of_others(ours: Container[int]) -> Iterator[tuple[str, list[str]]]:
    """The path of ``locals`` and the directories of each job whose number is none of ``ours``; not of those that may not be read."""
    for name in os.listdir(SHM):
        prefix, _, kind = name.partition("_")
        if kind == LOCALS and prefix.isdecimal() and int(prefix) not in ours:
            with contextlib.suppress(OSError):
                yield f"{SHM}/{name}", unpack(Path(SHM, name).read_bytes())


# -- in use ------------------------------------------------------------------------------------------------------------


def is_used(path: str, *, here: bool = True) -> bool:
    """Whether a process may have this file open or mapped to be written; without ``here``, a process other than this one.
    Raises OSError where the file cannot be read, or is none."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _is_open_nowhere(fd):
            return False
        file = os.fstat(fd)
    finally:
        os.close(fd)
    return here or not _is_mapped(file, "self") or any(_is_mapped(file, pid) for pid in _others())


def _is_open_nowhere(fd: int) -> bool:
    """The kernel gives a read lease only on what nobody has open to be written, in whatever container. We give it back at once."""
    try:
        fcntl.fcntl(fd, _SET_SIGNAL, signal.SIGURG)  # who opens it in between has us told: by a signal that does nothing
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False  # it is in use; or this system has no leases, and nobody can know
    return True


def _others() -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _is_mapped(file: os.stat_result, pid: str) -> bool:
    try:
        with open(f"/proc/{pid}/maps") as maps:
            found = map(_MAPPED.match, maps)
            return any(m is not None and _is_file(file, m) for m in found)
    except OSError:
        return False  # gone meanwhile, or another user's: to whom our memory is closed


def _is_file(file: os.stat_result, mapped: re.Match[str]) -> bool:
    return int(mapped[3]) == file.st_ino and os.makedev(int(mapped[1], 16), int(mapped[2], 16)) == file.st_dev


def remove_unused(ours: Container[int]) -> list[int]:
    """Remove what jobs left that had these numbers, but for ``ours`` and for those of which a process other than this one, or another
    user, has anything. Gives the numbers that are free now. Caller: lets nobody register meanwhile."""
    return [prefix for prefix in prefixes() if prefix not in ours and _remove_unused(prefix)]


def _remove_unused(prefix: int) -> bool:
    there = [path for path in paths_of(prefix) if os.path.lexists(path)]
    try:
        if any(os.lstat(path).st_uid != os.geteuid() or is_used(path, here=False) for path in there):
            return False
        for path in there:
            host.unlink(path)
    except OSError:
        return False  # not ours to look at
    return True
