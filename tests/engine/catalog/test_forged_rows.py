"""Whoever can write to a root can write to its catalog: what stands there leads to no file outside, and to no error of ours."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Cache, errors
from forebay._engine import seeing
from forebay._engine.catalog import transactions
from forebay._engine.files import root
from forebay._engine.files.layout import CatalogBroken
from forebay._engine.store import Store
from forebay._model import ObjectInfo
from tests.harness import KiB, MiB, assert_settled, opened
from tests.processes import in_child

BUDGET = 4 * MiB
LEAD_OUT = "/../../../../outside/theirs"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A root, and beside it a file that is none of its business."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "theirs").write_bytes(b"theirs")
    return tmp_path / "root"


def forge(place: Path, sql: str, *values: Any) -> None:
    with contextlib.closing(sqlite3.connect(place / "catalog.sqlite")) as con, con:
        con.execute(sql, values)


def fill(store: Store, count: int = 6, size: int = 300 * KiB) -> None:
    for number in range(count):
        with store.writing("urls", f"k{number}", suffix=".bin", resume=False) as writing:
            writing.begin(ObjectInfo("", size))
            writing.write(0, bytes([number]) * size)
            writing.publish()


def make_a_way_out(place: Path) -> None:
    """The directory that the forged name leads through: anybody who may write here can make it."""
    for id, suffix in sqlite3.connect(place / "catalog.sqlite").execute("SELECT id, suffix FROM entries WHERE suffix LIKE '%..%'"):
        (place / f"blobs/{id & 0xFF:02x}/{id:016x}").mkdir(exist_ok=True)
        assert os.path.exists(f"{place}/blobs/{id & 0xFF:02x}/{id:016x}{suffix}")


ROWS = {
    "a suffix that leads out": ("UPDATE entries SET suffix = ?", LEAD_OUT),
    "a suffix of a removed entry": ("UPDATE entries SET state = 2, suffix = ?", LEAD_OUT),
    "a suffix with a slash": ("UPDATE entries SET suffix = '/x'",),
    "a suffix that is no text": ("UPDATE entries SET suffix = x'00ff'",),
    "a suffix that is not UTF-8": ("UPDATE entries SET suffix = CAST(x'ff2e' AS TEXT)",),
    "a kind that is none": ("UPDATE entries SET kind = 'directory'",),
    "a slot that is none": ("UPDATE entries SET slot = 'first' WHERE key = 'k0'",),
    "a slot below 0": ("UPDATE entries SET slot = -7 WHERE key = 'k0'",),
    "a size that is none": ("UPDATE entries SET size = 'much'",),
    "a size below 0": ("UPDATE entries SET size = -1, charge = -5000000",),
    "an id below 0": ("UPDATE entries SET id = -id",),
    "a key that is no text": ("UPDATE entries SET key = x'ff' || id",),
}


@pytest.mark.parametrize("what", ROWS)
def test_a_forged_row_is_set_aside(place: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    in_child(lambda: _with(place, fill))
    forge(place, *ROWS[what])
    make_a_way_out(place)
    with opened(place, BUDGET) as store, caplog.at_level(logging.WARNING):
        for number in range(6):
            found = store.view("urls", f"k{number}")
            assert found is None or bytes(found.view) == bytes([number]) * (300 * KiB)
        store.seeing.entries()
        with contextlib.suppress(Exception):
            store.lease("urls", "k1")
        store.put("values", "small", b"small")
        try:
            fill(store, 20)  # more than fits: everything that can go goes
        except CatalogBroken as error:  # it cannot tell what is taken: the fronts open it anew
            store.engine.reopen(error, store.engine.recoveries)
            fill(store, 20)
        assert bytes(store.view("urls", "k19").view) == bytes([19]) * (300 * KiB)  # type: ignore[union-attr]
        store.repair()
    assert (place.parent / "outside" / "theirs").read_bytes() == b"theirs"
    told = [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]
    assert told
    assert len(told) == len(set(told))  # once each
    assert "Traceback" not in caplog.text
    in_child(lambda: assert_settled(place, BUDGET))


def _with(place: Path, act: Callable[[Store], object]) -> None:
    with opened(place, BUDGET) as store:
        act(store)


FIRST = {
    "slots that are none": "slot = -7",
    "keys that are bytes": "key = CAST(key AS BLOB)",
    "keys that are no text": "key = CAST(x'30ff' AS TEXT) || key",
}


@pytest.mark.parametrize("read_only", [False, True])
@pytest.mark.parametrize("what", FIRST)
def test_a_page_of_damaged_rows_hides_nothing_behind_it(
    place: Path, what: str, read_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(seeing, "ENTRIES_PER_PAGE", 4)
    in_child(lambda: _with(place, lambda store: store.put_many("v", [(f"k{n:02d}", b"x") for n in range(40)])))
    forge(place, f"UPDATE entries SET {FIRST[what]} WHERE key < 'k13' OR key BETWEEN 'k20' AND 'k31' OR key > 'k35'")
    sound = [f"k{n:02d}" for n in (*range(13, 20), *range(32, 36))]
    if read_only:
        in_child(lambda: _with(place, lambda store: None))  # its clean-up is done
    found = Cache(place, read_only=True) if read_only else Cache(place)
    with found as cache:
        assert [entry.key for entry in cache.entries().by_name()] == sound
        for backwards in (False, True):
            for names in (
                list(cache.entries().names(backwards=backwards)),
                [entry.name for entry in cache.entries().by_name(backwards=backwards)],
                [facts[0] for facts in cache.entries().facts(backwards=backwards)],
            ):
                assert [name.removeprefix("v:") for name in names] == sound[:: -1 if backwards else 1]
        assert sorted(cache._store.seeing.keys("v")) == sound


def test_no_row_of_ours_is_in_doubt(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    with opened(place, BUDGET) as store:
        fill(store, 20)
        store.put("values", "small", b"small")
        lease = store.lease("urls", "k19")
        assert lease is not None
        store.publish_tree("directories", "d", [("inner/file", lease)]).close()
        lease.close()
        pack = store.packs.make("arrays", "a", 10)
        pack.put(3, lambda value: [value], b"x" * 5000)
        in_child(lambda: _with(place, lambda store: store.put("values", "other", b"other")))
        assert store.check(deep=True) == []
        pack.close()
        del pack
    assert "set aside" not in caplog.text


@pytest.mark.parametrize(
    "row",
    [
        "(77, NULL, '', 1, 'k', 77, 4096, 4096, ?, 0, 1)",
        "(77, NULL, '', 1, 'k', 'there', 4096, 4096, '', 0, 1)",
        "(77, NULL, '', 1, 'k', -9, 4096, 4096, '', 0, 1)",
        "(77, NULL, '', 1, 'k', 77, 'all', 4096, '', 0, 1)",
        "(77, NULL, '', 1, 'k', 77, 4096, 4096, '', 'never', 1)",
        "(77, -7, 'w', 1, 'k', 77, 4096, 4096, '', 0, 1)",
        "(77, 1 << 62, 'w', 1, 'k', 77, 4096, 4096, '', 0, 1)",
        "(77, 'me', 'w', 1, 'k', 77, 4096, 4096, '', 0, 1)",
        "(-5, -7, 'w', 1, 'k', 77, 4096, 4096, '', 0, 1)",
    ],
)
def test_a_forged_reservation_is_set_aside(place: Path, row: str) -> None:
    in_child(lambda: _with(place, lambda store: fill(store, 2)))
    forge(place, f"INSERT INTO reservations VALUES {row}", *([LEAD_OUT] if "?" in row else []))
    (place / "blobs/4d/000000000000004d").mkdir()
    with opened(place, BUDGET) as store:
        assert "row" in {problem.kind for problem in store.check()}
        fill(store, 20)
        store.repair()
    assert (place.parent / "outside" / "theirs").read_bytes() == b"theirs"
    in_child(lambda: assert_settled(place, BUDGET))


@pytest.mark.parametrize("name", ["../../../outside/theirs", "/etc/hostname", "a//b", "", "a/./b", "x\0y"])
def test_the_name_of_a_file_in_a_tree_leads_not_out_of_it(place: Path, name: str) -> None:
    with opened(place, BUDGET) as store:
        fill(store, 1)
        lease = store.lease("urls", "k0")
        assert lease is not None
        store.publish_tree("directories", "d", [("inner/file", lease)]).close()
        lease.close()
    forge(place, "UPDATE links SET name = ?", name)
    with opened(place, BUDGET) as store:
        tree = store.entry("directories", "d")
        assert tree is not None
        assert store.members(tree) == []
        assert store.lease("directories", "d") is None
        fill(store, 20)
        store.repair()
        assert store.check(deep=True) == []
    assert (place.parent / "outside" / "theirs").read_bytes() == b"theirs"


FAR = {
    "a slot": ["UPDATE entries SET slot = 8192 * 100 WHERE key = 'k0'"],
    "a slot of another": ["UPDATE entries SET slot = (SELECT slot FROM entries WHERE key = 'k1') WHERE key = 'k0'"],
    "a slot so far that there is none": ["UPDATE entries SET slot = 1 << 50 WHERE key = 'k0'"],
    "a slot of a removed entry": ["UPDATE entries SET slot = 8192 * 100, state = 2 WHERE key = 'k0'"],
}


@pytest.mark.rotates
@pytest.mark.parametrize("repair", [False, True])
@pytest.mark.parametrize("what", FAR)
def test_a_slot_far_away_makes_no_gigabytes_of_slots(place: Path, what: str, repair: bool) -> None:
    in_child(lambda: _with(place, fill))
    for sql in FAR[what]:
        forge(place, sql)
    with forebay.Cache(place) as cache:
        store = cache._store
        assert isinstance(store, Store)
        if repair:
            store.repair()
        for number in range(6):
            found = store.view("urls", f"k{number}")
            assert found is None or bytes(found.view) == bytes([number]) * (300 * KiB)
        for number in range(20):
            assert cache.put(f"n{number}", bytes([number]) * (300 * KiB))
            assert cache.get(f"n{number}") == bytes([number]) * (300 * KiB)
        store.repair()
        assert store.check(deep=True) == []
    assert [name for name in os.listdir(place / "shared") if "records" in name] == ["records-000"]
    in_child(lambda: assert_settled(place, BUDGET))


@pytest.mark.parametrize("what", ["a slot", "a slot of another"])
def test_an_entry_with_a_forged_slot_gets_another(place: Path, what: str) -> None:
    in_child(lambda: _with(place, fill))
    for sql in FAR[what]:
        forge(place, sql)
    with opened(place, BUDGET) as store:
        assert all(store.view("urls", f"k{number}") is not None for number in range(6))
        assert len({entry.slot for entry in store.seeing.entries("urls")}) == 6
        store.repair()  # the record that it had is another's, or nobody's
        assert store.check(deep=True) == []


NUMBERS = {
    "bytes of a space": "UPDATE spaces SET bytes = 'zz'",
    "a failure": "INSERT OR REPLACE INTO failures SELECT id, 'k1', 'not json', 1 FROM spaces",
    "a failure that is none": "INSERT OR REPLACE INTO failures SELECT id, 'k1', '[5]', 1 FROM spaces",
}


@pytest.mark.rotates
@pytest.mark.parametrize("what", NUMBERS)
def test_what_is_no_number_or_no_name_reaches_no_caller(place: Path, what: str) -> None:
    """Neither where it is met at opening nor later."""

    def use(cache: forebay.Cache) -> None:
        store = cache._store
        assert isinstance(store, Store)
        assert store.locks.failure("urls", "k1", 0) is None
        for number in range(20):
            assert cache.put(f"n{number}", bytes([number]) * (300 * KiB))
        assert cache.get("n19") == bytes([19]) * (300 * KiB)
        assert cache.stats().budget == BUDGET
        assert cache.entries()
        store.repair()
        assert store.check() == []

    in_child(lambda: _with(place, fill))
    with forebay.Cache(place) as cache:
        cache.put("first", b"x")
        cache.get("first")
        forge(place, NUMBERS[what])
        use(cache)
    forge(place, NUMBERS[what])
    with forebay.Cache(place) as cache:
        use(cache)


TABLES = ("counters", "spaces", "failures", "links", "entries", "payloads", "meta", "reservations", "segments")
PLANTED = {
    "counters": ["INSERT OR REPLACE INTO counters VALUES ('hits', 'zz')", "INSERT OR REPLACE INTO counters VALUES (x'ff', 1e300)"],
    "links": ["INSERT INTO links VALUES ('a', 'b', 'c')", "INSERT INTO links VALUES (5, 'b', 'c')"],
    "failures": [
        """INSERT OR REPLACE INTO failures SELECT id, 'k', '{"kind": "CacheFault", "facts": 5}', 1 FROM spaces""",
        """INSERT OR REPLACE INTO failures SELECT id, 'k', '{"kind": "ExceptionGroup", "args": ["x", []]}', 1 FROM spaces""",
    ],
}


@pytest.mark.rotates
@pytest.mark.parametrize("table", TABLES)
def test_no_value_of_any_column_reaches_a_caller_as_another_error(quick_path: Path, table: str) -> None:
    """The calls go well, or raise what is ours: a `MemoryError` of a length, a `TypeError` of a text are not."""
    pattern, data = quick_path / "pattern", quick_path / "data"
    data.write_bytes(b"d" * 50_000)

    def make() -> None:
        with forebay.Cache(pattern, budget=BUDGET, min_free=0) as cache:
            for number in range(4):
                cache.put(f"k{number}", b"x" * 300)
            cache.put("large", bytes(100_000))
            cache.local(data, force=True).close()
            cache.stats()

    in_child(make)
    with contextlib.closing(sqlite3.connect(pattern / "catalog.sqlite")) as con:
        columns = [row[1] for row in con.execute(f"PRAGMA table_info({table})")]
    values = ["'zz'", "-7", "x'ff00'", "1e300", "4611686018427387904"]
    cases = [f"UPDATE OR REPLACE {table} SET {column} = {value}" for column in columns for value in values]

    def use(place: Path) -> None:
        with forebay.Cache(place) as cache:
            store = cache._store
            calls: list[Callable[[], object]] = [
                lambda: cache.get("k0"), lambda: cache.local(data, force=True).close(), lambda: cache.read(data, force=True),
                lambda: cache.put("new", b"1" * 100), lambda: cache.put("new large", bytes(100_000)), cache.stats,
                lambda: list(cache.entries()), lambda: len(cache.entries()), lambda: cache.evict("k1"), lambda: cache.pin("k2"),
                lambda: isinstance(store, Store) and store.locks.failure("values", "k", 0), cache.check, cache.repair, cache.check,
            ]  # fmt: skip
            for call in calls:
                with contextlib.suppress(errors.ForebayError):
                    call()

    def use_all() -> None:
        for number, sql in enumerate(cases + PLANTED.get(table, [])):
            place = quick_path / f"root{number}"
            shutil.copytree(pattern, place)
            try:
                forge(place, sql)
                use(place)
            except sqlite3.IntegrityError:
                pass  # such a value cannot stand there
            except Exception as error:
                raise AssertionError(sql) from error
            shutil.rmtree(place)

    in_child(use_all)


NEXT_IDS = {value: f"UPDATE meta SET value = {value} WHERE name = 'next_id'" for value in ("'nothing'", "-5", "1 << 62", "NULL")}
NEXT_IDS["no row"] = "DELETE FROM meta WHERE name = 'next_id'"


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("value", NEXT_IDS)
def test_a_catalog_that_cannot_tell_what_is_taken_is_made_anew(place: Path, value: str, is_open: bool) -> None:
    in_child(lambda: _with(place, fill))
    if not is_open:
        forge(place, NEXT_IDS[value])
    with opened(place, BUDGET) as store:
        if is_open:
            store.put("values", "before", bytes(9))
            forge(place, NEXT_IDS[value])
        for number in range(100):  # a process takes many ids at once
            store.put("values", f"new{number}", bytes(9))
            assert bytes(store.view("values", f"new{number}").view) == bytes(9)  # type: ignore[union-attr]
        assert store.check() == []


def test_an_intent_of_more_than_anybody_writes_is_nobodys(place: Path) -> None:
    in_child(lambda: _with(place, fill))
    with open(place / "shared/head", "r+b") as file:
        file.seek(24)
        file.write((1 << 62).to_bytes(8, "little"))
    with opened(place, BUDGET) as store:
        fill(store, 1)
        assert {entry.key for entry in store.seeing.entries("urls")} == {f"k{number}" for number in range(6)}
        assert store.check(deep=True) == []


@pytest.mark.parametrize("where", ["trees", "packs"])
def test_a_link_in_the_place_of_trees_or_packs_leads_nowhere(place: Path, where: str) -> None:
    with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
        store: Any = cache._store
        fill(store)
        lease = store.lease("urls", "k0")
        store.publish_tree("directories", "d", [("inner/file", lease)]).close()
        with cache.samples("pack", 4) as samples:
            samples.put(0, b"sample" * 100)
        moved = place.parent / "moved"
        (place / where).rename(moved)
        (place / where).symlink_to(moved)
        before = {path: path.lstat().st_mtime_ns for path in sorted(moved.rglob("*"))}
        assert len(before) >= 2
        calls: list[Callable[[], object]] = [
            lambda: store.lease("directories", "d").close(),
            lambda: store.publish_tree("directories", "another", [("file", lease)]).close(),
            lambda: cache.samples("pack", 4).get(0),
            lambda: cache.samples("another", 4).put(0, b"sample"),
            lambda: cache.check(deep=True),
            lambda: lease.close(),
            lambda: cache.clear().execute(),
            lambda: cache.prune().execute(),
            lambda: cache.repair(),
        ]
        for call in calls:
            with contextlib.suppress(OSError, AttributeError):  # the cache fails; there may be no lease to close
                call()
        assert {path: path.lstat().st_mtime_ns for path in sorted(moved.rglob("*"))} == before


@pytest.mark.parametrize("where", ["blobs", "tmp", "shared", "locks", "blobs/xx"])
def test_a_link_in_the_place_of_a_directory_leads_nowhere(place: Path, where: str) -> None:
    """Put there while the root is open: what lies behind has the names of our files, and stays."""
    with opened(place, BUDGET) as store:
        fill(store)
        entry = next(entry for entry in store.seeing.entries("urls") if entry.key == "k0")
        there = place / where.replace("xx", f"{entry.id & 0xFF:02x}")
        moved = place.parent / "moved"
        there.rename(moved)
        there.symlink_to(moved)
        before = sorted(str(path) for path in moved.rglob("*"))
        sizes = {path: os.stat(path).st_mtime_ns for path in before}
        with contextlib.suppress(OSError):  # the cache fails; the caller is served past it
            fill(store, 20)
        with contextlib.suppress(OSError):
            store.lease("urls", "k0")
        assert sorted(str(path) for path in moved.rglob("*")) == before
        if where not in ("locks", "shared"):  # these were mapped before
            assert {path: os.stat(path).st_mtime_ns for path in before} == sizes


def test_a_link_in_the_place_of_a_fan_is_made_anew_at_the_next_opening(place: Path) -> None:
    in_child(lambda: _with(place, fill))
    for fan in sorted((place / "blobs").iterdir()):
        if any(fan.iterdir()):
            fan.rename(place.parent / f"moved-{fan.name}")
            fan.symlink_to(place.parent / f"moved-{fan.name}")
    with opened(place, BUDGET) as store:
        assert store.view("urls", "k0") is None
        fill(store, 12)
        store.repair()
        assert store.check(deep=True) == []
    assert len(list(place.parent.glob("moved-*/*"))) == 6


def test_doubts_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transactions, "_MOST", 3)
    unreadable = transactions.UnreadableRows()
    for n in range(10):
        unreadable.note("entries", (n,), f"row {n}")
    assert list(unreadable.waiting) == [("entries", (0,)), ("entries", (1,)), ("entries", (2,))]


def test_what_an_honest_process_left_is_not_doubted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of each kind of row that one that is killed leaves, its own among them."""
    script = (
        "import os, sys, forebay\n"
        "cache = forebay.Cache(sys.argv[1], budget=64 << 20, min_free=0)\n"
        "cache.put('k', b'v'); cache.put('large', bytes(50_000)); cache.samples('a', 4).put(0, b'sample')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path / "root"], timeout=60, check=False).returncode == -9
    with forebay.Cache(tmp_path / "root") as cache:
        assert cache.put("more", b"v")
        cache.prune().execute()
        assert len(cache.entries()) == 4
        assert cache.check(deep=True) == []
    assert "written by another program" not in caplog.text


METAS = {
    "nothing": "",
    "no names": "{}",
    "a list": "[1]",
    "a number": "5",
    "null": "null",
    "no JSON": '{"size": ',
    "without end": "[" * 100_000,
    "other types": '{"size": "much", "listing": 3, "length": true, "codec": [], "sha256": 7}',
    "counts below 0": '{"size": -1, "listing": "", "length": -1, "codec": "raw"}',
    "counts without end": '{"size": 1' + "0" * 40 + ', "listing": "", "length": 1' + "0" * 40 + ', "codec": "raw"}',
}


@pytest.mark.parametrize("what", METAS)
def test_what_is_noted_of_an_entry_is_not_believed(place: Path, what: str) -> None:
    """Of a tree, of an array, and of a file whose SHA-256 is asked for."""
    theirs = place.parent / "theirs"
    theirs.mkdir()
    (theirs / "a").write_bytes(b"a" * 1000)
    url, digest = theirs.as_uri(), hashlib.sha256(b"a" * 1000).hexdigest()

    def use(cache: Cache) -> None:
        for age in ("1d", 0):
            with cache.directory(url, max_age=age, force=True) as path:
                assert (Path(path) / "a").read_bytes() == b"a" * 1000
        with cache.local(f"{url}/a", sha256=digest, force=True) as path:
            assert Path(path).read_bytes() == b"a" * 1000
        for length in (4, None):
            with cache.samples("array", length) as samples:
                assert len(samples) == 4
                assert samples.put(0, b"sample") or samples.get(0) == b"sample"

    with Cache(place, budget=BUDGET, min_free=0) as cache:
        use(cache)
        for _ in range(2):
            forge(place, "UPDATE entries SET meta = ?", METAS[what])
            use(cache)
        assert cache.check(deep=True) == []
    in_child(lambda: assert_settled(place, BUDGET))


@pytest.mark.parametrize("kind", ["pack", "session", "tree"])
def test_a_file_that_is_said_to_be_another_thing_is_fetched_again(place: Path, kind: str) -> None:
    theirs = place.parent / "outside" / "theirs"
    with Cache(place, budget=BUDGET, min_free=0) as cache:
        with cache.local(theirs.as_uri(), force=True, max_age="1d") as path:
            kept = Path(path)
        kept.chmod(0o600)
        kept.write_bytes(b"forged")
        forge(place, "UPDATE entries SET kind = ? WHERE kind = 'blob'", kind)
        with cache.local(theirs.as_uri(), force=True, max_age="1d") as path:
            assert Path(path).read_bytes() == b"theirs"
        cache.repair()
        assert cache.check(deep=True) == []
    in_child(lambda: assert_settled(place, BUDGET))


def test_a_link_that_becomes_a_directory_while_a_root_is_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_child(lambda: _with(place, fill))
    fan = next(fan for fan in (place / "blobs").iterdir() if not any(fan.iterdir()))
    fan.rmdir()
    fan.symlink_to(place.parent)

    def exchange(*said: object) -> None:
        fan.unlink()
        fan.mkdir()

    monkeypatch.setattr(root.log, "warning", exchange)
    with Cache(place) as cache:
        assert cache.put("k", b"value")
    assert fan.is_dir()
    assert not fan.is_symlink()


def test_a_directory_that_becomes_a_link_while_a_root_is_opened(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_child(lambda: _with(place, fill))

    def exchange(found: root.Root) -> None:
        (place / "locks").rename(place.parent / "moved")
        (place / "locks").symlink_to(place.parent / "moved")

    monkeypatch.setattr(root, "_remove_links", exchange)
    with pytest.raises(forebay.errors.RootRefused, match="remove it"):
        Cache(place)
