"""The connection to the catalog, and transactions.

SQLite is never entered by a process that inherited its state over a fork: `before_fork` closes the connection, both sides
reopen at the next call. The mutex is held only inside SQLite, never while waiting for the writer lock.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from typing import Any

from forebay import errors
from forebay._engine.catalog import schema
from forebay._engine.catalog.transactions import CatalogBroken as CatalogBroken
from forebay._engine.catalog.transactions import DiskFull as DiskFull
from forebay._engine.catalog.transactions import Rows as Rows
from forebay._engine.catalog.transactions import Txn as Txn
from forebay._engine.catalog.transactions import translated
from forebay._engine.catalog.writer import Holding, Writer
from forebay._engine.root import Root
from forebay._kernel import host, waits

log = logging.getLogger("forebay.catalog")

BALLAST = 4 << 20
PAGE = 4096
WAL_SOFT, WAL_HARD, TIDY_EVERY = 4 << 20, 12 << 20, 16
CHECKPOINT_EVERY = 96


class Catalog:
    """The catalog of one root. Threads share one connection; a process forked from this one opens its own."""

    def __init__(self, root: Root, words: waits.Words, *, immutable: bool = False) -> None:
        self._root, self._words, self._immutable = root, words, immutable
        self._path, self._journal = str(root.catalog), f"{root.catalog}-wal"
        self._writer = Writer(root, words)
        self._mutex = threading.RLock()  # guards _con, _seen, _pid, _ids
        self._con: sqlite3.Connection | None = None
        self._seen: tuple[int, int] | None = None
        self._ids = [0, 0]  # from, to: taken by this process, and nobody's yet
        self._commits = 0
        self._without_ballast = False
        self._still = False
        self._pid = os.getpid()
        self.sweeper: Callable[[], object] | None = None
        self.recover: Callable[[], None] | None = None

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect; create what is missing. Raises `CatalogBroken` where only `rebuild` helps."""
        if not self._root.read_only and not os.path.exists(self._path):
            with self.writer():
                self._create()
        with self._mutex, translated():
            self._connect_locked()

    def rebuild(self) -> None:
        """Throw the catalog away and begin an empty one. The caller then sweeps the files that no row names.

        Two processes may both have seen the damage: who comes second finds a sound catalog and keeps it."""
        with self.writer():
            with self._mutex:
                self._close_locked()
                with contextlib.suppress(errors.CacheFault), translated():
                    self._connect_locked()
                    if self._con and self._con.execute("PRAGMA quick_check(1)").fetchone() == ("ok",):
                        return
                self._close_locked()
            log.warning(
                "the catalog of %s is damaged or missing: starting with an empty one: what it held is fetched again", self._root.path
            )
            host.unlink(self._path)
            self._create()
            with self._mutex, translated():
                self._connect_locked()

    def _create(self) -> None:
        """Caller: holds the writer lock. The database gets its name only when it is whole."""
        if os.path.exists(self._path):
            return
        draft = f"{self._path}.new"
        for ending in ("", "-wal", "-shm", "-journal"):
            host.unlink(draft + ending)
        host.step("catalog-create", draft)
        with translated(), contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as con:
            con.execute(f"PRAGMA page_size = {PAGE}")
            con.execute("PRAGMA auto_vacuum = INCREMENTAL")
            con.execute("PRAGMA journal_mode = WAL")
            schema.create(con, self._root.id)
        if self._root.shared:
            host.chmod(draft, 0o660)
        self.make_ballast()
        for ending in ("-wal", "-shm"):
            # A journal whose catalog somebody deleted: SQLite would take it for the new one's, and ids would be given twice.
            host.unlink(self._path + ending)
        host.rename(draft, self._path)

    def _connect_locked(self) -> None:
        # Who closes a catalog last removes its journal. Where that is gone nobody writes, and in a directory that only may be read
        # SQLite could not make one.
        self._still = self._immutable or (self._root.read_only and not os.path.exists(self._journal))
        if self._still:
            uri = f"file:{_quoted(self._path)}?immutable=1"
        else:
            uri = f"file:{_quoted(self._path)}?mode={'ro' if self._root.read_only else 'rw'}"
        try:
            con = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, timeout=2.0, cached_statements=256)
        except sqlite3.OperationalError as error:
            if not os.path.exists(self._path):
                raise CatalogBroken(f"the catalog {self._path} is gone: {error}") from error
            raise
        try:
            self._check_identity(con)
        except BaseException:
            con.close()
            raise
        where = os.stat(self._path)
        self._con, self._seen, self._pid = con, (where.st_dev, where.st_ino), os.getpid()

    def _check_identity(self, con: sqlite3.Connection) -> None:
        if not self._root.read_only:
            con.execute("PRAGMA synchronous = NORMAL")
            con.execute("PRAGMA wal_autocheckpoint = 0")
        con.execute("PRAGMA temp_store = MEMORY")
        found = dict(con.execute("SELECT name, value FROM meta WHERE name IN ('format', 'root')").fetchall())
        if found.get("format") != schema.FORMAT:
            raise CatalogBroken(f"the catalog has format {found.get('format')!r}, {schema.FORMAT} was expected")
        if found.get("root") != self._root.id:
            raise CatalogBroken(f"the catalog in {self._root.path} belongs to another root: it was copied or moved here")

    def _connection_locked(self) -> sqlite3.Connection:
        if self._pid != os.getpid():  # forked behind Python's back: SQLite's state here is the parent's, not to be used nor closed
            raise errors.CacheFault("this process was forked by C code: it reads past the cache")
        if self._still and not self._immutable and os.path.exists(self._journal):
            self._close_locked()  # somebody writes now
        if self._con is None:
            self._connect_locked()
        assert self._con is not None
        return self._con

    # -- reading and writing ---------------------------------------------------------------------------------------

    def all(self, sql: str, *values: Any) -> list[Any]:
        """The rows of one statement, fetched to the end: a reader that stays open would let the journal grow."""
        with self._mutex, translated():
            return self._connection_locked().execute(sql, values).fetchall()

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        found = self.all(sql, *values)
        return found[0] if found else None

    def writer(self) -> Holding:
        """The writer lock, alone: of all threads and processes one holds it. Raises `CacheFault` where it cannot be had."""
        return self._writer.holding()

    @contextlib.contextmanager
    def write(self) -> Iterator[Txn]:
        """One transaction under the writer lock. Leaves by an exception: nothing of it is kept."""
        with self._writer.holding():
            self.check_same()
            if self.recover is not None:
                self.recover()
            with self._mutex, translated():
                con = self._connection_locked()
                con.execute("BEGIN IMMEDIATE")
                txn = Txn(con, self._ids)
                try:
                    yield txn
                    self._commit(txn)
                except BaseException:
                    self._roll_back(txn)
                    raise
        self._tidy(txn)

    def _commit(self, txn: Txn) -> None:
        host.step("commit", self._path)
        txn.run("COMMIT")
        host.step("committed", self._path)
        if txn.then is not None:
            txn.then()

    def _roll_back(self, txn: Txn) -> None:
        self._ids = [0, 0]  # they may have been taken in this very transaction
        if txn.is_open():
            txn.run("ROLLBACK")

    def _tidy(self, txn: Txn) -> None:
        """After a commit, with no lock held: what has to be done from time to time."""
        self._commits += 1
        if self._commits % TIDY_EVERY == 0:
            self._tidy_journal()
        if txn.leftovers and self.sweeper is not None:
            try:
                self.sweeper()
            except (errors.CacheFault, OSError) as error:  # what the caller wrote stands; the next writer sweeps
                log.warning("sweeping %s failed: %s", self._root.path, str(error))

    def check_same(self) -> None:
        """The path must still name the file that we have open: else commits would go to a file that nobody will see again.
        Raises `CatalogBroken`: numbers of spaces and owners that came from the old one mean nothing in the new one."""
        if not self._writer.is_same():
            raise CatalogBroken(f"the root {self._root.path} was deleted or replaced")
        try:
            where = os.stat(self._path)
        except FileNotFoundError as error:
            raise CatalogBroken(f"the catalog {self._path} was deleted") from error
        with self._mutex:
            if self._seen is not None and self._seen != (where.st_dev, where.st_ino):
                self._close_locked()
                raise CatalogBroken(f"the catalog {self._path} was replaced")

    def has_its_lock(self) -> bool:
        """Whether the writer lock is still the one that other processes take."""
        return self._writer.is_same()

    # -- room ------------------------------------------------------------------------------------------------------

    def _tidy_journal(self) -> None:
        """Copy the journal into the database from time to time, outside the writer lock; cut it where others kept it from beginning anew.

        The journal's size does not say how much of it is in use, so a process counts its own transactions."""
        if self._without_ballast and host.disk(self._root.path).free > 4 * BALLAST:
            self.make_ballast()
            self._without_ballast = False
        size = self._journal_size()
        with contextlib.suppress(errors.CacheFault):
            if size >= WAL_HARD:
                with self.writer():
                    self.all("PRAGMA wal_checkpoint(TRUNCATE)")
            elif size >= WAL_SOFT and self._commits >= CHECKPOINT_EVERY:
                self.all("PRAGMA wal_checkpoint(PASSIVE)")
                self._commits = 0

    def _journal_size(self) -> int:
        try:
            return os.stat(self._journal).st_size
        except FileNotFoundError:
            return 0

    def give_back_pages(self) -> None:
        """Return free pages to the file system."""
        with self.writer(), self._mutex, translated():
            self._connection_locked().executescript("PRAGMA incremental_vacuum")
        with contextlib.suppress(errors.CacheFault), self.writer():
            self.all("PRAGMA wal_checkpoint(TRUNCATE)")

    def make_ballast(self) -> None:
        """Keep a few MiB of the disk, to be given up when it is full: with a fresh journal even a DELETE needs room."""
        try:
            self._root.install(self._root.ballast, lambda fd: host.allocate(fd, 0, BALLAST))
        except OSError as error:
            log.info("no room for the ballast %s: %s", self._root.ballast, error)

    def drop_ballast(self) -> bool:
        """Give the ballast up. False if it was gone already."""
        self._without_ballast = True
        return host.unlink(self._root.ballast)

    # -- process life ----------------------------------------------------------------------------------------------

    def _close_locked(self) -> None:
        con, self._con, self._seen, self._ids = self._con, None, None, [0, 0]
        if con is not None and self._writer.is_lost():
            host.never_free(con)  # the job closed SQLite's descriptors, and may have opened others: closing writes into them
        elif con is not None and self._pid == os.getpid():
            with contextlib.suppress(sqlite3.Error):
                con.close()

    def close(self) -> None:
        """Close the connection and the lock file. A later call reopens them."""
        with self._mutex:
            self._close_locked()
        self._writer.close()

    def before_fork(self) -> None:
        self._mutex.acquire()  # held over the fork: no thread is inside SQLite while the process is copied
        self._close_locked()
        self._writer.before_fork()

    def after_fork_parent(self) -> None:
        self._writer.after_fork_parent()
        self._mutex.release()

    def after_fork_child(self) -> None:
        self._mutex = threading.RLock()
        self._con, self._seen, self._pid, self._ids = None, None, os.getpid(), [0, 0]
        self._writer.after_fork_child()


def _quoted(path: str) -> str:
    return path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
