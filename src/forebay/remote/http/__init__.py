"""``http://`` and ``https://``."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from email.utils import formatdate

from forebay import errors
from forebay._model import Buffer, Content, ObjectInfo, Sink, Span, Transfer
from forebay.remote.base import Call, RemoteOptions, Trouble
from forebay.remote.http.answers import info_of, is_end, is_etag, is_other, is_same, ranged, stated_length
from forebay.remote.http.download import Download, changed
from forebay.remote.http.exchange import Exchange, Judge, Sign
from forebay.remote.urls import canonical

MAX_REPLY = 64 << 20
_MOMENT = re.compile(r"[0-9]{1,11}\Z")
CHANGES = 2  # an object that changes more often while it is fetched is given up


@dataclass(frozen=True, slots=True)
class Reply:
    """A small answer, whole. ``headers``: looked up in any case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class HttpRemote:
    """A `Remote` over HTTP. Callable from any thread; a forked child has connections of its own.

    ``sign``, ``judge``: how a protocol over HTTP, such as S3, sends its requests and reads its refusals. ``raw``: Content-Encoding is
    a property of the object there, not of the answer."""

    def __init__(
        self, options: RemoteOptions | None = None, sign: Sign | None = None, judge: Judge | None = None, *, raw: bool = False
    ) -> None:
        self.options = options or RemoteOptions()
        self._checking = self.options.brief()
        self._exchange = Exchange(self.options, sign, judge, raw=raw)

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`. Asks by HEAD, or for one byte where the server refuses HEAD."""
        with Call(url, self.options if known is None else self._checking) as call:
            info = call.retrying(lambda: self._stat(call, url, _conditions(known)))
        return None if info is None or (known is not None and is_same(info.validator, known)) else info

    def _stat(self, call: Call, url: str, conditions: dict[str, str]) -> ObjectInfo | None:
        with self._exchange.ask(call, "HEAD", url, conditions, ok=(200, 304, 400, 401, 403, 405, 501)) as answer:
            if answer.status == 304:
                return None
            if answer.status == 200:
                return info_of(url, answer.headers, stated_length(answer.headers) if not answer.encoding else None)
        asked = {**conditions, "Range": "bytes=0-0"}
        with self._exchange.ask(call, "GET", url, asked, ok=(200, 206, 304, 416)) as answer:
            if answer.status == 304:
                return None
            if answer.status == 206:
                answer.drain()
                return info_of(url, answer.headers, ranged(answer, Span(0, 1)).total)
            if answer.status == 200:
                return info_of(url, answer.headers, answer.length if not answer.encoding else None)
        with self._exchange.ask(call, "GET", url, conditions, ok=(200, 304)) as answer:  # empty: no byte to ask for
            return None if answer.status == 304 else info_of(url, answer.headers, answer.length)

    def fetch(self, url: str, sink: Sink) -> Transfer:
        """See `Remote.fetch`. An object that changes meanwhile is begun anew, the second time as one stream, which cannot mix
        versions (a server behind which several have ETags of their own seems to change all the time); then `RemoteChanged`."""
        call, kept = Call(url, self.options), sink.partial
        for turn in range(CHANGES + 1):
            with call:
                try:
                    call.retrying(Download(self._exchange, call, url, sink, kept, whole=turn == CHANGES))
                    break
                except errors.RemoteChanged:
                    if turn == CHANGES:
                        raise
                    kept = None
            call = call.again()
        return call.transfer

    def read(self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None) -> bytes:
        """See `Remote.read`."""
        if span.length == 0:
            return b""
        with Call(url, self.options) as call:
            return call.retrying(lambda: self._read(call, url, span, info or ObjectInfo(url, None, validator)))

    def _read(self, call: Call, url: str, span: Span, known: ObjectInfo) -> bytes:
        headers, validator = {"Range": f"bytes={span.start}-{span.end - 1}"}, known.validator
        if validator is not None and validator.startswith('"'):
            headers["If-Match"] = validator
        with self._exchange.ask(call, "GET", url, headers, ok=(200, 206, 412, 416)) as answer:
            if answer.status == 416:
                answer.drain()
                if validator is not None and not is_end(known, answer.headers, span):
                    raise changed(call.url)
                return b""
            if answer.status == 412:
                answer.drain()
                raise changed(call.url)
            size = ranged(answer, span).total if answer.status == 206 else answer.length
            if is_other(known, answer.headers, None if answer.encoding else size):
                raise changed(call.url)
            if answer.encoding and answer.status == 206:
                raise errors.RemoteProtocolError(f"{call.url}: a range of a compressed body tells nothing", url=call.url, status=206)
            if answer.encoding:
                return _cut_out(answer.content(), span)
            if answer.status == 200:
                answer.skip(span.start)
            data = b"".join(answer.blocks(span.length))
        if size is not None and len(data) < min(span.end, size) - span.start:
            raise Trouble("less than was asked for")
        return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """HTTP knows no listing: raises `RemoteError`."""
        key = canonical(url)
        raise errors.RemoteError(f"{key}: HTTP cannot list what begins with a URL", url=key)

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """No HTTP server takes writes in a way that others share: raises `Unsupported`."""
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
    ) -> Reply:
        """Send one request and read its whole answer, as a part of ``call`` if given. Tried again as a read is: the request must be
        one that may be sent twice. Raises `RemoteError` for a status that is not in ``ok``."""
        if call is None:
            with Call(url, self.options) as call:
                return self.request(method, url, headers, body, ok=ok, call=call)

        def once() -> Reply:
            with self._exchange.ask(call, method, url, headers or {}, ok=ok, body=body) as answer:
                return Reply(answer.status, answer.headers, _small(call, answer.content()))

        return call.retrying(once)


def _unsupported(url: str) -> errors.Unsupported:
    key = canonical(url)
    return errors.Unsupported(f"{key}: nothing can be written over HTTP: give the s3:// URL, or the path, behind it", url=key)


def _conditions(known: str | None) -> dict[str, str]:
    """Headers by which the server need not answer if ``known`` (an ETag, or ``mtime-size``) is still so."""
    if known is None:
        return {}
    if is_etag(known):
        return {"If-None-Match": known}
    seconds = known.partition("-")[0]
    return {"If-Modified-Since": formatdate(int(seconds), usegmt=True)} if _MOMENT.match(seconds) else {}


def _cut_out(blocks: Iterator[Buffer], span: Span) -> bytes:
    """``span`` of what comes, and no more in memory."""
    found, at = bytearray(), 0
    for block in blocks:
        found += memoryview(block)[max(0, span.start - at) : max(0, span.end - at)]
        at += len(block)
        if at >= span.end:
            break
    return bytes(found)


def _small(call: Call, blocks: Iterator[Buffer]) -> bytes:
    body = bytearray()
    for block in blocks:
        body += block
        if len(body) > MAX_REPLY:
            message = f"{call.url}: an answer of more than {MAX_REPLY:,} bytes where a small one is due"
            raise errors.RemoteProtocolError(message, url=call.url)
    return bytes(body)
