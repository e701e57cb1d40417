"""Creates packs, and reserves the segments that writers append to.

    room       a row counts the segment before its file exists       a crash: counted, and taken over by the next writer of the pack
    append     see the module `pack`                                 the same; the index says where the last record ends
    leave      the tail is punched, then the row is updated          a crash between: still counted; repeated by a process that needs space

Space is taken in large steps, so that a put need not ask for any. A segment has one writer, whose id is in its row; the writer's lock
says whether it is alive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from forebay import errors
from forebay._engine.catalog import Catalog, Txn, entries, reservations, segments
from forebay._engine.catalog.segments import Segment
from forebay._engine.files import pack_files, pack_records
from forebay._engine.files.faults import faults
from forebay._engine.files.layout import PAGE
from forebay._engine.files.root import Root
from forebay._engine.locks.fill import hash_of
from forebay._engine.locks.leases import Lease, Leases
from forebay._engine.locks.owners import Owners
from forebay._engine.space.budget import Budget
from forebay._engine.space.free_space import SpaceRequest
from forebay._engine.space.segment_tails import SegmentTails
from forebay._engine.write.publish import Label, Publisher

SMALLEST, LARGEST = 1 << 20, 64 << 20
"""A step is 1/256 of the free space within these limits, and at most `EASY` or an eighth of the pack: a pack of few samples should not
count much empty space."""
EASY = 16 << 20
_FAR = 1 << 62


class SegmentRequest(NamedTuple):
    """The pack that needs a segment, the space of its entry, the words of its index, and the bytes that it may have in all (None: no
    limit)."""

    pack: int
    space: int
    words: memoryview
    quota: int | None = None


class TakenSegment(NamedTuple):
    """A segment to append to, from ``tail`` on. The caller closes ``fd``, and gives ``ticket`` to `Packing.forget` in the end."""

    segment: Segment
    fd: int
    ticket: int


class Packing:
    """The packs of one root. Callable from any thread, and in a forked child."""

    def __init__(
        self, root: Root, catalog: Catalog, leases: Leases, owners: Owners, budget: Budget, publisher: Publisher, tails: SegmentTails
    ) -> None:  # fmt: skip
        self.root, self._catalog, self._leases, self._owners = root, catalog, leases, owners
        self._budget, self._publisher, self._tails = budget, publisher, tails

    # -- making ----------------------------------------------------------------------------------------------------

    def create(self, label: Label, length: int, *, fingerprint: str | None = None) -> Lease:
        """Create an empty pack, which replaces the entry of this name; returns its lease. Caller: holds the key.

        Raises `NoSpace` or another `CacheFault`."""
        keyhash, size = hash_of(label.space, label.key), PAGE + pack_files.index_size(length)  # the directory takes a block
        return self._publisher.build(
            label, "pack", size, lambda id: pack_files.build(self.root, id, length, keyhash=keyhash),
            lambda id: pack_files.remove(self.root, id, keyhash=keyhash), validator=fingerprint,
        )  # fmt: skip

    # -- segments --------------------------------------------------------------------------------------------------

    def take(self, room: SegmentRequest, need: int, full: tuple[int, int] | None) -> TakenSegment:
        """Take a segment with ``need`` free bytes at its end, with this process as its only writer: one of a dead writer, one that its
        writer left, else a new one. ``full``: the number and the tail of a segment that this process leaves in any case. Raises `NoSpace`
        or another `CacheFault`."""
        me = self._owners.me()
        self._tails.reclaim()  # what dead writers left is given back by the next that takes more
        with faults(f"pack {room.pack:x}", need):
            left = self._punched(room.pack, full, me) if full is not None else None
            spare = self._spare(room, need)
            segment = self._enter(room, need, spare, left, me)
            try:
                fd = pack_files.make_segment(self.root, room.pack, segment.number, segment.capacity)
            except BaseException:
                self._tails.leave(segment)
                raise
            return TakenSegment(segment, fd, self._tails.ticket_of(segment))

    def _punched(self, pack: int, full: tuple[int, int], me: int) -> Segment | None:
        """The row of a segment of this process once it is left; None if it is another writer's. A large tail is punched now."""
        row = segments.one(self._catalog, pack, full[0])
        if row is None or row.owner != me:
            return None
        row = replace(row, tail=full[1])
        if row.capacity - row.tail <= max(row.capacity // 256, PAGE):
            return row
        return replace(row, size=pack_files.punch_segment(self.root, pack, row.number, row.tail, row.capacity))

    def leave(self, pack: int, number: int, tail: int) -> None:
        """Append no more: the space behind ``tail`` is given back. Caller: has closed the descriptor."""
        with faults(f"pack {pack:x}"):
            segment = segments.one(self._catalog, pack, number)
            if segment is not None and segment.owner == self._owners.me():
                self._tails.leave(replace(segment, tail=tail))

    def forget(self, ticket: int) -> None:
        """Note that nothing appends by this ticket any more. Never waits, for finalizers; others find the tail in the index."""
        self._tails.forget(ticket)

    def _spare(self, room: SegmentRequest, need: int) -> tuple[Segment, Segment] | None:
        """A segment that no process appends to and that has space: its row as it is stored, and as it should be."""
        for row in segments.roomy(self._catalog, room.pack, need):
            if row.owner is not None and not self._tails.is_left(row):
                continue
            real = row if row.owner is None else self._tails.with_tail(row, room.words)
            if real.capacity - real.tail >= need:
                return row, real
        return None

    def _enter(self, room: SegmentRequest, need: int, spare: tuple[Segment, Segment] | None, left: Segment | None, me: int) -> Segment:
        """Enter the row of a segment for this process; where none fits, entries are evicted."""
        with self._catalog.write() as txn:
            if left is not None:
                self._tails.put_left(txn, left)
            self._drop_promises(txn, _keyhash(room))
            choices = list(self._choices(txn, room, need, spare))
            for segment in choices:
                request = _request(room, segment)
                if not request.size or self._budget.room.fits(txn, request):
                    return self._own(txn, segment, room, me)
        for segment in choices[:-1]:
            try:
                return self._enter_reserved(segment, spare, room, me)
            except errors.NoSpace:
                continue  # a smaller one may fit
        return self._enter_reserved(choices[-1], spare, room, me)

    def _enter_reserved(self, segment: Segment, spare: tuple[Segment, Segment] | None, room: SegmentRequest, me: int) -> Segment:
        reserved = self._budget.reserve(_request(room, segment))
        try:
            with self._catalog.write() as txn:
                reservations.delete(txn, reserved.id)
                if not segment.size:  # others may have created some meanwhile
                    segment = replace(segment, number=self._next_number(txn, room))
                elif spare is None or not self._tails.is_as_seen(txn, spare[0]):
                    # P1 sees it left / P2 takes it over, appends, leaves it / P1: its tail is another one now.
                    raise errors.CacheFault(f"segment {segment.number} of pack {segment.pack:x} was taken by another process")
                return self._own(txn, segment, room, me)
        except BaseException:
            self._budget.cancel(reserved.id)
            raise

    def _choices(self, txn: Txn, room: SegmentRequest, need: int, spare: tuple[Segment, Segment] | None) -> Iterator[Segment]:
        """The spare segment if it has not changed since, then new ones, the largest first. ``size`` is what is allocated now."""
        entry = entries.by_id(txn, room.pack)
        if entry is None:
            raise errors.CacheFault(f"the pack {room.pack:x} has no entry any more: it was removed, or replaced by another version")
        left = _FAR if room.quota is None else room.quota - entry.size
        is_free = spare is not None and self._tails.is_as_seen(txn, spare[0])
        if spare is not None and is_free and spare[1].capacity - spare[1].size <= left:
            yield spare[1]
        if left < need + pack_records.START:
            raise errors.NoSpace(
                f"no room for {need:,} bytes more in {entry.name!r}: its quota of {room.quota:,} bytes is used up",
                key=entry.key, need=need, free=max(0, left), budget=room.quota, limit="quota",
            )  # fmt: skip
        short = self._budget.room.short(txn, None)
        free = min(short.free, -short.disk)
        step = min(max(free // 256, SMALLEST), LARGEST, max(EASY, entry.size // 8))
        allowed = min(free // 4, left)
        number = self._next_number(txn, room)
        if number > pack_records.MAX_SEGMENT:
            raise errors.CacheFault(f"the pack {room.pack:x} has {number:,} segments: no more can be named")
        for size in dict.fromkeys(_rounded(max(min(step // part, allowed), need + pack_records.START)) for part in (1, 4, 16, LARGEST)):
            yield Segment(room.pack, number, None, size, 0, pack_records.START)

    def _next_number(self, txn: Txn, room: SegmentRequest) -> int:
        return max(segments.last(txn, room.pack), pack_files.last_number(self.root, room.pack, room.words)) + 1

    def _own(self, txn: Txn, segment: Segment, room: SegmentRequest, me: int) -> Segment:
        if not segment.size:
            pack_files.note_number(self.root, room.words, segment.number)
        self._tails.take(segment)  # before the commit: another thread would take it for one that was left
        taken = replace(segment, owner=me, size=segment.capacity)
        segments.put(txn, taken)
        return taken

    def _drop_promises(self, txn: Txn, keyhash: int) -> None:
        """Delete what a writer of this pack reserved that died before it entered its row."""
        if reservations.by_key(txn, keyhash):
            self._owners.reap(txn)
            for reservation in reservations.by_key(txn, keyhash):
                if reservation.owner is None:
                    reservations.delete(txn, reservation.id)


def _keyhash(room: SegmentRequest) -> int:
    return hash_of(room.space, f"{room.pack:x}")


def _request(room: SegmentRequest, segment: Segment) -> SpaceRequest:
    return SpaceRequest(room.space, f"{room.pack:x}", _keyhash(room), segment.capacity - segment.size)


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE
