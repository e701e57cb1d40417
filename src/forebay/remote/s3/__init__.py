"""``s3://bucket/key``: the data plane of `forebay.remote.http`, with AWS signatures. A key stands in the URL as it is, not
percent-encoded; a version of it as ``s3://bucket/key?versionId=ID``. An empty version is the present one: it ends a key that looks like
a version."""

from __future__ import annotations

import datetime
import hashlib
import os
import re
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import BinaryIO, NamedTuple, Self
from urllib.parse import quote, unquote_plus, urlencode
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from forebay import errors
from forebay._kernel import host
from forebay._logs import escaped, logger
from forebay._model import Content, ObjectInfo
from forebay.remote.base import AttemptFailed, Call, RemoteOptions, run_parts
from forebay.remote.http import HttpRemote, SmallResponse
from forebay.remote.http.requests import MAX_SIZE, SendAgain
from forebay.remote.s3.aws import BODY_HASH, Account, sign
from forebay.remote.urls import canonical, s3_name, s3_version, scheme

log = logger("forebay.remote.s3")

_COMPUTED = frozenset({"host", "x-amz-date", BODY_HASH, "x-amz-security-token"})
QUERY = ":query"
"""Name under which the query of the URL stands among the headers of our own requests until they are signed."""
MAX_PARTS = 10_000
MIN_PART = 5 << 20
MAX_EMPTY_PAGES = 1000

_NUMBER = re.compile(r"[0-9]{1,19}\Z")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#x?[01]?[0-9a-fA-F];")
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})  # GLACIER_IR is read at once
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_HINTS = {
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "InvalidAccessKeyId": "this access key is not known there",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "AccessDenied": "these credentials may not do this, or there is no such object and they may not list the bucket, or its requester pays",
} | dict.fromkeys(_EXPIRED, "the session has expired: log in again")


