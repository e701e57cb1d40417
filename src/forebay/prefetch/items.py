"""The items that a loader can load: objects of a remote, or items that a source makes. Each load becomes a `Job`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from forebay import errors
from forebay._engine.catalog.entries import session_of
from forebay._engine.leases import Lease
from forebay._engine.store import Store
from forebay._kernel.interrupts import of_program
from forebay._logs import logger
from forebay._model import URLS, Buffer, Noted, ObjectInfo, Policy, Remote, Sink, Transfer, as_bytes, to_bytes
from forebay.fetch import Fetcher
from forebay.fetch.job import Job
from forebay.fetch.request import FetchOptions, Target
from forebay.prefetch.loads import Load, LoadRef
from forebay.remote import RemoteOptions
from forebay.sources import DecodedSource, Source, UrlSource, options_of

log = logger("forebay.prefetch")
T = TypeVar("T")

FULL = 0.1
"""Seconds without reads ahead after a space has refused an item."""


class Items:
    """The items of one loader. Callable from any thread.

    ``space``: the space of their names. ``keep``: whether they stay when no process holds them. ``links``: whether they are objects of
    `urls` that get a second name in ``space``. ``full_until``: when reading ahead may go on, in seconds of the monotonic clock, after the
    space has refused an item. ``closed``: whether reading ahead has ended. ``on_read`` is called with the bytes that a source returned for
    a load."""

    links = False

    def __init__(self, fetcher: Fetcher, space: str, pool: str | None, keep: bool, session: Lease | None) -> None:
        """``pool``: the space whose policy applies; None: an item without room waits."""
        self.fetcher, self.space, self.keep, self._pool, self._session = fetcher, space, keep, pool, session
        self.on_read: Callable[[Load, Buffer], None] = lambda load, data: None
        self.full_until, self.closed, self._reported_too_large = 0.0, False, False

    def job(self, load: Load, number: int = 0) -> Job:
        """The job that gets an item. Raises `ConfigError`."""
        raise NotImplementedError

    def read(self, key: str) -> Buffer:
        """The bytes of an item, for a caller, where they are not stored for it. Raises what the source raises."""
        raise NotImplementedError

    def direct(self, key: str) -> Buffer:
        """The bytes of an item, without the cache. Raises what the source raises."""
        raise NotImplementedError

    def is_kept(self, key: str) -> bool:
        """Whether the cache has the item as a part of something else: then it is not stored once more."""
        return False

    def _job(
        self, ref: LoadRef, number: int, bring: Callable[[Sink], Transfer], asked_with: RemoteOptions | None = None, **options: Any
    ) -> Job:  # fmt: skip
        """The job that stores in ``space`` what ``bring`` gives to its sink. ``asked_with``: see `Target`."""
        remote = cast(Remote, FunctionRemote(bring))
        target = Target(ref.key, ref.name, "", lambda: remote, space=self.space, options=asked_with)
        fetch = FetchOptions(-1, timeout=self.fetcher.timeout, life="cached" if self.keep else "held")
        return Job(self.fetcher, target, fetch, number, leased=True, in_memory=True, has_partial=False, is_function=True, **options)

    def stored_job(self, ref: LoadRef, number: int, data: Buffer) -> Job:
        """The job that stores these bytes of an item in ``space``."""

        def bring(sink: Sink) -> Transfer:
            self._give(sink, ref, data)
            return Transfer()

        return self._job(ref, number, bring, is_here=True)

    def _give(self, sink: Sink, ref: LoadRef, data: Buffer) -> None:
        sink.begin(ObjectInfo("", len(data), self.validator(ref), note=data.note if isinstance(data, Noted) else ""))
        if len(data):
            sink.write(0, data)

    def may_wait(self, space: str, size: int, error: errors.NoSpace) -> bool:
        """Whether an item of ``size`` bytes, for which ``space`` has no room, waits until there is some."""
        store = self.fetcher.store
        with contextlib.suppress(errors.CacheFault):
            if store.keeps and size <= self._largest() and (space != self.space or not error.hopeless):
                return space != self.space or self._pool is None or store.spaces.limits_of(self._pool).policy == Policy.WAIT
        return False

    def report(self, ref: LoadRef, space: str, size: int, error: BaseException) -> None:
        """An item of ``size`` bytes (0: it was not read) is not stored in ``space``. It is counted, but for one that is too large, which is
        said once."""
        if isinstance(error, errors.NoSpace) and space != URLS:
            limit = self._largest()
            if error.hopeless or size > limit:
                if not self._reported_too_large:
                    self._reported_too_large = True
                    message = str(too_large(ref.key, size, limit) if size else error)
                    log.warning("%s: it bypasses the cache, like everything else that is too large", message)
                return
            if (now := time.monotonic()) >= self.full_until:  # else each refusal would lead to the next
                self.full_until = now + FULL
        if isinstance(error, Exception):
            self.fetcher.fall_back(error, ref.name)

    def _largest(self) -> int:
        store = self.fetcher.store
        with contextlib.suppress(errors.CacheFault):
            return store.spaces.largest(self.space) if store.keeps else 0
        return 0

    def linked(self, names: Sequence[str]) -> dict[str, Lease]:
        """Leases on the items that have their second names already, each counted as a hit."""
        there: dict[str, Lease] = {}
        if self.links and names:
            with contextlib.suppress(errors.CacheFault):  # the jobs of these items meet it, and tell
                there = self._take(names)
        for lease in there.values():
            self.fetcher.store.count_hit(lease.entry.size)
        return there

    def _take(self, names: Sequence[str]) -> dict[str, Lease]:
        """Leases on what has these names, but not on what the remote may have made for another caller."""
        there = self.fetcher.store.take_many(self.space, names)
        for lease in there.values():
            if lease.entry.varies:
                lease.close()
        return {name: lease for name, lease in there.items() if not lease.entry.varies}

    def link(self, links: Sequence[tuple[LoadRef, Lease]]) -> list[Lease | errors.CacheFault]:
        """Give the files of objects second names in ``space``, in one transaction where there is room for all. Returns a lease on each, or
        why it has none."""
        if len({ref.name for ref, _ in links}) < len(links):  # an item was asked for again: each of its loads gets a lease of its own
            return [one for link in links for one in self.link([link])]
        store, life = self.fetcher.store, "cached" if self.keep else "held"
        assert store.keeps
        try:
            found = self._take([ref.name for ref, _ in links])  # those that other processes have linked
            new = [(ref.name, lease, self.validator(ref)) for ref, lease in links if ref.name not in found]
            made = store.publish_links(self.space, new, life=life) if new else []
        except Exception as error:  # noqa: BLE001  # whatever it is: without the thread that links nothing would be loaded any more
            fault = error if isinstance(error, errors.CacheFault) else errors.CacheFault(f"{links[0][0].name}: {error}")
            return [fault.with_traceback(None)] if len(links) == 1 else [one for link in links for one in self.link([link])]
        found |= {name: lease for (name, _, _), lease in zip(new, made, strict=True)}
        if 2 * store.spaces.largest(self.space) > store.spaces.budget():  # else all that it links would be charged twice
            store.prefetching.never_used([lease.entry for _, lease in links])
        return [found[ref.name] for ref, _ in links]

    def validator(self, ref: LoadRef) -> str | None:
        """What binds an entry to its session."""
        return session_of(self._session.entry.id) if self._session is not None and ref.bound else None

    def close(self) -> None:
        """End the session of the items."""
        if self._session is not None:
            self._session.close()


class Objects(Items):
    """The objects of a source, as the bound cache fetches them into `urls`."""

    def __init__(
        self, fetcher: Fetcher, target: Callable[[str], Target], *, versioned: bool = False, space: str = URLS, pool: str | None = None,
        keep: bool = True, session: Lease | None = None,
    ) -> None:  # fmt: skip
        """``target``: returns the object of a key; it may raise `ConfigError`. ``versioned``: the caller has named the version of all
        objects, so whatever is validated from now on has that version for ever. ``space``: where they get second names."""
        super().__init__(fetcher, space, pool, keep, session)
        self.target, self.links = target, space != URLS
        self.for_others = False
        """Whether what is fetched is read by other processes."""
        self._stores = fetcher.store.keeps and not fetcher.store.root.read_only
        self._since = fetcher.store.now(exact=True) if versioned else None

    def options(self) -> FetchOptions:
        """The options of a fetch that begins now."""
        options = FetchOptions.of(self.fetcher)
        return options if self._since is None or options.offline else options._replace(since=self._since)

    def job(self, load: Load, number: int = 0) -> Job:
        stores = self._stores and load.stores
        options = self.options()._replace(bypass=not self._stores, ahead=self.for_others)
        return Job(
            self.fetcher, self.target(load.key), options, number, leased=stores, in_memory=True, stores=load.stores, since=load.busy_since
        )  # fmt: skip

    def read(self, key: str) -> Buffer:
        """The bytes of an object, as `Cache.read` gets them; from the remote once the cache is closed. Raises as that."""
        return self.direct(key) if self.fetcher.closed else self.fetcher.read(self.target(key), self.options())

    def direct(self, key: str) -> Buffer:
        return self.fetcher.direct(self.target(key), self.options())


class NotStored(errors.CacheFault):
    """An item need not be stored: the cache has it as a part of another entry, or its load is gone. ``lease``: a lease on a file that has
    its bytes, and is to get a second name."""

    lease: Lease | None = None


class ItemReader:
    """Reads the items of a source: their bytes as they are stored, and the values that callers get of these.

    The threads of a loader refer to this object, never to the prefetcher, so they end when the prefetcher is dropped. ``objects``: the
    source, if its items are whole objects of a remote. ``options``: with which it asks remotes, if not with those of the cache.
    ``counts``: whether a read counts as a request; else the source counts them.
    ``takes_parts``: whether an item may be a part of another entry, which no limit of the prefetcher binds."""

    takes_parts = False

    def __init__(self, source: Source, options: dict[str, Any], store: Store) -> None:
        self._source, self._store, self._codec = source, store, options["codec"]
        self.is_raw, self.options = options["store"] == "raw", options_of(source)
        self._inner: Any = source
        self._decoders: list[Any] = []
        while self.is_raw and isinstance(self._inner, DecodedSource):
            self._decoders.insert(0, self._inner.decode)
            self._inner = self._inner.inner
        is_local = getattr(self._inner, "is_local", None)
        may_lease = self.is_raw and not is_local
        self.objects: UrlSource | None = self._inner if may_lease and type(self._inner) is UrlSource else None
        self.counts = self.is_raw and getattr(source, "bind", None) is None
        self._lease: Callable[[str], Lease | None] | None = getattr(self._inner, "lease", None) if may_lease else None
        self._fetch = getattr(self._inner, "fetch", self._inner.__getitem__) if self._lease is not None else self._inner.__getitem__
        self._part: Callable[..., Buffer | None] | None = getattr(self._inner, "kept", None) if self.is_raw and options["keep"] else None
        self._size: Callable[[str], int | None] | None = getattr(source, "size", None) if self.is_raw and is_local is not False else None

    def kept(self, key: str) -> Buffer | None:
        """The bytes of an item that the cache has as a part of another entry."""
        data = self._part(key) if self._part is not None and self.takes_parts else None
        if data is not None:
            self._store.count_hit(len(data))
        return data

    def is_kept(self, key: str) -> bool:
        """Whether `kept` has it."""
        return self._part is not None and self.takes_parts and self._part(key, only_whether=True) is not None

    def lease(self, key: str) -> Lease | None:
        """A lease on a file of this cache that has the bytes of an item, if the source knows one."""
        lease = self._ask(self._lease, key)
        return lease if isinstance(lease, Lease) and self._store.is_own_file(lease) else None

    def size(self, key: str) -> int | None:
        """The bytes of a stored item, if the source knows."""
        return self._ask(self._size, key)

    def _ask(self, method: Callable[[str], T | None] | None, key: str) -> T | None:
        try:
            return of_program(method)(key) if method is not None else None
        except Exception as error:  # noqa: BLE001  # the source's own: its read will raise
            log.debug("the source does not say where %s is, or how large: %s", key, str(error))
            return None

    def read(self, key: str) -> Buffer:
        """Read an item. Returns its bytes as they are stored."""
        item = of_program(self._fetch)(key)
        if not self.is_raw:
            return b"".join(self._codec.encode(item))
        if type(item) is bytes or isinstance(item, Noted):
            return item
        try:
            return bytes(as_bytes(item))
        except (TypeError, ValueError) as error:
            kind = type(item).__name__
            message = f"the source {self._source.uri!r} returned a {kind} for {key!r} instead of bytes: pass decode= for other objects"
            raise errors.ConfigError(message, name="source", value=kind) from error

    def value(self, key: str, data: Buffer) -> Any:
        """The value that `Lazy.get` returns, of the stored bytes."""
        if not self.is_raw:
            view = memoryview(data).toreadonly()
            return self._codec.decode(view, lambda: memoryview(bytearray(view)))
        value: Any = to_bytes(data)
        for decode in self._decoders:
            value = of_program(decode)(key, value)
        return value


class SourceItems(Items):
    """Items that a source makes, or that are made of its items: each is an entry of ``space``."""

    def __init__(self, fetcher: Fetcher, space: str, keep: bool, reader: ItemReader, session: Lease | None) -> None:
        super().__init__(fetcher, space, space, keep, session)
        assert fetcher.store.keeps
        self._store: Store = fetcher.store
        self._reader = reader

    def job(self, load: Load, number: int = 0) -> Job:
        return self._job(load.ref, number, partial(self._bring, load.ref), self._reader.options, since=load.busy_since)

    def read(self, key: str) -> Buffer:
        self._store.count("misses")
        return self.direct(key)

    def direct(self, key: str) -> Buffer:
        data = self._reader.read(key)
        self.fetcher.count(self._transfer(data))
        return data

    def is_kept(self, key: str) -> bool:
        return self._reader.is_kept(key)

    def _transfer(self, data: Buffer) -> Transfer:
        return Transfer(requests=1, received=len(data)) if self._reader.counts else Transfer()

    def _bring(self, ref: LoadRef, sink: Sink) -> Transfer:
        """Read an item into a sink, unless it will not be stored."""
        if self.closed or ref() is None or self.is_kept(ref.key):
            raise NotStored(f"{ref.key} need not be read", key=ref.key)
        limit, size = self._store.spaces.largest(self.space), self._reader.size(ref.key)
        if not limit or (size is not None and size > limit):
            raise too_large(ref.key, size or 0, limit)
        if (lease := self._reader.lease(ref.key)) is not None:
            error = NotStored(f"the cache has the bytes of {ref.key}", key=ref.key)
            error.lease = lease
            raise error
        load = ref()
        if time.monotonic() < self.full_until and not (load and load.waiters):  # else its read is not in vain
            raise errors.NoSpace(f"the space {self.space!r} is full", key=ref.key, need=size or 0, free=0, budget=limit)
        del load
        data = self._reader.read(ref.key)
        load = ref()
        if load is not None:
            self.on_read(load, data)
        del load
        if self.is_kept(ref.key):  # by this very read
            raise NotStored(f"the cache has {ref.key}", key=ref.key)
        self._give(sink, ref, data)
        return self._transfer(data)


class FunctionRemote:
    """A remote of one item. Of the calls of a `Remote` it has `fetch` only: an item is never validated."""

    def __init__(self, bring: Callable[[Sink], Transfer]) -> None:
        self._bring = bring

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`."""
        return self._bring(sink)


def too_large(key: str, size: int, limit: int) -> errors.NoSpace:
    """The error for an item that can never be stored."""
    return errors.NoSpace(
        f"{key} has {size:,} bytes, and its space may have {limit:,} in all", key=key, need=size, free=0, budget=limit, hopeless=True
    )
