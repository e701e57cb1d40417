"""What a prefetcher loads, and the states of one item on its way into the cache."""

from __future__ import annotations

import contextlib
import enum
import queue
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Self

from forebay import errors
from forebay._engine.flight import KeyHold
from forebay._engine.locks.lease import Lease
from forebay._engine.store import Store
from forebay._engine.write.reservations import NOTHING, Need
from forebay._model import Buffer, Entry
from forebay.origin.request import FetchOptions, SpillingSink, Target

if TYPE_CHECKING:
    from forebay.origin import Origin

GATHER = 0.001
"""Seconds that the writer lets news gather while all workers are busy: each time it wakes it takes the interpreter from them."""


class RemoteObjects:
    """The objects of a source, as the bound cache fetches them. Callable from any thread."""

    def __init__(self, origin: Origin, target: Callable[[str], Target], *, versioned: bool) -> None:
        """``target``: the object of a key; it may raise `ConfigError`. ``versioned``: the caller named the version of all objects now, so
        what is validated after this is of that version, however long ago that will be."""
        self.origin, self.target = origin, target
        self._since = origin.store.now(exact=True) if versioned else None

    def options(self) -> FetchOptions:
        """The options of a fetch that begins now."""
        options = FetchOptions.of(self.origin)
        return options if self._since is None or options.offline else options._replace(since=self._since)

    def obtain(self, key: str) -> Lease | Buffer:
        """A lease on the file of an object, which is fetched if it is missing or may have changed; its bytes where `urls` has no room.
        Waits for another process that fetches it. Raises what the remote raised, `CacheFault`, `WaitTimeout`."""
        spilling = SpillingSink(self.origin.most)
        try:
            return self.origin.lease(self.target(key), self.options(), spilling=spilling)
        except errors.CacheFault:
            data = spilling.take()
            if data is None:
                raise
            return data

    def read(self, key: str) -> Buffer:
        """The bytes of an object, as `Cache.read` gets them; from the remote once the cache is closed. Raises as that."""
        target, options = self.target(key), self.options()
        return self.origin.direct(target, options) if self.origin.closed else self.origin.read(target, options)

    def direct(self, key: str) -> Buffer:
        """The bytes of an object, from the remote. Raises as `Cache.read`."""
        return self.origin.direct(self.target(key), self.options())


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """What one prefetcher loads, from where to where.

    ``make`` returns the bytes of an item as they are stored, or a lease on a file of this cache that has them; ``read`` its bytes, for a
    caller, where they are not stored; ``direct`` these without the cache. All three raise what the source raises. ``objects``: where the
    items are objects of a remote, which are fetched many at a time. ``size_of``, where the source knows sizes, returns how many bytes an
    item will have. ``is_kept``: the cache has the item as a part of something else: it is not stored once more."""

    store: Store
    space: str
    workers: int
    keep: bool
    make: Callable[[str], Buffer | Lease]
    read: Callable[[str], Buffer]
    direct: Callable[[str], Buffer]
    objects: RemoteObjects | None
    size_of: Callable[[str], int | None] | None
    is_kept: Callable[[str], bool]
    timeout: float | None
    report_fault: Callable[[Exception, str], None]
    session: Lease | None = None


class State(enum.Enum):
    """Where an item is on its way into the cache."""

    QUEUED = enum.auto()
    """No thread works on it."""
    SCHEDULED = enum.auto()
    """Room is promised for it and its key is locked: the next free worker loads it."""
    LOADING = enum.auto()
    """A thread of this process checks for it, waits for another process, or reads it."""
    LOADED = enum.auto()
    """Its bytes are in memory, or in a leased file, until the writer has stored them."""
    STORED = enum.auto()
    """It is in the cache, and leased if it `holds`."""
    DROPPED = enum.auto()
    """It will not be stored: each `get` reads it from the source, unless its bytes are still in memory."""
    FAILED = enum.auto()
    """The source raised: each `get` of this load raises the same."""


