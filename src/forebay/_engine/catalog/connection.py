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
import time
import weakref
from collections.abc import Callable, Iterator
from logging import INFO, WARNING
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from forebay import errors
from forebay._engine.catalog import schema, transactions
from forebay._engine.catalog.transactions import (
    LEAST_BALLAST,
    Ballast,
    LogFiles,
    Txn,
    UnreadableRows,
    Wal,
    fetched,
    no_room,
    number_of_space,
    translated,
)  # fmt: skip
from forebay._engine.catalog.writer_lock import Holding, WriterLock
from forebay._engine.files.layout import FULL, CatalogBroken, DiskFull
from forebay._engine.files.root import Root
from forebay._engine.index.head import CHANGED, NEXT, SharedHead
from forebay._kernel import host, interrupts, locks, waits
from forebay._logs import logger

if TYPE_CHECKING:
    from forebay._engine.catalog.salvage import Salvaged

log = logger("forebay.catalog")
T = TypeVar("T")

TRIES = 8
"""How often a statement is repeated where the index of the log was deleted meanwhile, or was being written."""
VOUCHED = 60.0
"""Seconds for which a fault of a call is not checked again, after nothing was found to be wrong with the catalog."""
# https://www.sqlite.org/lockingv3.html: a writer with a rollback journal has the first byte of the database locked; a process that closes
# it last locks all of those of which the second is one, while it copies the log.
_RESERVED, _SHARED = 0x4000_0001, 0x4000_0002


class Identity(NamedTuple):
    """Which catalog it is. ``first_id``: that it gave, since a file may get the inode of the one that was deleted."""

    device: int
    inode: int
    first_id: object


class _Peers:
    """What the catalogs of one path in this process share: SQLite lets their connections share the index of the log, so all are closed
    before one of them opens another index."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.catalogs: weakref.WeakSet[Catalog] = weakref.WeakSet()  # guarded by the mutex
        self._guard: Callable[[], locks.LockFile | None] = lambda: None

    def guard(self, path: str, opener: locks.Opener) -> locks.LockFile:
        """A lock file on the catalog itself. It is closed only when no connection is open: closing any descriptor of a file drops all of
        SQLite's locks on it. Caller: holds the mutex."""
        guard = self._guard() or locks.LockFile(path, opener, writable=False)
        self._guard = weakref.ref(guard)
        return guard


_peers: dict[tuple[int, str], _Peers] = {}  # by process and path: a forked child has none yet


