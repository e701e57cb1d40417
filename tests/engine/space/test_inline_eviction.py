"""Small values make way for small values within one transaction."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from forebay._engine.store import Store
from forebay._kernel import host
from tests.harness import KiB, MiB, assert_settled, bytes_of, opened
from tests.processes import fork

VALUE = os.urandom(4 * KiB)


def fill(store: Store, count: int = 300) -> None:
    for n in range(count):
        store.put("v", f"k{n}", VALUE)


def commits(store: Store, work: int) -> int:
    """How many transactions ``work`` puts of new values take."""
    steps: Counter[str] = Counter()
    host.on_step(lambda call, subject: steps.update([call]))
    try:
        for n in range(work):
            store.put("v", f"new{n}", VALUE)
    finally:
        host.on_step(None)
    return steps["committed"]


def test_a_put_under_pressure_is_one_transaction(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        fill(store)
        store.put("v", "one", VALUE)  # picks the coldest
        assert commits(store, 40) == 40
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", MiB)


def test_the_coldest_go_first_and_are_counted(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        fill(store)
        store.put("v", "one", VALUE)
        left = [entry.key for entry in store.entries("v")]
        before = store.counts()["evictions"]
        store.view("v", left[0])
        store.touch(store.entries("v")[0])
        commits(store, 60)
        now = {entry.key for entry in store.entries("v")}
        gone = [key for key in left if key not in now]
        assert gone == left[1 : len(gone) + 1]  # in the order of their last use; the one that was read stays
        assert left[0] in now
        assert store.counts()["evictions"] - before == len(gone)


def test_who_remembers_what_made_way_finds_nothing(tmp_path: Path) -> None:
    with opened(tmp_path / "root", MiB) as store:
        fill(store)
        remembered = {entry.key: store.view("v", entry.key) for entry in store.entries("v")}

        def press() -> None:
            with opened(tmp_path / "root") as other:
                for n in range(100):
                    other.put("v", f"new{n}", VALUE)
                other.put("v", "large", VALUE * 4)
                assert other.counts()["evictions"] > 100  # some have no successor in their slot

        fork(press).result()
        left = {entry.key for entry in store.entries("v")}
        assert 0 < len(left & set(remembered)) < len(remembered)
        for key, found in remembered.items():
            assert found is not None
            assert found.is_current() == (key in left), key
            assert bytes(found.view) == VALUE
            assert bytes_of(store, key) == (VALUE if key in left else None)


@pytest.mark.parametrize("how", ["pinned", "another space", "file"])
def test_what_is_not_plain_goes_the_long_way(tmp_path: Path, how: str) -> None:
    """What is pinned stays; a space that may not evict its own takes others'; a coldest entry that is a file goes as files go."""
    with opened(tmp_path / "root", MiB) as store:
        if how == "another space":
            store.spaces.ensure("f", policy="freeze")
            store.put("f", "stays", VALUE)
        if how == "file":
            store.put("v", "stays", os.urandom(100 * KiB))
        else:
            store.put("v", "stays", VALUE, life="pinned" if how == "pinned" else "cached")
        fill(store)
        assert (bytes_of(store, "stays") is not None) == (how == "pinned")
        assert bytes_of(store, "k299") == VALUE
        if how == "another space":
            assert bytes_of(store, "stays", "f") is None  # frozen against its own, not against the root's needs
        assert store.check(deep=True) == []
    assert_settled(tmp_path / "root", MiB)


def test_a_replaced_value_is_not_its_own_victim(tmp_path: Path) -> None:
    with opened(tmp_path / "root", 64 * KiB) as store:
        for n in range(200):
            store.put("v", "same", VALUE + bytes([n]))
            store.put("v", f"k{n}", VALUE)
            store.touch(store.entries("v")[0])
        assert bytes_of(store, "same") == VALUE + bytes([199])
        assert store.check(deep=True) == []
