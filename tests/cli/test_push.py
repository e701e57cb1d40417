"""`push`: what it sends, what it says, how it ends."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from forebay import Cache
from tests.remote_directories import FILES, MARKER, aws, files_of, write_files  # noqa: F401 (aws: a fixture)
from tests.servers.rgw import RgwServer, rgw_server  # noqa: F401 (a fixture)

from .conftest import Run, Terminal


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return write_files(tmp_path / "near")


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return tmp_path / "far"


def test_push_sends_once_and_is_quiet_without_a_terminal(run: Run, near: Path, far: Path, home: Path) -> None:
    for _ in range(2):
        ran = run("push", near, f"{far}/")
        assert (ran.code, ran.out, ran.err) == (0, "", "")
    assert {name: body for name, body in files_of(far).items() if name != MARKER} == FILES
    assert not home.exists()  # it needs no cache


def test_push_tells_what_it_did_as_json(run: Run, near: Path, far: Path) -> None:
    ran = run("push", "--json", near, far)
    assert (ran.json["url"], sorted(ran.json["sent"]), ran.json["removed"]) == (str(far), sorted(FILES), [])
    assert ran.json["bytes"] == sum(map(len, FILES.values()))
    (near / "config.json").write_bytes(b"[]")
    (near / "empty").unlink()
    ran = run("push", "--json", "--delete", near, far)
    assert (ran.json["sent"], ran.json["removed"], ran.json["bytes"]) == (["config.json"], ["empty"], 2)


def test_a_dry_run_changes_nothing(run: Run, near: Path, far: Path) -> None:
    assert run("push", "-n", near, far).lines[-1] == "7 files, 551 kB to send; 0 to remove"
    assert not far.exists()
    run("push", near, far)
    before = files_of(far)
    (near / "config.json").write_bytes(b"[]")
    (near / "empty").unlink()
    ran = run("push", "--dry-run", "--delete", near, far)
    assert ran.lines == ["would send: config.json", "would remove: empty", "1 file, 2 B to send; 1 to remove"]
    assert files_of(far) == before


def test_what_is_wrong_is_told_in_two_lines(run: Run, near: Path, tmp_path: Path) -> None:
    ran = run("push", tmp_path / "none", tmp_path / "far")
    assert (ran.code, ran.err.count("\n")) == (1, 2)
    (near / "pipe").touch()
    (near / "pipe").unlink()
    os.mkfifo(near / "pipe")
    ran = run("push", near, tmp_path / "far")
    assert (ran.code, "a socket, a pipe or a device" in ran.err) == (2, True)
    (near / "pipe").unlink()
    ran = run("push", near, "http://127.0.0.1:1/run/")
    assert (ran.code, "over HTTP" in ran.err, " hint: write to s3://" in ran.err) == (1, True, True)


def test_offline_is_its_own_code(run: Run, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_OFFLINE", "1")
    assert run("push", near, "s3://bucket/run/").code == 3


def test_push_keep_leaves_the_directory_in_the_cache(run: Run, near: Path, aws: RgwServer, tmp_path: Path, cache: Cache) -> None:  # noqa: F811
    aws.client().create_bucket(Bucket="push")
    url = f"s3://push/{tmp_path.name}-{os.getpid()}/step_100/"
    assert run("push", "--keep", near, url).code == 0
    asked = cache.stats().requests
    with cache.directory(url) as tree:
        assert files_of(tree) == FILES
    assert cache.stats().requests == asked


def test_a_bar_on_a_terminal(near: Path, far: Path, home: Path) -> None:
    (near / "large").write_bytes(bytes(64 << 20))
    with Terminal("push", near, f"{far}/") as terminal:
        assert terminal.end() == 0
        assert "far" in terminal.seen
        assert "sent" in terminal.seen


def test_ctrl_c(near: Path, far: Path, home: Path) -> None:
    with open(near / "large", "wb") as file:
        file.truncate(8 << 30)  # a hole: seconds to read
    with Terminal("push", near, f"{far}/") as terminal:
        terminal.read("reading")
        os.kill(terminal.process.pid, signal.SIGINT)
        assert terminal.end() == 130
        assert "the same command resumes there" in " ".join(terminal.seen.split())
        assert "interrupted" in terminal.seen
