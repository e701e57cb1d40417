"""Whether the files of a root that this process has open may have lost their names, asked before each transaction.

Two system calls instead of six: whatever creates, renames or removes a name in a directory changes the directory's time, and the root's
own directory has the names of the catalog and of its log. The writer lock lies one directory below: its file counts its names itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

SETTLED = 50_000_000
"""Nanoseconds after which a change of a directory gives it another time than the change before: file systems note times by ticks of some
milliseconds. Until then each transaction looks closely."""


class Names:
    """The name of one root, the names in it, and that of its writer lock. For the holder of that lock."""

    def __init__(self, root: str, lock: Callable[[], tuple[int, ...] | None]) -> None:
        """``lock``: see `LockFile.state`."""
        self._root, self._lock = root, lock
        self._seen: tuple[int, ...] | None = None
        self.noted: tuple[int, ...] | None = None

    def are_same(self) -> bool:
        """Whether no name has changed since `note`. If one may have, the caller looks closely, and calls `note` if it finds no change."""
        try:
            root = os.stat(self._root)
        except OSError:
            self.noted = self._seen = None
            return False
        lock = self._lock()
        self._seen = (root.st_dev, root.st_ino, root.st_mtime_ns, *lock) if lock is not None else None
        if self.noted is not None and self._seen == self.noted:
            return True
        self.noted = None
        return False

    def note(self) -> None:
        """All is as it was when `are_same` was last asked."""
        if self._seen is not None and time.time_ns() - self._seen[2] > SETTLED:
            self.noted = self._seen

    def forget(self) -> None:
        """Look closely next time: the files will be opened again."""
        self.noted = self._seen = None
