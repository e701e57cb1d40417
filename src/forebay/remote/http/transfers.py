"""One HTTP request and its response: what is asked, what comes back by one of libcurl's easy handles, and what each
failure means."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import pycurl

from forebay._kernel import interrupts
from forebay._kernel.waits import SharedLimit
from forebay.errors import AccessDenied, RemoteProtocolError, RemoteTimeout, RemoteUnavailable
from forebay.remote.base import UNREACHABLE, AttemptFailed, CallAborted, Limits, Permit, Trouble, wake_now
from forebay.remote.urls import canonical

MAX_HEAD = 256 << 10  # bytes of the headers of one response
BUFFER = 256 << 10  # bytes read from a socket at once; a receiver gets them in pieces of at most 16 KiB
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_TARGET = re.compile(r"/[!-~]*|\*")
_STATUS = re.compile(rb"HTTP/[0-9.]+ +([0-9]{3})(?: +([^\r\n]*))?")
# Constants of libcurl for which PycURL has no name.
_SUPPRESS_CONNECT_HEADERS, _E_WEIRD_SERVER_REPLY, _E_PROXY, _E_TOO_LARGE = 265, 8, 97, 100
_E_SSL_CERTPROBLEM = 58
_STOP = -1  # what a callback returns to end its transfer
LAST_MOMENT = 0.2  # seconds
MAX_SUSPECTS = 1000
_NOBODY = 1 << 62  # bytes that no thread waits for: to notify none takes as long as to take a piece


class Headers(Mapping[str, str]):
    """The headers of a response, looked up in any case; the values of a repeated one are joined by commas."""

    def __init__(self, lines: Sequence[bytes] = ()) -> None:
        self._values: dict[str, tuple[str, str]] = {}  # name in lower case -> name as sent, value
        last = ""
        for line in lines:
            text = line.decode("latin-1")
            if text[0] in " \t" and last:  # an obsolete continuation
                self._values[last] = (self._values[last][0], f"{self._values[last][1]} {text.strip()}")
                continue
            name, _, value = text.partition(":")
            name, value = name.strip(), value.strip()
            last = name.lower()
            if last in self._values:
                name, value = self._values[last][0], f"{self._values[last][1]}, {value}"
            self._values[last] = (name, value)

        self.cookies = [line[11:].decode("latin-1").strip() for line in lines if line[:11].lower() == b"set-cookie:"]
        """The values of all ``Set-Cookie`` headers: joined, they could not be told apart."""

    def __getitem__(self, name: str) -> str:
        return self._values[name.lower()][1]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self._values

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self._values.values())

    def __len__(self) -> int:
        return len(self._values)


def with_header(headers: Mapping[str, str], name: str, value: str) -> Headers:
    """The headers with this value in place of their own."""
    others = [f"{each}: {text}".encode("latin-1") for each, text in headers.items() if each.lower() != name.lower()]
    return Headers([*others, f"{name}: {value}".encode("latin-1")])


class Tls(NamedTuple):
    """The files of a TLS connection. ``bundle``: the certificates that AWS's settings trust, "" if they name none, None where those do not
    apply. ``client_cert``, ``client_key``: what to show to a server that asks, the key possibly in the former. ``is_withheld``: the user
    named a certificate, but not for this server, to which a redirect led."""

    bundle: str | None = None
    client_cert: str = ""
    client_key: str = ""
    is_withheld: bool = False


NO_TLS = Tls()


class TransferRequest(NamedTuple):
    """One request. ``origin``: ``https://host:port``; ``target``: path and query, sent as they are. ``proxy``: a URL, which
    may contain a user and a password; None: no proxy, whatever the environment says.

    ``connect_timeout``: seconds for resolving the name, connecting and TLS. ``read_timeout``: seconds for the whole head of
    the response, then for each wait within the body; a wait of the receiver does not count. ``until``: the deadline by the
    monotonic clock. ``limits``: what the transfer has to stay within; waiting for that counts for the deadline, and
    ``wait``, only."""

    method: str
    origin: str
    target: str
    headers: Mapping[str, str]
    body: bytes | None = None
    proxy: str | None = None
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    until: float | None = None
    limits: Limits | None = None
    wait: SharedLimit | None = None
    tls: Tls = NO_TLS

    @property
    def is_relayed(self) -> bool:
        """Whether a proxy is given the whole URL: not through a tunnel, and not by SOCKS."""
        return self.proxy is not None and self.origin.startswith("http:") and self.proxy.startswith("http")

    @property
    def way(self) -> str:
        """What its silence is remembered by, without secrets: a host that is silent behind a proxy may answer without it."""
        return self.origin if self.proxy is None else f"{self.origin} by {canonical(self.proxy)}"

    @property
    def peer(self) -> str:
        """What its connection leads to, without secrets: the server, or a proxy that relays to any number of servers."""
        return self.proxy.rpartition("@")[2] if self.proxy is not None and self.is_relayed else self.origin


_NOTHING = TransferRequest("GET", "", "", {})


class HttpTransfer:
    """One request and its response: the head first, then the body piece by piece. `loop.start` sends it.

    One thread reads; any thread may `close` or `abort`. Unless all of the body is read, `close` has to be called. In a
    forked child of the process that started it, `close` and `abort` do nothing, and nothing can be read.

    ``limit``: bytes of the body to hold before the transfer pauses. ``on_ready`` is called once, by the thread of the
    loop, when the transfer has ended or holds all that it may: it must not wait for anything. ``addresses``: those that
    the name of the host, or of its proxy, stands for, as ``host:port:address``; empty: libcurl resolves the name; None:
    they are not known yet, and `resolved` or `fail` will be called."""

    def __init__(
        self, request: TransferRequest, limit: int = 1 << 20, on_ready: Callable[[], None] | None = None, *,
        addresses: Sequence[str] | None = (),
    ) -> None:  # fmt: skip
        self.request = request
        self.addresses = None if addresses is None else list(addresses)
        self.status, self.reason, self.headers = 0, "", Headers()
        self.started = time.monotonic()
        self._limit, self._wanted, self._size = limit, _NOBODY, 0
        self._pieces: deque[bytes] = deque()
        self._refused = self._has_head = self._ended = False
        self._error: Exception | None = None
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards all of the above; a thread that is not in a forked child may hold it
        self._changed = threading.Condition(self._lock)
        self._pid = os.getpid()
        # set by any thread; the loop looks at them when it attends to the transfer
        self.attend: Callable[[HttpTransfer], None]
        self.drive: Callable[[], None] | None = None
        """What a thread calls that waits, where the loop has no thread of its own."""
        self.ended_by: Exception | None = None
        self.head_until: float | None = None
        self.body_until: float | None = None
        # in the thread of the loop only
        self.is_limited = self.is_done = False
        self.submitted = 0.0  # when its addresses were known
        self.queued = 0.0
        """Seconds for which it waited for a connection that the limits of the node allow."""
        self.connect_until: float | None = None
        self.not_connected: NotConnected | None = None
        self.handle: CurlHandle | None = None
        self.permit: Permit | None = None

    # -- called by the loop --------------------------------------------------------------------------------------------
    # They must not wait for anything, since all other transfers would wait too. An error that `head` or `data` raises
    # ends the transfer, and is passed to `end`.

    def head(self, status: int, reason: str, headers: Headers) -> None:
        """The status line and the headers are complete."""
        with self._lock:
            self.status, self.reason, self.headers, self._has_head = status, reason, headers, True
            self._changed.notify()

    def data(self, piece: bytes) -> bool:
        """The next bytes of the body, as sent. False: not now; the transfer pauses until `CurlHandle.resume`, which offers them
        again."""
        with self._lock:
            if self._ended:
                raise CallAborted
            self._refused = self._size >= self._limit
            if not self._refused:
                self._pieces.append(piece)
                self._size += len(piece)
                if self._size >= self._wanted:
                    self._changed.notify()
                return True
        self._report()
        return False

    def end(self, error: Exception | None) -> None:
        """Called once, last. None: the response is complete. `AttemptFailed`: it is not, and why; `CallAborted`: it was
        cancelled."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify()
        self._report()

    def _report(self) -> None:
        on_ready, self._on_ready = self._on_ready, None
        if on_ready is not None:
            on_ready()

    # -- called by any other thread ------------------------------------------------------------------------------------

    def resolved(self, addresses: Sequence[str]) -> None:
        """Connect to one of these addresses."""
        self.addresses = list(addresses)
        self.attend(self)

    def fail(self, error: Exception) -> None:
        """End it with this error, unless it has ended: its connection is closed. Returns at once."""
        self.ended_by = error
        self.attend(self)

    def wait_for_head(self) -> None:
        """Raises `AttemptFailed` where none comes, and `CallAborted` after `close`."""
        self._wait(0)
        if not self._has_head and self._error is not None:
            raise self._error

    @property
    def is_reporting(self) -> bool:
        """Whether ``on_ready`` is yet to be called."""
        return self._on_ready is not None

    @property
    def is_complete(self) -> bool:
        """Whether the whole response has come, and no error."""
        with self._lock:
            return self._ended and self._error is None

    @property
    def waiting(self) -> int:
        """How many bytes of the body may be read at once."""
        with self._lock:
            return self._size

    def wait_for(self, size: int) -> int:
        """Wait until ``size`` bytes of the body may be read at once, or as many as this holds, or the body has ended:
        how many may be read then. Raises `AttemptFailed` where it is cut before, and `CallAborted` after `close`."""
        wanted = min(size, self._limit)
        self._wait(wanted)
        with self._lock:
            if self._size < wanted and self._error is not None:
                raise self._error
            return self._size

    def _wait(self, wanted: int) -> None:
        """Wait until the head is complete and ``wanted`` bytes of the body may be read, or until the response has ended."""
        if self._pid != os.getpid():  # the lock may be held by a thread of the parent
            raise AttemptFailed("its response comes to the parent process")
        while True:
            with self._lock:
                if self._ended or (self._has_head and self._size >= wanted):
                    self._wanted = _NOBODY
                    return
                self._wanted = wanted
                wake_now()
                if self.drive is None:
                    self._changed.wait(interrupts.TURN)
            if self.drive is not None:
                self.drive()
            interrupts.point()  # without the lock: the loop takes it, and a handler may need another transfer

    def read(self, size: int, at_least: int = 1) -> bytes:
        """At most ``size`` bytes of the body; waits for ``at_least`` so many, or for its end. Empty: the body has ended.
        Raises `AttemptFailed` where it is cut, after all bytes that came, and `CallAborted` after `close`."""
        self._wait(min(at_least, size, self._limit))
        with self._lock:
            if self._ended and self._error is not None and not self._size:
                raise self._error
            pieces, count = [], 0
            if self._size <= size:
                pieces, count = list(self._pieces), self._size
                self._pieces.clear()
            while self._pieces and count + len(self._pieces[0]) <= size:
                pieces.append(self._pieces.popleft())
                count += len(pieces[-1])
            if self._pieces and count < size:
                rest, self._pieces[0] = self._pieces[0][: size - count], self._pieces[0][size - count :]
                pieces.append(rest)
                count += len(rest)
            self._size -= count
            resume, self._refused = self._refused, False
        if resume:
            self.attend(self)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """End the transfer, and what waits for it in another thread. Its connection is closed unless its response is
        complete. Idempotent; returns at once."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, CallAborted()
            self._pieces.clear()
            self._size = 0
            self._changed.notify_all()
        self.fail(CallAborted())

    def extend(self, until: float) -> None:
        """Once the head is there: give the body this time, in place of that of the request."""
        self.body_until = until
        self.attend(self)

    def abort(self) -> None:
        """As `close`; but a head that is due gets a moment to come, so that the server's work on it and the connection
        are not wasted."""
        if self._pid != os.getpid():
            return
        with self._lock:
            has_head = self._has_head
        if has_head:
            self.close()
        else:
            self.head_until = time.monotonic() + LAST_MOMENT
            self.attend(self)


class CurlHandle:
    """One easy handle of libcurl, for one transfer after another. All of it belongs to the thread of the loop.

    ``began``, ``heard``: when the transfer began, and when it last made progress, by the monotonic clock. ``until``: its
    deadline. ``error``: what ends it, if that is not libcurl's error. ``limits``: of the request, while they limit the
    rate. ``throttled``: whether it is paused for that. ``sockets``, ``peers``: descriptor -> inode, and
    `TransferRequest.peer`, of each socket of libcurl. ``suspects``: the servers that cut a TLS connection before they answered:
    the next one is watched, since only its handshake tells whether they asked for a client certificate. ``throttle``: called when
    the rate allows no more for now; resumes the transfer when it does."""

    until: float | None
    error: Exception | None
    limits: Limits | None

    def __init__(
        self, sockets: dict[int, int], peers: dict[int, str], suspects: set[str], throttle: Callable[[CurlHandle], None]
    ) -> None:  # fmt: skip
        self.curl = pycurl.Curl()
        self._sockets, self._peers, self._suspects, self._throttle = sockets, peers, suspects, throttle
        self._lines: list[bytes] = []
        self._size = 0
        self.request = _NOTHING
        self._set_basics()

    def _set_basics(self) -> None:
        curl = self.curl
        for option, value in _BASICS:
            curl.setopt(option, value)
        curl.setopt(pycurl.HEADERFUNCTION, self._head_line)
        curl.setopt(pycurl.WRITEFUNCTION, self._data)
        curl.setopt(pycurl.SOCKOPTFUNCTION, self._note_socket)
        self._is_basic = True
        self.transfer: HttpTransfer | None = None

    def prepare(self, transfer: HttpTransfer, address: str | None, connect_timeout: float) -> None:
        """Set all that the request wants. ``address``: one of `HttpTransfer.addresses`; None: libcurl resolves the name. Raises
        `ValueError` or `pycurl.error` if it cannot be sent."""
        request = self.request = transfer.request
        self.transfer, curl, proxy = transfer, self.curl, request.proxy or ""
        self.began = self.heard = time.monotonic()
        self.until, self.error = request.until, None
        self.connected = self.answered = self.has_head = self.paused = self.throttled = self._was_asked = False
        self.look_at_rate()
        self._size = self._sent = 0
        self._lines.clear()
        if not _TARGET.fullmatch(request.target):
            raise ValueError("a target that cannot be sent")
        curl.setopt(pycurl.URL, f"{request.origin}/")
        curl.setopt(pycurl.REQUEST_TARGET, request.origin + request.target if request.is_relayed else request.target)
        curl.setopt(pycurl.CONNECTTIMEOUT_MS, max(1, int(connect_timeout * 1000)))
        curl.setopt(pycurl.PROXY, proxy)  # "": none, not that of the environment
        if request.origin.startswith("https:"):
            self._secure()
        if proxy.startswith("https:"):
            _trust(curl, _trusted(None), pycurl.PROXY_CAINFO, pycurl.PROXY_CAPATH)
        curl.setopt(pycurl.HTTPHEADER, _header_lines(tuple(request.headers.items())))
        if address is not None:
            self._is_basic = False
            curl.setopt(pycurl.RESOLVE, [f"+{address}"])
        if request.method == "HEAD":
            self._is_basic = False
            curl.setopt(pycurl.NOBODY, 1)
        elif request.method != "GET" or request.body is not None:
            self._is_basic = False
            if request.body is not None or request.method in ("POST", "PUT"):  # whose length is stated even if there is no body
                curl.setopt(pycurl.POSTFIELDS, request.body or b"")
            curl.setopt(pycurl.CUSTOMREQUEST, request.method)

    def _secure(self) -> None:
        """Set what a TLS connection to the server needs."""
        curl, tls = self.curl, self.request.tls
        _trust(curl, _trusted(tls.bundle), pycurl.CAINFO, pycurl.CAPATH)
        if tls.bundle or tls.client_cert:
            self._is_basic = False
        if tls.client_cert:
            curl.setopt(pycurl.SSLCERT, tls.client_cert)
            curl.setopt(pycurl.SSLKEY, tls.client_key or tls.client_cert)
            curl.setopt(pycurl.KEYPASSWD, "")  # else OpenSSL asks on the terminal for the password of a key that has one
        if self.request.origin in self._suspects:
            self._is_basic = False
            curl.setopt(pycurl.DEBUGFUNCTION, self._note_handshake)
            curl.setopt(pycurl.VERBOSE, 1)
            curl.setopt(pycurl.SSL_SESSIONID_CACHE, 0)  # when a session is resumed, nobody is asked again

    def _note_handshake(self, kind: int, text: bytes) -> None:
        if kind == pycurl.INFOTYPE_TEXT and b"Request CERT" in text:
            self._was_asked = True

    def look_at_rate(self) -> None:
        """Notice that the rate is limited now, or no longer."""
        limits = self.request.limits
        self.limits = limits if limits is not None and limits.in_force()[0] else None

    def release(self) -> None:
        """After a transfer: keep nothing of it."""
        self.request, self.transfer, self.limits, self.error = _NOTHING, None, None, None
        if not self._is_basic:
            self.curl.reset()
            self._set_basics()

    def failure(self, code: int, text: str) -> Exception | None:
        """Why the transfer that libcurl has ended failed, in our words: libcurl's text may name the whole URL, secrets included. None: its
        response is complete."""
        if self.error is not None or (code == 0 and self.has_head):
            return self.error
        if code == 0:
            return AttemptFailed("an answer that is not HTTP", RemoteProtocolError)
        curl, proxied, silence = self.curl, self.request.proxy is not None, None if self.answered else Trouble.SILENT
        number = curl.getinfo(pycurl.OS_ERRNO)
        reason = f"the connection failed: {os.strerror(number) if number else f'CURLE {code}'}"
        if (refused := self._certificate_failure(code, text)) is not None:
            return refused
        if code == pycurl.E_URL_MALFORMAT:
            return AttemptFailed("a host that cannot be", retryable=False)
        if code == pycurl.E_COULDNT_RESOLVE_PROXY:
            return AttemptFailed(_NO_PROXY, trouble=Trouble.NO_NAME)
        if code == pycurl.E_COULDNT_RESOLVE_HOST:
            return AttemptFailed(NO_NAME, trouble=Trouble.NO_NAME)
        if code == pycurl.E_OPERATION_TIMEDOUT:
            if curl.getinfo(pycurl.CONNECT_TIME):
                return AttemptFailed(SILENCE, RemoteTimeout, trouble=silence)
            return NotConnected(_NO_PROXY if proxied else SILENCE, RemoteTimeout, trouble=silence)
        if proxied and not self.has_head and (status := int(curl.getinfo(pycurl.HTTP_CONNECTCODE))) >= 300:
            return AttemptFailed(f"its proxy answers {status}", retryable=status >= 500)
        answer = int(curl.getinfo(pycurl.PROXY_ERROR)) if code == _E_PROXY else 0
        if answer in _REFUSED_BY_SOCKS:
            return AttemptFailed(_REFUSED_BY_SOCKS[answer], retryable=answer not in _FOR_GOOD)
        if code in (pycurl.E_COULDNT_CONNECT, _E_PROXY):
            trouble = Trouble.NO_ROUTE if number in UNREACHABLE else Trouble.REFUSED if number == errno.ECONNREFUSED else None
            return NotConnected(_NO_PROXY if proxied else reason, trouble=trouble)
        if code in (pycurl.E_SSL_CONNECT_ERROR, pycurl.E_SSL_CIPHER):
            return AttemptFailed("TLS failed")
        if code == pycurl.E_PARTIAL_FILE:
            match = _MISSING.search(text)
            return AttemptFailed(_CUT + (f" {int(match[1]):,} bytes before the end" if match else ""))
        if code in (pycurl.E_GOT_NOTHING, pycurl.E_RECV_ERROR, pycurl.E_SEND_ERROR):
            return AttemptFailed(_CUT)
        if code in (pycurl.E_UNSUPPORTED_PROTOCOL, _E_WEIRD_SERVER_REPLY, pycurl.E_BAD_CONTENT_ENCODING, _E_TOO_LARGE):
            return AttemptFailed("an answer that is not HTTP", RemoteProtocolError)
        return AttemptFailed(reason)

    def _certificate_failure(self, code: int, text: str) -> AttemptFailed | None:
        """What is wrong with a certificate, the server's or the client's; None: another thing is."""
        if code == pycurl.E_PEER_FAILED_VERIFICATION:
            match = _CERTIFICATE.search(text)
            if match is None and "subject name" in text:
                return AttemptFailed("its certificate is not trusted: it is for another host", retryable=False)
            why = match[1] if match else "it cannot be verified"
            return AttemptFailed(f"its certificate is not trusted: {why}{self._advice()}", retryable=False)
        if code == pycurl.E_SSL_CACERT_BADFILE:
            return AttemptFailed(f"the file of trusted certificates cannot be read{self._advice()}", retryable=False)
        if code == _E_SSL_CERTPROBLEM or (code == pycurl.E_BAD_FUNCTION_ARGUMENT and "private key" in text):
            return AttemptFailed(_own_certificate(self.request.tls), retryable=False)
        if self.request.origin.startswith("https:") and not self.answered and code in _CUT_CODES:
            if len(self._suspects) >= MAX_SUSPECTS:
                self._suspects.clear()
            self._suspects.add(self.request.origin)
            is_refused = _ASKS_FOR_CERTIFICATE.search(text) is not None or (self._was_asked and "alert" in text)
            if is_refused or self._was_asked:
                error = AccessDenied if is_refused else RemoteUnavailable
                return AttemptFailed(about_client_certificate(self.request.tls, is_refused=is_refused), error, retryable=not is_refused)
        return None

    def _advice(self) -> str:
        """Which settings name the certificates that are trusted, and which of them does."""
        bundle = self.request.tls.bundle
        setting = _trusted(bundle).setting
        used = f" (trusted are those of {setting})" if setting else ""
        of_aws = "" if bundle is None else "AWS_CA_BUNDLE, ca_bundle of the AWS profile, "
        names = f"{of_aws}{', '.join(_BUNDLES)} or SSL_CERT_FILE"
        return f"{used}: name a file with the certificate of its authority in {names}; the first that is set counts"

    def due(self, now: float) -> float:
        """When the transfer fails unless it makes progress; not before then, this has to be asked again. libcurl counts whole seconds, and
        a head that comes byte by byte as progress."""
        request, limit = self.request, now + self.request.read_timeout
        if not self.has_head:
            if not self.connected:
                seconds = self.curl.getinfo(pycurl.PRETRANSFER_TIME)
                self.connected = seconds > 0
                self.heard = min(now, self.began + seconds)
            if request.body is not None and (sent := int(self.curl.getinfo(pycurl.SIZE_UPLOAD_T))) > self._sent:
                self._sent, self.heard = sent, now
        if not self.connected:  # libcurl has the limit of connecting
            limit = now + min(1.0, request.read_timeout, request.connect_timeout)
        elif not self.paused:
            limit = self.heard + request.read_timeout
        return limit if self.until is None else min(limit, self.until)

    def _note_socket(self, descriptor: int, purpose: int) -> int:
        self._sockets[descriptor], self._peers[descriptor] = os.fstat(descriptor).st_ino, self.request.peer
        return int(pycurl.SOCKOPT_OK)

    def _head_line(self, line: bytes) -> int | None:
        if self.transfer is None:
            return _STOP
        if self.has_head:  # a trailer
            return None
        self.connected = self.answered = True
        self._size += len(line)
        if self._size > MAX_HEAD:
            self.error = AttemptFailed("headers of more than a response may have", RemoteProtocolError)
            return _STOP
        if line not in (b"\r\n", b"\n"):
            self._lines.append(line)
            return None
        first, *rest = self._lines or [b""]
        self._lines.clear()
        match = _STATUS.match(first)
        status = int(match[1]) if match else 0
        if match is None or 100 <= status < 200:  # an interim response: the final one follows
            return None
        self.has_head, self.heard = True, time.monotonic()
        self._suspects.discard(self.request.origin)
        try:
            self.transfer.head(status, (match[2] or b"").decode("latin-1").strip(), Headers(rest))
        except Exception as error:  # noqa: BLE001 (passed to the transfer's end)
            self.error = error
            return _STOP
        return None

    def _data(self, piece: bytes) -> int | None:
        if self.transfer is None:
            return _STOP
        self.heard = time.monotonic()
        if self.limits is not None and self.limits.delay() > 0:
            self.paused = self.throttled = True
            self._throttle(self)
            return int(pycurl.WRITEFUNC_PAUSE)
        try:
            taken = self.transfer.data(piece)
        except Exception as error:  # noqa: BLE001 (passed to the transfer's end)
            self.error = error
            return _STOP
        if taken:
            if self.limits is not None:
                self.limits.count(len(piece))
            return None
        self.paused = True
        return int(pycurl.WRITEFUNC_PAUSE)

    def resume(self) -> None:
        """Offer the transfer again what it refused, unless the transfer is throttled."""
        if self.paused and not self.throttled:
            self.paused, self.heard = False, time.monotonic()
            self.curl.pause(pycurl.PAUSE_CONT)


_UNWANTED = {name: b"%s:" % name.encode() for name in ("accept", "expect", "content-type", "user-agent", "accept-encoding")}
"""Headers that libcurl would add by itself."""
_BASICS: tuple[tuple[int, int | str], ...] = (
    (pycurl.NOSIGNAL, 1),
    (pycurl.PATH_AS_IS, 1),
    (pycurl.HTTP_VERSION, pycurl.CURL_HTTP_VERSION_1_1),
    (pycurl.BUFFERSIZE, BUFFER),
    (_SUPPRESS_CONNECT_HEADERS, 1),
    (pycurl.SSLVERSION, pycurl.SSLVERSION_TLSv1_2),
    (pycurl.NOPROXY, ""),  # whether a request goes through a proxy is decided before
    (pycurl.TCP_KEEPALIVE, 1),
)


@lru_cache(maxsize=64)
def _header_lines(headers: tuple[tuple[str, str], ...]) -> list[bytes]:
    """Those of many requests are the same. Raises `ValueError`, as `_header_line`."""
    given = {name.lower() for name, _ in headers}
    lines = [_header_line(name, value) for name, value in headers]
    return lines + [line for name, line in _UNWANTED.items() if name not in given]


def _header_line(name: str, value: str) -> bytes:
    """As libcurl wants it. Raises `ValueError` for a header that would begin another one."""
    if not _NAME.fullmatch(name) or any(each in value for each in "\r\n\0"):
        raise ValueError("a header that cannot be sent")
    return f"{name}: {value}".encode("latin-1") if value.strip() else f"{name};".encode("latin-1")


class Trust(NamedTuple):
    """The certificates that are trusted: a file, or a directory, or both. ``setting``: what names them, with its value; "": nothing does,
    and they are Python's."""

    file: str | None
    folder: str | None
    setting: str = ""


