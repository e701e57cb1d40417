"""Whatever fsspec or pyarrow can read: their URLs (``gs://``, ``az://``, ``hf://``, ``memory://``...) and filesystem objects of theirs.

Their clients hang, or mix bytes in silence, once a process that used them forks. So only filesystems without connections are asked in this
process; all others in a helper process (`forebay.remote.filesystems.helper`), one for each process, started at the first call.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from forebay.remote.base import Call, RemoteOptions, Trouble
from forebay.remote.filesystems import helper
from forebay.remote.filesystems.clients import BLOCK, Sent, client_of
from forebay.remote.filesystems.helper_process import channel, helper_errors
from forebay.remote.transfer import parts, share

log = logger("forebay.remote.filesystems")
T = TypeVar("T")

CHANGES = 2  # an object that changes more often while it is fetched is given up
SLOWEST = 100_000
"""Bytes a second. The helper tells nothing of a range before it has it whole, so a range may take so much longer than ``read_timeout``."""

HERE = frozenset({"file", "local", "memory", "mock", "data"})  # no connections: forks do no harm, and `memory` is in this process only
_LOOKING = frozenset({"stat", "list", "parallel"})
"""What a filesystem answers soon, if it does: of a range nothing is heard before all of it is there."""
WRAPPERS = frozenset({"zip", "tar", "libarchive", "dir"})  # as good as what they wrap


class Way(Protocol):
    """How a filesystem is reached. Raises `Trouble`, and nothing else of the filesystem's."""

    def stat(self, call: Call, url: str) -> ObjectInfo: ...

    def read(self, call: Call, url: str, span: Span) -> Iterator[Buffer]:
        """The bytes of ``span``, fewer where the object ends. Each buffer is good until the next is asked for."""

    def list(self, call: Call, url: str) -> Iterator[ObjectInfo]: ...

    def parallel(self, call: Call, url: str) -> bool: ...

    def write(self, call: Call, url: str, source: str | bytes, exclusive: bool, on_sent: Sent) -> ObjectInfo: ...

    def delete(self, call: Call, url: str) -> None: ...


