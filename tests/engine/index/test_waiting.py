"""Which processes wait, as others see it; and what harms the file that says so."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from forebay._engine.files.root import Root
from forebay._engine.index import waiting as module
from forebay._engine.index.waiting import Waiters
from tests.processes import Line, talk_to


def test_a_wait_is_seen_while_it_lasts(root: Root) -> None:
    waiters, others = Waiters(root), Waiters(root)
    assert others.every() == []
    with waiters.waiting("https://host/a", 17), waiters.waiting("ü" * 300, 18):
        first, second = sorted(others.every(), key=lambda one: one.keyhash)
        assert (first.pid, first.keyhash, first.key) == (os.getpid(), 17, "https://host/a")
        assert second.key.startswith("üüü")
    assert others.every() == []


def test_a_killed_process_waits_no_more(root: Root) -> None:
    def wait(line: Line) -> None:
        with Waiters(root).waiting("key", 1):
            line.say("waits")
            line.hear()

    child = talk_to(wait)
    assert child.hear() == "waits"
    (seen,) = Waiters(root).every()
    assert seen.pid == child.pid
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert Waiters(root).every() == []


def test_more_waits_than_records_are_harmless(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORDS", 2)
    waiters = Waiters(root)
    with waiters.waiting("a", 1), waiters.waiting("b", 2), waiters.waiting("c", 3):
        assert len(Waiters(root).every()) <= 2


@pytest.mark.parametrize("harm", ["zeros", "noise", "short", "pipe", "gone"])
def test_harm_to_the_file_never_raises(harm: str, root: Root, tmp_path: Path) -> None:
    waiters, path = Waiters(root), root.index_dir / "waiting"
    with waiters.waiting("a", 1):
        size = path.stat().st_size
        if harm in ("pipe", "gone"):
            path.unlink()
            if harm == "pipe":
                os.mkfifo(path)
        else:
            path.write_bytes({"zeros": bytes(size), "noise": os.urandom(size), "short": b"x"}[harm])
        assert Waiters(root).every() == []
        with waiters.waiting("b", 2), Waiters(root).waiting("c", 3):
            assert len(Waiters(root).every()) <= 2
