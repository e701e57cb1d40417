"""The engine beside floors and peers: hits, opening, puts, eviction, leases. ``python benchmarks/engine.py [ROW...] [--quick] [--json]``"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import multiprocessing
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

from _common import FLOOR, OURS, PEER, Line, Part, Timing, interleave, main, python

KB, MB = 1000, 1_000_000
PUT = 10 * KB


def files_of(folder: Path, count: int, size: int) -> list[str]:
    """Files of random bytes."""
    folder.mkdir()
    paths = [str(folder / f"{number:06d}.bin") for number in range(count)]
    for path in paths:
        Path(path).write_bytes(os.urandom(size))
    return paths


def doing(fn: Callable[..., object], count: int, *values: object) -> Callable[[], None]:
    """A call that calls ``fn`` so often."""

    def run() -> None:
        for _ in repeat(None, count):
            fn(*values)

    return run


def each(fn: Callable[[Any], object], items: Iterator[Any], count: int) -> Callable[[], None]:
    """A call that calls ``fn`` with the next ``count`` items."""

    def run() -> None:
        for item in itertools.islice(items, count):
            fn(item)

    return run


def fsspec_filecache(folder: Path) -> Any:
    import fsspec

    return fsspec.filesystem("filecache", target_protocol="file", cache_storage=str(folder))


def opened(fs: Any) -> Callable[[str], bytes]:
    def read(path: str) -> bytes:
        with fs.open(path, "rb") as file:
            data: bytes = file.read()
        return data

    return read


def open_and_map(path: str) -> bytes:
    """The floor of a first read: its bytes, mapped, one of them looked at."""
    fd = os.open(path, os.O_RDONLY)
    try:
        view = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    finally:
        os.close(fd)
    return view[:1]


def sqlite_file(path: Path) -> sqlite3.Connection:
    con = sqlite3.connect(path, isolation_level=None)
    con.execute("PRAGMA journal_mode = WAL")
    con.execute("PRAGMA synchronous = NORMAL")
    con.execute("CREATE TABLE IF NOT EXISTS kept(key TEXT PRIMARY KEY, data BLOB)")
    return con


def sqlite_commit(con: sqlite3.Connection, data: bytes) -> Callable[[str], None]:
    """One transaction that adds one row."""

    def put(key: str) -> None:
        con.execute("BEGIN IMMEDIATE")
        con.execute("INSERT OR REPLACE INTO kept VALUES (?, ?)", (key, data))
        con.execute("COMMIT")

    return put


def write_and_rename(folder: Path, data: bytes) -> Callable[[str], None]:
    folder.mkdir(exist_ok=True)

    def put(key: str) -> None:
        draft = f"{folder}/{key}.tmp"
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        os.pwrite(fd, data, 0)
        os.close(fd)
        os.rename(draft, f"{folder}/{key}")

    return put


# -- hits --------------------------------------------------------------------------------------------------------------


def hit(folder: Path, quick: bool) -> list[Line]:
    """The same entry again and again, in one process."""
    import diskcache

    import forebay
    from forebay.testing import ScriptedServer

    (path,) = files_of(folder / "files", 1, 100 * KB)
    cache = forebay.Cache(folder / "root", budget=100 * MB, max_age="forever")
    peer, read = diskcache.Cache(str(folder / "diskcache")), opened(fsspec_filecache(folder / "fsspec"))
    with ScriptedServer() as server:
        url = server.put("/shards/00017.tar", Path(path).read_bytes())
        cache.read(url)
    peer.set(path, Path(path).read_bytes())
    read(path)
    kept = {("urls", path): memoryview(Path(path).read_bytes())}
    n, few = (2_000, 20) if quick else (50_000, 500)
    line = Line("`cache.read` hit, 100 KB, same process", "<= 1.5 us; >= 5x faster than the peers")
    line.timings = interleave(
        3 if quick else 15,
        {
            "Forebay": Part(OURS, doing(cache.read, n, url), n),
            "dict look-up and slice": Part(FLOOR, doing(lambda key: kept["urls", key][:], n, path), n),
            "fsspec filecache": Part(PEER, doing(read, few, path), few),
            "diskcache": Part(PEER, doing(peer.get, few, path), few),
        },
    )
    line.met = line.ours.median <= 1.5e-6 and line.best_peer() >= 5
    return [line]


def first(folder: Path, quick: bool) -> list[Line]:
    """Entries that another process wrote, each read once."""
    count = 40 if quick else 800
    paths = files_of(folder / "files", count, 100 * KB)
    subprocess_fill(folder, paths)
    import diskcache

    import forebay

    per_round = count // 8
    cache = forebay.Cache(folder / "root", max_age="forever")
    peer, read = diskcache.Cache(str(folder / "diskcache")), opened(fsspec_filecache(folder / "fsspec"))
    cache.read(paths[-1], force=True)
    line = Line("first hit of an entry in a process, 100 KB", "<= 150 us")
    line.timings = interleave(
        6,
        {
            "Forebay": Part(OURS, each(partial(cache.read, force=True), iter(paths), per_round), per_round),
            "open + map": Part(FLOOR, each(open_and_map, iter(paths), per_round), per_round),
            "fsspec filecache": Part(PEER, each(read, iter(paths), per_round), per_round),
            "diskcache": Part(PEER, each(peer.get, iter(paths), per_round), per_round),
        },
    )
    line.met = line.ours.median <= 150e-6
    return [line]


def subprocess_fill(folder: Path, paths: list[str]) -> None:
    """Have all files in all caches, and leave."""
    child = multiprocessing.get_context("fork").Process(target=_fill, args=(folder, paths))
    child.start()
    child.join()
    assert child.exitcode == 0


def _fill(folder: Path, paths: list[str]) -> None:
    import diskcache

    import forebay

    cache = forebay.Cache(folder / "root", budget="4GB", max_age="forever")
    peer, fs = diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40), fsspec_filecache(folder / "fsspec")
    for path in paths:
        cache.pull(path)
        peer.set(path, Path(path).read_bytes())
    fs.cat(paths)
    for path in paths:
        with fs.open(path, "rb"):
            pass
    cache.close()


# -- opening -----------------------------------------------------------------------------------------------------------

_OPEN_OURS = """
import json, sys, time, forebay.cache, forebay.remote, sqlite3
began, cpu = time.perf_counter(), time.process_time()
cache = forebay.Cache(sys.argv[1], max_age="forever")
assert cache.get(sys.argv[2]) is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_OPEN_DISKCACHE = """
import json, sys, time, diskcache
began, cpu = time.perf_counter(), time.process_time()
cache = diskcache.Cache(sys.argv[1])
assert cache.get(sys.argv[2]) is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_OPEN_SQLITE = """
import json, sys, time, sqlite3
began, cpu = time.perf_counter(), time.process_time()
con = sqlite3.connect(sys.argv[1])
select = "SELECT size FROM entries WHERE space = (SELECT id FROM spaces WHERE name = 'values') AND key = ? AND state = 0"
assert con.execute(select, (sys.argv[2],)).fetchone()
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_IMPORT = """
import json, time
began, cpu = time.perf_counter(), time.process_time()
import {}
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""


def open_root(folder: Path, quick: bool) -> list[Line]:
    """A root that is full of entries, opened by a fresh interpreter; and the import."""
    import diskcache

    count, rounds = (500, 2) if quick else (100_000, 11)
    root = filled_root(folder / "root", count, budget=1 << 40)
    peer = diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40)
    with peer.transact():
        for number in range(count):
            peer.set(f"key-{number}", b"x" * 64)
    peer.close()
    key = f"key-{count // 3}"
    codes = {
        "Forebay": (OURS, _OPEN_OURS, [str(root), key]),
        "SQLite connect + SELECT": (FLOOR, _OPEN_SQLITE, [str(root / "catalog.sqlite"), key]),
        "diskcache": (PEER, _OPEN_DISKCACHE, [str(folder / "diskcache"), key]),
    }
    one = Line(f"open a root with {count:,} entries in a new process (imports excluded) + first hit", "<= 20 ms")
    one.timings = interpreters(rounds, codes)
    one.met = one.ours.median <= 20e-3
    names = {"forebay": OURS, "sqlite3": FLOOR, "fsspec": PEER, "diskcache": PEER}
    two = Line("`import forebay`", "<= 60 ms")
    two.timings = interpreters(rounds, {name: (kind, _IMPORT.format(name), []) for name, kind in names.items()})
    two.met = two.ours.median <= 60e-3
    return [one, two]


def interpreters(rounds: int, codes: dict[str, tuple[str, str, list[str]]]) -> dict[str, Timing]:
    """Each code in a fresh interpreter, in turn; it prints [wall, CPU] seconds."""
    timings = {label: Timing(kind) for label, (kind, _, _) in codes.items()}
    for number in range(rounds + 1):
        for label, (_, code, values) in codes.items():
            wall, cpu = python(code, *values)
            if number:
                timings[label].wall.append(wall)
                timings[label].cpu.append(cpu)
    return timings


def filled_root(root: Path, count: int, *, budget: int, size: int = 64) -> Path:
    """A root with ``count`` small values, put by another process."""
    child = multiprocessing.get_context("fork").Process(target=_put_many, args=(root, count, budget, size))
    child.start()
    child.join()
    assert child.exitcode == 0
    return root


def _put_many(root: Path, count: int, budget: int, size: int) -> None:
    from forebay._engine.store import Settings, Store

    store, data = Store.open(root, Settings(budget)), b"x" * size
    for start in range(0, count, 500):
        store.put_many("values", [(f"key-{number}", data) for number in range(start, min(start + 500, count))])
    store.close()


# -- puts --------------------------------------------------------------------------------------------------------------


def put(folder: Path, quick: bool) -> list[Line]:
    """New keys of 10 KB, by one process and by eight at once."""
    return [put_alone(folder / "one", quick), put_together(folder / "eight", quick)]


def put_alone(folder: Path, quick: bool) -> Line:
    import diskcache

    import forebay

    folder.mkdir()
    data, count = os.urandom(PUT), 20 if quick else 300
    keys = {label: (f"{label[:4].replace(' ', '')}-{n}" for n in itertools.count()) for label in ("ours", "file", "row", "disk")}
    cache = forebay.Cache(folder / "root", budget="4GB")
    peer = diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40)
    commit = sqlite_commit(sqlite_file(folder / "floor.sqlite"), data)
    line = Line("`put` of 10 KB incl. publish, one process", ">= diskcache")
    line.timings = interleave(
        3 if quick else 11,
        {
            "Forebay": Part(OURS, each(lambda key: cache.put(key, data), keys["ours"], count), count),
            "pwrite + rename": Part(FLOOR, each(write_and_rename(folder / "files", data), keys["file"], count), count),
            "SQLite commit": Part(FLOOR, each(commit, keys["row"], count), count),
            "diskcache": Part(PEER, each(lambda key: peer.set(key, data), keys["disk"], count), count),
        },
    )
    line.met = line.ratio("diskcache") >= 1
    return line


def put_together(folder: Path, quick: bool) -> Line:
    folder.mkdir()
    count, rounds, processes = (10, 2, 8) if quick else (250, 5, 8)
    line = Line("`put` of 10 KB, 8 processes at once, time per put of all", ">= diskcache")
    kinds = {"Forebay": OURS, "SQLite commit": FLOOR, "diskcache": PEER, "diskcache, 8 shards": PEER}
    line.timings = {label: Timing(kind) for label, kind in kinds.items()}
    for number in range(rounds):
        for label, timing in line.timings.items():
            wall, cpu = crowd(processes, _putter, label, folder, number, count)
            timing.wall.append(wall / (processes * count))
            timing.cpu.append(cpu / (processes * count))
    line.met = line.ratio("diskcache") >= 1
    return line


def _putter(gate: Any, label: str, folder: Path, number: int, count: int, member: int) -> None:
    data = os.urandom(PUT)
    store = _putting(label, folder, data)
    store(f"warm-{number}-{member}")
    gate.wait()
    for n in range(count):
        store(f"{number}-{member}-{n}")


def _putting(label: str, folder: Path, data: bytes) -> Callable[[str], object]:
    """A new process's way to put ``data`` under a key."""
    import diskcache

    import forebay

    if label == "Forebay":
        cache = forebay.Cache(folder / "root", budget="4GB")
        return lambda key: cache.put(key, data)
    if label == "SQLite commit":
        con = sqlite_file(folder / "floor.sqlite")
        con.execute("PRAGMA busy_timeout = 60000")
        return sqlite_commit(con, data)
    if label == "diskcache":
        plain = diskcache.Cache(str(folder / "diskcache"), size_limit=1 << 40)
        return lambda key: plain.set(key, data, retry=True)
    shards = diskcache.FanoutCache(str(folder / "shards"), shards=8, size_limit=1 << 40)
    return lambda key: shards.set(key, data, retry=True)


