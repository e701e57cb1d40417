"""The processes that have a claim: each locks a byte of the claim's file and describes itself in a mapped table.

An entry of the table says ``in`` only after its byte was locked. So an entry that says ``in`` while its byte is free belongs to a
process that died, and one that says ``left`` to a process that left in order.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
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
from forebay._kernel import fences, host, interrupts, locks, mappings
from forebay._logs import logger
from forebay.claims import claim_files, processes, records
from forebay.claims.claim_files import CLAIM, LEADER, SLOTS, TABLE, TABLE_BYTES, Gone
from forebay.claims.processes import inherited_fds
from forebay.claims.records import Record

log = logger("forebay.claims")

_WORDS = 8  # of 8 bytes, an entry of the table
FREE, IN, LEFT = range(3)
_PID, _START = 0, 2
_USED_WORDS = 6  # pid, PID namespace, start, rank (from 1 on; 0: unknown), when it joined, depth
_RETRY_PAUSE, _RETRIES = 0.001, 100

Identity: TypeAlias = tuple[int, int, int]
"""A process of a claim: its slot, pid, and start. It stays the same if a lost lock is taken again."""
OnLeft: TypeAlias = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Member:
    """A process that has, or had, the claim. ``rank``: as far as it knew it when it joined."""

    slot: int
    pid: int
    space: int  # its PID namespace
    start: int  # clock ticks since the boot
    rank: int | None
    joined: float  # seconds of the monotonic clock
    depth: int  # 0; one more than its parent's for a child of a member
    state: Literal["in", "left", "vanished"]

    @property
    def identity(self) -> Identity:
        return self.slot, self.pid, self.start

    def describe(self) -> str:
        """Return the process as messages name it: ``rank 1 (process 123)``."""
        process = f"process {self.pid}{'' if self._is_visible() else ' of another PID namespace'}"
        return f"rank {self.rank} ({process})" if self.rank is not None else process

    def describe_with_state(self) -> str:
        """The same, with a note if the process is stopped, by SIGSTOP or in a debugger, as far as this process can see."""
        text, process = self.describe(), processes.status(self.pid) if self._is_visible() else None
        if process is None or process.start != self.start or process.state not in "Tt":
            return text
        return f"{text[:-1]}, stopped)" if text.endswith(")") else f"{text} (stopped)"

    def is_dying(self) -> bool:
        """Whether it ended, or was killed and still holds something, as far as this process can see."""
        return self._is_visible() and processes.is_dying(self.pid, self.start)

    def is_alive(self) -> bool:
        """Whether it is running, as far as this process can see."""
        return self._is_visible() and not processes.is_dying(self.pid, self.start)

    def _is_visible(self) -> bool:
        return self.space == processes.own().space


class MemberTable:
    """The mapped table of a claim's members: a byte each for their states, then their entries."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError; `Gone` if the file is another user's, or too short."""
        fd = claim_files.open_write(directory / TABLE)
        try:
            if os.fstat(fd).st_size < TABLE_BYTES:
                raise Gone(f"{directory / TABLE} is cut short")
            view = mappings.map_file(fd, TABLE_BYTES, writable=True)
            self._states, self._words = view[:SLOTS], mappings.words(view[SLOTS:])
            self._vanished: dict[int, int] = {}  # slot -> when its process had joined: /proc is asked once
        finally:
            os.close(fd)

    def states(self) -> bytes:
        """Return the state of each slot up to the last that was ever used."""
        return self._states.tobytes().rstrip(b"\0")

    def state(self, slot: int) -> int:
        return self._states[slot]

    def set_state(self, slot: int, state: int) -> None:
        host.set_byte(self._states, slot, state)

    def write(self, slot: int, rank: int | None, depth: int) -> Identity:
        """Write the entry of this process and return its identity. The caller has locked the byte of ``slot``."""
        own, pid = processes.own(), os.getpid()
        entry = (pid, own.space, own.start, 0 if rank is None else rank + 1, time.monotonic_ns(), depth)
        host.step("set_words", slot)
        self._words[slot * _WORDS : slot * _WORDS + _USED_WORDS] = memoryview(array("Q", entry))
        fences.fence()
        self.set_state(slot, IN)  # last: until then the entry belongs to no process
        return slot, pid, own.start

    def identity(self, slot: int) -> Identity:
        words = self._words
        return slot, words[slot * _WORDS + _PID], words[slot * _WORDS + _START]

    def read(self, slot: int, *, is_locked: bool) -> Member:
        pid, space, start, number, joined, depth = self._words[slot * _WORDS : slot * _WORDS + _USED_WORDS].tolist()

        def member(state: Literal["in", "left", "vanished"]) -> Member:
            return Member(slot, pid, space, start, number - 1 if number else None, joined / 1e9, depth, state)

        if self._states[slot] == LEFT:
            return member("left")
        if is_locked:
            return member("in")
        vanished = member("vanished")
        if self._vanished.get(slot) != joined:
            if vanished.is_alive():
                return member("left")  # it became another program (exec), which dropped its lock
            self._vanished[slot] = joined
        return vanished

    def members(self, fd: int, own: int = -1) -> list[Member]:
        """Return all members in order of their slots. ``fd``: of the claim's file, with ``own`` locked through it."""
        used = [slot for slot, state in enumerate(self.states()) if state != FREE]
        return [self.read(slot, is_locked=slot == own or locks.locked_at(fd, slot) is not None) for slot in used]

    def slots_to_try(self) -> Iterator[int]:
        """Yield slots that a process may take, the best first. Slots of vanished processes, whose deaths others may not have noticed
        yet, come last."""
        states = self._states.tobytes()
        for state in (LEFT, FREE, IN):
            slot = states.find(state, LEADER + 1)
            while slot >= 0:
                yield slot
                slot = states.find(state, slot + 1)

    def is_full(self) -> bool:
        """Whether every slot was used and no process left in order."""
        states = self._states.tobytes()[LEADER + 1 :]
        return FREE not in states and LEFT not in states


