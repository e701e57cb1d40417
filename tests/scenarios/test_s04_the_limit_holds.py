"""Scenario 4: the size limit is enforced at every moment, for all processes together, with nobody calling for it."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import parts

MiB = 1 << 20
BUDGET = 24 * MiB
OF_EIGHT = 36 * MiB  # each may hold 4 MiB, and a little, at the same moment
HELD = ("blobs", "trees", "packs", "tmp")
OWN = 48 * MiB  # the catalog's first 8 MiB, its journal, the ballast, the slots, the counters


def work(root: Path, urls: list[str], seed: int, until: float) -> int:
    choose = random.Random(seed)
    calls = 0
    with forebay.Cache(root, budget=OF_EIGHT) as cache:
        space = cache.space("limited", quota="4MiB")
        while time.monotonic() < until:
            size = choose.choice([1000, 20_000, 100_000, MiB, 2 * MiB])
            what = choose.randrange(5)
            if what == 0:
                cache.put(str(choose.randrange(60)), choose.randbytes(size))
            elif what == 1:
                cache.get(str(choose.randrange(60)))
            elif what == 2:
                space.put(str(choose.randrange(60)), choose.randbytes(size))
            elif what == 3:
                cache.read(choose.choice(urls), refresh=choose.random() < 0.1)
            else:
                with cache.local(choose.choice(urls)) as path:
                    assert Path(path).stat().st_size
            calls += 1
    return calls


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stopped(pids: list[int]) -> None:
    """Stop them all, and wait until they are: a walk beside renames would count files twice."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    while any(state_of(pid) not in "TZX" for pid in pids):
        time.sleep(0.001)


def samples(pids: list[int], root: Path, disk_usage: Callable[[Path], int], until: float) -> Iterator[tuple[int, int]]:
    while time.monotonic() < until:
        time.sleep(0.1)
        stopped(pids)
        try:
            yield sum(disk_usage(root / name) for name in HELD), disk_usage(root)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)


@pytest.mark.rotates
@pytest.mark.parametrize("seconds", [6, pytest.param(parts.share(60), marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
def test_s04_a_sampler_beside_eight_processes(
    seconds: int, root: Path, server: ScriptedServer, children: Callable[..., Any], disk_usage: Callable[[Path], int]
) -> None:
    urls = [server.put(f"/{i}.bin", random.Random(i).randbytes((1 + i % 4) * MiB + i)) for i in range(20)]
    urls += [server.put("/chunked.bin", random.Random(99).randbytes(3 * MiB), chunked=True, ranges=False)]
    until = time.monotonic() + seconds
    workers = [children(lambda seed=seed: work(root, urls, seed, until)) for seed in range(8)]
    pids = [worker.pid for worker in workers]
    while not (root / "FORMAT").exists():
        time.sleep(0.01)
    found = list(samples(pids, root, disk_usage, until))
    assert all(worker.result() for worker in workers)
    assert len(found) >= seconds
    assert max(held for held, _ in found) <= OF_EIGHT
    assert max(held for held, _ in found) > OF_EIGHT // 2  # it was worth looking
    assert max(total for _, total in found) <= OF_EIGHT + OWN
    with forebay.Cache(root) as cache:
        stats = cache.stats()
        assert stats.bytes_used <= OF_EIGHT
        assert stats.bytes_reserved == 0
        assert stats.evictions > 0
        assert stats.spaces["limited"][1] <= 4 * MiB
        # What is counted is what lies there; small values lie in the catalog.
        blobs = sum(entry.charge for entry in cache.entries() if entry.kind == "blob")
        assert disk_usage(root / "blobs") == blobs


def test_s04_a_burst_of_reservations_at_once(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    """16 fetches of 3 MiB into 24 MiB at one instant: what does not fit is served past the cache, or waits for no eviction for ever."""
    bodies = [random.Random(i).randbytes(3 * MiB) for i in range(16)]
    urls = [server.put(f"/{i}.bin", body, latency=0.2) for i, body in enumerate(bodies)]
    start = barrier(16)

    def fetch(i: int) -> int:
        with forebay.Cache(root, budget=BUDGET) as cache:
            start.wait(60)
            assert cache.read(urls[i]) == bodies[i]
            stats = cache.stats()
            return stats.bytes_used + stats.bytes_reserved

    assert max(child.result() for child in [children(lambda i=i: fetch(i)) for i in range(16)]) <= BUDGET


def test_s04_files_after_values(root: Path, server: ScriptedServer, disk_usage: Callable[[Path], int]) -> None:
    """What the values leave in the catalog is free for other values, and is given back to the disk where files need it."""
    with forebay.Cache(root, budget=60 * MiB, min_free=0) as cache:
        for number in range(6_500):
            cache.put(f"value {number}", number.to_bytes(4) * 2048)
        assert disk_usage(root) > 50 * MiB
        for number in range(56):
            cache.read(server.put(f"/{number}.bin", bytes([number]) * MiB))
            if number % 8 == 7:
                assert disk_usage(root) <= 60 * MiB + 28 * MiB  # the catalog's first 8 MiB, its journal, the ballast, the slots
        assert sum(entry.kind == "blob" for entry in cache.entries()) > 45
        for number in range(1_000):
            cache.put(f"again {number}", number.to_bytes(4) * 2048)
            assert cache.get(f"again {number}") is not None
        assert disk_usage(root) <= 60 * MiB + 28 * MiB
        assert cache.check(deep=True) == []
