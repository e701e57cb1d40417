"""The scenarios of arrays of samples, by their numbers."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._kernel import host
from tests.harness import fill_the_disk, kill_whenever, usage
from tests.processes import in_child

MiB = 1 << 20


def body(i: int, size: int = 2000) -> bytes:
    return random.Random(i).randbytes(size + i % 97)


# -- 2, 3: nobody's bytes are pulled away, nothing half-written is seen -------------------------------------------------


def test_s02_an_array_in_use_is_not_evicted(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    opened, read = flag(), flag()

    def reader() -> bool:
        with forebay.Cache(root) as cache, cache.samples("a", 100) as samples:
            opened.set()
            assert read.wait(60)
            return all(samples.get(i) == body(i) for i in range(100))

    with forebay.Cache(root, budget=2 * MiB, min_free=0) as cache:
        with cache.samples("a", 100) as samples:
            assert all(samples.put(i, body(i)) for i in range(100))
        using = children(reader)
        assert opened.wait(60)
        for i in range(12):
            cache.put(f"value-{i}", bytes(500_000))  # thrice the budget
        read.set()
        assert using.result()
        for i in range(12):
            cache.put(f"more-{i}", bytes(500_000))
        assert cache.entries("samples") == []  # nobody has it any more


@pytest.mark.rotates
def test_s03_kills_at_random_moments(root: Path, children: Callable[..., Any]) -> None:
    """Twelve generations of writers, killed whenever: what is there is exact, and the next generation goes on."""
    chance = random.Random(3)

    def writer(seed: int) -> None:
        order = random.Random(seed).sample(range(3000), 3000)
        with forebay.Cache(root) as cache:
            samples = cache.samples("a", 3000)
            for i in order:
                samples.put(i, body(i))
            os.kill(os.getpid(), signal.SIGKILL)

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.samples("a", 3000) as samples:
        for generation in range(12):
            kill_whenever([children(lambda seed=generation * 2 + k: writer(seed)) for k in range(2)], chance)
            assert all(samples.get(i) == body(i) for i in samples)
            assert samples.verify() == []
        filled = samples.filled
        assert sum(samples.put(i, body(i)) for i in range(3000)) == 3000 - filled
        assert all(samples.get(i) == body(i) for i in range(3000))
        assert cache.stats().bytes_reserved == 0


# -- 4, 5, 34: one budget ----------------------------------------------------------------------------------------------


def test_s04_the_budget_holds_for_all_writers_together(root: Path, children: Callable[..., Any]) -> None:
    def writer(me: int) -> int:
        with forebay.Cache(root) as cache, cache.samples(f"array-{me % 2}", 4000) as samples:
            return sum(samples.put(i, bytes(3000)) for i in range(me, 4000, 4))

    forebay.Cache(root, budget=4 * MiB, min_free=0).close()
    born = [children(lambda me=me: writer(me)) for me in range(4)]
    highest = 0
    while any(_runs(child) for child in born):
        for child in filter(_runs, born):
            child.stop()
        highest = max(highest, usage(root / "packs"))
        for child in filter(_runs, born):
            child.signal(signal.SIGCONT)
        time.sleep(0.01)
    stored = sum(child.result() for child in born)
    assert highest <= 4 * MiB
    assert usage(root / "packs") <= 4 * MiB
    assert stored * 3000 > 3 * MiB  # what is given is used


def _runs(child: Any) -> bool:
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def test_s05_ranks_and_their_workers_share_one_limit(root: Path, children: Callable[..., Any]) -> None:
    """8 ranks with 4 workers each, all of whom say the limit."""

    def worker(me: int) -> int:
        with forebay.Cache(root, budget=4 * MiB, min_free=0) as cache, cache.samples("a", 6400) as samples:
            return sum(samples.put(i, bytes(2000)) for i in range(me, 6400, 32))

    def rank(number: int) -> int:
        from tests.processes import fork

        return sum(child.result() for child in [fork(lambda me=number * 4 + k: worker(me)) for k in range(4)])

    stored = sum(child.result(120) for child in [children(lambda number=number: rank(number)) for number in range(8)])
    with forebay.Cache(root) as cache, cache.samples("a") as samples:
        assert samples.filled == stored
        assert stored * 2000 > 2 * MiB
        assert usage(root / "packs") <= cache.stats().bytes_used <= 4 * MiB


def test_s34_a_lower_budget_binds_what_is_there(root: Path) -> None:
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache:
        for name in ("old", "new"):
            with cache.samples(name, 300) as samples:
                assert all(samples.put(i, bytes(10_000)) for i in range(300))
    with forebay.Cache(root, budget=4 * MiB) as cache:
        assert [entry.key for entry in cache.entries("samples")] == ["new"]
        assert usage(root / "packs") <= 4 * MiB


# -- 13: the disk is full ----------------------------------------------------------------------------------------------


def test_s13_a_full_disk_in_the_middle_of_a_segment(tmpfs: Callable[[str], Path], children: Callable[..., Any]) -> None:
    """No store meets a hole: readers and writers live, one warning is shown, what is there is read on."""
    place = tmpfs("32m")

    def train() -> tuple[int, int]:
        with forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache, cache.samples("a", 3000) as samples:
            with pytest.warns(RuntimeWarning) as told:
                stored = sum(samples.put(i, body(i, 20_000)) for i in range(3000))
            assert all(samples.get(i) in (None, body(i, 20_000)) for i in range(3000))
            assert samples.verify() == []
            return stored, len(told)

    stored, told = children(train).result(120)
    assert 800 < stored < 1700
    assert told == 1
    with forebay.Cache(place / "root") as cache:
        assert cache.check(deep=True) == []


def test_s13_another_program_fills_the_disk(tmpfs: Callable[[str], Path]) -> None:
    place = tmpfs("32m")
    with forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache, cache.samples("a", 3000) as samples:
        stored = sum(samples.put(i, body(i, 20_000)) for i in range(200))
        fill_the_disk(place)
        with pytest.warns(RuntimeWarning):
            more = sum(samples.put(i, body(i, 20_000)) for i in range(200, 1000))
        assert stored == 200
        assert more < 300  # what fits into the segment that was there
        assert samples.filled == 200 + more
        assert all(samples.get(i) == body(i, 20_000) for i in samples)
        (place / "others").unlink()
        time.sleep(2.1)  # it asks again by itself, after a while
        assert samples.put(2000, body(2000, 20_000))
        assert cache.check(deep=True) == []


# -- 16: an epoch larger than the cache ---------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True], ids=["sequential", "shuffled"])
def test_s16_what_fits_is_hit_in_every_later_epoch(root: Path, shuffled: bool) -> None:
    made: list[int] = []
    with forebay.Cache(root, budget=80 * 65_536 + 40_000, min_free=0) as cache, cache.samples("a", 100) as samples:
        for _ in range(3):
            order = random.sample(range(100), 100) if shuffled else range(100)
            for i in order:
                assert samples.get_or_put(i, lambda i=i: (made.append(i), bytes([i]) * 65_000)[1])[:1] == bytes([i])
    later = len(made) - 100
    assert later <= 2 * 40  # at least 60 % hits in epochs 2 and 3


# -- 17, 18: processes -------------------------------------------------------------------------------------------------

ARRIVES = """
import pickle, sys
samples = pickle.load(sys.stdin.buffer)
assert samples.get(1) == b"one"
assert samples.put(2, b"two")
print(samples.name, samples.filled)
"""


@pytest.mark.parametrize("name", ["a", None])
def test_s17_a_handle_in_another_interpreter(root: Path, name: str | None) -> None:
    with forebay.Cache(root, budget=8 * MiB) as cache, cache.samples(name, 10) as samples:
        samples.put(1, b"one")
        done = subprocess.run([sys.executable, "-c", ARRIVES], input=pickle.dumps(samples), capture_output=True)
        assert done.stdout.decode().split() == [str(name), "2"], done.stderr.decode()
        assert samples.get(2) == b"two"


def test_s17_a_handle_of_what_is_gone(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with forebay.Cache(root, budget=8 * MiB) as cache:
        with cache.samples(length=10) as samples:
            samples.put(1, b"one")
            data = pickle.dumps(samples)

        def arrives() -> tuple[object, ...]:
            arrived = pickle.loads(data)
            return caplog.text, arrived.get(1), arrived.put(1, b"one"), bytes(arrived.get_or_put(1, lambda: b"made"))

        told, *found = in_child(arrives)
        assert "gone" in told
        assert found == [None, False, b"made"]


def test_s17_an_array_without_a_name_lives_as_long_as_a_worker(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    forked, closed = flag(), flag()
    with forebay.Cache(root, budget=8 * MiB) as cache:
        samples = cache.samples(length=10)
        samples.put(1, b"one")

        def worker() -> bytes:
            forked.set()
            assert closed.wait(60)
            assert samples.put(2, b"two")
            return bytes(samples.get(1)) + bytes(samples.get(2))

        child = children(worker)
        assert forked.wait(60)
        samples.close()
        closed.set()
        assert child.result() == b"onetwo"
        cache.put("next", b"write")
        assert os.listdir(root / "packs") == []


def test_s18_many_open_one_new_array_at_once(root: Path, children: Callable[..., Any], barrier: Callable[[int], Any]) -> None:
    start = barrier(24)

    def opener(me: int) -> int:
        start.wait(60)
        with forebay.Cache(root, budget=32 * MiB) as cache, cache.samples("a", 24 * 20, fingerprint="v1") as samples:
            stored = sum(samples.put(i, body(i)) for i in range(me * 20, me * 20 + 20))
            return stored + sum(samples.get(i) not in (None, body(i)) for i in range(480)) * 1000

    born = [children(lambda me=me: opener(me)) for me in range(24)]
    assert [child.result(120) for child in born] == [20] * 24
    with forebay.Cache(root) as cache, cache.samples("a") as samples:
        assert all(samples.get(i) == body(i) for i in range(480))
        assert [entry.key for entry in cache.entries("samples")] == ["a"]


@pytest.mark.rotates
def test_32_writers_and_8_readers(root: Path, children: Callable[..., Any]) -> None:
    """32,768 slots; readers look at every byte meanwhile."""
    slots, each = 32_768, 1024
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache, cache.samples("a", slots) as samples:

        def writer(me: int) -> int:
            return sum(samples.put(i, i.to_bytes(4, "little") * 100) for i in range(me * each, me * each + each))

        def reader(seed: int) -> int:
            chance, seen = random.Random(seed), 0
            while samples.filled < slots:
                for i in chance.sample(range(slots), 2000):
                    found = samples.get(i)
                    assert found is None or found == i.to_bytes(4, "little") * 100
                    seen += found is not None
            return seen

        readers = [children(lambda seed=seed: reader(seed)) for seed in range(8)]
        writers = [children(lambda me=me: writer(me)) for me in range(32)]
        assert sum(child.result(120) for child in writers) == slots
        assert all(child.result(120) for child in readers)
        assert all(samples.get(i) == i.to_bytes(4, "little") * 100 for i in range(slots))


def test_s06_one_process_runs_the_function(root: Path, children: Callable[..., Any], barrier: Callable[[int], Any], tmp_path: Path) -> None:
    start, ran = barrier(8), tmp_path / "ran"
    forebay.Cache(root, budget=8 * MiB).close()

    def worker() -> bytes:
        def make() -> bytes:
            with open(ran, "a") as file:
                file.write("x")
            time.sleep(0.2)  # so that all others come while it runs
            return b"made"

        with forebay.Cache(root) as cache, cache.samples("a", 10) as samples:
            start.wait(60)
            return bytes(samples.get_or_put(5, make))

    assert {child.result() for child in [children(worker) for _ in range(8)]} == {b"made"}
    assert ran.read_text() == "x"


def test_s06_the_maker_is_killed_and_another_takes_over(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    inside = flag()

    def dies() -> None:
        with forebay.Cache(root) as cache, cache.samples("a", 10) as samples:
            samples.get_or_put(5, lambda: (inside.set(), time.sleep(600)))

    with forebay.Cache(root, budget=8 * MiB) as cache, cache.samples("a", 10) as samples:
        child = children(dies)
        assert inside.wait(60)
        waits = children(lambda: bytes(samples.get_or_put(5, lambda: b"made")))
        child.kill()
        assert waits.result(30) == b"made"
        assert samples.get(5) == b"made"


# -- 28: hits ----------------------------------------------------------------------------------------------------------

HITS = """
import os, sys, forebay
with forebay.Cache(sys.argv[1]) as cache, cache.samples("a") as samples:
    for _ in range(2):
        for i in range(100):
            assert len(samples.get(i)) == 50_000 and samples.get_or_put(i, None)
    os.path.exists("/begin-of-the-hits")
    for i in range(1000):
        samples.get(i % 100)
        samples.get_or_put(i % 100, None)
    os.path.exists("/end-of-the-hits")
