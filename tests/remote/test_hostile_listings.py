"""Listings that nobody sane writes: each ends, in a typed error, or without the names that lead astray."""

from __future__ import annotations

import io
import json
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.directories import listings
from forebay.remote import RemoteOptions
from forebay.remote.s3 import S3Remote
from forebay.sources import TarSource, UrlSource
from forebay.testing import ScriptedServer
from tests.remote_directories import write_files
from tests.servers.counting import Shelf
from tests.servers.counting import shelf as shelf
from tests.servers.raw import RawServer
from tests.servers.raw import raw as raw

# -- names ---------------------------------------------------------------------------------------------------------------

EVIL = ["\ud800", "a\0b", "../x", "a/../../x", "/etc/passwd", "a//b", "a\nb", "\x1b[2J", "x" * 3000, "a/" + "y" * 300, ".", "a/./b"]


def mark(files: str) -> bytes:
    return f'{{"forebay": 1, "complete": true, "files": {files}}}'.encode()


@pytest.mark.parametrize("name", EVIL, ids=lambda name: ascii(name)[:20])
def test_names_that_no_file_can_have(cache: forebay.Cache, server: ScriptedServer, name: str) -> None:
    server.put("/d/.forebay.json", mark(json.dumps({name: {"size": 1, "xxh3": "0", "etag": None}})))
    with pytest.raises(errors.BadListing):
        cache.directory(f"{server.url}/d/")


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"files":' * 100_000,
        mark("[]"),
        mark('{"a": {"size": -1, "xxh3": "0", "etag": null}}'),
        mark('{"a": {"size": 1e400, "xxh3": "0", "etag": null}}'),
        mark(f'{{"a": {{"size": {10**20}, "xxh3": "0", "etag": null}}}}'),
        mark(f'{{"a": {{"size": {"9" * 5000}, "xxh3": "0", "etag": null}}}}'),
        mark('{"a": {"size": "five", "xxh3": "0", "etag": null}}'),
        b"\xff\xfe",
        b"null",
        b"",
    ],
    ids=lambda data: ascii(data[:30]),
)
def test_a_mark_that_makes_no_sense(cache: forebay.Cache, server: ScriptedServer, data: bytes) -> None:
    server.put("/d/.forebay.json", data)
    with pytest.raises(errors.RemoteProtocolError):
        cache.directory(f"{server.url}/d/")


@pytest.mark.parametrize("stated", [True, False])
def test_a_mark_without_an_end(cache: forebay.Cache, raw: RawServer, monkeypatch: pytest.MonkeyPatch, stated: bool) -> None:
    monkeypatch.setattr(listings, "LARGEST", 4 << 20)

    def answer(connection: socket.socket, head: bytes) -> None:
        length = f"Content-Length: {1 << 40}\r\n" if stated else ""
        connection.sendall(f"HTTP/1.1 200 OK\r\nConnection: close\r\n{length}\r\n".encode())
        while True:
            connection.sendall(b" " * (1 << 20))

    raw.answer = answer
    with pytest.raises(errors.RemoteProtocolError, match="a small one is due"):
        cache.directory(f"{raw.url}/d/")


def test_a_large_mark_on_a_filesystem(cache: forebay.Cache, shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "LARGEST", 1000)
    shelf.put("d/.forebay.json", b" " * 1001)
    with pytest.raises(errors.RemoteProtocolError, match="a small one is due"):
        cache.directory("d", filesystem=shelf.fsspec())


