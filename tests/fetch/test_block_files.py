"""The file object that reads by blocks: as any other binary file, for the libraries that read one, and ahead of a sequential reader."""

from __future__ import annotations

import asyncio
import errno
import gc
import io
import json
import os
import random
import threading
import zipfile
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import hypothesis
import hypothesis.strategies as st
import pytest

import forebay
from forebay import errors
from forebay.fetch import block_files
from forebay.fetch.block_files import SHARE, BlockFile, ReadAhead
from forebay.fetch.blocks import Blocks
from forebay.fetch.files import LeasedFile
from forebay.testing import ScriptedServer
from tests.items import until
from tests.processes import HANG, in_child

SIZE = 64_000
BODY = os.urandom(SIZE * 7 + 1234)


@pytest.fixture
def url(server: ScriptedServer) -> str:
    return server.put("/a.bin", BODY)


@pytest.fixture
def file(cache: forebay.Cache, url: str) -> Iterator[BinaryIO]:
    with cache.open(url, block_size=SIZE) as file:
        yield file


# -- as a file ----------------------------------------------------------------------------------------------------------


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["read", "readinto", "read1", "readinto1", "peek", "readline"]),
        st.integers(-1, 8 * SIZE),
        st.tuples(st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]), st.integers(-8 * SIZE, 8 * SIZE)),
    ),
    max_size=8,
)


def test_a_line_has_no_more_bytes_than_asked_for_at_the_end_of_a_block(file: BinaryIO) -> None:
    end = next(at for at in range(SIZE, len(BODY), SIZE) if b"\n" not in BODY[at - 3 : at + 3])
    for before in (1, 2, 3):
        file.seek(end - before)
        assert file.readline(3) == BODY[end - before : end - before + 3]
        assert file.tell() == end - before + 3


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(STEPS)
def test_it_reads_as_a_file_in_memory(file: BinaryIO, steps: list[tuple[str, int, tuple[int, int]]]) -> None:
    plain = io.BufferedReader(io.BytesIO(BODY))  # type: ignore[arg-type]
    file.seek(0)
    for call, size, (whence, offset) in steps:
        at = {os.SEEK_SET: 0, os.SEEK_CUR: file.tell(), os.SEEK_END: len(BODY)}[whence] + offset
        if at < 0:
            with pytest.raises(ValueError, match="before the beginning"):
                file.seek(offset, whence)
        else:
            assert file.seek(offset, whence) == at
        at = file.tell()
        plain.seek(at)
        if call in ("readinto", "readinto1"):
            buffer = bytearray(max(size, 0))
            count = getattr(file, call)(buffer)
            assert buffer[:count] == BODY[at : at + count]
            assert count == max(min(len(buffer), len(BODY) - at), 0) or (call == "readinto1" and count > 0)
        elif call in ("peek", "read1"):
            data = getattr(file, call)(size)
            assert BODY[at:].startswith(data)
            assert bool(data) == (at < len(BODY) and (size != 0 or call == "peek"))
            assert file.tell() == at + (len(data) if call == "read1" else 0)
        else:
            assert getattr(file, call)(size) == getattr(plain, call)(size)
            assert file.tell() == plain.tell()


