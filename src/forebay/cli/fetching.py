"""The verbs that fill the cache: `pull`, `warm`."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

import click

from forebay._logs import logger
from forebay.cli.hints import OK, is_expected, shared_code
from forebay.cli.options import filled, jobs_option, json_option, root_option, verb
from forebay.cli.render import Output, note, print_error, shown_name
from forebay.errors import ConfigError, ForebayError, Foreign, NoSpace, NotFound, RemoteError

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.cache import Cache
    from forebay.cli.bars import Bars
    from forebay.reports import OnProgress, Progress

Fetch = Callable[[str, "OnProgress"], "Entry | None"]

log = logger("forebay.cli")
_STATES = {"past": "read, but not kept: no room", "fetched": "fetched", "kept": "it is in the cache already"}


# -- many fetches at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one URL. ``state``: ``fetched``, ``kept`` (it was in the cache), ``past`` (no room: not kept) or ``failed``."""

    url: str
    state: str
    size: int | None = None
    seconds: float = 0.0
    error: Exception | None = None


def fetch_all(urls: Sequence[str], fetch: Fetch, *, jobs: int, quiet: bool) -> list[Outcome]:
    """Fetch every URL, ``jobs`` at a time, with bars unless ``quiet``; a failure is logged and does not stop the rest.

    Ctrl-C ends the call at once; the threads are daemons and end with the process.
    """
    from forebay._kernel.threads import run_all  # here, so that `forebay --help` need not load it
    from forebay.cli.bars import Bars

    outcomes: list[Outcome] = []
    bars = Bars(len(urls), quiet=quiet)

    def work(url: str) -> None:
        outcome = _fetch(url, fetch, bars)
        bars.finished(url, outcome.state)
        outcomes.append(outcome)

    with _kept_on_interrupt(), bars:
        run_all([functools.partial(work, url) for url in urls], jobs, name="fetch", grace=0.0)
    return outcomes


def _fetch(url: str, fetch: Fetch, bars: Bars) -> Outcome:
    fetched, began = False, time.monotonic()

    def on_progress(step: Progress) -> None:
        nonlocal fetched
        fetched = fetched or step.state == "fetching"
        bars.update(replace(step, url=url))  # the bar's name is the URL as it was given, not as it is stored

    log.debug("%s: looking whether the cache has it", shown_name(url))
    try:
        entry = fetch(url, on_progress)
    except Exception as error:
        log.debug("%s: failed", shown_name(url), exc_info=None if is_expected(error) else error)
        return Outcome(url, "failed", seconds=time.monotonic() - began, error=error)
    seconds = time.monotonic() - began
    state = "past" if entry is None else "fetched" if fetched else "kept"
    log.debug("%s: %s after %.3f s", shown_name(url), _STATES[state], seconds)
    return Outcome(url, state, None if entry is None else entry.size, seconds)


def conclude(outcomes: Sequence[Outcome], output: Output, *, past_is_failure: bool = True) -> None:
    """Print the outcomes as JSON if requested, list the failures, and exit with their code if there are any."""
    output.document([replace(outcome, url=shown_name(outcome.url)) for outcome in outcomes])
    failures = ("failed", "past") if past_is_failure else ("failed",)
    failed = [(o.url, o.error or NoSpace("no room in the cache")) for o in outcomes if o.state in failures]
    for url, error in failed:
        print_error(error, about=shown_name(url))
    code = shared_code([error for _, error in failed])
    if code != OK:
        raise click.exceptions.Exit(code)


# -- pull --------------------------------------------------------------------------------------------------------------


