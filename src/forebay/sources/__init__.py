"""Sources of the prefetcher's items: objects below a prefix, members of tar shards, and decoded items of another source."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, TypeAlias

from forebay import errors
from forebay._engine.leases import Lease
from forebay._kernel.interrupts import guarded_methods, paced
from forebay._logs import logger
from forebay._model import Source as Source
from forebay._model import SourceInfo as SourceInfo
from forebay.fetch import Fetcher
from forebay.fetch.prefix import Prefix, RemoteAccess, checked_name, info_of, is_name
from forebay.fetch.request import Target
from forebay.remote import RemoteOptions, as_text, redacted
from forebay.sources.tar import TarSource as TarSource
from forebay.sources.tar import is_tar

log = logger("forebay.sources")

Decode: TypeAlias = Callable[[str, Any], Any]


@guarded_methods("identity", "target")
class UrlSource:
    """The objects below a prefix: ``UrlSource("s3://bucket/photos")["2024/a b.jpg"]``.

    ``prefix``: a directory, a URL of any kind that the cache supports, or a path on ``filesystem``. The query of an HTTP URL, such as a
    signature, stays after the names. Keys are plain names: this class quotes them for URLs. ``filesystem``: an fsspec or pyarrow
    filesystem. ``version``: the version of the whole dataset, if it has one. ``options``: for requests; default: those of the cache, or of
    the environment. Reads each object whole, with retries and resumes, and large ones in parallel ranges.

    Callable from any thread and after a fork; picklable if the filesystem is. Raises `ConfigError`, `MissingExtra`."""

    def __init__(
        self, prefix: str | os.PathLike[str], *, filesystem: Any = None, version: str | None = None, options: RemoteOptions | None = None
    ) -> None:
        self._prefix = Prefix(prefix, plain=filesystem is not None)
        self._reach, self.options = RemoteAccess(filesystem, options), options
        self.uri = self._reach.shown(self._prefix.url)
        self.version = version
        self.is_local = self._prefix.local is not None
        """Whether its objects are local files: only these give their sizes and versions without a request."""

    def __repr__(self) -> str:
        return f"UrlSource({self.uri!r})"

    @property
    def identity(self) -> str:
        """What distinguishes its items from those of other sources: the `uri`, as the bound cache names it."""
        return self._reach.key(self._prefix.url)

    def __getitem__(self, key: str) -> bytes:
        """The object's bytes. Raises `NotFound` or another `RemoteError`; `ConfigError` for a key that leads out of the prefix."""
        lease = self.lease(key)
        data = self._reach.bytes_of(lease) if lease is not None else None
        return self.fetch(key) if data is None else data

    def target(self, key: str) -> Target:
        """The object as the bound cache fetches it, and its key there. Raises `ConfigError`, `MissingExtra`."""
        return self._reach.target(self._url(key))

    def fetch(self, key: str) -> bytes:
        """The object's bytes, never from the cache."""
        return self._reach.whole(self._url(key))

    def lease(self, key: str) -> Lease | None:
        """A lease on the object if the cache already has it, from `Cache.read` or a `pull`, in the remote's current version; else None."""
        return self._reach.kept(self._url(key), versioned=self.version is not None)

    def keys(self) -> Iterator[str]:
        """All names, in the order of the remote. Omits names that are not below the prefix, such as ``../x``, with one warning. Raises
        `RemoteError`, also for HTTP, which has no listings."""
        has_warned = False
        for info in paced(self._reach.list(self._prefix.folder)):
            name = self._prefix.name_of(info.url)
            if is_name(name):
                yield name
            elif not has_warned:
                has_warned = True
                log.warning("%s: %r is outside the source; such names are skipped", self.uri, name)

    def size(self, key: str) -> int | None:
        """Bytes of a local file; None for a remote one, which would cost a request, or if there is none."""
        status = self._local(key)
        return None if status is None else status.st_size

    def version_of(self, key: str) -> str | None:
        """Time, size and inode of a local file; None for a remote one, which would cost a request, or if there is none."""
        status = self._local(key)
        return None if status is None else f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"

    def info(self, key: str) -> SourceInfo:
        """The provenance of an item."""
        return SourceInfo(self.uri, key, None, (key,))

    def bind(self, fetcher: Fetcher) -> None:
        """Use this cache: its options and its counters. The prefetcher calls this."""
        self._reach.bind(fetcher)

    def _url(self, key: str) -> str:
        return self._prefix.join(checked_name(key))

    def _local(self, key: str) -> os.stat_result | None:
        if self._prefix.local is None:
            return None
        try:
            return os.stat(self._url(key))
        except OSError:  # reading it will raise the error
            return None


