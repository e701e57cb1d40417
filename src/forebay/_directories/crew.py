"""Many files at once: threads that live as long as one call."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")

LARGE = 64 << 20
"""Bytes of a file that comes in many ranges at once by itself."""
LARGE_AT_ONCE = 2
TURN = 0.1  # seconds
GRACE = 1.0  # seconds


def each(
    items: Iterable[tuple[T, int]], work: Callable[[T], object], jobs: int, *,
    on_turn: Callable[[], None] | None = None, stop: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Do ``work`` for all of ``items`` (with the bytes of each), the largest first, up to ``jobs`` at a time, of large ones two.

    ``on_turn`` is called in the calling thread about ten times a second. The first error ends the call and is raised, so does an
    interrupt of the calling thread: ``stop`` is called then, which is to make what runs raise soon. A thread that hears nothing, since
    it waits for a remote, is left behind: it begins nothing any more, and does not keep the process from its end."""
    crew = _Crew(items, work)
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


class _Crew(Generic[T]):
    _idle: threading.Condition  # guards what follows; told when a thread ends
    _large: deque[T]
    _small: deque[T]
    _large_now: int  # large ones that are under way
    _ended: int  # threads that are through
    error: BaseException | None

    def __init__(self, items: Iterable[tuple[T, int]], work: Callable[[T], object]) -> None:
        ordered = sorted(items, key=lambda item: -item[1])
        self._do, self.count = work, len(ordered)
        self._large = deque(item for item, size in ordered if size >= LARGE)
        self._small = deque(item for item, size in ordered if size < LARGE)
        self._idle, self._large_now, self._ended, self.error = threading.Condition(), 0, 0, None

    def _take(self) -> tuple[T, bool] | None:
        """The next item, and whether it is a large one; None: nothing is left that another one could begin."""
        with self._idle:
            if self._large and self._large_now < LARGE_AT_ONCE:
                self._large_now += 1
                return self._large.popleft(), True
            return (self._small.popleft(), False) if self._small else None

    def work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                item, large = taken
                self._do(item)
                with self._idle:
                    self._large_now -= large
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

    def _clear_locked(self) -> None:
        self._large.clear()
        self._small.clear()
