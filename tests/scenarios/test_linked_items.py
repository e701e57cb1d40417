"""A prefetcher over objects that the cache has already, from `Cache.read` or a `pull`: they get a second name, and nobody is asked."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.store import Store
from forebay.cache import fetcher_of
from forebay.sources import TarSource, UrlSource
from forebay.testing import ScriptedServer
from tests.harness import answers_of
from tests.items import until

SIZE = 300_000


def put(server: ScriptedServer, count: int = 3) -> dict[str, bytes]:
    bodies = {f"{number}.bin": os.urandom(SIZE) for number in range(count)}
    for name, body in bodies.items():
        server.put(f"/data/{name}", body)
    return bodies


def inodes(cache: forebay.Cache) -> dict[str, set[int]]:
    """Of the files of each space."""
    found: dict[str, set[int]] = {}
    for entry in cache.entries():
        if entry.kind == "blob":
            with cache.hold(entry) as path:
                found.setdefault(entry.space, set()).add(os.stat(path).st_ino)
    return found


@pytest.mark.parametrize(
    ("version", "options"), [(None, {"keep": False}), ("1", {"keep": False}), ("1", {}), (None, {"budget": "32MiB"})], ids=str
)
def test_objects_that_were_read_are_linked(
    root: Path, server: ScriptedServer, children: Callable[..., Any], version: str | None, options: dict[str, Any]
) -> None:
    bodies = put(server)
    with forebay.Cache(root, budget=64 << 20, min_free=0) as cache:
        for name, body in bodies.items():
            assert cache.read(f"{server.url}/data/{name}") == body
        gets, _ = answers_of(server)

        def rank() -> dict[str, bytes]:
            with forebay.Cache(root) as cache, cache.prefetcher(UrlSource(f"{server.url}/data", version=version), **options) as pool:
                lazies = {name: pool.get_lazy(name) for name in bodies}
                until(lambda: pool.count == len(lazies), "the items")
                files = inodes(cache)
                assert files["prefetch"] == files["urls"]
                return {name: lazy.get() for name, lazy in lazies.items()}

        assert children(rank).result() == bodies
        assert answers_of(server)[0] == gets
        assert cache.stats().fallbacks == 0
        if not options.get("keep", True):
            cache.put("next", b"x")  # who writes next sweeps what the child held
            assert {entry.space for entry in cache.entries()} == {"urls", "values"}
        assert cache.check(deep=True) == []


def test_a_linked_item_outlives_the_object(cache: forebay.Cache, server: ScriptedServer) -> None:
    bodies = put(server, 1)
    cache.read(f"{server.url}/data/0.bin")
    with cache.prefetcher(UrlSource(f"{server.url}/data", version="1")) as pool:
        assert pool.warm(bodies).failed == ()
        used = cache.stats().bytes_used
        cache.evict(f"{server.url}/data/0.bin")
        assert cache.stats().bytes_used < used, "each name is charged"
        assert pool.get_lazy("0.bin").get() == bodies["0.bin"]
    assert answers_of(server)[0] == 1


def test_what_changed_is_fetched(cache: forebay.Cache, server: ScriptedServer) -> None:
    """A source with a version asks once whether what the cache has is the remote's; the version was named later."""
    put(server, 1)
    url = f"{server.url}/data/0.bin"
    cache.read(url)
    new = os.urandom(SIZE)
    server.put("/data/0.bin", new)
    with cache.prefetcher(UrlSource(f"{server.url}/data", version="2")) as pool:
        assert pool.get_lazy("0.bin").get() == new
    assert answers_of(server) == (2, 0)


def test_within_max_age_nobody_is_asked_and_then_once(tmp_path: Path, server: ScriptedServer) -> None:
    bodies = put(server, 1)
    url = f"{server.url}/data/0.bin"
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0, max_age=60) as cache:
        cache.read(url)
        with cache.prefetcher(UrlSource(f"{server.url}/data")) as pool:
            assert pool.get_lazy("0.bin").get() == bodies["0.bin"]
        assert answers_of(server) == (1, 0)
        cache.invalidate(url)
        with cache.prefetcher(UrlSource(f"{server.url}/data"), name="again") as pool:
            assert pool.get_lazy("0.bin").get() == bodies["0.bin"]
        assert answers_of(server) == (1, 1)
        with cache.prefetcher(UrlSource(f"{server.url}/data"), name="third") as pool:
            assert pool.get_lazy("0.bin").get() == bodies["0.bin"]
        assert answers_of(server) == (1, 1)


def test_offline_what_was_pulled_is_enough(tmp_path: Path, server: ScriptedServer) -> None:
    bodies = put(server)
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        assert cache.warm(f"{server.url}/data/{name}" for name in bodies).failed == ()
    server.close()
    with forebay.Cache(tmp_path / "root", offline=True) as cache, cache.prefetcher(UrlSource(f"{server.url}/data")) as pool:
        assert {name: pool.get_lazy(name).get() for name in bodies} == bodies
        with pytest.raises(forebay.errors.Offline):
            pool.get_lazy("another").get()