class DecodedSource:
    """A source whose items are the results of ``decode(key, data)`` for the items of ``inner``.

    ``decode``: such a function, or a dict from extensions to functions, see `by_extension`. Its name is its attribute ``name``, else its
    module and qualified name; the name of a lambda, an inner function, or a function of a script also contains a hash of its code.
    ``version``: the decoder's version; raise it when the decoder returns other values, so that stored earlier values are not used."""

    def __init__(self, inner: Any, decode: Decode | Mapping[str, Decode], version: str | None = None) -> None:
        self.inner = inner
        self.decode = by_extension(decode) if isinstance(decode, Mapping) else decode
        self.decoder = name_of(self.decode)
        self.decoder_version = version if version is not None else getattr(self.decode, "version", None)

    def __repr__(self) -> str:
        return f"DecodedSource({self.inner!r}, {self.decoder})"

    @property
    def uri(self) -> str:
        """The URI of ``inner``."""
        return str(self.inner.uri)

    @property
    def identity(self) -> str:
        """See `UrlSource.identity`."""
        return identity_of(self.inner)

    @property
    def version(self) -> str | None:
        """The version of ``inner``; that of the decoder is ``decoder_version``."""
        return getattr(self.inner, "version", None)

    def __getitem__(self, key: str) -> Any:
        """The decoded item. Raises what ``inner`` and the decoder raise."""
        return self.decode(key, self.inner[key])

    @property
    def keys(self) -> Any:
        """The method of ``inner``, like `size`, `version_of` and `bind`; None if it has none. Sizes are those before decoding."""
        return getattr(self.inner, "keys", None)

    @property
    def size(self) -> Any:
        """See `keys`."""
        return getattr(self.inner, "size", None)

    @property
    def version_of(self) -> Any:
        """See `keys`."""
        return getattr(self.inner, "version_of", None)

    @property
    def bind(self) -> Any:
        """See `keys`."""
        return getattr(self.inner, "bind", None)

    def info(self, key: str) -> SourceInfo:
        """The provenance of an item."""
        return info_of(self.inner, key)


class _ByExtension:
    """See `by_extension`."""

    def __init__(self, decoders: Mapping[str, Decode]) -> None:
        self._decoders = {_extension(name): decode for name, decode in decoders.items()}
        parts = sorted((name, name_of(decode), getattr(decode, "version", None)) for name, decode in self._decoders.items())
        self.name = ",".join(f"{extension}={name}" + (f"@{version}" if version else "") for extension, name, version in parts)

    def __call__(self, key: str, data: Any) -> Any:
        for extension in _extensions(key):
            decode = self._decoders.get(extension)
            if decode is not None:
                return decode(key, data)
        known = ", ".join(filter(None, self._decoders))
        raise errors.ConfigError(f"no decoder for {key!r}: there are decoders for {known}; one under '' would handle the rest", key=key)


def by_extension(decoders: Mapping[str, Decode]) -> Decode:
    """A ``decode(key, data)`` that calls the decoder for the longest extension of the key: with ``{".png": f, ".seg.png": g, "": h}``,
    ``g`` decodes ``a.seg.png``, and ``h`` everything that matches no other. Ignores case and the leading dot. Raises `ConfigError` for a
    key that matches none."""
    return _ByExtension(decoders)


def _extension(name: str) -> str:
    return "." + name.lower().lstrip(".") if name else ""


def _extensions(key: str) -> Iterator[str]:
    """The extensions of a key, from the longest to the empty one."""
    rest = key.rpartition("/")[2].lower()
    while "." in rest:
        rest = rest.partition(".")[2]
        yield f".{rest}"
    yield ""


def name_of(decode: Any) -> str:
    """A name for a decoder, the same in all processes, different for different decoders."""
    own = getattr(decode, "name", None)
    if isinstance(own, str):
        return own
    inner = getattr(decode, "func", None)
    if callable(inner) and hasattr(decode, "keywords"):  # functools.partial
        given = [*map(repr, decode.args), *(f"{name}={value!r}" for name, value in sorted(decode.keywords.items()))]
        return f"{name_of(inner)}({', '.join(given)})"
    named = decode if hasattr(decode, "__qualname__") else type(decode)
    module, name = named.__module__, named.__qualname__
    if module not in ("__main__", "__mp_main__") and "<" not in name:
        return f"{module}.{name}"
    code = getattr(decode, "__code__", None) or getattr(vars(named).get("__call__"), "__code__", None)
    return f"{module.replace('__mp_main__', '__main__')}.{name}" + (f"#{_digest(decode, code)}" if code else "")


def _digest(function: Any, code: CodeType) -> str:
    """A digest of the code of a function, its defaults, and its closure variables."""
    parts = [*_parts(code), repr(getattr(function, "__defaults__", None)), repr(getattr(function, "__kwdefaults__", None))]
    parts += [repr(around) for around in inspect.getclosurevars(function).nonlocals.items()] if inspect.isfunction(function) else []
    return hashlib.blake2s("\0".join(parts).encode("utf-8", "replace"), digest_size=8).hexdigest()


def _parts(code: CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def identity_of(source: Any) -> str:
    """What distinguishes the items of a source from those of others."""
    own = getattr(source, "identity", None)
    return own if isinstance(own, str) else str(source.uri)


def options_of(source: Any) -> RemoteOptions | None:
    """The options for requests that were passed to a source; None if there are none, or it is of another package."""
    while isinstance(source, DecodedSource):
        source = source.inner
    return source.options if isinstance(source, UrlSource | TarSource) else None


def source_of(thing: Any) -> Source:
    """The source for an argument of a caller. A path or URL that ends with ``.tar``, or several of them, are shards; any other is a prefix;
    an object with ``source[key]`` and ``uri`` is used as is. Raises `ConfigError` for anything else."""
    if isinstance(thing, (str, os.PathLike)):
        return TarSource(thing) if is_tar(as_text(thing)) else UrlSource(thing)
    if isinstance(thing, (list, tuple)) and thing and all(isinstance(each, (str, os.PathLike)) and is_tar(as_text(each)) for each in thing):
        return TarSource(thing)
    if hasattr(thing, "__getitem__") and isinstance(getattr(thing, "uri", None), str):
        source: Source = thing
        return source
    expected = "a path, a URL, paths or URLs of tar shards, or an object with source[key] and source.uri"
    shown = redacted(repr(thing))
    raise errors.ConfigError(f"{shown} is not a source: expected {expected}", name="source", value=shown)
