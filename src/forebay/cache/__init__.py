"""The cache of a node: opens a root and serves its content."""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, Unpack, overload

from forebay import _config, errors, remote
from forebay._engine.index.memo import Hit, no_hit
from forebay._engine.store import Store
from forebay._kernel import events, host, waits
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay._logs import logger
from forebay._model import VALUES, Buffer, Codec, Entry, Item, Problem, Report, Strays, exact_str
from forebay.cache.space import DictLike, Space, T, checked_name
from forebay.fetch import Fetcher
from forebay.fetch.opening import CacheOptions
from forebay.fetch.request import FetchOptions, ReadOptions, Target, first_touch
from forebay.remote.urls import Url

if TYPE_CHECKING:
    from forebay._engine.leases import Lease
    from forebay._engine.null_store import NullStore
    from forebay.cache.aio import AsyncFetches, AsyncLocal
    from forebay.cache.entries import Entries, Name
    from forebay.cache.many import LocalFiles
    from forebay.claims import Claim
    from forebay.prefetch import PassThrough as NoPrefetch
    from forebay.prefetch import Prefetcher
    from forebay.prefetch.ahead import Lookahead
    from forebay.reports import HistoryPoint, OnProgress, Plan, ProgressReporter, Stats, WarmReport
    from forebay.samples import Samples
    from forebay.tasks import Tasks
    from forebay.world import World

log = logger("forebay.cache")


