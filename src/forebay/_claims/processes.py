"""What /proc says of a process. For people, and to tell one that is dying from one that stays; who lives is decided by locks alone."""

from __future__ import annotations

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

    @property
    def stopped(self) -> bool:
        return self.state in "Tt"


def status(pid: int) -> Status | None:
    """None where there is no such process, or it is not shown to us."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            words = file.read().rpartition(")")[2].split()
        return Status(words[0], bool(int(words[6]) & _EXITING) or words[0] in "ZX", int(words[19]))
    except (OSError, ValueError, IndexError):
        return None


def is_dying(pid: int, start: int) -> bool:
    """Whether the process that began at ``start`` is gone, or was killed and is on its way."""
    found = status(pid)
    if found is None or found.start != start or found.exiting:
        return True
    try:
        with open(f"/proc/{pid}/status") as file:
            pending = [int(line.split()[1], 16) for line in file if line.startswith(("SigPnd:", "ShdPnd:"))]
    except (OSError, ValueError, IndexError):
        return True
    return any(mask & _KILLED for mask in pending)


def own_start() -> int:
    """When this process began, in clock ticks since the boot; 0 where /proc is not this machine's."""
    found = status(os.getpid())
    return found.start if found is not None else 0


def pid_space() -> int:
    """The PID namespace of this process: numbers of processes mean something within it only."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def mount_space() -> int:
    """The mount namespace of this process: paths mean something within it only."""
    try:
        return os.stat("/proc/self/ns/mnt").st_ino
    except OSError:
        return 0
