"""The rows of a table, read from the pages of a database file by hand: SQLite finds no row below a page that cannot be read.

It reads what https://www.sqlite.org/fileformat.html says: the log (the frames up to the last commit, with their checksums), the pointer
map, which names the parent of each page and is there because the catalog has `auto_vacuum`, the leaves of tables, and overflow pages. By
the pointer map a leaf is known to be the table's though the pages between it and the root are garbage, and a free page, which still has
rows that were deleted, is known to be none.

Nothing is believed: a row that makes no sense is left out, and whoever asks checks the others."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import TypeAlias

from forebay._engine.catalog.transactions import text_or_bytes
from forebay._engine.files.layout import PAGE

Value: TypeAlias = int | float | str | bytes | None

_MAPPED = PAGE // 5
"""Pages that one page of the pointer map tells of."""
_OVERFLOW, _NEXT_OVERFLOW, _BELOW = 3, 4, 5
"""Kinds of pages in the pointer map: the first and a later page of a long row, and a page of a table below its root."""
_LEAF = 13
_DEEPEST = 20
_MOST_LOCAL = PAGE - 35
_LEAST_LOCAL = (PAGE - 12) * 32 // 255 - 23
_WIDTHS = 0, 1, 2, 3, 4, 6, 8
"""Bytes of a number, by the type it has in a record."""
_WAL_HEAD, _FRAME_HEAD = 32, 24
_LITTLE, _BIG = 0x377F0682, 0x377F0683


class Pages:
    """The pages of a database, as of the last commit in its log. Both are open files, the log None where there is none."""

    def __init__(self, file: int, log: int | None = None) -> None:
        self._file, self._log = file, log
        self._count = os.fstat(file).st_size // PAGE
        self._frames: dict[int, int] = {}
        self._map: dict[int, bytes] = {}
        if log is not None:
            self._read_log(log)

    def rows(self, root: int, columns: int, longest: int, wanted: Callable[[int], bool]) -> Iterator[tuple[Value, ...]]:
        """The rows of the table that begins at page ``root``, whose ids, their first columns, are ``wanted``: those of so many columns
        that are no longer than ``longest`` bytes. In no order. A real number that is a whole one is an int, as it is stored."""
        left = self._count  # a page is part of one row
        for number in range(1, self._count + 1):
            if not self._is_below(number, root):
                continue
            page = self._page(number)
            if len(page) < PAGE or page[0] != _LEAF:
                continue
            cells = int.from_bytes(page[3:5])
            for (at,) in struct.iter_unpack(">H", page[8 : 8 + 2 * min(cells, (PAGE - 8) // 2)]):
                try:
                    size, at = _varint(page, at)
                    id, at = _varint(page, at)
                    id -= (id >> 63) << 64
                    if size <= longest and wanted(id) and size // PAGE <= left:
                        left -= size // PAGE
                        values = _record(self._payload(number, page, at, size))
                        if len(values) == columns:
                            yield id, *values[1:]
                except (ValueError, IndexError, struct.error):
                    continue

    def _is_below(self, number: int, root: int) -> bool:
        """Whether a page is the table's that begins at ``root``."""
        for _ in range(_DEEPEST):
            if number == root:
                return True
            kind, number = self._parent(number)
            if kind != _BELOW:
                return False
        return False

    def _parent(self, number: int) -> tuple[int, int]:
        """What the pointer map says of a page."""
        place = (number - 2) // (_MAPPED + 1) * (_MAPPED + 1) + 2
        if not max(place, 2) < number <= self._count:
            return 0, 0
        if place not in self._map:
            self._map[place] = self._page(place)
        entry = self._map[place][5 * (number - place - 1) :][:5]
        return (entry[0], int.from_bytes(entry[1:])) if len(entry) == 5 else (0, 0)

    def _payload(self, number: int, page: bytes, at: int, size: int) -> bytes:
        """All bytes of a row, of which so many lie in its leaf, and the others in a chain of pages."""
        local = size
        if size > _MOST_LOCAL:
            local = _LEAST_LOCAL + (size - _LEAST_LOCAL) % (PAGE - 4)
            local = local if local <= _MOST_LOCAL else _LEAST_LOCAL
        parts, left, kind = [page[at : at + local]], size - local, _OVERFLOW
        following = page[at + local : at + local + 4]
        while left > 0:
            then = int.from_bytes(following)
            if self._parent(then) != (kind, number):
                raise ValueError("the chain of a row is broken")
            page, number, kind = self._page(then), then, _NEXT_OVERFLOW
            following = page[:4]
            parts.append(page[4 : 4 + left])
            left -= PAGE - 4
        data = b"".join(parts)
        if len(data) != size:
            raise ValueError("a row is cut off")
        return data

    def _page(self, number: int) -> bytes:
        if number in self._frames and self._log is not None:
            return _read(self._log, PAGE, self._frames[number])
        return _read(self._file, PAGE, (number - 1) * PAGE)

    def _read_log(self, log: int) -> None:
        """Find where the log has pages: those of the frames up to the last commit of which all frames are whole."""
        head = _read(log, _WAL_HEAD, 0)
        order = {_LITTLE: "<", _BIG: ">"}.get(int.from_bytes(head[:4]))
        if len(head) < _WAL_HEAD or order is None or int.from_bytes(head[8:12]) != PAGE:
            return
        sums, at, pending, most = _sums(head[:24], order, (0, 0)), _WAL_HEAD, dict[int, int](), self._count
        if sums != struct.unpack(">II", head[24:]):
            return
        while len(frame := _read(log, _FRAME_HEAD + PAGE, at)) == _FRAME_HEAD + PAGE and frame[8:16] == head[16:24]:
            sums = _sums(frame[:8] + frame[_FRAME_HEAD:], order, sums)
            if sums != struct.unpack(">II", frame[16:24]):
                return
            number, count = struct.unpack(">II", frame[:8])
            pending[number] = at + _FRAME_HEAD
            if count:
                self._frames.update(pending)
                pending.clear()
                self._count = min(count, most + len(self._frames))
            at += len(frame)


