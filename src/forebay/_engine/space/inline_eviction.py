"""A small value in the place of the coldest small values: all in one transaction, since these have no files that must go in between.

Anything less plain goes the long way of `budget`: a quota and the budget at once, a full disk, a coldest entry that is a file, what
dead fetches left.
"""

from __future__ import annotations

from forebay._engine.catalog import Txn, reservations, spaces
from forebay._engine.index.counters import EVICTIONS, Counters
from forebay._engine.space.budget import Budget, SpaceDeficit, SpaceRequest
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.ranking import Ranking, Scope
from forebay._model import Policy

AT_ONCE = 64
AHEAD = 8
"""Room is made for so many values of this size, so that not every put has to look for some; at most `PART` of the budget."""
PART = 256
_ALL = Scope()


class InlineEviction:
    """The short way to room for a small value."""

    def __init__(self, budget: Budget, eviction: Eviction, ranking: Ranking, counters: Counters) -> None:
        self._budget, self._eviction, self._ranking, self._counters = budget, eviction, ranking, counters

    def make_room(self, txn: Txn, want: SpaceRequest) -> tuple[bool, int]:
        """Whether ``want`` fits now, and how many went for it. Caller: calls `tell` after the commit."""
        short = self._budget.room.short(txn, want)
        txn.leftovers |= short.leftovers
        if short.fits or not self._is_plain(txn, want, short):
            return short.fits, 0
        of_space = short.quota > 0 or short.here > 0
        scope = Scope(only=want.space) if of_space else _ALL
        lacking, count = (short.quota, short.here) if of_space else (short.bytes + self._ahead(want, short), short.rows)
        gone = 0
        for _ in range(AT_ONCE):
            if lacking <= 0 and count <= 0:
                break
            cold = next(self._ranking.coldest(scope), None)
            if cold is None:
                break
            if cold.kind != "value":
                self._ranking.give_back(scope, cold)
                break
            if cold.id != want.replaces and self._eviction.drop_value(txn, cold.id, cold.slot):
                lacking, count, gone = lacking - (cold.size if of_space else cold.charge), count - 1, gone + 1
        return self._budget.room.fits(txn, want), gone

    def _ahead(self, want: SpaceRequest, short: SpaceDeficit) -> int:
        """Of a space's own quota nothing is given up ahead: it holds exactly what fits."""
        return min((AHEAD - 1) * self._budget.room.charge(want.size, inline=True), short.budget // PART)

    def _is_plain(self, txn: Txn, want: SpaceRequest, short: SpaceDeficit) -> bool:
        quota = want.size if short.of_space is None else short.of_space
        large = self._budget.room.charge(want.size, inline=True) > short.budget or want.size > quota
        both = max(short.quota, short.here) > 0 and max(short.bytes, short.rows) > 0
        if large or both or max(short.disk, short.leaving) > 0:
            return False
        space = spaces.by_id(txn, want.space)
        return space is not None and Policy.parse(space.policy).evicts_own and not reservations.abandoned(txn)

    def tell(self, gone: int) -> None:
        """Let all processes know that so many are gone."""
        if gone:
            self._counters.add(EVICTIONS, gone)
            self._eviction.tell()
