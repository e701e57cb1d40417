"""`forebay clear`."""

from __future__ import annotations

from forebay.cli.options import DryRunOption, JsonOption, RootOption, SpaceOption, YesOption, check_space, opened
from forebay.cli.removal import carry_out
from forebay.cli.render import Output


def clear(
    space: SpaceOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove everything, or one space, after asking. What is pinned, or used by some process, stays."""
    with opened(root, change=not dry_run) as cache:
        check_space(cache, space)
        carry_out(cache.clear(space), Output(as_json), dry_run=dry_run, yes=yes)
