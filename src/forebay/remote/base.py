"""What all remotes share: options, the life of one call with its retries, and ranges that are fetched in parallel."""

from __future__ import annotations

import errno
import math
import numbers as numbers_abc
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from enum import IntEnum
from operator import itemgetter
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar

from forebay import _config, errors
from forebay._kernel import greenlets, host, interrupts
from forebay._kernel.threads import run_all
from forebay._kernel.waits import SharedLimit, time_limit
from forebay._logs import logger
from forebay._model import Span, Transfer, exact_str
from forebay.remote import key_urls
from forebay.remote.key_urls import KeyUrl
from forebay.remote.urls import absolute_path, canonical

if TYPE_CHECKING:
    from forebay.remote.cookies import Cookies

log = logger("forebay.remote")
T = TypeVar("T")

CHECK_TIMEOUT = 10.0
MAX_PAUSE = 10.0
MAX_RETRY_AFTER = 120.0
WARN_ABOVE = 5.0  # seconds: a longer pause between two attempts is logged as a warning
_FILES = ("client_cert", "client_key")
_COUNTS = frozenset({"attempts", "connections", "streams", "part", "buffer"})
_OF_REQUEST = frozenset({"user-agent", "traceparent", "x-request-id"})
_FRAMING = frozenset({"content-length", "transfer-encoding"})
_NAME = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_SENDABLE = r"[\t\x20-\x7e\xa0-\xff]*\Z"


