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

from forebay._engine.files.layout import Root
from forebay._engine.files.table import HEADER, SharedTable
from forebay._kernel import locks
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.index")

RECORDS = 256
_RECORD = 256
_TRIES = 8
_FIELDS = struct.Struct("<QdQH")  # process, since, lock, length of the name; before them the checksum
_LONGEST = _RECORD - 8 - _FIELDS.size


class KeyWaiter(NamedTuple):
    """A process that waits for a key since a time in seconds since 1970. A long name of the key lacks its end."""

    pid: int
    since: float
    keyhash: int
    key: str


class Waiters:
    """The waits of this process, and those of all. Callable from any thread; `Fill` tells it of forks. No call raises."""

    def __init__(self, root: Root) -> None:
        self._table = SharedTable(root, root.index_dir / "waiting", b"FBWAIT01", RECORDS * _RECORD // 8)
        self.locks = locks.LockFile(self._table.path, root.files.open, writable=not root.read_only)

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
            words = self._table.create()
            first = random.randrange(RECORDS)
            for number in ((first + turn) % RECORDS for turn in range(_TRIES)):
                if self.locks.try_lock(number, exclusive=True):
                    name = key.encode("utf-8", "replace")[:_LONGEST]
                    content = (_FIELDS.pack(os.getpid(), time.time(), keyhash, len(name)) + name).ljust(_RECORD - 8, b"\0")
                    words[_place(number)] = memoryview(xxhash.xxh3_64_digest(content) + content).cast("Q")
                    return number
        except (CacheFault, OSError) as error:
            log.debug("others do not see that this process waits for %s: %s", key, str(error))
        return None

    def every(self) -> list[KeyWaiter]:
        """All processes that wait for a key now, but for those that this very object tells of."""
        words = self._table.words()
        try:
            numbers = self.locks.locked_among(range(RECORDS)) if words is not None else []
        except OSError:
            return []
        waiters = [_parsed(words[_place(number)].tobytes()) for number in numbers if words is not None]
        return [waiter for waiter in waiters if waiter is not None]


def _place(number: int) -> slice:
    start = HEADER + number * _RECORD // 8
    return slice(start, start + _RECORD // 8)


def _parsed(record: bytes) -> KeyWaiter | None:
    content = record[8:]
    if len(record) != _RECORD or record[:8] != xxhash.xxh3_64_digest(content):
        return None
    pid, since, keyhash, length = _FIELDS.unpack_from(content)
    return KeyWaiter(pid, since, keyhash, content[_FIELDS.size : _FIELDS.size + length].decode(errors="replace"))
