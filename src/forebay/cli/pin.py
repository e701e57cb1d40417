"""`forebay pin`."""

from __future__ import annotations

from forebay.cli.options import JsonOption, Names, RootOption, each_name, opened


def pin(names: Names, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Keep entries: they are not evicted until `forebay unpin`, and count against the budget."""
    with opened(root) as cache:
        each_name(names, cache.pin, done="pinned", as_json=as_json)
