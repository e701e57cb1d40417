"""Public fakes for tests: a server that misbehaves as scripted, and a sink that checks what a remote does."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.utils import formatdate
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from forebay._model import Buffer, ObjectInfo, Partial, Span

BLOCK = 64 << 10
_ONE_RANGE = re.compile(r"bytes=(\d+)-(\d*)\Z")


class MemorySink:
    """A strict `Sink` in memory: a byte that is written twice, outside the object or the requested spans, or before `begin`, raises
    `AssertionError`. ``data``: the bytes so far; ``infos``: the argument of each `begin`. Callable from any thread."""

    def __init__(self, partial: Partial | None = None, data: Buffer = b"") -> None:
        self.partial = partial
        self.data = bytearray(data)
        self.infos: list[ObjectInfo] = []
        self.on_write: Callable[[int, int], None] | None = None
        self._lock = threading.Lock()  # guards data and _missing
        self._missing: set[Span] = set()

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`. Resumes from ``partial`` if size and validator are still the same."""
        with self._lock:
            kept = self.partial if not self.infos else None
            self.infos.append(info)
            if kept is not None and info.strong and (kept.size, kept.validator) == (info.size, info.validator):
                spans = kept.missing
            else:
                self.data = bytearray(info.size or 0)
                spans = (Span(0, -1 if info.size is None else info.size),)
            self._missing = {span for span in spans if span.length > 0}
            return spans

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        end = offset + len(data)
        if self.on_write is not None:
            self.on_write(offset, len(data))
        with self._lock:
            if self.infos[-1].size is None:
                assert offset == len(self.data), "a stream of unknown size has a gap"
                self.data += data
                return
            hole = next((span for span in self._missing if span.start <= offset and end <= span.end), None)
            assert hole is not None, f"bytes {offset}-{end} were not requested, or came twice"
            self._missing.remove(hole)
            left = Span(hole.start, offset - hole.start), Span(end, hole.end - end)
            self._missing.update(span for span in left if span.length)
            self.data[offset:end] = data

    @property
    def missing(self) -> list[Span]:
        """The spans that have not arrived yet."""
        with self._lock:
            return sorted(self._missing)


@dataclass
class Served:
    """One path of a `ScriptedServer`: its bytes, and how it misbehaves. You can change every field at any time.

    ``etag``: None sends none. ``modified``: seconds since 1970; None sends none. ``statuses``: statuses of the first responses, each used
    once, with ``retry_after``. ``latency``: seconds before each response. ``rate``: bytes per second of one connection. ``stall_after``:
    bytes of a body after which it stalls until `ScriptedServer.go` is set, for the first ``stalls`` bodies that are long enough.
    ``cut_after``: likewise, closing the connection, for the first ``cuts`` bodies. ``ranges``, ``conditions``, ``head``: False ignores (or,
    for HEAD, refuses) them. ``content_range``: sent instead of the correct one. ``redirect``: the target. ``require``: headers without
    which the response is 401. ``vary``: sent as ``Vary``."""

    body: bytes
    etag: str | None = None
    modified: float | None = None
    statuses: list[int] = field(default_factory=list)
    retry_after: str | None = None
    latency: float = 0.0
    rate: float | None = None
    stall_after: int | None = None
    stalls: int = 1 << 62
    cut_after: int | None = None
    cuts: int = 1 << 62
    ranges: bool = True
    conditions: bool = True
    head: bool = True
    chunked: bool = False
    gzip: bool = False
    content_range: str | None = None
    redirect: str | None = None
    require: Mapping[str, str] = field(default_factory=dict)
    vary: str | None = None


@dataclass
class Request:
    """A request, and the status of its response. ``sent``: bytes of the response's body so far."""

    method: str
    path: str
    headers: Mapping[str, str]
    status: int = 0
    sent: int = 0


