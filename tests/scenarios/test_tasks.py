"""The scenarios of tasks, by their numbers: one budget, one run, nothing half-written, nothing executed, keys that stay apart."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer  # noqa: F401  # imported here, so that forked children need not
from tests.harness import fill_the_disk, kill_whenever, usage
from tests.items import until

KB, MiB = 1000, 1 << 20
SIZES = [50, 3 * KB, 30 * KB, 300 * KB]


def value_of(tag: str, stamp: int, size: int) -> dict[str, Any]:
    """One that says whose it is, all over."""
    return {"tag": tag, "stamp": stamp, "array": np.frombuffer(random.Random(f"{tag} {stamp}").randbytes(size), np.uint8)}


def is_whole(tag: str, value: dict[str, Any]) -> bool:
    array = value["array"]
    return bool(value["tag"] == tag and bytes(array) == random.Random(f"{tag} {value['stamp']}").randbytes(array.size))


def note(log: Path, text: object = os.getpid) -> None:
    """Write a line that other processes can count."""
    with open(log, "ab", buffering=0) as file:
        file.write(f"{text() if callable(text) else text}\n".encode())


def lines(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


# -- 3: nothing half-written -------------------------------------------------------------------------------------------


def test_s03_kills_at_random_moments(root: Path, children: Callable[..., Any]) -> None:
    """Twelve generations of writers that overwrite each other's values, killed whenever."""
    chance, tags = random.Random(3), [f"tag-{i}" for i in range(12)]

    def writer(seed: int) -> None:
        mine = random.Random(seed)
        tasks = forebay.Cache(root).tasks("t")
        while True:
            tag = mine.choice(tags)
            assert tasks.write(tag, value_of(tag, mine.getrandbits(40), mine.choice(SIZES)))

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t")
        for tag in tags:
            assert tasks.write(tag, value_of(tag, 0, 30 * KB))
        for generation in range(12):
            kill_whenever([children(lambda seed=generation * 2 + k: writer(seed)) for k in range(2)], chance)
            for tag in tags:
                hit, value = tasks.read(tag)
                assert hit, "a kill in an overwrite lost the value"
                assert is_whole(tag, value)
        assert tasks.stats().damaged == 0
        assert tasks.write("after", 1)
        assert cache.check() == []


@pytest.mark.parametrize("size", [3 * KB, 300 * KB], ids=["a row", "a file"])
def test_s03_flipped_bytes_are_a_miss_and_run_again(root: Path, size: int) -> None:
    """After a reboot each value is checked before its first use; here the root is told that there was one."""
    log = root.parent / "log"

    def make(n: int) -> Any:
        note(log, n)
        return value_of("t", n, size)

    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        cached = cache.tasks("t").cached(tag="n-{n}")(make)
        cached(1)
        cached(2)
        key = cached.tag_of(1)
    damage(root, key)
    with forebay.Cache(root) as cache:
        tasks = cache.tasks("t")
        cached = tasks.cached(tag="n-{n}")(make)
        assert is_whole("t", cached(1))
        assert is_whole("t", cached(2))
        assert is_whole("t", cached(1))
        assert lines(log) == ["1", "2", "1"]
        assert cache.stats().damaged == 1


FILES = ["FORMAT", "catalog.sqlite", "shared/*", "counters", "blobs/*/*"]


@pytest.mark.rotates
@pytest.mark.parametrize("kind", FILES)
def test_s03_flipped_bytes_in_any_file_change_no_value(root: Path, tmp_path: Path, kind: str, children: Callable[..., Any]) -> None:
    """A flipped byte may cost a run, an entry, or the root: never a wrong value, and never an error of a call."""

    def make(n: int) -> Any:
        return value_of("t", n, SIZES[n % 4])

    def work() -> str:
        try:
            cache = forebay.Cache(root, budget=64 * MiB, min_free=0)
        except (errors.RootRefused, errors.NewerFormat):
            return "refused"  # a FORMAT that cannot be read: nothing is touched
        with cache:
            tasks = cache.tasks("t")
            cached = tasks.cached(tag="n-{n}")(make)
            for n in range(8):
                assert is_whole("t", cached(n))
                hit, value = tasks.read(cached.tag_of(n))
                assert not hit or is_whole("t", value)
            tasks.write("more", 1)
            return "used"

    children(work).result()
    saved = tmp_path / "saved"
    shutil.copytree(root, saved, symlinks=True)
    chance = random.Random(kind)
    for _ in range(4):
        for file in chance.sample(files := sorted(root.glob(kind)), min(len(files), 4)):
            if file.stat().st_size:
                flip(file, chance)
        found = children(work).result()
        shutil.rmtree(root)
        shutil.copytree(saved, root, symlinks=True)
        assert found == "used" or kind == "FORMAT"


