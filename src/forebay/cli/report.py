"""The verb that shows all of a cache at once: `report`, as text, JSON, or one HTML page without scripts or network, which is readable on a
phone, in the dark and by keyboard.

The layout of its treemap is that of M. Bruls, K. Huizing and J. J. van Wijk, "Squarified Treemaps", Proceedings of the Joint Eurographics
and IEEE TCVG Symposium on Visualization, 2000: rows are filled along the shorter side while that makes the worst ratio of sides in the row
better."""

from __future__ import annotations

import html
import itertools
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from forebay import __version__
from forebay._config import format_size
from forebay.cli.arguments import opened, verb
from forebay.cli.listing import Cell, cells_of, claims_without_secrets
from forebay.cli.output import Output, ago, count, plain, shown, shown_name, write_whole

if TYPE_CHECKING:
    from forebay._engine.seeing import Now
    from forebay.cache import Cache
    from forebay.claims import ClaimInfo
    from forebay.reports import HistoryPoint, Stats

LARGEST = 12
"""Prefixes of a space that the report in a terminal has."""


@verb("forebay report", "forebay report --html report.html", options="root json")
@click.option("--html", "file", metavar="FILE", help="Write one self-contained HTML page; - is standard output.")
def report(file: str | None, root: Path | None, as_json: bool) -> None:
    """Show what occupies the cache, what it did in the last day and month, and what happens now: as text, HTML or JSON."""
    if as_json and file is not None:
        raise click.UsageError("--json and --html exclude each other")
    with opened(root) as cache:
        content = gather(cache)
    output = Output(as_json)
    if file is not None:
        text = page(content)
        if file == "-":
            output.raw(text.rstrip("\n"))
        else:
            write_whole(Path(file), text.encode("utf-8", "backslashreplace"))
        return
    output.document(content)
    stats, (minutes, hours) = content.stats, content.history()
    output.facts({
        "cache": content.path, "used": f"{format_size(stats.bytes_used)} of {format_size(stats.budget)}", "entries": f"{stats.entries:,}",
        "hit rate": f"{stats.hit_rate:.1%}", "in use": count(content.now.leased, "entry", "entries"),
        "fetches": f"{len(content.now.fetches):,}", "claims": f"{len(content.claims):,}", "failures": f"{len(content.now.failures):,}",
        "history": length_of(hours or minutes),
    })  # fmt: skip
    rows = [
        (name, format_size(cell.bytes), f"{cell.entries:,}", cell.name)
        for name, cells in content.prefixes.items()
        for cell in cells[:LARGEST]
    ]
    if rows:
        output.table(("SPACE", "BYTES>", "ENTRIES>", "PREFIX"), rows)


def length_of(points: Sequence[HistoryPoint]) -> str:
    """How long a history is, as words."""
    seconds = points[-1].end - points[0].start if points else 0.0
    for one, many, unit in (("day", "days", 86_400), ("hour", "hours", 3600), ("minute", "minutes", 60)):
        if seconds >= 2 * unit:
            return count(round(seconds / unit), one, many)
    return count(round(seconds), "second", "seconds")


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
            claim, command=plain(claim.command), directories=tuple(map(plain, claim.directories)), job=plain(claim.job),
            name=plain(claim.name),
        )
        for claim in claims_without_secrets()
    ]  # fmt: skip
    return Content(
        str(cache.path), socket.gethostname(), __version__, time.time(), stats, cache.overhead(), prefixes, cache.history(),
        cache.history(by="hour"), activity(cache), claims,
    )  # fmt: skip


def activity(cache: Cache) -> Now:
    """What happens now, without secrets and control characters."""
    from forebay.cache import fetcher_of

    now = fetcher_of(cache).store.seeing.activity()
    return now._replace(
        fetches=tuple(one._replace(key=_name_shown(one.key), process=plain(one.process)) for one in now.fetches),
        waiters=tuple(one._replace(key=_name_shown(one.key), process=plain(one.process), holder=plain(one.holder)) for one in now.waiters),
        failures=tuple(one._replace(key=_name_shown(one.key), error=plain(shown(one.error))) for one in now.failures),
    )


