"""Outputs of functions beside joblib.Memory, diskcache and CHIA's cache. ``python benchmarks/tasks.py [ROW...] [--quick] [--chia PATH]``"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _tasks
from _common import FLOOR, OURS, PEER, Line, Part, Timing, interleave, main, python, seconds, time_starts
from _tasks import CHIA, Keeper, keepers, started_ray, with_chia

KB, MB = 1000, 1_000_000
QUICK = {1 * KB: "1 KB", 100 * KB: "100 KB array", 5 * MB: "5 MB array"}
FULL = {1 * KB: "1 KB", 1 * MB: "1 MB array", 100 * MB: "100 MB array"}
READS = {1 * KB: 15e-6, 1 * MB: 60e-6, 100 * MB: 200e-6}


def value_of(size: int) -> Any:
    """A record of a KB, or an array."""
    if size <= KB:
        return {"loss": 0.25, "step": 17, "name": "iter-17", "text": os.urandom(size // 2 - 40).hex()}
    import numpy as np

    return np.random.default_rng(1).random(size // 8)


def pickled(value: Any) -> int:
    return len(pickle.dumps(value, 5))


# -- reads and writes of one process -----------------------------------------------------------------------------------


def read(folder: Path, quick: bool) -> list[Line]:
    """What this process has read before; then the same with every byte of the array looked at."""
    lines = []
    for size, what in (QUICK if quick else FULL).items():
        place = folder / str(size)
        place.mkdir()
        made = keepers(place)
        value = value_of(size)
        for keeper in made.values():
            keeper.write("tag", value)
        lines.append(_read(made, size, f"read of {what}, warm", quick))
        if size > 1 * MB:
            lines.append(_read(made, size, f"the same, and a sum over the {what}", quick, total=True))
    return lines


def _read(made: dict[str, Keeper], size: int, what: str, quick: bool, *, total: bool = False) -> Line:
    parts = {}
    for label, keeper in made.items():
        few = 3 if quick or total else 2_000 if keeper.kind == OURS else 200 if size <= MB else 5
        look = (lambda keeper=keeper: keeper.read("tag").sum()) if total else partial(keeper.read, "tag")
        parts[label] = Part(keeper.kind, partial(_often, look, few), few)
    must = None if total else READS.get(size)
    line = Line(what, "-" if must is None else f"<= {seconds(must)}")
    line.timings = interleave(2 if quick else 7, parts)
    if must is not None:
        line.met = line.ours.median <= must
    return line


def _often(call: Callable[[], object], times: int) -> None:
    for _ in itertools.repeat(None, times):
        call()


def write(folder: Path, quick: bool) -> list[Line]:
    """Under tags that are new."""
    lines = []
    for size, what in (QUICK if quick else FULL).items():
        place = folder / str(size)
        place.mkdir()
        made, value, fresh = keepers(place), value_of(size), map(str, itertools.count())
        parts = {}
        for label, keeper in made.items():
            few = 3 if quick else 1 if size > MB else 50
            parts[label] = Part(keeper.kind, partial(_writes, keeper, fresh, value, few), few, before=keeper.clear)
        peers = ("diskcache", "joblib mmap") if size == 100 * MB else ("diskcache",)
        line = Line(f"write of {what}", f">= {', '.join(peers)}")
        line.timings = interleave(2 if quick else 7, parts)
        line.met = all(line.ratio(peer) >= 1 for peer in peers)
        lines.append(line)
    return lines


def _writes(keeper: Keeper, fresh: Any, value: Any, times: int) -> None:
    for tag in itertools.islice(fresh, times):
        keeper.write(tag, value)


# -- the first read of a process ---------------------------------------------------------------------------------------

_FIRST = """
import json, mmap, os, random, sys, time
import diskcache, forebay

