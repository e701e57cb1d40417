"""The scenarios of prefetchers, by their numbers, with real processes."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests import parts
from tests.harness import fill_the_disk, usage
from tests.items import Items, Sized, body, drop_lazies, files_below, until

MiB = 1 << 20
KEYS = [f"k{i}" for i in range(60)]
SOON = 20.0
"""Seconds for what must happen at once: a guard against waiting for the dead, on a busy machine."""
Start = Callable[..., Any]


def items_of(root: Path, **how: Any) -> Items:
    """A source that all processes of a test share the journal of."""
    return Items(journal=root.parent / "journal", **how)


def brim(cache: forebay.Cache) -> None:
    """What nobody holds gives way to what needs the room: all of it, also what the dead had reserved."""
    assert cache.put("brim", bytes(cache.budget - 65_536))
    assert cache.stats().bytes_reserved == 0
    assert cache.evict("values:brim").removed


# -- 1: a killed run leaves nothing that hinders the next --------------------------------------------------------------


def test_s01_killed_with_eight_loads_in_flight(root: Path, children: Start, flag: Callable[[], Any]) -> None:
    """Another process takes over at once, and nothing leaks."""
    source, flying = items_of(root, size=300_000), flag()

    def dies() -> None:
        source.stop(*KEYS)
        with forebay.Cache(root) as cache, cache.prefetcher(source, workers=8) as pool:
            held = [pool.get_lazy(key) for key in KEYS[:20]]
            until(lambda: source.at_once == 8)
            flying.set()
            held[0].get()

    with forebay.Cache(root, budget=20 * MiB, min_free=0) as cache, cache.prefetcher(source) as pool:
        child = children(dies)
        assert flying.wait(60)
        lazies = [pool.get_lazy(key) for key in KEYS[:20]]
        until(lambda: all(lazy.done for lazy in lazies[8:]), "what the other one is not at")
        assert not any(lazy.done for lazy in lazies[:8])
        child.kill()
        began = time.monotonic()
        assert [lazy.get() for lazy in lazies] == [body(key, 300_000) for key in KEYS[:20]]
        assert time.monotonic() - began < SOON
        assert source.all_reads() == dict.fromkeys(KEYS[:20], 1) | dict.fromkeys(KEYS[:8], 2)
        pool.close()
        assert pool.count == 20
        lazies.clear()
        brim(cache)
        assert pool.count == 0
    assert usage(root / "blobs", root / "tmp") == 0


@pytest.mark.rotates
@pytest.mark.parametrize("cycles", [4, pytest.param(20, marks=pytest.mark.stress)])
def test_s01_killed_and_started_again(cycles: int, root: Path, tmp_path: Path, children: Start) -> None:
    """Eight processes, killed at any moment and started again at once: each time it works at once, and nothing grows."""
    source = items_of(root, size=20_000)
    source.delay = 0.002
    forebay.Cache(root, budget=4 * MiB, min_free=0).close()
    ready = multiprocessing.get_context("fork").Semaphore(0)

    def rank(seed: int) -> None:
        order = random.Random(seed).choices(range(1000), k=100_000)
        with forebay.Cache(root) as cache, cache.prefetcher(source, budget=2 * MiB, keep=seed % 2 == 0) as pool:
            for n, (i, found) in enumerate(zip(order, pool.stream((f"k{i}" for i in order), ahead=32), strict=True)):
                assert found == body(f"k{i}", 20_000)
                if n == 20:
                    ready.release()

    sizes = []
    for cycle in range(cycles):
        born = [children(lambda seed=seed: rank(seed), group=True) for seed in range(cycle, cycle + 8)]
        for _ in born:
            assert ready.acquire(timeout=60), "a process of the restarted job did not come so far"
        for child in born:
            child.kill()
        sizes.append(usage(root / "blobs", root / "tmp", root / "packs"))
    with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
        assert pool.get_many(KEYS) == [body(key, 20_000) for key in KEYS]
        pool.close()
        brim(cache)
        assert cache.check(deep=True) == []
        assert usage(root / "blobs", root / "tmp") <= cache.stats().bytes_used
    assert max(sizes) <= 4 * MiB
    assert {path.relative_to(tmp_path).parts[0] for path in map(Path, files_below(tmp_path))} == {"root", "journal"}


# -- 2: nothing is pulled away -----------------------------------------------------------------------------------------


def test_s02_what_a_lazy_holds_stays(root: Path, children: Start, flag: Callable[[], Any]) -> None:
    """One process has read X, another has only a lazy of it, a third fills the space three times over; the first is killed."""
    source, held, filled = items_of(root, size=50_000), [flag(), flag()], flag()

    def holder(me: int) -> Any:
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            lazy = pool.get_lazy("X")
            until(lambda: lazy.done)
            held[me].set()
            assert filled.wait(60)
            return lazy.get() == body("X", 50_000)

    def killed() -> None:
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            lazy = pool.get_lazy("X")
            until(lambda: lazy.done)
            held[0].set()
            time.sleep(600)

    with forebay.Cache(root, budget=20 * MiB, min_free=0) as cache, cache.prefetcher(source, budget=MiB) as pool:
        first = children(killed)
        assert held[0].wait(60)
        second = children(lambda: holder(1))
        assert held[1].wait(60)
        assert pool.get_many(KEYS) == [body(key, 50_000) for key in KEYS]
        first.kill()
        filled.set()
        assert second.result()
        assert source.all_reads()["X"] == 1
        more = [f"m{i}" for i in range(40)]
        pool.get_many(more)
        until(lambda: not any("/X~" in entry.key for entry in cache.entries("prefetch")), "its end: nobody has it any more")
        assert pool.used <= MiB


# -- 5: one limit ------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_s05_ranks_and_their_workers_share_one_limit(root: Path, children: Start) -> None:
    """8 ranks with 2 workers each, all of whom say the limit; a pause at any moment finds it held."""
    source = Items(30_000)

    def worker(me: int) -> int:
        with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache:
            with cache.prefetcher(source, budget=2 * MiB, max_count=50, workers=2) as pool:
                order = random.Random(me).sample(range(100), 100)
                for i, found in zip(order, pool.stream([f"k{i}" for i in order], ahead=8), strict=True):
                    assert found == body(f"k{i}", 30_000)
                return pool.count

    def rank(number: int) -> int:
        from tests.processes import fork

        return max(child.result() for child in [fork(lambda me=number * 2 + k: worker(me)) for k in range(2)])

    forebay.Cache(root, budget=8 * MiB, min_free=0).close()
    born = [children(lambda number=number: rank(number)) for number in range(8)]
    with forebay.Cache(root) as cache:
        most = 0
        while any(os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None for child in born):
            entries, used = cache.stats().spaces.get("prefetch", (0, 0))
            most = max(most, used)
            assert used <= 2 * MiB
            assert entries <= 50
            time.sleep(0.01)
        counts = [child.result(120) for child in born]
        assert max(counts) <= 50
        assert most > MiB  # what is given is used
        assert usage(root / "blobs", root / "tmp") <= 2 * MiB + 50 * 4096


# -- 6: one fetch ------------------------------------------------------------------------------------------------------


def test_s06_four_processes_read_each_item_once(root: Path, children: Start, barrier: Callable[[int], Any]) -> None:
    source, start = items_of(root), barrier(4)
    source.delay = 0.001
    keys = [f"k{i}" for i in range(500)]

    def rank() -> bool:
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            start.wait(60)
            return all(found == body(key) for key, found in zip(keys, pool.stream(keys), strict=True))

    forebay.Cache(root, budget=32 * MiB).close()
    assert [child.result() for child in [children(rank) for _ in range(4)]] == [True] * 4
    assert source.all_reads() == dict.fromkeys(keys, 1)


@pytest.mark.rotates
def test_s06_thirty_two_want_one_item(root: Path, children: Start, barrier: Callable[[int], Any]) -> None:
    source, start = items_of(root, size=5 * MiB), barrier(32)
    source.delay = 0.3  # so that all others come while it runs

    def rank() -> bool:
        with forebay.Cache(root) as cache, cache.prefetcher(source, workers=1) as pool:
            start.wait(60)
            return bool(pool.get_lazy("one").get() == body("one", 5 * MiB))

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    assert [child.result() for child in [children(rank) for _ in range(32)]] == [True] * 32
    assert source.all_reads() == {"one": 1}


def test_s06_the_reader_is_killed_and_a_waiter_takes_over(root: Path, children: Start, flag: Callable[[], Any]) -> None:
    source, reading = items_of(root), flag()

    def dies() -> None:
        source.stop("a")
        source.on_read = lambda key: reading.set()
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            pool.get_lazy("a").get()

    def waits() -> bytes:
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            found: bytes = pool.get_lazy("a").get()
            return found

    forebay.Cache(root, budget=8 * MiB).close()
    first = children(dies)
    assert reading.wait(60)
    others = [children(waits) for _ in range(3)]
    until(lambda: len(waiting_in(root)) >= 3, "the waiters")
    first.kill()
    began = time.monotonic()
    assert [child.result() for child in others] == [body("a")] * 3
    assert time.monotonic() - began < SOON
    assert source.all_reads() == {"a": 2}


def waiting_in(root: Path) -> set[int]:
    """Processes that have the root's words open: they are in the cache."""
    found = set()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if f"{root}/locks/words" in Path(f"/proc/{name}/maps").read_text():
                    found.add(int(name))
            except OSError:
                continue
    return found


