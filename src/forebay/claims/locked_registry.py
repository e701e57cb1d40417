"""The registry in the hands of who has its lock: here claims get their names, and lose them."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import deque
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._kernel import host, locks
from forebay.claims import building, claim_files, conflicts, dirs, inspect, records
from forebay.claims.building import NEW, OLD, scrap_name
from forebay.claims.claim_request import ClaimRequest, Held
from forebay.claims.inherited_fds import passing
from forebay.claims.inspect import ClaimState
from forebay.claims.members import Members, OnLeft, at_the_end
from forebay.claims.table import CLAIM, LEADER, SLOTS

REFUSED = "refused."
_REFUSALS = 32
_NONE, _NUMBERS = -1, 1_000_000
_TAKEN = frozenset((errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR))
_refusals: deque[tuple[int, Path, int]] = deque()


class InTheWay(Exception):
    """Another claim stands against the one that is wanted. ``error``: that in words for the caller; ``seen``: the claim, if it is one."""

    def __init__(self, wanted: ClaimRequest, error: errors.ClaimConflict, seen: ClaimState | None = None) -> None:
        super().__init__(str(error))
        self._wanted, self.error, self.seen = wanted, error, seen

    def __reduce__(self) -> tuple[Any, ...]:
        return InTheWay, (self._wanted, self.error, self.seen)

    def is_ending(self) -> bool:
        """Whether it is about to go."""
        return self.seen is not None and self.seen.is_ending()

    def told(self) -> tuple[str, str]:
        """What is waited for, and who has it."""
        record = self.seen.record if self.seen is not None else None
        who = conflicts.describe(record, self.seen.pids()) if self.seen is not None and record is not None else "another job"
        return f"claim {self._wanted.key} of {self._wanted.owner}", who


def _is_ours(path: Path) -> bool:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and stat.S_ISDIR(status.st_mode)


def _is_free(wanted: ClaimRequest, prefix: int) -> bool:
    try:
        return wanted.outside is None or wanted.outside.free(prefix)
    except errors.ClaimConflict as error:
        raise InTheWay(wanted, error) from None


class LockedRegistry:
    """What is in the registry. Good only as long as the lock is held; afterwards what is in `scrap` is to be removed."""

    def __init__(self, path: Path, scrap: list[Path]) -> None:
        self._path, self.names, self.scrap = path, os.listdir(path), scrap
        for name in self.names:
            if name.startswith((NEW, OLD)) and _is_ours(path / name):
                self._scrap(path / name)
            elif name.startswith(REFUSED) and _is_ours(path / name):
                self.free(path / name)  # where who refused is gone

    def make_way(self, wanted: ClaimRequest) -> set[int]:
        """The numbers that are taken; our own dead claims are freed on the way. Raises `InTheWay` where one that lives has the same name,
        or a directory that is wanted."""
        asked = dirs.marks(stream.place for stream in wanted.streams if stream.remote is not None).asked
        taken, own = set(), wanted.tag
        registry = os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name, prefix, tag in inspect.parse(self.names):
                found = inspect.glance(name, registry)
                if found is None:
                    if self.free(self._path / name) or not os.path.isdir(self._path / name):
                        continue  # its number can be had; that of another user's dead claim cannot
                elif tag == own or records.may_meet(found, asked):
                    self._check(wanted, name)
                taken.add(prefix)
        finally:
            os.close(registry)
        return taken

    def _check(self, wanted: ClaimRequest, name: str) -> None:
        other = inspect.look_at(self._path, name)
        if other is None or other.record is None:
            return
        ours = wanted.record(_NONE)
        if other.tag == wanted.tag and other.uid == os.geteuid():
            raise InTheWay(wanted, conflicts.claimed_twice(ours, other.record, other.pids()), other)
        found = conflicts.conflict(ours, other.record, equal_only=wanted.equal_only)
        if found is None or name in wanted.spared:
            return
        if other.record.beside is None or not building.is_released(other.directory):
            raise InTheWay(wanted, conflicts.in_conflict(ours, other.record, other.pids(), found), other)

    def make(self, wanted: ClaimRequest, taken: set[int], on_left: OnLeft) -> Held:
        """Make the claim, under the lowest number that nobody has. Raises `InTheWay`, `NoSpace`, `Closed` where somebody takes its
        directory away meanwhile, OSError."""
        for prefix in range(_NUMBERS):
            if prefix in taken or not _is_free(wanted, prefix):
                continue
            try:
                return self._make(wanted, prefix, on_left)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
        raise errors.NoSpace(f"{self._path}: all {_NUMBERS:,} numbers are taken", key=str(self._path))

    def _make(self, wanted: ClaimRequest, prefix: int, on_left: OnLeft) -> Held:
        new, directory = self._path / scrap_name(NEW), self._path / f"{prefix:06}.{wanted.tag}"
        record = wanted.record(prefix)
        fd = building.build(new, record, wanted.outside.content(prefix) if wanted.outside is not None else None)
        try:
            try:
                host.rename(new, directory)
            except FileNotFoundError:
                raise claim_files.Gone(f"{new} is missing: somebody removed it while it was made") from None
            return Held(record, passing.hand_over(fd, lambda fd: Members(directory, fd, LEADER, wanted.rank, wanted.worker, on_left)))
        except OSError:
            self._scrap(new)
            raise
        finally:
            passing.close(fd, unlocking=SLOTS)

    def free(self, directory: Path) -> bool:
        """Take a claim of ours off its name, if nobody has it. False where somebody does, and for what is not ours."""
        if not _is_ours(directory):
            return False
        try:
            fd = passing.take_in(lambda: claim_files.open_write(directory, CLAIM))
        except OSError:
            return False  # without this file it is none that we made
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode) or not locks.take(fd, 0, SLOTS):
                return False
            old = self._path / scrap_name(OLD)
            try:
                host.rename(directory, old)
            except FileNotFoundError:
                return False  # the owner of the registry was first
            self._scrap(old)
            return True
        finally:
            passing.close(fd, unlocking=SLOTS)

    def _scrap(self, directory: Path) -> None:
        building.remove_beside(directory)
        self.scrap.append(directory)

    # -- refusals --------------------------------------------------------------------------------------------------

    def refuse(self, wanted: ClaimRequest, error: errors.ClaimConflict) -> None:
        """Let the other ranks of the job know why there is no claim: they need not wait for it. As long as this process lives."""
        new = self._path / scrap_name(NEW)
        fd = building.build_refusal(new, json.dumps(errors.to_wire(error) | {"facts": error.facts}).encode())
        name = self._path / f"{REFUSED}{wanted.tag}{new.name.removeprefix(NEW[:-1])}"
        host.rename(new, name)
        _refusals.append((os.getpid(), name, fd))
        if len(_refusals) > _REFUSALS:
            _withdraw(*_refusals.popleft())


def _withdraw(pid: int, name: Path, fd: int) -> None:
    if pid == os.getpid():  # else it is a parent's
        passing.close(fd, unlocking=SLOTS)
        building.remove(name)


def _withdraw_all() -> None:
    while _refusals:
        _withdraw(*_refusals.popleft())


at_the_end.append(_withdraw_all)
