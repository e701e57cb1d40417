"""The prefetcher as a program uses it: lazies, limits, what is shared and what is kept."""

from __future__ import annotations

import errno
import gc
import logging
import pickle
import random
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

import pytest

import forebay
from forebay import errors
from forebay.prefetch import PassThrough, Prefetcher, loader, loads
from forebay.sources import DecodedSource, SourceInfo
from tests.harness import MiB
from tests.items import HANG, Items, Sized, body, threads_named, until
from tests.processes import Gate, fork, in_child
from tests.strikes import soon, strike_once

KEYS = [f"k{i}" for i in range(40)]


@pytest.fixture
def source() -> Items:
    return Items()


@pytest.fixture
def pool(cache: forebay.Cache, source: Items) -> Iterator[Prefetcher]:
    with cache.prefetcher(source, workers=2) as pool:
        yield pool
        source.go()


@pytest.fixture
def lone(cache: forebay.Cache, source: Items) -> Iterator[Prefetcher]:
    """One with a single worker, so that what stands behind its read is queued."""
    with cache.prefetcher(source, workers=1) as pool:
        yield pool
        source.go()


def in_thread(work: Any, *, waits: bool = False) -> Any:
    """Run it aside; the call that this gives waits for what it gave, or raises what it raised. ``waits``: return once it waits for
    another thread."""
    got: list[Any] = []

    def run() -> None:
        try:
            got.append((True, work()))
        except BaseException as error:
            got.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: not waits or is_waiting(thread))

    def result() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        good, value = got[0]
        if not good:
            raise value
        return value

    return result


def is_waiting(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_name == "wait"


def kept(cache: forebay.Cache, space: str = "prefetch") -> set[str]:
    """The keys of the items that are in the cache."""
    names = [entry.key.rpartition("~")[0].rpartition("/")[2] for entry in cache.entries(space)]
    return {name for name in names if name}


# -- what the interface promises, with a cache and without -------------------------------------------------------------


@pytest.fixture(params=["cache", "decoded", "off", "read-only", "bare"])
def any_pool(request: pytest.FixtureRequest, cache: forebay.Cache, source: Items, tmp_path: Path) -> Iterator[Any]:
    how = {"off": {"enabled": False}, "read-only": {"read_only": True}}.get(request.param, {})
    with forebay.Cache(tmp_path / "root", **how) as home:
        store = "decoded" if request.param == "decoded" else "raw"
        with PassThrough(source) if request.param == "bare" else home.prefetcher(source, store=store) as pool:
            assert isinstance(pool, Prefetcher) == (request.param in ("cache", "decoded"))
            yield pool


def test_a_lazy_gives_its_item(any_pool: Any) -> None:
    lazy = any_pool.get_lazy("a")
    assert lazy.key == "a"
    value = lazy.get()
    assert type(value) is bytes
    assert value == body("a")
    assert lazy.done
    assert lazy.get() is value


def test_many_in_order(any_pool: Any) -> None:
    assert any_pool.get_many(KEYS) == [body(key) for key in KEYS]
    assert list(any_pool.stream(iter(KEYS), ahead=7)) == [body(key) for key in KEYS]
    assert list(any_pool.stream(KEYS, ahead=0)) == [body(key) for key in KEYS]
    assert any_pool.get_many([]) == []
    assert any_pool.get_many(["a", "b", "a"]) == [body("a"), body("b"), body("a")]
    assert any_pool.get("a") == body("a")


def test_what_the_source_raises_is_raised(any_pool: Any, source: Items) -> None:
    source.faults["bad"] = fault = ZeroDivisionError("the source's own")
    lazy = any_pool.get_lazy("bad")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError) as raised:
            lazy.get()
        assert raised.value is fault
    with pytest.raises(ZeroDivisionError):
        any_pool.get("bad")
    with pytest.raises(ZeroDivisionError):
        any_pool.get_many(["a", "bad"])
    del source.faults["bad"]
    assert any_pool.get_lazy("bad").get() == body("bad")


def test_provenance_is_collected(any_pool: Any) -> None:
    class Sample:
        __sources__ = None

    info, more = SourceInfo("test://items", "a", None, ("a",)), SourceInfo("test://items", "b", None, ("b",))
    lazy, other = any_pool.get_lazy("a"), any_pool.get_lazy("b")
    assert lazy.source == info
    for _ in range(2):  # at a second get too
        sample: dict[str, Any] = {"__key__": "x"}
        lazy.get(sample)
        other.get(sample)
        assert sample["__sources__"] == (info, more)
    thing = Sample()
    lazy.get(thing)
    assert thing.__sources__ == (info,)
    sample = {"__sources__": (more,)}
    any_pool.get("a", sample)
    assert sample["__sources__"] == (more, info)
    assert lazy.get(object()) == body("a")  # what cannot take it is left alone


def test_lazies_are_equal_by_source_and_key(any_pool: Any) -> None:
    first, second, other = any_pool.get_lazy("a"), any_pool.get_lazy("a"), any_pool.get_lazy("b")
    assert first == second
    assert first != other
    assert first != "a"
    assert {first: 1}[second] == 1
    assert len({first, second, other}) == 2
    before = hash(first)
    first.get()
    assert (first == second, hash(first)) == (True, before)


def test_put_gives_back_the_object(any_pool: Any) -> None:
    lazy = any_pool.put({"a": [1, 2]}, "notes")
    assert lazy.key == "notes"
    assert lazy.get() == {"a": [1, 2]}
    assert lazy.get() is lazy.get()
    assert any_pool.put(None).get() is None
    assert any_pool.put(1, "same") != any_pool.put(1, "same")


def test_a_closed_prefetcher_refuses_calls(any_pool: Any) -> None:
    lazy, spilled = any_pool.get_lazy("a"), any_pool.put("x")
    assert not any_pool.closed
    any_pool.close()
    any_pool.close()
    assert any_pool.closed
    for call in (lambda: any_pool.get_lazy("b"), lambda: any_pool.put(1), lambda: any_pool.get_many(["b"])):
        with pytest.raises(errors.Closed):
            call()
        with pytest.raises(RuntimeError):
            call()
    assert lazy.get() == body("a")
    assert spilled.get() == "x"


def test_an_empty_item(any_pool: Any, source: Items) -> None:
    source.sizes["empty"] = 0
    assert any_pool.get_lazy("empty").get() == b""


def test_a_prefetcher_takes_a_decode_function(cache: forebay.Cache, source: Items, tmp_path: Path) -> None:
    off = forebay.Cache(tmp_path / "off", enabled=False)
    for home in (cache, off):
        with home.prefetcher(source, decode=lambda key, data: (key, len(data))) as pool:
            assert pool.get_lazy("a").get() == ("a", 2000)
            assert pool.get("b") == ("b", 2000)
            assert pool.get_many(["c"]) == [("c", 2000)]


# -- get: whatever the state of the load -------------------------------------------------------------------------------


