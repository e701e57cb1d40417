"""A handler that uses the cache while the call that it interrupted does: it is answered at once, from the cache or without it."""

from __future__ import annotations

import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine.catalog.writer_lock import WriterLock
from forebay._kernel import interrupts
from forebay.testing import ScriptedServer, Served
from tests.harness import MiB, writer_lock

NUMBER = signal.SIGUSR1
AT_ONCE = 2.0
LARGE = 3 * MiB


class Handler:
    """The program's handler: puts and reads."""

    def __init__(self, cache: forebay.Cache, url: str) -> None:
        self._cache, self._url, self._is_busy = cache, url, False
        self.answers, self.slow = list[tuple[bool, int, int]](), list[float]()

    def __call__(self, *_: object) -> None:
        if self._is_busy:
            return
        self._is_busy, began = True, time.monotonic()
        try:
            n = len(self.answers)
            many = self._cache.read_many([f"{self._url}/handler-{n}-{i}" for i in range(2)])
            read = len(self._cache.read(f"{self._url}/handler-{n}"))
            self.answers.append((self._cache.put("state", b"z" * 40_000), read, sum(map(len, many))))
        finally:
            self._is_busy = False
            if (seconds := time.monotonic() - began) > AT_ONCE:
                self.slow.append(seconds)

    @property
    def is_busy(self) -> bool:
        return self._is_busy


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        for n in range(40):
            server.objects[f"/{n}"] = Served(b"q" * 50_000, etag=f'"{n}"')
        server.objects["/large"] = Served(b"q" * LARGE, etag='"large"')
        for n in range(400):
            for name in (f"/handler-{n}", f"/handler-{n}-0", f"/handler-{n}-1"):
                server.objects[name] = Served(b"q" * 10_000, etag=f'"{n}"')
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=24 * MiB, min_free=0) as cache:
        yield cache


class Source(dict[str, bytes]):
    uri, version = "test://source", "1"


def put(cache: forebay.Cache, url: str) -> None:
    assert all(cache.put(f"p{n}", b"x" * MiB) for n in range(30))  # evicts


def read(cache: forebay.Cache, url: str) -> None:
    assert len(cache.read(f"{url}/0")) == 50_000
    assert len(cache.read(f"{url}/large")) == LARGE


def read_many(cache: forebay.Cache, url: str) -> None:
    assert [len(each) for each in cache.read_many([f"{url}/{n}" for n in range(20)])] == [50_000] * 20


def local(cache: forebay.Cache, url: str) -> None:
    with cache.local(f"{url}/0") as path, cache.local_many([f"{url}/{n}" for n in range(5)]) as paths:
        assert Path(path).stat().st_size == Path(paths[4]).stat().st_size == 50_000


def opened(cache: forebay.Cache, url: str) -> None:
    with cache.open(f"{url}/large", block_size="64KB") as file:
        assert len(file.read(300_000)) == 300_000


def lookahead(cache: forebay.Cache, url: str) -> None:
    assert [len(each) for each in cache.lookahead([f"{url}/{n}" for n in range(20)])] == [50_000] * 20


def prefetcher(cache: forebay.Cache, url: str) -> None:
    with cache.prefetcher(Source({str(n): b"x" * 1000 for n in range(10)}), name="pool", budget=2 * MiB) as pool:
        assert [bytes(pool.get_lazy(str(n)).get()) for n in range(10)] == [b"x" * 1000] * 10


def samples(cache: forebay.Cache, url: str) -> None:
    array = cache.samples("array", 20)
    assert [len(array.get_or_put(n, lambda: b"x" * 1000)) for n in range(20)] == [1000] * 20


@pytest.mark.timeout(100)
@pytest.mark.parametrize("call", [put, read, read_many, local, opened, lookahead, prefetcher, samples])
def test_a_handler_that_uses_the_cache_at_any_point_of_a_call_is_answered_at_once(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, call: Callable[[forebay.Cache, str], None]
) -> None:  # fmt: skip
    handler, point, seen = Handler(cache, server.url), interrupts.point, set[tuple[int, ...]]()

    def point_with_a_signal() -> None:
        if interrupts._inside and not interrupts._shields and not handler.is_busy and interrupts.get_ident() == interrupts._main:
            place = tuple(frame.lineno or 0 for frame in traceback.extract_stack(limit=6))
            if place not in seen:
                seen.add(place)
                signal.raise_signal(NUMBER)
        point()

    before = signal.signal(NUMBER, handler)
    try:
        with monkeypatch.context() as patch:
            for module in [module for name, module in sys.modules.items() if name.startswith("forebay.")]:
                if getattr(module, "point", None) is point:
                    patch.setattr(module, "point", point_with_a_signal)
            call(cache, server.url)
    finally:
        signal.signal(NUMBER, before)
    assert handler.answers
    assert {(read, many) for _, read, many in handler.answers} == {(10_000, 20_000)}
    assert not handler.slow


@pytest.mark.timeout(100)
def test_a_put_in_a_handler_while_its_thread_waits_to_write_stores_nothing_and_says_so(
    cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:  # fmt: skip
    answers, wait = list[tuple[bool, float]](), WriterLock._wait

    def handler(*_: Any) -> None:
        began = time.monotonic()
        answers.append((cache.put("state", b"z" * 40_000), time.monotonic() - began))

    def interrupted_wait(self: WriterLock, timeout: float) -> None:
        signal.raise_signal(NUMBER)
        wait(self, timeout)

    cache.put("first", b"x" * 30_000)
    monkeypatch.setattr("forebay._engine.catalog.writer_lock.LONGEST_WAIT", 5.0)
    before = signal.signal(NUMBER, handler)
    try:
        with writer_lock(cache.path), monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(WriterLock, "_wait", interrupted_wait)
            cache.put("second", b"x" * 30_000)
    finally:
        signal.signal(NUMBER, before)
    assert [stored for stored, _ in answers] == [False]
    assert answers[0][1] < AT_ONCE
    assert "a signal handler" in caplog.text