def test_decoded_items_are_made_of_what_is_there(cache: forebay.Cache, server: ScriptedServer) -> None:
    bodies = put(server, 1)
    cache.read(f"{server.url}/data/0.bin")
    source = UrlSource(f"{server.url}/data", version="1")
    with cache.prefetcher(source, decode=lambda key, data: data[:10], store="decoded", codec="pickle", name="decoded") as pool:
        assert pool.get_lazy("0.bin").get() == bodies["0.bin"][:10]
    with cache.prefetcher(source, decode=lambda key, data: data[:10], name="raw") as pool:
        assert pool.get_lazy("0.bin").get() == bodies["0.bin"][:10]
        assert pool.warm(bodies).failed == ()
        files = inodes(cache)
        assert files["raw"] == files["urls"], "the object's own bytes are kept"
    assert answers_of(server)[0] == 1


def test_where_two_names_have_no_room_the_bytes_are_taken(tmp_path: Path, server: ScriptedServer) -> None:
    bodies = put(server, 1)
    with forebay.Cache(tmp_path / "root", budget=SIZE + 100_000, min_free=0) as cache:
        cache.read(f"{server.url}/data/0.bin")
        with cache.prefetcher(UrlSource(f"{server.url}/data", version="1")) as pool:
            lazy = pool.get_lazy("0.bin")
            until(lambda: pool.count == 1, "the item, for which the object made way")
            assert lazy.get() == bodies["0.bin"]
        assert answers_of(server)[0] == 1
        assert cache.check(deep=True) == []


def test_a_source_that_another_cache_is_bound_to(tmp_path: Path, server: ScriptedServer) -> None:
    """Its leases are of the other root, where the same number is of another entry."""
    bodies = put(server, 2)
    source = UrlSource(f"{server.url}/data", version="1")
    with (
        forebay.Cache(tmp_path / "a", budget=64 << 20, min_free=0) as mine,
        forebay.Cache(tmp_path / "b", budget=64 << 20, min_free=0) as other,
    ):
        mine.read(f"{server.url}/data/1.bin")
        other.read(f"{server.url}/data/0.bin")
        with mine.prefetcher(source) as pool, other.prefetcher(source):
            assert pool.warm(["0.bin"]).failed == ()
            assert pool.get_lazy("0.bin").get() == bodies["0.bin"]
        assert {entry.space for entry in mine.entries()} == {"urls", "prefetch"}, "it was damaged"
        assert mine.check(deep=True) == []


def test_a_damaged_object_is_read_from_the_source(cache: forebay.Cache, server: ScriptedServer) -> None:
    bodies = put(server, 1)
    with cache.local(f"{server.url}/data/0.bin") as path:
        os.truncate(path, 10)
    with cache.prefetcher(UrlSource(f"{server.url}/data", version="1")) as pool:
        assert pool.get_lazy("0.bin").get() == bodies["0.bin"]
    cache.repair()


def test_a_filesystem_object_is_identified_once_for_all_items(cache: forebay.Cache) -> None:
    """Its identity is the hash of a pickle."""
    calls: list[object] = []

    class Counted(type(pytest.importorskip("fsspec").filesystem("memory"))):  # type: ignore[misc]
        def __reduce__(self) -> Any:
            calls.append(self)
            return super().__reduce__()

    memory = Counted()
    bodies = {f"{number}.bin": os.urandom(SIZE) for number in range(5)}
    for name, body in bodies.items():
        memory.pipe_file(f"linked/{name}", body)
        cache.read(f"linked/{name}", filesystem=memory)
    with cache.prefetcher(UrlSource("linked", filesystem=memory, version="1")) as pool:
        calls.clear()
        for name, body in bodies.items():
            assert pool.get_lazy(name).get() == body
        assert pool.warm(bodies).failed == ()
        assert inodes(cache)["prefetch"] == inodes(cache)["urls"], "they are linked"
    assert len(calls) <= 2


def test_no_signature_is_logged_where_the_cache_cannot_be_looked_into(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        member = tarfile.TarInfo("0.bin")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"data"))
    url = server.put("/shard.tar", packed.getvalue())
    source = TarSource(f"{url}?X-Amz-Signature=SIKRIT")
    source.bind(fetcher_of(cache))
    view = Store.view

    def broken(self: Store, space: str, key: str) -> object:
        if space == "urls":
            raise errors.CacheFault(f"{key} cannot be looked for", key=key)
        return view(self, space, key)

    monkeypatch.setattr(Store, "view", broken)
    caplog.set_level("DEBUG")
    assert list(map(source.__getitem__, source.keys())) == [b"data"]
    assert "cannot be looked for" in caplog.text
    assert "SIKRIT" not in caplog.text


