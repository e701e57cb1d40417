"""Samples as a program uses them: slots, names, fingerprints, codecs, room, handles in other processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.adapters.pfio import import_pfio
from forebay.cache import fetcher_of
from tests.harness import MiB, usage
from tests.processes import Line, fork, in_child, talk_to


def names(cache: forebay.Cache) -> list[str]:
    return [entry.key for entry in cache.entries("samples")]


# -- slots -------------------------------------------------------------------------------------------------------------


def test_a_slot_is_filled_once(cache: forebay.Cache) -> None:
    samples = cache.samples("a", 10)
    assert samples.get(3) is None
    assert samples.put(3, b"three")
    assert not samples.put(3, b"other")
    assert samples.get(3) == b"three"
    assert samples.get_many([3, 4]) == [b"three", None]
    assert (len(samples), samples.filled, list(samples)) == (10, 1, [3])
    assert 3 in samples
    assert 4 not in samples
    assert 10 not in samples
    assert -1 not in samples
    assert "3" not in samples


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 64, 10_000, 3 * MiB])
def test_bytes_of_any_length(cache: forebay.Cache, size: int) -> None:
    body = os.urandom(size)
    samples = cache.samples("a", 4)
    assert samples.put(2, body)
    assert samples.put(1, bytearray(b"neighbour"))
    found = samples.get(2)
    assert isinstance(found, memoryview)
    assert found.readonly
    assert found == body
    assert samples.get(1) == b"neighbour"


@pytest.mark.parametrize("index", [-1, -10, -11, 10, 15, 25, 1 << 70])
def test_an_index_outside_is_an_error(cache: forebay.Cache, index: int) -> None:
    samples = cache.samples("a", 10)
    samples.put(9, b"the last one, which -1 must not lead to")
    samples.get(9)
    for call in (lambda: samples.get(index), lambda: samples.put(index, b""), lambda: samples.get_or_put(index, lambda: b"")):
        with pytest.raises(IndexError):
            call()


@pytest.mark.parametrize("length", [0, -1, 1.5, "10"])
def test_a_length_that_is_none(cache: forebay.Cache, length: Any) -> None:
    with pytest.raises(ValueError, match="length"):
        cache.samples("a", length)


def test_numbers_of_numpy_are_indices(cache: forebay.Cache) -> None:
    np = pytest.importorskip("numpy")
    samples = cache.samples("a", 10)
    assert samples.put(np.int64(3), b"three")
    assert samples.get(np.int32(3)) == b"three"
    assert np.int64(3) in samples
    with pytest.raises(IndexError):
        samples.get(np.int64(-1))


def test_get_or_put_runs_once(cache: forebay.Cache) -> None:
    samples, ran = cache.samples("a", 10), []

    def make() -> bytes:
        ran.append(1)
        return b"made"

    assert samples.get_or_put(1, make) == b"made"
    assert samples.get_or_put(1, make) == b"made"
    assert samples.get(1) == b"made"
    assert len(ran) == 1


def test_get_or_put_of_a_function_that_fails(cache: forebay.Cache) -> None:
    samples = cache.samples("a", 10)
    with pytest.raises(ZeroDivisionError):
        samples.get_or_put(1, lambda: 1 / 0)
    assert samples.get_or_put(1, lambda: b"then") == b"then"


def test_after_close_every_call_is_an_error_and_views_stay(cache: forebay.Cache) -> None:
    with cache.samples("a", 10) as samples:
        samples.put(1, b"one")
        view, get = samples.get(1), samples.get
    assert samples.closed
    assert view == b"one"
    for call in (
        lambda: get(1), lambda: samples.get(1), lambda: samples.put(2, b""), lambda: samples.filled, lambda: list(samples),
        lambda: samples.get_or_put(1, bytes), lambda: samples.freeze(), lambda: samples.verify(), lambda: samples.__enter__(),
        lambda: samples.preserve("b"), lambda: samples.preload("b"), lambda: samples.get_many([1]),
    ):  # fmt: skip
        with pytest.raises(errors.Closed):
            call()
    samples.close()
    assert "closed" in repr(samples)


def test_a_closed_cache_closes_its_arrays(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB) as cache:
        samples = cache.samples(length=3)
        samples.put(0, b"x")
    with pytest.raises(errors.Closed):
        samples.get(0)


# -- names -------------------------------------------------------------------------------------------------------------


def test_a_named_array_is_found_again(cache: forebay.Cache) -> None:
    with cache.samples("a", 10) as samples:
        samples.put(1, b"one")
    with cache.samples("a", 10) as samples:
        assert samples.get(1) == b"one"
        assert samples.put(2, b"two")
    with cache.samples("a") as samples:
        assert (len(samples), samples.get(2)) == (10, b"two")
    with pytest.raises(errors.NotCached):
        cache.samples("b")
    assert names(cache) == ["a"]


def test_another_length_or_codec_is_told_with_both(cache: forebay.Cache) -> None:
    cache.samples("a", 10).close()
    with pytest.raises(ValueError, match=r"10 .*11"):
        cache.samples("a", 11)
    with pytest.raises(ValueError, match=r"'raw'.*'pickle'"):
        cache.samples("a", 10, codec="pickle")
    with cache.samples("a", 11, codec="pickle", fingerprint="v2") as samples:
        assert len(samples) == 11


def test_another_fingerprint_begins_afresh(cache: forebay.Cache) -> None:
    old = cache.samples("a", 10, fingerprint="v1")
    old.put(1, b"old")
    with cache.samples("a", 10, fingerprint="v1") as same:
        assert same.get(1) == b"old"
    with cache.samples("a", 10, fingerprint=b"v2") as new:
        assert new.get(1) is None
        assert new.put(1, b"new")
        assert old.get(1) == b"old"  # who has it open goes on with it
    old.close()
    with cache.samples("a", 10) as unsaid:
        assert unsaid.get(1) == b"new"
    cache.put("next", b"write")
    assert len(os.listdir(cache.path / "packs")) == 1


@pytest.mark.parametrize("name", ["", "~hidden", "a\nb", 7])
def test_names_that_cannot_be(cache: forebay.Cache, name: Any) -> None:
    with pytest.raises(ValueError, match="called"):
        cache.samples(name, 10)


def test_an_array_without_a_name_goes_with_its_handle(cache: forebay.Cache) -> None:
    before = cache.stats().bytes_used
    samples = cache.samples(length=100)
    for i in range(100):
        samples.put(i, bytes(10_000))
    assert cache.stats().bytes_used > before + 1_000_000
    samples.close()
    assert cache.stats().bytes_used == before
    assert os.listdir(cache.path / "packs") == []


def test_a_handle_that_is_dropped_lets_go(cache: forebay.Cache) -> None:
    before = cache.stats().bytes_used
    samples = cache.samples(length=100)
    samples.put(1, bytes(10_000))
    del samples
    gc.collect()
    cache.put("next", b"write")
    assert os.listdir(cache.path / "packs") == []
    assert cache.stats().bytes_used < before + 4096


def test_a_dropped_handle_of_a_named_array_leaves_its_segment_to_the_next(cache: forebay.Cache) -> None:
    samples = cache.samples("a", 100)
    samples.put(1, b"one")
    used = cache.stats().bytes_used
    del samples
    gc.collect()
    with cache.samples("a", 100) as samples:
        assert samples.put(2, b"two")
        assert samples.get(1) == b"one"
        assert cache.stats().bytes_used == used


@pytest.mark.parametrize("death", ["exit", "kill"])
def test_an_array_without_a_name_goes_with_its_process(cache: forebay.Cache, death: str) -> None:
    def child() -> None:
        samples = cache.samples(length=100)
        samples.put(1, bytes(10_000))
        if death == "kill":
            os.kill(os.getpid(), 9)

    fork(child).wait()
    assert len(os.listdir(cache.path / "packs")) == 1
    cache.put("next", b"write")
    assert os.listdir(cache.path / "packs") == []


def test_preserve_gives_a_name_and_copies_nothing(cache: forebay.Cache) -> None:
    samples = cache.samples(length=10, codec="pickle")
    samples.put(1, {"a": 1})
    inodes = inodes_below(cache.path / "packs")
    assert samples.preserve("kept")
    assert samples.name == "kept"
    assert samples.frozen
    assert not samples.put(2, "more")
    assert samples.get(1) == {"a": 1}
    samples.close()
    with cache.samples("kept", 10, codec="pickle") as again:
        assert again.frozen
        assert not again.put(2, "more")
        assert again.get(1) == {"a": 1}
    assert inodes_below(cache.path / "packs") == inodes


def inodes_below(place: Path) -> set[int]:
    return {path.stat().st_ino for path in place.rglob("*")}


def test_preserve_over_a_name_that_is_taken(cache: forebay.Cache) -> None:
    first, second = cache.samples(length=10), cache.samples(length=10)
    first.put(1, b"first")
    second.put(1, b"second")
    assert first.preserve("kept")
    assert not second.preserve("kept")
    assert not second.frozen
    assert second.preserve("kept", overwrite=True)
    assert first.get(1) == b"first"
    with cache.samples("kept", 10) as found:
        assert found.get(1) == b"second"
    with pytest.raises(ValueError, match="has a name"):
        second.preserve("other")


def test_preload(cache: forebay.Cache) -> None:
    with cache.samples(length=10) as samples:
        samples.put(1, b"one")
        assert samples.preserve("kept")
    samples = cache.samples(length=10)
    samples.put(1, b"own")
    assert not samples.preload("unknown")
    assert samples.get(1) == b"own"
    assert samples.preload("kept")
    assert samples.get(1) == b"one"
    assert samples.frozen
    assert not samples.put(2, b"two")
    assert not samples.preload("kept")
    assert names(cache) == ["kept"]  # the own data are gone
    with pytest.raises(ValueError, match="11"):
        cache.samples(length=11).preload("kept")


@pytest.mark.parametrize("plan", ["sweep", "remove"])
def test_an_array_that_is_preserved_while_another_process_sweeps_is_whole_or_gone(tmp_path: Path, plan: str) -> None:
    """P1 reads that it is held / P2 preserves and closes it / P1 ends what nobody holds. Or P1 is to remove just this array."""

    def sweep(line: Line) -> None:
        assert line.hear() == "made"
        with forebay.Cache(tmp_path / "root") as cache:
            store = fetcher_of(cache).store
            assert store.keeps
            parts = store.engine.parts
            (array,) = cache.entries("samples")
            look = parts.leases.leased_among if plan == "sweep" else None

            def seen(ids: Iterable[int]) -> set[int]:
                line.say("seen")
                assert line.hear() == "preserved"
                assert look is not None
                return look(ids)

            if plan == "sweep":
                parts.leases.leased_among = seen  # type: ignore[method-assign,assignment]
                parts.writers.eviction.sweep()
            else:
                line.say("seen")
                assert line.hear() == "preserved"
                store.drop([array])

    with talk_to(sweep) as other, forebay.Cache(tmp_path / "root", budget=20 * MiB, min_free=0) as cache:  # a later child would hold it too
        samples = cache.samples(length=20)
        assert samples.put(0, b"a" * 1000)
        other.say("made")
        assert other.hear() == "seen"
        assert samples.preserve("kept")
        samples.close()
        other.say("preserved")
        other.result()
        assert cache.check(deep=True) == []
        if plan == "sweep":
            with cache.samples("kept") as kept:
                assert kept.get(0) == b"a" * 1000
        else:
            assert names(cache) == []


@pytest.mark.parametrize("call", ["preserve", "preload"])
def test_only_the_maker_may_name(cache: forebay.Cache, call: str) -> None:
    samples = cache.samples(length=10)

    for given in (lambda: samples, lambda: pickle.loads(pickle.dumps(samples))):

        def child(given: Callable[[], Any] = given) -> None:
            with pytest.raises(RuntimeError):
                getattr(given(), call)("kept")

        in_child(child)


def test_frozen_is_for_good_and_for_all(cache: forebay.Cache) -> None:
    one, other = cache.samples("a", 10), cache.samples("a", 10)
    assert other.put(1, b"one")
    one.freeze()
    assert not other.put(2, b"two")
    assert other.frozen
    one.close()
    other.close()
    with cache.samples("a", 10) as again:
        assert not again.put(2, b"two")
        assert again.get(1) == b"one"


# -- codecs ------------------------------------------------------------------------------------------------------------


def test_arrays_are_read_only_views_and_copies_are_ones_own(cache: forebay.Cache) -> None:
    np = pytest.importorskip("numpy")
    array = np.arange(40_000, dtype="int32").reshape(100, 400)
    with cache.samples("a", 10, codec="numpy") as samples, cache.samples("p", 10, codec="pickle") as pickled:
        samples.put(0, array)
        pickled.put(0, {"array": array, "label": 3})
        for found in (samples.get(0), pickled.get(0)["array"]):
            assert (found == array).all()
            assert not found.flags.writeable
            assert not found.flags.owndata
            assert found.ctypes.data % 64 == 0
        for own in (samples.get(0, copy=True), pickled.get(0, copy=True)["array"]):
            own[0, 0] = 99
        assert samples.get(0)[0, 0] == 0
        assert pickled.get(0)["array"][0, 0] == 0
    with cache.samples("a", 10, codec="numpy", copy=True) as copies:
        copies.get(0)[0, 0] = 5
        assert copies.get(0)[0, 0] == 0


@pytest.mark.parametrize("numbers", [1000, 1 << 20], ids=["small", "mapped"])
def test_tensors_are_private(cache: forebay.Cache, numbers: int, torch: Any) -> None:
    with cache.samples("a", 10, codec="pickle") as samples:
        samples.put(0, (torch.arange(numbers), 7))
        found, label = samples.get(0)
        found[0] = 99
        assert label == 7
        again, _ = samples.get(0)
        assert again[0] == 0
        assert torch.equal(again, torch.arange(numbers))


class Rot13:
    name = "rot13"

    def encode(self, value: str) -> bytes:
        return bytes((ord(letter) + 13) % 256 for letter in value)

    def decode(self, data: memoryview) -> str:
        return "".join(chr((byte - 13) % 256) for byte in data)


def test_a_codec_of_ones_own(cache: forebay.Cache) -> None:
    with cache.samples("a", 10, codec=Rot13()) as samples:
        assert samples.put(0, "hello")
        assert samples.get(0) == "hello"
        assert samples.get_or_put(1, lambda: "made") == "made"
        assert in_child(lambda: pickle.loads(pickle.dumps(samples)).get(0)) == "hello"
    with pytest.raises(ValueError, match="codec"):
        cache.samples("b", 10, codec="zip")


def test_none_can_be_stored(cache: forebay.Cache) -> None:
    samples, ran = cache.samples("a", 10, codec="pickle"), []
    for _ in range(2):
        assert samples.get_or_put(0, lambda: ran.append(1)) is None
    assert len(ran) == 1
    assert 0 in samples


def test_what_cannot_be_pickled_is_told_once_and_given(cache: forebay.Cache) -> None:
    samples = cache.samples("a", 10, codec="pickle")
    with pytest.warns(RuntimeWarning, match="sample 0"):
        assert not samples.put(0, threading.Lock())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert samples.get_or_put(1, threading.Lock).acquire()
    assert cache.stats().store_failures == 2


def test_what_the_codec_does_not_take_is_the_callers_error(cache: forebay.Cache) -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(ValueError, match="bytes-like"):
        cache.samples("a", 10).put(0, "text")
    with cache.samples("n", 10, codec="numpy") as samples:
        for value in ((np.zeros(3), 7), [1.5, 2.5], 3):
            with pytest.raises(errors.ConfigError, match=r"codec='numpy' stores one.*use codec='pytree'"):
                samples.put(0, value)
            with pytest.raises(errors.ConfigError, match="use codec='pytree'"):
                samples.get_or_put(0, lambda value=value: value)
        assert 0 not in samples
        samples.freeze()
        with pytest.raises(errors.ConfigError, match="use codec='pytree'"):
            samples.get_or_put(0, lambda: (np.zeros(3), 7))
    with cache.samples("p", 10, codec="pickle") as samples:
        samples.freeze()
        assert samples.get_or_put(0, threading.Lock).acquire()  # it would not be stored anyway


def test_items_of_a_dataset_without_pickle(cache: forebay.Cache) -> None:
    np = pytest.importorskip("numpy")
    image = np.arange(60_000, dtype="u1").reshape(100, 200, 3)
    with cache.samples("a", 10, codec="pytree") as samples:
        for i in (0, 0):  # computed, and found
            found, label = samples.get_or_put(i, lambda: (image, {"label": 3}))
            assert (found == image).all()
            assert label == {"label": 3}
            assert not found.flags.writeable
            assert not found.flags.owndata
            assert found.ctypes.data % 64 == 0
        samples.get(0, copy=True)[0][0, 0] = 99
        assert (samples.get(0)[0] == image).all()


# -- room --------------------------------------------------------------------------------------------------------------


def fill(samples: forebay.Samples, size: int = 10_000) -> int:
    """Put into every slot; how many came in."""
    return sum(samples.put(i, bytes([i % 256]) * size) for i in range(len(samples)))


def test_s16_what_does_not_fit_is_refused_and_what_is_there_stays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache, cache.samples("a", 200) as samples:
        stored = fill(samples)
        assert 85 <= stored < 105  # what is given is used
        assert not samples.put(199, b"x" * 10_000)
        assert sum(samples.get(i) is not None for i in range(200)) == stored
        assert usage(cache.path / "packs") <= MiB
        told = [r for r in caplog.records if r.levelno >= logging.WARNING]
        assert len(told) == 1
        assert samples.get_or_put(199, lambda: b"past the cache") == b"past the cache"
        assert not samples.frozen
        assert cache.check(deep=True) == []


def test_a_refused_put_may_succeed_later(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache, cache.samples("a", 300) as samples:
        cache.put("pinned", bytes(300_000))
        cache.pin("values:pinned")
        stored = fill(samples)
        cache.unpin("values:pinned")
        cache.evict("values:pinned")
        assert fill(samples) > 10
        assert samples.filled > stored


def test_unused_arrays_go_the_least_recently_used_first(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache:
        for name in "abc":
            with cache.samples(name, 30) as samples:
                assert fill(samples) == 30
        cache.samples("a").close()
        with cache.samples("c") as used:
            with cache.samples("d", 30) as samples:
                assert fill(samples) == 30
            assert used.get(0) is not None
            assert sorted(names(cache)) == ["a", "c", "d"]
            with cache.samples("e", 90) as large:
                assert 50 < fill(large) < 90
            assert sorted(names(cache)) == ["c", "e"]


def test_an_open_array_is_not_evicted(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache, cache.samples("a", 60) as samples:
        assert fill(samples) == 60
        assert not cache.put("large", bytes(600_000))
        assert all(samples.get(i) == bytes([i]) * 10_000 for i in range(60))


def test_a_quota_binds_all_handles(cache: forebay.Cache) -> None:
    with cache.samples("a", 100, quota="300KB") as samples, cache.samples("a", 100) as other:
        with pytest.warns(RuntimeWarning, match="quota"):
            stored = fill(samples)
        assert 20 <= stored <= 30
        with pytest.warns(RuntimeWarning, match="quota"):
            assert fill(other) <= 1
        assert usage(cache.path / "packs") <= 300_000


def test_a_sample_larger_than_the_budget_evicts_nothing(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache, cache.samples("a", 10) as samples:
        cache.put("x", bytes(100_000))
        assert not samples.put(0, bytes(2 * MiB))
        assert samples.put(1, b"small")
        assert cache.get("x") is not None


def test_s34_bytes_on_disk_are_what_is_counted(cache: forebay.Cache) -> None:
    def on_disk() -> int:
        found = usage(cache.path / "packs")
        assert found <= cache.stats().bytes_used <= found + 4096  # the directory, which takes a block on disks, and none in memory
        return found

    with cache.samples("a", 1000) as samples:
        fill(samples, 10_240)
        on_disk()
    assert on_disk() <= 1.015 * 1000 * 10_240  # half of the rest: the directory and the index of so small an array


def test_an_array_that_cannot_be_made_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with forebay.Cache(tmp_path / "root", budget=MiB, min_free=0) as cache, cache.samples(length=1 << 40) as samples:
        assert not samples.put(5, b"five")
        assert samples.get(5) is None
        assert samples.get_or_put(5, lambda: b"made") == b"made"
        assert len(caplog.records) == 1
        assert (len(samples), samples.filled) == (1 << 40, 0)


def test_without_a_cache_nothing_is_kept(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache, cache.samples("a", 10) as samples:
        assert not samples.put(1, b"one")
        assert samples.get(1) is None
        assert samples.get_or_put(1, lambda: b"made") == b"made"
        assert not cache.samples(length=10).preserve("b")
        assert not samples.preload("b")
        with pytest.raises(IndexError):
            samples.get(10)


def test_a_policy_that_there_is_not(cache: forebay.Cache) -> None:
    with pytest.raises(ValueError, match="freeze"):
        cache.samples("a", 10, policy="lru")


# -- seeing and other roots --------------------------------------------------------------------------------------------


def test_hits_and_misses_are_counted(cache: forebay.Cache) -> None:
    with cache.samples("a", 10) as samples:
        for i in range(5):
            samples.put(i, bytes(1000))
        for i in range(10):
            samples.get(i)
            samples.get(i)
    counts = cache.stats()
    assert (counts.hits, counts.misses, counts.bytes_hit, counts.bytes_stored) == (10, 10, 10_000, 5000)


def test_a_read_only_root_and_an_upstream(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "filled", budget=MiB) as cache, cache.samples("a", 10) as samples:
        samples.put(1, b"one")
    with forebay.Cache(tmp_path / "filled", read_only=True) as cache, cache.samples("a", 10) as samples:
        assert samples.get(1) == b"one"
        assert not samples.put(2, b"two")
    with forebay.Cache(tmp_path / "own", budget=MiB, upstream=tmp_path / "filled") as cache:
        with cache.samples("a", 10) as samples:
            assert samples.get(1) == b"one"
            assert not samples.put(2, b"two")
        with cache.samples("b", 10) as samples:
            assert samples.put(2, b"two")


def test_the_space_of_arrays_has_no_values(cache: forebay.Cache) -> None:
    with cache.samples("a", 10) as samples:
        samples.put(1, b"one")
        assert cache.space("samples").get("a") is None
        assert samples.get(1) == b"one"
    assert cache.samples("a").get(1) == b"one"


def test_evicting_and_pinning_by_name(cache: forebay.Cache) -> None:
    with cache.samples("a", 10) as samples:
        samples.put(1, b"one")
        assert cache.evict("samples:a").spared == ("samples:a",)
    cache.pin("samples:a")
    cache.unpin("samples:a")
    assert cache.evict("samples:a").removed == ("samples:a",)
    assert os.listdir(cache.path / "packs") == []


# -- from PFIO ---------------------------------------------------------------------------------------------------------


@pytest.mark.processes
@pytest.mark.keeps("PFIO leaves a descriptor of its own file open")
@pytest.mark.parametrize("how", ["a cache", "default"])
@pytest.mark.parametrize("pickled", [False, True], ids=["raw", "pickle"])
def test_what_pfio_preserved(cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, pickled: bool) -> None:
    pfio = pytest.importorskip("pfio.cache")
    values: list[Any] = [b"zero", None, b"", b"three" * 1000] if not pickled else [{"a": 1}, None, [], "three"]
    with pfio.MultiprocessFileCache(5, dir=str(tmp_path), do_pickle=pickled) as theirs:
        for i, value in enumerate(values):
            if value is not None:
                theirs.put(i, value)
        theirs.preserve("kept")
    codec = "pickle" if pickled else "raw"
    where = cache if how == "a cache" else None
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "default"))
    ours = import_pfio(tmp_path / "kept", "mine", where, codec=codec)
    assert (len(ours), ours.name, ours.frozen) == (5, "mine", True)
    assert [ours.get(i) for i in range(5)] == [*values, None]
    with pytest.raises(ValueError, match="mine"):
        import_pfio(tmp_path / "kept", "mine", where, codec=codec)
    again = import_pfio(tmp_path / "kept", "mine", where, codec=codec, overwrite=True)
    assert again.get(0) == values[0]
    ours.close()
    again.close()
    if how == "default":
        ours._fetcher.close()


def test_the_import_of_pfios_files_says_where_it_is_now(cache: forebay.Cache) -> None:
    for where in (forebay.Samples, cache.samples(length=3)):
        with pytest.raises(AttributeError, match=r"forebay\.adapters\.pfio\.import_pfio"):
            where.import_pfio  # noqa: B018


def test_a_file_that_is_not_pfios(cache: forebay.Cache, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(os.urandom(1000))
    with pytest.raises(errors.Damaged):
        import_pfio(tmp_path / "other", "mine", cache)
    with pytest.raises(FileNotFoundError):
        import_pfio(tmp_path / "none", "mine", cache)
    with pytest.raises(ValueError, match="codec"):
        import_pfio(tmp_path / "other", "mine", cache, codec="numpy")
    assert names(cache) == []


def test_get_or_put_counts_one_miss_or_one_hit(cache: forebay.Cache) -> None:
    with cache.samples("a", 10) as samples:
        for _ in range(3):
            for i in range(5):
                samples.get_or_put(i, lambda: bytes(1000))
    counts = cache.stats()
    assert (counts.hits, counts.misses, counts.bytes_hit, counts.bytes_stored) == (10, 5, 10_000, 5000)


def test_a_function_that_raises_a_fault_of_the_cache_runs_once(cache: forebay.Cache) -> None:
    samples, ran = cache.samples("a", 10), []

    def make() -> bytes:
        ran.append(1)
        raise errors.NoSpace.of("elsewhere", 1, 0, 0)

    with pytest.raises(errors.NoSpace, match="elsewhere"):
        samples.get_or_put(1, make)
    assert len(ran) == 1


def _worker(samples: forebay.Samples) -> None:
    for _ in range(2):
        for i in range(5):
            samples.get(i)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_tells_what_it_found_when_it_ends(cache: forebay.Cache, method: str) -> None:
    with cache.samples("a", 10) as samples:
        for i in range(4):
            samples.put(i, bytes(1000))
        worker = multiprocessing.get_context(method).Process(target=_worker, args=(samples,))
        worker.start()
        worker.join()
        counts = cache.stats()
        assert (counts.hits, counts.misses, counts.bytes_hit) == (8, 2, 8000)


def test_an_array_may_have_the_name_of_the_lock_of_a_slot(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0, timeout=2.0) as cache, cache.samples("a", 4) as array:
        name = f"{next(iter(cache.entries('samples'))).id:x}/3"

        def make() -> bytes:
            with cache.samples(name, 2) as other:
                return b"made" if other.put(0, b"of other") else b""

        assert array.get_or_put(3, make) == b"made"
        with cache.samples(name) as other:
            assert other.get(0) == b"of other"
        assert cache.check() == []
