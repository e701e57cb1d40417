"""A root is laid out, its catalog made anew, its damage mended: the process that does so dies at each step."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay._engine.store import Store
from tests.crash.conftest import Scene
from tests.harness import KiB, MiB, assert_counted, assert_settled, bytes_of, opened
from tests.processes import death_of, fork_to_die, in_child, steps_of

BLOB = os.urandom(100 * KiB)
AT_ONCE = 8


def create(place: Path) -> None:
    with opened(place, MiB) as store:
        store.put("v", "first", b"1")


def look_at_a_new_one(places: list[Path]) -> None:
    for place in places:
        with opened(place, MiB) as store:
            assert bytes_of(store, "first") in (None, b"1")
            assert store.check(deep=True) == []
            store.put("v", "a", BLOB)
            assert bytes_of(store, "a") == BLOB
            assert (place / "catalog.ballast").stat().st_blocks * 512 >= 4 * MiB
    for place in places:
        assert_settled(place, MiB)
        assert len(list((place / "blobs").iterdir())) == 256
        shutil.rmtree(place)


def test_a_root_is_made(quick_path: Path) -> None:
    """The 256 like directories are taken together; `test_root` kills at each of them."""
    steps = steps_of(lambda: create(quick_path / "whole"))
    assert len(steps) > 350
    fans = [k for k, step in enumerate(steps) if re.fullmatch("mkdir [0-9a-f]{2}", step)]
    chosen = [k for k in range(len(steps) + 3) if k not in fans[1:-1] or k % 50 == 0]
    deaths: list[str] = []
    while chosen:
        dying, chosen = {quick_path / f"root-{k}": k for k in chosen[:AT_ONCE]}, chosen[AT_ONCE:]
        children = [fork_to_die(k, lambda place=place: create(place)) for place, k in dying.items()]  # type: ignore[misc]
        deaths += [death for child in children if (death := death_of(child)) is not None]
        in_child(lambda there=list(dying): look_at_a_new_one(there))  # type: ignore[misc]
    assert len(deaths) > 100
    assert {death.split()[0] for death in deaths} >= {"mkdir", "create", "link", "rename", "allocate", "pwrite", "commit"}


def test_a_catalog_is_made_anew(scene: Callable[[int], Scene]) -> None:
    """Somebody scribbles over the catalog; who mends it dies. Blobs that no row names any more go; nothing is served that is not right."""

    def before(store: Store) -> None:
        for n in range(4):
            store.put("v", f"k{n}", BLOB)
        store.put("v", "small", b"1")

    stage = scene(MiB)
    stage.forgets = True

    def act() -> None:
        for ending in ("-wal", "-shm"):
            (stage.place / f"catalog.sqlite{ending}").unlink(missing_ok=True)
        (stage.place / "catalog.sqlite").write_bytes(b"scribbled" * 1000)
        with opened(stage.place, MiB) as store:
            store.put("v", "a", BLOB)

    def after(store: Store) -> None:
        assert all(bytes_of(store, f"k{n}") in (None, BLOB) for n in range(4))
        assert bytes_of(store, "a") in (None, BLOB)

    stage.act(before, act, after, least=10)


@pytest.mark.parametrize("name", ["sqlite_master", "failures"])
def test_what_can_be_read_of_a_damaged_catalog_survives_every_death(scene: Callable[[int], Scene], name: str) -> None:
    """A page without entries is garbage; who salvages the others dies, and the next process begins again."""

    def before(store: Store) -> None:
        for n in range(4):
            store.put("v", f"k{n}", BLOB, life="pinned" if n else "cached")
        store.put("v", "small", b"1")

    stage = scene(MiB)

    def act() -> None:
        catalog = stage.place / "catalog.sqlite"
        with contextlib.closing(sqlite3.connect(catalog)) as con:
            ((page,),) = con.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", [name]).fetchall() or [(1,)]
        with open(catalog, "r+b") as file:
            file.seek((page - 1) * 4096)
            file.write(b"scribbled" * 455)
        with opened(stage.place) as store:
            assert [problem.kind for problem in store.repair()] == ["catalog"]

    def after(store: Store) -> None:
        if store.check():
            store.repair()
        assert all(bytes_of(store, f"k{n}") == BLOB for n in range(4))
        assert bytes_of(store, "small") == b"1"
        assert {entry.key for entry in store.seeing.entries("v") if entry.life == "pinned"} == {"k1", "k2", "k3"}
        store.set_life("v", "k1", "cached")
        store.set_life("v", "k2", "cached")
        store.set_life("v", "k3", "cached")

    stage.repairs = True
    stage.act(before, act, after, least=8)


def test_a_killed_repair_is_ended_by_the_next(scene: Callable[[int], Scene]) -> None:
    """Blobs are cut, flipped, lost, and strays lie about; who repairs dies; the next one ends it."""

    def before(store: Store) -> None:
        for n in range(5):
            store.put("v", f"k{n}", BLOB)
        store.put("v", "small", b"1")

    def harm(store: Store) -> None:
        blob = {e.key: store.root.blob(e.id, e.suffix) for e in store.seeing.entries("v")}
        for path in blob.values():
            if path.exists():
                path.chmod(0o600)
        os.truncate(blob["k0"], 5000)
        with open(blob["k1"], "r+b") as file:
            file.seek(70_000)
            file.write(bytes([BLOB[70_000] ^ 1]))
        blob["k2"].unlink()
        (store.root.path / "blobs/07/0000000000000007").write_bytes(b"stray")
        (store.root.path / "tmp/0000000000000001-0000000000000008").write_bytes(b"stray")
        (store.root.path / "tmp/0000000000000001-0000000000000008.map").write_bytes(b"stray")
        live = store.seeing.entries("v")[-1].id  # as two writers of a key leave it where locks exclude nobody
        (store.root.path / f"tmp/0000000000000001-{live:016x}").write_bytes(b"stray")
        with store.engine.parts.catalog.write() as txn:
            txn.run("UPDATE spaces SET charge = charge + 4096, entries = entries + 1")

    def during(store: Store) -> None:
        kinds = {problem.kind for problem in store.repair()}
        assert kinds == {"damaged", "lost", "stray", "total"}

    def after(store: Store) -> None:
        assert bytes_of(store, "k3") == BLOB
        assert bytes_of(store, "k4") == BLOB
        assert all(bytes_of(store, f"k{n}") in (None, BLOB) for n in range(3))

    stage = scene(MiB)

    def before_and_harm(store: Store) -> None:
        before(store)
        harm(store)

    stage.repairs = True
    stage.play(before_and_harm, during, after, least=8)


@pytest.mark.parametrize("what", ["catalog.sqlite", "shared", "counters", "locks", "FORMAT", "tmp", "blobs"])
def test_somebody_deletes_a_part_of_it(tmp_path: Path, what: str) -> None:
    """With a journal beside it that was not tidied, since its writer was killed."""
    place = tmp_path / "root"

    def fill() -> None:
        with opened(place, MiB) as store:
            for n in range(8):
                store.put("v", f"k{n}", BLOB if n % 2 else b"1" * 1000)

    def grow() -> None:
        with opened(place) as store:
            for n in range(100):
                store.put("v", f"more{n}", b"2" * 1000)

    in_child(fill)
    assert death_of(fork_to_die(150, grow)) is not None
    assert (place / "catalog.sqlite-wal").stat().st_size > 100 * KiB
    if (place / what).is_dir():
        shutil.rmtree(place / what)
    else:
        (place / what).unlink()

    def look() -> None:
        with opened(place, MiB) as store:
            for n in range(8):
                assert bytes_of(store, f"k{n}") in (None, BLOB if n % 2 else b"1" * 1000)
            assert store.check(deep=True) == []
            # An old journal must not come back to life beside a new catalog: ids that it gave could be given again.
            assert not (what == "catalog.sqlite" and store.seeing.entries())
            store.put("v", "a", BLOB)
            assert bytes_of(store, "a") == BLOB
            assert store.check(deep=True) == []

    in_child(look)
    assert_counted(place, MiB)
