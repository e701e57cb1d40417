"""Loading ahead, beside Energon's pool and a plain thread pool. ``python benchmarks/prefetch.py [ROW...] [--quick] [--json]``"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _common import FLOOR, OURS, PEER, Line, Part, Timing, interleave, main, python, seconds
from _prefetch import (
    ENERGON,
    PLAIN,
    WAYS,
    WINDOW,
    WORKERS,
    Fetched,
    Slow,
    clear,
    consume,
    give_back_at_once,
    import_energon,
    in_time,
    own_memory,
)
from engine import crowd

KB, MB = 1_000, 1_000_000
ITEM = 100 * KB
ADAPTER = "Forebay as Energon's pool"


def names(count: int) -> Iterator[list[str]]:
    """Keys that were never asked for, again and again."""
    for number in itertools.count():
        yield [f"{number}/{i:06d}" for i in range(count)]


def keys_of(count: int) -> list[str]:
    return next(names(count))


# -- in order ----------------------------------------------------------------------------------------------------------


SCRATCH = "Forebay, keep=False"


def order(folder: Path, quick: bool) -> list[Line]:
    """Items of 100 KB from a source with 5 ms of latency, 8 workers, 64 ahead, read in order; and within 2 MB.

    With ``keep=False`` an item goes once it was read, as all do in Energon and in the thread pool; else all are kept for later."""
    count, rounds = (100, 2) if quick else (2_000, 9)
    (folder / "small").mkdir()
    parts: dict[str, Part] = {}
    for label, (kind, way) in WAYS.items():
        parts[label] = Part(kind, partial(_read, way, Slow(ITEM), folder, names(count), None), count, partial(clear, folder))
    for label in ("Forebay", SCRATCH):
        run = partial(_read, WAYS[label][1], Slow(ITEM), folder / "small", names(count), 2 * MB)
        parts[f"{label}, 2 MB"] = Part(OURS, run, count)
    timings = interleave(rounds, parts)
    what = f"{count:,} items of 100 KB in order, 5 ms of latency, 8 workers, 64 ahead"
    lines = [_in_order(timings, SCRATCH, f"{what}, keep=False: time per item"), _in_order(timings, "Forebay", "the same, all of them kept")]
    lines[0].note += f"; as Energon's pool {1 / timings[ADAPTER].median:,.0f}/s"
    limited = [_limited(timings, SCRATCH, ", keep=False"), _limited(timings, "Forebay", "")]
    _limited_energon(limited[0], folder, names(count), 15.0 if quick else 30.0, count, 1 if quick else 3)
    return lines + limited


def _in_order(timings: dict[str, Timing], ours: str, what: str) -> Line:
    line = Line(what, f">= 0.97x {PLAIN}; >= Energon", {label: timings[label] for label in (ours, PLAIN, ENERGON)})
    line.note = f"{1 / line.ours.median:,.0f}/s; {line.ratio(PLAIN):.3f}x the threads"
    line.met = line.ratio(PLAIN) >= 0.97 and line.ratio(ENERGON) >= 1
    return line


def _limited(timings: dict[str, Timing], ours: str, how: str) -> Line:
    line = Line(f"the same with a limit of 2 MB{how}", ">= 0.95x of the run without")
    line.timings = {ours: timings[f"{ours}, 2 MB"], "without a limit": Timing(FLOOR, timings[ours].wall)}
    line.note = f"{1 / line.ours.median:,.0f}/s, {line.ratio('without a limit'):.3f}x"
    line.met = line.ratio("without a limit") >= 0.95
    return line


def _read(way: Any, source: Any, folder: Path, lists: Iterator[list[str]], limit: int | None) -> None:
    keys = next(lists)
    with way(source, folder, limit) as pool:
        consume(pool.stream(keys, ahead=WINDOW), keys)


def _limited_energon(line: Line, folder: Path, lists: Iterator[list[str]], patience: float, count: int, rounds: int) -> None:
    """Energon's pool can stand still for ever once it is full: it gets a process that may be ended."""
    for label in (ENERGON, ADAPTER):
        read = partial(_read, WAYS[label][1], Slow(ITEM), folder / "small", lists, 2 * MB)
        taken = [in_time(patience, _tell_time, read) for _ in range(rounds)]
        if None in taken:
            line.note += f"; {label} had not ended after {patience:.0f} s in {taken.count(None)} of {rounds} runs"
        elif label == ENERGON:
            line.timings[label] = Timing(PEER, [wall / count for wall in taken])
        else:
            line.note += f"; as Energon's pool {count / statistics.median(taken):,.0f}/s"


