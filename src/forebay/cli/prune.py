"""`forebay prune`."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

from forebay._config import format_size, parse_size
from forebay.cli.filters import parse_filters
from forebay.cli.hints import NoCache, NotFreed
from forebay.cli.options import DryRunOption, FilterOption, JsonOption, RootOption, SpaceOption, YesOption, check_space, opened, option
from forebay.cli.removal import carry_out
from forebay.cli.render import Output, note
from forebay.errors import ConfigError, ForebayError

if TYPE_CHECKING:
    from forebay.claims import ClaimInfo


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

    What some process is using stays. Unfinished downloads stay too, to be gone on from, until their room is wanted. Without
    --free and --filter the claims of dead jobs are freed as well, also where there is no cache.
    """
    passes = parse_filters(filters) if filters else None
    if space is not None and free is None and passes is None:
        raise ConfigError("--space goes with --free or --filter; `forebay clear --space` removes it all", name="--space", value=space)
    output = Output(as_json)
    if free is not None or passes is not None:
        with opened(root, change=not dry_run) as cache:
            check_space(cache, space)
            plan = cache.plan(None if free is None else _wanted(free, cache.budget), where=passes, space=space)
            report = carry_out(plan, output, dry_run=dry_run, yes=yes)
        can_be_had = plan.frees if report is None else report.freed
        if can_be_had < plan.lacking:
            what = f"--free {free} takes the removal of {format_size(plan.lacking)}, of which {format_size(can_be_had)}"
            raise NotFreed(f"{what} {'can go' if dry_run else 'went'}; the rest is pinned, in use, or promised to fetches")
        return
    dead = _dead_claims(dry_run=dry_run)
    output.dead_claims(dead, "would be freed" if dry_run else "freed")
    try:
        with opened(root, change=not dry_run) as cache:
            strays = cache.strays()
            output.strays(strays)
            carry_out(cache.prune(), output, dry_run=dry_run, yes=yes, claims=dead, strays=strays)
    except NoCache as error:
        if root is not None:
            raise
        note(str(error))
        output.document({"claims": dead})


def _wanted(free: str, budget: int) -> int:
    size = parse_size(free, total=budget, name="--free")
    if size > budget:
        raise ConfigError(
            f"--free {free} is more than the budget of {format_size(budget)}: so much is never free", name="--free", value=free
        )
    return size


def _dead_claims(*, dry_run: bool) -> list[ClaimInfo]:
    """What dead jobs of this user left, freed unless ``dry_run``. Nobody is asked: the user's next claim would free them too."""
    from forebay.claims import list_claims, prune_claims

    try:
        return [claim for claim in list_claims() if not claim.live and claim.uid == os.geteuid()] if dry_run else prune_claims()
    except (ForebayError, OSError) as error:  # of the node, which is no reason to leave the cache as it is
        note(f"claims: {error}")
        return []
