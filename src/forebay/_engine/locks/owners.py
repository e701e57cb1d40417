"""Which processes write to the root, which have died, and what the dead have left.

Each process has a random id, and holds a kernel lock on that byte of ``locks/owners``: only its lock decides whether it is alive."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time

from forebay._engine.catalog import reservations
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files.root import Root
from forebay._kernel import locks

LEAVE_WITHIN = 1.0


class Owners:
    """This process among those that share the root."""

    def __init__(self, root: Root, catalog: Catalog) -> None:
        self._root, self._catalog = root, catalog
        self._mine = locks.LockFile(root.lock("owners"), root.files.open)
        self._probe = locks.LockFile(root.lock("owners"), root.files.open)  # a reaper's own description: see the module `leases`
        self.files = self._mine, self._probe
        self._mutex = threading.Lock()  # guards _id
        self._seen: tuple[float, float, dict[int, int]] = -math.inf, 0.0, {}  # when `_holders` looked, how long it took, what it found
        self._id = self._pid = 0
        self.who = ""
        """This process, in words for people; set by `me`."""

    def me(self) -> int:
        """The id of this process, taken at first use. A forked child takes one of its own."""
        if self._pid == os.getpid():
            return self._id
        with self._mutex:
            if self._pid != os.getpid():
                import random  # late: a process that only reads has no id

                id = random.SystemRandom().randrange(1, 1 << 62)
                self._mine.try_lock(id, exclusive=True)
                self._id, self.who = id, locks.describe_process(os.getpid())
                self._pid = os.getpid()  # last: another thread may look without the mutex
            return self._id

    def reap(self, txn: Txn) -> int:
        """Disown the reservations of dead processes; returns how many processes were dead."""
        dead = 0
        for id in reservations.owners(txn):
            if id == self._id or not self._probe.try_lock(id, exclusive=True):
                continue
            try:
                reservations.disown(txn, id)
                dead += 1
            finally:
                self._probe.unlock(id)
        return dead

    def any_dead(self) -> bool:
        """Whether a dead process owns a reservation."""
        return any(self.is_dead(id) for id in reservations.owners(self._catalog))

    def is_dead(self, id: int) -> bool:
        """Whether the process with this id has ended. Ids are never reused."""
        if id == self._id or not self._probe.try_lock(id, exclusive=True):
            return False
        self._probe.unlock(id)
        return True

    def holder_of(self, keyhash: int) -> str:
        """A description of the process that works on this key: from its reservation, else from the kernel's list of locks."""
        for reservation in reservations.by_key(self._catalog, keyhash):
            if reservation.owner is not None and not self.is_dead(reservation.owner):
                return reservation.who
        pid = self._holders().get(keyhash)
        return "another process" if pid is None else locks.describe_process(pid)

    def _holders(self) -> dict[int, int]:
        """Who holds which key. To look through the descriptors of all processes takes up to a second on a large node, so one look serves
        the next ones, for ten times as long as it took."""
        began, took, found = self._seen
        if time.monotonic() - began > max(10 * took, 0.05):
            began = time.monotonic()
            found = locks.holders_by_byte(self._root.lock("keys"))
            self._seen = began, time.monotonic() - began, found
        return found

    def close(self) -> None:
        """Give up the id; where the catalog is busy, leave reservations as a dead process does."""
        with self._mutex, contextlib.suppress(OSError):
            if self._pid == os.getpid() and reservations.is_owner(self._catalog, self._id):
                self._catalog.insist(lambda txn: reservations.disown(txn, self._id), LEAVE_WITHIN)
        self._pid = 0
        self._mine.close()
        self._probe.close()

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()
        self._id = self._pid = 0
