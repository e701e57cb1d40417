"""What lies in the place of a root's own files and is none, or is lost: nobody hangs, nothing bare is raised, what can be is made anew."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._engine import check
from forebay._engine.catalog import connection, recovery
from forebay._engine.index import records
from forebay._engine.store import Settings, Store
from tests.harness import MiB, assert_settled, bytes_of, opened
from tests.processes import Gate, fork, in_child

BUDGET = 8 * MiB
VERIFY = [sys.executable, "-m", "forebay.cli", "verify", "--repair"]


def socket_at(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


THINGS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a socket": socket_at,
    "a link": lambda path: path.symlink_to("/dev/null"),
}
PLACES = [
    "locks/keys", "locks/writer", "locks/owners", "locks/leases-07", "locks/words", "shared/head", "counters", "settings.json",
    "catalog.sqlite", "catalog.sqlite-wal", "catalog.sqlite-shm", "catalog.sqlite-journal", "catalog.ballast", "blob", "index", "segment",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, quick_path: Path) -> Path:
    place = quick_path / "root"

    def make() -> None:
        with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
            cache.put("k", b"value")
            cache.put("large", b"l" * 100_000)
            with cache.samples("pack", 4) as samples:
                samples.put(0, b"sample" * 100)

    in_child(make)
    return place


def path_of(place: Path, name: str) -> Path:
    if name == "blob":
        return next((place / "blobs").glob("*/*"))
    if name in ("index", "segment"):
        (pack,) = (place / "packs").iterdir()
        return pack / "index" if name == "index" else next(pack.glob("0*"))
    return place / name


def use(place: Path) -> bool:
    """All calls, in a process of its own; whether what is put is kept."""
    try:
        cache = forebay.Cache(place)
    except errors.RootRefused as error:
        if "remove it" not in str(error):
            raise
        return False
    with cache:
        assert cache.get("k") in (None, b"value")
        assert cache.get("large") in (None, b"l" * 100_000)
        kept = cache.put("new", b"new") and cache.put("new large", bytes(50_000))
        assert not kept or (cache.get("new"), cache.get("new large")) == (b"new", bytes(50_000))
        with cache.samples("pack", 4) as samples:
            assert samples.get(0) in (None, b"sample" * 100)
            samples.put(1, b"other")
        cache.stats()
        can_look = contextlib.nullcontext() if kept else contextlib.suppress(errors.CacheFault)  # else it says so
        with can_look:
            cache.entries()
            cache.prune().execute()
        with forebay.Cache(place, read_only=True) as looking:
            looking.get("k")
            looking.stats()
            with can_look:
                looking.entries()
        return kept


def value_of(place: Path) -> bytes | None:
    with forebay.Cache(place) as cache:
        found = cache.get("k")
        return found and bytes(found)


@pytest.mark.rotates
@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("name", PLACES)
def test_what_is_no_file_hangs_nobody(place: Path, name: str, thing: str) -> None:
    path = path_of(place, name)
    path.unlink(missing_ok=True)
    THINGS[thing](path)
    if name.startswith("catalog.sqlite-"):
        assert in_child(lambda: value_of(place)) == b"value"
    kept = in_child(lambda: use(place))
    mended = {
        "shared/head",
        "counters",
        "settings.json",
        "blob",
        "index",
        "segment",
        *(f"catalog.sqlite-{end}" for end in ("wal", "shm", "journal")),
    }
    if name in mended or (thing, name) == ("a directory", "catalog.sqlite"):
        assert kept
    if kept and thing == "a pipe":
        assert in_child(lambda: use(place))


def few_slots() -> None:
    """Files of records that are full after 64 entries; for this process."""
    records.RECORDS = recovery.RECORDS = check.RECORDS = 64


@pytest.mark.parametrize("lost", ["records-001", "head records-000 records-001 records-002", "cut", "another's"])
def test_a_lost_part_of_the_slots_is_made_anew_of_the_catalog(quick_path: Path, lost: str) -> None:
    place = quick_path / "root"

    def fill() -> None:
        few_slots()
        with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
            for n in range(180):
                assert cache.put(f"k{n}", bytes([n]) * 20_000)

    def go_on() -> None:
        few_slots()
        with forebay.Cache(place) as looking:
            kinds = {problem.kind for problem in looking.check()}
        assert "slots" in kinds or "head" in lost  # which is made anew at opening
        with forebay.Cache(place) as cache:
            for n in range(180):
                assert cache.get(f"k{n}") == bytes([n]) * 20_000
            for n in range(180, 500):
                assert cache.put(f"k{n}", bytes([n % 256]) * 20_000)  # it is full: each evicts
                assert cache.get(f"k{n}") == bytes([n % 256]) * 20_000
            assert cache.check(deep=True) == []

    def mend() -> None:
        few_slots()
        with forebay.Cache(place) as cache:
            assert [problem.kind for problem in cache.repair()][:1] == ["slots"]
            assert cache.check(deep=True) == []
            assert len(cache.prune().victims) == 0
            assert len(cache.clear().execute().removed) == 180

    in_child(fill)
    if lost == "cut":
        os.truncate(place / "shared" / "records-001", 4096)
    elif lost == "another's":
        with open(place / "shared" / "records-001", "r+b") as file:
            file.seek(8)
            file.write(bytes(8))
    else:
        for name in lost.split():
            (place / "shared" / name).unlink()
    if lost == "records-001":
        shutil.copytree(place, quick_path / "copy")
    in_child(go_on)
    assert_settled(place, BUDGET)
    if lost == "records-001":
        place = quick_path / "copy"
        in_child(mend)
        assert_settled(place, BUDGET)


def test_a_process_that_has_the_lost_slots_goes_over_to_the_new_ones(quick_path: Path) -> None:
    """P1 has the table mapped / it is deleted / P2 makes it anew, and replaces what P1 knows / P1 writes: it sees what P2 did."""
    place = quick_path / "root"
    done, go = os.pipe(), os.pipe()

    def attached() -> None:
        with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
            cache.put("k", b"old" * 10_000)
            assert cache.get("k") == b"old" * 10_000
            os.write(done[1], b".")
            os.read(go[0], 1)
            assert cache.put("mine", b"mine")
            assert cache.get("k") == b"new" * 10_000
            assert cache.check(deep=True) == []

    def other() -> None:
        with forebay.Cache(place) as cache:
            assert cache.put("k", b"new" * 10_000)

    child = fork(attached)
    os.read(done[0], 1)
    shutil.rmtree(place / "shared")
    in_child(other)
    os.write(go[1], b".")
    child.result()
    for fd in (*done, *go):
        os.close(fd)


@pytest.mark.parametrize("told", [False, True])
def test_what_lies_where_the_next_part_of_the_slots_will_be_is_no_obstacle(quick_path: Path, told: bool) -> None:
    place = quick_path / "root"

    def put(first: int, end: int) -> None:
        few_slots()
        with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
            for n in range(first, end):
                assert cache.put(f"k{n}", bytes([n]) * 100)
                assert cache.get(f"k{n}") == bytes([n]) * 100

    def mend() -> None:
        few_slots()
        with forebay.Cache(place) as cache:
            assert cache.check(deep=True) == []
            assert cache.repair() == []

    in_child(lambda: put(0, 60))
    (place / "shared" / "records-001").write_text("junk")
    if told:
        in_child(mend)
    in_child(lambda: put(60, 130))
    assert {name for name in os.listdir(place / "shared") if "records" in name} == {f"records-00{n}" for n in range(3)}
    assert_settled(place, BUDGET)


@pytest.mark.parametrize("read_only", [False, True])
def test_a_process_that_only_reads_goes_over_to_the_new_slots(quick_path: Path, read_only: bool) -> None:
    """P1 remembers what it read / the table is deleted / P2 makes it anew, and replaces that / P1 reads on, and never writes."""
    place, said, go = quick_path / "root", Gate(), Gate()

    def writes() -> None:
        with opened(place, BUDGET) as store:
            for value in (b"old", b"new"):
                store.put("v", "k", value)
                said.open()
                go.wait()

    child = fork(writes)
    said.wait()
    store = Store.open(place, Settings(), read_only=read_only)
    assert bytes_of(store, "k") == b"old"
    (place / "shared" / "head").unlink()
    go.open()
    said.wait()
    store.engine.memo.window = 0, 0, 0  # a second has passed
    assert bytes_of(store, "k") == b"new"
    assert [entry.key for entry in store.seeing.entries("v")] == ["k"]
    store.close()
    go.open()
    child.result()
    said.close()
    go.close()


def test_a_process_that_only_writes_goes_over_to_the_new_slots(quick_path: Path) -> None:
    """P1 has the table mapped / it is deleted / P2 makes it anew, and remembers what it reads / P1 replaces that / P2 reads it."""
    place, ready, go = quick_path / "root", Gate(), Gate()

    def writes() -> None:
        with opened(place, BUDGET) as store:
            store.put("v", "k", b"old")
            ready.open()
            go.wait()
            store.put("v", "k", b"new")

    child = fork(writes)
    ready.wait()
    (place / "shared" / "head").unlink()
    with opened(place) as store:
        assert bytes_of(store, "k") == b"old"
        go.open()
        child.result()
        assert bytes_of(store, "k") == b"new"
    ready.close()
    go.close()


@pytest.mark.parametrize("harm", ["emptied", "odd size", "garbage"])
def test_damaged_counters_are_no_fault(place: Path, harm: str) -> None:
    path = place / "counters"

    def hit_and_die() -> None:
        with forebay.Cache(place) as cache:
            cache.get("large")
            os.kill(os.getpid(), signal.SIGKILL)

    fork(hit_and_die).wait()
    if harm == "garbage":  # the owner's id stays: the page is taken for his
        overwritten = bytearray(path.read_bytes())
        overwritten[128:4096] = b"\xff" * (4096 - 128)
        path.write_bytes(overwritten)
    else:
        os.truncate(path, 0 if harm == "emptied" else 5000)

    def work() -> None:
        with forebay.Cache(place) as cache:
            assert cache.get("large") is not None
            assert 1 <= cache.stats().hits < 100
            cache.reset_stats()
            assert cache.put("x", b"y")

    in_child(work)
    in_child(lambda: use(place))


# -- beside the catalog ------------------------------------------------------------------------------------------------


def plant_journal(place: Path, victim: Path) -> None:
    """A rollback journal that names a file which SQLite removes once it has played it back."""
    name, magic = os.fsencode(victim), bytes.fromhex("d9d505f920a163d7")
    head = magic + struct.pack(">IIIII", 0, 0, (place / "catalog.sqlite").stat().st_size // 4096, 512, 4096)
    tail = struct.pack(">I", 0x40000000 // 4096 + 1) + name + struct.pack(">II", len(name), sum(name)) + magic
    (place / "catalog.sqlite-journal").write_bytes(head.ljust(512, b"\0") + tail)


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    found = tmp_path / "theirs.txt"
    found.write_bytes(b"theirs")
    return found


@pytest.mark.parametrize("attached", [False, True])
def test_a_rollback_journal_is_never_played_back(place: Path, victim: Path, attached: bool) -> None:
    with forebay.Cache(place) if attached else contextlib.nullcontext():
        plant_journal(place, victim)
        assert in_child(lambda: use(place))
    assert victim.exists()
    assert not (place / "catalog.sqlite-journal").exists()


def test_nor_one_that_comes_a_moment_later(place: Path, victim: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 finds none / P2 puts one there / P1 opens the catalog."""
    opened = connection.Catalog._opened
    planted: list[str] = []

    def one_comes(self: connection.Catalog, how: str) -> sqlite3.Connection:
        if not planted:
            plant_journal(place, victim)
            planted.append(how)
        return opened(self, how)

    def work() -> bool:
        monkeypatch.setattr(connection.Catalog, "_opened", one_comes)
        return use(place)

    assert in_child(lambda: (work(), planted)) == (True, ["mode=rw"])
    assert victim.exists()
    assert in_child(lambda: use(place))
    assert not (place / "catalog.sqlite-journal").exists()


