"""Rows, records and files are one set: after an exception at any step, and whatever the files that processes share had in them."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forebay._engine import check
from forebay._engine.catalog import recovery
from forebay._engine.index import records
from forebay._engine.index.head import PAIRS
from forebay._engine.store import Store
from forebay._kernel import host
from forebay._model import Victim
from tests.harness import KiB, MiB, bytes_of, opened
from tests.processes import in_child

SMALL, FILE = b"s" * 500, b"f" * 50_000


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 2 * MiB) as store:
        for n in range(10):
            store.put("v", f"small {n}", SMALL)
            store.put("v", f"file {n}", FILE)
        yield store


def replace(store: Store) -> None:
    store.put("v", "small 3", b"n" * 700)
    store.put("v", "file 3", b"n" * 60_000)


def remove(store: Store) -> None:
    store.remove([Victim(e.key, e.size, e.charge, e.used, e.id) for e in store.seeing.entries("v") if e.key.endswith("4")])


def press(store: Store) -> None:
    store.put("v", "large", bytes(1700 * KiB))


ACTS: dict[str, Callable[[Store], object]] = {
    "a small value": lambda store: store.put("v", "new", SMALL),
    "a file": lambda store: store.put("v", "new", FILE),
    "many": lambda store: store.put_many("v", [(f"new {n}", bytes([n]) * (100 + 20_000 * (n % 2))) for n in range(8)]),
    "other versions": replace,
    "removal": remove,
    "eviction": press,
}


class Interrupted(Exception):
    """What a signal handler may raise, anywhere."""


@pytest.mark.parametrize("error", [OSError(5, "the disk failed"), Interrupted()], ids=["a fault of the disk", "an interrupt"])
@pytest.mark.parametrize("what", ACTS)
def test_an_exception_at_any_step_leaves_rows_records_and_files_that_agree(store: Store, what: str, error: Exception) -> None:
    """Not the next process ends what the exception left, but this one, at once."""
    act, step, left = ACTS[what], 0, 1

    def fail(*_: object) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise error

    while left <= 0 or not step:
        step += 1
        left = step
        host.on_step(fail)
        try:
            act(store)
        except Exception:  # noqa: S110 (what the caller sees of it is tested elsewhere)
            pass
        finally:
            host.on_step(None)
        assert store.engine.index.head.intent() == [], step
        assert [problem for problem in store.check(deep=True) if problem.kind != "stray"] == [], step
        store.put("v", "file 9", FILE)
        assert store.check(deep=True) == [], step
        for key in ("small 0", "file 0", "new"):
            assert bytes_of(store, key) in (None, SMALL, FILE)
        for n in range(10):
            store.put("v", f"file {n}", FILE)
            store.put("v", f"small {n}", SMALL)
    assert step > 3


@pytest.mark.parametrize("seed", range(3))
def test_noise_in_the_intent_costs_no_entry(store: Store, seed: int) -> None:
    chance, head = random.Random(seed), store.engine.index.head
    ids, before = [entry.id for entry in store.seeing.entries("v")], {entry.key for entry in store.seeing.entries("v")}
    for _ in range(20):
        pairs = [(chance.choice([*ids, chance.getrandbits(62)]), chance.choice([0, 3, 7, chance.getrandbits(40)])) for _ in range(50)]
        head.intend(pairs)
        store.put("v", "new", FILE)
        assert head.intent() == []
    assert {entry.key for entry in store.seeing.entries("v")} == before | {"new"}
    assert {bytes_of(store, key) for key in before} == {SMALL, FILE}
    assert store.check(deep=True) == []


def test_noise_in_records_is_mended_before_the_first_write_of_an_epoch(store: Store) -> None:
    chance, index = random.Random(5), store.engine.index
    words = index.record(0)[0]
    for at in range(512, 512 + 16 * 100):
        words[at] = chance.getrandbits(chance.choice((3, 40, 64)))
    index.head.words()[3] = PAIRS // 2  # and an intent of it
    index.head.epoch = 0

    def young() -> None:
        with opened(store.root.path) as mine:
            mine.put("v", "new", FILE)
            assert {bytes_of(mine, entry.key) for entry in mine.seeing.entries("v")} == {SMALL, FILE}
            assert mine.check(deep=True) == []

    store.close()
    in_child(young)


def test_a_forged_intent_that_is_full_stops_no_writer(store: Store) -> None:
    head = store.engine.index.head
    head.intend([(1 << 60, 7)] * (PAIRS - 40) + [(entry.id, 4000) for entry in store.seeing.entries("v")] + [(1 << 50, 3)] * 20)
    for entry in store.seeing.entries("v")[:3]:  # each is to be emptied there
        store.engine.index.store(1, entry._replace(slot=4000), 1, 1)
    store.put("v", "new", FILE)
    assert head.intent() == []
    assert store.check(deep=True) == []


def test_entries_beyond_the_files_that_are_made_anew_get_slots_of_their_own(quick_path: Path) -> None:
    """Their slots are taken of those that others, whose records are lost too, had."""
    place = quick_path / "root"

    def fill() -> None:
        records.RECORDS = recovery.RECORDS = check.RECORDS = 64
        with opened(place, 64 * MiB) as store:
            for n in range(300):
                store.put("v", f"k{n}", bytes([n % 256]))

    def look() -> None:
        records.RECORDS = recovery.RECORDS = check.RECORDS = 64
        with opened(place) as store:
            store.put("v", "new", b"n")
            assert store.check(deep=True) == []
            assert len({entry.slot for entry in store.seeing.entries("v")}) == 301

    in_child(fill)
    shutil.rmtree(place / "shared")
    in_child(look)


@pytest.mark.parametrize("files", [0, 2, 5000, 1 << 60])
def test_a_forged_number_of_files_makes_no_gigabytes(store: Store, files: int) -> None:
    place = store.root.path
    store.engine.index.head.words()[4] = files
    shutil.copy(place / "shared" / "records-000", place / "shared" / "records-99999")

    def young() -> None:
        with opened(place) as mine:
            mine.put("v", "new", FILE)
            assert {bytes_of(mine, entry.key) for entry in mine.seeing.entries("v")} == {SMALL, FILE}
            mine.repair()
            assert [problem.kind for problem in mine.check(deep=True)] == []
            assert mine.engine.index.head.files <= 2

    store.close()
    in_child(young)


@pytest.mark.parametrize("newer", ["catalog", "records"])
def test_an_older_copy_of_one_under_a_newer_one_of_the_other(store: Store, newer: str, tmp_path: Path) -> None:
    """As a crash of the machine may leave them."""
    place, names = store.root.path, ["shared"] if newer == "catalog" else ["catalog.sqlite"]
    store.close()
    for name in names:
        path = place / name
        (shutil.copytree if path.is_dir() else shutil.copy)(path, tmp_path / name)

    def change() -> None:
        with opened(place) as mine:
            replace(mine)
            remove(mine)
            for n in range(30):
                mine.put("v", f"later {n}", FILE)
            mine.engine.index.head.epoch = 0

    in_child(change)
    for name in names:
        path = place / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        (shutil.copytree if (tmp_path / name).is_dir() else shutil.copy)(tmp_path / name, path)

    def look() -> None:
        with opened(place) as mine:
            mine.engine.index.head.epoch = 0
            mine.engine.parts.catalog.begun(None)
            mine.put("v", "new", FILE)
            for entry in mine.seeing.entries("v"):
                assert bytes_of(mine, entry.key) in (None, SMALL, FILE, b"n" * 700, b"n" * 60_000)
            mine.repair()
            assert mine.check(deep=True) == []

    in_child(look)


def test_a_catalog_that_was_restored_from_a_copy_gives_no_id_again(store: Store, tmp_path: Path) -> None:
    """In the same boot: the records are those of the catalog that was there."""
    place, copy = store.root.path, tmp_path / "copy.sqlite"
    store.close()
    shutil.copy(place / "catalog.sqlite", copy)

    def write(prefix: str) -> set[int]:
        with opened(place) as mine:
            for n in range(30):
                mine.put("v", f"{prefix} {n}", FILE + prefix.encode())
            found = {entry.id for entry in mine.seeing.entries("v") if entry.key.startswith(prefix)}
            assert len(found) == 30
            if prefix == "after":
                assert bytes_of(mine, "before 0") is None
                mine.repair()  # what "before" evicted has its row again
                assert mine.check(deep=True) == []
            return found

    before = in_child(lambda: write("before"))
    (place / "catalog.sqlite").unlink()
    shutil.copy(copy, place / "catalog.sqlite")
    assert not before & in_child(lambda: write("after"))
