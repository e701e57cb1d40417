"""The catalogs of one path in this process, and their long queries on separate connections.

The connections of a process share SQLite's index of the log, and none may be inside SQLite at a fork. So a long query that runs outside
the mutex is interrupted, and waited for, before the index is replaced and before a fork; then it starts again."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from forebay._kernel import locks

C = TypeVar("C")

_ASK_AGAIN = 0.01


class Apart:
    """One long query."""

    def __init__(self) -> None:
        self.con: sqlite3.Connection | None = None
        self.ended = threading.Event()

    def run(self, sql: str) -> list[Any] | None:
        """The rows of a statement, None if it was stopped."""
        assert self.con is not None
        try:
            return self.con.execute(sql).fetchall()
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
            return None


class Peers(Generic[C]):
    """See the module. ``C``: a catalog, of which nothing is called here."""

    def __init__(self, path: str, opener: locks.Opener) -> None:
        self._guard: Callable[[], locks.LockFile | None] = lambda: None
        self._path, self._opener = path, opener
        self.mutex = threading.RLock()
        self.catalogs: weakref.WeakSet[C] = weakref.WeakSet()  # guarded by the mutex
        self._apart: set[Apart] = set()  # added to under the mutex, removed from by single steps

    def guard(self) -> locks.LockFile:
        """A lock file on the catalog itself, shared by its users here. It is closed only when no connection is open: closing any
        descriptor of a file drops all of SQLite's locks on it. Caller: holds the mutex."""
        guard = self._guard() or locks.LockFile(self._path, self._opener, writable=False)
        self._guard = weakref.ref(guard)
        return guard

    def begin_apart(self, one: Apart, con: sqlite3.Connection) -> None:
        """Caller: holds the mutex now, not while it runs, and calls `end_apart` in any event."""
        one.con = con
        self._apart.add(one)

    def end_apart(self, one: Apart) -> None:
        if one.con is not None:
            one.con.close()
        self._apart.discard(one)
        one.ended.set()

    def stop_apart(self) -> None:
        """Wait until all queries have ended. Caller: holds the mutex, so that none begins meanwhile."""
        for one in list(self._apart):
            while one.con is not None and not one.ended.is_set():
                with contextlib.suppress(sqlite3.ProgrammingError):  # it was closed a moment ago
                    one.con.interrupt()
                one.ended.wait(_ASK_AGAIN)  # an interrupt before the statement begins is lost


_peers: dict[tuple[int, str], Peers[Any]] = {}  # by process and path: a forked child has none yet


def peers_of(path: str, opener: locks.Opener) -> Peers[Any]:
    """Those of this path in this process."""
    return _peers.setdefault((os.getpid(), path), Peers(path, opener))


def forget_ancestors() -> None:
    """In a child: a process id may be reused, and the mutex of an ancestor's entry may be held."""
    for name in [name for name in _peers if name[0] != os.getpid()]:
        _peers.pop(name, None)