class S3Name(NamedTuple):
    """The parts of an ``s3://`` URL."""

    bucket: str
    key: str
    version: str | None

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises `ConfigError` if the URL names no bucket."""
        netloc, _, key = url.partition("://")[2].partition("/")
        key, version = s3_version(key)
        bucket = netloc.rpartition("@")[2]
        if not bucket:
            raise errors.ConfigError(f"{canonical(url)} names no bucket: write s3://bucket/key")
        return cls(bucket, key, version or None)


class S3Remote:
    """A `Remote` for S3 and compatible servers. Callable from any thread; a forked child has connections and credentials of its own.

    Credentials and settings are those that the AWS tools use (variables, profiles, roles, ``AWS_ENDPOINT_URL``), read at the first request.
    ``endpoint``: see `Account`."""

    def __init__(self, options: RemoteOptions | None = None, endpoint: str | None = None) -> None:
        self.options = options or RemoteOptions()
        given = {name.lower(): value for name, value in self.options.sent_headers.items()}
        for name in sorted(given.keys() & _COMPUTED):
            raise errors.ConfigError(f"the header {name!r} cannot be given for s3://: its value is part of the signature", name=name)
        self._amz = {name: value for name, value in given.items() if name.startswith("x-amz-")}
        self._is_authorized = "authorization" in given
        self._account = Account(endpoint, self.options.anonymous)
        self._regions: dict[str, str] = {}
        # an object may be stored with a Content-Encoding: like all S3 tools, we return what is stored
        self._http = http = HttpRemote(self.options, self._sign, self._explain, raw=True, bundle=lambda: self._account.endpoint().bundle)
        self.stat, self.fetch, self.fetch_changed = http.stat, http.fetch, http.fetch_changed
        self.start, self.read = http.start, http.read

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See `Remote.list`. Sends one request for each 1,000 objects, when the iterator reaches them."""
        return (_info_of(bucket, contents) for bucket, contents in self._contents(url))

    def archived(self, url: str) -> Iterator[str]:
        """The URLs below ``url`` of objects that are in an archive tier, and not restored. As many requests as `list`. A listing does not
        tell which objects of INTELLIGENT_TIERING are."""
        for bucket, item in self._contents(url, {"x-amz-optional-object-attributes": "RestoreStatus"}):
            if item.findtext("{*}StorageClass") in _ARCHIVES and not item.findtext("{*}RestoreStatus/{*}RestoreExpiryDate"):
                yield f"s3://{bucket}/{s3_name(_key_in(item))}"

    def _contents(self, url: str, headers: Mapping[str, str] | None = None) -> Iterator[tuple[str, ElementTree.Element]]:
        """The items of all pages of a listing, each with its bucket."""
        bucket, prefix, _ = S3Name.of(url)
        query, pages = {"list-type": "2", "encoding-type": "url", "prefix": prefix}, _PageGuard(url)
        while True:
            page = _xml_of(url, self.request("GET", f"s3://{bucket}/", query=query, headers=headers))
            yield from ((bucket, item) for item in page.iterfind("{*}Contents"))
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return
            pages.check(page.findtext("{*}Contents/{*}Key"), token)
            query["continuation-token"] = token

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. A large object is sent in parallel parts; it appears whole or not at all.

        Some servers ignore conditions when an upload in parts completes: there they are checked at its beginning only."""
        return _ObjectUpload(self, url, if_none_match, if_match, on_sent, resume).run(source)

    def delete(self, url: str) -> None:
        """See `Remote.delete`."""
        try:
            self.request("DELETE", url, query={})
        except errors.NotFound as error:
            log.debug("nothing to remove: %s", error)

    def request(
        self, method: str, url: str, *, query: Mapping[str, str], headers: Mapping[str, str] | None = None,
        body: bytes | None = None, call: Call | None = None,
    ) -> SmallResponse:  # fmt: skip
        """One request of S3's own protocol, as a part of ``call`` if given. Raises `RemoteError`."""
        unsigned = {**(headers or {}), QUERY: urlencode(query, quote_via=quote, safe="-_.~")}
        if body is not None:
            unsigned[BODY_HASH] = hashlib.sha256(body).hexdigest()
        return self._http.request(method, url, unsigned, body, ok=(200, 204), call=call)

    # -- what makes S3 of HTTP -------------------------------------------------------------------------------------

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """The HTTP URL and the headers of a request for ``url``: an ``s3://`` URL, or one that S3 redirects to."""
        unsigned, name = dict(headers), S3Name.of(url) if scheme(url) == "s3" else None
        query = unsigned.pop(QUERY, "")
        if name is not None and not (name.key or (method == "GET" and query)):  # a bucket alone can only be listed
            raise errors.ConfigError(f"{canonical(url)} names no object: write s3://bucket/key")
        endpoint = self._account.endpoint()
        if name is not None:
            region = self._regions.get(name.bucket, endpoint.region)
            target = endpoint.address(name.bucket, quote(name.key.encode("utf-8", "surrogateescape"), safe="/-_.~"), region)
            query = query or (urlencode({"versionId": name.version}, quote_via=quote) if name.version else "")
            target += f"?{query}" if query else ""
            unsigned = self._amz | unsigned  # a signature has to cover them
        elif endpoint.may_sign_for(url):
            region, target = endpoint.region_in(url), url
        else:
            return url, unsigned
        if self.options.requester_pays:
            unsigned["x-amz-request-payer"] = "requester"
        keys = None if self._is_authorized else self._account.keys()
        if keys is None:
            return target, unsigned
        return target, sign(method, target, unsigned, keys, region, datetime.datetime.now(datetime.UTC))

    def _explain(self, url: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception | None:
        """The error that a refusal means. Of S3's text only the code is shown: the rest may quote the signature."""
        shown, bucket = canonical(url), S3Name.of(url).bucket
        code = _text_in(body, "Code")
        region = headers.get("x-amz-bucket-region") or _text_in(body, "Region")
        if region and (status in (301, 307) or code == "AuthorizationHeaderMalformed"):
            self._regions[bucket] = region
            return SendAgain(f"{shown}: its bucket lies in the region {region}", url=shown, status=status)
        if code in ("RequestTimeout", "ConditionalRequestConflict", "OperationAborted"):
            return AttemptFailed(f"S3 answers {code}", status=status)
        if status == 412:
            return errors.Conflict.of(shown, status)
        if code == "NotImplemented":
            return errors.Unsupported(f"{shown}: this server cannot do that: S3 answers {code}", url=shown, status=status)
        if status == 404 or (status == 405 and headers.get("x-amz-delete-marker") == "true"):
            return errors.NotFound(f"{shown}: S3 answers {code or status}: there is no such object", url=shown, status=status)
        if code == "InvalidObjectState":
            return _archived(url, _text_in(body, "StorageClass"), status)
        if status in (401, 403) or code in _EXPIRED:
            return errors.AccessDenied(f"{shown}: S3 answers {code or status}: {self._hint(code)}", url=shown, status=status)
        return None

    def _hint(self, code: str) -> str:
        if self._account.is_anonymous():
            return "it is not public, and it was asked without credentials"
        if self._account.keys() is None:
            return "no AWS credentials were found, and it is not public: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return _HINTS.get(code, "check that these credentials may read it")


# -- responses in XML --------------------------------------------------------------------------------------------------


class _NoEntities(ElementTree.TreeBuilder):
    """S3 defines no entities, and those of a hostile document may grow without bound."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a document type")


def _xml_of(url: str, response: SmallResponse) -> ElementTree.Element:
    """The body as XML. Raises `RemoteProtocolError` if it is none, and `RemoteError` if it reports an error though its status does not."""
    try:
        # Ceph repeats the prefix of the request unencoded; in keys, such characters are encoded
        root = ElementTree.fromstring(_CONTROL.sub(b"?", response.body), ElementTree.XMLParser(target=_NoEntities()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise errors.RemoteProtocolError(f"{canonical(url)}: an answer that is not XML: {error}", url=canonical(url)) from error
    if root.tag.endswith("Error"):
        code = escaped((root.findtext("{*}Code") or "an error")[:100])
        raise errors.RemoteError(f"{canonical(url)}: S3 answers {code}", url=canonical(url), status=response.status)
    return root


def _key_in(item: ElementTree.Element) -> str:
    """The ``Key`` of an item of a listing that was requested with ``encoding-type=url``."""
    return unquote_plus(item.findtext("{*}Key", ""), errors="surrogateescape")


def _info_of(bucket: str, contents: ElementTree.Element) -> ObjectInfo:
    """One ``Contents`` of a listing. Raises `RemoteProtocolError` if its numbers are invalid."""
    url, etag = f"s3://{bucket}/{s3_name(_key_in(contents))}", contents.findtext("{*}ETag")
    try:
        modified = datetime.datetime.fromisoformat(contents.findtext("{*}LastModified", "")).timestamp()
    except (ValueError, OverflowError) as error:
        raise _invalid(url, "LastModified") from error
    return ObjectInfo(url, _number_in(url, contents, "Size"), etag, bool(etag), modified)


def _number_in(url: str, item: ElementTree.Element, tag: str) -> int:
    """Raises `RemoteProtocolError` if it is no number."""
    text = item.findtext(f"{{*}}{tag}", "").strip()
    if not _NUMBER.match(text) or int(text) > MAX_SIZE:
        raise _invalid(url, tag)
    return int(text)


def _archived(url: str, tier: str, status: int) -> errors.Archived:
    """The error of an object that has to be restored first."""
    name, request = S3Name.of(url), "{}" if tier.startswith("INTELLIGENT") else "Days=7"
    words = ["aws", "s3api", "restore-object", "--bucket", name.bucket, "--key", name.key, "--restore-request", request]
    words += ["--version-id", name.version] if name.version else []
    todo = f"restore it (`{shlex.join(words)}`), which takes minutes to hours, then read it again"
    what = f"the storage class {tier}" if tier else "an archive tier"
    message = f"{canonical(url)}: it is archived in {what} and cannot be read: {todo}"
    return errors.Archived(message, url=canonical(url), status=status, tier=tier)


def _invalid(url: str, tag: str) -> errors.RemoteProtocolError:
    return errors.RemoteProtocolError(f"{canonical(url)}: S3 lists it with a {tag} that is invalid", url=canonical(url))


class _PageGuard:
    """Checks the pages of a listing, so that an endless one is detected. Raises `RemoteProtocolError`."""

    def __init__(self, url: str) -> None:
        self._url = canonical(url)
        self._seen: set[str] = set()
        self._empty = 0

    def check(self, first: str | None, token: str) -> None:
        """A page that begins with ``first`` (None: an empty page) is followed by the one of ``token``."""
        self._empty = self._empty + 1 if first is None else 0
        marks = {f"token {token}"} | ({f"item {first}"} if first is not None else set())
        if self._empty > MAX_EMPTY_PAGES or not self._seen.isdisjoint(marks):
            raise errors.RemoteProtocolError(f"{self._url}: its listing repeats itself and never ends", url=self._url)
        self._seen |= marks


def _text_in(body: bytes, tag: str) -> str:
    """The text between ``<tag>`` and ``</tag>`` in the beginning of an error's body."""
    match = re.search(rf"<{tag}>([\w.-]+)</{tag}>".encode(), body)
    return match[1].decode() if match else ""


# -- writing -----------------------------------------------------------------------------------------------------------


class _ObjectUpload:
    """One object to be written. ``resume``: parts stay when the upload fails, and the next one uses them.

    The parts of an upload that the server has are a dictionary: number -> MD5 sum, in hex."""

    def __init__(
        self, remote: S3Remote, url: str, if_none_match: str | None, if_match: str | None, on_sent: Callable[[int], None] | None,
        resume: bool,
    ) -> None:  # fmt: skip
        self._request, self._options, self._url, self._on_sent, self._resume = remote.request, remote.options, url, on_sent, resume
        # without the quotes of an ETag: Ceph compares the text as it is, and the others accept both
        conditions = {"If-None-Match": if_none_match, "If-Match": (if_match or "").strip('"')}
        self._conditions = {name: value for name, value in conditions.items() if value}
        self._lock = threading.Lock()  # guards _sent
        self._sent = 0

    def run(self, source: Content) -> ObjectInfo:
        try:
            return self._read_and_send(source)
        except errors.NotFound:
            if not self._resume:
                raise
            # another process completed or aborted the upload that was to be resumed
            self._resume, self._sent = False, 0
            return self._read_and_send(source)

    def _read_and_send(self, source: Content) -> ObjectInfo:
        if isinstance(source, (str, os.PathLike)):
            with open(source, "rb", opener=host.open_fd) as file:
                size = os.fstat(file.fileno()).st_size
                return self._send(size, lambda part: _pieces(file, size, part))
        view = memoryview(source).cast("B")
        return self._send(len(view), lambda part: (bytes(view[at : at + part]) for at in range(0, len(view), part)))

    def _send(self, size: int, cut: Callable[[int], Iterator[bytes]]) -> ObjectInfo:
        """``cut(part)``: the content, in pieces of ``part`` bytes."""
        part = max(self._options.part, MIN_PART, -(-size // MAX_PARTS))
        with Call(self._url, self._options) as call:
            if size > part:
                etag = self._send_in_parts(call, cut(part), -(-size // part))
            else:
                body = b"".join(cut(part))
                response = self._request("PUT", self._url, query={}, headers=self._conditions, body=body, call=call)
                etag = response.headers.get("ETag")
                self._report(len(body))
        return ObjectInfo(self._url, size, etag, strong=bool(etag))

    def _report(self, count: int) -> None:
        if self._on_sent is not None:
            with self._lock:
                self._sent += count
                sent = self._sent
            self._on_sent(sent)

    def _send_in_parts(self, call: Call, bodies: Iterator[bytes], count: int) -> str | None:
        # the completion of an upload would be late for it, and some servers ignore conditions there
        current = (self._etag(call) or "").strip('"') if self._conditions else ""
        if ("If-None-Match" in self._conditions and current) or self._conditions.get("If-Match", current) != current:
            raise errors.Conflict.of(call.url)
        upload_id, parts = self._unfinished(call) if self._resume else ("", {})
        if any(number > count for number in parts):
            self._abort(upload_id)  # of a larger object: Ceph's gateway refuses to complete an upload without all of its parts
            upload_id, parts = "", {}
        if not upload_id:
            started = _xml_of(self._url, self._request("POST", self._url, query={"uploads": ""}, body=b"", call=call))
            upload_id = started.findtext("{*}UploadId", "")
        try:
            return self._complete(call, upload_id, self._send_parts(call, upload_id, parts, bodies))
        except BaseException as error:
            if not self._resume or isinstance(error, (errors.Conflict, errors.SourceChanged)):
                self._abort(upload_id)
            raise

    def _unfinished(self, call: Call) -> tuple[str, dict[int, str]]:
        """The latest upload of this object that an earlier write started and did not complete, and its parts; "" if there is none."""
        bucket, key, _ = S3Name.of(self._url)
        query = {"uploads": "", "encoding-type": "url", "prefix": key}
        try:
            uploads = _xml_of(self._url, self._request("GET", f"s3://{bucket}/", query=query, call=call)).iterfind("{*}Upload")
            ours = [(e.findtext("{*}Initiated", ""), e.findtext("{*}UploadId", "")) for e in uploads if _key_in(e) == key]
            return (max(ours)[1], self._parts_of(call, max(ours)[1])) if ours else ("", {})
        except (errors.AccessDenied, errors.NotFound, errors.Unsupported) as error:
            log.debug("%s: parts of an earlier upload cannot be listed: %s", canonical(self._url), error)
            return "", {}

    def _parts_of(self, call: Call, upload_id: str) -> dict[int, str]:
        parts: dict[int, str] = {}
        query, pages = {"uploadId": upload_id}, _PageGuard(self._url)
        while True:
            page = _xml_of(self._url, self._request("GET", self._url, query=query, call=call))
            parts |= {_number_in(self._url, e, "PartNumber"): e.findtext("{*}ETag", "").strip('"') for e in page.iterfind("{*}Part")}
            query["part-number-marker"] = page.findtext("{*}NextPartNumberMarker", "")
            if page.findtext("{*}IsTruncated") != "true" or not query["part-number-marker"]:
                return parts
            pages.check(page.findtext("{*}Part/{*}PartNumber"), query["part-number-marker"])

    def _send_parts(self, call: Call, upload_id: str, parts: Mapping[int, str], bodies: Iterator[bytes]) -> dict[int, str]:
        etags: dict[int, str] = {}

        def send(number: int, body: bytes) -> None:
            query = {"partNumber": str(number), "uploadId": upload_id}
            known = parts.get(number)
            if known is not None and known == hashlib.md5(body, usedforsecurity=False).hexdigest():
                etags[number] = f'"{known}"'
            else:
                etags[number] = self._request("PUT", self._url, query=query, body=body, call=call).headers.get("ETag", "")
            self._report(len(body))

        # `run_parts` takes a body when a thread is free, so that only the parts that are being sent are in memory
        run_parts((partial(send, number, body) for number, body in enumerate(bodies, 1)), self._options.streams - 1, call)
        return etags

    def _complete(self, call: Call, upload_id: str, etags: Mapping[int, str]) -> str | None:
        parts = "".join(f"<Part><PartNumber>{n}</PartNumber><ETag>{escape(etags[n])}</ETag></Part>" for n in sorted(etags))
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        query = {"uploadId": upload_id}
        try:
            response = self._request("POST", self._url, query=query, headers=self._conditions, body=body, call=call)
        except errors.NotFound:
            current = self._etag(call)
            if current is None or current.strip('"') != _combined_etag([etags[n] for n in sorted(etags)]):
                raise
            return current  # the upload was completed, and the response was lost
        etag = _xml_of(self._url, response).findtext("{*}ETag", "").strip('"')
        return f'"{etag}"' if etag else self._etag(call)

    def _etag(self, call: Call) -> str | None:
        """The ETag of the current object, if there is one."""
        try:
            return self._request("HEAD", self._url, query={}, call=call).headers.get("ETag")
        except errors.NotFound:
            return None

    def _abort(self, upload_id: str) -> None:
        try:
            with Call(self._url, self._options.for_check()) as call:
                self._request("DELETE", self._url, query={"uploadId": upload_id}, call=call)
        except errors.RemoteError as error:
            log.warning("%s: the parts of an upload that failed are still there: %s", canonical(self._url), error)


def _combined_etag(parts: list[str]) -> str:
    """The ETag that S3 derives from those of an object's parts."""
    try:
        sums = b"".join(bytes.fromhex(part.strip('"')) for part in parts)
    except ValueError:
        return ""
    return f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(parts)}"


def _pieces(file: BinaryIO, size: int, part: int) -> Iterator[bytes]:
    """A file in pieces of ``part`` bytes. Raises `SourceChanged` as soon as they exceed ``size`` bytes, or where they end before."""
    done = 0
    while body := file.read(part):
        done += len(body)
        if done > size:
            break
        yield body
    if done != size:
        raise errors.SourceChanged.of(file.name)
