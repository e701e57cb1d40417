"""A server that sends exactly the bytes that a test wants, whatever HTTP says."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

import pytest

Answer = Callable[[socket.socket, bytes], None]
"""Given a connection and the head of a request. Returns when it has answered; the connection is closed then."""


class RawServer:
    """One thread for each connection. ``answer``: may be changed at any time. ``requests``: the heads that came."""

    def __init__(self) -> None:
        self.answer: Answer = lambda connection, head: None
        self.requests: list[bytes] = []
        self.ended = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self._open: set[socket.socket] = set()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, daemon=True, name="raw-server").start()

    def says(self, *lines: str, body: bytes = b"") -> None:
        """Answer everybody with this head and body."""
        head = "".join(f"{line}\r\n" for line in ("HTTP/1.1 200 OK", *lines, ""))
        self.answer = lambda connection, asked: connection.sendall(head.encode("latin-1") + body)

    def _serve(self) -> None:
        while not self.ended.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._open.add(connection)
            threading.Thread(target=self._one, args=(connection,), daemon=True, name="raw-connection").start()

    def _one(self, connection: socket.socket) -> None:
        with connection:
            try:
                head = b""
                while b"\r\n\r\n" not in head and (block := connection.recv(1 << 16)):
                    head += block
                if head:
                    self.requests.append(head)
                    self.answer(connection, head)
            except OSError:
                return  # the client had enough

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.ended.set()
        for each in (self._listener, *self._open):
            try:
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        self._listener.close()


@pytest.fixture
def raw() -> Iterator[RawServer]:
    with RawServer() as server:
        yield server
