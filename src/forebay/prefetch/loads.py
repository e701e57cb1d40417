"""The items of a loader on their way into the cache, and what wakes its thread."""

from __future__ import annotations

import enum
import queue
import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from forebay._engine.leases import Lease
from forebay._kernel import greenlets, interrupts
from forebay._model import Buffer, Entry
from forebay.fetch.job import Job


class State(enum.Enum):
    """Where an item is on its way into the cache."""

    QUEUED = enum.auto()
    """No thread is working on it."""
    LOADING = enum.auto()
    """A thread of this process is looking for it, waiting for another process, or reading it."""
    LOADED = enum.auto()
    """Its bytes are in memory, or in a leased file of the cache; they may still be stored."""
    STORED = enum.auto()
    """It is in the cache, and leased if the load `holds` it."""
    DROPPED = enum.auto()
    """It will not be stored. Each `get` reads it from the source, unless its bytes are still in memory."""
    FAILED = enum.auto()
    """The source raised: each `get` of this load raises the same."""


class Load:
    """One item on its way into the cache, shared by all its callers in this process. Only its `Loader` changes it.

    ``loader``: its `Loader`; ``key``: in the source; ``name``: in the cache; ``bound``: to the session; ``stores``: whether an item that
    the cache does not have is stored; ``holds``: whether a stored item is leased. A load lives as long as a lazy, or a thread that works on
    it, refers to it: nothing else counts its holders."""

    __slots__ = (
        "__weakref__", "busy_since", "data", "error", "holds", "job", "key", "leased", "loader", "name", "ref", "state", "stores", "waiters"
    )  # fmt: skip

    def __init__(self, loader: Any, key: str, name: str, bound: bool, *, stores: bool = True) -> None:
        self.loader, self.key, self.name, self.stores = loader, key, name, stores
        self.holds = False
        self.state = State.QUEUED
        self.data: Buffer | None = None
        self.leased: Lease | None = None
        """A lease on the file of an object that is about to get a second name."""
        self.error: BaseException | None = None
        """What the source raised; of an item that is not stored, why, without a traceback, which would keep the frames of our callers."""
        self.waiters = 0
        """The number of threads that wait for it."""
        self.busy_since: int | None = None
        """When another process was first seen working on it, in nanoseconds of the monotonic clock."""
        self.job: Job | None = None
        """The job that is loading it, if the loader's thread has begun one."""
        self.ref = LoadRef(self, loader.news.gone)
        self.ref.key, self.ref.name, self.ref.bound, self.ref.lease = key, name, bound, None

    def may_serve(self, holds: bool) -> bool:
        """Whether another caller can share it. A load that failed or was dropped cannot be shared, nor can a stored one without a lease if
        the caller needs one."""
        return self.state not in (State.FAILED, State.DROPPED) and not (holds and self.state is State.STORED and self.ref.lease is None)

    @property
    def is_settled(self) -> bool:
        """Whether no thread is reading it, or will."""
        return self.state not in (State.QUEUED, State.LOADING)


class LoadRef(weakref.ref[Load]):
    """A weak reference to a `Load`, with what a thread needs to work on it and the lease to release when the load is gone. Threads hold
    this instead of the load, which a thread that does not survive a fork would keep alive for ever.

    Its callback is a finalizer, which may run inside any other code: it must never wait for a lock."""

    __slots__ = ("bound", "key", "lease", "name")

    key: str
    name: str
    bound: bool
    lease: Lease | None


def live(refs: Iterable[LoadRef]) -> list[Load]:
    """The loads that are not gone."""
    return [load for ref in refs if (load := ref()) is not None]


class News:
    """Wakes the thread of a loader. Finalizers, which may run inside any other code, use only this part of it: no call here except `wait`
    takes a lock or waits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all news. A forked child calls it, since its parent handles them."""
        self._news: queue.SimpleQueue[LoadRef | Entry | None] = greenlets.new_queue()
        self.wakes: Callable[[], None] | None = None
        """Called after each news while the thread waits for something else. It takes no lock either."""

    def wake(self, news: LoadRef | Entry | None = None) -> None:
        """Have the thread look again. ``news``: a load that is gone, or an entry that no caller in this process needs any more."""
        self._news.put(news)
        wakes = self.wakes
        if wakes is not None:
            wakes()

    @interrupts.ignored
    def gone(self, ref: LoadRef, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A load is gone."""
        if is_finalizing():
            return
        if ref.lease is None:
            self.wake(ref)
            return
        with interrupts.shielded():
            ref.lease.close()
            self.wake(ref)

    def wait(self, seconds: float | None) -> list[LoadRef | Entry]:
        """Wait for news, and return them."""
        news: list[LoadRef | Entry] = []
        try:
            one = self._news.get(timeout=seconds)
            while True:
                if one is not None:
                    news.append(one)
                one = self._news.get_nowait()
        except queue.Empty:
            return news
