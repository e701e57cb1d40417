"""What is there and what was counted, for people and programs that look."""

from __future__ import annotations

from dataclasses import dataclass, replace

from forebay._engine.catalog import Catalog, entries, people, spaces
from forebay._engine.counters import NAMES, Counters
from forebay._engine.slots import Slots
from forebay._model import Entry


@dataclass(frozen=True, slots=True)
class Usage:
    """How full a root is, in bytes: of entries, of what is promised to writes, and what may be."""

    used: int
    reserved: int
    budget: int
    spaces: tuple[spaces.Space, ...] = ()


class Census:
    """Looks at one root. Takes no lock; another process may change what was seen at once."""

    def __init__(self, catalog: Catalog, slots: Slots, counters: Counters) -> None:
        self._catalog, self._slots, self._counters = catalog, slots, counters

    def entries(self, space: int | None) -> list[Entry]:
        """Live entries with their times, the least recently used first."""
        return sorted((self.with_times(entry) for entry in entries.live(self._catalog, space)), key=lambda entry: entry.used)

    def keys(self, space: int) -> list[str]:
        """The keys of one space, the least recently used first: for many, without the rest of what is known of them."""
        rows = entries.keys(self._catalog, space)
        used = self._slots.used_many([slot for _, slot in rows])
        return [key for _, key in sorted(zip(used, (key for key, _ in rows), strict=True))]

    def with_times(self, entry: Entry) -> Entry:
        used, validated = self._slots.used(entry.slot), self._slots.validated(entry.slot)
        return replace(entry, used=used / 1e9, validated=validated / 1e9)

    def usage(self) -> Usage:
        return Usage(*spaces.usage(self._catalog), tuple(spaces.every(self._catalog)))

    def counts(self) -> dict[str, int]:
        """The totals of processes that are gone, and the pages of those that live."""
        sums = dict.fromkeys(NAMES, 0) | spaces.counters(self._catalog)
        for owner in people.every(self._catalog):
            found, page = self._counters.read_page(owner.page)
            if found == owner.id:
                for name, value in zip(NAMES, page, strict=True):
                    sums[name] += value
        return sums

    def zero_counts(self) -> None:
        """Pages are their owners' to write: what they hold now is subtracted from the totals."""
        with self._catalog.write() as txn:
            spaces.add_counters(txn, [(name, -value) for name, value in self.counts().items()])
