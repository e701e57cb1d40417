"""Validation of rows: any program that can write to a root can write to its catalog.

Only this module decides which values may become file names, offsets of locks and indexes of tables. A row with other values is damage:
it is served to no caller, logged once, and set aside by the next transaction: see `Rows.report_unreadable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from forebay._engine.catalog.transactions import KINDS, NUMBERS, SLOTS, Rows
from forebay._engine.files.layout import is_suffix
from forebay._kernel.below import why_not_below
from forebay._model import Entry

_SEGMENTS = 1 << 24
_NONE = type(None)
_ENTRY = (int, str, str, str, int, int, int, bytes, str, float, str, str, str, str)
_ENTRIES = frozenset((_ENTRY, (*_ENTRY[:8], _NONE, *_ENTRY[9:])))  # with a validator, and without


def is_number(value: object, end: int = NUMBERS) -> bool:
    """Whether it is a number that Forebay could have written: an id, a keyhash, a count of bytes."""
    return type(value) is int and 0 <= value < end


def is_member(name: object) -> bool:
    """Whether a file below a tree may be called so."""
    return type(name) is str and not why_not_below(name)


def is_kind(value: object) -> bool:
    return type(value) is str and value in KINDS


def is_slot(value: object) -> bool:
    return is_number(value, SLOTS)


def entry(rows: Rows, row: Sequence[Any]) -> Entry | None:
    """Make an entry from its columns, in the order of its fields; None for a row that Forebay did not write."""
    if (
        tuple(map(type, row)) in _ENTRIES
        and 0 < row[0] < NUMBERS
        and row[3] in KINDS
        and row[4] >= 0
        and row[5] >= 0
        and 0 <= row[6] < SLOTS
        and (not row[12] or is_suffix(row[12]))
    ):
        return Entry(*row)
    rows.report_unreadable("entries", (row[0],), f"the row of {row[2]!r}")
    return None


def entries(rows: Rows, several: Iterable[Sequence[Any]]) -> list[Entry]:
    """`entry`, for several rows: the valid ones."""
    return [sound for row in several if (sound := entry(rows, row)) is not None]


def files(rows: Rows, several: Sequence[Sequence[Any]], shape: str) -> list[Any]:
    """Return the valid rows, each of which begins with an entry's id. ``shape`` gives the type of each column: ``i`` a number, ``s`` a
    slot, ``t`` a text, ``k`` a kind, ``r`` a real number, ``x`` a suffix."""
    if not several:
        return []
    if all(_COLUMNS[letter](column) for letter, column in zip(shape, zip(*several, strict=True), strict=True)):
        return list(several)
    tests = [(at, _TESTS[letter]) for at, letter in enumerate(shape)]
    sound_rows = []
    for row in several:
        if all(test(row[at]) for at, test in tests):
            sound_rows.append(row)
        else:
            rows.report_unreadable("entries", (row[0],), f"the row {row[0]}")
    return sound_rows


def reservation(rows: Rows, row: Sequence[Any]) -> bool:
    """Whether a reservation, in the order of its columns, is valid."""
    id, owner, who, space, key, keyhash, size, charge, suffix, created, count = row
    numbers = (id, space, keyhash, size, charge, count, 0 if owner is None else owner)
    if all(map(is_number, numbers)) and id > 0 and type(key) is type(who) is str and is_suffix(suffix) and type(created) is float:
        return True
    rows.report_unreadable("reservations", (id,), f"the reservation of {key!r}")
    return False


def segment(rows: Rows, row: Sequence[Any]) -> bool:
    """Whether a segment of a pack, in the order of its columns, is valid."""
    pack, number, size, is_open = row
    if is_number(pack) and is_number(number, _SEGMENTS) and is_number(size) and is_number(is_open, 2):
        return True
    rows.report_unreadable("segments", (pack, number), f"segment {number!r} of pack {pack!r}")
    return False


def _are_numbers(values: Sequence[Any], end: int = NUMBERS) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < end


_TESTS: dict[str, Callable[[object], bool]] = {
    "t": lambda value: type(value) is str,
    "r": lambda value: type(value) is float,
    "i": is_number,
    "s": is_slot,
    "k": is_kind,
    "x": is_suffix,
}
# The same of whole columns: many rows that are all sound are the rule.
_COLUMNS: dict[str, Callable[[Sequence[Any]], bool]] = {
    "t": lambda values: set(map(type, values)) == {str},
    "r": lambda values: set(map(type, values)) == {float},
    "i": _are_numbers,
    "s": lambda values: _are_numbers(values, SLOTS),
    "k": lambda values: all(map(is_kind, values)),
    "x": lambda values: all(map(is_suffix, values)),
}
