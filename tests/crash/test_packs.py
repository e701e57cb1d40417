"""A process dies before the k-th change of a file while it makes a pack, appends to it, leaves it, names it: for every k."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

import pytest

from forebay._engine.packs import segments
from forebay._engine.packs.pack import Pack
from forebay._engine.store import Store
from forebay.codecs import codec
from tests.crash.conftest import Scene, victim_of
from tests.harness import KiB, MiB, bytes_of

NewScene = Callable[[int], Scene]
SLOTS = 600
raw = codec("raw").encode
BODIES = {slot: os.urandom(10_000 + slot) for slot in range(8)}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a few samples fill one."""
    monkeypatch.setattr(segments, "SMALLEST", 32 * KiB)
    monkeypatch.setattr(segments, "EASY", 32 * KiB)
    monkeypatch.setattr(segments, "AHEAD", 16 * KiB)


@contextlib.contextmanager
def array(store: Store, name: str = "a") -> Iterator[Pack]:
    """The array of this name, made if there is none."""
    lease = store.packs.find("samples", name)
    pack = store.packs.open(lease, SLOTS) if lease is not None else None
    if pack is None:
        hold = store.locks.hold("samples", name)
        pack = store.packs.make("samples", name, SLOTS)
        hold.release()
    try:
        yield pack
    finally:
        pack.close()


def fill(store: Store, *slots: int, name: str = "a") -> None:
    with array(store, name) as pack:
        for slot in slots:
            pack.put(slot, raw, BODIES[slot])


def is_whole(store: Store, *filled: int, name: str = "a") -> None:
    """Each slot is empty, or has what was put there; those of ``filled`` are not empty."""
    lease = store.packs.find("samples", name)
    if lease is None:
        assert not filled
        return
    pack = store.packs.open(lease, SLOTS)
    assert pack is not None
    for slot, body in BODIES.items():
        found = pack.find(slot)
        assert found is None or found == body
        assert found is not None or slot not in filled
    assert pack.bad_slots() == []
    pack.close()


def nothing(store: Store) -> None:
    """An empty root."""


def test_the_first_put(scene: NewScene) -> None:
    steps = scene(MiB).play(nothing, lambda store: fill(store, 0), is_whole, least=10)
    assert {"allocate", "truncate", "pwrite", "set_word", "rename"} <= {step.split()[0] for step in steps}


def test_further_puts_over_several_segments(scene: NewScene) -> None:
    scene(MiB).play(lambda store: fill(store, 0), lambda store: fill(store, *range(1, 8)), lambda store: is_whole(store, 0), least=30)


def test_who_appends_after_a_death_overwrites_nothing(scene: NewScene) -> None:
    """What a reader has found stays as it was, and the segments of the dead are used up before new ones."""

    def after(store: Store) -> None:
        with array(store) as reader:
            found = {slot: view for slot in BODIES if (view := reader.find(slot)) is not None}
            fill(store, *BODIES)
            assert all(view == BODIES[slot] for slot, view in found.items())
            assert all(reader.find(slot) == body for slot, body in BODIES.items())
            assert len(os.listdir(store.root.pack(reader.id))) <= 1 + 5  # of 32 KiB, with 3 samples in each
        is_whole(store, *BODIES)

    scene(MiB).play(lambda store: fill(store, 0), lambda store: fill(store, 1, 2, 3, 4), after, least=25)


def test_the_next_writer_goes_on_where_the_dead_one_was(scene: NewScene) -> None:
    """Nothing of what the dead one took is lost: his segment is taken over, and the records in it stay."""

    def after(store: Store) -> None:
        is_whole(store, 0)
        fill(store, *range(8))
        is_whole(store, *range(8))
        used = store.seeing.usage()
        assert used.reserved == 0
        assert used.used < 200 * KiB

    scene(MiB).play(lambda store: fill(store, 0), lambda store: fill(store, 1, 2, 3), after, least=15)


def test_a_writer_that_needs_what_stands_empty_behind_the_dead(scene: NewScene) -> None:
    """The tail of a dead one's segment is given back before anything is evicted."""

    def before(store: Store) -> None:
        fill(store, 0)
        with array(store) as pack:  # what a killed process leaves: a segment that is his, with room behind its last record
            pack.put(1, raw, BODIES[1])
            pack._appender = None

    def during(store: Store) -> None:
        store.put("v", "large", bytes(200 * KiB))

    def after(store: Store) -> None:
        is_whole(store, 0, 1)
        if bytes_of(store, "large") is None:
            store.put("v", "large", bytes(200 * KiB))
        is_whole(store, 0, 1)
        assert bytes_of(store, "large") == bytes(200 * KiB)

    scene(244 * KiB).play(before, during, after, small_first=False)  # 4 KiB less than all of it takes


def test_another_version_takes_the_name(scene: NewScene) -> None:
    def renew(store: Store) -> None:
        hold = store.locks.hold("samples", "a")
        try:
            store.packs.make("samples", "a", SLOTS, fingerprint="2").close()
        finally:
            hold.release()

    scene(MiB).play(lambda store: fill(store, 0, 1), renew, is_whole, least=8)


def test_an_array_without_a_name_goes_with_its_process(scene: NewScene) -> None:
    def during(store: Store) -> None:
        pack = store.packs.make("samples", "~1", SLOTS, life="held")
        pack.put(0, raw, BODIES[0])
        pack.close()
        store.drop([pack.lease.entry])

    def after(store: Store) -> None:
        store.put("v", "next", b"")
        assert store.seeing.entries("samples") == []
        assert os.listdir(store.root.packs_dir) == [] or store.seeing.usage().reserved  # one that was not whole yet is counted as a partial

    scene(MiB).play(nothing, during, after, least=12)


def test_an_array_gets_a_name(scene: NewScene) -> None:
    def during(store: Store) -> None:
        pack = store.packs.make("samples", "~1", SLOTS, life="held")
        for slot in range(4):
            pack.put(slot, raw, BODIES[slot])
        assert store.packs.name(pack, "samples", "a", overwrite=True)
        pack.freeze()
        pack.close()

    def after(store: Store) -> None:
        is_whole(store)
        assert store.packs.find("samples", "~1") is None

    scene(MiB).play(nothing, during, after, least=15)


def test_eviction_of_a_whole_array(scene: NewScene) -> None:
    def before(store: Store) -> None:
        fill(store, *range(8))
        store.put("v", "warm", bytes(20 * KiB))

    def after(store: Store) -> None:
        lease = store.packs.find("samples", "a")
        if lease is not None:
            lease.close()
            is_whole(store, *range(8))

    scene(256 * KiB).play(before, lambda store: store.put("v", "large", bytes(200 * KiB)), after, small_first=False)


def test_what_the_dead_took_is_free_after_the_next_put_elsewhere(scene: NewScene) -> None:
    """A put into another array gives back what a dead writer's segment has beyond its records."""

    def after(store: Store) -> None:
        is_whole(store, 0)
        fill(store, 0, name="b")
        used = {entry.key: entry.charge for entry in store.seeing.entries("samples")}
        assert used["a"] <= 8 * KiB + 16 * KiB + 16 * KiB  # directory, index, and two samples, in blocks
        store.remove([victim_of(entry) for entry in store.seeing.entries("samples") if entry.key == "b"])

    scene(MiB).play(lambda store: fill(store, 0), lambda store: fill(store, 1), after, least=5)