def _tell_time(tell: Callable[[float], None], work: Callable[[], object]) -> None:
    tell(_timed(work))


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# -- fetched once ------------------------------------------------------------------------------------------------------


def once(folder: Path, quick: bool) -> list[Line]:
    """Source reads, where several processes want the same, or one asks for the same several times."""
    import_energon()
    count = 40 if quick else 500
    return [_shared(folder / "in_step", count, False), _shared(folder / "apart", count, True), _thrice(folder / "thrice", count)]


def _shared(folder: Path, count: int, apart: bool) -> Line:
    folder.mkdir()
    what = "each in an order of its own" if apart else "in the same order"
    line = Line(f"4 processes that want the same {count} items, {what}: source reads in all", f"{count}", unit="reads")
    for label, (kind, way) in WAYS.items():
        if label == SCRATCH:
            continue  # an item may go before the last process comes to it
        source = Slow(ITEM)
        wall, _ = crowd(4, _member, way, source, folder, keys_of(count), apart)
        line.timings[label] = Timing(kind, [source.reads.value])
        line.note += f"{'; ' if line.note else ''}{label} {seconds(wall)}"
    line.met = line.ours.median == count
    return line


def _member(gate: Any, way: Any, source: Slow, folder: Path, keys: list[str], apart: bool, member: int) -> None:
    if apart:
        random.Random(member).shuffle(keys)
    with way(source, folder) as pool:
        gate.wait()
        consume(pool.stream(keys, ahead=WINDOW), keys)


def _thrice(folder: Path, count: int) -> Line:
    """Three references to each item, not one behind the other: those of 20 items are mixed."""
    folder.mkdir()
    keys, mixed = keys_of(count), random.Random(4)
    asked = [key for i in range(0, count, 20) for key in mixed.sample(keys[i : i + 20] * 3, 60)]
    line = Line(f"{count} items, each referenced 3 times in one process: source reads", f"{count}", unit="reads")
    for label, (kind, way) in WAYS.items():
        source = Slow(ITEM)
        with way(source, folder) as pool:
            consume(pool.stream(asked, ahead=WINDOW), asked)
        line.timings[label] = Timing(kind, [source.reads.value])
    line.met = line.ours.median == count
    return line


# -- publishing --------------------------------------------------------------------------------------------------------


def publishing(folder: Path, quick: bool) -> list[Line]:
    """Who changes files and commits transactions while items are loaded, and how often."""
    from forebay._kernel import host

    count = 200 if quick else 2_000
    line = Line(f"{count:,} items of 100 KB: transactions that keep them", "in groups; nothing in threads that load", unit="transactions")
    keys, seen = keys_of(count), Counter[tuple[str, bool]]()
    with WAYS["Forebay"][1](Slow(ITEM), folder) as pool:
        pool.get_lazy("first").get()  # the threads run
        loading = {t.name for t in threading.enumerate() if t.name.startswith("forebay") and "writer" not in t.name}
        host.on_step(lambda what, subject: seen.update([(what, threading.current_thread().name in {*loading, "MainThread"})]))
        consume(pool.stream(keys, ahead=WINDOW), keys)
        host.on_step(None)
    line.timings["Forebay"] = Timing(OURS, [seen["commit", False]])
    line.timings["items"] = Timing(FLOOR, [count])
    elsewhere = sum(times for (_, loads), times in seen.items() if loads)
    line.note = f"{count / line.ours.median:.1f} items each; {elsewhere} changes of files in threads that load, or want an item"
    line.met = elsewhere == 0 and line.ours.median <= count / 2
    return [line]


