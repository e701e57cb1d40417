"""The only way to wait: try, else sleep in the kernel on a futex word that every release changes.

A killed holder changes no word, so a sleep ends after 100 ms and the next try finds the lock that the kernel released."""

from __future__ import annotations

import contextvars
import ctypes
import errno
import math
import os
import threading
import time
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

from forebay import errors
from forebay._kernel import greenlets, interrupts, mappings
from forebay._kernel.host import libc
from forebay._kernel.locks import Opener, open_plainly
from forebay._logs import logger

log = logger("forebay.wait")
T = TypeVar("T")

COUNT = 1024
TURN = 0.1
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
SAY_EVERY = 60.0
_LOOK = 0.01
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "loongarch64": 98, "ppc64le": 221, "s390x": 238}.get(os.uname().machine, -1)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]


class Words:
    """The futex words of a root: 1,024 of 4 bytes. Any process may sleep on them; one that may write the file may bump them.

    Callable from any thread, and in a forked child."""

    def __init__(self, path: str | os.PathLike[str], opener: Opener = open_plainly, *, writable: bool = True) -> None:
        fd = opener(os.fspath(path), os.O_RDWR if writable else os.O_RDONLY)
        try:
            if os.fstat(fd).st_size < COUNT * 4:
                raise errors.CacheFault(f"{os.fspath(path)} is cut short: it must have {COUNT * 4:,} bytes")
            view = mappings.map_file(fd, COUNT * 4, writable=writable)
        finally:
            os.close(fd)
        self._words, self._address, self._writable = view.cast("I"), mappings.address(view), writable

    def value(self, index: int) -> int:
        """What the word is now, to be given to `sleep`."""
        return self._words[index]

    def bump(self, index: int, sleepers: int = _EVERYBODY) -> None:
        """Change the word and wake the first ``sleepers`` that sleep on it. Does nothing where the file can only be read."""
        if self._writable:
            # From the clock: with a counter, two concurrent bumps would store the same value, and a reader in between would sleep on.
            self._words[index] = time.monotonic_ns() & 0xFFFFFFFF
            _syscall(_FUTEX, self._address + 4 * index, _WAKE, sleepers, None, None, 0)

    def sleep(self, index: int, seconds: float, value: int | None = None) -> None:
        """Sleep until the word differs from ``value`` (default: its present value), at most ``seconds``; a signal ends the sleep too."""
        expected = self._words[index] if value is None else value
        if greenlets.are_threads():
            until = time.monotonic() + seconds
            while self._words[index] == expected and (left := until - time.monotonic()) > 0:
                greenlets.sleep(min(left, _LOOK))
            return
        whole, part = divmod(max(seconds, 0.0), 1)
        limit = _Timespec(int(whole), int(part * 1e9))
        result = _syscall(_FUTEX, self._address + 4 * index, _WAIT, expected, ctypes.addressof(limit), None, 0)
        if result != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            greenlets.sleep(min(seconds, _LOOK))  # this machine has no such call, or a sandbox forbids it


