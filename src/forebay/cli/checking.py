"""The verbs that look for faults: `verify`, `doctor`."""

from __future__ import annotations

from pathlib import Path

import click

from forebay.cli.hints import FAILED, NoCache
from forebay.cli.options import existing, json_option, opened, root_option, root_path, verb
from forebay.cli.render import Output, count


@verb("forebay verify", "forebay verify --repair")
@click.option("--repair", is_flag=True, help="Repair what is wrong; damaged entries are removed, and fetched again when needed.")
@click.option("--quick", is_flag=True, help="Do not read the stored bytes: check names, sizes and sums only.")
@root_option
@json_option
def verify(repair: bool, quick: bool, root: Path | None, as_json: bool) -> None:
    """Check the whole cache: every stored byte against its checksum, the catalog against the files, the sums against the budget."""
    output = Output(as_json)
    with opened(root, change=repair) as cache:
        mended = cache.repair(deep=not quick) if repair else []
        remaining, entries = cache.check(deep=not quick), cache.stats().entries
    output.document({"mended": mended, "problems": remaining})
    if mended:
        output.problems(mended, verb="repaired")
    if remaining:
        output.problems(remaining, verb="left" if repair else "found")
    else:
        output.line(f"no problems found ({count(entries, 'entry', 'entries')})")
    if remaining or any(problem.kind == "catalog" for problem in mended):  # repaired, but the entries it listed are lost
        raise click.exceptions.Exit(FAILED)


@verb("forebay doctor")
@root_option
@json_option
def doctor(root: Path | None, as_json: bool) -> None:
    """Find what is wrong or slow on this machine and in this cache, and say what to do. Changes nothing."""
    from forebay.cli.checkup import check_up  # here: the other verbs need not load it

    try:
        path = existing(root)
    except NoCache:
        path = root_path(root)
    findings = list(check_up(path))
    output = Output(as_json)
    output.document(findings)
    output.findings(findings)
    if any(finding.state == "wrong" for finding in findings):
        raise click.exceptions.Exit(FAILED)
