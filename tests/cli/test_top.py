"""`top`: what it shows of processes that fetch and wait, in a terminal, in a pipe and as JSON; and how it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from forebay import Cache
from forebay._engine.activity import Now
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


def test_no_cache_is_an_error_and_none_is_created(run: Run, home: Path) -> None:
    assert run("top", "--once").code == 3
    assert not home.exists()
