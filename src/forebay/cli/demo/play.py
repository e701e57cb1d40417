"""The course of the demo: pack library files of this Python into tar shards, as training data is, serve them, read them in two epochs
with a kill in the first, then halve the budget; read objects with room for half of them; and the bars on the screen meanwhile."""

from __future__ import annotations

import itertools
import random
import sysconfig
import tarfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from forebay._config import format_size
from forebay.cache import Cache
from forebay.cli.demo.processes import Counts, DemoServer, DemoWorkers, Sampler
from forebay.cli.render import console, wants_bars
from forebay.reports import Stats

SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages", "test", "tests", "ensurepip", "lib-dynload"})


@dataclass(frozen=True, slots=True)
class Shard:
    """``crc``: of all its bytes, to compare with what the workers read."""

    name: str
    size: int
    crc: int


def pack(folder: Path, *, total: int, count: int) -> list[Shard]:
    """Write ``count`` shards with about ``total`` bytes in total into ``folder``; files are repeated if there are not enough."""
    files, shards = _endless(), []
    for number in range(count):
        path = folder / f"shard-{number:03d}.tar"
        with tarfile.open(path, "w") as tar:
            while tar.offset < total / count:
                turn, file = next(files)
                tar.add(file, arcname=f"{turn}/{file.name}", recursive=False)
        data = path.read_bytes()
        shards.append(Shard(path.name, len(data), zlib.crc32(data)))
    return shards


