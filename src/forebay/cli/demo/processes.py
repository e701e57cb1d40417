"""The demo's processes: the server, the workers, and the sampler that measures the cache while all of them are stopped."""

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

TIMEOUT = 120.0
"""Seconds without an event of any worker after which the demo gives up."""


class DemoFailed(forebay.ForebayError, RuntimeError):
    """A process of the demo ended or stopped responding unexpectedly."""


def start(module: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that runs a module of this package, with pipes to and from it."""
    path = os.pathsep.join([str(Path(forebay.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", module, *(str(a) for a in arguments)]
    # A process group of its own in this session: Ctrl-C in the terminal reaches only the demo, which ends the others; and if the demo is
    # killed while they are stopped, the kernel wakes them (SIGHUP to an orphaned group).
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
    """Requests that the server got, and bytes of objects that it sent."""

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
            raise DemoFailed("the server of the demo ended unexpectedly; its last output is above")
        return json.loads(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _end(self._process)


@dataclass(frozen=True, slots=True)
class WorkerEvent:
    """An event of a worker. ``content``: ``"ready"``, a shard whose load begins, a dict of what was read, None (end of its list), or
    ``"gone"``."""

    index: int
    pid: int
    content: Any


@dataclass(slots=True)
class DemoWorkers:
    """``count`` workers that share one cache and read the shards of one URL. A context manager; one thread drives it, another one
    measures."""

    root: Path
    url: str
    count: int
    events: queue.SimpleQueue[WorkerEvent] = field(default_factory=queue.SimpleQueue)
    workers: list[subprocess.Popen[str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards workers, so that none is stopped while it is replaced

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
            self.events.put(WorkerEvent(index, process.pid, json.loads(line)))
        self.events.put(WorkerEvent(index, process.pid, "gone"))

    def next(self) -> WorkerEvent:
        """Return the next event of a current worker. Raises `DemoFailed` if one ended unexpectedly, or none responds."""
        while True:
            try:
                event = self.events.get(timeout=TIMEOUT)
            except queue.Empty as error:
                raise DemoFailed(f"no worker responded for {TIMEOUT:.0f} s") from error
            if event.pid != self.workers[event.index].pid:
                continue  # the last output of the killed worker
            if event.content == "gone":
                raise DemoFailed(f"worker {event.index + 1} ended unexpectedly; its last output is above")
            return event

    def give(self, index: int, names: Sequence[str]) -> None:
        pipe = _pipe(self.workers[index].stdin)
        pipe.write(json.dumps(list(names)) + "\n")
        pipe.flush()

    def replace(self, index: int) -> int:
        """Kill a worker with -9 and start a replacement; returns the pid of the killed one."""
        with self.lock:
            dead = self.workers[index]
            dead.kill()
            dead.wait()
            self.workers[index] = self._start(index)
        return dead.pid

    def measure(self) -> int:
        """Return the bytes of disk that the cache takes. All workers are stopped meanwhile: during renames a walk counts files twice."""
        with self.lock:
            for process in self.workers:
                process.send_signal(signal.SIGSTOP)
            try:
                return _bytes_below(self.root)
            finally:
                for process in self.workers:
                    process.send_signal(signal.SIGCONT)


def _bytes_below(root: Path) -> int:
    sizes: dict[int, int] = {}  # by inode, so that a hard link counts once
    for part in ("blobs", "packs", "tmp", "trees"):
        for folder, _, names in os.walk(root / part):
            for name in names:
                status = os.lstat(os.path.join(folder, name))
                sizes[status.st_ino] = status.st_blocks * 512
    return sum(sizes.values())


class Sampler:
    """Measures the cache every ``pause`` seconds in a thread of its own. A context manager. ``peak``: the largest size in bytes."""

    def __init__(self, workers: DemoWorkers, pause: float = 0.25) -> None:
        self._workers, self._pause, self._over = workers, pause, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.peak = self.samples = self.last = 0

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            self.last = self._workers.measure()
            self.peak, self.samples = max(self.peak, self.last), self.samples + 1

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
