"""What a handler raises in a call that runs without a guard, or in code of the program, is no error of the disk, of a value or of an
argument: a time limit may be of any class."""

from __future__ import annotations

import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forebay
from forebay._engine.packs.pack import Pack
from forebay.adapters import pfio
from forebay.cache import fetcher_of
from forebay.tasks.hashing import LEAF
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.interrupts.every_line import KINDS, Handler, Moments, interrupt
from tests.interrupts.signals import NUMBER, handler_that_raises, interrupted_after

Call = Callable[[], Any]
STRIDE = 7
LONG = {"the first call of a cached function", "the first call with a class", "a cached call with much"}
"""Calls of thousands of lines: at one line in ``STRIDE``."""


class Point:
    """A value, and an argument, whose own code runs as it is pickled, recreated and hashed."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __reduce__(self) -> tuple[Any, ...]:
        self._touch()
        return Point, (self.x,)

    def _touch(self) -> None:
        for _ in range(3):
            self.x += 0


def _square(x: Any) -> Any:
    return [x, x]


class Place:
    """A cache, and what the calls below use."""

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        self.cache = forebay.Cache(folder / "root", budget=64 * MiB, min_free=0)
        self.tasks = self.cache.tasks("t")
        self.url = server.put("/x", b"x" * 30_000)
        self.number = 0

    def cached(self, argument: Any, **options: Any) -> Call:
        function = self.tasks.cached(_square, **options)
        return lambda: function(argument)

    def new(self) -> int:
        self.number += 1
        return self.number


def _first_call(place: Place) -> Call:
    number = place.new()

    def function(x: int) -> list[int]:
        return [x, number]

    cached = place.tasks.cached(function)
    return lambda: cached(1)


def _first_class(place: Place) -> Call:
    """The digest of its function looks at the source."""

    class Own:
        def __reduce__(self) -> tuple[Any, ...]:
            return _square, (lambda: 1,)

    return place.cached(Own())


def _sample(place: Place, codec: str, value: Any) -> Call:
    samples: Any = place.cache.samples(f"of {codec}", 10, codec=codec)
    samples.put(1, value)
    return lambda: samples.get(1)


def _get(place: Place) -> Call:
    place.cache.put("k", b"x" * 100)
    return lambda: place.cache.get("k")


CALLS: dict[str, Callable[[Place], Call]] = {
    "read": lambda place: lambda: place.cache.read(place.url),
    "get": _get,
    "get_or_put": lambda place: lambda: place.cache.get_or_put("made", lambda: b"x"),
    "a sample": lambda place: _sample(place, "raw", b"x"),
    "a sample of values": lambda place: _sample(place, "pytree", {"a": [1, (2.5, "x")]}),
    "a sample of JSON": lambda place: _sample(place, "json", {"a": [1]}),
    "a cached call": lambda place: place.cached(1),
    "a cached call of a value with code": lambda place: place.cached(1, tag="p-{x}"),
    "a cached call with an object": lambda place: place.cached(Point(1)),
    "a cached call with a dict": lambda place: place.cached({"a": {1, 2}, "b": [Point(1), None]}),
    "a cached call with a function": lambda place: place.cached(_square),
    "a cached call with a method": lambda place: place.cached(Point(1)._touch),
    "a cached call with much": lambda place: place.cached(b"x" * (2 * LEAF + 1)),
    "the first call of a cached function": _first_call,
    "the first call with a class": _first_class,
    "tag_of": lambda place: lambda: place.tasks.cached(_square).tag_of(Point(1)),
    "cached": lambda place: lambda: place.tasks.cached(_square, tag="p-{x}"),
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    before = signal.signal(NUMBER, interrupt)
    gc.disable()  # what a handler raises as a finalizer begins is lost
    with ScriptedServer() as server:
        made = Place(tmp_path, server)
        yield made
        made.cache.close()
    gc.enable()
    signal.signal(NUMBER, before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_what_a_handler_raises_at_any_line_reaches_the_caller(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[Exception]
) -> None:
    """As it is, and nothing is stored, dropped or reported for it."""
    monkeypatch.setattr(Handler, "kind", kind)
    moments, at = Moments(), 0
    CALLS[name](place)()
    while moments.where or at == 0:
        at += STRIDE if name in LONG else 1
        call = CALLS[name](place)
        if name not in LONG:
            call()
        ran = interrupt.ran
        raised = moments.run(call, at)
        assert raised == bool(moments.where) == interrupt.ran - ran, moments.where
    assert at > 3
    assert place.tasks.stats().store_failures == place.tasks.stats().damaged == 0


class Signalling:
    """A value, an argument and a part of a tag, whose own code is interrupted."""

    armed = False

    def __reduce__(self) -> tuple[Any, ...]:
        self._signal()
        return _recreated, ()

    def __format__(self, spec: str) -> str:
        self._signal()
        return "tag"

    def _signal(self) -> None:
        if Signalling.armed:
            signal.raise_signal(NUMBER)


def _recreated() -> Signalling:
    Signalling()._signal()
    return Signalling()


class Odd:
    """A codec of the program's own."""

    name = "odd"

    def encode(self, value: Any) -> bytes:
        return b"x"

    def decode(self, data: memoryview) -> Signalling:
        return _recreated()


