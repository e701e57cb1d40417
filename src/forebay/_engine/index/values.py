"""Copies of small values in mapped memory, so that the first read of one in a process needs no statement.

``shared/cells``   a page of header; a byte for each 64 KiB of cells, 1 where they have blocks on the disk; then the cells, of 2 KiB each:
                   the slot and the id of an entry, and its bytes

The value of a slot has the cell with the number of the slot, modulo the number of cells: as many as fit into a 32nd of the budget, at most
131,072.

A cell is a *hint that proves itself*, like the index of keys: the reader knows the size and 56 bits of the checksum of what it wants from
the entry's record. What is torn, stale, of another entry or missing is asked of the catalog. So any process may store to a cell without a
lock, and the file can be deleted at any time."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from typing import NamedTuple

from forebay._engine.files.blobs import checksum_of, mark_of
from forebay._engine.files.layout import PAGE, Root
from forebay._kernel import host, locks, mappings
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.index")

SHARE = 32
"""The cells take at most this part of the budget: they are not charged."""
_CELL = 2048
_OWNER = struct.Struct("<QQ")
LARGEST = _CELL - _OWNER.size
"""Bytes of the largest value that has a cell."""
_STEP = 64 << 10
"""Blocks are allocated for so many bytes of cells at once."""
_LEAST, _MOST = _STEP, 256 << 20
_HEADER = PAGE + _MOST // _STEP
_MAGIC = int.from_bytes(b"FBVALS01", "little")
_MOVED = 2  # word of the header, after the magic and the root's id
_ZEROS = bytes(_STEP)


class _Cells(NamedTuple):
    """The file in use. ``mask``: the number of cells less 1; ``file``: which file it is."""

    view: memoryview
    words: memoryview
    mask: int
    file: tuple[int, int]


class ValueCells:
    """The cells of one root. Callable from any thread and, mappings being inherited, after a fork. Nothing in them is ever missed: a call
    that meets a fault of the disk does without.

    ``id_of``: see `Index.id_of`; ``budget``: returns the budget of the root."""

    def __init__(self, root: Root, id_of: Callable[[int], int], budget: Callable[[], int]) -> None:
        self._root, self._id_of, self._budget = root, id_of, budget
        self._path = root.shared_dir / "cells"
        self._cells: _Cells | None = None
        self._was_opened = self._is_sized = False

    def get(self, slot: int, size: int, mark: int) -> bytes | None:
        """The value of a slot, if its cell has it. ``mark``: see `blobs.mark_of`."""
        cells = self._cells or self._open_once()
        if cells is None or size > LARGEST:
            return None
        view, words, mask, _ = cells
        start = (slot & mask) * _CELL
        if not view[PAGE + start // _STEP] or words[_MOVED]:
            return None
        start += _HEADER + _OWNER.size
        value = bytes(view[start : start + size])
        return value if mark_of(checksum_of(value)) == mark else None

    def put(self, slot: int, id: int, value: bytes | memoryview, *, is_new: bool) -> None:
        """Let `get` return the value of an entry. ``is_new``: it takes the cell of another entry; else only if that one is gone, so that
        entries that are read in turn do not replace each other."""
        if len(value) > LARGEST or self._root.read_only:
            return
        try:
            cells = self._usable()
            start = (slot & cells.mask) * _CELL
            if not cells.view[PAGE + start // _STEP]:
                self._allocate(cells, start // _STEP)
            elif not is_new and self._is_of_another(cells, _HEADER + start, slot):
                return
            host.set_bytes(cells.view, _HEADER + start, _OWNER.pack(slot, id) + value)
        except (CacheFault, OSError) as error:
            log.debug("the value of slot %d has no cell: %s", slot, str(error))

    def resize(self) -> None:
        """The budget may change: the next `put` compares it with the number of cells."""
        self._is_sized = False

    def _is_of_another(self, cells: _Cells, start: int, slot: int) -> bool:
        """Whether a cell has the value of another slot's present entry."""
        other, id = _OWNER.unpack_from(cells.view, start)
        if other == slot or not id:
            return False
        try:
            return bool(self._id_of(other) == id)
        except (CacheFault, OSError, IndexError):
            return False

    # -- the file --------------------------------------------------------------------------------------------------

    def _open_once(self) -> _Cells | None:
        """What `get` looks at: it looks for the file once, and then leaves it to `put` to find or create one."""
        if not self._was_opened:
            self._was_opened, self._cells = True, self._open()
        return self._cells

    def _usable(self) -> _Cells:
        """The cells to store to, created if there are none, and replaced where the budget was changed since they were."""
        cells = self._cells
        if cells is not None and self._is_sized and not cells.words[_MOVED]:
            return cells
        size = _size_for(self._budget())
        cells = self._open()
        if cells is not None and (cells.mask + 1 != size // _CELL or cells.words[_MOVED]):
            host.set_word(cells.words, _MOVED, 1)
            self._root.files.make_way(self._path)
            cells = None
        self._cells, self._is_sized = cells or self._create(size), True
        return self._cells

    def _create(self, size: int) -> _Cells:
        def fill(fd: int) -> None:
            host.pwrite(fd, (_MAGIC.to_bytes(8, "little") + self._root.id.to_bytes(8, "little")).ljust(_HEADER, b"\0"), 0)
            host.truncate(fd, _HEADER + size)  # no block: a store waits for `_allocate`

        self._root.files.mkdir(self._root.shared_dir, self._root.dir_mode)
        self._root.install(self._path, fill)
        cells = self._open()
        if cells is None:
            self._root.files.make_way(self._path)
            raise CacheFault(f"{self._path} had no cells of this root: it is created again", path=str(self._path))
        return cells

    def _allocate(self, cells: _Cells, step: int) -> None:
        """Have the blocks of some cells: a store into a hole would kill the process if the disk is full."""
        try:
            fd = self._root.files.open(self._path, os.O_RDWR)
        except FileNotFoundError:
            self._cells = None
            raise
        try:
            if locks.file_of(fd) != cells.file:
                self._cells = None
                raise CacheFault(f"{self._path} was replaced", path=str(self._path))
            host.pwrite(fd, _ZEROS, _HEADER + step * _STEP)
        finally:
            os.close(fd)
        host.set_byte(cells.view, PAGE + step, 1)

    def _open(self) -> _Cells | None:
        writable = not self._root.read_only
        try:
            fd = self._root.files.open(self._path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            size = status.st_size - _HEADER
            if not _LEAST <= size <= _MOST or size & (size - 1):
                return None
            view = mappings.map_file(fd, status.st_size, writable=writable)
        except OSError:
            return None
        finally:
            os.close(fd)
        words = mappings.words(view[:PAGE])
        if (words[0], words[1]) != (_MAGIC, self._root.id):
            return None
        return _Cells(view, words, size // _CELL - 1, (status.st_dev, status.st_ino))


def _size_for(budget: int) -> int:
    """Bytes of all cells in a root with this budget: a power of two."""
    return min(max(1 << (budget // SHARE).bit_length() - 1, _LEAST), _MOST) if budget >= SHARE else _LEAST
