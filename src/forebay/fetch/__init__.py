"""Objects of remotes as entries of the store: their keys, freshness and fetches, and reads that bypass the cache."""

from __future__ import annotations

import itertools
import math
import os
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self, TypeVar

from forebay import _config, errors, remote
from forebay._engine.index.memo import Remembered
from forebay._engine.store import Store
from forebay._kernel import events, host, interrupts, waits
from forebay._logs import logger
from forebay._model import LISTINGS, URLS, Asker, CheckingRemote, Entry, ObjectInfo, Remote, Transfer, can_check
from forebay.fetch.opening import NO_OPTIONS, CacheHandle, CacheOptions, in_memory, others_can_write
from forebay.fetch.request import FOREVER, POSTPONED, FetchOptions, Target, folder_of, index_key, is_same_version
from forebay.fetch.upstream import Upstream
from forebay.remote import UrlNaming

if TYPE_CHECKING:
    from forebay._engine.index.memo import Hit
    from forebay._engine.leases import Lease
    from forebay._engine.null_store import NullStore
    from forebay.fetch.job import JobSink

log = logger("forebay.fetch")
A = TypeVar("A", bytes, Transfer)

_NO_ROOT = int.from_bytes(os.urandom(8)) >> 2  # in place of the secret of a root: nothing is stored under these keys
_LIMITS = "budget", "min_free", "max_entries", "max_rate", "max_connections"  # of the root, for all processes


