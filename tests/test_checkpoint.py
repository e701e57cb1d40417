"""`forebay.Checkpoint`: what Ray's class does, without its faults."""

from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import os
import pickle
import shutil
import stat
import subprocess
import sys
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Checkpoint, errors
from forebay.reports import Progress
from forebay.testing import ScriptedServer
from tests.processes import ProcessGroup, in_child
from tests.remote_directories import CKPT, FILES, MARKER, TOTAL, Remote, files_of, http_directory, inodes_of, modes_of, some_kinds
from tests.servers.counting import Shelf, content

MiB = 1 << 20
REMOVED = [
    "from_dict", "to_dict", "from_bytes", "to_bytes", "get_internal_representation", "from_uri", "to_uri", "uri", "get_preprocessor",
    "set_preprocessor",
]  # fmt: skip


@pytest.fixture
def ckpt(cache: forebay.Cache, remote: Remote) -> Checkpoint:
    return Checkpoint(remote.url, cache=cache, **remote.how)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    place = tmp_path / "local"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "optim.pt").write_bytes(b"optim")
    (place / "model.pt").write_bytes(b"model")
    return place


# -- what it is --------------------------------------------------------------------------------------------------------


def test_a_checkpoint_of_a_url() -> None:
    found = Checkpoint("s3://bucket/run/step_100")
    assert found.url == "s3://bucket/run/step_100"
    assert found.path == "bucket/run/step_100"


def test_the_filesystem_of_a_url_is_pyarrows() -> None:
    arrow = pytest.importorskip("pyarrow.fs")
    found = Checkpoint("s3://bucket/run/step_100?region=us-east-1")  # else pyarrow asks the bucket where it is
    assert isinstance(found.filesystem, arrow.S3FileSystem)
    assert found.filesystem.region == "us-east-1"
    assert found.path == "bucket/run/step_100"
    local = Checkpoint("/some/where")
    assert isinstance(local.filesystem, arrow.LocalFileSystem)
    assert local.path == "/some/where"


def test_the_filesystem_is_found_when_it_is_asked_for() -> None:
    """A scheme that pyarrow does not know, or no pyarrow at all: nothing is raised before, and the rest works."""
    script = """
import sys
sys.modules["pyarrow"] = None
import forebay
found = forebay.Checkpoint("s3://bucket/run/step_100")
assert found.filesystem is None, found.filesystem
assert (found.path, found.url) == ("bucket/run/step_100", "s3://bucket/run/step_100")
with found.from_directory(sys.argv[1]).as_directory() as path:
    print(path)
"""
    done = subprocess.run([sys.executable, "-c", script, "/tmp"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "/tmp"), done.stderr


def test_making_one_asks_nobody(shelf: Shelf, server: ScriptedServer) -> None:
    for found in (Checkpoint(CKPT, shelf.fsspec()), Checkpoint(CKPT, filesystem=shelf.fsspec()), Checkpoint(f"{server.url}/a/")):
        repr(found)
        assert found.path
    assert shelf.asked() == []
    assert server.requests == []


def test_making_one_opens_no_cache(tmp_path: Path) -> None:
    script = """
import os, sys
import forebay, pickle
found = forebay.Checkpoint("s3://bucket/x")
pickle.loads(pickle.dumps(found))
assert not os.path.exists(os.environ["FOREBAY_HOME"])
"""
    env = os.environ | {"FOREBAY_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", script], check=True, env=env, timeout=60)
    assert not (tmp_path / "home").exists()


def test_a_path_of_a_filesystem(shelf: Shelf) -> None:
    fs = shelf.arrow()
    found = Checkpoint(CKPT, fs)
    assert found.path == CKPT
    assert found.filesystem is fs
    assert Checkpoint(path=CKPT, filesystem=fs) == found


@pytest.mark.parametrize("given", ["s3://bucket/x", "memory://x", "https://host/x"])
def test_a_url_and_a_filesystem_are_one_too_many(shelf: Shelf, given: str) -> None:
    with pytest.raises(ValueError, match="filesystem"):
        Checkpoint(given, shelf.arrow())