def test_s06_a_failure_reaches_all_who_wait(root: Path, children: Start, flag: Callable[[], Any]) -> None:
    """In other processes too, once; afterwards it is tried again."""
    source, reading, fail = items_of(root), flag(), flag()

    def fails(key: str) -> None:
        reading.set()
        assert fail.wait(60)
        raise LookupError(f"process {os.getpid()} found no such item")

    def rank() -> str:
        source.on_read = fails
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            lazy = pool.get_lazy("a")
            with pytest.raises(LookupError) as raised:
                lazy.get()
            return str(raised.value)

    forebay.Cache(root, budget=8 * MiB).close()
    born = [children(rank) for _ in range(4)]
    assert reading.wait(60)
    until(lambda: len(waiting_in(root)) >= 4, "the waiters")
    time.sleep(0.3)  # so that they wait, and not only begin to; were it too short, there would be more reads, and the same answers
    fail.set()
    said = [child.result() for child in born]
    assert all("no such item" in text for text in said)
    assert len(set(said)) < 4  # it is the same failure
    with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
        assert pool.get_lazy("a").get() == body("a")


class Dataset:
    """Map-style: each item through a lazy of the pool that the parent made."""

    def __init__(self, pool: Any, keys: list[str]) -> None:
        self.pool, self.keys = pool, keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, i: int) -> int:
        return int(self.pool.get_lazy(self.keys[i]).get() == body(self.keys[i]))


