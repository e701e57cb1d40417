"""Files of words that all processes of a root have mapped, and two tables in them: hosts that do not answer, and waits for keys.

**Hosts.** Hosts that recently could not be asked: a small table in the root, so that not every process of the node has to find out by
itself.

A record identifies a host by its hash, and holds when it last failed, how long that process had waited, what the matter was, and when the
host last answered any process. Times are those of the node's monotonic clock, which cannot be set. A host is left alone for `PERIOD`; then
one call asks it again, and if it fails again, calls that can do without an answer leave it alone for twice as long, up to `LONGEST`.

**Waits.** Which processes of the node wait for a key, and what they hold meanwhile: a table with a record for each wait.

``shared/waiting``   a page of header, then 256 records of 256 bytes: a checksum, the process, since when it waits, the lock and the name of
                    the key, and the locks of the keys that it holds

A record is believed while its byte of the file is locked, which ends with the process, however that ends."""

from __future__ import annotations

import math
import os
import struct
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import PAGE, Root
from forebay._kernel import host, locks, mappings
from forebay._logs import logger
from forebay.errors import CacheFault

HEADER = PAGE // 8
"""Words before the content: the magic number and the root's id, then what the table's owner has there."""
FREE = 2
"""The first word of the header that belongs to the table's owner."""


