"""Trees and new names of entries: published without writing bytes."""

from __future__ import annotations

from collections.abc import Sequence

from forebay import errors
from forebay._engine.catalog import Catalog, Txn, entries
from forebay._engine.files import trees
from forebay._engine.files.faults import faults
from forebay._engine.files.root import Root
from forebay._engine.index.records import EntryIndex
from forebay._engine.locks.fill import hash_of
from forebay._engine.locks.leases import Lease, Leases
from forebay._engine.space.eviction import Eviction
from forebay._engine.write.insert import Label
from forebay._engine.write.publish import Publisher
from forebay._kernel import host
from forebay._model import Entry


class Linker:
    """Publishes trees and new names of entries of one root, without writing bytes. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog, index: EntryIndex, eviction: Eviction, publisher: Publisher) -> None:
        self._root, self._catalog, self._index, self._eviction, self._publisher = root, catalog, index, eviction, publisher

    def publish_tree(self, label: Label, members: Sequence[tuple[str, Entry]], leases: Leases, validator: str | None = None) -> Lease:
        """Publish a tree of entries. It is charged for its directories; its files are charged to the members. Caller: holds leases on the
        members, and no other caller writes the tree's key."""
        size = trees.footprint([name for name, _ in members], host.disk(self._root.path).block)
        files = [(name, self._root.blob_name(entry.id, entry.suffix)) for name, entry in members]
        keyhash = hash_of(label.space, label.key)
        return self._publisher.build(
            label, "tree", size, leases, lambda id: trees.build(self._root, id, files, keyhash=keyhash),
            lambda id: trees.remove(self._root, id, keyhash=keyhash), validator=validator, members=[(name, e.id) for name, e in members],
        )  # fmt: skip

    def name(self, id: int, label: Label, *, overwrite: bool) -> bool:
        """Give an entry that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``.

        Raises `CacheFault` where the entry is gone."""
        with faults(label.key), self._catalog.write() as txn:
            entry = entries.by_id(txn, id)
            if entry is None:
                raise errors.CacheFault(f"the object to be named {label.key!r} is gone: the catalog was recreated", key=label.key)
            if entries.find(txn, label.space, label.key) is not None and not overwrite:
                return False
            self._move(txn, entry, label)
            entries.set_life(txn, label.space, label.key, label.life)
            return True

    def _move(self, txn: Txn, entry: Entry, label: Label) -> None:
        """Rename an entry. It gets another slot, since the memos of other processes know the old name by the old slot."""
        old = entries.find(txn, label.space, label.key)
        if old is not None and old.id != entry.id:
            self._eviction.supersede(txn, [old])
        (slot,) = self._index.take([entry.id])
        used, validated = self._index.used(entry.slot), self._index.validated(entry.slot)
        self._index.clear(entry.slot, entry.id)
        entries.rename(txn, entry, label.space, label.key, slot)
        moved = entry._replace(space=label.space_name, key=label.key, slot=slot)
        txn.after_commit.append(lambda: self._index.store(label.space, moved, used, validated, is_sound=moved.boot == self._root.epoch))
        txn.leftovers = True
