"""Signals wait while something is unpickled that opens, locks or maps: a cache, a lease, a claim, ..."""

from __future__ import annotations

import copyreg
import functools
import gc
import io
import operator
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
import forebay.claims
from forebay import tasks
from forebay._engine.store import Store
from forebay._kernel import interrupts, locks
from forebay.sources import UrlSource
from forebay.sources.tar import TarSource
from tests.harness import MiB
from tests.interrupts.signals import NUMBER, handler_that_raises, interrupted_after
from tests.interrupts.test_public import VALUES, is_guarded, members_of, public
from tests.processes import ProcessGroup

HOLDS_NOTHING = {
    "forebay.claims._unpickle",  # returns the claim that this process has, or that of `_join`, which is guarded
    "forebay.fetch.prefix.RemoteAccess.__init__", "forebay.sources.shards.ShardIndexes.__setstate__",  # open nothing until they are used
    "forebay.tasks.cached._made", "forebay.tasks.naming._unpickle",  # analyse a function
}  # fmt: skip
"""What unpickling calls, and need not be guarded."""
OF_ADAPTERS = {
    "forebay.adapters.energon.FileStoreCachePool.__init__",  # opens a cache and a prefetcher by guarded calls, which end when it is dropped
    "forebay.adapters.torch.shards.Shards.__setstate__",  # memory of PyTorch
}


class Source(dict[str, bytes]):
    uri, version = "test://items", "1"


def _square(x: int) -> int:
    return x * x


class Place:
    """One of each object that can be pickled."""

    def __init__(self, folder: Path) -> None:
        self.cache = cache = forebay.Cache(folder / "root", budget=32 * MiB, min_free=0)
        files = folder / "files"
        files.mkdir()
        (files / "file").write_bytes(b"x" * 30_000)
        self.lease = cache.local(files / "file", force=True)
        self.samples = cache.samples("s", 10)
        self.pool = cache.prefetcher(Source(a=b"x"), name="p")
        self.claim = forebay.claim([], world=forebay.World(1, 1, 1, 0), job=f"unpickling {os.getpid()}")
        self.objects: dict[str, Any] = {
            "cache": cache, "space": cache.space("sp"), "samples": self.samples, "unnamed samples": cache.samples(length=10),
            "tasks": cache.tasks("t"), "a cached function": cache.tasks("t").cached(_square), "pool": self.pool,
            "a lazy": self.pool.get_lazy("a"), "spilled": self.pool.put(b"x" * 30_000), "lease": self.lease,
            "local files": cache.local_many([files / "file"], force=True), "directory": cache.directory(files, force=True),
            "urls": UrlSource("https://example.com/"), "shards": TarSource("https://example.com/{0..1}.tar"),
            "checkpoint": forebay.Checkpoint(str(files), cache=cache),
            "claim": self.claim, "lock": self.claim.lock("l"), "barrier": self.claim.barrier("b"),
            "scalar": self.claim.scalar("n", "int64"),
        }  # fmt: skip

    def close(self) -> None:
        self.claim.close()
        self.cache.close()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("FOREBAY_CLAIMS", str(tmp_path / "claims"))
    place = Place(tmp_path)
    yield place
    place.close()


class Pickler(pickle.Pickler):
    """Notes each object of Forebay that it pickles, and those inside."""

    def __init__(self) -> None:
        self.written = io.BytesIO()
        super().__init__(self.written, 5)
        self.seen = list[Any]()

    def reducer_override(self, thing: Any) -> Any:
        if type(thing).__module__.startswith("forebay") and not isinstance(thing, type):
            self.seen.append(thing)
        return NotImplemented


def called(thing: Any) -> Callable[..., Any] | None:
    """The function of Forebay that unpickling calls to make such a thing; None: Python's own, which sets attributes."""
    call, *rest = thing.__reduce_ex__(5)
    while isinstance(call, functools.partial):
        call = call.func
    if isinstance(call, operator.methodcaller):
        call = getattr(type(rest[0][0]), call.__reduce__()[1][0])
    if isinstance(call, type):
        call = call.__init__
    if call in (copyreg.__newobj__, getattr(copyreg, "__newobj_ex__", None)):
        call = getattr(type(thing), "__setstate__", None)
    return call if getattr(call, "__module__", "").startswith("forebay") else None


def unguarded_calls(things: dict[str, Any]) -> tuple[set[str], set[type]]:
    """The names of what unpickling these things calls unguarded, and the types of all that is in the pickles."""
    names, types = set(), set()
    for thing in things.values():
        pickler = Pickler()
        pickler.dump(thing)
        types |= {type(each) for each in pickler.seen}
        calls = [call for call in map(called, pickler.seen) if call is not None]
        names |= {f"{call.__module__}.{call.__qualname__}" for call in calls if not is_guarded(call)}
    return names, types


