"""Scenario 40: the cache is filled before the job; one bar, where somebody looks, and not N."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


def test_s40_warm_a_list_resume_it_and_name_what_failed(
    root: Path, server: ScriptedServer, tmp_path: Path, command: Callable[..., Any]
) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(50_000)) for i in range(40)]
    gone = server.url + "/gone.bin"
    (tmp_path / "list").write_text("# a list\n\n" + "\n".join([*urls[:20], gone, *urls[20:]]))
    done = command("warm", tmp_path / "list", "--jobs", 16, "--root", root)
    assert done.returncode == 1
    assert gone in done.stderr
    assert done.stdout == ""
    with forebay.Cache(root) as cache:
        assert {entry.name for entry in cache.entries()} == set(urls)
    gets = server.gets
    server.put("/gone.bin", b"there")
    again = command("warm", tmp_path / "list", "--jobs", 16, "--root", root, "--json")
    assert again.returncode == 0
    assert server.gets == gets + 1
    outcomes = {outcome["url"]: outcome["state"] for outcome in json.loads(again.stdout)}
    assert outcomes == {gone: "fetched"} | dict.fromkeys(urls, "kept")


def test_s40_killed_in_the_middle_it_goes_on(root: Path, server: ScriptedServer, tmp_path: Path, command: Callable[..., Any]) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(MiB)) for i in range(24)]
    server.rate = 20e6
    (tmp_path / "list").write_text("\n".join(urls))
    with subprocess.Popen([sys.executable, "-m", "forebay.cli", "warm", tmp_path / "list", "--jobs", "4", "--root", root]) as first:
        while server.sent < 8 * MiB:
            pass
        first.kill()
    server.rate = None
    done = command("warm", tmp_path / "list", "--root", root)
    assert done.returncode == 0, done.stderr
    assert server.sent < 24 * MiB + 6 * MiB  # what was there was not fetched again
    with forebay.Cache(root) as cache:
        assert {entry.name for entry in cache.entries()} == set(urls)


def test_s40_warm_a_prefix(root: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    shards = tmp_path / "shards"
    shards.mkdir()
    for i in range(5):
        (shards / f"{i}.tar").write_bytes(os.urandom(1000))
    done = command("warm", f"file://{shards}/", "--root", root)
    assert done.returncode == 0, done.stderr
    with forebay.Cache(root) as cache:
        assert len(cache.entries()) == 5


def test_s40_warm_in_python(root: Path, server: ScriptedServer) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(1000)) for i in range(10)]
    gone = server.url + "/gone.bin"
    with forebay.Cache(root) as cache:
        report = cache.warm([*urls, gone], jobs=4)
        assert sorted(report.done) == sorted(urls)
        assert [(url, type(error)) for url, error in report.failed] == [(gone, forebay.errors.NotFound)]


def at_a_terminal(arguments: list[str], **environ: str) -> str:
    """What a terminal shows of a command."""
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "forebay.cli", *arguments]
    with subprocess.Popen(
        command, stdout=its, stderr=its, stdin=its, env={**os.environ, "TERM": "xterm", "COLUMNS": "120", **environ}
    ) as child:
        os.close(its)
        shown = b""
        try:
            while block := os.read(ours, 65536):
                shown += block
        except OSError:  # how a terminal ends
            pass
        assert child.wait(60) == 0
    os.close(ours)
    return shown.decode()


@pytest.mark.rotates
def test_s40_bars_only_where_somebody_looks(root: Path, server: ScriptedServer, command: Callable[..., Any]) -> None:
    urls = [server.put(f"/shard-{i}.bin", os.urandom(300_000)) for i in range(5)]
    assert "━" in at_a_terminal(["pull", "--root", str(root), urls[0]])
    assert "━" not in at_a_terminal(["pull", "--root", str(root), urls[1]], FOREBAY_PROGRESS="0")
    assert "\x1b[3" not in at_a_terminal(["pull", "--root", str(root), urls[2]], NO_COLOR="1")
    quiet = command("pull", "--root", root, urls[3])
    assert (quiet.stdout, quiet.stderr.startswith("1 URL: 1 fetched; 300 kB in ")) == ("", True)
    assert "━" not in at_a_terminal(["pull", "--root", str(root), "--json", urls[4]])


def test_s40_ranks_of_a_job_show_nothing(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    """At a terminal, too: bars are for who asks for them."""
    url = server.put("/x.bin", os.urandom(MiB), latency=0.3)
    start = barrier(8)
    ours, its = pty.openpty()

    def rank() -> None:
        os.dup2(its, 1)
        os.dup2(its, 2)
        with forebay.Cache(root) as cache:
            start.wait(60)
            cache.read(url)

    for child in [children(rank) for _ in range(8)]:
        child.result()
    os.set_blocking(ours, False)
    with pytest.raises(BlockingIOError):
        os.read(ours, 1)
    os.close(ours)
    os.close(its)
