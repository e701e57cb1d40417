"""Scenario 15: one item is larger than the budget. (A prefetch of it comes later; warming stands in for it.)"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.fetch.job import JobSink
from forebay.testing import ScriptedServer
from tests.items import until

MiB = 1 << 20
BUDGET = 8 * MiB


@pytest.fixture
def cache(root: Path, server: ScriptedServer) -> Any:
    """Three small ones are in it."""
    with forebay.Cache(root, budget=BUDGET) as cache:
        for i in range(3):
            cache.read(server.put(f"/{i}.bin", bytes([i]) * MiB))
        yield cache


@pytest.mark.parametrize("script", [{}, {"chunked": True, "ranges": False}, {"ranges": False}, {"etag": None}], ids=str)
def test_s15_twice_the_budget_is_read_past_the_cache(
    cache: forebay.Cache, server: ScriptedServer, warnings: Any, script: dict[str, Any]
) -> None:
    body = os.urandom(2 * BUDGET)
    url = server.put("/large.bin", body, **script)
    before = [entry.name for entry in cache.entries()]
    with warnings() as said:
        for _ in range(2):
            assert cache.read(url) == body
        with cache.open(url) as file:
            assert file.read() == body
    if not script.get("chunked"):  # of which nobody knows how large it will be
        assert [entry.name for entry in cache.entries()] == before  # nothing went for it
        assert cache.stats().evictions == 0
    assert cache.stats().fallbacks == 3
    assert cache.stats().bytes_reserved == 0
    assert len(said) == 1
    assert url in said[0]
    assert f"{BUDGET:,}" in said[0]
    if not script.get("chunked"):
        assert f"{len(body):,}" in said[0]
    assert cache.read(server.put("/3.bin", b"3" * MiB)) == b"3" * MiB
    assert cache.entry(server.url + "/3.bin") is not None  # the cache goes on


@pytest.mark.parametrize("size", [80_000, 700_000])
@pytest.mark.parametrize("pinned", [0, 60_000], ids=["larger than the budget", "all is pinned"])
@pytest.mark.parametrize(
    "read",
    [lambda cache, urls: [cache.read(url) for url in urls], forebay.Cache.read_many, forebay.Cache.lookahead],
    ids=["one", "many", "ahead"],
)
def test_s15_what_is_collected_in_memory_is_fetched_once(
    root: Path, server: ScriptedServer, read: Callable[..., Any], pinned: int, size: int
) -> None:
    bodies = [bytes([number]) * size for number in range(4)]
    urls = [server.put(f"/{number}", body) for number, body in enumerate(bodies)]
    with forebay.Cache(root, budget=4 * MiB if pinned else 65_536, min_free=0) as cache:
        if pinned:
            cache.put("rest", bytes(4 * MiB - pinned))
            cache.pin("rest")
        for epoch in (1, 2):
            assert list(read(cache, urls)) == bodies
            assert server.gets == epoch * len(urls)
        assert cache.stats().bytes_reserved == 0


WHYS = ["larger than the budget", "all is pinned"]
SCRIPTS: list[dict[str, Any]] = [{}, {"ranges": False}, {"etag": None}, {"chunked": True, "ranges": False}]


@pytest.mark.rotates
@pytest.mark.parametrize(("why", "script"), [*itertools.product(WHYS, SCRIPTS), ("all is pinned", {"gzip": True})], ids=str)
def test_s15_what_is_not_kept_costs_no_more_than_without_a_cache(
    cache: forebay.Cache, server: ScriptedServer, why: str, script: dict[str, Any]
) -> None:
    if why == "all is pinned":
        cache.put("rest", bytes(BUDGET - 4 * MiB))
        for name in ("rest", *(f"{server.url}/{i}.bin" for i in range(3))):
            cache.pin(name)
    size = 2 * BUDGET if why == "larger than the budget" else 2 * MiB
    body = os.urandom(size)
    url = server.put("/large.bin", body, **script)
    before = server.gets
    assert cache.read(url, bypass=True) == body
    needed = server.gets - before
    for _ in range(3):
        before = server.gets
        assert cache.read(url) == body
        assert server.gets - before == needed
    assert cache.read(url, sha256=hashlib.sha256(body).hexdigest()) == body
    with pytest.raises(forebay.errors.ChecksumMismatch):
        cache.read(url, sha256=hashlib.sha256(b"another").hexdigest())
    assert cache.entry(url) is None
    assert cache.stats().bytes_reserved == 0


@pytest.mark.parametrize(("after", "script"), [(MiB, {}), (BUDGET + MiB, {"chunked": True, "ranges": False})], ids=["told", "not told"])
def test_s15_what_is_not_kept_is_not_waited_for(
    root: Path, server: ScriptedServer, children: Callable[..., Any], after: int, script: dict[str, Any]
) -> None:
    """The first one stalls in the middle; the second one is told nothing of it, and has its own."""
    body = os.urandom(2 * BUDGET)
    url = server.put("/large.bin", body, stall_after=after, stalls=1, **script)

    def rank() -> bool:
        with forebay.Cache(root, budget=BUDGET) as cache:
            return bytes(cache.read(url)) == body

    first = children(rank)
    assert server.stalled.wait(60)
    server.objects["/large.bin"].stall_after = None
    assert children(rank).result()
    with forebay.Cache(root, budget=BUDGET) as cache:
        assert cache.stats().bytes_reserved == 0  # nor is room held for it
    server.go.set()
    assert first.result()


@pytest.mark.parametrize("script", [{}, {"chunked": True, "ranges": False}], ids=["told", "not told"])
def test_s15_what_was_not_kept_does_not_stay_in_memory(cache: forebay.Cache, server: ScriptedServer, script: dict[str, Any]) -> None:
    url = server.put("/large.bin", bytes(2 * BUDGET), **script)
    gc.collect()
    gc.disable()
    try:
        cache.read(url)
        assert not [one for one in gc.get_objects() if isinstance(one, JobSink)]
    finally:
        gc.enable()


def test_s15_a_stream_of_it_reads_only_what_is_wanted(cache: forebay.Cache, server: ScriptedServer) -> None:
    body = os.urandom(64 * MiB)
    url = server.put("/large.bin", body)
    sent = server.sent
    with cache.open(url) as file:
        file.seek(40 * MiB)
        assert file.read(1000) == body[40 * MiB : 40 * MiB + 1000]
    assert server.sent - sent < 32 * MiB


def test_s15_a_path_of_it_cannot_be_had(cache: forebay.Cache, server: ScriptedServer) -> None:
    body = os.urandom(2 * BUDGET)
    with pytest.raises(forebay.errors.NoSpace) as caught:
        cache.local(server.put("/large.bin", body))
    error = caught.value
    assert (error.need, error.budget) == (len(body), BUDGET)
    assert error.errno == 28
    assert f"{len(body):,}" in str(error)
    assert f"{BUDGET:,}" in str(error)
    assert len(cache.entries()) == 3


def test_s15_a_value_of_it_is_not_kept(cache: forebay.Cache, warnings: Any) -> None:
    with warnings() as said:
        for _ in range(3):
            assert cache.put("large", bytes(2 * BUDGET)) is False
            assert cache.get_or_put("large", lambda: bytes(2 * BUDGET)) == bytes(2 * BUDGET)
    assert len(said) == 1
    assert cache.get("large") is None
    assert cache.stats().store_failures == 6
    assert len(cache.entries()) == 3


def test_s15_a_value_that_does_not_fit_leaves_the_old_one(cache: forebay.Cache) -> None:
    assert cache.put("key", b"old" * 1000)
    assert not cache.put("key", bytes(2 * BUDGET))
    assert cache.get("key") == b"old" * 1000


def test_s15_larger_than_the_quota_of_its_space(cache: forebay.Cache, warnings: Any) -> None:
    space = cache.space("features", quota=MiB)
    assert space.put("a", bytes(MiB // 2))
    with warnings() as said:
        assert not space.put("large", bytes(2 * MiB))
    assert len(said) == 1
    assert space.keys() == ["a"]


def test_s15_exactly_the_budget_fits(root: Path) -> None:
    with forebay.Cache(root, budget=BUDGET) as cache:
        assert cache.put("first", bytes(MiB))
        assert cache.put("all", bytes(BUDGET - 4096))  # its chunk map needs a block
        assert [entry.key for entry in cache.entries()] == ["all"]


def test_s15_warming_it_holds_nothing_up(root: Path, server: ScriptedServer, tmp_path: Path, command: Callable[..., Any]) -> None:
    urls = [server.put(f"/{i}.bin", os.urandom(100_000)) for i in range(20)]
    large = server.put("/large.bin", os.urandom(2 * BUDGET))
    (tmp_path / "list").write_text("\n".join([large, *urls]))
    with forebay.Cache(root, budget=BUDGET):
        pass
    done = command("warm", "--jobs", 1, "--root", root, "--json", tmp_path / "list")
    assert done.returncode == 1
    assert large in done.stderr
    outcomes = {outcome["url"]: outcome["state"] for outcome in json.loads(done.stdout)}
    assert outcomes == {large: "past"} | dict.fromkeys(urls, "fetched")


def test_s15_a_value_that_cannot_be_kept_is_made_by_all_who_waited_at_once(
    cache: forebay.Cache, children: Callable[..., Any], tmp_path: Path
) -> None:
    """One after the other they would wait for each other's runs."""
    journal = tmp_path / "journal"

    def make() -> bytes:
        with open(journal, "a") as file:
            first = file.tell() == 0
            file.write("x")
        if first:
            until(lambda: cache.stats().waits >= 3, "the others")
        else:
            until(lambda: journal.stat().st_size == 4, "all of the others at once")
        return bytes(2 * BUDGET)

    workers = [children(lambda: len(cache.get_or_put("k", make))) for _ in range(4)]
    assert [worker.result() for worker in workers] == [2 * BUDGET] * 4
    assert journal.stat().st_size == 4
