"""Barriers of a claim: its processes wait for each other, but never for a process that died.

The processes at a barrier share a row of seats for the current round, and one for the round before. A round has as many seats as
parties. A process that arrives takes the lowest free seat; the one that takes the last seat begins the next round, and that is what the
others wait for. The two rows alternate, so the row of the previous round still says which processes crossed. The rank of each process is
stored beside its seat: the workers of a rank may be new processes in every round, and come no more if the rank is dead.

Every change is made under a lock that is released when its holder dies, and each step of it stores one word: a seat is taken or freed,
or the state changes, which comes last. So a process that is killed in between leaves seats that are its own, or a row that is cleared
again.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, SupportsIndex, cast

from forebay import _config, errors
from forebay._kernel import fences, host, mappings, waits
from forebay._kernel.interrupts import guarded_methods
from forebay.claims.members import Identity, Member, Members
from forebay.claims.shared import NamedLock, checked_name, map_shared, name_hash, words_of

SEATS = 1024
"""The largest number of parties."""
INFORMED = 1 << 63
"""In a seat of a broken round: its process knows that the round is broken, or is the one that died."""
DEAD = 1 << 15
"""The latter."""
_TAKEN = 1 << 62
_STATE, _BROKEN_AT, _PARTIES = 0, 1, 2  # words; _PARTIES has one for each row
_HEAD = 8
_RANKS = _HEAD + 2 * SEATS  # the first word of the rows of ranks: a rank from 1 on, 0 if it is unknown
_BROKEN = 1  # added to twice the round in the state

# A seat: informed, taken, slot (10 bits), pid (22), the low bits of the start (14), dead, and the number of this process's visit (15).
VISIT = DEAD - 1
_OWNER = (INFORMED - 1) & ~(DEAD | VISIT)

_LOCK_TIMEOUT = 0.5
_MOST_NAMES = 8
_YIELDS = 20


def owner_bits(process: Identity) -> int:
    slot, pid, start = process
    return _TAKEN | (slot & 0x3FF) << 52 | (pid & 0x3FFFFF) << 30 | (start & 0x3FFF) << 16


class BarrierState:
    """The mapped state of a barrier. Methods that end in ``_locked`` require that the caller holds `mutex`."""

    def __init__(self, members: Members, name: str) -> None:
        self.name, self.label = name, f"the barrier {name!r} of {members.name}"
        self._words = mappings.words(map_shared(members, "barrier", name, (_HEAD + 4 * SEATS) * 8))
        self.mutex = NamedLock(members, name, kind="barrier")
        self.futex, self.index = words_of(members), name_hash("barrier wait", name) % waits.COUNT
        self.reported: set[Identity] = set()  # deaths that this process reported at this barrier
        self.reported_anywhere: set[Identity] = members.parts.setdefault(Identity, set())  # at any barrier of the claim
        self.visits = 0

    @property
    def state(self) -> int:
        return self._words[_STATE]

    @property
    def round(self) -> int:
        return self._words[_STATE] >> 1

    @property
    def is_broken(self) -> bool:
        return bool(self._words[_STATE] & _BROKEN)

    @property
    def broken_at(self) -> float:
        return self._words[_BROKEN_AT] / 1e9

    @property
    def parties(self) -> int:
        return self._words[_PARTIES + self.round % 2]

    def seats(self) -> list[int]:
        """Return the seats of this round, 0 for a free one."""
        return self._row(self.round)

    def previous_seats(self) -> list[int]:
        """Return the seats of the previous round."""
        return self._row(self.round + 1)

    def _row(self, number: int, first: int = _HEAD) -> list[int]:
        first += number % 2 * SEATS
        return self._words[first : first + self._words[_PARTIES + number % 2]].tolist()

    def expected_ranks(self) -> set[int]:
        """Return the ranks whose processes came to the previous round."""
        return self._ranks(self.round + 1, 0)

    def missed_ranks(self, parties: int) -> set[int]:
        """Return the ranks of which this round misses a process that had not come, if it is broken; else those of which the previous round
        did, if that had so many parties."""
        if self.is_broken:
            return self._ranks(self.round, DEAD)
        previous = self.round + 1
        return self._ranks(previous, DEAD) if self.broken_at and self._words[_PARTIES + previous % 2] == parties else set()

    def _ranks(self, number: int, mark: int) -> set[int]:
        pairs = zip(self._row(number), self._row(number, _RANKS), strict=True)
        return {rank - 1 for seat, rank in pairs if seat and rank and seat & DEAD == mark}

    def set_seat_locked(self, seat: int, value: int) -> None:
        host.set_word(self._words, _HEAD + self.round % 2 * SEATS + seat, value)

    def give_seat_locked(self, seat: int, value: int, rank: int | None) -> None:
        """Set a seat with the rank of its process, which counts as soon as the seat is taken."""
        host.set_word(self._words, _RANKS + self.round % 2 * SEATS + seat, 0 if rank is None else rank + 1)
        self.set_seat_locked(seat, value)

    def set_parties_locked(self, parties: int) -> None:
        """Set the number of parties while no process waits."""
        self._clear_locked(self.round)
        host.set_word(self._words, _PARTIES + self.round % 2, parties)

    def next_round_locked(self) -> None:
        """Begin the next round: the waiting processes have crossed. The caller wakes them after."""
        after = self.round + 1
        parties = self.parties
        self._clear_locked(after)
        host.set_word(self._words, _PARTIES + after % 2, parties)
        fences.fence()  # who crosses sees what all stored before they came, in the arrays of the claim too
        host.set_word(self._words, _STATE, after << 1)

    def _clear_locked(self, number: int) -> None:
        for word, value in enumerate(self._row(number), _HEAD + number % 2 * SEATS):
            if value:
                host.set_word(self._words, word, 0)

    def break_locked(self) -> None:
        """Mark the round as broken. The caller wakes the waiting processes after."""
        host.set_word(self._words, _BROKEN_AT, time.monotonic_ns())
        fences.fence()
        host.set_word(self._words, _STATE, self.state | _BROKEN)


def state_of(members: Members, name: str) -> BarrierState:
    """Return the state of a barrier, one object per process: a death is reported to the process, not to each of its threads."""
    members.check()
    state = members.parts.get((BarrierState, name))
    if state is None:
        state = members.parts.setdefault((BarrierState, name), BarrierState(members, name))
    return cast(BarrierState, state)


class MemberSnapshot:
    """The members of a claim at one moment."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.live = [member for member in members if member.state == "in"]
        self._by_owner = {owner_bits(member.identity): member for member in members}
        ranks = {member.rank for member in self.live} | {None}
        self.lost = [member for member in members if member.state == "vanished" and member.rank not in ranks]
        """The dead of ranks that have no process any more."""

    def occupant(self, seat: int) -> Member | None:
        """Return the member in a seat; None if it is free, or its process left."""
        return self._by_owner.get(seat & _OWNER)

    def occupants(self, seats: Iterable[int]) -> list[Member]:
        """Return the members in these seats."""
        return [member for member in map(self.occupant, seats) if member is not None]


