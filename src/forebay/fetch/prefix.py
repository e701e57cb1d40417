"""For all sources: provenance, names below a prefix, and access to remotes, with or without a cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from forebay import errors, remote
from forebay._engine.leases import Lease
from forebay._kernel import host
from forebay._model import URLS, BufferSink, ObjectInfo, Remote, SourceInfo, Span, Transfer, exact_str
from forebay.fetch import A, Fetcher
from forebay.fetch.opening import in_memory
from forebay.fetch.request import FetchOptions, Target
from forebay.remote import RemoteOptions


def info_of(source: Any, key: str) -> SourceInfo:
    """The provenance of an item of any source."""
    own = getattr(source, "info", None)
    return SourceInfo(source.uri, key, None, (key,)) if own is None else own(key)


def checked_key(key: object) -> str:
    """The key of an item as an exact str. Raises `ConfigError`."""
    text = exact_str(key)
    if not text:
        raise errors.ConfigError(f"{key!r} is not a key: expected a str that is not empty", name="key", value=repr(key))
    return text


def checked_name(key: object) -> str:
    """A key that names what lies below a prefix. Raises `ConfigError`."""
    name = checked_key(key)
    if not is_name(name):
        message = f"{name!r} is not a key: expected a name below the source, such as 'a/b.jpg', without . and .."
        raise errors.ConfigError(message, name="key", value=repr(name))
    try:
        name.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        message = f"{name!r} is not a key: it contains half a character, at {error.start}"
        raise errors.ConfigError(message, name="key", value=repr(name)) from None
    return name


def is_name(key: str) -> bool:
    """Whether a name stays below its prefix."""
    return bool(key) and not key.startswith("/") and "\0" not in key and {".", ".."}.isdisjoint(key.split("/"))


_AUTHORITIES = {"http": "host", "https": "host", "s3": "bucket"}


class Prefix:
    """The common beginning of the URLs of a source; ``plain``: a path of a filesystem object, which is never quoted."""

    def __init__(self, text: str | os.PathLike[str], *, plain: bool = False) -> None:
        text = remote.as_text(text)
        local = None if plain else remote.local_path(text)
        kind = text.partition("://")[0].lower() if "://" in text and not plain else ""
        self._s3 = kind == "s3"
        self._quoted = kind in ("http", "https")
        self._chained = kind not in ("", "file", "http", "https", "s3")
        head, mark, tail = (local, "", "") if local is not None else self._cut(text, kind)
        self.local = local
        if kind in _AUTHORITIES and head[len(kind) + 3 :] == "":
            message = f"{kind}:// names no {_AUTHORITIES[kind]}: expected {kind}://{_AUTHORITIES[kind]}/path"
            raise errors.ConfigError(message, name="url", value=f"{kind}://")
        self._head, self._tail = head.rstrip("/"), mark + tail
        self.url = self._head + self._tail if self._head else head or "/"

    @staticmethod
    def _cut(text: str, kind: str) -> tuple[str, str, str]:
        """The text before and after the names: names go before a query (such as a signature), or before the rest of a chain of fsspec."""
        if kind in ("http", "https"):
            return text.partition("#")[0].partition("?")
        return (text, "", "") if kind == "s3" else text.partition("::")

    def join(self, name: str) -> str:
        """The URL, or path, of this name below the prefix. Raises `ConfigError` where fsspec would take it for several URLs."""
        from urllib.parse import quote

        if self._chained and "::" in name:
            message = f"{name!r} cannot be read by a URL, where :: has a meaning: give the filesystem, UrlSource(path, filesystem=...)"
            raise errors.ConfigError(message, name="key", value=name)
        if self._s3:
            name = remote.s3_name(name)
        if self._quoted:
            name = quote(name.encode("utf-8", "surrogateescape"), safe="/~")
        return f"{self._head}/{name}{self._tail}"

    @property
    def folder(self) -> str:
        """The URL, or path, whose listing names everything below."""
        return self.join("")

    def name_of(self, url: str) -> str:
        """The name of a URL from a listing: the inverse of `join`."""
        path = remote.local_path(url) if self.local is not None else url
        name = (path or "").removeprefix(self._head + "/").removesuffix(self._tail)
        return remote.s3_version(name)[0] if self._s3 else name


class RemoteAccess:
    """Access to remotes, or to one filesystem object: with the options of the bound cache, else with those of the environment.

    Callable from any thread and after a fork. Pickles without its cache: the receiving process binds its own."""

    def __init__(self, filesystem: Any = None, options: RemoteOptions | None = None) -> None:
        self.filesystem, self._given = filesystem, options
        self._realm = None if options is None else remote.Realm(options)
        self.fetcher: Fetcher | None = None
        self._bound_at = 0
        self._known_filesystem: remote.FilesystemRemote | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return RemoteAccess, (self.filesystem, self._given)

    def bind(self, fetcher: Fetcher) -> None:
        """Use this cache's options and copies, and let it count the requests. The last cache that was bound applies."""
        self.fetcher, self._bound_at, self._known_filesystem = fetcher, fetcher.store.now(exact=True), None

    def kept(self, url: str, *, versioned: bool = False) -> Lease | None:
        """A lease on the object, if the cache has it from `Cache.read` or a `pull`, in the remote's version. ``versioned``: the caller
        named the version of the dataset, so any copy validated since `bind` will do."""
        fetcher = self.fetcher
        if fetcher is None or fetcher.closed or self.is_local(url):
            return None
        options = FetchOptions.of(fetcher)
        return fetcher.kept(self.target(url), options if fetcher.offline or not versioned else options._replace(since=self._bound_at))

    def target(self, url: str) -> Target:
        """An object as the bound cache fetches it, and its key there. Raises `ConfigError`, `MissingExtra`."""
        fetcher = self.fetcher
        assert fetcher is not None
        if self.filesystem is not None:
            target = fetcher.target_on(self._on_filesystem, url)
        elif self._realm is None:
            return fetcher.target(url)
        else:
            target = fetcher.target_by(url, self._naming(fetcher), partial(self.remote, url))
        return target._replace(options=self._given)

    @property
    def _on_filesystem(self) -> remote.FilesystemRemote:
        if self._known_filesystem is None:
            self._known_filesystem = remote.on_filesystem(self.filesystem, self.options)
        return self._known_filesystem

    def _naming(self, fetcher: Fetcher) -> remote.UrlNaming:
        """How this cache names what is fetched with these options."""
        return fetcher.naming if self._realm is None else fetcher.naming._replace(realm=self._realm)

    @property
    def options(self) -> RemoteOptions:
        return self._given or (self._environment if self.fetcher is None else self.fetcher.options)

    @host.cached_property
    def _environment(self) -> RemoteOptions:
        return RemoteOptions.from_environment()

    def key(self, url: str) -> str:
        """The key under which the bound cache stores an object; without a cache, see `shown`. Raises `ConfigError`."""
        return self._text(url, None if self.fetcher is None else self._naming(self.fetcher))

    def shown(self, url: str) -> str:
        """The URL without secrets, the same for all its spellings. Raises `ConfigError`."""
        return self._text(url, None)

    def _text(self, url: str, naming: remote.UrlNaming | None) -> str:
        return remote.canonical(url, naming) if self.filesystem is None else self._on_filesystem.key(url, naming)

    def remote(self, url: str) -> Remote:
        """The remote that serves this URL. Raises `ConfigError`, `MissingExtra`; `Offline` if the cache must not contact it."""
        if self.fetcher is not None and self.fetcher.offline and not self.is_local(url):
            raise errors.Offline.of(self.key(url))
        if self.filesystem is not None:
            return self._on_filesystem
        return remote.resolve(url, self.options, self._realm or (None if self.fetcher is None else self.fetcher.realm))

    def is_local(self, url: str) -> bool:
        return self.filesystem is None and remote.local_path(url) is not None

    def stat(self, url: str) -> ObjectInfo:
        """The remote's description of an object. Raises `RemoteError`."""
        with self._reaching():
            info = self.remote(url).stat(url)
        if self.fetcher is not None and not self.is_local(url):
            self.fetcher.count(Transfer(requests=1))
        assert info is not None  # only a known version is answered with None
        return info

    def whole(self, url: str) -> bytes:
        """All bytes of an object, of one version. Raises `RemoteError`."""
        served_by = self.remote(url)
        if self.is_local(url):
            info = self.stat(url)
            return served_by.read(url, Span(0, info.size or 0), info=info)
        sink = BufferSink(self.fetcher.most if self.fetcher is not None else in_memory)
        self._receive(url, partial(served_by.fetch, url, sink))
        return bytes(sink.data)

    def bytes_of(self, lease: Lease) -> bytes | None:
        """The bytes of a lease of `kept`; None if they are damaged."""
        assert self.fetcher is not None
        try:
            with lease:
                data = self.fetcher.store.bytes_leased(lease)
                return None if data is None else bytes(data)
        except errors.CacheFault as error:
            self.fetcher.fall_back(error, lease.entry.key)
            return None

    def part(self, url: str, span: Span, info: ObjectInfo) -> bytes:
        """Some bytes of an object, of this version. Raises `RemoteError`, of which `RemoteChanged`."""
        kept = self.kept_part(url, span, info.validator) if info.validator is not None else None
        if kept is not None:
            return kept
        return self._receive(url, partial(self.remote(url).read, url, span, info=info))

    def kept_part(self, url: str, span: Span, validator: str) -> bytes | None:
        """Some bytes of an object, if the cache has all of it in this version; asks no remote."""
        fetcher = self.fetcher
        if fetcher is None or self.is_local(url):
            return None
        try:
            hit = fetcher.store.view(URLS, self.key(url))
        except errors.CacheFault as error:
            fetcher.fall_back(error, self.key(url))
            return None
        if hit is None or hit.entry.validator != validator or span.end > hit.size:
            return None
        fetcher.store.touch(hit.entry)
        return bytes(hit.view[span.start : span.end])

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All objects whose URL begins with this, without those that stand for directories. Raises `RemoteError`."""
        infos = self.remote(url).list(url)
        while True:
            with self._reaching():  # not around the work of the caller between two of them
                info = next(infos, None)
            if info is None:
                return
            if not info.is_folder:
                yield info

    def _reaching(self) -> AbstractContextManager[None]:
        return nullcontext() if self.fetcher is None else self.fetcher.reaching()

    def _receive(self, url: str, ask: Callable[[], A]) -> A:
        return ask() if self.fetcher is None or self.is_local(url) else self.fetcher.receive(self.key(url), ask)
