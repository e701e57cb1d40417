"""`Store.activity`: what the processes of the node do with one root, and did, for people who look. Changes nothing, and takes no lock."""

from __future__ import annotations

from typing import NamedTuple

from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.index.counters import NAMES
from forebay._engine.index.history import HOURS, MINUTES


class Period(NamedTuple):
    """What was counted from ``start`` to ``end``, in seconds since 1970; ``counts`` in the order of `counters.NAMES`."""

    start: float
    end: float
    counts: tuple[int, ...]


class Activity:
    """The activity in one root. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @recover_and_retry
    def history(self, *, hours: bool = False) -> list[Period]:
        """What was counted lately, by minutes of the last day or by ``hours`` of the last month, oldest first. A period in which no process
        came is part of the next one. Where counters were lost, a period counts nothing."""
        clock = self.engine.slots.clock
        totals = self.engine.history.read(HOURS if hours else MINUTES, clock.look())
        walls = clock.walls(one.time for one in totals)
        return [
            Period(walls[at], walls[at + 1], tuple(max(b - a, 0) for a, b in zip(totals[at].counts, totals[at + 1].counts, strict=True)))
            for at in range(len(totals) - 1)
        ]


def by_name(counts: tuple[int, ...]) -> dict[str, int]:
    """Counts with their names."""
    return dict(zip(NAMES, counts, strict=True))
