"""HTTP transfers by libcurl: what is sent, what is believed of an answer, and what each failure is called."""

from __future__ import annotations

import gzip
import queue
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from forebay.errors import RemoteProtocolError, RemoteTimeout
from forebay.remote.base import AttemptFailed, CallAborted, Trouble
from forebay.remote.http import loop
from forebay.remote.http.loop import start
from forebay.remote.http.transfers import Headers, HttpTransfer, TransferRequest
from forebay.testing import ScriptedServer
from tests.remote.responses import Ended, Response, whole
from tests.remote_objects import connections
from tests.servers.nginx import nginx as running
from tests.servers.ports import free_port
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw

BODY = random.Random(5).randbytes((1 << 20) + 17)


def request(url: str, headers: Mapping[str, str] | None = None, method: str = "GET", **more: object) -> TransferRequest:
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return TransferRequest(method, f"{scheme}://{host}", slash + path or "/", headers or {}, **more)  # type: ignore[arg-type]


def get(url: str, headers: Mapping[str, str] | None = None, method: str = "GET", **more: object) -> Response:
    """The whole response. Raises what ended it early."""
    return whole(start(HttpTransfer(request(url, headers, method, **more))))


def failure(url: str, **more: object) -> AttemptFailed:
    with pytest.raises(AttemptFailed) as caught:
        get(url, **more)  # type: ignore[arg-type]
    return caught.value


# -- what is sent --------------------------------------------------------------------------------------------------------


def test_no_header_is_sent_but_those_given(raw: RawServer) -> None:
    raw.says("Content-Length: 0")
    for method, body in (("GET", None), ("HEAD", None), ("DELETE", None), ("PUT", b"12345"), ("POST", b""), ("GET", None)):
        get(f"{raw.url}/a", {"Host": "h:1", "X-Empty": "", "X-Latin": "caf\xe9"}, method, body=body)
        first, *lines = raw.requests[-1].split(b"\r\n\r\n")[0].split(b"\r\n")
        assert first == f"{method} /a HTTP/1.1".encode()
        length = [] if body is None else [b"Content-Length: %d" % len(body)]
        assert sorted(lines) == sorted([b"Host: h:1", b"X-Empty:", b"X-Latin: caf\xe9", *length])


@pytest.mark.parametrize(
    "target", ["/a/../b", "/./a", "//", "/a//b", "/a%2fB%7e", "/a?b=%2B&c#d", "/%zz", "/a\\b", "/a'(){}|^`\"<>", "/..?..", "/*"]
)
def test_a_target_is_sent_as_it_is(raw: RawServer, target: str) -> None:
    raw.says("Content-Length: 0")
    get(raw.url + target)
    assert raw.requests[-1].split(b"\r\n")[0].decode() == f"GET {target} HTTP/1.1"


@pytest.mark.parametrize(
    "headers", [{"X": "a\r\nY: b"}, {"X": "a\nY: b"}, {"X\r\nY": "b"}, {"X": "a\0b"}, {"X: y": "z"}, {"": "a"}, {"X": "\u2100"}]
)
def test_a_header_that_would_begin_another_is_not_sent(raw: RawServer, headers: dict[str, str]) -> None:
    raw.says("Content-Length: 0")
    assert not failure(f"{raw.url}/a", headers=headers).retryable
    assert raw.requests == []
    assert get(f"{raw.url}/a").status == 200


@pytest.mark.parametrize("target", ["/a b", "/a\r\nX: y", "/a\0b"])
def test_a_target_that_would_begin_another_line_is_not_sent(raw: RawServer, target: str) -> None:
    raw.says("Content-Length: 0")
    assert not failure(raw.url + target).retryable
    assert raw.requests == []


def test_a_large_body_is_sent_whole(raw: RawServer) -> None:
    received: list[bytes] = []

    def answer(connection: socket.socket, head: bytes) -> None:
        _, _, body = head.partition(b"\r\n\r\n")
        while len(body) < len(BODY):
            body += connection.recv(1 << 16)
        received.append(body)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    raw.answer = answer
    assert get(f"{raw.url}/a", method="PUT", body=BODY).status == 200
    assert received == [BODY]
    assert b"Expect" not in raw.requests[0]


def test_a_redirect_is_handed_out_and_not_followed(server: ScriptedServer) -> None:
    with ScriptedServer() as other:
        response = get(server.put("/a", b"", redirect=other.put("/b", b"x")), {"X-Key": "k"})
        assert (response.status, response.headers["location"]) == (302, f"{other.url}/b")
        assert other.requests == []