def flip(file: Path, chance: random.Random) -> None:
    """Change one byte where something is written."""
    data = bytearray(file.read_bytes())
    written = [i for i in range(len(data)) if data[i]] if len(data) <= 1 << 20 else [chance.randrange(len(data))]
    at = chance.choice(written or [0])
    data[at] ^= 1 << chance.randrange(8)
    mode = file.stat().st_mode
    file.chmod(0o600)
    file.write_bytes(data)
    file.chmod(mode)


def damage(root: Path, key: str) -> None:
    """Flip a byte in the middle of what a key has, in a root that nobody has open; it was written before the machine's last boot."""
    catalog = sqlite3.connect(root / "catalog.sqlite")
    catalog.execute("UPDATE entries SET boot = 'another'")
    (number, kind, suffix) = catalog.execute("SELECT id, kind, suffix FROM entries WHERE key = ?", (key,)).fetchone()
    if kind == "blob":
        file = root / f"blobs/{number & 0xFF:02x}/{number:016x}{suffix}"
        os.chmod(file, 0o600)
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        table, column = inline_place(catalog, number)
        (data,) = catalog.execute(f"SELECT {column} FROM {table} WHERE id = ?", (number,)).fetchone()
        half = len(data) // 2
        catalog.execute(f"UPDATE {table} SET {column} = ? WHERE id = ?", (data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :], number))
    catalog.commit()
    catalog.close()


def inline_place(catalog: sqlite3.Connection, number: int) -> tuple[str, str]:
    """Where the bytes of a small value lie."""
    for (table,) in catalog.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
        for _, column, kind, *_ in catalog.execute(f"PRAGMA table_info({table})").fetchall():
            columns = {row[1] for row in catalog.execute(f"PRAGMA table_info({table})")}
            if kind == "BLOB" and "id" in columns:
                found = catalog.execute(f"SELECT length({column}) FROM {table} WHERE id = ?", (number,)).fetchone()
                if found and (found[0] or 0) > 2 * KB:
                    return table, column
    raise AssertionError("no column has it")


# -- 4, 5, 34: one budget ----------------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_s04_the_budget_holds_at_every_moment(root: Path, children: Callable[..., Any]) -> None:
    """Six processes write and read; they are stopped again and again, and the disk is looked at."""
    budget = 3 * MiB
    with forebay.Cache(root, budget=8 * MiB, min_free=0) as cache:
        cache.tasks("t", budget=budget)

    def work(seed: int) -> int:
        mine, done = random.Random(seed), 0
        with forebay.Cache(root) as cache:
            tasks = cache.tasks("t")
            for _ in range(120):
                tag = f"tag-{mine.randrange(40)}"
                done += tasks.write(tag, value_of(tag, seed, mine.choice([1 * KB, 30 * KB, 100 * KB, 300 * KB])))
                hit, value = tasks.read(f"tag-{mine.randrange(40)}")
                assert not hit or is_whole(value["tag"], value)
        return done

    born = [children(lambda seed=seed: work(seed)) for seed in range(6)]
    highest = 0
    while any(_runs(child) for child in born):
        for child in filter(_runs, born):
            child.stop()
        highest = max(highest, usage(root / "blobs", root / "tmp"))
        for child in filter(_runs, born):
            child.signal(signal.SIGCONT)
        time.sleep(0.02)
    assert sum(child.result() for child in born) == 6 * 120
    with forebay.Cache(root) as cache:
        tasks = cache.tasks("t")
        assert tasks.budget == budget
        assert MiB < tasks.size_bytes() <= budget
        assert highest < 8 * MiB


