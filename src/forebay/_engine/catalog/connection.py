"""The connection to the catalog, and transactions.

SQLite is never entered by a process that inherited its state over a fork: `before_fork` closes the connection, both sides
reopen at the next call. The mutex is held only inside SQLite, never while waiting for the writer lock.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from forebay import errors
from forebay._engine.catalog import schema
from forebay._engine.catalog.names import Names
from forebay._engine.catalog.peers import Apart, Peers, forget_ancestors, peers_of
from forebay._engine.catalog.transactions import CatalogBroken as CatalogBroken
from forebay._engine.catalog.transactions import DiskFull as DiskFull
from forebay._engine.catalog.transactions import Rows as Rows
from forebay._engine.catalog.transactions import Txn as Txn
from forebay._engine.catalog.transactions import UnreadableRows, fetched, translated
from forebay._engine.catalog.wal import EASY, KEEP, REFUSE, RETIRE, SOFT, STEP, Ballast, Wal
from forebay._engine.catalog.writer import Holding, WriterLock
from forebay._engine.files.layout import PAGE
from forebay._engine.files.root import Root
from forebay._kernel import host, waits
from forebay._logs import logger

log = logger("forebay.catalog")
T = TypeVar("T")

TRIES, LOOKS = 3, 8
"""How often a statement that other processes' writes have overtaken is repeated: before it takes the writer lock; where it cannot."""
_RESERVED = 0x4000_0001  # https://www.sqlite.org/lockingv3.html: a writer with a rollback journal has this byte of the database locked


