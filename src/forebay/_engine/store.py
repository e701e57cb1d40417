"""The one door to the engine: what the rooms above may ask of one root. No mechanism of its own.

Faults of the catalog are mended here, once a call: a catalog or a root that was deleted or damaged is made anew. Whatever else
goes wrong reaches the caller as a `CacheFault`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import ClassVar, Literal

from forebay import errors
from forebay._engine import check
from forebay._engine.catalog import CatalogBroken, DiskFull, entries
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.faults import SCARCE, faults
from forebay._engine.files.root import Root, foreign, open_root
from forebay._engine.index import counters
from forebay._engine.index.hosts import SilentHosts
from forebay._engine.index.memo import Find, Hit, Remembered, finds_nothing, no_hit
from forebay._engine.key_locks import KeyLocks
from forebay._engine.loading import Reservations
from forebay._engine.locks.leases import Lease
from forebay._engine.pack_handles import Packs
from forebay._engine.space.budget import SpaceRequest
from forebay._engine.space.eviction import EvictionVictim
from forebay._engine.space.settings import Settings as Settings
from forebay._engine.spaces import Spaces
from forebay._engine.stats import Facts, Usage
from forebay._engine.write.insert import Label
from forebay._engine.write.publish import Writing
from forebay._kernel import host
from forebay._logs import logger
from forebay._model import Buffer, Entry, Policy, Problem, Report, Strays, Victim

log = logger("forebay.store")
REMOVED_AT_ONCE = 128


class Store:
    """What the rest of Forebay may do with one root. Opened by `open`; callable from any thread, and in a forked child.

    ``spaces``, ``locks``, ``packs`` and ``reservations`` stand for the spaces, the locks of keys, the packs, and what prefetchers need;
    the calls on entries are here."""

    keeps: Literal[True] = True
    """Tells a `Store` from a `PassThrough`: ``if store.keeps`` narrows the union of both."""

    _opened: ClassVar[dict[str, Store]] = {}
    _opening: ClassVar[threading.RLock] = threading.RLock()  # guards _opened and every _users

    def __init__(self, engine: Engine) -> None:
        self.engine, self._users = engine, 0
        self.spaces = Spaces(engine)
        self.locks, self.packs = KeyLocks(engine, self.spaces), Packs(engine, self.spaces)
        self.reservations = Reservations(engine, self.spaces)
        host.at_fork(self)

    @classmethod
    def open(cls, path: str | os.PathLike[str], settings: Settings, *, shared: bool = False, read_only: bool = False) -> Store:
        """The store of this root in this process, created by the first call. Each call needs a `close`.

        Raises `RootRefused`, `NewerFormat`, or `CacheFault` where the root cannot be used at all."""
        with cls._opening:
            try:
                root = open_root(path, shared=shared, read_only=read_only)
            except OSError as error:
                if error.errno in SCARCE:
                    raise errors.CacheFault(f"the cache in {os.fspath(path)} cannot be opened: {error.strerror}") from error
                raise
            name = f"{root.path}{':ro' if root.read_only else ''}"
            store = cls._opened.get(name)
            if store is None or not root.is_same() or store.root.id != root.id:
                with faults(str(root.path)):
                    store = cls._opened[name] = cls(Engine(root, settings))
            elif not root.read_only:
                store.configure(settings)
            store._users += 1
            return store

    @recover_and_retry
    def configure(self, settings: Settings) -> None:
        self.engine.configure(settings)

    def close(self) -> None:
        """Release one opening; the last one folds the counters and closes all files. Leases and buffers that were handed out stay valid."""
        with Store._opening:
            self._users -= 1
            if self._users > 0:
                return
            Store._opened = {name: store for name, store in Store._opened.items() if store is not self}
        self.engine.close()

    @property
    def root(self) -> Root:
        return self.engine.root

    @property
    def hosts(self) -> SilentHosts:
        return self.engine.hosts

    def before_fork(self) -> None:
        self.engine.before_fork()

    def after_fork_parent(self) -> None:
        self.engine.after_fork_parent()

    def after_fork_child(self) -> None:
        Store._opening = threading.RLock()
        self.engine.after_fork_child()

    # -- reading ---------------------------------------------------------------------------------------------------

    def hot_lookup(self, space: str) -> Hit:
        """See `Memo.hot_lookup`. In a read-only root there is nothing to touch: every hit goes the long way."""
        return self.engine.memo.hot_lookup(space, self.engine.counters) if not self.root.read_only else no_hit

    def finder(self, space: str) -> Find:
        """See `Memo.finder`. In a read-only root there is nothing to touch: every look goes the long way."""
        return self.engine.memo.finder(space) if not self.root.read_only else finds_nothing

    @recover_and_retry
    def view(self, space: str, key: str) -> Remembered | None:
        """The bytes of a key, mapped, and remembered for the next time; None where there is none. Counts and touches nothing."""
        self.engine.counters.claim()
        return self.engine.reading.view(space, self.spaces.lookup(space).id, key)

    @recover_and_retry
    def view_leased(self, space: str, key: str, lease: Lease) -> Remembered | None:
        """The bytes of what is leased, mapped and remembered."""
        with faults(key):
            return self.engine.reading.view_leased(space, key, lease)

    @recover_and_retry
    def lease(self, space: str, key: str) -> Lease | None:
        """A lease on the file of a key, touched; None where there is none, or it is a small value, which has no file."""
        lease = self.engine.reading.lease(self.spaces.lookup(space).id, key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    @recover_and_retry
    def take(self, space: str, key: str) -> Lease | None:
        """A lease on the bytes of a key, of a small value too, which is touched; None if there is none."""
        lease = self.engine.reading.take(self.spaces.lookup(space).id, key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    @recover_and_retry
    def take_many(self, space: str, keys: Sequence[str]) -> dict[str, Lease]:
        """`take` of several keys: those that have something."""
        with faults("several keys"):
            found = self.engine.leases.take_many(self.spaces.lookup(space).id, keys)
        for lease in found.values():
            self.touch(lease.entry)
        return found

    def bytes_leased(self, lease: Lease) -> memoryview | None:
        """The bytes of what is leased, checked before their first use here; None where they are damaged or gone."""
        return self.engine.reading.bytes_leased(lease)

    @recover_and_retry
    def is_sound(self, lease: Lease) -> bool:
        """Whether what is leased is what was stored: looked at once in a process. What is damaged is set aside."""
        return self.engine.reading.is_sound(lease)

    def private(self, found: Remembered) -> memoryview:
        """The same bytes, writable, with stores that stay with this view: a mapping of its own, or a copy where there is no file."""
        return self.engine.reading.private(found.entry) or memoryview(bytearray(found.view))

    def is_intact(self, found: Remembered) -> bool:
        """Whether these bytes are what was stored: all of them are compared. What is damaged is set aside, and counted."""
        return self.engine.reading.is_intact(found.entry, found.view)

    @recover_and_retry
    def set_aside(self, entry: Entry, why: str) -> None:
        """Bytes that are not what they should be are served to nobody any more."""
        with faults(entry.key):
            self.engine.reading.set_aside(entry, why)

    def alias(self, space: str, name: str, found: Remembered) -> None:
        """Let another name of an entry, such as a URL as the caller writes it, lead to it."""
        self.engine.memo.alias(space, name, found)

    def touch(self, entry: Entry) -> None:
        """Note that an entry is used now."""
        self.engine.touch(entry)

    def now(self, *, exact: bool = False) -> int:
        """Nanoseconds of the root's clock, about those since 1970, which never goes back. ``exact``: not before any time that another
        process saw, even within a second after the machine's clock was set."""
        clock = self.engine.slots.clock
        return clock.look() if exact else clock.now()

    def validated(self, entry: Entry) -> int:
        """When an entry was last seen to be the remote's: of `now`; 0: ask."""
        return self.engine.slots.validated(entry.slot)

    def stamp(self, entry: Entry) -> tuple[int, int]:
        """Of an entry and its last validation: another one says that there was another since."""
        return entry.id, self.engine.slots.stamp(entry.slot)

    def set_validated(self, entry: Entry, ns: int) -> None:
        if self.engine.slots.id_of(entry.slot) == entry.id:
            self.engine.slots.set_validated(entry.slot, ns)

    # -- writing ---------------------------------------------------------------------------------------------------

    @recover_and_retry
    def put(
        self, space: str, key: str, data: Buffer, *, life: str = "cached", meta: str = "", validator: str | None = None,
        validated: int | None = None, timeout: float | None = None,
    ) -> Entry:  # fmt: skip
        """Store bytes. Raises `NoSpace` or another `CacheFault`; what was there before then stays. ``validated``: see `Label`.

        In a space whose policy is ``wait`` it waits while all bytes are held: at most ``timeout`` seconds, then `NoSpace`."""
        self.engine.check_usable(writing=True)
        place = self.spaces.ensure(space)
        label = Label(place.id, place.name, key, life=life, meta=meta, validated=validated)
        while True:
            try:
                entry = self.engine.publisher.put(label, data, validator=validator)
            except errors.NoSpace as error:
                if place.policy != Policy.WAIT or error.hopeless:
                    raise
                self._wait_for_room(label, memoryview(data).nbytes, timeout, error)
                continue
            self.engine.counters.add(counters.BYTES_STORED, entry.size)
            return entry

    @recover_and_retry
    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], *, life: str = "cached", meta: str = "") -> Entry:
        """Store bytes that come in pieces, one behind the other. Raises `NoSpace` or another `CacheFault`; what was there then stays."""
        self.engine.check_usable(writing=True)
        place = self.spaces.ensure(space)
        entry = self.engine.publisher.put_pieces(Label(place.id, place.name, key, life=life, meta=meta), pieces)
        self.engine.counters.add(counters.BYTES_STORED, entry.size)
        return entry

    def _wait_for_room(self, label: Label, size: int, timeout: float | None, error: errors.NoSpace) -> None:
        began = time.monotonic_ns()
        try:
            self.engine.budget.wait_for_room(SpaceRequest(label.space, label.key, 0, size), timeout)
        except errors.WaitTimeout as late:
            raise error from late
        finally:
            self.engine.counters.add(counters.WAIT_NS_SPACE, time.monotonic_ns() - began)

    @recover_and_retry
    def writing(
        self, space: str, key: str, *, suffix: str = "", life: str = "cached", meta: str = "", validated: int | None = None,
        resume: bool = True, on_progress: Callable[[int, int | None], None] | None = None,
    ) -> Writing:  # fmt: skip
        """A write that a remote fills, asked not before ``validated``. Caller: holds the key's lock where ``resume``."""
        self.engine.check_usable(writing=True)
        place = self.spaces.ensure(space)
        label = Label(place.id, place.name, key, suffix, life, meta, validated)
        return Writing(self.engine.publisher, label, resume=resume, on_progress=on_progress)

    @recover_and_retry
    def put_many(self, space: str, items: Sequence[tuple[str, Buffer]], *, life: str = "cached") -> list[Entry]:
        """Store several values, the small ones in one transaction. Raises what `put` does; those before the first that fails stay."""
        self.engine.check_usable(writing=True)
        place = self.spaces.ensure(space)
        return self.engine.publisher.put_many([(Label(place.id, place.name, key, life=life), data) for key, data in items])

    def publish_many(self, writings: Sequence[Writing]) -> list[Entry]:
        """Publish several writes in one transaction: all or none."""
        with faults("several writes"):
            found = self.engine.publisher.publish(writings)
        for writing in writings:
            writing.published()
        return found

    @recover_and_retry
    def publish_tree(
        self, space: str, key: str, members: Sequence[tuple[str, Lease]], *, life: str = "cached", meta: str = "",
        validator: str | None = None,
    ) -> Lease:  # fmt: skip
        """A tree: a directory of hard links to leased entries, under their relative names; with a lease. Caller: is alone at this key.

        Its files are no victims while it stands. Raises ValueError for names that could leave it."""
        self.engine.check_usable(writing=True)
        place = self.spaces.ensure(space)
        label = Label(place.id, place.name, key, life=life, meta=meta)
        tree = self.engine.linker.publish_tree(label, [(name, lease.entry) for name, lease in members], self.engine.leases, validator)
        self.engine.reading.note_tree(tree)
        return tree

    @recover_and_retry
    def members(self, tree: Entry) -> list[tuple[str, Entry]]:
        """The files of a tree: (relative name, entry)."""
        return entries.members(self.engine.catalog, tree.id)

    @recover_and_retry
    def link(self, space: str, key: str, lease: Lease, *, suffix: str = "", life: str = "cached", validator: str | None = None) -> Lease:
        """The bytes of a leased file under another name too, leased: no copy, charged to both. Caller: holds the key's lock.

        Raises `NoSpace`, or another `CacheFault`."""
        self.engine.check_usable(writing=True)
        place = self.spaces.ensure(space)
        return self.engine.linker.link(Label(place.id, place.name, key, suffix, life), lease, self.engine.leases, validator)

    def publish_leased(self, writing: Writing, *, validator: str | None = None) -> Lease:
        """Publish, and give a lease that nobody can come before."""
        return writing.publish_leased(self.engine.leases, validator=validator)

    @recover_and_retry
    def set_meta(self, entry: Entry, meta: str) -> None:
        """Let an entry carry something small."""
        with self.engine.catalog.write() as txn:
            entries.set_meta(txn, entry.id, meta)

    @recover_and_retry
    def set_life(self, space: str, key: str, life: str) -> bool:
        """Pin (``pinned``) or unpin (``cached``) a name. False if there is no such entry."""
        with self.engine.catalog.write() as txn:
            found = entries.set_life(txn, self.spaces.lookup(space).id, key, life)
        if life != "pinned":
            self.engine.ranking.forget_spared()
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

    @recover_and_retry
    def _compact(self) -> None:
        try:
            self.engine.catalog.compact()
        except (errors.WriterBusy, DiskFull) as error:
            log.info("the catalog of %s keeps its free pages: %s", self.root.path, str(error))

    @recover_and_retry
    def _has_trees(self) -> bool:
        return entries.any_trees(self.engine.catalog)

    @recover_and_retry
    def _remove(self, wanted: Sequence[Victim], trees: bool) -> set[int]:
        rows = entries.by_ids(self.engine.catalog, [victim.id for victim in wanted])
        mine = [(e.id, e.slot, EvictionVictim(e.id, e.kind, e.suffix)) for e in rows if (e.kind == "tree") is trees]
        with faults("entries to remove"):
            removed = {doomed.id for doomed in self.engine.eviction.remove(mine)} if mine else set()
        self.engine.counters.add(counters.EVICTIONS, len(removed))
        return removed

    def drop(self, wanted: Sequence[Entry]) -> int:
        """Remove entries that nobody holds any more; gives how many went."""
        with faults("what nobody holds"):
            return len(self.engine.eviction.remove([(e.id, e.slot, EvictionVictim(e.id, e.kind, e.suffix)) for e in wanted]))

    @recover_and_retry
    def discard(self, entry: Entry) -> bool:
        """Remove an entry, a pinned one too; at once, at the cost of one entry. False if it is gone, or in use."""
        self.engine.check_usable(writing=True)
        if entry.life == "pinned":
            with self.engine.catalog.write() as txn:
                entries.set_life(txn, self.spaces.ensure(entry.space).id, entry.key, "cached")
        gone = self.drop([entry])
        self.engine.counters.add(counters.EVICTIONS, gone)
        return bool(gone)

    @recover_and_retry
    def ensure_room(self, space: str, files: Sequence[tuple[str, int]]) -> None:
        """Make room for files (key and size of each) that will come one by one, evicting what may go: who cannot have it learns so before
        the first byte. It is not kept for them. Raises `NoSpace`."""
        self.engine.check_usable(writing=True)
        with faults(space):
            self.engine.publisher.ensure_room(self.spaces.ensure(space).id, files)

    @recover_and_retry
    def make_room(self) -> bool:
        """Evict what is over the limits. False if what is left is in use."""
        with faults("a smaller cache"):
            self.engine.eviction.sweep()
            return self.engine.budget.make_room()

    # -- seeing ----------------------------------------------------------------------------------------------------

    @recover_and_retry
    def entries(self, space: str | None = None) -> list[Entry]:
        """What is there, with its times, in order of last use; ``leased`` is not looked at."""
        return self.engine.stats.entries(self.spaces.lookup(space).id if space is not None else None)

    @recover_and_retry
    def page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Entry]:
        """Some entries of a space, in order of their keys, those that follow the key ``after``; ``leased`` as it is now."""
        return self.engine.stats.page(self.spaces.lookup(space).id, after, backwards=backwards)

    @recover_and_retry
    def fact_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[Facts]:
        """`page`, of what a person wants to see of many."""
        return self.engine.stats.fact_page(self.spaces.lookup(space).id, after, backwards=backwards)

    @recover_and_retry
    def key_page(self, space: str, after: str | None, *, backwards: bool = False) -> list[str]:
        """`page`, of the keys alone."""
        return self.engine.stats.key_page(self.spaces.lookup(space).id, after, backwards=backwards)

    @recover_and_retry
    def entry(self, space: str, key: str) -> Entry | None:
        """What the catalog says of a key; no touch."""
        found = self.engine.leases.current(self.spaces.lookup(space).id, key)
        return self.engine.stats.with_times(found) if found else None

    def is_leased(self, entry: Entry) -> bool:
        with faults(entry.key):
            return self.engine.leases.is_leased(entry.id)

    @recover_and_retry
    def overhead(self) -> dict[str, int]:
        """See `StatsReader.overhead`."""
        return self.engine.stats.overhead()

    @recover_and_retry
    def usage(self) -> Usage:
        """How much is used and promised now."""
        return self.engine.stats.usage()

    @recover_and_retry
    def lacking(self, need: int) -> int:
        """Bytes that have to go before ``need`` more fit: into the budget, and onto the disk without touching what stays free of it."""
        return self.engine.budget.room.short(self.engine.catalog, None).bytes + need

    def count_hit(self, size: int) -> None:
        """``size`` bytes were served from what is kept."""
        self.engine.counters.add(counters.HITS)
        self.engine.counters.add(counters.BYTES_HIT, size)

    def count(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of what `counters.NAMES` calls ``name``."""
        if n:
            self.engine.counters.add(counters.NAMES.index(name), n)

    @recover_and_retry
    def counts(self) -> dict[str, int]:
        """What all processes together have counted since the last `zero_counts`."""
        return self.engine.stats.counts()

    @recover_and_retry
    def zero_counts(self) -> None:
        """Begin to count anew, for all processes."""
        self.engine.stats.zero_counts()

    @recover_and_retry
    def check(self, *, deep: bool = False) -> list[Problem]:
        """Everything that is wrong with this root; empty: it is sound. ``deep`` reads every byte. A damaged catalog is told, not mended."""
        try:
            problem = self.engine.catalog.problem()
            if problem is None:
                found = check.check(self.root, self.engine.catalog, self.engine.slots, deep=deep)
                others = [name for name in foreign(self.root.path) if not name.startswith("tmp/")]  # those are told already
                return [*found, *(Problem("foreign", str(self.root.path / name), "nobody counts it: move it away") for name in others)]
        except CatalogBroken as error:
            if not error.damaged:
                raise
            problem = str(error)
        return [Problem("catalog", str(self.root.catalog), problem)]

    @recover_and_retry
    def strays(self) -> Strays:
        """What lies in the root and is counted by nobody."""
        return check.count_strays(self.root, self.engine.catalog, self.engine.slots)

    @recover_and_retry
    def remove_strays(self) -> Strays:
        """Remove what no entry names, of Forebay's making; gives what went. Never from under a lease, nor from under a writer."""
        self.engine.check_usable(writing=True)
        before = check.count_strays(self.root, self.engine.catalog, self.engine.slots)
        if not before.files:
            return Strays()
        with faults("files that no entry names"):
            check.remove_strays(self.root, self.engine.catalog, self.engine.eviction, self.engine.fill)
        left = check.count_strays(self.root, self.engine.catalog, self.engine.slots)
        return Strays(max(before.files - left.files, 0), max(before.bytes - left.bytes, 0))

    def recover(self, error: CatalogBroken) -> None:
        """Recreate a broken catalog at once, for a thread that has no call to repeat."""
        self.engine.reopen(error, self.engine.recoveries)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Mend what `check` finds; gives what was mended, what had to be mended at opening too."""
        self.engine.check_usable(writing=True)
        before, self.engine.recovered = self.engine.recovered, []
        found = latest = self.check(deep=deep)
        for _ in range(2):  # damage that does not show in the pages is mended the second time that it is met
            if any(problem.kind == "catalog" for problem in latest):
                self.engine.reopen(CatalogBroken(f"the catalog is damaged: {latest[0].found}", damaged=True), self.engine.recoveries)
                latest = self.check(deep=deep)  # what nobody could look at before
                found = [*found, *latest]
        self.engine.catalog.trust()
        if any(problem.kind == "slots" for problem in found):
            self.engine.rebuild_slots()
            found += self.check(deep=deep)
        self._repair(found)
        return [*before, *found]

    @recover_and_retry
    def _repair(self, found: list[Problem]) -> None:
        check.mend(self.root, self.engine.catalog, self.engine.eviction, self.engine.fill, self.engine.reading, found)


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
