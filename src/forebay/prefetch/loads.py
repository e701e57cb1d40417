"""One item on its way into the cache, and the news that finalizers tell of it."""

from __future__ import annotations

import contextlib
import enum
import queue
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Self

from forebay import errors
from forebay._engine.locks.lease import Lease
from forebay._model import Buffer, Entry
from forebay.origin.job import Job


class State(enum.Enum):
    """Where an item is on its way into the cache."""

    QUEUED = enum.auto()
    """No thread works on it."""
    LOADING = enum.auto()
    """A thread of this process looks for it, waits for another process, or reads it."""
    LOADED = enum.auto()
    """Its bytes are in memory, or in a leased file of the cache; they may still be stored."""
    STORED = enum.auto()
    """It is in the cache, and leased if it `holds`."""
    DROPPED = enum.auto()
    """It will not be stored: each `get` reads it from the source, unless its bytes are still in memory."""
    FAILED = enum.auto()
    """The source raised: each `get` of this load raises the same."""


class Load:
    """One item on its way into the cache, shared by all its callers in this process. Only its `Loader` changes it.

    ``key``: in the source; ``name``: in the cache; ``bound``: to the session; ``stores``: what the cache does not have is stored. A load
    lives as long as a lazy, or a thread that works on it, refers to it: nothing else counts its holders. ``holds``: once it is stored, it
    is leased; not, if it is only to be there."""

    __slots__ = (
        "__weakref__", "bound", "busy_since", "data", "error", "holds", "job", "key", "leased", "name", "reason", "ref", "state", "stores",
        "waiters",
    )  # fmt: skip

    def __init__(self, key: str, name: str, bound: bool, on_gone: Callable[[LoadRef], object], *, stores: bool = True) -> None:
        self.key, self.name, self.bound, self.stores = key, name, bound, stores
        self.holds = False
        self.state = State.QUEUED
        self.data: Buffer | None = None
        self.leased: Lease | None = None
        """On the file of an object that is to get a second name."""
        self.error: BaseException | None = None
        """What the source raised; of what is not stored, why."""
        self.reason = ""
        """The fault of the cache for which it was dropped. Only its text: a traceback would keep its frames, and these our callers."""
        self.waiters = 0
        """How many threads wait for it now."""
        self.busy_since: int | None = None
        """Since when another process works on it, in nanoseconds of the monotonic clock."""
        self.job: Job | None = None
        """While it is LOADING by the thread of its loader."""
        self.ref = LoadRef(self, on_gone)

    def may_serve(self, holds: bool) -> bool:
        """Whether another caller can have it: it did not fail, nor was it dropped, nor is it stored without a lease that is wanted."""
        return self.state not in (State.FAILED, State.DROPPED) and not (holds and self.state is State.STORED and self.ref.lease is None)

    @property
    def is_settled(self) -> bool:
        """Whether no thread reads it, nor will."""
        return self.state not in (State.QUEUED, State.LOADING)

    @property
    def failure(self) -> errors.ForebayError:
        """What the source raised, as an error of ours."""
        error = self.error
        return error if isinstance(error, errors.ForebayError) else errors.FillFailed(f"{self.key}: {error}", kind=type(error).__name__)

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Around a thread's wait for it. Caller: holds the lock that guards it."""
        self.waiters += 1
        try:
            yield
        finally:
            self.waiters -= 1


class LoadRef(weakref.ref[Load]):
    """Weak reference to a `Load`, with what a thread needs to work on it and what must be released when it is gone. Threads hold this one:
    a thread that does not survive a fork would keep the load itself for ever.

    Its callback is a finalizer, which may run inside anything: it must never wait for a lock."""

    __slots__ = ("bound", "key", "lease", "name")

    key: str
    name: str
    bound: bool
    lease: Lease | None

    def __new__(cls, load: Load, on_gone: Callable[[LoadRef], object]) -> Self:
        ref = super().__new__(cls, load, on_gone)
        ref.key, ref.name, ref.bound, ref.lease = load.key, load.name, load.bound, None
        return ref


def live(refs: Iterable[LoadRef]) -> list[Load]:
    """The loads that are not gone."""
    return [load for ref in refs if (load := ref()) is not None]


class News:
    """What wakes the thread of a loader. The only part of it that finalizers touch, which may run inside anything: no call here but `wait`
    takes a lock or waits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all news: those of a parent process are its own."""
        self._news: queue.SimpleQueue[LoadRef | None] = queue.SimpleQueue()
        self._unwanted: deque[Entry] = deque()
        self.wakes: Callable[[], None] | None = None
        """Called with all news, where the thread waits for something else: it takes no lock either."""

    def wake(self) -> None:
        """Have the thread look again."""
        self._put(None)

    def _put(self, ref: LoadRef | None) -> None:
        self._news.put(ref)
        wakes = self.wakes
        if wakes is not None:
            wakes()

    def gone(self, ref: LoadRef, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A load is gone."""
        if is_finalizing():
            return
        if ref.lease is not None:
            ref.lease.close()
        self._put(ref)

    def discard(self, entry: Entry) -> None:
        """No caller in this process needs an entry any more."""
        self._unwanted.append(entry)
        self.wake()

    def unwanted(self) -> list[Entry]:
        """The entries that were discarded since the last call."""
        return [self._unwanted.popleft() for _ in range(len(self._unwanted))]

    def wait(self, seconds: float | None) -> list[LoadRef]:
        """Wait for news. Returns the loads that are gone."""
        gone: list[LoadRef] = []
        try:
            ref = self._news.get(timeout=seconds)
            while True:
                if ref is not None:
                    gone.append(ref)
                ref = self._news.get_nowait()
        except queue.Empty:
            return gone
