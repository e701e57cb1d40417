"""The history that processes write as they pass: what is in it, and what harms it."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Cache, errors
from forebay._engine.files.root import Root, open_root
from forebay._engine.index import counters as module
from forebay._engine.index.counters import DELAY, EVERY, HITS, HOURS, MINUTES, MISSES, SECOND, Counters, History
from forebay._engine.store import Settings, Store
from tests.clocks import Clocks
from tests.harness import MiB, opened
from tests.processes import in_child

MINUTE = 60 * SECOND


@pytest.fixture
def counters(root: Root) -> Iterator[Counters]:
    counters = Counters(root)
    counters.claim()
    yield counters
    counters.close()


@pytest.fixture
def history(root: Root, counters: Counters) -> History:
    return History(root, counters)


@pytest.fixture
def start() -> int:
    """A moment at the beginning of a minute, as tests count from there."""
    return (time.time_ns() // MINUTE + 1) * MINUTE


def hits(history: History, now: int) -> list[int]:
    return [record.counts[HITS] for record in history.read(MINUTES, now)]


def test_who_passes_writes_what_all_have_counted(root: Root, history: History, counters: Counters, start: int) -> None:
    history.note(start)
    counters.add(HITS, 5)
    other = Counters(root)
    other.add(HITS, 2)
    for minute in range(1, 4):
        counters.add(MISSES)
        history.note(start + minute * MINUTE)
    other.close()
    assert hits(history, start + 4 * MINUTE) == [0, 7, 7, 7]  # the root is young: it began with nothing
    records = history.read(MINUTES, start + 4 * MINUTE)
    assert [record.counts[MISSES] for record in records] == [0, 1, 2, 3]
    assert [record.time - start for record in records[1:]] == [MINUTE, 2 * MINUTE, 3 * MINUTE]


def test_what_is_used_is_told_by_processes_that_write_and_carried_by_others(
    root: Root, history: History, counters: Counters, start: int
) -> None:
    other = History(root, counters)
    for one in (history, other):
        one.note(start)
    history.note(start + MINUTE)
    other.use = lambda: (5, 10)
    other.note(start + MINUTE + 1)  # another has just written the record: it stores what is used all the same
    history.note(start + 2 * MINUTE)
    other.use = lambda: (-1, 10)  # a damaged catalog
    other.note(start + 3 * MINUTE)
    history.note(start + 4 * MINUTE)
    assert [(one.used, one.budget) for one in history.read(MINUTES, start + 5 * MINUTE)] == [(0, 0), (0, 0), (5, 10), (5, 10)]


def test_an_hour_is_one_record(history: History, counters: Counters, start: int) -> None:
    history.note(start)
    first = (start // HOURS.period + 1) * HOURS.period
    for minute in range(1, 120):
        counters.add(HITS)
        history.note(first + minute * MINUTE)
    now = first + 120 * MINUTE
    assert [record.counts[HITS] for record in history.read(HOURS, now)] == [0, 59, 119]
    assert len(history.read(MINUTES, now)) == 120


def test_a_process_writes_nothing_in_its_first_second_and_then_seldom(root: Root, history: History, counters: Counters, start: int) -> None:
    history.note(start)
    history.note(start + DELAY - 1)
    assert not (root.shared_dir / "history").exists()
    history.note(start + DELAY)
    counters.add(HITS)
    other = History(root, counters)
    other.note(start)
    for passed in range(2, 10):
        history.note(start + passed * SECOND)
        other.note(start + passed * SECOND)
    assert hits(history, start + MINUTE)[-1] == 0
    other.note(start + DELAY + EVERY)
    assert hits(history, start + MINUTE)[-1] == 1


def test_a_process_that_leaves_writes_at_once(root: Root, history: History, counters: Counters, start: int) -> None:
    other = History(root, counters)
    for one in (history, other):
        one.note(start)
        one.note(start + DELAY)
    counters.add(HITS, 3)
    other.close(start + DELAY + 1)
    assert hits(history, start + MINUTE)[-1] == 3


def test_a_process_that_never_passed_writes_nothing(root: Root, history: History, start: int) -> None:
    history.close(start)
    assert not (root.shared_dir / "history").exists()


def test_what_is_older_than_the_ring_is_left_out(history: History, counters: Counters, start: int) -> None:
    history.note(start)
    for day in range(3):
        counters.add(HITS)
        history.note(start + MINUTE + day * MINUTES.length * MINUTE)
    last = start + MINUTE + 2 * MINUTES.length * MINUTE
    assert hits(history, last) == [3]
    assert [record.counts[HITS] for record in history.read(HOURS, last)] == [0, 1, 2, 3]


@pytest.mark.parametrize("harm", ["zeros", "noise", "short", "long", "another root's", "pipe", "directory", "gone"])
def test_harm_to_the_file_never_raises_and_the_history_begins_anew(
    harm: str, root: Root, history: History, counters: Counters, start: int, tmp_path: Path
) -> None:
    history.note(start)
    history.note(start + DELAY)
    path = root.shared_dir / "history"
    size = path.stat().st_size
    content = {"zeros": bytes(size), "noise": random.Random(1).randbytes(size), "short": b"", "long": path.read_bytes() + bytes(8)}
    path.unlink()
    if harm in content:
        path.write_bytes(content[harm])
    elif harm == "another root's":
        other = open_root(tmp_path / "other")
        its = History(other, Counters(other))
        its.note(start)
        its.note(start + DELAY)
        shutil.copy(other.shared_dir / "history", path)
    elif harm == "pipe":
        os.mkfifo(path)
    elif harm == "directory":
        path.mkdir()
    assert history.read(MINUTES, start + MINUTE) == []
    counters.add(HITS)
    history.note(start + 2 * MINUTE)
    assert hits(history, start + 3 * MINUTE)[-1] == 1


def test_a_directory_in_its_place_with_files_of_others_stays(root: Root, history: History, start: int) -> None:
    path = root.shared_dir / "history"
    path.mkdir()
    (path / "theirs").write_text("x")
    history.note(start)
    history.note(start + DELAY)
    assert history.read(MINUTES, start + MINUTE) == []
    assert (path / "theirs").read_text() == "x"


def test_a_record_with_any_bit_changed_is_left_out(root: Root, history: History, counters: Counters, start: int) -> None:
    history.note(start)
    for minute in (1, 2):
        counters.add(HITS)
        history.note(start + minute * MINUTE)
    path, place = root.shared_dir / "history", 8 * MINUTES.place(start + MINUTE)
    sound = path.read_bytes()
    for bit in random.Random(2).sample(range(64 * module._PERIOD_WORDS), 40):
        damaged = bytearray(sound)
        damaged[place + bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert hits(history, start + 3 * MINUTE) == [0, 2], bit


def test_a_process_killed_at_any_step_leaves_a_history(root: Root, start: int, kill_at: object) -> None:
    def work() -> None:
        history = History(root, Counters(root))
        history.note(start)
        history.note(start + DELAY)

    step = 0
    while kill_at(step, work):  # type: ignore[operator]
        step += 1
        history = History(root, Counters(root))
        history.note(start + MINUTE)
        history.note(start + 2 * MINUTE)
        assert history.read(MINUTES, start + 3 * MINUTE)
        (root.shared_dir / "history").unlink()
    assert step > 3


# -- in a store --------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pass writes, with no wait before the first one."""
    monkeypatch.setattr(module, "DELAY", 0)
    monkeypatch.setattr(module, "EVERY", 0)


