"""A claim as it is seen from outside, by who may have nothing to do with it."""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from forebay._kernel import locks
from forebay.claims import claim_files, processes, records
from forebay.claims.claim_files import CLAIM, LANDMARK, LEADER, LOCKS, SLOTS, TABLE, WORDS
from forebay.claims.members import Member, MemberTable
from forebay.claims.records import Record

_NAME = re.compile(r"(?<![^/])(([0-9]{6,15})\.([0-9a-f]{16}))(?![^/])")
_TO_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # anybody may have put a FIFO there
_MEMORY = "/dev/shm/"
_GLANCE = 1024  # bytes: the marks of a few directories
_OUR_OWN = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOMEM))  # these say nothing of what was to be opened
_APART = frozenset((CLAIM, TABLE, LOCKS, WORDS, LANDMARK))


class ClaimState(NamedTuple):
    """``tag``: tells job and key. ``live``: somebody has it; ``led``: who registered it does. ``record``: None where it is damaged."""

    directory: Path
    prefix: int
    tag: str
    uid: int
    live: bool
    led: bool
    record: Record | None

    def members(self) -> list[Member]:
        """Who has it, or had; none where it is another user's."""
        fd = _open(self.directory)
        if fd is None:
            return []
        try:
            return MemberTable(self.directory).members(fd)
        except OSError:
            return []
        finally:
            os.close(fd)

    def pids(self) -> list[int]:
        """Who has it now, as far as we may know."""
        if self.uid == os.geteuid():
            there = (member.pid for member in self.members() if member.state == "in")
            return list(dict.fromkeys(there))  # one that was forked may have it twice, as its parent's child and as a rank
        return [self.record.pid] if self.led and self.record is not None else []

    def is_ending(self) -> bool:
        """Whether who has it is about to let go: its leader is gone, or was killed, or all who have it were."""
        if not self.led or self._is_leader_dying():
            return True
        there = [member for member in self.members() if member.state == "in"]
        return all(member.is_dying() for member in there) if there else self._is_led_no_more()

    def _is_leader_dying(self) -> bool:
        told = self.record
        if told is None or told.space != processes.pid_space():
            return False
        if processes.status(told.pid) is not None:
            return processes.is_dying(told.pid, told.ticks)
        return self._is_led_no_more()  # /proc hides it from us, or it went this moment

    def _is_led_no_more(self) -> bool:
        """By a second look: a child that its leader forked, and that was killed with it, may have had its lock for another moment."""
        now = look_at(self.directory.parent, self.directory.name)
        return now is None or not now.led

    def memory(self) -> int | None:
        """Bytes of shared memory that are the claim's, what it has beside its directory too; None where that is not shown to us."""
        beside = self.record.beside.paths if self.record is not None and self.record.beside is not None else ()
        try:
            names = set(os.listdir(self.directory)) - _APART
            own = [f"{self.directory}/{name}" for name in names]
            return sum(map(_blocks, [*own, *(path for path in beside if path.startswith(_MEMORY))]))
        except PermissionError:
            return None
        except OSError:
            return 0  # it was freed meanwhile


def _blocks(path: str) -> int:
    try:
        return os.lstat(path).st_blocks * 512
    except FileNotFoundError:
        return 0


def _open(path: str | Path, registry: int | None = None) -> int | None:
    """The file of a claim, to be read; None where it is none, or not ours to read. Raises OSError where this process can open nothing."""
    try:
        return os.open(f"{path}/{CLAIM}", _TO_READ, dir_fd=registry)
    except OSError as error:
        if error.errno in _OUR_OWN:
            raise  # taken for dead, its directories would be given away
        return None


def parse(names: Iterable[str]) -> list[tuple[str, int, str]]:
    """Of names in the registry those that claims' directories have, with the number and tag of each."""
    return [(name, int(prefix), tag) for name, prefix, tag in _NAME.findall("/".join(names))]  # at once: 0.3 us a name, alone 1


def glance(directory: str, registry: int | None = None) -> bytes | None:
    """The beginning of what a claim says of itself, with its marks, if anybody has it; else None. ``registry``: a descriptor of what the
    path begins at. Takes 6 us. Raises OSError where this process can open nothing."""
    fd = _open(directory, registry)
    if fd is None:
        return None
    try:
        if locks.locked_at(fd, 0, SLOTS) is None:
            return None
        data = os.pread(fd, _GLANCE, 0)
        end = records.length_of_marks(data)
        return data if end <= len(data) else os.pread(fd, min(end, records.LARGEST), 0)
    except OSError:
        return None  # it is a directory, or the like
    finally:
        os.close(fd)


def look_at(registry: Path, name: str) -> ClaimState | None:
    """The claim of this name; None where there is none, or it was freed meanwhile. Raises OSError where this process can open nothing."""
    if not (found := parse([name])):
        return None
    told, directory = found[0][1:], registry / name
    fd = _open(directory)
    if fd is None:
        return _damaged(directory, *told)
    try:
        live = locks.locked_at(fd, 0, SLOTS) is not None
        led = live and locks.locked_at(fd, LEADER) is not None
        return ClaimState(directory, *told, os.fstat(fd).st_uid, live, led, records.load(claim_files.read(fd)))
    except OSError:
        return _damaged(directory, *told)
    finally:
        os.close(fd)


def _damaged(directory: Path, prefix: int, tag: str) -> ClaimState | None:
    """One whose file cannot be looked at: nobody can have it. Its name is taken all the same. None for what is no directory."""
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        return None
    return ClaimState(directory, prefix, tag, status.st_uid, False, False, None) if stat.S_ISDIR(status.st_mode) else None
