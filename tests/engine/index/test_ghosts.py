"""The ghosts choose the policy that keeps more, by simulation; and whatever their words hold, they come round."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import pytest
import xxhash

from forebay._engine.index.adaptive import BIMODAL, LOTTERY, MEMORY, MOST, TRIAL_SHARE, WORDS, Ghosts
from tests.traces import LeastRecentlyUsed, best_of_permutation, drifting, hits_of_lru, mixed_sizes, permutations, recent, scanned, zipf

NOW = 1_700_000_000_000_000_000


def empty() -> memoryview:
    return memoryview(bytearray(8 * WORDS)).cast("Q")


class Node:
    """A cache that follows its ghosts as the engine does: `established` keys in the order of their last use, and those on trial."""

    def __init__(self, capacity: int, words: memoryview | None = None) -> None:
        self.ghosts = Ghosts(empty() if words is None else words)
        self._capacity, self._used, self._trials, self._inserted, self._now = capacity, 0, 0, 0, NOW
        self._established: OrderedDict[int, int] = OrderedDict()
        self._on_trial: OrderedDict[int, int] = OrderedDict()

    def use(self, key: int, size: int) -> bool:
        """Whether the key was there."""
        self._now += 1000
        is_hit = key in self._established or key in self._on_trial
        if key in self._on_trial:
            self._trials -= size
            self._established[key] = self._on_trial.pop(key)
        elif is_hit:
            self._established.move_to_end(key)
        elif size <= self._capacity:
            self._insert(key, size)
        self.ghosts.use(xxhash.xxh3_64_intdigest(str(key).encode()), size, self._now, is_hit=is_hit)
        return is_hit

    def _insert(self, key: int, size: int) -> None:
        while self._used + size > self._capacity:
            if self._inserted % 100 == 0 or not self.ghosts.capacity:  # the engine does it once a second
                self.ghosts.learn(self._capacity, self._now)
            overdue = self.ghosts.bimodal and self._trials > self._capacity // TRIAL_SHARE
            if self._on_trial and (overdue or not self._established):
                victim = self._on_trial.popitem(last=False)[1]
                self._trials -= victim
            else:
                victim = self._established.popitem(last=False)[1]
            self._used -= victim
        self._used += size
        self._inserted += 1
        if self.ghosts.bimodal and self._inserted % LOTTERY and self.ghosts.is_full(self._used):
            self._on_trial[key] = size
            self._trials += size
        else:
            self._established[key] = size

    def hits(self, keys: Iterable[int], sizes: Sequence[int]) -> int:
        return sum(self.use(key, sizes[key]) for key in keys)


COUNT = 2000


@pytest.mark.parametrize(("share", "must"), [(0.1, 0.8), (0.25, 0.92), (0.5, 0.96), (0.75, 0.97)])
def test_a_permutation_gets_nearly_the_share_that_fits(share: float, must: float) -> None:
    capacity = int(share * COUNT * 100)
    node = Node(capacity)
    hits = [node.hits(epoch, [100] * COUNT) for epoch in permutations(COUNT, 3)]
    assert node.ghosts.bimodal
    assert hits[2] >= must * best_of_permutation([100] * COUNT, capacity)


@pytest.mark.parametrize(("share", "must"), [(0.25, 0.9), (0.5, 0.92), (0.75, 0.94)])
def test_a_permutation_of_mixed_sizes_does_too(share: float, must: float) -> None:
    sizes = mixed_sizes(2 * COUNT, 100)
    capacity = int(share * sum(sizes))
    node = Node(capacity)
    hits = [node.hits(epoch, sizes) for epoch in permutations(2 * COUNT, 3)]
    assert hits[2] >= must * best_of_permutation(sizes, capacity)


def test_without_the_ghosts_a_permutation_gets_little() -> None:
    sizes = [100] * COUNT
    for share in (0.25, 0.5):
        last = [key for epoch in permutations(COUNT, 4) for key in epoch]
        assert hits_of_lru(last, sizes, int(share * 100 * COUNT)) < 0.4 * 3 * share * COUNT


@pytest.mark.rotates
@pytest.mark.parametrize("share", [0.05, 0.2])
@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.2])
def test_zipf_like_uses_hit_as_often_as_by_lru(exponent: float, share: float) -> None:
    sizes, keys = mixed_sizes(4000, 100), zipf(4000, 20_000, exponent)
    capacity = int(share * sum(sizes))
    assert Node(capacity).hits(keys, sizes) >= 0.98 * hits_of_lru(keys, sizes, capacity)


@pytest.mark.rotates
@pytest.mark.parametrize("fitting", [100, 250, 400])
@pytest.mark.parametrize("keys", [recent(15_000, 200), drifting(15_000, 400)], ids=["recent", "drifting"])
def test_recency_friendly_uses_hit_as_often_as_by_lru(keys: list[int], fitting: int) -> None:
    sizes = mixed_sizes(max(keys) + 1, 100)
    capacity = fitting * sum(sizes) // len(sizes)
    node = Node(capacity)
    assert node.hits(keys, sizes) >= 0.98 * hits_of_lru(keys, sizes, capacity)


@pytest.mark.parametrize("before", [0, 1, 3], ids=["new", "read once", "in epochs"])
def test_data_that_are_new_and_fit_are_kept_from_their_first_epoch_on(before: int) -> None:
    """Whatever the cache is full of: data that were read once, or more than fits in some epochs."""
    node = Node(1000 * 100)
    for epoch in permutations(COUNT, before):
        node.hits(epoch, [100] * COUNT)
    epochs = [[COUNT + key for key in epoch] for epoch in permutations(800, 3, seed=9)]
    hits = [sum(node.use(key, 100) for key in epoch) for epoch in epochs]
    assert min(hits[1:]) >= 0.93 * 800


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_loop_in_the_same_order_each_time_keeps_nearly_the_share_that_fits(share: float) -> None:
    node = Node(int(share * COUNT * 100))
    hits = [node.hits(range(COUNT), [100] * COUNT) for _ in range(4)]
    assert min(hits[2:]) >= 0.9 * share * COUNT


@pytest.mark.parametrize("room", [1.1, 1.5])
def test_scans_through_a_hot_set_cost_it_less_than_by_lru(room: float) -> None:
    uses = list(scanned(400, 4000, 4000, rounds=2))
    capacity = int(room * 400 * 100)
    node, lru = Node(capacity), LeastRecentlyUsed(capacity)
    hits = sum(node.use(key, 100) and is_hot for key, is_hot in uses)
    assert hits >= sum(lru.use(key, 100) and is_hot for key, is_hot in uses)


def test_a_scan_that_leaves_the_hot_set_its_turns_costs_two_percent_of_its_hits_at_most() -> None:
    hot = iter(key for key, _ in scanned(400, 60_000, 0, rounds=1))
    capacity = 600 * 100
    node = Node(capacity)
    hits = [0, 0]
    for number in range(12_000):
        hits[number >= 6000] += sum(node.use(next(hot), 100) for _ in range(4))
        if 4000 <= number < 10_000:
            node.use(400 + number, 100)  # once, and never again
    assert hits[1] >= 0.98 * 6000 * 4


@pytest.mark.parametrize("room", [1.1, 1.2, 1.5])
@pytest.mark.parametrize("hot", [200, 1000])
def test_a_scan_as_heavy_as_the_uses_of_the_hot_set_costs_two_percent_of_its_hits_at_most(hot: int, room: float) -> None:
    """The first one that the cache meets: before, everything fitted."""
    node = Node(int(room * hot * 100))
    uses = list(scanned(hot, 10 * hot, hot, rounds=1))
    node.hits([key for key, _ in uses[: 10 * hot]], [100] * 2 * hot)
    assert sum(node.use(key, 100) and is_hot for key, is_hot in uses[10 * hot :]) >= 0.98 * hot


@pytest.mark.rotates
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_another_data_set_takes_the_place_of_the_first(share: float) -> None:
    """What is established and never used again must not keep the epochs of a new job out."""
    sizes = [100] * 2 * COUNT
    node = Node(int(share * COUNT * 100))
    for epoch in permutations(COUNT, 4):
        node.hits(epoch, sizes)
    hits = [node.hits([COUNT + key for key in epoch], sizes) for epoch in permutations(COUNT, 5, seed=9)]
    assert hits[-1] >= 0.9 * share * COUNT, hits


def test_what_follows_the_epochs_is_served_by_lru_again() -> None:
    sizes = mixed_sizes(6000, 100)
    capacity = 800 * sum(sizes) // len(sizes)
    node = Node(capacity)
    for epoch in permutations(2000, 4):
        node.hits(epoch, sizes)
    assert node.ghosts.bimodal
    later = [2000 + key for key in drifting(30_000, 700)]
    assert node.hits(later, sizes) >= 0.95 * hits_of_lru(later, sizes, capacity)
    assert not node.ghosts.bimodal


def test_the_sample_is_as_large_as_the_ghosts_can_hold() -> None:
    for fitting in (50, 1000, 20_000):
        ghosts = Ghosts(empty())
        ghosts.learn(100 * fitting, NOW)
        for key in range(2 * fitting):
            ghosts.use(xxhash.xxh3_64_intdigest(str(key).encode()), 100, NOW + key, is_hit=False)
        keys = fitting / ghosts.standing().share
        assert MOST / 4 <= keys <= MOST or (keys == fitting and fitting < MOST)


@pytest.mark.rotates
def test_larger_objects_double_the_sample_again() -> None:
    ghosts = Ghosts(empty())
    ghosts.learn(100 * 50_000, NOW)
    for size, expected in ((100, 128), (10_000, 4)):
        for key in range(60_000):
            ghosts.use(xxhash.xxh3_64_intdigest(f"{size} {key}".encode()), size, NOW + key, is_hit=False)
        assert ghosts.standing().share in (expected, expected // 2)


def test_a_cache_that_was_never_full_follows_lru() -> None:
    node = Node(1 << 40)
    for epoch in permutations(2000, 3):
        node.hits(epoch, [100] * 2000)
    standing = node.ghosts.standing()
    assert not standing.bimodal
    assert standing.hits[0] == standing.hits[1]


def test_a_key_outside_of_the_sample_changes_nothing() -> None:
    words = empty()
    ghosts = Ghosts(words)
    ghosts.learn(1000, NOW)
    for key in range(10_000):
        ghosts.use(xxhash.xxh3_64_intdigest(str(key).encode()), 1, NOW + key, is_hit=False)
    before = bytes(words)
    assert ghosts.standing().share > 1
    ghosts.use((1 << 64) - 1, 1, NOW, is_hit=False)
    assert not ghosts.is_sampled((1 << 64) - 1)
    assert bytes(words) == before


@pytest.mark.parametrize("seed", range(6))
def test_whatever_the_words_hold_the_ghosts_come_round(seed: int) -> None:
    """Words of a disk that lied, or of another program: random ones, or only some of them."""
    rng, words = random.Random(seed), empty()
    for at in range(WORDS):
        if rng.random() < (1, 0.3, 0.02)[seed % 3]:
            words[at] = rng.getrandbits(rng.choice((1, 20, 63, 64)))
    sizes = mixed_sizes(COUNT, 100)
    node = Node(sum(sizes) // 2, words)
    hits = [node.hits(epoch, sizes) for epoch in permutations(COUNT, 6)]
    assert hits[-1] >= 0.94 * best_of_permutation(sizes, sum(sizes) // 2)


def test_uses_that_are_lost_or_half_done_do_not_add_up() -> None:
    """A process may be killed at any store, and two may store at once: here every thousandth use leaves words as they were before."""
    rng, words = random.Random(1), empty()
    sizes = mixed_sizes(COUNT, 100)
    node = Node(sum(sizes) // 2, words)
    hits = []
    for epoch in permutations(COUNT, 6):
        count = 0
        for number, key in enumerate(epoch):
            before = bytes(words)
            count += node.use(key, sizes[key])
            if number % 1000 == 0:
                after = bytes(words)
                for at in range(WORDS):
                    if after[8 * at : 8 * at + 8] != before[8 * at : 8 * at + 8] and rng.random() < 0.5:
                        words[at] = int.from_bytes(before[8 * at : 8 * at + 8], "little")
        hits.append(count)
    assert hits[-1] >= 0.94 * best_of_permutation(sizes, sum(sizes) // 2)


def test_a_policy_leads_by_its_hits_of_late() -> None:
    ghosts = Ghosts(empty())
    ghosts.learn(200 * 100, NOW)
    for epoch in permutations(400, 3):
        for key in epoch:
            ghosts.use(xxhash.xxh3_64_intdigest(str(key).encode()), 100, NOW + key, is_hit=False)
    standing = ghosts.standing()
    assert standing.bimodal
    assert standing.hits[BIMODAL] > 1.2 * standing.hits[0]
    assert standing.uses <= 2 * MEMORY


def test_a_sample_in_which_no_key_is_becomes_larger_while_the_cache_is_full() -> None:
    words = empty()
    words[0] = 40
    node = Node(COUNT * 50, words)
    hits = [node.hits(epoch, [100] * COUNT) for epoch in permutations(COUNT, 6)]
    assert node.ghosts.standing().share <= 8
    assert hits[-1] >= 0.94 * best_of_permutation([100] * COUNT, COUNT * 50)