def crowd(processes: int, work: Callable[..., None], *values: Any) -> tuple[float, float]:
    """Seconds, and CPU seconds, from the moment at which all processes are ready until the last is done."""
    context = multiprocessing.get_context("fork")
    gate, results = context.Barrier(processes + 1), context.SimpleQueue()
    members = [context.Process(target=_member, args=(results, work, gate, *values, member)) for member in range(processes)]
    for member in members:
        member.start()
    gate.wait()
    began = time.perf_counter()
    found = [results.get() for _ in members]
    wall = time.perf_counter() - began
    for member in members:
        member.join()
    assert None not in found, "a process of the crowd failed"
    return wall, sum(found)


class _Gate:
    """Lets a process through with the others, and notes what it had used by then."""

    def __init__(self, barrier: Any) -> None:
        self._barrier = barrier
        self.cpu = 0.0

    def wait(self) -> None:
        self._barrier.wait()
        self.cpu = time.process_time()


def _member(results: Any, work: Callable[..., None], barrier: Any, *values: Any) -> None:
    gate = _Gate(barrier)
    try:
        work(gate, *values)
        results.put(time.process_time() - gate.cpu)
    except BaseException:
        results.put(None)
        barrier.abort()
        raise


# -- eviction ----------------------------------------------------------------------------------------------------------