@pytest.mark.rotates
@pytest.mark.parametrize(("method", "workers"), [("fork", 8), ("forkserver", 3), ("spawn", 3)])
def test_s17_the_workers_of_a_loader_share_their_items(root: Path, method: str, workers: int, torch: Any) -> None:
    source = items_of(root)
    with forebay.Cache(root, budget=16 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=2) as pool:
        assert pool.get_lazy("k0").get() == body("k0")  # its threads live when the workers begin
        pending = [pool.get_lazy(key) for key in KEYS[:10]]
        keys = [key for key in KEYS for _ in (0, 1)]
        loader = torch.utils.data.DataLoader(Dataset(pool, keys), batch_size=5, num_workers=workers, multiprocessing_context=method)
        assert sum(int(batch.sum()) for batch in loader) == 120
        assert [lazy.get() for lazy in pending] == [body(key) for key in KEYS[:10]]
    assert source.all_reads() == dict.fromkeys(KEYS, 1)


# -- 13: the disk is full ----------------------------------------------------------------------------------------------


def test_s13_a_full_disk_in_the_middle(tmpfs: Callable[[str], Path], children: Start, warnings: Any) -> None:
    place = tmpfs("24m")

    def train(seed: int) -> tuple[list[str], int]:
        source = Items(200_000)
        with warnings() as said, forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache, cache.prefetcher(source) as pool:
            keys = [f"k{i}" for _ in range(2) for i in random.Random(seed).sample(range(150), 150)]
            for key, found in zip(keys, pool.stream(keys, ahead=20), strict=True):
                assert found == body(key, 200_000)
            return said, len(source.reads)

    for child in [children(lambda seed=seed: train(seed)) for seed in range(2)]:
        said, reads = child.result(120)
        assert len(said) <= 3
        assert reads < 400
    with forebay.Cache(place / "root") as cache:
        assert cache.check(deep=True) == []


