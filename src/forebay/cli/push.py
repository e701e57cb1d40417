"""`forebay push`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from forebay._config import format_size
from forebay.cli.options import filled, jobs_option, looked_into, verb
from forebay.cli.render import Output, count, note, shown_name


@verb("forebay push out/ s3://bucket/run/step_200/", options="dry-run root json")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("url", metavar="URL")
@click.option("--delete", is_flag=True, help="Remove files at URL that are not in DIR, except the metadata.")
@click.option("--keep/--no-keep", help="Also keep the files in the cache, as though fetched.")
@jobs_option(16)
def push(directory: Path, url: str, delete: bool, keep: bool, jobs: int, dry_run: bool, root: Path | None, as_json: bool) -> None:
    """Upload a directory, such as a checkpoint: only missing files are sent, and readers never see an incomplete upload."""
    from forebay.cache import origin_of
    from forebay.cli.bars import Bars
    from forebay.directories import uploading
    from forebay.directories.location import locate
    from forebay.reports import Progress

    began = time.monotonic()
    to_store = keep and not dry_run
    with filled(root) if to_store else looked_into(root, change=True) as cache, Bars(1, quiet=as_json) as bars:
        origin = origin_of(cache)

        def tell(state: str, done: int, total: int) -> None:
            bars.update(Progress(url, done, total, state))

        try:
            done = uploading.push(
                origin, locate(origin, url), directory, delete=delete, keep=keep, dry_run=dry_run, jobs=jobs, tell=tell
            )  # fmt: skip
        except KeyboardInterrupt:
            note("what was sent stays, invisible to readers: the same command resumes there")
            raise
        bars.finished(url, "sent" if done.sent else "already there")
    output = Output(as_json)
    seconds = time.monotonic() - began
    output.document({"url": shown_name(url), "sent": done.sent, "removed": done.removed, "bytes": done.bytes, "seconds": seconds})
    if dry_run:
        for verb, names in (("would send", done.sent), ("would remove", done.removed)):
            for name in names:
                output.line(f"{verb}: {name}")
        output.line(f"{count(len(done.sent), 'file', 'files')}, {format_size(done.bytes)} to send; {len(done.removed):,} to remove")
