"""The part of a cache that sees what is kept, and removes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from forebay import _config, errors, remote
from forebay._engine.locks.leases import Lease
from forebay._engine.passthrough import PassThrough
from forebay._engine.stats import Usage
from forebay._engine.store import Store
from forebay._kernel import waits
from forebay._model import Entry, Problem, Report, Strays, Victim, is_text
from forebay.cache.entries import Entries, planned, victim_of
from forebay.cache.space import VALUES
from forebay.origin import DIRECTORIES, URLS, Origin, folder_of
from forebay.reports import Plan, Stats, coldest_until

Name = str | os.PathLike[str] | Entry
"""How an entry is named: a URL, ``space:key``, the key of a value of `Cache.put`, or what `Cache.entries` gave."""


class Upkeep:
    """What `Cache` knows of its entries, whatever front made them. Callable from any thread."""

    _origin: Origin
    closed: bool

    @property
    def _store(self) -> Store | PassThrough:
        return self._origin.store

    # -- what is there ---------------------------------------------------------------------------------------------

    def entries(self, space: str | None = None) -> Entries:
        """What is kept, the least recently used first; ``leased`` says whether anybody holds it now. A sequence that is read from the cache
        in pages, each time it is gone through: it takes no more memory for a million entries than for some thousands."""
        self._check_open()
        return Entries(self._store, space)

    def entry(self, name: Name) -> Entry | None:
        """One entry by its name: a URL, ``space:key``, or a key of `Cache.put`, which is called ``values:key`` in full. What a space has
        under ``space:key`` comes before a key of `Cache.put` that reads so. Raises `Ambiguous` where a name means several."""
        place = self._find(name)
        found = self._store.entry(*place) if place is not None else None
        return _leased(self._store, found) if found is not None else None

    def hold(self, name: Name) -> Lease:
        """A lease on the file or the directory that is kept under a name; nothing is fetched. Raises `NotCached`."""
        place = self._find(name)
        lease = self._store.lease(*place) if place is not None else None
        if lease is None:
            raise errors.NotCached.of(_text(name))
        return lease.reopened_by(open_again, *self.__reduce__(), "hold", name, {})

    @property
    def budget(self) -> int:
        """Bytes that all processes together may keep."""
        self._check_open()
        return self._store.usage().budget

    def stats(self) -> Stats:
        """What all processes of the node did, and what is kept. Where the cache cannot tell, zeros, with one warning."""
        self._check_open()
        try:
            now, counts = self._store.usage(), self._store.counts()
        except OSError as error:
            if isinstance(self._store, Store) and self._store.root.read_only:
                raise  # to look was all that was wanted
            self._origin.warn("stats", "the statistics of the cache cannot be read: %s", error)
            now, counts = Usage(0, 0, 0), {}
        return Stats(
            **counts, bytes_used=now.used, bytes_reserved=now.reserved, budget=now.budget,
            entries=sum(s.entries for s in now.spaces),
            spaces={s.name: (s.entries, s.bytes) for s in now.spaces},
        )  # fmt: skip

    def overhead(self) -> dict[str, int]:
        """Bytes on the disk beside what the budget counts: of the ``log`` of the catalog, the ``slots``, the ``directories``, and of
        ``other`` files. Each has a bound: see "Limits" in the README."""
        self._check_open()
        return self._store.overhead()

    def reset_stats(self) -> None:
        """Count from zero, for all processes."""
        self._check_open()
        with waits.patience(self._origin.timeout):
            self._store.zero_counts()

    def check(self, *, deep: bool = False) -> list[Problem]:
        """What is wrong with the root; empty: it is sound. ``deep`` reads every byte."""
        self._check_open()
        return self._store.check(deep=deep)

    def repair(self, *, deep: bool = True) -> list[Problem]:
        """Mend what `check` finds, by setting aside what is damaged and removing what no entry names; gives what was mended."""
        self._check_open()
        return self._store.repair(deep=deep)

    def strays(self) -> Strays:
        """What lies in the root and is counted by nobody. `prune` and `repair` remove what is of Forebay's making."""
        self._check_open()
        return self._store.strays()

    # -- removing --------------------------------------------------------------------------------------------------

    def pin(self, name: Name) -> None:
        """Never evict this name, nor later versions of it. Raises `NotCached`, or `WriterBusy`."""
        self._set_life(name, "pinned")

    def unpin(self, name: Name) -> None:
        """Let it go again when space is needed. Raises `NotCached`, or `WriterBusy`."""
        self._set_life(name, "cached")

    def _set_life(self, name: Name, life: str) -> None:
        place = self._find(name)
        with waits.patience(self._origin.timeout):
            if place is None or not self._store.set_life(*place, life):
                raise errors.NotCached.of(_text(name))

    def evict(self, name: Name) -> Report:
        """Remove a name now, if nobody uses it; of a directory its files too, but for those that another one has. Raises `NotCached`, or
        `WriterBusy`."""
        entry = self.entry(name)
        if entry is None:
            raise errors.NotCached.of(_text(name))
        files = [file for _, file in self._store.members(entry)] if entry.kind == "tree" else []
        report = self._remove([Origin.victim(entry)])
        if report.spared or not files:
            return report
        with_it = self._remove(map(Origin.victim, files))
        return Report(report.removed + with_it.removed, (), report.freed + with_it.freed)

    def _remove(self, victims: Iterable[Victim]) -> Report:
        with waits.patience(self._origin.timeout):
            return self._store.remove(victims)

    def plan(
        self, need: int | str | None = None, *, where: Callable[[Entry], bool] | None = None, space: str | None = None, all: bool = False
    ) -> Plan:  # fmt: skip
        """What would go: so much of the coldest that ``need`` bytes are free for new ones, of the budget and on the disk above
        ``min_free``; or all that ``where``, ``space`` or ``all`` says. Pinned entries stay. Nothing is removed before `Plan.execute`."""
        self._check_open()
        cold = Entries(self._store, space, lambda e: e.life != "pinned" and (where is None or where(e)))
        if need is None and (where is not None or space is not None or all):
            return Plan(planned(cold), self._remove)
        lacking = self._store.lacking(0 if need is None else _config.parse_size(need, total=self.budget, name="need"))
        return Plan(tuple(map(victim_of, coldest_until(cold, lacking))), self._remove, max(lacking, 0))

    def prune(self) -> Plan:
        """What is over the budget now, or what the disk lacks of ``min_free``. `Plan.execute` removes it, and what dead processes left
        half done, and files that no entry names; unfinished downloads stay, to be gone on from, until their room is wanted."""
        return Plan(self.plan().victims, self._tidy)

    def _tidy(self, victims: Sequence[Victim]) -> Report:
        report = self._remove(victims)
        with waits.patience(self._origin.timeout):
            self._store.make_room()
            strays = self._store.remove_strays()
            return replace(report, freed=report.freed + strays.bytes, stray_files=strays.files)

    def clear(self, space: str | None = None) -> Plan:
        """Everything in one space, or in all: a plan to be executed."""
        return self.plan(space=space, all=True)

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of("cache")

    def _find(self, name: Name) -> tuple[str, str] | None:
        """The space and the key of what is kept under a name; None where nothing is. Raises `Ambiguous`."""
        self._check_open()
        if isinstance(name, Entry):
            return name.space, name.key
        text = os.fspath(name)
        names = {space.name for space in self._store.usage().spaces}

        def is_kept(place: tuple[str, str]) -> bool:
            # the store makes a space that it is asked for, and keeps no key that is no text; looking must not
            return place[0] in names and is_text(place[1]) and self._store.entry(*place) is not None

        space, colon, key = text.partition(":")
        if colon and space in (URLS, VALUES, DIRECTORIES):  # said outright: what tells apart names that mean several
            outright = [place for place in (_places_of(key) if space == URLS else [(space, key)]) if is_kept(place)]
            if outright:
                return outright[0]
        urls = _places_of(text)
        meant = [place for place in ((space, key), next(filter(is_kept, urls), urls[-1]), (VALUES, text)) if is_kept(place)]
        if colon and meant and meant[0] == (space, key) and meant[-1] == (VALUES, text):
            meant.pop()  # which `values:` names; the other has no name but this
        if len(set(meant)) > 1:
            raise errors.Ambiguous.of(_text(name), [f"{space}:{key}" for space, key in dict.fromkeys(meant)])
        return meant[0] if meant else None


def _places_of(url: str) -> list[tuple[str, str]]:
    """Where what a URL names may be kept: under the name itself, as what a filesystem object gave, which is no URL; as an object; as a
    directory."""
    try:
        key = remote.canonical(url)
    except (errors.ConfigError, UnicodeError):
        return [(URLS, url)]
    return [(URLS, url), (URLS, key), (DIRECTORIES, folder_of(key))]


def _text(name: Name) -> str:
    return name.name if isinstance(name, Entry) else remote.redacted(remote.shown(name))


def _leased(store: Store | PassThrough, entry: Entry) -> Entry:
    return replace(entry, leased=store.is_leased(entry))


def open_again(open_cache: Callable[..., Any], where: tuple[Any, ...], method: str, name: str, options: dict[str, Any]) -> Lease:
    """What a pickled lease unpickles as: the same call on the same root. The lease outlives this opening of the cache."""
    with open_cache(*where) as cache:
        lease: Lease = getattr(cache, method)(name, **options)
        return lease
