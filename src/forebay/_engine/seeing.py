"""`Store.seeing`: what a root holds, what was counted, and what processes do with it, for people who look. But for zeroing the counters it
changes nothing, and it takes no lock: another process may change what was read at any time."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from forebay import errors
from forebay._engine.catalog import entries, failures, reservations, spaces
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.catalog.transactions import FREE, Wal
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.layout import FANS, LEASE_FILES
from forebay._engine.files.stages import progress_of
from forebay._engine.files.waiters import Waiters
from forebay._engine.index.adaptive import Standing
from forebay._engine.index.counters import HOURS, MINUTES, NAMES
from forebay._engine.spaces import Spaces
from forebay._kernel import locks
from forebay._model import Entry

ENTRIES_PER_PAGE = 1000
"""Entries that are read at a time: a few milliseconds of SQLite."""
SAMPLED = 1000
"""Entries that `Seeing.index_use` looks up."""
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


MOST_FAILURES = 50
MOST_LEASES = 10_000
"""Leases that are counted: each takes two system calls."""
_END = 1 << 62  # no id or hash of a key is as large


class Period(NamedTuple):
    """What was counted from ``start`` to ``end``, in seconds since 1970; ``counts`` in the order of `counters.NAMES`; ``used`` bytes of the
    ``budget`` at the end, both 0 if that is unknown."""

    start: float
    end: float
    counts: tuple[int, ...]
    used: int = 0
    budget: int = 0


class Fetch(NamedTuple):
    """A write in progress, mostly a fetch: ``done`` bytes of ``total`` (None: unknown), by ``process``, since a time in seconds since
    1970."""

    space: str
    key: str
    process: str
    done: int
    total: int | None
    since: float


class Waiter(NamedTuple):
    """``process`` waits for ``key``, on which ``holder`` works, since a time in seconds since 1970."""

    process: str
    key: str
    holder: str
    since: float


class Failure(NamedTuple):
    """A fetch or a computation that failed, at a time in seconds since 1970."""

    space: str
    key: str
    at: float
    error: str


class Now(NamedTuple):
    """What happens in a root now. ``leased``: entries that some process holds, at most `MOST_LEASES`. ``failures``: the last ones, newest
    first."""

    fetches: tuple[Fetch, ...] = ()
    waiters: tuple[Waiter, ...] = ()
    leased: int = 0
    failures: tuple[Failure, ...] = ()


class Seeing:
    """What can be seen of one root. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine, spaces: Spaces) -> None:
        self.engine, self._spaces = engine, spaces

    @recover_and_retry
    def entries(self, space: str | None = None) -> list[Entry]:
        """Live entries with their times, the least recently used first; ``leased`` is not set."""
        rows = entries.live(self.engine.parts.catalog, self._spaces.number(space) if space is not None else None)
        return sorted(map(self.engine.index.with_times, rows), key=lambda entry: entry.used)

    @recover_and_retry
    def page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Entry]:
        """Up to `ENTRIES_PER_PAGE` live entries of one space with their times, in the order of their keys, those after ``after``."""
        rows = entries.page(self.engine.parts.catalog, self._spaces.number(space), after, ENTRIES_PER_PAGE, backwards=backwards)
        leased = self.engine.parts.leases.leased_among([entry.id for entry in rows])
        times = self.engine.index.times([entry.slot for entry in rows])
        walls = self.engine.index.head.clock.walls
        used, validated = walls(last for last, _ in times), walls(at for _, at in times)
        return [
            entry._replace(used=last, validated=at, leased=entry.id in leased)
            for entry, last, at in zip(rows, used, validated, strict=True)
        ]

    @recover_and_retry
    def fact_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Facts]:
        """`page`, with only the facts that listings of many entries show."""
        rows = entries.page_of_facts(self.engine.parts.catalog, self._spaces.number(space), after, ENTRIES_PER_PAGE, backwards=backwards)
        leased = self.engine.parts.leases.leased_among([row[0] for row in rows])
        used = self.engine.index.head.clock.walls(self.engine.index.used_many([row[2] for row in rows]))
        return [(key, size, last, created, life, id in leased) for (id, key, _, size, life, created), last in zip(rows, used, strict=True)]

    @recover_and_retry
    def key_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[str]:
        """`page`, of the keys alone."""
        return [
            key
            for key, _ in entries.page_of_keys(
                self.engine.parts.catalog, self._spaces.number(space), after, ENTRIES_PER_PAGE, backwards=backwards
            )
        ]

    @recover_and_retry
    def keys(self, space: str) -> list[str]:
        """The keys of one space, the least recently used first."""
        id, keys = self._spaces.number(space), list[tuple[int, str]]()
        rows = entries.page_of_keys(self.engine.parts.catalog, id, None, ENTRIES_PER_PAGE)
        while rows:
            keys += zip(self.engine.index.used_many([slot for _, slot in rows]), (key for key, _ in rows), strict=True)
            rows = entries.page_of_keys(self.engine.parts.catalog, id, rows[-1][0], ENTRIES_PER_PAGE)
        return [key for _, key in sorted(keys)]

    @recover_and_retry
    def usage(self) -> Usage:
        """How much is used and reserved now."""
        rows, limits = tuple(spaces.every(self.engine.parts.catalog)), self.engine.settings.limits()
        standings = {row.name: self.engine.adaptive.standing(row.id) for row in rows if limits.policy_of(row.name).adapts}
        used, reserved = spaces.usage(self.engine.parts.catalog)
        return Usage(used, reserved, limits.budget or 0, rows, limits.max_rate or 0, limits.max_connections or 0, standings)

    @recover_and_retry
    def first_to_go(self) -> list[int]:
        """The ids of entries that are evicted before the least recently used one, in their order."""
        limits = self.engine.settings.limits()
        rows = [row for row in spaces.every(self.engine.parts.catalog) if limits.policy_of(row.name).adapts]
        return [id for row in rows for id in self.engine.adaptive.first_to_go(row.id)]

    def index_use(self) -> IndexUse:
        """The size and the fill of the index of keys, and to how many entries of a sample it leads. Changes nothing."""
        folder = self.engine.root.shared_dir
        files = self._in(folder)
        buckets, used = self.engine.index.fullness() or (0, 0)
        sample = entries.sample(self.engine.parts.catalog, SAMPLED)
        hints = [self.engine.index.find(entry.space, entry.key) for entry in sample]
        led = sum(hint is not None and hint[3] == entry.id for hint, entry in zip(hints, sample, strict=True))
        changed = self.engine.root.files.lstat(folder).st_mtime if files else 0.0
        return IndexUse(folder / "keys" in files, buckets, used, sum(map(self._blocks, files)), changed, len(sample), led)

    @recover_and_retry
    def overhead(self) -> dict[str, int]:
        """Bytes on the disk that the budget does not count: ``log``, ``slots`` (the records of entries, the table of keys, and the copies
        of small values), ``directories``, and ``other`` files, which are locks, counters, the ballast, and the allowance of the catalog
        beside small values."""
        root, wal = self.engine.root, Wal(str(self.engine.root.catalog), self.engine.root.files)
        top = ("FORMAT", "CACHEDIR.TAG", "settings.json", "counters", root.ballast.name)
        folders = [root.shared_dir, root.blobs_dir, root.trees_dir, root.packs_dir, root.tmp_dir, root.words.parent]
        folders += [root.path, *(root.blobs_dir / fan for fan in FANS)]
        other = sum(self._blocks(path) for path in (root.path / name for name in top)) + sum(map(self._blocks, self._in(root.words.parent)))
        return {
            "log": min(self._blocks(Path(wal.log)), FREE) + self._blocks(Path(wal.index)),
            "slots": sum(map(self._blocks, self._in(root.shared_dir))),
            "directories": sum(map(self._blocks, folders)),
            "other": other + spaces.uncharged(self.engine.parts.catalog),
        }

    def _in(self, folder: Path) -> list[Path]:
        return [folder / name for name in self.engine.root.files.names_in(folder)]

    def _blocks(self, path: Path) -> int:
        try:
            return self.engine.root.files.lstat(path).st_blocks * 512
        except FileNotFoundError:
            return 0

    @recover_and_retry
    def counts(self) -> dict[str, int]:
        """The counters of all processes together since the last `zero_counts`."""
        return {name: max(count, 0) for name, count in self._sums().items()}

    def _sums(self) -> dict[str, int]:
        noted = spaces.counters(self.engine.parts.catalog)
        return {name: noted.get(name, 0) + count for name, count in zip(NAMES, self.engine.counters.totals(), strict=True)}

    @recover_and_retry
    def zero_counts(self) -> None:
        """Set the counters of all processes to zero: the present sums are noted, to be subtracted, since only its owner writes a page."""
        with self.engine.parts.catalog.write() as txn:
            spaces.add_counters(txn, [(name, -value) for name, value in self._sums().items()])

    @recover_and_retry
    def lacking(self, need: int) -> int:
        """Bytes that must be freed before ``need`` more fit into the budget, and onto the disk beside what must stay free of it."""
        return self.engine.parts.writers.budget.room.short(self.engine.parts.catalog, None).bytes + need

    # -- activity --------------------------------------------------------------------------------------------------

    @recover_and_retry
    def history(self, *, hours: bool = False) -> list[Period]:
        """Recent counts, by minutes of the last day or by ``hours`` of the last month, oldest first. A period in which no process used the
        root is part of the next one. Where counters were lost, a period counts nothing."""
        clock = self.engine.index.head.clock
        totals = self.engine.history.read(HOURS if hours else MINUTES, clock.look())
        walls = clock.walls(one.time for one in totals)
        periods = zip(walls, walls[1:], totals, totals[1:], strict=False)
        return [
            Period(start, end, tuple(max(b - a, 0) for a, b in zip(before.counts, after.counts, strict=True)), after.used, after.budget)
            for start, end, before, after in periods
        ]

    @recover_and_retry
    def activity(self) -> Now:
        """What happens now, and the latest failures."""
        catalog = self.engine.parts.catalog
        names = {row.id: row.name for row in spaces.every(catalog)}
        fetches = []
        for one in filter(self._is_written, reservations.in_progress(catalog)):
            progress = progress_of(self.engine.root, one.keyhash, one.id)
            done, total = progress if progress is not None else (0, one.size or None)
            fetches.append(Fetch(names.get(one.space, ""), one.key, one.who, done, total, one.created))
        ticks, wall = time.monotonic_ns(), time.time()
        failed = (
            Failure(space, key, wall - (ticks - at) / 1e9, str(errors.from_wire(error)))
            for space, key, at, error in failures.latest(catalog, MOST_FAILURES)
            if at <= ticks
        )
        return Now(tuple(fetches), tuple(self._waiters()), self._leased(), tuple(failed))

    def leased_by(self, entry: Entry) -> list[str]:
        """The processes that hold a lease on an entry, as far as /proc shows them: those of other users it shows to root only."""
        return [locks.describe_process(pid) for pid in locks.holders(self.engine.root.leases(entry.id), entry.id)]

    def _waiters(self) -> list[Waiter]:
        holder_of = self.engine.parts.owners.holder_of
        waits = Waiters(self.engine.root).every()
        return [Waiter(locks.describe_process(one.pid), one.key, holder_of(one.keyhash), one.since) for one in waits]

    def _is_written(self, one: Reservation) -> bool:
        """Whether the process that owns the reservation is alive: it has its byte locked."""
        root = self.engine.root
        fd = root.files.open(root.lock("owners"), os.O_RDONLY)
        try:
            return one.owner is not None and locks.locked_at(fd, one.owner) is not None
        finally:
            os.close(fd)

    def _leased(self) -> int:
        """How many entries are leased."""
        count, root = 0, self.engine.root
        for number in range(LEASE_FILES):
            fd = root.files.open(root.leases(number), os.O_RDONLY)
            try:
                ranges = [(0, _END)]
                while ranges and count < MOST_LEASES:
                    low, high = ranges.pop()
                    if low < high and (at := locks.locked_at(fd, low, high - low)) is not None:
                        count += 1
                        ranges += (low, at), (at + 1, high)
            finally:
                os.close(fd)
        return count
