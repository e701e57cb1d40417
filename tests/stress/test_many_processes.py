"""Processes that lease, and that are stopped in the middle of a write, beside others that need the space."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import errors
from tests.harness import KiB, MiB, assert_counted, assert_settled, opened
from tests.processes import Child, Gate, in_child


def brim(place: Path, budget: int) -> None:
    with opened(place) as store:
        store.put("v", "brim", bytes(budget))
        assert store.check(deep=True) == []


def test_s02_leases_against_eviction(quick_path: Path, children: Callable[..., Child]) -> None:
    """Readers lease and read while writers put three times the budget; then a reader is killed, and what it held is evictable."""
    place, budget = quick_path / "root", 2 * MiB
    said, go = Gate(), Gate()

    def reader(number: int) -> None:
        with opened(place) as store:
            lease = store.lease("v", f"kept{number}")
            assert lease is not None
            said.open()
            for _ in range(200):
                assert Path(lease).read_bytes() == bytes([number]) * 100 * KiB
            go.wait()
            assert Path(lease).read_bytes() == bytes([number]) * 100 * KiB
            said.open()
            signal.pause()

    def writer(number: int) -> None:
        with opened(place) as store:
            for n in range(20):
                store.put("v", f"{number}-{n}", os.urandom(90 * KiB))

    def set_up() -> None:
        with opened(place, budget) as store:
            for number in range(4):
                store.put("v", f"kept{number}", bytes([number]) * 100 * KiB)

    def look(kept: int) -> None:
        with opened(place) as store:
            store.put("v", f"brim{kept}", bytes(budget - kept * 100 * KiB - 4096))
            assert sorted(entry.key for entry in store.seeing.entries() if not entry.key.startswith("brim")) == [
                f"kept{n}" for n in range(kept)
            ]
            assert store.check(deep=True) == []

    in_child(set_up)
    readers = [children(lambda n=n: reader(n)) for n in range(4)]
    for _ in readers:
        said.wait()
    for child in [children(lambda n=n: writer(n)) for n in range(4)]:
        child.result()
    for _ in readers:
        go.open()
    for _ in readers:
        said.wait()
    for kept in (3, 2, 1, 0):
        readers[kept].kill()
        in_child(lambda kept=kept: look(kept))
    assert_counted(place, budget)
    said.close()
    go.close()


def test_s04_a_pause_between_samples_is_no_gap(quick_path: Path, children: Callable[..., Child]) -> None:
    """A writer that is stopped in the middle of a write holds what it reserved: others stay within what is left."""
    place, budget = quick_path / "root", 4 * MiB
    said = Gate()

    def slow() -> None:
        from forebay._model import ObjectInfo

        with opened(place, budget) as store:
            with store.writing("v", "slow", resume=False) as writing:
                writing.begin(ObjectInfo("", 2 * MiB))
                writing.write(0, bytes(MiB))
                said.open()
                signal.pause()

    def quick() -> None:
        with opened(place) as store:
            for n in range(60):
                store.put("v", f"k{n}", bytes(100 * KiB))
            with pytest.raises(errors.NoSpace):
                store.put("v", "large", bytes(2 * MiB))

    child = children(slow)
    said.wait()
    child.stop()
    in_child(quick)
    found = assert_counted(place, budget)
    assert found.promised > 2 * MiB
    child.kill()
    in_child(lambda: brim(place, budget - 4096))
    assert_settled(place, budget)
    said.close()
