"""What all processes of the node have counted over time, written by whichever of them passes: a day by minutes, a month by hours.

``index/history``   a page of header, then records of 24 words, 1,440 of minutes and 744 of hours: the time, a checksum, the totals of
                    the counters at that time, and what was used of which budget, in bytes

What is used is in the catalog, which a process that only reads does not ask. So processes that write also store it in the header, from
where each record takes it.

A record is in the place of its minute, or hour, modulo their number. Its time is that of the root's clock, which never goes back. All of it
is a hint: any process may write to the file without a lock, and a record that is torn, damaged or too old is left out by the reader. The
file may be deleted at any time: the history begins anew then."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import PAGE, Root
from forebay._engine.index.counters import NAMES, Counters
from forebay._kernel import host
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.index")

SECOND = 1_000_000_000
EVERY = 10 * SECOND
"""Nanoseconds between two writes, of all processes together: the record of a minute is that of its last seconds."""
DELAY = SECOND
"""Nanoseconds from the first pass of a process to its first write: the first reads of a young process wait for nothing here."""
_MAGIC = int.from_bytes(b"FBHIST01", "little")
_NOTED, _USE = 16, 24  # in the header, after the magic and the root's id: when a process began to write last; bytes used, and the budget
_WORDS = 24  # of a record: there is room for counters of later versions
_RECORD = 8 * _WORDS
_CONTENT = struct.Struct(f"<{len(NAMES) + 2}Q")
_TWO = struct.Struct("<2Q")


class _Ring(NamedTuple):
    """Records of equal periods: the place of the first one in the file, their number, and nanoseconds of a period."""

    start: int
    length: int
    period: int

    def place(self, moment: int) -> int:
        return self.start + moment // self.period % self.length * _RECORD


MINUTES = _Ring(PAGE, 1440, 60 * SECOND)
HOURS = _Ring(PAGE + 1440 * _RECORD, 744, 3600 * SECOND)
SIZE = -(-(HOURS.start + HOURS.length * _RECORD) // PAGE) * PAGE


class Totals(NamedTuple):
    """The totals of the counters at one time of the root's clock, in the order of `counters.NAMES`. ``used`` bytes of the ``budget``, both
    0 if no process has told them."""

    time: int
    counts: tuple[int, ...]
    used: int = 0
    budget: int = 0


class History:
    """The history of one root. Callable from any thread, and after a fork. No call raises: one that meets a fault of the disk does
    without. ``use``: returns the bytes used, and the budget; None in a process that has not written."""

    def __init__(self, root: Root, counters: Counters) -> None:
        self._counters = counters
        self.use: Callable[[], tuple[int, int]] | None = None
        self.restart(root)

    def restart(self, root: Root) -> None:
        """Go on with a root that was recreated."""
        self._root, self._path = root, root.index_dir / "history"
        self._due = 0  # no write before; 0: this process has not passed yet

    def note(self, now: int) -> None:
        """A process passes at ``now`` of the root's clock: it writes if no process has written lately."""
        if now < self._due:
            return
        if not self._due:
            self._due = now + DELAY
            return
        self._due = now + EVERY
        self._write(now)

    def close(self, now: int) -> None:
        """A process that has passed leaves: the last that it counted belongs to this time, however long no process comes."""
        if self._due:
            self._write(now, leaves=True)

    def read(self, ring: _Ring, now: int) -> list[Totals]:
        """The sound records of one ring, oldest first."""
        try:
            fd = self._root.files.open(self._path, os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            return []
        try:
            if os.fstat(fd).st_size != SIZE or os.pread(fd, 16, 0) != self._header():
                return []
            data = os.pread(fd, ring.length * _RECORD, ring.start)
        except OSError:
            return []
        finally:
            os.close(fd)
        records = (_parsed(data[at : at + _RECORD]) for at in range(0, len(data) - _RECORD + 1, _RECORD))
        oldest = now - ring.length * ring.period
        return sorted(record for record in records if record is not None and oldest < record.time <= now)

    def _write(self, now: int, *, leaves: bool = False) -> None:
        if self._root.read_only:
            return
        try:
            fd = self._opened(now)
            try:
                if self.use is not None:
                    host.pwrite(fd, _TWO.pack(*self.use()), _USE)
                noted = int.from_bytes(os.pread(fd, 8, _NOTED), "little")
                if not leaves and 0 <= now - noted < EVERY:
                    self._due = noted + EVERY
                    return
                host.pwrite(fd, now.to_bytes(8, "little"), _NOTED)  # first: adding up takes a millisecond, and many processes may pass
                record = _packed(now, [*self._counters.totals(), *_TWO.unpack(os.pread(fd, _TWO.size, _USE))])
                for ring in (MINUTES, HOURS):
                    host.pwrite(fd, record, ring.place(now))
            finally:
                os.close(fd)
        except (CacheFault, OSError, struct.error) as error:  # the last: the file was truncated
            log.debug("the history of %s is not written: %s", self._root.path, str(error))

    def _opened(self, now: int) -> int:
        """A descriptor of the file to write to: one that is missing or damaged is created."""
        fd = self._open()
        if fd is None:
            self._create(now)
            fd = self._open()
        if fd is None:
            raise CacheFault(f"{self._path} is no history of this root", path=str(self._path))
        return fd

    def _open(self) -> int | None:
        try:
            fd = self._root.files.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            if os.fstat(fd).st_size == SIZE and os.pread(fd, 16, 0) == self._header():
                return fd
        except OSError as error:
            log.debug("%s cannot be read: %s", self._path, str(error))
        os.close(fd)
        return None

    def _create(self, now: int) -> None:
        root, content = self._root, bytearray(SIZE)
        content[:16], first = self._header(), self._first(now)
        for ring in (MINUTES, HOURS):
            at = ring.place(now - ring.period)
            content[at : at + _RECORD] = first
        root.files.mkdir(root.index_dir, root.dir_mode)
        if os.path.lexists(self._path):
            root.files.make_way(self._path)
        root.install(self._path, lambda fd: host.pwrite(fd, content, 0))

    def _first(self, now: int) -> bytes:
        """The record before all others: in a root that is young, nothing was counted when it was created."""
        age = time.time_ns() - self._root.files.lstat(self._root.path / "FORMAT").st_mtime_ns
        if 0 <= age < HOURS.period:
            return _packed(now - age, [0] * (len(NAMES) + 2))
        return _packed(now, [*self._counters.totals(), 0, 0])

    def _header(self) -> bytes:
        return _MAGIC.to_bytes(8, "little") + self._root.id.to_bytes(8, "little")


def _packed(now: int, totals: list[int]) -> bytes:
    content = now.to_bytes(8, "little") + _CONTENT.pack(*totals).ljust(_RECORD - 16, b"\0")
    return content[:8] + xxhash.xxh3_64_digest(content) + content[8:]


def _parsed(record: bytes) -> Totals | None:
    """A record; None where there is none, or not a whole one."""
    if record[8:16] != xxhash.xxh3_64_digest(record[:8] + record[16:]):
        return None
    *counts, used, budget = _CONTENT.unpack_from(record, 16)
    return Totals(int.from_bytes(record[:8], "little"), tuple(counts), used, budget)
