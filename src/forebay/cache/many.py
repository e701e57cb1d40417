"""Calls of `Cache` for many objects at once: see `forebay.fetch.pipeline`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self, cast, overload

from forebay import _config, errors
from forebay._engine.index.memo import Hit
from forebay._engine.leases import Lease
from forebay._kernel.interrupts import guarded_methods, items_of_program, paced, portions
from forebay._logs import logger
from forebay._model import Entry, exact_str
from forebay.fetch import Fetcher
from forebay.fetch.background import run_beside
from forebay.fetch.job import Job
from forebay.fetch.pipeline import Pipeline
from forebay.fetch.request import FetchOptions, ReadOptions, Target, first_touch, is_there
from forebay.remote.urls import Url, as_text

if TYPE_CHECKING:
    from forebay.reports import ProgressReporter, WarmReport

log = logger("forebay.cache")

MEANWHILE = 64
"""The number of cached objects that are read while fetches are under way: other processes may wait for these fetches."""


@guarded_methods("leases", "__getitem__", "__len__")
class LocalFiles(Sequence[str]):
    """The paths of the cached copies of several objects, in the order of the call. Returned by `Cache.local_many`. They exist, unchanged,
    until `close`, the end of a ``with`` block, or until this object is dropped. With ``return_exceptions``, an error can take the place of
    a path."""

    def __init__(self, leases: Sequence[Lease | Exception]) -> None:
        self._leases = tuple(leases)

    @property
    def leases(self) -> tuple[Lease | Exception, ...]:
        """The leases; each can be closed on its own."""
        return self._leases

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return [_path(lease) for lease in self._leases[index]] if isinstance(index, slice) else _path(self._leases[index])

    def __len__(self) -> int:
        return len(self._leases)

    def close(self) -> None:
        """Release all of them. Idempotent."""
        for lease in self._leases:
            if isinstance(lease, Lease):
                lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<forebay.LocalFiles of {len(self):,} objects>"


def _path(lease: Lease | Exception) -> str | Exception:
    return lease if isinstance(lease, Exception) else lease.path


def _several(urls: Iterable[Url], name: str) -> Iterable[Url]:
    """The URLs of a call. Raises `ConfigError` for a single one."""
    if isinstance(urls, str | os.PathLike):
        raise errors.ConfigError(f"{name} takes several URLs: a list, even of one", name="urls", value=str(urls))
    return urls if isinstance(urls, list) else items_of_program(urls)


def read_many(fetcher: Fetcher, urls: Iterable[Url], hit: Hit | None, options: ReadOptions, *, return_exceptions: bool) -> list[Any]:
    """See `Cache.read_many`. ``hit``: serves what the process remembers; None: the options do not allow it."""
    every = list(_several(urls, "read_many"))
    if not {*map(type, every)} <= {str}:
        every = [url if exact_str(url) is None and not isinstance(url, os.PathLike) else as_text(url) for url in every]
    results: list[Any] = [None] * len(every)
    later = [] if hit is None else _read_until_miss(fetcher, every, hit, results)

    def read_later() -> None:
        for place in later:
            results[place] = first_touch(fetcher, every[place], force=False)

    def fetch(missing: list[int], meanwhile: Callable[[], None] | None = None) -> None:
        if missing:
            jobs = _jobs(fetcher, every, missing, options, results, leased=False)
            for job in Pipeline(fetcher, meanwhile=meanwhile).run(list(jobs)):
                for place in jobs[job]:
                    results[place] = job.data if job.error is None else job.error

    if missing := _missing(results):
        fetch(sorted({*missing} - {*later}), read_later)
        fetch(_missing(results))  # some of the objects that were there may have been evicted since
    return results if return_exceptions else _checked(results)


def _read_until_miss(fetcher: Fetcher, urls: Sequence[Url], hit: Hit, results: list[Any]) -> list[int]:
    """Read what the process remembers, and the others up to the first that has to be fetched. Returns the places of those behind it that
    the cache has: they are read while fetches are under way."""
    max_age, later, reads = fetcher.max_age, list[int](), True
    results[:] = [hit(url, max_age) if type(url) is str else None for some in portions(urls) for url in some]
    with contextlib.suppress(errors.ConfigError, errors.MissingExtra):  # `target` raises it too
        for place in paced(_missing(results)):
            if reads or len(later) >= MEANWHILE:
                results[place] = first_touch(fetcher, urls[place], force=False)
                reads = reads and results[place] is not None
            elif is_there(fetcher, urls[place]):
                later.append(place)
    return later


def _missing(results: Sequence[object]) -> list[int]:
    return [place for place, result in enumerate(results) if result is None]  # by identity: views are slow to compare


def local_many(
    fetcher: Fetcher, urls: Iterable[Url], options: ReadOptions, reopened: Callable[[Lease, Url], Lease], *, return_exceptions: bool
) -> LocalFiles:  # fmt: skip
    """See `Cache.local_many`. ``reopened``: makes a lease one that can be pickled."""
    every = list(_several(urls, "local_many"))
    results: list[Any] = [None] * len(every)
    jobs = _jobs(fetcher, every, range(len(every)), options, results, leased=True)
    try:
        for job in Pipeline(fetcher).run(list(jobs)):
            lease = job.lease and reopened(job.lease, every[jobs[job][0]])
            for place in jobs[job]:
                results[place] = lease if job.error is None else job.error
        return LocalFiles(results if return_exceptions else _checked(results))
    except BaseException:
        LocalFiles(results).close()  # the frames of the error hold them
        raise


def _jobs(
    fetcher: Fetcher, urls: Sequence[Url], places: Iterable[int], options: ReadOptions, results: list[Any], *, leased: bool
) -> dict[Job, list[int]]:  # fmt: skip
    """A job for each object, with the places of its results: an object that is named several times is fetched once. Where a URL names
    nothing, the error is put into ``results``."""
    fetch_options = FetchOptions.of(fetcher, **options)
    by_key: dict[tuple[str, str | None], Job] = {}
    jobs: dict[Job, list[int]] = {}
    for place in paced(places):
        try:
            target = fetcher.target(urls[place], options.get("filesystem"))
        except errors.ForebayError as error:
            results[place] = error
            continue
        key = target.key, target.in_place
        if key not in by_key:
            by_key[key] = Job(fetcher, target, fetch_options, leased=leased)
        jobs.setdefault(by_key[key], []).append(place)
    return jobs


def _checked(results: list[Any]) -> list[Any]:
    """The results, if none of them is an error; else raises the first one."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


