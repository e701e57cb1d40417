"""The limits of a root and of its spaces: the file ``settings.json`` has them. They apply to every process; the last process that sets
them wins.

The file is replaced as a whole. A word of the head is another one after each change: by it a process sees that it has to read the file
again. Beside that word lie copies of the limits of the root, for a root that lost the file."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import xxhash

from forebay import errors
from forebay._engine.files.layout import Root
from forebay._engine.index.head import LARGEST_LIMIT, SETTINGS, SharedHead
from forebay._kernel import host, locks
from forebay._logs import logger
from forebay._model import Policy

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
            time.sleep(0.002)
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
