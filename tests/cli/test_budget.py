"""`budget`: shows it, and is the only verb that changes it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay import Cache, _config
from forebay.testing import ScriptedServer

from .conftest import Run, Terminal

BUDGET = 100_000_000


@pytest.fixture(autouse=True)
def nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_config, "_warned", set())


@pytest.fixture
def filled(home: Path) -> Path:
    """A cache that holds 15 values of 5 MB."""
    with Cache(home, budget=BUDGET, min_free=0) as cache:
        for number in range(15):
            cache.put(f"large{number:02}", bytes([number]) * 5_000_000)
    return home


def budget_of(home: Path) -> int:
    with Cache(home, read_only=True) as cache:
        return cache.budget


def test_it_shows_the_budget_of_all(run: Run, filled: Path) -> None:
    ran = run("budget")
    assert (ran.code, ran.out, ran.err) == (0, "100 MB for all processes; 75 MB used\n", "")
    assert run("budget", "--json").json["budget"] == BUDGET


def test_it_changes_the_budget_for_processes_that_have_the_cache_open(run: Run, home: Path) -> None:
    with Cache(home, budget=BUDGET) as cache:
        ran = run("budget", "200MB")
        assert (ran.code, "200 MB now" in ran.out, "it was 100 MB" in ran.out) == (0, True, True)
        assert cache.budget == 200_000_000


def test_a_lower_one_evicts_only_after_a_yes(run: Run, filled: Path) -> None:
    for arguments, code in (((), 1), (("--dry-run",), 0)):
        ran = run("budget", "70MB", *arguments)
        assert (ran.code, "75 MB are used: about 5.02 MB" in ran.out) == (code, True), ran
        assert (budget_of(filled), len(run("ls", "-q").lines)) == (BUDGET, 15)
    ran = run("budget", "70MB", "--yes")
    left = len(run("ls", "-q").lines)
    assert (ran.code, budget_of(filled)) == (0, 70_000_000)
    assert "budget 100,000,000 -> 70,000,000" in ran.err
    assert f"{15 - left} entries were evicted" in ran.err
    assert 10 <= left < 15


def test_it_asks_on_a_terminal(filled: Path) -> None:
    for answer, size in (("n", BUDGET), ("y", 70_000_000)):
        with Terminal("budget", "70MB") as terminal:
            terminal.read(until="[y/N]")
            os.write(terminal._screen, f"{answer}\n".encode())
            assert terminal.end() == (0 if answer == "y" else 1)
        assert budget_of(filled) == size


@pytest.mark.parametrize("size", ["500", "plenty", "120%", "1MB", "-5GB", ""])
def test_a_size_that_makes_no_sense_changes_nothing(run: Run, filled: Path, size: str) -> None:
    ran = run("budget", "--", size)
    assert (ran.code, len(ran.err.splitlines())) == (2, 2)
    assert budget_of(filled) == BUDGET


def test_it_creates_no_cache(run: Run, home: Path) -> None:
    for arguments in ((), ("500MB",)):
        assert run("budget", *arguments).code == 3
        assert not home.exists()


def test_another_users_cache_is_not_changed(run: Run, filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    ran = run("budget", "200MB")
    monkeypatch.undo()
    assert (ran.code, "read-only" in ran.err, budget_of(filled)) == (1, True, BUDGET)


# -- the variable ------------------------------------------------------------------------------------------------------


def test_the_variable_is_for_a_cache_that_is_created(run: Run, home: Path, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [server.put(f"/{number}", b"x") for number in range(3)]
    monkeypatch.setenv("FOREBAY_BUDGET", "200MB")
    ran = run("pull", urls[0])
    assert (ran.code, "warning" in ran.err, budget_of(home)) == (0, False, 200_000_000)
    monkeypatch.setenv("FOREBAY_BUDGET", "70MB")
    for verb in (("pull", urls[1]), ("warm", urls[2]), ("cat", urls[0]), ("budget",)):
        monkeypatch.setattr(_config, "_warned", set())
        ran = run(*verb)
        assert (ran.code, "FOREBAY_BUDGET=70MB is not used" in ran.err, "`forebay budget 70MB`" in ran.err) == (0, True, True), verb
    assert budget_of(home) == 200_000_000
    assert run("budget", "70MB").code == 0
    ran = run("pull", "--refresh", urls[1])
    assert ("FOREBAY_BUDGET" in ran.err, budget_of(home)) == (False, 70_000_000)
