from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest

from forebay._engine.files.root import Root
from forebay._engine.index import counters as module
from forebay._engine.index.counters import BYTES_HIT, HITS, NAMES, PAGE, Counters
from forebay._kernel import host


@pytest.fixture
def counters(root: Root) -> Iterator[Counters]:
    counters = Counters(root)
    yield counters
    counters.close()


def hits(root: Root) -> int:
    """As another process sees them."""
    return Counters(root).totals()[HITS]


def in_threads(count: int, work: Callable[[], object]) -> None:
    """Run ``work`` in ``count`` threads that are all alive at once."""
    gate = threading.Barrier(count)

    def body() -> None:
        gate.wait()
        work()
        gate.wait()

    threads = [threading.Thread(target=body) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_names_and_indices_agree() -> None:
    assert len(NAMES) == 16
    assert [getattr(module, name.upper()) for name in NAMES] == list(range(16))


def test_counts_are_read_by_others(root: Root, counters: Counters) -> None:
    counters.add(HITS)
    counters.add(BYTES_HIT, 1000)
    words, base = counters.block()
    words[base + HITS] += 1
    sums = Counters(root).totals()
    assert dict(zip(NAMES, sums, strict=True)) == dict.fromkeys(NAMES, 0) | {"hits": 2, "bytes_hit": 1000}
    assert counters.sums() == sums


@pytest.mark.parametrize("threads", [2, 30, 100])
def test_no_count_of_any_thread_is_lost(root: Root, counters: Counters, threads: int) -> None:
    in_threads(threads, lambda: [counters.add(HITS) for _ in range(500)])
    assert hits(root) == threads * 500


def test_a_block_goes_from_a_dead_thread_to_the_next(counters: Counters) -> None:
    blocks = set()
    for _ in range(100):
        in_threads(1, lambda: (counters.add(HITS), blocks.add(counters.block()[1])))
    assert counters.sums()[HITS] == 100
    assert PAGE // 8 - 16 not in blocks, "the shared block is for many threads at once"


def test_counts_from_before_there_was_a_page_are_taken_along(root: Root, counters: Counters, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as patched:
        patched.setattr(host, "allocate", full)
        counters.add(HITS, 3)
    assert (counters.totals()[HITS], hits(root)) == (3, 0)
    counters.claim()
    assert hits(root) == 0, "not asked again at once"
    monkeypatch.setattr(counters, "_ask_at", 0.0)
    counters.claim()
    counters.add(HITS)
    assert (counters.totals()[HITS], hits(root)) == (4, 4)


def test_a_forked_child_counts_for_itself(root: Root, counters: Counters, children: Callable[..., object]) -> None:
    counters.add(HITS, 5)

    def child() -> None:
        assert counters.sums()[HITS] == 0
        counters.add(HITS, 2)
        counters.add(HITS)
        assert counters.sums()[HITS] == 3
        assert counters.living() == [os.getppid()]

    assert children(child).wait() == 0
    assert (counters.sums()[HITS], hits(root)) == (5, 8)
    assert counters.living() == []


def test_a_page_that_is_let_go_keeps_its_counts_for_the_next(root: Root, counters: Counters) -> None:
    counters.add(HITS, 5)
    other = Counters(root)
    other.add(HITS, 2)
    assert other.sums()[HITS] == 2, "a page of its own"
    counters.detach()
    third = Counters(root)
    third.add(HITS, 1)
    assert third.sums()[HITS] == 6
    assert hits(root) == 8
    assert root.counters.stat().st_size == 64 * PAGE
    other.close(), third.close()


def test_a_crash_at_any_step_of_a_claim_loses_no_count(root: Root, kill_at: Callable[..., bool]) -> None:
    before = Counters(root)
    before.add(HITS, 5)
    before.close()
    step = 0
    while kill_at(step, lambda: Counters(root).add(HITS, 0)):
        assert hits(root) == 5
        step += 1
    assert step >= 2


def test_the_file_grows_in_steps_and_is_allocated(root: Root) -> None:
    many = [Counters(root) for _ in range(65)]
    for one in many:
        one.add(HITS)
    found = root.counters.stat()
    assert found.st_size == 128 * PAGE
    assert found.st_blocks * 512 >= found.st_size
    assert hits(root) == 65
    for one in many:
        one.close()


def test_a_child_that_dies_mid_count_leaves_what_it_counted(root: Root, children: Callable[..., object]) -> None:
    said = os.pipe()

    def child() -> None:
        mine = Counters(root)
        mine.add(HITS, 9)
        os.write(said[1], b"x")
        threading.Event().wait()

    born = children(child)
    os.read(said[0], 1)
    assert len(Counters(root).living()) == 1
    born.kill()
    assert Counters(root).living() == []
    assert hits(root) == 9
    os.close(said[0])
    os.close(said[1])


@pytest.mark.parametrize("damage", ["random", "far", "cut", "fifo", "directory"])
def test_what_stands_in_a_damaged_file_is_not_believed(root: Root, counters: Counters, damage: str) -> None:
    first = Counters(root)
    first.add(HITS, 7)
    first.close()
    data = bytearray(root.counters.read_bytes())
    if damage == "random":
        root.counters.write_bytes(random.Random(1).randbytes(len(data)))
    elif damage == "far":
        data[128 : 128 + 8] = b"\xff" * 8
        root.counters.write_bytes(data)
    elif damage == "cut":
        os.truncate(root.counters, 100)
    else:
        root.counters.unlink()
        os.mkfifo(root.counters) if damage == "fifo" else root.counters.mkdir()
    assert hits(root) == 0
    counters.add(HITS, 1)
    assert counters.totals()[HITS] == 1
