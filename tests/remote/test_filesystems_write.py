"""Writing through fsspec and pyarrow: whole files from a path, conditions where there are any, and what is left of a failure."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from forebay import errors
from forebay.remote.filesystems import FilesystemRemote, pickled
from forebay.remote.filesystems.clients import memory_limits
from forebay.remote.filesystems.helper import InHelper
from tests.processes import fork
from tests.remote.test_filesystems import BODY, OPTIONS, PART, PLACES, Place, fetched, fsspec_dir, pyarrow_local, pyarrow_s3, s3fs_object
from tests.servers.rgw import rgw_server  # noqa: F401 (a fixture)

fsspec = pytest.importorskip("fsspec")

WRITABLE = [make for make in PLACES if make is not pyarrow_s3]
CREATING = {"memory_url", "pyarrow_over_fsspec", "s3fs_object"}


@pytest.fixture(params=WRITABLE, ids=lambda make: make.__name__)
def place(request: pytest.FixtureRequest) -> Place:
    made: Place = request.param(request)
    return made


def names(place: Place) -> list[str]:
    return [info.url.removeprefix(place.base + "/") for info in place.remote.list(place.base + "/") if not info.is_folder]


@pytest.mark.parametrize("size", [0, 1, len(BODY)])
def test_write(place: Place, tmp_path: Path, size: int) -> None:
    (tmp_path / "the source").write_bytes(BODY[:size])
    told: list[int] = []
    for name, source in {"new/er/buffer": memoryview(BODY)[:size], "a file": tmp_path / "the source"}.items():
        written = place.remote.write(f"{place.base}/{name}", source, on_sent=told.append)
        assert fetched(place, name) == BODY[:size]
        assert written == place.remote.stat(f"{place.base}/{name}")
        assert told[-1] == size
    place.remote.write(f"{place.base}/a file", b"another")
    assert fetched(place, "a file") == b"another"


def test_a_path_may_be_relative(place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").write_bytes(b"x")
    monkeypatch.chdir(tmp_path)
    place.remote.write(f"{place.base}/x", "here")
    assert fetched(place, "x") == b"x"


def test_delete(place: Place) -> None:
    place.put("kept", b"1")
    place.put("gone", b"2")
    for _ in range(2):
        place.remote.delete(f"{place.base}/gone")
        assert names(place) == ["kept"]


def test_conditional_writes(request: pytest.FixtureRequest, place: Place) -> None:
    url = f"{place.base}/x"
    if request.node.callspec.params["place"].__name__ in CREATING:
        place.remote.write(url, b"first", if_none_match="*")
        with pytest.raises(errors.Conflict, match="nothing was written"):
            place.remote.write(url, b"second", if_none_match="*")
    else:
        with pytest.raises(errors.Unsupported, match="no way to write only where nothing is"):
            place.remote.write(url, b"first", if_none_match="*")
        assert names(place) == []
        place.put("x", b"first")
    with pytest.raises(errors.Unsupported, match="only over one version") as caught:
        place.remote.write(url, b"second", if_match="1")
    assert isinstance(caught.value, NotImplementedError)
    assert fetched(place, "x") == b"first"


def test_a_source_that_is_not_there(place: Place, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        place.remote.write(f"{place.base}/x", tmp_path / "none")
    assert not isinstance(caught.value, errors.ForebayError)
    assert names(place) == []


class Enough(Exception):
    pass


def test_what_on_sent_raises_ends_the_write(place: Place, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(BODY)
    calls: list[int] = []

    def stop(done: int) -> None:
        calls.append(done)
        raise Enough

    with pytest.raises(Enough):
        place.remote.write(f"{place.base}/x", tmp_path / "source", on_sent=stop)
    assert len(calls) == 1


def test_pyarrow_leaves_no_half_of_a_file(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = pyarrow_local(request)
    (tmp_path / "source").write_bytes(bytes(3 << 20))

    def stop(done: int) -> None:
        assert done < 3 << 20
        raise Enough

    with pytest.raises(Enough):
        place.remote.write(f"{place.base}/out/x", tmp_path / "source", on_sent=stop)
    assert os.listdir(tmp_path / "out") == []


def test_a_file_that_grows_while_it_is_written(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = pyarrow_local(request)
    (tmp_path / "source").write_bytes(bytes(2 << 20))
    with pytest.raises(errors.SourceChanged, match="source changed while"):
        place.remote.write(f"{place.base}/out/x", tmp_path / "source", on_sent=lambda _: os.truncate(tmp_path / "source", 5 << 20))


# -- in the helper process -------------------------------------------------------------------------------------------


def in_the_helper(filesystem: Any) -> FilesystemRemote:
    made = FilesystemRemote(filesystem, OPTIONS)
    made._fixed = InHelper(pickled(filesystem))
    return made


def test_through_the_helper_from_parent_and_child(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    local = fsspec_dir(request)
    remote = in_the_helper(fsspec.filesystem("dir", path=str(tmp_path), fs=fsspec.filesystem("file")))
    (tmp_path / "source").write_bytes(BODY)

    def write(name: str) -> int:
        told: list[int] = []
        remote.write(f"x/{name}", tmp_path / "source", on_sent=told.append)
        remote.write(f"x/{name}.small", b"small", on_sent=told.append)
        remote.delete(f"x/{name}.small")
        return max(told)

    assert write("parent") == len(BODY)
    child = fork(lambda: write("child"))
    assert child.result() == len(BODY)
    assert names(local) == ["child", "parent"]
    assert fetched(local, "child") == BODY
    with pytest.raises(errors.Unsupported, match="only where nothing is"):
        remote.write("x/new", b"", if_none_match="*")


@pytest.mark.processes
def test_a_write_that_is_given_up_ends_in_the_helper(tmp_path: Path) -> None:
    """It copies from a pipe that never ends, until the channel tells that nobody wants it any more."""
    arrow = pytest.importorskip("pyarrow.fs")
    remote = in_the_helper(arrow.LocalFileSystem())
    (tmp_path / "source").write_bytes(random.Random(2).randbytes(64 << 20))
    seen = threading.Event()

    def stop(done: int) -> None:
        seen.set()
        raise Enough

    with pytest.raises(Enough):
        remote.write(f"{tmp_path}/out/x", tmp_path / "source", on_sent=stop)
    assert seen.is_set()
    remote.write(f"{tmp_path}/out/y", b"y")  # the helper goes on
    assert (tmp_path / "out" / "y").read_bytes() == b"y"


def test_s3fs_has_little_of_a_file_in_memory(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    place = s3fs_object(request)
    (tmp_path / "source").write_bytes(BODY * 13)  # 17 MB, which s3fs would read whole
    told: list[int] = []
    place.remote.write(f"{place.base}/x", tmp_path / "source", on_sent=told.append)
    assert fetched(place, "x") == BODY * 13
    assert len(set(told)) > 2


def test_the_chunks_of_a_file_are_no_more_than_a_server_takes() -> None:
    s3fs = pytest.importorskip("s3fs").S3FileSystem(anon=True)
    for size in (0, 1 << 20, 1 << 40):
        told = memory_limits(fsspec.filesystem("dir", path="bucket", fs=s3fs), size)
        assert told["chunksize"] % (256 << 10) == 0
        assert size / told["chunksize"] <= 10_000
    assert memory_limits(fsspec.filesystem("memory"), 1) == {}


@pytest.mark.processes
def test_pyarrow_on_ceph_is_told_plainly(request: pytest.FixtureRequest) -> None:
    place = pyarrow_s3(request)
    with pytest.raises(errors.Unsupported, match="s3:// URL") as caught:
        place.remote.write(f"{place.base}/x", b"x" * PART)
    assert "testsecret" not in str(caught.value)