def _runs(child: Any) -> bool:
    try:
        return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def test_s04_a_kilobyte_holds_two_values_of_400_characters(root: Path) -> None:
    """What counts are stored bytes: not blocks, not rows."""
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t", budget=1024)
        for tag in "abc":
            assert tasks.write(tag, tag * 400)
        assert tasks.keys() == ["b", "c"]
        assert 800 < tasks.size_bytes() <= 1024
        assert not tasks.write("large", "x" * 2000)
        assert tasks.keys() == ["b", "c"]
        assert len(list((root / "blobs").glob("*/*"))) == 0  # no file of their own


def test_s04_who_was_used_last_stays_also_after_a_restart(root: Path, run: Callable[..., Any]) -> None:
    script = """if True:
        import sys, forebay
        with forebay.Cache(sys.argv[1], min_free=0) as cache:
            tasks = cache.tasks("t", budget=10_000)
            for word in sys.argv[2:]:
                verb, tag = word.split("=")
                assert tasks.write(tag, "x" * 2_300) if verb == "write" else tasks.read(tag)[0]
            print(*tasks.keys())
        """
    assert run(script, root, "write=a", "write=b", "write=c", "write=d").stdout.split() == ["a", "b", "c", "d"]
    assert run(script, root, "read=a").stdout.split() == ["b", "c", "d", "a"]
    assert run(script, root, "write=e").stdout.split() == ["c", "d", "a", "e"]
    assert run(script, root, "read=c", "write=f").stdout.split() == ["a", "e", "c", "f"]


def test_s05_ranks_and_their_workers_share_one_limit(root: Path, children: Callable[..., Any]) -> None:
    """8 ranks with 4 workers each, all of whom say the limit."""

    def rank(number: int) -> None:
        from tests.processes import fork

        for child in [fork(lambda me=number * 4 + k: worker(me)) for k in range(4)]:
            child.result()

    def worker(me: int) -> None:
        with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
            tasks = cache.tasks("t", budget="2MiB")
            for i in range(6):
                assert tasks.write(f"{me}-{i}", bytes(50 * KB))

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    for child in [children(lambda number=number: rank(number)) for number in range(8)]:
        child.result(120)
    with forebay.Cache(root) as cache:
        assert MiB < cache.tasks("t").size_bytes() <= 2 * MiB


def test_s34_a_lower_budget_binds_what_is_there(root: Path) -> None:
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t", budget="8MiB")
        for i in range(20):
            assert tasks.write(str(i), bytes(300 * KB))
        assert tasks.read("0")[0]
    with forebay.Cache(root) as cache:
        tasks = cache.tasks("t", budget=1 * MiB)
        assert tasks.keys() == ["18", "19", "0"]
        assert cache.tasks("t").budget == MiB  # not said again: it stays


# -- 6, 8: one runs it -------------------------------------------------------------------------------------------------


def test_s06_of_32_processes_one_runs_it(root: Path, children: Callable[..., Any], barrier: Callable[[int], Any]) -> None:
    log, gate = root.parent / "log", barrier(32)

    def make(n: int) -> Any:
        note(log)
        time.sleep(0.2)
        return value_of("t", n, 300 * KB)

    def work() -> tuple[bool, int]:
        with forebay.Cache(root) as cache:
            tasks = cache.tasks("t")
            gate.wait(60)
            value = tasks.cached(make)(7)
            return is_whole("t", value), tasks.stats().runs

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    found = [child.result() for child in [children(work) for _ in range(32)]]
    assert all(whole for whole, _ in found)
    assert sum(runs for _, runs in found) == len(lines(log)) == 1


