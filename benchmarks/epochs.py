"""A data set read in a new random order each epoch, by PyTorch's DataLoader. ``python benchmarks/epochs.py [ROW...] [--quick] [--json]``

The objects lie behind a server in a process of its own that takes 20 ms to answer; it counts what it sends. Every contestant is a fresh
process with two workers, and has caches and files of its own. Peers are set as their documentation advises."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path

from _common import FLOOR, OURS, PEER, Line, Timing, main

ITEM, LATENCY = 100_000, 0.02
EPOCHS, BATCH, WORKERS, CONNECTIONS = 3, 32, 2, 16

_SERVER = """
import json, os, sys
from forebay.testing import ScriptedServer
with ScriptedServer() as server:
    for number in range(int(sys.argv[1])):
        server.put(f"/d/{number:06d}", os.urandom(int(sys.argv[2])), latency=float(sys.argv[3]))
    print(server.url, flush=True)
    for line in sys.stdin:
        print(json.dumps([server.gets, server.sent]), flush=True)
"""

_BEGIN = """
import json, os, sys, time
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler
url, place, count, budget, step, item = sys.argv[1], sys.argv[2], *map(float, sys.argv[3:7])
count, budget, item = int(count), int(budget), int(item)
urls = [f"{url}/d/{number:06d}" for number in range(count)]
sampler_of = lambda dataset: RandomSampler(dataset)

class Own(Dataset):
    def __init__(self, get):
        self.get = get
    def __len__(self):
        return count
    def __getitem__(self, i):
        return self.get(i)

def lengths(items):
    return [len(item) for item in items]
"""

_END = f"""
loader = DataLoader(
    dataset, batch_size={BATCH}, sampler=sampler_of(dataset), num_workers={WORKERS}, collate_fn=lengths, persistent_workers=True,
    multiprocessing_context="fork",
)
walls = []
for epoch in range({EPOCHS}):
    print("epoch", flush=True)
    sys.stdin.readline()
    began, seen = time.perf_counter(), 0
    for batch in loader:
        assert all(length == item for length in batch)
        seen += len(batch)
        time.sleep(step)
    walls.append(time.perf_counter() - began)
    assert seen == count
print(json.dumps(walls), flush=True)
"""

_POOL = """
import urllib3
pools = {}
def fetch(i):
    pool = pools.setdefault(os.getpid(), urllib3.PoolManager(maxsize=16))
    return pool.request("GET", urls[i]).data
"""

_CODES = {
    "Forebay, UrlDataset and Lookahead": (
        OURS,
        """
import forebay
from forebay.adapters.torch import Lookahead, UrlDataset
dataset = UrlDataset(urls, cache=forebay.Cache(place, budget=budget, min_free=0, max_age="forever"))
sampler_of = lambda dataset: Lookahead(RandomSampler(dataset), dataset)
""",
    ),
    "Forebay, UrlDataset": (
        OURS,
        """
import forebay
from forebay.adapters.torch import UrlDataset
dataset = UrlDataset(urls, cache=forebay.Cache(place, budget=budget, min_free=0, max_age="forever"))
""",
    ),
    "Forebay, read": (
        OURS,
        """
import forebay
cache = forebay.Cache(place, budget=budget, min_free=0, max_age="forever")
dataset = Own(lambda i: bytes(cache.read(urls[i])))
""",
    ),
    "local files": (
        FLOOR,
        """
os.makedirs(place)
for number in range(count):
    with open(f"{place}/{number}", "wb") as file:
        file.write(os.urandom(item))
def get(i):
    with open(f"{place}/{i}", "rb") as file:
        return file.read()
dataset = Own(get)
""",
    ),
    "no cache": (PEER, _POOL + "dataset = Own(fetch)\n"),
    "no cache, 8 threads a worker": (
        PEER,
        _POOL
        + """
from concurrent.futures import ThreadPoolExecutor
crews = {}
class Batches(Own):
    def __getitems__(self, indices):
        return list(crews.setdefault(os.getpid(), ThreadPoolExecutor(8)).map(fetch, indices))
dataset = Batches(fetch)
""",
    ),
    "fsspec filecache": (
        PEER,
        """
import fsspec
files = {}
def get(i):
    fs = files.setdefault(os.getpid(), None) or fsspec.filesystem("filecache", target_protocol="http", cache_storage=place)
    files[os.getpid()] = fs
    with fs.open(urls[i], "rb") as file:
        return file.read()
dataset = Own(get)
""",
    ),
    "diskcache": (
        PEER,
        _POOL
        + """
import diskcache
kept = diskcache.Cache(place, size_limit=budget)
def get(i):
    data = kept.get(i)
    if data is None:
        data = fetch(i)
        kept.set(i, data)
    return data
