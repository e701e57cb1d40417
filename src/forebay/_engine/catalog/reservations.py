"""Statements about reserved bytes, and about the remains of fetches whose process is gone."""

from __future__ import annotations

from typing import Any, NamedTuple

from forebay._engine.catalog import checked
from forebay._engine.catalog.transactions import Rows, Txn


class Reservation(NamedTuple):
    """Bytes reserved for one write. Its id becomes the entry's. ``owner`` None: a partial file that waits for a successor; ``who``: that
    process, in words for people.

    ``rows``: for how many entries it is. With ``keyhash`` 0 it has no files: it is still growing."""

    id: int
    owner: int | None
    who: str
    space: int
    key: str
    keyhash: int
    size: int
    charge: int
    suffix: str
    created: float
    rows: int = 1


_FROM = "SELECT id, owner, who, space, key, keyhash, size, charge, suffix, created, rows FROM reservations"


def _sound(rows: Rows, several: list[Any]) -> list[Reservation]:
    return [Reservation(*row) for row in several if checked.reservation(rows, row)]


def insert(txn: Txn, r: Reservation) -> None:
    txn.run(
        "INSERT INTO reservations VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        r.id, r.owner, r.who, r.space, r.key, r.keyhash, r.size, r.charge, r.suffix, r.created, r.rows,
    )  # fmt: skip


def by_id(rows: Rows, id: int) -> Reservation | None:
    row = rows.one(f"{_FROM} WHERE id = ?", id)
    return Reservation(*row) if row and checked.reservation(rows, row) else None


def keyhashes(rows: Rows) -> set[int]:
    """The keys for which something is reserved: writes in progress, and partials that dead fetches left."""
    return {row[0] for row in rows.all("SELECT keyhash FROM reservations")}


def by_key(rows: Rows, keyhash: int) -> list[Reservation]:
    """The reservations under a key's lock, newest first."""
    return _sound(rows, rows.all(f"{_FROM} WHERE keyhash = ? ORDER BY id DESC", keyhash))


def in_progress(rows: Rows) -> list[Reservation]:
    """Writes to files, of processes that may be dead, oldest first."""
    return _sound(rows, rows.all(f"{_FROM} WHERE owner IS NOT NULL AND keyhash != 0 ORDER BY id"))


def abandoned(rows: Rows) -> list[Reservation]:
    """Partials that wait for a successor, oldest first."""
    return _sound(rows, rows.all(f"{_FROM} WHERE owner IS NULL ORDER BY id"))


def any_others(rows: Rows, space: int, but: int) -> bool:
    """Whether others write into a space, or search for room there."""
    return bool(rows.one("SELECT EXISTS (SELECT 1 FROM reservations WHERE space = ? AND id != ? AND owner IS NOT NULL)", space, but)[0])


def is_owner(rows: Rows, owner: int) -> bool:
    """Whether a process has reservations."""
    return rows.one("SELECT 1 FROM reservations WHERE owner = ? LIMIT 1", owner) is not None


def every(rows: Rows) -> list[Reservation]:
    return _sound(rows, rows.all(_FROM))


def owners(rows: Rows) -> set[int]:
    """The owners of reservations."""
    return {one.owner for one in every(rows) if one.owner is not None}


def reserved_in(rows: Rows, space: int, but: int) -> tuple[int, int]:
    """Bytes and entries that are promised in one space, ``but`` for those of one reservation."""
    bytes, count = rows.one(
        "SELECT coalesce(sum(size), 0), coalesce(sum(rows), 0) FROM reservations WHERE space = ? AND id != ?", space, but
    )
    return bytes, count


def update(txn: Txn, r: Reservation) -> None:
    """Set how much is reserved, and under which key's lock."""
    txn.run("UPDATE reservations SET size = ?, charge = ?, rows = ?, keyhash = ? WHERE id = ?", r.size, r.charge, r.rows, r.keyhash, r.id)


def set_owner(txn: Txn, id: int, owner: int | None, who: str = "") -> None:
    txn.run("UPDATE reservations SET owner = ?, who = ? WHERE id = ?", owner, who, id)


def disown(txn: Txn, owner: int) -> None:
    """The owner is dead: its reservations stay counted as partials, but those that have no files are deleted."""
    txn.run("DELETE FROM reservations WHERE owner = ? AND keyhash = 0", owner)
    txn.run("UPDATE reservations SET owner = NULL WHERE owner = ?", owner)


def delete(txn: Txn, id: int) -> None:
    txn.run("DELETE FROM reservations WHERE id = ?", id)
