"""What can be read of a damaged catalog is copied into the one that replaces it.

Tables are read in order of their ids. Where a page cannot be read, or its rows are not in order, the next id is searched from which on
rows can be read again. Rows that were not found so are looked for in the pages themselves (see `pages`): they are there where a damaged
page only led to theirs, or where a page is not in its place. Each row is validated, and an entry is kept if its payload, its file or its
directory is there as it was stored. Entries keep their ids, after which their files are named; the next ids lie above all of them."""

from __future__ import annotations

import bisect
import sqlite3
import stat
from array import array
from collections.abc import Iterator
from typing import Any, NamedTuple

from forebay._engine.catalog import checked, schema
from forebay._engine.catalog.pages import Pages
from forebay._engine.catalog.transactions import NUMBERS, SKIPPED, fetched, text_or_bytes
from forebay._engine.files import blobs, pack_files
from forebay._engine.files.layout import Root, RootReplaced
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Entry

log = logger("forebay.catalog")

AT_ONCE = 256
"""Entries that one transaction copies."""
LONGEST = 16 << 20
"""Bytes of the largest value that is read: the length of a damaged one may be any number."""
_LAST = 1 << 61
_COLUMNS = "id, space, key, kind, state, slot, size, charge, checksum, validator, created, boot, life, suffix, meta"
_DELETE = f"""
DELETE FROM entries WHERE space = ? AND key = ? AND state = {schema.LIVE} AND NOT EXISTS (SELECT 1 FROM entries WHERE id = ?)"""
_ADD = f"INSERT OR IGNORE INTO entries({_COLUMNS}) VALUES ({', '.join('?' * 15)})"


class Salvaged(NamedTuple):
    """How many entries of a damaged catalog were kept, and how many are known to be lost."""

    kept: int
    lost: int


class _Damaged:
    """The damaged catalog, as `checked` asks for it."""

    def __init__(self, con: sqlite3.Connection, pages: Pages) -> None:
        self.con, self._pages = con, pages

    def all(self, sql: str, *values: Any) -> list[Any]:
        """The rows of a statement; none where they cannot be read."""
        try:
            return fetched(self.con, sql, values)
        except sqlite3.Error as error:
            log.debug("a part of the damaged catalog cannot be read: %s", str(error))
            return []

    def one(self, sql: str, *values: Any) -> Any:
        rows = self.all(sql, *values)
        return rows[0] if rows else None

    def report_unreadable(self, table: str, key: tuple[Any, ...], what: str) -> None:
        log.debug("%s is lost with the damaged catalog", what)

    def rows(self, table: str, columns: str, found: array[int]) -> Iterator[tuple[Any, ...]]:
        """All rows that can be read of a table with ids, the first of its ``columns``, in order of these. Adds their ids to ``found``."""
        after: int | None = -1
        while after is not None:
            try:
                for row in self.con.execute(_from(table, columns), (after,)):
                    if row[0] <= after:
                        raise sqlite3.DatabaseError("rows are not in order")
                    after = row[0]
                    found.append(row[0])
                    yield row
                return
            except sqlite3.Error as error:
                log.debug("%s of the damaged catalog cannot be read behind %d: %s", table, after, str(error))
                after = self._next_readable(table, columns, after)

    def rows_of_pages(self, table: str, columns: int, found: array[int]) -> Iterator[tuple[Any, ...]]:
        """The rows that stand in pages of the table, with other ids than those that were ``found``. See `Pages.rows`."""
        root = self.one("SELECT rootpage FROM sqlite_master WHERE type = 'table' AND name = ?", table)

        def is_wanted(id: int) -> bool:
            at = bisect.bisect_left(found, id)
            return id >= 0 and (at == len(found) or found[at] != id)

        return self._pages.rows(root[0], columns, LONGEST, is_wanted) if root and checked.is_number(root[0]) else iter(())

    def _next_readable(self, table: str, columns: str, after: int) -> int | None:
        """From behind which id on rows can be read again; None: from none."""
        step = 1
        while not self._can_read(table, columns, after + step):
            step *= 2
            if after + step >= NUMBERS:
                return None
        low, high = after + step // 2, after + step
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._can_read(table, columns, middle) else (middle, high)
        return high

    def _can_read(self, table: str, columns: str, after: int) -> bool:
        try:
            row = self.con.execute(f"{_from(table, columns)} LIMIT 1", (after,)).fetchone()
        except sqlite3.Error:
            return False
        return row is None or row[0] > after


def _from(table: str, columns: str) -> str:
    return f"SELECT {columns} FROM {table} NOT INDEXED WHERE id > ? ORDER BY id"


