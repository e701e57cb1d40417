"""`forebay pull`."""

from __future__ import annotations

import os
import secrets
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO
from urllib.parse import unquote, urlsplit

from forebay.cli.fetching import conclude, fetch_all
from forebay.cli.options import JobsOption, JsonOption, RootOption, argument, filled, option
from forebay.cli.render import Output, shown_name
from forebay.errors import ConfigError, ForebayError, Foreign, NoSpace, NotFound, RemoteError

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache
    from forebay.reports import OnProgress, Progress


def pull(
    urls: Annotated[list[str], argument("URL", help="An object; with a slash at the end a directory.")],
    to: Annotated[str | None, option("--to", metavar="PATH", help="Copy to this file, or into this directory, too.")] = None,
    include: Annotated[list[str], option("--include", metavar="PATTERN", help="Of a directory only these, such as 'model-*'.")] = [],  # noqa: B006
    exclude: Annotated[list[str], option("--exclude", metavar="PATTERN", help="Of a directory all but these.")] = [],  # noqa: B006
    overwrite: Annotated[bool, option("--overwrite", help="Replace what stands where --to copies to.")] = False,
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
    if not folders and (include or exclude):
        message = "--include and --exclude are for directories: the URL of one ends with a slash"
        raise ConfigError(message, name="--include", value=str(include or exclude))
    if overwrite and to is None:
        raise ConfigError("--overwrite goes with --to", name="--overwrite", value="")
    targets = _targets(urls, to) if to is not None else {}
    for url, target in targets.items():
        _check_writable(target, directory=_is_directory(url))
    part: dict[str, Any] = {"include": include or None, "exclude": exclude or None}
    with filled(root) as cache:

        def fetch(url: str, told: OnProgress) -> Entry | None:
            if _is_directory(url):
                return _pull_directory(cache, url, targets.get(url), told, refresh=refresh, overwrite=overwrite, **part)
            try:
                entry = cache.pull(url, refresh=refresh, sha256=sha256, on_progress=told)
            except RemoteError as error:
                if (isinstance(error, NotFound) or _is_local_directory(url)) and _is_there_as_directory(cache, url):
                    message = f"{shown_name(url)}: there is no such object, but a directory"
                    raise NotFound(message, url=shown_name(url), todo="with a slash at the end of its URL it is fetched whole") from error
                raise
            if url in targets:
                _copy(cache, url, targets[url], overwrite=overwrite, sha256=sha256)
            return entry

        outcomes = fetch_all(urls, fetch, jobs=jobs, quiet=as_json)
    conclude(outcomes, Output(as_json), past_is_failure=to is None)


def _is_directory(url: str) -> bool:
    return url.partition("#")[0].partition("?")[0].endswith("/")


def _is_local_directory(url: str) -> bool:
    from forebay.remote import local_path  # here, so that `forebay --help` need not load it

    path = local_path(url)
    return path is not None and os.path.isdir(path)


def _is_there_as_directory(cache: Cache, url: str) -> bool:
    """Whether there is a directory of this name: for people who leave out its slash."""
    from forebay.cache import origin_of
    from forebay.directories.manifests import MARK
    from forebay.directories.place import place_of

    head, mark, query = url.partition("?")
    try:
        place = place_of(origin_of(cache), f"{head}/{mark}{query}")
        if place.key.startswith(("http://", "https://")):
            return place.remote.stat(place.object(MARK)) is not None
        return next(place.list(), None) is not None
    except (ForebayError, OSError):
        return False


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
        lease = cache.directory(url, force=True, refresh=refresh, on_progress=tell, **part)
        with lease:
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
    wrong = "" if there.is_dir() and os.access(there, os.W_OK | os.X_OK) else f"no file can be made in {there}"
    if not directory and target.exists() and not target.is_file():
        wrong = f"{target} is {'a directory' if target.is_dir() else 'no regular file'}"
    if wrong:
        raise ConfigError(f"--to {target}: {wrong}", name="--to", value=str(target))


def _file_name(url: str) -> str:
    name = unquote(urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{url} ends in no name that a file could have: give --to a file", name="--to", value=url)
    return name


def _copy(cache: Cache, url: str, target: Path, *, overwrite: bool, sha256: str | None) -> None:
    """Whole or not at all: a reader of ``target`` never sees half a file. Raises `Foreign` where a file with other bytes stands."""
    if os.path.lexists(target) and not overwrite:
        with cache.open(url, sha256=sha256) as source:
            _check_same(source, target)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name[:200]}.{secrets.token_hex(4)}.part")
    try:
        with cache.open(url, sha256=sha256) as source, open(part, "xb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        _put_in_place(part, target, overwrite=overwrite)
    finally:
        part.unlink(missing_ok=True)


def _put_in_place(part: Path, target: Path, *, overwrite: bool) -> None:
    if not overwrite:
        try:
            os.link(part, target)
            return
        except FileExistsError as error:  # made while we copied
            raise _foreign(target) from error
        except OSError:  # no links on this file system
            if os.path.lexists(target):
                raise _foreign(target) from None
    os.replace(part, target)


def _check_same(source: BinaryIO, target: Path) -> None:
    try:
        with open(target, "rb") as there:
            while True:
                wanted, found = source.read(1 << 20), there.read(1 << 20)
                if wanted != found:
                    raise _foreign(target)
                if not wanted:
                    return
    except FileNotFoundError as error:  # a link that leads nowhere
        raise _foreign(target) from error


def _foreign(target: Path) -> Foreign:
    return Foreign(f"{target} is there already, with other bytes: nothing was written", path=str(target))
