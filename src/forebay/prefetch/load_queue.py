"""What the threads of a prefetcher share: the loads, in which order they are to be done, and the room that was promised for them."""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from forebay import errors
from forebay._engine.locks.leases import Lease
from forebay._engine.store import Store
from forebay._engine.write.reservations import NOTHING, Need
from forebay._model import Buffer, Entry
from forebay.prefetch.loads import Load, LoadedItem, LoadRef, Prepared, State


@dataclass(frozen=True, slots=True)
class PrefetchConfig:
    """What one prefetcher loads from where to where. ``make`` gives the bytes of an item, as they are stored, and raises what the
    source raises; ``size_of``, where the source can tell, how many they will be; ``lease``, where the cache may have them already under
    another name, a lease on them if so."""

    store: Store
    space: str
    workers: int
    keep: bool
    make: Callable[[str], Buffer]
    size_of: Callable[[str], int | None] | None
    lease: Callable[[str], Lease | None] | None
    timeout: float | None
    tell: Callable[[Exception, str], None]
    session: Lease | None = None


class LoadQueue:
    """Callable from any thread. Nothing of the engine is called under the lock, and no finalizer takes it."""

    def __init__(self, job: PrefetchConfig, need_of: Callable[[int], Need], limit: int, typical: int) -> None:
        self.job, self.need_of, self.limit, self.largest = job, need_of, limit, min(typical, limit)
        self._begin()

    def _begin(self) -> None:
        self.lock = threading.RLock()  # guards all that follows
        self.work = threading.Condition(self.lock)
        self.settled = threading.Condition(self.lock)
        self.spared = threading.Condition(self.lock)
        self.marks: dict[str, LoadRef] = {}
        self.unsized: deque[LoadRef] = deque()
        """The source is to be asked for their size first, which may take its time: workers do that."""
        self.asked: deque[LoadRef] = deque()
        """Not looked for yet."""
        self.missing: deque[LoadRef] = deque()
        """Not in the cache: to be read, in this order, as room is promised."""
        self.ready: deque[Prepared] = deque()
        """To be read by the next worker that is free."""
        self.discarded: list[Prepared] = []
        """Nobody wants them any more: their keys are to be let go."""
        self.elsewhere: list[LoadRef] = []
        """Another process is at them."""
        self.brought: deque[LoadedItem] = deque()
        """Read, and to be kept."""
        self.stalled: list[LoadedItem] = []
        """Read, but there is no room: they wait with their bytes, and no other read begins meanwhile."""
        self.room = NOTHING
        """Promised, and not given to any load yet."""
        self.epoch = 0
        """Raised when all promises are gone."""
        self.reading = self.keeping = 0
        self.watched = self.look_elsewhere = self.stuck = self.jammed = self.closing = False
        self.drops: deque[Entry] = deque()
        """Nobody here wants them any more."""
        self.news: queue.SimpleQueue[LoadRef | None] = queue.SimpleQueue()
        """Wakes the keeper: a load that is gone, or None. The one thing here that finalizers touch: it may be filled inside anything."""

    # -- loads -----------------------------------------------------------------------------------------------------

    def load(self, key: str, name: str, bound: bool) -> Load:
        """The load of this key, queued if there is none, or it failed, or was read past the cache. Raises `Closed`."""
        with self.lock:
            if self.closing:
                raise errors.Closed.of("prefetcher")
            mark = self.marks.get(key)
            load = mark() if mark is not None else None
            if load is None or load.state in (State.FAILED, State.PAST):  # an error that somebody keeps may hold it for long
                load = Load(key, name, bound)
                load.mark = self.marks[key] = LoadRef(load, self._gone)
                if self.job.size_of is not None:
                    self.unsized.append(load.mark)
                    self.work.notify()
                else:
                    self.asked.append(load.mark)
                    self.news.put(None)
            return load

    def _gone(self, mark: LoadRef, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """A load is gone. Runs inside anything: nothing here waits."""
        if is_finalizing():
            return
        if mark.lease is not None:
            mark.lease.close()
        self.news.put(mark)

    def set(self, load: Load, state: State, *, data: Buffer | None = None, error: BaseException | None = None) -> None:
        """Caller: holds the lock."""
        load.state, load.data, load.error = state, data, error
        if state is not State.RUNNING and load.waiting:
            self.settled.notify_all()

    def kept(self, load: Load, lease: Lease) -> None:
        """It is in the cache. Caller: holds the lock."""
        assert load.mark is not None
        load.mark.lease = lease
        self.set(load, State.KEPT)

    def queue_again(self, load: Load) -> None:
        """It comes next. Caller: holds the lock."""
        assert load.mark is not None
        self.set(load, State.QUEUED)
        self.missing.appendleft(load.mark)
        self.news.put(None)

    def wait(self, load: Load, until: float | None, say_after: float) -> bool:
        """Until the load is not running any more; False if the time is up, or it has lasted ``say_after`` seconds.
        Caller: holds the lock."""
        load.waiting += 1
        try:
            while load.state is State.RUNNING:
                left = say_after if until is None else min(say_after, until - time.monotonic())
                if left <= 0 or not self.settled.wait(left):
                    return load.state is not State.RUNNING
            return True
        finally:
            load.waiting -= 1

    def wait_for_keeper(self, seconds: float) -> None:
        """Until fewer are waiting to be kept, at most ``seconds``. Caller: holds the lock."""
        until = time.monotonic() + seconds
        while len(self.brought) >= 2 * self.job.workers and (left := until - time.monotonic()) > 0:
            self.spared.wait(left)

    # -- what comes next -------------------------------------------------------------------------------------------

    def next_ready(self) -> Prepared | None:
        """What a worker is to read now. Caller: holds the lock."""
        while self.ready and self.keeping + len(self.brought) < 2 * self.job.workers:
            one = self.ready.popleft()
            load = one.mark()
            if len(self.ready) <= self.job.workers:
                self.news.put(None)
            if one.taken:
                continue
            one.taken = True
            if load is not None and load.state is State.QUEUED:
                load.prepared = None
                self.reading += 1
                self.set(load, State.RUNNING)
                return one
            self.discarded.append(one)
        return None

    def discard_ready(self) -> None:
        """No worker comes any more. Caller: holds the lock."""
        for one in self.ready:
            if not one.taken:
                one.taken = True
                self.discarded.append(one)
        self.ready.clear()

    def take_over(self, load: Load) -> Prepared | None:
        """Somebody reads it who cannot wait. Caller: holds the lock."""
        one, load.prepared = load.prepared, None
        self.set(load, State.RUNNING)
        if one is not None:
            one.taken = True
            if one.epoch == self.epoch:
                self.room = self.room.plus(one.need)
        return one

    def next_queued(self, queue: deque[LoadRef]) -> Load | None:
        """The first of these that still is to be done. Caller: holds the lock."""
        while queue:
            load = queue.popleft()()
            if load is not None and load.state is State.QUEUED:
                return load
        return None

    def wanted(self) -> int:
        """How many more loads may be made ready. Caller: holds the lock."""
        if self.stalled or self.jammed:
            return 0
        return 3 * self.job.workers - self.reading - len(self.ready)

    def start(self, load: Load) -> Need | None:
        """Room for a load, out of what is promised; None if there is not enough. Caller: holds the lock."""
        need = self.need(load)
        if not self.largest and load.size is None and self.reading + len(self.ready) >= self.job.workers:
            return None  # nobody knows yet how large they are: not more than one a worker
        if not self.room.covers(need):
            return None
        self.room = self.room.minus(need)
        return need

    def need(self, load: Load) -> Need:
        return self.need_of(self.largest if load.size is None else load.size)

    def lacking(self, times: int) -> Need:
        """What lacks for the next ``times`` loads. Caller: holds the lock."""
        total = NOTHING
        for mark in list(self.missing)[:times]:
            load = mark()
            if load is not None and load.state is State.QUEUED:
                total = total.plus(self.need(load))
        return total.minus(self.room)

    def is_supplied(self) -> bool:
        """Whether the workers have enough to do for now. Asked without the lock: it may be wrong."""
        return self.reading >= self.job.workers - 1 and len(self.ready) >= self.job.workers and not self.closing

    def lacking_soon(self) -> Need:
        """What lacks for the next loads, once few are left for the workers. Caller: holds the lock."""
        if self.closing or self.wanted() <= 0:
            return NOTHING
        enough = len(self.ready) + self.room.fits(self.need_of(self.largest)) > self.job.workers
        return NOTHING if enough and self.lacking(1) == NOTHING else self.lacking(self.at_once())

    def at_once(self) -> int:
        """For how many loads room is asked: not for so many that what was loaded before had none."""
        each = self.need_of(self.largest).size
        return max(min(3 * self.job.workers, self.limit // (2 * each) if each else 1), 1)

    def ahead(self) -> Need:
        """What is worth having, if it costs nobody anything. Caller: holds the lock."""
        times = min(len(self.missing) + len(self.asked) + len(self.unsized), self.at_once())
        return self.need_of(self.largest).times(times).minus(self.room)

    # -- room ------------------------------------------------------------------------------------------------------

    def settle_room(self, given: Need, epoch: int, size: int | None) -> bool:
        """A read ended: give back what it had, and take what ``size`` bytes need, if that is there. Caller: holds the lock."""
        self.reading -= 1
        self.jammed = False
        if self.closing:
            self.news.put(None)
        if epoch == self.epoch:
            self.room = self.room.plus(given)
        if size is None:
            return False
        if size <= self.limit:
            self.largest = max(self.largest, size)
        need = self.need_of(size)
        if not self.room.covers(need):
            return False
        self.room = self.room.minus(need)
        return True

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self.lock.acquire()

    def after_fork_parent(self) -> None:
        self.lock.release()

    def after_fork_child(self) -> None:
        """The threads are gone, and the promises are the parent's. What was being done is queued again."""
        loads = [load for mark in list(self.marks.values()) if (load := mark()) is not None]
        closing = self.closing
        self._begin()
        self.closing = closing
        for load in loads:
            assert load.mark is not None
            self.marks[load.key] = load.mark
            if load.state in (State.QUEUED, State.RUNNING):
                load.state, load.prepared = State.QUEUED, None
                self.asked.append(load.mark)
