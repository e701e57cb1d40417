"""The words that all processes of a root share: its clock, what is being changed now, and when something was evicted last.

``shared/head``   a page of header with the words, then the pairs of the intent

**The clock** of a root never goes back, for any process, whatever happens to the machine's clock.

Times of use and of validation are nanoseconds of this clock. It is the later of two: the wall clock, and this clock continued by the
kernel's monotonic clock. So it does not stand still while a wall clock that was set back catches up. The head stores how far it
is ahead of the monotonic clock and, for the time after a reboot, its latest time."""

from __future__ import annotations

import array
import functools
import os
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

import xxhash

from forebay._engine.files.layout import HEAD_MAGIC, Root
from forebay._engine.files.shared_table import FREE, HEADER, SharedTable
from forebay._kernel import host
from forebay.errors import CacheFault

NUMBERS, SLOTS, MOST_FILES = 1 << 62, 1 << 32, 1 << 19
PAIRS = 4096
"""The most entries that one transaction brings or takes."""
# words of the header; of the clock three, of the rate two, of the secret four, of the settings seven
_EVICTIONS, _COUNT, _FILES, _EPOCH, _FREED, CHANGED, _CLOCK = FREE, FREE + 1, FREE + 2, FREE + 3, FREE + 4, FREE + 5, FREE + 6
NEXT, _RATE, _SECRET, SETTINGS = FREE + 9, 14, 16, 20
_RING, _RING_SIZE = 32, 256  # slots that became free lately
_INVALIDATED, _INVALIDATED_SIZE = 289, 199  # when keys were invalidated, by their hash; the word before them: when any was
LARGEST_LIMIT = (1 << 63) - 1


class SharedBroken(CacheFault):
    """A part of what the processes share is lost or damaged: it can be recreated from the catalog."""


class SharedReplaced(SharedBroken):
    """A file in the root is not the one that was mapped, or is missing: stores to the mapped one reach no other process."""


