"""Loads the items of one prefetcher before they are needed, by one thread, which runs a pipeline while there is anything to load."""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from forebay import errors
from forebay._engine.files.layout import DiskFull
from forebay._engine.leases import Lease
from forebay._engine.null_store import NullStore
from forebay._engine.store import Store
from forebay._kernel import host, interrupts
from forebay._kernel.threads import DaemonThread, join
from forebay._logs import logger
from forebay._model import URLS, Buffer, Entry, Noted
from forebay.fetch.job import Job
from forebay.fetch.pipeline import GROUP, Pipeline
from forebay.prefetch.items import Items, NotStored
from forebay.prefetch.loads import Load, LoadRef, News, State, live
from forebay.remote.base import CallAborted

log = logger("forebay.prefetch")

REPORT_AFTER = 5.0
"""Seconds after which a thread that waits for a load says so in the log, again and again."""
AT_EXIT = 1.0
"""Seconds that an exiting process waits for each prefetcher: a source that stalls must not keep it."""
WATCH = 0.1
"""Seconds until the thread looks again for what other processes fetch, and for room."""
STORE_WAIT = 0.25
"""Seconds that a caller that reads faster than the disk takes it waits before its item is not stored."""
BEGUN_AHEAD = 3
"""Items for each thread that reads, whose keys are held: some are looked up together before a thread is free."""
_close_at_exit: weakref.WeakSet[Loader] = weakref.WeakSet()


