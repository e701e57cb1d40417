"""Scenario 5: the limit binds all processes together, whatever each of them says."""

from __future__ import annotations

import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay

MiB = 1 << 20


@pytest.mark.rotates
def test_s05_eight_ranks_with_four_workers_each(root: Path, children: Callable[..., Any], disk_usage: Callable[[Path], int]) -> None:
    def rank(number: int) -> int:
        workers = []
        for worker in range(4):
            pid = os.fork()
            if pid == 0:
                choose = random.Random(number * 4 + worker)
                with forebay.Cache(root, budget=16 << 20) as cache:
                    for i in range(12):
                        cache.put(f"{number}-{worker}-{i}", choose.randbytes(MiB))
                        assert cache.stats().bytes_used <= 16 * MiB
                os._exit(0)
            workers.append(pid)
        return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in workers)

    assert [child.result() for child in [children(lambda n=n: rank(n)) for n in range(8)]] == [0] * 8
    assert disk_usage(root / "blobs") <= 16 * MiB
    with forebay.Cache(root) as cache:
        assert cache.budget == 16 * MiB
        assert 14 <= len(cache.entries()) <= 16


def test_s05_the_last_to_set_it_wins_and_both_are_named(
    root: Path, children: Callable[..., Any], flag: Callable[[], Any], warnings: Any
) -> None:
    other_set = flag()

    def other() -> list[str]:
        with warnings() as said, forebay.Cache(root, budget=8 << 20) as cache:
            assert cache.budget == 8 * MiB
        other_set.set()
        return said

    with forebay.Cache(root, budget=16 << 20) as cache:
        for i in range(14):
            cache.put(str(i), bytes([i]) * MiB)
        said = children(other).result()
        assert len(said) == 1
        assert str(16 * MiB) in said[0].replace(",", "")
        assert str(8 * MiB) in said[0].replace(",", "")
        assert str(os.getpid()) in said[0]
        assert cache.budget == 8 * MiB
        assert cache.stats().bytes_used <= 8 * MiB  # applied at once to what was there
        assert cache.get("13") == bytes([13]) * MiB  # the latest stayed
        cache.put("more", bytes(MiB))
        assert cache.stats().bytes_used <= 8 * MiB


@pytest.mark.parametrize("how", ["no budget", "pickled", "forked"])
def test_s05_who_says_nothing_changes_nothing(root: Path, children: Callable[..., Any], how: str, warnings: Any) -> None:
    import pickle

    with forebay.Cache(root, budget=16 << 20) as cache:
        handle = pickle.dumps(cache)
        with forebay.Cache(root, budget=12 << 20):
            pass

        def other() -> tuple[int, list[str]]:
            with warnings() as said:
                opened = forebay.Cache(root) if how == "no budget" else pickle.loads(handle) if how == "pickled" else cache
                return opened.budget, said

        assert children(other).result() == (12 * MiB, [])


def test_s05_a_lowered_budget_admits_nothing_until_it_is_met(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    held, end = flag(), flag()

    def hold() -> None:
        with forebay.Cache(root, budget=16 << 20) as cache:
            for i in range(6):
                cache.put(f"held-{i}", bytes(2 * MiB))
            leases = [cache.hold(f"values:held-{i}") for i in range(6)]
            held.set()
            end.wait(60)
            del leases

    holder = children(hold)
    assert held.wait(60)
    with forebay.Cache(root, budget=8 << 20) as cache:
        assert cache.stats().bytes_used >= 12 * MiB  # nothing of it may go
        assert cache.put("new", bytes(MiB)) is False
        assert cache.put("small", b"s") is False
        end.set()
        holder.result()
        assert cache.put("new", bytes(MiB)) is True
        assert cache.stats().bytes_used <= 8 * MiB


def test_s05_a_handle_that_arrives_sets_nothing(root: Path, run: Callable[..., Any]) -> None:
    """Whatever the environment there says of limits."""
    with forebay.Cache(root, budget=64_000_000, min_free="1MB") as cache:
        script = "import pickle, sys; cache = pickle.loads(bytes.fromhex(sys.argv[1])); print(cache.budget); cache.close()"
        told = run(script, pickle.dumps(cache).hex(), env=os.environ | {"FOREBAY_BUDGET": "5GB", "FOREBAY_MIN_FREE": "5GB"})
        assert told.stdout.split() == ["64000000"]
        assert cache.budget == 64_000_000
