"""AWS Signature Version 4 of a request to S3. Pure: knows no clock, no file, no environment."""

from __future__ import annotations

import datetime
import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from urllib.parse import urlsplit

EMPTY = hashlib.sha256(b"").hexdigest()
BODY = "x-amz-content-sha256"


@dataclass(frozen=True, slots=True)
class Keys:
    """AWS credentials. Their repr shows no secret."""

    access: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


def sign(method: str, url: str, headers: Mapping[str, str], keys: Keys, region: str, now: datetime.datetime) -> dict[str, str]:
    """``headers`` with those that sign the request. ``url``: percent-encoded as it will be sent; ``x-amz-content-sha256`` among the
    headers: of the body, where there is one. ``now``: in UTC."""
    parts = urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    given = {name.lower(): value for name, value in headers.items()}
    signed = {name: " ".join(value.split()) for name, value in given.items() if name.startswith("x-amz-")}
    signed |= {"host": parts.netloc.rpartition("@")[2], "x-amz-date": stamp, BODY: given.get(BODY, EMPTY)}
    if keys.token:
        signed["x-amz-security-token"] = keys.token
    names = ";".join(sorted(signed))
    query = "&".join(f"{name}={value}" for name, _, value in sorted(pair.partition("=") for pair in parts.query.split("&") if pair))
    lines = [method, parts.path or "/", query, *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names, signed[BODY]]
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    signature = _hmac(_key(keys.secret, stamp[:8], region), text).hex()
    credential = f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**given, **signed, "authorization": credential}


@lru_cache(maxsize=64)
def _key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
