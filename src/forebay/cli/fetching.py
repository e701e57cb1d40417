"""The verbs that fetch and send: `pull`, `warm`, `cat`, `push`."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import unquote, urlsplit

import click

from forebay._config import format_size
from forebay._kernel.threads import DaemonThread
from forebay._logs import logger
from forebay.cli.arguments import complete_names, expand, filled, jobs_option, looked_into, verb
from forebay.cli.hints import OK, is_expected, shared_code
from forebay.cli.output import Output, copy_to_output, count, note, print_error, shown_name, wants_bars
from forebay.errors import ConfigError, ForebayError, Foreign, NoSpace, NotFound, Offline, RemoteError

if TYPE_CHECKING:
    from forebay._engine.leases import Lease
    from forebay.cache import Cache
    from forebay.cli.bars import Bars
    from forebay.fetch.request import FetchOptions
    from forebay.reports import Progress, ProgressReporter

log = logger("forebay.cli")
TURN = 0.1  # seconds
BLOCK = 1 << 20
_STATES = {
    "fetched": "fetched", "kept": "in the cache already", "past": "copied but not stored: no room", "failed": "failed", "fetch": "to fetch",
}  # fmt: skip


# -- many objects at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result for one URL. ``state``: ``fetched``, ``kept`` (it was in the cache), ``past`` (no room: not kept) or ``failed``; of a dry
    run ``fetch`` in place of the first."""

    url: str
    state: str
    size: int | None = None
    seconds: float = 0.0
    error: Exception | None = None


class Results:
    """The outcomes of one verb, and their bars. One thread may use `call`, any thread `add`."""

    def __init__(self, bars: Bars, jobs: int) -> None:
        """``jobs``: calls at a time."""
        self.bars, self._began, self._jobs = bars, time.monotonic(), jobs
        self.outcomes: list[Outcome] = []
        self._free = threading.Semaphore(jobs)

    def add(self, outcome: Outcome) -> None:
        """Add the final outcome of a URL."""
        error = outcome.error
        log.debug(
            "%s: %s after %.3f s", shown_name(outcome.url), _STATES[outcome.state], outcome.seconds,
            exc_info=None if error is None or is_expected(error) else error,
        )  # fmt: skip
        self.bars.finished(outcome.url, outcome.state)
        self.outcomes.append(outcome)

    def call(self, url: str, call: Callable[[], Outcome]) -> None:
        """Have a thread add the outcome that ``call`` returns, or its error. Waits while ``jobs`` calls are under way."""

        def run() -> None:
            began = time.monotonic()
            try:
                outcome = call()
            except Exception as error:  # noqa: BLE001 (the result for this URL)
                outcome = Outcome(url, "failed", seconds=time.monotonic() - began, error=error)
            self.add(outcome)
            self._free.release()

        self._wait_for_one()
        if not DaemonThread(run, name="forebay-pull").begin():
            run()

    def wait(self) -> None:
        """Wait for all calls. Ctrl-C ends the wait at once; the threads are daemons and end with the process."""
        for _ in range(self._jobs):
            self._wait_for_one()

    def _wait_for_one(self) -> None:
        while not self._free.acquire(timeout=TURN):  # the signal of Ctrl-C may reach another thread, and would not wake this one
            pass

    def conclude(self, output: Output) -> None:
        """Print a summary where neither JSON nor bars show it, then `end`."""
        states = [outcome.state for outcome in self.outcomes]
        if not (output.as_json or wants_bars() or states == ["failed"] * len(states)):
            parts = ", ".join(f"{states.count(state):,} {text}" for state, text in _STATES.items() if state in states)
            fetched = sum(outcome.size or 0 for outcome in self.outcomes if outcome.state in ("fetched", "past"))
            amount = f"; {format_size(fetched)} in {time.monotonic() - self._began:.1f} s" if fetched else ""
            note(f"{count(len(states), 'URL', 'URLs')}: {parts}{amount}")
        end(self.outcomes, output)