@verb
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--to", metavar="PATH", help="Also copy to this file, or into this directory.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Of a directory only these, such as 'model-*'.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Of a directory all but these.")
@click.option("--overwrite", is_flag=True, help="Replace existing files where --to copies to.")
@jobs_option(4)
@click.option("--sha256", metavar="HEX", help="The expected hash of the bytes (one URL).")
@click.option("--refresh", is_flag=True, help="Ask the source now, however fresh the copy is.")
@root_option
@json_option
def pull(
    urls: Sequence[str],
    to: str | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    overwrite: bool,
    jobs: int,
    sha256: str | None,
    refresh: bool,
    root: Path | None,
    as_json: bool,
) -> None:
    """Fetch objects and directories into the cache, each once for the whole node. The URL of a directory ends with a slash. If another
    process is fetching one already, wait for it and show its progress."""
    urls = list(dict.fromkeys(urls))
    folders = [url for url in urls if _is_directory(url)]
    if sha256 is not None and (len(urls) > 1 or folders or not _is_sha256(sha256)):
        raise ConfigError("--sha256 takes 64 hexadecimal digits, and the URL of one object", name="--sha256", value=sha256)
    if not folders and (include or exclude):
        message = "--include and --exclude are for directories, whose URLs end with a slash"
        raise ConfigError(message, name="--include", value=str([*include, *exclude]))
    if overwrite and to is None:
        raise ConfigError("--overwrite requires --to", name="--overwrite", value="")
    targets = _targets(urls, to) if to is not None else {}
    for url, target in targets.items():
        _check_writable(target, directory=_is_directory(url))
    part: dict[str, Any] = {"include": include or None, "exclude": exclude or None}
    with filled(root) as cache:

        def fetch(url: str, on_progress: OnProgress) -> Entry | None:
            if _is_directory(url):
                return _pull_directory(cache, url, targets.get(url), on_progress, refresh=refresh, overwrite=overwrite, **part)
            try:
                entry = cache.pull(url, refresh=refresh, sha256=sha256, on_progress=on_progress)
            except RemoteError as error:
                if (isinstance(error, NotFound) or _is_local_directory(url)) and _exists_as_directory(cache, url):
                    message = f"{shown_name(url)}: there is no such object, but a directory"
                    raise NotFound(message, url=shown_name(url), todo="put a slash at the end of the URL to fetch the directory") from error
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


def _exists_as_directory(cache: Cache, url: str) -> bool:
    """Whether there is a directory of this name, whose slash was left out."""
    from forebay.cache import origin_of
    from forebay.directories.location import locate
    from forebay.directories.manifests import MARK

    head, mark, query = url.partition("?")
    try:
        location = locate(origin_of(cache), f"{head}/{mark}{query}")
        if location.key.startswith(("http://", "https://")):
            return location.remote.stat(location.object(MARK)) is not None
        return next(location.list(), None) is not None
    except (ForebayError, OSError):
        return False


def _pull_directory(
    cache: Cache, url: str, target: Path | None, on_progress: OnProgress, *, refresh: bool, overwrite: bool, **part: Any
) -> Entry | None:  # fmt: skip
    """Return the entry; None if there was room only at its target."""
    size = 0

    def tell(step: Progress) -> None:
        nonlocal size
        size = step.total or size
        on_progress(step)

    try:
        lease = cache.directory(url, force=True, refresh=refresh, on_progress=tell, **part)
        with lease:
            if target is not None:
                cache.copy_directory(url, target, force=True, overwrite=overwrite, **part)
            return lease.entry._replace(size=size)  # the size of its files, not of the tree of links
    except NoSpace:
        if target is None:
            raise
    cache.copy_directory(url, target, force=True, overwrite=overwrite, refresh=refresh, on_progress=tell, **part)
    return None


def _is_sha256(text: str) -> bool:
    return len(text) == 64 and all(c in "0123456789abcdef" for c in text.lower())


def _targets(urls: Sequence[str], to: str) -> dict[str, Path]:
    """Return the file that each object, and the directory that each directory, is copied to."""
    if len(urls) == 1 and (_is_directory(urls[0]) or not (to.endswith("/") or os.path.isdir(to))):
        return {urls[0]: Path(to)}
    targets = {url: Path(to) / _file_name(url) for url in urls}
    if len(set(targets.values())) < len(urls):
        raise ConfigError("two of the URLs end in the same name: one directory cannot hold both", name="--to", value=to)
    return targets


def _check_writable(target: Path, *, directory: bool) -> None:
    """Raise `ConfigError` for an unusable target before anything is fetched."""
    parent = next(path for path in (target.absolute() / "x" if directory else target.absolute()).parents if path.exists())
    fault = "" if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK) else f"no file can be created in {parent}"
    if not directory and target.exists() and not target.is_file():
        fault = f"{target} is {'a directory' if target.is_dir() else 'not a regular file'}"
    if fault:
        raise ConfigError(f"--to {target}: {fault}", name="--to", value=str(target))


