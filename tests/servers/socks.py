"""A SOCKS proxy on loopback: versions 4, 4a and 5, with or without a password."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

import pytest


class Asked(NamedTuple):
    """What a client asked for. ``host``: as it was sent, a name or an address. ``user``: ``user:password``, empty without one."""

    version: int
    host: str
    port: int
    user: str


class SocksServer:
    """One thread for each connection. ``names``: the names that the proxy can resolve; everything else is refused. ``user``: the user and
    the password that it wants, of version 5 only; empty: none. ``refuses``: the code with which it answers instead of connecting."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.user, self.refuses = "", 0
        self.asked: list[Asked] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True, name="socks-server").start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                threading.Thread(target=self._one, args=(connection,), daemon=True, name="socks-connection").start()

    def _one(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, EOFError):
            version = _read(connection, 1)[0]
            asked = self._greet_5(connection) if version == 5 else self._greet_4(connection)
            if asked is None:
                return
            self.asked.append(asked)
            code = self.refuses if asked.host in self.names or asked.host[0].isdigit() else 4
            if code:
                connection.sendall(bytes([5, code, 0, 1]) + bytes(6) if version == 5 else bytes([0, 91]) + bytes(6))
                return
            with socket.create_connection((self.names.get(asked.host, asked.host), asked.port)) as server:
                self._open.append(server)
                connection.sendall(bytes([5, 0, 0, 1]) + bytes(6) if version == 5 else bytes([0, 90]) + bytes(6))
                back = threading.Thread(target=_pump, args=(server, connection), daemon=True, name="socks-back")
                back.start()
                _pump(connection, server)
                back.join()

    def _greet_5(self, connection: socket.socket) -> Asked | None:
        methods, user = _read(connection, _read(connection, 1)[0]), ""
        method = 2 if self.user else 0
        connection.sendall(bytes([5, method if method in methods else 0xFF]))
        if method not in methods:
            return None
        if method:
            _read(connection, 1)
            user = ":".join(_read(connection, _read(connection, 1)[0]).decode() for _ in range(2))
            connection.sendall(bytes([1, user != self.user]))
            if user != self.user:
                return None
        _, _, _, kind = _read(connection, 4)
        if kind == 3:
            host = _read(connection, _read(connection, 1)[0]).decode()
        else:
            family, size = (socket.AF_INET, 4) if kind == 1 else (socket.AF_INET6, 16)
            host = socket.inet_ntop(family, _read(connection, size))
        return Asked(5, host, struct.unpack("!H", _read(connection, 2))[0], user)

    def _greet_4(self, connection: socket.socket) -> Asked:
        _, port, address = struct.unpack("!BH4s", _read(connection, 7))
        user = _read_line(connection)
        named = address[:3] == bytes(3)
        return Asked(4, _read_line(connection) if named else socket.inet_ntoa(address), port, user)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _read(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = connection.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


def _read_line(connection: socket.socket) -> str:
    line = b""
    while not line.endswith(b"\0"):
        line += _read(connection, 1)
    return line[:-1].decode()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while piece := source.recv(1 << 16):
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)


@pytest.fixture
def socks() -> Iterator[SocksServer]:
    with SocksServer() as server:
        yield server