# -- membership --------------------------------------------------------------------------------------------------------


class Members:
    """The membership of this process in a claim, and the other members. Callable from any thread.

    ``record``: what the claim publishes about itself; ``name``: the claim as messages name it; ``parts``: what this process has made for
    its locks, memory and barriers. Members are pickled together with their `Claim`, once it has set ``claim``.

    A forked child is a member as soon as `os.fork` returns: its parent locks a byte for it before the fork. A child forked by C code
    becomes one at its next call. If the program closes the descriptor, the byte is locked again at the next call."""

    _mutex: threading.RLock  # guards what follows; held over a fork
    _fd: int  # holds the lock on the byte `slot`; -1: this process left, or is a child without a slot yet
    _for_child: tuple[int, int] | None  # from before_fork on: a description for the child, and the slot locked through it
    _dead_before_fork: frozenset[Identity]
    _leaves = False  # `leave_soon` was called, and could not leave
    has_left = False
    _pid = -1
    identity: Identity
    dead_before: frozenset[Identity]
    """The members that had died before this process joined."""
    depth = 0
    claim: Any = None

    def __init__(self, directory: Path, fd: int, slot: int, record: Record, rank: int | None = None, on_left: OnLeft | None = None) -> None:
        """``fd``: of the claim's file, with the byte ``slot`` locked; this object owns it from now on. ``on_left`` is called with the
        directory when a process leaves in order."""
        self.directory, self.record, self.rank, self._on_left = directory, record, rank, on_left
        self.name, self.parts = f"claim {record.prefix:06} of {records.owner(record.job)}", dict[Any, Any]()
        self._mutex, self._for_child = threading.RLock(), None
        self._table = MemberTable(directory)
        self._take_slot(fd, slot)
        _memberships.add(self)
        host.at_fork(self)
        leave_at_exit()

    @classmethod
    def attach(cls, directory: Path, *, rank: int | None = None, on_left: OnLeft | None = None) -> Self:
        """Join the processes that have the claim. Raises `Gone` if it was freed meanwhile, belongs to another user, or is damaged;
        `NoSpace` if all 1,024 slots are taken."""
        fd = inherited_fds.register(lambda: _open(directory))
        try:
            slot = _lock_slot(fd, directory, MemberTable(directory))
            record = records.load(claim_files.read(fd))
            if record is None:
                raise Gone(f"{directory / CLAIM} is damaged")
            return inherited_fds.hand_over(fd, lambda fd: cls(directory, fd, slot, record, rank, on_left))
        finally:
            inherited_fds.close(fd)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.claim, "_members")

    def _take_slot(self, fd: int, slot: int, dead_before: frozenset[Identity] | None = None) -> None:
        if self._pid != os.getpid():
            self.dead_before = self._dead(fd, slot) if dead_before is None else dead_before
            self.depth = self._depth(fd, slot)
        self._fd, self._file, self._pid, self.slot = fd, locks.file_of(fd), os.getpid(), slot
        self.identity = self._table.write(slot, self.rank, self.depth)

    def _dead(self, fd: int, slot: int) -> frozenset[Identity]:
        return frozenset(member.identity for member in self._table.members(fd, slot) if member.state == "vanished")

    def _depth(self, fd: int, slot: int) -> int:
        """Return how many of this process's ancestors are members."""
        if self._pid >= 0:
            return self.depth + 1  # forked: the parent may have ended
        parents = [member.depth for member in self._table.members(fd, slot) if member.pid == os.getppid() and member.state == "in"]
        return parents[0] + 1 if parents else 0

    # -- members ---------------------------------------------------------------------------------------------------

    def everyone(self) -> list[Member]:
        """Return all processes that have, or had, the claim, until their slots are used again; this process too."""
        self.check()
        return self._table.members(self._fd, self.slot)

    def live(self) -> list[Member]:
        """Return the processes that have the claim now; this process too."""
        return [member for member in self.everyone() if member.state == "in"]

    def is_in(self, slot: int) -> bool:
        """Whether the process in ``slot`` has the claim now."""
        self.check()
        return self._table.state(slot) == IN and (slot == self.slot or locks.locked_at(self._fd, slot) is not None)

    def occupant(self, slot: int) -> Identity | None:
        """Return the process that has the claim in this slot now."""
        return self._table.identity(slot) if self.is_in(slot) else None

    def check(self) -> None:
        """Make sure that this process holds its lock. Everything that uses a claim calls this first.

        Raises `Closed` after `leave`, or if the claim was lost, `NoSpace` in a child that gets no slot."""
        if self.has_left:
            raise errors.Closed.of("claim")
        if self._pid != os.getpid() or locks.file_of(self._fd) != self._file:
            with self._mutex:
                self._rejoin_locked()
            self._leave_if_asked()

    def _rejoin_locked(self) -> None:
        """Join again after a fork by C code, or if the program closed the descriptor, whose number may be another file's by now."""
        forked = self._pid != os.getpid()
        if not forked and locks.file_of(self._fd) == self._file:
            return
        if not forked:
            log.warning("the descriptor of %s was closed by this process's own code: joining again", self.directory)
        old_fd, old_file, fd = self._fd, self._file, -1
        try:
            fd = _open(self.directory)
            slot = self.slot if not forked and locks.take(fd, self.slot) else _lock_slot(fd, self.directory, self._table)
            self._take_slot(fd, slot)
        except Gone:
            raise errors.Closed(f"the claim {self.directory} was freed: its lock was lost", what="claim") from None
        finally:
            if self._fd != fd:  # it failed: the next call tries again
                self._fd = -1
                if fd >= 0:
                    os.close(fd)
            if old_fd not in (self._fd, fd) and old_fd >= 0 and locks.file_of(old_fd) == old_file:
                os.close(old_fd)  # the parent's, never unlocked; only now: until here its lock was also ours

    def lost(self) -> errors.Closed:
        """Return the error for missing files of a live claim."""
        return errors.Closed(f"{self.name} is lost: its directory {self.directory} was removed", what="claim")

    # -- leaving ---------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Give up membership. Does nothing the second time."""
        _memberships.discard(self)
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
                    locks.give_back(fd, self.slot)  # a child forked by C code shares this description
                os.close(fd)
        if is_ours and self._on_left is not None:
            self._on_left(self.directory)

    def leave_soon(self) -> None:
        """Leave without ever waiting, for finalizers, which may run inside anything: at once, or when the call in progress ends."""
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
        leave_at_exit()  # again: `multiprocessing` may have been imported since
        self._mutex.acquire()
        if self._fd >= 0:
            self._for_child = self._reserve_slot()
            self._dead_before_fork = self._dead(self._fd, self.slot)  # not later: the child is a member as soon as it is forked

    def _reserve_slot(self) -> tuple[int, int] | None:
        fd = -1
        try:
            fd = _open(self.directory)
            return fd, _lock_slot(fd, self.directory, self._table)
        except (OSError, errors.NoSpace) as error:
            log.warning("%s: a forked child joins the claim only at its first call", str(error))
            if fd >= 0:
                os.close(fd)
            return None

    def after_fork_parent(self) -> None:
        reserved, self._for_child = self._for_child, None
        self._mutex.release()
        if reserved is not None:
            os.close(reserved[0])  # now the child's; nobody's if the fork failed
        self._leave_if_asked()

    def after_fork_child(self) -> None:
        reserved, self._for_child = self._for_child, None
        self._mutex = threading.RLock()
        if self.has_left or self._pid == os.getpid():
            return
        if reserved is None:
            with contextlib.suppress(OSError, errors.ForebayError):  # the first call reports what is wrong
                self._rejoin_locked()
            return
        parents_fd = self._fd
        self._take_slot(*reserved, self._dead_before_fork)
        os.close(parents_fd)  # never unlocked: that lock is the parent's
        self._leave_if_asked()


