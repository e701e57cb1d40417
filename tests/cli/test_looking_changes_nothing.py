"""A verb that only looks leaves every byte of the root as it was, whatever the environment says; and says no limit for anybody."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Cache, errors
from forebay.testing import ScriptedServer

from .conftest import Run

BUDGET = 500_000_000
LOOKING = [
    *(("ls",), ("ls", "-q", "--leased"), ("ls", "--filter", "size>1kB", "--json"), ("ls", "values:k")),
    *(("budget",), ("budget", "-n", "64MiB"), ("config",), ("config", "--json"), ("cat", "--help"), ("help", "rm")),
    *(("du",), ("du", "--json"), ("stats",), ("path",), ("path", "URL"), ("verify",), ("verify", "--quick"), ("doctor",), ("claims",)),
    *(
        ("report",),
        ("report", "--html", "-"),
        ("report", "--json"),
        ("completion", "bash"),
        ("--help",),
        ("prune", "--dry-run"),
        ("prune", "-n", "--free", "499MB"),
        ("clear", "--dry-run"),
    ),
    *(("rm", "-n", "URL"), ("rm", "-n", "--filter", "size>0"), ("prune", "-n", "--filter", "size>0")),
]

FILL = """
import os, sys, signal
import forebay
cache = forebay.Cache(sys.argv[1], budget=int(sys.argv[2]))
for number in range(20):
    cache.put(f"k{number}", bytes([number]) * 2000)
    cache.put(f"large{number}", bytes([number]) * 50_000)
cache.read(sys.argv[3])
print("filled", flush=True)
if sys.argv[4] == "lives":
    sys.stdin.read()
elif sys.argv[4] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def digest(root: Path) -> dict[str, tuple[int, int, int, str]]:
    """Of all that lies in the root: mode, inode, time of the last change, content."""
    found = {}
    for place, _, files in os.walk(root):
        for path in [Path(place), *(Path(place) / name for name in files)]:
            facts = path.lstat()
            content = hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
            found[str(path)] = (facts.st_mode, facts.st_ino, facts.st_mtime_ns, content)
    return found


@pytest.fixture(params=["closed", "killed", "lives"])
def url(request: pytest.FixtureRequest, home: Path, server: ScriptedServer) -> Iterator[str]:
    """Of an entry in a root that was filled by a process that has closed it, was killed, or lives."""
    url = server.put("/a.bin", os.urandom(100_000))
    filler = subprocess.Popen(
        [sys.executable, "-c", FILL, home, str(BUDGET), url, request.param], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert filler.stdout is not None
    assert filler.stdout.readline() == b"filled\n"
    if request.param != "lives":
        assert filler.wait(60) == (-signal.SIGKILL if request.param == "killed" else 0)
    yield url
    filler.communicate(timeout=60)


def test_every_looking_verb(run: Run, home: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_BUDGET", "64MiB")
    monkeypatch.setenv("FOREBAY_MIN_FREE", "0")
    before = digest(home)
    for verb in LOOKING:
        ran = run(*(url if word == "URL" else word for word in verb))
        assert ran.code == 0, (verb, ran)
        after = digest(home)
        assert {name for name in before | after if before.get(name) != after.get(name)} == set(), verb
    assert run("du", "--json").json["budget"] == BUDGET
    assert len(run("ls", "-q").lines) == 41


def test_who_looks_sees_what_is_leased_and_what_another_puts(run: Run, home: Path, cache: Cache) -> None:
    assert run("ls", "-q").lines == []
    cache.put("now", bytes(30_000))
    assert run("ls", "-q").lines == ["values:now"]
    cache.put("then", b"small")
    assert run("ls", "-q").lines == ["values:now", "values:then"]
    assert run("ls", "-q", "--leased").lines == []


@pytest.mark.parametrize(
    ("text", "said"),
    [("500", '"500GB"'), ("5_000", '"5_000GB"'), ("0.5", '"0.5GB"'), ("500MiB5", "is not valid"), ("63MiB", "64 MiB")],
)
def test_a_budget_that_is_a_slip_is_refused(text: str, said: str, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cache(home, budget=BUDGET) as cache:
        cache.put("key", b"value")
        with pytest.raises(errors.ConfigError) as refused:
            Cache(home, budget=text)
        assert said in str(refused.value)
        monkeypatch.setenv("FOREBAY_BUDGET", text)
        with pytest.raises(errors.ConfigError, match="FOREBAY_BUDGET") as refused:
            Cache(home)
        assert said in str(refused.value)
        for verb in (["prune", "--yes"], ["clear", "--yes"], ["pull", "http://127.0.0.1:9/x"]):
            ran = run(*verb)
            assert (ran.code, said in ran.err) == (2, True)
        monkeypatch.delenv("FOREBAY_BUDGET")
        assert cache.budget == BUDGET
        assert bytes(cache.get("key") or b"") == b"value"


@pytest.mark.parametrize(("budget", "size"), [("64MiB", 64 << 20), ("0.5 GB", 500_000_000), ("100_000_000B", 10**8), (500, 500), (0, 0)])
def test_budgets_that_are_meant(budget: int | str, size: int, home: Path) -> None:
    with Cache(home, budget=budget) as cache:
        assert cache.budget == size
    with Cache(home, budget=BUDGET, min_free="500") as cache:  # other sizes need no unit
        assert cache.space("s", quota="500").name == "s"


def test_a_lower_budget_of_a_space_says_so_too(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Cache(home, budget=BUDGET, min_free=0) as cache:
        space = cache.space("s", quota="1MB")
        for number in range(10):
            space.put(str(number), bytes(50_000))
        cache.space("s", quota="200kB")
    assert "6 entries of the space s were evicted for its lower limit, 300 kB" in caplog.text


@pytest.mark.parametrize(("budget", "said"), [(500, "500 B holds almost nothing"), (1 << 60, "more than the whole disk"), (BUDGET, "")])
def test_doctor_notices_a_budget_that_is_absurd(budget: int, said: str, run: Run, home: Path) -> None:
    with Cache(home, budget=budget):
        pass
    found = {finding["name"]: finding for finding in run("doctor", "--json").json}
    assert ("budget" in found) == bool(said)
    assert not said or (said in found["budget"]["found"] and found["budget"]["todo"])


def test_doctor_tells_what_the_variable_would_do(run: Run, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Cache(home, budget=BUDGET):
        monkeypatch.setenv("FOREBAY_BUDGET", "64MiB")
        found = run("doctor").out
        assert "FOREBAY_BUDGET=64MiB is not used" in found
        assert "a budget of 500 MB already; `forebay budget 64MiB` changes it" in found
