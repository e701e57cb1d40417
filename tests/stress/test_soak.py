"""Hours of work in minutes: what a process has of memory, mappings and descriptors after its first minute is what it has at the end."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import time
from pathlib import Path
from typing import NamedTuple

import pytest

import forebay
from forebay import errors
from forebay._engine.files.layout import LEASE_FILES
from forebay.testing import ScriptedServer
from tests import parts
from tests.fronts import Fronts
from tests.harness import MiB
from tests.processes import fork
from tests.servers.counting import Shelf

KEYS, SLOTS, PROCESSES, BUDGET = 30, 200, 4, 48 * MiB
WARM, SECONDS = 60, 15 * 60
NOISE = 12 * MiB
"""By so much the heap of a process grows and shrinks over a quarter of an hour (-1 to 7 MB were seen), without one object more. In that
time it puts and drops half a million values: 25 bytes that are kept of each would be more."""


class Held(NamedTuple):
    """By one process. ``memory``: bytes that are no file's. With what it shares with the process that forked it: else each page that is
    written to for the first time would count as new."""

    memory: int
    maps: int
    descriptors: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
        memory = sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))
        return cls(memory, len(Path("/proc/self/maps").read_text().splitlines()), len(os.listdir("/proc/self/fd")))


def work(it: Fronts, seconds: float) -> tuple[Held, Held]:
    chance, done = random.Random(os.urandom(8)), 0
    with forebay.Cache(it.place, budget=BUDGET, min_free=0) as cache:
        acts = it.acts(cache)

        def live(until: float) -> None:
            nonlocal done
            while time.monotonic() < until:
                with contextlib.suppress(errors.CacheFault):  # no room beside what the others have in use
                    chance.choice(acts)(chance.randrange(KEYS))
                for _ in range(50):  # new entries, each read twice
                    key = f"{os.getpid()} {done}"
                    cache.put(key, bytes(done % 5000))
                    cache.get(key)
                    cache.get(key)
                    done += 1

        began = time.monotonic()
        live(began + WARM)
        before = Held.now()
        live(began + WARM + seconds)
        return before, Held.now()


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_a_process_grows_no_more_after_its_first_minute(server: ScriptedServer, shelf: Shelf, tmp_path: Path) -> None:
    it = Fronts(tmp_path / "root", server, shelf, keys=KEYS, slots=SLOTS)
    seconds = parts.share(SECONDS)
    children = [fork(lambda: work(it, seconds)) for _ in range(PROCESSES)]
    for child in children:
        before, after = child.result(WARM + seconds + 120)
        child.close()
        assert after.memory - before.memory < NOISE
        assert after.maps - before.maps < 100
        assert after.descriptors < 2 * LEASE_FILES + 50  # of locks on leases, for those that hold and those that evict
