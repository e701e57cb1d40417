"""A named part of the cache that stores values under string keys."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from forebay import _config, errors
from forebay._engine.store import Store
from forebay._kernel import waits
from forebay._kernel.interrupts import guarded, guarded_methods, of_program, steps_of_program
from forebay._kernel.threads import in_thread
from forebay._model import OWN_SPACES, Buffer, Victim, as_bytes, exact_str, is_text
from forebay.fetch import Fetcher
from forebay.fetch.flight import get_or_make, get_or_make_async

if TYPE_CHECKING:
    from forebay._engine.null_store import NullStore

T = TypeVar("T")

FOREVER = 1 << 63


@guarded_methods("__getitem__", "__bool__")
class DictLike:
    """Values as those of a dict: ``cache[key]``, ``cache[key] = data``, ``key in cache``, ``len(cache)``, ``for key in cache``.

    The keys are those of `put`; `Cache.entry` finds objects of URLs. A missing key raises `NotCached`, which is a KeyError."""

    _values: Space

    def __getitem__(self, key: str) -> memoryview:
        data = self._values.get(key)
        if data is None:
            raise errors.NotCached.of(checked(key))
        return data

    def __setitem__(self, key: str, data: Buffer) -> None:
        self._values.put(key, data)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._values._holds(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self._values.keys())

    def __len__(self) -> int:
        return self._values._count()

    def __bool__(self) -> bool:
        return True


@guarded_methods("get", "get_or_put")
class Space(DictLike):
    """Values of one space. Created by `Cache.space`; callable from any thread, usable in both processes after a fork, pickles with its
    cache.

    A space in which the cache keeps its own entries (``urls``, ``directories``, ``listings``, ``indexes``, ``samples``, ``sessions``) takes
    no values: `put`, `get_or_put`, `aget_or_put` and ``space[key] = data`` raise `ConfigError`. It can be read, listed and limited."""

    def __init__(self, fetcher: Fetcher, name: str) -> None:
        self._fetcher, self.name = fetcher, name
        self._takes_values = name not in OWN_SPACES
        self._bind(fetcher.current())

    def _bind(self, store: Store | NullStore) -> None:
        self._bound, self._quick = store, store.hot_lookup(self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Space, (self._fetcher, self.name)

    def __repr__(self) -> str:
        return f"<forebay.Space {self.name!r}>"

    @property
    def _values(self) -> Space:  # type: ignore[override]
        return self

    def get(self, key: str, default: T | None = None) -> memoryview | T | None:
        """The bytes under this key, read-only; ``default`` if there are none. They stay valid after an eviction."""
        if type(key) is not str:
            return self._get(key, default)
        if self._fetcher.current() is not self._bound:
            self._store()
        hit = self._quick(key, FOREVER)
        return hit if hit is not None else self._get(key, default)

    @guarded
    def _get(self, key: str, default: T | None) -> memoryview | T | None:
        data = self._touched(key := checked(key))
        if data is not None:
            return data
        try:
            with waits.time_limit(self._fetcher.timeout):
                data = self._look(key)
        except errors.CacheFault as error:
            self._fetcher.fall_back(error, f"{self.name}:{key}")
        if data is None:
            self._store().count("misses")
        return default if data is None else data

    def put(self, key: str, data: Buffer, *, timeout: float | None = None) -> bool:
        """Store bytes under a key, replacing earlier ones. Returns False, with one warning, if they cannot be stored; the earlier ones then
        stay. With the policy ``wait``, it blocks while all bytes are in use, for at most ``timeout`` seconds. ``data`` must not change
        during the call."""
        if not self._takes_values:
            raise _no_values(self.name)
        store, key, timeout = self._store(), checked(key), _config.parse_timeout(timeout)
        view = as_bytes(data)
        try:
            with waits.time_limit(self._fetcher.timeout if timeout is None else timeout):
                store.put(self.name, key, view, timeout=timeout)
        except errors.CacheFault as error:
            store.count("store_failures")
            self._fetcher.warn(f"put {type(error).__name__}", "%s is not stored: %s", f"{self.name}:{key}", error)
            return False
        return True

    def get_or_put(self, key: str, fn: Callable[[], Buffer], *, timeout: float | None = None) -> memoryview:
        """The bytes under this key; else the result of ``fn``, which is stored. One process runs it; see `Cache.get_or_put`."""
        if not self._takes_values:
            raise _no_values(self.name)
        if type(key) is not str:
            return self._get_or_put(key, of_program(fn), timeout)
        if self._fetcher.current() is not self._bound:
            self._store()
        hit = self._quick(key, FOREVER)
        return hit if hit is not None else self._get_or_put(key, of_program(fn), timeout)

    @guarded
    def _get_or_put(self, key: str, fn: Callable[[], Buffer], timeout: float | None) -> memoryview:
        data = self._touched(key := checked(key))
        if data is not None:
            return data
        _drop_lost()
        look, keep = functools.partial(self._look, key), functools.partial(self._keep, key)
        return get_or_make(self._fetcher, self.name, key, look, lambda: _copied(fn()), keep, **self._options(timeout))

    def _options(self, timeout: float | None) -> dict[str, Any]:
        store, timeout = self._bound, self._fetcher.timeout if timeout is None else _config.parse_timeout(timeout)
        looked = store.keeps and not store.root.read_only  # else there is no look under a lock, in the catalog and upstream
        return {"timeout": timeout, "counts_miss": True, "looked": looked, "pack": _packed, "unpack": memoryview}

    def _keep(self, key: str, data: memoryview) -> memoryview | None:
        return data if self.put(key, data) else None

    async def aget_or_put(
        self, key: str, fn: Callable[[], Buffer | Awaitable[Buffer]], *, timeout: float | None = None
    ) -> memoryview:  # fmt: skip
        """`get_or_put` for a coroutine. Cancelling one call does not affect the others: ``fn`` runs to its end, and its result is stored.
        ``fn``: a coroutine function, or a function, which runs in a thread."""
        if not self._takes_values:
            raise _no_values(self.name)
        data = self._touched(key := checked(key))
        if data is not None:
            return data

        async def make() -> memoryview:
            return _copied(await _called(fn))

        look, keep = functools.partial(self._look, key), functools.partial(in_thread, self._keep, key)
        made = guarded(get_or_make_async)(self._fetcher, self.name, key, look, make, keep, **self._options(timeout))
        return await _unharmed(made)

    def _touched(self, key: str) -> memoryview | None:
        """The bytes of a checked key that this process remembers, or to which the index leads: nothing is waited for. None: `_look` tells.
        Raises `Closed`."""
        self._store()
        hit = self._quick(key, FOREVER)
        return hit if hit is not None else self._bound.first_touch(self.name, key, FOREVER)

    def _look(self, key: str) -> memoryview | None:
        """The bytes of a key by the catalog, or in the upstream root; None if there are none. Raises `CacheFault`."""
        store, above = self._store(), self._fetcher.upstream
        hit = store.view(self.name, key)
        if hit is not None:
            store.touch(hit.entry)
        elif above is not None:
            hit = above.view(self.name, key)
        if hit is None:
            return None
        store.count_hit(hit.size)
        return memoryview(hit.view)

    def evict(self, key: str) -> bool:
        """Remove a key. Returns False if there is none, or it is in use."""
        store = self._store()
        with waits.time_limit(self._fetcher.timeout):
            entry = store.entry(self.name, checked(key))
            return entry is not None and bool(store.remove([Victim.of(entry)]).removed)

    def keys(self) -> list[str]:
        """All keys, from the least to the most recently used."""
        return self._store().seeing.keys(self.name)

    def _holds(self, key: str) -> bool:
        """Whether there is something under this key; it counts as no use."""
        try:
            return self._store().entry(self.name, checked(key)) is not None
        except errors.CacheFault as error:
            self._fetcher.fall_back(error, f"{self.name}:{key}")
            return False

    def _count(self) -> int:
        """The number of keys."""
        return sum(space.entries for space in self._store().seeing.usage().spaces if space.name == self.name)

    def _store(self) -> Store | NullStore:
        store = self._fetcher.current()
        if store is not self._bound:  # the root could not be used until now
            self._bind(store)
        return store


def _copied(data: Buffer) -> memoryview:
    return memoryview(bytes(as_bytes(data)))


def _packed(data: memoryview, most: float) -> memoryview | None:
    return data if data.nbytes <= most else None


async def _called(fn: Callable[[], Buffer | Awaitable[Buffer]]) -> Buffer:
    import inspect

    result = of_program(fn)() if inspect.iscoroutinefunction(fn) else await in_thread(fn)
    return await steps_of_program(result) if inspect.isawaitable(result) else result


_tasks: set[Any] = set()  # the event loop itself refers to them weakly


async def _unharmed(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine that runs to its end, even if the caller is cancelled."""
    import asyncio

    _drop_lost()
    task = asyncio.ensure_future(coroutine)
    _tasks.add(task)
    task.add_done_callback(_ended)
    return await asyncio.shield(task)


