"""The verb that shows all of a cache at once: `report`."""

from __future__ import annotations

from pathlib import Path

import click

from forebay._config import format_size
from forebay.cli.options import opened, verb
from forebay.cli.render import Output, count, length_of
from forebay.cli.streams import write_whole

LARGEST = 12
"""Prefixes of a space that the report in a terminal has."""


@verb("forebay report", "forebay report --html report.html", options="root json")
@click.option("--html", "file", metavar="FILE", help="Write one self-contained HTML page; - is standard output.")
def report(file: str | None, root: Path | None, as_json: bool) -> None:
    """Show what occupies the cache, what it did in the last day and month, and what happens now: as text, HTML or JSON."""
    from forebay.cli.report.content import gather

    if as_json and file is not None:
        raise click.UsageError("--json and --html exclude each other")
    with opened(root) as cache:
        content = gather(cache)
    output = Output(as_json)
    if file is not None:
        from forebay.cli.report.page import page

        text = page(content)
        if file == "-":
            output.raw(text.rstrip("\n"))
        else:
            write_whole(Path(file), text.encode("utf-8", "backslashreplace"))
        return
    output.document(content)
    stats, (minutes, hours) = content.stats, content.history()
    output.facts({
        "cache": content.path, "used": f"{format_size(stats.bytes_used)} of {format_size(stats.budget)}", "entries": f"{stats.entries:,}",
        "hit rate": f"{stats.hit_rate:.1%}", "in use": count(content.now.leased, "entry", "entries"),
        "fetches": f"{len(content.now.fetches):,}", "claims": f"{len(content.claims):,}", "failures": f"{len(content.now.failures):,}",
        "history": length_of(hours or minutes),
    })  # fmt: skip
    rows = [
        (name, format_size(cell.bytes), f"{cell.entries:,}", cell.name)
        for name, cells in content.prefixes.items()
        for cell in cells[:LARGEST]
    ]
    if rows:
        output.table(("SPACE", "BYTES>", "ENTRIES>", "PREFIX"), rows)
