"""Megatron-Energon's pool of prefetched items, over this node's cache: ``get_loader(..., cache_pool=FileStoreCachePool())``."""

from __future__ import annotations

import base64
import enum
import functools
import hashlib
import json
import operator
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from forebay import codecs, errors
from forebay._kernel.interrupts import unless_of_handler
from forebay._logs import logger
from forebay._model import Noted
from forebay.cache import Cache, fetcher_of

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
_FORM = "noted"  # the stored form of items, a part of their keys
_PYTREE = codecs.codec("pytree")
_LARGEST = (1 << 63) - 1
_RAW_OF_INNER: Any = getattr(getattr(energon_base, "FileStoreWrapper", None), "_get_raw", ())
_PRIMARY: Any = getattr(energon_base, "PrimaryFileStore", ())  # older versions have none


class _ItemForm(enum.IntFlag):
    """The stored form of an item and its source: one digit on the disk, which must stay readable."""

    PICKLED = 1
    DECODED = 2
    PLAIN = 4  # neither is pickled


Item = tuple[Any, Any]
"""A value, and Energon's SourceInfo or None."""


class FileCacheLazy(Lazy):  # type: ignore[misc]  # Energon is optional: to mypy it is Any
    """An item that is loaded in the background. ``ds``: its store. ``fname``: its name there. Lazies of the same item are equal.

    Callable from any thread. Dropping a lazy releases its share of the item, and nothing else."""

    __slots__ = ("__weakref__", "_kept", "_load")

    def __init__(self, ds: Any, fname: str, pool: Any, load: Callable[[], Item] | None) -> None:
        super().__init__(ds=ds, fname=fname, pool=pool)
        self._load = load
        self._kept: list[Item] = []  # the first element counts: a lock could stay locked after a fork

    def get(self, sample: Any = None) -> Any:
        """The item, decoded: the same object each time. Its source is added to ``sample`` each time, too.

        Raises what the dataset or its decoder raises."""
        value, source = self._loaded()
        if source is not None:
            add_source_info(sample, source)
        return value

    def _loaded(self) -> Item:
        load = self._load
        if load is not None:
            self._kept.append(load())
            self._load = None  # it holds a reference to the prefetched item
        return self._kept[0]

    def __hash__(self) -> int:
        return hash((id(self.ds), self.fname))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lazy) and self.ds is other.ds and self.fname == other.fname

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.fname!r}{' with its data' if self._kept else ''}>"


