"""One HTTP answer: what its headers say of the object, and its body, of which every byte is counted."""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from functools import lru_cache
from types import TracebackType
from typing import NamedTuple, Self

from urllib3 import BaseHTTPResponse

from forebay._model import Buffer, ObjectInfo, Span
from forebay.errors import RemoteProtocolError
from forebay.remote.base import Call, Trouble
from forebay.remote.http.connections import Connections, network_errors

SMALL = 64 << 10  # pieces are put together up to this: each block costs its taker more than a copy
LARGE, SURE = 1 << 20, 32 << 10
"""Of an object of more than so many bytes, so many have to come before its size is believed and room is made for all of it. Other ranges
are asked for afterwards only, so it is no more than what comes at once."""
MAX_SIZE = (1 << 63) - 1
DRAIN = 64 << 10  # a body that nobody wants is read up to this, so that its connection can be kept
_RANGE = re.compile(r"bytes\s+([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19}|\*)\Z", re.IGNORECASE)
_SIZE = re.compile(r"[0-9]{1,19}\Z")


class Answer:
    """``status``, ``headers``, and a body that is still to come: ``length`` bytes as sent, None where the server does not say.

    A context manager: left, its connection is kept if the body was read to its end, else closed."""

    def __init__(self, response: BaseHTTPResponse, pool: Connections, call: Call, *, raw: bool = False) -> None:
        self.status, self.reason, self.headers = response.status, response.reason or "", response.headers
        try:
            stated_length(self.headers)
        except Trouble:
            response.close()
            raise
        self.length = response.length_remaining
        self._ahead = b""
        encoding = self.headers.get("Content-Encoding", "").strip().lower()
        self.encoding = "" if raw or encoding == "identity" else encoding
        self._response, self._pool, self.call, self._open = response, pool, call, True
        pool.busy(1)
        self._sock = getattr(response.connection, "sock", None)  # None: there is no body, and the connection is free again
        if self._sock is not None:
            try:
                call.hold(self._sock)
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if not self._open:
            return
        self._open = False
        try:
            if self._response.connection is None:
                pass  # its body was read to the end, which gave it back
            elif self._response.length_remaining == 0:
                self._response.drain_conn()  # nothing is left, of a HEAD for one: the connection can be kept
            else:
                self._response.close()  # a connection with a body that nobody read to its end is of no more use
        finally:
            self._pool.busy(-1)
            if self._sock is not None:
                self.call.let_go(self._sock)

    def blocks(self, limit: int | None = None, *, count: bool = True) -> Iterator[bytes]:
        """The body as sent, as it comes; at most ``limit`` bytes. ``count``: as received.
        Raises `Trouble` where it ends too early, after all that came before."""
        left, trouble = 1 << 62 if limit is None else limit, None
        while left > 0 and trouble is None:
            pieces, size, room = [], 0, min(left, self.call.options.buffer)
            try:
                while size < min(room, SMALL) and (piece := self._piece(room - size)):
                    pieces.append(piece)
                    size += len(piece)
            except Trouble as error:
                trouble = error
            if pieces:
                if count:
                    self.call.count(received=size)
                left -= size
                yield b"".join(pieces)
            elif trouble is None:
                return
        if trouble is not None:
            raise trouble

    def secure(self, count: int) -> None:
        """Wait for the first ``count`` bytes of the body, which `blocks` then gives. Raises `Trouble` if fewer come."""
        ahead = bytearray()
        try:
            for block in self.blocks(count, count=False):
                ahead += block
            if len(ahead) < count:
                raise Trouble(f"the connection was cut {(self.length or count) - len(ahead):,} bytes before the end")
        except Trouble:
            self.call.count(received=len(ahead))
            raise
        self._ahead = bytes(ahead)

    def _piece(self, size: int) -> bytes:
        """What is there, at most ``size`` bytes; waits for the first. Empty: the body has ended."""
        if self._ahead:
            piece, self._ahead = self._ahead[:size], self._ahead[size:]
            return piece
        self.call.check()
        with network_errors:
            return self._response.read1(size, decode_content=False)

    def skip(self, count: int) -> None:
        """Read ``count`` bytes that are not wanted, or all where there are fewer."""
        for _ in self.blocks(count):
            continue

    def content(self) -> Iterator[Buffer]:
        """The body as it was before the server compressed it."""
        if not self.encoding:
            yield from self.blocks()
        elif self.encoding in ("gzip", "x-gzip", "deflate"):
            yield from _inflated(self.blocks())
        else:
            raise Trouble(f"it is sent as {self.encoding!r}, though only identity was asked for", RemoteProtocolError, again=False)

    def drain(self) -> bytes:
        """The beginning of a body that tells nothing of the object; what of it is short enough is read to its end."""
        return b"".join(self.blocks(DRAIN, count=False))


