"""Space that is reserved ahead, and entries that are made of it many at a time: for prefetchers.

reserve   a row without files counts bytes, blocks and entries   a crash: the next process that lacks space deletes the row
keep      the files, their rows, a smaller reservation           a crash: as for any small files, see `insert`

So a loader need not ask before each read, and one transaction publishes what several reads brought. What is a file of this root already
gets a second name, a hard link, which is charged as any other file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from forebay import errors
from forebay._engine.catalog import entries, reservations
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.catalog.spaces import SpaceRow
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs
from forebay._engine.files.faults import faults
from forebay._engine.locks.lease import Lease
from forebay._engine.space.budget import Search
from forebay._engine.space.free_space import SpaceRequest
from forebay._engine.write.publish import INLINE, Label, Pending, Publisher
from forebay._engine.write.writing import Writing
from forebay._model import Buffer, Noted, ObjectInfo


class Need(NamedTuple):
    """Space for ``entries`` of ``size`` bytes in all, for which the budget counts ``charge``."""

    size: int = 0
    charge: int = 0
    entries: int = 0

    def plus(self, other: Need) -> Need:
        return Need(self.size + other.size, self.charge + other.charge, self.entries + other.entries)

    def times(self, n: int) -> Need:
        return Need(n * self.size, n * self.charge, n * self.entries)

    def minus(self, other: Need) -> Need:
        """The difference; zero where ``other`` is larger."""
        return Need(max(self.size - other.size, 0), max(self.charge - other.charge, 0), max(self.entries - other.entries, 0))

    def fits(self, each: Need) -> int:
        """For how many of ``each`` this is enough."""
        return min(have // one for have, one in zip(self, each, strict=True) if one)

    def least(self, other: Need) -> Need:
        """The smaller of both, by each number."""
        return Need(min(self.size, other.size), min(self.charge, other.charge), min(self.entries, other.entries))

    def covers(self, other: Need) -> bool:
        return self.size >= other.size and self.charge >= other.charge and self.entries >= other.entries


NOTHING = Need()


class Item(NamedTuple):
    """What is to be kept: bytes, or a leased file that gets a second name. ``session``: the id of the session whose end makes it useless;
    0: none."""

    key: str
    data: Buffer | Lease
    session: int = 0

    @property
    def note(self) -> str:
        """The small text that the entry is to carry."""
        return self.data.note if isinstance(self.data, Noted) else ""


class SpaceReservation:
    """What one loader has reserved in one space. For one thread at a time; a forked child begins without any."""

    def __init__(self, publisher: Publisher, space: SpaceRow) -> None:
        self._publisher, self._catalog, self._budget, self._space = publisher, publisher.catalog, publisher.budget, space
        self._row: Reservation | None = None
        self.promised = NOTHING

    def need(self, size: int) -> Need:
        """The space that one entry of ``size`` bytes takes."""
        return Need(size, self._budget.room.charge(size, inline=size <= INLINE), 1)

    def ask(self, more: Need) -> None:
        """Reserve ``more``, evicting where needed. Raises `NoSpace` or another `CacheFault`; then the reservation is unchanged."""
        total = self.promised.plus(more)
        with faults(self._space.name, total.size):
            if self._row is None:
                self._row = self._budget.reserve(self._request(total))
            else:
                self._row = self._budget.resize(self._row, total.size, charged=total.charge, entries=total.entries)
        self.promised = total

    def _request(self, need: Need) -> SpaceRequest:
        key = f"promised to {self._space.name}"
        return SpaceRequest(self._space.id, key, 0, need.size, charged=need.charge, entries=need.entries)

    def free(self) -> Need:
        """What could be reserved in addition without evicting."""
        short = self._budget.room.short(self._catalog, self._request(self.promised), self._row.id if self._row is not None else 0)
        return Need(max(-short.quota, 0), max(-short.bytes, 0), max(-max(short.rows, short.here), 0))

    def give_back(self, less: Need) -> None:
        """Reserve so much less."""
        if self._row is not None and less != NOTHING:
            with faults(self._space.name), self._catalog.write() as txn:
                left = self._shrink(txn, less)
            self._shrunk(left)
            self._budget.tell()

    def forget(self) -> None:
        """Drop the reservation without giving it back: it belongs to another process, or to a catalog that is gone."""
        self._row, self.promised = None, NOTHING

    def keep(self, items: Sequence[Item], *, life: str = "cached", more: Need = NOTHING) -> list[Lease]:
        """Make entries of small items, and of leased files of any size, out of the reservation, all or none; returns a lease on each.

        ``more``: reserved too if it fits without evicting. Caller: holds the keys. Raises `CacheFault`, also for a lease on what is no file
        of this root."""
        used = NOTHING
        for item in items:
            used = used.plus(self._needed_by(item))
        with faults(self._space.name, used.size):
            batch = [self._pending(item, life) for item in items]
            with self._catalog.write() as txn:
                kept = self._publisher.enter(txn, batch)
                left = self._shrink(txn, used, more)
        self._shrunk(left)
        return [new.lease for new in kept if new.lease is not None]

    def _needed_by(self, item: Item) -> Need:
        if not isinstance(item.data, Lease):
            return self.need(len(item.data))
        source = item.data.entry
        if not self._publisher.leases.is_own_file(item.data):
            raise errors.CacheFault(f"{source.key!r} cannot be linked: it is not a file of {self._publisher.root.path}", key=source.key)
        return Need(source.size, self._budget.room.charge(source.size), 1)

    def _pending(self, item: Item, life: str) -> Pending:
        label, data, validator = self._label(item, life), item.data, validator_of(item.session)
        if not isinstance(data, Lease):
            return self._publisher.of_bytes(label, data, validator, leased=True)
        root, path = self._publisher.root, data.path
        return Pending(
            label, "blob", data.entry.size, data.entry.checksum, validator, leased=True,
            place=lambda txn, id: blobs.link_blob(root, path, id),
        )  # fmt: skip

    def keep_large(self, item: Item, *, life: str = "cached") -> Lease:
        """`keep` for the bytes of one item, too many to be written while others wait to write."""
        assert not isinstance(item.data, Lease), "a link writes no bytes"
        label, size = self._label(item, life), len(item.data)
        with faults(item.key, size), self._catalog.write() as txn:
            own = self._budget.grant(txn, SpaceRequest(label.space, label.key, label.keyhash, size), Search())
            left = self._shrink(txn, self.need(size))
        self._shrunk(left)
        with Writing(self._publisher, label, reserved=own) as writing:
            writing.begin(ObjectInfo("", size))
            writing.write(0, item.data)
            return writing.publish_leased(validator=validator_of(item.session))

    def _label(self, item: Item, life: str) -> Label:
        return Label(self._space.id, self._space.name, item.key, life=life, meta=item.note)

    def _shrink(self, txn: Txn, used: Need, more: Need = NOTHING) -> Reservation | None:
        """The row without what was ``used``, and with ``more`` if that fits; None if nothing is left."""
        row = reservations.by_id(txn, self._row.id) if self._row is not None else None
        if row is None:
            raise errors.CacheFault(f"the room promised to {self._space.name} is gone: the catalog was recreated")
        if not self.promised.covers(used):
            raise errors.CacheFault(f"{used.size:,} bytes were not promised to {self._space.name}: {self.promised.size:,} are")
        left = self.promised.minus(used)
        if more != NOTHING and self._budget.room.short(txn, self._request(left.plus(more)), row.id).fits:
            left = left.plus(more)
        if left == NOTHING:  # bytes without entries stay reserved: the caller then asks for so much less
            reservations.delete(txn, row.id)
            return None
        row = row._replace(size=left.size, charge=left.charge, rows=left.entries)
        reservations.update(txn, row)
        return row

    def _shrunk(self, row: Reservation | None) -> None:
        """Note the row that `_shrink` returned, once it is committed."""
        self._row = row
        self.promised = Need(row.size, row.charge, row.rows) if row is not None else NOTHING


def validator_of(session: int) -> str | None:
    """The validator of an item that is removed with a session; None for session 0."""
    return entries.session_of(session) if session else None