def _drop_lost() -> None:
    """Let go of the tasks whose event loop was closed before they ended: so they end, and release their keys."""
    lost = [task for task in _tasks if task.get_loop().is_closed()]
    if lost:
        import gc

        _tasks.difference_update(lost)
        lost.clear()
        gc.collect()  # a task and its coroutine refer to each other


@functools.partial(guarded, always=True)
def _ended(task: Any) -> None:
    _tasks.discard(task)
    if not task.cancelled():
        task.exception()  # seen: the caller that would raise it may have been cancelled


def checked(key: str, what: str = "key") -> str:
    """The key, or ``what`` it is, as an exact str, if it is valid. Raises `ConfigError`."""
    text = exact_str(key)
    if text is None or not is_text(text):
        raise errors.ConfigError(f"the {what} {key!r} cannot be used: a {what} is a str of valid unicode", name=what, value=repr(key))
    return text


def _no_values(space: str) -> errors.ConfigError:
    """The error of a call that would store a value in one of `OWN_SPACES`."""
    message = f"the space {space!r} takes no values, because the cache keeps its own entries there: use a space with another name"
    return errors.ConfigError(message, name="space", value=space)


def checked_name(name: str) -> str:
    """The name of a space. Raises `ConfigError`."""
    text = checked(name, "name")
    if not text or ":" in text:
        raise errors.ConfigError(f"the space {text!r} cannot be named: not empty, and without ':'", name="name", value=text)
    return text
