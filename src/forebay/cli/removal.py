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
    plan: Plan, output: Output, *, dry_run: bool, yes: bool, claims: Sequence[ClaimInfo] | None = None, strays: Strays | None = None,
    pinned: Sequence[str] | None = None,
) -> Report | None:  # fmt: skip
    """What really happened; None with ``dry_run``. Exits where nobody agrees; where nothing would go nobody is asked.

    ``claims``: freed beside it, for the one JSON document. ``strays``: these go too. ``pinned``: names that were meant, and stay."""
    also = {name: value for name, value in (("claims", claims), ("strays", strays), ("pinned", pinned)) if value is not None}
    goes = (plan.victims, plan.frees, strays)
    if dry_run:
        output.document({"victims": plan.victims, "frees": plan.frees, **also})
        output.victims(*goes)
        output.pinned(pinned or ())
        return None
    if (plan.victims or (strays and strays.files)) and not yes:
        output.victims(*goes)
        if not confirmed("Remove them?"):
            raise typer.Exit(FAILED)
    report = plan.execute()
    output.document({**dataclasses.asdict(report), **also})
    output.report(report)
    return report
