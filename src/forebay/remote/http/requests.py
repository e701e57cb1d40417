"""How a request reaches its server: credentials, signatures, proxies, addresses, redirects, and what silence means; and what a response
means: its status, its headers, and a body whose bytes are counted."""

from __future__ import annotations

import base64
import ipaddress
import netrc
import os
import re
import socket
import time
import urllib.request
import zlib
from collections.abc import Callable, Container, Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache, partial
from types import TracebackType
from typing import NamedTuple, Self, TypeAlias
from urllib.parse import quote, unquote, urljoin, urlsplit

from forebay import errors
from forebay._kernel.threads import DaemonThread
from forebay._logs import escaped, logger
from forebay._model import Buffer, ObjectInfo, Span
from forebay.remote.base import RESTORE, AttemptFailed, Call, RemoteOptions, Trouble, is_negotiated, is_of_archive, replaced
from forebay.remote.http import loop
from forebay.remote.http.transfers import (
    NO_NAME,
    NO_TLS,
    HttpTransfer,
    NotConnected,
    Tls,
    TransferRequest,
    about_client_certificate,
    with_header,
)
from forebay.remote.urls import canonical

log = logger("forebay.remote")

OWN_HEADERS = {"User-Agent": "forebay", "Accept-Encoding": "identity"}
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 20  # a login at another server takes up to ten
PORTS = {"http": 80, "https": 443}
PROXY_PORTS = PORTS | dict.fromkeys(("socks4", "socks4a", "socks5", "socks5h"), 1080)
MAX_NAMES = 1000  # whose addresses are remembered
KEEP_ADDRESSES = 60.0  # seconds
RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})
JOIN_UP_TO = 64 << 10  # bytes: smaller pieces are joined, since each block costs its receiver more than a copy
MAX_SIZE = (1 << 63) - 1
WINDOW = 8 << 10  # bytes of a compressed body of several members that zlib gets at once
MEMBERS, SHORT_MEMBER = 10_000, 128  # a server may send so many members of a gzip body that have fewer bytes than that
DRAIN = 64 << 10  # bytes of an unused body that are read so that its connection can be kept
_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)\Z", re.IGNORECASE)
_SIZE = re.compile(r"[0-9]{1,19}\Z")
_TIME_AND_SIZE = re.compile(r"-?[0-9]{1,12}-[0-9]{1,19}\Z")
_HOST = re.compile(r"[a-z0-9._~!$&'()*+,;=-]+|[0-9a-f:.]+|[0-9a-f.]*:[0-9a-f:.]*%[A-Za-z0-9._~-]+")
_ZONE = re.compile(r"%[^]]*(?=])")
_URL = re.compile(r"(\w+)://([^/?#]*)([^#]*)")
_TO_QUOTE = re.compile(r"[^A-Za-z0-9._~!$&'()*+,;=:@/?%-]+|%(?![0-9A-Fa-f]{2})")

Sign: TypeAlias = Callable[[str, str, Mapping[str, str]], tuple[str, Mapping[str, str]]]
"""(method, URL, headers) -> the URL to send the request to, and its headers. Called for every request, also after a
redirect; may turn a URL of another scheme into an HTTP one."""

ExplainRefusal: TypeAlias = Callable[[str, int, Mapping[str, str], bytes], Exception | None]
"""(URL, status, headers, beginning of the body) of a refusal -> the error to raise (`AttemptFailed`: after another
attempt; `SendAgain`: unless the request succeeds when it is signed again at once); None: as in plain HTTP."""

AmendHeaders: TypeAlias = Callable[[str, Mapping[str, str]], Mapping[str, str]]
"""(URL, headers of a response that is accepted) -> the headers as the protocol means them. The URL of such a protocol
always names the same bytes, so that the address to which it redirects serves all requests of a call."""


class SendAgain(errors.RemoteProtocolError):
    """A request would go elsewhere, or be signed in another way, if it was sent now."""


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


# -- sending -----------------------------------------------------------------------------------------------------------


class Sent(NamedTuple):
    """A request that was sent: to which address and endpoint, and for which user."""

    address: str
    endpoint: Endpoint
    user: str
    transfer: HttpTransfer


