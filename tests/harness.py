"""Stores for tests, and a look at the disk that knows nothing of the engine's code."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import mmap
import os
import random
import re
import signal
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from forebay._engine.store import Settings, Store
from forebay._kernel import waits
from forebay.testing import ScriptedServer

T = TypeVar("T")

KiB, MiB = 1 << 10, 1 << 20


def require(package: str) -> None:
    """Skip a test whose child imports this top-level package, where it is not installed. Unlike `pytest.importorskip` it imports nothing:
    a process that has a framework forks several times as slowly."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


# -- stores ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(place: Path, budget: int | None = None, **settings: Any) -> Iterator[Store]:
    """The store of a root, closed at the end."""
    store = Store.open(place, Settings(budget=budget, min_free=0, **settings))
    try:
        yield store
    finally:
        store.close()


def bytes_of(store: Store, key: str, space: str = "v") -> bytes | None:
    """What a key has."""
    found = store.view(space, key)
    return None if found is None else bytes(found.view)


def lose_cells(store: Store) -> None:
    """Remove the copies of small values, so that the next reads ask the catalog."""
    (store.root.shared_dir / "cells").unlink()
    store.engine.index.cells._cells = None


def write_whole(store: Store, key: str, body: bytes, *, space: str = "v", validator: str | None = '"1"', size: int | None = -1) -> bool:
    """Fetch ``body`` under the key's lock, as a remote does: what a partial has is not asked for again. Gives whether it was resumed."""
    from forebay._model import ObjectInfo

    hold = store.locks.hold(space, key)
    try:
        with store.writing(space, key) as writing:
            kept = writing.partial is not None
            spans = writing.begin(ObjectInfo("", len(body) if size == -1 else size, validator, strong=validator is not None))
            for span in spans:
                end = len(body) if span.length < 0 else span.end
                for at in range(span.start, end, MiB):
                    writing.write(at, body[at : min(at + MiB, end)])
            writing.publish(validator=validator)
            return kept
    finally:
        hold.release()


# -- Ray ---------------------------------------------------------------------------------------------------------------

QUICK_RAY = {
    # each of them is a process more, which imports for seconds
    "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    # else what is slow on a busy machine is begun again, and again
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "250", "RAY_worker_register_timeout_seconds": "250",
}  # fmt: skip
"""Settings of a Ray that tests start."""


def answers_of(server: ScriptedServer) -> tuple[int, int]:
    """The GET requests that a server answered with an object, and the requests that found the object unchanged."""
    gets = sum(request.method == "GET" and request.status in (200, 206) for request in server.requests)
    return gets, sum(request.status == 304 for request in server.requests)


# -- the disk ----------------------------------------------------------------------------------------------------------

_TOP = re.compile(
    r"FORMAT|CACHEDIR\.TAG|settings\.json|catalog\.((damaged\.)?sqlite(-wal|-shm)?|ballast)|shared|hosts|locks|counters|blobs|trees|packs|tmp"
)
_LOCKS = re.compile(r"keys|writer|owners|transfers|leases-\d\d|words")


@dataclass(frozen=True)
class Audit:
    """What lies in a root. Bytes of blocks: ``disk`` under blobs, trees, packs and tmp; ``counted`` by rows, ``promised`` by reservations,
    ``inline`` the part of counted that lies in the catalog. ``leaving``: rows that are not live. ``stray``: what no row names."""

    disk: int
    counted: int
    promised: int
    inline: int
    leaving: int
    reservations: int
    entries: int
    stray: tuple[str, ...]

    @property
    def used(self) -> int:
        return self.counted + self.promised


def usage(*places: Path) -> int:
    """Bytes of blocks of the files below; one with several names counts once. Directories of trees and packs are counted."""
    found: dict[tuple[int, int], int] = {}
    for place in places:
        for folder, folders, names in os.walk(place):
            for name in [*names, *(folders if place.name in ("trees", "packs") else [])]:
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(os.path.join(folder, name))
                    found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


