"""The file that PFIO's ``preserve`` writes: an index of one record a slot, then the data.

A record is two 8-byte integers in native byte order, the offset (unsigned) and the length (signed; negative: the slot is empty).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from forebay import errors
from forebay._kernel.mappings import map_file
from forebay._model import Buffer

RECORD = struct.Struct("Qq")
EMPTY = RECORD.pack(0, -1)


class PfioFile:
    """Such a file, mapped and read-only. Callable from any thread, usable in both processes after a fork, pickles as its path.

    ``length``: how many slots it must have at least; None: as many as it has, which the data show, since they begin where the index
    ends. Raises OSError where it cannot be read, `Damaged` where it is no such file, `ConfigError` where it has fewer slots."""

    def __init__(self, path: str | os.PathLike[str], length: int | None = None) -> None:
        self.path = os.path.abspath(path)
        view = _map(self.path)
        self.length = _count(view, self.path) if length is None else _checked(view, self.path, length)
        self._view, self._size, self._start = view, len(view), RECORD.size * self.length
        index = view[: self._start]
        self._offsets, self._lengths = index.cast("Q"), index.cast("q")

    def __len__(self) -> int:
        return self.length

    def __reduce__(self) -> tuple[Any, ...]:
        return PfioFile, (self.path, self.length)

    def __repr__(self) -> str:
        return f"<forebay.PfioFile {self.path!r}>"

    def get(self, i: int) -> memoryview | None:
        """The bytes of slot i, over the mapping; None if it is empty. Raises IndexError, and `Damaged` where its record points outside
        the file's data."""
        if not 0 <= i < self.length:
            raise IndexError(f"index {i} is out of range: {self.path} has {self.length} slots")
        at = 2 * i
        length = self._lengths[at + 1]
        if length < 0:
            return None
        offset = self._offsets[at]
        end = offset + length
        if offset < self._start or end > self._size:
            message = f"{self.path}: slot {i} names {length} bytes from {offset} on, which the file of {self._size} bytes does not have"
            raise errors.Damaged(message, key=str(i), path=self.path)
        return self._view[offset:end]

    def __iter__(self) -> Iterator[int]:
        """The slots that are not empty."""
        return (i for i, length in enumerate(self._lengths[1::2].tolist()) if length >= 0)

    def incomplete(self) -> int | None:
        """The first slot that is empty, or whose record points outside the file's data; None if all are whole."""
        for i, (offset, length) in enumerate(RECORD.iter_unpack(self._view[: self._start])):
            if length < 0 or offset < self._start or offset + length > self._size:
                return i
        return None


def _map(path: str) -> memoryview:
    with open(path, "rb") as file:
        return map_file(file.fileno(), os.fstat(file.fileno()).st_size)


def _checked(view: memoryview, path: str, length: int) -> int:
    """``length``, if the index may have so many records."""
    end = len(view)
    if RECORD.size * length <= end:
        index = RECORD.iter_unpack(view[: RECORD.size * length])
        end = min((offset for offset, size in index if size >= 0), default=end)
    if RECORD.size * length > end:
        found = _count(view, path)
        message = f"{path} has {found} slots, but {length} were wanted: give the length that it was made with"
        raise errors.ConfigError(message, name="length", value=length, found=found)
    return length


def _count(view: memoryview, path: str) -> int:
    """How many records the index has. The data that was put first lies directly behind it."""
    end, seen = len(view), 0
    for offset, size in RECORD.iter_unpack(view[: end - end % RECORD.size]):
        if RECORD.size * seen >= end:
            break
        seen += 1
        if size >= 0:
            end = min(end, offset)
    if seen == 0 or RECORD.size * seen != end:
        raise errors.Damaged(f"{path} is no file that PFIO preserved, or its index was cut short", key="", path=path)
    return seen


def write_pfio(file: BinaryIO, length: int, values: Iterable[tuple[int, Buffer]]) -> None:
    """Write such a file with these slots filled, and have it on the disk. ``file`` is new. Raises OSError."""
    index = bytearray(EMPTY * length)
    offset = RECORD.size * length
    file.seek(offset)
    for i, value in values:
        RECORD.pack_into(index, RECORD.size * i, offset, len(value))
        offset += file.write(value)
    file.seek(0)
    file.write(index)
    file.flush()
    os.fsync(file.fileno())
