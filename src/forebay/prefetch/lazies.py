"""What a prefetcher hands out: an item that is loaded, or on its way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic

from forebay import errors
from forebay._engine.locks.leases import Lease
from forebay._model import Item_co
from forebay.prefetch.loads import Load
from forebay.sources import SourceInfo


class Lazy(Generic[Item_co]):
    """An item that is loaded, or on its way: ``Lazy[bytes]``, or of what the prefetcher's ``decode`` returns. ``key``: of it in its source.

    Callable from any thread, usable in both processes after a fork; pickled to another process it is asked for there. Hashable: lazies of
    one source and key are equal. Dropped at any time it releases its share of the item, and nothing else."""

    __slots__ = ("__weakref__", "_load", "_pool", "_values", "key")

    def __init__(self, pool: Any, key: str, load: Load | None) -> None:
        self._pool, self.key, self._load = pool, key, load
        self._values: list[Any] = []
        """Its first is the value, whichever thread appended it: that takes no lock, which a fork could leave held."""

    def get(self, sample: Any = None) -> Item_co:
        """The item; the same object at each call. From the cache, or from memory if it is just being kept; while it is still queued, or
        waits for room, it is read from the source here and now.

        Its provenance is added to ``sample``: a dict, under ``"__sources__"``, or an object with such an attribute. The share of the
        item in the cache is let go: the value is the caller's. Raises what the source or the decoder raised, at each call again."""
        load = self._load
        if load is not None:
            if not self._values:
                self._values.append(self._pool._value_of(load))
            self._load = None  # not before: whoever sees None finds a value
        if sample is not None:
            add_source(sample, self.source)
        item: Item_co = self._values[0]
        return item

    @property
    def done(self) -> bool:
        """Whether `get` would not wait for a load that runs or is queued."""
        load = self._load
        return load is None or load.is_settled

    @property
    def source(self) -> SourceInfo:
        """Where the item comes from."""
        info: SourceInfo = self._pool._info(self.key)
        return info

    def __hash__(self) -> int:
        return hash((self._pool.identity, self.key))

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.key == other.key and self._pool.identity == other._pool.identity

    def __repr__(self) -> str:
        return f"<forebay.Lazy {self.key!r}{'' if self._load is not None else ' with its value'}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _ask_again, (self._pool, self.key)


class Spilled(Lazy[Item_co]):
    """An object that `Prefetcher.put` spilled to the disk. Each is another one; pickled to another process it goes with its object."""

    __slots__ = ("_lease", "_seal")

    def __init__(self, pool: Any, name: str, lease: Lease | None, value: Any = None, seal: bytes = b"") -> None:
        super().__init__(pool, name, None)
        self._lease, self._seal = lease, seal
        if lease is None:
            self._values.append(value)

    def get(self, sample: Any = None) -> Item_co:
        """The object; its bytes on the disk go. Nothing is added to ``sample``: it has no source."""
        lease = self._lease
        if lease is not None:
            try:
                value = self._pool._unspill(lease, self._seal)
            except errors.Damaged:  # P1 and P2 see the lease / P1 has the value, and closes it / P2 finds it closed
                if not self._values:
                    raise
            else:
                self._values.append(value)
                self._lease = None
                self._pool._let_go(lease)
        item: Item_co = self._values[0]
        return item

    @property
    def done(self) -> bool:
        """It is."""
        return True

    @property
    def source(self) -> SourceInfo:
        """None that can be named."""
        return SourceInfo("", self.key)

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Dropped unread: its bytes go."""
        if is_finalizing():
            return
        lease: Lease | None = getattr(self, "_lease", None)
        if lease is not None:
            self._pool._let_go(lease)

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other

    def __reduce__(self) -> tuple[Any, ...]:
        return Spilled, (None, self.key, None, self.get())


def add_source(sample: Any, info: SourceInfo) -> None:
    """Note in a sample, a dict or an object with ``__sources__``, that it was made of this too."""
    if isinstance(sample, dict):
        sample["__sources__"] = (*(sample.get("__sources__") or ()), info)
    elif hasattr(sample, "__sources__"):
        sample.__sources__ = (*(sample.__sources__ or ()), info)


class Later(Lazy[Item_co]):
    """An item that `PassThrough` reads at the first `get`."""

    __slots__ = ()

    def __init__(self, pool: Any, key: str) -> None:
        super().__init__(pool, key, None)

    def get(self, sample: Any = None) -> Item_co:
        if not self._values:
            self._values.append(self._pool._read(self.key))
        return super().get(sample)

    @property
    def done(self) -> bool:
        return bool(self._values)


def _ask_again(pool: Any, key: str) -> Lazy[Any]:
    found: Lazy[Any] = pool.get_lazy(key)
    return found
