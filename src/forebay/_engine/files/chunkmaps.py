"""Which bytes of a file have been written so far: exact ranges in memory, and whole chunks in a file beside it, for a successor.

A chunk map is a header that identifies the object, then one byte per chunk, set after the chunk's bytes were written, then one checksum
per chunk, stored before that byte. So a killed writer leaves a correct map, and its successor detects bytes that the disk lost."""

from __future__ import annotations

import errno
import os
import struct
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from forebay._engine.files.blobs import CHUNK
from forebay._engine.files.layout import Root
from forebay._kernel import host, mappings
from forebay._kernel.below import NoPlainFile
from forebay._model import Span

_HEADER = 512
_FIELDS = struct.Struct("<8sQQQ36sH")  # magic, root id, total, chunk size, epoch, length of the validator
_MAGIC = b"FBCHUNK3"
_SUM = 16
_LONGEST = _HEADER - _FIELDS.size - 8  # of a validator, before the header's own xxh3-64


class Coverage:
    """Which bytes of a file there are: a sorted list of ranges that neither overlap nor touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def done(self) -> int:
        """How many bytes there are."""
        return sum(self._ends) - sum(self._starts)

    @property
    def end(self) -> int:
        """The first byte after the last one that is there."""
        return self._ends[-1] if self._ends else 0

    def add(self, start: int, end: int) -> Span:
        """Add ``[start, end)``; returns the whole range that contains it now."""
        if start < end:
            first = last = bisect_left(self._ends, start)
            while last < len(self._starts) and self._starts[last] <= end:
                start, end = min(start, self._starts[last]), max(end, self._ends[last])
                last += 1
            self._starts[first:last] = [start]
            self._ends[first:last] = [end]
        return Span(start, end - start)

    def spans(self) -> tuple[Span, ...]:
        """The ranges that there are."""
        return tuple(Span(start, end - start) for start, end in zip(self._starts, self._ends, strict=True))

    def has(self, start: int, end: int) -> bool:
        """Whether all of ``[start, end)`` is there."""
        at = bisect_left(self._ends, end)
        return at < len(self._starts) and self._starts[at] <= start

    def missing(self, total: int) -> tuple[Span, ...]:
        """The gaps up to ``total``."""
        ends, starts = [0, *self._ends], [*self._starts, total]
        return tuple(Span(a, b - a) for a, b in zip(ends, starts, strict=True) if b > a)


@dataclass(frozen=True)
class ChunkMapContent:
    """The content of a chunk map. ``validator``: empty if nothing can be resumed."""

    total: int
    validator: str
    boot: str
    coverage: Coverage
    sums: bytes

    def sum_of(self, chunk: int) -> bytes:
        """The checksum that `mark` stored for a chunk."""
        return self.sums[chunk * _SUM : (chunk + 1) * _SUM]


class ChunkMap:
    """A chunk map that is written to. Caller: does so from one thread at a time."""

    def __init__(self, path: Path, root: Root, total: int) -> None:
        """Open the map at ``path``, which `create` made and `read` accepted."""
        self._total = total
        fd = root.files.open_write(path)
        try:
            self._bytes = mappings.map_file(fd, size_of(total), writable=True)
        finally:
            os.close(fd)

    @classmethod
    def create(cls, path: Path, root: Root, total: int, validator: str) -> ChunkMap:
        """A new map with no chunk marked. Without a validator, or with one that is too long, it only shows progress."""
        name = validator.encode()
        name = name if len(name) <= _LONGEST else b""
        header = _FIELDS.pack(_MAGIC, root.id, total, CHUNK, root.epoch.encode(), len(name)) + name
        fd = root.files.create(path, root.file_mode)
        try:
            host.chmod(fd, root.file_mode)
            host.allocate(fd, 0, size_of(total))
            host.pwrite(fd, header + xxhash.xxh3_64_digest(header), 0)
        finally:
            os.close(fd)
        return cls(path, root, total)

    def mark(self, written: Span, whole: Span, sum_of: Callable[[int], bytes]) -> None:
        """Mark the chunks of ``written`` that are complete: ``whole`` is the written range around it. ``sum_of``: returns a chunk's
        checksum."""
        sums = _HEADER + _count(self._total)
        for chunk in range(written.start // CHUNK, -(-written.end // CHUNK)):
            there = whole.start <= chunk * CHUNK and whole.end >= min((chunk + 1) * CHUNK, self._total)
            if there and not self._bytes[_HEADER + chunk]:
                host.set_bytes(self._bytes, sums + chunk * _SUM, sum_of(chunk))
                host.set_byte(self._bytes, _HEADER + chunk, 1)


def size_of(total: int) -> int:
    """The bytes of the chunk map of a file of ``total`` bytes."""
    return _HEADER + _count(total) * (1 + _SUM)


def _count(total: int) -> int:
    return -(-total // CHUNK)


def read(path: Path, root: Root) -> ChunkMapContent | None:
    """The content of the map at ``path``; None if there is none, or it is not sane."""
    try:
        fd = root.files.open(path)
    except (FileNotFoundError, NoPlainFile):
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:  # a symbolic link: not Forebay's
            raise
        return None
    try:
        return _parsed(fd, root)
    except UnicodeDecodeError:
        return None
    finally:
        os.close(fd)


def _parsed(fd: int, root: Root) -> ChunkMapContent | None:
    size, content = os.fstat(fd).st_size, os.pread(fd, _HEADER, 0)
    if len(content) < _HEADER:
        return None
    magic, root_id, total, chunk, boot, length = _FIELDS.unpack_from(content)
    if (magic, root_id, chunk, size) != (_MAGIC, root.id, CHUNK, size_of(total)) or length > _LONGEST:
        return None
    content += os.pread(fd, size - _HEADER, _HEADER)  # only now: the file may be of any size
    if len(content) != size:
        return None
    end, marks = _FIELDS.size + length, content[_HEADER : _HEADER + _count(total)]
    if content[end : end + 8] != xxhash.xxh3_64_digest(content[:end]) or marks.strip(b"\0\1"):
        return None
    return ChunkMapContent(
        total, content[_FIELDS.size : end].decode(), boot.decode(), _covered(marks, total), content[_HEADER + len(marks) :]
    )


def _covered(marks: bytes, total: int) -> Coverage:
    coverage = Coverage()
    for chunk, mark in enumerate(marks):
        if mark:
            coverage.add(chunk * CHUNK, min((chunk + 1) * CHUNK, total))
    return coverage