def _open(directory: Path) -> int:
    return host.out_of_the_way(claim_files.open_write(directory / CLAIM))


def _lock_slot(fd: int, directory: Path, table: MemberTable) -> int:
    """Lock a free byte and return its number. Raises `Gone`, `NoSpace`."""
    for turn in range(_RETRIES):
        for slot in table.slots_to_try():
            if locks.take(fd, slot):
                if not _has_name(fd, directory):  # another process locked all bytes, renamed the directory, and unlocked before
                    raise Gone(f"{directory} was freed")
                if table.state(slot) == IN:
                    table.set_state(slot, LEFT)  # of a vanished process, which must not seem to be back
                return slot
        if not _has_name(fd, directory):
            raise Gone(f"{directory} was freed")
        if turn > 0 and table.is_full():
            break
        interrupts.sleep(_RETRY_PAUSE)  # another process has locked all bytes to see whether the claim can be freed
    raise errors.NoSpace(f"{directory}: all {SLOTS:,} slots of the claim are taken, one for each process", key=str(directory))


def _has_name(fd: int, directory: Path) -> bool:
    """Whether the claim that is open here is the one with this name."""
    try:
        named = os.stat(directory / CLAIM)
    except OSError:
        return False
    return locks.file_of(fd) == (named.st_dev, named.st_ino)


# -- the end of the process --------------------------------------------------------------------------------------------

_memberships: set[Members] = set()
"""Kept until they leave: arrays made from a claim may be in use though nothing refers to the claim."""


exit_hooks: list[Callable[[], None]] = []
"""What else to call when the process ends."""


def leave_all() -> None:
    """Leave every claim because the process ends in order."""
    for leave in [*(members.leave for members in _memberships), *exit_hooks]:
        with contextlib.suppress(OSError):
            leave()


atexit.register(leave_all)


def leave_at_exit() -> None:
    """Have `leave_all` called by `multiprocessing`, too, whose forked children end without `atexit`."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        _register_with(util)


@functools.cache
def _register_with(util: Any) -> None:
    def register(_: object) -> None:
        util.Finalize(None, leave_all, exitpriority=-100)

    util.register_after_fork(leave_all, register)  # a child forgets the finalizers of its parent
    register(None)
