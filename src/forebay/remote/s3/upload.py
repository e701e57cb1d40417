"""Writing an object of S3: in one request, or in parts at once."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple, Protocol
from xml.sax.saxutils import escape

from forebay import errors
from forebay._logs import logger
from forebay._model import Content, ObjectInfo
from forebay.remote.base import Call, RemoteOptions
from forebay.remote.http import Reply
from forebay.remote.s3.answers import Pages, conflict, key_of, number_in, xml_of
from forebay.remote.transfer import share
from forebay.remote.urls import canonical

log = logger("forebay.remote.s3.upload")

MAX_PARTS = 10_000
MIN_PART = 5 << 20


class RequestFunction(Protocol):
    def __call__(
        self,
        method: str,
        url: str,
        *,
        query: Mapping[str, str],
        headers: Mapping[str, str] = ...,
        body: bytes | None = ...,
        call: Call = ...,
    ) -> Reply: ...


class Begun(NamedTuple):
    """An upload in parts that was begun. ``parts``: MD5 sums, in hex, of those that are there."""

    id: str
    parts: Mapping[int, str] = {}


class Upload:
    """One object to be written. ``request``: asks S3. ``resume``: parts that came stay when it fails, and the next one takes them."""

    def __init__(
        self, request: RequestFunction, options: RemoteOptions, url: str, if_none_match: str | None, if_match: str | None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> None:  # fmt: skip
        self._request, self._options, self._url, self._on_sent, self._resume = request, options, url, on_sent, resume
        # without the quotes of an ETag: Ceph compares what stands there as it is, and the others take both
        self._if_none_match, self._if_match = if_none_match, if_match.strip('"') if if_match else None
        given = {"If-None-Match": self._if_none_match, "If-Match": self._if_match}
        self._conditions = {name: value for name, value in given.items() if value}
        self._lock = threading.Lock()  # guards _sent
        self._sent = 0

    def run(self, source: Content) -> ObjectInfo:
        try:
            return self._from(source)
        except errors.NotFound:
            if not self._resume:
                raise
            # somebody else ended what was to be gone on with
            self._resume, self._sent = False, 0
            return self._from(source)

    def _from(self, source: Content) -> ObjectInfo:
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                return self._run(size, lambda part: _exactly(source, size, iter(partial(file.read, part), b"")))
        view = memoryview(source).cast("B")
        return self._run(len(view), lambda part: (bytes(view[at : at + part]) for at in range(0, len(view), part)))

    def _run(self, size: int, cut: Callable[[int], Iterator[bytes]]) -> ObjectInfo:
        part = max(self._options.part, MIN_PART, -(-size // MAX_PARTS))
        with Call(self._url, self._options) as call:
            etag = self._whole(call, b"".join(cut(part))) if size <= part else self._in_parts(call, cut(part), -(-size // part))
        return ObjectInfo(self._url, size, etag, strong=bool(etag))

    def _whole(self, call: Call, body: bytes) -> str | None:
        etag = self._request("PUT", self._url, query={}, headers=self._conditions, body=body, call=call).headers.get("ETag")
        self._tell(len(body))
        return etag

    def _tell(self, count: int) -> None:
        if self._on_sent is not None:
            with self._lock:
                self._sent += count
                sent = self._sent
            self._on_sent(sent)

    def _in_parts(self, call: Call, bodies: Iterator[bytes], count: int) -> str | None:
        self._check(call)
        begun = self._left(call) if self._resume else None
        if begun is not None and any(number > count for number in begun.parts):
            self._abort(begun.id)  # of a larger object: Ceph's gateway refuses to leave a part out
            begun = None
        begun = begun or self._begin(call)
        try:
            return self._complete(call, begun.id, self._send_parts(call, begun, bodies))
        except BaseException as error:
            if not self._resume or isinstance(error, (errors.Conflict, errors.SourceChanged)):
                self._abort(begun.id)
            raise

    def _begin(self, call: Call) -> Begun:
        begun = xml_of(self._url, self._request("POST", self._url, query={"uploads": ""}, body=b"", call=call))
        return Begun(begun.findtext("{*}UploadId", ""))

    def _left(self, call: Call) -> Begun | None:
        """What an earlier write of this object left there; of several the latest."""
        bucket, _, key = self._url.partition("://")[2].partition("/")
        query = {"uploads": "", "encoding-type": "url", "prefix": key}
        try:
            found = xml_of(self._url, self._request("GET", f"s3://{bucket}/", query=query, call=call)).iterfind("{*}Upload")
            ours = [(e.findtext("{*}Initiated", ""), e.findtext("{*}UploadId", "")) for e in found if key_of(e) == key]
            return Begun(max(ours)[1], self._parts_of(call, max(ours)[1])) if ours else None
        except (errors.AccessDenied, errors.NotFound, errors.Unsupported) as error:
            log.debug("%s: what was sent before is not known: %s", canonical(self._url), error)
            return None

    def _parts_of(self, call: Call, upload_id: str) -> dict[int, str]:
        parts: dict[int, str] = {}
        query, pages = {"uploadId": upload_id}, Pages(self._url)
        while True:
            page = xml_of(self._url, self._request("GET", self._url, query=query, call=call))
            parts |= {number_in(self._url, e, "PartNumber"): e.findtext("{*}ETag", "").strip('"') for e in page.iterfind("{*}Part")}
            query["part-number-marker"] = page.findtext("{*}NextPartNumberMarker", "")
            if page.findtext("{*}IsTruncated") != "true" or not query["part-number-marker"]:
                return parts
            pages.check(page.findtext("{*}Part/{*}PartNumber"), query["part-number-marker"])

    def _send_parts(self, call: Call, begun: Begun, bodies: Iterator[bytes]) -> dict[int, str]:
        etags: dict[int, str] = {}

        def send(number: int, body: bytes) -> None:
            query = {"partNumber": str(number), "uploadId": begun.id}
            known = begun.parts.get(number)
            if known is not None and known == hashlib.md5(body, usedforsecurity=False).hexdigest():
                etags[number] = f'"{known}"'
            else:
                etags[number] = self._request("PUT", self._url, query=query, body=body, call=call).headers.get("ETag", "")
            self._tell(len(body))

        # `share` takes a piece of work when a thread is free, so that only what is being sent is in memory
        share((partial(send, number, body) for number, body in enumerate(bodies, 1)), self._options.streams - 1, call)
        return etags

    def _complete(self, call: Call, upload_id: str, etags: Mapping[int, str]) -> str | None:
        listed = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(etags[n])}</ETag></Part>" for n in sorted(etags))
        body = f"<CompleteMultipartUpload>{listed}</CompleteMultipartUpload>".encode()
        query = {"uploadId": upload_id}
        try:
            reply = self._request("POST", self._url, query=query, headers=self._conditions, body=body, call=call)
        except errors.NotFound:
            found = self._found(call)
            if found is None or found.strip('"') != _etag_of([etags[n] for n in sorted(etags)]):
                raise
            return found  # it was done, and the answer to that lost
        etag = xml_of(self._url, reply).findtext("{*}ETag", "").strip('"')
        return f'"{etag}"' if etag else self._found(call)

    def _check(self, call: Call) -> None:
        """Raises `Conflict`. The end of an upload in parts is late for it, and there some servers do not look."""
        found = self._found(call) if self._conditions else None
        if (self._if_none_match and found) or (self._if_match and (found or "").strip('"') != self._if_match):
            raise conflict(self._url)

    def _found(self, call: Call) -> str | None:
        """The ETag of what is there."""
        try:
            return self._request("HEAD", self._url, query={}, call=call).headers.get("ETag")
        except errors.NotFound:
            return None

    def _abort(self, upload_id: str) -> None:
        try:
            with Call(self._url, self._options.brief()) as call:
                self._request("DELETE", self._url, query={"uploadId": upload_id}, call=call)
        except errors.RemoteError as error:
            log.warning("%s: the parts of an upload that failed are still there: %s", canonical(self._url), error)


def _etag_of(parts: list[str]) -> str:
    """What S3 makes of the ETags of an object's parts."""
    try:
        sums = b"".join(bytes.fromhex(part.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _exactly(path: str | os.PathLike[str], size: int, bodies: Iterator[bytes]) -> Iterator[bytes]:
    """``bodies``. Raises `SourceChanged` as soon as they are more than ``size`` bytes, or where they end before."""
    done = 0
    for body in bodies:
        done += len(body)
        if done > size:
            raise errors.SourceChanged.of(os.fspath(path))
        yield body
    if done < size:
        raise errors.SourceChanged.of(os.fspath(path))
