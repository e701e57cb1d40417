"""What was handed out may be written to, by who has the rights for it: that is seen before it is handed out again."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Checkpoint
from forebay._kernel import host
from tests.processes import in_child
from tests.remote_directories import CKPT, files_of
from tests.remote_directories import remote as remote
from tests.servers.counting import Shelf, content
from tests.servers.counting import shelf as shelf

BIG = content("big", 1_500_000)  # larger than what is read at its first use in a process
FILES = {"big.bin": BIG, "sub/small.json": b"{'small': 1}", "sub/other.bin": content("other", 5000)}


@pytest.fixture
def url(shelf: Shelf) -> str:
    shelf.fill(CKPT, FILES)
    return CKPT


def overwrite(path: str, name: str) -> None:
    """As a process does that has root's rights: in place, of the same size."""
    file = Path(path, name)
    mode = stat.S_IMODE(file.stat().st_mode)
    file.chmod(0o644)
    file.write_bytes(b"?" * file.stat().st_size)
    file.chmod(mode)


def writable(path: str, name: str) -> Path:
    folder = Path(path, name).parent
    folder.chmod(0o755)
    return folder


def add(path: str) -> None:
    (writable(path, "sub/new") / "new").write_bytes(b"new")


def remove(path: str) -> None:
    (writable(path, "sub/small.json") / "small.json").unlink()


def replace(path: str) -> None:
    folder = writable(path, "sub/small.json")
    (folder / "new").write_bytes(b"!" * len(FILES["sub/small.json"]))
    os.replace(folder / "new", folder / "small.json")


def add_folder(path: str) -> None:
    (writable(path, "sub/new") / "new").mkdir()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "set aside" in record.getMessage()]


