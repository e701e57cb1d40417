"""Slots that are made together: by one call, each by one process of the node."""

from __future__ import annotations

import collections
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay._engine.files.layout import key_hash
from forebay._engine.packs.pack import Pack
from forebay.testing import ScriptedServer
from tests.harness import KiB, MiB
from tests.processes import Child, ProcessGroup, talk_to

SLOTS = 16


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        yield cache
        assert cache.check(deep=True) == []


class Maker:
    """Makes values of slots, and notes with which ones it was called."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __call__(self, slots: list[int]) -> list[bytes]:
        self.calls.append(list(slots))
        return [value(i) for i in slots]


def value(i: int) -> bytes:
    return f"value {i}".encode()


def busy_with(samples: forebay.samples.Samples[Any], slots: list[int], ending: str = "return") -> Child:
    """A process that is making these slots; it goes on when it is told to."""

    def work(line: Any) -> None:
        def make(asked: list[int]) -> list[bytes]:
            line.say(asked)
            line.hear()
            if ending == "raise":
                raise LookupError("in the other process")
            return [b"of the other process" for _ in asked]

        samples.get_or_put_many(slots, make)

    child = talk_to(work)
    assert child.hear() == slots
    return child


def test_missing_slots_are_made_by_one_call_and_then_kept(cache: forebay.Cache) -> None:
    samples, make = cache.samples("s", SLOTS), Maker()
    samples.put(2, value(2))
    expected = [value(i) for i in (3, 2, 1, 3)]
    assert [bytes(item) for item in samples.get_or_put_many([3, 2, 1, 3], make)] == expected
    assert make.calls == [[3, 1]]
    assert [bytes(item) for item in samples.get_or_put_many([3, 2, 1, 3], make)] == expected
    assert samples.get_or_put_many([], make) == []
    assert make.calls == [[3, 1]]
    assert list(samples) == [1, 2, 3]


def test_of_very_many_slots_a_call_makes_a_part_at_a_time(
    cache: forebay.Cache, children: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.samples.AT_ONCE", 3)
    samples, make = cache.samples("s", SLOTS), Maker()
    samples.put(2, value(2))
    with busy_with(samples, [1, 5]) as other:
        waits = cache.stats().waits
        asking = children(lambda: ([bytes(item) for item in samples.get_or_put_many(range(9), make)], make.calls))
        while cache.stats().waits == waits:
            os.sched_yield()
        other.say("go on")
        items, calls = asking.result()
        other.result()
    assert items == [b"of the other process" if i in (1, 5) else value(i) for i in range(9)]
    assert calls == [[0, 3], [4, 6], [7, 8]]


def test_a_slot_is_released_when_its_item_is_stored(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, left, put = cache.samples("s", SLOTS), list[int](), Pack.put

    def counting(self: Pack, slot: int, *arguments: Any) -> bool:
        left.append(sum(map(cache._store.engine.parts.writers.keys.held, keyhashes)))
        return put(self, slot, *arguments)

    keyhashes = [key_hash("samples", f"{samples._pack.id:x}/{i}") for i in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(Pack, "put", counting)
        samples.get_or_put_many(range(4), Maker())
    assert left == [4, 3, 2, 1]


def test_what_another_process_makes_is_waited_for_last(cache: forebay.Cache, children: ProcessGroup) -> None:
    samples, make = cache.samples("s", SLOTS), Maker()
    with busy_with(samples, [4, 5]) as other:

        def ask() -> tuple[list[bytes], list[list[int]]]:
            return [bytes(item) for item in samples.get_or_put_many([4, 1, 5, 2], make)], make.calls

        waits = cache.stats().waits
        asking = children(ask)
        while cache.stats().waits == waits:
            os.sched_yield()
        # While that process waits for the first one, a third one has what it has made.
        assert [bytes(item) for item in samples.get_or_put_many([1, 2], make)] == [value(1), value(2)]
        assert make.calls == []
        other.say("go on")
        assert asking.result() == ([b"of the other process", value(1), b"of the other process", value(2)], [[1, 2]])
        other.result()


def test_threads_with_overlapping_batches_make_each_slot_once(cache: forebay.Cache) -> None:
    samples, both = cache.samples("s", SLOTS), threading.Barrier(2)
    made: collections.Counter[int] = collections.Counter()

    def make(slots: list[int]) -> list[bytes]:
        if not made.keys() & {0, 8}:
            both.wait(60)  # each of them makes what was free
        made.update(slots)
        return [value(i) for i in slots]

    def ask(slots: range) -> list[bytes]:
        return [bytes(item) for item in samples.get_or_put_many(slots, make)]

    with ThreadPoolExecutor(2) as pool:
        batches = [range(8), range(8, 0, -1)]
        assert list(pool.map(ask, batches)) == [[value(i) for i in batch] for batch in batches]
    assert made == dict.fromkeys(range(9), 1)


def test_what_was_stored_between_the_look_and_the_lock_is_not_made_again(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    samples, make, locks = cache.samples("s", SLOTS), Maker(), cache._store.locks
    hold = locks.holding_free

    def late(space: str, keys: list[str]) -> Any:
        samples.put(2, value(2))
        return hold(space, keys)

    with monkeypatch.context() as patched:
        patched.setattr(locks, "holding_free", late)
        assert [bytes(item) for item in samples.get_or_put_many([1, 2], make)] == [value(1), value(2)]
    assert make.calls == [[1]]


def test_what_a_killed_process_was_making_is_made_by_one_call(cache: forebay.Cache) -> None:
    samples, make = cache.samples("s", SLOTS), Maker()
    with busy_with(samples, [4, 5, 6]) as other:
        other.signal(signal.SIGKILL)
        other.wait()
    assert [bytes(item) for item in samples.get_or_put_many([4, 5, 6, 7], make)] == [value(i) for i in (4, 5, 6, 7)]
    assert make.calls == [[4, 5, 6, 7]]


def test_what_fails_in_another_process_is_made_here(cache: forebay.Cache, children: ProcessGroup) -> None:
    samples, waits = cache.samples("s", SLOTS), cache.stats().waits
    with busy_with(samples, [4, 5], "raise") as other:
        asking = children(lambda: [bytes(item) for item in samples.get_or_put_many([4, 5], Maker())])
        while cache.stats().waits == waits:
            os.sched_yield()
        other.say("go on")
        assert asking.result() == [value(4), value(5)]
        with pytest.raises(LookupError):
            other.result()


def test_what_the_function_raises_is_raised_and_nothing_is_stored_or_held(cache: forebay.Cache, children: ProcessGroup) -> None:
    samples, raised = cache.samples("s", SLOTS), errors.CacheFault("of another cache")

    def fail(slots: list[int]) -> list[bytes]:
        raise raised

    with pytest.raises(errors.CacheFault) as found:
        samples.get_or_put_many([1, 2], fail)
    assert found.value is raised
    assert samples.filled == 0
    with pytest.raises(ValueError, match="returned 1 values for 2 slots"):
        samples.get_or_put_many([1, 2], lambda slots: [b"one"])
    assert children(lambda: [bytes(item) for item in samples.get_or_put_many([1, 2], Maker())]).result() == [value(1), value(2)]


def test_a_wait_ends_with_its_timeout(cache: forebay.Cache) -> None:
    samples, make = cache.samples("s", SLOTS), Maker()
    with busy_with(samples, [4, 5]) as other:
        items = samples.get_or_put_many([3, 4, 5], make, timeout=0.05)
        assert [bytes(item) for item in items] == [value(3), value(4), value(5)]  # served past the cache
        assert make.calls == [[3], [4], [5]]
        other.say("go on")
        other.result()


def test_the_function_may_read_through_the_cache_while_its_slots_are_held(
    cache: forebay.Cache, server: ScriptedServer, children: ProcessGroup
) -> None:
    samples = cache.samples("s", SLOTS)
    url = server.put("/a", b"object", stall_after=3, stalls=1)
    reading = children(lambda: bytes(cache.read(url)))
    assert server.stalled.wait(60)
    asking = children(lambda: [bytes(item) for item in samples.get_or_put_many([1, 2], lambda slots: cache.read_many([url] * len(slots)))])
    while not cache.stats().waits:
        os.sched_yield()
    server.go.set()
    assert asking.result() == [b"object"] * 2
    assert reading.result() == b"object"
    assert server.gets == 1


def test_without_room_all_are_made_by_one_call_each_time(tmp_path: Path) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        samples, make = cache.samples("s", SLOTS), Maker()
        for _ in range(2):
            assert [bytes(item) for item in samples.get_or_put_many([3, 1, 3], make)] == [value(3), value(1), value(3)]
        assert make.calls == [[3, 1]] * 2


def test_what_exceeds_the_quota_is_returned_all_the_same(cache: forebay.Cache) -> None:
    samples = cache.samples("s", SLOTS, quota=256 * KiB)
    bodies = {i: bytes([i]) * 100 * KiB for i in range(SLOTS)}
    with pytest.warns(RuntimeWarning, match="takes nothing more"):
        items = samples.get_or_put_many(range(SLOTS), lambda slots: [bodies[i] for i in slots])
    assert [bytes(item) for item in items] == list(bodies.values())
    assert 0 < samples.filled < SLOTS
