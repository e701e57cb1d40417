"""Brings items into the cache ahead of those who want them, and gives them out.

look      is it in the cache? then it is leased, and done
start     when room is promised for it, the key's lock is taken; another process that has it is not waited for
read      into memory, by a worker, or by whoever wants it now and cannot wait
keep      the keeper writes several at a time; until then they are served from memory

So at most twice as many items as workers are in memory, and nobody waits for room but those that nobody wants yet.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref

from forebay import errors
from forebay._engine.locks.fill import KeyHold
from forebay._engine.locks.leases import Lease
from forebay._engine.write.reservations import NOTHING
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Buffer, Entry, Noted
from forebay.prefetch.load_queue import LoadQueue, PrefetchConfig
from forebay.prefetch.loads import Load, State
from forebay.prefetch.steps import Steps
from forebay.prefetch.worker import Worker
from forebay.prefetch.writer import ItemWriter

log = logger("forebay.prefetch")

SAY_AFTER = 5.0
AT_EXIT = 1.0
_alive: weakref.WeakSet[Loader] = weakref.WeakSet()


class Loader:
    """The threads of one prefetcher, and the calls of those who want items. Callable from any thread; usable in both processes after a
    fork: the child begins threads of its own, and queues again what the parent was at."""

    def __init__(self, job: PrefetchConfig) -> None:
        self._job, self._store = job, job.store
        self._keeper = ItemWriter(job)
        self._desk = self._keeper.desk
        self._steps = Steps(job, self._keeper)
        self._worker = Worker(job, self._desk, self._steps)
        self._threads: list[threading.Thread] = []
        host.at_fork(self)
        _alive.add(self)

    # -- for those who want items ----------------------------------------------------------------------------------

    def submit(self, key: str, name: str, bound: bool) -> Load:
        """The load of an item, begun if there is none. ``name``: in the cache; ``bound``: to the session. Raises `Closed`."""
        load = self._desk.load(key, name, bound)
        self._have_threads()
        return load

    def _have_threads(self) -> None:
        if len(self._threads) <= self._job.workers and not host.forked_unseen():
            self._add_thread()

    def begin(self) -> None:
        """Have the threads, one of which does what `drop` asks for."""
        if not self._threads and not host.forked_unseen():
            self._add_thread()

    def _add_thread(self) -> None:
        with self._desk.lock:
            count = len(self._threads)
            if count > self._job.workers or self._desk.closing:
                return
            what, name = (self._worker.run, f"prefetch-{count}") if count else (self._keeper.run, "prefetch-keeper")
            thread = threading.Thread(target=what, name=f"forebay-{name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        if not count:
            self._add_thread()

    @property
    def lock(self) -> threading.RLock:
        """Of this process: another one after a fork."""
        return self._desk.lock

    @property
    def closed(self) -> bool:
        return self._desk.closing

    def drop(self, entry: Entry) -> None:
        """An entry that nobody here wants any more goes, if nobody else does."""
        self._desk.drops.append(entry)
        self._desk.news.put(None)

    def settle(self, load: Load) -> errors.ForebayError | None:
        """Wait until an item is kept. Gives why it is not."""
        desk = self._desk
        with desk.lock:
            load.waiting += 1
            while not self._is_over(load):
                if not desk.settled.wait(SAY_AFTER):
                    log.warning("waiting for %s to be kept", load.key)
            load.waiting -= 1
            error = load.error
        if load.state is State.FAILED:
            return error if isinstance(error, errors.ForebayError) else errors.FillFailed(f"{load.key}: {error}", kind=type(error).__name__)
        if load.state is not State.KEPT:
            return errors.NoSpace(f"{load.key} cannot be kept", key=load.key, need=load.size or 0, free=0, budget=desk.limit)
        return None

    def _is_over(self, load: Load) -> bool:
        """What is too large stays in memory for those who wait for it, and is never kept."""
        if load.state is State.READ:
            return load.data is not None and len(load.data) > self._desk.limit
        return load.state in (State.KEPT, State.PAST, State.FAILED)

    def take(self, load: Load) -> Buffer:
        """The bytes of an item: from the cache, from memory, or from the source in this very thread, whichever is first.

        Raises what the source raised."""
        desk, until = self._desk, None if self._job.timeout is None else time.monotonic() + self._job.timeout
        while True:
            with desk.lock:
                state, data = load.state, load.data
                if state is State.RUNNING and desk.wait(load, until, SAY_AFTER):
                    continue
                lease = load.mark.lease if load.mark is not None else None
                ready = desk.take_over(load) if state is State.QUEUED else None
            if state is State.RUNNING:
                if until is not None and time.monotonic() >= until:
                    return self._direct(load, errors.WaitTimeout.of(load.key, self._job.timeout or 0.0, "this process"))
                log.warning("waiting for %s, which this process is reading", load.key)
            elif state is State.FAILED:
                assert load.error is not None
                raise load.error
            elif state is State.PAST:
                return self._job.make(load.key)
            elif data is not None:
                return data
            elif state is State.QUEUED:
                found = self._overtake(load, ready.hold if ready is not None else None)
                if found is not None:
                    return found
            elif lease is not None:
                stored = self._stored(load, lease)
                if stored is not None:
                    return stored

    def _stored(self, load: Load, lease: Lease) -> Buffer | None:
        """The kept bytes. None: damaged, or the cache fails: from now on the item is read from the source."""
        found = None
        try:
            found = self._store.bytes_leased(lease)
        except errors.CacheFault as error:
            self._job.tell(error, load.key)
        if found is None:
            with self._desk.lock:
                if load.state is State.KEPT:
                    self._desk.set(load, State.PAST)
        return Noted.of(found, lease.entry.meta) if found is not None and lease.entry.meta else found

    def _direct(self, load: Load, error: Exception) -> Buffer:
        self._job.tell(error, load.key)
        return self._job.make(load.key)

    def _overtake(self, load: Load, hold: KeyHold | None) -> Buffer | None:
        """It was still queued: read it here, at once. None: it turned out to be in the cache. ``hold``: the key's lock, where it was looked
        for under it."""
        data: Buffer | None = None
        assert load.mark is not None
        mark = load.mark
        self._have_threads()  # in a child of a fork there are none, and what is read is to be kept
        try:
            if hold is None:
                found = self._await_turn(load)
                if isinstance(found, Lease):
                    self._steps.found(load, found)
                    return None
                hold = found
            linked = self._steps.link(mark)
            if isinstance(linked, Lease):
                self._steps.found(load, linked)
                return None
            data = self._steps.read(mark) if linked is None else linked
            self._steps.bring(mark, data, hold, NOTHING, -1)
            hold = None
            return data
        except (errors.CacheFault, errors.WaitTimeout) as error:
            self._steps.past(mark)
            return data if data is not None else self._direct(load, error)
        except Exception as error:
            self._steps.fail(mark, error)
            raise
        except BaseException:
            with self._desk.lock:
                self._desk.queue_again(load)
            raise
        finally:
            if hold is not None:
                hold.release()

    def _await_turn(self, load: Load) -> Lease | KeyHold:
        """What is in the cache, else the key's lock: after the work of another process that has it."""
        name, space = load.name, self._job.space
        lease = self._store.take(space, name)
        if lease is not None:
            return lease
        since = load.busy_since or time.monotonic_ns()
        hold = self._store.locks.try_hold(space, name)
        waited = hold is None or load.busy_since is not None
        hold = hold or self._store.locks.hold(space, name, timeout=self._job.timeout)
        try:
            lease = self._store.take(space, name)
            error = self._store.locks.failure(space, name, since) if waited and lease is None else None
            if error is not None:
                raise error
        except BaseException:
            hold.release()
            raise
        if lease is not None:
            hold.release()
            return lease
        return hold

    def look_at_limit(self) -> None:
        """The space has other limits now: what waits for room may have it."""
        self._keeper.look_at_limit()
        self._desk.news.put(None)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, patience: float | None = None) -> None:
        """Cancel what is queued, wait for what runs, at most ``patience`` seconds. What was handed out stays good."""
        desk = self._desk
        with desk.lock:
            desk.closing = True
            for mark in list(desk.marks.values()):
                load = mark()
                if load is not None and load.state is State.QUEUED:
                    desk.set(load, State.PAST)
            desk.unsized.clear()
            desk.asked.clear()
            desk.missing.clear()
            desk.elsewhere.clear()
            desk.work.notify_all()
            desk.news.put(None)
            threads = list(self._threads)
        until = None if patience is None else time.monotonic() + patience
        if threading.current_thread() in threads:  # a source that closes: the others wait for what this one reads
            return
        for thread in reversed(threads):  # the keeper last
            thread.join(None if until is None else max(until - time.monotonic(), 0))
        if self._job.session is not None:
            self._job.session.close()

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._desk.before_fork()

    def after_fork_parent(self) -> None:
        self._desk.after_fork_parent()

    def after_fork_child(self) -> None:
        self._threads = []
        self._desk.after_fork_child()
        self._keeper.after_fork_child()


def abandon(found: weakref.ref[LoadQueue]) -> None:
    """Nobody has the prefetcher of this desk any more. Called by the garbage collector: nothing here waits."""
    desk = found()
    if desk is not None:
        desk.closing = True
        desk.news.put(None)


def _end() -> None:
    """At exit nobody waits long: a source that stalls must not keep the process."""
    for loader in list(_alive):
        loader.close(AT_EXIT)


atexit.register(_end)
