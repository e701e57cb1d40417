"""Whom to evict: pure functions. No clock, no disk, no lock."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable
from typing import NamedTuple

from forebay.errors import ConfigError


class Policy(enum.StrEnum):
    """What a space does when its bytes do not fit."""

    LRU = "lru"
    """Evict its least recently used entries."""
    FREEZE = "freeze"
    """Evict none of its own, admit nothing more."""
    WAIT = "wait"
    """Evict what nobody holds, least recently used first; wait while all is held."""

    @property
    def evicts_own(self) -> bool:
        """Whether a new entry may take the place of an older one of the same space."""
        return self is not Policy.FREEZE

    @classmethod
    def parse(cls, name: str) -> Policy:
        """The policy that is called ``name``. Raises `ConfigError`."""
        try:
            return cls(name.lower())
        except ValueError as error:
            raise ConfigError(f"there is no policy {name!r}: use one of {', '.join(cls)}", value=name) from error


class Candidate(NamedTuple):
    """An entry that may be evicted: compared by when it was ``used`` (ns), then by age."""

    used: int
    id: int
    charge: int


def choose_victims(candidates: Iterable[Candidate], need: int, *, count: int = 0) -> list[Candidate]:
    """The coldest candidates, coldest first: as few as free ``need`` bytes and ``count`` entries; all, if that is not enough."""
    heap = list(candidates)
    heapq.heapify(heap)
    victims: list[Candidate] = []
    while heap and (need > 0 or count > len(victims)):
        victims.append(heapq.heappop(heap))
        need -= victims[-1].charge
    return victims