def test_s13_another_program_fills_the_disk(tmpfs: Callable[[str], Path], warnings: Any) -> None:
    place, source = tmpfs("24m"), Items(200_000)
    with warnings() as said, forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache, cache.prefetcher(source) as pool:
        assert pool.get_many(KEYS[:20]) == [body(key, 200_000) for key in KEYS[:20]]
        fill_the_disk(place)
        assert pool.get_many(KEYS) == [body(key, 200_000) for key in KEYS]
        spilled = pool.put([bytes(300_000)])
        assert spilled.get() == [bytes(300_000)]
        assert len(said) <= 3
        (place / "others").unlink()
        del said[:]
        until(lambda: pool.get_many(KEYS) == pool.get_many(KEYS) and pool.count >= 50, "the recovery")
        assert cache.check(deep=True) == []


# -- 15: an item larger than the limit ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Items, Sized])
@pytest.mark.parametrize("limit", ["space", "root"])
def test_s15_larger_than_the_limit(root: Path, kind: type[Items], limit: str, warnings: Any) -> None:
    """As many of them as there are workers, and then some: nothing stops, nothing is evicted, it is said once."""
    source = kind(10_000)
    source.sizes |= {f"huge{i}": 4 * MiB + i for i in range(12)}
    with warnings() as said, forebay.Cache(root, budget=2 * MiB, min_free=0) as cache:
        with cache.prefetcher(source, workers=3, budget=None if limit == "root" else MiB) as pool:
            pool.warm(KEYS[:20])
            huge = [pool.get_lazy(f"huge{i}") for i in range(12)]
            assert pool.get_many(KEYS) == [body(key, 10_000) for key in KEYS]
            assert [lazy.get() for lazy in huge] == [source.body(f"huge{i}") for i in range(12)]
            assert len([key for key in source.reads if key in KEYS]) == 60  # those of before are still there
            if kind is Sized:
                assert len(source.reads) == 72
            assert pool.warm(["huge1"]).failed[0][0] == "huge1"
    assert len(said) == 1
    assert "4,194,304" in said[0] or "4,194,3" in said[0]


# -- 16: an epoch larger than the cache --------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True], ids=["sequential", "shuffled"])
def test_s16_with_freeze_what_fits_is_hit_in_every_later_epoch(root: Path, shuffled: bool) -> None:
    source = Items(20_000)
    keys = [f"k{i}" for i in range(100)]
    with forebay.Cache(root, budget=32 * MiB, min_free=0) as cache:
        with cache.prefetcher(source, max_count=80, policy="freeze") as pool:
            for _ in range(3):
                order = random.sample(keys, 100) if shuffled else keys
                assert all(found == body(key, 20_000) for key, found in zip(order, pool.stream(order, ahead=16), strict=True))
            assert 60 <= pool.count <= 80
    assert len(source.reads) - 100 <= 2 * 40  # at least 60 % hits in epochs 2 and 3


# -- 17: fork and spawn ------------------------------------------------------------------------------------------------


def test_s17_forked_while_loads_are_pending(root: Path, children: Start) -> None:
    """Kept, running and queued: each of them is delivered on both sides, and each is read once. The child has no threads at first."""
    source = items_of(root)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=2) as pool:
        done = pool.get_lazy("done")
        until(lambda: pool.count == 1)
        source.stop("r0", "r1")
        running = [pool.get_lazy(key) for key in ("r0", "r1")]
        source.wait("r0")
        source.wait("r1")
        queued = [pool.get_lazy(key) for key in ("q0", "q1", "q2")]

        def child() -> bool:
            source.go()  # of its own gates, though nobody here is behind them
            good = [lazy.get() for lazy in (done, *queued)] == [body(key) for key in ("done", "q0", "q1", "q2")]
            until(lambda: sum("/q" in entry.key for entry in cache.entries(pool.name)) == 3, "the child's keeping")
            return good and [lazy.get() for lazy in running] == [body("r0"), body("r1")]

        born = children(child)
        until(lambda: source.all_reads()["q2"] == 1, "the child's reads")
        source.go()
        assert [lazy.get() for lazy in (*running, *queued)] == [body(key) for key in ("r0", "r1", "q0", "q1", "q2")]
        assert born.result()
        assert pool.get_many(KEYS) == [body(key) for key in KEYS]
    assert source.all_reads() == dict.fromkeys(["done", "r0", "r1", "q0", "q1", "q2", *KEYS], 1)


