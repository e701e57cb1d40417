"""The segments of packs: how records are found in them, and where new ones are written.

**New segments.** Creates packs, and reserves the segments that writers append to.

    room       a row counts the segment before its file exists       a crash: counted, and closed by a process that needs space
    append     see the module `pack`                                 the same; the index says where the last record ends
    leave      the tail is punched, then the row is updated          a crash between: still counted; repeated by a process that needs space

Space is taken in large steps, so that a put need not ask for any. A segment has one writer, which holds the segment's byte of the index:
see `eviction`."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol, cast

from forebay import errors
from forebay._engine.catalog import entries, segments
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import SpaceRows, Txn
from forebay._engine.files import pack_files
from forebay._engine.files.layout import PAGE, Root, faults
from forebay._engine.leases import Lease, Leases
from forebay._engine.publish import Label, Publisher
from forebay._engine.space import eviction
from forebay._engine.space.budget import Budget
from forebay._engine.space.free_space import NO_LIMIT, SpaceRequest
from forebay._kernel import host, interrupts, locks, mappings

NOTHING = memoryview(b"").cast("Q")


class Finder(Protocol):
    """The function that `finder` returns. It keeps its pack alive; the pack refers to it weakly, so both go with the last handle."""

    take: Callable[[], tuple[int, int]]
    """Returns the hits and their bytes since the last call."""
    show: Callable[[memoryview], None]
    """Read from this larger view from now on; offsets stay the same."""
    slow_down: Callable[[], None]
    """Make every call take the slow path."""
    shut: Callable[[], None]
    """The same, and show no mapping any more."""

    def __call__(self, slot: int, copy: bool = False) -> memoryview | None: ...


MANY_HITS = 1024
"""After so many hits, the first use of another slot adds them to the counters."""


def finder(
    cells: memoryview, hints: memoryview, key: int, starts: memoryview, ends: memoryview, places: dict[int, tuple[int, int]],
    view: memoryview, *, slowly: Callable[[int, bool], memoryview | None], flush: Callable[[], None],
) -> Finder:  # fmt: skip
    """A function that returns the payload of a slot, ``view[starts[slot]:ends[slot]]``. If its end is 0, the hint of its length tells
    where it is; ``slowly`` is called where that proves nothing, and for a writable copy. ``flush`` takes the counts when they are many.

    ``cells``, ``hints``, ``key``: of the pack's index, of its hints, and the key of the hints. ``starts``, ``ends``: of the payloads that
    this process has found before. ``places``: where the segments that it has mapped begin and end in the view, by their numbers."""
    hits = size = 0
    header, sixteenths, hinted, bits, proofs = (
        pack_files.HEADER, pack_files.SIXTEENTHS, pack_files.HINTED, pack_files.HINT_BITS, pack_files.PROOFS
    )  # fmt: skip
    facts, proof = pack_files.hint_facts, pack_files.hint_proof

    def find(slot: int, copy: bool = False) -> memoryview | None:
        nonlocal hits, size
        try:
            end = ends[slot]
            if slot < 0 or copy:
                return slowly(slot, copy)
            if end:
                start = starts[slot]
            else:
                word, hint = cells[slot], hints[slot]
                length = hint & hinted
                start, limit = places[word >> 40]
                start += header + ((word & sixteenths) << 4)
                end = start + length
                if hint >> bits != proof(facts(word, length), key) & proofs or end > limit:  # `pack_files.length_hint`, without a call
                    return slowly(slot, copy)
                starts[slot] = start
                ends[slot] = end  # last: a reader that sees it relies on the other
                if hits >= MANY_HITS:
                    flush()
        except interrupts.unless_of_handler(IndexError, KeyError):
            return slowly(slot, copy)
        hits += 1
        size += end - start
        return view[start:end]

    def take() -> tuple[int, int]:
        nonlocal hits, size
        taken = hits, size
        hits = size = 0
        return taken

    def show(other: memoryview) -> None:
        nonlocal view
        view = other

    def slow_down() -> None:
        nonlocal ends
        ends = NOTHING

    def shut() -> None:
        nonlocal ends, view
        ends, view = NOTHING, GONE  # of a thread that is in `find` now the view makes a ValueError, as `Closed` is one

    function = cast(Finder, find)
    function.take, function.show, function.slow_down, function.shut = take, show, slow_down, shut
    return function


FIRST_WINDOW = 1 << 30
GONE = memoryview(b"")
GONE.release()


class Mapped:
    """The segments of one pack in the memory of this process, mapped one behind the other at their first use.

    ``view`` shows all of them; once a window is full it is a larger one with the same offsets. Callable from any thread; a forked child
    keeps what was mapped before."""

    def __init__(self, root: Root, pack: int) -> None:
        """Raises OSError if the process may not have so many addresses."""
        self._root, self._pack = root, pack
        self._window = mappings.Window(FIRST_WINDOW)
        self.view, self._top = self._window.view, 0
        self._mutex = threading.Lock()  # guards all above, and _placed
        self._placed: dict[int, tuple[int, int]] = {}  # segment -> where it begins in the view, its length

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()

    def close(self) -> None:
        """Stop exposing segments. Views that were handed out stay mapped until they are dropped."""
        with self._mutex:
            self.view, self._placed = GONE, {}
            del self._window

    def where(self, number: int, offset: int) -> tuple[int, int] | None:
        """Where a segment begins in the view, and its length, which should include ``offset``; a length of 0: the segment is gone.

        None if it cannot be mapped now."""
        with self._mutex:
            placed = self._placed.get(number)
            if placed is None or offset >= placed[1]:  # truncated when it was mapped, and perhaps restored since
                placed = self._place_locked(number)
            return placed

    def look_again(self, number: int) -> None:
        """Show what the file of a segment has now, at the same place: see `Root.is_layered`."""
        with self._mutex, contextlib.suppress(OSError, errors.Damaged):
            begin, length = self._placed[number]
            fd = pack_files.open_segment(self._root, self._pack, number)
            try:
                if os.fstat(fd).st_size >= length:
                    self._window.map_at(fd, length, begin)
            finally:
                os.close(fd)

    def private(self, number: int, start: int, length: int) -> memoryview:
        """Bytes of a segment, mapped privately: stores to them are not seen elsewhere, and never kept. Raises OSError."""
        first = start // PAGE * PAGE
        fd = pack_files.open_segment(self._root, self._pack, number)
        try:
            return mappings.map_file(fd, start - first + length, offset=first, writable=True, private=True)[start - first :]
        finally:
            os.close(fd)

    def _place_locked(self, number: int) -> tuple[int, int] | None:
        try:
            fd = pack_files.open_segment(self._root, self._pack, number)
        except (FileNotFoundError, errors.Damaged):
            return 0, 0
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size
            if number in self._placed and length <= self._placed[number][1]:
                return self._placed[number]
            if self._top + length > self._window.length:
                self._widen_locked(self._top + length)
            self._window.map_at(fd, length, self._top)
        except OSError:
            return None
        finally:
            os.close(fd)
        self._placed[number] = self._top, length
        self._top += -(-length // PAGE) * PAGE
        return self._placed[number]

    def _widen_locked(self, size: int) -> None:
        window = mappings.Window(1 << (2 * size - 1).bit_length())
        for number, (begin, length) in self._placed.items():
            fd = pack_files.open_segment(self._root, self._pack, number)
            try:
                window.map_at(fd, length, begin)
            finally:
                os.close(fd)
        self._window, self.view = window, window.view


SMALLEST, LARGEST = 1 << 20, 64 << 20
"""A step is 1/256 of the free space within these limits, and at most `EASY` or an eighth of the pack: a pack of few samples should not
count much empty space."""
EASY = 16 << 20
AHEAD = 1 << 20
"""A segment's blocks are counted when it is taken, and allocated in steps of this size."""
NEWEST = 32
"""A writer looks for room in this many closed segments before it creates a new one."""


