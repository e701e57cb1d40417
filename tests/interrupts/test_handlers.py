"""The program's handlers: which one runs, when, and where what it raises arrives."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import interrupts
from forebay.testing import ScriptedServer
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


class Once:
    """A handler that stays for one signal: the next one has its default action, and ends the program."""

    def __call__(self, number: int, frame: Any) -> None:
        signal.signal(NUMBER, signal.SIG_DFL)
        raise Limit

    def method(self, number: int, frame: Any, *, more: int = 0) -> None:
        self(number, frame)


ONCE: dict[str, Callable[..., None]] = {
    "a function": raising(),
    "an object": Once(),
    "a method": Once().method,
    "a partial": partial(Once.method, Once(), more=1),
    "any arguments": lambda *some: Once()(*some),
    "other arguments": lambda number, *some, more=0: Once()(number, *some),
}


@pytest.mark.parametrize("handler", ONCE.values(), ids=ONCE)
def test_what_a_handler_raises_in_a_maker_does_not_reach_those_who_wait(cache: forebay.Cache, handler: Callable[..., None]) -> None:
    signal.signal(NUMBER, handler)
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


# -- what the program has set --------------------------------------------------------------------------------------------


class Action(ctypes.Structure):
    """A struct sigaction of glibc."""

    _fields_ = (("function", ctypes.c_void_p), ("mask", ctypes.c_byte * 128), ("flags", ctypes.c_int), ("rest", ctypes.c_byte * 128))


def action_of(number: int) -> tuple[int, int]:
    """The function that the system calls at a signal, and the flags."""
    action = Action()
    assert ctypes.CDLL(None).sigaction(number, None, ctypes.byref(action)) == 0
    return action.function, action.flags


def test_a_handler_that_c_code_put_over_pythons_is_left_alone(cache: forebay.Cache, tmp_path: Path) -> None:
    ran = list[str]()

    def handler(*_: Any) -> None:
        ran.append("the program's")

    def look() -> tuple[Any, tuple[int, int]]:
        return signal.getsignal(NUMBER), action_of(NUMBER)

    def make() -> bytes:
        inside.append(look())
        signal.raise_signal(NUMBER)
        assert ran == ["the program's"]
        return b"x"

    inside = list[tuple[Any, tuple[int, int]]]()
    signal.signal(NUMBER, handler)
    plain = action_of(NUMBER)
    with open(tmp_path / "stacks", "w") as stacks:
        faulthandler.register(NUMBER, stacks, chain=True)
        try:
            before = look()
            assert before[1] != plain
            interrupts.guarded(make)()
            assert inside == [before] == [look()]
        finally:
            faulthandler.unregister(NUMBER)
    assert " in make" in (tmp_path / "stacks").read_text()


@pytest.mark.parametrize("interrupts_calls", [False, True])
def test_flags_of_a_handler_are_kept(cache: forebay.Cache, interrupts_calls: bool) -> None:
    """SA_RESTART: whether a system call goes on after the signal."""
    signal.signal(NUMBER, raising())
    signal.siginterrupt(NUMBER, interrupts_calls)
    before = action_of(NUMBER)
    signal.siginterrupt(NUMBER, not interrupts_calls)
    assert action_of(NUMBER) != before
    signal.siginterrupt(NUMBER, interrupts_calls)
    inside = list[tuple[bool, tuple[int, int]]]()

    def look() -> None:
        inside.append((isinstance(signal.getsignal(NUMBER), interrupts._Note), action_of(NUMBER)))

    for _ in range(2):
        interrupts.guarded(look)()
        assert action_of(NUMBER) == before
    assert inside == 2 * [(True, before)]


def test_a_signal_that_comes_again_after_a_while_is_delivered_at_once(monkeypatch: pytest.MonkeyPatch, cache: forebay.Cache) -> None:
    now, came = [100.0], list[float]()
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    signal.signal(NUMBER, raising())

    def hang() -> None:
        for _ in range(100):
            came.append(now[0])
            with contextlib.suppress(Exception):  # whatever it is: a fault of the disk, say
                signal.raise_signal(NUMBER)
            now[0] += interrupts.PATIENCE / 4

    with pytest.raises(Limit):
        interrupts.guarded(hang)()
    assert came == [100.0 + interrupts.PATIENCE / 4 * number for number in range(5)]
    assert not interrupts._noted
    assert signal.getsignal(NUMBER) is not None


def _of_a_codec(cache: forebay.Cache, url: str, call: Callable[[], None]) -> None:
    class Codec(forebay.Codec):
        name = "calls"

        def encode(self, value: bytes) -> bytes:
            call()
            return value

        def decode(self, data: memoryview, writable: Callable[[], memoryview]) -> bytes:
            return bytes(data)

    cache.samples("s", 10, codec=Codec()).put(1, b"x")


def _of_an_event(cache: forebay.Cache, url: str, call: Callable[[], None]) -> None:
    remove = cache.on_event(lambda event: call())
    try:
        cache.read(url)
    finally:
        remove()


CALLBACKS: dict[str, Callable[[forebay.Cache, str, Callable[[], None]], Any]] = {
    "on_event": _of_an_event,
    "on_progress of pull": lambda cache, url, call: cache.pull(url, on_progress=lambda progress: call()),
    "on_progress of warm": lambda cache, url, call: cache.warm([url], on_progress=lambda progress: call()),
    "a codec": _of_a_codec,
}


@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks_run_with_signals_waiting(cache: forebay.Cache, name: str) -> None:
    seen = list[str]()

    def call() -> None:
        if threading.current_thread() is threading.main_thread() and not seen:
            assert isinstance(signal.getsignal(NUMBER), interrupts._Note)
            signal.raise_signal(NUMBER)
            seen.append("the callback went on")

    with ScriptedServer() as server:
        url = server.put("/x", b"x" * 30_000)
        handler = raising()
        signal.signal(NUMBER, handler)
        with pytest.raises(Limit):
            CALLBACKS[name](cache, url, call)
        assert seen == ["the callback went on"]
        assert signal.getsignal(NUMBER) is handler
        assert bytes(cache.read(url)) == b"x" * 30_000


def _keys(look: Callable[[], bytes], url: str) -> Iterator[str]:
    look()
    yield url


class _Looks(dict[str, bytes]):
    uri, version = "test://looks", "1"

    def __init__(self, look: Callable[[], bytes]) -> None:
        self._look, self.is_busy, self.on = look, threading.Event(), threading.Event()

    def __getitem__(self, key: str) -> bytes:
        if key == "first":
            self.is_busy.set()
            self.on.wait(60)
            return b""
        return self._look()


def _get_lazy(cache: forebay.Cache, url: str, look: Callable[[], bytes]) -> Any:
    """The only worker is busy, so the caller makes the value itself."""
    source = _Looks(look)
    pool = cache.prefetcher(source, name="p", workers=1)
    first = pool.get_lazy("first")
    assert source.is_busy.wait(60)
    try:
        return pool.get_lazy("k").get()
    finally:
        source.on.set()
        first.get()


MAKERS: dict[str, Callable[[forebay.Cache, str, Callable[[], bytes]], Any]] = {
    "get_or_put": lambda cache, url, look: cache.get_or_put("k", look),
    "space.get_or_put": lambda cache, url, look: cache.space("sp").get_or_put("k", look),
    "samples.get_or_put": lambda cache, url, look: cache.samples("s", 10).get_or_put(1, look),
    "samples.get_or_put_many": lambda cache, url, look: cache.samples("s", 10).get_or_put_many([1], lambda slots: [look()]),
    "a cached call": lambda cache, url, look: cache.tasks("t").cached(look, version="1")(),
    "a lazy": _get_lazy,
    "URLs of read_many": lambda cache, url, look: cache.read_many(_keys(look, url)),
    "URLs of warm": lambda cache, url, look: cache.warm(_keys(look, url)),
    "indices of samples": lambda cache, url, look: cache.samples("s", 10).get_many(len(url) % 10 for url in _keys(look, url)),
}  # fmt: skip
"""What runs a function of the program's that makes values, or items of an iterable."""


