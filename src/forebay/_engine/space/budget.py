"""Space in a root: reserve it, make it by evicting, give it back. All processes together never use more than the budget.

Used = published + superseded + reserved + what the catalog occupies above its allowance.

Whoever lacks space evicts in its own transaction, and what it evicts is unlinked before anybody else can write: see `eviction`. What takes
longer than `AT_MOST` is a reservation that grows: it holds what was freed so far while others write.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from forebay import errors
from forebay._engine.catalog import entries, reservations
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.entries import Ended
from forebay._engine.catalog.reservations import Reservation
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs, pack_files, stages
from forebay._engine.files.layout import DiskFull
from forebay._engine.files.root import Root
from forebay._engine.index.counters import EVICTIONS, Counters
from forebay._engine.index.memo import Memo
from forebay._engine.index.settings import SharedSettings
from forebay._engine.leases import Owners
from forebay._engine.space import eviction
from forebay._engine.space.eviction import SPACE_WORD, Eviction
from forebay._engine.space.free_space import FreeSpace, SpaceDeficit, SpaceRequest
from forebay._engine.space.ranking import EvictionCandidate, Ranking, Scope
from forebay._kernel import events, interrupts, locks, waits
from forebay._logs import logger

log = logger("forebay.budget")
T = TypeVar("T")

BATCH, BATCH_BYTES = 128, 256 << 20
"""Entries, and about how many bytes, that go in one transaction."""
AT_MOST = 0.05
"""Seconds after which a search lets others write before it evicts the next batch."""
AHEAD, PART = 8, 256
"""Space is made for so many small values at once, so that not every put has to search; at most for one ``PART`` of the budget."""
PICKS = 3
"""How often the coldest entries are picked again before all are taken to be in use."""
OUTDATED = 32
"""How often a pick does not count, since others evict meanwhile."""
FULL = 4
IN_VAIN = 0.25
"""Seconds after a search for space that failed in which callers that can do without do not search again."""
_FOR_THE_JOURNAL = 1 << 20  # eviction takes space too


class Search:
    """What one caller that lacks space knows so far. ``reserved``: what it holds already."""

    given: int = 0  # bytes of victims, while the disk was short
    given_files: int = 0
    needed: int = 0  # what the disk lacked at first
    needed_files: int = 0
    is_stuck: bool = False
    is_hopeless: bool = False
    tails: bool | None = None  # whether segment tails of dead writers are to be reclaimed; None: not checked yet

    def __init__(self, reserved: Reservation | None = None) -> None:
        self.reserved = self.before = reserved
        self.picks = dict[Scope, int]()  # since the last victim of the scope
        self.pick = set[Scope]()
        self.latest: int | None = None  # the last eviction in the root when it picked
        self.outdated = 0

    @property
    def id(self) -> int:
        """Of the reservation; 0: none."""
        return self.reserved.id if self.reserved is not None else 0


@dataclass(slots=True)
class _Freed:
    """What the victims of one transaction free: bytes of the quota, bytes of the budget, entries, files."""

    size: int = 0
    charge: int = 0
    count: int = 0
    files: int = 0

    def add(self, victim: EvictionCandidate | Ended | Reservation, *, is_file: bool) -> None:
        self.size, self.charge, self.count = self.size + victim.size, self.charge + victim.charge, self.count + 1
        self.files += is_file

    def meets(self, need: _Freed) -> bool:
        return self.size >= need.size and self.charge >= need.charge and self.count >= need.count and self.files >= need.files


class Budget:
    """Space in one root. Callable from any thread."""

    def __init__(
        self, root: Root, catalog: Catalog, owners: Owners, eviction: Eviction, ranking: Ranking, words: waits.Words, counters: Counters,
        memo: Memo, settings: SharedSettings,
    ) -> None:  # fmt: skip
        self._root, self._catalog, self._owners, self._counters = root, catalog, owners, counters
        self._eviction, self._ranking, self._words, self._memo = eviction, ranking, words, memo
        self.keys = locks.LockFile(root.lock("keys"), root.files.open)  # a reaper's own description: see the module `leases`
        self.room = FreeSpace(root, catalog, settings)
        self._in_vain: dict[str, tuple[float, int]] = {}  # by space: until when that holds, and for how many bytes
        self._owed: set[int] = set()  # reservations that ended while the catalog was busy: counted until the next transaction here

    # -- reserving -------------------------------------------------------------------------------------------------

    def reserve(self, request: SpaceRequest, *, timeout: float = 0.0) -> Reservation:
        """Reserve space, evicting entries where needed. Raises `NoSpace` if not enough can be evicted; a request larger than the whole
        budget evicts nothing. ``timeout``: seconds to wait for other writes of the space, which can be evicted once they are done."""
        return self._reserve(request, Search(), timeout)

    def resize(self, reservation: Reservation, space: str, size: int) -> Reservation:
        """Change the size of a reservation in a space. Raises `NoSpace`; then the reservation is unchanged."""
        r = reservation
        replaces = (r.key,) if r.keyhash else ()
        request = SpaceRequest(space, r.key, r.keyhash, size, r.suffix, replaces)
        return self._reserve(request, Search(r), 0.0)

    def _reserve(self, request: SpaceRequest, search: Search, timeout: float) -> Reservation:
        return self._search(request, lambda txn: self.grant(txn, request, search), search, timeout, spends=False)

    def with_room(self, request: SpaceRequest, use: Callable[[Txn], T], *, timeout: float = 0.0) -> T:
        """What ``use`` returns in a transaction in which there is room for the request, which it uses. Raises what `reserve` raises."""
        return self._search(request, use, Search(), timeout)

    def fit(self) -> bool:
        """Evict until the root is within its limits, after one was lowered or another program filled the disk. False if the rest is in
        use."""
        try:
            return self._search(None, lambda txn: True, Search())
        except errors.NoSpace:
            return False

    def cancel(self, id: int) -> None:
        """Give a reservation back, if the catalog is busy by the next call that makes space. Caller: has removed its files."""
        self._owed.add(id)
        try:
            self._catalog.insist(self._delete_owed)
        except (errors.WriterBusy, DiskFull) as error:
            log.info("%s: the reservation %x is given back later: %s", self._root.path, id, str(error))
        else:
            self.tell()

    def _delete_owed(self, txn: Txn) -> None:
        owed = tuple(self._owed)
        for one in owed:
            reservations.delete(txn, one)
        txn.after_commit.append(lambda: self._owed.difference_update(owed))

    def tell(self) -> None:
        """Wake the processes that wait for space: bytes were given back."""
        self._words.bump(SPACE_WORD)

    def _search(
        self, request: SpaceRequest | None, use: Callable[[Txn], T], search: Search, timeout: float = 0.0, *, spends: bool = True
    ) -> T:  # fmt: skip
        """What ``use`` returns in a transaction in which there is room. ``spends``: that of the search's own reservation too."""
        wait_until, full = time.monotonic() + timeout, 0
        try:
            while True:
                self._pick(search)
                try:
                    with self._catalog.write() as txn:
                        if self._owed:
                            self._delete_owed(txn)
                        short = self.make_room(txn, request, search)
                        if short is _FITS or short.fits:
                            if spends and search.reserved is not None:
                                reservations.delete(txn, search.reserved.id)
                            return use(txn)
                        if request is not None and not (search.is_stuck or search.is_hopeless):
                            self._grow(txn, request, search, short)
                        contended = request is not None and reservations.any_others(txn, txn.space(request.space), search.id)
                except DiskFull as error:
                    full += 1
                    if not error.relieved or full > FULL:
                        raise
                    continue
                if search.tails:
                    eviction.reclaim(self._root, self._catalog)
                    search.tails = False
                if not search.is_stuck:
                    continue
                self._give_up(search)  # of two that grow, one must
                # A process that died while it replaced an entry left bytes that no live entry holds: they can be freed like a victim's.
                if search.is_hopeless or not (self._eviction.sweep() or self._others_write(contended, wait_until)):
                    break
                search.is_stuck = False
                search.picks.clear()  # entries that others published are new, and files that a swept tree linked can be evicted now
        except BaseException:
            with interrupts.shielded():
                self._give_up(search)
            raise
        if request is not None:
            self._in_vain[request.space] = time.monotonic() + IN_VAIN, self.room.charge_of(request)
        raise self._no_space(request, short, search.is_hopeless)

    def _pick(self, search: Search) -> None:
        # P1 picks the few entries of a space / P2 and P3 evict them and add others / P1 finds none in its transaction: not all are in use
        for scope in search.pick:
            latest = self._eviction.latest
            if search.latest in (None, latest) or search.outdated == OUTDATED:
                search.picks[scope] = search.picks.get(scope, 0) + 1
            else:
                search.outdated += 1
            search.latest = latest
            self._ranking.pick(scope)
        search.pick.clear()

    def _others_write(self, contended: bool, wait_until: float) -> bool:
        """Whether others hold space for writes in progress, and there is time to wait for them; then some time has passed."""
        if not contended or time.monotonic() >= wait_until:
            return False
        self._words.sleep(SPACE_WORD, 0.02)
        interrupts.point()
        return True

    def grant(self, txn: Txn, request: SpaceRequest, search: Search) -> Reservation:
        """Reserve space that there is; a `Search` that has found nothing yet gets a reservation of its own."""
        id, held, charge = search.id or txn.new_ids()[0], search.reserved, self.room.charge_of(request)
        row = Reservation(
            id, self._owners.me(), self._owners.who, txn.space(request.space, "values"), request.key, request.keyhash, request.size, charge,
            request.suffix, time.time(), request.entries,
        )  # fmt: skip
        if held is None:
            reservations.insert(txn, row)
        elif reservations.by_id(txn, held.id) is None:
            raise errors.CacheFault(f"the reservation of {request.key!r} is gone: the catalog was recreated")
        else:
            reservations.update(txn, row)
        txn.after_commit.append(partial(setattr, search, "reserved", row))
        return row

    def _grow(self, txn: Txn, request: SpaceRequest, search: Search, short: SpaceDeficit) -> None:
        """Hold what there is by now of what the request needs: others would take it."""
        before = search.before or _NO_RESERVATION
        charge = max(self.room.charge_of(request) - max(short.bytes, 0), before.charge)
        size = max(request.size - max(short.quota, 0), before.size)
        count = max(request.entries - max(short.rows, short.here, 0), before.rows)
        if charge > 0:
            self.grant(txn, request._replace(keyhash=before.keyhash, size=max(size, 0), charged=charge, entries=max(count, 0)), search)

    def _give_up(self, search: Search) -> None:
        """Give back what was reserved by growing. Raises nothing: the caller has an error already."""
        held, before = search.reserved, search.before
        search.reserved = before
        if held is None or held == before:
            return
        try:
            if before is None:
                self.cancel(held.id)
            else:
                self._catalog.insist(lambda txn: reservations.update(txn, before))
                self.tell()
        except (errors.CacheFault, OSError) as error:
            log.info("%s: the reservation %x is given back later: %s", self._root.path, held.id, str(error))

    # -- making room -----------------------------------------------------------------------------------------------

    def make_room(self, txn: Txn, request: SpaceRequest | None, search: Search) -> SpaceDeficit:
        """Evict until a request fits, nothing more is known that can go, or it has taken `AT_MOST`. Returns what is lacking then.

        Files that were evicted are gone by then, in a transaction that was renewed; small values go with the caller's."""
        if request is not None and search.reserved is None and self.room.knows(txn, request):
            return _FITS
        until, went, values_went = time.monotonic() + AT_MOST, False, False
        while True:
            short = self.room.short_of(txn, request, search.id)
            if not short.fits and self._owners.reap(txn):
                short = self.room.short_of(txn, request, search.id)
            if not short.fits and request is not None and request.spills and self._failed_lately(request):
                raise self._no_space(request, short, hopeless=False)
            if short.fits or self._is_hopeless(txn, request, search) or (went and time.monotonic() >= until):
                return short
            if values_went:
                txn.renew()
            if search.tails is None:
                search.tails = eviction.any_left(self._root, txn)
            if search.tails:
                return short
            is_inline = request is not None and request.inline and short.disk <= 0  # what uses free pages itself
            if short.bytes > 0 and not (short.log or is_inline) and txn.give_back(short.bytes):
                txn.renew()
                went, values_went = True, False
                continue
            ended = self._evict(txn, request, search, short)
            if ended is None:
                return short
            went, values_went = True, bool(ended)
            if any(one.kind != "value" for one in ended):
                stuck = self._eviction.stuck
                txn.renew()
                values_went = False
                search.is_stuck = self._eviction.stuck != stuck
                if search.is_stuck:  # to evict more would empty the cache and free nothing
                    return self.room.short_of(txn, request, search.id)
                if search.needed or search.needed_files:
                    self._memo.drop_dead()  # what this process has mapped of victims

    def _failed_lately(self, request: SpaceRequest) -> bool:
        """Whether a search for as much failed a moment ago. A lease that another process has released since is not noticed."""
        until, charge = self._in_vain.get(request.space, (0.0, 0))
        return time.monotonic() < until and self.room.charge_of(request) >= charge

    def _is_hopeless(self, txn: Txn, request: SpaceRequest | None, search: Search) -> bool:
        """Whether a request would not even fit into an empty root."""
        if request is not None:
            limits = self.room.settings.limits()
            of_space = limits.of_space(request.space)
            quota = request.size if of_space.quota is None else of_space.quota
            is_none = 0 in (limits.max_entries, of_space.max_count)
            if self.room.charge_of(request) > (limits.budget or 0) or request.size > quota or is_none:
                search.is_stuck = search.is_hopeless = True
        return search.is_hopeless

    def _evict(self, txn: Txn, request: SpaceRequest | None, search: Search, short: SpaceDeficit) -> list[Ended] | None:
        """Evict one batch: for a quota entries of the space, for the root the coldest of all, after partials of dead fetches. None where
        nothing goes: then the search is stuck, or has to `_pick`."""
        space = txn.space(request.space) if request is not None else 0
        evicts_own = request is None or self.room.settings.limits().policy_of(request.space).evicts_own
        if space and max(short.quota, short.here) > 0:
            need, scope = _Freed(size=short.quota, count=short.here), Scope(only=space)
            may_evict, only = evicts_own, space
        else:
            need, only, may_evict = self._lacking(request, search, short), None, not search.is_stuck
            scope = Scope() if evicts_own or not space else Scope(but=space)
        if search.is_stuck:
            return None
        self._ranking.learn(txn, scope)
        freed, ended = _Freed(), list[Ended]()
        self._drop_partials(txn, need, freed, only)
        if may_evict and not freed.meets(need):
            ended = self._evict_coldest(txn, scope, request, search, freed, need, only_files=short.log > 0 and only is None)
        if only is None:
            search.given, search.given_files = search.given + freed.charge, search.given_files + freed.files
        if freed.count:
            return ended
        search.is_stuck = not search.pick
        return None

    def _lacking(self, request: SpaceRequest | None, search: Search, short: SpaceDeficit) -> _Freed:
        """What must go of the root. The search is stuck where a disk has as little room as before, though what it lacked was evicted: what
        another process has mapped frees nothing, and then more victims would not help either."""
        if 0 < short.disk == short.bytes:
            search.needed = search.needed or short.bytes + _FOR_THE_JOURNAL
            search.is_stuck = search.given >= search.needed
        if short.files > 0:
            search.needed_files = search.needed_files or short.files
            search.is_stuck = search.is_stuck or search.given_files >= search.needed_files
        ahead = 0
        if request is not None and request.inline and short.bytes > 0 and max(short.disk, short.log) <= 0:
            ahead = min((AHEAD - 1) * self.room.charge_of(request), short.budget // PART)
        return _Freed(charge=short.bytes + ahead, count=short.rows, files=short.files)

    def _evict_coldest(
        self, txn: Txn, scope: Scope, request: SpaceRequest | None, search: Search, freed: _Freed, need: _Freed, *, only_files: bool
    ) -> list[Ended]:  # fmt: skip
        ended, left = list[Ended](), BATCH
        replaced = entries.sizes(txn, txn.space(request.space), request.replaces) if request is not None else {}
        # Where all entries are read all the time, each was used since it was picked: then nearly the coldest will do.
        candidates = self._ranking.coldest(scope, exact=search.picks.get(scope, 0) < PICKS)
        while left > 0 and freed.charge < BATCH_BYTES and not freed.meets(need):
            some, planned = list[EvictionCandidate](), replace(freed)
            for candidate in candidates:
                if only_files and candidate.kind == "value":
                    continue
                if candidate.id in replaced:
                    continue
                some.append(candidate)
                planned.add(candidate, is_file=candidate.kind != "value")
                if planned.meets(need) or len(some) >= left or planned.charge >= BATCH_BYTES:
                    break
            if not some:
                if search.picks.get(scope, 0) < PICKS:
                    search.pick.add(scope)
                break
            for one in self._eviction.end(txn, some):  # the others are leased
                search.picks[scope] = 0
                freed.add(one, is_file=one.kind != "value")
                ended.append(one)
                left -= 1
        txn.after_commit.append(lambda: self._count(len(ended)))
        return ended

    def _count(self, count: int) -> None:
        self._counters.add(EVICTIONS, count)
        if count:
            events.emit("evict", self._root.path, entries=count)

    def _drop_partials(self, txn: Txn, need: _Freed, freed: _Freed, only: int | None) -> None:
        """Remove partials of dead fetches, oldest first, each under its key's lock, since a successor may be working on it.

        ``only``: of this space."""
        for left in reservations.abandoned(txn):
            if freed.meets(need):
                break
            if only in (None, left.space) and self.keys.try_lock(left.keyhash, exclusive=True):
                txn.at_end.append(partial(self.keys.unlock, left.keyhash))
                stages.remove_partial(self._root, left.keyhash, left.id)
                blobs.remove(self._root, left.id, keyhash=left.keyhash)
                pack_files.remove(self._root, left.id, keyhash=left.keyhash)
                reservations.delete(txn, left.id)
                freed.add(left, is_file=True)

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
                self.with_room(request, lambda txn: None)
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
        self.keys.close()

    def after_fork_child(self) -> None:
        self._owed = set()  # the parent gives them back


_NO_RESERVATION = Reservation(0, None, "", 0, "", 0, 0, 0, "", 0.0, 0)
_FITS = SpaceDeficit(quota=0, bytes=0, rows=0, free=0, budget=0)
