"""The one way to wait: try, else sleep in the kernel on a word that whoever lets go changes.

A holder that is killed changes no word, so a sleep ends after 100 ms and the next try finds the lock that the kernel freed.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

from forebay import errors
from forebay._kernel import mappings
from forebay._kernel.host import libc

log = logging.getLogger("forebay.wait")
T = TypeVar("T")

COUNT = 1024
TURN = 0.1
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
    """The futex words of a root: 1,024 of 4 bytes. Any process may sleep on them; who may write to the file may bump them.

    Callable from any thread, and in a forked child."""

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = True) -> None:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
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
        """Change the word and wake who sleeps on it: the first ``sleepers`` of them. Does nothing where the file can only be read."""
        if self._writable:
            # The clock: two processes that add 1 at once store the same value, and who read it in between would sleep on.
            self._words[index] = time.monotonic_ns() & 0xFFFFFFFF
            _syscall(_FUTEX, self._address + 4 * index, _WAKE, sleepers, None, None, 0)

    def sleep(self, index: int, seconds: float, value: int | None = None) -> None:
        """Sleep until the word is no longer ``value`` (default: what it is now), at most ``seconds``; a signal ends it too."""
        expected = self._words[index] if value is None else value
        whole, part = divmod(max(seconds, 0.0), 1)
        limit = _Timespec(int(whole), int(part * 1e9))
        result = _syscall(_FUTEX, self._address + 4 * index, _WAIT, expected, ctypes.addressof(limit), None, 0)
        if result != 0 and ctypes.get_errno() not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
            time.sleep(min(seconds, _LOOK))  # this machine has no such call, or a sandbox forbids it


class Wait:
    """One wait: how long it has taken, and when it speaks. ``timeout``, ``say_after``: in seconds. ``by``: between what is waited for and
    who has it."""

    def __init__(self, timeout: float | None, say_after: float = 5.0, by: str = "held by") -> None:
        self.timeout, self._by = math.inf if timeout is None else timeout, by
        self._began = time.monotonic()
        self._say_at = say_after

    def turn(self, what: Callable[[], tuple[str, str]]) -> float:
        """How long to sleep now, in seconds. Says from time to time what for; raises `WaitTimeout` when the time is up. ``what``: what
        is waited for, and who has it."""
        waited = self.waited
        if waited >= self.timeout:
            wanted, holder = what()
            raise errors.WaitTimeout.of(wanted, waited, holder, self._by)
        if waited >= self._say_at:
            self._say_at = waited + SAY_EVERY
            wanted, holder = what()
            log.warning("waiting %.0f s for %s, %s %s", waited, wanted, self._by, holder)
        return min(TURN, max(self.timeout - waited, 0.001))

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began


def wait_for(
    attempt: Callable[[], T | None], words: Words, index: int, *, what: Callable[[], tuple[str, str]], timeout: float | None = None,
    say_after: float = 5.0, on_turn: Callable[[float], None] | None = None, by: str = "held by",
) -> T:  # fmt: skip
    """What ``attempt`` gives, once it gives something. ``what``: for the log and the error, (what is waited for, who holds it), with
    ``by`` between the two.

    ``timeout`` in seconds: then `WaitTimeout`. ``on_turn`` is called with the seconds waited, about ten times a second."""
    wait = Wait(timeout, say_after, by)
    while True:
        value = words.value(index)  # before the attempt: a bump that comes in between ends the sleep at once
        found = attempt()
        if found is not None:
            return found
        pause = wait.turn(what)
        if on_turn is not None:
            on_turn(wait.waited)
        words.sleep(index, pause, value)


async def wait_for_async(
    attempt: Callable[[], T | None], words: Words, index: int, *, what: Callable[[], tuple[str, str]], timeout: float | None = None,
    say_after: float = 5.0, on_turn: Callable[[float], None] | None = None,
) -> T:  # fmt: skip
    """The same for a coroutine. The loop goes on meanwhile, and no thread is used: a sleeping one would be missing elsewhere."""
    import asyncio  # slow to import, and seldom wanted

    wait = Wait(timeout, say_after)
    while True:
        value = words.value(index)
        found = attempt()
        if found is not None:
            return found
        pause = wait.turn(what)
        if on_turn is not None:
            on_turn(wait.waited)
        until = time.monotonic() + pause
        while words.value(index) == value and (left := until - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _LOOK))
