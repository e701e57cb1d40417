"""The mutants fit the code. `make mutants` runs them."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools import tool

ROOT = Path(__file__).parents[2]

SOURCE = """
def first(x):
    return x.size > 0

class Files:
    def remove(self, name):
        if self.is_there(name, "é") and not self.held:
            self.unlink(name)
            self.count += 1
        return self.count
"""


@pytest.fixture(scope="module")
def mutants() -> Iterator[Any]:
    with tool("mutants") as module:
        yield module


@pytest.fixture
def edit(mutants: Any) -> Callable[..., str]:
    """The source after an edit of ``Files.remove``."""

    def edit(old: str, new: str, where: str = "Files.remove", source: str = SOURCE) -> str:
        edited: str = mutants.edited(mutants.Mutant(1, "a name", f"module:{where}", old, new, "a test"), source)
        ast.parse(edited)
        return edited

    return edit


def test_every_mutant_fits_the_code(mutants: Any) -> None:
    assert mutants.misfits() == []


@pytest.mark.rotates
def test_the_test_of_every_mutant_is_there(mutants: Any) -> None:
    """With its parameters, of which the code of the test does not tell."""
    tests = sorted({f"tests/{mutant.test}" for mutant in mutants.MUTANTS})
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "--part", "all", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_page_lists_the_mutants(mutants: Any) -> None:
    page = ROOT / "docs/internals/invariants.md"
    assert page.read_text() == mutants.invariants_page(page), "run `python tools/mutants.py --page`"


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        ("self.held", "True", "self.held:", "(True):"),
        ("self.held", "self.held or name", "self.held:", "(self.held or name):"),
        ("self.is_there(name, 'é')", "False", 'self.is_there(name, "é")', "(False)"),
        ("self.unlink(name)", "", "self.unlink(name)", "pass"),
        ("self.unlink", "print", "self.unlink(", "(print)("),
        (
            "self.unlink(name)\nself.count += 1",
            "if name:\n    self.count += 1\nself.unlink(name)",
            "self.unlink(name)\n            self.count += 1",
            "if name:\n                self.count += 1\n            self.unlink(name)",
        ),
    ],
)
def test_only_the_piece_is_replaced(edit: Callable[..., str], old: str, new: str, before: str, after: str) -> None:
    assert SOURCE.count(before) == 1
    assert edit(old, new) == SOURCE.replace(before, after)


def test_a_replaced_expression_keeps_its_precedence(edit: Callable[..., str]) -> None:
    edited = edit("size", "size - 1", "total", "def total(size):\n    return 2 * size\n")
    names: dict[str, Any] = {}
    exec(edited, names)
    assert names["total"](3) == 4  # and not 2 * 3 - 1


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("def first(x):\n    return x.size > 0\n", "def second(y, z):\n    return self.held\n\n\nNEW = 1\n"),
        ("self.unlink(name)\n", "self.discard(name)\n            self.held_by = None\n"),
        ('self.is_there(name, "é")', 'self.is_there(\n                name,\n                "é",\n            )'),
        ("    def remove", "    @property\n    def held(self):\n        return self.held\n\n    def remove"),
        ("return self.count", "if self.count:\n            return self.count\n        return 0"),
    ],
    ids=["another function", "a neighbouring statement", "line breaks", "a new function before it", "code after it"],
)
def test_changes_around_the_piece_break_nothing(edit: Callable[..., str], before: str, after: str) -> None:
    source = SOURCE.replace(before, after)
    assert source != SOURCE
    assert "and not (False):" in edit("self.held", "False", source=source)
    assert "if (False) and not self.held:" in edit("self.is_there(name, 'é')", "False", source=source)


@pytest.mark.parametrize(
    ("old", "where", "message"),
    [
        ("self.gone", "Files.remove", "0 times"),
        ("name", "Files.remove", "2 times"),
        ("self.unlink", "first", "0 times"),
        ("self.held", "Files.add", "there is no module:Files.add"),
    ],
)
def test_an_edit_that_does_not_fit_exactly_once_is_refused(edit: Callable[..., str], old: str, where: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        edit(old, "None", where)


def test_a_class_and_a_module_contain_their_functions(edit: Callable[..., str]) -> None:
    assert edit("x.size > 0", "True", "") == SOURCE.replace("x.size > 0", "(True)")
    assert edit("self.held", "True", "Files") == SOURCE.replace("self.held", "(True)")


def test_misfits_are_reported(mutants: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    good = mutants.MUTANTS[0]
    wrong = [
        replace(good, name="no such function", where="_engine.store:nothing"),
        replace(good, name="no such module", where="nowhere:nothing"),
        replace(good, name="no such test", test="project/test_mutants.py::test_nothing"),
        good,
    ]
    monkeypatch.setattr(mutants, "MUTANTS", (*mutants.MUTANTS, *wrong))
    report = "\n".join(mutants.misfits())
    expected = (
        "no such function: there is no",
        "no such module:",
        "no such test: there is no",
        "two mutants are named",
        "invariant 1 has",
    )
    assert [part for part in expected if part not in report] == []
