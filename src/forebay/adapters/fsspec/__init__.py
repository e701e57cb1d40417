"""Any fsspec filesystem behind the cache of the node, as the protocol ``forebay``: ``forebay::s3://bucket/table.parquet``."""

from __future__ import annotations

import contextlib
import datetime
import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from glob import has_magic
from itertools import chain, islice
from typing import Any, BinaryIO, NamedTuple

from forebay import errors
from forebay._engine.index.memo import Hit, no_hit
from forebay._kernel import host
from forebay._kernel.interrupts import guarded_methods, of_program, paced, point
from forebay._kernel.threads import run_all
from forebay._logs import logger
from forebay._model import URLS
from forebay.adapters.fsspec.files import MappedFile, WrittenFile
from forebay.cache import Cache, fetcher_of
from forebay.cache.entries import entries_below
from forebay.fetch import Fetcher
from forebay.fetch.blocks import parse_block_size
from forebay.fetch.request import first_touch
from forebay.remote import as_text
from forebay.remote.filesystems import is_in_process, protocols_of

try:
    import fsspec
    from fsspec.callbacks import DEFAULT_CALLBACK
    from fsspec.implementations.chained import ChainedFileSystem
except ModuleNotFoundError as error:  # `chained` came with 2025.10
    raise errors.MissingExtra(
        "forebay.adapters.fsspec needs fsspec 2025.10 or later: pip install 'fsspec>=2025.10'", extra="fsspec"
    ) from error

__all__ = ["ForebayFileSystem"]

log = logger("forebay.adapters.fsspec")

COPIED = 4 << 20  # bytes of one write
MOST_SOURCES = 10_000

_OF_CACHE = frozenset(inspect.signature(Cache).parameters)
_OF_FSSPEC = frozenset({"asynchronous", "batch_size", "listings_expiry_time", "loop", "max_paths", "use_listings_cache"})
_HINTS = frozenset({"cache_type", "default_cache", "fill_cache", "size"})
"""Arguments of `open` that change how a filesystem buffers, and not which bytes it returns."""
_TUNING = _OF_FSSPEC | {
    "block_size", "cache_options", "cache_regions", "cache_type", "default_block_size", "default_cache_type", "default_fill_cache",
    "fixed_upload_size", "local_expiry_check", "max_concurrency", "same_scheme", "simple_links", "size_policy",
}  # fmt: skip
"""Options of filesystems that do not change which bytes they return, or to whom."""
_DEFAULTS = {
    "anon": False, "client_kwargs": {"trust_env": True}, "use_ssl": True, "requester_pays": False, "version_aware": False, "encoded": False,
}  # fmt: skip


class _Source(NamedTuple):
    """Where the bytes of a path come from. ``filesystem``: None where the URL alone says it. ``key``: under which the cache keeps them."""

    url: str
    filesystem: Any
    key: str


class _InstanceCache(type(ChainedFileSystem)):  # type: ignore[misc]  # fsspec has no types
    """fsspec returns one instance for equal arguments, and takes objects that print alike for equal: that of an open cache, or of a
    filesystem, gets an instance of its own."""

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if options.get("cache") is not None or options.get("fs") is not None:
            options["skip_instance_cache"] = True
        return super().__call__(*args, **options)


def _passed_on(name: str, changes: bool = False) -> Callable[..., Any]:
    """A method that the source has, too. ``changes``: what lies at the path."""

    @functools.wraps(getattr(ChainedFileSystem, name))
    def method(self: ForebayFileSystem, path: Any, *arguments: Any, **options: Any) -> Any:
        with self._changing(path) if changes else contextlib.nullcontext(self._source_fs) as fs:
            return getattr(fs, name)(_unchained(path), *arguments, **options)

    return method