def data_usage(place: Path) -> int:
    """Bytes of blocks of what the budget counts, the catalog apart."""
    return usage(place / "blobs", place / "trees", place / "packs", place / "tmp")


def audit(place: Path) -> Audit:
    """Walk the files and read the rows. Caller: nobody writes meanwhile, and this process has the root not open: closing SQLite's
    files would drop its locks."""
    con = sqlite3.connect(place / "catalog.sqlite", isolation_level=None)
    try:
        rows = con.execute("SELECT id, state, kind, suffix, charge FROM entries").fetchall()
        promised = dict(con.execute("SELECT id, charge FROM reservations").fetchall())
    finally:
        con.close()
    files = {f"blobs/{id & 0xFF:02x}/{id:016x}{suffix}" for id, _, kind, suffix, _ in rows if kind == "blob"}
    folders = {f"{id:016x}" for id, _, kind, _, _ in rows if kind in ("tree", "pack")} | {f"{id:016x}" for id in promised}
    ids = {f"{id:016x}" for id in promised}
    stray = [name for name in os.listdir(place) if not _TOP.fullmatch(name)]
    stray += [f"locks/{name}" for name in os.listdir(place / "locks") if not _LOCKS.fullmatch(name)]
    stray += [f"tmp/{name}" for name in os.listdir(place / "tmp") if name[17:33] not in ids]
    stray += [f"{kind}/{name}" for kind in ("trees", "packs") for name in os.listdir(place / kind) if name not in folders]
    for path in (place / "blobs").glob("*/*"):
        if str(path.relative_to(place)) not in files and path.name[:16] not in ids:
            stray.append(str(path.relative_to(place)))
    return Audit(
        disk=data_usage(place),
        counted=sum(row[4] for row in rows),
        promised=sum(promised.values()),
        inline=sum(row[4] for row in rows if row[2] == "value"),
        leaving=sum(row[1] > 0 for row in rows),
        reservations=len(promised),
        entries=len(rows),
        stray=tuple(stray),
    )


def assert_counted(place: Path, budget: int) -> Audit:
    """Nothing lies in the root that is not counted, and what is counted is within the budget."""
    found = audit(place)
    assert found.stray == (), found
    assert found.disk <= found.used - found.inline, found
    assert found.used <= budget, found
    return found


def assert_settled(place: Path, budget: int) -> Audit:
    """The same, and nobody's write or eviction is half done."""
    found = assert_counted(place, budget)
    assert (found.leaving, found.reservations) == (0, 0), found
    return found


@contextlib.contextmanager
def writer_lock(place: Path) -> Iterator[None]:
    """The lock of a process that changes the catalog."""
    with open(place / "locks/writer", "rb+") as file:
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("hhqqixxxx", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        yield


def forge_times(place: Path, near: float, forged: int) -> None:
    """Replace each time of an entry that is within a millisecond of this one, as a user can who may write to the root."""
    times = range(int(near * 1e9) - 1_000_000, int(near * 1e9) + 1_000_000)
    for path in [*(place / "shared").glob("records-*"), place / "shared" / "head"]:
        with open(path, "rb+") as file, mmap.mmap(file.fileno(), 0) as table, memoryview(table) as data, data.cast("Q") as words:
            found = [number for number, word in enumerate(words) if word in times]
            for number in found:
                words[number] = forged


def kill_whenever(born: list[Any], chance: random.Random) -> None:
    """Kill processes that write for ever; the moment does not matter: none may."""
    time.sleep(chance.uniform(0.0, 0.15))
    for child in born:
        child.signal(signal.SIGKILL)
    for child in born:
        assert child.wait() == -signal.SIGKILL


def fill_the_disk(place: Path) -> None:
    """Another program takes all that is left of the file system of ``place``."""
    with open(place / "others", "wb", buffering=0) as file:
        for size in (MiB, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def single(store: Store, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], **options: Any) -> T:
    """What ``look`` finds, else what one caller at a time makes, in this thread."""

    async def made(_: object) -> T:
        return make()

    return waits.run(store.locks.make_once(space, key, look, made, waits.wait_here, **options))
