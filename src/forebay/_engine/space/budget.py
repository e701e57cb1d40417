"""Room: reserve it, make it by evicting, give it back. Never more than the budget, for all processes together.

Used = published + reserved + doomed + superseded + what the catalog occupies above its allowance.

Where something has to be evicted, reserving takes two transactions: the first enters the reservation as pending, so that other
processes count it, and dooms the victims; their files are unlinked outside the writer lock; the second deletes their rows and grants.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from forebay import errors
from forebay._engine.catalog import Catalog, DiskFull, Rows, Txn, entries, reservations, spaces
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.files import blobs, pack_files, stages, trees
from forebay._engine.files.root import Root
from forebay._engine.index.counters import EVICTIONS, Counters
from forebay._engine.index.memo import Memo
from forebay._engine.locks.owners import Owners
from forebay._engine.space.eviction import SPACE_WORD, Eviction, EvictionVictim
from forebay._engine.space.ranking import EvictionCandidate, Ranking, Scope
from forebay._engine.space.segment_tails import SegmentTails
from forebay._kernel import host, locks, waits
from forebay._logs import logger
from forebay._model import Policy

ROW = 256
"""What a small value costs beside its bytes."""
RECENT, MANY = 0.1, 64
NO_LIMIT = 1 << 62


class SpaceRequest(NamedTuple):
    """What a write asks room for. ``size`` in bytes; ``replaces``: the id that will be superseded, no victim, its ``replaced`` bytes
    do not count against the quota. ``charged``: what the budget counts, where it is not what one file of ``size`` bytes costs;
    ``entries``: how many will be made of it."""

    space: int
    key: str
    keyhash: int
    size: int
    suffix: str = ""
    replaces: int = 0
    replaced: int = 0
    inline: bool = False
    charged: int = 0
    entries: int = 1


class SpaceDeficit(NamedTuple):
    """What is lacking. ``quota`` and ``bytes`` in bytes, ``here`` (of the space) and ``rows`` in entries: positive where something
    has to go.
    ``leaving``: bytes that are on their way out already. ``disk``: bytes below ``min_free``. ``leftovers``: see `spaces.Totals`.
    ``of_space``: the quota itself."""

    quota: int
    bytes: int
    rows: int
    leaving: int
    free: int
    budget: int
    disk: int = 0
    leftovers: bool = False
    here: int = -NO_LIMIT
    of_space: int | None = None

    @property
    def fits(self) -> bool:
        return self.quota <= 0 and self.bytes <= 0 and self.rows <= 0 and self.here <= 0


class Room:
    """The room of one root, as things are. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog) -> None:
        self._path, self._catalog = str(root.path), catalog
        self._block = host.disk(root.path).block
        self._seen = 0, 0.0, SpaceDeficit(0, 0, 0, 0, 0, 0)

    def charge(self, size: int, inline: bool = False) -> int:
        """What ``size`` bytes count while they are written: whole blocks and the chunk map, or bytes and a row for a small value."""
        return size + ROW if inline else stages.footprint(size, self._block)

    def charge_of(self, want: SpaceRequest) -> int:
        """What the budget counts for ``want``."""
        return want.charged or self.charge(want.size, want.inline)

    def charge_published(self, size: int) -> int:
        """What a finished file of ``size`` bytes counts."""
        return -(-size // self._block) * self._block

    def short(self, rows: Rows, want: SpaceRequest | None, id: int = 0) -> SpaceDeficit:
        """What is lacking for ``want``, or for nothing new; older pending reservations are served before ``id``."""
        totals = spaces.totals(rows, id or None, want.space if want else 0)
        charge = self.charge_of(want) if want else 0
        used = totals.entries + totals.granted + totals.pending + totals.over
        self._catalog.free = host.free_bytes(self._path)
        floor = totals.min_free + self._catalog.ballast.owed + charge - self._catalog.free
        quota = count = rows_over = -NO_LIMIT
        replaces, replaced = (want.replaces, want.replaced) if want is not None else (0, 0)
        limited = totals.quota is not None or totals.max_count is not None or totals.max_entries is not None
        if want is not None and want.replaces and limited:
            # P1 asks, to replace an entry / P2 evicts that, and fills its place / P1 is to be granted room: there is nothing to replace.
            replaces, replaced = entries.version(rows, want.space, want.key)
        new = want.entries - bool(replaces) if want is not None else 0
        if want is not None and (totals.quota is not None or totals.max_count is not None):
            promised, many = reservations.reserved_in(rows, want.space, id) if totals.any_promised else (0, 0)
            if totals.quota is not None:
                quota = totals.space + promised + want.size - replaced - totals.quota
            if totals.max_count is not None:
                count = totals.rows_here + many + new - totals.max_count
        if totals.max_entries is not None:
            rows_over = totals.rows + new - totals.max_entries
        lacking = max(used + charge - totals.budget, floor)
        free = totals.budget - used
        return SpaceDeficit(quota, lacking, rows_over, totals.leaving, free, totals.budget, floor, totals.leftovers, count, totals.quota)

    def fits(self, txn: Txn, want: SpaceRequest) -> bool:
        """Whether ``want`` fits as things are. For what is written in this very transaction: its row is its reservation."""
        short = self.short(txn, want)
        txn.leftovers |= short.leftovers
        return short.fits

    def fit_together(self, txn: Txn, wants: Sequence[SpaceRequest]) -> bool:
        """Whether all of them fit as things are: for several in one transaction. Of one space, else False: each is looked at by itself."""
        first, others = wants[0], wants[1:]
        short = self.short(txn, first)
        txn.leftovers |= short.leftovers
        return (
            all(want.space == first.space for want in others)
            and short.quota + sum(want.size - want.replaced for want in others) <= 0
            and short.bytes + sum(self.charge(want.size) for want in others) <= 0
            and short.rows + len(others) <= 0
            and short.here + len(others) <= 0
        )

    def has_ample(self, want: SpaceRequest) -> bool:
        """Whether there seems to be room. Asked without the writer lock, so it may be wrong a moment later; for as long as that, what was
        seen does for others too where there was room for many of them."""
        space, until, seen = self._seen
        ample = max(seen.quota + MANY * want.size, seen.bytes + MANY * self.charge(want.size), seen.rows + MANY, seen.here + MANY) <= 0
        if space == want.space and time.monotonic() < until and ample:
            return True
        seen = self.short(self._catalog, want)
        self._seen = want.space, time.monotonic() + RECENT, seen
        return seen.fits


log = logger("forebay.budget")

AT_ONCE = 128
PICKS = 3
"""How often the coldest are picked anew before they are held to be all in use."""
FULL = 4
PATIENCE = 10.0
IN_VAIN = 0.25
"""Seconds after a search for room in vain, in which another one is not worth its time to those who can do without."""
_FOR_THE_JOURNAL = 1 << 20  # to evict takes room too


@dataclass(slots=True)
class _Reserving:
    """The state of one call of `Budget.reserve`: what it dooms stays locked until its rows are deleted."""

    me: int
    id: int = 0
    doomed: list[EvictionVictim] = field(default_factory=list)
    partials: list[Reservation] = field(default_factory=list)
    picks: Counter[Scope] = field(default_factory=Counter)  # since the last victim of the scope
    pick: set[Scope] = field(default_factory=set)
    given: int = 0  # bytes of victims, while the disk was short
    wanted: int = 0  # what the disk lacked at first
    stuck: SpaceDeficit | None = None
    hopeless: bool = False
    patient_until: float = 0.0
    full: int = 0  # how often the disk was found full
    contended: bool = False  # whether others write into this space
    tails: bool | None = None  # whether what stands empty behind dead writers of packs is to be given back; None: not looked yet


@dataclass(slots=True)
class _Freed:
    """What the victims of one transaction bring: bytes of the quota, bytes of the budget, entries."""

    size: int = 0
    charge: int = 0
    count: int = 0

    def add(self, cold: EvictionCandidate) -> None:
        self.size, self.charge, self.count = self.size + cold.size, self.charge + cold.charge, self.count + 1

    def meets(self, need: _Freed) -> bool:
        return self.size >= need.size and self.charge >= need.charge and self.count >= need.count


class Budget:
    """Room in one root. Callable from any thread; blocks only for the unlinking of what others doomed."""

    def __init__(
        self, root: Root, catalog: Catalog, owners: Owners, eviction: Eviction, ranking: Ranking, words: waits.Words, counters: Counters,
        memo: Memo, tails: SegmentTails,
    ) -> None:  # fmt: skip
        self._root, self._catalog, self._owners, self._counters = root, catalog, owners, counters
        self._eviction, self._ranking, self._words, self._memo, self._tails = eviction, ranking, words, memo, tails
        self._keys = locks.LockFile(root.lock("keys"), root.files.open)  # a reaper's own description: see the module `leases`
        self.room = Room(root, catalog)
        self._in_vain: dict[int, tuple[float, int]] = {}  # by space: until when that holds, and for how many bytes
        self._owed: set[int] = set()  # reservations that ended while the catalog was busy: counted until the next transaction here

    # -- reserving -------------------------------------------------------------------------------------------------

    def reserve(self, want: SpaceRequest, *, patience: float = 0.0) -> Reservation:
        """Room for ``want``, evicting what may go. Raises `NoSpace` where not enough may; for what is larger than the whole budget
        nothing is evicted. ``patience``: seconds to wait for others of the space, whose writes can be evicted once they are done."""
        return self._attempt(want, _Reserving(self._owners.me(), patient_until=time.monotonic() + patience))

    def check_lately(self, want: SpaceRequest) -> None:
        """Raises `NoSpace` where a search for as much was in vain a moment ago, and there is no room now. A lease that another process let
        go since is not noticed: for those who can do without."""
        until, charge = self._in_vain.get(want.space, (0.0, 0))
        if time.monotonic() < until and self.room.charge_of(want) >= charge:
            short = self.room.short(self._catalog, want)
            if not short.fits:
                raise self._no_space(want, short, hopeless=False)

    def resize(self, reservation: Reservation, size: int, *, charged: int = 0, entries: int = 1) -> Reservation:
        """The same reservation with another size. Raises `NoSpace`: then it is as it was."""
        r = reservation
        want = SpaceRequest(r.space, r.key, r.keyhash, size, r.suffix, charged=charged, entries=entries)
        return self._attempt(want, _Reserving(self._owners.me(), reservation.id))

    def cancel(self, id: int) -> None:
        """Give a reservation back; where the catalog is busy, by the next call that makes room. Its files are gone already."""
        try:
            self._give_back(id)
        except errors.WriterBusy as error:
            log.info("%s: the reservation %x is given back later: %s", self._root.path, id, str(error))
        else:
            self._words.bump(SPACE_WORD)

    def _give_back(self, id: int) -> None:
        self._owed.add(id)
        self._catalog.insist(self._delete_owed)

    def _delete_owed(self, txn: Txn) -> None:
        owed = tuple(self._owed)
        for one in owed:
            reservations.delete(txn, one)
        txn.then = lambda: self._owed.difference_update(owed)

    def split(self, txn: Txn, want: SpaceRequest) -> Reservation:
        """A reservation of its own, out of a larger one that the caller makes smaller in the same transaction."""
        return self._enter(txn, want, _Reserving(self._owners.me()), granted=True)

    def tell(self) -> None:
        """Bytes were given back: who waits for room looks again."""
        self._words.bump(SPACE_WORD)

    def make_room(self) -> bool:
        """Evict until the root is within its limits: after one was lowered, or when another program filled the disk. False if what
        is left is in use."""
        try:
            self._attempt(None, _Reserving(self._owners.me()))
        except errors.NoSpace:
            return False
        return True

    def _attempt(self, want: SpaceRequest | None, attempt: _Reserving) -> Reservation:
        fresh = not attempt.id
        until = time.monotonic() + PATIENCE
        try:
            while True:
                granted = self._turn(want, attempt)
                if granted is not None:
                    return granted
                if attempt.stuck is not None:
                    # A replacer that died left bytes that no live entry holds: they are as good as a victim's.
                    if attempt.hopeless or not (self._eviction.sweep() or self._others_write(attempt)):
                        if want is not None:
                            self._in_vain[want.space] = time.monotonic() + IN_VAIN, self.room.charge_of(want)
                        raise self._no_space(want, attempt.stuck, attempt.hopeless)
                    attempt.stuck = None
                    attempt.picks.clear()  # what others have published is new, and what a swept tree linked may go by now
                self._unlink(attempt)
                if attempt.tails:
                    self._tails.reclaim()
                elif not (attempt.doomed or attempt.partials or attempt.pick):
                    self._wait_for_others(until)
        except BaseException:
            self._withdraw(attempt, fresh)
            raise
        finally:
            self._let_go(attempt)

    def _turn(self, want: SpaceRequest | None, attempt: _Reserving) -> Reservation | None:
        """One transaction: delete what was unlinked, then grant, or doom what has to go."""
        for scope in attempt.pick:
            self._ranking.pick(scope)
            attempt.picks[scope] += 1
        attempt.pick = set()
        doomed: list[EvictionVictim] = []
        partials: list[Reservation] = []
        id, owed = attempt.id, tuple(self._owed)

        def committed() -> None:
            nonlocal id
            id = attempt.id
            self._owed.difference_update(owed)

        try:
            with self._catalog.write() as txn:
                txn.then = committed
                for one in owed:
                    reservations.delete(txn, one)
                self._eviction.delete(txn, attempt.doomed)
                for partial in attempt.partials:
                    reservations.delete(txn, partial.id)
                short = self.room.short(txn, want, attempt.id)
                if not short.fits and self._owners.reap(txn):
                    short = self.room.short(txn, want, attempt.id)
                if short.fits:
                    return self._grant(txn, want, attempt)
                if not self._enter_pending(txn, want, attempt, short):
                    return None
                attempt.tails = attempt.tails is None and self._tails.any_left(txn)
                if not attempt.tails:
                    self._find_room(txn, want, attempt, short, doomed, partials)
                    attempt.contended = want is not None and reservations.any_others(txn, want.space, attempt.id)
        except DiskFull as error:
            self._eviction.release(doomed)
            doomed = []
            attempt.full += 1
            if not error.relieved or attempt.full > FULL:
                raise
        finally:
            self._let_go(attempt)
            attempt.id = id  # one that was entered and rolled back is none, and its number may be another's by now
            attempt.doomed, attempt.partials = doomed, partials
            self._counters.add(EVICTIONS, len(doomed))
        return None

    def _grant(self, txn: Txn, want: SpaceRequest | None, attempt: _Reserving) -> Reservation:
        if want is None:
            return _NOTHING
        if not attempt.id:
            return self._enter(txn, want, attempt, granted=True)
        reservations.set_size(txn, attempt.id, want.size, self.room.charge_of(want), True, want.entries)
        found = reservations.by_id(txn, attempt.id)
        if found is None:
            raise errors.CacheFault(f"the reservation of {want.key!r} is gone: the catalog was made anew meanwhile")
        return found

    def _enter(self, txn: Txn, want: SpaceRequest, attempt: _Reserving, *, granted: bool) -> Reservation:
        attempt.id, charge = txn.take("next_id"), self.room.charge_of(want)
        row = Reservation(
            attempt.id, attempt.me, want.space, want.key, want.keyhash, granted, want.size, charge, want.suffix, time.time(),
            want.entries,
        )  # fmt: skip
        reservations.insert(txn, row)
        return row

    def _enter_pending(self, txn: Txn, want: SpaceRequest | None, attempt: _Reserving, short: SpaceDeficit) -> bool:
        """Let others count what is wanted. False, and stuck, if it could not fit into an empty root either."""
        if want is None:
            return True
        limits = spaces.totals(txn, space=want.space)
        quota = limits.quota if limits.quota is not None else want.size
        if self.room.charge_of(want) > limits.budget or want.size > quota or 0 in (limits.max_entries, limits.max_count):
            attempt.stuck, attempt.hopeless = short, True
            return False
        if not attempt.id:
            self._enter(txn, want, attempt, granted=False)
        return True

    # -- victims ---------------------------------------------------------------------------------------------------

    def _find_room(
        self,
        txn: Txn,
        want: SpaceRequest | None,
        attempt: _Reserving,
        short: SpaceDeficit,
        doomed: list[EvictionVictim],
        partials: list[Reservation],
    ) -> None:
        """Choose who goes: for a quota the space's own, for the root the coldest of all, after what dead fetches left."""
        space = spaces.by_id(txn, want.space) if want else None
        evicts_own = space is None or Policy.parse(space.policy).evicts_own
        freed = _Freed()
        if (short.quota > 0 or short.here > 0) and space is not None:
            need = _Freed(size=short.quota, count=short.here)
            self._take_partials(txn, need, freed, partials, only=space.id)
            if evicts_own:
                self._doom(txn, Scope(only=space.id), want, attempt, freed, doomed, need)
            if not freed.meets(need):
                self._stuck_unless(bool(doomed or partials), attempt, short)
                return
        lacking = short.bytes - short.leaving
        if 0 < short.disk == short.bytes:
            # The disk may get nothing back from a victim: another process has it mapped. Then more victims would not help either.
            attempt.wanted = attempt.wanted or lacking + _FOR_THE_JOURNAL
            if attempt.given >= attempt.wanted:
                attempt.stuck = short
                return
        self._take_partials(txn, _Freed(charge=lacking, count=short.rows), freed, partials)
        scope = Scope() if evicts_own or space is None else Scope(but=space.id)
        self._doom(txn, scope, want, attempt, freed, doomed, _Freed(charge=lacking, count=short.rows))
        attempt.given += freed.charge
        if freed.charge < lacking or freed.count < short.rows:
            self._stuck_unless(bool(doomed or partials) or short.leaving > 0, attempt, short)

    def _stuck_unless(self, moving: bool, attempt: _Reserving, short: SpaceDeficit) -> None:
        if not moving and not attempt.pick:
            attempt.stuck = short

    def _doom(
        self,
        txn: Txn,
        scope: Scope,
        want: SpaceRequest | None,
        attempt: _Reserving,
        freed: _Freed,
        doomed: list[EvictionVictim],
        need: _Freed,
    ) -> None:
        left = AT_ONCE
        while left > 0 and not freed.meets(need):
            locked, planned = [], replace(freed)
            # Where all that is there is read all the time, each tick has changed since it was picked: then nearly the coldest will do.
            for cold in self._ranking.coldest(scope, exact=attempt.picks[scope] < PICKS):
                if (want is None or cold.id != want.replaces) and self._eviction.lock(cold.id):
                    locked.append(cold)
                    planned.add(cold)
                    if planned.meets(need) or len(locked) >= left:
                        break
            if not locked:
                if attempt.picks[scope] < PICKS:
                    attempt.pick.add(scope)
                return
            left -= len(locked)
            for cold in self._eviction.doom_many(txn, locked):
                attempt.picks[scope] = 0
                doomed.append(EvictionVictim(cold.id, cold.kind, cold.suffix))
                freed.add(cold)

    def _take_partials(
        self, txn: Txn, need: _Freed, freed: _Freed, partials: list[Reservation], *, only: int | None = None
    ) -> None:  # fmt: skip
        """What dead fetches left, oldest first, each under its key's lock: its successor may be at work. ``only``: of this space."""
        for partial in reservations.abandoned(txn):
            if freed.meets(need):
                break
            if only in (None, partial.space) and self._keys.try_lock(partial.keyhash, exclusive=True):
                partials.append(partial)
                freed.size, freed.charge, freed.count = freed.size + partial.size, freed.charge + partial.charge, freed.count + 1

    def _unlink(self, attempt: _Reserving) -> None:
        self._eviction.unlink(attempt.doomed)
        if attempt.wanted:
            self._memo.drop_dead()  # what this process has mapped of victims
        for partial in attempt.partials:
            stages.remove_partial(self._root, partial.keyhash, partial.id)
            blobs.remove_blob(self._root, partial.id, partial.suffix)  # its writer died between rename and commit
            trees.remove(self._root, partial.id, keyhash=partial.keyhash)
            pack_files.remove(self._root, partial.id, keyhash=partial.keyhash)

    def _let_go(self, attempt: _Reserving) -> None:
        self._eviction.release(attempt.doomed)
        for partial in attempt.partials:
            self._keys.unlock(partial.keyhash)
        attempt.doomed, attempt.partials = [], []

    def _withdraw(self, attempt: _Reserving, fresh: bool) -> None:
        """Leave nothing pending behind; a reservation that was to grow stays as it was. Raises nothing: the caller has an error already."""
        if fresh and attempt.id:
            try:
                self._give_back(attempt.id)
            except (errors.CacheFault, OSError) as error:
                log.info("%s: the reservation %x is given back later: %s", self._root.path, attempt.id, str(error))

    def _wait_for_others(self, until: float) -> None:
        """Others are unlinking what we need. If they died meanwhile, the sweep goes on from there."""
        self._eviction.sweep()
        left = until - time.monotonic()
        if left <= 0:
            raise errors.CacheFault("room that others are making did not come in time")
        self._words.sleep(SPACE_WORD, min(left, 0.02))

    def _others_write(self, attempt: _Reserving) -> bool:
        """Whether others hold room of this space for what they write now, and there is patience; then some time has passed."""
        if not attempt.contended or time.monotonic() >= attempt.patient_until:
            return False
        self._words.sleep(SPACE_WORD, 0.02)
        return True

    def _no_space(self, want: SpaceRequest | None, short: SpaceDeficit, hopeless: bool) -> errors.NoSpace:
        if want is None:
            return errors.NoSpace.of("what is there", short.bytes, 0, short.budget)
        if (short.rows > 0 or short.here > 0) and short.bytes <= 0 and short.quota <= 0:
            limit = "max_entries" if short.rows > 0 else "max_count of the space"
            said = f"no room for {want.key!r}: there are {limit} already: raise it, or see `forebay ls --leased`"
            return errors.NoSpace(said, key=want.key, need=want.size, free=short.free, budget=short.budget, hopeless=hopeless)
        if short.quota > 0 and short.of_space is not None:
            todo = "it can never be kept: raise the quota" if hopeless else "raise the quota, or remove what is pinned or in use"
            free = min(short.of_space, want.size - short.quota)
            return errors.NoSpace.of(want.key, want.size, free, short.of_space, todo, hopeless=hopeless, limit="quota")
        charge = self.room.charge_of(want)
        if hopeless:
            todo = "it can never be kept: raise the budget or the quota"
            return errors.NoSpace.of(want.key, want.size, short.free, short.budget, todo, hopeless=True, charge=charge)
        if short.disk > 0:
            free, todo = max(0, min(short.free, want.size - short.disk)), "the disk is full: free some of it, or lower min_free"
            return errors.NoSpace.of(want.key, want.size, free, short.budget, todo, limit="disk")
        return errors.NoSpace.of(want.key, want.size, short.free, short.budget, charge=charge)

    def wait_for_room(self, want: SpaceRequest, timeout: float | None) -> None:
        """Until ``want`` may fit: somebody removed something, or let a lease go. Caller: holds no lock. Raises `WaitTimeout`, or `NoSpace`
        for what can never fit."""

        def attempt() -> bool | None:
            try:
                self.cancel(self.reserve(want).id)
            except errors.NoSpace as error:
                if error.hopeless:
                    raise
                return None
            return True

        waits.wait_for(
            attempt,
            self._words,
            SPACE_WORD,
            what=lambda: (f"room for {want.key!r} ({want.size:,} bytes)", "leases"),
            timeout=timeout,
        )

    def close(self) -> None:
        self._keys.close()

    def before_fork(self) -> None:
        self._keys.before_fork(keep=False)

    def after_fork_parent(self) -> None:
        self._keys.after_fork_parent()

    def after_fork_child(self) -> None:
        self._owed = set()  # the parent gives them back
        self._keys.after_fork_child(keep=False)


_NOTHING = Reservation(0, None, 0, "", 0, True, 0, 0, "", 0.0)
