"""A store without a cache: it has no entries and keeps none, so that "no cache" needs no branch anywhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from forebay import errors
from forebay._engine.index.counters import NAMES
from forebay._engine.index.hosts import SilentHosts
from forebay._engine.index.memo import Find, Hit, Remembered, finds_nothing, no_hit
from forebay._model import Buffer, Entry, Problem, Report, Strays, Victim

if TYPE_CHECKING:
    from forebay._engine.flight import KeyHold, OnWait
    from forebay._engine.index.settings import SpaceLimits
    from forebay._engine.locks.lease import Lease
    from forebay._engine.packs.pack import NoPack
    from forebay._engine.seeing import Facts, Now, Period, Usage
    from forebay._engine.write.writing import Writing

T = TypeVar("T")


class NullSpaces:
    """The spaces of a store that keeps nothing: each is empty."""

    def clear(self, name: str) -> int:
        return 0

    def has_any(self, name: str, prefix: str) -> bool:
        return False

    def usage(self, name: str) -> tuple[int, int]:
        return 0, 0

    def largest(self, name: str) -> int:
        return 0

    def limits(self, name: str) -> SpaceLimits:
        from forebay._engine.index.settings import SpaceLimits

        return SpaceLimits()


class NullHold:
    """A lock that excludes no caller."""

    def release(self) -> None:
        """Nothing is held."""


class NullLocks:
    """The locks of a store that keeps nothing: single-flight is refused, and no caller waits."""

    def __init__(self, why: str) -> None:
        self._why = why

    def single(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], *,
        timeout: float | None = None, on_wait: OnWait | None = None, on_hold: Callable[[KeyHold], None] | None = None,
    ) -> T:  # fmt: skip
        raise _refusal(self._why, key)

    async def single_async(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], Awaitable[T]], *, timeout: float | None = None
    ) -> T:
        raise _refusal(self._why, key)

    def hold(self, space: str, key: str, *, timeout: float | None = None) -> NullHold:
        return NullHold()

    async def hold_async(self, space: str, key: str, *, timeout: float | None = None) -> NullHold:
        return NullHold()

    def try_hold(self, space: str, key: str) -> NoReturn:
        raise _refusal(self._why, key)

    def holding_free(self, space: str, keys: Sequence[str]) -> contextlib.AbstractContextManager[list[str]]:
        raise _refusal(self._why, keys[0])

    def with_remains(self, space: str, keys: Iterable[str]) -> set[str]:
        return set()

    def failure(self, space: str, key: str, since: int) -> None:
        """No other process works on a key."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def note_failure(self, space: str, key: str, error: Exception) -> None:
        """Nobody waits."""


class NullPacks:
    """The packs of a store that keeps nothing."""

    def make(self, space: str, key: str, length: int, **label: Any) -> NoPack:
        from forebay._engine.packs.pack import NoPack

        return NoPack(length)

    def find(self, space: str, key: str) -> None:
        return None

    def find_by_id(self, id: int) -> None:
        return None

    def open(self, lease: Any, length: int) -> None:
        return None


class NullSeeing:
    """What can be seen of a store that keeps nothing."""

    def __init__(self) -> None:
        self.counted = dict.fromkeys(NAMES, 0)

    def history(self, *, hours: bool = False) -> list[Period]:
        return []

    def now(self) -> Now:
        from forebay._engine.seeing import Now

        return Now()

    def keys(self, space: str) -> list[str]:
        return []

    def entries(self, space: str | None = None) -> list[Entry]:
        return []

    def fact_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Facts]:
        return []

    def key_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[str]:
        return []

    def page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Entry]:
        return []

    def counts(self) -> dict[str, int]:
        return dict(self.counted)

    def zero_counts(self) -> None:
        self.counted = dict.fromkeys(NAMES, 0)

    def overhead(self) -> dict[str, int]:
        return {}

    def usage(self) -> Usage:
        from forebay._engine.seeing import Usage

        return Usage(0, 0, 0)

    def first_to_go(self) -> list[int]:
        return []

    def lacking(self, need: int) -> int:
        return 0