def _trust(curl: pycurl.Curl, trust: Trust, file_option: int, folder_option: int) -> None:
    """Set whom to trust. libcurl's own default is that of the machine where it was built."""
    for option, path in ((file_option, trust.file), (folder_option, trust.folder)):
        if path:
            curl.setopt(option, path)
        elif trust.file or trust.folder:
            curl.unsetopt(option)


def _trusted(bundle: str | None) -> Trust:
    """``bundle``: that of AWS's settings, which precedes those for all hosts, as it does in botocore."""
    environ = os.environ.get
    return _trusted_by(bundle or "", *(environ(name) or "" for name in (*_BUNDLES, "SSL_CERT_FILE", "SSL_CERT_DIR")))


@lru_cache(maxsize=64)
def _trusted_by(aws: str, requests: str, curl: str, file: str, folder: str) -> Trust:
    for bundle, name in ((aws, "AWS_CA_BUNDLE or ca_bundle"), *zip((requests, curl), _BUNDLES, strict=True)):
        if bundle:  # a directory has its certificates under their hashes, as requests expects too
            is_folder = os.path.isdir(bundle)
            return Trust(None if is_folder else bundle, bundle if is_folder else None, f"{name}={bundle}")
    named = [f"{name}={path}" for name, path in (("SSL_CERT_FILE", file), ("SSL_CERT_DIR", folder)) if path]
    found_file, found_folder = _default_trust(file or None, folder or None)
    return Trust(found_file, found_folder, " and ".join(named))


