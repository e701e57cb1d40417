"""Ceilings of the structure: what exceeds one fails, what is below one is told; and circles of modules are found."""

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
"lines" = { most = 50_000 }
"miss of `read`: functions" = { most = 358, why = "It asks the peers first." }
"""


@pytest.fixture(scope="module")
def tool() -> Iterator[ModuleType]:
    with tools.tool("structure") as module:
        yield module


def numbers(lines: int = 50_000, functions: int = 358) -> dict[str, int]:
    return {"lines": lines, "miss of `read`: functions": functions}


def test_a_row_has_a_number_and_perhaps_a_reason(tool: ModuleType) -> None:
    assert tool.ceilings_of(TEXT) == {"lines": (50_000, ""), "miss of `read`: functions": (358, "It asks the peers first.")}


def test_equal_numbers_pass(tool: ModuleType) -> None:
    assert tool.compared(numbers(), tool.ceilings_of(TEXT)) == ([], {})


def test_an_exceeded_ceiling_fails_and_says_what_to_do(tool: ModuleType) -> None:
    verdict = tool.compared(numbers(functions=359), tool.ceilings_of(TEXT))
    (sentence,) = verdict.wrong
    assert sentence.startswith("miss of `read`: functions: 359 exceeds the ceiling, 358;")
    assert "`why`" in sentence
    assert verdict.lower == {}


def test_a_number_below_its_ceiling_is_told_and_passes(tool: ModuleType) -> None:
    assert tool.compared(numbers(lines=49_000), tool.ceilings_of(TEXT)) == ([], {"lines": 49_000})


def test_a_missing_row_fails(tool: ModuleType) -> None:
    (sentence,) = tool.compared(numbers() | {"floors": 10}, tool.ceilings_of(TEXT)).wrong
    assert sentence.startswith("floors: 10 has no row")


def test_a_row_that_nothing_counts_fails(tool: ModuleType) -> None:
    (sentence,) = tool.compared({"lines": 50_000}, tool.ceilings_of(TEXT)).wrong
    assert sentence.startswith("miss of `read`: functions: nothing of this name is counted")


def test_lowering_changes_the_numbers_only(tool: ModuleType) -> None:
    text = tool.lowered(TEXT, {"lines": 49_000, "miss of `read`: functions": 350})
    assert text == TEXT.replace("50_000", "49_000").replace("358", "350")


def test_a_row_of_several_lines_cannot_be_lowered(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match="must be one line"):
        tool.lowered("[lines]\nmost = 50_000\n", {"lines": 49_000})


@pytest.mark.rotates
def test_the_file_of_the_repository_can_be_read_and_lowered(tool: ModuleType) -> None:
    text = tool.CEILINGS.read_text()
    ceilings = tool.ceilings_of(text)
    assert tool.ceilings_of(tool.lowered(text, dict.fromkeys(ceilings, 0))) == {name: (0, row.why) for name, row in ceilings.items()}
    assert tool.counted(tool.modules()).keys() < ceilings.keys()


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
