"""Connections of urllib3 whose every wait ends with the call that they work for: names, connecting, TLS, each byte of an answer."""

from __future__ import annotations

import errno
import http.client
import io
import ipaddress
import queue
import socket
import threading
import time
from types import TracebackType
from typing import Any, BinaryIO, Self, cast

from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, exceptions
from urllib3.connection import HTTPConnection, HTTPSConnection

from forebay.remote.base import Call

UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH})
"""The network knows no way to a host."""


class Listening:
    """A context manager: what this thread asks meanwhile is asked for ``call``. ``heard``: a byte of an answer came."""

    def __init__(self, call: Call) -> None:
        self.call, self.heard = call, False
        self._answer: _Answer | None = None

    def __enter__(self) -> Self:
        _mine.request = self
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _mine.request = None
        if self._answer is not None:
            self._answer.head_until = None

    def answers_by(self, answer: _Answer) -> None:
        """The answer comes from there: after a proxy's own, if there is one."""
        self._answer = answer


class _Mine(threading.local):
    request: Listening | None = None


_mine = _Mine()


class _Answer(io.RawIOBase):
    """The receiving side of a socket. The head of an answer has ``read_timeout`` seconds in all; of a body, each wait has as many. Neither
    goes on behind the end of the call. Raises TimeoutError."""

    def __init__(self, sock: socket.socket, request: Listening) -> None:
        self._sock, self._request = sock, request
        self._bytes = cast(io.RawIOBase, sock.makefile("rb", buffering=0))
        self.head_until: float | None = time.monotonic() + request.call.options.read_timeout
        request.answers_by(self)

    def readable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._bytes.fileno()

    def readinto(self, buffer: Any) -> int | None:
        call, now = self._request.call, time.monotonic()
        left = call.options.read_timeout if self.head_until is None else self.head_until - now
        if call.until is not None:
            left = min(left, call.until - now)
        if left <= 0:
            raise TimeoutError("the time for it is over")
        if self._sock.gettimeout() != left:
            self._sock.settimeout(left)
        count = self._bytes.readinto(buffer)
        self._request.heard = True
        return count

    def close(self) -> None:
        if not self.closed:
            self._bytes.close()  # the socket counts who reads from it
        super().close()


class _Source:
    """What http.client takes for a socket, to read an answer from."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def makefile(self, mode: str) -> BinaryIO:
        if _mine.request is None or not isinstance(self._sock, socket.socket):  # TLS within TLS: by its own time-out
            return cast(BinaryIO, self._sock.makefile(mode))
        return cast(BinaryIO, io.BufferedReader(_Answer(self._sock, _mine.request)))


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(cast(socket.socket, _Source(sock)), *args, **kwargs)


class _Connecting(HTTPConnection):
    """``timeout`` covers all of connecting: the name, all of its addresses, and TLS."""

    response_class = _Response

    def _new_conn(self) -> socket.socket:
        limit, name = self.timeout, self._dns_host
        until = time.monotonic() + float(limit or 0)
        addresses = self._addresses(until)
        failed: list[exceptions.HTTPError] = []
        try:
            for turn, address in enumerate(addresses, 1):
                # an address that is dead must not take the time of those behind it
                self._dns_host = address
                self.timeout = max(0.001, until - time.monotonic()) / (len(addresses) - turn + 1)
                try:
                    sock = super()._new_conn()
                except (exceptions.ConnectTimeoutError, exceptions.NewConnectionError) as error:
                    failed.append(error)
                    continue
                sock.settimeout(max(0.001, until - time.monotonic()))
                return sock
        finally:
            self._dns_host, self.timeout = name, limit
        # that there is no way to one address tells nothing of a host that another one led to
        raise next((error for error in failed if getattr(error.__cause__, "errno", None) not in UNREACHABLE), failed[-1])

    def _addresses(self, until: float) -> list[str]:
        """What the host's name stands for. Nothing can end a resolver: where it takes too long, its thread is left to itself."""
        name = self._dns_host
        try:
            return [str(ipaddress.ip_address(name))]
        except ValueError:
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            threading.Thread(target=_resolve, args=(name, self.port, answers), daemon=True, name="resolver").start()
        except RuntimeError:  # as many threads as there may be: then nothing ends the resolver
            _resolve(name, self.port, answers)
        try:
            found = answers.get(timeout=max(0.001, until - time.monotonic()))
        except queue.Empty:
            raise exceptions.ConnectTimeoutError(self, f"{name} was not resolved in time") from None
        if isinstance(found, socket.gaierror):
            raise exceptions.NameResolutionError(self.host, self, found) from found
        if isinstance(found, Exception):
            raise exceptions.NewConnectionError(self, "its name cannot be resolved") from found
        return cast("list[str]", found)

    def connect(self) -> None:
        super().connect()
        _leave_time(self)


def _leave_time(connection: HTTPConnection) -> None:
    """What connecting left of its time must not bound the sending of a body."""
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)


def _resolve(name: str, port: int, answers: queue.SimpleQueue[Any]) -> None:
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        answers.put(list(dict.fromkeys(str(each[4][0]) for each in found)))
    except Exception as error:  # noqa: BLE001 (told to the thread that waits for it, whatever it is)
        answers.put(error)


class _HTTPS(HTTPSConnection, _Connecting):
    """The same, with TLS."""

    def connect(self) -> None:
        super().connect()  # urllib3's, which calls no other
        _leave_time(self)


class HTTPPool(HTTPConnectionPool):
    """Of connections that keep to their call's time."""

    ConnectionCls = _Connecting


class HTTPSPool(HTTPSConnectionPool):
    """The same, with TLS."""

    ConnectionCls = _HTTPS
