"""The one place where secrets are taken out of texts that people will read."""

from __future__ import annotations

import os
import re

from forebay.errors import ConfigError
from forebay.remote.urls import canonical, is_url

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,32}://[^\s'\"<>]+")  # bounded, as it is begun at each letter of a text
_END = ":,.;!)]}"
_ENDS = r"(?:token|password|passwd|secret|signature|credential|(?:access|account|api|secret)[_-]?key(?:[_-]?id)?)"  # of names
_NAMES = rf"(?:{_ENDS}|(?:\b|%3F|%26)(?:sig|awsaccesskeyid|googleaccessid|key-pair-id|policy))"
_SECRET = re.compile(rf"(?i)((?:{_NAMES}(?:\W?\s*[=:]|%3D)|\bbearer\b|\bbasic\b)\s*[\"']?)[^\s&'\",;)]+")


def redacted(text: str) -> str:
    """``text`` without the secrets in it: each URL as its key (no password, no signature, a query by its hash), and ``...`` for the
    values of headers and settings that hold secrets. Raises nothing. Idempotent."""
    return _SECRET.sub(r"\1...", _URL.sub(_shown, text))


def shown(url: str | os.PathLike[str]) -> str:
    """A URL without its secrets, as its key has it; a path as it is."""
    text = os.fspath(url)
    try:
        return canonical(text) if is_url(text) else redacted(text) if "://" in text else text
    except ConfigError:
        return redacted(text)


def _shown(found: re.Match[str]) -> str:
    url = found[0]
    plain = url.rstrip(_END)
    try:
        key = canonical(plain)
        return (_plain(key) if key.startswith("file:") else key) + url[len(plain) :]
    except ConfigError:
        return f"{url.partition('://')[0]}:..."


def _plain(key: str) -> str:
    """The key of a path, without the secrets of a URL that was taken for one: there was a quote or a blank before it, or a slash less."""
    head, colon, rest = key.partition("%3A/")
    if not colon:
        return key
    path, mark, query = rest.partition("%3F")
    host, slash, name = path.partition("/")
    _, at, host = host.rpartition("%40")
    return f"{head}{colon}{at and '...%40'}{host}{slash}{name}{mark}{query and '...'}"
