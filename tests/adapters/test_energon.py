"""Energon's own interface over the cache: its stores, its samples, its loaders, and a crude dataset that is cooked with it."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import forebay
from forebay import errors
from tests.harness import KiB, MiB
from tests.processes import fork, in_child

pytest.importorskip("megatron.energon")

from megatron.energon import TextSample
from megatron.energon import cache as energon_cache
from megatron.energon.cache import CachePool, DecodeFileStore, FileStore, FileStoreDecoder, Lazy
from megatron.energon.cache.base import FileStoreWrapper, PrimaryFileStore
from megatron.energon.source_info import SourceInfo

from forebay.adapters import energon
from forebay.adapters.energon import FileCacheLazy, FileStoreCachePool, NoCachePool, SpilledLazy

HANG = 30.0
GIB = 1 << 30


class Store(FileStore):  # type: ignore[misc]
    """A store of Energon's: each read is written to a file, and waits for the gate of its key, if there is one."""

    def __init__(self, log: Path, items: dict[str, Any] | None = None, path: str = "/data/pictures") -> None:
        self.log, self.path, self.items = log, path, items
        self.gates: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}

    def __getitem__(self, key: str) -> tuple[Any, SourceInfo]:
        with open(self.log, "ab", buffering=0) as file:
            file.write(f"{key}\n".encode())
        if key in self.begun:
            self.begun[key].set()
        if key in self.gates:
            assert self.gates[key].wait(HANG)
        data = f"data of {key}".encode() if self.items is None else self.items[key]
        return data, SourceInfo(dataset_path=self.path, index=key, shard_name="0.tar", file_names=(key,))

    def get_path(self) -> str:
        return self.path

    def stop(self, key: str) -> None:
        """Let reads of this key wait until its gate is set."""
        self.gates[key], self.begun[key] = threading.Event(), threading.Event()

    @property
    def reads(self) -> list[str]:
        return self.log.read_text().split() if self.log.exists() else []


class Upper(FileStoreDecoder):  # type: ignore[misc]
    """Decodes to a list, so that a copy can be told from the same."""

    def __init__(self, mark: str = "") -> None:
        self.mark, self.runs = mark, 0

    def decode(self, fname: str, data: bytes) -> list[str]:
        self.runs += 1
        return [fname, self.mark, data.decode().upper()]


class Unpicklable(Upper):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("this decoder stays here")


class Configured(Upper):
    """As Energon's own are."""

    __hash__ = None  # type: ignore[assignment]

    def config(self) -> dict[str, Any]:
        return {"mark": self.mark, "kind": str}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "reads")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., FileStoreCachePool]]:
    """Pools over one root, closed at the end."""
    made = []

    def open_pool(**how: Any) -> FileStoreCachePool:
        made.append(FileStoreCachePool(**{"parent_cache_dir": tmp_path, "max_cache_size_gbytes": 64 * MiB / GIB, **how}))
        return made[-1]

    yield open_pool
    for pool in made:
        pool.close()


@pytest.fixture(params=["raw", "pickle", "none"])
def pool(request: pytest.FixtureRequest, make: Callable[..., FileStoreCachePool]) -> CachePool:
    return NoCachePool() if request.param == "none" else make(method=request.param)


# -- what holds for every pool -----------------------------------------------------------------------------------------


def test_the_pools_are_energons(pool: CachePool, store: Store) -> None:
    assert isinstance(pool, CachePool)
    assert isinstance(pool.get_lazy(store, "a.txt"), Lazy)
    assert isinstance(pool.to_cache(1, "one"), Lazy)


def test_a_lazy_gives_what_the_store_holds(pool: CachePool, store: Store) -> None:
    lazy = pool.get_lazy(store, "a.txt")
    assert (lazy.ds, lazy.fname, lazy.pool) == (store, "a.txt", pool)
    assert lazy.get() == b"data of a.txt"
    assert type(lazy.get()) is bytes
    assert store.reads == ["a.txt"]


def test_every_get_gives_the_same_object(pool: CachePool, store: Store) -> None:
    lazy = pool.get_lazy(DecodeFileStore(store, decoder=Upper()), "a.txt")
    first = lazy.get()
    assert first == ["a.txt", "", "DATA OF A.TXT"]
    assert lazy.get() is first
    assert lazy.get({}) is first


