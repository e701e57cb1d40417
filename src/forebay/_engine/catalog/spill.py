"""An order of more rows than memory should hold: they are sorted in an unnamed temporary file, which ends with this process."""

from __future__ import annotations

import marshal
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

from forebay._engine.catalog.transactions import translated
from forebay._kernel import host
from forebay._kernel.interrupts import guarded

ROWS = 256
"""Rows that are read at once."""
_CACHE = "-8000"  # KiB


class Spill:
    """Rows of plain values, each with a number to sort by. For one thread. Raises `CacheFault` where there is no room for the file."""

    def __init__(self) -> None:
        with host.uncopied, translated():
            self._con = sqlite3.connect("", isolation_level=None)
            self._con.execute(f"PRAGMA cache_size = {_CACHE}")
            self._con.execute("PRAGMA temp_store = FILE")
            self._con.execute("CREATE TABLE rows(number, data BLOB)")
            self._con.execute("BEGIN")

    def add(self, rows: Iterable[tuple[float, tuple[Any, ...]]]) -> None:
        pairs = [(number, marshal.dumps(row)) for number, row in rows]  # a function of the user's may give the number
        with host.uncopied, translated():
            self._con.executemany("INSERT INTO rows VALUES (?, ?)", pairs)

    def sorted(self, *, backwards: bool = False) -> Iterator[tuple[Any, ...]]:
        """All rows in order of their numbers; equal numbers in order of insertion. The file is removed at the end."""
        try:
            ordered = self._ordered("DESC" if backwards else "ASC")
            while rows := self._page(ordered):
                yield from rows
        finally:
            self._close()

    @guarded
    def _ordered(self, order: str) -> sqlite3.Cursor:
        with host.uncopied, translated():
            return self._con.execute(f"SELECT data FROM rows ORDER BY number {order}, rowid")

    @guarded
    def _page(self, ordered: sqlite3.Cursor) -> list[tuple[Any, ...]]:
        with host.uncopied, translated():
            return [marshal.loads(data) for (data,) in ordered.fetchmany(ROWS)]

    @guarded
    def _close(self) -> None:
        with host.uncopied:
            self._con.close()
