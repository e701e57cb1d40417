"""How much of the budget is used, and what a write lacks.

Used = published + reserved + doomed + superseded + what the catalog occupies above its allowance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from forebay._engine.catalog import Catalog, Rows, Txn, entries, reservations, spaces
from forebay._engine.files import stages
from forebay._engine.files.root import Root
from forebay._kernel import host

ROW = 256
"""What a small value costs beside its bytes."""
RECENT, MANY = 0.1, 64
NO_LIMIT = 1 << 62


class SpaceRequest(NamedTuple):
    """What a write asks room for. ``size`` in bytes; ``replaces``: the id that will be superseded, no victim, its ``replaced`` bytes
    do not count against the quota. ``charged``: what the budget counts, where it is not what one file of ``size`` bytes costs;
    ``entries``: how many will be made of it."""

    space: int
    key: str
    keyhash: int
    size: int
    suffix: str = ""
    replaces: int = 0
    replaced: int = 0
    inline: bool = False
    charged: int = 0
    entries: int = 1


class SpaceDeficit(NamedTuple):
    """What is lacking. ``quota`` and ``bytes`` in bytes, ``here`` (of the space) and ``rows`` in entries: positive where something
    has to go.
    ``leaving``: bytes that are on their way out already. ``disk``: bytes below ``min_free``. ``leftovers``: see `spaces.Totals`.
    ``of_space``: the quota itself."""

    quota: int
    bytes: int
    rows: int
    leaving: int
    free: int
    budget: int
    disk: int = 0
    leftovers: bool = False
    here: int = -NO_LIMIT
    of_space: int | None = None

    @property
    def fits(self) -> bool:
        return self.quota <= 0 and self.bytes <= 0 and self.rows <= 0 and self.here <= 0


class Room:
    """The room of one root, as things are. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog) -> None:
        self._path, self._catalog = str(root.path), catalog
        self._block = host.disk(root.path).block
        self._seen = 0, 0.0, SpaceDeficit(0, 0, 0, 0, 0, 0)

    def charge(self, size: int, inline: bool = False) -> int:
        """What ``size`` bytes count while they are written: whole blocks and the chunk map, or bytes and a row for a small value."""
        return size + ROW if inline else stages.footprint(size, self._block)

    def charge_of(self, want: SpaceRequest) -> int:
        """What the budget counts for ``want``."""
        return want.charged or self.charge(want.size, want.inline)

    def charge_published(self, size: int) -> int:
        """What a finished file of ``size`` bytes counts."""
        return -(-size // self._block) * self._block

    def short(self, rows: Rows, want: SpaceRequest | None, id: int = 0) -> SpaceDeficit:
        """What is lacking for ``want``, or for nothing new; older pending reservations are served before ``id``."""
        totals = spaces.totals(rows, id or None, want.space if want else 0)
        charge = self.charge_of(want) if want else 0
        used = totals.entries + totals.granted + totals.pending + totals.over
        self._catalog.free = host.free_bytes(self._path)
        floor = totals.min_free + self._catalog.ballast.owed + charge - self._catalog.free
        quota = count = rows_over = -NO_LIMIT
        replaces, replaced = (want.replaces, want.replaced) if want is not None else (0, 0)
        limited = totals.quota is not None or totals.max_count is not None or totals.max_entries is not None
        if want is not None and want.replaces and limited:
            # P1 asks, to replace an entry / P2 evicts that, and fills its place / P1 is to be granted room: there is nothing to replace.
            replaces, replaced = entries.version(rows, want.space, want.key)
        new = want.entries - bool(replaces) if want is not None else 0
        if want is not None and (totals.quota is not None or totals.max_count is not None):
            promised, many = reservations.reserved_in(rows, want.space, id) if totals.any_promised else (0, 0)
            if totals.quota is not None:
                quota = totals.space + promised + want.size - replaced - totals.quota
            if totals.max_count is not None:
                count = totals.rows_here + many + new - totals.max_count
        if totals.max_entries is not None:
            rows_over = totals.rows + new - totals.max_entries
        lacking = max(used + charge - totals.budget, floor)
        free = totals.budget - used
        return SpaceDeficit(quota, lacking, rows_over, totals.leaving, free, totals.budget, floor, totals.leftovers, count, totals.quota)

    def fits(self, txn: Txn, want: SpaceRequest) -> bool:
        """Whether ``want`` fits as things are. For what is written in this very transaction: its row is its reservation."""
        short = self.short(txn, want)
        txn.leftovers |= short.leftovers
        return short.fits

    def fit_together(self, txn: Txn, wants: Sequence[SpaceRequest]) -> bool:
        """Whether all of them fit as things are: for several in one transaction. Of one space, else False: each is looked at by itself."""
        first, others = wants[0], wants[1:]
        short = self.short(txn, first)
        txn.leftovers |= short.leftovers
        return (
            all(want.space == first.space for want in others)
            and short.quota + sum(want.size - want.replaced for want in others) <= 0
            and short.bytes + sum(self.charge(want.size) for want in others) <= 0
            and short.rows + len(others) <= 0
            and short.here + len(others) <= 0
        )

    def has_ample(self, want: SpaceRequest) -> bool:
        """Whether there seems to be room. Asked without the writer lock, so it may be wrong a moment later; for as long as that, what was
        seen does for others too where there was room for many of them."""
        space, until, seen = self._seen
        ample = max(seen.quota + MANY * want.size, seen.bytes + MANY * self.charge(want.size), seen.rows + MANY, seen.here + MANY) <= 0
        if space == want.space and time.monotonic() < until and ample:
            return True
        seen = self.short(self._catalog, want)
        self._seen = want.space, time.monotonic() + RECENT, seen
        return seen.fits
