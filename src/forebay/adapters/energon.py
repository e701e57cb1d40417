"""Megatron-Energon's pool of items that are loaded ahead, over this node's cache: ``get_loader(..., cache_pool=FileStoreCachePool())``."""

from __future__ import annotations

import base64
import enum
import hashlib
import json
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from forebay import codecs, errors
from forebay._logs import logger
from forebay._model import Noted
from forebay.cache import Cache, origin_of

try:
    from megatron.energon.cache import CachePool, Lazy
    from megatron.energon.cache import base as energon_base
    from megatron.energon.epathlib import EPath
    from megatron.energon.source_info import SourceInfo, add_source_info
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.energon", "energon") from error

__all__ = ["FileCacheLazy", "FileStoreCachePool", "NoCachePool", "SpilledLazy"]

log = logger("forebay.adapters.energon")

SPACE = "energon"
GIB = 1 << 30
_FORM = "noted"  # how items lie in the cache: those of another form have other keys
_PYTREE = codecs.codec("pytree")
_PRIMARY: Any = getattr(energon_base, "PrimaryFileStore", ())  # older versions have none


class _ItemForm(enum.IntFlag):
    """What an item is as it lies in the cache, and its source beside it. One digit on the disk, which stays readable."""

    PICKLED = 1
    DECODED = 2
    PLAIN = 4  # neither is pickled


Found = tuple[Any, Any]
"""A value, and Energon's SourceInfo or None."""


class FileCacheLazy(Lazy):  # type: ignore[misc]  # Energon is optional: to mypy it is Any
    """An item that is being loaded, or waits for it. ``ds``, ``fname``: what it is an item of; equal lazies are of the same.

    Callable from any thread. Dropped at any time it releases its share, and nothing else."""

    __slots__ = ("__weakref__", "_kept", "_load")

    def __init__(self, ds: Any, fname: str, pool: Any, load: Callable[[], Found] | None) -> None:
        super().__init__(ds=ds, fname=fname, pool=pool)
        self._load = load
        self._kept: list[Found] = []  # whoever is first in it came first: no lock, which a fork could leave locked

    def get(self, sample: Any = None) -> Any:
        """The item, decoded: the same object each time. Its source is added to ``sample`` each time, too.

        Raises what the dataset or its decoder raises."""
        found = self._found()
        if found[1] is not None:
            add_source_info(sample, found[1])
        return found[0]

    def _found(self) -> Found:
        load = self._load
        if load is not None:
            self._kept.append(load())
            self._load = None  # nobody is kept from letting the item go
        return self._kept[0]

    def __hash__(self) -> int:
        return hash((id(self.ds), self.fname))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self.ds is other.ds and self.fname == other.fname

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fname!r}{' with its data' if self._kept else ''}>"


