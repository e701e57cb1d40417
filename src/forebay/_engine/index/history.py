"""What all processes of the node have counted over time, written by whichever of them passes: a day by minutes, a month by hours.

``shared/history``   a page of header, then records of 24 words, 1,440 of minutes and 744 of hours: the time, a checksum, the totals of
                    the counters at that time, and what was used of which budget, in bytes

What is used is in the catalog, which a process that only reads does not ask. So processes that write also store it in the header, from
where each record takes it.

A record is in the place of its minute, or hour, modulo their number. Its time is that of the root's clock, which never goes back. All of it
is a hint: any process may write to the file without a lock, and a record that is torn, damaged or too old is left out by the reader. The
file may be deleted at any time: the history begins anew then."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import Root
from forebay._engine.files.table import FREE, HEADER, SharedTable
from forebay._engine.index.counters import NAMES, Counters
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.index")

SECOND = 1_000_000_000
EVERY = 10 * SECOND
"""Nanoseconds between two writes, of all processes together: the record of a minute is that of its last seconds."""
DELAY = SECOND
"""Nanoseconds from the first pass of a process to its first write: the first reads of a young process wait for nothing here."""
_NOTED, _USED, _BUDGET = FREE, FREE + 1, FREE + 2  # words of the header: when a process began to write last; bytes used, and the budget
_WORDS = 24  # of a record: there is room for counters of later versions
_CONTENT = struct.Struct(f"<{len(NAMES) + 2}Q")


class _Ring(NamedTuple):
    """Records of equal periods: the word at which the first one begins, their number, and nanoseconds of a period."""

    start: int
    length: int
    period: int

    def place(self, moment: int) -> int:
        return self.start + moment // self.period % self.length * _WORDS


MINUTES = _Ring(HEADER, 1440, 60 * SECOND)
HOURS = _Ring(HEADER + 1440 * _WORDS, 744, 3600 * SECOND)


class Totals(NamedTuple):
    """The totals of the counters at one time of the root's clock, in the order of `counters.NAMES`. ``used`` bytes of the ``budget``, both
    0 if no process has told them."""

    time: int
    counts: tuple[int, ...]
    used: int = 0
    budget: int = 0


class History:
    """The history of one root. Callable from any thread, and after a fork. No call raises: one that meets a fault of the disk does
    without. ``use``: returns the bytes used, and the budget; None in a process that has not written."""

    def __init__(self, root: Root, counters: Counters) -> None:
        self._counters = counters
        self.use: Callable[[], tuple[int, int]] | None = None
        self.restart(root)

    def restart(self, root: Root) -> None:
        """Go on with a root that was recreated."""
        self._root = root
        self._table = SharedTable(root, root.shared_dir / "history", b"FBHIST01", (MINUTES.length + HOURS.length) * _WORDS)
        self._due = 0  # no write before; 0: this process has not passed yet

    def note(self, now: int) -> None:
        """A process passes at ``now`` of the root's clock: it writes if no process has written lately."""
        if now < self._due:
            return
        if not self._due:
            self._due = now + DELAY
            return
        self._due = now + EVERY
        self._write(now)

    def close(self, now: int) -> None:
        """A process that has passed leaves: the last that it counted belongs to this time, however long no process comes."""
        if self._due:
            self._write(now, leaves=True)

    def read(self, ring: _Ring, now: int) -> list[Totals]:
        """The sound records of one ring, oldest first."""
        words = self._table.words()
        if words is None:
            return []
        data = words[ring.start : ring.start + ring.length * _WORDS].tobytes()
        records = (_parsed(data[at : at + 8 * _WORDS]) for at in range(0, len(data), 8 * _WORDS))
        oldest = now - ring.length * ring.period
        return sorted(record for record in records if record is not None and oldest < record.time <= now)

    def _write(self, now: int, *, leaves: bool = False) -> None:
        if self._root.read_only:
            return
        try:
            words = self._table.create(lambda words: self._begin(words, now))
            if self.use is not None:
                words[_USED], words[_BUDGET] = self.use()
            noted = words[_NOTED]
            if not leaves and 0 <= now - noted < EVERY:
                self._due = noted + EVERY
                return
            words[_NOTED] = now  # first: adding up takes a millisecond, and many processes may pass
            record = _packed(now, [*self._counters.totals(), words[_USED], words[_BUDGET]])
            for ring in (MINUTES, HOURS):
                _store(words, ring.place(now), record)
        except (CacheFault, OSError, ValueError) as error:  # the last: a damaged catalog told what no word holds
            log.debug("the history of %s is not written: %s", self._root.path, str(error))

    def _begin(self, words: memoryview, now: int) -> None:
        """Store the record before all others: in a root that is young, nothing was counted when it was created."""
        age = time.time_ns() - self._root.files.lstat(self._root.path / "FORMAT").st_mtime_ns
        first = _packed(now, [*self._counters.totals(), 0, 0])
        if 0 <= age < HOURS.period:
            first = _packed(now - age, [0] * (len(NAMES) + 2))
        for ring in (MINUTES, HOURS):
            _store(words, ring.place(now - ring.period), first)


def _store(words: memoryview, at: int, record: bytes) -> None:
    words[at : at + _WORDS] = memoryview(record).cast("Q")


def _packed(now: int, totals: list[int]) -> bytes:
    content = now.to_bytes(8, "little") + _CONTENT.pack(*totals).ljust(8 * _WORDS - 16, b"\0")
    return content[:8] + xxhash.xxh3_64_digest(content) + content[8:]


def _parsed(record: bytes) -> Totals | None:
    """A record; None where there is none, or not a whole one."""
    if record[8:16] != xxhash.xxh3_64_digest(record[:8] + record[16:]):
        return None
    *counts, used, budget = _CONTENT.unpack_from(record, 16)
    return Totals(int.from_bytes(record[:8], "little"), tuple(counts), used, budget)
