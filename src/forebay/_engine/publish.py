"""The one door into a root: whatever becomes an entry is published here, one or several of a space in one transaction.

room      of a reservation, or made in this transaction     a crash: nothing is there
intent    ids and slots of what comes and goes              a crash: there is nothing to undo
files     written, or renamed, to their final names         a crash: the next writer removes them, or gives a staged one its name back
commit    the rows are there                                a crash: the next writer stores their records
records   the entries can be found without the catalog
finish    the intent is empty

All of this happens under the writer lock, so one intent is enough, and nobody can promise the files' bytes to another process before
they are counted or gone. What is too large to be written while others wait is staged under a reservation first: see `Writing`.

**One write,** of bytes that come from a remote, or are too many to be written while others wait.

reserve       a row counts the bytes                        a crash leaves a counted partial
stage         the file grows under tmp/                     a crash leaves a counted partial, resumed where it can be
publish       as above                                      a crash leaves the reservation, which names both places

A small object is collected in memory, and written in the transaction that publishes it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from forebay import errors
from forebay._engine.catalog import entries, reservations, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs, stages
from forebay._engine.files.layout import faults, key_hash
from forebay._engine.files.root import Root
from forebay._engine.files.stages import MemoryStage, Stage
from forebay._engine.index.adaptive import AdaptiveSpace, AdaptiveSpaces, Trial
from forebay._engine.index.records import EntryIndex
from forebay._engine.leases import Lease, Leases, Owners
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.free_space import SpaceRequest
from forebay._kernel import host, interrupts
from forebay._model import Buffer, Entry, ObjectInfo, Partial, Sink, Span

INLINE = 16 << 10
"""Values up to this size are stored in the catalog, without a block and an inode each."""
SMALL = 256 << 10
"""Files up to this size are collected in memory, and are written and published in one step."""


class Label(NamedTuple):
    """The name and the properties of a new entry. ``life``: ``cached``, ``pinned`` or ``held``; a pin follows the name. ``validated``: when
    the bytes were seen to be the remote's version, in ns of the root's clock; None: when they are published. ``ahead``: it is fetched
    before it is used, so it is not on probation, and was last used when it was validated: later times say that it was used indeed."""

    space: str
    key: str
    suffix: str = ""
    life: str = "cached"
    meta: str = ""
    validated: int | None = None
    ahead: bool = False

    @property
    def keyhash(self) -> int:
        return key_hash(self.space, self.key)


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
        """Make entries of a batch of one space, all or none. The room is ``reserved``, else it is made by evicting. Of a key that a batch
        has more than once the last one is published, and returned for each.

        ``timeout``: see `Budget.reserve`; ``spills``: see `SpaceRequest`. Raises `NoSpace` or another `CacheFault`; then the previous
        entries stay."""
        label, keys, size, charged, files = batch[0].label, list[str](), 0, 0, 0
        if len(batch) > 1 and len(last := _last_of_each(batch)) < len(batch):
            published = dict(zip(last, self.publish(list(last.values()), timeout=timeout, spills=spills), strict=True))
            return [self._again(one, published) for one in batch]
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
        name, now, created = batch[0].label.space, self._index.head.clock.now(), time.time()
        space = txn.space(name, "packs" if batch[0].kind == "pack" else "values")
        room = self.budget.room
        rows, leases = list[tuple[Entry, bytes | None]](), list[Lease | None]()
        ids = [id] if id else txn.new_ids(len(batch))
        for one, id, slot in zip(batch, ids, self._index.take(ids), strict=True):
            label, kind, size, checksum, validator, data, place, leased, members = one
            charge = room.charge(size, inline=True) if kind == "value" else room.charge_published(size)
            entry = Entry(
                id, label.space, label.key, kind, size, charge, slot, checksum, validator, created, self.root.epoch, label.life,
                label.suffix, label.meta,
            )  # fmt: skip
            rows.append((entry, data))
            leases.append(self._lease_new(txn, entry) if leased else None)
            if place is not None:
                place(txn, id)
                txn.at_end.append(partial(self._take_back, txn, self.root.blob_name(id, label.suffix)))
            if members:
                entries.link(txn, id, members)
            txn.leftovers |= label.life == "held"
            txn.after_commit.append(partial(self._store_record, space, entry, label, now))
        added = entries.insert(txn, space, rows, partial(self._eviction.supersede, txn))
        for entry in added:
            self._forget_others(txn, space, entry)
        used = [
            entry for one, entry in zip(batch, added, strict=True)
            if not one.label.ahead and entry.life == "cached" and entry.kind in ("blob", "value")
        ]  # fmt: skip
        if not self._adaptive.knows(space, name):  # after the commit: of a space that is not there, no file may stay
            txn.after_release.append(partial(self._introduce, space, name, used, now))
        elif (adaptive := self._adaptive.of(space)) is not None:
            self._try(txn, adaptive, space, used, now)
        txn.after_release.append(partial(self._index.note_new, rows))
        return list(map(Published, added, leases))

    def _store_record(self, space: int, entry: Entry, label: Label, now: int) -> None:
        """Store the record of a new entry.

        P1 asks the remote / P2 invalidates the key, and sees no entry, or the one before / P1 publishes what it was sent. So P2 notes
        the key first, then looks for an entry; P1 looks at the note once the row is there."""
        validated = now if label.validated is None else label.validated
        used, head = validated if label.ahead else now, self._index.head
        if label.validated is not None and head.was_invalidated(_hashes_above(label), validated):
            validated = 0
        self._index.store(space, entry, used, validated)

    def _forget_others(self, txn: Txn, space: int, entry: Entry) -> None:
        """End what the key led to until now though no row said so: another program has changed or hidden the row, and whichever record is
        found would be served."""
        for slot, id in self._index.others(entry):
            there = entries.with_space(txn, id)
            if there is None or there[1].slot != slot:
                self._index.clear(slot, id)
            elif (there[0], there[1].key) == (space, entry.key):
                self._eviction.supersede(txn, [there[1]])
            else:  # it has another name by now: another slot, too, since the memos of other processes know the old name by the old slot
                (other,) = self._index.take([id])
                self._index.clear(slot, id)
                entries.set_slot(txn, id, other)
                self._index.restore(there[0], there[1]._replace(slot=other))

    def _again(self, one: Pending, published: dict[str, Published]) -> Published:
        """What was published for a key, with a lease of its own if one is asked for."""
        entry, lease = published[one.label.key]
        return Published(entry, self.leases.new(lease.entry) if one.leased and lease is not None else None)

    def _lease_new(self, txn: Txn, entry: Entry) -> Lease:
        lease = self.leases.new(entry)
        txn.at_end.append(lambda: None if txn.is_committed else lease.close())
        return lease

    def _take_back(self, txn: Txn, path: str) -> None:
        """Remove a file whose row was not committed: a lost head has no intent that names it."""
        with contextlib.suppress(OSError):
            if not txn.is_committed:
                self.root.files.unlink(path)

    def _introduce(self, space: int, name: str, used: Sequence[Entry], now: int) -> None:
        """Tell a space that this process did not know of its new entries, if it is adaptive."""
        self._adaptive.know(space, name)
        if (adaptive := self._adaptive.of(space)) is not None:
            for entry in used:
                adaptive.use(entry.key, entry.charge, now, is_hit=False)

    def _try(self, txn: Txn, adaptive: AdaptiveSpace, space: int, used: Sequence[Entry], now: int) -> None:
        """Tell an adaptive space of its new entries, and put them on probation where bimodal insertion leads."""
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
                with interrupts.shielded():
                    undo(reserved.id)
                    self.budget.cancel(reserved.id)
                raise

    def publish_tree(self, label: Label, members: Sequence[tuple[str, Entry]], validator: str | None = None) -> Lease:
        """Publish a tree of entries, and of the empty directories in its ``meta``. It is charged for its directories; its files are charged
        to the members. Caller: holds leases on the members, and no other caller writes the tree's key."""
        folders = blobs.folders_of(label.meta) or []
        members = list(dict(members).items())  # of a name that is given twice the last one counts
        size = blobs.footprint([*(name for name, _ in members), *folders], host.disk(self.root.path).block)
        files = [(name, self.root.blob_name(entry.id, entry.suffix)) for name, entry in interrupts.paced(members)]
        keyhash = label.keyhash
        return self.build(
            label, "tree", size, lambda id: blobs.build(self.root, id, files, folders, keyhash=keyhash),
            lambda id: blobs.remove(self.root, id, keyhash=keyhash), validator=validator, members=[(name, e.id) for name, e in members],
        )  # fmt: skip

    def extend_tree(self, tree: Entry, part: Entry) -> tuple[list[str], list[tuple[str, Entry]]]:
        """Add the files of a tree to another one, which `grows`. Returns the names that cannot be added, and those files that were there
        already and are other entries.

        The rows come first: then the files are kept from eviction, and counted, before they have the names. Caller: holds leases on both,
        and no other process extends the tree. Raises `NoSpace` or another `CacheFault`."""
        with faults(tree.key):
            given = dict(entries.members(self.catalog, part.id))
            there = {name for name, _ in entries.members(self.catalog, tree.id, part.id)}
            added = [(name, member.id) for name, member in given.items() if name not in there]
            if added:
                block = host.disk(self.root.path).block
                more = blobs.growth(self.root, tree.id, [name for name, _ in added], block)
                request = SpaceRequest(tree.space, tree.key, 0, more, charged=-(-more // block) * block, entries=0)
                if not self.budget.with_room(request, partial(self._link_more, tree=tree.id, added=added, more=more)):
                    return list(given), []
            files = entries.members(self.catalog, tree.id, part.id)
            wrong = blobs.extend(self.root, tree.id, [(name, self.root.blob_name(one.id, one.suffix)) for name, one in files])
            return wrong, [(name, one) for name, one in files if one.id != given[name].id]

    def _link_more(self, txn: Txn, tree: int, added: Sequence[tuple[str, int]], more: int) -> bool:
        """False if the tree is served no more."""
        if (found := entries.with_space(txn, tree)) is None:
            return False
        space, entry = found
        entries.link(txn, tree, added)
        entries.resize(txn, space, entry, entry.size + more, self.budget.room.charge_published(entry.size + more))
        return True

    def name(self, id: int, label: Label, *, overwrite: bool) -> bool:
        """Give an entry that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``.

        Raises `CacheFault` where the entry is gone."""
        with faults(label.key), self.catalog.write() as txn:
            space = txn.space(label.space, "values")
            entry, old = entries.by_id(txn, id), entries.find(txn, space, label.key)
            if entry is None:
                raise errors.CacheFault(f"the object to be named {label.key!r} is gone: the catalog was recreated", key=label.key)
            if old is not None and not overwrite:
                return False
            if old is not None and old.id != id:
                self._eviction.supersede(txn, [old])
            (slot,) = self._index.take([id])  # another one, since the memos of other processes know the old name by the old slot
            used, validated = self._index.used(entry.slot), self._index.validated(entry.slot)
            self._index.clear(entry.slot, id)
            entries.rename(txn, entry, space, label.key, slot)
            entries.set_life(txn, space, label.key, label.life)
            moved = entry._replace(space=label.space, key=label.key, slot=slot)
            txn.after_commit.append(lambda: self._index.store(space, moved, used, validated, is_sound=moved.boot == self.root.epoch))
            txn.leftovers = True
            return True

    def ensure_room(self, space: str, files: Sequence[tuple[str, int]]) -> None:
        """Evict entries until all of ``files`` (key and size) fit. Nothing is done if a dead fetch left a partial of one of them, which can
        be resumed and would be the first victim. Raises `NoSpace`."""
        if not files or any(reservations.by_key(self.catalog, key_hash(space, key)) for key, size in files if size > blobs.CHUNK):
            return
        charged = sum(self.budget.room.charge(size) for _, size in files)
        request = SpaceRequest(space, files[0][0], 0, sum(size for _, size in files), charged=charged, entries=len(files))
        if not self.budget.room.short(self.catalog, request).fits:
            self.budget.with_room(request, lambda txn: None)


def _hashes_above(label: Label) -> Iterator[int]:
    """The hashes of a key, and of the names of the directories that it lies in."""
    yield label.keyhash
    for place, mark in enumerate(label.key):
        if mark in "/#":
            yield key_hash(label.space, label.key[:place])


def _last_of_each(batch: Sequence[Pending]) -> dict[str, Pending]:
    """The last of each key of a batch: leased if any of them is to be, and pinned if any is."""
    last: dict[str, Pending] = {}
    for one in batch:
        before = last.get(one.label.key, one)
        life = "pinned" if before.label.life == "pinned" else one.label.life
        last[one.label.key] = one._replace(leased=one.leased or before.leased, label=one.label._replace(life=life))
    return last


class Writing:
    """One write: a `Sink` for a remote, then `publish`. Without that, the bytes are kept for a successor if it can resume them.

    Caller: holds the key's lock, unless nothing is to be resumed. ``reserved``: a reservation to use. ``on_progress`` is called with
    (done, total) bytes. ``timeout``: see `Budget.reserve`; ``at_once``: see `Stage.begin`. ``collect``: an object of at most so many bytes
    is kept in memory until it is published, together with others; but only a small one where a successor could resume a larger one."""

    def __init__(
        self, publisher: Publisher, label: Label, *, resume: bool = False, reserved: Reservation | None = None,
        on_progress: Callable[[int, int | None], None] | None = None, timeout: float = 0.0, collect: int = 0, at_once: bool = False,
    ) -> None:  # fmt: skip
        self._publisher, self.label, self._on_progress, self._timeout = publisher, label, on_progress, timeout
        self._collect, self._at_once = collect, at_once
        self._keyhash = label.keyhash
        self._reserved = reserved
        self._stage: Stage | None = None
        self._small: MemoryStage | None = None
        self._resumable = self.is_published = False
        self.info: ObjectInfo | None = None
        self.partial: Partial | None = None
        self.spills = False
        """See `SpaceRequest`."""
        self.inline = False
        """Whether tiny bytes become a value of the catalog, which has no file."""
        if resume:
            with faults(label.key):
                left = self._adopt()
            if left is not None:
                self._reserved, self._stage = left
                self.partial = self._stage.partial

    def _adopt(self) -> tuple[Reservation, Stage] | None:
        """Take over the partial of a fetch of this key whose process died or gave up; None if there is none."""
        catalog, root, owners, keyhash = self._publisher.catalog, self._publisher.root, self._publisher.owners, self._keyhash
        if not reservations.by_key(catalog, keyhash):
            return None
        me = owners.me()
        with catalog.write() as txn:
            owners.reap(txn)
            left = [r for r in reservations.by_key(txn, keyhash) if r.owner is None][:1]
            for reservation in left:
                reservations.set_owner(txn, reservation.id, me, owners.who)
        for reservation in left:
            try:
                stage = Stage.resume(root, keyhash, reservation.id)
                return reservation, stage or Stage.create(root, keyhash, reservation.id)
            except BaseException:
                self._give_up(reservation)  # else it counts as this process's for as long as the process lives
                raise
        return None

    def _give_up(self, reserved: Reservation) -> None:
        """Leave a partial for a successor. It stays counted, and is the first to be evicted when space is needed."""
        with self._publisher.catalog.write() as txn:
            reservations.set_owner(txn, reserved.id, None)

    # -- the sink --------------------------------------------------------------------------------------------------

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self.info, self._small = info, None
        self._resumable = info.strong and info.validator is not None and (info.size or 0) > blobs.CHUNK
        with faults(self.label.key, info.size or 0):
            size, at_most = info.size, SMALL if self._resumable else max(SMALL, self._collect)
            if self._reserved is None and size is not None and size <= at_most:
                self._small = MemoryStage(size)
                return (Span(0, size),) if size else ()
            return self._begin_on_disk(info)

    def _begin_on_disk(self, info: ObjectInfo) -> tuple[Span, ...]:
        budget, label, size, self._small = self._publisher.budget, self.label, info.size or 0, None
        if self._reserved is None:
            request = SpaceRequest(label.space, label.key, self._keyhash, size, label.suffix, (label.key,), spills=self.spills)
            self._reserved = budget.reserve(request, timeout=self._timeout)
        elif self._reserved.size < size:
            self._reserved = budget.resize(self._reserved, label.space, size)
        if self._stage is None:
            self._stage = Stage.create(self._publisher.root, self._keyhash, self._reserved.id)
        missing = self._stage.begin(info.size, info.validator if info.strong else None, on_grow=self._grow, at_once=self._at_once)
        if self._reserved.size > size:  # after the stage let go of what was written: no byte is ever uncounted
            self._reserved = budget.resize(self._reserved, label.space, size)
        return missing

    def _grow(self, size: int) -> None:
        self._reserved = self._publisher.budget.resize(self.reserved, self.label.space, size)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        interrupts.point()
        stage = self._small or self.stage
        with faults(self.label.key, len(data)):
            stage.write(offset, data)
        if self._on_progress is not None:
            self._on_progress(stage.done, stage.total)

    def move_to(self, sink: Sink) -> None:
        """Move all bytes, in order, to another sink, and give the space back: nothing will be kept. Raises `CacheFault`."""
        stage, at = self.stage, 0
        with faults(self.label.key):
            with open(self._publisher.root.files.open(stage.path), "rb") as file:
                while block := file.read(blobs.CHUNK):
                    sink.write(at, block)
                    at += len(block)
            if at < stage.done:
                raise errors.CacheFault(f"{stage.path}: {stage.done:,} bytes arrived, but {at:,} are there", path=str(stage.path))
            stage.discard()
            self._publisher.budget.cancel(self.reserved.id)
        self._stage = self._reserved = None

    def clone(self, fd: int) -> bool:
        """See `CloningSink.clone`."""
        if self._small is not None and self._small.total <= SMALL:
            return False
        with faults(self.label.key):
            if self._small is not None and self.info is not None:
                self._begin_on_disk(self.info)  # it may cost no bytes there
            return self.stage.clone(fd)

    @property
    def collected(self) -> MemoryStage | None:
        """The bytes, as long as they are in memory only."""
        return self._small

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "the write has not begun"
        return self._stage

    @property
    def reserved(self) -> Reservation:
        assert self._reserved is not None, "the write has not begun"
        return self._reserved

    def sha256(self) -> str:
        """The SHA-256 of the bytes, for a check before they are published."""
        import hashlib

        if self._small is not None:
            return hashlib.sha256(self._small.data).hexdigest()
        with open(self._publisher.root.files.open(self.stage.path), "rb") as file:
            return interrupts.digest(file, hashlib.sha256())

    def set_meta(self, meta: str) -> None:
        """Set the small text that the entry will carry."""
        self.label = self.label._replace(meta=meta)

    def set_validated(self, ns: int) -> None:
        """Set when the bytes were seen to be the remote's version; 0: the remote is asked before the entry is served."""
        self.label = self.label._replace(validated=ns)

    # -- publishing ------------------------------------------------------------------------------------------------

    def pending(self, validator: str | None, *, leased: bool) -> Pending:
        """The complete and verified bytes, as what is to be published."""
        if self._small is not None:
            _, checksum = self._small.finish()
            if self.inline and self._small.total <= INLINE:
                return self._publisher.of_bytes(self.label, self._small.data, validator, leased=leased)
            return self._publisher.of_file(self.label, self._small.data, checksum, validator, leased=leased)
        size, checksum = self.stage.finish()
        return Pending(self.label, "blob", size, checksum, validator, place=self._place, leased=leased)

    def _place(self, txn: Txn, id: int) -> None:
        stage, root = self.stage, self._publisher.root
        blobs.publish(root, stage.path, id, self.label.suffix)
        txn.after_commit.append(lambda: stages.remove_map(root, stage.keyhash, id))

    def publish(self, *, validator: str | None = None) -> Entry:
        """Publish the bytes as an entry. Raises `NoSpace` or another `CacheFault`; then the previous entry stays."""
        return self._publish(validator, leased=False).entry

    def publish_leased(self, *, validator: str | None = None) -> Lease:
        """`publish`; returns a lease that exists before anybody can see the entry."""
        lease = self._publish(validator, leased=True).lease
        assert lease is not None
        return lease

    def _publish(self, validator: str | None, *, leased: bool) -> Published:
        with faults(self.label.key, (self.info and self.info.size) or 0):
            batch = [self.pending(validator, leased=leased)]
            (new,) = self._publisher.publish(batch, reserved=self._reserved, timeout=self._timeout, spills=self.spills)
        self.is_published = True
        return new

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self.is_published or self._reserved is None:
            return
        self._resumable &= not isinstance(value, errors.NoSpace | errors.ChecksumMismatch)  # no space for it now, or other bytes
        with interrupts.shielded(), faults(self.label.key):
            if self._stage is not None and self._resumable and self._stage.done:
                self._stage.close()
                self._give_up(self._reserved)
                return
            if self._stage is not None:
                self._stage.discard()
            self._publisher.budget.cancel(self._reserved.id)
