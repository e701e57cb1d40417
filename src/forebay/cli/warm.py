"""`forebay warm`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from forebay.cli.fetching import conclude, fetch_all
from forebay.cli.options import JobsOption, JsonOption, RootOption, argument, filled
from forebay.cli.render import Output, note
from forebay.errors import ConfigError

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.reports import OnProgress


def warm(
    source: Annotated[
        str, argument("FILE|PREFIX", help="A file of URLs, one a line ('-': standard input), or a URL: all that begins with it.")
    ],
    jobs: JobsOption = 16,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fill the cache before a job. What is there already is skipped: after an interruption the same command goes on."""
    urls = list(dict.fromkeys(_urls(source)))
    with filled(root) as cache:

        def fetch(url: str, told: OnProgress) -> Entry | None:
            return cache.pull(url, on_progress=told)

        outcomes = fetch_all(urls, fetch, jobs=jobs, quiet=as_json)
    bad = sum(o.state in ("failed", "past") for o in outcomes)
    if bad:
        note(f"{bad:,} of {len(urls):,} failed; the same command tries these again")
    conclude(outcomes, Output(as_json))


def _urls(source: str) -> Iterable[str]:
    if source == "-":
        return _lines(sys.stdin)
    if source.lower().startswith(("http://", "https://")):
        raise ConfigError(f"{source}: HTTP lists nothing: give a file of URLs, or - and the URLs", name="FILE|PREFIX", value=source)
    if source and ("://" in source or Path(source).is_dir()):
        return _listing(source)
    if not source or not Path(source).exists():
        raise ConfigError(f"{source!r} is neither a file of URLs nor the URL of a prefix", name="FILE|PREFIX", value=source)
    try:
        with open(source, encoding="utf-8") as file:
            return _lines(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is no text of URLs: {error}", name="FILE|PREFIX", value=source) from error


def _lines(file: Iterable[str]) -> list[str]:
    """URLs of a text: blank lines and those that begin with # are left out."""
    return [text for line in file if (text := line.strip()) and not text.startswith("#")]


def _listing(prefix: str) -> list[str]:
    from forebay import remote  # here, so that `forebay --help` need not load it

    found = [info.url for info in remote.resolve(prefix, remote.RemoteOptions.from_environment()).list(prefix)]
    if not found:
        raise ConfigError(f"nothing begins with {prefix}", name="FILE|PREFIX", value=prefix)
    return found
