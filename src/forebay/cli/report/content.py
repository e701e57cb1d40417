"""What a report shows, gathered from a cache."""

from __future__ import annotations

import socket
import time
from dataclasses import astuple, dataclass, replace
from itertools import dropwhile

from forebay import __version__
from forebay._engine.seeing import Now
from forebay.cache import Cache, origin_of
from forebay.claims import ClaimInfo, list_claims
from forebay.cli.render import plain, shown, shown_name
from forebay.cli.selecting import Cell, cells_of
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

    def history(self) -> tuple[list[HistoryPoint], list[HistoryPoint]]:
        """Minutes and hours from the first in which something was counted. No hours where the minutes say it all: before a day is over."""
        minutes, hours = (
            list(dropwhile(lambda point: not any(astuple(point)[2:]), (point for point in points if point.seconds > 0)))
            for points in (self.minutes, self.hours)
        )
        return minutes, hours if hours and self.time - hours[0].start > 86_400 else []


def gather(cache: Cache) -> Content:
    """The content of a report on a cache: one pass over its entries."""
    stats = cache.stats()
    prefixes = {}
    for space, (entries, _) in sorted(stats.spaces.items()):
        if entries:
            head = "" if space == "urls" else f"{space}:"
            cells = cells_of((name.removeprefix(head), size) for name, size, *_ in cache.entries(space).facts())
            prefixes[space] = [cell._replace(name=_name_shown(cell.name)) for cell in cells]
    claims = [
        replace(
            claim,
            remotes=tuple(url and shown(url) for url in claim.remotes),
            command=plain(shown(claim.command)),
            directories=tuple(map(plain, claim.directories)),
            job=plain(claim.job),
            name=plain(claim.name),
        )
        for claim in list_claims()
    ]
    return Content(
        str(cache.path), socket.gethostname(), __version__, time.time(), stats, cache.overhead(), prefixes, cache.history(),
        cache.history(by="hour"), activity(cache), claims,
    )  # fmt: skip


def activity(cache: Cache) -> Now:
    """What happens now, as it may be shown."""
    now = origin_of(cache).store.seeing.now()
    return now._replace(
        fetches=tuple(one._replace(key=_name_shown(one.key), process=plain(one.process)) for one in now.fetches),
        waiters=tuple(one._replace(key=_name_shown(one.key), process=plain(one.process), holder=plain(one.holder)) for one in now.waiters),
        failures=tuple(one._replace(key=_name_shown(one.key), error=plain(shown(one.error))) for one in now.failures),
    )


def _name_shown(name: str) -> str:
    return plain(shown_name(name)) if name else ""