@guarded_methods()
class ForebayFileSystem(ChainedFileSystem, metaclass=_InstanceCache):  # type: ignore[misc]
    """The filesystem ``fs``, or that of ``target_protocol`` and ``target_options``, with its objects read through the cache.

    ``fetch``: ``file`` fetches and stores whole objects; ``blocks`` only the blocks of ``block_size`` that are read: see `Cache.open`.
    ``force``: store copies of local files too. ``cache``: an open `Cache`, or pass the arguments to open one by name (``root``, ``budget``,
    ``max_age``...); equal ones share one per process. ``fo``: ignored; fsspec passes it.

    Listings and descriptions come from the source; `open`, `cat`, `cat_file`, `cat_ranges`, `get` and calls built on them use the cache.
    Writes go to the source, and make the next reader in any process ask it. A read with arguments that only the source knows, such as
    ``version_id``, bypasses the cache.

    A synchronous filesystem: usable in a thread that runs an event loop, and by `AsyncFileSystemWrapper` for coroutines. Callable from any
    thread; usable in both processes after a fork; picklable. Raises `ConfigError`, and, on first read, what opening a `Cache` raises."""

    protocol: str | tuple[str, ...] = "forebay"
    _strip_tokenize_options = ("fo",)

    def __init__(
        self, target_protocol: str | None = None, target_options: Mapping[str, Any] | None = None, fs: Any = None, fo: Any = None, *,
        fetch: str = "file", block_size: int | str = "auto", force: bool = False, cache: Cache | None = None, **options: Any,
    ) -> None:  # fmt: skip
        if getattr(self, "_cached", False):
            return
        # Options of another protocol are passed to the outermost one where no link of a chain has it.
        others = fsspec.available_protocols()
        options = {name: value for name, value in options.items() if not (isinstance(value, Mapping) and name in others)}
        own = {name: options.pop(name) for name in _OF_CACHE & options.keys()}
        _check(target_protocol, fs, fetch, cache, own, options)
        super().__init__(**options)
        self.fetch, self.block_size, self.force = fetch, parse_block_size(block_size), force
        self._given, self._init_kwargs = cache, own
        self._inner = fs if fs is not None else _filesystem(target_protocol, target_options or {})
        self._pid = os.getpid()
        names = protocols_of(self._inner)
        first = [target_protocol] if target_protocol in names else []
        self.protocol = tuple(f"forebay::{name}" for name in dict.fromkeys([*first, *names]))
        self.root_marker, self.sep, self.blocksize = self._inner.root_marker, self._inner.sep, self._inner.blocksize
        self._strip_protocol, self._parent = self._stripped, lambda path: self._inner._parent(self._stripped(path))
        self._has_urls, self._is_http = _has_urls(self._inner), not {"http", "https"}.isdisjoint(names)
        self._sources: dict[str, _Source] = {}
        self._bound: Any = None
        self._look: Hit = no_hit

    @property
    def fs(self) -> Any:
        """The filesystem behind the cache. After a fork, a new one with the same settings, since connections cannot be shared."""
        if self._pid != os.getpid() and not is_in_process(self._inner):
            self._inner = type(self._inner)(*self._inner.storage_args, **self._inner.storage_options)
        self._pid = os.getpid()
        return self._inner

    @property
    def _source_fs(self) -> Any:
        """`fs`, for calls that may take long."""
        return _Outside(self.fs)

    @property
    def cache(self) -> Cache:
        """The cache that serves the reads."""
        return self._given if self._given is not None else _opened(tuple(sorted(self._init_kwargs.items())))

    @host.cached_property
    def _fetcher(self) -> Fetcher:
        return fetcher_of(self.cache)

    def __repr__(self) -> str:
        return f"<forebay.adapters.fsspec.ForebayFileSystem of {self._inner!r}>"

    # -- paths -----------------------------------------------------------------------------------------------------

    def _stripped(self, path: Any) -> Any:
        return self._inner._strip_protocol(_unchained(path))

    def unstrip_protocol(self, name: str) -> str:
        """The chained URL of a path."""
        return name if name.startswith("forebay::") else f"forebay::{self._inner.unstrip_protocol(name)}"

    def _source(self, path: str) -> _Source:
        """Where the bytes of a path that is stripped come from."""
        if (known := self._sources.get(path)) is not None:
            return known
        url, filesystem = path, None
        if not self._has_urls or "::" in path or ("?" in path and "://" not in path):
            filesystem = self.fs  # a name that would be no URL
        elif not {"file", "local"} & set(protocols_of(self._inner)):
            url = self._inner.unstrip_protocol(path)
        target = self._fetcher.target(url or self.sep, filesystem)
        if len(self._sources) >= MOST_SOURCES:
            self._sources.clear()
        found = self._sources[path] = _Source(target.url, filesystem, target.key)
        return found

    # -- reading: from the cache -----------------------------------------------------------------------------------

    def _open(
        self, path: str, mode: str = "rb", block_size: Any = None, autocommit: bool = True, cache_options: Any = None, **arguments: Any
    ) -> Any:  # fmt: skip
        if mode != "rb" or not arguments.keys() <= _HINTS:
            return self._open_source(path, mode, autocommit, block_size=block_size, cache_options=cache_options, **arguments)
        view = self._hit(path)
        return self._open_cached(path) if view is None else MappedFile(view, path)

    def _hit(self, path: str) -> memoryview | None:
        """The whole object, if this process knows it, or finds it in the index of keys, and it was validated lately."""
        source, fetcher = self._sources.get(path) or self._source(path), self._fetcher
        if fetcher.store is not self._bound:  # the root could not be used until now
            self._bound, self._look = fetcher.store, fetcher.store.hot_lookup(URLS)
            self._sources.clear()  # their keys are made with a secret of the root
            source = self._source(path)
        if fetcher.closed:
            raise errors.Closed.of("cache")
        if self.force or not source.key.startswith("file:"):
            view = self._look(source.key, fetcher.max_age)
            if view is not None:
                return view
        if source.filesystem is not None:
            return fetcher.store.first_touch(URLS, source.key, fetcher.max_age)
        return first_touch(fetcher, source.url, force=self.force)

    def _open_cached(self, path: str) -> BinaryIO:
        source = self._source(path)
        size = self.block_size if self.fetch == "blocks" else None
        file: Any = self.cache.open(source.url, block_size=size, filesystem=source.filesystem, force=self.force)
        file.path, file.size = path, file.seek(0, os.SEEK_END)
        file.seek(0)
        return file  # type: ignore[no-any-return]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **arguments: Any) -> bytes:
        """The bytes of an object, or those from ``start`` to ``end``, as in a slice."""
        path = self._stripped(path)
        view = self._hit(path) if arguments.keys() <= _HINTS else None
        if view is not None:
            return bytes(view[start:end])
        with self.open(path, **arguments) as file:
            first, last, _ = slice(start, end).indices(file.seek(0, os.SEEK_END))
            file.seek(first)
            return file.read(max(last - first, 0))  # type: ignore[no-any-return]

    def cat_ranges(
        self, paths: Sequence[str], starts: Any, ends: Any, max_gap: int | None = None, on_error: str = "return", **arguments: Any
    ) -> list[Any]:  # fmt: skip
        """Ranges of objects, in order; missing ones are fetched in parallel."""
        if not isinstance(paths, list):
            raise TypeError("paths is a list")
        starts, ends = (each if isinstance(each, Sequence) else [each] * len(paths) for each in (starts, ends))
        if not len(paths) == len(starts) == len(ends):
            raise ValueError(f"{len(paths)} paths, but {len(starts)} starts and {len(ends)} ends")
        calls = [functools.partial(self.cat_file, *each, **arguments) for each in zip(paths, starts, ends, strict=True)]
        return self._side_by_side(calls, returns=on_error == "return")

    def cat(self, path: Any, recursive: bool = False, on_error: str = "raise", **arguments: Any) -> Any:
        """The bytes of an object, or a dict of those of several; missing ones are fetched in parallel."""
        paths = self.expand_path(path, recursive=recursive)
        if not isinstance(path, list) and paths == [self._stripped(path)]:
            return self.cat_file(paths[0], **arguments)
        if arguments or self.fetch == "blocks" or not self._has_urls:
            contents = self._side_by_side([functools.partial(self.cat_file, each, **arguments) for each in paths], returns=True)
        else:
            contents = [self._hit(each) for each in paced(paths)]
            missing = [place for place, view in enumerate(contents) if view is None]
            views = self.cache.read_many([self._source(paths[place]).url for place in missing], return_exceptions=True, force=self.force)
            for place, view in zip(missing, views, strict=True):
                contents[place] = view
        found: dict[str, Any] = {}
        for each, data in zip(paths, contents, strict=True):
            if isinstance(data, Exception):
                if on_error == "omit" or (recursive and isinstance(data, OSError) and self.isdir(each)):
                    continue
                if on_error == "raise":
                    raise data
            found[each] = bytes(data) if isinstance(data, memoryview) else data
        return found

    def get(
        self, rpath: Any, lpath: Any, recursive: bool = False, callback: Any = DEFAULT_CALLBACK, maxdepth: int | None = None,
        **arguments: Any,
    ) -> None:  # fmt: skip
        """Copy objects to local files; missing ones are fetched in parallel."""
        plan = _CopyPlan(self)
        ChainedFileSystem.get(plan, _unchained(rpath), lpath, recursive=recursive, maxdepth=maxdepth, **arguments)
        lock = threading.Lock()  # guards the callback
        callback.set_size(len(plan.pairs))

        def copy(source: str, target: str) -> None:
            with callback.branched(source, target) as own:
                self.get_file(source, target, callback=own, **arguments)
            with lock:
                callback.relative_update(1)

        self._side_by_side([functools.partial(copy, *pair) for pair in plan.pairs])

    def get_file(self, rpath: str, lpath: Any = None, callback: Any = DEFAULT_CALLBACK, outfile: Any = None, **arguments: Any) -> None:
        """Copy an object to a local file, or to a file object."""
        outfile = lpath if outfile is None and hasattr(lpath, "write") else outfile
        rpath = self._stripped(rpath)
        if outfile is None:
            if self._hit(rpath) is None and self.isdir(rpath):
                os.makedirs(lpath, exist_ok=True)
                return
            os.makedirs(os.path.dirname(os.path.abspath(lpath)), exist_ok=True)
        with self.open(rpath, **arguments) as file, contextlib.nullcontext(outfile) if outfile is not None else open(lpath, "wb") as target:
            callback.set_size(file.size)
            while data := file.read(COPIED):
                target.write(data)
                callback.relative_update(len(data))
                point()

    def _side_by_side(self, calls: Sequence[Callable[[], Any]], *, returns: bool = False) -> list[Any]:
        """The results, in order. The first error is raised, or, if ``returns``, each stands in the place of its result."""
        results: list[Any] = [None] * len(calls)

        def run(place: int) -> None:
            try:
                results[place] = calls[place]()
            except Exception as error:
                if not returns:
                    raise
                results[place] = error

        run_all(
            [functools.partial(run, place) for place in range(len(calls))], self._fetcher.options.connections, name="fsspec", inline=True
        )
        return results

    # -- what is there: from the source ----------------------------------------------------------------------------

    # To tell whether an HTTP URL exists, or is a directory, fsspec requests the whole object, and looks for links in it: here a HEAD, and
    # only a page of HTML is looked at.

    def ls(self, path: str, detail: bool = True, **arguments: Any) -> Any:
        """See `fsspec.AbstractFileSystem`; so for all that follow."""
        return self._source_fs.ls(_unchained(path), detail=detail, **arguments)

    info, walk, du, checksum, ukey, created, sign, mkdir, makedirs = map(
        _passed_on, ("info", "walk", "du", "checksum", "ukey", "created", "sign", "mkdir", "makedirs")
    )

    def exists(self, path: str, **arguments: Any) -> Any:
        if not self._is_http:
            return self._source_fs.exists(_unchained(path), **arguments)
        try:
            return bool(self.info(path, **arguments))
        except FileNotFoundError:
            return False

    def isfile(self, path: str) -> Any:
        return self.exists(path) if self._is_http else self._source_fs.isfile(_unchained(path))

    def isdir(self, path: str) -> Any:
        if self._is_http and not _unchained(path).endswith("/"):
            try:
                is_page = "html" in self.info(path).get("mimetype", "html")
            except FileNotFoundError:
                return False
            if not is_page:
                return False
        return self._source_fs.isdir(_unchained(path))

    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **options: Any) -> Any:
        if self._is_http and not self.isdir(path):
            return _unchained(self.glob(path, detail=detail))
        return self._source_fs.find(_unchained(path), maxdepth=maxdepth, withdirs=withdirs, detail=detail, **options)

    def glob(self, path: str, *arguments: Any, **options: Any) -> Any:
        """Names that are URLs begin with ``forebay::``: what opens one by itself, as `datasets` does, reads through the cache, too."""
        if not self._is_http or has_magic(path):
            found = self._source_fs.glob(_unchained(path), *arguments, **options)
        else:
            found = [self._stripped(path)] if self.exists(path) else []
            found = {name: self.info(name) for name in found} if options.get("detail") else found
        names = [self.unstrip_protocol(name) if self._is_http else name for name in found]
        return dict(zip(names, found.values(), strict=True)) if isinstance(found, dict) else names

    def expand_path(self, path: Any, *arguments: Any, **options: Any) -> list[str]:
        found: list[str] = super().expand_path(path, *arguments, **options)
        return sorted(set(_unchained(found))) if self._is_http else found

    def modified(self, path: str) -> Any:
        """When an object was modified; 1970 where the source does not tell."""
        try:
            return self._source_fs.modified(_unchained(path))
        except NotImplementedError:  # of HTTP: DuckDB asks
            source = self._source(self._stripped(path))
            known = self._fetcher.target(source.url, source.filesystem).remote.stat(source.url)
            return datetime.datetime.fromtimestamp(known.modified or 0 if known is not None else 0, datetime.UTC)

    # -- writing: to the source ------------------------------------------------------------------------------------

    def _open_source(self, path: str, mode: str, autocommit: bool, **options: Any) -> Any:
        fs, options = self._source_fs, {name: value for name, value in options.items() if value is not None}
        if "r" in mode and "+" not in mode:
            return fs.open(path, mode, **options)
        if autocommit and not fs._intrans:
            return WrittenFile(fs.open(path, mode, **options), functools.partial(self._forget, path))
        file = WrittenFile(fs._open(path, mode=mode, autocommit=False, **options), functools.partial(self._forget, path))
        if autocommit:  # else the caller adds it
            fs.transaction.files.append(file)
        return file

    @property
    def transaction(self) -> Any:
        """That of the source."""
        return self.fs.transaction

    def start_transaction(self) -> Any:
        return self._source_fs.start_transaction()

    def end_transaction(self) -> None:
        self._source_fs.end_transaction()

    @contextlib.contextmanager
    def _changing(self, *paths: Any) -> Iterator[Any]:
        """The source, for a call that changes what lies at or below these paths."""
        try:
            yield self._source_fs
        finally:
            for path in paths:
                for each in path if isinstance(path, (list, tuple, set, dict)) else [path]:
                    self._forget(self._stripped(each))

    def _forget(self, path: str) -> None:
        """Make the next reader of any process ask the source for what lies at or below a path."""
        if has_magic(path):
            path = path[: min(path.index(mark) for mark in "*?[" if mark in path)].rpartition(self.sep)[0]
        source = self._source(path)
        _forget_below(self._fetcher, source.key if source.filesystem is None else source.key.rpartition("#")[0])

    def invalidate_cache(self, path: str | None = None) -> None:
        """Drop the source's cached listings; with a path, make the next reader ask the source for everything at or below it."""
        self._source_fs.invalidate_cache(None if path is None else _unchained(path))
        if path is not None:
            self._forget(self._stripped(path))

    pipe_file, pipe, touch, rm, rm_file, rmdir = (
        _passed_on(name, changes=True) for name in ("pipe_file", "pipe", "touch", "rm", "rm_file", "rmdir")
    )

    def put_file(self, lpath: Any, rpath: str, *arguments: Any, **options: Any) -> Any:
        with self._changing(rpath) as fs:
            return fs.put_file(lpath, _unchained(rpath), *arguments, **options)

    def put(self, lpath: Any, rpath: Any, *arguments: Any, **options: Any) -> Any:
        with self._changing(rpath) as fs:
            return fs.put(lpath, _unchained(rpath), *arguments, **options)

    def cp_file(self, path1: str, path2: str, **options: Any) -> Any:
        with self._changing(path2) as fs:
            return fs.cp_file(_unchained(path1), _unchained(path2), **options)

    def copy(self, path1: Any, path2: Any, *arguments: Any, **options: Any) -> Any:
        with self._changing(path2) as fs:
            return fs.copy(_unchained(path1), _unchained(path2), *arguments, **options)

    def mv(self, path1: Any, path2: Any, *arguments: Any, **options: Any) -> Any:
        with self._changing(path1, path2) as fs:
            return fs.mv(_unchained(path1), _unchained(path2), *arguments, **options)


