"""Prefetchers and the lazies that they hand out, with a cache behind them or without one."""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from forebay import _config, errors
from forebay._engine.leases import Lease
from forebay._kernel import waits
from forebay._kernel.interrupts import Steps, guarded, guarded_methods, items_of_program, of_program
from forebay._logs import logger
from forebay._model import Item_co
from forebay.fetch.prefix import checked_key, info_of
from forebay.prefetch.loads import Load
from forebay.reports import OnProgress, WarmReport
from forebay.sources import DecodedSource, Source, SourceInfo, source_of

log = logger("forebay.prefetch")
T = TypeVar("T")
AHEAD = 64


@guarded_methods("get", "done", "source", "__eq__")
class Lazy(Generic[Item_co]):
    """An item that is loaded or loading: ``Lazy[bytes]``, or of the type that ``decode`` returns. Returned by `Prefetcher.get_lazy`. Its
    ``key`` is its key in the source.

    Callable from any thread, and usable in both processes after a fork. Unpickled in another process, it requests the item there. Lazies of
    one source and key are equal and hash alike. Dropping a lazy at any time releases its share of the item, without waiting."""

    __slots__ = ("__weakref__", "_load", "_pool", "_values", "key")

    def __init__(self, pool: Any, key: str, load: Load | None = None) -> None:
        """``load``: None if the first `get` is to read the item."""
        self._pool, self.key, self._load = pool, key, load
        self._values: list[Any] = []
        """The first one is the value. Whichever thread appends it takes no lock, which a fork could leave held."""

    def get(self, sample: Any = None) -> Item_co:
        """The item: the same object at each call. It comes from the cache, or from memory while it is being stored. If it is still queued,
        the calling thread reads it from the source at once.

        Its provenance is added to ``sample``: a dict, under ``"__sources__"``, or an object with such an attribute. The value is the
        caller's own; the item in the cache is released. Raises, at each call, what the source or the decoder raised."""
        if not self._values:
            self._load_value()
        if sample is not None:
            add_source(sample, self.source)
        item: Item_co = self._values[0]
        return item

    @guarded
    def _load_value(self) -> None:
        load = self._load
        if not self._values:
            self._values.append(self._pool._value_of(self.key, load))
        self._load = None  # only now: a thread that sees None relies on the value

    @property
    def done(self) -> bool:
        """Whether `get` returns without waiting for a queued or running load."""
        load = self._load
        return bool(self._values) if load is None else load.is_settled

    @property
    def source(self) -> SourceInfo:
        """Where the item comes from."""
        return info_of(self._pool.source, self.key)

    def __hash__(self) -> int:
        return hash((self._pool.identity, self.key))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.key == other.key and self._pool.identity == other._pool.identity

    def __repr__(self) -> str:
        return f"<forebay.Lazy {self.key!r}{' with its value' if self._values else ''}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.methodcaller("get_lazy", self.key), (self._pool,)