def evict(folder: Path, quick: bool) -> list[Line]:
    """A full root: what a put costs more than one that finds room, for each entry that had to go for it."""
    import diskcache

    import forebay

    count, rounds, per_round = (400, 2, 50) if quick else (100_000, 9, 500)
    root = filled_root(folder / "root", count, budget=1 << 40)
    shutil.copytree(root, folder / "roomy")
    with forebay.Cache(root) as cache:
        full = cache.stats().bytes_used
    pressed, roomy = forebay.Cache(root, budget=full), forebay.Cache(folder / "roomy")
    tight, wide = (
        diskcache.Cache(str(folder / name), size_limit=1 << 40, eviction_policy="least-recently-used") for name in ("tight", "wide")
    )
    for peer in (tight, wide):
        with peer.transact():
            for number in range(count):
                peer.set(f"key-{number}", b"x" * 64)
    tight.reset("size_limit", tight.volume())
    ends = {label: itertools.count() for label in ("ours", "room", "tight", "wide")}
    data = b"x" * 64
    raw = interleave(
        rounds,
        {
            "Forebay": Part(OURS, each(lambda n: pressed.put(f"new-{n}", data), ends["ours"], per_round), per_round),
            "room": Part(OURS, each(lambda n: roomy.put(f"new-{n}", data), ends["room"], per_round), per_round),
            "diskcache (LRU)": Part(PEER, each(lambda n: tight.set(f"new-{n}", data), ends["tight"], per_round), per_round),
            "wide": Part(PEER, each(lambda n: wide.set(f"new-{n}", data), ends["wide"], per_round), per_round),
            "SQLite commit": Part(FLOOR, each(_committing(folder), itertools.count(), per_round), per_round),
        },
    )
    line = Line(f"eviction under pressure, {count:,} small entries, steady: what each put costs more", "<= 100 us a victim")
    line.timings = {
        "Forebay": _difference(raw["Forebay"], raw["room"]),
        "SQLite commit": raw["SQLite commit"],
        "diskcache (LRU)": _difference(raw["diskcache (LRU)"], raw["wide"]),
    }
    line.met = line.ours.median <= 100e-6
    return [line, evict_files(folder, quick)]


