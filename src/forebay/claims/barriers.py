"""Barriers of a claim: its processes wait for each other, and for nobody who died.

What the processes at a barrier share is a row of seats for a round, and one for the round before. A round has as many seats as parties.
Who comes takes the lowest free one; who takes the last begins the next round, and that is what the others wait for. Two rows of seats
are used in turn, so the row of the round before still tells who crossed then.

Every change is made under a lock that falls with its holder, and each step of it is one word: a seat taken or left, or the state, last.
So a process that is killed in between leaves seats that are its own, or a row that is cleared again.
"""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, SupportsIndex, cast

from forebay import _config, errors
from forebay._kernel import host, mappings, waits
from forebay.claims.members import ClaimContext, Identity, Member
from forebay.claims.shared import NamedLock, number, share, with_state, words_of

SEATS = 1024
"""As many parties as a barrier can have."""
SEEN = 1 << 63
"""In a seat of a round that is broken: who sits here knows, or is who died."""
GONE = 1 << 15
"""The latter."""
_TAKEN = 1 << 62
_STATE, _BROKEN_AT, _PARTIES = 0, 1, 2  # words; of _PARTIES one for each row
_HEAD = 8
_BROKEN = 1  # in the state: the round times two, and this

# A seat: seen, taken, slot (10 bits), pid (22), the low bits of the start (14), gone, and which visit of that process (15).
VISIT = GONE - 1
_OWNER = (SEEN - 1) & ~(GONE | VISIT)


def owner(who: Identity) -> int:
    slot, pid, start = who
    return _TAKEN | (slot & 0x3FF) << 52 | (pid & 0x3FFFFF) << 30 | (start & 0x3FFF) << 16


def slot_of(seat: int) -> int:
    return seat >> 52 & 0x3FF


def is_of(seat: int, who: Identity) -> bool:
    return seat & _OWNER == owner(who)


class Board:
    """The mapped state of a barrier, as this process has it. Methods that end in ``_locked``: the caller holds `mutex`."""

    def __init__(self, house: ClaimContext, name: str) -> None:
        self.name, self.what = name, f"the barrier {name!r} of {house.name}"
        self._words = mappings.words(share(house, "barrier", name, (_HEAD + 2 * SEATS) * 8))
        self.mutex = NamedLock(house, name, kind="barrier")
        self.futex, self.index = words_of(house), number("barrier wait", name) % waits.COUNT
        self.told: set[Identity] = set()  # whose death this process was told of here
        self.heard: set[Identity] = house.parts.setdefault(Identity, set())  # and at any barrier of the claim
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
        """This round's, 0 where one is free."""
        return self._row(self.round)

    def seats_before(self) -> list[int]:
        """Those of the round before."""
        return self._row(self.round + 1)

    def _row(self, which: int) -> list[int]:
        first = _HEAD + which % 2 * SEATS
        return self._words[first : first + self._words[_PARTIES + which % 2]].tolist()

    def set_seat_locked(self, seat: int, value: int) -> None:
        host.set_word(self._words, _HEAD + self.round % 2 * SEATS + seat, value)

    def set_parties_locked(self, parties: int) -> None:
        """Caller: nobody waits."""
        self._clear_locked(self.round)
        host.set_word(self._words, _PARTIES + self.round % 2, parties)

    def next_round_locked(self) -> None:
        """Begin it: who waits has crossed. Caller: calls `wake` after."""
        after = self.round + 1
        parties = self.parties
        self._clear_locked(after)
        host.set_word(self._words, _PARTIES + after % 2, parties)
        host.set_word(self._words, _STATE, after << 1)

    def _clear_locked(self, which: int) -> None:
        for seat, value in enumerate(self._row(which), _HEAD + which % 2 * SEATS):
            if value:
                host.set_word(self._words, seat, 0)

    def break_locked(self) -> None:
        """Have everybody who waits told. Caller: calls `wake` after."""
        host.set_word(self._words, _BROKEN_AT, time.monotonic_ns())
        host.set_word(self._words, _STATE, self.state | _BROKEN)

    def wake(self) -> None:
        """Wake who waits: they have crossed, or are told."""
        self.futex.bump(self.index)


def board_of(house: ClaimContext, name: str) -> Board:
    """One a process: what it was told, it was told in all its threads."""
    house.check()
    found = house.parts.get((Board, name))
    if found is None:
        found = house.parts.setdefault((Board, name), Board(house, name))
    return cast(Board, found)


