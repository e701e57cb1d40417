"""Statements about entries, their payloads and links."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from forebay._engine.catalog import checked
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.schema import COUNT, LIVE, SUPERSEDED
from forebay._engine.catalog.transactions import Rows, Txn
from forebay._engine.files.layout import CatalogBroken
from forebay._kernel import interrupts
from forebay._model import Entry

T = TypeVar("T")

_COLUMNS = "e.id, s.name, e.key, e.kind, e.size, e.charge, e.slot, e.checksum, e.validator, e.created, e.boot, e.life, e.suffix, e.meta"
_FROM = f"SELECT {_COLUMNS} FROM entries e JOIN spaces s ON s.id = e.space"
# SQLite takes the columns of an index from the index, which may lead to another row where a page was lost: the row has the last word.
_BY_KEY = _FROM.replace("e.key", "(SELECT own.key FROM entries own WHERE own.id = e.id AND own.space = e.space)")
_ADD = "INSERT OR IGNORE INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"


Spared = Literal["pinned", "kept", "none"]
"""Which live entries are not ended: those that are pinned, or all that do not end with their last lease, or none."""


class Superseded(NamedTuple):
    """An entry that is served no more."""

    id: int
    slot: int
    kind: str
    suffix: str


class Ended(NamedTuple):
    """An entry whose row is gone."""

    id: int
    slot: int
    suffix: str
    space: int
    kind: str
    state: int
    size: int
    charge: int


FileName: TypeAlias = tuple[int, str, str]
"""A file or directory of a root: id, kind and suffix."""

_SUPERSEDE = f"UPDATE entries SET state = {SUPERSEDED} WHERE id = ? AND state = {LIVE} RETURNING space, size"
_KEEP = f"INSERT INTO entries VALUES (?, ?, '', ?, {SUPERSEDED}, 0, ?, ?, x'', NULL, 0.0, '', 'cached', ?, '')"
_INSERT_DATA = "INSERT INTO payloads VALUES (?, ?)"
RANGE = 2048
"""Rows that are read at once where all are read."""
_AT_ONCE = 16
_SIXTEEN = ", ".join("?" * _AT_ONCE)
_FIND_MANY = f"{_BY_KEY} WHERE e.space = ? AND e.state = {LIVE} AND e.key IN ({_SIXTEEN})"
_SIZES = f"SELECT id, size FROM entries WHERE space = ? AND state = {LIVE} AND key IN ({_SIXTEEN})"
_END = (
    f"DELETE FROM entries WHERE id IN ({_SIXTEEN}) AND NOT EXISTS (SELECT 1 FROM links WHERE member = entries.id)"
    "{} RETURNING id, slot, suffix, space, kind, state, size, charge"
)
_END_SPARING = {
    "none": _END.format(""),
    "pinned": _END.format(f" AND (life != 'pinned' OR state > {LIVE})"),
    "kept": _END.format(f" AND (life = 'held' OR state > {LIVE})"),
}
_KNOWN = {table: f"SELECT id FROM {table} WHERE id IN ({_SIXTEEN})" for table in ("entries", "reservations")}
_FILES = f"SELECT id, kind, suffix FROM entries WHERE id IN ({_SIXTEEN}) AND state = {LIVE}"
_VICTIMS = {
    count: f"SELECT id, slot, charge, size, kind, suffix FROM entries WHERE id IN ({', '.join('?' * count)}) AND state = {LIVE}"
    " AND life != 'pinned' AND id NOT IN (SELECT member FROM links WHERE member = entries.id)"
    for count in (_AT_ONCE, 512)
}
_PAYLOAD = "SELECT data FROM payloads WHERE id = ?"
_DELETE_DATA = f"DELETE FROM payloads WHERE id IN ({_SIXTEEN})"


def find(rows: Rows, space: int, key: str) -> Entry | None:
    """The live entry of this key."""
    row = rows.one(f"{_BY_KEY} WHERE e.space = ? AND e.key = ? AND e.state = {LIVE}", space, key)
    if row and row[2] != key:
        _misled(key, row[2])
    return checked.entry(rows, row) if row else None


def _misled(key: str, other: object) -> NoReturn:
    raise CatalogBroken(f"the catalog is damaged: its index leads from {key!r} to {other!r}", damaged=True)


def _check_order(table: str, keys: Sequence[Any]) -> None:
    """Raise `CatalogBroken` unless the keys of rows rise: a walk through such rows may have no end, and miss some."""
    if not all(map(operator.lt, keys, keys[1:])):
        _not_in_order(table)


def _not_in_order(table: str) -> NoReturn:
    raise CatalogBroken(f"the catalog is damaged: the rows of {table} are not in order", damaged=True)


def sizes(rows: Rows, space: int, keys: Sequence[str]) -> dict[int, int]:
    """By id the sizes of the live entries of these keys."""
    return dict(pair for some in _sixteens(keys) for pair in checked.files(rows, rows.all(_SIZES, space, *some), "ii"))


def find_many(rows: Rows, space: int, keys: Sequence[str]) -> list[Entry]:
    """The live entries of these keys, in any order."""
    result: list[Entry] = []
    for some in _sixteens(keys):
        several = rows.all(_FIND_MANY, space, *some)
        for row in several:
            if row[2] not in some:
                _misled(some[0], row[2])
        result += checked.entries(rows, several)
    return result


def _sixteens(several: Sequence[T], length: int = _AT_ONCE) -> Iterator[list[T]]:
    """In portions of one length, the last one filled up by repeating: one statement for any number, so that it is parsed once."""
    for at in range(0, len(several), length):
        some = list(several[at : at + length])
        yield some + some[:1] * (length - len(some))


def by_id(rows: Rows, id: int) -> Entry | None:
    """The entry with this id, which may be any number, while it is live."""
    if not checked.is_number(id):
        return None
    row = rows.one(f"{_FROM} WHERE e.id = ? AND e.state = {LIVE}", id)
    return checked.entry(rows, row) if row else None


def payload(rows: Rows, id: int) -> bytes | None:
    """The bytes of a small value."""
    row = rows.one(_PAYLOAD, id)
    if row and type(row[0]) is not bytes:
        rows.report_unreadable("entries", (id,), f"the value {id}")
        return None
    return row[0] if row else None


def quick_payload(rows: Catalog, id: int) -> bytes | None:
    """`payload`, for a caller that compares the checksum, and where that is wrong or there is none takes the long way."""
    row = rows.quick_one(_PAYLOAD, id)
    return row[0] if row is not None and type(row[0]) is bytes else None


def live(rows: Rows, space: int | None = None) -> list[Entry]:
    """All live entries, or those of one space."""
    where, values = ("AND e.space = ?", (space,)) if space is not None else ("", ())
    return checked.entries(rows, rows.all(f"{_FROM} WHERE e.state = {LIVE} {where}", *values))


def sample(rows: Rows, count: int) -> list[Entry]:
    """Up to ``count`` live files and small values, spread evenly over the ids: all of them, where there are no more."""
    where = f"WHERE e.state = {LIVE} AND e.kind IN ('blob', 'value')"
    (first, last), few = rows.all("SELECT min(id), max(id) FROM entries")[0], rows.all(f"{_FROM} {where} LIMIT ?", count + 1)
    if len(few) > count:
        steps = (first + (last - first) * number // count for number in range(count))
        row_at = f"{_FROM} {where} AND e.id >= ? ORDER BY e.id LIMIT 1"
        few = list({row[0]: row for step in steps if (row := rows.one(row_at, step)) is not None}.values())
    return checked.entries(rows, few)


def any_trees(rows: Rows) -> bool:
    """Whether any entry is kept by a tree."""
    return bool(rows.all("SELECT EXISTS (SELECT 1 FROM links)")[0][0])


def page(rows: Rows, space: int, after: str | None, limit: int, *, backwards: bool = False) -> list[Entry]:
    """The live entries of one space after the key ``after``, in order of keys; empty at the end."""
    columns = _COLUMNS.replace("s.name", "(SELECT name FROM spaces WHERE id = e.space)")
    return _page(rows, columns, space, after, limit, backwards, lambda page_rows: checked.entries(rows, page_rows))


def page_of_facts(
    rows: Rows, space: int, after: str | None, limit: int, *, backwards: bool = False
) -> list[tuple[int, str, int, int, str, float]]:
    """`page`, of id, key, slot, size, life and time of creation alone."""
    columns = "e.id, e.key, e.slot, e.size, e.life, e.created"
    return _page(rows, columns, space, after, limit, backwards, lambda page_rows: checked.files(rows, page_rows, "itsitr"))


def page_of_keys(rows: Rows, space: int, after: str | None, limit: int, *, backwards: bool = False) -> list[tuple[str, int]]:
    """`page`, of keys and slots alone."""
    page_rows = _page(rows, "e.id, e.key, e.slot", space, after, limit, backwards, lambda page_rows: checked.files(rows, page_rows, "its"))
    return [(key, slot) for _, key, slot in page_rows]


def _page(
    rows: Rows, columns: str, space: int, after: str | None, limit: int, backwards: bool, sound: Callable[[list[Any]], list[T]]
) -> list[T]:  # fmt: skip
    """Empty where no sound row is left: a page of damaged ones is passed by, whatever their keys are."""
    sign, order = ("<", "DESC") if backwards else (">", "ASC")
    sql = f"SELECT {columns} FROM entries e WHERE e.space = ? AND e.state = {LIVE} {{}} ORDER BY e.key {order} LIMIT ?"
    if after is None:
        page_rows = rows.all(sql.format(""), space, limit)
    else:
        page_rows = rows.all(sql.format(f"AND e.key {sign} ?"), space, after, limit)
    passed: set[Any] = set()
    while page_rows and not (ours := sound(page_rows)):
        if page_rows[-1][0] in passed:
            _not_in_order("entries")
        passed.add(page_rows[-1][0])
        last = f"coalesce((SELECT key FROM entries WHERE id = ? AND state = {LIVE}), ?)"  # it may have been set aside meanwhile
        twice = [page_rows[-1][0], after] * 2
        page_rows = rows.all(sql.format(f"AND ({last} IS NULL OR e.key {sign} {last})"), space, *twice, limit)
    return ours if page_rows else []


def by_ids(rows: Rows, ids: Sequence[int]) -> list[Entry]:
    """The live ones of these entries."""
    sql = f"{_FROM} WHERE e.id IN ({_SIXTEEN}) AND e.state = {LIVE}"
    return [entry for some in _sixteens(ids) for entry in checked.entries(rows, rows.all(sql, *some))]


def has_any(rows: Rows, space: int, prefix: str) -> bool:
    """Whether any live key of this space begins with ``prefix``."""
    last = f"{prefix}\U0010ffff"
    return (
        rows.one(f"SELECT 1 FROM entries WHERE space = ? AND key >= ? AND key < ? AND state = {LIVE} LIMIT 1", space, prefix, last)
        is not None
    )


def with_space(rows: Rows, id: int) -> tuple[int, Entry] | None:
    """The live entry with this id, and the number of its space."""
    entry, row = by_id(rows, id), rows.one("SELECT space FROM entries WHERE id = ?", id)
    return (row[0], entry) if entry is not None and row and checked.is_number(row[0]) else None


def slots_between(rows: Rows, low: int, high: int) -> list[tuple[int, int]]:
    """Slot and id of the live entries with ids above ``low``, up to ``high``."""
    there = rows.all(f"SELECT id, slot FROM entries WHERE id > ? AND id <= ? AND state = {LIVE} ORDER BY id", low, high)
    _check_order("entries", [low, *(id for id, _ in there)])
    return [(slot, id) for id, slot in checked.files(rows, there, "is")]


def ranges(rows: Rows, table: str) -> Iterator[tuple[int, int]]:
    """The ids of a table in portions: (from behind, to)."""
    low = -1 << 63
    while True:
        (high,) = rows.one(f"SELECT max(id) FROM (SELECT id FROM {table} WHERE id > ? ORDER BY id LIMIT ?)", low, RANGE)
        if high is None:
            return
        _check_order(table, (low, high))
        yield low, high
        low = high


def count(txn: Txn, sign: int, several: Sequence[tuple[int, str, int, int, int]]) -> None:
    """Add entries to the totals of their spaces, or with a ``sign`` of -1 subtract them: space, kind, state, size and charge of each."""
    sums: dict[int, list[int]] = {}
    for space, kind, state, size, charge in several:
        total = sums.setdefault(space, [0, 0, 0, 0])
        total[0] += sign * size * (state == LIVE)
        total[1] += sign * charge
        total[2] += sign * charge * (kind == "value")
        total[3] += sign
    for space, total in sums.items():
        txn.run(COUNT, *total, space)


def insert(
    txn: Txn, space: int, new: Sequence[tuple[Entry, bytes | None]], supersede: Callable[[list[Entry]], None]
) -> list[Entry]:  # fmt: skip
    """Add live entries, with the payloads of small values. ``supersede`` is called with those that had their keys: a pin stays with its
    key. Returns the entries as they are now."""
    added, rows, size, charge, inline = list[Entry](), list[tuple[Any, ...]](), 0, 0, 0
    for entry, data in new:
        added.append(entry)
        rows.append(_row(space, entry))
        size, charge, inline = size + entry.size, charge + entry.charge, inline + entry.charge * (data is not None)
    if there := len(rows) - txn.run_many(_ADD, rows):
        mine = {entry.id for entry in added}
        replaced = {old.key: old for old in find_many(txn, space, [entry.key for entry in added]) if old.id not in mine}
        if len(replaced) != there:
            raise CatalogBroken("the catalog is damaged: an id was given twice", damaged=True)
        supersede(list(replaced.values()))
        for at, entry in enumerate(added):
            if (old := replaced.get(entry.key)) is not None:
                added[at] = entry._replace(life="pinned") if old.life == "pinned" else entry
                txn.run(_ADD, *_row(space, added[at]))
    for entry, data in new:
        if data is not None:
            txn.run(_INSERT_DATA, entry.id, data)
    txn.run(COUNT, size, charge, inline, len(new), space)
    return added


def _row(space: int, e: Entry) -> tuple[Any, ...]:
    return (
        e.id, space, e.key, e.kind, LIVE, e.slot, e.size, e.charge, e.checksum, e.validator, e.created, e.boot, e.life, e.suffix, e.meta
    )  # fmt: skip


def supersede(txn: Txn, entry: Entry) -> None:
    """Stop serving an entry: a small value ends now, anything else with its last lease."""
    if entry.kind == "value":
        end(txn, [entry.id], spares="none")
    else:
        for space, size in txn.all(_SUPERSEDE, entry.id):
            txn.run(COUNT, -size, 0, 0, 0, space)


def end(txn: Txn, ids: Sequence[int], *, spares: Spared = "pinned") -> list[Ended]:
    """Delete the rows of entries, and what belongs to them; returns those that are not spared, nor linked from a tree, nor gone."""
    sql = _END_SPARING[spares]
    ended = [Ended(*row) for some in _sixteens(ids) for row in txn.all(sql, *some)]
    for some in _sixteens([one.id for one in ended if one.kind == "value"]):
        txn.run(_DELETE_DATA, *some)
    for one in ended:
        if one.kind == "tree":
            txn.run("DELETE FROM links WHERE tree = ?", one.id)
        elif one.kind == "pack":
            txn.run("DELETE FROM segments WHERE pack = ?", one.id)
        elif one.kind == "session":
            txn.run("UPDATE entries SET life = 'held' WHERE validator = ? AND life = 'cached'", session_of(one.id))
    count(txn, -1, [one[3:] for one in ended])
    return ended


def keep(txn: Txn, several: Sequence[Ended]) -> None:
    """Count entries whose files cannot be removed: as what was superseded, which a later sweep takes."""
    txn.run_many(_KEEP, [(one.id, one.space, one.kind, one.size, one.charge, one.suffix) for one in several])
    count(txn, 1, [(one.space, one.kind, SUPERSEDED, one.size, one.charge) for one in several])


def session_of(id: int) -> str:
    """The validator of entries that are kept no longer than the session ``id``: then the sweep takes them."""
    return f"session:{id:x}"


def superseded(rows: Rows, limit: int = 256) -> list[Superseded]:
    """Entries that are served no more, whose bytes still exist."""
    found = rows.all(f"SELECT id, slot, kind, suffix FROM entries WHERE state > {LIVE} LIMIT ?", limit)
    return [Superseded(*row) for row in checked.files(rows, found, "iskx")]


def held(rows: Rows, after: int, limit: int) -> list[Entry]:
    """Entries that live only as long as a process holds them, by id after ``after``."""
    held_rows = rows.all(f"{_FROM} WHERE e.life = 'held' AND e.state = {LIVE} AND e.id > ? ORDER BY e.id LIMIT ?", after, limit)
    return checked.entries(rows, held_rows)


def is_known(rows: Rows, id: int) -> bool:
    """Whether a row or a reservation names this id."""
    return bool(rows.all("SELECT 1 FROM entries WHERE id = ? UNION ALL SELECT 1 FROM reservations WHERE id = ?", id, id))


def has_name(rows: Rows, id: int) -> bool:
    """Whether an entry has, or had, a name in this catalog: not one whose file was found without a row."""
    return bool(rows.all("SELECT 1 FROM entries WHERE id = ? AND key != ''", id))


def known(rows: Rows, ids: Sequence[int]) -> set[int]:
    """Those of some ids that `is_known` is true of."""
    return {row[0] for some in _sixteens(ids) for table in ("entries", "reservations") for row in rows.all(_KNOWN[table], *some)}


def unnamed(rows: Rows, names: Sequence[FileName]) -> set[FileName]:
    """Of some files and directories those that nothing names: no row or reservation has the id, or a live row has another kind or suffix.

    Of a superseded row any file may be: one that was set aside has lost its suffix."""
    ids = list({id for id, _, _ in names})
    ours = known(rows, ids)
    files = {row[0]: row for some in _sixteens(ids) for row in checked.files(rows, rows.all(_FILES, *some), "ikx")}
    return {name for name in names if name[0] not in ours or _file_of(files.get(name[0], name)) != _file_of(name)}


def _file_of(name: FileName) -> FileName:
    id, kind, suffix = name
    return id, kind, suffix if kind == "blob" else ""


def between(rows: Rows, low: int, high: int, *, values: bool) -> list[Entry]:
    """The live entries with ids above ``low``, up to ``high``; with ``values``, also the small ones in the catalog."""
    kinds = "" if values else " AND e.kind != 'value'"
    return checked.entries(rows, rows.all(f"{_FROM} WHERE e.id > ? AND e.id <= ? AND e.state = {LIVE}{kinds}", low, high))


def victims(rows: Rows, ids: Sequence[int]) -> list[tuple[int, int, int, int, str, str]]:
    """What may be evicted of these: (id, slot, charge, size, kind, suffix) of what no pin and no link holds."""
    count = 512 if len(ids) > 256 else _AT_ONCE
    return [row for some in _sixteens(ids, count) for row in checked.files(rows, rows.all(_VICTIMS[count], *some), "isiikx")]


def set_life(txn: Txn, space: int, key: str, life: str) -> bool:
    return bool(txn.run(f"UPDATE entries SET life = ? WHERE space = ? AND key = ? AND state = {LIVE}", life, space, key))


def set_boot(txn: Txn, id: int, boot: str) -> None:
    txn.run("UPDATE entries SET boot = ? WHERE id = ?", boot, id)


def set_meta(txn: Txn, id: int, meta: str) -> None:
    txn.run("UPDATE entries SET meta = ? WHERE id = ?", meta, id)


def set_slot(txn: Txn, id: int, slot: int) -> None:
    txn.run("UPDATE entries SET slot = ? WHERE id = ?", slot, id)


def rename(txn: Txn, entry: Entry, space: int, key: str, slot: int) -> None:
    """Give a live entry another name and another slot. Caller: has superseded the entry that had the name."""
    before = txn.one("SELECT space FROM entries WHERE id = ?", entry.id)[0]
    count(txn, -1, [(before, entry.kind, LIVE, entry.size, entry.charge)])
    count(txn, 1, [(space, entry.kind, LIVE, entry.size, entry.charge)])
    txn.run("UPDATE entries SET space = ?, key = ?, slot = ? WHERE id = ?", space, key, slot, entry.id)


def link(txn: Txn, tree: int, members: Iterable[tuple[str, int]]) -> None:
    """Note which entries a tree is made of."""
    for name, member in members:
        txn.run("INSERT INTO links VALUES (?, ?, ?)", tree, name, member)


def resize(txn: Txn, space: int, entry: Entry, size: int, charge: int) -> None:
    """Set the size and the charge of a live entry that is no small value."""
    txn.run("UPDATE entries SET size = ?, charge = ? WHERE id = ?", size, charge, entry.id)
    txn.run(COUNT, size - entry.size, charge - entry.charge, 0, 0, space)


def members(rows: Rows, tree: int, like: int | None = None) -> list[tuple[str, Entry]]:
    """The files of a tree, whatever has become of their names: (name, entry), by name. ``like``: only those of whose names the tree with
    this id has a file, too."""
    chosen, values = (" AND l.name IN (SELECT name FROM links WHERE tree = ?)", (tree, like)) if like is not None else ("", (tree,))
    joined = "links l JOIN entries e ON e.id = l.member JOIN spaces s ON s.id = e.space"
    linked = rows.all(f"SELECT {_COLUMNS}, l.name FROM {joined} WHERE l.tree = ?{chosen}", *values)
    if not all(checked.is_member(row[-1]) for row in interrupts.paced(linked)):
        rows.report_unreadable("entries", (tree,), f"the directory {tree:x}, since the name of a file in it leads out of it")
        return []
    members = ((row[-1], checked.entry(rows, row[:-1])) for row in interrupts.paced(linked))
    return sorted((name, entry) for name, entry in members if entry is not None)
