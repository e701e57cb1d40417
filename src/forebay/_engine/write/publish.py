"""From bytes to an entry: reserve, stage, then one transaction that inserts the row, frees the reservation and renames the file.

reserve       a row counts the bytes                        a crash leaves a counted partial
stage         the file grows under tmp/                     a crash leaves a counted partial, resumed where it can be
row, rename   uncommitted row, then the final name          a crash leaves the reservation, which names both places
commit        the entry is visible, the reservation gone

A small file is collected in memory, and written in the same transaction that publishes it: see `insert`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import NamedTuple, Self

from forebay import errors
from forebay._engine.catalog import Catalog, Rows, Txn, entries, reservations
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.files import blobs, stages
from forebay._engine.files.chunkmaps import CHUNK
from forebay._engine.files.faults import faults
from forebay._engine.files.root import Root
from forebay._engine.files.stages import MemoryStage, Stage
from forebay._engine.index.adaptive import AdaptiveSpaces
from forebay._engine.index.head import PAIRS
from forebay._engine.index.records import EntryIndex
from forebay._engine.locks.fill import hash_of
from forebay._engine.locks.leases import Lease, Leases
from forebay._engine.locks.owners import Owners
from forebay._engine.space.budget import Budget, Search
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.free_space import SpaceRequest
from forebay._engine.write.insert import Inserter, Label, New
from forebay._model import Buffer, Entry, ObjectInfo, Partial, Sink, Span

INLINE = 16 << 10
"""Values up to this size are stored in the catalog, without a block and an inode each."""
SMALL = 256 << 10
"""Files up to this size are collected in memory first, and are written and published in one step."""
AT_ONCE = 1 << 20
"""Bytes of small values that one transaction writes at most, about; this bounds its log."""
ROW = 512
"""Bytes of the log that a value takes at most beside its own."""
FILES, TOGETHER = 16, 4 << 20
"""Files of one transaction, and their bytes, at most: it holds the writer lock while it writes them."""
PATIENCE = 5.0
"""Seconds that a value waits for other writes into its space, which can be evicted once they are done."""


class _Ready(NamedTuple):
    """A small write that has all of its bytes."""

    writing: Writing
    data: Buffer
    size: int
    checksum: bytes


class Publisher:
    """Writes entries into one root. Callable from any thread."""

    def __init__(
        self, root: Root, catalog: Catalog, index: EntryIndex, adaptive: AdaptiveSpaces, owners: Owners, budget: Budget,
        eviction: Eviction,
    ) -> None:  # fmt: skip
        self.root, self.rows, self._catalog, self.budget = root, catalog, catalog, budget
        self.inserter = Inserter(root, index, adaptive, budget, eviction)
        self._owners = owners

    def put(self, label: Label, data: Buffer, *, validator: str | None = None) -> Entry:
        """Store bytes. Raises `NoSpace` or another `CacheFault`; then the previous entry stays."""
        view = memoryview(data).cast("B")
        with faults(label.key, view.nbytes):
            if view.nbytes <= INLINE:
                return self._put_row(label, bytes(view), validator)
            with Writing(self, label, at_once=True) as writing:
                writing.begin(ObjectInfo("", view.nbytes, validator))
                writing.write(0, view)
                return writing.publish(validator=validator)

    def put_pieces(self, label: Label, pieces: Sequence[Buffer]) -> Entry:
        """`put` of bytes in several buffers; large ones are written without being joined."""
        views = [memoryview(piece).cast("B") for piece in pieces]
        size = sum(map(len, views))
        with faults(label.key, size):
            if size <= INLINE:
                return self._put_row(label, b"".join(views), None, PATIENCE)
            with Writing(self, label, timeout=PATIENCE, at_once=True) as writing:
                writing.begin(ObjectInfo("", size))
                at = 0
                for view in views:
                    writing.write(at, view)
                    at += view.nbytes
                return writing.publish()

    def _put_row(self, label: Label, data: bytes, validator: str | None, timeout: float = 0.0) -> Entry:
        checksum = blobs.checksum_of(data)

        def insert(txn: Txn) -> Entry:
            return self.inserter.insert(txn, label, txn.new_id(), "value", len(data), checksum, validator, data)

        with self._catalog.write() as txn:
            entry = self._insert_row(txn, label, data, checksum, validator)
            if isinstance(entry, Entry):
                return entry
            if self.budget.make_room(txn, entry, Search()).fits:
                return insert(txn)
        return self.budget.with_room(entry, insert, timeout=timeout)

    def _insert_row(self, txn: Txn, label: Label, data: bytes, checksum: bytes, validator: str | None) -> Entry | SpaceRequest:
        """Insert a small value, if there is room for it. Returns its entry, else what it requests."""
        fits = self.budget.room.grant(txn, label.space, label.key, len(data))
        if fits and (entry := self.inserter.add(txn, label, txn.new_id(), data, checksum, validator)) is not None:
            return entry
        request, short = self.budget.room.look(txn, SpaceRequest(label.space, label.key, 0, len(data), inline=True))
        if short is not None:
            return request
        return self.inserter.insert(txn, label, txn.new_id(), "value", len(data), checksum, validator, data, request)

    def put_many(self, items: Sequence[tuple[Label, Buffer]], validator: str | None = None) -> list[Entry]:
        """Store several values of one space: the small ones about a MiB in each transaction, files up to `TOGETHER`. Raises what `put`
        raises; the values before it stay."""
        left = deque(items)
        stored: list[Entry] = []
        with faults(items[0][0].key if items else ""):
            while left and _size_of(left[0]) <= INLINE and (some := self._put_some(left, validator)):
                stored += some
            while left:
                stored += self._put_together(self._take_files(left), validator)
            return stored

    def _put_some(self, left: deque[tuple[Label, Buffer]], validator: str | None) -> list[Entry]:
        """Store the first of ``left`` in one transaction, as long as they are small and fit without evicting."""
        stored: list[Entry] = []
        with self._catalog.write() as txn:
            done = 0
            while left and _size_of(left[0]) <= INLINE and done < AT_ONCE and len(stored) < PAIRS // 4:
                label, data = left[0][0], bytes(left[0][1])
                entry = self._insert_row(txn, label, data, blobs.checksum_of(data), validator)
                if not isinstance(entry, Entry):
                    break
                stored.append(entry)
                left.popleft()
                done += len(data) + ROW
        return stored

    def _take_files(self, left: deque[tuple[Label, Buffer]]) -> list[tuple[Label, Buffer]]:
        """The first of ``left``, and the files behind it that are published together with it."""
        taken = [left.popleft()]
        total, keys = _size_of(taken[0]), {taken[0][0].key}
        while left and INLINE < total < TOGETHER and len(taken) < FILES:
            size, key = _size_of(left[0]), left[0][0].key
            if size <= INLINE or total + size > TOGETHER or key in keys:
                break
            taken.append(left.popleft())
            keys.add(key)
            total += size
        return taken

    def _put_together(self, items: Sequence[tuple[Label, Buffer]], validator: str | None) -> list[Entry]:
        """Store files in one transaction; where there is no room for all of them, one by one."""
        if len(items) > 1:
            views = [memoryview(data).cast("B") for _, data in items]
            ready = [
                _Ready(Writing(self, label, validator=validator), view, len(view), blobs.checksum_of(view))
                for (label, _), view in zip(items, views, strict=True)
            ]
            with contextlib.suppress(errors.NoSpace):
                return self._publish_ready(ready)
        return [self.put(label, data, validator=validator) for label, data in items]

    def request(self, rows: Rows, label: Label, size: int) -> SpaceRequest:
        """The space that a write of ``size`` bytes needs now."""
        id, replaced = entries.version(rows, label.space, label.key)
        return SpaceRequest(label.space, label.key, hash_of(label.space, label.key), size, label.suffix, id, replaced)

    def ensure_room(self, space: int, files: Sequence[tuple[str, int]]) -> None:
        """Evict entries until all of ``files`` (key and size) fit. Nothing is done if a dead fetch left a partial of one of them, which can
        be resumed and would be the first victim. Raises `NoSpace`."""
        if not files or any(reservations.by_key(self.rows, hash_of(space, key)) for key, size in files if size > CHUNK):
            return
        room = self.budget.room
        charged = sum(room.charge(size) for _, size in files)
        request = SpaceRequest(space, files[0][0], 0, sum(size for _, size in files), charged=charged, entries=len(files))
        if not room.short(self.rows, request).fits:
            self.budget.with_room(request, lambda txn: None)

    def publish_small(self, writing: Writing, small: MemoryStage) -> Entry | None:
        """Write and publish a file from memory in one step; None where there is no room now."""
        return self._publish_if_fits([_Ready(writing, small.data, *small.finish())])[0]

    def publish_collected(self, writings: Sequence[Writing], leased: Sequence[bool], leases: Leases) -> list[Entry | Lease]:
        """Publish writes whose bytes are all in memory, in one transaction; makes space for all of them at once. Returns leases on those
        that are to be ``leased``, which exist before anybody can see the entries; else the entries. Raises `NoSpace` or another
        `CacheFault`; then none is published."""
        ready = [_Ready(writing, small.data, *small.finish()) for writing in writings if (small := writing.collected) is not None]
        for one, wanted in zip(ready, leased, strict=True):
            one.writing.prepare(leases if wanted else None)
        try:
            published = self._publish_ready(ready)
        except BaseException:
            for one in ready:
                one.writing.let_go()
            raise
        for one in ready:
            one.writing.published()
        pairs = zip(published, leased, strict=True)
        return [leases.adopt(entry) if wanted else entry for entry, wanted in pairs]

    def _publish_ready(self, ready: Sequence[_Ready]) -> list[Entry]:
        """Publish all in one transaction, with what has to be evicted for all of them."""
        with faults("several objects", sum(one.size for one in ready)):
            published = [entry for entry in self._publish_if_fits(ready) if entry is not None]
            return published or self._publish_with_room(ready)

    def _publish_with_room(self, ready: Sequence[_Ready]) -> list[Entry]:
        room, label, size = self.budget.room, ready[0].writing.label, sum(one.size for one in ready)
        charged = sum(room.charge(one.size) for one in ready)
        request = SpaceRequest(label.space, label.key, 0, size, charged=charged, entries=len(ready))
        return self.budget.with_room(request, lambda txn: self._publish_together(txn, ready, self._replaced(txn, ready)))

    def _publish_if_fits(self, ready: Sequence[_Ready]) -> Sequence[Entry | None]:
        """Publish all in one transaction, or none where space has to be made."""
        with self._catalog.write() as txn:
            if len(ready) == 1:
                return [self._publish_one_if_fits(txn, ready[0])]
            replaced = self._replaced(txn, ready)
            by_key = {entry.key: entry for entry in replaced}
            requests = [_request_of(one, by_key.get(one.writing.label.key)) for one in ready]
            return self._publish_together(txn, ready, replaced) if self.budget.room.fit_together(txn, requests) else [None] * len(ready)

    def _publish_one_if_fits(self, txn: Txn, one: _Ready) -> Entry | None:
        label = one.writing.label
        request, short = self.budget.room.look(txn, SpaceRequest(label.space, label.key, 0, one.size, label.suffix))
        if short is not None:
            if one.writing.spills:
                self.budget.check_lately(request, short)
            if not self.budget.make_room(txn, request, Search()).fits:
                return None
        id = txn.new_id()
        (slot,) = self.inserter.intend([id])
        self._write(one, id)
        return self.inserter.insert(txn, label, id, "blob", one.size, one.checksum, one.writing.validator, None, request, slot)

    def _replaced(self, txn: Txn, ready: Sequence[_Ready]) -> list[Entry]:
        return entries.find_many(txn, ready[0].writing.label.space, [one.writing.label.key for one in ready])

    def _publish_together(self, txn: Txn, ready: Sequence[_Ready], replaced: Sequence[Entry]) -> list[Entry]:
        """Publish files of one space. ``replaced``: their previous versions, as of this transaction."""
        ids = txn.new_ids(len(ready))
        slots = self.inserter.intend(ids)
        new: list[New] = []
        for one, id in zip(ready, ids, strict=True):
            self._write(one, id)
            new.append(New(one.writing.label, id, one.size, one.checksum, one.writing.validator))
        return self.inserter.insert_many(txn, new, slots, replaced)

    def _write(self, one: _Ready, id: int) -> None:
        blobs.write(self.root, id, one.data, one.checksum, one.writing.label.suffix)
        one.writing.named(id)

    def publish(self, writing: Writing) -> Entry:
        """Publish a finished stage: its name and its row, in one transaction."""
        writing.to_disk()
        size, checksum = writing.finish()
        label, reserved, stage = writing.label, writing.reserved, writing.stage
        with self._catalog.write() as txn:
            if reservations.by_id(txn, reserved.id) is None:
                raise errors.CacheFault(f"the reservation of {label.key!r} is gone: the catalog was recreated")
            writing.named(reserved.id)
            entry = self.inserter.insert(txn, label, reserved.id, "blob", size, checksum, writing.validator)
            reservations.delete(txn, reserved.id)
            blobs.publish(self.root, stage.path, reserved.id, label.suffix)
            txn.after_commit.append(partial(stages.remove_map, self.root, stage.keyhash, reserved.id))
            txn.leftovers = entries.any_leftovers(txn)
            return entry

    def build(
        self, label: Label, kind: str, size: int, leases: Leases, make: Callable[[int], object],
        undo: Callable[[int], object], *,
        validator: str | None = None, members: Sequence[tuple[str, int]] = (),
    ) -> Lease:  # fmt: skip
        """Reserve ``size`` bytes, let ``make`` build the files of the new id, enter the row, and return its lease, which exists before
        anybody can see the entry. ``undo`` removes the files after a failure. ``members``: names and ids of the entries of a tree.

        Raises `NoSpace` or another `CacheFault`."""
        with faults(label.key, size):
            reserved = self.budget.reserve(self.request(self.rows, label, size))
            held = False
            try:
                make(reserved.id)
                held = leases.hold(reserved.id)
                with self._catalog.write() as txn:
                    entry = self.inserter.insert(txn, label, reserved.id, kind, size, b"", validator)
                    if members:
                        entries.link(txn, entry.id, members)
                    reservations.delete(txn, reserved.id)
                    txn.leftovers = entries.any_leftovers(txn)
                return leases.adopt(entry)
            except BaseException:
                if held:
                    leases.let_go_soon(reserved.id)
                undo(reserved.id)
                self.budget.cancel(reserved.id)
                raise

    def adopt(self, keyhash: int) -> tuple[Reservation, Stage] | None:
        """Take over the partial of a fetch of this key whose process died or gave up; None if there is none.

        Caller: holds the key's lock."""
        if not reservations.by_key(self._catalog, keyhash):
            return None
        me = self._owners.me()
        with self._catalog.write() as txn:
            self._owners.reap(txn)
            left = [r for r in reservations.by_key(txn, keyhash) if r.owner is None]
            for reservation in left[:1]:
                reservations.set_owner(txn, reservation.id, me, self._owners.who)
        for reservation in left[:1]:
            try:
                stage = Stage.resume(self.root, keyhash, reservation.id)
                return reservation, stage or Stage.create(self.root, keyhash, reservation.id)
            except BaseException:
                self.give_up(reservation)  # else it counts as this process's for as long as the process lives
                raise
        return None

    def give_up(self, reserved: Reservation) -> None:
        """Leave a partial for a successor. It stays counted, and is the first to be evicted when space is needed."""
        with self._catalog.write() as txn:
            reservations.set_owner(txn, reserved.id, None)


