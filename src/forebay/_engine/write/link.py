"""Other ways to an entry than to write bytes: trees and second names of what is there, and names for what had none."""

from __future__ import annotations

from collections.abc import Sequence

from forebay import errors
from forebay._engine.catalog import Catalog, Txn, entries, reservations
from forebay._engine.files import blobs, trees
from forebay._engine.files.faults import faults
from forebay._engine.files.root import Root
from forebay._engine.index.slots import Slots
from forebay._engine.locks.fill import hash_of
from forebay._engine.locks.leases import Lease, Leases
from forebay._engine.space.budget import Budget
from forebay._engine.write.insert import Label
from forebay._engine.write.publish import Publisher
from forebay._kernel import host
from forebay._model import Entry


class Linker:
    """Links entries of one root. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog, slots: Slots, budget: Budget, publisher: Publisher) -> None:
        self._root, self._catalog, self._slots, self._budget, self._publisher = root, catalog, slots, budget, publisher

    def publish_tree(self, label: Label, members: Sequence[tuple[str, Entry]], leases: Leases, validator: str | None = None) -> Lease:
        """A tree of entries: its directories cost room, its files are theirs. Caller: holds leases on the members, and is alone at the
        tree's key."""
        keyhash = hash_of(label.space, label.key)
        with faults(label.key):
            names = [name for name, _ in members]
            size = trees.footprint(names, host.disk(self._root.path).block)
            reserved = self._budget.reserve(self._publisher.want(self._catalog, label, size))
            held = False
            try:
                files = [(name, self._root.blob_name(entry.id, entry.suffix)) for name, entry in members]
                trees.build(self._root, reserved.id, files, keyhash=keyhash)
                held = leases.hold(reserved.id)  # before anybody can see it, and evict it
                with self._catalog.write() as txn:
                    entry = self._publisher.insert(txn, label, reserved.id, "tree", size, b"", validator)
                    entries.link(txn, entry.id, [(name, member.id) for name, member in members])
                    reservations.delete(txn, reserved.id)
                    txn.leftovers = entries.any_leftovers(txn)
                return leases.adopt(entry)
            except BaseException:
                if held:
                    leases.let_go_soon(reserved.id)
                trees.remove(self._root, reserved.id, keyhash=keyhash)
                self._budget.cancel(reserved.id)
                raise

    def name(self, id: int, label: Label, *, overwrite: bool) -> bool:
        """Give an entry that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``.

        Raises `CacheFault` where the entry is gone."""
        with faults(label.key), self._catalog.write() as txn:
            entry = entries.by_id(txn, id)
            if entry is None:
                raise errors.CacheFault(f"what was to be called {label.key!r} is gone: the catalog was made anew meanwhile", key=label.key)
            if entries.find(txn, label.space, label.key) is not None and not overwrite:
                return False
            self._move(txn, entry, label)
            entries.set_life(txn, label.space, label.key, label.life)
            return True

    def _move(self, txn: Txn, entry: Entry, label: Label) -> None:
        """It gets another slot: memos of other processes know the old name by the old one."""
        old = entries.find(txn, label.space, label.key)
        if old is not None and old.id != entry.id:
            entries.supersede(txn, old)
            self._slots.clear(old.slot, old.id)
        slot = entries.free_slot(txn)
        self._slots.ensure(slot)
        self._slots.set_space(slot, label.space)
        self._slots.touch(slot, self._slots.used(entry.slot))
        self._slots.set_validated(slot, self._slots.validated(entry.slot))
        self._slots.clear(entry.slot, entry.id)
        entries.rename(txn, entry, label.space, label.key, slot)
        self._slots.set_id(slot, entry.id)
        txn.leftovers = True

    def link(self, label: Label, leased: Lease, leases: Leases, validator: str | None = None) -> Lease:
        """The bytes of a leased file under another name too: a hard link, charged to both spaces. Raises `CacheFault` for what is no file,
        or not of this root: there its number is another's."""
        source = leased.entry
        if source.kind != "blob" or leased.path != str(self._root.blob(source.id, source.suffix)):
            raise errors.CacheFault(f"{source.key!r} cannot be linked: it is no file of {self._root.path}", key=source.key)
        with faults(label.key, source.size):
            reserved = self._budget.reserve(self._publisher.want(self._catalog, label, source.size))
            held = False
            try:
                blobs.link_blob(self._root, self._root.blob(source.id, source.suffix), reserved.id, label.suffix)
                held = leases.hold(reserved.id)  # as for a tree
                with self._catalog.write() as txn:
                    entry = self._publisher.insert(txn, label, reserved.id, "blob", source.size, source.checksum, validator)
                    reservations.delete(txn, reserved.id)
                    txn.leftovers = entries.any_leftovers(txn)
                return leases.adopt(entry)
            except BaseException:
                if held:
                    leases.let_go_soon(reserved.id)
                blobs.remove_blob(self._root, reserved.id, label.suffix)
                self._budget.cancel(reserved.id)
                raise
