"""Connections that are kept open: of one process, by host. Nothing here is shared over a fork."""

from __future__ import annotations

import base64
import http.client
import os
import select
import socket
import ssl
import threading
import urllib.request
import weakref
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from forebay.errors import ConfigError
from forebay.remote.base import Call, RemoteOptions, network_errors

_pools: weakref.WeakSet[Connections] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Place:
    """Whom to connect to: scheme, host, port."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Place:
        """Raises `ConfigError` if the URL names no host."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError("an HTTP URL names a host: https://host/path is wanted")
        return cls(parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme])


class Connections:
    """Idle connections, taken and given back. Any thread; after a fork the child begins with none, however it was forked."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._context: ssl.SSLContext | None = None
        self._forget()
        _pools.add(self)

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._idle: dict[Place, list[http.client.HTTPConnection]] = {}
        self._busy: weakref.WeakSet[http.client.HTTPConnection] = weakref.WeakSet()

    def close_in_child(self) -> None:
        """Close the parent's sockets here (they stay open there), so that the remote sees when the parent closes one."""
        for connection in [*self._busy, *(found for idle in self._idle.values() for found in idle)]:
            if connection.sock is not None:
                os.close(connection.sock.detach())
        self._forget()

    def take(self, place: Place, call: Call) -> http.client.HTTPConnection:
        """A connection to ``place``, now working for ``call``. Raises `Trouble`."""
        if self._pid != os.getpid():  # forked by C, which runs no hook
            self._forget()
        found = self._reuse(place)
        if found is None:
            with call.connecting(), network_errors():
                found = self._open(place, call)
        with self._lock:
            self._busy.add(found)
        assert found.sock is not None
        call.hold(found.sock)
        return found

    def _reuse(self, place: Place) -> http.client.HTTPConnection | None:
        while True:
            with self._lock:
                idle = self._idle.get(place)
                if not idle:
                    return None
                found = idle.pop()
            if found.sock is not None and not _is_readable(found.sock):
                return found
            found.close()  # the server closed it, or said something that nobody asked for

    def give(self, place: Place, connection: http.client.HTTPConnection) -> None:
        """Keep ``connection`` for the next request; its last answer was read to the end."""
        with self._lock:
            self._busy.discard(connection)
            idle = self._idle.setdefault(place, [])
            keep = len(idle) < self._options.connections
            if keep:
                idle.append(connection)
        if not keep:
            connection.close()

    def spare(self) -> int:
        """How many more may be used at once."""
        with self._lock:
            return self._options.connections - len(self._busy)

    def proxy(self, place: Place) -> str | None:
        """The proxy that the environment names for ``place``."""
        if not self._options.proxies:
            return None
        known = urllib.request.getproxies_environment()
        if urllib.request.proxy_bypass_environment(f"{place.host}:{place.port}", known):  # type: ignore[attr-defined]
            return None
        found = known.get(place.scheme) or known.get("all")
        return found if found is None or "://" in found else f"http://{found}"

    def _open(self, place: Place, call: Call) -> http.client.HTTPConnection:
        proxy = self.proxy(place)
        timeout = call.timeout(self._options.connect_timeout)
        first = place if proxy is None else Place.of(proxy)
        if proxy is not None and place.scheme == "https":
            if first.scheme == "https":
                raise ConfigError("an https:// URL cannot be asked through a proxy that is itself https://: name it as http://")
            connection = self._secure(first, timeout)
            connection.set_tunnel(place.host, place.port, headers=proxy_headers(proxy))
        elif first.scheme == "https":
            connection = self._secure(first, timeout)
        else:
            connection = http.client.HTTPConnection(first.host, first.port, timeout=timeout)
        connection.connect()
        return connection

    def _secure(self, place: Place, timeout: float) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(place.host, place.port, timeout=timeout, context=self._tls())

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
