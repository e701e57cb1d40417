"""HTTP/1.1 on one socket: what servers send, in whatever pieces it comes."""

from __future__ import annotations

import http.client
import io
import itertools
import socket
import threading
from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from forebay.remote.wire import BadAnswer, Cut, Head, Headers, Wire


class Pieces:
    """Stands in for a socket: each read gives the next piece."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces, self.sent = [piece for piece in pieces if piece], b""

    def sendall(self, data: bytes) -> None:
        self.sent += data

    def recv_into(self, space: memoryview) -> int:
        piece = self.pieces.pop(0) if self.pieces else b""
        count = min(len(piece), len(space))
        space[:count] = piece[:count]
        if count < len(piece):
            self.pieces.insert(0, piece[count:])
        return count


def cut(data: bytes, places: Iterable[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def answered(pieces: Iterable[bytes], method: str = "GET", size: int = 4096) -> tuple[Head, bytes, Wire]:
    wire = Wire(Pieces(pieces), size)  # type: ignore[arg-type]
    head = wire.ask(method, "/", {"Host": "h"})
    return head, b"".join(iter(lambda: bytes(wire.block(1 << 30)), b"")), wire


places = st.lists(st.integers(0, 1 << 20), max_size=8)


@given(st.binary(max_size=20_000), places, st.sampled_from(["length", "chunks", "end"]), st.integers(1, 5000))
@example(b"x" * 4096, [], "chunks", 4096)
def test_a_body_is_the_same_however_it_comes(body: bytes, where: list[int], framing: str, chunk: int) -> None:
    if framing == "length":
        message = b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    elif framing == "chunks":
        chunks = [body[at : at + chunk] for at in range(0, len(body), chunk)]
        message = b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(b"%X;a=b\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\nA: b\r\n\r\n"
    else:
        message = b"\r\n" + body
    head, found, wire = answered(cut(b"HTTP/1.1 200 OK\r\nETag: 1\r\n" + message, where))
    assert (head.status, head.reason, head.headers["etag"]) == (200, "OK", "1")
    assert found == body
    assert head.length == (len(body) if framing == "length" else None)
    assert wire.is_free == (framing != "end")


@given(st.binary(max_size=300).filter(lambda text: b"\r" not in text), places)
def test_garbage_is_no_answer(text: bytes, where: list[int]) -> None:
    with pytest.raises((BadAnswer, Cut)):
        answered(cut(text, where))


names = st.text("abcXYZ-09", min_size=1, max_size=10)
values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30)


@given(st.lists(st.tuples(names, values), max_size=10), places, st.sampled_from(["\n", "\r\n"]))
def test_headers_are_what_the_standard_library_finds(pairs: list[tuple[str, str]], where: list[int], end: str) -> None:
    pairs = [(f"x-{name}", value) for name, value in pairs]
    text = end.join(["HTTP/1.1 404 Not Found", *(f"{name}:  {value} " for name, value in pairs), "", ""]).encode()
    head, _, _ = answered(cut(text, where))
    known = http.client.parse_headers(io.BytesIO(text.partition(b"\n")[2]))
    assert dict(head.headers) == {name.lower(): ", ".join(value.strip() for value in known.get_all(name, [])) for name in known}


def test_blocks_keep_to_their_limit() -> None:
    wire = Wire(Pieces([b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabcde", b"fghijHTTP"]), 4096)  # type: ignore[arg-type]
    wire.ask("GET", "/", {})
    assert [bytes(wire.block(n)) for n in (3, 3, 1, 99, 99)] == [b"abc", b"de", b"f", b"ghij", b""]
    assert not wire.is_free  # the server said more than it was asked


@pytest.mark.parametrize(
    ("text", "method"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", "HEAD"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "HEAD"),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 10\r\n\r\n", "GET"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", "GET"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0, 0\r\n\r\n", "GET"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nA: b\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "GET"),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\nContent-Length: 0\r\n\r\n", "GET"),
        (b"HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n", "GET"),
    ],
)
def test_answers_without_a_body(text: bytes, method: str) -> None:
    _, body, wire = answered([text], method)
    assert body == b""
    assert wire.is_free


@pytest.mark.parametrize(
    "text", [b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"HTTP/1.1 200 OK\r\nConnection: a, CLOSE\r\nContent-Length: 1\r\n\r\nx"]
)
def test_connections_that_the_server_closes_are_not_kept(text: bytes) -> None:
    _, body, wire = answered([text])
    assert body == b"x"
    assert not wire.is_free


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nA: b\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabc",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n",
    ],
)
def test_a_cut_is_seen(text: bytes) -> None:
    with pytest.raises(Cut):
        answered([text])


@pytest.mark.parametrize(
    "text",
    [
        b"HTTP/2 200 OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA: b\r\n folded\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nA b: c\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1, 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0x1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1" * 9999,
        b"HTTP/1.1 200 OK\r\nA: " + b"b" * (1 << 20),
    ],
)
def test_what_is_not_http(text: bytes) -> None:
    with pytest.raises(BadAnswer):
        answered([text])


def test_a_length_beside_chunks_means_nothing() -> None:
    _, body, _ = answered([b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"])
    assert body == b"abc"


@pytest.mark.parametrize("headers", [{"A": "b\r\nC: d"}, {"A": "b\nC: d"}, {"A\r\nB": "c"}, {"A": "b\0"}])
def test_a_header_cannot_smuggle_another_one(headers: dict[str, str]) -> None:
    sock = Pieces([])
    with pytest.raises(ValueError):
        Wire(sock, 4096).ask("GET", "/", headers)  # type: ignore[arg-type]
    assert sock.sent == b""


@pytest.mark.parametrize("body", [b"", b"small", bytes(1 << 20)], ids=len)
def test_a_question_with_a_body(body: bytes) -> None:
    sock = Pieces([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
    Wire(sock, 4096).ask("PUT", "/a", {"Host": "h"}, body)  # type: ignore[arg-type]
    assert sock.sent == b"PUT /a HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def test_a_server_that_refuses_before_it_has_all_is_heard() -> None:
    ours, theirs = socket.socketpair()

    def refuse() -> None:
        theirs.recv(100)
        theirs.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        theirs.shutdown(socket.SHUT_RD)

    with ours, theirs:
        thread = threading.Thread(target=refuse)
        thread.start()
        wire = Wire(ours, 4096)
        assert wire.ask("PUT", "/", {"Host": "h"}, bytes(64 << 20)).status == 403
        assert bytes(wire.block(99)) == b"no"
        assert not wire.is_free
        thread.join()


def test_names_of_headers_in_any_case() -> None:
    headers = Headers([("ETag", "1"), ("A", "x"), ("a", "y")])
    assert headers["etag"] == headers["ETAG"] == headers.get("Etag") == "1"
    assert headers["A"] == "x, y"
    assert "b" not in headers
    assert headers.get("b", "") == ""
    assert sorted(headers) == ["a", "etag"]
