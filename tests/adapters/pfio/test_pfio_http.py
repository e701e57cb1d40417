"""PFIO's caches on a server: beside the real ones, call for call."""

from __future__ import annotations

import http.server
import logging
import pickle
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.adapters import pfio
from forebay.adapters.pfio import HTTPCache, HTTPConnector
from tests.processes import in_child

try:
    import pfio.cache as theirs  # type: ignore[no-redef,unused-ignore]
except ImportError:
    theirs = None
THEIRS = pytest.mark.skipif(theirs is None, reason="PFIO is not installed")
caches = pytest.mark.parametrize("package", [pytest.param("theirs", marks=THEIRS), "ours"])


class Stored(http.server.ThreadingHTTPServer):
    """Stores what is put. ``asked``: method, path and Authorization of each request."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[tuple[str, str, str | None]] = []
        self.status: int | None = None
        self.close_idle = False
        super().__init__(("127.0.0.1", 0), Handler)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stored

    def log_message(self, *args: Any) -> None: ...

    def do_PUT(self) -> None:
        self.server.objects[self.path] = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self._answer(201, b"")

    def do_GET(self) -> None:
        found = self.server.objects.get(self.path)
        self._answer(404 if found is None else 200, found or b"")

    def _answer(self, status: int, body: bytes) -> None:
        self.server.asked.append((self.command, self.path, self.headers["Authorization"]))
        self.send_response(self.server.status or status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection |= self.server.close_idle  # without a word: as a server does with what was idle too long


@pytest.fixture
def server() -> Iterator[Stored]:
    with Stored() as found:
        thread = threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def of(package: str) -> Any:
    return theirs if package == "theirs" else pfio


def url(server: Stored, path: str = "/user/data") -> str:
    return f"http://127.0.0.1:{server.server_port}{path}"


@caches
def test_slots_on_a_server(server: Stored, package: str) -> None:
    cache = of(package).HTTPCache(3, url(server))
    assert (len(cache), cache.multiprocess_safe, cache.multithread_safe) == (3, True, True)
    assert cache.get(0) is None
    assert cache.put(0, b"some bytes") is True
    assert cache.put(0, b"others") is True
    assert cache.get(0) == b"others"
    assert cache.get_and_cache(2, lambda i: b"%d" % i) == b"2"
    assert server.objects == {"/user/data/0": b"others", "/user/data/2": b"2"}
    for i in (-1, 3):
        with pytest.raises(IndexError):
            cache.get(i)
        with pytest.raises(IndexError):
            cache.put(i, b"")


@caches
def test_any_object(server: Stored, package: str) -> None:
    cache = of(package).HTTPCache(1, url(server, "/x/"), do_pickle=True)
    assert cache.put(0, {"a": [1, None]})
    assert cache.get(0) == {"a": [1, None]}
    assert pickle.loads(server.objects["/x/0"]) == {"a": [1, None]}


@THEIRS
def test_each_reads_what_the_other_put(server: Stored) -> None:
    one, other = HTTPCache(2, url(server), do_pickle=True), theirs.HTTPCache(2, url(server), do_pickle=True)
    one.put(0, (1, 2))
    other.put(1, "text")
    assert (other.get(0), one.get(1)) == ((1, 2), "text")


@caches
def test_what_is_no_url_of_a_server(package: str) -> None:
    for given in ("https://host/x", "ftp://host/x", "http://host/x?y", "http://host/x#y", "http://user:sikrit@host/x"):
        with pytest.raises(ValueError, match=r"(?s)^(?!.*sikrit).*url" if package == "ours" else "url"):
            of(package).HTTPConnector(given)
    connector = of(package).HTTPConnector("host/a/b")
    assert (connector.host, connector.path) == ("host", "/a/b/")


@caches
def test_a_token_is_read_from_a_file(server: Stored, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("sikrit")
    cache = of(package).HTTPCache(1, url(server), bearer_token_path=str(tmp_path / "token"))
    cache.put(0, b"x")
    monkeypatch.setenv("PFIO_HTTP_BEARER_TOKEN_PATH", str(tmp_path / "token"))
    of(package).HTTPConnector(url(server)).get("0")
    assert [asked[2] for asked in server.asked] == ["Bearer sikrit"] * 2
    with pytest.raises(FileNotFoundError):
        of(package).HTTPConnector(url(server), str(tmp_path / "none"))


def test_a_token_is_read_again(server: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "token").write_text("one\n")
    connector = HTTPConnector(url(server), tmp_path / "token")
    monkeypatch.setattr("forebay.adapters.pfio.http.TOKEN_AGE", -1.0)
    (tmp_path / "token").write_text("two\n")
    connector.get("0")
    assert server.asked[-1][2] == "Bearer two"


@caches
@pytest.mark.parametrize("status", [500, 403, 204])
def test_unexpected_answers_of_the_server_are_misses(server: Stored, package: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    cache = of(package).HTTPCache(1, url(server))
    cache.put(0, b"x")
    server.status = status
    with caplog.at_level(logging.WARNING):
        assert cache.put(0, b"y") is False
        assert cache.get(0) is None
    assert caplog.text.count("unexpected status code") == 2


@caches
def test_no_server_is_a_miss(package: str, caplog: pytest.LogCaptureFixture) -> None:
    with Stored() as gone:
        where = url(gone)
    cache = of(package).HTTPCache(1, where)
    with caplog.at_level(logging.WARNING):
        assert cache.put(0, b"x") is False
        assert cache.get(0) is None
    assert len(caplog.records) >= 2


def test_a_connection_that_the_server_closed_is_opened_again(server: Stored, caplog: pytest.LogCaptureFixture) -> None:
    cache = HTTPCache(1, url(server))
    server.close_idle = True
    for _ in range(3):
        assert cache.put(0, b"x")
        assert cache.get(0) == b"x"
    assert caplog.records == []


def test_processes_and_threads(server: Stored) -> None:
    cache = HTTPCache(40, url(server), do_pickle=True)
    cache.put(0, "before")
    assert in_child(lambda: (cache.get(0), cache.put(1, "child"))) == ("before", True)
    assert cache.get(1) == "child"
    there = pickle.loads(pickle.dumps(cache))
    assert there.get(1) == "child"
    threads = [threading.Thread(target=lambda n=n: [cache.put(i, i) for i in range(n, 40, 4)]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [there.get(i) for i in range(40)] == list(range(40))
    for each in (cache, there):
        each.close()