@pytest.mark.rotates
def test_s17_forked_again_and_again_by_many_threads(root: Path, children: Start) -> None:
    source = Items()
    source.delay = 0.001
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=4, max_count=100) as pool:
        over = threading.Event()
        faults: list[BaseException] = []

        def work(seed: int) -> None:
            chance = random.Random(seed)
            try:
                while not over.is_set():
                    keys = [f"k{chance.randrange(300)}" for _ in range(10)]
                    assert pool.get_many(keys) == [body(key) for key in keys]
            except BaseException as error:
                faults.append(error)

        threads = [threading.Thread(target=work, args=(seed,), daemon=True) for seed in range(3)]
        for thread in threads:
            thread.start()
        for i in range(8):
            lazies = [pool.get_lazy(f"c{i}-{n}") for n in range(20)]
            child = children(lambda i=i, lazies=lazies: [lazy.get() for lazy in lazies] == [body(f"c{i}-{n}") for n in range(20)])
            assert child.result()
        over.set()
        for thread in threads:
            thread.join(60)
        assert faults == []
        assert not any(thread.is_alive() for thread in threads)


def test_s17_a_child_that_ends_takes_nothing_along(root: Path, children: Start) -> None:
    source = items_of(root)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, keep=False) as pool:
        lazies = [pool.get_lazy(key) for key in KEYS]
        until(lambda: pool.count == 60)

        def child() -> int:
            assert lazies[0].get() == body("k0")
            pool.close()
            cache.close()
            return 1

        assert children(child).result() == 1
        assert pool.count == 60
        assert [lazy.get() for lazy in lazies] == [body(key) for key in KEYS]
        assert source.all_reads() == dict.fromkeys(KEYS, 1)


ARRIVES = """
import pickle, sys
pool, lazy = pickle.load(sys.stdin.buffer)
value = lazy.get()
assert pool.get_lazy("other").get() != value
print(len(value), pool.name, pool.count)
"""


def test_s17_a_handle_in_another_interpreter(root: Path) -> None:
    import pickle

    source = items_of(root)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, name="mine") as pool:
        lazy = pool.get_lazy("a")
        until(lambda: pool.count == 1)
        env = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(Path(__file__).parents[2])])}
        done = subprocess.run([sys.executable, "-c", ARRIVES], input=pickle.dumps((pool, lazy)), capture_output=True, env=env, timeout=60)
        assert done.stdout.split()[:2] == [b"2000", b"mine"], done.stderr.decode()
        assert pool.get_lazy("other").get() == body("other")
        assert source.all_reads() == {"a": 1, "other": 1}


# -- 25: ahead of the consumer, and demand first -----------------------------------------------------------------------


def test_s25_the_wait_is_hidden(root: Path) -> None:
    """While its consumer is busy with one item, the next eight are read, all at once: each is there when he asks for it."""
    source = Items()
    source.stop(*KEYS)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=8) as pool:
        stream = pool.stream(KEYS, ahead=8)
        source.go(KEYS[0])
        assert next(stream) == body(KEYS[0])
        for i in range(1, len(KEYS)):
            asked = KEYS[: i + 8]  # workers that begin at the same time may come in any order
            until(lambda: sorted(source.reads) == sorted(asked) and source.at_once == len(asked) - i, f"the reads ahead of {KEYS[i]}")  # noqa: B023
            source.go(KEYS[i])
            until(lambda: pool.count == i + 1, KEYS[i])  # noqa: B023
            assert next(stream) == body(KEYS[i])


def test_s25_demand_goes_first(root: Path) -> None:
    """All workers are at something, and a thousand items wait: who needs another one waits for none of them."""
    source = Items()
    keys = [f"q{i}" for i in range(1000)]
    source.stop(*keys)
    with forebay.Cache(root, budget=32 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=4) as pool:
        queue = [pool.get_lazy(key) for key in keys]
        until(lambda: len(source.reads) >= 4)
        assert pool.get_lazy("now").get() == body("now")
        assert source.reads[4:] == ["now"]
        assert not any(lazy.done for lazy in queue)
        source.go()
        pool.close()


# -- 26: sources that fail ---------------------------------------------------------------------------------------------


