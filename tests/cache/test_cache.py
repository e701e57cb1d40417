"""`Cache` and `Space`: what they refuse, what names mean, what a plan does; the rest is in the scenarios."""

from __future__ import annotations

import errno
import gc
import logging
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Cache, errors, remote
from forebay._engine.store import Store
from forebay.cache.entries import _Listing
from forebay.errors import ConfigError, RootRefused
from forebay.testing import ScriptedServer
from tests.conftest import descriptors
from tests.items import until
from tests.processes import in_child

SUM = "0" * 64


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache:
        yield cache
        assert cache.check(deep=True) == []


@pytest.mark.parametrize(
    "made",
    [{"root": ""}, {"budget": -1}, {"budget": 1.5}, {"max_entries": -1}, {"timeout": -1}, {"timeout": "soon"}, {"timeout": float("nan")},
     {"max_age": "x"}],
)  # fmt: skip
def test_a_cache_that_makes_no_sense_is_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: dict[str, object]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=next(iter(made))):
        Cache(**({"root": tmp_path / "root"} | made))  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "call",
    [
        lambda cache: cache.read(""),
        lambda cache: cache.read("http://127.0.0.1:9/x", sha256="abc"),
        lambda cache: cache.open("http://127.0.0.1:9/x", sha256=SUM[:-1] + "g"),
        lambda cache: cache.read("http://127.0.0.1:9/x", timeout=-1),
        lambda cache: cache.warm("http://127.0.0.1:9/x"),
        lambda cache: cache.space(""),
        lambda cache: cache.space("a:b"),
        lambda cache: cache.space("a\ud800"),
        lambda cache: cache.space("s", quota="much"),
        lambda cache: cache.space("s", policy="mru"),
        lambda cache: cache.put("k", "text"),
        lambda cache: cache.get_or_put("a\ud800", lambda: b""),
        lambda cache: "a\ud800" in cache,
        lambda cache: "a\ud800" in cache.space("values"),
    ],
)
def test_a_call_that_makes_no_sense_asks_nobody(cache: Cache, call: Callable[[Cache], object]) -> None:
    with pytest.raises(ConfigError):
        call(cache)
    assert cache.stats().requests == 0
    assert sorted(cache.stats().spaces) in ([], ["urls"], ["values"])


@pytest.mark.parametrize(
    "call",
    [
        lambda cache, url: cache.read(url),
        lambda cache, url: cache.read_many([url]),
        lambda cache, url: cache.open(url),
        lambda cache, url: cache.local(url),
        lambda cache, url: cache.local_many([url]),
        lambda cache, url: cache.directory(url),
        lambda cache, url: list(cache.lookahead([url])),
        lambda cache, url: cache.evict(url),
        lambda cache, url: cache.prefetcher(url),
    ],
)
def test_what_is_no_url_is_refused_and_shown_without_its_secrets(cache: Cache, call: Callable[[Cache, Any], object]) -> None:
    for url in (b"http://u:hidden@127.0.0.1:9/x", 5, None):
        with pytest.raises(ConfigError) as refused:
            call(cache, url)
        assert "hidden" not in str(refused.value)
    assert cache.stats().requests == 0


def test_looking_into_a_space_that_is_not_there_makes_none(cache: Cache) -> None:
    assert cache.entries("features") == []
    assert cache.clear("features").victims == ()
    assert "features" not in cache.stats().spaces


@pytest.mark.parametrize("key", ["//host/a", "/", "a:b", "values:a"])
def test_a_name_leads_back_to_the_value(cache: Cache, key: str) -> None:
    cache.put(key, b"v")
    [entry] = cache.entries()
    assert cache.entry(entry.name) == entry
    assert cache.evict(entry.name).removed == (entry.name,)


def test_a_url_is_a_url_also_where_a_space_is_called_like_its_scheme(cache: Cache, tmp_path: Path) -> None:
    cache.space("http").put("k", b"v")
    with ScriptedServer() as server:
        url = server.put("/a", b"x")
        cache.read(url)
        assert [entry.space for entry in (cache.entry(url), cache.entry("http:k")) if entry] == ["urls", "http"]


def test_an_empty_value_is_a_hit(cache: Cache) -> None:
    cache.put("k", b"")
    assert bytes(cache.get_or_put("k", lambda: b"made")) == b""
    assert (cache.stats().hits, cache.stats().misses) == (1, 0)


def test_a_space_says_what_it_is(cache: Cache) -> None:
    assert repr(cache.space("features")) == "<forebay.Space 'features'>"


