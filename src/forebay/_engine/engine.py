"""The parts of one root, put together: opened once a process, mended where the catalog or the root broke, told of forks."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable
from typing import ClassVar, Concatenate, ParamSpec, Self, TypeVar

from forebay import errors
from forebay._engine import check
from forebay._engine.budget import Budget
from forebay._engine.catalog import Catalog, CatalogBroken, entries, people, spaces
from forebay._engine.census import Census
from forebay._engine.counters import Counters
from forebay._engine.displace import Displacing
from forebay._engine.eviction import Eviction
from forebay._engine.faults import faults
from forebay._engine.fill import Fill
from forebay._engine.intent import Intent
from forebay._engine.leases import Leases
from forebay._engine.linking import Linking
from forebay._engine.memo import Memo
from forebay._engine.owners import Owners
from forebay._engine.packing import Packing
from forebay._engine.publish import Publisher
from forebay._engine.ranking import Ranking
from forebay._engine.reading import Reading
from forebay._engine.root import Root, open_root
from forebay._engine.settings import Settings, apply
from forebay._engine.slots import Slots
from forebay._kernel import host, locks, waits
from forebay._model import Entry

log = logging.getLogger("forebay.engine")
P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound="Engine")


def mending(call: Callable[Concatenate[E, P], R]) -> Callable[Concatenate[E, P], R]:
    """Make a broken catalog, or a root that was deleted, anew, and try once more."""

    @functools.wraps(call)
    def mended(self: E, *args: P.args, **kwargs: P.kwargs) -> R:
        self.check_usable()
        mends = self.mends
        try:
            return call(self, *args, **kwargs)
        except CatalogBroken as error:
            broken = error
        except FileNotFoundError as error:  # of a lock file, such as the first one that is asked for
            if self.root.is_same():
                raise
            broken = CatalogBroken(f"the root {self.root.path} was deleted: {error.strerror}")
        self.mend(broken, mends)
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
        self._spaces: dict[str, spaces.Space] = {}
        self.memo, self.counters = Memo(Slots(root)), Counters(root)  # the hit paths hold on to these, whatever is made anew
        self._wire(root)
        self._start(settings)
        host.at_fork(self)

    # -- opening and closing ---------------------------------------------------------------------------------------

    @classmethod
    def open(cls, path: str | os.PathLike[str], settings: Settings, *, shared: bool = False, read_only: bool = False) -> Self:
        """The store of this root in this process, made at the first call. Each call wants a `close`.

        Raises `RootRefused`, `NewerFormat`, or `CacheFault` where the root cannot be used at all."""
        with cls._opening:
            root = open_root(path, shared=shared, read_only=read_only)
            name = f"{root.path}{':ro' if read_only else ''}"
            store = cls._opened.get(name)
            if not isinstance(store, cls) or not root.is_same() or store.root.id != root.id:
                with faults(str(root.path)):
                    store = cls._opened[name] = cls(root, settings)
            elif not read_only:
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
        for part in (self._owners, self._fill, self._budget, self._leases, self._catalog):
            part.close()
        self._format.close()

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
        self._budget = Budget(root, self._catalog, self._owners, self._eviction, self._ranking, self.words, self.counters)
        self._budget.drop_dead = self.memo.drop_dead
        self._fill = Fill(root, self._catalog, self._owners, self.words, self.counters)
        displacing = Displacing(self._budget, self._eviction, self._ranking, self.counters)
        self._intent = Intent(root, self._catalog, self._slots)
        self._publisher = Publisher(root, self._catalog, self._slots, self._owners, self._budget, displacing, self._intent)
        self._linking = Linking(root, self._catalog, self._slots, self._budget, self._publisher)
        self._packing = Packing(root, self._catalog, self._leases, self._owners, self._budget, self._publisher)
        self._budget.any_tails, self._budget.reclaim_tails = self._packing.any_left, self._packing.reclaim
        self._recover = self._intent.recover
        self._catalog.sweeper = self._eviction.sweep
        self._forking = (self._catalog, self._budget, self._fill, self._owners, self._leases)
        self._reading = Reading(root, self._catalog, self._slots, self._leases, self.memo, self.counters)
        self._format = locks.LockFile(root.path / "FORMAT", writable=False)
        self._census = Census(self._catalog, self._slots, self.counters)
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
        self._format.try_lock(0, exclusive=False)  # a later version migrates a root only when nobody holds this
        self._have_slots()
        self._catalog.recover = self._recover
        self._catalog.make_ballast()
        if settings != Settings():
            self._owners.me()  # who sets something is seen by others who do; else a process registers when it first reads or writes
        self._clean_after_reboot()
        if entries.held(self._catalog, 0, 1):  # perhaps of processes that are dead
            self._eviction.sweep()
        self.configure(settings)

    def _have_slots(self) -> None:
        try:
            self._slots.ensure(0)
        except errors.CacheFault as error:
            log.warning("%s: making it anew", str(error))
            with self._catalog.writer():
                self._slots.remove_foreign()
            self._slots.ensure(0)

    def _clean_after_reboot(self) -> None:
        """Before this boot's first reservation: files that the machine's crash left without a row go."""
        if spaces.setting(self._catalog, "boot") == host.boot_id():
            return
        check.remove_strays(self.root, self._catalog, self._eviction, self._fill)
        with self._catalog.write() as txn:
            people.forget_failures(txn)
            spaces.set_setting(txn, "boot", host.boot_id())

    def configure(self, settings: Settings) -> None:
        """Set what is given, for everybody; a lower limit is applied at once to what is there."""
        self._in_force = apply(settings, self.root, self._catalog, self._budget, self._owners)

    @mending
    def register(self) -> None:
        """Be one of those that have the root open: from then on others see what this process counts."""
        if not self.root.read_only:
            self._owners.me()

    def touch(self, entry: Entry) -> None:
        """Say that an entry is used now."""
        if self._slots.id_of(entry.slot) == entry.id:
            self._slots.touch(entry.slot, host.now_ns())

    def check_usable(self, *, writing: bool = False) -> None:
        if writing and self.root.read_only:
            raise errors.ReadOnly.of(self.root.path)
        if host.forked_unseen():
            raise errors.CacheFault("this process was forked by C code, which ran no hook: it reads past the cache")

    def mend(self, error: CatalogBroken, mends: int) -> None:
        """The catalog, or the whole root, is not what was opened: open it once more, making what is missing. ``mends``: how often that
        was done when the call began that failed; another thread may have done it meanwhile."""
        if self.root.read_only:
            raise error
        with self._mending, faults(str(self.root.path)):
            if self.mends != mends:
                return
            log.warning("%s: opening it anew", str(error))
            root = open_root(self.root.path, shared=self.root.shared)
            if root.id != self.root.id or not self._slots.is_same() or not self._catalog.has_its_lock():
                for part in (self._fill, self._budget, self._leases, self._catalog):
                    part.close()
                self._wire(root)
            elif error.damaged:
                self._catalog.rebuild()
            self.memo.restart(self._slots)
            self._spaces = {}
            self._owners.forget()
            self._start(self._in_force)
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
