"""Fetches beside curl and bare clients. ``python benchmarks/remote.py [ROW...] [--quick] [--json]``

Everything is written to /dev/shm where there is room, so that a slow disk does not hide what is measured.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _common import FLOOR, OURS, PEER, Line, Part, Timing, interleave, main, python

MB = 1_000_000

CONFIG = """
daemon off; master_process off; pid {folder}/pid; error_log {folder}/error.log;
events {{ worker_connections 512; }}
http {{
    access_log off; default_type application/octet-stream;
    client_body_temp_path {folder}/tmp1; proxy_temp_path {folder}/tmp2; fastcgi_temp_path {folder}/tmp3;
    uwsgi_temp_path {folder}/tmp4; scgi_temp_path {folder}/tmp5;
    sendfile on; tcp_nopush on; keepalive_requests 100000;
    server {{ listen 127.0.0.1:{port}; root {folder}/files; }}
}}
"""


@contextlib.contextmanager
def nginx(folder: Path) -> Iterator[tuple[str, Path]]:
    """(URL, directory of files) of a running nginx, in a process of its own."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if program is None:
        raise SystemExit("nginx is not installed: see `make deps`")
    (folder / "files").mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(CONFIG.format(folder=folder, port=port))
    server = subprocess.Popen([program, "-p", folder, "-c", folder / "nginx.conf"], stderr=subprocess.DEVNULL)
    try:
        wait_for(port)
        yield f"http://127.0.0.1:{port}", folder / "files"
    finally:
        server.terminate()
        server.wait()


def wait_for(port: int) -> None:
    """Until something listens there."""
    for _ in range(500):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise SystemExit("the server did not start")


def in_turn(rounds: int, codes: dict[str, tuple[str, str]], folder: Path, *values: str) -> tuple[dict[str, Timing], dict[str, list[Any]]]:
    """Each code in a fresh interpreter and an empty directory, in turn. It prints [wall, CPU, more...]."""
    timings = {label: Timing(kind) for label, (kind, _) in codes.items()}
    more: dict[str, list[Any]] = {label: [] for label in codes}
    for number in range(rounds):
        for label, (_, code) in codes.items():
            place = folder / f"{label.split()[0]}-{number}"
            place.mkdir()
            wall, cpu, *rest = python(code, str(place), *values)
            timings[label].wall.append(wall)
            timings[label].cpu.append(cpu)
            more[label].append(rest)
            shutil.rmtree(place)
    return timings, more


_CLOCK = """
import json, os, resource, sys, time
place, url, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
def used():
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
def resident(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) / 1000
def tell(began, cpu, *more):
    print(json.dumps([time.perf_counter() - began, used() - cpu, *more]))
"""

# -- one large object --------------------------------------------------------------------------------------------------

_ONE_OURS = (
    _CLOCK
    + """
import forebay.cache, forebay.remote, forebay.remote.http, sqlite3
before = resident("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
with forebay.Cache(place, budget="4GB") as cache:
    began, cpu = time.perf_counter(), used()
    assert cache.pull(url).size == count
    wall, spent = time.perf_counter() - began, used() - cpu
    print(json.dumps([wall, spent, resident("VmHWM") - before]))
"""
)
_ONE_CURL = (
    _CLOCK
    + """
import subprocess
began, cpu = time.perf_counter(), used()
subprocess.run(["curl", "-sS", "-o", place + "/object", url], check=True)
tell(began, cpu)
"""
)
_ONE_URLLIB3 = (
    _CLOCK
    + """
import urllib3
pool = urllib3.PoolManager()
began, cpu = time.perf_counter(), used()
with pool.request("GET", url, preload_content=False) as answer, open(place + "/object", "wb", buffering=0) as file:
    for block in answer.stream(1 << 20):
        file.write(block)
tell(began, cpu)
"""
)
_ONE_WRITE = (
    _CLOCK
    + """
block, fd = os.urandom(1 << 20), os.open(place + "/object", os.O_WRONLY | os.O_CREAT)
began, cpu = time.perf_counter(), used()
for at in range(0, count, 1 << 20):
    os.pwrite(fd, block, at)
tell(began, cpu)
"""
)


