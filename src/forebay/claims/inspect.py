"""The state of a claim as any process of the node sees it."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from forebay._kernel import locks
from forebay.claims import claim_files, processes, records
from forebay.claims.claim_files import CLAIM, LEADER, LOCKS, MARKER, SLOTS, TABLE, WORDS
from forebay.claims.members import Member, MemberTable
from forebay.claims.records import Record

_NAME = re.compile(r"(?<![^/])(([0-9]{6,15})\.([0-9a-f]{16}))(?![^/])")
_MEMORY = "/dev/shm/"
_FIRST_READ = 1024  # bytes: the marks of a few directories
_NOT_SHARED_MEMORY = frozenset((CLAIM, TABLE, LOCKS, WORDS, MARKER))


class ClaimState(NamedTuple):
    """``tag``: identifies job and key. ``live``: some process has the claim; ``led``: the process that registered it does. ``record``: None
    if it is damaged."""

    directory: Path
    prefix: int
    tag: str
    uid: int
    live: bool
    led: bool
    record: Record | None

    def members(self) -> list[Member]:
        """Return the processes that have, or had, the claim; none if it is another user's."""
        fd = claim_files.open_read(f"{self.directory}/{CLAIM}")
        if fd is None:
            return []
        try:
            return MemberTable(self.directory).members(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def pids(self) -> list[int]:
        """Return the processes that have the claim now, as far as this user may know."""
        if self.uid == os.geteuid():
            pids = (member.pid for member in self.members() if member.state == "in")
            return list(dict.fromkeys(pids))  # a forked process may have it twice, as its parent's child and as a rank
        return [self.record.pid] if self.led and self.record is not None else []

    def is_ending(self) -> bool:
        """Whether the claim is about to be freed: its leader has gone or was killed, or all its processes were."""
        if not self.led or self._is_leader_dying():
            return True
        members = [member for member in self.members() if member.state == "in"]
        return all(member.is_dying() for member in members) if members else self._has_lost_leader()

    def _is_leader_dying(self) -> bool:
        record = self.record
        if record is None or record.space != processes.pid_space():
            return False
        if processes.status(record.pid) is not None:
            return processes.is_dying(record.pid, record.ticks)
        return self._has_lost_leader()  # /proc hides it from this user, or it just ended

    def _has_lost_leader(self) -> bool:
        """Look again: a child forked by the leader and killed with it may have held its lock for another moment."""
        now = read_state(self.directory.parent, self.directory.name)
        return now is None or not now.led

    def memory(self) -> int | None:
        """Return the bytes of shared memory of the claim, including its files outside its directory; None if they are hidden from this
        user."""
        external = self.record.beside.paths if self.record is not None and self.record.beside is not None else ()
        try:
            own = [f"{self.directory}/{name}" for name in set(os.listdir(self.directory)) - _NOT_SHARED_MEMORY]
            return sum(map(_allocated, [*own, *(path for path in external if path.startswith(_MEMORY))]))
        except PermissionError:
            return None
        except OSError:
            return 0  # it was freed meanwhile


def _allocated(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def parse(names: Iterable[str]) -> list[tuple[str, int, str]]:
    """Return the names of claims' directories among those of the registry, with the number and tag of each."""
    return [(name, int(prefix), tag) for name, prefix, tag in _NAME.findall("/".join(names))]  # in one call: 0.3 us a name instead of 1


def read_live_marks(directory: str, registry: int | None = None) -> bytes | None:
    """Return the beginning of a claim's file with its marks if any process has the claim; else None. Takes 6 us.

    ``registry``: a descriptor that the path is relative to. Raises OSError if this process cannot open any file."""
    fd = claim_files.open_read(f"{directory}/{CLAIM}", registry)
    if fd is None:
        return None
    try:
        if locks.locked_at(fd, 0, SLOTS) is None:
            return None
        data = os.pread(fd, _FIRST_READ, 0)
        end = records.length_of_marks(data)
        return data if end <= len(data) else os.pread(fd, min(end, records.LARGEST), 0)
    except OSError:
        return None  # not a regular file
    finally:
        os.close(fd)


def read_state(registry: Path, name: str) -> ClaimState | None:
    """Return the state of the claim of this name; None if there is none, or it was freed meanwhile. Raises OSError if this process cannot
    open any file."""
    if not (parsed := parse([name])):
        return None
    (_, prefix, tag), directory = parsed[0], registry / name
    fd = claim_files.open_read(f"{directory}/{CLAIM}")
    if fd is None:
        return _damaged(directory, prefix, tag)
    try:
        live = locks.locked_at(fd, 0, SLOTS) is not None
        led = live and locks.locked_at(fd, LEADER) is not None
        return ClaimState(directory, prefix, tag, os.fstat(fd).st_uid, live, led, records.load(claim_files.read(fd)))
    except OSError:
        return _damaged(directory, prefix, tag)
    finally:
        os.close(fd)


def _damaged(directory: Path, prefix: int, tag: str) -> ClaimState | None:
    """Return the state of a claim with an unreadable file: no process can have it, but its name is taken. None if it is no directory."""
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return None
    return ClaimState(directory, prefix, tag, status.st_uid, False, False, None) if stat.S_ISDIR(status.st_mode) else None
