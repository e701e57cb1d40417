"""The tables, and how an empty catalog is made."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from forebay._kernel import host
from forebay.errors import NewerFormat

FORMAT = 9
LIVE, SUPERSEDED = 0, 1
"""States of an entry: served; served no more, and its bytes go when the last lease does."""

TABLES = f"""
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE spaces(
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    bytes INTEGER NOT NULL DEFAULT 0,      -- of live entries: what a quota counts
    charge INTEGER NOT NULL DEFAULT 0,     -- of all entries whose blocks are on the disk: what the budget counts
    inline INTEGER NOT NULL DEFAULT 0,     -- the part of charge that lies in the catalog itself
    entries INTEGER NOT NULL DEFAULT 0);
CREATE TABLE entries(
    id INTEGER PRIMARY KEY, space INTEGER NOT NULL, key TEXT NOT NULL, kind TEXT NOT NULL, state INTEGER NOT NULL DEFAULT {LIVE},
    slot INTEGER NOT NULL, size INTEGER NOT NULL, charge INTEGER NOT NULL, checksum BLOB NOT NULL, validator TEXT,
    created REAL NOT NULL, boot TEXT NOT NULL, life TEXT NOT NULL, suffix TEXT NOT NULL, meta TEXT NOT NULL);
CREATE UNIQUE INDEX entry_key ON entries(space, key) WHERE state = {LIVE};
CREATE INDEX entry_superseded ON entries(state) WHERE state > {LIVE};
CREATE INDEX entry_held ON entries(id) WHERE life = 'held';
CREATE TABLE payloads(id INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE links(tree INTEGER NOT NULL, name TEXT NOT NULL, member INTEGER NOT NULL, PRIMARY KEY(tree, name)) WITHOUT ROWID;
CREATE INDEX link_member ON links(member);
CREATE TABLE reservations(
    id INTEGER PRIMARY KEY, owner INTEGER, who TEXT NOT NULL, space INTEGER NOT NULL, key TEXT NOT NULL, keyhash INTEGER NOT NULL,
    size INTEGER NOT NULL, charge INTEGER NOT NULL, suffix TEXT NOT NULL, created REAL NOT NULL,
    rows INTEGER NOT NULL DEFAULT 1);      -- how many entries it is for
CREATE INDEX reservation_key ON reservations(keyhash);
CREATE TABLE segments(
    pack INTEGER NOT NULL, number INTEGER NOT NULL, size INTEGER NOT NULL, open INTEGER NOT NULL,
    PRIMARY KEY(pack, number)) WITHOUT ROWID;
CREATE INDEX segment_open ON segments(pack, number) WHERE open;
CREATE TABLE failures(
    space TEXT NOT NULL, key TEXT NOT NULL, error TEXT NOT NULL, at INTEGER NOT NULL,
    PRIMARY KEY(space, key)) WITHOUT ROWID;
CREATE TABLE counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
"""


def create(con: sqlite3.Connection, root_id: int) -> None:
    """Fill an empty database. Caller: holds the writer lock and no transaction.

    Ids start at a random number, so that an id that an older catalog of this root gave is not given again."""
    import random

    first = random.SystemRandom().randrange(1 << 32, 1 << 60)
    con.executescript(f"BEGIN IMMEDIATE; {TABLES}")
    con.executemany(
        "INSERT INTO meta VALUES (?, ?)",
        [("format", FORMAT), ("root", root_id), ("first_id", first), ("next_id", first), ("boot", "")],
    )
    con.execute("COMMIT")


COUNT = "UPDATE spaces SET bytes = bytes + ?, charge = charge + ?, inline = inline + ?, entries = entries + ? WHERE id = ?"
RECOUNT = f"""
UPDATE spaces SET (bytes, charge, inline, entries) = (
    SELECT coalesce(sum(size * (state = {LIVE})), 0), coalesce(sum(charge), 0), coalesce(sum(charge * (kind = 'value')), 0), count(*)
    FROM entries WHERE space = spaces.id)
WHERE id IS ?"""


LARGEST = [
    f"SELECT max({column}) FROM {table} WHERE typeof({column}) = 'integer'"
    for table, column in (("entries", "id"), ("payloads", "id"), ("reservations", "id"), ("links", "tree"), ("segments", "pack"))
]
"""The largest id that each table has."""
_SUMS = [
    "SELECT sum(bytes), sum(charge), sum(inline), sum(entries) FROM spaces", "SELECT sum(size), sum(charge) FROM entries",
    "SELECT sum(size), sum(charge), sum(rows) FROM reservations",
]  # fmt: skip
SHAPE = """
SELECT m.type, m.name, coalesce(c.name, m.sql) FROM sqlite_master m LEFT JOIN pragma_table_info(m.name) c
WHERE m.name NOT LIKE 'sqlite!_%' ESCAPE '!'
"""
"""The tables with their columns, and all else with its text. That of a table has comments, which another version may word otherwise."""


@contextlib.contextmanager
def connected(where: str | Path) -> Iterator[sqlite3.Connection]:
    """A connection that is used in this block only. ``where``: a path, or a URI of SQLite.

    SQLite has locks of its own for all connections of a process: a child that is forked while another thread holds one would wait for it
    for ever. So a fork waits for this block, as it does for the mutex of a `Catalog`."""
    is_uri = isinstance(where, str) and where.startswith("file:")
    with host.uncopied, contextlib.closing(sqlite3.connect(where, uri=is_uri, isolation_level=None)) as con:
        yield con


def damage(con: sqlite3.Connection) -> str | None:
    """What is wrong with a catalog, by reading all of it: seconds, for a million entries; None: nothing. An entry with a row that is
    invalid by itself is set aside (see `checked`), unless it keeps the others from being counted.

    Raises `sqlite3.Error` where it cannot be read. Whatever `CatalogBroken` calls damage shows here: else it is a fault of the call."""
    ((answer, *_),) = con.execute("PRAGMA integrity_check(1)").fetchall()
    if answer != "ok":
        return str(answer)
    if (problem := misshapen(con.execute(SHAPE))) is not None:
        return problem
    ((next_id,),) = con.execute("SELECT value FROM meta WHERE name = 'next_id'").fetchall() or [(None,)]
    if type(next_id) is not int or not 0 <= next_id < 1 << 61:
        return f"next_id is {next_id!r}"
    if max(con.execute(sql).fetchone()[0] or 0 for sql in LARGEST) > next_id:
        return f"an id above {next_id} is in use, and would be given again"
    for id, *row in con.execute("SELECT id, name, kind, bytes, charge, inline, entries FROM spaces"):
        if not 0 < id < 1 << 61 or [type(value) for value in row] != [str, str, int, int, int, int]:
            return f"the row of the space {row[0]!r}"
    for sql in _SUMS:
        if any(type(total) not in (int, type(None)) for total in con.execute(sql).fetchone()):
            return "a total is not a number"
    con.execute("BEGIN IMMEDIATE")  # what makes it read-only stands in its header
    con.execute("ROLLBACK")
    return None


def misshapen(shape: Iterable[tuple[Any, ...]]) -> str | None:
    """What is wrong with the tables and indexes that `SHAPE` finds; None: nothing."""
    with connected(":memory:") as own:
        own.executescript(TABLES)
        changed = {f"{kind} {name}" for kind, name, _ in set(shape) ^ set(own.execute(SHAPE))}
    return f"its tables and indexes are not those of Forebay: see {', '.join(sorted(changed))}" if changed else None


def refuse_newer(path: str | os.PathLike[str], format: object) -> None:
    """Raise `NewerFormat` for the format of a catalog that a newer Forebay made: its entries are that one's, which may still use them."""
    if type(format) is int and format > FORMAT:
        message = (
            f"the catalog {path} has format {format}, this Forebay reads format {FORMAT} at most: upgrade it, or choose another directory"
        )
        raise NewerFormat(message, path=os.path.dirname(path), found=format, known=FORMAT)


def root_id(path: Path) -> int | None:
    """The id of the root that a catalog of this format belongs to, read without a lock; None where it does not say. It was written when the
    catalog was made, so it is not in the log. Raises `NewerFormat`."""
    if not (path.is_file() and not path.is_symlink()):
        return None
    try:
        with connected(f"{path.as_uri()}?mode=ro&immutable=1") as con:
            meta = dict(con.execute("SELECT name, value FROM meta WHERE name IN ('format', 'root')").fetchall())
    except (sqlite3.Error, ValueError):
        return None
    refuse_newer(path, meta.get("format"))
    id = meta.get("root") if meta.get("format") == FORMAT else None
    return id if type(id) is int and id >> 62 == 0 else None
