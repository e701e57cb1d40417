"""A prefetcher with limits, a version, or `keep=False` over objects of a remote: they are fetched into `urls`, and linked from there."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.catalog.transactions import Wal
from forebay._kernel import host
from forebay.prefetch.loader import Loader
from forebay.sources import UrlSource
from forebay.testing import ScriptedServer
from tests.harness import MiB, answers_of
from tests.items import files_below, until
from tests.processes import fork
from tests.remote_objects import NAMES, SIZE, assert_a_cache_that_fails_fails_no_item, body, put
from tests.servers.nginx import Nginx, nginx

LIMITED: list[dict[str, Any]] = [
    {"budget": "32MiB"}, {"max_count": 100, "policy": "lru"}, {"policy": "freeze"}, {"keep": False}, {"version": "1"},
]  # fmt: skip
Start = Callable[..., Any]


def pool_over(cache: forebay.Cache, prefix: str, *, version: str | None = None, **options: Any) -> Any:
    return cache.prefetcher(UrlSource(prefix, version=version), **options)


def names_of_files(cache: forebay.Cache) -> set[int]:
    """How many names the files of objects have."""
    return {os.stat(path).st_nlink for path in files_below(cache.path / "blobs")}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nginx]:
    with nginx(tmp_path_factory.mktemp("nginx") / "server") as server:
        for name in NAMES:
            server.put(name, body(name))
        yield server


def requests(server: Nginx) -> int:
    return len(server.lines())


@pytest.mark.parametrize("options", [*LIMITED, {"budget": "32MiB", "size": 100}], ids=str)
def test_an_item_that_is_asked_for_again_before_it_is_linked(
    root: Path, server: ScriptedServer, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two loads of one key are linked in one transaction: each has what it asked for, and nothing of the cache is lost."""
    options = dict(options)
    data = os.urandom(options.pop("size", 20_000))
    server.put("/d/a", data)
    link, counts = Loader._link, list[int]()

    def link_two(loader: Loader) -> None:
        if len(loader._links) > 1:
            counts.append(len({ref.name for ref, _ in loader._links}))
            link(loader)

    monkeypatch.setattr(Loader, "_link", link_two)
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        assert cache.put("before", b"stays")
        with pool_over(cache, server.url + "/d/", **options) as pool:
            assert pool.get_lazy("a").get() == data
            again = pool.get_lazy("a")
            assert again.get() == data
            until(lambda: counts)
            assert again.get() == data
        assert counts == [1]
        assert cache.get("before") == b"stays"
        assert cache.check(deep=True) == []


@pytest.mark.rotates
@pytest.mark.parametrize(("first", "options"), [*(("prefetcher", options) for options in LIMITED), ("read", LIMITED[0])], ids=str)
def test_what_either_fetched_the_other_does_not_fetch(
    root: Path, real: Nginx, children: Start, options: dict[str, Any], first: str
) -> None:
    """Nor does the next process, whose prefetcher without a version has a session of its own."""
    before = requests(real)

    def prefetch() -> None:
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, pool_over(cache, real.url, **options) as pool:
            lazies = [pool.get_lazy(name) for name in NAMES]
            until(lambda: pool.count == len(NAMES), "their names")
            assert names_of_files(cache) == {2}
            assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]

    def read() -> None:
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
            assert [cache.read(f"{real.url}/{name}") for name in NAMES] == [body(name) for name in NAMES]

    for job in (prefetch, read, prefetch) if first == "prefetcher" else (read, prefetch, prefetch):
        children(job).result()
        asked = [line.split()[5].strip('"') for line in real.lines()[before:]]
        assert asked.count("GET") == len(NAMES)
    with forebay.Cache(root) as cache:
        assert cache.check(deep=True) == []


