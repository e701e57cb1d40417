"""Arrays of samples beside the floor and the peers. ``python benchmarks/samples.py [ROW...] [--quick] [--json]``"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import _arrays as arrays
from _arrays import KINDS, NAME, Get, Put, shuffled
from _common import FLOOR, OURS, PEER, Line, Part, Timing, interleave, main, time_starts
from engine import crowd

KB = 1000
SMALL, LARGE = 10 * KB, 150 * KB
SLOW = {"pfio MultiprocessFileCache", "pfio FileCache", "diskcache", "file per sample"}
Loaded = tuple[str, Path, int]


def in_a_child(work: Callable[..., None], *values: Any) -> None:
    """What must leave nothing open or mapped in this process."""
    child = multiprocessing.get_context("fork").Process(target=work, args=values)
    child.start()
    child.join()
    assert child.exitcode == 0


def every(get: Get, indices: Iterable[int]) -> None:
    for i in indices:
        get(i)


# -- gets --------------------------------------------------------------------------------------------------------------


def get(folder: Path, quick: bool) -> list[Line]:
    """All samples in random order, in one process that has seen them all before; and the first time."""
    return [
        line
        for size, count in ((SMALL, 300 if quick else 20_000), (LARGE, 60 if quick else 2_000))
        for line in get_of(folder / str(size), size, count, quick)
    ]


def get_of(folder: Path, size: int, count: int, quick: bool) -> list[Line]:
    folder.mkdir()
    in_a_child(arrays.fill, folder, count, os.urandom(size))
    order = shuffled(count)
    first = Line(f"the first pass of a process over {count:,} samples of {size // KB} KB", "-")
    first.timings = {label: Timing(kind) for label, kind in KINDS.items()}
    for _ in range(1 if quick else 3):
        for label, timing in first.timings.items():
            wall, cpu = crowd(1, _one_pass, (label, folder, count), order)
            timing.wall.append(wall / count)
            timing.cpu.append(cpu / count)
    line = Line(f"`get` raw, {size // KB} KB, one process, random order", "<= 1.6x the floor; faster than lmdb buffers")
    parts = {}
    for label, kind in KINDS.items():
        some = order[: count // 10] if label in SLOW else order
        parts[label] = Part(kind, partial(every, arrays.getter(label, folder, count), some), len(some))
    line.timings = interleave(3 if quick else 15, parts)
    over = 1 / line.ratio("index array + slice")
    line.note = f"{over:.2f}x the floor"
    line.met = over <= 1.6 and line.ratio("lmdb buffers") > 1
    return [line, first]


def first(folder: Path, quick: bool) -> list[Line]:
    """Each sample of 10 KB once, in a random order, in fresh processes: one, and eight at the same time, each all of them."""
    count, rounds = (300, 1) if quick else (20_000, 7)
    in_a_child(arrays.fill, folder, count, os.urandom(SMALL))
    order, labels = shuffled(count), ("Forebay", "index array + slice", "lmdb buffers")
    lines = []
    for processes in (1, 8):
        who = "a process" if processes == 1 else f"{processes} processes at the same time: time per get of all"
        line = Line(f"the first pass over {count:,} samples of 10 KB by {who}", "<= 1x lmdb buffers")
        line.timings = {label: Timing(KINDS[label]) for label in labels}
        for _ in range(rounds):
            for label, timing in line.timings.items():
                wall, cpu = crowd(processes, _one_pass, (label, folder, count), order)
                timing.wall.append(wall / count / processes)
                timing.cpu.append(cpu / count / processes)
        line.note = f"{1e-6 / line.ours.median:.2f} M/s"
        line.met = line.ratio("lmdb buffers") >= 1
        lines.append(line)
    return lines


def _one_pass(gate: Any, which: Loaded, order: list[int], member: int) -> None:
    fetch = arrays.getter(*which)
    gate.wait()
    every(fetch, order)


def together(folder: Path, quick: bool) -> list[Line]:
    """2, 4 and 8 processes that get at the same time: time per get of all."""
    count, passes, rounds = (200, 2, 2) if quick else (20_000, 5, 5)
    in_a_child(arrays.fill, folder, count, os.urandom(SMALL))
    crowds, order = (2, 4, 8), shuffled(count)
    labels = {label: kind for label, kind in KINDS.items() if label not in SLOW or label == "pfio MultiprocessFileCache"}
    lines = [Line(f"`get` raw, 10 KB, {n} processes: time per get of all", "-") for n in crowds]
    for line in lines:
        line.timings = {label: Timing(kind) for label, kind in labels.items()}
    for _ in range(rounds):
        for label in labels:
            some, often = (order[: count // 4], 1) if label in SLOW else (order, passes)
            for n, line in zip(crowds, lines, strict=True):
                wall, cpu = crowd(n, _passes, (label, folder, count), some, often)
                line.timings[label].wall.append(wall / (n * len(some) * often))
                line.timings[label].cpu.append(cpu / (n * len(some) * often))
    for line in lines:
        line.note = f"{1e-6 / line.ours.median:.2f} M/s"
    lines[-1].must = "not less in all than 2 processes (5 % are noise)"
    kept = {label: lines[0].timings[label].median / lines[-1].timings[label].median for label in labels}
    lines[-1].note += "; of 2 processes' rate: " + ", ".join(f"{label} {share:.2f}" for label, share in kept.items())
    lines[-1].met = kept["Forebay"] >= 0.95
    return lines


def _passes(gate: Any, which: Loaded, order: list[int], passes: int, member: int) -> None:
    fetch, mine = arrays.getter(*which), order[member * 1_000 :] + order[: member * 1_000]
    every(fetch, mine)
    gate.wait()
    for _ in range(passes):
        every(fetch, mine)


# -- puts --------------------------------------------------------------------------------------------------------------


def put(folder: Path, quick: bool) -> list[Line]:
    """Fresh slots, by one process and by four."""
    return [put_alone(folder / "one", quick), put_together(folder / "four", quick)]


def put_alone(folder: Path, quick: bool) -> Line:
    folder.mkdir()
    count, rounds, data = 30 if quick else 1_000, 2 if quick else 11, os.urandom(SMALL)
    length = count * (rounds + 1)
    ways: dict[str, tuple[str, Put]] = {
        "Forebay": (OURS, arrays.ours(folder, length).put),
        "pwrite + word": (FLOOR, arrays.floor_put(folder, length)),
        "lmdb sync off": (PEER, arrays.lmdb_put(arrays.environment(folder, "off", sync=False))),
        "lmdb metasync off": (PEER, arrays.lmdb_put(arrays.environment(folder, "meta", metasync=False))),
        "pfio MultiprocessFileCache": (PEER, arrays.pfio_cache("MultiprocessFileCache", folder, length).put),
        "pfio FileCache": (PEER, arrays.pfio_cache("FileCache", folder, length).put),
        "diskcache": (PEER, arrays.disk(folder).set),
        "file per sample": (PEER, arrays.file_put(folder)),
    }
    parts = {}
    for label, (kind, way) in ways.items():
        few = max(1, count // 10) if label in {"lmdb metasync off", "diskcache", *SLOW} else count
        parts[label] = Part(kind, partial(_next_puts, way, itertools.count(), few, data), few)
    line = Line("`put` 10 KB, one process", ">= lmdb sync off; >= 8x pfio MultiprocessFileCache")
    line.timings = interleave(rounds, parts)
    line.note = f"{1 / line.ours.median:,.0f}/s"
    # Not FileCache, which is of one process.
    line.met = line.ratio("lmdb sync off") >= 1 and line.ratio("pfio MultiprocessFileCache") >= 8
    return line


def _next_puts(way: Put, slots: Iterable[int], count: int, data: bytes) -> None:
    for i in itertools.islice(slots, count):
        way(i, data)


def put_together(folder: Path, quick: bool) -> Line:
    folder.mkdir()
    count, rounds, data = 20 if quick else 2_000, 2 if quick else 7, os.urandom(SMALL)
    length = 6 * rounds * count
    made = arrays.pfio_cache("MultiprocessFileCache", folder, length)
    labels = {"Forebay": OURS, "lmdb sync off": PEER, "pfio MultiprocessFileCache": PEER}
    alone, four = ({label: Timing(kind) for label, kind in labels.items()} for _ in range(2))
    starts = dict.fromkeys(labels, 0)
    for _ in range(rounds):
        for label in labels:
            some = max(5, count // 10) if label in SLOW else count
            for processes, timings in ((1, alone), (4, four)):
                wall, cpu = crowd(processes, _putter, label, folder, length, made, starts[label], some, data)
                starts[label] += processes * (some + 1)
                timings[label].wall.append(wall / (processes * some))
                timings[label].cpu.append(cpu / (processes * some))
    line = Line("`put` 10 KB, 4 processes: time per put of all", ">= 1.5x one process")
    alone["Forebay"].kind = FLOOR
    line.timings = {**four, "Forebay alone": alone.pop("Forebay"), **{f"{label} alone": alone[label] for label in alone}}
    gain = line.ratio("Forebay alone")
    line.note = f"{1 / line.ours.median:,.0f}/s, {gain:.2f}x one process"
    line.met = gain >= 1.5
    return line


def _putter(gate: Any, label: str, folder: Path, length: int, made: Any, start: int, count: int, data: bytes, member: int) -> None:
    way = _putting(label, folder, length, made)
    slots = range(start + member * (count + 1), start + (member + 1) * (count + 1))
    way(slots[0], data)
    gate.wait()
    for i in slots[1:]:
        way(i, data)


def _putting(label: str, folder: Path, length: int, made: Any) -> Put:
    if label == "Forebay":
        return arrays.ours(folder, length).put  # type: ignore[no-any-return]
    if label == "lmdb sync off":
        return arrays.lmdb_put(arrays.environment(folder, sync=False))
    return made.put if label.startswith("pfio") else arrays.disk(folder).set


# -- gets beside a writer ----------------------------------------------------------------------------------------------


def beside(folder: Path, quick: bool) -> list[Line]:
    """One byte of each page of a sample is read, while another process puts as fast as it can, and while none does."""
    count, rounds, gets = (50, 2, 100) if quick else (1_000, 9, 5_000)
    length = count + (5_000 if quick else 200_000)
    in_a_child(arrays.fill, folder, count, os.urandom(LARGE), length)
    made = arrays.pfio_cache("MultiprocessFileCache", folder, length)
    every(lambda i: made.put(i, bytes(LARGE)), range(count))
    labels = {"Forebay": OURS, "index array + slice": FLOOR, "lmdb buffers": PEER, "pfio MultiprocessFileCache": PEER, "diskcache": PEER}
    ways = {label: made.get if label.startswith("pfio") else arrays.getter(label, folder, length) for label in labels}
    without = Line("p99 of a `get` of 150 KB that reads a byte of each page, nobody writes", "-")
    with_one = Line("the same beside a process that puts", "<= 1.2x of without")
    for line in (without, with_one):
        line.timings = {label: Timing(kind) for label, kind in labels.items()}
    order, starts = shuffled(count), dict.fromkeys(labels, count)
    for _ in range(rounds):
        for label, way in ways.items():
            every(lambda i, way=way: _look(way, i), order)  # type: ignore[misc]
            some = gets // 5 if label in SLOW else gets
            without.timings[label].wall.append(p99(way, order, some))
            slow, starts[label] = beside_writer(label, folder, length, made, starts[label], partial(p99, way, order, some))
            with_one.timings[label].wall.append(slow)
    grown = {label: with_one.timings[label].median / without.timings[label].median for label in labels}
    with_one.note = "of without: " + ", ".join(f"{label} {times:.2f}x" for label, times in grown.items())
    with_one.met = grown["Forebay"] <= 1.2
    return [without, with_one]


def _look(way: Get, i: int) -> None:
    sum(memoryview(way(i))[::4096])


def p99(way: Get, order: list[int], count: int) -> float:
    """Seconds, of so many gets."""
    taken = []
    for i in itertools.islice(itertools.cycle(order), count):
        began = time.perf_counter()
        _look(way, i)
        taken.append(time.perf_counter() - began)
    return statistics.quantiles(taken, n=100)[-1]


def beside_writer(label: str, folder: Path, length: int, made: Any, start: int, measure: Callable[[], float]) -> tuple[float, int]:
    """What is measured while another process fills slots from ``start`` on; and the first that it left empty."""
    context = multiprocessing.get_context("spawn")  # lmdb refuses a second environment in a process, and a fork would be one with it
    began, end, at = context.Event(), context.Event(), context.Value("Q", start)
    writer = context.Process(target=_write_until, args=(label, folder, length, made, began, end, at))
    writer.start()
    while not began.wait(1):
        assert writer.is_alive(), "the writer failed"
    found = measure()
    end.set()
    writer.join()
    assert writer.exitcode == 0
    return found, at.value


def _write_until(label: str, folder: Path, length: int, made: Any, began: Any, end: Any, at: Any) -> None:
    labels = {"lmdb buffers": "lmdb sync off"}
    if label.startswith("index"):
        (folder / "more").mkdir(exist_ok=True)
        way = arrays.floor_put(folder / "more", length)
    else:
        way = _putting(labels.get(label, label), folder, length, made)
    data = os.urandom(LARGE)
    for i in range(at.value, length):
        way(i, data)
        at.value = i + 1
        began.set()
        if end.is_set():
            return
    raise AssertionError("no empty slots are left")


# -- opening -----------------------------------------------------------------------------------------------------------

_OPEN_OURS = """
import json, sys, time, forebay.cache, forebay.samples, forebay.remote, sqlite3, numpy
clock, cpu = time.perf_counter, time.process_time()
began = clock()
cache = forebay.Cache(sys.argv[1])
opened = clock()
samples = cache.samples("bench")
found = clock()
assert samples.get(int(sys.argv[2])) is not None
got = clock()
print(json.dumps([got - began, time.process_time() - cpu, opened - began, found - opened, got - found]))
"""
_OPEN_LMDB = """
import json, sys, time, lmdb
began, cpu = time.perf_counter(), time.process_time()
env = lmdb.open(sys.argv[1], map_size=1 << 34, readonly=True)
assert env.begin(buffers=True).get(int(sys.argv[2]).to_bytes(8, "big")) is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_OPEN_PFIO = """
import json, sys, time, pfio.cache
began, cpu = time.perf_counter(), time.process_time()
cache = getattr(pfio.cache, sys.argv[3])(int(sys.argv[4]), dir=sys.argv[1])
cache.preload("bench")
assert cache.get(int(sys.argv[2])) is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_OPEN_FLOOR = """
import json, mmap, sys, time
began, cpu = time.perf_counter(), time.process_time()
with open(sys.argv[1], "rb") as file:
    view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))
