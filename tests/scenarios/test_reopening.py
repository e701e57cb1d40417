"""A handle that was opened while the root could not be used does not stay past the cache for life."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import pickle
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import host, waits
from forebay.cache import fault_of
from forebay.testing import ScriptedServer
from tests.harness import fill_the_disk, writer_lock
from tests.items import until
from tests.processes import HANG, Gate, fork, in_child

BODY = b"body" * 30_000


class Source:
    uri, version = "here://source", "1"

    def __init__(self) -> None:
        self.read: list[str] = []

    def __getitem__(self, key: str) -> bytes:
        self.read.append(key)
        return b"item"


class Disk:
    """Full until it is said that it is not; and no pause before what failed is tried again. ``before`` is called before space is taken."""

    full = True
    before: Callable[[], object] = staticmethod(lambda: None)

    def allocate(self, *args: Any) -> None:
        self.before()
        if self.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.real(*args)

    def __init__(self) -> None:
        self.real = host.allocate


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pause before what failed is tried again."""
    monkeypatch.setattr(waits, "FIRST_PAUSE", 0.0)
    monkeypatch.setattr(waits, "LONGEST_PAUSE", 0.0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch, at_once: None) -> Iterator[Disk]:
    found = Disk()
    monkeypatch.setattr(host, "allocate", found.allocate)
    return found


@pytest.mark.usefixtures("at_once")
def test_every_front_uses_the_cache_once_it_can_be_used(tmpfs: Callable[[str], Path], server: ScriptedServer) -> None:
    """On a disk that another program's file fills, until it is removed."""
    url, source, small = server.put("/x", BODY), Source(), tmpfs("64m")
    fill_the_disk(small)
    with forebay.Cache(small / "root", budget=32 << 20, min_free=0) as cache:
        assert fault_of(cache) is not None
        space, tasks, samples = cache.space("s", quota=1 << 20), cache.tasks("t", budget=1 << 20), cache.samples("array", 4)
        unnamed = cache.samples(length=4, codec="pickle")
        pool = cache.prefetcher(source)
        calls: list[int] = []
        double = tasks.cached(lambda x: calls.append(x) or 2 * x, tag="d-{x}")
        for _ in range(2):
            assert cache.read(url) == BODY
            assert not cache.put("k", b"v")
            assert not space.put("k", b"v")
            assert not tasks.write("tag", 1)
            assert double(2) == 4
            assert not samples.put(0, b"sample")
            assert not unnamed.put(0, "sample")
            assert pool.get_lazy("a").get() == b"item"
            assert cache.stats().entries == 0
        data = pickle.dumps((samples, pool))

        (small / "others").unlink()
        assert cache.read(url) == cache.read(url) == BODY
        gets = server.gets
        assert cache.read(url) == BODY
        assert server.gets == gets
        assert cache.put("k", b"v")
        assert cache.get("k") == b"v"
        assert space.put("k", b"v")
        assert space.get("k") == b"v"
        assert tasks.write("tag", 1)
        assert tasks.read("tag") == (True, 1)
        assert tasks.budget == 1 << 20
        calls.clear()
        assert [double(3), double(3)] == [6, 6]
        assert calls == [3]
        for array, value in ((samples, b"sample"), (unnamed, "sample")):
            array.get(0)  # looks again
            assert array.put(1, value)
            assert array.get(1) == value
        source.read.clear()
        for _ in range(2):
            assert pool.get_lazy("b").get() == b"item"
        assert source.read == ["b"]
        until(lambda: pool.count == 1)  # it is handed out before it is stored

        def arrived() -> tuple[object, object]:
            samples, pool = pickle.loads(data)
            return bytes(samples.get(1)), pool.get_lazy("b").get()

        assert in_child(arrived) == (b"sample", b"item")
        unnamed.close()
        stats = cache.stats()
        assert (stats.budget, dict(stats.spaces)["s"][0]) == (32 << 20, 1)
        assert cache.path == small / "root"
        assert cache.check(deep=True) == []
        pool.close()


@pytest.mark.usefixtures("at_once")
def test_a_root_without_a_catalog_while_another_process_writes(tmp_path: Path) -> None:
    """Only who has the writer lock can make one, and another process has it for now."""
    place, held, on = tmp_path / "root", Gate(), Gate()

    def hold() -> None:
        forebay.Cache(place, budget=32 << 20, min_free=0).close()
        with writer_lock(place):
            (place / "catalog.sqlite").unlink()
            held.open()
            on.wait()

    child = fork(hold)
    held.wait()
    with forebay.Cache(place, timeout=0.3) as cache:
        assert fault_of(cache) is not None
        assert not cache.put("k", b"v")
        on.open()
        child.result()
        assert cache.put("k", b"v")
        assert cache.get("k") == b"v"
        assert cache.budget == 32 << 20, "what was set survives the catalog"
        assert cache.check(deep=True) == []


def test_opening_is_not_tried_again_at_each_call(tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "FIRST_PAUSE", 3600.0)
    with forebay.Cache(tmp_path / "root") as cache:
        disk.full = False
        for n in range(100):
            assert not cache.put(f"k{n}", b"v")
        assert fault_of(cache) is not None


def test_a_cache_that_is_switched_off_stays_so(tmp_path: Path, disk: Disk) -> None:
    disk.full = False
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        assert not cache.put("k", b"v")
        assert cache.get("k") is None
        assert not (tmp_path / "root").exists()


