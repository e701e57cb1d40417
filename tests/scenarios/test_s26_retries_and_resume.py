"""Scenario 26: refusals, stalls and cuts are tried again, what came is resumed, and nothing waits for ever."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.testing import ScriptedServer

MiB = 1 << 20


def test_s26_two_refusals_a_stall_then_it_works(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(6 * MiB)
    url = server.put("/x.bin", body, statuses=[503, 503], stall_after=4 * MiB, stalls=1)
    options = forebay.RemoteOptions(read_timeout=4, backoff=0.02)
    with forebay.Cache(root, remote_options=options) as cache:
        assert cache.read(url) == body
        stats = cache.stats()
        assert stats.bytes_remote == len(body)
        assert stats.retries == 3
        assert stats.requests == server.gets == 4
    assert server.sent < 1.5 * len(body)
    last = server.requests[-1]
    assert last.status == 206
    assert last.headers["Range"].startswith(f"bytes={4 * MiB}-")


@pytest.mark.rotates
def test_s26_a_permanent_stall_raises_with_the_facts(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", os.urandom(3 * MiB), stall_after=100_000)
    options = forebay.RemoteOptions(read_timeout=1, attempts=3, backoff=0.02)
    with forebay.Cache(root, remote_options=options) as cache:
        began = time.monotonic()
        with pytest.raises(forebay.errors.RemoteTimeout) as caught:
            cache.read(url)
        assert time.monotonic() - began < 30
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.url == url
    assert error.attempts == 3
    assert error.done == server.sent == 3 * 100_000
    assert url in str(error)
    assert "3 attempts" in str(error)
    assert "300,000 bytes" in str(error)


def test_s26_the_next_call_goes_on_where_the_last_one_gave_up(root: Path, server: ScriptedServer, children: Callable[..., Any]) -> None:
    body = os.urandom(6 * MiB)
    url = server.put("/x.bin", body, stall_after=4 * MiB)
    options = forebay.RemoteOptions(read_timeout=1, attempts=1)

    def give_up() -> None:
        with forebay.Cache(root, remote_options=options) as cache, pytest.raises(forebay.errors.RemoteTimeout):
            cache.read(url)

    children(give_up).result()
    server.objects["/x.bin"].stall_after = None
    with forebay.Cache(root) as cache:
        assert cache.read(url) == body
    assert server.sent <= len(body) + MiB  # at most one chunk twice


def test_s26_an_object_that_changed_is_not_resumed(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", os.urandom(6 * MiB), stall_after=4 * MiB)
    options = forebay.RemoteOptions(read_timeout=1, attempts=1)
    with forebay.Cache(root, remote_options=options) as cache:
        with pytest.raises(forebay.errors.RemoteTimeout):
            cache.read(url)
        new = os.urandom(6 * MiB)
        server.put("/x.bin", new)
        assert cache.read(url) == new


def test_s26_a_slow_body_is_no_stall(root: Path, server: ScriptedServer) -> None:
    body = os.urandom(MiB)
    url = server.put("/x.bin", body, rate=250_000)  # 4.2 s
    with forebay.Cache(root, remote_options=forebay.RemoteOptions(read_timeout=3.5)) as cache:
        assert cache.read(url) == body
    assert server.gets == 1


def test_s26_the_environment_sets_the_times(root: Path, server: ScriptedServer, command: Callable[..., Any]) -> None:
    url = server.put("/x.bin", os.urandom(MiB), stall_after=100_000)
    environ = {**os.environ, "FOREBAY_READ_TIMEOUT": "1", "FOREBAY_ATTEMPTS": "2"}
    done = command("pull", "--root", root, url, env=environ)
    assert done.returncode == 1
    assert url in done.stderr
    assert "2 attempts" in done.stderr
    assert "200,000 bytes" in done.stderr


def test_s26_a_busy_server_is_left_alone_as_long_as_it_asks(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", b"data", statuses=[503], retry_after="1")
    with forebay.Cache(root, remote_options=forebay.RemoteOptions(backoff=0.001)) as cache:
        began = time.monotonic()
        assert cache.read(url) == b"data"
        assert time.monotonic() - began >= 1


def test_s26_a_total_time_out_ends_all_attempts(root: Path, server: ScriptedServer) -> None:
    url = server.put("/x.bin", os.urandom(MiB), stall_after=10_000)
    options = forebay.RemoteOptions(read_timeout=0.2, attempts=1000, backoff=0.01, total_timeout=1)
    with forebay.Cache(root, remote_options=options) as cache, pytest.raises(forebay.errors.RemoteTimeout):
        cache.read(url)