def _check(
    target_protocol: str | None, fs: Any, fetch: str, cache: Cache | None, of_cache: Mapping[str, Any], others: Mapping[str, Any]
) -> None:  # fmt: skip
    """Raises `ConfigError` for arguments of `ForebayFileSystem` that contradict each other, or mean nothing to it."""
    if (fs is None) == (target_protocol is None):
        message = "name what lies behind the cache: forebay::s3://bucket/key, or target_protocol= or fs= (one of them)"
        raise errors.ConfigError(message, name="target_protocol", value=target_protocol)
    if fetch not in ("file", "blocks"):
        raise errors.ConfigError(f"fetch={fetch!r} is unknown: choose 'file' or 'blocks'", name="fetch", value=repr(fetch))
    if cache is not None and of_cache:
        message = f"cache= is open already: {', '.join(sorted(of_cache))} cannot be set for it"
        raise errors.ConfigError(message, name="cache", value=repr(cache))
    if unknown := sorted(others.keys() - _OF_FSSPEC):
        options = ", ".join(f"{name!r}: ..." for name in unknown)
        message = f"the cache has no option {', '.join(unknown)}: those of what lies behind it go to its own protocol, as s3={{{options}}}"
        raise errors.ConfigError(message, name=unknown[0], value="")


def _filesystem(protocol: str | None, options: Mapping[str, Any]) -> Any:
    """What lies behind the cache. `datasets` names it twice, ``forebay::https://host/a::https://host/a``: it is then to have options for
    a target, which it does not know, and among these its own."""
    if options.get("target_protocol") == protocol:
        takes = inspect.signature(fsspec.get_filesystem_class(protocol).__init__).parameters
        options = options if "target_protocol" in takes else options["target_options"]
    return fsspec.filesystem(protocol, **options)