class FilesystemRemote:
    """Objects of a filesystem. Callable from several threads, and after a fork.

    ``filesystem``: of fsspec or pyarrow; URLs are then its paths, with or without a scheme. None: fsspec's own for each URL, made
    with ``storage_options``. One that cannot be pickled stays in this process, and raises `RemoteError` in a fork of it.
    """

    def __init__(
        self, filesystem: Any = None, options: RemoteOptions | None = None, *, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        self._options = options or RemoteOptions()
        self._settings = dict(storage_options or {})
        self._fixed = None if filesystem is None else _way_to(filesystem)
        self._scheme = "" if filesystem is None else re.sub(r"[^\w+.-]", "", protocols_of(filesystem)[0])
        self._here = InProcessClient(None, self._settings)
        self._there = HelperClient(pickle.dumps((None, self._settings)))

    def _way(self, url: str) -> Way:
        schemes = {link.partition("://")[0] for link in url.split("::")}
        return self._fixed or (self._here if schemes <= HERE | WRAPPERS else self._there)

    def _begin(self, url: str, options: RemoteOptions | None = None) -> Call:
        return Call(url if "://" in url else f"{self._scheme}://{url}", options or self._options)

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`. The validator is the filesystem's ETag, else made of time and size."""
        with self._begin(url, self._options if known is None else self._options.brief()) as call:
            info = self._look(call, url)
        return None if known is not None and info.validator == known else info

    def _look(self, call: Call, url: str) -> ObjectInfo:
        def once() -> ObjectInfo:
            call.count(requests=1)
            return self._way(url).stat(call, url)

        return call.retrying(once)

    def fetch(self, url: str, sink: Sink) -> Transfer:
        """See `Remote.fetch`. All bytes are of one version: the object is looked at before and after."""
        call = self._begin(url)
        for _ in range(1 + CHANGES):
            try:
                with call:
                    return self._fetch(call, url, sink)
            except _Changed:
                call = call.again()
        raise RemoteChanged(f"{call.url}: it changed again and again while it was read", url=call.url)

    def _fetch(self, call: Call, url: str, sink: Sink) -> Transfer:
        info = self._look(call, url)
        if info.size is None:
            self._stream(call, url, info, sink)
        else:
            self._ranges(call, url, info.size, sink.begin(info), sink)
        if self._look(call, url).validator != info.validator:
            raise _Changed
        call.transfer.info = info
        return call.transfer

    def _stream(self, call: Call, url: str, info: ObjectInfo, sink: Sink) -> None:
        def once() -> None:
            sink.begin(info)
            for at, block in self._blocks(call, url, Span(0, -1)):
                sink.write(at, block)

        call.retrying(once)

    def _ranges(self, call: Call, url: str, size: int, spans: tuple[Span, ...], sink: Sink) -> None:
        call.transfer.resumed += size - sum(span.length for span in spans)
        # where a range costs as much as all that lies before it, each span is one stream
        parallel = self._way(url).parallel(call, url)
        part = self._options.part if parallel else max(size, 1)
        count = sum(-(-span.length // part) for span in spans)
        work = (lambda piece=piece: self._range(call, url, piece, sink) for piece in parts(spans, part))
        share(work, min(self._options.streams, count) - 1 if parallel else 0, call)

    def _range(self, call: Call, url: str, span: Span, sink: Sink) -> None:
        """Brings ``span``, from where the last attempt ended."""
        done = span.start

        def once() -> None:
            nonlocal done
            for at, block in self._blocks(call, url, Span(done, span.end - done)):
                sink.write(at, block)
                done = at + len(block)
            if done < span.end:
                raise _Changed

        call.retrying(once)

    def _blocks(self, call: Call, url: str, span: Span) -> Iterator[tuple[int, Buffer]]:
        """One attempt to read ``span``: offsets and bytes, counted."""
        call.count(requests=1)
        at = span.start
        for block in self._way(url).read(call, url, span):
            call.check()
            call.count(received=len(block))
            yield at, block
            at += len(block)

    def read(self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None) -> bytes:
        """See `Remote.read`."""
        validator = validator if info is None else info.validator
        with self._begin(url) as call:
            data = call.retrying(lambda: b"".join(bytes(block) for _, block in self._blocks(call, url, span)))
            if validator is not None and self._look(call, url).validator != validator:
                raise RemoteChanged(f"{call.url}: it is not the version {validator} any more", url=call.url)
            return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See `Remote.list`."""
        with self._begin(url) as call:
            call.count(requests=1)
            try:
                yield from self._way(url).list(call, url)
            except Trouble as trouble:
                raise call.failure(trouble, 1) from trouble.__cause__

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None, on_sent: Sent | None = None,
        resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. Makes directories. Of conditions most filesystems know none, some fsspec ones ``if_none_match``.

        Whole or not at all where the filesystem sees to that: with local ones and SFTP, half a file may be seen while it is written."""
        with self._begin(url) as call:
            if if_match is not None:
                raise Unsupported(f"{call.url}: filesystems cannot write only over one version", url=call.url)
            given = os.path.abspath(source) if isinstance(source, (str, os.PathLike)) else bytes(source)
            size = _size(given)
            writing = _Writing(self._way(url), call, url, given, if_none_match is not None, on_sent)
            info = call.retrying(writing.once)
            if _size(given) != size:
                raise SourceChanged.of(given)
            if info.size != size:
                raise RemoteProtocolError(f"{call.url}: {info.size} bytes are there where {size:,} were sent", url=call.url)
            writing.told(size)
            return info

    def delete(self, url: str) -> None:
        """See `Remote.delete`."""
        with self._begin(url) as call:
            try:
                call.retrying(lambda: self._way(url).delete(call, url))
            except NotFound as error:
                log.debug("nothing to remove: %s", error)


@dataclass
class _Writing:
    """One write, with what ``on_sent`` may raise: that is told as it is."""

    way: Way
    call: Call
    url: str
    source: str | bytes
    exclusive: bool
    on_sent: Sent | None
    ended: BaseException | None = None

    def once(self) -> ObjectInfo:
        self.call.count(requests=1)
        try:
            return self.way.write(self.call, self.url, self.source, self.exclusive, self.told)
        except Trouble as trouble:
            raise self.ended or trouble from trouble.__cause__

    def told(self, done: int) -> None:
        if self.on_sent is None:
            return
        try:
            self.on_sent(done)
        except BaseException as error:
            self.ended = error
            raise


def _size(source: str | bytes) -> int:
    return len(source) if isinstance(source, bytes) else os.stat(source).st_size


class _Changed(Exception):
    """The object is not the one that was looked at before."""


# ----------------------------------------------------------------------------------------------------------- in this process


class InProcessClient:
    """A filesystem that is asked in this process. ``bound``: and not in a fork of it."""

    def __init__(self, filesystem: Any, settings: Mapping[str, Any] | None = None, *, bound: bool = False) -> None:
        self._client = client_of(filesystem, settings)
        self._pid = os.getpid() if bound else None

    def stat(self, call: Call, url: str) -> ObjectInfo:
        return self._ask(lambda: self._client.stat(url))

    def parallel(self, call: Call, url: str) -> bool:
        return self._ask(lambda: self._client.parallel(url))

    def read(self, call: Call, url: str, span: Span) -> Iterator[Buffer]:
        return self._each(lambda: self._client.read(url, span))

    def list(self, call: Call, url: str) -> Iterator[ObjectInfo]:
        return self._each(lambda: self._client.list(url))

    def write(self, call: Call, url: str, source: str | bytes, exclusive: bool, on_sent: Sent) -> ObjectInfo:
        self._ask(lambda: self._client.write(url, source, exclusive, on_sent))
        return self.stat(call, url)

    def delete(self, call: Call, url: str) -> None:
        self._ask(lambda: self._client.delete(url))

    def _each(self, ask: Callable[[], Iterator[T]]) -> Iterator[T]:
        items = self._ask(ask)
        while (item := self._ask(lambda: next(items, None))) is not None:
            yield item

    def _ask(self, ask: Callable[[], T]) -> T:
        if self._pid not in (None, os.getpid()):
            raise Trouble("its filesystem was made before a fork, and cannot be pickled: make it after the fork", RemoteError, again=False)
        try:
            return ask()
        except Exception as error:
            raise helper.meaning(error) from error


def _way_to(filesystem: Any) -> Way:
    if is_here(filesystem):
        return InProcessClient(filesystem)
    try:
        return HelperClient(pickled((filesystem, {})))
    except Exception as error:  # noqa: BLE001 (whatever the filesystem's own pickling raises)
        log.warning("%s cannot be pickled (%s): it can be used in this process, not in forks of it", type(filesystem).__name__, error)
        return InProcessClient(filesystem, bound=True)


def pickled(value: object) -> bytes:
    """By cloudpickle where that is there: it takes along what is defined in ``__main__``."""
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    return bytes(dumps(value))


def identity(filesystem: Any) -> bytes:
    """What tells a filesystem with its settings from others: the same in all processes, if it can be pickled."""
    try:
        return pickled(filesystem)
    except Exception as error:  # noqa: BLE001 (whatever the filesystem's own pickling raises)
        log.debug("%s is known in this process only: %s", type(filesystem).__name__, error)
        return f"{type(filesystem).__qualname__} {os.getpid()} {id(filesystem)}".encode()


def is_here(filesystem: Any) -> bool:
    """Whether a filesystem has no connections that a fork would break."""
    for name in ("base_fs", "fs", "handler"):  # what a wrapper of pyarrow or fsspec wraps
        if (inner := getattr(filesystem, name, None)) is not None:
            return is_here(inner)
    return not HERE.isdisjoint(protocols_of(filesystem))


def protocols_of(filesystem: Any) -> Sequence[str]:
    """The schemes of its URLs: ``("file", "local")``, ``("s3",)``."""
    inner = getattr(filesystem, "handler", None)
    known: Any = getattr(getattr(inner, "fs", filesystem), "protocol", None) or getattr(filesystem, "type_name", "")
    return (known.removeprefix("py::"),) if isinstance(known, str) else tuple(known)  # as pyarrow calls one that is written in Python


# ------------------------------------------------------------------------------------------------------- in the helper process


class HelperClient:
    """A filesystem that is asked in the helper process. ``filesystem``: its pickle."""

    def __init__(self, filesystem: bytes) -> None:
        self._filesystem = filesystem
        self._name = hashlib.blake2s(filesystem, digest_size=8).hexdigest()  # its settings say where its hosts are

    def stat(self, call: Call, url: str) -> ObjectInfo:
        return ObjectInfo(*self._items(call, "stat", url)[0])

    def parallel(self, call: Call, url: str) -> bool:
        return bool(self._items(call, "parallel", url)[0][0])

    def _items(self, call: Call, verb: str, url: str) -> list[Any]:
        return [json.loads(item) for item in self._ask(call, call.options.read_timeout, verb, url)]

    def read(self, call: Call, url: str, span: Span) -> Iterator[Buffer]:
        patience = call.options.read_timeout + (BLOCK if span.length < 0 else span.length) / SLOWEST
        return self._ask(call, patience, "read", url, span.start, span.length)

    def list(self, call: Call, url: str) -> Iterator[ObjectInfo]:
        return (ObjectInfo(*json.loads(item)) for item in self._ask(call, call.options.read_timeout, "list", url))

    def write(self, call: Call, url: str, source: str | bytes, exclusive: bool, on_sent: Sent) -> ObjectInfo:
        path, body = ("", source) if isinstance(source, bytes) else (source, b"")
        # of some filesystems nothing is heard before all is sent
        patience = call.options.read_timeout + _size(source) / SLOWEST
        for answer in self._ask(call, patience, "write", url, path, exclusive, body=body):
            match json.loads(answer):
                case [done]:
                    call.check()
                    on_sent(done)
                case found:
                    return ObjectInfo(*found)
        raise Trouble("an answer that ends too soon")

    def delete(self, call: Call, url: str) -> None:
        for _ in self._ask(call, call.options.read_timeout, "delete", url):
            raise Trouble("an answer that makes no sense", again=False)

    def _ask(self, call: Call, patience: float, *request: str | int, body: bytes | None = None) -> Iterator[bytearray]:
        """The answer's items or blocks. ``patience``: seconds for each. ``body``: what is sent behind the request."""
        host = f"{'/'.join(call.url.split('/')[:3])} {self._name}" if request[0] in _LOOKING else ""
        if host:
            call.approach(host)
        began, heard = time.monotonic(), False
        with channel(call) as answers:
            with helper_errors():
                helper.send(answers, helper.REQUEST, json.dumps(request).encode())
                helper.send(answers, helper.REQUEST, self._filesystem)
                if body is not None:
                    helper.send(answers, helper.REQUEST, body)
            while True:
                try:
                    with helper_errors():
                        answers.settimeout(call.timeout(patience))
                        kind, payload = helper.receive(answers)
                except Trouble as trouble:
                    if trouble.error is RemoteTimeout and host and not heard:
                        call.unheard(host, began)
                    raise
                failed = helper.from_wire(payload) if kind == helper.ERROR else None
                if host and not heard:
                    heard = True
                    _note(call, host, began, failed)
                if failed is not None:
                    raise failed
                if kind == helper.END:
                    return
                yield payload


def _note(call: Call, host: str, began: float, failed: Exception | None) -> None:
    """Whether a host answers, as the first answer of its client tells. Of an error that names no status nobody knows where it arose."""
    if failed is None:
        call.heard(host)
    elif isinstance(failed, Trouble) and failed.error is RemoteTimeout:
        call.unheard(host, began)
    elif isinstance(failed, Trouble) and (failed.status is not None or failed.error is not RemoteUnavailable):
        call.heard(host)
