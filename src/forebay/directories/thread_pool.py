"""Many files at once: the largest first, and fewer where large ones come in several ranges."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from forebay._kernel.threads import run_all

T = TypeVar("T")

PART, STREAMS = 8 << 20, 8
"""Bytes of a range, and how many of one file come at once: so a large file is work for several."""
LARGE = PART * STREAMS


def each(
    items: Iterable[tuple[T, int]], work: Callable[[T], object], jobs: int, *,
    on_turn: Callable[[], None] | None = None, stop: Callable[[], None] | None = None,
) -> None:  # fmt: skip
    """Do ``work`` for all of ``items`` (with the bytes of each), the largest first, with up to ``jobs`` streams at a time: a file of more
    than one `PART` takes several.

    ``on_turn``, ``stop``, errors and interrupts: see `run_all`."""
    ordered = sorted(items, key=lambda item: -item[1])
    large = deque((item, min(-(-size // PART), STREAMS)) for item, size in ordered if size > PART)
    small = deque(item for item, size in ordered if size <= PART)
    changed, busy, ended = threading.Condition(), 0, False  # `changed` guards the others: the streams under way, and whether it is over

    def one(item: T, streams: int) -> None:
        nonlocal busy
        try:
            work(item)
        finally:
            with changed:
                busy -= streams
                changed.notify_all()

    def taken_locked(item: T, streams: int) -> Callable[[], None]:
        nonlocal busy
        busy += streams
        return lambda: one(item, streams)

    def calls() -> Iterator[Callable[[], None]]:
        """Waits until there are streams for the next item."""
        while large or small:
            with changed:
                free = jobs - busy
                if ended:
                    return
                if large and (large[0][1] <= free or not busy):
                    call = taken_locked(*large.popleft())
                elif small and free > 0:
                    call = taken_locked(small.popleft(), 1)
                else:
                    changed.wait()
                    continue
            yield call

    def end() -> None:
        nonlocal ended
        with changed:
            ended = True
            changed.notify_all()
        if stop is not None:
            stop()

    run_all(calls(), min(jobs, len(ordered)), name="file", on_turn=on_turn, stop=end)
