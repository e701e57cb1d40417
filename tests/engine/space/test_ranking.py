"""The coldest are found in stripes of the table: few at a time, and exactly those."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from forebay._engine.catalog import entries
from forebay._engine.catalog.transactions import Rows
from forebay._engine.index.records import RECORDS, EntryIndex
from forebay._engine.index.settings import Settings, SpaceLimits
from forebay._engine.space import ranking
from forebay._engine.space.ranking import Ranking, Scope
from forebay._engine.store import Store
from forebay.errors import NoSpace
from tests.harness import MiB, opened
from tests.processes import in_child

STRIPES = 16
COUNT = 2000


@pytest.fixture
def store(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """2,000 small values, in a table that is looked at in 16 stripes, two at a time; used in an order of their own."""
    for name, value in (("STRIPE", RECORDS // STRIPES), ("AT_ONCE", 2), ("PICKED", 256), ("_SAMPLE", 8)):
        monkeypatch.setattr(ranking, name, value)
    with opened(quick_path / "root", 64 * MiB) as found:
        found.put_many("v", [(f"k{n}", b"x" * 100) for n in range(COUNT)])
        found.used = use_in_any_order(found)  # type: ignore[attr-defined]
        yield found
        assert found.check() == []


def use_in_any_order(store: Store) -> list[str]:
    """The keys, the coldest first."""
    rng, entries = random.Random(17), store.seeing.entries("v")
    ticks = rng.sample(range(1, 10 * COUNT), len(entries))
    for entry, tick in zip(entries, ticks, strict=True):
        store.engine.index.touch(entry.slot, 10**18 + tick)
    return [entry.key for _, entry in sorted(zip(ticks, entries, strict=True), key=lambda pair: pair[0])]


def full(store: Store) -> None:
    """From now on each value that comes needs the room of another."""
    store.engine.settings.set(Settings(budget=store.seeing.usage().used + 100))


def keys(store: Store) -> set[str]:
    return set(store.seeing.keys("v"))


def test_a_put_looks_at_few_slots_however_many_there_are(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    stripe = EntryIndex.stripe

    def counting(self: EntryIndex, number: int, stripes: int) -> Iterator[tuple[range, list[int], list[int]]]:
        for slots, ids, ticks in stripe(self, number, stripes):
            looked[-1] += len(slots)
            yield slots, ids, ticks

    monkeypatch.setattr(EntryIndex, "stripe", counting)
    full(store)
    for n in range(1000):
        looked.append(0)
        store.put("v", f"new{n}", b"y" * 100)
    assert len(keys(store)) <= COUNT + 1
    assert max(looked) <= 3 * RECORDS // STRIPES  # two stripes, and one of a rounded length
    assert sum(looked) >= RECORDS  # all were seen


@pytest.mark.rotates
def test_exactly_the_coldest_go_once_all_were_looked_at(store: Store) -> None:
    used = store.used  # type: ignore[attr-defined]
    full(store)
    scope = Scope()
    for _ in range(STRIPES):
        store.engine.parts.writers.ranking.pick(scope)
    for n in range(300):
        store.put("v", f"new{n}", b"y" * 100)
    gone = COUNT - sum(key in keys(store) for key in used)
    assert gone >= 300
    assert not keys(store) & set(used[:gone])


def test_the_first_victims_of_a_process_are_of_the_coldest(store: Store) -> None:
    used = store.used  # type: ignore[attr-defined]
    full(store)
    store.put("v", "new", b"y" * 100)
    there = keys(store)
    gone = {key for key in used if key not in there}
    assert gone
    assert gone <= set(used[: COUNT // 4])


def test_what_cannot_go_is_passed_by_however_cold_it_is(store: Store) -> None:
    used = store.used  # type: ignore[attr-defined]
    for key in used[:-20]:
        store.set_life("v", key, "pinned")
    full(store)
    for n in range(15):
        store.put("v", f"new{n}", b"y" * 100)
    assert set(used[:-20]) <= keys(store)
    assert "new14" in keys(store)


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows are asked for from now on, each time."""
    asked: list[int] = []
    victims = entries.victims

    def counting(rows: Rows, ids: Sequence[int]) -> list[tuple[int, int, int, int, str, str]]:
        asked.append(len(ids))
        return victims(rows, ids)

    monkeypatch.setattr(entries, "victims", counting)
    return asked


