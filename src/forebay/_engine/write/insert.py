"""Rows of new entries and their records, and how small files are written and published in one step.

intent   ids and slots of what comes and goes             a crash: there is nothing to undo
files    written under their final names                  a crash: the next writer removes them before it grants room to anybody
commit   the rows are there                               a crash: the next writer stores their records
records  the entries can be found without the catalog
finish   the intent is empty

All of this happens under the writer lock, so one intent is enough, and nobody can promise the files' bytes to another process before
they are counted or gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from forebay._engine.catalog import Txn, entries, spaces
from forebay._engine.files.root import Root
from forebay._engine.index.adaptive import AdaptiveSpaces, Trial
from forebay._engine.index.records import EntryIndex
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.free_space import SpaceRequest
from forebay._model import Entry


class Label(NamedTuple):
    """The name and the properties of a new entry. ``life``: ``cached``, ``pinned`` or ``held``; a pin follows the name. ``validated``: when
    the bytes were seen to be the remote's version, in ns of the root's clock; None: when they are published. ``ahead``: it is fetched
    before it is used, so it is not on trial, and was last used when it was validated: later times say that it was used indeed."""

    space: int
    space_name: str
    key: str
    suffix: str = ""
    life: str = "cached"
    meta: str = ""
    validated: int | None = None
    ahead: bool = False


class New(NamedTuple):
    """One of several entries of a space that are inserted together; ``data``: its bytes if they are stored in the catalog."""

    label: Label
    id: int
    size: int
    checksum: bytes
    validator: str | None
    data: bytes | None = None


class Inserter:
    """Inserts the rows of entries into one root. Callable from any thread that is inside a transaction."""

    def __init__(self, root: Root, index: EntryIndex, adaptive: AdaptiveSpaces, budget: Budget, eviction: Eviction) -> None:
        self._root, self._index, self._adaptive, self.budget, self._eviction = root, index, adaptive, budget, eviction

    def intend(self, ids: Sequence[int]) -> list[int]:
        """Allow the files of these ids to be written, whose rows this transaction commits; returns a slot for each."""
        return self._index.take(ids)

    def insert(
        self, txn: Txn, label: Label, id: int, kind: str, size: int, checksum: bytes, validator: str | None, data: bytes | None = None,
        request: SpaceRequest | None = None, slot: int | None = None,
    ) -> Entry:  # fmt: skip
        """Insert the row, and supersede the previous version. Before the commit other processes see only empty slots.

        ``request``: made in the same transaction, so it says whether there is a previous version. ``slot``: of `intend`, if it was
        called."""
        now, created = self._index.head.clock.now(), time.time()
        old = entries.find(txn, label.space, label.key) if request is None or request.replaces else None
        if old is not None:
            self._eviction.supersede(txn, [old])
        slot = self.intend([id])[0] if slot is None else slot
        charge = self.budget.room.charge(size, inline=True) if kind == "value" else self.budget.room.charge_published(size)
        life = "pinned" if old is not None and old.life == "pinned" else label.life
        entry = Entry(
            id, label.space_name, label.key, kind, size, charge, slot, checksum, validator, created, self._root.epoch, life,
            label.suffix, label.meta,
        )  # fmt: skip
        entries.insert(txn, label.space, entry, data)
        self._settle(txn, label, entry, data, now)
        return entry

    def add(
        self, txn: Txn, label: Label, id: int, data: bytes, checksum: bytes, validator: str | None
    ) -> Entry | None:  # fmt: skip
        """`insert` of a small value, unless its key has an entry already: then None."""
        now, size = self._index.head.clock.now(), len(data)
        entry = Entry(
            id, label.space_name, label.key, "value", size, self.budget.room.charge(size, inline=True), self._index.take([id])[0], checksum,
            validator, time.time(), self._root.epoch, label.life, label.suffix, label.meta,
        )  # fmt: skip
        if not entries.add(txn, label.space, entry, data):
            return None
        self._settle(txn, label, entry, data, now)
        return entry

    def _settle(self, txn: Txn, label: Label, entry: Entry, data: bytes | None, now: int) -> None:
        validated = now if label.validated is None else label.validated
        txn.after_commit.append(partial(self._index.store, label.space, entry, validated if label.ahead else now, validated))
        self._try(txn, [(label, entry)], now)
        txn.after_release.append(lambda: self._index.note_new(label.space, [(entry, data)]))

    def _try(self, txn: Txn, several: Sequence[tuple[Label, Entry]], now: int) -> None:
        """Tell an adaptive space of its new entries, and put them on trial where bimodal insertion leads."""
        space = self._adaptive.of(several[0][0].space)
        used = [entry for label, entry in several if not label.ahead and entry.life == "cached" and entry.kind in ("blob", "value")]
        if space is None or not used:
            return
        if space.ghosts.bimodal:
            row = spaces.by_id(txn, several[0][0].space)
            charge = row.charge if row is not None else 0
            tried = [Trial(entry.slot, entry.id, now, entry.charge) for entry in used if space.wants_trial(charge)]
            txn.after_commit.extend(partial(space.put_on_trial, trial) for trial in tried)
        txn.after_release.extend(partial(space.use, entry.key, entry.charge, now, is_hit=False) for entry in used)

    def insert_many(
        self, txn: Txn, several: Sequence[New], slots: Sequence[int], replaced: Sequence[Entry] | None = None
    ) -> list[Entry]:  # fmt: skip
        """`insert` for several entries of one space. ``replaced``: the previous versions, if the caller has just asked for them."""
        space, room = several[0].label.space, self.budget.room
        now, created, boot = self._index.head.clock.now(), time.time(), self._root.epoch
        if replaced is None:
            replaced = entries.find_many(txn, space, [new.label.key for new in several])
        self._eviction.supersede(txn, replaced)
        pinned = {old.key for old in replaced if old.life == "pinned"}
        rows: list[tuple[Entry, bytes | None]] = []
        for new, slot in zip(several, slots, strict=True):
            inline, label = new.data is not None, new.label
            charge = room.charge(new.size, inline=True) if inline else room.charge_published(new.size)
            life = "pinned" if label.key in pinned else label.life
            entry = Entry(
                new.id, label.space_name, label.key, "value" if inline else "blob", new.size, charge, slot, new.checksum, new.validator,
                created, boot, life, label.suffix, label.meta,
            )  # fmt: skip
            rows.append((entry, new.data))
        entries.insert_many(txn, space, rows)
        published = [entry for entry, _ in rows]
        for new, entry in zip(several, published, strict=True):
            validated = now if new.label.validated is None else new.label.validated
            txn.after_commit.append(partial(self._index.store, space, entry, validated if new.label.ahead else now, validated))
        self._try(txn, [(new.label, entry) for new, entry in zip(several, published, strict=True)], now)
        txn.after_release.append(lambda: self._index.note_new(space, rows))
        return published
