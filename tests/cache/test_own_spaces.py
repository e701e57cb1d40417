"""The spaces in which the cache keeps its own entries: users read, list, limit and clear them, and store nothing in them."""

from __future__ import annotations

import asyncio
import io
import pickle
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.cache import fetcher_of
from forebay.sources import TarSource
from forebay.testing import ScriptedServer
from tests.items import Items, body
from tests.remote_directories import http_directory

OWN = ["urls", "directories", "listings", "indexes", "samples", "sessions"]
MEMBER = b"a member of a shard"

Door = Callable[[forebay.Cache, str, str], Any]


def shard() -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        info = tarfile.TarInfo("0.txt")
        info.size = len(MEMBER)
        tar.addfile(info, io.BytesIO(MEMBER))
    return out.getvalue()


class Filled:
    """A cache that has entries in each of its own spaces."""

    def __init__(self, cache: forebay.Cache, server: ScriptedServer, stack: ExitStack) -> None:
        self.cache, self.url = cache, server.put("/a.bin", b"of the remote")
        self.tar, self.folder = server.put("/s.tar", shard()), http_directory(server, {"one": b"of a directory"})
        with cache.samples("train", 10) as samples:
            samples.put(1, b"a sample")
        self.pool = stack.enter_context(cache.prefetcher(Items(version=None), name="pool"))  # its session lasts as long
        self.shards = stack.enter_context(cache.prefetcher(TarSource([self.tar]), name="shards"))
        self.use()

    def use(self) -> None:
        """Everything is there, and right; what the cache lost it makes again."""
        cache = self.cache
        assert cache.read(self.url) == b"of the remote"
        with cache.directory(self.folder) as path:
            assert (Path(path) / "one").read_bytes() == b"of a directory"
        assert self.shards.get_lazy("s.tar/0.txt").get() == MEMBER
        assert cache.samples("train", 10).get(1) == b"a sample"
        assert self.pool.get_lazy("item").get() == body("item")

    def of(self, space: str) -> list[tuple[int, str]]:
        return sorted((entry.id, entry.key) for entry in self.cache.entries(space))


@pytest.fixture
def filled(cache: forebay.Cache, server: ScriptedServer) -> Iterator[Filled]:
    with ExitStack() as stack:
        yield Filled(cache, server, stack)


def set_item(cache: forebay.Cache, space: str, key: str) -> None:
    cache.space(space)[key] = b"mine"


def put_unpickled(cache: forebay.Cache, space: str, key: str) -> None:
    same = pickle.loads(pickle.dumps(cache.space(space)))
    try:
        same.put(key, b"mine")
    finally:
        same._fetcher.close()


DOORS: dict[str, Door] = {
    "put": lambda cache, space, key: cache.space(space).put(key, b"mine"),
    "[]=": set_item,
    "get_or_put": lambda cache, space, key: cache.space(space).get_or_put(key, lambda: b"mine"),
    "aget_or_put": lambda cache, space, key: asyncio.run(cache.space(space).aget_or_put(key, lambda: b"mine")),
    "unpickled": put_unpickled,
    "limited": lambda cache, space, key: cache.space(space, policy="lru").put(key, b"mine"),
    "tasks": lambda cache, space, key: cache.tasks(space).write(key, b"mine"),
    "prefetcher": lambda cache, space, key: cache.prefetcher(Items(), name=space).put(b"mine", key),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("space", OWN)
def test_no_door_stores_a_value_in_a_space_of_ours(filled: Filled, space: str, door: str) -> None:
    before = filled.of(space)
    assert before
    for key in (*(key for _, key in before), "new"):
        with pytest.raises(errors.ConfigError, match=f"'{space}'.*(use|choose) a") as caught:
            DOORS[door](filled.cache, space, key)
        assert caught.value.value == space
    assert filled.of(space) == before
    filled.use()
    assert filled.of(space) == before


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("space", OWN)
def test_without_a_cache_the_same_calls_are_refused(space: str, door: str) -> None:
    with forebay.Cache(enabled=False) as cache, pytest.raises(errors.ConfigError, match=f"'{space}'"):
        DOORS[door](cache, space, "key")


@pytest.mark.parametrize("space", OWN)
def test_a_key_that_begins_as_a_name_there_is_a_value_of_its_own(filled: Filled, space: str) -> None:
    before = filled.of(space)
    names = [f"{space}:{key}" for _, key in before]
    for name in names:
        assert filled.cache.put(name, b"mine")
        assert filled.cache.get_or_put(name, lambda: b"not made") == b"mine"
    assert filled.of(space) == before
    filled.use()
    assert all(filled.cache[name] == b"mine" for name in names)


@pytest.mark.parametrize("space", OWN)
def test_a_space_of_ours_is_read_listed_and_limited(filled: Filled, space: str) -> None:
    own, before = filled.cache.space(space, policy="lru", quota="10MB"), filled.of(space)
    assert sorted(own.keys()) == sorted(own) == sorted(key for _, key in before)
    assert len(own) == len(before)
    assert all(key in own for _, key in before)
    assert own.get("nothing") is None
    assert filled.cache.plan(space=space).victims or space == "sessions"  # a held entry is no victim until its lease ends
    filled.use()


def test_objects_are_read_and_removed_by_their_space(filled: Filled) -> None:
    urls = filled.cache.space("urls")
    assert urls[filled.url] == urls.get(filled.url) == b"of the remote"
    assert urls.evict(filled.url)
    assert filled.url not in urls
    assert filled.cache.read(filled.url) == b"of the remote"


def test_what_an_earlier_version_stored_there_is_still_read(cache: forebay.Cache) -> None:
    fetcher_of(cache).store.put("indexes", "mine", b"a value")
    space = cache.space("indexes")
    assert space.get("mine") == space["mine"] == b"a value"
    assert [of_space.name for of_space in cache.entries("indexes")] == ["indexes:mine"]
    assert space.evict("mine")
    assert "mine" not in space


def test_each_space_that_the_cache_fills_is_one_of_ours(filled: Filled) -> None:
    """A space that is added later is refused, too."""
    assert {entry.space for entry in filled.cache.entries()} - {"pool", "shards"} == set(OWN)


def test_values_are_the_users(cache: forebay.Cache) -> None:
    values = cache.space("values")
    assert values.put("a", b"1")
    values["b"] = b"2"
    assert values.get_or_put("c", lambda: b"3") == b"3"
    assert {key: bytes(cache[key]) for key in cache} == {"a": b"1", "b": b"2", "c": b"3"}
    for made in (cache.tasks, lambda name: cache.prefetcher(Items(), name=name)):
        with pytest.raises(errors.ConfigError, match="'values' is taken by the cache itself"):
            made("values")


def test_a_name_that_only_resembles_one_of_ours_is_free(cache: forebay.Cache) -> None:
    for name in ("URLs", "urls2", "url", " urls"):
        assert cache.space(name).put("key", b"mine")
        assert cache.tasks(name).write("tag", 1)
        with cache.prefetcher(Items(), name=name) as pool:
            assert pool.get_lazy("item").get() == body("item")


def test_the_error_says_what_to_do(cache: forebay.Cache) -> None:
    with pytest.raises(errors.ConfigError) as caught:
        cache.space("urls").put("http://host/a", b"mine")
    assert str(caught.value) == (
        "the space 'urls' takes no values, because the cache keeps its own entries there: use a space with another name"
    )
    with pytest.raises(errors.ConfigError, match=r"the name 'sessions' is taken by the cache itself, as are .*: choose another one"):
        cache.prefetcher(Items(), name="sessions")
