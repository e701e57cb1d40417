"""The metadata of a directory: as Ray writes it, on every kind of remote, and no update lost."""

from __future__ import annotations

import errno
import fcntl
import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Checkpoint, errors
from forebay.testing import ScriptedServer
from tests.processes import ProcessGroup
from tests.remote_directories import Remote, aws, every_kind, files_of  # noqa: F401 (fixtures)
from tests.remote_directories import remote as remote
from tests.servers.counting import Shelf, shelf  # noqa: F401 (a fixture)
from tests.servers.rgw import rgw_server  # noqa: F401 (a fixture)


def at(cache: forebay.Cache, remote: Remote) -> Checkpoint:
    return Checkpoint(remote.url, remote.filesystem, cache)


@every_kind
def test_metadata_that_is_not_there_is_empty(cache: forebay.Cache, remote: Remote) -> None:
    assert at(cache, remote).get_metadata() == {}


@every_kind
def test_what_another_wrote_is_read(cache: forebay.Cache, remote: Remote) -> None:
    remote.put(".metadata.json", json.dumps({"step": 100, "who": "Ray"}).encode())
    assert at(cache, remote).get_metadata() == {"step": 100, "who": "Ray"}


@every_kind
def test_write_and_update(cache: forebay.Cache, remote: Remote) -> None:
    where = at(cache, remote)
    if remote.url.startswith("http"):
        with pytest.raises(errors.Unsupported, match="HTTP"):
            where.set_metadata({"step": 1})
        return
    where.set_metadata({"step": 1, "name": "ü"})
    where.update_metadata({"step": 2, "more": [1, None]})
    assert at(cache, remote).get_metadata() == {"step": 2, "name": "ü", "more": [1, None]}
    where.set_metadata({"only": True})
    assert at(cache, remote).get_metadata() == {"only": True}


def test_metadata_is_written_as_ray_writes_it(cache: forebay.Cache, tmp_path: Path) -> None:
    told = {"step": 1, "name": "ü", "nested": {"a": [1.5, None]}}
    Checkpoint(tmp_path / "ckpt", cache=cache).update_metadata(told)
    assert (tmp_path / "ckpt" / ".metadata.json").read_text() == json.dumps(told)


