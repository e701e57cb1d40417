"""The demo's processes: the server, the workers, and the sampler that weighs the cache while all of them stand still."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import forebay
from forebay.cli.demo import server, worker

PATIENCE = 120.0
"""Seconds without news from any worker after which the demo gives up."""


class DemoFailed(forebay.ForebayError, RuntimeError):
    """A process of the demo ended or fell silent where it should not have."""


def start(module: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python process that runs a module of this very package, with pipes to it and from it."""
    path = os.pathsep.join([str(Path(forebay.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", module, *(str(a) for a in arguments)]
    # A group of its own, in our session: Ctrl-C in the terminal reaches the demo alone, which ends the others; and if the demo is killed
    # while they stand still, the kernel wakes them (SIGHUP to a group that became an orphan).
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}, process_group=0
    )


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        _pipe(pipe).close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    if pipe is None:
        raise DemoFailed("a process of the demo was started without its pipes")
    return pipe


@dataclass(frozen=True, slots=True)
class Counts:
    """Requests that the server had, and bytes of objects that it sent."""

    requests: int
    sent: int


class DemoServer:
    """A folder behind the slow HTTP server. A context manager."""

    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        self._process = start(server.__name__, folder, latency, rate)
        self.url: str = self._answer()

    def counts(self) -> Counts:
        pipe = _pipe(self._process.stdin)
        pipe.write("\n")
        pipe.flush()
        return Counts(*self._answer())

    def _answer(self) -> Any:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise DemoFailed("the server of the demo ended by itself; its last words stand above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _end(self._process)


@dataclass(frozen=True, slots=True)
class News:
    """What a worker told: ``"ready"``, a shard whose load begins, a dict of what it read, None (its list is done), or ``"gone"``."""

    index: int
    pid: int
    said: Any


@dataclass(slots=True)
class Crew:
    """``count`` workers on one cache and the shards below one URL. A context manager; driven by one thread, stood still by another."""

    root: Path
    url: str
    count: int
    news: queue.SimpleQueue[News] = field(default_factory=queue.SimpleQueue)
    workers: list[subprocess.Popen[str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards workers, so that nobody is stopped while he is replaced

    def __enter__(self) -> Self:
        self.workers = [self._start(index) for index in range(self.count)]
        for _ in range(self.count):
            self.next()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self.lock:
            for process in self.workers:
                _end(process)

    def _start(self, index: int) -> subprocess.Popen[str]:
        process = start(worker.__name__, self.root, self.url)
        threading.Thread(target=self._listen, args=(index, process), daemon=True).start()
        return process

    def _listen(self, index: int, process: subprocess.Popen[str]) -> None:
        for line in _pipe(process.stdout):
            self.news.put(News(index, process.pid, json.loads(line)))
        self.news.put(News(index, process.pid, "gone"))

    def next(self) -> News:
        """The next news of a worker that is one of us. Raises `DemoFailed` if one ended by itself, or none says anything."""
        while True:
            try:
                news = self.news.get(timeout=PATIENCE)
            except queue.Empty as error:
                raise DemoFailed(f"no worker said anything for {PATIENCE:.0f} s") from error
            if news.pid != self.workers[news.index].pid:
                continue  # last words of the one that was killed
            if news.said == "gone":
                raise DemoFailed(f"worker {news.index + 1} ended by itself; its last words stand above")
            return news

    def give(self, index: int, names: Sequence[str]) -> None:
        pipe = _pipe(self.workers[index].stdin)
        pipe.write(json.dumps(list(names)) + "\n")
        pipe.flush()

    def replace(self, index: int) -> int:
        """Kill a worker with -9 and start another in its place; the pid of the dead."""
        with self.lock:
            dead = self.workers[index]
            dead.kill()
            dead.wait()
            self.workers[index] = self._start(index)
        return dead.pid

    def weigh(self) -> int:
        """Bytes of disk that the cache holds. All workers stand still meanwhile: a walk beside renames counts files twice."""
        with self.lock:
            for process in self.workers:
                process.send_signal(signal.SIGSTOP)
            try:
                return _bytes_below(self.root)
            finally:
                for process in self.workers:
                    process.send_signal(signal.SIGCONT)


def _bytes_below(root: Path) -> int:
    seen: dict[int, int] = {}  # by inode, so that a hard link counts once
    for part in ("blobs", "packs", "tmp", "trees"):
        for folder, _, names in os.walk(root / part):
            for name in names:
                facts = os.lstat(os.path.join(folder, name))
                seen[facts.st_ino] = facts.st_blocks * 512
    return sum(seen.values())


class Sampler:
    """Weighs the cache every ``pause`` seconds in a thread of its own. A context manager. ``peak``: the largest weight, in bytes."""

    def __init__(self, crew: Crew, pause: float = 0.25) -> None:
        self._crew, self._pause, self._over = crew, pause, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = self.samples = self.last = 0

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            self.last = self._crew.weigh()
            self.peak, self.samples = max(self.peak, self.last), self.samples + 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
