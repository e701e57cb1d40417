"""Counters of all processes in one mapped file: a page per process, in it a block per thread, so that no count takes a lock."""

from __future__ import annotations

import os
import threading
from collections import deque

from forebay._engine.layout import Root
from forebay._kernel import host, mappings

NAMES = (
    "hits",
    "misses",
    "fills",
    "evictions",
    "fallbacks",
    "waits",
    "bytes_hit",
    "bytes_remote",
    "bytes_stored",
    "requests",
    "retries",
    "wait_ns_remote",
    "wait_ns_lock",
    "wait_ns_space",
    "store_failures",
    "damaged",
)
(
    HITS,
    MISSES,
    FILLS,
    EVICTIONS,
    FALLBACKS,
    WAITS,
    BYTES_HIT,
    BYTES_REMOTE,
    BYTES_STORED,
    REQUESTS,
    RETRIES,
    WAIT_NS_REMOTE,
    WAIT_NS_LOCK,
    WAIT_NS_SPACE,
    STORE_FAILURES,
    DAMAGED,
) = range(len(NAMES))

PAGE = 4096
_STEP = 64 * PAGE  # the file grows by this much
_WORDS = len(NAMES)  # of a block; the page's first block holds the owner's id
_LAST = PAGE // 8 - _WORDS  # the block that is shared once every other one has its thread


class Counters:
    """What this process counts, and what others do. Callable from any thread.

    Counts go to memory of the process alone until `renew` gives it a page, in a forked child too; `renew` takes them along.
    """

    _page: _Page
    _sharing: threading.Lock  # guards the block that threads share

    def __init__(self, root: Root) -> None:
        self._root = root
        self.detach()
        host.at_fork(self)

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
        it is another one after `renew` and after a fork. Beyond 30 threads the rest share one, and could lose a count here."""
        try:
            seat: _Seat = self._page.local.seat
        except AttributeError:
            seat = self._page.local.seat = _Seat(self._page)
        return seat.block

    def renew(self, page: int, owner: int) -> None:
        """Count in ``page`` from now on, as ``owner``. Caller: holds the writer lock and gives the page to nobody else."""
        fd = self._open_grown(page)
        try:
            words = mappings.words(mappings.map_file(fd, PAGE, offset=page * PAGE, writable=True))
            host.pwrite(fd, bytes(PAGE), page * PAGE)
        finally:
            os.close(fd)
        host.set_word(words, 0, owner)  # last: the counts of a page are those of the owner that it names
        before, self._page = self._page, _Page(words)
        if not before.words[0]:
            for index, count in enumerate(_sums(before.words)):
                self.add(index, count)

    def detach(self) -> None:
        """Count in memory of this process alone from now on, from zero. The page that it had is not touched any more."""
        self._sharing = threading.Lock()
        self._page = _Page(memoryview(bytearray(PAGE)).cast("Q"))

    def sums(self) -> list[int]:
        """What this process has counted since its last `renew` or `detach`."""
        return _sums(self._page.words)

    def read_page(self, page: int) -> tuple[int, list[int]]:
        """``(owner, sums)`` of a page, in the order of `NAMES`. The owner is 0 where the file does not have the page."""
        try:
            fd = os.open(self._root.counters, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return 0, [0] * _WORDS
        try:
            if os.fstat(fd).st_size < (page + 1) * PAGE:
                return 0, [0] * _WORDS
            words = mappings.words(mappings.map_file(fd, PAGE, offset=page * PAGE))
        finally:
            os.close(fd)
        return words[0], _sums(words)

    def before_fork(self) -> None:
        """Nothing is to be done: a child leaves the parent's page alone."""

    def after_fork_parent(self) -> None:
        """Nothing is to be done."""

    def after_fork_child(self) -> None:
        self.detach()

    def _open_grown(self, page: int) -> int:
        self._root.install(self._root.counters, lambda fd: host.allocate(fd, 0, _STEP))
        fd = host.open_write(self._root.counters)
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

    def __del__(self) -> None:
        if self.block[1] != _LAST:
            self._free.append(self.block[1])  # no lock: a finalizer may run anywhere


def _sums(words: memoryview) -> list[int]:
    return [sum(words[index::_WORDS]) for index in range(_WORDS, 2 * _WORDS)]