def test_what_unpickling_calls_is_guarded(place: Place) -> None:
    names, _ = unguarded_calls(place.objects)
    assert names <= HOLDS_NOTHING


@pytest.mark.parametrize("kind", [TimeoutError, KeyboardInterrupt])
@pytest.mark.parametrize("name", ["cache", "space", "samples", "tasks", "pool", "lease", "directory"])
def test_an_interrupted_unpickling_raises_and_leaves_nothing_open(
    place: Place, monkeypatch: pytest.MonkeyPatch, name: str, kind: type[BaseException]
) -> None:
    """A signal after each lock that it takes: what was opened ends with the result."""
    data = pickle.dumps(place.objects[name])
    place.close()
    place.objects.clear()
    del place.lease, place.samples, place.pool
    _close_dropped(place)
    at, interrupted = 1, True
    while interrupted:
        interrupted = _is_interrupted(monkeypatch, data, kind, at)
        _close_dropped(place)
        assert not Store._opened, f"at lock {at}"
        at += 2
    assert at > 3


def _close_dropped(place: Place) -> None:
    while tasks._unpickled:  # what was unpickled stays open
        tasks._unpickled.popitem()[1].fetcher.close()
    gc.collect()
    forebay.Cache(place.cache.path).close()


def _is_interrupted(monkeypatch: pytest.MonkeyPatch, data: bytes, kind: type[BaseException], at: int) -> bool:
    """Unpickle, with a signal after the ``at``-th lock; False if it takes fewer."""
    error = None
    with handler_that_raises(kind), monkeypatch.context() as patch:
        taken = interrupted_after(patch, locks, "_fcntl", at=at)
        try:
            pickle.loads(data)
        except kind as raised:
            error = str(raised)
    assert (error == "of the handler") is (taken() >= at), error
    return error is not None


def test_a_claim_is_left_if_its_unpickling_is_interrupted(place: Place, monkeypatch: pytest.MonkeyPatch, children: ProcessGroup) -> None:
    data = pickle.dumps(place.claim)

    def interrupted() -> None:
        forebay.claims._open.clear()  # as in a process that was spawned
        with handler_that_raises(), pytest.MonkeyPatch.context() as patch, pytest.raises(TimeoutError, match="of the handler"):
            interrupted_after(patch, forebay.claims, "opened")
            pickle.loads(data)
        assert not forebay.claims._open
        claim = pickle.loads(data)
        assert not claim.closed
        with handler_that_raises(), pytest.MonkeyPatch.context() as patch:  # one that this process has stays
            with pytest.raises(TimeoutError, match="of the handler"):
                interrupts.guarded(lambda: (pickle.loads(data), signal.raise_signal(NUMBER)))()
        assert not claim.closed

    children(interrupted).result()


@pytest.mark.frameworks
@pytest.mark.keeps("shared memory of a name of one's own stays until the process ends")
def test_what_unpickling_calls_is_guarded_in_adapters(place: Place, tmp_path: Path) -> None:
    from forebay.adapters import energon, pfio, ray, streaming, torch

    filled = pfio.FileCache(1, dir=tmp_path / "pfio")
    filled.put(0, b"x")
    filled.preserve("kept")
    read = pfio.ReadOnlyFileCache(1, dir=tmp_path / "pfio")
    assert read.preload("kept")
    name = f"{os.getpid():06}_unpickling"
    number, shared = streaming.get_shm_prefix([str(tmp_path)], [None], forebay.World(1, 1, 1, 0))
    barrier = streaming.SharedBarrier("", f"{number:06}_barrier")
    things: dict[str, Any] = {
        "pool of energon": energon.FileStoreCachePool(cache=place.cache, max_cache_size_gbytes=0.01),
        "file": filled, "files": pfio.MultiprocessFileCache(1, dir=tmp_path / "pfio"), "read-only": read,
        "http": pfio.HTTPCache(1, "http://127.0.0.1:9/"),
        "tasks of Ray": ray.RayTasks(name), "checkpoint of Ray": ray.RayCheckpoint(str(tmp_path)),
        "shared memory": shared, "array": streaming.SharedArray(2, "int32", name), "barrier of streaming": barrier,
        "lock of a barrier": barrier.lock,
        "shards of torch": torch.Shards(["https://example.com/0.tar"], cache=place.cache),
        "urls of torch": torch.UrlDataset(["https://example.com/0"], cache=place.cache),
    }  # fmt: skip
    names, types = unguarded_calls({**place.objects, **things})
    assert names == HOLDS_NOTHING | OF_ADAPTERS
    unmade = {name for name, cls in public() if isinstance(cls, type) and is_pickled_otherwise(cls) and cls not in types}
    assert unmade - VALUES == set()


def is_pickled_otherwise(cls: type) -> bool:
    """Whether a class says how its objects are pickled."""
    return not issubclass(cls, Exception) and not {"__reduce__", "__reduce_ex__", "__setstate__"}.isdisjoint(members_of(cls))
