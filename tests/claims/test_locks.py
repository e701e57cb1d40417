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
from forebay.claims.members import ClaimContext
from forebay.claims.shared import NamedLock
from tests.claims.houses import rank
from tests.processes import Child, Gate, ProcessGroup, in_child

LONG = 30.0


def held(children: ProcessGroup, place: Path, number: int) -> Child:
    """A rank that is inside until it is killed."""
    inside = Gate()

    def hold(house: ClaimContext) -> None:
        with NamedLock(house, "x"):
            inside.open()
            signal.pause()

    child = children(lambda: rank(place, number, hold))
    inside.wait()
    inside.close()
    return child


def is_free(house: ClaimContext, name: str = "x") -> bool:
    """Whether another process could enter."""
    try:
        with NamedLock(house, name, timeout=0.0):
            return True
    except errors.WaitTimeout:
        return False


def test_processes_and_threads_count_right(place: Path, house: ClaimContext, children: ProcessGroup) -> None:
    def count(house: ClaimContext) -> None:
        cell = shared.buffer(house, "count", 8).cast("Q")
        for _ in range(150):
            with NamedLock(house, "count"):
                cell[0] = cell[0] + 1

    def threads(house: ClaimContext) -> None:
        crowd = [threading.Thread(target=count, args=(house,)) for _ in range(2)]
        for thread in crowd:
            thread.start()
        for thread in crowd:
            thread.join()

    others = [children(lambda n=n: rank(place, n, threads)) for n in range(1, 4)]
    threads(house)
    for other in others:
        other.result()
    assert shared.buffer(house, "count", 8).cast("Q")[0] == 4 * 2 * 150


def test_two_names_are_two_locks(place: Path, house: ClaimContext) -> None:
    with NamedLock(house, "x"):
        assert in_child(lambda: rank(place, 1, lambda other: (is_free(other, "x"), is_free(other, "y")))) == (False, True)
    assert in_child(lambda: rank(place, 1, is_free))


def test_a_thread_cannot_enter_twice(house: ClaimContext) -> None:
    with NamedLock(house, "x"), pytest.raises(errors.ConfigError, match="held by this thread"), NamedLock(house, "x", timeout=LONG):
        raise AssertionError("it entered")
    assert is_free(house)


def test_another_thread_waits(house: ClaimContext) -> None:
    lock, entered = NamedLock(house, "x", timeout=LONG), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    with lock:
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.15)
    assert entered.wait(LONG)
    thread.join()
    assert is_free(house)


def test_an_error_inside_lets_go(place: Path, house: ClaimContext) -> None:
    with pytest.raises(KeyError), NamedLock(house, "x"):
        raise KeyError
    assert in_child(lambda: rank(place, 1, is_free))


def test_a_death_lets_go(place: Path, house: ClaimContext, children: ProcessGroup) -> None:
    holder = held(children, place, 1)
    killed: list[float] = []
    timer = threading.Timer(0.1, lambda: (killed.append(time.monotonic()), holder.kill()))
    timer.start()
    with NamedLock(house, "x", timeout=LONG):
        assert time.monotonic() - killed[0] < LONG / 3
    timer.join()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_timeout_names_the_holder(place: Path, house: ClaimContext, children: ProcessGroup, stopped: bool) -> None:
    holder = held(children, place, 7)
    if stopped:
        holder.signal(signal.SIGSTOP)
        os.waitid(os.P_PID, holder.pid, os.WSTOPPED | os.WNOWAIT)
    end = ", stopped" if stopped else ""
    with pytest.raises(errors.WaitTimeout, match=rf"the lock 'x' of claim 000000, held by rank 7 \(process {holder.pid}{end}\)$"):
        NamedLock(house, "x", timeout=0.1).__enter__()


def test_a_forked_child_does_not_hold_it(house: ClaimContext, children: ProcessGroup) -> None:
    lock = NamedLock(house, "x")
    inside, go = Gate(), Gate()

    def child() -> bool:
        """Leaves the block that its parent entered, which lets go of nothing."""
        lock.__exit__(None, None, None)
        inside.open()
        go.wait()
        return is_free(house)

    with lock:
        other = children(child)
        inside.wait()
        go.open()
        assert other.result() is False
    assert in_child(lambda: is_free(house))


def test_a_holder_that_forks_and_dies(place: Path, house: ClaimContext, children: ProcessGroup) -> None:
    """Its child, which lives on, keeps nothing of it."""
    inside = Gate()

    born = shared.buffer(house, "born", 8).cast("Q")

    def hold(house: ClaimContext) -> None:
        with NamedLock(house, "x"):
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
        with NamedLock(house, "x", timeout=LONG):
            assert not in_child(lambda: is_free(house))
    finally:
        os.kill(born[0], signal.SIGKILL)


