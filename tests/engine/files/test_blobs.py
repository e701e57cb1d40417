from __future__ import annotations

import os
from pathlib import Path

import pytest

from forebay._engine.files import blobs
from forebay._engine.files.root import Root
from forebay._model import Entry
from forebay.errors import Damaged

ID = 0xABC1
MIB = 1 << 20


def stored(root: Root, content: bytes, id: int = ID, suffix: str = ".bin") -> Entry:
    staged = root.tmp(1, id)
    staged.write_bytes(content)
    blobs.publish(root, staged, id, suffix)
    return Entry(id, "urls", "http://h/x", "blob", len(content), 0, 0, blobs.checksum_of(content), None, 0.0, "", "cached", suffix)


def test_a_published_blob_is_mapped(root: Root) -> None:
    entry = stored(root, b"some bytes")
    view, _ = blobs.map_blob(root, entry)
    assert bytes(view) == b"some bytes"
    assert view.readonly
    assert os.listdir(root.tmp_dir) == []


def test_a_mapping_outlives_its_file(root: Root) -> None:
    view, _ = blobs.map_blob(root, stored(root, b"some bytes"))
    assert blobs.remove_blob(root, ID, ".bin")
    assert not blobs.remove_blob(root, ID, ".bin")
    assert bytes(view) == b"some bytes"


def test_a_mapping_holds_no_descriptor(root: Root) -> None:
    entry = stored(root, b"some bytes")
    before = os.listdir("/proc/self/fd")
    views = [blobs.map_blob(root, entry)[0] for _ in range(10)]
    assert len(os.listdir("/proc/self/fd")) == len(before)
    assert len(views) == 10


def test_an_empty_blob_is_an_empty_view(root: Root) -> None:
    assert bytes(blobs.map_blob(root, stored(root, b""))[0]) == b""


@pytest.mark.parametrize("copies", [False, True])
def test_a_blob_of_another_size_is_damaged(root: Root, copies: bool) -> None:
    entry = stored(root, b"some bytes")
    for size in (9, 11):
        with pytest.raises(Damaged, match=f"10 bytes, {size} were stored") as caught:
            blobs.map_blob(root, entry._replace(size=size), copies=copies)
        assert caught.value.key == entry.key


def test_a_copy_is_apart_from_the_file(root: Root) -> None:
    entry = stored(root, b"some bytes")
    view, _ = blobs.map_blob(root, entry, copies=True)
    root.blob(ID, ".bin").write_bytes(b"other byte")
    assert view == b"some bytes"
    assert view.readonly


def test_a_blob_that_is_cut_while_it_is_copied_is_damaged(root: Root, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = stored(root, b"some bytes")
    fstat = os.fstat

    def cut_behind(fd: int) -> os.stat_result:
        status = fstat(fd)
        os.truncate(root.blob(ID, ".bin"), 4)
        return status

    with monkeypatch.context() as patched, pytest.raises(Damaged, match="4 bytes, 10 were stored"):
        patched.setattr(os, "fstat", cut_behind)
        blobs.map_blob(root, entry, copies=True)


def test_a_blob_that_is_gone_is_not_found(root: Root) -> None:
    entry = stored(root, b"some bytes")
    blobs.remove_blob(root, ID, ".bin")
    with pytest.raises(FileNotFoundError):
        blobs.map_blob(root, entry)


def test_a_link_in_a_blobs_place_is_not_followed(root: Root, tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"some bytes")
    entry = stored(root, b"some bytes")
    path = root.blob(ID, ".bin")
    path.unlink()
    path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic"):
        blobs.map_blob(root, entry)
    assert blobs.remove_blob(root, ID, ".bin")
    assert (tmp_path / "precious").exists()


def test_a_directory_in_a_blobs_place_is_damage(root: Root) -> None:
    root.blob(ID).mkdir()
    with pytest.raises(Damaged):
        blobs.open_blob(root, ID)


def test_a_publication_can_be_taken_back(root: Root) -> None:
    stored(root, b"some bytes")
    blobs.unpublish(root, root.tmp(1, ID), ID, ".bin")
    assert root.tmp(1, ID).read_bytes() == b"some bytes"
    assert not root.blob(ID, ".bin").exists()


def test_a_blob_can_have_a_second_name(root: Root) -> None:
    stored(root, b"some bytes")
    blobs.link_blob(root, root.blob_name(ID, ".bin"), 5)
    assert root.blob(5).samefile(root.blob(ID, ".bin"))
    with pytest.raises(FileNotFoundError):
        blobs.link_blob(root, root.blob_name(77), 6)


def test_a_flipped_bit_and_a_lost_byte_are_found(root: Root) -> None:
    content = bytes(9 * MIB)
    entry = stored(root, content)
    path = root.blob(ID, ".bin")
    assert blobs.verify_blob(root, path, entry.size, entry.checksum)
    with path.open("r+b") as file:
        file.seek(8 * MIB + 5)
        file.write(b"\1")
    assert not blobs.verify_blob(root, path, entry.size, entry.checksum)
    path.write_bytes(content[:-1])
    assert not blobs.verify_blob(root, path, entry.size, entry.checksum)