def test_members_of_a_shard_that_was_pulled(cache: forebay.Cache, server: ScriptedServer) -> None:
    packed = io.BytesIO()
    bodies = {f"{number}.bin": os.urandom(50_000) for number in range(20)}
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, body in bodies.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            tar.addfile(member, io.BytesIO(body))
    url = server.put("/shard.tar", packed.getvalue())
    cache.read(url)
    with cache.prefetcher(TarSource(url)) as pool:
        keys = list(pool.source.keys())
        found = {key.rpartition("/")[2]: data for key, data in zip(keys, pool.get_many(keys), strict=True)}
    assert found == bodies
    assert answers_of(server)[0] == 1
    server.put("/shard.tar", packed.getvalue() + b"x")
    with cache.prefetcher(TarSource(url), name="again") as pool:  # what the index says is of the version before
        assert pool.get_lazy(keys[0]).get() in bodies.values()


def test_what_is_cached_and_what_is_not_are_read_together(cache: forebay.Cache, server: ScriptedServer) -> None:
    names = [f"{number}.bin" for number in range(60)]
    urls = [server.put(f"/data/{name}", name.encode(), stall_after=1) for name in names]
    server.go.set()
    cache.read_many(urls[-3:])
    server.go.clear()
    with cache.prefetcher(UrlSource(f"{server.url}/data"), budget="32MiB", workers=16) as pool:
        lazies = [pool.get_lazy(name) for name in names]
        server.go.set()  # all are queued by now
        assert pool.warm(names).failed == ()
        assert [lazy.get() for lazy in lazies] == [name.encode() for name in names]
    assert server.gets == len(names)


class Asked(UrlSource):
    """Notes what a prefetcher asks it."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        super().__init__(prefix)
        self.sizes = list[str]()

    def size(self, key: str) -> int | None:
        self.sizes.append(key)
        return super().size(key)


class Leasing:
    """A source of a user's own, which leases what a cache has."""

    uri = "own://items"

    def __init__(self, cache: forebay.Cache, prefix: str) -> None:
        self._cache, self._prefix = cache, prefix
        self.reads: list[str] = []

    def __getitem__(self, key: str) -> bytes:
        self.reads.append(key)
        return bytes(self._cache.read(f"{self._prefix}/{key}"))

    def lease(self, key: str) -> forebay.Lease | None:
        if key == "2.bin":
            raise RuntimeError("no idea")
        return self._cache.local(f"{self._prefix}/{key}") if key != "1.bin" else None


def test_what_a_source_leases_is_linked(cache: forebay.Cache, server: ScriptedServer) -> None:
    bodies = put(server)
    with cache.prefetcher(source := Leasing(cache, f"{server.url}/data")) as pool:
        assert pool.warm(bodies).failed == ()
        assert {name: pool.get_lazy(name).get() for name in bodies} == bodies
        assert len(inodes(cache)["prefetch"] & inodes(cache)["urls"]) == 1
        assert len(inodes(cache)["prefetch"]) == 3
    assert sorted(source.reads) == ["1.bin", "2.bin"]


def test_what_a_source_leases_in_another_cache_is_read(cache: forebay.Cache, tmp_path: Path, server: ScriptedServer) -> None:
    """The same number is of another entry there."""
    bodies = put(server)
    with forebay.Cache(tmp_path / "other", budget=64 << 20, min_free=0) as other:
        with cache.prefetcher(source := Leasing(other, f"{server.url}/data")) as pool:
            assert {name: pool.get_lazy(name).get() for name in bodies} == bodies
        assert sorted(source.reads) == sorted(bodies)
        assert other.check(deep=True) == []


def test_only_local_files_are_asked_for_their_size(cache: forebay.Cache, server: ScriptedServer, tmp_path: Path) -> None:
    server.put("/data/a", b"remote")
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").write_bytes(b"local")
    sources = Asked(f"{server.url}/data"), Asked(tmp_path / "files")
    for source, body in zip(sources, (b"remote", b"local"), strict=True):
        with cache.prefetcher(source) as pool:
            assert pool.warm(["a"]).failed == ()
            assert pool.get_lazy("a").get() == body
    assert [set(source.sizes) for source in sources] == [set(), {"a"}]


def test_a_key_that_leads_out_of_the_source_fails_alone(cache: forebay.Cache, server: ScriptedServer) -> None:
    bodies = put(server)
    cache.read(f"{server.url}/data/0.bin")
    with cache.prefetcher(UrlSource(f"{server.url}/data")) as pool:
        report = pool.warm([*bodies, "../x"])
        assert (set(report.done), [key for key, _ in report.failed]) == (set(bodies), ["../x"])
        with pytest.raises(errors.ConfigError):
            pool.get_lazy("../x").get()
    assert answers_of(server)[0] == 3
