"""The segments of one pack in the memory of this process: mapped one behind the other, each at its first use."""

from __future__ import annotations

import os
import threading

from forebay import errors
from forebay._engine.files import pack_files
from forebay._engine.files.layout import Root
from forebay._kernel import mappings

FIRST_WINDOW = 1 << 30
GONE = memoryview(b"")
GONE.release()


class Mapped:
    """Callable from any thread; a forked child has what was mapped before, and goes on by itself.

    ``view`` shows all of it. Once a window is full it is another one, in which everything lies where it lay."""

    def __init__(self, root: Root, pack: int) -> None:
        """Raises OSError where the process may not have so many addresses."""
        self._root, self._pack = root, pack
        self._window = mappings.Window(FIRST_WINDOW)
        self.view, self._top = self._window.view, 0
        self._mutex = threading.Lock()  # guards all above, and _placed
        self._placed: dict[int, tuple[int, int]] = {}  # segment -> where it begins in the view, its length

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Show nothing any more. What is out stays mapped until it is dropped."""
        with self._mutex:
            self.view, self._placed = GONE, {}
            del self._window

    def where(self, number: int, offset: int) -> tuple[int, int] | None:
        """Where a segment that should have this offset begins in the view, and its length; a length of 0: it is gone.

        None where it cannot be mapped now."""
        with self._mutex:
            placed = self._placed.get(number)
            if placed is None or offset >= placed[1]:  # cut short by somebody when it was mapped, and perhaps made whole since
                placed = self._place_locked(number)
            return placed

    def private(self, number: int, start: int, length: int) -> memoryview:
        """So many bytes of a segment, writable: what is stored there is seen by nobody else, and never kept. Raises OSError."""
        first = start // pack_files.PAGE * pack_files.PAGE
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
            self._window.place(fd, length, self._top)
        except OSError:
            return None
        finally:
            os.close(fd)
        self._placed[number] = self._top, length
        self._top += -(-length // pack_files.PAGE) * pack_files.PAGE
        return self._placed[number]

    def _widen_locked(self, wanted: int) -> None:
        window = mappings.Window(1 << (2 * wanted - 1).bit_length())
        for number, (begin, length) in self._placed.items():
            fd = pack_files.open_segment(self._root, self._pack, number)
            try:
                window.place(fd, length, begin)
            finally:
                os.close(fd)
        self._window, self.view = window, window.view
