"""What is said to SQLite inside a transaction, and what its errors mean."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol

from forebay import errors

IDS = 64
_FULL = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_IOERR_TRUNCATE}


class CatalogBroken(errors.CacheFault):
    """The catalog is gone, damaged, or another root's: it has to be rebuilt. ``damaged``: SQLite says that its pages are."""

    damaged: bool = False


class DiskFull(errors.CacheFault):
    """SQLite found no room, or the disk quota is used up."""

    errno = errno.ENOSPC


class Rows(Protocol):
    """What can be asked with one statement: the catalog itself, or a transaction."""

    def all(self, sql: str, *values: Any) -> list[Any]: ...

    def one(self, sql: str, *values: Any) -> Any: ...


class translated:
    """Around what SQLite does: its errors become ours. A class, since a generator takes thrice as long."""

    __slots__ = ()

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not isinstance(error, sqlite3.Error):
            return
        code = getattr(error, "sqlite_errorcode", 0)
        name = getattr(error, "sqlite_errorname", type(error).__name__)
        if code in _FULL:
            raise DiskFull(f"the catalog cannot grow: {error} ({name})") from error
        if code & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "no such table" in str(error):
            raise CatalogBroken(f"the catalog is damaged: {error} ({name})", damaged=True) from error
        raise errors.CacheFault(f"the catalog failed: {error} ({name})") from error


class Txn:
    """A transaction that writes. Valid inside its ``with`` only; its thread holds the writer lock."""

    def __init__(self, con: sqlite3.Connection, ids: list[int]) -> None:
        self._con, self._ids = con, ids
        self.leftovers = False
        """Set by a writer that saw something to sweep: done once the lock is free."""
        self.then: Callable[[], None] | None = None
        """Called after the commit, still under the writer lock."""

    def all(self, sql: str, *values: Any) -> list[Any]:
        return self._con.execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        return self._con.execute(sql, values).fetchone()

    def run(self, sql: str, *values: Any) -> int:
        """Change rows; gives how many."""
        return self._con.execute(sql, values).rowcount

    def run_many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """The same change for each of several rows."""
        self._con.executemany(sql, rows)

    def is_open(self) -> bool:
        return self._con.in_transaction

    def take(self, name: str, count: int = 1) -> int:
        """The next number of a sequence in ``meta``: the last of ``count``."""
        self.run("UPDATE meta SET value = value + ? WHERE name = ?", count, name)  # with RETURNING it takes thrice as long
        return int(self.one("SELECT value FROM meta WHERE name = ?", name)[0])

    def new_ids(self, count: int = 1) -> range:
        """Ids in a row that none had before. A process takes many at once: others' ids do not tell which came first."""
        first, end = self._ids
        if end - first < count:
            end = self.take("next_id", IDS) + 1
            first = end - IDS
        self._ids[:] = first + count, end
        return range(first, first + count)

    def new_id(self) -> int:
        return self.new_ids()[0]