def test_the_next_tree_has_it(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as tree:
        assert ".metadata.json" not in files_of(tree)
    at(cache, remote).set_metadata({"step": 1})
    with cache.directory(remote.url, **remote.how) as tree:
        assert json.loads(files_of(tree)[".metadata.json"]) == {"step": 1}


@pytest.mark.parametrize("wrong", [[("a", 1)], "text", None, {"a": object()}, {(1, 2): 3}, {"a": {1, 2}}])
def test_what_is_no_metadata_is_refused_before_anything_is_written(cache: forebay.Cache, remote: Remote, shelf: Shelf, wrong: Any) -> None:  # noqa: F811
    shelf.forget()
    for verb in (at(cache, remote).set_metadata, at(cache, remote).update_metadata):
        with pytest.raises(errors.ConfigError, match="metadata") as caught:
            verb(wrong)
        assert isinstance(caught.value, ValueError)
    assert shelf.asked() == []


@pytest.mark.parametrize("damage", [b"", b'{"step": 1', b"[1, 2]", b"\xff\xfe\xfd"])
def test_damage_is_told(cache: forebay.Cache, remote: Remote, damage: bytes) -> None:
    remote.put(".metadata.json", damage)
    with pytest.raises(errors.RemoteProtocolError, match=r"step_100/\.metadata\.json[^/]* is damaged.*set_metadata"):
        at(cache, remote).get_metadata()
    with pytest.raises(errors.RemoteProtocolError):
        at(cache, remote).update_metadata({"step": 1})
    at(cache, remote).set_metadata({"step": 2})
    assert at(cache, remote).get_metadata() == {"step": 2}


def test_damage_on_this_host_is_told_with_its_path(tmp_path: Path) -> None:
    path = tmp_path / ".metadata.json"
    path.write_bytes(b"{")
    with pytest.raises(errors.RemoteProtocolError, match=f"{path.as_uri()} is damaged"):
        Checkpoint(tmp_path).get_metadata()


def count_up(where: str, url: str, worker: int, times: int, **how: Any) -> None:
    """Each key is set once: a lost update is a key that is not there."""
    with forebay.Cache(where, budget=8 << 20, min_free=0) as cache:
        for n in range(times):
            Checkpoint(url, cache=cache, **how).update_metadata({f"{worker}-{n}": n})


def check_all_there(tmp_path: Path, url: str, times: int, **how: Any) -> None:
    with forebay.Cache(tmp_path / "look", budget=8 << 20, min_free=0) as cache:
        found = Checkpoint(url, cache=cache, **how).get_metadata()
    assert sorted(found) == sorted(f"{worker}-{n}" for worker in range(3) for n in range(times))


def test_no_update_is_lost_between_nodes(aws: Any, tmp_path: Path, children: ProcessGroup) -> None:  # noqa: F811
    """Three processes with a cache each, as on three nodes: nothing but the store itself keeps them apart."""
    pytest.importorskip("botocore")
    aws.client().create_bucket(Bucket="metadata")
    url = f"s3://metadata/{uuid.uuid4().hex}/ckpt"
    children = [children(lambda w=worker: count_up(str(tmp_path / f"{w}"), url, w, 8)) for worker in range(3)]
    for child in children:
        child.result()
    check_all_there(tmp_path, url, 8)


def test_no_update_is_lost_on_one_node(shelf: Shelf, tmp_path: Path, children: ProcessGroup) -> None:  # noqa: F811
    """A filesystem that knows no conditional writes: the node's lock keeps them apart."""
    pytest.importorskip("pyarrow")
    how = {"filesystem": shelf.arrow()}
    children = [children(lambda w=worker: count_up(str(tmp_path / "one"), "bucket/ckpt", w, 10, **how)) for worker in range(3)]
    for child in children:
        child.result()
    check_all_there(tmp_path, "bucket/ckpt", 10, **how)


def test_threads_of_one_process(cache: forebay.Cache, tmp_path: Path) -> None:
    where = Checkpoint(tmp_path / "ckpt", cache=cache)
    threads = [threading.Thread(target=where.update_metadata, args=({str(n): n},)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert where.get_metadata() == {str(n): n for n in range(8)}


def test_no_update_is_lost_in_a_local_directory(tmp_path: Path, children: ProcessGroup) -> None:
    """Without a cache that they share: the directory itself keeps them apart."""
    (tmp_path / "ckpt").mkdir()
    children = [children(lambda w=worker: count_up(str(tmp_path / f"{w}"), str(tmp_path / "ckpt"), w, 30)) for worker in range(3)]
    for child in children:
        child.result()
    check_all_there(tmp_path, str(tmp_path / "ckpt"), 30)
    assert files_of(tmp_path / "ckpt").keys() == {".metadata.json"}


def test_a_cache_that_cannot_lock(tmp_path: Path, remote: Remote, caplog: pytest.LogCaptureFixture) -> None:
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache:
        cache.directory(remote.url, **remote.how).close()  # so that it has a listing
    with forebay.Cache(tmp_path / "root", read_only=True) as cache:
        at(cache, remote).update_metadata({"a": 1})
        assert at(cache, remote).get_metadata() == {"a": 1}
    assert "under no lock" in caplog.text


def test_a_local_directory_that_cannot_be_locked(cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX:
            raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuse)
    Checkpoint(tmp_path / "ckpt", cache=cache).update_metadata({"a": 1})
    assert files_of(tmp_path / "ckpt") == {".metadata.json": b'{"a": 1}'}


def test_metadata_offline(tmp_path: Path, server: ScriptedServer) -> None:
    server.put("/ckpt/.metadata.json", b'{"a": 1}')
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache:
        url = f"{server.url}/ckpt"
        cache.read(f"{url}/.metadata.json")
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0, offline=True) as cache:
        assert Checkpoint(url, cache=cache).get_metadata() == {"a": 1}
        with pytest.raises(errors.Offline):
            Checkpoint(f"{server.url}/other", cache=cache).get_metadata()
