"""Scenario 35: different keys never collide, the same key is the same everywhere, and none leads out of the root."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

import forebay
from forebay.testing import ScriptedServer

LONG = "k" * 200
KEYS = [
    "key",
    "KEY",
    "Key",
    "key/",
    "key//",
    "/key",
    "key ",
    " key",
    "key\n",
    "ke/y",
    "key?a=1",
    "key?a=2",
    "key#a",
    "http://h/key",
    "https://h/key",
    "s3://h/key",
    "http://g/key",
    unicodedata.normalize("NFC", "ké"),
    unicodedata.normalize("NFD", "ké"),
    LONG,
    LONG + "a",
    LONG + "b",
    LONG * 20 + "a",
    LONG * 20 + "b",
    "",
    ".",
    "..",
    "../key",
    "../../../../tmp/forebay-escaped",
    "/etc/passwd",
    "a/../key",
    "a\0b",
    "a\0c",
    "CON",
    "%2e%2e/key",
    "values:key",
    "urls:key",
    "🗝",
    "~",
    "$HOME",
    "key;rm",
    "'; DROP TABLE entries; --",
]


def test_s35_keys_of_values(root: Path, tmp_path: Path) -> None:
    with forebay.Cache(root) as cache:
        for i, key in enumerate(KEYS):
            assert cache.put(key, str(i).encode() * (1 if i % 2 else 10_000))
        for i, key in enumerate(KEYS):
            assert cache.get(key) == str(i).encode() * (1 if i % 2 else 10_000), key
        assert sorted(entry.key for entry in cache.entries()) == sorted(KEYS)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert not Path("/tmp/forebay-escaped").exists()


PATHS = [
    "/dir/x.bin",
    "/dir/X.bin",
    "/Dir/x.bin",
    "/dir/x.bin/",
    "/dir//x.bin",
    "/dir/x.bin?v=1",
    "/dir/x.bin?v=2",
    "/dir/x.bin?V=1",
    "/dir/x.bin?",
    "/dir/" + quote("é"),
    "/dir/" + quote("é"),
    "/" + LONG + "a",
    "/" + LONG + "b",
    "/" + LONG + LONG + "/a",
    "/" + LONG + LONG + "/b",
    "/a/../x.bin",
    "/x.bin",
    "/%78.bin",
    "/x.bin.gz",
    "/..%2F..%2Fx.bin",
]


def test_s35_urls(root: Path, tmp_path: Path, server: ScriptedServer) -> None:
    """Each is answered by what was asked for; what the cache gives is what the server gave for exactly this."""

    def echo(request: Any) -> None:
        server.put(request.path.partition("?")[0], request.path.encode() * 100)

    server.on_request = echo
    with forebay.Cache(root) as cache:
        for _ in range(2):
            for path in PATHS:
                assert bytes(cache.read(server.url + path)).startswith(path.removesuffix("?").encode()), path
        different = set(PATHS)
        assert server.gets == len(different)
        assert len(cache.entries()) == len(different)
        other = server.url.replace("127.0.0.1", "localhost")
        assert cache.read(other + "/x.bin") == b"/x.bin" * 100
        assert server.gets == len(different) + 1  # another host
        assert cache.read(other.replace("http://localhost", "HTTP://LocalHost") + "/x.bin#part") == b"/x.bin" * 100
        assert server.gets == len(different) + 1  # another spelling
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_s35_signatures_are_no_part_of_a_key_and_are_written_nowhere(root: Path, server: ScriptedServer) -> None:
    secret = "c0ffee" * 5
    url = server.put("/x.bin", b"data")
    rest = (
        f"X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential={secret}&X-Amz-Date=20260101T000000Z&X-Amz-Expires=9&X-Amz-SignedHeaders=host"
    )
    signed = [f"{url}?{rest}&X-Amz-Signature={secret}{i}" for i in range(3)]
    with forebay.Cache(root) as cache:
        for one in signed:
            assert cache.read(one) == b"data"
        assert server.gets == 1
        assert cache.read(url.replace("http://", f"http://user:{secret}@")) == b"data"
        assert server.gets == 2  # who asks may be given something else
        with pytest.raises(forebay.errors.NotFound) as caught:
            cache.read(signed[0].replace("x.bin", "y.bin"))
        assert secret not in str(caught.value)
        assert secret not in repr(caught.value.facts)
    for path in root.rglob("*"):
        assert path.is_dir() or secret.encode() not in path.read_bytes()


SCRIPT = """
import sys, forebay
with forebay.Cache(sys.argv[1], max_age="forever") as cache:
    assert cache.read(sys.argv[2]) == b"data"
    assert cache.get_or_put("a key é", lambda: b"first") == b"first"
    if len(sys.argv) > 3:
        assert cache.stats().misses == 2, cache.stats()
"""


def test_s35_the_same_key_in_every_process(root: Path, server: ScriptedServer, run: Callable[..., Any], tmp_path: Path) -> None:
    url = server.put("/x.bin", b"data")
    for i, seed in enumerate(["0", "1", "12345", "random"]):
        where = tmp_path / f"cwd-{i}"
        where.mkdir()
        environ = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": ["C", "C.UTF-8"][i % 2]}
        run(SCRIPT, root, url, *(["again"] if i else []), env=environ, cwd=where)
    assert server.gets == 1


ASKED = [
    "?sig=a&st=1", "?sig=b&st=2", "?sig=b&st=1", "?signature=a&policy=1", "?signature=a&policy=2",
    "?Signature=a&Expires=1", "?Signature=b&Expires=2",
    "?X-Amz-Meta=1", "?X-Amz-Meta=2", "?X-Amz-Signature=1", "?X-Amz-Signature=2", "?v=1&v=2", "?v=2&v=1", "?v", "?v=", "?%76", "?V",
]  # fmt: skip
USERS = ["", "alice@", "bob@", "Alice@", "alice:1@", "alice:2@"]


def test_s35_what_users_and_queries_are_given_stays_apart(root: Path, server: ScriptedServer) -> None:
    """A server gives each of them bytes of his own, under one path."""

    def echo(request: Any) -> None:
        server.put("/x.bin", f"{request.path} {request.headers.get('Authorization')}".encode())

    server.on_request = echo
    urls = [f"{server.url}/x.bin{query}" for query in ASKED]
    urls += [server.url.replace("://", f"://{user}") + "/x.bin" for user in USERS]
    with forebay.Cache(root) as cache:
        first = [bytes(cache.read(url)) for url in urls]
        assert len(set(first)) == len(urls) == server.gets
        for url, wanted in zip(urls, first, strict=True):
            assert bytes(cache.read(url)) == wanted
            with cache.open(url) as file:
                assert file.read() == wanted
            assert Path(os.fspath(cache.local(url))).read_bytes() == wanted
        assert server.gets == len(urls)
        assert not any(name in entry.key for entry in cache.entries() for name in ("alice", "Alice", "bob", "Amz"))
