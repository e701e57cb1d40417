"""Statements about the segments of packs: their writers, and how much of each is allocated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forebay._engine.catalog import checked
from forebay._engine.catalog.connection import Rows, Txn
from forebay._engine.catalog.schema import COUNT, LIVE


@dataclass(frozen=True, slots=True)
class Segment:
    """A file of a pack. ``owner``: the process that appends to it; None: no process does, and ``tail`` is where the next one continues.
    ``capacity``: its length; ``size``: bytes that are allocated, and charged."""

    pack: int
    number: int
    owner: int | None
    capacity: int
    size: int
    tail: int


_FROM = "SELECT pack, number, owner, capacity, size, tail FROM segments"


def _sound(rows: Rows, several: list[Any]) -> list[Segment]:
    return [Segment(*row) for row in several if checked.segment(rows, row)]


def one(rows: Rows, pack: int, number: int) -> Segment | None:
    row = rows.one(f"{_FROM} WHERE pack = ? AND number = ?", pack, number)
    return Segment(*row) if row and checked.segment(rows, row) else None


def last(rows: Rows, pack: int) -> int:
    """The highest number of a segment of this pack; 0: it has none."""
    return int(rows.one("SELECT coalesce(max(number), 0) FROM segments WHERE pack = ?", pack)[0])


def roomy(rows: Rows, pack: int, need: int) -> list[Segment]:
    """The segments of a pack that a process appends to, or that have no writer and room for ``need`` bytes; newest first."""
    where = "pack = ? AND (owner IS NOT NULL OR capacity - tail >= ?)"
    return _sound(rows, rows.all(f"{_FROM} WHERE {where} ORDER BY number DESC", pack, need))


def owned(rows: Rows) -> list[Segment]:
    """All segments with an owner, dead or alive."""
    return _sound(rows, rows.all(f"{_FROM} WHERE owner IS NOT NULL"))


def every(rows: Rows) -> list[Segment]:
    return _sound(rows, rows.all(_FROM))


def put(txn: Txn, segment: Segment) -> None:
    """Enter a segment, or change it; the charge of its pack follows."""
    _charge(txn, segment.pack, segment.number, segment.size)
    txn.run(
        "INSERT OR REPLACE INTO segments VALUES (?, ?, ?, ?, ?, ?)",
        segment.pack, segment.number, segment.owner, segment.capacity, segment.size, segment.tail,
    )  # fmt: skip


def close(txn: Txn) -> None:
    """Nothing more is appended to any segment that has no writer."""
    txn.run("UPDATE segments SET tail = capacity WHERE owner IS NULL")


def remove(txn: Txn, pack: int, number: int) -> None:
    """Nothing is left of a segment; the charge of its pack follows."""
    _charge(txn, pack, number, 0)
    txn.run("DELETE FROM segments WHERE pack = ? AND number = ?", pack, number)


def _charge(txn: Txn, pack: int, number: int, size: int) -> None:
    row = txn.one("SELECT size FROM segments WHERE pack = ? AND number = ?", pack, number)
    grown = size - (row[0] if row and checked.is_number(row[0]) else 0)
    sql = "UPDATE entries SET size = size + ?, charge = charge + ? WHERE id = ? RETURNING space, state"
    for space, state in txn.all(sql, grown, grown, pack):
        txn.run(COUNT, grown * (state == LIVE), grown, 0, 0, space)


def sums(rows: Rows) -> dict[int, int]:
    """What is allocated of each pack's segments."""
    return dict(rows.all("SELECT pack, sum(size) FROM segments GROUP BY pack"))


def recount(txn: Txn, pack: int, index: int) -> None:
    """Set the size of a pack by its rows; ``index``: bytes of its index file. Caller: counts its space again."""
    size = index + sums(txn).get(pack, 0)
    txn.run("UPDATE entries SET size = ?, charge = ? WHERE id = ?", size, size, pack)
