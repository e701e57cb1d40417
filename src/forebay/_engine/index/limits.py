"""Limits on transfers that all processes of the node share: bytes a second from remotes, and connections to a host.

The catalog has the limits that users set; a copy of them, and the state of the rate, are words of the head, which every process has
mapped. Which process has a connection, and which one waits for one, is expressed by locks on bytes of ``locks/transfers`` alone, which
the kernel releases when a process dies:

- A permit for a connection to a host is one of the first ``max_connections`` bytes of a range that belongs to the host.
- A process that waits for a permit holds a lock on a byte of a second range, at the time since when it waits: it is the first if no byte
  before it is locked.

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
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.limits")

SHARES = 200
"""A process reserves this part of a second's bytes at once."""
_SECOND = 1_000_000_000
_SCAN_AGAIN = _SECOND // 20  # a permit of a killed process is noticed after so long, a released one at once
_SIGHTINGS, _SIGHTED_AFTER = 3, _SECOND // 20
"""A process that has seen permits so often, at such intervals, which nobody took, no longer waits for those before it: the first of them
may have been stopped, as by a debugger."""
_BURST = _SECOND // 10  # what may be caught up after a pause
_AHEAD = 2 * _SECOND  # further ahead nothing is reserved: 400 processes
_BELIEVED = 3 * _SECOND  # further ahead is damage, or of another boot
_KEPT = _SECOND  # unused bytes of a reservation are lost after so long
_PERMIT_BITS, _HOST_BITS = 16, 40
_QUEUES, _TURN_BITS, _QUEUE_BITS = 1 << 62, 38, 24  # the second range; milliseconds of nine years; hosts
_NO_BYTE = -1
_SAY_AFTER, _SAY_EVERY = 5 * _SECOND, 60 * _SECOND
NAMED = 4  # processes, in an error