@lru_cache(maxsize=16)
def _default_trust(file: str | None, folder: str | None) -> tuple[str | None, str | None]:
    """The file and the directory of certificates that Python trusts, which these variables may replace."""
    import ssl

    paths = ssl.get_default_verify_paths()
    return paths.cafile, paths.capath


# -- errors ------------------------------------------------------------------------------------------------------------

_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_CUT_CODES = frozenset({pycurl.E_SSL_CONNECT_ERROR, pycurl.E_GOT_NOTHING, pycurl.E_RECV_ERROR, pycurl.E_SEND_ERROR})
"""What a connection ends with if its server refuses the client: TLS 1.3 says so after the handshake, and the alert may be lost."""
_ASKS_FOR_CERTIFICATE = re.compile(r"alert (?:unknown ca|(?:bad|unsupported) certificate|certificate (?:required|expired|revoked|unknown))")
_CERTIFICATE = re.compile(r"SSL certificate [^:]*: (.*?)(?: \(\d+\))?\Z")
_MISSING = re.compile(r"(\d+) bytes (?:remaining|missing)")


def about_client_certificate(tls: Tls, *, is_refused: bool = True) -> str:
    """What is wrong with the client certificate, or without one. ``is_refused``: the server said so; it did not just cut the connection."""
    what = "" if is_refused else f"{_CUT}, and "
    if tls.client_cert:
        return f"{what}the server {'does' if is_refused else 'may'} not accept the client certificate in {tls.client_cert}"
    todo = "none is shown after a redirect to another server" if tls.is_withheld else _NAME_ONE
    return f"{what}the server asks for a client certificate: {todo}"


