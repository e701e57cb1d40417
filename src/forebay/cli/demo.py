"""`forebay demo`: worker processes read tar shards of samples from a slow server through one cache; one of them is killed with -9."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import random
import signal
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from forebay._config import format_size, parse_size
from forebay.cli.arguments import verb
from forebay.cli.hints import FAILED
from forebay.cli.output import Output, console, plain, wants_bars
from forebay.errors import ConfigError, ForebayError

if TYPE_CHECKING:
    from rich.progress import Progress

    from forebay.cache import Cache
    from forebay.testing import ScriptedServer

SHARDS = 32
SERVED = 10  # shards of --serve
OBJECTS, OBJECT_SIZE = 200, 20_480  # a multiple of a disk block
SAMPLE_SIZES = 1_000, 32_000  # smallest and largest
LATENCY = 0.05  # seconds before each answer
AHEAD = 2  # shards that are loaded while a worker reads one
PAUSE = 0.25  # seconds between two measurements
TIMEOUT = 120.0  # seconds without a message of any worker


class DemoFailed(ForebayError, RuntimeError):
    """A process of the demo ended or stopped responding unexpectedly."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """One pass over all data. ``read``: bytes that were read; ``remote``: bytes that the server sent."""

    seconds: float
    read: int
    remote: int
    requests: int
    hits: int
    misses: int

    @property
    def hit_rate(self) -> float:
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else 0.0


@verb("forebay demo", "forebay demo --serve", options="json")
@click.option("--size", metavar="SIZE", default="64MB", show_default=True, help="How much data.")
@click.option("--rate", metavar="SIZE", default="4MB", show_default=True, help="What the server sends a second.")
@click.option("--workers", type=click.IntRange(1, 64), default=4, show_default=True, help="Processes that read.")
@click.option("--serve", is_flag=True, help="Only serve the data, on this machine, until Ctrl-C: a remote to try the cache on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8930, show_default=True, help="Where --serve listens.")
def demo(size: str, rate: str, workers: int, serve: bool, port: int, as_json: bool) -> None:
    """Show the cache at work: offline, in about half a minute. Worker processes read shards over HTTP twice, loading ahead; one is
    killed. Then three epochs over objects of which half fit.

    The data are random bytes, packed into tar shards as samples. The cache is in a temporary folder that is removed at the end.
    """
    total, per_second = parse_size(size, name="--size"), parse_size(rate, name="--rate")
    if total < 1_000_000 or per_second < 100_000:
        raise ConfigError("the demo needs at least 1 MB of data and 100 kB/s", name="--size", value=size)
    if serve:
        if as_json:
            raise click.UsageError("--json and --serve exclude each other")
        _serve(total, per_second, port)
        return
    with _exiting_at_signals():
        result, output = _play(total, per_second, workers, quiet=as_json), Output(as_json)
    output.document(result)
    _show(result, output)
    if result["damaged"] or not result["budget_held"]:
        raise click.exceptions.Exit(FAILED)


@contextlib.contextmanager
def _exiting_at_signals() -> Iterator[None]:
    """Let signals that would end this process leave the block first, as Ctrl-C does: its temporary folder is removed."""

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    ending = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)


def _serve(total: int, rate: int, port: int) -> None:
    """Serve `SERVED` shards until Ctrl-C, and print each request. Raises `ConfigError` for a port that is in use."""
    from forebay.testing import ScriptedServer

    def say(text: str) -> None:
        click.echo(plain(text))  # at once, also into a pipe

    try:
        server = ScriptedServer(port)
    except OSError as error:
        todo = "end the other `forebay demo --serve`, or pass --port"
        raise ConfigError(f"port {port}: {error.strerror}", name="--port", value=str(port), todo=todo) from error
    with server:
        server.rate, server.on_request = rate, lambda request: say(f"{request.method} {request.path}")
        for name, data in pack(total, SERVED).items():
            say(f"{server.put(f'/{name}', data, latency=LATENCY)}  {format_size(len(data))}")
        say(f"{format_size(rate)}/s for all together; press Ctrl-C to quit")
        threading.Event().wait()


def pack(total: int, count: int) -> dict[str, bytes]:
    """Return ``count`` tar shards by name, of about ``total`` bytes together. Their samples are random bytes, the same in each call."""
    shards = {}
    for number in range(count):
        chance, data = random.Random(number), io.BytesIO()
        with tarfile.open(fileobj=data, mode="w") as tar:
            while tar.offset < total / count:
                sample = tarfile.TarInfo(f"{number:03d}-{len(tar.getmembers()):06d}.bin")
                sample.size = chance.randint(*SAMPLE_SIZES)
                tar.addfile(sample, io.BytesIO(chance.randbytes(sample.size)))
        shards[f"shard-{number:03d}.tar"] = data.getvalue()
    return shards


def pack_objects(count: int, size: int) -> dict[str, bytes]:
    """Return ``count`` different objects of ``size`` bytes by name."""
    return {f"object-{number:03d}": random.Random(number).randbytes(size) for number in range(count)}


def work(root: Path, url: str, pipe: Connection) -> None:
    """Run a worker. It receives lists of shards below ``url``, and reads their samples as a data loader does, while a prefetcher loads the
    next shards. It sends None once it is ready, a name when its load begins, and name, size and checksum of each shard that it has read."""
    from forebay import Cache
    from forebay.sources import UrlSource

    def announced(names: Iterable[str]) -> Iterator[str]:
        for name in names:
            pipe.send(name)
            yield name

    # In a group of its own a worker does not receive the Ctrl-C of the terminal, and the kernel wakes it if the demo is killed while the
    # worker is stopped (SIGHUP to an orphaned group).
    os.setpgid(0, 0)
    source = UrlSource(url, version="of this demo")  # a fixed version: workers and epochs share what was loaded
    with (
        Cache(root) as cache,
        cache.prefetcher(source, name="shards", workers=AHEAD + 1) as pool,
        contextlib.suppress(EOFError, BrokenPipeError),  # the demo has ended
    ):
        pipe.send(None)
        while True:
            names = pipe.recv()
            for name, data in zip(names, pool.stream(announced(names), ahead=AHEAD), strict=True):
                with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                    for sample in filter(None, map(tar.extractfile, tar)):
                        sample.read()
                pipe.send((name, len(data), zlib.crc32(data)))


class Workers:
    """Worker processes that share the cache in ``root``, and the bytes that it takes on disk. For one thread.

    ``killed``: the process id of the worker that was killed, or 0. ``peak``: the most bytes on disk in any of ``samples``; ``on_disk``:
    in the last one."""

    def __init__(self, root: Path, url: str, count: int) -> None:
        self._root, self._url, self._spawn = root, url, multiprocessing.get_context("spawn")
        self.killed = self.peak = self.samples = self.on_disk = 0
        self._measured = time.monotonic()
        self._workers = [self._start() for _ in range(count)]

    def close(self) -> None:
        """Kill all workers."""
        for index in range(len(self._workers)):
            self._kill(index)

    def _kill(self, index: int) -> int:
        process, pipe = self._workers[index]
        process.kill()
        process.join()
        pipe.close()
        return process.pid or 0

    def _start(self) -> tuple[multiprocessing.process.BaseProcess, Connection]:
        here, there = self._spawn.Pipe()
        process = self._spawn.Process(target=work, args=(self._root, self._url, there), daemon=True)
        process.start()
        there.close()
        return process, here

    def receive(self) -> tuple[int, str | tuple[str, int, int] | None]:
        """Return the number of a worker, and what it sends next. Measures the cache from time to time. Raises `DemoFailed` if a worker
        ended, or none responds."""
        pipes = [pipe for _, pipe in self._workers]
        end = time.monotonic() + TIMEOUT
        while time.monotonic() < end:
            if time.monotonic() > self._measured + PAUSE:
                self.on_disk, self._measured = self.measure(), time.monotonic()
                self.peak, self.samples = max(self.peak, self.on_disk), self.samples + 1
            ready = wait(pipes, PAUSE)
            index = next((index for index, pipe in enumerate(pipes) if pipe in ready), None)
            if index is not None:
                try:
                    return index, pipes[index].recv()
                except (EOFError, ConnectionResetError) as error:
                    raise DemoFailed(f"worker {index + 1} ended unexpectedly; its last output is above") from error
        raise DemoFailed(f"no worker responded for {TIMEOUT:.0f} s")

    def send(self, index: int, names: Sequence[str]) -> None:
        """Let a worker read these shards."""
        self._workers[index][1].send(names)

    def replace(self, index: int) -> None:
        """Kill a worker with -9, and start another one in its place."""
        self.killed, self._workers[index] = self._kill(index), self._start()

    def measure(self) -> int:
        """Return the bytes that the cache takes on disk. Stops all workers during the walk, which would count renamed files twice."""
        for process, _ in self._workers:
            os.kill(process.pid or 0, signal.SIGSTOP)
        try:
            sizes: dict[int, int] = {}  # by inode, so that a hard link counts once
            for part in ("blobs", "packs", "tmp", "trees"):
                for folder, _, names in os.walk(self._root / part):
                    for name in names:
                        status = os.lstat(os.path.join(folder, name))
                        sizes[status.st_ino] = status.st_blocks * 512
            return sum(sizes.values())
        finally:
            for process, _ in self._workers:
                os.kill(process.pid or 0, signal.SIGCONT)


def _play(size: int, rate: int, count: int, *, quiet: bool) -> dict[str, Any]:
    """Run the demo with ``count`` workers, and return what `--json` shows. Raises `DemoFailed`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from forebay.cache import Cache
    from forebay.testing import ScriptedServer

    screen = console(stderr=True)
    screen.quiet, screen.soft_wrap = quiet, True
    progress = Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[about]}"), console=screen, disable=quiet or not wants_bars(), transient=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="forebay-demo-") as folder, ScriptedServer() as server, progress:
        screen.print(f"packing samples of random bytes into {SHARDS} shards")
        shards, objects, root = pack(size, SHARDS), pack_objects(OBJECTS, OBJECT_SIZE), Path(folder) / "cache"
        server.rate = rate
        for name, content in (shards | objects).items():
            server.put(f"/{name}", content, latency=LATENCY)
        data = sum(map(len, shards.values()))
        budget, halved = data * 3 // 2, data // 2
        with Cache(root, budget=budget) as cache, contextlib.closing(Workers(root, server.url, count)) as workers:
            pace = f"{format_size(rate)}/s after {LATENCY * 1000:.0f} ms"
            screen.print(f"{count} workers, {format_size(data)} behind a server that sends {pace}")
            for _ in range(count):
                workers.receive()
            (first, wrong), (second, wrong_too) = (_epoch(n, count, shards, server, cache, workers, progress) for n in (1, 2))
            screen.print("halving the budget while the workers have the cache open")
            with Cache(root, budget=halved):
                left = workers.measure()
        half = list(_read_with_half_a_budget(Path(folder) / "half", server, list(objects), progress))
    return {
        "data": data, "epochs": (first, second), "killed": workers.killed, "damaged": wrong + wrong_too,
        "budget": budget, "peak": workers.peak, "samples": workers.samples, "halved": halved, "left": left, "half": half,
        "speed_up": first.seconds / second.seconds, "budget_held": workers.peak <= budget and left <= halved,
    }  # fmt: skip


