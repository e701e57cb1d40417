"""A process dies at each step while others live: one has a lease on the old version, one remembers what it read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay._engine.store import Store
from tests.crash.conftest import Scene, victim_of
from tests.harness import KiB, MiB, assert_counted, bytes_of, opened
from tests.processes import Child, Gate, death_of, fork_to_die, in_child

OLD, NEW, SMALL = os.urandom(100 * KiB), os.urandom(120 * KiB), os.urandom(500)
MOST = 200


def replace(store: Store) -> None:
    store.put("v", "a", NEW)


def replace_by_value(store: Store) -> None:
    store.put("v", "a", SMALL)


def remove(store: Store) -> None:
    store.remove([victim_of(store.seeing.entries("v")[0])])


def press(store: Store) -> None:
    store.put("v", "big", bytes(300 * KiB))


@pytest.mark.parametrize("act", [replace, replace_by_value, remove, press])
def test_a_lease_pins(quick_path: Path, children: Callable[..., Child], act: Callable[[Store], object]) -> None:
    """While the lease is held the path exists and the bytes are the old ones; when its holder was killed, the next writers free them."""
    place, budget = quick_path / "root", 512 * KiB
    for step in range(MOST):
        said, go = Gate(), Gate()

        def holder(said: Gate = said, go: Gate = go) -> None:
            with opened(place, budget) as store:
                store.put("v", "a", OLD)
                lease = store.lease("v", "a")
                assert lease is not None
                for key in ("b", "c"):  # so that the coldest is the one that is leased
                    store.put("v", key, OLD)
                buffer = store.view("v", "a")
                said.open()
                go.wait()
                assert Path(lease).read_bytes() == OLD
                assert buffer is not None
                assert bytes(buffer.view) == OLD
                said.open()
                go.wait()

        def dying() -> None:
            with opened(place) as store:
                act(store)

        def next_one() -> None:
            with opened(place) as store:
                assert store.check(deep=True) == []
                assert bytes_of(store, "a") in ((OLD, NEW) if act is replace else (OLD, SMALL) if act is replace_by_value else (OLD,))
                store.put("v", "next", b"written once")
                assert store.check(deep=True) == []

        def after_the_holder() -> None:
            with opened(place) as store:
                store.put("v", "next", b"written twice")
                store.put("v", "brim", bytes(budget))
                assert store.check(deep=True) == []
                store.remove([victim_of(entry) for entry in store.seeing.entries("v")])

        child = children(holder)
        said.wait()
        death = death_of(fork_to_die(step, dying))
        in_child(next_one)
        go.open()
        said.wait()
        child.kill()
        in_child(after_the_holder)
        assert assert_counted(place, budget).entries == 0
        for gate in (said, go):
            gate.close()
        if death is None:
            assert step > 2
            return
    pytest.fail("it never came to its end")


@pytest.mark.parametrize("act", [replace, replace_by_value, remove, press])
def test_who_remembers_reads_exact_bytes(quick_path: Path, children: Callable[..., Child], act: Callable[[Store], object]) -> None:
    """A process that lives through it all, and remembers what it read, sees the old or the new version, as a fresh one does."""
    place, budget = quick_path / "root", 512 * KiB
    said, go = Gate(), Gate()

    def witness() -> int:
        looks = 0
        with opened(place, budget) as store:
            while True:
                for key in ("a", "b", "c"):
                    store.put("v", key, OLD)
                assert bytes_of(store, "a") == OLD
                said.open()
                go.wait()
                if (quick_path / "done").exists():
                    return looks
                found = bytes_of(store, "a")
                assert (b"nothing" if found is None else found) == (quick_path / "seen").read_bytes()
                assert store.check(deep=True) == []
                looks += 1

    child = children(witness)
    said.wait()
    seen: set[bytes | None] = set()

    def act_there() -> None:
        with opened(place) as store:
            act(store)

    def look() -> bytes | None:
        with opened(place) as store:
            return bytes_of(store, "a")

    for step in range(MOST):
        death = death_of(fork_to_die(step, act_there))
        seen.add(found := in_child(look))
        (quick_path / "seen").write_bytes(b"nothing" if found is None else found)
        if death is None:
            break
        go.open()
        said.wait()
    (quick_path / "done").touch()
    go.open()
    assert child.result() == step
    (quick_path / "done").unlink()
    assert len(seen) == 2
    assert seen <= {None, OLD, NEW, SMALL}
    for gate in (said, go):
        gate.close()


def test_held_entries_of_a_killed_holder(scene: Callable[[int], Scene]) -> None:
    """Entries that live as long as they are held: their holder dies, then the sweeper that frees them, at each step."""

    def before(store: Store) -> None:
        store.put("v", "kept", NEW)
        for n in range(3):  # each put sweeps the one before, and the last stays
            store.put("v", f"h{n}", OLD, life="held")

    def after(store: Store) -> None:
        assert bytes_of(store, "kept") == NEW

    scene(MiB).play(before, lambda store: store.put("v", "x", SMALL), after, least=8)
