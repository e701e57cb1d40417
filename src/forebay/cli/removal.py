"""A plan of removal: shown, agreed to, carried out, reported. What `rm`, `prune` and `clear` share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from forebay.cli.hints import FAILED
from forebay.cli.render import Output, confirmed

if TYPE_CHECKING:
    from forebay._model import Report, Strays
    from forebay.claims import ClaimInfo
    from forebay.reports import Plan


def carry_out(
    plan: Plan, output: Output, *, dry_run: bool, yes: bool, claims: Sequence[ClaimInfo] | None = None, strays: Strays | None = None
) -> Report | None:  # fmt: skip
    """What really happened; None with ``dry_run``. Exits where nobody agrees; where nothing would go nobody is asked.

    ``claims``, ``strays``: freed beside it, for the one JSON document."""
    also = {name: value for name, value in (("claims", claims), ("strays", strays)) if value is not None}
    if dry_run:
        output.document({"victims": plan.victims, "frees": plan.frees, **also})
        output.victims(plan.victims, plan.frees)
        return None
    if plan.victims and not yes:
        output.victims(plan.victims, plan.frees)
    if plan.victims and not confirmed("Remove them?", yes=yes):
        raise typer.Exit(FAILED)
    report = plan.execute()
    output.document({**dataclasses.asdict(report), **also})
    output.report(report)
    return report
