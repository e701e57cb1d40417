"""Finds what is in the cache already, and gets the rest ready to be read, many at a time: workers then ask the engine for nothing."""

from __future__ import annotations

import time

from forebay import errors
from forebay._engine.locks.fill import KeyHold
from forebay._engine.locks.leases import Lease
from forebay._engine.write.reservations import Need
from forebay.prefetch.load_queue import LoadQueue, PrefetchConfig
from forebay.prefetch.loads import Load, Prepared, State

AT_ONCE = 64
STALE = 1.0
"""Seconds after which what no worker came to is let go: others may want it, while all of ours wait for a source that stalls."""


class Scheduler:
    """Of one prefetcher; its calls are made in the keeper's thread."""

    def __init__(self, job: PrefetchConfig, desk: LoadQueue) -> None:
        self._job, self._store, self._desk = job, job.store, desk
        self._refused: tuple[str, int] | None = None
        self._hits: list[int] = []  # their sizes, to be counted once the lock is free

    def look(self) -> tuple[str, int] | None:
        """Look for those that nobody looked for, and get ready as many as there is room for. Gives key and size of one that is larger than
        all the room there may be."""
        desk = self._desk
        loads: list[Load] = []
        started: dict[Load, Need] = {}
        with desk.lock:
            wanted = desk.wanted()
            again, desk.look_elsewhere = (list(desk.elsewhere) if desk.look_elsewhere else []), False
            for mark in again:
                load = mark()
                if load is not None and load.state is State.QUEUED:
                    loads.append(load)
            fresh = len(loads)
            while len(started) < wanted and (load := desk.next_queued(desk.missing)) is not None:
                loads.append(load)
                if not self._start(load, started):
                    assert load.mark is not None
                    desk.missing.appendleft(load.mark)
                    loads.pop()
                    break
            while len(loads) < AT_ONCE and (load := desk.next_queued(desk.asked)) is not None:
                loads.append(load)
            for load in loads[:fresh] + [one for one in loads[fresh:] if one not in started]:
                if desk.missing or len(started) >= wanted or not self._start(load, started):
                    break
        if loads:
            self._sort(loads, started)
        refused, self._refused = self._refused, None
        return refused

    def _start(self, load: Load, started: dict[Load, Need]) -> bool:
        need = self._desk.start(load)
        if need is not None:
            started[load] = need
        return need is not None

    def _sort(self, loads: list[Load], started: dict[Load, Need]) -> None:
        """Each goes where it belongs: it is kept, or ready, or another process is at it, or it waits for room."""
        desk, epoch, now = self._desk, self._desk.epoch, time.monotonic()
        holds: dict[Load, KeyHold] = {}
        found: dict[str, Lease] = {}
        failed: dict[Load, Exception] = {}
        try:
            for load in started:
                hold = self._store.locks.try_hold(self._job.space, load.name)
                if hold is not None:
                    holds[load] = hold
            # P1 looks: absent / P2 reads, keeps, lets go of the key / P1 holds the key: so it is looked for only now.
            found = self._store.take_many(self._job.space, [load.name for load in loads])
            for load in holds:
                if load.busy_since is not None and load.name not in found:
                    error = self._store.locks.failure(self._job.space, load.name, load.busy_since)
                    if error is not None:
                        failed[load] = error
        except errors.CacheFault as error:
            self._job.tell(error, loads[0].key)
            with desk.lock:
                for load in loads:
                    if load.state is State.QUEUED:
                        desk.set(load, State.PAST)
        finally:
            with desk.lock:
                for load in loads:
                    self._place(load, found.get(load.name), started.get(load), holds, failed, epoch, now)
                desk.work.notify(len(desk.ready))
            for hold in holds.values():
                hold.release()
            for size in self._hits:
                self._store.count_hit(size)
            self._hits.clear()

    def _place(
        self, load: Load, lease: Lease | None, need: Need | None, holds: dict[Load, KeyHold], failed: dict[Load, Exception], epoch: int,
        now: float,
    ) -> None:  # fmt: skip
        """Caller: holds the lock, and lets go of what stays in ``holds``."""
        desk, mark = self._desk, load.mark
        assert mark is not None
        if mark in desk.elsewhere:
            desk.elsewhere.remove(mark)
        if load.state is State.QUEUED and lease is None and load not in failed and need is not None and load in holds:
            load.prepared = Prepared(mark, holds.pop(load), need, epoch, now)
            desk.ready.append(load.prepared)
            return
        if need is not None and epoch == desk.epoch:
            desk.room = desk.room.plus(need)
        if load.state is not State.QUEUED:
            return
        if lease is not None:
            desk.kept(load, lease)
            self._hits.append(lease.entry.size)
        elif load in failed:
            desk.set(load, State.FAILED, error=failed[load])
        elif need is not None or load.busy_since is not None:
            load.busy_since = load.busy_since or time.monotonic_ns()
            desk.elsewhere.append(mark)
        elif load.size is not None and load.size > desk.limit:
            desk.set(load, State.PAST)
            self._refused = self._refused or (load.key, load.size)
        else:
            desk.missing.append(mark)

    def let_go(self) -> None:
        """Let go of keys that are held for loads that nobody wants, or that no worker comes to."""
        desk = self._desk
        with desk.lock:
            gone, desk.discarded = desk.discarded, []
            if desk.ready and time.monotonic() - desk.ready[0].since > STALE:
                desk.jammed = True
                for one in reversed([one for one in desk.ready if not one.taken]):
                    one.taken = True
                    gone.append(one)
                    load = one.mark()
                    if load is not None and load.prepared is one:
                        load.prepared = None
                        desk.missing.appendleft(one.mark)
                desk.ready.clear()
            for one in gone:
                if one.epoch == desk.epoch:
                    desk.room = desk.room.plus(one.need)
        for one in gone:
            one.hold.release()
