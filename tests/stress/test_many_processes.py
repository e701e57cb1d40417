"""Many processes at one root: opened at one instant, one budget for all, an exact number of entries, finalizers that never block."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay._engine.catalog import processes as owner_rows
from forebay._engine.store import Settings, Store
from tests import parts
from tests.harness import KiB, MiB, assert_counted, assert_settled, audit, bytes_of, data_usage, opened
from tests.processes import HANG, Child, Gate, in_child

fork_context = multiprocessing.get_context("fork")


# -- s18 ---------------------------------------------------------------------------------------------------------------


def open_at_once(place: Path, children: Callable[..., Child], processes: int, calls: int) -> None:
    start = fork_context.Barrier(processes)

    def work(number: int) -> int:
        chance = random.Random(number)
        start.wait(HANG)
        with opened(place, 64 * MiB) as store:
            for call in range(calls):
                key = f"k{chance.randrange(200)}"
                if call % 2:
                    store.put("v", key, f"{key} ".encode() * (30 if chance.random() < 0.9 else 3000))
                elif (found := bytes_of(store, key)) is not None:
                    assert found in (f"{key} ".encode() * 30, f"{key} ".encode() * 3000)
        return os.getpid()

    children = [children(lambda n=n: work(n)) for n in range(processes)]
    assert len({child.result() for child in children}) == processes

    def look() -> None:
        with opened(place) as store:
            assert store.check(deep=True) == []
            store.put("v", "next", b"1")
            owners = store.engine.owners
            living = [owner.pid for owner in owner_rows.every(store.engine.catalog) if not owners.is_dead(owner.id)]
            assert living in ([], [os.getpid()])  # no process is left behind
            assert store.engine.counters.living() == []

    in_child(look)
    assert_settled(place, 64 * MiB)


@pytest.mark.rotates
@pytest.mark.parametrize("round", range(2))
def test_s18_64_processes_open_one_new_root(quick_path: Path, children: Callable[..., Child], round: int) -> None:
    open_at_once(quick_path / "root", children, 64, 100)


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_s18_50_times(tmp_path: Path, children: Callable[..., Child]) -> None:
    for round in range(parts.share(50)):
        open_at_once(tmp_path / f"root-{round}", children, 64, 100)


# -- s05 ---------------------------------------------------------------------------------------------------------------


def test_s05_one_budget_for_all_processes(quick_path: Path, children: Callable[..., Child]) -> None:
    """Eight processes that each say 2 MiB have 2 MiB together."""
    place, budget = quick_path / "root", 2 * MiB

    def rank(number: int) -> None:
        with opened(place, budget) as store:
            for n in range(30):
                store.put("v", f"{number}-{n}", bytes(100 * KiB + n))

    for child in [children(lambda n=n: rank(n)) for n in range(8)]:
        child.result()
    found = assert_settled(place, budget)
    assert found.counted > budget * 0.8
    assert data_usage(place) <= budget


def test_s05_openers_that_disagree(quick_path: Path, children: Callable[..., Child], caplog: pytest.LogCaptureFixture) -> None:
    """The last setter wins, for everybody, at once; both values are logged."""
    place = quick_path / "root"
    said, go = Gate(), Gate()

    def first() -> list[int]:
        with opened(place, 4 * MiB) as store:
            for n in range(30):
                store.put("v", f"k{n}", bytes(100 * KiB))
            said.open()
            go.wait()
            with pytest.raises(errors.NoSpace):
                store.put("v", "large", bytes(2 * MiB))
            return [store.usage().used, store.usage().budget]

    child = children(first)
    said.wait()
    with caplog.at_level(logging.WARNING, "forebay"), opened(place, MiB) as store:
        assert audit_of(store) <= MiB
        go.open()
        used, budget = child.result()
        assert used <= budget == MiB
        assert store.check(deep=True) == []
    assert any(f"{4 * MiB:,} -> {MiB:,}" in record.getMessage() for record in caplog.records)
    said.close()
    go.close()


def audit_of(store: Store) -> int:
    found = store.usage()
    return found.used + found.reserved


# -- s34 ---------------------------------------------------------------------------------------------------------------


def test_s34_a_lower_budget_binds_what_is_there(quick_path: Path) -> None:
    place = quick_path / "root"

    def fill() -> None:
        with opened(place, 8 * MiB) as store:
            for n in range(60):
                store.put("v", f"k{n}", bytes(100 * KiB))

    def lower() -> int:
        with opened(place, 2 * MiB) as store:
            assert store.check(deep=True) == []
            return len(store.entries())

    in_child(fill)
    assert in_child(lower) == 20
    assert assert_settled(place, 2 * MiB).disk <= 2 * MiB


def test_s34_leases_keep_it_above_a_lower_budget(quick_path: Path) -> None:
    """Nothing is admitted until it is met; then all is as usual."""
    place = quick_path / "root"
    with opened(place, 4 * MiB) as store:
        for n in range(30):
            store.put("v", f"k{n}", bytes(100 * KiB))
        leases = [store.lease("v", f"k{n}") for n in range(20)]
        store.configure(Settings(budget=MiB))
        assert len(store.entries()) == 20
        for size in (10, 100 * KiB):
            with pytest.raises(errors.NoSpace):
                store.put("v", "new", bytes(size))
        assert all(lease is not None and Path(lease).exists() for lease in leases)
        for lease in leases[:15]:
            assert lease is not None
            lease.close()
        store.put("v", "new", bytes(100 * KiB))
        assert store.usage().used <= MiB
        assert store.check(deep=True) == []
        del leases, lease
    in_child(lambda: brim(place, MiB))
    assert_settled(place, MiB)


def brim(place: Path, budget: int) -> None:
    with opened(place) as store:
        store.put("v", "brim", bytes(budget))
        assert store.check(deep=True) == []


def test_s34_orphans_of_a_deleted_index(quick_path: Path) -> None:
    """Files that no row names any more are removed; one that somebody has a lease on stays until he lets it go."""
    place = quick_path / "root"

    def fill() -> None:
        with opened(place, 8 * MiB) as store:
            for n in range(40):
                store.put("v", f"k{n}", bytes(100 * KiB))

    def reopen() -> None:
        with opened(place, 2 * MiB) as store:
            store.put("v", "new", bytes(MiB))
            assert store.check(deep=True) == []

    in_child(fill)
    assert audit(place).disk >= 4 * MiB - 200 * KiB
    (place / "catalog.sqlite").unlink()
    in_child(reopen)
    assert assert_settled(place, 2 * MiB).entries == 1


# -- s38 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("size", [100, 20 * KiB], ids=["values", "blobs"])
def test_s38_max_entries_is_exact_under_8_writers(quick_path: Path, children: Callable[..., Child], size: int) -> None:
    place, most = quick_path / "root", 100

    def write(number: int) -> int:
        seen = 0
        with opened(place, 64 * MiB, max_entries=most) as store:
            for n in range(60):
                store.put("v", f"{number}-{n}", bytes(size))
                seen = max(seen, len(store.entries()))
        return seen

    seen = [child.result() for child in [children(lambda n=n: write(n)) for n in range(8)]]
    assert max(seen) == most
    assert assert_settled(place, 64 * MiB).entries == most


# -- s30 ---------------------------------------------------------------------------------------------------------------


def collect_all_the_time(place: Path, seconds: float) -> None:
    threshold = gc.get_threshold()
    stop = threading.Event()
    faults: list[BaseException] = []

    def work(store: Store, seed: int) -> None:
        chance = random.Random(seed)
        try:
            while not stop.is_set():
                key = f"k{chance.randrange(20)}"
                lease = store.lease("v", key)
                knot: list[Any] = [lease]
                knot.append(knot)  # only the collector can free it
                if chance.random() < 0.2:
                    store.put("v", key, bytes(60 * KiB))
                del lease, knot
        except errors.NoSpace:
            stop.wait(0.01)
        except BaseException as error:
            faults.append(error)
            raise

    with opened(place, MiB) as store:
        for n in range(20):
            store.put("v", f"k{n}", bytes(50 * KiB))
        gc.set_threshold(1)
        try:
            threads = [threading.Thread(target=work, args=(store, n)) for n in range(6)]
            for thread in threads:
                thread.start()
            stop.wait(seconds)
            stop.set()
            for thread in threads:
                thread.join(HANG)
            assert not any(thread.is_alive() for thread in threads)
        finally:
            gc.set_threshold(*threshold)
        assert faults == []
        gc.collect()
        assert store.check(deep=True) == []
        store.put("v", "brim", bytes(MiB))  # no lease was left behind
        assert [entry.key for entry in store.entries()] == ["brim"]


@pytest.mark.rotates
def test_s30_finalizers_never_block(quick_path: Path) -> None:
    in_child(lambda: collect_all_the_time(quick_path / "root", 3))
    assert_settled(quick_path / "root", MiB)


@pytest.mark.stress
@pytest.mark.timeout(300)
def test_s30_finalizers_never_block_for_a_minute(quick_path: Path) -> None:
    collect_all_the_time(quick_path / "root", parts.share(60))


# -- s02 ---------------------------------------------------------------------------------------------------------------


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
            assert sorted(entry.key for entry in store.entries() if not entry.key.startswith("brim")) == [f"kept{n}" for n in range(kept)]
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
    child.signal(signal.SIGSTOP)
    in_child(quick)
    found = assert_counted(place, budget)
    assert found.promised > 2 * MiB
    child.kill()
    in_child(lambda: brim(place, budget - 4096))
    assert_settled(place, budget)
    said.close()
