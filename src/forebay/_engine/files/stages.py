"""A write in progress under ``tmp/``: bytes come in any order from several threads, and outlive the process that wrote them.

A file of more than 1 MiB has a chunk map beside it, so that a successor fetches only the missing bytes.

**Chunk maps.** Which bytes of a file have been written so far: exact ranges in memory, and whole chunks in a file beside it, for a
successor.

A chunk map is a header that identifies the object, then one byte per chunk, set after the chunk's bytes were written, then one checksum
per chunk, stored before that byte. So a killed writer leaves a correct map, and its successor detects bytes that the disk lost."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import xxhash

from forebay._engine.files.blobs import CHUNK, checksum_of, digest_of_chunk, seal
from forebay._engine.files.layout import SCARCE, Root
from forebay._kernel import host, interrupts, mappings
from forebay._kernel.below import NoPlainFile
from forebay._logs import logger
from forebay._model import Buffer, Partial, Span, is_frozen
from forebay.errors import CacheFault, NoSpace

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
            host.store_in_place(fd)
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


log = logger("forebay.stages")

_GROWTH = (1 << 20, 64 << 20)


def footprint(size: int, block: int) -> int:
    """How many bytes of disk a write of ``size`` bytes takes while it is in progress, its map included."""
    whole = -(-size // block) * block
    return whole + -(-size_of(size) // block) * block if size > CHUNK else whole


def progress_of(root: Root, keyhash: int, id: int) -> tuple[int, int | None] | None:
    """``(done, total)`` bytes of a write in any process; total None: unknown. None: there is no such write."""
    path = root.tmp(keyhash, id)
    try:
        size = root.files.lstat(path).st_size
        seen = read(root.tmp(keyhash, id, ".map"), root)
    except OSError:
        return None
    return (seen.coverage.done, seen.total) if seen else (size, None)


def remove_map(root: Root, keyhash: int, id: int) -> None:
    """Remove the map of a write that is published."""
    root.files.unlink(root.tmp(keyhash, id, ".map"))


def remove_partial(root: Root, keyhash: int, id: int) -> bool:
    """Remove what a write left; False if nothing was there. Caller: holds the key's lock, so that no one writes or resumes it."""
    if root.shared:
        root.files.unlink(root.tmp(keyhash, id, ".old"))
    return root.files.unlink(root.tmp(keyhash, id)) | root.files.unlink(root.tmp(keyhash, id, ".map"))


def _copy(source: int, target: int, start: int, length: int) -> None:
    end = start + length
    while start < end:
        count = host.copy_range(source, target, start, end - start)
        if not count:  # not between these two
            data = os.pread(source, end - start, start)
            host.pwrite(target, data, start)
            count = len(data)
        if not count:
            raise CacheFault(f"what another user left ends at byte {start:,}, before it should")
        start += count


