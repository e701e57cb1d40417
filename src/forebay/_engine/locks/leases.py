"""Leases: while any process holds one on an entry, its path exists and its bytes do not change.

A lease is a shared kernel lock on the byte at offset *id* of one of 64 files. An evictor asks for the same byte exclusively, through
other file descriptions, so that a process's evictor meets the leases of its own threads too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

from forebay import errors
from forebay._engine.catalog import entries, recovery
from forebay._engine.catalog.connection import Catalog
from forebay._engine.files.root import Root
from forebay._engine.index.records import EntryIndex
from forebay._engine.locks.lease import Lease
from forebay._kernel import locks
from forebay._model import Entry

FILES = 64
HEAL_WITHIN = 1.0


class _Files(dict[int, locks.LockFile]):
    """The lock files by their numbers, made as they are asked for: most processes use few of them."""

    def __init__(self, root: Root, keep: bool) -> None:
        super().__init__()
        self._root, self._keep = root, keep

    def __missing__(self, number: int) -> locks.LockFile:
        opener, writable = self._root.files.open, not self._root.read_only
        return self.setdefault(number, locks.LockFile(self._root.leases(number), opener, writable=writable, keep=self._keep))

    def every(self) -> list[locks.LockFile]:
        return list(self.values())


class Leases:
    """All leases of this process in one root."""

    def __init__(self, root: Root, catalog: Catalog, index: EntryIndex) -> None:
        self._root, self._catalog, self._index = root, catalog, index
        self._held, self._evicting = _Files(root, keep=True), _Files(root, keep=False)

    def current(self, space: int, key: str) -> Entry | None:
        """What the key has now: its row and its record agree."""
        for _ in range(2):
            entry = entries.find(self._catalog, space, key)
            if entry is None:
                self._catalog.check_same()  # a lost one has nothing more to say, and the next one may have the key
                return None
            if self._index.id_of(entry.slot) == entry.id:
                return entry
            # P1 reads the row / P2 replaces the entry: row and record are the new one's / P1 reads the record: look again.
        if self._root.read_only:
            return None
        # A process that died between emptying the record and its commit left a live row without one. Under the writer lock no process is
        # between the two, so the row is right.
        try:
            with self._catalog.write(HEAL_WITHIN) as txn:
                entry = entries.find(txn, space, key)
                return recovery.heal(txn, self._index, space, entry) if entry is not None else None
        except errors.WriterBusy:
            return None  # the one that is replacing it, or another writer, was stopped in the middle of that: a miss

    def take(self, space: int, key: str) -> Lease | None:
        """A lease on what the key has now; None if it has nothing, or is being evicted."""
        for _ in range(2):
            entry = self.current(space, key)
            if entry is None:
                return None
            if (lease := self._try(entry)) is not None:
                return lease
        return None

    def take_many(self, space: int, keys: Sequence[str]) -> dict[str, Lease]:
        """Leases on what these keys have now, as far as they have something."""
        leases: dict[str, Lease] = {}
        for entry in entries.find_many(self._catalog, space, keys):
            lease = self._try(entry) or self.take(space, entry.key)
            if lease is not None:
                leases[entry.key] = lease
        return leases

    def _try(self, entry: Entry) -> Lease | None:
        """Lock first, then look at the record: an evictor that had the lock before has emptied it."""
        file = self._held[entry.id % FILES]
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
        """Whether what is leased is one file of this root. In another root the same id means another entry."""
        return lease.entry.kind == "blob" and lease.path == self._root.blob_name(lease.entry.id, lease.entry.suffix)

    def take_id(self, id: int) -> Lease | None:
        """A lease on the entry with this id, whatever its name is by now; None if it is gone, replaced, or being evicted."""
        entry = entries.by_id(self._catalog, id)
        return self._try(entry) if entry is not None else None

    def new(self, entry: Entry) -> Lease:
        """A lease on an entry that this thread is about to publish. Caller: calls it before the files have a name that others look for,
        so that nobody else has locked its byte."""
        if not self._held[entry.id % FILES].try_lock(entry.id, exclusive=False):
            raise errors.CacheFault(f"{entry.key!r} cannot be leased: the lock of the id {entry.id:x} is taken", key=entry.key)
        return Lease(self.let_go_soon, entry, self._path_of(entry))

    def let_go_soon(self, id: int) -> None:
        """Release without ever waiting for a lock: a finalizer may run inside anything."""
        self._held[id % FILES].unlock_soon(id)

    def try_evict(self, id: int) -> bool:
        """Take the exclusive right to remove an entry: no process has a lease, and none gets one until `evicted`."""
        return self._evicting[id % FILES].try_lock(id, exclusive=True)

    def evicted(self, id: int) -> None:
        """Release the right of `try_evict`."""
        self._evicting[id % FILES].unlock(id)

    @contextlib.contextmanager
    def evicting(self, id: int) -> Iterator[bool]:
        """`try_evict` and `evicted` around a block."""
        if not self.try_evict(id):
            yield False
            return
        try:
            yield True
        finally:
            self.evicted(id)

    def is_leased(self, id: int) -> bool:
        """Whether anyone holds a lease now, or is evicting it."""
        return self._evicting[id % FILES].is_locked(id)

    def leased_among(self, ids: Iterable[int]) -> set[int]:
        """Those of ``ids`` of which `is_leased` is true: about one system call for each that is, and one for each file of locks."""
        files: dict[int, list[int]] = {}
        for id in ids:
            files.setdefault(id % FILES, []).append(id)
        return {id for number, some in files.items() for id in self._evicting[number].locked_among(sorted(some))}

    def drain(self) -> None:
        """Release what finalizers could not."""
        for file in self._held.every():
            file.drain()

    @property
    def files(self) -> list[locks.LockFile]:
        """The lock files that were used so far."""
        return self._held.every() + self._evicting.every()

    def close(self) -> None:
        """Close each file when none of its leases is out any more."""
        for file in self.files:
            file.retire()
