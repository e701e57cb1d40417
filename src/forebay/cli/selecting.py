"""Which entries a verb is about: those of a space, of names, of filters such as ``size>1GB``; and their sums by prefix."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from forebay._config import parse_age, parse_size
from forebay.cli.hints import ABSENT, NoSuchSpace
from forebay.cli.render import print_error, shown_name
from forebay.errors import ConfigError, NotCached

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache

_TERM = re.compile(r"\s*([a-z]+)\s*(>=|<=|!=|>|<|=)\s*(.*?)\s*")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "=": operator.eq,
    "!=": operator.ne,
}
_AGES = ("used", "created", "validated")
_WORDS = ("space", "kind", "life")
MOST_NODES = 20_000
"""Prefixes that are told apart; further ones count for those above them."""
MOST_CELLS = 24
_DEEPEST = 8


# -- spaces and names --------------------------------------------------------------------------------------------------


def check_space(cache: Cache, name: str | None) -> None:
    """Raise `NoSuchSpace` for an unknown name: a mistyped name must not look like an empty space."""
    if name is not None and name not in (spaces := sorted(cache.stats().spaces)):
        raise NoSuchSpace.of(name, spaces)


def matching(cache: Cache, entries: Iterable[Entry], names: Sequence[str]) -> Iterator[Entry]:
    """Yield the entries whose names begin with one of ``names``, or whose key is one; all if ``names`` is empty."""
    from forebay import remote
    from forebay.cache import origin_of

    heads = list(names)
    for name in names:
        with suppress(ConfigError, UnicodeError):
            heads.append(remote.canonical(name, origin_of(cache).naming))  # as it is stored: a query as its hash, a path as a URL
    values = {f"values:{name}" for name in names}
    prefixes = tuple(heads)

    def is_named(name: str) -> bool:
        return name.startswith(prefixes) or name in values or remote.without_user(name).startswith(prefixes)

    return (entry for entry in entries if not names or is_named(entry.name))


def find_each(cache: Cache, names: Sequence[str]) -> tuple[list[Entry], dict[str, NotCached]]:
    """Return the entries of these names, each once, and an error for each name with no entry, or several."""
    entries: dict[int, Entry] = {}
    missing: dict[str, NotCached] = {}
    for name in dict.fromkeys(names):
        try:
            entry = cache.entry(name)
            if entry is None:
                raise NotCached.of(shown_name(name))
            entries[entry.id] = entry
        except NotCached as error:
            missing[name] = error
    return list(entries.values()), missing


def end_if_missing(missing: Mapping[str, NotCached], code: int = ABSENT) -> None:
    """Print the errors of `find_each`, and exit if there are any."""
    for error in missing.values():
        print_error(error)
    if missing:
        raise click.exceptions.Exit(code)


# -- filters -----------------------------------------------------------------------------------------------------------


def parse_filters(terms: Sequence[str], *, now: float | None = None) -> Callable[[Entry], bool]:
    """Return a predicate that is true for entries that match every term.

    ``size`` compares with a size; ``used``, ``created`` and ``validated`` compare ages (``used>30d``: not used
    for 30 days); ``space``, ``kind`` and ``life`` compare words. Raises `ConfigError`.
    """
    moment = time.time() if now is None else now
    tests = [_parse_term(term, moment) for term in terms]
    return lambda entry: all(test(entry) for test in tests)


def _parse_term(term: str, now: float) -> Callable[[Entry], bool]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise _wrong(term, "a filter is FIELD OPERATOR VALUE, quoted: 'size>1GB'")
    field, sign, text = match.groups()
    compare = _COMPARE[sign]
    if field == "size":
        size = parse_size(text, name="size")
        return lambda entry: compare(entry.size, size)
    if field in _AGES:
        age = parse_age(text, name=field)
        return lambda entry: compare(now - getattr(entry, field), age)
    if field in _WORDS and sign in ("=", "!="):
        return lambda entry: compare(getattr(entry, field), text)
    raise _wrong(term, f"fields are size, {', '.join(_AGES)}, and with = or != {', '.join(_WORDS)}")


def _wrong(term: str, why: str) -> ConfigError:
    return ConfigError(f"--filter {term!r} is invalid: {why}", name="--filter", value=term)


# -- prefixes ----------------------------------------------------------------------------------------------------------


class Cell(NamedTuple):
    """A part of a space: a prefix of names, its bytes and its entries."""

    name: str
    bytes: int
    entries: int


class PrefixNode:
    """A prefix of names: the bytes and the number of the entries below it, and the prefixes that continue it."""

    def __init__(self, name: str) -> None:
        self.name, self.bytes, self.entries = name, 0, 0
        self.children: dict[str, PrefixNode] = {}

    def count(self, size: int) -> None:
        """Count an entry of this size."""
        self.bytes, self.entries = self.bytes + size, self.entries + 1

    def lines(self, depth: int = 0) -> Iterator[tuple[int, str, PrefixNode]]:
        """What is below, the largest first: depth, label and prefix. A prefix that only one other continues shares a line with it."""
        for child in sorted(self.children.values(), key=lambda one: (-one.bytes, one.name)):
            while len(child.children) == 1 and (only := next(iter(child.children.values()))).entries == child.entries:
                child = only
            yield depth, child.name[len(self.name) :], child
            yield from child.lines(depth + 1)


def tree_of(entries: Iterable[tuple[str, int]]) -> PrefixNode:
    """The prefixes of the names of entries, which come with their bytes."""
    top, nodes = PrefixNode(""), 1
    for name, size in entries:
        node = top
        node.count(size)
        for part in _parts(name):
            child = node.children.get(part)
            if child is None:
                if nodes >= MOST_NODES:
                    break
                child, nodes = node.children.setdefault(part, PrefixNode(node.name + part)), nodes + 1
            node = child
            node.count(size)
    return top


def _parts(name: str) -> list[str]:
    """The directories of a name, with their slashes; the host of a URL is the first one."""
    scheme, found, rest = name.partition("://")
    parts = [part + "/" for part in (rest if found else name).split("/")[:-1][:_DEEPEST]]
    return [f"{scheme}://{parts[0]}", *parts[1:]] if found and parts else parts


def cells_of(entries: Iterable[tuple[str, int]]) -> list[Cell]:
    """The largest prefixes of the names of entries, which come with their bytes, the largest first. Together they are all entries."""
    cells: list[Cell] = []
    nodes = [tree_of(entries)]
    while nodes:  # split the largest one
        node = max(nodes, key=lambda one: one.bytes)
        nodes.remove(node)
        children = list(node.children.values())
        if len(cells) + len(nodes) + len(children) + 1 > MOST_CELLS:
            children = []
        nodes += children
        own = node.entries - sum(child.entries for child in children)
        if own:
            cells.append(Cell(node.name, node.bytes - sum(child.bytes for child in children), own))
    return sorted(cells, key=lambda cell: -cell.bytes)
