"""Sixteen processes write, read, evict and call under a budget of 20 values; every value that anybody sees is checked."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from tests import parts
from tests.processes import Child, fork

WORKERS, TAGS, VALUES = 16, 60, 20
SMALL, LARGE = 2_000, 60_000  # a row of the catalog; a file


def value_of(tag: str, stamp: int, size: int) -> dict[str, Any]:
    """One that says whose it is, all over."""
    return {"tag": tag, "stamp": stamp, "array": np.frombuffer(random.Random(f"{tag} {stamp}").randbytes(size), np.uint8)}


def check(tag: str, value: dict[str, Any]) -> None:
    array = value["array"]
    assert value["tag"] == tag
    assert array.size in (SMALL, LARGE)
    assert bytes(array) == random.Random(f"{tag} {value['stamp']}").randbytes(array.size)


def made(tag: str, stamp: int) -> dict[str, Any]:
    return value_of(tag, stamp, SMALL if stamp % 3 else LARGE)


class Worker:
    """One process. ``did`` counts what went well; what may not happen raises."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance, self.did = random.Random(seed), Counter[str]()
        self.cache = forebay.Cache(root)
        self.tasks = self.cache.tasks("t")
        self.call = self.tasks.cached(tag="called-{tag}")(made)
        self.kept: list[tuple[str, dict[str, Any]]] = []
        self.acts = [self.read, self.read, self.read, self.write, self.write, self.evict, self.calls, self.calls, self.look, self.flush]

    def run(self, stop: Path) -> Counter[str]:
        while not stop.exists():
            act = self.chance.choice(self.acts)
            act(f"tag-{self.chance.randrange(TAGS)}")
            self.did[act.__name__] += 1
            if len(self.kept) > 8:
                check(*self.kept.pop(0))  # what was handed out stays good, whatever became of the entry
        stats = self.tasks.stats()
        assert stats.damaged == 0
        self.cache.close()
        return self.did

    def read(self, tag: str) -> None:
        hit, value = self.tasks.read(tag)
        self.did["hits"] += hit
        if hit:
            check(tag, value)
            self.kept.append((tag, value))

    def write(self, tag: str) -> None:
        stamp = self.chance.getrandbits(40)
        self.did["kept" if self.tasks.write(tag, made(tag, stamp)) else "not kept"] += 1

    def evict(self, tag: str) -> None:
        self.did["evicted"] += self.tasks.evict(tag)

    def calls(self, tag: str) -> None:
        stamp = self.chance.randrange(4)
        value = self.call(tag, stamp)
        check(tag, value)
        assert value["stamp"] == stamp  # a tag alone never gives another call's output

    def look(self, tag: str) -> None:
        assert self.tasks.size_bytes() <= (self.tasks.budget or 0)
        keys = self.tasks.keys()
        assert len(keys) == len(set(keys))

    def flush(self, tag: str) -> None:
        if self.chance.random() < 0.02:
            self.tasks.flush()


def under_load(root: Path, seconds: float, *, kills: bool) -> None:
    with forebay.Cache(root, budget=32 << 20, min_free=0) as cache:
        cache.tasks("t", budget=VALUES * (LARGE + 300))
    stop, seeds = root.parent / "stop", iter(range(1_000_000))

    def start() -> Child:
        seed = next(seeds)
        return fork(lambda: Worker(root, seed).run(stop))

    children, did = [start() for _ in range(WORKERS)], Counter[str]()
    try:
        until, chance = time.monotonic() + seconds, random.Random(1)
        while time.monotonic() < until:
            time.sleep(0.2)
            if kills:
                victim = children.pop(chance.randrange(WORKERS))
                victim.kill()
                if victim._status != -signal.SIGKILL:
                    victim.result()
                children.append(start())
        stop.touch()
        for child in children:
            did += child.result()
    finally:
        for child in children:
            child.kill()
    print(dict(did))
    assert min(did[act] for act in ("read", "write", "evict", "calls", "look")) > WORKERS
    assert did["hits"] > 0
    assert did["kept"] > did["not kept"]
    with forebay.Cache(root) as cache:
        tasks = cache.tasks("t")
        assert cache.check(deep=True) == []
        keys = tasks.keys()
        for key in keys:
            hit, value = tasks.read(key)
            assert hit
            check(key.rpartition("called-")[2], value)
        assert tasks.write("last", 1)
        assert kills or cache.stats().bytes_reserved == 0  # what the dead were promised goes when it is needed
        assert tasks.size_bytes() <= VALUES * (LARGE + 300)


@pytest.mark.rotates
@pytest.mark.parametrize("kills", [False, True], ids=["nobody dies", "killed"])
def test_every_value_is_whole_for_seconds(quick_path: Path, kills: bool) -> None:
    under_load(quick_path / "root", 3, kills=kills)


@pytest.mark.stress
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [False, True], ids=["nobody dies", "killed"])
def test_every_value_is_whole_for_a_minute(tmp_path: Path, kills: bool) -> None:
    under_load(tmp_path / "root", parts.share(60), kills=kills)