class ScriptedServer:
    """An HTTP/1.1 server on loopback, with one thread per connection. A context manager. ``stalled`` is set when a body stalls; setting
    ``go`` resumes all.

    ``port``: 0 for any free one. ``rate``: bytes per second of all connections together. ``on_request``: called with each `Request` before
    its response, in the connection's thread."""

    def __init__(self, port: int = 0) -> None:
        self.requests: list[Request] = []
        self.objects: dict[str, Served] = {}
        self.stalled, self.go = threading.Event(), threading.Event()
        self.rate: float | None = None
        self.on_request: Callable[[Request], None] | None = None
        self._lock = threading.Lock()  # guards requests, counts and _due
        self._due = 0.0
        self._open: set[socket.socket] = set()
        self._server = _Server(self, port)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.005,), name="scripted-server", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections and stop the server."""
        self.go.set()
        self._server.shutdown()
        self._server.server_close()
        self.drop()
        self._thread.join()

    def drop(self) -> None:
        """Close all open connections."""
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            _shut(connection)

    def put(self, path: str, body: bytes, *, etag: str | None = "", modified: float | None = 1.6e9, **script: Any) -> str:
        """Serve ``body`` under ``path`` ("/name"), with an ETag made from its content unless one is given. Returns the URL."""
        if etag == "":
            etag = f'"{hashlib.blake2s(body, digest_size=8).hexdigest()}"'
        self.objects[path] = Served(body, etag, modified, **script)
        return self.url + path

    @property
    def gets(self) -> int:
        """GET requests so far."""
        return self._count("GET")

    @property
    def heads(self) -> int:
        """HEAD requests so far."""
        return self._count("HEAD")

    @property
    def sent(self) -> int:
        """Bytes of bodies so far."""
        with self._lock:
            return sum(request.sent for request in self.requests)

    def _count(self, method: str) -> int:
        with self._lock:
            return sum(request.method == method for request in self.requests)

    def _note(self, request: Request) -> None:
        with self._lock:
            self.requests.append(request)
        if self.on_request is not None:
            self.on_request(request)

    def _pace(self, count: int, rate: float | None) -> None:
        """Wait until ``count`` more bytes may go out."""
        if rate is not None:
            time.sleep(count / rate)
        if self.rate is not None:
            with self._lock:
                self._due = max(self._due, time.monotonic()) + count / self.rate
                pause = self._due - time.monotonic()
            time.sleep(max(0.0, pause))

    def _use_up(self, served: Served, name: str) -> bool:
        """Whether a stall or a cut is left; one less afterwards."""
        with self._lock:
            left = getattr(served, name)
            setattr(served, name, max(0, left - 1))
            return bool(left > 0)


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, scripted: ScriptedServer, port: int) -> None:
        self.scripted = scripted
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client may close its connection."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = 0
    server: _Server

    def setup(self) -> None:
        super().setup()
        with self.server.scripted._lock:
            self.server.scripted._open.add(self.connection)

    def finish(self) -> None:
        with self.server.scripted._lock:
            self.server.scripted._open.discard(self.connection)
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: `ScriptedServer.requests` has them all."""

    def do_GET(self) -> None:
        self._serve()

    def do_HEAD(self) -> None:
        self._serve()

    def _serve(self) -> None:
        path = urlsplit(self.path).path
        request = Request(self.command, self.path, dict(self.headers.items()))
        self.server.scripted._note(request)
        served = self.server.scripted.objects.get(path)
        if served is None:
            return self._refuse(request, 404)
        time.sleep(served.latency)
        status = self._refusal(served)
        if status:
            return self._refuse(request, status, served)
        if served.redirect is not None:
            return self._answer(request, 302, {"Location": served.redirect, "Content-Length": "0", **_vary(served)})
        return self._give(request, served)

    def _refusal(self, served: Served) -> int | None:
        if any(self.headers.get(name) != value for name, value in served.require.items()):
            return 401
        with self.server.scripted._lock:
            if served.statuses:
                return served.statuses.pop(0)
        return 405 if self.command == "HEAD" and not served.head else None

    def _refuse(self, request: Request, status: int, served: Served | None = None) -> None:
        headers = {"Content-Length": "3"}
        if served is not None and served.retry_after is not None:
            headers["Retry-After"] = served.retry_after
        self._answer(request, status, headers)
        if self.command != "HEAD":
            self.connection.sendall(b"no\n")

    def _answer(self, request: Request, status: int, headers: Mapping[str, str]) -> None:
        request.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _give(self, request: Request, served: Served) -> None:
        body, headers = served.body, self._validators(served)
        if served.conditions:
            if served.etag and self.headers.get("If-None-Match") == served.etag:
                return self._answer(request, 304, headers)
            if not served.etag and "Last-Modified" in headers and self.headers.get("If-Modified-Since") == headers["Last-Modified"]:
                return self._answer(request, 304, headers)
            if self.headers.get("If-Match", "*") not in ("*", served.etag):
                return self._refuse(request, 412)
        span = self._requested(served, len(body))
        if span is not None and span.length <= 0:
            return self._answer(request, 416, {"Content-Range": f"bytes */{len(body)}", "Content-Length": "0"})
        status = 200
        if span is not None:
            status = 206
            headers["Content-Range"] = served.content_range or f"bytes {span.start}-{span.end - 1}/{len(body)}"
            body = body[span.start : span.end]
        if served.gzip:
            body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
        headers.update({"Transfer-Encoding": "chunked"} if served.chunked else {"Content-Length": str(len(body))})
        self._answer(request, status, headers)
        if self.command != "HEAD":
            self._send(request, served, memoryview(body))
        return None

    def _validators(self, served: Served) -> dict[str, str]:
        headers = _vary(served) | ({"ETag": served.etag} if served.etag else {})
        if served.modified is not None:
            headers["Last-Modified"] = formatdate(served.modified, usegmt=True)
        if served.ranges:
            headers["Accept-Ranges"] = "bytes"
        return headers

    def _requested(self, served: Served, size: int) -> Span | None:
        match = _ONE_RANGE.match(self.headers.get("Range", ""))
        if not served.ranges or match is None or served.gzip:
            return None
        if served.conditions and self.headers.get("If-Range", served.etag) != served.etag:
            return None
        start = int(match[1])
        end = min(size, int(match[2]) + 1) if match[2] else size
        return Span(start, end - start)

    def _send(self, request: Request, served: Served, body: memoryview) -> None:
        scripted, at = self.server.scripted, 0
        stall = served.stall_after if served.stall_after is not None and len(body) > served.stall_after else None
        cut = served.cut_after if served.cut_after is not None and len(body) > served.cut_after else None
        stall = stall if stall is not None and scripted._use_up(served, "stalls") else None
        cut = cut if cut is not None and scripted._use_up(served, "cuts") else None
        while at < len(body):
            if at == stall:
                scripted.stalled.set()
                scripted.go.wait()
                stall = None
            if at == cut:
                self.close_connection = True
                _shut(self.connection)
                return
            end = min(at + BLOCK, *(stop for stop in (len(body), stall, cut) if stop is not None and stop > at))
            scripted._pace(end - at, served.rate)
            block = body[at:end]
            request.sent += len(block)  # before it is sent: the client that has received it finds it counted
            self.connection.sendall(b"%x\r\n%b\r\n" % (len(block), bytes(block)) if served.chunked else block)
            at = end
        if served.chunked:
            self.connection.sendall(b"0\r\n\r\n")


def _shut(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the client closed it first


def _vary(served: Served) -> dict[str, str]:
    return {} if served.vary is None else {"Vary": served.vary}
