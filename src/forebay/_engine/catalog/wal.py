"""The files beside the catalog: its write-ahead log with its size limit, its ballast, and foreign files.

SQLite restarts its log once all of it is in the database and no reader needs it any more. A reader marks what it needs by a lock on the
log's index, the file ``catalog.sqlite-shm``. A process that is stopped inside a SELECT holds that lock as long as it is stopped, and
the log would grow meanwhile.

So the holder of the writer lock can *retire* the index: it marks the index as unreadable for any SQLite, then unlinks it. Every process
notices at its next statement, reconnects and gets the new index, which SQLite makes from the log. A statement that was running
meanwhile may have read pages of two moments: its rows are discarded and it runs again. The mark comes before the unlink: a connection
that still has the old index can neither read by it nor, when it is closed, copy the log by it."""

from __future__ import annotations

import contextlib
import os
import stat
import struct
from collections.abc import Iterator

from forebay._engine.catalog.transactions import DiskFull
from forebay._engine.files.layout import PAGE
from forebay._engine.files.root import Root
from forebay._kernel import host
from forebay._kernel.below import Below
from forebay._logs import logger

log = logger("forebay.catalog")

SOFT, STEP = 6 << 20, 512 << 10
"""Above ``SOFT`` bytes the log is copied into the database, again after each ``STEP`` while readers keep it from starting again."""
RETIRE = 8 << 20
"""What the log may have when its readers are waited for no longer."""
KEEP = SOFT
"""The blocks that the log keeps when it restarts: on a full disk they are room for the transactions that evict, and freeing and allocating
blocks each time makes a small put a tenth slower."""
EASY = 256 << 20
"""If this much of the disk was free a transaction ago, the free space is not checked again."""
REFUSE = 12 << 20
"""No transaction begins above this size. One takes at most 4 MiB, so the log never exceeds 16 MiB. The exception are the links of a
directory, which are written and deleted at once: about 100 bytes plus the name for each of its files."""
BALLAST, LEAST_BALLAST = 4 << 20, 128 << 10
"""The ballast is restored with what is free, but leaves ``LEAST_BALLAST`` bytes for the next transaction."""

# https://www.sqlite.org/walformat.html: two copies of a header of 48 bytes in native order, the last 8 are a checksum of those before.
_HEADER = struct.Struct("=12I")
_VERSION, _RETIRED = 3_007_000, 0xF0BEBA11
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

    def size(self) -> int:
        """Bytes of the log. Above `KEEP` that is what is in use of it: it is cut to that when it starts again."""
        try:
            return os.stat(self.log).st_size
        except FileNotFoundError:
            return 0

    def exists(self) -> bool:
        return _is_plain(self.log) is True

    def strange(self) -> str | None:
        """The log or the index, where that is a pipe, a link or anything else that SQLite could not use."""
        return next((path for path in (self.log, self.index) if _is_plain(path) is False), None)

    def mend(self) -> None:
        """Remove foreign files, and restore the header's flag that there is a log. Caller: holds the writer lock, and this process has
        no open connection: closing a descriptor of the catalog would drop its locks."""
        if _is_plain(self.log) is False and _is_plain(self.index) and not self.retire_index():
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
        log.warning("%s: nothing of Forebay's: it is removed", path)
        self._files.make_way(path)

    def current_index(self) -> tuple[int, int] | None:
        """Which file the index is: another one after it was retired; None between the two."""
        try:
            status = os.stat(self.index)
        except FileNotFoundError:
            return None
        return status.st_dev, status.st_ino

    @contextlib.contextmanager
    def pinned_index(self) -> Iterator[tuple[int, int] | None]:
        """`current_index`, whose inode number is not reused while the block runs. Closing its descriptor releases none of SQLite's
        locks."""
        try:
            fd = self._files.open(self.index, os.O_PATH)
        except FileNotFoundError:
            yield None
            return
        try:
            status = os.fstat(fd)
            yield status.st_dev, status.st_ino
        finally:
            os.close(fd)

    def retire_index(self) -> bool:
        """Mark the index as unreadable, and unlink it. False if this SQLite's index has a form that is not known here.

        Caller: holds the writer lock and SQLite's own in a transaction, and closes this process's connections to the catalog next: they
        lose their locks on the index."""
        fd = self._files.open(self.index, os.O_RDWR)
        try:
            head = os.pread(fd, _HEADER.size, 0)
            words = list(_HEADER.unpack(head)) if len(head) == _HEADER.size else [0]
            if words[0] != _VERSION or words[10:] != _checksum(words[:10]):
                return False
            words[0] = _RETIRED
            header = _HEADER.pack(*words[:10], *_checksum(words[:10]))
            host.pwrite(fd, header + header, 0)
            self._files.unlink(self.index)
        finally:
            os.close(fd)  # after the unlinking: a process that is alone, since our locks are gone, would make the marked file anew
        return True

    def is_retired(self) -> bool:
        """Whether there is an index that a process marked and was killed before unlinking it. Caller: has no connection open."""
        try:
            fd = self._files.open(self.index)
        except FileNotFoundError:
            return False
        try:
            return os.pread(fd, 4, 0) == struct.pack("=I", _RETIRED)
        finally:
            os.close(fd)

    def unlink_retired(self) -> None:
        """Go on from there. Caller: holds the writer lock too."""
        if self.is_retired():
            self._files.unlink(self.index)


def _is_plain(path: str) -> bool | None:
    """Whether it is a plain file; None if it does not exist."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return None


def _checksum(words: list[int]) -> list[int]:
    """Of whole pairs of words, as SQLite has it."""
    a = b = 0
    for first, second in zip(words[::2], words[1::2], strict=True):
        a = (a + first + b) & 0xFFFFFFFF
        b = (b + second + a) & 0xFFFFFFFF
    return [a, b]


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