def _file_name(url: str) -> str:
    name = unquote(urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{url} does not end in a file name: pass a file to --to", name="--to", value=url)
    return name


def _copy(cache: Cache, url: str, target: Path, *, overwrite: bool, sha256: str | None) -> None:
    """Copy the object so that ``target`` is complete at any time. Raises `Foreign` if a file with other bytes exists."""
    import secrets
    import shutil

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
        except FileExistsError as error:  # created during the copy
            raise _foreign(target) from error
        except OSError:  # this file system has no links
            if os.path.lexists(target):
                raise _foreign(target) from None
    os.replace(part, target)


def _check_same(source: BinaryIO, target: Path) -> None:
    try:
        with open(target, "rb") as file:
            while True:
                expected, actual = source.read(1 << 20), file.read(1 << 20)
                if expected != actual:
                    raise _foreign(target)
                if not expected:
                    return
    except FileNotFoundError as error:  # a dangling link
        raise _foreign(target) from error


def _foreign(target: Path) -> Foreign:
    return Foreign(f"{target} exists with other bytes: nothing was written", path=str(target))


# -- warm --------------------------------------------------------------------------------------------------------------


@verb
@click.argument("source", metavar="FILE|PREFIX")
@jobs_option(16)
@root_option
@json_option
def warm(source: str, jobs: int, root: Path | None, as_json: bool) -> None:
    """Fill the cache before a job: with the URLs in FILE, one a line ('-': standard input), or all that begin with the URL PREFIX. Objects
    in the cache are skipped: after an interruption the same command resumes."""
    urls = list(dict.fromkeys(_urls(source)))
    with filled(root) as cache:
        outcomes = _warm_all(cache, urls, jobs=jobs, quiet=as_json)
    failed = sum(o.state in ("failed", "past") for o in outcomes)
    if failed:
        note(f"{failed:,} of {len(urls):,} failed; the same command tries these again")
    conclude(outcomes, Output(as_json))


def _warm_all(cache: Cache, urls: Sequence[str], *, jobs: int, quiet: bool) -> list[Outcome]:
    """Warm the cache, with bars unless ``quiet``; a failure does not stop the rest."""
    from forebay.cli.bars import Bars  # here, so that `forebay --help` need not load it

    shown = {_key_of(url): url for url in urls}  # the bar's name is the URL as it was given, not as it is stored
    sizes: dict[str, int] = {}
    began: dict[str, float] = {}
    seconds: dict[str, float] = {}
    with _kept_on_interrupt(), Bars(len(urls), quiet=quiet) as bars:

        def on_progress(step: Progress) -> None:
            key, url, now = step.url, shown.get(step.url, step.url), time.monotonic()
            bars.update(replace(step, url=url))
            if step.state == "fetching":
                began.setdefault(key, now)
            elif step.state in ("done", "direct"):
                sizes[key], seconds[key] = step.done, now - began.get(key, now)
                bars.finished(url, "past" if step.state == "direct" else "fetched" if key in began else "kept")

        report = cache.warm(urls, jobs=jobs, on_progress=on_progress)
        for url, _ in report.failed:
            bars.finished(url, "failed")
    keys = {url: _key_of(url) for url in urls}
    outcomes = [
        Outcome(url, "fetched" if keys[url] in began else "kept", sizes.get(keys[url]), seconds.get(keys[url], 0.0)) for url in report.done
    ]
    for url, error in report.failed:
        state = "past" if isinstance(error, NoSpace) else "failed"
        outcomes.append(Outcome(url, state, seconds=seconds.get(keys[url], 0.0), error=error))
    for outcome in outcomes:
        log.debug("%s: %s", shown_name(outcome.url), _STATES.get(outcome.state, outcome.state))
    return outcomes


def _key_of(url: str) -> str:
    from forebay import remote  # here, so that `forebay --help` need not load it

    try:
        return remote.canonical(url)
    except ConfigError:
        return url  # it fails, and says why


@contextlib.contextmanager
def _kept_on_interrupt() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:  # after the bars, which would be drawn over the note
        note("what was fetched is kept: the same command resumes there")
        raise


def _urls(source: str) -> Iterable[str]:
    if source == "-":
        return _lines(sys.stdin)
    if source.lower().startswith(("http://", "https://")):
        raise ConfigError(
            f"{source}: HTTP servers list no objects: pass a file of URLs, or - and the URLs", name="FILE|PREFIX", value=source
        )
    if source and ("://" in source or Path(source).is_dir()):
        return _listing(source)
    if not source or not Path(source).exists():
        raise ConfigError(f"{source!r} is neither a file of URLs nor the URL of a prefix", name="FILE|PREFIX", value=source)
    try:
        with open(source, encoding="utf-8") as file:
            return _lines(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not a text file of URLs: {error}", name="FILE|PREFIX", value=source) from error


def _lines(file: Iterable[str]) -> list[str]:
    """Return the URLs of a text, without blank lines and those that begin with #."""
    return [text for line in file if (text := line.strip()) and not text.startswith("#")]


def _listing(prefix: str) -> list[str]:
    from forebay import remote  # here, so that `forebay --help` need not load it

    urls = [info.url for info in remote.resolve(prefix, remote.RemoteOptions.from_environment()).list(prefix)]
    if not urls:
        raise ConfigError(f"nothing begins with {prefix}", name="FILE|PREFIX", value=prefix)
    return urls