def test_s06_who_is_killed_is_followed(root: Path, children: Callable[..., Any], flag: Callable[[], Any]) -> None:
    runs, log = flag(), root.parent / "log"

    def make(slow: bool) -> int:
        note(log)
        if slow:
            runs.set()
            signal.pause()
        return 42

    def work(slow: bool) -> int:
        with forebay.Cache(root) as cache:
            return cache.tasks("t").cached(tag="one", ignore=("slow",))(make)(slow=slow)  # type: ignore[no-any-return]

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    first = children(lambda: work(True))
    assert runs.wait(60)
    others = [children(lambda: work(False)) for _ in range(3)]
    time.sleep(0.3)  # that they wait is likely; right it is either way
    first.signal(signal.SIGKILL)
    began = time.monotonic()
    assert [child.result() for child in others] == [42] * 3
    assert time.monotonic() - began < 20
    assert len(lines(log)) == 2


@pytest.mark.rotates
def test_s08_who_waits_says_for_whom(root: Path, children: Callable[..., Any], flag: Callable[[], Any], warnings: Any) -> None:
    runs, go_on = flag(), flag()

    def slow() -> int:
        runs.set()
        assert go_on.wait(60)
        return 1

    def first() -> int:
        with forebay.Cache(root) as cache:
            return cache.tasks("t").cached(tag="one")(slow)()  # type: ignore[no-any-return]

    def second() -> tuple[int, list[str]]:
        with warnings() as said, forebay.Cache(root) as cache:
            listener = threading.Thread(target=lambda: (until(lambda: bool(said)), go_on.set()))
            listener.start()
            found = cache.tasks("t").cached(tag="one")(slow)()
            listener.join()
            return found, said

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    holder = children(first)
    assert runs.wait(60)
    found, said = children(second).result()
    assert (found, holder.result()) == (1, 1)
    assert any(str(holder.pid) in text and "one" in text for text in said), said


# -- 13, 15: no room ---------------------------------------------------------------------------------------------------


def test_s13_a_full_disk(tmpfs: Callable[[str], Path], children: Callable[..., Any], warnings: Any) -> None:
    place = tmpfs("32m")

    def make(n: int) -> Any:
        return value_of("t", n, 900 * KB)

    def train() -> tuple[list[str], int]:
        with warnings() as said, forebay.Cache(place / "root", budget="1GiB", min_free=0) as cache:
            tasks = cache.tasks("t")
            cached = tasks.cached(make)
            for n in range(60):
                assert is_whole("t", cached(n))
                tasks.write(f"small-{n}", n)
            fill_the_disk(place)
            for n in range(60):
                assert is_whole("t", cached(n))
            (place / "others").unlink()
            assert is_whole("t", cached(100))
            assert is_whole("t", cached(100))
            assert cached.evict(100)
            return said, tasks.stats().runs

    said, runs = children(train).result(120)
    assert runs >= 61
    assert len(said) <= 4, said  # one of each kind
    with forebay.Cache(place / "root") as cache:
        assert cache.check(deep=True) == []


def test_s15_a_value_larger_than_the_budget(root: Path, warnings: Any) -> None:
    with warnings() as said, forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t", budget=MiB)
        for i in range(5):
            assert tasks.write(str(i), bytes(150 * KB))
        made = tasks.cached(tag="large-{n}")(lambda n: bytes(2 * MiB))
        for _ in range(3):
            assert made(1) == bytes(2 * MiB)
            assert not tasks.write("too large", bytes(2 * MiB))
        assert tasks.keys() == ["0", "1", "2", "3", "4"]
        assert tasks.stats().store_failures == 6
    assert len(said) == 2, said  # one a name
    for text in said:
        assert re.search(r"2[.,]0|2[.,]1|2[ ,]?097", text), text  # its size
        assert re.search(r"1[.,]0|1[ ,]?048", text), text  # the limit


# -- 19, 20: to be seen ------------------------------------------------------------------------------------------------


