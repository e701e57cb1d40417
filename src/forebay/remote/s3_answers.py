"""What S3 answers in XML."""

from __future__ import annotations

import datetime
import re
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from forebay import errors
from forebay._model import ObjectInfo
from forebay.remote.http import Reply
from forebay.remote.urls import canonical

_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]|&#x?[01]?[0-9a-fA-F];")


def xml_of(url: str, reply: Reply) -> ElementTree.Element:
    """The answer's body. Raises `RemoteProtocolError` if it is no XML, or tells of an error though its status does not."""
    try:
        # Ceph sends back the prefix that was asked for as it came: in keys, such characters are encoded
        root = ElementTree.fromstring(_CONTROL.sub(b"?", reply.body))
    except ElementTree.ParseError as error:
        raise errors.RemoteProtocolError(f"{canonical(url)}: an answer that is not XML: {error}", url=canonical(url)) from error
    if root.tag.endswith("Error"):
        raise errors.RemoteError(f"{canonical(url)}: S3 answers {root.findtext('{*}Code')}", url=canonical(url), status=reply.status)
    return root


def key_of(found: ElementTree.Element) -> str:
    """The ``Key`` of one item of a listing, which was asked for with ``encoding-type=url``."""
    return unquote_plus(found.findtext("{*}Key", ""), errors="surrogateescape")


def listed(bucket: str, found: ElementTree.Element) -> ObjectInfo:
    """One ``Contents`` of a listing."""
    modified = datetime.datetime.fromisoformat(found.findtext("{*}LastModified", "")).timestamp()
    etag = found.findtext("{*}ETag")
    return ObjectInfo(f"s3://{bucket}/{key_of(found)}", int(found.findtext("{*}Size", "")), etag, bool(etag), modified)


def text_of(body: bytes, tag: str) -> str:
    """What stands between ``<tag>`` and ``</tag>`` in the beginning of an error's body."""
    found = re.search(rf"<{tag}>([\w.-]+)</{tag}>".encode(), body)
    return found[1].decode() if found else ""


def conflict(url: str, status: int | None = None) -> errors.Conflict:
    shown = canonical(url)
    return errors.Conflict(f"{shown}: it is there already, or another version of it: nothing was written", url=shown, status=status)
