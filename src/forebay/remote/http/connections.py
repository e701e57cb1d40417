"""Kept connections of one process, by host. Nothing here is shared over a fork.

Every wait of a connection ends with the call that it works for: resolving a name, connecting, TLS, each byte of a response.
"""

from __future__ import annotations

import base64
import errno
import http.client
import io
import ipaddress
import logging
import os
import queue
import re
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, cast
from urllib.parse import unquote, urlsplit

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, HTTPSConnectionPool, PoolManager, ProxyManager, Retry, Timeout, exceptions
from urllib3.connection import HTTPConnection, HTTPSConnection

from forebay.errors import ConfigError, ForebayError, RemoteProtocolError, RemoteTimeout
from forebay.remote.base import AttemptFailed, Call, RemoteOptions
from forebay.remote.urls import canonical

PORTS = {"http": 80, "https": 443}
MAX_ENDPOINTS = 100  # with idle connections
UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH})
"""The network has no route to a host."""
_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3}[^'\")]*)")
_HOST = re.compile(r"[a-z0-9._~!$&'()*+,;=-]+|[0-9a-f:.]+|[0-9a-f.]*:[0-9a-f:.]*%[A-Za-z0-9._~-]+")
_ZONE = re.compile(r"%[^]]*(?=])")
_ONE_REQUEST = Retry(False, redirect=False)

_all_connections: weakref.WeakSet[Connections] = weakref.WeakSet()


class Endpoint(NamedTuple):
    """A server to connect to. ``host``: an IPv6 address may have a zone: ``fe80::1%eth0``. ``name``: host and port as in a URL, without
    a default port."""

    scheme: str
    host: str
    port: int
    name: str

    @property
    def host_header(self) -> str:
        """The name without a zone, which names an interface of this machine."""
        return _ZONE.sub("", self.name)


@lru_cache(maxsize=1024)
def endpoint_of(scheme: str, netloc: str) -> Endpoint:
    """Raises `ValueError` if ``netloc`` names no host, or no valid port."""
    parts = urlsplit(f"{scheme}://{netloc}")
    host, port, usual = (parts.hostname or "").encode("idna").decode(), parts.port, PORTS.get(scheme)
    if not _HOST.fullmatch(host) or not usual or port == 0:
        raise ValueError("no host, or no valid port")
    name = f"[{host}]" if ":" in host else host
    return Endpoint(scheme, host, port or usual, name if port in (None, usual) else f"{name}:{port}")


class Connections:
    """urllib3's pools, by endpoint. Callable from any thread; a forked child starts without connections, however it was forked."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._timeout = Timeout(connect=options.connect_timeout, read=options.read_timeout)
        self._proxies: dict[Endpoint, str | None] = {}
        self._inherited: list[object] = []  # pools of the parent process: a thread that is not in this process may hold their locks
        self._reset()
        _all_connections.add(self)

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._managers: dict[str | None, PoolManager] = {}
        self._pools: dict[Endpoint, HTTPConnectionPool] = {}
        self._in_use = 0

    def leave_to_parent(self) -> None:
        """In a forked child: close this process's copies of the parent's idle sockets, so that a server sees when the parent closes one."""
        for pool in self._pools.values():
            for connection in getattr(pool.pool, "queue", ()):  # read without its lock, which a thread of the parent may hold
                if (sock := getattr(connection, "sock", None)) is not None and sock.fileno() >= 0:
                    os.close(sock.detach())
        self._inherited.append(self._managers)
        self._reset()

    def send(
        self, call: Call, endpoint: Endpoint, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> BaseHTTPResponse:
        """Send a request and wait for the head of its response; the body is still to be read. Raises `AttemptFailed`."""
        if self._pid != os.getpid():  # forked by C code, which runs no fork hook
            self.leave_to_parent()
        proxy = self.proxy(endpoint)
        pool = self._pools.get(endpoint) or self._open_pool(endpoint, proxy)
        timeout = self._timeout
        if call.until is not None:
            timeout = Timeout(connect=call.timeout(self._options.connect_timeout), read=call.timeout(self._options.read_timeout))
        host = f"{endpoint.scheme}://{endpoint.name}"
        if proxy is not None:
            host += f" by {canonical(proxy)}"  # a host that is silent behind a proxy may answer without it
        call.check_host(host)
        began = time.monotonic()
        try:
            with _sending(call) as request:
                response = pool.urlopen(
                    method, target, body, headers, retries=_ONE_REQUEST, redirect=False, assert_same_host=False, timeout=timeout,
                    preload_content=False, decode_content=False,
                )  # fmt: skip
        except AttemptFailed as failed:
            if failed.no_answer and not request.answered:
                call.host_silent(host, began, unreachable=failed.unreachable)
            raise
        call.host_answered(host)
        return response

    def count_in_use(self, change: int) -> None:
        """Add ``change`` to the number of connections in use."""
        with self._lock:
            self._in_use += change

    def spare(self) -> int:
        """How many more connections may be used at once."""
        with self._lock:
            return self._options.connections - self._in_use

    def proxy(self, endpoint: Endpoint) -> str | None:
        """The proxy that the environment named for ``endpoint`` at its first request."""
        if endpoint not in self._proxies:
            self._proxies[endpoint] = _proxy_of(endpoint) if self._options.proxies else None
        return self._proxies[endpoint]

    def _open_pool(self, endpoint: Endpoint, proxy: str | None) -> HTTPConnectionPool:
        with self._lock:
            manager = self._managers.get(proxy)
            if manager is None:
                settings: dict[str, Any] = {
                    "num_pools": MAX_ENDPOINTS, "maxsize": self._options.connections, "block": False, "blocksize": self._options.buffer,
                    "ca_certs": os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"),
                }  # fmt: skip
                manager = PoolManager(**settings) if proxy is None else ProxyManager(proxy, proxy_headers=proxy_headers(proxy), **settings)
                manager.pool_classes_by_scheme = {"http": _TimedPool, "https": _TimedTLSPool}
                self._managers[proxy] = manager
            if len(self._pools) >= MAX_ENDPOINTS:
                self._pools.clear()
            host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host  # without brackets, urllib3 accepts no zone
            pool = self._pools[endpoint] = manager.connection_from_host(host, endpoint.port, endpoint.scheme)
        return pool


def _proxy_of(endpoint: Endpoint) -> str | None:
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(f"{endpoint.host}:{endpoint.port}", proxies):  # type: ignore[attr-defined]
        return None
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    kind = proxy.partition("://")[0].lower()
    if kind not in ("http", "https"):
        raise ConfigError(f"the environment names a {kind}:// proxy for {endpoint.scheme}:// URLs: name an http:// one, or set NO_PROXY")
    return proxy


def proxy_headers(proxy: str) -> dict[str, str]:
    """The header with the user and password of a proxy's URL, if it has any."""
    parts = urlsplit(proxy)
    if not parts.username:
        return {}
    return {"Proxy-Authorization": basic_auth(unquote(parts.username), unquote(parts.password or ""))}


def basic_auth(user: str, password: str) -> str:
    """The value of an ``Authorization`` header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# -- requests of ours among those of the process ----------------------------------------------------------------------


class _Request:
    """A request that this thread is sending. ``answered``: a byte of its response arrived."""

    def __init__(self, call: Call) -> None:
        self.call, self.answered = call, False
        self.reader: _TimedReader | None = None  # of the response itself: a proxy's comes before


class _Local(threading.local):
    request: _Request | None = None


_local = _Local()


@contextmanager
def _sending(call: Call) -> Iterator[_Request]:
    """The connections that this thread uses inside of the block work for ``call``."""
    request = _local.request = _Request(call)
    try:
        with call.connecting(), network_errors:
            yield request
    finally:
        _local.request = None
        if request.reader is not None:
            request.reader.head_until = None


class _Discreet(logging.Filter):
    """Drops urllib3's messages about our requests, which name whole URLs, signatures included. Those about other requests pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        return _local.request is None


for _name in ("urllib3.connectionpool", "urllib3.util.retry"):
    logging.getLogger(_name).addFilter(_Discreet())


# -- errors ------------------------------------------------------------------------------------------------------------


class _NetworkErrors:
    """Translates what urllib3 raises to `AttemptFailed`. No sink is called inside of the block: its errors pass as they are."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, ForebayError):  # some of which are OSErrors too
            return
        if isinstance(error, exceptions.HTTPError):
            raise _failed(error) from error
        if isinstance(error, http.client.HTTPException):
            raise AttemptFailed("an answer that is not HTTP", RemoteProtocolError) from error
        if isinstance(error, OSError):
            raise AttemptFailed(f"the connection failed: {error.strerror or type(error).__name__}") from error


network_errors = _NetworkErrors()


def _failed(error: exceptions.HTTPError) -> AttemptFailed:
    """In our words: urllib3's text may name the whole URL, secrets included."""
    cause = _cause(error)
    if isinstance(error, exceptions.SSLError):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return AttemptFailed(f"its certificate is not trusted: {cause.verify_message}", retryable=False)
        return AttemptFailed("TLS failed")
    if isinstance(error, exceptions.NameResolutionError):
        # a name server that gives no answer takes as long as a silent host; a refusal comes at once
        no_answer = getattr(error.__cause__, "errno", None) == socket.EAI_AGAIN
        return AttemptFailed("its host name cannot be resolved", no_answer=no_answer)
    if isinstance(error, exceptions.TimeoutError) and not isinstance(error, exceptions.NewConnectionError):
        return AttemptFailed("nothing came for too long", RemoteTimeout, no_answer=True)
    if isinstance(error, exceptions.ProxyError):
        refusal = _TUNNEL.search(str(cause))
        if refusal:
            return AttemptFailed(f"its proxy answers {refusal[1]}", retryable=refusal[1] >= "5")
        inner = _failed(cause) if isinstance(cause, exceptions.HTTPError) else AttemptFailed("")
        return AttemptFailed("its proxy cannot be reached", inner.error, no_answer=inner.no_answer, unreachable=inner.unreachable)
    for each in (error, cause):
        if isinstance(each, (exceptions.IncompleteRead, http.client.IncompleteRead)):
            return AttemptFailed("the connection was cut" + (f" {each.expected:,} bytes before the end" if each.expected else ""))
    if isinstance(cause, http.client.RemoteDisconnected):
        return AttemptFailed("the connection was cut")
    if isinstance(cause, http.client.HTTPException) or isinstance(error, (exceptions.InvalidHeader, exceptions.InvalidChunkLength)):
        return AttemptFailed("an answer that is not HTTP", RemoteProtocolError)
    unreachable = getattr(cause, "errno", None) in UNREACHABLE
    reason = f"the connection failed: {getattr(cause, 'strerror', None) or type(cause or error).__name__}"
    return AttemptFailed(reason, no_answer=unreachable, unreachable=unreachable)


def _cause(error: exceptions.HTTPError) -> BaseException | None:
    if isinstance(error, exceptions.ProxyError):
        return error.original_error
    return next((arg for arg in error.args if isinstance(arg, Exception)), None) or error.__cause__ or error.__context__


# -- connections whose waits are bounded -------------------------------------------------------------------------------


class _TimedReader(io.RawIOBase):
    """The receiving side of a socket. The head of a response has ``read_timeout`` seconds in all; within a body, each wait has as many.
    Neither continues after the deadline of the call. Raises TimeoutError."""

    def __init__(self, sock: socket.socket, request: _Request) -> None:
        self._sock, self._request = sock, request
        self._bytes = cast(io.RawIOBase, sock.makefile("rb", buffering=0))
        self.head_until: float | None = time.monotonic() + request.call.options.read_timeout
        request.reader = self

    def makefile(self, mode: str) -> BinaryIO:
        """What http.client asks a socket for, to read a response from."""
        return cast(BinaryIO, io.BufferedReader(self))

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
        self._request.answered = True
        return count

    def close(self) -> None:
        if not self.closed:
            self._bytes.close()  # the socket counts its readers
        super().close()


class _TimedResponse(http.client.HTTPResponse):
    def __init__(self, sock: Any, *args: Any, **kwargs: Any) -> None:
        request = _local.request
        if request is not None and isinstance(sock, socket.socket):  # TLS within TLS is no socket, and has its own time-out
            sock = cast(socket.socket, _TimedReader(sock, request))
        super().__init__(sock, *args, **kwargs)


class _TimedConnection(HTTPConnection):
    """``timeout`` covers all of connecting: resolving the name, trying all of its addresses, and TLS."""

    response_class = _TimedResponse

    def _new_conn(self) -> socket.socket:
        timeout, name = self.timeout, self._dns_host
        until = time.monotonic() + float(timeout or 0)
        addresses = self._addresses(until)
        failures: list[exceptions.HTTPError] = []
        try:
            for number, address in enumerate(addresses, 1):
                # an address that does not answer must not take the time of those after it
                self._dns_host = address
                self.timeout = max(0.001, until - time.monotonic()) / (len(addresses) - number + 1)
                try:
                    sock = super()._new_conn()
                except (exceptions.ConnectTimeoutError, exceptions.NewConnectionError) as error:
                    failures.append(error)
                    continue
                sock.settimeout(max(0.001, until - time.monotonic()))
                return sock
        finally:
            self._dns_host, self.timeout = name, timeout
        # an address without a route says nothing about a host that another address leads to
        raise next((error for error in failures if getattr(error.__cause__, "errno", None) not in UNREACHABLE), failures[-1])

    def _addresses(self, until: float) -> list[str]:
        """The addresses of the host. Nothing can end a resolver: where it takes too long, its thread is left behind."""
        name = self._dns_host
        try:
            return [str(ipaddress.ip_address(name))]
        except ValueError:
            answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        try:
            threading.Thread(target=_resolve, args=(name, self.port, answers), daemon=True, name="resolver").start()
        except RuntimeError:  # no further thread may be started: then nothing ends the resolver
            _resolve(name, self.port, answers)
        try:
            answer = answers.get(timeout=max(0.001, until - time.monotonic()))
        except queue.Empty:
            raise exceptions.ConnectTimeoutError(self, f"{name} was not resolved in time") from None
        if isinstance(answer, socket.gaierror):
            raise exceptions.NameResolutionError(self.host, self, answer) from answer
        if isinstance(answer, Exception):
            raise exceptions.NewConnectionError(self, "its name cannot be resolved") from answer
        return cast("list[str]", answer)

    def connect(self) -> None:
        super().connect()
        _restore_timeout(self)


def _restore_timeout(connection: HTTPConnection) -> None:
    """The time that connecting left must not bound the sending of a body."""
    if connection.sock is not None:
        connection.sock.settimeout(connection.timeout)


def _resolve(name: str, port: int, answers: queue.SimpleQueue[Any]) -> None:
    try:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        answers.put(list(dict.fromkeys(str(info[4][0]) for info in infos)))
    except Exception as error:  # noqa: BLE001 (passed to the thread that waits for it, whatever it is)
        answers.put(error)


class _TimedTLSConnection(HTTPSConnection, _TimedConnection):
    """The same, with TLS."""

    def connect(self) -> None:
        super().connect()  # urllib3's, which does not call the one above
        _restore_timeout(self)


class _TimedPool(HTTPConnectionPool):
    ConnectionCls = _TimedConnection


class _TimedTLSPool(HTTPSConnectionPool):
    ConnectionCls = _TimedTLSConnection


def _leave_all_to_parent() -> None:
    for connections in list(_all_connections):
        connections.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
