"""The one door to the engine: wires the parts of one root, and adds no mechanism of its own.

A process has one `Store` for a root, however often it opens it. Faults of the catalog are mended here, once a call: a catalog or
a root that was deleted or damaged is made anew; whatever else goes wrong reaches the caller as a `CacheFault`.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable
from typing import ClassVar, Concatenate, ParamSpec, TypeVar

from forebay import errors
from forebay._engine import check, counters
from forebay._engine.budget import Budget, Want
from forebay._engine.catalog import Catalog, CatalogBroken, entries, spaces
from forebay._engine.census import Census, Usage
from forebay._engine.counters import Counters
from forebay._engine.eviction import Doomed, Eviction
from forebay._engine.faults import faults
from forebay._engine.fill import Fill, KeyHold, OnWait
from forebay._engine.leases import Lease, Leases
from forebay._engine.memo import Hit, Memo, Remembered, no_hit
from forebay._engine.owners import Owners
from forebay._engine.policy import Policy
from forebay._engine.publish import Label, Publisher, Writing
from forebay._engine.ranking import Ranking
from forebay._engine.reading import Reading
from forebay._engine.root import Root, open_root
from forebay._engine.settings import Settings as Settings
from forebay._engine.settings import apply
from forebay._engine.slots import Slots
from forebay._kernel import host, waits
from forebay._model import Buffer, Entry, Problem, Report, Victim

log = logging.getLogger("forebay.store")
P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _mending(call: Callable[Concatenate[Store, P], R]) -> Callable[Concatenate[Store, P], R]:
    """Make a broken catalog anew, and try once more."""

    @functools.wraps(call)
    def mended(self: Store, *args: P.args, **kwargs: P.kwargs) -> R:
        self._usable()
        mends = self._mends
        try:
            return call(self, *args, **kwargs)
        except CatalogBroken as error:
            self._mend(error, mends)
            return call(self, *args, **kwargs)

    return mended  # type: ignore[return-value]  # a method keeps its name for self


class Store:
    """One root, as one process sees it. Callable from any thread, and in a forked child."""

    _opened: ClassVar[dict[str, Store]] = {}
    _opening: ClassVar[threading.RLock] = threading.RLock()  # guards _opened and every _users

    def __init__(self, root: Root, settings: Settings) -> None:
        self.root, self._users = root, 0
        self._mending = threading.RLock()  # guards _mends: one thread at a time makes a broken root anew
        self._mends = 0
        self._spaces: dict[str, spaces.Space] = {}
        self.memo, self.counters = Memo(Slots(root)), Counters(root)  # the hit paths hold on to these, whatever is made anew
        self._wire(root)
        self._start(settings)
        host.at_fork(self)

    # -- opening and closing ---------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | os.PathLike[str], settings: Settings, *, shared: bool = False, read_only: bool = False) -> Store:
        """The store of this root in this process, made at the first call. Each call wants a `close`.

        Raises `RootRefused`, `NewerFormat`, or `CacheFault` where the root cannot be used at all."""
        with cls._opening:
            root = open_root(path, shared=shared, read_only=read_only)
            name = f"{root.path}{':ro' if read_only else ''}"
            store = cls._opened.get(name)
            if store is None or not root.is_same() or store.root.id != root.id:
                with faults(str(root.path)):
                    store = cls._opened[name] = cls(root, settings)
            elif not read_only:
                store.configure(settings)
            store._users += 1
            return store

    def close(self) -> None:
        """Let go of one opening; the last one folds the counters and closes all files. Leases and buffers that are out stay good."""
        with Store._opening:
            self._users -= 1
            if self._users > 0:
                return
            Store._opened = {name: store for name, store in Store._opened.items() if store is not self}
        self.memo.restart(self._slots)
        for part in (self._owners, self._fill, self._budget, self._leases, self._catalog):
            part.close()

    def _wire(self, root: Root) -> None:
        self.root = root
        self.words = waits.Words(root.words, writable=not root.read_only)
        self._catalog = Catalog(root, self.words, immutable=root.read_only and not host.is_local(host.fs_kind(root.path)))
        self._slots = Slots(root)
        self.counters.detach()
        self._leases = Leases(root, self._catalog, self._slots)
        self.memo.restart(self._slots)
        self._owners = Owners(root, self._catalog, self.counters)
        self._eviction = Eviction(root, self._catalog, self._slots, self._leases, self.words)
        self._ranking = Ranking(self._catalog, self._slots)
        self._budget = Budget(root, self._catalog, self._owners, self._eviction, self._ranking, self.words)
        self._fill = Fill(root, self._catalog, self._owners, self.words)
        self._publisher = Publisher(root, self._catalog, self._slots, self._leases, self._owners, self._budget, self._eviction)
        self._catalog.sweeper = self._eviction.sweep
        self._forking = (self._catalog, self._budget, self._fill, self._owners, self._leases)
        self._reading = Reading(root, self._catalog, self._slots, self._leases, self.memo, self.counters)
        self._census = Census(self._catalog, self._slots, self._budget, self.counters)
        self._spaces = {}

    def _start(self, settings: Settings) -> None:
        try:
            self._catalog.open()
        except CatalogBroken:
            if self.root.read_only:
                raise
            self._catalog.rebuild()
        if self.root.read_only:
            return
        self._slots.ensure(0)
        self._owners.me()
        self._clean_after_reboot()
        self.configure(settings)

    def _clean_after_reboot(self) -> None:
        """Before this boot's first reservation: files that the machine's crash left without a row go."""
        if spaces.setting(self._catalog, "boot") == host.boot_id():
            return
        check.remove_strays(self.root, self._catalog, self._eviction, self._fill)
        with self._catalog.write() as txn:
            spaces.set_setting(txn, "boot", host.boot_id())

    def configure(self, settings: Settings) -> None:
        """Set what is given, for everybody; a lower limit is applied at once to what is there."""
        self._in_force = apply(settings, self.root, self._catalog, self._budget, self._owners)

    def _usable(self, *, writing: bool = False) -> None:
        if writing and self.root.read_only:
            raise errors.CacheFault(f"{self.root.path} is read-only")
        if host.forked_unseen():
            raise errors.CacheFault("this process was forked by C code, which ran no hook: it reads past the cache")

    def _mend(self, error: CatalogBroken, mends: int) -> None:
        """The catalog, or the whole root, is not what was opened: open it once more, making what is missing. ``mends``: how often that
        was done when the call began that failed; another thread may have done it meanwhile."""
        if self.root.read_only:
            raise error
        with self._mending, faults(str(self.root.path)):
            if self._mends != mends:
                return
            log.warning("%s: opening it anew", error)
            root = open_root(self.root.path, shared=self.root.shared)
            if root.id != self.root.id or not self._slots.is_same():
                self._catalog.close()
                self._wire(root)
            elif error.damaged:
                self._catalog.rebuild()
            self.memo.restart(self._slots)
            self._spaces = {}
            self._owners.forget()
            self._start(self._in_force)
            self._mends += 1

    # -- spaces ----------------------------------------------------------------------------------------------------

    @_mending
    def space(self, name: str, *, kind: str = "values", policy: str | None = None, quota: int | None = None) -> spaces.Space:
        """The space of this name, made if there is none; an explicit policy or quota is set for everybody."""
        known = self._spaces.get(name)
        if known is not None and policy is None and quota is None:
            return known
        found = spaces.find(self._catalog, name)
        if self.root.read_only:
            return found or spaces.Space(0, name, kind, "lru", None)
        if found is None or (policy or found.policy, quota or found.quota) != (found.policy, found.quota):
            parsed = str(Policy.parse(policy)) if policy else None
            with self._catalog.write() as txn:
                spaces.insert(txn, name, kind, parsed or "lru", quota)
                spaces.change(txn, name, parsed, quota)
                found = spaces.find(txn, name)
        assert found is not None
        self._spaces[name] = found
        return found

    # -- reading ---------------------------------------------------------------------------------------------------

    def hitter(self, space: str) -> Hit:
        """See `Memo.hitter`. In a read-only root there is nothing to touch: every hit goes the long way."""
        return self.memo.hitter(space, self.counters) if not self.root.read_only else no_hit

    @_mending
    def view(self, space: str, key: str) -> Remembered | None:
        """The bytes of a key, mapped, and remembered for the next time; None where there is none. Counts and touches nothing."""
        if not self.root.read_only:
            self._owners.me()
        return self._reading.view(space, self.space(space).id, key)

    @_mending
    def lease(self, space: str, key: str) -> Lease | None:
        """A lease on the file of a key, touched; None where there is none, or it is a small value, which has no file."""
        lease = self._reading.lease(self.space(space).id, key)
        if lease is not None:
            self.touch(lease.entry)
        return lease

    def alias(self, space: str, name: str, found: Remembered) -> None:
        """Let another name of an entry, such as a URL as the caller writes it, lead to it."""
        self.memo.alias(space, name, found)

    def touch(self, entry: Entry) -> None:
        """Say that an entry is used now."""
        if self._slots.id_of(entry.slot) == entry.id:
            self._slots.touch(entry.slot, host.now_ns())

    def validated(self, entry: Entry) -> int:
        """When an entry was last seen to be the remote's: nanoseconds since 1970; 0: ask."""
        return self._slots.validated(entry.slot)

    def set_validated(self, entry: Entry, ns: int) -> None:
        if self._slots.id_of(entry.slot) == entry.id:
            self._slots.set_validated(entry.slot, ns)

    # -- writing ---------------------------------------------------------------------------------------------------

    @_mending
    def put(
        self, space: str, key: str, data: Buffer, *, life: str = "cached", meta: str = "", validator: str | None = None,
        timeout: float | None = None,
    ) -> Entry:  # fmt: skip
        """Store bytes. Raises `NoSpace` or another `CacheFault`; what was there before then stays.

        In a space whose policy is ``wait`` it waits while all bytes are held: at most ``timeout`` seconds, then `NoSpace`."""
        self._usable(writing=True)
        place = self.space(space)
        label = Label(place.id, place.name, key, life=life, meta=meta)
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
        began = host.now_ns()
        try:
            self._budget.wait_for_room(Want(label.space, label.key, 0, size), timeout)
        except errors.WaitTimeout as late:
            raise error from late
        finally:
            self.counters.add(counters.WAIT_NS_SPACE, host.now_ns() - began)

    @_mending
    def writing(
        self, space: str, key: str, *, suffix: str = "", life: str = "cached", meta: str = "", resume: bool = True,
        on_progress: Callable[[int, int | None], None] | None = None,
    ) -> Writing:  # fmt: skip
        """A write that a remote fills. Caller: holds the key's lock where ``resume``."""
        self._usable(writing=True)
        place = self.space(space)
        return Writing(self._publisher, Label(place.id, place.name, key, suffix, life, meta), resume=resume, on_progress=on_progress)

    def publish_leased(self, writing: Writing, *, validator: str | None = None) -> Lease:
        """Publish, and give a lease that nobody can come before."""
        return writing.publish_leased(self._leases, validator=validator)

    def single(
        self, space: str, key: str, look: Callable[[], T | None], make: Callable[[], T], *,
        timeout: float | None = None, on_wait: OnWait | None = None,
    ) -> T:  # fmt: skip
        """See `Fill.single`. ``make`` runs once: a catalog that breaks meanwhile is mended by the next call."""
        self._usable(writing=True)
        place, mends = self.space(space), self._mends
        try:
            return self._fill.single(place.id, key, look, make, timeout=timeout, on_wait=on_wait)
        except CatalogBroken as error:
            self._mend(error, mends)
            raise

    @_mending
    def hold(self, space: str, key: str, *, timeout: float | None = None) -> KeyHold:
        """The key's lock: of all threads and processes one has it. Any thread may let go."""
        return self._fill.hold(self.space(space).id, key, timeout=timeout)

    @_mending
    def set_life(self, space: str, key: str, life: str) -> bool:
        """Pin (``pinned``) or unpin (``cached``) a name. False if there is no such entry."""
        with self._catalog.write() as txn:
            return entries.set_life(txn, self.space(space).id, key, life)

    # -- leaving ---------------------------------------------------------------------------------------------------

    @_mending
    def remove(self, wanted: Iterable[Victim]) -> Report:
        """Remove entries; the report says what really went. What is leased, pinned or part of a tree is spared."""
        by_id = {victim.id: victim for victim in wanted}
        rows = [entry for entry in entries.live(self._catalog) if entry.id in by_id]
        with faults("entries to remove"):
            gone = self._eviction.remove([(e.id, e.slot, Doomed(e.id, e.kind, e.suffix)) for e in rows])
        removed = {doomed.id for doomed in gone}
        self.counters.add(counters.EVICTIONS, len(removed))
        return Report(
            tuple(v.name for v in by_id.values() if v.id in removed),
            tuple(v.name for v in by_id.values() if v.id not in removed),
            sum(v.charge for v in by_id.values() if v.id in removed),
        )

    @_mending
    def make_room(self) -> bool:
        """Evict what is over the limits. False if what is left is in use."""
        with faults("a smaller cache"):
            self._eviction.sweep()
            return self._budget.make_room()

    # -- seeing ----------------------------------------------------------------------------------------------------

    @_mending
    def entries(self, space: str | None = None) -> list[Entry]:
        """What is there, with its times, in order of last use; ``leased`` is not looked at."""
        return self._census.entries(self.space(space).id if space is not None else None)

    @_mending
    def entry(self, space: str, key: str) -> Entry | None:
        """What the catalog says of a key; no touch."""
        found = self._leases.current(self.space(space).id, key)
        return self._census.with_times(found) if found else None

    def is_leased(self, entry: Entry) -> bool:
        return not self.root.read_only and self._leases.is_leased(entry.id)

    @_mending
    def usage(self) -> Usage:
        """How much is used and promised now."""
        return self._census.usage()

    def count(self, name: str, n: int = 1) -> None:
        """Count ``n`` more of what `counters.NAMES` calls ``name``."""
        self.counters.add(counters.NAMES.index(name), n)

    @_mending
    def counts(self) -> dict[str, int]:
        """What all processes together have counted since the last `zero_counts`."""
        return self._census.counts()

    @_mending
    def zero_counts(self) -> None:
        """Begin to count anew, for all processes."""
        self._census.zero_counts()

    @_mending
    def check(self, *, deep: bool = False) -> list[Problem]:
        """Everything that is wrong with this root; empty: it is sound. ``deep`` reads every byte."""
        return check.check(self.root, self._catalog, self._slots, self._budget, deep=deep)

    @_mending
    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Mend what `check` finds; gives what was mended."""
        self._usable(writing=True)
        found = self.check(deep=deep)
        if any(problem.kind == "catalog" for problem in found):
            self._mend(CatalogBroken(f"the catalog of {self.root.path} is damaged", damaged=True), self._mends)
        check.mend(self.root, self._catalog, self._eviction, self._fill, self._reading, found)
        return found

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        for part in self._forking:  # the catalog first: a thread inside a transaction takes the mutexes of the others
            part.before_fork()

    def after_fork_parent(self) -> None:
        for part in reversed(self._forking):
            part.after_fork_parent()

    def after_fork_child(self) -> None:
        Store._opening = threading.RLock()
        self._mending = threading.RLock()
        for part in (*self._forking, self.memo, self._ranking):
            part.after_fork_child()