def test_done_it_is_read_from_the_cache(cache: forebay.Cache, pool: Prefetcher, source: Items) -> None:
    lazy = pool.get_lazy("a")
    until(lambda: kept(cache) == {"a"})
    assert lazy.done
    assert lazy.get() == body("a")
    assert source.reads == ["a"]
    assert pool.get_lazy("a").get() == body("a")
    assert source.reads == ["a"]


def test_running_it_is_waited_for(pool: Prefetcher, source: Items, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("REPORT_AFTER", "WATCH"):
        monkeypatch.setattr(loader, name, 3600.0)  # a waiter wakes by itself too, but later than this test waits
    source.stop("a")
    lazy = pool.get_lazy("a")
    source.wait("a")
    assert not lazy.done
    waits = in_thread(lazy.get, waits=True)
    source.go("a")
    assert waits() == body("a")
    assert source.reads == ["a"]


def test_queued_it_is_read_by_who_wants_it(lone: Prefetcher, source: Items) -> None:
    source.stop("busy")
    busy, queued = lone.get_lazy("busy"), lone.get_lazy("queued")
    source.wait("busy")
    assert queued.get() == body("queued")
    assert (source.reads, source.threads[1]) == (["busy", "queued"], threading.current_thread().name)
    source.go("busy")
    assert busy.get() == body("busy")
    assert source.reads == ["busy", "queued"]


def test_an_overtaken_load_is_kept_for_its_other_holders(cache: forebay.Cache, lone: Prefetcher, source: Items) -> None:
    source.stop("busy")
    busy, mine, others = lone.get_lazy("busy"), lone.get_lazy("a"), lone.get_lazy("a")
    source.wait("busy")
    assert mine.get() == body("a")
    del mine
    until(lambda: "a" in kept(cache), "the item")  # though the worker is at another one
    assert others.get() == body("a")
    assert source.reads == ["busy", "a"]
    source.go()
    busy.get()


def test_two_threads_want_one_queued_item(lone: Prefetcher, source: Items) -> None:
    source.stop("busy", "a")
    busy, one, two = lone.get_lazy("busy"), lone.get_lazy("a"), lone.get_lazy("a")
    source.wait("busy")
    first = in_thread(one.get)
    source.wait("a")
    second = in_thread(two.get, waits=True)
    source.go()
    assert first() == second() == body("a")
    assert source.reads == ["busy", "a"]
    busy.get()


def test_one_lazy_in_many_threads_gives_one_object(pool: Prefetcher, source: Items) -> None:
    source.stop("a")
    lazy = pool.get_lazy("a")
    source.wait("a")
    results = [in_thread(lazy.get) for _ in range(8)]
    source.go()
    values = [result() for result in results]
    assert all(value is values[0] for value in values)
    assert lazy.get() is values[0]


def test_a_decoder_runs_once_for_a_lazy(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, decode=lambda key, data: [key]) as pool:
        lazy = pool.get_lazy("a")
        lazy.get().append("changed by its owner")
        assert lazy.get() == ["a", "changed by its owner"]
        assert pool.get_lazy("a").get() == ["a"]


def test_a_failure_reaches_every_holder_and_the_next_tries_again(pool: Prefetcher, source: Items) -> None:
    source.stop("a")
    source.faults["a"] = KeyError("not today")
    holders = [pool.get_lazy("a") for _ in range(3)]
    source.wait("a")
    waits = [in_thread(lazy.get) for lazy in holders]
    source.go("a")
    for wait in waits:
        with pytest.raises(KeyError, match="not today"):
            wait()
    assert source.reads == ["a"]
    del source.faults["a"]
    assert pool.get_lazy("a").get() == body("a")
    assert source.reads == ["a", "a"]
    with pytest.raises(KeyError):
        holders[0].get()  # its own answer stays what it was


def test_a_failure_is_not_remembered_by_the_cache(cache: forebay.Cache, pool: Prefetcher, source: Items) -> None:
    source.faults["a"] = OSError("gone")
    with pytest.raises(OSError, match="gone"):
        pool.get_lazy("a").get()
    assert kept(cache) == set()
    source.faults.clear()
    with cache.prefetcher(source) as other:
        assert other.get_lazy("a").get() == body("a")


@pytest.mark.parametrize("fault", [SystemExit, KeyboardInterrupt])
def test_not_even_an_exit_ends_a_worker(lone: Prefetcher, source: Items, fault: type[BaseException]) -> None:
    source.stop("a")
    source.faults["a"] = fault()
    lazy = lone.get_lazy("a")
    source.wait("a")
    wait = in_thread(lazy.get, waits=True)
    source.go("a")
    with pytest.raises(fault):
        wait()
    after = lone.get_lazy("b")
    until(lambda: after.done)
    assert source.threads[-1].startswith("forebay-prefetch")


# -- what is asked for, and what is read -------------------------------------------------------------------------------


def test_get_reads_past_the_cache(cache: forebay.Cache, pool: Prefetcher, source: Items) -> None:
    assert pool.get("a") == pool.get("a") == body("a")
    assert source.reads == ["a", "a"]
    assert kept(cache) == set()
    pool.get_lazy("a").get()
    assert pool.get("a") == body("a")
    assert source.reads == ["a"] * 4


@pytest.mark.parametrize("key", ["", None, 3, b"a"])
def test_a_key_that_is_none(pool: Prefetcher, key: Any) -> None:
    with pytest.raises(errors.ConfigError, match="key"):
        pool.get_lazy(key)


@pytest.mark.parametrize("key", ["a/b", "a b", "ä", "~", "a~b", "x:y", "../up", "%2F", "k" * 3000, "\ud800", "a\0b"], ids=ascii)
def test_keys_are_any_text(cache: forebay.Cache, pool: Prefetcher, source: Items, key: str) -> None:
    lazy = pool.get_lazy(key)
    assert lazy.get() == source.body(key)
    del lazy
    until(lambda: pool.count == 1)
    assert pool.get_lazy(key).get() == source.body(key)
    assert source.reads == [key]


@pytest.mark.parametrize(
    "wrong", [{"store": "cooked"}, {"workers": 0}, {"max_count": -1}, {"policy": "fifo"}, {"codec": "yaml"}, {"name": ""}, {"name": "a:b"}]
)
def test_settings_that_make_no_sense(cache: forebay.Cache, source: Items, wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError):
        cache.prefetcher(source, **wrong)


def test_a_source_that_gives_something_else_than_bytes(cache: forebay.Cache) -> None:
    class Odd:
        uri, version = "test://odd", "1"

        def __getitem__(self, key: str) -> Any:
            return {"array": bytearray(b"abc"), "view": memoryview(b"abc")}.get(key, 17)

    with cache.prefetcher(Odd()) as pool:
        for key in ("array", "view"):
            assert pool.get_lazy(key).get() == b"abc"
            assert type(pool.get_lazy(key).get()) is bytes
        with pytest.raises(errors.ConfigError, match=r"int.*decode"):
            pool.get_lazy("number").get()


def test_stream_keeps_a_window(cache: forebay.Cache, source: Items) -> None:
    """Not one key more is taken than the window has, and it is loaded while the consumer is at work."""
    taken: list[str] = []

    def endless() -> Iterator[str]:
        for i in range(10**9):
            taken.append(f"k{i}")
            yield taken[-1]

    with cache.prefetcher(source, workers=4) as pool:
        stream = pool.stream(endless(), ahead=8)
        assert taken == []
        for i in range(20):
            assert next(stream) == body(f"k{i}")
            assert len(taken) <= i + 9
            until(lambda: len(source.reads) == len(taken), "the window")
        del stream
        gc.collect()
        before = len(source.reads)
        assert pool.get_lazy("other").get() == body("other")
        assert len(source.reads) == before + 1
    assert sorted(source.reads) == sorted([*taken, "other"])


def test_a_dropped_stream_lets_go_of_what_is_queued(lone: Prefetcher, source: Items) -> None:
    source.stop("k1")
    stream = lone.stream(KEYS, ahead=30)
    assert next(stream) == body("k0")
    source.wait("k1")
    del stream
    gc.collect()
    source.go()
    assert lone.get_lazy("last").get() == body("last")
    lone.close()
    assert not set(source.reads) - {"k0", "k1", "last"}


def entries_of(cache: forebay.Cache, *keys: str) -> list[Any]:
    """The entries of the items of these keys."""
    return [entry for entry in cache.entries("prefetch") if entry.key.rpartition("~")[0].rpartition("/")[2] in keys]


@pytest.fixture
def warmed(cache: forebay.Cache, source: Items) -> list[str]:
    """Items that the cache has: half of them in files. The source has forgotten that they were read."""
    keys = KEYS[:20]
    source.sizes = dict.fromkeys(keys[::2], 50_000)
    with cache.prefetcher(source) as pool:
        assert pool.warm(keys).failed == ()
    source.reads.clear()
    return keys


@pytest.mark.parametrize("ahead", [0, 7, 64])
def test_a_stream_of_what_the_cache_has_needs_no_thread_and_no_lease(
    cache: forebay.Cache, source: Items, warmed: list[str], ahead: int
) -> None:
    with cache.prefetcher(source) as pool:
        for n, (key, value) in enumerate(zip(warmed * 3, pool.stream(warmed * 3, ahead=ahead), strict=True)):
            assert value == source.body(key)
            assert type(value) is bytes
            if n == 10:
                assert not any(entry.leased for entry in cache.entries("prefetch"))
        assert threads_named("forebay-prefetch") == []
    assert source.reads == []


def test_a_forked_child_goes_on_with_a_stream(cache: forebay.Cache, source: Items, warmed: list[str]) -> None:
    with cache.prefetcher(source) as pool:
        stream = pool.stream(warmed, ahead=6)
        assert next(stream) == source.body(warmed[0])
        rest = [source.body(key) for key in warmed[1:]]
        assert in_child(lambda: list(stream)) == rest
        assert list(stream) == rest
    assert source.reads == []


@pytest.mark.parametrize("what", ["evicted", "damaged"])
def test_what_goes_between_the_look_ahead_and_its_turn_is_read_from_the_source(
    cache: forebay.Cache, source: Items, warmed: list[str], what: str
) -> None:
    with cache.prefetcher(source) as pool:
        stream = pool.stream(warmed, ahead=6)
        assert next(stream) == source.body(warmed[0])
        for entry in entries_of(cache, warmed[3], warmed[4]):
            if what == "evicted":
                assert cache.evict(entry).removed
            elif entry.kind == "blob":
                (path,) = (cache.path / "blobs").glob(f"*/{entry.id:016x}*")
                path.chmod(0o600)
                path.write_bytes(b"?" * entry.size)
        assert list(stream) == [source.body(key) for key in warmed[1:]]
    assert sorted(set(source.reads)) == (warmed[3:5] if what == "evicted" else [warmed[4]])  # of an even number: in a file


def test_a_stream_goes_on_after_its_prefetcher_was_closed_with_what_it_looked_for(
    cache: forebay.Cache, source: Items, warmed: list[str]
) -> None:
    pool = cache.prefetcher(source)
    stream = pool.stream(warmed[:6], ahead=64)
    assert next(stream) == source.body(warmed[0])
    (entry,) = entries_of(cache, warmed[2])
    assert cache.evict(entry).removed
    pool.close()
    assert list(stream) == [source.body(key) for key in warmed[1:6]]
    assert source.reads == [warmed[2]]


def test_a_stream_does_not_open_a_closed_cache_again(tmp_path: Path, source: Items) -> None:
    with forebay.Cache(tmp_path / "other", budget=64 << 20, min_free=0) as cache:
        pool = cache.prefetcher(source)
        keys = KEYS[:6]
        assert pool.warm(keys).failed == ()
        stream = pool.stream(keys, ahead=64)
        assert next(stream) == source.body(keys[0])
    source.reads.clear()
    assert list(stream) == [source.body(key) for key in keys[1:]]
    assert source.reads == keys[1:]


def test_a_stream_asks_for_the_version_of_an_item_once(cache: forebay.Cache, source: Items) -> None:
    asked: list[str] = []

    class Versioned(Items):
        def version_of(self, key: str) -> str | None:
            asked.append(key)
            return None

    items = Versioned(version=None)
    keys = KEYS[:5]
    with cache.prefetcher(items) as pool:
        assert list(pool.stream(keys)) == [items.body(key) for key in keys]
    assert asked == keys


def test_a_stream_of_a_pool_that_keeps_nothing_removes_what_others_kept(cache: forebay.Cache, source: Items, warmed: list[str]) -> None:
    with cache.prefetcher(source, keep=False) as pool:
        assert pool.count == len(warmed)
        assert list(pool.stream(warmed, ahead=9)) == [source.body(key) for key in warmed]
        until(lambda: pool.count == 0, "the end of the items")
    assert source.reads == []


def test_stream_raises_at_the_item_and_refuses_nonsense(any_pool: Any, source: Items) -> None:
    source.faults["k3"] = LookupError("k3")
    stream = any_pool.stream(KEYS, ahead=10)
    assert [next(stream) for _ in range(3)] == [body(key) for key in KEYS[:3]]
    with pytest.raises(LookupError, match="k3"):
        next(stream)
    with pytest.raises(errors.ConfigError, match="-1"):
        any_pool.stream(KEYS, ahead=-1)


def test_warm_fills_and_tells(cache: forebay.Cache, pool: Prefetcher, source: Items) -> None:
    told: list[tuple[str, str]] = []
    source.faults["k7"] = ConnectionError("no k7")
    report = pool.warm(iter(KEYS), on_progress=lambda progress: told.append((progress.url, progress.state)))
    assert set(report.done) == set(KEYS) - {"k7"}
    assert [key for key, _ in report.failed] == ["k7"]
    assert "no k7" in str(report.failed[0][1])
    assert {key for key, state in told if state == "done"} == set(report.done)
    assert kept(cache) == set(KEYS) - {"k7"}
    assert not any(entry.leased for entry in cache.entries("prefetch"))  # it holds nothing
    source.faults.clear()
    reads = len(source.reads)
    assert pool.warm(KEYS).failed == ()
    assert source.reads[reads:] == ["k7"]


def test_warm_of_what_has_no_room(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, budget=100_000) as pool:
        source.sizes["huge"] = 200_000
        report = pool.warm(["a", "huge", "b"])
        assert set(report.done) == {"a", "b"}
        assert [(key, type(error)) for key, error in report.failed] == [("huge", errors.NoSpace)]


@pytest.mark.parametrize("policy", ["wait", "lru"])
def test_warm_where_what_is_there_already_fills_the_space(cache: forebay.Cache, source: Items, policy: str) -> None:
    """The last items are found at once: they are not held until the first one is stored, for which there is no room until then."""
    with cache.prefetcher(source, max_count=4, workers=2, policy=policy) as pool:
        assert pool.warm(KEYS[4:8]).failed == ()
        assert in_thread(lambda: pool.warm(KEYS[:8]))().failed == ()
        assert pool.count == 4


def test_what_is_only_warmed_is_held_by_those_that_want_it(cache: forebay.Cache, pool: Prefetcher, source: Items) -> None:
    source.stop("a")
    warm = in_thread(lambda: pool.warm(["a", "b"]))
    until(lambda: [entry.leased for entry in cache.entries("prefetch")] == [False], "the other one")
    lazy = pool.get_lazy("b")
    until(lambda: [entry.leased for entry in cache.entries("prefetch")] == [True], "its lease")
    assert lazy.get() == body("b")
    source.go()
    assert warm().failed == ()


def fails(call: str, subject: str) -> NoReturn:
    raise OSError(errno.EIO, "the disk went away")


@pytest.mark.parametrize("size", [2000, 400_000], ids=["small", "large"])
def test_warm_ends_though_the_cache_fails_while_it_stores(cache: forebay.Cache, on_step: Any, size: int) -> None:
    source = Items(size)
    with cache.prefetcher(source, workers=2) as pool:
        on_step(fails)
        report = in_thread(lambda: pool.warm(KEYS[:8]))()
        on_step(None)
        assert report.done == ()
        assert [key for key, _ in report.failed] == KEYS[:8]
        assert all(isinstance(error, errors.CacheFault) for _, error in report.failed)
        assert any("the disk went away" in str(error) for _, error in report.failed)
        assert pool.get_many(KEYS) == [source.body(key) for key in KEYS]  # the job goes on
        assert pool.warm(KEYS[:8]).failed == ()


def comes_to_wait_for_room(pool: Any) -> None:
    """Until the item "grown" was read, and the writer has looked for its room."""
    pool.source.wait("grown")
    (writer,) = [thread for thread in threading.enumerate() if thread.name == "forebay-prefetch-writer"]
    until(lambda: pool.source.at_once == 0 and is_waiting(writer), "the wait for room")


def stalled_warm(pool: Any) -> tuple[list[Any], Callable[[], Any]]:
    """Hold eight items, and warm one that waits for their room. Returns their lazies, and what waits for the end of the warm."""
    held = [pool.get_lazy(key) for key in KEYS[:8]]
    until(lambda: pool.count == 8)
    warm = in_thread(lambda: pool.warm(["grown"]))
    comes_to_wait_for_room(pool)
    return held, warm


def test_warm_ends_though_the_cache_fails_while_items_wait_for_room(cache: forebay.Cache, on_step: Any) -> None:
    source = Items()
    source.sizes["grown"] = 60_000
    with cache.prefetcher(source, budget=70_000, workers=2) as pool:
        held, warm = stalled_warm(pool)
        on_step(fails)
        held.clear()  # their room is asked for
        report = warm()
        on_step(None)
        ((key, error),) = report.failed
        assert key == "grown"
        assert str(error).startswith("grown cannot be stored: ")
        assert "the disk went away" in str(error)
        assert pool.get_many(KEYS[:8]) == [body(key) for key in KEYS[:8]]


def test_warm_ends_when_nothing_is_evicted_for_what_it_read(cache: forebay.Cache) -> None:
    """Nobody knew how large the items are before they were read."""
    source = Items()
    source.sizes["grown"] = 60_000
    with cache.prefetcher(source, budget=70_000, policy="freeze", workers=1) as pool:
        assert pool.warm(KEYS[:8]).failed == ()
        report = in_thread(lambda: pool.warm(["grown"]))()
        assert [(key, type(error)) for key, error in report.failed] == [("grown", errors.NoSpace)]


def test_warm_ends_with_the_prefetcher(cache: forebay.Cache) -> None:
    source = Items()
    source.sizes["grown"] = 60_000
    with cache.prefetcher(source, budget=70_000, workers=1) as pool:
        held, warm = stalled_warm(pool)
        pool.close()
        assert [key for key, _ in warm().failed] == ["grown"]
        assert [one.get() for one in held] == [body(key) for key in KEYS[:8]]


# -- what is kept, and for whom ----------------------------------------------------------------------------------------


def test_each_item_is_read_once_by_two_pools(cache: forebay.Cache, pool: Prefetcher, source: Items) -> None:
    source.stop(KEYS[0])
    with cache.prefetcher(source) as other:
        lazies = [pool.get_lazy(KEYS[0])]
        source.wait(KEYS[0])
        lazies += [p.get_lazy(key) for key in KEYS for p in (pool, other)]
        assert lazies[-1].get() == body(KEYS[-1])  # by now the other pool has found the first key to be somebody else's
        source.go()
        assert [lazy.get() for lazy in lazies[1:]] == [body(key) for key in KEYS for _ in (0, 1)]
    assert sorted(source.reads) == sorted(KEYS)


def test_keep_leaves_it_to_the_policy(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source) as pool:
        pool.get_many(KEYS)
    assert kept(cache) == set(KEYS)
    again = Items()
    with cache.prefetcher(again) as pool:
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
        assert (pool.count, again.reads) == (40, [])


def test_without_keep_an_item_goes_with_its_last_holder(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, keep=False) as pool:
        lazies = [pool.get_lazy(key) for key in KEYS]
        until(lambda: pool.count == 40)
        lazies[0].get()  # its share is let go with the first get
        del lazies[20:]
        until(lambda: pool.count == 19)
        held = lazies[1]
        lazies.clear()
        until(lambda: pool.count == 1)
        assert (held.get(), source.reads.count("k1")) == (body("k1"), 1)
        until(lambda: pool.used == pool.count == 0)


def test_without_keep_the_last_holder_may_be_another_process(cache: forebay.Cache, source: Items, tmp_path: Path) -> None:
    with cache.prefetcher(source, keep=False) as pool:
        lazy: Any = pool.get_lazy("a")
        until(lambda: kept(cache) == {"a"})
        go = Gate()

        def child() -> Any:
            go.wait()
            return lazy.get(), list(source.reads)

        its = fork(child)
        lazy = None
        gc.collect()
        cache.put("another", b"write")
        assert kept(cache) == {"a"}
        go.open()
        value, reads = its.result()
        go.close()
        assert (value, reads) == (body("a"), ["a"])
        until(lambda: cache.put("another", b"write") and pool.count == 0)


def test_without_a_version_items_go_with_the_processes_that_use_them(cache: forebay.Cache, tmp_path: Path) -> None:
    first = Items(version=None)
    with cache.prefetcher(first) as pool:
        pool.get_many(KEYS)
        second = Items(version=None)
        with cache.prefetcher(second) as other:  # at the same time: the same items
            assert other.get_many(KEYS) == [body(key) for key in KEYS]
            assert second.reads == []
    until(lambda: cache.put("next", b"write") and cache.entries("prefetch") == [], "their end")
    third = Items(version=None)
    with cache.prefetcher(third) as pool:
        pool.get_lazy("k1").get()
        assert third.reads == ["k1"]


@pytest.mark.parametrize("other", [{"version": "2"}, {"uri": "test://others"}])
def test_what_makes_other_bytes_makes_other_items(cache: forebay.Cache, pool: Prefetcher, other: dict[str, Any]) -> None:
    pool.get_lazy("a").get()
    fresh = Items(**other)
    with cache.prefetcher(fresh) as second:
        second.get_lazy("a").get()
        assert fresh.reads == ["a"]


def test_a_source_with_versions_of_its_items(cache: forebay.Cache) -> None:
    class Files(Items):
        versions: ClassVar[dict[str, str | None]] = {}

        def version_of(self, key: str) -> str | None:
            return self.versions.get(key, "1")

    source = Files(version=None)
    with cache.prefetcher(source) as pool:
        pool.get_many(["a", "b"])
        source.versions["a"] = "2"
        pool.get_many(["a", "b"])
        assert sorted(source.reads) == ["a", "a", "b"]
    with cache.prefetcher(again := Files(version=None)) as pool:
        pool.get_many(["a", "b"])
        assert again.reads == []  # they have a version: they stay


def double(key: str, data: bytes) -> Any:
    return data * 2


def first(key: str, data: bytes) -> Any:
    return data[:1]


def test_raw_items_serve_any_decoder(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, decode=double) as one, cache.prefetcher(source, decode=first) as two:
        assert one.get_lazy("a").get() == body("a") * 2
        assert two.get_lazy("a").get() == body("a")[:1]
    assert source.reads == ["a"]


def test_decoded_items_belong_to_their_decoder(cache: forebay.Cache, source: Items) -> None:
    def get(decode: Any, version: str | None = None) -> Any:
        with cache.prefetcher(DecodedSource(source, decode, version=version), store="decoded") as pool:
            return pool.get_lazy("a").get()

    assert (get(double), get(first), get(double)) == (body("a") * 2, body("a")[:1], body("a") * 2)
    assert len(source.reads) == 2
    assert get(double, "v2") == body("a") * 2
    assert len(source.reads) == 3
    with cache.prefetcher(source) as raw:
        assert raw.get_lazy("a").get() == body("a")
    assert len(source.reads) == 4


def test_decoded_arrays_are_views(cache: forebay.Cache, source: Items) -> None:
    numpy = pytest.importorskip("numpy")
    decoded: list[str] = []

    class Decode:
        name = "array"

        def __call__(self, key: str, data: bytes) -> Any:
            decoded.append(key)
            return numpy.frombuffer(data, "u1").reshape(20, -1)

    with cache.prefetcher(source, decode=Decode(), store="decoded", codec="numpy") as pool:
        for _ in range(3):
            lazy = pool.get_lazy("a")
            until(lambda: pool.count == 1)
            array = lazy.get()
            assert array.tobytes() == body("a")
            assert not array.flags.writeable
            assert not array.flags.owndata
    assert decoded == ["a"]
    with cache.prefetcher(source, decode=Decode(), store="decoded", codec="pickle") as pool:  # another codec: another item
        assert pool.get_lazy("a").get().tobytes() == body("a")
    assert decoded == ["a", "a"]


def test_a_decoder_that_fails(cache: forebay.Cache, source: Items) -> None:
    for store in ("raw", "decoded"):
        bad = [True]

        def decode(key: str, data: bytes) -> Any:
            if bad[0]:  # noqa: B023
                raise ArithmeticError(key)
            return len(data)

        with cache.prefetcher(source, decode=decode, store=store, name=store) as pool:
            lazy = pool.get_lazy("a")
            for _ in range(2):
                with pytest.raises(ArithmeticError, match="a"):
                    lazy.get()
            bad.clear()
            bad.append(False)
            assert pool.get_lazy("a").get() == 2000


def test_put_goes_with_its_last_holder(cache: forebay.Cache, pool: Prefetcher) -> None:
    lazy = pool.put(bytes(300_000), "large")
    small = pool.put([1, 2, 3], "small")
    assert pool.count == 2
    assert pool.used > 300_000
    again = lazy
    del lazy
    gc.collect()
    assert pool.count == 2
    del again, small
    until(lambda: cache.put("next", b"write") and pool.count == pool.used == 0, "the end of what was spilled")


def test_put_of_what_does_not_pickle(pool: Prefetcher) -> None:
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pool.put(threading.Lock())
    assert pool.count == 0


def test_put_without_room_stays_in_memory(cache: forebay.Cache, source: Items, caplog: pytest.LogCaptureFixture) -> None:
    with cache.prefetcher(source, budget=100_000) as pool:
        lazy = pool.put(bytes(200_000), "too large")
        assert pool.used == 0
        assert lazy.get() == bytes(200_000)
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1


# -- limits ------------------------------------------------------------------------------------------------------------


def test_wait_evicts_what_nobody_holds_the_oldest_first(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, max_count=10, workers=2) as pool:
        for key in KEYS[:10]:
            pool.get_lazy(key).get()
            until(lambda key=key: key in kept(cache))
        held = pool.get_lazy("k0")
        until(lambda: held.done)
        assert "k0" not in source.reads[10:]
        for key in ("new1", "new2", "new3"):
            pool.get_lazy(key).get()
            until(lambda key=key: key in kept(cache))
        assert pool.count <= 10
        left = kept(cache)
        assert {"k0", "new1", "new2", "new3"} <= left
        assert "k1" not in left
        assert "k9" in left
        assert held.get() == body("k0")


@pytest.mark.parametrize("kind", [Items, Sized])
def test_while_all_is_held_nothing_is_waited_for(cache: forebay.Cache, kind: type[Items]) -> None:
    """The space is full of what lazies hold: who needs an item gets it from the source, and what was held goes when it is let go."""
    source = kind()
    with cache.prefetcher(source, max_count=4, workers=2) as pool:
        held = [pool.get_lazy(key) for key in KEYS[:4]]
        until(lambda: pool.count == 4)
        more = [pool.get_lazy(key) for key in KEYS[4:8]]
        assert [lazy.get() for lazy in more] == [body(key) for key in KEYS[4:8]]
        assert pool.count == 4
        assert kept(cache) == set(KEYS[:4])
        late = pool.get_lazy("late")
        held.clear()
        until(lambda: "late" in kept(cache), "room")
        assert late.get() == body("late")
        assert source.reads.count("late") == 1


def test_items_that_wait_for_memory_are_left_to_other_pools(cache: forebay.Cache) -> None:
    """One pool is full, and has begun more items than it may have in memory: another pool, as in another process, reads them itself, though
    the first tries again and again to store what it has."""
    options: dict[str, Any] = {"name": "s", "workers": 2, "policy": "wait", "max_count": 1, "keep": False}
    source, other_source = Items(), Items()
    with cache.prefetcher(source, **options) as pool, cache.prefetcher(other_source, **options) as other:
        held = [pool.get_lazy(key) for key in KEYS]
        assert held[0].get() == body(KEYS[0])
        until(lambda: len(source.reads) > 2 and source.at_once == 0, "the stop")
        assert [other.get_lazy(key).get() for key in KEYS] == [body(key) for key in KEYS]


@pytest.mark.parametrize("stale", [0.1, -1.0], ids=["", "keys are given up at every turn"])
def test_what_waits_for_room_goes_on_as_lazies_are_dropped(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, stale: float) -> None:
    """Nobody calls `get`: the thread stores what waits in memory, and reads on, in the order in which they were asked for."""
    monkeypatch.setattr("forebay.fetch.pipeline.STALE", stale)
    source = Items(20_000)
    with cache.prefetcher(source, max_count=2, workers=2) as pool:
        lazies = [pool.get_lazy(key) for key in KEYS[:16]]
        until(lambda: pool.count == 2 and source.at_once == 0, "the stop")
        while lazies:
            del lazies[0]
            until(lambda: all(lazy.done for lazy in lazies[:2]), "the next")
    assert sorted(source.reads) == sorted(KEYS[:16])
    assert max(abs(source.reads.index(key) - place) for place, key in enumerate(KEYS[:16])) <= 6, "no further than was begun ahead"


def test_a_get_takes_the_bytes_that_wait_for_room(cache: forebay.Cache) -> None:
    """Of a size that nobody knew before it was read: the load has the bytes, and has no room for them."""
    source = Items()
    source.sizes |= {"grown": 60_000}
    with cache.prefetcher(source, budget=70_000, workers=2) as pool:
        held = [pool.get_lazy(key) for key in KEYS[:8]]
        until(lambda: pool.count == 8)
        lazy = pool.get_lazy("grown")
        comes_to_wait_for_room(pool)
        assert lazy.get() == source.body("grown")
        assert source.reads.count("grown") == 1
        assert [one.get() for one in held] == [body(key) for key in KEYS[:8]]


def test_the_limits_hold(cache: forebay.Cache, source: Items) -> None:
    source.sizes |= {f"k{i}": 500 + 400 * i for i in range(40)}
    with cache.prefetcher(source, budget=100_000, workers=4) as pool:
        for value, key in zip(pool.stream(KEYS * 3, ahead=16), KEYS * 3, strict=True):
            assert value == source.body(key)
            assert pool.used <= 100_000
    with cache.prefetcher(source, max_count=7, name="few", workers=4) as pool:
        for value, key in zip(pool.stream(KEYS * 3, ahead=16), KEYS * 3, strict=True):
            assert value == source.body(key)
            assert pool.count <= 7


@pytest.mark.parametrize("size", [1000, 100_000, 400_000])
@pytest.mark.parametrize("kind", [Items, Sized])
def test_items_of_many_sizes_are_all_kept(cache: forebay.Cache, kind: type[Items], size: int) -> None:
    source = kind()
    chance = random.Random(size)
    source.sizes = {key: size + chance.randrange(size // 6) for key in KEYS}
    source.delay = 0.005
    with cache.prefetcher(source, workers=3) as pool:
        for key, found in zip(KEYS, pool.stream(KEYS, ahead=2), strict=True):
            assert found == source.body(key)
    assert kept(cache) == set(KEYS)
    assert cache.stats().fallbacks == cache.stats().bytes_reserved == 0
    assert len(source.reads) == 40


def test_a_limit_of_nothing(cache: forebay.Cache, source: Items) -> None:
    for limits in ({"budget": 0}, {"max_count": 0}):
        with cache.prefetcher(source, name=next(iter(limits)), **limits) as pool:
            assert pool.get_many(KEYS[:5]) == [body(key) for key in KEYS[:5]]
            assert pool.count == pool.used == 0


@pytest.mark.parametrize("policy", ["lru", "freeze", "wait"])
def test_each_policy_keeps_the_limit_of_items(cache: forebay.Cache, source: Items, policy: str) -> None:
    with cache.prefetcher(source, max_count=10, policy=policy, workers=1) as pool:
        for _ in range(2):
            for key in KEYS[:20]:
                assert pool.get_lazy(key).get() == body(key)
        pool.close()
        assert pool.count <= 10
    if policy == "freeze":
        assert kept(cache) <= set(KEYS[:12])
    else:
        assert "k19" in kept(cache)


def test_a_quota_in_words(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, budget="50kB") as pool:
        pool.warm(KEYS)  # a get is served before its item is kept
        assert 10_000 < pool.used <= 50_000


# -- closing, and what is dropped --------------------------------------------------------------------------------------


def test_close_cancels_what_is_queued_and_waits_for_what_runs(cache: forebay.Cache, source: Items) -> None:
    pool = cache.prefetcher(source, workers=1)
    source.stop("a")
    lazies = [pool.get_lazy(key) for key in ("a", "b", "c")]
    source.wait("a")
    closing = in_thread(pool.close)
    until(lambda: pool.closed)
    with pytest.raises(RuntimeError):
        pool.get_lazy("d")
    source.go("a")
    closing()
    assert source.reads == ["a"]
    assert kept(cache) == {"a"}
    assert [lazy.get() for lazy in lazies] == [body(key) for key in ("a", "b", "c")]
    assert source.reads == ["a", "b", "c"]
    assert [t for t in threading.enumerate() if t.name.startswith("forebay-prefetch")] == []


def test_close_in_a_decoder_does_not_wait_for_itself(cache: forebay.Cache, source: Items) -> None:
    pool = cache.prefetcher(source, workers=2)
    source.on_read = lambda key: pool.close()
    assert pool.get_lazy("a").get() == body("a")
    source.on_read = None
    pool.close()
    assert pool.closed


def test_the_cache_closes_its_pools(tmp_path: Path, source: Items) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB) as cache:
        pool = cache.prefetcher(source)
        lazy = pool.get_lazy("a")
    assert pool.closed
    assert lazy.get() == body("a")
    with pytest.raises(errors.Closed):
        pool.get_lazy("b")


def test_a_dropped_pool_ends_its_threads(cache: forebay.Cache, source: Items) -> None:
    pool = cache.prefetcher(source)
    lazy: Any = pool.get_lazy("a")
    until(lambda: lazy.done)
    del pool
    gc.collect()
    assert lazy.get() == body("a")
    lazy = None
    gc.collect()
    until(lambda: [t for t in threading.enumerate() if t.name.startswith("forebay-prefetch")] == [], "the end of the threads")


def test_a_dropped_lazy_that_is_queued_is_never_read(lone: Prefetcher, source: Items) -> None:
    source.stop("busy")
    busy = lone.get_lazy("busy")
    source.wait("busy")
    for key in KEYS:
        lone.get_lazy(key)
    last = lone.get_lazy("last")
    source.go()
    until(lambda: last.done)
    assert source.reads == ["busy", "last"]
    busy.get()


def test_dropped_while_it_runs_its_room_comes_back(cache: forebay.Cache, source: Items) -> None:
    with cache.prefetcher(source, workers=4, keep=False) as pool:
        source.stop(*KEYS[:4])
        lazies = [pool.get_lazy(key) for key in KEYS[:4]]
        for key in KEYS[:4]:
            source.wait(key)
        lazies.clear()
        source.go()
        until(lambda: pool.used == pool.count == cache.stats().bytes_reserved == 0, "the room")
    assert cache.entries("prefetch") == []


def test_a_lazy_outlives_everything(tmp_path: Path, source: Items) -> None:
    def make() -> list[Any]:
        cache = forebay.Cache(tmp_path / "root", budget=MiB)
        pool = cache.prefetcher(source)
        return [pool.get_lazy("a"), pool.put("b")]

    def child() -> list[Any]:
        lazies = make()
        gc.collect()
        return [lazy.get() for lazy in lazies]

    assert in_child(child) == [body("a"), "b"]


# -- demand ------------------------------------------------------------------------------------------------------------


def test_demand_goes_before_what_is_queued(lone: Prefetcher, source: Items) -> None:
    source.stop("busy")
    busy, queue = lone.get_lazy("busy"), [lone.get_lazy(f"q{i}") for i in range(1000)]
    source.wait("busy")
    assert lone.get_lazy("now").get() == body("now")
    assert queue[-1].get() == body("q999")
    assert source.reads == ["busy", "now", "q999"]
    queue.clear()
    source.go()
    busy.get()


def test_what_is_too_large_occupies_no_worker(
    cache: forebay.Cache, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size is known: nobody reads it before it is wanted, and then whoever wants it."""
    monkeypatch.setattr("forebay.prefetch.loader.STORE_WAIT", HANG)  # however slow this machine is, all are stored
    source = Sized()
    source.sizes |= {"huge": 200_000, "vast": 300_000}
    with cache.prefetcher(source, budget=100_000, workers=1) as pool:
        huge, vast = pool.get_lazy("huge"), pool.get_lazy("vast")
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
        assert not {"huge", "vast"} & set(source.reads)
        assert huge.get() == source.body("huge")
        assert vast.get() == source.body("vast")
        assert source.threads[-1] == threading.current_thread().name
        assert huge.get() is huge.get()
        until(lambda: len(kept(cache)) == 40, "the rest")  # nothing is evicted for what does not fit
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "200,000" in said[0]
    assert "100,000" in said[0]


def test_what_turns_out_too_large(cache: forebay.Cache, source: Items, caplog: pytest.LogCaptureFixture) -> None:
    source.sizes["huge"] = 200_000
    with cache.prefetcher(source, budget=100_000, workers=1) as pool:
        huge = pool.get_lazy("huge")
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
        assert huge.get() == source.body("huge")
        pool.close()
        assert kept(cache) == set(KEYS)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 1
    assert "200,000" in said[0]
    assert "100,000" in said[0]


@pytest.mark.parametrize(("size", "most"), [(20_000, 2), (400_000, 2), (3_000_000, 1)])
def test_memory_is_bounded_by_the_workers(cache: forebay.Cache, size: int, most: int) -> None:
    """While all room is held, no more is read than two items for each worker; one, of large items."""
    source = Items(size)
    with cache.prefetcher(source, max_count=2, workers=3) as pool:
        held = [pool.get_lazy(key) for key in KEYS[:2]]
        until(lambda: pool.count == 2)
        waiting = [pool.get_lazy(key) for key in KEYS[2:12]]
        until(lambda: source.at_once == 0, "the stop")
        assert len(source.reads) <= 2 + most * 3
        held.clear()
        assert [lazy.get() for lazy in waiting] == [source.body(key) for key in KEYS[2:12]]


def test_until_it_is_published_it_is_served_from_memory(cache: forebay.Cache, source: Items, another_writes: Any, on_step: Any) -> None:
    """The writer stands still: nobody waits for it. Then it stores all that was read meanwhile, together."""
    commits: list[str] = []
    with cache.prefetcher(source, workers=6) as pool:
        assert pool.warm(["k0"]).failed == ()
        on_step(lambda call, subject: commits.extend([threading.current_thread().name] * (call == "commit")))
        other = another_writes()
        lazies = [pool.get_lazy(key) for key in KEYS[1:10]]
        assert [lazy.get() for lazy in lazies] == [body(key) for key in KEYS[1:10]]
        assert (pool.count, commits) == (1, [])
        other.say("go on")
        until(lambda: pool.count == 10)
    assert sorted(source.reads) == sorted(KEYS[:10])
    assert all(name.startswith("forebay-prefetch") for name in commits)
    assert len(commits) < 2 * 9  # each would be one that asks for room, and one that keeps it


def test_faults_of_the_cache_reach_nobody(cache: forebay.Cache, source: Items, on_step: Any) -> None:
    """Whatever the disk refuses while items are kept: they are served, and later ones are kept again."""
    with cache.prefetcher(source) as pool:
        on_step(fails)
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
        until(lambda: cache.stats().fallbacks > 0, "the fault")  # items are served before they are stored
        assert pool.count == 0
        on_step(None)
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
        until(lambda: pool.get_many(KEYS) != [] and pool.count == 40, "the recovery")
    assert cache.stats().fallbacks > 0
    assert cache.stats().bytes_reserved == 0


# -- when the cache or the source is odd -------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_damaged_item_is_read_anew_and_kept_again(tmp_path: Path, source: Items, caplog: pytest.LogCaptureFixture) -> None:
    source.length = 50_000
    with forebay.Cache(tmp_path / "root", budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source) as pool:
        assert pool.get_lazy("a").get() == source.body("a")
    (stored,) = [path for path in (tmp_path / "root" / "blobs").glob("*/*") if path.stat().st_size == 50_000]
    stored.chmod(0o600)
    with open(stored, "r+b") as file:
        file.seek(20_000)
        byte = file.read(1)
        file.seek(20_000)
        file.write(bytes([byte[0] ^ 1]))
    with forebay.Cache(tmp_path / "root") as cache, cache.prefetcher(source) as pool:
        for _ in range(2):
            assert pool.get_lazy("a").get() == source.body("a")
            until(lambda: pool.get_lazy("a").get() == source.body("a") and pool.count == 1)
        assert source.reads.count("a") <= 3
        reads = len(source.reads)
        assert pool.get_lazy("a").get() == source.body("a")
        assert len(source.reads) == reads
        assert cache.stats().damaged == 1
        assert cache.check(deep=True) == []
    assert len(told(caplog)) == 1


def test_the_root_is_deleted_meanwhile(tmp_path: Path, source: Items, caplog: pytest.LogCaptureFixture) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=2) as pool:
        lazies = [pool.get_lazy(key) for key in KEYS[:20]]
        spilled = pool.put([1, 2])
        until(lambda: pool.count == 21)
        shutil.rmtree(tmp_path / "root")
        assert [lazy.get() for lazy in lazies] == [body(key) for key in KEYS[:20]]
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
        until(lambda: pool.get_many(KEYS) != [] and pool.count >= 40, "the new root")
        assert cache.check(deep=True) == []
        del spilled
    assert len(told(caplog)) == len({*told(caplog)}) <= 5  # a recovery may meet a root that is half deleted


def test_what_was_read_past_the_cache_is_kept_when_it_is_asked_for_again(cache: forebay.Cache, source: Items, on_step: Any) -> None:
    """Although its first load is held by an error's frames, say."""
    with cache.prefetcher(source, workers=1) as pool:
        on_step(fails)
        held = pool.get_lazy("k0")
        assert held.get() == body("k0")
        until(lambda: cache.stats().fallbacks > 0)
        on_step(None)
        assert pool.get_lazy("k0").get() == body("k0")
        until(lambda: pool.count == 1)
        del held


def test_a_source_that_asks_the_pool(cache: forebay.Cache, source: Items) -> None:
    """For a part that several items have in common: there are more of them than workers."""

    class Composed:
        uri, version = "test://composed", "1"
        pool: Any = None

        def __getitem__(self, key: str) -> bytes:
            part = source["base"] if key == "base" else self.pool.get_lazy("base").get()
            return bytes(part[:10]) + key.encode()

    composed = Composed()
    with cache.prefetcher(composed, workers=2) as pool:
        composed.pool = pool
        expected = [body("base")[:10] + key.encode() for key in KEYS]
        assert in_thread(lambda: [value[-len(key) - 10 :] for key, value in zip(KEYS, pool.get_many(KEYS), strict=True)])() == expected
        composed.pool = None


def test_a_timeout_of_the_cache_bounds_a_wait(tmp_path: Path, source: Items) -> None:
    stalls = threading.Event()

    def first_stalls(key: str) -> None:
        if len(source.reads) == 1:
            assert stalls.wait(60)

    source.on_read = first_stalls
    with forebay.Cache(tmp_path / "root", budget=8 * MiB, timeout=0.2) as cache, cache.prefetcher(source) as pool:
        lazy = pool.get_lazy("a")
        source.wait("a")
        assert lazy.get() == body("a")
        assert source.reads == ["a", "a"]
        assert cache.stats().fallbacks == 1
        stalls.set()


# -- handles -----------------------------------------------------------------------------------------------------------


def test_a_handle_arrives_by_pickle(cache: forebay.Cache, source: Items, tmp_path: Path) -> None:
    source.journal = tmp_path / "journal"
    with cache.prefetcher(source, max_count=30, decode=double, name="mine") as pool:
        lazy = pool.get_lazy("a")
        assert lazy.get() == body("a") * 2
        until(lambda: kept(cache, "mine") == {"a"})
        data = pickle.dumps((pool, lazy, pool.put([1])))

    def child() -> Any:
        arrived, its, spilled = pickle.loads(data)
        return its.get(), arrived.get_lazy("b").get(), spilled.get(), arrived.name, its == arrived.get_lazy("a")

    assert in_child(child) == (body("a") * 2, body("b") * 2, [1], "mine", True)
    assert source.all_reads() == {"a": 1, "b": 1}


def test_the_repr_says_what_it_is(any_pool: Any) -> None:
    assert "a" in repr(any_pool.get_lazy("a"))
    assert any_pool.source.uri == "test://items"


def test_counts(cache: forebay.Cache, pool: Prefetcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.prefetch.loader.STORE_WAIT", HANG)
    cache.reset_stats()
    pool.get_many(KEYS)
    until(lambda: pool.count == 40)
    pool.get_many(KEYS)
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.fills) == (40, 40, 40)
    assert stats.bytes_remote == stats.bytes_stored == stats.bytes_hit == 80_000
    assert stats.fallbacks == 0
    assert stats.spaces["prefetch"][0] == 40


def test_a_signal_while_it_is_dropped_is_not_lost(cache: forebay.Cache, source: Items, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = cache.prefetcher(source)
    alive = pool._way.loader
    strike_once(monkeypatch, loads.News, "wake")
    with soon():
        del pool
        gc.collect()
    assert alive.closed


def test_a_signal_while_a_lease_of_a_load_is_dropped_is_not_lost(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    news = loads.News()
    load = loads.Load(SimpleNamespace(news=news), "a", "a", True)
    cache.put("a", b"a" * 100_000)
    load.ref.lease = cache.hold("a")
    strike_once(monkeypatch, type(load.ref.lease), "close")
    ref = load.ref
    with soon():
        del load
    assert ref.lease.closed
    assert news.wait(0) == [ref]


def test_where_nothing_may_be_stored_warm_says_so(cache: forebay.Cache) -> None:
    """``max_count=0`` would never be met: nothing waits for it."""
    with cache.prefetcher(Items(), max_count=0) as pool:
        report = pool.warm(KEYS[:3])
        assert [(key, type(error)) for key, error in report.failed] == [(key, errors.NoSpace) for key in KEYS[:3]]
        assert pool.get_lazy(KEYS[0]).get() == body(KEYS[0])


@pytest.mark.parametrize("options", [{"budget": 3 * MiB}, {"keep": False}], ids=["with a limit", "while it is held"])
def test_on_a_full_disk_warm_says_so(tmp_path: Path, children: Callable[..., Any], options: dict[str, Any]) -> None:
    """Nobody knows until when it is full: `warm` does not wait for that."""

    def warm() -> tuple[list[type], bytes]:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache, cache.prefetcher(Items(300_000), **options) as pool:
            pool.get_lazy(KEYS[0]).get()
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            report = pool.warm(KEYS[1:4])
            return [type(error) for _, error in report.failed], bytes(pool.get_lazy(KEYS[1]).get())

    failed, data = children(warm).result()
    assert len(failed) == 3
    assert all(issubclass(kind, errors.NoSpace) for kind in failed)
    assert data == body(KEYS[1], 300_000)
