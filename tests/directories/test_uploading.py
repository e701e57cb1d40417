"""A local directory becomes a remote one: all of it or nothing for who reads, and only what is missing for who repeats it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Checkpoint, errors
from forebay._engine.null_store import NullStore
from forebay.directories import uploading
from forebay.directories.location import RemoteDirectory, locate
from forebay.directories.uploading import Uploaded, upload
from forebay.fetch import Fetcher
from forebay.remote import RemoteOptions
from forebay.testing import MemorySink, ScriptedServer
from tests.items import until
from tests.processes import HANG, Gate, ProcessGroup
from tests.remote_directories import (  # noqa: F401 (fixtures)
    CKPT,
    FILES,
    MARKER,
    TOTAL,
    Remote,
    arrow,
    arrow_helper,
    aws,
    checksum_of,
    files_of,
    fsspec_etags,
    fsspec_helper,
    memory,
    s3,
    write_files,
)
from tests.servers.counting import Shelf, content, shelf  # noqa: F401 (a fixture)
from tests.servers.rgw import rgw_server  # noqa: F401 (a fixture)

NAMES = sorted(FILES)


def local_folder(request: pytest.FixtureRequest) -> Remote:
    folder: Path = request.getfixturevalue("tmp_path") / "far" / "step_100"

    def put(name: str, body: bytes) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)

    return Remote(str(folder), None, put, lambda name: (folder / name).unlink())


every_kind = pytest.mark.parametrize(
    "far", [arrow, arrow_helper, fsspec_etags, fsspec_helper, memory, s3, local_folder], ids=lambda make: make.__name__, indirect=True
)


some_kinds = pytest.mark.parametrize("far", [arrow, s3, local_folder], ids=lambda make: make.__name__, indirect=True)


@pytest.fixture
def far(request: pytest.FixtureRequest) -> Remote:
    """An empty remote directory: on a counting pyarrow filesystem, unless the test says ``@every_kind``."""
    found: Remote = getattr(request, "param", arrow)(request)
    return found


@pytest.fixture
def near(tmp_path: Path) -> Path:
    """The local directory, with FILES."""
    return write_files(tmp_path / "near")


NO_CACHE = Fetcher(NullStore(), RemoteOptions())


@pytest.fixture
def place(far: Remote) -> RemoteDirectory:
    return locate(NO_CACHE, far.url, far.filesystem)


class Watched:
    """A remote that notes what is written, in order, and lets a test step in before and after each write."""

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self.written: list[str] = []
        self.looked = threading.Event()
        self.before: Callable[[str], object] = lambda name: None
        self.after: Callable[[str], object] = lambda name: None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._remote, name)

    def stat(self, url: str, **how: Any) -> Any:
        looked = self.looked
        try:
            return self._remote.stat(url, **how)
        finally:
            looked.set()

    def write(self, url: str, source: Any, **how: Any) -> Any:
        name = url.partition("step_100/")[2]
        self.before(name)
        found = self._remote.write(url, source, **how)
        self.written.append(name)
        self.after(name)
        return found


def watched(place: RemoteDirectory) -> tuple[RemoteDirectory, Watched]:
    found = Watched(place.remote)
    return dataclasses.replace(place, remote=found), found


def there(place: RemoteDirectory) -> dict[str, bytes]:
    """What lies in the remote directory."""
    found = {}
    for name, info in place.list():
        if info.is_folder:
            continue
        sink = MemorySink()
        place.remote.fetch(place.object(name), sink)
        found[name] = bytes(sink.data)
    return found


def mark(place: RemoteDirectory) -> dict[str, Any]:
    return json.loads(there(place)[MARKER])  # type: ignore[no-any-return]


def change(folder: Path, name: str, body: bytes) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(body)


# -- all of it -------------------------------------------------------------------------------------------------------


@every_kind
def test_upload_and_again(place: RemoteDirectory, near: Path) -> None:
    place, remote = watched(place)
    done = upload(place, near)
    assert {name: body for name, body in there(place).items() if name != MARKER} == FILES
    assert (remote.written[0], remote.written[-1]) == (MARKER, MARKER)
    assert sorted(remote.written[1:-1]) == sorted(done.sent) == NAMES
    assert (done.bytes, done.removed) == (TOTAL, ())
    assert [(file.name, file.size, file.digest, path) for file, path in done.files] == [
        (name, len(FILES[name]), checksum_of(FILES[name]).hex(), str(near / name)) for name in NAMES
    ]
    told = mark(place)
    assert (told["forebay"], told["complete"], sorted(told["files"])) == (1, True, NAMES)
    listed = {name: info.validator for name, info in place.list()}
    assert {name: (file["size"], file["xxh3"], file["etag"]) for name, file in told["files"].items()} == {
        name: (len(body), checksum_of(body).hex(), listed[name]) for name, body in FILES.items()
    }
    remote.written.clear()
    assert upload(place, near) == Uploaded(done.files)
    assert remote.written == []


@every_kind
def test_only_what_changed_is_sent(place: RemoteDirectory, near: Path) -> None:
    upload(place, near)
    change(near, "config.json", b"[]")  # of the same size
    change(near, "new/file", b"new")
    (near / "empty").unlink()
    place, remote = watched(place)
    done = upload(place, near)
    assert sorted(remote.written[1:-1]) == sorted(done.sent) == ["config.json", "new/file"]
    assert done.bytes == 5
    assert there(place).keys() >= {"empty"}  # nobody said that it should go
    assert "empty" not in mark(place)["files"]
    done = upload(place, near, delete=True)
    assert (done.sent, done.removed) == ((), ("empty",))
    assert {name: body for name, body in there(place).items() if name != MARKER} == files_of(near)


@some_kinds
def test_a_reader_gets_it(cache: forebay.Cache, place: RemoteDirectory, far: Remote, near: Path) -> None:
    upload(place, near)
    with cache.directory(far.url, force=True, **far.how) as tree:
        assert {name: body for name, body in files_of(tree).items() if name != MARKER} == FILES


def test_a_large_file_goes_in_parts(aws: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    aws.client().create_bucket(Bucket="uploads")
    bodies = {f"large-{n}": content(f"large-{n}", (17 << 20) + n) for n in range(3)} | {"small": b"s"}
    for name, body in bodies.items():
        change(tmp_path / "near", name, body)
    place, remote = watched(locate(NO_CACHE, f"s3://uploads/{uuid.uuid4().hex}/step_100"))
    now: set[str] = set()
    most: list[int] = []

    def enter(name: str) -> None:
        now.add(name)
        most.append(sum(each.startswith("large") for each in now))

    remote.before, remote.after = enter, now.discard
    upload(place, tmp_path / "near")
    assert {name: body for name, body in there(place).items() if name != MARKER} == bodies
    assert max(most) <= 2  # each of them has several parts in memory
    assert upload(place, tmp_path / "near").sent == ()


@pytest.mark.processes
def test_what_another_tool_brought_to_s3_is_not_sent(near: Path, request: pytest.FixtureRequest) -> None:
    far = s3(request)
    for name, body in FILES.items():
        far.put(name, body if name != "config.json" else b"[]")
    assert upload(locate(NO_CACHE, far.url), near).sent == ("config.json",)


def test_metadata_goes_along_and_is_not_noted(place: RemoteDirectory, near: Path) -> None:
    change(near, ".metadata.json", b'{"step": 1}')
    upload(place, near)
    assert there(place)[".metadata.json"] == b'{"step": 1}'
    assert ".metadata.json" not in mark(place)["files"]
    assert upload(place, near).sent == ()
    change(near, ".metadata.json", b'{"step": 2}')
    assert upload(place, near).sent == (".metadata.json",)
    (near / ".metadata.json").unlink()
    assert upload(place, near, delete=True).removed == ()


def test_progress(place: RemoteDirectory, near: Path) -> None:
    told: list[tuple[str, int, int]] = []
    upload(place, near, tell=lambda *step: told.append(step))
    assert [state for state, _, _ in told] == sorted(state for state, _, _ in told)  # first it reads, then it sends
    assert {total for _, _, total in told} == {TOTAL}
    assert told[-1] == ("sending", TOTAL, TOTAL)
    change(near, "config.json", b"[]")
    told.clear()
    upload(place, near, tell=lambda *step: told.append(step))
    assert ("sending", TOTAL, TOTAL) in told


# -- what is no directory to be uploaded -----------------------------------------------------------------------------


def test_a_link_to_a_file_is_followed(place: RemoteDirectory, near: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(b"linked")
    (near / "link").symlink_to(tmp_path / "elsewhere")
    upload(place, near)
    assert there(place)["link"] == b"linked"


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda near: (near / "x").symlink_to(near / "sub"), "x cannot be uploaded: a symbolic link to a directory"),
        (lambda near: (near / "x").symlink_to(near / "none"), "this symbolic link leads to no file"),
        (lambda near: (near / "x").symlink_to("x"), "this symbolic link leads to no file"),
        (lambda near: os.mkfifo(near / "x"), "a socket, a pipe or a device"),
        (lambda near: make_socket(near / "x"), "a socket, a pipe or a device"),
        (lambda near: change(near, "a\nb", b""), r"'a\\nb' is a name that readers refuse"),
    ],
)
def test_what_cannot_be_uploaded(place: RemoteDirectory, near: Path, make: Callable[[Path], object], told: str) -> None:
    make(near)
    with pytest.raises(errors.ConfigError, match=told):
        upload(place, near)
    assert there(place) == {}


def test_a_directory_that_is_none(place: RemoteDirectory, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        upload(place, tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        upload(place, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.ConfigError, match="holds no file"):
        upload(place, tmp_path / "empty")


def test_a_directory_and_itself(near: Path) -> None:
    for target in (near, near / "sub" / "copy", near.parent):
        with pytest.raises(errors.ConfigError, match="one lies in the other"):
            upload(locate(NO_CACHE, target), near, delete=True)
    assert files_of(near) == FILES


def test_marks_and_leftovers_are_none_of_its_files(near: Path, tmp_path: Path) -> None:
    upload(locate(NO_CACHE, tmp_path / "one"), near)
    change(tmp_path / "one", ".x.123.forebay-part", b"half")
    change(tmp_path / "one", "sub/.copy.forebay-part/config.json", b"half of a private copy")
    upload(locate(NO_CACHE, tmp_path / "two"), tmp_path / "one")
    assert sorted(files_of(tmp_path / "two")) == sorted([MARKER, *NAMES])


@pytest.mark.processes
def test_objects_for_directories_do_no_harm(request: pytest.FixtureRequest, cache: forebay.Cache, near: Path) -> None:
    far = s3(request)
    for name in ("", "sub/", "sub/deep/"):
        far.put(name, b"")
    upload(locate(NO_CACHE, far.url), near, delete=True)
    with cache.directory(far.url) as tree:
        assert files_of(tree) == FILES
    far.put("bad/", b"not empty")
    with pytest.raises(errors.BadListing):
        upload(locate(NO_CACHE, far.url), near)
    assert upload(locate(NO_CACHE, far.url), near, delete=True).removed == ("bad/",)


def test_a_linked_directory_is_written_to_but_nothing_in_it_is_removed(tmp_path: Path) -> None:
    near, far, linked = (tmp_path / name for name in ("near", "far", "linked"))
    for folder in (near / "deep", far, linked):
        folder.mkdir(parents=True)
    (far / "deep").symlink_to(linked)
    (linked / "of_another").write_bytes(b"mine")
    (far / "old").write_bytes(b"old")
    (near / "deep" / "a").write_bytes(b"new")
    assert upload(locate(NO_CACHE, str(far)), near, delete=True).removed == ("old",)
    assert sorted(os.listdir(linked)) == ["a", "of_another"]


def test_http(near: Path, server: ScriptedServer) -> None:
    with pytest.raises(errors.Unsupported, match="over HTTP"):
        upload(locate(NO_CACHE, f"{server.url}/run/"), near)
    assert server.objects == {}


@pytest.mark.parametrize("far", [memory, s3, local_folder], ids=lambda make: make.__name__, indirect=True)
@pytest.mark.parametrize("name", ["config.json/below", "sub"])
def test_a_file_and_a_directory_of_one_name(place: RemoteDirectory, far: Remote, near: Path, name: str) -> None:
    far.put(name, b"old")
    place, remote = watched(place)
    with pytest.raises(errors.BadListing, match="a file and a directory"):
        upload(place, near)
    assert remote.written == []
    if not far.url.startswith("memory:"):  # which does not forget that it had a directory
        assert upload(place, near, delete=True).removed == (name,)
        assert {name: body for name, body in there(place).items() if name != MARKER} == FILES


def test_no_empty_directory_is_left(near: Path, tmp_path: Path) -> None:
    place = locate(NO_CACHE, tmp_path / "far")
    upload(place, near)
    shutil.rmtree(near / "sub" / "deep")
    upload(place, near, delete=True)
    assert [str(path.relative_to(tmp_path / "far")) for path in (tmp_path / "far").rglob("*") if path.is_dir()] == ["sub"]


@pytest.mark.parametrize(
    ("body", "told"), [(b"{", "damaged"), (b"[]", "damaged"), (b'{"forebay": 2, "complete": true, "files": {}}', "newer")]
)
def test_a_mark_that_cannot_be_read(place: RemoteDirectory, far: Remote, near: Path, body: bytes, told: str) -> None:
    far.put(MARKER, body)
    with pytest.raises(errors.RemoteProtocolError, match=told):
        upload(place, near)
    assert there(place) == {MARKER: body}


def test_a_mark_on_this_host_is_told_with_its_path(near: Path, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / MARKER).write_bytes(b"{")
    for call in (lambda: upload(locate(NO_CACHE, tmp_path / "far"), near), Checkpoint(tmp_path / "far").to_directory):
        with pytest.raises(errors.RemoteProtocolError, match=f"{(tmp_path / 'far' / MARKER).as_uri()} is damaged"):
            call()


# -- it changes meanwhile --------------------------------------------------------------------------------------------


@some_kinds
def test_a_file_that_changes_while_it_is_sent(cache: forebay.Cache, place: RemoteDirectory, far: Remote, near: Path) -> None:
    place, remote = watched(place)
    name, old = "config.json", FILES["config.json"]
    remote.after = lambda written: change(near, name, b"[]") if written == name else None
    with pytest.raises(errors.SourceChanged, match=r"config\.json changed while being uploaded"):
        upload(place, near)
    assert name not in there(place)  # what was sent may be neither the old nor the new
    with pytest.raises(errors.Incomplete):
        cache.directory(far.url, force=True, **far.how)
    remote.after = lambda written: None
    change(near, name, old)
    assert name in upload(place, near).sent
    assert there(place)[name] == old


def test_a_file_that_changes_before_it_is_sent(place: RemoteDirectory, near: Path) -> None:
    place, remote = watched(place)
    remote.after = lambda written: change(near, "config.json", b"[]") if written == MARKER else None
    with pytest.raises(errors.SourceChanged, match=r"config\.json"):
        upload(place, near, jobs=1)
    assert "config.json" not in remote.written


def test_a_file_that_goes_before_it_is_sent(place: RemoteDirectory, near: Path) -> None:
    place, remote = watched(place)
    remote.after = lambda written: (near / "config.json").unlink(missing_ok=True)
    with pytest.raises(errors.SourceChanged, match=r"config\.json"):
        upload(place, near, jobs=1)


def test_what_goes_while_a_directory_is_scanned(place: RemoteDirectory, near: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, gone = os.scandir, near / "sub" / "deep"

    def scanned(folder: str) -> Any:
        with scan(folder) as entries:
            found = list(entries)
        if Path(folder) == gone.parent:
            gone.rename(near.parent / "deep")
        return contextlib.nullcontext(found)

    with monkeypatch.context() as patched, pytest.raises(errors.SourceChanged, match="deep"):
        patched.setattr("forebay.directories.manifests.os.scandir", scanned)
        upload(place, near)


@pytest.mark.parametrize("far", [s3, local_folder, arrow], ids=lambda make: make.__name__, indirect=True)
def test_somebody_removes_what_was_sent(place: RemoteDirectory, far: Remote, near: Path) -> None:
    place, remote = watched(place)

    def meddle(name: str) -> None:
        if remote.written.count(MARKER) == 1 and len(remote.written) == len(NAMES) + 1:
            far.remove("config.json")

    remote.after = meddle
    with pytest.raises(errors.Conflict, match=r"'config\.json' was removed or written to by somebody else"):
        upload(place, near, jobs=1)
    assert mark(place)["complete"] is False


@pytest.mark.parametrize("far", [s3, local_folder], ids=lambda make: make.__name__, indirect=True)
def test_two_uploads_at_once(place: RemoteDirectory, far: Remote, near: Path, tmp_path: Path) -> None:
    """The one that began last wins; the other says so, and has written no mark over its."""
    first, remote = watched(place)
    change(tmp_path / "other", "config.json", b"of the second")
    second_began, raised = threading.Event(), []

    def wait(name: str) -> None:
        if name == NAMES[-1]:
            assert second_began.wait(HANG)

    def run() -> None:
        try:
            upload(first, near, jobs=1)
        except errors.Conflict as error:
            raised.append(error)

    remote.before = wait
    thread = threading.Thread(target=run)
    thread.start()
    while MARKER not in remote.written or not any(name == MARKER for name, _ in place.list()):
        time.sleep(0.01)
    second, its = watched(place)
    its.after = lambda name: second_began.set() if name == MARKER else None
    its.before = lambda name: thread.join() if its.written.count(MARKER) == 1 else None
    upload(second, tmp_path / "other", delete=True)
    thread.join()
    assert "another upload" in str(raised[0])
    assert list(mark(place)["files"]) == ["config.json"]
    assert there(place)["config.json"] == b"of the second"


@pytest.mark.parametrize("far", [s3, local_folder, arrow_helper], ids=lambda make: make.__name__, indirect=True)
def test_an_upload_sees_that_another_began(place: RemoteDirectory, near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not go on to write over what the other writes, whatever the store knows."""
    monkeypatch.setattr(uploading, "WATCH", 0.05)
    (first, remote), (second, others) = watched(place), watched(place)
    change(tmp_path / "other", "config.json", b"of the second")

    def overtake(name: str) -> None:
        if name != MARKER and not done:
            done.append(name)
            upload(second, tmp_path / "other")
            until(lambda: remote.looked.is_set() or ended.is_set())

    def has_begun(name: str) -> None:
        if others.written == [MARKER]:
            remote.looked = threading.Event()  # for who looks from now on

    others.after = has_begun
    done: list[str] = []
    ended = threading.Event()  # the first may look before `has_begun` does, and not again
    remote.before = overtake
    with pytest.raises(errors.Conflict, match="another upload"):
        upload(first, near, jobs=1)
    ended.set()
    assert len(remote.written) < len(NAMES)
    assert list(mark(place)["files"]) == ["config.json"]
    assert mark(place)["complete"] is True


