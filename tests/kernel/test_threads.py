"""The one fan-out over threads."""

from __future__ import annotations

import gc
import math
import queue
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from forebay._kernel import interrupts
from forebay._kernel import threads as threads_module
from forebay._kernel.threads import DaemonThread, Threads, run_all
from tests.interrupts.signals import NUMBER, handler_that_raises

WAIT = 60.0


def threads_called(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(f"forebay-{name}-")]


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("jobs", [1, 4])
def test_each_function_is_called_once_and_no_thread_stays(jobs: int, inline: bool) -> None:
    done: list[int] = []
    run_all((partial(done.append, n) for n in range(500)), jobs, name="once", inline=inline)
    assert sorted(done) == list(range(500))
    assert threads_called("once") == []


def test_no_work_starts_no_thread_and_turns_once() -> None:
    turns: list[int] = []
    run_all([], 4, name="none", on_turn=lambda: turns.append(threading.active_count()))
    assert turns == [threading.active_count()]


@pytest.mark.parametrize("inline", [False, True])
def test_functions_run_side_by_side_but_never_more_than_jobs(inline: bool) -> None:
    meeting, lock = threading.Barrier(3), threading.Lock()
    now, most = 0, 0

    def work() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        meeting.wait(WAIT)
        with lock:
            now -= 1

    run_all([work] * 9, 3, name="beside", inline=inline)
    assert most == 3


def test_inline_work_runs_in_the_calling_thread_too() -> None:
    meeting, seen = threading.Barrier(2), set()

    def work() -> None:
        seen.add(threading.get_ident())
        meeting.wait(WAIT)

    run_all([work] * 2, 2, name="inline", inline=True)
    assert threading.get_ident() in seen
    assert len(seen) == 2


def test_a_function_is_taken_only_when_a_thread_is_free() -> None:
    taken, done = [0], [0]
    ahead: list[int] = []

    def work() -> Iterator[Callable[[], None]]:
        for _ in range(20):
            taken[0] += 1
            ahead.append(taken[0] - done[0])
            yield finish

    def finish() -> None:
        done[0] += 1

    run_all(work(), 1, name="lazy")
    assert ahead == [1] * 20


def test_work_may_block_until_other_work_has_ended() -> None:
    ended = threading.Semaphore(2)
    order: list[int] = []

    def work() -> Iterator[Callable[[], None]]:
        for n in range(10):
            assert ended.acquire(timeout=WAIT)
            yield partial(run, n)

    def run(number: int) -> None:
        order.append(number)
        ended.release()

    run_all(work(), 5, name="blocking")
    assert sorted(order) == list(range(10))


@pytest.mark.parametrize("inline", [False, True])
def test_the_first_error_is_raised_as_it_is_and_ends_the_rest(inline: bool) -> None:
    error, stopped = ValueError("mine"), threading.Event()
    done: list[int] = []

    def fail() -> None:
        raise error

    def work() -> Iterator[Callable[[], object]]:
        yield from (partial(done.append, n) for n in range(5))
        yield fail
        while not stopped.is_set():
            yield lambda: None
        pytest.fail("a function was taken after the error")

    with pytest.raises(ValueError) as caught:
        run_all(work(), 3, name="error", inline=inline, stop=stopped.set)
    assert caught.value is error
    assert sorted(done) == list(range(5))
    assert stopped.is_set()
    assert threads_called("error") == []


def test_an_error_while_work_is_taken_ends_the_call() -> None:
    def work() -> Iterator[Callable[[], None]]:
        yield lambda: None
        raise LookupError

    with pytest.raises(LookupError):
        run_all(work(), 2, name="iterator")


def test_an_error_stops_at_once_what_runs() -> None:
    running, stopped = threading.Event(), threading.Event()

    def wait() -> None:
        running.set()
        assert stopped.wait(WAIT)
        raise InterruptedError

    def fail() -> None:
        assert running.wait(WAIT)
        raise ValueError

    with pytest.raises(ValueError):
        run_all([wait, fail], 2, name="stop", stop=stopped.set)


def test_the_caller_turns_while_it_waits() -> None:
    enough = threading.Event()
    turns: list[float] = []
    ended: list[float] = []

    def turn() -> None:
        turns.append(time.monotonic())
        if len(turns) == 3:
            enough.set()

    def work() -> None:
        assert enough.wait(WAIT)
        ended.append(time.monotonic())

    run_all([work], 1, name="turn", on_turn=turn)
    assert turns[2] <= ended[0] <= turns[-1]  # the last one is after the work


def test_an_error_of_a_turn_ends_the_call() -> None:
    stopped = threading.Event()

    def turn() -> None:
        raise KeyError

    with pytest.raises(KeyError):
        run_all([lambda: stopped.wait(WAIT)], 1, name="bad-turn", on_turn=turn, stop=stopped.set)
    assert threads_called("bad-turn") == []


@pytest.mark.parametrize("inline", [False, True])
def test_an_interrupt_of_the_caller_wins_and_stops_the_threads(inline: bool) -> None:
    here, busy, stopped = threading.get_ident(), threading.Semaphore(0), threading.Event()

    def press() -> None:
        assert busy.acquire(timeout=WAIT)
        raise KeyboardInterrupt

    def work() -> None:
        if threading.get_ident() == here:
            press()
        busy.release()
        assert stopped.wait(WAIT)
        raise ValueError

    with pytest.raises(KeyboardInterrupt):
        run_all([work] * 6, 3, name="ctrl-c", inline=inline, on_turn=None if inline else press, stop=stopped.set)
    assert threads_called("ctrl-c") == []