class SharedHead:
    """The head of one root. Callable from any thread and, mappings being inherited, after a fork. Every method raises `SharedBroken`
    where there is no head, or none of Forebay's, and OSError where the disk fails.

    The intent: which entries a transaction brings or takes, as pairs of an id and a slot. It is noted before anything is changed, and
    emptied when rows, records and files agree again. Who finds it set, the successor of a killed process or the same one after an
    exception, makes them agree.

    The word `NEXT` is the largest id that the catalog has given; `CHANGED` is another one before each commit, and never one that it was
    before. Both are stored under the writer lock. `SETTINGS` is the version of the settings that are in force; 0: none were noted."""

    def __init__(self, root: Root) -> None:
        self.table = SharedTable(root, root.shared_dir / "head", HEAD_MAGIC, 2 * PAIRS)
        self._words: memoryview | None = None
        self.clock = Clock(self, writable=not root.read_only)

    def words(self) -> memoryview:
        """The whole file, mapped once."""
        words = self._words
        if words is None:
            self._words = words = self.table.words()
        if words is None:
            raise SharedBroken(f"{self.table.path} is lost or damaged", path=str(self.table.path))
        return words

    def create(self) -> None:
        """Have a head, also where there is none of Forebay's."""
        self._words = self.table.create(_begin)

    def is_same(self) -> bool:
        """Whether the file that was mapped still lies in the root."""
        return self._words is None or self.table.words() is self._words

    def forget(self) -> None:
        """Map it again when it is next needed. Existing views keep showing the old one."""
        self._words = None

    def clock_words(self) -> tuple[memoryview, int]:
        """See `ClockTable`."""
        return self.words(), _CLOCK

    def evictions(self) -> tuple[memoryview, int]:
        """``(words, index)``: ``words[index]`` changes with every eviction in the root."""
        return self.words(), _EVICTIONS

    def bump_evictions(self) -> None:
        """Tell all processes that an entry is gone. Needs no lock: the clock gives each eviction a value of its own, while a counter
        that two processes increment at once could return to a value that a third one has seen."""
        host.set_word(self.words(), _EVICTIONS, time.monotonic_ns())

    # -- invalidations ---------------------------------------------------------------------------------------------

    def note_invalidation(self, keyhash: int, at: int) -> None:
        """A key was invalidated at this time of the clock: what is being fetched for it counts as never validated. Needs no lock. Keys that
        share a word are invalidated together."""
        words = self.words()
        for word in (_INVALIDATED + keyhash % _INVALIDATED_SIZE, _INVALIDATED - 1):
            if not at <= words[word] <= self.clock.look():  # a time in the future was damaged
                host.set_word(words, word, at)

    def was_invalidated(self, keyhashes: Iterable[int], since: int) -> bool:
        """Whether one of these keys, or another that shares a word with one, was invalidated ``since`` a time of the clock."""
        words, now = self.words(), self.clock.look()
        if not since < words[_INVALIDATED - 1] <= now:
            return False
        return any(since < words[_INVALIDATED + keyhash % _INVALIDATED_SIZE] <= now for keyhash in keyhashes)

    # -- the intent ------------------------------------------------------------------------------------------------

    def intent(self) -> list[tuple[int, int]]:
        """What a transaction is about to change: (id, slot). Of any words in the file, only what may be an id and a slot."""
        words = self.words()
        count = words[_COUNT]
        if not 0 < count <= PAIRS:  # no transaction has more: a larger count is not Forebay's
            return []
        pairs = words[HEADER : HEADER + 2 * count].tolist()
        return [(id, slot) for id, slot in zip(pairs[::2], pairs[1::2], strict=True) if 0 < id < NUMBERS and slot < SLOTS]

    def intend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Add to the intent. Caller: holds the writer lock. Raises `CacheFault` where there are too many."""
        words = self.words()
        count = words[_COUNT]
        if count + len(pairs) > PAIRS:
            raise CacheFault(f"one transaction would change more than {PAIRS} entries")
        at = HEADER + 2 * count
        for words[at], words[at + 1] in pairs:
            at += 2
        host.set_word(words, _COUNT, count + len(pairs))  # last: the pairs are whole

    def finish(self) -> None:
        """Empty the intent: rows, records and files agree. Caller: holds the writer lock."""
        words = self.words()
        if words[_COUNT]:
            host.set_word(words, _COUNT, 0)

    # -- records ---------------------------------------------------------------------------------------------------

    @property
    def files(self) -> int:
        """How many files of records there are."""
        return min(self.words()[_FILES], MOST_FILES)

    @files.setter
    def files(self, count: int) -> None:
        host.set_word(self.words(), _FILES, count)

    def freed(self) -> list[int]:
        """Slots that became free lately: a hint."""
        words = self.words()
        return words[_RING : _RING + min(words[_FREED], _RING_SIZE)].tolist()

    def note_free(self, slot: int) -> None:
        """Caller: holds the writer lock."""
        words = self.words()
        words[_RING + words[_FREED] % _RING_SIZE] = slot
        words[_FREED] = (words[_FREED] + 1) % (1 << 64)

    def secret(self) -> bytes:
        """The key of the hashes of keys."""
        return self.words()[_SECRET : _SECRET + 4].tobytes()

    @staticmethod
    def number_of(epoch: str) -> int:
        """An epoch as the number that the words have."""
        return int(epoch.replace("-", "")[-15:], 16)

    @property
    def epoch(self) -> int:
        """The epoch in which records and rows were last compared as a whole; 0: never."""
        return self.words()[_EPOCH]

    @epoch.setter
    def epoch(self, number: int) -> None:
        host.set_word(self.words(), _EPOCH, number)

    # -- settings and the rate of transfers ---------------------------------------------------------------------------------------

    def note_settings(self, version: int, limits: Sequence[int | None]) -> None:
        """Note a new version, and five limits. Caller: is the only process that changes the settings."""
        words = self.words()
        noted = [0 if limit is None else limit + 1 for limit in limits]
        words[SETTINGS + 1 : SETTINGS + 7] = memoryview(array.array("Q", [*noted, _check_of(noted)]))
        host.set_word(words, SETTINGS, version)

    def noted_limits(self) -> list[int | None] | None:
        """The limits that were noted last; None where the words are damaged."""
        *noted, check = self.words()[SETTINGS + 1 : SETTINGS + 7].tolist()
        is_sound = check == _check_of(noted) and max(noted) <= LARGEST_LIMIT + 1
        return [word - 1 if word else None for word in noted] if is_sound else None

    def limit_words(self) -> tuple[memoryview, int]:
        """``(words, index)``: two words that processes store to without a lock, see `settings.NodeLimits`."""
        return self.words(), _RATE


def _check_of(words: Sequence[int]) -> int:
    return xxhash.xxh3_64_intdigest(array.array("Q", words).tobytes(), 1)


def _begin(words: memoryview) -> None:
    words[_SECRET : _SECRET + 4] = memoryview(os.urandom(32)).cast("Q")


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
