"""Interrupts in their thousands, at random moments of each call: nothing stays locked, and everything works, here and elsewhere."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.store import Store
from forebay.testing import ScriptedServer
from tests import parts
from tests.fronts import Fronts
from tests.harness import MiB, assert_counted, data_usage
from tests.interrupts.every_line import Interrupt, Interrupted, held_locks, interrupt
from tests.interrupts.test_every_line import CALLS, Place, opened_place
from tests.items import until
from tests.processes import Child, ProcessGroup, in_child
from tests.servers.counting import Shelf
from tests.versions import SIZES, Versions

INTERRUPTS = 1000
"""Of each call."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    with opened_place(tmp_path, monkeypatch, signal.SIGALRM, signal.SIGINT) as made:
        yield made


class Alarm:
    """Sends this process a signal at a random moment: SIGALRM by a timer, or SIGINT from another thread."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance

    def around(self, call: Callable[[], Any], most: float) -> bool:
        """Make a call until it is interrupted, or has ended. Returns whether the handler raised."""
        after = self._chance.uniform(0, most)
        sender = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)) if self._chance.random() < 0.2 else None
        try:
            try:
                if sender is not None:
                    sender.start()
                else:
                    signal.setitimer(signal.ITIMER_REAL, after)
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                if sender is not None:
                    sender.cancel()
                    with contextlib.suppress(RuntimeError):  # it was interrupted before it was started
                        sender.join()
        except Interrupted:
            return True
        return False


@pytest.fixture
def lost_as_a_finalizer_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out what Python ignores where a signal comes before the first line of a finalizer, which can hold none back (see Limits)."""
    tell = sys.unraisablehook

    def tell_others(what: Any) -> None:
        trace = what.exc_traceback
        if what.exc_type is not Interrupt or trace is None or trace.tb_lineno != trace.tb_frame.f_code.co_firstlineno:
            tell(what)

    monkeypatch.setattr(sys, "unraisablehook", tell_others)


@pytest.mark.stress
@pytest.mark.usefixtures("lost_as_a_finalizer_begins")
@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"aread"}))  # asyncio's own callbacks lose what a handler raises (see Limits)
def test_interrupts_at_random_moments(place: Place, name: str, children: ProcessGroup) -> None:
    chance, make, raised, root = random.Random(name), CALLS[name], 0, place.folder / "root"
    for _ in range(3):
        make(place)()
    began = time.monotonic()
    for _ in range(5):
        make(place)()
    most, held, alarm = (time.monotonic() - began) / 4, {*held_locks()}, Alarm(chance)
    wanted = parts.share(INTERRUPTS)
    while raised < wanted:
        with contextlib.suppress(Interrupt):  # a signal that came just after the call, or during a finalizer
            raised += alarm.around(make(place), most)
            time.sleep(0.005)
        gc.collect()  # what a call returned as it was interrupted may be in a circle with the frames of the exception
        for claim in [*forebay.claims._open.values()]:
            if claim is not place.claim:
                claim.close()
        place.release_dropped()
        assert place.cache.put("after", b"x" * 30_000)
        until(lambda: {*held_locks()} <= held, f"after {raised} interrupts of {name}: what is locked")
        if raised % 200 == 0:
            assert children(lambda: forebay.Cache(root).put("elsewhere", b"x" * 30_000)).result()
    assert place.cache.check() == []


# -- many processes, killed and interrupted, against what is right ---------------------------------------------------------

KEYS, SLOTS, PROCESSES, BUDGET, SECONDS = 30, 100, 4, 24 * MiB, 120.0
PINNED, QUOTA = 6, 400_000


def pinned(number: int) -> bytes:
    return random.Random(number).randbytes(SIZES[number % 4])


def set_up(place: Path) -> None:
    """What nobody may lose: values that are pinned, and the quota of a space."""
    with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
        cache.space("limited", quota=QUOTA, policy="lru")
        for number in range(PINNED):
            assert cache.put(f"pinned {number}", pinned(number))
            cache.pin(f"values:pinned {number}")


def look_at_what_stays(cache: forebay.Cache, number: int) -> None:
    assert cache.get(f"pinned {number % PINNED}") == pinned(number % PINNED)
    store = cache._store
    assert isinstance(store, Store)
    assert store.engine.settings.limits().of_space("limited").quota == QUOTA
    assert sum(space.bytes for space in store.seeing.usage().spaces if space.name == "limited") <= QUOTA


def live(it: Fronts, versions: Versions, place: int, seed: int, seconds: float) -> int:
    """Use a root until the time is up, interrupted all the time, and compare each byte; gives how often a handler raised. ``place``: which
    keys this process writes."""
    interrupt.kind = Interrupted
    for number in (signal.SIGALRM, signal.SIGINT):
        signal.signal(number, interrupt)
    chance, seen, interrupts = random.Random(seed), dict[int, int](), 0
    alarm, until = Alarm(chance), time.monotonic() + seconds
    with forebay.Cache(it.place, budget=BUDGET, min_free=0) as cache:
        shared, limited = cache.space("versions"), cache.space("limited")

        def put(key: int) -> None:
            versions.put(shared, key - key % PROCESSES + place if key - key % PROCESSES + place < KEYS else place)

        def get(key: int) -> None:
            versions.get(shared, key, seen)

        def limit(key: int) -> None:
            limited.put(str(key), bytes(SIZES[key % 4]))
            look_at_what_stays(cache, key)

        acts = [*it.acts(cache), limit, put, put, get, get, get]
        while time.monotonic() < until:
            act, key = chance.choice(acts), chance.randrange(KEYS)

            def call(act: Callable[[int], None] = act, key: int = key) -> None:
                with contextlib.suppress(errors.CacheFault):  # no room beside what others have in use
                    act(key)

            with contextlib.suppress(Interrupted):  # a signal that came just after the call
                interrupts += alarm.around(call, 0.02)
    return interrupts


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_processes_that_are_killed_and_interrupted_get_what_is_right(server: ScriptedServer, shelf: Shelf, tmp_path: Path) -> None:
    it, versions = Fronts(tmp_path / "root", server, shelf, keys=KEYS, slots=SLOTS), Versions(KEYS)
    in_child(lambda: set_up(it.place))
    chance, group, alive = random.Random(1), ProcessGroup(), dict[int, Child]()
    end = time.monotonic() + parts.share(int(SECONDS))
    interrupts = kills = looks = 0
    try:
        while time.monotonic() < end:
            for place in {*range(PROCESSES)} - {*alive}:
                seed = chance.randrange(1 << 30)
                alive[place] = group(lambda place=place, seed=seed: live(it, versions, place, seed, 20.0))
            if chance.random() < 0.3:
                alive.pop(chance.randrange(PROCESSES)).kill()
                kills += 1
            elif chance.random() < 0.5:
                for each in alive.values():
                    each.stop()
                assert data_usage(it.place) <= BUDGET
                looks += 1
                for each in alive.values():
                    each.signal(signal.SIGCONT)
            time.sleep(chance.uniform(0.1, 0.5))  # the moments of the kills
            for place, each in [*alive.items()]:
                if each._has_ended():
                    interrupts += alive.pop(place).result()
        for each in alive.values():
            interrupts += each.result(120)
    finally:
        group.kill()
    assert interrupts > 100
    assert min(kills, looks) > 3

    def look() -> None:
        with forebay.Cache(it.place) as cache:
            it.all_is_right(cache)
            for key in range(KEYS):
                versions.get(cache.space("versions"), key, {})
                look_at_what_stays(cache, key)
            assert cache.check(deep=True) == []

    in_child(look)
    assert_counted(it.place, BUDGET)