def _read(fd: int, size: int, at: int) -> bytes:
    """So many bytes of a file, or fewer where there are no more or the disk has lost them."""
    try:
        return os.pread(fd, size, at)
    except OSError:
        return b""


def _sums(data: bytes, order: str, sums: tuple[int, int]) -> tuple[int, int]:
    """The checksums of the log, which go on from those before."""
    first, second = sums
    for one, two in struct.iter_unpack(f"{order}II", data):
        first = (first + one + second) & 0xFFFFFFFF
        second = (second + two + first) & 0xFFFFFFFF
    return first, second


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that begins there, without a sign, and where it ends."""
    value = 0
    for end in range(at, at + 8):
        value = value << 7 | data[end] & 127
        if data[end] < 128:
            return value, end + 1
    return value << 8 | data[at + 8], at + 9


def _record(data: bytes) -> list[Value]:
    """The columns of a row. Raises ValueError or IndexError for what is none."""
    end, at = _varint(data, 0)
    values, begin = list[Value](), end
    while at < end:
        kind, at = _varint(data, at)
        if kind >= 12:
            part = data[begin : begin + (kind - 12) // 2]
            begin += (kind - 12) // 2
            values.append(text_or_bytes(part) if kind % 2 else part)
        elif kind in (8, 9):
            values.append(kind - 8)
        elif kind == 7:
            values.append(struct.unpack(">d", data[begin : begin + 8])[0])
            begin += 8
        elif kind == 0:
            values.append(None)
        elif kind < 7:
            values.append(int.from_bytes(data[begin : begin + _WIDTHS[kind]], signed=True))
            begin += _WIDTHS[kind]
        else:
            raise ValueError("no type of a column")
    if at != end or begin != len(data):
        raise ValueError("a row of another length")
    return values
