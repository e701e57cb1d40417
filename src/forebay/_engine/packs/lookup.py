"""The path of a get that is taken a million times a second: a function whose state are its own variables, which Python reaches quicker
than the attributes of an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, cast

from forebay._engine.packs.mapped import GONE

NOTHING = memoryview(b"").cast("Q")
Find = Callable[[int, bool], memoryview | None]


class Finder(Protocol):
    """What `finder` gives. It keeps its pack alive; the pack refers to it weakly, so that both go when the last handle does."""

    take: Callable[[], tuple[int, int]]
    """Hits and their bytes since the last time."""
    show: Callable[[memoryview], None]
    """Look into this view from now on, in which everything lies where it lay."""
    shut: Callable[[], None]
    """Find nothing any more: every call goes the long way."""

    def __call__(self, slot: int, copy: bool = False) -> memoryview | None: ...


def finder(starts: memoryview, ends: memoryview, view: memoryview, slowly: Find) -> Finder:
    """A function that gives the payload of a slot: where it begins and ends in ``view`` stand in ``starts`` and ``ends``; ``slowly`` is
    asked where an end is 0, or a writable copy is wanted."""
    hits = size = 0

    def find(slot: int, copy: bool = False) -> memoryview | None:
        nonlocal hits, size
        try:
            end = ends[slot]
        except IndexError:
            end = 0
        if end and slot >= 0 and not copy:
            start = starts[slot]
            hits += 1
            size += end - start
            return view[start:end]
        return slowly(slot, copy)

    def take() -> tuple[int, int]:
        nonlocal hits, size
        taken = hits, size
        hits = size = 0
        return taken

    def show(other: memoryview) -> None:
        nonlocal view
        view = other

    def shut() -> None:
        nonlocal ends, view
        ends, view = NOTHING, GONE  # of a thread that is in `find` now the view makes a ValueError, as `Closed` is one

    found = cast(Finder, find)
    found.take, found.show, found.shut = take, show, shut
    return found
