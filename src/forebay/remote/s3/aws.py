"""What the user has set up for AWS: credentials, region, endpoint, as botocore finds them in variables, files, roles and on the machine."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from forebay._logs import logger
from forebay.errors import AccessDenied, ConfigError, MissingExtra
from forebay.remote.redaction import redacted
from forebay.remote.s3.sigv4 import Keys

log = logger("forebay.remote.s3.aws")

_REGION = re.compile(r"\bs3(?:-fips)?(?:\.dualstack)?[.-]([a-z]+(?:-[a-z]+)+-[0-9]+)\.amazonaws\.com")

_OF_AWS = re.compile(r"(?:\A|\.)s3(?:[.-][a-z0-9-]+)*\.amazonaws\.com(?:\.cn)?\Z")
_PORTS = {"http": 80, "https": 443}

NONE_FOUND_KEPT = 60.0
"""Seconds for which credentials that were not found are not looked for again: it may take a second of time-outs."""


@dataclass(frozen=True, slots=True)
class S3Endpoint:
    """Where S3 is. ``endpoint``: URL without a path at its end, None for AWS itself. ``style``: ``auto``, ``path`` or ``virtual``."""

    endpoint: str | None
    region: str
    style: str
    variant: str = ""
    """For AWS itself: "-fips", ".dualstack" or both."""

    def address(self, bucket: str, path: str, region: str | None = None) -> str:
        """The URL of ``path`` (percent-encoded, no slash before it) in a bucket, which lies in ``region`` if that is known."""
        base = self.endpoint or _of_aws(region or self.region, self.variant)
        if self._by_host(bucket):
            scheme, _, host = base.partition("://")
            return f"{scheme}://{bucket}.{host}/{path}"
        return f"{base}/{bucket}/{path}" if path else f"{base}/{bucket}"

    def _by_host(self, bucket: str) -> bool:
        if self.style != "auto":
            return self.style == "virtual"
        # a dot in the bucket's name does not fit the certificate, and who runs a server of his own seldom has the names
        return self.endpoint is None and "." not in bucket and "_" not in bucket and bucket == bucket.lower()

    def region_in(self, url: str) -> str:
        """The region that the host's name tells, where S3 redirects to ``url``."""
        found = _REGION.search(urlsplit(url).hostname or "")
        return found[1] if found else self.region

    def is_ours(self, url: str) -> bool:
        """Whether a host to which S3 redirects may see a signature of ours."""
        there = urlsplit(url)
        host, port = there.hostname or "", there.port or _PORTS.get(there.scheme)
        if self.endpoint is None:
            return (there.scheme, port) == ("https", 443) and _OF_AWS.search(host) is not None
        home = urlsplit(self.endpoint)
        if (there.scheme, port) != (home.scheme, home.port or _PORTS.get(home.scheme)):
            return False
        return host == home.hostname or host.endswith(f".{home.hostname}")


def _of_aws(region: str, variant: str) -> str:
    return f"https://s3{variant}.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"


class Account:
    """The user's settings, read at the first use in each process. Any thread; usable after a fork.

    ``anonymous``: ask without a signature; None: where FOREBAY_S3_ANONYMOUS or AWS_NO_SIGN_REQUEST says so, or no credentials are found.
    Methods raise `MissingExtra`, `ConfigError` for settings that make no sense, `AccessDenied` where credentials cannot be had.
    """

    def __init__(self, anonymous: bool | None = None) -> None:
        self._anonymous = anonymous
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows; botocore's own may be held by a thread that a fork left behind
        self._session: Any = None
        self._place: S3Endpoint | None = None
        self._credentials: Any = None
        self._looked = -NONE_FOUND_KEPT

    def place(self) -> S3Endpoint:
        with self._settled():
            if self._place is None:
                self._place = _place_of(self._session)
            return self._place

    def keys(self) -> Keys | None:
        """The credentials, fresh; None: ask without a signature."""
        if self.is_anonymous():
            return None
        with self._settled():
            if self._credentials is None and time.monotonic() - self._looked > NONE_FOUND_KEPT:
                self._credentials = self._session.get_credentials()
                self._looked = time.monotonic()
            if self._credentials is None:
                return None
            found = self._credentials.get_frozen_credentials()
        return Keys(found.access_key, found.secret_key, found.token)

    def is_anonymous(self) -> bool:
        """Whether that is what the user wants."""
        if self._anonymous is not None:
            return self._anonymous
        return any(_is_on(os.environ.get(name, "")) for name in ("FOREBAY_S3_ANONYMOUS", "AWS_NO_SIGN_REQUEST"))

    @contextmanager
    def _settled(self) -> Iterator[None]:
        if self._pid != os.getpid():
            self._forget()
        with self._lock, aws_errors():
            if self._session is None:
                import botocore.session

                self._session = botocore.session.get_session()
            yield


@contextmanager
def aws_errors() -> Iterator[None]:
    """The edge: what botocore raises becomes ours. Its texts name files, profiles and settings, and hold no secret."""
    try:
        import botocore.exceptions as foreign
    except ImportError as error:
        raise MissingExtra.of("s3://", "s3") from error
    try:
        yield
    except (foreign.ProfileNotFound, foreign.ConfigParseError, foreign.ConfigNotFound, foreign.InvalidConfigError) as error:
        raise ConfigError(f"the AWS settings cannot be used: {error}") from error
    except foreign.BotoCoreError as error:
        raise AccessDenied(f"no AWS credentials can be had: {type(error).__name__}: {error}") from error


def _is_on(text: str) -> bool:
    return text.strip().lower() in ("1", "on", "yes", "true")


def _place_of(session: Any) -> S3Endpoint:
    profile = session.get_scoped_config()
    region = session.get_config_variable("region") or os.environ.get("AWS_REGION") or "us-east-1"
    endpoint = None if _is_on(str(session.get_config_variable("ignore_configured_endpoint_urls"))) else _endpoint(session, profile)
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"the S3 endpoint is {redacted(repr(endpoint))}: http://host or https://host is wanted")
    style = dict(profile.get("s3") or {}).get("addressing_style", "auto")
    fips, dual = (_is_on(str(session.get_config_variable(f"use_{name}_endpoint"))) for name in ("fips", "dualstack"))
    return S3Endpoint(endpoint.rstrip("/") if endpoint else None, region, style, "-fips" * fips + ".dualstack" * dual)


def _endpoint(session: Any, profile: dict[str, Any]) -> str | None:
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    choices = (
        os.environ.get("AWS_ENDPOINT_URL_S3"),
        os.environ.get("AWS_ENDPOINT_URL"),
        services.get("s3", {}).get("endpoint_url"),
        profile.get("endpoint_url"),
    )
    return next((choice for choice in choices if choice), None)