@pytest.mark.parametrize(
    "call",
    [
        lambda space: space.get("k"),
        lambda space: space.put("k", b"v"),
        lambda space: space.get_or_put("k", lambda: b"v"),
        lambda space: space.evict("k"),
        lambda space: space.keys(),
        lambda space: "k" in space,
    ],
)
def test_a_space_is_closed_with_its_cache(cache: Cache, tmp_path: Path, call: Callable[[object], object]) -> None:
    other = Cache(tmp_path / "root")
    space = other.space("features")
    space.put("k", b"v")
    assert bytes(space.get("k") or b"") == b"v"
    other.close()
    with pytest.raises(forebay.errors.Closed):
        call(space)


@pytest.mark.parametrize("own", [{}, {"enabled": False}], ids=["a root", "no cache"])
def test_values_of_an_upstream_root_are_found(tmp_path: Path, cache: Cache, own: dict[str, Any]) -> None:
    cache.put("k", b"above")
    with Cache(tmp_path / "own", budget="64MiB", min_free=0, upstream=tmp_path / "root", **own) as below:
        assert below.get_or_put("k", lambda: b"made") == b"above"
        assert below.get("k") == b"above"
        assert below.stats().hits == 2


def test_the_descriptors_of_a_dropped_cache_are_closed_by_the_next_opening(cache: Cache, tmp_path: Path) -> None:
    root = tmp_path / "dropped"
    dropped = Cache(root)
    dropped.put("large", bytes(3_000_000))
    space, kept = dropped.space("features"), dropped.get("large")
    del dropped
    gc.collect()
    Cache(tmp_path / "root").close()
    assert descriptors(root)
    space.put("k", b"v")  # what a cache gave keeps it open
    del space
    gc.collect()
    with Cache(root) as again:
        assert bytes(again.space("features").get("k") or b"") == b"v"
    assert descriptors(root) == set()
    Cache(root)
    gc.collect()
    assert descriptors(root)
    Cache(tmp_path / "root").close()
    assert descriptors(root) == set()
    assert kept == bytes(3_000_000)


def test_a_dropped_cache_whose_root_was_replaced_is_not_closed_after_its_parts(tmp_path: Path) -> None:
    def work() -> bytes:
        root = tmp_path / "root"
        cycle: list[object] = [Cache(root)]
        cycle.append(cycle)
        shutil.rmtree(root)
        with Cache(root) as cache:
            del cycle
            gc.collect()  # the parts are garbage with the cache, and finalized with it
            Cache(tmp_path / "another").close()
            cache.put("k", b"v")
            return bytes(cache.get("k") or b"")

    assert in_child(work) == b"v"


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_fork_needs_no_root(tmp_path: Path, caplog: pytest.LogCaptureFixture, is_closed: bool) -> None:
    Cache(tmp_path / "gone").close()
    gc.disable()  # the parts of a closed cache refer to each other
    try:
        with Cache(tmp_path / "gone") as cache:  # it has written nothing
            if is_closed:
                cache.close()
            shutil.rmtree(tmp_path / "gone")
            in_child(lambda: None)
            assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    finally:
        gc.enable()


def test_a_plan_to_prune_removes_nothing(cache: Cache, tmp_path: Path) -> None:
    for key in "abc":
        cache.put(key, bytes(100_000))
        cache.pin(f"values:{key}")
    with Cache(tmp_path / "root", budget=250_000):  # what is pinned stays, above the budget
        pass
    for key in "abc":
        cache.unpin(f"values:{key}")
    plan = cache.prune()
    assert [victim.name for victim in plan.victims] == ["values:a"]
    assert len(cache.entries()) == 3
    assert plan.execute().removed == ("values:a",)


def test_read_only_says_so_also_to_prune(tmp_path: Path) -> None:
    with Cache(tmp_path / "root", budget=1_000_000, min_free=0):
        pass
    with Cache(tmp_path / "root", read_only=True) as cache:
        plan = cache.prune()
        with pytest.raises(forebay.errors.CacheFault, match="read-only"):
            plan.execute()


def test_a_place_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(RootRefused, match="choose another directory"):
        Cache("/proc/no/such")


def test_a_scheme_that_nobody_knows_is_refused_at_once(tmp_path: Path) -> None:
    with (
        forebay.Cache(tmp_path / "root", budget=1 << 20, min_free=0) as cache,
        pytest.raises(errors.ConfigError, match="foo:// URLs are not known"),
    ):
        cache.read("foo://bar/x")


def test_a_budget_that_the_disk_cannot_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        with forebay.Cache(tmp_path / "root", budget=1 << 49, min_free=0) as cache:
            cache.put("k", b"x")
    (record,) = caplog.records
    assert "is larger than its disk" in record.message
    assert "budget='80%'" in record.message


def test_a_cache_that_was_switched_off_says_nothing_of_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a").write_bytes(b"bytes")
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        assert cache.read(tmp_path / "a", force=True) == b"bytes"
    assert caplog.records == []


