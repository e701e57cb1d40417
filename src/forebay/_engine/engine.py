"""The parts of one root, and their recovery: what is deleted or damaged is recreated, and the call that met it is tried again."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from forebay import errors
from forebay._config import format_size
from forebay._engine.catalog import Catalog, CatalogBroken, DiskFull, entries, recovery, schema, spaces
from forebay._engine.catalog.transactions import SKIPPED, number_below
from forebay._engine.files.faults import faults
from forebay._engine.files.root import Root, open_root
from forebay._engine.index.adaptive import AdaptiveSpaces
from forebay._engine.index.counters import EVICTIONS, Counters
from forebay._engine.index.head import NEXT, NUMBERS, SharedBroken, SharedHead, SharedReplaced
from forebay._engine.index.history import History
from forebay._engine.index.hosts import SilentHosts
from forebay._engine.index.memo import Memo
from forebay._engine.index.records import ID, SPACE, USED, EntryIndex
from forebay._engine.index.settings import OF_TRANSFERS, RootLimits, Settings, SharedSettings, differences, shown
from forebay._engine.locks.leases import Leases
from forebay._engine.locks.owners import Owners
from forebay._engine.reading import Reading
from forebay._kernel import events, host, locks, waits
from forebay._logs import logger
from forebay._model import Entry, Problem

if TYPE_CHECKING:
    from forebay._engine.index.limits import NodeLimits
    from forebay._engine.stats import StatsReader
    from forebay._engine.writers import Writers

log = logger("forebay.engine")
log_of_settings = logger("forebay.settings")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasEngine")


ATTEMPTS = 3
VALIDATE_SOON = 0.02
"""Seconds that a validation waits for the writer lock."""
_MOST = 10_000


class HasEngine(Protocol):
    """A part of the store that calls into the engine of its root."""

    @property
    def engine(self) -> Engine: ...


def recover_and_retry(call: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Recreate a broken catalog or a deleted root and call again; on a full disk, call again once the ballast has made room.

    Any other refusal of the system, such as one more open file, becomes a `CacheFault`."""

    @functools.wraps(call)
    def retrying(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        engine = self.engine
        recoveries = engine.recoveries
        try:
            engine.check_usable()
            return call(self, *args, **kwargs)
        except (DiskFull, SharedBroken, CatalogBroken, OSError) as error:
            return engine.retry(functools.partial(call, self, *args, **kwargs), error, recoveries)

    return retrying  # type: ignore[return-value]  # a method keeps its name for self


class Engine:
    """The parts of one root in one process. Callable from any thread, and in a forked child.

    A recovery replaces the parts: callers get the part that they need from here at each call."""

    def __init__(self, root: Root, settings: Settings) -> None:
        self.root = root
        self._recovering = threading.RLock()  # guards recoveries: one thread at a time recreates a broken root
        self.recoveries = 0
        """How often the root was recovered; compared by calls that fail, since another thread may have recovered it meanwhile."""
        self._is_closed = False
        self.recovered: list[Problem] = []
        """What was recovered so that the root could be opened, until `Store.repair` has reported it."""
        self._limits: NodeLimits | None = None
        self.known_spaces: dict[str, spaces.SpaceRow] = {}
        """Rows of spaces that this process has read; emptied when the catalog is recreated."""
        self.adaptive = AdaptiveSpaces(lambda name: self.settings.limits().policy_of(name))
        # The hit paths keep the memo and the counters, whatever is recreated.
        self.counters = Counters(root)
        self.history = History(root, self.counters)
        self.memo = Memo(self._index_of(root), self.adaptive, on_look=self.history.note)
        self._wire(root, RootLimits())
        self._start(settings)
        self.catalog.trust()

    def close(self) -> None:
        """Fold the counters and close all files. Leases and buffers that were handed out stay valid."""
        self.memo.restart(self.index)
        self.history.close(self.index.head.clock.now())
        for part in (self.owners, self._writers, self.leases, self.catalog, self.counters, self._limits):
            if part is not None:
                part.close()
        self._format.close()
        self._is_closed = True  # last: until then a fork must prepare what there is

    def retry(self, call: Callable[[], R], error: Exception, recoveries: int) -> R:
        """What ``call`` returns once that is recovered from which it raised ``error`` for, or raises what cannot be recovered from.

        ``recoveries``: their number when the call began."""
        try:
            with faults(str(self.root.path)):
                self._recover_from(error, recoveries)
                for _ in range(ATTEMPTS - 2):  # damage that does not show in the pages is repaired only when it is met again
                    recoveries_now = self.recoveries
                    try:
                        return call()
                    except (DiskFull, SharedBroken, CatalogBroken, OSError) as again:
                        self._recover_from(again, recoveries_now)
                return call()
        finally:
            if self.recoveries != recoveries:
                self.catalog.trust()  # what another call meets later has nothing to do with this

    def _recover_from(self, error: Exception, recoveries: int) -> None:
        """Do what lets a call that failed with ``error`` succeed, or raise the error. ``recoveries``: see `reopen`."""
        if isinstance(error, SharedReplaced):
            if not self.root.read_only:
                self.reopen(CatalogBroken(str(error)), recoveries)
            else:  # another process recreated the records, or somebody removed them
                self.index.forget()
                self.memo.restart(self.index)
        elif isinstance(error, SharedBroken) and not self.root.read_only:
            self.rebuild_shared()
        elif isinstance(error, CatalogBroken):
            self.reopen(error, recoveries)
        elif isinstance(error, FileNotFoundError) and not self.root.is_same():  # of a lock file, such as the first one that is asked for
            self.reopen(CatalogBroken(f"the root {self.root.path} was deleted: {error.strerror}"), recoveries)
        elif not (isinstance(error, DiskFull) and error.relieved):
            raise error

    @contextlib.contextmanager
    def reopening(self) -> Iterator[None]:
        """Around work that must not run twice: where it finds the catalog broken, the catalog is recovered, and the error raised."""
        recoveries = self.recoveries
        try:
            yield
        except CatalogBroken as error:
            self.reopen(error, recoveries)
            raise

    def reopen(self, error: CatalogBroken, recoveries: int) -> None:
        """Open the catalog, or the whole root, again, recreating what is missing: it is no longer what was opened.

        ``recoveries``: their number when the call began that failed; nothing is done if another thread has recovered the root since."""
        if self.root.read_only:
            raise error
        with self._recovering, faults(str(self.root.path)):
            if self.recoveries != recoveries:
                return
            (log.info if error.damaged else log.warning)("%s: opening it again", str(error))
            try:
                root = open_root(self.root.path, shared=self.root.shared, id_in_catalog=schema.root_id)
            except errors.RootError as refused:  # given to another user, say: the job that has it open goes on without
                raise errors.CacheFault(f"the cache in {self.root.path} cannot be used any more: {refused}") from refused
            if root.id != self.root.id or not self.index.is_same() or not self.catalog.has_its_lock():
                for part in (self._writers, self.leases, self.catalog):
                    if part is not None:
                        part.close()
                self._wire(root, self.settings.known)
            elif error.damaged:
                self.catalog.rebuild(str(error))
            self.adaptive.restart(self.root, self.index)  # spaces may have other ids
            self.memo.restart(self.index)
            self.known_spaces.clear()
            self._start(Settings())
            self.recoveries += 1

    # -- opening ---------------------------------------------------------------------------------------------------

    def _wire(self, root: Root, before: RootLimits) -> None:
        """``before``: what was in force for this process, for a root that was recreated meanwhile."""
        self.root, self.hosts = root, SilentHosts(root)
        if self._limits is not None:
            self._limits.close()
        self._limits = None
        self.words = waits.Words(root.words, root.files.open, writable=not root.read_only)
        self._has_index = self._epoch_began = False
        self._validations: deque[tuple[Entry, int, int]] = deque(maxlen=_MOST)  # see `note_validations`
        self.index = self._index_of(root)
        self._format = locks.LockFile(root.path / "FORMAT", root.files.open, writable=not root.read_only)
        self.settings = SharedSettings(root, self.index.head, self._format, before)
        self.catalog = Catalog(
            root, self.words, self.index.head, immutable=root.read_only and not host.is_local(host.fs_kind(root.path)),
            recover=self._finish_intent, sweep=lambda: self.writers.eviction.sweep(),  # noqa: PLW0108 (there are no writers yet)
            budget=self._budget,
        )  # fmt: skip
        self.adaptive.restart(root, self.index)
        self.counters.detach()
        self.history.restart(root)
        self.leases = Leases(root, self.catalog, self.index)
        self.memo.restart(self.index)
        self.owners = Owners(root, self.catalog)
        self.reading = Reading(root, self.catalog, self.index, self.leases, self.memo, self.counters, self.adaptive)
        self._writers: Writers | None = None
        self._forking: tuple[host.Forking, ...] = ()
        self.known_spaces.clear()

    def _budget(self) -> int:
        return self.settings.limits().budget or 0

    def _index_of(self, root: Root) -> EntryIndex:
        return EntryIndex(root, SharedHead(root), self._budget)

    @property
    def stats(self) -> StatsReader:
        from forebay._engine.stats import StatsReader

        return StatsReader(self.root, self.catalog, self.index, self.counters, self.leases, self.adaptive, self.settings)

    @property
    def limits(self) -> NodeLimits:
        """The limits of transfers, created by the first call."""
        limits = self._limits
        if limits is None:
            from forebay._engine.index.limits import NodeLimits

            with self._recovering:
                if self._limits is None:
                    self._limits = NodeLimits(self.root, self.index.head, self.settings.limits)
                limits = self._limits
        return limits

    @property
    def writers(self) -> Writers:
        """The parts that change the root, created by the first call."""
        writers = self._writers
        if writers is None:
            from forebay._engine.writers import Writers

            with self._recovering:
                if self._writers is None:
                    self._writers = Writers(
                        self.root, self.catalog, self.index, self.memo, self.counters, self.leases, self.owners, self.words,
                        self.adaptive, self.settings,
                    )  # fmt: skip
                writers = self._writers
        return writers

    def _start(self, settings: Settings) -> None:
        """Open the catalog, recreating it where it is broken."""
        for _ in range(ATTEMPTS - 1):
            try:
                self._begin(settings)
            except DiskFull as error:
                if not self.catalog.ballast.give_up(error):
                    raise
            except CatalogBroken as error:
                if self.root.read_only:
                    raise
                self.catalog.rebuild(str(error))
                self.recovered.append(Problem("catalog", str(self.root.catalog), str(error)))
            else:
                return
        self._begin(settings)

    def _begin(self, settings: Settings) -> None:
        self.catalog.open()
        if self.catalog.lost and not self.recovered:  # it was deleted
            self.recovered.append(Problem("catalog", str(self.root.catalog), self.catalog.lost))
        if self.root.read_only:
            return
        self._format.try_lock(0, exclusive=False)  # a later version migrates a root only when nobody holds this
        try:
            self.index.head.words()
        except SharedBroken:
            self.rebuild_shared()
        self._has_index = True
        self.catalog.ballast.make()
        if settings != Settings():
            self.counters.claim()  # a process that sets limits is seen by others that do; any other is once it counts something
        try:
            if self.index.head.intent() or self.owners.any_dead():
                with self.catalog.write(0) as txn:  # one that writes now has seen to it
                    self.owners.reap(txn)
            self.begin_epoch()
            if entries.held(self.catalog, 0, 1):  # perhaps of processes that are dead
                with waits.time_limit(0):
                    self.writers.eviction.sweep()
        except errors.WriterBusy as error:  # it can be read from all the same; the next process that opens it sweeps
            log.info("%s: not swept: %s", self.root.path, str(error))
        self.configure(settings)

    def rebuild_shared(self) -> None:
        """Create what is lost or damaged of the files that processes share; the catalog says what was in them."""
        with self.catalog.writer(), faults(str(self.root.shared_dir)):
            self.index.create()
            self.index.head.epoch = 0
            self.settings.note()
            self.memo.restart(self.index)  # what it knows of the part that is lost
        self._has_index, self._epoch_began = True, False
        try:
            self.begin_epoch()
        except errors.WriterBusy as error:  # the next call that writes does it
            log.info("%s: rows and records are compared later: %s", self.root.path, str(error))

    def _finish_intent(self) -> None:
        """Before a transaction, and after one that failed: end what was left half done."""
        if self._has_index:
            self.index.check_same()
            if self.index.head.intent():
                recovery.recover(self.root, self.catalog, self.index)
            while self._validations:
                self.index.set_validated(*self._validations.popleft())

    def note_validations(self, several: Sequence[tuple[Entry, int, int]], *, at_once: bool = False) -> None:
        """`EntryIndex.set_validated`, for several; in a read-only root nothing. Where the writer lock is not free, the next write does it,
        but what comes ``at_once`` is stored before, too.

        P1 asks the remote / P2 invalidates / P1 notes what it found: so what it began before does not count. P1 looks at the record / P2
        invalidates, or replaces the entry / P1 stores: so both need the lock."""
        if self.root.read_only:
            return
        for one in several if at_once else ():
            self.index.set_validated(*one)
        if host.forked_unseen():
            return
        self._validations.extend(several)
        try:
            with self.catalog.writer(VALIDATE_SOON):
                self._finish_intent()
        except (errors.CacheFault, OSError) as error:  # what is broken, the next write repairs
            log.debug("%s: %d validations are noted by the next write: %s", self.root.path, len(several), str(error))

    def begin_epoch(self) -> None:
        """Before the first write in a new epoch, with a new head, or with an older copy of the catalog: give no id again that it forgot,
        remove files that it left without a row, compare records and rows, and measure all segments: their rows may be older than they are.

        Each step may be repeated: the epoch is noted last."""
        head = self.index.head
        epoch, number = spaces.setting(self.catalog, "boot"), head.number_of(self.root.epoch)
        # A new catalog has other ids altogether, and one that is older by as many would be no copy.
        is_older = 0 < head.words()[NEXT] - number_below(spaces.setting(self.catalog, "next_id"), "next_id", NUMBERS) < SKIPPED
        if epoch != self.root.epoch or head.epoch != number or is_older:
            from forebay._engine import check
            from forebay._engine.catalog import failures
            from forebay._engine.space import segment_tails

            if is_older or (epoch and epoch != self.root.epoch):
                with self.catalog.write() as txn:
                    txn.skip_ids()
                self.catalog.sync()
            lacking = recovery.reconcile(self.catalog, self.index)
            if lacking and epoch == self.root.epoch:
                log.warning("%s: records of %d entries were lost: when they were used is unknown", self.root.path, lacking)
            check.remove_strays(self.root, self.catalog, self.writers.eviction, self.writers.fill)
            segment_tails.measure(self.root, self.catalog)
            with self.catalog.write() as txn:
                if spaces.setting(txn, "boot") != self.root.epoch:  # else another process was first
                    failures.forget(txn)
                    spaces.set_setting(txn, "boot", self.root.epoch)
            head.epoch = number
        self._epoch_began = True

    # -- settings --------------------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> bool:
        """Set the given limits for every process, and evict for a lower one; where the catalog is busy, the next call that writes does.
        Returns whether they are set for every process."""
        if settings.budget is not None:
            self.index.cells.resize()
        before, after = self.settings.set(settings)
        changes = differences(before, after)
        if self.catalog.lost or (before.budget is None and spaces.every(self.catalog)):
            self._log_lost(before, after)
        elif before.budget is not None and changes:
            whom = "all processes" if self.settings.is_shared() else "this process"
            messages = [f"{self.root.path}: changed for {whom}: {', '.join(changes.values())}"]
            try:
                messages += self._shrink() if not changes.keys() <= OF_TRANSFERS else ()
            except errors.WriterBusy as error:
                messages.append(f"the new limit is not met yet; a later call that writes evicts for it: {error}")
            others = self.counters.living()
            if others:
                have = "another process has it open:" if len(others) == 1 else f"{len(others)} other processes have it open, such as"
                messages.append(f"{have} {locks.describe_process(others[0])}")
            (log_of_settings.warning if len(messages) > 1 else log_of_settings.info)("%s", "; ".join(messages))
        return self.settings.is_shared()

    def _shrink(self) -> Iterator[str]:
        """Evict for a lower limit; yields messages that say what that cost."""
        before, there = spaces.usage(self.catalog)[0], sum(space.entries for space in spaces.every(self.catalog))
        fits = self.writers.budget.fit()
        after, left = spaces.usage(self.catalog)[0], sum(space.entries for space in spaces.every(self.catalog))
        if there > left:
            yield f"{there - left:,} entries were evicted to meet it, {format_size(max(before - after, 0))}"
        if not fits:
            yield f"the new limit is not met yet: {format_size(after)} are in use or pinned, or the disk lacks room"

    def _log_lost(self, before: RootLimits, after: RootLimits) -> None:
        """Report that the catalog, or what is set, was lost."""
        why, self.catalog.lost = self.catalog.lost, ""
        known = {name: value for name, value in before.of_root().items() if value is not None}
        texts = [f"{name} {format_size(value) if name in ('budget', 'min_free') else shown(name, value)}" for name, value in known.items()]
        left = ", ".join([*texts, *(f"the limits of the space {name}" for name in before.spaces)])
        if before.budget is None:
            new = format_size(after.budget or 0)
            left = f"{left or 'nothing that was set'}; the budget is {new} from now on: where that is wrong, set it by Cache(budget=...)"
        if why:
            why += ": an empty one replaces it; what was kept is fetched again when needed, and nothing is pinned"
        log_of_settings.warning("%s: %s; what stays: %s", self.root.path, why or f"{self.root.settings} is lost or damaged", left)

    def check_usable(self, *, writing: bool = False) -> None:
        """Raise `ReadOnly`, or `CacheFault` in a process that was forked by C code; before a write, begin the epoch."""
        if writing and self.root.read_only:
            raise errors.ReadOnly.of(self.root.path)
        if host.forked_unseen():
            raise errors.CacheFault("this process was forked by C code, which ran no hook: it cannot use the cache")
        if writing:
            if not self._epoch_began:
                self.begin_epoch()
            self.history.use = self._use
            self.history.note(self.index.head.clock.now())

    def _use(self) -> tuple[int, int]:
        """Bytes used, and the budget."""
        charge, granted = spaces.usage(self.catalog)
        return max(charge + granted, 0), self._budget()

    def touch(self, entry: Entry) -> None:
        """Note that an entry is used now."""
        words, base = self.index.record(entry.slot)
        if words[base + ID] == entry.id and not self.root.read_only:
            words[base + USED] = now = self.index.head.clock.now()
            self.adaptive.hit(entry.space, words[base + SPACE], entry.key, entry.charge, now)

    def evicted(self, count: int) -> None:
        """Count entries that were removed, and tell of them."""
        self.counters.add(EVICTIONS, count)
        if count:
            events.emit("evict", self.root.path, entries=count)

    def note_space(self, row: spaces.SpaceRow) -> spaces.SpaceRow:
        """Keep the row of a space in `known_spaces`; returns it."""
        self.known_spaces[row.name] = row
        self.adaptive.know(row.id, row.name)
        return row

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self._forking = ()
        self._format.before_fork(keep=True)
        if self._is_closed:  # it is garbage that was not collected yet
            return
        # The catalog first: a thread inside a transaction takes the mutexes of the others. The writers are created, lest another thread
        # does it between here and the fork; where the root is gone, none can.
        with contextlib.suppress(OSError):
            self._forking = (self.writers,)
        self._forking = (self.catalog, *self._forking, self.owners, self.leases)
        for part in self._forking:
            part.before_fork()

    def after_fork_parent(self) -> None:
        for part in reversed(self._forking):
            part.after_fork_parent()
        self._format.after_fork_parent()

    def after_fork_child(self) -> None:
        self._recovering = threading.RLock()
        for part in self._forking:
            part.after_fork_child()
        self.memo.after_fork_child()
        self._format.after_fork_child(keep=True)
