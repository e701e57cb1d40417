"""The coldest entries, without a long writer lock.

They are picked outside any lock, many at a time; a victim is taken only while its tick is what it was. That is exact, since
ticks only grow: what was touched, or came, after the picking is warmer than all that were picked.
"""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from forebay._engine.catalog import Catalog, entries
from forebay._engine.slots import Slots

PICKED = 4096


class Scope(NamedTuple):
    """Whose entries: those of one space, or all ``but`` those of one."""

    only: int | None = None
    but: int | None = None


class Cold(NamedTuple):
    """An entry that may be evicted."""

    used: int
    id: int
    slot: int
    charge: int
    size: int
    kind: str
    suffix: str


class Ranking:
    """What this process knows of the coldest entries of a root. Callable from any thread."""

    def __init__(self, catalog: Catalog, slots: Slots) -> None:
        self._catalog, self._slots = catalog, slots
        self._mutex = threading.Lock()  # guards _picked
        self._picked: dict[Scope, deque[Cold]] = {}

    def pick(self, scope: Scope) -> None:
        """Look at all entries of the scope and keep the coldest. Caller: holds no lock."""
        rows = entries.candidates(self._catalog, scope.only, scope.but)
        ticks = self._slots.used_many([row[1] for row in rows])
        coldest = heapq.nsmallest(PICKED, zip(ticks, rows, strict=True))
        with self._mutex:
            self._picked[scope] = deque(Cold(tick, *row) for tick, row in coldest)

    def coldest(self, scope: Scope, *, exact: bool = True) -> Iterator[Cold]:
        """Those that are still there and, if ``exact``, as cold as when they were picked, coldest first; each is given once."""
        while True:
            with self._mutex:
                picked = self._picked.get(scope)
                if not picked:
                    return
                cold = picked.popleft()
            # Its slot may be empty, or a dead writer's: he had emptied it and did not commit. Whether the entry is there says its row.
            if not exact or self._slots.used(cold.slot) == cold.used:
                yield cold

    def give_back(self, scope: Scope, cold: Cold) -> None:
        """The last one that `coldest` gave was not taken."""
        with self._mutex:
            self._picked[scope].appendleft(cold)

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()
