"""Scenario 6: all ranks and workers of a node want the same object at once."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.items import until

MiB = 1 << 20
MANY = 32


def test_s06_32_processes_one_download(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    body = os.urandom(24 * MiB)
    url = server.put("/big.bin", body)
    start = barrier(MANY)

    def rank() -> tuple[str, int]:
        assert not {"RANK", "WORLD_SIZE"} & set(os.environ)
        with forebay.Cache(root, budget="1GiB") as cache:
            start.wait(60)
            data = cache.read(url)
            return hashlib.sha256(data).hexdigest(), len(data)

    found = {child.result() for child in [children(rank) for _ in range(MANY)]}
    assert found == {(hashlib.sha256(body).hexdigest(), len(body))}
    assert server.sent == len(body)  # each byte once
    assert server.gets == 3  # parts of 8 MiB
    with forebay.Cache(root) as cache:
        stats = cache.stats()
        assert (stats.misses, stats.fills, stats.hits) == (1, 1, MANY - 1)
        assert stats.bytes_remote == len(body)


@pytest.mark.parametrize("how", ["read", "open", "local", "pull"])
def test_s06_each_way_of_asking_is_one_download(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any], how: str
) -> None:
    body = os.urandom(MiB)
    url = server.put("/one.bin", body, latency=0.2)
    start = barrier(8)

    def rank() -> bytes:
        with forebay.Cache(root) as cache:
            start.wait(60)
            if how == "read":
                return bytes(cache.read(url))
            if how == "open":
                with cache.open(url) as file:
                    return file.read()
            if how == "pull":
                assert cache.pull(url) is not None
            with cache.local(url) as path:
                return Path(path).read_bytes()

    assert {child.result() for child in [children(rank) for _ in range(8)]} == {body}
    assert (server.gets, server.sent) == (1, len(body))


def test_s06_threads_of_one_process_too(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(MiB)
    url = server.put("/one.bin", body, latency=0.1)
    found: list[bytes] = []
    with forebay.Cache(root) as cache:
        threads = [threading.Thread(target=lambda: found.append(bytes(cache.read(url)))) for _ in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert found == [body] * 16
    assert server.gets == 1


def test_s06_another_takes_over_from_a_killed_downloader(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    body = os.urandom(12 * MiB)
    url = server.put("/big.bin", body, stall_after=3 * MiB, stalls=2)

    def rank() -> str:
        with forebay.Cache(root) as cache:
            return hashlib.sha256(cache.read(url)).hexdigest()

    downloader = children(rank)
    assert server.stalled.wait(60)
    waiters = [children(rank) for _ in range(4)]
    with forebay.Cache(root) as cache:
        assert cache.entries() == []
    downloader.kill()
    server.drop()
    server.objects["/big.bin"].stall_after = None
    server.go.set()
    began = time.monotonic()
    assert {waiter.result() for waiter in waiters} == {hashlib.sha256(body).hexdigest()}
    assert time.monotonic() - began < 30  # no time-out decided, the kernel did
    assert server.sent < 1.5 * len(body)  # what was left was resumed


def test_s06_what_rotted_between_the_kill_and_the_next_read_is_fetched_again(
    root: Path, server: ScriptedServer, children: Callable[..., Any]
) -> None:
    body = os.urandom(12 * MiB)
    url = server.put("/big.bin", body, stall_after=5 * MiB)

    def rank() -> bytes:
        with forebay.Cache(root) as cache:
            return bytes(cache.read(url))

    downloader = children(rank)
    assert server.stalled.wait(60)
    until(lambda: any((root / "tmp").glob("*.map")))
    left = min(path for path in (root / "tmp").iterdir() if not path.suffix)
    until(lambda: sum(left.with_suffix(".map").read_bytes()[512:524]) >= 5)  # chunks that are marked
    downloader.kill()
    server.drop()
    server.objects["/big.bin"].stall_after = None
    server.go.set()
    with left.open("r+b") as file:
        file.seek(2 * MiB + 4321)
        file.write(b"rotten")
    assert children(rank).result() == body
    assert server.sent < 1.5 * len(body)  # one chunk of what was left came again
    assert children(rank).result() == body


def test_s06_a_stopped_downloader_is_not_taken_for_dead(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    body = os.urandom(4 * MiB)
    url = server.put("/big.bin", body, stall_after=MiB, stalls=1)

    def rank() -> bytes:
        with forebay.Cache(root) as cache:
            return bytes(cache.read(url))

    downloader = children(rank)
    assert server.stalled.wait(60)
    downloader.stop()
    waiter = children(rank)
    with forebay.Cache(root) as cache, pytest.raises(forebay.errors.WaitTimeout) as caught:
        with cache.local(url, timeout=1):
            pass
    assert str(downloader.pid) in str(caught.value)
    server.go.set()
    downloader.signal(signal.SIGCONT)
    assert waiter.result() == downloader.result() == body
    assert server.sent == len(body)


def test_s06_a_function_runs_once_per_node(root: Path, tmp_path: Path, children: Callable[..., Any], barrier: Callable[..., Any]) -> None:
    start = barrier(MANY)

    def rank() -> bytes:
        def fn() -> bytes:
            (tmp_path / f"ran-{os.getpid()}").touch()
            time.sleep(0.2)
            return b"result" * 10_000

        with forebay.Cache(root) as cache:
            start.wait(60)
            return bytes(cache.get_or_put("step", fn))

    assert {child.result() for child in [children(rank) for _ in range(MANY)]} == {b"result" * 10_000}
    assert len(list(tmp_path.glob("ran-*"))) == 1


def test_s06_another_computes_when_the_first_is_killed(
    root: Path, tmp_path: Path, children: Callable[..., Any], flag: Callable[[], Any]
) -> None:
    inside, dead = flag(), flag()

    def rank() -> bytes:
        def fn() -> bytes:
            (tmp_path / f"ran-{os.getpid()}").touch()
            if not dead.is_set():
                inside.set()
                time.sleep(600)
            return b"result"

        with forebay.Cache(root) as cache:
            return bytes(cache.get_or_put("step", fn))

    first = children(rank)
    assert inside.wait(60)
    waiters = [children(rank) for _ in range(4)]
    dead.set()
    first.kill()
    assert {waiter.result() for waiter in waiters} == {b"result"}
    assert len(list(tmp_path.glob("ran-*"))) == 2


def test_s06_a_failure_reaches_all_who_waited_once(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    url = server.put("/bad.bin", b"x" * 1000, latency=1.0, statuses=[404] * 100)
    start = barrier(8)

    def rank() -> str:
        with forebay.Cache(root) as cache:
            start.wait(60)
            with pytest.raises(forebay.errors.NotFound) as caught:
                cache.read(url)
            return str(caught.value)

    said = {child.result() for child in [children(rank) for _ in range(8)]}
    assert len(said) == 1
    assert server.gets == 1


@pytest.mark.parametrize("fetch", ["file", "blocks"])
def test_s06_processes_that_read_through_fsspec(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any], fetch: str
) -> None:
    fsspec = pytest.importorskip("fsspec")
    for package in ("fsspec.implementations.chained", "aiohttp"):
        pytest.importorskip(package)
    body = os.urandom(4 * MiB)
    url = server.put("/cold.bin", body, latency=0.2)
    start = barrier(8)

    def rank() -> str:
        with forebay.Cache(root, budget="1GiB") as cache:
            start.wait(60)
            with fsspec.open(f"forebay::{url}", forebay={"cache": cache, "fetch": fetch, "block_size": "1MiB"}) as file:
                return hashlib.sha256(file.read()).hexdigest()

    found = [child.result() for child in [children(rank) for _ in range(8)]]
    assert found == [hashlib.sha256(body).hexdigest()] * 8
    assert server.sent == len(body)