@pytest.mark.parametrize("name", MAKERS)
def test_functions_that_make_values_run_with_the_programs_handlers(cache: forebay.Cache, name: str) -> None:
    ran, seen = list[int](), list[tuple[Any, int]]()

    def handler(number: int, frame: Any) -> None:
        ran.append(number)

    def look() -> bytes:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(NUMBER)
        seen.append((signal.getsignal(NUMBER), len(ran)))
        return b"x"

    with ScriptedServer() as server:
        url = server.put("/x", b"x")
        signal.signal(NUMBER, handler)
        MAKERS[name](cache, url, look)
    assert seen == [(handler, 1)]


def test_a_finalizer_that_runs_while_the_handlers_are_put_back() -> None:
    """It makes a guarded call, which puts back what it finds: a collection may run it wherever Python makes an object."""

    class Saved(dict[int, Any]):
        def get(self, number: int, default: Any = None) -> Any:
            found = super().get(number, default)
            if not inside:
                inside.append(number)
                interrupts.guarded(lambda: None)()
            return found

    inside = list[int]()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, interrupt)
    saved = interrupts._saved
    interrupts._saved = Saved()
    try:
        interrupts.guarded(lambda: None)()
        assert inside
        assert not interrupts._saved
    finally:
        interrupts._saved = saved
    assert [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)] == [interrupt, interrupt]


@pytest.mark.parametrize("is_call", [True, False])
def test_threads_that_work_for_a_handler_do_not_wait_for_what_its_thread_has(cache: forebay.Cache, is_call: bool) -> None:
    writer = cache._fetcher.store.engine.parts.catalog.writer
    refused, later = list[str](), threading.Event()

    def call() -> None:
        worker.start()
        worker.join(60)

    def work() -> None:
        try:
            with writer():
                pass
        except errors.WriterBusy as error:
            refused.append(str(error))
        later.set()

    @interrupts.guarded
    def write() -> None:
        with writer():
            signal.raise_signal(NUMBER)
            interrupts.point()

    worker = threading.Thread(target=work, daemon=True)
    signal.signal(NUMBER, lambda *_: interrupts.guarded(call)() if is_call else call())
    began = time.monotonic()
    write()
    assert later.is_set()
    assert [each for each in refused if "a signal handler interrupted it" in each]
    assert time.monotonic() - began < 5  # a wait for another thread takes 10
    assert interrupts.depth() == 0
    assert cache.put("key", b"value")
