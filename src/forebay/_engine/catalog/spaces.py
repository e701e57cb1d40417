"""Statements about spaces, totals and counters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from forebay._engine.catalog import entries
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.schema import LIVE
from forebay._engine.catalog.transactions import Rows, Txn
from forebay._engine.files.layout import PAGE, CatalogBroken

ALLOWANCE = 8 << 20
"""Bytes of the catalog, small values apart, that the budget does not count."""


class SpaceRow(NamedTuple):
    """A named part of the root, its ``bytes`` and ``entries`` those that live; ``charge`` is what the budget counts."""

    id: int
    name: str
    kind: str
    bytes: int = 0
    charge: int = 0
    entries: int = 0


class Totals(NamedTuple):
    """What is used, in bytes. ``entries``: charge of all entries; ``promised``: of reservations; ``over``: of the catalog beside small
    values, above `ALLOWANCE`; ``spare``: of these, free pages, which new values use; ``rows``: of entries and reservations; ``space``: of
    the live entries of one space, ``rows_here`` their number. ``leftovers``: something may wait to be swept: superseded
    entries, or held ones whose holder may be gone. ``any_promised``: there are reservations."""

    entries: int
    promised: int
    over: int
    spare: int
    rows: int
    space: int
    rows_here: int
    leftovers: bool
    any_promised: bool


# It is asked in every transaction that writes: so what is seldom there is only asked for where it is. Of scalar subqueries, since
# SQLite builds a table for each part of a join: that takes ten times as long.
_TOTALS = f"""
SELECT coalesce(sum(charge), 0), coalesce(sum(inline), 0), coalesce(sum(entries), 0),
    EXISTS (SELECT 1 FROM entries WHERE state > {LIVE}), EXISTS (SELECT 1 FROM entries WHERE life = 'held'),
    EXISTS (SELECT 1 FROM reservations), (SELECT page_count FROM pragma_page_count),
    coalesce(sum(bytes * (id = ?)), 0), coalesce(sum(entries * (id = ?)), 0)
FROM spaces
"""
_SUPERSEDED = f"SELECT count(*), coalesce(sum(space = ?), 0) FROM entries WHERE state > {LIVE}"
_PROMISED = "SELECT coalesce(sum(charge), 0), coalesce(sum(rows), 0) FROM reservations WHERE id != ?"
_USAGE = """
SELECT coalesce(sum(charge), 0), coalesce(sum(inline), 0), (SELECT page_count FROM pragma_page_count),
    (SELECT coalesce(sum(charge), 0) FROM reservations)
