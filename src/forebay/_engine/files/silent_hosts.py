"""Hosts that recently could not be asked: a small table in the root, so that not every process of the node has to find out by itself.

A record identifies a host by its hash, and holds when it last failed, how long that process had waited, what the matter was, and when the
host last answered any process. Times are those of the node's monotonic clock, which cannot be set. A host is left alone for `PERIOD`; then
one call asks it again, and if it fails again, calls that can do without an answer leave it alone for twice as long, up to `LONGEST`."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from forebay._engine.files.layout import Root
from forebay._engine.files.shared_table import HEADER, SharedTable
from forebay._logs import logger
from forebay.errors import CacheFault

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