def test_who_only_looks_plays_none_back_and_says_so(place: Path, victim: Path) -> None:
    here, on = Gate(), Gate()

    def attached() -> None:
        with forebay.Cache(place) as cache:
            cache.put("other", b"x")  # so that there is a log
            here.open()
            on.wait()

    child = fork(attached)
    here.wait()
    plant_journal(place, victim)
    with pytest.raises(errors.CacheFault, match=r"catalog\.sqlite-journal is not Forebay's"):
        Store.open(place, Settings(), read_only=True)
    on.open()
    child.result()
    assert victim.exists()
    assert (place / "catalog.sqlite-journal").exists()


@pytest.mark.parametrize("how", ["by its header", "by a program"])
def test_a_log_that_was_taken_away_comes_again(place: Path, how: str) -> None:
    """And nothing is lost, whoever of several is first."""
    if how == "by a program":
        with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con:
            assert con.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
    else:
        with open(place / "catalog.sqlite", "r+b") as file:
            file.seek(18)
            file.write(b"\x01\x01")

    def looks() -> None:
        with forebay.Cache(place, read_only=True) as cache:
            assert cache.get("k") == b"value"
            assert cache.check(deep=True) == []

    def works() -> None:
        with forebay.Cache(place) as cache:
            assert cache.get("k") == b"value"
            assert cache.get("large") == b"l" * 100_000
            assert cache.put(str(os.getpid()), b"new")
            assert cache.check(deep=True) == []

    in_child(looks)
    for child in [fork(works) for _ in range(3)]:
        child.result()
    in_child(looks)


