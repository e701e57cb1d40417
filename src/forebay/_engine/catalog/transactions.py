"""Transactions of the catalog, the write-ahead log, and the meaning of SQLite's errors.

**Files beside the catalog:** its write-ahead log, its ballast, and foreign files.

SQLite restarts its log once all of it is in the database and no reader needs it any more. A process that is stopped inside a SELECT needs
it as long as it is stopped: the log grows meanwhile, and what it has above `FREE` counts against the budget."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

from forebay import errors
from forebay._engine.catalog import schema
from forebay._engine.files.layout import PAGE, CatalogBroken, DiskFull
from forebay._engine.files.root import Root
from forebay._engine.index.head import NUMBERS as NUMBERS
from forebay._engine.index.head import SLOTS as SLOTS
from forebay._kernel import host, locks
from forebay._kernel.below import Below
from forebay._logs import logger

log = logger("forebay.catalog")

IDS = 64
SKIPPED = 1 << 32
_OTHER = SKIPPED << 8
AT_ONCE = 1024
"""Pages that one transaction gives back: the log has room for that many."""

KINDS = ("blob", "value", "tree", "pack", "session")
_MOST = 10_000
# The numbers of a catalog begin at random: one that a process knows from a catalog that was lost is that of no space of the next one.
_NEW_SPACE = (
    "INSERT OR IGNORE INTO spaces(id, name, kind) VALUES"
    " ((SELECT coalesce((SELECT max(id) + 1 FROM spaces), (SELECT value FROM meta WHERE name = 'next_id'))), ?, ?)"
)
_KEYS = {"segments": "pack IS ? AND number IS ?", "failures": "space IS ? AND key IS ?", "meta": "name IS ?"}  # other tables: their id
# What a sound catalog in its own file never answers. `SQLITE_ERROR` is a table or a column that is not there, or a sum of numbers that
# Forebay did not write; the file's header can make SQLite treat a writable file as read-only.
_DAMAGE = {
    sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_INTERNAL, sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH, sqlite3.SQLITE_FORMAT,
}  # fmt: skip
_DAMAGE_EXACTLY = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR_SHORT_READ}
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}


class Rows(Protocol):
    """What can be asked with one statement: the catalog itself, or a transaction."""

    def all(self, sql: str, *values: Any) -> list[Any]: ...

    def one(self, sql: str, *values: Any) -> Any: ...

    def report_unreadable(self, table: str, key: tuple[Any, ...], what: str) -> None:
        """Report a row with values that Forebay did not write: it is served to no caller, logged once, and set aside by the next
        transaction."""


class SpaceRows(Rows, Protocol):
    """`Rows` of which the spaces are asked for by name."""

    def space(self, name: str) -> int:
        """The number of the space of this name in this catalog; 0, which no entry has, if there is none."""


def number_below(value: Any, name: str, end: int) -> int:
    """A number of the catalog's own, which must lie below ``end``. Raises `CatalogBroken`: there is no other record of what is in use."""
    if type(value) is not int or not 0 <= value < end:
        raise CatalogBroken(f"the catalog is damaged: {name} is {value!r}", damaged=True)
    return value


def number_of_space(rows: Rows, name: str) -> int:
    """See `SpaceRows.space`, which remembers it."""
    row = rows.one("SELECT id FROM spaces WHERE name = ?", name)
    return number_below(row[0], f"the number of the space {name!r}", NUMBERS) if row else 0


def forgotten(next_id: int, given: int) -> int:
    """How many ids a catalog has forgotten that it gave, since its log was deleted, or a copy was restored. ``given``: the largest that is
    known. A new catalog has other ids altogether."""
    return given - next_id if 0 < given - next_id < _OTHER else 0


class UnreadableRows:
    """Invalid rows that this process knows of: a limited number at once; the others are noticed again. Each method is a single step,
    without a lock."""

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, tuple[Any, ...]], None] = {}
        self._reported: set[tuple[str, tuple[Any, ...]]] = set()

    def note(self, table: str, key: tuple[Any, ...], what: str) -> None:
        row = table, key
        if len(self.waiting) < _MOST:
            self.waiting[row] = None
        if row not in self._reported and len(self._reported) < _MOST:
            self._reported.add(row)
            log.warning("the catalog is damaged, or was written by another program: %s is set aside", what)