def _name_shown(name: str) -> str:
    return plain(shown_name(name)) if name else ""


# -- the page ------------------------------------------------------------------------------------------------------------

_ROWS = 48  # of the table of hours, or of minutes

CSS = """
:root { color-scheme: light dark; --back: #fff; --text: #1b2529; --soft: #5b6a70; --line: #d5dde0; --card: #f4f7f8; --link: #00695c;
  --h0: #b2dfdb; --h1: #bbdefb; --h2: #ffe0b2; --h3: #e1bee7; --h4: #dcedc8; --h5: #f8bbd0; --l0: #00796b; --l1: #c75300; --l2: #5e35b1; }
@media (prefers-color-scheme: dark) { :root { --back: #11181b; --text: #e4ecef; --soft: #9db0b8; --line: #324047; --card: #1a2428;
  --link: #80cbc4; --h0: #14534c; --h1: #1b4470; --h2: #66450f; --h3: #50305a; --h4: #3c5220; --h5: #66283f; --l0: #4db6ac; --l1: #ffa552;
  --l2: #b39ddb; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1000px; padding: 16px; background: var(--back); color: var(--text);
  font: 15px/1.45 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5em; margin: 0; } h2 { font-size: 1.15em; margin: 1.6em 0 .5em; } p { margin: .3em 0; }
.soft, figcaption, th { color: var(--soft); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(165px, 1fr)); gap: 8px; margin: 14px 0; padding: 0; }
.facts div { background: var(--card); border-radius: 6px; padding: 8px 12px; } .facts dt { color: var(--soft); font-size: .85em; }
.facts dd { margin: 0; font-size: 1.15em; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 12px; align-items: start; }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: 8px; } figcaption { font-size: .9em; }
main > figure { margin-top: 14px; }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; } svg text { fill: var(--text); pointer-events: none; }
.budget { height: 14px; margin-top: 6px; } .budget .back { fill: var(--line); } .bar0, .bar1 { fill: var(--l0); } .bar1 { opacity: .45; }
svg .axis, svg .size { fill: var(--soft); } svg .head { font-weight: 600; } .grid { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 1.8; } .line0 { stroke: var(--l0); } .line1 { stroke: var(--l1); } .line2 { stroke: var(--l2); }
.key0 { color: var(--l0); } .key1 { color: var(--l1); } .key2 { color: var(--l2); }
.hue0 { fill: var(--h0); } .hue1 { fill: var(--h1); } .hue2 { fill: var(--h2); } .hue3 { fill: var(--h3); } .hue4 { fill: var(--h4); }
.hue5 { fill: var(--h5); } g:focus rect, g:hover rect { stroke: var(--text); stroke-width: 2; } g:focus { outline: none; }
g { cursor: pointer; } .tip { display: none; pointer-events: none; } .hint { color: var(--soft); }
foreignObject p { height: 100%; margin: 0; padding-top: 4px; background: var(--back); font-size: 13px; line-height: 1.3; }
g:hover .tip, g:focus .tip { display: block; } svg:hover g:focus:not(:hover) .tip { display: none; }
.narrow { display: none; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; overflow-wrap: normal; } .n { text-align: right; } td.n { white-space: nowrap; }
summary { cursor: pointer; color: var(--link); margin: .5em 0; }
@media (max-width: 600px) { .wide { display: none; } .narrow { display: block; } body { padding: 10px; } .chart { font-size: 13px; }
  table { font-size: .8em; } th, td { padding-right: 6px; } td.n { white-space: normal; overflow-wrap: normal; } }
"""


