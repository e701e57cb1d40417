"""Packs: what a reader accepts, who wins a slot, and what damage leads to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

import forebay
from forebay._engine.files import pack_files
from forebay._kernel import fences, host, locks
from tests.harness import KiB, MiB, usage
from tests.processes import Gate, Line, ProcessGroup, fork, in_child, talk_to

SLOTS = 100


def body(slot: int, size: int = 3000) -> bytes:
    return bytes([slot % 256]) * size


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[forebay.Cache]:
    with forebay.Cache(tmp_path / "root", budget=64 * MiB, min_free=0) as cache:
        yield cache


@pytest.fixture
def samples(cache: forebay.Cache) -> Iterator[forebay.Samples]:
    with cache.samples("a", SLOTS) as samples:
        for slot in range(0, SLOTS, 2):
            samples.put(slot, body(slot))
        yield samples


def place_of(cache: forebay.Cache) -> Path:
    (found,) = (cache.path / "packs").iterdir()
    return found


def poke(path: Path, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def word(place: Path, slot: int) -> int:
    with open(place / "index", "rb") as file:
        file.seek(pack_files.PAGE + 8 * slot)
        return int.from_bytes(file.read(8), "little")


# -- records -----------------------------------------------------------------------------------------------------------


@hypothesis.given(st.integers(1, pack_files.MAX_SEGMENT), st.integers(0, (1 << 38) - 1))
def test_a_word_names_one_place(segment: int, sixteenth: int) -> None:
    found = pack_files.word_of(segment, sixteenth * 16)
    assert 0 < found < 1 << 64
    assert pack_files.place_of(found) == (segment, sixteenth * 16)


@hypothesis.given(st.binary(max_size=300), st.integers(0, 1 << 40), st.integers(0, 8 * pack_files.HEADER - 1))
def test_no_flipped_bit_of_a_header_passes(data: bytes, slot: int, bit: int) -> None:
    seed = pack_files.seed_of(12345)
    head = pack_files.header_of(7, seed, slot, (data,), len(data))
    whole = bytearray(bytes(pack_files.START) + head + data)
    assert pack_files.length_of(memoryview(whole), pack_files.START, seed, slot) == len(data)
    assert pack_files.length_of(memoryview(whole), pack_files.START, seed, slot + 1) is None
    assert pack_files.length_of(memoryview(whole), pack_files.START, pack_files.seed_of(12346), slot) is None
    assert pack_files.length_of(memoryview(whole)[:-1], pack_files.START, seed, slot) is None
    whole[pack_files.START + bit // 8] ^= 1 << bit % 8
    assert pack_files.length_of(memoryview(whole), pack_files.START, seed, slot) is None


@hypothesis.given(st.lists(st.binary(max_size=100), min_size=2, max_size=5))
def test_parts_are_one_payload(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    assert pack_files.header_of(7, 1, 2, parts, len(whole)) == pack_files.header_of(7, 1, 2, (whole,), len(whole))


@hypothesis.given(st.integers(0, 1 << 30))
def test_every_payload_begins_at_a_multiple_of_64(length: int) -> None:
    after = pack_files.START + pack_files.footprint(length)
    assert (after + pack_files.HEADER) % pack_files.ALIGN == 0
    assert pack_files.footprint(length) - length < pack_files.HEADER + pack_files.ALIGN


@pytest.mark.parametrize("what", ["boot_id", "mount_number"])
def test_what_another_epoch_wrote_is_compared_with_its_checksum(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """After a crash of the machine the word may be on the disk, and the payload not."""
    with cache.samples("a", SLOTS) as samples:
        for slot in range(3):
            samples.put(slot, body(slot))
    number, offset = pack_files.place_of(word(place_of(cache), 1))
    poke(place_of(cache) / f"{number:08d}", offset + pack_files.HEADER + 10, bytes(100))
    cache.close()
    monkeypatch.setattr(host, what, {"boot_id": lambda: "0" * 36, "mount_number": lambda path: 1}[what])
    with forebay.Cache(cache.path) as again, again.samples("a", SLOTS) as samples:
        assert [samples.get(slot) for slot in range(3)] == [body(0), None, body(2)]
        assert again.stats().damaged == 1
        assert samples.put(1, body(1))


def test_one_repair_counts_a_segment_without_a_row(cache: forebay.Cache, samples: forebay.Samples) -> None:
    """Its samples stay."""
    with cache._store.engine.parts.catalog.write() as txn:  # type: ignore[union-attr]
        txn.run("DELETE FROM segments")
    assert {problem.kind for problem in cache.check()} == {"segment", "total"}
    cache.repair()
    assert cache.check(deep=True) == []
    assert samples.get(2) == body(2)


@pytest.mark.parametrize("lost", ["a segment's growth", "a segment"])
def test_after_a_lost_transaction_no_record_is_overwritten(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The catalog is older than the index and the segments, as after a power cut: its log is not synced."""

    def put(slots: range) -> None:
        with forebay.Cache(cache.path) as cache_now, cache_now.samples("a", SLOTS) as samples:
            assert all(samples.put(slot, body(slot)) for slot in slots)

    with cache.samples("a", SLOTS) as samples:
        if lost == "a segment's growth":
            samples.put(0, body(0))
    cache.close()
    old = (cache.path / "catalog.sqlite").read_bytes()
    put(range(1, 10))
    (cache.path / "catalog.sqlite").write_bytes(old)
    monkeypatch.setattr(host, "mount_number", lambda path: 1)
    with forebay.Cache(cache.path) as reader, reader.samples("a", SLOTS) as found:
        assert [found.get(slot) for slot in range(1, 10)] == [body(slot) for slot in range(1, 10)]
        put(range(10, 20))
        assert [found.get(slot) for slot in range(1, 20)] == [body(slot) for slot in range(1, 20)]
        assert reader.check(deep=True) == []
    with forebay.Cache(cache.path) as again, again.samples("a", SLOTS) as found:
        assert [found.get(slot) for slot in range(1, 20)] == [body(slot) for slot in range(1, 20)]


