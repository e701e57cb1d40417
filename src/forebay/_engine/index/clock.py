"""The clock of one root: it never goes back, for any process, whatever is done to the machine's clock.

Times of use and of validation are nanoseconds of this clock. It goes on with the kernel's monotonic clock, and follows the wall clock
where that is ahead: the larger of the two. So it does not stand still while the wall clock, once set back, catches up. The table of
slots carries how far it is ahead of the monotonic clock, and for the time after a reboot what was seen last.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from typing import Protocol

from forebay._kernel import host
from forebay.errors import CacheFault

LOOK_AGAIN = 1_000_000_000
BELIEVED = 100 * 366 * 86_400 * 1_000_000_000
"""The clock is not further ahead of the wall clock than a century: what says otherwise was damaged, or forged, and is written over. A
machine whose clock began in 1970 is not as far behind."""
BOOT, AHEAD, SEEN = 0, 1, 2
"""Words: a number of this boot; what the clock is ahead of the monotonic one; what it was lately."""


class ClockTable(Protocol):
    """What holds the words."""

    def clock_words(self) -> tuple[memoryview, int]:
        """``(words, at)``: where `BOOT` stands. Raises CacheFault or OSError where the table cannot be had."""


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
        self.window = wall, until, skew  # one that goes back from here is seen at once
        return wall + skew

    def look(self) -> int:
        """`now`, compared with what other processes saw."""
        wall = max(time.time_ns(), 1)  # before the other one: who pauses in between sees too little, never too much
        ticks = time.monotonic_ns()
        others = self._told(wall, ticks)
        self._ahead = ahead = max(self._ahead, wall - ticks, others or 0)
        now = ticks + ahead
        if self._writable:
            self._tell(ahead, now)
        wall = time.time_ns()  # after the monotonic one: who pauses in between is late until he looks again, and never early
        self.window = wall, wall + (0 if others is None else LOOK_AGAIN), now - wall  # a table that is not made yet is looked for again
        return now

    def is_past(self, moment: int) -> bool:
        """Whether a time that stands in the root can be: none is of the future."""
        return moment <= self.now() or moment <= self.look()

    def wall(self, moment: int) -> float:
        """A time of this clock in seconds since 1970, as the wall clock now counts them, for people; 0 stays 0."""
        return self.walls((moment,))[0]

    def walls(self, moments: Iterable[int]) -> list[float]:
        """`wall`, of many."""
        self.now()
        skew = round(self.window[2], -6)  # each look finds it a little different: an entry's times are the same at every one
        return [max(moment - skew, 1) / 1e9 if moment else 0.0 for moment in moments]

    def _told(self, wall: int, ticks: int) -> int | None:
        """What others saw; 0 where that cannot be believed, None where it cannot be read."""
        try:
            words, at = self._table.clock_words()
        except (CacheFault, OSError):
            return None
        ahead = words[at + AHEAD] if words[at + BOOT] == _boot() else words[at + SEEN] - ticks
        return ahead if ticks + ahead - wall <= BELIEVED else 0

    def _tell(self, ahead: int, now: int) -> None:
        """No crash point: whatever is left of it is right. Of two that store at once the lower may stay, until the other's next."""
        try:
            words, at = self._table.clock_words()
        except (CacheFault, OSError):
            return
        boot = _boot()
        if words[at + BOOT] != boot or words[at + AHEAD] < ahead or words[at + AHEAD] - ahead > BELIEVED:
            words[at + AHEAD] = ahead
            words[at + BOOT] = boot
        if not now - LOOK_AGAIN < words[at + SEEN] <= now:
            words[at + SEEN] = now


@functools.cache
def _boot() -> int:
    return int(host.boot_id().replace("-", "")[:15], 16) or 1
