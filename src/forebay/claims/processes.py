"""What /proc says about a process, the job and the masked command line of this one, and descriptors that no forked child may keep.

/proc serves messages and tells a dying process from a running one. Only kernel locks decide which process is alive.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from forebay._kernel import host, locks
from forebay._model import exact_str
from forebay.errors import ConfigError
from forebay.world import World, launchers

T = TypeVar("T")

_LONGEST_COMMAND = 500
_USER = re.compile(r"://[^/\s@]*@")
_TAKES_VALUE = re.compile("[cmWX]")  # Python's own one-letter options with a value; letters may be combined: -uc
_QUERY = re.compile(r"(://[^\s?]*)\?\S*")
_EXITING = 0x4  # PF_EXITING
_KILLED = 1 << 8  # SIGKILL in a mask of signals


@dataclass(frozen=True, slots=True)
class Status:
    """``state``: the kernel's letter; ``start``: clock ticks since the boot, which tell processes with a reused number apart."""

    state: str
    exiting: bool
    start: int
    parent: int


def read(path: str) -> bytes:
    """Return a short file of /proc, in a third of the time that `open` takes. Raises OSError."""
    fd = host.open_fd(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def status(pid: int) -> Status | None:
    """Return the status of a process; None if it does not exist or is hidden from this user."""
    try:
        fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].decode().split()
        return Status(fields[0], bool(int(fields[6]) & _EXITING) or fields[0] in "ZX", int(fields[19]), int(fields[1]))
    except (OSError, ValueError, IndexError):
        return None