# -- waiting -----------------------------------------------------------------------------------------------------------


@guarded_methods()
class Barrier:
    """A barrier of a claim, for processes and their threads: each call of `wait` is one arrival.

    Callable from any thread, and in forked children; unpickling gives the same barrier."""

    def __init__(self, members: Members, name: str) -> None:
        """Raises ConfigError, NoSpace, Closed."""
        self.name = checked_name(name)
        self._members = members
        self._state = state_of(members, self.name)

    def __repr__(self) -> str:
        return f"<the barrier {self.name!r} of {self._members.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Barrier, (self._members, self.name)

    def wait(self, parties: SupportsIndex | None = None, timeout: float | None = None) -> int:
        """Wait until ``parties`` have arrived. Returns the number of this arrival, from 0 on, each number once.

        The first call sets ``parties``; a later call with another number changes it if no process waits, else raises `ConfigError`.

        Raises `BarrierBroken`, within 0.1 s, if a process died that waited here, or crossed this barrier the last time, or that, before
        the first crossing, may have been one of the parties; or a rank whose workers did, once it has no process any more, even if it died
        before this process began. Each survivor gets that once; one that comes again waits for the others.
        Raises `WaitTimeout` after ``timeout`` seconds: it names the missing processes, and disturbs no other process; neither does
        Ctrl-C. A process that ends in order, or leaves the claim, breaks nothing."""
        state = self._state
        visit = _Visit(self._members, state, self._checked(parties), _config.parse_timeout(timeout))
        try:
            return waits.wait_for(visit.attempt, state.futex, state.index, what=visit.describe_missing, timeout=timeout, by="missing:")
        except errors.WaitTimeout:
            arrival = visit.take_back(timed_out=True)
            if arrival is None:
                raise
            return arrival
        except BaseException:
            visit.take_back()
            raise

    def _checked(self, parties: SupportsIndex | None) -> int | None:
        if parties is None:
            return None
        if isinstance(parties, SupportsIndex) and not isinstance(parties, bool) and 0 < operator.index(parties) <= SEATS:
            return operator.index(parties)
        raise errors.ConfigError(f"{self!r} is for 1 to {SEATS:,} parties, not {parties!r}", name="parties", value=repr(parties))


