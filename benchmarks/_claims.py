"""Jobs that claim: real processes, which hold directories and meet at barriers by Forebay and by MosaicML Streaming.

Streaming keeps its names in /dev/shm and /tmp for the whole node. What is made here is removed again, and nothing else is: its own
clean-up call would take the names of jobs that live.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from _common import FLOOR, OURS, PEER
from _torchvision import import_or_stand_in

SHM = Path("/dev/shm")
STREAMING = "Streaming"
PATIENCE = 60.0


class Process:
    """A forked process that runs one function, which may talk: `tell` here is `ear` there. It leads a group, so that all that it
    starts (Streaming starts a process of Python's) is killed with it."""

    def __init__(self, work: Callable[[Process], object], group: int = 0) -> None:
        self._line, its = socket.socketpair()
        self._told = b""
        self.pid = os.fork()
        if self.pid:
            its.close()
            with contextlib.suppress(OSError):  # the child was quicker
                os.setpgid(self.pid, group or self.pid)
            self.group = group or self.pid
            return
        self._line, self.pid = its, os.getpid()
        try:
            with contextlib.suppress(OSError):
                os.setpgid(0, group)
            work(self)
        except BaseException:
            self.tell({"failed": traceback.format_exc()})
        os._exit(0)

    def tell(self, what: Any) -> None:
        self._line.sendall(json.dumps(what).encode() + b"\n")

    def hear(self, timeout: float = PATIENCE) -> Any:
        """The next thing that was told; None if nothing came in this time."""
        self._line.settimeout(timeout)
        try:
            while b"\n" not in self._told:
                block = self._line.recv(1 << 16)
                if not block:
                    raise RuntimeError(f"process {self.pid} ended and told {self._told!r}")
                self._told += block
        except TimeoutError:
            return None
        first, _, self._told = self._told.partition(b"\n")
        found = json.loads(first)
        if isinstance(found, dict) and "failed" in found:
            raise RuntimeError(found["failed"])
        return found

    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        return time.clock_gettime(~self.pid << 3 | 2)  # as clock_getcpuclockid does

    def kill(self) -> None:
        """The group, whoever of it still lives."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-self.group, 0)
        self._line.close()


@contextlib.contextmanager
def registry() -> Iterator[Path]:
    """Claims of this run lie where those of others do not count."""
    with tempfile.TemporaryDirectory(prefix="forebay-bench-claims-", dir=SHM) as place:
        os.environ["FOREBAY_CLAIMS"] = place
        yield Path(place)


# -- registering -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Registry:
    """A way to register a directory. ``claim``: gives (prefix, what to do to let go of it)."""

    kind: str
    claim: Callable[[str], tuple[int, Callable[[], None]]]


def _forebay(local: str) -> tuple[int, Callable[[], None]]:
    import forebay

    claim = forebay.claim(local, f"s3://bench{local}")
    return claim.prefix, claim.close


def _streaming(local: str) -> tuple[int, Callable[[], None]]:
    from streaming.base.shared.prefix import get_shm_prefix
    from streaming.base.world import World

    prefix, memory = get_shm_prefix([local], [f"s3://bench{local}"], World(1, 1, 1, 0))
    return prefix, memory.cleanup


def _floor(local: str) -> tuple[int, Callable[[], None]]:
    """What holding a directory costs at least: one with a file in it that is locked, under its final name."""
    import fcntl

    place = Path(os.environ["FOREBAY_CLAIMS"]).with_suffix(".floor")
    place.mkdir(exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=place))
    fd = os.open(made / "claim", os.O_CREAT | os.O_EXCL | os.O_RDWR)
    os.write(fd, local.encode())
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(made, made.with_suffix(".claimed"))
    return 0, lambda: shutil.rmtree(place)


REGISTRIES = {"Forebay": Registry(OURS, _forebay), "a locked file": Registry(FLOOR, _floor), STREAMING: Registry(PEER, _streaming)}


def import_all() -> None:
    """Before the clock runs, and before anything is forked. What a killed process started becomes ours, to be waited for."""
    ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
    importlib.import_module("forebay.claims")
    import_or_stand_in()
    importlib.import_module("streaming.base.shared.prefix")


class Claimed(NamedTuple):
    """What a claim took; no prefix where it was refused."""

    prefix: int | None
    wall: float
    cpu: float


class Claimer:
    """A process that claims a directory when it is told to, and lets go of it at once."""

    def __init__(self, way: Registry) -> None:
        self._process = Process(lambda parent: _claim_for_ever(parent, way))

    def __call__(self, local: str) -> Claimed:
        self._process.tell(local)
        return Claimed(*self._process.hear())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()


def _claim_for_ever(parent: Process, way: Registry) -> None:
    while local := parent.hear():
        began, cpu = time.perf_counter(), time.process_time()
        try:
            prefix, let_go = way.claim(local)
        except ValueError:
            prefix, let_go = None, None
        wall, cpu = time.perf_counter() - began, time.process_time() - cpu
        if let_go is not None:
            let_go()
        parent.tell([prefix, wall, cpu])


def hold(way: Registry, local: str) -> Callable[[Process], None]:
    """Work of a process: claim, tell the prefix, and hold it until something is heard."""

    def work(parent: Process) -> None:
        prefix, let_go = way.claim(local)
        parent.tell(prefix)
        parent.hear(3600)
        let_go()
        parent.tell("gone")

    return work


@contextlib.contextmanager
def jobs(way: Registry, folder: Path, count: int) -> Iterator[None]:
    """So many live jobs, each with a directory of its own."""
    born = []
    try:
        for number in range(count):
            born.append(Process(hold(way, str(folder / f"job-{number}"))))
            assert born[-1].hear() is not None
        yield
        for job in born:
            job.tell("go")
            assert job.hear() == "gone"
    finally:
        for job in born:
            job.kill()


def killed_job(label: str, local: str) -> int:
    """A job of three processes with shared memory is killed with -9, all at once, until the last is gone. Gives its prefix."""
    if label != "Forebay":
        process = Process(hold(REGISTRIES[label], local))
        prefix = process.hear()
        process.kill()
        return int(prefix)
    ranks = [Process(_rank(local, 0))]
    ranks.append(Process(_rank(local, 1), ranks[0].group))
    prefixes = {int(rank.hear()) for rank in ranks}
    for rank in reversed(ranks):
        rank.kill()
    return prefixes.pop()


def _rank(local: str, rank: int) -> Callable[[Process], None]:
    def work(parent: Process) -> None:
        import forebay

        claim = forebay.claim(local, f"s3://bench{local}", forebay.World(1, 2, 1, rank), "killed")
        claim.array("epoch", 1 << 17, "int64")
        claim.barrier("start").wait(2)
        if os.fork():  # as a DataLoader's worker
            parent.tell(claim.prefix)
        signal.pause()

    return work


def remove_streamings(prefix: int) -> None:
    """What a killed job of Streaming's left, and nobody will remove."""
    from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN

    for name in SHM_TO_CLEAN:
        (SHM / f"{prefix:06}_{name}").unlink(missing_ok=True)
    for name in (BARRIER_FILELOCK, CACHE_FILELOCK):
        (Path(tempfile.gettempdir()) / f"{prefix:06}_{name}").unlink(missing_ok=True)


# -- barriers ----------------------------------------------------------------------------------------------------------


@dataclass
class Barrier:
    """A way to wait for each other. ``join``: for one rank of so many, gives the call that crosses it once."""

    kind: str
    join: Callable[[str, int, int], Callable[[], object]]


def _ours(name: str, rank: int, parties: int) -> Callable[[], object]:
    import forebay

    world = forebay.World(1, parties, 1, rank)
    barrier = forebay.claim(f"/nowhere/{name}", None, world, name).barrier("bench")
    return lambda: barrier.wait(parties)


def _streamings(name: str, rank: int, parties: int) -> Callable[[], object]:
    from streaming.base.shared import SharedBarrier

    barrier = SharedBarrier(os.path.join(tempfile.gettempdir(), f"{name}_lock"), name)
    return lambda: barrier(parties)


def of_python(parties: int) -> Barrier:
    """The one of `multiprocessing`: it knows nobody, so nobody's death; made before the processes are."""
    barrier = multiprocessing.get_context("fork").Barrier(parties)
    return Barrier(FLOOR, lambda name, rank, parties: barrier.wait)


def barriers() -> dict[str, Barrier]:
    return {"Forebay": Barrier(OURS, _ours), STREAMING: Barrier(PEER, _streamings)}


@contextlib.contextmanager
def meeting(way: Barrier, parties: int, work: Callable[[Process, int, Callable[[], object]], object]) -> Iterator[list[Process]]:
    """So many processes of one job, rank 0 first. Each runs ``work`` with its number and what crosses the barrier."""
    name = f"forebay-bench-{os.getpid()}-{time.monotonic_ns()}"

    def run(rank: int) -> Callable[[Process], None]:
        def begin(parent: Process) -> None:
            cross = way.join(name, rank, parties)
            parent.tell("here")
            parent.hear()  # Streaming's begins anew whenever somebody joins
            work(parent, rank, cross)

        return begin

    born: list[Process] = []
    try:
        for rank in range(parties):
            born.append(Process(run(rank)))
            assert born[-1].hear() == "here"
        for process in born:
            process.tell("go")
        yield born
    finally:
        for process in born:
            process.kill()
        (SHM / name).unlink(missing_ok=True)
        Path(tempfile.gettempdir(), f"{name}_lock").unlink(missing_ok=True)
