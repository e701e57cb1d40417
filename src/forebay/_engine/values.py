"""The doors for who keeps values: written in pieces that nobody joins, read as what is remembered of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay._engine.ahead import Ahead
from forebay._engine.catalog import entries, spaces
from forebay._engine.engine import mending
from forebay._engine.files.faults import faults
from forebay._engine.index import counters
from forebay._engine.index.memo import Remembered
from forebay._engine.space.eviction import Doomed
from forebay._engine.write.insert import Label
from forebay._model import Buffer, Entry

_AT_ONCE = 128
Find = Callable[[str], Remembered | None]


def finds_nothing(name: str) -> None:
    """The `Find` of a store that remembers nothing."""


class Pieces(Ahead):
    """The part of `Store` that keeps encoded values."""

    def finder(self, space: str) -> Find:
        """See `Memo.finder`. In a read-only root there is nothing to touch: every look goes the long way."""
        return self.memo.finder(space) if not self.root.read_only else finds_nothing

    @mending
    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], *, life: str = "cached", meta: str = "") -> Entry:
        """Store bytes that come in pieces, one behind the other. Raises `NoSpace` or another `CacheFault`; what was there then stays."""
        self.check_usable(writing=True)
        place = self.space(space)
        entry = self._publisher.put_pieces(Label(place.id, place.name, key, life=life, meta=meta), pieces)
        self.counters.add(counters.BYTES_STORED, entry.size)
        return entry

    def private(self, found: Remembered) -> memoryview:
        """The same bytes, writable, with stores that stay with this view: a mapping of its own, or a copy where there is no file."""
        return self._reading.private(found.entry) or memoryview(bytearray(found.view))

    def is_intact(self, found: Remembered) -> bool:
        """Whether these bytes are what was stored: all of them are compared. What is damaged is set aside, and counted."""
        return self._reading.is_intact(found.entry, found.view)

    @mending
    def discard(self, entry: Entry) -> bool:
        """Remove an entry, a pinned one too; at once, at the cost of one entry. False if it is gone, or in use."""
        self.check_usable(writing=True)
        if entry.life == "pinned":
            with self._catalog.write() as txn:
                entries.set_life(txn, self.space(entry.space).id, entry.key, "cached")
        gone = self.drop([entry])
        self.counters.add(counters.EVICTIONS, gone)
        return bool(gone)

    @mending
    def clear(self, space: str) -> int:
        """Remove all entries of a space but pinned ones and those in use; gives how many went."""
        self.check_usable(writing=True)
        number, gone = self.known_space(space).id, 0
        with faults(space):
            page = self._census.page(number, None)
            while page:
                some = [(e.id, e.slot, Doomed(e.id, e.kind, e.suffix)) for e in page if e.life != "pinned"]
                for at in range(0, len(some), _AT_ONCE):
                    gone += len(self._eviction.remove(some[at : at + _AT_ONCE]))
                page = self._census.page(number, page[-1].key)
        self.counters.add(counters.EVICTIONS, gone)
        return gone

    @mending
    def keys(self, space: str) -> list[str]:
        """All keys of a space, from the least to the most recently used."""
        return self._census.keys(self.known_space(space).id)

    @mending
    def has_any(self, space: str, prefix: str) -> bool:
        """Whether a key of this space begins so."""
        return entries.has_any(self._catalog, self.known_space(space).id, prefix)

    def quota_of(self, space: str) -> int | None:
        """What the entries of a space may have in bytes, as whoever said so last has set it; None: no more than the root."""
        found = spaces.find(self._catalog, space)
        return found.quota if found is not None else None
