"""A prefetcher over objects of a remote that are entries of `urls`, as for `Cache.read`: one object, one entry."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.prefetch import Prefetcher, loader
from forebay.prefetch.loader import Loader
from forebay.remote import RemoteOptions
from forebay.sources import UrlSource
from forebay.testing import ScriptedServer
from tests.harness import MiB
from tests.items import until
from tests.processes import fork
from tests.remote_objects import NAMES, SIZE, assert_a_cache_that_fails_fails_no_item, body, put

Start = Callable[..., Any]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[forebay.Cache]:
    """A cache that has room for a few of the objects."""
    with forebay.Cache(tmp_path / "small", budget=1 * MiB, min_free=0) as cache:
        yield cache


def test_each_object_is_one_entry(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    cache.read_many(f"{prefix}/{name}" for name in NAMES[:10])
    with cache.prefetcher(prefix) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]
        assert (pool.used, pool.count) == (len(NAMES) * SIZE, len(NAMES))
    assert cache.read(f"{prefix}/19.bin") == body("19.bin")
    assert server.gets == len(NAMES)
    assert {entry.space for entry in cache.entries()} == {"urls"}
    assert cache.stats().fallbacks == 0


def test_the_next_job_fetches_nothing(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server)

    def job() -> list[bytes]:
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.prefetcher(prefix) as pool:
            return [*pool.stream(NAMES, ahead=8), *pool.get_many(NAMES)]

    for _ in range(2):
        assert children(job).result() == 2 * [body(name) for name in NAMES]
        assert server.gets == len(NAMES)


def test_what_changed_is_noticed_once_in_a_period(tmp_path: Path, server: ScriptedServer) -> None:
    prefix = put(server, ["0.bin"])
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, max_age=60) as cache, cache.prefetcher(prefix) as pool:
        assert list(pool.stream(["0.bin"])) == [body("0.bin")]
        new = os.urandom(SIZE)
        server.put("/d/0.bin", new)
        assert list(pool.stream(["0.bin"])) == [body("0.bin")]
        assert server.heads + server.gets == 1, "within the period nobody is asked"
        cache.invalidate(f"{prefix}/0.bin")
        assert list(pool.stream(["0.bin"])) == [new]
        asked = server.heads + server.gets
        assert pool.get_many(["0.bin"]) == [new]
        assert server.heads + server.gets == asked


def test_a_lazy_holds_its_object_until_it_is_read(small: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with small.prefetcher(prefix) as pool:
        lazy = pool.get_lazy("0.bin")
        until(lambda: lazy.done, "the object")
        small.read_many([f"{prefix}/{name}" for name in NAMES[1:]])
        gets = server.gets
        assert lazy.get() == body("0.bin")
        assert server.gets == gets
        small.read_many([f"{prefix}/{name}" for name in NAMES[1:]])
        assert small.entry(f"{prefix}/0.bin") is None, "it was evicted, once it was read"


def test_without_room_a_few_objects_wait_in_memory(small: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with small.prefetcher(prefix, workers=3) as pool:
        lazies = {name: pool.get_lazy(name) for name in NAMES}
        until(lambda: sum(lazy.done for lazy in lazies.values()) >= pool.count + 3, "those that wait")
        kept = pool.count
        assert kept >= 5
        assert kept + 3 <= server.gets <= kept + 2 * 3, "some were asked for before one was refused, and no more since"
        assert small.stats().fallbacks == 0
        for name in NAMES:
            assert lazies.pop(name).get() == body(name)
        assert server.gets <= len(NAMES) + 1  # the caller may take one that is about to be fetched


def test_a_prefetcher_that_does_not_wait_goes_on_without_room(small: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with small.prefetcher(prefix, workers=3, policy="lru") as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        until(lambda: all(lazy.done for lazy in lazies), "all of them")
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]


def test_what_is_only_warmed_is_held_by_those_that_want_it(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, NAMES[:2])
    server.objects["/d/0.bin"].stall_after = 100
    with cache.prefetcher(prefix) as pool, ThreadPoolExecutor(1) as aside:
        warm = aside.submit(pool.warm, NAMES[:2])
        try:
            assert server.stalled.wait(60)
            until(lambda: [entry.leased for entry in cache.entries()] == [False], "the other one")
            lazy = pool.get_lazy("1.bin")
            until(lambda: [entry.leased for entry in cache.entries()] == [True], "its lease")
            assert lazy.get() == body("1.bin")
        finally:
            server.go.set()
        assert warm.result().failed == ()


def test_an_object_larger_than_the_cache_occupies_no_place(small: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    large = [f"large{number}" for number in range(4)]
    put(server, large, size=2 * MiB)
    with small.prefetcher(prefix, workers=2) as pool:
        lazies = [pool.get_lazy(name) for name in large]
        assert pool.warm(NAMES[:5]).failed == ()
        assert [lazy.get() for lazy in lazies] == [body(name, 2 * MiB) for name in large]
        (failed,) = pool.warm(large[:1]).failed
        assert isinstance(failed[1], errors.NoSpace)


def test_the_remotes_error_is_raised_for_every_holder(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, ["0.bin"])
    with cache.prefetcher(prefix) as pool:
        lazies = [pool.get_lazy("none.bin") for _ in range(2)]
        for lazy in lazies:
            with pytest.raises(errors.NotFound):
                lazy.get()
        server.put("/d/none.bin", b"now")
        assert pool.get_lazy("none.bin").get() == b"now"


def test_what_another_process_fetches_is_waited_for(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server, ["0.bin"], stall_after=1000)
    put(server, ["1.bin"])
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.prefetcher(prefix) as pool:
        other = children(lambda: bytes(forebay.Cache(root).read(f"{prefix}/0.bin")))
        assert server.stalled.wait(60)
        lazy = pool.get_lazy("0.bin")
        assert pool.warm(["1.bin"]).failed == (), "others go on"
        assert not lazy.done
        server.go.set()
        until(lambda: lazy.done, "the object of the other process")
        assert (lazy.get(), other.result()) == (body("0.bin"), body("0.bin"))
    assert server.gets == 2


def test_a_killed_process_leaves_its_objects_to_the_others(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server, ["0.bin"], stall_after=1000)

    def first() -> None:
        pool = forebay.Cache(root, budget=64 * MiB, min_free=0).prefetcher(prefix)
        pool.get_lazy("0.bin").get()

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.prefetcher(prefix) as pool:
        other = children(first)
        assert server.stalled.wait(60)
        lazy = pool.get_lazy("0.bin")
        other.kill()
        server.go.set()
        until(lambda: lazy.done, "the object")
        assert lazy.get() == body("0.bin")


def test_after_a_fork_both_processes_go_on(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, stall_after=1)
    with cache.prefetcher(prefix, workers=4) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        assert server.stalled.wait(60)
        child = fork(lambda: [lazy.get() for lazy in lazies] + pool.get_many(NAMES))
        server.go.set()
        assert child.result() == 2 * [body(name) for name in NAMES]
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]
    assert cache.check(deep=True) == []


def test_spilled_objects_are_removed_with_their_last_holder(cache: forebay.Cache, server: ScriptedServer) -> None:
    with cache.prefetcher(put(server)) as pool:
        lazies = [pool.put(number) for number in range(5)]
        assert len(cache.entries("prefetch")) == 5
        assert lazies.pop().get() == 4
        del lazies
        gc.collect()
        until(lambda: cache.entries("prefetch") == [], "their end")


def test_limits_that_come_later_bind_what_comes_later(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    with cache.prefetcher(prefix) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES[:10]]
        pool.set_limits(budget=5 * SIZE)
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES[:10]]
        assert pool.get_many(NAMES) == [body(name) for name in NAMES]
        until(lambda: pool.used > 0, "the writer")
        assert pool.used <= 5 * SIZE


def test_other_threads_go_on_while_a_limit_is_set(cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting the first limit ends what loads until then, and waits for it: meanwhile a stream of another thread asks for more."""
    with cache.prefetcher(put(server)) as pool:
        before, close, found = pool.get_lazy("0.bin"), Loader.close, list[Any]()

        def closes(one: Loader, *args: Any, **options: Any) -> None:
            close(one, *args, **options)
            with ThreadPoolExecutor(1) as thread:
                found.extend(thread.submit(pool.get_many, NAMES).result())

        with monkeypatch.context() as patch:
            patch.setattr(Loader, "close", closes)
            pool.set_limits(budget=5 * SIZE)
        assert found == [body(name) for name in NAMES]
        assert before.get() == body("0.bin")
        until(lambda: 0 < pool.used <= 5 * SIZE, "the limit")


