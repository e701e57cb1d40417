"""The clock of a root never goes back, whatever the machine's does; and what stands in mapped tables is not believed unseen."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from forebay._engine.index import head as module
from forebay._engine.index.head import AHEAD, BELIEVED, BOOT, SEEN, Clock
from forebay._engine.index.records import USED, VALIDATED
from forebay._engine.store import Store
from tests.clocks import Clocks
from tests.harness import MiB, bytes_of, opened
from tests.processes import in_child

SECOND = 1_000_000_000
HOUR, DAY = 3600 * SECOND, 86_400 * SECOND


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    with Clocks() as found:
        yield found


@pytest.fixture
def store(tmp_path: Path, clocks: Clocks) -> Iterator[Store]:
    with opened(tmp_path / "root", 64 * MiB) as store:
        yield store


def words(store: Store) -> tuple[memoryview, int]:
    return store.engine.index.head.clock_words()


def test_the_clock_goes_on_while_the_wall_clock_was_set_back(store: Store, clocks: Clocks) -> None:
    before = store.now()
    clocks.step(-HOUR)
    seen = [store.now() for _ in range(1000)]
    assert before < seen[0]
    assert seen == sorted(seen)
    assert seen[-1] - before < 60 * SECOND
    end = time.monotonic_ns() + 20_000_000
    while time.monotonic_ns() < end:
        pass
    assert store.now() - seen[-1] >= 20_000_000, "it does not stand still until the other one catches up"


def test_the_clock_follows_a_wall_clock_that_is_ahead_and_stays_there(store: Store, clocks: Clocks) -> None:
    before = store.now()
    clocks.step(DAY)
    assert store.now() - before >= DAY
    clocks.step(-DAY)
    assert DAY <= store.now() - before < DAY + 60 * SECOND


@pytest.mark.parametrize("step", [-HOUR, DAY])
def test_a_step_while_another_process_looks_is_one_clock(store: Store, clocks: Clocks, step: int) -> None:
    """P1 sees the step / P2, which began after it, goes on from what P1 saw."""
    before = store.now()

    def other() -> int:
        clocks.step(step)
        with opened(store.root.path) as mine:
            return mine.now()

    there = in_child(other)
    assert there >= before + max(step, 0)
    store.engine.index.head.clock.window = 0, 0, 0  # a second has passed
    assert there <= store.now() < there + 60 * SECOND


def test_a_step_that_another_thread_sees_between_two_lines_is_no_time_of_its_own(store: Store, clocks: Clocks) -> None:
    """P1 reads the wall clock / the wall clock is set back / P2 sees it / P1 adds what the clock is ahead of the wall clock now."""
    clock, left = store.engine.index.head.clock, 0

    def trace(frame: FrameType, event: str, arg: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code is not Clock.now.__code__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                clocks.step(-HOUR)
                with ThreadPoolExecutor(1) as other:
                    other.submit(clock.look).result()
        return trace

    lines = 0
    while left <= 0:
        before, left = clock.look(), (lines := lines + 1)
        sys.settrace(trace)
        try:
            seen = clock.now()
        finally:
            sys.settrace(None)
        assert 0 < seen - before < 60 * SECOND, f"at line {lines} of it"
    assert lines > 4


def test_a_pause_between_two_looks_at_the_machines_clocks_makes_it_late_not_early(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for at a time that is yet to come would be newer than a question that came after it."""
    passed = 0

    def monotonic() -> int:
        nonlocal passed
        passed += SECOND // 2  # it stood still in front of this
        return monotonic_ns() + passed

    monotonic_ns, time_ns = time.monotonic_ns, time.time_ns
    monkeypatch.setattr(time, "monotonic_ns", monotonic)
    monkeypatch.setattr(time, "time_ns", lambda: time_ns() + passed)
    clock = store.engine.index.head.clock
    clock.look()
    assert clock.now() <= clock.look() - SECOND // 2


