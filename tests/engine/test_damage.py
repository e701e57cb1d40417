"""A damaged or lost catalog: the first call that meets it begins a new one and goes on, and what people set stands."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import logging
import os
import random
import shutil
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine import seeing
from forebay._engine.catalog import making, recovery, salvage
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Ballast
from forebay._engine.engine import recover_and_retry
from forebay._engine.files.layout import CatalogBroken, DiskFull, Root
from forebay._engine.index import settings
from forebay._engine.index.records import EntryIndex
from forebay._engine.index.settings import RootLimits, Settings, SpaceLimits
from forebay._engine.store import Store
from forebay._kernel import host, locks
from forebay._model import Policy
from forebay.testing import ScriptedServer
from tests.harness import MiB, assert_counted, assert_settled, audit, bytes_of, opened
from tests.processes import Gate, fork, in_child

BUDGET, QUOTA = 50 * MiB, 3 * MiB
PAGE = 4096


@pytest.fixture(scope="module")
def pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with something of everything, closed."""
    place = tmp_path_factory.mktemp("pattern") / "root"

    def make() -> None:
        with forebay.Cache(place, budget=BUDGET, min_free=0, max_entries=5000) as cache:
            own = cache.space("own", quota=QUOTA, policy="freeze")
            for n in range(150):
                assert cache.put(f"k{n}", bytes([n]) * (n * 10))
                assert own.put(f"o{n}", bytes([n]) * 50)
            for n in range(10):
                assert cache.put(f"b{n}", bytes([n]) * 30_000)

    in_child(make)
    return place


@pytest.fixture
def place(pattern: Path, quick_path: Path) -> Path:
    shutil.copytree(pattern, quick_path / "root")
    return quick_path / "root"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def behind_the_index(catalog: Path, script: str) -> None:
    """Change rows while SQLite does not know of the index of keys."""
    known = "SELECT type, name, tbl_name, rootpage, sql FROM sqlite_master WHERE name = 'entry_key'"
    forget = "PRAGMA writable_schema = ON; DELETE FROM sqlite_master WHERE name = 'entry_key'"
    with contextlib.closing(sqlite3.connect(catalog, isolation_level=None)) as con:
        index = con.execute(known).fetchone()
    for step in (forget, script):
        with contextlib.closing(sqlite3.connect(catalog, isolation_level=None)) as con:
            con.executescript(step)
    with contextlib.closing(sqlite3.connect(catalog, isolation_level=None)) as con:
        con.execute("PRAGMA writable_schema = ON")
        con.execute("INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", index)


SWAP_KEYS = """
    CREATE TEMP TABLE swapped AS SELECT a.id AS old, b.id AS new FROM entries a, entries b
        WHERE a.key IN ('k7', 'k8') AND b.key IN ('k7', 'k8') AND a.key != b.key;
    UPDATE entries SET id = -id WHERE id IN (SELECT old FROM swapped);
    UPDATE payloads SET id = -id WHERE id IN (SELECT old FROM swapped);
    UPDATE entries SET id = (SELECT new FROM swapped WHERE old = -id) WHERE id < 0;
    UPDATE payloads SET id = (SELECT new FROM swapped WHERE old = -id) WHERE id < 0"""


def harm(path: Path, how: str) -> None:
    """``how``: what is done, and where."""
    what, _, where = how.partition(" ")
    chance, size = random.Random(how), path.stat().st_size
    if what == "page":
        overwrite(path, int(where) * PAGE, chance.randbytes(PAGE))
    elif what == "zeros":
        overwrite(path, int(where) * PAGE, bytes(PAGE))
    elif what == "from-page":
        overwrite(path, int(where) * PAGE, chance.randbytes(20_000))
    elif what == "anywhere":
        for _ in range(20):
            overwrite(path, chance.randrange(size - 500), chance.randbytes(chance.choice([1, 16, 500])))
    elif what == "cut":
        os.truncate(path, int(size * float(where)))
    elif what == "header":
        overwrite(path, int(where), b"\xff\xff")
    elif what == "swapped":
        behind_the_index(path, SWAP_KEYS)  # the index leads from one key to the row of another
        (path.parent / "shared" / "keys").unlink()  # by which a first read would not ask the catalog
    else:
        path.unlink()


HARMS = [
    *(f"page {n}" for n in range(8)), *(f"zeros {n}" for n in range(4)), *(f"from-page {n}" for n in range(5)),
    *(f"anywhere {n}" for n in range(6)), "cut 0", "cut 0.01", "cut 0.5", "cut 0.97", "header 0", "header 16", "header 18", "header 44",
    "swapped keys", "deleted",
]  # fmt: skip


def use(place: Path, *, opens: bool = True) -> None:
    """What holds whatever was done to the catalog before."""
    with forebay.Cache(place) as cache:
        for n in range(150):
            assert cache.get(f"k{n}") in (None, bytes([n]) * (n * 10))
        for n in range(10):
            assert cache.get(f"b{n}") in (None, bytes([n]) * 30_000)
        for key, data in (("large", b"l" * 100_000), ("new", b"value")):
            assert cache.put(key, data)
            assert cache.get(key) == data
        assert cache.budget == BUDGET
        assert cache._store.spaces.limits_of("own").quota == QUOTA
        if cache.repair():
            assert cache.put("new", b"value")
        assert cache.check(deep=True) == []
    if opens:
        with forebay.Cache(place) as cache:
            assert cache.get("new") == b"value"
            assert cache.budget == BUDGET


@pytest.mark.rotates
@pytest.mark.parametrize("how", HARMS)
def test_the_first_call_that_meets_the_damage_goes_on(place: Path, how: str) -> None:
    harm(place / "catalog.sqlite", how)
    in_child(lambda: use(place))
    assert_settled(place, BUDGET)


