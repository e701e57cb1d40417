"""What the cache tells: statistics, progress, plans of what would be removed, and reports of what was done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay._engine.locks.fill import Waiting
from forebay._model import Entry, Report, Victim
from forebay.errors import ForebayError


@dataclass(frozen=True, slots=True)
class Stats:
    """What all processes of the node together did since the counters were last zeroed, and what is stored now.

    ``hits`` were served from the cache; ``misses`` asked the remote for bytes, of which ``fills`` were stored; ``fallbacks`` were
    served past the cache. ``bytes_hit``: bytes given out by hits; ``bytes_remote``: bytes that came over the network, in
    ``requests`` requests, ``retries`` of them repeated. ``wait_ns_*``: nanoseconds of waiting for the remote, for another process,
    for room. ``store_failures``: values that could not be kept. ``damaged``: entries that were set aside.
    """

    hits: int = 0
    misses: int = 0
    fills: int = 0
    evictions: int = 0
    fallbacks: int = 0
    waits: int = 0
    bytes_hit: int = 0
    bytes_remote: int = 0
    bytes_stored: int = 0
    requests: int = 0
    retries: int = 0
    wait_ns_remote: int = 0
    wait_ns_lock: int = 0
    wait_ns_space: int = 0
    store_failures: int = 0
    damaged: int = 0
    bytes_used: int = 0
    bytes_reserved: int = 0
    budget: int = 0
    entries: int = 0
    spaces: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Hits in all calls that wanted bytes; 0.0 before the first."""
        calls = self.hits + self.misses + self.fallbacks
        return self.hits / calls if calls else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and `hit_rate`, for JSON."""
        return dataclasses.asdict(self) | {"hit_rate": self.hit_rate}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the fetch of one URL is. ``state``: ``waiting`` (for ``holder``, since ``waited`` seconds), ``fetching``, ``done`` or
    ``direct`` (there was no room: it is not kept); of an upload ``reading`` (what must be sent?), then ``sending``. ``done`` and
    ``total`` in bytes; total None: not known. ``url``: without its secrets."""

    url: str
    done: int = 0
    total: int | None = None
    state: str = "fetching"
    holder: str = ""
    waited: float = 0.0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class WarmReport:
    """What `Cache.warm` did: URLs that are in the cache now, and those that are not, each with the reason."""

    done: tuple[str, ...]
    failed: tuple[tuple[str, ForebayError], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be removed, coldest first. `execute` does it and tells what really happened. ``lacking``: bytes that have to go for
    what was asked; the victims may have fewer."""

    victims: Sequence[Victim]
    _remove: Callable[[Sequence[Victim]], Report]
    lacking: int = 0

    @property
    def frees(self) -> int:
        """Bytes of disk that go if nothing is in use by then."""
        return sum(victim.charge for victim in self.victims)

    def execute(self) -> Report:
        """Remove. What is in use or pinned by now is spared, and named."""
        return self._remove(self.victims)


class ProgressReporter:
    """Turns what the engine tells of one fetch into `Progress`."""

    def __init__(self, url: str, tell: OnProgress | None) -> None:
        self._url, self._tell = url, tell
        self.waiting = self._waiting if tell is not None else None
        self.fetching = self._fetching if tell is not None else None

    def say(self, state: str, done: int, total: int | None) -> None:
        if self._tell is not None:
            self._tell(Progress(self._url, done, total, state))

    def _waiting(self, w: Waiting) -> None:
        if self._tell is not None:
            self._tell(Progress(self._url, w.done, w.total, "waiting", w.holder, w.since))

    def _fetching(self, done: int, total: int | None) -> None:
        self.say("fetching", done, total)


def coldest_until(entries: Iterable[Entry], need: int) -> list[Entry]:
    """As many of the first entries as make up ``need`` bytes; where that is none they are not even looked at."""
    taken: list[Entry] = []
    for entry in entries if need > 0 else ():
        if need <= 0:
            break
        taken.append(entry)
        need -= entry.charge
    return taken
