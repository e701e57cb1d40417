"""How an entry leaves a root: in one transaction, whose files are unlinked before the writer lock is released.

lock        no process has a lease, and none gets one
delete      the row goes; the intent names the entry, and its record is emptied     a crash: the next writer restores the record
commit                                                                              a crash: the next writer removes the files
unlink      the files go, still under the writer lock
unlock

So nobody can be granted bytes that still lie there, since granting needs the writer lock, and nothing is ever half gone. What a process
holds or a tree links is *superseded* instead: it is served no more, and a sweep removes it when the last lease is gone.

**The tails of segments.** The empty ends of pack segments.

An open segment counts with all that its writer may fill. The rest behind its last record is given back when the writer leaves it, or once
the writer is dead, by the next process that needs room. A writer holds its segment's byte of the pack's index, and so does whoever
measures a segment: only this lock tells whether something appends to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from forebay import errors
from forebay._engine.catalog import entries, segments
from forebay._engine.catalog.checked import is_number
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.entries import Ended, FileName, Spared, Superseded
from forebay._engine.catalog.schema import SUPERSEDED
from forebay._engine.catalog.transactions import AT_ONCE, Rows, Txn
from forebay._engine.files import blobs, pack_files
from forebay._engine.files.layout import PAGE, DiskFull, RootReplaced, faults, is_suffix
from forebay._engine.files.root import Root
from forebay._engine.index.records import EntryIndex
from forebay._engine.leases import Leases
from forebay._engine.space.ranking import EvictionCandidate
from forebay._kernel import waits
from forebay._logs import logger
from forebay._model import URLS, Entry, Victim
from forebay.errors import Damaged

log = logger("forebay.eviction")

SPACE_WORD = 1
HELD_A_TURN, TURNS = 8, 16
REMOVED_AT_ONCE = 128


class Eviction:
    """Removes entries of one root. Callable from any thread."""

    def __init__(self, root: Root, catalog: Catalog, index: EntryIndex, leases: Leases, words: waits.Words) -> None:
        self._root, self._catalog, self._index, self._leases, self._words = root, catalog, index, leases, words
        self._held_after = 0
        self.stuck = 0
        """How many entries this process could not unlink so far. Changed under the writer lock."""

    @property
    def latest(self) -> int:
        """Another number after each eviction in the root, by any process."""
        words, index = self._index.head.evictions()
        return words[index]

    def end(
        self, txn: Txn, several: Sequence[Entry | EvictionCandidate | Superseded], *, spares: Spared = "pinned"
    ) -> list[Ended]:  # fmt: skip
        """Remove entries but those that are leased, spared or linked from a tree: their rows in this transaction, their files right after
        its commit. Returns those that are going."""
        locked: dict[int, int] = {}
        txn.at_end.append(lambda: self._unlock(locked))
        for entry in several:
            if entry.id not in locked and self._leases.try_evict(entry.id):
                locked[entry.id] = entry.slot
        ended = entries.end(txn, list(locked), spares=spares) if locked else []
        if ended:
            # The slot of the row: P1 reads the entry / P2 gives it a name, and another slot / P1 ends it.
            slots = {one.id: one.slot if is_number(one.slot) else locked[one.id] for one in ended}
            self._index.head.intend(list(slots.items()))
            for id, slot in slots.items():
                # P1 locks and reads the record / P2 empties it: P1 has its lease before, or finds the record empty.
                self._index.empty(slot, id)
            txn.after_commit.append(partial(self._leave, ended))
        return ended

    def _unlock(self, locked: dict[int, int]) -> None:
        while locked:
            self._leases.evicted(locked.popitem()[0])

    def _leave(self, ended: Sequence[Ended]) -> None:
        """Remove the files of entries whose rows are gone. What cannot be removed is counted, and tried again by a sweep."""
        stuck = [one for one in ended if not self._unlink((one.id, one.kind, one.suffix))]
        if stuck:
            self.stuck += len(stuck)
            self._catalog.again(lambda txn: entries.keep(txn, stuck))
        self._index.head.bump_evictions()  # memos forget them, and waits for space are tried again
        self._words.bump(SPACE_WORD)

    def _unlink(self, file: FileName) -> bool:
        """Remove the files of an entry; False if the system refuses that."""
        id, kind, suffix = file
        try:
            if kind == "blob":
                if not (is_suffix(suffix) and blobs.remove_blob(self._root, id, suffix)):
                    blobs.remove_whatever_suffix(self._root, id)  # of a row that was set aside, whose suffix cannot be trusted
            elif kind == "tree":
                blobs.remove(self._root, id)
            elif kind == "pack":
                pack_files.remove(self._root, id)
        except RootReplaced:
            raise
        except OSError as error:
            log.warning("%s: a file that was evicted cannot be removed: %s", self._root.path, str(error))
            return False
        return True

    def supersede(self, txn: Txn, several: Sequence[Entry]) -> None:
        """Stop serving these entries. They end in this transaction, or if they are in use, when they no longer are."""
        files = [entry for entry in several if entry.kind != "value"]
        gone = {one.id for one in self.end(txn, files, spares="none")} if files else set()
        for entry in several:
            if entry.id not in gone:
                entries.supersede(txn, entry)
                self._index.clear(entry.slot, entry.id)
                txn.leftovers |= entry.kind != "value"

    def remove(self, several: Sequence[Entry]) -> list[Ended]:
        """Remove these entries; returns those that were removed."""
        return self._catalog.insist(lambda txn: self.end(txn, several))

    def sweep(self) -> int:
        """Remove what was superseded and is in use no more, and held entries whose holders are gone; returns how many entries."""
        removed = 0
        for _ in range(TURNS):
            ended = self._sweep()
            removed += len(ended)
            if len(ended) < HELD_A_TURN and all(one.kind != "tree" for one in ended):  # a removed tree frees replaced files
                break
        return removed

    def _sweep(self) -> list[Ended]:
        self._leases.drain()
        some: list[Entry | Superseded] = [*entries.superseded(self._catalog), *self._some_held()]
        leased = self._leases.leased_among(one.id for one in some)
        idle = [one for one in some if one.id not in leased]
        if not idle:
            return []
        with self._catalog.write() as txn:
            # P1 sees an array as held / P2 gives it a name, under which it stays, and closes it / P1 ends what nobody holds.
            ended, before = self.end(txn, idle, spares="kept"), self.stuck
        return ended if self.stuck == before else []

    def _some_held(self) -> list[Entry]:
        rows = entries.held(self._catalog, self._held_after, HELD_A_TURN)
        self._held_after = rows[-1].id if len(rows) == HELD_A_TURN else 0
        return rows

    def remove_orphan(self, file: FileName) -> bool:
        """Remove a blob, tree or pack without a row, which a rebuilt catalog or a crash of the machine leaves. False: it is leased, or has
        its row by now."""
        if entries.is_known(self._catalog, file[0]):
            return self._remove_beside(file)
        if not self._leases.try_evict(file[0]):
            return False
        try:
            with self._catalog.writer():
                # It may have been published since it was listed: look again, now that nobody else may touch it. A small file has its
                # name before its row is committed, but only while the writer's lock is held.
                return not entries.is_known(self._catalog, file[0]) and self._unlink(file)
        finally:
            self._leases.evicted(file[0])

    def count_orphan(self, file: FileName, charge: int) -> None:
        """Count what `remove_orphan` left, as what was superseded: the budget has room for it, and a sweep removes it."""
        id, kind, suffix = file
        if kind == "pack":  # its segments have rows of their own
            charge = pack_files.size_of_index(self._root, id) or 0
        with self._catalog.write() as txn:
            if not entries.is_known(txn, id):
                entries.keep(txn, [Ended(id, 0, suffix, txn.space(URLS, "values"), kind, SUPERSEDED, charge, charge)])
                txn.leftovers = True
        if kind == "pack":
            measure(self._root, self._catalog)

    def _remove_beside(self, file: FileName) -> bool:
        """Remove a file that has the id of an entry and is not its file; no process can have a lease on it."""
        with self._catalog.writer():
            if not entries.unnamed(self._catalog, [file]):
                return False
            if file[1] == "blob":
                return blobs.remove_blob(self._root, file[0], file[2])  # and no other suffix, as `_unlink` would
            return self._unlink(file)

    def give_back(self) -> None:
        """Shrink the catalog, once it is worth a transaction. Waits for nobody where it is not."""
        try:
            more = self._catalog.one("PRAGMA freelist_count")[0] >= AT_ONCE
            while more:
                with self._catalog.write() as txn:
                    more = txn.give_back(AT_ONCE * PAGE)
        except (errors.WriterBusy, DiskFull) as error:
            log.info("the catalog of %s keeps its free pages: %s", self._root.path, str(error))


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


def measure(root: Root, catalog: Catalog) -> None:
    """Count all segments by their files and records: a crash of the machine may have lost rows. Caller: holds no lock."""
    with catalog.write() as txn:
        segments.open_all(txn)
        for pack, number, length in unnamed(root, txn):
            segments.open_one(txn, pack, number, length)
    reclaim(root, catalog)


def unnamed(root: Root, rows: Rows) -> Iterator[tuple[int, int, int]]:
    """The segments that no row names: pack, number, length of the file."""
    named = {(row.pack, row.number) for row in segments.every(rows)}
    for pack in segments.packs(rows):
        for number in pack_files.list_segments(root, pack):
            if (pack, number) not in named and (length := pack_files.segment_length(root, pack, number)):
                yield pack, number, length


def any_left(root: Root, rows: Rows) -> bool:
    """Whether `reclaim` would give anything back."""
    return bool(_left(root, rows))


def _left(root: Root, rows: Rows) -> dict[int, list[int]]:
    """The numbers of the open segments that no process appends to, by pack."""
    numbers: dict[int, list[int]] = {}
    for segment in segments.opened(rows):
        numbers.setdefault(segment.pack, []).append(segment.number)
    left = {pack: pack_files.unlocked(root, pack, several) for pack, several in numbers.items()}
    return {pack: several for pack, several in left.items() if several}


def reclaim(root: Root, catalog: Catalog) -> None:
    """Close the open segments that no process appends to, in all packs. Caller: holds no lock."""
    for pack, numbers in _left(root, catalog).items():
        with faults(f"pack {pack:x}"):
            try:
                claims = pack_files.claims(root, pack)
            except FileNotFoundError:
                continue  # it is being removed
            try:
                # P1 sees that segment 1 is left / P2 closes it; P3 takes it and appends / P1: only now that it has the byte, the words
                # tell where the last record ends.
                mine = [number for number in numbers if claims.try_claim(pack_files.byte_of(number))]
                words = pack_files.map_index(root, pack, None, writable=False)
                close(root, catalog, pack, {number: end.tail for number, end in pack_files.find_ends(root, pack, mine, words).items()})
            except (FileNotFoundError, Damaged):
                continue
            finally:
                claims.close()


def close(root: Root, catalog: Catalog, pack: int, tails: Mapping[int, int]) -> None:
    """Give back what segments have behind their last records. Caller: holds their bytes, and appends no more."""
    kept = {number: pack_files.punch_segment(root, pack, number, tail) for number, tail in tails.items()}
    with catalog.write() as txn:
        for number, size in kept.items():
            segments.close(txn, pack, number, size)
