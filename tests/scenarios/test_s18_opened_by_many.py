"""Scenario 18: many processes open a root that does not exist, at one instant, and all of them work."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from tests import parts


@pytest.mark.rotates
@pytest.mark.parametrize("rounds", [1, pytest.param(parts.share(50), marks=[pytest.mark.stress, pytest.mark.timeout(1800)])])
def test_s18_64_processes_and_a_new_root(
    rounds: int, tmp_path: Path, children: Callable[..., Any], barrier: Callable[..., Any], warnings: Any, disk_usage: Callable[[Path], int]
) -> None:
    for turn in range(rounds):
        root = tmp_path / f"root-{turn}"
        start = barrier(64)

        def opener(number: int) -> list[str]:
            choose = random.Random(number)
            start.wait(100)  # noqa: B023 - forked at once
            with warnings() as said, forebay.Cache(root, budget="1GiB") as cache:  # noqa: B023
                for i in range(20):
                    key = f"{choose.randrange(200)}"
                    assert cache.put(key, key.encode() * choose.choice([1, 100, 10_000])), said
                    found = cache.get(f"{choose.randrange(200)}")
                    assert found is None or len(bytes(found)) > 0
                    assert cache.get_or_put(f"own {number} {i}", lambda: b"own") == b"own"
            return said

        said = [line for child in [children(lambda n=n: opener(n)) for n in range(64)] for line in child.result(100)]
        assert [line for line in said if not line.startswith("waiting ")] == []
        with forebay.Cache(root) as cache:
            assert cache.check(deep=True) == []
            entries = cache.entries()
            assert sum(entry.key.startswith("own") for entry in entries) == 64 * 20
            assert disk_usage(root / "blobs") == sum(entry.charge for entry in entries if entry.kind == "blob")
            assert list((root / "tmp").iterdir()) == []
            assert cache.stats().fallbacks == cache.stats().store_failures == 0
