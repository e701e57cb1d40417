"""All HTTP transfers of one process, in one thread: libcurl's multi interface, driven by epoll.

`start` sends a request from any thread. Nothing here follows redirects, adds credentials, or tries again: that is up to
the caller.

A process has one loop, which its first transfer starts. libcurl keeps connections for all transfers of the process. A
forked child starts without any: it never uses, ends or shuts down a connection of its parent, not even one whose
transfer is under way.
"""

from __future__ import annotations

import atexit
import ctypes
import math
import os
import select
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import pycurl

from forebay._kernel import greenlets, host
from forebay._kernel.threads import DaemonThread
from forebay._logs import logger
from forebay.errors import RemoteTimeout
from forebay.remote.base import (
    LONGEST_DELAY,
    LOOK,
    AttemptFailed,
    CallAborted,
    Limits,
    NoPermit,
    Permit,
    PermitRequest,
    Trouble,
    wake_at_end,
)
from forebay.remote.http.transfers import SILENCE, CurlHandle, HttpTransfer, NotConnected

log = logger("forebay.remote")

MAX_IDLE = 128  # connections that are kept
SPARE_HANDLES = 64
TURN = 0.1
"""Seconds for which a permit may serve one transfer after the other while other processes wait for one."""
KEEP = 2.0  # seconds: an idle connection and its permit are kept for so long, unless another process waits
LOOK_IDLE = 0.02  # seconds between two looks whether another process waits for the permit of an idle connection
_MASKS = {
    pycurl.POLL_NONE: 0, pycurl.POLL_IN: select.EPOLLIN, pycurl.POLL_OUT: select.EPOLLOUT,
    pycurl.POLL_INOUT: select.EPOLLIN | select.EPOLLOUT,
}  # fmt: skip


