"""The thread of a prefetcher that does all that concerns the engine: it looks items up, asks for room, and stores what was read.

It does so for many items at a time: workers then ask the engine for nothing, and room is there before it is needed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

from forebay import errors
from forebay._engine.files.faults import CatalogBroken
from forebay._engine.locks.lease import Lease
from forebay._engine.write.publish import INLINE, SMALL
from forebay._engine.write.reservations import NOTHING, Item, Need, SpaceReservation
from forebay._logs import logger
from forebay._model import Policy
from forebay.prefetch.load_queue import MOMENT, LoadQueue
from forebay.prefetch.loads import LoadedItem, Lookup, PrefetchConfig

log = logger("forebay.prefetch")


class Scheduler:
    """Finds what is in the cache already, and schedules the rest. Called in the writer's thread only."""

    def __init__(self, config: PrefetchConfig, queue: LoadQueue) -> None:
        self._config, self._store, self._queue = config, config.store, queue

    def look_up(self) -> tuple[str, int] | None:
        """Look up new loads, and schedule as many as there is room for. Returns key and size of one that is too large."""
        lookup = self._queue.candidates()
        fault: errors.CacheFault | None = None
        if not lookup.loads:
            return None
        try:
            self._ask_engine(lookup)
        except errors.CacheFault as error:
            fault = error
            self._config.report_fault(error, lookup.loads[0].key)
        finally:
            self._queue.settle(lookup, fault)
            for hold in lookup.holds.values():
                hold.release()
            for size in lookup.hits:
                self._store.count_hit(size)
            for lease in lookup.unheld:
                lease.close()
        return lookup.too_large

    def _ask_engine(self, lookup: Lookup) -> None:
        space = self._config.space
        for load in lookup.needs:
            hold = self._store.locks.try_hold(space, load.name)
            if hold is not None:
                lookup.holds[load] = hold
        # P1 looks: absent / P2 reads, stores, releases the key / P1 holds the key: so it is looked for only now.
        lookup.leases = self._store.take_many(space, [load.name for load in lookup.loads])
        for load in lookup.holds:
            if load.busy_since is not None and load.name not in lookup.leases:
                error = self._store.locks.failure(space, load.name, load.busy_since)
                if error is not None:
                    lookup.failed[load] = error

    def release_discarded(self) -> None:
        """Release the keys of loads that no caller needs, or that no worker comes to."""
        for scheduled in self._queue.discarded():
            scheduled.hold.release()


