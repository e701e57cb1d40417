"""A source for tests of prefetchers: it counts what is read, over all processes, and stands still or raises where it is told."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

HANG = 60.0
"""Seconds after which something is taken to hang: a guard, not a measure."""


def body(key: str, size: int = 2000) -> bytes:
    """What an item has: other bytes for each key."""
    return random.Random(key.encode("utf-8", "surrogatepass")).randbytes(size)


class Items:
    """Items of ``size`` bytes under whatever key. ``reads``: the keys that this process read, in order; ``threads``: which threads did.
    ``journal``: a file that notes the reads of all processes. ``begun`` is told of each read that begins."""

    def __init__(self, size: int = 2000, *, uri: str = "test://items", version: str | None = "1", journal: Path | None = None) -> None:
        self.uri, self.version, self.length, self.journal = uri, version, size, journal
        self.sizes: dict[str, int] = {}
        self.faults: dict[str, BaseException] = {}
        self.delay = 0.0
        self.reads: list[str] = []
        self.threads: list[str] = []
        self.at_once = self.most_at_once = 0
        self.on_read: Callable[[str], None] | None = None
        self._gates: dict[str, threading.Event] = {}
        self._begun = threading.Condition()

    def __getitem__(self, key: str) -> bytes:
        with self._begun:
            self.reads.append(key)
            self.threads.append(threading.current_thread().name)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            self._begun.notify_all()
        if self.journal is not None:
            with open(self.journal, "ab", buffering=0) as file:
                file.write(f"{key}\n".encode())
        try:
            return self._give(key)
        finally:
            with self._begun:
                self.at_once -= 1

    def _give(self, key: str) -> bytes:
        if self.on_read is not None:
            self.on_read(key)
        gate = self._gates.get(key)
        if gate is not None:
            assert gate.wait(HANG), f"nobody let the read of {key} go"
        if self.delay:
            time.sleep(self.delay)
        if key in self.faults:
            raise self.faults[key]
        return self.body(key)

    def __getstate__(self) -> dict[str, Any]:
        left = {"_gates", "_begun", "on_read"}
        return {name: value for name, value in vars(self).items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _gates={}, _begun=threading.Condition(), on_read=None, reads=[], threads=[])

    def body(self, key: str) -> bytes:
        return body(key, self.sizes.get(key, self.length))

    def stop(self, *keys: str) -> None:
        """The reads of these stand still until `go`."""
        for key in keys:
            self._gates[key] = threading.Event()

    def go(self, *keys: str) -> None:
        """Let these go on; all, if none is named."""
        for key in keys or tuple(self._gates):
            self._gates[key].set()

    def wait(self, key: str, times: int = 1) -> None:
        """Until a read of this began, so many times."""
        with self._begun:
            assert self._begun.wait_for(lambda: self.reads.count(key) >= times, HANG), f"nobody reads {key}: {self.reads}"

    def all_reads(self) -> Counter[str]:
        """How often each key was read, by any process."""
        assert self.journal is not None
        return Counter(self.journal.read_text().split()) if self.journal.exists() else Counter()


class Sized(Items):
    """One that tells how large its items are before they are read."""

    def size(self, key: str) -> int | None:
        return self.sizes.get(key, self.length)


def until(is_so: Callable[[], bool], what: str = "what was awaited") -> None:
    """Look until something is so. For what happens in threads of its own: nothing is measured by it."""
    deadline = time.monotonic() + HANG
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come"
        time.sleep(0.002)


def threads_named(beginning: str) -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(beginning)]


def files_below(place: Path) -> set[str]:
    return {os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names}


class Ring:
    """Something that only the collector finds."""

    def __init__(self, held: object) -> None:
        self.held, self.me = held, self


def drop_lazies(pool: Any, keys: int, key: Callable[[int], str], expected: Callable[[str], bytes], seconds: float) -> list[int]:
    """By six threads, lazies of random items are asked for and dropped, some of them inside the collector, while others are read, and
    objects spilled. Returns how many each thread dropped, once all have ended without an error."""
    dropped = [0] * 6

    def drops(number: int, chance: random.Random) -> None:
        lazies = [pool.get_lazy(key(chance.randrange(keys))) for _ in range(20)]
        for lazy in lazies[:5]:
            Ring(lazy)
        if number % 2:
            assert lazies[-1].get() == expected(lazies[-1].key)
            pool.put(number)
        if chance.random() < 0.3:
            time.sleep(chance.random() * 0.003)
        dropped[number] += len(lazies)

    by_threads(drops, len(dropped), seconds)
    return dropped


def by_threads(work: Callable[[int, random.Random], object], count: int, seconds: float) -> None:
    """So many threads do it again and again for so long, each with its number and its own chance, and end without an error."""
    over, faults = time.monotonic() + seconds, list[BaseException]()

    def run(number: int) -> None:
        chance = random.Random(number)
        try:
            while time.monotonic() < over:
                work(number, chance)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds + 60)
    assert not any(thread.is_alive() for thread in threads)
    if faults:
        raise faults[0]
    gc.collect()
