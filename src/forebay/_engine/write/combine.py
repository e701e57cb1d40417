"""Threads that need the same kind of transaction share one: the first thread runs it for all that wait.

After flat combining (Hendler, Incze, Shavit, Tzafrir 2010): a list of wishes, and a lock whose holder grants all that are there.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")

MOST = 16


class _Job(Generic[T, R]):
    __slots__ = ("alone", "done", "error", "item", "result")

    result: R

    def __init__(self, item: T) -> None:
        self.item = item
        self.done = self.alone = False
        self.error: Exception | None = None


class Combiner(Generic[T, R]):
    """Runs ``do`` for the items of several threads at once: up to `MOST` items, for each of which it returns a result, or raises. After a
    failure each item is tried alone, unless the error is a ``shared`` one, which all of them would meet. Callable from any thread."""

    def __init__(self, do: Callable[[Sequence[T]], Sequence[R]], shared: type[Exception]) -> None:
        self._do, self._shared = do, shared
        self.after_fork_child()

    def after_fork_child(self) -> None:
        self._waiting: deque[_Job[T, R]] = deque()
        self._lead = threading.Lock()

    def __call__(self, item: T) -> R:
        job: _Job[T, R] = _Job(item)
        self._waiting.append(job)
        try:
            with self._lead:
                # P1 leads / P2 adds its job and waits / P1 takes it along / P2 leads, with nothing to do.
                while not job.done:
                    self._work(job)
        except BaseException:
            with contextlib.suppress(ValueError):
                self._waiting.remove(job)  # interrupted while it waited: no thread needs it any more
            raise
        if job.error is not None:
            raise job.error
        return job.result

    def _work(self, mine: _Job[T, R]) -> None:
        jobs = [mine] if mine.alone else [self._waiting.popleft() for _ in range(min(MOST, len(self._waiting)))]
        try:
            results = self._do([job.item for job in jobs])
        except self._shared as error:
            for job in jobs:
                job.error, job.done = error, True
        except BaseException as error:
            for job in jobs:
                job.alone = True
            if len(jobs) == 1 or not isinstance(error, Exception):
                raise
        else:
            for job, result in zip(jobs, results, strict=True):
                job.result, job.done = result, True
