"""How large the library is, and how much of it one call enters: the numbers of the design's section "Structure".

    python tools/structure.py             the table; exit code 1 if a number exceeds a ceiling of tools/ceilings.toml that fails
    python tools/structure.py --lower     and write the numbers that are below their ceilings into that file
    python tools/structure.py --paths     and, for each call, the functions that it enters, by module

Counted in the syntax trees: rooms (what lies directly below src/forebay), floors (the longest chain of rooms that import one another),
arrows between rooms, circles of modules, class names that exist more than once, functions with many parameters, bold headings in docstrings
of modules; and the size: statements and nodes without imports and docstrings, so that neither splitting a module nor packing a line changes
a number. Counted by running: the functions of ours that one call enters, in all threads of a warm process.
"""

from __future__ import annotations

import argparse
import ast
import collections
import re
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

SRC = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SRC / "forebay"
TESTS = SRC.parent / "tests"
CEILINGS = Path(__file__).with_name("ceilings.toml")
LONGEST_WHY = 120
"""Characters."""
COMPLEX = 15
"""A function with a larger cyclomatic number is complex."""
MANY = 8
"""More parameters than these are many."""


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


def module_arrows(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Which module imports which, for type checkers only too: whoever reads the one has to read the other."""
    return {(name, other) for name, tree in trees.items() for other in imports_of(name, tree, set(trees)) if other != name}


def circles(edges: set[tuple[str, str]]) -> list[set[str]]:
    """Those that import one another, directly or through others."""
    direct: dict[str, set[str]] = collections.defaultdict(set)
    for one, other in edges:
        direct[one].add(other)
    reach: dict[str, set[str]] = {}
    for one in sorted(direct):
        found, ahead = set[str](), [one]
        while ahead:
            more = direct.get(ahead.pop(), set()) - found
            found |= more
            ahead += more
        reach[one] = found
    rings = {frozenset(other for other in found if one in reach.get(other, ())) for one, found in reach.items()}
    return sorted((set(ring) for ring in rings if len(ring) > 1), key=sorted)


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


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension, ast.match_case)


class Function(NamedTuple):
    """A function and its numbers. Functions in it count with it."""

    name: str
    statements: int
    complexity: int
    parameters: int


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree but for imports, docstrings, and what only says whether a name is read or written."""
    ahead = [tree]
    while ahead:
        node = ahead.pop()
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if not is_text and not isinstance(node, (ast.Import, ast.ImportFrom, ast.expr_context)):
            yield node
            ahead += ast.iter_child_nodes(node)


def statements(tree: ast.AST) -> int:
    return sum(isinstance(node, ast.stmt) for node in nodes_of(tree))


def complexity(tree: ast.AST) -> int:
    """The cyclomatic number: one more than the branches."""
    found = 1
    for node in nodes_of(tree):
        found += isinstance(node, BRANCHES)
        if isinstance(node, ast.comprehension):
            found += len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            found += len(node.values) - 1
    return found


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many a function has, without ``self`` and ``cls``; ``*args`` and ``**kwargs`` are one each."""
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]
    return sum(argument.arg not in ("self", "cls") for argument in named)


def functions(trees: Mapping[str, ast.Module]) -> list[Function]:
    """All functions; a method has the name of its class, too."""
    found = []
    for module, tree in trees.items():
        ahead: list[tuple[str, ast.AST]] = [(module, tree)]
        while ahead:
            name, node = ahead.pop()
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
                name = f"{name}.{node.name}"
            if isinstance(node, FUNCTIONS):
                found.append(Function(name, statements(node) - 1, complexity(node), parameters(node)))
            ahead += ((name, child) for child in ast.iter_child_nodes(node))
    return found


def headings(trees: Mapping[str, ast.Module]) -> list[str]:
    """The bold words with which paragraphs of the docstrings of modules begin: each is a second subject."""
    return [
        f"{name}: {words}" for name, tree in trees.items()
        for words in re.findall(r"(?:\A|\n\n)\*\*(.+?)\*\*", ast.get_docstring(tree) or "")
    ]  # fmt: skip


def exported(trees: Mapping[str, ast.Module]) -> int:
    """The names in all ``__all__``."""
    lists = [
        node for tree in trees.values() for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    ]  # fmt: skip
    return sum(isinstance(node, ast.Constant) for each in lists for node in ast.walk(each.value))


PUBLIC = frozenset({"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"})
"""Attributes of the standard library that only look private."""


def private_accesses(trees: Iterable[ast.AST]) -> int:
    """How often private attributes of something else than ``self`` and ``cls`` are used."""
    attributes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return sum(
        node.attr.startswith("_") and not node.attr.endswith("__") and node.attr not in PUBLIC
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        for node in attributes
    )  # fmt: skip


# -- by running --------------------------------------------------------------------------------------------------------

WARM, COUNTED = 20, 9
"""How often each call is made before it is counted, and how often it is counted."""
QUIET = 0.1
"""Seconds without a new function in any thread after which a call has ended in all of them."""


class Watch:
    """Notes the functions of ours that are entered. `threading.setprofile` reaches only threads that start later: create it first."""

    def __init__(self) -> None:
        self._ours, self._not_ours = f"{PACKAGE}/", f"{PACKAGE}/testing"  # the server of the calls runs in this process
        self._found: set[CodeType] | None = None
        threading.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        found, code = self._found, frame.f_code
        if found is None or event != "call" or code.co_name.startswith("<"):
            return
        if code.co_filename.startswith(self._ours) and not code.co_filename.startswith(self._not_ours):
            found.add(code)

    def entered(self, call: Callable[[int], object]) -> set[CodeType]:
        """What more than half of the counted calls enter. ``call`` gets another number each time. What one call in many does, such as
        the upkeep of every second, is left out: it would make the number depend on the speed of the machine."""
        for number in range(WARM):
            call(number)
        counts: collections.Counter[CodeType] = collections.Counter()
        for number in range(WARM, WARM + COUNTED):
            self._wait_until_quiet(set())
            found = self._found = set[CodeType]()
            sys.setprofile(self._note)
            try:
                call(number)
            finally:
                sys.setprofile(None)
            self._wait_until_quiet(found)
            self._found = None
            counts.update(found)
        return {code for code, count in counts.items() if 2 * count > COUNTED}

    def _wait_until_quiet(self, found: set[CodeType]) -> None:
        self._found, size = found, -1
        while len(found) != size:
            size = len(found)
            time.sleep(QUIET)
        self._found = None

    def close(self) -> None:
        threading.setprofile(None)


def calls(folder: Path) -> Iterator[tuple[str, Callable[[int], object]]]:
    """Each call by its name. With another number a miss asks for another thing; a hit asks for the same."""
    import fsspec

    import forebay
    from forebay.sources import UrlSource
    from forebay.testing import ScriptedServer

    memory = fsspec.filesystem("memory")
    with ScriptedServer() as server, forebay.Cache(folder / "root", budget=1 << 30, min_free=0) as cache:
        urls = [server.put(f"/data/{number}.bin", bytes([number]) * 100_000) for number in range(WARM + COUNTED)]
        for number in range(WARM + COUNTED):
            server.put(f"/items/{number}.bin", bytes([number]) * 100_000)
            for name in "abc":
                memory.pipe(f"/runs/{number}/{name}", bytes([number]) * 50_000)
        yield "miss of `read`", lambda number: cache.read(urls[number])
        yield "hit of `read`", lambda number: cache.read(urls[0])
        yield "miss of `get_or_put`", lambda number: cache.get_or_put(f"made{number}", lambda: b"x" * 1000)
        yield "hit of `get_or_put`", lambda number: cache.get_or_put("made0", lambda: b"x" * 1000)
        function = cache.tasks("structure").cached(_square)
        yield "miss of a cached call", function
        yield "hit of a cached call", lambda number: function(0)
        yield "miss of `directory`", lambda number: cache.directory(f"/runs/{number}", filesystem=memory).close()
        yield "hit of `directory`", lambda number: cache.directory("/runs/0", filesystem=memory).close()
        yield "`put`", lambda number: cache.put(f"put{number}", bytes([number]) * 1000)
        with cache.prefetcher(UrlSource(f"{server.url}/items"), name="items", workers=1) as pool:
            yield "miss of `get_lazy().get()`", lambda number: pool.get_lazy(f"{number}.bin").get()


def _square(x: int) -> int:
    return x * x


def place_of(code: CodeType) -> str:
    """The file of a function, below src/forebay."""
    return str(Path(code.co_filename).relative_to(PACKAGE))


def paths() -> dict[str, set[CodeType]]:
    """What each call enters, by the call's name."""
    watch = Watch()
    try:
        with tempfile.TemporaryDirectory(prefix="forebay-structure-") as folder:
            return {name: watch.entered(call) for name, call in calls(Path(folder))}
    finally:
        watch.close()


# -- ceilings ----------------------------------------------------------------------------------------------------------


class Ceiling(NamedTuple):
    """The largest number that passes; whether a larger one fails, or only warns; and why the ceiling was raised, if it was."""

    most: int
    fails: bool
    why: str = ""


class Verdict(NamedTuple):
    """What is wrong, and what is only told, in sentences; and the numbers that are below their ceilings."""

    wrong: list[str]
    warnings: list[str]
    lower: dict[str, int]


def ceilings_of(text: str) -> dict[str, Ceiling]:
    """The rows of tools/ceilings.toml. Raises ValueError if it has other tables than these two, or a row is in both."""
    tables = tomllib.loads(text)
    if tables.keys() != {"fails", "warns"} or tables["fails"].keys() & tables["warns"].keys():
        raise ValueError(f"{CEILINGS.name}: each row is in one of the tables [fails] and [warns]")
    return {
        name: Ceiling(row["most"], table == "fails", row.get("why", "")) for table, rows in tables.items() for name, row in rows.items()
    }


def compared(now: Mapping[str, int], ceilings: Mapping[str, Ceiling]) -> Verdict:
    """Compare the numbers with their ceilings."""
    wrong, warnings, lower = list[str](), list[str](), dict[str, int]()
    for name, number in now.items():
        if name not in ceilings:
            wrong.append(f"{name}: {number:,} has no row in {CEILINGS.name}; add one")
        elif number > ceilings[name].most:
            (wrong if ceilings[name].fails else warnings).append(
                f"{name}: {number:,} exceeds the ceiling, {ceilings[name].most:,}; make the code simpler, or raise it in"
                f" {CEILINGS.name} with a sentence as `why`"
            )
        elif number < ceilings[name].most:
            lower[name] = number
    wrong += [f"{name}: nothing of this name is counted; remove its row from {CEILINGS.name}" for name in ceilings if name not in now]
    long = {name: len(row.why) for name, row in ceilings.items() if len(row.why) > LONGEST_WHY}
    wrong += [f"{name}: its `why` has {length} characters, of at most {LONGEST_WHY}" for name, length in long.items()]
    return Verdict(wrong, warnings, lower)


def lowered(text: str, lower: Mapping[str, int]) -> str:
    """The text of tools/ceilings.toml with these numbers; comments and reasons stay."""
    for name, number in lower.items():
        row = re.compile(rf'^("{re.escape(name)}" = {{ most = )[\d_]+', re.MULTILINE)
        text, count = row.subn(rf"\g<1>{number:_}", text)
        if count != 1:
            raise ValueError(f'{CEILINGS.name}: the row of {name} must be one line: "{name}" = {{ most = NUMBER }}')
    return text


# -- the table ---------------------------------------------------------------------------------------------------------


def counted(trees: dict[str, ast.Module]) -> dict[str, int]:
    """The numbers that come of the source."""
    edges, all_functions = arrows(trees), functions(trees)
    return {
        "rooms": len({room_of(name) for name in trees} - {""}),
        "floors": floors(edges),
        "arrows between rooms": len(edges),
        "circles of modules": len(circles(module_arrows(trees))),
        "class names used twice": len(names_twice(trees)),
        "headings in docstrings of modules": len(headings(trees)),
        f"functions with over {MANY} parameters": sum(function.parameters > MANY for function in all_functions),
        "statements": sum(map(statements, trees.values())),
        "nodes of the syntax trees": sum(1 for tree in trees.values() for _ in nodes_of(tree)),
        f"functions with a cyclomatic number over {COMPLEX}": sum(function.complexity > COMPLEX for function in all_functions),
        "largest cyclomatic number": max(function.complexity for function in all_functions),
        "statements of the longest function": max(function.statements for function in all_functions),
        "names in `__all__`": exported(trees),
        "private accesses in tests": private_accesses(ast.parse(path.read_text(), str(path)) for path in sorted(TESTS.rglob("*.py"))),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lower", action="store_true", help="write the numbers that are below their ceilings into tools/ceilings.toml")
    parser.add_argument("--paths", action="store_true", help="show the functions that each call enters")
    arguments = parser.parse_args()
    sys.path.insert(0, str(SRC))
    trees = modules()
    now, entered = counted(trees), paths()
    for name, found in entered.items():
        now[f"{name}: functions"] = len(found)
    text = CEILINGS.read_text()
    ceilings = ceilings_of(text)
    verdict = compared(now, ceilings)
    print("| what | now | ceiling |\n|---|---|---|")
    for name, number in now.items():
        print(f"| {name} | {number:,} | {f'{ceilings[name].most:,}' if name in ceilings else 'none'} |")
    for ring in circles(module_arrows(trees)):
        print(f"circle: {', '.join(sorted(ring))}")
    print(f"class names used twice: {', '.join(names_twice(trees))}")
    print(f"headings in docstrings of modules: {'; '.join(headings(trees))}")
    all_functions = sorted(functions(trees))
    print(f"over {MANY} parameters: {', '.join(function.name for function in all_functions if function.parameters > MANY)}")
    print(f"largest cyclomatic number: {max(all_functions, key=lambda function: function.complexity).name}")
    print(f"longest function: {max(all_functions, key=lambda function: function.statements).name}")
    if arguments.paths:
        show_paths(entered)
    if verdict.lower and arguments.lower:
        CEILINGS.write_text(lowered(text, verdict.lower))
    elif verdict.lower:
        rows = ", ".join(f"{name} to {number:,}" for name, number in verdict.lower.items())
        print(f"can be lowered, with `python tools/structure.py --lower`: {rows}")
    for sentence in verdict.warnings:
        print(f"warning: {sentence}")
    for sentence in verdict.wrong:
        print(sentence, file=sys.stderr)
    return 1 if verdict.wrong else 0


def show_paths(entered: Mapping[str, set[CodeType]]) -> None:
    """Print the functions of each call, by file."""
    for name, found in entered.items():
        print(f"\n{name}")
        places = collections.defaultdict(list)
        for code in found:
            places[place_of(code)].append(code.co_qualname)
        for place, functions in sorted(places.items()):
            print(f"    {place}: {', '.join(sorted(functions))}")


if __name__ == "__main__":
    sys.exit(main())