class MemberSnapshot:
    """The members of a claim, as they were at one look."""

    def __init__(self, members: list[Member]) -> None:
        self.members = members
        self.live = [member for member in members if member.state == "in"]
        self._owners = {owner(member.identity): member for member in members}

    def who(self, seat: int) -> Member | None:
        """Who sits there; None where nobody does, or one who left."""
        return self._owners.get(seat & _OWNER)

    def sitting(self, seats: Iterable[int]) -> list[Member]:
        """Who sits in some of these."""
        return [member for member in map(self.who, seats) if member is not None]

    def joined(self, slot: int) -> float:
        return next((member.joined for member in self.live if member.slot == slot), 0.0)


_LOCK_AGAIN = 0.5
_WOKEN_WITHIN = 10.0
_NAMED = 8
_YIELDS = 20


class Barrier:
    """A barrier of a claim, for processes and their threads: each call of `wait` is one who came.

    Callable from any thread, and in forked children; who unpickles it has the same barrier."""

    def __init__(self, house: ClaimContext, name: str) -> None:
        """Raises ConfigError, NoSpace, Closed."""
        self.name = name
        self._house = house
        self._board = board_of(house, name)

    def __repr__(self) -> str:
        return f"<the barrier {self.name!r} of {self._house.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Barrier, (self._house, self.name)

    def wait(self, parties: SupportsIndex | None = None, timeout: float | None = None) -> int:
        """Wait until ``parties`` have come; gives which of them this was, from 0 on, each number once.

        ``parties`` is learned at the first call; a call with another number changes it while nobody waits, else it is a `ConfigError`.
        Raises `BarrierBroken`, 0.1 s later, where a process died that waited here, or crossed this barrier the last time, or, before the
        first crossing, may have been one of the parties: each survivor gets that once, then the barrier can be used again. Raises
        `WaitTimeout` after ``timeout`` seconds: it names who has not come, and disturbs nobody else; so does Ctrl-C. A process that
        ends by itself, or leaves the claim, breaks nothing."""
        board = self._board
        visit = _Visit(self._house, board, self._count(parties), _config.parse_timeout(timeout))
        try:
            return waits.wait_for(visit.attempt, board.futex, board.index, what=visit.whom, timeout=timeout, by="missing:")
        except errors.WaitTimeout:
            crossed = visit.take_back(timed_out=True)
            if crossed is None:
                raise
            return crossed
        except BaseException:
            visit.take_back()
            raise

    def _count(self, parties: SupportsIndex | None) -> int | None:
        if parties is None:
            return None
        if isinstance(parties, SupportsIndex) and not isinstance(parties, bool) and 0 < operator.index(parties) <= SEATS:
            return operator.index(parties)
        raise errors.ConfigError(f"{self!r} is for 1 to {SEATS:,} parties, not {parties!r}", name="parties", value=repr(parties))


