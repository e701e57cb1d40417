"""Who appends to which segment of an array: one writer each, after the last record, and no number twice."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay._engine.files import pack_files
from forebay._kernel import host
from tests.harness import KiB, MiB, assert_counted, usage
from tests.processes import Line, in_child, talk_to

SLOTS, BUDGET = 100, 64 * MiB


def body(slot: int, size: int = 3000) -> bytes:
    return bytes([slot % 256]) * size


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def cache(place: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(place, budget=BUDGET, min_free=0) as cache:
        yield cache


def put(place: Path, *slots: int) -> None:
    """In a process of its own."""

    def work() -> None:
        with forebay.Cache(place) as cache, cache.samples("a", SLOTS) as samples:
            assert all(samples.put(slot, body(slot)) for slot in slots)

    in_child(work)


def put_and_wait(place: Path, *slots: int) -> Line:
    """A process that has put these, and appends still."""

    def work(line: Line) -> None:
        with forebay.Cache(place) as cache, cache.samples("a", SLOTS) as samples:
            assert all(samples.put(slot, body(slot)) for slot in slots)
            line.say("there")
            while (slot := line.hear()) is not None:
                line.say(samples.put(slot, body(slot)))

    child = talk_to(work)
    assert child.hear() == "there"
    return child


def pack_of(place: Path) -> Path:
    (found,) = (place / "packs").iterdir()
    return found


def where(place: Path, slot: int) -> tuple[int, int]:
    """The segment and the offset of a sample."""
    data = (pack_of(place) / "index").read_bytes()
    return pack_files.place_of(int.from_bytes(data[pack_files.PAGE + 8 * slot :][:8], "little"))


def segment(place: Path, number: int) -> Path:
    return pack_of(place) / f"{number:08d}"


def poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def assert_whole(cache: forebay.Cache, *slots: int) -> None:
    with cache.samples("a", SLOTS) as samples:
        assert [samples.get(slot) for slot in range(SLOTS)] == [body(slot) if slot in slots else None for slot in range(SLOTS)]
        assert samples.verify() == []
    assert_counted(cache.path, BUDGET)


def test_the_next_writer_appends_to_the_segment_of_one_that_left(place: Path, cache: forebay.Cache) -> None:
    put(place, 0, 1)
    put(place, 2)
    put(place, 3, 4)
    assert {where(place, slot)[0] for slot in range(5)} == {1}
    assert_whole(cache, 0, 1, 2, 3, 4)
    assert cache.check(deep=True) == []


def test_the_next_writer_appends_to_the_segment_of_one_that_was_killed(place: Path, cache: forebay.Cache) -> None:
    writer = put_and_wait(place, 0, 1)
    writer.kill()
    put(place, 2)
    assert {where(place, slot)[0] for slot in range(3)} == {1}
    assert_whole(cache, 0, 1, 2)
    assert cache.check(deep=True) == []


def test_a_segment_whose_writer_lives_is_nobody_elses(place: Path, cache: forebay.Cache) -> None:
    """Nor is it measured: a process that stands still appends as soon as it goes on."""
    with put_and_wait(place, 0) as writer, cache.samples("a", SLOTS) as samples:
        writer.signal(signal.SIGSTOP)
        put(place, 1)
        assert samples.put(2, body(2))
        writer.signal(signal.SIGCONT)
        writer.say(3)
        assert writer.hear()
        put(place, 4)
        writer.say(5)
        assert writer.hear()
        writer.say()
        writer.result()
    numbers = [where(place, slot)[0] for slot in range(6)]
    assert numbers[0] == numbers[3] == numbers[5]
    assert numbers[0] not in (numbers[1], numbers[2], numbers[4])
    assert_whole(cache, *range(6))
    assert cache.check(deep=True) == []


def test_a_forked_child_appends_to_a_segment_of_its_own_also_after_its_parent(place: Path, cache: forebay.Cache) -> None:
    def parent(line: Line) -> None:
        with forebay.Cache(place) as mine, mine.samples("a", SLOTS) as samples:
            samples.put(0, body(0))

            def child(line: Line) -> None:
                while (slot := line.hear()) is not None:
                    line.say(samples.put(slot, body(slot)))

            with talk_to(child) as born:
                while (slot := line.hear()) is not None:
                    born.say(slot)
                    line.say(born.hear())
                born.say()
                born.result()

    with talk_to(parent) as one:
        one.say(1)
        assert one.hear()
        put(place, 2)
        one.say(3)
        assert one.hear()
        one.say()
        one.result()
    assert where(place, 0)[0] != where(place, 1)[0] == where(place, 3)[0]
    assert_whole(cache, 0, 1, 2, 3)
    assert cache.check(deep=True) == []


LOSES_ITS_LOCK = """
import os, subprocess, sys, forebay
def body(slot): return bytes([slot]) * 3000
with forebay.Cache(sys.argv[1]) as cache:
    samples = cache.samples("a", 100)
    samples.put(0, body(0))
    os.closerange(512, 4096)  # where the segment is open, and not the catalog
    code = "import sys; sys.path[:0] = " + repr(sys.path) + "\\n" + sys.argv[2]
    subprocess.run([sys.executable, "-c", code, sys.argv[1]], check=True)
    if sys.argv[3] == "goes on":
        assert samples.put(2, body(2))
    samples.close()
