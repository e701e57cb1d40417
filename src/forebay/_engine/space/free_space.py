"""How much of a root is free for a write: by the catalog's totals, or by what the put before left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from forebay._engine.catalog import entries, reservations, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import EASY, SpaceRows, Txn
from forebay._engine.files import stages
from forebay._engine.files.layout import ROW
from forebay._engine.files.root import Root
from forebay._engine.index.settings import RootLimits, SharedSettings, SpaceLimits
from forebay._kernel import host

COUNT_AGAIN = 0.01
"""Seconds after which the free bytes of a disk are counted again, even if there were `EASY` more than needed."""
NO_LIMIT = 1 << 62
FEW_FILES, MANY_FILES = 64, 1024
"""Where the disk has fewer inodes, files are evicted until there are twice as many; more than these are counted less often."""
GROWTH = 64 << 10
"""More bytes than the catalog or its log grows by for a small value, beside its charge and its key, which lies in two places."""


class SpaceRequest(NamedTuple):
    """The space that a write asks for. ``size`` in bytes; ``replaces``: the keys whose entries the write supersedes, which are not evicted,
    and whose bytes do not count against the quota. ``charged``: what the budget counts, if it is not the cost of one file of ``size``
    bytes; ``entries``: how many entries will be made of it; ``inline``: of small values. ``spills``: the caller can do without: a search
    that failed is not repeated for a moment."""

    space: str
    key: str
    keyhash: int
    size: int
    suffix: str = ""
    replaces: Sequence[str] = ()
    inline: bool = False
    charged: int = 0
    entries: int = 1
    spills: bool = False


class SpaceDeficit(NamedTuple):
    """What is lacking: ``quota`` and ``bytes`` in bytes, ``here`` (of the space) and ``rows`` in entries; positive where something must
    be evicted. ``disk``: bytes below ``min_free``. ``leftovers``: see
    `spaces.Totals`. ``of_space``: the quota itself. ``files``: how many files must go before the disk takes another one. ``log``: bytes of
    the catalog's log that count; while there are any, only files make room, since evicted values make it grow."""

    quota: int
    bytes: int
    rows: int
    free: int
    budget: int
    disk: int = 0
    leftovers: bool = False
    here: int = -NO_LIMIT
    of_space: int | None = None
    files: int = -NO_LIMIT
    log: int = 0

    @property
    def fits(self) -> bool:
        return self.quota <= 0 and self.bytes <= 0 and self.rows <= 0 and self.here <= 0 and self.files <= 0


class KnownSpace(NamedTuple):
    """What a transaction that added a small value leaves: true until anything else changes the catalog or the settings. ``change``: see
    `Txn`; ``bytes`` of the budget, of the ``quota`` of the ``space``, and ``entries`` that still fit."""

    change: int
    space: str
    bytes: int
    quota: int
    entries: int
    limits: RootLimits


_NOTHING_KNOWN = KnownSpace(-2, "", 0, 0, 0, RootLimits())


