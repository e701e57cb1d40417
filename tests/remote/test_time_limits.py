"""One limit covers all of a call: names, connecting, TLS, heads that come byte by byte, redirects, attempts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forebay import errors
from forebay._engine.hosts import SilentHosts
from forebay._model import Span
from forebay.remote import RemoteOptions, filesystems, reaching
from forebay.remote.filesystems import FilesystemRemote
from forebay.remote.http import HttpRemote
from forebay.testing import MemorySink
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw

SOON = 20.0
"""Seconds: much less than it would take without the limit, on a machine that is crowded."""


def trickle(server: RawServer, head: bytes, pause: float = 0.1) -> Callable[[socket.socket, bytes], None]:
    def answer(connection: socket.socket, asked: bytes) -> None:
        for at in range(len(head)):
            connection.sendall(head[at : at + 1])
            if server.ended.wait(pause):
                return

    return answer


def repeat(server: RawServer, what: bytes, first: bytes = b"") -> Callable[[socket.socket, bytes], None]:
    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(first)
        while not server.ended.wait(0.1):
            connection.sendall(what)

    return answer


def slow_redirects(server: RawServer) -> Callable[[socket.socket, bytes], None]:
    def answer(connection: socket.socket, asked: bytes) -> None:
        server.ended.wait(0.4)
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: /%d\r\nContent-Length: 0\r\nConnection: close\r\n\r\n" % len(server.requests))

    return answer


LONG = b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 600 + b"\r\nContent-Length: 1\r\n\r\n1"
HEADS = {
    "a byte at a time": lambda server: trickle(server, LONG),
    "continue": lambda server: repeat(server, b"HTTP/1.1 100 Continue\r\n\r\n"),
    "headers without an end": lambda server: repeat(server, b"X-More: 1\r\n", b"HTTP/1.1 200 OK\r\n"),
    "nothing": lambda server: lambda connection, asked: server.ended.wait(60),
    "redirects": slow_redirects,
    "a body": lambda server: repeat(server, b"x", b"HTTP/1.1 200 OK\r\nContent-Length: 600\r\n\r\n"),
}


@pytest.mark.parametrize("what", HEADS)
@pytest.mark.parametrize("door", ["fetch", "stat", "read"])
def test_total_timeout_covers_all(raw: RawServer, what: str, door: str) -> None:
    raw.answer = HEADS[what](raw)
    http, began = HttpRemote(RemoteOptions(total_timeout=1, read_timeout=60)), time.monotonic()
    url = f"{raw.url}/a"
    doors = {
        "fetch": lambda: http.fetch(url, MemorySink()),
        "stat": lambda: http.stat(url),
        "read": lambda: http.read(url, Span(0, 600)),
    }
    if (what, door) == ("a body", "stat"):
        assert http.stat(url) is not None  # asks for the head alone
        return
    with pytest.raises(errors.RemoteTimeout, match="not done in 1 s"):
        doors[door]()
    assert time.monotonic() - began < SOON


@pytest.mark.parametrize("what", ["a byte at a time", "continue", "headers without an end"])
def test_a_head_has_the_read_timeout_in_all(raw: RawServer, what: str) -> None:
    raw.answer, began = HEADS[what](raw), time.monotonic()
    with pytest.raises(errors.RemoteTimeout, match="nothing came for too long"):
        HttpRemote(RemoteOptions(read_timeout=1, attempts=1)).stat(f"{raw.url}/a")
    assert time.monotonic() - began < SOON


def test_a_check_of_freshness_has_its_own_limit(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.remote.base.CHECK_TIMEOUT", 1.0)
    raw.answer, began = HEADS["continue"](raw), time.monotonic()
    with pytest.raises(errors.RemoteTimeout):
        HttpRemote(RemoteOptions()).stat(f"{raw.url}/a", known='"1"')
    assert time.monotonic() - began < SOON


def test_tls_that_nobody_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url, began = f"https://127.0.0.1:{listener.getsockname()[1]}/a", time.monotonic()
        for options in (RemoteOptions(total_timeout=1), RemoteOptions(connect_timeout=1, attempts=1)):
            with pytest.raises(errors.RemoteTimeout):
                HttpRemote(options).stat(url)
    assert time.monotonic() - began < SOON


def test_a_name_that_nobody_resolves(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def stuck(*args: object, **kwargs: object) -> list[object]:
        ended.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    began = time.monotonic()
    try:
        for options in (RemoteOptions(total_timeout=1), RemoteOptions(connect_timeout=1, attempts=1)):
            with pytest.raises(errors.RemoteTimeout):
                HttpRemote(options).stat("http://host.example/a")
        assert time.monotonic() - began < SOON
    finally:
        ended.set()


def test_a_dead_address_leaves_time_for_the_next(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def two(host: str, *args: object, **kwargs: object) -> list[object]:
        names = ["192.0.2.1", "127.0.0.1"] if host == "two.example" else [host]
        return [found for name in names for found in known(name, *args, **kwargs)]  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    raw.says("Content-Length: 5", body=b"12345")
    sink = MemorySink()
    HttpRemote(RemoteOptions(connect_timeout=3, attempts=1, proxies=False)).fetch(raw.url.replace("127.0.0.1", "two.example") + "/a", sink)
    assert sink.data == b"12345"


def test_a_filesystem_that_does_not_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[socket.socket] = []

    @contextlib.contextmanager
    def nobody(call: object) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            asked.append(ours)
            yield ours

    monkeypatch.setattr(filesystems, "channel", nobody)
    remote = FilesystemRemote(options=RemoteOptions(read_timeout=0.5, attempts=1))
    known = SilentHosts()
    with reaching(known):
        for url, why in (("gs://b/a", "nothing came"), ("gs://b/c", "gs://b gave no answer"), ("gs://other/a", "nothing came")):
            with pytest.raises(errors.RemoteTimeout, match=why):
                remote.stat(url)
    with reaching(known, insists=True), pytest.raises(errors.RemoteTimeout, match="nothing came"):
        remote.stat("gs://b/c")
    assert len(asked) == 3