class SpilledLazy(FileCacheLazy):
    """An object that was put to disk by ``to_cache``: each is another one, whatever its name."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class FileStoreCachePool(CachePool):  # type: ignore[misc]
    """Energon's pool: items are loaded in the background to local disk, and go when their last holder is done with them.

    ``parent_cache_dir``: a directory in which the cache's root lies; or ``cache``: an open `Cache`; else the default root.
    ``num_workers``: threads that load, in each process. ``max_cache_size_gbytes`` (GiB), ``max_cache_count``: what the items of all
    processes that use the same root may take together. ``method``: ``raw`` keeps what the dataset holds, and decodes at each
    lazy's first `get`; ``pickle`` keeps what was decoded, pickled. In a root that others can write to nothing is unpickled unless
    ``method`` says so.

    An item that several processes want at the same time is read once. Callable from any thread, usable in both processes after a
    fork, pending loads or not; picklable, unless ``cache`` is not. Raises `ConfigError`, and what `Cache` raises when it is opened."""

    def __init__(
        self, *, parent_cache_dir: str | os.PathLike[str] | None = None, num_workers: int = 8, max_cache_size_gbytes: float = 1024,
        max_cache_count: int = 10_000_000, method: Literal["raw", "pickle"] = "raw", cache: Cache | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        if method not in ("raw", "pickle"):
            raise errors.ConfigError(f"method={method!r}: there are 'raw' and 'pickle'", name="method", value=repr(method))
        if cache is not None and parent_cache_dir is not None:
            message = "parent_cache_dir and cache both say where the items are kept: give one of them"
            raise errors.ConfigError(message, name="cache", value=repr(cache))
        self.parent_cache_dir = Path(parent_cache_dir) if parent_cache_dir is not None else None
        self.num_workers, self.method, self._given = num_workers, method, cache
        self._max_size, self._max_count = int(max_cache_size_gbytes * GIB), max_cache_count
        self._cache = cache or Cache(self.parent_cache_dir / "forebay" if self.parent_cache_dir is not None else None)
        self._plain = method != "pickle" and origin_of(self._cache).others_can_write
        self._stores = _Stores(method, self._plain)
        self._prefetcher = self._cache.prefetcher(
            self._stores, name=SPACE, workers=num_workers, budget=self._max_size, max_count=max_cache_count, policy="wait", keep=False
        )

    def get(self, ds: Any, fname: str, sample: Any = None) -> Any:
        """The item, read and decoded now, past the cache; its source is added to ``sample``."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: Any, fname: str) -> FileCacheLazy:
        """Begin to load an item. Raises RuntimeError after `close`."""
        ds, fname = _resolved(ds, fname)
        lazy = self._prefetcher.get_lazy(self._stores.key(ds, fname))
        return FileCacheLazy(ds, fname, self, lambda: _decoded(ds, fname, lazy.get(), self._plain))

    def to_cache(self, data: Any, name: str) -> SpilledLazy:
        """Put an object to disk, pickled, until the lazy that is given for it is read or dropped. Raises RuntimeError after `close`."""
        lazy = self._prefetcher.put(data, name)
        return SpilledLazy(None, name, self, lambda: (lazy.get(), None))

    def close(self) -> None:
        """Load nothing more. What runs is waited for; lazies that were handed out still deliver. May be called again."""
        self._prefetcher.close()
        if self._given is None:
            self._cache.close()

    @property
    def cache_dir(self) -> Path:
        """The root of the cache. Nothing in it is to be changed by others."""
        return self._cache.path

    @property
    def current_cache_size(self) -> int:
        """Bytes that are kept now for all processes that use this root."""
        return int(self._prefetcher.used)

    @property
    def current_cache_count(self) -> int:
        """Items that are kept now for all processes that use this root."""
        return int(self._prefetcher.count)

    @property
    def max_cache_size(self) -> int:
        """Bytes that the items may take. May be assigned: for all processes, at once."""
        return self._max_size

    @max_cache_size.setter
    def max_cache_size(self, size: int) -> None:
        self._prefetcher.set_limits(budget=size)
        self._max_size = size

    @property
    def max_cache_count(self) -> int:
        """How many items there may be. May be assigned, too."""
        return self._max_count

    @max_cache_count.setter
    def max_cache_count(self, count: int) -> None:
        self._prefetcher.set_limits(max_count=count)
        self._max_count = count

    def __reduce__(self) -> tuple[Any, ...]:
        how = {
            "parent_cache_dir": self.parent_cache_dir, "num_workers": self.num_workers, "max_cache_size_gbytes": self._max_size / GIB,
            "max_cache_count": self._max_count, "method": self.method, "cache": self._given,
        }  # fmt: skip
        return _made, (how,)

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {str(self.cache_dir)!r}, {self.method}, at most {self._max_size:,} bytes, {self._max_count:,} items>"
        )

    __str__ = __repr__


class NoCachePool(CachePool):  # type: ignore[misc]
    """Energon's pool without a cache: each lazy reads its item when it is first asked."""

    def get(self, ds: Any, fname: str, sample: Any = None) -> Any:
        """The item, read and decoded; its source is added to ``sample``."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: Any, fname: str) -> FileCacheLazy:
        """A lazy that loads nothing ahead."""
        ds, fname = _resolved(ds, fname)
        return FileCacheLazy(ds, fname, self, lambda: ds[fname])

    def to_cache(self, data: Any, name: str) -> SpilledLazy:
        """A lazy that holds the object itself."""
        return SpilledLazy(None, name, self, lambda: (data, None))

    def close(self) -> None:
        """Nothing is open."""


class _Stores:
    """All of Energon's stores that items were asked of, as one source: a key says which of them, then the name in it."""

    uri = "energon"

    def __init__(self, method: str, plain: bool) -> None:
        self._method, self._plain = method, plain
        self._by_token: dict[str, Any] = {}
        self._decoders: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def key(self, ds: Any, fname: str) -> str:
        """Two processes give the same key only to the same item."""
        said = [_FORM, self._method, str(ds.get_path())]
        for store in _chain(ds):
            if self._method == "pickle" or _inner(store) is None:
                said.append(_name_of(type(store)))
            if self._method == "pickle" and getattr(store, "decoder", None) is not None:
                said.append(self._said_of(store.decoder))
        token = hashlib.blake2s("\0".join(said).encode(), digest_size=12).hexdigest()
        self._by_token[token] = ds
        return f"{token}/{fname}"

    def __getitem__(self, key: str) -> Noted:
        token, _, fname = key.partition("/")
        ds = self._by_token[token]
        data, info = ds[fname] if self._method == "pickle" else _raw(ds, fname)
        return _noted_plainly(data, info) if self._plain else _noted(data, info, decoded=self._method == "pickle")

    def _said_of(self, decoder: Any) -> str:
        """What tells one decoder from another, also in another process; looked at once, since decoding may change it."""
        try:
            said = self._decoders.get(decoder)
            if said is None:
                said = self._decoders.setdefault(decoder, _told_of(decoder))
        except TypeError:  # it cannot be a key
            said = _told_of(decoder)
        return said


