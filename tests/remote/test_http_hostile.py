"""Nothing that a server claims is believed before the bytes come: lengths, ranges, what a compressed body becomes."""

from __future__ import annotations

import gzip
import socket
import tracemalloc
import zlib
from pathlib import Path
from typing import Any, ClassVar

import pytest

import forebay
from forebay import errors
from forebay._model import Span
from forebay.cache import fetcher_of
from forebay.remote import RemoteOptions
from forebay.remote.http import HttpRemote, requests
from forebay.sources import UrlSource
from forebay.testing import MemorySink, ScriptedServer
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw

QUICK = RemoteOptions(attempts=2, backoff=0.001, read_timeout=5, connect_timeout=5)
BUDGET = 100_000_000


@pytest.fixture
def small(tmp_path: Path) -> forebay.Cache:
    return forebay.Cache(tmp_path / "root", budget=BUDGET, min_free=0, remote_options=QUICK)


def doors(cache: forebay.Cache, url: str) -> list[object]:
    """The ways by which an object is read."""
    return [
        lambda: cache.read(url), lambda: cache.read(url, bypass=True), lambda: cache.local(url).close(),
        lambda: cache.open(url, bypass=True).read(),
        lambda: UrlSource(url.rpartition("/")[0], options=QUICK)[url.rpartition("/")[2]],
    ]  # fmt: skip


@pytest.mark.parametrize("claim", [6, 4 << 30, 1 << 50, (1 << 63) - 1])
def test_memory_grows_as_bytes_come(small: forebay.Cache, raw: RawServer, claim: int) -> None:
    raw.says(f"Content-Length: {claim}", 'ETag: "1"', body=b"12345")
    with small:
        small.put("kept", bytes(1 << 20))
        tracemalloc.start()
        for door in doors(small, f"{raw.url}/a"):
            with pytest.raises((errors.RemoteUnavailable, errors.NoSpace)):
                door()  # type: ignore[operator]
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 40 << 20
        assert small.get("kept") is not None
        assert small.check(deep=True) == []


@pytest.mark.parametrize(
    "claim",
    ["1" + 20 * "0", "9" * 5000, str(1 << 63), "-5", "+5", "5_0", "0x5", "5.0", "five", "", "5, 6", "²", "5\r\nContent-Length: 6", "5,"],
)
def test_a_length_that_cannot_be(small: forebay.Cache, raw: RawServer, claim: str) -> None:
    raw.says(f"Content-Length: {claim}", 'ETag: "1"', body=b"12345")
    with small:
        for door in [
            *doors(small, f"{raw.url}/a"),
            lambda: HttpRemote(QUICK).stat(f"{raw.url}/a"),
            lambda: HttpRemote(QUICK).read(f"{raw.url}/a", Span(0, 5)),
        ]:
            with pytest.raises(errors.RemoteError):
                door()  # type: ignore[operator]


def test_the_words_of_a_status_cannot_forge_a_line(raw: RawServer) -> None:
    raw.answer = lambda connection, head: connection.sendall(b"HTTP/1.1 400 No\x1b[2J\x85 x\r\nContent-Length: 0\r\n\r\n")
    with pytest.raises(errors.RemoteError, match=r"400 No\\x1b\[2J") as caught:
        HttpRemote(QUICK).fetch(f"{raw.url}/a", MemorySink())
    assert str(caught.value).isprintable()


def test_a_length_that_is_said_twice_is_one(raw: RawServer) -> None:
    raw.says("Content-Length: 5, 5", 'ETag: "1"', body=b"12345")
    sink = MemorySink()
    HttpRemote(QUICK).fetch(f"{raw.url}/a", sink)
    assert sink.data == b"12345"


@pytest.mark.parametrize("total", ["1" + 20 * "0", "9" * 5000, str(1 << 63), "-1", "²", "4", "0x10"])
def test_a_range_of_what_cannot_be(small: forebay.Cache, server: ScriptedServer, total: str) -> None:
    url = server.put("/a", b"12345", content_range=f"bytes 0-4/{total}".encode().decode("latin-1"))
    with small, pytest.raises(errors.RemoteProtocolError):
        small.read(url)