def _committing(folder: Path) -> Callable[[int], None]:
    commit = sqlite_commit(sqlite_file(folder / "floor.sqlite"), b"x" * 64)
    return lambda n: commit(f"new-{n}")


def _difference(more: Timing, less: Timing) -> Timing:
    """Both stood in the same rounds."""
    wall = [max(a - b, 1e-9) for a, b in zip(more.wall, less.wall, strict=True)]
    return Timing(more.kind, wall, [max(a - b, 1e-9) for a, b in zip(more.cpu, less.cpu, strict=True)])


def evict_files(folder: Path, quick: bool) -> Line:
    """Files of 20 KB that go for large ones."""
    import forebay

    count, batch = (100, 20) if quick else (4_000, 400)
    block = 20_480
    with forebay.Cache(folder / "files", budget=count * block + (64 << 10)) as cache:
        data = os.urandom(20 * KB)
        for number in range(count):
            cache.put(f"key-{number}", data)
        large, plain = os.urandom(batch * block), folder / "plain"
        plain.mkdir()
        timings = {"Forebay": Timing(OURS), "unlink of such a file": Timing(FLOOR)}
        for number in range(count // batch - 2):
            before = cache.stats().entries
            wall, cpu = _timed(lambda n=number: cache.put(f"large-{n}", large))  # type: ignore[misc]
            write = _timed(lambda n=number: write_and_rename(folder / "whole", large)(str(n)))  # type: ignore[misc]
            gone = before + 1 - cache.stats().entries
            timings["Forebay"].wall.append((wall - write[0]) / gone)
            timings["Forebay"].cpu.append((cpu - write[1]) / gone)
            paths = [f"{plain}/{n}" for n in range(gone)]
            for path in paths:
                Path(path).write_bytes(data)
            wall, cpu = _timed(lambda paths=paths: [os.unlink(path) for path in paths])  # type: ignore[misc]
            timings["unlink of such a file"].wall.append(wall / gone)
            timings["unlink of such a file"].cpu.append(cpu / gone)
    line = Line(
        f"eviction of files of 20 KB, {batch} at a time for one large put (its own writing subtracted)", "<= 100 us a victim", timings
    )
    line.met = line.ours.median <= 100e-6
    return line


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


# -- leases ------------------------------------------------------------------------------------------------------------


def leases(folder: Path, quick: bool) -> list[Line]:
    """16 processes hold 10,000 leases; what one more costs."""
    import forebay

    processes, held, fresh = (2, 20, 24) if quick else (16, 625, 600)
    paths = files_of(folder / "files", processes * held + fresh, KB)
    with forebay.Cache(folder / "root", budget="1GB", max_age="forever") as cache:
        cache.warm(paths, jobs=1)
        context = multiprocessing.get_context("fork")
        ready, done = context.Barrier(processes + 1), context.Event()
        crew = [
            context.Process(target=_holder, args=(folder, paths[n * held : (n + 1) * held], ready, done), daemon=True)
            for n in range(processes)
        ]
        for member in crew:
            member.start()
        ready.wait()
        try:
            lines = new_leases(cache, folder, paths[-fresh:], 3 if quick else 10)
        finally:
            done.set()
        for member in crew:
            member.join()
    for line in lines:
        line.what = f"{processes * held:,} leases held by {processes} processes: a new lease (`cache.local`), {line.what}"
    return lines


def _holder(folder: Path, paths: list[str], ready: Any, done: Any) -> None:
    import forebay

    with forebay.Cache(folder / "root", max_age="forever") as cache:
        held = [cache.local(path, force=True) for path in paths]
        ready.wait()
        done.wait()
        assert len(held) == len(paths)


def new_leases(cache: Any, folder: Path, paths: list[str], rounds: int) -> list[Line]:
    """On entries that this process has used before; and on others, whose bytes are verified at their first use."""

    def lease(path: str) -> None:
        with cache.local(path, force=True):
            pass

    per_round = len(paths) // (rounds + 1)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    floors = {
        "lock + unlock": Part(FLOOR, doing(_lock_and_unlock, per_round, lock), per_round),
        "open + map": Part(FLOOR, each(open_and_map, itertools.cycle(paths), per_round), per_round),
    }
    cache.read(paths[-1], force=True)
    lines = []
    for what, must in (("of an entry new to this process", "-"), ("of an entry that it knows", "<= 100 us")):
        ours = Part(OURS, each(lease, iter(paths), per_round), per_round)
        lines.append(Line(f"{what}, taken and let go", must, interleave(rounds, {"Forebay": ours, **floors})))
    lines[-1].met = lines[-1].ours.median <= 100e-6
    return lines


def _lock_and_unlock(fd: int) -> None:
    for kind in (fcntl.F_RDLCK, fcntl.F_UNLCK):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", kind, os.SEEK_SET, 7, 1, 0))


ROWS = {"hit": hit, "first": first, "open": open_root, "put": put, "evict": evict, "leases": leases}

if __name__ == "__main__":
    main("engine", ROWS)
