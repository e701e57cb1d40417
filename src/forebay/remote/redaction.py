"""The one place where secrets are taken out of texts that people will read."""

from __future__ import annotations

import os
import re

from forebay.errors import ConfigError
from forebay.remote.urls import canonical, is_url

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,32}://[^\s'\"<>]+")  # bounded, as it is begun at each letter of a text
_END = ":,.;!)]}"
_ENDS = r"(?:token|password|passwd|secret|signature|credential|(?:access|account|api|secret)[_-]?key(?:[_-]?id)?)"  # of names
_NAMES = rf"(?:{_ENDS}|\b(?:sig|awsaccesskeyid|googleaccessid|key-pair-id|policy))"
_SECRET = re.compile(rf"(?i)((?:{_NAMES}\W?\s*[=:]|\bbearer\b|\bbasic\b)\s*[\"']?)[^\s&'\",;)]+")


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
        return canonical(plain) + url[len(plain) :]
    except ConfigError:
        return f"{url.partition('://')[0]}:..."
