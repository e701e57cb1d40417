"""The limits of a root and of its spaces: the file ``settings.json`` has them. They apply to every process; the last process that sets
them wins.

The file is replaced as a whole. A word of the head is another one after each change: by it a process sees that it has to read the file
again. Beside that word lie copies of the limits of the root, for a root that lost the file.

**Limits of the node.** Limits on transfers that all processes of the node share: bytes a second from remotes, and connections to a host.

The time of the last release of a permit, and the state of the rate, are words of the head, which every process has mapped. Which process
has a connection, and which one waits, is expressed by locks on bytes of ``locks/transfers`` alone, which the kernel releases when a
process dies. Each host has a range of bytes:

- A permit for a connection is one of the first ``max_connections`` bytes. It goes to whoever looks first.
- A process that waits for a permit shares a lock on the last byte, so that others release what they do not use.

The rate is a token bucket in one word: the time until which all bytes that were granted are paid for. A process reserves the bytes of
5 ms at once, from that time on, and moves it on. It does so without a lock: of two processes that do it in the same microsecond
one may get its bytes for nothing."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from forebay import errors
from forebay._engine.files.layout import Root
from forebay._engine.index.head import LARGEST_LIMIT, SETTINGS, SharedHead
from forebay._kernel import host, interrupts, locks
from forebay._logs import logger
from forebay._model import Policy
from forebay.errors import CacheFault

log = logger("forebay.settings")

PATIENCE = 1.0
"""Seconds to wait for another process that changes the file, which takes it milliseconds."""
OF_TRANSFERS = frozenset({"max_rate", "max_connections"})
"""Limits that take no room."""
_LARGEST = 4 << 20
_MOST_SPACES = 10_000
_MISSING, _OWN = -1, -2  # versions: there is no file, or none that can be used; the limits are those of this process only
_LOCK = 1  # the byte of FORMAT that a process has while it changes the file


class Settings(NamedTuple):
    """The limits that the opener of a root sets, sizes in bytes; None leaves a limit as it was set before. ``max_rate``: bytes a second
    from remotes; ``max_connections``: to a host; 0 lifts these two. ``first_budget``: the budget of a root that has none yet."""

    budget: int | None = None
    min_free: int | None = None
    max_entries: int | None = None
    max_rate: int | None = None
    max_connections: int | None = None
    first_budget: int | None = None


NAMES = Settings._fields[:5]
"""The limits of a root, apart from those of its spaces."""


class SpaceLimits(NamedTuple):
    """The limits of one space, its quota in bytes; None: not set."""

    policy: Policy | None = None
    quota: int | None = None
    max_count: int | None = None

    def changed(self, other: SpaceLimits) -> SpaceLimits:
        """These limits, with those that ``other`` sets."""
        return SpaceLimits(
            self.policy if other.policy is None else other.policy, self.quota if other.quota is None else other.quota,
            self.max_count if other.max_count is None else other.max_count,
        )  # fmt: skip


_NOTHING_SET = SpaceLimits()


class RootLimits(NamedTuple):
    """What is set in a root; None: not set. See `Settings`."""

    budget: int | None = None
    min_free: int | None = None
    max_entries: int | None = None
    max_rate: int | None = None
    max_connections: int | None = None
    spaces: Mapping[str, SpaceLimits] = MappingProxyType({})

    def of_space(self, name: str) -> SpaceLimits:
        """The limits that were set for a space."""
        return self.spaces.get(name, _NOTHING_SET)

    def policy_of(self, name: str) -> Policy:
        """The policy of a space: what was set, else the one by its name."""
        return self.of_space(name).policy or Policy.default(name)

    def of_root(self) -> dict[str, int | None]:
        """By their `NAMES`."""
        return {name: getattr(self, name) for name in NAMES}


class _Read(NamedTuple):
    """``word``: of the head, when the file was read; ``version``: of the file, the same where both were written, or `_MISSING`, or
    `_OWN`."""

    word: int
    version: int
    limits: RootLimits


class SharedSettings:
    """The settings of one root. Callable from any thread, and in a forked child. Where the file is lost or damaged, this process goes on
    with what it has read before. Methods raise `SharedBroken` where the head is.

    ``format_file``: the locks of FORMAT; ``before``: what was in force for this process until the root was deleted."""

    def __init__(self, root: Root, head: SharedHead, format_file: locks.LockFile, before: RootLimits) -> None:
        self._root, self._head, self._format = root, head, format_file
        self._last = _Read(-1, _MISSING, before)

    @property
    def known(self) -> RootLimits:
        """What was in force when this process looked last."""
        return self._last.limits

    def limits(self) -> RootLimits:
        """What is in force now."""
        last = self._last
        return last.limits if last.word == self._head.words()[SETTINGS] else self._read().limits

    def _read(self) -> _Read:
        word, before = self._head.words()[SETTINGS], self._last.limits  # the word first: a change after it is another one
        there = read(self._root)
        if there is None:
            noted = self._head.noted_limits() if before.budget is None else None
            there = _MISSING, before if noted is None else RootLimits(**dict(zip(NAMES, noted, strict=True)), spaces={})
        self._last = last = _Read(word, *there)
        return last

    def _look(self) -> _Read:
        """What the file says now, even if the word of a process that was killed does not tell; but what could not be written stays."""
        is_own = self._last.version == _OWN and self._last.word == self._head.words()[SETTINGS]
        return self._last if is_own else self._read()

    def is_shared(self) -> bool:
        """Whether every process has, or will read, the limits that this one has."""
        return self._last.version == self._last.word == self._head.words()[SETTINGS]

    def set(self, settings: Settings) -> tuple[RootLimits, RootLimits]:
        """Set what is given for every process; returns the limits before and after. A root without a budget gets three quarters of the
        free space, and leaves a twentieth of the disk free. Where the file cannot be written, the limits apply to this process only."""
        settings = Settings(*map(_bounded, settings))
        given = {name: value for name, value in zip(NAMES, settings, strict=False) if value is not None}

        def changed(there: RootLimits) -> RootLimits:
            limits = RootLimits(**{**there.of_root(), **given}, spaces=there.spaces)
            if limits.budget is None or limits.min_free is None:
                disk, first = host.disk(self._root.path), settings.first_budget
                budget = limits.budget if limits.budget is not None else disk.free * 3 // 4 if first is None else first
                limits = limits._replace(budget=budget, min_free=disk.total // 20 if limits.min_free is None else limits.min_free)
            return limits

        return self._change(changed)

    def set_space(self, name: str, given: SpaceLimits) -> tuple[RootLimits, RootLimits]:
        """`set`, for one space."""
        given = given._replace(quota=_bounded(given.quota), max_count=_bounded(given.max_count))
        return self._change(lambda there: there._replace(spaces={**there.spaces, name: there.of_space(name).changed(given)}))

    def note(self) -> None:
        """Tell a new head what is in force. Caller: holds the writer lock."""
        last = self._read()
        if last.version >= 0:
            self._head.note_settings(last.version, list(last.limits.of_root().values()))

    def _change(self, changed: Callable[[RootLimits], RootLimits]) -> tuple[RootLimits, RootLimits]:
        last = self._look()
        before = last.limits
        if changed(before) == before and last.version == last.word:
            return before, before
        try:
            with self._alone():
                last = self._look()
                before, after = last.limits, changed(last.limits)
                if last.version == _MISSING and before.budget is not None:
                    lost = "" if before.spaces else ", without the limits of spaces"
                    log.warning("%s was lost or damaged: it is written again%s", self._root.settings, lost)
                if after != before or last.version != last.word:
                    version = last.version if after == before and last.version > 0 else 1 + int.from_bytes(os.urandom(7), "little")
                    if version != last.version:
                        _write(self._root, version, after)
                    self._head.note_settings(version, list(after.of_root().values()))
                    self._last = _Read(version, version, after)
        except (errors.CacheFault, OSError) as error:
            after = changed(before)
            self._last = _Read(self._head.words()[SETTINGS], _OWN, after)
            log.warning("%s: the limits that this process sets apply to it only: %s", self._root.path, str(error))
        return before, after

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        until = time.monotonic() + PATIENCE
        while not self._format.try_lock(_LOCK, exclusive=True):
            if time.monotonic() > until:
                holder = locks.describe_holders(self._root.path / "FORMAT", _LOCK)
                raise errors.WriterBusy(f"{self._root.settings} is being changed by {holder}", waited=PATIENCE, holder=holder)
            interrupts.sleep(0.002)
        try:
            yield
        finally:
            self._format.unlock(_LOCK)


# -- the file ----------------------------------------------------------------------------------------------------------


def read(root: Root) -> tuple[int, RootLimits] | None:
    """The version and the content of the file; None if it is missing, damaged, or another root's. What is invalid in it is left out."""
    try:
        data = host.read_small(root.settings, _LARGEST)
        if data is None:
            raise ValueError("it is not a plain file, or too large")
        body = json.loads(data)
        checksum = body.pop("checksum")
        if checksum != _checksum(body) or body["root"] != f"{root.id:016x}":
            raise ValueError("its checksum or its root is another one")
        limits = {name: body[name] for name in NAMES if _is_number(body.get(name))}
        spaces = dict(_space(row) for row in body["spaces"][:_MOST_SPACES] if isinstance(row.get("name"), str))
        return body["version"] if _is_number(body.get("version")) else 0, RootLimits(**limits, spaces=spaces)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        log.info("%s cannot be used: %s", root.settings, error)
        return None


