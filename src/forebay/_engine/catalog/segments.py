"""Statements about the segments of packs: what each counts, and which are open."""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay._engine.catalog import checked
from forebay._engine.catalog.schema import COUNT, LIVE
from forebay._engine.catalog.transactions import Rows, Txn


class Segment(NamedTuple):
    """A file of a pack. ``size``: the bytes that it is charged. ``open``: a process appends to it, or has died while it did; then ``size``
    is all that this process may fill."""

    pack: int
    number: int
    size: int
    open: int


_FROM = "SELECT pack, number, size, open FROM segments"


def _sound(rows: Rows, several: list[Any]) -> list[Segment]:
    return [Segment(*row) for row in several if checked.segment(rows, row)]


def packs(rows: Rows) -> list[int]:
    return [row[0] for row in rows.all("SELECT id FROM entries WHERE kind = 'pack'") if checked.is_number(row[0])]


def last(rows: Rows, pack: int) -> int:
    """The highest number of a segment of this pack; 0: it has none."""
    return int(rows.one("SELECT coalesce(max(number), 0) FROM segments WHERE pack = ?", pack)[0])


def closed(rows: Rows, pack: int, most: int) -> list[Segment]:
    """The newest segments of a pack that are not open."""
    return _sound(rows, rows.all(f"{_FROM} WHERE pack = ? AND NOT open ORDER BY number DESC LIMIT ?", pack, most))


def opened(rows: Rows) -> list[Segment]:
    """The open segments of all packs, in order."""
    return _sound(rows, rows.all(f"{_FROM} WHERE open ORDER BY pack, number"))


def every(rows: Rows) -> list[Segment]:
    return _sound(rows, rows.all(_FROM))


def open_all(txn: Txn) -> None:
    """Have `segment_tails.reclaim` measure every segment."""
    txn.run("UPDATE segments SET open = 1")


def open_one(txn: Txn, pack: int, number: int, size: int) -> None:
    """Charge what a process may fill of a segment, which may be new; the charge of its pack follows."""
    _charge(txn, pack, number, size)
    txn.run("INSERT OR REPLACE INTO segments VALUES (?, ?, ?, 1)", pack, number, size)


def close(txn: Txn, pack: int, number: int, size: int) -> None:
    """Charge what is left of a segment, if it has a row; without bytes it has none any more. The charge of its pack follows."""
    if txn.one("SELECT 1 FROM segments WHERE pack = ? AND number = ?", pack, number):
        _charge(txn, pack, number, size)
        txn.run("UPDATE segments SET size = ?, open = 0 WHERE pack = ? AND number = ?", size, pack, number)
        txn.run("DELETE FROM segments WHERE pack = ? AND number = ? AND size = 0", pack, number)


def _charge(txn: Txn, pack: int, number: int, size: int) -> None:
    row = txn.one("SELECT size FROM segments WHERE pack = ? AND number = ?", pack, number)
    grown = size - (row[0] if row and checked.is_number(row[0]) else 0)
    sql = "UPDATE entries SET size = size + ?, charge = charge + ? WHERE id = ? RETURNING space, state"
    for space, state in txn.all(sql, grown, grown, pack):
        txn.run(COUNT, grown * (state == LIVE), grown, 0, 0, space)


def sums(rows: Rows) -> dict[int, int]:
    """What the segments of each pack are charged."""
    return dict(rows.all("SELECT pack, sum(size) FROM segments GROUP BY pack"))


def recount(txn: Txn, pack: int, index: int) -> None:
    """Set the size of a pack by its rows; ``index``: bytes of its index file. Caller: counts its space again."""
    size = index + sums(txn).get(pack, 0)
    txn.run("UPDATE entries SET size = ?, charge = ? WHERE id = ?", size, size, pack)