SAMPLES: dict[str, Callable[[], Any]] = {
    "dict": dict,
    "list": lambda: {"__sources__": []},
    "none": lambda: {"__sources__": None},
    "sample": lambda: TextSample(__key__="k", __restore_key__=(), text="t"),
    "object": lambda: SimpleNamespace(__sources__=None),
}


@pytest.mark.parametrize("kind", SAMPLES)
def test_sources_are_added_at_each_get(pool: CachePool, store: Store, kind: str) -> None:
    sample = SAMPLES[kind]()
    sources = (lambda: sample["__sources__"]) if isinstance(sample, dict) else lambda: sample.__sources__
    lazy, other = pool.get_lazy(store, "a.txt"), pool.get_lazy(store, "b.txt")
    lazy.get(sample)
    assert [source.file_names for source in sources()] == [("a.txt",)]
    other.get(sample)
    lazy.get(sample)
    assert [source.file_names for source in sources()] == [("a.txt",), ("b.txt",), ("a.txt",)]
    assert sources()[1] == SourceInfo(dataset_path="/data/pictures", index="b.txt", shard_name="0.tar", file_names=("b.txt",))


def test_get_reads_at_once_and_keeps_nothing(pool: CachePool, store: Store) -> None:
    sample: dict[str, Any] = {}
    assert pool.get(DecodeFileStore(store, decoder=Upper()), "a.txt", sample) == ["a.txt", "", "DATA OF A.TXT"]
    assert pool.get(store, "a.txt") == b"data of a.txt"
    assert store.reads == ["a.txt", "a.txt"]
    assert len(sample["__sources__"]) == 1


def test_lazies_are_keys(pool: CachePool, store: Store, tmp_path: Path) -> None:
    same = {pool.get_lazy(store, "a.txt"), pool.get_lazy(store, "a.txt")}
    assert len(same) == 1
    assert pool.get_lazy(store, "b.txt") not in same
    assert pool.get_lazy(Store(tmp_path / "other"), "a.txt") not in same
    assert pool.get_lazy(store, "a.txt") != "a.txt"


def test_an_error_of_the_store_is_each_holders(pool: CachePool, tmp_path: Path) -> None:
    store = Store(tmp_path / "reads", {"a.txt": b"1"})
    lazies = [pool.get_lazy(store, "none.txt") for _ in range(3)]
    for lazy in lazies:
        with pytest.raises(KeyError, match=r"none\.txt"):
            lazy.get()
    store.items = {"none.txt": b"here now"}
    del lazy, lazies
    assert pool.get_lazy(store, "none.txt").get() == b"here now"


def test_an_error_of_the_decoder_is_its_own(pool: CachePool, store: Store) -> None:
    class Failing(Upper):
        def decode(self, fname: str, data: bytes) -> list[str]:
            raise LookupError(f"{fname} is no picture")

    with pytest.raises(LookupError, match=r"a\.txt is no picture"):
        pool.get_lazy(DecodeFileStore(store, decoder=Failing()), "a.txt").get()


def test_to_cache(pool: CachePool) -> None:
    lazies = [pool.to_cache((number, "some data"), "one name") for number in range(3)]
    assert len(set(lazies)) == 3
    assert [lazy.fname for lazy in lazies] == ["one name"] * 3
    sample: dict[str, Any] = {}
    value = lazies[1].get(sample)
    assert value == (1, "some data")
    assert lazies[1].get() is value
    assert sample == {}


def test_the_names_of_one_sample_are_not_anothers(pool: CachePool, store: Store) -> None:
    """Energon hands each sample a view of the primary dataset, in which ".txt" is the sample's own."""
    PrimaryFileStore = pytest.importorskip("megatron.energon.cache.base").PrimaryFileStore
    decoded = DecodeFileStore(store, decoder=Upper())
    lazies = [pool.get_lazy(PrimaryFileStore(decoded, current_key=key), ".txt") for key in ("one", "two")]
    assert [lazy.get()[0] for lazy in lazies] == ["one.txt", "two.txt"]
    again = PrimaryFileStore(decoded, current_key="two")
    assert pool.get_lazy(again, "other.txt").get()[0] == "other.txt"
    assert pool.get_lazy(again, ".txt") == lazies[1]


