"""The loads of one prefetcher: which state each is in, which one comes next, and the room that is promised for them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from forebay import errors
from forebay._engine.flight import KeyHold
from forebay._engine.locks.lease import Lease
from forebay._engine.write.reservations import NOTHING, Need
from forebay._logs import logger
from forebay._model import Buffer, Entry
from forebay.prefetch.loads import Load, LoadedItem, LoadRef, Lookup, News, PrefetchConfig, Room, Scheduled, State, Taken, live, size_of
from forebay.prefetch.queued_loads import QueuedLoads, next_of

log = logger("forebay.prefetch")

REPORT_AFTER = 5.0
"""Seconds after which a thread that waits for a load says so in the log, again and again."""
DIRECT_WAIT = 0.25
"""Seconds that a caller that loads an item itself, faster than the disk takes it, waits for the writer before its item is not stored."""
CHECKED_TOGETHER = 64
STORED_TOGETHER = 16
STALE = 1.0
"""Seconds after which a scheduled load that no worker came to is queued again, and its key released: other processes may need it, while
all workers wait for a source that stalls."""
IDLE = 0.2
"""Seconds without news after which the writer gives promised room back."""
MOMENT = 0.005
RETRY = 0.1
"""Seconds until the writer asks for room again where another process may have freed some."""


class LoadQueue:
    """State machine of the loads of one prefetcher. It owns their state; all threads change it through these methods only.

    ======================  ==================================================================================================
    a caller                `submit`: a new load is QUEUED; `take`: QUEUED, SCHEDULED -> LOADING, and the caller loads it
    a worker                `next_task`: SCHEDULED -> LOADING; `set_size` of one that is QUEUED
    the fetch of objects    `take_ready`: SCHEDULED -> LOADING, several at once; `leave`: LOADING -> QUEUED (another call fetches it)
    any of these            `loaded`: LOADING -> LOADED, DROPPED (too large), QUEUED (the writer is too busy);
                            `link`: -> STORED (the cache had it); `fail`: -> FAILED; `drop`: -> DROPPED (the cache failed)
    the scheduler           `candidates`, then `settle`: QUEUED -> STORED, SCHEDULED, FAILED (in another process), DROPPED (too large);
                            `discarded`: SCHEDULED -> QUEUED, where no worker comes
    the writer              `store`: LOADED -> STORED; `drop_items`: LOADED -> DROPPED; `stall`: LOADED, with its bytes, until there
                            is room; `resume`: it goes on; `no_room`, `fault`: QUEUED -> DROPPED
    any thread              `close`: QUEUED, SCHEDULED -> DROPPED; no load is QUEUED afterwards
    ======================  ==================================================================================================

    STORED, DROPPED and FAILED are final; but what is stored may prove to be damaged (`drop`). One reentrant lock guards everything. The
    engine and the source are never called under it. Finalizers take no lock: they touch only `news`.

    A fork waits for the lock. In the child no load has a thread or promised room: those that are not settled are QUEUED again, and those
    that are LOADED are DROPPED with their bytes in memory, since the parent stores them."""

    def __init__(self, config: PrefetchConfig, need_of: Callable[[int], Need], limit: int, typical: int) -> None:
        """See `Room`."""
        self._config, self._workers = config, config.workers
        self._room = Room(need_of, limit, typical, config.workers)
        self.news = News()
        self.closing = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._worker_wakeup = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._batch_taken = threading.Condition(self._lock)
        self._refs: dict[str, LoadRef] = {}
        self._queued = QueuedLoads()
        self._ready: deque[Scheduled] = deque()
        self._discarded: list[Scheduled] = []  # no caller needs them any more: their keys are to be released
        self._loaded: deque[LoadedItem] = deque()
        self._stalled: list[LoadedItem] = []  # read, but without room: they wait with their bytes, and no other read begins meanwhile
        self._loading = self._storing = 0  # reads of workers, and items that the writer is storing
        self._full = False  # the space is full of what is held: the writer waits for room
        self._jammed = False  # no worker came to what was scheduled: nothing more is, until a read ends

    @property
    def limit(self) -> int:
        """Bytes that the space may have."""
        return self._room.limit

    # -- for callers -----------------------------------------------------------------------------------------------

    def submit(self, key: str, name: str, bound: bool, holds: bool) -> Load:
        """The load of this key; a new one if there is none that `may_serve`. Raises `Closed`."""
        with self._lock:
            if self.closing:
                raise errors.Closed.of("prefetcher")
            ref = self._refs.get(key)
            load = ref() if ref is not None else None
            if load is None or not load.may_serve(holds):  # an error that a caller keeps may hold it for long
                load = Load(key, name, bound, self.news.gone)
                self._refs[key] = load.ref
                if self._config.size_of is not None:
                    self._queued.unsized.append(load.ref)
                    self._worker_wakeup.notify()
                else:
                    self._queued.unchecked.append(load.ref)
                    self.news.wake()
            load.holds = load.holds or holds
            return load

    def take(self, load: Load, seconds: float) -> Taken:
        """Wait at most ``seconds`` while a thread loads it. A load that no thread works on is LOADING afterwards, though `Taken.state` is
        QUEUED: the caller must load it."""
        until = time.monotonic() + seconds
        with self._lock:
            with load.awaited():
                while load.state is State.LOADING and (left := until - time.monotonic()) > 0:
                    self._settled.wait(left)
            if not load.is_waiting:
                return Taken(load.state, load.data, load.ref.lease if load.state is State.STORED else load.leased, None)
            scheduled = load.scheduled
            self._set(load, State.LOADING)
            if scheduled is None:
                return Taken(State.QUEUED, None, None, None)
            self._ready.remove(scheduled)
            self._room.give(scheduled.need, scheduled.epoch)
            return Taken(State.QUEUED, None, None, scheduled.hold)

    def wait_until_settled(self, load: Load) -> State:
        """Wait until nothing more happens to a load: STORED, DROPPED or FAILED."""
        with self._lock, load.awaited():
            while not load.is_settled or load.state is State.LOADED:
                if not self._settled.wait(REPORT_AFTER):
                    log.warning("waiting for %s to be stored", load.key)
            return load.state

    def close(self) -> None:
        """Drop what no thread works on yet. Workers end; the writer ends once all that was read is stored."""
        with self._lock:
            self.closing = True
            for load in live(list(self._refs.values())):
                if load.is_waiting:
                    self._set(load, State.DROPPED)
            self._queued = QueuedLoads()
            self._worker_wakeup.notify_all()
            self.news.wake()

    def abandon(self) -> None:
        """Have the threads end: nothing refers to this prefetcher any more. Callable from a finalizer."""
        self.closing = True
        self.news.wake()

    # -- for workers -----------------------------------------------------------------------------------------------

    def next_task(self) -> Scheduled | Load | str | None:
        """Block until there is work: something to read, a load to ask the size of, or the name of an item that another process works on, to
        wait for. None: the prefetcher is closed."""
        with self._lock:
            while not self.closing:
                task = self._next_ready() or next_of(self._queued.unsized) or self._queued.next_elsewhere()
                if task is not None:
                    return task
                self._worker_wakeup.wait()
            return None

    def take_ready(self, most: int) -> list[Scheduled]:
        """What may be read now, ``most`` at most; does not wait."""
        with self._lock:
            return [ready for _ in range(most) if (ready := self._next_ready()) is not None]

    def leave(self, scheduled: Scheduled, since: int | None) -> None:
        """Another call has been fetching it ``since`` then: it is looked for again. Caller: has released its key."""
        with self._lock:
            self.end_read(scheduled)
            if (load := scheduled.ref()) is not None:
                load.busy_since = since
                self._set(load, State.DROPPED if self.closing else State.QUEUED)
                self._queued.elsewhere.append(load.ref)

    def may_read(self) -> bool:
        """Whether something is to be read now. Read without the lock: it may be wrong."""
        return bool(self._ready) and not self.closing and self._storing + len(self._loaded) < 2 * self._workers

    def _next_ready(self) -> Scheduled | None:
        while self.may_read():
            scheduled = self._ready.popleft()
            load = scheduled.ref()
            if len(self._ready) <= self._workers:
                self.news.wake()
            if load is not None and load.state is State.SCHEDULED:
                self._loading += 1
                self._set(load, State.LOADING)
                return scheduled
            self._discarded.append(scheduled)
        return None

    def watched(self) -> None:
        """The wait for another process ended: the scheduler looks again for all that other processes were working on."""
        with self._lock:
            self._queued.is_watched = False
            self.look_elsewhere()
            self.news.wake()

    def look_elsewhere(self) -> None:
        """Have the scheduler look, in its next turn, for all that other calls were working on."""
        self._queued.checks_elsewhere = True

    def set_size(self, load: Load, size: int | None) -> None:
        """The source was asked for the size of a load. None: it does not know."""
        with self._lock:
            load.size = size
            if load.state is State.QUEUED:
                self._queued.unchecked.append(load.ref)
                self.news.wake()

    def loaded(self, ref: LoadRef, data: Buffer | Lease, hold: KeyHold, scheduled: Scheduled | None) -> bool:
        """The bytes of a load were read, or are leased. Returns whether the writer stores them and releases its key, not the caller.

        ``scheduled``: what a worker took; None for a caller that could not wait."""
        size = size_of(data)
        item = LoadedItem(ref, data, self._room.need_of(size), hold)
        with self._lock:
            if scheduled is None:
                self._loading += 1
                until = time.monotonic() + DIRECT_WAIT
                while self._is_writer_behind() and (left := until - time.monotonic()) > 0:
                    self._batch_taken.wait(left)
            self.end_read(scheduled)
            is_too_large = size > self.limit
            if not is_too_large:
                self._room.largest = max(self._room.largest, size)
                self._room.claim(item)
            is_over = scheduled is None and self.closing  # the writer may have ended
            load = ref()
            if not (is_too_large or is_over) and (scheduled is not None or not self._is_writer_behind()):
                if load is not None:
                    self._set(load, State.LOADED, data=data)
                self._loaded.append(item)
                return True
            self._room.release(item)
            if load is not None and (is_too_large or is_over):
                self._drop(load, data=data)
            elif load is not None:
                self._queue_again(load)
            return False

    def _is_writer_behind(self) -> bool:
        return len(self._loaded) >= 2 * self._workers

    def end_read(self, scheduled: Scheduled | None) -> None:
        """A read ended: the room that was promised for it is free again. None: that of a caller, who was promised none."""
        with self._lock:
            self._loading -= 1
            self._jammed = False
            if scheduled is not None:
                self._room.give(scheduled.need, scheduled.epoch)
            self.news.wake()

    def link(self, ref: LoadRef, lease: Lease) -> bool:
        """The cache has the item that a thread was loading. Returns whether a load keeps the lease; else the caller closes it."""
        with self._lock:
            load = ref()
            if load is None or load.state is not State.LOADING:
                return False
            return self._store(load, lease)

    def fail(self, ref: LoadRef, error: BaseException) -> None:
        """The source raised."""
        with self._lock:
            load = ref()
            if load is not None:
                self._set(load, State.FAILED, error=error)

    def drop(self, ref: LoadRef, fault: Exception | None, data: Buffer | None = None) -> None:
        """The load is not stored: the cache failed while a thread worked on it, or has it in another way; or its bytes are damaged."""
        with self._lock:
            load = ref()
            if load is not None and not load.is_waiting and load.state is not State.FAILED:
                self._drop(load, fault, data)

    def queue_again(self, ref: LoadRef) -> None:
        """The thread that loaded it was interrupted: it comes next."""
        with self._lock:
            load = ref()
            if load is not None:
                self._queue_again(load)

    # -- for the scheduler and the writer --------------------------------------------------------------------------

    def candidates(self) -> Lookup:
        """Loads to look for in the cache, with room for as many as can be read if they are not there."""
        loads: list[Load] = []
        needs: dict[Load, Need] = {}
        with self._lock:
            free = 0 if self._stalled or self._jammed else 3 * self._workers - self._loading - len(self._ready)
            if self._queued.checks_elsewhere:
                loads += [load for load in live(self._queued.elsewhere) if load.state is State.QUEUED]
                self._queued.checks_elsewhere = False
            unready = list(loads)
            while len(needs) < free and (load := next_of(self._queued.missing)) is not None:
                if not self._reserve(load, needs):
                    self._queued.missing.appendleft(load.ref)
                    break
                loads.append(load)
            while len(loads) < CHECKED_TOGETHER and (load := next_of(self._queued.unchecked)) is not None:
                loads.append(load)
                unready.append(load)
            for load in unready:
                if self._queued.missing or len(needs) >= free or not self._reserve(load, needs):
                    break
            return Lookup(loads, needs, self._room.epoch)

    def _reserve(self, load: Load, needs: dict[Load, Need]) -> bool:
        """Take room for a load out of what is promised, if there is enough."""
        need = self._room.need(load)
        is_guess = not self._room.largest and load.size is None  # their sizes are unknown: one for each worker
        if (is_guess and self._loading + len(self._ready) >= self._workers) or not self._room.take(need):
            return False
        needs[load] = need
        return True

    def settle(self, lookup: Lookup, fault: Exception | None) -> None:
        """Update the loads of a lookup: each is in the cache, or ready to be read, or read by another process, or without room.

        ``fault``: of the cache: it drops the loads that are not in the cache. The caller releases what is left in ``lookup.holds``."""
        with self._lock:
            for load in lookup.loads:
                need, lease = lookup.needs.get(load), lookup.leases.get(load.name)
                if load.ref in self._queued.elsewhere:
                    self._queued.elsewhere.remove(load.ref)
                is_free = load.state is State.QUEUED and lease is None and load not in lookup.failed and fault is None
                if is_free and need is not None and load in lookup.holds:
                    load.scheduled = Scheduled(load.ref, lookup.holds.pop(load), need, lookup.epoch, time.monotonic())
                    load.state = State.SCHEDULED
                    self._ready.append(load.scheduled)
                    continue
                if need is not None:
                    self._room.give(need, lookup.epoch)
                if load.state is not State.QUEUED:
                    continue
                if lease is not None:
                    lookup.hits.append(lease.entry.size)
                    if not self._store(load, lease):
                        lookup.unheld.append(lease)
                elif fault is not None:
                    self._drop(load, fault)
                elif load in lookup.failed:
                    self._set(load, State.FAILED, error=lookup.failed[load])
                elif need is not None:
                    load.busy_since = load.busy_since or time.monotonic_ns()
                    self._queued.elsewhere.append(load.ref)
                elif load.size is not None and load.size > self.limit:
                    self._drop(load)
                    lookup.too_large = lookup.too_large or (load.key, load.size)
                else:
                    self._queued.missing.append(load.ref)
            self._worker_wakeup.notify(len(self._ready) + bool(self._queued.elsewhere))

    def discarded(self) -> list[Scheduled]:
        """What was scheduled in vain: no caller needs it any more, or no worker came to it. The caller releases its keys."""
        with self._lock:
            gone, self._discarded = self._discarded, []
            is_stale = bool(self._ready) and time.monotonic() - self._ready[0].since > STALE
            self._jammed = self._jammed or is_stale
            if is_stale or self.closing:
                for scheduled in reversed(self._ready):
                    gone.append(scheduled)
                    load = scheduled.ref()
                    if load is not None and load.state is State.SCHEDULED:
                        self._set(load, State.QUEUED)
                        self._queued.missing.appendleft(load.ref)
                self._ready.clear()
            for scheduled in gone:
                self._room.give(scheduled.need, scheduled.epoch)
            return gone

    def wait_for_news(self, asks_soon: bool, *, waits: bool = True) -> list[LoadRef]:
        """Block until the writer has something to do, unless ``waits`` is false. Returns the loads that are gone. ``asks_soon``: it is to
        ask for room in a moment."""
        with self._lock:
            is_blocked = self._full or bool(self._stalled or self._ready)
            is_busy = bool(self._loaded) or (self.closing and not self._loading) or not waits
            pause = RETRY if is_blocked else MOMENT if asks_soon else IDLE if self._room.free != NOTHING else None
            if pause is None and self._config.objects is not None and self._queued.any_elsewhere():
                pause = RETRY  # no worker waits for those
        return self.news.wait(0 if is_busy else pause, self._is_supplied)

    def _is_supplied(self) -> bool:
        """Whether the workers have enough to do for now. Read without the lock: it may be wrong."""
        return self._loading >= self._workers - 1 and len(self._ready) >= self._workers and not self.closing

    def forget(self, gone: Iterable[LoadRef]) -> list[Entry]:
        """Forget loads that are gone, and what waited for room for them. Returns the entries that no caller here needs any more."""
        with self._lock:
            for ref in gone:
                if self._refs.get(ref.key) is ref:
                    del self._refs[ref.key]
            stalled = [item for item in self._stalled if (load := item.ref()) is not None and load.state is State.LOADED]
            if len(stalled) < len(self._stalled) or self.closing:
                self._stalled = stalled
                self._worker_wakeup.notify_all()
        unwanted = self.news.unwanted()
        return unwanted if self._config.keep else unwanted + [ref.lease.entry for ref in gone if ref.lease is not None]

    def next_batch(self) -> tuple[list[LoadedItem], bool]:
        """What is to be stored now, and whether it is the last: the prefetcher is closed, and no worker reads any more."""
        with self._lock:
            batch = [self._loaded.popleft() for _ in range(min(STORED_TOGETHER, len(self._loaded)))]
            self._storing = len(batch)
            if batch:
                self._batch_taken.notify_all()
            return batch, self.closing and not (batch or self._loading)

    def end_batch(self) -> None:
        with self._lock:
            self._storing = 0
            self._worker_wakeup.notify_all()

    def store(self, items: Sequence[LoadedItem], leases: Sequence[Lease]) -> list[Lease]:
        """The items are entries now. Returns the leases that no load keeps: the caller closes them."""
        unheld: list[Lease] = []
        with self._lock:
            for item, lease in zip(items, leases, strict=True):
                load = item.ref()
                if load is None or load.state is not State.LOADED or not self._store(load, lease):
                    unheld.append(lease)
                item.promised = NOTHING
                item.give_up()
        return unheld

    def drop_items(self, items: Collection[LoadedItem], fault: BaseException | None = None) -> None:
        """The items are not stored, and their room is for others. Threads that wait for one get it from memory."""
        with self._lock:
            for item in items:
                self._room.release(item)
                load = item.ref()
                if load is not None and load.state is State.LOADED:
                    self._drop(load, fault, item.data)
                if load is None or load.leased is None:  # else callers read that file
                    item.give_up()
            self._stalled = [item for item in self._stalled if item not in items]

    def copied(self, item: LoadedItem, data: bytes) -> None:
        """The bytes of an item are in memory now: its file is not needed any more."""
        with self._lock:
            item.give_up(data)
            load = item.ref()
            if load is not None and load.state is State.LOADED:
                self._set(load, State.LOADED, data=data)

    def stall(self, item: LoadedItem) -> None:
        """The item waits for room with its bytes. Caller: has released its key."""
        with self._lock:
            if item not in self._stalled:
                self._stalled.append(item)

    def stalled(self) -> list[LoadedItem]:
        """What waits for room with its bytes, in order."""
        return list(self._stalled)

    def resume(self, item: LoadedItem, hold: KeyHold | None, lease: Lease | None) -> bool:
        """There is room for a stalled item. Returns whether the caller stores it, with its key locked again.

        Else the cache has it meanwhile, or another process holds its key: then it is queued again."""
        with self._lock:
            self._stalled.remove(item)
            if hold is not None and lease is None:
                item.hold = hold
                return True
            self._room.release(item)
            load = item.ref()
            if load is not None and load.state is State.LOADED:
                self._store(load, lease) if lease is not None else self._queue_again(load)
            return False

    def claim_room(self, item: LoadedItem) -> Need:
        """Give the item the room that it needs, if that is promised. Returns what is lacking."""
        with self._lock:
            return self._room.claim(item)

    def add_room(self, need: Need) -> None:
        """The writer was promised so much more: the space is not full."""
        with self._lock:
            self._room.give(need, self._room.epoch)
            self._full = False
            self._worker_wakeup.notify_all()

    def take_room(self, *, if_idle: bool = False) -> Need:
        """All room that no load has, for the writer to give back. ``if_idle``: nothing, while anything is to be done."""
        with self._lock:
            todo = (self._queued.missing, self._queued.unchecked, self._queued.unsized, self._ready, self._loaded, self._stalled)
            if if_idle and (self._loading or self._full or any(todo)):
                return NOTHING
            free, self._room.free = self._room.free, NOTHING
            return free

    def lacking(self, times: int) -> Need:
        """The room that the next ``times`` loads lack."""
        with self._lock:
            return self._room.lacking(self._queued.next_missing(times))

    def lacking_soon(self) -> Need:
        """The room that the next loads lack, once few are left for the workers."""
        with self._lock:
            if self.closing or self._stalled or self._jammed or 3 * self._workers <= self._loading + len(self._ready):
                return NOTHING
            is_enough = len(self._ready) + self._room.free.fits(self._room.need_of(self._room.largest)) > self._workers
            return NOTHING if is_enough and self.lacking(1) == NOTHING else self.lacking(self._room.step())

    @property
    def step(self) -> int:
        """For how many loads room is asked at once."""
        return self._room.step()

    def ahead(self) -> Need:
        """The room that is worth having, if nothing need be evicted for it."""
        with self._lock:
            times = min(len(self._queued.missing) + len(self._queued.unchecked) + len(self._queued.unsized), self._room.step())
            return self._room.need_of(self._room.largest).times(times).minus(self._room.free)

    @property
    def is_starving(self) -> bool:
        """Whether the workers have nothing to read. Read without the lock: it may be wrong."""
        return not (self._loading or self._ready)

    def no_room(self, fault: Exception, *, waits: bool) -> tuple[str | None, int]:
        """No room is promised to what is missing: drop the first if it is too large, else wait, or drop all. Returns the key of the first
        that is dropped, and its size if it is too large."""
        with self._lock:
            loads = self._queued.next_missing(len(self._queued.missing))
            size = self._room.need(loads[0]).size if loads else 0
            is_too_large = size > self.limit
            self._full = waits and not is_too_large
            dropped = [] if self._full else loads[:1] if is_too_large else loads
            for load in dropped:
                self._drop(load, fault)
            return dropped[0].key if dropped else None, size if is_too_large else 0

    def fault(self, fault: Exception) -> str | None:
        """The cache cannot be used now: drop what waits for room. All promises are void. Returns the key of the first that is dropped."""
        with self._lock:
            loads = self._queued.next_missing(len(self._queued.missing))
            for load in loads:
                self._drop(load, fault)
            self.drop_items(self._stalled, fault)
            self._room.void()
            self._full = False
            self._worker_wakeup.notify_all()
            return loads[0].key if loads else None

    def set_limit(self, limit: int) -> None:
        """The space may have ``limit`` bytes now."""
        with self._lock:
            self._room.set_limit(limit)

    # -- steps of a transition; callers hold the lock --------------------------------------------------------------

    def _set(self, load: Load, state: State, *, data: Buffer | Lease | None = None, error: BaseException | None = None) -> None:
        load.state, load.error, load.scheduled = state, error, None
        load.data, load.leased = (None, data) if isinstance(data, Lease) else (data, None)
        if state is not State.LOADING and load.waiters:
            self._settled.notify_all()

    def _store(self, load: Load, lease: Lease) -> bool:
        """Returns whether the load keeps the lease."""
        load.ref.lease = lease if load.holds else None
        self._set(load, State.STORED)
        return load.holds

    def _drop(self, load: Load, fault: BaseException | None = None, data: Buffer | Lease | None = None) -> None:
        load.reason = "" if fault is None or isinstance(fault, errors.NoSpace) else str(fault)
        self._set(load, State.DROPPED, data=data if load.waiters else None)

    def _queue_again(self, load: Load) -> None:
        if self.closing:
            self._drop(load)
            return
        self._set(load, State.QUEUED)
        self._queued.missing.appendleft(load.ref)
        self.news.wake()

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_parent(self) -> None:
        self._lock.release()

    def after_fork_child(self) -> None:
        loads = live(list(self._refs.values()))
        self._room.void()
        self._reset()
        self.news.reset()
        for load in loads:
            self._refs[load.key] = load.ref
            load.waiters, load.scheduled = 0, None
            if load.state is State.LOADED:
                load.state = State.DROPPED
            elif not load.is_settled:
                load.state = State.QUEUED
                self._queued.unchecked.append(load.ref)
