"""The examples of each `--help` are command lines that run, one after another, once the places in them are real ones."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import click
import pytest

from forebay import Cache
from forebay.cli import main
from forebay.testing import ScriptedServer
from tests.remote_directories import http_directory

from .conftest import Run

pytestmark = pytest.mark.processes

ON_A_TERMINAL_OR_ENDLESS = {"forebay top", "forebay demo", "forebay demo --serve"}
"""Tested in test_top.py and test_demo.py."""


def examples() -> dict[str, list[str]]:
    """The examples of each verb."""
    with click.Context(main.top) as context:
        epilogs = {name: main.top.get_command(context, name).epilog or "" for name in main.VERBS}  # type: ignore[union-attr]
    return {name: [line.strip() for line in text.splitlines() if line.startswith("  ")] for name, text in epilogs.items()}


@pytest.fixture
def place(tmp_path: Path, home: Path, server: ScriptedServer) -> Path:
    """A directory in which the examples run, with a cache of one object."""
    shard = io.BytesIO()
    with tarfile.open(fileobj=shard, mode="w") as tar:
        tar.add(__file__, arcname="0.txt")
    urls = [server.put(f"/shard-{number:03}.tar", shard.getvalue()) for number in range(4)]
    http_directory(server, {"config.json": b"{}", "weights.bin": b"w" * 1000}, "/model")
    (tmp_path / "urls.txt").write_text("\n".join(urls))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "weights.bin").write_bytes(b"w")
    with Cache(home, budget="1GB") as cache:
        cache.read(urls[0])
    return tmp_path


def test_each_verb_has_an_example() -> None:
    assert [name for name, lines in examples().items() if not lines] == ["help"]


@pytest.mark.parametrize(("verb", "line"), [(verb, line) for verb, lines in examples().items() for line in lines])
def test_an_example_runs(verb: str, line: str, place: Path, server: ScriptedServer, run: Run) -> None:
    assert run(verb, "--help").out.count(line) >= 1
    if line in ON_A_TERMINAL_OR_ENDLESS:
        return
    script = line.replace("https://host", server.url).replace("s3://bucket", f"file://{place}/bucket").replace("20GB", "1MB")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=place, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
