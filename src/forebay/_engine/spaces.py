"""`Store.spaces`: the named spaces of one root, their limits, and what is in each.

**Packs.** `Store.packs`: packs are created, looked up, opened and named here; open ones take the segments that they append to."""

from __future__ import annotations

from forebay import errors
from forebay._config import format_size, parse_size
from forebay._engine.catalog import entries
from forebay._engine.catalog import spaces as rows
from forebay._engine.engine import Engine, recover_and_retry
from forebay._engine.files.layout import CatalogBroken, faults
from forebay._engine.index.settings import RootLimits, SpaceLimits
from forebay._engine.leases import Lease
from forebay._engine.packs.pack import Pack
from forebay._engine.packs.segments import Appender
from forebay._engine.publish import Label
from forebay._logs import logger
from forebay._model import Policy

log = logger("forebay.store")

_AT_ONCE, _PAGE = 128, 1000


class Spaces:
    """The spaces of one root. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def ensure(
        self, name: str, *, kind: str = "values", policy: str | None = None, quota: int | str | None = None, max_count: int | None = None
    ) -> None:  # fmt: skip
        """Create the space of this name if it is missing; an explicit policy, quota or count is set for every process. ``quota``: bytes, or
        text, in which a percentage refers to the budget."""
        quota = parse_size(quota, total=self.budget(), name="quota") if isinstance(quota, str) else quota
        self._ensure(name, kind, SpaceLimits(Policy.parse(policy) if policy is not None else None, quota, max_count))

    def open(self, name: str, policy: str | None = None, quota: int | str | None = None, max_count: int | None = None) -> None:
        """`ensure`, for callers that can read at once and write later: where the catalog is busy or cannot be written to, the next call
        that writes to the space creates it."""
        try:
            self.ensure(name, policy=policy, quota=quota, max_count=max_count)
        except errors.CacheFault as error:
            log.warning("the space %s is not set up yet, and will be by a later call: %s", name, str(error))

    @recover_and_retry
    def root_limits(self) -> dict[str, int | None]:
        """The limits of the root that are set, by the names of `Settings`; None: not set."""
        return self.engine.settings.limits().of_root()

    def budget(self) -> int:
        """The bytes that all processes together may store; 0 if no budget is set. If the head cannot be read, what this process knows."""
        try:
            return self.root_limits()["budget"] or 0
        except errors.CacheFault:
            return self.engine.settings.known.budget or 0

    @recover_and_retry
    def number(self, name: str) -> int:
        """The number of a space in the present catalog, to read from; 0, which no entry has, if there is none. What writes asks for it in
        its transaction: T1 asks / T2 recovers a deleted catalog / T1 writes: its entry would be in no space."""
        number = self.engine.parts.catalog.space(name)
        if number and not self.engine.adaptive.knows(number, name):
            self.engine.adaptive.know(number, name)
        return number

    @recover_and_retry
    def _ensure(self, name: str, kind: str, limits: SpaceLimits) -> None:
        engine = self.engine
        if engine.root.read_only or (limits == SpaceLimits() and self.number(name)):
            return
        before, after = engine.settings.set_space(name, limits) if limits != SpaceLimits() else (RootLimits(), RootLimits())
        row = rows.find(engine.parts.catalog, name)
        if row is None:
            with engine.parts.catalog.write() as txn:
                txn.space(name, kind)
                row = rows.find(txn, name)
        assert row is not None
        engine.adaptive.know(row.id, name)
        quota, most = after.of_space(name)[1:]
        is_over = (quota is not None and row.bytes > quota) or (most is not None and row.entries > most)
        if is_over or before.of_space(name)[1:] != (quota, most):
            self._shrink(name)

    def _shrink(self, name: str) -> None:
        """Evict what is above a lower limit, as far as it is not in use."""
        from forebay._engine.space.free_space import SpaceRequest

        engine = self.engine
        bytes_before, count_before = rows.live(engine.parts.catalog, name)
        try:
            engine.parts.writers.budget.with_room(SpaceRequest(name, "", 0, 0, entries=0), lambda txn: None)
        except (errors.NoSpace, errors.WriterBusy) as error:
            log.info("the space %s stays above its limit for now: %s", name, str(error))
        bytes_after, count_after = rows.live(engine.parts.catalog, name)
        if count_before > count_after:
            freed = format_size(max(bytes_before - bytes_after, 0))
            evicted = count_before - count_after
            log.warning("%s: %d entries of the space %s were evicted for its lower limit, %s", engine.root.path, evicted, name, freed)

    @recover_and_retry
    def used(self, name: str) -> tuple[int, int]:
        """Bytes and number of the live entries of a space."""
        return rows.live(self.engine.parts.catalog, name)

    @recover_and_retry
    def used_below(self, name: str, prefix: str) -> tuple[int, int]:
        """Bytes and number of the live entries of a space whose keys begin with ``prefix``."""
        return rows.live_below(self.engine.parts.catalog, self.number(name), prefix)

    @recover_and_retry
    def limits_of(self, name: str) -> SpaceLimits:
        """The limits of a space, and its policy, as they were set last by any process; None: only the budget of the root limits it."""
        limits = self.engine.settings.limits()
        return limits.of_space(name)._replace(policy=limits.policy_of(name))

    @recover_and_retry
    def largest(self, name: str) -> int:
        """The largest size in bytes that one entry of a space can have."""
        limits = self.engine.settings.limits()
        budget, quota = limits.budget or 0, limits.of_space(name).quota
        return budget if quota is None else min(budget, quota)

    @recover_and_retry
    def clear(self, name: str) -> int:
        """Remove all entries of a space but those that are pinned or in use; returns how many were removed."""
        engine = self.engine
        engine.check_usable(writing=True)
        space, removed = self.number(name), 0
        with faults(name):
            page = entries.page(engine.parts.catalog, space, None, _PAGE)
            while page:
                unpinned = [entry for entry in page if entry.life != "pinned"]
                for at in range(0, len(unpinned), _AT_ONCE):
                    removed += len(engine.parts.writers.eviction.remove(unpinned[at : at + _AT_ONCE]))
                page = entries.page(engine.parts.catalog, space, page[-1].key, _PAGE)
        engine.evicted(removed)
        return removed

    @recover_and_retry
    def has_any(self, name: str, prefix: str) -> bool:
        """Whether a key of this space begins with ``prefix``."""
        return entries.has_any(self.engine.parts.catalog, self.number(name), prefix)


class Packs:
    """The packs of one root. Callable from any thread, and in a forked child."""

    def __init__(self, engine: Engine, spaces: Spaces) -> None:
        self.engine, self._spaces = engine, spaces

    @recover_and_retry
    def make(
        self, space: str, key: str, length: int, *, life: str = "cached", fingerprint: str | None = None, meta: str = ""
    ) -> Pack:  # fmt: skip
        """An empty pack of ``length`` slots, open and leased; it replaces the pack of this name. Caller: holds the key."""
        self.engine.check_usable(writing=True)
        label = Label(space, key, life=life, meta=meta)
        lease = self.engine.parts.writers.packing.create(label, length, fingerprint=fingerprint)
        return self._open(lease, length)

    @recover_and_retry
    def find(self, space: str, key: str) -> Lease | None:
        """A lease on the pack of a name, for `open`; None if there is none."""
        with faults(key):
            return self.engine.parts.leases.take(self._spaces.number(space), key)

    @recover_and_retry
    def find_by_id(self, id: int) -> Lease | None:
        """A lease on a pack, whatever its name is by now; None if it is gone, or another pack has taken its name."""
        with faults(f"{id:x}"):
            return self.engine.parts.leases.take_id(id)

    def open(self, lease: Lease, length: int) -> Pack | None:
        """The leased pack, which owns the lease from now on. None where its files are gone or damaged: then it is set aside; or where its
        root was deleted or replaced: then the one that is there now is open."""
        try:
            with self.engine.reopening():
                return self._open(lease, length)
        except CatalogBroken:
            return None
        except (FileNotFoundError, errors.Damaged) as error:
            self.engine.parts.reading.set_aside(lease.entry, f"{lease.entry.name}: {error}")
            return None

    def _open(self, lease: Lease, length: int) -> Pack:
        """Closes the lease where it raises."""
        engine = self.engine
        recoveries = engine.recoveries
        try:
            engine.touch(lease.entry)
            pack = Pack(engine.root, self, engine.index.head, engine.counters, lease, length, lease.entry.space)
        except BaseException as error:
            lease.close()
            if not isinstance(error, OSError) or isinstance(error, (FileNotFoundError, errors.ForebayError)):
                raise
            raise errors.CacheFault(f"{lease.entry.name} cannot be opened: {error}", key=lease.entry.key) from error
        engine.packs[id(pack)] = pack
        if engine.recoveries != recoveries:  # T1 opens it / T2 recovers the root, and marks what is open / T1 lists it
            engine.lose_packs()
        return pack

    def notice(self, pack: Pack) -> None:
        """Open the root again, since files of this pack have no name any more. If the pack is gone, it is marked: see `Pack.present`."""
        recoveries = self.engine.recoveries
        if not pack.is_lost:
            self.engine.reopen(CatalogBroken(f"files of {pack.lease.entry.name} were deleted"), recoveries)

    @recover_and_retry
    def name(self, pack: Pack, space: str, key: str, *, overwrite: bool) -> bool:
        """Give a pack that lived as long as it was held a name, under which it stays. False if the name is taken, unless ``overwrite``."""
        self.engine.check_usable(writing=True)
        return self.engine.parts.writers.publisher.name(pack.id, Label(space, key), overwrite=overwrite)

    @recover_and_retry
    def take_segment(self, pack: int, space: str, words: memoryview, need: int) -> Appender:
        """See `Packing.take`."""
        self.engine.check_usable(writing=True)
        return self.engine.parts.writers.packing.take(pack, space, words, need)

    @recover_and_retry
    def leave_segment(self, pack: int, words: memoryview, appender: Appender) -> None:
        """See `Packing.leave`."""
        self.engine.parts.writers.packing.leave(pack, words, appender)
