"""A store without a cache: it has no entries and stores none, so that "no cache" needs no branch in its callers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar

from forebay import errors
from forebay._engine.files.silent_hosts import SilentHosts
from forebay._engine.index.counters import NAMES
from forebay._engine.index.memo import Find, Hit, finds_nothing, no_hit
from forebay._model import Buffer, Entry, Problem, Report, Strays, Victim

if TYPE_CHECKING:
    from forebay._engine.index.settings import SpaceLimits
    from forebay._engine.leases import Lease
    from forebay._engine.seeing import Facts, Now, Period, Usage

T = TypeVar("T")


def _gives(make: Callable[[], T]) -> Callable[..., T]:
    """A method that returns the same for any arguments: what it returns in an empty root."""
    return lambda *_, **__: make()


_nothing = _gives(lambda: None)


class NullStore:
    """A store that keeps nothing: for ``--no-cache``, for a root that cannot be used, and as the baseline of benchmarks.

    Lookups find nothing, lists are empty, and locks and writes raise ``fault``. It is its own ``spaces``, ``locks`` and ``seeing``."""

    keeps: Literal[False] = False
    """Tells a `NullStore` from a `Store`: ``if store.keeps`` narrows the union of both."""

    first_touch = first_value = view = view_leased = bytes_leased = lease = take = entry = failure = _nothing
    alias = touch = set_validated = invalidate = invalidate_keys = note_failure = note_unstored = close = _nothing
    validated, is_intact, make_room = _gives(int), _gives(lambda: True), _gives(lambda: True)
    set_life = discard = is_leased = has_any = _gives(bool)
    clear = largest = lacking = budget = _gives(int)
    used = _gives(lambda: (0, 0))
    strays = remove_strays = _gives(Strays)
    take_many: Callable[..., dict[str, Lease]] = _gives(dict)
    members: Callable[..., list[tuple[str, Entry]]] = _gives(list)
    check: Callable[..., list[Problem]] = _gives(list)
    repair: Callable[..., list[Problem]] = _gives(list)
    hot_lookup: Callable[..., Hit] = _gives(lambda: no_hit)
    finder: Callable[..., Find] = _gives(lambda: finds_nothing)
    working = _gives(contextlib.nullcontext[None])
    with_remains: Callable[..., set[str]] = _gives(set)
    history: Callable[..., list[Period]] = _gives(list)
    keys: Callable[..., list[str]] = _gives(list)
    key_page: Callable[..., list[str]] = _gives(list)
    entries: Callable[..., list[Entry]] = _gives(list)
    page: Callable[..., list[Entry]] = _gives(list)
    fact_page: Callable[..., list[Facts]] = _gives(list)
    first_to_go: Callable[..., list[int]] = _gives(list)
    overhead: Callable[..., dict[str, int]] = _gives(dict)

    def __init__(self, why: str = "the cache is switched off", fault: type[errors.CacheFault] = errors.NoSpace) -> None:
        self.why, self.fault, self.hosts, self.limits = why, fault, SilentHosts(), None
        self.zero_counts()

    @property
    def spaces(self) -> NullStore:
        return self

    locks = seeing = spaces

    def now(self, *, exact: bool = False) -> int:
        return time.time_ns()

    def stamp(self, entry: Entry) -> tuple[int, int]:
        return entry.id, 0

    def limits_of(self, name: str) -> SpaceLimits:
        from forebay._engine.index.settings import SpaceLimits

        return SpaceLimits()

    def activity(self) -> Now:
        from forebay._engine.seeing import Now

        return Now()

    def usage(self) -> Usage:
        from forebay._engine.seeing import Usage

        return Usage(0, 0, 0)

    def remove(self, victims: Iterable[Victim]) -> Report:
        return Report(spared=tuple(victim.name for victim in victims))

    # -- counters --------------------------------------------------------------------------------------------------

    def zero_counts(self) -> None:
        self._counts = dict.fromkeys(NAMES, 0)

    def counts(self) -> dict[str, int]:
        return dict(self._counts)

    def count(self, name: str, n: int = 1) -> None:
        self._counts[name] += n

    def count_hit(self, size: int) -> None:
        self.count("hits")  # of the upstream, where lookups continue
        self.count("bytes_hit", size)

    # -- what is refused -------------------------------------------------------------------------------------------

    def _refuse(self, space: str, key: str, *_: object, need: int = 0, **__: object) -> NoReturn:
        raise self.refusal(key, need)

    def refusal(self, key: str, need: int = 0) -> errors.CacheFault:
        """The error that says why an object of ``need`` bytes is not stored."""
        message = f"{key!r} cannot be stored: {self.why}"
        if self.fault is errors.NoSpace:
            return errors.NoSpace(message, key=key, need=need, free=0, budget=0)
        return self.fault(message, key=key)

    writing = try_hold = _refuse

    async def make_once(self, space: str, key: str, *_: object, **__: object) -> NoReturn:
        self._refuse(space, key)

    hold_async = make_once

    def holding_free(self, space: str, keys: Sequence[str]) -> NoReturn:
        self._refuse(space, keys[0])

    def put(self, space: str, key: str, data: Buffer, **label: object) -> NoReturn:
        self.put_pieces(space, key, [data])

    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], **label: object) -> NoReturn:
        self._refuse(space, key, need=sum(memoryview(piece).nbytes for piece in pieces))

    def put_many(self, space: str, items: Sequence[tuple[str, Buffer]], **label: object) -> NoReturn:
        self.put_pieces(space, items[0][0], [data for _, data in items])

    def publish_collected(self, *batch: object) -> NoReturn:
        self._refuse("", "what was fetched")