at, size = view[16 * int(sys.argv[2]) :][:16].cast("Q")
assert view[at : at + size][0] is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""


def opening(folder: Path, quick: bool) -> list[Line]:
    """A new process opens an array and gets a sample; every tenth slot is filled, with a KB.

    Of pfio all are: its ReadOnlyFileCache takes no other file."""
    lengths = (500, 5_000) if quick else (20_000, 1_000_000)
    lines = [opening_of(folder / str(length), length, 2 if quick else 9) for length in lengths]
    lines[-1].must = "<= 2 ms, and as with fewer slots"
    grown = lines[-1].ours.median / lines[0].ours.median
    lines[-1].note += f"; {grown:.2f}x of {lengths[0]:,} slots"
    lines[-1].met = bool(lines[-1].met) and grown <= 1.2
    return lines


def opening_of(folder: Path, length: int, rounds: int) -> Line:
    folder.mkdir()
    in_a_child(_fill_sparsely, folder, length)
    slot, root, pfio = str(length // 20 * 10), str(folder / "root"), str(folder / "pfio")
    codes = {
        "Forebay": (OURS, _OPEN_OURS, [root, slot]),
        "open + map + slice": (FLOOR, _OPEN_FLOOR, [f"{pfio}/{NAME}", slot]),
        "lmdb": (PEER, _OPEN_LMDB, [str(folder / "lmdb"), slot]),
        "pfio ReadOnlyFileCache": (PEER, _OPEN_PFIO, [pfio, slot, "ReadOnlyFileCache", str(length)]),
        "pfio MultiprocessFileCache": (PEER, _OPEN_PFIO, [pfio, slot, "MultiprocessFileCache", str(length)]),
    }
    line = Line(f"open + first `get` in a new process (imports excluded), {length:,} slots", "<= 2 ms")
    line.note = "cache {:.2f} ms, samples {:.2f}, get {:.2f}".format(*time_starts(line, codes, rounds))
    line.met = line.ours.median <= 2e-3
    return line


def _fill_sparsely(folder: Path, length: int) -> None:
    data, mine = os.urandom(KB), arrays.ours(folder, length)
    for i in range(0, length, 10):
        mine.put(i, data)
    mine.close()
    with arrays.environment(folder, sync=False) as env, env.begin(write=True) as txn:
        for i in range(0, length, 10):
            txn.put(i.to_bytes(8, "big"), data)
    arrays.preserved(folder, length, data, length)


# -- bytes, codecs -----------------------------------------------------------------------------------------------------


def space(folder: Path, quick: bool) -> list[Line]:
    """Bytes on disk for one sample, after all have closed; of ours also before."""
    count, data = 2_000 if quick else 20_000, os.urandom(SMALL)
    mine = arrays.ours(folder, count)
    for i in range(count):
        mine.put(i, data)
    while_open = arrays.blocks_of(folder / "root" / "packs") / count
    mine.close()
    (folder / "rest").mkdir()
    in_a_child(arrays.fill, folder / "rest", count, data)
    os.sync()
    line = Line("bytes on disk for a sample of 10 KB, index included", "<= 1.01x", unit="B")
    where = {"Forebay": "../root/packs", "lmdb": "lmdb", "pfio": "pfio", "diskcache": "diskcache", "file per sample": "files"}
    for label, name in where.items():
        line.timings[label] = Timing(OURS if label == "Forebay" else PEER, [arrays.blocks_of(folder / "rest" / name) / count])
    line.timings["its bytes"] = Timing(FLOOR, [SMALL])
    line.note = f"{while_open:,.0f} B while it is open"
    line.met = line.ours.median <= 1.01 * SMALL
    return [line]


def codecs(folder: Path, quick: bool) -> list[Line]:
    """An array of 150 KB, as an array; nothing of it is read."""
    return [codec_of(folder / codec, codec, quick) for codec in ("numpy", "pickle")]


def codec_of(folder: Path, codec: str, quick: bool) -> Line:
    import numpy as np

    folder.mkdir()
    count, rounds = (50, 2) if quick else (500, 9)
    value = np.frombuffer(os.urandom(LARGE), np.uint8).reshape(250, 200, 3)
    mine, peer, pfio = arrays.ours(folder, count, codec), arrays.disk(folder), arrays.pfio_cache("FileCache", folder, count, do_pickle=True)
    for i in range(count):
        assert mine.put(i, value)
        assert pfio.put(i, value)
        peer.set(i, value)
    arrays.preserved(folder, count, pickle.dumps(value), count)
    read_only = arrays.pfio_loaded("ReadOnlyFileCache", folder, count, do_pickle=True)
    (folder / "raw").mkdir()
    in_a_child(arrays.fill, folder / "raw", count, value.tobytes())
    floor, order = arrays.floor_get(folder / "raw"), shuffled(count)
    ways: dict[str, tuple[str, Get]] = {
        "Forebay": (OURS, mine.get),
        "slice + np.frombuffer": (FLOOR, lambda i: np.frombuffer(floor(i), np.uint8).reshape(250, 200, 3)),
        "pfio FileCache, do_pickle": (PEER, pfio.get),
        "pfio ReadOnlyFileCache, do_pickle": (PEER, read_only.get),
        "diskcache": (PEER, peer.get),
    }
    line = Line(f"`get` of an array of 150 KB, codec {codec}", "-")
    line.timings = interleave(rounds, {label: Part(kind, partial(every, way, order), count) for label, (kind, way) in ways.items()})
    return line


ROWS = {"get": get, "first": first, "put": put, "together": together, "beside": beside, "open": opening, "space": space, "codecs": codecs}

if __name__ == "__main__":
    main("samples", ROWS)