class Loader:
    """The loads of one prefetcher.

    ======================  ==================================================================================================
    a caller                `submit`: a new load is QUEUED; `take`: QUEUED -> LOADING, and the caller reads it
    the thread              QUEUED -> LOADING; or QUEUED again, while another process fetches it
    either                  LOADING -> STORED, LOADED (its bytes are here; it may still be stored), FAILED, DROPPED (the cache failed)
    the thread              LOADED -> STORED, once there is room for it, or it has its second name; or DROPPED
    any thread              `close`: QUEUED -> DROPPED
    ======================  ==================================================================================================

    What finds no room stays in memory and occupies one of the places for items that are read, so few items are in memory, however many are
    asked for; how many there are that are not to be stored, the caller of `submit` decides. One lock guards everything; the cache and the
    source are never called under it. Callable from any thread. After a fork the child queues again what was not settled, and starts a
    thread of its own when it asks for something."""

    def __init__(self, items: Items, store: Store | NullStore, workers: int, *, in_turn: bool = False) -> None:
        """``in_turn``: callers take the loads in their order, so that what will never have room waits in memory too."""
        self._fetcher, self._items, self._store, self._workers, self._in_turn = items.fetcher, items, store, workers, in_turn
        self._readers = 0 if items.space == URLS or items.links else workers
        self.news, self.read = News(), items.read
        self.closed = False
        items.on_read = self._has_read
        self._reset()
        host.at_fork(self)
        _close_at_exit.add(self)

    def _reset(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collector that runs inside may drop, and so ask for, another item
        self._settled = threading.Condition(self._lock)
        self._refs: dict[str, LoadRef] = {}
        self._queued: deque[LoadRef] = deque()
        self._elsewhere: list[tuple[LoadRef, str, str]] = []  # other processes fetch them: with the space and the key
        self._given_up: list[LoadRef] = []  # begun, and given up for a while, since no thread was free to read them: no others are begun
        self._stalled: list[LoadRef] = []  # LOADED, without room
        self._retries = False  # there may be room for them
        self._links: deque[tuple[LoadRef, Lease]] = deque()  # objects in `urls` that are to get a second name
        self._made: deque[tuple[LoadRef, Job]] = deque()  # callers have read them; they are to be published
        self._under_way: dict[int, LoadRef] = {}
        self._number = 0
        self._pipeline: Pipeline | None = None
        self._thread: DaemonThread | None = None

    # -- callers ---------------------------------------------------------------------------------------------------

    def submit(self, key: str, name: str, bound: bool, *, stores: bool = True, holds: bool = True) -> Load:
        """The load of an item, begun if there is none that `may_serve`. ``name``: its key in the cache; ``bound``, ``stores`` and
        ``holds``: see `Load`. Raises `Closed`."""
        with self._lock:
            if self.closed:
                raise errors.Closed.of("prefetcher")
            ref = self._refs.get(key)
            load = ref() if ref is not None else None
            if load is None or not load.may_serve(holds):  # an error that a caller keeps may hold it for long
                load = Load(self, key, name, bound, stores=stores)
                self._refs[key] = load.ref
                self._queued.append(load.ref)
                self.news.wake()
            load.holds = load.holds or holds
        self.start()
        return load

    def start(self) -> None:
        """Start the thread, which also removes what `discard` names."""
        with self._lock:
            if self._thread is not None or self.closed or host.forked_unseen():
                return
            thread = DaemonThread(self._run, name="forebay-prefetch-writer")
            if thread.begin():  # else each caller reads for itself
                self._thread = thread

    def take(self, load: Load) -> Buffer:
        """The bytes of an item: from the cache, from memory, or from the source in this very thread. Raises what the source raised."""
        timeout = self._fetcher.timeout
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            left = REPORT_AFTER if until is None else min(REPORT_AFTER, until - time.monotonic())
            state, data, lease = self._wait(load, left)
            if state is State.LOADING and (self._read_begun(load) or until is None or time.monotonic() < until):
                continue
            if state is State.LOADING:
                self._fetcher.fall_back(errors.WaitTimeout.of(load.key, timeout or 0.0, "this process"), load.name)
                return self._items.direct(load.key)
            if state is State.QUEUED:
                data = self._read_now(load)
            elif state is State.FAILED:
                assert load.error is not None
                raise load.error
            elif data is None and lease is not None:
                data = self._leased(load, lease)
            elif data is None:
                data = self.read(load.key)
            if data is not None:
                return data

    def wait_until_stored(self, load: Load) -> errors.ForebayError | None:
        """Wait until an item is stored, or will not be. Returns why it is not."""
        with self._lock, self._awaited(load):
            say_at = time.monotonic() + REPORT_AFTER
            while not load.is_settled or (load.state is State.LOADED and load.error is None):
                interrupts.point_without(self._lock)
                if not self._settled.wait(interrupts.TURN) and time.monotonic() >= say_at:
                    log.warning("waiting for %s to be stored", load.key)
                    say_at += REPORT_AFTER
        error = None if isinstance(load.error, NotStored) else load.error
        may_be_there = load.state is State.DROPPED and (error is None or isinstance(error, errors.NoSpace))
        if load.state is State.STORED or (may_be_there and self._is_there(load)):
            return None
        if load.state is State.FAILED:
            return error if isinstance(error, errors.ForebayError) else errors.FillFailed(f"{load.key}: {error}", kind=type(error).__name__)
        if isinstance(error, errors.NoSpace):
            return error
        return errors.CacheFault(f"{load.key} cannot be stored: {error or 'there is no room for it'}")

    def _is_there(self, load: Load) -> bool:
        try:
            return self._items.is_kept(load.key) or self._store.entry(self._items.space, load.name) is not None
        except errors.CacheFault:
            return False

    def _wait(self, load: Load, seconds: float) -> tuple[State, Buffer | None, Lease | None]:
        """Wait at most so long for its bytes. What was QUEUED is LOADING afterwards: the caller must read it."""
        until = time.monotonic() + seconds
        with self._lock:
            with self._awaited(load):
                while load.state is State.LOADING and not (load.job and load.job.turn) and (left := until - time.monotonic()) > 0:
                    interrupts.point_without(self._lock)
                    if not self._settled.wait(min(left, WATCH)) and left < WATCH < seconds:  # a turn comes without a word
                        log.warning("waiting for %s, which this process is reading", load.key)
            state = load.state
            if state is State.QUEUED:
                self._set(load, State.LOADING)
            return state, load.data, load.ref.lease if state is State.STORED else load.leased

    def _leased(self, load: Load, lease: Lease) -> Buffer | None:
        """The bytes of a leased entry, or of the file that is to get a second name. None: look again."""
        data: Buffer | None = None
        try:
            data = self._store.bytes_leased(lease)
        except errors.CacheFault as error:
            self._fetcher.fall_back(error, load.name)
        if data is None and not lease.closed:  # damaged; else the thread is done with that file, and it may be gone
            with self._lock:
                self._set(load, State.DROPPED)
        is_noted = data is not None and lease.entry.meta and lease.entry.space == self._items.space != URLS
        return Noted.of(data, lease.entry.meta) if data is not None and is_noted else data

    def _read_begun(self, load: Load) -> bool:
        """Read an item that waits for a free thread in the one that needs it. False: a thread reads it."""
        with self._lock:
            job, pipeline = load.job, self._pipeline
        with self._awaited(load):
            return job is not None and pipeline is not None and pipeline.work_now(job)

    def _read_now(self, load: Load) -> Buffer | None:
        """Read a queued item in the thread that needs it. The thread stores what a source returned; an object of a remote is in the cache
        before its caller has it, so that a later `invalidate` finds it. None: look again."""
        self.start()  # in a child of a fork there is no thread, and others may be queued
        with self._awaited(load):
            try:
                return self._run_here(load)
            except Exception as error:
                self._fail_load(load, error)
                raise
            except BaseException:
                with self._lock:
                    if load.state in (State.LOADING, State.LOADED):
                        self._set(load, State.QUEUED)
                        self._queued.appendleft(load.ref)
                self.news.wake()
                raise

    def _run_here(self, load: Load) -> Buffer | None:
        if self.closed or not load.stores:
            if not load.stores:
                self._store.count("misses")
            data = self._items.read(load.key) if load.stores else self._items.direct(load.key)
            with self._lock:
                self._set(load, State.DROPPED)
            return data
        if (there := self._items.linked([load.name]).get(load.name)) is not None:
            self._keep(load.ref, there)
            return None
        job = self._items.job(load)
        try:
            job.run(publishes=not self._readers or self._thread is None)
        except (errors.CacheFault, errors.WaitTimeout) as error:
            job.error = error.with_traceback(None)
        if job.writing is not None:
            self._hand_over(load, job)
        else:
            self._came(load.ref, job)
        return None

    @contextlib.contextmanager
    def _awaited(self, load: Load) -> Iterator[None]:
        """Count the calling thread among those that wait for a load: its bytes then stay, whether or not they are stored."""
        with self._lock:
            load.waiters += 1
        try:
            yield
        finally:
            with self._lock:
                load.waiters -= 1

    def _hand_over(self, load: Load, job: Job) -> None:
        """Have the thread publish what a caller has read. Where it is behind, the item is not stored."""
        until = time.monotonic() + STORE_WAIT
        with self._lock:
            while len(self._made) >= 2 * self._workers and not self.closed and (left := until - time.monotonic()) > 0:
                interrupts.point_without(self._lock)
                self._settled.wait(min(left, interrupts.TURN))
            data = job.collected.data if load.data is None else load.data
            is_behind = self.closed or len(self._made) >= 2 * self._workers
            self._set(load, State.DROPPED if is_behind else State.LOADED, data=data)
            if not is_behind:
                self._made.append((load.ref, job))
        if is_behind:
            job.release()
        self.news.wake()

    def _has_read(self, load: Load, data: Buffer) -> None:
        """A source returned the bytes of an item: callers have them from here on, stored or not."""
        with self._lock:
            if load.state is State.LOADING:
                self._set(load, State.LOADED, data=data)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Work until the prefetcher is closed, and what was read is stored."""
        pause: float | None = 0.0
        while not (self.closed and pause is None):
            self._forget(self.news.wait(pause))
            self._retries |= pause != 0
            try:
                pause = self._turn()
            except Exception as error:  # noqa: BLE001  # whatever it is: without this thread nothing would be loaded any more
                # The callers of what was under way read it themselves.
                if "interpreter shutdown" not in str(error):  # Python 3.12 and later refuse a thread before `sys.is_finalizing` is true
                    self._fetcher.warn(type(error).__name__, "loading ahead failed: %s", error)
                pause = WATCH

    def _turn(self) -> float | None:
        """Load what is queued. Returns how long there is nothing to do; None: until there is news."""
        if self._given_up:
            self._look_again()
        with self._lock:
            has_next = not self.closed and self._places() > 0 and any(ref() is not None for ref in self._queued)
            may_retry = self._retries and not self.closed and self._next_stalled() is not None
            busy = next((one for one in self._elsewhere if one[0]() is not None), None)
        if self._made or self._links or has_next or may_retry:
            self._load()
            return 0.0
        if self.closed:
            self._drop(self._stalled, "the prefetcher was closed")
            return None
        if busy is not None:
            with contextlib.suppress(errors.CacheFault):
                if self._store.keeps:
                    self._store.locks.wait_turn(*busy[1:], WATCH)
            self._look_again()
            return 0.0
        return WATCH if self._stalled else None

    def _load(self) -> None:
        most = BEGUN_AHEAD * self._readers or self._workers
        pipeline = Pipeline(
            self._fetcher, side_by_side=most, waits=False, on_turn=self._look_again, made=self._next_made, needed=self._is_needed,
            readers=self._readers, name="prefetch",
        )  # fmt: skip
        with self._lock:
            self._pipeline = pipeline
        self.news.wakes = pipeline.wake
        try:
            for job in pipeline.run_as_they_come(self._next):
                with self._lock:
                    ref = self._under_way.pop(job.number)
                self._came(ref, job)
            self._link()
            pipeline.join()
        except CallAborted:
            self._drop(self._under_way.values(), "the prefetcher was closed")
        except Exception as error:
            self._drop([*self._under_way.values(), *(ref for ref, _ in self._links)], str(error))
            self._links.clear()
            raise
        finally:
            self.news.wakes = None
            with self._lock:
                self._pipeline = None
                self._under_way.clear()

    def _next(self, most: int) -> Sequence[Job] | None:
        """The next jobs. None: nothing is under way, nor can be begun."""
        self._forget(self.news.wait(0))
        self._link()
        jobs: list[Job] = []
        with self._lock:
            retried = self._next_stalled() if self._retries and not self.closed else None
            self._retries = False
            loads = self._next_queued(min(most, self._places()) if not self._given_up else 0)
        if retried is not None and retried.data is not None:
            jobs.append(self._items.stored_job(retried.ref, self._enter(retried.ref), retried.data))
        there = self._items.linked([load.name for load in loads.values()])
        for number, load in loads.items():
            if (lease := there.get(load.name)) is not None:
                self._keep(load.ref, lease)
                del self._under_way[number]
                continue
            try:
                load.job = self._items.job(load, number)
                jobs.append(load.job)
            except errors.ForebayError as error:
                self._fail_load(load, error)
                del self._under_way[number]
        return jobs if jobs or self._under_way else None

    def _next_made(self) -> Sequence[Job]:
        """What callers have read."""
        with self._lock:
            made, self._made = self._made, deque()
            for ref, job in made:
                job.number = self._enter(ref)
            if made:
                self._settled.notify_all()
        return [job for _, job in made]

    def _is_needed(self, job: Job) -> bool:
        return self._items.keep or job.target.space != self._items.space or self._under_way[job.number]() is not None

    def _enter(self, ref: LoadRef) -> int:
        self._number += 1
        self._under_way[self._number] = ref
        return self._number

    def _next_stalled(self) -> Load | None:
        """The first load that waits for room in the pool's space, unless it is tried already."""
        if self._items.space == URLS:
            return None
        under_way = set(map(id, self._under_way.values()))
        return next((load for ref in self._stalled if id(ref) not in under_way and (load := ref()) is not None), None)

    def _next_queued(self, most: int) -> dict[int, Load]:
        loads: dict[int, Load] = {}
        while self._queued and len(loads) < most and not self.closed:
            load = self._queued.popleft()()
            if load is not None and load.state is State.QUEUED:
                self._set(load, State.LOADING)
                loads[self._enter(load.ref)] = load
        return loads

    def _places(self) -> int:
        """How many items may be read now, so that few are in memory without being stored. Those that were asked for before the first one
        found no room come in addition."""
        if self._readers and len(self._stalled) < self._workers:
            return BEGUN_AHEAD * self._workers
        most = self._workers * (1 if self._stalled else 2)  # with what is to be published: the pipeline counts requests
        return most - len(self._under_way) - len(self._stalled)

    def _came(self, ref: LoadRef, job: Job) -> None:
        """A job has its result."""
        error, lease = job.error, job.lease
        if lease is not None and job.target.space == self._items.space:
            self._keep(ref, lease)
            return
        if isinstance(error, NotStored):
            lease, error.lease = error.lease, None  # its frames hold it
        is_fault = isinstance(error, errors.CacheFault | errors.WaitTimeout) and not isinstance(error, errors.RemoteError)
        load = ref()
        data = job.data if load is None or load.data is None else load.data
        may_wait = (
            isinstance(error, errors.NoSpace)
            and data is not None
            and job.stores
            and self._items.may_wait(job.target.space, len(data), error)
        )
        is_full = isinstance(error, DiskFull) or (isinstance(error, errors.NoSpace) and error.limit == "disk")  # who knows until when
        with self._lock:
            if lease is not None:
                self._links.append((ref, lease))
                self.news.wake()
            if load is None or load.state not in (State.LOADING, State.LOADED):
                pass  # nobody needs it any more
            elif lease is not None:
                self._set(load, State.LOADED, leased=lease)
            elif job.is_busy:
                if job.since is None:
                    self._given_up.append(ref)
                else:
                    self._elsewhere.append((ref, job.target.space, job.target.key))
                if load.state is State.LOADING:
                    load.busy_since = job.since
                    self._set(load, State.QUEUED)
            elif not load.stores and data is not None:
                self._set(load, State.LOADED, data=data)
            elif data is not None and (may_wait or self._in_turn):
                is_final = is_full or (job.target.space == URLS and not self._items.links)
                self._set(load, State.LOADED, data=data, error=error if is_final else None)
                if ref not in self._stalled:
                    self._stalled.append(ref)
                self._limit_memory()
                self._retries |= job.target.space != self._items.space  # of `urls` there is no room, but there may be in the pool
            elif is_fault:
                self._set(load, State.DROPPED, data=data if load.waiters else None, error=error)
            else:
                self._set(load, State.FAILED, error=error)
        if error is not None and is_fault and not may_wait and not isinstance(error, NotStored):
            self._items.report(ref, job.target.space, len(data or b""), error)

    def _keep(self, ref: LoadRef, lease: Lease) -> None:
        """The item is in the cache: every caller that asked for it holds its lease."""
        with self._lock:
            load = ref()
            is_held = load is not None and load.holds and load.state in (State.LOADING, State.LOADED)
            if is_held:
                ref.lease = lease
            if load is not None and load.state in (State.LOADING, State.LOADED):
                self._set(load, State.STORED)
            del load
        if not is_held:
            lease.close()
            if not self._items.keep and self._store.keeps:
                self._store.drop([lease.entry])

    def _look_again(self) -> None:
        """Other processes may have fetched what they were fetching, and there may be room."""
        with self._lock:
            again, self._elsewhere = self._elsewhere, []
            self._queued.extend(ref for ref, _, _ in again)
            self._queued.extendleft(reversed(self._given_up))
            self._given_up.clear()
            self._retries = True
            if self._pipeline is not None and (again or self._stalled):
                self._pipeline.wake()

    def _forget(self, news: Iterable[LoadRef | Entry]) -> None:
        """Forget loads that are gone, and drop entries that no caller needs."""
        entries: list[Entry] = []
        with self._lock:
            for ref in news:
                if not isinstance(ref, LoadRef):
                    entries.append(ref)
                    continue
                if self._refs.get(ref.key) is ref:
                    del self._refs[ref.key]
                if ref.lease is not None:
                    self._retries = True
                    entries += [] if self._items.keep else [ref.lease.entry]
            self._stalled = [ref for ref in self._stalled if (load := ref()) is not None and load.state is State.LOADED]
            self._limit_memory()
        if entries and self._store.keeps:
            with contextlib.suppress(errors.CacheFault):  # whoever needs room sweeps what nobody holds
                self._store.drop(entries)

    def _limit_memory(self) -> None:
        if self._pipeline is not None and self._readers:
            most = self._workers if self._stalled else 2 * self._workers
            self._pipeline.limit_memory(max(most - len(self._stalled), 0))

    # -- second names ----------------------------------------------------------------------------------------------

    def _link(self) -> None:
        """Give the files of objects their second names, up to sixteen in one transaction."""
        while self._links:
            links = [self._links.popleft() for _ in range(min(GROUP, len(self._links)))]
            for (ref, lease), result in zip(links, self._items.link(links), strict=True):
                if isinstance(result, Lease):
                    self._keep(ref, result)
                    lease.close()
                else:
                    self._not_linked(ref, lease, result)

    def _not_linked(self, ref: LoadRef, lease: Lease, error: errors.CacheFault) -> None:
        """There is no room for two names: the bytes wait in memory, so that the object can make way; or the item is not stored."""
        data: bytes | None = None
        with contextlib.suppress(errors.CacheFault):
            view = self._store.bytes_leased(lease)
            data = None if view is None else bytes(view)
        may_wait = isinstance(error, errors.NoSpace) and data is not None and self._items.may_wait(self._items.space, len(data), error)
        with self._lock:
            load = ref()
            if load is not None and load.state is State.LOADED:
                if may_wait:
                    self._set(load, State.LOADED, data=data)
                    self._stalled.append(ref)
                    self._retries = True
                else:
                    self._set(load, State.DROPPED, data=data if load.waiters else None, error=error)
        lease.close()
        if not may_wait:
            self._fetcher.fall_back(error, ref.name)

    # -- steps of a transition -------------------------------------------------------------------------------------

    def _drop(self, refs: Iterable[LoadRef], reason: str) -> None:
        with self._lock:
            for load in live(list(refs)):
                if load.state in (State.LOADING, State.LOADED):
                    self._set(load, State.DROPPED, data=load.data if load.waiters else None, error=errors.CacheFault(reason))

    def _set(
        self, load: Load, state: State, *, data: Buffer | None = None, leased: Lease | None = None, error: BaseException | None = None
    ) -> None:
        load.state, load.data, load.leased, load.error, load.job = state, data, leased, error, None
        if state is not State.LOADING and load.waiters:
            self._settled.notify_all()

    def _fail_load(self, load: Load, error: Exception) -> None:
        with self._lock:
            if load.state is State.LOADING:
                self._set(load, State.FAILED, error=error)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None, *, gives_up: bool = False) -> None:
        """Drop what is queued and wait for what runs, at most ``timeout`` seconds. What was handed out stays good. ``gives_up``: what runs
        too; what has come of it can be resumed."""
        with self._lock:
            self.closed = self._items.closed = True
            for load in live(list(self._refs.values())):
                is_begun = load.job is not None and self._pipeline is not None and self._pipeline.leave(load.job)
                if load.state is State.QUEUED or is_begun:
                    self._set(load, State.DROPPED)
            self._queued.clear()
            self._elsewhere.clear()
            self._given_up.clear()
            thread = self._thread
            if gives_up and self._pipeline is not None:
                self._pipeline.stop()
            self.news.wake()
        if threading.current_thread().name.startswith("forebay-prefetch"):  # a source that closes: others wait for what this thread reads
            return
        if thread is not None:
            join(thread, timeout)
        self._items.close()

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
            if load.state is State.LOADED:
                load.state = State.DROPPED  # the parent stores it
            elif not load.is_settled:
                load.state, load.data = State.QUEUED, None
                self._queued.append(load.ref)


@interrupts.finalizer
def abandon(loader: weakref.ref[Loader]) -> None:
    """Nothing refers to the prefetcher of this loader any more. Called by the garbage collector: nothing here waits."""
    if (alive := loader()) is not None:
        alive.closed = True
        alive.news.wake()


def _close_all() -> None:
    for loader in list(_close_at_exit):
        loader.close(AT_EXIT)


atexit.register(_close_all)
