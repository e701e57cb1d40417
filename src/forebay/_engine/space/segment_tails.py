"""The empty ends of pack segments: which of them this process appends to, and what dead writers left behind their records.

A segment counts with its whole capacity while somebody appends to it. Its tail is given back when the writer leaves it, or by the
next process that needs room.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from forebay import errors
from forebay._engine.catalog import Catalog, Txn, segments
from forebay._engine.catalog.segments import Segment
from forebay._engine.files import pack_files
from forebay._engine.files.faults import faults
from forebay._engine.files.root import Root
from forebay._engine.locks.owners import Owners


class SegmentTails:
    """The tails of the segments of one root. Callable from any thread, and in a forked child."""

    def __init__(self, root: Root, catalog: Catalog, owners: Owners) -> None:
        self._root, self._catalog, self._owners = root, catalog, owners
        self._tickets = itertools.count()
        self._taken: dict[tuple[int, int], int] = {}  # what this process took, with the newest ticket; under the writer lock
        self._in_use: set[int] = set()  # tickets of those that something appends to; single steps, no lock

    def after_fork_child(self) -> None:
        self._taken, self._in_use = {}, set()

    def take(self, segment: Segment) -> None:
        """Note that this process appends to a segment. Caller: is inside the transaction that makes it the owner."""
        ticket = next(self._tickets)
        self._in_use.add(ticket)
        self._taken[segment.pack, segment.number] = ticket

    def ticket_of(self, segment: Segment) -> int:
        """The ticket of a segment that this process took, for `forget`."""
        return self._taken[segment.pack, segment.number]

    def forget(self, ticket: int) -> None:
        """Note that nothing appends by this ticket any more. Never waits, so finalizers may call it."""
        self._in_use.discard(ticket)

    def reclaim(self) -> bool:
        """Give back the tails that dead writers left, in all packs. True if there was one. Caller: holds no lock."""
        reclaimed = False
        for segment in segments.owned(self._catalog):
            if not self.is_left(segment):
                continue
            with faults(f"pack {segment.pack:x}"):
                try:
                    words = pack_files.map_index(self._root, segment.pack, None, writable=False)
                except (FileNotFoundError, errors.Damaged):
                    continue  # it is being removed
                self.leave(self.with_tail(segment, words), was=segment)
            reclaimed = True
        return reclaimed

    def any_left(self, txn: Txn) -> bool:
        """Whether `reclaim` would give anything back."""
        return any(self.is_left(segment) for segment in segments.owned(txn))

    def is_left(self, segment: Segment) -> bool:
        """Whether a segment still has an owner, and nothing of the owner's appends to it any more."""
        if segment.owner is None:
            return False
        if segment.owner == self._owners.me():
            return self._taken.get((segment.pack, segment.number)) not in self._in_use
        return self._owners.is_dead(segment.owner)

    def with_tail(self, segment: Segment, words: memoryview) -> Segment:
        """The segment with its tail as its records have it. ``words``: of the pack's index."""
        return replace(segment, tail=pack_files.find_tail(self._root, segment.pack, segment.number, words))

    def leave(self, segment: Segment, was: Segment | None = None) -> None:
        """Punch the tail, then write the row. ``was``: the row as it was read; nothing is done if the row has changed since."""
        with self._catalog.write() as txn:
            if was is not None and not self.is_as_seen(txn, was):
                return
            kept = pack_files.punch_segment(self._root, segment.pack, segment.number, segment.tail, segment.capacity)
            self.put_left(txn, replace(segment, size=kept))

    def put_left(self, txn: Txn, segment: Segment) -> None:
        """Write the row of a segment whose tail is punched: without an owner, or not at all if nothing of it is left."""
        self._taken.pop((segment.pack, segment.number), None)
        if segment.size:
            segments.put(txn, replace(segment, owner=None))
        else:
            segments.remove(txn, segment.pack, segment.number)

    def is_as_seen(self, txn: Txn, seen: Segment) -> bool:
        """Whether no process has taken a segment over since its row was read, and none appends to it."""
        return segments.one(txn, seen.pack, seen.number) == seen and (seen.owner is None or self.is_left(seen))