# -- what is received ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", [{}, {"chunked": True}, {"ranges": False}, {"latency": 0.01}], ids=str)
@pytest.mark.parametrize("size", [0, 1, 16 << 10, len(BODY)])
def test_a_body(server: ScriptedServer, size: int, script: dict[str, object]) -> None:
    response = get(server.put("/a", BODY[:size], **script))
    assert (response.status, response.body) == (200, BODY[:size])
    assert response.headers["eTaG"] == server.objects["/a"].etag


def test_an_encoded_body_comes_as_it_was_sent(server: ScriptedServer) -> None:
    response = get(server.put("/a", BODY, gzip=True), {"Accept-Encoding": "identity"})
    assert server.requests[-1].headers["Accept-Encoding"] == "identity"
    assert response.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(response.body) == BODY


def test_a_head_has_no_body_and_keeps_its_connection(server: ScriptedServer) -> None:
    url, threads = server.put("/a", BODY), set()
    server.on_request = lambda each: threads.add(threading.current_thread())
    for _ in range(3):
        response = get(url, method="HEAD")
        assert (response.status, response.headers["Content-Length"], response.body) == (200, str(len(BODY)), b"")
        assert get(url).body == BODY
    assert len(threads) == 1


def test_interim_responses_and_trailers_are_left_out(raw: RawServer) -> None:
    head = b"HTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 203 Some  words\r\nX-A: 1\r\nx-a:2\r\n"
    raw.answer = lambda connection, asked: connection.sendall(
        head + b"X-Long: one\r\n  two\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n"
    )
    response = get(f"{raw.url}/a")
    assert (response.status, response.reason, response.body) == (203, "Some  words", b"abc")
    assert {"X-Early", "X-Trailer"}.isdisjoint(response.headers)
    assert (response.headers["X-A"], response.headers["X-Long"]) == ("1, 2", "one two")


def test_headers_are_looked_up_in_any_case() -> None:
    headers = Headers([b"Content-Length: 5\r\n", b"X-Latin: caf\xe9\r\n", b"content-length: 6\r\n", b"no colon\r\n"])
    assert headers["CONTENT-LENGTH"] == "5, 6"
    assert ("x-latin" in headers, headers.get("x-LATIN"), "x" in headers, 5 in headers) == (True, "caf\xe9", False, False)
    assert list(headers) == ["Content-Length", "X-Latin", "no colon"]
    assert len(headers) == 3


# -- answers that are cut, or lie ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [True, False])
def test_all_bytes_before_a_cut_are_delivered(server: ScriptedServer, chunked: bool) -> None:
    incoming = start(HttpTransfer(request(server.put("/a", BODY, cut_after=50_000, chunked=chunked))))
    incoming.wait_for_head()
    data = b""
    with pytest.raises(AttemptFailed, match="the connection was cut") as caught:
        while True:
            data += incoming.read(1 << 16)
    assert data == BODY[:50_000]
    assert caught.value.retryable
    assert chunked or f"{len(BODY) - 50_000:,} bytes before the end" in caught.value.reason


def test_a_cut_before_the_head_and_within_it(raw: RawServer) -> None:
    for head in (b"", b"HTTP/1.1 200 OK\r\nContent-", b"HTTP/1.1 20"):
        raw.answer = lambda connection, asked, head=head: connection.sendall(head)  # type: ignore[misc]
        assert failure(f"{raw.url}/a").retryable


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b"\x00\x01\x02\x03\x04\x05\x06\x07\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_what_is_not_http(raw: RawServer, answer: bytes) -> None:
    raw.answer = lambda connection, asked: connection.sendall(answer)
    assert failure(f"{raw.url}/a").error is RemoteProtocolError


@pytest.mark.parametrize("claim", ["-5", "five", "1" + 30 * "0", "5\r\nContent-Length: 6"])
def test_a_length_that_cannot_be_is_no_response(raw: RawServer, claim: str) -> None:
    """Refused, or handed out for the caller to refuse: never a body of another length."""
    raw.says(f"Content-Length: {claim}", body=b"12345")
    try:
        response = get(f"{raw.url}/a")
    except AttemptFailed:
        return
    assert response.headers["Content-Length"] == claim.replace("\r\nContent-Length:", ",")


def test_bytes_after_the_end_belong_to_no_response(raw: RawServer) -> None:
    """They are dropped with their connection, and are not the answer to the next request."""
    evil = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"

    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood" + evil)
        connection.recv(1 << 16)

    raw.answer = answer
    assert [get(f"{raw.url}/{n}").body for n in range(3)] == [b"good"] * 3


def test_what_a_range_claims_is_handed_out_as_it_is(server: ScriptedServer) -> None:
    response = get(server.put("/a", BODY, content_range="bytes 5-6/7"), {"Range": "bytes=0-9"})
    assert (response.status, response.headers["Content-Range"], response.body) == (206, "bytes 5-6/7", BODY[:10])


def test_headers_without_an_end_are_not_kept_in_memory(raw: RawServer) -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n")
        while not raw.ended.is_set():
            connection.sendall(b"X: " + b"x" * 4000 + b"\r\n")

    raw.answer = answer
    assert failure(f"{raw.url}/a").error is RemoteProtocolError


# -- time ----------------------------------------------------------------------------------------------------------------


def quiet(raw: RawServer, first: bytes = b"", then: bytes = b"") -> None:
    """Answer with ``first``, then with ``then`` again and again."""

    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(first)
        while not raw.ended.wait(0.05):
            connection.sendall(then)

    raw.answer = answer


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 10000\r\n\r\n"