def test_a_claim_alone_evicts_nothing(small: forebay.Cache, raw: RawServer) -> None:
    """Of a range, too: room for all of it is made when the first of it came."""
    size = BUDGET - (8 << 20)

    def answer(connection: socket.socket, head: bytes) -> None:
        lines = ["HTTP/1.1 206 Partial", 'ETag: "1"', f"Content-Range: bytes 0-{(8 << 20) - 1}/{size}", f"Content-Length: {8 << 20}"]
        if b"Range" not in head:
            lines = ["HTTP/1.1 200 OK", 'ETag: "1"', f"Content-Length: {size}"]
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + bytes(1000))

    raw.answer = answer
    with small:
        for number in range(10):
            small.put(f"kept {number}", bytes(9_000_000))
        for door in doors(small, f"{raw.url}/a"):
            with pytest.raises(errors.RemoteError):
                door()  # type: ignore[operator]
        assert [number for number in range(10) if small.get(f"kept {number}") is None] == []


@pytest.mark.rotates
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_is_bounded(small: forebay.Cache, raw: RawServer, encoding: str) -> None:
    body = _bomb(3 * BUDGET, encoding)
    assert len(body) < 1 << 20
    raw.says(f"Content-Length: {len(body)}", f"Content-Encoding: {encoding}", 'ETag: "1"', body=body)
    with small:
        for door in [
            lambda: small.read(f"{raw.url}/a"),
            lambda: small.local(f"{raw.url}/a"),
            lambda: small.read(f"{raw.url}/a", bypass=True),
        ]:
            with pytest.raises(errors.NoSpace):
                door()
        assert HttpRemote(QUICK).read(f"{raw.url}/a", Span(7, 9)) == bytes(9)  # no more than is wanted
        assert small.check(deep=True) == []


def test_what_is_compressed_and_fits_is_read(small: forebay.Cache, raw: RawServer) -> None:
    body = gzip.compress(b"x" * 1_000_000)
    raw.says(f"Content-Length: {len(body)}", "Content-Encoding: gzip", body=body)
    with small:
        assert small.read(f"{raw.url}/a") == b"x" * 1_000_000
        assert small.read(f"{raw.url}/a", bypass=True) == b"x" * 1_000_000


class _Inflating:
    """An object of zlib's that notes how much it got at once."""

    sizes: ClassVar[list[int]] = []

    def __init__(self, wbits: int) -> None:
        self._inner = _new_inflating(wbits=wbits)

    def decompress(self, data: Any, length: int) -> bytes:
        self.sizes.append(len(data))
        return self._inner.decompress(data, length)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


_new_inflating = zlib.decompressobj