@pytest.mark.parametrize("how", ["page 2", "from-page 3", "cut 0", "zeros 0", "header 0", "deleted"])
def test_damage_under_processes_that_have_it_open(place: Path, how: str) -> None:
    """Those that are attached, and one that comes: each puts and finds what it put, and the budget stands for all."""
    done, go = os.pipe(), os.pipe()

    def attached(number: int) -> int:
        with forebay.Cache(place) as cache:
            cache.put(f"mine{number}", b"before")
            os.write(done[1], b".")
            os.read(go[0], 1)
            for turn in range(3):
                assert cache.put(f"mine{number}", b"after %d" % turn)
                assert cache.get(f"mine{number}") == b"after %d" % turn
            assert cache.put(f"large{number}", bytes([number]) * 100_000)
            assert cache.get(f"large{number}") == bytes([number]) * 100_000
            return cache.budget

    children = [fork(lambda n=n: attached(n)) for n in range(3)]
    for _ in children:
        os.read(done[0], 1)
    harm(place / "catalog.sqlite", how)
    os.write(go[1], b"...")
    assert [child.result() for child in children] == [BUDGET] * 3
    in_child(lambda: use(place))
    for fd in (*done, *go):
        os.close(fd)


@pytest.mark.parametrize("size", [100, 30_000])
@pytest.mark.parametrize("reads", [0, 1, 3])
def test_what_a_process_knows_of_a_lost_catalog_is_not_served_beside_the_next_version(place: Path, size: int, reads: int) -> None:
    """It remembers an entry, or is led to it by the index of keys, and meets the loss by no call of its own."""
    with forebay.Cache(place) as cache:
        assert cache.put("mine", b"a" * size)
        for _ in range(reads):
            assert cache.get("mine") == b"a" * size

        def lose() -> None:
            (place / "catalog.sqlite").unlink()
            with forebay.Cache(place) as mine:
                assert mine.put("mine", b"b" * size)

        fork(lose).wait()
        assert cache.get("mine") == b"b" * size