def one(folder: Path, quick: bool) -> list[Line]:
    """One object of 512 MB into an empty cache. Imports and the making of the empty root excluded; curl's own start, some ms, included."""
    size, rounds = (16 * MB, 2) if quick else (512 * MB, 7)
    with nginx(folder / "nginx") as (url, files):
        with open(files / "object", "wb") as file:
            file.writelines(os.urandom(MB) for _ in range(size // MB))
        codes = {
            "Forebay": (OURS, _ONE_OURS), "pwrite of as much": (FLOOR, _ONE_WRITE), "curl": (PEER, _ONE_CURL),
            "urllib3, one stream": (PEER, _ONE_URLLIB3),
        }  # fmt: skip
        timings, more = in_turn(rounds, codes, folder, f"{url}/object", str(size))
    grown = max(rest[0] for rest in more["Forebay"])
    line = Line(f"{size // MB} MB from nginx, one object", ">= 0.9x curl; RSS <= 100 MB over import", timings)
    line.note = f"{size / timings['Forebay'].median / MB:.0f} MB/s, RSS +{grown:.0f} MB"
    line.met = line.ratio("curl") >= 0.9 and grown <= 100
    return [line]


# -- many small objects ------------------------------------------------------------------------------------------------

_MANY_BEGIN = (
    _CLOCK
    + """
import forebay.cache.many, forebay._engine.writers, forebay.remote, forebay.remote.http, sqlite3
urls = [f"{url}/{n}" for n in range(count)]
with forebay.Cache(place, budget="4GB") as cache:
    began, cpu = time.perf_counter(), used()
"""
)
_MANY_READ = (
    _MANY_BEGIN
    + """
    assert all(len(view) == 100_000 for view in cache.read_many(urls))
    tell(began, cpu)
"""
)
_MANY_WARM = (
    _MANY_BEGIN
    + """
    assert len(cache.warm(urls).done) == count
    tell(began, cpu)
"""
)
_MANY_STREAM = (
    _MANY_BEGIN
    + """
    with cache.prefetcher(url, workers=16) as pool:
        assert all(len(data) == 100_000 for data in pool.stream(map(str, range(count)), ahead=64))
    tell(began, cpu)
"""
)
_MANY_URLLIB3 = (
    _CLOCK
    + """
import urllib3
from concurrent.futures import ThreadPoolExecutor
keeps = False
pool = urllib3.PoolManager(maxsize=16)
def fetch(n):
    data = pool.request("GET", f"{url}/{n}").data
    assert len(data) == 100_000
    with open(f"{place}/{n}", "wb") as file:
        file.write(data)
    return data if keeps else None
began, cpu = time.perf_counter(), used()
with ThreadPoolExecutor(16) as crew:
    kept = list(crew.map(fetch, range(count)))
tell(began, cpu)
"""
)
_MANY_URLLIB3_KEPT = _MANY_URLLIB3.replace("keeps = False", "keeps = True")
_MANY_AIOHTTP = (
    _CLOCK
    + """
import aiohttp, asyncio
async def fetch(session, gate, n):
    async with gate, session.get(f"{url}/{n}") as answer:
        data = await answer.read()
    assert len(data) == 100_000
    with open(f"{place}/{n}", "wb") as file:
        file.write(data)
async def all():
    gate = asyncio.Semaphore(16)
    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(fetch(session, gate, n) for n in range(count)))
began, cpu = time.perf_counter(), used()
asyncio.run(all())
tell(began, cpu)
"""
)
_MANY_WRITE = (
    _CLOCK
    + """
data = os.urandom(100_000)
began, cpu = time.perf_counter(), used()
for n in range(count):
    with open(f"{place}/{n}.tmp", "wb", buffering=0) as file:
        file.write(data)
    os.rename(f"{place}/{n}.tmp", f"{place}/{n}")
tell(began, cpu)
"""
)


def many(folder: Path, quick: bool) -> list[Line]:
    """1,000 objects of 100 KB into an empty cache that is open already, as many at a time as threads beside; then by four processes, each
    of which has objects and a cache of its own."""
    count, rounds = (40, 2) if quick else (1_000, 9)
    with nginx(folder / "nginx") as (url, files):
        for number in range(count):
            (files / str(number)).write_bytes(os.urandom(100_000))
        codes = {
            "Forebay": (OURS, _MANY_READ), "warm": (OURS, _MANY_WARM), "stream": (OURS, _MANY_STREAM),
            "pwrite + rename": (FLOOR, _MANY_WRITE),
            "urllib3, 16 threads": (PEER, _MANY_URLLIB3), "urllib3, which keeps the bytes": (PEER, _MANY_URLLIB3_KEPT),
            "aiohttp": (PEER, _MANY_AIOHTTP),
        }  # fmt: skip
        timings, _ = in_turn(rounds, codes, folder, url, str(count))
        together = _four(folder, url, count, max(rounds // 2, 1))
    lines = []
    several = {"warm": timings.pop("warm"), "prefetcher.stream": timings.pop("stream")}
    for what, mine in {"read_many": timings["Forebay"], **several}.items():
        must = ">= 1.3x urllib3 with 16 threads, CPU <= 800 us each"
        line = Line(f"{count:,} x 100 KB from nginx, {what}", must, timings | {"Forebay": mine})
        each = statistics.median(mine.cpu) / count
        line.note = f"{count / mine.median:.0f}/s, {each * 1e6:.0f} us CPU"
        line.met = line.ratio("urllib3, which keeps the bytes" if what == "read_many" else "urllib3, 16 threads") >= 1.3 and each <= 800e-6
        lines.append(line)
    line = Line(f"{count:,} x 100 KB from nginx by each of 4 processes", ">= 1.3x four such urllib3 processes", together)
    line.met = line.ratio("urllib3, 16 threads") >= 1.3
    return [*lines, line]


def _four(folder: Path, url: str, count: int, rounds: int) -> dict[str, Timing]:
    """Four processes at once, each with a place of its own: until the last of them is done."""
    timings = {"Forebay": Timing(OURS), "urllib3, 16 threads": Timing(PEER)}
    for number in range(rounds):
        for label, code in (("Forebay", _MANY_READ), ("urllib3, 16 threads", _MANY_URLLIB3_KEPT)):
            places = [folder / f"four-{number}-{member}" for member in range(4)]
            for place in places:
                place.mkdir()
            with ThreadPoolExecutor(4) as crew:
                found = list(crew.map(lambda place, code=code: python(code, str(place), url, str(count)), places))
            timings[label].wall.append(max(wall for wall, *_ in found))
            timings[label].cpu.append(sum(cpu for _, cpu, *_ in found))
            for place in places:
                shutil.rmtree(place)
    return timings


# -- a crowd on one cold URL -------------------------------------------------------------------------------------------

_SERVER = """
import json, os, sys
from forebay.testing import ScriptedServer
size, rate = int(sys.argv[1]), float(sys.argv[2])
with ScriptedServer() as server:
    server.rate = rate
    body, said = os.urandom(size), 0
    print(server.url, flush=True)
    for line in sys.stdin:
        if line.startswith("put "):
            server.put(line.split()[1], body)
        print(json.dumps([server.sent - said, server.gets]), flush=True)
        said = server.sent
"""
_MEMBER = """
import sys, time, forebay.cache, forebay.remote, forebay.remote.http, sqlite3
with forebay.Cache(sys.argv[1], max_age="forever") as cache:
    print("ready", flush=True)
    url = sys.stdin.readline().strip()
    cpu = time.process_time()
    data = cache.read(url)
    assert len(data) == int(sys.argv[2]) and data[-1] is not None
    print(time.clock_gettime(time.CLOCK_MONOTONIC), time.process_time() - cpu, flush=True)
"""


class Server:
    """A `ScriptedServer` in a process of its own, with one rate for all its connections together."""

    def __init__(self, size: int, rate: float) -> None:
        words = [sys.executable, "-c", _SERVER, str(size), str(rate)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def _ask(self, what: str) -> list[int]:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        found: list[int] = json.loads(self._read())
        return found

    def put(self, path: str) -> str:
        self._ask(f"put {path}")
        return self.url + path

    def sent(self) -> int:
        """Bytes of bodies since the last question."""
        return self._ask("sent")[0]

    def close(self) -> None:
        self._process.communicate("", timeout=60)


def crowd(folder: Path, quick: bool) -> list[Line]:
    """Processes that have the root open already, let loose on one cold URL; beside one of them alone."""
    size, processes, rounds = (10 * MB, 4, 1) if quick else (200 * MB, 32, 3)
    server = Server(size, 100 * MB)
    timings = {"Forebay": Timing(OURS), "as many bytes at that rate": Timing(FLOOR, [size / (100 * MB)]), "a lone pull": Timing(PEER)}
    sent = []
    try:
        for number in range(rounds):
            for label, members in (("a lone pull", 1), ("Forebay", processes)):
                url = server.put(f"/{number}-{members}")
                root = folder / f"root-{number}-{members}"
                server.sent()
                wall, cpu = let_loose(root, url, members, size)
                timings[label].wall.append(wall)
                timings[label].cpu.append(cpu)
                sent.append(server.sent() / size)
                shutil.rmtree(root)
    finally:
        server.close()
    line = Line(
        f"{processes} processes, one cold URL of {size // MB} MB, 100 MB/s: the last one has it",
        "each byte once; <= 1.1x a lone pull",
        timings,
    )
    line.note = f"each byte {max(sent):.4g} times"
    line.met = line.ours.median <= 1.1 * timings["a lone pull"].median and max(sent) == 1
    return [line]


def let_loose(root: Path, url: str, members: int, size: int) -> tuple[float, float]:
    """Seconds until the last one has it, and CPU seconds of all."""
    words = [sys.executable, "-c", _MEMBER, str(root), str(size)]
    crew = [subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(members)]
    for member in crew:
        assert member.stdout is not None
        assert member.stdout.readline() == "ready\n"
    began = time.clock_gettime(time.CLOCK_MONOTONIC)
    for member in crew:
        assert member.stdin is not None
        member.stdin.write(url + "\n")
        member.stdin.flush()
    found = [tuple(map(float, member.communicate()[0].split())) for member in crew]
    return max(end for end, _ in found) - began, sum(cpu for _, cpu in found)


# -- what is not kept --------------------------------------------------------------------------------------------------


def past(folder: Path, quick: bool) -> list[Line]:
    """Objects of 1 MB, each read once a round: into a cache that is full of what is pinned, and into one that holds half of them."""
    import forebay

    count, rounds = (16, 2) if quick else (128, 9)
    with nginx(folder / "nginx") as (url, files):
        for number in range(count):
            (files / str(number)).write_bytes(os.urandom(MB))
        urls = [f"{url}/{number}" for number in range(count)]
        full = forebay.Cache(folder / "full", budget=80 * MB, min_free=0)
        full.put("rest", bytes(79 * MB + 900_000))
        full.pin("rest")
        half = forebay.Cache(folder / "half", budget=count * MB // 2, min_free=0)
        none = forebay.Cache(folder / "none", enabled=False)

        def loop(cache: forebay.Cache) -> None:
            for one in urls:
                cache.read(one)

        lines = []
        for what, cache, must in (
            ("all that is kept is pinned", full, "<= 1.1x no cache"),
            ("a loop over twice what fits, lru", half, "-"),
        ):
            parts = {"Forebay": Part(OURS, partial(loop, cache), count), "no cache": Part(PEER, partial(loop, none), count)}
            lines.append(Line(f"reads of 1 MB that are not kept: {what}", must, interleave(rounds, parts)))
        lines[0].met = lines[0].ratio("no cache") >= 1 / 1.1
    return lines


ROWS = {"one": one, "many": many, "crowd": crowd, "past": past}

if __name__ == "__main__":
    main("remote", ROWS, folder=Path("/dev/shm") if os.path.isdir("/dev/shm") and shutil.disk_usage("/dev/shm").free > 3e9 else None)
