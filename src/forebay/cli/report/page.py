"""A report as one HTML page: no script, no network, readable on a phone, in the dark and by keyboard."""

from __future__ import annotations

import html
import time
from collections.abc import Iterable, Sequence

from forebay._config import format_age, format_size
from forebay.cli.report import charts, treemap
from forebay.cli.report.charts import Series
from forebay.cli.report.content import Content
from forebay.reports import HistoryPoint

LEAST_POINTS = 1
_ROWS = 48  # of the table of hours

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
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 8px; margin: 14px 0; padding: 0; }
.facts div { background: var(--card); border-radius: 6px; padding: 8px 12px; } .facts dt { color: var(--soft); font-size: .85em; }
.facts dd { margin: 0; font-size: 1.15em; font-variant-numeric: tabular-nums; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr)); gap: 12px; }
figure { margin: 0; background: var(--card); border-radius: 6px; padding: 8px; } figcaption { font-size: .9em; }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif; } svg text { fill: var(--text); pointer-events: none; }
svg .axis, svg .size { fill: var(--soft); } svg .head { font-weight: 600; } .grid { stroke: var(--line); fill: none; }
.line { fill: none; stroke-width: 1.8; } .line0 { stroke: var(--l0); } .line1 { stroke: var(--l1); } .line2 { stroke: var(--l2); }
.key0 { color: var(--l0); } .key1 { color: var(--l1); } .key2 { color: var(--l2); }
.hue0 { fill: var(--h0); } .hue1 { fill: var(--h1); } .hue2 { fill: var(--h2); } .hue3 { fill: var(--h3); } .hue4 { fill: var(--h4); }
.hue5 { fill: var(--h5); } g:focus rect, g:hover rect { stroke: var(--text); stroke-width: 2; } g:focus { outline: none; }
.narrow { display: none; } @media (max-width: 600px) { .wide { display: none; } .narrow { display: block; } body { padding: 10px; } }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 3px 10px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { font-weight: 500; } .n { text-align: right; white-space: nowrap; } summary { cursor: pointer; color: var(--link); margin: .5em 0; }
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
        _facts(content), "<h2>What occupies the cache</h2>", _occupied(content), "<h2>Over time</h2>", _over_time(content),
        "<h2>Now</h2>", _now(content), "<h2>Claims of this node</h2>", _claims(content), "<h2>Last failures</h2>", _failures(content),
        "</main></body></html>\n",
    ]  # fmt: skip
    return "\n".join(parts)


def _facts(content: Content) -> str:
    stats = content.stats
    reserved = f" + {format_size(stats.bytes_reserved)} reserved" if stats.bytes_reserved else ""
    facts = {
        "used": f"{format_size(stats.bytes_used)}{reserved}", "budget": format_size(stats.budget), "entries": f"{stats.entries:,}",
        "hit rate": f"{stats.hit_rate:.1%}", "from the cache": format_size(stats.bytes_hit),
        "from remotes": format_size(stats.bytes_remote),
        "evictions": f"{stats.evictions:,}", "fallbacks": f"{stats.fallbacks:,}", "damaged": f"{stats.damaged:,}",
        "in use": f"{content.now.leased:,}", "outside the budget": format_size(sum(content.overhead.values())),
    }  # fmt: skip
    return f'<dl class="facts">{"".join(f"<div><dt>{name}</dt><dd>{html.escape(text)}</dd></div>" for name, text in facts.items())}</dl>'


def _occupied(content: Content) -> str:
    if not content.prefixes:
        return "<p>The cache is empty.</p>"
    spaces = list(content.prefixes.items())
    drawn = [treemap.draw(spaces, width, height, str, css) for width, height, css in ((960, 420, "wide"), (380, 460, "narrow"))]
    rows = [
        (name, cell.name or treemap.NO_PREFIX, format_size(cell.bytes), f"{cell.entries:,}") for name, cells in spaces for cell in cells
    ]
    return "\n".join([*drawn, _details("As a table", _table(("space", "prefix", "bytes>", "entries>"), rows))])


def _rate(name: str) -> Series:
    return Series({"bytes_hit": "from the cache", "bytes_remote": "from remotes"}[name], lambda point: getattr(point, name) / point.seconds)


