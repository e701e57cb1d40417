"""How a request reaches its server: through which proxy, at which address, and what its silence means."""

from __future__ import annotations

import base64
import ipaddress
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from forebay.errors import ConfigError
from forebay.remote.base import AttemptFailed, Call, RemoteOptions
from forebay.remote.http import loop
from forebay.remote.http.handles import NO_NAME, NotConnected, TransferRequest
from forebay.remote.http.transfers import HttpTransfer

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


class Connections:
    """Sends requests by the loop of this process, which keeps the connections. Callable from any thread; usable after a fork."""

    def __init__(self, options: RemoteOptions) -> None:
        self._options = options
        self._proxies: dict[Endpoint, str | None] = {}
        self._addresses: dict[str, tuple[float, list[str]]] = {}
        """`TransferRequest.way` -> addresses, and the time until which they are believed."""

    def start(
        self, call: Call, endpoint: Endpoint, method: str, target: str, headers: Mapping[str, str], body: bytes | None,
        on_ready: Callable[[], None] | None = None,
    ) -> HttpTransfer:  # fmt: skip
        """Send a request, without waiting for anything. Raises `RemoteTimeout` for a host that was silent recently, and
        `AttemptFailed` where this process can send nothing."""
        proxy, options = self.proxy(endpoint), self._options
        request = TransferRequest(
            method, f"{endpoint.scheme}://{endpoint.name}", _TO_QUOTE.sub(_quoted, target), headers, body, proxy,
            connect_timeout=call.timeout(options.connect_timeout), read_timeout=options.read_timeout, until=call.until,
            limits=call.limits, wait=call.wait,
        )  # fmt: skip
        call.check_host(way := request.way)
        host, port = (endpoint.host, endpoint.port) if proxy is None else _address_of(proxy)
        if _is_address(host):
            return loop.start(HttpTransfer(request, options.buffer, on_ready))
        known = self._addresses.get(way)
        if known is not None and known[0] > time.monotonic():
            return loop.start(HttpTransfer(request, options.buffer, on_ready, addresses=known[1]))
        transfer = loop.start(HttpTransfer(request, options.buffer, on_ready, addresses=None))
        try:
            threading.Thread(target=self._resolve, args=(transfer, host, port), daemon=True, name="resolver").start()
        except RuntimeError:  # no further thread may be started: then nothing ends the resolver
            self._resolve(transfer, host, port)
        return transfer

    def receive(self, call: Call, transfer: HttpTransfer) -> None:
        """Wait for the head of a response; the body is still to be read. The end of the call ends the response too. Raises
        `AttemptFailed`, and `CallAborted` after the end of the call."""
        request = transfer.request
        try:
            call.add_response(transfer)
            transfer.wait_for_head()
        except BaseException as error:
            transfer.close()
            call.remove_response(transfer)
            if isinstance(error, AttemptFailed) and error.no_answer:
                call.host_silent(request.way, transfer.started + transfer.queued, unreachable=error.unreachable)
            if isinstance(error, NotConnected):
                self._addresses.pop(request.way, None)
            raise
        call.host_answered(request.way)

    def spare(self) -> int:
        """How many more connections may be used at once."""
        return self._options.connections - loop.running()

    def proxy(self, endpoint: Endpoint) -> str | None:
        """The proxy that the environment named for ``endpoint`` at its first request."""
        if endpoint not in self._proxies:
            self._proxies[endpoint] = _proxy_of(endpoint) if self._options.proxies else None
        return self._proxies[endpoint]

    def _resolve(self, transfer: HttpTransfer, host: str, port: int) -> None:
        """Tell a transfer the addresses of its host. Nothing can end a resolver, so no transfer waits longer than its time for
        connecting."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001 (passed to the thread that waits for the transfer, whatever it is)
            # a name server that gives no answer takes as long as a silent host; a refusal comes at once
            failed = AttemptFailed(NO_NAME, no_answer=getattr(error, "errno", None) == socket.EAI_AGAIN)
            failed.__cause__ = error
            transfer.fail(failed)
            return
        names = dict.fromkeys(str(info[4][0]) for info in found)
        addresses = [f"{host}:{port}:{f'[{name}]' if ':' in name else name}" for name in names]
        if len(self._addresses) >= MAX_NAMES:
            self._addresses.clear()
        self._addresses[transfer.request.way] = (time.monotonic() + KEEP_ADDRESSES, addresses)
        transfer.resolved(addresses)


@lru_cache(maxsize=1024)
def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


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
