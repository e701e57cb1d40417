"""Where bytes come from: `resolve` finds the `Remote` of a URL. Knows nothing of the engine.

- `urls`: keys, suffixes, local paths; `redaction`: texts without secrets
- `base`: options, one call with its retries, the edge where foreign errors become ours
- `transfer`: several ranges at once
- `http`: one object over HTTP
- `s3`: the same data plane, with AWS credentials and signatures
- `local`: files of this host
- `filesystems`: fsspec and pyarrow, in a process of their own where a fork would break them
"""

from __future__ import annotations

from typing import Any

from forebay._model import Remote
from forebay.remote.base import Hosts as Hosts
from forebay.remote.base import RemoteOptions as RemoteOptions
from forebay.remote.base import reaching as reaching
from forebay.remote.redaction import redacted as redacted
from forebay.remote.redaction import shown as shown
from forebay.remote.urls import canonical as canonical
from forebay.remote.urls import hashed, scheme
from forebay.remote.urls import is_url as is_url
from forebay.remote.urls import key_on as key_on
from forebay.remote.urls import local_path as local_path
from forebay.remote.urls import suffix as suffix
from forebay.remote.urls import suffix_of_key as suffix_of_key

_made: dict[tuple[str, RemoteOptions], Remote] = {}


def resolve(url: str, options: RemoteOptions | None = None) -> Remote:
    """The remote that serves ``url``: one for each scheme and options in a process. Raises `MissingExtra`, or `ConfigError`
    for a scheme that nobody knows."""
    kind = scheme(url)
    key = ("http" if kind == "https" else kind, options or RemoteOptions())
    found = _made.get(key)
    # two threads may both make one: setdefault lets the first win, and the other's holds nothing yet
    return found if found is not None else _made.setdefault(key, _make(*key))


def on_filesystem(filesystem: Any, path: str, options: RemoteOptions | None = None) -> tuple[str, str, Remote]:
    """A path of a filesystem object of fsspec or pyarrow: its key, the suffix of its name, and the remote that serves it.

    Two objects with other settings (another endpoint, other credentials) have other keys. Settings reach the key by hash only."""
    from forebay.remote.filesystems import FilesystemRemote, identity, protocols_of

    kind = next(iter(protocols_of(filesystem)), "filesystem")
    key = key_on(kind, path, hashed(identity(filesystem)))
    return key, suffix_of_key(key.rpartition("#")[0]), FilesystemRemote(filesystem, options)


def arrow_filesystem(url: str) -> tuple[Any, str] | None:
    """The pyarrow filesystem of a URL, and the path on it; None where pyarrow is not there, or does not know it."""
    from forebay.remote.filesystems.clients import arrow_from_uri

    return arrow_from_uri(url)


def local_path_on(filesystem: Any, path: str) -> str | None:
    """The absolute path of this host that a path on a filesystem object of fsspec or pyarrow means; None on any other."""
    from forebay.remote.filesystems import protocols_of

    base = getattr(filesystem, "base_path", None)
    if base is not None and getattr(filesystem, "base_fs", None) is not None:
        return local_path_on(filesystem.base_fs, base + path.lstrip("/"))
    inner = getattr(getattr(filesystem, "handler", None), "fs", None)  # an fsspec filesystem in pyarrow's clothes
    if inner is not None:
        return local_path_on(inner, path)
    if {"file", "local"}.isdisjoint(protocols_of(filesystem)) or hasattr(filesystem, "fs"):
        return None
    return local_path(path)


def _make(kind: str, options: RemoteOptions) -> Remote:
    if kind == "http":
        from forebay.remote.http import HttpRemote

        return HttpRemote(options)
    if kind == "file":
        from forebay.remote.local import LocalRemote

        return LocalRemote()
    if kind == "s3":
        from forebay.remote.s3 import S3Remote

        return S3Remote(options)
    from forebay.remote.filesystems import FilesystemRemote
    from forebay.remote.filesystems.clients import check_kind

    check_kind(kind)
    return FilesystemRemote(None, options)