@guarded_methods("read", "get", "get_or_put", "path", "offline", "closed")
class Cache(DictLike):
    """The local cache of this node: one directory, one byte budget, any number of processes.

    ``root``: the directory (default: ``$FOREBAY_HOME``, else ``~/.cache/forebay``). ``budget``: bytes as int, ``"500GB"``, ``"500GiB"``, or
    ``"80%"`` of the disk; this argument sets it for every process that shares the root, ``$FOREBAY_BUDGET`` only for a new root.
    ``min_free``: bytes of the disk that all processes leave free, written like ``budget``. ``max_entries``: maximum number of entries.
    ``max_rate``: bytes per second from all remotes (``"1GB"``), for all processes that share the root; 0: no limit. ``max_connections``:
    connections to each host, for the same processes; 0: no limit. ``shared``: share the root with the group (default: ``$FOREBAY_SHARED``);
    otherwise a root that a group can write to is refused. ``read_only``: never write to the root. ``upstream``: a root to search second; it
    is never written to. ``offline``: never ask a remote. ``max_age``: seconds for which an entry is served without asking the remote, or
    ``"forever"``. ``timeout``: total seconds that a call waits for other processes (default: as long as they live; for the catalog 10 s).
    ``remote_options``: how requests are sent. ``enabled``: if False, the same calls without a cache.

    Callable from any thread; usable in both processes after a fork; pickles as its path and options. Opening it raises `RootRefused`,
    `NewerFormat` and `ConfigError`. After that, faults of the cache never reach the caller: calls are served from the source."""

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, budget: int | str | None = None, shared: bool | None = None,
        read_only: bool = False, min_free: int | str | None = None, max_entries: int | None = None, max_rate: int | str | None = None,
        max_connections: int | None = None, upstream: str | os.PathLike[str] | None = None, offline: bool | None = None,
        max_age: float | str | None = None, timeout: float | None = None, remote_options: remote.RemoteOptions | None = None,
        enabled: bool = True,
    ) -> None:  # fmt: skip
        self._fetcher = Fetcher.for_root(CacheOptions(
            root, budget, shared, read_only, min_free, max_entries, max_rate, max_connections, upstream, offline, max_age, timeout,
            remote_options, enabled))  # fmt: skip
        self._max_age, self._values = self._fetcher.max_age, Space(self._fetcher, VALUES)
        self._bound: Store | NullStore | None = None
        self._hit: Hit = no_hit
        self._forced_hit: Hit = no_hit
        self._check_open()

    @property
    def path(self) -> Path:
        """The root directory."""
        return self._fetcher.path

    @property
    def offline(self) -> bool:
        """Whether the cache never asks a remote."""
        return self._fetcher.offline

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._fetcher.closed

    @property
    def _store(self) -> Store | NullStore:
        self._check_open()
        return self._fetcher.store

    # -- objects of remotes ----------------------------------------------------------------------------------------

    def read(
        self, url: Url, *, max_age: float | str | None = None, refresh: bool = False, sha256: str | None = None,
        etag: str | None = None, timeout: float | None = None, bypass: bool = False, force: bool = False, pin: bool = False,
        filesystem: Any = None,
    ) -> memoryview:  # fmt: skip
        """The bytes of an object, read-only. A stored object is a view of the mapping, not a copy, and stays valid after an eviction.

        ``refresh``: ask the remote now. ``sha256``, ``etag``: the expected value; another raises `ChecksumMismatch`. ``bypass``: neither
        search the cache nor write to it. ``force``: store a local file too. ``pin``: never evict the object. ``filesystem``: an fsspec or
        pyarrow filesystem; ``url`` is a path on it. Raises `RemoteError`. A hit takes no lock and no system call."""
        if max_age is None and not (refresh or sha256 or etag or bypass or pin or filesystem):
            if type(url) is not str:
                url = remote.as_text(url)
            view = (self._forced_hit if force else self._hit)(url, self._max_age)
            return view if view is not None else self._read(url, force, timeout)
        return self._read_with(url, {
            "max_age": max_age, "refresh": refresh, "sha256": sha256, "etag": etag, "timeout": timeout, "bypass": bypass, "force": force,
            "pin": pin, "filesystem": filesystem})  # fmt: skip

    @guarded
    def _read(self, url: str, force: bool, timeout: float | None) -> memoryview:
        """`read` of what this process does not remember."""
        view = first_touch(self._fetcher, url, force=force)
        return view if view is not None else self._fetcher.read(self._target(url), self._options(force=force, timeout=timeout))

    @guarded
    def _read_with(self, url: Url, options: ReadOptions) -> memoryview:
        return self._fetcher.read(*self._request(url, options))

    def open(self, url: Url, *, block_size: int | str | None = None, **options: Unpack[ReadOptions]) -> BinaryIO:
        """A binary file object on the cached copy; if there is no room, it reads ranges of the remote. See `read`. ``block_size``: fetch
        and store only the blocks that you read, all of one version: bytes, text such as ``"8MB"``, or ``"auto"`` (8 MiB), from 64 KB to 64
        MiB. Reading a missing block raises `RemoteChanged` if the remote now has another version."""
        return self._fetcher.open(*self._request(url, options), block_size)

    def local(self, url: Url, **options: Unpack[ReadOptions]) -> Lease:
        """The cached copy as a local file: ``with cache.local(url) as path`` gives its path, a ``str``, valid until the block ends.

        Without a ``with``, keep the returned `Lease`: the file exists, unchanged, until the lease is closed or dropped. A local file is
        returned as its own path, unless ``force``. Raises `CacheFault` (`NoSpace` if there is no room), `WaitTimeout`, or `RemoteError`."""
        return self._reopened_by(self._fetcher.lease(*self._request(url, options)), "local", url, options)

    def directory(
        self, url: Url, *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None,
        filesystem: Any = None, max_age: float | str | None = None, refresh: bool = False, timeout: float | None = None,
        offline: bool | None = None, force: bool = False, pin: bool = False, on_progress: OnProgress | None = None,
    ) -> Lease:  # fmt: skip
        """A remote directory as a local one: ``with cache.directory(url) as path`` gives its path, a ``str``, valid until the block ends.

        The directory is complete and read-only. Without a ``with``, keep the returned `Lease`: nothing in the directory changes until the
        lease is closed or dropped. One process of the node fetches it, each file once, and reuses files of other versions and parts.

        ``include``: patterns of files to fetch, such as ``model-*.safetensors`` or ``weights/`` (``*`` also matches ``/``). ``exclude``:
        patterns of files to leave out. ``max_age``, ``refresh``, ``timeout``, ``offline``, ``pin``: as for `read`. Without ``force`` a
        local directory is returned as its own path. Raises `NoSpace` or another `CacheFault` if it cannot be stored, `NotFound`,
        `NotADirectory`, `Incomplete`, `BadListing`, `WaitTimeout`, `Offline`, or another `RemoteError`."""
        from forebay.directories import trees  # imported late: many programs never use it
        from forebay.directories.location import locate

        include, exclude = (each if each is None or isinstance(each, str) else tuple(each) for each in (include, exclude))
        given: ReadOptions = {"max_age": max_age, "refresh": refresh, "timeout": timeout, "offline": offline, "force": force, "pin": pin}
        options, reporter = self._reporting_options(remote.shown(url), on_progress, given)
        tree = trees.lease(locate(self._fetcher, url, filesystem, include, exclude), options)
        if on_progress is not None:
            size = sum(file.size for _, file in self._store.members(tree.entry))
            reporter.say("done", size, size)
        given["filesystem"] = filesystem
        return self._reopened_by(tree, "directory", url, given, include=include, exclude=exclude)

    def copy_directory(
        self, url: Url, path: str | os.PathLike[str] | None = None, *, overwrite: bool = False,
        include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None, filesystem: Any = None,
        max_age: float | str | None = None, refresh: bool = False, timeout: float | None = None, offline: bool | None = None,
        force: bool = False, on_progress: OnProgress | None = None,
    ) -> str:  # fmt: skip
        """Copy a remote directory to ``path``, as a private copy; return its absolute path. See `directory`. Without a ``path``, the copy
        is a new directory in the temporary directory; the caller removes it. The copy does not count against the budget.

        Uses reflinks if the file system has them. If several processes request the same ``path``, one makes the copy. Other files in it
        stay. Raises `Foreign` (a FileExistsError) if a file that is not a copy of ours is in the way, unless ``overwrite``. If the cache
        has no room, the files are fetched straight to ``path``."""
        from forebay.directories.copying import copy
        from forebay.directories.location import locate

        given: ReadOptions = {"max_age": max_age, "refresh": refresh, "timeout": timeout, "offline": offline, "force": force}
        options, _ = self._reporting_options(remote.shown(url), on_progress, given)
        return copy(locate(self._fetcher, url, filesystem, include, exclude), options, path, overwrite=overwrite)

    def _reporting_options(
        self, label: str, on_progress: OnProgress | None, options: ReadOptions
    ) -> tuple[FetchOptions, ProgressReporter]:  # fmt: skip
        from forebay.reports import ProgressReporter

        self._check_open()
        reporter = ProgressReporter(label, on_progress)
        watched: ReadOptions = {"on_wait": reporter.waiting, **options}
        return self._options(reporter.fetching, **watched), reporter

    def pull(self, url: Url, *, on_progress: OnProgress | None = None, **options: Unpack[ReadOptions]) -> Entry | None:
        """Fetch an object into the cache; return its entry, or None if there is no room for it. See `read`."""
        from forebay.cache import many

        target = self._target(url, options.get("filesystem"))
        return many.pull(self._fetcher, target, *self._reporting_options(target.key, on_progress, {"force": True, **options}))

    def lookahead(
        self, urls: Iterable[Url], *, window: int | str | None = None, most: int | None = None, horizon: int | None = None,
        workers: int = 16) -> Lookahead:  # fmt: skip
        """An iterator over the bytes of ``urls``, in this order. The order may span several epochs, or be endless. The next objects are
        prefetched, ``workers`` at a time. For ``window``, ``most`` and ``horizon`` see `Lookahead`. Raises `ConfigError`."""
        from forebay.prefetch.ahead import look_ahead

        return look_ahead(self._fetcher, urls, self._size(window, "window"), most, horizon, workers, self.read_many)

    def read_many(self, urls: Iterable[Url], *, return_exceptions: bool = False, **options: Unpack[ReadOptions]) -> list[memoryview]:
        """The bytes of many objects, in the order of ``urls``: hits at once, misses in parallel. An object named twice is fetched once.

        Works even if all objects together exceed the budget. The first error is raised after all other objects are done; with
        ``return_exceptions``, errors are list items instead. The other options and errors are those of `read`."""
        from forebay.cache import many

        self._check_open()
        return many.read_many(self._fetcher, urls, None if options else self._hit, options, return_exceptions=return_exceptions)

    def local_many(self, urls: Iterable[Url], *, return_exceptions: bool = False, **options: Unpack[ReadOptions]) -> LocalFiles:
        """The cached copies of many objects: ``with cache.local_many(urls) as paths`` gives their paths, valid until the block ends.

        Misses are fetched in parallel. Raises `NoSpace` if there is no room for all of them together. See `local`, `read_many`."""
        from forebay.cache import many

        self._check_open()
        return many.local_many(
            self._fetcher, urls, options, lambda lease, url: self._reopened_by(lease, "local", url, options),
            return_exceptions=return_exceptions)  # fmt: skip

    def warm(
        self, urls: Iterable[Url], *, jobs: int | None = None, on_progress: OnProgress | None = None, **options: Unpack[ReadOptions]
    ) -> WarmReport:  # fmt: skip
        """Fetch many objects into the cache, ``jobs`` at a time (default: `RemoteOptions.connections`). Objects in the cache are skipped:
        to continue an interrupted call, repeat it. A lazy ``urls`` may be slow: another thread fetches. See `read`."""
        from forebay.cache import many

        def reporting(_: str, key: str) -> tuple[FetchOptions, ProgressReporter]:
            return self._reporting_options(key, on_progress, {"force": True, **options})

        return many.warm(self._fetcher, urls, lambda url: self._target(url, options.get("filesystem")), reporting, jobs)

    # -- in an event loop ------------------------------------------------------------------------------------------

    async def aread(self, url: Url, **options: Unpack[ReadOptions]) -> memoryview:
        """`read` for a coroutine. Objects awaited at the same time are fetched in parallel, as by `read_many`. Cancelling a call stops no
        fetch."""
        if not options:
            url = remote.as_text(url)
            view = self._hit(url, self._max_age)
            if view is not None or (view := first_touch(self._fetcher, url, force=False)) is not None:
                return view
        return await self._fetches.read(*self._request(url, options))

    def alocal(self, url: Url, **options: Unpack[ReadOptions]) -> AsyncLocal:
        """`local` for a coroutine: ``async with cache.alocal(url) as path`` gives the path, ``await cache.alocal(url)`` the `Lease`."""
        from forebay.cache.aio import AsyncLocal

        async def get() -> Lease:
            return self._reopened_by(await self._fetches.local(*self._request(url, options)), "local", url, options)

        return AsyncLocal(get)

    async def aopen(self, url: Url, *, block_size: int | str | None = None, **options: Unpack[ReadOptions]) -> BinaryIO:
        """`open` for a coroutine. Reading the file waits for the remote if ``block_size`` is set, or if there is no room for the object."""
        return await self._fetches.open(*self._request(url, options), block_size)

    async def aget_or_put(self, key: str, fn: Callable[[], Buffer | Awaitable[Buffer]], *, timeout: float | None = None) -> memoryview:
        """`get_or_put` for a coroutine. ``fn``: a coroutine function, or a function, which runs in a thread."""
        return await self._values.aget_or_put(key, fn, timeout=timeout)

    @host.cached_property
    def _fetches(self) -> AsyncFetches:
        from forebay.cache.aio import AsyncFetches

        return AsyncFetches(self._fetcher)

    def invalidate(self, url: Url) -> None:
        """Make the next call for this URL, in any process, ask the remote."""
        self._fetcher.invalidate(self._target(url))

    # -- values ----------------------------------------------------------------------------------------------------

    def get(self, key: str, default: T | None = None) -> memoryview | T | None:
        """The bytes stored under this key, read-only; ``default`` if there are none. A hit takes no lock and no system call."""
        return self._values.get(key, default)

    def put(self, key: str, data: Buffer) -> bool:
        """Store bytes under a key, replacing earlier ones. Returns False, with one warning, if they cannot be stored. ``data`` must not
        change during the call."""
        return self._values.put(key, data)

    def get_or_put(self, key: str, fn: Callable[[], Buffer], *, timeout: float | None = None) -> memoryview:
        """The bytes under this key; if there are none, the result of ``fn``, which is stored: one process runs it, and the others wait.

        An error that ``fn`` raises reaches every process that waited; a `RemoteError` only those with the same `RemoteOptions`, and another
        one runs its ``fn``. A result that cannot be stored is returned all the same, also to the threads that waited, and to other
        processes if it has at most 16 KiB; a larger one each of those makes itself."""
        return self._values.get_or_put(key, fn, timeout=timeout)

    def space(self, name: str, *, quota: int | str | None = None, policy: str | None = None) -> Space:
        """A named part of the cache, with its own quota (bytes) and a policy: ``auto``, ``lru``, ``freeze`` or ``wait``.

        ``urls`` and the other spaces in which the cache keeps its own entries (see `Space`) have limits and a policy too, but take no
        values. Raises `ConfigError`."""
        name = checked_name(name)
        self._fetcher.open_space(name, policy=policy, quota=self._limit(quota, "quota"))
        return Space(self._fetcher, name)

    @overload
    def samples(
        self, name: str | None = None, length: int | None = None, *, codec: Literal["raw"] = "raw",
        fingerprint: str | bytes | None = None, quota: int | str | None = None, policy: str = "freeze", copy: bool = False,
    ) -> Samples[memoryview]: ...  # fmt: skip

    @overload
    def samples(
        self, name: str | None = None, length: int | None = None, *, codec: str, fingerprint: str | bytes | None = None,
        quota: int | str | None = None, policy: str = "freeze", copy: bool = False,
    ) -> Samples[Any]: ...  # fmt: skip

    @overload
    def samples(
        self, name: str | None = None, length: int | None = None, *, codec: Codec[Item], fingerprint: str | bytes | None = None,
        quota: int | str | None = None, policy: str = "freeze", copy: bool = False,
    ) -> Samples[Item]: ...  # fmt: skip

    def samples(
        self, name: str | None = None, length: int | None = None, *, codec: Any = "raw", fingerprint: str | bytes | None = None,
        quota: int | str | None = None, policy: str = "freeze", copy: bool = False,
    ) -> Samples[Any]:  # fmt: skip
        """An array of ``length`` slots that all processes fill and read: each sample is decoded or fetched once per node.

        With a ``name``, it stays for later jobs, and can be evicted while no process has it open. Without one, it is removed with the last
        process that has it. ``codec``: ``raw`` (bytes), ``numpy``, ``pytree`` (tuples and dicts of arrays and plain values), ``arrow``,
        ``json``, ``pickle`` (any object), or an object with ``encode`` and ``decode``. ``fingerprint``: identifies dataset and transform; a
        different one starts a new array. ``quota``: its maximum bytes, for all processes together. ``policy``: ``freeze`` only: samples
        that do not fit are not stored, and stored ones stay. ``copy``: `Samples.get` returns writable copies. Without ``length`` the array
        must exist, else `NotCached`. Raises `ConfigError` (a ValueError) if the array has another length or codec."""
        from forebay.samples import open_samples

        if exact_str(policy) != "freeze":
            raise errors.ConfigError(f"policy={policy!r}: samples support only 'freeze'", name="policy", value=policy)
        limit = self._limit(quota, "quota")
        return open_samples(self._fetcher, name, length, codec=codec, fingerprint=fingerprint, quota=limit, copy=copy)

    @overload
    def prefetcher(
        self, source: Any, *, decode: Callable[[str, bytes], Item], name: str = "prefetch", workers: int = 8,
        budget: int | str | None = None, max_count: int = 10_000_000, policy: str = "wait", store: str = "raw", codec: Any = None,
        keep: bool = True,
    ) -> Prefetcher[Item] | NoPrefetch[Item]: ...  # fmt: skip

    @overload
    def prefetcher(
        self, source: Url, *, decode: None = None, name: str = "prefetch", workers: int = 8,
        budget: int | str | None = None, max_count: int = 10_000_000, policy: str = "wait", store: str = "raw", codec: Any = None,
        keep: bool = True,
    ) -> Prefetcher[bytes] | NoPrefetch[bytes]: ...  # fmt: skip

    @overload
    def prefetcher(
        self, source: Any, *, decode: Any = None, name: str = "prefetch", workers: int = 8, budget: int | str | None = None,
        max_count: int = 10_000_000, policy: str = "wait", store: str = "raw", codec: Any = None, keep: bool = True,
    ) -> Prefetcher[Any] | NoPrefetch[Any]: ...  # fmt: skip

    def prefetcher(
        self, source: Any, *, name: str = "prefetch", workers: int = 8, budget: int | str | None = None, max_count: int = 10_000_000,
        policy: str = "wait", decode: Any = None, store: str = "raw", codec: Any = None, keep: bool = True,
    ) -> Prefetcher[Any] | NoPrefetch[Any]:  # fmt: skip
        """Load items of ``source`` into the space ``name``, ``workers`` at a time, and return `Lazy` objects for them. Objects of a remote
        without a version or limits are loaded as by `read`.

        ``source``: an object with ``source[key] -> bytes`` and ``uri``; a URL prefix or directory; one or more tar shards: see
        `forebay.sources`. ``decode``: a function ``decode(key, data)`` that turns an item's bytes into a value. ``store``: ``raw`` stores
        the bytes and decodes them at each `Lazy.get`; ``decoded`` stores the value, through ``codec``, as for `tasks`. ``budget``: maximum
        bytes of the space, over all processes. ``max_count``: maximum items of the space. ``policy``: what happens when all bytes are in
        use: ``wait`` waits until some are released; the others read from the source. ``keep``: if False, an item is removed
        when its last holder in any process releases it. Raises `ConfigError`, also for a ``name`` that the cache itself
        uses, such as ``urls`` or ``values``."""
        from forebay.prefetch import open_prefetcher  # imported late, with all kinds of sources: many programs never use it

        return open_prefetcher(
            self._fetcher, source, decode=decode, name=checked_name(name), workers=workers, budget=self._limit(budget, "budget"),
            max_count=max_count, policy=policy, store=store, codec=codec, keep=keep,
        )  # fmt: skip

    def tasks(
        self, name: str, *, budget: int | str | None = None, config: Any = None, codec: Any = None, copy: bool = False
    ) -> Tasks:  # fmt: skip
        """Outputs of expensive calls, stored by tag: see `Tasks`.

        ``budget``: bytes for all values together; it applies to every process, at once. ``config``: a YAML file, or a mapping of the same
        shape, that lists which functions are cached and which are replayed. ``codec``: ``pickle`` (any object), ``pytree``, ``numpy``,
        ``arrow``, ``json``, ``raw``, or an object with ``encode`` and ``decode``. Default: ``pickle``, or ``pytree``, which executes
        nothing, in a root that others can write to. ``copy``: functions and `Tasks.read` return writable copies. Raises `MissingExtra`
        and `ConfigError`, also for a ``name`` that the cache itself uses, such as ``urls`` or ``values``."""
        from forebay.tasks import open_tasks  # imported late: many programs never use it

        return open_tasks(self._fetcher, checked_name(name), codec, config, self._limit(budget, "budget"), copy)

    def claim(
        self, dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], remotes: str | Sequence[str | None] | None = None,
        world: World | None = None, job: str | None = None, *, name: str | None = None, shared: bool = False,
        timeout: float | None = 60.0,
    ) -> Claim:  # fmt: skip
        """Register what this job uses on this node: see `forebay.claim`. Claims belong to the node, not to one cache."""
        from forebay.claims import claim  # imported late: many programs never use it

        self._check_open()
        return claim(dirs, remotes, world, job, name=name, shared=shared, timeout=timeout)

    # -- what is there ---------------------------------------------------------------------------------------------

    def entries(self, space: str | None = None) -> Entries:
        """The entries, the least recently used first; ``leased`` tells whether a process holds the entry now. This is a sequence; each
        iteration reads the cache in pages, so a million entries take no more memory than a few thousand."""
        from forebay.cache.entries import Entries

        return Entries(self._store, space)

    def entry(self, name: Name) -> Entry | None:
        """One entry by its name: a URL, ``space:key``, or a key of `Cache.put`, whose full name is ``values:key``. If ``space:key`` is also
        a key of `Cache.put`, the entry in the space comes first. Raises `Ambiguous` if a name matches several entries."""
        space_key = self._find(name)
        entry = self._store.entry(*space_key) if space_key is not None else None
        return entry._replace(leased=self._store.is_leased(entry)) if entry is not None else None

    def hold(self, name: Name) -> Lease:
        """A lease on the file or directory stored under a name; nothing is fetched. Raises `NotCached`."""
        from forebay.cache.entries import not_cached

        space_key = self._find(name)
        lease = self._store.lease(*space_key) if space_key is not None else None
        if lease is None:
            raise not_cached(name)
        return lease.reopened_by(_unpickle_lease, self._fetcher.init_args, "hold", name, {})

    @property
    def budget(self) -> int:
        """Bytes that all processes together may store."""
        return self._store.spaces.budget()

    def stats(self) -> Stats:
        """Counters of all processes of the node, and sizes. If the cache cannot be read: zeros, with one warning."""
        from forebay.reports import Stats

        store = self._store
        try:
            return Stats.of(store)
        except OSError as error:
            if store.keeps and store.root.read_only:
                raise  # the caller opened the root to inspect it
            self._fetcher.warn("stats", "the statistics of the cache cannot be read: %s", error)
            return Stats()

    def history(self, *, by: Literal["minute", "hour"] = "minute") -> list[HistoryPoint]:
        """What all processes of the node did, oldest first: by the minute for the last day, or by the hour for the last month."""
        from forebay.reports import history

        return history(self._store, by)

    def on_event(self, function: events.OnEvent) -> Callable[[], None]:
        """Call ``function`` with an `Event` at each fetch, wait, eviction and fault of this process, in the thread concerned: it must be
        quick and not use the cache. Its errors are logged once. Returns a function that ends this. A forked child keeps calling it."""
        self._check_open()
        return events.listen(self.path, function)

    def overhead(self) -> dict[str, int]:
        """Bytes on disk that the budget does not count: ``log`` (of the catalog), ``slots``, ``directories``, ``other`` files."""
        return self._store.seeing.overhead()

    def reset_stats(self) -> None:
        """Set the counters to zero, for all processes."""
        with waits.time_limit(self._fetcher.timeout):
            self._store.seeing.zero_counts()

    def check(self, *, deep: bool = False) -> list[Problem]:
        """The problems of the root; an empty list means it is sound. ``deep`` reads every byte."""
        return self._store.check(deep=deep)

    def verify(self, *, deep: bool = False) -> list[Problem]:
        """`check`, by the name of the command ``forebay verify``."""
        return self.check(deep=deep)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Repair what `check` reports: set damaged files aside, remove files that no entry names. Returns the repaired problems."""
        return self._store.repair(deep=deep)

    def strays(self) -> Strays:
        """Files in the root that belong to no entry. `prune` and `repair` remove those that Forebay created."""
        return self._store.strays()

    # -- removing --------------------------------------------------------------------------------------------------

    def pin(self, name: Name) -> None:
        """Protect this name and its later versions from eviction. Raises `NotCached`, or a `CacheFault`."""
        self._set_life(name, "pinned")

    def unpin(self, name: Name) -> None:
        """Allow eviction of this name again. Raises `NotCached`, or a `CacheFault`."""
        self._set_life(name, "cached")

    def _set_life(self, name: Name, life: str) -> None:
        from forebay.cache.entries import not_cached

        space_key = self._find(name)
        with waits.time_limit(self._fetcher.timeout):
            if space_key is None or not self._store.set_life(*space_key, life):
                raise not_cached(name)

    def evict(self, name: Name) -> Report:
        """Remove a name now, if no process uses it: an object with its blocks, or a directory with its files, except files that another
        directory shares. Raises `NotCached`, or a `CacheFault`."""
        from forebay.cache import entries

        return entries.evict(self._fetcher, name, self.entry(name))

    def plan(
        self, need: int | str | None = None, *, where: Callable[[Entry], bool] | None = None, space: str | None = None, all: bool = False
    ) -> Plan:  # fmt: skip
        """The entries that an eviction would remove, in order, until ``need`` bytes are free, both of the budget and on the disk above
        ``min_free``; or all entries that ``where``, ``space`` or ``all`` selects. Pinned entries stay. `Plan.execute` removes them."""
        from forebay.cache import entries

        return entries.plan(self._fetcher, self._size(need, "need"), where, space, all=all)

    def prune(self) -> Plan:
        """The entries over the budget or ``min_free`` now. `Plan.execute` removes them, unfinished work of dead processes, and files that
        no entry names. Unfinished downloads can be resumed; they stay until their room is needed."""
        from forebay.cache import entries

        self._check_open()
        return entries.prune(self._fetcher)

    def clear(self, space: str | None = None) -> Plan:
        """A plan that removes everything in one space, or in all spaces."""
        return self.plan(space=space, all=True)

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Release the root; the next `Cache` does this for a dropped one. What it returned stays valid; other calls raise `Closed`."""
        self._fetcher.close()
        self._hit = self._forced_hit = no_hit

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, self._fetcher.init_args

    def __forebay_content__(self) -> None:
        """Nothing: as an argument of a cached function, the cache in use does not change the result."""

    def __repr__(self) -> str:
        return f"<forebay.Cache {str(self.path)!r}{' closed' if self.closed else ''}>"

    def _repr_html_(self) -> str:
        return f"<p>{self!r}</p>" if self.closed else self.stats()._as_panel(str(self.path))

    def _check_open(self) -> None:
        store = self._fetcher.current()
        if store is not self._bound:  # the root could not be used until now
            self._bound, self._hit, self._forced_hit = store, self._fetcher.hot_lookup(), self._fetcher.hot_lookup(force=True)

    def _find(self, name: Name) -> tuple[str, str] | None:
        """The space and the key of the entry of this name; None if there is none. Raises `Ambiguous`."""
        from forebay.cache.entries import find

        self._check_open()
        return find(self._fetcher, name)

    def _size(self, size: int | str | None, name: str) -> int | None:
        """A size in bytes; percentages refer to the budget. None for a percentage while the root cannot be used, and so has no budget."""
        self._check_open()
        total = self.budget
        found = _config.parse_size(size, total=total, name=name) if size is not None else None
        return found if total or not isinstance(size, str) or not size.strip().endswith("%") else None

    def _limit(self, size: int | str | None, name: str) -> int | str | None:
        """`_size`, but a percentage as it was given while it has no bytes: it is taken of the budget once the root can be used."""
        found = self._size(size, name)
        return size if found is None else found

    def _reopened_by(self, lease: Lease, method: str, url: Url, options: ReadOptions, **others: Any) -> Lease:
        """The lease, which unpickles by repeating this call on a cache with the same root, without asking the remote."""
        text, filesystem = remote.as_text(url), options.get("filesystem")
        url = remote.absolute(text) if filesystem is None else remote.absolute_on(filesystem, text)
        again = {**options, **others, "refresh": False, "max_age": "forever"}
        again.pop("on_wait", None)
        return lease.reopened_by(_unpickle_lease, self._fetcher.init_args, method, url, again)

    def _target(self, url: Url, filesystem: Any = None) -> Target:
        self._check_open()
        return self._fetcher.target(url, filesystem)

    def _options(self, on_progress: Callable[[int, int | None], None] | None = None, **given: Unpack[ReadOptions]) -> FetchOptions:
        options = FetchOptions.of(self._fetcher, on_progress=on_progress, **given)
        if "ipykernel" in sys.modules:
            from forebay.cache.notebook import with_bar

            options = with_bar(options)
        return options

    def _request(self, url: Url, options: ReadOptions) -> tuple[Target, FetchOptions]:
        return self._target(url, options.get("filesystem")), self._options(**options)


def fetcher_of(cache: Cache) -> Fetcher:
    """The fetcher of a cache, for the packages above it. Raises `Closed`."""
    cache._check_open()
    return cache._fetcher


def fault_of(cache: Cache) -> errors.CacheFault | None:
    """Why a cache cannot be used, so that calls are served from the source; None if it works."""
    store = cache._store
    if store.keeps:
        return None
    return errors.NoLocks(store.why) if store.fault is errors.NoLocks else errors.CacheFault(store.why)


@guarded
def _unpickle(path: str, init_kwargs: dict[str, Any]) -> Cache:
    """Open a cache with these arguments, and leave the limits of its root as they are."""
    return _config.without_limits(Cache, path, **init_kwargs)


@guarded
def _unpickle_lease(init_args: tuple[str, dict[str, Any]], method: str, name: Any, options: dict[str, Any]) -> Lease:
    """Repeat the call that gave a lease, on the same root. The lease outlives the cache that is opened here."""
    with _unpickle(*init_args) as opened:
        reopened: Lease = getattr(opened, method)(name, **options)
        return reopened