@dataclass(frozen=True)
class RemoteOptions:
    """How requests to remotes are sent. Hashable; can be pickled; its repr shows no secret.

    ``headers``: sent with every request for a URL, but not if it redirects to another scheme, host or port, and each in place of one that
    Forebay would send. ``Content-Length`` and ``Transfer-Encoding`` raise `ConfigError`, as do, for ``s3://``, ``Host``, ``x-amz-date``,
    ``x-amz-content-sha256`` and ``x-amz-security-token``. ``token``: likewise, as
    ``Authorization: Bearer``. Credentials for a single host belong in ``~/.netrc`` (or ``$NETRC``). ``connect_timeout``: seconds.
    ``read_timeout``: seconds since the last byte received. ``total_timeout``: seconds for one call with all its retries; None: no limit.
    ``attempts``: how often one request or range is tried. ``backoff``: seconds before the second attempt, doubled each time up to 10 s,
    with jitter; a Retry-After header replaces it. ``connections``: maximum connections for ranges in a process; more are opened only while
    more calls need one. ``streams``: parallel ranges of one object. ``part``: bytes of a range. ``buffer``: bytes of a body held in memory
    until its reader takes them. ``proxies``: use ``HTTP_PROXY``, ``HTTPS_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``. ``netrc``: use the netrc
    file. ``client_cert``: the file of a certificate that is shown to servers which ask for one, in PEM, and after it those that sign it;
    ``client_key``: the file of its private key, without a password; None: it is in ``client_cert``. Not shown after a redirect to another
    scheme, host or port. ``anonymous``, ``requester_pays``: for ``s3://``. ``allow_downgrade``: follow a redirect from ``https://`` to ``http://``.
    ``partition``: part of the keys, so that objects fetched with these options are only served to callers with the same partition. By
    default all ``headers`` are, but for those of `is_keyed`; the content of ``client_cert``; and the ``token``, for ``https://`` and
    ``http://``. A partition replaces all of them but ``Accept*``; "": only these make a difference. ``key_url``: what of the query of an
    ``https://`` or ``http://`` URL is part of its key: a pattern (`re`) of the whole names of parameters that are not; or a function that
    takes the URL and returns it with the query that is; or a mapping of hosts (``host``, ``host:port``, ``*.host``, ``*``) to these.
    Signatures of known stores are left out before, and the URL has no user and no fragment. A function must be one that can be pickled if
    the options are."""

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
    client_cert: str | os.PathLike[str] | None = None
    client_key: str | os.PathLike[str] | None = None
    anonymous: bool | None = None
    requester_pays: bool = False
    allow_downgrade: bool = False
    partition: str | None = field(default=None, repr=False)
    key_url: KeyUrl | Mapping[str, KeyUrl] | None = field(default=None, hash=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("connect_timeout", "read_timeout", "total_timeout", "backoff", *_COUNTS):
            value = getattr(self, name)
            if value is None and name == "total_timeout":
                continue
            number = _number(value, is_count=name in _COUNTS)
            if number is None:
                wanted = "an integer" if name in _COUNTS else "a number"
                raise errors.ConfigError(f"{name} is {value!r}: it must be {wanted}", name=name, value=value)
            if not (number > 0 or (name == "backoff" and number == 0)):
                raise errors.ConfigError(f"{name} is {value!r}: it must be above 0", name=name, value=value)
            if not number < threading.TIMEOUT_MAX:
                raise errors.ConfigError(f"{name} is {value!r}: it must be below {threading.TIMEOUT_MAX:.0f}", name=name, value=value)
            object.__setattr__(self, name, number)
        for name in ("token", "partition"):
            text = exact_str(value := getattr(self, name))
            if text is None and value is not None:
                raise errors.ConfigError(f"{name} must be a text, or None", name=name)  # its value is a secret
            object.__setattr__(self, name, text)
        # A copy: what the caller changes later would be in no key.
        object.__setattr__(self, "headers", dict(_checked_headers(self.headers)))
        if self.token:
            _check_sendable("token", self.token)
        for name in _FILES:
            object.__setattr__(self, name, _path(name, getattr(self, name)))
        if self.client_key and not self.client_cert:
            raise errors.ConfigError("client_key is of no use without client_cert: name the certificate too", name="client_key")
        object.__setattr__(self, "key_url", key_urls.checked(self.key_url))

    def __getstate__(self) -> dict[str, Any]:
        if self.key_url is not None:
            import pickle

            try:
                pickle.dumps(self.key_url)
            except Exception as error:
                message = "key_url cannot be pickled, which another process needs: name a function at the top of a module, or a pattern"
                raise errors.ConfigError(message, name="key_url") from error
        return vars(self)

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Options from FOREBAY_CONNECT_TIMEOUT, FOREBAY_READ_TIMEOUT, FOREBAY_TOTAL_TIMEOUT, FOREBAY_ATTEMPTS, FOREBAY_CONNECTIONS,
        FOREBAY_STREAMS, FOREBAY_CLIENT_CERT and FOREBAY_CLIENT_KEY, or the same keys of the user's file. Raises `ConfigError`, naming the
        variable, or the file and the key."""
        given = _config.given_settings(environ)[0]
        values, faults = numbers(given)
        if faults:
            raise faults[0]
        files = {name: _config.expand_user(given[name].text, given[name].name) for name in _FILES if name in given}
        return cls(**values, **files)  # type: ignore[arg-type]

    @property
    def authorization(self) -> str:
        """The value of the ``Authorization`` header, else the token; "" if neither was given, or the header is empty."""
        given = next((value for name, value in self.sent_headers.items() if name.lower() == "authorization"), None)
        return given if given is not None else f"Bearer {self.token}" if self.token else ""

    @property
    def sent_headers(self) -> dict[str, str]:
        """The headers that are sent: those of the user but for `is_set_by_remote`, each line once."""
        lines: dict[tuple[str, str], str] = {}
        for name, value in self.headers.items():
            if not is_set_by_remote(name):
                lines.setdefault((name.lower(), value), name)
        return {name: value for (_, value), name in lines.items()}

    @property
    def keyed_headers(self) -> tuple[tuple[str, str], ...]:
        """The `sent_headers` that are part of the keys, in order of their names in lower case. ``partition`` stands for all but
        ``Accept*``."""
        lines = [(name.lower(), value) for name, value in self.sent_headers.items() if is_keyed(name)]
        kept = [line for line in lines if self.partition is None or line[0].startswith("accept")]
        return tuple(sorted(kept, key=itemgetter(0)))

    def keyed_certificate(self) -> tuple[tuple[str, str], ...]:
        """The client certificate as one of the lines that are part of the keys: a hash of its content, so that those of two containers
        with one path differ. None with a ``partition``. Raises `ConfigError` if it cannot be read."""
        if self.client_cert is None or self.partition is not None:
            return ()
        import hashlib

        try:
            with open(self.client_cert, "rb", opener=host.open_fd) as file:
                return (("client certificate", hashlib.sha256(file.read()).hexdigest()),)  # no header has a blank in its name
        except OSError as error:
            message = f"client_cert={str(self.client_cert)!r} cannot be read: {error.strerror}"
            raise errors.ConfigError(message, name="client_cert", value=str(self.client_cert)) from error

    def for_check(self) -> Self:
        """These options with a short time limit, for asking whether a known version is still current, which is optional for the caller."""
        limit = min(CHECK_TIMEOUT, self.total_timeout or CHECK_TIMEOUT)
        return replace(self, attempts=min(2, self.attempts), total_timeout=limit)


def _number(value: object, *, is_count: bool) -> float | None:
    """A number as Python's own; None for what is none, such as an array."""
    try:
        if is_count:
            return operator.index(value)  # type: ignore[arg-type]
        return float(value) if isinstance(value, numbers_abc.Real) else None
    except TypeError:
        return None


def _path(name: str, value: object) -> str | None:
    """The absolute path of a file: what is opened in another process may be opened in another working directory. Raises `ConfigError`."""
    if value is None:
        return None
    text = exact_str(os.fspath(value) if isinstance(value, os.PathLike) else value)
    if not text or "\0" in text:
        raise errors.ConfigError(f"{name} is {value!r}: it must be the path of a file", name=name)
    return absolute_path(text)


def _checked_headers(headers: object) -> Iterator[tuple[str, str]]:
    """The lines as they are sent: without blanks around a value. Raises `ConfigError`."""
    if not isinstance(headers, Mapping):
        raise errors.ConfigError("headers must be a mapping of texts to texts", name="headers")
    for given, content in headers.items():
        name, value = exact_str(given), exact_str(content)
        if name is None or value is None:
            raise errors.ConfigError("headers must be a mapping of texts to texts", name="headers")
        if not re.fullmatch(_NAME, name):
            raise errors.ConfigError(f"{name!r} cannot be sent: it is no name of a header", name="headers")
        if name.lower() in _FRAMING:
            raise errors.ConfigError(f"the header {name!r} cannot be sent: Forebay alone says where a request ends", name=name)
        _check_sendable(name, value)
        yield name, value.strip(" \t")


def _check_sendable(name: str, value: str) -> None:
    if not re.match(_SENDABLE, value):
        message = f"the value of {name!r} cannot be sent: it contains a line break or characters beyond Latin-1"
        raise errors.ConfigError(message, name=name)


def replaced(headers: Mapping[str, str], others: Mapping[str, str]) -> dict[str, str]:
    """``headers``, of which ``others`` replace those of the same name, however it is written."""
    names = {name.lower() for name in others}
    return {name: value for name, value in headers.items() if name.lower() not in names} | dict(others)


def is_keyed(name: str) -> bool:
    """Whether a header of the user distinguishes objects. Who asks (``User-Agent``), and what differs with each request, does not."""
    return not is_set_by_remote(name) and name.lower() not in _OF_REQUEST


def is_set_by_remote(name: str) -> bool:
    """Whether only Forebay sets a header: ``Range`` and conditions. That of a user would change what a response means."""
    return name.lower() == "range" or name.lower().startswith("if-")


_NUMBERS: dict[str, Callable[[str], float]] = {
    "connect_timeout": float, "read_timeout": float, "total_timeout": float, "attempts": int, "connections": int, "streams": int,
}  # fmt: skip


def numbers(given: Mapping[str, _config.GivenSetting]) -> tuple[dict[str, float], list[errors.ConfigError]]:
    """The fields of `RemoteOptions` that are set, and an error for each that is invalid."""
    values: dict[str, float] = {}
    faults: list[errors.ConfigError] = []
    for field_name, kind in _NUMBERS.items():
        if field_name not in given:
            continue
        text, name = given[field_name]
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if 0 < value < threading.TIMEOUT_MAX:
            values[field_name] = value
        else:
            message = f"{name} is {text!r}: it must be a number above 0 and below {threading.TIMEOUT_MAX:.0f}"
            faults.append(errors.ConfigError(message, name=name, value=text))
    return values, faults


def is_negotiated(vary: str) -> bool:
    """Whether a response with this ``Vary`` may differ between two callers of one key: it names a header that is in no key, or ``*``.

    Other headers are in the key, are the same in each request of Forebay's, or are never sent."""
    return not (_OF_REQUEST | {"*"}).isdisjoint(name.strip().lower() for name in vary.split(","))


_OF_ARCHIVES = re.compile(
    r"\b(?:InvalidObjectState|INVALID_OBJECT_STATE|BlobArchived|BlobBeingRehydrated)\b"
    "|not valid for the object's storage class|not permitted on an archived blob"
)


RESTORE = "it is in an archive tier of its store and cannot be read (restore it there, which takes minutes to hours, then read it again)"


def is_of_archive(text: str) -> bool:
    """Whether a store refuses an object since it is in an archive tier, by the code or the text of its answer: that of S3, or of Azure."""
    return _OF_ARCHIVES.search(text) is not None


UNREACHABLE = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH})
"""The network has no route to a host."""


