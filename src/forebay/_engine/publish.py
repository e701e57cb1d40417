"""From bytes to an entry: reserve, stage, then one transaction that inserts the row, frees the reservation and renames the file.

reserve       a row counts the bytes                        a crash leaves a counted partial
stage         the file grows under tmp/                     a crash leaves a counted partial, resumed where it can be
row, rename   uncommitted row, then the final name          a crash leaves the reservation, which names both places
commit        the entry is visible, the reservation gone
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Self

from forebay import errors
from forebay._engine import blobs, trees
from forebay._engine.budget import Budget, Want
from forebay._engine.catalog import Catalog, Txn, entries, reservations
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.chunkmaps import CHUNK
from forebay._engine.eviction import Eviction
from forebay._engine.faults import faults
from forebay._engine.fill import hash_of
from forebay._engine.leases import Lease, Leases
from forebay._engine.owners import Owners
from forebay._engine.root import Root
from forebay._engine.slots import Slots
from forebay._engine.stages import Stage
from forebay._kernel import host
from forebay._model import Buffer, Entry, ObjectInfo, Partial, Span

INLINE = 16 << 10
"""Values up to this size lie in the catalog: neither a block nor an inode each."""


@dataclass(frozen=True, slots=True)
class Label:
    """What an entry is to be called and to carry. ``life``: ``cached``, ``pinned`` or ``held``; a pin follows the name."""

    space: int
    space_name: str
    key: str
    suffix: str = ""
    life: str = "cached"
    meta: str = ""


class Publisher:
    """Writes entries into one root. Callable from any thread."""

    def __init__(
        self, root: Root, catalog: Catalog, slots: Slots, leases: Leases, owners: Owners, budget: Budget, eviction: Eviction
    ) -> None:
        self._root, self._catalog, self._slots, self._leases = root, catalog, slots, leases
        self._owners, self._budget, self._eviction = owners, budget, eviction

    def put(self, label: Label, data: Buffer, *, validator: str | None = None) -> Entry:
        """Store bytes that are at hand. Raises `NoSpace` or another `CacheFault`; then what was there before stays."""
        view = memoryview(data).cast("B")
        with faults(label.key, view.nbytes):
            if view.nbytes <= INLINE:
                return self._put_row(label, view, validator)
            with Writing(self, label) as writing:
                writing.begin(ObjectInfo("", view.nbytes, validator))
                writing.write(0, view)
                return writing.publish(validator=validator)

    def _put_row(self, label: Label, view: memoryview, validator: str | None) -> Entry:
        data = bytes(view)
        checksum = blobs.checksum_of(data)
        with self._catalog.write() as txn:
            want = self._want(txn, label, len(data), inline=True)
            if self._budget.fits(txn, want):
                entry = self._insert(txn, label, txn.take("next_id"), "value", len(data), checksum, validator, data, want)
                return _noting_leftovers(txn, entry)
        reserved = self._budget.reserve(want)
        try:
            with self._catalog.write() as txn:
                entry = self._insert(txn, label, reserved.id, "value", len(data), checksum, validator, data)
                reservations.delete(txn, reserved.id)
                return _noting_leftovers(txn, entry)
        except BaseException:
            self._budget.cancel(reserved.id)
            raise

    def put_many(self, items: Sequence[tuple[Label, Buffer]]) -> list[Entry]:
        """Store several values, as many small ones as fit in one transaction. Raises what `put` does; those before it stay."""
        left = deque(items)
        found: list[Entry] = []
        with faults(items[0][0].key if items else ""):
            with self._catalog.write() as txn:
                while left and memoryview(left[0][1]).nbytes <= INLINE:
                    label, data = left[0][0], bytes(left[0][1])
                    if not self._budget.fits(txn, self._want(txn, label, len(data), inline=True)):
                        break
                    found.append(self._insert(txn, label, txn.take("next_id"), "value", len(data), blobs.checksum_of(data), None, data))
                    left.popleft()
                txn.leftovers = entries.any_leftovers(txn)
            return found + [self.put(label, data) for label, data in left]

    def _want(self, rows: Txn | Catalog, label: Label, size: int, *, inline: bool = False) -> Want:
        old = entries.find(rows, label.space, label.key)
        keyhash = hash_of(label.space, label.key)
        return Want(label.space, label.key, keyhash, size, label.suffix, old.id if old else 0, old.size if old else 0, inline)

    def _insert(
        self, txn: Txn, label: Label, id: int, kind: str, size: int, checksum: bytes, validator: str | None, data: bytes | None = None,
        want: Want | None = None,
    ) -> Entry:  # fmt: skip
        """Enter the row and its slot, and let the version before go. Nothing of it is seen before the commit but empty slots.

        ``want``: made in this very transaction, so that it tells whether there is a version before."""
        now = host.now_ns()
        old = entries.find(txn, label.space, label.key) if want is None or want.replaces else None
        if old is not None:
            entries.supersede(txn, old)
            self._slots.clear(old.slot, old.id)
        slot = entries.take_slot(txn)
        self._slots.ensure(slot)
        charge = self._budget.charge(size, inline=True) if kind == "value" else self._budget.charge_published(size)
        life = "pinned" if old is not None and old.life == "pinned" else label.life
        entry = Entry(
            id, label.space_name, label.key, kind, size, charge, slot, checksum, validator, now / 1e9, host.boot_id(), life,
            label.suffix, label.meta,
        )  # fmt: skip
        entries.insert(txn, label.space, entry, data)
        self._slots.touch(slot, now)
        self._slots.set_validated(slot, now)
        self._slots.set_id(slot, id)
        return entry

    def publish(self, writings: Sequence[Writing]) -> list[Entry]:
        """Give finished stages their names and their rows, all in one transaction."""
        ready = [(writing, *writing.finish()) for writing in writings]
        named: list[Writing] = []
        try:
            with self._catalog.write() as txn:
                found = [self._publish_one(txn, writing, size, checksum, named) for writing, size, checksum in ready]
                txn.leftovers = entries.any_leftovers(txn)
                return found
        except BaseException:
            for writing in named:
                blobs.unpublish(self._root, writing.stage.path, writing.reserved.id, writing.label.suffix)
            raise

    def _publish_one(self, txn: Txn, writing: Writing, size: int, checksum: bytes, named: list[Writing]) -> Entry:
        label, reserved = writing.label, writing.reserved
        if reservations.by_id(txn, reserved.id) is None:
            raise errors.CacheFault(f"the reservation of {label.key!r} is gone: the catalog was made anew meanwhile")
        entry = self._insert(txn, label, reserved.id, "blob", size, checksum, writing.validator)
        reservations.delete(txn, reserved.id)
        blobs.publish(self._root, writing.stage.path, reserved.id, label.suffix)
        named.append(writing)
        return entry

    def plant(self, label: Label, members: Sequence[tuple[str, Entry]]) -> Entry:
        """A tree of entries: its directories cost room, its files are theirs. Caller: holds leases on the members and the tree's key."""
        keyhash = hash_of(label.space, label.key)
        with faults(label.key):
            names = [name for name, _ in members]
            size = trees.footprint(names, host.disk(self._root.path).block)
            reserved = self._budget.reserve(self._want(self._catalog, label, size))
            try:
                files = [(name, self._root.blob(entry.id, entry.suffix)) for name, entry in members]
                trees.build(self._root, reserved.id, files, keyhash=keyhash)
                with self._catalog.write() as txn:
                    entry = self._insert(txn, label, reserved.id, "tree", size, b"", None)
                    entries.link(txn, entry.id, [(name, member.id) for name, member in members])
                    reservations.delete(txn, reserved.id)
                    return _noting_leftovers(txn, entry)
            except BaseException:
                trees.remove(self._root, reserved.id, keyhash=keyhash)
                self._budget.cancel(reserved.id)
                raise

    def rename(self, space: int, key: str, label: Label) -> bool:
        """Let an entry have another name, in place of what had it. False if there is no such entry.

        It gets another slot: memos of other processes know the old name by the old one."""
        with faults(label.key), self._catalog.write() as txn:
            entry = entries.find(txn, space, key)
            if entry is None:
                return False
            old = entries.find(txn, label.space, label.key)
            if old is not None and old.id != entry.id:
                entries.supersede(txn, old)
                self._slots.clear(old.slot, old.id)
            slot = entries.take_slot(txn)
            self._slots.ensure(slot)
            self._slots.touch(slot, self._slots.used(entry.slot))
            self._slots.set_validated(slot, self._slots.validated(entry.slot))
            self._slots.clear(entry.slot, entry.id)
            entries.rename(txn, entry, label.space, label.key, slot)
            self._slots.set_id(slot, entry.id)
            txn.leftovers = True
            return True

    def link(self, label: Label, source: Entry) -> Entry:
        """The same bytes under another name: a hard link, charged to both spaces. Caller: holds a lease on ``source``."""
        with faults(label.key, source.size):
            reserved = self._budget.reserve(self._want(self._catalog, label, source.size))
            try:
                blobs.link_blob(self._root, self._root.blob(source.id, source.suffix), reserved.id, label.suffix)
                with self._catalog.write() as txn:
                    entry = self._insert(txn, label, reserved.id, "blob", source.size, source.checksum, source.validator)
                    reservations.delete(txn, reserved.id)
                    return _noting_leftovers(txn, entry)
            except BaseException:
                blobs.remove_blob(self._root, reserved.id, label.suffix)
                self._budget.cancel(reserved.id)
                raise

    def adopt(self, keyhash: int) -> tuple[Reservation, Stage] | None:
        """What a fetch of this key left whose process is gone or gave up. Caller: holds the key's lock."""
        if not reservations.by_key(self._catalog, keyhash):
            return None
        me = self._owners.me()
        with self._catalog.write() as txn:
            self._owners.reap(txn)
            left = [r for r in reservations.by_key(txn, keyhash) if r.owner is None]
            for reservation in left[:1]:
                reservations.set_owner(txn, reservation.id, me)
        for reservation in left[:1]:
            blobs.remove_blob(self._root, reservation.id, reservation.suffix)  # renamed by one who died before his commit
            stage = Stage.resume(self._root, keyhash, reservation.id)
            return reservation, stage or Stage.create(self._root, keyhash, reservation.id)
        return None

    def give_up(self, reserved: Reservation) -> None:
        """Leave a partial for a successor: counted, and the first to go when space is needed."""
        with self._catalog.write() as txn:
            reservations.set_owner(txn, reserved.id, None)


