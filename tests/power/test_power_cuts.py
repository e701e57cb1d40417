"""After a power cut each byte is right or missing, whatever the disk had got. Five processes use all fronts at once until then; the next
ones go on with what is left."""

from __future__ import annotations

import contextlib
import mmap
import os
import random

import pytest

import forebay
from forebay import errors
from forebay.testing import ScriptedServer
from tests import parts
from tests.fronts import Fronts
from tests.harness import MiB
from tests.items import until
from tests.power.disks import KINDS, LOG_FLUSHED, NOTHING_FLUSHED, Disk, disk, reboot
from tests.processes import fork, in_child
from tests.servers.counting import Shelf

pytestmark = [pytest.mark.root, pytest.mark.stress]

KEYS, SLOTS, WORKERS, CUTS = 30, 200, 5, 16
BUDGET = 48 * MiB


def live(it: Fronts, number: int, done: mmap.mmap) -> None:
    """Until the power goes."""
    chance = random.Random(os.urandom(8))
    with forebay.Cache(it.place, budget=BUDGET, min_free=0) as cache:
        acts = it.acts(cache)
        while True:
            with contextlib.suppress(errors.ForebayError, OSError):
                chance.choice(acts)(chance.randrange(KEYS))
            done[number] = min(done[number] + 1, 255)


def look(it: Fronts) -> None:
    """The disk may have lost any of what was written."""
    with forebay.Cache(it.place) as cache:
        it.all_is_right(cache)
        cache.repair()
        assert cache.check(deep=True) == []


def live_and_die(it: Fronts, place: Disk, how: int, is_reboot: bool, chance: random.Random) -> None:
    done = mmap.mmap(-1, WORKERS)

    def together() -> None:
        if is_reboot:
            reboot()
        for child in [fork(lambda number=number: live(it, number, done)) for number in range(WORKERS)]:
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
        it = Fronts(place.place / "root", server, shelf, keys=KEYS, slots=SLOTS)
        for _ in range(parts.share(CUTS)):
            live_and_die(it, place, chance.choice([LOG_FLUSHED, NOTHING_FLUSHED]), is_reboot, chance)

            def after() -> None:
                if is_reboot:
                    reboot()
                look(it)

            in_child(after)


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
