"""Which parts of a cache take how much, as a treemap: its cells from names, its layout, and its drawing as SVG.

The layout is that of M. Bruls, K. Huizing and J. J. van Wijk, "Squarified Treemaps", Proceedings of the Joint Eurographics and IEEE TCVG
Symposium on Visualization, 2000: rows are filled along the shorter side while that makes the worst ratio of sides in the row better."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import NamedTuple

from forebay._config import format_size
from forebay.cli.prefixes import PrefixNode, tree_of
from forebay.cli.render import count as counted

MOST_CELLS = 24
NO_PREFIX = "(no prefix)"
HINT = "Point at a cell, tap it or press Tab to read its whole name here. A number is that of a row of the table."
_HEAD = 18.0
_GAP = 2.0
_CHARACTER = 6.2  # the width of one, on average, at 11 px


class Cell(NamedTuple):
    """A part of a space: a prefix of names, its bytes and its entries."""

    name: str
    bytes: int
    entries: int


class Rect(NamedTuple):
    """A rectangle of a layout."""

    x: float
    y: float
    width: float
    height: float


def cells_of(entries: Iterable[tuple[str, int]]) -> list[Cell]:
    """The largest prefixes of the names of entries, which come with their bytes, the largest first. Together they are all entries."""
    return _largest(tree_of(entries))


def _largest(top: PrefixNode) -> list[Cell]:
    """Split the largest node again and again."""
    done: list[Cell] = []
    open_nodes = [top]
    while open_nodes:
        node = max(open_nodes, key=lambda one: one.bytes)
        open_nodes.remove(node)
        children = list(node.children.values())
        if children and len(done) + len(open_nodes) + len(children) + 1 <= MOST_CELLS:
            open_nodes += children
            size, entries = node.bytes - sum(c.bytes for c in children), node.entries - sum(c.entries for c in children)
            if entries:
                done.append(Cell(node.name, size, entries))
        else:
            done.append(Cell(node.name, node.bytes, node.entries))
    return sorted((cell for cell in done if cell.entries), key=lambda cell: -cell.bytes)


def squarify(sizes: Sequence[float], into: Rect) -> list[Rect]:
    """Rectangles with areas in the ratio of ``sizes``, which are positive and descend, that fill one."""
    total = sum(sizes)
    if not total or into.width <= 0 or into.height <= 0:
        return [Rect(into.x, into.y, 0.0, 0.0) for _ in sizes]
    scale = into.width * into.height / total
    areas = [size * scale for size in sizes]
    rects: list[Rect] = []
    left, at = into, 0
    while at < len(areas):
        side, end = min(left.width, left.height), at + 1
        while end < len(areas) and _worst(areas[at : end + 1], side) <= _worst(areas[at:end], side):
            end += 1
        row, left = _row(areas[at:end], left)
        rects += row
        at = end
    return rects


def _worst(row: Sequence[float], side: float) -> float:
    """The worst ratio of sides in a row along a side of this length."""
    total = sum(row)
    if not total or not side or not min(row):
        return float("inf")
    return max(side * side * max(row) / total**2, total**2 / (side * side * min(row)))


def _row(row: Sequence[float], into: Rect) -> tuple[list[Rect], Rect]:
    """The rectangles of a row along the shorter side, and what is left."""
    total, rects = sum(row), []
    x, y, width, height = into
    if width >= height:
        across = total / height if height else 0.0
        for area in row:
            length = area / across if across else 0.0
            rects.append(Rect(x, y, across, length))
            y += length
        return rects, Rect(into.x + across, into.y, max(width - across, 0.0), height)
    across = total / width
    for area in row:
        length = area / across if across else 0.0
        rects.append(Rect(x, y, length, across))
        x += length
    return rects, Rect(into.x, into.y + across, width, max(height - across, 0.0))


def draw(spaces: Sequence[tuple[str, Sequence[Cell]]], width: int, height: int, css: str) -> str:
    """A treemap as SVG: a frame for each space, in it its cells. The one under the mouse or the focus is named whole below them. ``css``:
    the SVG's class."""
    number = count(1)
    numbered = [(name, [(next(number), cell) for cell in cells]) for name, cells in spaces]
    drawn = [(name, [one for one in cells if one[1].bytes]) for name, cells in numbered if bytes_of(cell for _, cell in cells)]
    below = (height, width, 40 if width > 600 else 72)  # room for two lines, or four
    parts = [f'<svg class="{css}" viewBox="0 0 {width} {height + below[2]}" role="group" aria-label="Bytes by space and prefix">']
    parts.append(_below("hint", HINT, below))  # first: the others cover it
    frames = squarify([bytes_of(cell for _, cell in cells) for _, cells in drawn], Rect(0.0, 0.0, float(width), float(height)))
    for hue, ((name, cells), frame) in enumerate(zip(drawn, frames, strict=True)):
        parts += _space(name, cells, _inner(frame), hue % 6, below)
    return "\n".join([*parts, "</svg>"])


def bytes_of(cells: Iterable[Cell]) -> int:
    return sum(cell.bytes for cell in cells)


def _inner(frame: Rect) -> Rect:
    return Rect(frame.x + _GAP / 2, frame.y + _GAP / 2, max(frame.width - _GAP, 0.0), max(frame.height - _GAP, 0.0))


def _space(name: str, cells: Sequence[tuple[int, Cell]], frame: Rect, hue: int, below: tuple[int, int, int]) -> Iterator[str]:
    body = frame
    if frame.height > 2 * _HEAD and frame.width > 40:
        yield _text(_cut(name, frame.width - 6), frame.x + 3, frame.y + 13, "head")
        body = Rect(frame.x, frame.y + _HEAD, frame.width, frame.height - _HEAD)
    for (number, cell), rect in zip(cells, squarify([cell.bytes for _, cell in cells], body), strict=True):
        x, y, width, height = _inner(rect)
        text, size = cell.name or NO_PREFIX, format_size(cell.bytes)
        whole = f"{number}. {size} in {counted(cell.entries, 'entry', 'entries')} of {name}: {text}"
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
