"""How an entry leaves: exclusive lock, doom, unlink, delete. And the sweep that ends what others left half done.

    lock        nobody has a lease, and nobody gets one
    doom        the slot is emptied, the row marked, commit      a crash before: the row is live, its slot heals at the next look
    unlink      the files go                                     a crash before or after: the next writer goes on from here
    delete      the row goes, commit: only now slot and bytes are free
    unlock

The slot is emptied under the writer lock and before the commit: a process that empties it later than its commit, and pauses in
between, would empty the slot of the next entry that lives there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, islice

from forebay._engine.catalog import Catalog, Txn, entries
from forebay._engine.files import blobs, pack_files, trees
from forebay._engine.files.root import Root
from forebay._engine.index.slots import Slots
from forebay._engine.locks.leases import Leases
from forebay._engine.space.ranking import EvictionCandidate
from forebay._kernel import waits
from forebay._logs import logger
from forebay._model import Entry

log = logger("forebay.eviction")

SPACE_WORD = 1
HELD_A_TURN, TURNS = 8, 16
_LISTED_AT_ONCE = 2048


@dataclass(frozen=True, slots=True)
class EvictionVictim:
    """An entry that is being removed. Who has this object holds its exclusive lock."""

    id: int
    kind: str
    suffix: str


class Eviction:
    """Removes entries of one root. Its methods are the steps; `remove` and `sweep` are the whole way."""

    def __init__(self, root: Root, catalog: Catalog, slots: Slots, leases: Leases, words: waits.Words) -> None:
        self._root, self._catalog, self._slots, self._leases, self._words = root, catalog, slots, leases, words
        self._held_after = 0

    def lock(self, id: int) -> bool:
        """The exclusive right to remove an entry. False if it is leased."""
        return self._leases.try_evict(id)

    def doom(self, txn: Txn, id: int, slot: int) -> bool:
        """Lock and doom. False if it is leased, pinned, linked or gone: then nothing is held."""
        if not self._leases.try_evict(id):
            return False
        if not entries.doom(txn, id):
            self._leases.evicted(id)
            return False
        self._slots.clear(slot, id)
        return True

    def doom_many(self, txn: Txn, locked: Sequence[EvictionCandidate]) -> list[EvictionCandidate]:
        """`doom`, for several whose exclusive lock the caller has taken: those that are doomed. The others' locks are let go."""
        try:
            ids = entries.doom_many(txn, [cold.id for cold in locked])
        except BaseException:
            for cold in locked:
                self._leases.evicted(cold.id)
            raise
        gone = [cold for cold in locked if cold.id in ids]
        for cold in locked:
            if cold.id in ids:
                self._slots.clear(cold.slot, cold.id)
            else:
                self._leases.evicted(cold.id)
        return gone

    def unlink(self, doomed: Iterable[EvictionVictim]) -> None:
        """The files go. Under no lock but the entries' own."""
        for one in doomed:
            if one.kind == "blob":
                if not blobs.remove_blob(self._root, one.id, one.suffix):
                    blobs.remove_whatever_suffix(self._root, one.id)  # of a row that was set aside, whose suffix was not believed
            elif one.kind == "tree":
                trees.remove(self._root, one.id)
            elif one.kind == "pack":
                pack_files.remove(self._root, one.id)

    def delete(self, txn: Txn, doomed: Iterable[EvictionVictim]) -> None:
        entries.delete_many(txn, [(one.id, one.kind) for one in doomed])

    def release(self, doomed: Sequence[EvictionVictim]) -> None:
        """After the commit of `delete`, or of a `doom` that came to nothing."""
        for one in doomed:
            self._leases.evicted(one.id)
        if doomed:
            self.tell()

    def tell(self) -> None:
        """Entries are gone: memos let go of them, and who waits for room looks again."""
        self._slots.bump_evictions()
        self._words.bump(SPACE_WORD)

    def drop_value(self, txn: Txn, id: int, slot: int) -> bool:
        """`doom` and `delete` in one for a small value: no file has to go in between. False if it is leased or gone."""
        with self._leases.evicting(id) as free:
            if not free or not entries.drop_value(txn, id):
                return False
            self._slots.clear(slot, id)  # P1 locks, and looks at the slot / P2 drops it: P1 has its lease before, or finds it empty
            return True

    def remove(self, wanted: Sequence[tuple[int, int, EvictionVictim]]) -> list[EvictionVictim]:
        """Remove these entries, given as (id, slot, what it has on the disk); gives those that went."""
        doomed: list[EvictionVictim] = []

        def doom(txn: Txn) -> None:
            self.release(doomed)  # of a first attempt that was rolled back
            doomed[:] = []
            for id, slot, what in wanted:
                if self.doom(txn, id, slot):
                    doomed.append(what)

        try:
            self._catalog.insist(doom)
            self._finish(doomed)
        finally:
            self.release(doomed)
        return doomed

    def sweep(self) -> int:
        """Finish what evictors that died, replacers, and the last holders of held entries left; gives how many entries went."""
        gone = 0
        for _ in range(TURNS):
            went = self._sweep()
            gone += len(went)
            if len(went) < HELD_A_TURN and all(one.kind != "tree" for one in went):  # a tree that goes frees files that were replaced
                break
        return gone

    def _sweep(self) -> list[EvictionVictim]:
        self._leases.drain()
        rows = [(id, slot, EvictionVictim(id, kind, suffix)) for id, slot, kind, suffix, _ in entries.leaving(self._catalog)]
        rows += [(entry.id, entry.slot, EvictionVictim(entry.id, entry.kind, entry.suffix)) for entry in self._some_held()]
        mine = [(id, slot, what) for id, slot, what in rows if self._leases.try_evict(id)]
        taken = [what for _, _, what in mine]
        going: list[EvictionVictim] = []
        try:
            if mine:
                with self._catalog.write() as txn:
                    going = [what for id, slot, what in mine if self._still_leaving(txn, id, slot)]
                self._finish(going)
        finally:
            self.release(taken)
        return going

    def _still_leaving(self, txn: Txn, id: int, slot: int) -> bool:
        # Another sweeper may have deleted the row, and its slot be a successor's, between our look and our lock.
        if not (entries.doom(txn, id) or entries.is_doomed(txn, id)):
            return False
        self._slots.clear(slot, id)
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
        """Remove blobs and trees without a row: after a rebuilt catalog, or a crash of the machine. Never from under a lease.

        One listing of names. A file that is being published has a reservation; it is no orphan."""
        removed = 0
        found = chain(
            ((id, EvictionVictim(id, "blob", path.name.removeprefix(f"{id:016x}"))) for id, path in blobs.list_blobs(self._root)),
            ((id, EvictionVictim(id, "tree", "")) for id in trees.list_trees(self._root)),
            ((id, EvictionVictim(id, "pack", "")) for id in pack_files.list_packs(self._root)),
        )
        while some := list(islice(found, _LISTED_AT_ONCE)):
            unnamed = entries.unnamed(self._catalog, [(id, what.kind, what.suffix) for id, what in some])
            removed += sum(self._remove_orphan(id, what) for id, what in some if (id, what.kind, what.suffix) in unnamed)
        return removed

    def _remove_orphan(self, id: int, what: EvictionVictim) -> bool:
        if entries.is_known(self._catalog, id):
            return self._remove_beside(id, what)
        with self._leases.evicting(id) as free, self._catalog.writer():
            # Listed before its row was committed, and published since: look again, now that nobody else may touch it. A small file lies
            # under its name before its row is committed, but for the writer's lock.
            if not free or entries.is_known(self._catalog, id):
                return False
            self.unlink([what])
            return True

    def _remove_beside(self, id: int, what: EvictionVictim) -> bool:
        """What has the id of an entry and is not its file: nobody has a lease on that."""
        with self._catalog.writer():
            if not entries.unnamed(self._catalog, [(id, what.kind, what.suffix)]):
                return False
            if what.kind == "blob":
                return blobs.remove_blob(self._root, id, what.suffix)  # and no other suffix, as `unlink` would
            self.unlink([what])
            return True