class Stage:
    """One write in progress. `write` is callable from several threads at once, also during `close` and `discard`.

    ``id``, ``keyhash``, ``path``: of the entry, of its key, of the file. ``partial``: the part of an earlier write that can be resumed.
    ``total``: bytes, None: unknown. ``on_grow``: called with the new size before a write of unknown total exceeds its reservation; may
    raise `NoSpace`. A forked child does not share its parent's stage."""

    partial: Partial | None
    total: int | None
    _on_grow: Callable[[int], None] | None

    _idle: threading.Condition  # guards what follows; notified when no `write` is running
    _fd: int | None
    _writers: int  # calls of `write` that are under way
    _coverage: Coverage
    _chunks: dict[int, _Chunk]  # the hashes of what was written
    _map: ChunkMap | None
    _growing: threading.Lock  # guards what follows; `on_grow` is called under it, and may take long
    _granted: int  # bytes that a write of unknown total may have

    def __init__(self, root: Root, keyhash: int, id: int, fd: int) -> None:
        self.root, self.keyhash, self.id, self.path = root, keyhash, id, root.tmp(keyhash, id)
        self.partial = self.total = self._on_grow = None
        self._idle, self._fd, self._writers = threading.Condition(), fd, 0
        self._coverage, self._chunks, self._map = Coverage(), {}, None
        self._growing, self._granted = threading.Lock(), 0
        self._map_path, self._has_map = root.tmp(keyhash, id, ".map"), False  # whether a file may lie there

    @classmethod
    def create(cls, root: Root, keyhash: int, id: int) -> Self:
        """A new write. Caller: holds the key's lock and a reservation that names this ``id``. Raises OSError."""
        return cls(root, keyhash, id, root.files.create(root.tmp(keyhash, id), root.file_mode))

    @classmethod
    def resume(cls, root: Root, keyhash: int, id: int) -> Self | None:
        """Go on with what an earlier write left; None if there is nothing. Its ``partial`` is set where the bytes can be trusted:
        a sane map, a strong validator, the same epoch. Caller: holds the key's lock. Raises OSError."""
        path = root.tmp(keyhash, id)
        if root.shared:
            root.files.unlink(root.tmp(keyhash, id, ".old"))  # a process was killed while it took the file over
        try:
            status = root.files.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                root.files.remove_whole(path)
                return None
            if not status.st_mode & stat.S_IWUSR:
                root.files.chmod(path, root.file_mode)  # its writer died between the last steps of `finish`
            stage = cls(root, keyhash, id, root.files.open_write(path))
        except FileNotFoundError:
            return None
        except PermissionError:  # of another user, whose process died before the group got its permissions
            remove_partial(root, keyhash, id)
            return None
        try:
            stage._go_on(status)
        except BaseException as error:
            stage.close()
            if not isinstance(error, OSError) or error.errno in SCARCE:
                raise
            log.warning("%s cannot be resumed, and is restarted: %s", path, str(error))
            remove_partial(root, keyhash, id)
            return None
        return stage

    def _go_on(self, status: os.stat_result) -> None:
        self._has_map = True
        seen = read(self._map_path, self.root)
        if seen and seen.validator and seen.boot == self.root.epoch and status.st_size == seen.total:
            self._coverage = self._what_the_disk_kept(seen)
            self.partial = Partial(seen.total, seen.validator, self._coverage.missing(seen.total))
        if status.st_uid != os.geteuid() and os.geteuid() != 0:
            self._make_ours()

    def _make_ours(self) -> None:
        """Continue in a file of this user's: only a file's owner may set its mode and time, as `finish` does. The other user's bytes are
        moved piece by piece, so that the disk never holds much of them twice. If killed meanwhile, the write restarts from zero: the map
        is removed first."""
        old, old_path = self._descriptor(), self.root.tmp(self.keyhash, self.id, ".old")
        self._remove_map()
        self.root.files.rename(self.path, old_path)
        self._fd = self.root.files.create(self.path, self.root.file_mode)
        try:
            if self.partial is not None:
                self._move_over(old, self.partial)
        finally:
            os.close(old)
            self.root.files.unlink(old_path)

    def _move_over(self, old: int, partial: Partial) -> None:
        fd = self._descriptor()
        for span in self._coverage.spans():
            for start in range(span.start, span.end, CHUNK):
                _copy(old, fd, start, min(CHUNK, span.end - start))
                host.punch(old, start, min(CHUNK, span.end - start))
        host.punch(old, 0, partial.size)  # what was allocated for what is missing
        host.allocate(fd, 0, partial.size)
        self._has_map = True
        chunkmap = ChunkMap.create(self._map_path, self.root, partial.size, partial.validator)
        for span in self._coverage.spans():
            chunkmap.mark(span, span, lambda number: digest_of_chunk(fd, number * CHUNK))

    def _what_the_disk_kept(self, seen: ChunkMapContent) -> Coverage:
        """What of a partial is as it was written. All of it is read here, and not again by `finish`."""
        kept, lost, fd = Coverage(), 0, self._descriptor()
        for number in range(-(-seen.total // CHUNK)):
            interrupts.point()
            start, end = number * CHUNK, min((number + 1) * CHUNK, seen.total)
            if not seen.coverage.has(start, end):
                continue
            data = memoryview(os.pread(fd, end - start, start))
            if len(data) == end - start and xxhash.xxh3_128_digest(data) == seen.sum_of(number):
                kept.add(start, end)
                self._chunks.setdefault(number, _Chunk()).add(0, data)
            else:
                lost += 1
        if lost:
            log.warning("%s: %d chunks of what was left there are damaged: they are fetched again", self.path, lost)
        return kept

    @property
    def done(self) -> int:
        """Bytes that are on disk."""
        with self._idle:
            return self._coverage.done

    def begin(
        self, total: int | None, validator: str | None = None, *, on_grow: Callable[[int], None] | None = None, at_once: bool = False
    ) -> tuple[Span, ...]:  # fmt: skip
        """Reserve room for ``total`` bytes and return the spans to fetch: the missing ones of `partial` if size and ``validator`` still
        match, else all; one span of length -1 if the total is unknown. ``validator``: only a strong one.
        ``at_once``: the caller has all bytes, so nothing is allocated before they are written, and no successor can use a part of them.

        Called again when the object changed: everything written before is void. Raises OSError (ENOSPC) where the disk is full."""
        kept, self.partial = self.partial, None
        self.total, self._on_grow = total, on_grow
        if kept and (kept.size, kept.validator) == (total, validator):
            self._map = ChunkMap(self._map_path, self.root, kept.size)
            return self.missing()
        self._empty()
        if total is None:
            return (Span(0, -1),)
        if total > CHUNK and not at_once:  # a smaller one needs no promise either
            host.allocate(self._descriptor(), 0, total)
            self._has_map = True
            self._map = ChunkMap.create(self._map_path, self.root, total, validator or "")
        return self.missing()

    def missing(self) -> tuple[Span, ...]:
        """The spans of a known total that were not written yet."""
        with self._idle:
            return self._coverage.missing(self.total or 0)

    def write(self, offset: int, data: Buffer) -> None:
        """Write ``data`` at ``offset``. Callable from several threads at once, in any order; the same bytes may come again.

        Raises OSError where the disk fails, `NoSpace` where ``on_grow`` does, ValueError for bytes beyond a known total."""
        view = memoryview(data).cast("B")
        written = Span(offset, len(view))
        if self.total is None:
            self.grow_to(written.end)
        elif written.end > self.total:
            raise ValueError(f"received bytes up to {written.end:,} of {self.total:,}")
        with self._idle:
            fd = self._descriptor()
            self._writers += 1
        try:
            for at in range(0, len(view), host.SLICE):
                piece = view[at : at + host.SLICE]
                host.pwrite(fd, piece, offset + at)
                with self._idle:
                    self._take_in_locked(Span(offset + at, len(piece)), piece)
                interrupts.point()
        finally:
            with self._idle:
                self._writers -= 1
                self._idle.notify_all()

    def clone(self, source: int) -> bool:
        """Share all blocks of the open file ``source`` where the file system can; False where it cannot. Raises OSError."""
        if self.total is None or not host.clone(source, self._descriptor()):
            return False
        with self._idle:
            self._coverage.add(0, self.total)
        return True

    def grow_to(self, size: int) -> None:
        """Have room for ``size`` bytes granted, in steps, where the total is unknown."""
        with self._growing:
            if size <= self._granted:
                return
            ample = size + min(max(size // 4, _GROWTH[0]), _GROWTH[1])
            if self._on_grow:
                try:
                    self._on_grow(ample)
                except NoSpace:
                    self._on_grow(ample := size)
            self._granted = ample

    def finish(self) -> tuple[int, bytes]:
        """Check that all bytes have arrived; returns ``(size, checksum)``. The file then awaits its publication, and this stage is closed.
        Its map stays until it is published: a successor of a process that was killed finds all bytes marked, and fetches none.

        Raises `CacheFault` if bytes are missing, OSError where the disk fails; the stage is unchanged then."""
        fd = self._descriptor()
        size = self._coverage.end if self.total is None else self.total
        lacking = sum(span.length for span in self._coverage.missing(size))
        if lacking:
            raise CacheFault(f"{self.path}: {lacking:,} of {size:,} bytes are missing", path=str(self.path))
        if os.fstat(fd).st_size != size:
            host.truncate(fd, size)
        checksum = xxhash.xxh3_128_digest(b"".join(self._sum_of(number, size) for number in range(-(-size // CHUNK))))
        seal(fd, checksum)
        host.chmod(fd, self.root.blob_mode)
        self.close()
        return size, checksum

    def close(self) -> None:
        """Close the stage, and leave the written bytes for a successor. Idempotent."""
        with self._idle:
            fd, self._fd = self._fd, None
            # A write that is under way would go into a file that is a successor's, or that the number belongs to next.
            self._idle.wait_for(lambda: not self._writers)
            self._map = None
        if fd is not None:
            os.close(fd)

    def discard(self) -> None:
        """Close the stage, and remove the written bytes. Idempotent."""
        self.close()
        remove_partial(self.root, self.keyhash, self.id)

    def _descriptor(self) -> int:
        if self._fd is None:
            raise CacheFault(f"{self.path} is closed", path=str(self.path))
        return self._fd

    def _empty(self) -> None:
        with self._idle:
            self._coverage, self._chunks, self._map = Coverage(), {}, None
        self._granted = 0
        self._remove_map()  # first: while it is there, its marks must be true
        if os.fstat(self._descriptor()).st_size:
            self._take_new_file()

    def _take_new_file(self) -> None:
        """Never shorten the file: on file systems whose locks do not exclude other machines, another process may have published and
        mapped this file, and reading beyond its end would kill it."""
        with self._idle:
            self._idle.wait_for(lambda: not self._writers)
            fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)
        self.root.files.unlink(self.path)
        self._fd = self.root.files.create(self.path, self.root.file_mode)

    def _remove_map(self) -> None:
        if self._has_map:
            self.root.files.unlink(self._map_path)
            self._has_map = False

    def _take_in_locked(self, written: Span, view: memoryview) -> None:
        whole = self._coverage.add(written.start, written.end)
        at = written.start
        while at < written.end:
            number, within = divmod(at, CHUNK)
            piece = view[at - written.start :][: CHUNK - within]
            self._chunks.setdefault(number, _Chunk()).add(within, piece)
            at += len(piece)
        if self._map:
            self._map.mark(written, whole, lambda number: self._sum_of(number, self.total or 0))

    def _sum_of(self, number: int, size: int) -> bytes:
        """The checksum of a chunk that is on the disk: from its bytes as they came, or read back where they came out of order."""
        chunk = self._chunks.get(number)
        known = chunk.digest(min(CHUNK, size - number * CHUNK)) if chunk is not None else None
        return known or digest_of_chunk(self._descriptor(), number * CHUNK)


class MemoryStage:
    """A write of few bytes, in memory: nothing of it is on the disk before it is published. `write` is callable from several threads."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.data: Buffer = b""
        """The bytes; all of them once `finish` has returned."""
        self._mutex = threading.Lock()  # guards _coverage, and that data is replaced once
        self._coverage = Coverage()

    @property
    def done(self) -> int:
        """Bytes received."""
        with self._mutex:
            return self._coverage.done

    def write(self, offset: int, data: Buffer) -> None:
        """Put ``data`` at ``offset``. Raises ValueError for bytes beyond the total."""
        view = memoryview(data).cast("B")
        end = offset + len(view)
        if end > self.total:
            raise ValueError(f"received bytes up to {end:,} of {self.total:,}")
        with self._mutex:
            if is_frozen(data) and len(view) == self.total and not self._coverage.done:
                self.data = data  # all of it: no copy
            elif not isinstance(self.data, bytearray):
                self.data = bytearray(self.data or self.total)
            target = self.data
        if isinstance(target, bytearray):
            target[offset:end] = view
        with self._mutex:
            self._coverage.add(offset, end)

    def finish(self) -> tuple[int, bytes]:
        """Check that all bytes have arrived; returns ``(size, checksum)``. Raises `CacheFault` if any are missing."""
        lacking = self.total - self.done
        if lacking:
            raise CacheFault(f"{lacking:,} of {self.total:,} bytes are missing")
        return self.total, checksum_of(self.data)


class _Chunk:
    """The hash of one chunk of the file, as long as its bytes come in order; otherwise the chunk is read again at the end."""

    __slots__ = ("_hash", "_length")

    def __init__(self) -> None:
        self._hash: xxhash.xxh3_128 | bytes | None = xxhash.xxh3_128()  # of a full chunk its digest only: there may be many
        self._length = 0

    def add(self, within: int, piece: memoryview) -> None:
        if within != self._length or not isinstance(self._hash, xxhash.xxh3_128):
            self._hash = None
            return
        self._hash.update(piece)
        self._length += len(piece)
        if self._length == CHUNK:
            self._hash = self._hash.digest()

    def digest(self, length: int) -> bytes | None:
        """The hash of the chunk's ``length`` bytes; None if they did not come in order."""
        if self._hash is None or self._length != length:
            return None
        return self._hash if isinstance(self._hash, bytes) else self._hash.digest()
