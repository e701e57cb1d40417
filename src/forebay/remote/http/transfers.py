"""One HTTP request under way, and its response, for a thread that waits for it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from forebay.remote.base import AttemptFailed, CallAborted, Permit
from forebay.remote.http.handles import CurlHandle, Headers, NotConnected, TransferRequest

LAST_MOMENT = 0.2  # seconds
_NOBODY = 1 << 62  # bytes that no thread waits for: to notify none takes as long as to take a piece
_LOOK = 1.0  # seconds of one wait: a signal that comes just before the kernel begins to wait is handled when the wait ends


class HttpTransfer:
    """One request and its response: the head first, then the body piece by piece. `loop.start` sends it.

    One thread reads; any thread may `close` or `abort`. Unless all of the body is read, `close` has to be called. In a
    process that was forked meanwhile, `close` and `abort` do nothing, and nothing can be read. ``limit``: bytes of the
    body to hold before the transfer pauses. ``on_ready`` is called once, by the loop's thread, when the transfer has
    ended or holds all that it may: it must not wait for anything. ``addresses``: what the host's name stands for, as
    `TransferRequest.resolved` has it; empty: libcurl resolves it; None: `resolved` or `fail` is called when that is
    known."""

    def __init__(
        self, request: TransferRequest, limit: int = 1 << 20, on_ready: Callable[[], None] | None = None, *,
        addresses: Sequence[str] | None = (),
    ) -> None:  # fmt: skip
        self.request = request
        self.addresses = None if addresses is None else list(addresses)
        self.status, self.reason, self.headers = 0, "", Headers()
        self.started = time.monotonic()
        self._limit, self._wanted, self._size = limit, _NOBODY, 0
        self._pieces: deque[bytes] = deque()
        self._refused = self._has_head = self._ended = False
        self._error: Exception | None = None
        self._on_ready = on_ready
        self._lock = threading.Lock()  # guards all of the above; a thread that is not in a forked child may hold it
        self._changed = threading.Condition(self._lock)
        self._pid = os.getpid()
        # set by any thread; the loop looks at them when it attends to the transfer
        self.attend: Callable[[HttpTransfer], None] = _nobody
        self.ended_by: Exception | None = None
        self.head_until: float | None = None
        # in the thread of the loop only
        self.is_limited = self.is_done = False
        self.submitted = 0.0  # when its addresses were known
        self.queued = 0.0
        """Seconds for which it waited for a connection that the limits of the node allow."""
        self.connect_until: float | None = None
        self.not_connected: NotConnected | None = None
        self.handle: CurlHandle | None = None
        self.permit: Permit | None = None

    # -- called by the loop --------------------------------------------------------------------------------------------

    def head(self, status: int, reason: str, headers: Headers) -> None:
        """See `Receiver.head`."""
        with self._lock:
            self.status, self.reason, self.headers, self._has_head = status, reason, headers, True
            self._changed.notify()

    def data(self, piece: bytes) -> bool:
        """See `Receiver.data`."""
        with self._lock:
            if self._ended:
                raise CallAborted
            self._refused = self._size >= self._limit
            if not self._refused:
                self._pieces.append(piece)
                self._size += len(piece)
                if self._size >= self._wanted:
                    self._changed.notify()
                return True
        self._report()
        return False

    def end(self, error: Exception | None) -> None:
        """See `Receiver.end`."""
        with self._lock:
            if not self._ended:
                self._ended, self._error = True, error
                self._changed.notify()
        self._report()

    def _report(self) -> None:
        on_ready, self._on_ready = self._on_ready, None
        if on_ready is not None:
            on_ready()

    # -- called by any other thread ------------------------------------------------------------------------------------

    def resolved(self, addresses: Sequence[str]) -> None:
        """Connect to one of these addresses."""
        self.addresses = list(addresses)
        self.attend(self)

    def fail(self, error: Exception) -> None:
        """End it with this error, unless it has ended: its connection is closed. Returns at once."""
        self.ended_by = error
        self.attend(self)

    def wait_for_head(self) -> None:
        """Raises `AttemptFailed` where none comes, and `CallAborted` after `close`."""
        self._check_process()
        with self._lock:
            while not (self._has_head or self._ended):
                self._changed.wait(_LOOK)
            if not self._has_head and self._error is not None:
                raise self._error

    @property
    def is_complete(self) -> bool:
        """Whether the whole response has come, and no error."""
        with self._lock:
            return self._ended and self._error is None

    @property
    def waiting(self) -> int:
        """How many bytes of the body may be read at once."""
        with self._lock:
            return self._size

    def wait_for(self, size: int) -> int:
        """Wait until ``size`` bytes of the body may be read at once, or as many as this holds, or the body has ended:
        how many may be read then. Raises `AttemptFailed` where it is cut before, and `CallAborted` after `close`."""
        self._check_process()
        with self._lock:
            wanted = self._wait_for(size)
            if self._size < wanted and self._error is not None:
                raise self._error
            return self._size

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise AttemptFailed("its response comes to the parent process")

    def _wait_for(self, size: int) -> int:
        """How many bytes there will be, unless the body ends before."""
        wanted = min(size, self._limit)
        while self._size < wanted and not self._ended:
            self._wanted = wanted
            self._changed.wait(_LOOK)
        self._wanted = _NOBODY
        return wanted

    def read(self, size: int, at_least: int = 1) -> bytes:
        """At most ``size`` bytes of the body; waits for ``at_least`` so many, or for its end. Empty: the body has ended.
        Raises `AttemptFailed` where it is cut, after all bytes that came, and `CallAborted` after `close`."""
        self._check_process()
        with self._lock:
            self._wait_for(min(at_least, size))
            if self._ended and self._error is not None and not self._size:
                raise self._error
            pieces, count = [], 0
            if self._size <= size:
                pieces, count = list(self._pieces), self._size
                self._pieces.clear()
            while self._pieces and count + len(self._pieces[0]) <= size:
                pieces.append(self._pieces.popleft())
                count += len(pieces[-1])
            if self._pieces and count < size:
                rest, self._pieces[0] = self._pieces[0][: size - count], self._pieces[0][size - count :]
                pieces.append(rest)
                count += len(rest)
            self._size -= count
            resume, self._refused = self._refused, False
        if resume:
            self.attend(self)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """End the transfer, and what waits for it in another thread. Its connection is closed unless its response is
        complete. Idempotent; returns at once."""
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._ended:
                return
            self._ended, self._error = True, CallAborted()
            self._pieces.clear()
            self._size = 0
            self._changed.notify_all()
        self.fail(CallAborted())

    def abort(self) -> None:
        """As `close`; but a head that is due gets a moment to come, so that the server's work on it and the connection
        are not wasted."""
        if self._pid != os.getpid():
            return
        with self._lock:
            has_head = self._has_head
        if has_head:
            self.close()
        else:
            self.head_until = time.monotonic() + LAST_MOMENT
            self.attend(self)


def _nobody(transfer: HttpTransfer) -> None:
    """No loop attends to a transfer before its start."""
