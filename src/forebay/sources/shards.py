"""Versions and indexes of tar shards: each is requested or built once per node."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from typing import Any, Literal, NamedTuple, cast

from forebay import errors
from forebay._engine.leases import Lease
from forebay._logs import logger
from forebay._model import INDEXES, URLS, ObjectInfo, Remote, Sink, Span, Transfer
from forebay.fetch import Fetcher
from forebay.fetch.flight import get_or_make
from forebay.fetch.prefix import RemoteAccess
from forebay.fetch.request import FetchOptions
from forebay.sources import tar_index
from forebay.sources.tar_index import Index

log = logger("forebay.sources.tar")

PROBE = 64 << 10
"""Bytes at the beginning of a shard that tell how large its members are."""
PROBED = 4 << 20
"""Shards up to this size, in bytes, are fetched whole without a probe, which would be more than a hundredth of their bytes."""
LARGE = 1 << 20
"""Bytes of a member from which on the index skips it."""
SHARE = 8  # of the budget, the largest part that one shard may have
MANY = 4096
"""Indexes from the cache that one process keeps open: each may be a mapping."""

PAST = (errors.CacheFault, errors.WaitTimeout, errors.Closed)
"""Faults of the cache, which do not reach the reader of an item."""


class _Known(NamedTuple):
    """A version, and when it was asked for, in nanoseconds of the monotonic clock."""

    info: ObjectInfo
    at: int


class Indexed(NamedTuple):
    """An index, and the version of its shard."""

    members: Index
    info: ObjectInfo


class ShardIndexes:
    """Versions and indexes by URL. Callable from any thread and after a fork; pickled without the indexes."""

    def __init__(self, reach: RemoteAccess) -> None:
        self._reach = reach
        self._infos: dict[str, _Known] = {}
        self._start()

    def _start(self) -> None:
        self._indexes: dict[str, Indexed] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._pid = os.getpid()

    def __getstate__(self) -> tuple[Any, ...]:
        return self._reach, dict(self._infos)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._reach, self._infos = state
        self._start()

    # -- versions --------------------------------------------------------------------------------------------------

    def learn(self, url: str, info: ObjectInfo) -> None:
        """Note a version from a listing."""
        if info.validator is not None:
            self._infos[url] = _Known(info, time.monotonic_ns())

    def info(self, url: str) -> ObjectInfo:
        """The remote's current description of a shard, or a recent one of any process of the node. Raises `RemoteError`, `Offline`."""
        info = self._known(url)
        if info is not None:
            return info
        with self._lock(url):
            info = self._known(url)  # as in `_index_once`
            if info is None:
                began, info = time.monotonic_ns(), self._shared_info(url)
                self._infos[url] = _Known(info, began)
            return info

    def _known(self, url: str) -> ObjectInfo | None:
        """What was asked for in the period of the cache; without a cache, ever."""
        known, fetcher = self._infos.get(url), self._reach.fetcher
        if known is None:
            return None
        is_recent = fetcher is None or fetcher.offline or time.monotonic_ns() - known.at < fetcher.max_age
        return known.info if is_recent else None

    def _shared_info(self, url: str) -> ObjectInfo:
        fetcher = self._reach.fetcher
        if fetcher is None or fetcher.closed or self._reach.is_local(url):
            return self._reach.stat(url)
        target, described_by = self._reach.target(url), _Descriptions(self._reach)
        data = fetcher.read(target._replace(space=INDEXES, resolve=lambda: cast(Remote, described_by)), FetchOptions.of(fetcher))
        info = None
        try:
            size, validator, modified = json.loads(bytes(data))
            info = ObjectInfo(url, size, None if validator is None else str(validator), modified=modified)
        except (ValueError, TypeError) as error:
            log.warning("the stored version of %s is not used: %s", target.key, str(error))
        if info is None or info.validator is None:  # nothing by which another process could tell whether it is still right
            self._expire(url, drops=True)
        return info or self._reach.stat(url)

    def forget(self, url: str, stale: ObjectInfo) -> None:
        """This version is gone: make the next request ask the remote. A newer version that is already known stays."""
        with self._lock(url):
            index = self._indexes.get(url)
            if index is not None and index.info is stale:
                self._indexes.pop(url)
            known = self._infos.get(url)
            if known is None or known.info is not stale:
                return
            self._infos.pop(url)
        self._expire(url)

    def _expire(self, url: str, *, drops: bool = False) -> None:
        """Expire the version of a shard for all processes. ``drops``: without keeping it for the time when the remote cannot be reached."""
        fetcher = self._reach.fetcher
        if fetcher is None:
            return
        try:
            store, entry = fetcher.store, fetcher.store.entry(INDEXES, self._reach.key(url))
            if entry is not None and store.keeps:
                (store.drop if drops else store.invalidate)([entry])
        except PAST as error:
            fetcher.fall_back(error, self._reach.key(url))

    # -- indexes ---------------------------------------------------------------------------------------------------

    def _lock(self, url: str) -> threading.Lock:
        if self._pid != os.getpid():  # after a fork: locks that other threads of the parent held have no holder here
            self._locks, self._pid = {}, os.getpid()
        return self._locks.setdefault(url, threading.Lock())

    def index(self, url: str) -> Indexed:
        """The shard's index. Raises `BadArchive` or another `RemoteError`, `Offline`."""
        for last in (False, True):
            info = self.info(url)
            indexed = self._indexes.get(url)
            if indexed is not None and indexed.info.validator == info.validator:
                return indexed
            try:
                return self._index_once(url, info)
            except errors.RemoteError as error:
                self.forget(url, info)  # another call may succeed
                if last or not isinstance(error, errors.RemoteChanged):
                    raise
        raise AssertionError("unreachable: the last turn returns or raises")

    def known_index(self, url: str) -> Indexed | None:
        """The index of the present version of a shard, if this process has it."""
        info, indexed = self._known(url), self._indexes.get(url)
        return indexed if indexed is not None and info is not None and indexed.info.validator == info.validator else None

    def _index_once(self, url: str, info: ObjectInfo) -> Indexed:
        with self._lock(url):
            # T1 and T2 need the index of a new shard; T1 builds it: T2, which waited here, takes it
            indexed = self._indexes.get(url)
            if indexed is None or indexed.info.validator != info.validator:
                indexed = Indexed(self._obtain(url, info), info)
                if self._reach.fetcher is not None and len(self._indexes) >= MANY:
                    self._indexes.clear()
                self._indexes[url] = indexed
            return indexed

    def _obtain(self, url: str, info: ObjectInfo) -> Index:
        """The index from the cache; built, and stored there, if it is missing."""
        fetcher = self._reach.fetcher
        if fetcher is None or info.validator is None:
            return Index(self._build(url, info))
        target = self._reach.target(url)
        key, above = (f"{name}#version={info.validator}" for name in (target.key, target.above))

        def keep(index: Index) -> Index:
            try:
                fetcher.store.put(INDEXES, key, index.data)
            except PAST as error:
                fetcher.fall_back(error, key)
            return index

        return get_or_make(
            fetcher,
            INDEXES,
            key,
            lambda: _kept(fetcher, key, above),
            lambda: Index(self._build(url, info)),
            keep,
            label=key,
            asker=fetcher.asker(self._reach.options),
        )

    def _build(self, url: str, info: ObjectInfo) -> bytes:
        def read(span: Span) -> bytes:
            return self._reach.part(url, span, info)

        # A request costs as much as a megabyte or more; a read of a local file as much as some blocks of it.
        window, most, jump = (65_536, 65_536, 16_384) if self._reach.is_local(url) else (1 << 20, 8 << 20, 1 << 20)
        with contextlib.ExitStack() as held:
            kept = self._kept_whole(url, info)
            if isinstance(kept, Lease):
                held.enter_context(kept)  # `part` serves from it
            elif kept is not None:
                window = PROBE
            return tar_index.build(read, info.size, self._reach.key(url), window=window, most=most, jump=jump)

    def _kept_whole(self, url: str, info: ObjectInfo) -> Lease | Literal["large"] | None:
        """A lease on the whole shard, which is fetched into the cache, as `Cache.read` would, if reading its headers would read nearly all
        of it; or that its members are large. None: the cache does not have it in this version. Raises `RemoteError`."""
        fetcher = self._reach.fetcher
        if fetcher is None or self._reach.is_local(url) or not info.size or info.validator is None:
            return None
        try:
            store = fetcher.store
            if info.size > PROBED and store.view(URLS, self._reach.key(url)) is None:
                start = self._reach.part(url, Span(0, PROBE), info)
                if tar_index.typical_size(start, info.size) >= LARGE:
                    return "large"
            if not store.keeps or store.root.read_only or info.size > store.spaces.largest(URLS) // SHARE:
                return None
            lease = fetcher.lease(self._reach.target(url), FetchOptions.of(fetcher))
        except PAST as error:
            log.debug("%s is not fetched whole: %s", self._reach.key(url), str(error))
            return None
        if lease.entry.validator != info.validator:
            lease.close()  # reading its parts tells whether it has changed
            return None
        return lease


def _kept(fetcher: Fetcher, key: str, above: str) -> Index | None:
    """The index of this key in the cache, or of that ``above`` in the upstream root."""
    for store, name in ((fetcher.store, key), (fetcher.upstream, above)):
        hit = store.view(INDEXES, name) if store is not None else None
        if hit is None:
            continue
        try:
            index = Index(hit.view)
        except ValueError as error:
            log.warning("the index %s is rebuilt: %s", key, str(error))
            continue
        if store is fetcher.store:
            fetcher.store.touch(hit.entry)
        return index
    return None


class _Descriptions:
    """A remote of one object: the description of another object, which has the same versions. It has the calls of `Remote` that a `Job`
    uses."""

    def __init__(self, reach: RemoteAccess) -> None:
        self._reach = reach
        self._info: ObjectInfo | None = None

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`."""
        self._info = self._reach.remote(url).stat(url, known=known)
        return self._info

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`."""
        requests = int(self._info is None)
        info = self._info or self.stat(url)
        assert info is not None  # only a known version is answered with None
        text = json.dumps([info.size, info.validator, info.modified]).encode()
        sink.begin(ObjectInfo(url, len(text), info.validator, varies=info.varies))
        sink.write(0, text)
        return Transfer(requests=requests)
