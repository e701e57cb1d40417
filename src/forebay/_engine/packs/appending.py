"""The segment that this process appends to: its descriptor, where it ends, and the locks of slots."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from typing import Protocol

from forebay._engine.files.pack_files import PAGE
from forebay._engine.packs.packing import SegmentRequest, Taken
from forebay._kernel import host, locks

AHEAD = 1 << 20
"""A segment's blocks are counted when it is taken, and allocated by and by: so much at once."""


class Segments(Protocol):
    """Gives a pack its segments: see `Packs`."""

    def take_segment(self, room: SegmentRequest, need: int, words: memoryview, full: tuple[int, int] | None) -> Taken: ...

    def leave_segment(self, pack: int, number: int, tail: int) -> None: ...

    def forget_segment(self, ticket: int) -> None: ...


class Appender:
    """The segment that this process appends to."""

    def __init__(self, segments: Segments, taken: Taken, claims: locks.Claims) -> None:
        """Raises OSError; then the descriptor is the caller's still. ``claims``: on the pack's index."""
        self.claims, segment = claims, taken.segment
        self._segments, self.fd, self._ticket, self.number = segments, taken.fd, taken.ticket, segment.number
        self.tail, self.capacity = segment.tail, segment.capacity
        self.ready = 0  # up to here its blocks are allocated
        self._inode = os.fstat(self.fd).st_ino

    def make_ready(self, need: int) -> None:
        """Have the blocks for ``need`` bytes more, and some ahead. Raises what the disk raises; then it is as it was.

        Looks, too, whether the descriptor is still of the segment. Between two looks its high number protects the job's files: where
        the job closed it, a write fails."""
        if not self._is_open():
            raise OSError(errno.EBADF, "the job closed a descriptor of ours")
        begin = max(self.ready, self.tail // PAGE * PAGE)
        end = min(max(self.tail + need, begin + AHEAD), self.capacity)
        host.allocate(self.fd, begin, end - begin)
        self.ready = end

    def _is_open(self) -> bool:
        try:
            return os.fstat(self.fd).st_ino == self._inode
        except OSError:
            return False

    def close(self) -> None:
        self.abandon()
        self.claims.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if is_finalizing() or not hasattr(self, "capacity"):
            return  # it was not made
        self.abandon()
        self._segments.forget_segment(self._ticket)

    def abandon(self) -> None:
        """Close the file: whose segment it is stays as it is."""
        ours, fd, self.fd = self._is_open(), self.fd, -1
        if ours:
            os.close(fd)