def page(content: Content) -> str:
    """The page. All that comes from names, errors and commands is escaped."""
    now = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(content.time))
    title = html.escape(f"Forebay: {content.path}")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{title}</title><style>{CSS}</style></head><body><main>",
        f'<h1>{title}</h1><p class="soft">{html.escape(content.host)}, {now}, Forebay {html.escape(content.version)}</p>',
        _budget(content), _facts(content), "<h2>What occupies the cache</h2>", _occupied(content),
        "<h2>Over time</h2>", _over_time(content),
        "<h2>Now</h2>", _now(content), "<h2>Claims of this node</h2>", _claims(content), "<h2>Last failures</h2>", _failures(content),
        "</main></body></html>\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _facts(content: Content) -> str:
    stats = content.stats
    facts = {
        "stored": count(stats.entries, "entry", "entries"), "in use": count(content.now.leased, "entry", "entries"),
        "hit rate": f"{stats.hit_rate:.1%}", "from the cache": format_size(stats.bytes_hit),
        "from remotes": format_size(stats.bytes_remote), "evicted": count(stats.evictions, "entry", "entries"),
        "fallbacks": count(stats.fallbacks, "call", "calls"), "damaged": count(stats.damaged, "entry", "entries"),
        "outside the budget": format_size(sum(content.overhead.values())),
    }  # fmt: skip
    return f'<dl class="facts">{"".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items())}</dl>'


def _budget(content: Content) -> str:
    """Bytes used against the budget now, as a bar."""
    stats = content.stats
    reserved = f" and {format_size(stats.bytes_reserved)} reserved" if stats.bytes_reserved else ""
    used, taken = (min(size / max(stats.budget, 1), 1.0) * 100 for size in (stats.bytes_used, stats.bytes_used + stats.bytes_reserved))
    text = html.escape(f"{format_size(stats.bytes_used)} used{reserved}, of a budget of {format_size(stats.budget)} ({taken:.0f}%)")
    bars = f'<rect class="back" width="100" height="4"/><rect class="bar1" width="{taken:.2f}" height="4"/>'
    return (
        f'<figure><figcaption>{text}</figcaption><svg class="budget" viewBox="0 0 100 4" preserveAspectRatio="none" role="img" '
        f'aria-label="{text}">{bars}<rect class="bar0" width="{used:.2f}" height="4"/></svg></figure>'
    )


def _occupied(content: Content) -> str:
    if not content.prefixes:
        return "<p>The cache is empty.</p>"
    spaces = sorted(content.prefixes.items(), key=lambda one: -bytes_of(one[1]))
    drawn = [treemap(spaces, width, height, css) for width, height, css in ((960, 420, "wide"), (380, 460, "narrow"))]
    cells = [(name, cell) for name, of_space in spaces for cell in of_space]
    rows = [
        (f"{number}", name, cell.name or NO_PREFIX, format_size(cell.bytes), count(cell.entries, "entry", "entries"))
        for number, (name, cell) in enumerate(cells, 1)
    ]
    table = _table(("row>", "space", "prefix", "bytes>", "entries>"), rows)
    return "\n".join([*drawn, _details(f"The {count(len(rows), 'cell', 'cells')} as a table", table)])


def _over_time(content: Content) -> str:
    parts, (minutes, hours) = [], content.history()
    if not minutes and not hours:
        return "<p>There is no history yet: it begins when a process has used the cache for a second.</p>"
    for by, points, none in (
        ("minutes", minutes, "Nothing was counted in the last day."),
        ("hours", hours, "Charts by hours follow when there is more than a day of history."),
    ):
        if points:
            title = f"{length_of(points)} until {_moment(points[-1].end)}, by {by}"
            parts.append(f'<h3 class="soft">{title.capitalize()}</h3><div class="charts">{"".join(_charts(points))}</div>')
        else:
            parts.append(f'<p class="soft">{none}</p>')
    rows = [
        (_moment(p.start), "-" if p.hit_rate is None else f"{p.hit_rate:.0%}", format_size(p.bytes_hit), format_size(p.bytes_remote),
         count(p.evictions, "entry", "entries"), count(p.fallbacks, "call", "calls"),
         f"{(p.wait_ns_remote + p.wait_ns_lock + p.wait_ns_space) / 1e9:,.1f} s")
        for p in reversed((hours or minutes)[-_ROWS:])
    ]  # fmt: skip
    columns = ("from", "hit rate>", "from the cache>", "from remotes>", "evicted>", "fallbacks>", "waited>")
    title = f"The last {count(len(rows), *(('hour', 'hours') if hours else ('minute', 'minutes')))} as a table"
    return "\n".join([*parts, _details(title, _table(columns, rows))])


