"""Interrupts in their thousands, at random moments of each call: nothing stays locked, and everything works, here and elsewhere."""

from __future__ import annotations

import contextlib
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
from forebay.testing import ScriptedServer
from tests import parts
from tests.fronts import Fronts
from tests.harness import MiB, assert_counted, data_usage
from tests.interrupts.every_line import Interrupt, held_locks, interrupt
from tests.interrupts.test_every_line import CALLS, Place, opened_place
from tests.items import until
from tests.processes import Child, ProcessGroup, in_child
from tests.servers.counting import Shelf

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
                    sender.join()
        except Interrupt:
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
@pytest.mark.parametrize("name", CALLS)
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
SIZES = (100, 3_000, 20_000, 60_000, 400_000)


def version(key: int, number: int) -> bytes:
    head = f"{key}:{number:08d}:".encode()
    return head + bytes([number % 251]) * SIZES[key % len(SIZES)]


def live(it: Fronts, seed: int, seconds: float) -> int:
    """Use a root until the time is up, interrupted all the time, and compare each byte; gives how often a handler raised."""
    signal.signal(signal.SIGALRM, interrupt)
    chance, known, interrupts = random.Random(seed), dict[int, tuple[int, int]](), 0
    until = time.monotonic() + seconds
    with forebay.Cache(it.place, budget=BUDGET, min_free=0) as cache:
        acts, own = it.acts(cache), cache.space(f"own {os.getpid()}")

        def put(key: int) -> None:
            least, latest = known.get(key, (0, 0))
            known[key] = least, latest + 1  # if it is interrupted, it may be stored, or not
            if own.put(str(key), version(key, latest + 1)):
                known[key] = latest + 1, latest + 1

        def get(key: int) -> None:
            data = own.get(str(key))
            if data is not None:
                found, (least, latest) = int(bytes(data).split(b":", 2)[1]), known.get(key, (0, 0))
                assert bytes(data) == version(key, found)
                assert least <= found <= latest, f"version {found} of {key}, of {least} to {latest}"
                known[key] = found, latest

        while time.monotonic() < until:
            act = chance.choice([*acts, put, put, get, get, get])
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.0001, 0.02))
                    with contextlib.suppress(errors.CacheFault):  # no room beside what others have in use
                        act(chance.randrange(KEYS))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            except Interrupt:
                interrupts += 1
    return interrupts


@pytest.mark.stress
@pytest.mark.timeout(1800)
def test_processes_that_are_killed_and_interrupted_get_what_is_right(server: ScriptedServer, shelf: Shelf, tmp_path: Path) -> None:
    it = Fronts(tmp_path / "root", server, shelf, keys=KEYS, slots=SLOTS)
    chance, group, alive = random.Random(1), ProcessGroup(), list[Child]()
    end = time.monotonic() + parts.share(int(SECONDS))
    interrupts = kills = looks = 0
    try:
        while time.monotonic() < end:
            while len(alive) < PROCESSES:
                seed = chance.randrange(1 << 30)
                alive.append(group(lambda seed=seed: live(it, seed, 20.0)))
            child = chance.choice(alive)
            if chance.random() < 0.3:
                child.kill()
                alive.remove(child)
                kills += 1
            elif chance.random() < 0.5:
                for each in alive:
                    each.stop()
                if (it.place / "blobs").exists():
                    assert data_usage(it.place) <= BUDGET
                    looks += 1
                for each in alive:
                    each.signal(signal.SIGCONT)
            time.sleep(chance.uniform(0.1, 0.5))  # the moments of the kills
            for each in alive[:]:
                if each._has_ended():
                    alive.remove(each)
                    interrupts += each.result()
        for each in alive:
            interrupts += each.result(120)
    finally:
        group.kill()
    assert interrupts > 100
    assert min(kills, looks) > 3

    def look() -> None:
        with forebay.Cache(it.place) as cache:
            it.all_is_right(cache)
            assert cache.check(deep=True) == []

    in_child(look)
    assert_counted(it.place, BUDGET)
