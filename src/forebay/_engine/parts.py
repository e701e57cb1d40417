"""The parts of one root that need its catalog: created by the first call that does, and opened, which recovers what is broken."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from forebay import errors
from forebay._config import format_size
from forebay._engine.catalog import entries, recovery, spaces
from forebay._engine.catalog.connection import Catalog
from forebay._engine.catalog.transactions import forgotten, number_below
from forebay._engine.files.layout import CatalogBroken, DiskFull, faults
from forebay._engine.index.head import NEXT, NUMBERS, SharedBroken
from forebay._engine.index.memo import Hits
from forebay._engine.index.settings import OF_TRANSFERS, RootLimits, differences, shown
from forebay._engine.leases import Leases, Owners
from forebay._engine.reading import Reading
from forebay._kernel import host, locks, waits
from forebay._logs import logger
from forebay._model import Entry, Problem

if TYPE_CHECKING:
    from forebay._engine.writers import Writers

log = logger("forebay.engine")
log_of_settings = logger("forebay.settings")

OPENINGS = 2
VALIDATE_SOON = 0.02
"""Seconds that a validation waits for the writer lock."""
_MOST = 10_000


class Parts:
    """What reads and writes the catalog of one root. Callable from any thread, and in a forked child."""

    def __init__(self, hits: Hits) -> None:
        root, self.index = hits.root, hits.index
        self.root, self._hits, self._settings = root, hits, hits.settings
        self.words = waits.Words(root.words, root.files.open, writable=not root.read_only)
        self.catalog = Catalog(
            root, self.words, self.index.head, immutable=root.read_only and not host.is_local(host.fs_kind(root.path)),
            begin=self.begin_epoch, recover=self._finish_intent, budget=hits.budget,
            sweep=lambda: self.writers.eviction.sweep(),  # noqa: PLW0108 (there are no writers yet)
        )  # fmt: skip
        self.leases = Leases(root, self.catalog, self.index)
        self.owners = Owners(root, self.catalog)
        self.reading = Reading(root, self.catalog, self.index, self.leases, hits.memo, hits.counters)
        self._writers: Writers | None = None
        self._forking: tuple[host.Inherited, ...] = ()
        self._has_index = False
        self._validations: deque[tuple[Entry, int, int]] = deque(maxlen=_MOST)  # see `note_validations`

    def start(self) -> None:
        """Open the catalog, recreating it where it is broken, and end what processes that died have left. It may be repeated."""
        is_lost = False
        for turn in range(OPENINGS + 1):
            try:
                if is_lost:
                    self.rebuild_shared()
                    is_lost = False
                self._begin()
                break
            except (DiskFull, SharedBroken, CatalogBroken) as error:
                if turn == OPENINGS:
                    raise
                if isinstance(error, SharedBroken):
                    is_lost = True
                elif isinstance(error, DiskFull):
                    if not self.catalog.ballast.give_up(error):
                        raise
                elif self.root.read_only:
                    raise
                elif self.catalog.rebuild(str(error)):
                    self._hits.recovered.append(Problem("catalog", str(self.root.catalog), str(error)))
        if self.catalog.lost:
            self._hits.forget()
            if (limits := self._settings.limits()).budget is not None:
                self._log_lost(limits, limits)

    def _begin(self) -> None:
        self.catalog.open()
        if self.catalog.lost and not self._hits.recovered:  # it was deleted
            self._hits.recovered.append(Problem("catalog", str(self.root.catalog), self.catalog.lost))
        if self.root.read_only:
            return
        self.index.head.words()  # raises where it is lost or damaged
        self._has_index = True
        self.catalog.ballast.make()
        try:
            with self.catalog.beginning():
                if self.index.head.intent() or self.owners.any_dead():
                    with self.catalog.write(0) as txn:  # one that writes now has seen to it
                        self.owners.reap(txn)
                self.begin_epoch()
            if entries.held(self.catalog, 0, 1):  # perhaps of processes that are dead
                with waits.time_limit(0):
                    self.writers.eviction.sweep()
        except errors.WriterBusy as error:  # it can be read from all the same; the next process that opens it sweeps
            log.info("%s: not swept: %s", self.root.path, str(error))

    def rebuild_shared(self) -> None:
        """Create what is lost or damaged of the files that processes share; the catalog says what was in them."""
        with self.catalog.writer(), faults(str(self.root.shared_dir)):
            self.index.create()
            self.index.head.epoch = 0
            self._settings.note()
            self._hits.memo.restart(self.index)  # what it knows of the part that is lost
            self.catalog.begun(None)
        self._has_index = True
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
        with self.catalog.beginning() as seen:
            is_copy = self.catalog.is_copy(seen)
            if is_copy and (found := self.catalog.damage()):  # SQLite takes the log of the one before it for its own
                raise CatalogBroken(f"the catalog was replaced by a copy, and is damaged: {found}", damaged=True)
            self._begin_epoch(is_copy=is_copy)
            self.catalog.begun(seen)

    def _begin_epoch(self, *, is_copy: bool) -> None:
        head = self.index.head
        epoch, number = spaces.setting(self.catalog, "boot"), head.number_of(self.root.epoch)
        is_older = forgotten(number_below(spaces.setting(self.catalog, "next_id"), "next_id", NUMBERS), head.words()[NEXT])
        if epoch != self.root.epoch or head.epoch != number or is_older or is_copy:
            from forebay._engine import check
            from forebay._engine.catalog import failures
            from forebay._engine.space import eviction

            if is_older or (epoch and epoch != self.root.epoch):
                with self.catalog.write() as txn:
                    txn.skip_ids()
                self.catalog.sync()
            lacking = recovery.reconcile(self.catalog, self.index)
            if lacking and epoch == self.root.epoch:
                log.warning("%s: records of %d entries were lost: when they were used is unknown", self.root.path, lacking)
            check.remove_strays(self.root, self.catalog, self.index, self.writers.eviction, self.writers.keys)
            eviction.measure(self.root, self.catalog)
            with self.catalog.write() as txn:
                if spaces.setting(txn, "boot") != self.root.epoch:  # else another process was first
                    failures.forget(txn)
                    spaces.set_setting(txn, "boot", self.root.epoch)
            head.epoch = number

    def begin_write(self) -> None:
        """Before a write: begin the epoch."""
        if not self.catalog.has_begun:
            self.begin_epoch()
        history = self._hits.history
        history.use = self._use
        history.note(self.index.head.clock.now())

    def _use(self) -> tuple[int, int]:
        """Bytes used, and the budget."""
        charge, granted = spaces.usage(self.catalog)
        return max(charge + granted, 0), self._hits.budget()

    @property
    def writers(self) -> Writers:
        """The parts that change the root, created by the first call."""
        writers = self._writers
        if writers is None:
            from forebay._engine.writers import Writers

            hits = self._hits
            with hits.making:
                if self._writers is None:
                    self._writers = Writers(
                        self.root, self.catalog, self.index, hits.memo, hits.counters, self.leases, self.owners, self.words,
                        hits.adaptive, self._settings,
                    )  # fmt: skip
                writers = self._writers
        return writers

    # -- limits ----------------------------------------------------------------------------------------------------

    def is_used(self) -> bool:
        """Whether a process has written to the root."""
        return bool(spaces.every(self.catalog))

    def limits_changed(self, before: RootLimits, after: RootLimits, is_lost: bool) -> None:
        """Evict for a lower limit, and tell what was changed, or lost: what was set, if ``is_lost``."""
        changes = differences(before, after)
        if self.catalog.lost or is_lost:
            self._log_lost(before, after)
        elif before.budget is not None and changes:
            whom = "all processes" if self._settings.is_shared() else "this process"
            messages = [f"{self.root.path}: changed for {whom}: {', '.join(changes.values())}"]
            try:
                messages += self._shrink() if not changes.keys() <= OF_TRANSFERS else ()
            except errors.WriterBusy as error:
                messages.append(f"the new limit is not met yet; a later call that writes evicts for it: {error}")
            others = self._hits.counters.living()
            if others:
                have = "another process has it open:" if len(others) == 1 else f"{len(others)} other processes have it open, such as"
                messages.append(f"{have} {locks.describe_process(others[0])}")
            (log_of_settings.warning if len(messages) > 1 else log_of_settings.info)("%s", "; ".join(messages))

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
            salvaged = self.catalog.salvaged
            if salvaged is not None and salvaged.kept:
                why += f": it was replaced, and its entries were kept: {salvaged.kept:,}, lost with their pins: {salvaged.lost:,};"
                why += " what is lost is fetched again when needed"
            else:
                why += ": an empty one replaces it; what was kept is fetched again when needed, and nothing is pinned"
        log_of_settings.warning("%s: %s; what stays: %s", self.root.path, why or f"{self.root.settings} is lost or damaged", left)

    # -- process life ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        for part in (self.owners, self._writers, self.leases, self.catalog):
            if part is not None:
                part.close()

    def before_fork(self) -> None:
        # The catalog first: a thread inside a transaction takes the mutexes of the others. What a thread makes meanwhile was not prepared.
        writers = self._writers.forking() if self._writers is not None else ()
        self._forking = self.catalog, *writers, *self.owners.files, self.owners, *self.leases.files
        host.notify("before_fork", self._forking)

    def after_fork_parent(self) -> None:
        host.notify("after_fork_parent", reversed(self._forking))

    def after_fork_child(self) -> None:
        host.notify("after_fork_child", self._forking)
