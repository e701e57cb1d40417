"""`forebay ls`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from forebay.cli.filters import parse_filters
from forebay.cli.options import FilterOption, JsonOption, RootOption, SpaceOption, argument, check_space, matching, opened, option
from forebay.cli.render import Output


class Order(StrEnum):
    NAME = "name"
    SIZE = "size"
    USED = "used"
    CREATED = "created"


def ls(
    names: Annotated[list[str] | None, argument("NAME", help="Names, or their beginnings.")] = None,
    sort: Annotated[Order, typer.Option("--sort", "-s", help="Largest, latest used, latest created first.")] = Order.NAME,
    reverse: Annotated[bool, option("--reverse", "-r", help="The other way round.")] = False,
    leased: Annotated[bool, option("--leased", help="Only what some process holds now.")] = False,
    filters: FilterOption = [],  # noqa: B006 - typer wants a list and makes a new one
    space: SpaceOption = None,
    quiet: Annotated[bool, option("--quiet", "-q", help="Names only, one a line.")] = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """List what the cache holds."""
    passes = parse_filters(filters)
    with opened(root) as cache:
        check_space(cache, space)
        entries = [e for e in matching(cache.entries(space), names or []) if passes(e) and (e.leased or not leased)]
    if sort is Order.NAME:
        entries.sort(key=lambda entry: entry.name, reverse=reverse)
    else:
        entries.sort(key=lambda entry: float(getattr(entry, sort.value)), reverse=not reverse)
    Output(as_json).entries(entries, names_only=quiet)
