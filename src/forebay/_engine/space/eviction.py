"""How an entry is evicted: exclusive lock, doom, unlink, delete. And the sweep that finishes what other processes left half done.

    lock        no process has a lease, and none gets one
    doom        the slot is emptied, the row marked, commit      a crash before: the row is live, the next writer restores its record
    unlink      the files go                                     a crash before or after: the next writer continues from here
    delete      the row goes, commit: only now slot and bytes are free
    unlock

The slot is emptied under the writer lock and before the commit: a process that emptied it after its commit, and paused in between,
would empty the slot of the next entry that uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from forebay._engine.catalog import Catalog, Txn, entries
from forebay._engine.files import blobs, pack_files, trees
from forebay._engine.files.root import Root
from forebay._engine.index.records import EntryIndex
from forebay._engine.locks.leases import Leases
from forebay._engine.space.ranking import EvictionCandidate
from forebay._kernel import waits
from forebay._logs import logger
from forebay._model import Entry, Victim

log = logger("forebay.eviction")

SPACE_WORD = 1
HELD_A_TURN, TURNS = 8, 16
_LISTED_AT_ONCE = 2048
REMOVED_AT_ONCE = 128


@dataclass(frozen=True, slots=True)
class EvictionVictim:
    """An entry that is being removed. The thread that has this object holds the entry's exclusive lock."""

    id: int
    kind: str
    suffix: str


