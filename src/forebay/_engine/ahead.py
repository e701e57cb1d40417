"""The doors for who loads ahead of those who read: spaces, single steps of single-flight, promised room, sessions."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from forebay import errors
from forebay._config import format_size
from forebay._engine.catalog import spaces
from forebay._engine.engine import Engine, mending
from forebay._engine.files.faults import faults
from forebay._engine.index import counters
from forebay._engine.locks.fill import KeyHold
from forebay._engine.locks.leases import Lease
from forebay._engine.space.eviction import Doomed
from forebay._engine.space.room import SpaceRequest
from forebay._engine.space.settings import keep
from forebay._engine.write.insert import Label
from forebay._engine.write.publish import SMALL
from forebay._engine.write.reservations import Credit, Item
from forebay._logs import logger
from forebay._model import Buffer, Entry, Policy

log = logger("forebay.store")


Limits = tuple[str | None, int | None, int | None]
"""Policy, quota in bytes, and number of entries of a space; None leaves what it was set to."""
_NOTHING_UNSET: Limits = (None, None, None)


class Ahead(Engine):
    """The part of `Store` that a prefetcher needs beside the rest."""

    def space(
        self, name: str, *, kind: str = "values", policy: str | None = None, quota: int | None = None, max_count: int | None = None
    ) -> spaces.SpaceRow:  # fmt: skip
        """The space of this name, made if there is none; an explicit policy, quota or count is set for everybody."""
        known = self._spaces.get(name)
        if known is not None and policy is None and quota is None and max_count is None and name not in self._unset_spaces:
            return known
        unset = self._unset_spaces.get(name, _NOTHING_UNSET)
        policy = unset[0] if policy is None else policy
        quota, max_count = unset[1] if quota is None else quota, unset[2] if max_count is None else max_count
        found = self._make_space(name, kind, policy, quota, max_count)
        self._unset_spaces.pop(name, None)
        return found

    def open_space(self, name: str, policy: str | None = None, quota: int | None = None, max_count: int | None = None) -> None:
        """`space`, for who may read at once and write later: where the catalog is busy, or cannot be written to for another reason, the
        next call that writes to the space makes it."""
        try:
            self.space(name, policy=policy, quota=quota, max_count=max_count)
        except errors.CacheFault as error:
            self._unset_spaces[name] = policy, quota, max_count
            log.warning("the space %s is not set up yet, and will be by a later call: %s", name, str(error))

    @mending
    def known_space(self, name: str) -> spaces.SpaceRow:
        """The space of this name, to be read from: with the id 0, which no entry has, where there is none."""
        known = self._spaces.get(name)
        if known is None:
            found = spaces.find(self._catalog, name)
            if found is None:
                return spaces.SpaceRow(0, name, "values", "lru", None)
            known = self._spaces[name] = found
        return known

    @mending
    def _make_space(self, name: str, kind: str, policy: str | None, quota: int | None, max_count: int | None) -> spaces.SpaceRow:
        found = spaces.find(self._catalog, name)
        if self.root.read_only:
            return found or spaces.SpaceRow(0, name, kind, "lru", None)
        parsed = str(Policy.parse(policy)) if policy else None
        wanted = {"policy": parsed, "quota": quota, "max_count": max_count}
        changed = found is None or any(value is not None and value != getattr(found, what) for what, value in wanted.items())
        if changed:
            with self._catalog.write() as txn:
                spaces.insert(txn, name, kind, parsed or "lru", quota)
                spaces.change(txn, name, parsed, quota, max_count)
                txn.then = lambda: keep(self.root, self._catalog)
                found = spaces.find(txn, name)
        assert found is not None
        self._spaces[name] = found
        if (quota is not None or max_count is not None) and (changed or found.is_over()):
            self._shrink(found)
        return found

    def _shrink(self, space: spaces.SpaceRow) -> None:
        """Apply a lower limit to what is there, as far as nobody holds it: make room for nothing."""
        before, there = spaces.live(self._catalog, space.name)
        try:
            self._budget.cancel(self._budget.reserve(SpaceRequest(space.id, "", 0, 0, entries=0)).id)
        except (errors.NoSpace, errors.WriterBusy) as error:
            log.info("the space %s stays above its limit for now: %s", space.name, str(error))
        after, left = spaces.live(self._catalog, space.name)
        if there > left:
            gone = format_size(max(before - after, 0))
            log.warning(
                "%s: %d entries of the space %s were evicted for its lower limit, %s", self.root.path, there - left, space.name, gone
            )

    # -- single steps of `Fill.single`, for who does several keys at once --------------------------------------------

    @mending
    def take(self, space: str, key: str) -> Lease | None:
        """A lease on the bytes of a key, those of a small value too, touched; None where there is none."""
        lease = self._reading.take(self.known_space(space).id, key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    @mending
    def take_many(self, space: str, keys: Sequence[str]) -> dict[str, Lease]:
        """`take` of several keys: those that have something."""
        with faults("several keys"):
            found = self._leases.take_many(self.known_space(space).id, keys)
        for lease in found.values():
            self.touch(lease.entry)
        return found

    def bytes_leased(self, lease: Lease) -> memoryview | None:
        """The bytes of what is leased, checked before their first use here; None where they are damaged or gone."""
        return self._reading.bytes_leased(lease)

    def try_hold(self, space: str, key: str) -> KeyHold | None:
        """The key's lock if it is free."""
        self.check_usable(writing=True)
        with faults(key):
            return self._fill.try_hold(self.space(space).id, key)

    def wait_turn(self, space: str, key: str, seconds: float) -> None:
        """Sleep until a key's lock may have been let go, at most ``seconds``."""
        self._fill.sleep(self.space(space).id, key, seconds)

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Around what makes a value while its key is held: in there no other key is waited for."""
        return self._fill.working()

    @mending
    def failure(self, space: str, key: str, since: int) -> Exception | None:
        """What the work on a key failed with after ``since`` (nanoseconds of the monotonic clock), in any process."""
        return self._fill.failure(self.space(space).id, key, since)

    def note_failure(self, space: str, key: str, error: Exception) -> None:
        """Let those who wait for this key know."""
        self._fill.note_failure(self.space(space).id, key, error)

    # -- room, and what is made of it --------------------------------------------------------------------------------

    @mending
    def credit(self, space: str) -> Credit:
        """Room in a space, promised ahead: for one loader."""
        self.check_usable(writing=True)
        place = self.space(space)
        return Credit(self._catalog, self._budget, self._publisher, self._leases, self._intent, place)

    def spill(self, space: str, key: str, data: Buffer) -> Lease:
        """Keep bytes as long as somebody holds them: the lease that this gives, or a copy of it after a fork. Raises `CacheFault`."""
        credit = self.credit(space)
        credit.ask(credit.need(len(data)))
        try:
            if len(data) > SMALL:
                return credit.keep_large(Item(key, data), life="held")
            return credit.keep([Item(key, data)], life="held")[0]
        except BaseException:
            with contextlib.suppress(errors.CacheFault):
                credit.give_back(credit.promised)
            raise

    def drop(self, wanted: Sequence[Entry]) -> int:
        """Remove entries that nobody holds any more; gives how many went."""
        with faults("what nobody holds"):
            return len(self._eviction.remove([(e.id, e.slot, Doomed(e.id, e.kind, e.suffix)) for e in wanted]))

    @mending
    def join(self, space: str, key: str) -> Lease:
        """Be of a session: it begins with the first who joins, and ends when the last lease on it is gone, by whatever death. Entries that
        name it are then removed by whoever writes next."""
        self.check_usable(writing=True)
        place = self.space(space)
        lease = self._leases.take(place.id, key)
        if lease is not None:
            return lease
        with self._fill.holding(place.id, key):
            # P1 and P2 find none / P1 holds the key, begins one, lets go / P2 holds the key: we are here.
            return self._leases.take(place.id, key) or self._begin_session(Label(place.id, place.name, key, life="held"))

    def _begin_session(self, label: Label) -> Lease:
        held: list[int] = []
        try:
            with faults(label.key), self._catalog.write() as txn:
                id = txn.new_id()
                if self._leases.hold(id):
                    held.append(id)
                entry = self._publisher.insert(txn, label, id, "session", 0, b"", None)
                txn.leftovers = True
        except BaseException:
            for id in held:
                self._leases.let_go_soon(id)
            raise
        return self._leases.adopt(entry)

    def usage_of(self, space: str) -> tuple[int, int]:
        """Bytes and number of the entries that a space serves now."""
        return spaces.live(self._catalog, space)

    def limits_of(self, space: str) -> tuple[int, str]:
        """Bytes that one entry of a space can have at most, and the policy of the space."""
        place = self.space(space)
        budget = spaces.totals(self._catalog).budget
        return min(budget, budget if place.quota is None else place.quota), place.policy

    def count_stored(self, leases: Sequence[Lease]) -> None:
        self.counters.add(counters.BYTES_STORED, sum(lease.entry.size for lease in leases))