# -- a demand ----------------------------------------------------------------------------------------------------------


def demand(folder: Path, quick: bool) -> list[Line]:
    """One item that is wanted now, while many are queued to be loaded ahead."""
    queued, rounds = (100, 2) if quick else (1_000, 9)
    what = f"while {queued:,} loads ahead are queued"
    lines = [Line(f"{call}, {what}", "<= 2x a lone read") for call in ("`get_lazy(key).get()`", "`get(key)`")]
    for line in lines:
        line.timings = {label: Timing(kind) for label, (kind, _) in WAYS.items()} | {"a lone read": Timing(FLOOR)}
    source, lists = Slow(ITEM), names(queued)
    for _ in range(rounds):
        for label, (_, way) in WAYS.items():
            for line, call in zip(lines, (_now, _past), strict=True):
                with way(source, folder) as pool:
                    line.timings[label].wall.append(_demand(pool, next(lists), call))
        alone = [_timed(lambda: source["0"]) for _ in range(3)]
        for line in lines:
            line.timings["a lone read"].wall += alone
    for line in lines:
        over = 1 / line.ratio("a lone read")
        line.note, line.met = f"{over:.2f}x a lone read", over <= 2
    return lines


def _now(pool: Any, key: str) -> Any:
    return pool.start(key)()


def _past(pool: Any, key: str) -> Any:
    return pool.get(key)


def _demand(pool: Any, keys: list[str], call: Callable[[Any, str], Any]) -> float:
    held = [pool.start(key) for key in keys]
    taken = _timed(lambda: call(pool, f"{keys[0]}/now"))
    assert len(held) == len(keys)
    return taken


# -- a distant server --------------------------------------------------------------------------------------------------


def server(folder: Path, quick: bool) -> list[Line]:
    """A server that takes 200 ms to answer, and 50 ms of computing with each item."""
    count, rounds = (12, 1) if quick else (100, 3)
    line = Line(f"200 ms of latency, {count} items, 50 ms of computing each, 8 ahead: from the first item on", "<= 1.2x pure computing")
    line.timings = {label: Timing(kind) for label, (kind, _) in WAYS.items()} | {"computing": Timing(FLOOR)}
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_serve, args=(there, count))
    child.start()
    try:
        url = here.recv()
        for number in range(rounds):
            (folder / str(number)).mkdir()
            for label, (_, way) in WAYS.items():
                source = f"{url}/" if label.startswith("Forebay") and label != ADAPTER else Fetched(url)
                with way(source, folder / str(number)) as pool:
                    line.timings[label].wall.append(_compute(pool.stream([f"{i:03d}" for i in range(count)], ahead=8)))
            line.timings["computing"].wall.append(_compute(iter(range(count))))
    finally:
        here.send(None)
        child.join()
    line.met = 1 / line.ratio("computing") <= 1.2
    return [line]


def _compute(stream: Iterator[Any]) -> float:
    next(stream)
    began = time.perf_counter()
    time.sleep(0.05)
    for _ in stream:
        time.sleep(0.05)
    return time.perf_counter() - began


def _serve(pipe: Any, count: int) -> None:
    from forebay.testing import ScriptedServer

    with ScriptedServer() as server:
        for i in range(count):
            server.put(f"/{i:03d}", bytes(ITEM), latency=0.2)
        pipe.send(server.url)
        pipe.recv()


# -- what the cache has ------------------------------------------------------------------------------------------------