class Catalog:
    """The catalog of one root. Threads share one connection; a process forked from this one opens its own."""

    def __init__(
        self, root: Root, words: waits.Words, *, immutable: bool = False,
        recover: Callable[[], None] = lambda: None, sweep: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        """``recover`` is called under the writer lock before each transaction, ``sweep`` without any lock after one with leftovers."""
        self._recover, self._sweep = recover, sweep
        self._root, self._words, self._immutable = root, words, immutable
        self._path, self._wal = str(root.catalog), Wal(str(root.catalog), root.files)
        self._writer = WriterLock(root, words)
        self._names = Names(str(root.path), self._writer.state)
        self._mutex = self._join_peers()  # guards _con, _seen, _index, _pid, _ids
        self._con: sqlite3.Connection | None = None
        self._seen: tuple[int, int] | None = None
        self._index: tuple[int, int] | None = None
        self._log_size = 0  # before the transaction that runs
        self.free = self.inodes_free = 0  # of the disk, when a transaction last looked
        self._copied_at = 0  # the size of the log when this process last copied it into the database
        self._unreadable = UnreadableRows()
        self._ids, self._number = [0, 0], 0  # ids from, to, that this process has taken and not used yet; see `Txn`
        self.ballast = Ballast(root)
        self._still = False
        self._suspect: tuple[int, int] | None = None
        self.lost = ""  # why the previous catalog was replaced, until a caller has reported it
        self._pid = os.getpid()

    def _join_peers(self) -> threading.RLock:
        self._peers: Peers[Catalog] = peers_of(self._path, self._root.files.open)
        with self._peers.mutex:
            self._peers.catalogs.add(self)
            self._guard = self._peers.guard()
        return self._peers.mutex

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect; create what is missing. Raises `CatalogBroken` where only `rebuild` helps."""
        if not self._root.read_only and not os.path.exists(self._path):
            with self.writer():
                if self._create() and any(os.path.lexists(path) for path in (self._root.settings, self._root.slots_dir / "000")):
                    self.lost = f"the catalog {self._path} was deleted"
        self.all("SELECT 1 FROM meta")  # looks again where the index of the log was retired just then

    def rebuild(self, why: str) -> None:
        """Replace the catalog by an empty one. The caller then sweeps the files that no row names. If two processes have seen the
        damage, the second one finds a sound catalog and keeps it."""
        with self.writer():
            with self._mutex:
                self._close_peers_locked()
                self._seen = None  # another one may lie there by now, which is sound
                self._wal.mend()
                if self._is_sound_locked():
                    return
                self._close_locked()
            if not os.access(self._path, os.W_OK) and os.path.exists(self._path):
                raise errors.CacheFault(f"the catalog {self._path} is damaged or not writable: check its mode and owner")
            self._root.files.make_way(self._path)
            self.lost = why if self._create() else self.lost
            with self._mutex, translated():
                self._connect_locked()

    def _is_sound_locked(self) -> bool:
        """Whether SQLite finds no fault with the catalog that is there now. Not all damage shows in its pages: a catalog that the same call
        reports as damaged a second time is replaced."""
        try:
            with translated():
                self._connect_locked()
                if self.problem(apart=False) or self._seen == self._suspect or (con := self._con) is None or not schema.is_sane(con):
                    return False
                con.execute("BEGIN IMMEDIATE")
                con.execute("ROLLBACK")
        except errors.CacheFault as error:
            log.info("%s", str(error))
            return False
        self._suspect = self._seen
        return True

    def trust(self) -> None:
        """Forget that this catalog was reported as damaged and proved sound: it has worked since."""
        self._suspect = None

    def problem(self, *, apart: bool = True) -> str | None:
        """What SQLite finds wrong with the pages of the catalog; None: nothing. Reads all of it: seconds, for a million entries. ``apart``:
        other threads of this process go on meanwhile."""
        try:
            (answer,) = self._until_current(self._try_apart if apart else self._try_all, "PRAGMA quick_check(1)", ())[0]
        except CatalogBroken as error:
            if not error.damaged:
                raise
            return str(error)
        return None if answer == "ok" else str(answer)

    def _create(self) -> bool:
        """Caller: holds the writer lock. The database gets its name only when it is whole. False if there is one."""
        if os.path.exists(self._path):
            return False
        draft = f"{self._path}.new"
        for ending in ("", "-wal", "-shm", "-journal"):
            self._root.files.make_way(draft + ending)
        os.close(self._root.files.create(draft, self._root.file_mode))  # SQLite copies the mode of this file to those beside it
        host.step("catalog-create", draft)
        with translated(), contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as con:
            con.execute(f"PRAGMA page_size = {PAGE}")
            con.execute("PRAGMA auto_vacuum = INCREMENTAL")  # can only be set before there is a page
            con.execute("PRAGMA journal_mode = WAL")
            schema.create(con, self._root.id)
        self.ballast.make()
        for ending in ("-wal", "-shm"):
            # The log of a catalog that was deleted: SQLite would take it for the new one's, and ids would be given twice.
            self._root.files.make_way(self._path + ending)
        self._root.files.rename(draft, self._path)
        return True

    def _connect_locked(self) -> None:
        if os.path.islink(self._path):
            raise CatalogBroken(f"the catalog {self._path} is a symbolic link, which Forebay does not follow", damaged=True)
        # The process that closes a catalog last removes its log. Without a log no process writes, and in a read-only directory
        # SQLite could not create one.
        self._still = self._immutable or (self._root.read_only and not self._wal.exists())
        if self._still:
            con = self._connected("immutable=1&mode=ro")
        elif strange := self._wal.strange():
            raise CatalogBroken(f"{strange} is not a plain file", damaged=True)
        elif not self._root.read_only:
            con = self._connected_to_write()
        elif os.path.lexists(self._wal.journal):
            raise CatalogBroken(f"{self._wal.journal} is not Forebay's: SQLite would play it back", damaged=True)
        else:
            try:
                con = self._connected("mode=ro&readonly_shm=1")  # else SQLite writes into the journal's index, or makes it
            except sqlite3.OperationalError:  # the index is gone, or a writer died while changing it
                con = self._connected("mode=ro")
        try:
            where = os.stat(self._path)
        except FileNotFoundError as error:  # P1 connects / P2 finds the catalog broken, and removes it before it makes another
            con.close()
            raise CatalogBroken(f"the catalog {self._path} is gone") from error
        seen, self._seen = self._seen, (where.st_dev, where.st_ino)
        if seen not in (None, self._seen):
            self._seen = None
            con.close()
            raise CatalogBroken(f"the catalog {self._path} was replaced")
        self._con, self._pid = con, os.getpid()

    def _connected_to_write(self) -> sqlite3.Connection:
        """SQLite plays back a rollback journal before it sees that there is a log, and removes whatever file that journal names, unless
        another holder has locked the byte that marks the journal as in use. So this process locks it, by a lock that is not SQLite's
        own."""
        self._check_plain()
        guard = self._guard
        if not guard.is_same():
            guard.close()
        try:
            got = guard.try_lock(_RESERVED, exclusive=False)  # where another has it exclusively that does as well
        except FileNotFoundError as error:
            raise CatalogBroken(f"the catalog {self._path} is gone") from error
        try:
            if os.path.lexists(self._wal.journal):
                self._wal.remove(self._wal.journal)
            return self._connected("mode=rw")
        finally:
            if got:
                guard.unlock(_RESERVED)

    def _connected(self, how: str) -> sqlite3.Connection:
        con = self._opened(how)
        try:
            self._check_identity(con)
        except BaseException:
            con.close()
            raise
        return con

    def _opened(self, how: str) -> sqlite3.Connection:
        self._check_plain()
        try:
            return sqlite3.connect(
                self._wal.uri(how), uri=True, isolation_level=None, check_same_thread=False, timeout=2.0, cached_statements=256
            )
        except sqlite3.OperationalError as error:
            if not os.path.exists(self._path):
                raise CatalogBroken(f"the catalog {self._path} is gone: {error}") from error
            raise

    def _check_plain(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise CatalogBroken(f"the catalog {self._path} is not a plain file", damaged=True)

    def _check_identity(self, con: sqlite3.Connection) -> None:
        if not self._root.read_only:
            con.execute("PRAGMA synchronous = NORMAL")
            con.execute("PRAGMA wal_autocheckpoint = 0")
            con.execute(f"PRAGMA journal_size_limit = {KEEP}")
        con.execute("PRAGMA temp_store = MEMORY")
        con.execute("SELECT 1 FROM meta").fetchone()  # opens the index of the log
        self._index = self._wal.current_index()  # were it another one than was opened, that one would be unreadable to what follows
        if not self._root.read_only and con.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise CatalogBroken(f"the catalog {self._path} has lost its log: its header says so", damaged=True)
        meta = dict(con.execute("SELECT name, value FROM meta WHERE name IN ('format', 'root')").fetchall())
        if meta.get("format") != schema.FORMAT:
            raise CatalogBroken(f"the catalog has format {meta.get('format')!r}, {schema.FORMAT} was expected")
        if meta.get("root") != self._root.id:
            raise CatalogBroken(f"the catalog in {self._root.path} belongs to another root: it was copied or moved here")

    def _connection_locked(self) -> sqlite3.Connection:
        if self._pid != os.getpid():  # forked behind Python's back: SQLite's state here is the parent's, not to be used nor closed
            raise errors.CacheFault("this process was forked by C code: it cannot use the cache")
        if self._still and not self._immutable and self._wal.exists():
            self._close_locked()  # another process writes now
        if self._con is None:
            self._connect_locked()
        assert self._con is not None
        return self._con

    # -- reading and writing ---------------------------------------------------------------------------------------

    def all(self, sql: str, *values: Any) -> list[Any]:
        """The rows of one statement, fetched to the end: a reader that stays open would let the log grow.

        A statement that takes longer than other processes need to write some MiB is repeated, and finally run under the writer lock."""
        return self._until_current(self._try_all, sql, values)

    def _until_current(self, attempt: Callable[[str, tuple[Any, ...]], list[Any] | None], sql: str, values: tuple[Any, ...]) -> list[Any]:
        try:
            for _ in range(LOOKS if self._root.read_only else TRIES):
                rows = attempt(sql, values)
                if rows is not None:
                    return rows
            if not self._root.read_only:
                with contextlib.nullcontext() if self._writer.is_mine() else self.writer():
                    self._unlink_retired()
                    rows = attempt(sql, values)
        except DiskFull as error:  # even a reader needs room where the index of the log is yet to be made
            self.ballast.give_up(error)
            raise
        if rows is None:
            raise errors.WriterBusy(f"the catalog {self._path} changes faster than it can be read", waited=0.0, holder="")
        return rows

    def _try_all(self, sql: str, values: tuple[Any, ...]) -> list[Any] | None:
        """None: the index of the log was retired meanwhile, and what was read is worth nothing."""
        with self._mutex, translated():
            try:
                con = self._connection_locked()
                rows = fetched(con, sql, values)
            except Exception as error:
                if not self._was_retired_locked(error):
                    raise
                return None
            if self._is_current_locked():
                return rows
            self._close_peers_locked()
            return None

    def _try_apart(self, sql: str, values: tuple[Any, ...]) -> list[Any] | None:
        """`_try_all`, by a connection of its own and outside the mutex. None: it was stopped, for a fork or since the index was retired."""
        if self._root.read_only:
            return self._try_all(sql, values)
        one, index = Apart(), None
        try:
            with self._mutex, translated():
                if self._try_all("SELECT 1 FROM meta", ()) is None:
                    return None
                index = self._index
                self._peers.begin_apart(one, self._opened("mode=ro"))
            with translated():
                rows = one.run(sql)
        except errors.CacheFault:
            if index is None or index == self._wal.current_index():
                raise
            return None
        finally:
            self._peers.end_apart(one)
        return rows if index == self._wal.current_index() else None

    def _is_current_locked(self) -> bool:
        """Whether the index of the log is the one that was opened. During a transaction no process can retire it."""
        if self._con is None or self._still or self._con.in_transaction:
            return True
        return self._index is not None and self._index == self._wal.current_index()

    def _was_retired_locked(self, error: Exception) -> bool:
        """Whether that is why a statement failed, or since the index was being written: then this process's connections are closed."""
        code, again = getattr(error, "sqlite_errorcode", 0), not self._is_current_locked()
        unread = code & 0xFF == sqlite3.SQLITE_CANTOPEN and not (self._con and self._con.in_transaction)
        if not (again or unread or code == sqlite3.SQLITE_READONLY_RECOVERY):
            return False
        with self._wal.pinned_index() as index:
            # P1 marks the index / P2 cannot read it, and sees the same file still / P1 unlinks it, and its mark with it.
            # Where it was never opened there is nothing to compare: the holder of the writer lock knows that it was not retired.
            again |= not unread or (index != self._index if self._con else not self._writer.is_mine())
            self._close_peers_locked()
            return again or self._wal.is_retired() or self._wal.current_index() != index

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        rows = self.all(sql, *values)
        return rows[0] if rows else None

    def quick_one(self, sql: str, *values: Any) -> Any:
        """`one`, for a row that proves itself by a checksum: it does not look whether the index of the log was retired meanwhile. Caller:
        knows that this process was not forked by C code (`Engine.check_usable`)."""
        with self._mutex:
            if self._con is not None and not self._still:
                with contextlib.suppress(sqlite3.Error):  # it is asked again
                    rows = self._con.execute(sql, values).fetchall()
                    return rows[0] if rows else None
        return self.one(sql, *values)

    @property
    def unreadable_rows(self) -> list[str]:
        """Invalid rows that no transaction has set aside yet."""
        waiting = list(self._unreadable.waiting)  # in one step: other threads add to it
        return [f"{table} {', '.join(map(repr, key))}" for table, key in waiting]

    def report_unreadable(self, table: str, key: tuple[Any, ...], what: str) -> None:
        """See `Rows.report_unreadable`."""
        self._unreadable.note(table, key, what)

    def has_slot(self, slot: int) -> bool:
        """See `Rows.has_slot`."""
        return self._unreadable.has_slot(self, slot)

    def writer(self, timeout: float | None = None) -> Holding:
        """The writer lock, alone: of all threads and processes one holds it. Raises `WriterBusy` where it cannot be had: see
        `WriterLock.holding`."""
        return self._writer.holding(timeout)

    def sync(self) -> None:
        """Have on the disk what was committed. Only the log: to close a descriptor of the catalog would release SQLite's locks on it."""
        fd = self._root.files.open_write(self._wal.log)
        try:
            host.sync(fd)
        finally:
            os.close(fd)

    def still(self) -> Holding:
        """See `WriterLock.still`."""
        return self._writer.still()

    @contextlib.contextmanager
    def write(self, timeout: float | None = None) -> Iterator[Txn]:
        """One transaction under the writer lock. Leaves by an exception: nothing of it is kept. ``timeout``: see `WriterLock.holding`."""
        try:
            with self._writer.holding(timeout):
                self.check_same()
                self._recover()
                with self._mutex, translated():
                    txn = Txn(self._begin_locked(), self._ids, self._unreadable, self._number)
                    try:
                        if self._unreadable.waiting:
                            txn.set_aside_unreadable()
                        yield txn
                        self._commit(txn)
                    except BaseException:
                        self._roll_back(txn)
                        raise
                    self._bound_log_locked()
        except DiskFull as error:
            self.ballast.give_up(error)
            raise
        self._tidy(txn)

    def insist(self, work: Callable[[Txn], T], timeout: float | None = None) -> T:
        """Return what ``work`` returns in a transaction; it is called again if the disk was full and releasing the ballast made room."""
        try:
            with self.write(timeout) as txn:
                return work(txn)
        except DiskFull as error:
            if not error.relieved:
                raise
        with self.write(timeout) as txn:
            return work(txn)

    def _begin_locked(self) -> sqlite3.Connection:
        """Caller: holds the writer lock."""
        if not self._names.noted and not self._is_current_locked():
            self._close_peers_locked()
        try:
            self._make_way_locked()
            con = self._connection_locked()
            con.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            if not self._was_retired_locked(error):
                raise
            self._unlink_retired()
            con = self._connection_locked()
            con.execute("BEGIN IMMEDIATE")
        self._number += 1
        return con

    def _commit(self, txn: Txn) -> None:
        host.step("commit", self._path)
        txn.run("COMMIT")
        host.step("committed", self._path)
        for call in txn.after_commit:
            call()

    def _roll_back(self, txn: Txn) -> None:
        self._ids, self._number = [0, 0], self._number + 1  # ids may have been taken in this very transaction
        if txn.is_open():
            txn.run("ROLLBACK")

    def _tidy(self, txn: Txn) -> None:
        """After a commit, with no lock held."""
        for call in txn.after_release:
            call()
        if self.ballast.owed:
            self.ballast.restore()
        if txn.leftovers:
            try:
                self._sweep()
            except (errors.CacheFault, OSError) as error:  # the caller's write is committed; the next writer sweeps
                log.warning("sweeping %s failed: %s", self._root.path, str(error))

    def check_same(self) -> None:
        """Check that the path still names the file that is open: else commits would go to a file that no other process sees. Raises
        `CatalogBroken`: ids of spaces and owners from the old file mean nothing in the new one. Looks closely only where names have
        changed since it last did: see `Names`."""
        if self._names.are_same():
            return
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
            if self._con is not None and self._is_current_locked():
                self._names.note()

    def has_its_lock(self) -> bool:
        """Whether the writer lock is still the one that other processes take."""
        return self._writer.is_same()

    # -- room ------------------------------------------------------------------------------------------------------

    def _make_way_locked(self) -> None:
        """Before a transaction: the log does not grow above its bound, and on a full disk it starts again in the blocks that it has."""
        size = self._log_size = self._wal.size()
        if size <= REFUSE and (size <= KEEP // 4 or self.free > EASY or host.free_bytes(self._root.path) > KEEP):
            return
        if not self._try_to_bound_locked(size) and size > REFUSE:
            raise errors.CacheFault(f"{self._wal.log} has {size:,} bytes and cannot be copied into the catalog")

    def _bound_log_locked(self) -> None:
        """After a commit: copy the log into the database if it has grown, whichever process wrote it. The next transaction restarts it.

        Caller: holds the writer lock, so that no process can be stopped while it copies, and continue later."""
        size = self._log_size
        if size <= SOFT:
            self._copied_at = 0
        elif not self._copied_at <= size < self._copied_at + STEP:
            self._copied_at = size
            self._try_to_bound_locked(size)

    def _try_to_bound_locked(self, size: int) -> bool:
        """Return whether the log is completely copied. Never waits; commits stay valid whatever fails here."""
        try:
            done = self._copy_log_locked()
            if size >= RETIRE:  # it did not start again for several transactions: a reader is in the way
                self._retire_index_locked()
                done = self._copy_log_locked()
        except (sqlite3.Error, errors.CacheFault, OSError) as error:
            log.info("the log %s stays as it is: %s", self._wal.log, str(error))
            return False
        return done

    def _copy_log_locked(self) -> bool:
        host.step("checkpoint", self._path)
        busy, frames, copied = self._connection_locked().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        return not busy and bool(frames == copied)

    def _retire_index_locked(self) -> None:
        """Continue without the processes that are reading: they notice, and read again. See the module `wal`."""
        con = self._connection_locked()
        con.execute("BEGIN IMMEDIATE")  # while SQLite's writer lock is held, no process recreates the index
        try:
            retired = self._wal.retire_index()
        finally:
            con.execute("ROLLBACK")
        if retired:
            log.info("a stopped process reads %s: its log continues without that process", self._path)
            self._close_peers_locked()

    def _unlink_retired(self) -> None:
        """End what a process began that was killed before it had unlinked the index. Caller: holds the writer lock."""
        with self._mutex:
            self._close_peers_locked()
            self._wal.unlink_retired()

    # -- process life ----------------------------------------------------------------------------------------------

    def _close_locked(self) -> None:
        con, self._con, self._seen, self._index, self._ids = self._con, None, None, None, [0, 0]
        self._number += 1
        self._names.forget()
        if con is not None and self._writer.is_lost():
            # the job closed SQLite's descriptors, and may have reopened their numbers: closing would write into its files
            host.never_free(con)
        elif con is not None and self._pid == os.getpid():
            with contextlib.suppress(sqlite3.Error):
                con.close()

    def _close_peers_locked(self) -> None:
        """Close all connections of this process. Caller: continues with the same catalog, and notices if it was replaced."""
        self._peers.stop_apart()
        for catalog in self._peers.catalogs:
            seen = catalog._seen
            catalog._close_locked()
            catalog._seen = seen

    def close(self) -> None:
        """Close the connection and the lock file. A later call reopens them."""
        with self._mutex:
            self._close_locked()
            if all(catalog._con is None for catalog in self._peers.catalogs):  # else SQLite's locks on the file would go with it
                self._guard.close()
        if self.ballast.owed:
            self.ballast.restore()
        self._writer.close()

    def before_fork(self) -> None:
        self._mutex.acquire()  # held over the fork: no thread is inside SQLite while the process is copied
        self._peers.stop_apart()
        self._close_locked()
        self._writer.before_fork()

    def after_fork_parent(self) -> None:
        self._writer.after_fork_parent()
        self._mutex.release()

    def after_fork_child(self) -> None:
        forget_ancestors()
        self._guard.after_fork_child(keep=False)
        self._mutex = self._join_peers()
        self._con, self._seen, self._index, self._pid, self._ids = None, None, None, os.getpid(), [0, 0]
        self._names.forget()
        self._writer.after_fork_child()
