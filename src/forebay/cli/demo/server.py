"""The demo's remote: an HTTP server on loopback with latency and a bound on its rate, that answers ranges and counts.

``python -m forebay.cli.demo.server FOLDER LATENCY RATE``: prints its port, and ends when its standard input does.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COUNTS = "/-/counts"
PIECE = 64 << 10


@dataclass(slots=True)
class Counts:
    """Requests that were answered, and bytes of objects that were sent."""

    requests: int = 0
    sent: int = 0


@dataclass(slots=True)
class Pace:
    """Shares ``rate`` bytes a second among all connections."""

    rate: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0

    def take(self, count: int) -> None:
        with self.lock:
            start = max(self.free_at, time.monotonic())
            self.free_at = start + count / self.rate
        time.sleep(max(start - time.monotonic(), 0))


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.latency, self.pace = folder, latency, Pace(rate)
        self.counts, self.lock = Counts(), threading.Lock()

    def count(self, *, requests: int = 0, sent: int = 0) -> None:
        with self.lock:
            self.counts.requests += requests
            self.counts.sent += sent


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        if self.path == COUNTS:
            self._answer(200, json.dumps(asdict(self.server.counts)).encode())
            return
        self.server.count(requests=1)
        time.sleep(self.server.latency)
        path = self.server.folder / self.path.rsplit("/", 1)[-1]
        if not path.is_file():
            self._answer(404, b"no such shard\n")
            return
        self._object(path.read_bytes(), f'"{path.stat().st_mtime_ns:x}"')

    do_HEAD = do_GET

    def _object(self, data: bytes, etag: str) -> None:
        headers = {"ETag": etag, "Accept-Ranges": "bytes"}
        if self.headers.get("If-None-Match") == etag:
            self._answer(304, b"", headers)
            return
        span = re.fullmatch(r"bytes=([0-9]+)-([0-9]*)", self.headers.get("Range", ""))
        if span is None or self.headers.get("If-Range", etag) != etag:
            self._answer(200, data, headers)
            return
        first, last = int(span[1]), min(int(span[2] or len(data)), len(data) - 1)
        if first > last:
            self._answer(416, b"", {**headers, "Content-Range": f"bytes */{len(data)}"})
            return
        self._answer(206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self._send(body, paced=status in (200, 206) and self.path != COUNTS)

    def _send(self, body: bytes, *, paced: bool) -> None:
        try:
            for at in range(0, len(body), PIECE):
                piece = body[at : at + PIECE]
                if paced:
                    self.server.pace.take(len(piece))
                self.wfile.write(piece)
                if paced:
                    self.server.count(sent=len(piece))
        except ConnectionError:  # the worker was killed: that is what the demo is about
            self.close_connection = True

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *values: Any) -> None:
        """Say nothing: the counts tell."""


def main() -> None:
    folder, latency, rate = sys.argv[1:]
    server = Server(Path(folder), float(latency), float(rate))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    sys.stdout.write(f"{server.server_port}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()
