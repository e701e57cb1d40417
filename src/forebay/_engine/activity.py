"""`Store.activity`: what the processes of the node do with one root, and did, for people who look. Changes nothing, and takes no lock."""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from forebay import errors
from forebay._engine.catalog import failures, reservations, spaces
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.layout import LEASE_FILES
from forebay._engine.files.stages import progress_of
from forebay._engine.index.counters import NAMES
from forebay._engine.index.history import HOURS, MINUTES
from forebay._engine.index.waiting import Waiters
from forebay._kernel import locks
from forebay._model import Entry

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


class Activity:
    """The activity in one root. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @recover_and_retry
    def history(self, *, hours: bool = False) -> list[Period]:
        """What was counted lately, by minutes of the last day or by ``hours`` of the last month, oldest first. A period in which no process
        came is part of the next one. Where counters were lost, a period counts nothing."""
        clock = self.engine.index.head.clock
        totals = self.engine.history.read(HOURS if hours else MINUTES, clock.look())
        walls = clock.walls(one.time for one in totals)
        periods = zip(walls, walls[1:], totals, totals[1:], strict=False)
        return [
            Period(start, end, tuple(max(b - a, 0) for a, b in zip(before.counts, after.counts, strict=True)), after.used, after.budget)
            for start, end, before, after in periods
        ]

    @recover_and_retry
    def now(self) -> Now:
        """What happens now, and what failed last."""
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
        return [locks.describe_process(pid) for pid in locks.holders(self.engine.root.leases(entry.id % LEASE_FILES), entry.id)]

    def _waiters(self) -> list[Waiter]:
        holder_of = self.engine.parts.owners.holder_of
        waits = Waiters(self.engine.root).every()
        return [Waiter(locks.describe_process(one.pid), one.key, holder_of(one.keyhash), one.since) for one in waits]

    def _is_written(self, one: Reservation) -> bool:
        """Whether the process lives that it belongs to: it has its byte locked."""
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


def by_name(counts: tuple[int, ...]) -> dict[str, int]:
    """Counts with their names."""
    return dict(zip(NAMES, counts, strict=True))
