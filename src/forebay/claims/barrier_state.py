"""What the processes at a barrier share: a row of seats for a round, and one for the round before.

A round has as many seats as parties. Who comes takes the lowest free one; who takes the last begins the next round, and that is what
the others wait for. Two rows of seats are used in turn, so the row of the round before still tells who crossed then.

Every change is made under a lock that falls with its holder, and each step of it is one word: a seat taken or left, or the state, last.
So a process that is killed in between leaves seats that are its own, or a row that is cleared again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import cast

from forebay._kernel import host, mappings, waits
from forebay.claims.members import ClaimContext
from forebay.claims.memory import share
from forebay.claims.named_locks import NamedLock, number, words_of
from forebay.claims.table import Identity, Member

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
