"""``s3://bucket/key``: the data plane of `forebay.remote.http`, signed. A key is written as it is, not percent-encoded; a version of it
as ``s3://bucket/key?versionId=ID``."""

from __future__ import annotations

import datetime
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple, Self, TypeVar
from urllib.parse import quote, urlencode

from forebay import errors
from forebay._logs import logger
from forebay._model import Content, ObjectInfo, Sink, Span, Transfer
from forebay.remote.base import Call, RemoteOptions, Trouble, one_time_limit
from forebay.remote.http import HttpRemote, Reply
from forebay.remote.s3 import sigv4
from forebay.remote.s3.answers import Pages, conflict, listed, text_of, xml_of
from forebay.remote.s3.aws import Account
from forebay.remote.s3.upload import Upload
from forebay.remote.urls import canonical, scheme

log = logger("forebay.remote.s3")
T = TypeVar("T")

QUERY = ":query"
"""Name of what stands among the headers of our own requests until they are signed: the query of the URL."""

_VERSION = re.compile(r"\?versionId=([^?&#/]+)\Z")
_EXPIRED = frozenset({"ExpiredToken", "InvalidToken", "TokenRefreshRequired"})
_HINTS = {
    "SignatureDoesNotMatch": "the secret key does not fit the access key",
    "InvalidAccessKeyId": "this access key is not known there",
    "RequestTimeTooSkewed": "this machine's clock is wrong",
    "AccessDenied": "these credentials may not do this, or there is no such object and they may not list the bucket, or its requester pays",
} | dict.fromkeys(_EXPIRED, "the session has expired: log in again")