def test_an_answer_that_was_lost(near: Path, request: pytest.FixtureRequest) -> None:
    """The mark was written, and its writer does not know: sent again, it meets itself."""
    place, remote = watched(locate(NO_CACHE, s3(request).url))
    write = remote._remote.write

    class Twice:
        def __getattr__(self, name: str) -> Any:
            return getattr(remote._remote, name)

        def write(self, url: str, source: Any, **how: Any) -> Any:
            if url.endswith(MARKER):
                write(url, source, **how)
            return write(url, source, **how)

    upload(dataclasses.replace(place, remote=Twice()), near)
    assert mark(place)["complete"] is True


# -- it is interrupted -----------------------------------------------------------------------------------------------


def upload_and_die(place: RemoteDirectory, near: Path, at: int, **how: Any) -> None:
    """Killed in the middle of the write number ``at``: the object is there, and nobody knows."""
    place, remote = watched(place)

    def die(name: str) -> None:
        if len(remote.written) > at:
            os.kill(os.getpid(), signal.SIGKILL)

    remote.after = die
    upload(place, near, jobs=1, **how)


@some_kinds
def test_killed_and_repeated(place: RemoteDirectory, far: Remote, near: Path, children: ProcessGroup, tmp_path: Path) -> None:
    """At each write: a reader never takes it for whole, and the next attempt sends what is missing, and nothing else."""
    for at in (0, 1, len(NAMES)):
        for name in there(place):
            far.remove(name)
        assert children(lambda at=at: upload_and_die(place, near, at)).wait() == -signal.SIGKILL
        cache = forebay.Cache(tmp_path / f"reader {at}", budget=8 << 20, min_free=0)
        with pytest.raises(errors.Incomplete, match="repeat the upload"):
            cache.directory(far.url, force=True, **far.how)
        come = set(there(place)) - {MARKER}
        assert len(come) == at
        again, remote = watched(place)
        assert set(upload(again, near).sent) == set(NAMES) - come
        assert sorted(remote.written) == sorted([MARKER, *(set(NAMES) - come), MARKER])
        with cache, cache.directory(far.url, force=True, refresh=True, **far.how) as tree:
            assert {name: body for name, body in files_of(tree).items() if name != MARKER} == FILES


