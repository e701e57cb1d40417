"""Values over time as SVG: a line of steps for each series, since each value holds for a period."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from forebay.reports import HistoryPoint

WIDTH, HEIGHT = 460, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 8, 10, 20
_AXES = ((300, "%H:%M:%S", 2), (86_400 * 1.5, "%H:%M", 4), (86_400 * 8, "%d %b %H:%M", 2), (math.inf, "%d %b", 4))
"""Up to how many seconds an axis has times of which form, and how many steps."""


class Series(NamedTuple):
    """``value``: returns the value of a period; None: it has none. ``name``: empty if it is the only one."""

    name: str
    value: Callable[[HistoryPoint], float | None]


def draw(
    title: str, points: Sequence[HistoryPoint], series: Sequence[Series], shown: Callable[[float], str], none: str, top: float = 0.0
) -> str:
    """A chart. ``shown``: formats a value of its axis; ``none``: the sentence in place of a chart without data; ``top``: the end of the
    axis, 0: what the values need, and all zero is no data."""
    start, end = points[0].start, points[-1].end
    values = [value for one in series for point in points if (value := one.value(point)) is not None]
    if not (values if top else any(values)):
        return f"<figure><figcaption>{html.escape(none)}</figcaption></figure>"
    highest = top or _round_up(max(values))
    label = html.escape(title)
    parts = [f'<figure><figcaption>{label}{_legend(series)}</figcaption><svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f"<title>{label}</title>")
    for tick in range(3):
        y = HEIGHT - _BOTTOM - tick / 2 * (HEIGHT - _TOP - _BOTTOM)
        parts.append(f'<path class="grid" d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}"/>')
        parts.append(
            f'<text class="axis" x="{_LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{html.escape(shown(highest * tick / 2))}</text>'
        )
    form, ticks = next((form, ticks) for longest, form, ticks in _AXES if end - start < longest)
    for tick in range(ticks + 1):
        moment = start + (end - start) * tick / ticks
        anchor = "start" if tick == 0 else "end" if tick == ticks else "middle"
        text = time.strftime(form, time.localtime(moment))
        parts.append(f'<text class="axis" x="{_x(moment, start, end):.1f}" y="{HEIGHT - 5}" text-anchor="{anchor}">{text}</text>')
    for number, one in enumerate(series):
        parts.append(f'<path class="line line{number}" d="{_path(points, one, start, end, highest)}"/>')
    return "\n".join([*parts, "</svg></figure>"])


def _legend(series: Sequence[Series]) -> str:
    named = [f' <span class="key{number}">{html.escape(one.name)}</span>' for number, one in enumerate(series) if one.name]
    return "".join(named)


def _x(moment: float, start: float, end: float) -> float:
    return _LEFT + (moment - start) / max(end - start, 1e-9) * (WIDTH - _LEFT - _RIGHT)


def _path(points: Sequence[HistoryPoint], one: Series, start: float, end: float, highest: float) -> str:
    steps, drawn = [], False
    for point in points:
        value = one.value(point)
        if value is None:
            drawn = False
            continue
        y = HEIGHT - _BOTTOM - min(value / highest, 1.0) * (HEIGHT - _TOP - _BOTTOM)
        steps.append(f"{'L' if drawn else 'M'}{_x(point.start, start, end):.1f} {y:.1f}H{_x(point.end, start, end):.1f}")
        drawn = True
    return "".join(steps)


def _round_up(value: float) -> float:
    """1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1.0, 2.0, 5.0, 10.0) if step * power >= value)
