"""Space in a root: reserve it, make it by evicting, give it back. All processes together never use more than the budget.

Used = published + reserved + doomed + superseded + what the catalog occupies above its allowance.

Where something has to be evicted, reserving takes two transactions: the first enters the reservation as pending, so that other
processes count it, and dooms the victims; their files are unlinked outside the writer lock; the second deletes their rows and grants.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field, replace

from forebay import errors
from forebay._engine.catalog import Catalog, DiskFull, Txn, reservations, spaces
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.files import blobs, pack_files, stages, trees
from forebay._engine.files.root import Root
from forebay._engine.index.counters import EVICTIONS, Counters
from forebay._engine.index.memo import Memo
from forebay._engine.locks.owners import Owners
from forebay._engine.space.eviction import SPACE_WORD, Eviction, EvictionVictim
from forebay._engine.space.free_space import FreeSpace, SpaceDeficit, SpaceRequest
from forebay._engine.space.ranking import EvictionCandidate, Ranking, Scope
from forebay._engine.space.segment_tails import SegmentTails
from forebay._kernel import events, locks, waits
from forebay._logs import logger
from forebay._model import Policy

log = logger("forebay.budget")

AT_ONCE = 128
PICKS = 3
"""How often the coldest entries are picked again before all are taken to be in use."""
FULL = 4
PATIENCE = 10.0
IN_VAIN = 0.25
"""Seconds after a search for space that failed in which callers that can do without do not search again."""
_FOR_THE_JOURNAL = 1 << 20  # eviction takes space too


@dataclass(slots=True)
class _Reserving:
    """The state of one call of `Budget.reserve`. Its victims stay locked until their rows are deleted."""

    me: int
    id: int = 0
    doomed: list[EvictionVictim] = field(default_factory=list)
    partials: list[Reservation] = field(default_factory=list)
    picks: Counter[Scope] = field(default_factory=Counter)  # since the last victim of the scope
    pick: set[Scope] = field(default_factory=set)
    given: int = 0  # bytes of victims, while the disk was short
    given_files: int = 0
    needed: int = 0  # what the disk lacked at first
    needed_files: int = 0
    stuck: SpaceDeficit | None = None
    hopeless: bool = False
    wait_until: float = 0.0
    full: int = 0  # how often the disk was full
    contended: bool = False  # whether others write into this space
    gave_back: bool = False  # free pages of the catalog: there is room for a part of the request
    tails: bool | None = None  # whether segment tails of dead writers are to be reclaimed; None: not checked yet


@dataclass(slots=True)
class _Freed:
    """What the victims of one transaction free: bytes of the quota, bytes of the budget, entries, files."""

    size: int = 0
    charge: int = 0
    count: int = 0
    files: int = 0

    def add(self, victim: EvictionCandidate | Reservation, *, is_file: bool) -> None:
        self.size, self.charge, self.count = self.size + victim.size, self.charge + victim.charge, self.count + 1
        self.files += is_file

    def meets(self, need: _Freed) -> bool:
        return self.size >= need.size and self.charge >= need.charge and self.count >= need.count and self.files >= need.files


class Budget:
    """Space in one root. Callable from any thread; waits only until other processes have unlinked their victims."""

    def __init__(
        self, root: Root, catalog: Catalog, owners: Owners, eviction: Eviction, ranking: Ranking, words: waits.Words, counters: Counters,
        memo: Memo, tails: SegmentTails,
    ) -> None:  # fmt: skip
        self._root, self._catalog, self._owners, self._counters = root, catalog, owners, counters
        self._eviction, self._ranking, self._words, self._memo, self._tails = eviction, ranking, words, memo, tails
        self._keys = locks.LockFile(root.lock("keys"), root.files.open)  # a reaper's own description: see the module `leases`
        self.room = FreeSpace(root, catalog)
        self._in_vain: dict[int, tuple[float, int]] = {}  # by space: until when that holds, and for how many bytes
        self._owed: set[int] = set()  # reservations that ended while the catalog was busy: counted until the next transaction here

    # -- reserving -------------------------------------------------------------------------------------------------

    def reserve(self, request: SpaceRequest, *, timeout: float = 0.0) -> Reservation:
        """Reserve space, evicting entries where needed. Raises `NoSpace` if not enough can be evicted; a request larger than the whole
        budget evicts nothing. ``timeout``: seconds to wait for other writes of the space, which can be evicted once they are done."""
        return self._attempt(request, _Reserving(self._owners.me(), wait_until=time.monotonic() + timeout))

    def count_evicted(self, count: int) -> None:
        """Count evicted entries, and tell of them."""
        self._counters.add(EVICTIONS, count)
        if count:
            events.emit("evict", self._root.path, entries=count)

    def check_lately(self, request: SpaceRequest) -> None:
        """Raise `NoSpace` if a search for as much failed a moment ago and there is no space now. A lease that another process has released
        since is not noticed: for callers that can do without."""
        until, charge = self._in_vain.get(request.space, (0.0, 0))
        if time.monotonic() < until and self.room.charge_of(request) >= charge:
            short = self.room.short(self._catalog, request)
            if not short.fits:
                raise self._no_space(request, short, hopeless=False)

    def resize(self, reservation: Reservation, size: int, *, charged: int = 0, entries: int = 1) -> Reservation:
        """Change the size of a reservation. Raises `NoSpace`; then the reservation is unchanged."""
        r = reservation
        request = SpaceRequest(r.space, r.key, r.keyhash, size, r.suffix, charged=charged, entries=entries)
        return self._attempt(request, _Reserving(self._owners.me(), reservation.id))

    def cancel(self, id: int) -> None:
        """Give a reservation back, if the catalog is busy by the next call that makes space. Caller: has removed its files."""
        try:
            self._give_back(id)
        except (errors.WriterBusy, DiskFull) as error:
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
        txn.after_commit.append(lambda: self._owed.difference_update(owed))

    def split(self, txn: Txn, request: SpaceRequest) -> Reservation:
        """A separate reservation out of a larger one that the caller shrinks in the same transaction."""
        return self._enter(txn, request, _Reserving(self._owners.me()), granted=True)

    def tell(self) -> None:
        """Wake the processes that wait for space: bytes were given back."""
        self._words.bump(SPACE_WORD)

    def make_room(self) -> bool:
        """Evict until the root is within its limits, after one was lowered or another program filled the disk. False if the rest is in
        use."""
        try:
            self._attempt(None, _Reserving(self._owners.me()))
        except errors.NoSpace:
            return False
        return True

    def _attempt(self, request: SpaceRequest | None, attempt: _Reserving) -> Reservation:
        fresh = not attempt.id
        until = time.monotonic() + PATIENCE
        try:
            while True:
                granted = self._turn(request, attempt)
                if granted is not None:
                    return granted
                if attempt.stuck is not None:
                    # A process that died while it replaced an entry left bytes that no live entry holds: they can be freed like a victim's.
                    if attempt.hopeless or not (self._eviction.sweep() or self._others_write(attempt)):
                        if request is not None:
                            self._in_vain[request.space] = time.monotonic() + IN_VAIN, self.room.charge_of(request)
                        raise self._no_space(request, attempt.stuck, attempt.hopeless)
                    attempt.stuck = None
                    attempt.picks.clear()  # entries that others published are new, and files that a swept tree linked can be evicted now
                self._unlink(attempt)
                if attempt.tails:
                    self._tails.reclaim()
                elif not (attempt.doomed or attempt.partials or attempt.pick or attempt.gave_back):
                    self._wait_for_others(until)
        except BaseException:
            self._withdraw(attempt, fresh)
            raise
        finally:
            self._let_go(attempt)

    def _turn(self, request: SpaceRequest | None, attempt: _Reserving) -> Reservation | None:
        """One transaction: delete the rows of unlinked victims, then grant the request, or doom more victims."""
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
            self.count_evicted(len(doomed))
            self._owed.difference_update(owed)

        try:
            with self._catalog.write() as txn:
                txn.after_commit.append(committed)
                for one in owed:
                    reservations.delete(txn, one)
                self._eviction.delete(txn, attempt.doomed)
                for partial in attempt.partials:
                    reservations.delete(txn, partial.id)
                short = self.room.short(txn, request, attempt.id)
                if not short.fits and self._owners.reap(txn):
                    short = self.room.short(txn, request, attempt.id)
                if short.fits:
                    return self._grant(txn, request, attempt)
                if not self._enter_pending(txn, request, attempt, short):
                    return None
                attempt.gave_back = short.bytes > 0 and not short.log and txn.give_back(short.bytes)
                if attempt.gave_back:
                    return None
                attempt.tails = attempt.tails is None and self._tails.any_left(txn)
                if not attempt.tails:
                    self._find_room(txn, request, attempt, short, doomed, partials)
                    attempt.contended = request is not None and reservations.any_others(txn, request.space, attempt.id)
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
        return None

    def _grant(self, txn: Txn, request: SpaceRequest | None, attempt: _Reserving) -> Reservation:
        if request is None:
            return _NOTHING
        if not attempt.id:
            return self._enter(txn, request, attempt, granted=True)
        reservations.set_size(txn, attempt.id, request.size, self.room.charge_of(request), True, request.entries)
        reservation = reservations.by_id(txn, attempt.id)
        if reservation is None:
            raise errors.CacheFault(f"the reservation of {request.key!r} is gone: the catalog was recreated")
        return reservation

    def _enter(self, txn: Txn, request: SpaceRequest, attempt: _Reserving, *, granted: bool) -> Reservation:
        attempt.id, charge = txn.take("next_id"), self.room.charge_of(request)
        row = Reservation(
            attempt.id, attempt.me, self._owners.who, request.space, request.key, request.keyhash, granted, request.size, charge,
            request.suffix, time.time(), request.entries,
        )  # fmt: skip
        reservations.insert(txn, row)
        return row

    def _enter_pending(self, txn: Txn, request: SpaceRequest | None, attempt: _Reserving, short: SpaceDeficit) -> bool:
        """Let other processes count the request. False, and stuck, if it would not even fit into an empty root."""
        if request is None:
            return True
        limits = spaces.totals(txn, space=request.space)
        quota = limits.quota if limits.quota is not None else request.size
        if self.room.charge_of(request) > limits.budget or request.size > quota or 0 in (limits.max_entries, limits.max_count):
            attempt.stuck, attempt.hopeless = short, True
            return False
        if not attempt.id:
            self._enter(txn, request, attempt, granted=False)
        return True

    # -- victims ---------------------------------------------------------------------------------------------------

    def _find_room(
        self,
        txn: Txn,
        request: SpaceRequest | None,
        attempt: _Reserving,
        short: SpaceDeficit,
        doomed: list[EvictionVictim],
        partials: list[Reservation],
    ) -> None:
        """Choose victims: for a quota the entries of the space, for the root the coldest of all, after partials of dead fetches."""
        space = spaces.by_id(txn, request.space) if request else None
        evicts_own = space is None or Policy.parse(space.policy).evicts_own
        self._ranking.learn(txn, Scope(only=space.id) if space is not None and (short.quota > 0 or short.here > 0) else Scope())
        freed = _Freed()
        if (short.quota > 0 or short.here > 0) and space is not None:
            need = _Freed(size=short.quota, count=short.here)
            self._take_partials(txn, need, freed, partials, only=space.id)
            if evicts_own:
                self._doom(txn, Scope(only=space.id), request, attempt, freed, doomed, need)
            if not freed.meets(need):
                self._stuck_unless(bool(doomed or partials), attempt, short)
                return
        lacking = short.bytes - short.leaving
        # Evicting an entry that another process has mapped frees nothing on the disk; then more victims would not help either.
        if 0 < short.disk == short.bytes:
            attempt.needed = attempt.needed or lacking + _FOR_THE_JOURNAL
            if attempt.given >= attempt.needed:
                attempt.stuck = short
        if short.files > 0:
            attempt.needed_files = attempt.needed_files or short.files
            if attempt.given_files >= attempt.needed_files:
                attempt.stuck = short
        if attempt.stuck is not None:
            return
        need = _Freed(charge=lacking, count=short.rows, files=short.files)
        self._take_partials(txn, need, freed, partials)
        scope = Scope() if evicts_own or space is None else Scope(but=space.id)
        self._doom(txn, scope, request, attempt, freed, doomed, need, only_files=short.log > 0)
        attempt.given, attempt.given_files = attempt.given + freed.charge, attempt.given_files + freed.files
        if not freed.meets(need):
            self._stuck_unless(bool(doomed or partials) or short.leaving > 0, attempt, short)

    def _stuck_unless(self, moving: bool, attempt: _Reserving, short: SpaceDeficit) -> None:
        if not moving and not attempt.pick:
            attempt.stuck = short

    def _doom(
        self,
        txn: Txn,
        scope: Scope,
        request: SpaceRequest | None,
        attempt: _Reserving,
        freed: _Freed,
        doomed: list[EvictionVictim],
        need: _Freed,
        *,
        only_files: bool = False,
    ) -> None:
        left = AT_ONCE
        while left > 0 and not freed.meets(need):
            locked, planned = [], replace(freed)
            # Where all entries are read all the time, each was used since it was picked: then nearly the coldest will do.
            for candidate in self._ranking.coldest(scope, exact=attempt.picks[scope] < PICKS):
                if only_files and candidate.kind == "value":
                    continue
                if (request is None or candidate.id != request.replaces) and self._eviction.lock(candidate.id):
                    doomed.append(EvictionVictim(candidate.id, candidate.kind, candidate.suffix))  # at once: they are released in any event
                    locked.append(candidate)
                    planned.add(candidate, is_file=candidate.kind != "value")
                    if planned.meets(need) or len(locked) >= left:
                        break
            if not locked:
                if attempt.picks[scope] < PICKS:
                    attempt.pick.add(scope)
                return
            left -= len(locked)
            ids = self._eviction.doom_many(txn, locked, doomed)
            for victim in locked:
                if victim.id in ids:
                    attempt.picks[scope] = 0
                    freed.add(victim, is_file=victim.kind != "value")

    def _take_partials(
        self, txn: Txn, need: _Freed, freed: _Freed, partials: list[Reservation], *, only: int | None = None
    ) -> None:  # fmt: skip
        """Take partials of dead fetches, oldest first, each under its key's lock, since a successor may be working on it.

        ``only``: of this space."""
        for partial in reservations.abandoned(txn):
            if freed.meets(need):
                break
            if only in (None, partial.space) and self._keys.try_lock(partial.keyhash, exclusive=True):
                partials.append(partial)
                freed.add(partial, is_file=True)

    def _unlink(self, attempt: _Reserving) -> None:
        self._eviction.unlink(attempt.doomed)
        if attempt.needed or attempt.needed_files:
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
        """Leave nothing pending; a reservation that was to grow stays unchanged. Raises nothing: the caller has an error already."""
        if fresh and attempt.id:
            try:
                self._give_back(attempt.id)
            except (errors.CacheFault, OSError) as error:
                log.info("%s: the reservation %x is given back later: %s", self._root.path, attempt.id, str(error))

    def _wait_for_others(self, until: float) -> None:
        """Wait for other processes to unlink their victims. If they died meanwhile, the sweep finishes their work."""
        self._eviction.sweep()
        left = until - time.monotonic()
        if left <= 0:
            raise errors.CacheFault("other callers did not free the room in time")
        self._words.sleep(SPACE_WORD, min(left, 0.02))

    def _others_write(self, attempt: _Reserving) -> bool:
        """Whether others hold space for writes in progress, and there is time to wait for them; then some time has passed."""
        if not attempt.contended or time.monotonic() >= attempt.wait_until:
            return False
        self._words.sleep(SPACE_WORD, 0.02)
        return True

    def _no_space(self, request: SpaceRequest | None, short: SpaceDeficit, hopeless: bool) -> errors.NoSpace:
        if request is None:
            return errors.NoSpace.of("what is there", short.bytes, 0, short.budget)
        if (short.rows > 0 or short.here > 0) and short.bytes <= 0 and short.quota <= 0:
            limit = "max_entries" if short.rows > 0 else "max_count of the space"
            message = f"no room for {request.key!r}: there are {limit} already: raise it, or see `forebay ls --leased`"
            return errors.NoSpace(message, key=request.key, need=request.size, free=short.free, budget=short.budget, hopeless=hopeless)
        if short.quota > 0 and short.of_space is not None:
            todo = "it is larger than the quota; raise the quota" if hopeless else "raise the quota, or remove what is pinned or in use"
            free = min(short.of_space, request.size - short.quota)
            return errors.NoSpace.of(request.key, request.size, free, short.of_space, todo, hopeless=hopeless, limit="quota")
        if short.files > 0 and short.bytes <= 0:
            message = f"no room for {request.key!r}: the disk has no inodes for more files: remove some, or use another disk"
            return errors.NoSpace(message, key=request.key, need=request.size, free=short.free, budget=short.budget, limit="disk")
        charge = self.room.charge_of(request)
        if hopeless:
            todo = "it is larger than the budget; raise the budget or the quota"
            return errors.NoSpace.of(request.key, request.size, short.free, short.budget, todo, hopeless=True, charge=charge)
        if short.disk > 0:
            free, todo = max(0, min(short.free, request.size - short.disk)), "the disk is full: free some of it, or lower min_free"
            return errors.NoSpace.of(request.key, request.size, free, short.budget, todo, limit="disk")
        if short.log > 0:
            todo = f"the log of the catalog has {short.log:,} of them, since a process stands still inside a query: continue it, or end it"
            return errors.NoSpace.of(request.key, request.size, short.free, short.budget, todo, charge=charge)
        return errors.NoSpace.of(request.key, request.size, short.free, short.budget, charge=charge)

    def wait_for_room(self, request: SpaceRequest, timeout: float | None) -> None:
        """Wait until a request may fit: an entry was removed, or a lease released. Caller: holds no lock.

        Raises `WaitTimeout`, or `NoSpace` for what can never fit."""

        def attempt() -> bool | None:
            try:
                self.cancel(self.reserve(request).id)
            except errors.NoSpace as error:
                if error.hopeless:
                    raise
                return None
            return True

        waits.wait_for(
            attempt,
            self._words,
            SPACE_WORD,
            what=lambda: (f"room for {request.key!r} ({request.size:,} bytes)", "leases"),
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


_NOTHING = Reservation(0, None, "", 0, "", 0, True, 0, 0, "", 0.0)
