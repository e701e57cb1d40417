"""A listed test may fail, any other may not; and the list is short, young and complete."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.known_flaky import FILE, listed

REPO = Path(__file__).parents[2]
TESTS = """import pytest

def test_sound(): pass

def test_flaky(): assert 0

@pytest.mark.parametrize("given", [1, 2])
def test_of_two(given): assert given == 1

@pytest.fixture
def leaking():
    yield
    assert 0

def test_that_leaks(leaking): pass
"""
FAILING = ["test_flaky", "test_of_two[2]", "test_that_leaks"]


def entry(test: str, *, cause: str = "It races.", module: str = "guilty.py", days: int = 0) -> str:
    return f'"tests/test_a.py::{test}" = {{ cause = "{cause}", module = "{module}", since = {date.today() - timedelta(days=days)} }}\n'


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One with tests of which three fail, one of them in its teardown."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(TESTS)
    (tmp_path / "guilty.py").touch()
    return tmp_path


def ran(repository: Path, text: str, *words: str) -> tuple[int, str]:
    """The exit code and the output of pytest there, with this list."""
    (repository / FILE).write_text(text)
    plugins = ("-p", "tests.known_flaky", "-p", "no:cacheprovider", *(("-p", "xdist") if "-n" in words else ()))
    command = [sys.executable, "-m", "pytest", "-q", *plugins, "--rootdir", str(repository), *words]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(REPO), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # they take as long to start as all else
    done = subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("words", [(), ("-n", "2")])
def test_a_listed_test_may_fail_and_is_told(repository: Path, words: tuple[str, ...]) -> None:
    code, out = ran(repository, "".join(map(entry, FAILING)), "-ra", *words)
    assert code == 0, out
    assert "3 xfailed" in out
    assert f"known to be flaky: tests/test_a.py::test_flaky: It races. (guilty.py, since {date.today()})" in out


@pytest.mark.parametrize("other", FAILING)
def test_a_test_that_is_not_listed_fails_the_run(repository: Path, other: str) -> None:
    code, out = ran(repository, "".join(entry(test) for test in FAILING if test != other))
    assert code == 1
    assert f"tests/test_a.py::{other}" in out


def test_an_id_without_parameters_means_all_of_them(repository: Path) -> None:
    assert ran(repository, entry("test_of_two"), "-k", "test_of_two")[0] == 0


def test_a_listed_test_that_passes_does_not_fail_the_run(repository: Path) -> None:
    assert ran(repository, entry("test_sound"), "-k", "test_sound")[0] == 0


def test_the_oldest_and_the_longest_list_that_pass(repository: Path) -> None:
    text = entry("test_flaky", days=30) + "".join(entry(f"test_of_two[{number}]") for number in range(4))
    (repository / FILE).write_text(text)
    assert [flaky.test.partition("::")[2] for flaky in listed(repository, date.today())] == [
        "test_flaky", *(f"test_of_two[{number}]" for number in range(4))
    ]  # fmt: skip


def test_a_list_that_is_too_old_fails_the_run(repository: Path) -> None:
    code, out = ran(repository, entry("test_sound", days=31), "-k", "test_sound")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "listed for 31 days, of at most 30" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (entry("test_sound", days=31), "listed for 31 days, of at most 30"),
        (entry("test_sound", days=-2), "`since` is the date"),
        ("".join(entry(f"test_of_two[{number}]") for number in range(6)), "6 tests, of at most 5"),
        (entry("test_of_nothing"), "tests/test_a.py::test_of_nothing: there is no such test"),
        (entry("test_sound").replace("test_a", "test_b"), "there is no such test"),
        (entry("test_sound", cause=" "), "`cause` is a sentence"),
        (entry("test_sound", module="innocent.py"), "`module` is the file at fault"),
        (entry("test_sound").replace("cause", "because"), "a row is"),
        (entry("test_sound").replace(", since", ', why = "so", since'), "a row is"),
        ('"tests/test_a.py::test_sound" = "It races."\n', "a row is"),
        (entry("test_sound").replace(str(date.today()), f'"{date.today()}"'), "`since` is the date"),
        (entry("test_sound").replace(str(date.today()), f"{date.today()}T12:00:00"), "`since` is the date"),
        (entry("test_sound") * 2, "known_flaky.toml: "),
        ("[", "known_flaky.toml: "),
    ],
)
def test_a_list_that_is_wrong_is_refused(repository: Path, text: str, said: str) -> None:
    (repository / FILE).write_text(text)
    with pytest.raises(ValueError, match=re.escape(said)):
        listed(repository, date.today())
