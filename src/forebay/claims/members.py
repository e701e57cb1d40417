"""The processes that have a claim: each holds a kernel lock on a byte of the claim's file, and tells of itself in a mapped table.

A record says ``in`` only after its byte was locked. So a record that says ``in`` while its byte is free is of a process that died, and
one that says ``left`` is of a process that went by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from forebay import errors
from forebay._kernel import host, locks, mappings
from forebay._logs import logger
from forebay.claims import claim_files, processes
from forebay.claims.claim_files import CLAIM, LEADER, SLOTS, TABLE, TABLE_BYTES, Gone
from forebay.claims.processes import passing

log = logger("forebay.claims")


_WORDS = 8  # of 8 bytes, a record
FREE, IN, LEFT = range(3)
_PID, _START = 0, 2
_TOLD = 7  # words: pid, PID namespace, start, rank, worker, when it joined, depth

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
    joined: float  # seconds of the monotonic clock
    depth: int  # 0; of a child of a member one more
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


class MemberTable:
    """The records of a claim's members, mapped: a byte each for their states, then what they tell."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError; `Gone` where the file is another user's, or not a whole one."""
        fd = claim_files.open_write(directory, TABLE)
        try:
            if os.fstat(fd).st_size < TABLE_BYTES:
                raise Gone(f"{directory / TABLE} is cut short")
            whole = mappings.map_file(fd, TABLE_BYTES, writable=True)
            self._states, self._words = whole[:SLOTS], mappings.words(whole[SLOTS:])
            self._vanished: dict[int, int] = {}  # slot -> when it had joined: so that /proc is asked once
        finally:
            os.close(fd)

    def states(self) -> bytes:
        """Of all that were ever used, in order of the slots."""
        return self._states.tobytes().rstrip(b"\0")

    def state(self, slot: int) -> int:
        return self._states[slot]

    def set_state(self, slot: int, state: int) -> None:
        host.set_byte(self._states, slot, state)

    def write(self, slot: int, rank: int | None, worker: int | None, depth: int) -> Identity:
        """Tell of this process; gives which it is. Caller: has locked the byte of ``slot``."""
        told = (os.getpid(), processes.pid_space(), processes.own_start(), _number(rank), _number(worker), time.monotonic_ns(), depth)
        host.step("set_words", slot)
        self._words[slot * _WORDS : slot * _WORDS + _TOLD] = memoryview(array("Q", told))
        self.set_state(slot, IN)  # last: until then it is of nobody
        return slot, told[0], told[2]

    def identity(self, slot: int) -> Identity:
        words = self._words
        return slot, words[slot * _WORDS + _PID], words[slot * _WORDS + _START]

    def read(self, slot: int, *, is_locked: bool) -> Member:
        pid, space, start, rank, worker, joined, depth = self._words[slot * _WORDS : slot * _WORDS + _TOLD].tolist()
        seen = (pid, space, start, _known(rank), _known(worker), joined / 1e9, depth)
        if self._states[slot] == LEFT:
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
        told = [slot for slot, state in enumerate(self.states()) if state != FREE]
        return [self.read(slot, is_locked=slot == own or locks.locked_at(fd, slot) is not None) for slot in told]

    def places(self) -> Iterator[int]:
        """Where a process may go, the best first: over those that vanished, of whom others may still want to know, last."""
        states = self._states.tobytes()
        for wanted in (LEFT, FREE, IN):
            at = states.find(wanted, LEADER + 1)
            while at >= 0:
                yield at
                at = states.find(wanted, at + 1)

    def is_full(self) -> bool:
        """Whether nobody left, and every place was used."""
        states = self._states.tobytes()[LEADER + 1 :]
        return FREE not in states and LEFT not in states


def _number(value: int | None) -> int:
    return 0 if value is None else value + 1


def _known(number: int) -> int | None:
    return number - 1 if number else None


OnLeft: TypeAlias = Callable[[Path], None]

_MOMENT, _TURNS = 0.001, 100


class Members:
    """This process among those that have a claim. Callable from any thread.

    A forked child is one of them as soon as `os.fork` returns: its parent locks a byte for it before. One that C code forked
    becomes one at its next call. If the job closes our descriptor, the byte is taken anew at the next call."""

    _mutex: threading.RLock  # guards what follows; held over a fork
    _fd: int  # through which the byte `slot` is locked; -1: it left, or is a child that found no place yet
    _second: tuple[int, int] | None  # from before_fork on: a child's own description, and the slot that is locked there
    _dead_before_fork: frozenset[Identity]
    _leaves = False  # since `leave_soon`, which could not
    has_left = False
    _pid = -1
    identity: Identity
    before: frozenset[Identity]
    """Who had died before this process joined."""
    depth = 0

    def __init__(
        self, directory: Path, fd: int, slot: int, rank: int | None, worker: int | None, on_left: OnLeft | None = None
    ) -> None:  # fmt: skip
        """``fd``: of the claim's file, with the byte ``slot`` locked; it belongs to this object from now on. ``on_left`` is called with the
        directory when a process leaves by itself."""
        self.directory, self.rank, self.worker, self._on_left = directory, rank, worker, on_left
        self._mutex, self._second = threading.RLock(), None
        self._table = MemberTable(directory)
        self._settle(fd, slot)
        _present.add(self)
        host.at_fork(self)
        leave_at_exit()

    @classmethod
    def attach(cls, directory: Path, *, rank: int | None = None, worker: int | None = None, on_left: OnLeft | None = None) -> Self:
        """Join those who have the claim. Raises `Gone` where it was freed meanwhile, or is another user's, `NoSpace` where all 1,024
        places are taken."""
        fd = passing.take_in(lambda: _open(directory))
        try:
            slot = _lock_a_place(fd, directory, MemberTable(directory))
            return passing.hand_over(fd, lambda fd: cls(directory, fd, slot, rank, worker, on_left))
        finally:
            passing.close(fd)

    def _settle(self, fd: int, slot: int, before: frozenset[Identity] | None = None) -> None:
        if self._pid != os.getpid():
            self.before = self._dead(fd, slot) if before is None else before
            self.depth = self._depth(fd, slot)
        self._fd, self._file, self._pid, self.slot = fd, locks.file_of(fd), os.getpid(), slot
        self.identity = self._table.write(slot, self.rank, self.worker, self.depth)

    def _dead(self, fd: int, slot: int) -> frozenset[Identity]:
        return frozenset(member.identity for member in self._table.members(fd, slot) if member.state == "vanished")

    def _depth(self, fd: int, slot: int) -> int:
        """How many members stand above this process: its parent, if it is one, and those above that."""
        if self._pid >= 0:
            return self.depth + 1  # forked: the parent may be gone by now
        above = [member.depth for member in self._table.members(fd, slot) if member.pid == os.getppid() and member.state == "in"]
        return above[0] + 1 if above else 0

    # -- who is there ----------------------------------------------------------------------------------------------

    def records(self) -> list[Member]:
        """All who have, or had, the claim, until their places are used again; this process too."""
        self.check()
        return self._table.members(self._fd, self.slot)

    def live(self) -> list[Member]:
        """Who has the claim now; this process too."""
        self.check()
        told = [slot for slot, state in enumerate(self._table.states()) if state == IN]
        return [self._table.read(slot, is_locked=True) for slot in told if slot == self.slot or locks.locked_at(self._fd, slot) is not None]

    def is_in(self, slot: int) -> bool:
        """Whether the one in ``slot`` has the claim now."""
        self.check()
        return self._table.state(slot) == IN and (slot == self.slot or locks.locked_at(self._fd, slot) is not None)

    def occupant(self, slot: int) -> Identity | None:
        """Who has the claim in this slot now."""
        return self._table.identity(slot) if self.is_in(slot) else None

    def check(self) -> None:
        """Have the lock that makes this process a member: called first by whatever works with a claim. Raises `Closed` after `leave`, or
        where the claim was lost, `NoSpace` in a child that found no place."""
        if self.has_left:
            raise errors.Closed.of("claim")
        if self._pid != os.getpid() or locks.file_of(self._fd) != self._file:
            with self._mutex:
                self._come_back_locked()
            self._leave_if_asked()

    def _come_back_locked(self) -> None:
        """After a fork by C code, or where the job closed our descriptor: the number may be another file's by now."""
        forked = self._pid != os.getpid()
        if not forked and locks.file_of(self._fd) == self._file:
            return
        if not forked:
            log.warning("the descriptor of %s was closed by this process's own code: it joins anew", self.directory)
        kept, file, fd = self._fd, self._file, -1
        try:
            fd = _open(self.directory)
            slot = self.slot if not forked and locks.take(fd, self.slot) else _lock_a_place(fd, self.directory, self._table)
            self._settle(fd, slot)
        except Gone:
            raise errors.Closed(f"the claim {self.directory} was freed: its lock was lost", what="claim") from None
        finally:
            if self._fd != fd:  # it did not come so far: the next call tries again
                self._fd = -1
                if fd >= 0:
                    os.close(fd)
            if kept not in (self._fd, fd) and kept >= 0 and locks.file_of(kept) == file:
                os.close(kept)  # the parent's, never unlocked; only now: until then its lock was ours too

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Be none of them any more, by will. Does nothing a second time."""
        _present.discard(self)
        with self._mutex:
            self._leaves, self.has_left = False, True
            fd, self._fd = self._fd, -1
            if fd < 0:
                return
            is_ours, is_lost = self._pid == os.getpid(), locks.file_of(fd) != self._file
            if is_ours and self._table.identity(self.slot) == self.identity:
                self._table.set_state(self.slot, LEFT)
            if not is_lost:
                if is_ours:
                    locks.give_back(fd, self.slot)  # a child that C code forked has this description too
                os.close(fd)
        if is_ours and self._on_left is not None:
            self._on_left(self.directory)

    def leave_soon(self) -> None:
        """Leave without ever waiting: for finalizers, which may run inside anything. At once, unless something here is in progress."""
        self._leaves = True
        self._leave_if_asked()

    def _leave_if_asked(self) -> None:
        if self._leaves and self._mutex.acquire(blocking=False):
            try:
                self.leave()
            finally:
                self._mutex.release()

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        leave_at_exit()  # again: `multiprocessing` may have been loaded since
        self._mutex.acquire()
        if self._fd >= 0:
            self._second = self._place_for_child()
            self._dead_before_fork = self._dead(self._fd, self.slot)  # not later: the child is there as soon as it is forked

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
        self._leave_if_asked()

    def after_fork_child(self) -> None:
        second, self._second = self._second, None
        self._mutex = threading.RLock()
        if self.has_left or self._pid == os.getpid():
            return
        if second is None:
            self._come_back_quietly()
            return
        kept = self._fd
        self._settle(*second, self._dead_before_fork)
        os.close(kept)  # never unlocked: that lock is the parent's
        self._leave_if_asked()

    def _come_back_quietly(self) -> None:
        with contextlib.suppress(OSError, errors.ForebayError):  # the first call says what is wrong
            self._come_back_locked()


def _open(directory: Path) -> int:
    return host.out_of_the_way(claim_files.open_write(directory, CLAIM))


def _lock_a_place(fd: int, directory: Path, table: MemberTable) -> int:
    """Lock a byte that nobody has; gives its number."""
    for turn in range(_TURNS):
        for slot in table.places():
            if locks.take(fd, slot):
                if not is_same(fd, directory):  # who frees it locked all, renamed it, and let go before we came
                    raise Gone(f"{directory} was freed")
                if table.state(slot) == IN:
                    table.set_state(slot, LEFT)  # of one that vanished, and must not seem to be back
                return slot
        if not is_same(fd, directory):
            raise Gone(f"{directory} was freed")
        if turn > 0 and table.is_full():
            break
        time.sleep(_MOMENT)  # somebody has locked all, to see whether it can be freed
    raise errors.NoSpace(f"{directory}: a claim has {SLOTS:,} places, one for each process, and all are taken", key=str(directory))


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


at_the_end: list[Callable[[], None]] = []
"""What else is to be done then."""


def leave_all() -> None:
    """Leave every claim: the process ends by itself."""
    for leave in [*(members.leave for members in _present), *at_the_end]:
        with contextlib.suppress(OSError):
            leave()


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


class ClaimContext:
    """What works below a claim gets: where it lies, what it is called, and who is there. ``parts``: what that keeps of it here.

    It goes to other processes with its claim, which has it as ``_house``."""

    def __init__(self, members: Members, name: str, claim: object = None) -> None:
        self.members, self.name, self.parts = members, name, dict[Any, Any]()
        self._claim = claim

    def __reduce__(self) -> tuple[Any, ...]:
        return _house_of, (self._claim,)

    @property
    def directory(self) -> Path:
        return self.members.directory

    def check(self) -> None:
        """Raises `Closed` after the claim was left."""
        self.members.check()

    def lost(self) -> errors.Closed:
        """What to raise where its files are missing while it lives."""
        return errors.Closed(f"{self.name} is lost: somebody removed {self.directory}", what="claim")


def _house_of(claim: Any) -> Any:
    return claim._house
