"""The files beside the catalog: its write-ahead log, its ballast, and foreign files.

SQLite restarts its log once all of it is in the database and no reader needs it any more. A process that is stopped inside a SELECT needs
it as long as it is stopped: the log grows meanwhile, and what it has above `FREE` counts against the budget."""

from __future__ import annotations

import os
import stat

from forebay._engine.files.layout import PAGE, DiskFull
from forebay._engine.files.root import Root
from forebay._kernel import host, locks
from forebay._kernel.below import Below
from forebay._logs import logger

log = logger("forebay.catalog")

SOFT, STEP = 6 << 20, 512 << 10
"""Above ``SOFT`` bytes the log is copied into the database, again after each ``STEP`` while readers keep it from starting again."""
KEEP = SOFT
"""The blocks that the log keeps when it restarts: on a full disk they are room for the transactions that evict, and freeing and allocating
blocks each time makes a small put a tenth slower."""
EASY = 256 << 20
"""If this much of the disk was free a transaction ago, the free space is not checked again."""
FREE, WARN = 16 << 20, 64 << 20
"""Bytes of the log that the budget does not count, and from which on a warning names the process in the way. One transaction takes at most
4 MiB. The exception are the links of a directory, which are written and deleted at once: about 100 bytes plus the name for each of its
files."""
PART = 4
"""No transaction begins while the log has more above `FREE` than this part of the budget."""
BALLAST, LEAST_BALLAST = 4 << 20, 128 << 10
"""The ballast is restored with what is free, but leaves ``LEAST_BALLAST`` bytes for the next transaction."""

# https://www.sqlite.org/walformat.html: the bytes of the index that readers lock.
_READERS, _COUNT = 123, 5
# https://www.sqlite.org/fileformat.html: how it is written and how it is read; 2 by a log, 1 by a rollback journal.
_MAGIC, _MODE_AT, _LOG_MODE = b"SQLite format 3\0", 18, b"\x02\x02"


class Wal:
    """The log and its index beside one catalog. No state but their paths."""

    def __init__(self, catalog: str, files: Below) -> None:
        self.log, self.index, self._files = f"{catalog}-wal", f"{catalog}-shm", files
        self.journal = f"{catalog}-journal"
        """A rollback journal: a catalog with a log never has one, so another program put it there."""
        self._catalog = catalog

    def uri(self, how: str) -> str:
        """The URI by which SQLite opens the catalog."""
        return f"file:{self._catalog.replace('%', '%25').replace('?', '%3f').replace('#', '%23')}?{how}"

    def exists(self) -> bool:
        return _is_plain(self.log) is True

    def strange(self) -> str | None:
        """The log or the index, where that is a pipe, a link or anything else that SQLite could not use."""
        return next((path for path in (self.log, self.index) if _is_plain(path) is False), None)

    def mend(self) -> None:
        """Remove what is `strange`, and restore the header's flag that there is a log. Caller: holds the writer lock, and this process has
        no open connection: closing a descriptor of the catalog would drop its locks."""
        if _is_plain(self.log) is False and _is_plain(self.index):
            self._files.unlink(self.index)  # it is of another log, which is gone
        for path in (self.log, self.index):
            if _is_plain(path) is False:
                self.remove(path)
        try:
            fd = self._files.open(self._catalog, os.O_RDWR)
        except OSError:
            return  # it is gone, not a plain file, or not writable: the caller notices
        try:
            head = os.pread(fd, _MODE_AT + 2, 0)
            if head.startswith(_MAGIC) and head[_MODE_AT:] not in (_LOG_MODE, b""):
                log.warning("%s: another program switched its log off: it is switched on again", self._catalog)
                host.pwrite(fd, _LOG_MODE, _MODE_AT)
        finally:
            os.close(fd)

    def remove(self, path: str) -> None:
        """Remove a foreign file, pipe, link or empty directory beside the catalog."""
        self._files.make_way(path)
        log.warning("%s: nothing of Forebay's: it was removed", path)

    def current_index(self) -> tuple[int, int] | None:
        """Which file the index is: another one after it was deleted; None between the two."""
        try:
            status = os.stat(self.index)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    def reader(self) -> str:
        """The processes that have a place in the log, in words for people."""
        pids = {pid for byte in range(_READERS, _READERS + _COUNT) for pid in locks.posix_holders(self.index, byte)} - {os.getpid()}
        return ", ".join(map(locks.describe_process, sorted(pids))) or "a process"


def _is_plain(path: str) -> bool | None:
    """Whether it is a plain file; None if it does not exist."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None


class Ballast:
    """A few MiB of the disk that are released when it is full: with a fresh log, even a DELETE needs room.

    Callable from any thread; other processes release and restore the same file."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self.owed = 0
        """Bytes that the disk lacks for all of it, after it was given up."""

    def make(self) -> None:
        """Create it if it is missing, unless it was released a moment ago: then a commit restores it."""
        if self.owed:
            return
        try:
            self._root.install(self._root.ballast, lambda fd: host.allocate(fd, 0, BALLAST))
            size = os.lstat(self._root.ballast).st_size
            if size < BALLAST and host.free_bytes(self._root.path) > 4 * BALLAST:
                self.owed = BALLAST - size
        except OSError as error:
            log.info("no room for the ballast %s: %s", self._root.ballast, error)

    def give_up(self, error: DiskFull) -> bool:
        """The disk is full, and without room not even a DELETE succeeds. Returns whether to try again."""
        if not self._root.read_only and not error.relieved:
            self.owed = BALLAST
            # Another process may have been first: then there is room, too.
            error.relieved = self._root.files.unlink(self._root.ballast) or host.free_bytes(self._root.path) >= LEAST_BALLAST
        return error.relieved

    def restore(self) -> None:
        """Have as much of it again as there is room for."""
        try:
            have = os.lstat(self._root.ballast).st_size
        except FileNotFoundError:
            have = 0
        size = min(BALLAST, have + host.free_bytes(self._root.path) - LEAST_BALLAST) // PAGE * PAGE
        try:
            if size >= LEAST_BALLAST and not have:
                self._root.install(self._root.ballast, lambda fd: host.allocate(fd, 0, size))
            elif size > have:
                self._grow(size)
        except OSError as error:
            log.info("no room for the ballast %s: %s", self._root.ballast, error)
        else:
            self.owed = BALLAST - max(have, size)

    def _grow(self, size: int) -> None:
        fd = self._root.files.open_write(self._root.ballast)
        try:
            host.allocate(fd, 0, size)
        finally:
            os.close(fd)