class SpilledLazy(FileCacheLazy):
    """An object that ``to_cache`` wrote to disk: each is distinct, whatever its name."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class FileStoreCachePool(CachePool):  # type: ignore[misc]
    """Energon's pool: items are loaded in the background to local disk, and removed when their last lazy is read or dropped.

    ``parent_cache_dir``: a directory for the cache's root (default: the default root). ``cache``: an open `Cache` to use instead.
    ``num_workers``: loading threads in each process. ``max_cache_size_gbytes``: GiB for the items of all processes that use the same root.
    ``max_cache_count``: likewise, the number of items. ``method``: ``raw`` stores the dataset's bytes, and decodes them at each lazy's
    first `get`; ``pickle`` stores decoded values, pickled; only ``pickle`` unpickles in a root that others can write to.

    An item that several processes need at the same time is read once. Callable from any thread, usable in both processes after a fork, even
    with pending loads; picklable if ``cache`` is. Raises `ConfigError`, and what opening a `Cache` raises."""

    def __init__(
        self, *, parent_cache_dir: str | os.PathLike[str] | None = None, num_workers: int = 8, max_cache_size_gbytes: float = 1024,
        max_cache_count: float = 10_000_000, method: Literal["raw", "pickle"] = "raw", cache: Cache | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        _check_method(method)
        if cache is not None and parent_cache_dir is not None:
            message = "parent_cache_dir and cache both determine where items are stored: give one of them"
            raise errors.ConfigError(message, name="cache", value=repr(cache))
        self.parent_cache_dir = Path(parent_cache_dir) if parent_cache_dir is not None else None
        self.num_workers, self._given = num_workers, cache
        self._max_size = _whole(max_cache_size_gbytes, "max_cache_size_gbytes", GIB)
        self._max_count = _whole(max_cache_count, "max_cache_count")
        self._cache = cache or Cache(self.parent_cache_dir / "forebay" if self.parent_cache_dir is not None else None)
        self._others_can_write = fetcher_of(self._cache).others_can_write
        self._stores = _Stores()
        self.method = method
        self._prefetcher = self._cache.prefetcher(
            self._stores, name=SPACE, workers=num_workers, budget=self._max_size, max_count=self._max_count, policy="wait", keep=False
        )

    def get(self, ds: Any, fname: str, sample: Any = None) -> Any:
        """The item, read and decoded without the cache; its source is added to ``sample``."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: Any, fname: str) -> FileCacheLazy:
        """Start loading an item. Raises RuntimeError after `close`."""
        ds, fname = _resolved(ds, fname)
        plain = self._method != "pickle" and self._others_can_write
        lazy = self._prefetcher.get_lazy(self._stores.key(ds, fname, self._method, plain))
        return FileCacheLazy(ds, fname, self, lambda: _decoded(ds, fname, lazy.get(), plain))

    def to_cache(self, data: Any, name: str) -> SpilledLazy:
        """Write a pickled object to disk, until its lazy is read or dropped. Raises RuntimeError after `close`."""
        lazy = self._prefetcher.put(data, name)
        return SpilledLazy(None, name, self, lambda: (lazy.get(), None))

    def close(self) -> None:
        """Stop loading, and wait for running loads. Lazies returned earlier stay usable. Idempotent."""
        self._prefetcher.close()
        if self._given is None:
            self._cache.close()

    @property
    def method(self) -> Literal["raw", "pickle"]:
        """What is stored: ``raw`` bytes or ``pickle``. An assignment applies to later lazies. Raises `ConfigError` for any other."""
        return self._method

    @method.setter
    def method(self, method: Literal["raw", "pickle"]) -> None:
        _check_method(method)
        self._method = method

    @property
    def cache_dir(self) -> Path:
        """The root of the cache. Only the cache may change its contents."""
        return self._cache.path

    @property
    def current_cache_size(self) -> int:
        """Bytes stored now for all processes that use this root."""
        return int(self._prefetcher.used)

    @property
    def current_cache_count(self) -> int:
        """Items stored now for all processes that use this root."""
        return int(self._prefetcher.count)

    @property
    def max_cache_size(self) -> int:
        """The limit in bytes. An assignment takes effect for all processes at once."""
        return self._max_size

    @max_cache_size.setter
    def max_cache_size(self, size: float) -> None:
        size = _whole(size, "max_cache_size")
        self._prefetcher.set_limits(budget=size)
        self._max_size = size

    @property
    def max_cache_count(self) -> int:
        """The limit of the number of items. An assignment takes effect for all processes at once."""
        return self._max_count

    @max_cache_count.setter
    def max_cache_count(self, count: float) -> None:
        count = _whole(count, "max_cache_count")
        self._prefetcher.set_limits(max_count=count)
        self._max_count = count

    def __reduce__(self) -> tuple[Any, ...]:
        again = functools.partial(
            FileStoreCachePool, parent_cache_dir=self.parent_cache_dir, num_workers=self.num_workers,
            max_cache_size_gbytes=self._max_size / GIB, max_cache_count=self._max_count, method=self._method, cache=self._given,
        )  # fmt: skip
        return again, ()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {str(self.cache_dir)!r}, {self.method}, at most {self._max_size:,} bytes, {self._max_count:,} items>"
        )

    __str__ = __repr__


def _check_method(method: object) -> None:
    if method not in ("raw", "pickle"):
        raise errors.ConfigError(f"method={method!r} is unknown: choose 'raw' or 'pickle'", name="method", value=repr(method))


