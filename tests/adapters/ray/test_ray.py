"""Ray Train's checkpoints through the cache: the class beside Ray's own, and real trainings of two workers that fail once."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import pickle
import shutil
import signal
import stat
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.train", exc_type=ImportError)
pytest.importorskip("pyarrow")

import fsspec.implementations.dirfs
import fsspec.implementations.local
import ray.train
from pyarrow.fs import FSSpecHandler, LocalFileSystem, PyFileSystem

import forebay
from forebay.adapters.ray import RayCheckpoint, cleanup, copies, from_ray, get_checkpoint, report, to_ray
from forebay.reports import Progress
from tests.harness import QUICK_RAY
from tests.items import until
from tests.processes import Line, ProcessGroup, talk_to
from tests.remote_directories import CKPT, FILES, Remote, arrow, every_kind, files_of, fsspec_etags, s3, write_files
from tests.remote_directories import aws as aws
from tests.remote_directories import remote as remote
from tests.servers.counting import Shelf
from tests.servers.counting import shelf as shelf
from tests.servers.rgw import RgwServer
from tests.servers.rgw import rgw_server as rgw_server

HERE = Path(__file__).parent
REMOVED = ["from_dict", "to_dict", "from_bytes", "to_bytes", "get_internal_representation", "from_uri", "to_uri", "uri", "get_preprocessor"]


@pytest.fixture(autouse=True)
def no_copy_is_held() -> Iterator[None]:
    yield
    no_longer_used()


def no_longer_used() -> None:
    """As if this process had ended, to the shared directories."""
    while copies._held:
        copies._close(copies._held.popitem()[1])


@pytest.fixture
def local(tmp_path: Path) -> Path:
    return write_files(tmp_path / "local")


@pytest.fixture
def checkpoint(remote: Remote, cache: forebay.Cache) -> RayCheckpoint:
    return RayCheckpoint(remote.url, remote.filesystem, cache)


# -- a checkpoint of Ray's ---------------------------------------------------------------------------------------------


def test_our_checkpoint_is_one_of_rays(checkpoint: RayCheckpoint, remote: Remote) -> None:
    assert isinstance(checkpoint, ray.train.Checkpoint)
    assert checkpoint.path == CKPT
    assert checkpoint.filesystem == remote.filesystem
    assert CKPT in repr(checkpoint)
    with pytest.raises(TypeError, match=r"to_directory.*as_directory"):
        os.fspath(checkpoint)


def test_a_url_has_the_path_and_filesystem_that_ray_gives_it(local: Path) -> None:
    for given in (f"file://{local}", str(local), local):
        ours, theirs = RayCheckpoint(given), ray.train.Checkpoint(str(given))
        assert (ours.path, ours.filesystem) == (theirs.path, theirs.filesystem)
    assert RayCheckpoint("s3://bucket/run/step_1").path == "bucket/run/step_1"
    with pytest.raises(ValueError, match="filesystem"):
        RayCheckpoint("s3://bucket/run", LocalFileSystem())


@pytest.mark.parametrize("name", REMOVED)
def test_methods_that_are_gone_say_what_to_use(name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        getattr(RayCheckpoint, name)


def test_a_local_directory_is_read_in_place(local: Path, cache: forebay.Cache) -> None:
    for checkpoint in (
        RayCheckpoint.from_directory(local),
        RayCheckpoint(local, LocalFileSystem(), cache),
        RayCheckpoint(f"file://{local}"),
    ):
        with checkpoint.as_directory() as path:
            assert path == str(local)
    assert files_of(local) == FILES
    assert cache.entries() == []


def test_a_filesystem_of_fsspec_in_the_clothes_of_pyarrow(local: Path, cache: forebay.Cache) -> None:
    """As Ray's users give it for stores that pyarrow does not know."""
    inner = fsspec.implementations.dirfs.DirFileSystem(path=str(local.parent), fs=fsspec.implementations.local.LocalFileSystem())
    checkpoint = RayCheckpoint(local.name, PyFileSystem(FSSpecHandler(inner)), cache)
    with checkpoint.as_directory() as path:
        assert path.startswith(str(cache.path))
        assert files_of(path) == FILES


