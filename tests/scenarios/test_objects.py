"""Prefetchers and look-aheads over objects of a remote, under the scenarios of prefetchers (25, 26, 30) and of Ctrl-C (11)."""

from __future__ import annotations

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
from tests import parts
from tests.harness import MiB
from tests.items import drop_lazies, until

Start = Callable[..., Any]
SIZE = 20_000


def body(number: int) -> bytes:
    return ((b"%d " % number) * SIZE)[:SIZE]


def put(server: ScriptedServer, count: int, **how: Any) -> str:
    for number in range(count):
        server.put(f"/d/{number}", body(number), **how)
    return f"{server.url}/d"


@pytest.mark.rotates
@pytest.mark.parametrize("seconds", [4, pytest.param(parts.share(60), marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("policy", ["wait", "lru"])
def test_s30_lazies_of_objects_dropped_at_random_moments(
    seconds: int, policy: str, root: Path, server: ScriptedServer, collecting: None
) -> None:
    """By many threads, while others get and evict: no deadlock, and what nobody holds is leased by nobody."""
    prefix = put(server, 200)
    with forebay.Cache(root, budget=MiB, min_free=0) as cache, cache.prefetcher(prefix, workers=4, policy=policy) as pool:
        assert min(drop_lazies(pool, 200, str, lambda key: body(int(key)), seconds)) >= 20
        until(lambda: cache.entries("prefetch") == [], "the end of what was spilled")
        until(lambda: cache.stats().bytes_reserved == 0, "the end of all reservations")
        until(lambda: not any(entry.leased for entry in cache.entries()), "no lease")
        assert cache.check(deep=True) == []


def test_s25_a_get_does_not_queue_behind_a_thousand_objects(root: Path, server: ScriptedServer) -> None:
    prefix = put(server, 100, stall_after=10)
    server.put("/d/now", b"now")
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.prefetcher(prefix, workers=4) as pool:
        queue = [pool.get_lazy(str(number)) for number in range(100)]
        assert server.stalled.wait(60)
        assert pool.get_lazy("now").get() == b"now"
        assert not any(lazy.done for lazy in queue)
        server.go.set()
        assert [lazy.get() for lazy in queue] == [body(number) for number in range(100)]


@pytest.mark.parametrize("how", ["stream", "lookahead"])
def test_s11_ctrl_c_ends_a_wait_for_an_object(root: Path, server: ScriptedServer, children: Start, how: str) -> None:
    prefix = put(server, 20, stall_after=10)

    def loop() -> float:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
            items: Any = (
                cache.prefetcher(prefix).stream(map(str, range(20)))
                if how == "stream"
                else cache.lookahead([f"{prefix}/{number}" for number in range(20)])
            )
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                next(items)
            ended = time.monotonic() - began
            os.write(told, b"%d" % (1000 * ended))
            os._exit(0)

    read, told = os.pipe()
    child = children(loop)
    assert server.stalled.wait(60)
    assert 400 < int(os.read(read, 20)) < 5000
    child.wait()
    server.go.set()
    os.close(read)
    os.close(told)


def test_s26_an_epoch_with_a_remote_that_fails_now_and_then(root: Path, server: ScriptedServer) -> None:
    prefix = put(server, 60)
    for number in range(0, 60, 7):
        server.objects[f"/d/{number}"].statuses = [503]
    for number in range(3, 60, 7):
        server.objects[f"/d/{number}"].cut_after = 5_000
        server.objects[f"/d/{number}"].cuts = 1
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        with cache.lookahead([f"{prefix}/{number}" for number in range(60)]) as ahead:
            assert [bytes(view) for view in ahead] == [body(number) for number in range(60)]
        assert cache.stats().retries > 0
        assert cache.check(deep=True) == []


def test_s26_a_catalog_that_is_lost_on_the_way(root: Path, server: ScriptedServer) -> None:
    """Another program removes it in the middle of an epoch: every item still comes."""
    prefix = put(server, 60)
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.prefetcher(prefix, workers=4) as pool:
        stream = pool.stream(map(str, range(60)), ahead=16)
        assert [next(stream) for _ in range(20)] == [body(number) for number in range(20)]
        for name in ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm"):
            (root / name).unlink(missing_ok=True)
        assert list(stream) == [body(number) for number in range(20, 60)]
        assert [lazy.get() for lazy in [pool.get_lazy(str(number)) for number in range(60)]] == [body(number) for number in range(60)]
        pool.close()
        cache.repair()  # a file that was published in the catalog that went
