"""Files below a directory: whatever stands in the place of the directories on the way, nothing outside is opened, made or removed."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay._kernel import below, host
from forebay._kernel.below import Below, LinkInTheWay, NoPlainFile, TopReplaced


@pytest.fixture(params=["in one call", "step by step", "kept, in one call", "kept, step by step"], autouse=True)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older kernels, and some sandboxes, know no `openat2`. Kept: to the directory that has the path."""
    if "step by step" in request.param:
        monkeypatch.setattr(below, "_open_at_once", lambda *how, **more: -1)
    if "kept" in request.param:
        begin = Below.__init__

        def begin_kept(self: Below, top: Path, kept: below._Place | None = None) -> None:
            there = os.stat(top)
            begin(self, top, kept or below._Place(there.st_dev, there.st_ino, TopReplaced))

        monkeypatch.setattr(Below, "__init__", begin_kept)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory of somebody else's, with a file in it."""
    place = tmp_path / "outside"
    (place / "inner").mkdir(parents=True)
    (place / "file").write_bytes(b"theirs")
    (place / "inner" / "file").write_bytes(b"theirs")
    return place


@pytest.fixture
def top(tmp_path: Path, outside: Path) -> Path:
    """``a`` is ours; ``link``, ``a/link``: to the outside."""
    place = tmp_path / "top"
    (place / "a" / "b").mkdir(parents=True)
    (place / "a" / "file").write_bytes(b"ours")
    (place / "link").symlink_to(outside)
    (place / "a" / "link").symlink_to(outside)
    return place


def test_files_are_made_seen_moved_linked_and_removed(top: Path) -> None:
    files = Below(top)
    os.close(files.create(top / "a/b/new", 0o600))
    files.rename(top / "a/b/new", top / "a/moved")
    files.link(top / "a/moved", top / "second")
    files.chmod(top / "second", 0o640)
    assert files.lstat(top / "a/moved").st_mode & 0o777 == 0o640
    assert files.mkdir(top / "a/c", 0o700)
    assert not files.mkdir(top / "a/c", 0o700)
    assert sorted(files.names_in(top / "a")) == ["b", "c", "file", "link", "moved"]
    assert files.unlink(top / "second")
    assert not files.unlink(top / "second")
    assert not files.unlink(top / "missing/x")
    fd = files.open_write(top / "a/file")
    host.pwrite(fd, b"OURS", 0)
    os.close(fd)
    fd = files.open(top / "a/file")
    assert os.read(fd, 9) == b"OURS"
    os.close(fd)


@pytest.mark.parametrize("way", ["link", "a/link", "link/inner", "a/link/inner"])
@pytest.mark.parametrize(
    "act",
    [
        lambda files, path: files.open(path),
        lambda files, path: files.open_write(path),
        lambda files, path: files.lstat(path),
        lambda files, path: files.create(f"{path}.new", 0o600),
        lambda files, path: files.mkdir(f"{path}.new", 0o700),
        lambda files, path: files.chmod(path, 0o777),
        lambda files, path: files.rename(path, f"{files.top}/taken"),
        lambda files, path: files.rename(f"{files.top}/a/file", path),
        lambda files, path: files.link(path, f"{files.top}/taken"),
        lambda files, path: files.link(f"{files.top}/a/file", f"{path}.new"),
    ],
)
def test_no_link_is_followed(top: Path, outside: Path, way: str, act: Callable[[Below, str], object]) -> None:
    before = {path: path.lstat().st_mode for path in outside.rglob("*")}
    with pytest.raises(LinkInTheWay, match="not followed"):
        act(Below(top), f"{top}/{way}/file")
    assert {path: path.lstat().st_mode for path in outside.rglob("*")} == before
    assert (outside / "file").read_bytes() == b"theirs"


@pytest.mark.parametrize("way", ["link", "a/link", "link/inner", "missing", "a/file"])
def test_where_no_directory_is_there_are_no_names(top: Path, way: str) -> None:
    assert Below(top).names_in(top / way) == []


@pytest.mark.parametrize("way", ["link", "a/link", "link/inner", "a/link/inner"])
def test_what_lies_behind_a_link_is_not_removed(top: Path, outside: Path, way: str, caplog: pytest.LogCaptureFixture) -> None:
    files = Below(top)
    assert not files.unlink(top / way / "file")
    assert not files.remove_whole(top / way / "file")
    assert (outside / "file").exists()
    assert (outside / "inner" / "file").exists()
    assert way.split("/inner")[0] in caplog.text


