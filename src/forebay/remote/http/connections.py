"""Connections that are kept open: of one process, by host. Nothing here is shared over a fork."""

from __future__ import annotations

import base64
import http.client
import logging
import os
import re
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Mapping
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from urllib3 import BaseHTTPResponse, HTTPConnectionPool, PoolManager, ProxyManager, Retry, Timeout, exceptions

from forebay.errors import ConfigError, ForebayError, RemoteProtocolError, RemoteTimeout
from forebay.remote.base import Call, RemoteOptions, Trouble
from forebay.remote.http.sockets import UNREACHABLE, HTTPPool, HTTPSPool, Listening
from forebay.remote.urls import canonical

_TUNNEL = re.compile(r"Tunnel connection failed: (\d{3}[^'\")]*)")
MAX_PLACES = 100  # hosts with idle connections
PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[a-z0-9._~!$&'()*+,;=-]+|[0-9a-f:.]+|[0-9a-f.]*:[0-9a-f:.]*%[A-Za-z0-9._~-]+")
_ZONE = re.compile(r"%[^]]*(?=])")
_ONCE = Retry(False, redirect=False)

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


class Endpoint(NamedTuple):
    """Whom to connect to. ``host``: an IPv6 address may have a zone: ``fe80::1%eth0``. ``name``: host and port as a URL has them, without
    a default port."""

    scheme: str
    host: str
    port: int
    name: str

    @classmethod
    def of(cls, scheme: str, netloc: str) -> Endpoint:
        """Raises `ValueError` if that names no host."""
        return _place(scheme, netloc)

    @property
    def key(self) -> str:
        """Its scheme, host and port."""
        return f"{self.scheme}://{self.name}"

    @property
    def told(self) -> str:
        """The name as the host may be told it: without a zone, which names an interface of this machine."""
        return _ZONE.sub("", self.name)


@lru_cache(maxsize=1024)
def _place(scheme: str, netloc: str) -> Endpoint:
    parts = urlsplit(f"{scheme}://{netloc}")
    host, port, usual = (parts.hostname or "").encode("idna").decode(), parts.port, PORTS.get(scheme)
    if not _HOST.fullmatch(host) or not usual or port == 0:
        raise ValueError("no host, or no port that there is")
    name = f"[{host}]" if ":" in host else host
    return Endpoint(scheme, host, port or usual, name if port in (None, usual) else f"{name}:{port}")


class Connections:
    """urllib3's pools, by host. Any thread; after a fork the child begins with none, however it was forked."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._patience = Timeout(connect=options.connect_timeout, read=options.read_timeout)
        self._proxies: dict[Endpoint, str | None] = {}
        self._inherited: list[object] = []  # a parent's pools: their locks may be held by threads that are not here
        self._forget()
        _pools.add(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._managers: dict[str | None, PoolManager] = {}
        self._known: dict[Endpoint, HTTPConnectionPool] = {}
        self._busy = 0

    def leave_to_parent(self) -> None:
        """In a child: close the parent's idle sockets here (they stay open there), so that a remote sees when he closes one."""
        for pool in self._known.values():
            for connection in getattr(pool.pool, "queue", ()):  # looked at without its lock, which a thread of the parent's may hold
                if (sock := getattr(connection, "sock", None)) is not None and sock.fileno() >= 0:
                    os.close(sock.detach())
        self._inherited.append(self._managers)
        self._forget()

    def ask(
        self, call: Call, place: Endpoint, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> BaseHTTPResponse:
        """Send a request and wait for the head of its answer; the body is still to come. Raises `Trouble`."""
        if self._pid != os.getpid():  # forked by C, which runs no hook
            self.leave_to_parent()
        pool = self._known.get(place) or self._pool(place)
        patience = self._patience
        if call.remaining() is not None:
            patience = Timeout(connect=call.timeout(self._options.connect_timeout), read=call.timeout(self._options.read_timeout))
        asked = self._asked(place)
        call.approach(asked)
        began = time.monotonic()
        try:
            with call.connecting, network_errors, _unheard, Listening(call) as request:
                response = pool.urlopen(
                    method, target, body, headers, retries=_ONCE, redirect=False, assert_same_host=False, timeout=patience,
                    preload_content=False, decode_content=False,
                )  # fmt: skip
        except Trouble as trouble:
            if trouble.silent and not request.heard:
                call.unheard(asked, began, sure=trouble.unreachable)
            raise
        call.heard(asked)
        return response

    def _asked(self, place: Endpoint) -> str:
        """Who is silent where no answer comes: through a proxy another one than without."""
        proxy = self.proxy(place)
        return place.key if proxy is None else f"{place.key} by {canonical(proxy)}"

    def busy(self, count: int) -> None:
        """So many more (or less) connections are in use."""
        with self._lock:
            self._busy += count

    def spare(self) -> int:
        """How many more may be used at once."""
        with self._lock:
            return self._options.connections - self._busy

    def _pool(self, place: Endpoint) -> HTTPConnectionPool:
        proxy = self.proxy(place)
        with self._lock:
            manager = self._managers.get(proxy)
            if manager is None:
                manager = self._managers[proxy] = self._manager(proxy)
            if len(self._known) >= MAX_PLACES:
                self._known.clear()
            host = f"[{place.host}]" if ":" in place.host else place.host  # without brackets, urllib3 takes no zone
            found = self._known[place] = manager.connection_from_host(host, place.port, place.scheme)
        return found

    def _manager(self, proxy: str | None) -> PoolManager:
        how: dict[str, Any] = {
            "num_pools": MAX_PLACES, "maxsize": self._options.connections, "block": False, "blocksize": self._options.buffer,
            "ca_certs": os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"),
        }  # fmt: skip
        manager = PoolManager(**how) if proxy is None else ProxyManager(proxy, proxy_headers=proxy_headers(proxy), **how)
        manager.pool_classes_by_scheme = {"http": HTTPPool, "https": HTTPSPool}
        return manager

    def proxy(self, place: Endpoint) -> str | None:
        """The proxy that the environment named for ``place`` when it was first asked."""
        if place not in self._proxies:
            self._proxies[place] = self._find_proxy(place) if self._options.proxies else None
        return self._proxies[place]

    def _find_proxy(self, place: Endpoint) -> str | None:
        known = urllib.request.getproxies_environment()
        if urllib.request.proxy_bypass_environment(f"{place.host}:{place.port}", known):  # type: ignore[attr-defined]
            return None
        found = known.get(place.scheme) or known.get("all")
        if not found:
            return None
        found = found if "://" in found else f"http://{found}"
        kind = found.partition("://")[0].lower()
        if kind not in ("http", "https"):
            raise ConfigError(f"the environment names a {kind}:// proxy for {place.scheme}:// URLs: name an http:// one, or set NO_PROXY")
        return found


class _Discreet(logging.Filter):
    """Lets nothing pass that urllib3 says of our requests: it names whole URLs, signatures included. Of others' requests all passes."""

    asking = threading.local()

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(self.asking, "ours", False)


for _name in ("urllib3.connectionpool", "urllib3.util.retry"):
    logging.getLogger(_name).addFilter(_Discreet())


class _Unheard:
    def __enter__(self) -> None:
        _Discreet.asking.ours = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _Discreet.asking.ours = False


class _NetworkErrors:
    """The edge: what urllib3 raises becomes `Trouble`. No sink is called in here: its errors are its own."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None or isinstance(error, ForebayError):  # some of ours are OSErrors too
            return
        if isinstance(error, exceptions.HTTPError):
            raise _trouble(error) from error
        if isinstance(error, http.client.HTTPException):
            raise Trouble("an answer that is not HTTP", RemoteProtocolError) from error
        if isinstance(error, OSError):
            raise Trouble(f"the connection failed: {error.strerror or type(error).__name__}") from error


_unheard, network_errors = _Unheard(), _NetworkErrors()


def _trouble(error: exceptions.HTTPError) -> Trouble:
    """In our words: urllib3's may name the whole URL, secrets included."""
    cause = _cause(error)
    if isinstance(error, exceptions.SSLError):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return Trouble(f"its certificate is not trusted: {cause.verify_message}", again=False)
        return Trouble("TLS failed")
    if isinstance(error, exceptions.NameResolutionError):
        # a name server that gives no answer is waited for as a host is; one that says no was quick
        again = getattr(error.__cause__, "errno", None) == socket.EAI_AGAIN
        return Trouble("its host name cannot be resolved", silent=again)
    if isinstance(error, exceptions.TimeoutError) and not isinstance(error, exceptions.NewConnectionError):
        return Trouble("nothing came for too long", RemoteTimeout, silent=True)
    if isinstance(error, exceptions.ProxyError):
        said = _TUNNEL.search(str(cause))
        if said:
            return Trouble(f"its proxy answers {said[1]}", again=said[1] >= "5")
        inner = _trouble(cause) if isinstance(cause, exceptions.HTTPError) else Trouble("")
        return Trouble("its proxy cannot be reached", inner.error, silent=inner.silent, unreachable=inner.unreachable)
    for found in (error, cause):
        if isinstance(found, (exceptions.IncompleteRead, http.client.IncompleteRead)):
            return Trouble("the connection was cut" + (f" {found.expected:,} bytes before the end" if found.expected else ""))
    if isinstance(cause, http.client.RemoteDisconnected):
        return Trouble("the connection was cut")
    if isinstance(cause, http.client.HTTPException) or isinstance(error, (exceptions.InvalidHeader, exceptions.InvalidChunkLength)):
        return Trouble("an answer that is not HTTP", RemoteProtocolError)
    unreachable = getattr(cause, "errno", None) in UNREACHABLE
    why = f"the connection failed: {getattr(cause, 'strerror', None) or type(cause or error).__name__}"
    return Trouble(why, silent=unreachable, unreachable=unreachable)


def _cause(error: exceptions.HTTPError) -> BaseException | None:
    if isinstance(error, exceptions.ProxyError):
        return error.original_error
    return next((arg for arg in error.args if isinstance(arg, Exception)), None) or error.__cause__ or error.__context__


def proxy_headers(proxy: str) -> dict[str, str]:
    """What a proxy wants to be told: the user and password in its URL."""
    parts = urlsplit(proxy)
    if not parts.username:
        return {}
    return {"Proxy-Authorization": basic(unquote(parts.username), unquote(parts.password or ""))}


def basic(user: str, password: str) -> str:
    """The value of an ``Authorization`` header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _leave_all_to_parent() -> None:
    for pool in list(_pools):
        pool.leave_to_parent()


os.register_at_fork(after_in_child=_leave_all_to_parent)
