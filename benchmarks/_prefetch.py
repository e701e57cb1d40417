"""Loading ahead: sources that take their time, and Forebay, Energon's pool and a plain thread pool, each as a way to load ahead."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from _common import FLOOR, OURS, PEER

WORKERS, WINDOW = 8, 64
BUDGET = "8GB"
PLAIN, ENERGON = "ThreadPoolExecutor(8), in RAM", "Energon"
GIB = 1024**3
Load = Callable[[], Any]


class Slow:
    """A source: ``size`` bytes that begin with the key, after ``latency`` seconds. ``reads`` counts those of all processes."""

    uri = "bench://slow"

    def __init__(self, size: int, latency: float = 0.005) -> None:
        self.latency, self._tail = latency, os.urandom(size)
        self.reads = multiprocessing.get_context("fork").Value("Q")

    def __getitem__(self, key: str) -> bytes:
        time.sleep(self.latency)
        with self.reads.get_lock():
            self.reads.value += 1
        head = key.encode()
        return head + memoryview(self._tail)[len(head) :]  # fresh bytes, as those of a remote are


class Fetched:
    """Objects below a URL, by bare urllib3."""

    def __init__(self, url: str) -> None:
        import urllib3

        self.uri, self._pool = url, urllib3.PoolManager(maxsize=WORKERS)

    def __getitem__(self, key: str) -> bytes:
        return self._pool.request("GET", f"{self.uri}/{key}").data


class Ahead:
    """A way to load ahead: `start` begins to load a key, and gives what waits for its bytes."""

    def __init__(self, start: Callable[[str], Load], get: Callable[[str], Any]) -> None:
        self.start, self.get = start, get

    def stream(self, keys: Iterable[str], ahead: int = WINDOW) -> Iterator[Any]:
        """The values of these keys in order, so many of them loading."""
        started: deque[Load] = deque()
        for key in keys:
            started.append(self.start(key))
            if len(started) > ahead:
                yield started.popleft()()
        while started:
            yield started.popleft()()


@contextlib.contextmanager
def plain(source: Any, folder: Path, limit: int | None = None) -> Iterator[Ahead]:
    """What loading ahead costs at least: eight threads that keep what they read in memory."""
    with ThreadPoolExecutor(WORKERS) as pool:
        try:
            yield Ahead(lambda key: pool.submit(source.__getitem__, key).result, lambda key: pool.submit(source.__getitem__, key).result())
        finally:
            pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def energon(source: Any, folder: Path, limit: int | None = None) -> Iterator[Ahead]:
    from megatron.energon.cache import FileStoreCachePool

    yield from _pool_of_energon(FileStoreCachePool, source, folder / "energon", limit)


@contextlib.contextmanager
def adapter(source: Any, folder: Path, limit: int | None = None) -> Iterator[Ahead]:
    """Forebay behind the interface of Energon."""
    from forebay.adapters.energon import FileStoreCachePool

    yield from _pool_of_energon(FileStoreCachePool, source, folder / "adapter", limit)


def _pool_of_energon(kind: Any, source: Any, folder: Path, limit: int | None) -> Iterator[Ahead]:
    folder.mkdir(exist_ok=True)
    store = file_store(source)
    pool = kind(parent_cache_dir=folder, num_workers=WORKERS, max_cache_size_gbytes=4 if limit is None else limit / GIB)
    try:
        yield Ahead(lambda key: pool.get_lazy(store, key).get, lambda key: pool.get(store, key))
    finally:
        pool.close()


def file_store(source: Any) -> Any:
    """The source as Energon has them."""
    from megatron.energon.cache import FileStore
    from megatron.energon.source_info import SourceInfo

    class Store(FileStore):  # type: ignore[misc, type-arg]  # Energon is optional: to mypy it is Any
        def __getitem__(self, key: str) -> tuple[bytes, Any]:
            return source[key], SourceInfo(dataset_path=source.uri, index=key, shard_name="", file_names=(key,))

        def get_path(self) -> str:
            return str(source.uri)

    return Store()


@contextlib.contextmanager
def forebay(source: Any, folder: Path, limit: int | None = None, **how: Any) -> Iterator[Any]:
    import forebay as package

    with package.Cache(folder / "forebay", budget=BUDGET) as cache:
        with cache.prefetcher(source, workers=WORKERS, budget=limit, **how) as pool:
            yield _Ours(pool)


def clear(folder: Path) -> None:
    """What was kept goes before the system writes it out, as Energon's files do, and as what is in RAM does."""
    import forebay as package

    with package.Cache(folder / "forebay", budget=BUDGET) as cache:
        cache.clear().execute()


class _Ours(Ahead):
    def __init__(self, pool: Any) -> None:
        super().__init__(lambda key: pool.get_lazy(key).get, pool.get)
        self.stream, self.get_lazy = pool.stream, pool.get_lazy


@contextlib.contextmanager
def scratch(source: Any, folder: Path, limit: int | None = None) -> Iterator[Any]:
    """Forebay, each item of which goes with its last holder, as all of Energon's do."""
    with forebay(source, folder, limit, name="scratch", keep=False) as found:
        yield found


WAYS: dict[str, tuple[str, Any]] = {
    "Forebay": (OURS, forebay),
    "Forebay, keep=False": (OURS, scratch),
    "Forebay as Energon's pool": (OURS, adapter),
    PLAIN: (FLOOR, plain),
    ENERGON: (PEER, energon),
}


def import_energon() -> None:
    """Before a row forks: it takes seconds."""
    import forebay.adapters.energon  # noqa: F401


def consume(stream: Iterator[Any], keys: list[str]) -> None:
    """Look at each value: it is its key's."""
    for key, value in zip(keys, stream, strict=True):
        assert bytes(memoryview(value)[: len(key)]) == key.encode()


def in_time(seconds: float, work: Callable[..., Any], *values: Any) -> Any:
    """What ``work`` tells in a process of its own, which is then ended; None if it has not told anything by then."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(False)
    child = context.Process(target=work, args=(there.send, *values))
    child.start()
    there.close()
    try:
        return here.recv() if here.poll(seconds) else None
    finally:
        child.kill()
        child.join()


def own_memory() -> int:
    """Bytes of memory that this process has for itself, files not counted."""
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith("RssAnon"))


def give_back_at_once() -> None:
    """Let the C library map every large piece of memory, so that what is freed is seen to be."""
    ctypes.CDLL(None).mallopt(-3, 64 << 10)