@pytest.mark.parametrize(
    ("first", "then"),
    [(b"", b""), (HEAD, b""), (HEAD + b"x", b""), (b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"), (b"", b"HTTP/1.1 100 Continue\r\n\r\n")],
)
def test_the_read_timeout_ends_silence_and_endless_heads(raw: RawServer, first: bytes, then: bytes) -> None:
    quiet(raw, first, then)
    began = time.monotonic()
    failed = failure(f"{raw.url}/a", read_timeout=0.4)
    assert 0.39 <= time.monotonic() - began < 20
    assert (failed.error, failed.trouble) == (RemoteTimeout, None if first + then else Trouble.SILENT)


def test_the_read_timeout_counts_from_the_last_byte(raw: RawServer) -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n")
        for _ in range(5):
            raw.ended.wait(0.8)
            connection.sendall(b"x")

    raw.answer = answer
    assert get(f"{raw.url}/a", read_timeout=3).body == b"xxxxx"


def test_the_deadline_ends_a_body_that_trickles(raw: RawServer) -> None:
    quiet(raw, HEAD, b"x")
    began = time.monotonic()
    assert failure(f"{raw.url}/a", until=time.monotonic() + 0.5).error is RemoteTimeout
    assert time.monotonic() - began < 20


def test_the_connect_timeout_ends_connecting_and_tls() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        began = time.monotonic()
        for scheme in ("http", "https"):
            failed = failure(f"{scheme}://127.0.0.1:{full.getsockname()[1]}/a", connect_timeout=0.3)
            assert (failed.error, failed.trouble) == (RemoteTimeout, Trouble.SILENT)
        assert time.monotonic() - began < 20
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert failure(f"https://127.0.0.1:{silent.getsockname()[1]}/a", connect_timeout=0.3).error is RemoteTimeout


def test_nobody_listens_and_no_such_host() -> None:
    assert failure(f"http://127.0.0.1:{free_port()}/a").reason == "the connection failed: Connection refused"
    assert "cannot be resolved" in failure("http://no-such-host.invalid/a").reason


# -- pausing and cancelling ----------------------------------------------------------------------------------------------


def test_a_slow_reader_holds_back_the_sender(server: ScriptedServer) -> None:
    """No more is read than the receiver takes, and its slowness is not the server's."""
    body = BODY * 24
    incoming = start(HttpTransfer(request(server.put("/a", body), read_timeout=1), limit=64 << 10))
    incoming.wait_for_head()
    time.sleep(1.5)  # longer than the limit for a wait
    assert server.sent < len(body) - (1 << 20)
    data = bytearray()
    while piece := incoming.read(1 << 20):
        assert len(piece) <= 80 << 10
        data += piece
    assert data == body


def test_read_waits_for_as_much_as_is_wanted(server: ScriptedServer) -> None:
    incoming = start(HttpTransfer(request(server.put("/a", BODY, rate=4 << 20))))
    incoming.wait_for_head()
    sizes = []
    while piece := incoming.read(100_000, at_least=100_000):
        sizes.append(len(piece))
    assert sizes == [100_000] * (len(BODY) // 100_000) + [len(BODY) % 100_000]


def test_a_receiver_that_fails_when_it_is_offered_the_rest_ends_its_own_transfer_only(server: ScriptedServer) -> None:
    class Failing(Ended):
        def __init__(self, request: TransferRequest) -> None:
            super().__init__(request)
            self.refused = threading.Event()

        def data(self, piece: bytes) -> bool:
            if not self.refused.is_set():
                self.refused.set()
                return False
            raise ValueError("no more")

    transfer = Failing(request(url := server.put("/a", BODY)))
    start(transfer)
    assert transfer.refused.wait(60)
    current = loop._current
    transfer.attend(transfer)
    assert transfer.ended.wait(60)
    assert isinstance(transfer.error, ValueError)
    assert get(url).body == BODY
    assert loop._current is current


def test_close_wakes_the_thread_that_waits(server: ScriptedServer) -> None:
    for after in (0, 1000):
        server.stalled.clear()
        incoming = start(HttpTransfer(request(server.put("/a", BODY, stall_after=after))))
        raised: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

        def read(incoming: HttpTransfer = incoming, raised: queue.SimpleQueue[BaseException] = raised) -> None:
            try:
                incoming.wait_for_head()
                while incoming.read(1 << 20, 1 << 20):
                    continue
            except BaseException as error:
                raised.put(error)

        reader = threading.Thread(target=read)
        reader.start()
        assert server.stalled.wait(60)
        incoming.close()
        reader.join(60)
        assert isinstance(raised.get(timeout=60), CallAborted)
        incoming.close()


def test_a_cancelled_transfer_closes_its_connection_and_no_other(server: ScriptedServer) -> None:
    stalling, good = server.put("/a", BODY, stall_after=1000), server.put("/b", BODY)
    incoming = start(HttpTransfer(request(stalling)))
    incoming.wait_for_head()
    assert server.stalled.wait(60)
    assert get(good).body == BODY
    assert connections(server) == 2
    incoming.close()
    assert get(good).body == BODY
    server.go.set()
    while connections(server) > 1:
        time.sleep(0.01)
    assert get(good).body == BODY
    assert connections(server) == 1


def test_an_error_of_a_receiver_ends_its_transfer_only(server: ScriptedServer) -> None:
    class Full(Ended):
        def data(self, piece: bytes) -> bool:
            raise OSError("no space left")

    full = Full(request(url := server.put("/a", BODY)))
    other = start(HttpTransfer(request(url), limit=len(BODY)))
    start(full)
    assert full.ended.wait(60)
    assert str(full.error) == "no space left"
    assert whole(other).body == BODY


# -- many at once --------------------------------------------------------------------------------------------------------


def test_many_threads_share_the_loop_and_its_connections(server: ScriptedServer) -> None:
    bodies = {server.put(f"/{n}", BODY[n : n + 5000 * n]): BODY[n : n + 5000 * n] for n in range(30)}
    wrong: list[str] = []

    def read(url: str) -> None:
        for _ in range(5):
            wrong.extend([url] if get(url).body != bodies[url] else [])

    threads = [threading.Thread(target=read, args=(url,)) for url in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert connections(server) <= len(bodies)


def test_a_receiver_may_begin_the_next_transfer(server: ScriptedServer) -> None:
    url, ended = server.put("/a", BODY), threading.Event()

    class Chained(Ended):
        left = 3

        def end(self, error: Exception | None) -> None:
            Chained.left -= 1
            start(Chained(request(url))) if Chained.left else ended.set()

    start(Chained(request(url)))
    assert ended.wait(60)
    assert server.gets == 3


# -- certificates --------------------------------------------------------------------------------------------------------


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with running(tmp_path / "tls", tls=True) as nginx:
        url = nginx.put("a", BODY)
        failed = failure(url)
        assert failed.reason.startswith("its certificate is not trusted: self-signed certificate")
        assert failed.reason.endswith("in REQUESTS_CA_BUNDLE, CURL_CA_BUNDLE or SSL_CERT_FILE; the first that is set counts")
        assert not failed.retryable
        for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"):
            with monkeypatch.context() as patch:
                patch.setenv(name, str(nginx.ca))
                assert get(url).body == BODY
                assert "another host" in failure(url.replace("127.0.0.1", "localhost")).reason
            assert "not trusted" in failure(url).reason, "a connection of other trust was used"
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "none"))
        assert not failure(url).retryable


def test_a_server_that_speaks_no_tls(server: ScriptedServer) -> None:
    assert failure(server.url.replace("http:", "https:") + "/a").reason == "TLS failed"


# -- proxies -------------------------------------------------------------------------------------------------------------


def test_a_proxy_gets_the_whole_url_and_its_own_credentials(server: ScriptedServer) -> None:
    server.put("/a", b"through the proxy")
    proxy = server.url.replace("://", "://me:p%40ss@")
    assert get("http://far.example:81/a?b=c", {"Host": "far.example:81"}, proxy=proxy).body == b"through the proxy"
    assert server.requests[-1].path == "http://far.example:81/a?b=c"
    assert server.requests[-1].headers["Proxy-Authorization"] == "Basic bWU6cEBzcw=="


def test_the_environment_names_no_proxy_here(server: ScriptedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which proxy a request goes through is decided before, by the rules of Python."""
    url = server.put("/a", b"x")
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert get(url).body == b"x"
    monkeypatch.setenv("no_proxy", "*")
    assert "proxy" in failure(url, proxy="http://127.0.0.1:1").reason


def test_a_tunnel_is_asked_for_without_the_headers_of_the_request(raw: RawServer) -> None:
    raw.answer = lambda connection, asked: connection.sendall(b"HTTP/1.1 407 No\r\nContent-Length: 0\r\n\r\n")
    failed = failure("https://far.example/a", headers={"Authorization": "Bearer s3cret"}, proxy=raw.url.replace("://", "://me:pass@"))
    assert (failed.reason, failed.retryable) == ("its proxy answers 407", False)
    assert raw.requests[0].startswith(b"CONNECT far.example:443 ")
    assert b"s3cret" not in raw.requests[0]
    raw.answer = lambda connection, asked: connection.sendall(b"HTTP/1.1 502 No\r\nContent-Length: 0\r\n\r\n")
    assert failure("https://far.example/a", proxy=raw.url).retryable


def test_through_a_tunnel_only_the_servers_head_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raw: RawServer) -> None:
    with running(tmp_path / "tls", tls=True) as nginx:
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(nginx.ca))
        tunnel_to(raw, int(nginx.put("a", BODY).split(":")[2].partition("/")[0]), b"HTTP/1.1 200 Connected\r\nX-Proxy: 1\r\n\r\n")
        response = get(f"{nginx.url}/a", proxy=raw.url)
        assert (response.status, response.body, "X-Proxy" in response.headers) == (200, BODY, False)


def tunnel_to(raw: RawServer, port: int, reply: bytes, greet: Callable[[socket.socket], None] = lambda connection: None) -> None:
    """Have ``raw`` pass on what follows a request for a tunnel."""

    def answer(connection: socket.socket, asked: bytes) -> None:
        greet(connection)
        with socket.create_connection(("127.0.0.1", port)) as target:
            connection.sendall(reply)
            threading.Thread(target=copy, args=(target, connection), daemon=True).start()
            copy(connection, target)

    def copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while block := source.recv(1 << 16):
                target.sendall(block)
        except OSError:
            return

    raw.answer = answer


def test_a_socks_proxy_resolves_the_name(server: ScriptedServer) -> None:
    server.put("/a", b"through socks")
    names: list[bytes] = []

    def serve() -> None:
        with listener.accept()[0] as client:
            client.recv(300)
            client.sendall(b"\x05\x00")
            names.append(client.recv(300))
            client.sendall(b"\x05\x00\x00\x01\0\0\0\0\0\0")
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as target:
                target.sendall(client.recv(1 << 16))
                while block := target.recv(1 << 16):
                    client.sendall(block)
                    if b"through socks" in block:
                        return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        assert get("http://far.example/a", proxy=f"socks5h://127.0.0.1:{listener.getsockname()[1]}").body == b"through socks"
    assert b"far.example" in names[0]


# -- nothing of it is told -----------------------------------------------------------------------------------------------


def test_no_failure_quotes_the_request(raw: RawServer, server: ScriptedServer) -> None:
    """libcurl's texts name hosts, and may name whole URLs."""
    raw.answer = lambda connection, asked: connection.sendall(b"HTTP/1.1 200 s3cret s3cret\x00\r\n: s3cret\r\n\r\n")
    secret = "/a?sig=s3cret"
    nobody = "http://127.0.0.1:1"
    for url in (raw.url, nobody, "http://none.invalid", "https://none.invalid", server.url.replace("http:", "https:")):
        for proxy in (None, nobody.replace("://", "://me:s3cret@")):
            assert "s3cret" not in repr(failure(url + secret, proxy=proxy))
