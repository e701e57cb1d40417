"""``http://`` and ``https://``."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from typing import TypeAlias

from forebay import errors
from forebay._logs import logger
from forebay._model import Buffer, Content, ObjectInfo, Partial, Sink, Span, Transfer
from forebay.remote.base import AttemptFailed, Call, RemoteOptions, cut_spans, run_parts
from forebay.remote.http import loop
from forebay.remote.http.requests import (
    RETRY_STATUSES,
    AmendHeaders,
    Exchange,
    ExplainRefusal,
    Response,
    Sent,
    Sign,
    content_range,
    ends_before,
    info_of,
    is_etag,
    is_other_version,
    is_same_validator,
    is_shorter,
    is_strong,
)  # fmt: skip
from forebay.remote.http.transfers import HttpTransfer
from forebay.remote.urls import canonical

log = logger("forebay.remote")

MAX_SMALL_BODY = 64 << 20
_NO = frozenset(range(400, 600)) - RETRY_STATUSES | {500}
"""Statuses by which a server may refuse HEAD itself. Those of a server that is busy are not among them."""
MAX_CHANGES = 2  # an object that changes more often during a fetch is given up
LARGE, FIRST_BYTES = 1 << 20, 32 << 10
"""Of an object larger than LARGE, FIRST_BYTES have to arrive before its stated size is believed and space is reserved for it. Other ranges
are requested only afterwards, so this is no more than what arrives at once."""
Describe: TypeAlias = Callable[[ObjectInfo], ObjectInfo]
_SECONDS = re.compile(r"[0-9]{1,11}\Z")


@dataclass(frozen=True, slots=True)
class SmallResponse:
    """A response with its whole body. ``headers``: looked up in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpRemote:
    """A `Remote` over HTTP. Callable from any thread; a forked child has connections of its own.

    ``sign``, ``explain``, ``amend``: how a protocol over HTTP, such as S3, sends its requests, explains its refusals, and means the headers
    of its responses. ``raw``: Content-Encoding is a property of the object, not of the response. ``bundle``: see `Tls`."""

    def __init__(
        self, options: RemoteOptions | None = None, sign: Sign | None = None, explain: ExplainRefusal | None = None,
        amend: AmendHeaders | None = None, *, raw: bool = False, bundle: Callable[[], str] | None = None,
    ) -> None:  # fmt: skip
        self.options = options or RemoteOptions()
        self._check_options = self.options.for_check()
        self._exchange = Exchange(self.options, sign, explain, amend, raw=raw, bundle=bundle)

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`. Sends a HEAD request. Some servers know no HEAD, and refuse it as if the object did not exist: a refusal is
        believed only if a GET request for one byte is refused, too."""
        with Call(url, self.options if known is None else self._check_options) as call:
            call.is_optional = known is not None
            info = call.retry(lambda: self._stat(call, url, _conditions(known)))
        return None if info is None or (known is not None and is_same_validator(info.validator, known)) else info

    def _stat(self, call: Call, url: str, conditions: dict[str, str]) -> ObjectInfo | None:
        unchanged = (304,) if conditions else ()  # to a request without a condition it is no answer
        with self._exchange.send(call, "HEAD", url, conditions, ok=(200, *unchanged, *_NO)) as response:
            if response.status == 304:
                return None
            if response.status == 200:
                return info_of(url, response.headers, response.length if not response.encoding else None)
        headers = {**conditions, "Range": "bytes=0-0"}
        with self._exchange.send(call, "GET", url, headers, ok=(200, 206, *unchanged, 416)) as response:
            if response.status == 304:
                return None
            if response.status == 206:
                response.drain()
                return info_of(url, response.headers, content_range(response, Span(0, 1)).total)
            if response.status == 200:
                return info_of(url, response.headers, response.length if not response.encoding else None)
        with self._exchange.send(call, "GET", url, conditions, ok=(200, *unchanged)) as response:  # empty: it has no first byte
            return None if response.status == 304 else info_of(url, response.headers, response.length)

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None, describe: Describe | None = None) -> Transfer:
        """See `Remote.fetch`. ``describe``: see `HttpDownload`."""
        return HttpDownload(self._exchange, url, describe).into(sink)

    def fetch_changed(self, url: str, sink: Sink, known: str | None) -> Transfer | None:
        """See `CheckingRemote.fetch_changed`."""
        return HttpDownload(self._exchange, url).into_if_changed(sink, known, self._check_options)

    def start(self, url: str, on_ready: Callable[[], None], describe: Describe | None = None) -> HttpDownload | None:
        """See `StartingRemote.start`. ``describe``: see `HttpDownload`."""
        download = HttpDownload(self._exchange, url, describe)
        try:
            download.start(on_ready)
        except (errors.RemoteError, AttemptFailed) as error:  # `fetch` raises it, after its other attempts
            log.debug("%s", error)
            return None
        return download

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """See `Remote.read`."""
        if span.length == 0:
            return b""
        with Call(url, self.options) as call:
            return call.retry(lambda: self._read(call, url, span, info or ObjectInfo(url, None, validator), exact))

    def _read(self, call: Call, url: str, span: Span, known: ObjectInfo, exact: bool) -> bytes:
        headers, validator = {"Range": f"bytes={span.start}-{span.end - 1}"}, known.validator
        if validator is not None and is_strong(validator):
            headers["If-Match"] = validator
        with self._exchange.send(call, "GET", url, headers, ok=(200, 206, 412, 416)) as response:
            if response.status == 416:
                response.drain()
                if exact and known.size is not None and span.end <= known.size and not is_shorter(response.headers, span):
                    raise errors.Unsupported(f"{call.url}: the server refuses a range that the object has", url=call.url)
                if validator is not None and not ends_before(known, response.headers, span):
                    raise changed(call.url)
                return b""
            if response.status == 412:
                response.drain()
                raise changed(call.url)
            size = content_range(response, span).total if response.status == 206 else response.length
            if is_other_version(known, response.headers, None if response.encoding else size):
                raise changed(call.url)
            if exact and response.status == 200 and (span.start or size is None or size > span.end):
                raise errors.Unsupported(f"{call.url}: the server sends the whole object instead of a range", url=call.url)
            if response.encoding and response.status == 206:
                message = f"{call.url}: a range of a compressed body cannot be decompressed"
                raise errors.RemoteProtocolError(message, url=call.url, status=206)
            if response.encoding:
                return _cut_out(response.decoded(), span)
            if response.status == 200:
                response.skip(span.start)
            data = b"".join(response.blocks(span.length))
        if size is not None and len(data) < min(span.end, size) - span.start:
            raise AttemptFailed("less than was asked for")
        return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """HTTP has no listing: raises `RemoteError`."""
        key = canonical(url)
        raise errors.RemoteError(f"{key}: HTTP cannot list the objects below a URL", url=key)

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """HTTP servers have no common way to accept writes: raises `Unsupported`."""
        raise _unsupported(url)

    def delete(self, url: str) -> None:
        """As `write`."""
        raise _unsupported(url)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        *,
        ok: Container[int] = (200,),
        call: Call | None = None,
    ) -> SmallResponse:
        """Send one request and read its whole response, as a part of ``call`` if given. It is retried as a read is, so it must be safe to
        send twice. Raises `RemoteError` for a status that is not in ``ok``."""
        if call is None:
            with Call(url, self.options) as call:
                return self.request(method, url, headers, body, ok=ok, call=call)

        def attempt() -> SmallResponse:
            with self._exchange.send(call, method, url, headers or {}, ok=ok, body=body) as response:
                data = bytearray()
                for block in response.decoded():
                    data += block
                    if len(data) > MAX_SMALL_BODY:
                        message = f"{call.url}: an answer of more than {MAX_SMALL_BODY:,} bytes where a small one is due"
                        raise errors.RemoteProtocolError(message, url=call.url)
                return SmallResponse(response.status, response.headers, bytes(data))

        return call.retry(attempt)


def _unsupported(url: str) -> errors.Unsupported:
    key = canonical(url)
    return errors.Unsupported(f"{key}: nothing can be written over HTTP: give the s3:// URL, or the path, behind it", url=key)


def changed(url: str) -> errors.RemoteChanged:
    """``url``: without secrets."""
    return errors.RemoteChanged(f"{url} changed to another object while being read", url=url)


def _conditions(known: str | None) -> dict[str, str]:
    """Headers that let the server send no body if the validator is still ``known`` (an ETag, as it was sent, or ``mtime-size``)."""
    if known is None:
        return {}
    if is_etag(known):
        return {"If-None-Match": known}
    seconds = known.partition("-")[0]
    return {"If-Modified-Since": formatdate(int(seconds), usegmt=True)} if _SECONDS.match(seconds) else {}


def _cut_out(blocks: Iterator[Buffer], span: Span) -> bytes:
    """``span`` of a body, with no more than that in memory."""
    data, at = bytearray(), 0
    for block in blocks:
        data += memoryview(block)[max(0, span.start - at) : max(0, span.end - at)]
        at += len(block)
        if at >= span.end:
            break
    return bytes(data)


# -- fetching ----------------------------------------------------------------------------------------------------------


class HttpDownload:
    """A `Started`: one object on its way into a sink.

    1. The first request asks for the first part, so that a small object costs one request. Status 206 gives size and
       validator; 200 comes from a server that ignores Range: its one stream is read as it arrives.
    2. With a strong validator the other parts are fetched in parallel, each under If-Match and compared with the first.
       A part that is cut continues where it ended. Without a strong validator, ranges could mix two versions, so the
       object is requested whole.

    If the object changes during the fetch, it is fetched again, the second time as one stream, which cannot mix versions:
    an object behind several servers, each with its own ETag, seems to change all the time. Then raises `RemoteChanged`.

    ``describe``: takes the description in a response, and returns the one for the sink. May raise `RemoteError`."""

    def __init__(self, exchange: Exchange, url: str, describe: Describe | None = None) -> None:
        self._exchange, self._url, self._describe = exchange, url, describe
        self._sink: Sink
        self._call = Call(url, exchange.options)
        self._sent: Sent | None = None
        self._response: Response | None = None  # the first one, if it is there
        self._is_here = self._whole = False  # whole: ask without Range
        self._previous: Partial | None = None
        self._info = ObjectInfo(url, None)
        self._spans: tuple[Span, ...] = ()  # what the sink asked for

    def start(self, on_ready: Callable[[], None]) -> None:
        """Send the first request."""
        headers = {"Range": f"bytes=0-{self._call.options.part - 1}"}
        self._sent = self._exchange.start(self._call, "GET", self._url, headers, on_ready=on_ready)

    def is_here(self, most: int) -> bool:
        """See `Started.is_here`."""
        transfer = self._sent.transfer if self._sent is not None else None
        if transfer is None or not transfer.is_complete or transfer.waiting > most or "Content-Encoding" in transfer.headers:
            return False
        size = transfer.waiting
        whole = f"bytes 0-{size - 1}/{size}"
        self._is_here = transfer.status == 200 or (transfer.status == 206 and transfer.headers.get("Content-Range") == whole)
        return self._is_here

    def close(self) -> None:
        """See `Started.close`."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.transfer.close()

    def into(self, sink: Sink) -> Transfer:
        """See `Started.into`."""
        self._sink, self._previous = sink, sink.partial
        try:
            if self._previous is not None and self._response is None:  # another part is asked for
                self.close()
            if self._is_here and self._sent is not None:
                return self._take_what_is_here(self._sent.transfer)
            for changes in range(MAX_CHANGES + 1):
                self._whole = changes == MAX_CHANGES
                with self._call as call:
                    try:
                        call.retry(self._attempt)
                        break
                    except errors.RemoteChanged:
                        if changes == MAX_CHANGES:
                            raise
                        self._previous = None
                self._call = call.restarted()
            return self._call.transfer
        finally:
            self.close()
            del self._sink  # with the bytes that it holds

    def into_if_changed(self, sink: Sink, known: str | None, options: RemoteOptions) -> Transfer | None:
        """`into`, unless the object still has the validator ``known``: then None. ``options``: with which it is asked whether it has."""
        call, partial = self._call, sink.partial
        call.is_optional = True
        until = math.inf if call.until is None else call.until
        call.until = min(until, time.monotonic() + (options.total_timeout or math.inf))
        first = self._first_span(partial)
        headers = self._headers_of(first, partial) | _conditions(known)

        def ask() -> Response:
            return self._exchange.send(call, "GET", self._url, headers, ok=(200, 206, *([304] if known else []), 416))

        try:
            response = call.retry(ask, options.attempts)
            size = response.length if response.status == 200 and not response.encoding else None
            if response.status == 206:
                size = content_range(response, first).total
            is_same = known is not None and is_same_validator(info_of(self._url, response.headers, size).validator, known)
            if response.status == 304 or (response.status in (200, 206) and is_same):  # it may ignore conditions
                response.close()
                call.abort()
                return None
        except BaseException:
            call.abort()
            raise
        call.until = None if until == math.inf else until
        response.extend(until)
        self._response = response
        return self.into(sink)

    def _take_what_is_here(self, transfer: HttpTransfer) -> Transfer:
        """The whole object, by one response: there is nothing to wait for, to repeat or to resume."""
        self._call.host_answered(transfer.request.way)
        data = transfer.read(transfer.waiting)
        self._call.count(received=len(data))
        if self._begin(info_of(self._url, transfer.headers, len(data))):
            self._sink.write(0, data)
        return self._call.transfer

    def _attempt(self) -> None:
        """Fetch one version of the object. Starts over unless it could resume by itself."""
        done = False
        while not done:
            first = None if self._whole else self._first_span(self._previous)
            headers = {} if first is None else self._headers_of(first, self._previous)
            ok = (200,) if first is None else (200, 206, 416)
            sent, self._sent, given, self._response = self._sent, None, self._response, None
            with given or self._exchange.send(self._call, "GET", self._url, headers, ok=ok, sent=sent) as response:
                if first is None or response.status == 200:
                    self._take_whole(response)
                    done = True
                elif response.status == 206:
                    done = self._take_range(response, first)
                else:
                    # 416: the object is empty (its validator comes only with the whole object), or shorter than what was kept of it
                    response.drain()
                    self._whole, self._previous = self._previous is None, None

    def _first_span(self, previous: Partial | None) -> Span:
        """What the first request asks for: the beginning of the object, or of what was not kept of it."""
        part = self._call.options.part
        if previous is None:
            return Span(0, part)
        missing = previous.missing[0] if previous.missing else Span(0, 1)
        return Span(missing.start, min(missing.length, part))

    @staticmethod
    def _headers_of(first: Span, previous: Partial | None) -> dict[str, str]:
        condition = {} if previous is None else {"If-Range": previous.validator}
        return {"Range": f"bytes={first.start}-{first.end - 1}", **condition}

    def _take_whole(self, response: Response) -> None:
        size = response.length if not response.encoding else None
        if size is not None and size > LARGE:
            response.wait_for(FIRST_BYTES)
        self._begin(info_of(self._url, response.headers, size))
        if size is None or not self._info.strong:
            self._take_stream(response)
        elif self._spans:
            self._fetch(Span(0, size), response)

    def _take_range(self, response: Response, first: Span) -> bool:
        """Fetch the object, of which ``response`` holds a first span. False: send the request again, in another way."""
        span, total = content_range(response, first)
        info = info_of(self._url, response.headers, total)
        previous = self._previous
        if previous is not None and (info.validator != previous.validator or total != previous.size):
            self._previous = None  # the server ignores If-Range
            return False
        if total is None or response.encoding or not (info.strong or span.length == total):
            self._whole = True
            return False
        if total > LARGE and span.length < min(first.length, FIRST_BYTES):  # too little to believe a size by
            self._whole = True
            return False
        if total > LARGE:
            response.wait_for(min(span.length, FIRST_BYTES))
        self._begin(info)
        if not info.strong:
            self._take_stream(response)
            return True
        if previous is not None:
            self._call.transfer.resumed = total - sum(missing.length for missing in self._spans)
        if (span,) == self._spans:  # all of a small object
            self._fetch(span, response)
        else:
            self._fetch_all(span, response)
        return True

    def _take_stream(self, response: Response) -> None:
        """A whole body in one go: where it is cut, the next attempt starts over, since the rest may be another version's."""
        memory_limit = getattr(self._sink, "most", None) if response.encoding else None
        at, limit = 0, memory_limit() if memory_limit is not None else None
        for block in response.decoded():
            if limit is not None and at + len(block) > limit:
                advice = "what it is compressed from may be of any size, and is read into memory up to the budget only"
                raise errors.NoSpace.of(self._call.url, at + len(block), limit, limit, advice, hopeless=True)
            self._write(at, block)
            at += len(block)

    def _begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        self._info = info
        described = self._call.transfer.info = info if self._describe is None else self._describe(info)
        self._spans = self._sink.begin(described)
        return self._spans

    def _write(self, at: int, block: Buffer) -> None:
        """Write to the sink the bytes that it asked for."""
        end = at + len(block)
        for span in self._spans:
            if span.length < 0 or (span.start <= at and end <= span.end):
                self._sink.write(at, block)
            elif span.start < end and at < span.end:
                low, high = max(at, span.start), min(end, span.end)
                self._sink.write(low, memoryview(block)[low - at : high - at])

    def _fetch_all(self, first: Span, response: Response) -> None:
        """All spans of the sink, ``first`` from ``response``, which is open."""
        options = self._call.options
        rest = [piece for span in self._spans for piece in _without(span, first)]
        first_is_missing = any(span.start < first.end and first.start < span.end for span in self._spans)
        needed = -(-sum(span.length for span in rest) // options.part)
        threads = min(options.streams - 1, needed, options.connections - loop.running())
        # Never touched: glibc keeps freed blocks of up to this size for the next ones. It would give each back to the kernel and have its
        # pages zeroed again, which takes a fifth of the CPU time of a large fetch.
        bytearray(2 * options.buffer)

        def tasks() -> Iterator[Callable[[], None]]:
            if first_is_missing:
                yield partial(self._fetch, first, response)
            for span in cut_spans(rest, options.part):
                yield partial(self._fetch, span)

        run_parts(tasks(), threads, self._call)

    def _fetch(self, span: Span, response: Response | None = None) -> None:
        """All bytes of ``span``, from ``response`` as far as that goes; a new request continues where one was cut."""
        at = span.start

        def attempt() -> None:
            nonlocal at, response
            current, response = response, None
            with current or self._open_range(Span(at, span.end - at)) as body:
                for block in body.blocks(span.end - at):
                    self._write(at, block)
                    at += len(block)

        while at < span.end:
            before = at
            self._call.retry(attempt)
            if at == before:
                raise errors.RemoteProtocolError(f"{self._call.url}: an empty answer for byte {at:,}", url=self._call.url)

    def _open_range(self, span: Span) -> Response:
        """The response whose body begins with ``span``, of the version that was passed to the sink. Raises `RemoteChanged`."""
        info, call = self._info, self._call
        headers = {"Range": f"bytes={span.start}-{span.end - 1}", "If-Match": info.validator or "*"}
        response = self._exchange.send(call, "GET", self._url, headers, ok=(200, 206, 412, 416))
        try:
            if response.status in (412, 416):
                response.drain()
                raise changed(call.url)
            if response.status == 206:
                total = content_range(response, span).total
                other = info_of(self._url, response.headers, total).validator != info.validator
                if other or total != info.size or response.encoding:
                    raise changed(call.url)
            elif info_of(self._url, response.headers, response.length) != info:
                raise changed(call.url)
            else:
                response.skip(span.start)
        except BaseException:
            response.close()
            raise
        return response


def _without(span: Span, other: Span) -> Iterator[Span]:
    """The parts of ``span`` that are not in ``other``."""
    if other.end <= span.start or span.end <= other.start:
        yield span
        return
    if span.start < other.start:
        yield Span(span.start, other.start - span.start)
    if other.end < span.end:
        yield Span(other.end, span.end - other.end)