class FreeSpace:
    """The space of one root as it is now. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog, settings: SharedSettings) -> None:
        self._path, self._catalog, self.settings = str(root.path), catalog, settings
        self._block = host.disk(root.path).block
        self._known = _NOTHING_KNOWN  # set and read under the writer lock
        self._count_at = 0.0

    def charge(self, size: int, inline: bool = False) -> int:
        """The charge for ``size`` bytes while they are written: whole blocks and the chunk map, or bytes and a row for a small value."""
        return size + ROW if inline else stages.footprint(size, self._block)

    def charge_of(self, request: SpaceRequest) -> int:
        """The charge for a request."""
        return request.charged or self.charge(request.size, request.inline)

    def charge_published(self, size: int) -> int:
        """The charge for a published file of ``size`` bytes."""
        return -(-size // self._block) * self._block

    def short_of(self, txn: Txn, request: SpaceRequest | None, id: int = 0) -> SpaceDeficit:
        """`short`, for a caller that uses what there is. Caller: adds what the request is for, if it fits, and nothing else: then `knows`
        tells what is left."""
        limits, totals = self.settings.limits(), spaces.totals(txn, id, txn.space(request.space) if request else 0)
        txn.leftovers |= totals.leftovers
        short, self._known = self._short(txn, limits, totals, request, id), _NOTHING_KNOWN
        if short.fits and request is not None and request.inline and not (totals.leftovers or totals.any_promised):
            left = short.free - request.charged - request.entries * GROWTH - 8 * sum(map(len, request.replaces))
            self._known = KnownSpace(txn.change, request.space, left, -short.quota, -max(short.rows, short.here), limits)
        return short

    def short(self, rows: SpaceRows, request: SpaceRequest | None, id: int = 0) -> SpaceDeficit:
        """What a request lacks beside the reservation ``id``, which it has already, or what is lacking without a request."""
        totals = spaces.totals(rows, id, rows.space(request.space) if request else 0)
        return self._short(rows, self.settings.limits(), totals, request, id)

    def knows(self, txn: Txn, request: SpaceRequest) -> bool:
        """Whether a small value is known to fit, by what the transaction before left. False: `short` tells. Caller: adds its entry, and
        nothing else."""
        change, known, left, quota, count, limits = self._known
        if change not in (txn.seen, txn.change) or known != request.space or not request.inline or request.entries != 1:
            return False
        if limits is not self.settings.limits():
            return False
        left, quota, count = left - request.charged - GROWTH - 8 * len(request.key), quota - request.size, count - 1
        floor = (limits.min_free or 0) + self._catalog.ballast.owed + request.charged
        if left < 0 or quota < 0 or count < 0 or self._free_bytes(floor) < floor:
            return False
        self._known = KnownSpace(txn.change, request.space, left, quota, count, limits)
        return True

    def _short(self, rows: SpaceRows, limits: RootLimits, totals: spaces.Totals, request: SpaceRequest | None, id: int) -> SpaceDeficit:
        charge = self.charge_of(request) if request is not None else 0
        grown = totals.over + self._catalog.log_over
        used = totals.entries + totals.promised + grown
        if grown and request is not None:
            used += GROWTH
        if request is not None and request.inline:
            used -= totals.spare
        floor = (limits.min_free or 0) + self._catalog.ballast.owed + charge
        floor -= self._free_bytes(floor)
        quota = rows_over = count = -NO_LIMIT
        of_space, budget = limits.of_space(request.space if request is not None else ""), limits.budget or 0
        if of_space.quota is not None or of_space.max_count is not None or limits.max_entries is not None:
            quota, rows_over, count = self._over_limits(rows, limits.max_entries, of_space, totals, request, id)
        lacking = max(used + charge - budget, floor)
        files = -NO_LIMIT
        if request is not None and not request.inline and self._catalog.inodes_free < FEW_FILES:
            files = 2 * FEW_FILES - self._catalog.inodes_free
        return SpaceDeficit(
            quota, lacking, rows_over, budget - used, budget, floor, totals.leftovers, count, of_space.quota, files,
            self._catalog.log_over,
        )  # fmt: skip

    def _free_bytes(self, floor: int) -> int:
        """The bytes that are free on the disk. If there are many more than ``floor``, and many inodes, they are counted again some
        milliseconds later: no program fills that much meanwhile."""
        now, catalog = time.monotonic(), self._catalog
        if now >= self._count_at or catalog.free < floor + EASY or catalog.inodes_free < MANY_FILES:
            disk = host.disk(self._path)
            catalog.free, catalog.inodes_free, self._count_at = disk.free, disk.inodes_free, now + COUNT_AGAIN
        return catalog.free

    def _over_limits(
        self, rows: SpaceRows, max_entries: int | None, limits: SpaceLimits, totals: spaces.Totals, request: SpaceRequest | None, id: int
    ) -> tuple[int, int, int]:  # fmt: skip
        """By how much a request exceeds the quota of its space, the entries of the root, and those of its space."""
        quota = rows_over = count = -NO_LIMIT
        replaced = entries.sizes(rows, rows.space(request.space), request.replaces) if request is not None else {}
        new = request.entries - len(replaced) if request is not None else 0
        if request is not None and (limits.quota is not None or limits.max_count is not None):
            promised, many = reservations.reserved_in(rows, rows.space(request.space), id) if totals.any_promised else (0, 0)
            if limits.quota is not None:
                quota = totals.space + promised + request.size - sum(replaced.values()) - limits.quota
            if limits.max_count is not None:
                count = totals.rows_here + many + new - limits.max_count
        if max_entries is not None:
            rows_over = totals.rows + new - max_entries
        return quota, rows_over, count
