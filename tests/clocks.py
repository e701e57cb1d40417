"""A wall clock of this process, and of the children it forks, that a test moves. Installed before what it is to mislead is opened."""

from __future__ import annotations

import mmap
import time
from types import TracebackType
from typing import Self


class Clocks:
    """Around a block: `time.time` and `time.time_ns` jump as they are told. The monotonic clock is the kernel's.

    ``together``: for the children that are forked inside too, at any time; else each goes on with a clock of its own."""

    def __init__(self, *, together: bool = False) -> None:
        self._seconds, self._nanoseconds = time.time, time.time_ns
        self._ahead = memoryview(mmap.mmap(-1, mmap.PAGESIZE) if together else bytearray(8))[:8].cast("q")
        self._each = 0

    def step(self, nanoseconds: int) -> None:
        """Set the clock by so much."""
        self._ahead[0] += nanoseconds

    def every_look(self, nanoseconds: int) -> None:
        """Set it by so much at each look from now on."""
        self._each = nanoseconds

    @property
    def ahead(self) -> int:
        """Nanoseconds by which it differs from the true clock."""
        return self._ahead[0]

    def _time_ns(self) -> int:
        if self._each:
            self._ahead[0] += self._each
        return self._nanoseconds() + self._ahead[0]

    def __enter__(self) -> Self:
        time.time_ns, time.time = self._time_ns, lambda: self._time_ns() / 1e9
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        time.time_ns, time.time = self._nanoseconds, self._seconds
