"""Which processes wait, as others see it; and what harms the file that says so."""

from __future__ import annotations

import os
import signal

import pytest

from forebay._engine.files import waiters as module
from forebay._engine.files.root import Root
from forebay._engine.files.waiters import Waiters
from tests.processes import Line, talk_to


def test_a_wait_is_seen_while_it_lasts(root: Root) -> None:
    waiters, others = Waiters(root), Waiters(root)
    assert others.every() == []
    entered = [waiters.enter("https://host/a", 17), waiters.enter("ü" * 300, 18, (5, 6))]
    for seen in (others.every(), waiters.every()):
        first, second = sorted(seen, key=lambda one: one.keyhash)
        assert (first.pid, first.keyhash, first.key, first.held) == (os.getpid(), 17, "https://host/a", frozenset())
        assert second.key.startswith("üüü")
        assert second.held == {5, 6}
    for one in entered:
        waiters.leave(one)
    assert others.every() == waiters.every() == []


def test_a_wait_is_shown_with_all_that_it_holds_or_not_at_all(root: Root) -> None:
    waiters = Waiters(root)
    held = range(1 << 61, (1 << 61) + 27)
    assert waiters.enter("k" * 300, 1, held) is not None
    assert [one.held for one in Waiters(root).every()] == [frozenset(held)]
    assert waiters.enter("k", 1, range(28)) is None


def test_a_wait_for_what_no_key_is_hashed_to_is_not_shown(root: Root) -> None:
    """No lock and no row can have such a number."""
    waiters = Waiters(root)
    assert all(waiters.enter(str(number), number) for number in (1 << 62, (1 << 64) - 1, (1 << 62) - 1))
    assert [one.keyhash for one in Waiters(root).every()] == [(1 << 62) - 1]


def test_a_killed_process_waits_no_more(root: Root) -> None:
    def wait(line: Line) -> None:
        waiters = Waiters(root)
        assert waiters.enter("key", 1) is not None
        line.say("waits")
        line.hear()

    child = talk_to(wait)
    assert child.hear() == "waits"
    (seen,) = Waiters(root).every()
    assert seen.pid == child.pid
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert Waiters(root).every() == []


def test_a_forked_child_ends_no_wait_of_its_parent(root: Root) -> None:
    """What the parent's other threads had on their stacks is finalized there, too."""
    waiters = Waiters(root)
    entered = waiters.enter("key", 1, (2,))
    waiters.locks.before_fork()
    pid = os.fork()
    if not pid:
        waiters.locks.after_fork_child()
        waiters.leave(entered)
        os._exit(0)
    waiters.locks.after_fork_parent()
    os.waitpid(pid, 0)
    assert [one.held for one in Waiters(root).every()] == [{2}]
    waiters.leave(entered)


def test_more_waits_than_records_are_harmless(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECORDS", 2)
    waiters = Waiters(root)
    entered = [waiters.enter(key, keyhash) for keyhash, key in enumerate("abc")]
    assert entered.count(None) == 1
    assert len(Waiters(root).every()) == 2


@pytest.mark.parametrize("harm", ["zeros", "noise", "short", "pipe", "gone"])
def test_harm_to_the_file_never_raises(harm: str, root: Root) -> None:
    waiters, path = Waiters(root), root.shared_dir / "waiting"
    entered = waiters.enter("a", 1)
    size = path.stat().st_size
    path.unlink()
    if harm == "pipe":
        os.mkfifo(path)
    elif harm != "gone":
        path.write_bytes({"zeros": bytes(size), "noise": os.urandom(size), "short": b"x"}[harm])
    assert Waiters(root).every() == []
    assert waiters.enter("b", 2) is not None
    assert [one.key for one in Waiters(root).every()] == ["b"]
    waiters.leave(entered)
    assert len(Waiters(root).every()) <= 1
