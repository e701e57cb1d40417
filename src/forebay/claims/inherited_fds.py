"""Descriptors with locks that are of one process alone: a forked child closes them, or its parent's death would free nothing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from typing import TypeVar

from forebay._kernel import host, locks

T = TypeVar("T")


class _Passing:
    """What is on its way to who will own it, or is kept for good. Callable from any thread."""

    def __init__(self) -> None:
        self._gate = threading.RLock()  # guards _open; held over a fork, so that none is opened and not yet told of
        self._open: set[int] = set()
        host.at_fork(self)

    def take_in(self, opening: Callable[[], int]) -> int:
        """The descriptor that ``opening`` gives."""
        with self._gate:
            fd = opening()
            self._open.add(fd)
            return fd

    def hand_over(self, fd: int, owning: Callable[[int], T]) -> T:
        """Give it to an owner that knows of forks itself; gives the owner."""
        with self._gate:
            owner = owning(fd)
            self._open.discard(fd)
            return owner

    def close(self, fd: int, *, unlocking: int = 0) -> None:
        """Close it, if this process still has it. ``unlocking``: so many bytes first, for a child that C code forked has it too."""
        with self._gate:
            if fd in self._open:
                self._open.discard(fd)
                with contextlib.suppress(OSError):  # the job closed it
                    if unlocking:
                        locks.give_back(fd, 0, unlocking)
                    os.close(fd)

    def before_fork(self) -> None:
        self._gate.acquire()

    def after_fork_parent(self) -> None:
        self._gate.release()

    def after_fork_child(self) -> None:
        self._gate = threading.RLock()
        for fd in list(self._open):
            self.close(fd)  # never unlocked: the locks are the parent's


passing = _Passing()
