"""A process dies before the k-th change of a file while it keeps a value, replaces one, removes some, makes one for others: for every k."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest

from forebay._engine.store import Store
from forebay.codecs import codec
from forebay.fetch import Fetcher
from forebay.remote import RemoteOptions
from forebay.tasks.values import Values
from tests.crash.conftest import Scene
from tests.harness import KiB, MiB

NewScene = Callable[[int], Scene]
SMALL, OTHER = {"small": 1}, ["other"] * 50
ARRAY = np.arange(12_000, dtype="f8")
LARGE = {"a": np.frombuffer(os.urandom(400 * KiB), "u1"), "b": np.arange(10), "c": np.frombuffer(os.urandom(300 * KiB), "u1")}
DIGEST = "0" * 32


def values_of(store: Store, which: str = "pickle") -> Values:
    return Values(Fetcher(store, RemoteOptions()), "v", codec(which))


def same(found: object, wanted: object) -> bool:
    if isinstance(wanted, dict) and isinstance(found, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return np.array_equal(found, wanted) if isinstance(wanted, np.ndarray) else found == wanted  # type: ignore[arg-type]


def nothing(store: Store) -> None:
    """An empty root."""


@pytest.mark.parametrize("value", [SMALL, ARRAY, LARGE], ids=["row", "small file", "file in pieces"])
def test_a_value_is_there_whole_or_not_at_all(scene: NewScene, value: object) -> None:
    def after(store: Store) -> None:
        found = values_of(store).look("k")
        assert found is None or same(found[0], value)
        assert (found is None) == (not values_of(store).has("k"))

    def during(store: Store) -> None:
        assert values_of(store).keep("k", value, digest=DIGEST)

    def look(store: Store) -> None:
        found = values_of(store).look("k", DIGEST)
        assert found is None or same(found[0], value)
        after(store)

    scene(2 * MiB).play(nothing, during, look)


@pytest.mark.parametrize("new", [SMALL, LARGE], ids=["row", "file"])
@pytest.mark.parametrize("old", [OTHER, ARRAY], ids=["row", "file"])
def test_a_failed_replacement_keeps_the_old_value(scene: NewScene, old: object, new: object) -> None:
    """Value, codec and digest change in one step: never one of the two with the other's."""

    def before(store: Store) -> None:
        assert values_of(store).keep("k", old, digest="1" * 32)

    def during(store: Store) -> None:
        assert values_of(store).keep("k", new, digest="2" * 32)

    def after(store: Store) -> None:
        values = values_of(store)
        first, second = values.look("k", "1" * 32), values.look("k", "2" * 32)
        assert (first is None) != (second is None)
        assert same(first[0], old) if first else same(second and second[0], new)
        assert values.size()[1] == len(values.keys())

    scene(2 * MiB).play(before, during, after)


def test_values_make_way_under_a_budget(scene: NewScene) -> None:
    """The space has a quota: what goes and what comes are counted, wherever the writer dies."""
    stored = {f"k{n}": os.urandom(15 * KiB if n % 2 else 60 * KiB) for n in range(6)}

    def before(store: Store) -> None:
        for key, value in stored.items():
            assert values_of(store, "raw").keep(key, value)

    def during(store: Store) -> None:
        store.spaces.ensure("v", quota=320_000)
        assert values_of(store, "raw").keep("new", bytes(300_000))
        assert values_of(store, "raw").keep("row", bytes(10_000))

    def after(store: Store) -> None:
        values = values_of(store, "raw")
        for key, value in stored.items():
            found = values.look(key)
            assert found is None or found[0] == value
        assert all(found is None or found[0] == bytes(300_000) for found in [values.look("new")])
        store.spaces.ensure("v", quota=320_000)
        assert values.keep("fill", bytes(319_000))  # also in place of what the dead one had begun
        store.spaces.ensure("v", quota=1 << 40)

    scene(MiB).play(before, during, after, least=8)


def test_evict_and_flush(scene: NewScene) -> None:
    def before(store: Store) -> None:
        values = values_of(store)
        for n, value in enumerate([SMALL, ARRAY, OTHER, ARRAY]):
            assert values.keep(f"k{n}", value, pin=n > 1)

    def during(store: Store) -> None:
        assert values_of(store).evict("k2")
        assert values_of(store).evict("k3")
        assert values_of(store).flush() >= 2

    def after(store: Store) -> None:
        values = values_of(store)
        for n, value in enumerate([SMALL, ARRAY, OTHER, ARRAY]):
            found = values.look(f"k{n}")
            assert found is None or same(found[0], value)
        for key in ("k2", "k3"):
            values.evict(key)  # pinned, it would be in the way of what comes next

    scene(2 * MiB).play(before, during, after)


def test_who_makes_it_dies_and_the_next_one_makes_it(scene: NewScene) -> None:
    def during(store: Store) -> None:
        assert same(values_of(store).single("k", DIGEST, lambda: ARRAY), ARRAY)

    def after(store: Store) -> None:
        ran: list[int] = []

        def make() -> np.ndarray:
            ran.append(1)
            return ARRAY

        assert same(values_of(store).single("k", DIGEST, make, timeout=10), ARRAY)
        assert values_of(store).look("k", DIGEST) is not None
        assert len(ran) <= 1

    scene(MiB).play(nothing, during, after)