class Appender:
    """A segment that this process appends to, from ``tail`` to ``capacity``. ``claims``: of the pack's index, with the segment's byte."""

    def __init__(self, fd: int, path: str, claims: locks.Claims, number: int, tail: int, capacity: int) -> None:
        self.fd, self.claims, self.number, self.tail, self.capacity = fd, claims, number, tail, capacity
        self._path = path
        self.ready = 0  # up to here its blocks are allocated
        self.last: int | None = None  # the slot of its last record, if this process wrote one
        self._file = locks.file_of(fd)

    def make_ready(self, need: int) -> None:
        """Allocate the blocks for ``need`` bytes more, and some ahead. Raises what the disk raises; then nothing has changed.

        Looks, too, whether the descriptors are still open. Between two looks their high numbers protect the job's files: where the job
        closed one, a write fails."""
        if not self.is_open():
            raise OSError(errno.EBADF, "the job closed a descriptor of ours")
        begin = max(self.ready, self.tail // PAGE * PAGE)
        end = min(max(self.tail + need, begin + AHEAD), self.capacity)
        host.allocate(self.fd, begin, end - begin)
        self.ready = end

    def is_open(self) -> bool:
        """Whether the job has closed neither descriptor: then no other process appends to the segment."""
        return self.claims.is_open() and self.fd >= 0 and locks.file_of(self.fd) == self._file

    def has_name(self, need: int) -> bool:
        """Whether other processes find the segment: False once its root was deleted, or another one has its place. Raises OSError.

        At the path there is only this file or none, unless a copy of the root has its place: whether it is this one is asked each time
        that more blocks are allocated, since that takes twice as long."""
        return (self.tail + need <= self.ready and os.access(self._path, os.F_OK)) or pack_files.has_name(self._path, self._file)

    def close(self) -> None:
        """Release the segment to any process. In a forked child, it stays the parent's."""
        fd, self.fd = self.fd, -1
        if fd >= 0 and locks.file_of(fd) == self._file:
            os.close(fd)
        self.claims.close()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            with interrupts.shielded():
                self.close()


class Packing:
    """The packs of one root. Callable from any thread, and in a forked child."""

    def __init__(self, root: Root, catalog: Catalog, leases: Leases, budget: Budget, publisher: Publisher) -> None:
        self.root, self._catalog, self._leases, self._budget, self._publisher = root, catalog, leases, budget, publisher

    def create(self, label: Label, length: int, *, fingerprint: str | None = None) -> Lease:
        """Create an empty pack, which replaces the entry of this name; returns its lease. Caller: holds the key.

        Raises `NoSpace` or another `CacheFault`."""
        keyhash, size = label.keyhash, PAGE + pack_files.index_size(length)  # the directory takes a block
        return self._publisher.build(
            label, "pack", size, lambda id: pack_files.build(self.root, id, length, keyhash=keyhash),
            lambda id: pack_files.remove(self.root, id, keyhash=keyhash), validator=fingerprint,
        )  # fmt: skip

    def take(self, pack: int, space: str, words: memoryview, need: int) -> Appender:
        """A segment with room for ``need`` bytes, of which this is the only writer: one that no process appends to, else a new one. Others
        are evicted where it does not fit. ``words``: of the pack's index. Raises `NoSpace` or another `CacheFault`."""
        eviction.reclaim(self.root, self._catalog)  # what dead writers left is given back by the next that takes more
        with faults(f"pack {pack:x}", need):
            claims = pack_files.claims(self.root, pack)
            try:
                size, free, quota = self._sizes(self._catalog, pack, space, words, need)
                left = self._claim_left(pack, words, need, min(free, quota), claims)
                if left:
                    size = left[2] - _rounded(left[1])

                def enter(txn: Txn) -> tuple[int, int, int]:
                    """Count the segment; returns its number, its tail, and up to where it may be filled."""
                    # P1 and P2 see what the quota leaves / P2 takes it / P1: it is less now.
                    new, _, quota = self._sizes(txn, pack, space, words, need)
                    number, tail, end = left or (self._next_number(txn, pack, words), pack_files.START, min(size, new))
                    end = min(end, _rounded(tail) + quota)
                    if not left and not claims.try_claim(pack_files.byte_of(number)):
                        raise errors.CacheFault(f"another program holds byte {pack_files.byte_of(number)} of the index of pack {pack:x}")
                    segments.open_one(txn, pack, number, end)
                    return number, tail, end

                request = SpaceRequest(space, f"{pack:x}", 0, size, charged=size, entries=0)
                number, tail, end = self._budget.with_room(request, enter)
                path = str(pack_files.segment_path(self.root, pack, number))
                return Appender(pack_files.make_segment(self.root, pack, number, end), path, claims, number, tail, end)
            except BaseException:
                claims.close()
                raise

    def _claim_left(self, pack: int, words: memoryview, need: int, most: int, claims: locks.Claims) -> tuple[int, int, int] | None:
        """The number, the tail and the length of a segment that no process appends to, with its byte claimed: one with room for ``need``
        bytes, and not for more than ``most``."""
        for row in segments.closed(self._catalog, pack, NEWEST):
            if not claims.try_claim(pack_files.byte_of(row.number)):
                continue
            length = pack_files.segment_length(self.root, pack, row.number)
            if need <= length - row.size <= most:
                end = pack_files.find_end(self.root, pack, row.number, words)
                if end.is_sound and end.tail + need <= length:
                    return row.number, end.tail, length
                most = 0  # all words were read: to do so for each segment would take too long
            claims.let_go(pack_files.byte_of(row.number))
        return None

    def _sizes(self, rows: SpaceRows, pack: int, space: str, words: memoryview, need: int) -> tuple[int, int, int]:
        """How large a new segment for ``need`` bytes should be; what is free without an eviction; what the pack's quota leaves. Raises
        `NoSpace` where that is less than ``need``."""
        entry = entries.by_id(rows, pack)
        if entry is None:
            raise errors.CacheFault(f"the pack {pack:x} has no entry any more: it was removed, or replaced by another version")
        quota, least = words[pack_files.QUOTA], need + pack_files.START
        left = quota - entry.size if quota else NO_LIMIT
        if left < least:
            raise errors.NoSpace(
                f"no room for {need:,} bytes more in {entry.name!r}: its quota of {quota:,} bytes is used up",
                key=entry.key, need=need, free=max(0, left), budget=quota, limit="quota",
            )  # fmt: skip
        short = self._budget.room.short(rows, SpaceRequest(space, "", 0, 0, entries=0))
        free = min(short.free, -short.disk, -short.quota)
        step = min(max(free // 256, SMALLEST), LARGEST, max(EASY, entry.size // 8))
        return _rounded(max(min(step, free // 4, left), least)), free, left

    def _next_number(self, txn: Txn, pack: int, words: memoryview) -> int:
        """A number that no segment of the pack has or had, noted before its file is made."""
        number = max(segments.last(txn, pack), pack_files.last_number(self.root, pack, words)) + 1
        if number > pack_files.MAX_SEGMENT:
            raise errors.CacheFault(f"the pack {pack:x} has {number:,} segments: no more can be named")
        pack_files.note_number(self.root, words, number)
        return number

    def leave(self, pack: int, words: memoryview, appender: Appender) -> None:
        """Return the space behind the last record. Does nothing if the job closed the descriptors: another process may append by now, and
        a process that needs space returns the rest. Caller: closes the appender."""
        if appender.is_open():
            with faults(f"pack {pack:x}"):
                if appender.last is not None:
                    pack_files.note_last(self.root, words, appender.number, appender.last)
                eviction.close(self.root, self._catalog, pack, {appender.number: appender.tail})


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