dataset = Own(get)
""",
    ),
}


class Server:
    """The objects, in a process of its own."""

    def __init__(self, count: int) -> None:
        words = [sys.executable, "-c", _SERVER, str(count), str(ITEM), str(LATENCY)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def counts(self) -> tuple[int, int]:
        """Requests and bytes so far."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        gets, sent = json.loads(self._process.stdout.readline())
        return gets, sent

    def close(self) -> None:
        self._process.communicate("", timeout=60)


def _run(label: str, server: Server, place: Path, count: int, budget: int, step: float) -> tuple[list[float], list[int]]:
    """The seconds of each epoch, and the requests in it."""
    words = [sys.executable, "-c", _BEGIN + _CODES[label][1] + _END, server.url, str(place), str(count), str(budget), str(step)]
    words.append(str(ITEM))
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    seen = []
    for _ in range(EPOCHS):
        line = process.stdout.readline()
        assert line == "epoch\n", line
        seen.append(server.counts()[0])
        process.stdin.write("\n")
        process.stdin.flush()
    walls: list[float] = json.loads(process.stdout.readline())
    seen.append(server.counts()[0])
    process.communicate(timeout=60)
    shutil.rmtree(place, ignore_errors=True)
    return walls, [after - before for before, after in itertools.pairwise(seen)]


Found = dict[str, tuple[list[Timing], list[int]]]


def _epochs(folder: Path, count: int, rounds: int, share: float, step: float, labels: list[str]) -> Found:
    """By label: the timings of each epoch, and the requests in each epoch of the last round."""
    server = Server(count)
    found = {label: ([Timing(_CODES[label][0]) for _ in range(EPOCHS)], [0] * EPOCHS) for label in labels}
    try:
        for number in range(rounds):
            for label in labels:
                walls, gets = _run(label, server, folder / f"{number}-{labels.index(label)}", count, int(count * ITEM * share), step)
                for timing, wall in zip(found[label][0], walls, strict=True):
                    timing.wall.append(wall)
                found[label][1][:] = gets
    finally:
        server.close()
    return found


def _lines(what: str, found: Found, ours: str, count: int) -> list[Line]:
    lines = []
    for epoch in range(EPOCHS):
        others = {label: timings[epoch] for label, (timings, _) in found.items() if label == ours or timings[epoch].kind != OURS}
        line = Line(f"{what}, epoch {epoch + 1}, {ours}", "", others)
        gets = found[ours][1][epoch]
        line.note = f"{count / line.ours.median:,.0f}/s, {gets:,} requests"
        lines.append(line)
    return lines


def objects(folder: Path, quick: bool) -> list[Line]:
    """2,000 objects of 100 KB, and room for all of them."""
    count, rounds = (64, 1) if quick else (2_000, 3)
    found = _epochs(folder, count, rounds, 1.5, 0.0, list(_CODES))
    lines = []
    for ours in (label for label, (kind, _) in _CODES.items() if kind == OURS):
        some = _lines(f"{count:,} x 100 KB, 20 ms away", found, ours, count)
        some[0].must = f">= 0.9x of {CONNECTIONS} connections / latency; >= the best peer"
        some[0].met = count / some[0].ours.median >= 0.9 * CONNECTIONS / LATENCY and some[0].best_peer() >= 1
        for line in some[1:]:
            line.must = ">= 0.8x local files; >= the best peer"
            line.met = line.ratio("local files") >= 0.8 and line.best_peer() >= 1
        lines += some
    return lines


def half(folder: Path, quick: bool) -> list[Line]:
    """The same with room for half of them."""
    count, rounds = (64, 1) if quick else (2_000, 3)
    labels = [label for label in _CODES if label not in ("local files", "fsspec filecache")]
    found = _epochs(folder, count, rounds, 0.5, 0.0, labels)
    lines = []
    for ours in (label for label, (kind, _) in _CODES.items() if kind == OURS):
        line = _lines(f"{count:,} x 100 KB, budget for half of it", found, ours, count)[-1]
        line.must = "hits >= 45 %; <= 0.6x the time of no cache with as many requests at once"
        hits = 1 - found[ours][1][-1] / count
        line.note += f", {hits:.0%} hits"
        beside = "no cache" if ours == "Forebay, read" else "no cache, 8 threads a worker"
        line.met = hits >= 0.45 and line.ratio(beside) >= 1 / 0.6
        lines.append(line)
    return lines


def steps(folder: Path, quick: bool) -> list[Line]:
    """A loop that works for 50 ms with each batch of 32; beside it the same items in memory."""
    count, rounds = (64, 1) if quick else (2_000, 3)
    ours = "Forebay, UrlDataset and Lookahead"
    found = _epochs(folder, count, rounds, 1.5, 0.05, [ours, "local files", "no cache, 8 threads a worker"])
    lines = _lines(f"{count:,} x 100 KB, 50 ms of work a batch of {BATCH}", found, ours, count)
    for line in lines:
        line.must = ">= 0.97x local files"
        line.met = line.ratio("local files") >= 0.97
    return lines


ROWS = {"objects": objects, "half": half, "steps": steps}

if __name__ == "__main__":
    main("epochs", ROWS)
