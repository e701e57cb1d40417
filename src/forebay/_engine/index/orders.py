"""What look-aheads of the node read next: a mapped table for each of them, which the others look into.

``shared/order-N``   of the look-ahead that has its first byte locked: a page of header, then buckets: 32 bits of an object's hash, and the
                    position of its next use in the order

All of it is a hint. Only its look-ahead stores to a table, a word at a time. A table is believed while its first byte is locked, which ends
with the process, however that ends, and while the look-ahead goes on. So what is lost, torn or another program's keeps some entries for a
while that nobody needs, or lets some go. The files may be deleted at any time."""

from __future__ import annotations

import time

from forebay._engine.files.layout import Root
from forebay._engine.files.shared_table import FREE, HEADER, SharedTable
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.index")

NEVER = 1 << 62
"""The position of a use that is not known, and the number of turns until it."""
TABLES = 16
"""Look-aheads of one node that tell others; further ones only ask."""
BUCKETS = 1 << 16
LOOK_AGAIN = 1.0
"""Seconds until it is looked again which look-aheads there are."""
STALE = 600_000_000_000
"""Nanoseconds without a turn after which a look-ahead keeps nothing any more."""
_POSITION, _PACE, _MOVED = FREE, FREE + 1, FREE + 2  # words of the header; nanoseconds of a turn, of the last one
_PROBES = 8
_LOW = (1 << 32) - 1
_TURNS = 16  # from one measure of the pace to the next


def _until(words: memoryview, hash: int, now: int, pace: int) -> int | None:
    """Nanoseconds until the look-ahead of a table uses an object; None: it is not known to. ``pace``: of a turn, where its own is not
    known."""
    position, moved = words[_POSITION], words[_MOVED]
    if not 0 <= now - moved < STALE:
        return None
    at, tag = HEADER + hash % BUCKETS, hash >> 32
    for word in words[at : at + _PROBES].tolist():
        if word >> 32 == tag and word & _LOW > position:
            turns: int = (word & _LOW) - position
            return turns * (words[_PACE] or pace)
    return None


class Orders:
    """The next uses of one look-ahead, and those of the others. For one thread at a time. A forked child tells the others nothing. No call
    here raises: one that meets a fault of the disk does without."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._words: memoryview | None = None
        self._lock: locks.LockFile | None = None
        self._others: list[memoryview] = []
        self._tables = [SharedTable(root, root.shared_dir / f"order-{number}", b"FBORDR01", BUCKETS + _PROBES) for number in range(TABLES)]
        self._look_at = 0.0
        self._position = self._pace = 0
        self._measured = 0, time.monotonic_ns()
        host.at_fork(self)
        try:
            self._claim()
        except (CacheFault, OSError) as error:
            log.debug("other look-aheads do not know of this one: %s", str(error))

    def announce(self, hash: int, position: int) -> None:
        """The object with this hash is used next at ``position``; `NEVER`: that is not known."""
        words = self._words
        if words is None:
            return
        first, tag, now = HEADER + hash % BUCKETS, hash >> 32, self._position
        positions: list[int] = []
        for at, word in enumerate(words[first : first + _PROBES].tolist(), first):
            if word >> 32 == tag:
                words[at] = 0 if position == NEVER else tag << 32 | position & _LOW
                return
            positions.append(word & _LOW if word & _LOW > now else NEVER)  # one that has passed is free
        farthest = max(positions)
        if position < farthest:
            words[first + positions.index(farthest)] = tag << 32 | position & _LOW

    def advance(self, position: int) -> None:
        """The look-ahead is at ``position`` now."""
        self._position, now = position, time.monotonic_ns()
        before, at = self._measured
        if position >= before + _TURNS:
            pace = (now - at) // (position - before)
            self._pace, self._measured = (7 * self._pace + pace) // 8 if self._pace else pace, (position, now)
        words = self._words
        if words is not None:
            words[_PACE], words[_MOVED] = self._pace, now
            words[_POSITION] = position

    def turns_until(self, hash: int) -> int:
        """About how many turns of this look-ahead pass until another one uses an object; `NEVER`: none is known to."""
        if time.monotonic() >= self._look_at:
            self._look()
        if not self._others:
            return NEVER
        now, pace = time.monotonic_ns(), self._pace or 1
        found = [until for other in self._others if (until := _until(other, hash, now, pace)) is not None]
        return max(min(found) // pace, 1) if found else NEVER

    def close(self) -> None:
        """Tell the others nothing any more."""
        lock, self._lock, self._words = self._lock, None, None
        if lock is not None:
            lock.close()

    # -- the files -------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        for table in self._tables:
            words = table.create()
            lock = locks.LockFile(table.path, self._root.files.open)
            if lock.try_lock(0, exclusive=True):
                words[_POSITION:] = memoryview(bytes(words.nbytes - 8 * _POSITION)).cast("Q")
                words[_MOVED] = time.monotonic_ns()
                self._words, self._lock = words, lock
                host.at_fork(lock)
                return

    def _look(self) -> None:
        """Look which other look-aheads there are."""
        self._look_at = time.monotonic() + LOOK_AGAIN
        self._others = []
        for table in self._tables:
            words = table.words()
            if words is not None and words is not self._words and self._is_used(table):
                self._others.append(words)

    def _is_used(self, table: SharedTable) -> bool:
        lock = locks.LockFile(table.path, self._root.files.open, writable=False)
        try:
            return lock.is_locked(0)
        except OSError:
            return False
        finally:
            lock.close()

    def after_fork_child(self) -> None:
        self._lock = self._words = None
