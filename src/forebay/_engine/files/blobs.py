"""Whole files: finished, immutable, named after their entry's id; a name is used once, ever."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import xxhash

from forebay._engine.files.layout import FANS, Root, parse_blob_below
from forebay._kernel import host, mappings
from forebay._kernel.below import NoPlainFile
from forebay._model import Buffer, Entry
from forebay.errors import Damaged

CHUNK = 1 << 20
"""A checksum is the xxh3-128 of the xxh3-128s of a file's chunks of 1 MiB, so that chunks may arrive in any order."""

SECOND = 1_000_000_000


def publish(root: Root, staged: Path, id: int, suffix: str = "") -> Path:
    """Give the finished file ``staged`` its final name. Caller: has inserted its row, and commits it after this."""
    path = root.blob(id, suffix)
    root.files.rename(staged, path)
    return path


def write(root: Root, id: int, data: Buffer, checksum: bytes, suffix: str = "") -> None:
    """Write a whole file under its final name. Caller: holds the writer lock and has recorded its intent."""
    fd = root.files.create(root.blob_name(id, suffix), root.blob_mode)
    try:
        host.pwrite(fd, data, 0)
        seal(fd, checksum)
    finally:
        os.close(fd)


def seal(fd: int, checksum: bytes) -> None:
    """Set the modification time of a finished file so that `is_sealed` detects later writes."""
    host.set_mtime(fd, time.time_ns() // SECOND * SECOND + seal_of(checksum))


def is_sealed(status: os.stat_result, checksum: bytes) -> bool:
    """Whether a file still has the time that `seal` gave it. Any write, by whatever name of the file, sets another one.

    Only the fraction of the second counts: it follows from the bytes, so that entries which share a file agree, and it needs no record.
    A file system that does not keep nanoseconds keeps no seal: whole seconds are also what ``tar`` and ``cp -p`` leave, after any write."""
    return status.st_mtime_ns % SECOND == seal_of(checksum)


def seal_of(checksum: bytes) -> int:
    """The fraction of a second, in nanoseconds, that `seal` sets."""
    return int.from_bytes(checksum[:8], "little") % SECOND


def mark_of(checksum: bytes) -> int:
    """56 bits of a checksum, by which a copy of a small value is recognized."""
    return int.from_bytes(checksum[:7], "little")


def remove_whatever_suffix(root: Root, id: int) -> None:
    """Remove the file of ``id`` whose suffix is unknown. Caller: holds the writer lock, and no row names the file."""
    fan = root.blobs_dir / FANS[id & 0xFF]
    for name in root.files.names_in(fan):
        if (blob := parse_blob_below(fan.name, name)) and blob.id == id:
            _remove(root, fan / name)


def unpublish(root: Root, staged: Path, id: int, suffix: str = "") -> None:
    """Take the name away again: the row could not be committed."""
    root.files.rename(root.blob(id, suffix), staged)


def link_blob(root: Root, source: str, id: int) -> None:
    """Give the blob ``source`` a second name, for the entry ``id``. Caller: holds the writer lock and has recorded its intent. Raises
    FileNotFoundError if the source is gone."""
    root.files.link(source, root.blob_name(id))


def open_blob(root: Root, id: int, suffix: str = "") -> int:
    """Return a descriptor to read from. Raises FileNotFoundError if there is no such blob, `Damaged` if it is not a plain file."""
    path = root.blob_name(id, suffix)
    try:
        return root.files.open(path)
    except NoPlainFile as error:
        raise Damaged(f"{path} is not a file", key=path) from error
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path} leads to a symbolic link: none is followed", key=path) from error
        raise


def map_blob(root: Root, entry: Entry, *, copies: bool = False) -> tuple[memoryview, os.stat_result]:
    """The entry's bytes, read-only, and the state of their file; good until the last view of them is gone, also after an eviction. Holds
    no descriptor. ``copies``: they are copied, not mapped.

    Raises FileNotFoundError where the file is gone, `Damaged` where it has another size.
    """
    fd = open_blob(root, entry.id, entry.suffix)
    try:
        status = os.fstat(fd)
        data = os.read(fd, entry.size) if copies else None
        size = status.st_size if data is None or len(data) == entry.size else len(data)  # it may have been cut since
        if size != entry.size:
            raise Damaged(f"{entry.name}: it has {size} bytes, {entry.size} were stored", key=entry.key)
        if data is not None:
            return memoryview(data), status
        view = mappings.map_file(fd, entry.size)
        if entry.size:
            mappings.note_file(view, root.blob_name(entry.id, entry.suffix), status)
        return view, status
    finally:
        os.close(fd)


def remove_blob(root: Root, id: int, suffix: str = "") -> bool:
    """Remove the file; False if it was gone. Caller: holds the lock of ``id`` exclusively."""
    return _remove(root, root.blob_name(id, suffix))


def _remove(root: Root, path: str | Path) -> bool:
    try:
        return root.files.unlink(path)
    except IsADirectoryError:  # none that we made, and in the way
        return root.files.remove_whole(path)


def verify_blob(root: Root, path: Path, size: int, checksum: bytes) -> bool:
    """Whether the file holds what was stored. Raises OSError where it cannot be read, FileNotFoundError where it is gone."""
    fd = root.files.open(path)
    try:
        return os.fstat(fd).st_size == size and checksum_of(fd) == checksum
    finally:
        os.close(fd)


def checksum_of(source: Buffer | int) -> bytes:
    """The checksum (16 bytes) of a buffer, or of the whole file behind a descriptor."""
    if type(source) is bytes and 0 < len(source) <= CHUNK:  # the same in fewer steps: small values are compared at each first read
        return xxhash.xxh3_128_digest(xxhash.xxh3_128_digest(source))
    whole = xxhash.xxh3_128()
    if isinstance(source, int):
        for start in range(0, os.fstat(source).st_size, CHUNK):
            whole.update(digest_of_chunk(source, start))
    else:
        data = memoryview(source).cast("B")
        for start in range(0, len(data), CHUNK):
            whole.update(xxhash.xxh3_128_digest(data[start : start + CHUNK]))
    return whole.digest()


def digest_of_chunk(fd: int, start: int) -> bytes:
    """The xxh3-128 of the chunk of a file that starts at ``start``."""
    digest, end = xxhash.xxh3_128(), start + CHUNK
    while start < end and (data := os.pread(fd, end - start, start)):
        digest.update(data)
        start += len(data)
    return digest.digest()
