"""One limit covers all of a call: names, connecting, TLS, heads that come byte by byte, redirects, attempts."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from forebay import errors
from forebay._engine.files import silent_hosts
from forebay._engine.files.silent_hosts import SilentHosts
from forebay._model import Span
from forebay.remote import RemoteOptions, filesystems, tracking_hosts
from forebay.remote.base import AttemptFailed, Call, CallAborted, Trouble
from forebay.remote.filesystems import FilesystemRemote, helper
from forebay.remote.http import HttpRemote
from forebay.remote.http.requests import Exchange
from forebay.testing import MemorySink, ScriptedServer
from tests.processes import ended, forked
from tests.servers.ports import free_port
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw
from tests.servers.tls import both as both

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


@pytest.mark.parametrize(("door", "what"), [*(("fetch", what) for what in HEADS), ("stat", "nothing"), ("read", "a body")])
def test_total_timeout_covers_all(raw: RawServer, door: str, what: str) -> None:
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


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """No name server answers. Set as soon as one is asked."""
    asked, done = threading.Event(), threading.Event()

    def look_up(*args: object, **kwargs: object) -> list[object]:
        asked.set()
        done.wait(60)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    yield asked
    done.set()


def test_a_name_that_nobody_resolves(stuck: threading.Event) -> None:
    began = time.monotonic()
    for options in (RemoteOptions(total_timeout=1), RemoteOptions(connect_timeout=1, attempts=1)):
        with pytest.raises(errors.RemoteTimeout):
            HttpRemote(options).stat("http://host.example/a")
    assert time.monotonic() - began < SOON


def test_a_fetch_is_started_before_its_name_is_resolved(stuck: threading.Event) -> None:
    ready = threading.Event()
    with tracking_hosts(noted := Noted()):
        started = HttpRemote(RemoteOptions(connect_timeout=1, attempts=1)).start("http://host.example/a", ready.set)
        assert started is not None
        assert not ready.is_set()
        assert ready.wait(SOON)
        assert not started.is_here(1 << 20)
        with pytest.raises(errors.RemoteTimeout, match="nothing came for too long"):
            started.into(MemorySink())
    assert noted.told == ["silent http://host.example"]


def test_a_child_that_resolves_no_name_has_the_same_limit(stuck: threading.Event) -> None:
    def work() -> bool:
        with pytest.raises(errors.RemoteTimeout):
            HttpRemote(RemoteOptions(connect_timeout=1, attempts=1)).stat("http://host.example/a")
        return True

    started = HttpRemote().start("http://host.example/a", lambda: None)
    assert started is not None
    assert stuck.wait(60)
    assert ended(forked(work)) == 0
    started.close()


def test_the_end_of_a_call_ends_its_wait_for_a_name(stuck: threading.Event) -> None:
    """A name server that does not answer must not hold up a Ctrl-C."""
    url, raised = "http://host.example/a", queue.SimpleQueue[BaseException]()
    call = Call(url, RemoteOptions(connect_timeout=600))

    def send() -> None:
        try:
            Exchange(call.options).send(call, "GET", url, {})
        except CallAborted as error:
            raised.put(error)

    sending = threading.Thread(target=send)
    sending.start()
    assert stuck.wait(60)
    call.abort()
    assert raised.get(timeout=60)
    sending.join()


def test_a_dead_address_leaves_time_for_the_next(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    known = socket.getaddrinfo

    def two(host: str, *args: object, **kwargs: object) -> list[object]:
        names = ["192.0.2.1", "127.0.0.1"] if host == "two.example" else [host]
        return [found for name in names for found in known(name, *args, **kwargs)]  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", two)
    raw.says("Content-Length: 5", body=b"12345")
    sink = MemorySink()
    remote, url = (
        HttpRemote(RemoteOptions(connect_timeout=3, attempts=1, proxies=False)),
        raw.url.replace("127.0.0.1", "two.example") + "/a",
    )
    remote.fetch(url, sink)
    assert sink.data == b"12345"
    ready, sink = threading.Event(), MemorySink()
    started = remote.start(url, ready.set)
    assert started is not None
    assert ready.wait(60)
    assert started.is_here(5)
    started.into(sink)
    assert sink.data == b"12345"


def test_a_filesystem_that_does_not_answer_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[socket.socket] = []

    @contextlib.contextmanager
    def nobody(call: object) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            asked.append(ours)
            yield ours

    monkeypatch.setattr(filesystems.helper, "channel", nobody)
    remote = FilesystemRemote(options=RemoteOptions(read_timeout=0.5, attempts=1))
    known = SilentHosts()
    with tracking_hosts(known):
        for url, why in (("gs://b/a", "nothing came"), ("gs://b/c", "gs://b gave no answer"), ("gs://other/a", "nothing came")):
            with pytest.raises(errors.RemoteTimeout, match=why):
                remote.stat(url)
    with tracking_hosts(known, ask_silent=True), pytest.raises(errors.RemoteTimeout, match="nothing came"):
        remote.stat("gs://b/c")
    assert len(asked) == 3


class Noted:
    """What remotes tell of hosts. ``known``: those that are silent."""

    def __init__(self, *known: str) -> None:
        self.told: list[str] = []
        self._known = known

    def trouble_with(self, host: str, patience: float, **how: bool) -> tuple[float, int] | None:
        return (1.0, Trouble.SILENT) if host.startswith(self._known or "-") else None

    def heard(self, host: str) -> None:
        self.told.append(f"heard {host.partition(' ')[0]}")

    def failed(self, host: str, began: float, waited: float, trouble: int = 0) -> None:
        assert (waited < math.inf) == (trouble == Trouble.SILENT)
        self.told.append(f"{('silent', 'no way to', 'refused', 'no such')[trouble]} {host.partition(' ')[0]}")


def test_a_host_that_is_left_alone_is_named_without_its_password() -> None:
    with tracking_hosts(Noted("ftp://")), pytest.raises(errors.RemoteTimeout, match="gave no answer") as caught:
        FilesystemRemote().stat("ftp://me:SIKRIT@host/a")
    assert "SIKRIT" not in str(caught.value)


@pytest.mark.parametrize(
    ("why", "told"),
    [
        (AttemptFailed("timed out", errors.RemoteTimeout), ["silent gs://b"]),
        (AttemptFailed("broken pipe"), []),
        (AttemptFailed("busy", status=503), ["heard gs://b"]),
        (AttemptFailed("no such object", errors.NotFound), ["heard gs://b"]),
        (errors.MissingExtra("no gcsfs", extra="fsspec"), []),
    ],
    ids=str,
)
def test_what_a_client_reports_of_its_host(
    monkeypatch: pytest.MonkeyPatch, why: AttemptFailed | errors.MissingExtra, told: list[str]
) -> None:
    @contextlib.contextmanager
    def answers(call: object) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            helper.send(theirs, helper.ERROR, helper.to_wire(why))
            yield ours

    monkeypatch.setattr(filesystems.helper, "channel", answers)
    with tracking_hosts(noted := Noted()), pytest.raises(errors.ForebayError):
        FilesystemRemote(options=RemoteOptions(attempts=1)).stat("gs://b/a")
    assert noted.told == told


ONCE = RemoteOptions(connect_timeout=20, attempts=1, proxies=False)


def test_a_name_server_that_gives_no_answer_is_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(number: int) -> Callable[..., list[object]]:
        def raising(*args: object, **kwargs: object) -> list[object]:
            raise socket.gaierror(number, "told by the resolver")

        return raising

    for number, told in ((socket.EAI_AGAIN, ["silent http://host.example"]), (socket.EAI_NONAME, ["no such http://host.example"])):
        monkeypatch.setattr(socket, "getaddrinfo", fails(number))
        with tracking_hosts(noted := Noted()), pytest.raises(errors.RemoteUnavailable, match="cannot be resolved"):
            HttpRemote(ONCE).stat("http://host.example/a")
        assert noted.told == told


REFUSING, UNREACHABLE = "127.0.0.1", ("255.255.255.255", "224.0.0.1")
"""Addresses at which nobody listens, and to which Linux never connects."""


@pytest.mark.parametrize(
    ("addresses", "told"),
    [
        ((REFUSING, UNREACHABLE[0]), ["refused http://two.example:{}"]),
        ((UNREACHABLE[0], REFUSING), ["refused http://two.example:{}"]),
        (UNREACHABLE, ["no way to http://two.example:{}"]),
    ],
)
def test_there_is_no_way_to_a_host_only_if_no_address_has_one(
    monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, str], told: list[str]
) -> None:
    port = free_port()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [(0, 0, 0, "", (name, 80)) for name in addresses])
    with tracking_hosts(noted := Noted()), pytest.raises(errors.RemoteUnavailable):
        HttpRemote(ONCE).stat(f"http://two.example:{port}/a")
    assert noted.told == [text.format(port) for text in told]


def test_addresses_are_looked_up_again_where_none_can_be_connected_to(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses, asked = [UNREACHABLE[0]], []

    def look_up(name: str, *args: object, **kwargs: object) -> list[object]:
        asked.append(name)
        return [(0, 0, 0, "", (address, 80)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    raw.says("Content-Length: 5", body=b"12345")
    remote, url = HttpRemote(ONCE), raw.url.replace("127.0.0.1", "moved.example") + "/a"
    with pytest.raises(errors.RemoteUnavailable):
        remote.read(url, Span(0, 5))
    addresses[:] = ["127.0.0.1"]
    assert [remote.read(url, Span(0, 5)) for _ in range(3)] == [b"12345"] * 3
    assert asked == ["moved.example"] * 2


def test_without_another_thread_a_name_is_resolved_in_this_one(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == "resolver":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    raw.says("Content-Length: 5", body=b"12345")
    assert HttpRemote(ONCE).read(raw.url.replace("127.0.0.1", "localhost") + "/a", Span(0, 5)) == b"12345"


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_time_for_connecting_does_not_bound_a_response(both: ScriptedServer, scheme: str) -> None:
    url = both.put("/a", b"12345", latency=2.5).replace("http:", f"{scheme}:")
    assert HttpRemote(RemoteOptions(connect_timeout=2, attempts=1)).read(url, Span(0, 5)) == b"12345"


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize(
    ("why", "error", "told"),
    [
        ("silent", errors.RemoteTimeout, "silent"),
        (UNREACHABLE[0], errors.RemoteUnavailable, "no way to"),
        (REFUSING, errors.RemoteUnavailable, "refused"),
    ],
)
def test_a_proxy_that_is_dead_is_silence(
    monkeypatch: pytest.MonkeyPatch, scheme: str, why: str, error: type[errors.RemoteError], told: str
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        address = f"127.0.0.1:{full.getsockname()[1]}" if why == "silent" else f"{why}:{free_port()}"
        monkeypatch.setenv(f"{scheme}_proxy", f"http://me:SIKRIT@{address}")
        with tracking_hosts(noted := Noted()), pytest.raises(error, match="its proxy cannot be reached") as caught:
            HttpRemote(RemoteOptions(attempts=1, connect_timeout=1)).stat(f"{scheme}://host.example/a")
    assert noted.told == [f"{told} {scheme}://host.example"]
    assert "SIKRIT" not in str(caught.value)


def test_who_goes_through_no_proxy_does_not_mind_one_that_is_silent(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.answer = lambda connection, head: raw.ended.wait(60) and None
    monkeypatch.setattr(silent_hosts, "PERIOD", 600.0)
    monkeypatch.setenv("HTTPS_PROXY", raw.url.replace("//", "//me:SIKRIT@"))
    remote = HttpRemote(RemoteOptions(connect_timeout=1, read_timeout=1, attempts=1))
    with tracking_hosts(known := SilentHosts()):
        for why in ("nothing came", r"https://host.example gave no answer"):
            with pytest.raises(errors.RemoteTimeout, match=why) as caught:
                remote.stat("https://host.example/a")
            assert "SIKRIT" not in str(caught.value)
    assert len(raw.requests) == 1
    assert known.trouble_with("https://host.example", 60) is None