def _charts(points: Sequence[HistoryPoint]) -> list[str]:
    def per(seconds: float, name: str, field: str) -> Series:
        return name, lambda point: getattr(point, field) * seconds / point.seconds

    use: list[Series] = [
        ("used", lambda point: point.bytes_used if point.budget else None), ("budget", lambda point: point.budget or None)
    ]  # fmt: skip
    rates = [per(1, "from the cache", "bytes_hit"), per(1, "from remotes", "bytes_remote")]
    events = [per(60, "evictions", "evictions"), per(60, "fallbacks", "fallbacks")]
    waits = [per(1e-9, "for remotes", "wait_ns_remote"), per(1e-9, "for processes", "wait_ns_lock"), per(1e-9, "for room", "wait_ns_space")]
    return [
        chart("Bytes on the disk:", points, use, format_size, "Bytes on the disk: no process has written yet."),
        chart("Hit rate", points, [("", lambda point: point.hit_rate)], lambda value: f"{value:.0%}",
              "Hit rate: no call asked for bytes.", top=1.0),
        chart("Bytes a second:", points, rates, lambda value: f"{format_size(value)}/s", "Bytes a second: none was read."),
        chart("Events a minute:", points, events, lambda value: f"{value:,g}/min",
              "Evictions and fallbacks: there were none."),
        chart("Waits at a time, on average:", points, waits, lambda value: f"{value:,g} {'wait' if value == 1 else 'waits'}",
              "Waits: no process or thread waited."),
    ]  # fmt: skip


def _now(content: Content) -> str:
    now = content.now
    fetches = [
        (f.space, f.key, format_size(f.done), "?" if f.total is None else format_size(f.total), f.process, ago(content.time, f.since))
        for f in now.fetches
    ]
    waiters = [(waiter.process, waiter.key, waiter.holder, ago(content.time, waiter.since)) for waiter in now.waiters]
    return "\n".join([
        _table(("space", "fetches", "done>", "of>", "process", "for>"), fetches, "Nothing is being fetched."),
        _table(("process", "waits for", "which has", "for>"), waiters),
    ])  # fmt: skip


def _claims(content: Content) -> str:
    rows = [
        ("live" if claim.live else "dead", claim.user, claim.job or "-", count(len(claim.pids), "process", "processes"),
         "-" if claim.bytes is None else format_size(claim.bytes), " ".join(claim.directories) or "damaged")
        for claim in content.claims
    ]  # fmt: skip
    return _table(("state", "user", "job", "processes>", "memory>", "directories"), rows, "There are none.")


def _failures(content: Content) -> str:
    rows = [(_moment(one.at), one.space, one.key, one.error) for one in content.now.failures]
    return _table(("at", "space", "what", "error"), rows, "None since the machine started.")