def _over_time(content: Content) -> str:
    parts = []
    for title, points in (("the last day, by minutes", content.minutes), ("the last month, by hours", content.hours)):
        points = [point for point in points if point.seconds > 0]
        if len(points) >= LEAST_POINTS:
            parts.append(f'<h3 class="soft">{title.capitalize()}</h3><div class="charts">{"".join(_charts(points))}</div>')
    if not parts:
        return "<p>There is no history yet: it begins when a process has used the cache for a second.</p>"
    rows = [
        (_moment(p.start), "-" if p.hit_rate is None else f"{p.hit_rate:.0%}", format_size(p.bytes_hit), format_size(p.bytes_remote),
         f"{p.evictions:,}", f"{p.fallbacks:,}", f"{_waited(p):,.1f} s")
        for p in reversed(content.hours[-_ROWS:])
    ]  # fmt: skip
    columns = ("from", "hit rate>", "from the cache>", "from remotes>", "evictions>", "fallbacks>", "waited>")
    return "\n".join([*parts, _details("The last hours as a table", _table(columns, rows))])


def _charts(points: Sequence[HistoryPoint]) -> list[str]:
    def per_minute(name: str) -> Series:
        return Series(name, lambda point: getattr(point, name) * 60 / point.seconds)

    waits = [Series("for remotes", lambda p: p.wait_ns_remote / 1e9 / p.seconds),
             Series("for processes", lambda p: p.wait_ns_lock / 1e9 / p.seconds),
             Series("for room", lambda p: p.wait_ns_space / 1e9 / p.seconds)]  # fmt: skip
    return [
        charts.draw("Hit rate", points, [Series("", lambda point: point.hit_rate)], lambda value: f"{value:.0%}", top=1.0),
        charts.draw("Bytes per second:", points, [_rate("bytes_hit"), _rate("bytes_remote")], format_size),
        charts.draw("Per minute:", points, [per_minute("evictions"), per_minute("fallbacks")], lambda value: f"{value:,g}"),
        charts.draw("Processes and threads that waited, on average:", points, waits, lambda value: f"{value:,g}"),
    ]


def _waited(point: HistoryPoint) -> float:
    return (point.wait_ns_remote + point.wait_ns_lock + point.wait_ns_space) / 1e9


def _now(content: Content) -> str:
    fetches = [
        (one.space, one.key, format_size(one.done), "?" if one.total is None else format_size(one.total), one.process,
         format_age(max(int(content.time - one.since), 0)))
        for one in content.now.fetches
    ]  # fmt: skip
    waiters = [
        (one.process, one.key, one.holder, format_age(max(int(content.time - one.since), 0))) for one in content.now.waiters
    ]  # fmt: skip
    parts = [_table(("space", "fetches", "done>", "of>", "process", "for>"), fetches) if fetches else "<p>Nothing is being fetched.</p>"]
    if waiters:
        parts.append(_table(("process", "waits for", "which has", "for>"), waiters))
    return "\n".join(parts)


def _claims(content: Content) -> str:
    rows = [
        ("live" if claim.live else "dead", claim.user, claim.job or "-", f"{len(claim.pids):,}",
         "-" if claim.bytes is None else format_size(claim.bytes), " ".join(claim.directories) or "damaged")
        for claim in content.claims
    ]  # fmt: skip
    return _table(("state", "user", "job", "processes>", "memory>", "directories"), rows) if rows else "<p>There are none.</p>"


def _failures(content: Content) -> str:
    rows = [(_moment(one.at), one.space, one.key, one.error) for one in content.now.failures]
    return _table(("at", "space", "what", "error"), rows) if rows else "<p>None since the machine started.</p>"


def _details(summary: str, inside: str) -> str:
    return f"<details><summary>{html.escape(summary)}</summary>{inside}</details>"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; columns whose names end with ``>`` are aligned to the right."""
    css = [' class="n"' if name.endswith(">") else "" for name in columns]
    head = "".join(f'<th scope="col"{kind}>{html.escape(name.rstrip(">"))}</th>' for name, kind in zip(columns, css, strict=True))
    body = "\n".join(
        f"<tr>{''.join(f'<td{kind}>{html.escape(cell)}</td>' for cell, kind in zip(row, css, strict=True))}</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _moment(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
