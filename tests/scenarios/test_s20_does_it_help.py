"""Scenario 20: the statistics of the node agree with the server's own count, exactly where nothing was killed or cut."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


def test_s20_after_eight_processes_the_sums_agree(
    root: Path, server: ScriptedServer, children: Callable[..., Any], command: Callable[..., Any]
) -> None:
    bodies = [random.Random(i).randbytes(200_000 + i) for i in range(30)]
    bodies[7] = random.Random(7).randbytes(9 * MiB)
    urls = [server.put(f"/{i}.bin", body, latency=0.005) for i, body in enumerate(bodies)]
    calls = 80

    def worker(seed: int) -> int:
        choose = random.Random(seed)
        given = 0
        with forebay.Cache(root, budget=16 << 20) as cache:
            for _ in range(calls):
                i = choose.randrange(30)
                how = choose.randrange(3)
                if how == 0:
                    given += len(cache.read(urls[i]))
                elif how == 1:
                    with cache.open(urls[i]) as file:
                        given += len(file.read())
                else:
                    given += len(cache.read(urls[i], max_age=0))
        return given

    given = sum(child.result() for child in [children(lambda s=s: worker(s)) for s in range(8)])
    done = command("stats", "--json", "--root", root)
    stats = json.loads(done.stdout)
    assert stats["bytes_remote"] == server.sent
    assert stats["requests"] == server.gets + server.heads
    assert stats["hits"] + stats["misses"] == 8 * calls
    assert stats["fallbacks"] == 0
    assert stats["fills"] == stats["misses"]
    assert stats["bytes_hit"] + stats["bytes_remote"] == given
    assert stats["bytes_stored"] == stats["bytes_remote"]
    assert stats["retries"] == 0
    assert stats["evictions"] == stats["fills"] - stats["entries"]
    assert stats["wait_ns_remote"] > 0
    assert stats["hit_rate"] == pytest.approx(stats["hits"] / (8 * calls))


def test_s20_what_kind_of_waiting(root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]) -> None:
    url = server.put("/x.bin", os.urandom(MiB), latency=0.3)
    start = barrier(4)

    def rank() -> None:
        with forebay.Cache(root, budget=8 << 20) as cache:
            start.wait(60)
            cache.read(url)

    for child in [children(rank) for _ in range(4)]:
        child.result()
    with forebay.Cache(root) as cache:
        stats = cache.stats()
        assert (stats.misses, stats.hits, stats.waits) == (1, 3, 3)
        assert stats.wait_ns_remote >= 0.3e9
        assert stats.wait_ns_lock >= 0.3e9  # of three processes


def test_s20_waiting_for_room(root: Path) -> None:
    with forebay.Cache(root, budget=4 << 20) as cache:
        space = cache.space("queue", policy="wait")
        for i in range(3):
            space.put(str(i), bytes(MiB))
        leases = [cache.hold(f"queue:{i}") for i in range(3)]
        assert space.put("more", bytes(2 * MiB), timeout=0.2) is False
        assert cache.stats().wait_ns_space >= 0.2e9
        del leases


@pytest.mark.parametrize("script", [{"statuses": [503, 503]}, {"statuses": [404]}, {"ranges": False}, {"chunked": True}], ids=str)
def test_s20_requests_and_bytes_of_an_unruly_server(root: Path, server: ScriptedServer, script: dict[str, Any]) -> None:
    url = server.put("/x.bin", os.urandom(300_000), **copy.deepcopy(script))
    with forebay.Cache(root, max_age=0, remote_options=forebay.RemoteOptions(backoff=0.01)) as cache:
        for _ in range(3):
            try:
                cache.read(url)
            except forebay.errors.NotFound:
                assert script == {"statuses": [404]}
        stats = cache.stats()
        assert stats.requests == server.gets + server.heads
        assert stats.bytes_remote == server.sent
        assert stats.retries == script.get("statuses", []).count(503)


def test_s20_past_the_cache_is_counted_too(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(4 * MiB)
    url = server.put("/x.bin", body)
    with forebay.Cache(root, budget=MiB) as cache:
        assert cache.read(url) == body
        with cache.open(url) as file:
            assert file.read() == body
        assert cache.read(url, bypass=True) == body
        stats = cache.stats()
        assert stats.fallbacks == 2
        assert 3 * len(body) <= stats.bytes_remote <= server.sent  # that there is no room is learnt while a body is on its way
        assert stats.requests == server.gets + server.heads
        assert stats.hits == 0


def test_s20_the_dead_are_counted_and_zero_is_zero(
    root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any], command: Callable[..., Any]
) -> None:
    url = server.put("/x.bin", b"data" * 1000)
    done = flag()

    def reader() -> None:
        with forebay.Cache(root) as cache:
            for _ in range(10):
                cache.read(url)
            done.set()
            flag().wait(600)

    child = children(reader)
    assert done.wait(60)
    child.kill()
    with forebay.Cache(root) as cache:
        assert (cache.stats().hits, cache.stats().misses) == (9, 1)
    assert command("stats", "--zero", "--root", root).returncode == 0
    with forebay.Cache(root) as cache:
        assert (cache.stats().hits, cache.stats().misses, cache.stats().bytes_remote) == (0, 0, 0)
        cache.read(url)
        assert cache.stats().hits == 1
