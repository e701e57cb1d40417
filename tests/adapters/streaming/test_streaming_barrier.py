"""A barrier with the calls of Streaming, among processes that are forked, spawned, strangers, or killed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from forebay import claims
from forebay.adapters.streaming import SharedArray, SharedBarrier, World, get_shm_prefix
from tests.adapters.streaming.streaming_runs import Job, Node, Say, own_node


@pytest.fixture(autouse=True)
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    with own_node(monkeypatch) as found:
        yield found


@pytest.fixture
def name() -> Iterator[str]:
    name = f"forebay-test-{secrets.token_hex(6)}"
    yield name
    Path("/dev/shm", name).unlink(missing_ok=True)


def test_what_streaming_knows_of_it(name: str) -> None:
    barrier = SharedBarrier("/nowhere/lock", name)
    assert isinstance(barrier._arr, SharedArray)
    assert (barrier._arr.shape, barrier.filelock_path) == ((3,), "/nowhere/lock")
    assert (barrier.num_enter, barrier.num_exit, barrier.flag) == (0, -1, True)
    barrier.num_enter, barrier.num_exit, barrier.flag = 3, 4, False
    assert barrier._arr.numpy().tolist() == [3, 4, 0]
    assert (barrier.num_enter, barrier.num_exit, barrier.flag) == (3, 4, False)
    with barrier.lock:
        pass
    del barrier.lock
    assert not hasattr(barrier, "lock")
    barrier.lock = threading.Lock()
    barrier(1)


def test_the_lock_of_a_barrier_has_the_calls_of_a_filelock(name: str) -> None:
    barrier, other = SharedBarrier("/nowhere/lock", name), SharedBarrier("/nowhere/lock", name)
    lock = barrier.lock
    assert lock.lock_file == "/nowhere/lock"
    lock.release()  # which nobody has
    with lock.acquire(timeout=-1) as got:
        assert got is lock
        assert lock.is_locked
        lock.acquire()
        lock.release()
        for how in ({"timeout": 0.01}, {"blocking": False}):
            with ThreadPoolExecutor(1) as others, pytest.raises(TimeoutError, match="waited"):
                others.submit(other.lock.acquire, **how).result()
        child = multiprocessing.get_context("fork").Process(target=_lock_not_held, args=(barrier,))
        child.start()
        child.join()
        assert (child.exitcode, lock.is_locked) == (0, True)
        lock.acquire()
        lock.release(force=True)
        assert not lock.is_locked
        with other.lock:
            pass


def _lock_not_held(barrier: SharedBarrier) -> None:
    assert not barrier.lock.is_locked
    with pytest.raises(TimeoutError):
        barrier.lock.acquire(timeout=0.01)


def test_the_claim_of_a_barrier_goes_with_it(name: str, node: Node) -> None:
    barrier, second = SharedBarrier("/nowhere/lock", name), SharedBarrier("/nowhere/lock", name)
    del barrier
    assert len(node.claims()) == 2  # one is of its memory, which lasts as long as the process
    second(1)
    memory = second._arr.shm
    del second
    assert len(node.claims()) == 1
    memory.cleanup()
    assert node.claims() == []


def cross(say: Say, barrier: SharedBarrier, parties: int, times: int, rounds: SharedArray, number: int) -> None:
    """Nobody is ever a round ahead of who has crossed."""
    for done in range(1, times + 1):
        rounds[number] = done
        barrier(parties)
        assert rounds.numpy().min() >= done
        barrier(parties)
    say("crossed")


@pytest.mark.parametrize("parties", [2, 4])
def test_children_cross_it_again_and_again(name: str, parties: int) -> None:
    barrier, rounds = SharedBarrier("/nowhere/lock", name), SharedArray(parties, int, f"{name}-rounds")
    jobs = [Job(lambda say, number=number: cross(say, barrier, parties, 100, rounds, number)) for number in range(parties)]
    assert [job.said() for job in jobs] == ["crossed"] * parties
    for job in jobs:
        job.__exit__(None, None, None)
    rounds.shm.cleanup()


def _cross_once(barrier: Any) -> None:
    barrier(2)


def test_a_spawned_child_gets_it_by_pickle(name: str) -> None:
    barrier = SharedBarrier("/nowhere/lock", name)
    assert not hasattr(pickle.loads(pickle.dumps(barrier)), "lock")
    child = multiprocessing.get_context("spawn").Process(target=_cross_once, args=(barrier,))
    child.start()
    barrier(2)
    child.join()
    assert child.exitcode == 0


def stranger(say: Say, name: str) -> None:
    barrier = SharedBarrier("/nowhere/lock", name)
    say("made")
    barrier(2)
    say("crossed")


def test_strangers_meet_by_its_name(name: str, node: Node) -> None:
    with Job(lambda say: stranger(say, name)) as one, Job(lambda say: stranger(say, name)) as other:
        assert [one.said(), other.said(), one.said(), other.said()] == ["made", "made", "crossed", "crossed"]
        assert [one.wait(), other.wait()] == [0, 0]
    assert node.claims() == []


def wait_for_one_who_dies(say: Say, barrier: SharedBarrier, *, dies: bool) -> None:
    barrier(2)
    say("crossed")
    if dies:
        signal.pause()
    began = time.monotonic()
    try:
        barrier(2)
    except threading.BrokenBarrierError as error:
        say([time.monotonic() - began, str(error)])


def test_the_death_of_one_is_told_to_the_other(name: str) -> None:
    """Streaming's own would wait for ever."""
    barrier = SharedBarrier("/nowhere/lock", name)
    with Job(lambda say: wait_for_one_who_dies(say, barrier, dies=False)) as one:
        with Job(lambda say: wait_for_one_who_dies(say, barrier, dies=True)) as other:
            assert [one.said(), other.said()] == ["crossed", "crossed"]
            other.kill()
            waited, message = one.said()
            assert waited < 20
            assert str(other.pid) in message


def test_a_barrier_belongs_to_the_claim_of_its_number(name: str, node: Node) -> None:
    prefix, memory = get_shm_prefix(["/data/a"], [None], World(1, 1, 1, 0))
    barrier = SharedBarrier("/nowhere/lock", f"{prefix:06}_barrier")
    barrier(1)
    assert len(node.claims()) == 1
    assert claims.list_claims()[0].directories == ("/data/a",)
    again = pickle.loads(pickle.dumps({"barrier": barrier, "memory": memory}))
    again["barrier"](1)
    del again, memory
    barrier(1)  # it has the claim
    assert len(node.claims()) == 1
    assert os.path.exists(f"/dev/shm/{prefix:06}_barrier")
    del barrier
    assert node.claims() == []
    assert not os.path.exists(f"/dev/shm/{prefix:06}_barrier")
