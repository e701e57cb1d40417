"""Which processes of the node wait for a key, for people who look: a file with a record for each wait.

``index/waiting``   a page of header, then 256 records of 256 bytes: a checksum, the process, since when it waits, the lock and the name of
                    the key

A record is believed while its byte of the file is locked, which ends with the process, however that ends. All of it is a hint: a wait that
finds no free record, or meets a fault of the disk, is not shown. The file may be deleted at any time."""

from __future__ import annotations

import contextlib
import os
import random
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import PAGE, Root
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.index")

RECORDS = 256
_RECORD = 256
_TRIES = 8
_FIELDS = struct.Struct("<QdQH")  # process, since, lock, length of the name; before them the checksum
_LONGEST = _RECORD - 8 - _FIELDS.size
_MAGIC = int.from_bytes(b"FBWAIT01", "little")
_SIZE = PAGE + RECORDS * _RECORD


class KeyWaiter(NamedTuple):
    """A process that waits for a key since a time in seconds since 1970. A long name of the key lacks its end."""

    pid: int
    since: float
    keyhash: int
    key: str


class Waiters:
    """The waits of this process, and those of all. Callable from any thread; `Fill` tells it of forks. No call raises."""

    def __init__(self, root: Root) -> None:
        self._root, self._path = root, root.index_dir / "waiting"
        self.locks = locks.LockFile(self._path, root.files.open)
        self._is_there = False

    @contextlib.contextmanager
    def waiting(self, key: str, keyhash: int) -> Iterator[None]:
        """Around a wait for a key."""
        number = self._enter(key, keyhash)
        try:
            yield
        finally:
            if number is not None:
                self.locks.unlock(number)

    def _enter(self, key: str, keyhash: int) -> int | None:
        try:
            if not self._is_there:
                self._create()
            first = random.randrange(RECORDS)
            for number in ((first + turn) % RECORDS for turn in range(_TRIES)):
                if self.locks.try_lock(number, exclusive=True):
                    self._write(number, key, keyhash)
                    return number
        except (CacheFault, OSError) as error:
            log.debug("others do not see that this process waits for %s: %s", key, str(error))
        return None

    def _write(self, number: int, key: str, keyhash: int) -> None:
        name = key.encode("utf-8", "replace")[:_LONGEST]
        content = (_FIELDS.pack(os.getpid(), time.time(), keyhash, len(name)) + name).ljust(_RECORD - 8, b"\0")
        try:
            fd = self._root.files.open_write(self._path)
            try:
                host.pwrite(fd, xxhash.xxh3_64_digest(content) + content, PAGE + number * _RECORD)
            finally:
                os.close(fd)
        except BaseException:
            self.locks.unlock(number)
            raise

    def _create(self) -> None:
        root = self._root
        root.files.mkdir(root.index_dir, root.dir_mode)
        root.install(self._path, lambda fd: host.pwrite(fd, self._header().ljust(_SIZE, b"\0"), 0))
        self._is_there = True

    def _header(self) -> bytes:
        return _MAGIC.to_bytes(8, "little") + self._root.id.to_bytes(8, "little")

    def every(self) -> list[KeyWaiter]:
        """All processes that wait for a key now, those of this one too."""
        try:
            fd = self._root.files.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return []
        try:
            if os.pread(fd, 16, 0) != self._header():
                return []
            waiters = [_parsed(os.pread(fd, _RECORD, PAGE + number * _RECORD)) for number in _locked(fd)]
        except OSError:
            return []
        finally:
            os.close(fd)
        return [waiter for waiter in waiters if waiter is not None]


def _locked(fd: int) -> Iterator[int]:
    """The numbers of the records that are in use."""
    ranges = [(0, RECORDS)]
    while ranges:
        low, high = ranges.pop()
        if low < high and (at := locks.locked_at(fd, low, high - low)) is not None:
            yield at
            ranges += (low, at), (at + 1, high)


def _parsed(record: bytes) -> KeyWaiter | None:
    content = record[8:]
    if len(record) != _RECORD or record[:8] != xxhash.xxh3_64_digest(content):
        return None
    pid, since, keyhash, length = _FIELDS.unpack_from(content)
    return KeyWaiter(pid, since, keyhash, content[_FIELDS.size : _FIELDS.size + length].decode(errors="replace"))
