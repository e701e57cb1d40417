"""Room: who goes, how many, and who cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import errors
from forebay._engine import ranking
from forebay._engine.catalog import reservations
from forebay._engine.store import Store
from forebay._model import ObjectInfo
from tests.harness import KiB, MiB, bytes_of, opened


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with opened(tmp_path / "root", MiB) as found:
        yield found
        assert found.check(deep=True) == []


def test_more_victims_than_are_picked_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranking, "PICKED", 64)
    for n in range(1000):
        store.put("v", f"k{n}", b"x" * 500)
    store.put("v", "big", bytes(900 * KiB))
    assert bytes_of(store, "big") == bytes(900 * KiB)


def test_what_is_read_all_the_time_can_be_evicted(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    pick = ranking.Ranking.pick

    def pick_and_read(self: ranking.Ranking, scope: ranking.Scope) -> None:
        pick(self, scope)
        for entry in store.entries("v"):
            store.touch(entry)

    with monkeypatch.context() as patch:
        patch.setattr(ranking.Ranking, "pick", pick_and_read)
        store.put("v", "new", bytes(300 * KiB))
    assert bytes_of(store, "new") == bytes(300 * KiB)


def test_leases_alone_make_it_full(store: Store) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    leases = [store.lease("v", f"k{n}") for n in range(9)]
    with pytest.raises(errors.NoSpace) as found:
        store.put("v", "new", bytes(300 * KiB))
    assert (found.value.need, found.value.budget) == (300 * KiB, MiB)
    assert all(lease is not None and Path(lease).exists() for lease in leases)
    for lease in leases:
        assert lease is not None
        lease.close()
    store.put("v", "new", bytes(300 * KiB))


def test_lru_is_exact(store: Store) -> None:
    for n in range(9):
        store.put("v", f"k{n}", bytes(100 * KiB))
    for entry in store.entries("v"):
        if entry.key in ("k0", "k3"):
            store.touch(entry)
    store.put("v", "new", bytes(400 * KiB))
    assert [entry.key for entry in store.entries("v")] == ["k5", "k6", "k7", "k8", "k0", "k3", "new"]


@pytest.mark.parametrize("size", [10, 20 * KiB], ids=["value", "blob"])
def test_a_replaced_entry_of_the_only_one_allowed(tmp_path: Path, size: int) -> None:
    with opened(tmp_path / "one", MiB, max_entries=1) as store:
        store.put("v", "a", b"1" * size)
        store.put("v", "a", b"2" * size)
        assert bytes_of(store, "a") == b"2" * size
        store.put("v", "b", b"3" * size)
        assert [entry.key for entry in store.entries("v")] == ["b"]


def test_a_partial_of_the_only_entry_allowed(tmp_path: Path) -> None:
    with opened(tmp_path / "one", 8 * MiB, max_entries=1) as store:
        hold = store.hold("v", "a")
        with store.writing("v", "a") as writing:
            writing.begin(ObjectInfo("", 2 * MiB, '"1"', strong=True))
            writing.write(0, bytes(MiB))
        hold.release()
        assert len(reservations.every(store._catalog)) == 1
        store.put("v", "b", b"3")
        assert [entry.key for entry in store.entries("v")] == ["b"]
        assert store.check() == []
