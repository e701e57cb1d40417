"""Remotes that fail for a while, or for good: retries, time-outs, resuming, and what is said when all of it was in vain."""

from __future__ import annotations

import itertools
import pickle
import random
import socket
import threading
import time
from email.utils import formatdate

import pytest

from forebay import errors
from forebay._model import Span
from forebay.remote import RemoteOptions
from forebay.remote.http import HttpRemote
from forebay.testing import MemorySink, ScriptedServer
from tests.servers.ports import free_port

PART = 64 << 10
BODY = random.Random(2).randbytes(10 * PART + 17)


def remote(**options: float) -> HttpRemote:
    return HttpRemote(RemoteOptions(**{"part": PART, "backoff": 0.01, "read_timeout": 5, **options}))  # type: ignore[arg-type]


def test_s26_503_twice_then_a_stall_then_well(server: ScriptedServer) -> None:
    url, sink = server.put("/a", BODY, statuses=[503, 503], stall_after=PART // 2, stalls=1), MemorySink()
    transfer = remote(read_timeout=4).fetch(url, sink)  # a busy machine may stand still for a second, which is no stall
    assert sink.data == BODY
    assert not sink.missing
    assert server.sent < 1.5 * len(BODY)
    assert transfer.requests == server.gets
    assert (transfer.retries, transfer.received) == (3, len(BODY))


@pytest.mark.parametrize("streams", [1, 4])
def test_s26_a_stall_for_good(server: ScriptedServer, streams: int) -> None:
    url = server.put("/a", BODY, stall_after=1000)
    began = time.monotonic()
    with pytest.raises(errors.RemoteTimeout, match=r"/a: nothing came for too long, after 3 attempts and [\d,]+ bytes") as caught:
        remote(attempts=3, streams=streams, read_timeout=0.8).fetch(url, MemorySink())
    assert 2.3 <= time.monotonic() - began < 30
    assert (caught.value.url, caught.value.attempts) == (url, 3)
    assert caught.value.done >= 3000
    assert isinstance(caught.value, TimeoutError)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.done) == (str(caught.value), caught.value.done)


@pytest.mark.parametrize("streams", [1, 4])
def test_the_total_timeout_ends_a_body_that_trickles(server: ScriptedServer, streams: int) -> None:
    url = server.put("/a", BODY, rate=2e5)
    began = time.monotonic()
    with pytest.raises(errors.RemoteTimeout, match=r"not done in 0\.5 s"):
        remote(total_timeout=0.5, streams=streams, read_timeout=30).fetch(url, MemorySink())
    assert time.monotonic() - began < 20


def test_the_total_timeout_ends_a_stall(server: ScriptedServer) -> None:
    began = time.monotonic()
    with pytest.raises(errors.RemoteTimeout):
        remote(total_timeout=0.5, read_timeout=30).fetch(server.put("/a", BODY, stall_after=1000), MemorySink())
    assert time.monotonic() - began < 20


def test_the_read_timeout_counts_from_the_last_byte(server: ScriptedServer) -> None:
    url, sink = server.put("/a", BODY[: 6 * PART], rate=PART * 1.5), MemorySink()
    remote(part=1 << 20, read_timeout=3, attempts=1).fetch(url, sink)  # the whole takes 4 s
    assert sink.data == BODY[: 6 * PART]


