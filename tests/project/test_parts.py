"""What rotates comes to its turn, and what starts processes is known by its code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

from tests import parts
from tests.conftest import is_of_part
from tests.processes import ProcessGroup, in_child
from tests.starts import refuse, starts

NAMES = [f"tests/a.py::test[{number}]" for number in range(100)]


@pytest.fixture(autouse=True)
def day_of_the_run() -> Iterator[None]:
    day = parts._day
    yield
    parts._day = day


@pytest.mark.parametrize("of", [parts.PARTS, parts.STRESS])
@pytest.mark.parametrize("things", [NAMES, range(100)], ids=["tests", "crash points"])
def test_each_comes_once_in_a_row_of_days(things: Any, of: int) -> None:
    taken = []
    for day in range(20_000, 20_000 + of):
        parts.choose(str(day))
        taken += [thing for thing in things if parts.takes(thing, of)]
    assert sorted(taken) == sorted(things)


@pytest.mark.parametrize("name", ["", "all"])
def test_all_of_them_at_once(name: str) -> None:
    parts.choose(name)
    assert all(map(parts.takes, NAMES))
    assert parts.share(44) == 44


def test_a_part_is_named_so_that_it_can_be_repeated() -> None:
    assert "--part 20000 repeats it" in parts.choose("20000")
    assert parts.share(44) == 9
    assert "repeats it" in parts.choose("today")


def test_a_stress_test_that_also_rotates_is_drawn_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    request.node.add_marker(pytest.mark.stress)
    request.node.add_marker(pytest.mark.rotates)
    monkeypatch.setattr(request.config.option, "part", "today")
    taken = []
    for day in range(20_000, 20_000 + parts.STRESS):
        parts.choose(str(day))
        taken.append(is_of_part(request.node))
    assert taken.count(True) == 1


def forks() -> int:
    return os.fork()


def helper() -> object:
    return [forks for _ in range(2)]


@pytest.fixture
def starting() -> object:
    return helper


def test_a_test_that_starts_nothing(request: pytest.FixtureRequest) -> None:
    assert not starts(request.node)


def test_by_a_fixture(request: pytest.FixtureRequest, children: ProcessGroup) -> None:
    assert starts(request.node)


def test_by_a_function_that_a_fixture_names(request: pytest.FixtureRequest, starting: object) -> None:
    assert starts(request.node)


def test_by_a_fixture_that_a_text_names(request: pytest.FixtureRequest) -> None:
    assert starts(request.node) or not request.getfixturevalue("server")


@pytest.mark.parametrize("function", [helper])
def test_by_a_parameter(request: pytest.FixtureRequest, function: FunctionType) -> None:
    assert starts(request.node)


@pytest.mark.processes
def test_by_its_mark(request: pytest.FixtureRequest) -> None:
    assert starts(request.node)


@pytest.mark.parametrize("start", [os.fork, lambda: subprocess.run([sys.executable, "-c", ""], check=True)], ids=["fork", "program"])
def test_a_start_that_is_refused(start: Any) -> None:
    def try_it() -> None:
        refuse()
        with pytest.raises(AssertionError, match="is marked with `processes`"):
            start()

    in_child(try_it)
