"""A plan of removal: shown, agreed to, carried out, reported. What `rm`, `prune` and `clear` share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from forebay.cli.hints import FAILED
from forebay.cli.render import Output, confirmed

if TYPE_CHECKING:
    from forebay._model import Report
    from forebay.reports import Plan


def carry_out(plan: Plan, output: Output, *, dry_run: bool, yes: bool) -> Report | None:
    """What really happened; None with ``dry_run``. Exits where nobody agrees; where nothing would go nobody is asked."""
    if dry_run:
        output.document({"victims": plan.victims, "frees": plan.frees})
        output.victims(plan.victims, plan.frees)
        return None
    if plan.victims and not yes:
        output.victims(plan.victims, plan.frees)
    if plan.victims and not confirmed("Remove them?", yes=yes):
        raise typer.Exit(FAILED)
    report = plan.execute()
    output.document(report)
    output.report(report)
    return report
