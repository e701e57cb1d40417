"""A root of a million entries: what listing, checking and evicting take. ``python benchmarks/scale.py [--count N] [--root DIR]``

The root is built in DIR (a temporary directory unless it is given; a later run uses it again). CPU is user and system time of the verb's
own process; memory is the most that it has of its own, without the files that it maps, which processes share. The last column is what must
be, at a million entries on a machine with nothing else to do; what is not is marked.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import forebay

SECONDS: dict[tuple[str, ...], float | None] = {
    ("ls", "-q"): 5, ("ls",): 5, ("ls", "--json"): None, ("ls", "-s", "size"): None, ("prune", "--dry-run"): None,
    ("clear", "--dry-run"): None, ("stats",): None, ("du",): None, ("verify", "--quick"): None, ("doctor",): None,
}  # fmt: skip
MEMORY = 120.0
"""MB: of 20,000 entries at most, however many there are."""
LONGEST = 0.050
AT_ONCE = 2000
PUTS = 3000


def build(place: Path, count: int) -> None:
    with forebay.Cache(place, budget=count * 4096) as cache:
        cache.space("many")
        data = os.urandom(100)
        for first in range(0, count, AT_ONCE):
            cache._store.put_many("many", [(f"key/{n:08}", data) for n in range(first, min(first + AT_ONCE, count))])


def show(what: str, found: str, must: str = "", good: bool = True) -> None:
    print(f"{what:24} {found:82} {must}{'' if good else '  NOT SO'}", flush=True)


def start(place: Path, words: tuple[str, ...]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "forebay.cli", "-C", str(place), *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def private_memory(pid: int) -> float:
    """In MB, now."""
    with open(f"/proc/{pid}/status") as status:
        return sum(int(line.split()[1]) for line in status if line.startswith("RssAnon:")) / 1000


def verb(place: Path, words: tuple[str, ...], most: float | None) -> None:
    began = time.perf_counter()
    process = start(place, words)
    memory = 0.0
    while not (ended := os.wait4(process.pid, os.WNOHANG))[0]:
        memory = max(memory, private_memory(process.pid))
        time.sleep(0.01)
    took, (_, status, used) = time.perf_counter() - began, ended
    cpu, process.returncode = used.ru_utime + used.ru_stime, os.waitstatus_to_exitcode(status)
    found = f"{took:7.1f} s, {cpu:6.1f} s of CPU, {memory:6.0f} MB, status {process.returncode}"
    must = f"{MEMORY:.0f} MB" if most is None else f"{most:.0f} s, {MEMORY:.0f} MB"
    show(" ".join(words), found, f"<= {must}", memory <= MEMORY and took <= (most or took))


def timed(put: Callable[[int], object], until: Callable[[int], bool]) -> list[float]:
    """Seconds of each put, in order of their length."""
    took: list[float] = []
    while not until(len(took)):
        began = time.perf_counter()
        put(len(took))
        took.append(time.perf_counter() - began)
    return sorted(took)


def rate(took: list[float]) -> str:
    points = (("median", len(took) // 2), ("p99", -len(took) // 100), ("longest", -1))
    return f"{len(took) / sum(took):7.0f}/s; {', '.join(f'{name} {took[at] * 1000:.1f} ms' for name, at in points)}"


def evict(place: Path) -> None:
    with forebay.Cache(place) as cache:
        used = cache.stats().bytes_used
    with forebay.Cache(place, budget=used + 1000) as cache:
        data, before, space = os.urandom(100), cache.stats().evictions, cache.space("many")
        took = timed(lambda n: space.put(f"new/{os.getpid()}/{n}", data), lambda n: n >= PUTS)
        gone = cache.stats().evictions - before
    show("puts that evict", f"{rate(took)}; {gone} went", "longest <= 50 ms", took[-1] <= LONGEST)


def beside_a_listing(place: Path) -> None:
    with forebay.Cache(place, budget="1TB") as cache:
        data, space = os.urandom(100), cache.space("beside")
        alone = timed(lambda n: space.put(f"{n % 1000}", data), lambda n: n >= PUTS)
        listing = start(place, ("ls", "-s", "size"))
        beside = timed(lambda n: space.put(f"{n % 1000}", data), lambda n: n > 0 and listing.poll() is not None)
    show("puts alone", rate(alone))
    show("puts beside ls -s size", rate(beside), "longest <= 50 ms", beside[-1] <= LONGEST)


def lower(place: Path) -> None:
    with forebay.Cache(place) as cache:
        used, before = cache.stats().bytes_used, cache.stats().evictions
        began = time.perf_counter()
        with forebay.Cache(place, budget=used * 99 // 100) as other:
            took = time.perf_counter() - began
            gone = other.stats().evictions - before
    show("a budget lowered by 1 %", f"{took:7.1f} s; {gone} went")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--root", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        place = arguments.root or Path(folder) / "root"
        if not (place / "FORMAT").exists():
            build(place, arguments.count)
        show("", "", "must be")
        evict(place)
        for words, most in SECONDS.items():
            verb(place, words, most)
        beside_a_listing(place)
        lower(place)


if __name__ == "__main__":
    main()