_CACHED = """
import json, os, random, sys, time
import forebay

class Kept:  # it is never read
    uri, version = "bench://kept", "1"
    __getitem__ = None

root, files, how, count = sys.argv[1:4] + [int(sys.argv[4])]
names = [f"{number:06d}" for number in range(count)]
first, rest = names[0], names[1:]
random.Random(4).shuffle(rest)
cache = forebay.Cache(root, max_age="forever")
if how == "stream":
    pool = cache.prefetcher(Kept(), workers=2)
    every = lambda names: pool.stream(names)
elif how == "read":
    every = lambda names: (cache.read(f"{files}/{name}", force=True) for name in names)
else:
    every = lambda names: (open(f"{files}/{name}", "rb").read() for name in names)
for data in every([first]):
    assert data
wall, cpu = time.perf_counter(), time.process_time()
for data in every(rest):
    data[0], data[-1], data[len(data) // 2]
print(json.dumps([(time.perf_counter() - wall) / len(rest), (time.process_time() - cpu) / len(rest)]))
"""


class Kept:
    """A source that has a version, so that its items stay for other processes."""

    uri, version = "bench://kept", "1"

    def __getitem__(self, key: str) -> bytes:
        return os.urandom(ITEM)


def cached(folder: Path, quick: bool) -> list[Line]:
    """Items that another process has loaded, each once, in a random order; beside first reads of as many objects by `Cache.read`."""
    import forebay

    count, rounds = (40, 1) if quick else (3_000, 7)
    files, root = folder / "files", folder / "root"
    files.mkdir()
    keys = [f"{number:06d}" for number in range(count)]
    with forebay.Cache(root, budget="80%", max_age="forever") as cache:
        for key in keys:
            (files / key).write_bytes(os.urandom(ITEM))
            cache.pull(files / key)
        with cache.prefetcher(Kept()) as pool:
            assert not pool.warm(keys).failed
    line = Line(f"`stream` over {count:,} items of 100 KB that the cache has, in random order, in a fresh process", "<= 1.5x first `read`")
    line.timings = {"Forebay": Timing(OURS), "`Cache.read`, first": Timing(FLOOR), "open + read": Timing(FLOOR)}
    for _ in range(rounds):
        for timing, how in zip(line.timings.values(), ("stream", "read", "plain"), strict=True):
            wall, cpu = python(_CACHED, str(root), str(files), how, str(count))
            timing.wall.append(wall)
            timing.cpu.append(cpu)
    over = 1 / line.ratio("`Cache.read`, first")
    line.note, line.met = f"{over:.2f}x a first `read`", over <= 1.5
    return [line]


# -- memory ------------------------------------------------------------------------------------------------------------


def memory(folder: Path, quick: bool) -> list[Line]:
    """Lazies of which few fit the limit, and which nobody gets: their bytes are not kept in memory."""
    import_energon()
    size, count = 4 * MB, 16 if quick else 64
    must = f"<= {WORKERS} workers x 4 MB, and 1 MB for the threads"
    line = Line(f"{count} lazies of 4 MB, of which 2 fit the limit: most memory taken", must, unit="bytes")
    for label, (kind, way) in WAYS.items():
        (folder / label).mkdir()
        peak, reads = in_time(120, _peak, way, size, folder / label, keys_of(count))
        line.timings[label] = Timing(kind, [peak])
        line.note += f"{'; ' if line.note else ''}{label} {peak / MB:.1f} MB, {reads} reads"
    line.timings[f"{WORKERS} items"] = Timing(FLOOR, [WORKERS * size])
    line.met = line.ours.median <= WORKERS * size + MB
    return [line]


def _peak(tell: Callable[[tuple[int, int]], None], way: Any, size: int, folder: Path, keys: list[str]) -> None:
    """Until the source has not been read for half a second."""
    give_back_at_once()
    source = Slow(size)
    with way(source, folder, 2 * size + 4 * KB) as pool:
        before, most, quiet, reads = own_memory(), 0, time.monotonic(), 0
        held = [pool.start(key) for key in keys]
        while time.monotonic() < quiet + 0.5:
            most = max(most, own_memory() - before)
            if source.reads.value != reads:
                reads, quiet = source.reads.value, time.monotonic()
            time.sleep(0.002)
        tell((most, reads))
        assert len(held) == len(keys)


ROWS = {"order": order, "once": once, "publishing": publishing, "demand": demand, "server": server, "cached": cached, "memory": memory}

if __name__ == "__main__":
    main("prefetch", ROWS)
