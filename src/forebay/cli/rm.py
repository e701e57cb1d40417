"""`forebay rm`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from forebay._model import Entry, Report
from forebay.cli.filters import parse_filters
from forebay.cli.hints import ABSENT, FAILED
from forebay.cli.options import DryRunOption, FilterOption, JsonOption, RootOption, YesOption, argument, opened
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
    with opened(root) as cache:
        if names and not dry_run:
            missing = _remove(cache, names, output)
        else:
            passes = _named(cache, names) if names else parse_filters(filters)
            plan = cache.plan(where=passes)
            report, missing = carry_out(plan, output, dry_run=dry_run, yes=yes), []
            _fail_if_spared(report)
    if missing:
        raise typer.Exit(ABSENT)


def _remove(cache: Cache, names: list[str], output: Output) -> list[str]:
    """Remove what is there of ``names``; the others."""
    reports, missing = [], []
    for name in dict.fromkeys(names):
        try:
            reports.append(cache.evict(name))
        except NotCached:
            missing.append(name)
    report = Report(
        removed=tuple(name for r in reports for name in r.removed),
        spared=tuple(name for r in reports for name in r.spared),
        freed=sum(r.freed for r in reports),
    )
    output.document(report)
    output.report(report, pinned=[name for name in report.spared if (entry := cache.entry(name)) and entry.life == "pinned"])
    for name in missing:
        say_error(NotCached.of(name))
    _fail_if_spared(report)
    return missing


def _named(cache: Cache, names: list[str]) -> Callable[[Entry], bool]:
    ids = {entry.id for name in names if (entry := cache.entry(name)) is not None}
    return lambda entry: entry.id in ids


def _fail_if_spared(report: Report | None) -> None:
    if report is not None and report.spared:
        raise typer.Exit(FAILED)
