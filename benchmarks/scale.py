"""A root of a million entries: what listing, checking and evicting take. ``python benchmarks/scale.py [--count N] [--root DIR]``

The root is built in DIR (a temporary directory unless it is given; a later run uses it again). CPU is user and system time of the verb's
own process; memory is its largest resident set.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import forebay

VERBS = (("ls", "-q"), ("ls",), ("prune", "--dry-run"), ("stats",), ("du",), ("verify", "--quick"))
AT_ONCE = 2000
PUTS = 3000


def build(place: Path, count: int) -> None:
    with forebay.Cache(place, budget=count * 4096) as cache:
        cache.space("many")
        data = os.urandom(100)
        for first in range(0, count, AT_ONCE):
            cache._store.put_many("many", [(f"key/{n:08}", data) for n in range(first, min(first + AT_ONCE, count))])


def verb(place: Path, *words: str) -> str:
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-m", "forebay.cli", "-C", str(place), *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    took = time.perf_counter() - began
    cpu, code = used.ru_utime + used.ru_stime, os.waitstatus_to_exitcode(status)
    return f"{' '.join(words):20} {took:7.1f} s, {cpu:6.1f} s of CPU, {used.ru_maxrss / 1000:6.0f} MB, status {code}"


def evict(place: Path) -> str:
    with forebay.Cache(place) as cache:
        used = cache.stats().bytes_used
    with forebay.Cache(place, budget=used + 1000) as cache:
        took, data, before = [], os.urandom(100), cache.stats().evictions
        space = cache.space("many")
        for n in range(PUTS):
            began = time.perf_counter()
            space.put(f"new/{os.getpid()}/{n}", data)
            took.append(time.perf_counter() - began)
        gone = cache.stats().evictions - before
    took.sort()
    times = ", ".join(f"{name} {took[at] * 1000:.1f} ms" for name, at in (("median", PUTS // 2), ("p99", -PUTS // 100), ("longest", -1)))
    return f"puts that evict       {PUTS / sum(took):7.0f}/s; {times}; {gone} went"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--root", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = arguments.root or Path(folder) / "root"
        if not (place / "FORMAT").exists():
            build(place, arguments.count)
        print(evict(place), flush=True)
        for words in VERBS:
            print(verb(place, *words), flush=True)


if __name__ == "__main__":
    main()
