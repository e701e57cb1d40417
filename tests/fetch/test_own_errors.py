"""An error that comes of what one caller asked for is its own: those that wait for the object go on, and one of them fetches it."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import RemoteOptions, errors
from forebay.sources import DecodedSource, UrlSource
from forebay.testing import Request, ScriptedServer
from tests.processes import Line, talk_to

SIZE = 100_000
BODY = os.urandom(3 * SIZE)
Door = Callable[..., bytes]


def read_many(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    return bytes(cache.read_many([url], **options)[0])


def local(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with cache.local(url, **options) as path:
        return Path(path).read_bytes()


def stream(cache: forebay.Cache, url: str) -> bytes:
    folder, _, name = url.rpartition("/")
    with cache.prefetcher(folder + "/") as pool:
        return bytes(next(iter(pool.stream([name]))))


def by_blocks(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    with cache.open(url, block_size=SIZE, **options) as file:
        return file.read()


def pull(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    cache.pull(url, **options)
    return bytes(cache.read(url))


def read(cache: forebay.Cache, url: str, **options: Any) -> bytes:
    return bytes(cache.read(url, **options))


def by_function(cache: forebay.Cache, url: str) -> bytes:
    return bytes(cache.get_or_put("k", lambda: cache.read(url)))


def by_coroutine(cache: forebay.Cache, url: str) -> bytes:
    return bytes(asyncio.run(awaited(cache, url)))


async def awaited(cache: forebay.Cache, url: str) -> memoryview:
    return await cache.aget_or_put("k", lambda: cache.aread(url))


def by_sample(cache: forebay.Cache, url: str) -> bytes:
    return bytes(cache.samples("array", length=4).get_or_put(1, lambda: cache.read(url)))


def by_samples(cache: forebay.Cache, url: str) -> bytes:
    return bytes(cache.samples("array", length=4).get_or_put_many([1], lambda slots: [cache.read(url) for _ in slots])[0])


def by_task(cache: forebay.Cache, url: str) -> bytes:
    @cache.tasks("flow").cached(version="1", ignore=["cache"])
    def fetched(url: str, cache: forebay.Cache) -> bytes:
        return bytes(cache.read(url))

    return fetched(url, cache=cache)


def by_task_of_coroutine(cache: forebay.Cache, url: str) -> bytes:
    @cache.tasks("flow").cached(version="1", ignore=["cache"])
    async def fetched(url: str, cache: forebay.Cache) -> bytes:
        return bytes(await cache.aread(url))

    return asyncio.run(fetched(url, cache=cache))


def decode(key: str, data: bytes) -> bytes:
    return bytes(data)


def by_source(cache: forebay.Cache, url: str, *, options: RemoteOptions | None = None, store: str = "decoded") -> bytes:
    """``options``: those of the source."""
    folder, _, name = url.rpartition("/")
    source: Any = UrlSource(folder, options=options)
    if store == "decoded":
        source = DecodedSource(source, decode, "1")
    with cache.prefetcher(source, name="items", store=store) as pool:
        return bytes(next(iter(pool.stream([name]))))


FUNCTIONS: dict[str, Door] = {
    "get_or_put": by_function,
    "aget_or_put": by_coroutine,
    "sample": by_sample,
    "task": by_task,
    "task of a coroutine": by_task_of_coroutine,
    "source": by_source,
}


def stop(*_: object) -> None:
    raise RuntimeError("the progress bar is broken")


def stop_by_an_error_of_ours(*_: object) -> None:
    raise errors.NotFound("another object does not exist", url="other")


SHORT = RemoteOptions(read_timeout=1, attempts=1)
IN_ALL = RemoteOptions(total_timeout=1)
DENIED, ADMITTED = RemoteOptions(headers={"User-Agent": "bad"}), RemoteOptions(headers={"User-Agent": "good"})
FIRST: dict[str, tuple[Door, dict[str, Any], RemoteOptions | None, type[Exception]]] = {
    "sha256": (read, {"sha256": "0" * 64}, None, errors.ChecksumMismatch),
    "sha256 of many": (read_many, {"sha256": "0" * 64}, None, errors.ChecksumMismatch),
    "sha256 of a file": (local, {"sha256": "0" * 64}, None, errors.ChecksumMismatch),
    "etag": (read, {"etag": '"other"'}, None, errors.ChecksumMismatch),
    "etag of many": (read_many, {"etag": '"other"'}, None, errors.ChecksumMismatch),
    "read_timeout": (read, {}, SHORT, errors.RemoteTimeout),
    "read_timeout of many": (read_many, {}, SHORT, errors.RemoteTimeout),
    "total_timeout": (read, {}, IN_ALL, errors.RemoteTimeout),
    "credentials": (read, {}, DENIED, errors.AccessDenied),
    "on_progress": (pull, {"on_progress": stop}, None, RuntimeError),
    "on_progress, NotFound": (pull, {"on_progress": stop_by_an_error_of_ours}, None, errors.NotFound),
}
OF_BLOCKS = {
    "etag": (by_blocks, {"etag": '"other"'}, None, errors.ChecksumMismatch),
    "read_timeout": (by_blocks, {}, SHORT, errors.RemoteTimeout),
    "credentials": (by_blocks, {}, DENIED, errors.AccessDenied),
}
SECOND: dict[str, Door] = {"read": read, "read_many": read_many, "local": local, "stream": stream}


class Beside:
    """A server that keeps the first request until it may go on."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server, self.asked, self.go = server, threading.Event(), threading.Event()
        server.on_request = self._keep_first

    def _keep_first(self, _: Request) -> None:
        if not self.asked.is_set():
            self.asked.set()
            self.go.wait(60)

    def run(
        self, root: Path, first: Callable[[forebay.Cache], object], second: Callable[[forebay.Cache], object], *,
        options: RemoteOptions | None, error: type[Exception],
    ) -> Any:  # fmt: skip
        """What ``second`` gives, which waits for ``first``, in another process, until that has raised ``error``."""

        def fails(line: Line) -> None:
            with forebay.Cache(root, remote_options=options) as cache, pytest.raises(error):
                first(cache)

        def waits(line: Line) -> object:
            with forebay.Cache(root, remote_options=ADMITTED if options is DENIED else None) as cache:
                line.say("open")
                return second(cache)

        with forebay.Cache(root, budget="64MiB", min_free=0) as cache, talk_to(fails) as one:
            assert self.asked.wait(60)
            with talk_to(waits) as other:
                assert other.hear() == "open"
                while cache.stats().waits == 0 and not one._has_ended():  # a slow machine may have missed the moment
                    time.sleep(0.001)
                if error is not errors.RemoteTimeout:
                    self.go.set()
                one.result()
                self.go.set()
                return other.result()