def test_of_many_gzip_members_each_costs_the_same(small: forebay.Cache, raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """zlib copies what follows a member: of a block of a mebibyte, a mebibyte for each of its 50,000."""
    monkeypatch.setattr(requests.zlib, "decompressobj", _Inflating)
    _Inflating.sizes.clear()
    pieces = [bytes([number % 256]) * 300 for number in range(3000)]
    body = b"".join(map(gzip.compress, pieces))
    raw.says(f"Content-Length: {len(body)}", "Content-Encoding: gzip", body=body)
    with small:
        assert small.read(f"{raw.url}/a") == b"".join(pieces)
        assert 0 < max(_Inflating.sizes[1:]) <= requests.WINDOW  # a body of one member is decompressed as it comes
        body = gzip.compress(b"") * 20_000
        raw.says(f"Content-Length: {len(body)}", "Content-Encoding: gzip", body=body)
        with pytest.raises(errors.RemoteProtocolError, match="consists of 10,001 members of less than 128 bytes"):
            small.read(f"{raw.url}/b")


def _bomb(size: int, encoding: str) -> bytes:
    packer = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
    block = bytes(1 << 20)
    return b"".join(packer.compress(block) for _ in range(size >> 20)) + packer.flush()


@pytest.mark.parametrize("encoding", ["br", "zstd", "compress", "gzip, gzip"])
def test_what_is_not_decoded_is_said(small: forebay.Cache, raw: RawServer, encoding: str) -> None:
    raw.says("Content-Length: 5", f"Content-Encoding: {encoding}", body=b"12345")
    with small, pytest.raises(errors.RemoteProtocolError, match="only identity"):
        small.read(f"{raw.url}/a")


@pytest.mark.parametrize("size", [4 << 30, 1 << 50])
def test_a_head_that_lies(small: forebay.Cache, raw: RawServer, size: int) -> None:
    def answer(connection: socket.socket, head: bytes) -> None:
        if head.startswith(b"HEAD"):
            connection.sendall(f"HTTP/1.1 200 OK\r\nContent-Length: {size}\r\n\r\n".encode())
        else:
            connection.sendall(b"HTTP/1.1 206 Partial\r\nContent-Length: 5\r\nContent-Range: bytes 0-4/*\r\n\r\n12345")

    raw.answer = answer
    with small, small.open(f"{raw.url}/a", bypass=True) as file, pytest.raises(errors.RemoteChanged, match="shorter"):
        file.read()


VERSIONS = [
    {"etag": 'W/"1"'}, {"etag": None, "modified": 1.5e9}, {"etag": '"1"'}, {"etag": 'W/"1"', "conditions": False},
]  # fmt: skip


@pytest.mark.parametrize("first", VERSIONS, ids=str)
def test_open_past_the_cache_reads_one_version(small: forebay.Cache, server: ScriptedServer, first: dict[str, object]) -> None:
    size = 6 << 20
    url = server.put("/a", b"a" * size, **first)  # type: ignore[arg-type]
    second = {**first, "etag": first["etag"] and str(first["etag"]).replace("1", "2"), "modified": 1.7e9}
    with small, small.open(url, bypass=True) as file:
        assert file.read(10) == b"a" * 10
        server.put("/a", b"b" * size, **second)  # type: ignore[arg-type]
        with pytest.raises(errors.RemoteChanged):
            file.read()


def test_a_weak_etag_that_stays_is_one_version(small: forebay.Cache, server: ScriptedServer) -> None:
    url = server.put("/a", b"a" * (6 << 20), etag='W/"1"')
    with small, small.open(url, bypass=True) as file:
        assert file.read(10) == b"a" * 10
        server.objects["/a"].etag = '"1"'  # as nginx tells it, where it does not compress
        assert file.read() == b"a" * ((6 << 20) - 10)


HOSTS = ["a b", "x\0y", "a..b", f"{'a' * 70}.b", "[fe80::1%]", "[fe80::1%a/b]", "127.0.0.1%41"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_that_cannot_be(small: forebay.Cache, raw: RawServer, server: ScriptedServer, host: str) -> None:
    raw.answer = lambda connection, head: connection.sendall(
        f"HTTP/1.1 302 Found\r\nLocation: http://{host}/\r\nContent-Length: 0\r\n\r\n".encode()
    )
    with small:
        with pytest.raises(errors.RemoteProtocolError, match="redirects to a URL that is not HTTP" if "\0" not in host else "not HTTP"):
            small.read(f"{raw.url}/a")
        good = server.put("/a", b"12345")
        report = small.warm([f"http://{host}/a", good])
        assert list(report.done) == [good]
        assert [type(error) for _, error in report.failed] == [errors.ConfigError]


def test_a_few_bytes_of_a_large_object_evict_nothing(small: forebay.Cache, raw: RawServer) -> None:
    """A server may send less of a range than was asked for: its word on the size of the whole is then believed of a whole answer only."""
    size = BUDGET - (8 << 20)

    def answer(connection: socket.socket, head: bytes) -> None:
        if b"Range: bytes=0-" in head:
            lines = ["HTTP/1.1 206 Partial", 'ETag: "1"', f"Content-Range: bytes 0-4/{size}", "Content-Length: 5"]
            connection.sendall("\r\n".join([*lines, "", ""]).encode() + b"12345")

    raw.answer = answer
    with small:
        for number in range(10):
            small.put(f"kept {number}", bytes(9_000_000))
        with pytest.raises(errors.RemoteError):
            small.read(f"{raw.url}/a")
        assert [number for number in range(10) if small.get(f"kept {number}") is None] == []


def test_a_server_of_short_ranges_is_asked_once_for_all(raw: RawServer) -> None:
    body = bytes(3 << 20)

    def answer(connection: socket.socket, head: bytes) -> None:
        lines, sent = ["HTTP/1.1 200 OK", 'ETag: "1"', f"Content-Length: {len(body)}"], body
        if b"Range:" in head:
            lines = ["HTTP/1.1 206 Partial", 'ETag: "1"', f"Content-Range: bytes 0-99/{len(body)}", "Content-Length: 100"]
            sent = body[:100]
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + sent)

    raw.answer = answer
    sink = MemorySink()
    HttpRemote(QUICK).fetch(f"{raw.url}/a", sink)
    assert sink.data == body
    assert len(raw.requests) == 2


@pytest.mark.parametrize("length", ["1" + 22 * "0", "five"])
def test_a_length_that_cannot_be_beside_a_coding_that_does_nothing(raw: RawServer, length: str) -> None:
    raw.says("Transfer-Encoding: identity", f"Content-Length: {length}", 'ETag: "1"', body=b"12345")
    with pytest.raises(errors.RemoteProtocolError):
        HttpRemote(QUICK).fetch(f"{raw.url}/a", MemorySink())


def test_a_length_beside_chunks_does_not_count(raw: RawServer) -> None:
    raw.says("Transfer-Encoding: Chunked", "Content-Length: 3", body=b"5\r\n12345\r\n0\r\n\r\n")
    sink = MemorySink()
    HttpRemote(QUICK).fetch(f"{raw.url}/a", sink)
    assert sink.data == b"12345"


def test_a_length_that_cannot_be_beside_chunks_is_refused(raw: RawServer) -> None:
    raw.says("Transfer-Encoding: Chunked", "Content-Length: five", body=b"5\r\n12345\r\n0\r\n\r\n")
    with pytest.raises(errors.RemoteProtocolError, match="not HTTP"):
        HttpRemote(QUICK).fetch(f"{raw.url}/a", MemorySink())


MODIFIED = "Last-Modified: Thu, 01 Jan 2015 00:00:00 GMT"
LATER = "Last-Modified: Thu, 01 Jan 2016 00:00:00 GMT"
CHUNKED = b"64\r\n" + bytes(range(100)) + b"\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("head", "ranged", "same"),
    [
        ([MODIFIED], [], True),
        ([MODIFIED], [MODIFIED], True),
        ([MODIFIED], [LATER], False),
        ([MODIFIED], [MODIFIED, 'ETag: "1"'], True),
        (['ETag: W/"1"', MODIFIED], [], True),
        (['ETag: W/"1"'], [MODIFIED], True),
        (['ETag: W/"1"', MODIFIED], [MODIFIED], True),
        (['ETag: W/"1"', MODIFIED], [LATER], False),
        (['ETag: W/"1"', MODIFIED], [LATER, 'ETag: W/"1"'], True),
        (['ETag: W/"1"'], ['ETag: W/"2"'], False),
        (['ETag: "1"'], [], False),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_what_ranges_leave_out_is_no_change(
    small: forebay.Cache, raw: RawServer, head: list[str], ranged: list[str], same: bool, chunked: bool
) -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"HEAD"):
            lines, body = ["HTTP/1.1 200 OK", *head, "Content-Length: 100"], b""
        elif chunked:
            lines, body = ["HTTP/1.1 200 OK", *ranged, "Transfer-Encoding: chunked"], CHUNKED
        else:
            lines, body = ["HTTP/1.1 206 Partial", *ranged, "Content-Range: bytes 0-99/100", "Content-Length: 100"], bytes(range(100))
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)

    raw.answer = answer
    with small, small.open(f"{raw.url}/a", bypass=True) as file:
        if same:
            assert file.read() == bytes(range(100))
        else:
            with pytest.raises(errors.RemoteChanged):
                file.read()