"""
TAKES_THE_SEGMENT = """
import sys, forebay
with forebay.Cache(sys.argv[1]) as cache, cache.samples("a", 100) as samples:
    assert samples.put(1, bytes([1]) * 3000)
"""


@pytest.mark.parametrize("then", ["goes on", "closes"])
def test_a_writer_whose_job_closed_its_descriptors_leaves_its_segment_to_others(place: Path, cache: forebay.Cache, then: str) -> None:
    script = [sys.executable, "-c", LOSES_ITS_LOCK, str(place), TAKES_THE_SEGMENT, then]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert where(place, 0)[0] == where(place, 1)[0]
    assert_whole(cache, 0, 1, *([2] if then == "goes on" else []))
    assert cache.check(deep=True) == []


@pytest.mark.parametrize("epoch", ["the same epoch", "another epoch"])
def test_no_number_is_given_twice(place: Path, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, epoch: str) -> None:
    """Neither the row nor the file nor a word has the number any more; a process that mapped the segment is here still."""
    put(place, 0)
    with cache.samples("a", SLOTS) as samples:
        assert samples.get(0) == body(0)  # maps segment 1
        number, offset = where(place, 0)
        poke(segment(place, number), offset, bytes(pack_files.HEADER))
        assert samples.verify() == [0]
        with cache._store.engine.parts.catalog.write() as txn:  # type: ignore[union-attr]
            txn.run("DELETE FROM segments")
        segment(place, number).unlink()
        if epoch == "another epoch":
            monkeypatch.setattr(host, "mount_number", lambda path: 1)
        put(place, 1, 0)
        assert {where(place, 0)[0], where(place, 1)[0]} == {number + 1}
        assert [samples.get(slot) for slot in (0, 1)] == [body(0), body(1)]


@pytest.mark.parametrize("epoch", ["the same epoch", "another epoch"])
def test_nothing_is_appended_behind_a_record_that_was_lost(
    place: Path, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, epoch: str
) -> None:
    """The word of the last record is on the disk, and the record is not."""
    put(place, 0, 1, 2)
    number, offset = where(place, 2)
    poke(segment(place, number), offset, bytes(pack_files.HEADER + 3000))
    if epoch == "another epoch":
        monkeypatch.setattr(host, "mount_number", lambda path: 1)
    put(place, 3)
    assert where(place, 3)[0] == number + 1
    with forebay.Cache(place) as again:
        with again.samples("a", SLOTS) as samples:
            assert samples.verify() == [2]
        put(place, 2)
        assert_whole(again, 0, 1, 2, 3)
        assert again.check(deep=True) == []


@pytest.mark.parametrize("epoch", ["the same epoch", "another epoch"])
@pytest.mark.parametrize("old", ["before the segment", "before it grew"])
def test_segments_are_counted_by_their_files_once_the_catalog_is_older(
    place: Path, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, old: str, epoch: str
) -> None:
    """After a power cut, or where somebody has restored a copy."""
    with cache.samples("a", SLOTS) as samples:
        if old == "before it grew":
            samples.put(0, body(0))
    cache.close()  # the last to close it: all is in the catalog's file
    copy = (place / "catalog.sqlite").read_bytes()
    with forebay.Cache(place) as later, later.samples("a", SLOTS) as samples:
        assert all(samples.put(slot, body(slot)) for slot in range(1, 50))
        later.put("takes", b"an id")  # so that the copy is seen to be older
    (place / "catalog.sqlite").write_bytes(copy)
    if epoch == "another epoch":
        monkeypatch.setattr(host, "mount_number", lambda path: 1)
    with forebay.Cache(place) as again:
        again.put("first", b"write")
        with again.samples("a", SLOTS) as samples:
            assert [samples.get(slot) for slot in range(1, 50)] == [body(slot) for slot in range(1, 50)]
        (pack,) = again._store.seeing.entries("samples")
        assert usage(place / "packs") <= pack.charge <= usage(place / "packs") + 64 * KiB
        assert again.check(deep=True) == []
    assert_counted(place, BUDGET)


def test_who_takes_a_segment_that_was_left_does_not_read_the_whole_index(
    place: Path, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_search(*_: object) -> None:
        raise AssertionError("all words were read")

    put(place, 0, 1)
    monkeypatch.setattr(pack_files, "find_ends", no_search)
    put(place, 2)
    monkeypatch.undo()
    assert_whole(cache, 0, 1, 2)


@pytest.mark.parametrize("slot", [0, 1, 2, 3, 50, SLOTS, (1 << 32) - 1])
def test_where_the_records_end_is_not_believed_of_a_hint_that_proves_nothing(place: Path, cache: forebay.Cache, slot: int) -> None:
    """A process has left the segment after slot 0, say, and another one has been stopped before it could say that it left it later."""
    put(place, 0, 1, 2)
    number, _ = where(place, 0)
    epoch = cache._store.root.epoch_tag
    poke(pack_of(place) / "index", 8 * (pack_files._LAST + number), (epoch << 32 | slot).to_bytes(8, "little"))
    put(place, 3)
    assert where(place, 3)[0] == number
    assert_whole(cache, 0, 1, 2, 3)
    assert cache.check(deep=True) == []


def test_where_the_records_end_is_not_believed_of_a_hint_that_leads_to_another_segment(place: Path, cache: forebay.Cache) -> None:
    with put_and_wait(place, 0) as writer:
        put(place, 1, 2)
        writer.say()
        writer.result()
    (number, _), (other, _) = where(place, 1), where(place, 0)
    assert number > other
    epoch = cache._store.root.epoch_tag
    poke(pack_of(place) / "index", 8 * (pack_files._LAST + number), (epoch << 32).to_bytes(8, "little"))
    put(place, 3)
    assert where(place, 3)[0] == number
    assert_whole(cache, 0, 1, 2, 3)


def test_an_array_takes_no_more_entries_than_one(place: Path) -> None:
    with forebay.Cache(place, budget=BUDGET, min_free=0, max_entries=3) as cache, cache.samples("a", 5000) as samples:
        cache.put("x", b"stays")
        cache.put("y", b"stays")
        assert all(samples.put(slot, body(slot)) for slot in range(1000))
        assert len(list(pack_of(place).iterdir())) > 2
        assert "x" in cache
        assert "y" in cache
