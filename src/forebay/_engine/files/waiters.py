"""Which processes of the node wait for a key, and what they hold meanwhile: a table with a record for each wait.

``shared/waiting``   a page of header, then 256 records of 256 bytes: a checksum, the process, since when it waits, the lock and the name of
                    the key, and the locks of the keys that it holds

A record is believed while its byte of the file is locked, which ends with the process, however that ends."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Collection
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import Root
from forebay._engine.files.shared_table import HEADER, SharedTable
from forebay._kernel import locks
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.waiters")

RECORDS = 256
_RECORD = 256
_TRIES = 8
_FIELDS = struct.Struct("<QdQHH")  # process, since, lock, number of held locks, length of the name; before them the checksum
_ROOM = _RECORD - 8 - _FIELDS.size


class KeyWaiter(NamedTuple):
    """A process that waits for a key since a time in seconds since 1970, and holds others. A long name of the key lacks its end."""

    pid: int
    since: float
    keyhash: int
    key: str
    held: frozenset[int] = frozenset()


class Entered(NamedTuple):
    """A record of this process: the table that it is in, and its number."""

    words: memoryview
    number: int


class Waiters:
    """The waits of this process, and those of all. Callable from any thread; `Writers` tells it of forks. No call raises: a wait that finds
    no free record, or meets a fault of the disk, is not shown."""

    def __init__(self, root: Root) -> None:
        self._table = SharedTable(root, root.shared_dir / "waiting", b"FBWAIT01", RECORDS * _RECORD // 8)
        self.locks = locks.LockFile(self._table.path, root.files.open, writable=not root.read_only)

    def enter(self, key: str, keyhash: int, held: Collection[int] = ()) -> Entered | None:
        """Show a wait for a key by a holder of other keys. None if it cannot be shown, or not with all that it holds."""
        locked = b"".join(each.to_bytes(8, "little") for each in held)
        if len(locked) > _ROOM:
            return None
        try:
            words = self._table.create()
            self._follow()
            first = int.from_bytes(os.urandom(4)) % RECORDS
            for number in ((first + turn) % RECORDS for turn in range(_TRIES)):
                if self.locks.try_lock(number, exclusive=True):
                    name = key.encode("utf-8", "replace")[: _ROOM - len(locked)]
                    content = _FIELDS.pack(os.getpid(), time.time(), keyhash, len(held), len(name)) + locked + name
                    content = content.ljust(_RECORD - 8, b"\0")
                    words[_place(number)] = memoryview(xxhash.xxh3_64_digest(content) + content).cast("Q")
                    return Entered(words, number)
        except (CacheFault, OSError) as error:
            log.debug("others do not see that this process waits for %s: %s", key, str(error))
        return None

    def leave(self, entered: Entered | None) -> None:
        """The wait has ended."""
        if entered is not None and self.locks.held(entered.number):  # not in a forked child: the record is its parent's
            entered.words[_place(entered.number).start] = 0  # before this process goes on, with what it holds
            self.locks.unlock(entered.number)

    def every(self) -> list[KeyWaiter]:
        """All waits for keys, of all processes."""
        words = self._table.words()
        self._follow()
        try:
            numbers = self.locks.locked_among(range(RECORDS)) if words is not None else []
            numbers += filter(self.locks.held, range(RECORDS))
        except OSError:
            return []
        waiters = [_parsed(words[_place(number)].tobytes()) for number in numbers if words is not None]
        return [waiter for waiter in waiters if waiter is not None]

    def _follow(self) -> None:
        """Lock the bytes of the file that has the name now: what was locked in another one is shown to nobody any more."""
        if not self.locks.is_same():
            self.locks.close()


def _place(number: int) -> slice:
    start = HEADER + number * _RECORD // 8
    return slice(start, start + _RECORD // 8)


def _parsed(record: bytes) -> KeyWaiter | None:
    content = record[8:]
    if len(record) != _RECORD or record[:8] != xxhash.xxh3_64_digest(content):
        return None
    pid, since, keyhash, count, length = _FIELDS.unpack_from(content)
    if keyhash >> 62:
        return None
    locked, name = content[_FIELDS.size : _FIELDS.size + 8 * count], content[_FIELDS.size + 8 * count :][:length]
    held = frozenset(int.from_bytes(locked[at : at + 8], "little") for at in range(0, len(locked), 8))
    return KeyWaiter(pid, since, keyhash, name.decode(errors="replace"), held)
