"""Ceilings of the structure: what exceeds one fails or warns, what is below one is told; and what is counted."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests import tools

REPO = Path(__file__).parents[2]
TEXT = """# A comment.
[fails]
"floors" = { most = 10 }
[warns]
"statements" = { most = 30_000 }
"miss of `read`: functions" = { most = 358, why = "It asks the peers first." }
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with tools.tool("structure") as module:
        yield module


def numbers(floors: int = 10, statements: int = 30_000, functions: int = 358) -> dict[str, int]:
    return {"floors": floors, "statements": statements, "miss of `read`: functions": functions}


def test_a_row_fails_or_warns_and_has_a_number_and_perhaps_a_reason(tool: ModuleType) -> None:
    assert tool.ceilings_of(TEXT) == {
        "floors": (10, True, ""),
        "statements": (30_000, False, ""),
        "miss of `read`: functions": (358, False, "It asks the peers first."),
    }


@pytest.mark.parametrize("text", ['"floors" = { most = 10 }\n', TEXT.replace("fails", "fail"), TEXT + '"floors" = { most = 10 }\n'])
def test_a_row_is_in_one_of_two_tables(tool: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="each row is in one of the tables"):
        tool.ceilings_of(text)


def test_equal_numbers_pass(tool: ModuleType) -> None:
    assert tool.compared(numbers(), tool.ceilings_of(TEXT)) == ([], [], {})


def test_an_exceeded_ceiling_of_a_rule_fails_and_says_what_to_do(tool: ModuleType) -> None:
    verdict = tool.compared(numbers(floors=11), tool.ceilings_of(TEXT))
    (sentence,) = verdict.wrong
    assert sentence.startswith("floors: 11 exceeds the ceiling, 10;")
    assert "`why`" in sentence
    assert (verdict.warnings, verdict.lower) == ([], {})


def test_an_exceeded_ceiling_of_a_size_only_warns(tool: ModuleType) -> None:
    verdict = tool.compared(numbers(statements=30_001, functions=359), tool.ceilings_of(TEXT))
    assert [sentence.partition(" exceeds")[0] for sentence in verdict.warnings] == ["statements: 30,001", "miss of `read`: functions: 359"]
    assert (verdict.wrong, verdict.lower) == ([], {})


def test_a_number_below_its_ceiling_is_told_and_passes(tool: ModuleType) -> None:
    assert tool.compared(numbers(statements=29_000), tool.ceilings_of(TEXT)) == ([], [], {"statements": 29_000})


def test_a_missing_row_fails(tool: ModuleType) -> None:
    (sentence,) = tool.compared(numbers() | {"rooms": 23}, tool.ceilings_of(TEXT)).wrong
    assert sentence.startswith("rooms: 23 has no row")


def test_a_row_that_nothing_counts_fails(tool: ModuleType) -> None:
    (sentence,) = tool.compared({"floors": 10, "statements": 30_000}, tool.ceilings_of(TEXT)).wrong
    assert sentence.startswith("miss of `read`: functions: nothing of this name is counted")


def test_a_long_reason_fails(tool: ModuleType) -> None:
    assert tool.compared(numbers(), tool.ceilings_of(TEXT.replace("It asks the peers first.", "x" * 120))).wrong == []
    (sentence,) = tool.compared(numbers(), tool.ceilings_of(TEXT.replace("It asks the peers first.", "x" * 121))).wrong
    assert sentence == "miss of `read`: functions: its `why` has 121 characters, of at most 120"


def test_lowering_changes_the_numbers_only(tool: ModuleType) -> None:
    text = tool.lowered(TEXT, {"statements": 29_000, "miss of `read`: functions": 350})
    assert text == TEXT.replace("30_000", "29_000").replace("358", "350")


def test_a_row_of_several_lines_cannot_be_lowered(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match="must be one line"):
        tool.lowered("[warns.statements]\nmost = 30_000\n", {"statements": 29_000})


@pytest.mark.rotates
def test_the_file_of_the_repository_can_be_read_and_lowered(tool: ModuleType) -> None:
    text = tool.CEILINGS.read_text()
    ceilings = tool.ceilings_of(text)
    lowered = {name: row._replace(most=0) for name, row in ceilings.items()}
    assert tool.ceilings_of(tool.lowered(text, dict.fromkeys(ceilings, 0))) == lowered
    assert tool.counted(tool.modules()).keys() < ceilings.keys()


