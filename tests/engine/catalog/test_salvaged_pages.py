"""Reading the rows of a table from its pages by hand: what SQLite reads of the sound database, though the way to the rows is garbage."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay._engine.catalog.pages import Pages

PAGE = 4096
LONGEST = 1 << 20


def some_value(chance: random.Random) -> Any:
    kind = chance.randrange(8)
    if kind == 0:
        return None
    if kind == 1:
        return chance.choice([0, 1, -1, 127, -128, 128, 1 << 23, -(1 << 31), (1 << 47) - 1, 1 << 47, (1 << 63) - 1, -(1 << 63)])
    if kind == 2:
        return chance.randrange(-(1 << 63), 1 << 63) >> chance.randrange(64)
    if kind == 3:
        return chance.uniform(-1e9, 1e9)
    if kind == 4:
        return "".join(chance.choices("aé\u20ac\U0001f600 \n", k=chance.choice([0, 1, 50, 3000])))
    return chance.randbytes(chance.choice([0, 1, 40, 1000, 4040, 4050, 4061, 4062, 4084, 8184, chance.randrange(30_000)]))


def some_table(path: Path, chance: random.Random, columns: int) -> sqlite3.Connection:
    """A database that was written, deleted from and written again, part of it still in its log."""
    con = sqlite3.connect(path, isolation_level=None)
    con.executescript(f"PRAGMA page_size = {PAGE}; PRAGMA auto_vacuum = INCREMENTAL; PRAGMA journal_mode = WAL")
    con.execute("PRAGMA wal_autocheckpoint = 0")
    names = ", ".join(f"c{n} BLOB" for n in range(1, columns))
    con.executescript(f"CREATE TABLE other(id INTEGER PRIMARY KEY, {names}); CREATE TABLE wanted(id INTEGER PRIMARY KEY, {names})")
    add = f"VALUES ({', '.join('?' * columns)})"
    for turn in range(3):
        con.execute("BEGIN")
        for _ in range(chance.choice([1, 30, 200])):
            id = chance.choice([chance.randrange(1000), chance.randrange(-(1 << 63), 1 << 63), 1 << chance.randrange(62)])
            for table in ("other", "wanted"):
                con.execute(f"INSERT OR REPLACE INTO {table} {add}", (id, *(some_value(chance) for _ in range(columns - 1))))
        con.execute("COMMIT")
        con.execute("DELETE FROM wanted WHERE abs(id % 1000) BETWEEN ? AND ?", (first := chance.randrange(1000), first + 300))
        if turn == 0 or chance.random() < 0.3:
            con.execute("PRAGMA wal_checkpoint")
    return con


@contextlib.contextmanager
def pages_of(path: Path, *, log: bool = True) -> Iterator[Pages]:
    fds = [os.open(path, os.O_RDONLY), *([os.open(f"{path}-wal", os.O_RDONLY)] if log else [])]
    yield Pages(*fds)
    for fd in fds:
        os.close(fd)


def same(rows: Any) -> list[str]:
    return sorted(map(repr, rows))


@pytest.mark.parametrize("seed", range(12))
def test_the_rows_are_those_that_sqlite_reads(quick_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    columns = chance.choice([2, 3, 15])
    path, copy = quick_path / "sound", quick_path / "copy"
    with contextlib.closing(some_table(path, chance, columns)) as con:
        expected = con.execute("SELECT * FROM wanted").fetchall()
        ((root,),) = con.execute("SELECT rootpage FROM sqlite_master WHERE name = 'wanted'")
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{copy}{ending}")
    with pages_of(copy) as pages:
        assert same(pages.rows(root, columns, LONGEST, lambda id: True)) == same(expected)
        assert same(pages.rows(root, columns, LONGEST, lambda id: id > 5)) == same(row for row in expected if row[0] > 5)
        assert list(pages.rows(root, columns + 1, LONGEST, lambda id: True)) == []
        assert all(len(repr(row)) < 30_000 for row in pages.rows(root, columns, 1000, lambda id: True))
    with contextlib.closing(sqlite3.connect(copy)) as con:
        con.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        inner = [page for (page,) in con.execute("SELECT pageno FROM dbstat WHERE pagetype = 'internal'")]
    with open(copy, "r+b") as file:
        for page in inner:
            file.seek((page - 1) * PAGE)
            file.write(chance.randbytes(PAGE))
    with pages_of(copy, log=False) as pages:
        assert same(pages.rows(root, columns, LONGEST, lambda id: True)) == same(expected)


@pytest.mark.parametrize("cut", [0, 31, 32, 33, 56, 32 + 24 + PAGE, -1, -PAGE - 24, None])
def test_the_log_counts_up_to_the_last_commit_that_is_whole(quick_path: Path, cut: int | None) -> None:
    """As it counts for SQLite, which reads the same files."""
    path, copy = quick_path / "sound", quick_path / "copy"
    with contextlib.closing(some_table(path, random.Random(1), 3)) as con:
        ((root,),) = con.execute("SELECT rootpage FROM sqlite_master WHERE name = 'wanted'")
        con.execute("PRAGMA wal_checkpoint(RESTART)")
        for n in range(5):
            con.execute("INSERT OR REPLACE INTO wanted VALUES (?, ?, ?)", (n, "new", bytes(9000)))
        for ending in ("", "-wal"):
            shutil.copy(f"{path}{ending}", f"{copy}{ending}")
    log = Path(f"{copy}-wal")
    if cut is None:
        data = bytearray(log.read_bytes())
        data[32 + 3 * (24 + PAGE) + 100] ^= 1
        log.write_bytes(data)
    else:
        os.truncate(log, cut if cut >= 0 else log.stat().st_size + cut)
    with pages_of(copy) as pages:
        found = same(pages.rows(root, 3, LONGEST, lambda id: True))
    with contextlib.closing(sqlite3.connect(copy)) as con:
        assert found == same(con.execute("SELECT * FROM wanted"))


@pytest.mark.parametrize("seed", range(10))
def test_garbage_gives_no_row_of_another_shape_and_no_error(quick_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    path = quick_path / "sound"
    with contextlib.closing(some_table(path, chance, 3)) as con:
        ((root,),) = con.execute("SELECT rootpage FROM sqlite_master WHERE name = 'wanted'")
        con.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    sound = path.read_bytes()
    for _ in range(20):
        data = bytearray(sound)
        for _ in range(30):
            at, part = chance.randrange(len(data)), chance.randbytes(chance.choice([1, 8, 300]))
            data[at : at + len(part)] = part
        path.write_bytes(data)
        with pages_of(path, log=False) as pages:
            assert {len(row) for row in pages.rows(root, 3, LONGEST, lambda id: True)} <= {3}
