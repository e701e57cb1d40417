"""The pictures of a report as SVG: charts of values over time, and a treemap of what takes how much.

The layout of the treemap is that of M. Bruls, K. Huizing and J. J. van Wijk, "Squarified Treemaps", Proceedings of the Joint Eurographics
and IEEE TCVG Symposium on Visualization, 2000: rows are filled along the shorter side while that makes the worst ratio of sides in the row
better."""

from __future__ import annotations

import html
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forebay._config import format_size
from forebay.cli.render import count
from forebay.cli.selecting import Cell
from forebay.reports import HistoryPoint

# -- charts: a line of steps for each series, since each value holds for a period --------------------------------------

WIDTH, HEIGHT = 460, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 8, 10, 20
_AXES = ((300, "%H:%M:%S", 2), (86_400 * 1.5, "%H:%M", 4), (86_400 * 8, "%d %b %H:%M", 2), (math.inf, "%d %b", 4))
"""Up to how many seconds an axis has times of which form, and how many steps."""

Series = tuple[str, Callable[[HistoryPoint], float | None]]
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
