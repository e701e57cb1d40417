"""What a person at a terminal sees, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from forebay import Cache
from forebay.cli.bars import Bars
from forebay.reports import Progress
from forebay.testing import ScriptedServer

from .conftest import COMMAND, HANG, Terminal

MiB = 1 << 20
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@pytest.fixture
def stalling(server: ScriptedServer) -> str:
    """The URL of an object of 4 MiB whose second half comes when the server is told to go on."""
    return server.put("/shard.tar", os.urandom(4 * MiB), stall_after=2 * MiB, stalls=1)


def test_a_bar_for_each_object_and_a_total(home: Path, server: ScriptedServer) -> None:
    urls = [server.put(f"/{name}", bytes(MiB)) for name in ("one.bin", "two.bin")]
    with Terminal("pull", *urls) as terminal:
        assert terminal.end() == 0, terminal.seen
        shown = COLOUR.sub("", terminal.seen)
    assert [word in shown for word in ("one.bin", "two.bin", "total", "2 of 2", "fetched", "1.05 MB")] == [True] * 6
    assert "\x1b[?25h" in terminal.seen  # the cursor is back


def test_an_object_that_failed_has_an_empty_bar_and_counts_as_failed() -> None:
    """Whether bytes of it came or not."""
    with Bars(3, quiet=True) as bars:
        for name, done, outcome in (("good", 1000, "fetched"), ("bad", 100, "failed"), ("missing", 0, "failed")):
            bars.update(Progress(f"https://host/{name}", done, 1000 if done else None, "fetching"))
            bars.finished(f"https://host/{name}", outcome)
        seen = {task.fields["label"]: (task.completed, task.finished, task.fields["state"]) for task in bars._progress.tasks}
    assert seen == {
        "total": (1000, True, "1 of 3, 2 failed"), "good": (1000, True, "fetched"), "bad": (0, False, "failed"),
        "missing": (0, False, "failed"),
    }  # fmt: skip


def test_s40_the_second_terminal_waits_and_says_for_whom(home: Path, server: ScriptedServer, stalling: str) -> None:
    with Terminal("pull", stalling) as first:
        assert server.stalled.wait(HANG)
        with Terminal("pull", stalling) as second:
            second.read(until=f"for process {first.process.pid}")
            shown = COLOUR.sub("", second.read(until="2.1 MB / 4.19 MB"))
            assert "waits" in shown
            server.go.set()
            assert (first.end(), second.end()) == (0, 0)
            assert "kept" in second.seen
    assert server.sent == 4 * MiB


def test_a_bar_stays_on_one_line_of_a_narrow_terminal(home: Path, server: ScriptedServer, stalling: str) -> None:
    with Terminal("pull", stalling) as first:
        assert server.stalled.wait(HANG)
        with Terminal("pull", stalling, COLUMNS="80") as second:
            second.read(until="for process")
            second.read(until="2.1 MB / 4.19 MB")
            server.go.set()
            assert (first.end(), second.end()) == (0, 0)


def test_no_color(home: Path, server: ScriptedServer) -> None:
    with Terminal("pull", server.put("/a", b"x" * 1000), NO_COLOR="1") as terminal:
        assert terminal.end() == 0, terminal.seen
        assert COLOUR.findall(terminal.seen) == []
        assert "fetched" in terminal.seen


@pytest.mark.parametrize("environ", [{"FOREBAY_PROGRESS": "0"}, {"TERM": "dumb"}])
def test_no_bars(home: Path, server: ScriptedServer, environ: dict[str, str]) -> None:
    with Terminal("pull", server.put("/a", b"x" * 1000), **environ) as terminal:
        assert terminal.end() == 0, terminal.seen
        assert "\x1b" not in terminal.seen


def test_a_question_that_is_answered_with_no(home: Path, cache: Cache) -> None:
    cache.put("k", b"v")
    with Terminal("clear") as terminal:
        terminal.read(until="[y/N]")
        os.write(terminal._screen, b"\n")
        assert terminal.end() == 1
    assert cache.get("k") is not None


def test_ctrl_c_ends_at_once_and_the_next_call_goes_on(home: Path, server: ScriptedServer, stalling: str) -> None:
    with Terminal("pull", stalling) as pull:
        pull.read(until="2.1 MB / 4.19 MB")
        began = time.monotonic()
        pull.process.send_signal(signal.SIGINT)
        assert pull.end() == 130
        assert time.monotonic() - began < 15  # less than what a remote that says nothing is given
        assert "\nwhat was fetched is kept: the same command resumes there" in pull.seen.replace("\r", "").replace("\x1b[?25h", "")
    server.go.set()
    before = server.sent
    assert subprocess.run([*COMMAND, "pull", stalling], check=False).returncode == 0
    assert server.sent - before < 2.5 * MiB  # the missing half, and what the server still sends to the first one
    assert subprocess.run([*COMMAND, "verify"], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_ctrl_c_keeps_what_came_before(home: Path, server: ScriptedServer, stalling: str) -> None:
    urls = [server.put(f"/{name}.bin", os.urandom(MiB)) for name in ("one", "two")]
    with Terminal("pull", *urls, stalling) as pull:
        pull.read(until="2 of 3")
        pull.read(until="2.1 MB / 4.19 MB")
        pull.process.send_signal(signal.SIGINT)
        assert pull.end() == 130
        assert "the same command resumes there" in pull.seen
    server.go.set()
    before = server.gets
    assert subprocess.run([*COMMAND, "pull", *urls], check=False).returncode == 0
    assert server.gets == before
    assert subprocess.run([*COMMAND, "verify"], stdout=subprocess.DEVNULL, check=False).returncode == 0