def test_what_was_passed_by_is_not_read_again_at_each_look(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    used = store.used  # type: ignore[attr-defined]
    for key in used[:-60]:
        store.set_life("v", key, "pinned")
    full(store)
    store.put("v", "first", b"y" * 100)
    asked = count_rows(monkeypatch)
    for n in range(50):
        store.engine.parts.writers.ranking.pick(Scope())
        store.put("v", f"new{n}", b"y" * 100)
    assert len(keys(store) & set(used[:-60])) == COUNT - 60
    assert sum(asked) < 4 * COUNT  # of 50 looks, with 60 each that may go


def test_what_another_process_unpins_may_go_at_once_where_nothing_else_may(store: Store) -> None:
    used = store.used  # type: ignore[attr-defined]
    for key in used:
        store.set_life("v", key, "pinned")
    full(store)
    for _ in range(2):  # the second time all of it is known
        with pytest.raises(NoSpace):
            store.put("v", "new", b"y" * 200)
    in_child(lambda: [store.set_life("v", key, "cached") for key in used[5:7]])
    store.put("v", "new", b"y" * 200)
    assert set(used) - keys(store) <= set(used[5:7])


@pytest.mark.parametrize("by_us", [True, False])
def test_what_was_unpinned_goes_in_its_turn(store: Store, by_us: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At once in the process that unpinned it, after `SPARED_FOR` in the others."""
    used = store.used  # type: ignore[attr-defined]
    for key in used[:-600]:
        store.set_life("v", key, "pinned")
    for _ in range(STRIPES):
        store.engine.parts.writers.ranking.pick(Scope())
    if by_us:
        store.set_life("v", used[0], "cached")
    else:
        in_child(lambda: store.set_life("v", used[0], "cached"))
        store.engine.parts.writers.ranking.pick(Scope())
        assert used[0] not in {key_of(store, cold.id) for cold in store.engine.parts.writers.ranking.coldest(Scope())}
        later = time.monotonic() + ranking.SPARED_FOR
        monkeypatch.setattr(ranking.time, "monotonic", lambda: later)
    for _ in range(STRIPES):
        store.engine.parts.writers.ranking.pick(Scope())
    assert used[0] in {key_of(store, cold.id) for cold in store.engine.parts.writers.ranking.coldest(Scope())}


def key_of(store: Store, id: int) -> str:
    found = entries.by_id(store.engine.parts.catalog, id)
    assert found is not None
    return found.key


def test_a_small_space_among_many_entries_finds_its_own(store: Store) -> None:
    for n in range(20):
        store.put("small", f"s{n}", b"z" * 100)
    _quota(store, 2000)
    for n in range(30):
        store.put("small", f"t{n}", b"z" * 100)
    assert sorted(store.seeing.keys("small")) == sorted(f"t{n}" for n in range(10, 30))
    assert len(keys(store)) == COUNT


def _quota(store: Store, quota: int) -> None:
    store.engine.settings.set_space("small", SpaceLimits(quota=quota))


def test_what_was_found_again_while_it_is_taken_is_given_once(store: Store) -> None:
    """One call gives many; none of them is gone before it ends."""
    found = list(Ranking(store.engine.parts.catalog, store.engine.index, store.engine.adaptive).coldest(Scope()))
    assert found == []
    mine = Ranking(store.engine.parts.catalog, store.engine.index, store.engine.adaptive)
    mine.pick(Scope())
    given = [cold.id for cold in mine.coldest(Scope())]
    assert len(given) == len(set(given)) > 0


def test_what_another_thread_is_about_to_read_can_be_taken_meanwhile(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P1 picks, and waits for the catalog / P2 looks for a victim inside its transaction / P1 reads the rows of what it picked."""
    with opened(quick_path / "root", MiB) as store:
        store.put_many("v", [(f"k{n}", b"x" * 100) for n in range(20)])
        candidates = store.engine.parts.writers.ranking
        reading, read = threading.Event(), threading.Event()
        victims = entries.victims

        def slowly(rows: Rows, ids: Sequence[int]) -> list[tuple[int, int, int, int, str, str]]:
            if threading.current_thread() is picker:
                reading.set()
                assert read.wait(20)
            return victims(rows, ids)

        monkeypatch.setattr(entries, "victims", slowly)
        picker = threading.Thread(target=candidates.pick, args=(Scope(),))
        picker.start()
        assert reading.wait(20)
        try:
            with store.engine.parts.catalog.write():
                taken = [one.id for one in candidates.coldest(Scope())]
        finally:
            read.set()
            picker.join()
        assert len(set(taken)) == len(taken) == 20
