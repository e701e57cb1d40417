"""The asynchronous calls of `Cache`: what is awaited at the same time is fetched together."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, BinaryIO

from forebay import errors
from forebay._engine.leases import Lease
from forebay._kernel import interrupts
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay._kernel.threads import call_in_loop, in_thread
from forebay._model import URLS
from forebay.fetch import Fetcher
from forebay.fetch.background import Background
from forebay.fetch.files import opened, stream
from forebay.fetch.job import REOPENED, Job
from forebay.fetch.request import FetchOptions, Target

LARGE = 8 << 20
"""Bytes of an entry that may have to be verified, which takes too long for the thread of an event loop."""


class AsyncFetches:
    """The fetches that coroutines of this process await, in any event loop.

    A coroutine that is cancelled gives up its result only: the object is fetched all the same, since others may wait for it."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher, self._background = fetcher, Background(fetcher, "async")

    async def read(self, target: Target, options: FetchOptions) -> memoryview:
        """The bytes, read-only. Raises as `Cache.read`."""
        data = (await self.fetch(target, options, leased=False)).data
        assert data is not None, "a job without an error has its result"
        return data

    async def local(self, target: Target, options: FetchOptions) -> Lease:
        """A lease on the cached copy. Raises as `Cache.local`."""
        lease = (await self.fetch(target, options, leased=True)).lease
        assert lease is not None, "a job without an error has its result"
        return lease

    async def open(self, target: Target, options: FetchOptions, block_size: int | str | None = None) -> BinaryIO:
        """A file on the cached copy, or on the remote where there is no room. Raises as `Cache.open`."""
        if block_size is not None or (target.in_place is not None and not options.force) or options.bypass:
            return await in_thread(self._fetcher.open, target, options, block_size)
        try:
            return opened(await self.local(target, options))
        except (errors.CacheFault, errors.WaitTimeout) as error:
            self._fetcher.fall_back(error, target.key)
            return await in_thread(stream, self._fetcher, target, options)

    async def fetch(self, target: Target, options: FetchOptions, *, leased: bool) -> Job:
        """Fetch an object; returns the job with its result, or raises its error. ``leased``: see `Job`."""
        until = None if options.timeout is None else time.monotonic() + options.timeout
        job = Job(self._fetcher, target, options, leased=leased)
        if job.skips_cache:
            await in_thread(job.run)
            return job
        with contextlib.suppress(errors.CacheFault):  # the pipeline reports it
            entry = self._fetcher.store.entry(URLS, target.key)  # a hit does not wait behind objects under way
            found = None if entry is None else await in_thread(job.look) if entry.size > LARGE else job.look()
            if found is not None:
                return job
        has_failed = False
        while True:
            await self._fetched(job)
            if leased and not has_failed and isinstance(job.error, REOPENED):
                has_failed, job = True, Job(self._fetcher, target, options, leased=True)
                continue
            if not job.is_busy:
                break
            left = None if until is None else max(until - time.monotonic(), 0.0)
            try:
                hold = await self._fetcher.store.locks.hold_async(URLS, target.key, timeout=left)
            except (errors.CacheFault, errors.WaitTimeout) as error:
                await in_thread(job.bypass, error)
                break
            hold.release()  # the one that had it has fetched the object, or has failed
            job = Job(self._fetcher, target, options, leased=leased, since=job.since, stamp=job.stamp)
        if job.error is not None:
            raise job.error
        return job

    async def _fetched(self, job: Job) -> None:
        """Wait until the job has its result, or is busy."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        @functools.partial(guarded, always=True)
        def settle() -> None:
            if not future.done():
                future.set_result(None)
            elif future.cancelled() and job.lease is not None:
                job.lease.close()

        def done(job: Job) -> None:
            try:
                call_in_loop(loop, settle)
            except RuntimeError:  # the event loop was closed
                if job.lease is not None:
                    job.lease.close()

        self._background.submit(job, done)
        await future


@guarded_methods()
class AsyncLocal:
    """An awaitable local copy: ``async with`` gives its path, ``await`` its `Lease`. Returned by `Cache.alocal`."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get
        self._lease: Lease | None = None

    def __await__(self) -> Generator[Any, None, Lease]:
        return interrupts.Steps(self._get())

    async def __aenter__(self) -> str:
        self._lease = await self
        return self._lease.path

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._lease is not None:
            self._lease.close()
