"""Belady's rule with bypass, on positions alone: what a known order is worth."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from forebay.prefetch.retention import NEVER, NextUses, Retention
from tests.traces import hits_of_belady, hits_of_lru, permutations, zipf

COUNT = 400
SIZES = random.Random(8).choices(range(500, 20_000), k=COUNT)


def hits(keys: Sequence[int], capacity: int, *, horizon: int, window: int = 8) -> int:
    """The hits of a cache that follows the rule: what is ``window`` uses ahead is fetched, what is in the horizon is known."""
    uses, retention = NextUses(horizon + window), Retention()
    retention.limit = capacity
    cached: set[str] = set()
    known, ahead = deque[tuple[int, int]](), deque[tuple[int, int, bool, bool]]()
    order, count = iter(keys), 0
    for turn in range(len(keys)):
        while uses.drawn - turn < horizon and (key := next(order, -1)) >= 0:
            known.append((key, uses.draw(key)))
        while known and len(ahead) < window:
            key, position = known.popleft()
            is_hit = str(key) in cached
            stores = is_hit or retention.is_worth(SIZES[key], uses.after(position))
            if stores:
                cached.add(str(key))
                cached.difference_update(retention.keep(key, str(key), SIZES[key], position))
            ahead.append((key, position, is_hit, stores))
        key, position, is_hit, stores = ahead.popleft()
        count += is_hit
        uses.pass_by(key, position)
        if stores:
            cached.difference_update(retention.keep(key, str(key), SIZES[key], uses.next(key)))
        assert sum(SIZES[int(name)] for name in cached) <= capacity
    return count


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
@pytest.mark.parametrize("exponent", [0.7, 1.0])
def test_uses_that_repeat_hit_as_often_as_the_best_cache(exponent: float, share: float) -> None:
    keys, capacity = zipf(COUNT, 4000, exponent), int(share * sum(SIZES))
    best = hits_of_belady(keys, SIZES, capacity)
    assert best >= hits(keys, capacity, horizon=10_000) >= 0.95 * best
    assert hits(keys, capacity, horizon=800) >= 0.9 * best


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_epochs_hit_what_overlaps(share: float) -> None:
    keys, capacity = [key for epoch in permutations(COUNT, 5) for key in epoch], int(share * sum(SIZES))
    best = hits_of_belady(keys, SIZES, capacity)
    assert hits(keys, capacity, horizon=10_000) >= 0.95 * best
    assert hits(keys, capacity, horizon=COUNT // 2) >= 0.9 * best
    assert hits_of_lru(keys, SIZES, capacity) < 0.9 * best


def test_next_uses_are_known_in_whatever_order_they_come() -> None:
    uses = NextUses(5)
    assert [uses.draw(key) for key in (7, 8, 7, 9, 7)] == [1, 2, 3, 4, 5]
    assert (uses.after(1), uses.after(2), uses.after(3), uses.after(5)) == (3, NEVER, 5, NEVER)
    uses.pass_by(9, 4)
    uses.pass_by(7, 1)
    assert (uses.next(7), uses.next(8), uses.next(9)) == (3, 2, NEVER)
    assert uses.draw(9) == 6
    assert (uses.next(9), uses.after(6)) == (6, NEVER)


def test_what_is_used_the_latest_goes_for_what_is_used_sooner() -> None:
    retention = Retention()
    retention.limit = 180  # a place is left for what is under way
    assert retention.keep(1, "a", 60, 10) == []
    assert retention.keep(2, "b", 60, 20) == []
    assert not retention.is_worth(60, 30)
    assert not retention.is_worth(60, 20)
    assert retention.is_worth(60, 15)
    assert retention.keep(3, "c", 60, 15) == ["b"]
    assert retention.keep(4, "d", 60, NEVER) == ["d"]
    assert retention.keep(1, "a", 60, NEVER) == []  # it fits
    assert retention.keep(5, "e", 60, 16) == ["a"]


def test_what_others_took_is_no_capacity_until_they_need_it_no_more() -> None:
    retention = Retention()
    retention.limit = 1280
    for number in range(20):
        retention.keep(number, str(number), 60, 100 + number)
    retention.note_lost(3)
    retention.note_lost(4)
    assert retention.capacity == 1220 - 120
    assert 3 not in retention
    for _ in range(500):
        retention.note_kept(5)
    assert retention.capacity == 1220
