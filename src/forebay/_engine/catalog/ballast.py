"""A few MiB of the disk that are given up when it is full: with a fresh journal even a DELETE needs room."""

from __future__ import annotations

import os

from forebay._engine.catalog.transactions import DiskFull
from forebay._engine.files.layout import PAGE
from forebay._engine.files.root import Root
from forebay._kernel import host
from forebay._logs import logger

log = logger("forebay.catalog")

SIZE = 4 << 20
LEAST = 128 << 10  # it is restored with what is free, but leaves this much for the next transaction


class Ballast:
    """The ballast of one root. Callable from any thread; other processes release and restore the same file."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.owed = 0
        """Bytes that the disk lacks for all of it, after it was given up."""

    def make(self) -> None:
        """Create it if it is missing, unless it was released a moment ago: then a commit restores it."""
        if self.owed:
            return
        try:
            self._root.install(self._root.ballast, lambda fd: host.allocate(fd, 0, SIZE))
            size = os.lstat(self._root.ballast).st_size
            if size < SIZE and host.free_bytes(self._root.path) > 4 * SIZE:
                self.owed = SIZE - size
        except OSError as error:
            log.info("no room for the ballast %s: %s", self._root.ballast, error)

    def give_up(self, error: DiskFull) -> bool:
        """The disk is full, and without room not even a DELETE succeeds. Returns whether to try again."""
        if not self._root.read_only and not error.relieved:
            self.owed = SIZE
            # Another process may have been first: then there is room, too.
            error.relieved = self._root.files.unlink(self._root.ballast) or host.free_bytes(self._root.path) >= LEAST
        return error.relieved

    def restore(self) -> None:
        """Have as much of it again as there is room for."""
        try:
            have = os.lstat(self._root.ballast).st_size
        except FileNotFoundError:
            have = 0
        size = min(SIZE, have + host.free_bytes(self._root.path) - LEAST) // PAGE * PAGE
        try:
            if size >= LEAST and not have:
                self._root.install(self._root.ballast, lambda fd: host.allocate(fd, 0, size))
            elif size > have:
                self._grow(size)
        except OSError as error:
            log.info("no room for the ballast %s: %s", self._root.ballast, error)
        else:
            self.owed = SIZE - max(have, size)

    def _grow(self, size: int) -> None:
        fd = self._root.files.open_write(self._root.ballast)
        try:
            host.allocate(fd, 0, size)
        finally:
            os.close(fd)