root, disk, what, count, files = sys.argv[1:4] + [int(sys.argv[4]), sys.argv[5]]
cache, peer = forebay.Cache(root), diskcache.Cache(disk)
tasks = cache.tasks("bench")
tags = [f"{what}/{number}" for number in range(count)]
ways = {"Forebay": cache.get if what == "bytes" else lambda tag: tasks.read(tag)[1], "diskcache": peer.get}
if what == "array":
    import numpy as np

    def mapped(tag):
        fd = os.open(f"{files}/{tag}", os.O_RDONLY | os.O_CLOEXEC)
        memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        os.close(fd)
        array = np.frombuffer(memory)
        array[0]  # as the head of ours is looked at
        return array

    ways["a file, mapped"] = mapped
for way in ways.values():  # what is imported and opened late
    assert way(tags[0]) is not None
tags = tags[1:]
random.Random(4).shuffle(tags)
spent = {name: [0.0, 0.0] for name in ways}
step = max(len(tags) // 16, 1)
for start in range(0, len(tags), step):
    for name, way in ways.items():
        wall, cpu = time.perf_counter(), time.process_time()
        for tag in tags[start : start + step]:
            assert way(tag) is not None
        spent[name][0] += time.perf_counter() - wall
        spent[name][1] += time.process_time() - cpu
print(json.dumps({name: [seconds / len(tags) for seconds in both] for name, both in spent.items()}))
"""


def first(folder: Path, quick: bool) -> list[Line]:
    """What this process has not read before: each value once, in a random order, in fresh processes."""
    count, few, rounds = (40, 10, 1) if quick else (2_000, 200, 7)
    ours, disk, files = _tasks.Forebay(folder), _tasks.Disk(folder), folder / "files" / "array"
    files.mkdir(parents=True)
    for kind, size, number in (("bytes", KB, count), ("value", KB, count), ("array", MB, few)):
        value = os.urandom(KB) if kind == "bytes" else value_of(size)
        for i in range(number):
            assert ours.cache.put(f"bytes/{i}", value) if kind == "bytes" else ours.write(f"{kind}/{i}", value)
            disk.write(f"{kind}/{i}", value)
            if kind == "array":
                value.tofile(files / str(i))
    return [
        _first(folder, "bytes", "`Cache.get` of 1 KB", count, rounds),
        _first(folder, "value", "`tasks.read` of 1 KB", count, rounds),
        _first(folder, "array", "`tasks.read` of an array of 1 MB", few, rounds),
    ]


def _first(folder: Path, kind: str, what: str, count: int, rounds: int) -> Line:
    line = Line(f"first {what}, {count:,} in a fresh process", "<= 60 us" if kind == "array" else "<= 1x diskcache")
    line.timings = {"Forebay": Timing(OURS), "diskcache": Timing(PEER)}
    if kind == "array":
        line.timings["a file, mapped"] = Timing(FLOOR)
    for _ in range(rounds):
        for label, (wall, cpu) in python(
            _FIRST, str(folder / "root"), str(folder / "diskcache"), kind, str(count), str(folder / "files")
        ).items():
            line.timings[label].wall.append(wall)
            line.timings[label].cpu.append(cpu)
    line.met = line.ours.median <= 60e-6 if kind == "array" else line.ratio("diskcache") >= 1
    return line


# -- a function that is called again -----------------------------------------------------------------------------------


def step(number: int, name: str, lr: float = 0.1) -> dict[str, float]:
    return {"number": number, "lr": lr, "loss": 1 / (1 + number)}


def call(folder: Path, quick: bool) -> list[Line]:
    """A decorated function with small arguments, when it is a hit; the read of its value alone is in it."""
    ours = _tasks.Forebay(folder)
    tagged, digested = ours.tasks.cached(tag="step-{number}")(step), ours.tasks.cached(step)
    joblib, disk = _tasks.Joblib(folder).memory.cache(step), _tasks.Disk(folder).cache.memoize()(step)
    plain = functools.lru_cache(step)
    key = tagged.tag_of(3, "adam", lr=0.2)
    ways: dict[str, tuple[str, Callable[..., Any]]] = {
        "Forebay": (OURS, digested),
        "Forebay, tag of the arguments": (PEER, tagged),
        "its `read` alone": (FLOOR, lambda *_, **__: ours.read(key)),
        "lru_cache": (FLOOR, plain),
        "joblib": (PEER, joblib),
        "diskcache memoize": (PEER, disk),
    }
    few, parts = 20 if quick else 2_000, {}
    for label, (kind, way) in ways.items():
        way(3, "adam", lr=0.2)
        times = few // 10 if kind == PEER else few
        parts[label] = Part(kind, partial(_often, lambda way=way: way(3, "adam", lr=0.2), times), times)
    line = Line("a call of a `@cached` function that is a hit, small arguments", "<= 25 us")
    line.timings = interleave(2 if quick else 9, parts)
    over = [line.timings[label].median - line.timings["its `read` alone"].median for label in ("Forebay", "Forebay, tag of the arguments")]
    line.note = f"{seconds(max(over[0], 0))} over the read, {seconds(max(over[1], 0))} with a tag"
    line.met = line.ours.median <= 25e-6
    return [line]


# -- opening -----------------------------------------------------------------------------------------------------------

_OPEN_OURS = """
import json, sys, time, forebay.cache
from forebay.cache import Cache
Cache(enabled=False).tasks("none").read("nothing")  # what is imported late
began, cpu = time.perf_counter(), time.process_time()
cache = Cache(sys.argv[1])
opened = time.perf_counter()
tasks = cache.tasks("bench")
made = time.perf_counter()
hit, value = tasks.read(sys.argv[2])
assert hit
ended = time.perf_counter()
print(json.dumps([ended - began, time.process_time() - cpu, opened - began, made - opened, ended - made]))
"""
_OPEN_DISK = """
import json, sys, time, diskcache
began, cpu = time.perf_counter(), time.process_time()
assert diskcache.Cache(sys.argv[1]).get(sys.argv[2]) is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_OPEN_CHIA = """
import json, sys, time
import chia.base.cache
began, cpu = time.perf_counter(), time.process_time()
cache = chia.base.cache.Cache.__ray_metadata__.modified_class(sys.argv[1], 1 << 40, {})
assert cache.read(sys.argv[2])[0]
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""
_OPEN_FLOOR = """
import json, os, pickle, sys, time
began, cpu = time.perf_counter(), time.process_time()
with open(sys.argv[1], "rb") as file:
    assert pickle.loads(file.read()) is not None
print(json.dumps([time.perf_counter() - began, time.process_time() - cpu]))
"""


def opening(folder: Path, quick: bool) -> list[Line]:
    """A new process opens what others filled, and reads one value of 100 bytes."""
    counts = (1, 300) if quick else (1, 100_000)
    lines = [_opening(folder / str(count), count, 2 if quick else 9) for count in counts]
    grown = lines[-1].ours.median / lines[0].ours.median
    lines[-1].must, lines[-1].met = "<= 20 ms", lines[-1].ours.median <= 20e-3
    lines[-1].note += f"; {grown:.2f}x of {counts[0]} entry"
    return lines


def _opening(folder: Path, count: int, rounds: int) -> Line:
    folder.mkdir()
    few, tag, value = min(count, 5_000), str(count // 2), {"text": "x" * 80, "number": 17}
    ours, disk = _tasks.Forebay(folder), _tasks.Disk(folder)
    for number in range(count):
        assert ours.write(str(number), value)
    ours.cache.close()
    with disk.cache.transact():
        for number in range(count):
            disk.write(str(number), value)
    disk.cache.close()
    (folder / "value").write_bytes(pickle.dumps(value))
    codes = {
        "Forebay": (OURS, _OPEN_OURS, [str(folder / "root"), tag]),
        "one file, read": (FLOOR, _OPEN_FLOOR, [str(folder / "value")]),
        "diskcache": (PEER, _OPEN_DISK, [str(folder / "diskcache"), tag]),
    }
    if with_chia():
        place = folder / "chia"
        place.mkdir()
        for number in range(few):
            (place / _tasks.chia()._tag_filename(str(number))).write_bytes(pickle.dumps((str(number), value)))
        os.environ["PYTHONPATH"] = os.pathsep.join([os.environ["PYTHONPATH"], os.environ[CHIA]])
        codes[f"CHIA, {few:,}"] = (PEER, _OPEN_CHIA, [str(place), str(few // 2)])
    line = Line(f"open + first read in a new process (imports excluded), {count:,} entries", "-")
    line.note = "cache {:.2f} ms, tasks {:.2f}, read {:.2f}".format(*time_starts(line, codes, rounds))
    return line


# -- Ray ---------------------------------------------------------------------------------------------------------------


def on_ray(folder: Path, quick: bool) -> list[Line]:
    """A worker on the node of the cache reads an array that is kept: the first time, and again. The actor must not see its bytes."""
    import ray

    from forebay.adapters import ray as ray_tasks

    started_ray()
    size = 5 * MB if quick else 100 * MB
    value = value_of(size)
    ours = ray_tasks.start(4, str(folder / "root"), units="GB")
    ways: dict[str, tuple[str, Any, Callable[[str], object]]] = {
        "Forebay": (OURS, ray.remote(_read_ours), lambda tag: ours.write(tag, value)),
        "ray.get of an object": (FLOOR, ray.remote(_read_ref), lambda tag: [ray.put(value)]),
    }
    if with_chia():
        chia = _tasks.Chia(folder)
        ways["CHIA"] = (PEER, ray.remote(_read_chia), lambda tag: chia.write(tag, value))
    again = Line(f"Ray: a worker on the cache's node reads an array of {size // MB} MB, again", "<= 5 ms, no byte through the actor")
    first = Line("the same, its first read", "-")
    for line in (first, again):
        line.timings = {label: Timing(kind) for label, (kind, _, _) in ways.items()}
    before: dict[str, int] = {}
    for number in range(3 if quick else 8):
        for label, (_, ask, keep) in ways.items():
            kept = keep(str(number))
            cold, *warm = ray.get(ask.remote(str(number), kept))
            if number:  # the first round starts the worker
                first.timings[label].wall.append(cold)
                again.timings[label].wall.append(statistics.median(warm))
        before = before or _peaks()
    own = max(peak - before[name] for name, peak in _peaks().items() if "chia" not in name.lower())
    again.note = f"the actor's memory grew by {own / MB:.1f} MB"
    again.met = again.ours.median <= 5e-3 and own < size / 4
    ray_tasks.stop()
    ray.shutdown()
    return [again, first]


def _peaks() -> dict[str, int]:
    """By name of an actor: the most memory that its process had so far, in bytes."""
    import ray._private.state

    found = {}
    for actor in ray._private.state.actors().values():
        if actor["State"] == "ALIVE":
            status = Path(f"/proc/{actor['Pid']}/status").read_text()
            peak = next(line for line in status.splitlines() if line.startswith("VmHWM"))
            found[actor["Name"] or actor["ActorClassName"]] = int(peak.split()[1]) * 1024
    return found


def _timed(look: Callable[[], Any]) -> list[float]:
    times = []
    for _ in range(6):
        began = time.perf_counter()
        assert look().nbytes
        times.append(time.perf_counter() - began)
    return times


def _read_ours(tag: str, kept: object) -> list[float]:
    from forebay.adapters import ray as ray_tasks

    tasks = ray_tasks.active()
    assert tasks is not None
    return _timed(lambda: tasks.read(tag)[1])


def _read_ref(tag: str, kept: list[Any]) -> list[float]:
    import ray

    return _timed(lambda: ray.get(kept[0]))


def _read_chia(tag: str, kept: object) -> list[float]:
    import chia.base.cache
    import ray

    handle = chia.base.cache.get_active_cache()
    return _timed(lambda: ray.get(handle.read.remote(tag))[1])


ROWS = {"read": read, "first": first, "write": write, "call": call, "open": opening, "ray": on_ray}

if __name__ == "__main__":
    main("tasks", ROWS, variables={"chia": (CHIA, "where CHIA's source is, to measure its cache too")})