@pytest.mark.parametrize("state", ["deleted", "empty", "zeros", "half"])
@pytest.mark.parametrize("name", ["head", "keys", "records-000", "cells"])
def test_the_first_opening_after_a_power_cut_makes_anew_what_it_tore(place: Path, name: str, state: str) -> None:
    path = place / "shared" / name
    size = path.stat().st_size
    if state == "deleted":
        path.unlink()
    elif state == "zeros":
        path.write_bytes(bytes(size))
    else:
        os.truncate(path, 0 if state == "empty" else size // 2)
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite", isolation_level=None)) as con:
        con.execute("UPDATE meta SET value = 'another' WHERE name = 'boot'")
    in_child(lambda: use(place))


def test_a_write_into_a_new_catalog_waits_until_the_records_of_the_lost_one_are_cleared(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P1 opens the new catalog, while another process writes / P1 puts a key that a record of the lost one has."""
    real, tries = recovery.reconcile, list[int]()

    def reconcile(catalog: Catalog, index: EntryIndex) -> int:
        tries.append(1)
        if len(tries) == 1:
            raise errors.WriterBusy("another process writes", waited=0.0, holder="")
        return real(catalog, index)

    with forebay.Cache(place) as cache:
        assert cache.put("mine", b"before")
        monkeypatch.setattr(recovery, "reconcile", reconcile)
        harm(place / "catalog.sqlite", "cut 0")
        assert cache.get("other") is None
        assert cache.put("mine", b"after")
        assert cache.get("mine") == b"after"
    assert len(tries) == 2


def test_a_catalog_that_lost_its_log_while_it_was_open_gives_no_id_a_second_time(place: Path, server: ScriptedServer) -> None:
    """SQLite goes on with what was copied into the database so far: rows are forgotten, whose files are there, and leased."""

    def content(number: int) -> bytes:
        return bytes([number]) * 20_000

    with forebay.Cache(place) as cache:
        for number in range(100):
            assert cache.put(f"n{number}", content(number))
        with cache.local(server.put("/leased", content(7))) as path:
            for ending in ("wal", "shm"):
                (place / f"catalog.sqlite-{ending}").unlink()
            for number in range(100, 250):
                assert cache.put(f"n{number}", content(number))
            assert Path(path).read_bytes() == content(7)
        assert all(cache.get(f"n{number}") == content(number) for number in range(100, 250))
        assert all(cache.get(f"n{number}") in (None, content(number)) for number in range(100))
        assert cache.check(deep=True) == []


def test_what_is_in_use_when_its_catalog_is_deleted_is_counted_and_goes_with_its_last_user(tmp_path: Path, server: ScriptedServer) -> None:
    place = tmp_path / "root"
    with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
        lease, samples = cache.local(server.put("/leased", bytes(MiB))), cache.samples("s", 100)
        for number in range(100):
            assert samples.put(number, os.urandom(10_000))
        before = audit(place).used
        for ending in ("", "-wal", "-shm"):
            (place / f"catalog.sqlite{ending}").unlink()
        assert cache.put("first", b"1")
        assert assert_counted(place, BUDGET).used > before - MiB // 2
        assert cache.check(deep=True) == []
        lease.close()
        assert samples.get(1) is None  # by the array of the new catalog
        cache.put("second", b"2" * 100_000)
        cache.put("third", b"3")
        assert assert_settled(place, BUDGET).used < MiB // 2
        assert cache.check(deep=True) == []


@pytest.mark.parametrize("spared", ["nothing", "meta"], ids=["unreadable at opening", "unreadable later"])
def test_the_second_that_met_the_damage_keeps_what_the_first_began(place: Path, monkeypatch: pytest.MonkeyPatch, spared: str) -> None:
    """P1 meets the damage / P2 meets it, begins a new catalog and stores into it / P1 comes to do the same.

    With meta readable P1 had a connection to the damaged catalog, and knows which file that was."""
    ready, damaged, began, go = gates = [Gate() for _ in range(4)]

    def second() -> None:
        with forebay.Cache(place) as cache:
            assert cache.get("k1") == bytes([1]) * 10
            ready.open()
            damaged.wait()
            rebuild = Catalog.rebuild

            def late(catalog: Catalog, why: str) -> None:
                monkeypatch.setattr(Catalog, "rebuild", rebuild)
                began.open()
                go.wait()
                rebuild(catalog, why)

            monkeypatch.setattr(Catalog, "rebuild", late)
            assert cache.put("second", b"too")
            assert cache.get("first") == b"stored"

    child = fork(second)
    ready.wait()
    catalog = place / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(catalog)) as con:
        pages = {page - 1 for (page,) in con.execute("SELECT rootpage FROM sqlite_master WHERE tbl_name = ?", [spared])}
    for page in set(range(1, catalog.stat().st_size // PAGE)) - pages:
        overwrite(catalog, page * PAGE, os.urandom(PAGE))
    damaged.open()
    began.wait()

    def first() -> bool:
        with forebay.Cache(place) as cache:
            return cache.put("first", b"stored")

    assert in_child(first)
    go.open()
    child.result()
    with forebay.Cache(place) as cache:
        assert (cache.get("first"), cache.get("second")) == (b"stored", b"too")
        assert cache.check() == []
    for gate in gates:
        gate.close()


@pytest.mark.parametrize("trouble", ["a damaged catalog", "a full disk"])
def test_an_opening_that_takes_two_tries_leaves_no_connection(place: Path, monkeypatch: pytest.MonkeyPatch, trouble: str) -> None:
    """One that nobody closes has its locks until the garbage collector comes, and loses them when another file is closed."""
    if trouble == "a damaged catalog":
        overwrite(place / "catalog.sqlite", PAGE, os.urandom((place / "catalog.sqlite").stat().st_size - PAGE))
    else:
        make, left = Ballast.make, [DiskFull("the first time")]

        def fail_once(ballast: Ballast) -> None:
            if left:
                raise left.pop()
            make(ballast)

        monkeypatch.setattr(Ballast, "make", fail_once)

    def work() -> list[str]:
        gc.disable()
        with forebay.Cache(place) as cache:
            assert cache.put("new", b"value")
        fds = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
        return [os.readlink(fd) for fd in fds if os.path.lexists(fd) and "catalog" in os.readlink(fd)]

    assert in_child(work) == []


@pytest.mark.parametrize("name", ["catalog.sqlite-wal", "catalog.sqlite-shm"])
def test_a_directory_in_the_place_of_the_log_of_a_lost_catalog(place: Path, name: str) -> None:
    (place / "catalog.sqlite").unlink()
    (place / name).unlink(missing_ok=True)
    (place / name).mkdir()

    def work() -> None:
        with forebay.Cache(place) as cache:
            assert cache.put("new", b"value")
            assert cache.budget == BUDGET

    in_child(work)


@pytest.mark.parametrize("size", [0, 47])
def test_a_pipe_for_a_log_and_an_index_that_was_cut(place: Path, size: int) -> None:
    os.mkfifo(place / "catalog.sqlite-wal")
    (place / "catalog.sqlite-shm").write_bytes(bytes(size))

    def work() -> None:
        with forebay.Cache(place) as cache:
            assert cache.put("new", b"value")
            assert cache.get("k1") == bytes([1]) * 10

    in_child(work)


def test_damage_is_met_in_the_middle_of_a_process(place: Path) -> None:
    """The damage comes while the process lives, and lies where it has not looked before."""

    def work() -> None:
        with forebay.Cache(place) as cache:
            assert cache.get("k1") == bytes([1]) * 10
            for page in range(1, 12):
                overwrite(place / "catalog.sqlite", page * PAGE, os.urandom(PAGE))
            for n in range(150):
                assert cache.get(f"k{n}") in (None, bytes([n]) * (n * 10))
            cache.entries()
            assert cache.put("new", b"value")
            assert cache.get("new") == b"value"
            assert cache.budget == BUDGET

    in_child(work)
    in_child(lambda: use(place))


def false_alarm(store: Store, times: int = 1) -> int:
    """A call that says so many times that the catalog is damaged; gives how often it was tried."""
    tries = []

    @recover_and_retry
    def call(self: Store) -> int:
        tries.append(True)
        if len(tries) <= times:
            raise CatalogBroken("what is said to be damage", damaged=True)
        return len(tries)

    return call(store)


def test_what_only_a_call_says_is_no_damage(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    """However often it says so: two checks find nothing, the call fails, and nothing is lost. It is checked once a minute."""
    with forebay.Cache(place) as cache:
        store = cache._store
        assert isinstance(store, Store)
        for _ in range(3):
            assert false_alarm(store) == 2
            with pytest.raises(errors.CacheFault, match="said to be damage") as found:
                false_alarm(store, 3)
            assert not isinstance(found.value, CatalogBroken)
        assert cache.get("k3") == bytes([3]) * 30
        assert cache.repair() == []
    assert caplog.text.count("nothing is wrong with") == 1
    assert not (place / "catalog.damaged.sqlite").exists()


def test_a_text_that_is_too_long_is_no_damage(place: Path) -> None:
    """It would be met twice by the call that has it, and cost the catalog."""
    with opened(place) as store:
        with store.engine.parts.catalog._mutex:
            store.engine.parts.catalog._connection_locked().setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)
        with pytest.raises(errors.CacheFault, match="TOOBIG") as found:
            store.put("values", "k" * 200_000, b"x")
        assert not isinstance(found.value, CatalogBroken)
        assert bytes_of(store, "k3", "values") == bytes([3]) * 30


# -- what is kept ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rich_pattern(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with values, pins, files, a tree and samples, closed."""
    place = tmp_path_factory.mktemp("rich") / "root"

    def make() -> None:
        with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
            for n in range(400):
                assert cache.put(f"k{n}", bytes([n % 256]) * (n + 1))
            for n in range(10):
                assert cache.put(f"b{n}", bytes([n]) * 30_000)
            for n in range(0, 400, 10):
                cache.pin(f"values:k{n}")
            cache.pin("values:b3")
            with cache.samples("array", 100) as samples:
                samples.get_or_put_many(range(50), lambda some: [b"%d" % i * 100 for i in some])
            store = cache._store
            assert isinstance(store, Store)
            leases = [lease for n in range(3) if (lease := store.lease("values", f"b{n}")) is not None]
            store.publish_tree("trees", "t", [(f"d/{n}", lease) for n, lease in enumerate(leases)]).close()
            for lease in leases:
                lease.close()

    in_child(make)
    return place


@pytest.fixture
def rich(rich_pattern: Path, quick_path: Path) -> Path:
    subprocess.run(["cp", "-a", rich_pattern, quick_path / "root"], check=True)  # with the links of trees
    return quick_path / "root"


def root_page(catalog: Path, name: str) -> int:
    with contextlib.closing(sqlite3.connect(catalog)) as con:
        ((page,),) = con.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [name])
    return int(page) - 1


def leaves_of(catalog: Path, name: str) -> list[int]:
    """The pages below the first page of a table or an index, in order."""
    root = root_page(catalog, name)
    page = catalog.read_bytes()[root * PAGE : (root + 1) * PAGE]
    assert page[0] in (2, 5), "it has no pages below"
    cells = struct.unpack_from(f">{int.from_bytes(page[3:5])}H", page, 12)
    return [int.from_bytes(page[at : at + 4]) - 1 for at in (*cells, 8)]


def misplace(catalog: Path, name: str, how: str) -> None:
    """Write the last page of rows but one in the place of the last, and if ``how`` is "swapped", that one in its place."""
    data, (*_, one, other) = catalog.read_bytes(), leaves_of(catalog, name)
    overwrite(catalog, other * PAGE, data[one * PAGE : (one + 1) * PAGE])
    if how == "swapped":
        overwrite(catalog, one * PAGE, data[other * PAGE : (other + 1) * PAGE])


def leaf_with(catalog: Path, text: bytes) -> int:
    """The page of rows, not of an index, that has this text."""
    data = catalog.read_bytes()
    (page,) = (n for n in range(1, len(data) // PAGE) if data[n * PAGE] == 13 and text in data[n * PAGE : (n + 1) * PAGE])
    return page


def what_is_there(cache: forebay.Cache) -> dict[str, Any]:
    """Of everything in the rich root what is there, and right."""
    store = cache._store
    assert isinstance(store, Store)
    values = {n for n in range(400) if (found := cache.get(f"k{n}")) is not None and found == bytes([n % 256]) * (n + 1)}
    files = {n for n in range(10) if cache.get(f"b{n}") == bytes([n]) * 30_000}
    pins = {entry.key for entry in cache.entries() if entry.life == "pinned"}
    with cache.samples("array", 100) as samples:
        made = {i for i in range(50) if samples.get(i) == b"%d" % i * 100}
    tree = store.lease("trees", "t")
    names = sorted(os.listdir(Path(tree) / "d")) if tree is not None else []
    return {"values": values, "files": files, "pins": pins, "samples": made, "tree": names}


ALL = {
    "values": set(range(400)), "files": set(range(10)), "pins": {*(f"k{n}" for n in range(0, 400, 10)), "b3"}, "samples": set(range(50)),
    "tree": ["0", "1", "2"],
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "meta", "spaces", "sqlite_autoindex_spaces_1", "entry_key", "entry_superseded", "entry_held", "links", "link_member",
        "reservations", "reservation_key", "segments", "segment_open", "failures", "counters", "entries",
        "payloads",
    ],
)  # fmt: skip
def test_what_lies_beside_the_damage_stays(rich: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    """The first page of a table or an index is garbage: all that others have, or that pages below it have, is kept, under its id, and no
    id is given again."""
    catalog = rich / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(catalog)) as con:
        before = dict(con.execute("SELECT key, id FROM entries"))
    overwrite(catalog, root_page(catalog, name) * PAGE, random.Random(name).randbytes(PAGE))
    expected = dict(ALL)
    if name == "links":
        expected["tree"] = []

    def work() -> None:
        with forebay.Cache(rich) as cache:
            cache.repair()
            assert what_is_there(cache) == expected
            assert cache.put("new", b"value")
            after = {entry.key: entry.id for entry in cache.entries()}
            assert after.pop("new") > max(before.values())
            assert {key: before[key] for key in after} == after
            assert cache.check(deep=True) == []
        with forebay.Cache(rich) as cache:
            assert what_is_there(cache) == expected
            assert cache.check(deep=True) == []

    in_child(work)
    assert_settled(rich, BUDGET)


@pytest.mark.rotates
@pytest.mark.parametrize("first", range(8))
def test_one_page_of_garbage_costs_what_lies_in_it(rich_pattern: Path, quick_path: Path, first: int) -> None:
    """Each page of the catalog in turn, an eighth of them in one test: nothing wrong is served, and most is kept."""
    place = quick_path / "root"

    def work(page: int) -> None:
        with forebay.Cache(place) as cache:
            cache.repair()
            there = what_is_there(cache)
            for n in range(400):
                assert cache.get(f"k{n}") in (None, bytes([n % 256]) * (n + 1))
            assert len(there["values"]) > 300  # one page has 76 of the smallest
            assert len(there["pins"]) >= 30
            assert len(there["files"]) in (0, 10)  # their rows lie in one page or two
            assert cache.check(deep=True) == []

    for page in range(first, (rich_pattern / "catalog.sqlite").stat().st_size // PAGE, 8):
        subprocess.run(["rm", "-rf", place], check=True)
        subprocess.run(["cp", "-a", rich_pattern, place], check=True)
        overwrite(place / "catalog.sqlite", page * PAGE, random.Random(page).randbytes(PAGE))
        in_child(lambda page=page: work(page))


@pytest.mark.parametrize("name", ["entries", "payloads"])
def test_what_stands_in_the_log_alone_is_kept_with_what_lies_below_garbage(rich: Path, quick_path: Path, name: str) -> None:
    """And what was deleted or replaced, whose rows and files may still be somewhere, is not served again."""
    place = quick_path / "copy"
    evicted = {n for n in range(100, 200) if n % 10}  # the others are pinned

    def change() -> None:
        with forebay.Cache(rich) as cache:
            for n in range(3):
                assert cache.put(f"new{n}", b"%d" % n * 2000)
                assert cache.put(f"k{200 + n}", b"replaced")
            for n in evicted:
                cache.evict(f"values:k{n}")
            subprocess.run(["cp", "-a", rich, place], check=True)

    def work() -> None:
        with forebay.Cache(place) as cache:
            cache.repair()
            assert [cache.get(f"new{n}") for n in range(3)] == [b"%d" % n * 2000 for n in range(3)]
            assert [cache.get(f"k{n}") for n in range(200, 203)] == [b"replaced"] * 3
            assert what_is_there(cache)["values"] == ALL["values"] - evicted - {200, 201, 202}
            assert cache.check(deep=True) == []

    in_child(change)
    assert (place / "catalog.sqlite-wal").stat().st_size > 0
    catalog = place / "catalog.sqlite"
    overwrite(catalog, root_page(rich / "catalog.sqlite", name) * PAGE, os.urandom(PAGE))
    in_child(work)


def test_two_rows_of_one_id_are_one_entry(rich: Path) -> None:
    """Garbage may look like a leaf of entries, whose rows are there twice then: the other one stays."""
    catalog = rich / "catalog.sqlite"
    data = catalog.read_bytes()
    one, other = leaf_with(catalog, b"k51value"), leaf_with(catalog, b"k251value")
    overwrite(catalog, other * PAGE, data[one * PAGE : (one + 1) * PAGE])
    overwrite(catalog, root_page(catalog, "entries") * PAGE, bytes(PAGE))

    def work() -> None:
        with forebay.Cache(rich) as cache:
            cache.repair()
            there = what_is_there(cache)
            assert 51 in there["values"]
            assert len(there["values"]) > 340
            assert cache.check(deep=True) == []

    in_child(work)


@pytest.mark.parametrize("shared", ["kept", "lost"])
@pytest.mark.parametrize("how", ["swapped", "repeated"])
def test_pages_of_rows_that_are_not_in_order(rich: Path, how: str, shared: str) -> None:
    """A walk through the rows ends, and each row that is there once is kept."""
    misplace(rich / "catalog.sqlite", "entries", how)
    if shared == "lost":  # so that the first opening compares rows and records
        shutil.rmtree(rich / "shared")

    def work() -> None:
        with forebay.Cache(rich) as cache:
            if shared == "kept":
                cache.repair()
            there = what_is_there(cache)
            assert there == ALL if how == "swapped" else len(there["values"]) > 300
            assert cache.check(deep=True) == []

    in_child(work)
    assert_settled(rich, BUDGET)


def test_no_file_is_removed_whose_row_is_not_found(rich: Path) -> None:
    misplace(rich / "catalog.sqlite", "entries", "swapped")

    def work() -> None:
        with forebay.Cache(rich) as cache:
            cache.prune().execute()
            assert what_is_there(cache) == ALL

    in_child(work)


def test_a_listing_ends_where_an_index_leads_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To rows that make no sense, and have keys before those that the index has."""
    monkeypatch.setattr(seeing, "ENTRIES_PER_PAGE", 10)
    behind_the_index(place / "catalog.sqlite", "UPDATE entries SET slot = -7, key = 'a' || key WHERE key > 'k5'")
    (place / "shared" / "keys").unlink()
    with forebay.Cache(place, read_only=True) as cache, pytest.raises(errors.CacheFault, match="not in order"):
        list(cache.entries().names())


@pytest.mark.parametrize("state", ["closed", "open"])
@pytest.mark.parametrize("trouble", ["a damaged catalog", "a full disk"])
def test_what_is_met_while_the_files_of_processes_are_made_anew(
    rich: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, trouble: str, state: str
) -> None:
    """The epoch begins with them, and reads the whole catalog: the first call goes on all the same."""
    real, left = recovery.reconcile, [DiskFull("the first time")]

    def fail_once(catalog: Catalog, index: EntryIndex) -> int:
        if left:
            raise left.pop()
        return real(catalog, index)

    def harm() -> None:
        if trouble == "a damaged catalog":
            overwrite(rich / "catalog.sqlite", root_page(rich / "catalog.sqlite", "entries") * PAGE, os.urandom(PAGE))
        else:
            monkeypatch.setattr(recovery, "reconcile", fail_once)
        shutil.rmtree(rich / "shared")

    if state == "closed":
        harm()
    with forebay.Cache(rich) as cache:
        if state == "open":
            assert cache.put("before", b"value")
            harm()
        assert cache.put("new", b"value")
        assert what_is_there(cache) == ALL
        assert cache.check(deep=True) == []
    assert "reading past it" not in caplog.text


@pytest.mark.parametrize("how", ["page 0", "zeros 0", "header 0", "header 16", "header 44", "header 100", "header 105"])
def test_where_the_first_page_is_garbage_all_others_are_read(rich: Path, how: str) -> None:
    harm(rich / "catalog.sqlite", how)

    def work() -> None:
        with forebay.Cache(rich) as cache:
            cache.repair()
            assert what_is_there(cache) == ALL
            assert cache.check(deep=True) == []

    in_child(work)
    assert_settled(rich, BUDGET)


def test_garbage_below_the_pages_that_sqlite_remembers_is_found_by_the_next_write(rich: Path) -> None:
    """It does not read its first page again while no other process writes."""

    def work() -> None:
        with forebay.Cache(rich) as cache:
            assert cache.put("k0", b"\0")
            cache._store.engine.parts.catalog._bound_log()
            assert cache.put("k0", b"\0")
            for size in (2 * PAGE, PAGE, 2 * PAGE):
                overwrite(rich / "catalog.sqlite", 0, os.urandom(size))
                assert cache.put("k0", b"\0")
                assert cache.check(deep=True) == []
            assert what_is_there(cache) == ALL

    in_child(work)
    assert_settled(rich, BUDGET)


def test_sqlite_writes_a_first_page_anew_that_the_log_has(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 makes that page as of the size of the file / P2 copies the log into it / T1 writes the page: pages of P2 are beyond its end."""
    monkeypatch.setattr(making, "mend_first_page", lambda *_: pytest.fail("written past SQLite"))

    def work() -> None:
        with forebay.Cache(rich) as cache:
            for number in range(3):
                with cache._store.engine.parts.catalog.write() as txn:
                    txn.con.execute(f"PRAGMA user_version = {number + 5}")  # the log has the page
                overwrite(rich / "catalog.sqlite", 0, os.urandom(PAGE))
                assert cache.put("k0", b"\0")
                assert (rich / "catalog.sqlite").read_bytes().startswith(b"SQLite format 3\0")
            assert cache.check(deep=True) == []
            assert what_is_there(cache) == ALL

    in_child(work)
    assert_settled(rich, BUDGET)


def test_a_first_page_is_written_anew_beside_a_reader_who_stands_still(rich: Path) -> None:
    """SQLite copies no page from the log that the reader may still need from the file."""
    with contextlib.closing(sqlite3.connect(rich / "catalog.sqlite", isolation_level=None)) as reader, forebay.Cache(rich) as cache:
        assert cache.put("k0", b"\0")
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM entries").fetchall()
        assert cache.put("k0", b"\0")
        overwrite(rich / "catalog.sqlite", 0, os.urandom(PAGE))
        assert cache.put("k0", b"\0")
        assert (rich / "catalog.sqlite").read_bytes().startswith(b"SQLite format 3\0")
        reader.execute("COMMIT")
        assert what_is_there(cache) == ALL
        assert cache.check(deep=True) == []


def test_a_first_page_that_is_made_anew_says_nothing_of_the_size(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T1 makes that page / P2 closes the catalog, and copies its log into the file, which grows / T1 writes the page."""
    overwrite(rich / "catalog.sqlite", 0, os.urandom(PAGE))
    grown, pwrite = list[bool](), host.pwrite

    def grow_first(fd: int, data: bytes, offset: int) -> None:
        if not grown and os.path.samestat(os.fstat(fd), (rich / "catalog.sqlite").stat()):
            grown.append(True)
            with (rich / "catalog.sqlite").open("ab") as file:
                file.write(bytes(100 * PAGE))
        pwrite(fd, data, offset)

    with forebay.Cache(rich) as cache:
        monkeypatch.setattr(host, "pwrite", grow_first)
        cache.repair()
        monkeypatch.setattr(host, "pwrite", pwrite)
        with contextlib.closing(sqlite3.connect(rich / "catalog.sqlite")) as con:
            assert con.execute("PRAGMA page_count").fetchone()[0] * PAGE == (rich / "catalog.sqlite").stat().st_size
        assert what_is_there(cache) == ALL
        assert grown


@pytest.mark.parametrize("kind", ["rows of entries", "values"])
def test_one_warning_says_how_many_entries_were_kept_and_lost(rich: Path, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    catalog = rich / "catalog.sqlite"
    with contextlib.closing(sqlite3.connect(catalog)) as con:
        ((count,),) = con.execute("SELECT count(*) FROM entries")
    text = b"k251value" if kind == "rows of entries" else bytes([251]) * 252
    overwrite(catalog, leaf_with(catalog, text) * PAGE, bytes(PAGE))
    with said(caplog) as words, forebay.Cache(rich) as cache:
        cache.repair()
        there = what_is_there(cache)
        kept = len(cache.entries())
    assert 251 not in there["values"]
    assert 350 < len(there["values"]) < 400
    assert {**ALL, "values": there["values"], "pins": there["pins"]} == there
    assert there["pins"] == {name for name in ALL["pins"] if name == "b3" or int(name[1:]) in there["values"]}
    (word,) = (word for word in words if "was replaced" in word)
    assert f"kept: {kept:,}, lost with their pins: {count - kept:,};" in word
    assert "budget 52.4 MB" in word


def test_an_entry_whose_file_is_gone_or_cut_is_lost_with_the_damage(rich: Path, caplog: pytest.LogCaptureFixture) -> None:
    store: Store
    with opened(rich) as store:
        paths = {entry.key: store.root.blob(entry.id, entry.suffix) for entry in store.seeing.entries("values") if entry.kind == "blob"}
    paths["b5"].unlink()
    paths["b6"].chmod(0o600)
    os.truncate(paths["b6"], 7)
    overwrite(rich / "catalog.sqlite", root_page(rich / "catalog.sqlite", "failures") * PAGE, bytes(PAGE))
    with said(caplog) as words, forebay.Cache(rich) as cache:
        cache.repair()
        assert what_is_there(cache) == {**ALL, "files": set(range(10)) - {5, 6}}
        assert cache.check(deep=True) == []
    assert any("lost with their pins: 2;" in word for word in words)


def test_the_last_damaged_catalog_is_set_aside_until_it_is_pruned(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog, aside = rich / "catalog.sqlite", rich / "catalog.damaged.sqlite"
    for name in ("failures", "counters"):
        overwrite(catalog, root_page(catalog, name) * PAGE, name.encode() * (PAGE // len(name)))
        with forebay.Cache(rich) as cache:
            cache.repair()
            assert name.encode() * 100 in aside.read_bytes()
            strays = cache.strays()
            assert strays.files >= 1
            assert strays.bytes >= aside.stat().st_blocks * 512
            assert what_is_there(cache) == ALL
            assert cache.check(deep=True) == []
    assert b"failures" * 100 not in aside.read_bytes()
    with forebay.Cache(rich) as cache:
        cache.prune().execute()
        assert list(rich.glob("catalog.damaged*")) == []
        assert cache.strays().files == 0
        monkeypatch.setattr(making, "SET_ASIDE", PAGE)
        overwrite(catalog, root_page(catalog, "segments") * PAGE, bytes(PAGE))
        cache.repair()
        assert what_is_there(cache) == ALL
        assert list(rich.glob("catalog.damaged*")) == [], "it would not be counted"


def test_where_nothing_can_be_written_of_what_is_kept_the_cache_begins_anew(rich: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(salvage, "salvage", fail)
    overwrite(rich / "catalog.sqlite", root_page(rich / "catalog.sqlite", "failures") * PAGE, bytes(PAGE))
    with forebay.Cache(rich) as cache:
        cache.repair()
        assert len(cache.entries()) == 0
        assert cache.put("new", b"value")
        assert cache.check(deep=True) == []


# -- what people set ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def said(caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    caplog.clear()
    words: list[str] = []
    with caplog.at_level(logging.WARNING, "forebay"):
        yield words
    words += [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("how", ["cut 0", "from-page 3", "deleted"])
def test_a_warning_says_what_was_lost_and_what_stays(place: Path, caplog: pytest.LogCaptureFixture, how: str) -> None:
    harm(place / "catalog.sqlite", how)
    with said(caplog) as words, forebay.Cache(place) as cache:
        assert len(cache.entries()) == 0  # a hit alone would not ask the catalog
        assert (cache.budget, cache.get("k3")) == (BUDGET, None)
    (word,) = words
    assert "fetched again" in word
    assert "budget 52.4 MB" in word
    assert "own" in word


@pytest.mark.parametrize("rest", ["with its head", "without its head", "without its catalog"])
@pytest.mark.parametrize("state", ["deleted", "empty", "damaged", "another root's", "a directory", "a link", "a pipe"])
def test_where_the_file_is_lost_the_head_has_the_limits_of_the_root(
    place: Path, caplog: pytest.LogCaptureFixture, state: str, rest: str
) -> None:
    path = place / "settings.json"
    body = json.loads(path.read_text())
    path.unlink()
    if state == "empty":
        path.touch()
    elif state == "damaged":
        path.write_text(json.dumps({**body, "budget": 7}))
    elif state == "another root's":
        path.write_text(json.dumps({**body, "root": "0" * 16}))
    elif state == "a directory":
        path.mkdir()
    elif state == "a link":
        (place.parent / "elsewhere").write_text(json.dumps(body))
        path.symlink_to(place.parent / "elsewhere")
    elif state == "a pipe":
        os.mkfifo(path)
    if rest == "without its catalog":
        harm(place / "catalog.sqlite", "cut 0")
    elif rest == "without its head":
        (place / "shared" / "head").unlink()
    with said(caplog) as words, forebay.Cache(place) as cache:
        assert (cache.budget == BUDGET) == (rest != "without its head")
        assert cache.budget != 7
        assert cache.put("x", b"y")
    assert any("set it by Cache(budget=...)" in word for word in words) == (rest == "without its head")
    assert any("settings.json was lost or damaged" in word for word in words) == (rest != "without its head")


def test_nothing_is_lost_where_another_process_uses_a_root_that_this_one_creates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stores something between the setting of the limits and the look whether there was anything without limits."""
    real, others = settings.SharedSettings.set, list[bool]()

    def other() -> None:
        with forebay.Cache(tmp_path / "new") as cache:
            cache.put("k", b"v")

    def set_and_wait(self: settings.SharedSettings, given: Settings) -> tuple[RootLimits, RootLimits]:
        before_and_after = real(self, given)
        if not others:
            others.append(True)
            in_child(other)
        return before_and_after

    monkeypatch.setattr(settings.SharedSettings, "set", set_and_wait)
    with said(caplog) as words, forebay.Cache(tmp_path / "new", budget=BUDGET) as cache:
        assert bytes(cache.get("k") or b"") == b"v"
    assert [word for word in words if "set it by" in word] == []


def kept(root: Root) -> RootLimits:
    there = settings.read(root)
    assert there is not None
    return there[1]


def test_a_file_that_is_lost_comes_again(place: Path) -> None:
    root = Root(place, int((place / "FORMAT").read_text().split()[2], 16))
    assert kept(root) == RootLimits(BUDGET, 0, 5000, spaces={"own": SpaceLimits(Policy.FREEZE, QUOTA)})
    for harmed in (None, "", "{}", "[" * 100_000, '{"root": 3}'):
        root.settings.unlink() if harmed is None else root.settings.write_text(harmed)
        with forebay.Cache(place) as cache:
            assert cache.budget == BUDGET
        assert kept(root) == RootLimits(BUDGET, 0, 5000)


def test_each_change_is_kept(quick_path: Path) -> None:
    place = quick_path / "root"
    with forebay.Cache(place, budget=8 * MiB, min_free=0) as cache:
        root = cache._store.root  # type: ignore[union-attr]
        assert kept(root) == RootLimits(8 * MiB, 0)
        cache.space("a", quota=MiB, policy="wait")
        cache.space("plain")
        with forebay.Cache(place, budget=9 * MiB, max_entries=100):
            pass
        cache.space("a", quota=2 * MiB)
        assert kept(root) == RootLimits(9 * MiB, 0, 100, spaces={"a": SpaceLimits(Policy.WAIT, 2 * MiB)})
    os.truncate(place / "catalog.sqlite", 0)
    with forebay.Cache(place, min_free=MiB) as cache:
        assert cache.budget == 9 * MiB
        for n in range(101):
            cache.put(str(n), b"x")
        assert len(cache.entries()) == 100
        assert kept(root) == RootLimits(9 * MiB, MiB, 100, spaces={"a": SpaceLimits(Policy.WAIT, 2 * MiB)})


def test_what_others_set_is_in_force_at_the_next_call(place: Path) -> None:
    def lower() -> None:
        with forebay.Cache(place, budget=2 * MiB, max_rate=1000) as cache:
            cache.space("own", quota=MiB)

    with opened(place) as store:
        in_child(lower)
        assert store.spaces.root_limits()["budget"] == store.seeing.usage().budget == 2 * MiB
        assert store.engine.limits.in_force() == (1000, 0)
        assert store.spaces.limits_of("own") == SpaceLimits(Policy.FREEZE, MiB)
        with pytest.raises(errors.NoSpace):
            store.put("own", "large", bytes(MiB + 1))


@pytest.mark.parametrize("change", [Settings(budget=9 * MiB), SpaceLimits(quota=MiB)], ids=["of the root", "of a space"])
def test_a_process_that_is_killed_while_it_sets_a_limit(place: Path, kill_at: Callable[..., bool], change: Settings | SpaceLimits) -> None:
    """All of the change is there or nothing, for every process, once another one has opened the root."""

    def set_it() -> None:
        with opened(place) as store:
            if isinstance(change, Settings):
                store.configure(change)
            else:
                store.spaces.ensure("own", quota=change.quota)

    with opened(place) as store:
        step, before, root = 0, store.engine.settings.limits(), store.root
        changed = before._replace(budget=9 * MiB) if isinstance(change, Settings) else before
        changed = changed if isinstance(change, Settings) else before._replace(spaces={"own": SpaceLimits(Policy.FREEZE, MiB)})
        while kill_at(step, set_it):
            with forebay.Cache(place):
                pass
            assert store.engine.settings.limits() == kept(root) in (before, changed)
            assert store.engine.settings.is_shared()
            store.configure(Settings(budget=BUDGET))
            store.spaces.ensure("own", quota=QUOTA)
            step += 1
        assert store.engine.settings.limits() == changed
        assert step > 5


def test_a_limit_that_cannot_be_written_applies_to_its_process(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "the disk is full")

    with opened(place) as store:
        with monkeypatch.context() as patch:
            patch.setattr(Root, "replace", refuse)
            assert not store.configure(Settings(budget=9 * MiB))
            assert store.seeing.usage().budget == 9 * MiB
        assert kept(store.root).budget == BUDGET
        assert store.configure(Settings(budget=9 * MiB))
        assert kept(store.root).budget == 9 * MiB


@pytest.mark.parametrize("without_file", [False, True])
@pytest.mark.parametrize("limit", [1 << 62, sys.maxsize, 1 << 63, 1 << 70])
def test_a_limit_that_is_no_limit_is_one_for_every_process(place: Path, limit: int, without_file: bool) -> None:
    with opened(place, limit) as store:
        store.spaces.ensure("new\nline", quota=limit)
        assert store.seeing.usage().budget == min(limit, sys.maxsize)
    if without_file:
        (place / "settings.json").unlink()

    def young() -> None:
        with opened(place) as store:
            assert store.seeing.usage().budget == min(limit, sys.maxsize)
            assert store.spaces.limits_of("new\nline").quota == (None if without_file else min(limit, sys.maxsize))
            store.put("new\nline", "k", b"x")

    in_child(young)


def test_a_stopped_process_that_sets_a_limit_delays_another_for_a_moment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "PATIENCE", 0.0)
    other = locks.LockFile(place / "FORMAT")
    with opened(place) as store:
        assert other.try_lock(1, exclusive=True)
        assert not store.configure(Settings(budget=9 * MiB))
        other.close()
        assert store.configure(Settings(budget=9 * MiB))


def test_what_is_invalid_is_left_out(tmp_path: Path) -> None:
    root = Root(tmp_path, 5)
    spaces = [
        {"name": "good", "policy": "lru", "quota": 5}, {"policy": "lru"}, {"name": ["list"], "policy": "lru"},
        {"name": "odd", "policy": "boil", "quota": -5, "max_count": 1 << 70}, {"name": 7, "policy": "lru"},
    ]  # fmt: skip
    for wrong in (-1, 1 << 70, "5", True, 1.5, None, [5]):
        body = {"root": f"{5:016x}", "version": wrong, "budget": wrong, "max_rate": wrong, "spaces": spaces}
        root.settings.write_text(json.dumps({**body, "checksum": settings._checksum(body)}))
        assert settings.read(root) == (0, RootLimits(spaces={"good": SpaceLimits(Policy.LRU, 5), "odd": SpaceLimits()}))
    assert settings.read(Root(tmp_path, 6)) is None


# -- FORMAT ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [b"", bytes(27)])
@pytest.mark.parametrize("lost", [[], ["shared/head"], ["shared/head", "catalog.sqlite"]])
def test_an_empty_format_is_written_anew(place: Path, left: bytes, lost: list[str]) -> None:
    """What is left knows the root: nothing is lost with the id."""
    (place / "FORMAT").write_bytes(left)
    for name in lost:
        (place / name).unlink()

    def read_back() -> tuple[Any, ...]:
        with forebay.Cache(place) as cache:
            found = cache.get("k3")
            assert cache.put("n", b"v")
            return found and bytes(found), cache._store.root.id  # type: ignore[union-attr]

    found = [child.result() for child in [fork(read_back) for _ in range(3)]]
    assert len({id for _, id in found}) == 1
    if "catalog.sqlite" not in lost:
        assert [value for value, _ in found] == [bytes([3]) * 30] * 3
        in_child(lambda: use(place))


def test_an_empty_format_among_other_peoples_files_is_refused(quick_path: Path) -> None:
    (quick_path / "thesis.tex").touch()
    (quick_path / "FORMAT").touch()
    with pytest.raises(errors.RootRefused, match="thesis"):
        forebay.Cache(quick_path)
    assert (quick_path / "FORMAT").read_bytes() == b""


@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a link"])
def test_a_format_that_is_no_file_is_refused(place: Path, kind: str) -> None:
    path = place / "FORMAT"
    make: dict[str, Callable[[], object]] = {
        "a pipe": lambda: os.mkfifo(path), "a directory": path.mkdir, "a link": lambda: path.symlink_to("CACHEDIR.TAG"),
    }  # fmt: skip
    path.unlink()
    make[kind]()
    for read_only in (True, False):
        with pytest.raises(errors.RootRefused, match="not a plain file"):
            forebay.Cache(place, read_only=read_only)


# -- who looks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["from-page 3", "page 1"])
def test_a_check_tells_and_does_not_mend(place: Path, how: str) -> None:
    """Where the catalog can be opened, and where it cannot."""
    with forebay.Cache(place) as cache:
        harm(place / "catalog.sqlite", how)
        for _ in range(2):
            assert [problem.kind for problem in cache.check()] == ["catalog"]
        mended = cache.repair()
        assert mended[0].kind == "catalog"
        assert cache.check(deep=True) == []
        assert cache.budget == BUDGET


@pytest.mark.parametrize(
    "sql",
    [
        "DROP INDEX entry_key", "DROP INDEX entry_key; CREATE INDEX entry_key ON entries(space, key)", "DROP TABLE failures",
        "CREATE TRIGGER theirs AFTER DELETE ON entries BEGIN DELETE FROM payloads; END", "ALTER TABLE links RENAME COLUMN name TO path",
    ],
)  # fmt: skip
def test_a_check_sees_a_table_or_an_index_that_is_not_ours(place: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con:
        con.executescript(sql)
    with forebay.Cache(place) as cache:
        (problem,) = cache.check()
        assert problem.kind == "catalog"
        assert "not those of Forebay" in problem.found
        cache.repair()
        assert cache.check(deep=True) == []
        assert cache.put("k1", b"another")
        assert cache.get("k1") == b"another"


def test_a_check_sees_that_an_index_lacks_a_row(place: Path) -> None:
    """As if an older copy of the catalog had been put beside a newer log: each page is sound."""
    behind_the_index(place / "catalog.sqlite", "UPDATE entries SET key = 'another' WHERE key = 'k7'")
    with forebay.Cache(place) as cache:
        assert [problem.kind for problem in cache.check()] == ["catalog"]
        cache.repair()
        assert cache.check(deep=True) == []


def test_a_read_only_root_without_a_catalog_gets_none(place: Path) -> None:
    (place / "catalog.sqlite").unlink()
    with forebay.Cache(place, read_only=True) as cache:
        assert cache.get("k1") is None
    assert not (place / "catalog.sqlite").exists()