@pytest.fixture
def store(quick_path: Path, at_once: None) -> Iterator[Store]:
    with opened(quick_path / "root", 256 * MiB) as store:
        yield store
        assert store.check() == []


@pytest.mark.usefixtures("at_once")
def test_a_cache_tells_what_was_used(quick_path: Path) -> None:
    """Of the bytes that a process stores last, too, though it then only reads; and after it has left."""
    with Clocks() as clocks:
        with Cache(quick_path / "root", budget="256MiB", min_free=0) as cache:
            cache.put("key", bytes(MiB))
            clocks.step(MINUTE)
            cache.get("key")
            used = cache.stats().bytes_used
            (point,) = cache.history()[-1:]
            assert (point.bytes_used, point.budget) == (used, 256 * MiB)
            cache.put("more", bytes(MiB))
        clocks.step(MINUTE)
        with Cache(quick_path / "root") as cache:
            assert cache.history()[-1].bytes_used == cache.stats().bytes_used >= used + MiB


@pytest.mark.usefixtures("at_once")
def test_a_cache_tells_what_was_done(quick_path: Path) -> None:
    with Clocks() as clocks, Cache(quick_path / "root", budget="256MiB", min_free=0) as cache:
        cache.put("key", b"value")
        clocks.step(MINUTE)
        for _ in range(3):
            assert cache.get("key") is not None
        assert cache.get("other") is None
        clocks.step(MINUTE)
        cache.put("key", b"another value")
        points = cache.history()
        assert [point.end > point.start for point in points] == [True] * len(points)
        assert sum(point.hits for point in points) == 3
        assert sum(point.bytes_hit for point in points) == 15
        cache.reset_stats()
        assert cache.stats().hits == 0
        assert sum(point.hits for point in cache.history()) == 3
        assert sum(point.hits for point in cache.history(by="hour")) <= 3
        with pytest.raises(errors.ConfigError, match="minute"):
            cache.history(by="week")  # type: ignore[arg-type]