@functools.cache
def _opened(init_kwargs: tuple[tuple[str, Any], ...]) -> Cache:
    """The cache that these arguments open: one for all filesystems of the process."""
    return Cache(**dict(init_kwargs))


def _forget_below(fetcher: Fetcher, key: str) -> None:
    """Make the next calls ask the remote for the object with this key, and for those below the directory of this name: also for those that
    are read through filesystem objects. Where the catalog cannot be read, entries are served until their ``max_age`` is over."""
    name, store = key.rstrip("/"), fetcher.store
    try:
        store.invalidate_keys([(URLS, name), (URLS, f"{name}/")])
        every = chain.from_iterable(entries_below(store, f"{name}{mark}") for mark in "#/")
        while some := list(islice(every, 1000)):
            store.invalidate(some)
    except errors.CacheFault as error:
        fetcher.warn("fsspec", "%s was written to, which the cache cannot be told: %s", key, error)


def _unchained(path: Any) -> Any:
    """A path, or several of them, as the filesystem behind the cache knows them."""
    if isinstance(path, dict):
        return {_unchained(each): value for each, value in path.items()}
    if isinstance(path, (list, tuple, set)):
        return [_unchained(each) for each in path]
    text = as_text(path)
    for prefix in ("forebay::", "forebay://"):
        text = text.removeprefix(prefix)
    return text