@pytest.mark.parametrize("options", [{"version": "1"}, {"budget": "5%"}, {"budget": "100%"}], ids=str)
def test_objects_make_way_for_their_second_names_if_a_pool_may_fill_the_cache(root: Path, options: dict[str, Any]) -> None:
    """The budget counts both names: without this half as much would fit. A small pool leaves the objects where they are."""
    names = [f"{number}" for number in range(100)]
    with ScriptedServer() as server, forebay.Cache(root, budget=len(names) * SIZE * 5 // 4, min_free=0) as cache:
        prefix = put(server, names)
        with pool_over(cache, prefix, **options) as pool:
            for _ in range(2):
                assert list(pool.stream(names)) == [body(name) for name in names]
                names.reverse()
        assert cache.stats().requests <= 1.1 * len(names)  # a few were on trial
        if "5%" in options.values():
            assert {entry.used > 0 for entry in cache.entries("urls")} == {True}
        else:
            assert {entry.used for entry in cache.entries("urls")} <= {0.0}


def test_links_are_made_in_groups(cache: forebay.Cache, real: Nginx, on_step: Any) -> None:
    cache.read_many(f"{real.url}/{name}" for name in NAMES)
    steps: list[str] = []
    on_step(lambda call, subject: steps.append(call if call == "commit" or (call == "link" and "/blobs/" in subject) else ""))
    with pool_over(cache, real.url, budget="32MiB", workers=16) as pool:
        assert pool.warm(NAMES).failed == ()
    groups = [group.count("link") for group in " ".join(steps).split("commit") if "link" in group]
    assert (sum(groups), max(groups) <= 16) == (len(NAMES), True)
    assert len(groups) <= len(NAMES) // 2, groups


def test_small_objects_are_values_of_the_catalog_and_large_ones_are_links(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, ["small"], size=10_000)
    put(server, ["large"], size=2 * MiB)
    put(server, ["empty"], size=0)
    with pool_over(cache, prefix, version="1") as pool:
        assert pool.warm(["small", "large", "empty"]).failed == ()
        kinds = {entry.key.partition("~")[0].rpartition("/")[2]: entry.kind for entry in cache.entries("prefetch")}
        assert kinds == {"small": "value", "large": "blob", "empty": "value"}
        assert pool.get_many(["small", "large", "empty"]) == [body("small", 10_000), body("large", 2 * MiB), b""]
        assert names_of_files(cache) == {1, 2}
        assert cache.stats().bytes_stored == 2 * MiB + 2 * 10_000, "a link stores nothing"


def test_without_room_in_urls_the_bytes_are_written(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    cache.space("urls", quota=50_000)
    with pool_over(cache, prefix, budget=16 * MiB) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        until(lambda: pool.count == len(NAMES), "the items")
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]
        assert pool.get_many(NAMES) == [body(name) for name in NAMES]
        assert (pool.count, cache.entries("urls")) == (len(NAMES), [])
    assert server.gets == len(NAMES)


@pytest.mark.parametrize("policy", ["wait", "lru"])
def test_where_the_root_has_no_room_for_two_names_the_object_makes_way(tmp_path: Path, server: ScriptedServer, policy: str) -> None:
    prefix = put(server)
    with forebay.Cache(tmp_path / "tiny", budget=5 * SIZE, min_free=0) as cache:
        with pool_over(cache, prefix, budget=4 * SIZE, policy=policy, workers=3) as pool:
            assert list(pool.stream(NAMES, ahead=4)) == [body(name) for name in NAMES]
            report = pool.warm(NAMES)
            assert policy == "lru" or report.failed == ()
        assert cache.check(deep=True) == []


def test_the_limit_holds_while_lazies_hold_all_and_each_object_is_fetched_once(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with pool_over(cache, prefix, budget=5 * SIZE, workers=3) as pool:
        lazies = {name: pool.get_lazy(name) for name in NAMES}
        until(lambda: pool.count == 5 or pool.used > 4 * SIZE, "as many as fit")
        for name in NAMES:
            assert lazies.pop(name).get() == body(name)
            assert pool.used <= 5 * SIZE
    assert server.gets == len(NAMES)


def test_what_a_frozen_prefetcher_does_not_admit_is_fetched_once(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with pool_over(cache, prefix, budget=5 * SIZE, policy="freeze") as pool:
        for _ in range(2):
            assert list(pool.stream(NAMES)) == [body(name) for name in NAMES]
        assert 0 < pool.count <= 5
    assert server.gets == len(NAMES)


def test_without_keep_a_link_goes_with_its_last_holder_and_the_object_stays(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with pool_over(cache, prefix, keep=False) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        until(lambda: pool.count == len(NAMES), "the items")
        del lazies
        gc.collect()
        until(lambda: cache.entries("prefetch") == [], "their end")
        assert len(cache.entries("urls")) == len(NAMES)
        assert pool.get_many(NAMES) == [body(name) for name in NAMES]
    assert server.gets == len(NAMES)


@pytest.mark.parametrize("version", [None, "1"])
def test_with_a_version_what_was_fetched_since_is_not_asked_for_again(tmp_path: Path, server: ScriptedServer, version: str | None) -> None:
    """Without one an item that is loaded again follows the rules of `urls`."""
    prefix = put(server, ["0.bin"])
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, max_age=0) as cache:
        with pool_over(cache, prefix, version=version, keep=False) as pool:
            for _ in range(3):
                assert pool.warm(["0.bin"]).failed == ()
                until(lambda: cache.entries("prefetch") == [], "its end")
        assert answers_of(server) == (1, 0 if version else 2)


def test_an_item_of_a_version_is_never_asked_for_again(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server, ["0.bin"])

    def job() -> list[bytes]:
        with forebay.Cache(root, budget=64 * MiB, min_free=0, max_age=0) as cache, pool_over(cache, prefix, version="1") as pool:
            return [*pool.get_many(["0.bin"]), *pool.stream(["0.bin"])]

    for _ in range(2):
        assert children(job).result() == 2 * [body("0.bin")]
        assert server.gets + server.heads == 1
        server.put("/d/0.bin", b"another version")


def is_writer() -> bool:
    return threading.current_thread().name == "forebay-prefetch-writer"


def test_until_it_is_linked_an_object_is_served_from_the_file_of_urls(
    cache: forebay.Cache, server: ScriptedServer, another_writes: Any
) -> None:
    prefix = put(server, ["0.bin", "1.bin"])
    cache.read(f"{prefix}/0.bin")
    with pool_over(cache, prefix, version="1") as pool:
        assert pool.warm(["1.bin"]).failed == ()
        other = another_writes()
        lazy, same = (pool.get_lazy("0.bin") for _ in range(2))
        assert lazy.get() == body("0.bin")
        assert pool.count == 1
        assert fork(same.get).result() == body("0.bin")
        other.say("go on")
        assert pool.warm(["0.bin"]).failed == ()
    assert answers_of(server)[0] == 2


def test_a_file_that_is_damaged_before_it_is_linked_is_fetched_again(cache: forebay.Cache, server: ScriptedServer, on_step: Any) -> None:
    prefix = put(server, ["0.bin"])
    harmed: list[str] = []

    def harm(call: str, subject: str) -> None:
        if is_writer() and not harmed and cache.entries("urls"):
            harmed.extend(files_below(cache.path / "blobs"))
            os.chmod(harmed[0], 0o600)
            os.truncate(harmed[0], 10)

    on_step(harm)
    with pool_over(cache, prefix, version="1") as pool:
        pool.warm(["0.bin"])
        assert [pool.get_lazy("0.bin").get() for _ in range(2)] == 2 * [body("0.bin")]
    assert harmed
    cache.repair()


def test_what_another_call_fetches_is_waited_for_and_others_go_on(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server, ["0.bin"], stall_after=1000)
    put(server, ["1.bin"])
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, pool_over(cache, prefix, budget="32MiB", workers=1) as pool:
        other = children(lambda: bytes(forebay.Cache(root).read(f"{prefix}/0.bin")))
        assert server.stalled.wait(60)
        lazy = pool.get_lazy("0.bin")
        assert pool.warm(["1.bin"]).failed == (), "others go on"
        assert not lazy.done
        server.go.set()
        until(lambda: pool.count == 2, "its name")
        assert (lazy.get(), other.result()) == (body("0.bin"), body("0.bin"))
        assert names_of_files(cache) == {2}
    assert server.gets == 2


def test_an_item_that_another_process_makes_is_waited_for(root: Path, server: ScriptedServer, children: Start) -> None:
    """It holds the key of the item; a caller waits for that one, too."""
    prefix = put(server, ["0.bin", "1.bin"], stall_after=1000)

    def load() -> bytes:
        with forebay.Cache(root) as cache, pool_over(cache, prefix, version="1") as pool:
            data: bytes = pool.get_lazy("0.bin").get()
            return data

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, pool_over(cache, prefix, version="1") as pool:
        other = children(load)
        assert server.stalled.wait(60)
        lazy = pool.get_lazy("0.bin")
        got: list[bytes] = []
        caller = threading.Thread(target=lambda: got.append(pool.get_lazy("0.bin").get()))
        caller.start()
        server.go.set()
        caller.join(60)
        assert [*got, lazy.get(), other.result()] == 3 * [body("0.bin")]
    assert server.gets == 1


def test_a_killed_process_leaves_its_objects_to_the_others(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server, ["0.bin"], stall_after=1000)
    put(server, ["1.bin"])

    def first() -> None:
        pool_over(forebay.Cache(root, budget=64 * MiB, min_free=0), prefix, version="1").get_lazy("0.bin").get()

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, pool_over(cache, prefix, version="1") as pool:
        other = children(first)
        assert server.stalled.wait(60)
        lazy = pool.get_lazy("0.bin")
        assert pool.warm(["1.bin"]).failed == (), "those behind it are looked for later"
        other.kill()
        server.go.set()
        until(lambda: pool.count == 2, "the item: no caller needs to take it over")
        assert lazy.get() == body("0.bin")


def test_a_kill_in_the_middle_of_a_group_leaves_nothing(root: Path, real: Nginx, children: Start) -> None:
    """Neither names nor rows, nor leases; and no object is fetched again."""

    def die(call: str, subject: str) -> None:
        if call == "link" and "/blobs/" in subject:
            steps.append(subject)
            if len(steps) == 3:
                os.kill(os.getpid(), signal.SIGKILL)

    steps: list[str] = []

    def first() -> None:
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
            cache.read_many(f"{real.url}/{name}" for name in NAMES)
            with pool_over(cache, real.url, budget="32MiB", workers=16) as pool:
                host.on_step(die)
                pool.warm(NAMES)

    children(first).wait()
    before = requests(real)
    with forebay.Cache(root) as cache:
        cache.put("next", b"x")  # sweeps
        assert cache.entries("prefetch") == []
        entries = cache.entries("urls")
        assert len(entries) == len(NAMES)
        assert names_of_files(cache) == {1}
        assert not any(entry.leased for entry in entries)
        assert cache.check(deep=True) == []
        with pool_over(cache, real.url, budget="32MiB") as pool:
            assert pool.warm(NAMES).failed == ()
        assert names_of_files(cache) == {2}
    assert requests(real) == before


@pytest.mark.parametrize("options", LIMITED, ids=str)
def test_after_a_fork_both_processes_go_on(cache: forebay.Cache, server: ScriptedServer, options: dict[str, Any]) -> None:
    prefix = put(server, stall_after=1)
    with pool_over(cache, prefix, workers=4, **options) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        assert server.stalled.wait(60)
        child = fork(lambda: [lazy.get() for lazy in lazies] + pool.get_many(NAMES))
        server.go.set()
        assert child.result() == 2 * [body(name) for name in NAMES]
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]
    assert server.gets == len(NAMES)


def test_closed_in_the_middle_it_stores_what_is_under_way_and_fetches_no_more(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, stall_after=1)
    pool = pool_over(cache, prefix, version="1", workers=4)
    lazies = [pool.get_lazy(name) for name in NAMES]
    assert server.stalled.wait(60)
    closing = threading.Thread(target=pool.close)
    closing.start()
    until(lambda: pool.closed, "the beginning of the end")
    server.go.set()
    closing.join(60)
    assert not closing.is_alive()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("forebay-prefetch")]
    assert 0 < server.gets <= 8
    assert pool.count == server.gets == len(cache.entries("urls"))
    with pytest.raises(RuntimeError):
        pool.get_lazy("0.bin")
    assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]


