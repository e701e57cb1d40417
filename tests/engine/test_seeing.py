"""What is read of a root, for people: what the index of keys is good for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay._engine import seeing
from forebay._engine.catalog import entries
from forebay._engine.index.records import ID
from forebay._engine.store import Store
from tests.harness import MiB, opened


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        store.put_many("v", [(f"key {number}", bytes([number])) for number in range(100)])
        yield store


def test_all_entries_are_looked_up_where_there_are_few(store: Store) -> None:
    use = store.seeing.index_use()
    assert (use.is_there, use.used, use.sampled, use.led) == (True, 100, 100, 100)


def test_of_many_entries_a_sample_is_looked_up(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeing, "SAMPLED", 10)
    use = store.seeing.index_use()
    assert (use.sampled, use.led) == (10, 10)


def test_a_sample_is_spread_over_all_entries(store: Store) -> None:
    every = sorted(entry.id for entry in entries.live(store.engine.parts.catalog))
    sample = sorted(entry.id for entry in entries.sample(store.engine.parts.catalog, 10))
    assert sample[0] == every[0]
    assert sample[-1] >= every[80]


def test_what_other_entries_replaced_is_not_led_to(store: Store) -> None:
    index = store.engine.index
    number = store.seeing.index_use().led
    entry = store.entry("v", "key 7")
    assert entry is not None
    words, base = index.record(entry.slot)
    words[base + ID] += 1
    assert store.seeing.index_use().led == number - 1


def test_a_root_without_entries_has_nothing_to_sample(quick_path: Path) -> None:
    with opened(quick_path / "empty", 64 * MiB) as store:
        use = store.seeing.index_use()
        assert (use.is_there, use.sampled, use.led) == (False, 0, 0)