def test_an_epoch_begins_while_a_writer_of_another_one_lives(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process sees the mount and another does not. What the one has written, and not yet entered in the index, stays; the other leaves
    its segment alone."""
    large = 300 * KiB
    cache.close()

    def write(line: Line) -> None:
        claim = locks.Claims.try_claim

        def claim_later(claims: locks.Claims, slot: int) -> bool:
            if slot == 1:
                line.say("written")
                line.hear()
            return claim(claims, slot)

        monkeypatch.setattr(locks.Claims, "try_claim", claim_later)
        with forebay.Cache(cache.path) as mine, mine.samples("a", SLOTS) as samples:
            for slot in range(3):
                assert samples.put(slot, body(slot, large))
            line.say("went on")
            line.hear()
            assert [samples.get(slot) for slot in range(6)] == [body(slot, large) for slot in range(6)]

    with talk_to(write) as writer:
        assert writer.hear() == "written"
        monkeypatch.setattr(host, "mount_number", lambda path: 1)
        with forebay.Cache(cache.path) as other, other.samples("a", SLOTS) as samples:
            assert samples.put(3, body(3, large))
            writer.say()
            assert writer.hear() == "went on"
            assert all(samples.put(slot, body(slot, large)) for slot in (4, 5))
            assert [samples.get(slot) for slot in range(6)] == [body(slot, large) for slot in range(6)]
            writer.say()
            writer.result()
            assert other.check(deep=True) == []


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forged",
    [
        1,
        1 << 40,
        (1 << 64) - 1,
        pack_files.word_of(1, 1 << 30),
        pack_files.word_of(9, pack_files.START),
        pack_files.word_of(1, 0),
        "of slot 4",
        "within 2",
    ],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_a_forged_word_leads_to_nothing(cache: forebay.Cache, samples: forebay.Samples, forged: int | str, mapped: bool) -> None:
    place = place_of(cache)
    if mapped:
        assert samples.get(2) == body(2)
    if forged == "of slot 4":
        forged = word(place, 4)
    elif forged == "within 2":
        forged = word(place, 2) + 7
    assert isinstance(forged, int)
    poke(place / "index", pack_files.PAGE + 8 * 3, forged.to_bytes(8, "little"))
    assert samples.get(3) is None
    assert samples.put(3, body(3))  # the slot was emptied
    assert [samples.get(slot) for slot in (2, 3, 4)] == [body(2), body(3), body(4)]
    assert cache.check(deep=True) == []


def hints(samples: forebay.Samples) -> memoryview:
    found: memoryview = samples._pack._hints  # type: ignore[union-attr]
    return found


def test_a_record_is_whole_before_its_word_on_every_core(
    cache: forebay.Cache, samples: forebay.Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []

    def look() -> None:
        (segment,) = (path for path in place_of(cache).iterdir() if path.name != "index")
        seen.append((word(place_of(cache), 1), body(1) in segment.read_bytes()))

    with monkeypatch.context() as m:
        m.setattr(fences, "fence", look)
        samples.put(1, body(1))
    assert seen == [(0, True)]


@pytest.mark.parametrize("forged", ["none", "of slot 4", "one byte more", "of another pack", "of another epoch", "beyond the segment"])
def test_a_hint_of_a_length_is_believed_only_where_it_proves_itself(cache: forebay.Cache, samples: forebay.Samples, forged: str) -> None:
    """Slot 2 is read first, so that the segment is mapped: then the hint alone would lead to the bytes."""
    pack, length = samples._pack, len(body(6))
    assert samples.get(2) == body(2)
    right, word_of_6 = hints(samples)[6], word(place_of(cache), 6)
    epoch = cache._store.root.epoch_tag  # type: ignore[union-attr]
    key = pack_files.hint_key(epoch, pack.id)
    hints(samples)[6] = {
        "none": 0,
        "of slot 4": hints(samples)[4],
        "one byte more": right + 1,
        "of another pack": pack_files.length_hint(pack_files.hint_key(epoch, pack.id + 1), word_of_6, length + 1),
        "of another epoch": pack_files.length_hint(key ^ 1 << 40, word_of_6, length + 1),
        "beyond the segment": pack_files.length_hint(key, word_of_6, pack_files.HINTED),
    }[forged]
    assert samples.get(6) == body(6)
    assert hints(samples)[6] == right  # stored again


def test_a_record_that_another_process_wrote_is_read_without_its_header(
    cache: forebay.Cache, samples: forebay.Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_header(*_: object, **__: object) -> None:
        raise AssertionError("a header was read")

    with cache.samples("a", SLOTS) as fresh:
        assert fresh.get(2) == body(2)  # maps the segment
        with monkeypatch.context() as patch:
            patch.setattr(pack_files, "length_of", no_header)
            assert [fresh.get(slot) for slot in (4, 6)] == [body(4), body(6)]
            assert in_child(lambda: bytes(fresh.get(8) or b"")) == body(8)
            assert fresh.get(5) is None


def test_a_sample_that_is_too_long_for_a_hint_is_read_by_its_header(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_files, "HINTED", 99)
    with cache.samples("a", 4) as samples:
        assert samples.put(0, bytes(99))
        assert samples.put(1, bytes(100))
        assert (hints(samples)[0] != 0, hints(samples)[1]) == (True, 0)
        assert [len(samples.get(slot) or b"") for slot in (0, 1)] == [99, 100]


def test_a_torn_word_is_none(cache: forebay.Cache, samples: forebay.Samples) -> None:
    place = place_of(cache)
    for part in range(1, 8):
        poke(place / "index", pack_files.PAGE + 8 * 3, word(place, 2).to_bytes(8, "little")[:part] + bytes(8 - part))
        with cache.samples("a", SLOTS) as fresh:
            assert fresh.get(3) in (None, body(3))


def test_flipped_bytes_are_found_by_verify_and_the_slots_filled_again(cache: forebay.Cache, samples: forebay.Samples) -> None:
    place = place_of(cache)
    for slot in (2, 40):
        number, offset = pack_files.place_of(word(place, slot))
        poke(place / f"{number:08d}", offset + pack_files.HEADER + 5, b"\xff")
    assert [problem.kind for problem in cache.check(deep=True)] == ["samples"]
    assert "2 of its samples" in str(cache.check(deep=True)[0])
    assert samples.verify() == [2, 40]
    assert samples.get(2) is None
    assert samples.put(2, body(2))
    assert samples.get(2) == body(2)
    assert cache.check(deep=True) == []


def test_repair_empties_what_is_damaged(cache: forebay.Cache, samples: forebay.Samples) -> None:
    place = place_of(cache)
    number, offset = pack_files.place_of(word(place, 2))
    poke(place / f"{number:08d}", offset + pack_files.HEADER + 5, b"\xff")
    samples.close()
    assert [problem.kind for problem in cache.repair()] == ["samples"]
    assert cache.check(deep=True) == []
    with cache.samples("a", SLOTS) as again:
        assert (again.get(2), again.get(4)) == (None, body(4))


def test_a_damaged_pickle_is_a_miss(cache: forebay.Cache) -> None:
    with cache.samples("p", 10, codec="pickle") as samples:
        samples.put(1, {"key": "value"})
        place = next(p for p in (cache.path / "packs").iterdir())
        number, offset = pack_files.place_of(word(place, 1))
        poke(place / f"{number:08d}", offset + pack_files.HEADER + 20, b"\xff" * 12)
        assert samples.get(1) is None
        assert samples.get_or_put(1, lambda: {"key": "new"}) == {"key": "new"}
        assert samples.get(1) == {"key": "new"}


def test_a_segment_that_was_cut_short(cache: forebay.Cache, samples: forebay.Samples) -> None:
    place = place_of(cache)
    number, offset = pack_files.place_of(word(place, 20))
    samples.close()
    os.truncate(place / f"{number:08d}", offset + 100)
    with cache.samples("a", SLOTS) as again:
        found = [again.get(slot) for slot in range(0, SLOTS, 2)]
        assert found[:10] == [body(slot) for slot in range(0, 20, 2)]
        assert found[10:] == [None] * 40
        assert again.put(20, body(20))
        assert again.get(20) == body(20)
    assert cache.repair() is not None
    assert cache.check(deep=True) == []


@pytest.mark.parametrize("how", ["cut", "removed", "another's"])
def test_an_index_that_is_none(cache: forebay.Cache, samples: forebay.Samples, how: str) -> None:
    place = place_of(cache)
    samples.close()
    if how == "cut":
        os.truncate(place / "index", 100)
    elif how == "removed":
        (place / "index").unlink()
    else:
        poke(place / "index", 16, b"12345678")
    with cache.samples("a", SLOTS) as again:  # the damaged one is set aside
        assert again.get(2) is None
        assert again.put(2, b"again")
    cache.put("next", b"write")
    assert cache.check(deep=True) == []
    assert len(list((cache.path / "packs").iterdir())) == 1


def test_a_segment_that_is_gone(cache: forebay.Cache, samples: forebay.Samples) -> None:
    samples.close()
    next(place_of(cache).glob("0*")).unlink()
    with cache.samples("a", SLOTS) as again:
        assert all(again.get(slot) is None for slot in range(SLOTS))
        assert again.put(2, body(2))
        assert again.get(2) == body(2)


# -- several at once ---------------------------------------------------------------------------------------------------


def test_of_many_writers_of_one_slot_one_wins(cache: forebay.Cache, children: ProcessGroup) -> None:
    samples, rounds, writers = cache.samples("r", 400), 400, 4
    gates = [Gate() for _ in range(writers)]

    def race(me: int) -> list[bool]:
        gates[me].wait()
        return [samples.put(slot, body(me, 50 + me)) for slot in range(rounds)]

    born = [children(lambda me=me: race(me)) for me in range(writers)]  # type: ignore[misc]
    for gate in gates:
        gate.open()
    won = list(zip(*(child.result() for child in born), strict=True))
    assert all(sum(wins) == 1 for wins in won)
    assert [samples.get(slot) for slot in range(rounds)] == [body(wins.index(True), 50 + wins.index(True)) for wins in won]
    for gate in gates:
        gate.close()


def test_of_many_threads_one_wins(cache: forebay.Cache) -> None:
    samples, won = cache.samples("r", 300), []
    start = threading.Barrier(6)

    def race() -> None:
        start.wait()
        won.append([samples.put(slot, body(slot)) for slot in range(300)])

    threads = [threading.Thread(target=race) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sum(wins) == 1 for wins in zip(*won, strict=True))
    assert all(samples.get(slot) == body(slot) for slot in range(300))
    samples.close()


def test_who_finds_the_slot_taken_does_not_wait(cache: forebay.Cache, children: ProcessGroup) -> None:
    """P1 has the byte of slot 1 and is stopped / P2 puts slot 1: it was not first, and goes on."""
    samples, there = cache.samples("r", 10), Gate()

    def stop_at_the_word() -> None:
        def hook(name: str, subject: str) -> None:
            if name == "set_word" and subject == "1":
                there.open()
                os.kill(os.getpid(), signal.SIGSTOP)

        host.on_step(hook)
        samples.put(1, b"first")

    stopped = children(stop_at_the_word)
    there.wait()
    assert not samples.put(1, b"second")
    assert samples.put(2, b"another")
    assert samples.get(1) is None
    stopped.kill()
    assert samples.put(1, b"second")
    assert samples.get(1) == b"second"
    there.close()


def test_a_fork_while_a_thread_is_in_put(cache: forebay.Cache) -> None:
    samples, inside, go_on = cache.samples("r", 100), threading.Event(), threading.Event()
    samples.put(0, body(0))
    me = threading.main_thread()

    def hook(name: str, subject: str) -> None:
        if name == "pwrite" and threading.current_thread() is not me and not inside.is_set():
            inside.set()
            assert go_on.wait(60)

    host.on_step(hook)
    try:
        thread = threading.Thread(target=lambda: samples.put(1, body(1)))
        thread.start()
        assert inside.wait(60)

        def child() -> tuple[bool, bool, bytes]:
            host.on_step(None)
            return samples.put(2, body(2)), samples.put(1, b"the child's"), bytes(samples.get(0))

        assert in_child(child) == (True, True, body(0))
        go_on.set()
        thread.join()
    finally:
        host.on_step(None)
    assert samples.get(1) == b"the child's"
    assert samples.get(2) == body(2)
    assert samples.put(3, body(3))
    samples.close()
    assert cache.check(deep=True) == []


def test_both_sides_of_a_fork_go_on(cache: forebay.Cache) -> None:
    samples = cache.samples("r", 1000)
    for slot in range(100):
        samples.put(slot, body(slot))
    samples.get(5)

    def child() -> int:
        stored = sum(samples.put(slot, body(slot)) for slot in range(100, 300))
        assert all(samples.get(slot) == body(slot) for slot in range(300))
        samples.close()
        return stored

    born = fork(child)
    assert all(samples.put(slot, body(slot)) for slot in range(300, 500))
    assert born.result() == 200
    assert all(samples.get(slot) == body(slot) for slot in range(500))
    samples.close()
    assert cache.check(deep=True) == []


CLOSES_ALL = """
import os, sys, forebay
with forebay.Cache(sys.argv[1], budget=64_000_000) as cache:
    cache.put("value", bytes(100))
    samples = cache.samples("r", 10)
    samples.put(0, b"0" * 3000)
    os.closerange(3, 4096)
    files = [os.open(f"{sys.argv[1]}-job-{i}", os.O_RDWR | os.O_CREAT) for i in range(40)]
    assert samples.put(1, b"1" * 3000) and samples.put(2, b"2" * 3000)
    assert [samples.get(i)[:1] for i in range(3)] == [b"0", b"1", b"2"]
    samples.close()
print([os.pread(fd, 10, 0) for fd in files if os.fstat(fd).st_size])
"""


def test_a_job_that_closes_all_descriptors(tmp_path: Path) -> None:
    """What is written later does not go into the files that the job opens then: neither ours nor SQLite's, which has numbers of its own."""
    done = subprocess.run([sys.executable, "-c", CLOSES_ALL, str(tmp_path / "root")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
    assert all((tmp_path / f"root-job-{i}").stat().st_size == 0 for i in range(40))
    with forebay.Cache(tmp_path / "root") as cache:
        assert cache.check(deep=True) == []


def test_a_window_that_grows(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Views from before stay good, and what is known stays true."""
    monkeypatch.setattr("forebay._engine.packs.segments.FIRST_WINDOW", MiB)
    samples = cache.samples("w", 100)
    views = []
    for slot in range(100):
        assert samples.put(slot, body(slot, 300 * KiB))
        views.append(samples.get(slot))
    assert all(view == body(slot, 300 * KiB) for slot, view in enumerate(views))
    assert all(samples.get(slot) == body(slot, 300 * KiB) for slot in range(100))
    samples.close()
    assert views[0] == body(0, 300 * KiB)


def test_many_small_samples_take_few_files(cache: forebay.Cache) -> None:
    with cache.samples("s", 20_000) as samples:
        assert all(samples.put(slot, body(slot, 1000)) for slot in range(20_000))
    assert len(list((cache.path / "packs").rglob("*"))) < 40
    assert cache.check() == []


def test_who_comes_second_between_the_look_and_the_store(cache: forebay.Cache, children: ProcessGroup) -> None:
    """P1 sees slot 1 empty, and is stopped before it writes / P2 fills it / P1 goes on: it was second."""
    samples, there = cache.samples("r", 10), Gate()

    def first_to_look() -> bool:
        samples.put(0, b"zero")

        def hook(name: str, subject: str) -> None:
            if name == "pwrite":
                host.on_step(None)
                there.open()
                os.kill(os.getpid(), signal.SIGSTOP)

        host.on_step(hook)
        return samples.put(1, b"first to look")

    stopped = children(first_to_look)
    there.wait()
    os.waitid(os.P_PID, stopped.pid, os.WSTOPPED | os.WNOWAIT)
    assert samples.put(1, b"first to store")
    stopped.signal(signal.SIGCONT)
    assert stopped.result() is False
    assert samples.get(1) == b"first to store"
    there.close()


def test_two_handles_of_a_process_append_apart(cache: forebay.Cache) -> None:
    """A segment that a living handle appends to is nobody else's, in this process either."""
    one, two = cache.samples("r", 200), cache.samples("r", 200)
    for slot in range(0, 200, 2):
        assert one.put(slot, body(slot, 500))
        assert two.put(slot + 1, body(slot + 1, 700))
    assert [one.get(slot) for slot in range(200)] == [body(slot, 700 if slot % 2 else 500) for slot in range(200)]
    assert one.verify() == two.verify() == []


def test_no_byte_is_taken_that_is_not_counted(cache: forebay.Cache) -> None:
    """Whenever the disk is about to be given a segment's blocks, the catalog counts them already."""
    samples, seen = cache.samples("r", 100), []

    def hook(name: str, subject: str) -> None:
        if name == "allocate":
            seen.append(cache.stats().bytes_used - usage(cache.path / "packs"))

    host.on_step(hook)
    try:
        samples.put(0, body(0, 100 * KiB))
    finally:
        host.on_step(None)
    assert len(seen) == 1
    assert seen[0] >= 100 * KiB


def test_an_array_whose_tail_cannot_be_given_back_is_let_go_all_the_same(cache: forebay.Cache) -> None:
    samples = cache.samples("r", 10)
    samples.put(0, body(0))

    def hook(name: str, subject: str) -> None:
        if name == "punch":
            raise OSError(5, "the disk failed")

    host.on_step(hook)
    try:
        samples.close()
    finally:
        host.on_step(None)
    assert samples.closed
    assert cache.evict("samples:r").removed == ("samples:r",)
    assert cache.check(deep=True) == []


def test_a_signal_ends_the_write_of_a_large_sample(
    cache: forebay.Cache, samples: forebay.Samples, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    large, pwrite, pwritev, written = body(1, 3 * 64 * KiB), host.pwrite, host.pwritev, list[int]()

    def struck(fd: int, data: Any, *rest: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        written.append(memoryview(data).nbytes if not isinstance(data, tuple) else rest[0])
        (pwritev if isinstance(data, tuple) else pwrite)(fd, data, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(host, "SLICE", 64 * KiB, raising=False)
        patch.setattr(host, "pwrite", struck)
        patch.setattr(host, "pwritev", struck)
        with pytest.raises(KeyboardInterrupt):
            samples.put(1, large)
    assert sum(written) <= 64 * KiB
    assert 1 not in samples
    with monkeypatch.context() as patch:
        patch.setattr(host, "SLICE", 64 * KiB)
        assert samples.put(1, large)
    assert samples.get(1) == large
    assert samples.get(0) == body(0)
    assert cache.check(deep=True) == []
