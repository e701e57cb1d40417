"""The metadata of a directory: as Ray writes it, on every kind of remote, and no update lost."""

from __future__ import annotations

import errno
import json
import threading
import uuid
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import errors
from forebay.directories import metadata
from forebay.directories.location import RemoteDirectory, locate
from forebay.testing import ScriptedServer
from tests.processes import ProcessGroup, in_child
from tests.remote_directories import Remote, aws, every_kind, files_of  # noqa: F401 (fixtures)
from tests.remote_directories import remote as remote
from tests.servers.counting import Shelf, shelf  # noqa: F401 (a fixture)
from tests.servers.rgw import rgw_server  # noqa: F401 (a fixture)


def place(cache: forebay.Cache, remote: Remote) -> RemoteDirectory:
    return locate(cache._origin, remote.url, remote.filesystem)


def read(cache: forebay.Cache, remote: Remote) -> dict[str, Any]:
    return metadata.read(cache._origin, place(cache, remote))


@every_kind
def test_metadata_that_is_not_there_is_empty(cache: forebay.Cache, remote: Remote) -> None:
    assert read(cache, remote) == {}


@every_kind
def test_what_another_wrote_is_read(cache: forebay.Cache, remote: Remote) -> None:
    remote.put(".metadata.json", json.dumps({"step": 100, "who": "Ray"}).encode())
    assert read(cache, remote) == {"step": 100, "who": "Ray"}


@every_kind
def test_write_and_update(cache: forebay.Cache, remote: Remote) -> None:
    origin, where = cache._origin, place(cache, remote)
    if remote.url.startswith("http"):
        with pytest.raises(errors.Unsupported, match="HTTP"):
            metadata.write(origin, where, {"step": 1})
        return
    metadata.write(origin, where, {"step": 1, "name": "ü"})
    metadata.update(origin, where, {"step": 2, "more": [1, None]})
    assert read(cache, remote) == {"step": 2, "name": "ü", "more": [1, None]}
    metadata.write(origin, where, {"only": True})
    assert read(cache, remote) == {"only": True}


def test_metadata_is_written_as_ray_writes_it(cache: forebay.Cache, tmp_path: Path) -> None:
    where, told = locate(cache._origin, tmp_path / "ckpt"), {"step": 1, "name": "ü", "nested": {"a": [1.5, None]}}
    metadata.update(cache._origin, where, told)
    assert (tmp_path / "ckpt" / ".metadata.json").read_text() == json.dumps(told)


def test_the_next_tree_has_it(cache: forebay.Cache, remote: Remote) -> None:
    with cache.directory(remote.url, **remote.how) as tree:
        assert ".metadata.json" not in files_of(tree)
    metadata.write(cache._origin, place(cache, remote), {"step": 1})
    with cache.directory(remote.url, **remote.how) as tree:
        assert json.loads(files_of(tree)[".metadata.json"]) == {"step": 1}


@pytest.mark.parametrize("wrong", [[("a", 1)], "text", None, {"a": object()}, {(1, 2): 3}, {"a": {1, 2}}])
def test_what_is_no_metadata_is_refused_before_anything_is_written(cache: forebay.Cache, remote: Remote, shelf: Shelf, wrong: Any) -> None:  # noqa: F811
    shelf.forget()
    for verb in (metadata.write, metadata.update):
        with pytest.raises(errors.ConfigError, match="metadata") as caught:
            verb(cache._origin, place(cache, remote), wrong)
        assert isinstance(caught.value, ValueError)
    assert shelf.asked() == []


@pytest.mark.parametrize("damage", [b"", b'{"step": 1', b"[1, 2]", b"\xff\xfe\xfd"])
def test_damage_is_told(cache: forebay.Cache, remote: Remote, damage: bytes) -> None:
    remote.put(".metadata.json", damage)
    with pytest.raises(errors.RemoteProtocolError, match=r"step_100/.*\.metadata\.json is damaged.*set_metadata"):
        read(cache, remote)
    with pytest.raises(errors.RemoteProtocolError):
        metadata.update(cache._origin, place(cache, remote), {"step": 1})
    metadata.write(cache._origin, place(cache, remote), {"step": 2})
    assert read(cache, remote) == {"step": 2}


def count_up(where: str, url: str, worker: int, times: int, **how: Any) -> None:
    """Each key is set once: a lost update is a key that is not there."""
    with forebay.Cache(where, budget=8 << 20, min_free=0) as cache:
        for n in range(times):
            metadata.update(cache._origin, locate(cache._origin, url, how.get("filesystem")), {f"{worker}-{n}": n})


def check_all_there(tmp_path: Path, url: str, times: int, **how: Any) -> None:
    with forebay.Cache(tmp_path / "look", budget=8 << 20, min_free=0) as cache:
        found = metadata.read(cache._origin, locate(cache._origin, url, how.get("filesystem")))
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


def test_another_node_comes_between(aws: Any, cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    aws.client().create_bucket(Bucket="metadata")
    where = locate(cache._origin, f"s3://metadata/{uuid.uuid4().hex}/ckpt")
    put, raced = metadata._put, []

    def late(place: RemoteDirectory, data: bytes, validator: str | None) -> None:
        if not raced:
            raced.append(validator)
            with monkeypatch.context() as m:
                m.setattr(metadata, "_put", put)
                in_child(lambda: count_up(str(tmp_path / "other node"), where.url, 7, 1))
        put(place, data, validator)

    monkeypatch.setattr(metadata, "_put", late)
    for expected in ({"7-0": 0, "a": 1}, {"7-0": 0, "a": 1, "b": 2}):
        raced.clear()
        metadata.update(cache._origin, where, {"a": 1} if "b" not in expected else {"b": 2})
        assert metadata.read(cache._origin, where) == expected


def test_threads_of_one_process(cache: forebay.Cache, tmp_path: Path) -> None:
    where = locate(cache._origin, tmp_path / "ckpt")
    threads = [threading.Thread(target=lambda n=n: metadata.update(cache._origin, where, {str(n): n})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metadata.read(cache._origin, where) == {str(n): n for n in range(8)}


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
        metadata.update(cache._origin, place(cache, remote), {"a": 1})
        assert read(cache, remote) == {"a": 1}
    assert "under no lock" in caplog.text


def test_a_local_directory_that_cannot_be_locked(cache: forebay.Cache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(metadata, "locked", refuse)
    metadata.update(cache._origin, locate(cache._origin, tmp_path / "ckpt"), {"a": 1})
    assert files_of(tmp_path / "ckpt") == {".metadata.json": b'{"a": 1}'}


def test_metadata_offline(tmp_path: Path, server: ScriptedServer) -> None:
    server.put("/ckpt/.metadata.json", b'{"a": 1}')
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0) as cache:
        url = f"{server.url}/ckpt"
        cache.read(f"{url}/.metadata.json")
    with forebay.Cache(tmp_path / "root", budget=8 << 20, min_free=0, offline=True) as cache:
        assert metadata.read(cache._origin, locate(cache._origin, url)) == {"a": 1}
        with pytest.raises(errors.Offline):
            metadata.read(cache._origin, locate(cache._origin, f"{server.url}/other"))