def _of_odd_codec(cache: forebay.Cache, run: list[Any]) -> Call:
    samples: Any = cache.samples("odd", 3, codec=Odd())
    return lambda: samples.get_or_put(1, lambda: run.append(1) or Signalling())


OWN_CODE: dict[str, Callable[[forebay.Cache, list[Any]], Call]] = {
    "an argument": lambda cache, run: partial(cache.tasks("t").cached(run.append), Signalling()),
    "an argument, with a tag": lambda cache, run: partial(cache.tasks("t").cached(lambda x: run.append(x), tag="a"), Signalling()),
    "a field of a tag": lambda cache, run: partial(cache.tasks("t").cached(lambda x: run.append(x), tag="{x}"), Signalling()),
    "a value": lambda cache, run: cache.tasks("t").cached(lambda: run.append(1) or Signalling()),
    "a value of another codec": lambda cache, run: cache.tasks("t", codec=Odd()).cached(lambda: run.append(1) or Signalling()),
    "a sample": _of_odd_codec,
}


@pytest.mark.parametrize("once", [False, True], ids=["", "and puts another in its place"])
@pytest.mark.parametrize("name", OWN_CODE)
def test_what_a_handler_raises_in_the_code_of_a_value_is_none_of_its_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, caplog: pytest.LogCaptureFixture, once: bool
) -> None:
    """The function does not run for it, and the next call has the value."""
    run = list[Any]()
    with forebay.Cache(tmp_path / "root", budget=32 * MiB, min_free=0) as cache, handler_that_raises(once=once):
        call = OWN_CODE[name](cache, run)
        call()
        with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
            patch.setattr(Signalling, "armed", True)
            call()
        assert not caplog.records
        assert len(run) == 1
        call()
        assert len(run) == 1


def test_writable_memory_of_a_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.Cache(tmp_path / "root", budget=32 * MiB, min_free=0) as cache:
        samples: Any = cache.samples("s", 3)
        assert samples.put(1, b"x" * MiB)
        codec = SimpleNamespace(name="", decode=lambda data, private: private())
        reader: Any = forebay.Samples(fetcher_of(cache), samples._pack, codec, "s")
        with handler_that_raises(), monkeypatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
            interrupted_after(patch, Pack, "private")
            reader.get(1)
        assert reader.get(1) == b"x" * MiB


def test_a_slot_of_pfio(tmp_path: Path) -> None:
    class Interrupted:
        def get(self, i: int) -> Any:
            signal.raise_signal(NUMBER)
            return memoryview(b"x")

    files: Any = pfio.FileCache(1, dir=tmp_path / "pfio")
    assert files.put(0, b"x")
    live, files._source = files._source, Interrupted()
    with handler_that_raises(), pytest.raises(TimeoutError, match="of the handler"):
        files.get(0)
    files._source = live
    assert files.get(0) == b"x"
    files.close()
