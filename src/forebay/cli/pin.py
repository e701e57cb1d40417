"""`forebay pin`."""

from __future__ import annotations

from forebay.cli.options import JsonOption, Names, RootOption, each_name, opened


def pin(names: Names, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Keep entries: they are not evicted until `forebay unpin`, and count against the budget."""
    with opened(root, change=True) as cache:
        each_name(cache, names, cache.pin, done="pinned", as_json=as_json)
