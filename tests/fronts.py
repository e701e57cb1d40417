"""One process that uses every front of a root at once, and compares each byte that it gets."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests.harness import KiB, MiB
from tests.remote_directories import files_of
from tests.servers.counting import Shelf

SIZES = [10, 700, 9 * KiB, 70 * KiB, 400 * KiB, 1100 * KiB, 2 * MiB + 5]


@functools.cache
def content(name: str) -> bytes:
    chance = random.Random(name)
    return chance.randbytes(chance.choice(SIZES))


def task(key: int) -> bytes:
    return content(f"task {key}")


class Fronts:
    """What a process does with a root. Each act compares what it gets with what is right, which the forked processes share."""

    def __init__(self, place: Path, server: ScriptedServer, shelf: Shelf, *, keys: int, slots: int) -> None:
        self.place, self.shelf, self.keys, self.slots = place, shelf, keys, slots
        self.urls = [server.put(f"/{key}.bin", content(f"object {key}")) for key in range(keys)]
        for name in (*(f"{kind} {key}" for kind in ("value", "task") for key in range(keys)), *(f"sample {slot}" for slot in range(slots))):
            content(name)
        for number in range(3):
            shelf.fill(f"bucket/{number}", {name: content(f"{number} {name}") for name in ("a", "b/c", "d")})

    def acts(self, cache: forebay.Cache) -> list[Callable[[int], None]]:
        samples = cache.samples("samples", self.slots)
        compute = cache.tasks("tasks").cached(task)
        filesystem = self.shelf.fsspec()

        def object_(key: int) -> None:
            assert cache.read(self.urls[key]) == content(f"object {key}")

        def block(key: int) -> None:
            wanted, start = content(f"object {key}"), key * 1000
            with cache.open(self.urls[key], block_size=64 * KiB) as file:
                file.seek(start)
                assert file.read(5000) == wanted[start : start + 5000]

        def value(key: int) -> None:
            assert cache.get_or_put(f"value {key}", lambda: content(f"value {key}")) == content(f"value {key}")

        def sample(key: int) -> None:
            for slot in range(key % self.slots, self.slots, self.keys):
                right = content(f"sample {slot}")[: 100 * KiB]
                assert samples.get_or_put(slot, lambda right=right: right) == right

        def output(key: int) -> None:
            assert compute(key) == content(f"task {key}")

        def path(key: int) -> None:
            with cache.local(self.urls[key]) as path:
                assert Path(path).read_bytes() == content(f"object {key}")

        def directory(key: int) -> None:
            with cache.directory(f"bucket/{key % 3}", filesystem=filesystem) as path:
                assert files_of(path) == {name: content(f"{key % 3} {name}") for name in ("a", "b/c", "d")}

        def eviction(key: int) -> None:
            with contextlib.suppress(errors.NotCached):
                cache.evict(self.urls[key])

        return [object_, block, value, sample, output, path, directory, eviction]

    def all_is_right(self, cache: forebay.Cache) -> None:
        for act in self.acts(cache):
            for key in range(self.keys):
                act(key)
