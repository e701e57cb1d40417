"""Values of one space: encoded, stored under string keys, and computed by one process of the node at a time."""

from __future__ import annotations

import base64
import contextlib
import pickle
import weakref
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from forebay import errors
from forebay._engine.index.memo import Remembered
from forebay._engine.null_store import NullStore
from forebay._engine.store import Store
from forebay._kernel import host, mappings, waits
from forebay._kernel.interrupts import unless_of_handler
from forebay._kernel.threads import in_thread
from forebay._logs import logger
from forebay._model import Buffer
from forebay.codecs import MAPPED_FROM, Codec
from forebay.fetch import Fetcher
from forebay.fetch.flight import get_or_make_async

if TYPE_CHECKING:
    import asyncio

    from forebay._engine.flight import WaitFor

log = logger("forebay.tasks")
T = TypeVar("T")

AT_ONCE = 8
"""Outputs of coroutines that one event loop stores at once, each in a thread."""
_storing: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


def _one_of_few() -> asyncio.Semaphore:
    import asyncio  # loaded by any caller that runs in an event loop

    loop = asyncio.get_running_loop()
    return _storing.get(loop) or _storing.setdefault(loop, asyncio.Semaphore(AT_ONCE))


COUNTED = ("hits", "misses", "runs", "replays", "waits", "store_failures", "damaged")
_MOST = 16 << 10
"""Largest pickle of an error, in bytes, that is passed on to other processes."""


class CacheInfo(NamedTuple):
    """What ``cache_info()`` of a cached function returns; the names are those of `functools.lru_cache`.

    ``hits``: calls of this function in this process that found a stored output. ``misses``: calls that found none. A forked child continues
    its parent's counts. ``maxsize``: None; the limit is in bytes: see `Tasks.budget`. ``currsize``: outputs of this function's current
    code, or version, stored now by any process."""

    hits: int
    misses: int
    maxsize: int | None
    currsize: int


