"""The clock of one root: it never goes back, for any process, whatever happens to the machine's clock.

Times of use and of validation are nanoseconds of this clock. It is the later of two: the wall clock, and this clock continued by the
kernel's monotonic clock. So it does not stand still while a wall clock that was set back catches up. The head stores how far it
is ahead of the monotonic clock and, for the time after a reboot, its latest time."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Protocol

from forebay._kernel import host
from forebay.errors import CacheFault

LOOK_AGAIN = 1_000_000_000
BELIEVED = 100 * 366 * 86_400 * 1_000_000_000
"""The clock is at most a century ahead of the wall clock: a value beyond that is damaged or forged, and is overwritten. A machine whose
clock starts in 1970 is not as far behind."""
BOOT, AHEAD, SEEN = 0, 1, 2
"""Words: a number of this boot; what the clock is ahead of the monotonic one; what it was lately."""


class ClockTable(Protocol):
    """What holds the words."""

    def clock_words(self) -> tuple[memoryview, int]:
        """``(words, at)``: the index of `BOOT`. Raises CacheFault or OSError where the table is not available."""


class Clock:
    """Callable from any thread; usable in both processes after a fork. A table that cannot be had, or written to, is done without.

    ``window``: while the wall clock is between the first two, for about a second, it is behind this one by the third; in nanoseconds. One
    value, since threads replace it at any time: parts of two windows would be a time that never was."""

    def __init__(self, table: ClockTable, *, writable: bool) -> None:
        self._table, self._writable = table, writable
        self._ahead = 0
        self.window = 0, 0, 0

    def now(self) -> int:
        """Nanoseconds, about those since 1970."""
        wall = time.time_ns()
        since, until, skew = self.window
        if not since <= wall < until:
            return self.look()
        self.window = wall, until, skew  # a clock that is set back from here is noticed at once
        return wall + skew

    def look(self) -> int:
        """`now`, compared with what other processes saw."""
        wall, ticks = max(time.time_ns(), 1), time.monotonic_ns()  # in this order: a pause in between makes it late, never early
        others = self._load(wall, ticks)
        self._ahead = ahead = max(self._ahead, wall - ticks, others or 0)
        now = ticks + ahead
        if self._writable:
            self._store(ahead, now)
        skew = max(time.monotonic_ns() + ahead - time.time_ns() for _ in range(3))  # a pause in between makes one late, never early
        wall = time.time_ns()
        self.window = wall, wall + (0 if others is None else LOOK_AGAIN), skew  # while there is no table, look for it again
        return now

    def is_past(self, moment: int) -> bool:
        """Whether a time in the root is plausible: not in the future."""
        return moment <= self.now() or moment <= self.look()

    def wall(self, moment: int) -> float:
        """A time of this clock in seconds since 1970, as the wall clock now counts them, for people; 0 stays 0."""
        return self.walls((moment,))[0]

    def walls(self, moments: Iterable[int]) -> list[float]:
        """`wall`, of many."""
        self.now()
        skew = round(self.window[2], -6)  # each look measures it slightly differently: an entry's times must not change
        return [max(moment - skew, 1) / 1e9 if moment else 0.0 for moment in moments]

    def _load(self, wall: int, ticks: int) -> int | None:
        """What other processes stored; 0 where that is not plausible, None where it cannot be read."""
        try:
            words, at = self._table.clock_words()
        except (CacheFault, OSError):
            return None
        ahead = words[at + AHEAD] if words[at + BOOT] == boot_number() else words[at + SEEN] - ticks
        return ahead if ticks + ahead - wall <= BELIEVED else 0

    def _store(self, ahead: int, now: int) -> None:
        """No crash point: whatever is left of it is right. Of two that store at once the lower may stay, until the other's next."""
        try:
            words, at = self._table.clock_words()
        except (CacheFault, OSError):
            return
        boot = boot_number()
        if words[at + BOOT] != boot or words[at + AHEAD] < ahead or words[at + AHEAD] - ahead > BELIEVED:
            words[at + AHEAD] = ahead
            words[at + BOOT] = boot
        if not now - LOOK_AGAIN < words[at + SEEN] <= now:
            words[at + SEEN] = now


@functools.cache
def boot_number() -> int:
    """A number of this boot of the machine."""
    return int(host.boot_id().replace("-", "")[:15], 16) or 1