def test_a_mock_filesystem_by_its_url(cache: forebay.Cache) -> None:
    name = uuid.uuid4().hex
    theirs = ray.train.Checkpoint(f"mock:///{name}")
    if type(theirs.filesystem).__name__ != "_MockFileSystem":
        pytest.skip("this pyarrow has none")
    theirs.filesystem.create_dir(theirs.path)
    with theirs.filesystem.open_output_stream(f"{theirs.path}/a.bin") as file:
        file.write(b"some bytes")
    ours = from_ray(theirs, cache)
    with ours.as_directory() as path:
        assert files_of(path) == {"a.bin": b"some bytes"}


@every_kind
def test_the_directory_of_a_checkpoint_is_in_the_cache_once(remote: Remote, cache: forebay.Cache) -> None:
    checkpoint = RayCheckpoint(remote.url, remote.filesystem, cache)
    with checkpoint.as_directory() as path, RayCheckpoint(remote.url, remote.filesystem, cache).as_directory() as other:
        assert path == other
        assert path.startswith(str(cache.path))
        assert files_of(path) == FILES
        with pytest.raises(PermissionError) if os.geteuid() else contextlib.nullcontext():
            (Path(path) / "new").touch()
        if not os.geteuid():
            (Path(path) / "new").unlink()


def test_the_files_are_read_once_for_all_handles(checkpoint: RayCheckpoint, shelf: Shelf, children: ProcessGroup) -> None:
    sent = pickle.dumps(checkpoint)

    def work() -> dict[str, bytes]:
        with pickle.loads(sent).as_directory() as path:
            return files_of(path)

    children = [children(work) for _ in range(3)]
    assert all(child.result() == FILES for child in children)
    assert Counter(shelf.opens) == Counter(f"{CKPT}/{name}" for name, body in FILES.items() if body)
    with checkpoint.as_directory(include="sub/") as path:
        assert files_of(path) == {name: body for name, body in FILES.items() if name.startswith("sub/")}
    assert len(shelf.opens) == len(FILES) - 1  # an empty one need not be opened


def test_a_private_copy(checkpoint: RayCheckpoint, tmp_path: Path) -> None:
    found = [""] * 4

    def work(number: int) -> None:
        found[number] = checkpoint.to_directory(tmp_path / "copy")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [str(tmp_path / "copy")] * 4
    assert files_of(tmp_path / "copy") == FILES
    (tmp_path / "copy" / "config.json").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        checkpoint.to_directory(tmp_path / "copy", overwrite=False)
    assert Path(checkpoint.to_directory(tmp_path / "copy"), "config.json").read_bytes() == FILES["config.json"]