def test_what_a_read_only_root_cannot_do_is_told_as_such(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=1 << 20, min_free=0) as cache:
        cache.put("a", b"bytes")
    with forebay.Cache(tmp_path / "root", read_only=True) as cache:
        assert cache.get("a") == b"bytes"
        with pytest.raises(errors.ReadOnly, match="do this as its owner") as found:
            cache.pin("a")
        assert found.value.path == str(tmp_path / "root")
        assert pickle.loads(pickle.dumps(found.value)).path == found.value.path


SIGNED = "token=SIKRIT"


def test_what_is_told_of_progress_holds_no_secret(cache: Cache, tmp_path: Path) -> None:
    told: list[str] = []
    with ScriptedServer() as server:
        url = server.put("/d/", b"") + f"?{SIGNED}"
        with pytest.raises(errors.ForebayError):
            cache.directory(url, on_progress=lambda progress: told.append(progress.url))
        cache.pull(server.put("/a", b"12345") + f"?{SIGNED}", on_progress=lambda progress: told.append(progress.url))
    assert [url for url in told if "SIKRIT" in url] == []
    assert remote.shown("/a/token=b") == "/a/token=b"
    assert "SIKRIT" not in remote.shown("simplecache::s3://me:SIKRIT@bucket/a")
    with Cache(tmp_path / "off", enabled=False) as off, ScriptedServer() as server:
        report = off.warm([server.put("/a", b"12345") + f"?{SIGNED}"])
        assert "SIKRIT" not in str(report.failed[0][1])


def test_a_listing_is_gone_through_once() -> None:
    class Listing(_Listing[int]):
        passes = 0

        def __iter__(self) -> Iterator[int]:
            self.passes += 1
            return iter(range(3))

    found = Listing()
    for look in (lambda: found[0:2], lambda: found[-1], lambda: found == [0, 1, 2], lambda: list(iter(found))):
        found.passes = 0
        assert look()
        assert found.passes == 1


# -- as a dict -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [lambda cache: cache, lambda cache: cache.space("features")], ids=["cache", "space"])
def test_values_are_used_as_those_of_a_dict(cache: Cache, of: Callable[[Cache], Any]) -> None:
    values = of(cache)
    assert (len(values), list(values), "a" in values, bool(values)) == (0, [], False, True)
    with pytest.raises(KeyError):
        values["a"]
    values["a"] = b"1"
    values["b"] = bytearray(b"2")
    assert (bytes(values["a"]), bytes(values.get("b"))) == (b"1", b"2")
    assert (values.get("c"), values.get("c", b"none"), values.get("a", b"none") == b"1") == (None, b"none", True)
    assert (len(values), sorted(values), "a" in values, "c" in values, 1 in values) == (2, ["a", "b"], True, False, False)


def test_objects_of_urls_are_no_keys_of_the_dict(cache: Cache) -> None:
    with ScriptedServer() as server:
        url = server.put("/a", b"x")
        cache.read(url)
        assert (len(cache), list(cache), url in cache) == (0, [], False)
        assert cache.entry(url) is not None


def test_a_text_is_refused_with_what_to_do(cache: Cache) -> None:
    with pytest.raises(TypeError, match=r"pass text\.encode\(\)"):
        cache.put("k", "text")  # type: ignore[arg-type]
    with pytest.raises(errors.NotBytes, match=r"pass text\.encode\(\)"):
        cache["k"] = "text"  # type: ignore[assignment]
    assert "k" not in cache


def test_verify_is_check(cache: Cache, tmp_path: Path) -> None:
    assert cache.verify() == []
    (tmp_path / "root" / "blobs" / "foreign").write_bytes(b"x")
    assert cache.verify(deep=True) == cache.check(deep=True) != []
    (tmp_path / "root" / "blobs" / "foreign").unlink()


def test_a_share_of_the_budget_is_found_once_the_root_can_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_nothing(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "data").mkdir()
    source = tmp_path / "data" / "a"
    source.write_bytes(b"bytes")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "open", open_nothing)
        cache = Cache(tmp_path / "root", budget=8 << 20, min_free=0)
        space, pool = cache.space("v", quota="50%"), cache.prefetcher(f"file://{source.parent}/", name="p", budget="25%")
        cache.tasks("t", budget="1MB")
        samples = cache.samples("a", 10, quota="12.5%")
        assert [bytes(data) for data in cache.lookahead([f"file://{source}"], window="5%")] == [b"bytes"]
    with cache:
        until(lambda: space.put("k", b"v"), "the cache")
        assert bytes(pool.get_lazy("a").get()) == b"bytes"
        limits = cache._fetcher.store.spaces.limits_of
        assert [limits(name).quota for name in "vpt"] == [4 << 20, 2 << 20, 1_000_000]
        until(lambda: samples.put(1, b"sample"), "the array")
        assert samples._pack.quota == 1 << 20
