"""The tables, and how an empty catalog is made."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

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
        [("format", FORMAT), ("root", root_id), ("next_id", first), ("boot", "")],
    )
    con.execute("COMMIT")


COUNT = "UPDATE spaces SET bytes = bytes + ?, charge = charge + ?, inline = inline + ?, entries = entries + ? WHERE id = ?"
RECOUNT = f"""
UPDATE spaces SET (bytes, charge, inline, entries) = (
    SELECT coalesce(sum(size * (state = {LIVE})), 0), coalesce(sum(charge), 0), coalesce(sum(charge * (kind = 'value')), 0), count(*)
    FROM entries WHERE space = spaces.id)
WHERE id IS ?"""


def is_sane(con: sqlite3.Connection) -> bool:
    """Whether the next id is valid."""
    ((next_id,),) = con.execute("SELECT value FROM meta WHERE name = 'next_id'").fetchall() or [(None,)]
    return type(next_id) is int and 0 <= next_id < 1 << 61


def root_id(path: Path) -> int | None:
    """The id of the root that a catalog belongs to, read without a lock; None where it does not say. It was written when the catalog was
    made, so it is not in the log."""
    if not (path.is_file() and not path.is_symlink()):
        return None
    try:
        with contextlib.closing(sqlite3.connect(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)) as con:
            ((id,),) = con.execute("SELECT value FROM meta WHERE name = 'root'").fetchall()
    except (sqlite3.Error, ValueError):
        return None
    return id if type(id) is int and id >> 62 == 0 else None
