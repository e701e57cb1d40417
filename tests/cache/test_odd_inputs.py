"""What a caller passes, or an origin sends, is never judged as damage of the catalog, however odd it is."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import forebay
from forebay import errors
from forebay._engine.store import Store
from forebay.checkpoint import Checkpoint
from forebay.sources import UrlSource
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.items import Items
from tests.processes import in_child

LONG = "x" * 100_000
TEXTS = [
    "", " ", "a\0b", "\0", "\ud800", "\udcff", "\U0010ffff", "\ufffe", "%", "_", "*", "a%b_c*?[", "'; DROP TABLE entries; --",
    "\n", "\u202e",
    "/", "//", "../..", "a/" * 1000, LONG, "v:a", "ｋ", "a\u0308", "-1", "sqlite_master",
]  # fmt: skip
NO_TEXTS: list[Any] = [None, 0, -1, 1 << 31, 1 << 62, (1 << 63) - 1, 1 << 63, -(1 << 63) - 1, 1 << 200, math.nan, math.inf, -math.inf,
    1.5, True, b"", b"\xff", [], {}, object(), ("a", "b")]  # fmt: skip
ODD: list[Any] = TEXTS + NO_TEXTS
TYPED = errors.ForebayError, TypeError, ValueError, IndexError
"""What a caller may get for odd arguments."""

Door = Callable[[forebay.Cache, Any], object]


def close(thing: Any) -> None:
    if hasattr(thing, "close"):
        thing.close()


def samples(cache: forebay.Cache, name: Any, length: Any, i: Any) -> None:
    with cache.samples(name, length) as array:
        array.get(i)
        array.get_many([i, 0])
        array.get_or_put(i, lambda: b"x")
        array.get_or_put_many([i, i], lambda some: [b"x" for _ in some])


def of_pool(cache: forebay.Cache, name: Any) -> None:
    """A prefetcher with this name, which has read an item of its source."""
    with cache.prefetcher(Items(10), name=name, decode=lambda key, data: data) as pool:
        lazy = pool.get_lazy("a")
        assert lazy.get() == Items(10).body("a")
        pool.put(0)


def store_of(cache: forebay.Cache) -> Store:
    store = cache._store
    assert isinstance(store, Store)
    return store


def of_text(door: Door) -> Door:
    """A door behind the public ones, which let pass texts only."""
    return lambda cache, odd: door(cache, odd) if isinstance(odd, str) else None


def set_meta(cache: forebay.Cache, meta: Any) -> None:
    entry = store_of(cache).entry("values", "before")
    assert entry is not None
    store_of(cache).set_meta(entry, meta)
    store_of(cache).set_meta(entry, "")


DOORS: dict[str, Door] = {
    "put": lambda cache, odd: cache.put(odd, b"x"),
    "put data": lambda cache, odd: cache.put("data", odd),
    "get": lambda cache, odd: cache.get(odd),
    "in": lambda cache, odd: odd in cache,
    "get_or_put": lambda cache, odd: cache.get_or_put(odd, lambda: b"x"),
    "get_or_put data": lambda cache, odd: cache.get_or_put("data", lambda: odd),
    "timeout": lambda cache, odd: cache.get_or_put("data", lambda: b"x", timeout=odd),
    "space": lambda cache, odd: cache.space(odd).put("k", b"x"),
    "quota": lambda cache, odd: cache.space("q", quota=odd).put("k", b"x"),
    "policy": lambda cache, odd: cache.space("p", policy=odd).put("k", b"x"),
    "space of keys": lambda cache, odd: cache.space(odd).keys(),
    "space evict": lambda cache, odd: cache.space("values2").evict(odd),
    "entries": lambda cache, odd: list(cache.entries(odd)),
    "entry": lambda cache, odd: cache.entry(odd),
    "hold": lambda cache, odd: close(cache.hold(odd)),
    "pin": lambda cache, odd: cache.pin(odd),
    "unpin": lambda cache, odd: cache.unpin(odd),
    "evict": lambda cache, odd: cache.evict(odd) if odd not in ("", None) else None,
    "invalidate": lambda cache, odd: cache.invalidate(odd),
    "plan need": lambda cache, odd: cache.plan(odd),
    "plan space": lambda cache, odd: cache.plan(space=odd, where=lambda entry: False),
    "history": lambda cache, odd: cache.history(by=odd),
    "array": lambda cache, odd: samples(cache, odd, 10, 1),
    "length": lambda cache, odd: samples(cache, f"length {odd!r:.20}", odd, 0) if not isinstance(odd, int) or odd < 1 << 20 else None,
    "index": lambda cache, odd: samples(cache, "index", 10, odd),
    "tag": lambda cache, odd: cache.tasks("t").write(odd, 1),
    "tag read": lambda cache, odd: (cache.tasks("t").read(odd), cache.tasks("t").has(odd), cache.tasks("t").evict(odd)),
    "value of a tag": lambda cache, odd: cache.tasks("t").write("value", odd) if type(odd) is not object else None,
    "tasks": lambda cache, odd: cache.tasks(odd).write("a", 1),
    "url": lambda cache, odd: cache.read(odd) if not isinstance(odd, int) else None,
    "urls": lambda cache, odd: cache.read_many([odd, odd], return_exceptions=True) if not isinstance(odd, int) else None,
    "local": lambda cache, odd: close(cache.local(odd)) if not isinstance(odd, int) else None,
    "warm": lambda cache, odd: cache.warm([odd]) if not isinstance(odd, int) else None,
    "directory": lambda cache, odd: close(cache.directory(odd)) if isinstance(odd, str) and "/" not in odd and odd.strip() else None,
    "pool": lambda cache, odd: of_pool(cache, odd),
    "store put": of_text(lambda cache, odd: store_of(cache).put("v", odd, b"x")),
    "store meta": of_text(set_meta),
    "store failure": of_text(lambda cache, odd: store_of(cache).locks.failure("v", odd, 0)),
    "store put_many": of_text(lambda cache, odd: store_of(cache).put_many("v", [(odd, b"x"), (odd, b"y")])),
}


NONE_THERE = {"hold", "pin", "unpin", "history"}
"""Doors behind which none of these is found."""


@contextlib.contextmanager
def unharmed(cache: forebay.Cache, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """What was stored before stays, in the same catalog, and the catalog was not even suspected."""
    assert cache.put("before", b"stays")
    catalog = Path(cache.path) / "catalog.sqlite"
    before = catalog.stat().st_ino
    with caplog.at_level(logging.INFO, "forebay.catalog"):
        yield
    assert cache.get("before") == b"stays"
    assert catalog.stat().st_ino == before
    assert list(Path(cache.path).glob("catalog.damaged*")) == []
    assert "nothing is wrong with" not in caplog.text
    assert cache.check() == []


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, timeout=2.0) as found:
        yield found


@pytest.mark.parametrize("door", DOORS)
def test_no_argument_is_damage(cache: forebay.Cache, caplog: pytest.LogCaptureFixture, door: str) -> None:
    entered = 0
    with unharmed(cache, caplog):
        for odd in ODD:
            with contextlib.suppress(*TYPED):
                DOORS[door](cache, odd)
                entered += 1
    assert entered or door in NONE_THERE, "each call was refused: what is behind this door was not tried"


@pytest.mark.parametrize(
    "etag", ['""', '"a\\0b"', '"\xff\xfe"', "W/", '"' + "e" * 50_000 + '"', "\x01", '"%_*"', "'", '"session:1"', '"\u00e4"'], ids=ascii
)  # fmt: skip
def test_no_validator_is_damage(cache: forebay.Cache, caplog: pytest.LogCaptureFixture, server: ScriptedServer, etag: str) -> None:
    with unharmed(cache, caplog):
        for n, size in enumerate((10, 300_000)):
            with contextlib.suppress(*TYPED):
                url = server.put(f"/o{n}", b"x" * size, etag=etag)
                cache.read(url)
                cache.read(url, max_age=0)
                cache.local(url, max_age=0).close()


@hypothesis.settings(max_examples=40, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(
    door=st.sampled_from(sorted(DOORS)),
    odd=st.one_of(st.text(st.characters(exclude_categories=())), st.integers(), st.floats(), st.binary(), st.none()),
)  # fmt: skip
def test_nothing_that_anybody_passes_is_damage(cache: forebay.Cache, caplog: pytest.LogCaptureFixture, door: str, odd: Any) -> None:
    with unharmed(cache, caplog), contextlib.suppress(*TYPED):
        DOORS[door](cache, odd)


def test_a_relative_root_in_a_working_directory_that_is_gone(tmp_path: Path) -> None:
    def opened() -> str:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        try:
            forebay.Cache("relative").close()
        except errors.RootRefused as error:
            return str(error)
        return ""

    assert "relative" in in_child(opened)


def test_a_relative_path_in_a_working_directory_that_is_gone(tmp_path: Path, cache: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"body")
    cache.put("rel", b"value")
    calls: list[Callable[[], object]] = [
        lambda: cache.read("rel"), lambda: cache.read("rel", force=True), lambda: cache.read_many(["rel"]), lambda: cache.open("rel"),
        lambda: cache.local("rel"), lambda: cache.pull("rel"), lambda: cache.directory("rel"), lambda: cache.invalidate("rel"),
        lambda: list(cache.lookahead(["rel"])), lambda: cache.prefetcher("rel"), lambda: Checkpoint("rel"),
        lambda: Checkpoint.from_directory("rel"), lambda: cache.copy_directory(tmp_path, "rel"),
    ]  # fmt: skip

    def tried() -> list[str]:
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
        found = []
        for call in calls:
            try:
                call()
            except errors.ConfigError as error:
                found.append(str(error))
        assert cache.read(url) == b"body"
        assert cache.get("rel") == b"value"
        assert cache.entry("rel") is not None
        return found

    found = in_child(tried)
    assert len(found) == len(calls)
    assert all("'rel' is relative" in text for text in found)


ARRAYS: list[Any] = [[1, 2], [0.5, 1], [], ["a", "b"], [True, False]]
NUMBERS: dict[str, Callable[[forebay.Cache, Any], object]] = {
    "budget": lambda cache, odd: forebay.Cache(cache.path.parent / "other", budget=odd),
    "max_entries": lambda cache, odd: forebay.Cache(cache.path.parent / "other", max_entries=odd),
    "max_rate": lambda cache, odd: forebay.Cache(cache.path.parent / "other", max_rate=odd),
    "timeout": lambda cache, odd: forebay.Cache(cache.path.parent / "other", timeout=odd),
    "timeout of put": lambda cache, odd: cache.space("s").put("k", b"x", timeout=odd),
    "timeout of get_or_put": lambda cache, odd: cache.get_or_put("k", lambda: b"x", timeout=odd),
    "timeout of samples": lambda cache, odd: cache.samples("a", 3).get_or_put(0, lambda: b"x", timeout=odd),
    "timeout of several samples": lambda cache, odd: cache.samples("a", 3).get_or_put_many([0], lambda some: [b"x"], timeout=odd),
    "block_size": lambda cache, odd: cache.open("http://h/a", block_size=odd),
    "workers": lambda cache, odd: cache.prefetcher(Items(1), workers=odd),
    "max_count": lambda cache, odd: cache.prefetcher(Items(1), max_count=odd),
    "store": lambda cache, odd: cache.prefetcher(Items(1), store=odd),
    "ahead": lambda cache, odd: cache.prefetcher(Items(1)).stream(["a"], ahead=odd),
    "policy": lambda cache, odd: cache.space("s", policy=odd),
    "policy of samples": lambda cache, odd: cache.samples("a", 3, policy=odd),
    "window": lambda cache, odd: cache.lookahead(["a"], window=odd),
    "length": lambda cache, odd: cache.samples("b", odd),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_an_array_is_no_number(cache: forebay.Cache, name: str) -> None:
    numpy = pytest.importorskip("numpy")
    for odd in ARRAYS:
        with pytest.raises(errors.ConfigError) as caught:
            NUMBERS[name](cache, numpy.array(odd))
        assert name.partition(" ")[0] in str(caught.value)


@pytest.mark.parametrize("key", ["\ud800", "a\udfff", "\udc7f/b"])
@pytest.mark.parametrize("where", ["", "http://127.0.0.1:9/d", "s3://b/d"])
@pytest.mark.parametrize("enabled", [False, True])
def test_half_a_character_in_the_key_of_an_item(tmp_path: Path, where: str, key: str, enabled: bool) -> None:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, enabled=enabled) as cache:
        source = UrlSource(where or tmp_path)
        with cache.prefetcher(source) as pool:
            calls: list[Callable[[], object]] = [
                lambda: pool.get_lazy(key).get(), lambda: pool.get(key), lambda: pool.get_many([key]), lambda: source[key],
            ]  # fmt: skip
            calls += [lambda: source.size(key), lambda: source.version_of(key)] if not where else []
            for call in calls:
                with pytest.raises(errors.ConfigError, match="half a character"):
                    call()
            assert len(pool.warm([key]).failed) == 1
