"""A handle that was opened while the root could not be used does not stay past the cache for life."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay._engine.passthrough import PassThrough
from forebay._kernel import host, waits
from forebay.testing import ScriptedServer

BODY = b"body" * 30_000


class Source:
    uri, version = "here://source", "1"

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, key: str) -> bytes:
        self.read.append(key)
        return b"item"


class Disk:
    """Full until it is said that it is not; and no pause before what failed is tried again."""

    full = True

    def allocate(self, *args: Any) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.real(*args)

    def __init__(self) -> None:
        self.real = host.allocate


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk()
    monkeypatch.setattr(host, "allocate", found.allocate)
    monkeypatch.setattr(waits, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(waits, "LONGEST_PAUSE", 0.0)
    return found


def test_every_front_uses_the_cache_once_it_can_be_used(tmp_path: Path, server: ScriptedServer, disk: Disk) -> None:
    url, source = server.put("/x", BODY), Source()
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        assert isinstance(cache._store, PassThrough)
        space, tasks, samples = cache.space("s", quota=1 << 20), cache.tasks("t", budget=1 << 20), cache.samples("array", 4)
        unnamed = cache.samples(length=4, codec="pickle")
        pool = cache.prefetcher(source)
        calls: list[int] = []
        double = tasks.cached(lambda x: calls.append(x) or 2 * x, tag="d-{x}")
        for _ in range(2):
            assert cache.read(url) == BODY
            assert not cache.put("k", b"v")
            assert not space.put("k", b"v")
            assert not tasks.write("tag", 1)
            assert double(2) == 4
            assert not samples.put(0, b"sample")
            assert not unnamed.put(0, "sample")
            assert pool.get_lazy("a").get() == b"item"
            assert cache.stats().entries == 0
        copies = pickle.loads(pickle.dumps((samples, pool)))

        disk.full = False
        assert cache.read(url) == cache.read(url) == BODY
        gets = server.gets
        assert cache.read(url) == BODY
        assert cache._hit(url, 1 << 62) == BODY, "by the quick way"
        assert server.gets == gets
        assert cache.put("k", b"v")
        assert cache.get("k") == b"v"
        assert space.put("k", b"v")
        assert space.get("k") == b"v"
        assert tasks.write("tag", 1)
        assert tasks.read("tag") == (True, 1)
        assert tasks.budget == 1 << 20
        calls.clear()
        assert [double(3), double(3)] == [6, 6]
        assert calls == [3]
        for array, value in ((samples, b"sample"), (unnamed, "sample"), (copies[0], b"sample")):
            array.get(0)  # looks again
            assert array.put(1, value) or array is copies[0]
            assert array.get(1) == value
        source.read.clear()
        for _ in range(2):
            assert pool.get_lazy("b").get() == b"item"
        assert source.read == ["b"]
        assert pool.count == 1
        assert copies[1].get_lazy("b").get() == b"item"
        copies[0].close(), copies[1].close(), unnamed.close()
        copies[0]._home.close()
        stats = cache.stats()
        assert (stats.budget, dict(stats.spaces)["s"][0]) == (64 << 20, 1)
        assert cache.path == tmp_path / "root"
        assert cache.check(deep=True) == []
        pool.close()


def test_it_is_not_tried_at_each_call(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FIRST_PAUSE", 3600.0)
    with forebay.Cache(tmp_path / "root") as cache:
        disk.full = False
        for n in range(100):
            assert not cache.put(f"k{n}", b"v")
        assert isinstance(cache._store, PassThrough)


def test_a_cache_that_is_switched_off_stays_so(tmp_path: Path, disk: Disk) -> None:
    disk.full = False
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        assert not cache.put("k", b"v")
        assert cache.get("k") is None
        assert not (tmp_path / "root").exists()
