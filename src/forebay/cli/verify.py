"""`forebay verify`."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.hints import FAILED
from forebay.cli.options import JsonOption, RootOption, opened, option
from forebay.cli.render import Output


def verify(
    repair: Annotated[bool, option("--repair", help="Mend what is wrong; what is damaged goes, and is fetched again when wanted.")] = False,
    quick: Annotated[bool, option("--quick", help="Do not read the stored bytes: names, sizes and sums only.")] = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check the whole cache: every stored byte against its checksum, the catalog against the files, the sums against the budget."""
    output = Output(as_json)
    with opened(root, change=repair) as cache:
        mended = cache.repair(deep=not quick) if repair else []
        left = cache.check(deep=not quick)
    output.document({"mended": mended, "problems": left})
    if mended:
        output.problems(mended, verb="mended")
    output.problems(left, verb="left" if repair else "found")
    if left or any(problem.kind == "catalog" for problem in mended):  # mended, but all that it listed is lost
        raise typer.Exit(FAILED)
