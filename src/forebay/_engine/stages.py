"""A write in progress under ``tmp/``: bytes come in any order from several threads, and outlive the process that wrote them.

Beside a file of more than 1 MiB lies its *chunk map*: a header that says what is being written, then one byte a chunk, set
after the chunk's bytes were written. What dies leaves a map that is true: a successor fetches the other chunks only.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import xxhash

from forebay._engine.blobs import BLOCK, digest_of_block
from forebay._engine.root import Root
from forebay._kernel import host, mappings
from forebay._model import Buffer, Partial, Span
from forebay.errors import CacheFault, NoSpace

CHUNK = 1 << 20
_HEADER = 512
_FIELDS = struct.Struct("<8sQQQ36sH")  # magic, root id, total, chunk size, boot id, length of the validator
_MAGIC = b"FBCHUNK1"
_LONGEST = _HEADER - _FIELDS.size - 8  # room for a validator, before the header's own xxh3-64
_GROWTH = (1 << 20, 64 << 20)


def footprint(size: int, block: int) -> int:
    """How many bytes of disk a write of ``size`` bytes takes while it is in progress, its map included."""
    whole = -(-size // block) * block
    return whole + -(-_map_size(size) // block) * block if size > CHUNK else whole


def progress_of(root: Root, keyhash: int, id: int) -> tuple[int, int | None] | None:
    """``(done, total)`` bytes of a write of any process; total None: not known; None: there is no such write."""
    path = root.tmp(keyhash, id)
    try:
        found = path.lstat()
        chunk_map = _read_map(path, root)
    except OSError:
        return None
    if chunk_map is None:
        return found.st_size, None
    return _Coverage.of_map(chunk_map).done, chunk_map.total


def remove_partial(root: Root, keyhash: int, id: int) -> bool:
    """Remove what a write left; False if nothing was there. Caller: holds the key's lock, so that no one writes or resumes it."""
    path = root.tmp(keyhash, id)
    return host.unlink(path) | host.unlink(_map_path(path))


