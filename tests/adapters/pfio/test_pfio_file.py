"""PFIO's file: what the real package wrote is read, what is written here the real package reads, and no record leads outside."""

from __future__ import annotations

import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import errors
from forebay.adapters.pfio.file import EMPTY, RECORD, PfioFile

SLOTS = {0: b"first", 2: b"", 3: bytes(range(256)) * 100, 7: b"x"}
Edit = Callable[[bytearray], object]


def written(path: Path, slots: dict[int, bytes], length: int) -> Path:
    index, offset = bytearray(EMPTY * length), RECORD.size * length
    for i, data in slots.items():
        RECORD.pack_into(index, RECORD.size * i, offset, len(data))
        offset += len(data)
    path.write_bytes(index + b"".join(slots.values()))
    return path


def content(file: PfioFile) -> dict[int, bytes]:
    return {i: bytes(file.get(i) or b"") for i in file}


@pytest.mark.parametrize("length", [None, 8, 3])
def test_what_was_written_is_read(tmp_path: Path, length: int | None) -> None:
    file = PfioFile(written(tmp_path / "a", SLOTS, 8), length)
    assert len(file) == (length or 8)
    assert content(file) == {i: data for i, data in SLOTS.items() if i < len(file)}
    assert file.get(1) is None
    for i in (-1, len(file)):
        with pytest.raises(IndexError):
            file.get(i)


def test_a_file_without_data_is_all_index(tmp_path: Path) -> None:
    file = PfioFile(written(tmp_path / "a", {}, 5))
    assert len(file) == 5
    assert list(file) == []


@pytest.mark.keeps("PFIO itself leaves a descriptor open")
@pytest.mark.parametrize("kind", ["FileCache", "MultiprocessFileCache"])
def test_what_the_real_pfio_preserved_is_read(tmp_path: Path, kind: str) -> None:
    real = pytest.importorskip("pfio.cache")
    cache = getattr(real, kind)(8, dir=str(tmp_path))
    for i in random.sample(sorted(SLOTS), len(SLOTS)):
        cache.put(i, SLOTS[i])
    cache.preserve("kept")
    cache.close()
    for length in (None, 8):
        assert content(PfioFile(tmp_path / "kept", length)) == SLOTS


@pytest.mark.keeps("PFIO itself leaves a descriptor open")
def test_the_real_pfio_reads_what_is_written_here(tmp_path: Path) -> None:
    real = pytest.importorskip("pfio.cache")
    written(tmp_path / "some", SLOTS, 8)
    whole = written(tmp_path / "whole", dict(enumerate([b"a", b"bc", b"def"])), 3).name
    for kind in (real.FileCache, real.MultiprocessFileCache):
        with kind(8, dir=str(tmp_path)) as cache:
            assert cache.preload("some")
            assert [cache.get(i) for i in range(8)] == [SLOTS.get(i) for i in range(8)]
    with real.ReadOnlyFileCache(3, dir=str(tmp_path)) as cache:
        assert cache.preload(whole)
        assert [cache.get(i) for i in range(3)] == [b"a", b"bc", b"def"]


def test_a_view_stays_when_the_name_is_gone(tmp_path: Path) -> None:
    path = written(tmp_path / "a", SLOTS, 8)
    view = PfioFile(path).get(3)
    path.unlink()
    assert view == SLOTS[3]
    assert view is not None
    assert view.readonly


def test_a_pfio_file_is_pickled_as_its_path(tmp_path: Path) -> None:
    file = pickle.loads(pickle.dumps(PfioFile(written(tmp_path / "a", SLOTS, 8), 4)))
    assert len(file) == 4
    assert content(file) == {i: SLOTS[i] for i in (0, 2, 3)}


def test_another_length_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has 8 slots, but 9 were requested"):
        PfioFile(written(tmp_path / "a", SLOTS, 8), 9)
    with pytest.raises(ValueError, match="has 5 slots, but 6 were requested"):
        PfioFile(written(tmp_path / "b", {}, 5), 6)


@pytest.mark.parametrize("content", [b"", b"short", b"a text that is long enough to be taken for an index, if one looks at nothing"])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a"
    path.write_bytes(content)
    for length in (None, 1):
        with pytest.raises((errors.Damaged, errors.ConfigError)):
            found = PfioFile(path, length)
            found.get(0)
    with pytest.raises(FileNotFoundError):
        PfioFile(tmp_path / "none")


def record(i: int, offset: int, length: int) -> Edit:
    return lambda data: struct.pack_into("Qq", data, 16 * i, offset, length)


@pytest.mark.parametrize(
    "edit",
    [
        record(3, 128, 1 << 40),
        record(3, (1 << 64) - 1, 1),
        record(3, (1 << 63) + 5, (1 << 63) - 1),
        record(3, 1 << 40, 0),
        lambda data: data.__delitem__(slice(-100, None)),
    ],
    ids=["long", "far", "huge", "beyond", "cut"],
)
@pytest.mark.parametrize("length", [None, 8])
def test_no_record_leads_outside(tmp_path: Path, edit: Edit, length: int | None) -> None:
    path = written(tmp_path / "a", {0: b"first", 3: bytes(1000)}, 8)
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)
    file = PfioFile(path, length)
    assert file.get(0) == b"first"
    assert file.incomplete() == 1
    with pytest.raises(errors.Damaged):
        file.get(3)


@pytest.mark.parametrize("edit", [record(3, 5, 10), record(3, 16, 10), record(7, 32, 1), lambda data: data.__delitem__(slice(70, None))])
@pytest.mark.parametrize("length", [None, 8])
def test_no_record_leads_into_the_index(tmp_path: Path, edit: Edit, length: int | None) -> None:
    path = written(tmp_path / "a", {0: b"first", 3: bytes(1000)}, 8)
    data = bytearray(path.read_bytes())
    edit(data)
    path.write_bytes(data)
    with pytest.raises((errors.Damaged, errors.ConfigError)):
        PfioFile(path, length)


def test_whatever_bytes_a_file_has_no_view_leaves_it(tmp_path: Path) -> None:
    random.seed(4)
    path = tmp_path / "a"
    for _ in range(300):
        data = bytearray(written(path, SLOTS, 8).read_bytes())
        for _ in range(random.randrange(1, 4)):
            at = random.randrange(0, 128, 8)
            struct.pack_into(
                "q", data, at, random.choice([-1, 0, 1, 16, 128, 1 << 14, len(data), (1 << 63) - 1, random.randrange(1 << 15)])
            )
        path.write_bytes(data[: random.choice([len(data), random.randrange(len(data))])])
        for length in (None, 1, 8):
            try:
                file = PfioFile(path, length)
            except (errors.Damaged, errors.ConfigError):
                continue
            for i in range(len(file)):
                try:
                    view = file.get(i)
                except errors.Damaged:
                    continue
                offset, size = struct.unpack_from("Qq", path.read_bytes(), 16 * i)
                assert view is None or (
                    view.nbytes == size and view == path.read_bytes()[offset : offset + size] and offset >= 16 * len(file)
                )


def test_no_descriptor_is_kept(tmp_path: Path) -> None:
    path = written(tmp_path / "a", SLOTS, 8)
    before = len(os.listdir("/proc/self/fd"))
    files = [PfioFile(path) for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == before
    del files
