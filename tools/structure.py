"""How large the house is, and how much of it one call goes through: the numbers of the design's section "Structure".

    python tools/structure.py             the table
    python tools/structure.py --paths     and, for each call, the functions that it enters, by module

Counted in the source: modules, lines, rooms (what lies directly below src/forebay), arrows between rooms, floors (the longest chain of
rooms that import one another), circles, classes whose name exists more than once, private functions that are named at one place only.
Counted by running: the functions and modules of ours that one call enters, on all threads, once the same was done before.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "forebay"


# -- in the source -----------------------------------------------------------------------------------------------------


def room_of(module: str) -> str:
    """The room of a module such as ``forebay._engine.store``; "" for the package itself."""
    return ".".join(module.split(".")[1:2])


def modules() -> dict[str, ast.Module]:
    """The syntax trees of all modules, by name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


def imports_of(name: str, tree: ast.Module, known: set[str]) -> Iterator[str]:
    """The modules of ours that a module imports, wherever in it that stands."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "forebay")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "forebay":
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else str(node.module)


def arrows(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Which room imports which."""
    pairs = ((room_of(name), room_of(other)) for name, tree in trees.items() for other in imports_of(name, tree, set(trees)))
    return {(room, other) for room, other in pairs if room and other and room != other}


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Rooms that import one another, directly or through others."""
    reach: dict[str, set[str]] = collections.defaultdict(set)
    for room, other in edges:
        reach[room].add(other)
    grown = True
    while grown:
        grown = False
        for found in reach.values():
            more = set().union(*(reach.get(one, set()) for one in found)) - found
            grown = grown or bool(more)
            found |= more
    rings = {frozenset(one for one in reach if one in reach[room] and room in reach.get(one, set())) for room in reach}
    return [set(ring) for ring in rings if len(ring) > 1]


def floors(edges: set[tuple[str, str]]) -> int:
    """The longest chain of rooms of which each imports the next; rooms of one circle count as one."""
    below: dict[str, set[str]] = collections.defaultdict(set)
    for room, other in edges:
        below[room].add(other)
    heights: dict[str, int] = {}

    def height(room: str, above: frozenset[str]) -> int:
        if room not in heights:
            heights[room] = 1 + max((height(one, above | {room}) for one in below[room] - above), default=0)
        return heights[room]

    return max(height(room, frozenset({room})) for room in {room for edge in edges for room in edge})


def names_twice(trees: dict[str, ast.Module]) -> list[str]:
    """Names that more than one class has."""
    counts = collections.Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return sorted(name for name, count in counts.items() if count > 1)


def private_functions(trees: dict[str, ast.Module]) -> tuple[int, int]:
    """How many functions have a private name, and how many of these names stand at one place beside their definition."""
    defined: list[tuple[str, str]] = []
    named: collections.Counter[tuple[str, str]] = collections.Counter()
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                if node.name.startswith("_") and not node.name.endswith("__"):
                    defined.append((module, node.name))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                named[module, node.id] += 1
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                named[module, node.attr] += 1
    return len(defined), sum(named[one] == 1 for one in defined)


def upward(edges: set[tuple[str, str]], order: list[str]) -> set[tuple[str, str]]:
    """Arrows from a room to one that stands behind it in the order."""
    at = {room: number for number, room in enumerate(order)}
    return {(room, other) for room, other in edges if room in at and other in at and at[other] > at[room]}


# -- by running --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def entered() -> Iterator[set[CodeType]]:
    """The functions of ours that are entered inside of the block, on any thread."""
    found: set[CodeType] = set()
    ours = str(PACKAGE)

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours) and not frame.f_code.co_name.startswith("<"):
            found.add(frame.f_code)

    threading.setprofile_all_threads(note) if hasattr(threading, "setprofile_all_threads") else threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        threading.setprofile_all_threads(None) if hasattr(threading, "setprofile_all_threads") else threading.setprofile(None)


def calls(folder: Path) -> Iterator[tuple[str, set[CodeType]]]:
    """Each call by its name, with what it enters when it is made for the second time."""
    import fsspec

    import forebay
    from forebay.sources import UrlSource
    from forebay.testing import ScriptedServer

    def watched(call: Callable[[int], object]) -> set[CodeType]:
        call(0)
        with entered() as found:
            call(1)
        return found

    memory = fsspec.filesystem("memory")
    with ScriptedServer() as server, forebay.Cache(folder / "root", budget=1 << 30, min_free=0) as cache:
        urls = [server.put(f"/data/{number}.bin", bytes([number]) * 100_000) for number in range(2)]
        items = [server.put(f"/items/{number}.bin", bytes([number]) * 100_000) for number in range(2)]
        for number in range(2):
            for name in "abc":
                memory.pipe(f"/runs/{number}/{name}", bytes([number]) * 50_000)
        yield "a miss of `Cache.read`", watched(lambda number: cache.read(urls[number]))
        yield "a hit of `Cache.read`", watched(lambda number: cache.read(urls[0]))

        def load(number: int) -> None:
            with cache.prefetcher(UrlSource(f"{server.url}/items"), name=f"pool{number}", workers=1) as pool:
                lazy = pool.get_lazy(items[number].rpartition("/")[2])
                pool._loader.wait_until_stored(lazy._load)

        yield "`get_lazy`, until the item is published", watched(load)
        yield "`Cache.directory` of 3 files", watched(lambda number: cache.directory(f"/runs/{number}", filesystem=memory).close())
        function = cache.tasks("structure").cached(_square, tag="square-{x}")
        yield "a cached call that runs", watched(function)
        yield "`forebay.claim`", watched(lambda number: forebay.claim([str(folder / f"claimed{number}")]).close())


def _square(x: int) -> int:
    return x * x


# -- the table ---------------------------------------------------------------------------------------------------------


def counted() -> Iterator[tuple[str, str]]:
    """The rows of the table that come of the source."""
    trees = modules()
    edges = arrows(trees)
    private, once = private_functions(trees)
    lines = sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py"))
    yield "modules", f"{len(trees):,}"
    yield "lines", f"{lines:,}"
    yield "files at the top", str(len(list(PACKAGE.glob("*.py"))))
    yield "rooms", str(len({room_of(name) for name in trees} - {""}))
    yield "floors", str(floors(edges))
    yield "arrows between rooms", str(len(edges))
    yield "circles", str(len(circles(edges)))
    yield "class names used twice", str(len(names_twice(trees)))
    yield "private functions, of these named once", f"{private:,}, {once:,}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paths", action="store_true", help="show the functions that each call enters")
    arguments = parser.parse_args()
    sys.path.insert(0, str(SRC))
    for name, value in counted():
        print(f"| {name} | {value} |")
    with tempfile.TemporaryDirectory(prefix="forebay-structure-") as folder:
        for name, found in calls(Path(folder)):
            places = collections.defaultdict(list)
            for code in list(found):  # a thread of the call may still add to it
                places[str(Path(code.co_filename).relative_to(PACKAGE))].append(
                    code.co_qualname if hasattr(code, "co_qualname") else code.co_name
                )
            print(f"| {name} | {len(found)} functions in {len(places)} modules |")
            if arguments.paths:
                for place, functions in sorted(places.items()):
                    print(f"    {place}: {', '.join(sorted(functions))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
