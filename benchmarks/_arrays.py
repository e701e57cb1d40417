"""Arrays of samples: ours, the floor, and the peers, each as a way to put and to get one sample."""

from __future__ import annotations

import array
import itertools
import mmap
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import FLOOR, OURS, PEER

Put = Callable[[int, Any], object]
Get = Callable[[int], Any]

BUDGET = "16GB"
MAP_SIZE = 1 << 34
NAME = "bench"
KINDS = {
    "Forebay": OURS,
    "index array + slice": FLOOR,
    "lmdb buffers": PEER,
    "pfio ReadOnlyFileCache": PEER,
    "pfio FileCache": PEER,
    "pfio MultiprocessFileCache": PEER,
    "diskcache": PEER,
    "file per sample": PEER,
}


def shuffled(count: int) -> list[int]:
    """All indices in an order that is the same in each run."""
    indices = list(range(count))
    random.Random(4).shuffle(indices)
    return indices


def ours(folder: Path, length: int, codec: str = "raw") -> Any:
    import forebay

    return forebay.Cache(folder / "root", budget=BUDGET).samples(NAME, length, codec=codec)


def environment(folder: Path, name: str = "lmdb", **settings: Any) -> Any:
    import lmdb

    return lmdb.open(str(folder / name), map_size=MAP_SIZE, **settings)


def lmdb_get(env: Any) -> Get:
    """One transaction for all gets: lmdb's fastest way."""
    get = env.begin(buffers=True).get
    return lambda i: get(i.to_bytes(8, "big"))


def lmdb_put(env: Any) -> Put:
    """One transaction a put."""

    def put(i: int, data: bytes) -> None:
        with env.begin(write=True) as txn:
            txn.put(i.to_bytes(8, "big"), data)

    return put


def pfio_cache(kind: str, folder: Path, length: int, **settings: Any) -> Any:
    import pfio.cache

    return getattr(pfio.cache, kind)(length, dir=str(folder / "pfio"), **settings)


def pfio_loaded(kind: str, folder: Path, length: int, **settings: Any) -> Any:
    """What `fill` preserved."""
    found = pfio_cache(kind, folder, length, **settings)
    assert found.preload(NAME) is not False
    return found


def disk(folder: Path) -> Any:
    import diskcache

    return diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40)


def file_put(folder: Path) -> Put:
    path = f"{folder}/files/"
    os.makedirs(path, exist_ok=True)

    def put(i: int, data: bytes) -> None:
        with open(f"{path}{i:08d}", "wb") as file:
            file.write(data)

    return put


def file_get(folder: Path) -> Get:
    path = f"{folder}/files/"

    def get(i: int) -> bytes:
        with open(f"{path}{i:08d}", "rb") as file:
            return file.read()

    return get


def floor_put(folder: Path, length: int) -> Put:
    """The bytes behind the last ones, and a word."""
    fd, starts, end = os.open(folder / "floor.data", os.O_RDWR | os.O_CREAT), array.array("Q", bytes(8 * length)), 0

    def put(i: int, data: bytes) -> None:
        nonlocal end
        os.pwrite(fd, data, end)
        starts[i] = end
        end += len(data)

    return put


def floor_get(folder: Path) -> Get:
    """One array of where samples begin, one mapping of them all."""
    index = array.array("Q", (folder / "floor.index").read_bytes())
    with open(folder / "floor.data", "rb") as file:
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))

    def get(i: int) -> memoryview:
        return view[index[i] : index[i + 1]]

    return get


def fill(folder: Path, count: int, data: bytes, length: int | None = None) -> None:
    """The same samples in all arrays; the peers by their quickest way, since nothing is timed here. To be run in a process that ends."""
    mine = ours(folder, length or count)
    assert all(mine.put(i, data) for i in range(count))
    mine.close()
    with environment(folder, sync=False) as env, env.begin(write=True) as txn:
        for i in range(count):
            txn.put(i.to_bytes(8, "big"), data)
    preserved(folder, count, data, length or count)
    with disk(folder) as cache, cache.transact():
        for i in range(count):
            cache.set(i, data)
    put = file_put(folder)
    for i in range(count):
        put(i, data)
    with open(folder / "floor.data", "wb") as file:
        file.writelines(data for _ in range(count))
    (folder / "floor.index").write_bytes(array.array("Q", range(0, (count + 1) * len(data), len(data))).tobytes())


def preserved(folder: Path, count: int, data: bytes, length: int) -> None:
    """A file as PFIO's ``preserve`` writes: each slot's offset and length (-1: empty), then data. The first ``count`` slots are filled."""
    (folder / "pfio").mkdir(exist_ok=True)
    ends = itertools.count(16 * length, len(data))
    with open(folder / "pfio" / NAME, "wb") as file:
        file.writelines(struct.pack("Qq", next(ends), len(data)) if i < count else struct.pack("Qq", 0, -1) for i in range(length))
        file.writelines(data for _ in range(count))


def getter(label: str, folder: Path, length: int) -> Get:
    """How the contestant of this label gets a sample of what `fill` put."""
    if label == "Forebay":
        get: Get = ours(folder, length).get
        return get
    if label == "index array + slice":
        return floor_get(folder)
    if label == "lmdb buffers":
        return lmdb_get(environment(folder, sync=False))
    if label == "diskcache":
        return disk(folder).get  # type: ignore[no-any-return]
    if label == "file per sample":
        return file_get(folder)
    return pfio_loaded(label.removeprefix("pfio "), folder, length).get  # type: ignore[no-any-return]


def blocks_of(folder: Path) -> int:
    """Bytes on disk of all that is in a folder, itself included."""
    return 512 * sum(path.lstat().st_blocks for path in (folder, *folder.rglob("*")))
