"""The parts of one root, and their recovery: what is deleted or damaged is recreated, and the call that met it is tried again."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from forebay import errors
from forebay._engine.files.layout import CatalogBroken, DiskFull, faults
from forebay._engine.files.root import Root, open_root
from forebay._engine.index.counters import EVICTIONS
from forebay._engine.index.head import SharedBroken, SharedReplaced
from forebay._engine.index.memo import Hits
from forebay._engine.index.settings import Settings, differences
from forebay._kernel import events, host
from forebay._logs import logger

if TYPE_CHECKING:
    from forebay._engine.index.settings import NodeLimits
    from forebay._engine.packs.pack import Pack
    from forebay._engine.parts import Parts

log = logger("forebay.engine")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="HasEngine")

ATTEMPTS = 3


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


def open_directory(path: str | os.PathLike[str], *, shared: bool, read_only: bool = False) -> Root:
    """See `open_root`."""

    def id_in_catalog(directory: Path) -> int | None:
        from forebay._engine.catalog import schema

        return schema.root_id(directory)

    return open_root(path, shared=shared, read_only=read_only, id_in_catalog=id_in_catalog)


class Engine(Hits):
    """One root in one process: `Hits`, and the `Parts` that need the catalog. Callable from any thread, and in a forked child.

    A recovery replaces them: callers get what they need from here at each call."""

    def __init__(self, root: Root, settings: Settings) -> None:
        self._recovering = threading.RLock()  # guards recoveries: one thread at a time recreates a broken root
        self.recoveries = 0
        """How often the root was recovered; compared by calls that fail, since another thread may have recovered it meanwhile."""
        self.packs: weakref.WeakValueDictionary[int, Pack] = weakref.WeakValueDictionary()
        """The open packs, each by its ``id()``."""
        self._is_closed = False
        self._limits: NodeLimits | None = None
        self._parts: Parts | None = None
        self._is_open = False  # the parts, once
        self._forking: Parts | None = None
        super().__init__(root)
        if not self._is_as_left():
            self._open_parts()
        if not root.read_only:
            self.configure(settings)

    def close(self) -> None:
        """Fold the counters and close all files. Leases and buffers that were handed out stay valid."""
        self.memo.restart(self.index)
        self.history.close(self.index.head.clock.now())
        for part in (self._parts, self.counters, self._limits):
            if part is not None:
                part.close()
        self.format.close()
        self._is_closed = True  # last: until then a fork must prepare what there is

    def retry(self, call: Callable[[], R], error: Exception, recoveries: int) -> R:
        """What ``call`` returns once that is recovered from which it raised ``error`` for, or raises what cannot be recovered from.

        ``recoveries``: their number when the call began."""
        with faults(str(self.root.path)):
            self._recover_from(error, recoveries)
            for _ in range(ATTEMPTS - 2):
                recoveries_now = self.recoveries
                try:
                    return call()
                except (DiskFull, SharedBroken, CatalogBroken, OSError) as again:
                    self._recover_from(again, recoveries_now)
            try:
                return call()
            except CatalogBroken as last:
                if last.damaged:  # it was checked, and is sound or new: what is wrong is the call
                    raise errors.CacheFault(str(last)) from last
                raise

    def _recover_from(self, error: Exception, recoveries: int) -> None:
        """Do what lets a call that failed with ``error`` succeed, or raise the error. ``recoveries``: see `reopen`."""
        if isinstance(error, SharedReplaced):
            if not self.root.read_only:
                self.reopen(CatalogBroken(str(error)), recoveries)
            else:  # another process recreated the records, or somebody removed them
                self.index.forget()
                self.memo.restart(self.index)
        elif isinstance(error, SharedBroken) and not self.root.read_only:
            try:
                self.parts.rebuild_shared()
            except (DiskFull, CatalogBroken) as other:  # met while the epoch began
                self._recover_from(other, recoveries)
        elif isinstance(error, CatalogBroken):
            self.reopen(error, recoveries)
        elif isinstance(error, FileNotFoundError) and not self.root.is_same():  # of a lock file, such as the first one that is asked for
            self.reopen(CatalogBroken(f"the root {self.root.path} was deleted: {error.strerror}"), recoveries)
        elif isinstance(error, errors.RootError):  # it was another's when it was opened, but nothing needed the catalog yet
            raise errors.CacheFault(f"the cache in {self.root.path} cannot be used: {error}") from error
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
                self._reopen(error)
            except errors.RootError as refused:  # given to another user, say: the job that has it open goes on without
                raise errors.CacheFault(f"the cache in {self.root.path} cannot be used any more: {refused}") from refused

    def _reopen(self, error: CatalogBroken) -> None:
        root = open_directory(self.root.path, shared=self.root.shared)
        parts = self._parts
        is_moved = root.id != self.root.id or not root.files.has_place_of(self.root.files)
        if parts is None or is_moved or not self.index.is_same() or not parts.catalog.has_its_lock():
            if root.id == self.root.id:
                self.index.empty_lost()
            if parts is not None:
                parts.close()
            if self._limits is not None:
                self._limits.close()
                self._limits = None
            self._is_open = False  # T1 makes new parts / T2 writes by them, and ends an intent that they have not looked at yet
            with self.making:  # a fork in between would take one part of the old root, and another one of the new
                self.connect(root, self.settings.known)
                if parts is not None:
                    self._make_parts()
        elif error.damaged:
            parts.catalog.rebuild(str(error))
        self.forget()
        (self._parts or self._make_parts()).start()
        self._is_open = True
        self.configure(Settings())
        self.recoveries += 1
        self.lose_packs()  # after the count: see `Packs`

    def lose_packs(self) -> None:
        """Mark the open packs that are not in the root any more, or that its catalog does not know: see `Pack.present`."""
        from forebay._engine.catalog import entries

        for known in self.packs.valuerefs():
            if (pack := known()) is None:
                continue
            is_lost = not pack.has_name()
            with contextlib.suppress(errors.CacheFault):
                is_lost = is_lost or not entries.has_name(self.parts.catalog, pack.id)
            if is_lost:
                pack.lose()

    # -- opening ---------------------------------------------------------------------------------------------------

    def _is_as_left(self) -> bool:
        """Whether another opening of this epoch saw to the root, and nothing was left half done: then the catalog waits for a call that
        needs it."""
        head = self.index.head
        try:
            is_seen = not self.root.read_only and head.epoch == head.number_of(self.root.epoch) and not head.intent()
            return is_seen and os.stat(self.root.catalog).st_size > 0
        except (SharedBroken, OSError):
            return False

    def payload(self, id: int) -> bytes | None:
        from forebay._engine.catalog import entries

        return entries.quick_payload(self.parts.catalog, id)

    @property
    def parts(self) -> Parts:
        """What needs the catalog, opened by the first call."""
        parts = self._parts
        return parts if parts is not None and self._is_open else self._open_parts()

    def _open_parts(self) -> Parts:
        with self._recovering:
            parts = self._parts or self._make_parts()
            if not self._is_open:
                parts.start()
                self._is_open = True
            return parts

    def _make_parts(self) -> Parts:
        from forebay._engine.parts import Parts

        with self.making:
            self._parts = Parts(self)
            return self._parts

    @property
    def limits(self) -> NodeLimits:
        """The limits of transfers, created by the first call."""
        limits = self._limits
        if limits is None:
            from forebay._engine.index.settings import NodeLimits

            with self.making:
                if self._limits is None:
                    self._limits = NodeLimits(self.root, self.index.head, self.settings.limits)
                limits = self._limits
        return limits

    def configure(self, settings: Settings) -> bool:
        """Set the given limits for every process, and evict for a lower one; where the catalog is busy, the next call that writes does.
        Returns whether they are set for every process."""
        if settings != Settings():
            self.counters.claim()  # a process that sets limits is seen by others that do; any other is once it counts something
        if settings.budget is not None:
            self.index.cells.resize()
        # Looked at before the limits are set: by then another process may have stored something, which has found them.
        is_lost = self.settings.limits().budget is None and self.parts.is_used()
        before, after = self.settings.set(settings)
        if before.budget is None or differences(before, after):
            self.parts.limits_changed(before, after, is_lost and before.budget is None)
        return self.settings.is_shared()

    def check_usable(self, *, writing: bool = False) -> None:
        """Raise `ReadOnly`, or `CacheFault` in a process that was forked by C code; before a write, begin the epoch."""
        if writing and self.root.read_only:
            raise errors.ReadOnly.of(self.root.path)
        if host.forked_unseen():
            raise errors.CacheFault("this process was forked by C code, which ran no hook: it cannot use the cache")
        if writing:
            self.parts.begin_write()

    def evicted(self, count: int) -> None:
        """Count entries that were removed, and tell of them."""
        self.counters.add(EVICTIONS, count)
        if count:
            events.emit("evict", self.root.path, entries=count)

    # -- forks -----------------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        self.making.acquire()
        self.format.before_fork()
        self._forking = None if self._is_closed else self._parts  # if closed, it is garbage that was not collected yet
        if self._forking is not None:
            self._forking.before_fork()

    def after_fork_parent(self) -> None:
        if self._forking is not None:
            self._forking.after_fork_parent()
        self.format.after_fork_parent()
        self.making.release()

    def after_fork_child(self) -> None:
        self._recovering, self.making = threading.RLock(), threading.RLock()
        if self._forking is not None:
            self._forking.after_fork_child()
        self.memo.after_fork_child()
        self.format.after_fork_child()