class time_limit:
    """Limits the waiting inside one call: all its waits share ``seconds``; its other work does not count. None: no limit of its own.

    Nested limits share what is left of the outer one. ``afresh``: around a function of the program's own, which has its own limits."""

    __slots__ = ("_afresh", "_outer", "_seconds", "left")

    _current: contextvars.ContextVar[time_limit | None] = contextvars.ContextVar("forebay_time_limit", default=None)

    left: float

    def __init__(self, seconds: float | None, *, afresh: bool = False) -> None:
        self._seconds, self._afresh = math.inf if seconds is None else seconds, afresh

    @classmethod
    def remaining(cls, grace: float = 0.0) -> float:
        """Seconds that the current call may still wait; infinite where no limit was set. ``grace``: seconds more, for all such waits of the
        call together."""
        current = cls._current.get()
        return math.inf if current is None else max(current.left + grace, 0.0)

    @classmethod
    def spend(cls, seconds: float) -> None:
        """Subtract ``seconds`` that the current call has waited."""
        current = cls._current.get()
        if current is not None:
            current.left -= seconds

    def __enter__(self) -> None:
        self._outer = self._current.get()
        outer = math.inf if self._outer is None or self._afresh else self._outer.left
        self._seconds = self.left = min(self._seconds, outer)
        self._current.set(self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._current.set(self._outer)
        if self._outer is not None and not self._afresh and self._seconds < math.inf:
            self._outer.left -= self._seconds - self.left


class SharedLimit:
    """Limits how long several requests of one call wait for things that they use, such as connections: ``seconds`` in total, which pass
    while at least one of them waits and none has one. Callable from any thread."""

    def __init__(self, seconds: float) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._seconds, self._waited = seconds, 0.0
        self._waiting = self._having = 0
        self._at = 0.0  # until when `_waited` counts

    def begin(self) -> None:
        """One more waits."""
        self._change(1, 0)

    def end(self, *, has_one: bool) -> None:
        """One waits no longer."""
        self._change(-1, int(has_one))

    def release(self) -> None:
        """One that had one has it no longer."""
        self._change(0, -1)

    def lower(self, seconds: float) -> None:
        """Let them wait for at most ``seconds`` from now on."""
        with self._lock:
            self._count()
            self._seconds = min(self._seconds, self._waited + seconds)

    def waited(self) -> float:
        """Seconds for which they have waited."""
        with self._lock:
            self._count()
            return self._waited

    def is_over(self) -> bool:
        """Whether the time is up."""
        with self._lock:
            self._count()
            return self._waited >= self._seconds

    def _change(self, waiting: int, having: int) -> None:
        with self._lock:
            self._count()
            self._waiting += waiting
            self._having += having

    def _count(self) -> None:
        now = time.monotonic()
        if self._waiting and not self._having:
            self._waited += now - self._at
        self._at = now


class Turn:
    """Retries an operation that failed: after a second, then after ever longer pauses of at most a minute. One thread of a process tries
    at a time, and no thread waits. A forked child has a turn of its own: the thread that had its parent's does not exist there."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE
        self._at = time.monotonic() + self._pause
        self._free: dict[int, list[bool]] = {}  # by process; popped by the thread that tries: one step

    def attempt(self, operation: Callable[[], T | None]) -> T | None:
        """The result of ``operation``, which waits for nothing, if this thread should retry it now; None if not, or if it failed again.
        After a result it is never called again."""
        if time.monotonic() < self._at:
            return None
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._at = time.monotonic() + self._pause
        free, result = self._free.setdefault(os.getpid(), [True]), None
        try:
            free.pop()
        except IndexError:
            return None
        try:
            with time_limit(0):
                result = operation()
        finally:
            if result is None:
                free.append(True)
        return result


class Wait:
    """One wait: its duration, and when to log it. ``timeout``, ``say_after``: in seconds. ``by``: the words between what is waited for
    and its holder. Limited by the `time_limit` that is left."""

    def __init__(self, timeout: float | None, say_after: float = 5.0, by: str = "held by") -> None:
        self.timeout, self._by = min(math.inf if timeout is None else timeout, time_limit.remaining()), by
        self._began = time.monotonic()
        self._say_at = say_after

    def turn(self, what: Callable[[], tuple[str, str]]) -> float:
        """Return how many seconds to sleep now. Logs the wait from time to time; raises `WaitTimeout` when the time is up. ``what``
        returns what is waited for, and a description of its holder."""
        interrupts.point()
        waited = self.waited
        if waited >= self.timeout:
            time_limit.spend(waited)
            subject, holder = what()
            raise errors.WaitTimeout.of(subject, waited, holder, self._by)
        if waited >= self._say_at:
            self._say_at = waited + SAY_EVERY
            subject, holder = what()
            log.warning("waiting %.0f s for %s, %s %s", waited, subject, self._by, holder)
        return min(TURN, max(self.timeout - waited, 0.001))

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began


class PollingWait(Wait):
    """A wait for something that wakes no sleeper: short sleeps that become longer, up to ``longest`` seconds."""

    def __init__(self, timeout: float | None, longest: float, say_after: float = 5.0, by: str = "held by") -> None:
        super().__init__(timeout, say_after, by)
        self._longest, self._pause = longest, 0.0002

    def sleep(self, what: Callable[[], tuple[str, str]]) -> None:
        """Sleep a little. ``what``: as for `turn`. Raises `WaitTimeout` when the time is up."""
        greenlets.sleep(min(self._pause, self.turn(what)))
        self._pause = min(2 * self._pause, self._longest)


def wait_for(
    attempt: Callable[[], T | None], words: Words, index: int, what: Callable[[], tuple[str, str]], *, timeout: float | None = None,
    say_after: float = 5.0, on_turn: Callable[[float], None] | None = None, by: str = "held by",
) -> T:  # fmt: skip
    """Call ``attempt`` until it returns a value, and return that. ``what`` returns, for the log and the error, what is waited for and a
    description of its holder; ``by`` stands between the two.

    ``timeout`` in seconds: then `WaitTimeout`. ``on_turn`` is called with the seconds waited, about ten times a second."""
    wait = Wait(timeout, say_after, by)
    while True:
        value = words.value(index)  # before the attempt: a bump in between ends the sleep at once
        result = attempt()
        if result is not None:
            time_limit.spend(wait.waited)
            return result
        pause = wait.turn(what)
        if on_turn is not None:
            on_turn(wait.waited)
        words.sleep(index, pause, value)


async def wait_here(*wait: Any, **options: Any) -> Any:
    """`wait_for`, in this thread, for a coroutine that `run` runs."""
    return wait_for(*wait, **options)


def run(steps: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits in this thread, and for no event loop: so one body serves calls with an event loop and without one."""
    try:
        steps.send(None)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except RuntimeError as error:
        if isinstance(error.__cause__, StopIteration) and str(error) == "coroutine raised StopIteration":
            raise error.__cause__ from None  # the program's own function raised it
        raise
    steps.close()
    raise AssertionError("a call without an event loop waits for one")


async def wait_for_async(
    attempt: Callable[[], T | None], words: Words, index: int, what: Callable[[], tuple[str, str]], *, timeout: float | None = None,
    say_after: float = 5.0, on_turn: Callable[[float], None] | None = None,
) -> T:  # fmt: skip
    """`wait_for` for a coroutine. The event loop goes on meanwhile, and no thread is used: it would be missing elsewhere."""
    import asyncio  # slow to import, and seldom needed

    wait = Wait(timeout, say_after)
    while True:
        value = words.value(index)
        result = attempt()
        if result is not None:
            time_limit.spend(wait.waited)
            return result
        pause = wait.turn(what)
        if on_turn is not None:
            on_turn(wait.waited)
        until = time.monotonic() + pause
        while words.value(index) == value and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK))