def test_s19_seen_and_removed_from_the_shell(root: Path, command: Callable[..., Any], disk_usage: Callable[[Path], int]) -> None:
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t", budget="32MiB")
        assert tasks.write("small", 1)
        assert tasks.write("iter 1/é", bytes(200 * KB), pin=True)
        for i in range(3):
            assert tasks.write(f"iter-{i}", value_of("x", i, 100 * KB))
        # while it is open here
        listed = {entry["key"]: entry for entry in json.loads(command("ls", "-C", root, "--space", "t", "--json").stdout)}
        assert sorted(listed) == sorted(tasks.keys())
        assert listed["iter 1/é"]["life"] == "pinned"
        assert 200 * KB <= listed["iter 1/é"]["size"] < 210 * KB
        assert sum(entry["size"] for entry in listed.values()) == tasks.size_bytes()
        table = command("ls", "-C", root).stdout
        assert re.search(r"pinned +t:iter 1/é$", table, re.MULTILINE)
        assert command("ls", "-C", root, "-q", "t:iter-").stdout.split() == ["t:iter-0", "t:iter-1", "t:iter-2"]
        du = json.loads(command("du", "-C", root, "--json").stdout)
        assert "t" in str(du)
        blocks = sum(entry["charge"] for entry in listed.values() if entry["kind"] == "blob")
        assert disk_usage(root / "blobs") == blocks
        assert command("rm", "-C", root, "t:iter-0", "t:small").returncode == 0
        assert not tasks.has("small")
        assert tasks.read("iter-0") == (False, None)
        assert command("pin", "-C", root, "t:iter-1").returncode == 0
        assert command("clear", "-C", root, "--space", "t", "--yes").returncode == 0
        assert sorted(tasks.keys()) == ["iter 1/é", "iter-1"]
        assert command("verify", "-C", root).returncode == 0
        assert command("unpin", "-C", root, "t:iter-1").returncode == 0
        assert tasks.flush() >= 1
        assert tasks.keys() == ["iter 1/é"]


def test_s20_the_counters_say_what_was_done(root: Path, children: Callable[..., Any], command: Callable[..., Any]) -> None:
    log = root.parent / "log"

    def make(n: int) -> int:
        note(log)
        return n * n

    def work(seed: int) -> forebay.tasks.TaskStats:
        with forebay.Cache(root) as cache:
            tasks = cache.tasks("t")
            cached = tasks.cached(make)
            for n in random.Random(seed).sample(range(30), 30):
                assert cached(n) == n * n
            assert tasks.read("nothing") == (False, None)
            return tasks.stats()

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    found = [child.result() for child in [children(lambda seed=seed: work(seed)) for seed in range(8)]]
    assert sum(stats.runs for stats in found) == len(lines(log)) == 30
    assert sum(stats.hits for stats in found) + sum(stats.waits for stats in found) >= 8 * 30 - 30
    for stats in found:
        assert stats.runs + stats.hits >= 30
        assert stats.store_failures == stats.damaged == stats.replays == 0
    with forebay.Cache(root) as cache:
        node = cache.stats()
        assert node.hits == sum(stats.hits + stats.waits for stats in found) or node.hits == sum(stats.hits for stats in found)
        assert node.misses == sum(stats.misses for stats in found)
        assert cache.tasks("t").stats().entries == 30
    shown = json.loads(command("stats", "-C", root, "--json").stdout)
    assert (shown["hits"], shown["misses"]) == (node.hits, node.misses)


def test_s29_what_a_function_raises_reaches_all_and_is_not_kept(
    root: Path, children: Callable[..., Any], barrier: Callable[[int], Any]
) -> None:
    log, gate = root.parent / "log", barrier(8)

    def make(n: int) -> int:
        note(log)
        time.sleep(0.3)
        raise KeyError(f"no such design: {n}")

    def work() -> tuple[str, str]:
        with forebay.Cache(root) as cache:
            cached = cache.tasks("t").cached(make)
            gate.wait(60)
            with pytest.raises(KeyError) as told:
                cached(1)
            return type(told.value).__name__, str(told.value)

    forebay.Cache(root, budget=64 * MiB, min_free=0).close()
    assert {child.result() for child in [children(work) for _ in range(8)]} == {("KeyError", "'no such design: 1'")}
    assert 1 <= len(lines(log)) < 8
    with forebay.Cache(root) as cache:
        tasks = cache.tasks("t")
        assert len(tasks) == 0
        assert tasks.cached(make).__wrapped__ is make
        for _ in range(2):
            with pytest.raises(KeyError):
                tasks.cached(make)(1)


