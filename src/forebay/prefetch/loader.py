"""The threads of a prefetcher: a writer, and workers that read items before they are needed. Callers take items, or read them at once.

look up    is the item in the cache? then it is leased, and done
schedule   once room is promised for it, its key is locked; if another process holds the key, no thread waits for it
read       into memory, by a worker, or by a caller that needs it now and cannot wait
fetch      instead of that, objects of a remote, by the thread of the writer: see `linked_objects`
store      the writer stores several at a time; until then they are served from memory

Workers start to read while fewer items than twice the number of workers wait in memory to be stored. Only items that no caller wants yet
wait for room.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from typing import Protocol

from forebay import errors
from forebay._engine.flight import KeyHold
from forebay._engine.locks.lease import Lease
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Buffer, Entry, Noted
from forebay.prefetch.linked_objects import ObjectFetch
from forebay.prefetch.load_queue import REPORT_AFTER
from forebay.prefetch.loads import Load, LoadRef, PrefetchConfig, Scheduled, State, size_of
from forebay.prefetch.writer import ItemWriter

log = logger("forebay.prefetch")

AT_EXIT = 1.0
"""Seconds that an exiting process waits for each prefetcher: a source that stalls must not keep it."""
WATCH = 0.1


class Closing(Protocol):
    """What is closed when the process exits."""

    def close(self, timeout: float | None = None) -> None: ...


close_at_exit: weakref.WeakSet[Closing] = weakref.WeakSet()


class Loader:
    """The threads of one prefetcher, and the calls for its items. Callable from any thread; usable in both processes after a
    fork: the child starts threads of its own when it loads something."""

    def __init__(self, config: PrefetchConfig) -> None:
        self._config, self._store = config, config.store
        self._writer = ItemWriter(config)
        self.queue = self._writer.queue
        self._reset()
        host.at_fork(self)
        close_at_exit.add(self)

    def _reset(self) -> None:
        self._starting = threading.RLock()  # guards _threads; reentrant: a collector that runs inside may start some too
        self._threads: list[threading.Thread] = []

    # -- callers ---------------------------------------------------------------------------------------------------

    def submit(self, key: str, name: str, bound: bool, *, holds: bool = True) -> Load:
        """The load of an item, begun if there is none. ``name``: in the cache; ``bound``, ``holds``: see `Load`. Raises `Closed`."""
        load = self.queue.submit(key, name, bound, holds)
        self._start_threads()
        return load

    def _start_threads(self) -> None:
        if len(self._threads) <= self._workers and not host.forked_unseen():
            self._add_thread()

    def start(self) -> None:
        """Start the first threads, one of which does what `discard` asks for."""
        if not self._threads and not host.forked_unseen():
            self._add_thread()

    def _add_thread(self) -> None:
        with self._starting:
            count = len(self._threads)
            if count > self._workers or self.queue.closing:
                return
            run, name = (self._run_worker, f"prefetch-{count}") if count else (self._run_writer, "prefetch-writer")
            thread = threading.Thread(target=run, name=f"forebay-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        if not count:
            self._add_thread()

    def read(self, key: str) -> Buffer:
        """The bytes of an item, from the source. Raises what the source raises."""
        return self._config.read(key)

    def wait_until_stored(self, load: Load) -> errors.ForebayError | None:
        """Wait until an item is stored, or will not be. Returns why it is not."""
        state = self.queue.wait_until_settled(load)
        if state is State.STORED or (state is State.DROPPED and self._config.is_kept(load.key)):
            return None
        if state is State.FAILED:
            return load.failure
        if load.reason:
            return errors.CacheFault(f"{load.key} cannot be stored: {load.reason}")
        return errors.NoSpace(f"{load.key} cannot be stored", key=load.key, need=load.size or 0, free=0, budget=self.queue.limit)

    def take(self, load: Load) -> Buffer:
        """The bytes of an item: from the cache, from memory, or from the source in this very thread, whichever is first.

        Raises what the source raised."""
        timeout = self._config.timeout
        until = None if timeout is None else time.monotonic() + timeout
        while True:
            taken = self.queue.take(load, REPORT_AFTER if until is None else min(REPORT_AFTER, until - time.monotonic()))
            data = taken.data
            if taken.state is State.LOADING:
                if until is None or time.monotonic() < until:
                    log.warning("waiting for %s, which this process is reading", load.key)
                    continue
                return self._read_past(load, errors.WaitTimeout.of(load.key, timeout or 0.0, "this process"))
            if taken.state is State.FAILED:
                assert load.error is not None
                raise load.error
            if data is None and taken.lease is not None:
                data = self._leased(load, taken.lease)
            elif data is None and taken.state is State.DROPPED:
                return self._config.read(load.key)
            elif data is None and taken.state is State.QUEUED:
                data = self._load_now(load, taken.hold)
            if data is not None:
                return data

    def _leased(self, load: Load, lease: Lease) -> Buffer | None:
        """The stored bytes, or those of the file that is to get a second name. None: they are damaged, or the cache fails; from now on the
        item is read from the source."""
        data, fault = None, None
        try:
            data = self._store.bytes_leased(lease)
        except errors.CacheFault as error:
            fault = error
            self._config.report_fault(error, load.key)
        if data is None and not lease.closed:  # else the writer is done with that file, and it may be gone
            self.queue.drop(load.ref, fault)
        is_noted = data is not None and lease.entry.meta and lease.entry.space == self._config.space
        return Noted.of(data, lease.entry.meta) if data is not None and is_noted else data

    def _read_past(self, load: Load, error: Exception) -> Buffer:
        """Read an item without the cache, which could not help."""
        self._config.report_fault(error, load.key)
        return self._config.direct(load.key)

    def _load_now(self, load: Load, hold: KeyHold | None) -> Buffer | None:
        """Load an item in the thread that needs it. None: it turned out to be in the cache. ``hold``: the lock of its key, if the scheduler
        looked for it under that."""
        data: Buffer | None = None
        self._start_threads()  # in a child of a fork there are none, and what is read is to be stored
        try:
            lease: Lease | None = None
            if hold is None:
                lease, hold = self._lock_or_lease(load)
            if lease is not None:
                self._keep_lease(load.ref, lease)
                return None
            assert hold is not None
            made = self._make(load.ref)
            data = self._store.bytes_leased(made) if isinstance(made, Lease) else made
            if self._hand_over(load.ref, made, hold, None):
                hold = None
            return data
        except (errors.CacheFault, errors.WaitTimeout) as error:
            self.queue.drop(load.ref, error)
            return data if data is not None else self._read_past(load, error)
        except Exception as error:
            self.queue.fail(load.ref, error)
            raise
        except BaseException:
            self.queue.queue_again(load.ref)
            raise
        finally:
            if hold is not None:
                hold.release()

    def _lock_or_lease(self, load: Load) -> tuple[Lease | None, KeyHold | None]:
        """A lease on the item if it is in the cache, else the lock of its key, after another process that works on it."""
        name, space = load.name, self._config.space
        lease = self._store.take(space, name)
        if lease is not None:
            return lease, None
        since = load.busy_since or time.monotonic_ns()
        hold = self._store.locks.try_hold(space, name)
        waited = hold is None or load.busy_since is not None
        hold = hold or self._store.locks.hold(space, name, timeout=self._config.timeout)
        try:
            lease = self._store.take(space, name)
            error = self._store.locks.failure(space, name, since) if waited and lease is None else None
            if error is not None:
                raise error
        except BaseException:
            hold.release()
            raise
        if lease is None:
            return None, hold
        hold.release()
        return lease, None

    # -- workers ---------------------------------------------------------------------------------------------------

    @property
    def _workers(self) -> int:
        """How many threads read. Objects are fetched by that of the writer."""
        return self._config.workers if self._config.objects is None else 0

    def _run_writer(self) -> None:
        """Work until the prefetcher is closed and all that was read is stored."""
        objects = self._config.objects
        if objects is None:
            self._writer.run()
        else:
            ObjectFetch(objects, self._config.workers, self._writer, self._hand_over_scheduled, self._fail_object).run()

    def _run_worker(self) -> None:
        """Work until the prefetcher is closed."""
        while self._work():
            pass

    def _work(self) -> bool:
        """One task. What is worked on is known to this call alone: a thread that sleeps keeps no load alive."""
        task = self.queue.next_task()
        if isinstance(task, Scheduled):
            self._read_ahead(task)
        elif isinstance(task, Load):
            self._ask_size(task)
        elif task is not None:
            with contextlib.suppress(errors.CacheFault):
                self._store.locks.wait_turn(self._config.space, task, WATCH)
            self.queue.watched()
        return task is not None

    def _read_ahead(self, scheduled: Scheduled) -> None:
        ref = scheduled.ref
        try:
            if self._config.is_kept(ref.key):
                self.queue.drop(ref, None)
                self.queue.end_read(scheduled)
                scheduled.hold.release()
            else:
                self._hand_over_scheduled(scheduled, self._make(ref))
        except BaseException as error:  # noqa: BLE001  # SystemExit of a source too: this thread goes on; the caller of the item raises it
            self._fail(scheduled, error)

    def _hand_over_scheduled(self, scheduled: Scheduled, data: Buffer | Lease) -> None:
        if not self._hand_over(scheduled.ref, data, scheduled.hold, scheduled):
            scheduled.hold.release()

    def _fail(self, scheduled: Scheduled, error: BaseException) -> None:
        """A scheduled load ends without its bytes: by a fault of the cache, or what the source raised."""
        ref = scheduled.ref
        if isinstance(error, errors.CacheFault):
            self.queue.drop(ref, error)
        else:
            self.queue.fail(ref, error)
        self.queue.end_read(scheduled)
        scheduled.hold.release()
        if isinstance(error, errors.CacheFault):
            self._config.report_fault(error, ref.key)

    def _fail_object(self, scheduled: Scheduled, error: Exception) -> None:
        """`_fail`, for an object that was not fetched."""
        if isinstance(error, errors.WaitTimeout) and not isinstance(error, errors.RemoteError):  # for the cache, not for a connection
            error = errors.CacheFault(str(error))
        if not isinstance(error, errors.CacheFault):
            self._store.locks.note_failure(self._config.space, scheduled.ref.name, error)
        self._fail(scheduled, error)

    def _ask_size(self, load: Load) -> None:
        size: int | None = None
        try:
            size = self._config.size_of(load.key) if self._config.size_of is not None else None
        except Exception as error:  # noqa: BLE001  # the source's own: its read will raise
            log.debug("the size of %s is not known: %s", load.key, str(error))
        self.queue.set_size(load, size)

    # -- steps of a load -------------------------------------------------------------------------------------------

    def _keep_lease(self, ref: LoadRef, lease: Lease) -> None:
        """The item is in the cache: every caller that asked for it holds its lease."""
        self._store.count_hit(lease.entry.size)
        if self.queue.link(ref, lease):
            return
        lease.close()
        if not self._config.keep:
            self._store.drop([lease.entry])

    def _make(self, ref: LoadRef) -> Buffer | Lease:
        """Read the source under the lock of the key. What it raises is noted for other processes that wait for the same item."""
        try:
            # Whoever holds a key of `urls` waits for no other: that a caller waits for one here never closes a circle.
            with self._store.locks.working() if self._config.objects is None else contextlib.nullcontext():
                return self._config.make(ref.key)
        except errors.CacheFault:
            raise
        except Exception as error:
            self._store.locks.note_failure(self._config.space, ref.name, error)
            raise

    def _hand_over(self, ref: LoadRef, data: Buffer | Lease, hold: KeyHold, scheduled: Scheduled | None) -> bool:
        """Serve an item from memory, or from a leased file, until the writer has stored it. Returns whether the writer releases its key."""
        if not isinstance(data, Lease) and self._config.is_kept(ref.key):  # by this very read
            self.queue.drop(ref, None, data)
            if scheduled is not None:
                self.queue.end_read(scheduled)
            return False
        if self.queue.loaded(ref, data, hold, scheduled):
            return True
        if size_of(data) > self.queue.limit:
            self._writer.report_too_large(ref.key, size_of(data))
        return False

    # -- the end ---------------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.queue.closing

    def discard(self, entry: Entry) -> None:
        """Remove an entry that no caller in this process needs any more, if no other process does. Callable from a finalizer."""
        self.queue.news.discard(entry)

    def look_at_limit(self) -> None:
        """The space has other limits now: what waits for room may have it."""
        self._writer.look_at_limit()
        self.queue.news.wake()

    def close(self, timeout: float | None = None) -> None:
        """Drop what is queued and wait for what runs, at most ``timeout`` seconds. What was handed out stays good."""
        self.queue.close()
        with self._starting:
            threads = list(self._threads)
        until = None if timeout is None else time.monotonic() + timeout
        if threading.current_thread() in threads:  # a source that closes: the others wait for what this one reads
            return
        for thread in reversed(threads):  # the writer last
            thread.join(None if until is None else max(until - time.monotonic(), 0))
        if self._config.session is not None:
            self._config.session.close()

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self.queue.before_fork()

    def after_fork_parent(self) -> None:
        self.queue.after_fork_parent()

    def after_fork_child(self) -> None:
        self._reset()
        self.queue.after_fork_child()
        self._writer.after_fork_child()


class Abandoned(Protocol):
    """What keeps the threads of a prefetcher at work."""

    def abandon(self) -> None: ...


def abandon(owner: weakref.ref[Abandoned]) -> None:
    """Nothing refers to the prefetcher of these threads any more. Called by the garbage collector: nothing here waits."""
    alive = owner()
    if alive is not None:
        alive.abandon()


def _close_all() -> None:
    for loader in list(close_at_exit):
        loader.close(AT_EXIT)


atexit.register(_close_all)