class SharedTable:
    """One such file. Callable from any thread and, mappings being inherited, after a fork.

    All of it is a hint: any process may store to any word without a lock, and a store may be lost with the machine, so a reader checks
    what it finds. The file may be deleted at any time. It is allocated whole when it is created: no store meets a full disk."""

    def __init__(self, root: Root, path: Path, magic: bytes, words: int) -> None:
        """``magic``: 8 bytes, others for each form of the content. ``words``: of the content."""
        self.path = path
        self._root = root
        self._header = magic + root.id.to_bytes(8, "little")
        self._size = -(-8 * (HEADER + words) // PAGE) * PAGE
        self._mapped: tuple[memoryview, int, int] | None = None  # the words, and which file they are

    def words(self) -> memoryview | None:
        """The whole file, with its header; None if there is none, or none of Forebay's. Others, once the file was replaced. Read-only in a
        read-only root."""
        try:
            status = os.stat(self.path)
        except OSError:
            self._mapped = None
            return None
        mapped = self._mapped
        if mapped is None or mapped[1:] != (status.st_dev, status.st_ino) or status.st_size != self._size:
            self._mapped = mapped = self._map()
        return mapped[0] if mapped is not None else None

    def create(self, fill: Callable[[memoryview], object] | None = None) -> memoryview:
        """`words`, of a new file if there is none, or none of Forebay's. ``fill`` stores the content of a new one. Raises OSError, and
        `CacheFault` in a read-only root, or where a directory with files has its name."""
        root = self._root
        for attempt in range(3):
            words = self.words()
            if words is not None:
                return words
            if root.read_only:
                break
            content = bytearray(self._header.ljust(self._size, b"\0"))
            if fill is not None:
                fill(memoryview(content).cast("Q"))
            if self.path.parent != root.path:
                root.files.mkdir(self.path.parent, root.dir_mode)
            if attempt:  # P1 finds none / P2 installs one / P1 must not remove it: so only what was there before goes
                root.files.make_way(self.path)
            root.install(self.path, lambda fd, content=content: host.pwrite(fd, content, 0))  # type: ignore[misc]
        raise CacheFault(f"{self.path} is not there, or not of this root", path=str(self.path))

    def identity(self) -> tuple[int, int]:
        """``st_dev`` and ``st_ino`` of the file that was mapped last."""
        assert self._mapped is not None, "it was not mapped"
        return self._mapped[1:]

    def _map(self) -> tuple[memoryview, int, int] | None:
        writable = not self._root.read_only
        try:
            fd = self._root.files.open(self.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if status.st_size != self._size or os.pread(fd, len(self._header), 0) != self._header:
                return None
            return mappings.words(mappings.map_file(fd, self._size, writable=writable)), status.st_dev, status.st_ino
        except OSError:
            return None
        finally:
            os.close(fd)


log = logger("forebay.hosts")

PERIOD, LONGEST = 5.0, 60.0
"""Seconds for which a host that failed is left alone, at first and at most."""
LONG_ENOUGH = 3.0
"""A wait of this many seconds without an answer makes a host silent for every process; a shorter one only for calls with a shorter
timeout."""
_HEARD_EVERY = 1.0  # seconds
_JUST_NOW = 100_000_000  # nanoseconds: a host that answered this process so lately is not looked up
_COUNT, _WORDS = 256, 4
"""Of records: hash of the host; failed at, in ns; 32 bits: after a wait, in ms, 8: how often, 8: why; last answer, in ns."""
_SECOND = 1_000_000_000
_MOST = 8  # doublings that are counted: fewer reach `LONGEST`


class _Failed(NamedTuple):
    """When a host last failed, after what wait, how often its time had been over before, and why; and when it last answered."""

    at: int
    waited: float
    times: int
    why: int
    heard: int


class SilentHosts:
    """Callable from any thread and after a fork. Raises nothing: where the table cannot be used, this process keeps one of its own.

    ``root``: the root of the table; None: no shared table."""

    def __init__(self, root: Root | None = None) -> None:
        self._table = SharedTable(root, root.hosts, b"FBHOST01", _COUNT * _WORDS) if root is not None else None
        self._is_read_only = root is None or root.read_only
        self._own = memoryview(bytearray((HEADER + _COUNT * _WORDS) * 8)).cast("Q")
        self._heard: dict[str, int] = {}  # when that was last noted
        self._answered: dict[str, int] = {}  # when it last answered this process

    def trouble_with(self, host_name: str, timeout: float, *, is_optional: bool = False) -> tuple[float, int] | None:
        """How many seconds ago the host last failed, and why; None if it may be asked, by a call that would wait ``timeout`` seconds for an
        answer. Once its time is over, the first caller may, and the others as soon as that one was answered. ``is_optional``: the caller
        can do without an answer, and asks less and less often."""
        now = time.monotonic_ns()
        if 0 <= now - self._answered.get(host_name, now + 1) < _JUST_NOW:
            return None
        last = self._look(host_name)
        if not 0 <= now - last.at < 2 * LONGEST * _SECOND or last.at <= last.heard <= now:
            return None
        if last.waited < 0.9 * min(timeout, LONG_ENOUGH):
            return None
        if now - last.at >= min(PERIOD * 2 ** (last.times if is_optional else 0), LONGEST) * _SECOND:
            # P1 finds that the time is over / P2 does, too / both ask: one request more
            self._note(host_name, last._replace(at=now, times=min(last.times + 1, _MOST)))
            return None
        return (now - last.at) / _SECOND, last.why

    def heard(self, host_name: str) -> None:
        """It answers."""
        now = time.monotonic_ns()
        if len(self._answered) > 1000:
            self._answered.clear()
        self._answered[host_name] = now
        if now - self._heard.get(host_name, -now) < _HEARD_EVERY * _SECOND:
            return
        if len(self._heard) > 1000:
            self._heard.clear()
        self._heard[host_name] = now
        self._note(host_name, _Failed(0, 0.0, 0, 0, now))

    def failed(self, host_name: str, began: float, waited: float, why: int = 0) -> None:
        """A request that began then (seconds of the monotonic clock) got no byte for ``waited`` seconds. ``why``: a number of the caller's.
        One slow object does not make its host silent: a host that has answered any request meanwhile is not."""
        last = self._look(host_name)
        heard = max(last.heard, self._heard.pop(host_name, 0))  # its next answer is noted at once
        now = time.monotonic_ns()
        if not began * _SECOND <= heard <= now:
            goes_on = last.at > heard and now - last.at < 2 * LONGEST * _SECOND
            self._note(host_name, _Failed(now, waited, last.times if goes_on else 0, why, heard))

    def _look(self, host_name: str) -> _Failed:
        name, at = _place_of(host_name)
        shared = self._table.words() if self._table is not None else None
        records = [words[at : at + _WORDS].tolist() for words in (self._own, shared) if words is not None]
        of_it = [
            _Failed(failed, (how & 0xFFFFFFFF) / 1000, how >> 32 & 0xFF, how >> 40 & 0xFF, heard)
            for known, failed, how, heard in records if known == name
        ]  # fmt: skip
        return max(of_it, key=lambda each: max(each.at, each.heard), default=_Failed(0, 0.0, 0, 0, 0))

    def _note(self, host_name: str, last: _Failed) -> None:
        name, at = _place_of(host_name)
        waited = round(min(last.waited, 1e6) * 1000) if not math.isnan(last.waited) else 0
        record = name, last.at, waited | last.times << 32 | last.why << 40, last.heard
        try:
            shared = self._table.create() if self._table is not None and not self._is_read_only else None
        except (CacheFault, OSError) as error:
            log.debug("other processes do not see which hosts fail: %s", str(error))
            shared = None
        for words in (self._own, shared):
            if words is not None:
                words[at : at + _WORDS] = memoryview(b"".join(word.to_bytes(8, "little") for word in record)).cast("Q")


def _place_of(host_name: str) -> tuple[int, int]:
    """The hash of a host's name, and where its record is: a later host with the same place replaces it."""
    import hashlib

    name = int.from_bytes(hashlib.blake2s(host_name.encode("utf-8", "replace"), digest_size=8).digest(), "little") or 1
    return name, HEADER + name % _COUNT * _WORDS


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