@contextlib.contextmanager
def passing(root: Path, disk: Disk) -> Iterator[forebay.Cache]:
    with forebay.Cache(root, budget=64 << 20, min_free=0) as cache:
        assert fault_of(cache) is not None
        disk.full = False
        yield cache


def test_a_try_that_was_interrupted_is_made_again(tmp_path: Path, disk: Disk) -> None:
    with passing(tmp_path / "root", disk) as cache:
        for error in (KeyboardInterrupt(), errors.ConfigError("the root makes no sense now"), OSError(errno.EIO, "no")):
            disk.before = raising(error)
            with pytest.raises(KeyboardInterrupt) if isinstance(error, KeyboardInterrupt) else contextlib.nullcontext():
                assert not cache.put("k", b"v")
        disk.before = lambda: None
        assert cache.put("k", b"v")


def raising(error: BaseException) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        raise error

    return call


@contextlib.contextmanager
def opened_elsewhere(cache: forebay.Cache, disk: Disk) -> Iterator[None]:
    """During the block another thread is in the middle of opening the root; afterwards it has opened it."""
    entered, go = threading.Event(), threading.Event()

    def stop() -> None:
        if threading.current_thread() is not threading.main_thread():
            entered.set()
            go.wait(HANG)

    disk.before = stop
    thread = threading.Thread(target=cache.put, args=("mine", b"v"))
    thread.start()
    assert entered.wait(HANG)
    yield
    go.set()
    thread.join()
    disk.before = lambda: None
    assert cache.get("mine") == b"v"


def test_a_child_that_is_forked_while_its_parent_tries_tries_itself(tmp_path: Path, disk: Disk) -> None:
    with passing(tmp_path / "root", disk) as cache:
        parent_opened = Gate()
        with opened_elsewhere(cache, disk):
            assert not cache.put("k", b"v"), "one thread tries at a time"
            child = fork(lambda: (parent_opened.wait(), cache.put("k", b"of the child"))[1])  # two at once: one finds the other writing
        parent_opened.open()
        assert child.result()
        assert cache.get("k") == b"of the child"


def test_spaces_that_cannot_be_made_yet_are_made_by_a_later_call(tmp_path: Path, disk: Disk) -> None:
    with passing(tmp_path / "root", disk) as cache:
        disk.full = True
        some = [cache.space(name, quota=1 << 20) for name in ("a", "b")]
        cache.space("c", policy="nonsense")
        disk.full = False
        for space in some:
            assert space.put("k", bytes(1 << 16))
            assert not space.put("large", bytes(2 << 20)), "above its quota"


def test_a_space_that_is_asked_for_while_another_thread_opens(tmp_path: Path, disk: Disk) -> None:
    with passing(tmp_path / "root", disk) as cache:
        with opened_elsewhere(cache, disk):
            space = cache.space("a", quota=1 << 20)
        assert not space.put("large", bytes(2 << 20))
        assert not cache.space("a").put("large", bytes(2 << 20))


def test_a_prefetcher_that_cannot_be_opened_yet_reads_past_the_cache(tmp_path: Path, disk: Disk) -> None:
    disk.full = True
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        pool = cache.prefetcher(Source())
        pool.set_limits(max_count=1)
        for error in (errors.NoSpace("no", key="", need=1, free=0, budget=0), errors.WaitTimeout.of("it", 1.0, "me")):
            disk.before = raising(error)
            assert pool.get_lazy("a").get() == b"item"
        disk.before, disk.full = lambda: None, False
        assert [pool.get_lazy(key).get() for key in "ab"] == [b"item", b"item"]
        assert fault_of(cache) is None
        until(lambda: pool.count == 1, "one of the two")
        pool.close()


def test_a_prefetcher_that_is_closed_while_a_thread_opens_the_root(tmp_path: Path, disk: Disk) -> None:
    disk.full = True
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        pool = cache.prefetcher(Source())
        disk.full = False
        with opened_elsewhere(cache, disk):
            assert pool.get_lazy("a").get() == b"item"
            pool.close()


def test_what_makes_no_sense_by_now_is_told_once(tmp_path: Path, disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    disk.full = True
    with forebay.Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        samples, pool = cache.samples("x", 10), cache.prefetcher(Source(), policy="nonsense")
        disk.full = False
        with forebay.Cache(tmp_path / "root") as other, other.samples("x", 20):
            caplog.clear()
            for _ in range(3):
                assert samples.get(0) is None
                assert not samples.put(0, b"v")
                assert pool.get_lazy("a").get() == b"item"
        for words in ("nothing is found in this array", "the prefetcher goes on without the cache"):
            assert len([1 for record in caplog.records if words in record.message]) == 1


@pytest.mark.parametrize("way", ["local", "alocal"])
@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_an_object_is_fetched_into_the_root_that_takes_the_place(tmp_path: Path, server: ScriptedServer, how: str, way: str) -> None:
    """The root is gone while it is fetched: a lease has no bytes past the cache to fall back to."""
    root, lost, body = tmp_path / "root", list[bool](), BODY * 30

    def lose(*_: object) -> None:
        if not lost:
            lost.append(True)
            root.rename(tmp_path / "moved") if how == "moved" else shutil.rmtree(root)

    url = server.put("/large.bin", body)
    with forebay.Cache(root, budget="64MiB") as cache:

        async def leased() -> forebay.Lease:
            return await cache.alocal(url, on_progress=lose)

        with cache.local(url, on_progress=lose) if way == "local" else asyncio.run(leased()) as lease:
            assert lost
            assert Path(lease).read_bytes() == body
        assert cache.check() == []
