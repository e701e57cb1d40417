"""Names of entries as a tree of prefixes, with sums: for `ls --tree` and the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

MOST_NODES = 20_000
"""Prefixes that are told apart; further ones count for those above them."""
MOST_CELLS = 24
_DEEPEST = 8


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
