"""What a report shows, gathered from a cache."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import dropwhile

from forebay import __version__
from forebay._engine.seeing import Now
from forebay.cache import Cache, origin_of
from forebay.claims import ClaimInfo, list_claims
from forebay.cli.render import count, plain, shown, shown_name
from forebay.cli.report.treemap import Cell, cells_of
from forebay.reports import HistoryPoint, Stats


@dataclass(frozen=True, slots=True)
class Content:
    """Everything in a report. Names and errors have no secrets and no control characters; times in seconds since 1970."""

    path: str
    host: str
    version: str
    time: float
    stats: Stats
    overhead: dict[str, int]
    prefixes: dict[str, list[Cell]]
    minutes: list[HistoryPoint]
    hours: list[HistoryPoint]
    now: Now
    claims: list[ClaimInfo]


def gather(cache: Cache) -> Content:
    """The content of a report on a cache: one pass over its entries."""
    stats = cache.stats()
    prefixes = {name: cells_of(_entries(cache, name)) for name, (count, _) in sorted(stats.spaces.items()) if count}
    safe = {name: [cell._replace(name=name_shown(cell.name)) for cell in cells] for name, cells in prefixes.items()}
    claims = [
        replace(
            claim,
            remotes=tuple(url and shown(url) for url in claim.remotes),
            command=text_shown(claim.command),
            directories=tuple(map(plain, claim.directories)),
            job=plain(claim.job),
            name=plain(claim.name),
        )
        for claim in list_claims()
    ]
    return Content(
        str(cache.path), socket.gethostname(), __version__, time.time(), stats, cache.overhead(), safe, cache.history(),
        cache.history(by="hour"), activity(cache), claims,
    )  # fmt: skip


def activity(cache: Cache) -> Now:
    """What happens now, as it may be shown."""
    now = origin_of(cache).store.seeing.now()
    return Now(
        tuple(one._replace(key=name_shown(one.key), process=plain(one.process)) for one in now.fetches),
        tuple(one._replace(key=name_shown(one.key), process=plain(one.process), holder=plain(one.holder)) for one in now.waiters),
        now.leased,
        tuple(one._replace(key=name_shown(one.key), error=text_shown(one.error)) for one in now.failures),
    )


def history_of(content: Content) -> tuple[list[HistoryPoint], list[HistoryPoint]]:
    """Minutes and hours from the first in which something was counted. No hours where the minutes say it all: before a day is over."""
    minutes, hours = _since_first(content.minutes), _since_first(content.hours)
    return minutes, hours if hours and content.time - hours[0].start > 86_400 else []


def _since_first(points: Sequence[HistoryPoint]) -> list[HistoryPoint]:
    return list(dropwhile(lambda point: not any(astuple(point)[2:]), (point for point in points if point.seconds > 0)))


def length_of(points: Sequence[HistoryPoint]) -> str:
    """How long a history is, as words."""
    seconds = points[-1].end - points[0].start if points else 0.0
    for one, many, unit in (("day", "days", 86_400), ("hour", "hours", 3600), ("minute", "minutes", 60)):
        if seconds >= 2 * unit:
            return count(round(seconds / unit), one, many)
    return count(round(seconds), "second", "seconds")


def name_shown(name: str) -> str:
    return plain(shown_name(name)) if name else ""


def text_shown(text: str) -> str:
    return plain(shown(text))


def _entries(cache: Cache, space: str) -> Iterator[tuple[str, int]]:
    head = "" if space == "urls" else f"{space}:"
    return ((name.removeprefix(head), size) for name, size, *_ in cache.entries(space).facts())
