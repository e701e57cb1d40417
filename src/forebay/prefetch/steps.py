"""The steps by which a load comes to its end, whoever takes them: a worker, or somebody who cannot wait."""

from __future__ import annotations

from forebay import errors
from forebay._engine.locks.fill import KeyHold
from forebay._engine.locks.leases import Lease
from forebay._engine.write.reservations import Need, validator_of
from forebay._logs import logger
from forebay._model import Buffer
from forebay.prefetch.load_queue import PrefetchConfig
from forebay.prefetch.loads import Load, LoadedItem, LoadRef, State
from forebay.prefetch.writer import ItemWriter

log = logger("forebay.prefetch")

PATIENCE = 0.25
"""Seconds that one who reads for himself, faster than the disk takes it, waits for the keeper, before his item is not kept."""


class Steps:
    """Of one prefetcher. Callable from any thread."""

    def __init__(self, job: PrefetchConfig, keeper: ItemWriter) -> None:
        self._job, self._store, self._keeper, self._desk = job, job.store, keeper, keeper.desk

    def read(self, mark: LoadRef) -> Buffer:
        """The source, asked under the key's lock. What it raises is noted for those who wait for the same in other processes."""
        try:
            with self._store.locks.working():
                return self._job.make(mark.key)
        except errors.CacheFault:
            raise
        except Exception as error:
            self._store.locks.note_failure(self._job.space, mark.name, error)
            raise

    def link(self, mark: LoadRef) -> Lease | Buffer | None:
        """The item as a second name of what the cache has already, or its bytes where there is no room for two names. None: the cache has
        it not; so it is to be read. Caller: holds the key."""
        source = self._leased(mark.key)
        if source is None:
            return None
        session = self._job.session.entry.id if self._job.session is not None and mark.bound else 0
        life = "cached" if self._job.keep else "held"
        with source:
            try:
                return self._store.link(self._job.space, mark.name, source, life=life, validator=validator_of(session))
            except errors.NoSpace:
                data = self._store.bytes_leased(source)
                return None if data is None else bytes(data)
            except errors.CacheFault as error:
                log.debug("%s is not linked, but read: %s", mark.key, str(error))
                return None

    def _leased(self, key: str) -> Lease | None:
        try:
            found = self._job.lease(key) if self._job.lease is not None else None
        except Exception as error:  # noqa: BLE001  # the source's own: its read will tell
            log.debug("whether the cache has %s is not known: %s", key, str(error))
            return None
        return found if isinstance(found, Lease) else None

    def linked(self, mark: LoadRef, lease: Lease) -> None:
        """Whoever still wants it has it; else it goes, as what was read in vain."""
        self._store.count_hit(lease.entry.size)
        with self._desk.lock:
            load = mark()
            if load is not None and load.state is State.RUNNING:
                self._desk.kept(load, lease)
                return
            del load
        lease.close()
        if not self._job.keep:
            self._store.drop([lease.entry])

    def bring(self, mark: LoadRef, data: Buffer, hold: KeyHold, given: Need, epoch: int) -> None:
        """It was read: from now on it is served from memory, and the keeper keeps it. He lets go of the key, in any event."""
        desk = self._desk
        brought = LoadedItem(mark, data, desk.need_of(len(data)), hold.release)
        with desk.lock:
            if epoch < 0:
                desk.reading += 1  # not a worker's: it had no room
                desk.wait_for_keeper(PATIENCE)
            if desk.settle_room(given, epoch, len(data)):
                brought.promised, brought.epoch = brought.needs, desk.epoch
            too_large = len(data) > desk.limit
            over = epoch < 0 and desk.closing  # the keeper may be gone
            load = mark()
            if load is not None:
                past = (too_large or over) and not load.waiting
                desk.set(load, State.PAST) if past else desk.set(load, State.READ, data=data)
            if not (too_large or over) and (epoch >= 0 or len(desk.brought) < 2 * self._job.workers):
                desk.brought.append(brought)
                desk.news.put(None)
                return
            if brought.is_promised(desk.epoch):  # it is not kept now: its room is for others
                desk.room = desk.room.plus(brought.promised)
                desk.news.put(None)
        if too_large:
            self._keeper.say_too_large(mark.key, len(data))
        elif not over and load is not None:
            with desk.lock:
                desk.queue_again(load)
        hold.release()

    def found(self, load: Load, lease: Lease) -> None:
        with self._desk.lock:
            self._desk.kept(load, lease)
        self._store.count_hit(lease.entry.size)

    def past(self, mark: LoadRef) -> None:
        with self._desk.lock:
            load = mark()
            if load is not None and load.state is State.RUNNING:
                self._desk.set(load, State.PAST)

    def fail(self, mark: LoadRef, error: BaseException) -> None:
        with self._desk.lock:
            load = mark()
            if load is not None:
                self._desk.set(load, State.FAILED, error=error)