def copies_of(checkpoint: Any, another: Any, place: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is seen of `to_directory` of a checkpoint; ``another`` handle is of the same directory."""
    monkeypatch.setattr("tempfile.tempdir", str(place / "tmp"))
    monkeypatch.setenv("HOME", str(place))
    (place / "tmp").mkdir(parents=True)
    monkeypatch.chdir(place)
    seen: dict[str, Any] = {}
    one = checkpoint.to_directory()
    seen["where"], seen["files"] = os.path.relpath(one, place).split("/")[0], files_of(one)
    Path(one, "config.json").write_bytes(b"mine")
    Path(one, "notes").write_bytes(b"mine")
    seen["a second call"] = (checkpoint.to_directory() == one, files_of(one))
    there = pickle.loads(pickle.dumps(checkpoint))
    seen["pickled"] = there.to_directory() == one
    if isinstance(there, RayCheckpoint) and there._ours._cache is not None:
        there._ours._cache.close()
    seen["another handle"] = another.to_directory() == one
    shutil.rmtree(one)
    seen["once more"] = (checkpoint.to_directory() == one, files_of(one))
    (place / "mine" / "sub").mkdir(parents=True)
    for name in ("config.json", "notes", "sub/notes"):
        (place / "mine" / name).write_bytes(b"mine")
    seen["returned"] = [checkpoint.to_directory(path) for path in ("~/mine/../mine", "x/./y/../y", Path("z"))]
    seen["there"] = [files_of(place / name) for name in ("mine", "x/y", "z")]
    for folder in (os.path.dirname(one), place / "mine", place / "x", place / "z"):
        shutil.rmtree(folder)
    return json.loads(json.dumps(seen, default=repr).replace(str(place), "PLACE"))


@pytest.mark.parametrize("there", ["local", "remote"])
def test_to_directory_gives_what_ray_s_gives(
    there: str, remote: Remote, local: Path, cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = (str(local), LocalFileSystem()) if there == "local" else (remote.url, remote.filesystem)
    theirs = copies_of(ray.train.Checkpoint(*where), ray.train.Checkpoint(*where), tmp_path / "theirs", monkeypatch)
    for own in (cache, None) if there == "local" else (cache,):
        ours = copies_of(RayCheckpoint(*where, own), RayCheckpoint(*where, own), tmp_path / f"ours-{own is None}", monkeypatch)
        assert ours == theirs
    assert files_of(local) == FILES
    with RayCheckpoint(remote.url, remote.filesystem, cache).as_directory() as path:
        assert files_of(path) == FILES


@pytest.mark.parametrize("metadata", [{"a": b"bytes"}, {"a": object()}, {("a", "b"): 1}, b"bytes"])
def test_what_is_no_json_is_a_type_error_of_both(metadata: Any, checkpoint: RayCheckpoint, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    for each in (ray.train.Checkpoint.from_directory(tmp_path / "theirs"), checkpoint, from_ray(checkpoint)):
        with pytest.raises(TypeError) as caught:
            each.set_metadata(metadata)
    assert isinstance(caught.value, forebay.errors.ConfigError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    assert checkpoint.get_metadata() == {}


def test_a_failed_to_directory_leaves_nothing(cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(FileNotFoundError):
        RayCheckpoint(tmp_path / "none", None, cache).to_directory()
    assert list(files_of(tmp_path / "tmp").values()) == [b""]  # the lock, which goes when this process has ended


def test_report_takes_what_ray_s_takes_in_its_order(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    signature = inspect.signature(ray.train.report)

    def record(*args: Any, **how: Any) -> None:
        told.append(signature.bind(*args, **how).arguments)

    monkeypatch.setattr(ray.train, "report", record)
    checkpoint, mode = forebay.Checkpoint(local), ray.train.CheckpointUploadMode.SYNC
    report({"a": 1})
    report({"a": 1}, checkpoint, "dir")
    report({"a": 1}, checkpoint=checkpoint, checkpoint_dir_name="dir", checkpoint_upload_mode=mode)
    report({"a": 1}, checkpoint, "dir", mode)
    assert all(each["metrics"] == {"a": 1} for each in told)
    assert [each.get("checkpoint_dir_name") for each in told] == [None, "dir", "dir", "dir"]
    assert [each.get("checkpoint_upload_mode") for each in told] == [None, None, mode, mode]
    assert [type(each.get("checkpoint")) for each in told] == [type(None), RayCheckpoint, RayCheckpoint, RayCheckpoint]


def test_what_ray_reads_of_it_is_the_same(checkpoint: RayCheckpoint) -> None:
    """Ray copies by path and filesystem, whatever the class."""
    theirs = ray.train.Checkpoint(checkpoint.path, checkpoint.filesystem)
    with theirs.as_directory() as path:
        assert files_of(path) == FILES


@pytest.mark.parametrize("remote", [arrow, fsspec_etags, s3], ids=lambda make: make.__name__, indirect=True)
def test_each_reads_the_other_s_metadata(remote: Remote, cache: forebay.Cache) -> None:
    ours = RayCheckpoint(remote.url, remote.filesystem, cache)
    theirs = ray.train.Checkpoint(ours.path, ours.filesystem)
    if remote.filesystem is None:
        theirs = ray.train.Checkpoint(
            ours.path, PyFileSystem(FSSpecHandler(fsspec.filesystem("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])))
        )
    assert ours.get_metadata() == theirs.get_metadata() == {}
    ours.set_metadata({"step": 1, "by": "forebay"})
    assert theirs.get_metadata() == {"step": 1, "by": "forebay"}
    theirs.update_metadata({"step": 2})
    assert ours.get_metadata() == {"step": 2, "by": "forebay"}
    ours.update_metadata({"more": [1, None, "ü"]})
    assert theirs.get_metadata() == {"step": 2, "by": "forebay", "more": [1, None, "ü"]}


# -- from one to the other ---------------------------------------------------------------------------------------------


def test_checkpoints_convert_to_rays_and_back(checkpoint: RayCheckpoint, cache: forebay.Cache, remote: Remote, tmp_path: Path) -> None:
    ours = forebay.Checkpoint(remote.url, remote.filesystem, cache)
    assert isinstance(to_ray(ours), RayCheckpoint)
    assert from_ray(to_ray(ours)) is ours
    assert from_ray(ray.train.Checkpoint(checkpoint.path, checkpoint.filesystem), cache) == ours
    with forebay.Cache(tmp_path / "other") as other:
        assert from_ray(checkpoint, other).cache is other


def test_a_remote_that_pyarrow_does_not_know_goes_to_ray_in_fsspec_s_clothes(cache: forebay.Cache) -> None:
    name = uuid.uuid4().hex
    fsspec.filesystem("memory").pipe_file(f"/{name}/a.bin", b"some bytes")
    checkpoint = to_ray(forebay.Checkpoint(f"memory://{name}", cache=cache))
    with checkpoint.filesystem.open_input_file(f"{checkpoint.path}/a.bin") as file:
        assert file.read() == b"some bytes"
    with checkpoint.as_directory() as path:
        assert files_of(path) == {"a.bin": b"some bytes"}


def test_a_checkpoint_is_pickled_with_its_cache(checkpoint: RayCheckpoint, cache: forebay.Cache) -> None:
    there = pickle.loads(pickle.dumps(checkpoint))
    assert type(there) is RayCheckpoint
    assert (there.path, there.url, there.filesystem) == (checkpoint.path, checkpoint.url, checkpoint.filesystem)
    assert from_ray(there).cache.path == cache.path
    from_ray(there).cache.close()


# -- what Ray's own promise --------------------------------------------------------------------------------------------


def both(path: str, filesystem: Any, cache: forebay.Cache) -> tuple[ray.train.Checkpoint, RayCheckpoint]:
    return ray.train.Checkpoint(path, filesystem), RayCheckpoint(path, filesystem, cache)


def test_a_run_that_is_started_again_under_its_name_is_asked_for(
    shelf: Shelf, cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    shelf.fill(CKPT, {"model.pt": b"of the first run", "same.bin": b"same"})
    checkpoint = RayCheckpoint(CKPT, shelf.arrow(), cache)
    assert files_of(checkpoint.to_directory())["model.pt"] == b"of the first run"
    with checkpoint.as_directory() as path:
        assert files_of(path)["model.pt"] == b"of the first run"
    shelf.put(f"{CKPT}/model.pt", b"of the second run")
    shelf.forget()
    assert files_of(checkpoint.to_directory(max_age=300))["model.pt"] == b"of the first run"
    with checkpoint.as_directory(max_age=300) as path:
        assert files_of(path)["model.pt"] == b"of the first run"
    assert shelf.opens == []
    for reader in (checkpoint, RayCheckpoint(CKPT, shelf.arrow(), cache)):
        assert files_of(reader.to_directory()) == {"model.pt": b"of the second run", "same.bin": b"same"}
        with reader.as_directory() as path:
            assert files_of(path)["model.pt"] == b"of the second run"
    assert shelf.opens == [f"{CKPT}/model.pt"]  # what is current is not fetched again


def test_processes_that_ask_at_the_same_time_share_an_answer(checkpoint: RayCheckpoint, shelf: Shelf) -> None:
    """One is asking when the others begin. What it was told may be older than their calls: one of them asks for all."""
    shelf.stall(f"{CKPT}/config.json")

    def work(line: Line) -> dict[str, bytes]:
        def tell(progress: Progress) -> None:
            if progress.state == "waiting":
                line.say("waits")

        with checkpoint.as_directory(on_progress=tell) as path:
            return files_of(path)

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(talk_to(work))
        until(lambda: bool(shelf.asked("stalled")))
        others = [stack.enter_context(talk_to(work)) for _ in range(4)]
        assert [child.hear() for child in others] == ["waits"] * 4
        assert len(shelf.asked("list", CKPT)) == 1
        shelf.go(f"{CKPT}/config.json")
        assert [child.result() for child in (first, *others)] == [FILES] * 5
    assert len(shelf.asked("list", CKPT)) == 2


def test_the_checkpoint_of_a_worker_equals_the_last_one(
    checkpoint: RayCheckpoint, cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: ProcessGroup
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    theirs = ray.train.Checkpoint(checkpoint.path, checkpoint.filesystem)
    theirs.note = "of the user"
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: theirs)
    one, other = get_checkpoint(cache), get_checkpoint(cache)
    assert one is not None
    assert other is not None
    assert one == other
    there = pickle.loads(pickle.dumps(one))
    assert len({one, other, there}) == 1
    from_ray(there).cache.close()
    assert one.note == other.note == "of the user"
    assert one != RayCheckpoint(checkpoint.path, checkpoint.filesystem, cache)
    assert one != theirs
    where = one.to_directory()
    sent = pickle.dumps(theirs)

    def work() -> str:
        monkeypatch.setattr(ray.train, "get_checkpoint", lambda: pickle.loads(sent))
        found = get_checkpoint(cache)
        assert found is not None
        return found.to_directory()

    assert other.to_directory() == where
    assert [child.result() for child in [children(work) for _ in range(3)]] == [where] * 3
    monkeypatch.setattr(ray.train, "get_checkpoint", lambda: one)  # Ray may return what was reported
    assert get_checkpoint() is one
    monkeypatch.undo()  # it refers to the cache


@pytest.mark.parametrize("ends", ["in order", "killed"])
def test_the_shared_directory_goes_with_its_last_process(
    ends: str, checkpoint: RayCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))

    def work(line: Line) -> None:
        Path(checkpoint.to_directory(), "config.json").write_bytes(b"mine")
        line.say()
        line.hear()

    workers = [talk_to(work) for _ in range(2)]
    for worker in workers:
        worker.hear()
    (where,) = place.iterdir()
    assert stat.S_IMODE(where.stat().st_mode) == 0o700
    for worker in workers:
        assert Path(where, "checkpoint", "config.json").read_bytes() in (b"mine", FILES["config.json"])
        if ends == "killed":
            worker.kill()
        else:
            worker.say()
        worker.wait()
        worker.close()
    until(lambda: not list(place.iterdir()))
    with checkpoint.as_directory() as path:
        assert files_of(path) == FILES


def test_a_child_of_a_fork_keeps_the_shared_directory(checkpoint: RayCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    where = checkpoint.to_directory()

    def work(line: Line) -> dict[str, bytes]:
        line.say()
        line.hear()
        return files_of(where)

    with talk_to(work) as child:
        child.hear()
        no_longer_used()  # as if this process had ended
        copies.hold("another")  # removes what nobody uses
        child.say()
        assert child.result() == FILES
    until(lambda: not os.path.exists(where))


def test_what_killed_processes_left_is_removed_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the process that waits to remove it was killed, too: at whatever step."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = [tmp_path / f"{cleanup.PREFIX}{uuid.uuid4().hex}{suffix}" for suffix in ("", "", "", ".17")]
    for folder in left:
        folder.mkdir()
    (left[1] / "lock").touch()
    (left[2] / "lock").touch()
    (left[2] / "checkpoint").mkdir()
    (left[3] / "checkpoint").mkdir()
    of_the_user = {"forebay-checkpoint-of-the-user", f"{cleanup.PREFIX}results", f"{cleanup.PREFIX}a1b2c3d4"}
    for name in of_the_user:
        (tmp_path / name).mkdir()
    used = copies.hold(uuid.uuid4().hex)
    assert {path.name for path in tmp_path.iterdir()} == {used.name, *of_the_user}


def test_a_program_that_closes_its_descriptors_gets_the_shared_directory_again(
    checkpoint: RayCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that becomes a daemon does."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    where = checkpoint.to_directory()
    os.close(copies._held[os.path.dirname(where)][0])
    until(lambda: not os.path.exists(where))
    assert files_of(checkpoint.to_directory()) == FILES


def test_a_process_goes_through_many_directories(
    shelf: Shelf, cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process watches them all, and what the caller has removed is held no longer."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    shelf.fill(CKPT, {"a": b"1"})
    filesystem = shelf.arrow()
    kept = RayCheckpoint(CKPT, filesystem, cache).to_directory()
    for _ in range(5):
        shutil.rmtree(RayCheckpoint(CKPT, filesystem, cache).to_directory())
    copies.hold(uuid.uuid4().hex)
    assert len(copies._held) == 2
    until(lambda: len([path for path in tmp_path.iterdir() if path.name.startswith(cleanup.PREFIX)]) == 2)

    def watching() -> int:
        of_all = [words_of(process) for process in Path("/proc").glob("[0-9]*")]
        return sum(words[-1:] == [str(tmp_path)] and words[-2].endswith("cleanup.py") for words in of_all)

    until(lambda: watching() == 1)
    assert files_of(kept) == {"a": b"1"}


def words_of(process: Path) -> list[str]:
    with contextlib.suppress(OSError):  # gone meanwhile
        return (process / "cmdline").read_text().rstrip("\0").split("\0")
    return []


def test_a_temporary_directory_that_is_missing_is_made(checkpoint: RayCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "not" / "there"))
    assert files_of(checkpoint.to_directory()) == FILES


def test_an_embedded_interpreter_does_not_know_its_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(sys, "executable", None)
    assert copies.hold("a").is_dir()


def test_the_shared_directory_of_another_user_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{cleanup.PREFIX}a").symlink_to("elsewhere")
    (tmp_path / f"{cleanup.PREFIX}b").touch()
    for name in "ab":
        with pytest.raises(forebay.errors.Foreign):
            copies.hold(name)
    assert list((tmp_path / "elsewhere").iterdir()) == []


class Noted(RayCheckpoint):
    """A class of the user, with a constructor, an attribute and a slot of its own."""

    __slots__ = ("slot",)

    def __init__(self, path: str, filesystem: Any, cache: forebay.Cache, *, note: str) -> None:
        super().__init__(path, filesystem, cache)
        self.note = note


class NotedOfForebay(forebay.Checkpoint):
    __slots__ = ("slot",)

    def __init__(self, path: str, filesystem: Any, cache: forebay.Cache, *, note: str) -> None:
        super().__init__(path, filesystem, cache)
        self.note = note


@pytest.mark.parametrize("kind", [Noted, NotedOfForebay])
def test_attributes_and_subclasses_are_pickled(kind: Any, checkpoint: RayCheckpoint, cache: forebay.Cache) -> None:
    one = kind(checkpoint.path, checkpoint.filesystem, cache, note="mine")
    one.more, one.slot = [1, 2], "in it"
    assert one.filesystem is not None
    there = pickle.loads(pickle.dumps(one))
    assert type(there) is kind
    assert (there, there.note, there.more, there.slot) == (one, "mine", [1, 2], "in it")
    with there.as_directory() as path:
        assert files_of(path) == FILES
    (there._ours if kind is Noted else there).cache.close()


def test_path_and_filesystem_can_be_set(checkpoint: RayCheckpoint, local: Path, shelf: Shelf) -> None:
    shelf.fill("moved/here", {"a": b"moved"})
    before = hash(checkpoint)
    checkpoint.path = "moved/here"
    assert checkpoint.path == "moved/here"
    with checkpoint.as_directory() as path:
        assert files_of(path) == {"a": b"moved"}
    checkpoint.filesystem = LocalFileSystem()
    checkpoint.path = str(local)
    with checkpoint.as_directory() as path:
        assert (path, files_of(path)) == (str(local), FILES)
    there = pickle.loads(pickle.dumps(checkpoint))
    assert (there.path, hash(there)) == (str(local), before)
    from_ray(there).cache.close()


def test_an_empty_checkpoint_and_empty_directories_are_as_ray_gives_them(shelf: Shelf, cache: forebay.Cache, tmp_path: Path) -> None:
    for name in ("empty", "with/none", "with/deep/none"):
        shelf.path(name).mkdir(parents=True)
    shelf.put("with/file", b"body")
    for name in ("empty", "with"):
        theirs, ours = both(name, shelf.arrow(), cache)
        found = [seen(each.to_directory(tmp_path / f"{name}-{number}")) for number, each in enumerate((theirs, ours))]
        with ours.as_directory() as path:
            assert found == [seen(path)] * 2


def seen(top: str) -> list[str]:
    return sorted(str(path.relative_to(top)) for path in Path(top).rglob("*"))


@pytest.mark.parametrize("damage", [b"{", b"", b"\xff{}"])
def test_damaged_metadata_raises_what_ray_raises(damage: bytes, shelf: Shelf, cache: forebay.Cache) -> None:
    shelf.fill(CKPT, {"a": b"1", ".metadata.json": damage})
    theirs, ours = both(CKPT, shelf.arrow(), cache)
    with pytest.raises(ValueError) as raised:
        theirs.get_metadata()
    assert isinstance(raised.value, json.JSONDecodeError | UnicodeDecodeError)
    for call in (ours.get_metadata, lambda: ours.update_metadata({"a": 1})):
        with pytest.raises(json.JSONDecodeError, match="set_metadata") as caught:
            call()
        assert isinstance(caught.value, forebay.errors.RemoteProtocolError)
        again = pickle.loads(pickle.dumps(caught.value))
        assert (str(again), again.pos) == (str(caught.value), caught.value.pos)
    ours.set_metadata({"a": 2})
    assert theirs.get_metadata() == {"a": 2}


# -- real trainings ----------------------------------------------------------------------------------------------------

of_a_training = pytest.mark.timeout(600)


MARK = "TEST_OF_RAY"


def end_all(mark: str) -> None:
    """The processes that Ray started for us, of which some outlive it."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                os.kill(int(process.name), signal.SIGKILL)


def trained(place: Path, told: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What trainings with these storages saw: a small Ray of its own for all of them."""
    for name, each in told.items():
        each |= {"root": str(place / f"root-{name}"), "log": str(place / f"log-{name}")}
    own = ("AWS_", "FOREBAY_", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own) and "proxy" not in name.lower()}
    quick = QUICK_RAY | {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
    paths = {"PYTHONPATH": os.pathsep.join([str(HERE.parents[2] / "src"), str(HERE.parents[2])])}
    words = [sys.executable, str(HERE / "ray_runs.py"), json.dumps(told)]
    try:
        done = subprocess.run(
            words, env=kept | quick | paths | {MARK: str(place)}, capture_output=True, text=True, timeout=540, check=False
        )
    finally:
        end_all(str(place))
    assert done.returncode == 0, done.stderr[-8000:]
    return {"told": told, **json.loads(done.stdout.splitlines()[-1])}


def went_on(seen: dict[str, Any]) -> None:
    """Both workers, from the same step; Ray may lose the report that a failure comes right behind."""
    assert [each["step"] for each in seen["resumed"]] in ([1, 1], [0, 0])
    assert all(each["isinstance"] for each in seen["resumed"])
    assert seen["metrics"]["step"] == seen["last"]["step"] == 3
    assert seen["metadata"] == {"by": "forebay"}


def have_one_copy(seen: dict[str, Any], root: str) -> None:
    one, other = seen["resumed"]
    assert one["writable"] == other["writable"]
    assert one["same"]
    assert other["same"]
    until(lambda: not os.path.exists(one["writable"]))  # Ray has killed its workers
    assert (one["folder"], one["inode"]) == (other["folder"], other["inode"])
    assert one["folder"].startswith(root)


@pytest.mark.rotates
@of_a_training
def test_a_training_that_fails_once_goes_on_from_one_copy(tmp_path: Path) -> None:
    """With its storage on a filesystem object of pyarrow, which counts. Then a function of a `Tuner` does the same."""
    where = {"storage": "bucket/runs", "shelf": str(tmp_path / "shelf")}
    seen = trained(tmp_path, {"there": where, "tune": {"storage": "bucket/tuned", "shelf": str(tmp_path / "tuned")}})
    assert seen["tune"]["last"]["step"] == seen["tune"]["metrics"]["step"] == 3
    assert seen["tune"]["last"]["folder"].startswith(seen["told"]["tune"]["root"])
    went_on(seen["there"])
    have_one_copy(seen["there"], seen["told"]["there"]["root"])
    opened = Counter(name for name in Shelf(tmp_path / "shelf").opens if name.endswith(("weights.bin", "step.json")))
    assert len(opened) == 4  # of the checkpoint that the workers went on from, and of the last
    assert set(opened.values()) == {1}


@pytest.mark.stress
@of_a_training
def test_a_training_with_its_storage_on_this_host(tmp_path: Path) -> None:
    seen = trained(tmp_path, {"here": {"storage": str(tmp_path / "storage")}})
    went_on(seen["here"])
    assert all(each["folder"].startswith(str(tmp_path / "storage")) for each in seen["here"]["resumed"])
    with forebay.Cache(seen["told"]["here"]["root"]) as cache:
        assert cache.entries() == []


@pytest.mark.stress
@of_a_training
def test_a_training_with_its_storage_on_s3(tmp_path: Path, rgw_server: RgwServer) -> None:
    rgw_server.client().create_bucket(Bucket="ray-runs")
    keys = {"key": rgw_server.key, "secret": rgw_server.secret, "endpoint_url": rgw_server.url}
    seen = trained(tmp_path, {"s3": {"storage": f"ray-runs/{uuid.uuid4().hex}", "s3": keys}})
    went_on(seen["s3"])
    have_one_copy(seen["s3"], seen["told"]["s3"]["root"])


def test_outside_of_a_training_ray_says_so() -> None:
    from forebay.adapters import ray as ours

    with pytest.raises(RuntimeError):
        ours.get_checkpoint()
