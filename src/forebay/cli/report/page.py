"""A report as one HTML page: no script, no network, readable on a phone, in the dark and by keyboard."""

from __future__ import annotations

import html
import time
from collections.abc import Sequence

from forebay._config import format_age, format_size
from forebay.cli.render import count, length_of
from forebay.cli.report.content import Content
from forebay.cli.report.drawing import NO_PREFIX, Series, bytes_of, chart, treemap
from forebay.reports import HistoryPoint

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
    def since(moment: float) -> str:
        return format_age(max(int(content.time - moment), 0))

    now = content.now
    fetches = [
        (f.space, f.key, format_size(f.done), "?" if f.total is None else format_size(f.total), f.process, since(f.since))
        for f in now.fetches
    ]
    waiters = [(waiter.process, waiter.key, waiter.holder, since(waiter.since)) for waiter in now.waiters]
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
