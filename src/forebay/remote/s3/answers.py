"""What S3 answers in XML."""

from __future__ import annotations

import datetime
import re
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from forebay import errors
from forebay._logs import escaped
from forebay._model import ObjectInfo
from forebay.remote.http import Reply
from forebay.remote.http.answers import MAX_SIZE
from forebay.remote.urls import canonical


class _Flat(ElementTree.TreeBuilder):
    """S3 defines no entities: what does may grow without bound."""

    def doctype(self, name: str, public: str | None, system: str | None) -> None:
        raise ValueError("it has a document type")


MAX_EMPTY = 1000
_NUMBER = re.compile(r"[0-9]{1,19}\Z")
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#x?[01]?[0-9a-fA-F];")


def xml_of(url: str, reply: Reply) -> ElementTree.Element:
    """The answer's body. Raises `RemoteProtocolError` if it is no XML, or tells of an error though its status does not."""
    try:
        # Ceph sends back the prefix that was asked for as it came: in keys, such characters are encoded
        root = ElementTree.fromstring(_CONTROL.sub(b"?", reply.body), ElementTree.XMLParser(target=_Flat()))
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise errors.RemoteProtocolError(f"{canonical(url)}: an answer that is not XML: {error}", url=canonical(url)) from error
    if root.tag.endswith("Error"):
        code = escaped((root.findtext("{*}Code") or "an error")[:100])
        raise errors.RemoteError(f"{canonical(url)}: S3 answers {code}", url=canonical(url), status=reply.status)
    return root


def key_of(found: ElementTree.Element) -> str:
    """The ``Key`` of one item of a listing, which was asked for with ``encoding-type=url``."""
    return unquote_plus(found.findtext("{*}Key", ""), errors="surrogateescape")


def listed(bucket: str, found: ElementTree.Element) -> ObjectInfo:
    """One ``Contents`` of a listing. Raises `RemoteProtocolError` for one that makes no sense."""
    url, etag = f"s3://{bucket}/{key_of(found)}", found.findtext("{*}ETag")
    try:
        modified = datetime.datetime.fromisoformat(found.findtext("{*}LastModified", "")).timestamp()
    except (ValueError, OverflowError) as error:
        raise _nonsense(url, "LastModified") from error
    return ObjectInfo(url, number_in(url, found, "Size"), etag, bool(etag), modified)


def number_in(url: str, found: ElementTree.Element, tag: str) -> int:
    """A number that S3 tells. Raises `RemoteProtocolError`."""
    text = found.findtext(f"{{*}}{tag}", "").strip()
    if not _NUMBER.match(text) or int(text) > MAX_SIZE:
        raise _nonsense(url, tag)
    return int(text)


def _nonsense(url: str, tag: str) -> errors.RemoteProtocolError:
    return errors.RemoteProtocolError(f"{canonical(url)}: S3 lists it with a {tag} that makes no sense", url=canonical(url))


class Pages:
    """Looks at the pages of a listing, so that one which never ends is found out. Raises `RemoteProtocolError`."""

    def __init__(self, url: str) -> None:
        self._url = canonical(url)
        self._seen: set[str] = set()
        self._empty = 0

    def check(self, first: str | None, token: str) -> None:
        """A page that begins with ``first``, None: with nothing, is followed by another one, that of ``token``."""
        self._empty = self._empty + 1 if first is None else 0
        marks = {f"token {token}"} | ({f"item {first}"} if first is not None else set())
        if self._empty > MAX_EMPTY or not self._seen.isdisjoint(marks):
            raise errors.RemoteProtocolError(f"{self._url}: its listing comes back to where it was: it has no end", url=self._url)
        self._seen |= marks


def text_of(body: bytes, tag: str) -> str:
    """What stands between ``<tag>`` and ``</tag>`` in the beginning of an error's body."""
    found = re.search(rf"<{tag}>([\w.-]+)</{tag}>".encode(), body)
    return found[1].decode() if found else ""


def conflict(url: str, status: int | None = None) -> errors.Conflict:
    shown = canonical(url)
    return errors.Conflict(f"{shown}: it is there already, or another version of it: nothing was written", url=shown, status=status)
