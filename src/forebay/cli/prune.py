"""`forebay prune`."""

from __future__ import annotations

from typing import Annotated

from forebay._config import parse_size
from forebay.cli.filters import parse_filters
from forebay.cli.options import DryRunOption, FilterOption, JsonOption, RootOption, SpaceOption, YesOption, check_space, opened, option
from forebay.cli.removal import carry_out
from forebay.cli.render import Output
from forebay.errors import ConfigError


def prune(
    free: Annotated[str | None, option("--free", metavar="SIZE", help="Make room for SIZE more bytes, least recently used first.")] = None,
    filters: FilterOption = [],  # noqa: B006 - typer wants a list and makes a new one
    space: SpaceOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove what is over the limits, and what killed processes left half done; or as --free and --filter say.

    What some process is using stays. Unfinished downloads stay too, to be gone on from, until their room is wanted.
    """
    passes = parse_filters(filters) if filters else None
    if space is not None and free is None and passes is None:
        raise ConfigError("--space goes with --free or --filter; `forebay clear --space` removes it all", name="--space", value=space)
    with opened(root) as cache:
        check_space(cache, space)
        if free is None and passes is None:
            plan = cache.prune()
        else:
            need = None if free is None else parse_size(free, total=cache.budget, name="--free")
            plan = cache.plan(need, where=passes, space=space)
        carry_out(plan, Output(as_json), dry_run=dry_run, yes=yes)
