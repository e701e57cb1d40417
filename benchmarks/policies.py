"""How often each policy of eviction hits, by trace: Forebay's ``auto`` and ``lru`` in real spaces, and ``auto`` where the order is known;
beside simulated caches of libCacheSim.
``python benchmarks/policies.py [--quick] [--folder DIR]``

A space has a quota, and entries of mixed sizes; what is missing is put. Hits are counted, of the second half of each trace, so nothing here
depends on how busy the machine is. ``optimum``: Belady's, which knows the future; of a permutation the share that fits. The simulated
caches have the same sizes and quota; their columns are empty where ``libcachesim`` is not installed (``pip install libcachesim``)."""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from forebay._engine.store import Settings, Store
from forebay.prefetch.retention import NextUses, Retention
from tests.traces import drifting, hits_of_lru, permutations, recent, scanned, zipf

FOREVER = 1 << 63
SIMULATED = ("LRU", "Sieve", "S3FIFO", "TwoQ", "ARC", "Belady")


def engine(folder: Path, policy: str, keys: Sequence[int], sizes: Sequence[int], quota: int) -> int:
    """The hits of the second half, in a space with this policy."""
    store = Store.open(folder / "root", Settings(budget=1 << 40, min_free=0))
    try:
        store.spaces.ensure(policy, policy=policy, quota=quota)
        hits = [0, 0]
        for number, key in enumerate(keys):
            text = str(key)
            is_hit = store.first_touch(policy, text, FOREVER) is not None
            if not is_hit and (item := store.view(policy, text)) is not None:
                store.touch(item.entry)
                is_hit = True
            if not is_hit:
                store.put(policy, text, bytes(sizes[key]))
            hits[2 * number >= len(keys)] += is_hit
        return hits[1]
    finally:
        store.close()
        shutil.rmtree(folder / "root")


def with_known_order(folder: Path, keys: Sequence[int], sizes: Sequence[int], quota: int) -> int:
    """The hits of the second half, in a space that follows the rule of a look-ahead which knows the whole order."""
    store = Store.open(folder / "root", Settings(budget=1 << 40, min_free=0))
    try:
        store.spaces.ensure("auto", policy="auto", quota=quota)
        uses, retention, hits = NextUses(len(keys)), Retention(), [0, 0]
        retention.limit = quota
        for key in keys:
            uses.draw(key)
        for number, key in enumerate(keys):
            text, position = str(key), uses.after(number + 1)
            is_hit = store.first_touch("auto", text, FOREVER) is not None or store.view("auto", text) is not None
            uses.pass_by(key, number + 1)
            if is_hit or retention.is_worth(sizes[key], position):
                store.prefetching.dismiss("auto", retention.keep(key, text, sizes[key], position))
                if not is_hit and key in retention:
                    store.put("auto", text, bytes(sizes[key]))
            hits[2 * number >= len(keys)] += is_hit
        return hits[1]
    finally:
        store.close()
        shutil.rmtree(folder / "root")


def simulated(name: str, keys: Sequence[int], sizes: Sequence[int], quota: int) -> int | None:
    """The hits of the second half, in a cache of libCacheSim."""
    try:
        import libcachesim
    except ImportError:
        return None
    cache: Any = getattr(libcachesim, name)(cache_size=quota)
    later, following = [1 << 60] * len(keys), dict[int, int]()
    for number in range(len(keys) - 1, -1, -1):
        later[number] = following.get(keys[number], 1 << 60)
        following[keys[number]] = number
    hits = [0, 0]
    for number, key in enumerate(keys):
        request = libcachesim.Request(obj_id=key, obj_size=sizes[key], next_access_vtime=later[number], clock_time=number)
        hits[2 * number >= len(keys)] += bool(cache.get(request))
    return hits[1]


def traces(quick: bool) -> dict[str, tuple[list[int], float]]:
    """By name: the keys, and which part of their bytes fits."""
    count, length, epochs = (120, 480, 4) if quick else (800, 4800, 6)
    epoch = [key for keys in permutations(count, epochs) for key in keys]
    found = {f"epochs, {share:.0%} fits": (epoch, share) for share in (0.1, 0.25, 0.5, 0.75)}
    found |= {
        f"zipf {exponent}, {share:.0%} fits": (zipf(count, length, exponent), share) for exponent in (0.7, 1.0) for share in (0.05, 0.2)
    }
    found["recent"] = recent(length, count // 10), 0.15
    found["drifting"] = drifting(length, count // 4), 0.2
    hot = count // 5
    uses = [key for key, _ in scanned(hot, length // 8, length // 8, rounds=3)]
    found["hot set, scanned"] = uses, 1.2 * hot / (max(uses) + 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short traces: does it run at all?")
    parser.add_argument("--folder", type=Path, help="where the cache is put (default: a temporary directory)")
    asked = parser.parse_args()
    print(f"| hits of all uses | auto | lru | reference lru | auto, order known | {' | '.join(SIMULATED)} |", flush=True)
    print(f"|{'---|' * (5 + len(SIMULATED))}", flush=True)
    with tempfile.TemporaryDirectory(dir=asked.folder) as folder:
        for name, (keys, share) in traces(asked.quick).items():
            sizes = random.Random(8).choices(range(500, 20_000), k=max(keys) + 1)
            quota, half = int(share * sum(sizes)), len(keys) - (len(keys) + 1) // 2
            of_lru = hits_of_lru(keys, sizes, quota) - hits_of_lru(keys[: (len(keys) + 1) // 2], sizes, quota)
            found = [engine(Path(folder), policy, keys, sizes, quota) for policy in ("auto", "lru")] + [of_lru]
            cells = [*found, with_known_order(Path(folder), keys, sizes, quota), *(simulated(one, keys, sizes, quota) for one in SIMULATED)]
            shown = ["" if hits is None else f"{hits / half:.1%}" for hits in cells]
            print(f"| {name} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