def _epoch(
    number: int, count: int, shards: Mapping[str, bytes], server: ScriptedServer, cache: Cache, workers: Workers, progress: Progress
) -> tuple[Epoch, int]:
    """Let each worker read every shard in an order of its own. Kill one during a fetch, once, after a quarter of the reads.
    Returns the epoch, and the number of reads with wrong bytes."""
    left = [dict.fromkeys(random.Random(f"{number} {index}").sample(list(shards), SHARDS)) for index in range(count)]
    progress.console.print(f"epoch {number}: each worker reads all {SHARDS} shards in its own order, and prefetches the next ones")
    bars = [progress.add_task(f"worker {index + 1}", total=SHARDS, about="") for index in range(count)]
    bars.append(progress.add_task("all", total=SHARDS * count, about=""))
    checksums = {name: zlib.crc32(data) for name, data in shards.items()}
    before, requests, sent, began = cache.stats(), len(server.requests), server.sent, time.monotonic()
    for index in range(count):
        workers.send(index, list(left[index]))
    loading: set[str] = set()
    reads = read = damaged = 0
    while any(left):
        index, message = workers.receive()
        if message is None:  # the worker that replaces the killed one
            workers.send(index, list(left[index]))
        elif isinstance(message, str):
            if reads >= SHARDS * count // 4 and not workers.killed and message not in loading:
                assert server.rate is not None
                time.sleep(LATENCY + 0.5 * len(shards[message]) / server.rate)  # about half of the shard has arrived
                workers.replace(index)
                who = f"worker {index + 1} (process {workers.killed})"
                progress.console.print(f"{who} was killed with -9 during a fetch; a new worker replaces it")
            loading.add(message)
        else:
            name, size, checksum = message
            del left[index][name]
            reads, read = reads + 1, read + size
            damaged += (size, checksum) != (len(shards[name]), checksums[name])
            progress.advance(bars[index])
            progress.update(bars[-1], advance=1, about=f"cache {format_size(workers.on_disk)}")
    seconds, after = time.monotonic() - began, cache.stats()
    for bar in bars:
        progress.remove_task(bar)
    progress.console.print(f"  done in {seconds:.1f} s")
    requests = len(server.requests) - requests
    return Epoch(seconds, read, server.sent - sent, requests, after.hits - before.hits, after.misses - before.misses), damaged


