"""Scenario 38: many small values: a limit of their number that holds, and few inodes. (Packed samples come later.)"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests import parts


@pytest.mark.rotates
def test_s38_max_entries_under_eight_writers(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(20_000)) for i in range(30)]
    start = barrier(8)

    def writer(number: int) -> int:
        choose = random.Random(number)
        most = 0
        with forebay.Cache(root, max_entries=100, budget="1GiB") as cache:
            start.wait(60)
            for i in range(80):
                assert cache.put(f"{number} {i}", choose.randbytes(choose.choice([10, 1000, 20_000])))
                if i % 10 == 0:
                    cache.read(choose.choice(urls))
                    most = max(most, len(cache.entries()))
        return most

    assert max(child.result() for child in [children(lambda n=n: writer(n)) for n in range(8)]) <= 100
    with forebay.Cache(root) as cache:
        assert cache.stats().entries == len(cache.entries()) == 100
        assert cache.put("one more", b"v")
        assert cache.stats().entries == 100


def test_s38_a_lower_number_is_applied_at_once(root: Path) -> None:
    with forebay.Cache(root) as cache:
        for i in range(50):
            cache.put(str(i), b"v" * (1 + i * 1000))
    with forebay.Cache(root, max_entries=20) as cache:
        assert sorted(int(entry.key) for entry in cache.entries()) == list(range(30, 50))


@pytest.mark.parametrize("count", [3000, pytest.param(parts.share(100_000), marks=[pytest.mark.stress, pytest.mark.timeout(900)])])
def test_s38_small_values_need_no_inodes(count: int, root: Path) -> None:
    with forebay.Cache(root, budget="4GiB") as cache:
        for i in range(10):
            cache.put(str(i), bytes(1000))
        before = sum(1 for _ in root.rglob("*"))
        for i in range(count):
            cache.put(str(i), bytes(1000))
        assert sum(1 for _ in root.rglob("*")) <= before + 2 + count // 65_536 + count // 8192  # tables of slots, and of keys
        assert cache.stats().entries == count
        assert cache.get(str(count - 1)) == bytes(1000)


def test_s38_small_values_are_counted_as_what_they_take(root: Path, disk_usage: Callable[[Path], int]) -> None:
    with forebay.Cache(root, budget=24 << 20) as cache:
        for i in range(4500):
            cache.put(str(i), random.Random(i).randbytes(8000))
        assert cache.stats().bytes_used <= 24 << 20
        assert cache.stats().entries < 3100
    assert (root / "catalog.sqlite").stat().st_size <= (24 + 8 + 4) << 20
