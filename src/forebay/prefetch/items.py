"""What a loader loads: objects of a remote, or items that a source makes. Each load becomes a `Job`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, cast

from forebay import errors
from forebay._engine.catalog.entries import session_of
from forebay._engine.locks.lease import Lease
from forebay._engine.store import Store
from forebay._logs import logger
from forebay._model import Buffer, Noted, ObjectInfo, Policy, Remote, Sink, Transfer
from forebay.origin import Origin
from forebay.origin.job import Job
from forebay.origin.request import FetchOptions, Target
from forebay.origin.spaces import URLS
from forebay.prefetch.loads import Load, LoadRef

log = logger("forebay.prefetch")

FULL = 0.1
"""Seconds for which nothing is read for a space that evicts nothing for it."""


class Link(NamedTuple):
    """An object in `urls`, leased, that is to get a second name."""

    ref: LoadRef
    lease: Lease


class Items:
    """The items of one loader. Callable from any thread.

    ``space``: that of their names. ``keep``: whether they stay when nobody holds them. ``links``: whether they are objects of `urls` that
    get a second name in ``space``. ``full_until``: until then (seconds of the monotonic clock) nothing is read ahead, since the space
    evicts nothing for it. ``closed``: whether nothing more is to be read ahead. ``on_read`` is called with the bytes that a source
    returned for a load."""

    links = False

    def __init__(self, origin: Origin, space: str, pool: str | None, keep: bool, session: Lease | None) -> None:
        """``pool``: the space whose policy applies; None: an item without room waits."""
        self.origin, self.space, self.keep, self._pool, self._session = origin, space, keep, pool, session
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

    def _target(self, ref: LoadRef, fetch: Callable[[Sink], Transfer]) -> tuple[Target, FetchOptions]:
        remote = cast(Remote, FunctionRemote(fetch))
        target = Target(ref.key, ref.name, "", lambda: remote, space=self.space)
        return target, FetchOptions(-1, timeout=self.origin.timeout, life="cached" if self.keep else "held")

    def stored_job(self, ref: LoadRef, number: int, data: Buffer) -> Job:
        """The job that stores these bytes of an item in ``space``."""

        def give(sink: Sink) -> Transfer:
            _give(sink, data, self.validator(ref))
            return Transfer()

        return Job(self.origin, *self._target(ref, give), number, leased=True, in_memory=True, has_partial=False, is_here=True)

    def may_wait(self, space: str, size: int) -> bool:
        """Whether an item of ``size`` bytes, for which ``space`` has no room, waits until there is some."""
        store = self.origin.store
        with contextlib.suppress(errors.CacheFault):
            if store.keeps and size <= self._largest():
                return space != self.space or self._pool is None or store.spaces.limits(self._pool).policy == Policy.WAIT
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
            self.origin.fall_back(error, ref.name)

    def _largest(self) -> int:
        store = self.origin.store
        with contextlib.suppress(errors.CacheFault):
            return store.spaces.largest(self.space) if store.keeps else 0
        return 0

    def link(self, links: Sequence[Link]) -> list[Lease | errors.CacheFault]:
        """Give the files of objects second names in ``space``, in one transaction where there is room for all. Returns a lease on each, or
        why it has none."""
        store, life = self.origin.store, "cached" if self.keep else "held"
        assert store.keeps
        try:
            found = store.take_many(self.space, [link.ref.name for link in links])  # which other processes have linked
            new = [(link.ref.name, link.lease, self.validator(link.ref)) for link in links if link.ref.name not in found]
            made = store.publish_links(self.space, new, life=life) if new else []
        except Exception as error:  # noqa: BLE001  # whatever it is: without the thread that links nothing would be loaded any more
            fault = error if isinstance(error, errors.CacheFault) else errors.CacheFault(f"{links[0].ref.name}: {error}")
            return [fault.with_traceback(None)] if len(links) == 1 else [one for link in links for one in self.link([link])]
        found |= {name: lease for (name, _, _), lease in zip(new, made, strict=True)}
        if 2 * store.spaces.largest(self.space) > store.seeing.usage().budget:  # else all that it links would be charged twice
            store.prefetching.never_used([link.lease.entry for link in links])
        return [found[link.ref.name] for link in links]

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
        self, origin: Origin, target: Callable[[str], Target], *, versioned: bool = False, space: str = URLS, pool: str | None = None,
        keep: bool = True, session: Lease | None = None,
    ) -> None:  # fmt: skip
        """``target``: the object of a key; it may raise `ConfigError`. ``versioned``: the caller named the version of all objects now, so
        what is validated after this is of that version, however long ago that will be. ``space``: where they get second names."""
        super().__init__(origin, space, pool, keep, session)
        self.target, self.links = target, space != URLS
        self.for_others = False
        """Whether what is fetched is read by other processes."""
        self._stores = origin.store.keeps and not origin.store.root.read_only
        self._since = origin.store.now(exact=True) if versioned else None

    def options(self) -> FetchOptions:
        """The options of a fetch that begins now."""
        options = FetchOptions.of(self.origin)
        return options if self._since is None or options.offline else options._replace(since=self._since)

    def job(self, load: Load, number: int = 0) -> Job:
        stores = self._stores and load.stores
        options = self.options()._replace(bypass=not self._stores, ahead=self.for_others)
        return Job(
            self.origin, self.target(load.key), options, number, leased=stores, in_memory=True, stores=load.stores, since=load.busy_since
        )  # fmt: skip

    def read(self, key: str) -> Buffer:
        """The bytes of an object, as `Cache.read` gets them; from the remote once the cache is closed. Raises as that."""
        return self.direct(key) if self.origin.closed else self.origin.read(self.target(key), self.options())

    def direct(self, key: str) -> Buffer:
        return self.origin.direct(self.target(key), self.options())


class NotStored(errors.CacheFault):
    """An item need not be stored: the cache has it as a part of something else, or nobody needs it any more. ``lease``: on a file that
    has its bytes, and is to get a second name."""

    lease: Lease | None = None


class SourceItems(Items):
    """Items that a source makes, or that are made of its items: each is an entry of ``space``."""

    def __init__(
        self, origin: Origin, space: str, keep: bool, make: Callable[[str], Buffer], is_kept: Callable[[str], bool],
        size_of: Callable[[str], int | None] | None, lease_of: Callable[[str], Lease | None], session: Lease | None, *, counts: bool,
    ) -> None:  # fmt: skip
        """``make``: reads an item, as it is stored. ``lease_of``: a lease on a file of this cache that has its bytes, if the source knows
        one. ``size_of``: where the source knows sizes. ``counts``: whether its reads are to be
        counted as requests."""
        super().__init__(origin, space, space, keep, session)
        assert origin.store.keeps
        self._store: Store = origin.store
        self._make, self._is_kept, self._size_of, self._lease_of, self._counts = make, is_kept, size_of, lease_of, counts

    def job(self, load: Load, number: int = 0) -> Job:
        target, options = self._target(load.ref, partial(self._bring, load.ref))
        return Job(self.origin, target, options, number, leased=True, in_memory=True, since=load.busy_since, has_partial=False)

    def read(self, key: str) -> Buffer:
        self._store.count("misses")
        return self.direct(key)

    def direct(self, key: str) -> Buffer:
        data = self._make(key)
        self.origin.count(self._transfer(data))
        return data

    def is_kept(self, key: str) -> bool:
        return self._is_kept(key)

    def _transfer(self, data: Buffer) -> Transfer:
        return Transfer(requests=1, received=len(data)) if self._counts else Transfer()

    def _bring(self, ref: LoadRef, sink: Sink) -> Transfer:
        """Read an item into a sink, unless it will not be stored."""
        if self.closed or ref() is None or self.is_kept(ref.key):
            raise NotStored(f"{ref.key} need not be read", key=ref.key)
        limit, size = self._store.spaces.largest(self.space), self._size(ref.key)
        if not limit or (size is not None and size > limit):
            raise too_large(ref.key, size or 0, limit)
        if (lease := self._lease_of(ref.key)) is not None:
            error = NotStored(f"the cache has the bytes of {ref.key}", key=ref.key)
            error.lease = lease
            raise error
        load = ref()
        if time.monotonic() < self.full_until and not (load and load.waiters):  # else its read is not in vain
            raise errors.NoSpace(f"the space {self.space!r} is full", key=ref.key, need=size or 0, free=0, budget=limit)
        del load
        data = self._make(ref.key)
        load = ref()
        if load is not None:
            self.on_read(load, data)
        del load
        if self.is_kept(ref.key):  # by this very read
            raise NotStored(f"the cache has {ref.key}", key=ref.key)
        _give(sink, data, self.validator(ref))
        return self._transfer(data)

    def _size(self, key: str) -> int | None:
        try:
            return self._size_of(key) if self._size_of is not None else None
        except Exception as error:  # noqa: BLE001  # the source's own: its read will raise
            log.debug("the size of %s is not known: %s", key, str(error))
            return None


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


def _give(sink: Sink, data: Buffer, validator: str | None) -> None:
    note = data.note if isinstance(data, Noted) else ""
    sink.begin(ObjectInfo("", len(data), validator, note=note))
    if len(data):
        sink.write(0, data)
