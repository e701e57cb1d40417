from __future__ import annotations

import os
import threading
from collections.abc import Callable

import pytest

from forebay._engine import counters as module
from forebay._engine.counters import BYTES_HIT, HITS, NAMES, PAGE, Counters
from forebay._engine.root import Root


@pytest.fixture
def counters(root: Root) -> Counters:
    counters = Counters(root)
    counters.renew(0, 77)
    return counters


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
    owner, sums = Counters(root).read_page(0)
    assert owner == 77
    assert dict(zip(NAMES, sums, strict=True)) == dict.fromkeys(NAMES, 0) | {"hits": 2, "bytes_hit": 1000}
    assert counters.sums() == sums


@pytest.mark.parametrize("threads", [2, 30, 100])
def test_no_count_of_any_thread_is_lost(counters: Counters, threads: int) -> None:
    in_threads(threads, lambda: [counters.add(HITS) for _ in range(500)])
    assert counters.read_page(0)[1][HITS] == threads * 500


def test_a_block_goes_from_a_dead_thread_to_the_next(counters: Counters) -> None:
    blocks = set()
    for _ in range(100):
        in_threads(1, lambda: (counters.add(HITS), blocks.add(counters.block()[1])))
    assert counters.sums()[HITS] == 100
    assert PAGE // 8 - 16 not in blocks, "the shared block is for many threads at once"


def test_counts_before_the_first_page_are_taken_along(root: Root) -> None:
    counters = Counters(root)
    counters.add(HITS, 3)
    assert counters.read_page(5) == (0, [0] * 16)
    counters.renew(5, 88)
    counters.add(HITS)
    assert counters.read_page(5) == (88, [4, *[0] * 15])


def test_a_forked_child_counts_for_itself(root: Root, counters: Counters, children: Callable[..., object]) -> None:
    counters.add(HITS, 5)

    def child() -> None:
        counters.add(HITS, 2)  # before it has a page
        assert counters.sums()[HITS] == 2
        counters.renew(1, 78)
        counters.add(HITS)

    assert children(child).wait() == 0
    assert counters.read_page(0) == (77, [5, *[0] * 15])
    assert counters.read_page(1) == (78, [3, *[0] * 15])


def test_a_page_given_to_another_owner_begins_at_zero(root: Root, counters: Counters) -> None:
    counters.add(HITS, 5)
    counters.detach()
    counters.add(HITS, 1)
    assert counters.read_page(0)[1][HITS] == 5
    other = Counters(root)
    other.renew(0, 99)
    assert other.read_page(0) == (99, [0] * 16)


def test_a_page_taken_over_never_shows_counts_under_a_wrong_name(root: Root, kill_at: Callable[..., bool]) -> None:
    step = 0
    while True:
        old = Counters(root)
        old.renew(3, 77)
        old.add(HITS, 5)
        died = kill_at(step, lambda: Counters(root).renew(3, 78))
        assert old.read_page(3) in [(77, [5, *[0] * 15]), (0, [0] * 16), (78, [0] * 16)]
        if not died:
            break
        step += 1
    assert step >= 2


def test_the_file_grows_in_steps_and_is_allocated(root: Root, counters: Counters) -> None:
    counters.renew(200, 77)
    counters.add(HITS)
    found = root.counters.stat()
    assert found.st_size == 256 * PAGE
    assert found.st_blocks * 512 >= found.st_size
    assert counters.read_page(200)[1][HITS] == 1
    assert counters.read_page(10_000) == (0, [0] * 16)


def test_a_child_that_dies_mid_count_leaves_what_it_counted(root: Root, children: Callable[..., object]) -> None:
    said = os.pipe()

    def child() -> None:
        mine = Counters(root)
        mine.renew(2, 5)
        mine.add(HITS, 9)
        os.write(said[1], b"x")
        threading.Event().wait()

    born = children(child)
    os.read(said[0], 1)
    born.kill()
    assert Counters(root).read_page(2) == (5, [9, *[0] * 15])
    os.close(said[0])
    os.close(said[1])
