from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash

from forebay._engine.files import stages
from forebay._engine.files.blobs import CHUNK, checksum_of
from forebay._engine.files.root import Root, open_root, parse_tmp_name
from forebay._engine.files.stages import Stage
from forebay._kernel import host, interrupts
from forebay._model import Buffer, Partial, Span
from forebay.errors import CacheFault, NoSpace
from tests.conftest import descriptors

KEY, ID = 2**62 - 5, 0xABC
MIB = 1 << 20
DATA = random.Random(1).randbytes(19 * MIB + 12_345)  # no whole number of chunks or blocks


def pieces(spans: tuple[Span, ...], size: int = 300_000) -> list[tuple[int, bytes]]:
    return [(at, DATA[at : min(at + size, span.end)]) for span in spans for at in range(span.start, span.end, size)]


def files(root: Root) -> set[str]:
    return {suffix for _, _, suffix in filter(None, map(parse_tmp_name, os.listdir(root.tmp_dir)))}


def marked(root: Root) -> list[int]:
    """The chunks that the map calls written."""
    content = root.tmp(KEY, ID, ".map").read_bytes()
    count = -(-int.from_bytes(content[16:24], "little") // CHUNK)
    return [chunk for chunk, mark in enumerate(content[512 : 512 + count]) if mark]


def check_marks(root: Root) -> None:
    """No marked chunk may differ from what was to be written."""
    content = root.tmp(KEY, ID).read_bytes()
    for chunk in marked(root):
        is_right = DATA.startswith(content[chunk * CHUNK : (chunk + 1) * CHUNK], chunk * CHUNK)
        assert is_right, chunk  # pytest would compare the bytes for longer than a test may take


@pytest.fixture
def stage(root: Root) -> Iterator[Stage]:
    stage = Stage.create(root, KEY, ID)
    yield stage
    stage.close()


def test_what_was_written_is_what_lies_there(root: Root, stage: Stage) -> None:
    assert stage.begin(len(DATA), '"etag"') == (Span(0, len(DATA)),)
    for at, piece in pieces(stage.missing()):
        stage.write(at, piece)
    assert stage.finish() == (len(DATA), checksum_of(DATA))
    assert root.tmp(KEY, ID).read_bytes() == DATA
    assert stat.S_IMODE(root.tmp(KEY, ID).stat().st_mode) == 0o444
    assert files(root) == {"", ".map"}


@pytest.mark.parametrize("size", [0, 1, 1000, MIB, MIB + 1, 8 * MIB])
def test_any_size_is_written(root: Root, stage: Stage, size: int) -> None:
    stage.begin(size, '"etag"')
    assert files(root) == ({"", ".map"} if size > MIB else {""})
    for at, piece in pieces(stage.missing()):
        stage.write(at, piece)
    assert stage.finish() == (size, checksum_of(DATA[:size]))
    assert root.tmp(KEY, ID).read_bytes() == DATA[:size]


@pytest.mark.parametrize("seed", range(4))
def test_order_does_not_change_the_checksum(root: Root, stage: Stage, seed: int) -> None:
    stage.begin(len(DATA), '"etag"')
    some = pieces(stage.missing())
    random.Random(seed).shuffle(some)
    for at, piece in some:
        stage.write(at, piece)
    assert stage.finish() == (len(DATA), checksum_of(DATA))


@pytest.mark.parametrize("part", [MIB, 8 * MIB])
def test_threads_write_their_spans_at_once(root: Root, stage: Stage, part: int) -> None:
    stage.begin(len(DATA), '"etag"')
    spans = [Span(at, min(part, len(DATA) - at)) for at in range(0, len(DATA), part)]
    gate = threading.Barrier(4)

    def write(mine: list[Span]) -> None:
        gate.wait()
        for at, piece in pieces(tuple(mine), 100_000):
            stage.write(at, piece)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [spans[n::4] for n in range(4)]))
    assert stage.done == len(DATA)
    assert stage.finish() == (len(DATA), checksum_of(DATA))
    assert root.tmp(KEY, ID).read_bytes() == DATA


def test_bytes_may_come_again(root: Root, stage: Stage) -> None:
    stage.begin(len(DATA), '"etag"')
    for at, piece in pieces(stage.missing()):
        stage.write(at, piece)
        if at % 7 == 0:
            stage.write(at, piece[:1000])
    assert stage.finish() == (len(DATA), checksum_of(DATA))