def _whole(number: float, name: str, unit: int = 1) -> int:
    """A limit as a whole number; an infinite one as the largest. Raises `ConfigError`."""
    try:
        if number >= 0:
            return int(min(number * unit, _LARGEST))
    except (TypeError, ValueError):
        pass
    raise errors.ConfigError(f"{name}={number!r}: must be a number that is not negative", name=name, value=repr(number))


class NoCachePool(CachePool):  # type: ignore[misc]
    """Energon's pool without a cache: each lazy reads its item at the first `get`."""

    def get(self, ds: Any, fname: str, sample: Any = None) -> Any:
        """The item, read and decoded; its source is added to ``sample``."""
        return ds.get(fname, sample)

    def get_lazy(self, ds: Any, fname: str) -> FileCacheLazy:
        """A lazy that is not prefetched."""
        ds, fname = _resolved(ds, fname)
        return FileCacheLazy(ds, fname, self, lambda: ds[fname])

    def to_cache(self, data: Any, name: str) -> SpilledLazy:
        """A lazy that holds the object itself."""
        return SpilledLazy(None, name, self, lambda: (data, None))

    def close(self) -> None:
        """Do nothing."""


class _Stores:
    """All stores of Energon in use, as one source: a key names the store, then the item in it."""

    uri = "energon"

    def __init__(self) -> None:
        self._by_token: dict[str, tuple[Any, str, bool]] = {}
        self._identities: dict[int, tuple[Callable[[], Any], str]] = {}  # by `id`: not all can be hashed

    def key(self, ds: Any, fname: str, method: str, plain: bool) -> str:
        """The key of an item: two processes use the same key only for the same item. ``plain``: nothing is to be pickled."""
        parts = [_FORM, method, str(ds.get_path())]
        for store in _chain(ds):
            if method == "pickle" or _inner(store) is None:
                parts.append(_name_of(type(store)))
            if isinstance(store, _PRIMARY):
                parts.append(store._current_key)
            elif not _is_energons(store) and (method == "pickle" or _has_own_bytes(store)):
                parts.append(self._identity_of(store))
            if method == "pickle" and getattr(store, "decoder", None) is not None:
                parts.append(self._identity_of(store.decoder))
        token = hashlib.blake2s("\0".join(parts).encode(), digest_size=12).hexdigest()
        self._by_token[token] = (ds, method, plain)
        return f"{token}/{fname}"

    def __getitem__(self, key: str) -> Noted:
        token, _, fname = key.partition("/")
        ds, method, plain = self._by_token[token]
        data, info = ds[fname] if method == "pickle" else _raw(ds, fname)
        return _noted_plainly(data, info) if plain else _noted(data, info, decoded=method == "pickle")

    def _identity_of(self, part: Any) -> str:
        """Distinguishes a decoder or a store from others, also in other processes; determined once, since its use may change it."""
        number = id(part)
        known = self._identities.get(number)
        if known is None or known[0]() is not part:
            try:
                alive: Callable[[], Any] = weakref.ref(part, lambda _: self._identities.pop(number, None))
            except unless_of_handler(TypeError):
                alive = functools.partial(operator.itemgetter(0), (part,))
            known = self._identities[number] = (alive, _new_identity(part))
        return known[1]


