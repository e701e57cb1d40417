"""What a process keeps mapped: of more than fits, a part stays; the coldest goes, and its mapping with it."""

from __future__ import annotations

import sys
import threading
import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from forebay._engine.index.memo import Memo
from forebay._engine.store import Store
from tests.harness import MiB, opened

SIZE, FIT, MANY = 100_000, 20, 60


@pytest.fixture
def store(quick_path: Path) -> Iterator[Store]:
    with opened(quick_path / "root", 64 * MiB) as store:
        for number in range(MANY):
            store.put("v", str(number), bytes([number]) * SIZE)
        store.spaces.number("v")
        store.engine.memo._max_bytes = FIT * SIZE
        yield store


def read(store: Store, number: int) -> memoryview:
    data = store.hot_lookup("v")(str(number), 1 << 63)
    if data is None:
        data = store.first_touch("v", str(number), 1 << 63)
    assert data is not None
    assert data[0] == data[-1] == number
    return data


def kept(memo: Memo) -> set[str]:
    return set(memo._known["v"])


def test_of_more_than_fits_nearly_all_that_fits_stays_pass_after_pass(store: Store) -> None:
    memo = store.engine.memo
    for _ in range(2):
        for number in range(MANY):
            read(store, number)
    before = kept(memo)
    assert len(before) == FIT
    for _ in range(4):
        for number in range(MANY):
            read(store, number)
    after = kept(memo)
    assert len(after) == FIT
    assert 1 <= len(before - after) <= 4 * MANY // 64  # one in 64 takes the place of another


def test_the_coldest_goes_first(store: Store) -> None:
    memo = store.engine.memo
    for _ in range(2):
        for number in range(FIT):
            read(store, number)
    for number in [*range(5), *range(10, FIT)]:
        read(store, number)
    for number in range(FIT, FIT + 5):
        entry = store.entry("v", str(number))
        assert entry is not None
        memo.add("v", str(number), entry, read(store, number))
    assert kept(memo) == {str(number) for number in range(FIT + 5) if number not in range(5, 10)}


def test_what_was_used_since_the_order_was_made_stays(store: Store) -> None:
    memo = store.engine.memo
    for _ in range(2):
        for number in range(FIT):
            read(store, number)

    def add(number: int) -> None:
        entry = store.entry("v", str(number))
        assert entry is not None
        memo.add("v", str(number), entry, read(store, number))

    add(FIT)
    assert "0" not in kept(memo)
    read(store, 1)
    add(FIT + 1)
    assert "1" in kept(memo)
    assert "2" not in kept(memo)


def test_an_evicted_entry_is_unmapped_though_it_stood_in_the_order(store: Store) -> None:
    memo = store.engine.memo
    for _ in range(2):
        for number in range(FIT + 10):
            read(store, number)
    memo._passed = 63
    read(store, FIT + 10)
    read(store, FIT + 10)
    assert memo._coldest
    _, _, name = memo._coldest[0]
    mapping = weakref.ref(cast(Any, memo._known["v"][name].view.obj))
    entry = store.entry("v", name)
    assert entry is not None
    assert store.discard(entry)
    memo.drop_dead()
    assert mapping() is None


def test_what_was_read_once_takes_no_memory_for_ever(store: Store) -> None:
    memo = store.engine.memo
    assert [memo.is_again(1 << 60, 1), memo.is_again(1 << 60, 1)] == [False, True]
    tracemalloc.start()
    try:
        for id in range(1, 300_000):
            memo.is_again(id, 1)
        assert tracemalloc.get_traced_memory()[0] < 100_000
    finally:
        tracemalloc.stop()


def test_a_new_space_may_come_while_what_was_evicted_is_dropped(store: Store) -> None:
    """P1 goes through the spaces / P2 asks for the first time for a name in another space / P1 goes on."""
    memo, faults, over = store.engine.memo, list[BaseException](), threading.Event()
    for number in range(FIT):
        read(store, number), read(store, number)

    def drops() -> None:
        try:
            while not over.is_set():
                memo.drop_dead()
        except BaseException as error:
            faults.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    dropping = threading.Thread(target=drops)
    try:
        dropping.start()
        for number in range(20_000):
            memo.get(f"space {number}", "name")
            if faults:
                break
    finally:
        over.set()
        dropping.join()
        sys.setswitchinterval(interval)
    assert faults == []
