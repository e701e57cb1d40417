"""Connections that are kept open: of one process, by host. Nothing here is shared over a fork."""

from __future__ import annotations

import base64
import os
import select
import socket
import ssl
import threading
import urllib.request
import weakref
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote, urlsplit

from forebay.errors import ConfigError
from forebay.remote.base import Call, RemoteOptions, Trouble, network_errors
from forebay.remote.wire import Wire

MAX_PLACES = 100  # hosts with idle connections
_PORTS = {"http": 80, "https": 443}

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Place:
    """Whom to connect to. ``name``: host and port as a URL has them, without a default port."""

    scheme: str
    host: str
    port: int
    name: str

    @classmethod
    def of(cls, scheme: str, netloc: str) -> Place:
        """Raises `ValueError` if that names no host."""
        return _place(scheme, netloc)


@lru_cache(maxsize=1024)
def _place(scheme: str, netloc: str) -> Place:
    parts = urlsplit(f"{scheme}://{netloc}")
    host, port, usual = (parts.hostname or "").encode("idna").decode(), parts.port, _PORTS.get(scheme)
    if not host or not usual or port == 0:
        raise ValueError("no host, or no port that there is")
    name = f"[{host}]" if ":" in host else host
    return Place(scheme, host, port or usual, name if port in (None, usual) else f"{name}:{port}")


class Connections:
    """Idle connections, taken and given back. Any thread; after a fork the child begins with none, however it was forked."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._context: ssl.SSLContext | None = None
        self._proxies: dict[Place, str | None] = {}
        self._forget()
        _pools.add(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._idle: dict[Place, list[Wire]] = {}
        self._busy: weakref.WeakSet[Wire] = weakref.WeakSet()

    def close_in_child(self) -> None:
        """Close the parent's sockets here (they stay open there), so that the remote sees when the parent closes one."""
        for wire in [*self._busy, *(found for idle in self._idle.values() for found in idle)]:
            if wire.sock.fileno() >= 0:
                os.close(wire.sock.detach())
        self._forget()

    def take(self, place: Place, call: Call) -> Wire:
        """A connection to ``place``, now working for ``call``. Raises `Trouble`."""
        if self._pid != os.getpid():  # forked by C, which runs no hook
            self._forget()
        found = self._reuse(place)
        if found is None:
            with call.connecting(), network_errors():
                found = self._open(place, call)
        with self._lock:
            self._busy.add(found)
        try:
            call.hold(found.sock)
        except BaseException:
            found.close()
            raise
        return found

    def _reuse(self, place: Place) -> Wire | None:
        while True:
            with self._lock:
                idle = self._idle.get(place)
                if not idle:
                    return None
                found = idle.pop()
            if not _is_readable(found.sock):
                return found
            found.close()  # the server closed it, or said something that nobody asked for

    def give(self, place: Place, wire: Wire, call: Call) -> None:
        """Done with ``wire``: kept for the next request if its answer was read to the end, else closed."""
        call.let_go(wire.sock)
        with self._lock:
            self._busy.discard(wire)
            idle = self._idle.get(place, [])
            keep = wire.is_free and len(idle) < self._options.connections
            if keep:
                self._idle[place] = [*idle, wire]
            dropped = [] if keep else [wire]
            if len(self._idle) > MAX_PLACES:
                dropped += self._idle.pop(next(iter(self._idle)))
        for wire in dropped:
            wire.close()

    def spare(self) -> int:
        """How many more may be used at once."""
        with self._lock:
            return self._options.connections - len(self._busy)

    def proxy(self, place: Place) -> str | None:
        """The proxy that the environment named for ``place`` when it was first asked."""
        if place not in self._proxies:
            self._proxies[place] = self._find_proxy(place) if self._options.proxies else None
        return self._proxies[place]

    def _find_proxy(self, place: Place) -> str | None:
        known = urllib.request.getproxies_environment()
        if urllib.request.proxy_bypass_environment(f"{place.host}:{place.port}", known):  # type: ignore[attr-defined]
            return None
        found = known.get(place.scheme) or known.get("all")
        if not found:
            return None
        found = found if "://" in found else f"http://{found}"
        kind = found.partition("://")[0].lower()
        if kind != "http" and (kind, place.scheme) != ("https", "http"):
            raise ConfigError(f"the environment names a {kind}:// proxy for {place.scheme}:// URLs: name an http:// one, or set NO_PROXY")
        return found

    def _open(self, place: Place, call: Call) -> Wire:
        proxy, timeout = self.proxy(place), call.timeout(self._options.connect_timeout)
        if proxy is None:
            return self._wire(self._connect(place, timeout))
        wire = self._wire(self._connect(Place.of(*urlsplit(proxy)[:2]), timeout))
        if place.scheme == "http":
            return wire
        try:
            return self._wire(self._secure(self._tunnel(wire, place, proxy), place))
        except BaseException:
            wire.close()
            raise

    def _connect(self, place: Place, timeout: float) -> socket.socket:
        sock = socket.create_connection((place.host, place.port), timeout)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return self._secure(sock, place) if place.scheme == "https" else sock
        except BaseException:
            sock.close()
            raise

    def _tunnel(self, wire: Wire, place: Place, proxy: str) -> socket.socket:
        target = place.name if place.name.endswith(f":{place.port}") else f"{place.name}:{place.port}"
        head = wire.ask("CONNECT", target, {"Host": target, **proxy_headers(proxy)})
        if head.status != 200:
            raise Trouble(f"its proxy answers {head.status} {head.reason}", again=head.status >= 500, status=head.status)
        return wire.sock

    def _secure(self, sock: socket.socket, place: Place) -> socket.socket:
        return self._tls().wrap_socket(sock, server_hostname=place.host)

    def _wire(self, sock: socket.socket) -> Wire:
        return Wire(sock, self._options.buffer)

    def _tls(self) -> ssl.SSLContext:
        if self._context is None:
            self._context = ssl.create_default_context(cafile=os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE"))
        return self._context


def proxy_headers(proxy: str) -> dict[str, str]:
    """What a proxy wants to be told: the user and password in its URL."""
    parts = urlsplit(proxy)
    if not parts.username:
        return {}
    return {"Proxy-Authorization": basic(unquote(parts.username), unquote(parts.password or ""))}


def basic(user: str, password: str) -> str:
    """The value of an ``Authorization`` header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _is_readable(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _close_all_in_child() -> None:
    for pool in list(_pools):
        pool.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)