class Trouble(IntEnum):
    """What is the matter with a host. Processes of different versions tell each other by these numbers."""

    SILENT = 0
    NO_ROUTE = 1
    REFUSED = 2
    NO_NAME = 3


_IN_WORDS = {
    Trouble.SILENT: "gave no answer", Trouble.NO_ROUTE: "could not be reached", Trouble.REFUSED: "refused the connection",
    Trouble.NO_NAME: "had no address (its name cannot be resolved)",
}  # fmt: skip


class AttemptFailed(Exception):
    """One attempt of a call failed.

    ``reason``: in words, without secrets. ``error``: the class to raise when no attempt is left. ``retryable``: whether another attempt may
    succeed. ``retry_after``: seconds that the remote asks to be left alone. ``status``: of the HTTP response, if there was one.
    ``trouble``: of the host; None if it responds, or this attempt does not show whether it does."""

    def __init__(
        self,
        reason: str,
        error: type[errors.RemoteError] = errors.RemoteUnavailable,
        *,
        retryable: bool = True,
        retry_after: float | None = None,
        status: int | None = None,
        trouble: Trouble | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason, self.error, self.retryable, self.retry_after, self.status = reason, error, retryable, retry_after, status
        self.trouble = trouble


class NoPermit(AttemptFailed):
    """The limits of the node allowed no connection to ``host`` within the ``waited`` seconds for which the call may wait."""

    def __init__(self, limits: Limits, host: str, waited: float) -> None:
        super().__init__("timed out waiting for a free connection (max_connections)", errors.RemoteTimeout, retryable=False)
        self.limits, self.host, self.waited = limits, host, waited


class Hosts(Protocol):
    """The hosts that could not be asked recently, as known to all processes that share a cache. Callable from any thread; raises
    nothing."""

    def trouble_with(self, host: str, timeout: float, *, is_optional: bool = False) -> tuple[float, int] | None:
        """How many seconds ago the host was last in trouble, and in which (see `Trouble`); None if the caller, which would wait
        ``timeout`` seconds, may ask it. If that is because enough time has passed, only this caller may: it finds out for all.
        ``is_optional``: the caller can do without the answer, and asks less and less often."""

    def heard(self, host: str) -> None:
        """Note that the host answers."""

    def failed(self, host: str, began: float, waited: float, trouble: int = 0) -> None:
        """Note that a request which began at ``began`` (monotonic) received no byte in ``waited`` seconds."""


class Permit(Protocol):
    """The right to one connection to a host, until `release`. Raises nothing."""

    def is_wanted(self, after: float = 0.0) -> bool:
        """Whether it should be released: another process waits and this one has had it for ``after`` seconds, or there are fewer now."""

    def release(self) -> None:
        """Let another process have it. Idempotent."""


class PermitRequest(Protocol):
    """A request for a permit. Other processes see that this one waits, from the first `try_take` that returns None to `cancel`."""

    def try_take(self) -> Permit | None:
        """A permit, if one is free; None: not yet. Never waits; raises nothing."""

    def cancel(self) -> None:
        """Wait no longer, and give back what an interrupted `try_take` took. Idempotent."""


class Limits(Protocol):
    """The limits of transfers that all processes share that share a cache. Callable from any thread; never waits; raises nothing."""

    def in_force(self) -> tuple[int, int]:
        """Bytes a second from all remotes, and connections to a host; 0: no limit. They may change at any time."""

    def request(self, host_name: str) -> PermitRequest:
        """Request a permit for a connection to a host."""

    def holders(self, host_name: str) -> str:
        """A description of the processes that have connections to a host. Takes a while."""

    def delay(self) -> float:
        """Seconds until this process may take more bytes; 0.0: now."""

    def count(self, received: int) -> None:
        """Note that bytes were received."""


LOOK = 0.005  # seconds between two looks for a permit
LONGEST_DELAY = 0.25  # seconds: then a limit may be another one


class _Access(NamedTuple):
    """The arguments of `tracking_hosts`."""

    hosts: Hosts | None = None
    limits: Limits | None = None
    ask_silent: bool = False
    wait: SharedLimit | None = None
    max_age: float = math.inf


_access: ContextVar[_Access] = ContextVar("forebay_access", default=_Access())  # noqa: B039 (immutable)
_shared_start: ContextVar[float | None] = ContextVar("forebay_shared_start", default=None)


@contextmanager
def shared_time_limit() -> Iterator[None]:
    """Calls that this thread begins inside of the block share one ``total_timeout``, which starts now."""
    token = _shared_start.set(time.monotonic())
    try:
        yield
    finally:
        _shared_start.reset(token)


@contextmanager
def tracking_hosts(
    hosts: Hosts | None, *, limits: Limits | None = None, ask_silent: bool = False, wait: SharedLimit | None = None,
    max_age: float = math.inf,
) -> Iterator[None]:  # fmt: skip
    """Calls that this thread begins inside of the block consult and update ``hosts``, and stay within ``limits``. ``ask_silent``: ask
    silent hosts all the same. ``wait``: how long they wait for connections, which counts for the `time_limit` of this thread too.
    ``max_age``: how old, in seconds, an answer of a remote may be that they use again (`max_age_here`)."""
    remaining = time_limit.remaining()
    if wait is not None:
        wait.lower(remaining)
    elif remaining < math.inf:
        wait = SharedLimit(remaining)
    before, token = 0.0 if wait is None else wait.waited(), _access.set(_Access(hosts, limits, ask_silent, wait, max_age))
    try:
        yield
    finally:
        _access.reset(token)
        if wait is not None:
            time_limit.spend(wait.waited() - before)


def max_age_here() -> float:
    """How old, in seconds, an answer of a remote may be that a call of this thread uses again."""
    return _access.get().max_age


_deferred = threading.local()


def _defer_anew() -> None:
    global _deferred
    _deferred = threading.local()


greenlets.when_patched(_defer_anew)


@contextmanager
def sent_together() -> Iterator[None]:
    """Requests that this thread begins in the block may be sent at its end, so that what sends them is woken once; or earlier, at
    `wake_now`."""
    before: set[Callable[[], None]] | None = getattr(_deferred, "wakes", None)  # of the call that a signal handler has interrupted
    _deferred.wakes = set()
    try:
        yield
    finally:
        wake_now()
        _deferred.wakes = before


def wake_now() -> None:
    """Wake what `sent_together` would wake at its end. Caller: is about to wait for a response, as a signal handler may in such a block."""
    wakes: set[Callable[[], None]] | None = getattr(_deferred, "wakes", None)
    while wakes:
        wakes.pop()()


def wake_at_end(wake: Callable[[], None]) -> bool:
    """Have `sent_together` call ``wake`` at its end. False outside of it."""
    wakes: set[Callable[[], None]] | None = getattr(_deferred, "wakes", None)
    if wakes is None:
        return False
    wakes.add(wake)
    return True


class CallAborted(Exception):
    """The call was aborted: another of its threads failed, or its caller was interrupted."""


class Call:
    """One call of a remote: its deadline, its counters and its end. Shared by the threads that work for it.

    Leaving the context (or `abort`) wakes all threads of the call that wait for a response or between two attempts."""

    def __init__(self, url: str, options: RemoteOptions) -> None:
        self._url, self.options = url, options
        self.transfer = Transfer()
        self.redirects: dict[str, str] = {}  # where redirects led: the next range goes there directly
        self.cookies: Cookies | None = None
        self.varies = False  # whether they may lead another caller elsewhere
        self.is_optional = False  # whether its caller has a copy to serve without an answer
        self.until: float | None = None
        """The deadline by the monotonic clock; None without a limit."""
        if options.total_timeout is not None:
            self.until = (_shared_start.get() or time.monotonic()) + options.total_timeout
        self.hosts, self.limits, self._ask_silent, self.wait, _ = _access.get()
        """Hosts that gave no answer recently; what its transfers have to stay within; how long they may wait for connections."""
        self._asked_hosts: set[str] = set()
        self._refusal: tuple[str, float, Trouble] | None = None  # the last one of a host: which, when, and what
        self._aborted = threading.Event()
        self._lock = threading.Lock()  # guards _on_abort and the counters
        self._on_abort: set[Callable[[], None]] = set()

    @host.cached_property
    def url(self) -> str:
        """The URL without secrets, for errors and logs."""
        return canonical(self._url)

    def restarted(self) -> Call:
        """Abort this call and return a new one with the same counters and deadline."""
        self.abort()
        successor = Call(self._url, self.options)
        successor.transfer, successor.until, successor._asked_hosts = self.transfer, self.until, self._asked_hosts
        successor.cookies, successor.is_optional = self.cookies, self.is_optional
        return successor

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.abort()

    def abort(self) -> None:
        """End the work of all threads of this call. Idempotent."""
        with self._lock:
            self._aborted.set()
            functions, self._on_abort = self._on_abort, set()
        for function in functions:
            function()

    def check(self) -> float:
        """Return the seconds until the deadline; infinite without one. Raises `CallAborted` after `abort`, and `RemoteTimeout` after the
        deadline."""
        interrupts.point()
        if self._aborted.is_set():
            raise CallAborted
        if self.until is None:
            return math.inf
        left = self.until - time.monotonic()
        if left <= 0:
            failed = AttemptFailed(f"not done in {self.options.total_timeout or CHECK_TIMEOUT:g} s", errors.RemoteTimeout)
            raise self.error_of(failed, self.transfer.retries + 1)
        return left

    # -- hosts that do not answer ----------------------------------------------------------------------------------

    def check_host(self, host: str) -> None:
        """Before the first request to a host: raises `RemoteTimeout` if it was silent recently, and `RemoteUnavailable` if it could not be
        connected to. Later attempts of this call go on."""
        if self.hosts is None or host in self._asked_hosts:
            return
        self._asked_hosts.add(host)
        timeout = min(self.options.connect_timeout, self.options.read_timeout, self.check())
        found = None if self._ask_silent else self.hosts.trouble_with(host, timeout, is_optional=self.is_optional)
        if found is not None:
            ago, number = found
            trouble = Trouble(number) if number in _IN_WORDS else Trouble.SILENT  # a newer version may know of more
            name, proxy = host.partition(" ")[0], host.partition(" by ")[2]
            if proxy and trouble != Trouble.SILENT:
                name = f"the proxy {proxy}"
            kind = errors.RemoteTimeout if trouble == Trouble.SILENT else errors.RemoteUnavailable
            skipped = "so it is skipped for a few seconds; pass refresh=True to try it now"
            raise kind(f"{self.url}: {name} {_IN_WORDS[trouble]} {ago:.1f} s ago, {skipped}", url=self.url, done=0, attempts=0)

    def host_answered(self, host: str) -> None:
        """Note that a host answers."""
        if self.hosts is not None:
            self.hosts.heard(host)

    def host_failed(self, host: str, began: float, trouble: Trouble) -> None:
        """A request that began at ``began`` (monotonic) received no byte. A host that refuses connections may only be restarting: other
        processes are told if it still does at the last attempt of this call."""
        if trouble in (Trouble.REFUSED, Trouble.NO_NAME):
            self._refusal = host, began, trouble
        elif self.hosts is not None:
            self.hosts.failed(host, began, time.monotonic() - began if trouble == Trouble.SILENT else math.inf, trouble)

    # -- the limits of the node ------------------------------------------------------------------------------------

    @contextmanager
    def connection(self, host: str) -> Iterator[None]:
        """Around the use of a connection to a host: waits until the limit of connections allows it. Raises `NoPermit`, and what `check`
        raises."""
        limits, wait = self.limits, self.wait or SharedLimit(math.inf)
        if limits is None or not limits.in_force()[1]:
            yield
            return
        request, permit = limits.request(host), None
        wait.begin()
        try:
            try:
                while (permit := request.try_take()) is None:
                    self.check()
                    if wait.is_over():
                        raise NoPermit(limits, host, wait.waited())
                    self._pause_for(LOOK)
            finally:
                wait.end(has_one=permit is not None)
                request.cancel()
            yield
        finally:
            if permit is not None:
                permit.release()
                wait.release()

    def throttle(self, received: int) -> None:
        """Count received bytes, and wait until the limit of the rate allows more. Raises what `check` raises."""
        limits = self.limits
        if limits is None or not limits.in_force()[0]:
            return
        limits.count(received)
        while (delay := limits.delay()) > 0:
            self.check()
            self._pause_for(min(delay, LONGEST_DELAY))

    def keep_cookies(self, url: str, lines: Sequence[str]) -> None:
        """Keep the cookies that a response to ``url`` sets, for the other requests of this call only."""
        from forebay.remote.cookies import Cookies

        with self._lock:
            self.cookies = self.cookies or Cookies()
        self.cookies.keep(url, lines)

    # -- counters, responses, attempts -----------------------------------------------------------------------------

    def count(self, *, requests: int = 0, received: int = 0, retries: int = 0) -> None:
        with self._lock:
            self.transfer.requests += requests
            self.transfer.received += received
            self.transfer.retries += retries

    def on_abort(self, function: Callable[[], None]) -> None:
        """Have `abort` call ``function``, which wakes the thread that waits for a response; it must not wait itself. Raises
        `CallAborted` after `abort`."""
        with self._lock:
            if self._aborted.is_set():
                raise CallAborted
            self._on_abort.add(function)

    def not_on_abort(self, function: Callable[[], None]) -> None:
        """Undo `on_abort`."""
        with self._lock:
            self._on_abort.discard(function)

    def retry(self, attempt: Callable[[], T], attempts: int | None = None) -> T:
        """``attempt()``, repeated after each `AttemptFailed` until it succeeds, no attempt is left, or the deadline is over. ``attempts``:
        other than those of the options."""
        attempts = attempts or self.options.attempts
        for number in range(1, attempts + 1):
            try:
                self.check()
                return attempt()
            except AttemptFailed as failed:
                if self._aborted.is_set():
                    raise CallAborted from failed
                pause = self._pause(failed, number) if number < attempts else None
                if pause is None:
                    if failed.trouble is not None and self._refusal is not None and self.hosts is not None:
                        host, began, trouble = self._refusal
                        self.hosts.failed(host, began, math.inf, trouble)
                    raise self.error_of(failed, number) from failed.__cause__
                announce = log.warning if pause > WARN_ABOVE else log.debug
                announce("%s: %s; attempt %d in %.2f s", self.url, failed.reason, number + 1, pause)
            self.count(retries=1)
            self._pause_for(pause)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _pause_for(self, seconds: float) -> None:
        """Wait so long, or until `abort`."""
        any(map(self._aborted.wait, interrupts.turns(seconds)))

    def _pause(self, failed: AttemptFailed, number: int) -> float | None:
        """Seconds until the next attempt; None if there is none."""
        import random

        if not failed.retryable:
            return None
        pause = min(MAX_PAUSE, self.options.backoff * 2 ** (number - 1)) * random.uniform(0.5, 1.0)
        if failed.retry_after is not None:
            if failed.retry_after > MAX_RETRY_AFTER:
                return None
            pause = max(pause, failed.retry_after)
        return pause if pause < self.check() else None

    def error_of(self, failed: AttemptFailed, attempts: int) -> errors.RemoteError:
        """The error that reports the last of ``attempts`` attempts."""
        done = self.transfer.received
        if isinstance(failed, NoPermit):
            limit, holder = failed.limits.in_force()[1], failed.limits.holders(failed.host)
            return errors.ConnectionsBusy.of_host(self.url, failed.host, limit, failed.waited, holder, done)
        tries = "1 attempt" if attempts == 1 else f"{attempts} attempts"
        later = f"; it asks to come back in {failed.retry_after:.0f} s" if (failed.retry_after or 0) > MAX_RETRY_AFTER else ""
        message = f"{self.url}: {failed.reason}, after {tries} and {done:,} bytes{later}"
        return failed.error(message, url=self.url, done=done, attempts=attempts, status=failed.status)


# -- several ranges of one object at once ------------------------------------------------------------------------------


def cut_spans(spans: Iterable[Span], size: int) -> Iterator[Span]:
    """The spans, cut into pieces of at most ``size`` bytes."""
    for span in spans:
        for start in range(span.start, span.end, size):
            yield Span(start, min(size, span.end - start))


def run_parts(tasks: Iterator[Callable[[], None]], threads: int, call: Call) -> None:
    """Run all ``tasks``, in the calling thread and in up to ``threads`` more, which end with this function. A task is taken from the
    iterator when a thread is free to run it.

    The first error, or an interrupt of the calling thread, aborts ``call`` and is raised, once no thread can write any more."""
    try:
        run_all(tasks, threads + 1, name="range", inline=True, stop=call.abort, grace=math.inf)
    except CallAborted:
        return  # the thread that aborted the call raises the reason
