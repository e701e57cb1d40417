"""`forebay push`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from forebay._config import EnvironmentSettings, format_size
from forebay.cli.hints import NoCache
from forebay.cli.options import dry_run_option, filled, jobs_option, json_option, opened, root_option, verb
from forebay.cli.render import Output, count, note, shown_name

if TYPE_CHECKING:
    from forebay.origin import Origin


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was done, or would be. ``sent``, ``removed``: names; ``bytes``: the number of bytes sent."""

    url: str
    sent: tuple[str, ...]
    removed: tuple[str, ...]
    bytes: int
    seconds: float


@verb("forebay push out/ s3://bucket/run/step_200/")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("url", metavar="URL")
@click.option("--delete", is_flag=True, help="Remove files at URL that are not in DIR, except the metadata.")
@click.option("--keep/--no-keep", help="Also keep the files in the cache, as though fetched.")
@jobs_option(16)
@dry_run_option
@root_option
@json_option
def push(directory: Path, url: str, delete: bool, keep: bool, jobs: int, dry_run: bool, root: Path | None, as_json: bool) -> None:
    """Upload a directory, such as a checkpoint: only missing files are sent, and readers never see an incomplete upload."""
    from forebay.cli.bars import Bars
    from forebay.directories import uploading
    from forebay.directories.location import locate
    from forebay.reports import Progress

    began = time.monotonic()
    with _origin(root, keep=keep and not dry_run) as origin, Bars(1, quiet=as_json) as bars:

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
    output.document(Pushed(shown_name(url), done.sent, done.removed, done.bytes, time.monotonic() - began))
    if dry_run:
        for verb, names in (("would send", done.sent), ("would remove", done.removed)):
            for name in names:
                output.line(f"{verb}: {name}")
        output.line(f"{count(len(done.sent), 'file', 'files')}, {format_size(done.bytes)} to send; {len(done.removed):,} to remove")


@contextmanager
def _origin(root: Path | None, *, keep: bool) -> Iterator[Origin]:
    """Yield the cache's origin; one without a cache if there is none and nothing is to be kept."""
    from forebay._engine.passthrough import PassThrough
    from forebay.cache import origin_of
    from forebay.origin import Origin
    from forebay.remote import RemoteOptions

    try:
        with filled(root) if keep else opened(root, change=True) as cache:
            yield origin_of(cache)
            return
    except NoCache:
        pass
    yield Origin(PassThrough(), RemoteOptions.from_environment(), offline=bool(EnvironmentSettings.from_environment().offline))
