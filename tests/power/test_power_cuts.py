"""After a power cut each byte is right or missing, whatever the disk had got. Five processes use all fronts at once until then; the next
ones go on with what is left."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests import parts
from tests.harness import KiB, MiB
from tests.items import until
from tests.power.disks import KINDS, LOG_FLUSHED, NOTHING_FLUSHED, Disk, disk, reboot
from tests.processes import fork, in_child
from tests.remote_directories import files_of
from tests.servers.counting import Shelf

pytestmark = [pytest.mark.root, pytest.mark.stress]

KEYS, SLOTS, WORKERS, CUTS = 30, 200, 5, 16
BUDGET = 48 * MiB
SIZES = [10, 700, 9 * KiB, 70 * KiB, 400 * KiB, 1100 * KiB, 2 * MiB + 5]


def content(name: str) -> bytes:
    chance = random.Random(name)
    return chance.randbytes(chance.choice(SIZES))


class Fronts:
    """What a process does with a root. Each act compares what it gets with what is right."""

    def __init__(self, place: Path, server: ScriptedServer, shelf: Shelf) -> None:
        self.place, self.shelf = place, shelf
        self.urls = [server.put(f"/{key}.bin", content(f"object {key}")) for key in range(KEYS)]
        for number in range(3):
            shelf.fill(f"bucket/{number}", {name: content(f"{number} {name}") for name in ("a", "b/c", "d")})

    def acts(self, cache: forebay.Cache) -> list[Callable[[int], None]]:
        samples = cache.samples("samples", SLOTS)
        compute = cache.tasks("tasks").cached(task)

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
            for slot in range(key % SLOTS, SLOTS, KEYS):
                right = content(f"sample {slot}")[: 100 * KiB]
                assert samples.get_or_put(slot, lambda right=right: right) == right

        def output(key: int) -> None:
            assert compute(key) == content(f"task {key}")

        def directory(key: int) -> None:
            with cache.directory(f"bucket/{key % 3}", filesystem=self.shelf.fsspec()) as path:
                assert files_of(path) == {name: content(f"{key % 3} {name}") for name in ("a", "b/c", "d")}

        def eviction(key: int) -> None:
            with contextlib.suppress(errors.NotCached):
                cache.evict(self.urls[key])

        return [object_, block, value, sample, output, directory, eviction]

    def look_at_all(self) -> None:
        with forebay.Cache(self.place) as cache:
            for act in self.acts(cache):
                for key in range(KEYS):
                    act(key)
            cache.repair()
            assert cache.check(deep=True) == []

    def live(self, number: int, done: mmap.mmap) -> None:
        """Until the power goes."""
        chance = random.Random(os.urandom(8))
        with forebay.Cache(self.place, budget=BUDGET, min_free=0) as cache:
            acts = self.acts(cache)
            while True:
                with contextlib.suppress(errors.ForebayError, OSError):
                    chance.choice(acts)(chance.randrange(KEYS))
                done[number] = min(done[number] + 1, 255)


def task(key: int) -> bytes:
    return content(f"task {key}")


def live_and_die(it: Fronts, place: Disk, how: int, is_reboot: bool, chance: random.Random) -> None:
    done = mmap.mmap(-1, WORKERS)

    def together() -> None:
        if is_reboot:
            reboot()
        for child in [fork(lambda number=number: it.live(number, done)) for number in range(WORKERS)]:
            child.result(600)

    with fork(together, group=True) as group:
        for acts in sorted(chance.sample(range(10, 200), 8)):
            until(lambda acts=acts: max(done[:]) >= acts or (group._has_ended() and group.result()), "the acts of five processes")
            place.write_back(path for path in place.files() if chance.random() < 0.3)
        place.lose_power(how)
    place.restart(group.pid)


@pytest.mark.parametrize("is_reboot", [True, False], ids=["reboot", "mounted again"])
@pytest.mark.parametrize("kind", KINDS)
def test_power_cuts(server: ScriptedServer, shelf: Shelf, kind: str, is_reboot: bool) -> None:
    chance = random.Random()
    with disk(kind) as place:
        it = Fronts(place.place / "root", server, shelf)
        for _ in range(parts.share(CUTS)):
            live_and_die(it, place, chance.choice([LOG_FLUSHED, NOTHING_FLUSHED]), is_reboot, chance)

            def look() -> None:
                if is_reboot:
                    reboot()
                it.look_at_all()

            in_child(look)


@pytest.mark.parametrize("how", [LOG_FLUSHED, NOTHING_FLUSHED])
@pytest.mark.parametrize("is_reboot", [True, False], ids=["reboot", "mounted again"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_object_that_is_on_the_disk_without_its_bytes(server: ScriptedServer, kind: str, is_reboot: bool, how: int) -> None:
    """Its name, its size and its row are there: a large one has its blocks before its bytes come."""
    names = [f"object {number}" for number in range(8)]
    urls = [server.put(f"/{number}.bin", random.Random(name).randbytes(2 * MiB)) for number, name in enumerate(names)]
    with disk(kind) as place:

        def live() -> None:
            with forebay.Cache(place.place / "root", budget=BUDGET, min_free=0) as cache:
                for url in urls:
                    cache.read(url)

        with fork(live, group=True) as group:
            group.result()
        place.write_back(path for path in place.files() if path.parent.name == "root")
        place.lose_power(how)
        place.restart(group.pid)

        def look() -> list[str]:
            if is_reboot:
                reboot()
            with forebay.Cache(place.place / "root") as cache:
                return [name for name, url in zip(names, urls, strict=True) if cache.read(url) != random.Random(name).randbytes(2 * MiB)]

        assert in_child(look) == []
