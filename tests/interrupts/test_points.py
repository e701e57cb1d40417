"""However many keys, files or entries a call handles, a signal is delivered after a few of them."""

from __future__ import annotations

import collections
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import fsspec
import pytest

import forebay
from forebay._engine.flight import KeyHold
from forebay._kernel import interrupts
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.interrupts.every_line import OURS, held_locks
from tests.interrupts.signals import handler_that_raises, interrupted_after

MANY = 1000
MOST = 45_000
"""Lines between two points, as many as a page of a listing takes: about 15 ms."""


class Stretches:
    """Counts the lines of Forebay that the main thread executes between two points of a call."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.longest, self.where = 0, list[tuple[str, int]]()
        self._lines, self._functions = 0, collections.Counter[str]()
        point, end = interrupts.point, interrupts._end

        def counted_point() -> None:
            if threading.get_ident() == interrupts._main and interrupts._inside and not interrupts._shields:
                self._ends()
            point()

        def counted_end(**options: bool) -> None:
            self._ends()
            end(**options)

        patch.setattr(interrupts, "point", counted_point)
        patch.setattr(interrupts, "_end", counted_end)

    def of(self, call: Callable[[], Any]) -> None:
        """Make a call."""
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            call()
        finally:
            sys.settrace(before)

    def _ends(self) -> None:
        if self._lines > self.longest:
            self.longest, self.where = self._lines, self._functions.most_common(5)
        self._lines = 0
        self._functions.clear()

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self._lines += 1
            self._functions[f"{frame.f_code.co_filename.removeprefix(OURS)} {frame.f_code.co_name}"] += 1
        return self._line


class Place:
    """A cache, a server, and directories."""

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        self.cache = forebay.Cache(folder / "root", budget=256 * MiB, min_free=0)
        self.folder, self._server = folder, server

    def urls(self) -> list[str]:
        return [self._server.put(f"/{number}", b"x" * 100) for number in range(MANY)]

    def cached(self) -> list[str]:
        urls = self.urls()
        self.cache.read_many(urls)
        return urls

    def opened_again(self) -> forebay.Cache:
        """This process remembers nothing of what the cache has."""
        self.cache.close()
        self.cache = forebay.Cache(self.folder / "root", budget=256 * MiB, min_free=0)
        return self.cache

    def values(self) -> forebay.Space:
        space = self.cache.space("many")
        for number in range(MANY):
            space.put(f"k{number}", b"x")
        return space

    def directory(self) -> dict[str, Any]:
        folder = self.folder / "many"
        for number in range(MANY):
            (folder / str(number % 20)).mkdir(parents=True, exist_ok=True)
            (folder / str(number % 20) / str(number)).write_bytes(b"x")
        return {"url": "/many", "filesystem": fsspec.filesystem("dir", path=str(self.folder), target_protocol="file")}

    def filled(self) -> forebay.Samples[Any]:
        samples = self.cache.samples("many", 200 * MANY)
        for number in range(10):
            samples.put(number, b"x")
        return samples


def _read_many_of_another_process(place: Place) -> Callable[[], Any]:
    urls = place.cached()
    cache = place.opened_again()
    return lambda: cache.read_many(urls)


def _lookahead(place: Place) -> Callable[[], Any]:
    urls = place.cached()

    def call() -> None:
        with place.cache.lookahead(urls) as ahead:
            next(ahead)
            ahead.read_many(urls[1:300])

    return call


def _check(place: Place) -> Callable[[], Any]:
    place.cache.directory(**place.directory()).close()
    return place.cache.check


def _directory(place: Place) -> Callable[[], Any]:
    arguments = place.directory()
    return lambda: place.cache.directory(**arguments)


def _part_of_a_directory(place: Place) -> Callable[[], Any]:
    arguments = place.directory()
    place.cache.directory(**arguments).close()
    cache = place.opened_again()
    return lambda: cache.directory(**arguments, include=["*0", "*1"])


def _copy_directory(place: Place) -> Callable[[], Any]:
    arguments = place.directory()
    return lambda: place.cache.copy_directory(path=place.folder / "copy", **arguments)


def _get_or_put_many(place: Place) -> Callable[[], Any]:
    samples = place.cache.samples("many", MANY)
    return lambda: samples.get_or_put_many(range(MANY), lambda slots: [b"x"] * len(slots))


CALLS: dict[str, Callable[[Place], Callable[[], Any]]] = {
    "read_many": lambda place: partial(place.cache.read_many, place.urls()),
    "read_many of another process's": _read_many_of_another_process,
    "local_many": lambda place: partial(place.cache.local_many, place.urls()),
    "lookahead": _lookahead,
    "keys": lambda place: place.values().keys,
    "iter(space)": lambda place: partial(list, place.values()),
    "directory": _directory,
    "a part of a directory": _part_of_a_directory,
    "copy_directory": _copy_directory,
    "check": _check,
    "get_or_put_many": _get_or_put_many,
    "iter(samples)": lambda place: partial(list, place.filled()),
    "samples.verify": lambda place: place.filled().verify,
}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ScriptedServer() as server:
        made = Place(tmp_path, server)
        yield made
        made.cache.close()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_many_has_points(place: Place, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    call = CALLS[name](place)
    stretches = Stretches(monkeypatch)
    stretches.of(call)
    assert 0 < stretches.longest < MOST, stretches.where


def test_a_signal_while_many_keys_are_locked_comes_before_the_next_portion(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = place.cache.samples("s", MANY)
    samples.get_or_put(0, lambda: b"x")
    held = held_locks()
    with handler_that_raises(), monkeypatch.context() as patch:
        count = interrupted_after(patch, KeyHold, "try_take", at=2)
        with pytest.raises(TimeoutError, match="of the handler"):
            samples.get_or_put_many(range(MANY), lambda slots: [b"x"] * len(slots))
        assert count() == interrupts.PORTION
    assert held_locks() == held


def test_a_handler_that_asks_for_a_key_that_is_being_locked_does_not_wait_for_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, got = place.cache.samples("s", MANY), list[bytes]()

    def handler(*_: object) -> None:
        got.append(bytes(samples.get_or_put(0, lambda: b"of the handler")))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with monkeypatch.context() as patch:
            interrupted_after(patch, KeyHold, "try_take")
            samples.get_or_put_many(range(MANY), lambda slots: [b"of the call"] * len(slots))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert got == [b"of the handler"]


def test_items_that_are_paced_have_a_point_before_each_portion(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[object]()
    monkeypatch.setattr(interrupts, "point", lambda: seen.append("point"))
    monkeypatch.setattr(interrupts, "PORTION", 3)
    for number in interrupts.paced(iter(range(7))):
        seen.append(number)
    assert seen == ["point", 0, 1, 2, "point", 3, 4, 5, "point", 6]
    seen.clear()
    assert [*interrupts.items_of_program([])] == [] == [*interrupts.paced(())]
    assert seen == []
    assert [*interrupts.items_of_program((1, 2, 3, 4))] == [1, 2, 3, 4]
    assert seen == ["point", "point"]
