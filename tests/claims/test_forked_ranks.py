"""Ranks that were forked by one that has the claim already, or are in one process: each is a rank of its own."""

from __future__ import annotations

import pickle
from contextlib import ExitStack

import pytest

import forebay
from forebay.claims.registry import Registry
from tests.claiming import REMOTE, rank
from tests.processes import ProcessGroup

RANKS = 3


def claim(number: int) -> forebay.Claim:
    return forebay.claim("/local", REMOTE, rank(number, RANKS), job="job", timeout=30)


def take_part(claim: forebay.Claim) -> tuple[int, bool]:
    claim.barrier("all").wait(RANKS + 1, timeout=30)
    return claim.world.rank, claim.is_leader


@pytest.mark.parametrize("ours", [[0], [0, 1], [0, 1, 2]])
def test_each_is_the_rank_that_it_says(node: Registry, children: ProcessGroup, ours: list[int]) -> None:
    with ExitStack() as stack:
        claims = [stack.enter_context(claim(number)) for number in ours]
        others = [children(lambda number=number: take_part(claim(number))) for number in range(len(ours), RANKS)]
        told = [children(lambda known=known: take_part(known)) for known in claims]
        claims[0].barrier("all").wait(RANKS + 1, timeout=30)
        assert [child.result() for child in [*told, *others]] == [(number, number == 0) for number in range(RANKS)]


def test_a_pickle_goes_to_the_same_rank(node: Registry, children: ProcessGroup) -> None:
    with claim(0) as leader:
        data = pickle.dumps(leader)

        def work() -> tuple[int, bool]:
            mine = claim(1)
            return mine.world.rank, pickle.loads(data) is leader

        assert children(work).result() == (1, True)
