"""The user's AWS settings, and the signatures made with them. Botocore reads credentials, region and endpoint, from variables, files,
roles and on the machine."""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import quote, urlsplit

from forebay._kernel.interrupts import of_program
from forebay._logs import logger
from forebay.errors import AccessDenied, ConfigError, MissingExtra
from forebay.remote.urls import redacted

log = logger("forebay.remote.s3.aws")

_REGION = re.compile(r"\bs3(?:-fips)?(?:\.dualstack)?[.-]([a-z]+(?:-[a-z]+)+-[0-9]+)\.amazonaws\.com")
_OF_AWS = re.compile(r"(?:\A|\.)s3(?:[.-][a-z0-9-]+)*\.amazonaws\.com(?:\.cn)?\Z")
_PORTS = {"http": 80, "https": 443}

LOOK_AGAIN_AFTER = 60.0
"""Seconds for which missing credentials are not looked for again: that may take a second of time-outs."""
BODY_HASH = "x-amz-content-sha256"
_EMPTY_HASH = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """The servers of S3. ``endpoint``: URL without a path, None for AWS itself. ``style``: ``auto``, ``path`` or ``virtual``."""

    endpoint: str | None
    region: str
    style: str
    variant: str = ""
    """For AWS itself: "-fips", ".dualstack", or both."""
    bundle: str = ""
    """The file of the trusted certificates that the settings name: AWS_CA_BUNDLE, else ``ca_bundle`` of the profile."""

    def address(self, bucket: str, path: str, region: str | None = None) -> str:
        """The URL of ``path`` (percent-encoded, without a leading slash) in a bucket, which lies in ``region`` if that is known."""
        region = region or self.region
        base = self.endpoint or f"https://s3{self.variant}.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
        # a dot in the bucket's name does not fit the certificate, and private servers seldom have the host names
        fits = self.endpoint is None and bucket.isascii() and "." not in bucket and "_" not in bucket and bucket == bucket.lower()
        if self.style == "virtual" or (self.style == "auto" and fits):
            scheme, _, host = base.partition("://")
            return f"{scheme}://{bucket}.{host}/{path}"
        bucket = quote(bucket.encode("utf-8", "surrogateescape"), safe="!$%&'()*+,;=:@")
        return f"{base}/{bucket}/{path}" if path else f"{base}/{bucket}"

    def region_in(self, url: str) -> str:
        """The region in the host name of a URL that S3 redirects to."""
        match = _REGION.search(urlsplit(url).hostname or "")
        return match[1] if match else self.region

    def may_sign_for(self, url: str) -> bool:
        """Whether a host to which S3 redirects may receive a signature."""
        target = urlsplit(url)
        host, port = target.hostname or "", target.port or _PORTS.get(target.scheme)
        if self.endpoint is None:
            return (target.scheme, port) == ("https", 443) and _OF_AWS.search(host) is not None
        own = urlsplit(self.endpoint)
        if (target.scheme, port) != (own.scheme, own.port or _PORTS.get(own.scheme)):
            return False
        return host == own.hostname or host.endswith(f".{own.hostname}")


@dataclass(frozen=True, slots=True)
class Keys:
    """AWS credentials. Their repr shows no secret."""

    access: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)