def _own_certificate(tls: Tls) -> str:
    keys = f"its key in {tls.client_key}" if tls.client_key else "its key, which must be in the same file"
    return (
        f"the client certificate in {tls.client_cert}, or {keys}, cannot be used: both are PEM files, belong together, and have no password"
    )


_NAME_ONE = "name one with RemoteOptions(client_cert=, client_key=), or FOREBAY_CLIENT_CERT and FOREBAY_CLIENT_KEY"


class NotConnected(AttemptFailed):
    """No connection to the server, or to its proxy, came about: another address may be tried."""


# libcurl's CURLproxycode of a proxy that was reached, but does not connect
_FOR_GOOD = frozenset({12, 23, 33})
_REFUSED_BY_SOCKS = dict.fromkeys((12, 33), "its proxy accepts no such user and password") | {
    19: "its proxy cannot connect to it: it refuses",
    20: "its proxy cannot connect to it",
    21: "its proxy cannot connect to it: it cannot be reached",
    22: "its proxy cannot connect to it: its network cannot be reached",
    23: "its proxy may not connect to it",
    24: "its proxy cannot connect to it: it is too far away",
    26: "its proxy cannot connect to it",
    27: "its host name cannot be resolved",
}
SILENCE, _CUT = "nothing came for too long", "the connection was cut"
_NO_PROXY, NO_NAME = "its proxy cannot be reached", "its host name cannot be resolved"