FROM spaces
"""
_SUMS = f"""
SELECT space, coalesce(sum(size * (state = {LIVE})), 0), coalesce(sum(charge), 0), coalesce(sum(charge * (kind = 'value')), 0), count(*)
FROM entries WHERE id > ? AND id <= ? GROUP BY space
"""
_EMPTY = 0, 0, 0, 0
_NUMBERS = frozenset((int, type(None)))
_FROM = "SELECT id, name, kind, bytes, charge, entries FROM spaces"
_SEEN = f"""
SELECT id, name, kind, bytes, charge, entries - (SELECT count(*) FROM entries WHERE state > {LIVE} AND space = spaces.id) AS entries
FROM spaces
"""


def find(rows: Rows, name: str) -> SpaceRow | None:
    row = rows.one(f"{_FROM} WHERE name = ?", name)
    return _space(row) if row else None


def by_id(rows: Rows, id: int) -> SpaceRow | None:
    row = rows.one(f"{_FROM} WHERE id = ?", id)
    return _space(row) if row else None


def _space(row: Sequence[Any]) -> SpaceRow:
    """Make a space from its row. Raises `CatalogBroken` if it is invalid: without its space no entry can be served."""
    space = SpaceRow(*row)
    _numbers((space.id, space.bytes, space.charge, space.entries))
    if {type(space.name), type(space.kind)} != {str} or space.id <= 0:
        raise CatalogBroken(f"the catalog is damaged: the row of the space {space.name!r}", damaged=True)
    if min(space.bytes, space.charge, space.entries) < 0:  # a check reports them, and a repair counts again
        return space._replace(bytes=max(space.bytes, 0), charge=max(space.charge, 0), entries=max(space.entries, 0))
    return space


def _numbers(row: Sequence[Any]) -> Sequence[Any]:
    """What is to be added and compared. Raises `CatalogBroken` where that cannot be done."""
    if not _NUMBERS.issuperset(map(type, row)):
        raise CatalogBroken("the catalog is damaged: a total is not a number", damaged=True)
    return row


def every(rows: Rows) -> list[SpaceRow]:
    """All spaces, for display: ``entries`` counts live ones only."""
    return [_space(row) for row in rows.all(_SEEN)]


def live_below(rows: Rows, space: int, prefix: str) -> tuple[int, int]:
    """Bytes and number of the entries of a space whose keys begin with ``prefix``."""
    sql = f"SELECT coalesce(sum(size), 0), count(*) FROM entries WHERE space = ? AND key >= ? AND key < ? AND state = {LIVE}"
    bytes, entries = _numbers(rows.one(sql, space, prefix, f"{prefix}\U0010ffff"))
    return bytes, entries


def live(rows: Rows, name: str) -> tuple[int, int]:
    """Bytes and number of the entries that one space serves; what was replaced or is being unlinked apart."""
    row = rows.one(f"SELECT bytes, entries FROM ({_SEEN} WHERE name = ?)", name)
    bytes, entries = _numbers(row) if row else (0, 0)
    return bytes, entries


def totals(txn: Rows, but: int = 0, space: int = 0) -> Totals:
    """What is used now. ``but``: a reservation that does not count. Outside of a transaction its parts may be of different moments."""
    numbers = txn.one(_TOTALS, space, space)
    charge, inline, rows, any_superseded, any_held, any_promised, pages, used, count = _numbers(numbers)
    left = left_here = promised = waiting = 0
    if any_superseded:
        left, left_here = txn.one(_SUPERSEDED, space)
    if any_promised:
        promised, waiting = txn.one(_PROMISED, but)
    over = pages * PAGE - inline - ALLOWANCE
    spare = min(over, PAGE * txn.one("PRAGMA freelist_count")[0]) if over > 0 else 0
    return Totals(
        charge, promised, max(over, 0), spare, rows - left + waiting, used, count - left_here,
        bool(any_superseded or any_held), bool(any_promised),
    )  # fmt: skip


def uncharged(rows: Rows) -> int:
    """Bytes of the catalog that the budget does not count."""
    pages, inline = rows.one("SELECT (SELECT page_count FROM pragma_page_count), coalesce(sum(inline), 0) FROM spaces")
    return int(max(0, min(pages * PAGE - inline, ALLOWANCE)))


def usage(catalog: Catalog) -> tuple[int, int]:
    """Bytes that are used, and bytes that are promised, of one moment."""
    charge, inline, pages, granted = _numbers(catalog.one(_USAGE))
    return charge + max(0, pages * PAGE - inline - ALLOWANCE) + catalog.look_at_log(), granted


def setting(rows: Rows, name: str) -> Any:
    row = rows.one("SELECT value FROM meta WHERE name = ?", name)
    return row[0] if row else None


def set_setting(txn: Txn, name: str, value: Any) -> None:
    txn.run("INSERT INTO meta VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET value = excluded.value", name, value)


def add_counters(txn: Txn, sums: Iterable[tuple[str, int]]) -> None:
    """Fold what a process counted into the totals."""
    for name, value in sums:
        if value:
            txn.run("INSERT INTO counters VALUES (?, ?) ON CONFLICT(name) DO UPDATE SET value = value + excluded.value", name, value)


def counters(rows: Rows) -> dict[str, int]:
    return {name: value for name, value in rows.all("SELECT name, value FROM counters") if type(value) is int}


def recount(txn: Txn) -> None:
    """Note totals as the rows have them, and drop payloads and links that belong to no row."""
    txn.run("DELETE FROM payloads WHERE id NOT IN (SELECT id FROM entries)")
    txn.run("DELETE FROM entries WHERE kind = 'value' AND id NOT IN (SELECT id FROM payloads)")
    txn.run("DELETE FROM links WHERE tree NOT IN (SELECT id FROM entries) OR member NOT IN (SELECT id FROM entries)")
    by_space = sums(txn)
    for (id,) in txn.all("SELECT id FROM spaces"):
        txn.run("UPDATE spaces SET bytes = ?, charge = ?, inline = ?, entries = ? WHERE id = ?", *by_space.get(id, _EMPTY), id)


def sums(rows: Rows) -> dict[int, tuple[int, ...]]:
    """By space: bytes, charge, inline and entries as the rows have them, a page of them at a time."""
    by_space: dict[int, tuple[int, ...]] = {}
    for low, high in entries.ranges(rows, "entries"):
        for space, *more in rows.all(_SUMS, low, high):
            by_space[space] = tuple(map(sum, zip(by_space.get(space, _EMPTY), more, strict=True)))
    return by_space
