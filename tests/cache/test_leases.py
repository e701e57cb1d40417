"""What `Cache.local`, `Cache.directory` and `Cache.hold` return: a plain path in a ``with``, a `Lease` without one, and its pickles."""

from __future__ import annotations

import copy
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay import Cache, Lease, errors
from forebay.testing import ScriptedServer
from tests.remote_directories import FILES, files_of, http_directory

Opened = Callable[[Cache], Lease]


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with Cache(tmp_path / "root", budget=64 << 20, min_free=0) as cache:
        yield cache


@pytest.fixture(params=["local", "directory", "hold", "in place"])
def opened(request: pytest.FixtureRequest, server: ScriptedServer, tmp_path: Path) -> Opened:
    """Opens a lease by one of the calls that give one."""
    server.put("/weights.bin", b"w" * 100_000)
    url, folder = f"{server.url}/weights.bin", http_directory(server, FILES)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "file").write_bytes(b"own")

    def hold(cache: Cache) -> Lease:
        cache.pull(url)
        return cache.hold(url)

    calls: dict[str, Opened] = {
        "local": lambda cache: cache.local(url),
        "directory": lambda cache: cache.directory(folder, include=(name for name in ("model-*", "sub/"))),
        "hold": hold,
        "in place": lambda cache: cache.directory(tmp_path / "own"),
    }
    return calls[request.param]


def test_a_with_gives_a_plain_str(cache: Cache, opened: Opened) -> None:
    with opened(cache) as path:
        assert type(path) is str
        assert os.path.exists(path)
        assert os.path.dirname(path + "/x") == path
        assert json.loads(json.dumps({"path": path})) == {"path": path}
        assert copy.deepcopy({"path": path}) == {"path": path}
        assert pickle.loads(pickle.dumps(path)) == path


def test_without_a_with_it_is_a_path_until_it_is_closed(cache: Cache, opened: Opened) -> None:
    lease = opened(cache)
    assert isinstance(lease, forebay.Lease)
    assert os.fspath(lease) == str(lease) == lease.path
    assert not lease.closed
    assert lease.path in repr(lease)
    lease.close()
    lease.close()
    assert lease.closed
    assert "closed" in repr(lease)
    for use in (os.fspath, pickle.dumps, copy.deepcopy, Lease.__enter__):
        with pytest.raises(errors.Closed, match="open a new one"):
            use(lease)


def test_a_copy_is_a_lease_of_its_own(cache: Cache, opened: Opened) -> None:
    lease = opened(cache)
    for again in (pickle.loads(pickle.dumps(lease)), copy.copy(lease), copy.deepcopy([lease])[0]):
        with again as path:
            assert path == lease.path
        assert again.closed
        assert not lease.closed
    lease.close()


def what_a_lease_gives(lease: Lease) -> tuple[str, dict[str, bytes]]:
    with lease as path:
        return path, files_of(path)


def test_another_process_opens_what_it_was_sent(cache: Cache, server: ScriptedServer) -> None:
    """As a data set's worker does that is spawned with a lease among its attributes."""
    lease = cache.directory(http_directory(server, FILES), refresh=True)
    asked = len(server.requests)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(what_a_lease_gives, (lease,)) == (lease.path, FILES)
    assert len(server.requests) == asked
    lease.close()