class Stage:
    """One write in progress. `write` is callable from several threads at once; the rest by one thread, before and after.

    ``id``, ``keyhash``, ``path``: whose bytes, and where. ``partial``: what an earlier write left and can be gone on from.
    ``total``: bytes, None: not known. ``on_grow``: called with the new size before a write of unknown total grows beyond what
    was granted; may raise `NoSpace`.
    """

    partial: Partial | None
    total: int | None

    _lock: threading.Lock  # guards all that follows
    _coverage: _Coverage
    _blocks: dict[int, _Block]  # blocks whose bytes have come in order so far
    _map: memoryview | None
    _growing: threading.Lock  # guards what follows; `on_grow` is called under it, which may take long
    _granted: int  # bytes that a write of unknown total may have

    def __init__(self, root: Root, keyhash: int, id: int, fd: int) -> None:
        self.root, self.keyhash, self.id = root, keyhash, id
        self.path = root.tmp(keyhash, id)
        self.partial, self.total = None, None
        self.on_grow: Callable[[int], None] | None = None
        self._fd: int | None = fd
        self._lock, self._growing = threading.Lock(), threading.Lock()
        self._coverage, self._blocks, self._granted, self._map = _Coverage(), {}, 0, None

    @classmethod
    def create(cls, root: Root, keyhash: int, id: int) -> Self:
        """A new write. Caller: holds the key's lock and a reservation that names this ``id``. Raises OSError."""
        fd = host.create(root.tmp(keyhash, id), root.file_mode)
        try:
            host.chmod(fd, root.file_mode)
        except BaseException:
            os.close(fd)
            raise
        return cls(root, keyhash, id, fd)

    @classmethod
    def resume(cls, root: Root, keyhash: int, id: int) -> Self | None:
        """Go on with what an earlier write left; None if there is nothing. Its ``partial`` is set where the bytes can be trusted:
        a sane map, a strong validator, no reboot since. Caller: holds the key's lock."""
        path = root.tmp(keyhash, id)
        try:
            found = path.lstat()
            if not stat.S_ISREG(found.st_mode):
                return None
            if stat.S_IMODE(found.st_mode) == root.blob_mode != root.file_mode:
                host.chmod(path, root.file_mode)  # its writer died between its last step and the publication
            stage = cls(root, keyhash, id, host.open_write(path))
        except FileNotFoundError:
            return None
        chunk_map = _read_map(path, root)
        if chunk_map and chunk_map.validator and chunk_map.boot == host.boot_id() and found.st_size == chunk_map.total:
            missing = _Coverage.of_map(chunk_map).missing(chunk_map.total)
            stage.partial = Partial(chunk_map.total, chunk_map.validator, tuple(missing))
        return stage

    @property
    def done(self) -> int:
        """Bytes that are on disk."""
        with self._lock:
            return self._coverage.done

    def begin(self, total: int | None, validator: str | None = None) -> tuple[Span, ...]:
        """Make room for ``total`` bytes and give the spans that are wanted: what `partial` lacks where size and ``validator`` are
        still its, else all; one span of length -1 where the total is unknown. ``validator``: only a strong one.

        Called again when the object changed: what was written before is void. Raises OSError (ENOSPC) where the disk is full.
        """
        kept, self.partial = self.partial, None
        if kept and (kept.size, kept.validator) == (total, validator):
            return self._continue(kept)
        self._reset()
        self.total = total
        if total is None:
            return (Span(0, -1),)
        if total > CHUNK:  # a smaller one is written at once, and needs no promise
            host.allocate(self._descriptor(), 0, total)
            self._map = _make_map(self.path, self.root, total, validator or "")
        return self.missing()

    def missing(self) -> tuple[Span, ...]:
        """The spans of a known total that were not written yet."""
        with self._lock:
            return tuple(self._coverage.missing(self.total or 0))

    def write(self, offset: int, data: Buffer) -> None:
        """Put ``data`` at ``offset``. By several threads at once, in any order; the same bytes may come again.

        Raises OSError where the disk fails, `NoSpace` where ``on_grow`` does, ValueError for bytes beyond a known total.
        """
        view = memoryview(data).cast("B")
        end = offset + len(view)
        if self.total is not None and end > self.total:
            raise ValueError(f"bytes up to {end:,} came for {self.total:,}")
        if self.total is None:
            self.grow_to(end)
        host.pwrite(self._descriptor(), view, offset)
        with self._lock:
            self._hash_locked(offset, view)
            start, covered = self._coverage.add(offset, end)
            self._mark_locked(offset, end, start, covered)

    def grow_to(self, size: int) -> None:
        """Have room for ``size`` bytes granted, in steps, where the total is unknown."""
        with self._growing:
            if size <= self._granted:
                return
            ample = size + min(max(size // 4, _GROWTH[0]), _GROWTH[1])
            if self.on_grow:
                try:
                    self.on_grow(ample)
                except NoSpace:
                    self.on_grow(ample := size)
            self._granted = ample

    def finish(self) -> tuple[int, bytes]:
        """All bytes have come: ``(size, checksum)``. The file then awaits its publication, and this stage is closed.

        Raises `CacheFault` if bytes are missing, OSError where the disk fails; the stage is then as before.
        """
        fd = self._descriptor()
        size = self.total if self.total is not None else self._coverage.end
        lacking = self._coverage.missing(size)
        if lacking:
            raise CacheFault(f"{self.path}: {sum(s.length for s in lacking):,} of {size:,} bytes never came", path=str(self.path))
        if os.fstat(fd).st_size != size:
            host.truncate(fd, size)
        checksum = self._checksum(fd, size)
        host.chmod(fd, self.root.blob_mode)
        self.close()
        # Last: up to here a successor of a process that was killed finds all bytes marked, and fetches none.
        host.unlink(_map_path(self.path))
        return size, checksum

    def close(self) -> None:
        """Let go, and leave what was written for a successor. Idempotent."""
        with self._lock:
            self._map = None
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None

    def discard(self) -> None:
        """Let go, and remove what was written. Idempotent."""
        self.close()
        remove_partial(self.root, self.keyhash, self.id)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise CacheFault(f"{self.path} is closed", path=str(self.path))
        return self._fd

    def _continue(self, kept: Partial) -> tuple[Span, ...]:
        self.total = kept.size
        chunk_map = _read_map(self.path, self.root)
        if chunk_map is None:
            raise CacheFault(f"the chunk map of {self.path} vanished", path=str(self.path))
        self._coverage = _Coverage.of_map(chunk_map)
        self._map = _open_map(self.path, kept.size)
        return self.missing()

    def _reset(self) -> None:
        with self._lock:
            self._coverage, self._blocks, self._granted, self._map = _Coverage(), {}, 0, None
        # The map first: while it is there, its marks must be true.
        host.unlink(_map_path(self.path))
        if os.fstat(self._descriptor()).st_size:
            host.truncate(self._descriptor(), 0)

    def _hash_locked(self, offset: int, view: memoryview) -> None:
        """Hash what comes in order within its block; a block with bytes out of order is read again at the end."""
        while view:
            number, within = divmod(offset, BLOCK)
            piece = view[: BLOCK - within]
            block = self._blocks.get(number)
            if block is None:
                block = self._blocks[number] = _Block()
            block.add(within, piece)
            offset, view = offset + len(piece), view[len(piece) :]

    def _mark_locked(self, offset: int, end: int, start: int, covered: int) -> None:
        """Mark the chunks of what was just written that are now whole: [start, covered) is on disk around it."""
        if self._map is None or self.total is None:
            return
        for chunk in range(offset // CHUNK, -(-end // CHUNK)):
            whole = start <= chunk * CHUNK and covered >= min((chunk + 1) * CHUNK, self.total)
            if whole and not self._map[_HEADER + chunk]:
                host.set_byte(self._map, _HEADER + chunk, 1)

    def _checksum(self, fd: int, size: int) -> bytes:
        whole = xxhash.xxh3_128()
        for start in range(0, size, BLOCK):
            block = self._blocks.get(start // BLOCK)
            in_order = block is not None and block.length == min(BLOCK, size - start)
            whole.update(block.digest() if block and in_order else digest_of_block(fd, start))
        return whole.digest()


class _Block:
    """The running hash of a block of the file. ``length``: bytes hashed so far; -1: some came out of order."""

    __slots__ = ("_hash", "length")

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()
        self.length = 0

    def add(self, within: int, piece: memoryview) -> None:
        if within != self.length:
            self.length = -1
        else:
            self._hash.update(piece)
            self.length += len(piece)

    def digest(self) -> bytes:
        return self._hash.digest()


class _Coverage:
    """Which bytes have come: a sorted list of disjoint ranges that do not touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @classmethod
    def of_map(cls, chunk_map: _ChunkMap) -> Self:
        coverage = cls()
        for chunk, mark in enumerate(chunk_map.marks):
            if mark:
                coverage.add(chunk * CHUNK, min((chunk + 1) * CHUNK, chunk_map.total))
        return coverage

    @property
    def done(self) -> int:
        return sum(self._ends) - sum(self._starts)

    @property
    def end(self) -> int:
        return self._ends[-1] if self._ends else 0

    def add(self, start: int, end: int) -> tuple[int, int]:
        """Take in ``[start, end)``; gives the range that it is now part of."""
        if start >= end:
            return start, end
        first = bisect_left(self._ends, start)
        last = first
        while last < len(self._starts) and self._starts[last] <= end:
            start, end = min(start, self._starts[last]), max(end, self._ends[last])
            last += 1
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        return start, end

    def missing(self, total: int) -> list[Span]:
        edges = [0, *(edge for pair in zip(self._starts, self._ends, strict=True) for edge in pair), total]
        return [Span(a, b - a) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


class _ChunkMap:
    """What a chunk map says."""

    def __init__(self, total: int, validator: str, boot: str, marks: Sequence[int]) -> None:
        self.total, self.validator, self.boot, self.marks = total, validator, boot, marks


def _map_path(path: Path) -> Path:
    return path.with_name(path.name + ".map")


def _map_size(total: int) -> int:
    return _HEADER + -(-total // CHUNK)


def _make_map(path: Path, root: Root, total: int, validator: str) -> memoryview:
    """A new map with no chunk marked. Without a validator, or with one that is too long, it only shows progress."""
    name = validator.encode()
    if len(name) > _LONGEST:
        name = b""
    header = _FIELDS.pack(_MAGIC, root.id, total, CHUNK, host.boot_id().encode(), len(name)) + name
    header += xxhash.xxh3_64_digest(header)
    fd = host.create(_map_path(path), root.file_mode)
    try:
        host.chmod(fd, root.file_mode)
        host.allocate(fd, 0, _map_size(total))
        host.pwrite(fd, header, 0)
        return mappings.map_file(fd, _map_size(total), writable=True)
    finally:
        os.close(fd)


def _open_map(path: Path, total: int) -> memoryview:
    fd = host.open_write(_map_path(path))
    try:
        return mappings.map_file(fd, _map_size(total), writable=True)
    finally:
        os.close(fd)


def _read_map(path: Path, root: Root) -> _ChunkMap | None:
    """What the map beside ``path`` says; None if there is none, or it is not sane."""
    try:
        fd = os.open(_map_path(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        content = file.read()
    if len(content) < _HEADER:
        return None
    magic, root_id, total, chunk, boot, length = _FIELDS.unpack_from(content)
    end = _FIELDS.size + length
    if (magic, root_id, chunk, len(content)) != (_MAGIC, root.id, CHUNK, _map_size(total)) or length > _LONGEST:
        return None
    if content[end : end + 8] != xxhash.xxh3_64_digest(content[:end]) or content[_HEADER:].strip(b"\0\1"):
        return None
    return _ChunkMap(total, content[_FIELDS.size : end].decode(), boot.decode(), content[_HEADER:])
