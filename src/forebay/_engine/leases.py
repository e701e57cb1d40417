"""Leases on entries, and the processes that share a root.

**Leases.** While any process holds a lease on an entry, its path exists and its bytes do not change. A lease is a shared kernel lock on
the byte at offset *id* of one of 64 files. An evictor asks for the same byte exclusively, through other file descriptions, so that a
process's evictor detects the leases of its own threads too.

**Owners.** Which processes write to the root, which have died, and what the dead have left. Each process has a random id, and holds a
kernel lock on that byte of ``locks/owners``: only its lock decides whether it is alive."""

from __future__ import annotations

import contextlib
import math
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any, Self

from forebay import errors
from forebay._engine.catalog import entries, recovery, reservations
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files.layout import LEASE_FILES
from forebay._engine.files.root import Root
from forebay._engine.index.records import EntryIndex
from forebay._kernel import locks
from forebay._kernel.interrupts import guarded_methods, paced, shielded
from forebay._model import Entry

HEAL_WITHIN = LEAVE_WITHIN = 1.0
"""Seconds to wait for the catalog's writer lock."""


@guarded_methods("closed", "reopened_by")
class Lease:
    """A hold on one cached file or directory: while it is open, the path exists and the bytes do not change. Returned by `Cache.local`.

    ``with lease as path`` gives the path, a plain ``str``, and releases the lease at the end of the block. Without a ``with``, `path` or
    ``os.fspath(lease)`` gives the same string, until `close`, garbage collection, or the death of every process that holds it. The
    attribute ``entry`` is the entry, with its size and validator.

    Callable from any thread. A lease taken before a ``fork`` also holds the entry for the child. A pickled or copied lease is separate:
    unpickling opens the same URL again in that process and cache, without asking the remote for cached bytes."""

    _reopen: tuple[Callable[..., Lease], tuple[Any, ...]] | None = None

    def __init__(self, release: Callable[[int], None], entry: Entry, path: str) -> None:
        self.entry, self.path = entry, path
        self._held: _Held | None = _Held(release, entry.id)

    def close(self) -> None:
        """Release the lease. A second call does nothing."""
        held, self._held = self._held, None  # its finalizer, too, runs while signals wait
        if held is not None:
            held.release()

    @property
    def closed(self) -> bool:
        """Whether this lease has been released."""
        return self._held is None

    def reopened_by(self, function: Callable[..., Lease], *args: Any) -> Self:
        """Make a pickled copy of this lease open with ``function(*args)``. Returns the lease itself."""
        self._reopen = function, args
        return self

    def __fspath__(self) -> str:
        self._check_open()
        return self.path

    def __str__(self) -> str:
        return self.path

    def __repr__(self) -> str:
        return f"<forebay.Lease {self.path!r} of {self.entry.name!r}{' closed' if self.closed else ''}>"

    def __enter__(self) -> str:
        self._check_open()
        return self.path

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Callable[..., Lease], tuple[Any, ...]]:
        self._check_open()
        if self._reopen is None:
            raise TypeError(
                f"the lease on {self.entry.name!r} is internal and cannot be pickled: pickle what Cache.local or Cache.directory gave"
            )
        return self._reopen

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of(f"lease on {self.entry.name!r}")


class _Held(list[Callable[[int], None]]):
    """What releases a lease: its one item, until it is released. A list, since `pop` is one step: of two threads that close, one does."""

    def __init__(self, release: Callable[[int], None], id: int) -> None:
        super().__init__([release])
        self._id = id

    def release(self) -> None:
        with contextlib.suppress(IndexError):
            self.pop()(self._id)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self and not is_finalizing():  # at exit the kernel releases it, whatever is left of the interpreter
            with shielded():
                self.release()


def in_place(path: str) -> Lease:
    """A lease on what is outside the cache: it locks nothing, and nothing removes the file. Its entry is of the kind ``file``,
    ``directory`` or ``other``. Raises `NotFound`."""
    try:
        info = os.stat(path)
    except (OSError, ValueError) as error:
        raise errors.NotFound(f"{path}: there is no such file or directory", url=path) from error
    kind = "directory" if stat.S_ISDIR(info.st_mode) else "file" if stat.S_ISREG(info.st_mode) else "other"
    return Lease(lambda _: None, Entry(0, "", path, kind, info.st_size, 0, 0, b"", None, info.st_mtime, "", "cached"), path)


class _Files(dict[int, locks.LockFile]):
    """The lock files by their numbers, opened at their first use: most processes use few of them."""

    def __init__(self, root: Root, keep: bool) -> None:
        super().__init__()
        self._root, self._keep = root, keep

    def __missing__(self, number: int) -> locks.LockFile:
        opener, writable = self._root.files.open, not self._root.read_only
        return self.setdefault(number, locks.LockFile(self._root.leases(number), opener, writable=writable, keep=self._keep))


