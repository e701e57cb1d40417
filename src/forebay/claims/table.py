"""What the members of a claim tell of themselves: a record each, in a file that all have mapped.

A record says ``in`` only after its byte was locked. So a record that says ``in`` while its byte is free is of a process that died, and
one that says ``left`` is of a process that went by itself.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from forebay._kernel import host, locks, mappings
from forebay.claims import claim_files, processes
from forebay.claims.claim_files import Gone

SLOTS = 1024
LEADER = 0
"""The slot of who registered the claim. Nobody else ever has it."""
CLAIM, TABLE = "claim", "members"

_WORDS = 8  # of 8 bytes, a record
TABLE_BYTES = SLOTS + SLOTS * _WORDS * 8
FREE, IN, LEFT = range(3)
_PID, _START = 0, 2
_TOLD = 7  # words: pid, PID namespace, start, rank, worker, when it joined, depth

Identity: TypeAlias = tuple[int, int, int]
"""Which process of a claim: its slot, pid, and start. It stays the same where a lost lock is taken anew."""


@dataclass(frozen=True, slots=True)
class Member:
    """A process that has, or had, the claim. ``rank`` and ``worker`` as far as it knew them when it joined."""

    slot: int
    pid: int
    space: int  # its PID namespace
    start: int  # clock ticks since the boot
    rank: int | None
    worker: int | None
    joined: float  # seconds of the monotonic clock
    depth: int  # 0; of a child of a member one more
    state: Literal["in", "left", "vanished"]

    @property
    def identity(self) -> Identity:
        return self.slot, self.pid, self.start

    def describe(self) -> str:
        """In words for people: ``rank 1 (process 123)``."""
        worker = f"worker {self.worker} of " if self.worker is not None else ""
        who = f"process {self.pid}{'' if self._is_visible() else ' of another PID namespace'}"
        return f"{worker}rank {self.rank} ({who})" if self.rank is not None else who

    def is_stopped(self) -> bool:
        """Whether it stands still, by SIGSTOP or in a debugger, as far as can be seen from here."""
        found = processes.status(self.pid) if self._is_visible() else None
        return found is not None and found.start == self.start and found.stopped

    def is_dying(self) -> bool:
        """Whether it is gone, or was killed and has not let go of everything yet, as far as can be seen from here."""
        return self._is_visible() and processes.is_dying(self.pid, self.start)

    def is_alive(self) -> bool:
        """Whether it goes on, as far as can be seen from here."""
        return self._is_visible() and not processes.is_dying(self.pid, self.start)

    def _is_visible(self) -> bool:
        return self.space == processes.pid_space()


class MemberTable:
    """The records of a claim's members, mapped: a byte each for their states, then what they tell."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError; `Gone` where the file is another user's, or not a whole one."""
        fd = claim_files.open_write(directory, TABLE)
        try:
            if os.fstat(fd).st_size < TABLE_BYTES:
                raise Gone(f"{directory / TABLE} is cut short")
            whole = mappings.map_file(fd, TABLE_BYTES, writable=True)
            self._states, self._words = whole[:SLOTS], mappings.words(whole[SLOTS:])
            self._vanished: dict[int, int] = {}  # slot -> when it had joined: so that /proc is asked once
        finally:
            os.close(fd)

    def states(self) -> bytes:
        """Of all that were ever used, in order of the slots."""
        return self._states.tobytes().rstrip(b"\0")

    def state(self, slot: int) -> int:
        return self._states[slot]

    def set_state(self, slot: int, state: int) -> None:
        host.set_byte(self._states, slot, state)

    def write(self, slot: int, rank: int | None, worker: int | None, depth: int) -> Identity:
        """Tell of this process; gives which it is. Caller: has locked the byte of ``slot``."""
        told = (os.getpid(), processes.pid_space(), processes.own_start(), _number(rank), _number(worker), time.monotonic_ns(), depth)
        host.step("set_words", slot)
        self._words[slot * _WORDS : slot * _WORDS + _TOLD] = memoryview(array("Q", told))
        self.set_state(slot, IN)  # last: until then it is of nobody
        return slot, told[0], told[2]

    def identity(self, slot: int) -> Identity:
        words = self._words
        return slot, words[slot * _WORDS + _PID], words[slot * _WORDS + _START]

    def read(self, slot: int, *, is_locked: bool) -> Member:
        pid, space, start, rank, worker, joined, depth = self._words[slot * _WORDS : slot * _WORDS + _TOLD].tolist()
        seen = (pid, space, start, _known(rank), _known(worker), joined / 1e9, depth)
        if self._states[slot] == LEFT:
            return Member(slot, *seen, "left")
        if is_locked:
            return Member(slot, *seen, "in")
        gone = Member(slot, *seen, "vanished")
        if self._vanished.get(slot) != joined:
            if gone.is_alive():
                return Member(slot, *seen, "left")  # it became another program (exec), which let go of its lock
            self._vanished[slot] = joined
        return gone

    def members(self, fd: int, own: int = -1) -> list[Member]:
        """All, in order of their slots. ``fd``: of the claim's file, with ``own`` locked through it."""
        told = [slot for slot, state in enumerate(self.states()) if state != FREE]
        return [self.read(slot, is_locked=slot == own or locks.locked_at(fd, slot) is not None) for slot in told]

    def places(self) -> Iterator[int]:
        """Where a process may go, the best first: over those that vanished, of whom others may still want to know, last."""
        states = self._states.tobytes()
        for wanted in (LEFT, FREE, IN):
            at = states.find(wanted, LEADER + 1)
            while at >= 0:
                yield at
                at = states.find(wanted, at + 1)

    def is_full(self) -> bool:
        """Whether nobody left, and every place was used."""
        states = self._states.tobytes()[LEADER + 1 :]
        return FREE not in states and LEFT not in states


def _number(value: int | None) -> int:
    return 0 if value is None else value + 1


def _known(number: int) -> int | None:
    return number - 1 if number else None
