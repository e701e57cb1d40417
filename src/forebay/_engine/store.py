"""The interface of the engine: every call that the rest of Forebay makes on one root. It has no mechanism of its own.

A catalog or a root that turns out to be deleted or damaged is recreated here, and the call is repeated. Whatever else goes wrong reaches
the caller as a `CacheFault`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from forebay import errors
from forebay._engine.engine import Engine, open_directory, recover_and_retry
from forebay._engine.files import blobs
from forebay._engine.files.layout import CatalogBroken, DiskFull, faults, key_hash
from forebay._engine.files.root import Root, foreign
from forebay._engine.files.silent_hosts import SilentHosts
from forebay._engine.index import counters
from forebay._engine.index.memo import Find, Hit, Remembered, finds_nothing, no_hit
from forebay._engine.index.records import EXPIRED
from forebay._engine.index.settings import Settings as Settings
from forebay._kernel import greenlets, host
from forebay._kernel.interrupts import paced, shielded
from forebay._logs import logger
from forebay._model import Buffer, Entry, Policy, Problem, Report, Strays, Victim

if TYPE_CHECKING:
    from forebay._engine.flight import Flight
    from forebay._engine.index.settings import NodeLimits
    from forebay._engine.leases import Lease
    from forebay._engine.loading import Prefetching
    from forebay._engine.publish import Label, Writing
    from forebay._engine.seeing import Seeing
    from forebay._engine.spaces import Packs, Spaces

log = logger("forebay.store")

PATIENCE = 5.0
"""Seconds that a value waits for other writes into its space, which can be evicted once they are done."""


class Store:
    """What the rest of Forebay may do with one root. Opened by `open`; callable from any thread, and in a forked child.

    ``spaces``, ``locks``, ``packs``, ``prefetching`` and ``seeing`` stand for the spaces, the locks of keys, the packs, what prefetchers
    need, and what happens and happened; the calls on entries are here."""

    keeps: Literal[True] = True
    """Tells a `Store` from a `NullStore`: ``if store.keeps`` narrows the union of both."""

    _opened: ClassVar[dict[str, Store]] = {}
    _opening: ClassVar[threading.RLock] = threading.RLock()  # guards _opened and every _users
    _dropped: ClassVar[list[Store]] = []

    def __init__(self, engine: Engine) -> None:
        self.engine, self._users = engine, 0
        host.at_fork(engine)

    @host.cached_property
    def spaces(self) -> Spaces:
        from forebay._engine.spaces import Spaces

        return Spaces(self.engine)

    @host.cached_property
    def locks(self) -> Flight:
        from forebay._engine.flight import Flight

        return Flight(self.engine)

    @host.cached_property
    def seeing(self) -> Seeing:
        from forebay._engine.seeing import Seeing

        return Seeing(self.engine, self.spaces)

    @host.cached_property
    def packs(self) -> Packs:
        from forebay._engine.spaces import Packs

        return Packs(self.engine, self.spaces)

    @host.cached_property
    def prefetching(self) -> Prefetching:
        from forebay._engine.loading import Prefetching

        return Prefetching(self.engine, self.spaces, self.locks)

    @classmethod
    def open(cls, path: str | os.PathLike[str], settings: Settings, *, shared: bool = False, read_only: bool = False) -> Store:
        """The store of this root in this process, created by the first call. Each call needs a `close`.

        Raises `RootRefused`, `NewerFormat`, `CacheFault` where the root cannot be used for now, or OSError."""
        with cls._opening:
            root = open_directory(path, shared=shared, read_only=read_only)
            name = f"{root.path}{':ro' if root.read_only else ''}"
            store = cls._opened.get(name)
            if store is None or not root.is_same() or store.root.id != root.id:
                with faults(str(root.path)):
                    store, lost = cls(Engine(root, settings)), store
                cls._opened[name] = store
                if lost is not None:
                    lost.engine.lose_packs()
            elif not root.read_only:
                store.configure(settings)
            store._users += 1
            while cls._dropped:
                try:
                    with shielded():  # else an interrupt would leave both open
                        cls._dropped.pop().close()
                except (errors.CacheFault, OSError) as error:
                    log.info("a cache that nobody closed: %s", str(error))
            return store

    def abandon(self) -> None:
        """Have the next `open` call `close`: for the finalizer of what opened it, which may run inside anything, and must not wait."""
        if self in Store._opened.values():  # else its root was replaced: it may be garbage, too, with parts that are finalized already
            Store._dropped.append(self)

    @recover_and_retry
    def configure(self, settings: Settings) -> bool:
        """See `Engine.configure`."""
        return self.engine.configure(settings)

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

    @property
    def limits(self) -> NodeLimits | None:
        """The limits of transfers; None where this process cannot open one more file to load them."""
        try:
            return self.engine.limits
        except OSError as error:
            log.info("%s: transfers are not limited: %s", self.root.path, str(error))
            return None

    # -- reading ---------------------------------------------------------------------------------------------------

    def hot_lookup(self, space: str, *, as_written: bool = False) -> Hit:
        """See `Memo.hot_lookup`. In a read-only root nothing can be touched, so every hit takes the slow path."""
        if self.root.read_only:
            return no_hit
        return self.engine.memo.hot_lookup(space, self.engine.counters, as_written=as_written)

    def finder(self, space: str) -> Find:
        """See `Memo.finder`. In a read-only root nothing can be touched, so every lookup takes the slow path."""
        return self.engine.memo.finder(space) if not self.root.read_only else finds_nothing

    def first_touch(self, space: str, key: str, max_age: int, alias: str = "", *, maps: bool = False) -> memoryview | None:
        """See `Hits.first_touch`. None where anything is broken: `view` repairs it."""
        try:
            return self.engine.first_touch(space, key, max_age, alias or key, maps)
        except (errors.CacheFault, OSError):
            return None

    def first_value(self, space: str, key: str, meta: str) -> memoryview | None:
        """See `Hits.first_value`. None where anything is broken: `view` repairs it."""
        try:
            return self.engine.first_value(space, key, meta)
        except (errors.CacheFault, OSError):
            return None

    @recover_and_retry
    def view(self, space: str, key: str) -> Remembered | None:
        """The bytes of a key, mapped, and remembered for the next call; None if there is no entry. Counts and touches nothing."""
        self.engine.counters.claim()
        return self.engine.parts.reading.view(space, self.spaces.number(space), key)

    @recover_and_retry
    def view_leased(self, space: str, key: str, lease: Lease) -> Remembered | None:
        """The bytes of a leased entry, mapped and remembered; None where they are damaged or gone."""
        with faults(key):
            return self.engine.parts.reading.view_leased(space, key, lease)

    @recover_and_retry
    def lease(self, space: str, key: str) -> Lease | None:
        """A lease on the file of a key, which is touched; None if there is no entry, or only a small value, which has no file."""
        lease = self.engine.parts.reading.lease(self.spaces.number(space), key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    @recover_and_retry
    def take(self, space: str, key: str) -> Lease | None:
        """A lease on the bytes of a key, of a small value too, which is touched; None if there is none."""
        lease = self.engine.parts.reading.take(self.spaces.number(space), key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    @recover_and_retry
    def take_many(self, space: str, keys: Sequence[str]) -> dict[str, Lease]:
        """`take` of several keys; the result has only those that have an entry."""
        with faults("several keys"):
            leases = self.engine.parts.leases.take_many(self.spaces.number(space), keys)
        for lease in paced(leases.values()):
            self.touch(lease.entry)
        return leases

    def bytes_leased(self, lease: Lease) -> memoryview | None:
        """The bytes of a leased entry, checked before their first use in this process; None where they are damaged or gone."""
        return self.engine.parts.reading.bytes_leased(lease)

    @recover_and_retry
    def is_sound(self, lease: Lease) -> bool:
        """Whether a leased entry is what was stored; checked once in each process. A damaged entry is set aside."""
        return self.engine.parts.reading.is_sound(lease)

    def is_intact(self, remembered: Remembered) -> bool:
        """Whether all bytes are what was stored. A damaged entry is set aside, and counted."""
        return self.engine.parts.reading.is_intact(remembered.entry, remembered.view)

    @recover_and_retry
    def set_aside(self, entry: Entry, why: str) -> None:
        """Stop serving the damaged bytes of an entry."""
        with faults(entry.key):
            self.engine.parts.reading.set_aside(entry, why)

    def alias(self, space: str, name: str, remembered: Remembered) -> None:
        """Remember an entry under another name too, such as a URL as the caller writes it."""
        self.engine.memo.alias(space, name, remembered)

    def touch(self, entry: Entry) -> None:
        """Note that an entry is used now."""
        self.engine.touch(entry)

    def now(self, *, exact: bool = False) -> int:
        """Nanoseconds of the root's clock, about those since 1970, which never goes back. ``exact``: not before any time that another
        process saw, even within a second after the machine's clock was set."""
        clock = self.engine.index.head.clock
        return clock.look() if exact else clock.now()

    def validated(self, entry: Entry) -> int:
        """When an entry was last seen to be the version of the remote, on the clock of `now`; 0: not known, or it is gone: the remote must
        be asked."""
        at, id = self.engine.index.validated(entry.slot), self.engine.index.id_of(entry.slot)  # in this order: so it was this entry's
        return at if id == entry.id else 0

    def stamp(self, entry: Entry) -> tuple[int, int]:
        """Identifies an entry and its last validation: a different stamp means that there was another one since."""
        return entry.id, self.engine.index.stamp(entry.slot)

    def set_validated(self, several: Sequence[tuple[Entry, int]], began: int) -> None:
        """Note that entries were the version of the remote, each at a time of `now`, as a request found that ``began`` then."""
        self.engine.parts.note_validations([(entry, ns, began) for entry, ns in several])

    def invalidate(self, several: Sequence[Entry]) -> None:
        """Have the remote asked when these entries are next read: what a request that began before finds does not count."""
        expired = EXPIRED | self.now(exact=True)
        self.engine.parts.note_validations([(entry, expired, EXPIRED) for entry in several], at_once=True)

    @recover_and_retry
    def invalidate_keys(self, keys: Sequence[tuple[str, str]]) -> None:
        """`invalidate`, of the entries of these keys (space and key), and of what is being fetched for them, and for keys below them."""
        if self.root.read_only:
            return
        at = self.now(exact=True)
        for space, key in keys:
            self.engine.index.head.note_invalidation(key_hash(space, key), at)
        self.invalidate([entry for space, key in keys if (entry := self.entry(space, key)) is not None])

    # -- writing ---------------------------------------------------------------------------------------------------

    @recover_and_retry
    def put(
        self, space: str, key: str, data: Buffer, *, life: str = "cached", meta: str = "", validator: str | None = None,
        validated: int | None = None, timeout: float | None = None,
    ) -> Entry:  # fmt: skip
        """Store bytes. Raises `NoSpace` or another `CacheFault`; then the previous entry stays. ``validated``: see `Label`.

        In a space whose policy is ``wait`` the call waits up to ``timeout`` seconds while all bytes are in use, then raises `NoSpace`."""
        label = self._label(space, key, "", life, meta, validated)
        while True:
            try:
                entry = self.engine.parts.writers.put(label, [data], validator=validator)
            except errors.NoSpace as error:
                if self.spaces.limits_of(space).policy != Policy.WAIT or error.hopeless or isinstance(error, DiskFull):
                    raise
                self._wait_for_room(label, memoryview(data).nbytes, timeout, error)
                continue
            self.engine.counters.add(counters.BYTES_STORED, entry.size)
            return entry

    @recover_and_retry
    def put_pieces(self, space: str, key: str, pieces: Sequence[Buffer], *, life: str = "cached", meta: str = "") -> Entry:
        """`put` of bytes that are given in consecutive pieces. It waits a moment for other writes into the space."""
        entry = self.engine.parts.writers.put(self._label(space, key, "", life, meta), pieces, timeout=PATIENCE)
        self.engine.counters.add(counters.BYTES_STORED, entry.size)
        return entry

    def _label(
        self, space: str, key: str, suffix: str = "", life: str = "cached", meta: str = "", validated: int | None = None
    ) -> Label:  # fmt: skip
        """The label of an entry that is to be written."""
        self.engine.check_usable(writing=True)
        return self.engine.parts.writers.label(space, key, suffix, life, meta, validated)

    def _wait_for_room(self, label: Label, size: int, timeout: float | None, error: errors.NoSpace) -> None:
        from forebay._engine.space.free_space import SpaceRequest

        began = time.monotonic_ns()
        try:
            self.engine.parts.writers.budget.wait_for_room(SpaceRequest(label.space, label.key, 0, size), timeout)
        except errors.WaitTimeout as late:
            raise error from late
        finally:
            self.engine.counters.add(counters.WAIT_NS_SPACE, time.monotonic_ns() - began)

    @recover_and_retry
    def writing(
        self, space: str, key: str, *, suffix: str = "", life: str = "cached", meta: str = "", validated: int | None = None,
        resume: bool = True, on_progress: Callable[[int, int | None], None] | None = None, collect: int = 0, ahead: bool = False,
    ) -> Writing:  # fmt: skip
        """A write for a remote to fill that is asked not before ``validated``. Caller: holds the key's lock if ``resume``. ``collect``:
        see `Writing` and `publish_collected`; ``ahead``: see `Label`."""
        label = self._label(space, key, suffix, life, meta, validated)._replace(ahead=ahead)
        return self.engine.parts.writers.writing(label, resume=resume, on_progress=on_progress, collect=collect)

    @recover_and_retry
    def put_many(
        self, space: str, items: Sequence[tuple[str, Buffer]], *, life: str = "cached", validator: str | None = None,
        validated: int | None = None, ahead: bool = False,
    ) -> list[Entry]:  # fmt: skip
        """Store several values, some in each transaction. Raises what `put` raises; the values before the first failure stay. ``ahead``:
        see `Label`."""
        labelled = [(self._label(space, key, "", life, "", validated)._replace(ahead=ahead), data) for key, data in items]
        stored = self.engine.parts.writers.put_many(labelled, validator)
        self.engine.counters.add(counters.BYTES_STORED, sum(entry.size for entry in stored))
        return stored

    @recover_and_retry
    def publish_tree(
        self, space: str, key: str, members: Sequence[tuple[str, Lease]], *, life: str = "cached", meta: str = "",
        validator: str | None = None,
    ) -> Lease:  # fmt: skip
        """Publish a tree: a directory of hard links to leased entries under their relative names, and of the empty directories that
        ``meta`` names (see `folders_of`); returns a lease on it.

        Caller: no other process writes this key. The files are not evicted while the tree exists. Raises ValueError for names that lead out
        of the directory."""
        label = self._label(space, key, "", life, meta)
        entries_of = [(name, lease.entry) for name, lease in members]
        tree = self.engine.parts.writers.publisher.publish_tree(label, entries_of, validator)
        self.engine.parts.reading.note_tree(tree)
        return tree

    def holds(self, tree: Lease, part: Lease) -> bool:
        """Whether a leased tree has all files of another one."""
        with faults(tree.entry.key):
            return blobs.holds(self.root, tree.path, part.path)

    @recover_and_retry
    def extend_tree(self, tree: Lease, part: Lease) -> bool:
        """Add the files of a leased tree, which is sound, to another one, which was published with the ``meta`` that `blobs.grows` knows.
        False if that one is damaged: it is set aside, and the caller makes a new one.

        Caller: no other process extends the tree. The files are not evicted while it exists. Raises `NoSpace` or another `CacheFault`."""
        parts = self.engine.parts
        return parts.reading.is_extended(tree, *parts.writers.publisher.extend_tree(tree.entry, part.entry))

    @recover_and_retry
    def members(self, tree: Entry) -> list[tuple[str, Entry]]:
        """The files of a tree, as (relative name, entry)."""
        from forebay._engine.catalog import entries

        return entries.members(self.engine.parts.catalog, tree.id)

    def is_own_file(self, lease: Lease) -> bool:
        """Whether what is leased is one file of this root, which `publish_links` can give a second name."""
        return self.engine.parts.leases.is_own_file(lease)

    @recover_and_retry
    def put_held(self, space: str, key: str, data: Buffer) -> Lease:
        """Store bytes for as long as the returned lease, or a copy of it after a fork, is held. Raises `CacheFault`."""
        return self.engine.parts.writers.put_leased(self._label(space, key, life="held"), data)

    @recover_and_retry
    def publish_links(self, space: str, links: Sequence[tuple[str, Lease, str | None]], *, life: str = "cached") -> list[Lease]:
        """Give leased files of this root second names, in one transaction; tiny ones are copied. ``links``: key, file and validator of
        each. Returns leases on the new entries, each of which is charged as any other file. Raises `NoSpace` or another `CacheFault`."""
        labelled = [(self._label(space, key, life=life), lease, validator) for key, lease, validator in links]
        parts = self.engine.parts
        leases = parts.writers.publish_links(labelled, parts.reading.bytes_leased)
        self.count("bytes_stored", sum(lease.entry.size for lease in leases if lease.entry.kind == "value"))
        return leases

    def publish_collected(self, writings: Sequence[Writing], leased: Sequence[bool]) -> list[Entry | Lease]:
        """Publish writes with ``collect`` in one transaction, all or none. Returns leases on those that are to be ``leased``, which exist
        before anybody can see the entries; else the entries."""
        with self.engine.reopening():
            return self.engine.parts.writers.publish_collected(writings, leased)

    @recover_and_retry
    def set_meta(self, entry: Entry, meta: str) -> None:
        """Set the small text that an entry carries."""
        from forebay._engine.catalog import entries

        with self.engine.parts.catalog.write() as txn:
            entries.set_meta(txn, entry.id, meta)

    @recover_and_retry
    def set_life(self, space: str, key: str, life: str) -> bool:
        """Pin (``pinned``) or unpin (``cached``) a name. False if there is no such entry."""
        from forebay._engine.catalog import entries

        with self.engine.parts.catalog.write() as txn:
            is_set = entries.set_life(txn, txn.space(space), key, life)
        if life != "pinned":
            self.engine.parts.writers.ranking.forget_spared()
        return is_set

    # -- leaving ---------------------------------------------------------------------------------------------------

    def remove(self, victims: Iterable[Victim]) -> Report:
        """Remove entries; the report says which were removed. Those that are leased, pinned or part of a tree are spared."""
        from forebay._engine.space.eviction import batches

        every = victims if isinstance(victims, Sequence) else tuple(victims)
        # Trees go first: the files that they link are spared while they exist.
        trees = {id for batch in batches(every) for id in self._remove(batch, True)} if self._has_trees() else set()
        removed, spared, freed = list[str](), list[str](), 0
        for batch in batches(every):  # a plan reads its victims again: what is gone is in no later batch
            gone = trees | self._remove(batch, False)
            removed += [victim.name for victim in batch if victim.id in gone]
            spared += [victim.name for victim in batch if victim.id not in gone]
            freed += sum(victim.charge for victim in batch if victim.id in gone)
        if removed:
            self.engine.parts.writers.eviction.give_back()
        return Report(tuple(removed), tuple(spared), freed)

    @recover_and_retry
    def _has_trees(self) -> bool:
        from forebay._engine.catalog import entries

        return entries.any_trees(self.engine.parts.catalog)

    @recover_and_retry
    def _remove(self, victims: Sequence[Victim], trees: bool) -> set[int]:
        from forebay._engine.catalog import entries

        rows = entries.by_ids(self.engine.parts.catalog, [victim.id for victim in victims])
        mine = [entry for entry in rows if (entry.kind == "tree") is trees]
        with faults("entries to remove"):
            removed = {one.id for one in self.engine.parts.writers.eviction.remove(mine)} if mine else set()
        self.engine.evicted(len(removed))
        return removed

    def drop(self, unheld: Sequence[Entry]) -> int:
        """Remove entries that no process holds any more; returns how many were removed."""
        with faults("what nobody holds"):
            return len(self.engine.parts.writers.eviction.remove(unheld))

    @recover_and_retry
    def discard(self, entry: Entry) -> bool:
        """Remove one entry at once, even if it is pinned. False if it is gone or in use."""
        self.engine.check_usable(writing=True)
        if entry.life == "pinned":
            self.set_life(entry.space, entry.key, "cached")
        return bool(self._remove([Victim.of(entry)], entry.kind == "tree"))

    @recover_and_retry
    def ensure_room(self, space: str, files: Sequence[tuple[str, int]]) -> None:
        """Make room for files (key and size of each) that will be written one by one, evicting where needed. The room is not reserved.

        Raises `NoSpace`, so that a caller learns before the first byte that its files cannot be stored."""
        self.engine.check_usable(writing=True)
        with faults(space):
            self.engine.parts.writers.publisher.ensure_room(space, files)

    @recover_and_retry
    def make_room(self) -> bool:
        """Evict until the root is within its limits. False if the rest is in use."""
        with faults("a smaller cache"):
            self.engine.parts.writers.eviction.sweep()
            return self.engine.parts.writers.budget.fit()

    # -- seeing ----------------------------------------------------------------------------------------------------

    @recover_and_retry
    def entry(self, space: str, key: str) -> Entry | None:
        """The current entry of a key, which is not touched; None if there is none."""
        entry = self.engine.parts.leases.current(self.spaces.number(space), key)
        return self.engine.index.with_times(entry) if entry else None

    def is_leased(self, entry: Entry) -> bool:
        """Whether any process holds a lease on an entry."""
        with faults(entry.key):
            return bool(self.engine.parts.leases.leased_among([entry.id]))

    def count_hit(self, size: int) -> None:
        """Count a hit of ``size`` bytes."""
        counts, at = self.engine.counters.block()
        counts[at + counters.HITS] += 1
        counts[at + counters.BYTES_HIT] += size

    def count(self, name: str, n: int = 1) -> None:
        """Add ``n`` to the counter ``name``, one of `counters.NAMES`."""
        if n:
            self.engine.counters.add(counters.INDEX[name], n)

    @recover_and_retry
    def check(self, *, deep: bool = False) -> list[Problem]:
        """All problems of this root; empty if it is sound. ``deep`` reads every byte. A damaged catalog is reported, not recreated."""
        from forebay._engine import check

        try:
            problem = self.engine.parts.catalog.problem()
            if problem is None:
                problems = check.check(self.root, self.engine.parts.catalog, self.engine.index, deep=deep)
                others = [name for name in foreign(self.root.path) if not name.startswith("tmp/")]  # which are reported already
                what = "not created by Forebay, not in the budget: move it out"
                return [*problems, *(Problem("foreign", str(self.root.path / name), what) for name in others)]
        except CatalogBroken as error:
            if not error.damaged:
                raise
            problem = str(error)
        return [Problem("catalog", str(self.root.catalog), problem)]

    @recover_and_retry
    def strays(self) -> Strays:
        """The files in the root that no row counts."""
        from forebay._engine import check

        return check.count_strays(self.root, self.engine.parts.catalog, self.engine.index)

    @recover_and_retry
    def remove_strays(self) -> Strays:
        """Remove files of Forebay that no entry names; returns what was removed. Files that are leased or being written stay."""
        from forebay._engine import check
        from forebay._engine.catalog import making

        self.engine.check_usable(writing=True)
        parts = self.engine.parts
        before = check.count_strays(self.root, parts.catalog, self.engine.index)
        if not before.files:
            return Strays()
        if (problem := parts.catalog.problem()) is not None:  # it may have rows for them that are not found
            raise CatalogBroken(f"the catalog is damaged: {problem}", damaged=True)
        with faults("files that no entry names"):
            check.remove_strays(self.root, parts.catalog, self.engine.index, parts.writers.eviction, parts.writers.keys)
            making.remove_set_aside(self.root)
        left = check.count_strays(self.root, parts.catalog, self.engine.index)
        return Strays(max(before.files - left.files, 0), max(before.bytes - left.bytes, 0))

    def recover(self, error: CatalogBroken) -> None:
        """Recreate a broken catalog at once, for a thread that has no call to repeat."""
        self.engine.reopen(error, self.engine.recoveries)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Repair what `check` finds; returns what was repaired, including what had to be recovered to open the root."""
        self.engine.check_usable(writing=True)
        before, self.engine.recovered = self.engine.recovered, []
        problems = latest = self.check(deep=deep)
        if any(problem.kind == "catalog" for problem in latest):
            self.engine.reopen(CatalogBroken(f"the catalog is damaged: {latest[0].found}", damaged=True), self.engine.recoveries)
            latest = self.check(deep=deep)  # now that the rest can be checked
            problems = [*problems, *latest]
        if any(problem.kind == "slots" for problem in problems):
            self._rebuild_shared()
            problems += self.check(deep=deep)
        self._repair(problems)
        return [*before, *(problem for problem in problems if problem.kind != "foreign")]

    @recover_and_retry
    def _rebuild_shared(self) -> None:
        self.engine.parts.rebuild_shared()

    @recover_and_retry
    def _repair(self, problems: list[Problem]) -> None:
        from forebay._engine import check

        engine = self.engine
        check.repair(
            self.root,
            engine.parts.catalog,
            engine.index,
            engine.parts.writers.eviction,
            engine.parts.writers.keys,
            engine.parts.reading,
            problems,
        )


# The parent's thread that was opening a root, perhaps its first, does not exist in the child.
os.register_at_fork(after_in_child=lambda: setattr(Store, "_opening", threading.RLock()))
greenlets.when_patched(lambda: setattr(Store, "_opening", threading.RLock()))
