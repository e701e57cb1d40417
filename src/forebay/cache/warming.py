"""Many objects, several at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from forebay import errors, remote
from forebay._model import Entry
from forebay.reports import WarmReport

Url = str | os.PathLike[str]


def warm(pull: Callable[[Url], Entry | None], urls: Iterable[Url], jobs: int) -> WarmReport:
    """Pull all of ``urls``, ``jobs`` at a time, taking the next ones from the iterable only as they are wanted."""
    done: list[str] = []
    failed: list[tuple[str, errors.ForebayError]] = []
    flying: dict[Future[Entry | None], str] = {}

    def land(count: int) -> None:
        while len(flying) > count:
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                _settle(flying.pop(future), future, done, failed)

    pool = ThreadPoolExecutor(max_workers=max(jobs, 1), thread_name_prefix="forebay-warm")
    try:
        for url in urls:
            flying[pool.submit(pull, url)] = os.fspath(url)
            land(2 * jobs)
        land(0)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # after an interrupt nobody waits for what runs
    return WarmReport(tuple(done), tuple(failed))


def _settle(url: str, future: Future[Entry | None], done: list[str], failed: list[tuple[str, errors.ForebayError]]) -> None:
    try:
        entry = future.result()
    except errors.ForebayError as error:
        failed.append((url, error))
        return
    if entry is None:
        key = remote.shown(url)
        failed.append((url, errors.NoSpace(f"{key}: no room", key=key, need=0, free=0, budget=0)))
    else:
        done.append(url)