"""


def test_s28_a_hit_makes_no_system_call(root: Path, tmp_path: Path) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with forebay.Cache(root, budget=16 * MiB) as cache, cache.samples("a", 100) as samples:
        assert all(samples.put(i, bytes(50_000)) for i in range(100))
    trace = tmp_path / "trace"
    strace = ["strace", "-qq", "-o", str(trace), sys.executable, "-c", HITS, str(root)]
    done = subprocess.run(strace, capture_output=True, text=True, timeout=100)
    if "ptrace" in done.stderr.lower() and "not permitted" in done.stderr:
        pytest.skip("strace is not permitted here")
    assert done.returncode == 0, done.stderr
    text = trace.read_text()
    between = text[text.index("/begin-of-the-hits") : text.index("/end-of-the-hits")].splitlines()[1:-1]
    calls = [line for line in between if not re.match(r"(brk|mmap|munmap|madvise|mremap)\(", line)]  # Python's own memory
    assert calls == []


def test_s28_a_stopped_writer_delays_nobody(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    inside = flag()
    with forebay.Cache(root, budget=16 * MiB) as cache, cache.samples("a", 1000) as samples:
        samples.put(0, body(0))

        def stops() -> None:
            def hook(name: str, subject: str) -> None:
                if name == "set_word":
                    inside.set()
                    os.kill(os.getpid(), signal.SIGSTOP)

            samples.put(1, body(1))
            host.on_step(hook)
            samples.put(2, body(2))

        stopped = children(stops)
        assert inside.wait(60)
        assert all(samples.put(i, body(i)) for i in range(3, 500))
        assert all(samples.get(i) == body(i) for i in itertools.chain((0, 1), range(3, 500)))
        stopped.kill()
        assert samples.put(2, body(2))


# -- 29, 32 ------------------------------------------------------------------------------------------------------------


def test_s29_errors_travel(root: Path) -> None:
    with forebay.Cache(root, budget=8 * MiB) as cache:
        cache.samples("a", 10).close()
        with pytest.raises(errors.ConfigError) as mismatch:
            cache.samples("a", 11)
        again = pickle.loads(pickle.dumps(mismatch.value))
        assert str(again) == str(mismatch.value)
        assert again.found == 10


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("/tmp/forebay-was-executed",)


def test_s32_nothing_is_unpickled_unasked(root: Path, command: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    mark = Path("/tmp/forebay-was-executed")
    with forebay.Cache(root, budget=8 * MiB) as cache:
        with cache.samples("a", 10) as samples:
            samples.put(1, pickle.dumps(Evil()))
        with cache.samples("p", 10, codec="pickle") as samples:
            samples.put(1, Evil())
        with cache.samples("a") as samples:
            assert samples.get(1) is not None
            assert samples.verify() == []
        cache.check(deep=True)
    for verb in (["ls"], ["du"], ["verify"], ["stats"], ["doctor"]):
        done = command(*verb, env=os.environ | {"FOREBAY_HOME": str(root)})
        assert done.returncode == 0, done.stderr
    assert not mark.exists()


# -- 38: many small samples --------------------------------------------------------------------------------------------


@pytest.mark.stress
def test_s38_a_million_samples_of_1_kb(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", budget="4GB") as cache, cache.samples("a", 1_000_000) as samples:
        data = bytes(1000)
        assert all(samples.put(i, data) for i in range(1_000_000))
        assert samples.filled == 1_000_000
        assert samples.get(999_999) == data
        assert sum(len(names) + len(folders) for _, folders, names in os.walk(tmp_path / "root" / "packs")) < 10_000
        assert cache.stats().bytes_used < 1.12 * 1000 * 1_000_000


def test_s38_files_are_few(root: Path) -> None:
    """As many as a hundredth of what a million samples of 1 KB may take, for a fiftieth of them."""
    with forebay.Cache(root, budget="1GB") as cache, cache.samples("a", 20_000) as samples:
        data = bytes(1000)
        assert all(samples.put(i, data) for i in range(20_000))
    assert sum(len(names) for _, _, names in os.walk(root / "packs")) < 100
