"""Traces of keys in the orders in which programs use them, and what simple caches would have kept of them: judges of eviction policies."""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence


def mixed_sizes(count: int, mean: int, *, seed: int = 1) -> list[int]:
    """Sizes of objects, most of them smaller than the mean, a few several times as large."""
    rng = random.Random(seed)
    return [max(1, int(mean * math.exp(rng.gauss(-0.5, 1)))) for _ in range(count)]


def permutations(count: int, epochs: int, *, seed: int = 2) -> Iterator[list[int]]:
    """Epochs: each uses every key once, in a random order of its own."""
    rng, order = random.Random(seed), list(range(count))
    for _ in range(epochs):
        rng.shuffle(order)
        yield list(order)


def zipf(count: int, length: int, exponent: float, *, seed: int = 3) -> list[int]:
    """Independent uses of keys, some of which are much more popular than others."""
    rng = random.Random(seed)
    weights = list(itertools.accumulate(1 / (rank + 1) ** exponent for rank in range(count)))
    keys = rng.sample(range(count), count)
    return [keys[bisect.bisect(weights, rng.random() * weights[-1])] for _ in range(length)]


def recent(length: int, distance: int, *, seed: int = 4) -> list[int]:
    """What was used last is the likeliest to be used next: distances in an LRU stack are exponential, with this mean."""
    rng, stack, keys, new = random.Random(seed), list[int](), list[int](), itertools.count()
    for _ in range(length):
        depth = int(rng.expovariate(1 / distance))
        stack.append(stack.pop(-1 - depth) if depth < len(stack) else next(new))
        keys.append(stack[-1])
        if len(stack) > 20 * distance:
            del stack[: 10 * distance]
    return keys


def drifting(length: int, width: int, *, seed: int = 5) -> list[int]:
    """A working set that moves on by a key every ten uses."""
    rng = random.Random(seed)
    return [number // 10 + rng.randrange(width) for number in range(length)]


def scanned(hot: int, length: int, scan: int, *, rounds: int = 3, seed: int = 6) -> Iterator[tuple[int, bool]]:
    """A hot set in random order, and after each ``length`` uses of it a scan of keys that are used once, between the others. Yields each
    key, and whether it is of the hot set."""
    rng, new = random.Random(seed), itertools.count(hot)
    for _ in range(rounds):
        for _ in range(length):
            yield rng.randrange(hot), True
        for _ in range(scan):
            yield next(new), False
            yield rng.randrange(hot), True


class LeastRecentlyUsed:
    """A cache of ``capacity`` bytes that evicts the least recently used key."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._used = capacity, 0
        self._sizes: OrderedDict[int, int] = OrderedDict()

    def use(self, key: int, size: int) -> bool:
        """Whether the key was there; it is afterwards."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        if size <= self._capacity:
            while self._used + size > self._capacity:
                self._used -= self._sizes.popitem(last=False)[1]
            self._sizes[key] = size
            self._used += size
        return False


def hits_of_lru(keys: Iterable[int], sizes: Sequence[int], capacity: int) -> int:
    cache = LeastRecentlyUsed(capacity)
    return sum(cache.use(key, sizes[key]) for key in keys)


def best_of_permutation(sizes: Sequence[int], capacity: int) -> int:
    """The hits in an epoch if the same part of the data stays from epoch to epoch: what no policy that does not choose by size exceeds on
    average."""
    return round(len(sizes) * min(capacity / sum(sizes), 1))


def hits_of_belady(keys: Sequence[int], sizes: Sequence[int], capacity: int) -> int:
    """The hits of a cache that knows all uses: what is used next the latest goes first, perhaps what was just used."""
    never, following, after = 1 << 60, dict[int, int](), [0] * len(keys)
    for at in range(len(keys) - 1, -1, -1):
        after[at] = following.get(keys[at], never)
        following[keys[at]] = at
    cached, farthest, used, hits = dict[int, int](), list[tuple[int, int]](), 0, 0
    for at, key in enumerate(keys):
        if key in cached:
            hits += 1
        else:
            used += sizes[key]
        cached[key] = after[at]
        heapq.heappush(farthest, (-after[at], key))
        while used > capacity:
            position, last = heapq.heappop(farthest)
            if cached.get(last) == -position:
                del cached[last]
                used -= sizes[last]
    return hits