def test_a_dropped_prefetcher_ends_its_thread(cache: forebay.Cache, server: ScriptedServer) -> None:
    pool = pool_over(cache, put(server), version="1")
    assert pool.get_lazy("0.bin").get() == body("0.bin")
    (thread,) = [thread for thread in threading.enumerate() if thread.name.startswith("forebay-prefetch")]
    del pool
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_nobody_holds_any_more_is_not_fetched(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, stall_after=1)
    with pool_over(cache, prefix, version="1", workers=2) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        assert server.stalled.wait(60)
        del lazies[2:]
        gc.collect()
        server.go.set()
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES[:2]]
    assert server.gets <= 4


def test_the_remotes_error_is_raised_for_every_holder(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, ["0.bin"])
    with pool_over(cache, prefix, version="1") as pool:
        report = pool.warm(["0.bin", "none.bin", "../x"])
        assert report.done == ("0.bin",)
        assert [type(error) for _, error in report.failed] == [errors.NotFound, errors.ConfigError]
        lazies = [pool.get_lazy("none.bin") for _ in range(2)]
        for lazy in lazies:
            with pytest.raises(errors.NotFound):
                lazy.get()
        server.put("/d/none.bin", b"now")
        assert pool.get_lazy("none.bin").get() == b"now"


def test_a_cache_that_fails_fails_no_item(cache: forebay.Cache, server: ScriptedServer, on_step: Any) -> None:
    prefix = put(server)
    with pool_over(cache, prefix, version="1") as pool:
        assert_a_cache_that_fails_fails_no_item(cache, pool, on_step)


