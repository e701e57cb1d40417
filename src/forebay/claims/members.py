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
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeAlias

from forebay import errors
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.claims import claim_files
from forebay.claims.claim_files import Gone
from forebay.claims.inherited_fds import passing
from forebay.claims.table import CLAIM, IN, LEFT, SLOTS, Identity, Member, MemberTable

log = logger("forebay.claims")
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
