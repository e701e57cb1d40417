"""What the cache reports: statistics, progress, plans of removals, and their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay._config import format_size
from forebay._kernel.interrupts import guarded
from forebay._model import Report, Victim
from forebay.errors import ConfigError, ForebayError

TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Self

    from forebay._engine.flight import Waiting
    from forebay._engine.null_store import NullStore
    from forebay._engine.store import Store


@dataclass(frozen=True, slots=True)
class Stats:
    """What all processes of the node have done together since the counters were last zeroed, and what is stored now.

    ``hits``: calls served from the cache. ``misses``: calls that fetched bytes from the remote. ``fills``: those of them whose bytes were
    stored. ``fallbacks``: calls served without the cache. ``bytes_hit``: bytes served by hits. ``bytes_remote``: bytes received over the
    network. ``requests``: requests sent, of which ``retries`` were repeats. ``wait_ns_remote``, ``wait_ns_lock``, ``wait_ns_space``:
    nanoseconds spent waiting for the remote, for another process, and for room, respectively. ``store_failures``: values that could not be
    stored. ``damaged``: entries set aside. ``max_rate``, ``max_connections``: the limits of transfers; 0: none. ``leading``: for each space
    with the policy ``auto`` or ``wait``, which of the two eviction orders keeps more, and is used: ``lru`` or ``bimodal``."""

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
    max_rate: int = 0
    max_connections: int = 0
    entries: int = 0
    spaces: dict[str, tuple[int, int]] = field(default_factory=dict)
    leading: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, store: Store | NullStore) -> Self:
        """The statistics of a root. Raises OSError."""
        usage = store.seeing.usage()
        return cls(
            **store.seeing.counts(), bytes_used=usage.used, bytes_reserved=usage.reserved, budget=usage.budget, max_rate=usage.max_rate,
            max_connections=usage.max_connections, entries=sum(space.entries for space in usage.spaces),
            spaces={space.name: (space.entries, space.bytes) for space in usage.spaces},
            leading={name: standing.leader if standing is not None else "lru" for name, standing in usage.standings.items()},
        )  # fmt: skip

    @property
    def hit_rate(self) -> float:
        """Hits as a share of all calls that asked for bytes; 0.0 before the first."""
        calls = self.hits + self.misses + self.fallbacks
        return self.hits / calls if calls else 0.0

    def as_dict(self) -> dict[str, Any]:
        """All fields and `hit_rate`, for JSON."""
        from dataclasses import asdict

        return asdict(self) | {"hit_rate": self.hit_rate}

    def as_text(self) -> dict[str, str]:
        """All numbers with their units, for people."""
        facts = {name: _with_unit(name, value) for name, value in self.as_dict().items() if isinstance(value, (int, float))}
        facts["hit_rate"] = f"{self.hit_rate:.1%}"
        facts |= {f"eviction of {name}": leader for name, leader in sorted(self.leading.items())}
        return {name.replace("_ns_", " for ").replace("_", " "): value for name, value in facts.items()}

    def _as_panel(self, root: str) -> str:
        """A cache in a notebook: its root, how full it is, and these statistics."""
        from html import escape

        full = f'<progress value="{self.bytes_used}" max="{self.budget}"></progress>' if self.budget else ""
        used = f"{format_size(self.bytes_used)} of {format_size(self.budget)}"
        return f"<p><b>{escape(root)}</b> {full} {used}</p>{self._repr_html_()}"

    def _repr_html_(self) -> str:
        """A table, in notebooks."""
        from html import escape

        return f"<table>{''.join(f'<tr><th>{escape(name)}</th><td>{value}</td></tr>' for name, value in self.as_text().items())}</table>"


def _with_unit(name: str, value: float) -> str:
    if name.startswith("wait_ns_"):
        return f"{value / 1e9:,.1f} s"
    if name in ("max_rate", "max_connections") and not value:
        return "no limit"
    if name == "max_rate":
        return f"{format_size(value)}/s"
    return format_size(value) if name.startswith("bytes_") or name == "budget" else f"{value:,}"


@dataclass(frozen=True, slots=True)
class HistoryPoint:
    """What all processes of the node did from ``start`` to ``end``, in seconds since 1970. The other fields are those of `Stats`.

    ``bytes_used``, ``budget``: at ``end``, within 10 seconds, reserved bytes included; both 0 if no process has written yet. A period is
    about a minute or an hour, and longer if no process used the cache during it."""

    start: float
    end: float
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
    budget: int = 0

    @property
    def seconds(self) -> float:
        """The length of the period in seconds."""
        return self.end - self.start

    @property
    def hit_rate(self) -> float | None:
        """Hits as a share of all calls that asked for bytes; None if there were none."""
        calls = self.hits + self.misses + self.fallbacks
        return self.hits / calls if calls else None


def history(store: Store | NullStore, by: str) -> list[HistoryPoint]:
    """See `Cache.history`."""
    from forebay._engine.index.counters import NAMES

    if by not in ("minute", "hour"):
        raise ConfigError(f"by={by!r}: use 'minute' or 'hour'", name="by", value=by)
    periods = store.seeing.history(hours=by == "hour")
    return [
        HistoryPoint(one.start, one.end, **dict(zip(NAMES, one.counts, strict=True)), bytes_used=one.used, budget=one.budget)
        for one in periods
    ]


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of fetching one URL. ``state``: ``waiting`` (for ``holder``, for ``waited`` seconds so far), ``fetching``, ``done`` or
    ``direct`` (not stored, since there was no room); for an upload ``reading`` (to find out what to send), then ``sending``. ``done``:
    bytes so far. ``total``: all bytes; None: unknown. ``url``: the URL without secrets."""

    url: str
    done: int = 0
    total: int | None = None
    state: str = "fetching"
    holder: str = ""
    waited: float = 0.0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class WarmReport:
    """The result of `Cache.warm`: URLs that are in the cache now, and those that are not, each with its error."""

    done: tuple[str, ...]
    failed: tuple[tuple[str, ForebayError], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """Entries to remove, coldest first; `execute` removes them. ``lacking``: bytes to free for the request; the victims may hold fewer."""

    victims: Sequence[Victim]
    _remove: Callable[[Sequence[Victim]], Report]
    lacking: int = 0

    @property
    def frees(self) -> int:
        """Bytes of disk that `execute` frees if no victim is in use by then."""
        return sum(victim.charge for victim in self.victims)

    @guarded
    def execute(self) -> Report:
        """Remove the victims. Entries that are in use or pinned by then are spared; the report names them."""
        return self._remove(self.victims)


class ProgressReporter:
    """Turns the engine's callbacks for one fetch into `Progress`."""

    def __init__(self, url: str, report: OnProgress | None) -> None:
        self._url, self._report = url, report
        self.waiting = self._waiting if report is not None else None
        self.fetching = self._fetching if report is not None else None

    def say(self, state: str, done: int, total: int | None, holder: str = "", waited: float = 0.0) -> None:
        if self._report is not None:
            self._report(Progress(self._url, done, total, state, holder, waited))

    def _waiting(self, waiting: Waiting) -> None:
        self.say("waiting", waiting.done, waiting.total, waiting.holder, waiting.since)

    def _fetching(self, done: int, total: int | None) -> None:
        self.say("fetching", done, total)
