"""Scenario 22: cached data is served while the remote cannot be reached."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import forebay
from forebay.remote import base
from forebay.testing import ScriptedServer

QUICK = forebay.RemoteOptions(connect_timeout=0.3, read_timeout=0.3, attempts=2, backoff=0.01)


class BlackHole:
    """A port that takes connections and never says a word."""

    def __init__(self, port: int) -> None:
        self._socket = socket.create_server(("127.0.0.1", port), backlog=256)
        self._socket.setblocking(False)
        self._taken: list[socket.socket] = []

    @property
    def connections(self) -> int:
        while True:
            try:
                self._taken.append(self._socket.accept()[0])
            except BlockingIOError:
                return len(self._taken)

    def close(self) -> None:
        for found in (*self._taken, self._socket):
            found.close()


@pytest.fixture
def body() -> bytes:
    return os.urandom(50_000)


@pytest.fixture
def url(root: Path, body: bytes) -> str:
    """In the cache; its server is gone."""
    with ScriptedServer() as server, forebay.Cache(root) as cache:
        url = server.put("/x.bin", body)
        cache.read(url)
        cache.put("value", b"v")
    return url


@pytest.fixture
def hole(url: str) -> Iterator[BlackHole]:
    found = BlackHole(urlsplit(url).port or 0)
    yield found
    found.close()


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_s22_offline_serves_what_is_there_and_asks_nobody(
    root: Path, url: str, body: bytes, hole: BlackHole, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by == "environment":
        monkeypatch.setenv("FOREBAY_OFFLINE", "Yes")
    with forebay.Cache(root, offline=True if by == "argument" else None, max_age=0) as cache:
        cache.invalidate(url)
        assert cache.read(url) == body
        with cache.open(url) as file:
            assert file.read() == body
        with cache.local(url) as path:
            assert Path(path).read_bytes() == body
        assert cache.get("value") == b"v"
        for ask in (cache.read, cache.open, cache.local, cache.pull):
            with pytest.raises(forebay.errors.Offline, match=r"other\.bin") as caught:
                ask(url.replace("x.bin", "other.bin"))
            assert isinstance(caught.value, FileNotFoundError)
            assert isinstance(caught.value, forebay.ForebayError)
        assert cache.stats().fallbacks == 0
    assert hole.connections == 0


def test_s22_a_check_that_fails_falls_back_to_the_copy_with_one_warning(
    root: Path, url: str, body: bytes, hole: BlackHole, warnings: Any
) -> None:
    with warnings() as said, forebay.Cache(root, remote_options=QUICK) as cache:
        cache.invalidate(url)
        for _ in range(100):
            assert cache.read(url) == body
        with cache.open(url) as file:
            assert file.read() == body
    assert len(said) == 1
    assert url in said[0]
    assert "cannot be reached" in said[0]
    assert 1 <= hole.connections <= QUICK.attempts  # not one time-out a read


def test_s22_one_process_times_out_for_all(
    root: Path, url: str, body: bytes, hole: BlackHole, children: Callable[..., Any], barrier: Callable[..., Any]
) -> None:
    start = barrier(8)
    with forebay.Cache(root) as cache:
        cache.invalidate(url)

    def rank() -> None:
        with forebay.Cache(root, remote_options=QUICK) as cache:
            start.wait(60)
            for _ in range(10):
                assert cache.read(url) == body

    for child in [children(rank) for _ in range(8)]:
        child.result()
    assert 1 <= hole.connections <= QUICK.attempts


def test_s22_the_check_does_not_take_the_patience_of_a_download(
    root: Path, url: str, body: bytes, hole: BlackHole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own options a download would wait here for minutes."""
    monkeypatch.setattr(base, "CHECK_TIMEOUT", 1.0)
    with forebay.Cache(root, remote_options=forebay.RemoteOptions(read_timeout=31)) as cache:
        cache.invalidate(url)
        began = time.monotonic()
        assert cache.read(url) == body
        assert time.monotonic() - began < 30
    assert hole.connections <= 2


def test_s22_refused_connections_too(root: Path, url: str, body: bytes, warnings: Any) -> None:
    with warnings() as said, forebay.Cache(root, remote_options=QUICK, max_age=0) as cache:
        for _ in range(3):
            assert cache.read(url) == body
    assert len(said) == 1


def test_s22_what_is_not_there_raises_when_the_remote_is_gone(root: Path, url: str, hole: BlackHole) -> None:
    with forebay.Cache(root, remote_options=QUICK) as cache, pytest.raises(forebay.errors.RemoteError) as caught:
        cache.read(url.replace("x.bin", "other.bin"))
    assert isinstance(caught.value, (TimeoutError, ConnectionError))


def test_s22_a_server_that_comes_back_is_asked_again(root: Path, server: ScriptedServer, body: bytes) -> None:
    url = server.put("/y.bin", body)
    with forebay.Cache(root, remote_options=forebay.RemoteOptions(attempts=2, backoff=0.01), max_age=0) as cache:
        cache.read(url)
        server.objects["/y.bin"].statuses = [503] * 2
        assert cache.read(url) == body
        server.put("/y.bin", b"new")
        assert cache.read(url, refresh=True) == b"new"


def test_s22_the_command_line(root: Path, url: str, command: Callable[..., Any]) -> None:
    environ = {**os.environ, "FOREBAY_OFFLINE": "1", "FOREBAY_HOME": str(root)}
    assert command("pull", url, env=environ).returncode == 0
    missing = command("pull", url + ".other", env=environ)
    assert missing.returncode == 3
    assert "FOREBAY_OFFLINE" in missing.stderr
