"""Scenario 2: eviction takes nothing away from a process that reads, or is about to. (Lazies of a prefetcher come later; a lease that
has not been opened yet is what they are made of.)"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


def fill(root: Path, count: int) -> None:
    """Write so many MiB, of a budget of 16."""
    with forebay.Cache(root) as cache:
        for i in range(count):
            cache.put(f"flood-{os.getpid()}-{i}", os.urandom(MiB))


def test_s02_who_holds_and_who_only_intends_to_read_both_read(
    root: Path, server: ScriptedServer, children: Callable[..., Any], flag: Callable[[], Any]
) -> None:
    body = os.urandom(3 * MiB)
    url = server.put("/x.bin", body)
    a_holds, b_intends, flooded, b_done = flag(), flag(), flag(), flag()

    def a() -> None:
        with forebay.Cache(root, budget=16 << 20) as cache, cache.open(url) as file:
            first = file.read(100)
            a_holds.set()
            flooded.wait(60)
            assert first + file.read() == body
            b_done.wait(60)
            a_holds.clear()
            flag_forever.wait(600)  # killed with the file open

    def b() -> None:
        with forebay.Cache(root) as cache:
            path = cache.local(url)
            b_intends.set()
            flooded.wait(60)
            assert Path(path).read_bytes() == body  # opened only now
            path.close()
        b_done.set()

    flag_forever = flag()
    holder = children(a)
    assert a_holds.wait(60)
    intender = children(b)
    assert b_intends.wait(60)
    children(lambda: fill(root, 48)).result()
    flooded.set()
    intender.result()
    while a_holds.is_set():
        pass
    children(lambda: fill(root, 48)).result()
    with forebay.Cache(root) as cache:
        entry = cache.entry(url)
        assert entry is not None
        assert entry.leased
        report = cache.evict(url)
        assert (report.removed, report.spared) == ((), (url,))
        holder.kill()
        children(lambda: fill(root, 48)).result()
        assert cache.entry(url) is None  # evictable at once, without a restart of anything
        assert server.gets == 1
        assert cache.stats().fallbacks == 0


def test_s02_a_buffer_outlives_its_entry(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    body = os.urandom(3 * MiB)
    url = server.put("/x.bin", body)
    with forebay.Cache(root, budget=16 << 20) as cache:
        buffer = cache.read(url)
        value = cache.get_or_put("small", lambda: b"v" * 1000)
        children(lambda: fill(root, 48)).result()
        assert cache.entry(url) is None
        assert buffer == body
        assert value == b"v" * 1000
        assert cache.read(url) == body
        assert server.gets == 2


def test_s02_eight_readers_under_a_budget_of_half_of_what_they_read(
    root: Path, server: ScriptedServer, children: Callable[..., Any]
) -> None:
    import random

    bodies = [os.urandom(MiB + i) for i in range(24)]
    urls = [server.put(f"/{i}.bin", body) for i, body in enumerate(bodies)]

    def worker(seed: int) -> int:
        choose = random.Random(seed)
        with forebay.Cache(root, budget=14 << 20) as cache:
            for _ in range(60):
                i = choose.randrange(24)
                kind = choose.randrange(3)
                if kind == 0:
                    assert cache.read(urls[i]) == bodies[i]
                elif kind == 1:
                    with cache.open(urls[i]) as file:
                        assert file.read() == bodies[i]
                else:
                    with cache.local(urls[i]) as path:
                        assert Path(path).read_bytes() == bodies[i]
            return cache.stats().bytes_used

    assert all(child.result() <= 14 * MiB for child in [children(lambda i=i: worker(i)) for i in range(8)])
