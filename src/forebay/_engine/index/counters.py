"""Counters of all processes in one mapped file: a page per process, in it a block per thread, so that no count takes a lock.

A page belongs to the process that has its byte of ``locks/owners`` locked, and continues from what the process before counted there. So
nothing has to be added up when a process ends, however it ends, and counting needs neither the catalog nor its writer lock.

**History.** What all processes of the node have counted over time, written by whichever of them passes: a day by minutes, a month by hours.

``shared/history``   a page of header, then records of 24 words, 1,440 of minutes and 744 of hours: the time, a checksum, the totals of
                    the counters at that time, and what was used of which budget, in bytes

What is used is in the catalog, which a process that only reads does not ask. So processes that write also store it in the header, from
where each record takes it.

A record is in the place of its minute, or hour, modulo their number. Its time is that of the root's clock, which never goes back. All of it
is a hint: any process may write to the file without a lock, and a record that is torn, damaged or too old is left out by the reader. The
file may be deleted at any time: the history begins anew then."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import Root
from forebay._engine.files.shared_table import FREE, HEADER, SharedTable
from forebay._kernel import host, interrupts, locks, mappings
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.counters")

NAMES = (
    "hits", "misses", "fills", "evictions", "fallbacks", "waits", "bytes_hit", "bytes_remote", "bytes_stored", "requests", "retries",
    "wait_ns_remote", "wait_ns_lock", "wait_ns_space", "store_failures", "damaged",
)  # fmt: skip
(
    HITS, MISSES, FILLS, EVICTIONS, FALLBACKS, WAITS, BYTES_HIT, BYTES_REMOTE, BYTES_STORED, REQUESTS, RETRIES, WAIT_NS_REMOTE,
    WAIT_NS_LOCK, WAIT_NS_SPACE, STORE_FAILURES, DAMAGED,
) = range(len(NAMES))  # fmt: skip
INDEX = {name: index for index, name in enumerate(NAMES)}

PAGE = 4096
FIRST_LOCK = 1 << 62
"""The offset in ``locks/owners`` of the first page's lock. Owners have lower ones."""
_MARK = int.from_bytes(b"FBCOUNT1")  # the first word of a page; the second is the pid of its process
_STEP = 64 * PAGE  # the file grows by this much
_MOST_PAGES = 1 << 16
_WORDS = len(NAMES)  # of a block
_LAST = PAGE // 8 - _WORDS  # the block that is shared once every other one has its thread
_BELIEVED = 1 << 62  # no count is as large: it was damaged
_ASK_AGAIN = 1.0


