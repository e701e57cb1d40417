"""The file that PFIO's ``preserve`` writes: an index of one record a slot, then the data. Read, written from an array, imported as one.

A record is two 8-byte integers in native byte order, the offset (unsigned) and the length (signed; negative: the slot is empty).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from forebay import codecs, errors
from forebay._engine.files import pack_files
from forebay._kernel import host
from forebay._kernel.interrupts import guarded, paced, point
from forebay._kernel.mappings import map_file
from forebay.cache import Cache
from forebay.remote import absolute_path, as_text
from forebay.samples import Samples

RECORD = struct.Struct("Qq")
EMPTY = RECORD.pack(0, -1)


class PfioFile:
    """Such a file, mapped and read-only. Callable from any thread, usable in both processes after a fork; pickled as its path.

    ``length``: the least number of slots; None: all that it has, as the offset of the data shows, which follow the index. Raises OSError
    if it cannot be read, `Damaged` if it is no such file, `ConfigError` if it has fewer slots."""

    @guarded
    def __init__(self, path: str | os.PathLike[str], length: int | None = None) -> None:
        self.path = absolute_path(as_text(path))
        with open(self.path, "rb") as file:
            view = map_file(file.fileno(), os.fstat(file.fileno()).st_size)
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
        """The bytes of slot i, in the mapping; None if it is empty. Raises IndexError, and `Damaged` if its record points outside of the
        file's data."""
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
        """The first slot that is empty, or whose record points outside of the file's data; None if all are complete."""
        for i, (offset, length) in paced(enumerate(RECORD.iter_unpack(self._view[: self._start]))):
            if length < 0 or offset < self._start or offset + length > self._size:
                return i
        return None


def _checked(view: memoryview, path: str, length: int) -> int:
    """``length``, if the index may have so many records."""
    end = len(view)
    if RECORD.size * length <= end:
        index = RECORD.iter_unpack(view[: RECORD.size * length])
        end = min((offset for offset, size in index if size >= 0), default=end)
    if RECORD.size * length > end:
        slots = _count(view, path)
        message = f"{path} has {slots} slots, but {length} were requested: give the length that it was created with"
        raise errors.ConfigError(message, name="length", value=length, found=slots)
    return length


def _count(view: memoryview, path: str) -> int:
    """The number of records in the index. The first value follows it directly."""
    end, count = len(view), 0
    for offset, size in RECORD.iter_unpack(view[: end - end % RECORD.size]):
        if RECORD.size * count >= end:
            break
        count += 1
        if size >= 0:
            end = min(end, offset)
    if count == 0 or RECORD.size * count != end:
        raise errors.Damaged(f"{path} is not a file that PFIO preserved, or its index was cut short", key="", path=path)
    return count


# -- arrays as such files ----------------------------------------------------------------------------------------------

_PAGE = 4096
_BLOCK = 1 << 20
_BLOCKS = 16 << 20  # that the kernel copies at once


def write_array(file: BinaryIO, samples: Samples) -> None:
    """Write the filled slots of a frozen array into ``file``, which is new, and sync it. Raises OSError.

    Its segments are written as they are: on file systems that share blocks (XFS, btrfs) no byte is copied. The file consists of

    - the index, 16 bytes a slot, as in PFIO's own files;
    - one value directly after it, by which readers find the end of the index;
    - the segments, each from a page boundary on, so that whole blocks can be shared; the index points into them."""
    pack: Any = samples._pack  # one that stores nothing has no filled slots
    index = bytearray(EMPTY * len(samples))
    end = len(index)
    first = next(((i, data) for i in samples if (data := samples.get(i)) is not None), None)
    if first is not None:
        file.seek(end)
        file.write(first[1])
        RECORD.pack_into(index, RECORD.size * first[0], end, len(first[1]))
        end += len(first[1])
    used: dict[int, int] = {}
    for _, number, start, size in _locations(samples, pack, first):
        used[number] = max(used.get(number, 0), start + size)
    bases = {}
    for number in sorted(used):
        bases[number] = end = _rounded(end)
        end += used[number]
    for i, number, start, size in _locations(samples, pack, first):
        RECORD.pack_into(index, RECORD.size * i, bases[number] + start, size)
    file.seek(0)
    file.write(index)
    file.flush()
    for number, base in bases.items():
        _copy_segment(pack, number, file.fileno(), base, used[number])
    os.fsync(file.fileno())


def _locations(samples: Samples, pack: Any, first: tuple[int, memoryview] | None) -> Iterator[tuple[int, int, int, int]]:
    """(slot, segment, offset in the segment, size) of all filled slots but the first."""
    for i in paced(samples):
        data = samples.get(i)
        if data is not None and first is not None and i != first[0]:
            number, offset = pack_files.place_of(pack._cells[i])
            yield i, number, offset + pack_files.HEADER, len(data)


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _copy_segment(pack: Any, number: int, fd: int, base: int, size: int) -> None:
    source = pack_files.open_segment(pack._root, pack.id, number)
    try:
        done, whole = 0, _rounded(size)  # whole pages, otherwise their blocks cannot be shared; a segment consists of whole pages
        while done < whole and (count := host.copy_range(source, fd, done, min(_BLOCKS, whole - done), base + done)):
            done += count
            point()
        while done < size and (block := os.pread(source, min(_BLOCK, size - done), done)):
            done += os.pwrite(fd, block, base + done)
            point()
    finally:
        os.close(source)


@guarded
def import_pfio(
    path: str | os.PathLike[str], name: str, cache: Cache | None = None, *, codec: str = "raw", overwrite: bool = False
) -> Samples[Any]:  # fmt: skip
    """Import a file that PFIO's ``MultiprocessFileCache.preserve`` wrote, as a frozen array called ``name``.

    The array belongs to ``cache``, else to the default cache, which stays open as long as the array. ``codec``: ``raw``, or ``pickle``
    for values that were put with ``do_pickle``; nothing is unpickled here. Raises `ConfigError` if the name is taken (unless
    ``overwrite``), `Damaged` if the file is not PFIO's or was cut short, `NoSpace` if it does not fit, and OSError."""
    payload_of: Callable[[Any], bytes] | None = bytes if codec == "raw" else codecs.framed if codec == "pickle" else None
    if payload_of is None:
        raise errors.ConfigError(f"codec={codec!r}: PFIO stores 'raw' or 'pickle'", name="codec", value=codec)
    file = PfioFile(path)
    target = Cache() if cache is None else cache
    array: Samples[Any] = target.samples(length=len(file), codec=codec)
    try:
        for slot in paced(file):
            data = file.get(slot)
            if data is not None and not array._pack.put(slot, lambda stream: (payload_of(stream),), data):
                raise errors.NoSpace.of(f"slot {slot} of {path}", len(data), 0, target.budget)
        if not array.preserve(name, overwrite):
            message = f"there is an array {name!r} already: choose another name, or overwrite=True"
            raise errors.ConfigError(message, name="name", value=name)
    except BaseException:
        array.close()
        raise
    return array