def test_a_pause_between_two_looks_changes_no_time_that_is_shown(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = passed = 0

    def wall() -> int:
        nonlocal calls, passed
        calls += 1
        passed += SECOND // 100 if calls % 5 == 0 else 0  # it stood still in front of this
        return time_ns() + passed

    monotonic_ns, time_ns = time.monotonic_ns, time.time_ns
    monkeypatch.setattr(time, "monotonic_ns", lambda: monotonic_ns() + passed)
    monkeypatch.setattr(time, "time_ns", wall)
    clock, moment, shown = store.engine.index.head.clock, store.now(), set()
    for _ in range(20):
        clock.look()
        shown.add(clock.wall(moment))
    assert len(shown) == 1


def test_after_a_reboot_it_goes_on_from_what_was_seen_last(store: Store, clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    table, at = words(store)
    before = store.now()
    monkeypatch.setattr(module, "boot_number", lambda: 12345)
    clocks.step(-HOUR)
    again = Clock(store.engine.index.head, writable=True)
    assert before - 2 * SECOND <= again.now() <= before + 60 * SECOND
    assert table[at + BOOT] == 12345


@pytest.mark.parametrize("word", [AHEAD, SEEN])
@pytest.mark.parametrize("value", [(1 << 64) - 1, 1 << 63])
def test_what_cannot_be_is_written_over(store: Store, word: int, value: int) -> None:
    table, at = words(store)
    table[at + word] = value
    if word == SEEN:
        table[at + BOOT] = 1
    clock = Clock(store.engine.index.head, writable=True)
    assert abs(clock.now() - time.time_ns()) < 60 * SECOND
    assert table[at + word] < value
    store.put("v", "k", b"x")
    assert bytes_of(store, "k") == b"x"


def test_a_clock_that_was_forged_far_ahead_runs_on(store: Store) -> None:
    store.now()
    table, at = words(store)
    table[at + AHEAD] += 50 * 365 * DAY
    clock = Clock(store.engine.index.head, writable=True)
    first = clock.now()
    assert 49 * 365 * DAY < first - time.time_ns() < BELIEVED
    assert clock.look() > first
    assert abs(clock.wall(first) - time.time()) < 60, "people are shown their own time"
    with opened(store.root.path) as other:
        other.put("v", "k", b"x")
        entry = other.entry("v", "k")
        assert entry is not None
        assert abs(entry.used - time.time()) < 60


def test_times_of_the_future_are_as_if_there_were_none(store: Store) -> None:
    entries = {key: store.put("v", key, b"x") for key in "abc"}
    record, base = store.engine.index.record(entries["b"].slot)
    record[base + USED] = record[base + VALIDATED] = (1 << 64) - 1
    assert store.validated(entries["b"]) == 0
    assert [entry.key for entry in store.seeing.entries("v")] == ["b", "a", "c"]
    assert store.seeing.keys("v") == ["b", "a", "c"]
    assert bytes_of(store, "b") == b"x"
    store.touch(entries["b"])
    assert store.seeing.keys("v") == ["a", "c", "b"]


@pytest.mark.parametrize("step", [-HOUR, DAY], ids=["-1 h", "+1 day"])
def test_the_least_recently_used_go_first_whatever_the_clock_does(tmp_path: Path, clocks: Clocks, step: int) -> None:
    """Also where the coldest were used after a step that was taken back: +1 day, use, -1 day, use others."""
    with opened(tmp_path / "root", 40 * 8192) as store:
        for n in range(40):
            store.put("v", f"k{n:02d}", bytes(8192 - 512))
        size = len(store.seeing.entries("v"))
        clocks.step(step)
        hot = list(store.seeing.entries("v"))[: size // 2]
        for entry in hot:
            store.touch(entry)
        clocks.step(-step)
        for n in range(size // 4):
            store.put("v", f"new{n}", bytes(8192 - 512))
        left = {entry.key for entry in store.seeing.entries("v")}
        assert {entry.key for entry in hot} <= left


def test_what_was_evicted_is_let_go_after_a_step_back(store: Store, clocks: Clocks) -> None:
    with opened(store.root.path) as other:  # the same engine: evicts behind the memo's back all the same
        other.put("v", "k", bytes(100_000))
        assert bytes_of(store, "k") is not None
        clocks.step(-HOUR)
        other.remove(list(map(_victim, other.seeing.entries("v"))))
        store.view("v", "none")  # any look
        assert not store.engine.memo._known["v"]


def _victim(entry):  # type: ignore[no-untyped-def]
    from forebay._model import Victim

    return Victim(entry.name, entry.size, entry.charge, entry.used, entry.id)


@pytest.mark.parametrize("step", [-HOUR, DAY], ids=["-1 h", "+1 day"])
def test_durations_are_of_no_wall_clock(store: Store, clocks: Clocks, step: int) -> None:
    from forebay import errors

    store.spaces.ensure("w", policy="wait", quota=100_000)
    store.put("w", "k", bytes(90_000))
    lease = store.lease("w", "k")
    assert lease is not None
    clocks.every_look(step // 100)
    with pytest.raises(errors.NoSpace):
        store.put("w", "other", bytes(90_000), timeout=0.05)
    lease.close()
    waited = store.seeing.counts()["wait_ns_space"]
    assert 0 < waited < 60 * SECOND