@some_kinds
def test_killed_over_an_older_one(cache: forebay.Cache, place: RemoteDirectory, far: Remote, near: Path, children: ProcessGroup) -> None:
    """What an older upload left is not taken for what the killed one sent, though names and sizes are the same."""
    upload(place, near)
    with cache.directory(far.url, force=True, **far.how) as tree:
        old = files_of(tree)
    newer = {name: bytes(reversed(body)) for name, body in FILES.items() if body}
    for name, body in newer.items():
        change(near, name, body)
    for _ in range(2):
        assert children(lambda: upload_and_die(place, near, 2)).wait() == -signal.SIGKILL
    with cache.directory(far.url, force=True, refresh=True, **far.how) as tree:  # what the cache has, with a warning
        assert files_of(tree) == old
    sent = upload(place, near).sent
    assert len(sent) == len(newer) - 4
    assert {name: body for name, body in there(place).items() if name != MARKER} == {**FILES, **newer}


def test_killed_while_others_are_removed(place: RemoteDirectory, far: Remote, near: Path, children: ProcessGroup, shelf: Shelf) -> None:  # noqa: F811
    for n in range(3):
        far.put(f"old-{n}", b"old")

    def die() -> None:
        delete, deleted = Shelf.delete, []

        def dying(self: Shelf, name: str) -> None:
            if deleted:
                os.kill(os.getpid(), signal.SIGKILL)
            deleted.append(name)
            delete(self, name)

        Shelf.delete = dying  # type: ignore[method-assign]
        upload(place, near, delete=True, jobs=1)

    assert children(die).wait() == -signal.SIGKILL
    assert sum(name.startswith("old") for name in there(place)) == 2
    assert mark(place)["complete"] is False
    done = upload(place, near, delete=True)
    assert (done.sent, len(done.removed)) == ((), 2)
    assert sorted(there(place)) == sorted([MARKER, *NAMES])