class _Visit:
    """One call of `Barrier.wait`."""

    def __init__(self, house: ClaimContext, board: Board, parties: int | None, timeout: float | None) -> None:
        self._house, self._board, self._parties = house, board, parties
        self._began, self._timeout = time.monotonic(), timeout
        self._round = self._seat = -1
        self._mark = 0  # what stands in our seat
        board.visits += 1

    def attempt(self) -> int | None:
        """The number of this arrival, once the round is over."""
        board = self._board
        if self._seat < 0:
            found = self._locked(self._arrive_locked, self._left())
            return found if found is not None or self._seat < 0 else self._linger()
        if board.round != self._round:
            return self._seat
        if board.is_broken or self._is_suspect():
            return self._locked(self._look_locked, self._left())
        return None

    def _linger(self) -> int | None:
        """Let others run for a moment: often the last one comes before we would be asleep."""
        board, state = self._board, self._round << 1
        for _ in range(_YIELDS):
            if board.state != state:
                break
            os.sched_yield()
        return self._seat if board.round != self._round else None

    def _left(self) -> float | None:
        return None if self._timeout is None else max(0.0, self._began + self._timeout - time.monotonic())

    def _locked(self, work: Callable[[], int | None], timeout: float | None) -> int | None:
        board = self._board
        before = board.state
        try:
            with board.mutex.within(timeout):
                return work()
        finally:
            if board.state != before:
                board.wake()  # not earlier: who wakes comes again, and would have to wait for our lock

    # -- coming ----------------------------------------------------------------------------------------------------

    def _arrive_locked(self) -> int | None:
        board = self._board
        if board.is_broken:
            self._settle_locked()
        if board.is_broken and self._others_are_about_to_know():
            return None
        if board.is_broken:
            self._be_told_locked()
        self._agree_locked()
        if board.is_broken:
            self._be_told_locked()
        seats = board.seats()
        if 0 not in seats:
            self._judge_locked()
            if board.is_broken:
                self._be_told_locked()
            seats = board.seats()
            if 0 not in seats:
                return None  # more have come than parties: for the next round
        self._sit_locked(seats.index(0))
        if seats.count(0) > 1:
            return None
        return self._look_locked()

    def _sit_locked(self, seat: int) -> None:
        # First noted here, then there: Ctrl-C in between takes back what is not there.
        self._mark = owner(self._house.members.identity) | self._board.visits & VISIT
        self._round, self._seat = self._board.round, seat
        self._board.set_seat_locked(seat, self._mark)

    def _agree_locked(self) -> None:
        """On the number of parties."""
        board, wanted = self._board, self._parties
        if wanted is None and not board.parties:
            raise errors.ConfigError(f"{board.what} is used for the first time: say how many parties it is for")
        if wanted is None or wanted == board.parties:
            return
        if any(board.seats()):
            self._judge_locked()
        waiting = len(board.seats()) - board.seats().count(0)
        if waiting and not board.is_broken:
            raise errors.ConfigError(f"{board.what}: {waiting} of {board.parties} parties wait, so it cannot be for {wanted} now")
        if not waiting:
            board.set_parties_locked(wanted)

    def _look_locked(self) -> int | None:
        """After we have come: the round may be whole, or broken."""
        board = self._board
        if board.round != self._round:
            return self._seat
        if not board.is_broken:
            seats = board.seats()
            if 0 not in seats and self._all_are_in(seats):
                board.next_round_locked()
                return self._seat
            self._judge_locked()
        if board.is_broken:
            self._be_told_locked()
        if board.seats()[self._seat] != self._mark:  # others took us for gone: our lock on the claim had been lost
            self._seat = -1
            return self._arrive_locked()
        return None

    # -- deaths ----------------------------------------------------------------------------------------------------

    def _all_are_in(self, seats: list[int]) -> bool:
        """Whether all who sit here live."""
        members = self._house.members
        return all((who := members.occupant(slot_of(seat))) is not None and is_of(seat, who) for seat in seats)

    def _mourns(self, member: Member) -> bool:
        """Whether its death is news to this process. Who had died before it came is others' affair."""
        who = member.identity
        return member.state == "vanished" and who not in self._board.told and who not in self._house.members.before

    def _is_suspect(self) -> bool:
        """Whether there is something to judge."""
        crowd, seats = MemberSnapshot(self._house.members.records()), self._board.seats()
        owners = [crowd.who(value) for value in seats if value]
        gone = any(member is None or member.state != "in" for member in owners)
        return gone or 0 not in seats or any(map(self._mourns, crowd.members))

    def _judge_locked(self) -> None:
        """Free the seats of those who left, and break the round where somebody died whom it misses."""
        board, crowd = self._board, MemberSnapshot(self._house.members.records())
        waiting, dead = [], {}
        for seat, value in enumerate(board.seats()):
            member = crowd.who(value)
            if member is not None and member.state == "in":
                waiting.append(member)
            elif member is not None and member.state == "vanished":
                dead[seat] = member
            elif value:
                board.set_seat_locked(seat, 0)
        if missed := self._missed(crowd, waiting, list(dead.values())):
            self._break_locked(missed, dead)
        elif all(crowd.joined(self._house.members.slot) <= member.joined for member in waiting):
            for seat in dead:  # nobody who waits was there when they died
                board.set_seat_locked(seat, 0)

    def _missed(self, crowd: MemberSnapshot, waiting: list[Member], dead: list[Member]) -> list[Member]:
        """Who died that waited, or crossed the last time. Where nobody can know yet who is to come, also who stands as high as those who
        wait, as ranks do, and workers among themselves; and anybody, if now there are too few; unless another barrier told us already."""
        board = self._board
        before, parties = board.seats_before(), self._parties or board.parties
        found = [*dead, *crowd.sitting(seat for seat in before if not seat & GONE)]  # those are told already
        if len(before) - before.count(0) < parties:
            may_come = {member.slot for member in crowd.live} - {member.slot for member in waiting}
            depths = {self._house.members.depth, *(member.depth for member in waiting)}
            too_few = len(waiting) + len(may_come) < parties
            may_miss = [member for member in crowd.members if too_few or member.depth in depths]
            found += [member for member in may_miss if member.identity not in board.heard]
        return list(dict.fromkeys(filter(self._mourns, found)))

    def _break_locked(self, missed: list[Member], dead: dict[int, Member]) -> None:
        """Each who is missed gets a seat, so that those who are told later know whom; what is free then is for who comes late."""
        board, seats = self._board, self._board.seats()
        free = [seat for seat, value in enumerate(seats) if not value]
        for member in missed:
            if member not in dead.values() and free:
                board.set_seat_locked(free.pop(), owner(member.identity) | SEEN | GONE)
        for seat in dead:
            board.set_seat_locked(seat, seats[seat] | SEEN | GONE)
        board.break_locked()

    def _be_told_locked(self) -> NoReturn:
        """Raise `BarrierBroken`, and note that this visitor knows."""
        board, crowd = self._board, MemberSnapshot(self._house.members.records())
        seats = board.seats()
        if self._seat >= 0:
            board.set_seat_locked(self._seat, self._mark | SEEN)
        elif 0 in seats and any(member.slot == self._house.members.slot for member in self._late(crowd)):
            board.set_seat_locked(seats.index(0), owner(self._house.members.identity) | SEEN)
        self._seat = -1
        missing = [member for member in crowd.sitting(seats) if member.state == "vanished"]
        for known in (board.told, board.heard):
            known.update(member.identity for member in missing)
        self._settle_locked()
        names = [member.describe() for member in missing]
        raise errors.BarrierBroken(
            f"{board.what} is broken: {_listed(names) or 'one who took part'} died",
            barrier=self._board.name, missing=names, waited=time.monotonic() - self._began,
        )  # fmt: skip

    def _settle_locked(self) -> None:
        """Begin anew where all who live know that the round is broken."""
        board, crowd = self._board, MemberSnapshot(self._house.members.records())
        unaware = [member for member in crowd.sitting(value for value in board.seats() if not value & SEEN) if member.state == "in"]
        if not unaware and not self._late(crowd):
            board.next_round_locked()

    def _others_are_about_to_know(self) -> bool:
        """Whether it is only for those who were woken, and need a moment: one who was told and comes again is not told twice for that."""
        crowd = MemberSnapshot(self._house.members.records())
        unaware = crowd.sitting(seat for seat in self._board.seats() if not seat & SEEN)
        return (
            time.monotonic() - self._began < _WOKEN_WITHIN and not self._late(crowd) and not any(member.is_stopped() for member in unaware)
        )

    def _late(self, crowd: MemberSnapshot) -> list[Member]:
        """Who may still come to a broken round, and has to be told."""
        board, seats = self._board, self._board.seats()
        if 0 not in seats:
            return []
        here, before = crowd.sitting(seats), board.seats_before()
        late = [member for member in crowd.live if member not in here and member.joined < board.broken_at]
        if before.count(0) or len(before) < board.parties:
            return [member for member in late if member.depth in {member.depth for member in here}]
        return [member for member in late if member in crowd.sitting(before)]

    # -- going -----------------------------------------------------------------------------------------------------

    def take_back(self, *, timed_out: bool = False) -> int | None:
        """Not to have come. Gives the number of the arrival if the round was whole before that.

        ``timed_out``: raises `BarrierBroken` if it was broken before."""
        if self._seat < 0:
            return None
        board = self._board
        try:
            return self._locked(self._give_up_locked if timed_out else self._leave_locked, _LOCK_AGAIN)
        except errors.WaitTimeout:  # who has the lock stands still
            if board.round == self._round:
                self._leave_locked()  # nobody else stores to our seat, but he may have counted it
        return None

    def _give_up_locked(self) -> int | None:
        found = self._look_locked()
        if found is None and self._seat >= 0:
            self._leave_locked()
        return found

    def _leave_locked(self) -> None:
        board = self._board
        if board.round != self._round or board.seats()[self._seat] != self._mark:
            return
        board.set_seat_locked(self._seat, self._mark | SEEN if board.is_broken else 0)
        if board.is_broken:
            self._settle_locked()

    def whom(self) -> tuple[str, str]:
        """What is waited for, and who has not come, in words."""
        board, crowd = self._board, MemberSnapshot(self._house.members.records())
        seats = board.seats()
        here, before = crowd.sitting(seats), crowd.sitting(board.seats_before())
        absent, left = [member for member in crowd.live if member not in here], [member for member in before if member.state == "left"]
        expected = [member for member in absent if member in before] or ([] if left else absent)
        names = [*map(with_state, expected), *(f"{member.describe()}, which left" for member in dict.fromkeys(left))]
        lacking = seats.count(0) - len(names)
        more = f"{lacking} who have not joined the claim" if lacking > 0 else ""
        return f"{board.what}, where {len(seats) - seats.count(0)} of {len(seats)} are", " and ".join(filter(None, [_listed(names), more]))


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