def _told_of(decoder: Any) -> str:
    try:
        config = getattr(decoder, "config", None)
        how = json.dumps(config(), sort_keys=True, default=repr).encode() if callable(config) else pickle.dumps(decoder)
        return f"{_name_of(type(decoder))} {hashlib.blake2s(how).hexdigest()}"
    except Exception as error:  # noqa: BLE001 - whatever its own code raises
        log.debug("a %s is known in this process only: %s", type(decoder).__name__, error)
        return os.urandom(12).hex()


def _resolved(ds: Any, fname: str) -> tuple[Any, str]:
    """The store below a sample's own, and the full name there: ".jpg" is another item for each sample."""
    while isinstance(ds, _PRIMARY):
        fname = f"{ds._current_key}{fname}" if fname.startswith(".") else fname
        ds = ds._inner
    return ds, fname


def _inner(ds: Any) -> Any:
    return getattr(ds, "_inner", None) or getattr(ds, "inner_reader", None)


def _chain(ds: Any) -> Iterator[Any]:
    while ds is not None:
        yield ds
        ds = _inner(ds)


def _name_of(kind: type) -> str:
    module = kind.__module__
    if module == "__main__":  # of another program it is another one
        module = os.path.abspath(getattr(sys.modules[module], "__file__", None) or str(os.getpid()))
    return f"{module}.{kind.__qualname__}"


def _raw(ds: Any, fname: str) -> Found:
    """Data that are not decoded yet, if the store can give them, and their source."""
    get = getattr(ds, "_get_raw", None)
    if get is not None:
        found: Found = get(fname)
        return found
    reader = getattr(ds, "inner_reader", None)  # of older versions
    found = ds[fname] if reader is None else reader[fname]
    return found[0], found[1]


def _noted(data: Any, info: Any, *, decoded: bool) -> Noted:
    """Data with their source, so that whoever finds them in the cache has it as well: beside them, since limits are of the data alone."""
    kind = _ItemForm.DECODED if decoded else _ItemForm(0)
    if decoded or not isinstance(data, bytes | bytearray | memoryview):
        kind |= _ItemForm.PICKLED
    payload = pickle.dumps(data, pickle.HIGHEST_PROTOCOL) if _ItemForm.PICKLED in kind else data
    return Noted.of(payload, _note(kind, pickle.dumps(info, pickle.HIGHEST_PROTOCOL)))


def _noted_plainly(data: Any, info: Any) -> Noted:
    """As `_noted`, without a pickle. Raises `ConfigError` where that cannot be."""
    told = info
    if type(info) is SourceInfo:
        path = info.dataset_path
        told = [type(path) is EPath, str(path) if type(path) is EPath else path, info.index, info.shard_name, tuple(info.file_names)]
    try:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise errors.ConfigError(f"a {type(data).__name__} is no bytes", name="method", value="raw")
        head = b"".join(_PYTREE.encode(told))
    except errors.ConfigError as error:
        message = (
            f"others can write to this root, and what the dataset gives wants a pickle ({error}): say method='pickle' if you trust them"
        )
        raise errors.ConfigError(message, name="method", value="raw") from error
    return Noted.of(data, _note(_ItemForm.PLAIN, head))


def _note(kind: _ItemForm, head: bytes) -> str:
    return f"{int(kind)}{base64.b85encode(head).decode()}"


def _plain_info(head: bytes) -> Any:
    """The source that `_noted_plainly` took apart. Raises `Damaged`, ValueError or TypeError."""
    told = _PYTREE.decode(memoryview(head), lambda: memoryview(bytearray(head)))
    if not isinstance(told, list):
        return told
    is_epath, path, index, shard, names = told
    return SourceInfo(dataset_path=EPath(path) if is_epath else path, index=index, shard_name=shard, file_names=names)


def _decoded(ds: Any, fname: str, noted: Any, plain: bool) -> Found:
    """What `_noted`, or `_noted_plainly`, had, decoded."""
    note = noted.note if isinstance(noted, Noted) else ""
    kind = _ItemForm(int(note[0])) if note[:1].isdecimal() else None
    if kind is None or (plain and kind != _ItemForm.PLAIN):
        data, info = ds[fname]  # it was not this pool's kind that wrote it
        return data, info
    try:
        head = base64.b85decode(note[1:])
        info = _plain_info(head) if kind == _ItemForm.PLAIN else None
    except (errors.Damaged, ValueError, TypeError) as error:
        log.warning("what is kept of %s cannot be read, it is read anew: %s", fname, error)
        data, info = ds[fname]
        return data, info
    if kind != _ItemForm.PLAIN:
        info = pickle.loads(head)
    data = pickle.loads(noted) if _ItemForm.PICKLED in kind else bytes(noted)
    if _ItemForm.DECODED in kind:
        return data, info
    decode = getattr(ds, "_decode_raw", None)
    if decode is not None:
        return decode(data, fname=fname), info
    return (data if getattr(ds, "inner_reader", None) is None else ds.decoder.decode(fname, data)), info


def _made(how: dict[str, Any]) -> FileStoreCachePool:
    return FileStoreCachePool(**how)
