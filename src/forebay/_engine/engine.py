"""The parts of one root, put together: opened once a process, mended where the catalog or the root broke, told of forks."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import ClassVar, Concatenate, ParamSpec, Self, TypeVar

from forebay import errors
from forebay._engine import check
from forebay._engine.catalog import Catalog, CatalogBroken, DiskFull, entries, processes, spaces
from forebay._engine.files import settings_file
from forebay._engine.files.faults import SCARCE, faults
from forebay._engine.files.root import Root, open_root
from forebay._engine.index.counters import Counters
from forebay._engine.index.hosts import SilentHosts
from forebay._engine.index.memo import Memo
from forebay._engine.index.slots import RECORDS, Slots, SlotsBroken, SlotsReplaced
from forebay._engine.locks.fill import Fill
from forebay._engine.locks.leases import Leases
from forebay._engine.locks.owners import Owners
from forebay._engine.packs.packing import Packing
from forebay._engine.reading import Reading
from forebay._engine.space.budget import Budget
from forebay._engine.space.eviction import Eviction
from forebay._engine.space.inline_eviction import InlineEviction
from forebay._engine.space.ranking import Ranking
from forebay._engine.space.settings import Settings, apply, keep
from forebay._engine.stats import StatsReader
from forebay._engine.write.intent import Intent
from forebay._engine.write.link import Linker
from forebay._engine.write.publish import Publisher
from forebay._kernel import host, locks, waits
from forebay._logs import logger
from forebay._model import Entry, Problem

log = logger("forebay.engine")
P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound="Engine")


ATTEMPTS = 3


def mending(call: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Make a broken catalog, or a root that was deleted, anew, and try again. So where the disk is full, once the ballast made room.

    Whatever else the system refuses, such as one more open file, is a `CacheFault`."""

    @functools.wraps(call)
    def mended(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        mends = self.mends
        try:
            self.check_usable()
            return call(self, *args, **kwargs)
        except (DiskFull, SlotsBroken, CatalogBroken, OSError) as error:
            try:
                with faults(str(self.root.path)):
                    self.recover_from(error, mends)
                    return call_again(self, *args, **kwargs)
            finally:
                if self.mends != mends:
                    self._catalog.trust()  # what another call meets later has nothing to do with this

    def call_again(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        for _ in range(ATTEMPTS - 2):  # damage that does not show in the pages is mended the second time that it is met
            mends = self.mends
            try:
                return call(self, *args, **kwargs)
            except (DiskFull, SlotsBroken, CatalogBroken, OSError) as error:
                self.recover_from(error, mends)
        return call(self, *args, **kwargs)

    return mended  # type: ignore[return-value]  # a method keeps its name for self


class Engine:
    """One root, as one process sees it. Callable from any thread, and in a forked child."""

    _opened: ClassVar[dict[str, Engine]] = {}
    _opening: ClassVar[threading.RLock] = threading.RLock()  # guards _opened and every _users

    def __init__(self, root: Root, settings: Settings) -> None:
        self.root, self._users = root, 0
        self._mending = threading.RLock()  # guards mends: one thread at a time makes a broken root anew
        self.mends = 0
        self.recovered: list[Problem] = []
        """What was mended so that the root could be opened, until `Store.repair` has told it."""
        # What is to be set by the next call that writes: of the root, and of spaces (policy, quota, number of entries).
        self._unset: Settings | None = None
        self._lower = False  # a lower limit was set, and is to be applied to what is there
        self._unset_spaces: dict[str, tuple[str | None, int | None, int | None]] = {}
        self._spaces: dict[str, spaces.SpaceRow] = {}
        self.memo, self.counters = Memo(Slots(root)), Counters(root)  # the hit paths hold on to these, whatever is made anew
        self._wire(root)
        self._start(settings)
        self._catalog.trust()
        host.at_fork(self)

    # -- opening and closing ---------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | os.PathLike[str], settings: Settings, *, shared: bool = False, read_only: bool = False) -> Self:
        """The store of this root in this process, made at the first call. Each call wants a `close`.

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
            if not isinstance(store, cls) or not root.is_same() or store.root.id != root.id:
                with faults(str(root.path)):
                    store = cls._opened[name] = cls(root, settings)
            elif not root.read_only:
                store.configure(settings)
            store._users += 1
            return store

    def close(self) -> None:
        """Let go of one opening; the last one folds the counters and closes all files. Leases and buffers that are out stay good."""
        with Engine._opening:
            self._users -= 1
            if self._users > 0:
                return
            Engine._opened = {name: store for name, store in Engine._opened.items() if store is not self}
        self.memo.restart(self._slots)
        for part in (self._owners, self._fill, self._budget, self._leases, self._catalog, self.counters):
            part.close()
        self._format.close()

    def _wire(self, root: Root) -> None:
        self.root, self.hosts = root, SilentHosts(root)
        self.words = waits.Words(root.words, root.files.open, writable=not root.read_only)
        self._catalog = Catalog(root, self.words, immutable=root.read_only and not host.is_local(host.fs_kind(root.path)))
        self._slots = Slots(root)
        self.counters.detach()
        self._leases = Leases(root, self._catalog, self._slots)
        self.memo.restart(self._slots)
        self._owners = Owners(root, self._catalog)
        self._eviction = Eviction(root, self._catalog, self._slots, self._leases, self.words)
        self._ranking = Ranking(self._catalog, self._slots)
        self._budget = Budget(root, self._catalog, self._owners, self._eviction, self._ranking, self.words, self.counters)
        self._budget.drop_dead = self.memo.drop_dead
        self._fill = Fill(root, self._catalog, self._owners, self.words, self.counters)
        displacing = InlineEviction(self._budget, self._eviction, self._ranking, self.counters)
        self._intent = Intent(root, self._catalog, self._slots)
        self._publisher = Publisher(root, self._catalog, self._slots, self._owners, self._budget, displacing, self._intent)
        self._linking = Linker(root, self._catalog, self._slots, self._budget, self._publisher)
        self._packing = Packing(root, self._catalog, self._leases, self._owners, self._budget, self._publisher)
        self._budget.any_tails, self._budget.reclaim_tails = self._packing.any_left, self._packing.reclaim
        self._catalog.sweeper = self._eviction.sweep
        self._forking = (self._catalog, self._budget, self._fill, self._owners, self._leases)
        self._reading = Reading(root, self._catalog, self._slots, self._leases, self.memo, self.counters)
        self._format = locks.LockFile(root.path / "FORMAT", root.files.open, writable=False)
        self._census = StatsReader(root, self._catalog, self._slots, self.counters, self._leases)
        self._spaces = {}

    def _start(self, settings: Settings, before: Settings | None = None) -> None:
        """``before``: what was in force for this process, for a root that was made anew meanwhile."""
        for _ in range(ATTEMPTS - 1):
            try:
                self._begin(settings, before)
            except DiskFull as error:
                if not self._catalog.ballast.give_up(error):
                    raise
            except CatalogBroken as error:
                if self.root.read_only:
                    raise
                self._catalog.rebuild(str(error))
                self.recovered.append(Problem("catalog", str(self.root.catalog), str(error)))
            else:
                return
        self._begin(settings, before)

    def _begin(self, settings: Settings, before: Settings | None) -> None:
        self._catalog.open()
        if self._catalog.lost and not self.recovered:  # it was deleted
            self.recovered.append(Problem("catalog", str(self.root.catalog), self._catalog.lost))
        if self.root.read_only:
            return
        self._format.try_lock(0, exclusive=False)  # a later version migrates a root only when nobody holds this
        if not self._slots.is_whole(0):
            self.remake_slots()
        self._catalog.recover = self._recover
        self._catalog.ballast.make()
        if settings != Settings():
            self.counters.claim()  # who sets something is seen by others who do; else a process is when it first counts something
        try:
            if self._slots.intent() or self._owners.any_dead():
                with self._catalog.write(0) as txn:  # one that writes now has seen to it
                    self._owners.reap(txn)
            self._clean_after_reboot()
            if entries.held(self._catalog, 0, 1):  # perhaps of processes that are dead
                with waits.patience(0):
                    self._eviction.sweep()
        except errors.WriterBusy as error:  # it is to be read from all the same; the next that opens it sweeps
            log.info("%s: not swept: %s", self.root.path, str(error))
        self._configure(settings, before)
        self._keep_settings()

    def remake_slots(self) -> None:
        """Make what is lost or damaged of the table of slots anew, of the catalog."""
        with self._catalog.writer(), faults(str(self.root.slots_dir)):
            for chunk in check.chunks_of(self._catalog, self._slots):
                if self._slots.is_whole(chunk):
                    continue
                live = entries.living_in(self._catalog, chunk * RECORDS, (chunk + 1) * RECORDS)
                if live:
                    log.warning(
                        "%s: part %d of the table of slots is lost or damaged: it is made anew; when its %d entries were used is lost",
                        self.root.path, chunk, len(live),
                    )  # fmt: skip
                self._slots.remake(chunk, live)
            self.memo.restart(self._slots)  # what it knows of the part that is lost

    def go_over(self, error: SlotsReplaced, mends: int) -> None:
        """Another process made the table of slots anew, or somebody removed it: go on with what lies there. ``mends``: see `mend`."""
        if not self.root.read_only:
            self.mend(CatalogBroken(str(error)), mends)
        else:
            self._slots.forget()
            self.memo.restart(self._slots)

    def _recover(self) -> None:
        """Before a transaction: what one who died left half done is ended, in the table of slots that all others have too."""
        if not self._slots.are_same():
            raise CatalogBroken(f"the table of slots in {self.root.slots_dir} was replaced")
        self._intent.recover()

    def _clean_after_reboot(self) -> None:
        """Before this boot's first reservation: files that the machine's crash left without a row go."""
        if spaces.setting(self._catalog, "boot") == host.boot_id():
            return
        check.remove_strays(self.root, self._catalog, self._eviction, self._fill)
        with self._catalog.write() as txn:
            processes.forget_failures(txn)
            spaces.set_setting(txn, "boot", host.boot_id())

    @mending
    def configure(self, settings: Settings) -> None:
        """Set what is given, for everybody; a lower limit is applied at once to what is there. Where the catalog is busy, the next call
        that writes sets it."""
        self._configure(settings)

    def _configure(self, settings: Settings, before: Settings | None = None) -> None:
        given = settings != Settings()
        if given and self._unset is not None:
            settings = settings.over(self._unset)
        try:
            self._in_force, applied = apply(settings, self.root, self._catalog, self._budget, self.counters, before)
            self._lower = self._lower or not applied
            if given:
                self._unset = None
            if self._lower and applied:
                self._budget.make_room()
                self._lower = False
        except errors.WriterBusy as error:
            self._in_force = settings
            if given or self._unset is None:
                self._unset = settings
            log.warning("%s: budget, min_free and max_entries are not set yet, and will be by a later call: %s", self.root.path, str(error))

    def _keep_settings(self) -> None:
        """Whoever set something was killed before it stood beside the catalog, or somebody removed that file."""
        if settings_file.says(self.root, spaces.kept(self._catalog)):
            return
        try:
            with self._catalog.writer(0):
                keep(self.root, self._catalog)
        except errors.CacheFault as error:  # busy: the next open does it
            log.info("%s: what is set was not noted: %s", self.root.path, str(error))

    def register(self) -> None:
        """Let others see what this process counts, if they could not until now."""
        self.counters.claim()

    def touch(self, entry: Entry) -> None:
        """Say that an entry is used now."""
        if self._slots.id_of(entry.slot) == entry.id:
            self._slots.touch(entry.slot, self._slots.clock.now())

    def now(self, *, exact: bool = False) -> int:
        """Nanoseconds of the root's clock, which never goes back; about those since 1970. ``exact``: not before what any process saw, even
        within a second after the machine's clock was set."""
        clock = self._slots.clock
        return clock.look() if exact else clock.now()

    def check_usable(self, *, writing: bool = False) -> None:
        if writing and self.root.read_only:
            raise errors.ReadOnly.of(self.root.path)
        if host.forked_unseen():
            raise errors.CacheFault("this process was forked by C code, which ran no hook: it reads past the cache")
        if writing and (self._unset is not None or self._lower):
            self._set_late()

    def _set_late(self) -> None:
        """What could not be set when the root was opened: before anything is written that it may forbid."""
        with self._mending:
            # `apply` may come here again.
            unset, self._unset, lower, self._lower = self._unset, None, self._lower, False
            try:
                if unset is not None:
                    self._in_force, applied = apply(unset, self.root, self._catalog, self._budget, self.counters)
                    unset, lower = None, lower or not applied
                if lower:
                    self._budget.make_room()
            except BaseException:
                self._unset, self._lower = unset, lower
                raise

    def recover_from(self, error: Exception, mends: int) -> None:
        """Do what lets a call succeed that failed with ``error``, or raise that. ``mends``: see `mend`."""
        if isinstance(error, SlotsReplaced):
            self.go_over(error, mends)
        elif isinstance(error, SlotsBroken) and not self.root.read_only:
            try:
                self.remake_slots()
            except CatalogBroken as broken:  # it knows of more slots than it has entries
                self.mend(broken, mends)
        elif isinstance(error, CatalogBroken):
            self.mend(error, mends)
        elif isinstance(error, FileNotFoundError) and not self.root.is_same():  # of a lock file, such as the first one that is asked for
            self.mend(CatalogBroken(f"the root {self.root.path} was deleted: {error.strerror}"), mends)
        elif not (isinstance(error, DiskFull) and error.relieved):
            raise error

    def mend(self, error: CatalogBroken, mends: int) -> None:
        """The catalog, or the whole root, is not what was opened: open it once more, making what is missing. ``mends``: how often that
        was done when the call began that failed; another thread may have done it meanwhile."""
        if self.root.read_only:
            raise error
        with self._mending, faults(str(self.root.path)):
            if self.mends != mends:
                return
            tell = log.info if error.damaged else log.warning
            tell("%s: opening it anew", str(error))
            root = open_root(self.root.path, shared=self.root.shared)
            if root.id != self.root.id or not self._slots.is_same() or not self._catalog.has_its_lock():
                for part in (self._fill, self._budget, self._leases, self._catalog):
                    part.close()
                self._wire(root)
            elif error.damaged:
                self._catalog.rebuild(str(error))
            self.memo.restart(self._slots)
            self._spaces = {}
            self._owners.forget()
            self._start(Settings(), self._in_force)
            self.mends += 1

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        for part in self._forking:  # the catalog first: a thread inside a transaction takes the mutexes of the others
            part.before_fork()
        self._format.before_fork(keep=True)

    def after_fork_parent(self) -> None:
        self._format.after_fork_parent()
        for part in reversed(self._forking):
            part.after_fork_parent()

    def after_fork_child(self) -> None:
        Engine._opening = threading.RLock()
        self._mending = threading.RLock()
        for part in (*self._forking, self.memo, self._ranking, self._publisher, self._packing):
            part.after_fork_child()
        self._format.after_fork_child(keep=True)
