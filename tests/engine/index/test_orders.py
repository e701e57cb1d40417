"""What look-aheads tell each other: hints that are good while their process lives and goes on."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay._engine.index import orders
from forebay._engine.index.orders import BUCKETS, NEVER, TABLES, Orders
from forebay._engine.store import Store
from tests.harness import MiB, opened
from tests.processes import Line, fork, in_child, talk_to


@pytest.fixture
def store(quick_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(orders, "LOOK_AGAIN", 0.0)
    with opened(quick_path / "root", 256 * MiB) as store:
        yield store
        assert store.check() == []


@pytest.fixture
def mine(store: Store) -> Iterator[Orders]:
    mine = Orders(store.root)
    yield mine
    mine.close()


def hashes(count: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(count)]


def announcing(store: Store, known: list[int]) -> Orders:
    """A look-ahead that uses these in their order, and has the pace of one a millisecond."""
    its = Orders(store.root)
    for position, hash in enumerate(known, 1):
        its.announce(hash, position)
    its._pace = 1_000_000
    its.advance(0)
    return its


def test_others_know_how_soon_an_object_is_used(store: Store, mine: Orders) -> None:
    known = hashes(100)
    its = announcing(store, known)
    mine._pace = 2_000_000  # half as fast
    assert [mine.turns_until(hash) for hash in known] == [max((at + 1) // 2, 1) for at in range(100)]
    assert mine.turns_until(12345) == NEVER
    its.advance(50)
    assert [mine.turns_until(hash) for hash in known[:50]] == [NEVER] * 50
    its.announce(known[10], 90)
    its.announce(known[60], NEVER)
    its._pace = 1_000_000
    its.advance(51)
    assert (mine.turns_until(known[10]), mine.turns_until(known[60])) == (19, NEVER)
    its.close()
    assert [mine.turns_until(hash) for hash in known] == [NEVER] * 100


def test_a_look_ahead_does_not_hear_itself_and_hears_the_nearest_of_several(store: Store, mine: Orders) -> None:
    known = hashes(20)
    mine.announce(known[0], 1)
    assert mine.turns_until(known[0]) == NEVER
    mine._pace = 1_000_000
    first, second = announcing(store, known), announcing(store, known[::-1])
    assert mine.turns_until(known[3]) == 4
    assert mine.turns_until(known[16]) == 4
    first.close()
    assert mine.turns_until(known[3]) == 17
    second.close()


def test_what_a_killed_process_wanted_is_wanted_no_more(store: Store, mine: Orders) -> None:
    known = hashes(20)

    def work(line: Line) -> None:
        with opened(store.root.path) as its_store:
            its = announcing(its_store, known)
            line.say()
            line.hear()
            its.close()

    with talk_to(work) as child:
        child.hear()
        assert mine.turns_until(known[5]) < NEVER
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        assert mine.turns_until(known[5]) == NEVER
    again = announcing(store, known[:5])  # it has the table of the dead one
    assert mine.turns_until(known[4]) < NEVER
    assert mine.turns_until(known[5]) == NEVER
    again.close()


def test_a_look_ahead_that_stands_still_wants_nothing_after_a_while(store: Store, mine: Orders, monkeypatch: pytest.MonkeyPatch) -> None:
    known = hashes(5)
    its = announcing(store, known)
    assert mine.turns_until(known[0]) < NEVER
    monkeypatch.setattr(orders, "STALE", 0)
    assert mine.turns_until(known[0]) == NEVER
    its.close()


def test_a_forked_child_tells_nothing_and_does_not_end_its_parents_table(store: Store, mine: Orders) -> None:
    known = hashes(5)
    its = announcing(store, known)

    def in_the_child() -> None:
        its.announce(known[0], NEVER)
        its.advance(3)
        its.close()

    in_child(in_the_child)
    assert mine.turns_until(known[0]) < NEVER
    its.close()


@pytest.mark.rotates
def test_more_than_a_table_holds_keeps_the_nearest(store: Store, mine: Orders) -> None:
    known = hashes(2 * BUCKETS)
    its = announcing(store, known)
    found = [mine.turns_until(hash) < NEVER for hash in known[: BUCKETS // 2 : 20]]
    assert sum(found) >= 0.95 * len(found)
    its.close()


def test_more_look_aheads_than_tables_still_hear(store: Store) -> None:
    known = hashes(5)
    every = [announcing(store, known) for _ in range(TABLES)]
    last = Orders(store.root)
    last.announce(known[0], 3)
    last.advance(1)
    assert last.turns_until(known[0]) < NEVER
    for its in [*every, last]:
        its.close()
    assert {path.name for path in store.root.shared_dir.glob("order-*")} == {f"order-{number}" for number in range(TABLES)}


@pytest.mark.parametrize("damage", ["empty", "noise", "foreign", "directory"])
def test_whatever_became_of_a_table_look_aheads_go_on(store: Store, mine: Orders, damage: str) -> None:
    path = store.root.shared_dir / "order-1"
    its = announcing(store, hashes(5))
    its.close()
    data = path.read_bytes()
    path.unlink()
    noise = data[:16] + random.Random(1).randbytes(len(data) - 16)
    if damage == "directory":
        path.mkdir()
    else:
        path.write_bytes({"empty": b"", "noise": noise, "foreign": bytes(len(data))}[damage])
    child = fork(lambda: Orders(store.root).turns_until(7))
    assert child.result() == NEVER
    child.close()
    its = announcing(store, hashes(5))
    assert mine.turns_until(hashes(5)[0]) < NEVER
    its.close()