def _write(root: Root, version: int, limits: RootLimits) -> None:
    spaces = [{"name": name, **space._asdict()} for name, space in list(limits.spaces.items())[:_MOST_SPACES]]
    body = {"root": f"{root.id:016x}", "version": version, **limits.of_root(), "spaces": spaces}
    root.replace(root.settings, (json.dumps({**body, "checksum": _checksum(body)}, indent=1) + "\n").encode())


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True).encode())


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= LARGEST_LIMIT


def _bounded(value: int | None) -> int | None:
    return None if value is None else min(value, LARGEST_LIMIT)  # beyond is no limit either


def _space(row: dict[str, Any]) -> tuple[str, SpaceLimits]:
    """The name of one space, and those of its limits that are valid."""
    policy = Policy(row["policy"]) if row.get("policy") in frozenset(map(str, Policy)) else None
    quota, most = (value if _is_number(value := row.get(field)) else None for field in ("quota", "max_count"))
    return row["name"], SpaceLimits(policy, quota, most)


# -- for people --------------------------------------------------------------------------------------------------------


def differences(before: RootLimits, after: RootLimits) -> dict[str, str]:
    """What differs between the limits of a root, by name, as text."""
    olds, news = before.of_root(), after.of_root()
    texts = {name: (shown(name, olds[name]), shown(name, news[name])) for name in NAMES}
    return {name: f"{name} {old} -> {new}" for name, (old, new) in texts.items() if old != new}


def shown(name: str, value: int | None) -> str:
    """A limit as text."""
    return "none" if value is None or (not value and name in OF_TRANSFERS) else f"{value:,}"


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
    import hashlib  # imported late: a hit does not need it

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