@pytest.mark.parametrize("given", ["", None, 5, b"bytes"])
def test_what_is_no_path(given: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        Checkpoint(given)


def test_a_path_may_be_a_path(local: Path, cache: forebay.Cache) -> None:
    for given in (local, str(local), local.as_uri()):
        with Checkpoint(given, cache=cache).as_directory() as path:
            assert path == str(local)


def test_repr_says_what_it_is(shelf: Shelf) -> None:
    assert "s3://bucket/run/step_100" in repr(Checkpoint("s3://bucket/run/step_100"))
    assert CKPT in repr(Checkpoint(CKPT, shelf.arrow()))
    assert "counting" in repr(Checkpoint(CKPT, shelf.arrow(helper=True)))
    assert repr(Checkpoint("/a/b")).startswith("Checkpoint(")


def test_no_secret_is_shown() -> None:
    found = Checkpoint("https://user:sikrit@host/x/?X-Amz-Signature=sikrit&X-Amz-Date=1")
    assert "sikrit" not in repr(found) + str(found)


def test_equality(shelf: Shelf, tmp_path: Path) -> None:
    assert Checkpoint("s3://bucket/x") == Checkpoint("s3://bucket/x") == Checkpoint("S3://bucket/x/")
    assert Checkpoint("s3://bucket/x") != Checkpoint("s3://bucket/y")
    assert Checkpoint("s3://bucket/x") != "s3://bucket/x"
    assert Checkpoint(CKPT, shelf.arrow()) == Checkpoint(CKPT, shelf.arrow())
    assert Checkpoint(CKPT, shelf.arrow()) != Checkpoint(CKPT, Shelf(tmp_path / "other").arrow())
    assert Checkpoint(CKPT, shelf.arrow()) != Checkpoint(CKPT)
    assert len({Checkpoint("s3://bucket/x"), Checkpoint("s3://bucket/x"), Checkpoint("s3://bucket/y")}) == 2
    assert len({Checkpoint(CKPT, shelf.arrow()), Checkpoint(CKPT, shelf.arrow())}) == 1


def test_a_checkpoint_is_no_path() -> None:
    with pytest.raises(TypeError, match="as_directory") as caught:
        os.fspath(Checkpoint("s3://bucket/x"))  # type: ignore[call-overload]
    assert "to_directory" in str(caught.value)
    with pytest.raises(TypeError):  # Python 3.12 and later have a message of their own
        Path(Checkpoint("s3://bucket/x"))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", REMOVED)
def test_what_rays_old_class_had(name: str) -> None:
    for where in (Checkpoint, Checkpoint("/a/b")):
        with pytest.raises(AttributeError, match=name) as caught:
            getattr(where, name)
        assert len(str(caught.value)) > len(name) + 20
        assert not hasattr(where, name)


@pytest.mark.parametrize(
    ("names", "replacement"),
    [
        (["from_dict", "to_dict", "from_bytes", "to_bytes", "get_internal_representation"], "from_directory"),
        (["from_uri"], "Checkpoint(uri)"),
        (["to_uri"], "Checkpoint.upload("),
        (["uri"], "checkpoint.url"),
        (["get_preprocessor", "set_preprocessor"], "_metadata"),
    ],
)
def test_the_replacement_is_spelled_out(names: list[str], replacement: str) -> None:
    for name in names:
        with pytest.raises(AttributeError) as caught:
            getattr(Checkpoint, name)
        assert replacement in str(caught.value), name


def test_a_name_that_never_was() -> None:
    for where in (Checkpoint, Checkpoint("/a/b")):
        with pytest.raises(AttributeError, match="nonsense"):
            where.nonsense  # type: ignore[union-attr]  # noqa: B018


# -- pickled, copied, forked -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("clone", [lambda found: pickle.loads(pickle.dumps(found)), copy.copy, copy.deepcopy])
def test_a_copy_is_as_good(ckpt: Checkpoint, shelf: Shelf, clone: Any) -> None:
    cloned = clone(ckpt)
    with ckpt.as_directory() as one, cloned.as_directory() as other:
        assert one == other
    assert cloned == ckpt
    if cloned.cache is not ckpt.cache:
        cloned.cache.close()
    assert shelf.sent == TOTAL


def test_pickled_it_opens_where_it_arrives(shelf: Shelf, tmp_path: Path) -> None:
    """As on another node: there the default cache is that node's own."""
    shelf.fill(CKPT, FILES)
    data = pickle.dumps(Checkpoint(CKPT, shelf.fsspec()))
    script = """
import os, pickle, sys
found = pickle.loads(sys.stdin.buffer.read())
with found.as_directory() as path:
    assert path.startswith(os.environ["FOREBAY_HOME"]), path
    print(sum(len(names) for _, _, names in os.walk(path)))
"""
    for home in ("here", "there"):
        env = os.environ | {"FOREBAY_HOME": str(tmp_path / home), "FOREBAY_BUDGET": "64MiB"}
        env["PYTHONPATH"] = os.pathsep.join([env["PYTHONPATH"], str(Path(__file__).parents[1])])
        done = subprocess.run([sys.executable, "-c", script], input=data, capture_output=True, env=env, timeout=60)
        assert (done.returncode, done.stdout.split()) == (0, [b"%d" % len(FILES)]), done.stderr
    assert shelf.sent == 2 * TOTAL


def test_the_default_cache(shelf: Shelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one of its own it uses that of the environment; all of a process the same."""
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FOREBAY_BUDGET", "64MiB")
    shelf.fill(CKPT, FILES)

    def use() -> list[str]:
        paths = []
        for _ in range(2):
            with Checkpoint(CKPT, shelf.arrow()).as_directory() as path:
                assert files_of(path) == FILES
                paths.append(path)
        return paths

    one, other = in_child(use), in_child(use)
    assert set(one) == set(other)
    assert one[0].startswith(str(tmp_path / "home"))
    assert shelf.sent == TOTAL


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_in_another_process(ckpt: Checkpoint, shelf: Shelf, method: str) -> None:
    """Scenario 17."""
    with ckpt.as_directory() as path:
        shelf.forget()
        context = multiprocessing.get_context(method)
        queue = context.SimpleQueue()
        process = context.Process(target=_use_in_process, args=(ckpt, queue))
        process.start()
        found = queue.get()
        process.join(60)
        assert found == (path, FILES)
        process.close()
        queue.close()
    assert shelf.asked("open") == []


def _use_in_process(ckpt: Checkpoint, queue: Any) -> None:
    with ckpt.as_directory() as path:
        queue.put((path, files_of(path)))


# -- as_directory ------------------------------------------------------------------------------------------------------


@some_kinds
def test_as_directory(cache: forebay.Cache, remote: Remote) -> None:
    with Checkpoint(remote.url, cache=cache, **remote.how).as_directory() as path:
        assert type(path) is str
        assert files_of(path) == FILES
        assert modes_of(path) == {("d", 0o555), ("f", 0o444)}
        assert path.startswith(f"{cache.path}/")
        assert cache.entries("directories")[0].leased
    assert not cache.entries("directories")[0].leased
    assert files_of(path) == FILES  # it stays until room is needed


def test_the_lease_ends_with_an_exception(cache: forebay.Cache, ckpt: Checkpoint) -> None:
    with pytest.raises(KeyError, match="mine"):
        with ckpt.as_directory():
            raise KeyError("mine")
    assert not cache.entries("directories")[0].leased
    assert cache.evict(cache.entries("directories")[0].name).removed


def test_the_lease_ends_with_death(cache: forebay.Cache, ckpt: Checkpoint, children: ProcessGroup) -> None:
    ours, theirs = os.pipe()

    def hold() -> None:
        with ckpt.as_directory() as path:
            os.write(theirs, path.encode())
            threading.Event().wait(60)

    child = children(hold)
    path = os.read(ours, 4096).decode()
    assert cache.entries("directories")[0].leased
    assert cache.evict(cache.entries("directories")[0].name).removed == ()
    assert files_of(path) == FILES
    child.kill()
    assert not cache.entries("directories")[0].leased
    assert cache.evict(cache.entries("directories")[0].name).removed
    assert not os.path.exists(path)
    os.close(ours)
    os.close(theirs)


def test_blocks_within_blocks(cache: forebay.Cache, ckpt: Checkpoint) -> None:
    with ckpt.as_directory() as outer:
        with ckpt.as_directory() as inner:
            assert outer == inner
        assert cache.entries("directories")[0].leased
        assert files_of(outer) == FILES
    assert not cache.entries("directories")[0].leased


def test_a_local_one_is_yielded_as_it_is(local: Path, cache: forebay.Cache) -> None:
    with Checkpoint.from_directory(local).as_directory() as path:
        assert path == str(local)
    with Checkpoint(str(local), cache=cache).as_directory(include="*.pt") as path:
        assert path == str(local)
    assert files_of(local) == {"model.pt": b"model", "sub/optim.pt": b"optim"}
    assert cache.entries() == []


def test_a_local_one_needs_no_cache(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_HOME", str(tmp_path / "home"))
    with Checkpoint.from_directory(local).as_directory() as path:
        assert path == str(local)
    copied = Checkpoint.from_directory(local).to_directory(tmp_path / "copy")
    assert files_of(copied) == files_of(local)
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("make", [lambda p: Checkpoint.from_directory(p), lambda p: Checkpoint(p), lambda p: Checkpoint(p.as_uri())])
def test_a_local_one_on_filesystems(local: Path, cache: forebay.Cache, make: Any) -> None:
    arrow = pytest.importorskip("pyarrow.fs")
    found = make(local)
    assert isinstance(found.filesystem, arrow.LocalFileSystem)
    assert found.path == str(local)


def test_a_directory_that_is_not_there(local: Path, cache: forebay.Cache, shelf: Shelf) -> None:
    for found in (Checkpoint(local / "none"), Checkpoint("bucket/none", shelf.arrow(), cache=cache)):
        with pytest.raises(errors.NotFound, match="none"):
            with found.as_directory():
                pass
        with pytest.raises(errors.NotFound, match="none"):
            found.to_directory()
        with pytest.raises(errors.NotFound, match="none"):
            found.to_directory(local / "target")
        assert not (local / "target").exists()


def test_a_part_of_a_checkpoint_by_include_and_exclude(ckpt: Checkpoint) -> None:
    with ckpt.as_directory(include=["model-*.safetensors"]) as path:
        assert set(files_of(path)) == {"model-00001.safetensors", "model-00002.safetensors"}
    with ckpt.as_directory(exclude="model-*.safetensors") as path:
        assert set(files_of(path)) == {name for name in FILES if not name.startswith("model-")}


def test_what_else_a_call_may_say(ckpt: Checkpoint, remote: Remote) -> None:
    told: list[Progress] = []
    with ckpt.as_directory(on_progress=told.append):
        pass
    assert told[-1].state == "done"
    remote.put("config.json", b"{next}")
    with ckpt.as_directory() as path:
        assert files_of(path)["config.json"] == b"{}"
    with ckpt.as_directory(refresh=True) as path:
        assert files_of(path)["config.json"] == b"{next}"
    with ckpt.as_directory(offline=True) as path:
        assert files_of(path)["config.json"] == b"{next}"


# -- to_directory ------------------------------------------------------------------------------------------------------


@pytest.fixture
def temp_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this process."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    return place


@some_kinds
def test_without_a_path_it_is_a_copy_of_ones_own_too(cache: forebay.Cache, remote: Remote, temp_dir: Path) -> None:
    found = Checkpoint(remote.url, cache=cache, **remote.how)
    with found.as_directory() as shared:
        used = cache.stats().bytes_used
        one, other = found.to_directory(), found.to_directory()
        assert cache.stats().bytes_used == used
        assert one != other
        assert {os.path.dirname(one), os.path.dirname(other)} == {str(temp_dir)}
        assert stat.S_IMODE(os.stat(one).st_mode) == 0o700
        for name in FILES:
            Path(one, name).write_bytes(b"mine")
        shutil.rmtree(one)
        assert files_of(other) == files_of(shared) == FILES
    shutil.rmtree(other)
    with found.as_directory() as again:
        assert (again, files_of(again)) == (shared, FILES)
    assert os.listdir(temp_dir) == []


@pytest.mark.parametrize("make", [lambda p: Checkpoint.from_directory(p), lambda p: Checkpoint(p), lambda p: Checkpoint(p.as_uri())])
def test_what_a_caller_removes_is_never_the_original(local: Path, temp_dir: Path, make: Any) -> None:
    before = files_of(local)
    copied = make(local).to_directory()
    assert files_of(copied) == before
    assert os.path.dirname(copied) == str(temp_dir)
    assert not set(inodes_of(copied).values()) & set(inodes_of(local).values())
    shutil.rmtree(copied)
    assert files_of(local) == before


def test_a_part_without_a_path(ckpt: Checkpoint, temp_dir: Path) -> None:
    assert set(files_of(ckpt.to_directory(include="*.json"))) == {"config.json"}


def test_a_copy_that_fails_leaves_nothing_in_the_temporary_directory(ckpt: Checkpoint, shelf: Shelf, temp_dir: Path) -> None:
    shelf.fail(f"{CKPT}/sub/deep/optim.pt", "PermissionError", "not yours")
    with pytest.raises(errors.AccessDenied):
        ckpt.to_directory()
    with pytest.raises(errors.NotFound):
        Checkpoint(temp_dir / "none").to_directory()
    assert os.listdir(temp_dir) == []


@some_kinds
def test_with_a_path_it_is_a_copy_of_ones_own(cache: forebay.Cache, remote: Remote, tmp_path: Path) -> None:
    found = Checkpoint(remote.url, cache=cache, **remote.how)
    target = tmp_path / "mine" / "copy"
    assert found.to_directory(target) == str(target)
    assert files_of(target) == FILES
    assert modes_of(target) == {("d", 0o777 & ~umask()), ("f", 0o666 & ~umask())}
    with found.as_directory() as shared:
        assert not set(inodes_of(target).values()) & set(inodes_of(shared).values())  # never a hard link
        for name in FILES:
            (target / name).write_bytes(b"mine")
        assert files_of(shared) == FILES
    assert cache.check(deep=True) == []
    assert sorted(os.listdir(tmp_path / "mine")) == ["copy"]


def umask() -> int:
    found = os.umask(0o022)
    os.umask(found)
    return found


def test_a_copy_of_a_local_one(local: Path, tmp_path: Path, cache: forebay.Cache) -> None:
    target = tmp_path / "copy"
    assert Checkpoint(local, cache=cache).to_directory(target) == str(target)
    assert files_of(target) == files_of(local)
    assert not set(inodes_of(target).values()) & set(inodes_of(local).values())
    (target / "model.pt").write_bytes(b"mine")
    assert (local / "model.pt").read_bytes() == b"model"


def test_a_tilde_is_home(ckpt: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    assert ckpt.to_directory("~/copy") == str(tmp_path / "home" / "copy")
    assert files_of(tmp_path / "home" / "copy") == FILES


def test_a_relative_path(ckpt: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = ckpt.to_directory("x/../copy")
    assert os.path.abspath(found) == str(tmp_path / "copy")
    assert files_of("copy") == FILES


def test_a_part_of_it(ckpt: Checkpoint, tmp_path: Path) -> None:
    ckpt.to_directory(tmp_path / "copy", include="sub/", exclude=["*.bin"])
    assert set(files_of(tmp_path / "copy")) == {"sub/deep/optim.pt", "sub/with space #1?.txt"}
    ckpt.to_directory(tmp_path / "copy", include="model-*")  # beside what is there
    assert len(files_of(tmp_path / "copy")) == 4
    ckpt.to_directory(tmp_path / "copy")
    assert files_of(tmp_path / "copy") == FILES


def test_into_a_directory_with_other_files(ckpt: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    (target / "sub").mkdir(parents=True)
    (target / "notes.txt").write_bytes(b"mine")
    (target / "sub" / "notes.txt").write_bytes(b"mine too")
    ckpt.to_directory(target)
    assert files_of(target) == FILES | {"notes.txt": b"mine", "sub/notes.txt": b"mine too"}


@pytest.mark.parametrize("size", [2, 5])
def test_a_foreign_file_is_not_overwritten(ckpt: Checkpoint, tmp_path: Path, size: int) -> None:
    """Not even one of the same size."""
    target = tmp_path / "mine"
    (target / "sub" / "deep").mkdir(parents=True)
    (target / "config.json").write_bytes(b"m" * size)
    with pytest.raises(errors.Foreign, match=r"config\.json") as caught:
        ckpt.to_directory(target)
    assert isinstance(caught.value, FileExistsError)
    assert caught.value.errno == errno.EEXIST
    assert files_of(target) == {"config.json": b"m" * size}  # nothing was written
    assert ckpt.to_directory(target, overwrite=True) == str(target)
    assert files_of(target) == FILES


def test_a_copy_that_was_changed_is_foreign(ckpt: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "mine"
    ckpt.to_directory(target)
    ckpt.to_directory(target)  # nothing to do
    (target / "config.json").write_bytes(b"me")
    with pytest.raises(errors.Foreign, match=r"config\.json"):
        ckpt.to_directory(target)


def test_a_file_where_a_directory_is_to_be(ckpt: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"mine")
    with pytest.raises(OSError, match="file"):
        ckpt.to_directory(tmp_path / "file")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sub").write_bytes(b"mine")
    with pytest.raises(OSError, match="sub"):
        ckpt.to_directory(tmp_path / "mine")
    assert files_of(tmp_path / "mine") == {"sub": b"mine"}
    assert (tmp_path / "file").read_bytes() == b"mine"


def test_a_link_is_not_followed_out_of_it(ckpt: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "sub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(errors.Foreign, match="sub"):
        ckpt.to_directory(tmp_path / "mine")
    ckpt.to_directory(tmp_path / "mine", overwrite=True)
    assert files_of(tmp_path / "mine") == FILES
    assert os.listdir(tmp_path / "elsewhere") == []


def test_a_link_to_a_directory_as_the_target(ckpt: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    ckpt.to_directory(tmp_path / "link")
    assert files_of(tmp_path / "real") == FILES


def test_several_processes_with_one_path_do_it_once(ckpt: Checkpoint, tmp_path: Path, children: ProcessGroup, shelf: Shelf) -> None:
    shelf.stall(f"{CKPT}/model-00001.safetensors")
    target = tmp_path / "copy"

    def take() -> dict[str, int]:
        ckpt.to_directory(target)
        assert files_of(target) == FILES
        return inodes_of(target)

    children = [children(take) for _ in range(4)]
    shelf.wait("stalled")
    shelf.go(f"{CKPT}/model-00001.safetensors")
    inodes = [child.result() for child in children]
    assert inodes[1:] == inodes[:-1]
    assert shelf.sent == TOTAL
    assert sorted(os.listdir(tmp_path)) == ["copy", "root", "shelf"]


def test_threads_that_copy_to_one_directory_fetch_once(ckpt: Checkpoint, tmp_path: Path) -> None:
    found: list[dict[str, int]] = []
    threads = [
        threading.Thread(target=lambda: found.append(inodes_of(ckpt.to_directory(tmp_path / "copy")))) for _ in range(6)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 6
    assert all(each == found[0] for each in found)


def test_without_room_in_the_cache_it_goes_straight_there(tmp_path: Path, remote: Remote, shelf: Shelf) -> None:
    with forebay.Cache(tmp_path / "root", budget=256 << 10, min_free=0) as cache:
        found = Checkpoint(remote.url, cache=cache, **remote.how)
        assert found.to_directory(tmp_path / "copy") == str(tmp_path / "copy")
        assert files_of(tmp_path / "copy") == FILES
        assert modes_of(tmp_path / "copy") == {("d", 0o777 & ~umask()), ("f", 0o666 & ~umask())}
        assert shelf.sent == TOTAL
        assert cache.stats().bytes_reserved == 0
        copied = found.to_directory()
        assert files_of(copied) == FILES
        shutil.rmtree(copied)
    assert sorted(os.listdir(tmp_path)) == ["copy", "root", "shelf"]


def test_where_nothing_is_kept_it_goes_straight_there(tmp_path: Path, remote: Remote) -> None:
    with forebay.Cache(tmp_path / "root", enabled=False) as cache:
        found = Checkpoint(remote.url, cache=cache, **remote.how)
        found.to_directory(tmp_path / "copy", include="sub/")
        assert files_of(tmp_path / "copy") == {name: body for name, body in FILES.items() if name.startswith("sub/")}
        with pytest.raises(errors.NoSpace):
            with found.as_directory():
                pass


def test_a_remote_that_fails_leaves_nothing(tmp_path: Path, ckpt: Checkpoint, shelf: Shelf) -> None:
    shelf.fail(f"{CKPT}/sub/deep/optim.pt", "PermissionError", "not yours")
    with pytest.raises(errors.AccessDenied):
        ckpt.to_directory(tmp_path / "copy")
    assert sorted(os.listdir(tmp_path)) == ["root", "shelf"]


def test_times_are_as_good_as_they_can_be(ckpt: Checkpoint, tmp_path: Path) -> None:
    """A second call sees by them that the copy is done, and writes nothing."""
    ckpt.to_directory(tmp_path / "copy")
    before = {name: os.stat(tmp_path / "copy" / name) for name in FILES}
    ckpt.to_directory(tmp_path / "copy")
    after = {name: os.stat(tmp_path / "copy" / name) for name in FILES}
    assert {n: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for n, s in before.items()} == {
        n: (s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for n, s in after.items()
    }


# -- metadata ----------------------------------------------------------------------------------------------------------


def writable(remote: Remote) -> bool:
    return not remote.url.startswith("http")


@some_kinds
def test_metadata(cache: forebay.Cache, remote: Remote) -> None:
    found = Checkpoint(remote.url, cache=cache, **remote.how)
    assert found.get_metadata() == {}
    if not writable(remote):
        with pytest.raises(errors.RemoteError, match="http"):
            found.set_metadata({"a": 1})
        return
    found.set_metadata({"a": 1, "b": {"c": [1, None, "ü"]}})
    assert Checkpoint(remote.url, cache=cache, **remote.how).get_metadata() == {"a": 1, "b": {"c": [1, None, "ü"]}}
    found.update_metadata({"a": 2, "d": True})
    assert found.get_metadata() == {"a": 2, "b": {"c": [1, None, "ü"]}, "d": True}
    found.set_metadata({})
    assert found.get_metadata() == {}


def test_metadata_is_written_as_ray_does(cache: forebay.Cache, remote: Remote, shelf: Shelf) -> None:
    Checkpoint(remote.url, cache=cache, **remote.how).set_metadata({"a": "ü", "b": [1, 2]})
    assert shelf.below(CKPT)[".metadata.json"] == json.dumps({"a": "ü", "b": [1, 2]}).encode()


@pytest.mark.frameworks
def test_either_reads_the_others_metadata(cache: forebay.Cache, local: Path) -> None:
    ray = pytest.importorskip("ray.train")
    ours, theirs = Checkpoint(local, cache=cache), ray.Checkpoint(str(local))
    theirs.set_metadata({"theirs": 1})
    assert ours.get_metadata() == {"theirs": 1}
    ours.update_metadata({"ours": 2})
    assert theirs.get_metadata() == {"theirs": 1, "ours": 2}


def test_metadata_is_asked_of_the_remote(ckpt: Checkpoint, remote: Remote) -> None:
    """Not of a tree that is kept: another node may have changed it."""
    ckpt.set_metadata({"a": 1})
    with ckpt.as_directory():
        remote.put(".metadata.json", b'{"a": 2}')
        assert ckpt.get_metadata() == {"a": 2}


def test_metadata_is_a_part_of_the_tree(ckpt: Checkpoint) -> None:
    with ckpt.as_directory():
        pass
    ckpt.set_metadata({"a": 1})
    with ckpt.as_directory(refresh=True) as path:
        assert json.loads((Path(path) / ".metadata.json").read_bytes()) == {"a": 1}


@pytest.mark.parametrize("wrong", [5, None, [1], "text", {"a": {1, 2}}, {"a": object()}])
def test_metadata_that_is_none(ckpt: Checkpoint, wrong: Any, shelf: Shelf) -> None:
    ckpt.set_metadata({"a": 1})
    for method in (ckpt.set_metadata, ckpt.update_metadata):
        with pytest.raises((ValueError, TypeError)):
            method(wrong)
    assert ckpt.get_metadata() == {"a": 1}


def test_metadata_that_is_damaged(ckpt: Checkpoint, remote: Remote) -> None:
    remote.put(".metadata.json", b"{half")
    with pytest.raises(errors.RemoteError, match=r"\.metadata\.json"):
        ckpt.get_metadata()


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_no_update_is_lost(kind: str, cache: forebay.Cache, tmp_path: Path, request: pytest.FixtureRequest, children: ProcessGroup) -> None:
    """By processes that share a node; on S3 by those of several nodes, too."""
    if kind == "s3":
        request.getfixturevalue("aws").client().create_bucket(Bucket="metadata")
        url = f"s3://metadata/{uuid.uuid4().hex}"
    else:
        (tmp_path / "step").mkdir()
        url = str(tmp_path / "step")

    def update(n: int) -> None:
        root = tmp_path / (f"root-{n}" if kind == "s3" else "root")
        with forebay.Cache(root, budget=MiB, min_free=0) as own:
            found = Checkpoint(url, cache=own)
            for k in range(5):
                found.update_metadata({f"{n}-{k}": k})

    children = [children(lambda n=n: update(n)) for n in range(3)]  # type: ignore[misc]
    for child in children:
        child.result()
    assert Checkpoint(url, cache=cache).get_metadata() == {f"{n}-{k}": k for n in range(3) for k in range(5)}


# -- upload ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory that is to be uploaded."""
    place = tmp_path / "made"
    for name, body in FILES.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(body)
    return place


def destinations(request: pytest.FixtureRequest, kind: str) -> tuple[str, Any]:
    if kind == "s3":
        client = request.getfixturevalue("aws").client()
        client.create_bucket(Bucket="uploads")
        return f"s3://uploads/{uuid.uuid4().hex}/step_1", None
    if kind == "memory":
        return f"memory://{uuid.uuid4().hex}/step_1", None
    if kind == "local":
        return str(request.getfixturevalue("tmp_path") / "uploads" / "step_1"), None
    shelf: Shelf = request.getfixturevalue("shelf")
    return "bucket/step_1", shelf.arrow() if kind == "arrow" else shelf.fsspec()


WRITABLE = ["s3", "memory", "local", "arrow", "fsspec"]


@pytest.mark.parametrize("kind", WRITABLE)
def test_upload(kind: str, cache: forebay.Cache, made: Path, request: pytest.FixtureRequest) -> None:
    url, fs = destinations(request, kind)
    told: list[Progress] = []
    found = Checkpoint.upload(made, url, filesystem=fs, cache=cache, on_progress=told.append)
    assert found == Checkpoint(url, filesystem=fs)
    with found.as_directory(**({"force": True} if kind == "local" else {})) as path:
        assert files_of(path) == FILES
    assert told[-1].done == told[-1].total == TOTAL


@pytest.mark.parametrize("kind", WRITABLE)
def test_what_is_uploaded_again(kind: str, cache: forebay.Cache, made: Path, request: pytest.FixtureRequest) -> None:
    url, fs = destinations(request, kind)
    how: dict[str, Any] = {"refresh": True} | ({"force": True} if kind == "local" else {})
    found = Checkpoint.upload(made, url, filesystem=fs, cache=cache)
    (made / "config.json").write_bytes(b"{changed}")
    (made / "new").write_bytes(b"new")
    (made / "empty").unlink()
    Checkpoint.upload(made, url, filesystem=fs, cache=cache)
    with found.as_directory(**how) as path:
        assert files_of(path) == FILES | {"config.json": b"{changed}", "new": b"new"}
    Checkpoint.upload(made, url, filesystem=fs, cache=cache, delete=True)
    with found.as_directory(**how) as path:
        assert files_of(path) == files_of(made)


def test_only_what_is_missing_is_sent(cache: forebay.Cache, made: Path, shelf: Shelf) -> None:
    fs = shelf.arrow()
    Checkpoint.upload(made, CKPT, filesystem=fs, cache=cache)
    sent = {each.name.removeprefix(f"{CKPT}/") for each in shelf.asked("write")}
    assert sent == {*FILES, MARKER}
    assert shelf.asked("write")[0].name.endswith(MARKER)  # first: it goes on
    assert shelf.asked("write")[-1].name.endswith(MARKER)  # last: it is whole
    shelf.forget()
    (made / "config.json").write_bytes(b"{changed}")
    Checkpoint.upload(made, CKPT, filesystem=fs, cache=cache)
    assert {each.name.removeprefix(f"{CKPT}/") for each in shelf.asked("write")} == {"config.json", MARKER}


def test_kept_it_need_not_be_fetched(cache: forebay.Cache, made: Path, shelf: Shelf) -> None:
    found = Checkpoint.upload(made, CKPT, filesystem=shelf.arrow(), cache=cache, keep=True)
    shelf.forget()
    with found.as_directory() as path:
        assert files_of(path) == FILES
        assert not set(inodes_of(path).values()) & set(inodes_of(made).values())
    with forebay.Cache(cache.path) as other, Checkpoint(CKPT, shelf.arrow(), cache=other).as_directory(refresh=True) as path:
        assert files_of(path) == FILES
    assert {each.name for each in shelf.asked("read")} <= {f"{CKPT}/{MARKER}"}
    shutil.rmtree(made)
    with found.as_directory() as path:
        assert files_of(path) == FILES


@pytest.mark.parametrize("kind", ["s3", "arrow"])
def test_persist(kind: str, cache: forebay.Cache, made: Path, request: pytest.FixtureRequest) -> None:
    url, fs = destinations(request, kind)
    found = Checkpoint.from_directory(made, cache=cache).persist(url, filesystem=fs)
    with found.as_directory() as path:
        assert files_of(path) == FILES


def test_persist_of_a_remote_one(cache: forebay.Cache, ckpt: Checkpoint, shelf: Shelf) -> None:
    """From one remote to another, by the copy of the node."""
    copy = ckpt.persist("elsewhere/step", filesystem=shelf.arrow())
    assert {name: body for name, body in shelf.below("elsewhere/step").items() if name != MARKER} == FILES
    with copy.as_directory() as path:
        assert files_of(path) == FILES


def test_a_directory_that_is_not_there_is_not_uploaded(cache: forebay.Cache, tmp_path: Path, shelf: Shelf) -> None:
    with pytest.raises((errors.NotFound, errors.ConfigError, FileNotFoundError), match="none"):
        Checkpoint.upload(tmp_path / "none", CKPT, filesystem=shelf.arrow(), cache=cache)
    assert shelf.asked("write") == []


def test_http_takes_no_uploads(cache: forebay.Cache, made: Path, server: ScriptedServer) -> None:
    with pytest.raises(errors.RemoteError, match=server.url):
        Checkpoint.upload(made, f"{server.url}/up", cache=cache)


@pytest.mark.parametrize("kind", ["arrow", "s3"])
def test_an_upload_that_is_killed(
    kind: str, cache: forebay.Cache, made: Path, request: pytest.FixtureRequest, children: ProcessGroup, tmp_path: Path
) -> None:
    """No reader takes it for whole; the same call again ends it."""
    url, fs = destinations(request, kind)
    ours, theirs = os.pipe()

    def upload() -> None:
        def told(step: Progress) -> None:
            if step.state == "sending" and step.done > 0:
                os.write(theirs, b".")
                threading.Event().wait(60)

        with forebay.Cache(tmp_path / "root") as own:
            Checkpoint.upload(made, url, filesystem=fs, cache=own, on_progress=told)

    child = children(upload)
    os.read(ours, 1)
    found = Checkpoint(url, filesystem=fs, cache=cache)
    with pytest.raises(errors.Incomplete):
        with found.as_directory():
            pass
    child.kill()
    with pytest.raises(errors.Incomplete):
        with found.as_directory():
            pass
    Checkpoint.upload(made, url, filesystem=fs, cache=cache)
    with found.as_directory() as path:
        assert files_of(path) == FILES
    os.close(ours)
    os.close(theirs)


def test_a_manifest_as_it_is_uploaded_serves_http(cache: forebay.Cache, made: Path, server: ScriptedServer, tmp_path: Path) -> None:
    """What is uploaded to a directory that a web server shows can be read there."""
    Checkpoint.upload(made, tmp_path / "www", cache=cache)
    for name, body in files_of(tmp_path / "www").items():
        from tests.remote_directories import quoted

        server.put(f"/www/{quoted(name)}", body)
    with Checkpoint(f"{server.url}/www", cache=cache).as_directory() as path:
        assert files_of(path) == FILES


def test_what_it_makes_of_links_and_odd_files(cache: forebay.Cache, made: Path, shelf: Shelf) -> None:
    (made / "link").symlink_to("config.json")
    found = Checkpoint.upload(made, CKPT, filesystem=shelf.arrow(), cache=cache)
    with found.as_directory() as path:
        assert files_of(path) == FILES | {"link": b"{}"}
    os.mkfifo(made / "pipe")
    with pytest.raises(errors.ConfigError, match="pipe"):
        Checkpoint.upload(made, CKPT, filesystem=shelf.arrow(), cache=cache)


def test_modes_of_a_copy_follow_the_umask(ckpt: Checkpoint, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        ckpt.to_directory(tmp_path / "copy")
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(tmp_path / "copy").st_mode) == 0o700
    assert modes_of(tmp_path / "copy") == {("d", 0o700), ("f", 0o600)}


def test_content_of_another_run_is_not_mixed_in(cache: forebay.Cache, shelf: Shelf) -> None:
    """Two checkpoints with files of the same names."""
    shelf.fill("run/step_1", {"model": content("1", 5000)})
    shelf.fill("run/step_2", {"model": content("2", 5000)})
    fs = shelf.arrow()
    with Checkpoint("run/step_1", fs, cache=cache).as_directory() as one, Checkpoint("run/step_2", fs, cache=cache).as_directory() as two:
        assert (files_of(one), files_of(two)) == ({"model": content("1", 5000)}, {"model": content("2", 5000)})


def test_http_directory_urls(server: ScriptedServer, cache: forebay.Cache) -> None:
    url = http_directory(server, FILES)
    found = Checkpoint(url, cache=cache)
    assert found.url.rstrip("/") == url.rstrip("/")
    with found.as_directory() as path:
        assert files_of(path) == FILES
