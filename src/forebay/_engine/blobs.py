"""Whole files: finished, immutable, named after their entry's id; a name is used once, ever."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from forebay._engine.layout import Root, parse_blob_name
from forebay._kernel import host, mappings
from forebay._model import Buffer, Entry
from forebay.errors import Damaged

BLOCK = 8 << 20
"""A checksum is the xxh3-128 of the xxh3-128s of a file's blocks of 8 MiB, so that blocks may arrive in any order."""

_STEP = 1 << 20


def publish(root: Root, staged: Path, id: int, suffix: str = "") -> Path:
    """Give the finished file ``staged`` its name. Caller: has inserted its row, and commits it after this."""
    path = root.blob(id, suffix)
    host.rename(staged, path)
    return path


def write(root: Root, id: int, data: Buffer, suffix: str = "") -> None:
    """A whole file at once, under its final name. Caller: holds the writer lock and has said what he intends."""
    fd = host.create(root.blob_name(id, suffix), root.blob_mode)
    try:
        host.pwrite(fd, data, 0)
    finally:
        os.close(fd)


def remove_whatever_suffix(root: Root, id: int) -> None:
    """Remove the file of ``id`` where nobody noted its suffix. Caller: holds the writer lock, and no row names the file."""
    for found, path in _in_fan(root, id & 0xFF):
        if found == id:
            host.unlink(path)


def unpublish(root: Root, staged: Path, id: int, suffix: str = "") -> None:
    """Take the name away again: the row could not be committed."""
    host.rename(root.blob(id, suffix), staged)


def link_blob(root: Root, source: Path, id: int, suffix: str = "") -> Path:
    """Give the blob ``source`` a second name, for the entry ``id``. Raises FileNotFoundError where it was evicted meanwhile."""
    path = root.blob(id, suffix)
    host.link(source, path)
    return path


def open_blob(root: Root, id: int, suffix: str = "") -> int:
    """A descriptor to read from. Raises FileNotFoundError where there is no such blob, `Damaged` where it is no file."""
    path = root.blob_name(id, suffix)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Damaged(f"{path} is a symbolic link: none is followed", key=path) from error
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Damaged(f"{path} is not a file", key=path)
    return fd


def map_blob(root: Root, entry: Entry, *, private: bool = False) -> memoryview:
    """The entry's bytes, read-only; good until the last view of them is gone, also after an eviction. Holds no descriptor.
    ``private``: writable, with stores that stay in this process.

    Raises FileNotFoundError where the file is gone, `Damaged` where it has another size.
    """
    fd = open_blob(root, entry.id, entry.suffix)
    try:
        size = os.fstat(fd).st_size
        if size != entry.size:
            raise Damaged(f"{entry.name}: {size} bytes stand where {entry.size} were stored", key=entry.key)
        return mappings.map_file(fd, size, writable=private, private=private)
    finally:
        os.close(fd)


def remove_blob(root: Root, id: int, suffix: str = "") -> bool:
    """Remove the file; False if it was gone. Caller: holds the lock of ``id`` exclusively."""
    return host.unlink(root.blob_name(id, suffix))


def list_blobs(root: Root) -> Iterator[tuple[int, Path]]:
    """Every file under ``blobs/`` that has one of our names, as ``(id, path)``; other files are none of our business."""
    for fan in range(256):
        yield from _in_fan(root, fan)


def _in_fan(root: Root, fan: int) -> Iterator[tuple[int, Path]]:
    directory = root.blobs_dir / f"{fan:02x}"
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return
    for name in names:
        found = parse_blob_name(name)
        if found and found.id & 0xFF == fan:
            yield found.id, directory / name


def verify_blob(path: Path, size: int, checksum: bytes) -> bool:
    """Whether the file holds what was stored. Raises OSError where it cannot be read, FileNotFoundError where it is gone."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return os.fstat(fd).st_size == size and checksum_of(fd) == checksum
    finally:
        os.close(fd)


def checksum_of(source: Buffer | int) -> bytes:
    """The checksum (16 bytes) of a buffer, or of the whole file behind a descriptor."""
    whole = xxhash.xxh3_128()
    if isinstance(source, int):
        for start in range(0, os.fstat(source).st_size, BLOCK):
            whole.update(digest_of_block(source, start))
    else:
        data = memoryview(source).cast("B")
        for start in range(0, len(data), BLOCK):
            whole.update(xxhash.xxh3_128_digest(data[start : start + BLOCK]))
    return whole.digest()


def digest_of_block(fd: int, start: int) -> bytes:
    """The xxh3-128 of the block of a file that begins at ``start``."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_STEP))
    for offset in range(start, start + BLOCK, _STEP):
        count = _read_into(fd, buffer, offset)
        digest.update(buffer[:count])
        if count < _STEP:
            break
    return digest.digest()


def _read_into(fd: int, buffer: memoryview, offset: int) -> int:
    count = 0
    while count < len(buffer):
        got = os.preadv(fd, [buffer[count:]], offset + count)
        if not got:
            break
        count += got
    return count