def is_dying(pid: int, start: int) -> bool:
    """Whether the process that began at ``start`` has ended, or was killed and is about to end."""
    process = status(pid)
    if process is None or process.start != start or process.exiting:
        return True
    try:
        lines = read(f"/proc/{pid}/status").splitlines()
        pending = [int(line.split()[1], 16) for line in lines if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    except (OSError, ValueError, IndexError):
        return True
    return any(mask & _KILLED for mask in pending)


class Own(NamedTuple):
    """What does not change while this process lives. ``start``: clock ticks since the boot; 0 if /proc is not this machine's. ``space``:
    the PID namespace, in which alone process numbers are valid. ``command``: the command line without the values of its arguments, since
    every user may read it."""

    start: int
    space: int
    command: str


def own() -> Own:
    """Return what does not change while this process lives."""
    return _own(os.getpid())


@functools.lru_cache(1)
def _own(pid: int) -> Own:
    process = status(pid)
    try:
        words = read(f"/proc/{pid}/cmdline").rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        words = []
    return Own(process.start if process is not None else 0, _inode("/proc/self/ns/pid"), shortened(masked(words), _LONGEST_COMMAND))


def mount_space() -> int:
    """Return the mount namespace of this process: paths are valid only within it."""
    return _inode("/proc/self/ns/mnt")


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except OSError:
        return 0


# -- jobs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class JobId:
    """``id``: equal in all processes of the job on this node, and different in every other job; ``name``: a shorter form for messages.
    ``how``: where both were taken from."""

    id: str
    name: str
    how: str


def identify(job: str | None, world: World) -> JobId:
    """Return the job of this process, whose rank is given by ``world``: ``job`` if it is given, else the launcher's job, else the process
    that started its ranks. Raises `ConfigError` if ``job`` is no name.

    The job of a rank that is alone on its node is its process, whatever its launcher says, since it shares nothing with others. So a
    step of SLURM may run two programs side by side. Several nodes on one machine, as in tests, have a job each."""
    name = exact_str(job)
    if job is not None and not name:
        raise ConfigError(f"job={job!r}: must be a name, the same in all ranks of the job", name="job", value=repr(job))
    if name is not None:
        identified = JobId(name, name, "job=")
    else:
        identified = (_launched(world) if world.ranks_per_node > 1 else None) or _by_process(world)
    if not world.is_multinode:
        return identified
    return JobId(f"{identified.id}, node {world.node}", f"{identified.name}, node {world.node}", identified.how)


def _launched(world: World) -> JobId | None:
    """Return the job of the launcher that started these ranks. A launcher with another number of ranks started an outer program."""
    for read_launcher in launchers.SOURCES:
        try:
            info = read_launcher()
        except ConfigError:
            continue  # contradictory variables name no job; the world was given explicitly then
        if info is not None and info.job is not None and info.num_ranks == world.num_ranks:
            return JobId(info.job, info.name, info.how)
    address = launchers.address()
    return JobId(f"master {address}", address, "MASTER_ADDR and MASTER_PORT") if address else None


def _by_process(world: World) -> JobId:
    """Return a job named by the process that is the only rank here, or by the one that started the ranks."""
    rank = os.getpid()
    if launchers.worker() is not None:  # its rank is the process that made the DataLoader, which a fork server would hide
        parent = sys.modules["multiprocessing.process"].parent_process()
        rank = os.getppid() if parent is None else parent.pid
    if world.ranks_per_node == 1:
        return JobId(_process_id(rank), f"process {rank}", "this process, the only rank here")
    process = status(rank)
    starter = process.parent if process is not None else 0
    return JobId(_process_id(starter), f"process {starter}", "the process that started this one")


def _process_id(pid: int) -> str:
    """Identify a process among all that ever have its number."""
    process = status(pid)
    return f"process {pid} {process.start if process is not None else 0} {own().space}"


# -- command lines -----------------------------------------------------------------------------------------------------


def shortened(text: str, longest: int) -> str:
    """Cut the middle out of a text that is too long: the program and the last arguments say most about a command."""
    head, tail = longest // 2, longest - longest // 2 - 3
    return text if len(text) <= longest else f"{text[:head]}...{text[-tail:]}"


def masked(words: list[str]) -> str:
    """Reduce a command line to the program, the script or module, and the names of options.

    All values are hidden, whatever their option is called: ``-p hush`` is as secret as ``--token=hush``."""
    program, rest = os.path.basename(words[0]) if words else "", iter(words[1:])
    shown = [program]
    if program.startswith(("python", "pypy")):
        shown += _interpreter_options(rest)
    for word in rest:
        if word.startswith("--"):
            name, sign, _ = word.partition("=")
            shown.append(f"{name}=*" if sign else name)
        elif word.startswith("-") and word[1:2].isalpha():
            shown.append(word[:2] if len(word) == 2 else f"{word[:2]}*")
        elif word and shown[-1] != "*":
            shown.append("*")
    return _QUERY.sub(r"\1", _USER.sub("://", " ".join(" ".join(shown).split())))


def _interpreter_options(words: Iterator[str]) -> list[str]:
    """Consume the interpreter's own options, whose values are hidden, and the script or module."""
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


# -- descriptors that belong to one process ----------------------------------------------------------------------------


class InheritedFds:
    """Descriptors with locks that a forked child closes: otherwise the locks would outlive the parent.

    Keeps a descriptor until an object that handles forks itself takes it over, or until it is closed. Callable from any thread."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()  # guards _open; held over a fork, so that every open descriptor is registered
        self._open: set[int] = set()
        host.at_fork(self)

    def register(self, opening: Callable[[], int]) -> int:
        """Return the descriptor that ``opening`` returns, and close it in forked children from now on."""
        with self._mutex:
            fd = opening()
            self._open.add(fd)
            return fd

    def hand_over(self, fd: int, owner_of: Callable[[int], T]) -> T:
        """Return the owner that ``owner_of`` makes for the descriptor; it handles forks from now on."""
        with self._mutex:
            owner = owner_of(fd)
            self._open.discard(fd)
            return owner

    def close(self, fd: int, *, unlocking: int = 0) -> None:
        """Close the descriptor if this process still owns it. ``unlocking``: the number of bytes to unlock first, because a child
        forked by C code shares the locks."""
        with self._mutex:
            if fd in self._open:
                self._open.discard(fd)
                with contextlib.suppress(OSError):  # the program closed it
                    if unlocking:
                        locks.give_back(fd, 0, unlocking)
                    os.close(fd)

    def before_fork(self) -> None:
        self._mutex.acquire()

    def after_fork_parent(self) -> None:
        self._mutex.release()

    def after_fork_child(self) -> None:
        self._mutex = threading.RLock()
        for fd in list(self._open):
            self.close(fd)  # never unlocked: the locks are the parent's


inherited_fds = InheritedFds()
