"""Which processes have the root open, which have died, and what the dead have left.

Each process has a random id and holds a kernel lock on that byte of ``locks/owners``. Its row in the catalog is for display; only its
lock decides whether it is alive."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from forebay._engine.catalog import Catalog, Txn, reservations
from forebay._engine.files.root import Root
from forebay._kernel import host as kernel_host
from forebay._kernel import locks

if TYPE_CHECKING:
    from forebay._engine.catalog.processes import Owner

LEAVE_WITHIN = 1.0


class Owners:
    """This process among those that share the root."""

    def __init__(self, root: Root, catalog: Catalog) -> None:
        self._root, self._catalog = root, catalog
        self._mine = locks.LockFile(root.lock("owners"), root.files.open)
        self._probe = locks.LockFile(root.lock("owners"), root.files.open)  # a reaper's own description: see the module `leases`
        self._mutex = threading.Lock()  # guards _id
        self._seen: tuple[float, float, dict[int, int]] = -math.inf, 0.0, {}  # when `_holders` looked, how long it took, what it found
        self._id = 0
        self._pid = 0

    def me(self) -> int:
        """The id of this process, registered at first use. A forked child registers under an id of its own."""
        if self._pid == os.getpid():
            return self._id
        with self._mutex:
            if self._pid != os.getpid():
                self._register()
            return self._id

    def _register(self) -> None:
        import random

        from forebay._engine.catalog import processes  # imported late: a process that only reads does not register

        id = random.SystemRandom().randrange(1, 1 << 62)
        self._mine.try_lock(id, exclusive=True)  # before the row: a row whose byte is free would be reaped
        try:
            with self._catalog.write() as txn:
                self._reap_dead(txn, [owner.id for owner in processes.every(txn)])
                processes.insert(txn, _describe_self(id))
        except BaseException:
            self._mine.unlock(id)  # the next call takes another id
            raise
        self._id, self._pid = id, os.getpid()

    def reap(self, txn: Txn) -> int:
        """Disown the reservations of dead processes; returns how many processes were dead."""
        return self._reap_dead(txn, reservations.owners(txn))

    def any_dead(self) -> bool:
        """Whether a dead process owns a reservation."""
        return any(self.is_dead(id) for id in reservations.owners(self._catalog))

    def _reap_dead(self, txn: Txn, suspects: list[int]) -> int:
        dead = 0
        for id in suspects:
            if id == self._id or not self._probe.try_lock(id, exclusive=True):
                continue
            try:
                self._bury(txn, id)
                dead += 1
            finally:
                self._probe.unlock(id)
        return dead

    def _bury(self, txn: Txn, id: int) -> None:
        from forebay._engine.catalog import processes

        processes.delete(txn, id)
        reservations.disown(txn, id)

    def is_dead(self, id: int) -> bool:
        """Whether the process with this id has ended. Ids are never reused."""
        if id == self._id or not self._probe.try_lock(id, exclusive=True):
            return False
        self._probe.unlock(id)
        return True

    def forget(self) -> None:
        """The catalog was recreated: register in it at the next use. The byte stays locked, so an old row does not count as a dead
        process's."""
        with self._mutex:
            self._id = self._pid = 0

    def holder_of(self, keyhash: int) -> str:
        """A description of the process that works on this key: from its reservation, else from the kernel's list of locks."""
        from forebay._engine.catalog import processes

        for reservation in reservations.by_key(self._catalog, keyhash):
            if reservation.owner is not None and not self.is_dead(reservation.owner):
                return str(processes.by_id(self._catalog, reservation.owner) or "another process")
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
        """Deregister; where the catalog is busy, leave the row as a dead process does."""
        with self._mutex, contextlib.suppress(OSError):
            if self._pid == os.getpid():
                self._catalog.insist(lambda txn: self._bury(txn, self._id), LEAVE_WITHIN)
        self._pid = 0
        self._mine.close()
        self._probe.close()

    def before_fork(self) -> None:
        self._mine.before_fork(keep=False)
        self._probe.before_fork(keep=False)

    def after_fork_parent(self) -> None:
        self._mine.after_fork_parent()
        self._probe.after_fork_parent()

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()
        self._id = self._pid = 0
        self._mine.after_fork_child(keep=False)
        self._probe.after_fork_child(keep=False)


def _describe_self(id: int) -> Owner:
    import socket

    from forebay._engine.catalog import processes

    try:
        pidns = os.readlink("/proc/self/ns/pid")
    except OSError:
        pidns = ""
    command = os.path.basename(sys.argv[0] if sys.argv else "") or "python"  # arguments may hold secrets
    command = command.encode(errors="backslashreplace").decode()  # the name of a file need not be UTF-8
    return processes.Owner(id, os.getpid(), pidns, socket.gethostname(), kernel_host.process_start(os.getpid()) or time.time(), command)