def salvage(damaged: sqlite3.Connection, pages: Pages, new: sqlite3.Connection, root: Root, given: int) -> Salvaged:
    """Copy into an empty catalog what can be read of a damaged one, a few rows in each transaction. ``pages``: the same one's. ``given``:
    the largest id that is known to have been given.

    Raises `sqlite3.Error` where the new one cannot be written, and ValueError where no ids are left above those of the damaged one: then
    the new one is worth nothing."""
    damaged.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LONGEST)
    damaged.text_factory = text_or_bytes
    source = _Damaged(damaged, pages)
    if not _is_of(source, root):
        return Salvaged(0, 0)
    copy = _Successor(source, new, root, given)
    copy.spaces()
    copy.entries()
    copy.trees()
    copy.packs()
    return copy.end()


def _is_of(source: _Damaged, root: Root) -> bool:
    """Whether a catalog is this root's, and of this format, or does not say."""
    meta = dict(source.all("SELECT name, value FROM meta WHERE name IN ('format', 'root')"))
    return bool(meta.get("format", schema.FORMAT) == schema.FORMAT and meta.get("root", root.id) == root.id)


class _Successor:
    """One copy of a damaged catalog into a new one."""

    def __init__(self, source: _Damaged, new: sqlite3.Connection, root: Root, given: int) -> None:
        self._source, self._new, self._root = source, new, root
        self._largest = given
        self._names: dict[int, str] = {}
        self._noted = self._found = 0
        """The entries that the totals of the spaces count, and the rows that were found."""
        self._has_payloads = False

    def spaces(self) -> None:
        """The spaces. Where a row is lost, its name may still stand in the index."""
        names = self._source.all("SELECT id, name, 'values', 0 FROM spaces INDEXED BY sqlite_autoindex_spaces_1")
        for id, name, kind, entries in (*self._source.rows("spaces", "id, name, kind, entries", array("q")), *names):
            if checked.is_number(id) and id and type(name) is type(kind) is str:
                added = self._new.execute("INSERT OR IGNORE INTO spaces(id, name, kind) VALUES (?, ?, ?)", (id, name, kind)).rowcount
                if added:
                    self._names[id] = name
                    self._noted += entries if checked.is_number(entries, 1 << 32) else 0

    def entries(self) -> None:
        self._new.execute("BEGIN")
        for number, (id, space, key, kind, state, *others) in enumerate(self._rows(), 1):
            slot, size, charge, checksum, validator, created, _, life, suffix, meta = others
            self._found += 1
            self._largest = max(self._largest, id if id < _LAST else 0)
            columns = (
                id, self._names.get(space) if type(space) is int else None, key, kind, size, charge, slot, checksum, validator, created,
                "", life, suffix, meta,
            )  # fmt: skip
            entry = checked.entry(self._source, columns)
            if entry is not None and checked.is_number(state) and id < _LAST:
                self._add(entry, space, min(state, schema.SUPERSEDED))
            if number % AT_ONCE == 0:
                self._commit()
                self._new.execute("BEGIN")
        self._commit()

    def _rows(self) -> Iterator[tuple[Any, ...]]:
        """The rows of entries that SQLite finds, and then those that stand in pages where it finds none."""
        found = array("q")
        yield from self._source.rows("entries", _COLUMNS, found)
        for row in self._source.rows_of_pages("entries", _COLUMNS.count(",") + 1, found):
            *columns, created, boot, life, suffix, meta = row
            yield *columns, float(created) if type(created) is int else created, boot, life, suffix, meta

    def _add(self, entry: Entry, space: int, state: int) -> None:
        """Add an entry, if it is there. It has no boot: its bytes are compared with its checksum before they are served."""
        data = self._payload(entry) if entry.kind == "value" else None
        if data is None if entry.kind == "value" else not _is_there(self._root, entry, state):
            return
        id, _, key, kind, size, charge, slot, checksum, validator, created, boot, life, suffix, meta = entry[:14]
        row = id, space, key, kind, state, slot, size, charge, checksum, validator, created, boot, life, suffix, meta
        if not self._new.execute(_ADD, row).rowcount:  # which of two entries of a key is the newer one is not known
            self._new.execute(_DELETE, (space, key, id))
        elif data is not None:
            self._new.execute("INSERT OR REPLACE INTO payloads VALUES (?, ?)", (id, data))

    def _payload(self, entry: Entry) -> bytes | None:
        row = self._source.one("SELECT data FROM payloads WHERE id = ?", entry.id)
        if not _is_sound(entry, row):
            self._copy_payloads()
            row = self._new.execute("SELECT data FROM payloads WHERE id = ?", (entry.id,)).fetchone()
        return row[0] if _is_sound(entry, row) else None

    def _copy_payloads(self) -> None:
        """Copy the payloads that stand in pages, once: those that no entry turns out to have are removed in the end."""
        if self._has_payloads:
            return
        self._has_payloads = True
        for number, row in enumerate(self._source.rows_of_pages("payloads", 2, array("q")), 1):
            self._new.execute("INSERT OR IGNORE INTO payloads VALUES (?, ?)", row)
            if number % AT_ONCE == 0:
                self._commit()
                self._new.execute("BEGIN")

    def trees(self) -> None:
        """The links of trees. A tree is kept if all of its files are: else those that are would be served as the whole."""
        for id, state in self._new.execute("SELECT id, state FROM entries WHERE kind = 'tree'").fetchall():
            self._new.execute("BEGIN")
            links = self._source.all("SELECT name, member FROM links WHERE tree = ?", id)
            sound = [(id, name, member) for name, member in links if checked.is_member(name) and checked.is_number(member)]
            self._new.executemany("INSERT OR IGNORE INTO links VALUES (?, ?, ?)", sound)
            lost = self._new.execute("SELECT 1 FROM links WHERE tree = ? AND member NOT IN (SELECT id FROM entries)", (id,)).fetchone()
            if state == schema.LIVE and (lost or not _has_files(self._root, id, {name for _, name, _ in sound})):
                self._new.execute("DELETE FROM entries WHERE id = ?", (id,))
                self._new.execute("DELETE FROM links WHERE tree = ?", (id,))
            self._commit()

    def packs(self) -> None:
        """The segments of packs: what they are charged. A segment whose row is lost is measured when the epoch begins."""
        for (id,) in self._new.execute("SELECT id FROM entries WHERE kind = 'pack'").fetchall():
            rows = self._source.all("SELECT pack, number, size, open FROM segments WHERE pack = ?", id)
            sound = [row for row in rows if checked.segment(self._source, row)]
            self._new.execute("BEGIN")
            self._new.executemany("INSERT OR IGNORE INTO segments VALUES (?, ?, ?, ?)", sound)
            size = pack_files.size_of_index(self._root, id)
            if size is not None:
                size += sum(row[2] for row in sound)
                self._new.execute("UPDATE entries SET size = ?, charge = ? WHERE id = ?", (size, size, id))
            self._commit()

    def end(self) -> Salvaged:
        """Note the totals, and from where on ids are new."""
        next_id = self._source.one("SELECT value FROM meta WHERE name = 'next_id'")
        given = [row[0] for row in (next_id, *map(self._source.one, schema.LARGEST)) if row and checked.is_number(row[0], _LAST)]
        last = max(self._largest, 0, *given) + 2 * SKIPPED
        if last >= _LAST:
            raise ValueError(f"no ids are left above {last:x}")
        self._new.execute("BEGIN")
        self._new.execute("UPDATE meta SET value = ? WHERE name = 'next_id'", (last,))
        self._new.execute("DELETE FROM payloads WHERE id NOT IN (SELECT id FROM entries)")
        for id in self._names:
            self._new.execute(schema.RECOUNT, (id,))
        counters = self._source.all("SELECT name, value FROM counters")
        sound = [row for row in counters if type(row[0]) is str and type(row[1]) is int]
        self._new.executemany("INSERT OR IGNORE INTO counters VALUES (?, ?)", sound)
        self._commit()
        (kept,) = self._new.execute("SELECT count(*) FROM entries").fetchone()
        return Salvaged(kept, max(self._found, self._noted, kept) - kept)

    def _commit(self) -> None:
        host.step("catalog-salvage", self._root.catalog)
        self._new.execute("COMMIT")


def _is_sound(entry: Entry, row: Any) -> bool:
    """Whether a row of payloads is the one that the entry was stored with."""
    return row is not None and type(row[0]) is bytes and len(row[0]) == entry.size and blobs.checksum_of(row[0]) == entry.checksum


def _is_there(root: Root, entry: Entry, state: int) -> bool:
    """Whether the file or the directory of an entry is there. What is not served any more may be gone."""
    try:
        if entry.kind == "blob":
            status = root.files.lstat(root.blob(entry.id, entry.suffix))
            return stat.S_ISREG(status.st_mode) and (status.st_size == entry.size or state != schema.LIVE)
        if entry.kind in ("tree", "pack"):
            return root.files.is_directory(root.tree(entry.id) if entry.kind == "tree" else root.pack(entry.id))
    except RootReplaced:
        raise
    except OSError:
        return False
    return True


def _has_files(root: Root, tree: int, names: set[str]) -> bool:
    try:
        return set(blobs.list_files(root, tree)) == names
    except RootReplaced:
        raise
    except OSError:
        return False