class Name(NamedTuple):
    """What an ``s3://`` URL says."""

    bucket: str
    key: str
    version: str | None

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises `ConfigError` if it names no bucket."""
        place, _, key = url.partition("://")[2].partition("/")
        version = _VERSION.search(key)
        bucket = place.rpartition("@")[2]
        if not bucket:
            raise errors.ConfigError(f"{canonical(url)} names no bucket: s3://bucket/key is wanted")
        return cls(bucket, key[: version.start()] if version else key, version[1] if version else None)


def _checked(url: str) -> str:
    """The URL, if it names an object; a bucket alone can only be listed."""
    if not Name.of(url).key:
        raise errors.ConfigError(f"{canonical(url)} names no object: s3://bucket/key is wanted")
    return url


class _OtherRegion(errors.RemoteProtocolError):
    """The bucket lies in another region than was asked: in one that is known now."""


class S3Remote:
    """A `Remote` for S3 and what speaks like it. Callable from any thread; a forked child has connections and credentials of its own.

    Where, and as whom, is found as the AWS tools find it (variables, profiles, roles, ``AWS_ENDPOINT_URL``), at the first request."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self.options = options or RemoteOptions()
        self._account = Account(self.options.anonymous)
        self._regions: dict[str, str] = {}
        # an object may be stored with a Content-Encoding: like all S3 tools we bring what is stored
        self._http = HttpRemote(self.options, self._sign, self._judge, raw=True)

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`."""
        return _at_home(lambda: self._http.stat(_checked(url), known=known))

    def fetch(self, url: str, sink: Sink) -> Transfer:
        """See `Remote.fetch`."""
        return _at_home(lambda: self._http.fetch(_checked(url), sink))

    def read(self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None) -> bytes:
        """See `Remote.read`."""
        return _at_home(lambda: self._http.read(_checked(url), span, validator=validator, info=info))

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """See `Remote.list`. A request for each 1,000 objects, sent when they are wanted."""
        bucket, prefix, _ = Name.of(url)
        query, pages = {"list-type": "2", "encoding-type": "url", "prefix": prefix}, Pages(url)
        while True:
            page = xml_of(url, self.request("GET", f"s3://{bucket}/", query=query))
            yield from (listed(bucket, found) for found in page.iterfind("{*}Contents"))
            token = page.findtext("{*}NextContinuationToken")
            if not token:
                return
            pages.check(page.findtext("{*}Contents/{*}Key"), token)
            query["continuation-token"] = token

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. In parts at once where it is large; seen whole or not at all.

        Some servers look at no condition when an upload in parts ends: there it holds at its beginning only."""
        return Upload(self.request, self.options, _checked(url), if_none_match, if_match, on_sent, resume).run(source)

    def delete(self, url: str) -> None:
        """See `Remote.delete`."""
        try:
            self.request("DELETE", _checked(url), query={})
        except errors.NotFound as error:
            log.debug("nothing to remove: %s", error)

    def request(
        self, method: str, url: str, *, query: Mapping[str, str], headers: Mapping[str, str] | None = None,
        body: bytes | None = None, call: Call | None = None,
    ) -> Reply:  # fmt: skip
        """One question of S3's own, as a part of ``call`` if given. Raises `RemoteError`."""
        every = {**(headers or {}), QUERY: urlencode(query, quote_via=quote, safe="-_.~")}
        if body is not None:
            every[sigv4.BODY] = hashlib.sha256(body).hexdigest()
        return _at_home(lambda: self._http.request(method, url, every, body, ok=(200, 204), call=call))

    # -- what makes HTTP S3 --------------------------------------------------------------------------------------------

    def _sign(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
        """Where to send a request for ``url``, an ``s3://`` one or one that S3 redirects to, and with which headers."""
        place, sent = self._account.place(), dict(headers)
        query = sent.pop(QUERY, "")
        if scheme(url) == "s3":
            name = Name.of(url)
            region = self._regions.get(name.bucket, place.region)
            target = place.address(name.bucket, quote(name.key.encode("utf-8", "surrogateescape"), safe="/-_.~"), region)
            query = query or (urlencode({"versionId": name.version}, quote_via=quote) if name.version else "")
            target += f"?{query}" if query else ""
        elif place.is_ours(url):
            region, target = place.region_in(url), url
        else:
            return url, sent
        if self.options.requester_pays:
            sent["x-amz-request-payer"] = "requester"
        keys = self._account.keys()
        if keys is None:
            return target, sent
        return target, sigv4.sign(method, target, sent, keys, region, datetime.datetime.now(datetime.UTC))

    def _judge(self, url: str, status: int, headers: Mapping[str, str], body: bytes) -> Exception | None:
        """What a refusal means. Of S3's own words only the code is shown: the rest may quote the signature."""
        shown, bucket = canonical(url), Name.of(url).bucket
        code = text_of(body, "Code")
        region = headers.get("x-amz-bucket-region") or text_of(body, "Region")
        if region and (status in (301, 307) or code == "AuthorizationHeaderMalformed"):
            self._regions[bucket] = region
            return _OtherRegion(f"{shown}: its bucket lies in the region {region}", url=shown, status=status)
        if code in ("RequestTimeout", "ConditionalRequestConflict", "OperationAborted"):
            return Trouble(f"S3 answers {code}", status=status)
        if status == 412:
            return conflict(url, status)
        if code == "NotImplemented":
            return errors.Unsupported(f"{shown}: this server cannot do that: S3 answers {code}", url=shown, status=status)
        if status == 404 or (status == 405 and headers.get("x-amz-delete-marker") == "true"):
            return errors.NotFound(f"{shown}: S3 answers {code or status}: there is no such object", url=shown, status=status)
        if status in (401, 403) or code in _EXPIRED:
            return errors.AccessDenied(f"{shown}: S3 answers {code or status}: {self._hint(code)}", url=shown, status=status)
        return None

    def _hint(self, code: str) -> str:
        if self._account.is_anonymous():
            return "it is not public, and it was asked without credentials"
        if self._account.keys() is None:
            return "no AWS credentials were found, and it is not public: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        return _HINTS.get(code, "check that these credentials may read it")


def _at_home(ask: Callable[[], T]) -> T:
    """``ask()``; once more where the first answer told in which region the bucket lies."""
    with one_time_limit():
        try:
            return ask()
        except _OtherRegion:
            return ask()
