"""Roots that others can write to: what lies there is not executed, unless that was asked for."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from forebay import Cache, errors
from tests.items import Items
from tests.processes import fork
from tests.scenarios.test_s10_two_users import A, B, as_user


@pytest.fixture
def shared(quick_path: Path) -> Iterator[Cache]:
    with Cache(quick_path / "shared", shared=True, budget="64MiB", min_free=0) as cache:
        yield cache
        assert cache.check(deep=True) == []


class Result:
    """Nothing but a pickle stores it."""


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


ALLOWED = r"codec='pytree' stores arrays.*the value is a .*Result: use codec='pickle', where you trust everybody who can write"


def test_the_default_codec_does_not_pickle(shared: Cache) -> None:
    tasks = shared.tasks("flow")
    work = tasks.cached(lambda x: {"a": np.arange(x), "n": [x]})
    for found in (work(3), work(3)):
        assert found["a"].tolist() == [0, 1, 2]
        assert not found["a"].flags.writeable
    with pytest.raises(errors.ConfigError, match=ALLOWED):
        tasks.write("t", Result())
    with pytest.raises(errors.ConfigError, match=ALLOWED):
        tasks.cached(lambda: Result())()
    assert not tasks.has("t")


def test_who_says_so_gets_pickle(shared: Cache) -> None:
    tasks = shared.tasks("flow", codec="pickle")
    assert isinstance(tasks.cached(lambda: Result())(), Result)
    assert pickle.loads(pickle.dumps(tasks)).write("t", Result())
    assert isinstance(tasks.read("t")[1], Result)


def pickles(cache: Cache) -> bool:
    try:
        cache.tasks("flow").write("t", Result())
    except errors.ConfigError:
        return False
    return True


def test_in_a_root_of_ones_own_it_is_the_default(quick_path: Path, shared: Cache) -> None:
    with Cache(quick_path / "own", budget="64MiB", min_free=0) as own:
        assert pickles(own)
        (quick_path / "own").chmod(0o770)
        assert not pickles(own)
        (quick_path / "own").chmod(0o700)
    with Cache(enabled=False) as off:
        assert pickles(off)


def test_a_pickle_of_anothers_is_a_miss(shared: Cache, tmp_path: Path) -> None:
    tasks = shared.tasks("flow")
    work = tasks.cached(lambda: 3, tag="t")
    bad = shared.tasks("flow", codec="pickle")
    assert bad.write("v", Evil(tmp_path / "executed"))
    assert bad.write(work.tag_of(), Evil(tmp_path / "executed"))
    assert tasks.read("v") == (False, None)
    assert work() == 3
    assert not (tmp_path / "executed").exists()


@pytest.mark.root
def test_what_another_user_keeps_is_not_executed() -> None:
    place = Path(tempfile.gettempdir(), f"forebay-test-{os.getpid()}")
    place.mkdir(mode=0o700)
    try:
        os.chown(place, A, 61_003)
        place.chmod(0o2770)

        def first() -> None:
            with Cache(place / "root", shared=True, budget="64MiB", min_free=0) as cache:
                assert cache.tasks("flow", codec="pickle").write("t", Evil(place / "executed"))

        def second() -> Any:
            with Cache(place / "root", shared=True) as cache:
                return cache.tasks("flow").read("t")

        fork(as_user(A, first)).result()
        assert fork(as_user(B, second)).result() == (False, None)
        assert not (place / "executed").exists()
    finally:
        shutil.rmtree(place)


def test_upstream_counts_too(quick_path: Path, shared: Cache) -> None:
    with Cache(quick_path / "own", upstream=shared.path, budget="64MiB", min_free=0) as own:
        assert not pickles(own)


# -- prefetchers -------------------------------------------------------------------------------------------------------


def test_what_was_decoded_is_kept_without_pickle(shared: Cache) -> None:
    source = Items(2)
    how: dict[str, Any] = {"store": "decoded", "decode": lambda key, data: (np.frombuffer(data, "u1"), key)}
    with shared.prefetcher(source, **how) as pool:
        found, key = pool.get_lazy("a").get()
        assert (found.tobytes(), key) == (source["a"], "a")
    how["decode"] = lambda key, data: Result()
    with shared.prefetcher(source, name="other", **how) as pool, pytest.raises(errors.ConfigError, match="codec='pickle'"):
        pool.get_lazy("a").get()
    with shared.prefetcher(source, name="other", codec="pickle", **how) as pool:
        assert isinstance(pool.get_lazy("a").get(), Result)


def test_a_spilled_object_is_known_again_by_who_spilled_it(shared: Cache, tmp_path: Path) -> None:
    evil = pickle.dumps(Evil(tmp_path / "executed"))
    with shared.prefetcher(Items()) as pool:
        assert pool.put([Result(), bytes(300_000)], "good").get()[1] == bytes(300_000)
        before = set((shared.path / "blobs").glob("*/*"))
        lazy: Any = pool.put([Result(), bytes(300_000)], "changed")
        (path,) = set((shared.path / "blobs").glob("*/*")) - before
        path.chmod(0o600)
        with open(path, "r+b") as file:
            file.write(forebay.codecs.framed(evil))  # type: ignore[attr-defined]
        with pytest.raises(errors.Damaged, match="create it again"):
            lazy.get()
    assert not (tmp_path / "executed").exists()


@pytest.mark.frameworks
def test_energon_keeps_sources_without_pickle(shared: Cache, tmp_path: Path) -> None:
    pytest.importorskip("megatron.energon")
    from megatron.energon.epathlib import EPath
    from megatron.energon.source_info import SourceInfo

    from forebay.adapters import energon
    from tests.adapters.test_energon import Store

    info = SourceInfo(dataset_path=EPath(tmp_path), index=3, shard_name="0.tar", file_names=("a", "b"))
    framed = energon._noted_plainly(b"data", info)
    store = Store(tmp_path / "reads")
    found = energon._decoded(store, "a", framed, True)
    assert found[1] == info
    assert found[0] == energon._decoded(store, "a", energon._noted(b"data", info, decoded=False), False)[0]
    evil = energon._noted(Evil(tmp_path / "executed"), info, decoded=True)
    for bad in (evil, energon.Noted.of(b"data", "4"), energon.Noted.of(b"data", "4~~"), energon.Noted.of(b"data", framed.note[:-5])):
        assert energon._decoded(store, "a", bad, True)[1].index == "a"  # read anew
    assert not (tmp_path / "executed").exists()
    with pytest.raises(errors.ConfigError, match="use method='pickle'"):
        energon._noted_plainly(Result(), info)
    pool = energon.FileStoreCachePool(cache=shared, max_cache_size_gbytes=0.01)
    sample: dict[str, Any] = {}
    assert pool.get_lazy(store, "x").get(sample) == store["x"][0]
    assert sample["__sources__"][0].index == "x"
    pool.close()


@pytest.mark.parametrize("read_only", [False, True])
def test_a_groups_root_is_opened_by_those_who_ask_for_one(
    shared: Cache, read_only: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(errors.RootRefused, match=r"group .* can write to: pass shared=True, or set FOREBAY_SHARED=1") as caught:
        Cache(shared.path, read_only=read_only)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    monkeypatch.setenv("FOREBAY_SHARED", "1")
    with Cache(shared.path, read_only=read_only) as cache:
        assert cache.entries() == []
    with pytest.raises(errors.RootRefused, match="shared=True"):
        Cache(shared.path, shared=False, read_only=read_only)
    monkeypatch.delenv("FOREBAY_SHARED")
    again = pickle.loads(pickle.dumps(shared))  # who asked for it did so for those that it sends its cache to
    again.close()


def test_a_root_that_a_group_was_let_into_later_is_one(quick_path: Path) -> None:
    with Cache(quick_path / "root", budget="64MiB", min_free=0):
        pass
    (quick_path / "root").chmod(0o770)
    with pytest.raises(errors.RootRefused, match="shared=True"):
        Cache(quick_path / "root")


def modes(place: Path) -> dict[str, int]:
    names = ("catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "counters", "shared/head", "locks/keys", "locks/words")
    return {name: (place / name).stat().st_mode & 0o777 for name in names}


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("group", [False, True])
def test_files_have_the_modes_of_their_root(quick_path: Path, umask: int, group: bool) -> None:
    """Also those that an older version left readable to everybody."""
    place = quick_path / "root"
    before = os.umask(umask)
    try:
        with Cache(place, shared=group, budget="64MiB", min_free=0) as cache:
            cache.put("k", b"value")
            cache.stats()
            assert set(modes(place).values()) == {0o660 if group else 0o600}
            for name in modes(place):
                (place / name).chmod(0o644)
            with Cache(place, shared=group):
                found = {name: mode for name, mode in modes(place).items() if name.startswith(("catalog", "counters"))}
                assert set(found.values()) == {0o660 if group else 0o600}
    finally:
        os.umask(before)


def test_a_catalog_that_is_a_link_is_made_anew(quick_path: Path) -> None:
    theirs = quick_path / "theirs.sqlite"
    with Cache(quick_path / "root", budget="64MiB", min_free=0) as cache:
        cache.put("k", b"value")
    (quick_path / "root/catalog.sqlite").rename(theirs)
    (quick_path / "root/catalog.sqlite").symlink_to(theirs)
    before = theirs.read_bytes()
    with Cache(quick_path / "root") as cache:
        assert cache.put("k", b"other")
        assert cache.get("k") == b"other"
    assert theirs.read_bytes() == before
    assert not (quick_path / "root/catalog.sqlite").is_symlink()
    assert not list(quick_path.glob("theirs.sqlite-*"))