class Load:
    """One item on its way into the cache, shared by all its callers in this process. Only its `LoadQueue` changes it.

    ``key``: in the source; ``name``: in the cache; ``bound``: to the session; ``stores``: what the cache does not have is stored. A load
    lives as long as a lazy, or a thread that works on it, refers to it: nothing else counts its holders. ``holds``: once it is stored, it
    is leased; not, if it is only to be there."""

    __slots__ = (
        "__weakref__", "bound", "busy_since", "data", "error", "holds", "key", "leased", "name", "reason", "ref", "scheduled", "size",
        "state", "stores", "waiters",
    )  # fmt: skip

    def __init__(self, key: str, name: str, bound: bool, on_gone: Callable[[LoadRef], object], *, stores: bool = True) -> None:
        self.key, self.name, self.bound, self.stores = key, name, bound, stores
        self.holds = False
        self.state = State.QUEUED
        self.data: Buffer | None = None
        self.leased: Lease | None = None
        """On the file that it is to be a second name of."""
        self.error: BaseException | None = None
        """What the source raised."""
        self.reason = ""
        """The fault of the cache for which it was dropped. Only its text: a traceback would keep its frames, and these our callers."""
        self.size: int | None = None
        """In bytes, if the source knows it."""
        self.waiters = 0
        """How many threads wait for it now."""
        self.busy_since: int | None = None
        """Since when another process works on it, in nanoseconds of the monotonic clock."""
        self.scheduled: Scheduled | None = None
        self.ref = LoadRef(self, on_gone)

    @property
    def is_waiting(self) -> bool:
        """Whether no thread works on it yet."""
        return self.state in (State.QUEUED, State.SCHEDULED)

    def may_serve(self, holds: bool) -> bool:
        """Whether another caller can have it: it did not fail, nor was it dropped, nor is it stored without a lease that is wanted."""
        return self.state not in (State.FAILED, State.DROPPED) and not (holds and self.state is State.STORED and self.ref.lease is None)

    @property
    def is_settled(self) -> bool:
        """Whether no thread works on it, nor will."""
        return not self.is_waiting and self.state is not State.LOADING

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


@dataclass(slots=True, eq=False)
class Scheduled:
    """A load that is ready to be read: ``need`` is promised, and ``hold`` locks its key. ``since``: seconds of the monotonic clock."""

    ref: LoadRef
    hold: KeyHold
    need: Need
    epoch: int
    since: float


def size_of(data: Buffer | Lease) -> int:
    """How many bytes an item has."""
    return data.entry.size if isinstance(data, Lease) else len(data)


@dataclass(slots=True, eq=False)
class LoadedItem:
    """What was read, or is leased, and is to be stored: it has ``promised`` of what it ``needs`` in room already. The writer releases its
    key."""

    ref: LoadRef
    data: Buffer | Lease
    needs: Need
    hold: KeyHold
    promised: Need = NOTHING
    epoch: int = 0

    @property
    def size(self) -> int:
        """In bytes."""
        return self.needs.size

    def give_up(self, data: Buffer = b"") -> None:
        """Have ``data`` instead: the bytes leave the memory, and the file may go."""
        old, self.data = self.data, data
        if isinstance(old, Lease):
            old.close()


class Taken(NamedTuple):
    """A load as `LoadQueue.take` left it. ``data``: if its bytes are in memory; ``lease``: on a file, or value, that has them; ``hold``:
    the lock of a key that was scheduled."""

    state: State
    data: Buffer | None
    lease: Lease | None
    hold: KeyHold | None


