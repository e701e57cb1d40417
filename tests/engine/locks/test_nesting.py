"""Who makes a value waits for another one: one process makes that for all, and nobody waits in a circle."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay._engine.files.waiters import KeyWaiter, Waiters
from forebay._engine.flight import Busy, KeyHold, leads_to
from forebay._engine.store import Settings, Store

SPAWNED = multiprocessing.get_context("fork")
LIMIT = 30


def wait(held: set[int], wanted: int) -> KeyWaiter:
    return KeyWaiter(1, 0.0, wanted, "", frozenset(held))


@pytest.mark.parametrize(
    ("waits", "circle"),
    [
        ([], False),
        ([wait({2}, 1)], True),
        ([wait({2}, 3), wait({3}, 1)], True),
        ([wait({2, 9}, 3), wait({3, 8}, 1)], True),
        ([wait({3}, 1)], False),
        ([wait({2}, 3), wait({3}, 2)], False),
    ],
)
def test_a_circle_is_seen(waits: list[KeyWaiter], circle: bool) -> None:
    assert leads_to({1}, 2, waits) is circle


def test_a_value_that_many_others_need_is_made_once(quick_path: Path, children: Callable[..., object]) -> None:
    """Eight processes, each making a value of its own, all need a ninth: one of them makes that."""
    runs, all_inside = SPAWNED.Value("i", 0), SPAWNED.Barrier(8)

    def work(i: int) -> None:
        with forebay.Cache(quick_path / "root", min_free=0) as cache:

            def shared() -> bytes:
                with runs.get_lock():
                    runs.value += 1
                while cache.stats().waits < 7 and runs.value == 1:
                    os.sched_yield()
                return b"shared"

            def own() -> bytes:
                all_inside.wait(LIMIT)
                return bytes(cache.get_or_put("shared", shared)) + b"%d" % i

            assert cache.get_or_put(f"own {i}", own) == b"shared%d" % i

    started = [children(lambda i=i: work(i)) for i in range(8)]  # type: ignore[misc]
    assert [child.wait() for child in started] == [0] * 8  # type: ignore[attr-defined]
    assert runs.value == 1


def test_two_that_need_each_other_do_not_wait_for_ever(quick_path: Path, children: Callable[..., object]) -> None:
    """P1 makes a, P2 makes b, then each wants the other's: who closes the circle makes it himself."""
    both_inside = SPAWNED.Barrier(2)

    def work(mine: str, other: str) -> None:
        with forebay.Cache(quick_path / "root", min_free=0) as cache:

            def make() -> bytes:
                both_inside.wait(LIMIT)
                return bytes(cache.get_or_put(other, lambda: b"alone"))

            assert cache.get_or_put(mine, make) == b"alone"

    started = [children(lambda: work("a", "b")), children(lambda: work("b", "a"))]
    assert [child.wait() for child in started] == [0, 0]  # type: ignore[attr-defined]
    with forebay.Cache(quick_path / "root") as cache:
        assert notes(cache) == []


def test_a_value_that_needs_itself_is_made(cache: forebay.Cache) -> None:
    """Two calls under one key, one inside the other."""
    assert cache.get_or_put("k", lambda: bytes(cache.get_or_put("k", lambda: b"inner")) + b" outer") == b"inner outer"


def test_what_a_killed_waiter_noted_counts_for_nothing(quick_path: Path, children: Callable[..., object]) -> None:
    """P1 makes a, waits for b, and is killed. P2 takes a over. Who makes b waits for P2: it is not P1, which waited for b."""
    has_b, inside, over = SPAWNED.Event(), SPAWNED.Event(), SPAWNED.Event()

    def doomed() -> None:
        with forebay.Cache(quick_path / "root", min_free=0) as cache:

            def make() -> bytes:
                inside.set()
                assert has_b.wait(LIMIT)
                return bytes(cache.get_or_put("b", lambda: b"never"))

            cache.get_or_put("a", make)

    def successor() -> None:
        with forebay.Cache(quick_path / "root", min_free=0) as cache:

            def make() -> bytes:
                inside.set()
                while not over.is_set() and len(notes(cache)) < 2 and cache.stats().waits < 2:
                    os.sched_yield()
                return b"taken over"

            cache.get_or_put("a", make)

    child = children(doomed)
    assert inside.wait(LIMIT)
    inside.clear()
    with forebay.Cache(quick_path / "root", min_free=0) as cache:

        def make_b() -> bytes:
            has_b.set()
            while not notes(cache):
                os.sched_yield()
            os.kill(child.pid, signal.SIGKILL)  # type: ignore[attr-defined]
            child.wait()  # type: ignore[attr-defined]
            children(successor)
            assert inside.wait(LIMIT)
            try:
                return bytes(cache.get_or_put("a", lambda: b"alone"))
            finally:
                over.set()

        assert cache.get_or_put("b", make_b) == b"taken over"
        assert notes(cache) == []


def notes(cache: forebay.Cache) -> list[KeyWaiter]:
    """The nested waits."""
    return [one for one in Waiters(cache._store.root).every() if one.held]  # type: ignore[union-attr]


def test_coroutines_make_a_value_once(tmp_path: Path) -> None:
    """Eight in one loop: one makes it; nested, and two that need each other."""
    store = Store.open(tmp_path / "root", Settings(min_free=0))
    kept: dict[str, bytes] = {}
    runs: list[str] = []

    def single(key: str, needs: str | None = None):  # type: ignore[no-untyped-def]  # a coroutine
        async def make(hold: KeyHold) -> bytes:
            runs.append(key)
            await asyncio.sleep(0)
            if needs is not None:
                await single(needs)
            kept[key] = key.encode()
            return kept[key]

        return store.locks.make_once("values", key, lambda: kept.get(key), make, timeout=LIMIT)

    async def crowd() -> None:
        assert await asyncio.gather(*(single("k") for _ in range(8))) == [b"k"] * 8
        assert await asyncio.gather(single("own 1", "both"), single("own 2", "both")) == [b"own 1", b"own 2"]

    asyncio.run(crowd())
    store.close()
    assert sorted(runs) == ["both", "k", "own 1", "own 2"]


def test_coroutines_that_need_each_other_do_not_wait_for_ever(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(min_free=0))
    refused: list[str] = []

    async def work(mine: str, other: str, inside: asyncio.Event, other_inside: asyncio.Event) -> bytes:
        async def make(hold: KeyHold) -> bytes:
            inside.set()
            await other_inside.wait()
            try:
                return await store.locks.make_once("values", other, lambda: None, nothing, timeout=LIMIT)
            except Busy:
                refused.append(mine)
                return b"alone"

        return await store.locks.make_once("values", mine, lambda: None, make, timeout=LIMIT)

    async def nothing(hold: KeyHold) -> bytes:
        return b"nothing"

    async def both() -> list[bytes]:
        one, two = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(work("a", "b", one, two), work("b", "a", two, one))

    found = asyncio.run(both())
    store.close()
    assert sorted(found) == [b"alone", b"nothing"]
    assert len(refused) == 1


def test_a_failure_reaches_a_coroutine_that_waits(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "root", Settings(min_free=0))
    runs = []

    async def fails(hold: KeyHold) -> bytes:
        runs.append(1)
        await asyncio.sleep(0.02)
        raise ValueError("no such value")

    async def crowd() -> list[bytes | BaseException]:
        calls = (store.locks.make_once("values", "k", lambda: None, fails, timeout=LIMIT) for _ in range(4))
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(crowd())
    store.close()
    assert [str(error) for error in found] == ["no such value"] * 4
    assert len(runs) == 1
