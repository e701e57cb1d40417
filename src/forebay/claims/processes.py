"""What /proc says of a process, the command line of this one, and descriptors with locks that no child may inherit.

/proc is asked for people's sake, and to tell a process that is dying from one that stays; who lives is decided by locks alone."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from forebay._kernel import host, locks

T = TypeVar("T")

_LONGEST_COMMAND = 500
_USER = re.compile(r"://[^/\s@]*@")
_TAKES_VALUE = re.compile("[cmWX]")  # of the letters of Python's own options, which may stand together: -uc
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")
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


def own_command() -> str:
    """The command line of this process, without the values of its arguments: anybody may read it."""
    return _command_of(os.getpid())


@functools.lru_cache(1)
def _command_of(pid: int) -> str:
    try:
        words = read(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        return ""
    return shortened(masked(words), _LONGEST_COMMAND)


def shortened(text: str, longest: int) -> str:
    """A text without its middle where it is too long: of a command, its program and its last arguments tell the most."""
    head, tail = longest // 2, longest - longest // 2 - 3
    return text if len(text) <= longest else f"{text[:head]}...{text[-tail:]}"


def masked(words: list[str]) -> str:
    """A command line that everybody may read: program, script or module, and the names of options. No value is shown, whatever its name:
    ``-p hush`` is a secret as well as ``--token=hush``."""
    program, left = os.path.basename(words[0]) if words else "", iter(words[1:])
    shown = [program]
    if program.startswith(("python", "pypy")):
        shown += _up_to_script(left)
    for word in left:
        if word.startswith("--"):
            name, sign, _ = word.partition("=")
            shown.append(f"{name}=*" if sign else name)
        elif word.startswith("-") and word[1:2].isalpha():
            shown.append(word[:2] if len(word) == 2 else f"{word[:2]}*")
        elif word and shown[-1] != "*":
            shown.append("*")
    return _QUERY.sub(r"\1", _USER.sub("://", " ".join(" ".join(shown).split())))


def _up_to_script(words: Iterator[str]) -> list[str]:
    """The interpreter's own options, without their values, and the script or module. Takes all of that from ``words``."""
    shown: list[str] = []
    for word in words:
        if not word.startswith("-") or word == "-":
            return [*shown, word]
        letter = _TAKES_VALUE.search(word) if not word.startswith("--") else None
        if letter is None:
            name, sign, _ = word.partition("=")
            shown.append(f"{name}=*" if sign else name)
            if word == "--check-hash-based-pycs":
                next(words, None)
            continue
        option, value = word[: letter.end()], word[letter.end() :]
        if letter[0] == "m":
            return [*shown, option, value or next(words, "")]
        shown += [f"{option}*"] if value else [option, "*"]
        if not value:
            next(words, None)
        if letter[0] == "c":
            return shown
    return shown


# -- descriptors that are of one process alone -----------------------------------------------------------------------


class _Passing:
    """What is on its way to who will own it, or is kept for good. Callable from any thread."""

    def __init__(self) -> None:
        self._gate = threading.RLock()  # guards _open; held over a fork, so that none is opened and not yet told of
        self._open: set[int] = set()
        host.at_fork(self)

    def take_in(self, opening: Callable[[], int]) -> int:
        """The descriptor that ``opening`` gives."""
        with self._gate:
            fd = opening()
            self._open.add(fd)
            return fd

    def hand_over(self, fd: int, owning: Callable[[int], T]) -> T:
        """Give it to an owner that knows of forks itself; gives the owner."""
        with self._gate:
            owner = owning(fd)
            self._open.discard(fd)
            return owner

    def close(self, fd: int, *, unlocking: int = 0) -> None:
        """Close it, if this process still has it. ``unlocking``: so many bytes first, for a child that C code forked has it too."""
        with self._gate:
            if fd in self._open:
                self._open.discard(fd)
                with contextlib.suppress(OSError):  # the job closed it
                    if unlocking:
                        locks.give_back(fd, 0, unlocking)
                    os.close(fd)

    def before_fork(self) -> None:
        self._gate.acquire()

    def after_fork_parent(self) -> None:
        self._gate.release()

    def after_fork_child(self) -> None:
        self._gate = threading.RLock()
        for fd in list(self._open):
            self.close(fd)  # never unlocked: the locks are the parent's


passing = _Passing()