def test_s26_twice_503_then_it_works(root: Path, server: ScriptedServer) -> None:
    data = os.urandom(100_000)
    server.put("/a/x.bin", data, statuses=[503, 503], head=False)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(server.url + "/a", workers=2) as pool:
        assert pool.get_lazy("x.bin").get() == data
        assert pool.get_lazy("x.bin").get() == data
        assert cache.stats().retries >= 2
    assert server.gets == 3


def test_s26_cut_off_it_is_resumed(root: Path, server: ScriptedServer) -> None:
    data = os.urandom(2 * MiB)
    server.put("/a/x.bin", data, cut_after=MiB, cuts=1)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(server.url + "/a") as pool:
        assert pool.get_lazy("x.bin").get() == data
    assert server.sent < 1.5 * len(data)


@pytest.mark.rotates
def test_s26_a_source_that_stalls_for_ever(root: Path, server: ScriptedServer) -> None:
    from forebay.remote import RemoteOptions

    server.put("/a/x.bin", os.urandom(MiB), stall_after=300_000)
    good = [server.put(f"/a/{i}.bin", os.urandom(1000)) for i in range(20)]
    options = RemoteOptions(read_timeout=2, attempts=2, backoff=0.01)
    with forebay.Cache(root, budget=8 * MiB, min_free=0, remote_options=options) as cache:
        with cache.prefetcher(server.url + "/a", workers=2) as pool:
            stalls = pool.get_lazy("x.bin")
            assert server.stalled.wait(60)
            assert len(pool.get_many([f"{i}.bin" for i in range(20)])) == len(good)
            began = time.monotonic()
            with pytest.raises(errors.RemoteError) as raised:
                stalls.get()
            assert time.monotonic() - began < SOON
            assert "/a/x.bin" in str(raised.value)
            assert cache.entries("prefetch") == [] or all("x.bin" not in entry.key for entry in cache.entries("prefetch"))
            with pytest.raises(errors.NotFound):
                pool.get_lazy("none.bin").get()


@pytest.mark.parametrize("limits", [{"max_count": 1}, {"max_count": 2}, {"budget": 50_000}], ids=str)
@pytest.mark.parametrize("kind", [Items, Sized])
def test_s08_a_get_of_what_is_read_while_later_ones_fill_the_pool(root: Path, kind: type[Items], limits: dict[str, int]) -> None:
    """Two items suffice where a pool waits for room with the lock of the one that has it."""
    source = kind(40_000)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=4, **limits) as pool:
        source.stop("a")
        first = pool.get_lazy("a")
        source.wait("a")
        later = [pool.get_lazy(f"b{i}") for i in range(6)]
        got: list[bytes] = []
        waits = threading.Thread(target=lambda: got.append(first.get()), daemon=True)
        waits.start()
        until(lambda: first._load is not None and first._load.waiters == 1, "the waiter")
        assert later[-1].get() == source.body("b5")
        source.go()
        waits.join(60)
        assert got == [body("a", 40_000)]
        assert [lazy.get() for lazy in later] == [source.body(f"b{i}") for i in range(6)]


def test_s26_cut_off_again_and_again(root: Path, server: ScriptedServer) -> None:
    """Half an item is never taken for one."""
    from forebay.remote import RemoteOptions

    data = os.urandom(100_000)
    server.put("/a/x.bin", data, cut_after=50_000, ranges=False)
    with forebay.Cache(root, budget=8 * MiB, min_free=0, remote_options=RemoteOptions(attempts=2, backoff=0.01)) as cache:
        with cache.prefetcher(server.url + "/a") as pool:
            with pytest.raises(errors.RemoteError):
                pool.get_lazy("x.bin").get()
            server.put("/a/x.bin", data)
            assert pool.get_lazy("x.bin").get() == data


def test_s13_memory_of_loads_that_wait_for_room(root: Path, children: Start) -> None:
    """A few items for each worker, however many are asked for."""
    item, workers = 4 * MiB, 2

    def child() -> int:
        source = Items(item)
        with forebay.Cache(root, budget=200 * MiB, min_free=0) as cache:
            with cache.prefetcher(source, workers=workers, max_count=2) as pool:
                held = [pool.get_lazy(key) for key in KEYS[:2]]
                until(lambda: pool.count == 2)
                before = resident()
                waiting = [pool.get_lazy(f"w{i}") for i in range(100)]
                highest = 0
                for lazy in waiting[90:]:
                    assert len(lazy.get()) == item
                    highest = max(highest, resident() - before)
                del held
                return highest - 10 * item  # those ten are the caller's own

    assert children(child).result() <= 4 * workers * item


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- 30: finalizers ----------------------------------------------------------------------------------------------------


