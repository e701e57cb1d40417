"""`top`: what it shows of processes that fetch and wait, in a terminal, in a pipe and as JSON; and how it ends."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import subprocess
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from forebay import Cache
from forebay._config import format_age
from forebay._engine.seeing import Fetch, Now, Waiter
from forebay.cli import top
from forebay.reports import Stats
from forebay.testing import ScriptedServer

from .conftest import COMMAND, HANG, Run, Terminal

MiB = 1 << 20
COLOUR = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")
QUICK = ("--interval", "0.05")


@pytest.fixture
def stalling(server: ScriptedServer) -> str:
    """The URL of an object of 4 MiB whose second half comes when the server is told to go on."""
    return server.put("/shard.tar", os.urandom(4 * MiB), stall_after=2 * MiB, stalls=1)


def test_who_fetches_and_who_waits_for_whom(run: Run, home: Path, cache: Cache, server: ScriptedServer, stalling: str) -> None:
    cache.put("large", bytes(100_000))
    with Terminal("pull", stalling) as first:
        assert server.stalled.wait(HANG)
        with Terminal("pull", stalling) as second, cache.hold("large"):
            second.read(until=f"for process {first.process.pid}")
            seen = run("top", "--json", *QUICK).json
            (fetch,), (waiter,) = seen["fetches"], seen["waiters"]
            assert (fetch["key"], fetch["total"]) == (stalling, 4 * MiB)
            assert 0 < fetch["done"] <= 2 * MiB
            assert f"process {first.process.pid} " in fetch["process"]
            assert waiter["key"] == stalling
            assert f"process {second.process.pid} " in waiter["process"]
            assert f"process {first.process.pid} " in waiter["holder"]
            assert seen["leased"] == 1
            ran = run("top", "--once", *QUICK)
            assert (ran.code, ran.err) == (0, "")
            assert re.search(rf"4\.19 MB .*process {first.process.pid} .*shard\.tar", ran.out)
            assert re.search(rf"process {second.process.pid} .*shard\.tar.*process {first.process.pid} ", ran.out)
            page = run("report", "--html", "-").out
            assert page.count("shard.tar") >= 2
            server.go.set()
            assert (first.end(), second.end()) == (0, 0)
    seen = run("top", "--json", *QUICK).json
    assert (seen["fetches"], seen["waiters"], seen["leased"]) == ([], [], 0)


@pytest.mark.parametrize("interval", ["nan", "inf", "0", "x"])
def test_an_interval_that_is_none(run: Run, home: Path, cache: Cache, interval: str) -> None:
    ran = run("top", "--once", "--interval", interval)
    assert ran.code == 2
    assert "--interval" in ran.err


def test_a_killed_process_neither_fetches_nor_waits(run: Run, home: Path, cache: Cache, server: ScriptedServer, stalling: str) -> None:
    with Terminal("pull", stalling) as first:
        assert server.stalled.wait(HANG)
        with Terminal("pull", stalling) as second:
            second.read(until="for process")
            second.process.kill()
            second.process.wait()
            assert run("top", "--json", *QUICK).json["waiters"] == []
        first.process.kill()
        first.process.wait()
    assert run("top", "--json", *QUICK).json["fetches"] == []
    server.go.set()


def test_in_a_terminal_it_is_live_and_ctrl_c_ends_it_quietly(home: Path, cache: Cache) -> None:
    cache.put("key", b"value")
    with Terminal("top", *QUICK) as terminal:
        terminal.read(until="no calls")
        for _ in range(1000):
            cache.get("key")
        terminal.read(until="calls/s")
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 0
        shown = COLOUR.sub("", terminal.seen)
    assert "of 50 MB" in shown
    assert "values" in shown
    assert "Traceback" not in shown
    assert "interrupted" not in shown
    assert "\x1b[?25h" in terminal.seen  # the cursor is back


def test_q_ends_it_and_the_terminal_is_as_it_was(home: Path, cache: Cache) -> None:
    with Terminal("top", "--interval", "50") as terminal:
        before = termios.tcgetattr(terminal._screen)
        terminal.read(until="Press q to quit")
        os.write(terminal._screen, b"xq")
        assert terminal.end() == 0
        assert termios.tcgetattr(terminal._screen) == before


def test_columns_of_numbers_are_not_cut() -> None:
    """Names are."""
    stats, now = Stats(budget=1000), Now(
        (Fetch("urls", "https://host/" + "name/" * 30, "process 123 of a user with a long name", 1, 1000, time.time() - 3720),),
        (Waiter("process 123 of a user with a long name", "https://host/" + "name/" * 30, "process 77", time.time() - 3720),),
    )  # fmt: skip
    look = top.Look(1.0, "/x", stats, now)
    screen = Console(width=110, file=io.StringIO())
    screen.print(top._screen(look, look))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [("FOR" in line, "PROCESS" in line) for line in lines if "PROCESS" in line] == [(True, True)] * 2
    assert [line.count(format_age(3720)) for line in lines if "process 123" in line] == [1, 1]
    assert max(map(len, lines)) <= 110


def test_in_a_pipe_it_prints_plain_lines_until_ctrl_c(home: Path, cache: Cache) -> None:
    with subprocess.Popen([*COMMAND, "top", *QUICK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=HANG)
    assert (process.returncode, error) == (0, "")
    assert all(line.startswith("budget ") and "hit rate" in line and "\x1b" not in line for line in lines)


def test_rates_are_differences_and_counters_that_were_zeroed_count_nothing() -> None:
    def look(at: float, **counts: int) -> top.Look:
        return top.Look(at, "/x", Stats(**counts), Now())

    rates = top.rates(look(1.0, hits=10, misses=5), look(3.0, hits=40, misses=15, bytes_remote=1000))
    assert (rates["hits"], rates["misses"], rates["bytes_remote"], rates["hit_rate"]) == (15, 5, 500, 0.75)
    rates = top.rates(look(1.0, hits=10), look(2.0, hits=3))
    assert (rates["hits"], rates["hit_rate"]) == (0, 0)


def test_bytes_of_fetches_count_when_they_come() -> None:
    """Not when the fetch ends, which the counters tell."""

    def look(at: float, counted: int, **done: int) -> top.Look:
        return top.Look(at, "/x", Stats(bytes_remote=counted), Now(tuple(Fetch("urls", key, "p", n, None, 0.0) for key, n in done.items())))

    looks = [look(0.0, 100), look(1.0, 100, a=30), look(2.0, 100, a=50, b=7), look(3.0, 160, b=8), look(4.0, 168)]
    came = [top.rates(before, after)["bytes_remote"] for before, after in itertools.pairwise(looks)]
    assert came == [30, 27, 11, 0]
    assert sum(came) == 68


def test_no_cache_is_an_error_and_none_is_created(run: Run, home: Path) -> None:
    assert run("top", "--once").code == 3
    assert not home.exists()
