"""Transactions, and the meaning of SQLite's errors."""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from forebay import errors
from forebay._engine.catalog import schema
from forebay._engine.files.layout import PAGE, CatalogBroken, DiskFull
from forebay._engine.index.head import NUMBERS as NUMBERS
from forebay._engine.index.head import SLOTS as SLOTS
from forebay._logs import logger

log = logger("forebay.catalog")

IDS = 64
SKIPPED = 1 << 32
_OTHER = SKIPPED << 8
AT_ONCE = 1024
"""Pages that one transaction gives back: the log has room for that many."""

KINDS = ("blob", "value", "tree", "pack", "session")
_MOST = 10_000
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


def number_below(value: Any, name: str, end: int) -> int:
    """A number of the catalog's own, which must lie below ``end``. Raises `CatalogBroken`: there is no other record of what is in use."""
    if type(value) is not int or not 0 <= value < end:
        raise CatalogBroken(f"the catalog is damaged: {name} is {value!r}", damaged=True)
    return value


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
        con.text_factory = _text
        return con.execute(sql, values).fetchall()


def _text(data: bytes) -> str | bytes:
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
        if not isinstance(error, sqlite3.Error):
            return
        code = getattr(error, "sqlite_errorcode", 0)
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        if code in _FULL:
            todo = "free some of the disk"
            raise DiskFull(f"the catalog cannot grow: {error} ({name}): {todo}", need=0, free=0, budget=0, limit="disk") from error
        # Python's own error: text that is not UTF-8
        undecodable = not code and isinstance(error, sqlite3.OperationalError)
        if code & 0xFF in _DAMAGE or code in _DAMAGE_EXACTLY or undecodable:
            raise CatalogBroken(f"the catalog is damaged: {error} ({name})", damaged=True) from error
        if code == sqlite3.SQLITE_IOERR_FSTAT:  # SQLite makes a log like the catalog, which has no name any more
            raise CatalogBroken(f"the catalog was deleted while it was opened: {error} ({name})") from error
        raise errors.CacheFault(f"the catalog failed: {error} ({name})") from error


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

    def run(self, sql: str, *values: Any) -> int:
        """Change rows; returns how many."""
        return self.con.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> int:
        """The same change for each of several rows; returns how many there were in all."""
        return self.con.executemany(sql, rows).rowcount

    def _take(self, count: int) -> int:
        """Take unused ids: the last of ``count``."""
        self.run("UPDATE meta SET value = value + ? WHERE name = 'next_id'", count)  # with RETURNING it takes thrice as long
        self.last_id = last = number_below(self.one("SELECT value FROM meta WHERE name = 'next_id'")[0], "next_id", NUMBERS)
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
        next_id = self.one("SELECT value FROM meta WHERE name = 'next_id'")[0]
        self._take(2 * SKIPPED + forgotten(number_below(next_id, "next_id", NUMBERS), self.given))
        self._ids[:] = 0, 0