class NodeLimits:
    """The limits of one root, as `remote.base.Limits` describes them. Callable from any thread, and in a forked child, which has no permits
    at first. Nothing waits, and nothing raises: where the files of the root fail, there is no limit.

    In a root that this process only reads, permits are shared locks that are looked at again, and the rate is this process's own.
    ``clock``: the monotonic clock, in nanoseconds."""

    def __init__(self, root: Root, head: SharedHead, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock, self._head, self._read_only = clock, head, root.read_only
        self._path = root.lock("transfers")
        self.locks = locks.LockFile(self._path, root.files.open, writable=not root.read_only)
        self._believed = 0, 0
        self._own_bucket = memoryview(bytearray(16)).cast("Q")
        self._begin()
        host.at_fork(self)

    def _begin(self) -> None:
        self._reserving = threading.Lock()  # guards what follows
        self._rate, self._credit, self._from, self._until = 0, 0, 0, 0

    def in_force(self) -> tuple[int, int]:
        """Bytes a second, and connections to a host; 0: no limit. Where the words are damaged, what was in force before."""
        try:
            self._believed = self._head.limits() or self._believed
        except (CacheFault, OSError):
            return 0, 0
        return self._believed

    # -- connections -----------------------------------------------------------------------------------------------

    def request(self, host_name: str) -> QueuedRequest:
        """Request a permit for a connection to a host. See `remote.base.Limits`."""
        return QueuedRequest(self, host_name)

    def holders(self, host_name: str) -> str:
        """See `remote.base.Limits`."""
        permits, limit = _offsets(host_name)[0], self.in_force()[1]
        pids = locks.holders(self._path, permits, length=max(limit, 1))
        named = ", ".join(map(locks.describe_process, pids[:NAMED]))
        return f"{named} and {len(pids) - NAMED:,} more" if len(pids) > NAMED else named or "an unknown process"

    def try_permit(self, permits: int, limit: int, note: Callable[[int], None]) -> int | None:
        """Lock one of the first ``limit`` bytes from ``permits`` on. Raises OSError. ``note`` is called before each is locked: an interrupt
        may come before its number is returned."""
        for number in range(limit):
            if self.locks.held(permits + number):
                continue  # also of a shared lock, of which this process could take any number
            note(number)
            if self.locks.try_lock(permits + number, exclusive=not self._read_only):
                # Of two processes that share a lock, both may have looked before the other one locked: so each looks again.
                if not self._read_only or not self.locks.is_locked(permits + number):
                    return number
                self.locks.unlock(permits + number)
        return None

    def queue_up(self, queue: int) -> int:
        """Lock the byte of the present time from ``queue`` on, or the next free one; returns its number. Raises OSError."""
        turn = self.clock() // 1_000_000 % (1 << _TURN_BITS)
        while not self.locks.try_lock(queue + turn, exclusive=not self._read_only):
            turn += 1
        return turn

    def is_any_before(self, queue: int, turn: int = 1 << _TURN_BITS) -> bool:
        """Whether another process has waited for longer than since ``turn``; by default, whether any waits. Raises OSError."""
        return turn > 0 and self.locks.first_locked(queue, queue + turn - 1) is not None

    def is_any_free(self, permits: int, limit: int) -> bool:
        """Whether a permit could be had now. Raises OSError."""
        offsets = range(permits, permits + limit)
        return any(not (self.locks.held(offset) or self.locks.is_locked(offset)) for offset in offsets)

    def release(self, permit: int) -> None:
        """Unlock a permit, and let waiting processes know."""
        self.locks.unlock(permit)
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

    def before_fork(self) -> None:
        self.locks.before_fork(keep=False)

    def after_fork_parent(self) -> None:
        self.locks.after_fork_parent()

    def after_fork_child(self) -> None:
        self.locks.after_fork_child(keep=False)
        self._begin()


def _offsets(host_name: str) -> tuple[int, int]:
    """Where the permits of a host begin, and those that wait for them."""
    digest = int.from_bytes(hashlib.blake2s(host_name.encode("utf-8", "replace"), digest_size=8).digest())
    return (digest & ((1 << _HOST_BITS) - 1)) << _PERMIT_BITS, _QUEUES + (digest >> _HOST_BITS << _TURN_BITS)


class QueuedRequest:
    """One request for a permit: see `remote.base.PermitRequest`. Not for several threads at once."""

    def __init__(self, limits: NodeLimits, host_name: str) -> None:
        self._limits, self._host = limits, host_name
        self._permits, self._queue = _offsets(host_name)
        self._turn: int | None = None
        self._taking = _NO_BYTE  # the permit that `try_take` may have taken and not returned
        self._scanned: tuple[int, int] | None = None  # the last release before the last scan, and the limit then
        self._scan_at = self._sight_at = self._sightings = 0
        self._began = limits.clock()
        self._say_at = self._began + _SAY_AFTER

    def try_take(self) -> ConnectionPermit | None:
        """A permit, if one is free and no other process has waited for longer; None: not yet. Never waits."""
        limit = self._limits.in_force()[1]
        number: int | None = _NO_BYTE
        if limit:
            try:
                number = self._try(limit)
            except (CacheFault, OSError) as error:
                self._taking = _NO_BYTE
                log.info("connections to %s are not limited: %s", self._host, str(error))
        if number is None:
            self._taking = _NO_BYTE
            self._say(limit)
            return None
        self._leave_queue()
        permit = ConnectionPermit(self._limits, self._permits, self._queue, number)
        self._taking = _NO_BYTE
        return permit

    def _try(self, limit: int) -> int | None:
        limits, turn = self._limits, self._turn
        if turn is None:
            number = None if limits.is_any_before(self._queue) else limits.try_permit(self._permits, limit, self._note)
            if number is None:
                self._turn = limits.queue_up(self._queue)
            return number
        now = limits.clock()
        if limits.is_any_before(self._queue, turn) and not self._are_those_before_stuck(limit, now):
            return None
        scan = limits.last_release(), limit
        if scan == self._scanned and now < self._scan_at:
            return None
        self._scanned, self._scan_at = scan, now + _SCAN_AGAIN
        return limits.try_permit(self._permits, limit, self._note)

    def _note(self, number: int) -> None:
        self._taking = number

    def _are_those_before_stuck(self, limit: int, now: int) -> bool:
        if now >= self._sight_at:
            self._sight_at = now + _SIGHTED_AFTER
            self._sightings = self._sightings + 1 if self._limits.is_any_free(self._permits, limit) else 0
        return self._sightings >= _SIGHTINGS

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
            self._limits.release(self._permits + taking)
        self._leave_queue()

    def _leave_queue(self) -> None:
        turn, self._turn = self._turn, None
        if turn is not None:
            self._limits.locks.unlock(self._queue + turn)


class ConnectionPermit:
    """The right to one connection to a host, until `release`: see `remote.base.Permit`."""

    def __init__(self, limits: NodeLimits, permits: int, queue: int, number: int) -> None:
        self._limits, self._permits, self._queue, self._number = limits, permits, queue, number
        self._since = limits.clock()

    def is_wanted(self, after: float = 0.0) -> bool:
        """Whether it should be released: another process waits and this one has had it for ``after`` seconds, or there are fewer now."""
        limit = self._limits.in_force()[1]
        if not limit:
            return False
        if not 0 <= self._number < limit:
            return True
        try:
            return self._limits.clock() - self._since >= after * _SECOND and self._limits.is_any_before(self._queue)
        except OSError:
            return False

    def release(self) -> None:
        """Let another process have it. Idempotent."""
        number, self._number = self._number, _NO_BYTE
        if number != _NO_BYTE:
            self._limits.release(self._permits + number)