def fetched(con: sqlite3.Connection, sql: str, values: Sequence[Any]) -> list[Any]:
    """All rows of a statement. A text that is not UTF-8 is returned as bytes, so that the other rows can be read."""
    try:
        return con.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if "decode to UTF-8" not in str(error):
            raise
        con.text_factory = text_or_bytes
        return con.execute(sql, values).fetchall()


def text_or_bytes(data: bytes) -> str | bytes:
    """A text of the catalog, or its bytes where they are not UTF-8."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class translated:
    """Translates SQLite's errors into Forebay's. A class, since a generator takes three times as long."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, UnicodeDecodeError):  # of SQLite's own message, which names a table that is not called so
            raise CatalogBroken(f"the catalog is damaged: {error}", damaged=True) from error
        if isinstance(error, UnicodeEncodeError):
            raise errors.CacheFault(f"the catalog cannot hold {error.object!r}: {error.reason}") from error
        if isinstance(error, OverflowError):  # a number that no row can hold
            raise errors.CacheFault(f"the catalog cannot hold a number: {error}") from error
        if not isinstance(error, sqlite3.Error):
            return
        code = getattr(error, "sqlite_errorcode", 0)
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        if code in _FULL:
            raise no_room(error) from error
        # Python's own error: text that is not UTF-8
        undecodable = not code and isinstance(error, sqlite3.OperationalError)
        if code & 0xFF in _DAMAGE or code in _DAMAGE_EXACTLY or undecodable:
            raise CatalogBroken(f"the catalog is damaged: {error} ({name})", damaged=True) from error
        if code == sqlite3.SQLITE_IOERR_FSTAT:  # SQLite makes a log like the catalog, which has no name any more
            raise CatalogBroken(f"the catalog was deleted while it was opened: {error} ({name})") from error
        raise errors.CacheFault(f"the catalog failed: {error} ({name})") from error


def no_room(error: BaseException) -> DiskFull:
    """What is raised for an error of SQLite whose cause is that the disk is full."""
    message = f"the catalog cannot grow: {error} ({getattr(error, 'sqlite_errorname', type(error).__name__)}): free some of the disk"
    return DiskFull(message, need=0, free=0, budget=0, limit="disk")