def test_a_tree_goes_with_its_links_however_deep_and_nothing_behind_them(top: Path, outside: Path) -> None:
    deep = top / "a"
    fd = os.open(deep, os.O_RDONLY)
    for _ in range(20):  # together longer than a path may be
        os.mkdir("d" * 250, dir_fd=fd)
        below = os.open("d" * 250, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    (top / "a/b").chmod(0)
    assert Below(top).remove_whole(deep)
    assert not deep.exists()
    assert (outside / "inner" / "file").exists()
    assert Below(top).remove_whole(top / "link")
    assert not os.path.lexists(top / "link")
    assert outside.is_dir()
    assert not Below(top).remove_whole(deep)


@pytest.mark.parametrize("path", ["a/../../outside/file", "a/./file", "a//file", "../outside/file"])
def test_no_path_leads_up(top: Path, path: str) -> None:
    with pytest.raises(ValueError, match="does not lie below"):
        Below(top).unlink(f"{top}/{path}")
    with pytest.raises(ValueError, match="does not lie below"):
        Below(top).open(f"{top}-beside/file")


def test_the_last_name_is_not_followed_either_and_a_pipe_waits_for_nobody(top: Path) -> None:
    (top / "pointer").symlink_to(top / "a/file")
    os.mkfifo(top / "pipe")
    with pytest.raises(OSError, match="symbolic links"):
        Below(top).open(top / "pointer")
    with pytest.raises(NoPlainFile, match="pipe"):
        Below(top).open(top / "pipe")


def test_a_directory_and_its_errors_can_be_pickled(top: Path) -> None:
    files = pickle.loads(pickle.dumps(Below(top)))
    assert files.names_in(top / "a/b") == []
    with pytest.raises(LinkInTheWay) as caught:
        files.lstat(top / "link/file")
    assert pickle.loads(pickle.dumps(caught.value)).filename == str(top / "link")


@pytest.mark.parametrize(
    "act",
    [
        lambda files, at: files.open(f"{at}/a/file", os.O_RDWR),
        lambda files, at: files.open_write(f"{at}/a/file"),
        lambda files, at: files.create(f"{at}/new", 0o600),
        lambda files, at: files.create(f"{at}/a/new", 0o600),
        lambda files, at: files.mkdir(f"{at}/a/new", 0o700),
        lambda files, at: files.chmod(f"{at}/a/file", 0o777),
        lambda files, at: files.rename(f"{at}/a/file", f"{at}/moved"),
        lambda files, at: files.link(f"{at}/a/file", f"{at}/second"),
        lambda files, at: files.unlink(f"{at}/a/file"),
        lambda files, at: files.unlink(f"{at}/a/missing"),
        lambda files, at: files.make_way(f"{at}/a/b"),
        lambda files, at: files.rmdir(f"{at}/a/b"),
        lambda files, at: files.remove_whole(f"{at}/a"),
        lambda files, at: files.lstat(f"{at}/a/file"),
        lambda files, at: files.names_in(at),
        lambda files, at: files.names_in(f"{at}/missing"),
        lambda files, at: files.is_directory(f"{at}/missing"),
    ],
)  # fmt: skip
def test_what_is_kept_to_a_directory_leaves_another_one_alone(top: Path, act: Callable[[Below, Path], object]) -> None:
    files, aside = Below(top).kept_to(top.stat(), TopReplaced), top.with_name("aside")
    top.rename(aside)
    shutil.copytree(aside, top, symlinks=True)
    there = {path: path.lstat()[:7] for path in top.rglob("*")}
    with pytest.raises(TopReplaced, match="another directory has its path"):
        act(files, top)
    assert {path: path.lstat()[:7] for path in top.rglob("*")} == there
    fd = files.open(top / "a/file")
    assert os.read(fd, 9) == b"ours"
    os.close(fd)
    shutil.rmtree(top)
    with pytest.raises(TopReplaced, match="was deleted or moved"):
        act(files, top)
    aside.rename(top)
    with contextlib.suppress(FileNotFoundError):
        if (got := act(files, top)) and type(got) is int and not isinstance(got, bool):
            os.close(got)


@pytest.mark.parametrize("where", ["/", ".", "relative"])
def test_what_lies_below_the_topmost_or_the_current_directory(top: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(top)
    files = Below(Path(where if where != "relative" else "a"))
    path = top / "a/file" if where == "/" else Path("a/file")
    assert files.lstat(path).st_size == 4
    os.close(files.open(path))
    assert "file" in files.names_in(path.parent)
    assert files.is_directory(Path(where) if where != "relative" else Path("a"))
    for outside in ("../outside/file", *(() if where == "/" else ("/etc/passwd",))):
        with pytest.raises(ValueError, match="does not lie below"):
            files.lstat(Path(outside))
    link = path.parent / "link/file"
    with pytest.raises(LinkInTheWay):
        files.lstat(link)
    assert files.remove_whole(path)


def test_what_is_missing_is_looked_for_once(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not below._knows_openat2() or below._open_at_once.__name__ == "<lambda>":
        pytest.skip("step by step, each step is one")
    walked = list[object]()
    for name in ("a/missing", "missing/deeper/file"):
        with monkeypatch.context() as patch, pytest.raises(FileNotFoundError, match=name):
            patch.setattr(os, "open", lambda *how, **more: walked.append(how))
            Below(top).open(top / name)
    assert walked == []


def test_a_kernel_without_the_call_is_asked_once(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[object]()
    monkeypatch.setattr(below, "_openat2", lambda *how: (asked.append(how), -1)[1])
    below._knows_openat2.cache_clear()
    try:
        for _ in range(3):
            os.close(Below(top).open(top / "a/file"))
        assert len(asked) <= 1
    finally:
        below._knows_openat2.cache_clear()