class _Loop:
    """The thread that runs all transfers of this process. Any thread may call `attend` and `stop`; everything else is
    called by the thread of the loop only."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._multi = pycurl.CurlMulti()
        with greenlets.new_epoll() as epoll:
            self._epoll = type(epoll).fromfd(host.not_standard(os.dup(epoll.fileno())))
        self._watched: set[int] = set()
        self._changed: deque[HttpTransfer] = deque()
        self._awake = False  # whether the loop will look at what changed without being woken. Only the loop sets it
        self.sockets: dict[int, int] = {}  # descriptor -> inode of every socket that libcurl opened; it may have closed it since
        self.peers: dict[int, str] = {}  # descriptor -> what it is connected to; without those that were closed here
        self.suspects: set[str] = set()  # see `CurlHandle`
        self._admission, self._throttle = Admission(self), Throttle(self)
        self._looked_at_rates = 0.0
        # by the monotonic clock
        self._timer = math.inf  # when libcurl wants to be called
        self._next_check = math.inf  # when the time of a transfer may be over
        self._running: dict[pycurl.Curl, HttpTransfer] = {}
        self._resolving: set[HttpTransfer] = set()  # those of hosts whose addresses are not known yet
        self._spare: list[CurlHandle] = []
        self._multi.setopt(pycurl.M_SOCKETFUNCTION, self._watch)
        self._multi.setopt(pycurl.M_TIMERFUNCTION, self._set_timer)
        self._multi.setopt(pycurl.M_MAXCONNECTS, MAX_IDLE)
        self._stopping, self._driving = False, threading.Lock()
        self._thread = DaemonThread(self._run, name="http-transfers")
        self._wake = host.not_standard(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        try:
            self._epoll.register(self._wake, select.EPOLLIN)
            self.is_driven = not self._thread.begin()
            # Python 3.12 starts no thread once the main one has ended, as in a function of `atexit`.
            if self.is_driven and threading.main_thread().is_alive():
                raise RuntimeError("can't start new thread")
        except BaseException:
            os.close(self._wake)
            raise

    def attend(self, transfer: HttpTransfer) -> None:
        """Have the loop look at a transfer that is new, or has changed. Does nothing in a forked child, and after the end
        of the loop."""
        if self.usable():
            self._changed.append(transfer)
            if not (self._awake or wake_at_end(self._wake_up)):
                self._wake_up()

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def drive(self) -> None:
        """Where the loop has no thread: do what is to be done, or wait for it a moment, in the thread that waits for a transfer."""
        with self._driving:
            if not self._stopping:
                self._turn(TURN)

    def usable(self) -> bool:
        return self.pid == os.getpid() and not self._stopping

    def stop(self) -> None:
        """At the exit of the process: end the thread, and all transfers."""
        if self.usable():
            self._stopping = True
            self._wake_up()
            if not self.is_driven:
                self._thread.join(1.0)

    def leave_to_parent(self) -> None:
        """In a forked child: replace this process's copies of the parent's sockets, and keep libcurl's objects for ever.

        Freeing them would send a TLS goodbye on the parent's connections, and wait for threads that are not in this
        process. If their descriptors were closed, other files would get these numbers, which libcurl still uses. So
        /dev/null gets them."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))
        with open(os.devnull, "r+b", buffering=0) as nothing:
            for descriptor, inode in self.sockets.items():
                try:
                    if os.fstat(descriptor).st_ino == inode:
                        os.dup2(nothing.fileno(), descriptor, inheritable=False)
                except OSError:
                    continue  # libcurl had closed it
        watched = self._epoll.fileno()
        self._epoll.close()
        os.close(self._wake)
        if greenlets.are_threads():  # the child has a copy of the loop's, which waits for this number: gevent aborts if that is closed
            ready = host.not_standard(os.eventfd(1))
            os.dup2(ready, watched, inheritable=False)
            os.close(ready)

    # -- in the thread of the loop -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._turn()
            for transfer in self._unfinished():
                self.finish(transfer, CallAborted())
        except Exception as error:
            if self.pid != os.getpid():  # a greenlet in a forked child
                return
            log.exception("the loop of HTTP transfers failed")
            self._stopping = True
            for transfer in self._unfinished():
                transfer.is_done = True
                transfer.end(AttemptFailed(f"the client failed: {type(error).__name__}"))
                if transfer.permit is not None:
                    transfer.permit.release()
        self._admission.stop()
        while self._changed:  # what was started since ends at once, instead of waiting for a loop that is gone
            self._look_after(self._changed.popleft())

    def _unfinished(self) -> list[HttpTransfer]:
        return [*self._running.values(), *self._admission.waiting(), *self._resolving]

    def _turn(self, longest: float = math.inf) -> None:
        """Wait for something to happen, and act on it."""
        self._awake = False
        due = min(self._timer, self._next_check, self._throttle.due, self._admission.due, time.monotonic() + longest)
        seconds = 0 if self._changed else None if due == math.inf else max(0.0, due - time.monotonic())
        events = greenlets.poll_events(self._epoll, seconds)
        self._awake = True
        for descriptor, event in events:
            if descriptor == self._wake:
                os.eventfd_read(self._wake)
            elif descriptor in self._watched:
                mask = (event & select.EPOLLIN and pycurl.CSELECT_IN) | (event & select.EPOLLOUT and pycurl.CSELECT_OUT)
                mask |= pycurl.CSELECT_ERR if event & (select.EPOLLERR | select.EPOLLHUP) else 0
                self._multi.socket_action(descriptor, mask)
        while self._changed:
            self._look_after(self._changed.popleft())
        now = time.monotonic()
        if self._timer <= now:
            self._timer = math.inf
            self._multi.socket_action(pycurl.SOCKET_TIMEOUT, 0)
        left = 1
        while left:
            left, done, failed = self._multi.info_read()
            for curl, code, text in [*((curl, 0, "") for curl in done), *failed]:
                transfer = self._running[curl]
                if transfer.handle is not None:
                    self.finish(transfer, transfer.handle.failure(code, text))
        if self._next_check <= now:
            self._check_limits(now)
        if now - self._looked_at_rates >= LONGEST_DELAY:
            self._looked_at_rates = now
            for transfer in self._running.values():
                if transfer.handle is not None:
                    transfer.handle.look_at_rate()
        if self._throttle.due <= now:
            self._throttle.run(now)
        if self._admission.due <= now:
            self._admission.run(now)

    def _watch(self, what: int, descriptor: int, multi: object, data: object) -> None:
        """libcurl wants to know when a socket can be read or written."""
        if what == pycurl.POLL_REMOVE:
            if descriptor in self._watched:
                self._watched.discard(descriptor)
                self._epoll.unregister(descriptor)
        elif descriptor in self._watched:
            self._epoll.modify(descriptor, _MASKS[what])
        else:
            self._epoll.register(descriptor, _MASKS[what])
            self._watched.add(descriptor)

    def _set_timer(self, milliseconds: int) -> None:
        self._timer = math.inf if milliseconds < 0 else time.monotonic() + milliseconds / 1000

    def _look_after(self, transfer: HttpTransfer) -> None:
        """Do what another thread wants of a transfer."""
        if transfer.is_done:
            return
        if transfer.ended_by is not None or self._stopping:
            self.finish(transfer, transfer.ended_by or CallAborted())
        elif transfer.handle is None and transfer.head_until is not None:  # it has not begun
            self.finish(transfer, CallAborted())
        elif not transfer.submitted:
            self._admit(transfer)
        elif transfer.handle is not None:
            if transfer.head_until is not None and not transfer.handle.has_head:
                transfer.handle.until = transfer.head_until
                self._next_check = min(self._next_check, transfer.head_until)
            if transfer.body_until is not None:
                transfer.handle.until = transfer.body_until
            self.resume(transfer.handle)

    def _admit(self, transfer: HttpTransfer) -> None:
        """Begin a transfer, once the addresses of its host are known, as soon as the limits of the node allow it."""
        request = transfer.request
        if transfer.addresses is None:
            self._resolving.add(transfer)
            self._next_check = min(self._next_check, transfer.started + request.connect_timeout)
            return
        self._resolving.discard(transfer)
        transfer.submitted = time.monotonic()
        if request.limits is None or not request.limits.in_force()[1]:
            self.begin(transfer)
            return
        transfer.is_limited = True
        self._admission.add(transfer, request.limits)
        if request.until is not None:
            self._next_check = min(self._next_check, request.until)

    def begin(self, transfer: HttpTransfer) -> None:
        """Connect to the next address of its host, or by a connection that is kept, and send the request."""
        now, address, seconds = time.monotonic(), None, transfer.request.connect_timeout
        if transfer.connect_until is None:
            transfer.queued = now - transfer.submitted
            # the time for connecting covers resolving the name, but not a wait for a connection
            transfer.connect_until = now + seconds - (transfer.submitted - transfer.started)
        if transfer.addresses:
            # an address that does not answer must not take the time of those after it
            seconds = max(0.001, transfer.connect_until - now) / len(transfer.addresses)
            address = transfer.addresses.pop(0)
        handle = self._spare.pop() if self._spare else CurlHandle(self.sockets, self.peers, self.suspects, self._throttle.pause)
        try:
            handle.prepare(transfer, address, seconds)
        except (pycurl.error, TypeError, ValueError) as error:
            handle.curl.close()
            self.finish(transfer, AttemptFailed(f"a request that cannot be sent: {type(error).__name__}", retryable=False))
            return
        transfer.handle = handle
        self._running[handle.curl] = transfer
        self._multi.add_handle(handle.curl)
        self._next_check = min(self._next_check, handle.due(handle.began))

    def resume(self, handle: CurlHandle) -> None:
        """Offer the transfer what it refused, if it is paused."""
        try:
            handle.resume()
        except pycurl.error as error:  # the receiver raised when it was offered the rest, or the transfer failed meanwhile
            self.finish(self._running[handle.curl], handle.failure(*error.args))

    def finish(self, transfer: HttpTransfer, error: Exception | None) -> None:
        """Take a transfer out of the loop, and tell it so; unless its host has another address to connect to."""
        if transfer.is_done:
            return
        handle, transfer.handle = transfer.handle, None
        if handle is not None:
            del self._running[handle.curl]
            self._multi.remove_handle(handle.curl)
            if handle.throttled:
                self._throttle.forget(handle)
            handle.release()
            if len(self._spare) < SPARE_HANDLES:
                self._spare.append(handle)
            else:
                handle.curl.close()
        if isinstance(error, NotConnected):
            # an address without a route says nothing about a host that another address leads to
            if transfer.not_connected is None or transfer.not_connected.trouble == Trouble.NO_ROUTE:
                transfer.not_connected = error
            if transfer.addresses:
                self.begin(transfer)
                return
            error = transfer.not_connected
        transfer.is_done = True
        self._resolving.discard(transfer)
        if transfer.is_limited:
            self._admission.ended(transfer)
        transfer.end(error)

    def _check_limits(self, now: float) -> None:
        """Finish transfers whose time is over."""
        self._next_check = math.inf
        for transfer in self._unfinished():
            request, handle = transfer.request, transfer.handle
            if handle is not None:
                due, error = handle.due(now), AttemptFailed(SILENCE, RemoteTimeout, trouble=None if handle.answered else Trouble.SILENT)
            elif not transfer.submitted:
                due, error = transfer.started + request.connect_timeout, AttemptFailed(SILENCE, RemoteTimeout, trouble=Trouble.SILENT)
            else:
                due = math.inf if request.until is None else request.until
                error = AttemptFailed("timed out waiting for a free connection (max_connections)", RemoteTimeout)
            if due <= now:
                self.finish(transfer, error)
            else:
                self._next_check = min(self._next_check, due)

    def close_idle(self, peer: str, keep: int) -> bool:
        """Close idle connections until at most ``keep`` to ``peer`` are open, if any are idle. False: it cannot be told yet which are."""
        there = [descriptor for descriptor, other in self.peers.items() if other == peer and self._is_open(descriptor)]
        busy = [each.handle.curl for each in self._running.values() if each.handle is not None and each.request.peer == peer]
        used = {int(curl.getinfo(pycurl.ACTIVESOCKET)) for curl in busy} if len(there) > keep else set()
        if pycurl.SOCKET_BAD in used:
            return False
        for descriptor in [each for each in there if each not in used][: max(0, len(there) - keep)]:
            del self.peers[descriptor]
            # libcurl notices it as if the server had closed the connection
            with suppress(OSError), socket.socket(fileno=host.not_standard(os.dup(descriptor))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
        return True

    def _is_open(self, descriptor: int) -> bool:
        try:
            return os.fstat(descriptor).st_ino == self.sockets[descriptor]
        except OSError:
            return False


# -- the limits of the node in this process ----------------------------------------------------------------------------
# Only the thread of the loop calls it, and none of it waits. A transfer that may not start yet is in a queue, one that may not receive yet
# is paused, and the loop calls `run` whenever it is `due`.


@dataclass(slots=True)
class HostQueue:
    """The waiting transfers of this process to one host, and the permits that this process has for it."""

    limits: Limits
    host: str
    waiting: deque[HttpTransfer] = field(default_factory=deque)
    idle: list[tuple[Permit, float]] = field(default_factory=list)  # with the time since when its connection is idle
    permits: int = 0  # with those of running transfers
    request: PermitRequest | None = None

    def stop_waiting(self) -> None:
        if self.request is not None:
            self.request.cancel()
            self.request = None


class Admission:
    """Starts transfers as soon as the limit of connections to their hosts allows it. A permit is kept with its connection, which is closed
    before the permit is released, so idle connections count too.

    ``due``: when the loop has to call `run` next, by the monotonic clock."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
        self._queues: dict[tuple[Limits, str], HostQueue] = {}
        self.due = math.inf

    def add(self, transfer: HttpTransfer, limits: Limits) -> None:
        """Start it as soon as a permit is free."""
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
        """The transfers that have not started."""
        return [transfer for queue in self._queues.values() for transfer in queue.waiting if not transfer.is_done]

    def run(self, now: float) -> None:
        """Start what may start, and release the permits that other processes want, or that are unused."""
        self.due = math.inf
        for key, queue in list(self._queues.items()):
            self._begin_waiting(queue, now)
            self._release_idle(queue, now)
            if not (queue.waiting or queue.permits):
                del self._queues[key]

    def _begin_waiting(self, queue: HostQueue, now: float) -> None:
        while queue.waiting:
            transfer = queue.waiting[0]
            if transfer.is_done:
                queue.waiting.popleft()
                continue
            if queue.idle and not queue.idle[-1][0].is_wanted(TURN):
                transfer.permit = queue.idle.pop()[0]
            else:
                queue.request = queue.request if queue.request is not None else queue.limits.request(queue.host)
                transfer.permit = queue.request.try_take()
                if transfer.permit is None:
                    for late in [each for each in queue.waiting if not each.is_done]:
                        wait = late.request.wait
                        if wait is not None and wait.is_over():
                            self._loop.finish(late, NoPermit(queue.limits, queue.host, wait.waited()))
                    self.due = min(self.due, now + LOOK)
                    return
                queue.request = None
                queue.permits += 1
                self._loop.close_idle(queue.host, queue.permits)  # connections of a time without a limit
            if transfer.request.wait is not None:
                transfer.request.wait.end(has_one=True)
            queue.waiting.popleft()
            self._loop.begin(transfer)
        queue.stop_waiting()

    def _release_idle(self, queue: HostQueue, now: float) -> None:
        is_limited = queue.limits.in_force()[1] > 0
        for permit, since in queue.idle.copy():
            if is_limited and now - since < KEEP and not permit.is_wanted():
                self.due = min(self.due, now + LOOK_IDLE)
            elif is_limited and not self._loop.close_idle(queue.host, queue.permits - 1):
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

    ``due``: as for `Admission`."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop
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
                self._loop.resume(handle)  # it may be paused again at once, behind the others
            if not handles:
                del self._paused[limits]
            else:
                self.due = min(self.due, now + min(delay, LONGEST_DELAY))


# -- the loop of this process ------------------------------------------------------------------------------------------

_current: _Loop | None = None
_lock = threading.Lock()  # guards the start of a loop


def start(transfer: HttpTransfer) -> HttpTransfer:
    """Send a request, and return its transfer. Returns at once; callable from any thread, also from a receiver. Raises
    `AttemptFailed` if this process cannot start its loop."""
    global _current
    loop = _current
    if loop is None or not loop.usable():
        with _lock:
            loop = _current
            if loop is None or not loop.usable():
                if loop is not None:
                    atexit.unregister(loop.stop)
                    if loop.pid != os.getpid():  # forked by C code, which runs no fork hook
                        loop.leave_to_parent()
                try:
                    loop = _Loop()
                except (OSError, RuntimeError, pycurl.error) as error:  # no more descriptors, or threads, for this process
                    raise AttemptFailed(f"this process cannot begin a request: {error}") from error
                atexit.register(loop.stop)
                _current = loop
    transfer.attend = loop.attend
    loop.attend(transfer)
    if loop.is_driven:
        transfer.drive = loop.drive
        while transfer.is_reporting and not transfer.is_done:
            loop.drive()
    return transfer


def running() -> int:
    """How many transfers of this process are under way."""
    loop = _current
    return 0 if loop is None or not loop.usable() else len(loop._running)


def _leave_to_parent() -> None:
    global _current, _lock
    loop, _current, _lock = _current, None, threading.Lock()
    if loop is not None:
        atexit.unregister(loop.stop)
        loop.leave_to_parent()


def _leave_to_threads() -> None:
    """A loop that a thread runs goes on with its transfers; a greenlet runs the next one."""
    global _current, _lock
    _current, _lock = None, threading.Lock()


greenlets.when_patched(_leave_to_threads)
os.register_at_fork(after_in_child=_leave_to_parent)
