"""A local file that is kept shares its blocks with the source, where the file system can."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay._kernel import host

MiB = 1 << 20
BODY = os.urandom(9 * MiB + 321)


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    """A file system that can share blocks."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    if shutil.which("mkfs.xfs", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
        pytest.skip("mkfs.xfs is not there: `make deps` installs it")
    image, place = tmp_path / "image", tmp_path / "xfs"
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(300 * MiB)  # the smallest that xfs takes
    for command in (["/usr/sbin/mkfs.xfs", "-q", "-m", "reflink=1", image], ["mount", "-o", "loop", image, place]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no xfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_the_blocks_of_one_file_of_many_are_shared(xfs: Path) -> None:
    """It is small enough to be collected in memory, and too large to be copied for nothing."""
    (xfs / "source.bin").write_bytes(BODY[: MiB - 5])
    steps: list[str] = []
    with forebay.Cache(xfs / "root", budget="64MiB", min_free=0) as cache:
        host.on_step(lambda call, subject: steps.append(call))
        try:
            kept = cache.local_many([xfs / "source.bin"], force=True)
        finally:
            host.on_step(None)
        assert "clone" in steps
        with kept as paths:
            assert Path(paths[0]).read_bytes() == BODY[: MiB - 5]
        assert cache.check(deep=True) == []


def test_the_blocks_are_shared(xfs: Path) -> None:
    source = xfs / "source.bin"
    source.write_bytes(BODY)
    os.sync()
    steps: list[str] = []
    with forebay.Cache(xfs / "root", budget="64MiB", min_free=0) as cache:
        free = os.statvfs(xfs).f_bfree
        host.on_step(lambda call, subject: steps.append(call))
        try:
            kept = cache.local(source, force=True)
        finally:
            host.on_step(None)
        assert "clone" in steps
        assert Path(kept).read_bytes() == BODY
        assert (free - os.statvfs(xfs).f_bfree) * os.statvfs(xfs).f_bsize < 4 * MiB
        source.write_bytes(b"changed" * 1000)
        assert Path(kept).read_bytes() == BODY
        kept.close()
        assert cache.check(deep=True) == []


def copy_all(source: int, target: int) -> bool:
    os.pwrite(target, os.pread(source, os.fstat(source).st_size, 0), 0)
    return True


@pytest.fixture
def cloning(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int], bool]], None]:
    """Let `host.clone` do this."""
    return lambda clone: monkeypatch.setattr(host, "clone", clone)


@pytest.mark.parametrize("size", [0, 100, MiB, MiB + 1, len(BODY)])
def test_what_was_cloned_is_checked_like_what_was_written(tmp_path: Path, cloning: Callable[..., None], size: int) -> None:
    cloning(copy_all)
    source = tmp_path / "source.bin"
    source.write_bytes(BODY[:size])
    with forebay.Cache(tmp_path / "root", budget="64MiB", min_free=0) as cache:
        assert cache.read(source, force=True) == BODY[:size]
        assert cache.check(deep=True) == []


def test_a_source_that_changes_meanwhile_is_told(tmp_path: Path, cloning: Callable[..., None]) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(BODY)

    def clone(fd: int, target: int) -> bool:
        copy_all(fd, target)
        source.write_bytes(BODY[: 4 * MiB])
        return True

    cloning(clone)
    with forebay.Cache(tmp_path / "root", budget="64MiB", min_free=0) as cache:
        with pytest.raises(errors.RemoteChanged):
            cache.local(source, force=True)
        assert cache.check(deep=True) == []
        cloning(copy_all)
        with cache.local(source, force=True) as kept:
            assert Path(kept).read_bytes() == BODY[: 4 * MiB]


def test_where_it_cannot_be_shared_it_is_copied(tmp_path: Path, cloning: Callable[..., None]) -> None:
    cloning(lambda source, target: False)
    source = tmp_path / "source.bin"
    source.write_bytes(BODY)
    with forebay.Cache(tmp_path / "root", budget="64MiB", min_free=0) as cache:
        assert cache.read(source, force=True) == BODY
        assert cache.check(deep=True) == []


def test_the_files_of_a_directory_are_shared(tmp_path: Path, cloning: Callable[..., None]) -> None:
    cloned: list[str] = []

    def clone(source: int, target: int) -> bool:
        cloned.append(os.path.basename(os.readlink(f"/proc/self/fd/{source}")))
        return copy_all(source, target)

    cloning(clone)
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(name.encode() + BODY)
    with forebay.Cache(tmp_path / "root", budget="64MiB", min_free=0) as cache:
        with cache.directory(folder, force=True) as kept:
            assert {path.name: path.read_bytes() for path in Path(kept).iterdir()} == {
                "a.bin": b"a.bin" + BODY,
                "b.bin": b"b.bin" + BODY,
            }
        assert sorted(cloned) == ["a.bin", "b.bin"]
        assert cache.check(deep=True) == []
