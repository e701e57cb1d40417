"""`forebay unpin`."""

from __future__ import annotations

from forebay.cli.options import JsonOption, Names, RootOption, each_name, opened


def unpin(names: Names, root: RootOption = None, as_json: JsonOption = False) -> None:
    """Let entries go when space is needed, as before `forebay pin`."""
    with opened(root, change=True) as cache:
        each_name(cache, names, cache.unpin, done="unpinned", as_json=as_json)