def test_a_clock_that_is_set_back_overwrites_nothing(quick_path: Path, at_once: None) -> None:
    with Clocks() as clocks, opened(quick_path / "root", 256 * MiB) as store:
        for _ in range(5):
            store.put("v", "key", b"value")
            clocks.step(MINUTE)
        before = store.seeing.history()
        clocks.step(-3 * MINUTE)
        store.put("v", "key", b"value")
        after = store.seeing.history()
        assert len(after) >= len(before)
        assert [b.end <= c.start for b, c in itertools.pairwise(after)] == [True] * (len(after) - 1)
        assert abs(after[-1].end - time.time()) < 60  # as the wall clock counts now


def test_counters_that_are_lost_count_nothing(quick_path: Path, at_once: None) -> None:
    with Clocks() as clocks, opened(quick_path / "root", 256 * MiB) as store:
        store.put("v", "key", b"value")
        for _ in range(5):
            store.count_hit(10)
            clocks.step(MINUTE)
            store.put("v", "key", b"value")
        store.root.counters.write_bytes(bytes(store.root.counters.stat().st_size))
        clocks.step(MINUTE)
        store.put("v", "key", b"value")
        hits = [period.counts[HITS] for period in store.seeing.history()]
        assert sum(hits) == 5
        assert hits[-1] == min(hits) == 0


def test_a_root_that_is_only_read_has_no_history_of_that(store: Store) -> None:
    for _ in range(2):
        store.put("v", "key", b"value")
    path = store.root.path
    before = (store.root.shared_dir / "history").read_bytes()

    def look() -> int:
        own = Store.open(path, Settings(), read_only=True)
        own.view("v", "key")
        own.view("v", "key")
        return len(own.seeing.history())

    assert in_child(look) >= 0
    assert (store.root.shared_dir / "history").read_bytes() == before


def test_a_forked_child_writes_too(store: Store) -> None:
    store.put("v", "key", b"value")

    def work() -> None:
        store.count_hit(7)
        store.put("v", "child", b"value")
        store.put("v", "child", b"value 2")

    in_child(work)
    store.put("v", "key", b"value 2")
    assert max(record.counts[HITS] for record in store.engine.history.read(MINUTES, store.now(exact=True))) == 1
