"""What a worker of a prefetcher does: looks, reads, and leaves to other processes what they are at."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

from forebay import errors
from forebay._engine.credit import Need
from forebay._engine.fill import KeyHold
from forebay._loading.desk import Job
from forebay._loading.keeper import Keeper
from forebay._loading.loads import Load, State
from forebay._loading.steps import Steps

log = logging.getLogger("forebay.prefetch")

TURN = 0.1


class Worker:
    """One object for all threads of a prefetcher; each calls `run`."""

    def __init__(self, job: Job, keeper: Keeper, steps: Steps) -> None:
        self._job, self._store, self._keeper, self._desk, self._steps = job, job.store, keeper, keeper.desk, steps

    def run(self) -> None:
        desk = self._desk
        while True:
            job: Callable[[], None] | None = None
            with desk.lock:
                if desk.closing:
                    return
                if (reading := desk.next_to_read()) is not None:
                    job = self._reader(*reading)
                    reading = None
                elif (looking := desk.next_to_look()) is not None:
                    job = self._looker(looking)
                    looking = None
                elif desk.elsewhere and not desk.watched:
                    desk.watched, job = True, self._watch
                else:
                    desk.work.wait()
            if job is not None:
                job()

    def _looker(self, load: Load) -> Callable[[], None]:
        return lambda: self._look(load)

    def _reader(self, load: Load, need: Need) -> Callable[[], None]:
        epoch = self._desk.epoch
        return lambda: self._fetch(load, need, epoch)

    def _look(self, load: Load) -> None:
        """Is it in the cache? Else it waits for room. Meanwhile it stays queued: who wants it now does not wait for this."""
        size, lease = self._size_of(load.key), None
        try:
            lease = self._store.take(self._job.space, load.name)
        except errors.CacheFault as error:
            self._job.tell(error, load.key)
        desk = self._desk
        with desk.lock:
            load.size = size
            if load.state is not State.QUEUED:
                return
            if lease is not None:
                self._steps.found_locked(load, lease)
            elif size is not None and size > desk.limit:
                desk.set(load, State.PAST)
            else:
                assert load.mark is not None
                desk.missing.append(load.mark)
                desk.work.notify()
        if lease is None and size is not None and size > desk.limit:
            self._keeper.say_too_large(load.key, size)

    def _size_of(self, key: str) -> int | None:
        if self._job.size_of is None:
            return None
        try:
            return self._job.size_of(key)
        except Exception as error:  # noqa: BLE001  # the source's own: its read will tell
            log.debug("the size of %s is not known: %s", key, error)
            return None

    def _fetch(self, load: Load, need: Need, epoch: int) -> None:
        """Read an item for which there is room."""
        hold: KeyHold | None = None
        size: int | None = None
        name, space = load.name, self._job.space
        try:
            hold = self._store.try_hold(space, name)
            if hold is None:
                self._leave_to_others(load)
                return
            # P1 looks: absent / P2 reads, keeps, lets go of the key / P1 holds the key: we are here.
            lease = self._store.take(space, name)
            if lease is not None:
                self._steps.found(load, lease)
                return
            if load.busy_since is not None and (error := self._store.failure(space, name, load.busy_since)) is not None:
                self._steps.fail(load, error)
                return
            data = self._steps.read(load)
            size = len(data)
            self._steps.bring(load, data, hold, need, epoch)
            hold = None
        except errors.CacheFault as fault:
            self._steps.past(load)
            self._job.tell(fault, load.key)
        except BaseException as error:  # noqa: BLE001  # SystemExit of a source too: this thread goes on; who wants the item raises it
            self._steps.fail(load, error)
        finally:
            if size is None:
                with self._desk.lock:
                    self._desk.settle_room(need, epoch, None)
                    self._desk.work.notify()
            if hold is not None:
                hold.release()

    # -- what others are at ----------------------------------------------------------------------------------------

    def _leave_to_others(self, load: Load) -> None:
        """Another process has the key: this thread does something else meanwhile."""
        with self._desk.lock:
            assert load.mark is not None
            load.busy_since = load.busy_since or time.monotonic_ns()
            self._desk.set(load, State.QUEUED)
            self._desk.elsewhere.append(load.mark)
            self._desk.work.notify()

    def _watch(self) -> None:
        """Look after what other processes are at: one thread does this for all, while there is nothing else to do."""
        desk = self._desk
        with desk.lock:
            loads = [load for mark in desk.elsewhere if (load := mark()) is not None and load.state is State.QUEUED]
        with contextlib.suppress(errors.CacheFault):
            if loads:
                self._store.wait_turn(self._job.space, loads[0].name, TURN)
            for load in loads:
                self._look_again(load)
        with desk.lock:
            desk.watched = False
            desk.elsewhere = [m for m in desk.elsewhere if (load := m()) is not None and load.state is State.QUEUED and load.busy_since]
            desk.work.notify()

    def _look_again(self, load: Load) -> None:
        name, desk = load.name, self._desk
        lease = self._store.take(self._job.space, name)
        hold = self._store.try_hold(self._job.space, name) if lease is None else None
        with desk.lock:
            if load.state is not State.QUEUED:
                pass
            elif lease is not None:
                self._steps.found_locked(load, lease)
            elif hold is not None and load.mark is not None and load.mark in desk.elsewhere:
                desk.elsewhere.remove(load.mark)  # it ended without an entry: the read that comes looks why
                desk.queue_again(load)
        if hold is not None:
            hold.release()
