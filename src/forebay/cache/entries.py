"""The entries of a cache, read in pages: one page at a time is in memory, and reading a page blocks no writer."""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, takewhile
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, TypeVar, overload

from forebay import errors, remote
from forebay._engine.catalog.spill import Spill
from forebay._engine.null_store import NullStore
from forebay._engine.seeing import Facts
from forebay._engine.store import Store
from forebay._kernel import waits
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay._model import DIRECTORIES, URLS, VALUES, Entry, Report, Victim, is_text
from forebay.cache.space import checked
from forebay.fetch import Fetcher
from forebay.fetch.prefix import Prefix
from forebay.fetch.request import PARTS, index_key

if TYPE_CHECKING:
    from forebay.reports import Plan

T = TypeVar("T")
Name = str | os.PathLike[str] | Entry
"""How a caller names an entry: a URL, ``space:key``, the key of a value of `Cache.put`, or an entry of `Cache.entries`."""

IN_MEMORY = 20_000
_FIELDS = attrgetter(*Entry.__match_args__)


@guarded_methods()
class _Listing(Sequence[T]):
    """A sequence that each iteration reads again. Counting and indexing iterate, too. ``list(it)`` counts first, to allocate memory:
    ``list(iter(it))`` iterates once."""

    def __iter__(self) -> Iterator[T]:
        raise NotImplementedError

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return next(iter(self), None) is not None

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, int) and index >= 0:
            for item in islice(self, index, None):
                return item
            raise IndexError(f"there is no item {index}")
        return list(iter(self))[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(iter(self)) == list(iter(other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shown = [repr(item) for item in islice(self, 11)]
        return f"[{', '.join(shown[:10])}{', ...' if len(shown) > 10 else ''}]"


@guarded_methods()
class Entries(_Listing[Entry]):
    """The result of `Cache.entries`: the entries of a cache, or of one of its spaces, the least recently used first.

    A sequence. Each iteration reads the cache in pages: in order of names by `by_name`, in any other order by `sorted_by`. Entries that are
    added or removed during an iteration may or may not be in it; no entry is in it twice. Callable from any thread."""

    def __init__(self, store: Store | NullStore, space: str | None = None, where: Callable[[Entry], bool] | None = None) -> None:
        self._store, self._space, self._where = store, None if space is None else checked(space, "space"), where

    def __iter__(self) -> Iterator[Entry]:
        return self.sorted_by(attrgetter("used"))

    def __len__(self) -> int:
        """The number of entries. Without a filter, the count of the catalog at one moment."""
        if self._where is None:
            return sum(space.entries for space in self._store.seeing.usage().spaces if self._space in (None, space.name))
        return sum(1 for _ in self.by_name())

    def __bool__(self) -> bool:
        return next(self.by_name(), None) is not None

    def by_name(self, *, backwards: bool = False) -> Iterator[Entry]:
        """In order of names."""
        return self._merged(self._of, attrgetter("name"), backwards)

    def names(self, *, backwards: bool = False) -> Iterator[str]:
        """The names alone, in order: faster than `by_name`."""
        if self._where is not None:
            return (entry.name for entry in self.by_name(backwards=backwards))
        return self._merged(self._names_of, None, backwards)

    def facts(self, *, backwards: bool = False) -> Iterator[Facts]:
        """Names, in order, each with what a listing for people shows: faster than `by_name`."""
        return self._merged(self._facts_of, itemgetter(0), backwards)

    def _merged(self, listing_of: Callable[[str, bool], Iterator[T]], name_of: Any, backwards: bool) -> Iterator[T]:
        listings = [listing_of(space, backwards) for space in self._spaces()]
        return chain(*listings) if len(listings) < 2 else heapq.merge(*listings, key=name_of, reverse=backwards)

    def _facts_of(self, space: str, backwards: bool) -> Iterator[Facts]:
        facts = _paged(partial(self._store.seeing.fact_page, space, backwards=backwards), itemgetter(0))
        return facts if space == URLS else ((f"{space}:{one[0]}", *one[1:]) for one in facts)

    def _names_of(self, space: str, backwards: bool) -> Iterator[str]:
        keys = _paged(partial(self._store.seeing.key_page, space, backwards=backwards), str)
        return keys if space == URLS else (f"{space}:{key}" for key in keys)

    def sorted_by(self, number: Callable[[Entry], float], *, backwards: bool = False) -> Iterator[Entry]:
        """In order of this number; if there are many entries, they are sorted in a temporary file."""
        some: list[Entry] = []
        spill: Spill | None = None
        for entry in chain.from_iterable(self._of(space, False) for space in self._spaces()):
            some.append(entry)
            if len(some) >= IN_MEMORY:
                spill = spill or Spill()
                spill.add((number(one), _FIELDS(one)) for one in some)
                some.clear()
        if spill is None:
            return iter(sorted(some, key=number, reverse=backwards))
        spill.add((number(one), _FIELDS(one)) for one in some)
        return (Entry(*row) for row in spill.sorted(backwards=backwards))

    def _spaces(self) -> list[str]:
        return [space.name for space in self._store.seeing.usage().spaces if space.entries and self._space in (None, space.name)]

    def _of(self, space: str, backwards: bool) -> Iterator[Entry]:
        entries = _paged(partial(self._store.seeing.page, space, backwards=backwards), attrgetter("key"))
        return entries if self._where is None else filter(self._where, entries)


def _paged(page: Callable[[str | None], Sequence[T]], key_of: Callable[[T], str], after: str | None = None) -> Iterator[T]:
    page = guarded(page)  # between two pages nothing is held
    while rows := page(after):
        yield from rows
        after = key_of(rows[-1])


@guarded_methods()
class Victims(_Listing[Victim]):
    """The victims of a plan with more entries than should be in memory: those that are there during the iteration. ``len`` iterates, and
    ``list(victims)`` calls it first: ``list(iter(victims))`` is one pass."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries

    def __iter__(self) -> Iterator[Victim]:
        return map(Victim.of, self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)


def planned(entries: Entries) -> Sequence[Victim]:
    """The victims as they are now; if they are many, those that are there during the iteration."""
    if sum(1 for _ in islice(entries.by_name(), IN_MEMORY)) == IN_MEMORY:
        return Victims(entries)
    return tuple(map(Victim.of, entries))


def find(fetcher: Fetcher, name: Name) -> tuple[str, str] | None:
    """The space and the key of the entry of this name; None if there is none. Raises `Ambiguous`."""
    if isinstance(name, Entry):
        return checked(name.space), checked(name.key)
    text, store = remote.as_text(name), fetcher.store
    names = {space.name for space in store.seeing.usage().spaces}

    def is_kept(space_key: tuple[str, str]) -> bool:
        # the store would create an unknown space, and refuses keys that are not text: a look must do neither
        return space_key[0] in names and is_text(space_key[1]) and store.entry(*space_key) is not None

    space, colon, key = text.partition(":")
    if colon and space in (URLS, VALUES, DIRECTORIES):  # an explicit space resolves an ambiguous name
        of_space = (space_key for space_key in (*_keys_of(fetcher, key), (space, key)) if space_key[0] == space)
        qualified = next(filter(is_kept, of_space), None)
        if qualified is not None:
            return qualified
    urls = _keys_of(fetcher, text)
    matches = [space_key for space_key in ((space, key), next(filter(is_kept, urls), urls[-1]), (VALUES, text)) if is_kept(space_key)]
    if colon and matches and matches[0] == (space, key) and matches[-1] == (VALUES, text):
        matches.pop()  # its unambiguous name begins with `values:`; the other has only this one
    if len(set(matches)) > 1:
        raise errors.Ambiguous.of(shown(name), [f"{space}:{key}" for space, key in dict.fromkeys(matches)])
    return matches[0] if matches else None


def _keys_of(fetcher: Fetcher, url: str) -> list[tuple[str, str]]:
    """The spaces and keys under which a URL may be stored: an object; the name itself, if it came from a listing; a directory."""
    try:
        key, folder = (remote.canonical(each, fetcher.naming) for each in (url, Prefix(url).folder))
    except (errors.ConfigError, UnicodeError):
        return [(URLS, url)]
    names = [(URLS, key), (URLS, url)] if url != key else [(URLS, key)]
    return [*names, (DIRECTORIES, folder)]


def not_cached(name: Name) -> errors.NotCached:
    """The error for a name that has no entry."""
    return errors.NotCached.of(shown(name))


def shown(name: Name) -> str:
    """The name of an entry in messages."""
    return name.name if isinstance(name, Entry) else remote.redacted(remote.shown(name))


# -- what is removed ----------------------------------------------------------------------------------------------------


def remove(fetcher: Fetcher, victims: Iterable[Victim]) -> Report:
    """Remove entries, but for those in use, pinned, or part of a directory. Raises `WriterBusy`."""
    with waits.time_limit(fetcher.timeout):
        return fetcher.store.remove(victims)


def evict(fetcher: Fetcher, name: Name, entry: Entry | None) -> Report:
    """See `Cache.evict`. ``entry``: of this name."""
    files = [file for _, file in fetcher.store.members(entry)] if entry is not None and entry.kind == "tree" else []
    named = ([] if entry is None else [entry]) + blocks_of(fetcher, name if entry is None else entry)
    if not named:
        raise not_cached(name)
    report = remove(fetcher, {one.id: Victim.of(one) for one in named}.values())
    if report.spared or not files:
        return report
    with_it = remove(fetcher, map(Victim.of, files))
    return Report(report.removed + with_it.removed, (), report.freed + with_it.freed)


def blocks_of(fetcher: Fetcher, name: Name) -> list[Entry]:
    """The blocks of an object, of all versions and sizes, and their index. ``name``: of the object, or of the index."""
    if isinstance(name, Entry):
        keys = [checked(name.key).removesuffix(index_key(""))] if checked(name.space) == URLS else []
    else:
        of_urls = (key for space, key in _keys_of(fetcher, remote.as_text(name)) if space == URLS)
        keys = [key for key in of_urls if PARTS not in key]  # else a block is not cached
    return [entry for key in dict.fromkeys(keys) if is_text(key) for entry in entries_below(fetcher.store, key + PARTS)]


def entries_below(store: Store | NullStore, prefix: str) -> Iterator[Entry]:
    """The entries of URLs whose keys begin with this, and are longer."""
    following = _paged(partial(store.seeing.page, URLS), attrgetter("key"), after=prefix)
    return takewhile(lambda entry: entry.key.startswith(prefix), following)


def plan(fetcher: Fetcher, need: int | None, where: Callable[[Entry], bool] | None, space: str | None, *, all: bool) -> Plan:
    """See `Cache.plan`. ``need``: in bytes."""
    from forebay.reports import Plan

    execute = partial(remove, fetcher)
    cold = Entries(fetcher.store, space, lambda e: e.life != "pinned" and (where is None or where(e)))
    if need is None and (where is not None or space is not None or all):
        return Plan(planned(cold), execute)
    lacking = fetcher.store.seeing.lacking(need or 0)
    if lacking <= 0:
        return Plan((), execute, 0)
    first = fetcher.store.seeing.first_to_go()
    turns = dict(zip(first, range(-len(first), 0), strict=True))  # before any time of use
    in_turn = cold.sorted_by(lambda entry: turns.get(entry.id, entry.used))
    victims, left = list[Victim](), lacking
    while left > 0 and (entry := next(in_turn, None)) is not None:
        victims.append(Victim.of(entry))
        left -= entry.charge
    return Plan(tuple(victims), execute, lacking)


def prune(fetcher: Fetcher) -> Plan:
    """See `Cache.prune`."""
    from forebay.reports import Plan

    def execute(victims: Sequence[Victim]) -> Report:
        report = remove(fetcher, victims)
        with waits.time_limit(fetcher.timeout):
            fetcher.store.make_room()
            strays = fetcher.store.remove_strays()
            return report._replace(freed=report.freed + strays.bytes, stray_files=strays.files)

    return Plan(plan(fetcher, None, None, None, all=False).victims, execute)
