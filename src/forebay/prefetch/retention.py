"""Which objects of a known order are worth the room that they take: Belady's rule with bypass, as far as the order is known.

The object that is used next the latest goes first, also if it is the one that was just read: then it is not stored at all (L. A. Belady,
IBM Systems Journal 5, 1966). No lock, no file and no clock is in here."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Callable

from forebay._engine.index.orders import NEVER

_SLACK = 64  # one part in so many of the limit, or room for one object, is left to what is under way
_FORGIVEN = 8
"""When so many times the limit was read of what is still there, a third is left of what was lost."""


class NextUses:
    """When each object of an order is used next, by position; the first has the position 1."""

    def __init__(self, most: int) -> None:
        """``most``: positions that are known at a time."""
        self._most, self.drawn = most, 0
        self._following = array("Q", bytes(8 * (most + 1)))  # by position, of those that are known
        self._next: dict[int, int] = {}
        self._latest: dict[int, int] = {}

    def draw(self, hash: int) -> int:
        """The object with this hash is the next one of the order. Returns its position."""
        self.drawn += 1
        position = self.drawn
        self._following[position % len(self._following)] = NEVER
        if hash in self._next:
            self._following[self._latest[hash] % len(self._following)] = position
        else:
            self._next[hash] = position
        self._latest[hash] = position
        return position

    def after(self, position: int) -> int:
        """The position at which the object at this one is used again, or `NEVER`."""
        return self._following[position % len(self._following)]

    def pass_by(self, hash: int, position: int) -> None:
        """The use at this position has come, or is passed by: the first of its object."""
        following = self.after(position)
        if following != NEVER:
            self._next[hash] = following
        else:
            del self._next[hash], self._latest[hash]

    def next(self, hash: int) -> int:
        """The next position of an object, or `NEVER`."""
        return self._next.get(hash, NEVER)


class _Kept:
    """An object that is to stay until its ``position``."""

    __slots__ = ("name", "position", "size")

    def __init__(self, name: str, size: int, position: int) -> None:
        """``position``: of its next use here, or by others."""
        self.name, self.size, self.position = name, size, position


class Retention:
    """The objects that are to stay, by the hash of each: those used soonest, as many as fit."""

    def __init__(self, wanted: Callable[[int], int] = lambda hash: NEVER) -> None:
        """``wanted``: the position at which others use an object, or `NEVER`: asked before it goes."""
        self._wanted = wanted
        self.limit = 0
        """Bytes that the objects may take."""
        self._lost = 0  # bytes of them that others seem to need
        self._used = self._largest = 0
        self._kept: dict[int, _Kept] = {}
        self._farthest: list[tuple[int, int, int]] = []  # a heap: less the position, less the number of the entry, hash
        self._number = 0

    @property
    def capacity(self) -> int:
        """Bytes that the objects may take, less what was lost of late."""
        return max(self.limit - max(self.limit // _SLACK, self._largest) - self._lost, 0)

    def __contains__(self, hash: int) -> bool:
        return hash in self._kept

    def position(self, hash: int) -> int | None:
        """Until when an object is to stay; None: it is not."""
        kept = self._kept.get(hash)
        return kept.position if kept is not None else None

    def is_worth(self, size: int, position: int) -> bool:
        """Whether an object that is used again at this position is to be stored: there is room, or another one is used later."""
        if self._used + size <= self.capacity:
            return True
        farthest = self._find_farthest()
        return farthest is not None and self._kept[farthest].position > position

    def keep(self, hash: int, name: str, size: int, position: int) -> list[str]:
        """Let an object stay until ``position``. Returns the names of those that are to go for it, perhaps its own."""
        self.forget(hash)
        self._number += 1
        self._kept[hash] = _Kept(name, size, position)
        self._used += size
        self._largest = max(self._largest, size)
        heapq.heappush(self._farthest, (-position, -self._number, hash))
        gone: list[str] = []
        while self._used > self.capacity and (farthest := self._find_farthest()) is not None:
            gone.append(self._kept[farthest].name)
            self.forget(farthest)
        if len(self._farthest) > 1000 + 4 * len(self._kept):
            self._farthest = [(-kept.position, 0, hash) for hash, kept in self._kept.items()]
            heapq.heapify(self._farthest)
        return gone

    def forget(self, hash: int) -> None:
        """An object need not stay."""
        kept = self._kept.pop(hash, None)
        if kept is not None:
            self._used -= kept.size

    def note_lost(self, hash: int) -> None:
        """An object that was to stay is gone: others need the room."""
        kept = self._kept.get(hash)
        if kept is not None:
            self._lost = min(self._lost + kept.size, self.limit)
            self.forget(hash)

    def note_kept(self, hash: int) -> None:
        """An object is there that was to stay: perhaps others need less room now."""
        kept = self._kept.get(hash)
        if kept is not None:
            self._lost = max(self._lost - self._lost * kept.size // (_FORGIVEN * self.limit) - 1, 0)

    def _find_farthest(self) -> int | None:
        while self._farthest:
            position, _, hash = self._farthest[0]
            kept = self._kept.get(hash)
            if kept is None or kept.position != -position:
                heapq.heappop(self._farthest)
                continue
            wanted = self._wanted(hash)
            if wanted >= kept.position:
                return hash
            kept.position, self._number = wanted, self._number + 1
            heapq.heapreplace(self._farthest, (-wanted, -self._number, hash))
        return None
