"""Roots on file systems that copy blocks that are written to: a btrfs, and an XFS with shared blocks, both real, in images."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forebay
from forebay._engine.files.root import open_root
from forebay._kernel import host
from forebay.errors import RootRefused
from tests.harness import MiB, fill_the_disk
from tests.items import until
from tests.processes import in_child

FULL = """
import forebay, os, sys
root, other = sys.argv[1:]
with forebay.Cache(root, budget=100_000_000, min_free=0) as cache:
    samples = cache.samples("a", length=100, codec="raw", fingerprint="1")
    for number in range(50):
        cache.put(f"small{number}", os.urandom(1000))
        cache.put(f"large{number}", os.urandom(100_000))
        samples.put(number, os.urandom(10_000))
    try:
        with open(other, "wb", buffering=0) as file:
            while True:
                file.write(os.urandom(1 << 16))
    except OSError:
        os.sync()
    found = 0
    for turn in range(2000):
        number = turn % 50
        found += cache.get(f"small{number}") is not None and cache.get(f"large{number}") is not None and samples.get(number) is not None
        cache.put(f"more{turn}", os.urandom(50_000)) if turn % 20 == 0 else None
        samples.put(50 + turn % 50, os.urandom(10_000)) if turn % 20 == 0 else None
        os.sync() if turn % 200 == 0 else None  # else the kernel stores to pages that it has not written back
    print(found > 0)
"""


COPIED = """
import forebay, os, sys
root, other = sys.argv[1:]
with forebay.Cache(root, min_free=0) as cache:
    samples = cache.samples("a", length=10, codec="raw", fingerprint="1")
    for step in (1 << 16, 1 << 12):
        try:
            with open(other + str(step), "wb", buffering=0) as file:
                while True:
                    file.write(bytes(step))
        except OSError:
            os.sync()
    for turn in range(1000):
        found = [cache.get("small"), cache.get("large"), samples.get(3)]
        if turn % 200 == 0:
            os.sync()
    print([len(data) for data in found])
"""


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    with mounted("btrfs", tmp_path) as place:
        yield place


@pytest.fixture
def xfs(tmp_path: Path) -> Iterator[Path]:
    with mounted("xfs", tmp_path) as place:
        yield place


@contextlib.contextmanager
def mounted(kind: str, tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    program = shutil.which(f"mkfs.{kind}", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if program is None:
        pytest.skip(f"mkfs.{kind} is not there: `make deps` installs it")
    image, place = tmp_path / "image", tmp_path / kind
    place.mkdir()
    with open(image, "wb") as file:
        file.truncate(400 * MiB)
    for command in ([program, "-q", image], ["mount", "-o", "loop", image, place]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def in_place(path: Path) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return bool(fcntl.ioctl(fd, 0x80086601, bytes(8))[2] & 0x80)  # FS_NOCOW_FL of FS_IOC_GETFLAGS
    finally:
        os.close(fd)


def mapped(root: Path) -> list[Path]:
    """The files that processes store to by mappings."""
    return [
        root / "counters", root / "catalog.sqlite-shm", root / "locks/words", *(root / "shared").iterdir(), *root.glob("packs/*/index"),
    ]  # fmt: skip


def test_a_full_disk_ends_no_process(btrfs: Path) -> None:
    command = [sys.executable, "-c", FULL, btrfs / "root", btrfs / "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


def fill(cache: forebay.Cache) -> None:
    assert cache.put("small", b"s" * 100)
    assert cache.put("large", b"l" * 100_000)
    assert cache.samples("a", length=10, codec="raw", fingerprint="1").put(3, b"p" * 100)


def assert_whole(cache: forebay.Cache) -> None:
    assert [bytes(cache.get(key) or b"") for key in ("small", "large")] == [b"s" * 100, b"l" * 100_000]
    assert bytes(cache.samples("a", length=10, codec="raw", fingerprint="1").get(3)) == b"p" * 100
    assert cache.check(deep=True) == []


def test_files_that_are_mapped_are_written_in_place_and_no_others(btrfs: Path) -> None:
    with forebay.Cache(btrfs / "root", budget=100 * MiB, min_free=0) as cache:
        fill(cache)
        files = mapped(cache.path)
        assert len(files) > 6
        assert dict.fromkeys(files, True) == {path: in_place(path) for path in files}
        blobs = [path for path in cache.path.glob("blobs/*/*") if path.is_file()]
        assert [in_place(path) for path in blobs] == [False] * len(blobs) != []
        assert_whole(cache)


def test_a_root_that_was_made_otherwise_is_changed_when_no_process_has_it_open(btrfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host, "_COPYING", frozenset())
        with forebay.Cache(btrfs / "root", budget=100 * MiB, min_free=0) as cache:
            fill(cache)
            assert not any(map(in_place, mapped(cache.path)))
    with forebay.Cache(btrfs / "root") as cache:
        assert_whole(cache)
        files = mapped(cache.path)
        assert dict.fromkeys(files, True) == {path: in_place(path) for path in files}
        with forebay.Cache(btrfs / "root") as other:
            assert_whole(other)


MARKS = ("chattr +c {}", "chattr +m {}", "btrfs property set {} compression zstd")
"""Commands that have the files of a directory compressed, never compressed, or compressed in one way: they inherit that."""

CLAIM = """
import forebay, sys
with forebay.claim([sys.argv[1]]) as claim:
    claim.array("numbers", (100,), "u1")[:] = 1
    print(claim.array("numbers", (100,), "u1").sum())
