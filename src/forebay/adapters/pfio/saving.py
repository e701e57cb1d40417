"""An array as a file of PFIO's format, with its segments as they lie: on file systems that share blocks (XFS, btrfs) no byte is copied.

index       16 bytes a slot, as PFIO has it
one sample  directly behind it, by which readers find where the index ends
segments    each from a page on, so that whole blocks can be shared; the index points into them
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from typing import BinaryIO

from forebay._engine.files import pack_files, pack_records
from forebay._engine.packs.pack import Pack
from forebay.adapters.pfio.file import EMPTY, RECORD, write_pfio
from forebay.samples import Samples

_PAGE = 4096
_BLOCK = 1 << 20
_NOT_HERE = frozenset([errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EPERM])


def write_array(file: BinaryIO, samples: Samples) -> None:
    """Write what is filled into ``file``, which is new, and have it on the disk. Raises OSError. Nobody may fill more meanwhile."""
    pack, length = samples._pack, len(samples)
    if not isinstance(pack, Pack):
        write_pfio(file, length, ())
        return
    index = bytearray(EMPTY * length)
    end = RECORD.size * length
    first = next(((i, data) for i in samples if (data := samples.get(i)) is not None), None)
    if first is not None:
        file.seek(end)
        file.write(first[1])
        RECORD.pack_into(index, RECORD.size * first[0], end, len(first[1]))
        end += len(first[1])
    used: dict[int, int] = {}
    for _, number, start, size in _places(samples, pack, first):
        used[number] = max(used.get(number, 0), start + size)
    bases = {}
    for number in sorted(used):
        bases[number] = end = _rounded(end)
        end += used[number]
    for i, number, start, size in _places(samples, pack, first):
        RECORD.pack_into(index, RECORD.size * i, bases[number] + start, size)
    file.seek(0)
    file.write(index)
    file.flush()
    for number, base in bases.items():
        _copy_segment(pack, number, file.fileno(), base, used[number])
    os.fsync(file.fileno())


def _places(samples: Samples, pack: Pack, first: tuple[int, memoryview] | None) -> Iterator[tuple[int, int, int, int]]:
    """Slot, segment, where its bytes begin there, how many; of all filled slots but the first."""
    for i in samples:
        data = samples.get(i)
        if data is not None and first is not None and i != first[0]:
            number, offset = pack_records.place_of(pack._cells[i])
            yield i, number, offset + pack_records.HEADER, len(data)


def _rounded(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def _copy_segment(pack: Pack, number: int, fd: int, base: int, size: int) -> None:
    source = pack_files.open_segment(pack._root, pack.id, number)
    try:
        # Whole pages, else their blocks cannot be shared; a segment has them.
        done = _copy_in_kernel(source, fd, base, _rounded(size))
        while done < size and (block := os.pread(source, min(_BLOCK, size - done), done)):
            done += os.pwrite(fd, block, base + done)
    finally:
        os.close(source)


def _copy_in_kernel(source: int, fd: int, base: int, size: int) -> int:
    """How many bytes could be taken over so."""
    done = 0
    while done < size:
        try:
            count = os.copy_file_range(source, fd, size - done, done, base + done)
        except OSError as error:
            if error.errno not in _NOT_HERE:
                raise
            return done
        if not count:
            return done
        done += count
    return done