@pytest.fixture
def beside(server: ScriptedServer) -> Iterator[Beside]:
    beside = Beside(server)
    yield beside
    beside.go.set()


@pytest.mark.parametrize("second", SECOND)
@pytest.mark.parametrize("first", FIRST)
def test_the_others_go_on(tmp_path: Path, server: ScriptedServer, beside: Beside, first: str, second: str) -> None:
    door, given, options, error = FIRST[first]
    url = server.put("/a.bin", BODY, require={"User-Agent": "good"} if options is DENIED else {})
    got = beside.run(
        tmp_path / "root", lambda cache: door(cache, url, **given), lambda cache: SECOND[second](cache, url), options=options, error=error
    )  # fmt: skip
    assert got == BODY


@pytest.mark.parametrize("first", OF_BLOCKS)
def test_the_others_go_on_with_blocks(tmp_path: Path, server: ScriptedServer, beside: Beside, first: str) -> None:
    door, given, options, error = OF_BLOCKS[first]
    url = server.put("/a.bin", BODY, require={"User-Agent": "good"} if options is DENIED else {})
    got = beside.run(
        tmp_path / "root", lambda cache: door(cache, url, **given), lambda cache: by_blocks(cache, url), options=options, error=error
    )  # fmt: skip
    assert got == BODY


@pytest.mark.parametrize("second", SECOND)
def test_what_the_source_did_concerns_all_that_ask_alike(tmp_path: Path, server: ScriptedServer, beside: Beside, second: str) -> None:
    url = server.put("/a.bin", BODY, statuses=[404])  # the next request would succeed

    def waits(cache: forebay.Cache) -> str:
        with pytest.raises(errors.NotFound) as caught:
            SECOND[second](cache, url)
        return str(caught.value)

    assert url in beside.run(tmp_path / "root", lambda cache: cache.read(url), waits, options=None, error=errors.NotFound)
    assert server.gets == 1