@pytest.mark.rotates
@pytest.mark.parametrize("seconds", [4, pytest.param(parts.share(60), marks=[pytest.mark.stress, pytest.mark.timeout(300)])])
@pytest.mark.parametrize("keep", [True, False], ids=["keep", "scratch"])
def test_s30_lazies_dropped_at_random_moments(seconds: int, keep: bool, root: Path, collecting: None) -> None:
    """By many threads, while others get and evict: no deadlock, and what nobody holds takes nothing."""
    source = Items(4000)
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache:
        with cache.prefetcher(source, max_count=40, keep=keep, workers=4) as pool:
            assert min(drop_lazies(pool, 400, lambda i: f"k{i}", lambda key: body(key, 4000), seconds)) >= 100
            if not keep:
                until(lambda: cache.put("next", b"write") and pool.used == pool.count == 0, "zero")
            until(lambda: cache.stats().bytes_reserved == 0, "the end of all reservations")
            until(lambda: not any(entry.leased for entry in cache.entries("prefetch")), "no lease")


def test_s30_dropped_inside_another_lock(root: Path) -> None:
    """A finalizer that ran inside a lock of the caller's, or of the logging module's, waits for nobody."""
    source = Items()
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache, cache.prefetcher(source, workers=2, keep=False) as pool:
        lock = threading.Lock()
        handler = logging.Handler()
        for i in range(16):
            lazy: list[Any] = [pool.get_lazy(f"k{i}")]
            lazy.append(lazy)
            if i % 2:
                until(lambda: lazy[0].done)  # noqa: B023
            assert lock.acquire(timeout=1)
            handler.acquire()
            lazy = []
            gc.collect()
            handler.release()
            lock.release()
        until(lambda: cache.put("next", b"write") and pool.count == 0)


SOURCE = """
import sys, threading, time, os, forebay
class Source:
    uri, version = "test://x", "1"
    def __getitem__(self, key):
        if key.startswith("slow"): time.sleep(600)
        return key.encode() * 1000
cache = forebay.Cache(sys.argv[1], budget=8 << 20, min_free=0)
pool = cache.prefetcher(Source(), workers=2)
"""
EXITS = {
    "lazies held": "held = [pool.get_lazy(f'k{i}') for i in range(100)]",
    "a value": "lazy = pool.get_lazy('a'); lazy.get(); spilled = pool.put([1])",
    "a ring": "ring = [pool.get_lazy('a')]; ring.append(ring)",
    "a module": "os.held = pool.get_lazy('a'); os.pool = pool",
    "a stream in its middle": "stream = pool.stream(f'k{i}' for i in range(10**9)); next(stream)",
    "reads that go on": "held = [pool.get_lazy(f'slow{i}') for i in range(9)]; time.sleep(0.2)",
    "a daemon that goes on": "threading.Thread(target=lambda: [pool.get(f'k{i}') for i in iter(int, 1)], daemon=True).start()",
    "a __del__": "K = type('K', (), {'__del__': lambda self: self.lazy.get()}); k = K(); k.lazy = pool.get_lazy('a')",
    "an exception": "held = pool.get_lazy('a'); sys.exit(0)",
}