def _has_urls(filesystem: Any) -> bool:
    """Whether a URL alone says where the bytes of a path of this filesystem are: with no credentials, endpoint or the like, from arguments
    or from fsspec's own configuration."""
    names = protocols_of(filesystem)
    if not {"file", "local"}.isdisjoint(names):
        return True
    try:
        is_known = type(filesystem) is fsspec.get_filesystem_class(names[0])
    except (ImportError, ValueError):
        return False
    options = {**filesystem.storage_options}
    matters = [name for name, value in options.items() if name not in _TUNING and value is not None and value != _DEFAULTS.get(name)]
    return is_known and not filesystem.storage_args and not matters


class _Outside:
    """Stands for a filesystem of the program: its methods run with the program's handlers of signals."""

    def __init__(self, fs: Any) -> None:
        self._fs = fs

    def __getattr__(self, name: str) -> Any:
        member = getattr(self._fs, name)
        return of_program(member) if callable(member) else member


class _CopyPlan:
    """Stands for a filesystem in fsspec's own `get`: collects the pairs of source and target, and copies nothing."""

    def __init__(self, fs: ForebayFileSystem) -> None:
        self._fs = fs
        self.pairs: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def isdir(self, path: str) -> bool:
        """Whether a path names a directory: none that is cached as an object."""
        return self._fs._hit(path) is None and bool(self._fs.isdir(path))

    def get_file(self, rpath: str, lpath: str, **arguments: Any) -> None:
        """Note a copy that is to be made."""
        self.pairs.append((rpath, lpath))