class Pulled(NamedTuple):
    """An object of a call that fetches many into the cache: its URL as it was given, and the lease on its copy, or the error."""

    url: str
    lease: Lease | None = None
    error: Exception | None = None


Options = Callable[[str, str], tuple[FetchOptions, "ProgressReporter"]]
"""Makes the options of an object, and what reports its progress, from its URL and its key."""


class _Pulls:
    """The jobs of a call that fetches many objects into the cache, for one iteration. ``invalid``: URLs that name nothing."""

    def __init__(self, fetcher: Fetcher, urls: Iterable[Url], target: Callable[[Url], Target], options: Options) -> None:
        self._fetcher, self._urls, self._target, self._options = fetcher, urls, target, options
        self._under_way: dict[Job, tuple[str, ProgressReporter]] = {}
        self.invalid: list[Pulled] = []

    def __iter__(self) -> Iterator[Job]:
        wait = None
        for url in items_of_program(self._urls):
            text = as_text(url)
            try:
                target = self._target(url)
            except errors.ForebayError as error:
                self.invalid.append(Pulled(text, error=error))
                continue
            own, reporter = self._options(text, target.key)
            wait = wait or own.wait
            job = Job(self._fetcher, target, own._replace(wait=wait, ahead=True), leased=True)
            self._under_way[job] = text, reporter
            yield job

    def result(self, job: Job) -> Pulled:
        """What became of a job; its progress is reported. The caller closes the lease."""
        url, reporter = self._under_way.pop(job)
        lease, error = job.lease, cast(Exception | None, job.error)
        try:
            with self._fetcher.store.locks.working():
                if lease is not None:
                    reporter.say("done", lease.entry.size, lease.entry.size)
                elif isinstance(error, errors.NoSpace):
                    _report_no_space(job.target, error, reporter)
        except BaseException:
            if lease is not None:
                lease.close()  # the frames of the error hold it
            raise
        return Pulled(url, lease, error)


def _report_no_space(target: Target, error: errors.NoSpace, reporter: ProgressReporter) -> None:
    log.warning("%s is not stored: %s", target.key, str(error))
    reporter.say("direct", 0, None)


def pull(fetcher: Fetcher, target: Target, options: FetchOptions, reporter: ProgressReporter) -> Entry | None:
    """See `Cache.pull`."""
    try:
        with (lease := fetcher.lease(target, options)):
            reporter.say("done", lease.entry.size, lease.entry.size)
            return lease.entry
    except errors.NoSpace as error:
        _report_no_space(target, error, reporter)
        return None


def pull_each(
    fetcher: Fetcher, urls: Iterable[Url], target: Callable[[Url], Target], options: Options, jobs: int | None
) -> Generator[Pulled, None, None]:  # fmt: skip
    """Fetch many objects into the cache, ``jobs`` at a time, and yield each when it is there, or has failed. The caller closes the leases.
    Between two objects this call may hold the keys of others: the caller must not wait for a key meanwhile."""
    pulls = _Pulls(fetcher, urls, target, options)
    with contextlib.closing(Pipeline(fetcher, side_by_side=jobs).run(pulls)) as fetched:
        for job in fetched:
            yield pulls.result(job)
    yield from pulls.invalid


def warm(
    fetcher: Fetcher, urls: Iterable[Url], target: Callable[[Url], Target], options: Options, jobs: int | None
) -> WarmReport:  # fmt: skip
    """See `Cache.warm`."""
    from forebay.reports import WarmReport

    done: list[str] = []
    failed: list[tuple[str, errors.ForebayError]] = []

    def settle(pulled: Pulled) -> None:
        if pulled.lease is not None:
            pulled.lease.close()
            done.append(pulled.url)
        elif isinstance(pulled.error, errors.ForebayError):
            failed.append((pulled.url, pulled.error))
        elif pulled.error is not None:
            raise pulled.error

    _several(urls, "warm")
    if jobs is not None:
        _config.parse_count(jobs, name="jobs")
    if isinstance(urls, Sized):
        with contextlib.closing(pull_each(fetcher, urls, target, options, jobs)) as each:
            for pulled in each:
                settle(pulled)
    else:
        pulls = _Pulls(fetcher, urls, target, options)
        run_beside(fetcher, pulls, lambda job: settle(pulls.result(job)), jobs)
        for pulled in pulls.invalid:
            settle(pulled)
    return WarmReport(tuple(done), tuple(failed))