def _details(summary: str, inside: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{inside}</details>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]], none: str = "") -> str:
    """A table; columns whose names end with ``>`` are aligned to the right. ``none``: the sentence in place of a table without rows."""
    if not rows:
        return none and f"<p>{none}</p>"
    css = [' class="n"' if name.endswith(">") else "" for name in columns]
    head = "".join(f'<th scope="col"{kind}>{html.escape(name.rstrip(">"))}</th>' for name, kind in zip(columns, css, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for cell, kind in zip(row, css, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


# -- charts: a line of steps for each series, since each value holds for a period --------------------------------------

WIDTH, HEIGHT = 460, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 8, 10, 20
_AXES = ((300, "%H:%M:%S", 2), (86_400 * 1.5, "%H:%M", 4), (86_400 * 8, "%d %b %H:%M", 2), (math.inf, "%d %b", 4))
"""Up to how many seconds an axis has times of which form, and how many steps."""

Series = tuple[str, "Callable[[HistoryPoint], float | None]"]
"""A name, empty if it is the only series, and a function that returns the value of a period, or None."""


def chart(
    title: str, points: Sequence[HistoryPoint], series: Sequence[Series], shown: Callable[[float], str], none: str, top: float = 0.0
) -> str:
    """Draw a chart. ``shown``: formats a value of the axis; ``none``: the sentence in place of a chart without data; ``top``: the end of
    the axis; with 0 the values determine it, and a chart of zeros has no data."""
    start, end = points[0].start, points[-1].end
    values = [value for _, of in series for point in points if (value := of(point)) is not None]
    if not (values if top else any(values)):
        return f"<figure><figcaption>{html.escape(none)}</figcaption></figure>"
    highest = top or _round_up(max(values))

    def x(moment: float) -> float:
        return _LEFT + (moment - start) / max(end - start, 1e-9) * (WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return HEIGHT - _BOTTOM - min(value / highest, 1.0) * (HEIGHT - _TOP - _BOTTOM)

    label = html.escape(title)
    legend = "".join(f' <span class="key{number}">{html.escape(name)}</span>' for number, (name, _) in enumerate(series) if name)
    parts = [
        f'<figure><figcaption>{label}{legend}</figcaption><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{label}</title>",
    ]
    for value in (0.0, highest / 2, highest):
        parts.append(f'<path class="grid" d="M{_LEFT} {y(value):.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text class="axis" x="{_LEFT - 5}" y="{y(value) + 4:.1f}" text-anchor="end">{html.escape(shown(value))}</text>')
    form, ticks = next((form, ticks) for longest, form, ticks in _AXES if end - start < longest)
    for tick in range(ticks + 1):
        moment = start + (end - start) * tick / ticks
        anchor = "start" if tick == 0 else "end" if tick == ticks else "middle"
        text = time.strftime(form, time.localtime(moment))
        parts.append(f'<text class="axis" x="{x(moment):.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{text}</text>')
    for number, (_, of) in enumerate(series):
        steps, move = "", "M"
        for point in points:
            at = of(point)
            if at is not None:
                steps += f"{move}{x(point.start):.1f} {y(at):.1f}H{x(point.end):.1f}"
            move = "M" if at is None else "L"
        parts.append(f'<path class="line line{number}" d="{steps}"/>')
    return "\n".join([*parts, "</svg></figure>"])


def _round_up(value: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value)


# -- the treemap -------------------------------------------------------------------------------------------------------

NO_PREFIX = "(no prefix)"
HINT = "Point at a cell, tap it or press Tab to read its whole name here. A number is that of a row of the table."
_HEAD = 18.0
_GAP = 2.0
_CHARACTER = 6.2  # the width of one, on average, at 11 px


class Rect(NamedTuple):
    """A rectangle of a layout."""

    x: float
    y: float
    width: float
    height: float

    def inner(self) -> Rect:
        """The rectangle without the gap around it."""
        return Rect(self.x + _GAP / 2, self.y + _GAP / 2, max(self.width - _GAP, 0.0), max(self.height - _GAP, 0.0))


def squarify(sizes: Sequence[float], into: Rect) -> list[Rect]:
    """Rectangles with areas in the ratio of ``sizes``, which are positive and descend, that fill one."""
    x, y, width, height = into
    total = sum(sizes)
    if not total or width <= 0 or height <= 0:
        return [Rect(x, y, 0.0, 0.0) for _ in sizes]
    areas = [size * width * height / total for size in sizes]
    rects: list[Rect] = []
    at = 0
    while at < len(areas):
        upright, side, end = width >= height, min(width, height), at + 1
        while end < len(areas) and _worst(areas[at : end + 1], side) <= _worst(areas[at:end], side):
            end += 1
        across, along = sum(areas[at:end]) / side if side else 0.0, 0.0
        for area in areas[at:end]:
            length = area / across if across else 0.0
            rects.append(Rect(x, y + along, across, length) if upright else Rect(x + along, y, length, across))
            along += length
        if upright:
            x, width = x + across, max(width - across, 0.0)
        else:
            y, height = y + across, max(height - across, 0.0)
        at = end
    return rects


def _worst(row: Sequence[float], side: float) -> float:
    """The worst ratio of sides in a row along a side of this length."""
    total = sum(row)
    if not total or not side or not min(row):
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))


def bytes_of(cells: Iterable[Cell]) -> int:
    return sum(cell.bytes for cell in cells)


def treemap(spaces: Sequence[tuple[str, Sequence[Cell]]], width: int, height: int, css: str) -> str:
    """Draw a frame for each space, in it its cells. The one under the mouse or the focus is named whole below them. ``css``: the SVG's
    class."""
    number = itertools.count(1)
    numbered = [(name, [(next(number), cell) for cell in cells]) for name, cells in spaces]
    drawn = [(name, [one for one in cells if one[1].bytes]) for name, cells in numbered if bytes_of(cell for _, cell in cells)]
    below = (height, width, 40 if width > 600 else 72)  # room for two lines, or four
    parts = [f'<svg class="{css}" viewBox="0 0 {width} {height + below[2]}" role="group" aria-label="Bytes by space and prefix">']
    parts.append(_below("hint", HINT, below))  # first: the others cover it
    frames = squarify([bytes_of(cell for _, cell in cells) for _, cells in drawn], Rect(0.0, 0.0, float(width), float(height)))
    for hue, ((name, cells), frame) in enumerate(zip(drawn, frames, strict=True)):
        parts += _space(name, cells, frame.inner(), hue % 6, below)
    return "\n".join([*parts, "</svg>"])


def _space(name: str, cells: Sequence[tuple[int, Cell]], frame: Rect, hue: int, below: tuple[int, int, int]) -> Iterator[str]:
    body = frame
    if frame.height > 2 * _HEAD and frame.width > 40:
        yield _text(_cut(name, frame.width - 6), frame.x + 3, frame.y + 13, "head")
        body = Rect(frame.x, frame.y + _HEAD, frame.width, frame.height - _HEAD)
    for (number, cell), rect in zip(cells, squarify([cell.bytes for _, cell in cells], body), strict=True):
        x, y, width, height = rect.inner()
        text, size = cell.name or NO_PREFIX, format_size(cell.bytes)
        whole = f"{number}. {size} in {count(cell.entries, 'entry', 'entries')} of {name}: {text}"
        yield f'<g tabindex="0" role="img" aria-label="{html.escape(whole)}">'
        yield f'<rect class="hue{hue}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        if height > 13:
            yield _text(_label(number, text, width - 6), x + 3, y + 12, "name")
        if height > 30 and len(size) * _CHARACTER < width - 6:
            yield _text(size, x + 3, y + 26, "size")
        yield _below("tip", whole, below) + "</g>"


def _label(number: int, text: str, width: float) -> str:
    """A name; one that does not fit, or not whole, has the number of its row in the table."""
    if len(text) * _CHARACTER <= width:
        return text
    cut = _cut(text, width - (len(str(number)) + 1) * _CHARACTER)
    return f"{number} {cut}".rstrip() if len(str(number)) * _CHARACTER <= width else ""


def _cut(text: str, width: float) -> str:
    most = int(width / _CHARACTER)
    return text if len(text) <= most else "…" + text[-(most - 1) :] if most > 4 else ""


def _text(text: str, x: float, y: float, css: str) -> str:
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{html.escape(text)}</text>'


def _below(css: str, text: str, below: tuple[int, int, int]) -> str:
    y, width, height = below
    return f'<foreignObject class="{css}" y="{y}" width="{width}" height="{height}"><p>{html.escape(text)}</p></foreignObject>'
