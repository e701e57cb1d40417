"""The pictures of the design page, as SVG, made from texts in this repository.

    python tools/pictures.py            writes docs/pictures/*.svg

`rooms.svg` and `engine.svg` show which room may import which: the boxes and arrows come from ORDER in the layering test, the
descriptions from docs/pictures/rooms.txt. `read.svg` shows the steps of docs/pictures/read.txt. A test compares the files with
what this script makes.
"""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
LAYERING = ROOT / "tests" / "project" / "test_layering.py"

STYLE = """\
  <style>
    text { font-family: system-ui, sans-serif; font-size: 13px; fill: #1f2933 }
    .name { font-family: ui-monospace, monospace; font-weight: 600; font-size: 14px }
    .title { font-weight: 600; font-size: 14px }
    .small { font-size: 12px; fill: #52606d }
    .box { fill: #e6f4f1; stroke: #00796b }
    .exit { fill: #fff8e6; stroke: #b7791f }
    .line { fill: none; stroke: #7b8794; stroke-width: 1.2 }
  </style>
  <defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
    <path d="M0 0 8 4 0 8z" fill="#7b8794"/></marker></defs>
"""


def picture(title: str, width: int, height: int, shapes: Iterable[str]) -> str:
    """A whole SVG. Its background is explicit, so that it can be read on a dark page too."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
    ground = f'  <title>{escape(title)}</title>\n{STYLE}  <rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>\n'
    return head + ground + "".join(f"  {shape}\n" for shape in shapes) + "</svg>\n"


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, style: str = "box") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{style}"/>'


def arrow(path: str) -> str:
    return f'<path d="{path}" class="line" marker-end="url(#tip)"/>'


# -- rooms -------------------------------------------------------------------------------------------------------------


def order() -> str:
    """ORDER of the layering test."""
    match = re.search(r'^ORDER = """\n(.*?)"""', LAYERING.read_text(), re.DOTALL | re.MULTILINE)
    assert match is not None, f"no ORDER in {LAYERING}"
    return match[1]


def pairs() -> set[tuple[str, str]]:
    """Each (room, room that it may import) that stands in ORDER."""
    edges: set[tuple[str, str]] = set()
    for line in order().splitlines():
        groups = [group.split() for group in line.split("<")]
        for left, right in itertools.pairwise(groups):
            edges.update(itertools.product(right, left))
    return edges


def top_rooms() -> dict[str, set[str]]:
    """For each room below src/forebay the rooms that it may import directly."""
    tops = {(room.partition(".")[0], other.partition(".")[0]) for room, other in pairs()}
    return graph({(room, other) for room, other in tops if room != other})


def engine_rooms() -> dict[str, set[str]]:
    """The same within the engine."""
    inner = {(room, other) for room, other in pairs() if room.startswith("_engine.") and other.startswith("_engine.")}
    return graph({(room.partition(".")[2], other.partition(".")[2]) for room, other in inner})


def graph(edges: set[tuple[str, str]]) -> dict[str, set[str]]:
    below: dict[str, set[str]] = {room: set() for edge in sorted(edges) for room in edge}
    for room, other in edges:
        below[room].add(other)
    return below


def heights(below: Mapping[str, set[str]]) -> dict[str, int]:
    """The floor of each room: one above the highest room that it imports."""
    known: dict[str, int] = {}

    def height(room: str) -> int:
        if room not in known:
            known[room] = 1 + max((height(other) for other in below[room]), default=-1)
        return known[room]

    for room in below:
        height(room)
    return known


def needed(below: Mapping[str, set[str]]) -> list[tuple[str, str]]:
    """The edges that do not follow from others."""

    def reach(room: str) -> set[str]:
        return below[room].union(*(reach(other) for other in below[room]))

    return sorted((room, low) for room in below for low in below[room] if not any(low in reach(other) for other in below[room]))


def tower(title: str, below: Mapping[str, set[str]], descriptions: Mapping[str, str], width: int) -> str:
    """Boxes on floors, the lowest at the bottom, and an arrow from each room to those that it stands on.

    An arrow that passes floors takes a lane between their boxes; arrows to the same room share one.
    """
    box_width, box_height, gap = (178, 46, 34) if descriptions else (124, 28, 26)
    floor_of = heights(below)
    floors: list[list[str]] = [[room for room in sorted(below) if floor_of[room] == floor] for floor in range(max(floor_of.values()) + 1)]
    links: set[tuple[str, str]] = set()
    for room, low in needed(below):
        step = low
        for floor in range(floor_of[low] + 1, floor_of[room]):
            lane = f"{low} {floor}"
            if lane not in floors[floor]:
                floors[floor].append(lane)
            links.add((lane, step))
            step = lane
        links.add((room, step))
    middle: dict[str, float] = {}
    for items in floors:  # an item stands about above what it leads to
        under = {item: [middle[low] for upper, low in links if upper == item] for item in items}
        items.sort(key=lambda item: (sum(under[item]) / max(len(under[item]), 1), item))
        widths = [box_width if item in below else 12 for item in items]
        space = (width - sum(widths)) / len(items)
        for number, item in enumerate(items):
            middle[item] = sum(widths[:number]) + widths[number] / 2 + (number + 0.5) * space
    total = len(floors) * (box_height + gap) + gap
    top = {item: total - (floor + 1) * (box_height + gap) for floor, items in enumerate(floors) for item in items}
    shapes = []
    for upper, low in sorted(links):
        x, y, to_x, to_y = middle[upper], top[upper] + box_height, middle[low], top[low]
        bend = (to_y - y) / 2
        path = f"M{x:g} {y:g}C{x:g} {y + bend:g} {to_x:g} {to_y - bend:g} {to_x:g} {to_y - (low in below):g}"
        shapes.append(arrow(path) if low in below else f'<path d="{path}V{to_y + box_height:g}" class="line"/>')
    for room in sorted(below):
        x, y = middle[room], top[room]
        shapes.append(box(x - box_width / 2, y, box_width, box_height))
        shapes.append(text(x, y + 19, room, "name", "middle"))
        if descriptions:
            shapes.append(text(x, y + 37, descriptions[room], "small", "middle"))
    return picture(title, width, total, shapes)


def descriptions() -> dict[str, str]:
    lines = (PICTURES / "rooms.txt").read_text().splitlines()
    return dict(line.split(": ", 1) for line in lines if not line.startswith("#"))


# -- the life of a read ------------------------------------------------------------------------------------------------


def read() -> str:
    """Steps from top to bottom, each with its exit to the right."""
    left, step_width, right, exit_width, gap = 20, 360, 480, 340, 26
    shapes: list[str] = []
    y, steps = 20, 0
    step_top = step_height = 0
    for line in (PICTURES / "read.txt").read_text().splitlines():
        kind, _, rest = line.partition(": ")
        head, _, words = (part.strip() for part in rest.partition("|"))
        if kind == "step":
            lines = textwrap.wrap(words, 48)
            if steps:
                shapes.append(arrow(f"M{left + step_width / 2:g} {step_top + step_height}V{y - 1}"))
            steps += 1
            step_top, step_height = y, 32 + 17 * len(lines)
            shapes.append(box(left, y, step_width, step_height))
            shapes.append(text(left + 14, y + 21, f"{steps}. {head}", "title"))
            shapes += [text(left + 14, y + 40 + 17 * number, part) for number, part in enumerate(lines)]
            y += step_height + gap
        elif kind == "exit":
            lines = textwrap.wrap(words, 44)
            height = 32 + 17 * len(lines)
            shapes.append(arrow(f"M{left + step_width} {step_top + 16}H{right - 1}"))
            shapes.append(box(right, step_top, exit_width, height, "exit"))
            shapes.append(text(right + 14, step_top + 21, head, "title"))
            shapes += [text(right + 14, step_top + 40 + 17 * number, part) for number, part in enumerate(lines)]
            y = step_top + max(step_height, height) + gap
    return picture("The life of one Cache.read", right + exit_width + 20, y - gap + 20, shapes)


def pictures() -> dict[str, str]:
    """Each file's name and content."""
    return {
        "rooms.svg": tower("The rooms of src/forebay, each above those that it imports", top_rooms(), descriptions(), 860),
        "engine.svg": tower("The rooms of src/forebay/_engine", engine_rooms(), {}, 640),
        "read.svg": read(),
    }


def main() -> int:
    for name, content in pictures().items():
        (PICTURES / name).write_text(content)
    return 0


if __name__ == "__main__":
    sys.exit(main())