def test_a_local_directory_keeps_no_leftovers(near: Path, tmp_path: Path, children: ProcessGroup) -> None:
    from forebay._kernel import host

    place = locate(NO_CACHE, tmp_path / "far" / "step_100")

    def die() -> None:
        def hook(verb: str, subject: str) -> None:
            if verb == "pwrite" and len(files_of(tmp_path / "far")) > 3:
                os.kill(os.getpid(), signal.SIGKILL)

        host.on_step(hook)
        upload(place, near, jobs=1)

    assert children(die).wait() == -signal.SIGKILL
    parts = [name for name in files_of(tmp_path / "far" / "step_100") if name.endswith(".forebay-part")]
    assert len(parts) == 1
    os.utime(tmp_path / "far" / "step_100" / parts[0], (0, 0))  # an hour ago
    upload(place, near)
    assert sorted(files_of(tmp_path / "far" / "step_100")) == sorted([MARKER, *NAMES])


def test_ctrl_c(place: RemoteDirectory, near: Path, children: ProcessGroup) -> None:
    """It ends the call at once, though all threads wait for a remote that says nothing."""
    began = Gate()
    place, remote = watched(place)

    def stall(name: str) -> None:
        if name != MARKER:
            began.open()
            threading.Event().wait()

    remote.before = stall

    def work() -> float:
        try:
            upload(place, near)
        except KeyboardInterrupt:
            return time.monotonic()
        raise AssertionError("nobody pressed it")

    child = children(work)
    began.wait()
    pressed = time.monotonic()
    child.signal(signal.SIGINT)
    assert child.result() - pressed < 3
    began.close()


