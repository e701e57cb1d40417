"""First touch: a training job reads each object once an epoch, in a random order, out of more than a process remembers.
``python benchmarks/touch.py [ROW...] [--quick] [--json]``

The objects come from nginx. Each round is a fresh process, which reads every file of nginx plainly and every object through the cache, a
slice of each in turn.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import forebay
from _common import FLOOR, OURS, Line, Timing, main, python
from remote import nginx

KB, MB = 1000, 1_000_000
PASSES, SLICES = 3, 16

PASS = """
import json, os, random, sys, time
import forebay

root, files, url, passes, slices = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
cache = forebay.Cache(root, max_age="forever")
names = os.listdir(files)
paths, urls = {name: os.path.join(files, name) for name in names}, {name: f"{url}/{name}" for name in names}

def plain(path):
    with open(path, "rb") as file:
        return file.read()

step = max(len(names) // slices, 1)
cache.read(urls[names[0]]), plain(paths[names[0]])
for number in range(passes):
    random.Random(number).shuffle(names)
    times = {"plain": [0.0, 0.0], "ours": [0.0, 0.0]}
    for start in range(0, len(names), step):
        for label, read, of in (("plain", plain, paths), ("ours", cache.read, urls)):
            some, data = [of[name] for name in names[start : start + step]], None  # what the other one read last is freed here
            wall, cpu = time.perf_counter(), time.process_time()
            for one in some:
                data = read(one)
                data[0], data[-1], data[len(data) // 2]
            times[label][0] += time.perf_counter() - wall
            times[label][1] += time.process_time() - cpu
    for spent in times.values():
        spent[:] = [seconds / len(names) for seconds in spent]
    first = times if number == 0 else first
print(json.dumps({"first": first, "later": times}))
"""


def touch(size: int, count: int, first: float, later: float, folder: Path, quick: bool) -> list[Line]:
    """``first``, ``later``: what one pass of a fresh process, and each pass after it, may take beside plain reads of files."""
    count, rounds = (40, 1) if quick else (count, 5)
    root = folder / "root"
    what = f"{size // MB} MB" if size >= MB else f"{size // KB} KB"
    lines = []
    for when, must in (("first", first), ("later", later)):
        line = Line(f"`Cache.read` of {count:,} x {what} in random order, {when} pass", f"<= {must}x open + read")
        line.timings = {"Forebay": Timing(OURS), "open + read": Timing(FLOOR)}
        lines.append(line)
    with nginx(folder / "nginx") as (url, files), forebay.Cache(root, budget="80%", max_age="forever") as cache:
        for number in range(count):
            (files / f"{number:06d}.bin").write_bytes(os.urandom(min(size, 4096)) + bytes(max(size - 4096, 0)))
        if cache.warm([f"{url}/{name}" for name in os.listdir(files)]).failed:
            raise SystemExit("nginx did not serve all objects")
    for _ in range(rounds):
        result = python(PASS, str(root), str(files), url, str(PASSES), str(SLICES))
        for line, when in zip(lines, ("first", "later"), strict=True):
            for label, name in (("Forebay", "ours"), ("open + read", "plain")):
                wall, cpu = result[when][name]
                line.timings[label].wall.append(wall)
                line.timings[label].cpu.append(cpu)
    for line, must in zip(lines, (first, later), strict=True):
        line.met = line.ours.median <= must * line.timings["open + read"].median
    return lines


ROWS = {
    "4k": partial(touch, 4 * KB, 30_000, 1.5, 1.5),
    "100k": partial(touch, 100 * KB, 30_000, 1.2, 1.1),
    "1m": partial(touch, MB, 3_000, 1.1, 1.1),
    "64m": partial(touch, 64 * MB, 40, 1.05, 1.05),
}

if __name__ == "__main__":
    main("touch", ROWS)
