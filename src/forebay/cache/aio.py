"""The asynchronous calls of `Cache`: what is awaited at the same time is fetched together."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple

from forebay import errors
from forebay._engine.locks.leases import Lease
from forebay.origin import Origin
from forebay.origin.bulk import BulkFetch, Request
from forebay.origin.files import opened
from forebay.origin.request import FetchOptions, Target
from forebay.origin.spaces import URLS


class _Awaited(NamedTuple):
    """A request, and where its result is awaited."""

    request: Request
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]

    def settle(self) -> None:
        """In the event loop: wake the coroutine, if it still waits."""
        if not self.future.done():
            self.future.set_result(None)
        elif self.request.lease is not None:
            self.request.lease.close()  # its task was cancelled


class AsyncFetches:
    """The fetches that coroutines of this process await, in any event loop: one bulk fetch, in a thread that lives while there are any.

    A coroutine that is cancelled gives up its result only: the object is fetched all the same, since others may wait for it."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()  # guards what follows
        self._new: deque[_Awaited] = deque()
        self._under_way: dict[int, _Awaited] = {}
        self._bulk: BulkFetch | None = None

    async def read(self, target: Target, options: FetchOptions) -> memoryview:
        """The bytes, read-only. Raises as `Cache.read`."""
        request = await self.fetch(target, options, view=True)
        if request.data is None:
            raise request.error or errors.Closed.of("cache")
        return request.data

    async def local(self, target: Target, options: FetchOptions) -> Lease:
        """A lease on the cached copy. Raises as `Cache.local`."""
        request = await self.fetch(target, options, view=False)
        if request.lease is None:
            raise request.error or errors.Closed.of("cache")
        return request.lease

    async def open(self, target: Target, options: FetchOptions) -> BinaryIO:
        """A file on the cached copy, or on the remote where there is no room. Raises as `Cache.open`."""
        if (target.in_place is None or options.force) and not options.bypass:
            request = await self.fetch(target, options, view=False)
            if request.lease is not None:
                return opened(request.lease)
            if request.error is not None and not isinstance(request.error, errors.CacheFault):
                raise request.error
        return await asyncio.to_thread(self._origin.open, target, options)

    async def fetch(self, target: Target, options: FetchOptions, *, view: bool) -> Request:
        """Fetch an object; returns the request with its result. ``view``: see `Request`."""
        until = None if options.timeout is None else time.monotonic() + options.timeout
        while True:
            request = Request(target, options, view=view)
            loop = asyncio.get_running_loop()
            awaited = _Awaited(request, loop, loop.create_future())
            self._submit(awaited)
            await awaited.future
            if not request.is_busy:
                return request
            left = None if until is None else max(until - time.monotonic(), 0.0)
            try:
                hold = await self._origin.store.locks.hold_async(URLS, target.key, timeout=left)
            except (errors.CacheFault, errors.WaitTimeout) as error:
                return await self._alone(request, error)
            hold.release()  # the one that had it has fetched the object, or has failed

    async def _alone(self, request: Request, error: errors.ForebayError) -> Request:
        """Without the cache, whose lock could not be waited for."""
        request.is_busy = False
        if request.view:
            self._origin.fall_back(error, request.target.key)
            request.data = await asyncio.to_thread(self._origin.direct, request.target, request.options)
        else:
            request.error = error
        return request

    def _submit(self, awaited: _Awaited) -> None:
        if self._pid != os.getpid():
            self._begin()
        with self._lock:
            self._new.append(awaited)
            if self._bulk is not None:
                self._bulk.wake()
                return
            self._bulk = bulk = BulkFetch(self._origin, waits=False)
        threading.Thread(target=self._run, args=(bulk,), daemon=True, name="forebay-async").start()

    def _run(self, bulk: BulkFetch) -> None:
        try:
            for request in bulk.run_as_they_come(self._take):
                self._deliver(request)
        except BaseException as error:  # noqa: BLE001 (raised where the results are awaited)
            with self._lock:
                self._bulk = None
                lost = [*self._under_way.values(), *self._new]
                self._new.clear()
            for awaited in lost:
                self._under_way[id(awaited.request)] = awaited
                awaited.request.error = error if isinstance(error, Exception) else errors.Closed("the thread that fetched it was ended")
                self._deliver(awaited.request)

    def _take(self, most: int) -> Sequence[Request] | None:
        with self._lock:
            taken = [self._new.popleft() for _ in range(min(most, len(self._new)))]
            for awaited in taken:
                self._under_way[id(awaited.request)] = awaited
            if not self._under_way:
                self._bulk = None  # the next request starts another thread
                return None
        return [awaited.request for awaited in taken]

    def _deliver(self, request: Request) -> None:
        with self._lock:
            awaited = self._under_way.pop(id(request))
        try:
            awaited.loop.call_soon_threadsafe(awaited.settle)
        except RuntimeError:  # its event loop was closed
            if request.lease is not None:
                request.lease.close()


class AsyncLocal:
    """A local copy that is awaited: ``async with`` gives its path, ``await`` its `Lease`."""

    def __init__(self, get: Callable[[], Any]) -> None:
        self._get = get
        self._lease: Lease | None = None

    def __await__(self) -> Generator[Any, None, Lease]:
        return self._get().__await__()  # type: ignore[no-any-return]

    async def __aenter__(self) -> str:
        self._lease = await self
        return self._lease.path

    async def __aexit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        if self._lease is not None:
            self._lease.close()