class _Visit:
    """One call of `Barrier.wait`."""

    def __init__(self, members: Members, state: BarrierState, parties: int | None, timeout: float | None) -> None:
        self._members, self._state, self._parties = members, state, parties
        self._began, self._timeout = time.monotonic(), timeout
        self._round = self._seat = -1
        self._mark = 0  # the value of our seat
        state.visits += 1

    def attempt(self) -> int | None:
        """Return the number of this arrival once the round is over."""
        state = self._state
        if self._seat < 0:
            arrival = self._locked(self._arrive_locked, self._remaining())
            return arrival if arrival is not None or self._seat < 0 else self._linger()
        if state.round != self._round:
            return self._seat
        if state.is_broken or self._is_suspect():
            return self._locked(self._check_round_locked, self._remaining())
        return None

    def _linger(self) -> int | None:
        """Let other processes run for a moment: often the last party arrives before this process could fall asleep."""
        state, before = self._state, self._round << 1
        for _ in range(_YIELDS):
            if state.state != before:
                break
            os.sched_yield()
        return self._seat if state.round != self._round else None

    def _remaining(self) -> float | None:
        return None if self._timeout is None else max(0.0, self._began + self._timeout - time.monotonic())

    def _locked(self, work: Callable[[], int | None], timeout: float | None) -> int | None:
        state = self._state
        before = state.state
        try:
            with state.mutex.within(timeout):
                return work()
        finally:
            if state.state != before:
                state.futex.bump(state.index)  # not earlier: a woken process that arrives again would have to wait for our lock

    # -- arriving --------------------------------------------------------------------------------------------------

    def _arrive_locked(self) -> int | None:
        state = self._state
        if state.is_broken:
            self._settle_locked()
        if state.is_broken and self._is_latecomer(self._snapshot()):
            self._raise_broken_locked()
        ranks = state.missed_ranks(self._parties or state.parties)
        if ranks and (lost := self._lost(self._snapshot(), ranks)):
            raise self._told(lost)  # only to this process: the others know, and may go on without that rank
        if state.is_broken:
            return None  # this process knows, or need not know: the next round begins when all others know
        self._agree_locked()
        seats = state.seats()
        if 0 not in seats:
            self._find_deaths_locked()
            seats = state.seats()
            if 0 not in seats:
                return None  # more processes than parties arrived: wait for the next round
        self._sit_locked(seats.index(0))
        if seats.count(0) > 1:
            return None
        return self._check_round_locked()

    def _sit_locked(self, seat: int) -> None:
        # First noted here, then stored: Ctrl-C in between takes back an arrival that was never stored.
        self._mark = owner_bits(self._members.identity) | self._state.visits & VISIT
        self._round, self._seat = self._state.round, seat
        self._state.give_seat_locked(seat, self._mark, self._members.rank)

    def _agree_locked(self) -> None:
        """Agree on the number of parties."""
        state, parties = self._state, self._parties
        if parties is None and not state.parties:
            raise errors.ConfigError(f"{state.label} is used for the first time: pass the number of parties")
        if parties is None or parties == state.parties:
            return
        if any(state.seats()):
            self._find_deaths_locked()
        waiting = len(state.seats()) - state.seats().count(0)
        if waiting:
            raise errors.ConfigError(f"{state.label}: {waiting} of {state.parties} parties wait, so it cannot be for {parties} now")
        state.set_parties_locked(parties)

    def _check_round_locked(self) -> int | None:
        """Check, after our arrival, whether the round is complete or broken."""
        state = self._state
        if state.round != self._round:
            return self._seat
        if state.is_broken:
            self._raise_broken_locked()
        seats = state.seats()
        if 0 not in seats and self._all_live(seats):
            state.next_round_locked()
            return self._seat
        self._find_deaths_locked()
        if state.seats()[self._seat] != self._mark:  # others took us for dead: our lock on the claim had been lost
            self._seat = -1
            return self._arrive_locked()
        return None

    # -- deaths ----------------------------------------------------------------------------------------------------

    def _all_live(self, seats: list[int]) -> bool:
        """Whether all processes in these seats live."""
        processes = ((seat, self._members.occupant(seat >> 52 & 0x3FF)) for seat in seats)
        return all(process is not None and seat & _OWNER == owner_bits(process) for seat, process in processes)

    def _is_suspect(self) -> bool:
        """Whether a process that sits here is gone, the round may be complete, or a member died."""
        snapshot, seats = self._snapshot(), self._state.seats()
        occupants = [snapshot.occupant(value) for value in seats if value]
        gone = any(member is None or member.state != "in" for member in occupants)
        return gone or 0 not in seats or any(map(self._is_news, snapshot.members)) or bool(self._lost(snapshot))

    def _snapshot(self) -> MemberSnapshot:
        return MemberSnapshot(self._members.everyone())

    def _is_news(self, member: Member) -> bool:
        """Whether a member's death is to be reported to this process: not if it died before this process joined."""
        process = member.identity
        return member.state == "vanished" and process not in self._state.reported and process not in self._members.dead_before

    def _lost(self, snapshot: MemberSnapshot, ranks: set[int] | None = None) -> list[Member]:
        """Return the dead of lost ranks, or of these of them, of which this process was not told at this barrier."""
        lost = [member for member in snapshot.lost if ranks is None or member.rank in ranks]
        return [member for member in lost if member.identity not in self._state.reported]

    def _find_deaths_locked(self) -> None:
        """Free the seats of processes that left. Break the round, and raise `BarrierBroken`, if a process died that it misses."""
        state, snapshot = self._state, self._snapshot()
        waiting, dead = [], {}
        for seat, value in enumerate(state.seats()):
            member = snapshot.occupant(value)
            if member is not None and member.state == "in":
                waiting.append(member)
            elif member is not None and member.state == "vanished":
                dead[seat] = member
            elif value:
                state.set_seat_locked(seat, 0)
        if missed := self._missed(snapshot, waiting, list(dead.values())):
            self._break_locked(missed, dead)
            self._raise_broken_locked()
        own = next((member.joined for member in snapshot.live if member.slot == self._members.slot), 0.0)
        if all(own <= member.joined for member in waiting):
            for seat in dead:  # no waiting process was a member when they died
                state.set_seat_locked(seat, 0)

    def _missed(self, snapshot: MemberSnapshot, waiting: list[Member], dead: list[Member]) -> list[Member]:
        """Return the dead members that waited here, or crossed the last time, and those of lost ranks whose workers crossed then.

        While it is not known which processes are the parties, also the dead at the same depth as the waiting processes (such as all
        ranks, or all workers), those of lost ranks whose workers would be at it, and any dead member if too few are left; except those
        that another barrier reported already."""
        state = self._state
        previous, parties = state.previous_seats(), self._parties or state.parties
        missed = [*dead, *snapshot.occupants(seat for seat in previous if not seat & DEAD)]  # the others are informed already
        if len(previous) - previous.count(0) >= parties:
            lost = self._lost(snapshot, state.expected_ranks())
        else:
            may_come = {member.slot for member in snapshot.live} - {member.slot for member in waiting}
            depths = {self._members.depth, *(member.depth for member in waiting)}
            too_few = len(waiting) + len(may_come) < parties
            possible = [member for member in snapshot.members if too_few or member.depth in depths]
            missed += [member for member in possible if member.identity not in state.reported_anywhere]
            possible = [member for member in self._lost(snapshot) if member.depth < max(depths)]
            lost = [member for member in possible if member.identity not in state.reported_anywhere]
        return list(dict.fromkeys([*filter(self._is_news, missed), *lost]))

    def _break_locked(self, missed: list[Member], dead: dict[int, Member]) -> None:
        """Break the round. Each missed member gets a seat, so that processes that are informed later can name it; the seats that are still
        free are for processes that arrive late."""
        state, seats = self._state, self._state.seats()
        free = [seat for seat, value in enumerate(seats) if not value]
        for member in missed:
            if member not in dead.values() and free:
                state.give_seat_locked(free.pop(), owner_bits(member.identity) | INFORMED | DEAD, member.rank)
        for seat in dead:
            state.give_seat_locked(seat, seats[seat] | INFORMED | DEAD, None)  # it came itself: who comes later misses no worker of it
        state.break_locked()

    def _raise_broken_locked(self) -> NoReturn:
        """Raise `BarrierBroken`, and note that this process is informed."""
        state, snapshot = self._state, self._snapshot()
        seats = state.seats()
        if self._seat >= 0:
            state.set_seat_locked(self._seat, self._mark | INFORMED)
        elif self._is_latecomer(snapshot):
            state.give_seat_locked(seats.index(0), owner_bits(self._members.identity) | INFORMED, self._members.rank)
        self._seat = -1
        error = self._told(snapshot.occupants(seat for seat in seats if seat & DEAD))  # who died since breaks the next round, for all
        self._settle_locked()
        raise error

    def _told(self, missing: list[Member]) -> errors.BarrierBroken:
        """Return the error, and note that this process was told."""
        for reported in (self._state.reported, self._state.reported_anywhere):
            reported.update(member.identity for member in missing)
        names = [member.describe() for member in missing]
        return errors.BarrierBroken(
            f"{self._state.label} is broken: {_listed(names) or 'a process that took part'} died",
            barrier=self._state.name, missing=names, waited=time.monotonic() - self._began,
        )  # fmt: skip

    def _settle_locked(self) -> None:
        """Begin a new round if all live processes know that this one is broken. It misses those that died since: each gets a seat here."""
        state, snapshot = self._state, self._snapshot()
        present = snapshot.occupants(state.seats())
        for member in self._missed(snapshot, [member for member in present if member.state == "in"], []):
            if member not in present and 0 in (seats := state.seats()):
                state.give_seat_locked(seats.index(0), owner_bits(member.identity), member.rank)
        if not self._untold(snapshot):
            state.next_round_locked()

    def _untold(self, snapshot: MemberSnapshot) -> list[Member]:
        """Return the live members that have to be informed yet."""
        waiting = snapshot.occupants(seat for seat in self._state.seats() if not seat & INFORMED)
        return [*(member for member in waiting if member.state == "in"), *self._latecomers(snapshot)]

    def _latecomers(self, snapshot: MemberSnapshot) -> list[Member]:
        """Return the members that may still arrive at a broken round, and have to be informed."""
        state, seats = self._state, self._state.seats()
        if 0 not in seats:
            return []
        present, previous = snapshot.occupants(seats), state.previous_seats()
        absent = [member for member in snapshot.live if member not in present and member.joined < state.broken_at]
        if previous.count(0) or len(previous) < state.parties:
            depths = {member.depth for member in present if member not in snapshot.lost}
            return [member for member in absent if member.depth in depths]
        return [member for member in absent if member in snapshot.occupants(previous)]

    def _is_latecomer(self, snapshot: MemberSnapshot) -> bool:
        return any(member.slot == self._members.slot for member in self._latecomers(snapshot))

    # -- leaving ---------------------------------------------------------------------------------------------------

    def take_back(self, *, timed_out: bool = False) -> int | None:
        """Undo this arrival. Returns its number if the round was complete before that.

        ``timed_out``: raises `BarrierBroken` if the round was broken before."""
        if self._seat < 0:
            return None
        state = self._state
        try:
            return self._locked(self._give_up_locked if timed_out else self._leave_locked, _LOCK_TIMEOUT)
        except errors.WaitTimeout:  # the holder of the lock is stopped
            if state.round == self._round:
                self._leave_locked()  # no other process stores to our seat, but the holder may have counted it
        return None

    def _give_up_locked(self) -> int | None:
        arrival = self._check_round_locked()
        if arrival is None and self._seat >= 0:
            self._leave_locked()
        return arrival

    def _leave_locked(self) -> None:
        state = self._state
        if state.round != self._round or state.seats()[self._seat] != self._mark:
            return
        state.set_seat_locked(self._seat, self._mark | INFORMED if state.is_broken else 0)
        if state.is_broken:
            self._settle_locked()

    def describe_missing(self) -> tuple[str, str]:
        """Return what is waited for, and who is missing."""
        state, snapshot = self._state, self._snapshot()
        seats = state.seats()
        present, previous = snapshot.occupants(seats), snapshot.occupants(state.previous_seats())
        absent = [member for member in snapshot.live if member not in present]
        left = [member for member in previous if member.state == "left" and not state.is_broken]
        came_last_time = [member for member in absent if member in previous]
        expected = self._untold(snapshot) if state.is_broken else came_last_time or ([] if left else absent)
        names = [
            *(member.describe_with_state() for member in expected),
            *(f"{member.describe()}, which left" for member in dict.fromkeys(left)),
        ]
        lacking = seats.count(0) - len(names)
        others = f"{lacking} who have not joined the claim" if lacking > 0 else ""
        arrived = f"{state.label}, where {len(seats) - seats.count(0)} of {len(seats)} are"
        return arrived, " and ".join(filter(None, [_listed(names), others]))


def _listed(names: list[str]) -> str:
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