class _Watch:
    """Follows the progress of one URL, for its bar and its outcome. ``url``: as it was given."""

    def __init__(self, url: str, bars: Bars) -> None:
        self._url, self._bars, self._began = url, bars, time.monotonic()
        self.size: int | None = None
        self.fetched = False

    def __call__(self, step: Progress) -> None:
        self.fetched = self.fetched or step.state == "fetching"
        self.size = step.total or self.size
        self._bars.update(replace(step, url=self._url))

    def outcome(self, size: int | None, error: Exception | None = None) -> Outcome:
        state = "past" if isinstance(error, NoSpace) else "failed" if error is not None else "fetched" if self.fetched else "kept"
        return Outcome(self._url, state, size, time.monotonic() - self._began, error)


def fetch_each(
    cache: Cache, urls: Sequence[str], bars: Bars, *, jobs: int, refresh: bool = False, sha256: str | None = None, pin: bool = False
) -> Generator[tuple[Outcome, Lease | None], None, None]:
    """Fetch objects into the cache, ``jobs`` at a time, and pin them if ``pin``. Yields the outcome of each as it comes, with the lease
    on its copy, which the caller closes; a failure does not stop the rest. See `pull_each`."""
    from forebay.cache import fetcher_of  # here, so that `forebay --help` need not load the engine
    from forebay.cache.many import pull_each
    from forebay.fetch.request import FetchOptions
    from forebay.reports import ProgressReporter

    fetcher = fetcher_of(cache)
    watches: dict[str, tuple[_Watch, str]] = {}
    fetched: set[str] = set()  # keys: another spelling of such a URL was fetched, too

    def options(url: str, key: str) -> tuple[FetchOptions, ProgressReporter]:
        log.debug("%s: looking whether the cache has it", shown_name(url))
        watch = _Watch(url, bars)
        watches[url] = watch, key
        reporter = ProgressReporter(url, watch)
        on_wait, on_progress = reporter.waiting, reporter.fetching
        own = FetchOptions.of(fetcher, refresh=refresh, sha256=sha256, force=True, pin=pin, on_wait=on_wait, on_progress=on_progress)
        return own, reporter

    with contextlib.closing(pull_each(fetcher, urls, fetcher.target, options, jobs)) as pulled:
        for url, lease, error in pulled:
            watch, key = watches.pop(url, (_Watch(url, bars), url))  # it names nothing
            if watch.fetched:
                fetched.add(key)
            watch.fetched = key in fetched
            yield watch.outcome(None if lease is None else lease.entry.size, error), lease


def end(outcomes: Sequence[Outcome], output: Output) -> None:
    """Print the outcomes as JSON if requested. List the errors by URL, and exit with their code if there are any."""
    output.document([replace(outcome, url=shown_name(outcome.url)) for outcome in outcomes])
    errors = {outcome.url: outcome.error for outcome in outcomes if outcome.error is not None}
    for url, error in errors.items():
        print_error(error, about=shown_name(url))
    code = shared_code(list(errors.values()))
    if code != OK:
        raise click.exceptions.Exit(code)


@contextlib.contextmanager
def _results(urls: Sequence[str], jobs: int, *, quiet: bool) -> Iterator[Results]:
    """The results for these URLs, with a bar for each unless ``quiet``."""
    from forebay.cli.bars import Bars  # here, so that `forebay --help` need not load it

    try:
        with Bars(len(urls), quiet=quiet) as bars:
            yield Results(bars, jobs)
    except KeyboardInterrupt:  # after the bars, which would be drawn over the note
        note("what was fetched is kept: the same command resumes there")
        raise


# -- pull --------------------------------------------------------------------------------------------------------------


