"""Limits on transfers that all processes of the node share: bytes a second from remotes, and connections to a host.

The time of the last release of a permit, and the state of the rate, are words of the head, which every process has mapped. Which process
has a connection, and which one waits, is expressed by locks on bytes of ``locks/transfers`` alone, which the kernel releases when a
process dies. Each host has a range of bytes:

- A permit for a connection is one of the first ``max_connections`` bytes. It goes to whoever looks first.
- A process that waits for a permit shares a lock on the last byte, so that others release what they do not use.

The rate is a token bucket in one word: the time until which all bytes that were granted are paid for. A process reserves the bytes of
5 ms at once, from that time on, and moves it on. It does so without a lock: of two processes that do it in the same microsecond
one may get its bytes for nothing."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

from forebay._engine.files.layout import Root
from forebay._engine.index.head import SharedHead
from forebay._engine.index.settings import RootLimits
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.limits")

SHARES = 200
"""A process reserves this part of a second's bytes at once."""
_SECOND = 1_000_000_000
_SCAN_AGAIN = _SECOND // 20  # a permit of a killed process is noticed after so long, a released one at once
_BURST = _SECOND // 10  # what may be caught up after a pause
_AHEAD = 2 * _SECOND  # further ahead nothing is reserved: 400 processes
_BELIEVED = 3 * _SECOND  # further ahead is damage, or of another boot
_KEPT = _SECOND  # unused bytes of a reservation are lost after so long
_RANGE, _WAITING, _HOSTS = 1 << 16, 0xFFFF, 1 << 40  # bytes of a host; that of those that wait: there are at most 65,535 permits
_NO_BYTE = -1
_SAY_AFTER, _SAY_EVERY = 5 * _SECOND, 60 * _SECOND
NAMED = 4  # processes, in an error