class Leases:
    """All leases of this process in one root."""

    def __init__(self, root: Root, catalog: Catalog, index: EntryIndex) -> None:
        self._root, self._catalog, self._index = root, catalog, index
        self._held, self._evicting = _Files(root, keep=True), _Files(root, keep=False)

    def current(self, space: int, key: str) -> Entry | None:
        """The key's entry, whose row and record agree; None if it has none."""
        for _ in range(2):
            entry = entries.find(self._catalog, space, key)
            if entry is None:
                self._catalog.check_same()  # a catalog that was deleted finds nothing, and the one that replaces it may have the key
                return None
            if self._index.id_of(entry.slot) == entry.id:
                return entry
            # P1 reads the row / P2 replaces the entry: row and record are the new one's / P1 reads the record: read both again.
        if self._root.read_only:
            return None
        # A process that died between emptying the record and its commit left a live row without a record. Under the writer lock no process
        # is between the two, so the row is right.
        try:
            with self._catalog.write(HEAL_WITHIN) as txn:
                entry = entries.find(txn, space, key)
                return recovery.heal(txn, self._index, space, entry) if entry is not None else None
        except errors.WriterBusy:
            return None  # the process that replaces the entry, or another writer, was stopped in the middle: a miss

    def take(self, space: int, key: str) -> Lease | None:
        """A lease on the key's entry; None if there is none, or it is being evicted."""
        for _ in range(2):
            entry = self.current(space, key)
            if entry is None:
                return None
            if (lease := self._try(entry)) is not None:
                return lease
        return None

    def take_many(self, space: int, keys: Sequence[str]) -> dict[str, Lease]:
        """Leases on the entries of these keys; a key without an entry is missing in the result."""
        leases: dict[str, Lease] = {}
        for entry in paced(entries.find_many(self._catalog, space, keys)):
            lease = self._try(entry) or self.take(space, entry.key)
            if lease is not None:
                leases[entry.key] = lease
        return leases

    def _try(self, entry: Entry) -> Lease | None:
        """Lock first, then read the record: an evictor that had the lock before has emptied it."""
        file = self._held[entry.id % LEASE_FILES]
        if not file.try_lock(entry.id, exclusive=False):
            return None
        if self._index.id_of(entry.slot) != entry.id:
            file.unlock(entry.id)
            return None
        return Lease(self.let_go_soon, entry, self._path_of(entry))

    def _path_of(self, entry: Entry) -> str:
        if entry.kind == "pack":
            return str(self._root.pack(entry.id))
        return str(self._root.tree(entry.id)) if entry.kind == "tree" else self._root.blob_name(entry.id, entry.suffix)

    def is_own_file(self, lease: Lease) -> bool:
        """Whether the lease is on a file of this root. In another root the same id means another entry."""
        return lease.entry.kind == "blob" and lease.path == self._root.blob_name(lease.entry.id, lease.entry.suffix)

    def take_id(self, id: int) -> Lease | None:
        """A lease on the entry with this id, even if it was renamed; None if it is gone, replaced, or being evicted."""
        entry = entries.by_id(self._catalog, id)
        return self._try(entry) if entry is not None else None

    def new(self, entry: Entry) -> Lease:
        """A lease on an entry that this process has leased, or that this thread is about to publish: then the caller calls it before the
        files have their final names, so that no process can have locked the byte."""
        if not self._held[entry.id % LEASE_FILES].try_lock(entry.id, exclusive=False):
            raise errors.CacheFault(f"{entry.key!r} cannot be leased: the lock of the id {entry.id:x} is taken", key=entry.key)
        return Lease(self.let_go_soon, entry, self._path_of(entry))

    def let_go_soon(self, id: int) -> None:
        """Release without ever waiting for a lock: a finalizer may run inside anything."""
        self._held[id % LEASE_FILES].unlock_soon(id)

    def try_evict(self, id: int) -> bool:
        """Take the exclusive right to remove an entry: no process has a lease, and none gets one until `evicted`."""
        return self._evicting[id % LEASE_FILES].try_lock(id, exclusive=True)

    def evicted(self, id: int) -> None:
        """Release the right of `try_evict`."""
        self._evicting[id % LEASE_FILES].unlock(id)

    def leased_among(self, ids: Iterable[int]) -> set[int]:
        """Those of ``ids`` that a process has leased or is evicting: about one system call for each of them, and one for each lock file."""
        files: dict[int, list[int]] = {}
        for id in ids:
            files.setdefault(id % LEASE_FILES, []).append(id)
        return {id for number, some in files.items() for id in self._evicting[number].locked_among(sorted(some))}

    def drain(self) -> None:
        """Release the leases that finalizers could not release."""
        for file in list(self._held.values()):
            file.drain()

    @property
    def files(self) -> list[locks.LockFile]:
        """The lock files that were opened so far."""
        return [*self._held.values(), *self._evicting.values()]

    def close(self) -> None:
        """Close each lock file once its last lease is released."""
        for file in self.files:
            file.retire()


class Owners:
    """This process among those that share the root."""

    def __init__(self, root: Root, catalog: Catalog) -> None:
        self._root, self._catalog = root, catalog
        self._mine = locks.LockFile(root.lock("owners"), root.files.open)
        self._probe = locks.LockFile(root.lock("owners"), root.files.open)  # a reaper's own description, as for leases
        self.files = self._mine, self._probe
        self._mutex = threading.Lock()  # guards _id
        self._seen: tuple[float, float, dict[int, int]] = -math.inf, 0.0, {}  # when `_holders` searched, how long it took, what it found
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
                self._pid = os.getpid()  # last: other threads read it without the mutex
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
        """The process that holds each key. A search through the descriptors of all processes takes up to a second on a large node, so its
        result is reused for ten times as long as it took."""
        began, took, found = self._seen
        if time.monotonic() - began > max(10 * took, 0.05):
            began = time.monotonic()
            found = locks.holders_by_byte(self._root.lock("keys"))
            self._seen = began, time.monotonic() - began, found
        return found

    def close(self) -> None:
        """Give up the id; if the catalog is busy, leave the reservations behind, as a dead process does."""
        with self._mutex, contextlib.suppress(OSError):
            if self._pid == os.getpid() and reservations.is_owner(self._catalog, self._id):
                self._catalog.insist(lambda txn: reservations.disown(txn, self._id), LEAVE_WITHIN)
        self._pid = 0
        self._mine.close()
        self._probe.close()

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()
        self._id = self._pid = 0