def pack_objects(folder: Path, *, count: int, size: int) -> list[str]:
    """Write ``count`` objects of ``size`` bytes into ``folder``, of library files too; returns their names."""
    text = b"".join(file.read_bytes() for _, file in itertools.islice(_endless(), 50))
    names = [f"object-{number:03d}" for number in range(count)]
    for number, name in enumerate(names):
        begin = number * 997 % len(text)
        (folder / name).write_bytes((text[begin:] + text * (size // len(text) + 1))[:size])
    return names


def _endless() -> Iterator[tuple[int, Path]]:
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if not SKIPPED & set(path.relative_to(library).parts) and path.is_file())
    if not files:
        raise FileNotFoundError(f"no library files below {library}: this Python has none to pack")
    turn = 0
    while True:
        yield from ((turn, file) for file in files)
        turn += 1


class Screen:
    """Bars on a terminal, a line per event unless ``quiet``. Used by one thread."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._console = quiet, console(stderr=True)
        self._progress = self._new()
        self._workers: list[TaskID] = []
        self._all = TaskID(0)

    def _new(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[about]}"), console=self._console, disable=self._quiet or not wants_bars(), transient=True,
        )  # fmt: skip

    def print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def begin(self, number: int, shards: Sequence[int]) -> None:
        self.print(f"epoch {number}: each worker reads all {shards[0]} shards in its own order, and prefetches the next ones")
        self._progress = self._new()
        self._workers = [self._progress.add_task(f"worker {n + 1}", total=total, about="") for n, total in enumerate(shards)]
        self._all = self._progress.add_task("all", total=sum(shards), about="")
        self._progress.start()

    def read(self, index: int, held: int, budget: int) -> None:
        self._progress.advance(self._workers[index])
        self._progress.update(self._all, advance=1, about=f"cache {format_size(held)} of {format_size(budget)}")

    def end(self, seconds: float) -> None:
        self._progress.stop()
        self.print(f"  done in {seconds:.1f} s")

    def close(self) -> None:
        """Restore the terminal, whatever happened."""
        self._progress.stop()


@dataclass(frozen=True, slots=True)
class Scene:
    """``size``: bytes of data; ``latency``: seconds before each answer; ``rate``: bytes a second of the whole server. ``objects``, of
    ``object_size`` bytes: what is read at the end with half a budget."""

    size: int = 64_000_000
    shards: int = 32
    workers: int = 4
    latency: float = 0.05
    rate: float = 4_000_000
    objects: int = 200
    object_size: int = 20_480


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass of all workers over all shards. ``read``: bytes that the workers got; ``remote``: bytes that the server sent."""

    seconds: float
    read: int
    remote: int
    requests: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@dataclass(frozen=True, slots=True)
class Result:
    """``damaged``: reads with other bytes than the server's. ``peak``: most bytes on disk in any of ``samples``; ``halved`` and ``left``:
    the budget that was set at the end, and the bytes on disk after that. ``half``: epochs over objects with room for half of them."""

    data: int
    epochs: tuple[Epoch, ...]
    killed: int
    damaged: int
    budget: int
    peak: int
    samples: int
    halved: int
    left: int
    half: tuple[Epoch, ...]

    @property
    def budget_held(self) -> bool:
        return self.peak <= self.budget and self.left <= self.halved

    @property
    def speed_up(self) -> float:
        return self.epochs[0].seconds / self.epochs[-1].seconds


def play(folder: Path, scene: Scene, screen: Screen) -> Result:
    """Run the demo inside ``folder``. Raises `DemoFailed` if a process fails."""
    remote, root = folder / "remote", folder / "cache"
    remote.mkdir()
    screen.print(f"packing library files of this Python into {scene.shards} shards")
    shards = pack(remote, total=scene.size, count=scene.shards)
    objects = pack_objects(remote, count=scene.objects, size=scene.object_size)
    data = sum(shard.size for shard in shards)
    budget = data * 3 // 2
    with (
        DemoServer(remote, scene.latency, scene.rate) as server,
        Cache(root, budget=budget) as cache,
        DemoWorkers(root, server.url, scene.workers) as workers,
        Sampler(workers) as sampler,
    ):
        course = _Course(scene, screen, server, cache, workers, sampler, budget, {shard.name: shard for shard in shards})
        pace = f"{format_size(scene.rate)}/s after {scene.latency * 1000:.0f} ms"
        screen.print(f"{scene.workers} workers, {format_size(data)} behind a server that sends {pace}")
        epochs = (course.epoch(1, kill=True), course.epoch(2))
        halved = data // 2
        screen.print("halving the budget while the workers have the cache open")
        with Cache(root, budget=halved):
            left = workers.measure()
        half = read_with_half_a_budget(folder / "half", server, objects, scene.object_size, screen)
        return Result(data, epochs, course.killed, course.damaged, budget, sampler.peak, sampler.samples, halved, left, half)


def read_with_half_a_budget(root: Path, server: DemoServer, names: Sequence[str], size: int, screen: Screen) -> tuple[Epoch, ...]:
    """Three epochs over all objects, each in an order of its own that a look-ahead knows, with room for half of them. ``size``: of an
    object; a multiple of a block."""
    epochs = []
    screen.print(f"{len(names)} objects in three epochs, each in a different order that is known, with room for {len(names) // 2}")
    with Cache(root, budget=size * len(names) // 2, min_free=0, max_age="forever") as cache:
        for number in range(1, 4):
            order = random.Random(number).sample(names, len(names))
            counted, began = server.counts(), time.monotonic()
            with cache.lookahead([f"{server.url}/{name}" for name in order]) as ahead:
                read = sum(len(data) for data in ahead)
            seconds, now = time.monotonic() - began, server.counts()
            requests = now.requests - counted.requests
            epochs.append(Epoch(seconds, read, now.sent - counted.sent, requests, len(names) - requests, requests))
            screen.print(f"  epoch {number}: {epochs[-1].hit_rate:.0%} from the cache, in {seconds:.1f} s")
    return tuple(epochs)


@dataclass(slots=True)
class _Course:
    scene: Scene
    screen: Screen
    server: DemoServer
    cache: Cache
    workers: DemoWorkers
    sampler: Sampler
    budget: int
    shards: Mapping[str, Shard]
    killed: int = 0
    damaged: int = 0

    def epoch(self, number: int, *, kill: bool = False) -> Epoch:
        """Let each worker read every shard in an order of its own. With ``kill`` one is killed in a fetch, after a quarter of the reads."""
        orders = [random.Random(f"{number} {index}").sample(list(self.shards), len(self.shards)) for index in range(self.scene.workers)]
        total = sum(len(order) for order in orders)
        self.screen.begin(number, [len(order) for order in orders])
        before, counted, began = self.cache.stats(), self.server.counts(), time.monotonic()
        for index, order in enumerate(orders):
            self.workers.give(index, order)
        read = self._follow(orders, kill_at=total // 4 if kill else None)
        seconds = time.monotonic() - began
        self.screen.end(seconds)
        return _difference(seconds, read, before, self.cache.stats(), counted, self.server.counts())

    def _follow(self, orders: list[list[str]], kill_at: int | None) -> int:
        """Wait until every worker has read its order; returns the bytes that they read."""
        left = [set(order) for order in orders]
        loading: set[str] = set()
        reads = size = 0
        while any(left):
            event = self.workers.next()
            if isinstance(event.content, dict):
                left[event.index].discard(event.content["name"])
                reads, size = reads + 1, size + event.content["size"]
                self._check(event.content)
                self.screen.read(event.index, self.sampler.last, self.budget)
            elif event.content == "ready":  # the worker that replaced the killed one
                self.workers.give(event.index, [name for name in orders[event.index] if name in left[event.index]])
            elif event.content is not None:
                if kill_at is not None and reads >= kill_at and not self.killed and event.content not in loading:
                    self._kill(event.index, event.content)
                loading.add(event.content)
        return size

    def _kill(self, index: int, name: str) -> None:
        """Kill the worker that has just begun to load this shard, when part of it may have arrived."""
        time.sleep(self.scene.latency + 0.5 * self.shards[name].size / self.scene.rate)
        self.killed = self.workers.replace(index)
        self.screen.print(f"worker {index + 1} (process {self.killed}) was killed with -9 during a fetch; a new worker replaces it")

    def _check(self, read: Mapping[str, object]) -> None:
        shard = self.shards[str(read["name"])]
        self.damaged += (read["size"], read["crc"]) != (shard.size, shard.crc)


def _difference(seconds: float, read: int, before: Stats, after: Stats, counted: Counts, now: Counts) -> Epoch:
    step: Callable[[str], int] = lambda name: getattr(after, name) - getattr(before, name)  # noqa: E731
    return Epoch(seconds, read, now.sent - counted.sent, now.requests - counted.requests, step("hits"), step("misses"))
