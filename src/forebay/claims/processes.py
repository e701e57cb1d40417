"""What /proc says of a process. For people, and to tell one that is dying from one that stays; who lives is decided by locks alone."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

_EXITING = 0x4  # PF_EXITING
_KILLED = 1 << 8  # SIGKILL, in a mask of signals


@dataclass(frozen=True, slots=True)
class Status:
    """``state``: the kernel's letter; ``start``: in clock ticks since the boot, so that a number used again is told apart."""

    state: str
    exiting: bool
    start: int
    parent: int

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def read(path: str) -> bytes:
    """A short file of /proc, in a third of the time that `open` takes. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def status(pid: int) -> Status | None:
    """None where there is no such process, or it is not shown to us."""
    try:
        words = read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
        return Status(words[0], bool(int(words[6]) & _EXITING) or words[0] in "ZX", int(words[19]), int(words[1]))
    except (OSError, ValueError, IndexError):
        return None


def is_dying(pid: int, start: int) -> bool:
    """Whether the process that began at ``start`` is gone, or was killed and is on its way."""
    found = status(pid)
    if found is None or found.start != start or found.exiting:
        return True
    try:
        lines = read(f"/proc/{pid}/status").splitlines()
        pending = [int(line.split()[1], 16) for line in lines if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    except (OSError, ValueError, IndexError):
        return True
    return any(mask & _KILLED for mask in pending)


def own_start() -> int:
    """When this process began, in clock ticks since the boot; 0 where /proc is not this machine's."""
    return _start_of(os.getpid())


@functools.lru_cache(1)
def _start_of(pid: int) -> int:
    found = status(pid)
    return found.start if found is not None else 0


def pid_space() -> int:
    """The PID namespace of this process: numbers of processes mean something within it only."""
    return _space_of(os.getpid())


@functools.lru_cache(1)
def _space_of(pid: int) -> int:
    return _inode("/proc/self/ns/pid")


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


def mount_space() -> int:
    """The mount namespace of this process: paths mean something within it only."""
    return _inode("/proc/self/ns/mnt")
