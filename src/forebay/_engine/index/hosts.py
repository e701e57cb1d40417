"""Hosts that recently did not answer: a small table in the root, so that not every process of the node has to find out by itself.

A record identifies a host by its hash, and holds when it was last silent, how long that process had waited, and when it last answered
any process. Times are those of the node's monotonic clock, which cannot be set. A record is valid for `PERIOD` at most, whatever it
says."""

from __future__ import annotations

import math
import os
import stat
import struct
import time

from forebay._engine.files.layout import Root
from forebay._kernel import host
from forebay._logs import logger

log = logger("forebay.hosts")

PERIOD = 5.0
"""Seconds for which a silent host is left alone."""
LONG_ENOUGH = 3.0
"""A wait of this many seconds without an answer makes a host silent for every process; a shorter one only for calls with a shorter
timeout."""
_HEARD_EVERY = 1.0  # seconds
_JUST_NOW = 100_000_000  # nanoseconds: a host that answered this process so lately is not looked up
_RECORD = struct.Struct("=QQQQ")  # hash of the host; silent at, in ns; after a wait, in ms; last answer, in ns
_COUNT = 256
_SIZE = _COUNT * _RECORD.size
_SECOND = 1_000_000_000


class SilentHosts:
    """Callable from any thread and after a fork. Raises nothing: where the table cannot be used, this process keeps one of its own.

    ``root``: the root of the table; None: no shared table."""

    def __init__(self, root: Root | None = None) -> None:
        self._root = root
        self._own = bytearray(_SIZE)
        self._heard: dict[str, int] = {}  # when that was last noted
        self._answered: dict[str, int] = {}  # when it last answered this process

    def silent_since(self, host_name: str, timeout: float) -> float | None:
        """How many seconds ago the host was last silent; None if it may be asked, by a call that would wait ``timeout`` seconds for an
        answer."""
        now = time.monotonic_ns()
        if 0 <= now - self._answered.get(host_name, now + 1) < _JUST_NOW:
            return None
        at, waited, heard = self._look(host_name)
        if not now - PERIOD * _SECOND < at <= now or at <= heard <= now:
            return None
        if waited < 0.9 * min(timeout, LONG_ENOUGH):
            return None
        return (now - at) / _SECOND

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
        self._note(host_name, 0, 0.0, now)

    def silent(self, host_name: str, began: float, waited: float) -> None:
        """A request that began then (seconds of the monotonic clock) got no byte for ``waited`` seconds. One slow object does not make
        its host silent: a host that has answered any request meanwhile is not."""
        heard = max(self._look(host_name)[2], self._heard.get(host_name, 0))
        now = time.monotonic_ns()
        if not began * _SECOND <= heard <= now:
            self._note(host_name, now, waited, heard)

    def _look(self, host_name: str) -> tuple[int, float, int]:
        """When the host was last silent, after what wait, and when it last answered."""
        name, offset = _place_of(host_name)
        records = [_RECORD.unpack_from(table, offset) for table in (self._own, self._shared()) if len(table) == _SIZE]
        of_it = [(at, waited / 1000, heard) for known, at, waited, heard in records if known == name]
        return max(of_it, key=lambda each: max(each[0], each[2]), default=(0, 0.0, 0))

    def _shared(self) -> bytes:
        """The table in the root, which other processes write too."""
        if self._root is None:
            return b""
        try:
            return host.read_small(self._root.hosts, _SIZE) or b""
        except OSError:
            return b""

    def _note(self, host_name: str, at: int, waited: float, heard: int) -> None:
        name, offset = _place_of(host_name)
        record = _RECORD.pack(name, at, round(min(waited, 1e6) * 1000) if not math.isnan(waited) else 0, heard)
        self._own[offset : offset + _RECORD.size] = record
        if self._root is None or self._root.read_only:
            return
        try:
            self._write(self._root, record, offset)
        except OSError as error:
            log.debug("%s cannot be written: %s", self._root.hosts, error)

    def _write(self, root: Root, record: bytes, offset: int) -> None:
        try:
            fd = root.files.open_write(root.hosts)
        except FileNotFoundError:
            root.install(root.hosts, lambda fd: host.pwrite(fd, bytes(_SIZE), 0))
            fd = root.files.open_write(root.hosts)
        try:
            status = os.fstat(fd)
            if stat.S_ISREG(status.st_mode) and status.st_size == _SIZE:
                host.pwrite(fd, record, offset)
            else:  # not Forebay's: it is recreated
                root.replace(root.hosts, bytes(_SIZE))
        finally:
            os.close(fd)


def _place_of(host_name: str) -> tuple[int, int]:
    """The hash of a host's name, and the offset of its record: a later host with the same offset replaces it."""
    import hashlib

    name = int.from_bytes(hashlib.blake2s(host_name.encode("utf-8", "replace"), digest_size=8).digest(), "little") or 1
    return name, name % _COUNT * _RECORD.size