class PassThrough:
    """A store that keeps nothing: for ``--no-cache``, for a root that cannot be used, and as the baseline of benchmarks."""

    keeps: Literal[False] = False
    """Tells a `PassThrough` from a `Store`: ``if store.keeps`` narrows the union of both."""

    def __init__(self, why: str = "the cache is switched off") -> None:
        self.why, self.hosts, self.limits = why, SilentHosts(), None
        self.spaces, self.locks, self.packs, self.seeing = NullSpaces(), NullLocks(why), NullPacks(), NullSeeing()

    def view(self, space: str, key: str) -> None:
        return None

    def first_touch(self, space: str, key: str, max_age: int, alias: str = "", *, maps: bool = False) -> None:
        """See `Store.first_touch`."""

    def first_value(self, space: str, key: str, meta: str) -> None:
        """See `Store.first_value`."""

    def view_leased(self, space: str, key: str, lease: Any) -> None:
        return None

    def bytes_leased(self, lease: Any) -> None:
        return None

    def lease(self, space: str, key: str) -> None:
        return None

    def take_many(self, space: str, keys: Sequence[str]) -> dict[str, Lease]:
        return {}

    def entry(self, space: str, key: str) -> None:
        return None

    def alias(self, space: str, name: str, entry: Any) -> None:
        """Nothing is remembered."""

    def touch(self, entry: Any) -> None:
        """Nothing is kept."""

    def set_aside(self, entry: Entry, why: str) -> None:
        """Nothing is kept."""

    def now(self, *, exact: bool = False) -> int:
        return time.time_ns()

    def validated(self, entry: Entry) -> int:
        return 0

    def stamp(self, entry: Entry) -> tuple[int, int]:
        return entry.id, 0

    def set_validated(self, several: Sequence[tuple[Entry, int]], began: int) -> None:
        """There is no entry."""

    def invalidate(self, several: Sequence[Entry]) -> None:
        """There is no entry."""

    def set_life(self, space: str, key: str, life: str) -> bool:
        return False

    def writing(self, space: str, key: str, **label: Any) -> NoReturn:
        raise _refusal(self.why, key)

    def put(self, space: str, key: str, data: Buffer, **label: Any) -> NoReturn:
        raise _refusal(self.why, key, memoryview(data).nbytes)

    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], **label: Any) -> NoReturn:
        raise _refusal(self.why, key, sum(memoryview(piece).nbytes for piece in pieces))

    def put_many(self, space: str, items: Sequence[tuple[str, Buffer]], **label: Any) -> NoReturn:
        raise _refusal(self.why, items[0][0], sum(memoryview(data).nbytes for _, data in items))

    def is_intact(self, hit: Remembered) -> bool:
        return True

    def discard(self, entry: Entry) -> bool:
        return False

    def publish_collected(self, writings: Sequence[Writing], leased: Sequence[bool]) -> NoReturn:
        raise _refusal(self.why, "what was fetched")

    def members(self, tree: Entry) -> list[tuple[str, Entry]]:
        return []

    def remove(self, victims: Iterable[Victim]) -> Report:
        return Report(spared=tuple(victim.name for victim in victims))

    def is_leased(self, entry: Entry) -> bool:
        return False

    def check(self, *, deep: bool = False) -> list[Problem]:
        return []

    def count(self, name: str, n: int = 1) -> None:
        self.seeing.counted[name] += n

    def count_hit(self, size: int) -> None:
        self.count("hits")  # of the upstream: that is looked into all the same
        self.count("bytes_hit", size)

    def hot_lookup(self, space: str) -> Hit:
        return no_hit

    def finder(self, space: str) -> Find:
        return finds_nothing

        return Usage(0, 0, 0)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        return []

    def strays(self) -> Strays:
        return Strays()

    def remove_strays(self) -> Strays:
        return Strays()

    def make_room(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to close."""


def _refusal(why: str, key: str, size: int = 0) -> errors.NoSpace:
    return errors.NoSpace(f"{key!r} cannot be stored: {why}", key=key, need=size, free=0, budget=0)