class Fetcher:
    """The state that the fronts of one cache share: its store, its remotes, and the defaults of its calls. Reads objects through the store.

    ``offline``, ``max_age`` (nanoseconds), ``timeout`` (seconds that a call waits in total): the defaults of calls.

    Callable from any thread and after a fork. Pickles as the arguments that opened it: unpickling opens it again, once for all handles of
    one pickle, and leaves the limits of the root as they are."""

    closed = True  # until it has a store

    def __init__(
        self, store: Store | NullStore, options: remote.RemoteOptions | None = None, upstream: Upstream | None = None, *,
        opened: CacheOptions = NO_OPTIONS, init_kwargs: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """``opened``: the resolved options of the root. ``init_kwargs``: the arguments of `Cache`, without the limits of the root."""
        self.store, self.upstream, self.closed = store, upstream, False
        self._opened, self._init_kwargs = opened, init_kwargs or {}
        self._root = Path() if opened.root is None else opened.path.absolute()
        age = float(_config.DEFAULT_MAX_AGE if opened.max_age is None else opened.max_age)
        self.offline, self.max_age, self.timeout = bool(opened.offline), int(min(age * 1_000_000_000, FOREVER)), opened.timeout
        # While ``store`` is a `NullStore` that a later call may replace: the root was full, or its catalog busy.
        self.reopening = waits.Turn() if opened.root is not None and opened.enabled and not store.keeps else None
        self.warned = {"NoLocks"} if opened.enabled else {"NoSpace"}  # the kinds of problem that were logged, or that the user caused
        self.unset_spaces: dict[str, dict[str, Any]] = {}  # spaces that fronts requested before there was a store
        self._options, self.realm = options, remote.Realm(options)
        self._naming, self._above = UrlNaming(_NO_ROOT, self.realm), 0  # the id of the upstream root
        self._targets: dict[str, Target] = {}
        self._resolvers = remote.Resolvers(lambda: self.options, self.realm)
        self._handles: weakref.WeakValueDictionary[int, CacheHandle] = weakref.WeakValueDictionary()
        self._closings = itertools.count()

    # -- opening and closing ---------------------------------------------------------------------------------------

    @classmethod
    def for_root(cls, options: CacheOptions) -> Self:
        """The fetcher of a cache that is created with these options. Raises `RootRefused`, `NewerFormat`, `ConfigError`."""
        opened = options.resolved()
        init_kwargs = options._replace(shared=opened.shared, upstream=opened.upstream)._asdict()
        for name in ("root", "first_budget", *_LIMITS):
            del init_kwargs[name]
        with waits.time_limit(opened.timeout):
            store = opened.open_or_pass()
        try:
            fetcher = cls(store, opened.remote_options, opened=opened, init_kwargs=init_kwargs)
        except errors.ConfigError:  # a client certificate that cannot be read
            store.close()
            raise
        try:
            if opened.upstream is not None:
                fetcher.upstream = Upstream(CacheOptions(opened.upstream, shared=True, read_only=True))
        except BaseException:
            fetcher.close()
            raise
        return fetcher

    @classmethod
    @interrupts.guarded
    def reopen(cls, root: str, init_kwargs: dict[str, Any]) -> Fetcher:
        """The fetcher that these `init_args` open. It sets no limits of the root, and ignores those in the environment of this process."""
        return _config.without_limits(cls.for_root, CacheOptions(root, **init_kwargs))

    @property
    def init_args(self) -> tuple[str, dict[str, Any]]:
        """The arguments of `reopen`, valid in any process of the node."""
        return str(self.path), self._init_kwargs

    def __reduce__(self) -> tuple[Any, ...]:
        return Fetcher.reopen, self.init_args

    def __forebay_content__(self) -> None:
        """Nothing: as part of an argument of a cached function, the cache in use does not change the result."""

    @property
    def path(self) -> Path:
        """The root directory."""
        return self.store.root.path if self.store.keeps else self._root

    def register(self, handle: CacheHandle) -> None:
        """Close this handle together with the cache, if the handle still exists then."""
        self._handles[id(handle)] = handle

    def close(self) -> None:
        """Close all handles and release the root. A second call does nothing."""
        for known in self._handles.valuerefs():
            if (handle := known()) is not None:
                handle.close()
        self.closed = True
        if next(self._closings):  # of two threads only one releases the store, which other caches use
            return
        self.store.close()
        if self.upstream is not None:
            self.upstream.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not self.closed and not is_finalizing():
            with interrupts.shielded():
                if self.store.keeps:
                    self.store.abandon()
                if self.upstream is not None:
                    self.upstream.abandon()

    def check_open(self) -> None:
        """Raises `Closed`."""
        if self.closed:
            raise errors.Closed.of("cache")

    @property
    def others_can_write(self) -> bool:
        """Whether anyone but this user and the superuser can write to this root, or upstream: then nothing in it is executed unasked."""
        may = self.reopening is not None and (self._opened.shared or self._opened.read_only)  # unknown until it is open
        may = may or (self.store.keeps and others_can_write(self.store))
        return may or (self.upstream is not None and self.upstream.others_can_write)

    def current(self) -> Store | NullStore:
        """The store; if it could not be used when it was opened, it is opened as soon as it can be. Raises `Closed`."""
        if self.closed:  # not by `check_open`: each hit of a value comes here
            raise errors.Closed.of("cache")
        if self.reopening is not None or (self.unset_spaces and self.store.keeps):
            self._catch_up()
        return self.store

    @interrupts.guarded
    def _catch_up(self) -> None:
        """Open the store again, and the spaces that were requested meanwhile."""
        reopening = self.reopening
        if reopening is not None and (opened := reopening.attempt(self._opened.open_again)) is not None:
            self.store, self.reopening = opened, None
        if self.unset_spaces and self.store.keeps:
            self._open_noted(self.store)

    def _open_noted(self, store: Store) -> None:
        """Create the spaces that were requested before there was a store. The call that does this must not fail because of them."""
        while self.unset_spaces:
            try:
                name, limits = self.unset_spaces.popitem()
            except KeyError:  # another thread took the last one
                return
            try:
                store.spaces.open(name, **limits)
            except (errors.ForebayError, OSError) as error:
                self.warn(f"space {name}", "the space %s cannot be set up as requested: %s", name, error)

    def open_space(self, name: str, **limits: Any) -> None:
        """Create a space with these limits (see `Store.open_space`), as soon as there is a store that can hold it."""
        store = self.current()
        if store.keeps:
            with waits.time_limit(self.timeout):
                store.spaces.open(name, **limits)
        else:
            self.unset_spaces[name] = limits
            self.current()  # another thread may have opened it before this was noted

    def validated(self, store: Store | NullStore, entry: Entry) -> int:
        """When an entry of this store, or of the upstream one, was validated, by the clock of this one; 0: ask the remote."""
        at = store.validated(entry)
        return at if store is self.store or at <= 1 else max(at - (store.now() - self.store.now()), 1)

    # -- keys -----------------------------------------------------------------------------------------------------

    @host.cached_property
    def options(self) -> remote.RemoteOptions:
        """How requests are sent. Made by the first request."""
        return self._options or remote.RemoteOptions()

    def asker(self, options: remote.RemoteOptions | None = None, *, runs_function: bool = False) -> Asker:
        """This cache as a caller. ``options``: with which it asks remotes; default: its own."""
        return Asker(lambda: self._manner(options or self.options), runs_function)

    def _manner(self, options: remote.RemoteOptions) -> str:
        """Tells these options from others, without their secrets."""
        import hashlib

        text = repr((options, sorted(options.headers.items()), options.token, options.partition))
        return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), key=self.naming.secret.to_bytes(8), digest_size=8).hexdigest()

    @property
    def naming(self) -> UrlNaming:
        """How the keys of this cache are made. A root that has become usable, or was created again, has another secret."""
        secret = self.store.root.id if self.store.keeps else _NO_ROOT
        above = 0 if self.upstream is None else self.upstream.id
        if self._naming.secret != secret or self._above != above:
            # T1 asks for the naming / T2 does, of a root that was created again / T1 notes a target: only in what was replaced.
            self._naming, self._above, self._targets = UrlNaming(secret, self.realm), above, {}
        return self._naming

    def target(self, url: str | os.PathLike[str], filesystem: Any = None) -> Target:
        """The target of a URL or path, or of a path of a filesystem object of fsspec or pyarrow. Raises `ConfigError`, `MissingExtra`."""
        text = remote.as_text(url)
        if not text:
            raise errors.ConfigError("an empty URL names nothing", name="url", value="")
        if filesystem is not None:
            return self.target_on(remote.on_filesystem(filesystem, self.options), text)
        targets, naming = self._targets, self.naming  # in this order: what is replaced meanwhile is noted in nothing
        if targets is self._targets and (known := targets.get(text)) is not None:
            return known
        text = remote.absolute(text)  # so no relative path is noted: after `os.chdir` it names another file
        target = self.target_by(text, naming, self._resolvers.of(text))
        if len(targets) >= 10_000:
            targets.clear()
        targets[text] = target
        return target

    def target_by(self, url: str, naming: UrlNaming, resolve: Callable[[], Remote]) -> Target:
        """The target of a URL, with a key made by ``naming``, and the remote that serves it. Raises `ConfigError`."""
        key = remote.canonical(url, naming)
        above = key if self.upstream is None else remote.canonical(url, naming._replace(secret=self.upstream.id))
        return Target(url, key, remote.suffix_of_key(key), resolve, remote.local_path(url), above)

    def target_on(self, filesystem: remote.FilesystemRemote, path: str) -> Target:
        """The target of a path of a filesystem object."""
        key = filesystem.key(path, self.naming)
        above = key if self.upstream is None else filesystem.key(path, self.naming._replace(secret=self.upstream.id))
        return Target(filesystem.absolute(path), key, remote.suffix_of_key(key.rpartition("#")[0]), lambda: filesystem, None, above)

    def hot_lookup(self, *, force: bool = False) -> Hit:
        """See `Store.hot_lookup`: of objects, by their URLs as the caller writes them. ``force``: of copies of local files too."""
        as_written = self.realm.is_usual and not force
        hit = self.store.hot_lookup(URLS, as_written=as_written)
        if as_written:
            return hit

        def hit_by_key(url: str, max_age: int) -> memoryview | None:
            # Elsewhere in this process, and so in its memo, the same text may name what another realm fetched.
            try:
                target = self.target(url)
            except errors.ForebayError:  # the call that goes on raises it
                return None
            return hit(target.key, max_age) if force or target.in_place is None else None

        return hit_by_key

    def alias(self, url: str, key: str) -> str:
        """The name by which `hot_lookup` is to find an object, or the key itself: also where the URL may be the key of something else. See
        `Memo.alias`."""
        return url if self.realm.is_usual and "#" not in url and "@" not in url else key

    # -- reading ---------------------------------------------------------------------------------------------------

    def read(self, target: Target, options: FetchOptions) -> memoryview:
        """The bytes, read-only: over the mapping where they are stored, else in memory."""
        from forebay.fetch.job import Job  # imported late: a hit needs none

        job = Job(self, target, options)
        job.run()
        assert job.data is not None, "a job that raises nothing has its result"
        return job.data

    def lease(self, target: Target, options: FetchOptions) -> Lease:
        """A lease on the cached copy, fetched if it is missing or not fresh; a local file is its own copy. Raises `CacheFault` where it
        cannot be stored."""
        from forebay.fetch.job import REOPENED, Job

        job = Job(self, target, options, leased=True)
        try:
            job.run()
        except REOPENED:
            job = Job(self, target, options, leased=True)
            job.run()
        assert job.lease is not None, "a job that raises nothing has its result"
        return job.lease

    def open(self, target: Target, options: FetchOptions, block_size: int | str | None = None) -> BinaryIO:
        """A file object on the cached copy; one that reads ranges of the remote where there is none. ``block_size``: see `Cache.open`."""
        if block_size is not None:
            from forebay.fetch.block_files import open_blocks

            return open_blocks(self, target, options, block_size)
        from forebay.fetch.files import open_object  # imported late: many programs never open a file

        return open_object(self, target, options)

    def direct(self, target: Target, options: FetchOptions) -> memoryview:
        """The whole object in memory, or over the upstream's mapping; nothing is stored."""
        from forebay.fetch.job import Job

        return Job(self, target, options).direct()

    def is_fresh(self, entry: Entry, options: FetchOptions) -> bool:
        return self.store.validated(entry) >= options.since and not entry.varies

    def stat(self, target: Target, options: FetchOptions | None = None, known: str | None = None) -> ObjectInfo | None:
        """Ask the remote for its description of an object; None if it still has the ``known`` version. Raises `RemoteError`."""
        with self.reaching(options):
            info = target.remote.stat(target.url, known=known)
        self.count(Transfer(requests=1))
        return info

    def validate(self, target: Target, options: FetchOptions, entry: Entry, sink: JobSink | None = None) -> ObjectInfo | None:
        """None if the remote still has the version of ``entry``, or cannot be reached; else a description of the version that it has.
        ``sink``: receives that version, by the same request: see `CheckingRemote`."""
        began = self.store.now(exact=True)
        try:
            if sink is not None and can_check(source := target.remote):
                info = self._fetch_changed(source, target, options, entry, sink)
            else:
                info = self.stat(target, options, entry.validator)
        except (errors.RemoteUnavailable, errors.RemoteTimeout) as error:
            if entry.varies or (sink is not None and sink.info is not None):
                raise
            self.warn_stale(target.key, "%s cannot be reached (%s): its copy from the cache is served", error)
            # Calls that wait for this answer, or come in the next seconds, need no timeout of their own. But a host that was not even
            # asked may answer the next request.
            if error.attempts and options.since > 1:
                self.store.set_validated([(entry, self.postponed(options))], self.store.now(exact=True))
            return None
        except errors.NotFound:
            self.store.invalidate([entry])
            raise
        if info is not None and (info.validator is None or info.validator != entry.validator):
            return info
        if not entry.varies:
            self.store.set_validated([(entry, began)], began)
        return None

    def _fetch_changed(
        self, source: CheckingRemote, target: Target, options: FetchOptions, entry: Entry, sink: JobSink
    ) -> ObjectInfo | None:  # fmt: skip
        def ask() -> Transfer:
            return source.fetch_changed(target.url, sink, entry.validator) or Transfer(requests=1)

        self.receive(target.key, ask, options)
        return sink.info

    def postponed(self, options: FetchOptions) -> int:
        """Until when a remote that cannot be reached is not asked again."""
        return options.since + min(self.store.now() - options.since, POSTPONED)

    def upstream_copy(self, target: Target, options: FetchOptions) -> tuple[Remembered, int] | None:
        """The upstream root's copy and the time of its validation, if the remote still has this version: it is asked at most once."""

        def look(above: Store) -> tuple[Remembered, int] | None:
            hit = above.view(target.space, target.above)
            return None if hit is None else (hit, self.validated(above, hit.entry))

        found = self.upstream.ask(look) if self.upstream is not None and target.above else None
        if found is None or (options.etag and not is_same_version(found[0].entry.validator, options.etag)):
            return None
        hit, at = found
        began = self.store.now(exact=True)
        if not hit.entry.varies and (options.offline or at >= options.since):
            return hit, at
        if options.offline:
            return None
        try:
            return (hit, began) if self.stat(target, options, hit.entry.validator) is None else None
        except (errors.RemoteUnavailable, errors.RemoteTimeout) as error:
            if hit.entry.varies:
                return None  # the request that follows raises it
            self.warn_stale(target.key, "%s cannot be reached (%s): the upstream's copy is served", error)
            return hit, self.postponed(options)

    def receive(self, key: str, ask: Callable[[], A], options: FetchOptions | None = None) -> A:
        """What ``ask`` brings from a remote: bytes of ``key``, or a report on those that it wrote. Counts them, and tells the listeners."""
        began = time.monotonic_ns()
        try:
            with self.reaching(options):
                answer = ask()
        except errors.RemoteError as error:
            self.count(Transfer(received=getattr(error, "done", 0), requests=getattr(error, "attempts", 1)))
            events.emit("fetch", self.path, key, size=getattr(error, "done", 0), since=began, error=error)
            raise
        except errors.CacheFault:
            self.count(Transfer(requests=1))  # the first answer shows that there is no room
            raise
        finally:
            self.store.count("wait_ns_remote", time.monotonic_ns() - began)
        transfer = answer if isinstance(answer, Transfer) else Transfer(requests=1, received=len(answer))
        self.count(transfer)
        events.emit("fetch", self.path, key, size=transfer.received, since=began)
        log.debug("%s: fetched %d bytes, by %d requests", key, transfer.received, transfer.requests)
        return answer

    def count(self, transfer: Transfer) -> None:
        self.store.count("requests", transfer.requests)
        self.store.count("bytes_remote", transfer.received)
        self.store.count("retries", transfer.retries)

    # -- reads that bypass the cache -------------------------------------------------------------------------------

    def fall_back(self, error: Exception, name: str) -> None:
        """Count and log that a call is served from the source. Raises an ``error`` that is the source's."""
        if isinstance(error, errors.RemoteError):  # a wait for a connection
            raise error
        self.store.count("fallbacks")
        events.emit("fault", self.path, name, error=error)
        self.warn(type(error).__name__, "%s is served past the cache: %s", name, error)

    def reaching(self, options: FetchOptions | None = None) -> AbstractContextManager[None]:
        """Context for requests to a remote: skips hosts that were silent recently, unless this refreshes, and keeps the node's limits."""
        if options is None:
            return remote.tracking_hosts(self.store.hosts, limits=self.store.limits)
        age = math.inf if options.since <= 1 else (self.store.now(exact=True) - options.since) / 1e9
        return remote.tracking_hosts(self.store.hosts, limits=self.store.limits, ask_silent=options.refresh, wait=options.wait, max_age=age)

    def warn_stale(self, key: str, message: str, error: Exception) -> None:
        """Warn, once per host or bucket, that a copy is served because its remote cannot be reached."""
        self.warn(f"stale {'/'.join(key.split('/')[:3])}", message, key, error)

    def warn(self, kind: str, message: str, *values: object) -> None:
        """Log each kind of problem once per process; the counters show how often it happened."""
        if kind not in self.warned:
            self.warned.add(kind)
            log.warning(message, *map(str, values))  # an error would keep its frames, and their mappings, as long as the record lives

    def most(self) -> int:
        """Maximum size in memory, in bytes, of an object that arrives compressed: as many as the cache could store."""
        try:
            return self.store.seeing.usage().budget or in_memory()
        except errors.CacheFault:
            return in_memory()

    def refuse_offline(self, target: Target, options: FetchOptions) -> None:
        if options.offline and target.in_place is None:
            raise errors.Offline.of(target.key)

    # -- for the layers above --------------------------------------------------------------------------------------

    def kept(self, target: Target, options: FetchOptions) -> Lease | None:
        """A lease on the cached copy, if it is fresh, or `validate` finds it unchanged. Raises nothing."""
        lease: Lease | None = None
        try:
            lease = self.store.lease(URLS, target.key)
            if lease is None or self.is_fresh(lease.entry, options):
                return lease
            if self.store.validated(lease.entry):
                if self.validate(target, options, lease.entry) is None:
                    return lease
                self.store.invalidate([lease.entry])  # the next look need not ask the remote
        except errors.RemoteError as error:
            log.debug("%s: whether it has changed is not known: %s", target.key, str(error))
        except errors.CacheFault as error:
            self.fall_back(error, target.key)
        if lease is not None:
            lease.close()
        return None

    def invalidate(self, target: Target) -> None:
        """Make the next call ask the remote: for the object, and for the directory of this name."""
        self.store.invalidate_keys([(URLS, target.key), (URLS, index_key(target.key)), (LISTINGS, folder_of(target.key))])
