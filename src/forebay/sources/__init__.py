"""Where the prefetcher's items come from: objects below a prefix, members of tar shards, and what a decoder makes of them."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any, TypeAlias

from forebay import errors
from forebay._engine.locks.leases import Lease
from forebay._logs import logger
from forebay._model import Source as Source
from forebay._model import SourceInfo as SourceInfo
from forebay.origin import Origin
from forebay.origin.prefix import Prefix, RemoteAccess, checked_name, info_of, is_name
from forebay.remote import RemoteOptions
from forebay.sources.tar import TarSource as TarSource
from forebay.sources.tar import is_tar

log = logger("forebay.sources")

Decode: TypeAlias = Callable[[str, Any], Any]


class UrlSource:
    """The objects below a prefix: ``UrlSource("s3://bucket/photos")["2024/a b.jpg"]``.

    ``prefix``: a directory, a URL of any kind that the cache takes, or a path of ``filesystem``, an object of fsspec or pyarrow; of an
    HTTP URL a query, such as a signature, stays behind the names. Keys are plain names: what a URL must quote is quoted here.
    ``version``: of the whole dataset, where it has one. ``options``: how remotes are asked; else as the cache does, or the environment
    says. Each object is read whole: with retries and resumed, in ranges at once where it is large.

    Callable from any thread and after a fork; picklable if the filesystem is. Raises `ConfigError`, `MissingExtra`."""

    def __init__(
        self, prefix: str | os.PathLike[str], *, filesystem: Any = None, version: str | None = None, options: RemoteOptions | None = None
    ) -> None:
        self._prefix = Prefix(prefix, plain=filesystem is not None)
        self._reach = RemoteAccess(filesystem, options)
        self.uri = self._reach.key(self._prefix.url)
        self.version = version

    def __repr__(self) -> str:
        return f"UrlSource({self.uri!r})"

    def __getitem__(self, key: str) -> bytes:
        """The object's bytes. Raises `NotFound` or another `RemoteError`; `ConfigError` for a key that leads out of the prefix."""
        lease = self.lease(key)
        data = self._reach.bytes_of(lease) if lease is not None else None
        return self.fetch(key) if data is None else data

    def fetch(self, key: str) -> bytes:
        """The same, never from the cache."""
        return self._reach.whole(self._url(key))

    def lease(self, key: str) -> Lease | None:
        """A lease on the object where the cache has it already, from `Cache.read` or a `pull`, and it is the remote's still; else None."""
        return self._reach.kept(self._url(key), versioned=self.version is not None)

    def keys(self) -> Iterator[str]:
        """All names, in the order of the remote. What is no name below the prefix, such as ``../x``, is left out, and told once.
        Raises `RemoteError`, for one of HTTP, which has no listings."""
        has_warned = False
        for info in self._reach.list(self._prefix.folder):
            name = self._prefix.name_of(info.url)
            if is_name(name):
                yield name
            elif not has_warned:
                has_warned = True
                log.warning("%s: %r is no name below it: such names are left out", self.uri, name)

    def size(self, key: str) -> int | None:
        """Bytes of a local file; None where it would cost a request, or there is none."""
        status = self._local(key)
        return None if status is None else status.st_size

    def version_of(self, key: str) -> str | None:
        """Time, size and inode of a local file; None where it would cost a request, or there is none."""
        status = self._local(key)
        return None if status is None else f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"

    def info(self, key: str) -> SourceInfo:
        """The provenance of an item."""
        return SourceInfo(self.uri, key, None, (key,))

    def bind(self, origin: Origin) -> None:
        """Ask with a cache's options, and let it count. The prefetcher does this."""
        self._reach.bind(origin)

    def _url(self, key: str) -> str:
        return self._prefix.join(checked_name(key))

    def _local(self, key: str) -> os.stat_result | None:
        if self._prefix.local is None:
            return None
        try:
            return os.stat(self._url(key))
        except OSError:  # reading it will tell
            return None


class DecodedSource:
    """A source whose items are what ``decode(key, data)`` makes of those of ``inner``.

    ``decode`` may be a dict from extensions to such functions, see `by_extension`. ``version``: of the decoder; raise it when it gives
    other values, so that those of before are not taken for its own. Its name is its attribute ``name``, else where it is defined;
    of what has no name of its own (a lambda, an inner function, a function of a script) the code belongs to the name."""

    def __init__(self, inner: Any, decode: Decode | Mapping[str, Decode], version: str | None = None) -> None:
        self.inner = inner
        self.decode = by_extension(decode) if isinstance(decode, Mapping) else decode
        self.decoder = name_of(self.decode)
        self.decoder_version = version if version is not None else getattr(self.decode, "version", None)

    def __repr__(self) -> str:
        return f"DecodedSource({self.inner!r}, {self.decoder})"

    @property
    def uri(self) -> str:
        """Of ``inner``."""
        return str(self.inner.uri)

    @property
    def version(self) -> str | None:
        """Of ``inner``; the decoder's is ``decoder_version``."""
        return getattr(self.inner, "version", None)

    def __getitem__(self, key: str) -> Any:
        """The decoded item. Raises what ``inner`` and the decoder raise."""
        return self.decode(key, self.inner[key])

    @property
    def keys(self) -> Any:
        """The same of ``inner``, as `size`, `version_of` and `bind` are: None where it has none. Sizes are those before decoding."""
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
        return self._choice(key)(key, data)

    def _choice(self, key: str) -> Decode:
        for extension in _extensions(key):
            decode = self._decoders.get(extension)
            if decode is not None:
                return decode
        known = ", ".join(filter(None, self._decoders))
        raise errors.ConfigError(f"no decoder for {key!r}: there are those for {known}; one under '' would take the rest", key=key)


def by_extension(decoders: Mapping[str, Decode]) -> Decode:
    """One ``decode(key, data)`` that leaves it to the one for the longest extension of the key: of ``{".png": f, ".seg.png": g, "": h}``
    ``g`` takes ``a.seg.png`` and ``h`` what no other does. The case of letters does not matter, nor the dot at the beginning.
    Raises `ConfigError` for a key that none of them takes."""
    return _ByExtension(decoders)


def _extension(name: str) -> str:
    return "." + name.lower().lstrip(".") if name else ""


def _extensions(key: str) -> Iterator[str]:
    """From the longest to none."""
    rest = key.rpartition("/")[2].lower()
    while "." in rest:
        rest = rest.partition(".")[2]
        yield f".{rest}"
    yield ""


def name_of(decode: Any) -> str:
    """A name for a decoder that is the same in all processes, and another for another one."""
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
    """Of what a function does: its code, its defaults, and what it took from around it."""
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


def source_of(thing: Any) -> Source:
    """The source that a caller means: a path or URL that ends with ``.tar``, or several of them, are shards; any other is a prefix;
    an object with ``source[key]`` and ``uri`` is taken as it is. Raises `ConfigError` for anything else."""
    if isinstance(thing, (str, os.PathLike)):
        return TarSource(thing) if is_tar(os.fspath(thing)) else UrlSource(thing)
    if (
        isinstance(thing, (list, tuple))
        and thing
        and all(isinstance(each, (str, os.PathLike)) and is_tar(os.fspath(each)) for each in thing)
    ):
        return TarSource(thing)
    if hasattr(thing, "__getitem__") and isinstance(getattr(thing, "uri", None), str):
        source: Source = thing
        return source
    expected = "a path, a URL, paths or URLs of tar shards, or an object with source[key] and source.uri is wanted"
    raise errors.ConfigError(f"{thing!r} is no source: {expected}", name="source", value=repr(thing))
