"""Which parts of a cache take how much, as a treemap: its cells from names, its layout, and its drawing as SVG.

The layout is that of M. Bruls, K. Huizing and J. J. van Wijk, "Squarified Treemaps", Proceedings of the Joint Eurographics and IEEE TCVG
Symposium on Visualization, 2000: rows are filled along the shorter side while that makes the worst ratio of sides in the row better."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from forebay._config import format_size
from forebay.cli.prefixes import PrefixNode, tree_of

MOST_CELLS = 24
NO_PREFIX = "(no prefix)"
Shown = Callable[[str], str]
_HEAD = 18.0
_GAP = 2.0


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


def draw(spaces: Sequence[tuple[str, Sequence[Cell]]], width: int, height: int, shown: Shown, css: str) -> str:
    """A treemap as SVG: a frame for each space, in it its cells. ``shown``: returns a name as it is shown; ``css``: the SVG's class."""
    spaces = sorted(((name, [c for c in cells if c.bytes]) for name, cells in spaces), key=lambda one: -_bytes(one[1]))
    spaces = [one for one in spaces if one[1]]
    parts = [f'<svg class="{css}" viewBox="0 0 {width} {height}" role="group" aria-label="Bytes by space and prefix">']
    frames = squarify([_bytes(cells) for _, cells in spaces], Rect(0.0, 0.0, float(width), float(height)))
    for hue, ((name, cells), frame) in enumerate(zip(spaces, frames, strict=True)):
        parts += _space(shown(name), cells, _inner(frame), hue % 6, shown)
    return "\n".join([*parts, "</svg>"])


def _bytes(cells: Sequence[Cell]) -> int:
    return sum(cell.bytes for cell in cells)


def _inner(frame: Rect) -> Rect:
    return Rect(frame.x + _GAP / 2, frame.y + _GAP / 2, max(frame.width - _GAP, 0.0), max(frame.height - _GAP, 0.0))


def _space(label: str, cells: Sequence[Cell], frame: Rect, hue: int, shown: Shown) -> Iterator[str]:
    body = frame
    if frame.height > 2 * _HEAD and frame.width > 40:
        yield _text(label, frame.x + 3, frame.y + 13, frame.width - 6, "head")
        body = Rect(frame.x, frame.y + _HEAD, frame.width, frame.height - _HEAD)
    for cell, rect in zip(cells, squarify([cell.bytes for cell in cells], body), strict=True):
        x, y, width, height = _inner(rect)
        text, size = shown(cell.name) or NO_PREFIX, format_size(cell.bytes)
        title = html.escape(f"{label}: {text} {size}, {cell.entries:,} entries")
        yield f'<g tabindex="0" role="img" aria-label="{title}"><title>{title}</title>'
        yield f'<rect class="hue{hue}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2"/>'
        if height > 16 and width > 34:
            yield _text(text, x + 4, y + 13, width - 8, "name")
        if height > 30 and width > 50:
            yield _text(size, x + 4, y + 26, width - 8, "size")
        yield "</g>"


def _text(text: str, x: float, y: float, width: float, css: str) -> str:
    most = max(int(width / 6.2), 1)  # characters of 11 px
    cut = text if len(text) <= most else "…" + text[-(most - 1) :] if most > 3 else ""
    return f'<text class="{css}" x="{x:.1f}" y="{y:.1f}">{html.escape(cut)}</text>'
