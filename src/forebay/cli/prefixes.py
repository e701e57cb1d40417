"""Names of entries as a tree of prefixes, with sums: for `ls --tree` and the report."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

MOST_NODES = 20_000
"""Prefixes that are told apart; further ones count for those above them."""
_DEEPEST = 8


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
    parts = (rest if found else name).split("/")[:-1][:_DEEPEST]
    parts = [part + "/" for part in parts]
    return [f"{scheme}://{parts[0]}", *parts[1:]] if found and parts else parts