class Exchange:
    """Sends requests over kept connections. Callable from any thread; usable after a fork."""

    def __init__(
        self, options: RemoteOptions, sign: Sign | None = None, explain: ExplainRefusal | None = None, amend: AmendHeaders | None = None, *,
        raw: bool = False, bundle: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        self.options = options
        self._bundle = bundle
        self._sign, self._explain, self._amend, self._raw = sign, explain, amend, raw
        self._keeps_redirects = sign is None or amend is not None
        self._proxies: dict[Endpoint, str | None] = {}  # as the environment is at the first request to an endpoint
        self._addresses: dict[str, tuple[float, list[str]]] = {}
        """`TransferRequest.way` -> addresses, and the time until which they are believed."""
        self._defaults: dict[tuple[Endpoint, str, bool, bool], dict[str, str]] = {}

    def send(
        self, call: Call, method: str, url: str, headers: Mapping[str, str], *, ok: Container[int] = (200,), body: bytes | None = None,
        sent: Sent | None = None,
    ) -> Response:  # fmt: skip
        """The response, if its status is in ``ok``. Follows redirects; sends the user's credentials to no other scheme,
        host or port. ``sent``: this request, if `start` has sent it. Raises `RemoteError`, or `AttemptFailed` if another
        attempt may succeed."""
        first, known = None, call.redirects.get(url) if method == "GET" and sent is None else None
        if known is not None:  # the request for the URL itself is not sent, since it is known where that leads
            first = _parsed(call, url if self._sign is None else self._sign(method, url, {})[0])[:2]
        sent = sent or self.start(call, method, known or url, headers, body, first=first)
        is_redirected, may_repeat = False, True
        for _ in range(MAX_REDIRECTS):
            first = first or (sent.endpoint, sent.user)
            self._wait_for_head(call, sent.transfer)
            response = Response(sent.transfer, call, raw=self._raw)
            if sent.transfer.headers.cookies:
                call.keep_cookies(_place(sent.endpoint, _parsed(call, sent.address)[2]), sent.transfer.headers.cookies)
            if response.status in ok:
                if is_redirected and self._keeps_redirects:
                    call.redirects[url] = sent.address
                if self._amend is not None:
                    response.headers = self._amend(url, response.headers)
                if call.varies:
                    response.headers = with_header(response.headers, "Vary", "*")
                return response
            with response:
                if response.status in REDIRECTS and "Location" in response.headers:
                    response.drain()
                    call.varies = call.varies or is_negotiated(response.headers.get("Vary", ""))
                    target, is_redirected = self._redirect_target(call, sent.address, response.headers["Location"]), True
                else:
                    refusal = self._refusal(call, url, response)
                    if known is not None and isinstance(refusal, (errors.AccessDenied, errors.NotFound)):
                        call.redirects.pop(url, None)  # such as a signature that has expired
                        known = None
                    elif isinstance(refusal, SendAgain) and may_repeat:
                        may_repeat = False
                    else:
                        raise refusal
                    target, is_redirected, first = url, False, None
            if response.status == 303 and method != "HEAD":
                method, body = "GET", None
            sent = self.start(call, method, target, headers, body, first=first)
        last = f"last to {canonical(_place(sent.endpoint, _parsed(call, sent.address)[2]))}"
        message = (
            f"{call.url}: redirected more than {MAX_REDIRECTS} times, {last}: if that is a login, check the credentials for it in netrc"
        )
        raise errors.RemoteProtocolError(message, url=call.url)

    def start(
        self, call: Call, method: str, target: str, headers: Mapping[str, str], body: bytes | None = None, *,
        on_ready: Callable[[], None] | None = None, first: tuple[Endpoint, str] | None = None,
    ) -> Sent:  # fmt: skip
        """Send a request, without waiting for anything; `send` waits for its response. ``on_ready``: see `HttpTransfer`.
        ``first``: endpoint and user of the first request for the URL, if that redirects to ``target``. Raises
        `RemoteTimeout` for a host that did not respond recently, and `AttemptFailed` if this process can send nothing."""
        address, signed = (target, headers) if self._sign is None else self._sign(method, target, headers)
        endpoint, user, path = _parsed(call, address)
        first_endpoint, first_user = first or (endpoint, user)
        defaults: Mapping[str, str] = self._default_headers(
            endpoint, user or (first_user if endpoint == first_endpoint else ""), first_endpoint
        )
        if call.cookies is not None:
            defaults = call.cookies.added_to(defaults, _place(endpoint, path))
        options = self.options
        if endpoint not in self._proxies:
            self._proxies[endpoint] = _proxy_of(endpoint) if options.proxies else None
        proxy = self._proxies[endpoint]
        path = _quoted(path)
        request = TransferRequest(
            method, f"{endpoint.scheme}://{endpoint.name}", path, replaced(defaults, signed), body, proxy,
            connect_timeout=min(options.connect_timeout, call.check()), read_timeout=options.read_timeout, until=call.until,
            limits=call.limits, wait=call.wait, tls=self._tls(endpoint, first_endpoint),
        )  # fmt: skip
        call.check_host(way := request.way)
        call.count(requests=1)
        host, port = (endpoint.host, endpoint.port) if proxy is None else _address_of(proxy)
        until, addresses = self._addresses.get(way, (0.0, None))
        if until < time.monotonic():
            addresses = [] if _address(host) is not None else None
        transfer = loop.start(HttpTransfer(request, options.buffer, on_ready, addresses=addresses))
        if addresses is None:
            resolve = partial(self._resolve, transfer, host, port)
            if not DaemonThread(resolve, name="resolver").begin():
                resolve()  # nothing ends the resolver then
        return Sent(address, endpoint, user, transfer)

    def _tls(self, endpoint: Endpoint, first: Endpoint) -> Tls:
        if endpoint.scheme != "https":
            return NO_TLS
        bundle = None if self._bundle is None else self._bundle()
        files = str(self.options.client_cert or ""), str(self.options.client_key or "")
        return Tls(bundle, *files) if endpoint == first else Tls(bundle, is_withheld=bool(files[0]))

    def _wait_for_head(self, call: Call, transfer: HttpTransfer) -> None:
        """The end of the call ends the response too. Raises `AttemptFailed`, and `CallAborted` after the end of the call."""
        way = transfer.request.way
        try:
            call.on_abort(transfer.abort)
            transfer.wait_for_head()
        except BaseException as error:
            transfer.close()
            call.not_on_abort(transfer.abort)
            if isinstance(error, AttemptFailed) and error.trouble is not None:
                call.host_failed(way, transfer.started + transfer.queued, error.trouble)
            if isinstance(error, NotConnected):
                self._addresses.pop(way, None)
            raise
        call.host_answered(way)

    def _redirect_target(self, call: Call, url: str, location: str) -> str:
        try:
            target = urljoin(url, location)
            scheme, _ = endpoint_of(*urlsplit(target)[:2])[:2]
        except ValueError:
            raise errors.RemoteProtocolError(f"{call.url} redirects to a URL that is not HTTP", url=call.url) from None
        if scheme == "http" and urlsplit(url).scheme.lower() == "https" and not self.options.allow_downgrade:
            reason = f"{call.url} redirects to http://, where others can read and replace what is sent"
            raise errors.RemoteProtocolError(f"{reason}: to follow it, pass RemoteOptions(allow_downgrade=True)", url=call.url)
        return target

    def _default_headers(self, endpoint: Endpoint, user: str, first: Endpoint) -> dict[str, str]:
        """The headers of every request to an endpoint: ours and the user's; after a redirect to another endpoint than the first, only
        the credentials that netrc has for that host."""
        may_use_netrc = endpoint == first or _may_use_netrc(endpoint, first)
        key = (endpoint, user, endpoint == first, may_use_netrc)
        headers = self._defaults.get(key)
        if headers is None:
            if len(self._defaults) > 1000:
                self._defaults.clear()
            given = self.options.sent_headers if endpoint == first else {}
            own = OWN_HEADERS if self._sign else {"Host": endpoint.host_header, **OWN_HEADERS}  # a signature covers the host
            if self._sign is None and not any(name.lower() == "authorization" for name in given):
                own = own | self._credentials(endpoint, user, endpoint == first, may_use_netrc)
            headers = self._defaults[key] = replaced(own, given)
        return headers

    def _credentials(self, endpoint: Endpoint, user: str, is_first: bool, may_use_netrc: bool) -> dict[str, str]:
        if is_first and self.options.token:
            return {"Authorization": f"Bearer {self.options.token}"}
        if user:
            name, _, password = user.partition(":")
            return {"Authorization": basic_auth(unquote(name), unquote(password))}
        login = _netrc_login(endpoint.host) if self.options.netrc and may_use_netrc else None
        return {"Authorization": basic_auth(*login)} if login else {}

    def _refusal(self, call: Call, url: str, response: Response) -> Exception:
        body = response.drain()
        if response.status == 401:
            self._defaults.clear()  # the user may have written a netrc file by the next call
        explained = self._explain(url, response.status, response.headers, body) if self._explain else None
        if explained is None and response.status == 400 and b"SSL certificate" in body:  # nginx says so after the handshake
            reason = about_client_certificate(response.tls)
            return errors.AccessDenied(f"{call.url}: {reason}", url=call.url, status=400)
        if explained is None and response.status in (403, 409) and is_of_archive(body.decode(errors="replace")):
            return errors.Archived(f"{call.url}: {RESTORE}", url=call.url, status=response.status)
        return explained or error_for_status(call.url, response.status, response.reason, response.headers)

    def _resolve(self, transfer: HttpTransfer, host: str, port: int) -> None:
        """Tell a transfer the addresses of its host. Nothing can end a resolver: the loop ends a transfer that has waited
        for its whole time for connecting."""
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except Exception as error:  # noqa: BLE001 (passed to the thread that waits for the transfer, whatever it is)
            # a name server that gives no answer takes as long as a silent host; a refusal comes at once
            is_silent = getattr(error, "errno", None) == socket.EAI_AGAIN
            failed = AttemptFailed(NO_NAME, trouble=Trouble.SILENT if is_silent else Trouble.NO_NAME)
            failed.__cause__ = error
            transfer.fail(failed)
            return
        names = dict.fromkeys(str(info[4][0]) for info in found)
        addresses = [f"{host}:{port}:{f'[{name}]' if ':' in name else name}" for name in names]
        if len(self._addresses) >= MAX_NAMES:
            self._addresses.clear()
        self._addresses[transfer.request.way] = (time.monotonic() + KEEP_ADDRESSES, addresses)
        transfer.resolved(addresses)


# -- endpoints, proxies, credentials ------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _proxy_of(endpoint: Endpoint) -> str | None:
    proxies = urllib.request.getproxies_environment()
    if is_direct(endpoint.host, endpoint.port, os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""):
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
        raise errors.ConfigError(message)
    parts = urlsplit(proxy)
    user, at, _ = parts.netloc.rpartition("@")
    host, port = _address_of(proxy)
    return f"{kind}://{user}{at}{f'[{host}]' if ':' in host else host}:{port}"


def is_direct(host: str, port: int, no_proxy: str) -> bool:
    """Whether NO_PROXY names a host, as curl and requests read it: ``*`` alone, a name and those below it, an address, or a network such as
    ``10.0.0.0/8``. ``host:port`` names one port, as in requests."""
    if no_proxy == "*":
        return True
    address, host = _address(host.partition("%")[0]), host.rstrip(".")
    for entry in re.split(r"[,\s]+", no_proxy.lower()):
        name, only = entry, ""
        if entry.startswith("["):
            name, _, only = entry[1:].partition("]")
        elif entry.count(":") == 1:
            name, _, only = entry.partition(":")
        if only.removeprefix(":") not in ("", str(port)):
            continue
        name = name.strip(".")
        if _is_within(address, name) if address is not None else name and f".{host}".endswith(f".{name}"):
            return True
    return False


def _is_within(address: ipaddress.IPv4Address | ipaddress.IPv6Address, entry: str) -> bool:
    """Whether an address is ``entry``, or lies in that network. A prefix of no bits, or a mask, is none for curl and requests."""
    _, slash, bits = entry.partition("/")
    try:
        return (not slash or int(bits) > 0) and address in ipaddress.ip_network(entry, strict=False)
    except ValueError:
        return False


def _address_of(proxy: str) -> tuple[str, int]:
    """Host and port of a proxy's URL. Raises `ConfigError`."""
    try:
        parts = urlsplit(proxy)
        host, port = parts.hostname, parts.port or PROXY_PORTS.get(parts.scheme.lower())
    except ValueError:  # its text may quote the URL
        host, port = None, None
    if not host or not port:
        raise errors.ConfigError("the environment names a proxy without a host: write http://host:port")
    return host, port


def basic_auth(user: str, password: str) -> str:
    """The value of an ``Authorization`` header."""
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def _may_use_netrc(endpoint: Endpoint, first: Endpoint) -> bool:
    """Whether an endpoint that a redirect leads to may receive the credentials that netrc has for its host. netrc names hosts only: so
    not another port or scheme of the first host, and nothing goes unencrypted that an unencrypted request did not lead to."""
    usual_port = endpoint.port in (first.port, PORTS[endpoint.scheme])
    return endpoint.host != first.host and usual_port and (endpoint.scheme == "https" or first.scheme == "http")


def _parsed(call: Call, url: str) -> tuple[Endpoint, str, str]:
    """(endpoint, user info, path and query)"""
    parts = _URL.match(url)
    try:
        scheme, netloc, target = parts.groups() if parts else ("", "", "")
        endpoint = endpoint_of(scheme.lower(), netloc)
    except ValueError:  # its text may quote the URL
        raise errors.ConfigError(f"{call.url} names no host: write https://host/path", url=call.url) from None
    return endpoint, netloc.rpartition("@")[0], target if target.startswith("/") else f"/{target}"


def _place(endpoint: Endpoint, path: str) -> str:
    """A URL without a user, as cookies are kept for it."""
    return f"{endpoint.scheme}://{endpoint.name}{_quoted(path)}"


def _quoted(path: str) -> str:
    """A path and a query as they are sent: what stands in them already is not quoted again."""
    return _TO_QUOTE.sub(lambda match: quote(match[0], safe="", errors="surrogatepass"), path)


def _netrc_login(host: str) -> tuple[str, str] | None:
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        login = netrc.netrc(path).authenticators(host)
    except FileNotFoundError:
        return None
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:  # the text of a parse error may quote a password
        log.warning("%s cannot be used: %s", path, type(error).__name__)
        return None
    return (login[0], login[2] or "") if login and login[0] else None


# -- responses ---------------------------------------------------------------------------------------------------------


class Response:
    """``status``, ``headers``, and a body that is still to be read: ``length`` bytes as sent, None where the server does not state it. The
    response to HEAD has the length without the bytes. ``tls``: what its request was sent with.

    A context manager: at its end the connection is kept if the body was read to its end, else closed."""

    def __init__(self, transfer: HttpTransfer, call: Call, *, raw: bool = False) -> None:
        self.status, self.reason = transfer.status, transfer.reason
        self.headers: Mapping[str, str] = transfer.headers
        self._transfer, self.call, self.tls = transfer, call, transfer.request.tls
        self.length: int | None = None
        text = self.headers.get("Content-Length")
        if self.status in (204, 304):
            self.length = 0
        elif text is not None and "chunked" not in re.split(r"\s*,\s*", self.headers.get("Transfer-Encoding", "").strip().lower()):
            lengths = {each.strip() for each in text.split(",")}
            if len(lengths) > 1 or not _SIZE.match(length := lengths.pop()) or int(length) > MAX_SIZE:
                self.close()
                raise AttemptFailed(f"an answer of {text[:40]!r} bytes", errors.RemoteProtocolError, retryable=False)
            self.length = int(length)
        encoding = self.headers.get("Content-Encoding", "").strip().lower()
        self.encoding = "" if raw or encoding == "identity" else encoding

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def extend(self, until: float) -> None:
        """Give the body until then, by the monotonic clock, whatever the limit of the request was."""
        self._transfer.extend(until)

    def close(self) -> None:
        """Idempotent."""
        self._transfer.close()
        self.call.not_on_abort(self._transfer.abort)

    def blocks(self, limit: int | None = None, *, count: bool = True) -> Iterator[bytes]:
        """The body as sent, as it arrives; at most ``limit`` bytes. ``count``: add them to the call's received bytes.
        Raises `AttemptFailed` where it ends too early, after all bytes that arrived."""
        left, buffer = 1 << 62 if limit is None else limit, self.call.options.buffer
        while left > 0:
            self.call.check()
            block = self._transfer.read(min(left, buffer), JOIN_UP_TO)
            if not block:
                return
            if count:
                self.call.count(received=len(block))
            left -= len(block)
            yield block

    def wait_for(self, count: int) -> None:
        """Wait for the first ``count`` bytes of the body, which `blocks` then yields. Raises `AttemptFailed` if fewer arrive."""
        self.call.check()
        try:
            arrived = self._transfer.wait_for(count)
            if arrived < min(count, self.call.options.buffer):
                raise AttemptFailed(f"the connection was cut {(self.length or count) - arrived:,} bytes before the end")
        except AttemptFailed:
            self.call.count(received=self._transfer.waiting)
            raise

    def skip(self, count: int) -> None:
        """Read and drop ``count`` bytes, or all where there are fewer."""
        for _ in self.blocks(count):
            continue

    def decoded(self) -> Iterator[Buffer]:
        """The body as it was before the server compressed it."""
        if not self.encoding:
            yield from self.blocks()
        elif self.encoding in ("gzip", "x-gzip", "deflate"):
            yield from _inflated(self.blocks())
        else:
            reason = f"it is sent as {self.encoding!r}, though only identity was asked for"
            raise AttemptFailed(reason, errors.RemoteProtocolError, retryable=False)

    def drain(self) -> bytes:
        """The beginning of a body that holds nothing of the object; a short one is read to its end."""
        return b"".join(self.blocks(DRAIN, count=False))


def _inflated(blocks: Iterator[bytes]) -> Iterator[bytes]:
    inflate, received, members = zlib.decompressobj(wbits=47), 0, 0  # gzip or zlib, according to its header
    for block in blocks:
        view, at, received = memoryview(block), 0, received + len(block)
        while at < len(view):
            if inflate.eof:  # a gzip file may have several members
                inflate, members = zlib.decompressobj(wbits=47), members + 1
                if members > MEMBERS and received < members * SHORT_MEMBER:
                    reason = f"its compressed body consists of {members:,} members of less than {SHORT_MEMBER} bytes"
                    raise AttemptFailed(reason, errors.RemoteProtocolError, retryable=False)
            window = view[at : at + WINDOW] if members else view[at:]  # what zlib leaves of its input is copied, for each member
            try:
                piece = inflate.decompress(window, 1 << 20)
            except zlib.error as error:
                raise AttemptFailed(f"its compressed body is damaged: {error}", errors.RemoteProtocolError) from error
            at += len(window) - len(inflate.unconsumed_tail or inflate.unused_data)
            if piece:
                yield piece
    if not inflate.eof:
        raise AttemptFailed("its compressed body was cut")


def error_for_status(url: str, status: int, reason: str, headers: Mapping[str, str]) -> Exception:
    """The error that a refusing status means. ``url``: without secrets."""
    text = f"the server returned {status} {escaped(reason[:100])}".rstrip()
    if status in RETRY_STATUSES:
        return AttemptFailed(text, retry_after=retry_after(headers), status=status)
    if status in (401, 403):
        advice = "give credentials (netrc, token, headers)" if status == 401 else "check that these credentials may read it"
        return errors.AccessDenied(f"{url}: {text}: {advice}", url=url, status=status)
    if status in (404, 410):
        return errors.NotFound(f"{url}: {text}", url=url, status=status)
    if status < 400 or status in (412, 416):
        return errors.RemoteProtocolError(f"{url}: {text}, which does not match the request", url=url, status=status)
    return errors.RemoteError(f"{url}: {text}", url=url, status=status)


# -- headers -----------------------------------------------------------------------------------------------------------


class ContentRange(NamedTuple):
    """What a response 206 holds: ``span`` of an object of ``total`` bytes, None where the server does not state it."""

    span: Span
    total: int | None


def content_range(response: Response, requested: Span) -> ContentRange:
    """The beginning of ``requested``, or all of it. Raises `RemoteProtocolError` if the response holds something else."""
    text = response.headers.get("Content-Range", "no Content-Range")
    numbers = _RANGE.match(text.strip())
    if numbers is not None:
        start, end, total = int(numbers[1]), int(numbers[2]) + 1, None if numbers[3] == "*" else int(numbers[3])
        fits = start == requested.start and start < end <= min(requested.end, end if total is None else total) and (total or 0) <= MAX_SIZE
        if fits and response.length in (None, end - start):
            return ContentRange(Span(start, end - start), total)
    url = response.call.url
    raise errors.RemoteProtocolError(
        f"{url}: bytes {requested.start}-{requested.end - 1} asked for, {text[:80]!r} answered with {response.length} bytes",
        url=url,
        status=response.status,
    )


def info_of(url: str, headers: Mapping[str, str], size: int | None) -> ObjectInfo:
    """The object as the headers of a response describe it. ``size``: bytes of the whole object, as they will be stored."""
    modified = _timestamp(headers.get("Last-Modified"))
    etag, varies = headers.get("ETag", "").strip() or None, is_negotiated(headers.get("Vary", ""))
    if etag is None and modified is not None and size is not None and not varies:  # the other bytes may have the same time
        etag = f"{modified:.0f}-{size}"
    return ObjectInfo(url, size, etag, is_strong(etag) and size is not None, modified, varies=varies)


def is_same_validator(one: str | None, other: str | None) -> bool:
    """Weak comparison, as HTTP defines it for If-None-Match. A listing may have no quotes where a response has them."""
    return one is not None and other is not None and _tag(one) == _tag(other)


def _tag(validator: str) -> str:
    return validator.removeprefix("W/").strip('"')


def is_other_version(known: ObjectInfo, headers: Mapping[str, str], size: int | None) -> bool:
    """Whether a response is of another version than ``known``. A strong ETag has to be repeated; for other validators, a missing header
    means nothing: many servers omit it from responses to GET, or from ranges. ``size``: bytes of the whole object, if stated.

    Without two ETags to compare, time and size are compared, as far as both are known."""
    etag, modified, validator = headers.get("ETag", "").strip(), _timestamp(headers.get("Last-Modified")), known.validator
    if validator is not None and is_same_validator(etag, validator):
        return False
    if validator is not None and not is_etag(validator):
        seconds, _, length = validator.rpartition("-")
        return (modified is not None and f"{modified:.0f}" != seconds) or (size is not None and str(size) != length)
    if validator is not None and (etag or is_strong(validator)):
        return True
    return any(None not in (one, other) and one != other for one, other in ((modified, known.modified), (size, known.size)))


def ends_before(known: ObjectInfo, headers: Mapping[str, str], span: Span) -> bool:
    """Whether a response 416 means that the version ``known`` ends before ``span``, and not that another, shorter one does."""
    etag, validator = headers.get("ETag", "").strip(), known.validator or ""
    if etag and (is_etag(validator) or is_same_validator(etag, validator)):
        return is_same_validator(etag, validator)
    if is_strong(validator):
        return True  # the request had an If-Match header
    size = validator.rpartition("-")[2] if not is_etag(validator) else "" if known.size is None else str(known.size)
    return not is_other_version(known, headers, None) and size.isdecimal() and int(size) <= span.start


def is_shorter(headers: Mapping[str, str], span: Span) -> bool:
    """Whether a response 416 says that the object ends before ``span``."""
    size = headers.get("Content-Range", "").rpartition("*/")[2].strip()
    return size.isdecimal() and int(size) <= span.start


def is_etag(validator: str) -> bool:
    """Whether a validator is an ETag, with its quotes or, as some servers send it, without. One like ``mtime-size`` is taken for that: it
    stands for the same version as long as it is repeated."""
    return _TIME_AND_SIZE.match(validator) is None


def is_strong(validator: str | None) -> bool:
    """Whether a validator is an ETag by which ranges may be joined, and which servers compare as HTTP defines it."""
    return validator is not None and len(validator) > 1 and validator[0] == validator[-1] == '"'


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from now; the header gives seconds or a date."""
    text = headers.get("Retry-After", "").strip()
    if _SIZE.match(text):
        return float(text)
    moment = _timestamp(text)
    return None if moment is None else max(0.0, moment - time.time())


@lru_cache(maxsize=1024)
def _timestamp(date: str | None) -> float | None:
    if not date:
        return None
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
