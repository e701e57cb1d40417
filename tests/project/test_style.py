"""The style of the code: no long function, no work in an assert, no swallowed error; and no test that cannot fail."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SRC = TESTS.parent / "src"
FILES = sorted(SRC.rglob("*.py"))
LONGEST_FUNCTION = 60

Function = ast.FunctionDef | ast.AsyncFunctionDef


def breaches(look: Callable[[str], Sequence[object]], word: str = "", files: Sequence[Path] = FILES) -> dict[str, Sequence[object]]:
    """What ``look`` finds in sources that have ``word``, by file. One test for all files: a test for each would take longer than what it
    does."""
    assert len(files) > 100
    sources = {str(path.relative_to(SRC)): path.read_text() for path in files}
    return {name: found for name, source in sources.items() if word in source and (found := look(source))}


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def length(function: Function) -> int:
    """Lines of the body, the docstring not counted."""
    body = function.body[1:] if ast.get_docstring(function) else function.body
    return (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_no_function_is_long() -> None:
    assert breaches(lambda source: [f"{f.name}: {n}" for f in functions(ast.parse(source)) if (n := length(f)) > LONGEST_FUNCTION]) == {}


def is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def silences(source: str) -> list[int]:
    """Lines of handlers that catch everything and say nothing."""
    handlers = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ExceptHandler) and is_broad(node)]
    return [h.lineno for h in handlers if all(isinstance(s, (ast.Pass, ast.Continue)) for s in h.body)]


def prints(source: str) -> list[int]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [c.lineno for c in calls if isinstance(c.func, ast.Name) and c.func.id == "print"]


PURE = frozenset({"all", "any", "callable", "can_check", "isinstance", "issubclass", "len", "sorted", "type"})


def busy_asserts(source: str) -> list[int]:
    """Lines of asserts that call something: under `python -O` the call would not happen."""
    tests = [node.test for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Assert)]
    calls = [c for test in tests for c in ast.walk(test) if isinstance(c, (ast.Call, ast.NamedExpr, ast.Await))]
    return [c.lineno for c in calls if not (isinstance(c, ast.Call) and isinstance(c.func, ast.Name) and c.func.id in PURE)]


def bare_acquires(source: str) -> list[int]:
    """Lines where a lock is taken by hand without a bound on the wait; around a fork there is no other way."""
    found = []
    for function in functions(ast.parse(source)):
        if "fork" not in function.name:
            calls = [n for n in ast.walk(function) if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)]
            found += [c.lineno for c in calls if c.func.attr == "acquire" and not c.args and not c.keywords]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize(("look", "word"), [(silences, "except"), (busy_asserts, "assert"), (bare_acquires, "acquire")])
def test_nothing_is_swallowed_or_left_to_an_assert_or_acquired_by_hand(look: Callable[[str], list[int]], word: str) -> None:
    assert breaches(look, word) == {}


def test_only_the_command_line_prints() -> None:
    assert breaches(prints, "print", [path for path in FILES if "cli" not in path.parts]) == {}


JUDGES = frozenset({"fail", "raises", "result", "warns"})
"""Attributes by which a test judges: those of `pytest`, and the result of a child, which raises what the child raised."""


def idle_tests(sources: list[str]) -> list[str]:
    """Names of tests that judge nothing: neither by an assert nor by a function of the tests that has one, however far away."""
    judging: set[str] = set()
    others: list[tuple[str, set[str]]] = []  # with the names that they use
    for function in (function for source in sources for function in functions(ast.parse(source))):
        nodes = list(ast.walk(function))
        if any(isinstance(n, (ast.Assert, ast.Raise)) or (isinstance(n, ast.Attribute) and n.attr in JUDGES) for n in nodes):
            judging.add(function.name)
        else:
            others.append((function.name, {n.id for n in nodes if isinstance(n, ast.Name)}))
    while found := {name for name, used in others if used & judging} - judging:
        judging |= found
    return [name for name, used in others if name.startswith("test_") and not used & judging]


def test_each_test_can_fail() -> None:
    assert idle_tests([path.read_text() for path in sorted(TESTS.rglob("*.py"))]) == []


def test_the_lint_sees() -> None:
    assert silences("try:\n    f()\nexcept Exception:\n    pass") == [3]
    assert silences("try:\n    f()\nexcept OSError:\n    pass") == []
    assert prints("print(1)") == [1]
    assert busy_asserts("assert os.pwrite(fd, b'', 0)") == [1]
    assert busy_asserts("assert isinstance(a, int) and len(b) == 2") == []
    assert bare_acquires("def f():\n    lock.acquire()") == [2]
    assert bare_acquires("def before_fork():\n    lock.acquire()") == []
    assert idle_tests(["def test_a():\n    f()", "def test_b():\n    g()\ndef g():\n    assert a()"]) == ["test_a"]
    assert length(next(functions(ast.parse("def f():\n    'doc'\n    a = 1\n    b = 2")))) == 2
