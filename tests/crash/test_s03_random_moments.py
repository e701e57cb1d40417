"""SQLite's own steps: writers are killed at random moments, inside commits and checkpoints too. What was acknowledged is there."""

from __future__ import annotations

import mmap
import os
import random
import signal
import struct
import time
from pathlib import Path

from forebay._engine.store import Store
from tests import parts
from tests.crash.conftest import victim_of
from tests.harness import KiB, assert_counted, bytes_of, opened
from tests.processes import Line, in_child, talk_to

WRITERS = 12
ROUNDS = 44  # 528 kills; `make test` does a fifth of them each day
BUDGET = 32 << 20


def body_of(writer: int, turn: int, number: int) -> bytes:
    """What a writer puts under its ``turn``-th key: small values and blobs, and its number in it."""
    size = 20 * KiB + turn if turn % 4 == 3 else 300 + 40 * turn
    return struct.pack("<QQQ", writer, turn, number) * (size // 24 + 1)


def write_for_ever(place: Path, writer: int, acknowledged: mmap.mmap, line: Line) -> None:
    with opened(place) as store:
        line.say()
        number = struct.unpack_from("<Q", acknowledged, writer * 64)[0]
        while True:
            for turn in range(6):
                number += 1
                store.put("v", f"{writer}-{turn}", body_of(writer, turn, number))
                struct.pack_into("<Q", acknowledged, writer * 64 + 8 + turn * 8, number)
                struct.pack_into("<Q", acknowledged, writer * 64, number)
            if number % 5 == 0:
                remove_some(store, writer)


def remove_some(store: Store, writer: int) -> None:
    gone = [entry for entry in store.seeing.entries("v") if entry.key == f"{writer}-extra"]
    store.remove([victim_of(entry) for entry in gone])
    store.put("v", f"{writer}-extra", b"extra" * 100)


def number_of(data: bytes | None, writer: int, turn: int) -> int:
    """The number in a value, every byte of which must be right."""
    if data is None:
        return 0
    number = int(struct.unpack_from("<QQQ", data)[2])
    assert data == body_of(writer, turn, number)
    return number


def look(place: Path, acknowledged: mmap.mmap) -> None:
    with opened(place) as store:
        assert store.check(deep=True) == []
        for writer in range(WRITERS):
            for turn in range(6):
                least = struct.unpack_from("<Q", acknowledged, writer * 64 + 8 + turn * 8)[0]
                found = number_of(bytes_of(store, f"{writer}-{turn}"), writer, turn)
                assert found >= least, f"{writer}-{turn}: {least} was acknowledged, and {found} is there"
        store.put("v", "next", b"written once")
        assert store.check() == []


def test_s03_writers_killed_at_500_random_moments(quick_path: Path) -> None:
    place, acknowledged, chance = quick_path / "root", mmap.mmap(-1, 4096), random.Random()

    def create() -> None:
        with opened(place, BUDGET) as store:
            store.spaces.ensure("v")

    in_child(create)
    kills = 0
    for _ in range(parts.share(ROUNDS)):
        children = [talk_to(lambda line, n=n: write_for_ever(place, n, acknowledged, line)) for n in range(WRITERS)]  # type: ignore[misc]
        for child in children:
            child.hear()
        for child in chance.sample(children, WRITERS):
            time.sleep(chance.expovariate(1 / 0.012))
            os.kill(child.pid, signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
            child.close()
            kills += 1
        in_child(lambda: look(place, acknowledged))
    assert kills >= parts.share(500)
    assert struct.unpack_from("<Q", acknowledged, 0)[0] > 20
    assert_counted(place, BUDGET)
