"""The wall clock is set back, or jumps, while the cache is used: no call fails, and nobody is served what he need not be."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.clocks import Clocks
from tests.harness import forge_times
from tests.processes import fork, in_child

SECOND = 1_000_000_000
HOUR, DAY = 3600 * SECOND, 86_400 * SECOND
STEPS = pytest.mark.parametrize("step", [-HOUR, DAY], ids=["-1 h", "+1 day"])
OLD, NEW = b"old" * 40_000, b"new" * 40_000


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    with Clocks() as found:
        yield found


class Source:
    """Its item is read while the clock is set."""

    uri, version = "here://source", "1"

    def __init__(self, clocks: Clocks, step: int) -> None:
        self.clocks, self.step = clocks, step

    def __getitem__(self, key: str) -> bytes:
        self.clocks.step(self.step)
        return b"item"


@STEPS
def test_a_step_during_a_fetch_reaches_nobody(root: Path, server: ScriptedServer, clocks: Clocks, step: int) -> None:
    url = server.put("/x", bytes(3 << 20), stall_after=1 << 20)
    found: list[object] = []

    def read() -> None:
        try:
            found.append(len(cache.read(url)))
        except BaseException as error:  # whatever a thread raises is the test's
            found.append(error)

    with forebay.Cache(root) as cache:
        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert server.stalled.wait(60)
        clocks.step(step)
        server.go.set()
        for thread in threads:
            thread.join()
        assert found == [3 << 20] * 3
        stats = cache.stats()
        assert 0 < stats.wait_ns_remote < HOUR
        assert server.gets == 1


@STEPS
def test_a_step_while_an_item_is_loaded_reaches_nobody(root: Path, clocks: Clocks, step: int) -> None:
    with forebay.Cache(root) as cache, cache.prefetcher(Source(clocks, step)) as pool:
        assert pool.get_lazy("a").get() == b"item"
        assert 0 < cache.stats().wait_ns_remote < HOUR


@STEPS
@pytest.mark.parametrize("again", ["here", "elsewhere"])
def test_refresh_asks_whatever_the_clock_says(root: Path, server: ScriptedServer, clocks: Clocks, step: int, again: str) -> None:
    url = server.put("/x", OLD)

    def refreshed() -> tuple[bytes, bytes, bytes]:
        with forebay.Cache(root) as cache:
            read = bytes(cache.read(url, refresh=True))
            server.put("/x", OLD)
            with cache.open(url, refresh=True) as file:
                opened = file.read()
            server.put("/x", NEW)
            with cache.local(url, refresh=True) as path:
                return read, opened, Path(path).read_bytes()

    with forebay.Cache(root) as cache:
        assert cache.read(url) == OLD
        clocks.step(step)
        server.put("/x", NEW)
        if again == "here":
            assert refreshed() == (NEW, OLD, NEW)
        else:
            assert in_child(lambda: forebay.Cache(root).read(url, refresh=True) == NEW)
        assert cache.read(url) == NEW


def test_refresh_asks_although_its_process_has_not_seen_the_clock_jump(root: Path, server: ScriptedServer) -> None:
    """Another process began to fetch while the clock was an hour ahead: that was before, though its time is greater."""
    url = server.put("/x", OLD, stall_after=1000)

    def first() -> bool:
        with forebay.Cache(root) as cache:
            return cache.read(url) == OLD

    with Clocks(together=True) as clocks, forebay.Cache(root) as cache:
        cache.put("k", b"v")  # it looks at the clock
        clocks.step(HOUR)
        child = fork(first)
        assert server.stalled.wait(60)
        clocks.step(-HOUR)
        server.put("/x", NEW)
        with cache.local(url, refresh=True, on_wait=lambda waiting: server.go.set()) as path:
            assert Path(path).read_bytes() == NEW
        assert child.result()


@STEPS
def test_max_age_is_an_age(root: Path, server: ScriptedServer, clocks: Clocks, step: int) -> None:
    """Set back by an hour, the clock makes nothing young; what is younger than ``max_age`` is asked for at most once more."""
    url = server.put("/x", OLD)
    with forebay.Cache(root, max_age=0.2) as cache:
        assert cache.read(url) == OLD
        clocks.step(step)
        time.sleep(0.2)  # it is to become old
        server.put("/x", NEW)
        assert cache.read(url) == NEW
        asked = len(server.requests)
        for _ in range(100):
            assert cache.read(url, max_age=1000) == NEW
        assert len(server.requests) == asked


def test_a_day_ahead_and_back_again(root: Path, server: ScriptedServer, clocks: Clocks) -> None:
    url = server.put("/x", OLD)
    with forebay.Cache(root, max_age=3600) as cache:
        assert cache.read(url) == OLD
        clocks.step(DAY)
        server.put("/x", NEW)
        assert cache.read(url) == NEW
        clocks.step(-DAY)
        asked = len(server.requests)
        assert cache.read(url) == NEW
        assert len(server.requests) == asked
        (entry,) = cache.entries()
        assert abs(entry.used - time.time()) < 600, "people are shown how long ago it was"
        assert abs(entry.validated - time.time()) < 600


@STEPS
def test_times_that_were_forged_make_nothing_fresh_for_ever(root: Path, server: ScriptedServer, clocks: Clocks, step: int) -> None:
    url = server.put("/x", OLD)
    with forebay.Cache(root, max_age=0.05) as cache:
        assert cache.read(url) == OLD
        (entry,) = cache.entries()
        forge_times(root, entry.validated, (1 << 64) - 1)
        clocks.step(step)
        server.put("/x", NEW)
        assert cache.read(url) == NEW


@STEPS
def test_listings_and_trees_have_an_age_too(root: Path, tmp_path: Path, clocks: Clocks, step: int) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_bytes(OLD)

    def content(**how: object) -> dict[str, bytes]:
        with cache.directory(f"file://{source}", force=True, **how) as path:  # type: ignore[arg-type]
            return {file.name: file.read_bytes() for file in Path(path).iterdir()}

    with forebay.Cache(root, max_age=1000) as cache:
        assert content() == {"a": OLD}
        clocks.step(step)
        (source / "b").write_bytes(NEW)
        assert content(refresh=True) == {"a": OLD, "b": NEW}
        (source / "c").write_bytes(NEW)
        assert content() == {"a": OLD, "b": NEW}
        time.sleep(0.05)  # it is to become old
        assert content(max_age=0.05) == {"a": OLD, "b": NEW, "c": NEW}


def test_the_just_used_stay_and_the_cold_go(tmp_path: Path, children: Callable[..., object]) -> None:
    """Of 20 that were used after the clock was set back none goes, in whatever process they were used."""
    place = tmp_path / "root"
    body = bytes(1 << 20)

    def use() -> None:
        with Clocks() as mine:
            mine.step(-HOUR)
            with forebay.Cache(place) as cache:
                for n in range(20):
                    assert cache.get(f"k{n}") is not None
                for n in range(8):
                    cache.put(f"new{n}", body)

    with forebay.Cache(place, budget=42 << 20, min_free=0) as cache:
        for n in range(40):
            cache.put(f"k{n}", body)
    in_child(use)
    with forebay.Cache(place) as cache:
        left = {entry.key for entry in cache.entries()}
        assert {f"k{n}" for n in range(20)} <= left
        assert len(left) < 48
