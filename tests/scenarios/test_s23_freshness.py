"""Scenario 23: the remote object changes under the same name, or is known never to change."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer
from tests.harness import answers_of, forge_times
from tests.processes import HANG

MiB = 1 << 20


@pytest.mark.parametrize("validators", ["etag", "mtime", "weak"])
def test_s23_the_next_get_has_the_new_bytes_and_old_readers_finish_on_old(root: Path, server: ScriptedServer, validators: str) -> None:
    old, new = os.urandom(2 * MiB), os.urandom(2 * MiB)
    tags: dict[str, list[dict[str, Any]]] = {
        "etag": [{}, {}], "mtime": [{"etag": None}, {"etag": None, "modified": 1.7e9}], "weak": [{"etag": 'W/"1"'}, {"etag": 'W/"2"'}],
    }  # fmt: skip
    url = server.put("/x.bin", old, **tags[validators][0])
    with forebay.Cache(root, max_age=0) as cache:
        buffer = cache.read(url)
        file, lease = cache.open(url), cache.local(url)
        begin = file.read(MiB)
        server.put("/x.bin", new, **tags[validators][1])
        assert cache.read(url) == new
        assert buffer == old
        assert begin + file.read() == old
        assert Path(lease).read_bytes() == old
        file.close()
        lease.close()
        with cache.open(url) as again:
            assert again.read() == new
        assert server.sent == len(old) + len(new)
        assert [entry.name for entry in cache.entries()] == [url]


def test_s23_unchanged_costs_a_request_and_no_bytes(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(100_000)
    url = server.put("/x.bin", body)
    with forebay.Cache(root, max_age=0) as cache:
        for _ in range(4):
            assert cache.read(url) == body
    assert server.sent == len(body)
    assert [request.status for request in server.requests] == [206, 304, 304, 304]


@pytest.mark.parametrize("forever", ["cache", "call", "environment"])
def test_s23_what_never_changes_is_never_asked_for(
    root: Path, server: ScriptedServer, children: Callable[..., Any], forever: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = os.urandom(100_000)
    url = server.put("/x.bin", body)
    with forebay.Cache(root) as cache:
        cache.read(url)
        # As if it had been fetched long ago.
        entry = cache.entry(url)
        assert entry is not None
        forge_times(root, entry.validated, 1_000_000_000)
    if forever == "environment":
        monkeypatch.setenv("FOREBAY_MAX_AGE", "forever")

    def rank() -> None:
        with forebay.Cache(root, max_age="forever" if forever == "cache" else None) as cache:
            how: dict[str, Any] = {"max_age": "forever"} if forever == "call" else {}
            for _ in range(20):
                assert cache.read(url, **how) == body
                with cache.local(url, **how) as path:
                    assert Path(path).stat().st_size == len(body)

    for child in [children(rank) for _ in range(4)]:
        child.result()
    assert answers_of(server) == (1, 0)


def test_s23_at_most_one_head_a_period_for_the_node(
    root: Path, server: ScriptedServer, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    body = os.urandom(100_000)
    url = server.put("/x.bin", body, latency=0.1)
    with forebay.Cache(root) as cache:
        cache.read(url)
    start = barrier(8)

    def rank() -> None:
        with forebay.Cache(root, max_age=60) as cache:
            assert cache.read(url) == body
            start.wait(60)  # all have it in mind; then it grows old, for all at once
            start.wait(60)
            for _ in range(50):
                assert cache.read(url) == body

    ranks = [children(rank) for _ in range(7)]
    with forebay.Cache(root, max_age=60) as cache:
        start.wait(60)
        cache.invalidate(url)
        assert server.heads == 0
        start.wait(60)
        for child in ranks:
            child.result()
        assert answers_of(server) == (1, 1)


def test_s23_refresh_and_invalidate_ask_now(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", b"old")
    with forebay.Cache(root, max_age="forever") as cache, forebay.Cache(root, max_age="forever") as other:
        assert cache.read(url) == b"old"
        server.put("/x.bin", b"newer")
        assert cache.read(url) == b"old"
        assert cache.read(url, refresh=True) == b"newer"
        assert other.read(url) == b"newer"
        server.put("/x.bin", b"newest")
        cache.invalidate(url)
        assert other.read(url) == b"newest"
        assert server.gets == 3


@pytest.mark.parametrize("has_older", [False, True], ids=["the first version", "the next one"])
@pytest.mark.parametrize("size", [100_000, MiB], ids=["in memory", "on disk"])
def test_s23_what_was_asked_for_before_an_invalidation_is_asked_for_again(
    root: Path, server: ScriptedServer, size: int, has_older: bool
) -> None:
    """One thread is in the middle of the old version when the object is replaced, and another one says so."""
    older, old, new = (os.urandom(size) for _ in range(3))
    with forebay.Cache(root) as cache, forebay.Cache(root) as other, ThreadPoolExecutor(1) as pool:
        url = server.put("/run/x.bin", older)
        if has_older:
            assert cache.read(url) == older
        server.put("/run/x.bin", old, stall_after=1000)
        first = pool.submit(lambda: bytes(cache.read(url, refresh=True)))
        assert server.stalled.wait(HANG)
        server.put("/run/x.bin", new)
        other.invalidate(url)
        server.go.set()
        assert first.result(HANG) == old
        assert other.read(url) == cache.read(url) == new
        gets = server.gets
        assert other.read(url) == new
        assert server.gets == gets


@pytest.mark.parametrize("size", [100_000, MiB], ids=["in memory", "on disk"])
def test_s23_refresh_does_not_take_what_was_asked_for_before(
    root: Path, server: ScriptedServer, children: Callable[..., Any], size: int
) -> None:
    """One process is in the middle of the old version when the object is replaced; another refreshes, and waits for its lock."""
    old, new = os.urandom(size), os.urandom(size)
    url = server.put("/x.bin", old, stall_after=1000)

    def first() -> None:
        with forebay.Cache(root) as cache:
            assert cache.read(url) == old

    child = children(first)
    assert server.stalled.wait(60)
    server.put("/x.bin", new)
    with forebay.Cache(root) as cache:
        with cache.local(url, refresh=True, on_wait=lambda waiting: server.go.set()) as path:
            assert Path(path).read_bytes() == new
    child.result()
    assert server.go.is_set(), "nobody waited"
    assert server.gets == 2


def test_s23_an_object_is_as_old_as_the_question(root: Path, server: ScriptedServer, children: Callable[..., Any], tmp_path: Path) -> None:
    """A download may take long, and an upstream may have asked long ago: neither makes a version younger."""
    url = server.put("/x.bin", os.urandom(100_000), stall_after=1000)

    def validated(cache: forebay.Cache) -> float:
        entry = cache.entry(url)
        assert entry is not None
        return entry.validated

    def first() -> None:
        with forebay.Cache(root) as cache:
            cache.read(url)

    child = children(first)
    assert server.stalled.wait(60)
    with forebay.Cache(root) as cache:
        stalled = time.time()
        server.go.set()
        child.result()
        at = validated(cache)
        assert 0 < at < stalled
        with forebay.Cache(tmp_path / "below", upstream=root) as below:
            below.read(url)
            assert abs(validated(below) - at) < 0.05, "the clocks of two roots are read one after the other"
            assert server.gets == 1
            before = time.time()
            below.evict(url)
            below.read(url, refresh=True)
            assert before - 0.05 <= validated(below) <= time.time() + 0.05
            assert answers_of(server) == (1, 1)


@pytest.mark.parametrize("conditions", [True, False])
def test_s23_no_read_mixes_two_versions(root: Path, server: ScriptedServer, children: Callable[..., Any], conditions: bool) -> None:
    """It is overwritten again and again while processes read it, also between the ranges of one download."""
    import threading

    versions = [bytes([i]) * (3 * MiB) for i in range(1, 7)]
    url = server.put("/x.bin", versions[0], conditions=conditions)
    options = forebay.RemoteOptions(part=MiB // 2)
    left = iter(versions[1:])
    lock = threading.Lock()

    def overwrite(request: Any) -> None:
        with lock:
            if len(server.requests) % 11 == 5 and (body := next(left, None)) is not None:
                server.put("/x.bin", body, conditions=conditions)

    server.on_request = overwrite

    def rank() -> list[int]:
        seen = []
        with forebay.Cache(root, max_age=0, remote_options=options) as cache:
            for _ in range(12):
                data = bytes(cache.read(url))
                assert data in versions
                seen.append(data[0])
        return seen

    for child in [children(rank) for _ in range(3)]:
        seen = child.result()
        assert seen == sorted(seen)  # nobody sees an older version after a newer one
    with forebay.Cache(root, max_age=0) as cache:
        assert cache.read(url) == server.objects["/x.bin"].body


@pytest.mark.parametrize("kind", ["sha256", "etag"])
def test_s23_the_version_that_the_caller_expects(root: Path, server: ScriptedServer, kind: str) -> None:
    import hashlib

    body = os.urandom(10_000)
    url = server.put("/x.bin", body, etag='"v2"')
    right: dict[str, Any] = {"sha256": hashlib.sha256(body).hexdigest(), "etag": '"v2"'}
    wrong: dict[str, Any] = {"sha256": "0" * 64, "etag": '"v1"'}
    with forebay.Cache(root) as cache:
        with pytest.raises(forebay.errors.ChecksumMismatch, match="nothing was stored"):
            cache.read(url, **{kind: wrong[kind]})
        assert cache.entries() == []
        assert cache.read(url, **{kind: right[kind]}) == body
        with pytest.raises(forebay.errors.ChecksumMismatch):
            cache.read(url, **{kind: wrong[kind]})
        assert cache.read(url) == body  # the good copy is still there