class Values:
    """The values of one space, through one codec. Callable from any thread; usable in both processes after a fork.

    ``counted``: what this process did with this object, by the names in `COUNTED`. The metadata of an entry is the name of its codec and,
    if a function returned the value, the digest of its arguments."""

    def __init__(self, fetcher: Fetcher, space: str, codec: Codec) -> None:
        self.fetcher, self.space, self.codec = fetcher, space, codec
        self._bind(fetcher.current())
        self._reported: set[tuple[str, str]] = set()
        self.counted = dict.fromkeys(COUNTED, 0)
        host.at_fork(self)

    def _bind(self, store: Store | NullStore) -> None:
        self._bound, self._quick = store, store.finder(self.space)

    def after_fork_child(self) -> None:
        self.counted.update(dict.fromkeys(COUNTED, 0))  # what the parent did is the parent's

    # -- reading ---------------------------------------------------------------------------------------------------

    def hit(self, key: str, digest: str, *, copy: bool = False) -> tuple[Any] | None:
        """`look`, of a value that this process remembers, without a lock; None: `look` tells. Raises `Closed`."""
        store, hit = self._store(), self._quick(key)
        if hit is None or hit.entry.meta != f"{self.codec.name} {digest}":
            return None
        try:
            value = self._decode(hit.view, copy)
        except unless_of_handler(Exception):  # whatever a value's own code raises: `look` reports it
            return None
        store.touch(hit.entry)
        self.fetcher.store.count_hit(hit.size)
        self.counted["hits"] += 1
        return (value,)

    def look(self, key: str, digest: str | None = None, *, label: str = "", copy: bool = False) -> tuple[Any] | None:
        """The value of a key, in a tuple, since it may be None; None if there is none. Counts a hit, which is a use, or a miss.

        ``digest``: of the arguments that the value must belong to; a value of other arguments is a miss, and logged once. ``label``: its
        name in messages, if not its key. ``copy``: return a private, writable copy. Raises `Closed`."""
        hit = self._look(key, digest, label, copy)
        if hit is None:
            self.counted["misses"] += 1
            self.fetcher.store.count("misses")
        return hit

    def _look(self, key: str, digest: str | None, label: str, copy: bool) -> tuple[Any] | None:
        store, hit, wanted = self._store(), self._quick(key), self.codec.name if digest is None else f"{self.codec.name} {digest}"
        if hit is None:
            data = store.first_value(self.space, key, wanted)
            if data is not None:
                with contextlib.suppress(Exception):  # whatever a value's own code raises: it does so again below, where that is reported
                    value = self._decode(data, copy)
                    store.count_hit(len(data))
                    self.counted["hits"] += 1
                    return (value,)
            try:
                with waits.time_limit(self.fetcher.timeout):
                    hit = store.view(self.space, key)
                if hit is None and self.fetcher.upstream is not None:
                    store, hit = self.fetcher.upstream.ask(lambda above: (above, above.view(self.space, key))) or (store, None)
            except errors.CacheFault as error:
                self.fetcher.fall_back(error, f"{self.space}:{key}")
            if hit is None:
                return None
        if hit.entry.meta != wanted and not self._is_ours(key, hit.entry.meta, digest, label):
            return None
        found = self._decoded(store, key, hit, label, copy)
        if found is not None:
            store.touch(hit.entry)
            self.fetcher.store.count_hit(hit.size)
            self.counted["hits"] += 1
        return found

    def _is_ours(self, key: str, meta: str, digest: str | None, label: str) -> bool:
        """Whether an entry with this ``meta`` is the value that was requested."""
        codec, _, stored_digest = meta.rpartition(" ")
        if not codec or len(stored_digest) != 32:  # a value without a digest, and a codec whose name may contain a space
            codec, stored_digest = meta, ""
        if codec != self.codec.name:
            message = f"{self.space}:{key} was stored by the codec {codec!r}, not {self.codec.name!r}: it is not read"
            self._say(label or key, "codec", message)
        elif digest is not None and stored_digest != digest:
            self._say(key, "digest", f"{label or key}: {self.space}:{key}: the tag was stored with different arguments; recomputing")
        else:
            return True
        return False

    def _decoded(self, store: Store | NullStore, key: str, hit: Remembered, label: str, copy: bool) -> tuple[Any] | None:
        try:
            return (self._decode(hit.view, copy),)
        except (AttributeError, ImportError) as error:
            # Its class does not exist in this program; it may in another one.
            self._say(label or key, "class", f"{label or key}: {self.space}:{key} cannot be read here, and stays: {error}")
            return None
        except Exception as error:  # noqa: BLE001  # whatever a value's own code raises when it is recreated
            self._drop_unreadable(store, key, hit, error)
            return None

    def _decode(self, view: memoryview, copy: bool) -> Any:
        if not copy:
            return self.codec.decode(view, lambda: mappings.private(view, view.obj))
        own = memoryview(bytearray(view)) if view.nbytes < MAPPED_FROM else mappings.private(view, view.obj)
        return self.codec.decode(own, lambda: own)

    def _decode_unstored(self, data: Buffer, copy: bool) -> Any:
        """The value of bytes that are in no file, as `_decode` returns it."""
        own = memoryview(bytearray(data))
        return self.codec.decode(own if copy else own.toreadonly(), lambda: own)

    def _drop_unreadable(self, store: Store | NullStore, key: str, hit: Remembered, error: Exception) -> None:
        self.counted["damaged"] += 1
        try:
            if store.is_intact(hit):  # else it has been set aside, and logged
                store.count("damaged")
                log.warning("%s:%s cannot be read, and is removed: %s: %s", self.space, key, type(error).__name__, str(error))
                store.discard(hit.entry)
        except errors.CacheFault as fault:
            log.warning("%s:%s cannot be read, and stays: %s", self.space, key, str(fault))

    # -- writing ---------------------------------------------------------------------------------------------------

    def keep(self, key: str, value: Any, *, digest: str = "", pin: bool = False, label: str = "") -> bool:
        """Store a value under a key, replacing an earlier one. Returns False, with one warning, if it cannot; the earlier one then stays.

        ``pin``: never evict it. Raises `ConfigError` for a value that the codec does not support, `Closed`, and what the value's own code
        raises that is no Exception."""
        return self._keep(key, value, digest=digest, pin=pin, label=label) is not None

    def kept(self, key: str, value: Any, *, digest: str = "", pin: bool = False, label: str = "", copy: bool = False) -> tuple[Any] | None:
        """Store a value. Returns it as its next reader will get it, so that the caller that made it gets the same; None if it is not
        stored. See `keep` and `look`."""
        stored = self._keep(key, value, digest=digest, pin=pin, label=label)
        if stored is None:
            return None
        pieces, meta = stored
        hit: Remembered | None = None
        damage: Exception | None = None
        if sum(memoryview(piece).nbytes for piece in pieces) >= MAPPED_FROM:  # a smaller one is quicker to copy than to find
            hit = self._stored(key)
            if hit is not None and hit.entry.meta == meta:
                try:
                    return (self._decode(hit.view, copy),)
                except Exception as error:  # noqa: BLE001  # whatever the value's own code raises, or damage: `pieces` tell which
                    damage = error
        try:
            found = self._decode_unstored(b"".join(pieces), copy)
        except Exception as error:  # noqa: BLE001  # whatever the value's own code raises when it is recreated
            self.evict(key)
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            why = f"its {kind} cannot be recreated from what the codec {self.codec.name!r} stores: {type(error).__name__}: {error}"
            self._not_kept(key, label, why, error)
            return None
        if hit is not None and damage is not None:
            self._drop_unreadable(self._store(), key, hit, damage)
        return (found,)

    def _keep(self, key: str, value: Any, *, digest: str, pin: bool, label: str) -> tuple[Sequence[Buffer], str] | None:
        """Store a value. Returns its encoded form and the metadata of its entry, or None if it is not stored."""
        store, pieces, meta = self._store(), self._encoded(key, value, label), self._meta(digest)
        if pieces is None:
            return None
        try:
            with waits.time_limit(self.fetcher.timeout):
                store.put_pieces(self.space, key, pieces, life="pinned" if pin else "cached", meta=meta)
        except errors.CacheFault as error:
            if store.keeps:  # else that was configured, or a warning was logged when the root could not be opened
                self._not_kept(key, label, str(error), error)
            return None
        return pieces, meta

    def _encoded(self, key: str, value: Any, label: str) -> Sequence[Buffer] | None:
        try:
            return self.codec.encode(value)
        except errors.ConfigError as error:
            if label:
                error.add_note(f"The output of {label} is not stored.")
            raise
        except Exception as error:  # noqa: BLE001  # whatever a value's own code raises when it is taken apart
            self._not_kept(key, label, f"its value cannot be stored by the codec {self.codec.name!r}: {error}", error)
            return None

    def _meta(self, digest: str | None) -> str:
        return f"{self.codec.name} {digest}" if digest else self.codec.name

    def _stored(self, key: str) -> Remembered | None:
        """The stored value of a key in this root. Does not count as a use."""
        store = self._store()
        try:
            with waits.time_limit(self.fetcher.timeout):
                return self._quick(key) or store.view(self.space, key)
        except errors.CacheFault as error:
            self.fetcher.fall_back(error, f"{self.space}:{key}")
            return None

    def _not_kept(self, key: str, label: str, why: str, error: Exception) -> None:
        self.counted["store_failures"] += 1
        self.fetcher.store.count("store_failures")
        kind = f"{type(error).__name__} {getattr(error, 'limit', '')}"
        self._say(label, kind, f"the output of {label} is not stored: {why}" if label else f"{self.space}:{key} is not stored: {why}")

    def _say(self, name: str, kind: str, message: str) -> None:
        """Log a warning once per process for each name and kind."""
        if (name, kind) not in self._reported:
            if len(self._reported) >= 10_000:
                self._reported.clear()
            self._reported.add((name, kind))
            log.warning("%s", message)

    # -- one at a time ---------------------------------------------------------------------------------------------

    def single(self, key: str, digest: str | None, make: Callable[[], T], **options: Any) -> T:
        """See `single_async`."""

        async def made() -> T:
            return make()

        return waits.run(self.single_async(key, digest, made, wait=waits.wait_here, **options))

    async def single_async(
        self, key: str, digest: str | None, make: Callable[[], Awaitable[T]], *, timeout: float | None = None, pin: bool = False,
        label: str = "", looked: bool = False, copy: bool = False, wait: WaitFor = waits.wait_for_async,
    ) -> T:  # fmt: skip
        """The value of a key; else the result of ``make``, which is stored: one thread or process of the node at a time runs it.

        Returns the value as `look` does. An error that ``make`` raises reaches every waiting caller, and is not stored. A value that
        cannot be stored reaches the waiting callers if it can (see `Flight.note_unstored`); else they run ``make`` themselves, in parallel.
        So does a caller that has waited ``timeout`` seconds, or may not wait. ``looked``: the caller has just seen that there is no value.
        ``wait``: with `waits.wait_here`, `waits.run` runs this.

        Raises `ConfigError` for a value that the codec does not support."""
        hit = None if looked else self.look(key, digest, label=label, copy=copy)
        if hit is None:
            hit = await _Call(self, key, digest, make, pin, label, copy, wait).run(self.fetcher.timeout if timeout is None else timeout)
        return hit[0]  # type: ignore[no-any-return]

    # -- names -----------------------------------------------------------------------------------------------------

    def has(self, key: str) -> bool:
        """Whether there is a value under this key, of any codec. Does not count as a use."""
        above = self.fetcher.upstream
        try:
            return self._store().entry(self.space, key) is not None or (above is not None and above.entry(self.space, key) is not None)
        except errors.CacheFault as error:
            self.fetcher.fall_back(error, f"{self.space}:{key}")
            return False

    def has_any(self, prefix: str) -> bool:
        """Whether any key begins with ``prefix``."""
        try:
            return self._store().spaces.has_any(self.space, prefix)
        except errors.CacheFault as error:
            self.fetcher.fall_back(error, f"{self.space}:{prefix}")
            return False

    def evict(self, key: str) -> bool:
        """Remove a key, pinned or not. Returns False if there is none, or it cannot be removed."""
        store = self._store()
        entry = store.entry(self.space, key)
        try:
            with waits.time_limit(self.fetcher.timeout):
                return entry is not None and store.discard(entry)
        except errors.CacheFault as error:
            self.fetcher.warn(f"evict {type(error).__name__}", "%s is not removed: %s", f"{self.space}:{key}", error)
            return False

    def flush(self) -> int:
        """Remove all values that are not pinned. Returns how many were removed."""
        try:
            with waits.time_limit(self.fetcher.timeout):
                return self._store().spaces.clear(self.space)
        except errors.CacheFault as error:
            self.fetcher.warn(f"flush {type(error).__name__}", "%s is not flushed: %s", self.space, error)
            return 0

    def keys(self) -> list[str]:
        """All keys, from the least to the most recently used. If the cache cannot be read, there are none, and one warning says so."""
        try:
            return self._store().seeing.keys(self.space)
        except errors.CacheFault as error:
            self._warn_unread(error)
            return []

    def size(self) -> tuple[int, int]:
        """Stored size in bytes, and number, of the values. If the cache cannot be read, both are 0, and one warning says so."""
        try:
            return self._store().spaces.used(self.space)
        except errors.CacheFault as error:
            self._warn_unread(error)
            return 0, 0

    def _warn_unread(self, error: errors.CacheFault) -> None:
        self.fetcher.warn("usage", "the values of the tasks %s cannot be listed: %s", self.space, error)

    def budget(self) -> int | None:
        """Bytes that the values may have; None: limited by the cache only."""
        return self._store().spaces.limits_of(self.space).quota

    def _store(self) -> Store | NullStore:
        store = self.fetcher.current()
        if store is not self._bound:  # a root that could not be used until now
            self._bind(store)
        return store