# -- 32: nothing is executed -------------------------------------------------------------------------------------------


class Evil:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("size", [0, 50_000], ids=["a row", "a file"])
def test_s32_a_planted_pickle_is_not_loaded(root: Path, tmp_path: Path, command: Callable[..., Any], size: int) -> None:
    """By opening, listing, verifying, or a store of another codec, whatever the catalog says that it is."""
    pa = pytest.importorskip("pyarrow")
    good = {"numpy": np.zeros(1), "arrow": pa.table({"a": [1]}), "json": None, "raw": b""}
    marker = tmp_path / "executed"
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        evil = [Evil(str(marker)), bytes(size)]
        assert cache.tasks("t").write("framed", evil)
        for protocol in range(6):
            assert cache.space("t").put(f"bare {protocol}", pickle.dumps(evil, protocol))
        keys = cache.tasks("t").keys()
    for claimed in ("pickle", "numpy", "arrow", "json", "raw", ""):
        if claimed != "pickle":
            with sqlite3.connect(root / "catalog.sqlite") as catalog:
                assert catalog.execute("UPDATE entries SET meta = ?", (claimed,)).rowcount >= len(keys)
            catalog.close()
        with forebay.Cache(root) as cache:
            cache.entries()
            cache.stats()
            assert cache.check(deep=True) == []
            for codec, value in good.items():
                tasks = cache.tasks("t", codec=codec)
                cached = tasks.cached(tag="{tag}")(lambda tag, value=value: value)
                for key in [*keys, "bare 7"]:
                    tasks.has(key)
                    hit, _ = tasks.read(key)
                    assert not hit or codec == "raw"
                    cached(key)
            if claimed != "pickle":
                pickles = cache.tasks("t")
                assert [key for key in keys if pickles.read(key)[0]] == [], claimed
        if claimed in ("pickle", "numpy"):
            for words in (["ls", "--json"], ["verify"]):
                command(*words, "-C", root)
        assert not marker.exists()
        with forebay.Cache(root) as cache:  # what was damaged on the way is planted anew
            for key in keys:
                cache.tasks("t").evict(key)
            assert cache.tasks("t").write("framed", evil)
            for protocol in range(6):
                assert cache.space("t").put(f"bare {protocol}", pickle.dumps(evil, protocol))
    code = "import forebay, forebay.tasks, sys; forebay.Cache(sys.argv[1]).tasks('t').keys()"
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)
    assert not marker.exists()
    with forebay.Cache(root) as cache:  # it is a pickle indeed
        cache.tasks("t").read("framed")
    assert marker.exists()


# -- 33: opening -------------------------------------------------------------------------------------------------------


