"""Every change of a file is a crash point: put, publish, replace, evict, remove, grow, and each with nobody else, then with a lease."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from forebay._engine.index.adaptive import BIMODAL
from forebay._engine.leases import Lease
from forebay._engine.space import budget, eviction
from forebay._engine.store import Settings, Store
from forebay._model import Entry, ObjectInfo
from tests.crash.conftest import Scene, victim_of
from tests.harness import KiB, MiB, bytes_of, write_whole

NewScene = Callable[[int], Scene]
SMALL, OTHER = b"small" * 100, b"other" * 200
BLOB, NEWER = os.urandom(100 * KiB), os.urandom(150 * KiB)
LARGE = os.urandom(300 * KiB)  # staged, where BLOB is written in the transaction that publishes it
BODY = os.urandom(3 * MiB + 12345)


def nothing(store: Store) -> None:
    """An empty root."""


@pytest.mark.parametrize("data", [SMALL, BLOB, LARGE], ids=["value", "small blob", "blob"])
def test_put(scene: NewScene, data: bytes) -> None:
    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, data)

    scene(MiB).play(nothing, lambda store: store.put("v", "a", data), after)


def test_put_of_several_chunks(scene: NewScene) -> None:
    """No map of them is kept: whoever puts has all bytes, and a successor none."""

    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, BODY)

    steps = scene(8 * MiB).play(nothing, lambda store: store.put("v", "a", BODY), after)
    assert any(step.startswith("pwrite") for step in steps)
    assert not any(step.startswith(("set_byte", "allocate")) for step in steps)


@pytest.mark.parametrize("room", [MiB, 500 * KiB], ids=["ample", "short"])
def test_put_several_files(scene: NewScene, room: int) -> None:
    """In one transaction: all or none. Where there is no room, victims go first."""

    def before(store: Store) -> None:
        store.put("v", "victim", LARGE)
        store.put("v", "b", BLOB)

    def after(store: Store) -> None:
        assert (bytes_of(store, "a"), bytes_of(store, "b")) in ((None, BLOB), (BLOB, NEWER))

    steps = scene(room).play(before, lambda store: store.put_many("v", [("a", BLOB), ("b", NEWER)]), after)
    assert len([step for step in steps if step.startswith("pwrite")]) >= 2


@pytest.mark.parametrize("new", [SMALL, NEWER, LARGE], ids=["value", "small blob", "blob"])
@pytest.mark.parametrize("old", [OTHER, BLOB], ids=["value", "blob"])
def test_replace(scene: NewScene, old: bytes, new: bytes) -> None:
    def before(store: Store) -> None:
        store.put("v", "a", old)
        store.put("v", "b", BLOB)

    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (old, new)  # there is room for both: never a miss
        assert bytes_of(store, "b") == BLOB

    scene(MiB).play(before, lambda store: store.put("v", "a", new), after)


def test_the_next_write_needs_what_the_dead_replacer_left(scene: NewScene) -> None:
    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (BLOB, NEWER)

    scene(MiB).play(lambda store: store.put("v", "a", BLOB), lambda store: store.put("v", "a", NEWER), after, small_first=False)


def test_a_catalog_becomes_small(scene: NewScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "AT_ONCE", 10)

    def before(store: Store) -> None:
        store.put_many("v", [(f"k{number}", bytes(10_000)) for number in range(30)])
        store.put("v", "a", SMALL)

    def clear(store: Store) -> None:
        store.remove([victim_of(entry) for entry in store.seeing.entries("v") if entry.key != "a"])

    def after(store: Store) -> None:
        assert bytes_of(store, "a") == SMALL

    steps = scene(MiB).play(before, clear, after)
    assert sum(step.startswith("committed") for step in steps) > 2, steps


@pytest.mark.parametrize("life", ["cached", "held"])
@pytest.mark.parametrize("room", [MiB, 700 * KiB], ids=["ample", "short"])
def test_link_several(scene: NewScene, room: int, life: str) -> None:
    """Second names of leased files, one in place of what had it; where there is no room, a victim goes first. All or none; what was held
    goes with its holder."""

    def before(store: Store) -> None:
        store.put("v", "victim", LARGE)
        store.put("v", "b", BLOB)
        store.put("v", "c", NEWER)
        store.put("w", "a", OTHER)

    def link(store: Store) -> None:
        sources = [lease for key in "bc" if (lease := store.lease("v", key)) is not None]
        leases = store.publish_links("w", [(key, source, None) for key, source in zip("ad", sources, strict=True)], life=life)
        for lease in (*sources, *leases):
            lease.close()

    def after(store: Store) -> None:
        assert (bytes_of(store, "b"), bytes_of(store, "c")) == (BLOB, NEWER)
        store.put("v", "next", b"")  # sweeps
        linked = (bytes_of(store, "a", "w"), bytes_of(store, "d", "w"))
        assert linked in ((OTHER, None), (BLOB, NEWER) if life == "cached" else (None, None))
        links = [
            os.stat(store.root.blob_name(entry.id, entry.suffix)).st_nlink for entry in store.seeing.entries("v") if entry.key in ("b", "c")
        ]
        assert set(links) == {2 if linked[1] else 1}, "a name that no row counts"

    steps = scene(room).play(before, link, after)
    assert len([step for step in steps if step.startswith("link")]) >= 2, steps


@pytest.mark.parametrize("room", [MiB, 300 * KiB], ids=["ample", "short"])
def test_publish_small_through_a_writing(scene: NewScene, room: int) -> None:
    """It comes into memory; where there is no room, victims go first."""

    def before(store: Store) -> None:
        store.put("v", "b", BLOB)
        store.put("v", "c", BLOB)

    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, NEWER)
        assert bytes_of(store, "c") == BLOB

    scene(room).play(before, lambda store: write_whole(store, "a", NEWER), after)


@pytest.mark.parametrize("room", [MiB, 448 * KiB], ids=["ample", "short"])
def test_publish_several_that_were_collected(scene: NewScene, room: int) -> None:
    """All in one transaction, over an older version of one; where there is no room, victims go first, once for all."""

    def before(store: Store) -> None:
        store.put("v", "victim", NEWER)
        store.put("v", "a", OTHER)

    def publish(store: Store) -> None:
        writings = []
        for key in ("a", "b"):
            writing = store.writing("v", key, resume=False, collect=True)
            writing.begin(ObjectInfo(key, len(NEWER), '"1"', strong=True))
            writing.write(0, NEWER)
            writings.append(writing)
        lease, entry = store.publish_collected(writings, [True, False])
        assert isinstance(lease, Lease)
        assert isinstance(entry, Entry)
        with lease as path:
            assert open(path, "rb").read() == NEWER

    def after(store: Store) -> None:
        assert (bytes_of(store, "a"), bytes_of(store, "b")) in ((OTHER, None), (None, None), (NEWER, NEWER))

    scene(room).play(before, publish, after)


def test_publish_through_a_writing(scene: NewScene) -> None:
    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, BODY)

    found = scene(8 * MiB).play(nothing, lambda store: write_whole(store, "a", BODY), after, least=12)
    assert any(step.startswith("set_byte") for step in found)


def test_a_successor_resumes(scene: NewScene) -> None:
    """What is left is gone on from, or begun anew; either way the bytes are exact."""

    def after(store: Store) -> None:
        if bytes_of(store, "a") is None:
            write_whole(store, "a", BODY)
        assert bytes_of(store, "a") == BODY

    scene(8 * MiB).play(nothing, lambda store: write_whole(store, "a", BODY), after, least=12)


def test_a_successor_that_finds_another_version(scene: NewScene) -> None:
    other = os.urandom(2 * MiB)

    def after(store: Store) -> None:
        if bytes_of(store, "a") is None:
            write_whole(store, "a", other, validator='"2"')
            assert bytes_of(store, "a") == other

    scene(8 * MiB).play(nothing, lambda store: write_whole(store, "a", BODY), after, least=12)


def test_a_successor_that_dies_too(scene: NewScene) -> None:
    """A partial is there; who resumes it dies at each step of that."""

    def before(store: Store) -> None:
        hold = store.locks.hold("v", "a")
        with store.writing("v", "a") as writing:
            writing.begin(ObjectInfo("", len(BODY), '"1"', strong=True))
            writing.write(MiB, BODY[MiB : 2 * MiB])
        hold.release()

    def after(store: Store) -> None:
        if bytes_of(store, "a") is None:
            write_whole(store, "a", BODY)
        assert bytes_of(store, "a") == BODY

    scene(8 * MiB).play(before, lambda store: write_whole(store, "a", BODY), after, least=8)


def test_the_object_became_a_smaller_one(scene: NewScene) -> None:
    """A second `begin`: what was written is void, and takes no room that nothing counts."""
    small = os.urandom(MiB // 2)

    def during(store: Store) -> None:
        hold = store.locks.hold("v", "a")
        with store.writing("v", "a") as writing:
            writing.begin(ObjectInfo("", len(BODY), '"1"', strong=True))
            writing.write(0, BODY[: 2 * MiB])
            writing.begin(ObjectInfo("", len(small), '"2"', strong=True))
            writing.write(0, small)
            writing.publish(validator='"2"')
        hold.release()

    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, small)

    scene(4 * MiB).play(nothing, during, after, least=12, small_first=False)


def test_a_whole_download_is_not_fetched_again(scene: NewScene) -> None:
    """Whenever a process dies after the last byte came, also between the last name of the file and the commit."""

    def fetch(store: Store) -> list[int]:
        fetched: list[int] = []
        hold = store.locks.hold("v", "a")
        try:
            with store.writing("v", "a") as writing:
                for span in writing.begin(ObjectInfo("", len(BODY), '"1"', strong=True)):
                    writing.write(span.start, BODY[span.start : span.end])
                    fetched.append(span.length)
                (store.root.path.parent / "whole").touch()
                writing.publish(validator='"1"')
        finally:
            hold.release()
        return fetched

    def during(store: Store) -> None:
        fetch(store)

    def after(store: Store) -> None:
        if bytes_of(store, "a") is None:
            is_whole = (store.root.path.parent / "whole").exists()
            assert fetch(store) == [] or not is_whole
        assert bytes_of(store, "a") == BODY

    scene(4 * MiB).play(nothing, during, after, least=12, small_first=False)


def test_a_put_of_a_key_whose_fetch_died(scene: NewScene) -> None:
    """The partial of the key itself goes when its space is needed."""

    def after(store: Store) -> None:
        if bytes_of(store, "a") is None:
            store.put("v", "a", BODY)
        assert bytes_of(store, "a") == BODY

    scene(4 * MiB).play(nothing, lambda store: write_whole(store, "a", BODY), after, least=12, small_first=False)


def test_grow_of_unknown_length(scene: NewScene) -> None:
    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, BODY)
        assert bytes_of(store, "b") in (None, BLOB)

    def before(store: Store) -> None:
        store.put("v", "b", BLOB)

    scene(4 * MiB).play(before, lambda store: write_whole(store, "a", BODY, size=None, validator=None), after, least=8)


@pytest.mark.parametrize("batch", [budget.BATCH, 1], ids=["at once", "one by one"])
def test_evict_under_pressure(scene: NewScene, monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    """``one by one``: others may write after each victim, and the reservation grows."""
    if batch == 1:
        monkeypatch.setattr(budget, "BATCH", 1)
        monkeypatch.setattr(budget, "AT_MOST", 0.0)
    keys = [f"k{n}" for n in range(9)]
    body = {key: os.urandom(100 * KiB) for key in keys} | {"small": SMALL, "new": os.urandom(500 * KiB)}

    def before(store: Store) -> None:
        for key in [*keys, "small"]:
            store.put("v", key, body[key])

    def after(store: Store) -> None:
        found = {key: bytes_of(store, key) for key in body}
        assert all(data in (None, body[key]) for key, data in found.items())
        assert found["small"] == SMALL  # it came last
        assert sum(data is not None for data in found.values()) >= 5

    scene(MiB).play(before, lambda store: store.put("v", "new", body["new"]), after, least=12)


def test_evict_values_under_pressure(scene: NewScene) -> None:
    body = {f"k{n}": os.urandom(15 * KiB) for n in range(15)}

    def before(store: Store) -> None:
        for key, data in body.items():
            store.put("v", key, data)

    def after(store: Store) -> None:
        found = {key: bytes_of(store, key) for key in body}
        assert all(data in (None, body[key]) for key, data in found.items())
        assert bytes_of(store, "new") in (None, SMALL * 20)

    scene(256 * KiB).play(before, lambda store: [store.put("v", f"new{n}", SMALL * 20) for n in range(3)], after)


@pytest.mark.parametrize("size", [15 * KiB, 30 * KiB], ids=["values", "blobs"])
def test_evict_what_is_on_trial(scene: NewScene, size: int) -> None:
    """Each new entry is put on trial, and takes the place of the one before."""
    body = {f"{kind}{n}": os.urandom(size) for kind in ("old", "new") for n in range(20)}

    def before(store: Store) -> None:
        store.spaces.ensure("v", policy="auto")
        for n in range(20):
            store.put("v", f"old{n}", body[f"old{n}"])
        space = store.engine.adaptive.of(store.spaces.number("v"))
        assert space is not None
        space.ghosts._words[2], space.ghosts._words[21] = BIMODAL, 8

    def after(store: Store) -> None:
        found = {key: bytes_of(store, key) for key in body}
        assert all(data in (None, body[key]) for key, data in found.items())
        assert store.seeing.usage().standings["v"] is not None

    steps = scene(256 * KiB).play(before, lambda store: [store.put("v", f"new{n}", body[f"new{n}"]) for n in range(3)], after, least=8)
    assert steps.count("set_word 3") >= 2, steps


@pytest.mark.parametrize("data", [SMALL, BLOB], ids=["value", "blob"])
def test_remove(scene: NewScene, data: bytes) -> None:
    def before(store: Store) -> None:
        store.put("v", "a", data)
        store.put("v", "b", data)

    def during(store: Store) -> None:
        store.remove([victim_of(store.entry("v", "a"))])

    def after(store: Store) -> None:
        assert bytes_of(store, "a") in (None, data)
        assert bytes_of(store, "b") == data

    scene(MiB).play(before, during, after)


def test_a_lower_budget(scene: NewScene) -> None:
    body = {f"k{n}": os.urandom(100 * KiB) for n in range(9)}

    def before(store: Store) -> None:
        store.configure(Settings(budget=MiB))
        for key, data in body.items():
            store.put("v", key, data)

    def during(store: Store) -> None:
        store.configure(Settings(budget=512 * KiB))

    def after(store: Store) -> None:
        store.configure(Settings(budget=MiB))
        found = {key: bytes_of(store, key) for key in body}
        assert all(data in (None, body[key]) for key, data in found.items())

    scene(MiB).play(before, during, after, least=10)


def test_open_and_close(scene: NewScene) -> None:
    def before(store: Store) -> None:
        store.put("v", "a", BLOB)

    def after(store: Store) -> None:
        assert bytes_of(store, "a") == BLOB

    stage = scene(MiB)

    def during() -> None:
        with stage.open() as store:
            store.engine.parts.owners.me()  # as the first write does

    stage.act(before, during, after, least=2)