@pytest.mark.rotates
@pytest.mark.parametrize("what", EXITS)
def test_s30_the_interpreter_exits(root: Path, run: Callable[..., Any], what: str) -> None:
    began = time.monotonic()
    done = run(f"{SOURCE}\n{EXITS[what]}\n", root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - began < 2 * SOON
    with forebay.Cache(root) as cache:
        assert not any(entry.leased for entry in cache.entries())
        brim(cache)


WAITS = (
    SOURCE
    + """
lazy = pool.get_lazy("slow")
print("waiting", flush=True)
MODE
"""
)
HOW = {
    "a get of what runs": "time.sleep(0.1); lazy.get()",
    "a direct read": "blocker = [pool.get_lazy(f'slow{i}') for i in range(4)]; time.sleep(0.1); blocker[-1].get()",
    "a stream": "list(pool.stream(['slow', 'a']))",
    "a warm": "pool.warm(['slow', 'a'])",
    "a close": "time.sleep(0.1); pool.close()",
}


@pytest.mark.rotates
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "sigterm"])
@pytest.mark.parametrize("how", HOW)
def test_s08_a_signal_ends_a_wait(root: Path, how: str, number: signal.Signals) -> None:
    """At once, with nothing left behind."""
    script = WAITS.replace("MODE", HOW[how])
    with subprocess.Popen([sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as job:
        assert job.stdout is not None
        assert job.stdout.readline() == "waiting\n"
        time.sleep(0.4)  # so that it waits; were it too short, it would end even sooner
        job.send_signal(number)
        began = time.monotonic()
        _, err = job.communicate(timeout=30)
        assert time.monotonic() - began < SOON
        assert job.returncode in (-number, 1)
        assert ("KeyboardInterrupt" in err) == (number == signal.SIGINT)
    with forebay.Cache(root) as cache:
        brim(cache)


def test_s08_a_signal_ends_a_wait_for_another_process(root: Path, children: Start, flag: Callable[[], Any]) -> None:
    reading, source = flag(), items_of(root)

    def stalls() -> None:
        source.stop("slow")
        source.on_read = lambda key: reading.set()
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            pool.get_lazy("slow").get()

    def waits() -> float:
        with forebay.Cache(root) as cache, cache.prefetcher(source) as pool:
            lazy = pool.get_lazy("slow")
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            began = time.monotonic()
            with pytest.raises(KeyboardInterrupt):
                lazy.get()
            return time.monotonic() - began

    forebay.Cache(root, budget=8 * MiB).close()
    other = children(stalls)
    assert reading.wait(60)
    assert children(waits).result() < 3
    other.kill()


# -- 40: filled before the job -----------------------------------------------------------------------------------------


def test_s40_warm_from_a_server_resumed_after_a_kill(root: Path, server: ScriptedServer, children: Start) -> None:
    bodies = {f"{i}.bin": os.urandom(200_000) for i in range(40)}
    for name, data in bodies.items():
        server.put(f"/a/{name}", data)
    server.rate = 4e6

    def fill() -> tuple[int, list[str]]:
        with forebay.Cache(root) as cache, cache.prefetcher(forebay_source(server), workers=4) as pool:
            report = pool.warm(bodies)
            return len(report.done), [key for key, _ in report.failed]

    forebay.Cache(root, budget=32 * MiB, min_free=0).close()
    first = children(fill)
    until(lambda: server.sent > 2 * MiB)
    first.kill()
    server.rate = None
    before = server.sent
    server.objects.pop("/a/7.bin")
    done, failed = children(fill).result()
    assert (done, failed) in ((39, ["7.bin"]), (40, []))
    assert server.sent - before < 40 * 200_000 - MiB  # what was there was not read again
    server.put("/a/7.bin", bodies["7.bin"])
    assert children(fill).result() == (40, [])
    gets = server.gets
    assert children(fill).result() == (40, [])
    assert server.gets == gets


def forebay_source(server: ScriptedServer) -> Any:
    from forebay.sources import UrlSource

    return UrlSource(server.url + "/a", version="1")


# -- what a death leaves -----------------------------------------------------------------------------------------------


def test_s21_nothing_is_left_outside_of_the_root(root: Path, tmp_path: Path, children: Start) -> None:
    """Whatever the end: closed, dropped, killed."""
    places = [tmp_path / "tmp", Path("/dev/shm")]
    places[0].mkdir()
    shm = files_below(places[1])

    def work(end: str) -> None:
        os.environ["TMPDIR"] = str(places[0])
        source = Items(30_000)
        cache = forebay.Cache(root)
        pool = cache.prefetcher(source, keep=False)
        held = [pool.get_lazy(key) for key in KEYS] + [pool.put(bytes(1000))]
        held[0].get()
        until(lambda: pool.count > 20)
        if end == "close":
            pool.close()
            cache.close()
        if end == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

    forebay.Cache(root, budget=8 * MiB, min_free=0).close()
    for end in ("close", "exit", "kill"):
        children(lambda end=end: work(end)).wait()
        with forebay.Cache(root) as cache:
            cache.put("next", b"write")
            assert cache.entries("prefetch") == []
            assert usage(root / "blobs", root / "tmp") == 0
            brim(cache)
    assert files_below(places[0]) == set()
    assert not {path for path in files_below(places[1]) - shm if "forebay" in path and not re.search("forebay-test-|pytest-of-", path)}