class NodeLimits:
    """The limits of one root, as `remote.base.Limits` describes them. Callable from any thread, and in a forked child, which has no permits
    at first. Nothing waits, and nothing raises: where the files of the root fail, there is no limit.

    In a root that this process only reads, permits are shared locks that are looked at again, and the rate is this process's own.
    ``limits``: returns what is in force. ``clock``: the monotonic clock, in nanoseconds."""

    def __init__(
        self, root: Root, head: SharedHead, limits: Callable[[], RootLimits], clock: Callable[[], int] = time.monotonic_ns
    ) -> None:  # fmt: skip
        self.clock, self._head, self._limits, self._read_only = clock, head, limits, root.read_only
        self._path = root.lock("transfers")
        self.locks = locks.LockFile(self._path, root.files.open, writable=not root.read_only)
        self._own_bucket = memoryview(bytearray(16)).cast("Q")
        self._begin()
        host.at_fork(self.locks)
        host.at_fork(self)

    def _begin(self) -> None:
        self._reserving = threading.Lock()  # guards what follows
        self._rate, self._credit, self._from, self._until = 0, 0, 0, 0

    def in_force(self) -> tuple[int, int]:
        """Bytes a second, and connections to a host; 0: no limit. Where the root fails, none."""
        try:
            limits = self._limits()
        except (CacheFault, OSError):
            return 0, 0
        return limits.max_rate or 0, limits.max_connections or 0

    # -- connections -----------------------------------------------------------------------------------------------

    def request(self, host_name: str) -> ConnectionRequest:
        """Request a permit for a connection to a host. See `remote.base.Limits`."""
        return ConnectionRequest(self, host_name)

    def holders(self, host_name: str) -> str:
        """See `remote.base.Limits`."""
        pids = locks.holders(self._path, _first_byte(host_name), length=max(self.in_force()[1], 1))
        named = ", ".join(map(locks.describe_process, pids[:NAMED]))
        return f"{named} and {len(pids) - NAMED:,} more" if len(pids) > NAMED else named or "an unknown process"

    def try_permit(self, offset: int) -> bool:
        """Lock the byte of a permit, which this process does not have. Raises OSError."""
        if not self.locks.try_lock(offset, exclusive=not self._read_only):
            return False
        # Of two processes that share a lock, both may have looked before the other one locked: so each looks again.
        if self._read_only and self.locks.is_locked(offset):
            self.locks.unlock(offset)
            return False
        return True

    def release(self, offset: int) -> None:
        """Unlock the byte of a permit, and let waiting processes know."""
        self.locks.unlock(offset)
        if not self._read_only:
            try:
                words, base = self._head.limit_words()
            except (CacheFault, OSError):
                return  # they look again before long
            words[base + 1] = self.clock()  # no crash point: they look again anyway

    def last_release(self) -> int:
        words, base = self._head.limit_words()
        return words[base + 1]

    # -- bytes a second --------------------------------------------------------------------------------------------

    def delay(self) -> float:
        """Seconds until this process may take more bytes; 0.0: now. It reports with `count` what it takes."""
        rate = self.in_force()[0]
        if not rate:
            return 0.0
        with self._reserving:
            now = self.clock()
            if rate != self._rate:
                self._rate, self._credit, self._from = rate, 0, now
            elif now >= self._until:
                self._credit = min(self._credit, 0)
            while self._credit <= 0 and now >= self._from:
                self._reserve(rate, now)
            return max(self._from - now, 0) / _SECOND

    def count(self, received: int) -> None:
        """Bytes were received."""
        with self._reserving:
            self._credit -= received

    def _reserve(self, rate: int, now: int) -> None:
        """Reserve a share, from which what was taken too much is paid first. Caller: holds the mutex."""
        try:
            words, at = (self._own_bucket, 0) if self._read_only else self._head.limit_words()
        except (CacheFault, OSError):
            self._credit, self._from, self._until = rate, now, now + _KEPT
            return
        start = max(words[at], now - _BURST, 0)
        if start > now + _BELIEVED:
            start = now
        if start > now + _AHEAD:  # too many wait already: ask again when some have gone
            self._from = start - _AHEAD // 2
            return
        size = rate // SHARES + 1
        end = start + size * _SECOND // rate
        words[at] = end  # no crash point: whatever a crash leaves is right
        self._credit += size
        self._from = start if self._credit > 0 else end  # where this does not pay for all that was taken, another one follows
        self._until = max(start, now) + _KEPT

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the file of locks, once the last permit is released."""
        self.locks.retire()

    def after_fork_child(self) -> None:
        self._begin()


def _first_byte(host_name: str) -> int:
    """Where the range of a host begins."""
    digest = int.from_bytes(hashlib.blake2s(host_name.encode("utf-8", "replace"), digest_size=8).digest())
    return digest % _HOSTS * _RANGE


class ConnectionRequest:
    """One request for a permit: see `remote.base.PermitRequest`. Not for several threads at once."""

    def __init__(self, limits: NodeLimits, host_name: str) -> None:
        self._limits, self._host = limits, host_name
        self._first = _first_byte(host_name)
        self._is_waiting = False
        self._taking = _NO_BYTE  # the permit that `try_take` may have taken and not returned
        self._released, self._scan_at = -1, 0  # the last release as of the last scan, and when to scan without another
        self._began = limits.clock()
        self._say_at = self._began + _SAY_AFTER

    def try_take(self) -> ConnectionPermit | None:
        """A permit, if one is free; None: not yet. Never waits."""
        limit = self._limits.in_force()[1]
        has_one = not limit
        if limit:
            try:
                has_one = self._try(limit)
            except (CacheFault, OSError) as error:
                self._taking, has_one = _NO_BYTE, True
                log.info("connections to %s are not limited: %s", self._host, str(error))
        if not has_one:
            self._say(limit)
            return None
        self._wait_no_longer()
        permit = ConnectionPermit(self._limits, self._first, self._taking)
        self._taking = _NO_BYTE
        return permit

    def _try(self, limit: int) -> bool:
        """Whether there is a permit: the one that is noted as taken. Raises `CacheFault` and OSError."""
        limits, now = self._limits, self._limits.clock()
        released = limits.last_release()
        if released == self._released and now < self._scan_at:
            return False
        self._released, self._scan_at = released, now + _SCAN_AGAIN
        # Others who wait look first: else a process that releases a permit and wants one again would have it before they look.
        if self._is_waiting or not limits.locks.is_locked(self._first + _WAITING):
            for offset in range(self._first, self._first + limit):
                if limits.locks.held(offset):
                    continue  # also by a shared lock, of which this process could take any number
                self._taking = offset  # before it is locked: an interrupt may come before this is known
                if limits.try_permit(offset):
                    return True
            self._taking = _NO_BYTE
        if not self._is_waiting:
            self._is_waiting = True  # first: of an interrupt in between, nothing is left behind
            limits.locks.try_lock(self._first + _WAITING, exclusive=False)
        return False

    def _say(self, limit: int) -> None:
        now = self._limits.clock()
        if now >= self._say_at:
            self._say_at = now + _SAY_EVERY
            waited = (now - self._began) / _SECOND
            log.warning("waiting %.0f s for a connection to %s: the node's max_connections=%d are in use", waited, self._host, limit)

    def cancel(self) -> None:
        """Wait no longer, and give back what an interrupted `try_take` took. Idempotent; after `try_take` has returned a permit it does
        nothing."""
        taking, self._taking = self._taking, _NO_BYTE
        if taking != _NO_BYTE:
            self._limits.release(taking)
        self._wait_no_longer()

    def _wait_no_longer(self) -> None:
        if self._is_waiting:
            self._is_waiting = False
            self._limits.locks.unlock(self._first + _WAITING)


class ConnectionPermit:
    """The right to one connection to a host, until `release`: see `remote.base.Permit`."""

    def __init__(self, limits: NodeLimits, first: int, offset: int) -> None:
        self._limits, self._first, self._offset = limits, first, offset
        self._since = limits.clock()

    def is_wanted(self, after: float = 0.0) -> bool:
        """Whether it should be released: another process waits and this one has had it for ``after`` seconds, or there are fewer now."""
        limits, limit = self._limits, self._limits.in_force()[1]
        if not limit:
            return False
        if not 0 <= self._offset - self._first < limit:
            return True
        try:
            return limits.clock() - self._since >= after * _SECOND and limits.locks.is_locked(self._first + _WAITING)
        except OSError:
            return False

    def release(self) -> None:
        """Let another process have it. Idempotent."""
        offset, self._offset = self._offset, _NO_BYTE
        if offset != _NO_BYTE:
            self._limits.release(offset)