def _inflated(blocks: Iterator[bytes]) -> Iterator[bytes]:
    inflate = zlib.decompressobj(wbits=47)  # gzip or zlib, as its header says
    for block in blocks:
        rest: Buffer = block
        while rest:
            if inflate.eof:  # a gzip file may have several members
                inflate = zlib.decompressobj(wbits=47)
            try:
                piece = inflate.decompress(rest, 1 << 20)
            except zlib.error as error:
                raise Trouble(f"its compressed body is damaged: {error}", RemoteProtocolError) from error
            rest = inflate.unconsumed_tail or inflate.unused_data
            if piece:
                yield piece
    if not inflate.eof:
        raise Trouble("its compressed body was cut")


def stated_length(headers: Mapping[str, str]) -> int | None:
    """What Content-Length says; None where it says nothing, or nothing that counts. Raises `Trouble` for what no length can be."""
    stated = headers.get("Content-Length")
    if stated is None or "chunked" in re.split(r"\s*,\s*", headers.get("Transfer-Encoding", "").strip().lower()):
        return None
    several = {each.strip() for each in stated.split(",")}
    text = several.pop()
    if several or not _SIZE.match(text) or int(text) > MAX_SIZE:
        raise Trouble(f"an answer of {stated[:40]!r} bytes", RemoteProtocolError, again=False)
    return int(text)


class Ranged(NamedTuple):
    """What an answer 206 holds: ``span`` of an object of ``total`` bytes, None where the server does not say."""

    span: Span
    total: int | None


def ranged(answer: Answer, asked: Span) -> Ranged:
    """The beginning of ``asked``, or all of it. Raises `RemoteProtocolError` if the answer holds something else."""
    said = answer.headers.get("Content-Range", "no Content-Range")
    found = _RANGE.match(said.strip())
    if found is not None:
        start, end, total = int(found[1]), int(found[2]) + 1, None if found[3] == "*" else int(found[3])
        fits = start == asked.start and start < end <= min(asked.end, end if total is None else total) and (total or 0) <= MAX_SIZE
        if fits and answer.length in (None, end - start):
            return Ranged(Span(start, end - start), total)
    url, said = answer.call.url, said[:80]
    raise RemoteProtocolError(
        f"{url}: bytes {asked.start}-{asked.end - 1} asked for, {said!r} answered with {answer.length} bytes",
        url=url,
        status=answer.status,
    )


def info_of(url: str, headers: Mapping[str, str], size: int | None) -> ObjectInfo:
    """What an answer says of the object. ``size``: bytes of the whole, as they will be stored."""
    modified = _seconds(headers.get("Last-Modified"))
    etag = headers.get("ETag", "").strip() or None
    if etag is None and modified is not None and size is not None:
        etag = f"{modified:.0f}-{size}"
    return ObjectInfo(url, size, etag, strong=bool(etag and etag.startswith('"') and size is not None), modified=modified)


def is_same(one: str | None, other: str | None) -> bool:
    """Weak comparison, as HTTP has it for If-None-Match."""
    return one is not None and other is not None and one.removeprefix("W/") == other.removeprefix("W/")


def is_other(known: ObjectInfo, headers: Mapping[str, str], size: int | None) -> bool:
    """Whether an answer is of another version than ``known``. An ETag that is strong has to be told; of another validator, what an
    answer does not tell is no sign: many servers leave it out of answers to GET, or of ranges. ``size``: bytes of the whole, if told.

    Where there are no two ETags to compare, time and size are, as far as both tell them."""
    etag, modified, validator = headers.get("ETag", "").strip(), _seconds(headers.get("Last-Modified")), known.validator
    if validator is not None and not is_etag(validator):
        seconds, _, length = validator.rpartition("-")
        return (modified is not None and f"{modified:.0f}" != seconds) or (size is not None and str(size) != length)
    if validator is not None and (etag or validator.startswith('"')):
        return not is_same(etag, validator)
    return any(None not in (one, other) and one != other for one, other in ((modified, known.modified), (size, known.size)))


def is_end(known: ObjectInfo, headers: Mapping[str, str], span: Span) -> bool:
    """Whether an answer 416 tells that the version ``known`` ends before ``span``: and not that another one does, which is shorter."""
    etag, validator = headers.get("ETag", "").strip(), known.validator or ""
    if etag and is_etag(validator):
        return is_same(etag, validator)
    if is_etag(validator):
        return validator.startswith('"')  # it was asked under If-Match
    size = validator.rpartition("-")[2]
    return not is_other(known, headers, None) and size.isdecimal() and int(size) <= span.start


def is_etag(validator: str) -> bool:
    return validator.startswith(('"', 'W/"'))


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Seconds from now; the header gives seconds or a date."""
    text = headers.get("Retry-After", "").strip()
    if _SIZE.match(text):
        return float(text)
    moment = _seconds(text)
    return None if moment is None else max(0.0, moment - time.time())


@lru_cache(maxsize=1024)
def _seconds(date: str | None) -> float | None:
    if not date:
        return None
    try:
        return parsedate_to_datetime(date).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None
