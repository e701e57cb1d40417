"""The same door with nothing behind it: nothing is found and nothing is kept, so that "no cache" needs no branch anywhere."""

from __future__ import annotations

import operator
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Literal, NoReturn, TypeVar

from forebay import errors
from forebay._engine.index.counters import NAMES
from forebay._engine.index.hosts import SilentHosts
from forebay._engine.index.memo import Hit, Remembered, no_hit
from forebay._engine.locks.fill import KeyHold, OnWait
from forebay._engine.stats import Facts, Usage
from forebay._engine.values import finds_nothing
from forebay._model import Buffer, Entry, Problem, Report, Strays, Victim

T = TypeVar("T")


class NoPack:
    """A pack that keeps nothing: its slots stay empty."""

    frozen, admits = True, False

    def __init__(self, length: int, id: int = 0) -> None:
        self.length, self.id = length, id
        self.closed = False

    def find(self, slot: int, copy: bool = False) -> memoryview | None:
        self.has(slot)
        return None

    def finder(self) -> Callable[..., memoryview | None]:
        return self.find

    def has(self, slot: int) -> bool:
        if self.closed:
            raise errors.Closed.of("array of samples")
        if not 0 <= operator.index(slot) < self.length:
            raise IndexError(f"sample {slot} is outside of 0..{self.length - 1}")
        return False

    def is_damaged(self, slot: int) -> bool:
        return False

    def private(self, slot: int) -> memoryview:
        raise IndexError(f"sample {slot} is empty")

    def filled(self) -> list[int]:
        self.has(0)
        return []

    def count(self) -> int:
        return len(self.filled())

    def look(self, slot: int, copy: bool = False) -> memoryview | None:
        return self.find(slot)

    def put(self, slot: int, encode: Callable[[Any], Any], value: Any) -> bool:
        return self.has(slot)

    def freeze(self) -> None:
        self.has(0)

    def bad_slots(self) -> list[int]:
        return self.filled()

    def tell(self) -> None:
        """Nothing was counted."""

    def release(self) -> None:
        """There is nothing to let go."""

    def close(self) -> None:
        self.closed = True


class PassThrough:
    """A store that keeps nothing: for ``--no-cache``, for a root that cannot be used, and as the baseline of benchmarks."""

    keeps: Literal[False] = False
    """Tells a `PassThrough` from a `Store`: ``if store.keeps`` narrows the union of both."""

    def __init__(self, why: str = "the cache is switched off") -> None:
        self.why, self.hosts = why, SilentHosts()
        self._counts = dict.fromkeys(NAMES, 0)

    def _refuse(self, key: str, size: int = 0) -> NoReturn:
        raise errors.NoSpace(f"{key!r} cannot be kept: {self.why}", key=key, need=size, free=0, budget=0)

    def view(self, space: str, key: str) -> None:
        return None

    def view_leased(self, space: str, key: str, lease: Any) -> None:
        return None

    def bytes_leased(self, lease: Any) -> None:
        return None

    def lease(self, space: str, key: str) -> None:
        return None

    def entry(self, space: str, key: str) -> None:
        return None

    def alias(self, space: str, name: str, found: Any) -> None:
        """Nothing is remembered."""

    def touch(self, entry: Entry) -> None:
        """Nothing is kept."""

    def set_aside(self, entry: Entry, why: str) -> None:
        """Nothing is kept."""

    def now(self, *, exact: bool = False) -> int:
        return time.time_ns()

    def validated(self, entry: Entry) -> int:
        return 0

    def stamp(self, entry: Entry) -> tuple[int, int]:
        return entry.id, 0

    def set_validated(self, entry: Entry, ns: int) -> None:
        """Nothing is kept."""

    def set_life(self, space: str, key: str, life: str) -> bool:
        return False

    def single(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], *,
        timeout: float | None = None, on_wait: OnWait | None = None, on_hold: Callable[[KeyHold], None] | None = None,
    ) -> T:  # fmt: skip
        self._refuse(key)

    async def single_async(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], Awaitable[T]], *, timeout: float | None = None
    ) -> T:
        self._refuse(key)

    def writing(self, space: str, key: str, **label: Any) -> NoReturn:
        self._refuse(key)

    def put(self, space: str, key: str, data: Buffer, **label: Any) -> NoReturn:
        self._refuse(key, memoryview(data).nbytes)

    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], **label: Any) -> NoReturn:
        self._refuse(key, sum(memoryview(piece).nbytes for piece in pieces))

    def private(self, found: Remembered) -> memoryview:
        return memoryview(bytearray(found.view))

    def is_intact(self, found: Remembered) -> bool:
        return True

    def discard(self, entry: Entry) -> bool:
        return False

    def clear(self, space: str) -> int:
        return 0

    def keys(self, space: str) -> list[str]:
        return []

    def has_any(self, space: str, prefix: str) -> bool:
        return False

    def usage_of(self, space: str) -> tuple[int, int]:
        return 0, 0

    def quota_of(self, space: str) -> None:
        return None

    def note_failure(self, space: str, key: str, error: Exception) -> None:
        """Nobody waits."""

    def make_pack(self, space: str, key: str, length: int, **label: Any) -> NoPack:
        return NoPack(length)

    def find_pack(self, space: str, key: str) -> None:
        return None

    def find_pack_by_id(self, id: int) -> None:
        return None

    def open_pack(self, lease: Any, length: int) -> None:
        return None

    def hold(self, space: str, key: str, *, timeout: float | None = None) -> NoPack:
        return NoPack(0)

    def publish_leased(self, writing: Any, *, validator: str | None = None) -> NoReturn:
        self._refuse(str(writing))

    def members(self, tree: Entry) -> list[tuple[str, Entry]]:
        return []

    def remove(self, wanted: Iterable[Victim]) -> Report:
        return Report(spared=tuple(victim.name for victim in wanted))

    def entries(self, space: str | None = None) -> list[Entry]:
        return []

    def fact_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Facts]:
        return []

    def key_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[str]:
        return []

    def page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Entry]:
        return []

    def is_leased(self, entry: Entry) -> bool:
        return False

    def check(self, *, deep: bool = False) -> list[Problem]:
        return []

    def count(self, name: str, n: int = 1) -> None:
        self._counts[name] += n

    def count_hit(self, size: int) -> None:
        self.count("hits")  # of the upstream: that is looked into all the same
        self.count("bytes_hit", size)

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def hitter(self, space: str) -> Hit:
        return no_hit

    def finder(self, space: str) -> Callable[[str], Remembered | None]:
        return finds_nothing

    def zero_counts(self) -> None:
        self._counts = dict.fromkeys(NAMES, 0)

    def overhead(self) -> dict[str, int]:
        return {}

    def usage(self) -> Usage:
        return Usage(0, 0, 0)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        return []

    def strays(self) -> Strays:
        return Strays()

    def remove_strays(self) -> Strays:
        return Strays()

    def lacking(self, need: int) -> int:
        return 0

    def make_room(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to close."""
