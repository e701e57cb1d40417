"""Responses: what status and headers mean, and a body whose bytes are counted."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple, Self

from forebay import errors
from forebay._logs import escaped
from forebay._model import Buffer, ObjectInfo, Span
from forebay.remote.base import AttemptFailed, Call
from forebay.remote.http.transfers import HttpTransfer

RETRY_STATUSES = frozenset({408, 425, 429, 500, 502, 503, 504, 507, 509, 520, 521, 522, 523, 524, 529})
JOIN_UP_TO = 64 << 10  # bytes: smaller pieces are joined, since each block costs its receiver more than a copy
MAX_SIZE = (1 << 63) - 1
WINDOW = 8 << 10  # bytes of a compressed body of several members that zlib gets at once
MEMBERS, SHORT_MEMBER = 10_000, 128  # a server may send so many members of a gzip body that have fewer bytes than that
DRAIN = 64 << 10  # bytes of an unused body that are read so that its connection can be kept
_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)\Z", re.IGNORECASE)
_SIZE = re.compile(r"[0-9]{1,19}\Z")


class Response:
    """``status``, ``headers``, and a body that is still to be read: ``length`` bytes as sent, None where the server does not state it.

    A context manager: at its end the connection is kept if the body was read to its end, else closed."""

    def __init__(self, transfer: HttpTransfer, call: Call, *, has_body: bool = True, raw: bool = False) -> None:
        self.status, self.reason = transfer.status, transfer.reason
        self.headers: Mapping[str, str] = transfer.headers
        self._transfer, self.call = transfer, call
        try:
            length = content_length(self.headers)
        except AttemptFailed:
            self.close()
            raise
        self.length = length if has_body and self.status not in (204, 304) else 0
        encoding = self.headers.get("Content-Encoding", "").strip().lower()
        self.encoding = "" if raw or encoding == "identity" else encoding

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

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


def content_length(headers: Mapping[str, str]) -> int | None:
    """The number in Content-Length; None where there is none that counts. Raises `AttemptFailed` for an impossible length."""
    text = headers.get("Content-Length")
    if text is None or "chunked" in re.split(r"\s*,\s*", headers.get("Transfer-Encoding", "").strip().lower()):
        return None
    lengths = {each.strip() for each in text.split(",")}
    length = lengths.pop()
    if lengths or not _SIZE.match(length) or int(length) > MAX_SIZE:
        raise AttemptFailed(f"an answer of {text[:40]!r} bytes", errors.RemoteProtocolError, retryable=False)
    return int(length)


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
    etag = headers.get("ETag", "").strip() or None
    if etag is None and modified is not None and size is not None:
        etag = f"{modified:.0f}-{size}"
    return ObjectInfo(url, size, etag, strong=bool(etag and etag.startswith('"') and size is not None), modified=modified)


def is_same_validator(one: str | None, other: str | None) -> bool:
    """Weak comparison, as HTTP defines it for If-None-Match."""
    return one is not None and other is not None and one.removeprefix("W/") == other.removeprefix("W/")


def is_other_version(known: ObjectInfo, headers: Mapping[str, str], size: int | None) -> bool:
    """Whether a response is of another version than ``known``. A strong ETag has to be repeated; for other validators, a missing header
    means nothing: many servers omit it from responses to GET, or from ranges. ``size``: bytes of the whole object, if stated.

    Without two ETags to compare, time and size are compared, as far as both are known."""
    etag, modified, validator = headers.get("ETag", "").strip(), _timestamp(headers.get("Last-Modified")), known.validator
    if validator is not None and not is_etag(validator):
        seconds, _, length = validator.rpartition("-")
        return (modified is not None and f"{modified:.0f}" != seconds) or (size is not None and str(size) != length)
    if validator is not None and (etag or validator.startswith('"')):
        return not is_same_validator(etag, validator)
    return any(None not in (one, other) and one != other for one, other in ((modified, known.modified), (size, known.size)))


def ends_before(known: ObjectInfo, headers: Mapping[str, str], span: Span) -> bool:
    """Whether a response 416 means that the version ``known`` ends before ``span``, and not that another, shorter one does."""
    etag, validator = headers.get("ETag", "").strip(), known.validator or ""
    if etag and is_etag(validator):
        return is_same_validator(etag, validator)
    if is_etag(validator):
        return validator.startswith('"')  # the request had an If-Match header
    size = validator.rpartition("-")[2]
    return not is_other_version(known, headers, None) and size.isdecimal() and int(size) <= span.start


def is_shorter(headers: Mapping[str, str], span: Span) -> bool:
    """Whether a response 416 says that the object ends before ``span``."""
    size = headers.get("Content-Range", "").rpartition("*/")[2].strip()
    return size.isdecimal() and int(size) <= span.start


def is_etag(validator: str) -> bool:
    return validator.startswith(('"', 'W/"'))


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