def test_what_the_source_answered_to_other_headers_does_not(tmp_path: Path, server: ScriptedServer, beside: Beside) -> None:
    url = server.put("/a.bin", BODY, statuses=[404])
    got = beside.run(
        tmp_path / "root", read_url(url), read_url(url), options=RemoteOptions(headers={"User-Agent": "b"}), error=errors.NotFound
    )  # fmt: skip
    assert got == BODY


def read_url(url: str) -> Callable[[forebay.Cache], bytes]:
    return lambda cache: read(cache, url)


@pytest.mark.parametrize("door", FUNCTIONS)
@pytest.mark.parametrize("options", [SHORT, IN_ALL], ids=["read_timeout", "total_timeout"])
def test_the_others_run_the_function_if_its_time_limits_were_others(
    tmp_path: Path, server: ScriptedServer, beside: Beside, door: str, options: RemoteOptions
) -> None:
    url, call = server.put("/a.bin", BODY), FUNCTIONS[door]
    got = beside.run(
        tmp_path / "root", lambda cache: call(cache, url), lambda cache: call(cache, url), options=options, error=errors.RemoteTimeout
    )  # fmt: skip
    assert got == BODY


def test_those_that_want_several_samples_run_the_function(tmp_path: Path, server: ScriptedServer, beside: Beside) -> None:
    url = server.put("/a.bin", BODY)
    got = beside.run(
        tmp_path / "root", lambda cache: by_sample(cache, url), lambda cache: by_samples(cache, url), options=SHORT,
        error=errors.RemoteTimeout,
    )  # fmt: skip
    assert got == BODY


@pytest.mark.parametrize("door", FUNCTIONS)
def test_what_the_source_did_to_a_function_concerns_all_that_ask_alike(
    tmp_path: Path, server: ScriptedServer, beside: Beside, door: str
) -> None:
    url, call = server.put("/a.bin", BODY, statuses=[404]), FUNCTIONS[door]  # the next request would succeed

    def waits(cache: forebay.Cache) -> str:
        with pytest.raises(errors.NotFound) as caught:
            call(cache, url)
        return str(caught.value)

    assert url in beside.run(tmp_path / "root", lambda cache: call(cache, url), waits, options=None, error=errors.NotFound)
    assert server.gets == 1


@pytest.mark.parametrize("store", ["decoded", "raw"])
def test_the_options_of_a_source_tell_who_asks_alike(tmp_path: Path, server: ScriptedServer, beside: Beside, store: str) -> None:
    url = server.put("/a.bin", BODY)

    def first(cache: forebay.Cache) -> object:
        return by_source(cache, url, options=SHORT, store=store)

    def waits(cache: forebay.Cache) -> str:
        with pytest.raises(errors.RemoteTimeout) as caught:
            first(cache)
        return str(caught.value)

    assert "after 1 attempt" in beside.run(tmp_path / "alike", first, waits, options=None, error=errors.RemoteTimeout)
    assert server.gets == 1
    beside.asked.clear()
    beside.go.clear()
    got = beside.run(
        tmp_path / "root", first, lambda cache: by_source(cache, url, store=store), options=None, error=errors.RemoteTimeout
    )  # fmt: skip
    assert got == BODY


def test_a_thread_runs_the_function_if_its_time_limits_are_others(tmp_path: Path, server: ScriptedServer, beside: Beside) -> None:
    url = server.put("/a.bin", BODY)
    with (
        forebay.Cache(tmp_path / "root", remote_options=SHORT) as first,
        forebay.Cache(tmp_path / "root") as second,
        ThreadPoolExecutor(2) as pool,
    ):
        fails = pool.submit(by_function, first, url)
        assert beside.asked.wait(60)
        waits = pool.submit(by_function, second, url)
        assert isinstance(fails.exception(60), errors.RemoteTimeout)
        beside.go.set()
        assert waits.result(60) == BODY


def test_a_coroutine_runs_the_function_if_its_time_limits_are_others(tmp_path: Path, server: ScriptedServer, beside: Beside) -> None:
    url = server.put("/a.bin", BODY)

    async def both(first: forebay.Cache, second: forebay.Cache) -> memoryview:
        fails = asyncio.ensure_future(awaited(first, url))
        assert await asyncio.to_thread(beside.asked.wait, 60)
        waits = asyncio.ensure_future(awaited(second, url))
        with pytest.raises(errors.RemoteTimeout):
            await fails
        beside.go.set()
        return await waits

    with forebay.Cache(tmp_path / "root", remote_options=SHORT) as first, forebay.Cache(tmp_path / "root") as second:
        assert asyncio.run(both(first, second)) == BODY