class Counters:
    """The counters of this process, and the totals of all. Callable from any thread.

    A page is claimed at the first count, in a forked child too. Where none is available, counts go to memory of this process alone until
    `claim` gets one, and are added to it."""

    _page: _Page
    _sharing: threading.Lock  # guards the block that threads share

    def __init__(self, root: Root) -> None:
        self._root = root
        self._pages = locks.LockFile(root.lock("owners"), root.files.open)
        self._begin()
        host.at_fork(self._pages)
        host.at_fork(self)

    def _begin(self) -> None:
        self._sharing, self._claiming = threading.Lock(), threading.Lock()
        self._claimed, self._ask_at = self._root.read_only, 0.0
        self._page = _Page(memoryview(bytearray(PAGE)).cast("Q"))

    def add(self, index: int, n: int = 1) -> None:
        """Count ``n`` more of ``NAMES[index]``."""
        words, base = self.block()
        if base != _LAST:
            words[base + index] += n
        else:
            with self._sharing:
                words[base + index] += n

    def block(self) -> tuple[memoryview, int]:
        """``(words, base)``: ``words[base + index]`` is this thread's count, for callers that cannot afford `add`. Not to be kept:
        it is another one after `claim` and after a fork. Beyond 30 threads the rest share one, and could lose a count here."""
        try:
            seat: _Seat = self._page.local.seat
        except interrupts.unless_of_handler(AttributeError):
            self.claim()
            seat = self._page.local.seat = _Seat(self._page)
        return seat.block

    def claim(self) -> None:
        """Count where other processes see it from now on, if possible. Never waits."""
        if self._claimed or time.monotonic() < self._ask_at:
            return
        with self._claiming:
            if self._claimed:
                return
            self._ask_at = time.monotonic() + _ASK_AGAIN
            try:
                words = self._claim_page()
            except OSError as error:  # a full disk, no descriptor left, another kind of file with its name
                log.info("other processes do not see the counts of this one yet: %s", str(error))
                return
            before, self._page = self._page, _Page(words)
            self._claimed = True
        for index, count in enumerate(_sums(before.words)):
            if count:
                self.add(index, count)

    def _claim_page(self) -> memoryview:
        for page in range(_MOST_PAGES):
            if self._pages.try_lock(FIRST_LOCK + page, exclusive=True):
                try:
                    return self._map(page)
                except BaseException:
                    self._pages.unlock(FIRST_LOCK + page)
                    raise
        raise OSError(f"all {_MOST_PAGES:,} pages of {self._root.counters} are taken")

    def _map(self, page: int) -> memoryview:
        """A page that this process has locked, with sound counts: those of the process that had it before."""
        fd = self._open_grown(page)
        try:
            words = mappings.words(mappings.map_file(fd, PAGE, offset=page * PAGE, writable=True))
            if words[0] != _MARK or max(words[_WORDS:]) >= _BELIEVED:
                host.pwrite(fd, bytes(PAGE), page * PAGE)
        finally:
            os.close(fd)
        host.set_word(words, 1, os.getpid())
        host.set_word(words, 0, _MARK)  # last: until then the page is invalid
        return words

    def detach(self) -> None:
        """Release the page, and count from zero in memory until the next `claim`. Earlier counts stay in the page."""
        self._pages.close()
        self._begin()

    def close(self) -> None:
        """Detach permanently: see `detach`."""
        self.detach()
        self._claimed = True

    def sums(self) -> list[int]:
        """The counts in the page of this process, including those of its earlier processes."""
        return _sums(self._page.words)

    def totals(self) -> list[int]:
        """What all processes have counted, those that are gone too, in the order of `NAMES`."""
        own = self._page.words
        totals = [0] * _WORDS if own[0] else _sums(own)
        for page in filter(None, self._pages_of_all()):
            totals = [total + count for total, count in zip(totals, _sums(page), strict=True)]
        return totals

    def living(self) -> list[int]:
        """The pids of the other processes that count here now."""
        probe = locks.LockFile(self._root.lock("owners"), self._root.files.open, writable=not self._root.read_only)
        try:
            return [words[1] for number, words in enumerate(self._pages_of_all()) if words and words[1] and self._is_held(probe, number)]
        except OSError:
            return []
        finally:
            probe.close()

    def _is_held(self, probe: locks.LockFile, page: int) -> bool:
        if self._pages.held(FIRST_LOCK + page):
            return False
        if probe.try_lock(FIRST_LOCK + page, exclusive=not self._root.read_only):
            probe.unlock(FIRST_LOCK + page)
            return False
        return True

    def _pages_of_all(self) -> list[memoryview]:
        """The pages as they are now, in their order; one that is damaged, or of no process yet, is empty. None where the file is missing
        or no file."""
        try:
            fd = self._root.files.open(self._root.counters, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return []
        try:
            data = os.pread(fd, min(os.fstat(fd).st_size, _MOST_PAGES * PAGE), 0)
        except OSError:
            return []
        finally:
            os.close(fd)
        pages = [memoryview(data[at : at + PAGE]).cast("Q") for at in range(0, len(data) - PAGE + 1, PAGE)]
        return [words if words[0] == _MARK else _EMPTY for words in pages]

    def after_fork_child(self) -> None:
        """A child leaves the parent's page alone."""
        closed = self._claimed and not self._page.words[0]
        self._begin()
        self._claimed |= closed

    def _open_grown(self, page: int) -> int:
        self._root.install(self._root.counters, lambda fd: host.allocate(fd, 0, _STEP))
        fd = self._root.files.open_write(self._root.counters)
        size = (page * PAGE // _STEP + 1) * _STEP
        try:
            if os.fstat(fd).st_size < size:
                host.allocate(fd, 0, size)
        except BaseException:
            os.close(fd)
            raise
        return fd


class _Page:
    """A page in use: its words, the blocks that no thread has, and each thread's seat."""

    def __init__(self, words: memoryview) -> None:
        self.words = words
        self.free = deque(range(_WORDS, _LAST, _WORDS))
        self.local = threading.local()


class _Seat:
    """A thread's block. Dropped with the thread, and then the next one's: its counts go on from there."""

    __slots__ = ("_free", "block")

    def __init__(self, page: _Page) -> None:
        self._free = page.free
        try:
            self.block = page.words, page.free.popleft()
        except IndexError:
            self.block = page.words, _LAST

    def __del__(self, last: int = _LAST) -> None:
        if self.block[1] != last:
            self._free.append(self.block[1])  # no lock: a finalizer may run anywhere


_EMPTY = memoryview(b"").cast("Q")


def _sums(words: memoryview) -> list[int]:
    return [sum(count for count in words[index::_WORDS] if count < _BELIEVED) for index in range(_WORDS, 2 * _WORDS)]


SECOND = 1_000_000_000
EVERY = 10 * SECOND
"""Nanoseconds between two writes, of all processes together: the record of a minute is that of its last seconds."""
DELAY = SECOND
"""Nanoseconds from the first pass of a process to its first write: the first reads of a young process wait for nothing here."""
_NOTED, _USED, _BUDGET = FREE, FREE + 1, FREE + 2  # words of the header: when a process began to write last; bytes used, and the budget
_PERIOD_WORDS = 24  # of a record: there is room for counters of later versions
_CONTENT = struct.Struct(f"<{len(NAMES) + 2}Q")


class _Ring(NamedTuple):
    """Records of equal periods: the word at which the first one begins, their number, and nanoseconds of a period."""

    start: int
    length: int
    period: int

    def place(self, moment: int) -> int:
        return self.start + moment // self.period % self.length * _PERIOD_WORDS


MINUTES = _Ring(HEADER, 1440, 60 * SECOND)
HOURS = _Ring(HEADER + 1440 * _PERIOD_WORDS, 744, 3600 * SECOND)


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
        self._table = SharedTable(root, root.shared_dir / "history", b"FBHIST01", (MINUTES.length + HOURS.length) * _PERIOD_WORDS)
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
        data = words[ring.start : ring.start + ring.length * _PERIOD_WORDS].tobytes()
        records = (_parsed(data[at : at + 8 * _PERIOD_WORDS]) for at in range(0, len(data), 8 * _PERIOD_WORDS))
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
    words[at : at + _PERIOD_WORDS] = memoryview(record).cast("Q")


def _packed(now: int, totals: list[int]) -> bytes:
    content = now.to_bytes(8, "little") + _CONTENT.pack(*totals).ljust(8 * _PERIOD_WORDS - 16, b"\0")
    return content[:8] + xxhash.xxh3_64_digest(content) + content[8:]


def _parsed(record: bytes) -> Totals | None:
    """A record; None where there is none, or not a whole one."""
    if record[8:16] != xxhash.xxh3_64_digest(record[:8] + record[16:]):
        return None
    *counts, used, budget = _CONTENT.unpack_from(record, 16)
    return Totals(int.from_bytes(record[:8], "little"), tuple(counts), used, budget)
