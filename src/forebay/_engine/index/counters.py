"""Counters of all processes in one mapped file: a page per process, in it a block per thread, so that no count takes a lock.

A page belongs to the process that has its byte of ``locks/owners`` locked, and continues from what the process before counted there. So
nothing has to be added up when a process ends, however it ends, and counting needs neither the catalog nor its writer lock."""

from __future__ import annotations

import os
import threading
import time
from collections import deque

from forebay._engine.files.layout import Root
from forebay._kernel import host, locks, mappings
from forebay._logs import logger

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
        except AttributeError:
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
