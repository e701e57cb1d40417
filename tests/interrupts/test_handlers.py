"""The program's handlers: which one runs, when, and where what it raises arrives."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._kernel import interrupts
from tests import parts
from tests.harness import MiB
from tests.interrupts.every_line import Interrupt, Moments, interrupt
from tests.processes import ended

NUMBER = signal.SIGUSR1


class Limit(Exception):
    """What a time limit raises."""


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    before = signal.getsignal(NUMBER)
    with forebay.Cache(tmp_path / "root", budget=32 * MiB, min_free=0) as cache:
        yield cache
    signal.signal(NUMBER, before)


def raising(kind: type[BaseException] = Limit) -> Callable[..., None]:
    def handler(*_: Any) -> None:
        raise kind

    return handler


class Sized(list[str]):
    """A source whose items have a size: asked for it, it is interrupted."""

    uri, version = "test://sized", "1"

    def __getitem__(self, key: Any) -> bytes:  # type: ignore[override]
        return b"x" * 1000

    def size(self, key: str) -> int | None:
        signal.raise_signal(NUMBER)
        return 1000


def test_what_a_handler_raises_in_a_source_is_none_of_the_sources_errors(cache: forebay.Cache) -> None:
    signal.signal(NUMBER, raising())
    with cache.prefetcher(Sized(), name="s", budget=2 * MiB) as pool, pytest.raises(Limit):
        pool.get_lazy("k").get()
    assert cache.put("k", b"x" * 30_000)


def test_what_a_handler_raises_in_a_maker_does_not_reach_those_who_wait(cache: forebay.Cache) -> None:
    signal.signal(NUMBER, raising())
    waits, results = threading.Event(), list[object]()

    def wait() -> None:
        waits.set()
        results.append(bytes(cache.get_or_put("k", lambda: b"by the other")))

    thread = threading.Thread(target=wait)

    def make() -> bytes:
        thread.start()
        assert waits.wait(60)
        signal.raise_signal(NUMBER)
        return b"by the one"

    with pytest.raises(Limit):
        cache.get_or_put("k", make)
    thread.join()
    assert results == [b"by the other"]


def test_a_handler_that_calls_the_one_before_it_calls_the_programs(cache: forebay.Cache) -> None:
    """A module that is imported while a value is unpickled takes the handler that it finds for the one before its own."""
    ran, before = list[str](), list[Any]()
    signal.signal(NUMBER, lambda *_: ran.append("the program's"))

    def chain(*_: Any) -> None:
        ran.append("the module's")
        before[0](NUMBER, None)

    class Codec(forebay.Codec):
        name = "chain"

        def encode(self, value: bytes) -> bytes:
            before.append(signal.getsignal(NUMBER))
            signal.signal(NUMBER, chain)
            return value

        def decode(self, data: memoryview, writable: Callable[[], memoryview]) -> bytes:
            return bytes(data)

    interrupts.guarded(lambda: Codec().encode(b"x"))()
    for _ in range(2):
        signal.raise_signal(NUMBER)
        interrupts.guarded(lambda: signal.raise_signal(NUMBER))()
    assert ran == 4 * ["the module's", "the program's"]


def test_a_handler_that_is_over_is_not_kept() -> None:
    """That of `asyncio.run` refers to the task that it ran."""

    class Handler:
        def __call__(self, *_: object) -> None: ...

    handler = Handler()
    before = signal.signal(NUMBER, handler)
    try:
        interrupts.guarded(lambda: None)()
    finally:
        signal.signal(NUMBER, before)
    known = weakref.ref(handler)
    del handler
    assert known() is None


@pytest.mark.parametrize("later", ["the same", "another", "none"])
def test_a_signal_that_comes_as_something_is_dropped_reaches_no_later_handler(monkeypatch: pytest.MonkeyPatch, later: str) -> None:
    """A time limit has ended when the signal that came during a finalizer is sent again."""

    class Dropped:
        @interrupts.finalizer
        def __del__(self) -> None:
            signal.raise_signal(NUMBER)

    ran, sends = list[str](), list[Callable[[], None]]()
    before = signal.signal(NUMBER, lambda *_: ran.append("the limit's"))
    monkeypatch.setattr("_thread.start_new_thread", lambda send, arguments: sends.append(send))
    try:
        Dropped()
        if later != "the same":
            signal.signal(NUMBER, signal.SIG_DFL if later == "none" else lambda *_: ran.append("another"))
        (send,) = sends
        send()
        assert ran == (["the limit's"] if later == "the same" else [])
    finally:
        signal.signal(NUMBER, before)


def test_a_lock_is_released_if_a_signal_comes_as_its_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    before = signal.signal(NUMBER, interrupt)
    moments, raised = Moments(), 0
    try:
        with forebay.claim([], world=forebay.World(1, 1, 1, 0), job=f"handlers {os.getpid()}") as claim:
            lock = claim.lock("lock")
            at = 1
            while True:
                lock.__enter__()
                raised += moments.run(lambda: lock.__exit__(None, None, None), at)
                if not moments.where:
                    break
                if not moments.where.endswith("call") or raised == 0:
                    with lock:  # raises where this thread has it already
                        pass
                else:  # Python's own gap: nothing of the call has run
                    gc.collect()
                    try:
                        with lock:
                            pass
                    except forebay.errors.ConfigError:
                        lock.__exit__(None, None, None)
                at += 1
    finally:
        signal.signal(NUMBER, before)
    assert raised > 20


def test_an_item_that_came_as_a_signal_did_is_the_next_one() -> None:
    """A handler raises at the end of a step: the step's item is not lost."""
    before = signal.signal(NUMBER, interrupt)
    try:

        @interrupts.guarded
        def numbers() -> Iterator[int]:
            for number in range(100):
                if number % 3 == 0:
                    signal.raise_signal(NUMBER)
                yield number

        steps, got = numbers(), list[int]()
        while len(got) < 100:
            try:
                got.append(next(steps))
            except Interrupt:
                continue
        assert got == list(range(100))
    finally:
        signal.signal(NUMBER, before)


def test_of_two_signals_at_the_end_of_a_call_both_are_heard() -> None:
    ran = list[int]()
    numbers = signal.SIGUSR1, signal.SIGUSR2

    def handler(number: int, frame: Any) -> None:
        ran.append(number)
        raise Limit

    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        with pytest.raises(Limit):
            interrupts.guarded(lambda: [signal.raise_signal(number) for number in numbers])()
        assert ran == [*numbers]
        assert all(signal.getsignal(number) is handler for number in numbers)
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python says that it ignores it
def test_a_child_has_the_cache_if_a_signal_came_before_the_fork(cache: forebay.Cache) -> None:
    """At each line of the hooks: Python ignores what these raise, and the cache is prepared all the same."""
    signal.signal(NUMBER, interrupt)
    moments, pids = Moments(), list[int]()

    def put() -> int:
        for _ in range(3):
            try:
                return 0 if cache.put(f"of {os.getpid()}", b"x" * 1000) else 1
            except Interrupt:  # sent again
                continue
        return 2

    def fork() -> None:
        pid = os.fork()
        if not pid:
            sys.settrace(None)
            try:
                os._exit(put())
            finally:  # a signal that was sent again comes before its first line, say: the child would go on with this test
                os._exit(put())
        pids.append(pid)

    at, stride = 1, 11
    while True:
        if parts.takes(at, stride) or at < 40:
            moments.run(fork, at)
            assert [ended(pid) for pid in pids] in ([0], []), moments.where  # none: a signal just before the fork
            pids.clear()
            assert put() == 0
            if not moments.where:
                break
        at += 1
    assert at > 100
