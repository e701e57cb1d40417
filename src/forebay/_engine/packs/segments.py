"""Lookup in the segments of an open pack, in the window that they are mapped into."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

from forebay import errors
from forebay._engine.files import pack_files
from forebay._engine.files.layout import PAGE, Root
from forebay._kernel import mappings

NOTHING = memoryview(b"").cast("Q")
Find = Callable[[int, bool], memoryview | None]


class Finder(Protocol):
    """The function that `finder` returns. It keeps its pack alive; the pack refers to it weakly, so both go with the last handle."""

    take: Callable[[], tuple[int, int]]
    """Returns the hits and their bytes since the last call."""
    show: Callable[[memoryview], None]
    """Read from this larger view from now on; offsets stay the same."""
    shut: Callable[[], None]
    """Find nothing any more: every call takes the slow path."""

    def __call__(self, slot: int, copy: bool = False) -> memoryview | None: ...


MANY_HITS = 1024
"""After so many hits, the first use of another slot adds them to the counters."""
Places = dict[int, tuple[int, int]]
"""Where segments, by their numbers, begin and end in the view."""


class Records(NamedTuple):
    """What is known of the records of a pack. ``cells``, ``hints``: of its index; ``key``: of the hints; ``starts``, ``ends``: of payloads
    that this process has found before, in the view; ``places``: of the segments that it has mapped."""

    cells: memoryview
    hints: memoryview
    key: int
    starts: memoryview
    ends: memoryview
    places: Places


def finder(records: Records, view: memoryview, slowly: Find, flush: Callable[[], None]) -> Finder:
    """A function that returns the payload of a slot, ``view[starts[slot]:ends[slot]]``. If its end is 0, the hint of its length tells
    where it is; ``slowly`` is called where that proves nothing, and for a writable copy. ``flush`` takes the counts when they are many."""
    cells, hints, key, starts, ends, places = records
    hits = size = 0
    header, sixteenths, hinted, bits, proofs = (
        pack_files.HEADER, pack_files.SIXTEENTHS, pack_files.HINTED, pack_files.HINT_BITS, pack_files.PROOFS
    )  # fmt: skip

    def find(slot: int, copy: bool = False) -> memoryview | None:
        nonlocal hits, size
        try:
            end = ends[slot]
            if slot < 0 or copy:
                return slowly(slot, copy)
            if end:
                start = starts[slot]
            else:
                word, hint = cells[slot], hints[slot]
                length = hint & hinted
                start, limit = places[word >> 40]
                start += header + ((word & sixteenths) << 4)
                end = start + length
                if hint >> bits != hash((key, word, length)) & proofs or end > limit:  # `pack_files.length_hint`, without a call
                    return slowly(slot, copy)
                starts[slot] = start
                ends[slot] = end  # last: a reader that sees it relies on the other
                if hits >= MANY_HITS:
                    flush()
        except (IndexError, KeyError):
            return slowly(slot, copy)
        hits += 1
        size += end - start
        return view[start:end]

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

    function = cast(Finder, find)
    function.take, function.show, function.shut = take, show, shut
    return function


FIRST_WINDOW = 1 << 30
GONE = memoryview(b"")
GONE.release()


class Mapped:
    """The segments of one pack in the memory of this process, mapped one behind the other at their first use.

    ``view`` shows all of them; once a window is full it is a larger one with the same offsets. Callable from any thread; a forked child
    keeps what was mapped before."""

    def __init__(self, root: Root, pack: int) -> None:
        """Raises OSError if the process may not have so many addresses."""
        self._root, self._pack = root, pack
        self._window = mappings.Window(FIRST_WINDOW)
        self.view, self._top = self._window.view, 0
        self._mutex = threading.Lock()  # guards all above, and _placed
        self._placed: dict[int, tuple[int, int]] = {}  # segment -> where it begins in the view, its length

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Show nothing any more. Views that were handed out stay mapped until they are dropped."""
        with self._mutex:
            self.view, self._placed = GONE, {}
            del self._window

    def where(self, number: int, offset: int) -> tuple[int, int] | None:
        """Where a segment begins in the view, and its length, which should include ``offset``; a length of 0: the segment is gone.

        None if it cannot be mapped now."""
        with self._mutex:
            placed = self._placed.get(number)
            if placed is None or offset >= placed[1]:  # truncated when it was mapped, and perhaps restored since
                placed = self._place_locked(number)
            return placed

    def private(self, number: int, start: int, length: int) -> memoryview:
        """Bytes of a segment, mapped privately: stores to them are not seen elsewhere, and never kept. Raises OSError."""
        first = start // PAGE * PAGE
        fd = pack_files.open_segment(self._root, self._pack, number)
        try:
            return mappings.map_file(fd, start - first + length, offset=first, writable=True, private=True)[start - first :]
        finally:
            os.close(fd)

    def _place_locked(self, number: int) -> tuple[int, int] | None:
        try:
            fd = pack_files.open_segment(self._root, self._pack, number)
        except (FileNotFoundError, errors.Damaged):
            return 0, 0
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size
            if number in self._placed and length <= self._placed[number][1]:
                return self._placed[number]
            if self._top + length > self._window.length:
                self._widen_locked(self._top + length)
            self._window.map_at(fd, length, self._top)
        except OSError:
            return None
        finally:
            os.close(fd)
        self._placed[number] = self._top, length
        self._top += -(-length // PAGE) * PAGE
        return self._placed[number]

    def _widen_locked(self, size: int) -> None:
        window = mappings.Window(1 << (2 * size - 1).bit_length())
        for number, (begin, length) in self._placed.items():
            fd = pack_files.open_segment(self._root, self._pack, number)
            try:
                window.map_at(fd, length, begin)
            finally:
                os.close(fd)
        self._window, self.view = window, window.view
