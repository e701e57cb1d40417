"""How a request reaches its server: through which proxy, at which address, and what its silence means."""

from __future__ import annotations

import base64
import ipaddress
import queue
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, cast
from urllib.parse import quote, urlsplit

from forebay.errors import ConfigError, RemoteTimeout
from forebay.remote.base import AttemptFailed, Call, RemoteOptions
from forebay.remote.http import transfers
from forebay.remote.http.handles import NotConnected, TransferRequest
from forebay.remote.http.receivers import Incoming
from forebay.remote.urls import canonical

PORTS = {"http": 80, "https": 443}
PROXY_PORTS = PORTS | dict.fromkeys(("socks4", "socks4a", "socks5", "socks5h"), 1080)
MAX_NAMES = 1000  # whose addresses are remembered
KEEP_ADDRESSES = 60.0  # seconds
_HOST = re.compile(r"[a-z0-9._~!$&'()*+,;=-]+|[0-9a-f:.]+|[0-9a-f.]*:[0-9a-f:.]*%[A-Za-z0-9._~-]+")
_ZONE = re.compile(r"%[^]]*(?=])")
_TO_QUOTE = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=:@/?%-]+|%(?![0-9A-Fa-f]{2})")


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


class _Server(NamedTuple):
    """What to connect to, the server or its proxy; ``name``: of the way to the server, by which its silence is remembered."""

    host: str
    port: int
    name: str


class Begun(NamedTuple):
    """A request that was sent: its response, which comes by itself, ``host`` and when it was sent (monotonic)."""

    incoming: Incoming
    host: str
    at: float


class Connections:
    """Sends requests by the loop of this process, which keeps the connections. Callable from any thread; usable after a fork."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._proxies: dict[Endpoint, str | None] = {}
        self._addresses: dict[tuple[str, int], tuple[float, list[str]]] = {}  # with the time until which they are believed

    def send(self, call: Call, endpoint: Endpoint, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> Incoming:
        """Send a request and wait for the head of its response; the body is still to be read. Raises `AttemptFailed`, and `CallAborted`
        after the end of the call, which ends the response too."""
        request, server = self._request(call, endpoint, method, target, headers, body)
        call.check_host(server.name)
        with _noting(call, server.name, time.monotonic()) as queued:
            return self._send(call, request, server.host, server.port, queued)

    def begin(
        self, call: Call, endpoint: Endpoint, method: str, target: str, headers: Mapping[str, str], on_ready: Callable[[], None]
    ) -> Begun | None:
        """Send a request without waiting for anything; None where the name of the host has to be resolved first. ``on_ready``: see
        `Incoming`. Raises `RemoteTimeout` for a host that was silent recently."""
        request, server = self._request(call, endpoint, method, target, headers, None)
        known = self._addresses.get((server.host, server.port))
        if known is not None and known[0] > time.monotonic():
            address = known[1][0]
        elif _is_address(server.host):
            address = None
        else:
            return None
        call.check_host(server.name)
        seconds = call.timeout(self._options.connect_timeout)
        return Begun(
            Incoming(_to(request, server.host, server.port, address, seconds), self._options.buffer, on_ready),
            server.name,
            time.monotonic(),
        )

    def receive(self, call: Call, begun: Begun) -> Incoming:
        """Wait for the head of the response to a request that was begun. Raises as `send`, and `NotConnected`."""
        with _noting(call, begun.host, begun.at) as queued:
            try:
                call.add_response(begun.incoming)
                begun.incoming.wait_for_head()
                return begun.incoming
            except BaseException:
                queued.append(begun.incoming.queued)
                begun.incoming.close()
                call.remove_response(begun.incoming)
                raise

    def _request(
        self, call: Call, endpoint: Endpoint, method: str, target: str, headers: Mapping[str, str], body: bytes | None
    ) -> tuple[TransferRequest, _Server]:
        proxy = self.proxy(endpoint)
        origin = f"{endpoint.scheme}://{endpoint.name}"
        request = TransferRequest(
            method, origin, _TO_QUOTE.sub(_quoted, target), headers, body, proxy, read_timeout=self._options.read_timeout, until=call.until,
            limits=call.limits, wait=call.wait,
        )  # fmt: skip
        if proxy is None:
            return request, _Server(endpoint.host, endpoint.port, origin)
        # a host that is silent behind a proxy may answer without it
        return request, _Server(*_address_of(proxy), f"{origin} by {canonical(proxy)}")

    def _send(self, call: Call, request: TransferRequest, host: str, port: int, queued: list[float]) -> Incoming:
        """Send it to the first address of a host that can be connected to. The time for connecting covers resolving the name. ``queued``
        gets the seconds for which each failed attempt waited for a connection that the limits of the node allow."""
        until = time.monotonic() + call.timeout(self._options.connect_timeout)
        addresses = self._resolve(call, host, port, until)
        failures: list[NotConnected] = []
        for number, address in enumerate(addresses, 1):
            # an address that does not answer must not take the time of those after it
            seconds = max(0.001, until - time.monotonic()) / (len(addresses) - number + 1)
            incoming = Incoming(_to(request, host, port, address, seconds), self._options.buffer)
            try:
                call.add_response(incoming)
                incoming.wait_for_head()
                return incoming
            except NotConnected as failed:
                failures.append(failed)
                queued.append(incoming.queued)
                until += incoming.queued  # the time for connecting begins when the transfer does
                call.remove_response(incoming)
            except BaseException:
                queued.append(incoming.queued)
                incoming.close()
                call.remove_response(incoming)
                raise
        self._addresses.pop((host, port), None)
        # an address without a route says nothing about a host that another address leads to
        raise next((failed for failed in failures if not failed.unreachable), failures[-1])

    def spare(self) -> int:
        """How many more connections may be used at once."""
        return self._options.connections - transfers.running()

    def proxy(self, endpoint: Endpoint) -> str | None:
        """The proxy that the environment named for ``endpoint`` at its first request."""
        if endpoint not in self._proxies:
            self._proxies[endpoint] = _proxy_of(endpoint) if self._options.proxies else None
        return self._proxies[endpoint]

    def _resolve(self, call: Call, host: str, port: int, until: float) -> list[str] | list[None]:
        """The addresses of a host; ``[None]`` where its name is one. Nothing can end a resolver: where it takes too long, its thread is
        left behind."""
        if _is_address(host):
            return [None]
        known = self._addresses.get((host, port))
        if known is not None and known[0] > time.monotonic():
            return known[1]
        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        with call.connecting():
            try:
                threading.Thread(target=_look_up, args=(host, port, answers), daemon=True, name="resolver").start()
            except RuntimeError:  # no further thread may be started: then nothing ends the resolver
                _look_up(host, port, answers)
            try:
                answer = answers.get(timeout=max(0.001, until - time.monotonic()))
            except queue.Empty:
                raise AttemptFailed("nothing came for too long", RemoteTimeout, no_answer=True) from None
        if isinstance(answer, Exception):
            # a name server that gives no answer takes as long as a silent host; a refusal comes at once
            no_answer = getattr(answer, "errno", None) == socket.EAI_AGAIN
            raise AttemptFailed("its host name cannot be resolved", no_answer=no_answer) from answer
        if len(self._addresses) >= MAX_NAMES:
            self._addresses.clear()
        addresses = cast("list[str]", answer)
        self._addresses[host, port] = (time.monotonic() + KEEP_ADDRESSES, addresses)
        return addresses


@contextmanager
def _noting(call: Call, host: str, began: float) -> Iterator[list[float]]:
    """Around the wait for a response: notes whether the host answers. Yields a list for the seconds for which nothing was sent to it."""
    queued: list[float] = []
    try:
        yield queued
    except AttemptFailed as failed:
        if failed.no_answer:
            call.host_silent(host, began + sum(queued), unreachable=failed.unreachable)
        raise
    call.host_answered(host)


def _to(request: TransferRequest, host: str, port: int, address: str | None, seconds: float) -> TransferRequest:
    """The request, sent to an address that the host's name stands for, with so many seconds for connecting."""
    resolved = None if address is None else f"{host}:{port}:{f'[{address}]' if ':' in address else address}"
    return request._replace(resolved=resolved, connect_timeout=seconds)


