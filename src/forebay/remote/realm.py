"""What decides, besides a URL, which bytes it leads to: the servers that the environment sets for a scheme, and the partition."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.remote.base import RemoteOptions

PUBLIC_HUB = "https://huggingface.co"
_S3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_IGNORE = "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"
_AWS_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}


def other_endpoint(kind: str) -> str:
    """The servers of a scheme, as a URL without a slash at its end, if the user's settings replace the public ones; else "".

    Raises what `configured_endpoint` raises, if the configuration files of AWS set endpoints."""
    if kind == "hf":
        endpoint = os.environ.get("HF_ENDPOINT", "").strip().rstrip("/")
        return "" if endpoint == PUBLIC_HUB else endpoint
    if kind != "s3":
        return ""
    if files := _deciding():
        return _asked(files, *(os.environ.get(name) for name in (*_S3, "AWS_PROFILE", "AWS_DEFAULT_PROFILE", _IGNORE)))
    return next((url for name in _S3 if (url := os.environ.get(name))), "").rstrip("/")


def _deciding() -> tuple[bytes, ...]:
    """The contents of AWS's configuration files if they set endpoints, or if a variable disables those; else nothing, and a hit need not
    import botocore."""
    files = tuple(_content(os.environ.get(name) or usual) for name, usual in _AWS_FILES.items())
    return files if os.environ.get(_IGNORE) or any(b"endpoint_url" in file for file in files) else ()


def _content(path: str) -> bytes:
    try:
        with open(os.path.expanduser(path), "rb") as file:
            return file.read()
    except OSError:  # there is none, or botocore reports the error
        return b""


@functools.lru_cache(maxsize=4)
def _asked(files: tuple[bytes, ...], *settings: str | None) -> str:
    from forebay.remote.s3.aws import configured_endpoint

    return configured_endpoint()


class Realm:
    """What decides, besides a URL, which bytes it leads to: part of the keys of a cache. The servers of a scheme are those that
    the settings name when its first URL is used. Callable from any thread.

    ``options``: whose ``partition`` counts for all schemes; else, for HTTP, their token or ``Authorization`` header."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self._partition = "" if options is None else options.partition or ""
        self._credentials = "" if options is None or options.partition is not None else options.authorization
        self._endpoints: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        named = any(map(os.environ.get, ("HF_ENDPOINT", *_S3))) or bool(_deciding())
        self.is_usual = not (named or self._partition or self._credentials)
        """Whether it adds nothing to any key, as far as is known."""

    def endpoint(self, kind: str) -> str:
        """See `other_endpoint`."""
        if kind not in self._endpoints:
            self._endpoints[kind] = other_endpoint(kind)
            self.is_usual = self.is_usual and not self._endpoints[kind]
        return self._endpoints[kind]

    def __call__(self, kind: str) -> str:
        """The text whose hash is part of the keys of a scheme; "": none."""
        text = self._texts.get(kind)
        if text is None:
            parts = self.endpoint(kind), self._partition or (self._credentials if kind in ("http", "https") else "")
            text = self._texts[kind] = repr(parts) if any(parts) else ""
        return text
