"""The verb that watches a cache: `top`. It opens the root again for each look, and changes nothing in it."""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from forebay._config import format_size
from forebay.cli.arguments import opened, verb
from forebay.cli.output import Output, ago, console, count, plain, rich_table
from forebay.cli.report import activity

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay._engine.seeing import Fetch, Now
    from forebay.reports import Stats

MOST_ROWS = 20
"""Fetches and waits that are shown."""
_BAR = 30


class Look(NamedTuple):
    """What was seen at one time of the monotonic clock, in seconds."""

    at: float
    path: str
    stats: Stats
    now: Now


Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Columns, those whose names end with ``>`` aligned to the right, and rows."""


@verb("forebay top", "forebay top --once --json", options="root json")
@click.option("--once", is_flag=True, help="Print one sample and exit.")
@click.option(
    "--interval", "-i", type=click.FloatRange(min=0.05), default=1.0, show_default=True, metavar="SECONDS", help="Seconds between updates."
)
def top(once: bool, interval: float, root: Path | None, as_json: bool) -> None:
    """Watch what all processes on the node do with this cache: hits, bytes per second, fetches, waits, evictions. Press q to quit."""
    if not math.isfinite(interval):
        raise click.BadParameter(f"{interval} is no time in seconds", param_hint="'--interval'")
    before = _look(root)
    try:
        if once or as_json:
            time.sleep(interval)
            _print_once(before, _look(root), as_json)
        elif sys.stdout.isatty():
            _watch(before, root, interval)
        else:
            while True:
                time.sleep(interval)
                before = _print_lines(before, _look(root))
    except KeyboardInterrupt:
        return


def _look(root: Path | None) -> Look:
    with opened(root) as cache:
        return Look(time.monotonic(), str(cache.path), cache.stats(), activity(cache))


def _watch(before: Look, root: Path | None, interval: float) -> None:
    """Draw on the terminal until Ctrl-C, or the key q."""
    from rich.live import Live

    with _keys() as is_pressed, Live(_screen(before, before), console=console(), screen=True, auto_refresh=False) as live:
        while not is_pressed("q", interval):
            after = _look(root)
            live.update(_screen(before, after), refresh=True)
            before = after


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[str, float], bool]]:
    """Give a function that waits for some seconds, and returns whether this key was pressed during the wait."""
    fds = [sys.stdin.fileno()] if sys.stdin.isatty() else []

    def is_pressed(key: str, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while select.select(fds, [], [], max(end - time.monotonic(), 0))[0]:
            pressed = os.read(fds[0], 64)
            if key.encode() in pressed:
                return True
            if not pressed:  # the terminal is gone
                fds.clear()
        return False

    before = {fd: termios.tcgetattr(fd) for fd in fds}
    for fd in fds:
        tty.setcbreak(fd)
    try:
        yield is_pressed
    finally:
        for fd in fds:
            termios.tcsetattr(fd, termios.TCSADRAIN, before[fd])


def _print_once(before: Look, after: Look, as_json: bool) -> None:
    output = Output(as_json)
    speeds = [_speed(one, before, after) for one in after.now.fetches]
    fetches = [{**one._asdict(), "speed": speed} for one, speed in zip(after.now.fetches, speeds, strict=True)]
    output.document({
        "path": after.path, "seconds": after.at - before.at, "rates": rates(before, after), "stats": after.stats.as_dict(),
        "fetches": fetches, "waiters": after.now.waiters, "leased": after.now.leased,
    })  # fmt: skip
    output.facts(_facts(before, after))
    for columns, rows in _tables(before, after):
        output.line("")
        output.table(columns, rows)


def _print_lines(before: Look, after: Look) -> Look:
    """Print one line about the time between two looks, then one for each fetch."""
    output = Output()
    output.line(", ".join(f"{name} {text}" for name, text in _facts(before, after).items() if name != "cache"))
    for one in after.now.fetches[:MOST_ROWS]:
        output.line("  " + " ".join(_fetch_row(one, before, after)))
    sys.stdout.flush()
    return after


def rates(before: Look, after: Look) -> dict[str, float]:
    """Counts per second between two looks; ``hit_rate``: the hit rate of these calls, 0.0 without calls. The cache counts the bytes of a
    fetch when it ends. So the bytes that fetches under way received since the first look are added, and the bytes that ended fetches had
    received before it are subtracted."""
    seconds = max(after.at - before.at, 1e-9)
    names = ("hits", "misses", "fallbacks", "evictions", "waits", "bytes_hit", "bytes_remote", "requests", "retries")
    counts = {name: max(getattr(after.stats, name) - getattr(before.stats, name), 0) for name in names}  # less: they were zeroed
    calls = counts["hits"] + counts["misses"] + counts["fallbacks"]
    came = sum(one.done - _done_before(one, before) for one in after.now.fetches if one.space == "urls")
    under_way = {_identity(one) for one in after.now.fetches}
    ended = sum(one.done for one in before.now.fetches if one.space == "urls" and _identity(one) not in under_way)
    counts["bytes_remote"] = max(counts["bytes_remote"] - ended, 0) + max(came, 0)
    return {name: number / seconds for name, number in counts.items()} | {"hit_rate": counts["hits"] / calls if calls else 0.0}


def _facts(before: Look, after: Look) -> dict[str, str]:
    stats, per_second = after.stats, rates(before, after)
    share = (stats.bytes_used + stats.bytes_reserved) / stats.budget if stats.budget else 0.0
    reserved = f" + {format_size(stats.bytes_reserved)} reserved" if stats.bytes_reserved else ""
    calls = per_second["hits"] + per_second["misses"] + per_second["fallbacks"]
    return {
        "cache": after.path,
        "budget": f"{format_size(stats.bytes_used)}{reserved} of {format_size(stats.budget)} ({share:.0%})",
        "hit rate": f"{per_second['hit_rate']:.1%} of {calls:,.0f} calls/s" if calls else "no calls",
        "from the cache": f"{format_size(per_second['bytes_hit'])}/s",
        "from remotes": f"{format_size(per_second['bytes_remote'])}/s in {per_second['requests']:,.0f} requests/s",
        "evictions": f"{per_second['evictions']:,.1f}/s",
        "fallbacks": f"{per_second['fallbacks']:,.1f}/s",
        "waits": f"{per_second['waits']:,.1f}/s, {len(after.now.waiters):,} waiting now",
        "in use": count(after.now.leased, "entry", "entries"),
    }


def _tables(before: Look, after: Look) -> list[Table]:
    spaces = [(plain(name), f"{count:,}", format_size(size)) for name, (count, size) in sorted(after.stats.spaces.items())]
    fetches = [_fetch_row(one, before, after) for one in after.now.fetches[:MOST_ROWS]]
    waiters = [(ago(time.time(), one.since), one.process, one.key, one.holder) for one in after.now.waiters[:MOST_ROWS]]
    tables: list[Table] = [
        (("SPACE", "ENTRIES>", "BYTES>"), spaces),
        (("DONE>", "OF>", "SPEED>", "FOR>", "PROCESS", "FETCHES"), fetches),
        (("FOR>", "PROCESS", "WAITS FOR", "WHICH HAS"), waiters),
    ]
    return [(columns, rows) for columns, rows in tables if rows]


def _fetch_row(one: Fetch, before: Look, after: Look) -> tuple[str, ...]:
    speed = _speed(one, before, after)
    total = "?" if one.total is None else format_size(one.total)
    name = one.key if one.space == "urls" else f"{one.space}:{one.key}"
    return format_size(one.done), total, f"{format_size(speed)}/s", ago(time.time(), one.since), one.process, name


def _speed(one: Fetch, before: Look, after: Look) -> float:
    """Bytes a second of a fetch between two looks; of a new one since its first byte."""
    return max(one.done - _done_before(one, before), 0) / max(after.at - before.at, 1e-9)


def _done_before(one: Fetch, before: Look) -> int:
    return next((other.done for other in before.now.fetches if _identity(other) == _identity(one)), 0)


def _identity(one: Fetch) -> tuple[str, str, float]:
    return one.space, one.key, one.since


def _screen(before: Look, after: Look) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    stats = after.stats
    full = round(_BAR * min((stats.bytes_used + stats.bytes_reserved) / stats.budget, 1.0)) if stats.budget else 0
    bar = "█" * full + "░" * (_BAR - full) + " "
    facts = [
        (Text(name, style="bold"), Text((bar if name == "budget" else "") + plain(text))) for name, text in _facts(before, after).items()
    ]
    parts: list[RenderableType] = [rich_table(("", ""), facts)]
    for columns, rows in _tables(before, after):
        # rich makes the other columns narrower than their cells
        cells = [[Text(cell, no_wrap=True, overflow="ellipsis") for cell in row] for row in rows]
        parts += [Text(""), rich_table(columns, cells)]
    parts.append(Text("\nPress q to quit", style="dim"))
    return Group(*parts)