class Account:
    """The user's settings, read at their first use in each process. Callable from any thread; usable after a fork.

    ``endpoint``: the servers, "" for those of AWS; None: those that the settings name. ``anonymous``: send no signature; None: where
    FOREBAY_S3_ANONYMOUS or AWS_NO_SIGN_REQUEST demands it, or there are no credentials.
    Methods raise `MissingExtra`, `ConfigError` for invalid settings, and `AccessDenied` where credentials cannot be obtained.
    """

    def __init__(self, endpoint: str | None = None, anonymous: bool | None = None) -> None:
        self._url, self._anonymous = endpoint, anonymous
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows; botocore's own may be held by a thread that is not in a forked child
        self._session: Any = None
        self._endpoint: S3Endpoint | None = None
        self._credentials: Any = None
        self._looked_at = -LOOK_AGAIN_AFTER

    def endpoint(self) -> S3Endpoint:
        with self._locked():
            if self._endpoint is None:
                self._endpoint = _endpoint_of(self._session, configured_endpoint() if self._url is None else self._url)
            return self._endpoint

    def keys(self) -> Keys | None:
        """The credentials, refreshed; None: send no signature."""
        if self.is_anonymous():
            return None
        with self._locked():
            if self._credentials is None and time.monotonic() - self._looked_at > LOOK_AGAIN_AFTER:
                self._credentials = of_program(self._session.get_credentials)()  # it may wait for a server or a program
                self._looked_at = time.monotonic()
            if self._credentials is None:
                return None
            frozen = of_program(self._credentials.get_frozen_credentials)()
        return Keys(frozen.access_key, frozen.secret_key, frozen.token)

    def is_anonymous(self) -> bool:
        """Whether the user wants no signatures."""
        if self._anonymous is not None:
            return self._anonymous
        return any(_is_on(os.environ.get(name, "")) for name in ("FOREBAY_S3_ANONYMOUS", "AWS_NO_SIGN_REQUEST"))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, with a session of this process."""
        if self._pid != os.getpid():
            self._reset()
        with self._lock, aws_errors():
            if self._session is None:
                import botocore.session

                self._session = botocore.session.get_session()
            yield


@contextmanager
def aws_errors() -> Iterator[None]:
    """Translate botocore's errors to ours. Their texts name files, profiles and settings, and contain no secret."""
    try:
        import botocore.exceptions as foreign
    except ImportError as error:
        raise MissingExtra.of("s3://", "s3") from error
    try:
        yield
    except (foreign.ProfileNotFound, foreign.ConfigParseError, foreign.ConfigNotFound, foreign.InvalidConfigError) as error:
        raise ConfigError(f"the AWS settings cannot be used: {error}") from error
    except foreign.BotoCoreError as error:
        raise AccessDenied(f"no AWS credentials can be obtained: {type(error).__name__}: {error}") from error


def _is_on(text: str) -> bool:
    return text.strip().lower() in ("1", "on", "yes", "true")


def _endpoint_of(session: Any, endpoint: str) -> S3Endpoint:
    profile = session.get_scoped_config()
    region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"the S3 endpoint is {redacted(repr(endpoint))}: write http://host or https://host")
    style = dict(profile.get("s3") or {}).get("addressing_style", "auto")
    fips, dual = (_is_on(str(session.get_config_variable(f"use_{name}_endpoint"))) for name in ("fips", "dualstack"))
    bundle = session.get_config_variable("ca_bundle") or ""
    return S3Endpoint(endpoint or None, region, style, "-fips" * fips + ".dualstack" * dual, bundle)


def configured_endpoint() -> str:
    """The servers that the variables and files of AWS name, without a slash at the end; "": those of AWS. Raises as `Account` does."""
    with aws_errors():
        import botocore.session

        session = botocore.session.get_session()
        profile = session.get_scoped_config()
        if _is_on(str(session.get_config_variable("ignore_configured_endpoint_urls"))):
            return ""
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    choices = (
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
        services.get("s3", {}).get("endpoint_url"),
        profile.get("endpoint_url"),
    )
    return next((choice for choice in choices if choice), "").rstrip("/")


# -- signatures --------------------------------------------------------------------------------------------------------


def sign(method: str, url: str, headers: Mapping[str, str], keys: Keys, region: str, now: datetime.datetime) -> dict[str, str]:
    """``headers`` and those that sign the request, by AWS Signature Version 4. ``url``: percent-encoded as it will be sent. The headers of
    a request with a body include its ``x-amz-content-sha256``. ``now``: in UTC. Reads no clock, no file and no environment."""
    parts = urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    given = {name.lower(): value for name, value in headers.items()}
    signed = {name: " ".join(value.split()) for name, value in given.items() if name.startswith("x-amz-")}
    signed |= {"host": parts.netloc.rpartition("@")[2], "x-amz-date": stamp, BODY_HASH: given.get(BODY_HASH, _EMPTY_HASH)}
    if keys.token:
        signed["x-amz-security-token"] = keys.token
    names = ";".join(sorted(signed))
    query = "&".join(f"{name}={value}" for name, _, value in sorted(pair.partition("=") for pair in parts.query.split("&") if pair))
    lines = [method, parts.path or "/", query, *(f"{name}:{signed[name]}" for name in sorted(signed)), "", names, signed[BODY_HASH]]
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    digest = hashlib.sha256("\n".join(lines).encode("latin-1", "replace")).hexdigest()  # as headers are sent, but for a host that none has
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{digest}"
    signature = _hmac(_signing_key(keys.secret, stamp[:8], region), text).hex()
    credential = f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**given, **signed, "authorization": credential}


@lru_cache(maxsize=64)
def _signing_key(secret: str, day: str, region: str) -> bytes:
    key = f"AWS4{secret}".encode()
    for part in (day, region, "s3", "aws4_request"):
        key = _hmac(key, part)
    return key


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")
