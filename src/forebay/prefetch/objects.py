"""Loads of objects that the cache keeps as `Cache.read` does: entries of `urls`, fetched together by one bulk fetch."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from forebay import errors
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Buffer, Entry
from forebay.origin.bulk import BulkFetch, Wanted
from forebay.origin.spaces import URLS
from forebay.prefetch.load_queue import REPORT_AFTER
from forebay.prefetch.loader import WATCH, close_at_exit
from forebay.prefetch.loads import Load, LoadRef, News, RemoteObjects, State, live
from forebay.remote.base import CallAborted

if TYPE_CHECKING:
    from forebay._engine.passthrough import PassThrough

log = logger("forebay.prefetch")


class ObjectLoader:
    """The loads of one prefetcher over objects of a remote: one thread, which runs a bulk fetch while there is anything to load.

    ======================  ==================================================================================================
    a caller                `submit`: a new load is QUEUED; `take`: QUEUED -> LOADING -> DROPPED, or FAILED: the caller has read it
    the thread              QUEUED -> LOADING -> STORED with a lease, LOADED (no room, or not to be stored: its bytes stay in memory),
                            FAILED, DROPPED (the cache failed), or QUEUED again (another process fetches it)
    any thread              `close`: QUEUED -> DROPPED
    ======================  ==================================================================================================

    What is LOADED for want of room occupies one of the places for objects under way, so few objects are in memory, however many are asked
    for; how many there are that are not to be stored, the caller of `submit` decides. One lock
    guards everything; the cache and the remote are never called under it. Callable from any thread. After a fork the child queues again
    what was not settled, and starts a thread of its own when it asks for something."""

    def __init__(
        self, objects: RemoteObjects, store: Store | PassThrough, workers: int, *, waits: bool, in_turn: bool = False
    ) -> None:  # fmt: skip
        """``waits``: what finds no room waits in memory, and with it all later
        loads; else it is dropped. ``in_turn``: callers take the loads in their order, so that what will never have room waits too."""
        self._origin, self._objects, self._store, self._workers, self._waits = objects.origin, objects, store, workers, waits
        self._in_turn, self._stores = in_turn, store.keeps and not store.root.read_only
        self.news = News()
        self.closing = False
        self.for_others = False
        """Whether what is fetched is read by other processes."""
        self._reset()
        host.at_fork(self)
        close_at_exit.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collector that runs inside may drop, and so ask for, another item
        self._settled = threading.Condition(self._lock)
        self._refs: dict[str, LoadRef] = {}
        self._queued: deque[LoadRef] = deque()
        self._elsewhere: list[LoadRef] = []  # other processes fetch them
        self._in_memory: list[LoadRef] = []  # there was no room for them
        self._under_way: dict[int, LoadRef] = {}
        self._number = 0
        self._bulk: BulkFetch | None = None
        self._thread: threading.Thread | None = None

    # -- callers ---------------------------------------------------------------------------------------------------

    def submit(self, key: str, name: str, bound: bool, *, stores: bool = True, holds: bool = True) -> Load:
        """The load of an object, begun if there is none that `may_serve`. ``name``: its key in the cache; ``stores`` and ``holds``: see
        `Load`. Raises `Closed`."""
        with self._lock:
            if self.closing:
                raise errors.Closed.of("prefetcher")
            ref = self._refs.get(key)
            load = ref() if ref is not None else None
            if load is None or not load.may_serve(holds):
                load = Load(key, name, bound, self.news.gone, stores=stores)
                self._refs[key] = load.ref
                self._queued.append(load.ref)
                self._wake()
            load.holds = load.holds or holds
        self.start()
        return load

    def start(self) -> None:
        """Start the thread, which also removes what `discard` names."""
        with self._lock:
            if self._thread is not None or self.closing or host.forked_unseen():
                return
            thread = threading.Thread(target=self._run, name="forebay-prefetch-objects", daemon=True)
            with contextlib.suppress(RuntimeError):  # no further thread may be started: each caller reads for itself
                thread.start()
                self._thread = thread

    def take(self, load: Load) -> Buffer:
        """The bytes of an object: from the cache, from memory, or from the remote in this very thread. Raises what the remote raised."""
        timeout = self._origin.timeout
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = REPORT_AFTER if until is None else min(REPORT_AFTER, until - time.monotonic())
            state, data = self._wait(load, left)
            if state is State.QUEUED:
                return self._read_now(load)
            if state is State.LOADING and (until is None or time.monotonic() < until):
                log.warning("waiting for %s, which this process is reading", load.key)
                continue
            if state is State.LOADING:
                self._origin.fall_back(errors.WaitTimeout.of(load.key, timeout or 0.0, "this process"), load.name)
                return self._objects.direct(load.key)
            if state is State.FAILED:
                assert load.error is not None
                raise load.error
            if data is None and load.ref.lease is not None:
                with contextlib.suppress(errors.CacheFault):  # to read it reports it
                    data = self._store.bytes_leased(load.ref.lease)
            return self.read(load.key) if data is None else data

    def read(self, key: str, *, stores: bool = True) -> Buffer:
        """The bytes of an object, as `Cache.read` gets them; from the remote once the cache is closed, or if they are not to be stored.
        Raises as that."""
        if stores:
            return self._objects.read(key)
        self._store.count("misses")
        return self._objects.direct(key)

    def wait_until_stored(self, load: Load) -> errors.ForebayError | None:
        """Wait until an object is stored, or will not be. Returns why it is not."""
        with self._lock, load.awaited():
            while not load.is_settled:
                if not self._settled.wait(REPORT_AFTER):
                    log.warning("waiting for %s to be stored", load.key)
        if load.state is State.STORED or (load.state is State.DROPPED and not load.reason and self._is_there(load)):
            return None
        if load.state is State.FAILED:
            return load.failure
        if isinstance(load.error, errors.NoSpace):
            return load.error
        return errors.CacheFault(f"{load.key} cannot be stored: {load.reason or 'there is no room for it'}")

    def _is_there(self, load: Load) -> bool:
        try:
            return self._store.entry(URLS, load.name) is not None
        except errors.CacheFault:
            return False

    def _wait(self, load: Load, seconds: float) -> tuple[State, Buffer | None]:
        """Wait at most so long while it is loaded. What was QUEUED is LOADING afterwards: the caller must read it."""
        until = time.monotonic() + seconds
        with self._lock:
            with load.awaited():
                while load.state is State.LOADING and (left := until - time.monotonic()) > 0:
                    self._settled.wait(left)
            state = load.state
            if state is State.QUEUED:
                self._set(load, State.LOADING)
            return state, load.data

    def _read_now(self, load: Load) -> Buffer:
        """Read a queued object in the thread that needs it; the others that hold the load find it in the cache."""
        self.start()  # in a child of a fork there is no thread, and others may be queued
        try:
            data = self.read(load.key, stores=load.stores)
        except Exception as error:
            self._settle(load, State.FAILED, error=error)
            raise
        except BaseException:
            with self._lock:
                self._set(load, State.QUEUED)
                self._queued.appendleft(load.ref)
                self._wake()
            raise
        self._settle(load, State.DROPPED)
        return data

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Work until the prefetcher is closed."""
        pause: float | None = 0.0
        while not (self.closing and pause is None):
            self._forget(self.news.wait(pause, _never))
            try:
                pause = self._turn()
            except Exception as error:  # noqa: BLE001  # whatever it is: without this thread nothing would be loaded any more
                self._fail(error)
                pause = WATCH

    def _turn(self) -> float | None:
        """Fetch what is queued. Returns how long there is nothing to do; None: until there is news."""
        with self._lock:
            has_more = not self.closing and self._places() > 0 and any(ref() is not None for ref in self._queued)
            busy = next((ref.name for ref in self._elsewhere if ref() is not None), None)
        if has_more:
            self._fetch()
            return 0.0
        if busy is None or self.closing:
            return None
        with contextlib.suppress(errors.CacheFault):
            if self._store.keeps:
                self._store.locks.wait_turn(URLS, busy, WATCH)
        self._look_again()
        return 0.0

    def _fetch(self) -> None:
        bulk = BulkFetch(self._origin, side_by_side=self._workers, waits=False, on_turn=self._look_again)
        with self._lock:
            self._bulk = bulk
        try:
            for request in bulk.run_as_they_come(self._next):
                self._came(request)
        except CallAborted:
            self._drop_lost("the prefetcher was closed")
        finally:
            with self._lock:
                self._bulk = None

    def _next(self, most: int) -> Sequence[Wanted] | None:
        """The next objects to fetch. None: nothing is under way, nor can be begun."""
        self._forget(self.news.wait(0, _never))
        requests: list[Wanted] = []
        options = self._objects.options()._replace(bypass=not self._stores, ahead=self.for_others)
        with self._lock:
            places = min(most, self._places())
            while self._queued and len(requests) < places and not self.closing:
                load = self._queued.popleft()()
                if load is None or load.state is not State.QUEUED:
                    continue
                try:
                    target = self._objects.target(load.key)
                except errors.ForebayError as error:
                    self._set(load, State.FAILED, error=error)
                    continue
                self._set(load, State.LOADING)
                self._number += 1
                self._under_way[self._number] = load.ref
                stores = self._stores and load.stores
                request = Wanted(target, options, self._number, leased=stores, spills=True, stores=load.stores, since=load.busy_since)
                requests.append(request)
            return requests if requests or self._under_way else None

    def _places(self) -> int:
        self._in_memory = [ref for ref in self._in_memory if (load := ref()) is not None and load.state is State.LOADED]
        return self._workers - len(self._under_way) - len(self._in_memory)

    def _came(self, request: Wanted) -> None:
        error, lease = request.error, request.lease
        is_fault = isinstance(error, errors.CacheFault | errors.WaitTimeout) and not isinstance(error, errors.RemoteError)
        may_wait = request.stores and request.data is not None and self._may_have_room(len(request.data))
        with self._lock:
            ref = self._under_way.pop(request.number)
            load = ref()
            if load is None or load.state is not State.LOADING:
                pass  # nobody needs it any more
            elif lease is not None:
                if load.holds:
                    ref.lease, lease = lease, None
                self._set(load, State.STORED)
            elif request.is_busy:
                load.busy_since = request.since
                self._set(load, State.QUEUED)
                self._elsewhere.append(ref)
            elif not load.stores and request.data is not None:
                self._set(load, State.LOADED, data=request.data)
            elif may_wait or (self._in_turn and request.data is not None):
                self._in_memory.append(ref)
                self._set(load, State.LOADED, data=request.data, error=error)
            elif is_fault:
                load.reason = str(error)
                self._set(load, State.DROPPED, data=request.data if load.waiters else None, error=error)
            else:
                self._set(load, State.FAILED, error=error)
        if lease is not None:
            lease.close()
        if error is not None and is_fault and not may_wait:
            self._origin.fall_back(error, ref.name)

    def _may_have_room(self, size: int) -> bool:
        """Whether an object that has none now is to wait for some."""
        with contextlib.suppress(errors.CacheFault):
            return self._waits and self._store.keeps and size <= self._store.spaces.largest(URLS)
        return False

    def _look_again(self) -> None:
        """Other processes may have fetched what they were fetching."""
        with self._lock:
            again, self._elsewhere = self._elsewhere, []
            self._queued.extend(again)
            if again and self._bulk is not None:
                self._bulk.wake()

    def _forget(self, gone: Iterable[LoadRef]) -> None:
        with self._lock:
            for ref in gone:
                if self._refs.get(ref.key) is ref:
                    del self._refs[ref.key]
        unwanted = self.news.unwanted()
        if unwanted and self._store.keeps:
            with contextlib.suppress(errors.CacheFault):  # whoever needs room sweeps what nobody holds
                self._store.drop(unwanted)

    def _fail(self, error: Exception) -> None:
        """The bulk fetch ended without the results of what was under way: callers read these themselves."""
        self._drop_lost(str(error))
        if "interpreter shutdown" not in str(error):  # Python 3.12 and later refuse a thread before `sys.is_finalizing` is true
            self._origin.warn(type(error).__name__, "loading ahead failed: %s", error)

    def _drop_lost(self, reason: str) -> None:
        with self._lock:
            lost, self._under_way = list(self._under_way.values()), {}
            for load in live(lost):
                load.reason = reason
                self._set(load, State.DROPPED)

    # -- steps of a transition -------------------------------------------------------------------------------------

    def _set(self, load: Load, state: State, *, data: Buffer | None = None, error: BaseException | None = None) -> None:
        load.state, load.data, load.error = state, data, error
        if state is not State.LOADING and load.waiters:
            self._settled.notify_all()

    def _settle(self, load: Load, state: State, *, error: BaseException | None = None) -> None:
        with self._lock:
            if load.state is State.LOADING:
                self._set(load, state, error=error)

    def _wake(self) -> None:
        self.news.wake()
        if self._bulk is not None:
            self._bulk.wake()

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.closing

    def discard(self, entry: Entry) -> None:
        """Remove an entry that no caller in this process needs any more. Callable from a finalizer."""
        self.news.discard(entry)

    def look_at_limit(self) -> None:
        """The limits of the prefetcher's space do not bind objects of `urls`."""

    def abandon(self) -> None:
        """Have the thread end: nothing refers to this prefetcher any more. Callable from a finalizer."""
        self.closing = True
        self.news.wake()

    def close(self, timeout: float | None = None, *, gives_up: bool = False) -> None:
        """Drop what is queued and wait for what runs, at most ``timeout`` seconds. What was handed out stays good. ``gives_up``: what runs
        too; what has come of it can be resumed."""
        with self._lock:
            self.closing = True
            for load in live(list(self._refs.values())):
                if load.state is State.QUEUED:
                    self._set(load, State.DROPPED)
            self._queued.clear()
            self._elsewhere.clear()
            thread = self._thread
            if gives_up and self._bulk is not None:
                self._bulk.stop()
            self._wake()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._lock.acquire()

    def after_fork_parent(self) -> None:
        self._lock.release()

    def after_fork_child(self) -> None:
        loads = live(list(self._refs.values()))
        self._reset()
        self.news.reset()
        for load in loads:
            self._refs[load.key] = load.ref
            load.waiters = 0
            if not load.is_settled:
                load.state = State.QUEUED
                self._queued.append(load.ref)


def _never() -> bool:
    """News of this loader need not gather."""
    return False
