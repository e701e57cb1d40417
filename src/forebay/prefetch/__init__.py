"""Prefetchers load in the background what a loop will need next, and hand out lazies for it."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from forebay import _config, codecs, errors
from forebay._engine.index.memo import Hit
from forebay._engine.leases import Lease
from forebay._kernel import waits
from forebay._kernel.interrupts import guarded, guarded_methods, items_of_program, of_program
from forebay._logs import logger
from forebay._model import SESSIONS, URLS, Buffer, Item_co, check_free, exact_str
from forebay.fetch import Fetcher
from forebay.fetch.prefix import checked_key
from forebay.fetch.request import FOREVER, split_hash
from forebay.prefetch.items import ItemReader, Items, Objects, SourceItems
from forebay.prefetch.lazies import Lazy, Pool, Spilled, wrapped
from forebay.prefetch.lazies import PassThrough as PassThrough
from forebay.prefetch.loader import Loader, abandon
from forebay.prefetch.loads import Load
from forebay.reports import OnProgress, Progress, WarmReport
from forebay.sources import DecodedSource, Source, UrlSource, identity_of, source_of

log = logger("forebay.prefetch")
T = TypeVar("T")

STORES = ("raw", "decoded")
MANY = 10_000_000
"""Items of a space whose number is not limited."""
_NONE: Mapping[str, int] = MappingProxyType({})
_PICKLE = codecs.codec("pickle")


class _Way(NamedTuple):
    """How a prefetcher loads items, until its limits make it load them otherwise. ``space``, ``max_age``: of what the loader stores.
    ``hit``: finds what this process knows there. ``objects``: the source, if its items are what `Cache.read` stores. ``digest``, ``bound``:
    what names of items end in, with a version and without one. ``item_version``: the version of an item, if the source tells."""

    loader: Loader
    space: str
    max_age: int
    hit: Hit
    objects: UrlSource | None
    digest: str
    bound: str
    item_version: Callable[[str], str | None] | None


@guarded_methods("closed")
class Prefetcher(Pool[Item_co]):
    """Loads the items of one source into the cache, in its own threads. Made by `Cache.prefetcher`.

    Remote objects that are stored unchanged, by a prefetcher without a version or limits, are entries of the space ``urls``, as for
    `Cache.read`. All other items are entries of the prefetcher's own space. Remote objects with a version or limits are fetched into
    ``urls`` too, and get a second name in that space.

    Callable from any thread. Usable in both processes after a fork, even while loads are pending. Picklable if its source is. A context
    manager. Its threads end when the last reference to it is gone."""

    def __init__(self, fetcher: Fetcher, source: Source, options: dict[str, Any]) -> None:
        self._fetcher, self._options = fetcher, options
        self.source = source
        self.name: str = options["name"]
        assert fetcher.store.keeps
        self._store = fetcher.store
        bind = getattr(source, "bind", None)
        if bind is not None:
            bind(fetcher)
        self._reader = ItemReader(source, options, self._store)
        self._way = self._open_way()
        self.identity = f"{self.name}:{self._way.digest}"

    def _open_way(self) -> _Way:
        items: Items
        fetcher, name, objects = self._fetcher, self.name, self._objects_of_urls()
        if objects is not None:
            digest = bound = _digest([identity_of(self.source)])
            max_age, item_version = FOREVER if fetcher.offline else fetcher.max_age, None
            items = Objects(fetcher, objects.target, pool=name)
        else:
            digest, bound, item_version, session = self._join()
            self._reader.takes_parts = not self._is_limited
            source, keep, max_age = self._reader.objects, self._options["keep"], FOREVER
            if source is not None:
                versioned = source.version is not None
                items = Objects(fetcher, source.target, versioned=versioned, space=name, pool=name, keep=keep, session=session)
            else:
                items = SourceItems(fetcher, name, keep, self._reader, session)
        loader = Loader(items, self._store, self._options["workers"])
        # Weakly: an error that a caller keeps holds its frames, these hold a lazy, and a lazy holds this object.
        weakref.finalize(self, abandon, weakref.ref(loader)).atexit = False
        return _Way(loader, items.space, max_age, self._store.hot_lookup(items.space), objects, digest, bound, item_version)

    def _objects_of_urls(self) -> UrlSource | None:
        """The source, if its items can be what `Cache.read` stores: nothing of this prefetcher binds them to other rules."""
        source = self._reader.objects
        is_bound = source is None or source.version is not None or not self._options["keep"] or self._is_limited
        return None if is_bound else source

    @property
    def _is_limited(self) -> bool:
        space = self._store.spaces.limits_of(self.name)
        has_limit = space.quota is not None or (space.max_count is not None and space.max_count < MANY)
        return has_limit or self._options["policy"] == "freeze"

    def _join(self) -> tuple[str, str, Callable[[str], str | None] | None, Lease | None]:
        """What the names of all items end in, as `_Way` has it: it differs wherever the bytes could differ.

        The items of a source without a version belong to a session, which ends with the last process that uses it."""
        version = getattr(self.source, "version", None)
        version = version if (text := exact_str(version)) is None else text
        decoder = () if self._reader.is_raw else (*decoder_of(self.source), self._options["codec"].name)
        parts = [identity_of(self.source), repr(version), self._options["store"], *decoder]
        digest = _digest(parts)
        if version is not None:
            return digest, digest, None, None
        session = self._store.prefetching.join(SESSIONS, f"{self.name}/{digest}")  # items are counted in the pool's own space
        return digest, _digest([*parts, f"{session.entry.id:x}"]), getattr(self.source, "version_of", None), session

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(open_prefetcher, **self._options), (self._fetcher, self.source)

    def __repr__(self) -> str:
        return f"<forebay.Prefetcher {self.name!r} of {self.source.uri!r}{' closed' if self.closed else ''}>"

    # -- items -----------------------------------------------------------------------------------------------------

    def get_lazy(self, key: str) -> Lazy[Item_co]:
        """Start loading an item, and return at once. Raises `Closed` (a RuntimeError)."""
        key = checked_key(key)
        return Lazy(self, key, self._submit(key))

    def _submit(self, key: str, named: tuple[str, bool] | None = None, *, holds: bool = True) -> Load:
        """The load of an item. ``named``: what `_name_of` returns, if it was asked already. Raises `Closed`."""
        while True:
            way = self._way
            try:
                return way.loader.submit(key, *(named or self._name_of(key, way)), holds=holds)
            except errors.Closed:
                if way is self._way:
                    raise
                named = None  # T1 takes the way / T2 sets a limit, and closes that way for another one / T1 asks the closed one

    def _stream(self, keys: Iterable[str], ahead: int) -> Generator[Item_co, None, None]:
        """What the cache has is read when its turn comes, in the thread of the caller, and without a lease: no caller holds these items.
        Notes of items are not read: see `Noted`."""
        if not self._options["keep"]:  # such an item lives as long as its lease
            yield from super()._stream(keys, ahead)
            return
        window: deque[Lazy[Item_co] | tuple[str, str]] = deque()
        for key in keys:
            window.append(self._expected(key))
            if len(window) > ahead:
                yield self._item(window.popleft())
        while window:
            yield self._item(window.popleft())

    def _expected(self, key: str) -> Lazy[Item_co] | tuple[str, str]:
        """The key, and the name of the item in the cache, if the index of keys knows it; else a lazy, whose load tells."""
        way = self._way
        named = self._name_of(key := checked_key(key), way)
        if not way.loader.closed:
            if self._reader.is_kept(key):
                return key, named[0]
            with contextlib.suppress(errors.CacheFault):
                if self._store.prefetching.expect(way.space, named[0], way.max_age) is not None:
                    return key, named[0]
        return Lazy(self, key, self._submit(key, named if way is self._way else None))

    def _item(self, ahead: Lazy[Item_co] | tuple[str, str]) -> Item_co:
        """What a lazy gives, or what the cache has under a name; where it is gone by now, or damaged, it is loaded."""
        if isinstance(ahead, Lazy):
            return ahead.get()
        (key, name), way = ahead, self._way
        data: Buffer | None = None
        if not self._fetcher.closed:
            data = way.hit(name, way.max_age)
            with contextlib.suppress(errors.CacheFault):
                data = self._store.first_touch(way.space, name, way.max_age) if data is None else data
        if data is None:
            data = self._reader.kept(key)
        if data is None and not self.closed:
            return self.get_lazy(key).get()
        item: Item_co = self._reader.value(key, way.loader.read(key) if data is None else data)
        return item

    def put(self, obj: T, name: str = "") -> Lazy[T]:
        """Write a pickled object to disk; return a lazy for it. Its bytes are removed when the lazy is read or dropped. ``name``: for
        listings.

        If there is no room, the object stays in memory. Raises `Closed`, and any error from pickling it."""
        self._check_open()
        data = b"".join(_PICKLE.encode(obj))
        seal = _seal(data) if self._fetcher.others_can_write else b""
        try:
            return Spilled(self, name, self._spill(name, data), seal=seal)
        except errors.CacheFault as error:
            self._fetcher.fall_back(error, f"{self.name}: {name or 'an object'}")
            return Spilled(self, name, None, obj)

    def _spill(self, name: str, data: bytes) -> Lease:
        self._way.loader.start()
        shown = (exact_str(name) or "").encode("utf-8", "backslashreplace").decode()
        return self._store.put_held(self.name, f"~put/{shown}~{secrets.token_hex(8)}", data)

    def _unspill(self, lease: Lease, seal: bytes) -> Any:
        data = self._store.bytes_leased(lease)
        if data is not None and seal:
            data = memoryview(bytes(data))  # a private copy: others could change the file between the check and the use
        if data is None or (seal and _seal(data) != seal):
            raise errors.Damaged(f"the object {lease.entry.key!r} is damaged or missing: create it again", key=lease.entry.key)
        return _PICKLE.decode(data, lambda: memoryview(bytearray(data)))

    def _discard(self, lease: Lease) -> None:
        """Remove the bytes of a spilled object. Callable from a finalizer: nothing here waits."""
        lease.close()
        self._way.loader.news.wake(lease.entry)

    def warm(self, keys: Iterable[str], on_progress: OnProgress | None = None) -> WarmReport:
        """Load items into the cache without holding them. ``on_progress`` is called for each item that is in the cache.

        Items that are already there are not read: repeat an interrupted call to continue it. The report lists as failed the items whose
        source raised, and those that could not be stored, with `NoSpace` or the fault of the cache. Raises `Closed`."""
        done: list[str] = []
        failed: list[tuple[str, errors.ForebayError]] = []
        window: deque[tuple[str, Load]] = deque()

        def finish_all_but(count: int) -> None:
            while len(window) > count:
                key, load = window.popleft()
                error = load.loader.wait_until_stored(load)
                if error is not None:
                    failed.append((key, error))
                    continue
                with contextlib.suppress(errors.CacheFault):
                    self._store.prefetching.expect(self._way.space, load.name, FOREVER)  # it is not on probation
                done.append(key)
                if on_progress is not None:
                    on_progress(Progress(key, state="done"))

        for key in items_of_program(keys):
            self._check_open()
            key = checked_key(key)
            window.append((key, self._submit(key, holds=False)))
            finish_all_but(4 * int(self._options["workers"]))
        finish_all_but(0)
        return WarmReport(tuple(done), tuple(failed))

    # -- the space -------------------------------------------------------------------------------------------------

    @property
    def used(self) -> int:
        """Bytes of the items now in this prefetcher's space, over all processes; for objects in ``urls``, of all below its prefix. If the
        cache cannot be read: 0, with one warning."""
        return self._usage()[0]

    @property
    def count(self) -> int:
        """Number of items now in this prefetcher's space, over all processes; for objects in ``urls``, of all below its prefix. If the
        cache cannot be read: 0, with one warning."""
        return self._usage()[1]

    def _usage(self) -> tuple[int, int]:
        try:
            used, count = self._store.spaces.used(self.name)
            source = self._way.objects
            if source is None:
                return used, count
            below, objects = self._store.spaces.used_below(URLS, split_hash(source.identity)[0].rstrip("/") + "/")
        except errors.CacheFault as error:
            self._fetcher.warn("usage", "the items of the prefetcher %s cannot be counted: %s", self.name, error)
            return 0, 0
        return used + below, count + objects

    def set_limits(self, *, budget: int | None = None, max_count: int | None = None) -> None:
        """Set how many bytes and items the space may have, for all processes at once. Items over a lowered limit are evicted unless they
        are held. None leaves a limit unchanged. Raises `ConfigError`."""
        for name, value in (("budget", budget), ("max_count", max_count)):
            if value is not None:
                _config.parse_count(value, name=name, least=0)
        self._store.spaces.ensure(self.name, quota=budget, max_count=max_count)
        self._options |= {name: value for name, value in (("budget", budget), ("max_count", max_count)) if value is not None}
        previous = self._way
        if previous.objects is None:
            previous.loader.news.wake()  # what waits for room may have it
        elif not self.closed and self._objects_of_urls() is None:
            self._way = self._open_way()
            previous.loader.close()  # only now: other threads go on, and if this wait is interrupted, so do they

    @property
    def closed(self) -> bool:
        """Whether this prefetcher or its cache was closed."""
        return self._way.loader.closed

    def close(self) -> None:
        """Cancel queued loads, and wait for running ones. Returned lazies stay usable; `get_lazy` now raises `Closed`. Idempotent."""
        way = None
        while way is not self._way:  # again: another thread may have set a limit meanwhile
            way = self._way
            way.loader.close()

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of("prefetcher")

    # -- how an item is made ---------------------------------------------------------------------------------------

    def _name_of(self, key: str, way: _Way) -> tuple[str, bool]:
        """The name of an item in the cache, and whether it is bound to the session. The part before the ``~`` is for people; the part after
        it differs wherever the bytes could differ. Of an object of ``urls``: its key there."""
        if way.objects is not None:
            try:
                return way.objects.target(key).key, False
            except errors.ConfigError:
                return key, False  # to load it raises the error
        version = None
        if way.item_version is not None:
            try:
                version = way.item_version(key)
                version = version if (text := exact_str(version)) is None else text
            except Exception as error:  # noqa: BLE001  # the source's own: its read will raise
                log.debug("the version of %s is not known: %s", key, str(error))
        bound = version is None and way.bound is not way.digest
        suffix = way.bound if version is None else f"{way.digest}.{version}"
        if not key.isascii() and (plain := key.encode("utf-8", "backslashreplace").decode()) != key:
            key, suffix = plain, f"{suffix}.escaped"  # surrogates, as in file names that are not UTF-8
        return f"{self.source.uri.rstrip('/')}/{key}~{suffix}", bound

    def _read(self, key: str) -> Any:
        self._check_open()
        return of_program(self.source.__getitem__)(key)

    def _value_of(self, key: str, load: Load) -> Any:
        return self._reader.value(key, load.loader.take(load))


# -- making ------------------------------------------------------------------------------------------------------------


@guarded
def open_prefetcher(fetcher: Fetcher, source: Any, *, decode: Any = None, **options: Any) -> Prefetcher[Any] | PassThrough[Any]:
    """See `Cache.prefetcher`. ``budget``: see `Spaces.ensure`."""
    check_free(options["name"])
    options["store"] = exact_str(options["store"]) or repr(options["store"])
    if options["store"] not in STORES:
        raise errors.ConfigError(
            f"store must be {' or '.join(map(repr, STORES))}, not {options['store']!r}", name="store", value=options["store"]
        )
    _config.parse_count(options["workers"], name="workers")
    _config.parse_count(options["max_count"], name="max_count", least=0)
    source = wrapped(source_of(source), decode)
    chosen = options["codec"]
    options["codec"] = codecs.codec(chosen) if chosen is not None else codecs.default_codec(others_can_write=fetcher.others_can_write)
    store, reopen = fetcher.current(), partial(_open, fetcher, source, options)
    may_come = not store.root.read_only if store.keeps else fetcher.reopening is not None
    with waits.time_limit(fetcher.timeout):
        pool = (reopen() if may_come else None) or PassThrough(source, reopen=reopen if may_come else None)
    fetcher.register(pool)
    return pool


def _open(fetcher: Fetcher, source: Any, options: dict[str, Any], limits: Mapping[str, int] = _NONE) -> Prefetcher[Any] | None:
    """The prefetcher, if the cache can be used by now."""
    options, store = {**options, **limits}, fetcher.current()
    if not store.keeps:
        return None
    try:
        store.spaces.ensure(options["name"], policy=options["policy"], quota=options["budget"], max_count=options["max_count"])
        return Prefetcher(fetcher, source, options)
    except (errors.CacheFault, errors.WaitTimeout) as error:
        fetcher.fall_back(error, f"the prefetcher {options['name']!r}")
        return None


def decoder_of(source: Any) -> tuple[str, ...]:
    """The names and versions of the decoders of a source."""
    decoders: list[str] = []
    while isinstance(source, DecodedSource):
        decoders += [str(source.decoder), repr(source.decoder_version)]
        source = source.inner
    return tuple(decoders)


def _seal(data: Buffer) -> bytes:
    """Digest by which the process that spilled an object recognizes its bytes: it unpickles no others."""
    return hashlib.blake2b(data, digest_size=32).digest()


def _digest(parts: Iterable[str]) -> str:
    exact = (exact_str(part) or "" for part in parts)
    return hashlib.blake2b("".join(f"{len(part)}:{part}" for part in exact).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