@pytest.mark.parametrize("options", [*LIMITED, {}], ids=str)
def test_on_a_disk_that_cannot_be_read_items_come_from_the_source(
    cache: forebay.Cache, server: ScriptedServer, on_step: Any, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """As on XFS after it has shut itself down: each look at a file of the catalog fails."""

    def dead(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    prefix = put(server)
    with pool_over(cache, prefix, workers=2, **options) as pool:
        assert list(pool.stream(NAMES[:4], ahead=2)) == [body(name) for name in NAMES[:4]]
        with monkeypatch.context() as patch:
            patch.setattr(Wal, "files", dead)
            on_step(dead)
            for names in (NAMES[:8], NAMES[:8]):
                assert list(pool.stream(names, ahead=3)) == [body(name) for name in names]
            assert [pool.get_lazy(name).get() for name in NAMES] == [body(name) for name in NAMES]
            assert pool.get_many(NAMES) == [body(name) for name in NAMES]
            on_step(None)
        assert cache.stats().fallbacks > 0
        assert pool.warm(NAMES).failed == ()


def test_limits_that_come_later_bind_what_comes_later(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with pool_over(cache, prefix, version="1") as pool:
        assert pool.warm(NAMES).failed == ()
        pool.set_limits(budget=5 * SIZE)
        assert pool.get_many(NAMES) == [body(name) for name in NAMES]
        until(lambda: 0 < pool.used <= 5 * SIZE, "the lower limit")
    assert server.gets == len(NAMES)
