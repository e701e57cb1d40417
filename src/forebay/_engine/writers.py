"""The parts of one root that change it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from forebay import errors
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs
from forebay._engine.files.layout import faults
from forebay._engine.files.root import Root
from forebay._engine.files.waiters import Waiters
from forebay._engine.index.adaptive import AdaptiveSpaces
from forebay._engine.index.counters import Counters
from forebay._engine.index.head import PAIRS
from forebay._engine.index.memo import Memo
from forebay._engine.index.records import EntryIndex
from forebay._engine.index.settings import SharedSettings
from forebay._engine.leases import Lease, Leases, Owners
from forebay._engine.packs.segments import Packing
from forebay._engine.publish import INLINE, SMALL, Label, Pending, Published, Publisher, Writing
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.ranking import Ranking
from forebay._kernel import host, locks, waits
from forebay._model import Buffer, Entry, ObjectInfo

AT_ONCE = 1 << 20
"""Bytes of small values that one transaction writes at most, about; this bounds its log."""
ROW = 512
"""Bytes of the log that a value takes at most beside its own."""
FILES, TOGETHER = 16, 4 << 20
"""Files of one transaction, and their bytes, at most: it holds the writer lock while it writes them."""


class Writers:
    """What waits for keys, evicts, publishes and packs in one root. The engine imports this module when a call first needs it: a process
    that only reads what is there starts without."""

    label = Label

    def __init__(
        self, root: Root, catalog: Catalog, index: EntryIndex, memo: Memo, counters: Counters, leases: Leases, owners: Owners,
        words: waits.Words, adaptive: AdaptiveSpaces, settings: SharedSettings,
    ) -> None:  # fmt: skip
        self.keys = locks.LockFile(root.lock("keys"), root.files.open)
        self.waiters = Waiters(root)
        self.eviction = Eviction(root, catalog, index, leases, words)
        self.ranking = Ranking(catalog, index, adaptive)
        self.budget = Budget(root, catalog, owners, self.eviction, self.ranking, words, counters, memo, settings)
        self.publisher = Publisher(root, catalog, index, adaptive, leases, owners, self.budget, self.eviction)
        self.writing = partial(Writing, self.publisher)
        self.packing = Packing(root, catalog, leases, self.budget, self.publisher)

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(
        self, label: Label, pieces: Sequence[Buffer], *, validator: str | None = None, timeout: float = 0.0
    ) -> Entry:  # fmt: skip
        """Store bytes that are given in consecutive pieces; many are written without being joined. ``timeout``: see `Budget.reserve`.
        Raises `NoSpace` or another `CacheFault`; then the previous entry stays."""
        size = sum(memoryview(piece).nbytes for piece in pieces) if len(pieces) > 1 else memoryview(pieces[0]).nbytes
        if size <= SMALL:
            one = self.publisher.of_bytes(label, b"".join(pieces) if len(pieces) > 1 else pieces[0], validator)
            return self.publisher.publish([one], timeout=timeout)[0].entry
        with faults(label.key, size), Writing(self.publisher, label, timeout=timeout, at_once=True) as writing:
            writing.begin(ObjectInfo("", size))
            at = 0
            for piece in pieces:
                writing.write(at, piece)
                at += memoryview(piece).nbytes
            return writing.publish(validator=validator)

    def put_leased(self, label: Label, data: Buffer) -> Lease:
        """Store bytes; returns a lease that exists before anybody can see the entry. Raises as `put`."""
        size = memoryview(data).nbytes
        if size > SMALL:
            with faults(label.key, size), Writing(self.publisher, label, at_once=True) as writing:
                writing.begin(ObjectInfo("", size))
                writing.write(0, data)
                return writing.publish_leased()
        return _leases(self.publisher.publish([self.publisher.of_bytes(label, data, leased=True)]))[0]

    def publish_links(self, links: Sequence[tuple[Label, Lease, str | None]], copy: Callable[[Lease], Buffer | None]) -> list[Lease]:
        """See `Store.publish_links`. ``copy``: returns the bytes of a tiny file; None: it is damaged."""

        def pending(label: Label, lease: Lease, validator: str | None) -> Pending:
            entry, root, path = lease.entry, self.publisher.root, lease.path
            if not self.publisher.leases.is_own_file(lease):
                raise errors.CacheFault(f"{entry.key!r} cannot be linked: it is not a file of {root.path}", key=entry.key)
            if entry.varies:
                label = label._replace(meta=entry.meta, validated=0)
            if entry.size > INLINE:
                place = partial(_place_link, root, path)
                return Pending(label, "blob", entry.size, entry.checksum, validator, leased=True, place=place)
            if (data := copy(lease)) is None:
                raise errors.Damaged(f"{entry.key!r} is damaged", key=entry.key)
            return self.publisher.of_bytes(label, data, validator, leased=True)

        return _leases(self.publisher.publish([pending(*one) for one in links]))

    def put_many(self, items: Sequence[tuple[Label, Buffer]], validator: str | None = None) -> list[Entry]:
        """Store several values of one space, as many in each transaction as its log and the patience of others allow. Raises what `put`
        raises; the values before it stay."""
        left, stored = deque(items), list[Entry]()
        while left:
            some = _first_of(left)
            if len(some) > 1:
                with contextlib.suppress(errors.NoSpace):  # there may be room for some of them
                    batch = [self.publisher.of_bytes(label, data, validator) for label, data in some]
                    stored += [new.entry for new in self.publisher.publish(batch)]
                    continue
            stored += [self.put(label, [data], validator=validator) for label, data in some]
        return stored

    def publish_collected(self, writings: Sequence[Writing], leased: Sequence[bool]) -> list[Entry | Lease]:
        """See `Store.publish_collected`."""
        batch = [
            one.pending(one.info.validator if one.info is not None else None, leased=wanted)
            for one, wanted in zip(writings, leased, strict=True)
        ]
        published = self.publisher.publish(batch)
        for one in writings:
            one.is_published = True
        return [new.entry if new.lease is None else new.lease for new in published]

    # -- process life ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        self.keys.close()
        self.waiters.locks.close()
        self.budget.close()

    def forking(self) -> tuple[host.Inherited, ...]:
        """What is told of forks."""
        return self.budget.keys, self.budget, self.keys, self.waiters.locks, self.ranking


def _place_link(root: Root, path: str, txn: Txn, id: int) -> None:
    blobs.link_blob(root, path, id)


def _leases(published: Sequence[Published]) -> list[Lease]:
    return [new.lease for new in published if new.lease is not None]


def _first_of(left: deque[tuple[Label, Buffer]]) -> list[tuple[Label, Buffer]]:
    """Take the first of ``left``, and those behind it that are published together with it: files, or values that are none."""
    taken, size = list[tuple[Label, Buffer]](), 0
    is_file = memoryview(left[0][1]).nbytes > INLINE
    most, many = (TOGETHER, FILES) if is_file else (AT_ONCE, PAIRS // 4)
    while left and len(taken) < many:
        next_size = memoryview(left[0][1]).nbytes
        if taken and ((next_size > INLINE) is not is_file or size + next_size > most):
            break
        taken.append(left.popleft())
        size += next_size + ROW
    return taken