def test_values_that_are_no_bytes(pool: CachePool, tmp_path: Path) -> None:
    values = {"a": {"a": 1}, "b": None, "c": bytearray(b"bytes"), "d": "text", "e": b""}
    store = Store(tmp_path / "reads", values)
    assert {key: pool.get_lazy(store, key).get() for key in values} == values


# -- what is kept ------------------------------------------------------------------------------------------------------


def held(pool: FileStoreCachePool) -> tuple[int, int]:
    return pool.current_cache_size, pool.current_cache_count


def come_to(wanted: Callable[[], object]) -> None:
    """Wait for what another thread does on its own."""
    deadline = time.monotonic() + HANG
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def loaded(lazies: list[FileCacheLazy], pool: FileStoreCachePool) -> None:
    """Wait until all are in the cache."""
    names = len({(id(lazy.ds), lazy.fname) for lazy in lazies})
    come_to(lambda: pool.current_cache_count >= names)


@pytest.mark.parametrize("kind", [Upper, Unpicklable, Configured])
def test_a_decoder_is_known_again(make: Callable[..., FileStoreCachePool], store: Store, kind: type[Upper]) -> None:
    pool, decoder = make(method="pickle"), kind()
    first = pool.get_lazy(DecodeFileStore(store, decoder=decoder), "a.txt")
    loaded([first], pool)
    assert decoder.runs == 1, "it is another one by now"
    assert pool.get_lazy(DecodeFileStore(store, decoder=decoder), "a.txt").get() == first.get()
    assert decoder.runs == 1


@pytest.mark.parametrize("method", ["raw", "pickle"])
def test_an_item_goes_with_its_last_holder(make: Callable[..., FileStoreCachePool], store: Store, method: str) -> None:
    pool = make(method=method)
    assert held(pool) == (0, 0)
    lazies = [pool.get_lazy(store, key) for key in ("a.txt", "b.txt", "a.txt")]
    loaded(lazies, pool)
    assert pool.current_cache_count == 2
    assert pool.current_cache_size >= 2 * len(b"data of a.txt")
    lazies.pop(0).get()
    assert pool.current_cache_count == 2, "another lazy holds it"
    lazies.pop(1).get()
    come_to(lambda: pool.current_cache_count == 1)
    del lazies[:]  # dropped, never read
    gc.collect()
    come_to(lambda: held(pool) == (0, 0))
    assert sorted(store.reads) == ["a.txt", "b.txt"]


def test_what_was_put_goes_when_it_was_read_or_dropped(make: Callable[..., FileStoreCachePool]) -> None:
    pool = make()
    read, dropped = pool.to_cache(os.urandom(256 * KiB), "read"), pool.to_cache(os.urandom(256 * KiB), "dropped")
    assert isinstance(read, SpilledLazy)
    assert len(read.get()) == 256 * KiB
    del dropped
    gc.collect()
    come_to(lambda: held(pool) == (0, 0))
    assert len(read.get()) == 256 * KiB


def test_raw_keeps_what_the_store_holds(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    decoder = Upper()
    pool, decoded = make(method="raw"), DecodeFileStore(store, decoder=decoder)
    lazies = [pool.get_lazy(ds, "a.txt") for ds in (decoded, store, decoded)]
    loaded(lazies[:1], pool)
    assert decoder.runs == 0
    assert [lazy.get() for lazy in lazies] == [["a.txt", "", "DATA OF A.TXT"], b"data of a.txt", ["a.txt", "", "DATA OF A.TXT"]]
    assert decoder.runs == 2
    assert store.reads == ["a.txt"], "the bytes are the same, whoever decodes them"


def test_pickle_keeps_what_was_decoded(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    decoder = Upper()
    pool, decoded = make(method="pickle"), DecodeFileStore(store, decoder=decoder)
    lazies = [pool.get_lazy(decoded, "a.txt") for _ in range(3)]
    loaded(lazies, pool)
    assert decoder.runs == 1
    assert [lazy.get() for lazy in lazies] == [["a.txt", "", "DATA OF A.TXT"]] * 3
    assert decoder.runs == 1


def test_decoders_are_not_mistaken_for_each_other(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool = make(method="pickle")
    marks = ["one", "two", "three", "four"]
    decoders = [kind(mark) for mark in marks for kind in (Upper, Unpicklable, Configured)]
    lazies = [pool.get_lazy(DecodeFileStore(store, decoder=decoder), "a.txt") for decoder in decoders]
    assert pool.get_lazy(store, "a.txt").get() == b"data of a.txt"
    assert [lazy.get()[1] for lazy in lazies] == [mark for mark in marks for _ in range(3)]
    more = [pool.get_lazy(DecodeFileStore(store, decoder=decoder), "a.txt") for decoder in decoders]
    assert [lazy.get()[1] for lazy in more] == [mark for mark in marks for _ in range(3)]


def test_two_kinds_of_store_with_one_path(make: Callable[..., FileStoreCachePool], tmp_path: Path) -> None:
    class Other(Store):
        """As a prepared dataset, and the plain files in the same directory."""

    pool = make()
    stores = [Store(tmp_path / "reads"), Other(tmp_path / "reads", {"a.txt": b"another"}), Store(tmp_path / "reads", path="/other")]
    assert [pool.get_lazy(store, "a.txt").get() for store in stores] == [b"data of a.txt", b"another", b"data of a.txt"]
    assert len(stores[0].reads) == 3


class OldStore:
    """As in Energon's older versions: no raw access of its own."""

    def __init__(self, inner_reader: Store, decoder: Upper) -> None:
        self.inner_reader, self.decoder = inner_reader, decoder

    def __getitem__(self, key: str) -> Any:
        data, source = self.inner_reader[key]
        return self.decoder.decode(key, data), source

    def get_path(self) -> str:
        return self.inner_reader.get_path()


def test_a_decoding_store_of_an_older_version(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool, decoder = make(), Upper()
    lazy = pool.get_lazy(OldStore(store, decoder), "a.txt")
    loaded([lazy], pool)
    assert decoder.runs == 0
    sample: dict[str, Any] = {}
    assert lazy.get(sample) == ["a.txt", "", "DATA OF A.TXT"]
    assert sample["__sources__"][0].file_names == ("a.txt",)


# -- several processes, limits -----------------------------------------------------------------------------------------


def test_s06_processes_that_want_the_same_item_read_it_once(make: Callable[..., FileStoreCachePool], store: Store, tmp_path: Path) -> None:
    keys = [f"{number}.txt" for number in range(20)]
    mine = make(method="pickle")
    decoded = DecodeFileStore(store, decoder=Upper())
    lazies = [mine.get_lazy(decoded, key) for key in keys]  # held until the others are done
    loaded(lazies, mine)

    def member() -> tuple[list[Any], list[Any]]:
        with_sources: dict[str, Any] = {}
        pool = FileStoreCachePool(parent_cache_dir=tmp_path, method="pickle")
        found = [lazy.get(with_sources) for lazy in [pool.get_lazy(DecodeFileStore(store, decoder=Upper()), key) for key in keys]]
        pool.close()
        return found, [source.index for source in with_sources["__sources__"]]

    children = [fork(member) for _ in range(3)]
    for child in children:
        assert child.result() == ([[key, "", f"DATA OF {key.upper()}"] for key in keys], keys)
    assert [lazy.get()[0] for lazy in lazies] == keys
    assert sorted(store.reads) == sorted(keys)


def test_s05_the_limit_is_in_gib_and_of_all_processes(make: Callable[..., FileStoreCachePool], tmp_path: Path) -> None:
    store = Store(tmp_path / "reads", {str(number): os.urandom(MiB) for number in range(16)})
    pool = make(max_cache_size_gbytes=4 / 1024)
    assert pool.max_cache_size == 4 * MiB
    lazies = [pool.get_lazy(store, str(number)) for number in range(8)]
    come_to(lambda: pool.current_cache_count >= 3)

    def member() -> int:
        other = FileStoreCachePool(parent_cache_dir=tmp_path, max_cache_size_gbytes=4 / 1024)
        more = [other.get_lazy(store, str(number)) for number in range(8, 16)]
        most = max(other.current_cache_size for _ in range(200))
        assert [lazy.get() for lazy in more] == [store.items[str(number)] for number in range(8, 16)]
        other.close()
        return most

    assert in_child(member) <= 4 * MiB
    assert [lazy.get() for lazy in lazies] == [store.items[str(number)] for number in range(8)]
    come_to(lambda: held(pool) == (0, 0))


@pytest.mark.parametrize("kind", ["Energon's", "ours"])
@pytest.mark.parametrize("method", ["raw", "pickle"])
@pytest.mark.parametrize(("size", "count"), [(1000, 20), (20_000, 8), (MiB, 4)])
def test_a_limit_of_exactly_the_items_bytes_holds_them(
    make: Callable[..., FileStoreCachePool], tmp_path: Path, kind: str, method: Any, size: int, count: int
) -> None:
    store = Store(tmp_path / "reads", {str(number): os.urandom(size) for number in range(count + 1)})
    own = len(pickle.dumps(store.items["0"])) if method == "pickle" else size
    how = {"method": method, "max_cache_size_gbytes": count * own / GIB, "num_workers": 2}
    pool = make(**how) if kind == "ours" else energon_cache.FileStoreCachePool(parent_cache_dir=tmp_path, **how)
    lazies = [pool.get_lazy(store, str(number)) for number in range(count)]
    come_to(lambda: pool.current_cache_count == count)
    assert pool.current_cache_size == count * own == pool.max_cache_size
    one_more = pool.get_lazy(store, str(count))
    come_to(lambda: len(store.reads) == count + 1 or kind == "ours")
    assert (pool.current_cache_size, pool.current_cache_count) == (count * own, count)
    pool.max_cache_size += own
    if kind == "ours":  # Energon's waits until something goes
        come_to(lambda: pool.current_cache_count == count + 1)
        assert pool.current_cache_size == (count + 1) * own
    pool.max_cache_count = count + 5
    assert (pool.max_cache_size, pool.max_cache_count) == ((count + 1) * own, count + 5)
    assert [bytes(lazy.get()) if kind == "ours" else lazy.get() for lazy in lazies] == [store.items[str(n)] for n in range(count)]
    del one_more
    pool.close()


def test_a_lower_limit_binds_what_comes_and_what_nobody_holds(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool = make()
    lazies = [pool.get_lazy(store, f"{number}.txt") for number in range(4)]
    come_to(lambda: pool.current_cache_count == 4)
    pool.max_cache_count = 2
    lazies.append(pool.get_lazy(store, "4.txt"))
    assert pool.current_cache_count == 4, "they are held"
    assert [lazy.get() for lazy in lazies] == [f"data of {number}.txt".encode() for number in range(5)]
    come_to(lambda: held(pool) == (0, 0))
    more = [pool.get_lazy(store, f"{number}.txt") for number in range(10, 14)]
    come_to(lambda: pool.current_cache_count == 2)
    assert pool.current_cache_count == 2
    there = pickle.loads(pickle.dumps(pool))
    assert (there.max_cache_count, there.max_cache_size) == (2, pool.max_cache_size)
    there.close()
    for wrong in (-1, float("nan"), "1GB"):
        with pytest.raises(ValueError, match="max_cache_count"):
            pool.max_cache_count = wrong
        with pytest.raises(ValueError, match="max_cache_size"):
            pool.max_cache_size = wrong
    del more


def test_the_number_of_items_is_limited(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool = make(max_cache_count=2)
    assert pool.max_cache_count == 2
    lazies = [pool.get_lazy(store, f"{number}.txt") for number in range(10)]
    come_to(lambda: pool.current_cache_count == 2)
    assert [lazy.get() for lazy in lazies] == [f"data of {number}.txt".encode() for number in range(10)]
    come_to(lambda: held(pool) == (0, 0))


def test_a_get_of_what_is_being_read_while_others_fill_the_pool(make: Callable[..., FileStoreCachePool], tmp_path: Path) -> None:
    """Energon's own pool stands still for ever here."""
    store = Store(tmp_path / "reads", {"a": bytes(MiB), "b": bytes(MiB)})
    store.stop("a")
    pool = make(max_cache_size_gbytes=1.5 / 1024)
    a = pool.get_lazy(store, "a")
    assert store.begun["a"].wait(HANG)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(a.get()))
    reader.start()
    b = pool.get_lazy(store, "b")
    come_to(lambda: "b" in store.reads)
    store.gates["a"].set()
    reader.join(HANG)
    assert [len(data) for data in found] == [MiB]
    assert len(b.get()) == MiB


def test_s15_an_item_larger_than_the_limit(make: Callable[..., FileStoreCachePool], tmp_path: Path) -> None:
    store = Store(tmp_path / "reads", {"large": os.urandom(2 * MiB), "small": b"1"})
    pool = make(max_cache_size_gbytes=1 / 1024, num_workers=1)
    large, small = pool.get_lazy(store, "large"), pool.get_lazy(store, "small")
    come_to(lambda: pool.current_cache_count == 1)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        assert large.get() == store.items["large"]
    assert small.get() == b"1"


# -- life --------------------------------------------------------------------------------------------------------------


def test_after_close_nothing_more_is_loaded(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool = make()
    kept, spilled = pool.get_lazy(store, "a.txt"), pool.to_cache([1], "one")
    loaded([kept], pool)
    queued = [pool.get_lazy(store, f"{number}.txt") for number in range(30)]
    pool.close()
    pool.close()
    for call in (lambda: pool.get_lazy(store, "b.txt"), lambda: pool.to_cache(1, "one")):
        with pytest.raises(RuntimeError, match="closed"):
            call()
    assert kept.get() == b"data of a.txt"
    assert spilled.get() == [1]
    assert [lazy.get() for lazy in queued] == [f"data of {number}.txt".encode() for number in range(30)]
    assert pool.get(store, "c.txt") == b"data of c.txt"


@pytest.mark.parametrize("method", ["raw", "pickle"])
def test_s17_a_pool_is_good_on_both_sides_of_a_fork(make: Callable[..., FileStoreCachePool], tmp_path: Path, method: str) -> None:
    """Energon's own pool refuses a fork while a load is pending."""
    store = Store(tmp_path / "reads")
    store.stop("a.txt")
    pool = make(method=method)
    lazies = [pool.get_lazy(store, key) for key in ("a.txt", *(f"{number}.txt" for number in range(20)))]
    assert store.begun["a.txt"].wait(HANG)

    def child() -> list[bytes]:
        store.gates["a.txt"].set()
        found = [lazy.get() for lazy in [*lazies, pool.get_lazy(store, "new.txt")]]
        pool.close()
        return found

    wanted = [b"data of a.txt", *(f"data of {number}.txt".encode() for number in range(20)), b"data of new.txt"]
    forked = fork(child)
    store.gates["a.txt"].set()
    assert [lazy.get() for lazy in [*lazies, pool.get_lazy(store, "new.txt")]] == wanted
    assert forked.result() == wanted


def test_a_pool_is_pickled_as_its_place(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool = make(method="pickle", num_workers=3, max_cache_count=100)
    other = pickle.loads(pickle.dumps(pool))
    try:
        assert (other.cache_dir, other.method, other.num_workers) == (pool.cache_dir, "pickle", 3)
        assert (other.max_cache_size, other.max_cache_count) == (64 * MiB, 100)
        assert other.get_lazy(store, "a.txt").get() == b"data of a.txt"
    finally:
        other.close()


def test_an_open_cache_is_used_and_left_open(tmp_path: Path, store: Store) -> None:
    with forebay.Cache(tmp_path / "root", budget="64MiB") as cache:
        pool = FileStoreCachePool(cache=cache)
        lazy = pool.get_lazy(store, "a.txt")
        loaded([lazy], pool)
        assert cache.stats().spaces["energon"][0] == 1
        assert pool.cache_dir == cache.path
        assert lazy.get() == b"data of a.txt"
        pool.close()
        assert not cache.closed


def test_without_a_cache_it_loads_all_the_same(store: Store) -> None:
    pool = FileStoreCachePool(cache=forebay.Cache(enabled=False))
    assert [lazy.get() for lazy in [pool.get_lazy(store, key) for key in ("a.txt", "b.txt")]] == [b"data of a.txt", b"data of b.txt"]
    assert pool.to_cache([1], "one").get() == [1]
    assert held(pool) == (0, 0)
    pool.close()


class Inside(FileStoreWrapper):  # type: ignore[misc]
    """Reads below a directory of the store inside, whose path it keeps."""

    def __init__(self, inner: Any, below: str) -> None:
        super().__init__(inner)
        self.below = below

    def __getitem__(self, key: str) -> Any:
        return self._inner[f"{self.below}/{key}"]

    def _get_raw(self, key: str) -> Any:
        return self._inner._get_raw(f"{self.below}/{key}")

    def get_path(self) -> str:
        return str(self._inner.get_path())


class Stuck(Store):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("this store stays here")


class Unhashable(Store):
    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("method", ["raw", "pickle"])
@pytest.mark.parametrize("kind", [Store, Stuck, Unhashable])
def test_two_stores_of_one_class_and_path(make: Callable[..., FileStoreCachePool], tmp_path: Path, kind: type[Store], method: str) -> None:
    pool = make(method=method)
    stores = [kind(tmp_path / "reads", {"a.txt": data, "b/a.txt": data + data}) for data in (b"one", b"another")]
    stores += [Inside(store, "b") for store in stores]
    lazies = [pool.get_lazy(store, "a.txt") for store in stores for _ in range(2)]
    assert [lazy.get() for lazy in lazies] == [b"one"] * 2 + [b"another"] * 2 + [b"oneone"] * 2 + [b"anotheranother"] * 2
    assert len(stores[0].reads) == 4  # once each
    if kind is not Stuck:
        assert make(method=method)._stores.key(stores[1], "a.txt", method, False) == pool._stores.key(stores[1], "a.txt", method, False)


def test_a_name_of_a_sample_below_a_decoder(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    for method in ("raw", "pickle"):
        pool = make(method=method)
        keys = {pool._stores.key(DecodeFileStore(PrimaryFileStore(store, k), decoder=Upper()), ".x", method, False) for k in "ab"}
        assert len(keys) == 2


def test_limits_are_numbers_of_any_kind(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool = make(max_cache_count=1e6)
    assert pool.max_cache_count == 1_000_000
    pool.max_cache_size, pool.max_cache_count = 1.5 * GIB, 10.0
    assert (pool.max_cache_size, pool.max_cache_count) == (1.5 * GIB, 10)
    pool.max_cache_size = float("inf")
    assert pool.get_lazy(store, "a").get() == b"data of a"
    for wrong in (-1, float("nan"), "1"):
        for name in ("max_cache_size", "max_cache_count"):
            with pytest.raises(errors.ConfigError, match=name):
                setattr(pool, name, wrong)
        with pytest.raises(errors.ConfigError, match="max_cache_size_gbytes"):
            make(max_cache_size_gbytes=wrong)


def test_the_method_can_be_set(make: Callable[..., FileStoreCachePool], store: Store) -> None:
    pool, decoding = make(), DecodeFileStore(store, decoder=Upper())
    store.stop("a")
    raw = pool.get_lazy(decoding, "a")
    assert store.begun["a"].wait(HANG)
    pool.method = "pickle"
    store.gates.pop("a").set()
    assert pool.get_lazy(decoding, "b").get() == ["b", "", "DATA OF B"]
    assert raw.get() == ["a", "", "DATA OF A"]
    with pytest.raises(ValueError, match="method='decoded' is unknown"):
        pool.method = "decoded"
    copy = pickle.loads(pickle.dumps(pool))
    copy.close()
    assert (pool.method, copy.method) == ("pickle", "pickle")


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match="method"):
        FileStoreCachePool(parent_cache_dir=tmp_path, method="decoded")  # type: ignore[arg-type]
    with forebay.Cache(tmp_path / "root", budget="64MiB") as cache, pytest.raises(errors.ConfigError, match="one of them"):
        FileStoreCachePool(parent_cache_dir=tmp_path, cache=cache)


NOTES = [
    (energon._noted(b"data", None, decoded=False), "0", b"data upper"),
    (energon._noted(["data"], None, decoded=False), "1", ["data", "upper"]),
    (energon._noted(b"data", None, decoded=True), "3", b"data"),
    (energon._noted_plainly(b"data", None), "4", b"data upper"),
]


@pytest.mark.parametrize(("noted", "digit", "value"), NOTES)
def test_what_older_versions_kept_can_be_read(noted: Any, digit: str, value: Any) -> None:
    """The first character of a note is one digit, and stays."""

    class Decoding:
        def _decode_raw(self, data: Any, *, fname: str) -> Any:
            return data + (b" upper" if isinstance(data, bytes) else ["upper"])

        def __getitem__(self, fname: str) -> Any:
            raise AssertionError("it is kept, and read anew")

    assert noted.note[0] == digit
    assert energon._decoded(Decoding(), "fname", noted, plain=digit == "4") == (value, None)


def test_without_energon_the_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['megatron'] = None\n"
        "import forebay\n"
        "try: import forebay.adapters.energon\n"
        "except forebay.errors.MissingExtra as error: print(error.extra, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("energon "), done.stderr
    assert "the extra 'energon'" in done.stdout
