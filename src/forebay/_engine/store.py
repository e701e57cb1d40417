"""The one door to the engine: what the rooms above may ask of one root. No mechanism of its own.

Faults of the catalog are mended here, once a call: a catalog or a root that was deleted or damaged is made anew. Whatever else
goes wrong reaches the caller as a `CacheFault`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Literal, TypeVar

from forebay import errors
from forebay._engine import check, strays
from forebay._engine.catalog import CatalogBroken, DiskFull, entries
from forebay._engine.engine import mending
from forebay._engine.files.faults import faults
from forebay._engine.files.root import foreign
from forebay._engine.index import counters
from forebay._engine.index.memo import Hit, Remembered, no_hit
from forebay._engine.locks.fill import KeyHold, OnWait
from forebay._engine.locks.leases import Lease
from forebay._engine.packs.pack import Pack
from forebay._engine.packs.packing import SegmentRequest, Taken
from forebay._engine.space.eviction import Doomed
from forebay._engine.space.room import SpaceRequest
from forebay._engine.space.settings import Settings as Settings
from forebay._engine.stats import Facts, Usage
from forebay._engine.values import Pieces
from forebay._engine.write.insert import Label
from forebay._engine.write.publish import Writing
from forebay._logs import logger
from forebay._model import Buffer, Entry, Policy, Problem, Report, Strays, Victim

log = logger("forebay.store")
T = TypeVar("T")

REMOVED_AT_ONCE = 128
NAMED = 0  # no space has this id: the keys of named locks


class Store(Pieces):
    """The calls on one root. Opened by `open`; callable from any thread, and in a forked child."""

    keeps: Literal[True] = True
    """Tells a `Store` from a `PassThrough`: ``if store.keeps`` narrows the union of both."""

    # -- reading ---------------------------------------------------------------------------------------------------

    def hitter(self, space: str) -> Hit:
        """See `Memo.hitter`. In a read-only root there is nothing to touch: every hit goes the long way."""
        return self.memo.hitter(space, self.counters) if not self.root.read_only else no_hit

    @mending
    def view(self, space: str, key: str) -> Remembered | None:
        """The bytes of a key, mapped, and remembered for the next time; None where there is none. Counts and touches nothing."""
        self.register()
        return self._reading.view(space, self.known_space(space).id, key)

    @mending
    def view_leased(self, space: str, key: str, lease: Lease) -> Remembered | None:
        """The bytes of what is leased, mapped and remembered."""
        with faults(key):
            return self._reading.view_leased(space, key, lease)

    @mending
    def lease(self, space: str, key: str) -> Lease | None:
        """A lease on the file of a key, touched; None where there is none, or it is a small value, which has no file."""
        lease = self._reading.lease(self.known_space(space).id, key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    @mending
    def is_sound(self, lease: Lease) -> bool:
        """Whether what is leased is what was stored: looked at once in a process. What is damaged is set aside."""
        return self._reading.is_sound(lease)

    @mending
    def set_aside(self, entry: Entry, why: str) -> None:
        """Bytes that are not what they should be are served to nobody any more."""
        with faults(entry.key):
            self._reading.set_aside(entry, why)

    def alias(self, space: str, name: str, found: Remembered) -> None:
        """Let another name of an entry, such as a URL as the caller writes it, lead to it."""
        self.memo.alias(space, name, found)

    def validated(self, entry: Entry) -> int:
        """When an entry was last seen to be the remote's: of `now`; 0: ask."""
        return self._slots.validated(entry.slot)

    def stamp(self, entry: Entry) -> tuple[int, int]:
        """Of an entry and its last validation: another one says that there was another since."""
        return entry.id, self._slots.stamp(entry.slot)

    def set_validated(self, entry: Entry, ns: int) -> None:
        if self._slots.id_of(entry.slot) == entry.id:
            self._slots.set_validated(entry.slot, ns)

    # -- writing ---------------------------------------------------------------------------------------------------

    @mending
    def put(
        self, space: str, key: str, data: Buffer, *, life: str = "cached", meta: str = "", validator: str | None = None,
        validated: int | None = None, timeout: float | None = None,
    ) -> Entry:  # fmt: skip
        """Store bytes. Raises `NoSpace` or another `CacheFault`; what was there before then stays. ``validated``: see `Label`.

        In a space whose policy is ``wait`` it waits while all bytes are held: at most ``timeout`` seconds, then `NoSpace`."""
        self.check_usable(writing=True)
        place = self.space(space)
        label = Label(place.id, place.name, key, life=life, meta=meta, validated=validated)
        while True:
            try:
                entry = self._publisher.put(label, data, validator=validator)
            except errors.NoSpace as error:
                if place.policy != Policy.WAIT or error.hopeless:
                    raise
                self._wait_for_room(label, memoryview(data).nbytes, timeout, error)
                continue
            self.counters.add(counters.BYTES_STORED, entry.size)
            return entry

    def _wait_for_room(self, label: Label, size: int, timeout: float | None, error: errors.NoSpace) -> None:
        began = time.monotonic_ns()
        try:
            self._budget.wait_for_room(SpaceRequest(label.space, label.key, 0, size), timeout)
        except errors.WaitTimeout as late:
            raise error from late
        finally:
            self.counters.add(counters.WAIT_NS_SPACE, time.monotonic_ns() - began)

    @mending
    def writing(
        self, space: str, key: str, *, suffix: str = "", life: str = "cached", meta: str = "", validated: int | None = None,
        resume: bool = True, on_progress: Callable[[int, int | None], None] | None = None,
    ) -> Writing:  # fmt: skip
        """A write that a remote fills, asked not before ``validated``. Caller: holds the key's lock where ``resume``."""
        self.check_usable(writing=True)
        place = self.space(space)
        label = Label(place.id, place.name, key, suffix, life, meta, validated)
        return Writing(self._publisher, label, resume=resume, on_progress=on_progress)

    @mending
    def put_many(self, space: str, items: Sequence[tuple[str, Buffer]], *, life: str = "cached") -> list[Entry]:
        """Store several values, the small ones in one transaction. Raises what `put` does; those before the first that fails stay."""
        self.check_usable(writing=True)
        place = self.space(space)
        return self._publisher.put_many([(Label(place.id, place.name, key, life=life), data) for key, data in items])

    def publish_many(self, writings: Sequence[Writing]) -> list[Entry]:
        """Publish several writes in one transaction: all or none."""
        with faults("several writes"):
            found = self._publisher.publish(writings)
        for writing in writings:
            writing.published()
        return found

    @mending
    def plant(
        self, space: str, key: str, members: Sequence[tuple[str, Lease]], *, life: str = "cached", meta: str = "",
        validator: str | None = None,
    ) -> Lease:  # fmt: skip
        """A tree: a directory of hard links to leased entries, under their relative names; with a lease. Caller: is alone at this key.

        Its files are no victims while it stands. Raises ValueError for names that could leave it."""
        self.check_usable(writing=True)
        place = self.space(space)
        label = Label(place.id, place.name, key, life=life, meta=meta)
        tree = self._linking.plant(label, [(name, lease.entry) for name, lease in members], self._leases, validator)
        self._reading.note_tree(tree)
        return tree

    @mending
    def members(self, tree: Entry) -> list[tuple[str, Entry]]:
        """The files of a tree: (relative name, entry)."""
        return entries.members(self._catalog, tree.id)

    @mending
    def link(self, space: str, key: str, lease: Lease, *, suffix: str = "", life: str = "cached", validator: str | None = None) -> Lease:
        """The bytes of a leased file under another name too, leased: no copy, charged to both. Caller: holds the key's lock.

        Raises `NoSpace`, or another `CacheFault`."""
        self.check_usable(writing=True)
        place = self.space(space)
        return self._linking.link(Label(place.id, place.name, key, suffix, life), lease, self._leases, validator)

    @mending
    def make_pack(
        self, space: str, key: str, length: int, *, life: str = "cached", fingerprint: str | None = None, meta: str = ""
    ) -> Pack:  # fmt: skip
        """An empty pack of ``length`` slots, in place of what had its name, open and leased. Caller: holds the key."""
        self.check_usable(writing=True)
        place = self.space(space, kind="packs")
        lease = self._packing.create(Label(place.id, place.name, key, life=life, meta=meta), length, fingerprint=fingerprint)
        return self._open_pack(lease, length)

    @mending
    def find_pack(self, space: str, key: str) -> Lease | None:
        """A lease on the pack of a name; None where there is none. For `open_pack`."""
        with faults(key):
            return self._leases.take(self.known_space(space).id, key)

    @mending
    def find_pack_by_id(self, id: int) -> Lease | None:
        """A lease on a pack, whatever its name is by now; None if it is gone, or another has its name."""
        with faults(f"{id:x}"):
            return self._leases.take_id(id)

    def open_pack(self, lease: Lease, length: int) -> Pack | None:
        """The leased pack; None where its files are gone or damaged: then it is set aside. The lease is the pack's from now on."""
        try:
            return self._open_pack(lease, length)
        except (FileNotFoundError, errors.Damaged) as error:
            self._reading.set_aside(lease.entry, f"{lease.entry.name}: {error}")
            lease.close()
            return None

    def _open_pack(self, lease: Lease, length: int) -> Pack:
        self.touch(lease.entry)
        space = self.known_space(lease.entry.space)
        try:
            return Pack(self.root, self, self._slots, self.counters, lease, length, space.id)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, errors.Damaged)):
                raise
            raise errors.CacheFault(f"{lease.entry.name} cannot be opened: {error}", key=lease.entry.key) from error

    @mending
    def take_segment(self, room: SegmentRequest, need: int, words: memoryview, full: tuple[int, int] | None) -> Taken:
        """See `Packing.take`."""
        self.check_usable(writing=True)
        return self._packing.take(room, need, words, full)

    @mending
    def leave_segment(self, pack: int, number: int, tail: int) -> None:
        """See `Packing.leave`."""
        self._packing.leave(pack, number, tail)

    def forget_segment(self, ticket: int) -> None:
        """See `Packing.forget`."""
        self._packing.forget(ticket)

    @mending
    def name_pack(self, pack: Pack, space: str, key: str, *, overwrite: bool) -> bool:
        """Give a pack that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``."""
        self.check_usable(writing=True)
        place = self.space(space)
        return self._linking.name(pack.id, Label(place.id, place.name, key), overwrite=overwrite)

    def publish_leased(self, writing: Writing, *, validator: str | None = None) -> Lease:
        """Publish, and give a lease that nobody can come before."""
        return writing.publish_leased(self._leases, validator=validator)

    def single(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], *,
        timeout: float | None = None, on_wait: OnWait | None = None, on_hold: Callable[[KeyHold], None] | None = None,
    ) -> T:  # fmt: skip
        """See `Fill.single`. ``make`` runs once: a catalog that breaks meanwhile is mended by the next call."""
        self.check_usable(writing=True)
        place, mends = self.space(space), self.mends
        try:
            return self._fill.single(place.id, key, look, make, timeout=timeout, on_wait=on_wait, on_hold=on_hold)
        except CatalogBroken as error:
            self.mend(error, mends)
            raise

    async def single_async(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], Awaitable[T]], *, timeout: float | None = None
    ) -> T:
        """See `Fill.single_async`."""
        self.check_usable(writing=True)
        place, mends = self.space(space), self.mends
        try:
            return await self._fill.single_async(place.id, key, look, make, timeout=timeout)
        except CatalogBroken as error:
            self.mend(error, mends)
            raise

    @mending
    def hold(self, space: str, key: str, *, timeout: float | None = None) -> KeyHold:
        """The key's lock: of all threads and processes one has it. Any thread may let go."""
        return self._fill.hold(self.space(space).id, key, timeout=timeout)

    @mending
    def lock(self, name: str, *, timeout: float | None = None, on_wait: OnWait | None = None) -> KeyHold:
        """A lock with a name: of all threads and processes of the node one has it; death lets go.

        Waited for inside a function that makes a key's value too: who has one runs nothing that asks for such a key."""
        self.check_usable(writing=True)
        with self._fill.working(False):
            return self._fill.hold(NAMED, name, timeout=timeout, on_wait=on_wait)

    async def hold_async(self, space: str, key: str, *, timeout: float | None = None) -> KeyHold:
        """The key's lock, awaited."""
        self.check_usable(writing=True)
        return await self._fill.hold_async(self.space(space).id, key, timeout=timeout)

    @mending
    def set_meta(self, entry: Entry, meta: str) -> None:
        """Let an entry carry something small."""
        with self._catalog.write() as txn:
            entries.set_meta(txn, entry.id, meta)

    @mending
    def set_life(self, space: str, key: str, life: str) -> bool:
        """Pin (``pinned``) or unpin (``cached``) a name. False if there is no such entry."""
        with self._catalog.write() as txn:
            found = entries.set_life(txn, self.known_space(space).id, key, life)
        if life != "pinned":
            self._ranking.forget_spared()
        return found

    # -- leaving ---------------------------------------------------------------------------------------------------

    def remove(self, wanted: Iterable[Victim]) -> Report:
        """Remove entries; the report says what really went. What is leased, pinned or part of a tree is spared."""
        several = wanted if isinstance(wanted, Sequence) else tuple(wanted)
        # Trees go first: what they link is no victim while they stand.
        trees = {id for some in _portions(several) for id in self._remove(some, True)} if self._has_trees() else set()
        removed: list[str] = []
        spared: list[str] = []
        freed = 0
        for some in _portions(several):
            gone = self._remove(some, False)
            for victim in some:
                if victim.id in gone or victim.id in trees:
                    removed.append(victim.name)
                    freed += victim.charge
                else:
                    spared.append(victim.name)
        if removed:
            self._compact()
        return Report(tuple(removed), tuple(spared), freed)

    @mending
    def _compact(self) -> None:
        try:
            self._catalog.compact()
        except (errors.WriterBusy, DiskFull) as error:
            log.info("the catalog of %s keeps its free pages: %s", self.root.path, str(error))

    @mending
    def _has_trees(self) -> bool:
        return entries.any_trees(self._catalog)

    @mending
    def _remove(self, wanted: Sequence[Victim], trees: bool) -> set[int]:
        rows = entries.by_ids(self._catalog, [victim.id for victim in wanted])
        mine = [(e.id, e.slot, Doomed(e.id, e.kind, e.suffix)) for e in rows if (e.kind == "tree") is trees]
        with faults("entries to remove"):
            removed = {doomed.id for doomed in self._eviction.remove(mine)} if mine else set()
        self.counters.add(counters.EVICTIONS, len(removed))
        return removed

    @mending
    def ensure_room(self, space: str, files: Sequence[tuple[str, int]]) -> None:
        """Make room for files (key and size of each) that will come one by one, evicting what may go: who cannot have it learns so before
        the first byte. It is not kept for them. Raises `NoSpace`."""
        self.check_usable(writing=True)
        with faults(space):
            self._publisher.ensure_room(self.space(space).id, files)

    @mending
    def make_room(self) -> bool:
        """Evict what is over the limits. False if what is left is in use."""
        with faults("a smaller cache"):
            self._eviction.sweep()
            return self._budget.make_room()

    # -- seeing ----------------------------------------------------------------------------------------------------

    @mending
    def entries(self, space: str | None = None) -> list[Entry]:
        """What is there, with its times, in order of last use; ``leased`` is not looked at."""
        return self._census.entries(self.known_space(space).id if space is not None else None)

    @mending
    def page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Entry]:
        """Some entries of a space, in order of their keys, those that follow the key ``after``; ``leased`` as it is now."""
        return self._census.page(self.known_space(space).id, after, backwards=backwards)

    @mending
    def fact_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Facts]:
        """`page`, of what a person wants to see of many."""
        return self._census.fact_page(self.known_space(space).id, after, backwards=backwards)

    @mending
    def key_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[str]:
        """`page`, of the keys alone."""
        return self._census.key_page(self.known_space(space).id, after, backwards=backwards)

    @mending
    def entry(self, space: str, key: str) -> Entry | None:
        """What the catalog says of a key; no touch."""
        found = self._leases.current(self.known_space(space).id, key)
        return self._census.with_times(found) if found else None

    def is_leased(self, entry: Entry) -> bool:
        with faults(entry.key):
            return self._leases.is_leased(entry.id)

    @mending
    def overhead(self) -> dict[str, int]:
        """See `StatsReader.overhead`."""
        return self._census.overhead()

    @mending
    def usage(self) -> Usage:
        """How much is used and promised now."""
        return self._census.usage()

    @mending
    def lacking(self, need: int) -> int:
        """Bytes that have to go before ``need`` more fit: into the budget, and onto the disk without touching what stays free of it."""
        return self._budget.room.short(self._catalog, None).bytes + need

    def count_hit(self, size: int) -> None:
        """``size`` bytes were served from what is kept."""
        self.counters.add(counters.HITS)
        self.counters.add(counters.BYTES_HIT, size)

    def count(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of what `counters.NAMES` calls ``name``."""
        if n:
            self.counters.add(counters.NAMES.index(name), n)

    @mending
    def counts(self) -> dict[str, int]:
        """What all processes together have counted since the last `zero_counts`."""
        return self._census.counts()

    @mending
    def zero_counts(self) -> None:
        """Begin to count anew, for all processes."""
        self._census.zero_counts()

    @mending
    def check(self, *, deep: bool = False) -> list[Problem]:
        """Everything that is wrong with this root; empty: it is sound. ``deep`` reads every byte. A damaged catalog is told, not mended."""
        try:
            problem = self._catalog.problem()
            if problem is None:
                found = check.check(self.root, self._catalog, self._slots, deep=deep)
                others = [name for name in foreign(self.root.path) if not name.startswith("tmp/")]  # those are told already
                return [*found, *(Problem("foreign", str(self.root.path / name), "nobody counts it: move it away") for name in others)]
        except CatalogBroken as error:
            if not error.damaged:
                raise
            problem = str(error)
        return [Problem("catalog", str(self.root.catalog), problem)]

    @mending
    def strays(self) -> Strays:
        """What lies in the root and is counted by nobody."""
        return strays.look(self.root, self._catalog, self._slots)

    @mending
    def remove_strays(self) -> Strays:
        """Remove what no entry names, of Forebay's making; gives what went. Never from under a lease, nor from under a writer."""
        self.check_usable(writing=True)
        before = strays.look(self.root, self._catalog, self._slots)
        if not before.files:
            return Strays()
        with faults("files that no entry names"):
            check.remove_strays(self.root, self._catalog, self._eviction, self._fill)
        left = strays.look(self.root, self._catalog, self._slots)
        return Strays(max(before.files - left.files, 0), max(before.bytes - left.bytes, 0))

    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Mend what `check` finds; gives what was mended, what had to be mended at opening too."""
        self.check_usable(writing=True)
        before, self.recovered = self.recovered, []
        found = latest = self.check(deep=deep)
        for _ in range(2):  # damage that does not show in the pages is mended the second time that it is met
            if any(problem.kind == "catalog" for problem in latest):
                self.mend(CatalogBroken(f"the catalog is damaged: {latest[0].found}", damaged=True), self.mends)
                latest = self.check(deep=deep)  # what nobody could look at before
                found = [*found, *latest]
        self._catalog.trust()
        if any(problem.kind == "slots" for problem in found):
            self.remake_slots()
            found += self.check(deep=deep)
        self._repair(found)
        return [*before, *found]

    @mending
    def _repair(self, found: list[Problem]) -> None:
        check.mend(self.root, self._catalog, self._eviction, self._fill, self._reading, found)


def _portions(victims: Iterable[Victim]) -> Iterator[list[Victim]]:
    """Each is one transaction, small enough for the log; each entry once."""
    some: dict[int, Victim] = {}
    for victim in victims:
        some[victim.id] = victim
        if len(some) == REMOVED_AT_ONCE:
            yield list(some.values())
            some.clear()
    if some:
        yield list(some.values())