class Writing:
    """One write: a `Sink` for a remote, then `publish`. Without that, the bytes are kept for a successor if it can resume them.

    Caller: holds the key's lock, unless nothing is to be resumed. ``reserved``: a reservation to use. ``on_progress`` is called with
    (done, total) bytes. ``timeout``: see `Budget.reserve`; ``at_once``: see `Stage.begin`. ``collect``: an object of at most so many bytes
    is kept in memory until it is published, together with others; but only a small one where a successor could resume a larger one."""

    def __init__(
        self, publisher: Publisher, label: Label, *, resume: bool = False, reserved: Reservation | None = None,
        on_progress: Callable[[int, int | None], None] | None = None, timeout: float = 0.0, collect: int = 0, at_once: bool = False,
        validator: str | None = None,
    ) -> None:  # fmt: skip
        self._publisher, self.label, self._on_progress, self._timeout = publisher, label, on_progress, timeout
        self._collect, self._at_once = collect, at_once
        self._keyhash = hash_of(label.space, label.key)
        self._reserved = reserved
        self._stage: Stage | None = None
        self._small: MemoryStage | None = None
        self._leases: Leases | None = None
        self._leased = 0
        self._resumable = self._published = False
        self.validator = validator
        self.info: ObjectInfo | None = None
        self.partial: Partial | None = None
        self.spills = False
        """Whether the object can be served from memory instead: then a failed search for space is not repeated for a moment."""
        if resume:
            with faults(label.key):
                left = publisher.adopt(self._keyhash)
            if left is not None:
                self._reserved, self._stage = left
                self.partial = self._stage.partial

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self.info, self._small = info, None
        self._resumable = info.strong and info.validator is not None and (info.size or 0) > CHUNK
        with faults(self.label.key, info.size or 0):
            size, at_most = info.size, SMALL if self._resumable else max(SMALL, self._collect)
            if self._reserved is None and size is not None and size <= at_most:
                self._small = MemoryStage(size)
                return (Span(0, size),) if size else ()
            return self._begin_on_disk(info)

    def _begin_on_disk(self, info: ObjectInfo) -> tuple[Span, ...]:
        publisher, size, self._small = self._publisher, info.size or 0, None
        budget = publisher.budget
        if self._reserved is None:
            if self.spills:
                request = SpaceRequest(self.label.space, self.label.key, self._keyhash, size, self.label.suffix)
                budget.check_lately(request, budget.room.short(publisher.rows, request))
            self._reserved = budget.reserve(publisher.request(publisher.rows, self.label, size), timeout=self._timeout)
        elif self._reserved.size < size:
            self._reserved = budget.resize(self._reserved, size)
        if self._stage is None:
            self._stage = Stage.create(publisher.root, self._keyhash, self._reserved.id)
        missing = self._stage.begin(info.size, info.validator if info.strong else None, on_grow=self._grow, at_once=self._at_once)
        if self._reserved.size > size:  # after the stage let go of what was written: no byte is ever uncounted
            self._reserved = budget.resize(self._reserved, size)
        return missing

    def to_disk(self) -> None:
        """Continue on disk with the bytes collected in memory: they do not fit without evicting, or are published with others."""
        small = self._small
        if small is not None and self.info is not None:
            small.finish()
            self._begin_on_disk(self.info)
            self.stage.write(0, small.data)

    def _grow(self, size: int) -> None:
        self._reserved = self._publisher.budget.resize(self.reserved, size)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
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
                while block := file.read(blobs.BLOCK):
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
            return hashlib.file_digest(file, "sha256").hexdigest()

    def finish(self) -> tuple[int, bytes]:
        """See `Stage.finish`."""
        return self.stage.finish()

    def publish(self, *, validator: str | None = None) -> Entry:
        """Publish the complete and verified bytes as an entry."""
        self.validator = validator
        with faults(self.label.key, (self.info and self.info.size) or 0):
            entry = self._publisher.publish_small(self, self._small) if self._small is not None else None
            if entry is None:
                entry = self._publisher.publish(self)
        self._published = True
        return entry

    def published(self) -> None:
        """Note that the write was published together with others."""
        self._published = True

    def named(self, id: int) -> None:
        """Note the id of the entry, and take the lease on it before anybody can see it."""
        if self._leases is not None:
            self._leases.hold(id)
            self._leased = id

    def publish_leased(self, leases: Leases, *, validator: str | None = None) -> Lease:
        """`publish`; returns a lease that exists before anybody can see the entry."""
        self._leases = leases
        try:
            return leases.adopt(self.publish(validator=validator))
        except BaseException:
            self.let_go()
            raise

    def prepare(self, leases: Leases | None) -> None:
        """Set what `publish_leased` is given: the write is published together with others."""
        self._leases, self.validator = leases, self.info.validator if self.info is not None else None

    def let_go(self) -> None:
        """Release the lease, if it was taken: the write was not published."""
        leases, self._leases = self._leases, None
        if leases is not None and self._leased:
            leases.let_go_soon(self._leased)
            self._leased = 0

    def set_meta(self, meta: str) -> None:
        """Set the small text that the entry will carry."""
        self.label = self.label._replace(meta=meta)

    def discard(self) -> None:
        """Keep nothing: the bytes are wrong."""
        self._resumable = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._published or self._reserved is None:
            return
        self._resumable &= not isinstance(value, errors.NoSpace)  # what has no space now is not resumed
        with faults(self.label.key):
            if self._stage is not None and self._resumable and self._stage.done:
                self._stage.close()
                self._publisher.give_up(self._reserved)
                return
            if self._stage is not None:
                self._stage.discard()
            self._publisher.budget.cancel(self._reserved.id)


def _size_of(item: tuple[Label, Buffer]) -> int:
    return memoryview(item[1]).nbytes


def _request_of(one: _Ready, old: Entry | None) -> SpaceRequest:
    label, replaces, replaced = one.writing.label, old.id if old is not None else 0, old.size if old is not None else 0
    return SpaceRequest(label.space, label.key, 0, one.size, label.suffix, replaces, replaced)