class ItemWriter:
    """Stores the items of one prefetcher; `run`, or `turn` again and again, in one thread."""

    def __init__(self, config: PrefetchConfig) -> None:
        self._config, self._store = config, config.store
        self._reservation: SpaceReservation = config.store.reservations.open(config.space)
        used, entries = self._store.spaces.usage(config.space)
        limit = self._store.spaces.largest(config.space)
        self._waits = self._store.spaces.limits(config.space).policy == Policy.WAIT
        self._is_most_of_the_cache = 2 * limit > self._store.seeing.usage().budget
        self.queue = LoadQueue(config, self._reservation.need, limit, -(-used // entries) if entries else 0)
        self._scheduler = Scheduler(config, self.queue)
        self._session = config.session.entry.id if config.session is not None else 0
        self._life = "cached" if config.keep else "held"
        self._too_large_reported = False
        self._released, self._ask_at = 0, 0.0

    def run(self) -> None:
        """Work until the prefetcher is closed and all that was read is stored."""
        while not self.turn():
            pass

    def turn(self, *, waits: bool = True) -> bool:
        """Wait for news, unless ``waits`` is false; then look up what is new, store what was read and ask for the room that is lacking.
        Returns whether the prefetcher is closed and all that was read is stored."""
        try:
            return self._turn(waits)
        except Exception as error:  # noqa: BLE001  # whatever it is: without this thread no item would be stored any more
            self._recover(errors.CacheFault(f"keeping items of {self._config.space} failed: {type(error).__name__}: {error}"))
            return False

    def _turn(self, waits: bool) -> bool:
        queue = self.queue
        gone = queue.wait_for_news(bool(self._ask_at), waits=waits)
        idle_room = queue.take_room(if_idle=True) if not gone else NOTHING
        self._released += sum(ref.lease is not None for ref in gone)
        unwanted = queue.forget(gone)
        self._scheduler.release_discarded()
        if not queue.closing:
            self._look_up()
        batch, is_over = queue.next_batch()
        if queue.closing:
            self._scheduler.release_discarded()
        try:
            self._reservation.give_back(idle_room)
            if unwanted:
                self._store.drop(unwanted)
            if batch:
                self._store_batch(batch)
            self._retry_stalled()
            lacking = queue.lacking_soon()
            if lacking == NOTHING:
                self._ask_at = 0.0
            elif self._is_worth_asking():
                self._ask(lacking)
            if (lacking != NOTHING or batch) and not queue.closing:
                self._look_up()  # room came, with what was stored too: no news tells of it
            if is_over:
                queue.drop_items(queue.stalled())
                self._reservation.give_back(queue.take_room())
        except errors.CacheFault as error:
            self._recover(error)
        return is_over

    def _look_up(self) -> None:
        too_large = self._scheduler.look_up()
        if too_large is not None:
            self.report_too_large(*too_large)

    # -- storing ---------------------------------------------------------------------------------------------------

    def _store_batch(self, batch: Sequence[LoadedItem]) -> None:
        ready: list[LoadedItem] = []
        try:
            for item in batch:
                if item.ref() is None and not self._config.keep:
                    self.queue.drop_items([item])
                elif self._reserve(item):
                    ready.append(item)
            large = [item for item in ready if item.size > SMALL and not isinstance(item.data, Lease)]
            together = [item for item in ready if item not in large]
            if together:
                self._settle(together, self._store_together(together))
            for item in large:
                self._settle([item], [self._reservation.keep_large(self._item(item), life=self._life)])
        except BaseException as error:
            self.queue.drop_items(batch, error)
            raise
        finally:
            for item in batch:
                item.hold.release()
            self.queue.end_batch()

    def _store_together(self, items: Sequence[LoadedItem]) -> list[Lease]:
        used = NOTHING
        for item in items:
            used = used.plus(item.needs)
        left = self._reservation.promised.minus(used)
        if self._is_most_of_the_cache:  # else all that it links would be charged twice, and half as much fit; their leases end behind it
            self._store.reservations.never_used([item.data.entry for item in items if isinstance(item.data, Lease)])
        leases = self._reservation.keep([self._item(item) for item in items], life=self._life, more=self.queue.ahead())
        more = self._reservation.promised.minus(left)
        if more != NOTHING:
            self.queue.add_room(more)
        return leases

    def _item(self, item: LoadedItem) -> Item:
        return Item(item.ref.name, item.data, self._session if item.ref.bound else 0)

    def _settle(self, items: Sequence[LoadedItem], leases: Sequence[Lease]) -> None:
        """The items are entries: their bytes leave the memory, and every caller that asked for one holds its lease."""
        written = [item.size for item in items if not isinstance(item.data, Lease)]
        unheld = self.queue.store(items, leases)
        self._store.count("fills", len(written))
        self._store.count("bytes_stored", sum(written))
        self._released += len(unheld)
        for lease in unheld:
            lease.close()
        if unheld and not self._config.keep:
            self._store.drop([lease.entry for lease in unheld])

    def _reserve(self, item: LoadedItem) -> bool:
        """Get the room that an item needs. False: it waits for room with its bytes, or is not stored."""
        if isinstance(item.data, Lease) and item.size <= INLINE and not self._copy(item):
            return False
        try:
            while (lacking := self.queue.claim_room(item)) != NOTHING:  # a worker may take what comes
                self._reservation.ask(lacking)
                self.queue.add_room(lacking)
            return True
        except errors.NoSpace as error:
            if error.hopeless:
                self.look_at_limit()
            if isinstance(item.data, Lease):  # which keeps the file of the object from making way
                return self._copy(item) and self._reserve(item)
            if not self._waits or item.size > self.queue.limit:
                self.queue.drop_items([item], error)
                if item.size > self.queue.limit:
                    self.report_too_large(item.ref.key, item.size)
                else:
                    self._config.report_fault(error, item.ref.key)
            elif item.ref() is not None:  # else no caller waits until there is room
                item.hold.release()  # what waits for room holds no key: another process may need it, and hold the room that we wait for
                self.queue.stall(item)
            return False

    def _copy(self, item: LoadedItem) -> bool:
        """Take the bytes of a leased file into memory. False: they are damaged, and the item is not stored."""
        assert isinstance(item.data, Lease)
        data = self._store.bytes_leased(item.data)
        if data is None:
            self.queue.drop_items([item])
            return False
        self.queue.copied(item, bytes(data))
        return True

    def _retry_stalled(self) -> None:
        """Go on with what waits for room, in order."""
        for item in self.queue.stalled():
            if not self._reserve(item):
                break
            hold = self._store.locks.try_hold(self._config.space, item.ref.name)
            try:
                lease = self._store.take(self._config.space, item.ref.name) if hold is not None else None
                if self.queue.resume(item, hold, lease):
                    self._store_batch([item])
            finally:
                if hold is not None:
                    hold.release()

    # -- room ------------------------------------------------------------------------------------------------------

    def _is_worth_asking(self) -> bool:
        """Where there was too little room, it is asked for again once some was released, or after a moment."""
        return self.queue.is_starving or self._released >= self.queue.step // 2 or time.monotonic() >= self._ask_at

    def _ask(self, lacking: Need) -> None:
        """Ask for the room of the next loads: of as many as there is room for."""
        self._released, self._ask_at = 0, 0.0
        try:
            try:
                self._reservation.ask(lacking)
            except errors.NoSpace:
                self._ask_at = time.monotonic() + MOMENT
                lacking = self._fitting(self._reservation.free())
                if lacking != NOTHING:
                    self._reservation.ask(lacking)
        except errors.NoSpace as error:
            if error.hopeless:
                self.look_at_limit()
            key, size = self.queue.no_room(error, waits=self._waits)
            if key is not None and size:
                self.report_too_large(key, size)
            elif key is not None:
                self._config.report_fault(error, key)
        else:
            self.queue.add_room(lacking)

    def _fitting(self, free: Need) -> Need:
        """What the next load lacks, or as many loads as ``free`` is enough for."""
        for times in range(self.queue.step, 1, -1):
            lacking = self.queue.lacking(times)
            if free.covers(lacking):
                return lacking
        return self.queue.lacking(1)

    def look_at_limit(self) -> None:
        """Read the limits of the space, which may have changed."""
        limit = self._store.spaces.largest(self._config.space)
        self._waits = self._store.spaces.limits(self._config.space).policy == Policy.WAIT
        self._is_most_of_the_cache = 2 * limit > self._store.seeing.usage().budget
        self.queue.set_limit(limit)

    def report_too_large(self, key: str, size: int) -> None:
        """Say once that an item is larger than the space may be: each `get` reads it from the source."""
        if not self._too_large_reported:
            self._too_large_reported = True
            log.warning(
                "%s has %s bytes, and the space %r may have %s in all: it bypasses the cache, like everything else that is too large",
                key, f"{size:,}", self._config.space, f"{self.queue.limit:,}",
            )  # fmt: skip

    # -- faults ----------------------------------------------------------------------------------------------------

    def _recover(self, fault: errors.CacheFault) -> None:
        """The cache cannot be used now: what is queued is read from the source, and what comes later is tried again."""
        key = self.queue.fault(fault)
        self._config.report_fault(fault, key or self._config.space)
        with contextlib.suppress(errors.CacheFault):
            self._reservation.give_back(self._reservation.promised)
        with contextlib.suppress(errors.CacheFault):
            if isinstance(fault, CatalogBroken):
                self._store.recover(fault)
            self._reservation = self._store.reservations.open(self._config.space)

    def after_fork_child(self) -> None:
        """What was promised is the parent's."""
        self._reservation.forget()