class _Digest:
    """A file for pickles of any size, of which only the hash is kept."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2s()
        self.write, self.hexdigest = self._hash.update, self._hash.hexdigest


def _new_identity(part: Any) -> str:
    try:
        config, digest = getattr(part, "config", None), _Digest()
        if callable(config):
            digest.write(json.dumps(config(), sort_keys=True, default=repr).encode())
        else:
            pickle.Pickler(digest, pickle.HIGHEST_PROTOCOL).dump(part)
        return f"{_name_of(type(part))} {digest.hexdigest()}"
    except unless_of_handler(Exception) as error:  # whatever its own code raises
        log.debug("a %s is known in this process only: %s", type(part).__name__, error)
        return os.urandom(12).hex()


def _is_energons(store: Any) -> bool:
    """Whether the path of a store says what it holds."""
    return type(store).__module__.startswith("megatron.energon.")


def _has_own_bytes(store: Any) -> bool:
    """Whether the bytes before decoding are not just those of the store inside."""
    return _inner(store) is None or getattr(type(store), "_get_raw", None) is not _RAW_OF_INNER


def _resolved(ds: Any, fname: str) -> tuple[Any, str]:
    """The store behind that of a sample, and the full name in it: ".jpg" is another item for each sample."""
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
    if module == "__main__":  # each program has its own
        module = os.path.abspath(getattr(sys.modules[module], "__file__", None) or str(os.getpid()))
    return f"{module}.{kind.__qualname__}"


def _raw(ds: Any, fname: str) -> Item:
    """The bytes of an item before decoding, if the store provides them, and its source."""
    get = getattr(ds, "_get_raw", None)
    if get is not None:
        item: Item = get(fname)
        return item
    reader = getattr(ds, "inner_reader", None)  # of older versions
    item = ds[fname] if reader is None else reader[fname]
    return item[0], item[1]


def _noted(data: Any, info: Any, *, decoded: bool) -> Noted:
    """Data with their source as a note, for all readers of the cache: beside the data, since limits cover the data alone."""
    kind = _ItemForm.DECODED if decoded else _ItemForm(0)
    if decoded or not isinstance(data, bytes | bytearray | memoryview):
        kind |= _ItemForm.PICKLED
    payload = pickle.dumps(data, pickle.HIGHEST_PROTOCOL) if _ItemForm.PICKLED in kind else data
    return Noted.of(payload, _note(kind, pickle.dumps(info, pickle.HIGHEST_PROTOCOL)))


def _noted_plainly(data: Any, info: Any) -> Noted:
    """As `_noted`, without a pickle. Raises `ConfigError` if that is not possible."""
    source = info
    if type(info) is SourceInfo:
        path = info.dataset_path
        source = [type(path) is EPath, str(path) if type(path) is EPath else path, info.index, info.shard_name, tuple(info.file_names)]
    try:
        if not isinstance(data, bytes | bytearray | memoryview):
            raise errors.ConfigError(f"a {type(data).__name__} is not bytes", name="method", value="raw")
        head = b"".join(_PYTREE.encode(source))
    except errors.ConfigError as error:
        message = f"others can write to this root, and items of the dataset need a pickle ({error}): use method='pickle' if you trust them"
        raise errors.ConfigError(message, name="method", value="raw") from error
    return Noted.of(data, _note(_ItemForm.PLAIN, head))


def _note(kind: _ItemForm, head: bytes) -> str:
    return f"{int(kind)}{base64.b85encode(head).decode()}"


def _plain_info(head: bytes) -> Any:
    """The source that `_noted_plainly` encoded. Raises `Damaged`, ValueError or TypeError."""
    source = _PYTREE.decode(memoryview(head), lambda: memoryview(bytearray(head)))
    if not isinstance(source, list):
        return source
    is_epath, path, index, shard, names = source
    return SourceInfo(dataset_path=EPath(path) if is_epath else path, index=index, shard_name=shard, file_names=names)


def _decoded(ds: Any, fname: str, noted: Any, plain: bool) -> Item:
    """Decode what `_noted` or `_noted_plainly` encoded."""
    note = noted.note if isinstance(noted, Noted) else ""
    kind = _ItemForm(int(note[0])) if note[:1].isdecimal() else None
    if kind is None or (plain and kind != _ItemForm.PLAIN):
        data, info = ds[fname]  # another kind of pool wrote it
        return data, info
    try:
        head = base64.b85decode(note[1:])
        info = _plain_info(head) if kind == _ItemForm.PLAIN else None
    except unless_of_handler(errors.Damaged, ValueError, TypeError) as error:
        log.warning("the stored form of %s cannot be read, the item is read again: %s", fname, error)
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
