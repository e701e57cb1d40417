"""`forebay pull`."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import unquote, urlsplit

from forebay.cli.fetching import conclude, fetch_all
from forebay.cli.options import JobsOption, JsonOption, RootOption, argument, opened, option
from forebay.cli.render import Output
from forebay.errors import ConfigError, NoSpace

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache
    from forebay.reports import OnProgress, Progress


def pull(
    urls: Annotated[list[str], argument("URL", help="An object; with a slash at the end a directory.")],
    to: Annotated[str | None, option("--to", metavar="PATH", help="Copy to this file, or into this directory, too.")] = None,
    include: Annotated[list[str], option("--include", metavar="PATTERN", help="Of a directory only these, such as 'model-*'.")] = [],  # noqa: B006
    exclude: Annotated[list[str], option("--exclude", metavar="PATTERN", help="Of a directory all but these.")] = [],  # noqa: B006
    overwrite: Annotated[bool, option("--overwrite", help="Replace files of others where a directory is copied to.")] = False,
    jobs: JobsOption = 4,
    sha256: Annotated[str | None, option("--sha256", metavar="HEX", help="What the bytes must hash to (one URL).")] = None,
    refresh: Annotated[bool, option("--refresh", help="Ask the source now, however fresh the copy is.")] = False,
    root: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fetch objects and directories into the cache: each once for the whole node. Who comes second waits for the first, and sees how far
    it is."""
    urls = list(dict.fromkeys(urls))
    folders = [url for url in urls if _is_directory(url)]
    if sha256 is not None and (len(urls) > 1 or folders or not _is_sha256(sha256)):
        raise ConfigError("--sha256 takes 64 hexadecimal digits, and the URL of one object", name="--sha256", value=sha256)
    if not folders and (include or exclude or overwrite):
        message = "--include, --exclude and --overwrite are for directories: the URL of one ends with a slash"
        raise ConfigError(message, name="--include", value=str(include or exclude))
    targets = _targets(urls, to) if to is not None else {}
    for url, target in targets.items():
        _check_writable(target, directory=_is_directory(url))
    part: dict[str, Any] = {"include": include or None, "exclude": exclude or None}
    with opened(root, make=True) as cache:

        def fetch(url: str, told: OnProgress) -> Entry | None:
            if _is_directory(url):
                return _pull_directory(cache, url, targets.get(url), told, refresh=refresh, overwrite=overwrite, **part)
            entry = cache.pull(url, refresh=refresh, sha256=sha256, on_progress=told)
            if url in targets:
                _copy(cache, url, targets[url], sha256=sha256)
            return entry

        outcomes = fetch_all(urls, fetch, jobs=jobs, quiet=as_json)
    conclude(outcomes, Output(as_json), past_is_failure=to is None)


def _is_directory(url: str) -> bool:
    return url.partition("#")[0].partition("?")[0].endswith("/")


def _pull_directory(
    cache: Cache, url: str, target: Path | None, told: OnProgress, *, refresh: bool, overwrite: bool, **part: Any
) -> Entry | None:  # fmt: skip
    """None where there was no room for it in the cache, but at its target."""
    size = 0

    def tell(step: Progress) -> None:
        nonlocal size
        size = step.total or size
        told(step)

    try:
        with cache.directory(url, force=True, refresh=refresh, on_progress=tell, **part) as lease:
            if target is not None:
                cache.copy_directory(url, target, force=True, overwrite=overwrite, **part)
            return replace(lease.entry, size=size)  # what its files have, not what the tree of links takes
    except NoSpace:
        if target is None:
            raise
    cache.copy_directory(url, target, force=True, overwrite=overwrite, refresh=refresh, on_progress=tell, **part)
    return None


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text.lower())


def _targets(urls: list[str], to: str) -> dict[str, Path]:
    """Which file each object, and which directory each directory, is copied to."""
    if len(urls) == 1 and (_is_directory(urls[0]) or not (to.endswith("/") or os.path.isdir(to))):
        return {urls[0]: Path(to)}
    targets = {url: Path(to) / _file_name(url) for url in urls}
    if len(set(targets.values())) < len(urls):
        raise ConfigError("two of the URLs end in the same name: --to one directory cannot hold both", name="--to", value=to)
    return targets


def _check_writable(target: Path, *, directory: bool) -> None:
    """Before anything is fetched, not after."""
    there = next(path for path in (target.absolute() / "x" if directory else target.absolute()).parents if path.exists())
    if (target.is_dir() and not directory) or not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        wrong = f"{target} is a directory" if target.is_dir() and not directory else f"no file can be made in {there}"
        raise ConfigError(f"--to {target}: {wrong}", name="--to", value=str(target))


def _file_name(url: str) -> str:
    name = unquote(urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{url} ends in no name that a file could have: give --to a file", name="--to", value=url)
    return name


def _copy(cache: Cache, url: str, target: Path, **how: Any) -> None:
    """Whole or not at all: a reader of ``target`` never sees half a file."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        with cache.open(url, **how) as source, open(part, "xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
