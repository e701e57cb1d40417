"""Contestants of epochs.py in turn: the server, and the processes that read from it, with a limit of time for each."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from _common import OURS, Timing
from _epochs_peers import BEGIN, BUCKET, END, Contestant

ITEM, LATENCY = 100_000, 0.02

_SERVER = """
import json, os, sys
from pathlib import Path
from forebay.testing import ScriptedServer
bucket, folder, count, item, latency = sys.argv[1:]
with ScriptedServer() as server:
    for number in range(int(count)):
        server.put(f"/{bucket}/d/{number:06d}", os.urandom(int(item)), latency=float(latency))
    for path in Path(folder).rglob("*") if folder else ():
        if path.is_file():
            server.put(f"/{bucket}/{path.relative_to(folder)}", path.read_bytes(), latency=float(latency))
    print(server.url, flush=True)
    for line in sys.stdin:
        print(json.dumps([server.gets + server.heads, server.sent]), flush=True)
"""


class Server:
    """Objects, or the files of a directory, in a process of its own that takes ``latency`` seconds to answer. A context manager."""

    def __init__(self, count: int = 0, folder: Path | None = None, *, item: int = ITEM, latency: float = LATENCY) -> None:
        words = [sys.executable, "-c", _SERVER, BUCKET, str(folder or ""), str(count), str(item), str(latency)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._answer()

    def counts(self) -> tuple[int, int]:
        """Requests so far, and bytes of bodies."""
        assert self._process.stdin is not None
        self._process.stdin.write("?\n")
        self._process.stdin.flush()
        requests, sent = json.loads(self._answer())
        return requests, sent

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()


class Failed(Exception):
    """A contestant failed, or took too long."""


@dataclass
class Epoch:
    """One epoch of one run. ``requests``, ``sent``: what the server counted; what was requested before the first epoch is in it."""

    wall: float
    requests: int
    sent: int


@dataclass
class Race:
    """What contestants read: ``count`` objects, or shards (``made``: the directory of what the server has). ``limit``: seconds for a run;
    ``seconds``: after them no round begins."""

    table: Mapping[str, Contestant]
    folder: Path
    count: int
    share: float = 1.5
    step: float = 0.0
    latency: float = LATENCY
    made: Path | None = None
    rounds: int = 3
    seconds: float = 240.0
    limit: float = 150.0
    at_once: int = 1
    runs: dict[str, list[list[Epoch]]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def run(self) -> None:
        """Run all in turn, and those that are not slow again. With ``at_once`` above 1 they run side by side, each beside a server of its
        own: nothing is measured then."""
        for label, contestant in self.table.items():
            if name := contestant.missing():
                self.left_out[label] = f"{name} is not installed"
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            shared = stack.enter_context(self._server()) if self.at_once == 1 else None
            pool = stack.enter_context(ThreadPoolExecutor(self.at_once))
            for number in range(self.rounds):
                labels = [label for label in self.table if label not in self.left_out and not (number and self.table[label].slow)]
                taken = dict(zip(labels, pool.map(lambda label: self._once(label, shared), labels), strict=True))
                again = sum(taken[label] for label in labels if not self.table[label].slow)
                if time.monotonic() + again > began + self.seconds:
                    break

    def _server(self) -> Server:
        return Server(0 if self.made else self.count, self.made, latency=self.latency)

    def _once(self, label: str, shared: Server | None) -> float:
        """One run; returns the seconds that it took."""
        began = time.monotonic()
        try:
            with contextlib.nullcontext(shared) if shared else self._server() as server:
                epochs = self._epochs(label, server)
        except Failed as error:
            self.left_out[label] = str(error)
            print(f"{label}: {error}", file=sys.stderr)
        else:
            self.runs.setdefault(label, []).append(epochs)
        return time.monotonic() - began

    def _epochs(self, label: str, server: Server) -> list[Epoch]:
        contestant = self.table[label]
        place = self.folder / f"{list(self.table).index(label)}"
        log = place.with_suffix(".log")
        count = max(1, int(self.count * contestant.share))
        given = {
            "url": server.url, "place": str(place), "count": count, "item": ITEM, "budget": int(self.count * ITEM * self.share),
            "step": self.step, "epochs": contestant.epochs, "made": str(self.made), "shards": self._shards(),
        }  # fmt: skip
        try:
            return [
                Epoch(epoch.wall * self.count / count, epoch.requests, epoch.sent)
                for epoch in run(BEGIN + contestant.code + END, given, server, log, self.limit)
            ]
        finally:
            shutil.rmtree(place, ignore_errors=True)

    def _shards(self) -> list[str]:
        return sorted(path.name for path in (self.made / "tar").iterdir()) if self.made else []

    def timing(self, label: str, epoch: int) -> Timing:
        """Of one epoch; of a contestant that ran for one only, as all of them are the same."""
        return Timing(self.table[label].kind, [run[min(epoch, len(run) - 1)].wall for run in self.runs[label]])

    def last(self, label: str, epoch: int) -> Epoch:
        """That epoch in the last round."""
        run = self.runs[label][-1]
        return run[min(epoch, len(run) - 1)]

    def beside(self, ours: str, epoch: int) -> dict[str, Timing]:
        """The timings of ours, of peers and floors."""
        return {label: self.timing(label, epoch) for label in self.runs if label == ours or self.table[label].kind != OURS}


@contextlib.contextmanager
def group(words: list[str], log: Path, limit: float) -> Iterator[subprocess.Popen[str]]:
    """A process with pipes, in a group of its own, which is killed after ``limit`` seconds and at the end; ``log``: its standard error.
    What it puts into a temporary directory lies beside that."""
    temporary = log.with_suffix(".tmp")
    temporary.mkdir(exist_ok=True)
    folders = {
        "TMPDIR": str(temporary),
        "DATA_OPTIMIZER_CACHE_FOLDER": f"{temporary}/chunks",
        "DATA_OPTIMIZER_DATA_CACHE_FOLDER": f"{temporary}/data",
    }
    with open(log, "wb") as errors:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, stdin=pipe, stdout=pipe, stderr=errors, text=True, start_new_session=True, env={**os.environ, **folders}
        )

    def kill() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    late = threading.Timer(limit, kill)
    late.start()
    try:
        with process:
            try:
                yield process
            finally:
                late.cancel()
                kill()
    finally:
        late.join()


def run(code: str, given: Mapping[str, object], server: Server, log: Path, limit: float) -> list[Epoch]:
    """The epochs of a program that is ended after ``limit`` seconds. Raises `Failed`."""
    counts, began = [server.counts()], time.monotonic()
    with group([sys.executable, "-c", code, json.dumps(given)], log, limit) as process:
        walls = _walls(process, server, counts)
        if walls is None:
            raise Failed(_reason(log, limit, time.monotonic() - began))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    steps = itertools.pairwise(counts[:1] + counts[2:])  # what was requested before the first epoch is part of it
    return [Epoch(wall, after[0] - before[0], after[1] - before[1]) for wall, (before, after) in zip(walls, steps, strict=True)]


def _walls(process: subprocess.Popen[str], server: Server, counts: list[tuple[int, int]]) -> list[float] | None:
    """What the program tells at its end; None if it ends without. Counts at the begin of each epoch, and at the end."""
    assert process.stdin is not None
    assert process.stdout is not None
    for line in process.stdout:
        if line == "epoch\n":
            counts.append(server.counts())
            try:
                process.stdin.write("\n")
                process.stdin.flush()
            except BrokenPipeError:
                return None
        elif line.startswith("done "):
            counts.append(server.counts())
            walls: list[float] = json.loads(line.removeprefix("done "))
            return walls
    return None


def _reason(log: Path, limit: float, taken: float) -> str:
    text = log.read_text(errors="replace").strip()
    lines = re.findall(r"^\w*(?:Error|Exception): .*", text, re.MULTILINE) or text.splitlines()
    return f"took more than {limit:.0f} s" if taken >= limit else f"failed: {lines[-1][:200] if lines else 'it told nothing'}"


def make(made: Path, formats: Mapping[str, str], count: int, shard: int, limit: float) -> dict[str, str]:
    """Write the samples in each format; returns those that failed, and why."""
    failed = {}
    for name, code in formats.items():
        log, began = made.with_suffix(f".{name}.log"), time.monotonic()
        with group([sys.executable, "-c", code, str(made), str(count), str(ITEM), str(shard)], log, limit) as process:
            process.communicate()
            if process.returncode:
                failed[name] = _reason(log, limit, time.monotonic() - began)
    return failed