@pytest.mark.parametrize("head", [[], ['ETag: W/"1"']])
def test_a_range_of_an_object_of_another_size_is_another_version(small: forebay.Cache, raw: RawServer, head: list[str]) -> None:
    def answer(connection: socket.socket, asked: bytes) -> None:
        if asked.startswith(b"HEAD"):
            lines, body = ["HTTP/1.1 200 OK", *head, "Content-Length: 100"], b""
        else:
            lines, body = ["HTTP/1.1 206 Partial", "Content-Range: bytes 0-99/200", "Content-Length: 100"], bytes(100)
        connection.sendall("\r\n".join([*lines, "Connection: close", "", ""]).encode() + body)

    raw.answer = answer
    with small, small.open(f"{raw.url}/a", bypass=True) as file, pytest.raises(errors.RemoteChanged):
        file.read()


@pytest.mark.parametrize(
    ("known", "told", "same"),
    [
        (None, [], True),
        ('"1"', [], True),  # asked under If-Match
        ('"1"', ['ETag: "2"'], False),
        ('W/"1"', ['ETag: W/"1"'], True),
        ('W/"1"', ['ETag: W/"2"'], False),
        ('W/"1"', [], False),
        ("1420070400-100", [MODIFIED], True),
        ("1420070400-100", [], True),
        ("1420070400-100", [LATER], False),
        ("1420070400-101", [MODIFIED], False),  # it would have had this byte
    ],
)
def test_what_ended_sooner_may_be_another_version(raw: RawServer, known: str | None, told: list[str], same: bool) -> None:
    head = "\r\n".join(["HTTP/1.1 416 No", *told, "Content-Length: 0", "", ""])
    raw.answer = lambda connection, asked: connection.sendall(head.encode())
    remote = HttpRemote(QUICK)
    if same:
        assert remote.read(f"{raw.url}/a", Span(100, 5), validator=known) == b""
    else:
        with pytest.raises(errors.RemoteChanged):
            remote.read(f"{raw.url}/a", Span(100, 5), validator=known)


