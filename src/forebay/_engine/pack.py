"""A pack that this process has open: records are found without a lock or a system call, and appended without waiting for anybody.

What was looked at once is known by two words of this process, where the record begins and ends in its window; a record never
changes, so they stay true as long as the pack is leased.
"""

from __future__ import annotations

import operator
import os
import threading
import time
from collections.abc import Sequence

from forebay import errors
from forebay._engine import packs, records
from forebay._engine.counters import BYTES_HIT, BYTES_STORED, DAMAGED, HITS, MISSES, Counters
from forebay._engine.faults import faults
from forebay._engine.leases import Lease
from forebay._engine.packing import Packing, Room, Taken
from forebay._engine.slots import Slots
from forebay._kernel import host, locks, mappings
from forebay._model import Buffer

ONE_HIT = 1 << 44
"""Hits are counted above this bit, their bytes below it: one addition for both."""
ASK_AGAIN = 2.0
"""Seconds after which a writer that found no room asks again, though nothing was evicted meanwhile."""
COPIED = 128 << 10
"""A private view of less is a copy: to map it takes longer."""
_FIRST_WINDOW = 1 << 30
_MANY_HITS = ONE_HIT << 10
_NOTHING = memoryview(b"").cast("Q")


class Pack:
    """One pack, leased until `close`. Callable from any thread, and usable in both processes after a fork."""

    def __init__(self, packing: Packing, slots: Slots, counters: Counters, lease: Lease, length: int, space: int) -> None:
        """Raises FileNotFoundError, `Damaged`, or OSError."""
        self.lease, self.id, self.length = lease, lease.entry.id, length
        self._packing, self._slots, self._counters, self._space = packing, slots, counters, space
        self._root = packing.root
        words = packs.map_index(self._root, self.id, length, writable=not self._root.read_only)
        self._words, self._cells = words, words[packs.HEADER_WORDS : packs.HEADER_WORDS + length]
        # Twice as long as the pack: an index below zero meets zeros too, and goes the long way.
        self._starts, self._ends = mappings.words_of_process(2 * length), mappings.words_of_process(2 * length)
        self._window = mappings.Window(_FIRST_WINDOW)
        self._view, self._top = self._window.view, 0
        self._placed: dict[int, tuple[int, int]] = {}  # segment -> where it begins in the window, its length
        self._count = 0
        self._read_only = False
        self._refused = 0.0, 0, 0  # until when, how much, at which eviction
        self.closed = False
        self._begin()
        host.at_fork(self)

    def _begin(self) -> None:
        self._mapping, self._appending = threading.Lock(), threading.Lock()
        self._appender: _Appender | None = None
        self._pid = os.getpid()

    def before_fork(self) -> None:
        """A put of another thread goes on in the parent; the child has a segment of its own, and locks that nobody holds."""

    def after_fork_parent(self) -> None:
        """Nothing changes."""

    def after_fork_child(self) -> None:
        if self._appender is not None:
            self._appender.abandon()
        self._begin()
        self._count = 0

    # -- reading ---------------------------------------------------------------------------------------------------

    def find(self, slot: int, copy: bool = False) -> memoryview | None:
        """The payload of a slot, read-only over the mapping, or a writable copy; None if it is empty. No lock, no system call.

        Raises IndexError, and `Closed`."""
        try:
            end = self._ends[slot]
        except IndexError:
            end = 0
        if end and not copy:
            start = self._starts[slot]
            self._count += ONE_HIT + end - start
            return self._view[start:end]
        return self._find_slowly(slot, copy)

    def _find_slowly(self, slot: int, copy: bool) -> memoryview | None:
        slot = self._checked(slot)
        if not self._ends[slot] and not self._locate(slot):
            self._counters.add(MISSES)
            return None
        start, end = self._starts[slot], self._ends[slot]
        self._count += ONE_HIT + end - start
        if self._count > _MANY_HITS:
            self.tell()
        found = self._view[start:end]
        return memoryview(bytearray(found)) if copy else found

    def has(self, slot: int) -> bool:
        """Whether a slot is filled. Counts nothing. Raises IndexError, and `Closed`."""
        return bool(self._cells[self._checked(slot)])

    def filled(self) -> list[int]:
        """All filled slots."""
        self._check_open()
        return [slot for slot, word in enumerate(self._cells.tolist()) if word]

    def count(self) -> int:
        """How many slots are filled."""
        self._check_open()
        return self.length - int(self._cells.tolist().count(0))

    def private(self, slot: int) -> memoryview:
        """The payload of a slot that `find` found, writable: what is stored there is seen by nobody else, and never kept."""
        start, end = self._starts[slot], self._ends[slot]
        if end - start < COPIED:
            return memoryview(bytearray(self._view[start:end]))
        number, offset = records.place_of(self._cells[slot])
        first = (offset + records.HEADER) // packs.PAGE * packs.PAGE
        skip = offset + records.HEADER - first
        try:
            fd = packs.open_segment(self._root, self.id, number)
        except OSError:
            return memoryview(bytearray(self._view[start:end]))
        try:
            return mappings.map_file(fd, skip + end - start, offset=first, writable=True, private=True)[skip:]
        except OSError:  # as many mappings as a process may have
            return memoryview(bytearray(self._view[start:end]))
        finally:
            os.close(fd)

    def _locate(self, slot: int) -> bool:
        """Look at a record for the first time in this process, and remember where it lies. False: there is none, or it is damaged."""
        word = self._cells[slot]
        if not word:
            return False
        number, offset = records.place_of(word)
        with self._mapping:
            placed = self._placed.get(number) or self._place(number)
        if placed is None:
            return False
        begin, length = placed
        size = records.length_of(self._view[begin : begin + length], offset, self.id, slot) if length else None
        if size is None:
            self._empty(slot, word)
            return False
        start = begin + offset + records.HEADER
        self._starts[slot] = start
        self._ends[slot] = start + size  # last: who finds it takes the other for set
        return True

    def _place(self, number: int) -> tuple[int, int] | None:
        """Map a segment behind the last one; (0, 0) where there is none, None where it cannot be mapped now."""
        try:
            fd = packs.open_segment(self._root, self.id, number)
        except (FileNotFoundError, errors.Damaged):
            return 0, 0
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size
            if self._top + length > self._window.length:
                self._widen(self._top + length)
            self._window.place(fd, length, self._top)
        except OSError:
            return None
        finally:
            os.close(fd)
        self._placed[number] = self._top, length
        self._top += -(-length // packs.PAGE) * packs.PAGE
        return self._placed[number]

    def _widen(self, wanted: int) -> None:
        """A larger window, in which everything lies where it lay: what is known stays true."""
        window = mappings.Window(1 << (2 * wanted - 1).bit_length())
        for number, (begin, length) in self._placed.items():
            fd = packs.open_segment(self._root, self.id, number)
            try:
                window.place(fd, length, begin)
            finally:
                os.close(fd)
        self._window, self._view = window, window.view

    def _empty(self, slot: int, word: int) -> None:
        """A damaged record is served to nobody: its slot can be filled again."""
        self._counters.add(DAMAGED)
        if self._root.read_only or not self._can_append():
            return
        claims = locks.Claims(self._root.pack(self.id) / "index")
        try:
            packs.empty_slot(self._cells, claims, slot, word)
        finally:
            claims.close()

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, slot: int, parts: Sequence[Buffer]) -> bool:
        """Fill a slot, if it is empty; False if it is not, or nothing more goes in, or there was no room a moment ago.

        Raises IndexError, `Closed`, `NoSpace` where there is no room, or another `CacheFault`."""
        slot = self._checked(slot)
        if self._cells[slot] or self.frozen or not self._can_append():
            return False
        length = sum(map(len, parts))
        with self._appending, faults(f"sample {slot}", length):
            stored = self._append_locked(slot, parts, length)
        if stored:
            self._counters.add(BYTES_STORED, length)
        return stored

    def _append_locked(self, slot: int, parts: Sequence[Buffer], length: int) -> bool:
        appender, need = self._appender, records.footprint(length)
        if appender is None or not appender.has(need):
            appender = self._next_locked(need)
            if appender is None:
                return False
        appender.write((records.header_of(self.id, slot, parts, length), *parts))
        # The record is written; whoever has the slot's byte makes it the slot's. P1 sees it empty / P2 sees it empty, stores /
        # P1 has the byte: look again. Who finds the byte taken is second: he does not wait.
        if not appender.claims.try_claim(slot):
            return False
        try:
            if self._cells[slot]:
                return False
            host.set_word(self._cells, slot, records.word_of(appender.number, appender.tail))
        finally:
            appender.claims.let_go(slot)
        appender.tail += need
        return True

    def _next_locked(self, need: int) -> _Appender | None:
        """A segment with room; None where there was none a moment ago."""
        if self._is_refused(need):
            return None
        self._leave_locked()
        room = Room(self.id, self._space, self._words[packs.QUOTA] or None)
        words, index = self._slots.evictions()
        eviction = words[index]  # before the attempt: what is evicted meanwhile is a reason to ask again
        try:
            taken = self._packing.take(room, need, self._words)
        except errors.NoSpace:
            self._refused = time.monotonic() + ASK_AGAIN, need, eviction
            raise
        self._appender = _Appender(self._packing, taken, self._root.pack(self.id) / "index")
        return self._appender

    def _leave_locked(self) -> None:
        appender, self._appender = self._appender, None
        if appender is not None:
            appender.close()
            self._packing.leave(self.id, appender.number, appender.tail)

    @property
    def admits(self) -> bool:
        """Whether a put may find room: nothing is frozen, and none was refused a moment ago."""
        return not self.frozen and self._can_append() and not self._is_refused(0)

    def _is_refused(self, need: int) -> bool:
        until, refused, eviction = self._refused
        words, index = self._slots.evictions()
        return (not need or need >= refused) and words[index] == eviction and time.monotonic() < until

    def set_quota(self, quota: int) -> None:
        """Let the pack have so many bytes in all, whoever writes."""
        if self._can_append():
            host.set_word(self._words, packs.QUOTA, quota)

    @property
    def frozen(self) -> bool:
        """Whether nothing more goes in."""
        return self._read_only or bool(self._words[packs.FROZEN])

    def freeze(self) -> None:
        """Let nothing more in, from any process, for good."""
        self._check_open()
        if self._can_append():
            host.set_word(self._words, packs.FROZEN, 1)
        self._read_only = True

    def only_read(self) -> None:
        """Let nothing in through this handle."""
        self._read_only = True

    def is_damaged(self, slot: int) -> bool:
        """Compare what `find` found with its checksum; what is damaged is emptied."""
        word = self._cells[slot]
        number, offset = records.place_of(word)
        begin, length = self._placed.get(number, (0, 0))
        if not word or records.length_of(self._view[begin : begin + length], offset, self.id, slot, verify=True) is not None:
            return False
        self._ends[slot] = 0
        self._empty(slot, word)
        return True

    def bad_slots(self) -> list[int]:
        """Compare every record with its checksum; what is damaged is emptied, and its slots are given."""
        self._check_open()
        found = packs.bad_slots(self._root, self.id, self._words[: packs.HEADER_WORDS + self.length])
        for slot in found:
            self._empty(slot, self._cells[slot])
            self._ends[slot] = 0
        return found

    def _can_append(self) -> bool:
        return not self._root.read_only and self._pid == os.getpid()  # in a child of a fork by C code this is its parent's

    # -- life ------------------------------------------------------------------------------------------------------

    def tell(self) -> None:
        """Add what was found since the last time to the counters of the process, and say that the pack is in use."""
        count, self._count = self._count, 0
        self._counters.add(HITS, count >> 44)
        self._counters.add(BYTES_HIT, count & (ONE_HIT - 1))

    def close(self) -> None:
        """Let go. Views that were handed out stay good; any other call raises `Closed`."""
        if self.closed:
            return
        self.closed, self._ends = True, _NOTHING
        self.tell()
        if self._can_append():
            with self._appending, faults(f"pack {self.id:x}"):
                self._leave_locked()
        self.lease.close()

    def _checked(self, slot: int) -> int:
        index = operator.index(slot)
        self._check_open()
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} is outside of 0..{self.length - 1}")
        return index

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of("array of samples")


class _Appender:
    """The segment that this process appends to."""

    def __init__(self, packing: Packing, taken: Taken, index: os.PathLike[str]) -> None:
        segment = taken.segment
        self._packing, self._fd, self._pack, self.number = packing, taken.fd, segment.pack, segment.number
        self.tail, self._capacity = segment.tail, segment.capacity
        self._file = locks.file_of(self._fd)
        self.claims = locks.Claims(index)

    def has(self, need: int) -> bool:
        """Whether so many bytes go in still. False also where the job closed our descriptor: its number may be another file's by now."""
        return self.tail + need <= self._capacity and locks.file_of(self._fd) == self._file

    def write(self, parts: Sequence[Buffer]) -> None:
        host.pwritev(self._fd, parts, self.tail)

    def close(self) -> None:
        self.abandon()
        self.claims.close()

    def __del__(self) -> None:
        self.abandon()
        self._packing.forget(self._pack, self.number)  # a handle that was dropped without `close`

    def abandon(self) -> None:
        """Close the file: whose segment it is stays as it is."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and locks.file_of(fd) == self._file:
            os.close(fd)
