"""One item on its way into the cache, shared by all who want it in this process."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from forebay._engine.locks.fill import KeyHold
from forebay._engine.locks.leases import Lease
from forebay._engine.write.reservations import NOTHING, Need
from forebay._model import Buffer


class State(enum.Enum):
    """Where an item is. Changed under the loader's lock only."""

    QUEUED = enum.auto()
    """Nobody is at it. Whoever wants it now takes it over."""
    RUNNING = enum.auto()
    """A thread of this process looks for it, waits for another process, or reads it."""
    READ = enum.auto()
    """Its bytes are in memory, and may be on their way to the disk."""
    KEPT = enum.auto()
    """It is in the cache, and leased."""
    PAST = enum.auto()
    """It is not to be kept: whoever wants it reads it from the source."""
    FAILED = enum.auto()
    """The source raised: so does every `get` of those who hold it."""


class Load:
    """An item that somebody wants: its key in the source, its name in the cache, whether it is ``bound`` to the session.

    It lives as long as a lazy, or a thread that works on it, holds it: nothing else counts holders."""

    __slots__ = ("__weakref__", "bound", "busy_since", "data", "error", "key", "mark", "name", "prepared", "size", "state", "waiting")

    def __init__(self, key: str, name: str, bound: bool) -> None:
        self.key, self.name, self.bound = key, name, bound
        self.state = State.QUEUED
        self.data: Buffer | None = None
        self.error: BaseException | None = None
        self.size: int | None = None
        """What the source says that it has, in bytes; None: it does not say, or was not asked."""
        self.waiting = 0
        """How many threads wait for it now."""
        self.busy_since: int | None = None
        """Since when another process works on it, in nanoseconds of the monotonic clock."""
        self.prepared: Prepared | None = None
        self.mark: LoadRef | None = None

    @property
    def is_settled(self) -> bool:
        """Whether nobody is at it, nor will be."""
        return self.state not in (State.QUEUED, State.RUNNING)


class LoadRef(weakref.ref[Load]):
    """The loader's way to a `Load`, which does not keep it. It has what must be let go when the load is gone, and what a thread needs that
    works on it: a thread that a fork leaves behind would keep the load itself for ever.

    A finalizer may run inside anything: what it is given to call must never wait for a lock."""

    __slots__ = ("bound", "key", "lease", "name")

    key: str
    name: str
    bound: bool
    lease: Lease | None

    def __new__(cls, load: Load, gone: Callable[[LoadRef], object]) -> Self:
        mark = super().__new__(cls, load, gone)
        mark.key, mark.name, mark.bound, mark.lease = load.key, load.name, load.bound, None
        return mark


@dataclass(slots=True, eq=False)
class Prepared:
    """All is ready for a load to be read: there is room, and its key is held. ``since``: seconds of the monotonic clock. ``taken``: by
    somebody who reads it now; so it is nobody else's to let go, even when the load is gone."""

    mark: LoadRef
    hold: KeyHold
    need: Need
    epoch: int
    since: float
    taken: bool = False


class LoadedItem:
    """What was read and is to be kept: ``promised`` of what it ``needs`` in room it has already."""

    __slots__ = ("data", "epoch", "mark", "needs", "promised", "release")

    def __init__(self, mark: LoadRef, data: Buffer, needs: Need, release: Callable[[], None]) -> None:
        self.mark, self.data, self.needs, self.release = mark, data, needs, release
        self.promised, self.epoch = NOTHING, 0

    def is_promised(self, epoch: int) -> bool:
        """Whether there is room for it; ``epoch``: of the promises that are good."""
        return self.promised != NOTHING and self.epoch == epoch