def test_the_first_failure_ends_it(place: RemoteDirectory, near: Path) -> None:
    place, remote = watched(place)

    def fail(name: str) -> None:
        if name == "empty":
            raise errors.AccessDenied("no", url=name)

    remote.before = fail
    with pytest.raises(errors.AccessDenied):
        upload(place, near, jobs=2)
    assert mark(place)["complete"] is False
    remote.before = lambda name: None
    assert "empty" in upload(place, near).sent


# -- and the cache ---------------------------------------------------------------------------------------------------


def test_what_is_kept_is_not_fetched(cache: forebay.Cache, far: Remote, near: Path, shelf: Shelf) -> None:  # noqa: F811
    Checkpoint.upload(near, far.url, cache=cache, keep=True, **far.how)
    shelf.forget()
    with cache.directory(far.url, **far.how) as tree:
        assert files_of(tree) == FILES
    assert shelf.sent == 0


@every_kind
def test_what_is_kept_is_what_the_remote_has(cache: forebay.Cache, place: RemoteDirectory, far: Remote, near: Path) -> None:
    Checkpoint.upload(near, far.url, cache=cache, keep=True, **far.how)
    before = cache.stats().bytes_remote
    with cache.directory(far.url, refresh=True, force=True, **far.how) as tree:
        assert {name: body for name, body in files_of(tree).items() if name != MARKER} == FILES
    if place.local is None:
        assert cache.stats().bytes_remote - before < 10_000  # the mark


def test_what_was_cached_is_asked_for_again(cache: forebay.Cache, far: Remote, near: Path) -> None:
    Checkpoint.upload(near, far.url, cache=cache, **far.how)
    with cache.directory(far.url, **far.how) as tree:
        assert files_of(tree) == FILES
    change(near, "config.json", b"[]")
    Checkpoint.upload(near, far.url, cache=cache, **far.how)
    with cache.directory(far.url, **far.how) as tree:
        assert files_of(tree)["config.json"] == b"[]"


def test_what_does_not_fit_is_uploaded_all_the_same(
    far: Remote, place: RemoteDirectory, near: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with forebay.Cache(tmp_path / "small", budget=300_000, min_free=0) as cache:
        Checkpoint.upload(near, far.url, cache=cache, keep=True, **far.how)
        assert mark(place)["complete"] is True
    assert "not stored" in caplog.text


def test_an_upload_offline(far: Remote, near: Path, tmp_path: Path, shelf: Shelf) -> None:  # noqa: F811
    with forebay.Cache(tmp_path / "offline", budget=8 << 20, min_free=0, offline=True) as cache:
        with pytest.raises(errors.Offline):
            Checkpoint.upload(near, CKPT, cache=cache, **far.how)
    assert shelf.asked("write") == []
