"""Makes rows, records and files agree: after a death or an exception in the middle of a transaction, and after a crash of the machine."""

from __future__ import annotations

import contextlib

from forebay._engine.catalog import entries, reservations
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import Txn
from forebay._engine.files import blobs, pack_files
from forebay._engine.files.layout import RootReplaced, parse_tmp_name
from forebay._engine.files.root import Root
from forebay._engine.index.records import RECORDS, EntryIndex
from forebay._logs import logger
from forebay._model import Entry

log = logger("forebay.catalog")

AT_ONCE = 512
"""Records that are compared with their rows in one transaction."""


def recover(root: Root, catalog: Catalog, index: EntryIndex) -> None:
    """End what the intent names: a live row has its record, and what has no row has neither a record nor a file. Each step may be
    repeated. Caller: holds the writer lock, and is in no transaction."""
    published: set[int] = set()
    for id, slot in index.head.intent():
        found = entries.with_space(catalog, id)
        if found is not None and found[1].slot == slot:
            index.restore(*found)
        else:
            index.empty(slot, id)
        if found is not None:
            published.add(id)
        elif (reserved := reservations.by_id(catalog, id)) is not None:  # a whole download survives a commit that failed
            with contextlib.suppress(FileNotFoundError):
                blobs.unpublish(root, root.tmp(reserved.keyhash, id), id, reserved.suffix)
        elif not entries.is_known(catalog, id):
            try:
                blobs.remove_whatever_suffix(root, id)
                blobs.remove(root, id)
                pack_files.remove(root, id)
            except RootReplaced:
                raise
            except OSError as error:  # it is a stray, which a later epoch and a repair try to remove again
                log.warning("%s: a file without an entry cannot be removed: %s", root.path, str(error))
    for name in root.files.names_in(root.tmp_dir) if published else ():
        parsed = parse_tmp_name(name)
        if parsed is not None and parsed.id in published:  # the map of a whole download
            root.files.unlink(root.tmp_dir / name)
    index.head.finish()


def heal(txn: Txn, index: EntryIndex, space: int, entry: Entry) -> Entry:
    """Give a live entry the record that it lacks, in another slot where another entry has its own; returns it with its slot."""
    other = index.id_of(entry.slot)
    if other == entry.id:
        return entry
    holder = entries.by_id(txn, other) if other else None
    if entry.slot >= index.slots or (holder is not None and holder.slot == entry.slot):
        (slot,) = index.take([entry.id])
        entries.set_slot(txn, entry.id, slot)
        entry = entry._replace(slot=slot)
    else:
        index.head.intend([(entry.id, entry.slot)])
    index.restore(space, entry)  # at once: the row is there, and the next entry that is healed sees that the slot is taken
    return entry


def reconcile(catalog: Catalog, index: EntryIndex) -> int:
    """Give each live entry that has no record one, and empty the records of entries that are gone; returns how many entries lacked theirs.
    In memory is a byte for each slot. Caller: holds no lock."""
    seen, lacking = bytearray(index.slots), 0
    for low, high in entries.ranges(catalog, "entries"):
        missing = []
        for slot, id in entries.slots_between(catalog, low, high):
            if slot < len(seen) and index.id_of(slot) == id:
                seen[slot] = 1
            else:
                missing.append(id)
        for first in range(0, len(missing), AT_ONCE):
            with catalog.write() as txn:
                for id in missing[first : first + AT_ONCE]:
                    found = entries.with_space(txn, id)
                    if found is not None:
                        lacking += index.id_of(found[1].slot) != id
                        heal(txn, index, *found)
    for number in range(len(seen) // RECORDS):
        first_slot = number * RECORDS
        stale = [(slot, id) for slot, id in enumerate(index.ids(number), first_slot) if id and not seen[slot]]
        for first in range(0, len(stale), AT_ONCE):
            with catalog.write() as txn:  # what was published meanwhile has its row by now
                for slot, id in stale[first : first + AT_ONCE]:
                    entry = entries.by_id(txn, id)
                    if entry is None or entry.slot != slot:
                        index.clear(slot, id)
    return lacking
