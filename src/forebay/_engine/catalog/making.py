"""Makes the file of a catalog: a new one, or one that replaces a damaged one, with what can be read of that."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable

from forebay import errors
from forebay._engine.catalog import pages, salvage, schema
from forebay._engine.catalog.salvage import Salvaged
from forebay._engine.catalog.transactions import Ballast, Wal, translated
from forebay._engine.files.layout import PAGE
from forebay._engine.files.root import Root
from forebay._engine.index.head import NEXT, SharedHead
from forebay._kernel import host
from forebay._logs import logger

log = logger("forebay.catalog")

SET_ASIDE = 8 << 20
"""Bytes of a damaged catalog that are kept at most."""
# https://www.sqlite.org/fileformat.html: the number of pages, and the first of the list of free ones with their number.
_PAGES_AT, _FREE_AT = 28, 32
BESIDE = "-wal", "-shm", "-journal"
"""How the names of the files end that SQLite makes beside a database."""


def create(root: Root, wal: Wal, ballast: Ballast) -> bool:
    """Make an empty catalog; False if there is one. Caller: holds the writer lock."""
    if os.path.exists(root.catalog):
        return False
    _make(root)
    ballast.make()
    _name(root, wal)
    return True


def replace(root: Root, wal: Wal, ballast: Ballast, head: SharedHead) -> Salvaged | None:
    """Replace a damaged catalog by one with what can be read of it, and set it aside. Returns what was kept; None: nothing could be read.

    Until the last step the damaged catalog has its name: a process that finds it after a crash begins again. Caller: holds the writer
    lock, and has no open connection."""
    found, given = list[Salvaged](), 0
    with contextlib.suppress(errors.CacheFault):  # the head may be damaged, too
        given = head.words()[NEXT]
    try:
        _make(root, lambda new: found.extend(_salvaged(root, wal, new, given)))
    except (sqlite3.Error, ValueError) as error:
        log.warning("%s: nothing of the damaged catalog can be kept: %s", root.path, str(error))
        found.clear()
        _make(root)
    ballast.make()
    _set_aside(root, wal)
    _name(root, wal)
    return found[0] if found else None


def _draft(root: Root) -> str:
    return f"{root.catalog}.new"


def _make(root: Root, fill: Callable[[sqlite3.Connection], object] = lambda new: None) -> None:
    """Make a catalog under the name of a draft. Raises what ``fill`` raises: then the draft is worth nothing."""
    draft = _draft(root)
    for ending in ("", *BESIDE):
        root.files.make_way(draft + ending)
    os.close(root.files.create(draft, root.file_mode))  # SQLite copies the mode of this file to those beside it
    host.step("catalog-create", draft)
    with schema.connected(draft) as con:
        with translated():
            con.execute(f"PRAGMA page_size = {PAGE}")
            con.execute("PRAGMA auto_vacuum = INCREMENTAL")  # can only be set before there is a page
            con.execute("PRAGMA journal_mode = WAL")
            schema.create(con, root.id)
        fill(con)


def mend_first_page(root: Root, wal: Wal) -> bool:
    """Where the first page of a damaged catalog is garbage, write it anew: without it nothing could be read. It says where the tables
    begin, which is the same in every catalog; what it said of free pages is lost. False if that is not what is wrong. Caller: holds the
    writer lock, and no connection of this process is open or is opened meanwhile."""
    if not _is_file(root.catalog):
        return False
    with contextlib.suppress(sqlite3.Error), schema.connected(wal.uri("mode=ro&immutable=1")) as damaged:
        damaged.execute("SELECT * FROM sqlite_master").fetchall()
        return False
    _make(root)
    draft = root.files.open(_draft(root))
    try:
        first, least = bytearray(os.pread(draft, PAGE, 0)), os.fstat(draft).st_size // PAGE
    finally:
        os.close(draft)
    root.files.unlink(_draft(root))  # before the catalog may be sound again, and nobody makes another one
    first[_PAGES_AT : _FREE_AT + 8] = bytes(_FREE_AT + 8 - _PAGES_AT)  # unknown: another process may copy its log into the file just now
    fd = root.files.open(root.catalog, os.O_RDWR)
    try:
        if os.fstat(fd).st_size // PAGE < least:
            return False
        host.pwrite(fd, first, 0)
    finally:
        os.close(fd)
    return True


def _salvaged(root: Root, wal: Wal, new: sqlite3.Connection, given: int) -> list[Salvaged]:
    """Copy what can be read, with the log of the damaged catalog or, where that is no good, without."""
    new.execute("PRAGMA synchronous = NORMAL")  # else each transaction waits for the disk
    for how in ("mode=ro", "mode=ro&immutable=1") if _is_file(root.catalog) else ():
        with contextlib.ExitStack() as stack:
            files = list[int]()
            try:
                for path in (root.catalog, wal.log) if how == "mode=ro" and _is_file(wal.log) else (root.catalog,):
                    files.append(root.files.open(path))
                    stack.callback(os.close, files[-1])  # after the connection is closed, which would lose its locks by it
                damaged = stack.enter_context(schema.connected(wal.uri(how)))
                damaged.execute("SELECT 1 FROM sqlite_master").fetchone()
            except (sqlite3.Error, OSError) as error:
                log.info("%s cannot be read: %s", root.catalog, str(error))
                continue
            return [salvage.salvage(damaged, pages.Pages(*files), new, root, given)]
    return []


def _set_aside(root: Root, wal: Wal) -> None:
    """Give the damaged catalog, and its log, other names, for whoever wants to look into it. It does not count against the budget: so it is
    the last one alone, and no large one."""
    remove_set_aside(root)
    if not _is_file(root.catalog):
        root.files.make_way(root.catalog)
        return
    files = [path for path in (str(root.catalog), wal.log) if _is_file(path)]
    if sum(os.lstat(path).st_size for path in files) <= SET_ASIDE:
        root.files.link(root.catalog, root.damaged_catalog)
        if wal.log in files:
            root.files.rename(wal.log, f"{root.damaged_catalog}-wal")


def remove_set_aside(root: Root) -> None:
    """Remove the damaged catalog that was set aside, with what lies beside it."""
    for path in names_of_set_aside(root):
        root.files.make_way(path)


def names_of_set_aside(root: Root) -> list[str]:
    """The paths that the files of a damaged catalog have."""
    return [f"{root.damaged_catalog}{ending}" for ending in ("", *BESIDE)]


def _name(root: Root, wal: Wal) -> None:
    """Give the draft the name of the catalog."""
    for path in (wal.log, wal.index):
        # The log of a catalog that was deleted: SQLite would take it for the new one's, and ids would be given twice.
        root.files.make_way(path)
    root.files.rename(_draft(root), root.catalog)


def _is_file(path: str | os.PathLike[str]) -> bool:
    """Whether it is a plain file, and no link to one."""
    return os.path.isfile(path) and not os.path.islink(path)
