"""Hosts that recently did not answer: a small table in the root, so that not every process of the node has to find out by itself.

A record identifies a host by its hash, and holds when it was last silent, how long that process had waited, and when it last answered any
process. Times are those of the node's monotonic clock, which cannot be set. A record is valid for `PERIOD` at most, whatever it says."""

from __future__ import annotations

import math
import time

from forebay._engine.files.layout import Root
from forebay._engine.files.table import HEADER, SharedTable
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.hosts")

PERIOD = 5.0
"""Seconds for which a silent host is left alone."""
LONG_ENOUGH = 3.0
"""A wait of this many seconds without an answer makes a host silent for every process; a shorter one only for calls with a shorter
timeout."""
_HEARD_EVERY = 1.0  # seconds
_JUST_NOW = 100_000_000  # nanoseconds: a host that answered this process so lately is not looked up
_COUNT, _WORDS = 256, 4  # records: hash of the host; silent at, in ns; after a wait, in ms; last answer, in ns
_SECOND = 1_000_000_000


class SilentHosts:
    """Callable from any thread and after a fork. Raises nothing: where the table cannot be used, this process keeps one of its own.

    ``root``: the root of the table; None: no shared table."""

    def __init__(self, root: Root | None = None) -> None:
        self._table = SharedTable(root, root.hosts, b"FBHOST01", _COUNT * _WORDS) if root is not None else None
        self._is_read_only = root is None or root.read_only
        self._own = memoryview(bytearray((HEADER + _COUNT * _WORDS) * 8)).cast("Q")
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
        name, at = _place_of(host_name)
        shared = self._table.words() if self._table is not None else None
        records = [words[at : at + _WORDS].tolist() for words in (self._own, shared) if words is not None]
        of_it = [(silent, waited / 1000, heard) for known, silent, waited, heard in records if known == name]
        return max(of_it, key=lambda each: max(each[0], each[2]), default=(0, 0.0, 0))

    def _note(self, host_name: str, silent: int, waited: float, heard: int) -> None:
        name, at = _place_of(host_name)
        record = name, silent, round(min(waited, 1e6) * 1000) if not math.isnan(waited) else 0, heard
        try:
            shared = self._table.create() if self._table is not None and not self._is_read_only else None
        except (CacheFault, OSError) as error:
            log.debug("other processes do not see which hosts are silent: %s", str(error))
            shared = None
        for words in (self._own, shared):
            if words is not None:
                words[at : at + _WORDS] = memoryview(b"".join(word.to_bytes(8, "little") for word in record)).cast("Q")


def _place_of(host_name: str) -> tuple[int, int]:
    """The hash of a host's name, and where its record is: a later host with the same place replaces it."""
    import hashlib

    name = int.from_bytes(hashlib.blake2s(host_name.encode("utf-8", "replace"), digest_size=8).digest(), "little") or 1
    return name, HEADER + name % _COUNT * _WORDS
