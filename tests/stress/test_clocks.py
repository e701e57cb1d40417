"""A minute of a clock that jumps, forth and back, under processes that read, refresh, write and evict."""

from __future__ import annotations

import mmap
import random
import time
from pathlib import Path

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.clocks import Clocks
from tests.harness import MiB, assert_settled
from tests.processes import fork, in_child

SECONDS = 60.0
PROCESSES = 4
MAX_AGE = 0.5
SLACK = 3.0
"""Seconds: a hit trusts its process's last look at the clock for one; the rest is for a machine that does other things."""
SECOND = 1_000_000_000
STEPS = (-86_400, -3600, -2, 2, 3600, 86_400)


def body(version: int) -> bytes:
    return version.to_bytes(8, "little") * 4000


@pytest.mark.stress
@pytest.mark.timeout(600)
def test_a_clock_that_jumps(quick_path: Path, server: ScriptedServer) -> None:
    """No call fails, no duration is wrong, the clock of the root never goes back, nobody is served what is older than he allows, and
    who refreshes gets what the remote has now."""
    place, chance = quick_path / "root", random.Random(1)
    shared = memoryview(mmap.mmap(-1, MiB)).cast("q")
    shared[0], shared[1] = 0, 0  # the version that is served, and whether it is over; then when each version came
    url = server.put("/x", body(0))

    def work(number: int) -> tuple[int, int]:
        mine, calls, last = random.Random(number), 0, 0
        with forebay.Cache(place, max_age=MAX_AGE) as cache:
            while not shared[1]:
                before, began = shared[0], time.monotonic_ns()
                refresh = mine.random() < 0.2
                version = int.from_bytes(cache.read(url, refresh=refresh)[:8], "little")
                replaced = shared[2 + version + 1]
                assert version >= before or not refresh, (version, before)
                assert not replaced or replaced > began - int((MAX_AGE + SLACK) * SECOND), (version, before)
                key = f"k{mine.randrange(60)}"
                if cache.get(key) is None:
                    assert cache.put(key, bytes(100_000))
                now = cache._store.now()
                assert now >= last
                last, calls = now, calls + 1
            stats = cache.stats()
            assert 0 <= stats.wait_ns_remote < 3600 * SECOND
            assert stats.fallbacks == stats.store_failures == 0
            return calls, stats.evictions

    with Clocks(together=True) as clocks:
        with forebay.Cache(place, budget=4 * MiB, min_free=0):
            children = [fork(lambda n=n: work(n)) for n in range(PROCESSES)]
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if chance.random() < 0.5:
                clocks.step(chance.choice(STEPS) * SECOND)
            version = shared[0] + 1
            server.put("/x", body(version))
            shared[2 + version], shared[0] = time.monotonic_ns(), version
            time.sleep(chance.uniform(0, 0.3))
        shared[1] = 1
        done = [child.result() for child in children]
        assert all(calls > 20 for calls, _ in done)
        assert done[0][1] > 0, "nothing was evicted"

        def look() -> None:
            with forebay.Cache(place) as cache:
                assert cache.check(deep=True) == []

        in_child(look)
    assert_settled(place, 4 * MiB)
