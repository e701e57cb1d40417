"""Everything that fsspec or pyarrow can read: their URLs (``gs://``, ``az://``, ``memory://``...) and their filesystem objects.

After a fork, their clients hang, or silently mix bytes. So only filesystems without connections are used in this process; all others run in
a helper process (`forebay.remote.filesystems.helper`), one for each process, started at the first call.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

from forebay._logs import logger
from forebay._model import Buffer, Content, ObjectInfo, Sink, Span, Transfer
from forebay.errors import (
    NotFound,
    RemoteChanged,
    RemoteError,
    RemoteProtocolError,
    RemoteTimeout,
    RemoteUnavailable,
    SourceChanged,
    Unsupported,
)
from forebay.remote.base import AttemptFailed, Call, RemoteOptions, cut_spans, run_parts
from forebay.remote.filesystems import helper
from forebay.remote.filesystems.clients import BLOCK, OnSent, client_of

log = logger("forebay.remote.filesystems")
T = TypeVar("T")

MAX_CHANGES = 2  # an object that changes more often during a fetch is given up
SLOWEST = 100_000
"""Bytes a second. The helper sends nothing of a range before all of it is there, so a range may take that much longer than
``read_timeout``."""

IN_PROCESS = frozenset({"file", "local", "memory", "mock", "data"})  # no connections, so forks do no harm; `memory` exists per process
WRAPPERS = frozenset({"zip", "tar", "libarchive", "dir"})  # the wrapped filesystem decides
_QUICK_VERBS = frozenset({"stat", "list", "parallel"})
"""Requests that are answered soon, if at all: nothing is received of a range before all of it is there."""


class Access(Protocol):
    """How a filesystem is used: in this process, or in the helper. Raises `AttemptFailed` for every error of the filesystem."""

    has_connections: bool
    """Whether its bytes come by a network, so that the limits of the node apply."""

    def stat(self, call: Call, url: str) -> ObjectInfo: ...

    def read(self, call: Call, url: str, span: Span) -> Iterator[Buffer]:
        """The bytes of ``span``, fewer where the object ends. A buffer is valid until the next one is requested."""

    def list(self, call: Call, url: str) -> Iterator[ObjectInfo]: ...

    def parallel(self, call: Call, url: str) -> bool: ...

    def write(self, call: Call, url: str, source: str | bytes, exclusive: bool, on_sent: OnSent) -> ObjectInfo: ...

    def delete(self, call: Call, url: str) -> None: ...


class FilesystemRemote:
    """Objects of a filesystem. Callable from several threads, and after a fork.

    ``filesystem``: of fsspec or pyarrow; URLs are then its paths, with or without a scheme. None: fsspec's filesystem of each URL, created
    with ``storage_options``. A filesystem that cannot be pickled is used in this process, and raises `RemoteError` in a forked child.
    """

    def __init__(
        self, filesystem: Any = None, options: RemoteOptions | None = None, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._options = options or RemoteOptions()
        settings = dict(storage_options or {})
        self._fixed = None if filesystem is None else _access_to(filesystem)
        self._scheme = "" if filesystem is None else re.sub(r"[^\w+.-]", "", protocols_of(filesystem)[0])
        self._in_process = InProcessClient(None, settings)
        self._in_helper = HelperClient(pickle.dumps((None, settings)))

    def _access(self, url: str) -> Access:
        schemes = {link.partition("://")[0] for link in url.split("::")}
        return self._fixed or (self._in_process if schemes <= IN_PROCESS | WRAPPERS else self._in_helper)

    def _call(self, url: str, options: RemoteOptions | None = None) -> Call:
        return Call(url if "://" in url else f"{self._scheme}://{url}", options or self._options)

    def is_near(self, url: str) -> bool:
        """See `NearRemote.is_near`."""
        return not self._access(url).has_connections

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`. The validator is the filesystem's ETag, else it consists of time and size."""
        with self._call(url, self._options if known is None else self._options.for_check()) as call:
            info = self._stat(call, url)
        return None if known is not None and info.validator == known else info

    def _stat(self, call: Call, url: str) -> ObjectInfo:
        def attempt() -> ObjectInfo:
            call.count(requests=1)
            access = self._access(url)
            with _connection(call, access):
                return access.stat(call, url)

        return call.retry(attempt)

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`. All bytes are of one version: the validator is compared before and after."""
        call, trusted = self._call(url), listed if listed is not None and _is_enough(listed) else None
        for _ in range(1 + MAX_CHANGES + (trusted is not None)):
            try:
                with call:
                    return self._fetch(call, url, sink, trusted)
            except _Changed:
                call, trusted = call.restarted(), None
        raise RemoteChanged(f"{call.url}: it changed again and again while it was read", url=call.url)

    def _fetch(self, call: Call, url: str, sink: Sink, listed: ObjectInfo | None) -> Transfer:
        info = listed or self._stat(call, url)
        if info.size is None:
            call.retry(lambda: self._fetch_stream(call, url, info, sink))
        else:
            self._fetch_ranges(call, url, info.size, sink.begin(info), sink)
        if self._stat(call, url).validator != info.validator:
            raise _Changed
        call.transfer.info = info
        return call.transfer

    def _fetch_stream(self, call: Call, url: str, info: ObjectInfo, sink: Sink) -> None:
        sink.begin(info)
        for at, block in self._blocks(call, url, Span(0, -1)):
            sink.write(at, block)

    def _fetch_ranges(self, call: Call, url: str, size: int, spans: tuple[Span, ...], sink: Sink) -> None:
        call.transfer.resumed += size - sum(span.length for span in spans)
        # where a range costs as much as all that lies before it, each span is one stream
        parallel = self._access(url).parallel(call, url)
        part = self._options.part if parallel else max(size, 1)
        count = sum(-(-span.length // part) for span in spans)
        tasks = (lambda piece=piece: self._fetch_range(call, url, piece, sink) for piece in cut_spans(spans, part))
        run_parts(tasks, min(self._options.streams, count) - 1 if parallel else 0, call)

    def _fetch_range(self, call: Call, url: str, span: Span, sink: Sink) -> None:
        """Each attempt continues where the last one ended."""
        done = span.start

        def attempt() -> None:
            nonlocal done
            for at, block in self._blocks(call, url, Span(done, span.end - done)):
                sink.write(at, block)
                done = at + len(block)
            if done < span.end:
                raise _Changed

        call.retry(attempt)

    def _blocks(self, call: Call, url: str, span: Span) -> Iterator[tuple[int, Buffer]]:
        """One attempt to read ``span``: offsets and bytes, counted."""
        call.count(requests=1)
        at, access = span.start, self._access(url)
        with _connection(call, access):
            for block in access.read(call, url, span):
                call.check()
                call.count(received=len(block))
                if access.has_connections:
                    call.throttle(len(block))
                yield at, block
                at += len(block)

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """See `Remote.read`."""
        validator = validator if info is None else info.validator
        with self._call(url) as call:
            data = call.retry(lambda: b"".join(bytes(block) for _, block in self._blocks(call, url, span)))
            if validator is not None and self._stat(call, url).validator != validator:
                raise RemoteChanged(f"{call.url}: it is not the version {validator} any more", url=call.url)
            return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See `Remote.list`."""
        with self._call(url) as call:
            call.count(requests=1)
            try:
                yield from self._access(url).list(call, url)
            except AttemptFailed as failed:
                raise call.error_of(failed, 1) from failed.__cause__

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None, on_sent: OnSent | None = None,
        resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. Creates directories. Most filesystems support no conditions; some fsspec ones support ``if_none_match``.

        The object appears whole or not at all where the filesystem ensures that: local ones and SFTP show a file while it is written."""
        with self._call(url) as call:
            if if_match is not None:
                raise Unsupported(f"{call.url}: filesystems cannot write only over one version", url=call.url)
            content = os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else bytes(source)
            size = _size(content)
            raised: list[BaseException] = []  # by on_sent: raised as it is, whatever the filesystem makes of it

            def report(done: int) -> None:
                try:
                    if on_sent is not None:
                        on_sent(done)
                except BaseException as error:
                    raised.append(error)
                    raise

            def attempt() -> ObjectInfo:
                call.count(requests=1)
                try:
                    return self._access(url).write(call, url, content, if_none_match is not None, report)
                except AttemptFailed as failed:
                    raise raised[0] if raised else failed from failed.__cause__

            info = call.retry(attempt)
            if _size(content) != size:
                raise SourceChanged.of(content)
            if info.size != size:
                raise RemoteProtocolError(f"{call.url}: {info.size} bytes are there, but {size:,} were sent", url=call.url)
            report(size)
            return info

    def delete(self, url: str) -> None:
        """See `Remote.delete`."""
        with self._call(url) as call:
            try:
                call.retry(lambda: self._access(url).delete(call, url))
            except NotFound as error:
                log.debug("nothing to remove: %s", error)


def _is_enough(listed: ObjectInfo) -> bool:
    """Whether an object may be read by what a listing said of it: few bytes then come in vain where that is out of date. Whether the
    validator is strong, which a listing does not tell, matters for larger objects only."""
    return listed.validator is not None and listed.size is not None and listed.size <= BLOCK


def _connection(call: Call, access: Access) -> AbstractContextManager[None]:
    """Around one request. Its client's connections cannot be seen from here: a request counts as one."""
    return call.connection(_host_of(call.url)) if access.has_connections else nullcontext()


def _host_of(url: str) -> str:
    """The host or bucket a request goes to: of a chain, such as ``zip://a.csv::s3://bucket/a.zip``, that of the last link."""
    return "/".join(url.rpartition("::")[2].split("/")[:3])


def _size(source: str | bytes) -> int:
    return len(source) if isinstance(source, bytes) else os.stat(source).st_size


class _Changed(Exception):
    """The object is of another version than before."""


# -- in this process ---------------------------------------------------------------------------------------------------


class InProcessClient:
    """A filesystem that is used in this process. ``bound``: and not in a forked child."""

    def __init__(self, filesystem: Any, settings: Mapping[str, Any] | None = None, *, bound: bool = False) -> None:
        self._client = client_of(filesystem, settings)
        self.has_connections = bound
        self._pid = os.getpid() if bound else None

    def stat(self, call: Call, url: str) -> ObjectInfo:
        return self._run(lambda: self._client.stat(url))

    def parallel(self, call: Call, url: str) -> bool:
        return self._run(lambda: self._client.parallel(url))

    def read(self, call: Call, url: str, span: Span) -> Iterator[Buffer]:
        return self._iterate(lambda: self._client.read(url, span))

    def list(self, call: Call, url: str) -> Iterator[ObjectInfo]:
        return self._iterate(lambda: self._client.list(url))

    def write(self, call: Call, url: str, source: str | bytes, exclusive: bool, on_sent: OnSent) -> ObjectInfo:
        self._run(lambda: self._client.write(url, source, exclusive, on_sent))
        return self.stat(call, url)

    def delete(self, call: Call, url: str) -> None:
        self._run(lambda: self._client.delete(url))

    def _iterate(self, function: Callable[[], Iterator[T]]) -> Iterator[T]:
        items = self._run(function)
        while (item := self._run(lambda: next(items, None))) is not None:
            yield item

    def _run(self, function: Callable[[], T]) -> T:
        if self._pid not in (None, os.getpid()):
            reason = "its filesystem was created before a fork, and cannot be pickled: create it after the fork"
            raise AttemptFailed(reason, RemoteError, retryable=False)
        try:
            return function()
        except Exception as error:
            raise helper.failed_by(error) from error


def _access_to(filesystem: Any) -> Access:
    if is_in_process(filesystem):
        return InProcessClient(filesystem)
    try:
        return HelperClient(pickled((filesystem, {})))
    except Exception as error:  # noqa: BLE001 (whatever the filesystem's own pickling raises)
        log.warning("%s cannot be pickled (%s): it can be used in this process, not in forks of it", type(filesystem).__name__, error)
        return InProcessClient(filesystem, bound=True)


def pickled(value: object) -> bytes:
    """By cloudpickle if it is installed: it includes what is defined in ``__main__``."""
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    return bytes(dumps(value))


def identity(filesystem: Any) -> str:
    """Distinguishes a filesystem with its settings from others; the same in all processes, if it can be pickled."""
    try:
        return hashlib.blake2b(pickled(filesystem), digest_size=32).hexdigest()
    except Exception as error:  # noqa: BLE001 (whatever the filesystem's own pickling raises)
        log.debug("%s is known in this process only: %s", type(filesystem).__name__, error)
        return f"{type(filesystem).__qualname__} {os.getpid()} {id(filesystem)}"


def is_in_process(filesystem: Any) -> bool:
    """Whether a filesystem has no connections that a fork would break."""
    for name in ("base_fs", "fs", "handler"):  # the attributes with which wrappers of pyarrow and fsspec refer to what they wrap
        if (inner := getattr(filesystem, name, None)) is not None:
            return is_in_process(inner)
    return not IN_PROCESS.isdisjoint(protocols_of(filesystem))


def protocols_of(filesystem: Any) -> Sequence[str]:
    """The schemes of its URLs: ``("file", "local")``, ``("s3",)``."""
    inner = getattr(filesystem, "handler", None)
    names: Any = getattr(getattr(inner, "fs", filesystem), "protocol", None) or getattr(filesystem, "type_name", "")
    return (names.removeprefix("py::"),) if isinstance(names, str) else tuple(names)  # pyarrow's prefix for those written in Python


# -- in the helper process ---------------------------------------------------------------------------------------------


class HelperClient:
    """A filesystem that is used in the helper process. ``filesystem``: its pickle."""

    has_connections = True

    def __init__(self, filesystem: bytes) -> None:
        self._filesystem = filesystem
        self._name = hashlib.blake2s(filesystem, digest_size=8).hexdigest()  # its settings determine its hosts

    def stat(self, call: Call, url: str) -> ObjectInfo:
        return ObjectInfo(*self._items(call, "stat", url)[0])

    def parallel(self, call: Call, url: str) -> bool:
        return bool(self._items(call, "parallel", url)[0][0])

    def _items(self, call: Call, verb: str, url: str) -> list[Any]:
        return [json.loads(item) for item in self._send(call, call.options.read_timeout, verb, url)]

    def read(self, call: Call, url: str, span: Span) -> Iterator[Buffer]:
        timeout = call.options.read_timeout + (BLOCK if span.length < 0 else span.length) / SLOWEST
        return self._send(call, timeout, "read", url, span.start, span.length)

    def list(self, call: Call, url: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(*json.loads(item)) for item in self._send(call, call.options.read_timeout, "list", url))

    def write(self, call: Call, url: str, source: str | bytes, exclusive: bool, on_sent: OnSent) -> ObjectInfo:
        path, body = ("", source) if isinstance(source, bytes) else (source, b"")
        # some filesystems report nothing before all is sent
        timeout = call.options.read_timeout + _size(source) / SLOWEST
        for item in self._send(call, timeout, "write", url, path, exclusive, body=body):
            match json.loads(item):
                case [done]:
                    call.check()
                    on_sent(done)
                case fields:
                    return ObjectInfo(*fields)
        raise AttemptFailed("an answer that ends too soon")

    def delete(self, call: Call, url: str) -> None:
        for _ in self._send(call, call.options.read_timeout, "delete", url):
            raise AttemptFailed("an answer that is invalid", retryable=False)

    def _send(self, call: Call, timeout: float, *request: str | int, body: bytes | None = None) -> Iterator[bytearray]:
        """Send a request, and yield the items or blocks of its answer. ``timeout``: seconds for each. ``body``: sent after the request."""
        host = f"{_host_of(call.url)} {self._name}" if request[0] in _QUICK_VERBS else ""
        if host:
            call.check_host(host)
        began, answered = time.monotonic(), False
        with helper.channel(call) as channel:
            with helper.helper_errors():
                helper.send(channel, helper.REQUEST, json.dumps(request).encode())
                helper.send(channel, helper.REQUEST, self._filesystem)
                if body is not None:
                    helper.send(channel, helper.REQUEST, body)
            while True:
                try:
                    with helper.helper_errors():
                        channel.settimeout(call.timeout(timeout))
                        kind, payload = helper.receive(channel)
                except AttemptFailed as failed:
                    if failed.error is RemoteTimeout and host and not answered:
                        call.host_silent(host, began)
                    raise
                error = helper.from_wire(payload) if kind == helper.ERROR else None
                if host and not answered:
                    answered = True
                    _note_host(call, host, began, error)
                if error is not None:
                    raise error
                if kind == helper.END:
                    return
                yield payload


def _note_host(call: Call, host: str, began: float, error: Exception | None) -> None:
    """Note whether a host answers, from the first message of its client. An error without a status may have arisen anywhere."""
    if error is None:
        call.host_answered(host)
    elif isinstance(error, AttemptFailed) and error.error is RemoteTimeout:
        call.host_silent(host, began)
    elif isinstance(error, AttemptFailed) and (error.status is not None or error.error is not RemoteUnavailable):
        call.host_answered(host)