@pytest.mark.parametrize("script", [{}, {"ranges": False}, {"conditions": False}], ids=str)
@pytest.mark.parametrize("after", [0, 1000, PART // 2])
def test_a_body_that_is_cut_goes_on_where_it_ended(server: ScriptedServer, script: dict[str, bool], after: int) -> None:
    url, sink = server.put("/a", BODY, cut_after=after, cuts=3, **script), MemorySink()
    transfer = remote().fetch(url, sink)
    assert sink.data == BODY
    assert not sink.missing
    assert len(sink.infos) == 1
    assert (transfer.requests, transfer.received) == (server.gets, server.sent)
    if "ranges" not in script:
        assert server.sent == len(BODY)


@pytest.mark.parametrize(
    "script",
    [{"etag": None}, {"etag": 'W/"1"'}, {"chunked": True, "ranges": False}, {"gzip": True}, {"gzip": True, "chunked": True}],
    ids=str,
)
def test_a_cut_body_that_cannot_be_resumed_is_begun_anew(server: ScriptedServer, script: dict[str, object]) -> None:
    url, sink = server.put("/a", BODY, cut_after=PART + 1, cuts=2, **script), MemorySink()
    transfer = remote().fetch(url, sink)
    assert sink.data == BODY
    assert len(sink.infos) == 3
    assert transfer.requests == server.gets
    assert transfer.retries == 2


def test_a_cut_for_good(server: ScriptedServer) -> None:
    url = server.put("/a", BODY, cut_after=100)
    with pytest.raises(errors.RemoteUnavailable, match=r"cut .* before the end, after 5 attempts and .* bytes") as caught:
        remote(streams=1).fetch(url, MemorySink())
    assert (caught.value.attempts, caught.value.done) == (5, 500)
    assert isinstance(caught.value, ConnectionError)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_statuses_that_pass(server: ScriptedServer, status: int) -> None:
    url, sink = server.put("/a", BODY, statuses=[status] * 2), MemorySink()
    assert remote().fetch(url, sink).retries == 2
    assert sink.data == BODY
    server.objects["/a"].statuses = [status]
    assert remote().stat(url) is not None
    server.objects["/a"].statuses = [status]
    assert remote().read(url, Span(1, 2)) == BODY[1:3]


def test_a_range_that_is_refused_for_a_while(server: ScriptedServer) -> None:
    url, sink, http = server.put("/a", BODY), MemorySink(), remote()
    sink.on_write = lambda offset, count: server.objects["/a"].statuses.extend([503] if offset == 0 else [])
    assert http.fetch(url, sink).retries == 1
    assert sink.data == BODY


def test_a_status_that_stays(server: ScriptedServer) -> None:
    url = server.put("/a", BODY, statuses=[503] * 100)
    with pytest.raises(errors.RemoteUnavailable, match="503 Service Unavailable, after 5 attempts and 0 bytes") as caught:
        remote().fetch(url, MemorySink())
    assert (caught.value.status, caught.value.attempts, caught.value.url) == (503, 5, url)
    assert server.gets == 5


@pytest.mark.parametrize(
    ("status", "error", "builtin"),
    [
        (401, errors.AccessDenied, PermissionError),
        (403, errors.AccessDenied, PermissionError),
        (404, errors.NotFound, FileNotFoundError),
        (410, errors.NotFound, FileNotFoundError),
        (400, errors.RemoteError, OSError),
        (501, errors.RemoteError, OSError),
        (304, errors.RemoteProtocolError, OSError),
        (412, errors.RemoteProtocolError, OSError),
    ],
)
def test_statuses_that_do_not_pass_are_told_at_once(
    server: ScriptedServer, status: int, error: type[errors.RemoteError], builtin: type[Exception]
) -> None:
    url = server.put("/a", BODY, statuses=[status] * 100)
    with pytest.raises(error, match=f"{url}: .*{status}") as caught:
        remote().fetch(url, MemorySink())
    assert type(caught.value) is error
    assert isinstance(caught.value, builtin)
    assert caught.value.status == status
    assert server.gets == 1


@pytest.mark.parametrize("form", [str, lambda seconds: formatdate(time.time() + seconds + 1, usegmt=True)], ids=["seconds", "date"])
def test_retry_after_is_waited_for(server: ScriptedServer, form: object) -> None:
    url = server.put("/a", b"x", statuses=[503], retry_after=form(1))  # type: ignore[operator]
    began = time.monotonic()
    remote().fetch(url, MemorySink())
    assert 0.9 <= time.monotonic() - began < 30


@pytest.mark.parametrize("options", [{}, {"total_timeout": 30}])
def test_a_retry_after_that_is_too_long_ends_the_call(server: ScriptedServer, options: dict[str, float]) -> None:
    url = server.put("/a", b"x", statuses=[503] * 9, retry_after="10000")
    began = time.monotonic()
    with pytest.raises(errors.RemoteUnavailable, match=r"after 1 attempt.*come back in 10000 s"):
        remote(**options).fetch(url, MemorySink())
    assert time.monotonic() - began < 20


def test_pauses_grow_and_differ(server: ScriptedServer) -> None:
    url, moments = server.put("/a", b"x", statuses=[503] * 3), list[float]()
    server.on_request = lambda request: moments.append(time.monotonic())
    remote(backoff=0.1).fetch(url, MemorySink())
    pauses = [b - a for a, b in itertools.pairwise(moments)]
    assert [0.05 * 2**n <= pause for n, pause in enumerate(pauses)] == [True] * 3
    assert pauses[0] < 5


def test_nobody_listens() -> None:
    port = free_port()
    with pytest.raises(errors.RemoteUnavailable, match=f"127.0.0.1:{port}/a: the connection failed: Connection refused, after 2 attempts"):
        remote(attempts=2).fetch(f"http://127.0.0.1:{port}/a", MemorySink())


def test_nobody_accepts() -> None:
    """The queue of the listener is full: connecting gets no answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        began = time.monotonic()
        with pytest.raises(errors.RemoteTimeout, match="after 2 attempts"):
            remote(attempts=2, connect_timeout=0.2).stat(f"http://127.0.0.1:{full.getsockname()[1]}/a")
        assert time.monotonic() - began < 15


def test_no_such_host() -> None:
    with pytest.raises(errors.RemoteUnavailable, match="cannot be resolved"):
        remote(attempts=1).stat("http://no-such-host.invalid/a")


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b"HTTP/1.1 20"])
def test_what_answers_is_no_http_server(answer: bytes) -> None:
    def serve() -> None:
        for _ in range(2):
            connection = listener.accept()[0]
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        with pytest.raises((errors.RemoteUnavailable, errors.RemoteProtocolError), match="after 2 attempts"):
            remote(attempts=2).fetch(f"http://127.0.0.1:{listener.getsockname()[1]}/a", MemorySink())
        serving.join()


def test_the_first_error_ends_the_other_streams(server: ScriptedServer) -> None:
    """The first part stands still, the others are refused: the call does not wait for the first."""
    url = server.put("/a", BODY, stall_after=1000, stalls=1)
    server.on_request = lambda request: (
        None if request.headers["Range"].startswith("bytes=0-") else server.objects["/a"].statuses.append(403)
    )
    began = time.monotonic()
    with pytest.raises(errors.AccessDenied):
        remote(read_timeout=30).fetch(url, MemorySink())
    assert time.monotonic() - began < 20


def test_errors_name_no_url_that_is_none() -> None:
    for url in ("http://", "https:///a", "http://h:port/a", "http://h:99999/a", "http://[1/a", f"http://{'h' * 70}/a", "http://h\u2100/"):
        with pytest.raises(errors.ConfigError, match=r"https?://host/path"):
            remote().stat(url)


def test_http_has_no_listing(server: ScriptedServer) -> None:
    with pytest.raises(errors.RemoteError, match="cannot list"):
        list(remote().list(server.url))
