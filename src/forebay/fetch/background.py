"""A thread that runs a pipeline while there are jobs: for coroutines, and for slow iterables of URLs."""

from __future__ import annotations

import contextlib
import contextvars
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from forebay import errors
from forebay._kernel import greenlets, host, interrupts
from forebay._kernel.threads import GRACE, TURN, DaemonThread, join
from forebay.fetch.pipeline import Pipeline

if TYPE_CHECKING:
    from forebay.fetch import Fetcher
    from forebay.fetch.job import Job

AHEAD = 256
"""Maximum number of jobs of `run_beside` without a result."""


class Background:
    """Runs submitted jobs by one pipeline, in a thread that lives while there are any. Where none can be started, the caller's own runs
    them. Callable from any thread.

    A forked child starts without jobs. ``side_by_side``: see `Pipeline`. The thread is called ``forebay-<name>``."""

    def __init__(self, fetcher: Fetcher, name: str, side_by_side: int | None = None) -> None:
        self._fetcher, self._name, self._side_by_side = fetcher, f"forebay-{name}", side_by_side
        self.after_fork_child()
        host.at_fork(self)

    def after_fork_child(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._new: deque[Job] = deque()
        self._waiting: dict[Job, Callable[[Job], None]] = {}  # for the result
        self._running: tuple[Pipeline, DaemonThread] | None = None

    def submit(self, job: Job, done: Callable[[Job], None]) -> None:
        """Run a job. ``done`` is called with it in the thread, and must not raise. The job comes back with ``is_busy`` if another call
        fetches its object."""
        with self._lock:
            self._new.append(job)
            self._waiting[job] = done
            if self._running is not None:
                self._running[0].wake()
                return
            pipeline = Pipeline(self._fetcher, waits=False, side_by_side=self._side_by_side)
            thread = DaemonThread(partial(self._run, pipeline), name=self._name)
            self._running = pipeline, thread
        if not thread.begin():
            self._run(pipeline)

    def stop(self) -> None:
        """Give up all jobs, and wait up to a second for the thread, which releases its keys."""
        with self._lock:
            pipeline, thread = self._running or (None, None)
        if pipeline is not None and thread is not None and thread.ident is not None:
            pipeline.stop()
            join(thread, GRACE)

    def _run(self, pipeline: Pipeline) -> None:
        try:
            for job in pipeline.run_as_they_come(self._take):
                with self._lock:
                    done = self._waiting.pop(job)
                done(job)
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):  # else it is the result of all jobs
                raise

    def _take(self, most: int) -> Sequence[Job] | None:
        with self._lock:
            if not self._waiting:
                self._running = None  # the next job starts another thread
                return None
            return [self._new.popleft() for _ in range(min(most, len(self._new)))]

    def _fail(self, error: BaseException) -> None:
        with self._lock:
            self._running = None
            lost, self._waiting = self._waiting, {}
            self._new.clear()
        for job, done in lost.items():
            job.error = error if isinstance(error, Exception) else errors.Closed("the thread that fetched it was ended")
            done(job)


def run_beside(fetcher: Fetcher, jobs: Iterable[Job], settle: Callable[[Job], None], side_by_side: int | None) -> None:
    """Run jobs in a thread, which calls ``settle`` with each result, while this thread iterates over ``jobs``. However long the next job
    takes to come, the thread publishes what has arrived, and no other process waits for it.

    Raises what ``jobs`` or ``settle`` raises; then, and after an interrupt, gives up the other jobs."""
    background, context = Background(fetcher, "bulk", side_by_side), contextvars.copy_context()
    settled: queue.SimpleQueue[BaseException | None] = greenlets.new_queue()
    busy: list[Job] = []

    def done(job: Job) -> None:
        error = None
        try:
            if job.is_busy:
                busy.append(job)
            else:
                context.run(settle, job)
        except BaseException as failed:  # noqa: BLE001 (raised by the thread that reads)
            error = failed
        settled.put(error)

    def next_settled() -> None:
        while True:
            with contextlib.suppress(queue.Empty):  # in short turns: a signal just before a wait would not end it
                error = settled.get(timeout=TURN)
                break
            interrupts.point()
        if error is not None:
            raise error

    try:
        under_way = 0
        for job in jobs:
            background.submit(job, done)
            under_way += 1
            while under_way >= AHEAD or not settled.empty():
                next_settled()
                under_way -= 1
        for _ in range(under_way):
            next_settled()
    except BaseException:
        background.stop()
        raise
    with contextlib.closing(Pipeline(fetcher, side_by_side=side_by_side).run(busy)) as fetched:  # now that this call holds no key
        for job in fetched:
            settle(job)