@lru_cache(maxsize=1024)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(name: str, port: int, answers: queue.SimpleQueue[Any]) -> None:
    try:
        infos = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        answers.put(list(dict.fromkeys(str(info[4][0]) for info in infos)))
    except Exception as error:  # noqa: BLE001 (passed to the thread that waits for it, whatever it is)
        answers.put(error)


def _quoted(match: re.Match[str]) -> str:
    return quote(match[0], safe="", errors="surrogatepass")


def _proxy_of(endpoint: Endpoint) -> str | None:
    proxies = urllib.request.getproxies_environment()
    if urllib.request.proxy_bypass_environment(f"{endpoint.host}:{endpoint.port}", proxies):  # type: ignore[attr-defined]
        return None
    proxy = proxies.get(endpoint.scheme) or proxies.get("all")
    if not proxy:
        return None
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    kind = proxy.partition("://")[0].lower()
    if kind not in PROXY_PORTS:
        message = (
            f"the environment names a {kind}:// proxy for {endpoint.scheme}:// URLs: name an http:// or socks5h:// one, or set NO_PROXY"
        )
        raise ConfigError(message)
    parts = urlsplit(proxy)
    user, at, _ = parts.netloc.rpartition("@")
    host, port = _address_of(proxy)
    return f"{kind}://{user}{at}{f'[{host}]' if ':' in host else host}:{port}"


def _address_of(proxy: str) -> tuple[str, int]:
    """Host and port of a proxy's URL. Raises `ConfigError`."""
    try:
        parts = urlsplit(proxy)
        host, port = parts.hostname, parts.port or PROXY_PORTS.get(parts.scheme.lower())
    except ValueError:  # its text may quote the URL
        host, port = None, None
    if not host or not port:
        raise ConfigError("the environment names a proxy without a host: write http://host:port")
    return host, port


def basic_auth(user: str, password: str) -> str:
    """The value of an ``Authorization`` header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
