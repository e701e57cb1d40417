"""`forebay rm`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from forebay._model import Entry, Report
from forebay.cli.filters import parse_filters
from forebay.cli.hints import ABSENT, FAILED
from forebay.cli.options import DryRunOption, FilterOption, JsonOption, RootOption, YesOption, argument, find_each, opened
from forebay.cli.removal import carry_out
from forebay.cli.render import Output, say_error
from forebay.errors import ConfigError, NotCached

if TYPE_CHECKING:
    from forebay.cache import Cache


def rm(
    names: Annotated[list[str] | None, argument("NAME", help="URLs, or SPACE:KEY, as `forebay ls` shows them.")] = None,
    filters: FilterOption = [],  # noqa: B006 - typer wants a list and makes a new one
    dry_run: DryRunOption = False,
    yes: YesOption = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Remove entries by name, or (after asking) by filter. What is in use or pinned stays, and is named."""
    if bool(names) == bool(filters):
        raise ConfigError("rm takes names, or --filter: one of the two", name="rm", value="")
    output = Output(as_json)
    with opened(root, change=not dry_run) as cache:
        entries, missing = find_each(cache, names or [])
        report: Report | None
        if names and not dry_run:
            report = _remove(cache, entries, missing, output)
        else:
            ids = {entry.id for entry in entries}
            passes = (lambda entry: entry.id in ids) if names else parse_filters(filters)
            pinned = [entry.name for entry in entries if entry.life == "pinned"] if names else None
            report = carry_out(cache.plan(where=passes), output, dry_run=dry_run, yes=yes, pinned=pinned)
    for error in missing:
        say_error(error)
    _fail_if_spared(report)
    if missing:
        raise typer.Exit(ABSENT)


def _remove(cache: Cache, entries: list[Entry], missing: list[NotCached], output: Output) -> Report:
    """Remove ``entries``; those that are gone meanwhile are added to ``missing``."""
    reports = []
    for entry in entries:
        try:
            reports.append(cache.evict(entry))
        except NotCached as error:
            missing.append(error)
    report = Report(
        removed=tuple(name for r in reports for name in r.removed),
        spared=tuple(name for r in reports for name in r.spared),
        freed=sum(r.freed for r in reports),
    )
    output.document(report)
    output.report(report, pinned=[entry.name for entry in entries if entry.life == "pinned"])
    return report


def _fail_if_spared(report: Report | None) -> None:
    if report is not None and report.spared:
        raise typer.Exit(FAILED)