@pytest.mark.parametrize("kind", [KeyboardInterrupt, errors.CacheFault])
def test_a_limit_that_cannot_be_set_closes_no_prefetcher(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fails(*args: object, **options: object) -> None:
        raise kind("meanwhile")

    with cache.prefetcher(put(server)) as pool:
        pool.get_lazy("0.bin").get()
        with monkeypatch.context() as patch, pytest.raises(kind):
            patch.setattr(*((loader, "join", fails) if kind is KeyboardInterrupt else (Prefetcher, "_join", fails)))
            pool.set_limits(budget=5 * SIZE)
        assert not pool.closed
        assert pool.get_many(NAMES) == [body(name) for name in NAMES]


def test_a_prefetcher_that_is_closed_while_a_limit_is_set_stays_closed(
    cache: forebay.Cache, server: ScriptedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, close = cache.prefetcher(put(server)), Loader.close

    def closes(one: Loader, *args: Any, **options: Any) -> None:
        if not one.closed:
            pool.set_limits(budget=5 * SIZE)
        close(one)

    with monkeypatch.context() as patch:
        patch.setattr(Loader, "close", closes)
        pool.close()
    assert pool.closed


def test_a_closed_prefetcher_serves_what_it_handed_out(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server)
    pool = cache.prefetcher(prefix, workers=1)
    lazies = [pool.get_lazy(name) for name in NAMES]
    pool.close()
    with pytest.raises(RuntimeError):
        pool.get_lazy("0.bin")
    assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES]


def test_a_dropped_prefetcher_ends_its_thread(cache: forebay.Cache, server: ScriptedServer) -> None:
    pool = cache.prefetcher(put(server))
    assert pool.get_lazy("0.bin").get() == body("0.bin")
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "forebay-prefetch-writer"]
    del pool
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_what_nobody_holds_any_more_is_not_fetched(cache: forebay.Cache, server: ScriptedServer) -> None:
    prefix = put(server, stall_after=1)
    with cache.prefetcher(prefix, workers=2) as pool:
        lazies = [pool.get_lazy(name) for name in NAMES]
        assert server.stalled.wait(60)
        del lazies[2:]
        gc.collect()
        server.go.set()
        assert [lazy.get() for lazy in lazies] == [body(name) for name in NAMES[:2]]
    assert server.gets <= 4


