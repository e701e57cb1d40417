"""A store without a cache: it has no entries and keeps none, so that "no cache" needs no branch anywhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from forebay import errors
from forebay._engine.files.table import SilentHosts
from forebay._engine.index.counters import NAMES
from forebay._engine.index.memo import Find, Hit, finds_nothing, no_hit
from forebay._model import Buffer, Entry, Problem, Report, Strays, Victim

if TYPE_CHECKING:
    from forebay._engine.index.settings import SpaceLimits
    from forebay._engine.locks.leases import Lease
    from forebay._engine.packs.pack import NoPack
    from forebay._engine.seeing import Facts, Now, Period, Usage

T = TypeVar("T")


def _gives(make: Callable[[], T]) -> Callable[..., T]:
    """A method that returns the same whatever it is given: what it returns in an empty root."""
    return lambda *_, **__: make()


_nothing = _gives(lambda: None)


class NullSpaces:
    """The spaces of a store that keeps nothing: each is empty."""

    clear = largest = _gives(int)
    has_any = _gives(bool)
    usage = _gives(lambda: (0, 0))

    def limits(self, name: str) -> SpaceLimits:
        from forebay._engine.index.settings import SpaceLimits

        return SpaceLimits()


class NullHold:
    """A lock that excludes no caller."""

    release = _nothing


class NullLocks:
    """The locks of a store that keeps nothing: single-flight is refused, and no caller waits."""

    hold, working, failure = _gives(NullHold), _gives(contextlib.nullcontext[None]), _nothing
    note_failure = note_unstored = _nothing
    with_remains: Callable[..., set[str]] = _gives(set)

    def __init__(self, why: str) -> None:
        self._why = why

    def single(self, space: str, key: str, *work: object, **options: object) -> NoReturn:
        raise _refusal(self._why, key)

    async def make_once(self, space: str, key: str, *work: object, **options: object) -> NoReturn:
        raise _refusal(self._why, key)

    async def hold_async(self, space: str, key: str, *, timeout: float | None = None) -> NullHold:
        return NullHold()

    def try_hold(self, space: str, key: str) -> NoReturn:
        raise _refusal(self._why, key)

    def holding_free(self, space: str, keys: Sequence[str]) -> NoReturn:
        raise _refusal(self._why, keys[0])


class NullPacks:
    """The packs of a store that keeps nothing."""

    find = find_by_id = open = _nothing

    def make(self, space: str, key: str, length: int, **label: Any) -> NoPack:
        from forebay._engine.packs.pack import NoPack

        return NoPack(length)


class NullSeeing:
    """What can be seen of a store that keeps nothing."""

    history: Callable[..., list[Period]] = _gives(list)
    keys: Callable[..., list[str]] = _gives(list)
    key_page: Callable[..., list[str]] = _gives(list)
    entries: Callable[..., list[Entry]] = _gives(list)
    page: Callable[..., list[Entry]] = _gives(list)
    fact_page: Callable[..., list[Facts]] = _gives(list)
    first_to_go: Callable[..., list[int]] = _gives(list)
    overhead: Callable[..., dict[str, int]] = _gives(dict)
    lacking = _gives(int)

    def __init__(self) -> None:
        self.zero_counts()

    def zero_counts(self) -> None:
        self.counted = dict.fromkeys(NAMES, 0)

    def counts(self) -> dict[str, int]:
        return dict(self.counted)

    def now(self) -> Now:
        from forebay._engine.seeing import Now

        return Now()

    def usage(self) -> Usage:
        from forebay._engine.seeing import Usage

        return Usage(0, 0, 0)


class PassThrough:
    """A store that keeps nothing: for ``--no-cache``, for a root that cannot be used, and as the baseline of benchmarks."""

    keeps: Literal[False] = False
    """Tells a `PassThrough` from a `Store`: ``if store.keeps`` narrows the union of both."""

    view = first_touch = first_value = view_leased = bytes_leased = lease = take = entry = _nothing
    alias = touch = set_aside = set_validated = invalidate = close = _nothing
    validated, is_intact, make_room = _gives(int), _gives(lambda: True), _gives(lambda: True)
    set_life = discard = is_leased = _gives(bool)
    strays = remove_strays = _gives(Strays)
    take_many: Callable[..., dict[str, Lease]] = _gives(dict)
    members: Callable[..., list[tuple[str, Entry]]] = _gives(list)
    check: Callable[..., list[Problem]] = _gives(list)
    repair: Callable[..., list[Problem]] = _gives(list)
    hot_lookup: Callable[..., Hit] = _gives(lambda: no_hit)
    finder: Callable[..., Find] = _gives(lambda: finds_nothing)

    def __init__(self, why: str = "the cache is switched off") -> None:
        self.why, self.hosts, self.limits = why, SilentHosts(), None
        self.spaces, self.locks, self.packs, self.seeing = NullSpaces(), NullLocks(why), NullPacks(), NullSeeing()

    def now(self, *, exact: bool = False) -> int:
        return time.time_ns()

    def stamp(self, entry: Entry) -> tuple[int, int]:
        return entry.id, 0

    def writing(self, space: str, key: str, **label: Any) -> NoReturn:
        raise _refusal(self.why, key)

    def put(self, space: str, key: str, data: Buffer, **label: Any) -> NoReturn:
        self.put_pieces(space, key, [data])

    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], **label: Any) -> NoReturn:
        raise _refusal(self.why, key, sum(memoryview(piece).nbytes for piece in pieces))

    def put_many(self, space: str, items: Sequence[tuple[str, Buffer]], **label: Any) -> NoReturn:
        self.put_pieces(space, items[0][0], [data for _, data in items])

    def publish_collected(self, *batch: object) -> NoReturn:
        raise _refusal(self.why, "what was fetched")

    def remove(self, victims: Iterable[Victim]) -> Report:
        return Report(spared=tuple(victim.name for victim in victims))

    def count(self, name: str, n: int = 1) -> None:
        self.seeing.counted[name] += n

    def count_hit(self, size: int) -> None:
        self.count("hits")  # of the upstream: that is looked into all the same
        self.count("bytes_hit", size)


def _refusal(why: str, key: str, size: int = 0) -> errors.NoSpace:
    return errors.NoSpace(f"{key!r} cannot be stored: {why}", key=key, need=size, free=0, budget=0)
