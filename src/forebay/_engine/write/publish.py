"""The one door into a root: whatever becomes an entry is published here, one or several of a space in one transaction.

room      of a reservation, or made in this transaction     a crash: nothing is there
intent    ids and slots of what comes and goes              a crash: there is nothing to undo
files     written, or renamed, to their final names         a crash: the next writer removes them, or gives a staged one its name back
commit    the rows are there                                a crash: the next writer stores their records
records   the entries can be found without the catalog
finish    the intent is empty

All of this happens under the writer lock, so one intent is enough, and nobody can promise the files' bytes to another process before
they are counted or gone. What is too large to be written while others wait is staged under a reservation first: see `writing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from forebay import errors
from forebay._engine.catalog import entries, reservations, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs
from forebay._engine.files.layout import faults, key_hash
from forebay._engine.files.root import Root
from forebay._engine.index.adaptive import AdaptiveSpace, AdaptiveSpaces, Trial
from forebay._engine.index.records import EntryIndex
from forebay._engine.locks.lease import Lease
from forebay._engine.locks.leases import Leases
from forebay._engine.locks.owners import Owners
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.free_space import SpaceRequest
from forebay._kernel import host
from forebay._model import Buffer, Entry

INLINE = 16 << 10
"""Values up to this size are stored in the catalog, without a block and an inode each."""
SMALL = 256 << 10
"""Files up to this size are collected in memory, and are written and published in one step."""


class Label(NamedTuple):
    """The name and the properties of a new entry. ``life``: ``cached``, ``pinned`` or ``held``; a pin follows the name. ``validated``: when
    the bytes were seen to be the remote's version, in ns of the root's clock; None: when they are published. ``ahead``: it is fetched
    before it is used, so it is not on trial, and was last used when it was validated: later times say that it was used indeed."""

    space: int
    space_name: str
    key: str
    suffix: str = ""
    life: str = "cached"
    meta: str = ""
    validated: int | None = None
    ahead: bool = False

    @property
    def keyhash(self) -> int:
        return key_hash(self.space_name, self.key)


class Pending(NamedTuple):
    """What is to become an entry. ``data``: the bytes of a small value, which are stored in the catalog. ``place``: called in the
    transaction, to give the entry of this id its files. ``leased``: a lease is taken before anybody can see the entry. ``members``: names
    and ids of the entries of a tree."""

    label: Label
    kind: str
    size: int
    checksum: bytes = b""
    validator: str | None = None
    data: bytes | None = None
    place: Callable[[Txn, int], object] | None = None
    leased: bool = False
    members: Sequence[tuple[str, int]] = ()


class Published(NamedTuple):
    """An entry that is there now, and the lease on it, if one was asked for."""

    entry: Entry
    lease: Lease | None = None


class Publisher:
    """Makes entries of one root. Callable from any thread."""

    def __init__(
        self, root: Root, catalog: Catalog, index: EntryIndex, adaptive: AdaptiveSpaces, leases: Leases, owners: Owners, budget: Budget,
        eviction: Eviction,
    ) -> None:  # fmt: skip
        self.root, self.catalog, self.leases, self.owners, self.budget = root, catalog, leases, owners, budget
        self._index, self._adaptive, self._eviction = index, adaptive, eviction

    # -- the door --------------------------------------------------------------------------------------------------

    def publish(
        self, batch: Sequence[Pending], *, reserved: Reservation | None = None, timeout: float = 0.0, spills: bool = False
    ) -> list[Published]:
        """Make entries of a batch of one space, all or none; their keys differ. The room is ``reserved``, else it is made by evicting.

        ``timeout``: see `Budget.reserve`; ``spills``: see `SpaceRequest`. Raises `NoSpace` or another `CacheFault`; then the previous
        entries stay."""
        label, keys, size, charged, files = batch[0].label, list[str](), 0, 0, 0
        for one in batch:
            is_file = one.kind != "value"
            size, charged, files = size + one.size, charged + self.budget.room.charge(one.size, not is_file), files + is_file
            keys.append(one.label.key)
        with faults(label.key, size):
            if reserved is not None:
                with self.catalog.write() as txn:
                    if reservations.by_id(txn, reserved.id) is None:
                        raise errors.CacheFault(f"the reservation of {label.key!r} is gone: the catalog was recreated")
                    reservations.delete(txn, reserved.id)
                    return self.enter(txn, batch, reserved.id)
            request = SpaceRequest(label.space, label.key, 0, size, label.suffix, keys, not files, charged, len(batch), spills)
            return self.budget.with_room(request, partial(self.enter, batch=batch), timeout=timeout)

    def enter(self, txn: Txn, batch: Sequence[Pending], id: int = 0) -> list[Published]:
        """`publish`, where there is room. ``id``: of what is staged under it. Before the commit others see only empty slots."""
        space, now, created = batch[0].label.space, self._index.head.clock.now(), time.time()
        room, store = self.budget.room, self._index.store
        rows, leases = list[tuple[Entry, bytes | None]](), list[Lease | None]()
        ids = [id] if id else txn.new_ids(len(batch))
        for one, id, slot in zip(batch, ids, self._index.take(ids), strict=True):
            label, kind, size, checksum, validator, data, place, leased, members = one
            charge = room.charge(size, inline=True) if kind == "value" else room.charge_published(size)
            entry = Entry(
                id, label.space_name, label.key, kind, size, charge, slot, checksum, validator, created, self.root.epoch, label.life,
                label.suffix, label.meta,
            )  # fmt: skip
            rows.append((entry, data))
            leases.append(self._lease_new(txn, entry) if leased else None)
            if place is not None:
                place(txn, id)
            if members:
                entries.link(txn, id, members)
            txn.leftovers |= label.life == "held"
            validated = now if label.validated is None else label.validated
            txn.after_commit.append(partial(store, space, entry, validated if label.ahead else now, validated))
        added = entries.insert(txn, space, rows, partial(self._eviction.supersede, txn))
        if (adaptive := self._adaptive.of(space)) is not None:
            self._try(txn, adaptive, space, [entry for one, entry in zip(batch, added, strict=True) if not one.label.ahead], now)
        txn.after_release.append(partial(self._index.note_new, rows))
        return list(map(Published, added, leases))

    def _lease_new(self, txn: Txn, entry: Entry) -> Lease:
        lease = self.leases.new(entry)
        txn.at_end.append(lambda: None if txn.is_committed else lease.close())
        return lease

    def _try(self, txn: Txn, adaptive: AdaptiveSpace, space: int, several: Sequence[Entry], now: int) -> None:
        """Tell an adaptive space of its new entries, and put them on trial where bimodal insertion leads."""
        used = [entry for entry in several if entry.life == "cached" and entry.kind in ("blob", "value")]
        if used and adaptive.ghosts.bimodal:
            row = spaces.by_id(txn, space)
            charge = row.charge if row is not None else 0
            tried = [Trial(entry.slot, entry.id, now, entry.charge) for entry in used if adaptive.wants_trial(charge)]
            txn.after_commit.extend(partial(adaptive.put_on_trial, trial) for trial in tried)
        txn.after_release.extend(partial(adaptive.use, entry.key, entry.charge, now, is_hit=False) for entry in used)

    # -- what there is to publish ------------------------------------------------------------------------------------

    def of_bytes(self, label: Label, data: Buffer, validator: str | None = None, *, leased: bool = False) -> Pending:
        """An entry of bytes: a value, or a file that is written in the transaction."""
        size = memoryview(data).nbytes
        if size > INLINE:
            return self.of_file(label, data, blobs.checksum_of(data), validator, leased=leased)
        value = bytes(data)
        return Pending(label, "value", size, blobs.checksum_of(value), validator, value, leased=leased)

    def of_file(self, label: Label, data: Buffer, checksum: bytes, validator: str | None, *, leased: bool = False) -> Pending:
        """An entry of bytes that is a file, however few they are."""

        def place(txn: Txn, id: int) -> None:
            blobs.write(self.root, id, data, checksum, label.suffix)

        return Pending(label, "blob", memoryview(data).nbytes, checksum, validator, place=place, leased=leased)

    def build(
        self, label: Label, kind: str, size: int, make: Callable[[int], object], undo: Callable[[int], object], *,
        validator: str | None = None, members: Sequence[tuple[str, int]] = (),
    ) -> Lease:  # fmt: skip
        """Reserve ``size`` bytes, let ``make`` build the files of the new id, publish them, and return the lease. ``undo`` removes the
        files after a failure. Raises `NoSpace` or another `CacheFault`."""
        with faults(label.key, size):
            request = SpaceRequest(label.space, label.key, label.keyhash, size, label.suffix, (label.key,))
            reserved = self.budget.reserve(request)
            try:
                make(reserved.id)
                ((_, lease),) = self.publish(
                    [Pending(label, kind, size, validator=validator, leased=True, members=members)], reserved=reserved
                )
                assert lease is not None
                return lease
            except BaseException:
                undo(reserved.id)
                self.budget.cancel(reserved.id)
                raise

    def publish_tree(self, label: Label, members: Sequence[tuple[str, Entry]], validator: str | None = None) -> Lease:
        """Publish a tree of entries. It is charged for its directories; its files are charged to the members. Caller: holds leases on the
        members, and no other caller writes the tree's key."""
        size = blobs.footprint([name for name, _ in members], host.disk(self.root.path).block)
        files = [(name, self.root.blob_name(entry.id, entry.suffix)) for name, entry in members]
        keyhash = label.keyhash
        return self.build(
            label, "tree", size, lambda id: blobs.build(self.root, id, files, keyhash=keyhash),
            lambda id: blobs.remove(self.root, id, keyhash=keyhash), validator=validator, members=[(name, e.id) for name, e in members],
        )  # fmt: skip

    def name(self, id: int, label: Label, *, overwrite: bool) -> bool:
        """Give an entry that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``.

        Raises `CacheFault` where the entry is gone."""
        with faults(label.key), self.catalog.write() as txn:
            entry, old = entries.by_id(txn, id), entries.find(txn, label.space, label.key)
            if entry is None:
                raise errors.CacheFault(f"the object to be named {label.key!r} is gone: the catalog was recreated", key=label.key)
            if old is not None and not overwrite:
                return False
            if old is not None and old.id != id:
                self._eviction.supersede(txn, [old])
            (slot,) = self._index.take([id])  # another one, since the memos of other processes know the old name by the old slot
            used, validated = self._index.used(entry.slot), self._index.validated(entry.slot)
            self._index.clear(entry.slot, id)
            entries.rename(txn, entry, label.space, label.key, slot)
            entries.set_life(txn, label.space, label.key, label.life)
            moved = entry._replace(space=label.space_name, key=label.key, slot=slot)
            txn.after_commit.append(lambda: self._index.store(label.space, moved, used, validated, is_sound=moved.boot == self.root.epoch))
            txn.leftovers = True
            return True

    def ensure_room(self, space: spaces.SpaceRow, files: Sequence[tuple[str, int]]) -> None:
        """Evict entries until all of ``files`` (key and size) fit. Nothing is done if a dead fetch left a partial of one of them, which can
        be resumed and would be the first victim. Raises `NoSpace`."""
        if not files or any(reservations.by_key(self.catalog, key_hash(space.name, key)) for key, size in files if size > blobs.CHUNK):
            return
        charged = sum(self.budget.room.charge(size) for _, size in files)
        request = SpaceRequest(space.id, files[0][0], 0, sum(size for _, size in files), charged=charged, entries=len(files))
        if not self.budget.room.short(self.catalog, request).fits:
            self.budget.with_room(request, lambda txn: None)
