"""Remotes, from which bytes are read: `resolve` returns the `Remote` of a URL. Independent of the engine.

- `urls`: keys, suffixes, local paths, texts without secrets
- `key_urls`: what of a query names an object, as the user says
- `base`: options, one call with its retries, parallel ranges of one object
- `http`: one object over HTTP
- `s3`: the same data plane, with AWS credentials and signatures
- `hub`: the same data plane, with the API and the revisions of the Hugging Face Hub
- `local`: files of this host
- `filesystems`: fsspec and pyarrow, in a helper process where a fork would break their clients
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from forebay._config import expand_user as expand_user
from forebay.remote.urls import PUBLIC_HUB, UrlRealm, hub_endpoint, scheme
from forebay.remote.urls import UrlNaming as UrlNaming
from forebay.remote.urls import absolute as absolute
from forebay.remote.urls import absolute_path as absolute_path
from forebay.remote.urls import as_text as as_text
from forebay.remote.urls import bare as bare
from forebay.remote.urls import canonical as canonical
from forebay.remote.urls import is_url as is_url
from forebay.remote.urls import local_path as local_path
from forebay.remote.urls import redacted as redacted
from forebay.remote.urls import s3_name as s3_name
from forebay.remote.urls import s3_version as s3_version
from forebay.remote.urls import shown as shown
from forebay.remote.urls import suffix_of_key as suffix_of_key
from forebay.remote.urls import without_user as without_user

if TYPE_CHECKING:
    from forebay._model import Remote
    from forebay.remote.base import RemoteOptions as RemoteOptions
    from forebay.remote.base import tracking_hosts as tracking_hosts
    from forebay.remote.filesystems import FilesystemRemote as FilesystemRemote

_S3 = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
_IGNORE = "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS"
_AWS_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}

_SENDING = frozenset({"s3", "hf"})  # beside HTTP: the schemes that send the user's headers

_remotes: dict[tuple[str, RemoteOptions, str], Remote] = {}


def __getattr__(name: str) -> Any:
    if name not in ("RemoteOptions", "tracking_hosts"):
        raise AttributeError(f"module 'forebay.remote' has no attribute {name!r}")
    from forebay.remote import base  # by the first request: a hit needs none of it

    value = globals()[name] = getattr(base, name)
    return value


class Realm(UrlRealm):
    """What decides, besides a URL, which bytes it leads to: part of the keys of a cache. The servers of a scheme are those that
    the settings name when its first URL is used. Callable from any thread.

    ``options``: whose ``partition`` counts for all schemes, and whose headers and client certificate for those that send them; their token
    and ``key_url`` for HTTP only. Raises `ConfigError` if the client certificate cannot be read."""

    def __init__(self, options: RemoteOptions | None = None) -> None:
        self._partition = "" if options is None else options.partition or ""
        self._credentials = "" if options is None or options.partition is not None else options.authorization
        self._headers = () if options is None else options.keyed_headers + options.keyed_certificate()
        self._key_url = None if options is None else options.key_url
        self._endpoints: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        named = any(map(os.environ.get, ("HF_ENDPOINT", *_S3))) or bool(_deciding())
        self.is_usual = not (named or self._partition or self._credentials or self._headers or self._key_url)
        """Whether it adds nothing to any key, as far as is known."""

    def endpoint(self, kind: str) -> str:
        """See `_other_endpoint`."""
        if kind not in self._endpoints:
            self._endpoints[kind] = _other_endpoint(kind)
            self.is_usual = self.is_usual and not self._endpoints[kind]
        return self._endpoints[kind]

    def key_query(self, url: str, query: str) -> str:
        """See `UrlRealm.key_query`."""
        if self._key_url is None:
            return query
        from forebay.remote import key_urls

        return key_urls.key_query(self._key_url, url, query)

    def __call__(self, kind: str) -> str:
        """See `UrlRealm`."""
        text = self._texts.get(kind)
        if text is None:
            is_http = kind in ("http", "https")
            parts = self.endpoint(kind), self._partition or (self._credentials if is_http else "")
            # What stands in `parts` already; an empty header does not, and is sent in place of the user of a URL.
            credentials = ("authorization", self._credentials) if is_http and self._credentials else None
            headers = [line for line in self._headers if line != credentials] if is_http or kind in _SENDING else []
            text = self._texts[kind] = repr((*parts, headers)) if headers else repr(parts) if any(parts) else ""
        return text


def resolve(url: str, options: RemoteOptions | None = None, realm: Realm | None = None) -> Remote:
    """The remote that serves ``url``: one for each scheme, options and endpoint in a process. ``realm``: names the endpoint; None: the
    environment does. Raises `MissingExtra`, and `ConfigError` for an unknown scheme."""
    from forebay.remote.base import RemoteOptions

    kind = scheme(url)
    endpoint = _other_endpoint(kind) if realm is None else realm.endpoint(kind)
    key = ("http" if kind == "https" else kind, options or RemoteOptions(), endpoint)
    remote = _remotes.get(key)
    # two threads may both create one: setdefault keeps the first, and the other holds no resources yet
    return remote if remote is not None else _remotes.setdefault(key, _create(*key))


class Resolvers:
    """The remotes of one set of options, and of one realm, by scheme. Callable from any thread."""

    def __init__(self, options: Callable[[], RemoteOptions], realm: Realm) -> None:
        self._options, self._realm = options, realm
        self._by_scheme: dict[str, Callable[[], Remote]] = {}

    def of(self, url: str) -> Callable[[], Remote]:
        """Return a function that returns the remote of ``url``. Its first call imports the remotes for HTTP, S3 and the hub, and the
        options, so a hit does not wait for them. For any other scheme the remote is created now: raises what `resolve` raises."""
        kind = scheme(url)
        known = self._by_scheme.get(kind)
        if known is not None:
            return known
        found = functools.cache(lambda: resolve(f"{kind}://", self._options(), self._realm))
        if kind not in ("http", "https", "s3", "hf"):
            found()
        return self._by_scheme.setdefault(kind, found)


def on_filesystem(filesystem: Any, options: RemoteOptions | None = None) -> FilesystemRemote:
    """The remote of a filesystem object of fsspec or pyarrow. Pickles the object to identify it."""
    from forebay.remote.filesystems import FilesystemRemote

    return FilesystemRemote(filesystem, options)


def local_path_on(filesystem: Any, path: str) -> str | None:
    """The absolute path on this host of a path on a filesystem object of fsspec or pyarrow; None on filesystems that are not local."""
    from forebay.remote.filesystems import protocols_of

    base = getattr(filesystem, "base_path", None)
    if base is not None and getattr(filesystem, "base_fs", None) is not None:
        return local_path_on(filesystem.base_fs, base + path.lstrip("/"))
    inner = getattr(getattr(filesystem, "handler", None), "fs", None)  # an fsspec filesystem wrapped for pyarrow
    if inner is not None:
        return local_path_on(inner, path)
    if {"file", "local"}.isdisjoint(protocols_of(filesystem)) or hasattr(filesystem, "fs"):
        return None
    return local_path(path)


def absolute_on(filesystem: Any, path: str) -> str:
    """A path on a filesystem object. If that is the one of this host, as an absolute path. Raises what the filesystem raises."""
    from forebay.remote import filesystems

    return filesystems.absolute_on(filesystem, path)


def _create(kind: str, options: RemoteOptions, endpoint: str) -> Remote:
    if kind == "http":
        from forebay.remote.http import HttpRemote

        return HttpRemote(options)
    if kind == "file":
        from forebay.remote.local import LocalRemote

        return LocalRemote()
    if kind == "s3":
        from forebay.remote.s3 import S3Remote

        return S3Remote(options, endpoint)
    if kind == "hf":
        from forebay.remote.hub import HubRemote

        return HubRemote(options, endpoint)
    from forebay.remote.filesystems import FilesystemRemote
    from forebay.remote.filesystems.clients import check_kind

    check_kind(kind)
    return FilesystemRemote(None, options)


def _other_endpoint(kind: str) -> str:
    """The servers of a scheme, as a URL without a slash at its end, if the user's settings replace the public ones; else "".

    Raises what `configured_endpoint` raises, if the configuration files of AWS set endpoints."""
    if kind == "hf":
        endpoint = hub_endpoint()
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
