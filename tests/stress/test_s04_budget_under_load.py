"""Eight processes get, put, lease, evict and crash at random under a small budget; a sampler stops them all and looks at the disk."""

from __future__ import annotations

import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine.leases import Lease
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._model import ObjectInfo, Victim
from tests import parts
from tests.harness import KiB, MiB, assert_counted, assert_settled, bytes_of, data_usage, opened
from tests.processes import Child, fork, in_child

BUDGET = 6 * MiB
WORKERS = 8
KEYS = 60
EVERY = 0.1
SIZES = [10, 500, 5 * KiB, 16 * KiB, 20 * KiB, 90 * KiB, 300 * KiB, MiB + 5000, 2 * MiB]


def body_of(key: int, size: int, stamp: int) -> bytes:
    """Bytes that say whose they are, all over."""
    return (struct.pack("<QQQ", key, size, stamp) * (size // 24 + 1))[:size] if size >= 24 else bytes([key]) * size


def is_whole(key: int, data: bytes) -> bool:
    if len(data) < 24:
        return data == bytes([key]) * len(data)
    return data == body_of(key, len(data), struct.unpack_from("<QQQ", data)[2])


class Worker:
    """One process. ``did`` counts what went well; what may not happen raises."""

    def __init__(self, store: Store, chance: random.Random, crashes: bool) -> None:
        self.store, self.chance, self.crashes = store, chance, crashes
        self.leases: list[tuple[int, Lease]] = []
        self.did: Counter[str] = Counter()
        self.acts: list[Callable[[int], None]] = [self.get, self.get, self.get, self.put, self.put, self.lease, self.fetch, self.remove]

    def run(self, stop: Path) -> Counter[str]:
        while not stop.exists():
            act = self.chance.choice(self.acts)
            if self.crashes and self.chance.random() < 0.004:
                self.crash_soon()
            try:
                act(self.chance.randrange(KEYS))
                self.did[act.__name__] += 1
            except errors.NoSpace:
                self.did["no space"] += 1
            if len(self.leases) > 4:
                self.let_go()
        while self.leases:
            self.let_go()
        return self.did

    def crash_soon(self) -> None:
        left = [self.chance.randrange(12)]

        def hook(call: str, subject: str) -> None:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

        host.on_step(hook)

    def get(self, key: int) -> None:
        found = self.store.view("v", f"k{key}")
        if found is not None:
            self.store.touch(found.entry)
            assert is_whole(key, bytes(found.view))
            self.did["hit"] += 1

    def put(self, key: int) -> None:
        self.store.put("v", f"k{key}", body_of(key, self.chance.choice(SIZES), self.chance.getrandbits(60)))

    def lease(self, key: int) -> None:
        lease = self.store.lease("v", f"k{key}")
        if lease is not None:
            self.leases.append((key, lease))

    def let_go(self) -> None:
        key, lease = self.leases.pop(0)
        assert is_whole(key, Path(lease).read_bytes())
        lease.close()

    def fetch(self, key: int) -> None:
        """As a remote does it: under the key's lock, in parts, sometimes of unknown length, sometimes given up."""
        hold = self.store.locks.hold("v", f"k{key}")
        try:
            data = body_of(key, self.chance.choice(SIZES), 7)
            size = None if self.chance.random() < 0.3 else len(data)
            with self.store.writing("v", f"k{key}") as writing:
                for span in writing.begin(ObjectInfo("", size, f'"{len(data)}"', strong=True)):
                    end = len(data) if span.length < 0 else span.end
                    for at in range(span.start, end, 256 * KiB):
                        writing.write(at, data[at : min(at + 256 * KiB, end)])
                        if self.chance.random() < 0.02:
                            return
                writing.publish(validator=f'"{len(data)}"')
        finally:
            hold.release()

    def remove(self, key: int) -> None:
        found = [e for e in self.store.seeing.entries("v") if e.key == f"k{key}"]
        self.store.remove([Victim(e.name, e.size, e.charge, e.used, e.id) for e in found])


class Herd:
    """The workers, as the sampler sees them: each is started again when it dies."""

    def __init__(self, place: Path, stop: Path, *, crashes: bool = True) -> None:
        self.place, self.stop, self.crashes = place, stop, crashes
        self.deaths = 0
        self.seed = 0
        self.children = [self.start() for _ in range(WORKERS)]

    def start(self) -> Child:
        self.seed += 1
        return fork(lambda seed=self.seed: self.work(seed))  # type: ignore[misc]

    def work(self, seed: int) -> Counter[str]:
        with opened(self.place, BUDGET) as store:
            return Worker(store, random.Random(seed), self.crashes).run(self.stop)

    def pause(self) -> None:
        """Until every one stands still; who died is replaced by one that stands still too."""
        for number, child in enumerate(self.children):
            os.kill(child.pid, signal.SIGSTOP)
            while not os.WIFSTOPPED(status := os.waitpid(child.pid, os.WUNTRACED)[1]):
                child._status = os.waitstatus_to_exitcode(status)
                if child._status != -signal.SIGKILL:
                    child.result()
                child.wait()
                self.deaths += 1
                child = self.children[number] = self.start()
                os.kill(child.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        for child in self.children:
            os.kill(child.pid, signal.SIGCONT)

    def end(self) -> Counter[str]:
        self.stop.touch()
        did: Counter[str] = Counter()
        for child in self.children:
            if child.wait() != -signal.SIGKILL:
                did += child.result()
        return did

    def kill(self) -> None:
        for child in self.children:
            child.kill()


def under_load(place: Path, seconds: float) -> None:
    in_child(lambda: set_up(place))
    herd = Herd(place, place.parent / "stop")
    samples: list[int] = []
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(EVERY)
            herd.pause()
            samples.append(data_usage(place))
            herd.go_on()
            assert samples[-1] <= BUDGET, f"{samples[-1]} bytes of {BUDGET}, after {len(samples)} looks"
        did = herd.end()
    finally:
        herd.kill()
    assert max(samples) > BUDGET * 0.5  # it was full
    assert did["put"] > 20
    assert did["hit"] > 0  # how many depends on the machine
    in_child(lambda: look(place))
    in_child(lambda: brim(place))
    assert_settled(place, BUDGET)


def set_up(place: Path) -> None:
    with opened(place, BUDGET) as store:
        store.spaces.ensure("v")


def look(place: Path) -> None:
    """After the next write nothing is left that is not counted, and every key is whole or a miss."""
    with opened(place) as store:
        assert store.check(deep=True) == []
        for key in range(KEYS):
            found = bytes_of(store, f"k{key}")
            assert found is None or is_whole(key, found)
        store.put("v", "next", b"written once")
        assert store.check() == []


def brim(place: Path) -> None:
    assert assert_counted(place, BUDGET).leaving == 0
    with opened(place) as store:
        store.put("v", "brim", bytes(BUDGET - 4096))


@pytest.mark.rotates
def test_s04_the_budget_holds_for_8_seconds(quick_path: Path) -> None:
    under_load(quick_path / "root", 8)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_s04_the_budget_holds_for_a_minute(tmp_path: Path) -> None:
    under_load(tmp_path / "root", parts.share(60))
