"""Which transfers wait for a connection, and which pause for the rate: the limits of the node in one process.

All of it belongs to the thread of the loop, and none of it waits. A transfer that may not begin yet stands in a queue, one
that may not receive yet is paused, and the loop calls `run` whenever it is `due`."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

from forebay.remote.base import LONGEST_DELAY, LOOK, Limits, NoPermit, Permit, PermitRequest
from forebay.remote.http.transfers import CurlHandle, HttpTransfer

TURN = 0.1
"""Seconds for which a permit may serve one transfer after the other while other processes wait for one."""
KEEP = 2.0  # seconds: an idle connection and its permit are kept for so long, unless another process waits
LOOK_IDLE = 0.02  # seconds between two looks whether another process waits for the permit of an idle connection


class HostQueue:
    """The transfers of this process to one host that wait, and the permits that this process has for it."""

    def __init__(self, limits: Limits, host: str) -> None:
        self.limits, self.host = limits, host
        self.waiting: deque[HttpTransfer] = deque()
        self.idle: list[tuple[Permit, float]] = []  # with the time since when its connection is idle
        self.permits = 0  # with those of running transfers
        self._request: PermitRequest | None = None

    def first(self) -> HttpTransfer | None:
        """The transfer that is next."""
        while self.waiting and self.waiting[0].is_done:
            self.waiting.popleft()
        return self.waiting[0] if self.waiting else None

    def take_permit(self) -> Permit | None:
        """A permit for the next transfer; None: not yet."""
        if self.idle and not self.idle[-1][0].is_wanted(TURN):
            return self.idle.pop()[0]
        if self._request is None:
            self._request = self.limits.request(self.host)
        permit = self._request.try_take()
        if permit is not None:
            self._request = None
            self.permits += 1
        return permit

    def stop_waiting(self) -> None:
        if self._request is not None:
            self._request.cancel()
            self._request = None


class Admission:
    """Begins transfers when the limit of connections to their hosts allows it. A permit is kept with its connection, which
    is closed before the permit is released: so connections that are idle count too.

    ``begin``: begins a transfer. ``close_idle``: closes idle connections to a host until at most so many are open, if any
    of them are idle; False: it cannot tell yet which of them are. ``finish``: ends a transfer. ``due``: when `run` is to be
    called, by the monotonic clock."""

    def __init__(
        self,
        begin: Callable[[HttpTransfer], None],
        close_idle: Callable[[str, int], bool],
        finish: Callable[[HttpTransfer, Exception], None],
    ) -> None:
        self._begin, self._close_idle, self._finish = begin, close_idle, finish
        self._queues: dict[tuple[Limits, str], HostQueue] = {}
        self.due = math.inf

    def add(self, transfer: HttpTransfer, limits: Limits) -> None:
        """Have it begun when a permit is free."""
        key = limits, transfer.request.peer
        if key not in self._queues:
            self._queues[key] = HostQueue(*key)
        self._queues[key].waiting.append(transfer)
        if transfer.request.wait is not None:
            transfer.request.wait.begin()
        self.due = 0.0

    def ended(self, transfer: HttpTransfer) -> None:
        """Take its permit back, if it has one."""
        request, permit, transfer.permit = transfer.request, transfer.permit, None
        if request.wait is not None and permit is not None:
            request.wait.release()
        elif request.wait is not None:
            request.wait.end(has_one=False)
        if permit is not None and request.limits is not None:
            self._queues[request.limits, request.peer].idle.append((permit, time.monotonic()))
        self.due = 0.0

    def waiting(self) -> list[HttpTransfer]:
        """The transfers that have not begun."""
        return [transfer for queue in self._queues.values() for transfer in queue.waiting if not transfer.is_done]

    def run(self, now: float) -> None:
        """Begin what may begin, and release permits that other processes want, or that are not used any more."""
        self.due = math.inf
        for key, queue in list(self._queues.items()):
            self._begin_waiting(queue, now)
            self._release_idle(queue, now)
            if not (queue.waiting or queue.permits):
                del self._queues[key]

    def _begin_waiting(self, queue: HostQueue, now: float) -> None:
        while (transfer := queue.first()) is not None:
            before = queue.permits
            transfer.permit = queue.take_permit()
            if transfer.permit is None:
                for late in [each for each in queue.waiting if each.request.wait is not None and not each.is_done]:
                    wait = late.request.wait  # of calls that may wait no longer
                    if wait is not None and wait.is_over():
                        self._finish(late, NoPermit(queue.limits, queue.host, wait.waited()))
                self.due = min(self.due, now + LOOK)
                return
            if transfer.request.wait is not None:
                transfer.request.wait.end(has_one=True)
            if queue.permits > before:
                self._close_idle(queue.host, queue.permits)  # connections of a time without a limit
            queue.waiting.popleft()
            self._begin(transfer)
        queue.stop_waiting()

    def _release_idle(self, queue: HostQueue, now: float) -> None:
        is_limited = queue.limits.in_force()[1] > 0
        for permit, since in queue.idle.copy():
            if is_limited and now - since < KEEP and not permit.is_wanted():
                self.due = min(self.due, now + LOOK_IDLE)
            elif is_limited and not self._close_idle(queue.host, queue.permits - 1):
                self.due = min(self.due, now + LOOK)
            else:
                queue.idle.remove((permit, since))
                queue.permits -= 1
                permit.release()

    def stop(self) -> None:
        """Release all permits that are not in use."""
        for queue in self._queues.values():
            queue.stop_waiting()
            for permit, _ in queue.idle:
                permit.release()
        self._queues.clear()
        self.due = math.inf


class Throttle:
    """Pauses transfers while the bytes a second of the node are used up, and resumes them in turn.

    ``resume``: offers a receiver again what was not given to it. ``due``: as for `Admission`."""

    def __init__(self, resume: Callable[[CurlHandle], None]) -> None:
        self._resume = resume
        self._paused: dict[Limits, deque[CurlHandle]] = {}
        self.due = math.inf

    def pause(self, handle: CurlHandle) -> None:
        """Resume it when more bytes may come."""
        if handle.limits is not None:
            self._paused.setdefault(handle.limits, deque()).append(handle)
            self.due = 0.0

    def forget(self, handle: CurlHandle) -> None:
        """The transfer has ended."""
        for handles in self._paused.values():
            if handle in handles:
                handles.remove(handle)

    def run(self, now: float) -> None:
        """Resume what was paused, each transfer in turn, as long as there are bytes."""
        self.due = math.inf
        for limits, handles in list(self._paused.items()):
            while handles and (delay := limits.delay()) <= 0:
                handle = handles.popleft()
                handle.throttled = False
                self._resume(handle)  # it may be paused again at once, behind the others
            if not handles:
                del self._paused[limits]
            else:
                self.due = min(self.due, now + min(delay, LONGEST_DELAY))
