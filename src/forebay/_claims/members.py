"""The processes that have a claim: each holds a kernel lock on a byte of the claim's file, and tells of itself in a mapped table.

A record says ``in`` only after its byte was locked. So a record that says ``in`` while its byte is free is of a process that died, and
one that says ``left`` is of a process that went by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeAlias

from forebay import errors
from forebay._claims import processes
from forebay._claims.passing import passing
from forebay._kernel import host, locks, mappings

log = logging.getLogger("forebay.claims")
OnLeft: TypeAlias = Callable[[Path], None]

SLOTS = 1024
LEADER = 0
"""The slot of who registered the claim. Nobody else ever has it."""
CLAIM, TABLE = "claim", "members"

_WORDS = 8  # of 8 bytes, a record
TABLE_BYTES = SLOTS * _WORDS * 8
_FREE, _IN, _LEFT = range(3)
_STATE, _PID, _SPACE, _START, _RANK, _WORKER, _JOINED = range(7)
_EARLY = 256
_MOMENT = 0.001

Identity: TypeAlias = tuple[int, int, int]
"""Which process of a claim: its slot, pid, and start. It stays the same where a lost lock is taken anew."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process that has, or had, the claim. ``rank`` and ``worker`` as far as it knew them when it joined."""

    slot: int
    pid: int
    space: int  # its PID namespace
    start: int  # clock ticks since the boot
    rank: int | None
    worker: int | None
    joined: float  # seconds since 1970
    state: Literal["in", "left", "vanished"]

    @property
    def identity(self) -> Identity:
        return self.slot, self.pid, self.start

    def describe(self) -> str:
        """In words for people: ``rank 1 (process 123)``."""
        worker = f"worker {self.worker} of " if self.worker is not None else ""
        who = f"process {self.pid}{'' if self._is_visible() else ' of another PID namespace'}"
        return f"{worker}rank {self.rank} ({who})" if self.rank is not None else who

    def is_stopped(self) -> bool:
        """Whether it stands still, by SIGSTOP or in a debugger, as far as can be seen from here."""
        found = processes.status(self.pid) if self._is_visible() else None
        return found is not None and found.start == self.start and found.stopped

    def is_dying(self) -> bool:
        """Whether it is gone, or was killed and has not let go of everything yet, as far as can be seen from here."""
        return self._is_visible() and processes.is_dying(self.pid, self.start)

    def is_alive(self) -> bool:
        """Whether it goes on, as far as can be seen from here."""
        return self._is_visible() and not processes.is_dying(self.pid, self.start)

    def _is_visible(self) -> bool:
        return self.space == processes.pid_space()


class Gone(FileNotFoundError):
    """The claim was freed meanwhile."""