class Eviction:
    """Removes entries of one root: `remove` and `sweep` take all steps, the other methods one each. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog, index: EntryIndex, leases: Leases, words: waits.Words) -> None:
        self._root, self._catalog, self._index, self._leases, self._words = root, catalog, index, leases, words
        self._held_after = 0

    def lock(self, id: int) -> bool:
        """Take the exclusive right to remove an entry. False if it is leased."""
        return self._leases.try_evict(id)

    def doom_many(self, txn: Txn, locked: Sequence[Entry | EvictionCandidate], victims: list[EvictionVictim]) -> list[int]:
        """Doom several entries that the caller has locked, and entered into ``victims``: those that are pinned, linked or gone leave the
        list, and their locks are released. Returns the ids of the others."""
        ids = entries.doom(txn, [one.id for one in locked])
        for one in locked:
            if one.id in ids:
                self._index.clear(one.slot, one.id)
            else:
                self._leases.evicted(one.id)
        spared = {one.id for one in locked} - ids
        victims[:] = [victim for victim in victims if victim.id not in spared]
        return list(ids)

    def unlink(self, doomed: Iterable[EvictionVictim]) -> None:
        """Remove the files, under no lock but those of the entries."""
        for one in doomed:
            if one.kind == "blob":
                if not blobs.remove_blob(self._root, one.id, one.suffix):
                    blobs.remove_whatever_suffix(self._root, one.id)  # of a row that was set aside, whose suffix cannot be trusted
            elif one.kind == "tree":
                trees.remove(self._root, one.id)
            elif one.kind == "pack":
                pack_files.remove(self._root, one.id)

    def delete(self, txn: Txn, doomed: Iterable[EvictionVictim]) -> None:
        entries.delete_many(txn, [(one.id, one.kind) for one in doomed])

    def release(self, doomed: Sequence[EvictionVictim]) -> None:
        """Release the locks, after the commit of `delete` or a `doom` that was rolled back."""
        for one in doomed:
            self._leases.evicted(one.id)
        if doomed:
            self.notify()

    def notify(self) -> None:
        """Let all processes know that entries are gone: memos forget them, and waits for space are tried again."""
        self._index.head.bump_evictions()
        self._words.bump(SPACE_WORD)

    def drop_value(self, txn: Txn, id: int, slot: int) -> bool:
        """`doom` and `delete` in one step for a small value, which has no file. False if it is leased or gone."""
        with self._leases.evicting(id) as free:
            if not free or not entries.drop_value(txn, id):
                return False
            self._index.clear(slot, id)  # P1 locks and reads the slot / P2 drops it: P1 has its lease before, or finds the slot empty
            return True

    def remove(self, several: Sequence[Entry]) -> list[EvictionVictim]:
        """Remove these entries; returns those that were removed."""
        doomed: list[EvictionVictim] = []

        def doom(txn: Txn) -> None:
            self.release(doomed)  # after a first attempt that was rolled back
            doomed[:] = []
            for entry in several:
                if self._leases.try_evict(entry.id):
                    doomed.append(EvictionVictim(entry.id, entry.kind, entry.suffix))
            locked = {victim.id for victim in doomed}
            self.doom_many(txn, [entry for entry in several if entry.id in locked], doomed)

        try:
            self._catalog.insist(doom)
            self._finish(doomed)
        finally:
            self.release(doomed)
        return doomed

    def sweep(self) -> int:
        """Finish what processes left that died while they evicted, replaced or held entries; returns how many entries were removed."""
        removed = 0
        for _ in range(TURNS):
            victims = self._sweep()
            removed += len(victims)
            if len(victims) < HELD_A_TURN and all(victim.kind != "tree" for victim in victims):  # a removed tree frees replaced files
                break
        return removed

    def _sweep(self) -> list[EvictionVictim]:
        self._leases.drain()
        rows = [(id, slot, EvictionVictim(id, kind, suffix)) for id, slot, kind, suffix, _ in entries.leaving(self._catalog)]
        rows += [(entry.id, entry.slot, EvictionVictim(entry.id, entry.kind, entry.suffix)) for entry in self._some_held()]
        mine: list[tuple[int, int, EvictionVictim]] = []
        going: list[EvictionVictim] = []
        try:
            mine.extend(row for row in rows if self._leases.try_evict(row[0]))
            if mine:
                with self._catalog.write() as txn:
                    going = [what for id, slot, what in mine if self._still_leaving(txn, id, slot)]
                self._finish(going)
        finally:
            self.release([what for _, _, what in mine])
        return going

    def _still_leaving(self, txn: Txn, id: int, slot: int) -> bool:
        # Another process may have deleted the row between our look and our lock, and a new entry may have its slot.
        if not (entries.doom(txn, [id]) or entries.is_doomed(txn, id)):
            return False
        self._index.clear(slot, id)
        return True

    def _some_held(self) -> list[Entry]:
        rows = entries.held(self._catalog, self._held_after, HELD_A_TURN)
        self._held_after = rows[-1].id if len(rows) == HELD_A_TURN else 0
        return rows

    def _finish(self, doomed: Sequence[EvictionVictim]) -> None:
        if not doomed:
            return
        self.unlink(doomed)
        self._catalog.insist(lambda txn: self.delete(txn, doomed))

    def remove_orphans(self) -> int:
        """Remove blobs and trees without a row, which a rebuilt catalog or a crash of the machine leaves; returns how many.

        Leased files stay. A file that is being published has a reservation, so it is no orphan."""
        removed = 0
        files = chain(
            ((id, EvictionVictim(id, "blob", path.name.removeprefix(f"{id:016x}"))) for id, path in blobs.list_blobs(self._root)),
            ((id, EvictionVictim(id, "tree", "")) for id in trees.list_trees(self._root)),
            ((id, EvictionVictim(id, "pack", "")) for id in pack_files.list_packs(self._root)),
        )
        while some := list(islice(files, _LISTED_AT_ONCE)):
            unnamed = entries.unnamed(self._catalog, [(id, what.kind, what.suffix) for id, what in some])
            removed += sum(self._remove_orphan(id, what) for id, what in some if (id, what.kind, what.suffix) in unnamed)
        return removed

    def _remove_orphan(self, id: int, what: EvictionVictim) -> bool:
        if entries.is_known(self._catalog, id):
            return self._remove_beside(id, what)
        with self._leases.evicting(id) as free, self._catalog.writer():
            # It may have been published since it was listed: look again, now that nobody else may touch it. A small file has its name
            # before its row is committed, but only while the writer's lock is held.
            if not free or entries.is_known(self._catalog, id):
                return False
            self.unlink([what])
            return True

    def _remove_beside(self, id: int, what: EvictionVictim) -> bool:
        """Remove a file that has the id of an entry and is not its file; no process can have a lease on it."""
        with self._catalog.writer():
            if not entries.unnamed(self._catalog, [(id, what.kind, what.suffix)]):
                return False
            if what.kind == "blob":
                return blobs.remove_blob(self._root, id, what.suffix)  # and no other suffix, as `unlink` would
            self.unlink([what])
            return True


def batches(victims: Iterable[Victim]) -> Iterator[list[Victim]]:
    """The victims without repetitions, in batches for one transaction each, small enough for the log."""
    batch: dict[int, Victim] = {}
    for victim in victims:
        batch[victim.id] = victim
        if len(batch) == REMOVED_AT_ONCE:
            yield list(batch.values())
            batch.clear()
    if batch:
        yield list(batch.values())
