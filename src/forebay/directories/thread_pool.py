"""Many files at once: threads that live as long as one call."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

PART, STREAMS = 8 << 20, 8
"""Bytes of a range, and how many of one file come at once: so a large file is work for several."""
LARGE = PART * STREAMS
TURN = 0.1  # seconds
GRACE = 1.0  # seconds


def each(
    items: Iterable[tuple[T, int]], work: Callable[[T], object], jobs: int, *,
    on_turn: Callable[[], None] | None = None, stop: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Do ``work`` for all of ``items`` (with the bytes of each), the largest first, up to ``jobs`` at a time; fewer, where large ones come
    in several ranges at once.

    ``on_turn`` is called in the calling thread about ten times a second. The first error ends the call and is raised, so does an
    interrupt of the calling thread: ``stop`` is called then, which is to make what runs raise soon. A thread that hears nothing, since
    it waits for a remote, is left behind: it begins nothing any more, and does not keep the process from its end."""
    crew = _Pool(items, work, jobs)
    threads = [threading.Thread(target=crew.work, name=f"forebay-file-{n}", daemon=True) for n in range(min(jobs, crew.count))]
    try:
        for thread in threads:
            thread.start()
        crew.wait(len(threads), on_turn)
        if crew.error is not None:
            raise crew.error
    except BaseException:
        crew.end()
        if stop is not None:
            stop()
        until = time.monotonic() + GRACE
        for thread in threads:
            if thread.ident is not None:
                thread.join(max(0.0, until - time.monotonic()))
        raise
    for thread in threads:
        thread.join()


def _streams(size: int) -> int:
    return min(max(-(-size // PART), 1), STREAMS)


class _Pool(Generic[T]):
    _idle: threading.Condition  # guards what follows; told when an item or a thread ends
    _large: deque[tuple[T, int]]  # items, and how many streams each is
    _small: deque[T]
    _busy: int  # streams that are under way
    _ended: int  # threads that are through
    error: BaseException | None

    def __init__(self, items: Iterable[tuple[T, int]], work: Callable[[T], object], jobs: int) -> None:
        ordered = sorted(items, key=lambda item: -item[1])
        self._do, self._jobs, self.count = work, jobs, len(ordered)
        self._large = deque((item, _streams(size)) for item, size in ordered if size > PART)
        self._small = deque(item for item, size in ordered if size <= PART)
        self._idle, self._busy, self._ended, self.error = threading.Condition(), 0, 0, None

    def _take(self) -> tuple[T, int] | None:
        """The next item there are streams for; None: nothing is left."""
        with self._idle:
            while self._large or self._small:
                free = self._jobs - self._busy
                if self._large and (self._large[0][1] <= free or not self._busy):
                    return self._taken_locked(self._large.popleft())
                if self._small and free > 0:
                    return self._taken_locked((self._small.popleft(), 1))
                self._idle.wait()
            return None

    def _taken_locked(self, taken: tuple[T, int]) -> tuple[T, int]:
        self._busy += taken[1]
        return taken

    def work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                item, streams = taken
                self._do(item)
                with self._idle:
                    self._busy -= streams
                    self._idle.notify_all()
        except BaseException as error:  # noqa: BLE001 (raised by `each`, as it is)
            with self._idle:
                self.error = self.error or error
                self._clear_locked()
        finally:
            with self._idle:
                self._ended += 1
                self._idle.notify_all()

    def wait(self, threads: int, on_turn: Callable[[], None] | None) -> None:
        """Until all threads are through, or one failed."""
        while True:
            with self._idle:
                over = self._idle.wait_for(lambda: self._ended == threads or self.error is not None, TURN)
            if on_turn is not None:
                on_turn()
            if over:
                return

    def end(self) -> None:
        """Let nobody begin another item."""
        with self._idle:
            self._clear_locked()
            self._idle.notify_all()

    def _clear_locked(self) -> None:
        self._large.clear()
        self._small.clear()