def test_what_a_handler_raises_in_the_caller_wins_over_the_error_of_a_thread() -> None:
    here, begun, failing = threading.get_ident(), threading.Event(), queue.SimpleQueue[threading.Thread]()

    def work() -> None:
        if threading.get_ident() != here:
            assert begun.wait(WAIT)
            failing.put(threading.current_thread())
            raise ValueError
        begun.set()
        failing.get(timeout=WAIT).join()
        signal.raise_signal(NUMBER)
        interrupts.point()

    with handler_that_raises(), pytest.raises(TimeoutError, match="of the handler"):
        interrupts.guarded(run_all)([work] * 2, 2, name="both", inline=True)


def test_a_thread_that_does_not_end_is_left_behind_and_takes_nothing_more() -> None:
    stuck, go_on, more = threading.Event(), threading.Event(), threading.Event()

    def work() -> Iterator[Callable[[], object]]:
        yield stick
        yield fail
        yield more.set

    def stick() -> None:
        stuck.set()
        go_on.wait(WAIT)

    def fail() -> None:
        assert stuck.wait(WAIT)
        raise ValueError

    with pytest.raises(ValueError):
        run_all(work(), 2, name="left", grace=0)
    (left,) = threads_called("left")
    assert left.daemon
    go_on.set()
    left.join(WAIT)
    assert not more.is_set()


def test_a_thread_that_may_not_be_left_is_waited_for() -> None:
    stuck, go_on = threading.Event(), threading.Event()

    def stick() -> None:
        stuck.set()
        go_on.wait(WAIT)

    def fail() -> None:
        assert stuck.wait(WAIT)
        raise ValueError

    with pytest.raises(ValueError):
        run_all([stick, fail], 2, name="kept", stop=go_on.set, grace=math.inf)
    assert threads_called("kept") == []


def test_an_error_keeps_nothing_in_memory() -> None:
    class Held:
        pass

    def fail() -> None:
        held = Held()
        alive.append(weakref.ref(held))
        raise ValueError

    alive: list[weakref.ref[Held]] = []
    gc.disable()
    try:
        with pytest.raises(ValueError):
            run_all([fail], 1, name="memory")
        del fail
        assert [ref() for ref in alive] == [None]
    finally:
        gc.enable()


def test_an_idle_thread_keeps_no_item_alive() -> None:
    class Item:
        done = threading.Event()

    def work(item: Item) -> None:
        item.done.set()

    threads = Threads(work, 1, name="idle")
    item = Item()
    ref = weakref.ref(item)
    threads.submit(item)
    assert item.done.wait(WAIT)
    del item
    deadline = time.monotonic() + WAIT
    while ref() is not None and time.monotonic() < deadline:
        time.sleep(0.001)  # the thread that worked on it is on its way to the next one
    is_running = threads_called("idle")
    threads.close()
    assert is_running
    assert ref() is None


def test_where_no_thread_can_be_started_the_others_work_or_the_item_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, go, done = threading.Semaphore(0), threading.Event(), queue.SimpleQueue[int]()

    def work(item: int) -> None:
        busy.release()
        assert go.wait(WAIT)
        done.put(item)

    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threads = Threads(work, 2, name="few")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert not threads.submit(0)
    assert threads.submit(1)
    assert busy.acquire(timeout=WAIT)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        assert threads.submit(2)
    go.set()
    assert [done.get(timeout=WAIT) for _ in range(2)] == [1, 2]
    assert threads.close() == []


def no_thread_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is no memory: the system starts a thread, which ends before it can say so."""
    monkeypatch.setattr(threads_module, "START", 0.05)
    for name in ("_start_new_thread", "_start_joinable_thread"):  # Python 3.13 and later have the second one
        if hasattr(threading, name):
            monkeypatch.setattr(threading, name, lambda *_, **__: 0)


@pytest.mark.keeps("threads that never began: Python lists them for ever")
@pytest.mark.parametrize("inline", [False, True])
def test_where_no_thread_begins_the_caller_does_all_the_work(monkeypatch: pytest.MonkeyPatch, inline: bool) -> None:
    done: list[tuple[int, int]] = []
    no_thread_begins(monkeypatch)
    run_all([lambda n=n: done.append((n, threading.get_ident())) for n in range(9)], 3, name="none", inline=inline)  # type: ignore[misc]
    assert done == [(n, threading.get_ident()) for n in range(9)]
    with pytest.raises(KeyError):
        run_all([{}.popitem] * 9, 3, name="none", inline=inline)
    assert not Threads(done.append, 3, name="none").submit((0, 0))


def test_a_thread_that_begins_too_late_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its work has been done by another thread since."""
    done: list[int] = []
    later: list[Callable[[], object]] = []
    thread = DaemonThread(lambda: done.append(1), name="late")
    with monkeypatch.context() as patch:
        patch.setattr(threads_module, "START", 0.05)
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if (start := getattr(threading, name, None)) is not None:
                patch.setattr(threading, name, lambda *args, start=start, **how: later.append(partial(start, *args, **how)))
        assert not thread.begin()
    later[0]()
    assert thread._begun.wait(WAIT)
    thread.join(WAIT)
    assert not thread.is_alive()
    assert done == []


def test_a_thread_that_is_slow_to_say_so_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []
    monkeypatch.setattr(threads_module, "START", 0.0)
    begun = [thread.begin() for thread in [DaemonThread(lambda: done.append(1), name="slow") for _ in range(200)]]
    until = time.monotonic() + WAIT
    while len(done) < sum(begun) and time.monotonic() < until:
        time.sleep(0.001)
    assert len(done) == sum(begun)