SOURCE = '''"""Of two subjects.

**One.** It is
**bold** in the next line, and **bold** within.

**Other,** too.
"""

import os

LIMIT = 3
"""Bytes."""


class Shelf:
    """One."""

    def put(self, a, b, /, *more, c=1, **rest):
        """Put."""
        from os import path

        def inner(self):
            return [x for x in a if x if not b] if a and b and c else None

        try:
            return inner
        except OSError:
            pass
'''


def tree_of(source: str) -> dict[str, ast.Module]:
    return {"forebay.a": ast.parse(source)}


def test_functions_are_measured(tool: ModuleType) -> None:
    # Statements: def inner, return, try, return, pass. Branches: one comprehension with two conditions, if else, two `and`, except.
    assert sorted(tool.functions(tree_of(SOURCE))) == [("forebay.a.Shelf.put", 5, 8, 5), ("forebay.a.Shelf.put.inner", 1, 7, 0)]


def test_a_size_depends_on_no_layout_docstring_or_import(tool: ModuleType) -> None:
    bare = ast.unparse(ast.parse("LIMIT = 3\nclass Shelf:\n  a, b = 1, 2\n  def put(self): return 1"))
    full = bare.replace("LIMIT = 3", '"""Doc."""\nimport os\nLIMIT = (\n  3)\n"""Bytes."""').replace("return", '"Doc."; import re; return')
    sizes = [(tool.statements(tree), sum(1 for _ in tool.nodes_of(tree))) for tree in map(ast.parse, (bare, full))]
    assert sizes[0] == sizes[1]
    assert sizes[0][0] == 5


def test_bold_words_that_begin_a_paragraph_are_headings(tool: ModuleType) -> None:
    assert tool.headings(tree_of(SOURCE)) == ["forebay.a: One.", "forebay.a: Other,"]


def test_exported_names_are_counted(tool: ModuleType) -> None:
    assert tool.exported(tree_of('__all__ = ["a", "b"]') | {"forebay.b": ast.parse('__all__ = [*others, "c"] + ["d"]')}) == 4


@pytest.mark.parametrize(
    ("source", "count"),
    [("self._a; cls._b", 0), ("cache._store._engine", 2), ("x.__class__; os._exit(0); row._replace(a=1)", 0), ("self.a._b = 1", 1)],
)
def test_private_accesses_are_counted(tool: ModuleType, source: str, count: int) -> None:
    assert tool.private_accesses([ast.parse(source)]) == count


@pytest.mark.parametrize(
    ("edges", "rings"),
    [
        ("ab bc ac", []),
        ("ab ba", ["ab"]),
        ("ab bc ca cd", ["abc"]),  # d is imported by the circle, and imports none of it
        ("ab ba cd dc bc", ["ab", "cd"]),
        ("ab ba bc cb", ["abc"]),  # two circles with one module in common are one
    ],
)
def test_circles_are_found(tool: ModuleType, edges: str, rings: list[str]) -> None:
    assert tool.circles({(one, other) for one, other in edges.split()}) == [set(ring) for ring in rings]


def test_imports_of_functions_and_type_checkers_count(tool: ModuleType) -> None:
    sources = {
        "forebay.room.a": "def f():\n    from forebay.room import b",
        "forebay.room.b": "if TYPE_CHECKING:\n    from forebay.room.c import C",
        "forebay.room.c": "import forebay.room.a\nimport os",
        "forebay.room": "from forebay.room.a import f",
    }
    edges = tool.module_arrows({name: ast.parse(source) for name, source in sources.items()})
    assert edges == {
        ("forebay.room.a", "forebay.room.b"),
        ("forebay.room.b", "forebay.room.c"),
        ("forebay.room.c", "forebay.room.a"),
        ("forebay.room", "forebay.room.a"),
    }
    assert tool.circles(edges) == [{"forebay.room.a", "forebay.room.b", "forebay.room.c"}]


def test_the_walk_of_a_miss_names_methods_that_exist() -> None:
    """The section of the design that follows a `read` from the call to the bytes."""
    walk = (REPO / "docs/design.md").read_text().partition("### A miss, from the call to the bytes")[2].partition("## The idea")[0]
    nodes = (node for path in (REPO / "src").rglob("*.py") for node in ast.walk(ast.parse(path.read_text())))
    methods = {
        f"{node.name}.{part.name}" for node in nodes if isinstance(node, ast.ClassDef)
        for part in node.body if isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef))
    }  # fmt: skip
    named = re.findall(r"`(\w+\.\w+)`", walk)
    assert len(named) > 15
    assert set(named) <= methods
