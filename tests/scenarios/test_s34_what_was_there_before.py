"""Scenario 34: entries that are there already are counted, and a lower limit applies to them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


@pytest.fixture
def filled(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> list[str]:
    """24 MiB of URLs and values."""
    urls = [server.put(f"/{i}.bin", bytes([i]) * MiB) for i in range(20)]

    def fill() -> None:
        with forebay.Cache(root, budget=24 << 20) as cache:
            for url in urls:
                cache.read(url)
            for i in range(4):
                cache.put(str(i), bytes([i]) * (MiB - 4096))

    children(fill).result()
    return urls


def test_s34_a_smaller_limit_is_applied_at_the_open(root: Path, filled: list[str], disk_usage: Callable[[Path], int]) -> None:
    before = disk_usage(root / "blobs")
    assert before > 22 * MiB
    with forebay.Cache(root, budget=6 << 20) as cache:
        assert disk_usage(root / "blobs") <= 6 * MiB
        assert cache.stats().bytes_used == disk_usage(root / "blobs")
        assert cache.get("3") is not None  # the latest stayed
        assert cache.entry(filled[0]) is None


def test_s34_a_budget_in_the_environment_changes_no_cache_that_exists(
    root: Path, filled: list[str], disk_usage: Callable[[Path], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = disk_usage(root / "blobs")
    monkeypatch.setattr("forebay._config.LEAST_BUDGET", MiB)
    monkeypatch.setattr("forebay._config._warned", set())
    monkeypatch.setenv("FOREBAY_BUDGET", "6MiB")
    for _ in range(2):
        with forebay.Cache(root) as cache:
            assert cache.budget > 6 * MiB
            assert disk_usage(root / "blobs") == before
    told = [record.getMessage() for record in caplog.records if "FOREBAY_BUDGET" in record.getMessage()]
    assert len(told) == 1  # once for a process
    assert "`forebay budget 6MiB`" in told[0]
    with forebay.Cache(root.with_name("new")) as cache:
        assert cache.budget == 6 * MiB


@pytest.mark.parametrize("what", ["catalog.sqlite", "catalog", "everything but blobs", "shared", "counters"])
def test_s34_without_its_index_everything_is_adopted_or_removed_and_counted(
    root: Path, filled: list[str], disk_usage: Callable[[Path], int], what: str, server: ScriptedServer
) -> None:
    import shutil

    names = {
        "catalog.sqlite": ["catalog.sqlite"],
        "catalog": ["catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.ballast"],
        "everything but blobs": [name for name in os.listdir(root) if name != "blobs"],
        "shared": ["shared"],
        "counters": ["counters"],
    }[what]
    for name in names:
        path = root / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    with forebay.Cache(root, budget=24 << 20) as cache:
        cache.put("new", bytes(MiB))
        charged = sum(entry.charge for entry in cache.entries() if entry.kind == "blob")
        assert disk_usage(root / "blobs") == charged
        assert cache.stats().bytes_used <= 24 * MiB
        assert cache.check(deep=True) == []
        for i, url in enumerate(filled):
            assert cache.read(url) == bytes([i]) * MiB


@pytest.mark.parametrize("how", ["deleted", "scribbled", "root deleted"])
def test_s34_while_it_is_open(root: Path, filled: list[str], how: str, server: ScriptedServer, children: Callable[..., Any]) -> None:
    import shutil

    with forebay.Cache(root, budget=24 << 20) as cache:
        buffer = cache.read(filled[3])
        if how == "deleted":
            for path in root.glob("catalog.sqlite*"):
                path.unlink()
        elif how == "scribbled":

            def scribble() -> None:
                for path in root.glob("catalog.sqlite*"):
                    path.write_bytes(os.urandom(path.stat().st_size))

            children(scribble).result()
        else:
            shutil.rmtree(root)
        for _ in range(2):
            for i, url in enumerate(filled):
                assert cache.read(url) == bytes([i]) * MiB
            cache.put("new", bytes(MiB))
        assert buffer == bytes([3]) * MiB
        assert cache.entries()
    with forebay.Cache(root) as cache:
        assert cache.check(deep=True) == []
        assert cache.stats().bytes_used <= 24 * MiB