@pytest.mark.parametrize("thing", THINGS)
@pytest.mark.parametrize("ending", ["-wal", "-shm"])
def test_what_takes_the_place_of_the_log_under_a_process_that_has_it_open(place: Path, ending: str, thing: str) -> None:
    with forebay.Cache(place) as cache:
        assert cache.put("mine", b"mine")
        path = Path(f"{place}/catalog.sqlite{ending}")
        path.unlink()
        THINGS[thing](path)
        assert in_child(lambda: use(place))
        assert cache.put("after", b"after")
        assert (cache.get("after"), cache.get("new")) == (b"after", b"new")
    assert in_child(lambda: use(place))


def test_somebodys_directory_in_the_place_of_the_log_stays(place: Path) -> None:
    (place / "catalog.sqlite-wal").mkdir()
    (place / "catalog.sqlite-wal" / "theirs").write_bytes(b"theirs")
    assert not in_child(lambda: use(place))
    assert (place / "catalog.sqlite-wal" / "theirs").read_bytes() == b"theirs"


@pytest.mark.parametrize("name", ["shared/head", "catalog.sqlite"])
def test_an_empty_directory_in_the_place_of_a_file_goes_and_a_full_one_is_named(place: Path, name: str) -> None:
    (place / name).unlink()
    (place / name / "theirs").mkdir(parents=True)
    found = subprocess.run([*VERIFY, "--root", str(place)], capture_output=True, text=True)
    assert found.returncode == 1
    assert f"{place / name}: a directory is in the way: remove it" in " ".join(found.stderr.split())
    assert (place / name / "theirs").is_dir()
    (place / name / "theirs").rmdir()
    assert in_child(lambda: use(place))
    assert (place / name).is_file()
    in_child(lambda: assert_settled(place, BUDGET))
