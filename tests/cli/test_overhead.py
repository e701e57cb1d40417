"""What the budget does not count: `forebay du` shows it on a line of its own, and it keeps the bounds of README "Limits"."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import sqlite3
from pathlib import Path

import pytest

from forebay import Cache
from forebay._config import format_size
from tests.harness import KiB, MiB

from .conftest import Run

PARTS = ("log", "slots", "directories", "other")


def plant(home: Path, count: int, *, files: bool) -> None:
    """Rows of blobs, and their files: quicker than they are put."""
    with contextlib.closing(sqlite3.connect(home / "catalog.sqlite")) as con, con:
        (space,) = con.execute("SELECT id FROM spaces WHERE name = 'values'").fetchone()
        (first,) = con.execute("SELECT value FROM meta WHERE name = 'next_id'").fetchone()
        con.execute(
            "WITH RECURSIVE n(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM n LIMIT :count) INSERT INTO entries(id, space, key, kind, slot,"
            " size, charge, checksum, created, boot, life, suffix, meta) SELECT :first + n, :space, 'planted' || n, 'blob', 100 + n, 10,"
            " 4096, zeroblob(16), 1e9, '', 'cached', '', '' FROM n",
            {"count": count, "first": first, "space": space},
        )
        con.execute("UPDATE meta SET value = ? WHERE name = 'next_id'", (first + count,))
        con.execute("UPDATE spaces SET entries = entries + :n, bytes = bytes + 10 * :n, charge = charge + 4096 * :n", {"n": count})
    shutil.rmtree(home / "shared")  # it is made anew of the rows
    for id in range(first, first + count if files else first):
        (home / f"blobs/{id & 0xFF:02x}/{id:016x}").write_bytes(b"x" * 10)


@pytest.mark.parametrize("count", [0, 2000, 70_000])
def test_each_part_keeps_its_bound(run: Run, home: Path, count: int) -> None:
    with Cache(home, budget="2GB", min_free=0) as cache:
        cache.put("k", b"value")
    if count:
        plant(home, count, files=count < 10_000)
        with Cache(home) as cache:
            assert cache.put("later", b"value")
    found = run("du", "--json").json
    assert found["spaces"]["values"]["entries"] == count + 1 + bool(count)
    overhead = found["overhead"]
    assert set(overhead) == set(PARTS)
    assert overhead["log"] <= 16 * MiB + 256 * KiB
    head, records = 4096 + 2 * 4096 * 8, math.ceil((count + 2) / 8192) * (4096 + 8192 * 16 * 8)
    keys = 4096 + ((16_384 if count < 10_000 else 131_072) + 64) * 8  # at most 5/8 of the buckets are in use
    cells = 2 * 4096 + 64 * KiB  # where the value lies that was stored
    history = 4096 + (1440 + 744) * 24 * 8
    assert overhead["slots"] == head + records + cells + sum(math.ceil(size / 4096) * 4096 for size in (keys, history))
    folders = [os.path.join(above, name) for above, names, _ in os.walk(home) for name in names]
    assert overhead["directories"] == sum(os.stat(folder).st_blocks * 512 for folder in folders) <= 1_100_000 + 100 * count
    assert 4 * MiB <= overhead["other"] <= (8 + 4 + 1) * MiB + 4 * KiB * 4
    (line,) = [line for line in run("du").lines if "outside the budget" in line]
    said = ", ".join(f"{name} {format_size(overhead[name])}" for name in PARTS)
    assert line == f"{format_size(sum(overhead.values()))} outside the budget: {said}"