class Txn:
    """A transaction that writes. Valid inside its ``with`` only; its thread holds the writer lock."""

    con: sqlite3.Connection

    def __init__(self, ids: list[int], unreadable: UnreadableRows, renew: Callable[[Txn], None]) -> None:
        self._ids, self._unreadable, self._renew = ids, unreadable, renew
        self.seen = self.change = 0
        """The word `CHANGED` of the head as it was before, and as the commit sets it: so what this transaction knows of the catalog holds
        for the next one that finds it."""
        self.given = self.last_id = 0
        """The largest ids that the catalog has given: before this transaction, and by it; 0: not known, and none."""
        self.spaces: dict[str, int] = {}
        """The numbers of the spaces that the connection knows, by name."""
        self.is_committed = False
        self.leftovers = False
        """Set by a writer that saw something to sweep: done once the lock is free."""
        self.after_commit: deque[Callable[[], object]] = deque()
        """Called after the commit, still under the writer lock."""
        self.at_end: list[Callable[[], object]] = []
        """Called under the writer lock when all is done, committed or not."""
        self.after_release: list[Callable[[], object]] = []
        """Called after the commit, with no lock held. A crash before it is of no consequence."""

    def renew(self) -> None:
        """Commit what was changed so far, and go on in a new transaction, without another process or thread writing in between."""
        self._renew(self)

    def end(self) -> None:
        """Call what is to be called `at_end`, once."""
        while self.at_end:
            self.at_end.pop()()

    def all(self, sql: str, *values: Any) -> list[Any]:
        return fetched(self.con, sql, values)

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        rows = fetched(self.con, sql, values)
        return rows[0] if rows else None

    def space(self, name: str, kind: str = "") -> int:
        """See `SpaceRows.space`. With a ``kind`` the space is created if there is none."""
        number = self.spaces.get(name, 0)
        if not number:
            number = number_of_space(self, name)
            if not number and kind:
                self.run(_NEW_SPACE, name, kind)
                number = number_of_space(self, name)
            if number:
                self.after_commit.append(partial(self.spaces.__setitem__, name, number))
        return number

    def run(self, sql: str, *values: Any) -> int:
        """Change rows; returns how many."""
        return self.con.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """The same change for each of several rows; returns how many there were in all."""
        return self.con.executemany(sql, rows).rowcount

    def _take(self, count: int) -> int:
        """Take unused ids: the last of ``count``."""
        self.run("UPDATE meta SET value = value + ? WHERE name = 'next_id'", count)  # with RETURNING it takes thrice as long
        self.last_id = last = self._next_id()
        if forgotten(number_below(last - count, "next_id", NUMBERS), self.given) and count < SKIPPED:
            raise CatalogBroken("the catalog is older than what was committed: its log was deleted, or a copy was restored")
        return last

    def report_unreadable(self, table: str, key: tuple[Any, ...], what: str) -> None:
        """See `Rows.report_unreadable`; set aside at once."""
        self._unreadable.note(table, key, what)
        self.set_aside_unreadable()

    def set_aside_unreadable(self) -> None:
        """Set aside the invalid rows. An entry's files are removed like those of a superseded one, whatever their suffix."""
        self.seen = -1
        while self._unreadable.waiting:
            (table, key), _ = self._unreadable.waiting.popitem()
            if table == "entries":
                self._set_entry_aside(key[0])
            else:
                self.run(f"DELETE FROM {table} WHERE {_KEYS.get(table, 'id IS ?')}", *key)

    def _set_entry_aside(self, id: Any) -> None:
        row = self.one("SELECT space FROM entries WHERE id IS ?", id)
        if row is None:
            return
        if type(id) is int and 0 < id < NUMBERS:
            self.run(
                "UPDATE entries SET state = 1, suffix = '', life = 'cached', key = '', size = 0, charge = 0, validator = NULL,"
                " slot = CASE WHEN typeof(slot) = 'integer' AND slot BETWEEN 0 AND 4294967295 THEN slot ELSE 0 END,"
                f" checksum = x'', meta = '', created = 0.0, kind = CASE WHEN kind IN {KINDS} THEN kind ELSE 'blob' END WHERE id IS ?", id,
            )  # fmt: skip
            self.leftovers = True
        else:
            self.run("DELETE FROM entries WHERE id IS ?", id)
        self.run(schema.RECOUNT, row[0])

    def new_ids(self, count: int = 1) -> range:
        """Consecutive unused ids. A process takes many at once, so ids of different processes do not tell which came first."""
        first, end = self._ids
        if end - first < count:
            taken = max(count, IDS)
            end = self._take(taken) + 1
            first = end - taken
        self._ids[:] = first + count, end
        return range(first, first + count)

    def give_back(self, size: int) -> bool:
        """Give free pages of the file back to the disk: ``size`` bytes, but at most `AT_ONCE` pages. False if there are none: then only
        evictions make room. Others move to their places, so this is worth its work where files need the room: values use free pages."""
        free = self.one("PRAGMA freelist_count")[0]
        for _ in range(min(-(-size // PAGE), free, AT_ONCE)):
            self.run("PRAGMA incremental_vacuum(1)")  # of a larger number Python takes the first step only
        return bool(free)

    def skip_ids(self) -> None:
        """Give no id again that a lost transaction gave: a crash of the machine loses fewer than `SKIPPED`."""
        self._take(2 * SKIPPED + forgotten(self._next_id(), self.given))
        self._ids[:] = 0, 0

    def _next_id(self) -> int:
        """The last id that the catalog has given. Raises `CatalogBroken`."""
        row = self.one("SELECT value FROM meta WHERE name = 'next_id'")
        return number_below(row[0] if row else None, "next_id", NUMBERS)


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
# The index has its head twice. Of two that differ, as after a kill, the second is newer: it tells the number of frames, and of the last one
# the checksums and the salt, which this frame has too.
_INDEX_HEAD, _COUNTED_AT, _COUNTED = 96, 48 + 16, struct.Struct("=I4xII8s")
_LOG_HEAD, _FRAME = 32, struct.Struct(">8x8sII")
# https://www.sqlite.org/fileformat.html: how it is written and how it is read; 2 by a log, 1 by a rollback journal.
MAGIC = b"SQLite format 3\0"
_MODE_AT, _LOG_MODE = 18, b"\x02\x02"


class LogFiles(NamedTuple):
    """By device and inode, which files the log and its index are; None: there is none."""

    log: tuple[int, int] | None
    its_index: tuple[int, int] | None

    def are(self, now: LogFiles) -> bool:
        """Whether a connection that has opened these two may go on where ``now`` have the names: as long as the index has, nobody writes by
        another one. Where the log alone was deleted, it has what all have written."""
        return self.its_index is not None and self.its_index == now.its_index and now.log in (None, self.log)

    def has_lost_log(self) -> bool:
        """Whether the log alone was deleted: SQLite makes it before the index, and removes it after that."""
        return self.its_index is not None and self.log is None


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

    def mend(self) -> bool:
        """Remove what is `strange`, and restore the header's flag that there is a log. Returns whether commits are lost: the log was
        deleted, and only its index is left. Caller: holds the writer lock, and this process has no open connection: closing a descriptor
        of the catalog would drop its locks."""
        is_lost = not self.exists() and bool(_is_plain(self.index)) and self._files.unlink(self.index)
        for path in (self.log, self.index):
            if _is_plain(path) is False:
                self.remove(path)
        try:
            fd = self._files.open(self._catalog, os.O_RDWR)
        except OSError:
            return is_lost  # it is gone, not a plain file, or not writable: the caller notices
        try:
            head = os.pread(fd, _MODE_AT + 2, 0)
            if head.startswith(MAGIC) and head[_MODE_AT:] not in (_LOG_MODE, b""):
                log.warning("%s: another program switched its log off: it is switched on again", self._catalog)
                host.pwrite(fd, _LOG_MODE, _MODE_AT)
        finally:
            os.close(fd)
        return is_lost

    def remove(self, path: str) -> None:
        """Remove a foreign file, pipe, link or empty directory beside the catalog."""
        self._files.make_way(path)
        log.warning("%s: nothing of Forebay's: it was removed", path)

    def size(self) -> int:
        """Of the log, in bytes; 0 where there is none."""
        try:
            return os.stat(self.log).st_size
        except FileNotFoundError:
            return 0

    def files(self) -> LogFiles:
        """Which files have the names of the log and its index now."""
        return LogFiles(locks.file_of(self.log), locks.file_of(self.index))

    def deleted(self) -> bytes | None:
        """What is in the log that has lost its name, where a process still has it open: the last frame that the index counts is in it. An
        idle process may have an older log open, which was deleted before this one."""
        counted = self._counted()
        if counted is not None:
            for file in locks.deleted_files(os.path.basename(self.log)):
                with contextlib.suppress(OSError):  # closed meanwhile
                    if (content := _content(file, counted)) is not None:
                        return content
        return None

    def _counted(self) -> tuple[int, bytes, int, int] | None:
        """Of the last commit, by the index: the end of its last frame in the log, and the salt and checksums of that frame."""
        index = locks.file_of(self.index)
        # A new descriptor, once closed, would drop the locks on the index that SQLite has in this process.
        own = next((fd for fd in locks.numbers("/proc/self/fd") if index is not None and locks.file_of(fd) == index), None)
        try:
            fd = self._files.open(self.index, os.O_RDONLY) if own is None else own
            try:
                head = os.pread(fd, _INDEX_HEAD, 0)
            finally:
                if own is None:
                    os.close(fd)
            frames, sum0, sum1, salt = _COUNTED.unpack_from(head, _COUNTED_AT)
        except (OSError, struct.error):
            return None
        return (_LOG_HEAD + frames * (_FRAME.size + PAGE), salt, sum0, sum1) if frames else None

    def reader(self) -> str:
        """The processes that have a place in the log, in words for people."""
        pids = {pid for byte in range(_READERS, _READERS + _COUNT) for pid in locks.posix_holders(self.index, byte)} - {os.getpid()}
        return ", ".join(map(locks.describe_process, sorted(pids))) or "a process"


def _content(path: str, counted: tuple[int, bytes, int, int]) -> bytes | None:
    """The log in this file up to the end of the last commit; None if it is another one. A checksum covers all frames before it."""
    end, *last = counted
    content = locks.read_open(path, end)
    return content if len(content) == end and [*_FRAME.unpack_from(content, end - PAGE - _FRAME.size)] == last else None


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
