"""Reads what a root holds and what was counted, for listings and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from forebay._engine.catalog import Catalog, entries, spaces
from forebay._engine.catalog.wal import FREE, Wal
from forebay._engine.files.layout import FANS
from forebay._engine.files.root import Root
from forebay._engine.index.adaptive import AdaptiveSpaces
from forebay._engine.index.counters import NAMES, Counters
from forebay._engine.index.ghosts import Standing
from forebay._engine.index.records import EntryIndex
from forebay._engine.index.settings import SharedSettings
from forebay._engine.locks.leases import Leases
from forebay._model import Entry

ENTRIES_PER_PAGE = 1000
"""Entries that are read at a time: a few milliseconds of SQLite."""
SAMPLED = 1000
"""Entries that `StatsReader.index_use` looks up."""
Facts = tuple[str, int, float, float, str, bool]
"""Of an entry: key, bytes, when it was last used and when created, in seconds since 1970, life, and whether it is leased."""


class Usage(NamedTuple):
    """How full a root is, in bytes: used by entries, reserved by writes, and the budget; and its limits of transfers, 0: none.

    ``standings``: of the adaptive spaces, by name; None: no process has used one yet."""

    used: int
    reserved: int
    budget: int
    spaces: tuple[spaces.SpaceRow, ...] = ()
    max_rate: int = 0
    max_connections: int = 0
    standings: Mapping[str, Standing | None] = MappingProxyType({})


class IndexUse(NamedTuple):
    """The state of the index of keys, and what it is good for: of ``sampled`` entries it leads to ``led``.

    ``is_there``: False where there is no table. ``buckets``: of the table, ``used`` of them in use; 0 where it cannot be used. ``size``:
    bytes on the disk; ``changed``: when a file of it was last created or replaced, in seconds since 1970."""

    is_there: bool
    buckets: int
    used: int
    size: int
    changed: float
    sampled: int
    led: int


class StatsReader:
    """Reads the statistics of one root. Takes no lock: another process may change what was read at any time."""

    def __init__(
        self, root: Root, catalog: Catalog, index: EntryIndex, counters: Counters, leases: Leases, adaptive: AdaptiveSpaces,
        settings: SharedSettings,
    ) -> None:  # fmt: skip
        self._settings, self._root, self._index, self._adaptive = settings, root, index, adaptive
        self._catalog, self._counters, self._leases = catalog, counters, leases

    def entries(self, space: int | None) -> list[Entry]:
        """Live entries with their times, the least recently used first."""
        return sorted((self._index.with_times(entry) for entry in entries.live(self._catalog, space)), key=lambda entry: entry.used)

    def page(self, space: int, after: str | None, *, backwards: bool = False) -> list[Entry]:
        """Up to `ENTRIES_PER_PAGE` live entries of one space with their times, in the order of their keys, those after ``after``."""
        rows = entries.page(self._catalog, space, after, ENTRIES_PER_PAGE, backwards=backwards)
        leased = self._leases.leased_among([entry.id for entry in rows])
        times = self._index.times([entry.slot for entry in rows])
        walls = self._index.head.clock.walls
        used, validated = walls(last for last, _ in times), walls(at for _, at in times)
        return [
            entry._replace(used=last, validated=at, leased=entry.id in leased)
            for entry, last, at in zip(rows, used, validated, strict=True)
        ]

    def fact_page(self, space: int, after: str | None, *, backwards: bool = False) -> list[Facts]:
        """`page`, with only the facts that listings of many entries show."""
        rows = entries.page_of_facts(self._catalog, space, after, ENTRIES_PER_PAGE, backwards=backwards)
        leased = self._leases.leased_among([row[0] for row in rows])
        used = self._index.head.clock.walls(self._index.used_many([row[2] for row in rows]))
        return [(key, size, last, created, life, id in leased) for (id, key, _, size, life, created), last in zip(rows, used, strict=True)]

    def key_page(self, space: int, after: str | None, *, backwards: bool = False) -> list[str]:
        """`page`, of the keys alone."""
        return [key for key, _ in entries.page_of_keys(self._catalog, space, after, ENTRIES_PER_PAGE, backwards=backwards)]

    def keys(self, space: int) -> list[str]:
        """The keys of one space, the least recently used first."""
        keys: list[tuple[int, str]] = []
        rows = entries.page_of_keys(self._catalog, space, None, ENTRIES_PER_PAGE)
        while rows:
            keys += zip(self._index.used_many([slot for _, slot in rows]), (key for key, _ in rows), strict=True)
            rows = entries.page_of_keys(self._catalog, space, rows[-1][0], ENTRIES_PER_PAGE)
        return [key for _, key in sorted(keys)]

    def usage(self) -> Usage:
        rows, limits = tuple(spaces.every(self._catalog)), self._settings.limits()
        standings = {row.name: self._adaptive.standing(row.id) for row in rows if limits.policy_of(row.name).adapts}
        used, reserved = spaces.usage(self._catalog)
        return Usage(used, reserved, limits.budget or 0, rows, limits.max_rate or 0, limits.max_connections or 0, standings)

    def has_trees(self) -> bool:
        return entries.any_trees(self._catalog)

    def first_to_go(self) -> list[int]:
        """The ids of entries that are evicted before the least recently used one, in their order."""
        limits = self._settings.limits()
        rows = [row for row in spaces.every(self._catalog) if limits.policy_of(row.name).adapts]
        return [id for row in rows for id in self._adaptive.first_to_go(row.id)]

    def index_use(self) -> IndexUse:
        """How large and how full the index of keys is, and to how many entries of a sample it leads. Changes nothing."""
        folder = self._root.shared_dir
        files = self._in(folder)
        buckets, used = self._index.fullness() or (0, 0)
        sample = entries.sample(self._catalog, SAMPLED)
        hints = [self._index.find(entry.space, entry.key) for entry in sample]
        led = sum(hint is not None and hint[3] == entry.id for hint, entry in zip(hints, sample, strict=True))
        changed = self._root.files.lstat(folder).st_mtime if files else 0.0
        return IndexUse(folder / "keys" in files, buckets, used, sum(map(self._blocks, files)), changed, len(sample), led)

    def overhead(self) -> dict[str, int]:
        """Bytes on the disk that the budget does not count: ``log``, ``slots`` (the records of entries, the table of keys, and the copies
        of small values), ``directories``, and ``other`` files, which are locks, counters, the ballast, and the allowance of the catalog
        beside small values."""
        root, wal = self._root, Wal(str(self._root.catalog), self._root.files)
        top = ("FORMAT", "CACHEDIR.TAG", "settings.json", "counters", root.ballast.name)
        folders = [root.shared_dir, root.blobs_dir, root.trees_dir, root.packs_dir, root.tmp_dir, root.words.parent]
        folders += [root.path, *(root.blobs_dir / fan for fan in FANS)]
        other = sum(self._blocks(path) for path in (root.path / name for name in top)) + sum(map(self._blocks, self._in(root.words.parent)))
        return {
            "log": min(self._blocks(Path(wal.log)), FREE) + self._blocks(Path(wal.index)),
            "slots": sum(map(self._blocks, self._in(root.shared_dir))),
            "directories": sum(map(self._blocks, folders)),
            "other": other + spaces.uncharged(self._catalog),
        }

    def _in(self, folder: Path) -> list[Path]:
        try:
            return [folder / name for name in self._root.files.names_in(folder)]
        except FileNotFoundError:
            return []

    def _blocks(self, path: Path) -> int:
        try:
            return self._root.files.lstat(path).st_blocks * 512
        except FileNotFoundError:
            return 0

    def counts(self) -> dict[str, int]:
        """The sums of the counter pages of all processes since they were last zeroed."""
        return {name: max(count, 0) for name, count in self._sums().items()}

    def _sums(self) -> dict[str, int]:
        noted = spaces.counters(self._catalog)
        return {name: noted.get(name, 0) + count for name, count in zip(NAMES, self._counters.totals(), strict=True)}

    def zero_counts(self) -> None:
        """Note the present sums, to be subtracted from now on: only its owner writes a page."""
        with self._catalog.write() as txn:
            spaces.add_counters(txn, [(name, -value) for name, value in self._sums().items()])
