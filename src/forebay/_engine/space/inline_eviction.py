"""Evicts the coldest small values for a new one in a single transaction, since they have no files to be unlinked in between.

Any other case takes the long way of `budget`: a quota and the budget at once, a full disk, a coldest entry that is a file, partials
of dead fetches.
"""

from __future__ import annotations

from forebay._engine.catalog import Txn, reservations, spaces
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.free_space import SpaceDeficit, SpaceRequest
from forebay._engine.space.ranking import Ranking, Scope
from forebay._model import Policy

AT_ONCE = 64
AHEAD = 8
"""Space is made for so many values of this size, so that not every put has to search; at most one `PART` of the budget."""
PART = 256
_ALL = Scope()


class InlineEviction:
    """The short way to space for a small value. Callable from any thread that is inside a transaction."""

    def __init__(self, budget: Budget, eviction: Eviction, ranking: Ranking) -> None:
        self._budget, self._eviction, self._ranking = budget, eviction, ranking

    def make_room(self, txn: Txn, request: SpaceRequest, short: SpaceDeficit) -> tuple[bool, int]:
        """Whether a request, which lacks ``short``, fits now, and how many values were evicted for it. Caller: calls `notify` after the
        commit."""
        if not self._is_plain(txn, request, short):
            return False, 0
        of_space = short.quota > 0 or short.here > 0
        scope = Scope(only=request.space) if of_space else _ALL
        self._ranking.learn(txn, scope)
        lacking, count = (short.quota, short.here) if of_space else (short.bytes + self._ahead(request, short), short.rows)
        evicted = 0
        for _ in range(AT_ONCE):
            if lacking <= 0 and count <= 0:
                break
            candidate = next(self._ranking.coldest(scope), None)
            if candidate is None:
                break
            if candidate.kind != "value":
                self._ranking.give_back(scope, candidate)
                break
            if candidate.id != request.replaces and self._eviction.drop_value(txn, candidate.id, candidate.slot):
                lacking, count, evicted = lacking - (candidate.size if of_space else candidate.charge), count - 1, evicted + 1
        return self._budget.room.fits(txn, request), evicted

    def _ahead(self, request: SpaceRequest, short: SpaceDeficit) -> int:
        """Bytes to free in advance; none of a quota, which is to hold exactly what fits."""
        return min((AHEAD - 1) * self._budget.room.charge(request.size, inline=True), short.budget // PART)

    def _is_plain(self, txn: Txn, request: SpaceRequest, short: SpaceDeficit) -> bool:
        quota = request.size if short.of_space is None else short.of_space
        large = self._budget.room.charge(request.size, inline=True) > short.budget or request.size > quota
        both = max(short.quota, short.here) > 0 and max(short.bytes, short.rows) > 0
        if large or both or max(short.disk, short.leaving, short.log) > 0:
            return False
        space = spaces.by_id(txn, request.space)
        return space is not None and Policy.parse(space.policy).evicts_own and not reservations.abandoned(txn)

    def notify(self, evicted: int) -> None:
        """Count the evicted values, and let all processes know."""
        if evicted:
            self._budget.count_evicted(evicted)
            self._eviction.notify()