@verb(
    "forebay pull https://host/shard-000.tar",
    "forebay pull https://host/model/ --include '*.json' --to model/",
    options="refresh dry-run root json",
)
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--to", metavar="PATH", help="Also copy to this file, or into this directory.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Of directories, only files that match, such as 'model-*'.")
@click.option("--exclude", multiple=True, metavar="PATTERN", help="Of directories, no files that match.")
@click.option("--overwrite", is_flag=True, help="Replace existing files where --to copies to.")
@jobs_option(4)
@click.option("--sha256", metavar="HEX", help="The expected SHA-256 (for one URL).")
@click.option("--pin", is_flag=True, help="Exclude the objects from eviction, as `forebay pin` does.")
def pull(
    urls: Sequence[str], to: str | None, include: tuple[str, ...], exclude: tuple[str, ...], overwrite: bool, jobs: int,
    sha256: str | None, refresh: bool, pin: bool, dry_run: bool, root: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Fetch objects and directories into the cache, each once for the whole node. The URL of a directory ends with a slash. If another
    process is already fetching one, wait for it and show its progress. Braces expand as in bash: 'shard-{000..127}.tar'."""
    urls = list(dict.fromkeys(url for text in urls for url in expand(text)))
    folders = [url for url in urls if _is_directory(url)]
    is_sha256 = sha256 is not None and len(sha256) == 64 and set(sha256.lower()) <= set("0123456789abcdef")
    if sha256 is not None and (len(urls) > 1 or folders or not is_sha256):
        raise ConfigError("--sha256 takes 64 hexadecimal digits, and the URL of one object", name="--sha256", value=sha256)
    if not folders and (include or exclude):
        message = "--include and --exclude are for directories, whose URLs end with a slash"
        raise ConfigError(message, name="--include", value=str([*include, *exclude]))
    if overwrite and to is None:
        raise ConfigError("--overwrite requires --to", name="--overwrite", value="")
    targets = {} if to is None else _targets(urls, to)
    part: dict[str, Any] = {"include": include or None, "exclude": exclude or None}
    if dry_run:
        _show_what_would_be_fetched(dict.fromkeys(urls), root, Output(as_json), jobs=jobs, refresh=refresh, **part)
        return
    with filled(root) as cache, _results(urls, jobs, quiet=as_json) as results:
        objects = [url for url in urls if url not in folders]
        fetching = fetch_each(cache, objects, results.bars, jobs=jobs, refresh=refresh, sha256=sha256, pin=pin)
        later = _pull_objects(cache, fetching, targets, results, overwrite=overwrite, sha256=sha256, pin=pin)
        for url in folders:
            options: dict[str, Any] = {"refresh": refresh, "pin": pin, "overwrite": overwrite, **part}
            later[url] = functools.partial(_pull_directory, cache, url, targets.get(url), _Watch(url, results.bars), **options)
        for url, call in later.items():
            results.call(url, call)
        results.wait()
    results.conclude(Output(as_json))


def _is_directory(url: str) -> bool:
    from forebay.remote import bare

    return bare(url).endswith("/")


def _is_local_directory(url: str) -> bool:
    from forebay.remote import local_path  # here, so that `forebay --help` need not load it

    path = local_path(url)
    return path is not None and os.path.isdir(path)


def _targets(urls: Sequence[str], to: str) -> dict[str, Path]:
    """Return the path that each object or directory is copied to. Raises `ConfigError` for unusable paths, before anything is fetched."""
    if len(urls) == 1 and (_is_directory(urls[0]) or not (to.endswith("/") or os.path.isdir(to))):
        targets = {urls[0]: Path(to)}
    else:
        targets = {url: Path(to) / _file_name(url) for url in urls}
    if len(set(targets.values())) < len(urls):
        raise ConfigError("two of the URLs end in the same name: one directory cannot hold both", name="--to", value=to)
    for url, target in targets.items():
        below = target.absolute() / "x" if _is_directory(url) else target.absolute()
        parent = next(path for path in below.parents if path.exists())
        fault = "" if parent.is_dir() and os.access(parent, os.W_OK | os.X_OK) else f"no file can be created in {parent}"
        if not _is_directory(url) and target.exists() and not target.is_file():
            fault = f"{target} is {'a directory' if target.is_dir() else 'not a regular file'}"
        if fault:
            raise ConfigError(f"--to {target}: {fault}", name="--to", value=str(target))
    return targets


def _file_name(url: str) -> str:
    name = unquote(urlsplit(url).path.rstrip("/").rsplit("/", 1)[-1])
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ConfigError(f"{url} does not end in a file name: pass a file to --to", name="--to", value=url)
    return name


def _show_what_would_be_fetched(sizes: Mapping[str, int | None], root: Path | None, output: Output, *, jobs: int, **options: Any) -> None:
    """Print what would be fetched, and its size; asks the remote for a size that ``sizes`` does not have. Changes nothing, and creates no
    cache. ``options``: of `_planned`."""
    from forebay.cli.bars import Bars  # here, so that `forebay --help` need not load it

    with looked_into(root) as cache, Bars(0, quiet=True) as bars:
        results = Results(bars, jobs)
        for url, size in sizes.items():
            results.call(url, functools.partial(_planned, cache, url, size, **options))
        results.wait()
    by_url = {outcome.url: outcome for outcome in results.outcomes}
    planned = [by_url[url] for url in sizes]
    rows = [("?" if one.size is None else format_size(one.size), _STATES[one.state], shown_name(one.url)) for one in planned]
    output.table(("SIZE>", "STATE", "URL"), rows)
    to_fetch = [one for one in planned if one.state == "fetch"]
    unknown = sum(one.size is None for one in to_fetch)
    what = f"{count(len(to_fetch), 'URL', 'URLs')} would be fetched, {format_size(sum(one.size or 0 for one in to_fetch))}"
    output.line(what + (f" and {unknown:,} of unknown size" if unknown else ""))
    end(planned, output)


def _planned(cache: Cache, url: str, size: int | None, *, include: Any = None, exclude: Any = None, refresh: bool = False) -> Outcome:
    """What a fetch of this URL would do. With ``refresh``, asks the remote whether the stored version is still current. Raises the errors
    of the remote, and `Offline` if the cache must not contact it."""
    from forebay.cache import fetcher_of
    from forebay.directories import trees
    from forebay.directories.location import locate
    from forebay.fetch.request import FetchOptions

    fetcher = fetcher_of(cache)
    if _is_directory(url):
        location = locate(fetcher, url, None, include, exclude)
        entry = cache.entry(f"directories:{location.tree_key}")
        chosen = trees.chosen(location, FetchOptions.of(fetcher, refresh=refresh))
        is_kept = entry is not None and (not refresh or entry.validator == chosen.version)
        return Outcome(url, "kept" if is_kept else "fetch", chosen.size)
    target = fetcher.target(url)
    entry = cache.entry(target.key)
    size = size if entry is None else entry.size
    if refresh or (entry is None and size is None):
        if cache.offline and target.in_place is None:
            raise Offline.of(target.key)
        info = target.remote.stat(url, known=None if entry is None else entry.validator)
        if info is not None:  # None: the version that is kept
            entry, size = None, info.size
    return Outcome(url, "fetch" if entry is None else "kept", size)


def _pull_objects(
    cache: Cache, fetching: Generator[tuple[Outcome, Lease | None], None, None], targets: Mapping[str, Path], results: Results, *,
    overwrite: bool, sha256: str | None, pin: bool,
) -> dict[str, Callable[[], Outcome]]:  # fmt: skip
    """Fetch objects, and copy them to their targets. Returns, by URL, the calls that finish the others: copies that bypass the cache, and
    checks whether a directory was meant. They may wait for keys that ``fetching`` holds, so call them after this ends."""
    from forebay.fetch.files import opened  # here, so that `forebay --help` need not load it

    later: dict[str, Callable[[], Outcome]] = {}
    with contextlib.closing(fetching) as fetched:
        for outcome, lease in fetched:
            url, target, error = outcome.url, targets.get(outcome.url), outcome.error
            if lease is not None and target is not None:
                results.call(url, functools.partial(_copied, outcome, functools.partial(opened, lease), target, overwrite=overwrite))
            elif outcome.state == "past" and target is not None and not pin:
                open_past = functools.partial(cache.open, url, sha256=sha256)
                later[url] = functools.partial(_copied, outcome, open_past, target, overwrite=overwrite)
            elif isinstance(error, NotFound) or (isinstance(error, RemoteError) and _is_local_directory(url)):
                later[url] = functools.partial(_explained, cache, outcome)
            else:
                if lease is not None:
                    lease.close()
                results.add(outcome)
    return later


def _explained(cache: Cache, outcome: Outcome) -> Outcome:
    """The outcome of an object that does not exist. If there is a directory of this name, raises `NotFound` that says to add a slash."""
    from forebay.cache import fetcher_of
    from forebay.directories.location import locate
    from forebay.directories.manifests import MARK

    try:
        location = locate(fetcher_of(cache), outcome.url)
        if location.key.startswith(("http://", "https://")):
            exists = location.remote.stat(location.object(MARK)) is not None
        else:
            exists = next(location.list(), None) is not None
    except (ForebayError, OSError):
        exists = False
    if not exists:
        return outcome
    url = shown_name(outcome.url)
    todo = "put a slash at the end of the URL to fetch the directory"
    raise NotFound(f"{url}: there is no such object, but a directory", url=url, todo=todo) from outcome.error


def _copied(outcome: Outcome, opened: Callable[[], BinaryIO], target: Path, *, overwrite: bool) -> Outcome:
    """Copy an object so that ``target`` is complete at any time. Raises `Foreign` if a file with other bytes exists."""
    from forebay.remote.local import staged  # here, so that `forebay --help` need not load it

    foreign = Foreign(f"{target} exists with other bytes: nothing was written", path=str(target))
    if os.path.lexists(target) and not overwrite:
        with opened() as source:
            if not _holds(target, source):
                raise foreign
        return replace(outcome, error=None)
    target.parent.mkdir(parents=True, exist_ok=True)
    with staged(target) as (part, fd), open(fd, "wb", closefd=False) as copy:
        with opened() as source:
            shutil.copyfileobj(source, copy, BLOCK)
        copy.flush()
        try:
            (os.replace if overwrite else os.link)(part, target)
        except OSError as error:
            if overwrite:
                raise
            if os.path.lexists(target):  # created during the copy
                raise foreign from error
            os.replace(part, target)  # this file system has no links
    return replace(outcome, error=None)


def _holds(target: Path, source: BinaryIO) -> bool:
    """Whether a file has exactly the bytes of ``source``."""
    try:
        with open(target, "rb") as file:
            while expected := source.read(BLOCK):
                if file.read(BLOCK) != expected:
                    return False
            return not file.read(1)
    except FileNotFoundError:  # a dangling link
        return False


def _pull_directory(
    cache: Cache, url: str, target: Path | None, watch: _Watch, *, refresh: bool, pin: bool, overwrite: bool, **part: Any
) -> Outcome:  # fmt: skip
    try:
        with cache.directory(url, force=True, refresh=refresh, pin=pin, on_progress=watch, **part):
            if target is not None:
                cache.copy_directory(url, target, force=True, overwrite=overwrite, **part)
            return watch.outcome(watch.size)  # the size of its files, not of the tree of links
    except NoSpace:
        if target is None or pin:
            raise
    cache.copy_directory(url, target, force=True, overwrite=overwrite, refresh=refresh, on_progress=watch, **part)
    return replace(watch.outcome(None), state="past")


# -- cat ---------------------------------------------------------------------------------------------------------------


@verb("forebay cat https://host/shard-000.tar | tar -t", options="refresh root")
@click.argument("urls", nargs=-1, required=True, metavar="URL...", shell_complete=complete_names)
def cat(urls: Sequence[str], refresh: bool, root: Path | None) -> None:
    """Write objects to standard output, one after another, for piping. Objects that are not in the cache are fetched first. Stops at the
    first failure; `set -o pipefail` passes it on to the shell. Braces expand as in bash: 'shard-{000..127}.tar'."""
    several = [url for text in urls for url in expand(text)]
    for url in several:
        if _is_directory(url) or _is_local_directory(url):
            raise ConfigError(f"{shown_name(url)} is a directory: cat takes objects", name="URL", value=url)
    with filled(root) as cache:
        for url in several:
            with cache.open(url, refresh=refresh) as file:
                copy_to_output(file)


# -- warm --------------------------------------------------------------------------------------------------------------


@verb("forebay warm urls.txt --jobs 32", "forebay warm 'https://host/shard-{000..003}.tar' --dry-run", options="dry-run root json")
@click.argument("sources", nargs=-1, required=True, metavar="FILE|URL...")
@jobs_option(16)
def warm(sources: Sequence[str], jobs: int, dry_run: bool, root: Path | None, as_json: bool) -> None:
    """Fill the cache before a job, from lists of URLs, or with all objects that share a URL prefix. FILE has one URL per line ('-':
    standard input). URL is a prefix, one HTTP object, or, with braces, several objects: 's3://bucket/shard-{000..127}.tar'. Objects in
    the cache are skipped, so the same command resumes after an interruption."""
    sizes: dict[str, int | None] = {}
    for source in sources:
        several = expand(source)
        for one in several:
            is_object = several != [source] and "://" in one and not _is_directory(one)
            for url, size in [(one, None)] if is_object else _urls(one):
                sizes.setdefault(url, size)
    if dry_run:
        _show_what_would_be_fetched(sizes, root, Output(as_json), jobs=jobs)
        return
    urls = list(sizes)
    with filled(root) as cache, _results(urls, jobs, quiet=as_json) as results:
        with contextlib.closing(fetch_each(cache, urls, results.bars, jobs=jobs)) as fetched:
            for outcome, lease in fetched:
                if lease is not None:
                    lease.close()
                results.add(outcome)
    failed = sum(outcome.error is not None for outcome in results.outcomes)
    if failed:
        note(f"{failed:,} of {len(urls):,} failed; the same command tries these again")
    results.conclude(Output(as_json))


def _urls(source: str) -> Iterable[tuple[str, int | None]]:
    """The URLs of a source without braces, with sizes where a listing has them."""
    from forebay import remote  # here, so that `forebay --help` need not load it

    if source == "-":
        return _lines(sys.stdin)
    if source.lower().startswith(("http://", "https://")):
        if not _is_directory(source):
            return [(source, None)]
        message = f"{source}: HTTP servers list no objects: pass their URLs, or a file of URLs"
        raise ConfigError(message, name="FILE|URL", value=source)
    if source and ("://" in source or Path(source).is_dir()):
        found = remote.resolve(source, remote.RemoteOptions.from_environment()).list(source)
        listed = [(info.url, info.size) for info in found if not info.is_folder]
        if not listed:
            raise ConfigError(f"no object's URL begins with {source}", name="FILE|URL", value=source)
        return listed
    if not source or not Path(source).exists():
        raise ConfigError(f"{source!r} is neither a file of URLs nor the URL of a prefix", name="FILE|URL", value=source)
    try:
        with open(source, encoding="utf-8") as file:
            return _lines(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not a text file of URLs: {error}", name="FILE|URL", value=source) from error


def _lines(file: Iterable[str]) -> list[tuple[str, None]]:
    """Return the URLs of a text, without blank lines and those that begin with #."""
    return [(text, None) for line in file if (text := line.strip()) and not text.startswith("#")]


# -- push --------------------------------------------------------------------------------------------------------------


@verb("forebay push out/ s3://bucket/run/step_200/", options="dry-run root json")
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument("url", metavar="URL")
@click.option("--delete", is_flag=True, help="Remove files at URL that are not in DIR, except the metadata.")
@click.option("--keep/--no-keep", help="Also keep the files in the cache, as though fetched.")
@jobs_option(16)
def push(directory: Path, url: str, delete: bool, keep: bool, jobs: int, dry_run: bool, root: Path | None, as_json: bool) -> None:
    """Upload a directory, such as a checkpoint: only missing files are sent, and readers never see an incomplete upload."""
    from forebay.cache import fetcher_of
    from forebay.cli.bars import Bars
    from forebay.directories import uploading
    from forebay.directories.location import locate
    from forebay.reports import Progress

    began = time.monotonic()
    to_store = keep and not dry_run
    with filled(root) if to_store else looked_into(root, change=True) as cache, Bars(1, quiet=as_json) as bars:

        def tell(state: str, done: int, total: int) -> None:
            bars.update(Progress(url, done, total, state))

        try:
            location = locate(fetcher_of(cache), url)
            done = uploading.push(location, directory, delete=delete, keep=keep, dry_run=dry_run, jobs=jobs, tell=tell)
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
