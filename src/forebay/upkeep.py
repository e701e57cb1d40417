"""The part of a cache that sees what is kept, and removes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forebay import _config, errors, remote
from forebay._engine.leases import Lease
from forebay._engine.passthrough import PassThrough
from forebay._engine.store import Store
from forebay._model import Entry, Problem, Report, Victim
from forebay.origin import DIRECTORIES, URLS, Origin, folder_of
from forebay.reports import Plan, Stats, coldest_until


class Upkeep:
    """What `Cache` knows of its entries, whatever front made them. Callable from any thread."""

    _store: Store | PassThrough
    closed: bool

    # -- what is there ---------------------------------------------------------------------------------------------

    def entries(self, space: str | None = None) -> list[Entry]:
        """What is kept, the least recently used first; ``leased`` says whether anybody holds it now."""
        self._check_open()
        return [_leased(self._store, entry) for entry in self._entries(space)]

    def _entries(self, space: str | None) -> list[Entry]:
        # the store makes a space that it is asked for; looking must not
        return self._store.entries(space) if space is None or self._has_space(space) else []

    def _has_space(self, name: str) -> bool:
        return any(space.name == name for space in self._store.usage().spaces)

    def entry(self, name: str) -> Entry | None:
        """One entry by its name: a URL, or ``space:key``."""
        found = self._store.entry(*self._split(name))
        return _leased(self._store, found) if found is not None else None

    def hold(self, name: str) -> Lease:
        """The file, or the directory, that is kept under a name, for a ``with`` or ``os.fspath``; never fetched. Raises `NotCached`."""
        lease = self._store.lease(*self._split(name))
        if lease is None:
            raise errors.NotCached.of(name)
        return lease

    @property
    def budget(self) -> int:
        """Bytes that all processes together may keep."""
        self._check_open()
        return self._store.usage().budget

    def stats(self) -> Stats:
        """What all processes of the node did, and what is kept."""
        self._check_open()
        now = self._store.usage()
        return Stats(
            **self._store.counts(), bytes_used=now.used, bytes_reserved=now.reserved, budget=now.budget,
            entries=sum(s.entries for s in now.spaces),
            spaces={s.name: (s.entries, s.bytes) for s in now.spaces},
        )  # fmt: skip

    def reset_stats(self) -> None:
        """Count from zero, for all processes."""
        self._check_open()
        self._store.zero_counts()

    def check(self, *, deep: bool = False) -> list[Problem]:
        """What is wrong with the root; empty: it is sound. ``deep`` reads every byte."""
        self._check_open()
        return self._store.check(deep=deep)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Mend what `check` finds, by setting aside what is damaged and removing what no entry names; gives what was mended."""
        self._check_open()
        return self._store.repair(deep=deep)

    # -- removing --------------------------------------------------------------------------------------------------

    def pin(self, name: str) -> None:
        """Never evict this name, nor later versions of it. Raises `NotCached`."""
        self._set_life(name, "pinned")

    def unpin(self, name: str) -> None:
        """Let it go again when space is needed. Raises `NotCached`."""
        self._set_life(name, "cached")

    def _set_life(self, name: str, life: str) -> None:
        self._check_open()
        if not self._store.set_life(*self._split(name), life):
            raise errors.NotCached.of(name)

    def evict(self, name: str) -> Report:
        """Remove a name now, if nobody uses it; of a directory its files too, but for those that another one has. Raises `NotCached`."""
        entry = self.entry(name)
        if entry is None:
            raise errors.NotCached.of(name)
        files = [file for _, file in self._store.members(entry)] if entry.kind == "tree" else []
        report = self._store.remove([Origin.victim(entry)])
        if report.spared or not files:
            return report
        with_it = self._store.remove(map(Origin.victim, files))
        return Report(report.removed + with_it.removed, (), report.freed + with_it.freed)

    def plan(
        self, need: int | str | None = None, *, where: Callable[[Entry], bool] | None = None, space: str | None = None, all: bool = False
    ) -> Plan:  # fmt: skip
        """What would go: so much of the coldest that ``need`` bytes are free for new ones; or all that ``where``, ``space`` or ``all``
        says. Pinned entries stay. Nothing is removed before `Plan.execute`."""
        self._check_open()
        cold = [e for e in self._entries(space) if e.life != "pinned" and (where is None or where(e))]
        if need is not None:
            now = self._store.usage()
            lacking = now.used + now.reserved + _config.parse_size(need, total=now.budget, name="need") - now.budget
            cold = coldest_until(cold, lacking)
        elif where is None and space is None and not all:
            now = self._store.usage()
            cold = coldest_until(cold, now.used + now.reserved - now.budget)
        return Plan(tuple(Origin.victim(entry) for entry in cold), self._store.remove)

    def prune(self) -> Plan:
        """What is over the budget now. `Plan.execute` removes it, and what dead processes left half done; unfinished downloads stay,
        to be gone on from, until their room is wanted."""
        return Plan(self.plan().victims, self._tidy)

    def _tidy(self, victims: tuple[Victim, ...]) -> Report:
        report = self._store.remove(victims)
        self._store.make_room()
        return report

    def clear(self, space: str | None = None) -> Plan:
        """Everything in one space, or in all: a plan to be executed."""
        return self.plan(space=space, all=True)

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of("cache")

    def _split(self, name: str) -> tuple[str, str]:
        """The space and the key that a name means: ``space:key`` where there is such a space, else a URL."""
        self._check_open()
        space, colon, key = name.partition(":")
        if colon and self._has_space(space) and (not key.startswith("//") or self._store.entry(space, key) is not None):
            return space, key
        # The key of what a filesystem object or a span gave is no URL: as `entries` shows it.
        found = name if self._store.entry(URLS, name) is not None else remote.canonical(name)
        folder = folder_of(found)
        is_folder = self._store.entry(URLS, found) is None and self._store.entry(DIRECTORIES, folder) is not None
        return (DIRECTORIES, folder) if is_folder else (URLS, found)


def _leased(store: Store | PassThrough, entry: Entry) -> Entry:
    return replace(entry, leased=store.is_leased(entry))
