"""Calls of `Cache` for many objects at once: see `forebay.origin.bulk`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, overload

from forebay import errors
from forebay._engine.index.memo import Hit
from forebay._engine.locks.leases import Lease
from forebay._logs import logger
from forebay.origin import Origin
from forebay.origin.bulk import BulkFetch, Wanted
from forebay.origin.feeding import fetch_beside
from forebay.origin.request import FetchOptions, Target, first_touch
from forebay.remote.urls import Url

if TYPE_CHECKING:
    from forebay.reports import ProgressReporter, WarmReport

log = logger("forebay.cache")


class LocalFiles(Sequence[str]):
    """The paths of the cached copies of several objects, in the order of the call; they exist, unchanged, until `close`, or the end of a
    ``with`` block, or until this object is dropped. In a call with ``return_exceptions`` an error stands in the place of a path."""

    def __init__(self, leases: Sequence[Lease | Exception]) -> None:
        self._leases = tuple(leases)

    @property
    def leases(self) -> tuple[Lease | Exception, ...]:
        """The leases, each of which can be closed on its own."""
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


def _listed(urls: Iterable[Url], name: str) -> Sequence[Url]:
    return list(_several(urls, name))


def _several(urls: Iterable[Url], name: str) -> Iterable[Url]:
    """The URLs of a call. Raises `ConfigError` for a single one."""
    if isinstance(urls, str | os.PathLike):
        raise errors.ConfigError(f"{name} takes several URLs: a list, even of one", name="urls", value=os.fspath(urls))
    return urls


def read_many(
    origin: Origin, urls: Iterable[Url], hit: Hit | None, target: Callable[[Url], Target], options: FetchOptions, *,
    return_exceptions: bool,
) -> list[Any]:  # fmt: skip
    """See `Cache.read_many`. ``hit``: serves what the process remembers; None: the options do not allow it."""
    every = _listed(urls, "read_many")
    results: list[Any] = [None] * len(every)
    places = _Places(results, target, options, view=True)
    for place, url in enumerate(every):
        results[place] = None if hit is None else _hit_at_once(origin, hit, url, options)
        if results[place] is None:
            places.add(place, url)
    for request in BulkFetch(origin).run(places.requests):
        places.settle(request, request.data)
    return results if return_exceptions else _checked(results)


def _hit_at_once(origin: Origin, hit: Hit, url: Url, options: FetchOptions) -> memoryview | None:
    view = hit(url, origin.max_age)  # type: ignore[arg-type]  # a path misses
    if view is not None:
        return view
    try:
        return first_touch(origin, url, force=options.force)
    except errors.ConfigError:
        return None  # `target` raises it too


def local_many(
    origin: Origin, urls: Iterable[Url], target: Callable[[Url], Target], options: FetchOptions,
    reopened: Callable[[Lease, Url], Lease], *, return_exceptions: bool,
) -> LocalFiles:  # fmt: skip
    """See `Cache.local_many`. ``reopened``: makes a lease one that can be pickled."""
    every = _listed(urls, "local_many")
    results: list[Any] = [None] * len(every)
    places = _Places(results, target, options, view=False)
    for place, url in enumerate(every):
        places.add(place, url)
    try:
        for request in BulkFetch(origin).run(places.requests):
            places.settle(request, request.lease and reopened(request.lease, every[places.first(request)]))
        return LocalFiles(results if return_exceptions else _checked(results))
    except BaseException:
        LocalFiles(results).close()  # the frames of the error hold them
        raise


class _Places:
    """Which results of a call each request is for: an object that is named several times is fetched once."""

    def __init__(self, results: list[Any], target: Callable[[Url], Target], options: FetchOptions, *, view: bool) -> None:
        self._results, self._target, self._options, self._view = results, target, options, view
        self._by_key: dict[tuple[str, str | None], list[int]] = {}
        self._of_request: list[list[int]] = []
        self.requests: list[Wanted] = []

    def add(self, place: int, url: Url) -> None:
        try:
            target = self._target(url)
        except errors.ForebayError as error:
            self._results[place] = error
            return
        places = self._by_key.setdefault((target.key, target.in_place), [])
        places.append(place)
        if len(places) == 1:
            self.requests.append(Wanted(target, self._options, len(self._of_request), self._view))
            self._of_request.append(places)

    def first(self, request: Wanted) -> int:
        return self._of_request[request.number][0]

    def settle(self, request: Wanted, value: object) -> None:
        for place in self._of_request[request.number]:
            self._results[place] = value if request.error is None else request.error


def _checked(results: list[Any]) -> list[Any]:
    """The results, if none of them is an error; else raises the first one."""
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def warm(
    origin: Origin, urls: Iterable[Url], target: Callable[[Url], Target],
    options: Callable[[str], tuple[FetchOptions, ProgressReporter]], jobs: int | None,
) -> WarmReport:  # fmt: skip
    """See `Cache.warm`. ``options``: makes the options of an object, and what reports its progress."""
    from forebay.reports import WarmReport

    done: list[str] = []
    failed: list[tuple[str, errors.ForebayError]] = []
    under_way: dict[int, tuple[str, ProgressReporter]] = {}

    def requests() -> Iterator[Wanted]:
        wait = None
        for number, url in enumerate(urls):
            try:
                found = target(url)
            except errors.ForebayError as error:
                failed.append((os.fspath(url), error))
                continue
            own, reporter = options(found.key)
            wait = wait or own.wait
            under_way[number] = os.fspath(url), reporter
            yield Wanted(found, own._replace(wait=wait), number, view=False)

    def settle(request: Wanted) -> None:
        url, reporter = under_way.pop(request.number)
        if request.lease is not None:
            size = request.lease.entry.size
            request.lease.close()
            done.append(url)
            with origin.store.locks.working():
                reporter.say("done", size, size)
        elif isinstance(request.error, errors.NoSpace):
            log.warning("%s is not kept: %s", request.target.key, str(request.error))
            failed.append((url, request.error))
            with origin.store.locks.working():
                reporter.say("direct", 0, None)
        elif isinstance(request.error, errors.ForebayError):
            failed.append((url, request.error))
        elif request.error is not None:
            raise request.error

    bulk = BulkFetch(origin, side_by_side=jobs)
    if isinstance(_several(urls, "warm"), Sized):
        for request in bulk.run(requests()):
            settle(request)
    else:
        fetch_beside(bulk, requests(), settle)
    return WarmReport(tuple(done), tuple(failed))
