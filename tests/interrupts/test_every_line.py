"""A signal at any line of a call: afterwards nothing is locked, and everything works, here and in another process."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest

import forebay
import forebay.claims
from forebay._kernel import interrupts
from forebay.testing import ScriptedServer
from tests import parts
from tests.harness import KiB, MiB
from tests.interrupts.every_line import Moments, held_locks, interrupt
from tests.items import until
from tests.processes import ProcessGroup

STRIDE = 3 * parts.PARTS
"""`make test` sends a signal at one line in so many, `make test-all` at each."""
SPARSE = {"prune": 7, "repair": 13, "read, with a retry": 7}
"""Calls that loop over all directories of the root, or pause: at one line in so many, of which `make test` takes one in `STRIDE`."""


class Place:
    """A cache, a server and what the calls below use, made before anything is interrupted."""

    def __init__(self, folder: Path, server: ScriptedServer) -> None:
        self.cache = forebay.Cache(folder / "root", budget=64 * MiB)
        self.server, self.folder, self.number = server, folder, 0
        self.samples = self.cache.samples("s", 100_000)
        self.pool = self.cache.prefetcher(server.url + "/pool", name="pool", workers=2, budget=32 * MiB)
        self.function = self.cache.tasks("t").cached(_square)
        self.claim = forebay.claim([], world=forebay.World(1, 1, 1, 0), job=f"interrupts {os.getpid()}")
        self.lock = self.claim.lock("lock")
        self.claimed: forebay.Claim | None = None
        self.files = fsspec.filesystem("memory")

    def url(self, size: int = 100_000) -> str:
        self.number += 1
        return self.server.put(f"/{self.number}.bin", bytes([self.number % 256]) * size)

    def slot(self) -> int:
        self.number += 1
        return self.number

    def new(self) -> str:
        self.number += 1
        return f"k{self.number}"

    @property
    def another_root(self) -> Path:
        return self.folder / "another root"

    def release_dropped(self) -> None:
        """Have another root released if a call opened it, and was interrupted at its end: the next `Cache` does that."""
        if self.another_root.exists():
            forebay.Cache(self.another_root).close()


def _square(x: int) -> int:
    return x * x


def _read_lazy(place: Place) -> Any:
    place.server.put(f"/pool/{(name := place.new())}", b"p" * 30_000)
    return lambda: place.pool.get_lazy(name).get()


def _stream(place: Place) -> Any:
    names = [place.new() for _ in range(3)]
    for name in names:
        place.server.put(f"/pool/{name}", b"p" * 30_000)
    return lambda: list(place.pool.stream(names))


def _with_lock(place: Place) -> Callable[[], None]:
    def call() -> None:
        with place.claim.lock("lock"):
            pass

    return call


def _closed(make: Callable[[Any], Any], argument: Any) -> None:
    make(argument).close()


def _directory(place: Place) -> Any:
    folder = f"/runs/{place.new()}"
    for name in "ab":
        place.files.pipe(f"{folder}/{name}", name.encode() * 30_000)
    return lambda: place.cache.directory(folder, filesystem=place.files).close()


def _copy_directory(place: Place) -> Any:
    name = place.new()
    for file in "ab":
        place.files.pipe(f"/runs/{name}/{file}", file.encode() * 30_000)
    target = place.folder / name  # pathlib takes an `Interrupt` for a TypeError of its own
    return lambda: place.cache.copy_directory(f"/runs/{name}", target, filesystem=place.files)


def _look_ahead(place: Place) -> Any:
    urls = [place.url(30_000) for _ in range(3)]

    def call() -> None:
        with place.cache.lookahead(urls, workers=2) as ahead:
            list(ahead)

    return call


def _read_in_loop(place: Place, url: str) -> None:
    async def read() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)  # a record of its log would keep the frames
        await place.cache.aread(url)

    asyncio.run(read())


def _read_blocks(place: Place, url: str) -> Any:
    with place.cache.open(url, block_size="64KiB") as file:
        file.read()
    return file  # it is dropped later: what a handler raises as a finalizer begins is lost (see Limits)


def _read_again(place: Place) -> Any:
    """An answer that says to ask again comes first."""
    place.number += 1
    url = place.server.put(f"/{place.number}.bin", b"x" * 30_000, statuses=[503], retry_after="0")
    return lambda: place.cache.read(url)


def _first_call(place: Place) -> Any:
    """The code of a new function is looked up under a lock."""
    number = place.slot()
    return lambda: place.cache.tasks("t").cached(lambda x: [x, number])(number)


def _upload(place: Place) -> Any:
    folder = place.folder / place.new()
    folder.mkdir()
    (folder / "a").write_bytes(b"a" * 30_000)
    return lambda: forebay.Checkpoint.upload(folder, f"/runs/{folder.name}", filesystem=place.files, cache=place.cache)


def _to_directory(place: Place) -> Any:
    name = place.new()
    place.files.pipe(f"/runs/{name}/a", b"a" * 30_000)
    checkpoint = forebay.Checkpoint(f"/runs/{name}", filesystem=place.files, cache=place.cache)
    target = place.folder / name  # pathlib takes an `Interrupt` for a TypeError of its own
    return lambda: checkpoint.to_directory(target)


def _claimed(place: Place, name: str) -> None:
    place.claimed = None
    place.claimed = forebay.claim([], world=forebay.World(1, 1, 1, 0), job=place.claim.job, name=name)
    with place.claimed:
        pass


def _evict(place: Place) -> Callable[[], Any]:
    place.cache.put("gone", b"g" * 30_000)
    return lambda: place.cache.evict("values:gone")


def _pin(place: Place) -> Callable[[], Any]:
    place.cache.put("pinned", b"g" * 30_000)
    return lambda: place.cache.pin("values:pinned")


CALLS: dict[str, Callable[[Place], Callable[[], Any]]] = {
    "put a value": lambda place: partial(place.cache.put, place.new(), b"v" * 1000),
    "put a file": lambda place: partial(place.cache.put, place.new(), b"f" * 100_000),
    "put a large file": lambda place: partial(place.cache.put, place.new(), b"f" * 3 * MiB),
    "replace": lambda place: partial(place.cache.put, "same", os.urandom(40_000)),
    "get_or_put": lambda place: partial(place.cache.get_or_put, place.new(), lambda: b"m" * 30_000),
    "read": lambda place: partial(place.cache.read, place.url()),
    "read a large object": lambda place: partial(place.cache.read, place.url(2 * MiB)),
    "read, with a retry": _read_again,
    "read_many": lambda place: partial(place.cache.read_many, [place.url() for _ in range(3)]),
    "aread": lambda place: partial(_read_in_loop, place, place.url()),
    "local": lambda place: partial(_closed, place.cache.local, place.url()),
    "local_many": lambda place: partial(_closed, place.cache.local_many, [place.url() for _ in range(2)]),
    "warm": lambda place: partial(place.cache.warm, [place.url() for _ in range(2)]),
    "lookahead": _look_ahead,
    "directory": _directory,
    "copy_directory": _copy_directory,
    "open by blocks": lambda place: partial(_read_blocks, place, place.url(130 * KiB)),
    "samples": lambda place: partial(place.samples.put, place.slot(), b"s" * 1000),
    "samples.get_or_put": lambda place: partial(place.samples.get_or_put, place.slot(), lambda: b"s" * 900),
    "samples.get_or_put_many": lambda place: partial(
        place.samples.get_or_put_many, [place.slot(), place.slot()], lambda slots: [b"s" * 900 for _ in slots]
    ),
    "a lazy": _read_lazy,
    "a stream": _stream,
    "a cached call": lambda place: partial(place.function, place.slot()),
    "the first call of a cached function": _first_call,
    "upload": _upload,
    "to_directory": _to_directory,
    "a claim": lambda place: partial(_claimed, place, place.new()),
    "a lock": _with_lock,
    "evict": _evict,
    "pin": _pin,
    "prune": lambda place: lambda: place.cache.prune().execute(),
    "repair": lambda place: partial(place.cache.repair, deep=False),
    "Cache": lambda place: partial(_closed, forebay.Cache, place.another_root),
}


@contextlib.contextmanager
def opened_place(folder: Path, monkeypatch: pytest.MonkeyPatch, *signals: signal.Signals) -> Iterator[Place]:
    """A place to make the calls in, while these signals interrupt."""
    monkeypatch.setenv("FOREBAY_CLAIMS", str(folder / "claims"))
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        with ScriptedServer() as server:
            made = Place(folder, server)
            yield made
            made.claim.close()
            made.samples.close()
            made.cache.close()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with opened_place(tmp_path, monkeypatch, signal.SIGUSR1) as made:
        yield made


@pytest.mark.filterwarnings("ignore:coroutine 'Cache.aread' was never awaited")
@pytest.mark.parametrize("name", CALLS)
def test_a_signal_at_any_line(place: Place, name: str, children: ProcessGroup) -> None:
    interrupted(place, CALLS[name], Moments(), STRIDE, children, step=SPARSE.get(name, 1))


@pytest.mark.rotates
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "name",
    [
        "put a value", "put a file", "get_or_put", "read", "read_many", "local", "directory", "a lazy", "samples", "a lock", "a claim",
        "evict",
    ],
)  # fmt: skip
def test_a_signal_at_any_opcode(place: Place, name: str, children: ProcessGroup) -> None:
    """Between two instructions of one line, too: of the guard itself, above all."""
    interrupted(place, CALLS[name], Moments(opcodes=True), 5 * STRIDE, children)


def interrupted(
    place: Place, make: Callable[[Place], Callable[[], Any]], moments: Moments, stride: int, children: ProcessGroup, *, step: int = 1
) -> None:  # fmt: skip
    """Make a call again and again, with a signal at another moment each time, ``step`` moments later."""
    for _ in range(3):  # what is opened once
        moments.run(make(place))
    held, at, raised, others = {*held_locks()}, 1, 0, {*forebay.claims._open.values()}
    while True:
        if parts.takes(at // step, stride):
            place.server.objects.clear()  # thousands of them are gigabytes
            place.server.requests.clear()
            call = make(place)
            raised += moments.run(call, at)
            if not moments.where:
                break
            where = f"a signal at moment {at}: {moments.where}"
            gc.collect()
            place.release_dropped()
            for claim in {*forebay.claims._open.values()} - others:  # one that was interrupted before it was closed stays open
                assert claim is place.claimed, where
                claim.close()
            assert not interrupts._saved, where
            assert signal.getsignal(signal.SIGUSR1) is interrupt, where
            assert place.cache.put("after", where.encode()), where
            until(lambda: {*held_locks()} <= held, where)  # a thread that loads ahead goes on
        at += step
    calls = at // (stride * step)
    assert raised > calls // 2, f"the handler raised in {raised} of about {calls} calls"
    root = place.folder / "root"
    assert children(lambda: forebay.Cache(root).put("from another process", b"x" * 30_000)).result()
    assert place.cache.check() == []