@guarded_methods("done", "source", "__eq__")
class Spilled(Lazy[Item_co]):
    """An object that `Prefetcher.put` spilled to disk. Equal only to itself; its pickle contains the object."""

    __slots__ = ("_lease", "_seal")

    def __init__(self, pool: Any, name: str, lease: Lease | None, value: Any = None, seal: bytes = b"") -> None:
        super().__init__(pool, name)
        self._lease, self._seal = lease, seal
        if lease is None:
            self._values.append(value)

    def get(self, sample: Any = None) -> Item_co:
        """The object; its bytes on disk are removed. Nothing is added to ``sample``, since it has no source."""
        lease = self._lease
        if lease is not None:
            try:
                value = self._pool._unspill(lease, self._seal)
            except errors.Damaged:  # P1 and P2 see the lease / P1 has the value and closes the lease / P2 reads a closed one
                if not self._values:
                    raise
            else:
                self._values.append(value)
                self._lease = None
                self._pool._discard(lease)
        item: Item_co = self._values[0]
        return item

    @property
    def done(self) -> bool:
        """Always true."""
        return True

    @property
    def source(self) -> SourceInfo:
        """An empty one: the object comes from no source."""
        return SourceInfo("", self.key)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Remove the bytes of an object that was not read."""
        if is_finalizing():
            return
        lease: Lease | None = getattr(self, "_lease", None)
        if lease is not None:
            self._pool._discard(lease)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> tuple[Any, ...]:
        return Spilled, (None, self.key, None, self.get())


def add_source(sample: Any, info: SourceInfo) -> None:
    """Add a source to those that a sample, a dict or an object with ``__sources__``, was made of."""
    if isinstance(sample, dict):
        sample["__sources__"] = (*(sample.get("__sources__") or ()), info)
    elif hasattr(sample, "__sources__"):
        sample.__sources__ = (*(sample.__sources__ or ()), info)


@guarded_methods()
class Pool(Generic[Item_co]):
    """The calls that a prefetcher and `PassThrough` build from their other calls."""

    source: Any
    identity: str

    def get_lazy(self, key: str) -> Lazy[Item_co]:
        raise NotImplementedError

    def get(self, key: str, sample: Any = None) -> Item_co:
        """Read and decode an item now, without the cache. Raises what the source raises."""
        value: Item_co = self._read(key := checked_key(key))
        if sample is not None:
            add_source(sample, info_of(self.source, key))
        return value

    def _read(self, key: str) -> Any:
        raise NotImplementedError

    def _value_of(self, key: str, load: Any) -> Any:
        """The value of a lazy with this load."""
        return self._read(key)

    def get_many(self, keys: Iterable[str]) -> list[Item_co]:
        """The items of these keys, in order; several are loaded at a time."""
        return list(self.stream(keys))

    def stream(self, keys: Iterable[str], ahead: int = AHEAD) -> Iterator[Item_co]:
        """The items of these keys, in order. While the caller uses one, the next ``ahead`` are prefetched.

        ``keys`` may be endless: it is consumed only as far as items are prefetched. If the source raises for an item, so does the iterator
        at that item. Dropping the iterator releases prefetched items. Raises `ConfigError` for a negative ``ahead``."""
        _config.parse_count(ahead, name="ahead", least=0)
        return Steps(self._stream(items_of_program(keys), ahead))

    def _stream(self, keys: Iterable[str], ahead: int) -> Generator[Item_co, None, None]:
        window: deque[Lazy[Item_co]] = deque()
        for key in keys:
            window.append(self.get_lazy(key))
            if len(window) > ahead:
                yield window.popleft().get()
        while window:
            yield window.popleft().get()

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


@guarded_methods()
class PassThrough(Pool[Item_co]):
    """The same interface without a cache: nothing is prefetched, and an item is read when its lazy is asked for it. The baseline for
    benchmarks. Callable from any thread.

    ``source``, ``decode``: as for `Cache.prefetcher`."""

    def __init__(
        self, source: Any, *, decode: Any = None, reopen: Callable[[Mapping[str, int]], Pool[Any] | None] | None = None
    ) -> None:  # fmt: skip
        """``reopen``: opens the prefetcher that this one stands in for, with these limits, once the cache can be used; None until then."""
        self._reopen, self._turn = reopen, waits.Turn()
        self._opened: Any = None
        self._limits: dict[str, int] = {}
        self.source = wrapped(source_of(source), decode)
        self.identity, self.closed = f"past:{id(self.source)}", False
        self.name = ""

    @property
    def used(self) -> int:
        """Bytes of items in the cache."""
        return 0 if self._opened is None else int(self._opened.used)

    @property
    def count(self) -> int:
        """Number of items in the cache."""
        return 0 if self._opened is None else int(self._opened.count)

    def get_lazy(self, key: str) -> Lazy[Item_co]:
        """A lazy that reads at its first `get`. Raises `Closed`."""
        pool: Pool[Item_co] | None = self._prefetcher()
        return Lazy(self, checked_key(key)) if pool is None else pool.get_lazy(key)

    def put(self, obj: T, name: str = "") -> Lazy[T]:
        """A lazy that holds the object. Raises `Closed`."""
        pool = self._prefetcher()
        lazy: Lazy[T] = Spilled(self, name, None, obj) if pool is None else pool.put(obj, name)
        return lazy

    def warm(self, keys: Iterable[str], on_progress: OnProgress | None = None) -> WarmReport:
        """Nothing can be stored: all keys fail with `NoSpace`. Raises `Closed`."""
        pool = self._prefetcher()
        if pool is not None:
            report: WarmReport = pool.warm(keys, on_progress)
            return report
        reason = "the cache cannot be used now" if self._reopen else "the cache is switched off"
        return WarmReport(
            (), tuple((key, errors.NoSpace(f"{key}: it cannot be stored: {reason}", key=key, need=0, free=0, budget=0)) for key in keys)
        )

    def set_limits(self, *, budget: int | None = None, max_count: int | None = None) -> None:
        """See `Prefetcher.set_limits`. The limits take effect once the cache can be used."""
        self._limits |= {name: value for name, value in (("budget", budget), ("max_count", max_count)) if value is not None}
        pool = self._prefetcher()
        if pool is not None:
            pool.set_limits(budget=budget, max_count=max_count)

    def _prefetcher(self) -> Any:
        """The prefetcher itself, if it can be opened by now. Raises `Closed`."""
        if self.closed:
            raise errors.Closed.of("prefetcher")
        if self._opened is None and self._reopen is not None:
            self._turn.attempt(self._open)
        return self._opened

    def _open(self) -> Any:
        """The pool to use from now on; None to try again. Called by one thread at a time. Nothing here may fail an item."""
        assert self._reopen is not None
        limits = dict(self._limits)
        try:
            pool: Any = self._reopen(limits)
            if pool is not None:
                self._opened = pool
                if self.closed:  # meanwhile, by another thread
                    pool.close()
                elif self._limits != limits:
                    pool.set_limits(**self._limits)
        except errors.ConfigError as error:
            log.warning("the prefetcher goes on without the cache: %s", str(error))
            return self
        except (errors.CacheFault, errors.WaitTimeout) as error:
            log.warning("the limits of the prefetcher could not be set: %s", str(error))
        return self._opened

    def _read(self, key: str) -> Any:
        return of_program(self.source.__getitem__)(key)

    def close(self) -> None:
        """Close it: from now on `get_lazy` raises `Closed`."""
        self.closed = True
        if self._opened is not None:
            self._opened.close()


def wrapped(source: Source, decode: Any) -> Source:
    """The source, with ``decode`` applied to its items unless that is None."""
    return DecodedSource(source, decode) if decode is not None else source
