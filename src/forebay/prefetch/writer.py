"""The thread that gives what was read its place on the disk, several items at a time, and asks for room before it is wanted."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Sequence

from forebay import errors
from forebay._engine.catalog import CatalogBroken
from forebay._engine.locks.leases import Lease
from forebay._engine.write.publish import SMALL
from forebay._engine.write.reservations import NOTHING, Item, Need, SpaceReservation
from forebay._logs import logger
from forebay._model import Entry, Policy
from forebay.prefetch.load_queue import LoadQueue, PrefetchConfig
from forebay.prefetch.loads import LoadedItem, LoadRef, State
from forebay.prefetch.scheduler import Scheduler

log = logger("forebay.prefetch")

TOGETHER = 16
GATHER = 0.001
"""Seconds that more may come in, while all workers have something to do: each wake of this thread takes the interpreter from them."""
IDLE = 0.2
"""Seconds without news after which promised room is given back."""
MOMENT = 0.005
LOOK_AGAIN = 0.1
"""Seconds until room is asked for again where another process may have let some go."""


class ItemWriter:
    """Of one prefetcher; `run` in one thread."""

    def __init__(self, job: PrefetchConfig) -> None:
        self._job, self._store = job, job.store
        self._credit: SpaceReservation = job.store.reservations.open(job.space)
        used, entries = self._store.spaces.usage(job.space)
        limit, policy = self._store.spaces.limits(job.space)
        self._waits = policy == Policy.WAIT
        self.desk = LoadQueue(job, self._credit.need, limit, -(-used // entries) if entries else 0)
        self._scout = Scheduler(job, self.desk)
        self._session = job.session.entry.id if job.session is not None else 0
        self._life = "cached" if job.keep else "held"
        self._said = False
        self._let_go, self._ask_at = 0, 0.0

    def run(self) -> None:
        """Until the prefetcher is closed, and all that was read is kept."""
        over = False
        while not over:
            try:
                over = self._turn()
            except Exception as error:  # noqa: BLE001  # whatever it is: without this thread nobody would get anything any more
                self._fault(errors.CacheFault(f"keeping items of {self._job.space} failed: {type(error).__name__}: {error}"))

    def _turn(self) -> bool:
        """Keep what came, and ask for what is wanted; whether that was the end."""
        desk = self.desk
        forgotten = self._forget(self._wait())
        self._scout.let_go()
        if not desk.closing:
            self._look()
        with desk.lock:
            batch = [desk.brought.popleft() for _ in range(min(TOGETHER, len(desk.brought)))]
            desk.keeping = len(batch)
            if batch:
                desk.spared.notify_all()
            over = desk.closing and not (batch or desk.reading)
            if desk.closing:
                desk.discard_ready()
        if desk.closing:
            self._scout.let_go()
        try:
            if forgotten:
                self._store.drop(forgotten)
            if batch:
                self._keep(batch)
            if desk.stalled:
                self._retry()
            with desk.lock:
                lacking = desk.lacking_soon()
            if lacking == NOTHING:
                self._ask_at = 0.0
            elif self._is_worth_asking():
                self._ask(lacking)
            if (lacking != NOTHING or batch) and not desk.closing:
                self._look()  # room came, with what was kept too: no news tells of it
            if over:
                self._give_back()
        except errors.CacheFault as error:
            self._fault(error)
        return over

    def _look(self) -> None:
        refused = self._scout.look()
        if refused is not None:
            self.say_too_large(*refused)

    # -- news ------------------------------------------------------------------------------------------------------

    def _wait(self) -> list[LoadRef]:
        """Sleep until something is to be done; gives the loads that are gone."""
        desk = self.desk
        with desk.lock:
            waiting, has_room = desk.stuck or bool(desk.stalled), desk.room != NOTHING
            busy = bool(desk.brought) or (desk.closing and not desk.reading)
            waiting = waiting or bool(desk.ready)
        gone: list[LoadRef] = []
        pause = IDLE if has_room else None
        if waiting or self._ask_at:
            pause = LOOK_AGAIN if waiting else MOMENT
        try:
            mark = desk.news.get(timeout=0 if busy else pause)
            if not busy and desk.is_supplied():
                time.sleep(GATHER)
            while True:
                if mark is not None:
                    gone.append(mark)
                    self._let_go += mark.lease is not None
                mark = desk.news.get_nowait()
        except queue.Empty:
            if has_room and not (busy or gone or waiting):
                self._give_back_if_idle()
        return gone

    def _forget(self, gone: list[LoadRef]) -> list[Entry]:
        """Loads are gone; gives the entries that nobody here wants any more. What waited for room for them waits no longer."""
        desk = self.desk
        with desk.lock:
            for mark in gone:
                if desk.marks.get(mark.key) is mark:
                    del desk.marks[mark.key]
            idle = [b for b in desk.stalled if (load := b.mark()) is None or load.state is not State.READ]
            if desk.closing:
                desk.work.notify_all()
            drops = [desk.drops.popleft() for _ in range(len(desk.drops))]
            if idle:
                desk.stalled = [b for b in desk.stalled if b not in idle]
                desk.work.notify_all()
        return drops if self._job.keep else drops + [mark.lease.entry for mark in gone if mark.lease is not None]

    # -- keeping ---------------------------------------------------------------------------------------------------

    def _keep(self, batch: Sequence[LoadedItem]) -> None:
        ready: list[LoadedItem] = []
        try:
            for one in batch:
                if one.mark() is None and not self._job.keep:
                    self._return(one)
                elif one.is_promised(self.desk.epoch) or self._promise(one):
                    ready.append(one)
            small = [one for one in ready if len(one.data) <= SMALL]
            leases = self._keep_small(small) if small else []
            self._settle(small, leases)
            for one in ready:
                if len(one.data) > SMALL:
                    self._settle([one], [self._credit.keep_large(self._item(one), life=self._life)])
        except BaseException:
            self._to_past(batch)
            raise
        finally:
            for one in batch:
                one.release()
            with self.desk.lock:
                self.desk.keeping = 0
                self.desk.work.notify_all()

    def _return(self, one: LoadedItem) -> None:
        with self.desk.lock:
            if one.is_promised(self.desk.epoch):
                self.desk.room = self.desk.room.plus(one.promised)
            one.promised = NOTHING

    def _keep_small(self, small: Sequence[LoadedItem]) -> list[Lease]:
        with self.desk.lock:
            ahead = self.desk.ahead()
        items = [self._item(one) for one in small]
        used = NOTHING
        for one in small:
            used = used.plus(one.needs)
        left = self._credit.promised.minus(used)
        leases = self._credit.keep(items, life=self._life, more=ahead)
        more = self._credit.promised.minus(left)
        with self.desk.lock:
            self.desk.room = self.desk.room.plus(more)
        return leases

    def _item(self, one: LoadedItem) -> Item:
        return Item(one.mark.name, one.data, self._session if one.mark.bound else 0)

    def _settle(self, kept: Sequence[LoadedItem], leases: Sequence[Lease]) -> None:
        """They are entries now: who holds one of them holds its lease, and its bytes leave the memory."""
        unheld: list[Lease] = []
        with self.desk.lock:
            for one, lease in zip(kept, leases, strict=True):
                load = one.mark()
                if load is not None and load.state is State.READ:
                    self.desk.kept(load, lease)
                else:
                    unheld.append(lease)
                one.promised = NOTHING
                del load
        self._store.count("fills", len(leases))
        self._store.count("bytes_stored", sum(lease.entry.size for lease in leases))
        self._let_go += len(unheld)
        for lease in unheld:
            lease.close()
        if unheld and not self._job.keep:
            self._store.drop([lease.entry for lease in unheld])

    def _to_past(self, batch: Sequence[LoadedItem]) -> None:
        """The cache failed: they are served from the source."""
        with self.desk.lock:
            for one in batch:
                load = one.mark()
                if load is not None and load.state is State.READ and not load.waiting:
                    self.desk.set(load, State.PAST)

    # -- room ------------------------------------------------------------------------------------------------------

    def _promise(self, one: LoadedItem) -> bool:
        """Room for something that was read without, since its size was not known. False: it waits with its bytes, or is not kept."""
        desk = self.desk
        with desk.lock:
            have = one.needs.least(desk.room)
            desk.room = desk.room.minus(have)
        try:
            lacking = one.needs.minus(have)
            if lacking != NOTHING:
                self._credit.ask(lacking)
        except errors.CacheFault as error:
            with desk.lock:
                desk.room = desk.room.plus(have)
            if not isinstance(error, errors.NoSpace):
                raise
            if self._waits and not self._is_too_large(len(one.data), error):
                if one.mark() is not None:  # else nobody waits until there is room
                    self._stall(one)
            else:
                self._refuse(one, error)
            return False
        one.promised, one.epoch = one.needs, desk.epoch
        return True

    def _stall(self, one: LoadedItem) -> None:
        one.release()  # who waits for room holds no key: another process may want the item now, and hold what we wait for
        with self.desk.lock:
            if one not in self.desk.stalled:
                self.desk.stalled.append(one)

    def _refuse(self, one: LoadedItem, error: errors.NoSpace) -> None:
        self._to_past([one])
        if len(one.data) > self.desk.limit:
            self.say_too_large(one.mark.key, len(one.data))
        else:
            self._job.tell(error, one.mark.key)

    def _retry(self) -> None:
        """Those that wait with their bytes, in order."""
        desk = self.desk
        for one in list(desk.stalled):
            if not self._promise(one):
                break
            with desk.lock:
                desk.stalled.remove(one)
            hold = self._store.locks.try_hold(self._job.space, one.mark.name)
            lease = self._store.take(self._job.space, one.mark.name) if hold is not None else None
            if hold is not None and lease is None:
                one.release = hold.release
                self._keep([one])
                continue
            self._return(one)
            with desk.lock:
                load = one.mark()
                if load is not None and load.state is State.READ:
                    desk.kept(load, lease) if lease is not None else desk.queue_again(load)
                del load
            if hold is not None:
                hold.release()
        with desk.lock:
            desk.work.notify_all()

    def _is_worth_asking(self) -> bool:
        """Where there was room for some only, it is not asked for again before some more were let go, or a moment went by."""
        desk = self.desk
        stands = not (desk.reading or desk.ready)
        return stands or self._let_go >= desk.at_once() // 2 or time.monotonic() >= self._ask_at

    def _ask(self, lacking: Need) -> None:
        """Room for those that come next: for as many of them as can be."""
        desk = self.desk
        self._let_go, self._ask_at = 0, 0.0
        try:
            try:
                self._credit.ask(lacking)
            except errors.NoSpace:
                self._ask_at = time.monotonic() + MOMENT
                free = self._credit.free()
                with desk.lock:
                    lacking = self._fitting(free)
                if lacking != NOTHING:
                    self._credit.ask(lacking)
        except errors.NoSpace as error:
            self._no_room(error)
            return
        with desk.lock:
            desk.room, desk.stuck = desk.room.plus(lacking), False
            desk.work.notify_all()

    def _fitting(self, free: Need) -> Need:
        """What lacks for the next one, or for as many as ``free`` is enough for. Caller: holds the lock."""
        for times in range(self.desk.at_once(), 1, -1):
            lacking = self.desk.lacking(times)
            if free.covers(lacking):
                return lacking
        return self.desk.lacking(1)

    def _no_room(self, error: errors.NoSpace) -> None:
        desk = self.desk
        with desk.lock:
            queued = [load for mark in desk.missing if (load := mark()) is not None and load.state is State.QUEUED]
            size = desk.need(queued[0]).size if queued else 0
        too_large = self._is_too_large(size, error)
        with desk.lock:
            desk.stuck = self._waits and not too_large
            past = [] if desk.stuck else queued[:1] if too_large else queued
            for load in past:
                if load.state is State.QUEUED:
                    desk.set(load, State.PAST)
        if past and too_large:
            self.say_too_large(past[0].key, size)
        elif past:
            self._job.tell(error, past[0].key)

    def _is_too_large(self, size: int, error: errors.NoSpace) -> bool:
        """Whether one item of ``size`` can never be kept; that several together cannot says nothing. The limit may have changed."""
        if error.hopeless:
            self.look_at_limit()
        return size > self.desk.limit

    def look_at_limit(self) -> None:
        limit, policy = self._store.spaces.limits(self._job.space)
        with self.desk.lock:
            self.desk.limit, self._waits = limit, policy == Policy.WAIT
            self.desk.largest = min(self.desk.largest, limit)

    def say_too_large(self, key: str, size: int) -> None:
        """Once: what is larger than all the room there may be is read from the source whenever it is wanted."""
        if not self._said:
            self._said = True
            log.warning(
                "%s has %s bytes, and the space %r may have %s in all: it is read past the cache, and so is whatever else is too large",
                key, f"{size:,}", self._job.space, f"{self.desk.limit:,}",
            )  # fmt: skip

    def _give_back_if_idle(self) -> None:
        with self.desk.lock:
            desk = self.desk
            idle = not (desk.reading or desk.missing or desk.asked or desk.unsized or desk.ready)
        if idle:
            try:
                self._give_back()
            except errors.CacheFault as error:
                self._fault(error)

    def _give_back(self) -> None:
        with self.desk.lock:
            room, self.desk.room = self.desk.room, NOTHING
        self._credit.give_back(room)

    # -- faults ----------------------------------------------------------------------------------------------------

    def _fault(self, error: errors.CacheFault) -> None:
        """The cache cannot be used now: what is queued is served from the source, and the next ones are tried again."""
        desk = self.desk
        with desk.lock:
            loads = [load for mark in desk.missing if (load := mark()) is not None and load.state is State.QUEUED]
            for load in loads:
                desk.set(load, State.PAST)
            desk.room, desk.epoch, desk.stuck = NOTHING, desk.epoch + 1, False
            desk.work.notify_all()
        self._job.tell(error, loads[0].key if loads else self._job.space)
        with contextlib.suppress(errors.CacheFault):
            self._credit.give_back(self._credit.promised)
        with contextlib.suppress(errors.CacheFault):
            if isinstance(error, CatalogBroken):
                self._store.recover(error)
            self._credit = self._store.reservations.open(self._job.space)

    def after_fork_child(self) -> None:
        """What was promised is the parent's."""
        self._credit.forget()