class Catalog:
    """The catalog of one root. Threads share one connection; a process forked from this one opens its own."""

    def __init__(
        self, root: Root, words: waits.Words, head: SharedHead, *, immutable: bool = False,
        begin: Callable[[], None] = lambda: None, recover: Callable[[], None] = lambda: None, sweep: Callable[[], object] = lambda: None,
        budget: Callable[[], int] = lambda: 0,
    ) -> None:  # fmt: skip
        """``begin`` is called before the first transaction in a catalog, and begins the epoch; ``recover`` is called under the writer lock
        before each transaction, and after one that failed; ``sweep`` without any lock after one with leftovers; ``budget`` returns the
        budget of the root."""
        self._head, self._begin, self._recover, self._sweep, self._budget = head, begin, recover, sweep, budget
        self._root, self._words, self._immutable = root, words, immutable
        self._path, self._wal = str(root.catalog), Wal(str(root.catalog), root.files)
        self._writer = WriterLock(root, words)
        self._peers = self._peers_now()
        self._mutex = self._peers.mutex  # guards _con, _guard, _seen, _log_files, _pid, _ids
        self._guard: locks.LockFile | None = None
        self._con: sqlite3.Connection | None = None
        self._begun: Identity | None = None  # the catalog, as of `_seen`, in which the epoch has begun
        self._beginners: dict[int, Identity | None] = {}  # the threads that are about to begin it, and where
        self._spaces: dict[str, int] = {}  # see `space`; another one with each connection, which may be to another catalog
        self._seen: Identity | None = None
        self._first_id: object = None  # see `Identity`
        self._log_files: LogFiles | None = None  # that the connection has open
        self._log_size = 0  # before the transaction that runs
        self.log_over = 0
        """Bytes of the log that the budget counts, when a transaction last looked."""
        self._warned = False  # of the size of the log
        self.free = self.inodes_free = 0  # of the disk, when a transaction last looked
        self._copied_at = 0  # the size of the log when this process last copied it into the database
        self._unreadable = UnreadableRows()
        self._ids = [0, 0]  # ids from, to, that this process has taken and not used yet
        self.ballast = Ballast(root)
        self._still = False
        self._vouched: tuple[str, Identity | None, float] = "", None, 0.0  # a fault that was none, of which catalog, and when
        self.lost = ""  # why the previous catalog was replaced, until a caller has reported it
        self.salvaged: Salvaged | None = None
        """What was kept of the catalog that was replaced last."""
        self._pid = os.getpid()

    def _peers_now(self) -> _Peers:
        return _peers.setdefault((os.getpid(), self._path), _Peers())

    # -- opening ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Connect; create what is missing. Raises `CatalogBroken` where only `rebuild` helps."""
        if not self._root.read_only and not os.path.exists(self._path):
            from forebay._engine.catalog import making

            with self.writer():
                if making.create(self._root, self._wal, self.ballast) and any(
                    os.path.lexists(path) for path in (self._root.settings, self._root.shared_dir / "head")
                ):
                    self.lost = f"the catalog {self._path} was deleted"
        self.all("SELECT 1 FROM meta")

    def rebuild(self, why: str) -> bool:
        """Replace the catalog by what can be read of it, if two checks, each through a new connection, find that it is damaged, gone, or
        another root's. The caller then sweeps the files that no row names. Returns whether it was replaced or mended: not where another
        process was first, nor where a call took for damage what is none. Raises `CacheFault` where it cannot be checked or replaced."""
        from forebay._engine.catalog import making

        with self.writer():
            with self._mutex:
                self._restore_log()
                told, vouched, at = self._vouched
                seen = self._seen
                is_vouched = told == why and vouched is not None and vouched == seen and time.monotonic() < at + VOUCHED
                if is_vouched and not self._is_written_over_locked() and not self._wal.files().has_lost_log():
                    return False
                self._close_peers_locked()
                if self._wal.mend():  # rows are gone of which there are records
                    self._head.epoch, self._begun = 0, None
                found = self._damage_locked() and self._damage_locked()
                is_mended = not found and self._is_written_over_locked()
                if is_mended:
                    self._write_first_page_locked()
                    if self._is_written_over_locked():  # a reader stands in the way
                        self._close_peers_locked()
                        making.mend_first_page(self._root, self._wal)
                    found = self._damage_locked()  # what the log hid until now
                there = self._seen
                self._close_locked()
                if found and not os.access(self._path, os.W_OK) and os.path.exists(self._path):
                    raise errors.CacheFault(f"the catalog {self._path} is damaged or not writable: check its mode and owner")
                if found and making.mend_first_page(self._root, self._wal):
                    is_mended, found = True, self._damage_locked()
                    self._close_locked()
            if not found and is_mended:
                log.warning("%s: the first page of %s was written anew, and nothing is lost", why, self._path)
                return True
            if not found:
                self._vouched = why, there, time.monotonic()
                log.log(WARNING if seen == there else INFO, "%s: nothing is wrong with %s: it stays", why, self._path)
                return False
            log.info("%s: it is replaced: %s", why, found)
            self.salvaged = making.replace(self._root, self._wal, self.ballast, self._head)
            self.lost = why
            with self._mutex, translated():
                self._connect_locked()
            return True

    def damage(self) -> str | None:
        """What is wrong with the catalog, see `schema.damage`; None: nothing. Waits for the writer lock."""
        with self.writer(), self._mutex:
            return self._damage_locked()

    def _damage_locked(self) -> str | None:
        """What is wrong with the catalog that is there now, read through a new connection."""
        self._close_locked()  # another one may lie there by now, which is sound
        try:
            with translated():
                self._connect_locked()
                assert self._con is not None
                return schema.damage(self._con)
        except CatalogBroken as error:
            return str(error)

    def problem(self) -> str | None:
        """What is wrong with the pages of the catalog, or its tables and indexes; None: nothing. Reads all of it: seconds, for a million
        entries."""
        try:
            answer = self.one("PRAGMA integrity_check(1)")[0]  # a quick one does not compare indexes with their tables
            return schema.misshapen(self.all(schema.SHAPE)) if answer == "ok" else str(answer)
        except CatalogBroken as error:
            if not error.damaged:
                raise
            return str(error)

    def _connect_locked(self) -> None:
        self._peers.catalogs.add(self)
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
        seen, self._seen = self._seen, Identity(where.st_dev, where.st_ino, self._first_id)
        if seen not in (None, self._seen):
            self._seen = None
            con.close()
            raise CatalogBroken(f"the catalog {self._path} was replaced")
        self._con, self._pid, self._spaces = con, os.getpid(), {}

    def _connected_to_write(self) -> sqlite3.Connection:
        """SQLite plays back a rollback journal before it sees that there is a log, and removes whatever file that journal names, unless
        another holder has locked the byte that marks the journal as in use. So this process locks it, by a lock that is not SQLite's
        own."""
        self._check_plain()
        guard = self._guard = self._peers.guard(self._path, self._root.files.open)
        if not guard.is_same():
            guard.close()
        try:
            got = guard.try_lock(_RESERVED, exclusive=False)  # where another has it exclusively that does as well
        except FileNotFoundError as error:
            raise CatalogBroken(f"the catalog {self._path} is gone") from error
        try:
            if os.path.lexists(self._wal.journal):
                self._wal.remove(self._wal.journal)
            # To look twice: P1 finds no log / P2 connects, and makes both / P1 finds the index.
            if self._wal.files().has_lost_log() and self._wal.files().has_lost_log():
                raise CatalogBroken(f"the log {self._wal.log} was deleted", damaged=True)
            return self._connected("mode=rw")
        finally:
            if got:
                guard.unlock(_RESERVED)

    def _connected(self, how: str) -> sqlite3.Connection:
        con = self._opened(how)
        try:
            self._check_identity(con)
        except BaseException as error:
            con.close()
            # It could not make the log, and does not say why. On XFS a new file may need 32 KiB.
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_CANTOPEN and host.free_bytes(self._root.path) < LEAST_BALLAST:
                raise no_room(error) from error
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
            con.execute(f"PRAGMA journal_size_limit = {transactions.KEEP}")
        con.execute("PRAGMA temp_store = MEMORY")
        meta = dict(con.execute("SELECT name, value FROM meta WHERE name IN ('format', 'root', 'first_id')").fetchall())
        schema.refuse_newer(self._path, meta.get("format"))
        if meta.get("format") != schema.FORMAT:
            raise CatalogBroken(f"the catalog has format {meta.get('format')!r}, {schema.FORMAT} was expected")
        if meta.get("root") != self._root.id:
            raise CatalogBroken(f"the catalog in {self._root.path} belongs to another root: it was copied or moved here")
        if not self._root.read_only and con.execute("PRAGMA journal_mode").fetchone() != ("wal",):
            raise CatalogBroken(f"the catalog {self._path} has lost its log: its header says so", damaged=True)
        con.execute("SELECT 1 FROM meta").fetchone()  # opens the index of the log
        self._first_id = meta.get("first_id")
        self._log_files = self._wal.files()

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
        """The rows of one statement, fetched to the end: a reader that stays open would let the log grow."""
        interrupts.point()
        try:
            for _ in range(TRIES):
                rows = self._try_all(sql, values)
                if rows is not None:
                    return rows
        except DiskFull as error:  # even a reader needs room where the index of the log is yet to be made
            self.ballast.give_up(error)
            raise
        raise errors.WriterBusy(f"{self._wal.index} changes faster than the catalog can be read", waited=0.0, holder="")

    def _try_all(self, sql: str, values: tuple[Any, ...]) -> list[Any] | None:
        """None: the index of the log was deleted meanwhile, or was being written, and what was read is worth nothing."""
        with self._mutex, translated():
            try:
                rows = fetched(self._connection_locked(), sql, values)
            except Exception as error:
                being_written = getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_RECOVERY
                if self._is_current_locked() and not being_written:
                    self._unlock_locked(error)
                    raise
            else:
                if self._is_current_locked():
                    return rows
            self._close_peers_locked()
            return None

    def _is_current_locked(self) -> bool:
        """Whether the index of the log is the one that was opened, or that does not matter: during a transaction nobody else writes."""
        if self._con is None or self._still or self._con.in_transaction:
            return True
        return self._log_files is not None and self._log_files.are(self._wal.files())

    def _unlock_locked(self, error: BaseException) -> None:
        """Where SQLite waited in vain for one of its locks: this process may hold it itself, by an unlocking that the system refused."""
        if getattr(error, "sqlite_errorcode", 0) in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_PROTOCOL):
            self._close_peers_locked()

    def one(self, sql: str, *values: Any) -> Any:
        """The first row, or None."""
        rows = self.all(sql, *values)
        return rows[0] if rows else None

    def quick_one(self, sql: str, *values: Any) -> Any:
        """`one`, for a row that proves itself by a checksum: it does not look whether the index of the log was deleted meanwhile. Caller:
        knows that this process was not forked by C code (`Engine.check_usable`)."""
        with self._mutex:
            if self._con is not None and not self._still:
                with contextlib.suppress(sqlite3.Error):  # it is asked again
                    rows = self._con.execute(sql, values).fetchall()
                    return rows[0] if rows else None
        return self.one(sql, *values)

    def space(self, name: str) -> int:
        """See `SpaceRows.space`."""
        known = self._spaces  # T1 asks / T2 connects to another catalog / T1 notes the answer: not there
        number = known.get(name, 0)
        if not number and (number := number_of_space(self, name)):
            known[name] = number
        return number

    @property
    def unreadable_rows(self) -> list[str]:
        """Invalid rows that no transaction has set aside yet."""
        waiting = list(self._unreadable.waiting)  # in one step: other threads add to it
        return [f"{table} {', '.join(map(repr, key))}" for table, key in waiting]

    def report_unreadable(self, table: str, key: tuple[Any, ...], what: str) -> None:
        """See `Rows.report_unreadable`."""
        self._unreadable.note(table, key, what)

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

    # -- the epoch -------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        """Whether the epoch has begun in the catalog that is open. Until then only a thread that is `beginning` it there writes.

        T1 looks whether it has / T2 replaces a deleted catalog / T1 puts a key into it that a record of the lost one has, too: whichever
        record is found would be served. So each transaction looks."""
        return self._begun is not None and self._begun == self._seen

    @contextlib.contextmanager
    def beginning(self) -> Iterator[Identity | None]:
        """Around what has to be done before the first write: its own writes are the only ones. Yields the catalog that it is done for.

        T1 compares rows and records / T2 replaces the catalog, which was deleted / T1 notes that the epoch has begun: not in that one."""
        me = threading.get_ident()
        is_nested = me in self._beginners
        if not is_nested:
            self._beginners[me] = self._identity()
        try:
            yield self._beginners[me]
        finally:
            if not is_nested:
                del self._beginners[me]

    def _identity(self) -> Identity | None:
        self.one("SELECT 1 FROM meta")
        return self._seen

    def is_copy(self, seen: Identity | None) -> bool:
        """Whether another program has put a copy, perhaps an older one, in the place of the catalog in which the epoch has begun."""
        before = self._begun
        return before is not None and seen is not None and before != seen and before.first_id == seen.first_id

    def begun(self, seen: Identity | None) -> None:
        """The epoch has begun in this catalog; None: in none."""
        self._begun = seen

    @contextlib.contextmanager
    def write(self, timeout: float | None = None) -> Iterator[Txn]:
        """One transaction under the writer lock. Leaves by an exception: nothing of it is kept. ``timeout``: see `WriterLock.holding`."""
        interrupts.point()
        if not (self.has_begun or threading.get_ident() in self._beginners or self._root.read_only):
            with waits.time_limit(timeout):
                self._begin()
        try:
            with self._writer.holding(timeout):
                self.check_same()
                self._recover()
                txn = Txn(self._ids, self._unreadable, self._renew_locked)
                try:
                    # A handler may use the cache, whose statements would be a part of this transaction.
                    with interrupts.shielded(), self._mutex, translated():
                        try:
                            self._begin_locked(txn)
                            yield txn
                            self._commit_locked(txn)
                        except BaseException as error:
                            self._roll_back_locked(txn)
                            self._unlock_locked(error)
                            raise
                    self._settle(txn)
                except BaseException:
                    self._make_agree(txn)
                    raise
                finally:
                    if txn.at_end:
                        txn.end()
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

    def again(self, work: Callable[[Txn], object]) -> None:
        """One more transaction, of a caller that holds the writer lock and is in none; nothing follows its commit."""
        txn = Txn(self._ids, self._unreadable, self._renew_locked)
        with interrupts.shielded(), self._mutex, translated():
            try:
                self._begin_locked(txn)
                work(txn)
                self._commit_locked(txn)
            except BaseException:
                self._roll_back_locked(txn)
                raise

    def _begin_locked(self, txn: Txn) -> None:
        """Before it, make way: the log does not grow above its bound, and on a full disk it starts again in the blocks that it has."""
        over = self.look_at_log()
        is_full = (
            self._log_size > transactions.KEEP // 4
            and self.free <= transactions.EASY
            and host.free_bytes(self._root.path) <= transactions.KEEP
        )
        if (over or is_full) and self._copy_log_locked():
            self._log_size = self.log_over = 0  # this transaction starts it again
        elif over and over > self._budget() // transactions.PART:
            message = f"{self._wal.log} has {self._log_size:,} bytes, since {self._wal.reader()} stands still inside a query"
            raise errors.CacheFault(f"{message}: continue that process, or end it")
        txn.con, txn.is_committed = self._connection_locked(), False
        txn.spaces = self._spaces
        if not self.has_begun and self._beginners.get(threading.get_ident()) != self._seen:
            raise CatalogBroken(f"the catalog {self._path} was replaced")
        if self._is_written_over_locked():
            raise CatalogBroken(f"another program has written to the first page of {self._path}", damaged=True)
        txn.con.execute("BEGIN IMMEDIATE")
        words = self._head.words()
        txn.seen, txn.given = words[CHANGED], words[NEXT]
        txn.change = max(time.monotonic_ns(), txn.seen + 1)
        if self._unreadable.waiting:
            txn.set_aside_unreadable()

    def _is_written_over_locked(self) -> bool:
        """Whether another program has written over the first page. SQLite does not see that while it remembers the page, or the log has
        it: then SQLite writes the page anew, and whatever else was written over stays."""
        guard, magic = self._guard, transactions.MAGIC
        return guard is not None and guard.read(len(magic)) != magic and not guard.is_lost()

    def _write_first_page_locked(self) -> None:
        """Have SQLite write the first page of the file anew, where no reader is in the way: it knows the page from the log, but copies
        nothing twice."""
        with translated():
            con = self._connection_locked()
            (version,) = con.execute("PRAGMA user_version").fetchone()
            con.execute(f"PRAGMA user_version = {version % 1_000_000 + 1}")  # a change of that page, which says nothing to anybody
            con.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _commit_locked(self, txn: Txn) -> None:
        words = self._head.words()
        words[CHANGED] = txn.change
        self.check_named()  # else the files of this transaction may be in another root by now
        host.step("commit", self._path)
        txn.run("COMMIT")
        txn.is_committed = True
        if txn.last_id:
            words[NEXT], txn.last_id = txn.last_id, 0
        host.step("committed", self._path)

    def _renew_locked(self, txn: Txn) -> None:
        """Commit, settle, and begin again without releasing the writer lock."""
        self._commit_locked(txn)
        self._settle(txn)
        self._begin_locked(txn)

    def _settle(self, txn: Txn) -> None:
        """After a commit, under the writer lock: what has to follow before anybody else writes."""
        while txn.after_commit:
            txn.after_commit.popleft()()
        self._head.finish()
        if txn.at_end:
            txn.end()
        if self._log_size <= transactions.SOFT:
            self._copied_at, self._warned = 0, False
        elif not self._copied_at <= self._log_size < self._copied_at + transactions.STEP:
            self._bound_log()

    def _roll_back_locked(self, txn: Txn) -> None:
        self._ids = [0, 0]  # some may have been taken in this very transaction
        if self._con is not None and self._con.in_transaction:
            self._con.execute("ROLLBACK")
        words = self._head.words()
        words[CHANGED] = max(words[CHANGED], txn.change) + 1  # what this transaction would have left is known to nobody

    def _make_agree(self, txn: Txn) -> None:
        """After an exception, under the writer lock: an interrupt may have come after the commit, before all was done that follows it."""
        try:
            while txn.is_committed and txn.after_commit:
                txn.after_commit.popleft()()
            self._recover()
        except (errors.CacheFault, OSError) as error:  # the next writer does it
            log.info("%s: what a failed transaction left stays for the next: %s", self._root.path, str(error))

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
        """Check that the paths still name the files that are open: else commits would go to files that no other process sees. Raises
        `CatalogBroken`: ids of spaces and owners from the old catalog mean nothing in the new one."""
        if not self._writer.file.has_name():
            raise CatalogBroken(f"the root {self._root.path} was deleted or replaced")
        with self._mutex:
            try:
                self.check_named()
            except CatalogBroken:
                self._close_locked()
                raise
            if self._con is not None and self._log_files != self._wal.files():
                self._restore_log()
                self._close_peers_locked()

    def check_named(self) -> None:
        """Raise `CatalogBroken` if the path of the catalog leads to another one than what is open."""
        try:
            where = os.stat(self._path)
        except FileNotFoundError as error:
            raise CatalogBroken(f"the catalog {self._path} was deleted") from error
        if self._seen is not None and self._seen[:2] != (where.st_dev, where.st_ino):
            raise CatalogBroken(f"the catalog {self._path} was replaced")

    def _restore_log(self) -> None:
        """Where the log was deleted alone, write it anew from a process that still has it open. Its commits are in no other place, and the
        index, which all share, says that they are there. Caller: holds the writer lock. Raises what the disk raises."""
        content = None if self._wal.size() else self._wal.deleted()
        if content is not None:
            try:
                self._root.replace(Path(self._wal.log), content)
            except OSError as error:
                if error.errno not in FULL or not self.ballast.give_up(no_room(error)):
                    raise
                self._root.replace(Path(self._wal.log), content)
            log.warning("%s was deleted: it was written anew by a process that had it open", self._wal.log)

    def has_its_lock(self) -> bool:
        """Whether the writer lock is still the one that other processes take."""
        return self._writer.file.is_same()

    # -- room ------------------------------------------------------------------------------------------------------

    def look_at_log(self) -> int:
        """Returns `log_over`, as it is now. Above `KEEP` the log has the size of what is in use: it is cut when it starts again."""
        self._log_size = size = self._wal.size()
        self.log_over = max(0, size - transactions.FREE)
        return self.log_over

    def _bound_log(self) -> None:
        """Copy the log into the database where it has grown, whichever process wrote it. The next transaction restarts it.

        Caller: holds the writer lock, so that no process can be stopped while it copies, and continue later."""
        self._copied_at = size = self._log_size
        with self._mutex:
            self._copy_log_locked()
        if size >= transactions.WARN and not self._warned:
            self._warned = True
            message = "%s has %d MiB, which count against the budget: %s stands still inside a query: continue that process, or end it"
            log.warning(message, self._wal.log, size >> 20, self._wal.reader())

    def _copy_log_locked(self) -> bool:
        """Whether all of it is copied: then it starts again. Never waits; commits stay valid whatever fails here."""
        try:
            host.step("checkpoint", self._path)
            busy, frames, copied = self._connection_locked().execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
        except (sqlite3.Error, errors.CacheFault, OSError) as error:
            log.info("the log %s stays as it is: %s", self._wal.log, str(error))
            return False
        return not busy and bool(frames == copied)

    # -- process life ----------------------------------------------------------------------------------------------

    def _close_locked(self) -> None:
        con, self._con, self._seen, opened, self._log_files, self._ids = self._con, None, None, self._log_files, None, [0, 0]
        if con is not None and self._writer.file.is_lost():
            # the job closed SQLite's descriptors, and may have reopened their numbers: closing would write into its files
            host.never_free(con)
        elif con is not None and self._pid == os.getpid():
            # The process that closes the catalog last copies the log into it: by the index that it has, which may be older than the log.
            got, guard = False, self._guard
            with contextlib.suppress(OSError):  # it has no name any more, or is another user's: SQLite copies nothing either
                is_theirs = opened is None or not opened.are(self._wal.files())
                got = guard is not None and is_theirs and guard.try_lock(_SHARED, exclusive=False)
            try:
                with contextlib.suppress(sqlite3.Error):
                    con.close()
            finally:
                if got and guard is not None:
                    guard.unlock(_SHARED)

    def _close_peers_locked(self) -> None:
        """Close all connections of this process. Caller: continues with the same catalog, and notices if it was replaced."""
        for catalog in self._peers.catalogs:
            catalog._pause_locked()

    def _pause_locked(self) -> None:
        """Close the connection; the next one notices if the catalog was replaced meanwhile."""
        seen = self._seen
        self._close_locked()
        self._seen = seen

    def close(self) -> None:
        """Close the connection and the lock file. A later call reopens them."""
        with self._mutex:
            self._close_locked()
            if self._guard is not None and all(catalog._con is None for catalog in self._peers.catalogs):  # else SQLite's locks would go
                self._guard.close()
        if self.ballast.owed:
            self.ballast.restore()
        self._writer.close()

    def before_fork(self) -> None:
        self._mutex.acquire()  # held over the fork: no thread is inside SQLite while the process is copied
        self._pause_locked()
        self._writer.file.before_fork()

    def after_fork_parent(self) -> None:
        self._writer.file.after_fork_parent()
        self._mutex.release()

    def after_fork_child(self) -> None:
        for name in [name for name in _peers if name[0] != os.getpid()]:  # a process id may be reused, and an ancestor's mutex may be held
            _peers.pop(name, None)
        if self._guard is not None:
            self._guard.after_fork_child()
        self._peers = self._peers_now()
        self._mutex = self._peers.mutex
        self._con, self._log_files, self._pid, self._ids = None, None, os.getpid(), [0, 0]
        self._beginners = {me: seen for me, seen in self._beginners.items() if me == threading.get_ident()}
        self._writer.after_fork_child()