class Table:
    """The records of a claim's members, mapped."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError; `Gone` where the file is not a whole one."""
        fd = os.open(directory / TABLE, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(fd).st_size < TABLE_BYTES:
                raise Gone(f"{directory / TABLE} is cut short")
            self._words = mappings.words(mappings.map_file(fd, TABLE_BYTES, writable=True))
            self._vanished: dict[int, int] = {}  # slot -> when it had joined: so that /proc is asked once
        finally:
            os.close(fd)

    def states(self) -> list[int]:
        return self._words[::_WORDS].tolist()

    def state(self, slot: int) -> int:
        return int(self._words[slot * _WORDS])

    def set_state(self, slot: int, state: int) -> None:
        host.set_word(self._words, slot * _WORDS, state)

    def write(self, slot: int, rank: int | None, worker: int | None) -> Identity:
        """Tell of this process; gives which it is. Caller: has locked the byte of ``slot``."""
        told = (os.getpid(), processes.pid_space(), processes.own_start(), _number(rank), _number(worker), time.time_ns())
        for index, value in enumerate(told, 1):
            host.set_word(self._words, slot * _WORDS + index, value)
        self.set_state(slot, _IN)  # last: until then it is of nobody
        return slot, told[0], told[2]

    def identity(self, slot: int) -> Identity:
        words = self._words
        return slot, words[slot * _WORDS + _PID], words[slot * _WORDS + _START]

    def read(self, slot: int, *, is_locked: bool) -> Member:
        told = self._words[slot * _WORDS : (slot + 1) * _WORDS].tolist()
        pid, space, start, rank, worker, joined = told[_PID : _JOINED + 1]
        seen = (pid, space, start, _known(rank), _known(worker), joined / 1e9)
        if told[_STATE] == _LEFT:
            return Member(slot, *seen, "left")
        if is_locked:
            return Member(slot, *seen, "in")
        gone = Member(slot, *seen, "vanished")
        if self._vanished.get(slot) != joined:
            if gone.is_alive():
                return Member(slot, *seen, "left")  # it became another program (exec), which let go of its lock
            self._vanished[slot] = joined
        return gone

    def members(self, fd: int, own: int = -1) -> list[Member]:
        """All, in order of their slots. ``fd``: of the claim's file, with ``own`` locked through it."""
        told = [slot for slot, state in enumerate(self.states()) if state != _FREE]
        return [self.read(slot, is_locked=slot == own or locks.locked_at(fd, slot) is not None) for slot in told]

    def places(self) -> Iterator[int]:
        """Where a process may go, the best first: over those that vanished, of whom others may still want to know, late."""
        states = self.states()
        for wanted, those in ((_LEFT, range(1, SLOTS)), (_FREE, range(1, _EARLY)), (_IN, range(1, SLOTS)), (_FREE, range(_EARLY, SLOTS))):
            yield from (slot for slot in those if states[slot] == wanted)


def _number(value: int | None) -> int:
    return 0 if value is None else value + 1


def _known(number: int) -> int | None:
    return number - 1 if number else None


class Members:
    """This process among those that have a claim. Callable from any thread.

    A forked child is one of them as soon as `os.fork` returns: its parent locks a byte for it before. One that C code forked
    becomes one at its next call. If the job closes our descriptor, the byte is taken anew at the next call."""

    _mutex: threading.RLock  # guards what follows; held over a fork
    _fd: int  # through which the byte `slot` is locked; -1: it left
    _second: tuple[int, int] | None  # from before_fork on: a child's own description, and the slot that is locked there
    _pid = -1
    identity: Identity
    before: frozenset[Identity]
    """Who had died before this process joined."""

    def __init__(
        self, directory: Path, fd: int, slot: int, rank: int | None, worker: int | None, on_left: OnLeft | None = None
    ) -> None:  # fmt: skip
        """``fd``: of the claim's file, with the byte ``slot`` locked; it belongs to this object from now on. ``on_left`` is called with the
        directory when a process leaves by itself."""
        self.directory, self.rank, self.worker, self._on_left = directory, rank, worker, on_left
        self._mutex, self._second = threading.RLock(), None
        self._table = Table(directory)
        self._settle(fd, slot)
        _present.add(self)
        host.at_fork(self)
        leave_at_exit()

    @classmethod
    def attach(cls, directory: Path, *, rank: int | None = None, worker: int | None = None, on_left: OnLeft | None = None) -> Self:
        """Join those who have the claim. Raises `Gone` where it was freed meanwhile, `NoSpace` where all 1,024 places are taken."""
        fd = passing.take_in(lambda: _open(directory))
        try:
            slot = _lock_a_place(fd, directory, Table(directory))
            return passing.hand_over(fd, lambda fd: cls(directory, fd, slot, rank, worker, on_left))
        finally:
            passing.close(fd)

    def _settle(self, fd: int, slot: int) -> None:
        if self._pid != os.getpid():
            self.before = frozenset(m.identity for m in self._table.members(fd, slot) if m.state == "vanished")
        self._fd, self._file, self._pid, self.slot = fd, locks.file_of(fd), os.getpid(), slot
        self.identity = self._table.write(slot, self.rank, self.worker)

    # -- who is there ----------------------------------------------------------------------------------------------

    def records(self) -> list[Member]:
        """All who have, or had, the claim, until their places are used again; this process too."""
        self.check()
        return self._table.members(self._fd, self.slot)

    def live(self) -> list[Member]:
        """Who has the claim now; this process too."""
        self.check()
        told = [slot for slot, state in enumerate(self._table.states()) if state == _IN]
        return [self._table.read(slot, is_locked=True) for slot in told if slot == self.slot or locks.locked_at(self._fd, slot) is not None]

    def is_in(self, slot: int) -> bool:
        """Whether the one in ``slot`` has the claim now."""
        self.check()
        return self._table.state(slot) == _IN and (slot == self.slot or locks.locked_at(self._fd, slot) is not None)

    def occupant(self, slot: int) -> Identity | None:
        """Who has the claim in this slot now."""
        return self._table.identity(slot) if self.is_in(slot) else None

    def check(self) -> None:
        """Have the lock that makes this process a member: called first by whatever works with a claim. Raises `Closed` after `leave`, or
        where the claim was lost."""
        if self._fd < 0:
            raise errors.Closed.of("claim")
        if self._pid != os.getpid() or locks.file_of(self._fd) != self._file:
            with self._mutex:
                self._come_back_locked()

    def _come_back_locked(self) -> None:
        """After a fork by C code, or where the job closed our descriptor: the number may be another file's by now."""
        forked = self._pid != os.getpid()
        if not forked and locks.file_of(self._fd) == self._file:
            return
        if not forked:
            log.warning("the descriptor of %s was closed by this process's own code: it joins anew", self.directory)
        kept, own = self._fd, None if forked else self.slot
        self._fd = -1
        try:
            fd = _open(self.directory)
            if own is None or not locks.take(fd, own):
                own = _lock_a_place(fd, self.directory, self._table)
        except Gone:
            raise errors.Closed(f"the claim {self.directory} was freed: its lock was lost", what="claim") from None
        self._settle(fd, own)
        if forked:
            os.close(kept)  # only now: until then the parent's lock is ours too

    @property
    def has_left(self) -> bool:
        return self._fd < 0

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Be none of them any more, by will. Does nothing a second time."""
        _present.discard(self)
        with self._mutex:
            fd, self._fd = self._fd, -1
            if fd < 0 or locks.file_of(fd) != self._file:
                return
            is_ours = self._pid == os.getpid()
            if is_ours:
                self._table.set_state(self.slot, _LEFT)
                locks.give_back(fd, self.slot)  # a child that C code forked has this description too
            os.close(fd)
        if is_ours and self._on_left is not None:
            self._on_left(self.directory)

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        leave_at_exit()  # again: `multiprocessing` may have been loaded since
        self._mutex.acquire()
        if self._fd >= 0:
            self._second = self._place_for_child()

    def _place_for_child(self) -> tuple[int, int] | None:
        fd = -1
        try:
            fd = _open(self.directory)
            return fd, _lock_a_place(fd, self.directory, self._table)
        except (OSError, errors.NoSpace) as error:
            log.warning("%s: a forked child joins the claim at its first call only", str(error))
            if fd >= 0:
                os.close(fd)
            return None

    def after_fork_parent(self) -> None:
        second, self._second = self._second, None
        self._mutex.release()
        if second is not None:
            os.close(second[0])  # the child's now; if the fork failed, nobody's

    def after_fork_child(self) -> None:
        second, self._second = self._second, None
        self._mutex = threading.RLock()
        if second is not None and self._pid != os.getpid():
            kept = self._fd
            self._settle(*second)
            os.close(kept)  # never unlocked: that lock is the parent's


def _open(directory: Path) -> int:
    try:
        return host.out_of_the_way(host.open_write(directory / CLAIM))
    except (FileNotFoundError, NotADirectoryError):
        raise Gone(f"{directory} was freed") from None


def _lock_a_place(fd: int, directory: Path, table: Table) -> int:
    """Lock a byte that nobody has; gives its number."""
    for _ in range(100):
        for slot in table.places():
            if locks.take(fd, slot):
                if not is_same(fd, directory):  # who frees it locked all, renamed it, and let go before we came
                    raise Gone(f"{directory} was freed")
                if table.state(slot) == _IN:
                    table.set_state(slot, _LEFT)  # of one that vanished, and must not seem to be back
                return slot
        if not is_same(fd, directory):
            raise Gone(f"{directory} was freed")
        time.sleep(_MOMENT)  # somebody has locked all, to see whether it can be freed
    raise errors.NoSpace(f"{directory}: a claim has places for {SLOTS:,} processes, and all are taken", key=str(directory))


def is_same(fd: int, directory: Path) -> bool:
    """Whether the claim that is open here is the one that has this name."""
    try:
        there = os.stat(directory / CLAIM)
    except OSError:
        return False
    return locks.file_of(fd) == (there.st_dev, there.st_ino)


# -- the end of the process --------------------------------------------------------------------------------------------

_present: set[Members] = set()
"""Held until they leave: what was made of a claim may be in use though nobody refers to the claim."""


def leave_all() -> None:
    """Leave every claim: the process ends by itself."""
    for members in list(_present):
        with contextlib.suppress(OSError):
            members.leave()


class _Exit:
    """To be told that this process ends: by `atexit`, and by `multiprocessing`, whose forked children end without that."""

    is_known = False

    def __call__(self) -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is not None and not self.is_known:
            self.is_known = True
            util.register_after_fork(self, _Exit.tell)  # a child forgets what its parent wanted to be told
            self.tell()

    def tell(self) -> None:
        sys.modules["multiprocessing.util"].Finalize(None, leave_all, exitpriority=-100)


leave_at_exit = _Exit()
atexit.register(leave_all)


class House:
    """What works below a claim gets: where it lies, what it is called, and who is there."""

    def __init__(self, members: Members, name: str) -> None:
        self.members, self.name = members, name

    @property
    def directory(self) -> Path:
        return self.members.directory

    def check(self) -> None:
        """Raises `Closed` after the claim was left."""
        self.members.check()
