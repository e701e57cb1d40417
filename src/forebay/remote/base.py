"""What all remotes share: options, the life of one call, retries, and the one edge where foreign errors become ours."""

from __future__ import annotations

import logging
import math
import os
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

from forebay import errors
from forebay._logs import logger
from forebay._model import Transfer
from forebay.remote.urls import canonical

log = logger("forebay.remote")
T = TypeVar("T")

CHECK_TIMEOUT = 10.0
MAX_PAUSE = 10.0
MAX_RETRY_AFTER = 120.0
SAY_AFTER = 5.0  # a longer pause between two attempts is told
_SENDABLE = re.compile(r"[\t\x20-\x7e\xa0-\xff]*\Z")


@dataclass(frozen=True)
class RemoteOptions:
    """How remotes are asked. Hashable; pickles; its repr shows no secret.

    ``headers``, ``token`` (sent as ``Authorization: Bearer``): for every URL that is asked with these options, but not for
    another scheme, host or port to which it redirects. Credentials of one host belong into ``~/.netrc`` (or ``$NETRC``).
    ``connect_timeout``, ``read_timeout``: seconds; the latter counts from the last byte that came. ``total_timeout``: seconds for
    one call with all its retries, None: no limit. ``attempts``: tries of one request or range. ``backoff``: seconds before
    the second try, doubled from try to try up to 10 s, jittered; a Retry-After is waited for instead.
    ``connections``: per process; more are opened only where more threads ask at once. ``streams``: ranges of one object that
    are asked for at once. ``part``: bytes of a range. ``buffer``: bytes taken from a socket at once. ``proxies``: use
    ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY``, ``NO_PROXY``. ``netrc``: use the netrc file. ``anonymous``,
    ``requester_pays``: of ``s3://``.
    """

    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)
    token: str | None = field(default=None, repr=False)
    connect_timeout: float = 10.0
    read_timeout: float = 30.0
    total_timeout: float | None = None
    attempts: int = 5
    backoff: float = 0.25
    connections: int = 16
    streams: int = 8
    part: int = 8 << 20
    buffer: int = 1 << 20
    proxies: bool = True
    netrc: bool = True
    anonymous: bool | None = None
    requester_pays: bool = False

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "read_timeout", "total_timeout", "attempts", "connections", "streams", "part", "buffer"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise errors.ConfigError(f"{name} is {value!r}: it must be above 0", name=name, value=value)
            if value is not None and not value < threading.TIMEOUT_MAX:
                raise errors.ConfigError(f"{name} is {value!r}: it must be below {threading.TIMEOUT_MAX:.0f}", name=name, value=value)
        for name, text in {**self.headers, "token": self.token or ""}.items():
            if not _SENDABLE.match(f"{name}{text}"):
                raise errors.ConfigError(f"the value of {name!r} cannot be sent: it holds a line break, or more than Latin-1", name=name)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Options from FOREBAY_CONNECT_TIMEOUT, FOREBAY_READ_TIMEOUT, FOREBAY_TOTAL_TIMEOUT, FOREBAY_ATTEMPTS, FOREBAY_CONNECTIONS
        and FOREBAY_STREAMS. Raises `ConfigError`, naming the variable."""
        kinds: dict[str, Callable[[str], float]] = {
            "connect_timeout": float, "read_timeout": float, "total_timeout": float, "attempts": int, "connections": int, "streams": int,
        }  # fmt: skip
        found = {name: _number(environ, f"FOREBAY_{name.upper()}", kind) for name, kind in kinds.items()}
        return cls(**{name: value for name, value in found.items() if value is not None})  # type: ignore[arg-type]

    def brief(self) -> Self:
        """These, for asking whether a known version is still current: who asks can do without the answer."""
        limit = min(CHECK_TIMEOUT, self.total_timeout or CHECK_TIMEOUT)
        return replace(self, attempts=min(2, self.attempts), total_timeout=limit)


def _number(environ: Mapping[str, str], name: str, kind: Callable[[str], float]) -> float | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = kind(text)
    except ValueError:
        value = 0
    if not 0 < value < threading.TIMEOUT_MAX:
        wanted = f"a number above 0 and below {threading.TIMEOUT_MAX:.0f} is wanted"
        raise errors.ConfigError(f"{name} is {text!r}: {wanted}", name=name, value=text)
    return value


class Trouble(Exception):
    """One attempt failed; if ``again``, another may go well. ``error``: the class to raise when no attempt is left; ``why``: in words,
    without secrets; ``retry_after``: seconds that the remote wants to be left alone; ``silent``: time was up, or the network knows no way,
    of which the latter is ``unreachable``."""

    def __init__(
        self,
        why: str,
        error: type[errors.RemoteError] = errors.RemoteUnavailable,
        *,
        again: bool = True,
        retry_after: float | None = None,
        status: int | None = None,
        silent: bool = False,
        unreachable: bool = False,
    ) -> None:
        super().__init__(why)
        self.why, self.error, self.again, self.retry_after, self.status = why, error, again, retry_after, status
        self.silent, self.unreachable = silent, unreachable


class Hosts(Protocol):
    """Which hosts gave no answer lately: what all processes that share a cache know. Callable from any thread; raises nothing."""

    def silent_since(self, host: str, patience: float) -> float | None:
        """How many seconds ago it was found silent; None: it may be asked, by who would wait ``patience`` seconds."""

    def heard(self, host: str) -> None:
        """It answers."""

    def silent(self, host: str, began: float, waited: float) -> None:
        """A request that began then (monotonic) got no byte in ``waited`` seconds."""


class _Reach(NamedTuple):
    """``insists``: ask a silent host all the same."""

    hosts: Hosts
    insists: bool = False


_reach: ContextVar[_Reach | None] = ContextVar("forebay_reach", default=None)
_began: ContextVar[float | None] = ContextVar("forebay_began", default=None)  # when the time of calls that share one limit began


@contextmanager
def one_time_limit() -> Iterator[None]:
    """Calls that begin meanwhile, in this thread, share one ``total_timeout``, which runs from now."""
    token = _began.set(time.monotonic())
    try:
        yield
    finally:
        _began.reset(token)


@contextmanager
def reaching(hosts: Hosts | None, *, insists: bool = False) -> Iterator[None]:
    """Calls of remotes that begin meanwhile, in this thread, know these hosts."""
    token = _reach.set(None if hosts is None else _Reach(hosts, insists))
    try:
        yield
    finally:
        _reach.reset(token)


class Stopped(Exception):
    """This call is being given up: another of its threads failed, or its caller was interrupted."""


class Connecting:
    """Around what nobody can wake: connecting, resolving a name. Who ends the call does not wait for a thread in here."""

    def __init__(self) -> None:
        self._threads: set[int] = set()  # `add`, `discard` and `in` are atomic

    def __enter__(self) -> None:
        self._threads.add(threading.get_ident())

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._threads.discard(threading.get_ident())

    def __contains__(self, thread: threading.Thread) -> bool:
        return thread.ident in self._threads


class Call:
    """One call of a remote: its deadline, what it counts, and its end. Shared by the threads that work for it.

    Left (or aborted), it wakes all of its threads that wait for a socket or between two attempts."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self._url, self.options = url, options
        self.transfer = Transfer()
        self.moved: dict[str, str] = {}  # where redirects led: the next range need not go that way again
        self.connecting = Connecting()
        self._began = _began.get() or time.monotonic()
        self._reach = _reach.get()
        self._approached: set[str] = set()
        self._stop = threading.Event()
        self._lock = threading.Lock()  # guards what follows, and the counts
        self._sockets: set[socket.socket] = set()

    @cached_property
    def url(self) -> str:
        """Without secrets: for errors and logs."""
        return canonical(self._url)

    def again(self) -> Call:
        """This call from its beginning: with its counts and its deadline, but none of its threads."""
        self.abort()
        successor = Call(self._url, self.options)
        successor.transfer, successor._began, successor._approached = self.transfer, self._began, self._approached
        return successor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def abort(self) -> None:
        """End the work of all threads of this call."""
        with self._lock:
            self._stop.set()
            sockets, self._sockets = self._sockets, set()
        for found in sockets:
            _wake(found)

    def check(self) -> None:
        """Raise `Stopped` if this call is given up, `RemoteTimeout` if its time is over."""
        if self._stop.is_set():
            raise Stopped
        self.remaining()

    @property
    def until(self) -> float | None:
        """When its time is over, by the monotonic clock; None without limit."""
        limit = self.options.total_timeout
        return None if limit is None else self._began + limit

    def remaining(self) -> float | None:
        """Seconds left, None without limit. Raises `RemoteTimeout` if there are none."""
        if self.until is None:
            return None
        left = self.until - time.monotonic()
        if left <= 0:
            raise self.failure(Trouble(f"not done in {self.options.total_timeout:g} s", errors.RemoteTimeout), self.transfer.retries + 1)
        return left

    # -- hosts that do not answer ----------------------------------------------------------------------------------

    def approach(self, host: str) -> None:
        """Before the first request to a host: raises `RemoteTimeout` if it was just found silent. This call's own attempts go on."""
        if self._reach is None or host in self._approached:
            return
        self._approached.add(host)
        patience = self.timeout(min(self.options.connect_timeout, self.options.read_timeout))
        ago = None if self._reach.insists else self._reach.hosts.silent_since(host, patience)
        if ago is not None:
            name = host.partition(" ")[0]
            message = f"{self.url}: {name} gave no answer {ago:.1f} s ago, and is left alone some seconds; refresh=True asks now"
            raise errors.RemoteTimeout(message, url=self.url, done=0, attempts=0)

    def heard(self, host: str) -> None:
        """An answer of the host came."""
        if self._reach is not None:
            self._reach.hosts.heard(host)

    def unheard(self, host: str, began: float, *, sure: bool = False) -> None:
        """A request that began then (monotonic) waited in vain for the first byte. ``sure``: the network says that there is no way."""
        if self._reach is not None:
            self._reach.hosts.silent(host, began, math.inf if sure else time.monotonic() - began)

    def timeout(self, seconds: float) -> float:
        """``seconds``, or what is left of the call if that is less."""
        left = self.remaining()
        return seconds if left is None else min(seconds, left)

    def count(self, *, requests: int = 0, received: int = 0, retries: int = 0) -> None:
        with self._lock:
            self.transfer.requests += requests
            self.transfer.received += received
            self.transfer.retries += retries

    def hold(self, sock: socket.socket) -> None:
        """``sock`` works for this call. Raises `Stopped` if that is given up."""
        with self._lock:
            if self._stop.is_set():
                raise Stopped
            self._sockets.add(sock)

    def let_go(self, sock: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(sock)

    def retrying(self, work: Callable[[], T]) -> T:
        """``work()``, again after each `Trouble`, until it goes well, the attempts are used up or the time is over."""
        for attempt in range(1, self.options.attempts + 1):
            try:
                self.check()
                return work()
            except Trouble as trouble:
                if self._stop.is_set():
                    raise Stopped from trouble
                pause = self._pause(trouble, attempt)
                if pause is None:
                    raise self.failure(trouble, attempt) from trouble.__cause__
                level = logging.WARNING if pause > SAY_AFTER else logging.DEBUG
                log.log(level, "%s: %s; attempt %d in %.2f s", self.url, trouble.why, attempt + 1, pause)
            self.count(retries=1)
            self._stop.wait(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause(self, trouble: Trouble, attempt: int) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        if attempt == self.options.attempts or not trouble.again:
            return None
        pause = min(MAX_PAUSE, self.options.backoff * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)
        if trouble.retry_after is not None:
            if trouble.retry_after > MAX_RETRY_AFTER:
                return None
            pause = max(pause, trouble.retry_after)
        left = self.remaining()
        return pause if left is None or pause < left else None

    def failure(self, trouble: Trouble, attempts: int) -> errors.RemoteError:
        """The error that tells of ``trouble``."""
        done = self.transfer.received
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        asked = f"; it asks to come back in {trouble.retry_after:.0f} s" if (trouble.retry_after or 0) > MAX_RETRY_AFTER else ""
        message = f"{self.url}: {trouble.why}, after {tries} and {done:,} bytes{asked}"
        return trouble.error(message, url=self.url, done=done, attempts=attempts, status=trouble.status)


def _wake(sock: socket.socket) -> None:
    try:
        # not SSLSocket.shutdown(): that takes TLS away under a reader, which would go on with what is still encrypted
        socket.socket.shutdown(sock, socket.SHUT_RDWR)
    except OSError as error:
        log.debug("a connection was closed already: %s", error)
