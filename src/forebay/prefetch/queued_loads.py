"""What stands in the queue of a prefetcher: loads on which no thread works."""

from __future__ import annotations

from collections import deque
from itertools import islice

from forebay.prefetch.loads import Load, LoadRef, State, live


def next_of(refs: deque[LoadRef]) -> Load | None:
    """Take the first that is QUEUED, and what stands before it."""
    while refs:
        load = refs.popleft()()
        if load is not None and load.state is State.QUEUED:
            return load
    return None


class QueuedLoads:
    """The loads of one prefetcher that no thread works on, by what comes next for them. Only a `LoadQueue` uses it, under its lock."""

    def __init__(self) -> None:
        self.unsized: deque[LoadRef] = deque()  # a worker asks the source for their size first, which may take its time
        self.unchecked: deque[LoadRef] = deque()  # the scheduler has not looked for them in the cache yet
        self.missing: deque[LoadRef] = deque()  # not in the cache: to be read in this order, as room is promised
        self.elsewhere: list[LoadRef] = []  # other calls work on them
        self.is_watched = self.checks_elsewhere = False

    def next_missing(self, most: int) -> list[Load]:
        """The first ``most`` that are to be read, without those that are gone by now."""
        return [load for load in live(islice(self.missing, most)) if load.state is State.QUEUED]

    def any_elsewhere(self) -> bool:
        """Whether other calls work on any."""
        self.elsewhere = [load.ref for load in live(self.elsewhere) if load.state is State.QUEUED]
        return bool(self.elsewhere)

    def next_elsewhere(self) -> str | None:
        """The name of one to wait for, if no thread does that already: one waits for all of them."""
        if self.is_watched or not self.any_elsewhere():
            return None
        self.is_watched = True
        return self.elsewhere[0].name