NO_BODY = 204, 304


@pytest.mark.parametrize("status", [201, 202, 203, 204, 205, 206, 226, 299, 300, 301, 304, 305, 399, 412, 416])
def test_a_status_that_answers_no_such_request_is_named(small: forebay.Cache, raw: RawServer, status: int) -> None:
    """Such as 304 to a request without a condition, or 206 to one without a range."""

    def answer(connection: socket.socket, head: bytes) -> None:
        body = b"" if status in NO_BODY or head.startswith(b"HEAD") else b"12345"
        length = "" if status in NO_BODY else "Content-Length: 5\r\n"
        connection.sendall(f'HTTP/1.1 {status} Odd\r\nETag: "1"\r\n{length}Connection: close\r\n\r\n'.encode() + body)

    raw.answer = answer
    url = f"{raw.url}/a"
    more = [
        lambda: small.open(url, block_size=64_000), lambda: small.open(url).read(), lambda: small.read_many([url]),
        lambda: small.read(url, refresh=True), lambda: fetcher_of(small).stat(fetcher_of(small).target(url)),
    ]  # fmt: skip
    with small:
        for door in [*doors(small, url), *more]:
            with pytest.raises(errors.RemoteError) as caught:
                door()  # type: ignore[operator]
            assert caught.value.status == status
            assert raw.url in str(caught.value)