@dataclass(slots=True)
class _Call:
    """A call whose output is not stored yet. Values are in tuples, since they may be None."""

    values: Values
    key: str
    digest: str | None
    make: Callable[[], Awaitable[Any]]
    pin: bool
    label: str
    copy: bool
    wait: WaitFor
    failure: Exception | None = None  # what `make` raised

    async def run(self, timeout: float | None) -> tuple[Any]:
        values, key, digest = self.values, self.key, self.digest
        # Calls with other arguments may have the same key: each of them waits, and fails, on its own.
        call = key if digest is None or key.endswith(digest) else f"{key} {digest}"
        try:
            return await get_or_make_async(
                values.fetcher, values.space, call, self.look, self.made, self.store, pack=self.pack, unpack=self.unpack,
                codec=values.codec.name, label=f"{values.space}:{key}", timeout=timeout, looked=True, wait=self.wait,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001  # it is raised again
            final = error
            if self.failure is not None and (error is self.failure or error.__cause__ is self.failure):
                final = self.failure
            elif isinstance(error, errors.FillFailed) and self.carries_errors:
                final = _unpickled(error) or error
        raise final

    def look(self) -> tuple[Any] | None:
        """Look again under the call's lock: another process or thread may have computed the value by now."""
        hit = self.values._look(self.key, self.digest, self.label, self.copy)
        if hit is not None:
            self.values.counted["waits"] += 1
        return hit

    async def made(self) -> tuple[Any]:
        try:
            return (await self.make(),)
        except Exception as error:
            self.failure = error
            carried = _pickled(error) if self.carries_errors else None
            if carried is None:
                raise
            raise carried from error

    async def store(self, made: tuple[Any]) -> tuple[Any] | None:
        options: dict[str, Any] = {"digest": self.digest or "", "pin": self.pin, "label": self.label, "copy": self.copy}
        if self.wait is waits.wait_here:
            return self.values.kept(self.key, made[0], **options)
        async with _one_of_few():
            return await in_thread(partial(self.values.kept, self.key, made[0], **options))  # to write a large value takes long

    def pack(self, made: tuple[Any], most: float) -> Buffer | None:
        """The bytes of a value that was not stored; None if it cannot be encoded, or they are more than ``most``."""
        try:
            pieces = self.values.codec.encode(made[0])
            return b"".join(pieces) if sum(memoryview(piece).nbytes for piece in pieces) <= most else None
        except Exception:  # noqa: BLE001  # whatever a value's own code raises, which `store` has reported; or there is no memory
            return None

    def unpack(self, data: Buffer) -> tuple[Any] | None:
        """The value that another caller made and could not store; None if it cannot be recreated."""
        try:
            value = self.values._decode_unstored(data, self.copy)
        except Exception:  # noqa: BLE001  # whatever a value's own code raises: this caller makes its own
            return None
        self.values.counted["waits"] += 1
        return (value,)

    @property
    def carries_errors(self) -> bool:
        """Whether errors may be pickled for the processes that wait: with any other codec, nothing is ever unpickled."""
        return self.values.codec.name == "pickle"


def _pickled(error: Exception) -> errors.FillFailed | None:
    """An error of the program, with its pickle, for the processes that wait; None if it needs no pickle, or cannot be unpickled. They get
    its name and text then."""
    if isinstance(error, errors.CacheFault) or type(errors.from_wire(errors.to_wire(error))) is type(error):
        return None
    try:
        data = pickle.dumps(error, 5)
        if len(data) > _MOST or type(pickle.loads(data)) is not type(error):
            return None
    except Exception:  # noqa: BLE001  # of whatever the error holds
        return None
    return errors.FillFailed(f"{type(error).__name__}: {error}", kind=type(error).__name__, pickled=base64.b85encode(data).decode())


def _unpickled(error: errors.FillFailed) -> Exception | None:
    """The error that `_pickled` sent; None if there is none, or it cannot be unpickled here."""
    data = error.facts.get("pickled")
    try:
        original = pickle.loads(base64.b85decode(data)) if isinstance(data, str) else None
    except Exception:  # noqa: BLE001  # such as a class that is not there
        return None
    return original if isinstance(original, Exception) else None
