"""Named locks of a claim: one at a time, whatever dies."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay._kernel import locks, waits
from forebay.claims import shared
from forebay.claims.members import Members
from forebay.claims.shared import NamedLock
from tests.claims.contexts import rank
from tests.processes import Child, Gate, ProcessGroup, in_child

LONG = 30.0


def held(children: ProcessGroup, place: Path, number: int) -> Child:
    """A rank that is inside until it is killed."""
    inside = Gate()

    def hold(context: Members) -> None:
        with NamedLock(context, "x"):
            inside.open()
            signal.pause()

    child = children(lambda: rank(place, number, hold))
    inside.wait()
    inside.close()
    return child


def is_free(context: Members, name: str = "x") -> bool:
    """Whether another process could enter."""
    try:
        with NamedLock(context, name, timeout=0.0):
            return True
    except errors.WaitTimeout:
        return False


def test_processes_and_threads_count_right(place: Path, context: Members, children: ProcessGroup) -> None:
    def count(context: Members) -> None:
        cell = shared.buffer(context, "count", 8).cast("Q")
        for _ in range(150):
            with NamedLock(context, "count"):
                cell[0] = cell[0] + 1

    def threads(context: Members) -> None:
        crowd = [threading.Thread(target=count, args=(context,)) for _ in range(2)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()

    others = [children(lambda n=n: rank(place, n, threads)) for n in range(1, 4)]
    threads(context)
    for other in others:
        other.result()
    assert shared.buffer(context, "count", 8).cast("Q")[0] == 4 * 2 * 150


def test_two_names_are_two_locks(place: Path, context: Members) -> None:
    with NamedLock(context, "x"):
        assert in_child(lambda: rank(place, 1, lambda other: (is_free(other, "x"), is_free(other, "y")))) == (False, True)
    assert in_child(lambda: rank(place, 1, is_free))


def test_a_thread_cannot_enter_twice(context: Members) -> None:
    with NamedLock(context, "x"), pytest.raises(errors.ConfigError, match="held by this thread"), NamedLock(context, "x", timeout=LONG):
        raise AssertionError("it entered")
    assert is_free(context)


def test_another_thread_waits(context: Members) -> None:
    lock, entered = NamedLock(context, "x", timeout=LONG), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    with lock:
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.15)
    assert entered.wait(LONG)
    thread.join()
    assert is_free(context)


def test_an_error_inside_lets_go(place: Path, context: Members) -> None:
    with pytest.raises(KeyError), NamedLock(context, "x"):
        raise KeyError
    assert in_child(lambda: rank(place, 1, is_free))


def test_a_death_lets_go(place: Path, context: Members, children: ProcessGroup) -> None:
    holder = held(children, place, 1)
    killed: list[float] = []
    timer = threading.Timer(0.1, lambda: (killed.append(time.monotonic()), holder.kill()))
    timer.start()
    with NamedLock(context, "x", timeout=LONG):
        assert time.monotonic() - killed[0] < LONG / 3
    timer.join()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_timeout_names_the_holder(place: Path, context: Members, children: ProcessGroup, stopped: bool) -> None:
    holder = held(children, place, 7)
    if stopped:
        holder.stop()
    end = ", stopped" if stopped else ""
    with pytest.raises(
        errors.WaitTimeout, match=rf"the lock 'x' of claim 000000 of job job, held by rank 7 \(process {holder.pid}{end}\)$"
    ):
        NamedLock(context, "x", timeout=0.1).__enter__()


def test_a_forked_child_does_not_hold_it(context: Members, children: ProcessGroup) -> None:
    lock = NamedLock(context, "x")
    inside, go = Gate(), Gate()

    def child() -> bool:
        """Leaves the block that its parent entered, which lets go of nothing."""
        lock.__exit__(None, None, None)
        inside.open()
        go.wait()
        return is_free(context)

    with lock:
        other = children(child)
        inside.wait()
        go.open()
        assert other.result() is False
    assert in_child(lambda: is_free(context))


def test_a_holder_that_forks_and_dies(place: Path, context: Members, children: ProcessGroup) -> None:
    """Its child, which lives on, keeps nothing of it."""
    inside = Gate()

    born = shared.buffer(context, "born", 8).cast("Q")

    def hold(context: Members) -> None:
        with NamedLock(context, "x"):
            child = os.fork()
            if child == 0:
                signal.pause()
            born[0] = child
            inside.open()
            Gate().wait()

    holder = children(lambda: rank(place, 1, hold))
    inside.wait()
    os.kill(holder.pid, signal.SIGKILL)
    try:
        with NamedLock(context, "x", timeout=LONG):
            assert not in_child(lambda: is_free(context))
    finally:
        os.kill(born[0], signal.SIGKILL)


def test_nobody_sleeps_through_a_release(place: Path, context: Members, children: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TURN", 3600.0)

    def enter(context: Members) -> int:
        for turn in range(300):  # noqa: B007
            with NamedLock(context, "x"):
                pass
        return turn

    others = [children(lambda n=n: rank(place, n, enter)) for n in range(1, 4)]
    assert enter(context) == 299
    assert [other.result() for other in others] == [299] * 3


def test_ctrl_c_while_it_waits(place: Path, context: Members, children: ProcessGroup) -> None:
    inside, go = Gate(), Gate()

    def hold(context: Members) -> None:
        with NamedLock(context, "x"):
            inside.open()
            go.wait()

    holder = children(lambda: rank(place, 1, hold))
    inside.wait()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        NamedLock(context, "x", timeout=LONG).__enter__()
    go.open()
    holder.result()
    assert is_free(context)


def in_the_middle_of_a_lock(context: Members, work: Callable[[], object]) -> None:
    """Have the handler of a signal do that, while its thread takes the lock "main"."""
    ask, old = locks.LockFile._ask_locked, signal.getsignal(signal.SIGUSR1)

    def interrupted(file: locks.LockFile, kind: int, offset: int) -> bool:
        patch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return ask(file, kind, offset)

    signal.signal(signal.SIGUSR1, lambda *_: work())
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for itself"))
    signal.alarm(20)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks.LockFile, "_ask_locked", interrupted)
            with NamedLock(context, "main"):
                pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, old)


def test_the_handler_of_a_signal_locks_in_the_middle_of_a_lock(place: Path, context: Members, children: ProcessGroup) -> None:
    other, seen = held(children, place, 1), list[bool]()

    def work() -> None:
        with NamedLock(context, "mine"):
            seen.append(in_child(lambda: rank(place, 2, lambda other: is_free(other, "mine"))))
        seen.append(in_child(lambda: rank(place, 2, lambda other: is_free(other, "mine"))))
        with pytest.raises(errors.WaitTimeout, match=f"process {other.pid}"):
            NamedLock(context, "x", timeout=0.0).__enter__()
        seen.append(in_child(lambda: is_free(context, "mine")))

    in_the_middle_of_a_lock(context, work)
    assert seen == [False, True, True]
    assert is_free(context, "main")
    other.kill()
    assert is_free(context)


def test_the_handler_of_a_signal_leaves_in_the_middle_of_a_lock(place: Path, context: Members) -> None:
    def leave(context: Members) -> list[str]:
        def work() -> None:
            shared.close(context)
            context.leave()

        with pytest.raises(errors.Closed):
            in_the_middle_of_a_lock(context, work)
            NamedLock(context, "y")
        return [link for fd in os.listdir("/proc/self/fd") if (link := linked(fd)).endswith(f"{place.name}/locks")]

    NamedLock(context, "x")
    assert len(in_child(lambda: rank(place, 1, leave))) == 0


def test_after_the_claim_was_left(place: Path, context: Members) -> None:
    def leave(context: Members) -> bool:
        lock = NamedLock(context, "x")
        with lock:
            shared.close(context)
            context.leave()
        with pytest.raises(errors.Closed):
            lock.__enter__()
        with pytest.raises(errors.Closed):
            NamedLock(context, "y")
        return True

    assert in_child(lambda: rank(place, 1, leave))
    assert is_free(context)


def test_closing_closes_the_file(place: Path, context: Members) -> None:
    def files() -> list[str]:
        return [link for fd in os.listdir("/proc/self/fd") if (link := linked(fd)).startswith(str(place))]

    def leave(context: Members) -> Any:
        before = len(files())
        with NamedLock(context, "x"):
            pass
        between = len(files())
        shared.close(context)
        return between - before, len(files()) - before

    assert in_child(lambda: rank(place, 1, leave)) == (1, 0)


def linked(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("name", ["", "a/b", "ä" * 500, "\ud800", "..", "\0"])
def test_names_of_all_kinds(context: Members, name: str) -> None:
    with NamedLock(context, name):
        assert not is_free_in_child(context, name)
    assert is_free_in_child(context, name)


def is_free_in_child(context: Members, name: str) -> bool:
    return bool(in_child(lambda: is_free(context, name)))


@pytest.mark.parametrize("name", [None, b"x", 3])
def test_names_that_are_none(context: Members, name: Any) -> None:
    with pytest.raises(errors.ConfigError, match="must be a str"):
        NamedLock(context, name)


def test_the_job_closed_all_descriptors(place: Path, context: Members) -> None:
    def closing(context: Members) -> bool:
        lock = NamedLock(context, "x")
        with lock:
            pass
        os.closerange(300, 1100)
        with lock:
            return bool(in_child(lambda: is_free(context)))

    assert in_child(lambda: rank(place, 1, closing)) is False