def test_a_mark_that_readers_would_refuse_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listings, "LARGEST", 1000)
    write_files(tmp_path / "from", {f"file-{i}": b"x" for i in range(20)})
    with pytest.raises(errors.ConfigError, match="pack the 20 files"):
        forebay.Checkpoint.upload(tmp_path / "from", tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_names_of_a_filesystem(cache: forebay.Cache, shelf: Shelf, caplog: pytest.LogCaptureFixture) -> None:
    shelf.fill("d", {"a.bin": b"x", "b.bin": b"y"})
    shelf.lists("d/../x", "d/a\0b", "d//etc/passwd")
    with pytest.raises(errors.BadListing):
        cache.directory("d", filesystem=shelf.fsspec())
    source = UrlSource("d", filesystem=shelf.fsspec())
    assert list(source.keys()) == ["a.bin", "b.bin"]
    assert [record.message for record in caplog.records if "skipped" in record.message] != []
    assert len([record for record in caplog.records if "skipped" in record.message]) == 1
    assert source["a.bin"] == b"x"


def tar(*names: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 1
            file.addfile(member, io.BytesIO(b"x"))
    return made.getvalue()


def test_members_that_lead_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a.tar").write_bytes(tar("ok.txt", "../../etc/x", "a/../../b", "..", "/abs.txt", "sub/ok.txt", "a..b"))
    source = TarSource(tmp_path / "a.tar")
    assert list(source.keys()) == ["a.tar/ok.txt", "a.tar/abs.txt", "a.tar/sub/ok.txt", "a.tar/a..b"]
    assert len([record for record in caplog.records if "skipped" in record.message]) == 1
    with pytest.raises(errors.NotFound):
        source["a.tar/../../etc/x"]


def test_a_member_of_a_size_that_cannot_be(tmp_path: Path) -> None:
    head = bytearray(tar("a")[:512])
    head[124:136] = b"\x80" + b"\xff" * 11
    head[148:156] = b"        "
    head[148:156] = b"%06o\0 " % sum(head)
    (tmp_path / "a.tar").write_bytes(bytes(head) + bytes(2048))
    with pytest.raises(errors.BadArchive):
        list(TarSource(tmp_path / "a.tar").keys())


# -- S3 ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def s3(raw: RawServer, monkeypatch: pytest.MonkeyPatch) -> S3Remote:
    pytest.importorskip("botocore")
    monkeypatch.setenv("AWS_ENDPOINT_URL", raw.url)
    monkeypatch.setattr(forebay.remote, "_remotes", {})  # else the one of another test, which knows another endpoint
    return S3Remote(RemoteOptions(anonymous=True, attempts=1, read_timeout=20))


ITEM = '<Contents><Key>{}</Key><Size>{}</Size><LastModified>2026-01-01T00:00:00Z</LastModified><ETag>"1"</ETag></Contents>'


def page(items: str, token: str = "") -> bytes:
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return f"<ListBucketResult>{items}{more}</ListBucketResult>".encode()


def answering(raw: RawServer, make: Callable[[int], bytes]) -> None:
    def answer(connection: socket.socket, head: bytes) -> None:
        body = make(len(raw.requests))
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    raw.answer = answer


@pytest.mark.parametrize(
    "make",
    [
        lambda n: page(ITEM.format(f"k{n}", 1), "same"),
        lambda n: page(ITEM.format("k", 1), f"token {n}"),
        lambda n: page(ITEM.format(f"k{n % 7}", 1), f"token {n}"),
        lambda n: page("", "same"),
        lambda n: page(ITEM.format(f"k{n}", 1), f"token {n % 3}"),
    ],
)
def test_a_listing_without_an_end_ends(s3: S3Remote, raw: RawServer, make: Callable[[int], bytes]) -> None:
    answering(raw, make)
    with pytest.raises(errors.RemoteProtocolError, match="never ends"):
        list(s3.list("s3://bucket/"))
    assert len(raw.requests) < 10


def test_pages_of_an_honest_listing(s3: S3Remote, raw: RawServer) -> None:
    answering(raw, lambda n: page("" if n == 3 else ITEM.format(f"k{n}", 1), f"token {n}" if n < 5 else ""))
    assert [info.url for info in s3.list("s3://bucket/")] == [f"s3://bucket/k{n}" for n in (1, 2, 4, 5)]


BOMB = b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY a "xxxxxxxxxx">' + b"".join(
    b'<!ENTITY %c "%s">' % (n + 1, b"&%c;" % n * 10) for n in range(ord("a"), ord("i"))
)


@pytest.mark.parametrize(
    "body",
    [
        BOMB + b"]><a>&i;</a>",
        (BOMB + b"]><a>&i;</a>").decode().encode("utf-16"),
        b'<!DOCTYPE a SYSTEM "file:///etc/passwd"><a/>',
        b"<a>" * 300_000,
        b"<a" + b" b='c'" * 10 + b"/>",
        b'<?xml version="1.0" encoding="big5"?><a/>',
        b'<?xml version="1.0" encoding="nonsense"?><a/>',
        b"<Error><Code>Evil\x1b[2J</Code></Error>",
        b"{}",
        b"",
        page(ITEM.format("k", "")),
        page(ITEM.format("k", "-1")),
        page(ITEM.format("k", "five")),
        page(ITEM.format("k", 10**20)),
        page(ITEM.format("k", "9" * 5000)),
        page(ITEM.format("k", 1).replace("2026-01-01T00:00:00Z", "yesterday")),
        page(ITEM.format("k", 1).replace("2026-01-01T00:00:00Z", "")),
        page(ITEM.format("&#xd800;", 1)),
    ],
    ids=lambda body: ascii(body[-40:]),
)
def test_answers_that_make_no_sense(s3: S3Remote, raw: RawServer, body: bytes) -> None:
    answering(raw, lambda n: body)
    with pytest.raises(errors.RemoteError) as caught:
        list(s3.list("s3://bucket/"))
    assert str(caught.value).isprintable()


def test_an_answer_without_an_end(s3: S3Remote, raw: RawServer) -> None:
    def answer(connection: socket.socket, head: bytes) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n<a>")
        while True:
            connection.sendall(b" " * (1 << 20))

    raw.answer = answer
    with pytest.raises(errors.RemoteProtocolError, match="a small one is due"):
        list(s3.list("s3://bucket/"))


@pytest.mark.parametrize("key", ["%00", "..%2Fx", "%2Fetc", "a%0Ab"])
def test_keys_that_lead_astray(s3: S3Remote, raw: RawServer, cache: forebay.Cache, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("FOREBAY_S3_ANONYMOUS", "1")
    answering(raw, lambda n: page(ITEM.format(f"d/{key}", 1) + ITEM.format("d/ok", 1)))
    with pytest.raises(errors.BadListing):
        cache.directory("s3://bucket/d/")
    assert "ok" in list(UrlSource("s3://bucket/d").keys())