@dataclass(slots=True)
class Lookup:
    """Loads that the scheduler looks for in the cache, and what it learns of them.

    ``needs``: the room of those that can be read if they are not there; ``holds``: the locks on their keys; ``failed``: what their loads in
    other processes raised; ``hits``: sizes of what was there; ``unheld``: leases on what is only to be there; ``too_large``: key and size
    of one that is larger than the limit."""

    loads: list[Load]
    needs: dict[Load, Need]
    epoch: int
    leases: Mapping[str, Lease] = field(default_factory=dict)
    holds: dict[Load, KeyHold] = field(default_factory=dict)
    failed: dict[Load, Exception] = field(default_factory=dict)
    hits: list[int] = field(default_factory=list)
    unheld: list[Lease] = field(default_factory=list)
    too_large: tuple[str, int] | None = None


class News:
    """What wakes the writer. The only part of a `LoadQueue` that finalizers touch, which may run inside anything: no call here but `wait`
    takes a lock or waits."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all news: those of a parent process are its own."""
        self._news: queue.SimpleQueue[LoadRef | None] = queue.SimpleQueue()
        self._unwanted: deque[Entry] = deque()
        self.wakes: Callable[[], None] | None = None
        """Called with all news, where the writer waits for something else: it takes no lock either."""

    def wake(self) -> None:
        """Have the writer look again."""
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

    def wait(self, seconds: float | None, may_gather: Callable[[], bool]) -> list[LoadRef]:
        """Wait for news. Returns the loads that are gone. ``may_gather``: whether the writer may sleep a little longer."""
        gone: list[LoadRef] = []
        try:
            ref = self._news.get(timeout=seconds)
            if seconds != 0 and may_gather():
                time.sleep(GATHER)
            while True:
                if ref is not None:
                    gone.append(ref)
                ref = self._news.get_nowait()
        except queue.Empty:
            return gone


class Room:
    """The room that is promised to one prefetcher and that no load has yet. Only a `LoadQueue` uses it, under its lock."""

    def __init__(self, need_of: Callable[[int], Need], limit: int, typical: int, workers: int) -> None:
        """``need_of``: what so many bytes take; ``limit``: bytes that the space may have; ``typical``: size of an item, 0 if unknown."""
        self.need_of, self.limit, self._workers = need_of, limit, workers
        self.largest = min(typical, limit)
        """What an item of unknown size is taken to have: the largest so far."""
        self.free = NOTHING
        self.epoch = 0
        """Increased when all promises are void."""

    def need(self, load: Load) -> Need:
        """What a load takes."""
        return self.need_of(self.largest if load.size is None else load.size)

    def step(self) -> int:
        """For how many loads room is asked at once: not for so many that what was loaded before is evicted for them."""
        each = self.need_of(self.largest).size
        return max(min(3 * self._workers, self.limit // (2 * each) if each else 1), 1)

    def lacking(self, loads: Iterable[Load]) -> Need:
        """What these loads need beyond what is promised."""
        total = NOTHING
        for load in loads:
            total = total.plus(self.need(load))
        return total.minus(self.free)

    def take(self, need: Need) -> bool:
        """Take so much, if it is there."""
        if not self.free.covers(need):
            return False
        self.free = self.free.minus(need)
        return True

    def give(self, need: Need, epoch: int) -> None:
        """Give back what was promised in this epoch."""
        if epoch == self.epoch:
            self.free = self.free.plus(need)

    def claim(self, item: LoadedItem) -> Need:
        """Give an item all that it needs, if it has not got it and it is there. Returns what is lacking."""
        if item.promised != NOTHING and item.epoch == self.epoch:
            return NOTHING
        if not self.take(item.needs):
            return item.needs.minus(self.free)
        item.promised, item.epoch = item.needs, self.epoch
        return NOTHING

    def release(self, item: LoadedItem) -> None:
        """Take back what an item has."""
        self.give(item.promised, item.epoch)
        item.promised = NOTHING

    def void(self) -> None:
        """Nothing is promised any more."""
        self.free, self.epoch = NOTHING, self.epoch + 1

    def set_limit(self, limit: int) -> None:
        """The space may have ``limit`` bytes now."""
        self.limit, self.largest = limit, min(self.largest, limit)
