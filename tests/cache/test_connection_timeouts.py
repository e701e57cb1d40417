"""``timeout=`` of a call that waits for a connection which other transfers of the node have."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import pytest

import forebay
from forebay import errors
from forebay.cli.hints import hint_for
from forebay.testing import ScriptedServer
from tests.processes import HANG, Child, fork

SOON = 0.1


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 << 20, max_connections=1) as cache:
        yield cache


@contextlib.contextmanager
def connection_elsewhere(cache: forebay.Cache, server: ScriptedServer) -> Iterator[Child]:
    """Another process has the only connection, until the server goes on."""
    url = server.put("/stalls", b"x" * 100, stall_after=1, stalls=1)

    def work() -> None:
        with forebay.Cache(cache.path, remote_options=forebay.RemoteOptions(read_timeout=5 * HANG)) as own:
            own.read(url)

    with fork(work) as other:
        assert server.stalled.wait(HANG)
        yield other


def asked(server: ScriptedServer) -> set[str]:
    return {request.path for request in server.requests}


async def awaited(cache: forebay.Cache, url: str) -> memoryview:
    return await cache.aread(url, timeout=SOON)


async def opened(cache: forebay.Cache, url: str) -> BinaryIO:
    return await cache.aopen(url, timeout=SOON)


CALLS: dict[str, Callable[[forebay.Cache, str], object]] = {
    "read": lambda cache, url: cache.read(url, timeout=SOON),
    "past the cache": lambda cache, url: cache.read(url, timeout=SOON, bypass=True),
    "open": lambda cache, url: cache.open(url, timeout=SOON),
    "local": lambda cache, url: cache.local(url, timeout=SOON),
    "pull": lambda cache, url: cache.pull(url, timeout=SOON),
    "read_many": lambda cache, url: cache.read_many([url, f"{url}2"], timeout=SOON),
    "local_many": lambda cache, url: cache.local_many([url], timeout=SOON),
    "aread": lambda cache, url: asyncio.run(awaited(cache, url)),
    "aopen": lambda cache, url: asyncio.run(opened(cache, url)),
    "directory": lambda cache, url: cache.directory(f"{url}/", timeout=SOON),
    "copy_directory": lambda cache, url: cache.copy_directory(f"{url}/", cache.path / "copy", timeout=SOON),
}


@pytest.mark.rotates
@pytest.mark.parametrize("name", list(CALLS))
def test_a_call_names_the_process_that_has_the_connection(name: str, cache: forebay.Cache, server: ScriptedServer) -> None:
    call, url = CALLS[name], server.put("/a", b"a")
    with connection_elsewhere(cache, server) as other:
        with pytest.raises(errors.ConnectionsBusy) as caught:
            call(cache, url)
        assert asked(server) == {"/stalls"}
        error = caught.value
        assert isinstance(error, errors.WaitTimeout)
        assert isinstance(error, errors.RemoteTimeout)
        assert f"process {other.pid} " in error.holder
        assert error.waited >= SOON
        assert error.attempts == 0
        for part in (f"1 connections to {server.url}", "max_connections", error.holder, "timeout="):
            assert part in str(error)
        assert "FOREBAY_MAX_CONNECTIONS" in hint_for(error).todo
        assert cache.stats().fallbacks == 0
        server.go.set()
        other.result()
        assert cache.read(url) == b"a"


def test_a_file_that_is_read_range_by_range(tmp_path: Path, server: ScriptedServer) -> None:
    with forebay.Cache(tmp_path / "root", budget=100_000, min_free=0, max_connections=1, timeout=SOON) as cache:
        url = server.put("/large", bytes(2_000_000))
        with connection_elsewhere(cache, server), pytest.raises(errors.ConnectionsBusy):
            cache.open(url)


def test_all_requests_of_a_call_wait_together(cache: forebay.Cache, server: ScriptedServer) -> None:
    """One after the other they would wait for two minutes."""
    urls = [server.put(f"/{number}", b"%d" % number) for number in range(120)]
    with connection_elsewhere(cache, server):
        began = time.monotonic()
        report = cache.warm(urls, jobs=1, timeout=1)
        assert time.monotonic() - began < 60
        assert {type(error) for _, error in report.failed} == {errors.ConnectionsBusy}
        assert len(report.failed) == len(urls)
        assert asked(server) == {"/stalls"}


@pytest.mark.rotates
def test_a_call_that_has_a_connection_does_not_wait(cache: forebay.Cache, server: ScriptedServer) -> None:
    """Its requests wait for each other, for as long as that takes."""
    urls = [server.put(f"/{number}", b"%d" % number * 100, stall_after=1, stalls=1) for number in range(3)]
    results: list[list[memoryview]] = []
    reader = threading.Thread(target=lambda: results.append(cache.read_many(urls, timeout=SOON)))
    reader.start()
    assert server.stalled.wait(60)
    reader.join(5 * SOON)
    server.go.set()
    reader.join()
    assert results == [[b"0" * 100, b"1" * 100, b"2" * 100]]


def test_a_copy_that_cannot_be_validated_in_time_is_served(cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"a")
    cache.read(url)
    with connection_elsewhere(cache, server):
        assert cache.read(url, max_age=0, timeout=SOON) == b"a"
        assert cache.read_many([url], max_age=0, timeout=SOON) == [b"a"]
    assert len(server.requests) == 2


def is_fetched(cache: forebay.Cache, url: str) -> bool:
    """Whether another thread has its turn to fetch it."""
    try:
        cache.local(url, timeout=0)
    except errors.WaitTimeout as error:
        return not isinstance(error, errors.ConnectionsBusy)
    raise AssertionError("it was fetched")


@pytest.mark.rotates
def test_the_time_limit_of_one_call_is_no_failure_of_those_that_wait_for_the_object(cache: forebay.Cache, server: ScriptedServer) -> None:
    url, results = server.put("/a", b"a"), list[bytes]()
    with connection_elsewhere(cache, server):
        begun = threading.Event()

        def impatient() -> None:
            begun.set()
            with contextlib.suppress(errors.ConnectionsBusy):
                cache.read(url, timeout=1)

        first = threading.Thread(target=impatient)
        first.start()
        second = threading.Thread(target=lambda: results.append(bytes(cache.read(url))))
        while not is_fetched(cache, url):
            os.sched_yield()
        second.start()
        first.join()
        server.go.set()
        second.join()
    assert results == [b"a"]


def test_the_total_timeout_holds_as_well(tmp_path: Path, server: ScriptedServer) -> None:
    options = forebay.RemoteOptions(total_timeout=SOON)
    with forebay.Cache(tmp_path / "root", max_connections=1, remote_options=options) as cache, connection_elsewhere(cache, server):
        with pytest.raises(errors.RemoteTimeout):
            cache.read(server.put("/a", b"a"))
