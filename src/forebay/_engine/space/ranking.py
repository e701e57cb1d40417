"""Finds the coldest entries without reading the catalog and without a long writer lock.

The records say when each entry was last used, and to which space it belongs. It is scanned in *stripes*, each an even sample of
the whole table: the first tells about where the coldest end, the others add the entries that are colder than that. After all stripes the
result holds every entry up to that time, coldest first. It is exact, since times only grow: an entry that was used or created after its
stripe was scanned is warmer. A victim is taken only while its time has not changed. What the table does not say (pins, links, sizes) is
read from the catalog, by id, for some entries at a time.

Each call scans a few stripes at most. In a root with more entries than `AT_ONCE` stripes hold, a process takes its first victims from a
sample: they are among the coldest hundredth, and exact once all stripes were scanned.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from forebay._engine.catalog import entries, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Rows
from forebay._engine.index.adaptive import AdaptiveSpaces
from forebay._engine.index.records import EntryIndex

PICKED = 4096
"""About so many candidates are picked in one scan of the whole table."""
STRIPE = 8192
AT_ONCE = 8
LOOK_EVERY = 16
"""One more stripe is scanned for so many victims."""
_SAMPLE = 64  # so many at least say where the coldest end
_ROWS, _ROWS_UNLOCKED = 64, 1024  # asked of the catalog at a time: inside a transaction, and under no lock
SPARED_FOR = 60.0
"""Seconds for which entries that were pinned or linked are skipped unread, while any other can be evicted."""
_IN_VAIN = 8  # times in a row: all were pinned or linked; `pick` goes on, under no lock


class Scope(NamedTuple):
    """The entries of one space, or all ``but`` those of one."""

    only: int | None = None
    but: int | None = None

    def may_have(self, space: int) -> bool:
        """Whether an entry of ``space`` may belong to it; 0: the table does not know the space."""
        return space == 0 or (space != self.but and self.only in (None, space))


class EvictionCandidate(NamedTuple):
    """An entry that may be evicted."""

    used: int
    id: int
    slot: int
    charge: int
    size: int
    kind: str
    suffix: str


class _TableLook:
    """One scan of the whole table, stripe by stripe."""

    def __init__(self, index: EntryIndex, scope: Scope, count: int, spared: dict[int, int]) -> None:
        self._index, self._scope, self._count, self._spared = index, scope, count, spared
        self._stripes, self._next, self._now = max(1, -(-index.slots // STRIPE)), 0, index.head.clock.now()
        self._limit: int | None = None
        self.cold: list[tuple[int, int, int]] = []  # used, slot, id

    @property
    def left(self) -> int:
        """The number of stripes that are not scanned yet."""
        return self._stripes - self._next

    def go_on(self) -> None:
        """Scan one more stripe."""
        limit = self._limit
        for stripe, ids, ticks in self._index.stripe(self._next, self._stripes):
            for slot, id, used in zip(stripe, ids, ticks, strict=True):
                if not id or (limit is not None and limit <= used <= self._now):
                    continue
                if self._spared.get(slot) != id and self._scope.may_have(self._index.space(slot)):
                    self.cold.append((self._index.used(slot), slot, id))
        self._next += 1
        share = -(-self._count * self._next // self._stripes)  # of the final count, by now
        if not self.left or len(self.cold) > max(_SAMPLE, 4 * share):
            self._cut(max(_SAMPLE, 2 * share) if self.left else 2 * self._count)

    def _cut(self, count: int) -> None:
        self.cold = heapq.nsmallest(count, self.cold)
        self._limit = self.cold[-1][0] + 1 if self.cold else None


class _Picked:
    """The candidates of one scope."""

    def __init__(self) -> None:
        self.cold: deque[tuple[int, int, int]] = deque()
        self.ready: deque[EvictionCandidate] = deque()
        self.look: _TableLook | None = None
        self.spared: dict[int, int] = {}  # slot -> id: pinned, or linked from a tree, when its row was read
        self.spared_until = 0.0
        self.taken = 0


class Ranking:
    """The coldest entries of a root, as this process knows them. Callable from any thread."""

    def __init__(self, catalog: Catalog, index: EntryIndex, adaptive: AdaptiveSpaces) -> None:
        self._catalog, self._index, self._adaptive = catalog, index, adaptive
        self._picked: dict[Scope, _Picked] = {}
        self.after_fork_child()

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()  # guards what _picked holds; never held while the catalog is asked
        self._looking = threading.Lock()  # one thread looks; a thread that holds the catalog's mutex never waits for it

    def _of(self, scope: Scope) -> _Picked:
        return self._picked.setdefault(scope, _Picked())

    # -- looking ---------------------------------------------------------------------------------------------------

    def pick(self, scope: Scope) -> None:
        """Pick some of the coldest entries that can be evicted, if there are any. Caller: holds no lock."""
        picked = self._of(scope)
        with self._looking:
            if time.monotonic() >= picked.spared_until:
                self._forget(picked)
            passed_by = bool(picked.spared)
            self._find(scope, picked)
            if passed_by and not picked.ready:  # before nothing may go: a pin, a link or a tree may be gone since
                self._forget(picked)
                self._find(scope, picked)

    def forget_spared(self) -> None:
        """Look again at entries that were skipped, since one was unpinned."""
        for picked in list(self._picked.values()):
            self._forget(picked)

    def _forget(self, picked: _Picked) -> None:
        with self._mutex:
            picked.spared.clear()
            picked.spared_until = time.monotonic() + SPARED_FOR

    def _find(self, scope: Scope, picked: _Picked) -> None:
        """Scan until an entry can be evicted, or all were scanned. Caller: holds `_looking`."""
        count = PICKED
        while True:
            whole = self._go_on(scope, picked, AT_ONCE, count)
            with self._mutex:
                if picked.look is not None and not picked.cold:
                    picked.cold = deque(sorted(picked.look.cold))  # of a sample
                any_left = bool(picked.cold)
            while picked.cold and not picked.ready:
                self._read_rows(picked, _ROWS_UNLOCKED)
            if picked.ready or (whole and not any_left):
                return
            count *= 4  # all that were picked are pinned or linked

    def _go_on(self, scope: Scope, picked: _Picked, stripes: int, count: int) -> bool:
        """Scan some more stripes. True if they were the last, and the result is installed. Caller: holds `_looking`."""
        if picked.look is None:
            count = max(count, 2 * LOOK_EVERY * self._index.slots // STRIPE)  # enough until the next scan is complete
            picked.look = _TableLook(self._index, scope, count, picked.spared)
        for _ in range(min(stripes, picked.look.left)):
            picked.look.go_on()
        if picked.look.left:
            return False
        with self._mutex:
            picked.cold, picked.look = deque(picked.look.cold), None
            picked.ready.clear()  # they are among the others
        return True

    def _keep_up(self, scope: Scope, picked: _Picked) -> None:
        """Scan ahead as victims are taken, so that no caller has to wait for a scan. Never waits."""
        if picked.taken < LOOK_EVERY or (picked.look is None and len(picked.cold) > PICKED // 2):
            return
        if self._looking.acquire(blocking=False):
            try:
                stripes, picked.taken = min(AT_ONCE, picked.taken // LOOK_EVERY), 0
                self._go_on(scope, picked, stripes, PICKED)
            finally:
                self._looking.release()

    def _read_rows(self, picked: _Picked, count: int = _ROWS) -> None:
        """Read the rows of some of the picked entries from the catalog."""
        with self._mutex:
            some = set(islice(picked.cold, count))
        rows = {row[0]: row for row in entries.victims(self._catalog, [id for _, _, id in some])}
        # P1 picks, and waits for the catalog / P2, inside its transaction, has to find what P1 is about to read: so it stays until now.
        with self._mutex:
            while picked.cold and picked.cold[0] in some:
                used, slot, id = picked.cold.popleft()
                if id in rows:
                    picked.ready.append(EvictionCandidate(used, *rows[id]))
                else:
                    picked.spared[slot] = id

    # -- taking ----------------------------------------------------------------------------------------------------

    def learn(self, rows: Rows, scope: Scope) -> None:
        """Note which spaces are adaptive, and how much those in the scope hold, which is full: at most once a second. Caller: is inside a
        transaction, as for `coldest`."""
        if self._adaptive.is_to_learn():
            for row in spaces.every(rows):
                self._adaptive.know(row.id, row.name)
                space = self._adaptive.of(row.id) if scope.may_have(row.id) else None
                if space is not None:
                    space.ghosts.learn(row.charge, self._index.head.clock.now())

    def coldest(self, scope: Scope, *, exact: bool = True) -> Iterator[EvictionCandidate]:
        """The candidates that still exist and, if ``exact``, are as cold as when they were picked, coldest first; each is yielded once.
        First those whose trial is over."""
        yield from self._overdue(scope)
        picked = self._of(scope)
        self._keep_up(scope, picked)  # only here: a victim that is not gone yet would be picked again
        in_vain = 0
        while True:
            with self._mutex:
                cold = picked.ready.popleft() if picked.ready else None
            if cold is None:
                if not picked.cold or in_vain == _IN_VAIN:
                    return
                self._read_rows(picked)
                in_vain += 1
                continue
            in_vain = 0
            if not exact or self._index.used(cold.slot) == cold.used:
                picked.taken += 1
                yield cold

    def _overdue(self, scope: Scope) -> Iterator[EvictionCandidate]:
        for id, space in self._adaptive.every():
            if scope.may_have(id):
                space.begin_search()
                count = 1
                while trials := space.overdue(count):
                    count *= 2
                    rows = {row[0]: row for row in entries.victims(self._catalog, [trial.id for trial in trials])}
                    yield from (EvictionCandidate(trial.used, *rows[trial.id]) for trial in trials if trial.id in rows)
