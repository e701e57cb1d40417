"""Objects of a remote as items of a prefetcher's own space: fetched into `urls`, many side by side, and linked from there by the writer.

schedule   as for any item: room is promised for it, and its key is locked
fetch      by one bulk fetch, which looks into `urls` first; a call that holds keys of items may wait for keys of `urls`, never the reverse
link       by the writer: up to sixteen files get a second name in one transaction; until then callers read the files of `urls`
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from forebay import errors
from forebay._engine.locks.lease import Lease
from forebay._logs import logger
from forebay._model import Buffer
from forebay.origin.bulk import BulkFetch, Wanted
from forebay.prefetch.loads import RemoteObjects, Scheduled

if TYPE_CHECKING:
    from forebay.prefetch.writer import ItemWriter

log = logger("forebay.prefetch")

TURN = 0.1
"""Seconds until objects, or items, that other calls are fetching are looked for again."""


class ObjectFetch:
    """Fetches the objects of one prefetcher, and stores them; `run` in one thread, which is the writer too: while nothing is looked up,
    linked or begun, the loop of transfers is at work."""

    def __init__(
        self, objects: RemoteObjects, workers: int, writer: ItemWriter, hand_over: Callable[[Scheduled, Buffer | Lease], None],
        fail: Callable[[Scheduled, Exception], None],
    ) -> None:  # fmt: skip
        """``hand_over``: give the writer what came; ``fail``: settle the load of what did not come. Both release the key, now or later."""
        self._objects, self._workers, self._writer, self._queue = objects, workers, writer, writer.queue
        self._hand_over, self._fail = hand_over, fail
        self._number, self._looked = 0, 0.0
        self._under_way: dict[int, Scheduled] = {}
        self._came: list[tuple[Scheduled, Buffer | Lease]] = []

    def run(self) -> None:
        """Work until the prefetcher is closed and all that came is stored."""
        while not self._writer.turn():
            self._look_again()
            if self._queue.may_read():
                self._fetch()

    def _fetch(self) -> None:
        """Fetch what is scheduled, and what will be while anything is under way."""
        bulk = BulkFetch(self._objects.origin, side_by_side=self._workers, waits=False, on_turn=self._turn)
        self._queue.news.wakes = bulk.wake
        try:
            for request in bulk.run_as_they_come(self._next):
                self._end(request)
            self._turn()
        except Exception as error:  # noqa: BLE001  # whatever it is: without this thread nothing would be loaded any more
            self._give_up(error)
        finally:
            self._queue.news.wakes = None

    def _next(self, most: int) -> Sequence[Wanted] | None:
        """The next objects to fetch. None: nothing is under way, nor can be begun."""
        self._turn()
        requests: list[Wanted] = []
        options = self._objects.options()
        for scheduled in self._queue.take_ready(most):
            try:
                target = self._objects.target(scheduled.ref.key)
            except errors.ForebayError as error:
                self._fail(scheduled, error)
                continue
            self._number += 1
            self._under_way[self._number] = scheduled
            load = scheduled.ref()
            since = load.busy_since if load is not None else None
            requests.append(Wanted(target, options, self._number, leased=True, spills=True, since=since))
        return requests if requests or self._under_way else None

    def _turn(self) -> None:
        """Link what has come together, and schedule what comes next."""
        came, self._came = self._came, []
        for scheduled, data in came:
            self._hand_over(scheduled, data)
        self._look_again()
        self._writer.turn(waits=False)

    def _look_again(self) -> None:
        """Other calls may have fetched what they were fetching."""
        if time.monotonic() - self._looked >= TURN:
            self._looked = time.monotonic()
            self._queue.look_elsewhere()

    def _end(self, request: Wanted) -> None:
        scheduled = self._under_way.pop(request.number)
        if request.lease is not None:
            self._came.append((scheduled, request.lease))
        elif request.data is not None:
            self._came.append((scheduled, request.data))
        elif request.is_busy:
            scheduled.hold.release()
            self._queue.leave(scheduled, request.since)
        else:
            self._fail(scheduled, request.error or errors.CacheFault(f"{request.target.key} was not fetched", key=request.target.key))

    def _give_up(self, error: Exception) -> None:
        """The bulk fetch ended without the results of what was under way: callers read these themselves."""
        lost, self._under_way = list(self._under_way.values()), {}
        for scheduled in lost:
            self._fail(scheduled, errors.CacheFault(f"{scheduled.ref.key} was not loaded: {error}"))
        time.sleep(TURN)