def test_where_the_cached_whole_cannot_be_opened_it_reads_from_the_remote(
    cache: forebay.Cache, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk failed after the entry was found."""
    cache.read(url)

    def fail(file: LeasedFile, lease: forebay.Lease) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(LeasedFile, "__init__", fail)
    with cache.open(url, block_size=SIZE) as file:
        assert file.read() == BODY
    assert cache.stats().fallbacks == 1


def test_it_says_what_it_can_do(file: BinaryIO) -> None:
    assert (file.readable(), file.seekable(), file.writable(), file.isatty()) == (True, True, False, False)
    for refused in (lambda: file.write(b"x"), lambda: file.truncate(), lambda: file.fileno()):
        with pytest.raises(io.UnsupportedOperation):
            refused()
    with pytest.raises(ValueError, match="whence"):
        file.seek(0, 7)
    file.close()
    file.close()
    for closed in (
        lambda: file.read(1),
        lambda: file.tell(),
        lambda: file.seek(0),
        lambda: file.readinto(bytearray(1)),
        lambda: iter(file),
    ):
        with pytest.raises(ValueError, match="closed"):
            closed()


def test_lines_are_read_through_it(cache: forebay.Cache, server: ScriptedServer) -> None:
    lines = [f"line {number} {'x' * (number % 300)}\n" for number in range(2000)]
    url = server.put("/lines.txt", "".join(lines).encode())
    with cache.open(url, block_size=SIZE) as file:
        assert [line.decode() for line in file] == lines
    with cache.open(url, block_size=SIZE) as file, io.TextIOWrapper(file) as text:
        assert text.readlines() == lines


def test_many_small_reads_of_a_block_ask_the_cache_once(cache: forebay.Cache, file: BinaryIO) -> None:
    file.read(1)
    before = cache.stats()
    for at in range(1, 500):
        assert file.read(1) == BODY[at : at + 1]
    assert cache.stats().hits == before.hits


def test_parent_and_child_of_a_fork_have_positions_of_their_own(file: BinaryIO) -> None:
    file.seek(3 * SIZE)
    assert file.read(10) == BODY[3 * SIZE : 3 * SIZE + 10]

    def in_the_child() -> bool:
        rest = file.read()
        file.seek(0)
        return rest == BODY[3 * SIZE + 10 :] and file.read(SIZE) == BODY[:SIZE]

    assert in_child(in_the_child) is True
    assert file.tell() == 3 * SIZE + 10
    assert file.read(10) == BODY[3 * SIZE + 10 : 3 * SIZE + 20]


def test_several_threads_each_with_a_file_of_its_own_read_the_same_object(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    results: list[bool] = []

    def read(seed: int) -> None:
        rng = random.Random(seed)
        with cache.open(url, block_size=SIZE) as file:
            for _ in range(20):
                at = rng.randrange(len(BODY))
                file.seek(at)
                results.append(file.read(2 * SIZE) == BODY[at : at + 2 * SIZE])

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 120
    assert server.sent <= len(BODY)


def test_a_large_read_holds_a_window_of_blocks(cache: forebay.Cache, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_files, "WINDOW", 2 * SIZE)
    with cache.open(url, block_size=SIZE) as file:
        held: list[int] = []
        obtain = Blocks.obtain
        monkeypatch.setattr(Blocks, "obtain", lambda self, numbers: held.append(len(numbers)) or obtain(self, numbers))
        assert file.read() == BODY
        assert max(held) == 2


def test_a_coroutine_opens_it(cache: forebay.Cache, server: ScriptedServer, url: str) -> None:
    async def read() -> bytes:
        with await cache.aopen(url, block_size=SIZE) as file:
            file.seek(2 * SIZE)
            return file.read(10)

    assert asyncio.run(read()) == BODY[2 * SIZE : 2 * SIZE + 10]
    assert server.sent == SIZE
    with pytest.raises(errors.ConfigError, match="block_size"):
        asyncio.run(_refused(cache, url))


async def _refused(cache: forebay.Cache, url: str) -> None:
    await cache.aopen(url, block_size=1)


# -- libraries that read files ------------------------------------------------------------------------------------------


def test_a_member_of_a_zip_file_is_read_without_the_others(cache: forebay.Cache, server: ScriptedServer) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as out:
        for number in range(20):
            out.writestr(f"{number}.bin", random.Random(number).randbytes(SIZE))
    url = server.put("/a.zip", archive.getvalue())
    with cache.open(url, block_size=SIZE) as file, zipfile.ZipFile(file) as members:
        assert members.read("7.bin") == random.Random(7).randbytes(SIZE)
    assert server.sent <= 5 * SIZE


def test_two_neighbouring_columns_of_a_parquet_file_are_fetched_without_the_others(cache: forebay.Cache, server: ScriptedServer) -> None:
    """20 columns of float64, uncompressed; a column chunk of 16 blocks, as one of 8 MB has of 512 KB."""
    pa, pq, np = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet"), pytest.importorskip("numpy")
    rows, groups, columns = 128_000, 2, 20
    rng, out = np.random.default_rng(1), io.BytesIO()
    table = pa.table({f"c{number}": rng.random(rows * groups) for number in range(columns)})
    pq.write_table(table, out, row_group_size=rows, compression="none", use_dictionary=False)
    url, wanted = server.put("/a.parquet", out.getvalue()), 2 * rows * groups * 8
    for options in ({}, {"pre_buffer": False}, {"use_threads": False}):
        with cache.open(url, block_size=SIZE) as file:
            assert pq.read_table(file, columns=["c7", "c8"], **options).equals(table.select(["c7", "c8"]))
        assert server.sent <= 1.3 * wanted
    asked = len(server.requests)
    with cache.open(url, block_size=SIZE) as file:
        assert pq.ParquetFile(file).metadata.num_row_groups == groups
    assert len(server.requests) == asked


def test_an_image_is_read_through_it(cache: forebay.Cache, server: ScriptedServer) -> None:
    image_module, out = pytest.importorskip("PIL.Image"), io.BytesIO()
    image = image_module.frombytes("RGB", (300, 300), random.Random(1).randbytes(270_000))
    image.save(out, "bmp")
    with cache.open(server.put("/a.bmp", out.getvalue()), block_size=SIZE) as file:
        assert image_module.open(file).tobytes() == image.tobytes()


def test_json_is_read_through_it(cache: forebay.Cache, server: ScriptedServer) -> None:
    content = {"numbers": list(range(30_000))}
    with cache.open(server.put("/a.json", json.dumps(content).encode()), block_size=SIZE) as file:
        assert json.load(file) == content


# -- ahead of a sequential reader ---------------------------------------------------------------------------------------

LONG = os.urandom(SIZE * 60)


@pytest.fixture
def long(server: ScriptedServer) -> str:
    return server.put("/long.bin", LONG)


def test_a_sequential_reader_finds_the_next_blocks_fetched(cache: forebay.Cache, server: ScriptedServer, long: str) -> None:
    with cache.open(long, block_size=SIZE) as file:
        for number in range(60):
            assert file.read(SIZE) == LONG[number * SIZE : (number + 1) * SIZE]
            if number == 3:  # the third read in a row is the first that reads ahead
                until(lambda: server.sent >= 5 * SIZE)
                assert cache.stats().misses > number + 1
    until(lambda: cache.stats().fills == 60)
    assert server.sent == len(LONG)


def test_a_reader_that_waits_for_a_block_that_is_read_ahead_has_the_next_one_fetched(
    cache: forebay.Cache, server: ScriptedServer, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that reads ahead begins once the reader is on its way, and has ended before the reader goes on."""
    begin, obtain, fetch = threading.Event(), Blocks.obtain, Blocks.fetch_missing

    def obtain_behind(self: Blocks, numbers: Sequence[int]) -> dict[int, memoryview]:
        begin.set()
        until(lambda: "forebay-ahead" not in {thread.name for thread in threading.enumerate()})
        begin.clear()
        return obtain(self, numbers)

    def fetch_late(self: Blocks, numbers: Sequence[int]) -> Collection[int]:
        begin.wait(HANG)
        return fetch(self, numbers)

    monkeypatch.setattr(Blocks, "obtain", obtain_behind)
    monkeypatch.setattr(Blocks, "fetch_missing", fetch_late)
    with cache.open(long, block_size=SIZE) as file:
        for _ in range(12):
            file.read(SIZE)
        assert isinstance(file, BlockFile)
        assert file._blocks.misses == 3, "the reader finds all others"
        begin.set()


def test_what_is_read_ahead_is_at_most_a_quarter_of_what_was_read(cache: forebay.Cache, server: ScriptedServer, long: str) -> None:
    with cache.open(long, block_size=SIZE) as file:
        for number in range(1, 30):
            file.read(SIZE)
            until(lambda: "forebay-ahead" not in {thread.name for thread in threading.enumerate()})
            assert server.sent <= (number + max(number // SHARE, 1)) * SIZE
        assert isinstance(file, BlockFile)
        assert file._blocks.misses == 3, "the reader finds all others"


def test_a_limit_in_bytes_bounds_what_is_read_ahead(tmp_path: Path, server: ScriptedServer, long: str) -> None:
    """An eighth of the budget: here 3 blocks."""
    with forebay.Cache(tmp_path / "root", budget=8 * 3 * SIZE + SIZE, min_free=0) as cache, cache.open(long, block_size=SIZE) as file:
        for number in range(1, 30):
            file.read(SIZE)
            until(lambda: "forebay-ahead" not in {thread.name for thread in threading.enumerate()})
            assert server.sent <= (number + 3) * SIZE


@pytest.mark.parametrize("reads", [[0, 1], [0, 7, 3, 9, 1, 20], [0, 1, 5, 6, 10, 11]], ids=["two", "random", "pairs"])
def test_other_readers_are_not_read_ahead_of(cache: forebay.Cache, server: ScriptedServer, long: str, reads: list[int]) -> None:
    with cache.open(long, block_size=SIZE) as file:
        for number in reads:
            file.seek(number * SIZE)
            file.read(SIZE)
            assert "forebay-ahead" not in {thread.name for thread in threading.enumerate()}
    assert server.sent == len(reads) * SIZE


def test_a_large_read_is_one_read_and_nothing_behind_it_is_fetched(
    cache: forebay.Cache, server: ScriptedServer, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_files, "WINDOW", 2 * SIZE)
    with cache.open(long, block_size=SIZE) as file:
        file.read(20 * SIZE)
        file.read(20 * SIZE)
        assert "forebay-ahead" not in {thread.name for thread in threading.enumerate()}
    assert server.sent == 40 * SIZE


def test_what_is_cached_is_not_looked_up_ahead(cache: forebay.Cache, long: str) -> None:
    with cache.open(long, block_size=SIZE) as file:
        file.read()
    with cache.open(long, block_size=SIZE) as file:
        for _ in range(60):
            file.read(SIZE)
            assert "forebay-ahead" not in {thread.name for thread in threading.enumerate()}


def test_reading_ahead_ends_with_the_file(cache: forebay.Cache, server: ScriptedServer, long: str) -> None:
    server.objects["/long.bin"].rate = 4e6
    for close in (True, False):
        file = cache.open(long, block_size=SIZE)
        for _ in range(6):
            file.read(SIZE)
        if close:
            file.close()
        del file  # else without a `close`
        gc.collect()
        until(lambda: "forebay-ahead" not in {thread.name for thread in threading.enumerate()})
        cache.evict(long)
    assert server.sent < len(LONG)


def test_a_child_of_a_fork_reads_ahead_by_itself(cache: forebay.Cache, server: ScriptedServer, long: str) -> None:
    with cache.open(long, block_size=SIZE) as file:
        for _ in range(4):
            file.read(SIZE)
        assert isinstance(file, BlockFile)
        until(lambda: "forebay-ahead" not in {thread.name for thread in threading.enumerate()})
        file._ahead._lock.acquire()  # as another thread of the parent may have it in the moment of the fork

        def in_the_child() -> bool:
            same = all(file.read(SIZE) == LONG[number * SIZE : (number + 1) * SIZE] for number in range(4, 60))
            assert isinstance(file, BlockFile)
            return same and bool(file._ahead._end)

        assert in_child(in_the_child) is True
        file._ahead._lock.release()
    assert server.sent == len(LONG)


def test_where_the_cache_has_no_room_nothing_is_read_ahead(
    tmp_path: Path, server: ScriptedServer, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache:
        cache.put("pinned", bytes((8 << 20) - 60_000))
        cache.pin("values:pinned")
        with cache.open(long, block_size=SIZE) as file:
            while file.read(SIZE):
                assert "forebay-ahead" not in {thread.name for thread in threading.enumerate()}
    assert server.sent == len(LONG)


def test_what_is_evicted_before_it_is_read_ends_the_reading_ahead(tmp_path: Path, server: ScriptedServer, long: str) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache, cache.open(long, block_size=SIZE) as file:
        number = 0
        while not (isinstance(file, BlockFile) and file._ahead._fetched):
            assert file.read(SIZE) == LONG[number * SIZE : (number + 1) * SIZE]
            number += 1
            until(lambda: "forebay-ahead" not in {thread.name for thread in threading.enumerate()})
        cache.evict(long)
        for _ in range(10):
            file.read(SIZE)
            assert "forebay-ahead" not in {thread.name for thread in threading.enumerate()}


def test_an_error_ahead_is_raised_where_the_reader_meets_it(
    cache: forebay.Cache, server: ScriptedServer, long: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[object] = []
    run = ReadAhead._run
    monkeypatch.setattr(ReadAhead, "_run", lambda self: (server.put("/long.bin", LONG[::-1]), run(self), met.append(True)))
    with cache.open(long, block_size=SIZE) as file:
        for number in range(3):
            assert file.read(SIZE) == LONG[number * SIZE : (number + 1) * SIZE]
        until(lambda: met)
        with pytest.raises(errors.RemoteChanged):
            file.read(SIZE)
