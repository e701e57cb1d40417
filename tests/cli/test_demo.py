"""`forebay demo`, with less data: it does what it says, and leaves nothing."""

from __future__ import annotations

import io
import re
import signal
import socket
import sys
import tarfile
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from forebay.cli.demo import DemoFailed, Workers, pack, pack_objects
from forebay.testing import ScriptedServer
from tests import pages
from tests.processes import in_child

from .conftest import Run, Terminal


@pytest.mark.processes
def test_the_demo(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ran = run("demo", "--size", "4MB", "--rate", "3MB", "--workers", "3", "--json")
    assert ran.code == 0
    found = ran.json
    first, second = found["epochs"]
    assert first["read"] == second["read"] == 3 * found["data"]
    assert found["data"] <= first["remote"] <= 1.2 * found["data"]  # each byte once, and what the killed one had not kept
    assert (second["remote"], second["requests"], second["misses"]) == (0, 0, 0)
    assert (found["killed"] > 0, found["damaged"], found["budget_held"]) == (True, 0, True)
    assert 0 < found["peak"] <= found["budget"]
    assert 0 < found["left"] <= found["halved"]
    assert [epoch["read"] for epoch in found["half"]] == [200 * 20_480] * 3
    assert [epoch["remote"] for epoch in found["half"]] == [epoch["requests"] * 20_480 for epoch in found["half"]]
    fetched = [epoch["requests"] for epoch in found["half"]]
    assert fetched[0] == 200
    assert 100 <= fetched[2] <= 140  # half of them fit; least recently used would fetch 170
    assert list(tmp_path.glob("forebay-demo-*")) == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP)]
)
def test_a_demo_that_is_ended_leaves_nothing(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    with Terminal("demo", "--size", "4MB", "--rate", "100kB", TMPDIR=str(tmp_path)) as terminal:
        terminal.read("epoch 1")
        assert len(list(tmp_path.glob("forebay-demo-*"))) == 1
        terminal.process.send_signal(sent)
        assert terminal.end() == code
    assert list(tmp_path.glob("forebay-demo-*")) == []


@pytest.mark.parametrize("options", [("--size", "1kB"), ("--rate", "1"), ("--workers", "0")])
def test_a_demo_that_makes_no_sense(run: Run, options: tuple[str, ...]) -> None:
    assert run("demo", *options).code == 2


def test_shards_differ_and_have_about_the_size_that_was_asked_for() -> None:
    shards = pack(total=1_000_000, count=3)
    assert list(shards) == ["shard-000.tar", "shard-001.tar", "shard-002.tar"]
    assert all(333_000 <= len(data) <= 1_000_000 for data in shards.values())
    assert all(tarfile.open(fileobj=io.BytesIO(data)).getnames() for data in shards.values())
    assert len(set(shards.values())) == 3


def test_objects_differ_and_have_the_size_that_was_asked_for() -> None:
    contents = set(pack_objects(count=200, size=20_480).values())
    assert {len(content) for content in contents} == {20_480}
    assert len(contents) == 200


def test_shards_and_objects_contain_no_file_of_this_machine() -> None:
    """Which may be a symbolic link, a FIFO, or unreadable: distributions have such in the library of Python."""

    def opened() -> list[object]:
        found = list[object]()
        sys.addaudithook(lambda event, given: found.append(given[0]) if event in ("open", "os.listdir", "os.scandir") else None)
        shards = pack(total=100_000, count=2)
        assert pack_objects(count=2, size=1000)
        for data in shards.values():
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                assert all(member.isreg() for member in tar)
        return found

    assert in_child(opened) == []


@pytest.mark.processes
def test_a_worker_that_ends_by_itself_is_noticed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "foreign").touch()
    with closing(Workers(tmp_path / "cache", "http://127.0.0.1:1", 1)) as workers, pytest.raises(DemoFailed, match="ended unexpectedly"):
        workers.receive()
    assert "foreign" in capfd.readouterr().err


@pytest.mark.processes
def test_the_first_program_of_the_readme_prints_what_the_readme_says(tmp_path: Path) -> None:
    """In an empty directory, with `forebay demo --serve` beside it; the server prints each request."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    program = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    (said,) = re.findall(r"It prints `([^`]+)`", readme)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Terminal("demo", "--serve", "--port", port, "--size", "10MB", "--rate", "20MB") as server:
        assert f"http://127.0.0.1:{port}/shard-000.tar" in server.read("press Ctrl-C to quit")
        told = pages.run(program.replace("8930", str(port)), tmp_path)
        assert told == f"{said}\n"
        assert pages.run(program.replace("8930", str(port)), tmp_path) == "1 download, 75% hits\n"
        assert server.read("GET /").count("GET /shard-000.tar") == 1
        server.process.send_signal(signal.SIGINT)
        assert server.end() == 130
    assert (tmp_path / "cache" / "FORMAT").exists()


def test_a_port_that_is_in_use_is_said(run: Run) -> None:
    with ScriptedServer() as server:
        ran = run("demo", "--serve", "--port", server.url.rpartition(":")[2], "--size", "1MB")
    assert ran.code == 2
    assert "Address already in use" in ran.err
    assert "pass --port" in ran.err