def test_options_of_the_source_are_those_of_its_requests(cache: forebay.Cache, server: ScriptedServer) -> None:
    server.put("/d/0.bin", b"secret", require={"X-Key": "k"})
    with cache.prefetcher(UrlSource(f"{server.url}/d", options=RemoteOptions(headers={"X-Key": "k"}))) as pool:
        lazy = pool.get_lazy("0.bin")
        until(lambda: lazy.done, "the object")
        assert lazy.get() == b"secret"


def test_a_cache_that_fails_fails_no_item(cache: forebay.Cache, server: ScriptedServer, on_step: Any) -> None:
    prefix = put(server)
    with cache.prefetcher(prefix) as pool:
        assert_a_cache_that_fails_fails_no_item(cache, pool, on_step)


@pytest.mark.parametrize("version", [None, "1"])
def test_a_bulk_fetch_that_breaks_leaves_its_objects_to_the_callers(
    cache: forebay.Cache, server: ScriptedServer, on_step: Any, version: str | None
) -> None:
    """With a version the items are links."""
    prefix, broken = put(server), [True]

    def breaking(call: str, subject: str) -> None:
        if broken and call == "commit" and threading.current_thread().name.startswith("forebay-prefetch"):
            broken.clear()
            raise RuntimeError("broken")

    cache.read(server.put("/first", b"the space exists"))
    on_step(breaking)
    with cache.prefetcher(UrlSource(prefix, version=version)) as pool:
        assert pool.get_many(NAMES) == [body(name) for name in NAMES]
        assert pool.warm(NAMES).failed == ()
    assert not broken


def test_a_child_that_was_forked_while_it_waits_for_another_process(root: Path, server: ScriptedServer, children: Start) -> None:
    prefix = put(server, ["0.bin"], stall_after=1000)
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.prefetcher(prefix) as pool:
        other = children(lambda: bytes(forebay.Cache(root).read(f"{prefix}/0.bin")))
        assert server.stalled.wait(60)
        lazy = pool.get_lazy("0.bin")
        child = fork(lazy.get)
        server.go.set()
        assert child.result() == lazy.get() == other.result() == body("0.bin")
    assert server.gets == 1
