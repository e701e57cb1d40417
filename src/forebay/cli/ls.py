"""`forebay ls`."""

from __future__ import annotations

from enum import StrEnum
from operator import attrgetter
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
        there = cache.entries(space)
        output = Output(as_json)
        if sort is Order.NAME and not (as_json or names or filters or leased):
            if quiet:
                output.names(there.names(backwards=reverse))
            else:
                output.facts_of_entries(there.facts(backwards=reverse))
            return
        if sort is Order.NAME:
            found = there.by_name(backwards=reverse)
        else:
            found = there.sorted_by(attrgetter(sort.value), backwards=not reverse)
        entries = (e for e in matching(found, names or []) if (not filters or passes(e)) and (e.leased or not leased))
        output.entries(entries, names_only=quiet)