def _noting_leftovers(txn: Txn, entry: Entry) -> Entry:
    txn.leftovers = entries.any_leftovers(txn)
    return entry


class Writing:
    """One write: a `Sink` for a remote, then `publish`. Left without it, what came is kept for a successor where it can be resumed.

    Caller: holds the key's lock, unless nothing is to be resumed. ``on_progress`` is called with (done, total) bytes."""

    def __init__(
        self, publisher: Publisher, label: Label, *, resume: bool = False, on_progress: Callable[[int, int | None], None] | None = None
    ) -> None:
        self._publisher, self.label, self._on_progress = publisher, label, on_progress
        self._keyhash = hash_of(label.space, label.key)
        self._reserved: Reservation | None = None
        self._stage: Stage | None = None
        self._resumable = False
        self._published = False
        self.validator: str | None = None
        self.info: ObjectInfo | None = None
        self.partial: Partial | None = None
        if resume:
            with faults(label.key):
                left = publisher.adopt(self._keyhash)
            if left is not None:
                self._reserved, self._stage = left
                self.partial = self._stage.partial

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        self.info, size = info, info.size or 0
        publisher, budget = self._publisher, self._publisher._budget
        with faults(self.label.key, size):
            if self._reserved is None:
                self._reserved = budget.reserve(publisher._want(publisher._catalog, self.label, size))
            elif self._reserved.size < size:
                self._reserved = budget.resize(self._reserved, size)
            if self._stage is None:
                self._stage = Stage.create(publisher._root, self._keyhash, self._reserved.id)
            self._stage.on_grow = self._grow
            self._resumable = info.strong and info.validator is not None and size > CHUNK
            wanted = self._stage.begin(info.size, info.validator if info.strong else None)
            if self._reserved.size > size:  # after the stage let go of what was written: no byte is ever uncounted
                self._reserved = budget.resize(self._reserved, size)
            return wanted

    def _grow(self, size: int) -> None:
        self._reserved = self._publisher._budget.resize(self.reserved, size)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        with faults(self.label.key, len(data)):
            self.stage.write(offset, data)
        if self._on_progress is not None:
            self._on_progress(self.stage.done, self.stage.total)

    @property
    def stage(self) -> Stage:
        assert self._stage is not None, "nothing was begun"
        return self._stage

    @property
    def reserved(self) -> Reservation:
        assert self._reserved is not None, "nothing was begun"
        return self._reserved

    def path(self) -> str:
        """Where the bytes are now, for a check before they are published."""
        return str(self.stage.path)

    def finish(self) -> tuple[int, bytes]:
        """See `Stage.finish`."""
        return self.stage.finish()

    def publish(self, *, validator: str | None = None) -> Entry:
        """All bytes came and are right: make them an entry."""
        self.validator = validator
        with faults(self.label.key, self.reserved.size):
            (entry,) = self._publisher.publish([self])
        self._published = True
        return entry

    def published(self) -> None:
        """It was published together with others."""
        self._published = True

    def publish_leased(self, leases: Leases, *, validator: str | None = None) -> Lease:
        """The same, and a lease that is there before anybody else can see the entry."""
        id = self.reserved.id
        leases.hold(id)
        try:
            return leases.adopt(self.publish(validator=validator))
        except BaseException:
            leases.let_go_soon(id)
            raise

    def set_meta(self, meta: str) -> None:
        """Let the entry carry this."""
        self.label = replace(self.label, meta=meta)

    def discard(self) -> None:
        """What came is wrong: keep nothing of it."""
        self._resumable = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._published or self._reserved is None:
            return
        with faults(self.label.key):
            if self._stage is not None and self._resumable and self._stage.done:
                self._stage.close()
                self._publisher.give_up(self._reserved)
                return
            if self._stage is not None:
                self._stage.discard()
            self._publisher._budget.cancel(self._reserved.id)