"""


@pytest.fixture(params=MARKS)
def marked(btrfs: Path, request: pytest.FixtureRequest) -> Path:
    place = btrfs / "marked"
    place.mkdir()
    command = request.param.format(place).split()
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not there")
    subprocess.run(command, check=True)
    return place


def test_a_directory_whose_files_are_compressed_or_never_are(marked: Path) -> None:
    with forebay.Cache(marked / "root", budget=100 * MiB, min_free=0) as cache:
        fill(cache)
        files = mapped(cache.path)
        assert dict.fromkeys(files, True) == {path: in_place(path) for path in files}
        assert_whole(cache)
    (marked / "empty").mkdir()
    with forebay.Cache(marked / "empty", budget=100 * MiB, min_free=0) as cache:
        fill(cache)
        assert_whole(cache)


def test_claims_in_a_directory_whose_files_are_compressed_or_never_are(marked: Path) -> None:
    environment = {**os.environ, "FOREBAY_CLAIMS": str(marked / "claims")}
    command = [sys.executable, "-c", CLAIM, marked / "data"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "100"), done.stderr


def test_a_file_system_that_cannot_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "fs_kind", lambda path: "btrfs")
    flags = bytearray(8)

    def ioctl(fd: int, request: int, argument: bytes) -> bytes:  # sets nothing
        return bytes(flags)

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    with pytest.raises(RootRefused, match="copy-on-write"):
        open_root(tmp_path / "root")
    assert not (tmp_path / "root" / "FORMAT").exists()


def shared(root: Path) -> list[Path]:
    """The files that processes map to write to them, and that share blocks."""
    found = []
    for path in mapped(root):
        with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
            if host.shares_blocks(file.fileno()):
                found.append(path)
    return found


@pytest.fixture
def copied(xfs: Path) -> list[Path]:
    """A root, and a copy of it that shares its blocks."""
    with forebay.Cache(xfs / "root", budget=100 * MiB, min_free=0) as cache:
        fill(cache)
    os.sync()
    done = subprocess.run(["cp", "-r", "--reflink=always", xfs / "root", xfs / "copy"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"files cannot share blocks here: {done.stderr}")
    return [xfs / "root", xfs / "copy"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_full_disk_ends_no_process_of_a_root_that_was_copied(copied: list[Path], which: int) -> None:
    command = [sys.executable, "-c", COPIED, copied[which], copied[0].parent / "other"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "[100, 100000, 100]"), done.stderr


def test_a_root_that_was_copied_is_unshared_when_it_is_opened_even_beside_other_processes(copied: list[Path]) -> None:
    with forebay.Cache(copied[0], read_only=True) as reader:
        assert len(shared(copied[0])) > 4
        with forebay.Cache(copied[1]) as cache:
            assert shared(copied[0]) == shared(copied[1]) == []
            assert_whole(cache)
        assert_whole(reader)
    with forebay.Cache(copied[0]) as cache:
        subprocess.run(["cp", "-r", "--reflink=always", copied[0], copied[0].parent / "another"], check=True)
        assert copied[0] / "shared/head" in shared(copied[0])
        with forebay.Cache(copied[0]) as other:
            assert shared(copied[0]) == []
            assert other.put("more", b"m")
        assert cache.get("more") == b"m"
        assert_whole(cache)


def test_a_root_in_a_lower_layer_on_xfs_is_unshared_when_it_is_opened(xfs: Path) -> None:
    """An overlay copies a file up by sharing its blocks."""
    for name in ("lower", "upper", "work", "overlay"):
        (xfs / name).mkdir()
    with forebay.Cache(xfs / "lower" / "root", budget=100 * MiB, min_free=0) as cache:
        fill(cache)
    os.sync()
    layers = f"lowerdir={xfs}/lower,upperdir={xfs}/upper,workdir={xfs}/work"
    done = subprocess.run(["mount", "-t", "overlay", "none", "-o", layers, xfs / "overlay"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no overlay can be mounted here: {done.stderr.strip()}")
    try:
        with forebay.Cache(xfs / "overlay" / "root") as cache:
            assert_whole(cache)
            assert cache.put("more", b"m")
            assert shared(xfs / "upper" / "root") == shared(cache.path) == []
    finally:
        subprocess.run(["umount", "-l", xfs / "overlay"], check=True)


def test_a_copied_root_for_which_the_disk_has_no_room_is_used_once_it_has(copied: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(host, "unshare", no_room)
        cache = forebay.Cache(copied[1])
        assert (cache.put("more", b"m"), cache.get("small")) == (False, None)
    with cache:
        until(lambda: cache.put("more", b"m"), "the cache")
        assert shared(copied[1]) == []
        assert_whole(cache)


def test_sqlite_keeps_its_locks_when_a_copied_root_is_opened_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To close any descriptor of a file drops the locks of the process on it: the next process would cut the index of the log, which this
    one has mapped."""

    def locks_on(path: Path) -> list[str]:
        inode = f":{path.stat().st_ino}"
        # Without its number, which depends on the locks of others.
        locks = [line.split()[1:] for line in Path("/proc/locks").read_text().splitlines()]
        return [" ".join(lock) for lock in locks if lock[4].endswith(inode)]

    with forebay.Cache(tmp_path / "root", budget=10 * MiB) as cache:
        assert cache.put("k", b"v")
        files = [cache.path / f"catalog.sqlite{ending}" for ending in ("", "-shm")]
        before = list(map(locks_on, files))
        assert len(before[1]) == 1
        monkeypatch.setattr(host, "SHARING", {host.fs_kind(tmp_path)})
        monkeypatch.setattr(host, "shares_blocks", lambda fd: True)
        monkeypatch.setattr(host, "unshare", lambda fd: None)
        with forebay.Cache(tmp_path / "root"):
            assert list(map(locks_on, files)) == before


def test_a_root_is_opened_where_the_disk_has_no_room_for_a_new_file(xfs: Path) -> None:
    """The last process that closes a catalog removes its log: the next one has to make it, for which the ballast is given up."""
    place = xfs / "root"

    def fill() -> None:
        with forebay.Cache(place, budget=10 * MiB, min_free=0) as cache:
            assert cache.put("k", bytes(100_000))

    in_child(fill)
    fill_the_disk(xfs)
    with forebay.Cache(place) as cache:
        assert cache.get("k") == bytes(100_000)
        assert cache.put("new", b"v")
