from __future__ import annotations

import random

import pytest

from forebay._engine.policy import Candidate, Policy, choose_victims
from forebay.errors import ConfigError


def candidates(*used_and_charge: tuple[int, int]) -> list[Candidate]:
    return [Candidate(used, id, charge) for id, (used, charge) in enumerate(used_and_charge)]


def test_the_coldest_go_until_it_is_enough() -> None:
    some = candidates((30, 100), (10, 100), (20, 100), (40, 100))
    assert [c.id for c in choose_victims(some, 150)] == [1, 2]


def test_nothing_goes_where_nothing_is_needed() -> None:
    assert choose_victims(candidates((1, 1)), 0) == []
    assert choose_victims(candidates((1, 1)), -5) == []
    assert choose_victims([], 5) == []


def test_all_go_where_all_is_not_enough() -> None:
    assert len(choose_victims(candidates((1, 1), (2, 1)), 100)) == 2


def test_entries_are_counted_as_well_as_bytes() -> None:
    some = candidates((1, 0), (2, 1), (3, 1))
    assert [c.id for c in choose_victims(some, 0, count=2)] == [0, 1]
    assert [c.id for c in choose_victims(some, 2, count=1)] == [0, 1, 2]


def test_of_equally_old_ones_the_older_entry_goes() -> None:
    assert [c.id for c in choose_victims([Candidate(5, 9, 1), Candidate(5, 3, 1)], 1)] == [3]


@pytest.mark.parametrize("seed", range(20))
def test_victims_are_the_shortest_cold_prefix(seed: int) -> None:
    rng = random.Random(seed)
    some = candidates(*((rng.randrange(50), rng.randrange(20)) for _ in range(100)))
    need = rng.randrange(800)
    victims = choose_victims(iter(some), need)
    assert victims == sorted(some)[: len(victims)]
    assert sum(c.charge for c in victims) >= need
    assert sum(c.charge for c in victims[:-1]) < max(need, 1)


def test_policies_have_names() -> None:
    assert [Policy.parse(name) for name in ("lru", "FREEZE", "wait")] == [Policy.LRU, Policy.FREEZE, Policy.WAIT]
    assert [p.evicts_own for p in Policy] == [True, False, True]
    with pytest.raises(ConfigError, match=r"'mru'.*lru, freeze, wait"):
        Policy.parse("mru")