@pytest.mark.parametrize("name", ["big.bin", "sub/small.json"])
@pytest.mark.parametrize("where", ["in this process", "in another process"])
def test_a_tree_that_was_written_to_is_built_anew(
    cache: forebay.Cache, shelf: Shelf, url: str, name: str, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    fs = shelf.arrow()
    with cache.directory(url, filesystem=fs) as held:
        path = str(held)
        overwrite(path, name)
    shelf.forget()

    def look() -> dict[str, bytes]:
        with forebay.Cache(cache.path) as own, own.directory(url, filesystem=fs) as again:
            return files_of(str(again))

    if where == "in another process":
        assert in_child(look) == FILES
    with cache.directory(url, filesystem=fs) as again, Checkpoint(url, fs, cache).as_directory() as same:
        assert str(again) == same != path
        assert files_of(same) == FILES
    assert shelf.sent == len(FILES[name])  # the others are what was fetched
    assert cache.check(deep=True) == []
    if where == "in this process":
        (one,) = told(caplog)
        assert repr(name) in one


@pytest.mark.parametrize("change", [add, remove, replace, add_folder])
def test_what_is_added_removed_or_replaced_costs_no_fetch(
    cache: forebay.Cache, shelf: Shelf, url: str, change: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    fs = shelf.arrow()
    with cache.directory(url, filesystem=fs) as held:
        path = str(held)
    change(path)
    shelf.forget()
    with cache.directory(url, filesystem=fs) as again:
        assert str(again) != path
        assert files_of(str(again)) == FILES
    assert shelf.sent == 0
    assert len(told(caplog)) == 1
    with cache.directory(url, filesystem=fs) as same:
        assert str(same) == str(again)
    assert len(told(caplog)) == 1
    assert cache.check(deep=True) == []


def test_who_holds_it_keeps_it_and_the_next_gets_another(cache: forebay.Cache, shelf: Shelf, url: str) -> None:
    with cache.directory(url, filesystem=shelf.arrow()) as held:
        overwrite(str(held), "big.bin")
        with cache.directory(url, filesystem=shelf.arrow()) as again:
            assert files_of(str(again)) == FILES
        assert sorted(files_of(str(held))) == sorted(FILES)


def test_a_part_and_a_private_copy_do_not_get_the_damage(cache: forebay.Cache, shelf: Shelf, url: str, tmp_path: Path) -> None:
    """They share the files of the whole."""
    fs = shelf.arrow()
    with cache.directory(url, filesystem=fs) as held:
        overwrite(str(held), "big.bin")
    with cache.directory(url, filesystem=fs, include="big.bin") as part:
        assert files_of(str(part)) == {"big.bin": BIG}
    with cache.directory(url, filesystem=fs) as whole:
        overwrite(str(whole), "big.bin")
    copied = Checkpoint(url, fs, cache).to_directory()
    assert files_of(copied) == FILES
    shutil.rmtree(copied)


@pytest.mark.parametrize("door", ["read", "open", "local"])
def test_the_file_by_its_own_name(cache: forebay.Cache, shelf: Shelf, url: str, door: str) -> None:
    """A file of a tree is a link to what single reads get."""
    fs, name = shelf.arrow(), f"{CKPT}/big.bin"
    with cache.directory(url, filesystem=fs) as held:
        overwrite(str(held), "big.bin")

    def look() -> bool:
        with forebay.Cache(cache.path) as own:
            if door == "read":
                return bytes(own.read(name, filesystem=fs)) == BIG
            if door == "open":
                with own.open(name, filesystem=fs) as file:
                    return file.read() == BIG
            with own.local(name, filesystem=fs) as path:
                return Path(path).read_bytes() == BIG

    assert in_child(look)
    assert in_child(look)


def test_a_tree_whose_times_were_changed_is_looked_at_and_kept(
    cache: forebay.Cache, shelf: Shelf, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    fs = shelf.arrow()
    with cache.directory(url, filesystem=fs) as held:
        path = str(held)
        for name in FILES:
            os.utime(Path(path, name), ns=(1, 123_456_789))
    shelf.forget()
    with cache.directory(url, filesystem=fs) as again:
        assert str(again) == path
        assert files_of(path) == FILES
    assert (shelf.sent, told(caplog)) == (0, [])
    assert 123_456_789 not in {os.stat(Path(path, name)).st_mtime_ns for name in FILES}  # so that the next process need not look


def test_a_root_that_may_only_be_read_says_it_once(cache: forebay.Cache, shelf: Shelf, url: str, caplog: pytest.LogCaptureFixture) -> None:
    fs = shelf.arrow()
    with cache.directory(url, filesystem=fs) as held:
        overwrite(str(held), "sub/other.bin")
    with forebay.Cache(cache.path, read_only=True) as own:
        with pytest.raises(forebay.errors.Damaged):
            own.directory(url, filesystem=fs)
    assert len(told(caplog)) == 1
    with cache.directory(url, filesystem=fs) as again:
        assert files_of(str(again)) == FILES


@pytest.mark.parametrize("size", [20_000, 300_000, 9 << 20])
@pytest.mark.parametrize("unit", [0, 1000, 1_000_000, 1_000_000_000])
def test_a_write_is_noticed_whatever_time_it_leaves(tmp_path: Path, size: int, unit: int) -> None:
    """0: its own; else one as ``tar``, ``touch`` and ``cp -p`` leave, which is the file's own time to so many nanoseconds."""
    root = tmp_path / "root"

    def store() -> str:
        with forebay.Cache(root, budget=64 << 20, min_free=0) as cache:
            cache.put("k", b"a" * size)
            with cache.hold("values:k") as path:
                return path

    path = in_child(store)
    ns = os.stat(path).st_mtime_ns
    os.chmod(path, 0o644)
    with open(path, "r+b") as file:
        file.write(b"b")
    if unit:
        os.utime(path, ns=(ns, ns - ns % unit))
    with forebay.Cache(root) as cache:
        assert cache.get("k") is None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EPERM, errno.EMFILE])
def test_a_note_that_cannot_be_written_costs_the_hit_nothing(cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    cache.put("k", BIG)
    with cache.hold("values:k") as path:
        os.utime(path, ns=(1, 123_456_789))

    def fail(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(host, "set_mtime", fail)
    assert cache.get("k") == BIG
    assert cache.stats().hits == 1
