"""Rows of new entries and their slots, and the intent that lets small files be written and published in one step.

Before small files are written, a word in the table of slots names them:

intent   the word is set                                  a crash: there is nothing to remove
files    written under their final names                  a crash: the next writer removes them before it grants room to anybody
commit   the entries are visible                          a crash: the next writer finds their rows, and only clears the word
clear

All of this happens under the writer lock, so one word is enough, and nobody can promise the files' bytes to another process before
they are counted or gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from forebay._engine.catalog import Catalog, Txn, entries, spaces
from forebay._engine.files import blobs
from forebay._engine.files.root import Root
from forebay._engine.index.adaptive import AdaptiveSpaces, Trial
from forebay._engine.index.keys import KeyIndex
from forebay._engine.index.slots import Slots
from forebay._engine.space.budget import Budget
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

    def __init__(self, root: Root, slots: Slots, keys: KeyIndex, adaptive: AdaptiveSpaces, budget: Budget) -> None:
        self._root, self._slots, self._keys, self._adaptive, self.budget = root, slots, keys, adaptive, budget

    def insert(
        self, txn: Txn, label: Label, id: int, kind: str, size: int, checksum: bytes, validator: str | None, data: bytes | None = None,
        request: SpaceRequest | None = None, slot: int | None = None,
    ) -> Entry:  # fmt: skip
        """Insert the row and its slot, and supersede the previous version. Before the commit other processes see only empty slots.

        ``request``: made in the same transaction, so it says whether there is a previous version. ``slot``: a free one, if it is known."""
        now, created = self._slots.clock.now(), time.time()
        old = entries.find(txn, label.space, label.key) if request is None or request.replaces else None
        if old is not None:
            self._supersede(txn, old)
        slot = entries.free_slot(txn) if slot is None else slot
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
        self, txn: Txn, label: Label, id: int, data: bytes, checksum: bytes, validator: str | None, slot: int | None
    ) -> Entry | None:  # fmt: skip
        """`insert` of a small value, unless its key has an entry already: then None."""
        now, size = self._slots.clock.now(), len(data)
        entry = Entry(
            id, label.space_name, label.key, "value", size, self.budget.room.charge(size, inline=True),
            entries.free_slot(txn) if slot is None else slot, checksum, validator, time.time(), self._root.epoch, label.life, label.suffix,
            label.meta,
        )  # fmt: skip
        if not entries.add(txn, label.space, entry, data):
            return None
        self._settle(txn, label, entry, data, now)
        return entry

    def _settle(self, txn: Txn, label: Label, entry: Entry, data: bytes | None, now: int) -> None:
        validated = now if label.validated is None else label.validated
        self._slots.settle(entry.slot, entry.id, validated if label.ahead else now, validated, label.space)
        self._try(txn, [(label, entry)], now)
        txn.after_release.append(lambda: self._keys.note_new(label.space, [(entry, data)]))

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

    def _supersede(self, txn: Txn, old: Entry) -> None:
        entries.supersede(txn, old)
        self._slots.clear(old.slot, old.id)
        txn.leftovers |= old.kind != "value"

    def insert_many(self, txn: Txn, several: Sequence[New], replaced: Sequence[Entry] | None = None) -> list[Entry]:
        """`insert` for several entries of one space. ``replaced``: the previous versions, if the caller has just asked for them."""
        space, room = several[0].label.space, self.budget.room
        now, created, boot = self._slots.clock.now(), time.time(), self._root.epoch
        if replaced is None:
            replaced = entries.find_many(txn, space, [new.label.key for new in several])
        for old in replaced:
            self._supersede(txn, old)
        pinned = {old.key for old in replaced if old.life == "pinned"}
        rows: list[tuple[Entry, bytes | None]] = []
        for new, slot in zip(several, entries.free_slots(txn, len(several)), strict=True):
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
            self._slots.settle(entry.slot, entry.id, validated if new.label.ahead else now, validated, space)
        self._try(txn, [(new.label, entry) for new, entry in zip(several, published, strict=True)], now)
        txn.after_release.append(lambda: self._keys.note_new(space, rows))
        return published


class Intent:
    """The intent of one root. Its methods are called under the writer lock."""

    def __init__(self, root: Root, catalog: Catalog, slots: Slots) -> None:
        self._root, self._catalog, self._slots = root, catalog, slots

    def begin(self, txn: Txn, ids: range) -> None:
        """Allow the files of these ids to be written; ``txn`` is to commit their rows."""
        self._slots.set_intent(ids)
        txn.after_commit.append(self._clear)

    def _clear(self) -> None:
        self._slots.set_intent(range(0))

    def recover(self) -> None:
        """Remove the files of a writer that died before its commit."""
        ids = self._slots.intent()
        if ids:
            for id in ids:
                if not entries.is_known(self._catalog, id):
                    blobs.remove_whatever_suffix(self._root, id)
            self._clear()
