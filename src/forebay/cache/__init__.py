"""The cache of a node, as a program sees it: opens a root and hands out what is in it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, Self, overload

from forebay import _config, errors, remote
from forebay._engine.index.memo import no_hit
from forebay._engine.locks.fill import Waiting
from forebay._engine.locks.leases import Lease
from forebay._engine.passthrough import PassThrough
from forebay._engine.store import Store
from forebay._kernel import waits
from forebay._logs import logger
from forebay._model import Buffer, Codec, Entry, Item
from forebay.cache.maintenance import Upkeep, open_again
from forebay.cache.space import VALUES, Space, checked
from forebay.cache.warming import warm
from forebay.origin import URLS, Origin
from forebay.origin.opening import Reopening, is_network, open_store
from forebay.origin.request import FetchOptions, Target
from forebay.reports import OnProgress as OnProgress
from forebay.reports import Plan as Plan
from forebay.reports import Progress as Progress
from forebay.reports import ProgressReporter
from forebay.reports import Stats as Stats
from forebay.reports import WarmReport as WarmReport
from forebay.samples import Samples, open_samples

if TYPE_CHECKING:
    from forebay.claims import Claim
    from forebay.prefetch import PassThrough as NoPrefetch
    from forebay.prefetch import Prefetcher
    from forebay.tasks import Tasks
    from forebay.world import World

log = logger("forebay.cache")

_SECOND = 1_000_000_000
_FOREVER = 1 << 60  # nanoseconds: 36 years, so that an entry that was invalidated (validated in 1970) is too old even so


class Cache(Upkeep):
    """The local cache of this node: one directory, one byte budget, any number of processes.

    ``root``: the directory (default: ``$FOREBAY_HOME``, else ``~/.cache/forebay``). ``budget``, ``min_free``: bytes as int or
    ``"500GB"``, ``"500GiB"``, ``"80%"`` of the disk; an explicit value sets it for every process that shares the root.
    ``max_entries``: at most so many entries. ``shared``: a root for the group (default: ``$FOREBAY_SHARED``); without it, what a group
    may write to is refused. ``read_only``: only look. ``upstream``: a root that
    is looked into second, and never written to. ``offline``: never ask a remote. ``max_age``: seconds for which an entry is served
    unasked, or ``"forever"``. ``timeout``: seconds that a call waits in all for other processes (default: as long as they live; for the
    catalog 10 s). ``enabled=False``: the same calls with no cache behind them.

    Callable from any thread; usable in both processes after a fork; pickles as its place. Raises `RootRefused`, `NewerFormat` and
    `ConfigError` when made; afterwards faults of the cache never reach the caller: calls are served from the source.
    """

    def __init__(
        self, root: str | os.PathLike[str] | None = None, *, budget: int | str | None = None, shared: bool | None = None,
        read_only: bool = False, min_free: int | str | None = None, max_entries: int | None = None,
        upstream: str | os.PathLike[str] | None = None, offline: bool | None = None, max_age: float | str | None = None,
        timeout: float | None = None, remote_options: remote.RemoteOptions | None = None, enabled: bool = True,
    ) -> None:  # fmt: skip
        said = _config.EnvironmentSettings.from_environment()
        if root is not None and not os.fspath(root):
            raise errors.ConfigError("root='' names no directory: '.' is the current one", name="root", value="")
        shared = said.shared if shared is None else shared
        place = Path(root) if root is not None else said.home or _config.default_root(is_network=is_network)
        self._how: dict[str, Any] = {
            "shared": shared, "read_only": read_only, "upstream": upstream, "offline": offline, "max_age": max_age, "timeout": timeout,
            "remote_options": remote_options, "enabled": enabled,
        }  # fmt: skip
        self.offline = said.offline if offline is None else offline
        age = said.max_age if max_age is None else _config.parse_age(max_age, name="max_age")
        self._max_age = int(min(age * _SECOND, _FOREVER))
        self._timeout = _config.parse_timeout(timeout)
        if max_entries is not None and max_entries < 0:
            raise errors.ConfigError(f"max_entries={max_entries} makes no sense: it is not negative", name="max_entries", value=max_entries)
        budget, min_free = said.budget if budget is None else budget, said.min_free if min_free is None else min_free
        options = remote_options or remote.RemoteOptions.from_environment()  # before anything is opened
        how = place, budget, min_free, max_entries, shared, read_only
        with waits.patience(self._timeout):
            store = open_store(*how) if enabled else PassThrough()
        self.path = store.root.path if isinstance(store, Store) else place.absolute()
        above = open_store(Path(upstream), None, None, None, True, True) if upstream is not None else None
        self._origin = Origin(
            store, options, above if isinstance(above, Store) else None,
            set() if enabled else {"NoSpace"},  # that nothing is kept was asked for: it need not be told
            self.offline, self._max_age, self._timeout, Reopening(*how) if enabled and isinstance(store, PassThrough) else None,
        )  # fmt: skip
        self._passes = self._origin.reopening is not None
        self._hit = store.hot_lookup(URLS)
        self.closed = False
        self._values = Space(self._origin, VALUES)
        self._opened: weakref.WeakSet[Samples[Any] | Prefetcher[Any] | NoPrefetch[Any]] = weakref.WeakSet()

    # -- objects of remotes ----------------------------------------------------------------------------------------

    def read(
        self, url: str | os.PathLike[str], *, max_age: float | str | None = None, refresh: bool = False, sha256: str | None = None,
        etag: str | None = None, timeout: float | None = None, bypass: bool = False, force: bool = False, pin: bool = False,
        filesystem: Any = None,
    ) -> memoryview:  # fmt: skip
        """The bytes of an object, read-only: over the mapping where it is kept, without a copy; they stay good after an eviction.

        ``refresh``: ask the remote now. ``sha256``, ``etag``: what is expected; else `ChecksumMismatch`. ``bypass``: neither look
        into the cache nor write to it. ``force``: keep a local file too. ``pin``: never evict it. ``filesystem``: an fsspec or pyarrow
        filesystem object, of which ``url`` is a path. Raises `RemoteError`. A hit takes no lock and no system call."""
        if max_age is None and not (refresh or sha256 or etag or bypass or pin or filesystem):
            found = self._hit(url, self._max_age)  # type: ignore[arg-type]  # a path finds nothing
            if found is not None:
                return found
        ask = self._ask(max_age, refresh, sha256=sha256, etag=etag, timeout=timeout, bypass=bypass, force=force, pin=pin)
        return self._origin.read(self._target(url, filesystem), ask)

    def open(
        self, url: str | os.PathLike[str], *, max_age: float | str | None = None, refresh: bool = False, filesystem: Any = None, **how: Any
    ) -> BinaryIO:  # fmt: skip
        """A binary file object on the kept copy; where there is no room, one that reads ranges of the remote. See `read`."""
        return self._origin.open(self._target(url, filesystem), self._ask(max_age, refresh, **how))

    def local(
        self, url: str | os.PathLike[str], *, max_age: float | str | None = None, refresh: bool = False, filesystem: Any = None, **how: Any
    ) -> Lease:  # fmt: skip
        """The cached copy as a local file: ``with cache.local(url) as path`` gives its path, a ``str``, valid until the block ends.

        Without a ``with`` keep the `Lease` that is returned: the file exists, unchanged, until the lease is closed or dropped. A local
        file is its own path, unless ``force``. Raises `NoSpace` where the object cannot be kept, `WaitTimeout`, `RemoteError`."""
        target, ask = self._target(url, filesystem), self._ask(max_age, refresh, **how)
        return self._origin.local(target, ask).reopened_by(
            open_again, *self.__reduce__(), "local", url, {**how, "filesystem": filesystem, "max_age": "forever"}
        )

    def directory(
        self, url: str | os.PathLike[str], *, include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None,
        filesystem: Any = None, max_age: float | str | None = None, refresh: bool = False, timeout: float | None = None,
        offline: bool | None = None, force: bool = False, pin: bool = False, on_progress: OnProgress | None = None,
    ) -> Lease:  # fmt: skip
        """A remote directory as a local one: ``with cache.directory(url) as path`` gives its path, a ``str``, valid until the block ends.

        The directory is complete and read-only. Without a ``with`` keep the `Lease` that is returned: nothing in the directory changes
        until the lease is closed or dropped.
        Of all processes one fetches it, each file once; what another version or another part of it shares is not fetched again.
        ``include``, ``exclude``: patterns of the files that are wanted, such as ``model-*.safetensors`` or ``weights/`` (``*`` crosses
        ``/``). A local directory is its own path, unless ``force``. ``max_age``, ``refresh``, ``timeout``, ``offline``, ``pin``: as for
        `read`. Raises `NoSpace` where it cannot be kept, `NotFound`, `NotADirectory`, `Incomplete`, `BadListing`, `WaitTimeout`, `Offline`,
        or another `RemoteError`."""
        from forebay.directories.trees import lease  # half of those who open a cache never want it

        include, exclude = _patterns(include), _patterns(exclude)
        ask = self._ask_for(url, max_age, refresh, on_progress, timeout=timeout, offline=offline, force=force, pin=pin)
        found = lease(self._origin, url, filesystem, include, exclude, ask)
        if on_progress is not None:
            size = sum(file.size for _, file in self._store.members(found.entry))
            ProgressReporter(remote.shown(url), on_progress).say("done", size, size)
        part = {"include": include, "exclude": exclude, "filesystem": filesystem}
        how = {**part, "max_age": "forever", "timeout": timeout, "offline": offline, "force": force, "pin": pin}
        return found.reopened_by(open_again, *self.__reduce__(), "directory", url, how)

    def copy_directory(
        self, url: str | os.PathLike[str], path: str | os.PathLike[str] | None = None, *, overwrite: bool = False,
        include: str | Iterable[str] | None = None, exclude: str | Iterable[str] | None = None, filesystem: Any = None,
        max_age: float | str | None = None, refresh: bool = False, timeout: float | None = None, offline: bool | None = None,
        force: bool = False, on_progress: OnProgress | None = None,
    ) -> str:  # fmt: skip
        """A remote directory as a private copy at ``path``, which may be written to; gives its absolute path. See `directory`. Without a
        ``path`` it is a new directory in the temporary directory, which the caller removes. The copy is not charged to the budget.

        By reflink where the file system can. Several processes that ask for the same ``path`` do it once. What else lies in it stays; a
        file that is to go where another one stands, which is not a copy of ours, is `Foreign` (a FileExistsError), unless ``overwrite``.
        Where the cache has no room, the files are fetched straight to ``path``."""
        from forebay.directories.private import copy

        ask = self._ask_for(url, max_age, refresh, on_progress, timeout=timeout, offline=offline, force=force)
        return copy(self._origin, url, filesystem, include, exclude, ask, path, overwrite=overwrite)

    def _ask_for(
        self, url: str | os.PathLike[str], max_age: float | str | None, refresh: bool, on_progress: OnProgress | None, **how: Any
    ) -> FetchOptions:  # fmt: skip
        self._check_open()
        told = ProgressReporter(remote.shown(url), on_progress)
        return self._ask(max_age, refresh, on_wait=told.waiting, on_progress=told.fetching, **how)

    def pull(
        self, url: str | os.PathLike[str], *, max_age: float | str | None = None, refresh: bool = False,
        on_progress: OnProgress | None = None, filesystem: Any = None, **how: Any,
    ) -> Entry | None:  # fmt: skip
        """Have an object in the cache; gives its entry, None where there is no room for it. See `read`."""
        target = self._target(url, filesystem)
        told = ProgressReporter(target.key, on_progress)
        ask = self._ask(max_age, refresh, force=True, on_wait=told.waiting, on_progress=told.fetching, **how)
        try:
            lease = self._origin.lease(target, ask)
            with lease:
                told.say("done", lease.entry.size, lease.entry.size)
                return lease.entry
        except errors.NoSpace as error:
            log.warning("%s is not kept: %s", target.key, str(error))
            told.say("direct", 0, None)
            return None

    def warm(
        self, urls: Iterable[str | os.PathLike[str]], *, jobs: int = 16, on_progress: OnProgress | None = None, **how: Any
    ) -> WarmReport:  # fmt: skip
        """Have many objects in the cache, ``jobs`` at a time. What is there already costs nothing: an interrupted call is taken up again
        by the same call."""
        if isinstance(urls, str | os.PathLike):
            raise errors.ConfigError("warm takes several URLs: a list, even of one", name="urls", value=os.fspath(urls))
        return warm(lambda url: self.pull(url, on_progress=on_progress, **how), urls, jobs)

    def invalidate(self, url: str | os.PathLike[str]) -> None:
        """Let the next call for this URL, of any process, ask the remote."""
        self._origin.invalidate(self._target(url))

    # -- values ----------------------------------------------------------------------------------------------------

    def get(self, key: str) -> memoryview | None:
        """The bytes that were put under this key, read-only; None if there are none. A hit takes no lock and no system call."""
        return self._open_space(self._values).get(key)

    def put(self, key: str, data: Buffer) -> bool:
        """Keep bytes under a key, in place of what was there. False, with one warning, where they cannot be kept."""
        return self._open_space(self._values).put(key, data)

    def get_or_put(self, key: str, fn: Callable[[], Buffer], *, timeout: float | None = None) -> memoryview:
        """The bytes under this key; else what ``fn`` gives, kept: of all processes one runs it, the others wait for its result.

        What ``fn`` raises reaches all who waited. Where it cannot be kept the caller gets it all the same."""
        return self._open_space(self._values).get_or_put(key, fn, timeout=self._timeout if timeout is None else timeout)

    def space(self, name: str, *, quota: int | str | None = None, policy: str | None = None) -> Space:
        """A named part of the cache, with a quota of its own (bytes) and a policy: ``lru``, ``freeze`` or ``wait``."""
        self._check_open()
        if not name or ":" in checked(name):
            raise errors.ConfigError(f"the space {name!r} cannot be named: not empty, and without ':'", name="name", value=name)
        size = _config.parse_size(quota, total=self.budget, name="quota") if quota is not None else None
        with waits.patience(self._timeout):
            self._origin.open_space(name, policy=policy, quota=size)
        return Space(self._origin, name, self)

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
        """An array of ``length`` slots that all processes fill and read: each sample is decoded or fetched once for the node.

        With a ``name`` it stays for later jobs, until it is evicted while nobody has it open; without one it goes with the last process
        that has it. ``codec``: ``raw`` (bytes), ``numpy``, ``pytree`` (tuples and dicts of arrays and plain values), ``arrow``, ``json``,
        ``pickle`` (any object), or an object with ``encode`` and ``decode``. ``fingerprint``: of dataset and transform; another one starts
        the array afresh. ``quota``: bytes it may have, whoever writes. ``policy``: ``freeze`` only: what does not fit is not stored, what
        is stored stays. ``copy``: `Samples.get` gives writable copies. Without ``length`` the array must be there: else `NotCached`.
        Raises `ConfigError` (a ValueError) for another length or codec than it was made with."""
        self._check_open()
        if policy != "freeze":
            raise errors.ConfigError(f"policy={policy!r}: samples know 'freeze' only", name="policy", value=policy)
        size = _config.parse_size(quota, total=self.budget, name="quota") if quota is not None else None
        with waits.patience(self._timeout):
            found = open_samples(self._origin, self, name, length, codec=codec, fingerprint=fingerprint, quota=size, copy=copy)
        self._opened.add(found)
        return found

    @overload
    def prefetcher(
        self, source: Any, *, decode: Callable[[str, bytes], Item], name: str = "prefetch", workers: int = 8,
        budget: int | str | None = None, max_count: int = 10_000_000, policy: str = "wait", store: str = "raw", codec: Any = None,
        keep: bool = True,
    ) -> Prefetcher[Item] | NoPrefetch[Item]: ...  # fmt: skip

    @overload
    def prefetcher(
        self, source: str | os.PathLike[str], *, decode: None = None, name: str = "prefetch", workers: int = 8,
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
        """Loads items of ``source`` into the space ``name``, in ``workers`` threads, and hands out lazies for them.

        ``source``: an object with ``source[key] -> bytes`` and ``uri``; a URL prefix or directory; a tar shard, or several: see
        `forebay.sources`. ``decode(key, data)``: what makes a value of an item's bytes. ``store``: ``raw`` keeps the bytes, and decodes at
        each `Lazy.get`; ``decoded`` keeps the value, through ``codec``, as for `tasks`. ``budget`` (bytes), ``max_count``: of the space,
        for all processes together. ``policy``: ``wait`` until somebody lets go when all is held; ``lru`` and ``freeze`` read past the
        cache then. ``keep=False``: an item goes when its last holder in any process is done with it. Raises `ConfigError`."""
        from forebay.prefetch import open_prefetcher  # with all kinds of sources: half of those who open a cache never want it

        self._check_open()
        if not name or ":" in checked(name):
            raise errors.ConfigError(f"the space {name!r} cannot be named: not empty, and without ':'", name="name", value=name)
        size = _config.parse_size(budget, total=self.budget, name="budget") if budget is not None else None
        with waits.patience(self._timeout):
            found = open_prefetcher(
                self._origin, self, source, decode=decode, name=name, workers=workers, budget=size, max_count=max_count, policy=policy,
                store=store, codec=codec, keep=keep,
            )  # fmt: skip
        self._opened.add(found)
        return found

    def tasks(
        self, name: str, *, budget: int | str | None = None, config: Any = None, codec: Any = None, copy: bool = False
    ) -> Tasks:  # fmt: skip
        """Outputs of expensive calls, kept by tag: see `Tasks`.

        ``budget``: bytes that the values may have, whoever writes; it is set for everybody, and applied at once. ``config``: a YAML file,
        or a mapping of the same shape, that says which functions are cached, and which are replayed. ``codec``: ``pickle`` (any object),
        ``pytree``, ``numpy``, ``arrow``, ``json``, ``raw``, or an object with ``encode`` and ``decode``; by default ``pickle``, and in a
        root that others can write to ``pytree``, which executes nothing. ``copy``: what functions and `Tasks.read` give is the caller's
        own, and may be written to. Raises `ConfigError`, `MissingExtra`."""
        from forebay.tasks import open_tasks  # half of those who open a cache never want it

        self._check_open()
        return open_tasks(self._origin, self, name, codec, config, budget, copy)

    def claim(
        self, dirs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], remotes: str | Sequence[str | None] | None = None,
        world: World | None = None, job: str | None = None, *, name: str | None = None, shared: bool = False,
        timeout: float | None = 60.0,
    ) -> Claim:  # fmt: skip
        """Register what this job uses on this node: `forebay.claim`. Claims are of the node, whatever the cache."""
        from forebay.claims import claim  # half of those who open a cache never want it

        self._check_open()
        return claim(dirs, remotes, world, job, name=name, shared=shared, timeout=timeout)

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the root. Buffers, files and leases that were handed out stay good; any other call is `Closed`."""
        if not self.closed:
            for opened in list(self._opened):
                opened.close()
            self.closed, self._hit = True, no_hit
            self._store.close()
            if self._origin.upstream is not None:
                self._origin.upstream.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (str(self.path), self._how)

    def __forebay_content__(self) -> None:
        """As an argument of a cached function: which cache it works with does not change what it gives."""

    def __repr__(self) -> str:
        return f"<forebay.Cache {str(self.path)!r}{' closed' if self.closed else ''}>"

    def _check_open(self) -> None:
        if not (self.closed or self._passes):
            return
        super()._check_open()
        if self._passes:
            store = self._origin.current()
            if isinstance(store, Store):
                self._passes, self.path, self._hit = False, store.root.path, store.hot_lookup(URLS)

    def _open_space(self, space: Space) -> Space:
        self._check_open()
        return space

    def _target(self, url: str | os.PathLike[str], filesystem: Any = None) -> Target:
        self._check_open()
        if not os.fspath(url):
            raise errors.ConfigError("an empty URL names nothing", name="url", value="")
        return self._origin.target(url, filesystem)

    def _ask(
        self, max_age: float | str | None, refresh: bool, *, sha256: str | None = None, etag: str | None = None,
        timeout: float | None = None, bypass: bool = False, force: bool = False, pin: bool = False, offline: bool | None = None,
        on_wait: Callable[[Waiting], None] | None = None, on_progress: Callable[[int, int | None], None] | None = None,
    ) -> FetchOptions:  # fmt: skip
        offline = self.offline if offline is None else offline
        age = self._max_age if max_age is None else _config.parse_age(max_age, name="max_age") * _SECOND
        now = self._store.now(exact=refresh)
        since = -1 if offline else now if refresh else 1 if age >= _FOREVER else max(1, now - int(age))
        sha256 = None if sha256 is None else _config.parse_sha256(sha256)
        patience = self._timeout if timeout is None else _config.parse_timeout(timeout)
        return FetchOptions(since, offline, sha256, etag, patience, bypass, force, pin, on_wait, on_progress, refresh and not offline)


def origin_of(cache: Cache) -> Origin:
    """What is below a cache, for the rooms above it. Raises `Closed`."""
    cache._check_open()
    return cache._origin


def fault_of(cache: Cache) -> str | None:
    """Why nothing can be found or kept in a cache, which is read past therefore; None: it is in order."""
    return cache._store.why if isinstance(cache._store, PassThrough) else None


def _patterns(given: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    return given if given is None or isinstance(given, str) else tuple(given)


def _arrive(path: str, how: dict[str, Any]) -> Cache:
    return _config.without_limits(Cache, path, **how)