@pytest.mark.rotates
def test_s33_opening_costs_the_same_with_many(root: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    script = """if True:
        import sys, time, forebay.cache, forebay.tasks
        from forebay.cache import Cache
        times = []
        for _ in range(9):
            began = time.process_time()
            with Cache(sys.argv[1]) as cache:
                assert cache.tasks("t").read("0")[0]
                times.append(time.process_time() - began)
        print(times[0], min(times))
        """
    times = {}
    for count, place in ((1, tmp_path / "few"), (3_000, root)):
        with forebay.Cache(place, budget=64 * MiB, min_free=0) as cache:
            tasks = cache.tasks("t")
            for i in range(count):
                assert tasks.write(str(i), {"i": i})
        times[count] = [float(word) for word in run(script, place).stdout.split()]
    assert times[3_000][1] <= 2 * times[1][1] + 0.002
    assert times[3_000][0] <= 0.1  # of a processor, in a new process


# -- 35: keys ----------------------------------------------------------------------------------------------------------

TAGS = [
    "a", "A", "a/", "a ", " a", "a//", "a\n", "a\x00", "a:", ":a", "a:b", "a@1:b", "../a", "http://h/a", "https://h/a", "é", "e\u0301",
    "é" * 300, "é" * 301, "x" * 5000, "x" * 5001, "", "0", "00", "None", "\U0001f600",
]  # fmt: skip


def test_s35_tags_stay_apart(root: Path) -> None:
    assert unicodedata.normalize("NFC", TAGS[16]) == TAGS[15]
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks, others = cache.tasks("t"), cache.tasks("other")
        for i, tag in enumerate(TAGS):
            assert tasks.write(tag, i)
        assert [tasks.read(tag) for tag in TAGS] == [(True, i) for i in range(len(TAGS))]
        assert tasks.keys() == TAGS
        assert others.keys() == []
        one, two = (tasks.cached(tag="{tag}", version=version)(lambda tag, by=version: by) for version in ("1", "2"))
        for tag in TAGS:
            assert (one(tag), two(tag)) == ("1", "2")
        assert [tasks.read(one.tag_of(tag)) for tag in TAGS] == [(True, "1")] * len(TAGS)
        assert len({f.tag_of(tag) for tag in TAGS for f in (one, two)} | set(TAGS)) == 3 * len(TAGS)


STABLE = """if True:
    import dataclasses, datetime, decimal, enum, pathlib, sys
    import numpy as np
    import forebay
    class Kind(enum.Enum):
        FAST = 1
    @dataclasses.dataclass
    class Design:
        name: str
        parts: frozenset
        kind: Kind
    class Plain:
        def __init__(self): self.words = {"b", "a", "c"}
    cache = forebay.Cache(sys.argv[1], min_free=0)
    tasks = cache.tasks("t")
    @tasks.cached
    def f(*args, **kwargs):
        print("ran")
    arguments = (
        {"b", "a", "c"}, {"x": 1, "y": {"q", "p"}}, Design("d", frozenset({"u", "v"}), Kind.FAST), np.arange(10)[::2], 1.5, None,
        b"x", datetime.date(2026, 1, 2), decimal.Decimal("1.20"), pathlib.PurePosixPath("a/b"), Plain(), Kind, len,
        lambda n: n + 1, (1, [2, {3: 4}]),
    )
    f(*arguments, z=1, y={"n": 2, "m": {"k", "j"}})
    print(f.tag_of(*arguments, y={"m": {"j", "k"}, "n": 2}, z=1))
    """


def test_s35_a_call_is_the_same_in_every_process(root: Path, tmp_path: Path) -> None:
    """Whatever the hash seed, the working directory, the user and the environment."""
    said = []
    for number, seed in enumerate(("0", "1", "12345", "random")):
        elsewhere = tmp_path / str(number)
        elsewhere.mkdir()
        script = elsewhere / "flow.py"
        script.write_text(STABLE)
        how = {"PYTHONHASHSEED": seed, "HOME": str(elsewhere), "USER": f"u{number}", "LC_ALL": "C", "COLUMNS": str(80 + number)}
        done = subprocess.run(
            [sys.executable, str(script), str(root)], cwd=elsewhere, env={**os.environ, **how}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.split())
    assert said[0] == ["ran", said[0][1]]
    assert re.match(r"flow\.f#[0-9a-f]{16}:", said[0][1])
    assert said[1:] == [[said[0][1]]] * 3


def test_s35_a_tag_never_gives_another_calls_output(root: Path, warnings: Any) -> None:
    with warnings() as said, forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t")

        @tasks.cached(tag="step-{step}")
        def train(step: int, lr: float) -> tuple[int, float]:
            return step, lr

        for lr in (0.1, 0.2, 0.1, 0.3):
            assert train(1, lr) == (1, lr)
            assert train(1, lr) == (1, lr)
        assert tasks.stats().runs == 4
        assert len(tasks) == 1
    assert len(said) <= 1  # once a tag


# -- 36: a failed store ------------------------------------------------------------------------------------------------


def test_s36_what_cannot_be_stored_is_given_and_told(root: Path, warnings: Any) -> None:
    with warnings() as said, forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t")

        @tasks.cached
        def connect(n: int) -> Any:
            return threading.Lock()

        for n in (1, 1, 2):
            assert connect(n).acquire(blocking=False)
        stats = tasks.stats()
        assert (stats.store_failures, stats.runs, stats.entries) == (3, 3, 0)
        assert cache.stats().store_failures == 3
    assert len(said) == 1, said
    assert "connect" in said[0]
    assert "lock" in said[0]


def test_s36_no_limit_drops_in_silence(root: Path) -> None:
    """Without a budget of its own it has the cache's; what goes is counted."""
    with forebay.Cache(root, budget=2 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t")
        assert tasks.budget is None
        for i in range(40):
            assert tasks.write(str(i), bytes(100 * KB))
        assert cache.stats().evictions == 40 - len(tasks)


# -- 39: for each call and function ------------------------------------------------------------------------------------


def test_s39_by_call_and_by_configuration(root: Path, tmp_path: Path, command: Callable[..., Any]) -> None:
    (tmp_path / "said.txt").write_text("as it was recorded\n")
    (tmp_path / "flow.yaml").write_text(
        f"cache:\n  kept: true\n  some: {{cache: true, tags: ['iter-[0-9]+', last]}}\n  dear: {{cache: true, pin: true}}\n  idle: false\n"
        f"bypass:\n  told: {{bypass: true, data: {tmp_path}/said.txt}}\n  kept: {{bypass: true, tags: 'iter-9'}}\n"
    )
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t", config=tmp_path / "flow.yaml")
        ran: list[str] = []

        def function(name: str, **how: Any) -> Any:
            def body(tag: str) -> str:
                ran.append(f"{name} {tag}")
                return f"{name} {tag}"

            body.__name__ = body.__qualname__ = name
            return tasks.cached(tag="{tag}", **how)(body)

        tasks.set_provider("kept", lambda tag, data_path, *args, **kwargs: f"replayed {tag} {args[0]}")
        kept, some, dear, idle, other, told = (function(name) for name in ("kept", "some", "dear", "idle", "other", "told"))
        for tag in ("iter-1", "iter-1x", "last"):
            for task in (kept, some, dear, idle, other):
                for _ in range(2):
                    assert task(tag) == f"{task.__name__} {tag}"
        once, twice = ["kept iter-1", "kept iter-1x", "kept last", "some iter-1", "some last"], ["some iter-1x"]
        assert all(ran.count(text) == 1 for text in once)
        assert all(ran.count(text) == 2 for text in twice)
        assert all(ran.count(f"{name} {tag}") == 2 for name in ("idle", "other") for tag in ("iter-1", "iter-1x", "last"))
        assert kept("iter-9") == "replayed iter-9 iter-9"
        assert told("x") == "as it was recorded\n"
        assert tasks.stats().replays == 2
        assert kept.call_uncached("iter-1") == "kept iter-1"
        assert ran.count("kept iter-1") == 2
        assert kept.evict("iter-1")
        assert kept("iter-1") == "kept iter-1"
        assert ran.count("kept iter-1") == 3
        pinned = {entry["key"] for entry in json.loads(command("ls", "-C", root, "--filter", "life=pinned", "--json").stdout)}
        assert pinned == {dear.tag_of(tag) for tag in ("iter-1", "iter-1x", "last")}
        assert {entry.key for entry in cache.entries("t") if entry.life == "pinned"} == pinned


def test_s39_replayed_from_the_cache_if_it_is_there(root: Path) -> None:
    """CHIA's way: outputs are written as they come, and read by bypass only."""
    config = {"cache": {"simulate": True}, "bypass": {"simulate": {"bypass": True, "tags": ["iter.*"]}}}
    with forebay.Cache(root, budget=64 * MiB, min_free=0) as cache:
        tasks = cache.tasks("t", config=config)
        ran: list[str] = []

        @tasks.cached(tag="{tag}")
        def simulate(tag: str) -> str:
            ran.append(tag)
            return f"output of {tag}"

        tasks.set_provider("simulate", tasks.from_cache)
        with pytest.raises(KeyError, match="simulate"):
            simulate("iter-1")
        assert simulate("other") == "output of other"
        tasks.set_condition("simulate", tasks.if_cached)
        assert [simulate("iter-1") for _ in range(3)] == ["output of iter-1"] * 3
        assert ran == ["other", "iter-1"]
        assert tasks.stats().replays == 2