def test_bytes_that_come_again_do_not_mark_a_chunk_early(root: Root, stage: Stage) -> None:
    stage.begin(len(DATA), '"etag"')
    for _ in range(5):
        stage.write(0, DATA[: MIB // 2])
    assert (marked(root), stage.done) == ([], MIB // 2)
    stage.write(MIB // 2, DATA[MIB // 2 : 2 * MIB])
    assert marked(root) == [0, 1]


def test_every_way_to_cut_and_shuffle_marks_what_is_there(root: Root, stage: Stage) -> None:
    cuts = list(itertools.pairwise([0, MIB // 3, MIB, MIB + 5, 2 * MIB + 7, 3 * MIB]))
    for order in itertools.permutations(cuts):
        stage.begin(3 * MIB, '"etag"')
        for count, (start, end) in enumerate(order, 1):
            stage.write(start, DATA[start:end])
            lacking = order[count:]
            assert marked(root) == [n for n in range(3) if not any(a < (n + 1) * MIB and b > n * MIB for a, b in lacking)]
            assert sum(span.length for span in stage.missing()) == sum(b - a for a, b in lacking)
    stage.close()


def test_a_missing_byte_forbids_to_finish(root: Root, stage: Stage) -> None:
    stage.begin(len(DATA), '"etag"')
    for at, piece in pieces(stage.missing()):
        stage.write(at, piece[:-1] if at == 600_000 else piece)
    with pytest.raises(CacheFault, match=r"1 of .* bytes are missing"):
        stage.finish()
    stage.write(899_999, DATA[899_999:900_000])
    assert stage.finish() == (len(DATA), checksum_of(DATA))


def test_a_byte_too_many_is_refused(stage: Stage) -> None:
    stage.begin(100)
    with pytest.raises(ValueError, match="101"):
        stage.write(90, b"x" * 11)


def test_an_object_that_changed_begins_anew(root: Root, stage: Stage) -> None:
    stage.begin(5 * MIB, '"old"')
    stage.write(0, bytes(5 * MIB))
    assert stage.begin(len(DATA), '"new"') == (Span(0, len(DATA)),)
    assert (stage.done, marked(root)) == (0, [])
    for at, piece in pieces(stage.missing()):
        stage.write(at, piece)
    assert stage.finish() == (len(DATA), checksum_of(DATA))


def test_an_object_that_became_shorter_leaves_no_tail(root: Root, stage: Stage) -> None:
    stage.begin(5 * MIB, '"old"')
    stage.write(0, bytes(5 * MIB))
    stage.begin(10, '"new"')
    stage.write(0, DATA[:10])
    assert stage.finish() == (10, checksum_of(DATA[:10]))
    assert root.tmp(KEY, ID).read_bytes() == DATA[:10]


def test_an_unknown_size_grows_by_steps_that_were_granted(root: Root, stage: Stage) -> None:
    granted: list[int] = []
    assert stage.begin(None, on_grow=granted.append) == (Span(0, -1),)
    for at, piece in pieces((Span(0, len(DATA)),)):
        stage.write(at, piece)
        assert granted[-1] >= root.tmp(KEY, ID).stat().st_size
    assert len(granted) < 20
    assert stages.progress_of(root, KEY, ID) == (len(DATA), None)
    assert stage.finish() == (len(DATA), checksum_of(DATA))


def test_a_growth_that_finds_no_ample_room_takes_what_it_needs(stage: Stage) -> None:
    def little(size: int) -> None:
        if size > 3 * MIB:
            raise NoSpace.of("key", size, 0, 3 * MIB)

    stage.begin(None, on_grow=little)
    stage.write(0, bytes(2 * MIB))
    stage.write(2 * MIB, bytes(MIB))
    with pytest.raises(NoSpace):
        stage.write(3 * MIB, b"x")
    assert stage.finish()[0] == 3 * MIB


def test_what_was_left_is_gone_on_from(root: Root, stage: Stage) -> None:
    stage.begin(len(DATA), '"etag"')
    stage.write(2 * MIB + 5, DATA[2 * MIB + 5 : 7 * MIB])
    stage.write(18 * MIB, DATA[18 * MIB :])
    stage.close()
    successor = Stage.resume(root, KEY, ID)
    assert successor
    missing = (Span(0, 3 * MIB), Span(7 * MIB, 11 * MIB))
    assert successor.partial == Partial(len(DATA), '"etag"', missing)
    assert successor.begin(len(DATA), '"etag"') == missing
    assert successor.done == len(DATA) - 14 * MIB
    for at, piece in pieces(missing):
        successor.write(at, piece)
    assert successor.finish() == (len(DATA), checksum_of(DATA))
    assert root.tmp(KEY, ID).read_bytes() == DATA


@pytest.mark.parametrize("size", [300_000, MIB, 5 * MIB])
@pytest.mark.parametrize("harm", ["a flipped bit", "zeros", "a lost sum"])
def test_what_rotted_in_a_partial_is_fetched_again(
    root: Root, stage: Stage, size: int, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Power, or the disk, took some of it: its checksum would be over the wrong bytes, and nobody would ever see it."""
    stage.begin(len(DATA), '"etag"')
    for at, piece in pieces((Span(0, 10 * MIB), Span(18 * MIB, len(DATA) - 18 * MIB)), size):
        stage.write(at, piece)
    stage.close()
    suffix, at = (".map", 512 + 20 + 16 * 4) if harm == "a lost sum" else ("", 4 * MIB + 77)
    with open(root.tmp(KEY, ID, suffix), "r+b") as file:
        file.seek(at)
        before = file.read(16)
        file.seek(at)
        file.write(bytes(16) if harm == "zeros" else bytes([before[0] ^ 1]))
    successor = Stage.resume(root, KEY, ID)
    assert successor
    assert successor.partial is not None
    assert successor.partial.missing == (Span(4 * MIB, MIB), Span(10 * MIB, 8 * MIB))
    assert "1 chunks of what was left there are damaged" in caplog.text
    missing = successor.begin(len(DATA), '"etag"')
    for start, piece in pieces(missing):
        successor.write(start, piece)
    assert successor.finish() == (len(DATA), checksum_of(DATA))
    assert root.tmp(KEY, ID).read_bytes() == DATA


@pytest.mark.parametrize(("total", "validator"), [(len(DATA), '"other"'), (len(DATA) - 1, '"etag"'), (None, None), (len(DATA), None)])
def test_nothing_is_gone_on_from_when_the_object_is_another(root: Root, stage: Stage, total: int | None, validator: str | None) -> None:
    stage.begin(len(DATA), '"etag"')
    stage.write(0, bytes(5 * MIB))
    stage.close()
    successor = Stage.resume(root, KEY, ID)
    assert successor
    assert successor.partial
    assert successor.begin(total, validator) == (Span(0, -1 if total is None else total),)
    assert successor.done == 0
    successor.close()


HARMS = (
    "no validator", "long validator", "reboot", "no map", "short map", "other root", "scribbled", "short file", "bad mark",
    "a link", "no text", "large map",
)  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_nothing_is_gone_on_from_that_cannot_be_trusted(root: Root, stage: Stage, monkeypatch: pytest.MonkeyPatch, harm: str) -> None:
    stage.begin(len(DATA), {"no validator": None, "long validator": "x" * 600}.get(harm, '"etag"'))
    stage.write(0, DATA[: 5 * MIB])
    stage.close()
    path = root.tmp(KEY, ID, ".map")
    if harm == "reboot":
        monkeypatch.setattr(root, "epoch", "0" * 36)
    elif harm == "no map":
        path.unlink()
    elif harm == "short map":
        path.write_bytes(path.read_bytes()[:-1])
    elif harm == "short file":
        os.truncate(root.tmp(KEY, ID), 6 * MIB)
    elif harm == "a link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif harm == "no text":
        content = bytearray(path.read_bytes())
        end = content.index(b'"etag"') + 6
        content[end - 6 : end] = bytes([0xFF]) * 6
        content[end : end + 8] = xxhash.xxh3_64_digest(bytes(content[:end]))
        path.write_bytes(content)
    elif harm == "large map":
        os.truncate(path, 8 << 40)  # a hole: it takes no disk, and must take no memory
    elif harm in ("other root", "scribbled", "bad mark"):
        content = bytearray(path.read_bytes())
        content[{"other root": 8, "scribbled": 70, "bad mark": 515}[harm]] ^= 0x40
        path.write_bytes(content)
    successor = Stage.resume(root, KEY, ID)
    assert successor
    assert successor.partial is None
    assert successor.begin(len(DATA), '"etag"') == (Span(0, len(DATA)),)
    for at, piece in pieces(successor.missing()):
        successor.write(at, piece)
    assert successor.finish() == (len(DATA), checksum_of(DATA))


@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
@pytest.mark.parametrize("at", ["the bytes", "the map"])
def test_what_cannot_be_read_is_begun_anew_and_leaves_nothing_open(
    root: Root, stage: Stage, monkeypatch: pytest.MonkeyPatch, at: str, number: int
) -> None:
    stage.begin(len(DATA), '"etag"')
    stage.write(0, DATA[: 5 * MIB])
    stage.close()
    pread = os.pread

    def failing(fd: int, length: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{fd}").endswith(".map") == (at == "the map"):
            raise OSError(number, os.strerror(number))
        return pread(fd, length, offset)

    monkeypatch.setattr(os, "pread", failing)
    if number == errno.EMFILE:  # that says nothing of the partial
        with pytest.raises(OSError, match="Too many open files"):
            Stage.resume(root, KEY, ID)
        assert files(root) == {"", ".map"}
    else:
        assert Stage.resume(root, KEY, ID) is None
        assert files(root) == set()
    assert descriptors(root.path) == set()


def test_nothing_is_gone_on_from_where_nothing_is(root: Root) -> None:
    assert Stage.resume(root, KEY, ID) is None
    root.tmp(KEY, ID).symlink_to("/etc/passwd")
    assert Stage.resume(root, KEY, ID) is None


@pytest.mark.parametrize("seed", range(12))
def test_a_kill_at_a_random_moment_leaves_a_true_map(root: Root, children: Callable[..., object], seed: int) -> None:
    rng, said = random.Random(seed), os.pipe()

    def write() -> None:
        mine = Stage.create(root, KEY, ID)
        some = pieces(mine.begin(len(DATA), '"etag"'), rng.choice([30_000, 400_000]))
        rng.shuffle(some)

        def put(mine_of_it: list[tuple[int, bytes]]) -> None:
            for at, piece in mine_of_it:
                os.write(said[1], b"x")
                mine.write(at, piece)

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(put, [some[n::3] for n in range(3)]))
        os.write(said[1], b"." * 1000)
        threading.Event().wait()

    child = children(write)
    for _ in range(rng.randrange(1, 60)):
        os.read(said[0], rng.randrange(1, 10))
    child.kill()
    os.close(said[0])
    os.close(said[1])
    check_marks(root)
    successor = Stage.resume(root, KEY, ID)
    assert successor
    for at, piece in pieces(successor.begin(len(DATA), '"etag"')):
        successor.write(at, piece)
    assert successor.finish() == (len(DATA), checksum_of(DATA))


def test_a_kill_at_any_step_can_be_gone_on_from(root: Root, kill_at: Callable[..., bool]) -> None:
    size, step, kept = 3 * MIB + 5, 0, 0

    def write() -> None:
        mine = Stage.create(root, KEY, ID)
        for at, piece in pieces(mine.begin(size, '"etag"'), MIB // 2):
            mine.write(at, piece)
        mine.finish()

    while kill_at(step, write):
        successor = Stage.resume(root, KEY, ID)
        if successor is None:
            successor = Stage.create(root, KEY, ID)
        if successor.partial:
            check_marks(root)
            kept = max(kept, len(marked(root)))
        for at, piece in pieces(successor.begin(size, '"etag"')):
            successor.write(at, piece)
        assert successor.finish() == (size, checksum_of(DATA[:size])), step
        assert files(root) == {"", ".map"}
        assert stages.remove_partial(root, KEY, ID)
        step += 1
    assert kept == 4, "a writer killed between its last byte and its last step leaves all of it"
    assert step > 14


@pytest.mark.root
def test_a_finished_but_unpublished_write_is_gone_on_from_by_a_user_whom_modes_bind(
    public_path: Path, children: Callable[..., object], as_user: Callable[[int, int], None]
) -> None:
    public_path.chmod(0o777)

    def other() -> None:
        as_user(4242, 4242)
        root = open_root(public_path / "root" / "of" / "theirs")
        mine = Stage.create(root, KEY, ID)
        mine.begin(2 * MIB, '"etag"')
        mine.write(0, DATA[: 2 * MIB])
        os.chmod(mine.path, 0o444)  # as `finish` leaves it before it removes the map
        mine.close()
        successor = Stage.resume(root, KEY, ID)
        assert successor
        assert successor.partial
        assert successor.begin(2 * MIB, '"etag"') == ()
        assert successor.finish() == (2 * MIB, checksum_of(DATA[: 2 * MIB]))

    assert children(other).wait() == 0


def test_progress_is_seen_by_others(root: Root, stage: Stage, children: Callable[..., object]) -> None:
    stage.begin(len(DATA), None)
    stage.write(0, DATA[: 5 * MIB + 7])
    seen: list[object] = [(5 * MIB, len(DATA))]

    def look() -> None:
        assert [stages.progress_of(root, KEY, ID)] == seen

    assert children(look).wait() == 0
    stage.discard()
    assert stages.progress_of(root, KEY, ID) is None


@pytest.mark.parametrize("at", ["create", "allocate", "pwrite"])
def test_a_full_disk_is_told_and_leaves_nothing_after_discard(root: Root, at: str) -> None:
    def full(name: str, subject: str) -> None:
        if name == at:
            raise OSError(28, "No space left on device")

    host.on_step(full)
    with pytest.raises(OSError, match="No space"):
        stage = Stage.create(root, KEY, ID)
        try:
            stage.begin(len(DATA), '"etag"')
            stage.write(0, DATA)
        except OSError:
            stage.discard()
            raise
    assert files(root) == set()


def test_a_write_takes_no_more_disk_than_its_footprint(root: Root, stage: Stage) -> None:
    block = host.disk(root.path).block
    for size in (0, 1, MIB, MIB + 1, len(DATA)):
        stage.begin(size, '"etag"')
        stage.write(0, DATA[:size])
        assert sum(path.stat().st_blocks * 512 for path in root.tmp_dir.iterdir()) <= stages.footprint(size, block)


def test_nothing_is_left_open(root: Root, stage: Stage) -> None:
    stage.discard()
    before = len(os.listdir("/proc/self/fd"))
    for end in ("finish", "close", "discard"):
        stage = Stage.create(root, KEY, ID)
        stage.begin(2 * MIB, '"etag"')
        stage.write(0, bytes(2 * MIB))
        getattr(stage, end)()
        stage.close()
        stage.discard()
        with pytest.raises(CacheFault, match="closed"):
            stage.write(0, b"x")
    assert len(os.listdir("/proc/self/fd")) == before
    assert files(root) == set()


def test_a_close_waits_for_the_writes_that_are_under_way(root: Root, stage: Stage) -> None:
    stage.begin(len(DATA), '"etag"')
    writing, go_on, closed = threading.Event(), threading.Event(), threading.Event()

    def slow(name: str, subject: str) -> None:
        if name == "pwrite":
            writing.set()
            go_on.wait()

    host.on_step(slow)
    writer = threading.Thread(target=stage.write, args=(0, DATA[:CHUNK]))
    writer.start()
    writing.wait()
    closer = threading.Thread(target=lambda: (stage.close(), closed.set()))
    closer.start()
    while stage._fd is not None:  # the closer is at its wait now, or about to be
        threading.Event().wait(0.001)
    with pytest.raises(CacheFault, match="closed"):
        stage.write(CHUNK, b"x")
    assert not closed.is_set()
    go_on.set()
    writer.join()
    closer.join()
    assert marked(root) == [0]


@pytest.mark.root
def test_a_disk_that_is_really_full_is_told(tmp_path: Path) -> None:
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", place], capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        root = open_root(place)
        free = host.disk(place).free
        stage = Stage.create(root, KEY, ID)
        with pytest.raises(OSError, match="No space"):
            stage.begin(len(DATA), '"etag"')
        stage.discard()
        stage = Stage.create(root, KEY, ID)
        stage.begin(None)
        with pytest.raises(OSError, match="No space"):
            stage.write(0, DATA)
        stage.discard()
        assert host.disk(place).free == free
        assert os.listdir(root.tmp_dir) == []
    finally:
        subprocess.run(["umount", "-l", place], check=True)


def test_s09_a_file_that_somebody_may_have_mapped_is_not_cut(root: Root) -> None:
    """Where locks exclude nobody, another may have published this very file: what is begun anew is a new one."""
    stage = Stage.create(root, KEY, ID)
    stage.begin(10)
    stage.write(0, b"0123456789")
    with open(stage.path, "rb") as published:
        stage.begin(4)
        stage.write(0, b"anew")
        assert published.read() == b"0123456789"
    assert stage.finish()[0] == 4
    assert stage.path.read_bytes() == b"anew"


def test_a_signal_ends_the_write_of_one_large_piece(root: Root, stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    size, pwrite, written = 3 * CHUNK, host.pwrite, list[int]()

    def struck(fd: int, data: Buffer, offset: int) -> None:
        signal.raise_signal(signal.SIGINT)
        written.append(memoryview(data).nbytes)
        pwrite(fd, data, offset)

    stage.begin(size)
    monkeypatch.setattr(host, "SLICE", CHUNK, raising=False)
    monkeypatch.setattr(host, "pwrite", struck)
    with pytest.raises(KeyboardInterrupt):
        interrupts.guarded(stage.write)(0, bytes(size))
    assert written == [CHUNK]
    monkeypatch.undo()
    assert stage.missing() == (Span(CHUNK, size - CHUNK),)
    stage.write(CHUNK, bytes(size - CHUNK))
    assert stage.finish() == (size, checksum_of(bytes(size)))