def _read_with_half_a_budget(root: Path, server: ScriptedServer, names: Sequence[str], progress: Progress) -> Iterator[Epoch]:
    """Read all objects in three epochs, each in an order of its own that a look-ahead knows, with room for half of them."""
    from forebay.cache import Cache

    progress.console.print(f"{OBJECTS} objects in three epochs, each in a different order that is known, with room for {OBJECTS // 2}")
    with Cache(root, budget=OBJECT_SIZE * OBJECTS // 2, min_free=0, max_age="forever") as cache:
        for number in range(1, 4):
            order = random.Random(number).sample(names, OBJECTS)
            requests, sent, began = len(server.requests), server.sent, time.monotonic()
            with cache.lookahead([f"{server.url}/{name}" for name in order]) as ahead:
                read = sum(len(data) for data in ahead)
            seconds, requests = time.monotonic() - began, len(server.requests) - requests
            epoch = Epoch(seconds, read, server.sent - sent, requests, OBJECTS - requests, requests)
            progress.console.print(f"  epoch {number}: {epoch.hit_rate:.0%} from the cache, in {seconds:.1f} s")
            yield epoch


def _show(result: Mapping[str, Any], output: Output) -> None:
    epochs, half, budget = result["epochs"], result["half"], format_size(result["budget"])
    output.table(
        ("", "EPOCH 1>", "EPOCH 2>"),
        [
            ("seconds", *(f"{epoch.seconds:.1f}" for epoch in epochs)),
            ("bytes that the workers read", *(format_size(epoch.read) for epoch in epochs)),
            ("  of these from the remote", *(format_size(epoch.remote) for epoch in epochs)),
            ("  of these from the cache", *(format_size(epoch.read - epoch.remote) for epoch in epochs)),
            ("requests to the remote", *(epoch.requests for epoch in epochs)),
            ("hit rate", *(f"{epoch.hit_rate:.0%}" for epoch in epochs)),
            ("speed-up", "", f"{result['speed_up']:.1f}x"),
        ],
    )
    output.table(
        ("HALF A BUDGET", *(f"EPOCH {number}>" for number in range(1, len(half) + 1))),
        [
            ("seconds", *(f"{epoch.seconds:.1f}" for epoch in half)),
            ("requests to the remote", *(epoch.requests for epoch in half)),
            ("from the cache", *(f"{epoch.hit_rate:.0%}" for epoch in half)),
        ],
    )
    held = "held" if result["budget_held"] else "EXCEEDED"
    output.facts({
        "shards behind the remote": format_size(result["data"]),
        "workers killed with -9": 1 if result["killed"] else 0,
        "reads with a wrong byte": result["damaged"],
        f"most on disk in {result['samples']} samples": f"{format_size(result['peak'])} of {budget}: budget {held}",
        "on disk after the budget was halved": f"{format_size(result['left'])} of {format_size(result['halved'])}",
    })  # fmt: skip