def test_nobody_sleeps_through_a_release(place: Path, house: ClaimContext, children: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "TURN", 3600.0)

    def enter(house: ClaimContext) -> int:
        for turn in range(300):  # noqa: B007
            with NamedLock(house, "x"):
                pass
        return turn

    others = [children(lambda n=n: rank(place, n, enter)) for n in range(1, 4)]
    assert enter(house) == 299
    assert [other.result() for other in others] == [299] * 3


def test_ctrl_c_while_it_waits(place: Path, house: ClaimContext, children: ProcessGroup) -> None:
    inside, go = Gate(), Gate()

    def hold(house: ClaimContext) -> None:
        with NamedLock(house, "x"):
            inside.open()
            go.wait()

    holder = children(lambda: rank(place, 1, hold))
    inside.wait()
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        NamedLock(house, "x", timeout=LONG).__enter__()
    go.open()
    holder.result()
    assert is_free(house)


def in_the_middle_of_a_lock(house: ClaimContext, work: Callable[[], object]) -> None:
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
            with NamedLock(house, "main"):
                pass
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, old)


def test_the_handler_of_a_signal_locks_in_the_middle_of_a_lock(place: Path, house: ClaimContext, children: ProcessGroup) -> None:
    other, seen = held(children, place, 1), list[bool]()

    def work() -> None:
        with NamedLock(house, "mine"):
            seen.append(in_child(lambda: rank(place, 2, lambda other: is_free(other, "mine"))))
        seen.append(in_child(lambda: rank(place, 2, lambda other: is_free(other, "mine"))))
        with pytest.raises(errors.WaitTimeout, match=f"process {other.pid}"):
            NamedLock(house, "x", timeout=0.0).__enter__()
        seen.append(in_child(lambda: is_free(house, "mine")))

    in_the_middle_of_a_lock(house, work)
    assert seen == [False, True, True]
    assert is_free(house, "main")
    other.kill()
    assert is_free(house)


def test_the_handler_of_a_signal_leaves_in_the_middle_of_a_lock(place: Path, house: ClaimContext) -> None:
    def leave(house: ClaimContext) -> list[str]:
        def work() -> None:
            shared.close(house)
            house.members.leave()

        with pytest.raises(errors.Closed):
            in_the_middle_of_a_lock(house, work)
            NamedLock(house, "y")
        return [link for fd in os.listdir("/proc/self/fd") if (link := linked(fd)).endswith(f"{place.name}/locks")]

    NamedLock(house, "x")
    assert len(in_child(lambda: rank(place, 1, leave))) == 0


def test_after_the_claim_was_left(place: Path, house: ClaimContext) -> None:
    def leave(house: ClaimContext) -> bool:
        lock = NamedLock(house, "x")
        with lock:
            shared.close(house)
            house.members.leave()
        with pytest.raises(errors.Closed):
            lock.__enter__()
        with pytest.raises(errors.Closed):
            NamedLock(house, "y")
        return True

    assert in_child(lambda: rank(place, 1, leave))
    assert is_free(house)


def test_closing_closes_the_file(place: Path, house: ClaimContext) -> None:
    def files() -> list[str]:
        return [link for fd in os.listdir("/proc/self/fd") if (link := linked(fd)).startswith(str(place))]

    def leave(house: ClaimContext) -> Any:
        before = len(files())
        with NamedLock(house, "x"):
            pass
        between = len(files())
        shared.close(house)
        return between - before, len(files()) - before

    assert in_child(lambda: rank(place, 1, leave)) == (1, 0)


def linked(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize("name", ["", "a/b", "ä" * 500, "\ud800", "..", "\0"])
def test_names_of_all_kinds(house: ClaimContext, name: str) -> None:
    with NamedLock(house, name):
        assert not is_free_in_child(house, name)
    assert is_free_in_child(house, name)


def is_free_in_child(house: ClaimContext, name: str) -> bool:
    return bool(in_child(lambda: is_free(house, name)))


@pytest.mark.parametrize("name", [None, b"x", 3])
def test_names_that_are_none(house: ClaimContext, name: Any) -> None:
    with pytest.raises(errors.ConfigError, match="must be a str"):
        NamedLock(house, name)


def test_the_job_closed_all_descriptors(place: Path, house: ClaimContext) -> None:
    def closing(house: ClaimContext) -> bool:
        lock = NamedLock(house, "x")
        with lock:
            pass
        os.closerange(300, 1100)
        with lock:
            return bool(in_child(lambda: is_free(house)))

    assert in_child(lambda: rank(place, 1, closing)) is False
