"""The course of the demo: pack, serve, two epochs with a kill in the first, then a smaller budget."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay._config import format_size
from forebay.cache import Cache
from forebay.cli.demo.crew import Counts, Crew, DemoServer, Sampler
from forebay.cli.demo.screen import Screen
from forebay.cli.demo.shards import Shard, pack
from forebay.reports import Stats


@dataclass(frozen=True, slots=True)
class Scene:
    """``size``: bytes of data; ``latency``: seconds before each answer; ``rate``: bytes a second of the whole server."""

    size: int = 64_000_000
    shards: int = 32
    workers: int = 4
    latency: float = 0.05
    rate: float = 4_000_000


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one pass of all workers over all shards took. ``read``: bytes that the workers got; ``remote``: bytes that the server sent."""

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
    """``damaged``: reads whose bytes were not those of the server. ``peak``: most bytes on disk in any of ``samples``; ``halved`` and
    ``left``: the budget that was set at the end, and what was then on disk."""

    data: int
    epochs: tuple[Epoch, ...]
    killed: int
    damaged: int
    budget: int
    peak: int
    samples: int
    halved: int
    left: int

    @property
    def budget_held(self) -> bool:
        return self.peak <= self.budget and self.left <= self.halved

    @property
    def speed_up(self) -> float:
        return self.epochs[0].seconds / self.epochs[-1].seconds


def play(folder: Path, scene: Scene, screen: Screen) -> Result:
    """Run it all inside ``folder``. Raises `DemoFailed` where a process fails."""
    remote, root = folder / "remote", folder / "cache"
    remote.mkdir()
    screen.say(f"packing library files of this Python into {scene.shards} shards")
    shards = pack(remote, total=scene.size, count=scene.shards)
    data = sum(shard.size for shard in shards)
    budget = data * 5 // 4
    with (
        DemoServer(remote, scene.latency, scene.rate) as served,
        Cache(root, budget=budget) as cache,
        Crew(root, served.url, scene.workers) as crew,
        Sampler(crew) as sampler,
    ):
        course = _Course(scene, screen, served, cache, crew, sampler, budget, {shard.name: shard for shard in shards})
        pace = f"{format_size(scene.rate)}/s after {scene.latency * 1000:.0f} ms"
        screen.say(f"{scene.workers} workers, {format_size(data)} behind a server that gives {pace}")
        epochs = (course.epoch(1, kill=True), course.epoch(2))
        halved = data // 2
        screen.say("the budget is halved while the workers have the cache open")
        with Cache(root, budget=halved):
            left = crew.weigh()
        return Result(data, epochs, course.killed, course.damaged, budget, sampler.peak, sampler.samples, halved, left)


@dataclass(slots=True)
class _Course:
    scene: Scene
    screen: Screen
    served: DemoServer
    cache: Cache
    crew: Crew
    sampler: Sampler
    budget: int
    shards: Mapping[str, Shard]
    killed: int = 0
    damaged: int = 0

    def epoch(self, number: int, *, kill: bool = False) -> Epoch:
        """Each worker reads every shard, in an order of its own. With ``kill`` one dies by -9 in a fetch, after a quarter of the reads."""
        orders = [random.Random(f"{number} {index}").sample(list(self.shards), len(self.shards)) for index in range(self.scene.workers)]
        total = sum(len(order) for order in orders)
        self.screen.begin(number, [len(order) for order in orders])
        before, counted, began = self.cache.stats(), self.served.counts(), time.monotonic()
        for index, order in enumerate(orders):
            self.crew.give(index, order)
        read = self._follow(orders, kill_at=total // 4 if kill else None)
        seconds = time.monotonic() - began
        self.screen.end(seconds)
        return _difference(seconds, read, before, self.cache.stats(), counted, self.served.counts())

    def _follow(self, orders: list[list[str]], kill_at: int | None) -> int:
        """Until every worker has read what ``orders`` gave it; the bytes that they read."""
        left = [set(order) for order in orders]
        asked: set[str] = set()
        reads = size = 0
        while any(left):
            news = self.crew.next()
            if isinstance(news.said, dict):
                left[news.index].discard(news.said["name"])
                reads, size = reads + 1, size + news.said["size"]
                self._check(news.said)
                self.screen.read(news.index, self.sampler.last, self.budget)
            elif news.said == "ready":  # the one that took the place of the killed
                self.crew.give(news.index, [name for name in orders[news.index] if name in left[news.index]])
            elif news.said is not None:
                if kill_at is not None and reads >= kill_at and not self.killed and news.said not in asked:
                    self._kill(news.index, news.said)
                asked.add(news.said)
        return size

    def _kill(self, index: int, name: str) -> None:
        """Kill the one that has just begun to load this shard, when some of it may have come."""
        time.sleep(self.scene.latency + 0.5 * self.shards[name].size / self.scene.rate)
        self.killed = self.crew.replace(index)
        self.screen.say(f"worker {index + 1} (process {self.killed}) was killed with -9 in a fetch; another takes its place")

    def _check(self, said: Mapping[str, object]) -> None:
        shard = self.shards[str(said["name"])]
        self.damaged += (said["size"], said["crc"]) != (shard.size, shard.crc)


def _difference(seconds: float, read: int, before: Stats, after: Stats, counted: Counts, now: Counts) -> Epoch:
    step: Callable[[str], int] = lambda name: getattr(after, name) - getattr(before, name)  # noqa: E731
    return Epoch(seconds, read, now.sent - counted.sent, now.requests - counted.requests, step("hits"), step("misses"))
