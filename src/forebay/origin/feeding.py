"""Requests that come slowly, as from a listing or a pipe: fetched beside what yields them."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from forebay._kernel.threads import GRACE, TURN

if TYPE_CHECKING:
    from forebay.origin.job import Job
    from forebay.origin.pipeline import Pipeline

AHEAD = 256  # requests that are taken before their results have come


def fetch_beside(bulk: Pipeline, requests: Iterable[Job], settle: Callable[[Job], None]) -> None:
    """Fetch in a thread of its own, which calls ``settle`` with each result, while this thread reads ``requests``: however long these wait
    for the next one, what has come is published, and no other process waits for it.

    Raises what ``requests`` or ``settle`` raises; then, and after an interrupt, gives up what is under way."""
    given: deque[Job] = deque()
    settled: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    is_complete = False

    def take(most: int) -> Sequence[Job] | None:
        is_last = is_complete  # before the look: more may be given in between
        group = [given.popleft() for _ in range(min(most, len(given)))]
        return group if group or not is_last else None

    def fetch() -> None:
        try:
            for request in bulk.run_as_they_come(take):
                settle(request)
                settled.put(None)
        except BaseException as error:  # noqa: BLE001 (raised by the thread that reads)
            settled.put(error)

    def next_settled() -> None:
        while True:
            with contextlib.suppress(queue.Empty):  # in short turns: a signal just before a wait would not end it
                error = settled.get(timeout=TURN)
                break
        if error is not None:
            raise error

    thread = threading.Thread(target=contextvars.copy_context().run, args=(fetch,), daemon=True, name="forebay-bulk")
    try:
        thread.start()
        under_way = 0
        for request in requests:
            given.append(request)
            bulk.wake()
            under_way += 1
            while under_way >= AHEAD or not settled.empty():
                next_settled()
                under_way -= 1
        is_complete = True
        bulk.wake()
        for _ in range(under_way):
            next_settled()
        thread.join(GRACE)  # it has nothing more to do
    except BaseException:
        bulk.stop()
        if thread.ident is not None:
            thread.join(GRACE)  # it releases its keys
        raise
