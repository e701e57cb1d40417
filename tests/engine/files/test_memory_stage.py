"""A small write in memory: bytes come in any order, and all of them must."""

from __future__ import annotations

import os

import pytest

from forebay import errors
from forebay._engine.files.blobs import checksum_of
from forebay._engine.files.stages import MemoryStage

BODY = os.urandom(10_000)


@pytest.mark.parametrize("pieces", [[(0, 10_000)], [(5_000, 10_000), (0, 5_000)], [(0, 6_000), (4_000, 10_000)]])
def test_bytes_come_in_any_order(pieces: list[tuple[int, int]]) -> None:
    stage = MemoryStage(len(BODY))
    for start, end in pieces:
        stage.write(start, memoryview(BODY)[start:end])
    assert stage.done == len(BODY)
    assert stage.finish() == (len(BODY), checksum_of(BODY))
    assert stage.data == BODY


@pytest.mark.parametrize("piece", [(0, 9_999), (1, 10_000), (0, 0)])
def test_a_missing_byte_forbids_to_finish(piece: tuple[int, int]) -> None:
    stage = MemoryStage(len(BODY))
    stage.write(piece[0], BODY[piece[0] : piece[1]])
    with pytest.raises(errors.CacheFault, match="are missing"):
        stage.finish()


def test_bytes_beyond_the_end_are_refused() -> None:
    stage = MemoryStage(10)
    with pytest.raises(ValueError, match="11 of 10"):
        stage.write(5, b"123456")
    assert stage.done == 0
    assert len(stage.data) <= 10


def test_nothing_is_a_whole_too() -> None:
    assert MemoryStage(0).finish() == (0, checksum_of(b""))


def test_a_whole_that_cannot_change_is_taken_as_it_is() -> None:
    data = b"0123456789"
    stage = MemoryStage(10)
    stage.write(0, data)
    assert stage.data is data
    stage.write(2, b"xy")  # the object is sent again, in parts
    assert stage.finish() == (10, checksum_of(b"01xy456789"))
    assert data == b"0123456789"


def test_what_pyarrow_read_from_a_filesystem_in_python_is_taken_as_it_is() -> None:
    arrow = pytest.importorskip("pyarrow")
    data = memoryview(arrow.py_buffer(b"0123456789")).cast("B")
    stage = MemoryStage(10)
    stage.write(0, data)
    assert stage.data is data
    assert stage.finish() == (10, checksum_of(b"0123456789"))


def test_a_view_that_cannot_write_may_still_change() -> None:
    arrow = pytest.importorskip("pyarrow")
    for data in (bytearray(b"0123456789"), arrow.py_buffer(bytearray(b"0123456789"))):
        stage = MemoryStage(10)
        stage.write(0, memoryview(data).cast("B").toreadonly())
        memoryview(data).cast("B")[0] = 0
        assert stage.finish() == (10, checksum_of(b"0123456789"))


def test_a_whole_that_may_change_is_copied() -> None:
    data = bytearray(b"0123456789")
    stage = MemoryStage(10)
    stage.write(0, data)
    data[0] = 0
    assert bytes(stage.data) == b"0123456789"
