"""`forebay doctor`."""

from __future__ import annotations

import typer

from forebay.cli.hints import FAILED, NoCache
from forebay.cli.options import JsonOption, RootOption, existing, place
from forebay.cli.render import Output


def doctor(root: RootOption = None, as_json: JsonOption = False) -> None:
    """Look at this machine and this cache: what is wrong, what would make it slow, and what to do about it. Mends nothing."""
    from forebay.cli.checkup import check_up  # here: the other verbs need not load it

    try:
        where = existing(root)
    except NoCache:
        where = place(root)
    findings = list(check_up(where))
    output = Output(as_json)
    output.document(findings)
    output.findings(findings)
    if any(finding.state == "wrong" for finding in findings):
        raise typer.Exit(FAILED)
