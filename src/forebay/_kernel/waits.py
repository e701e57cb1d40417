"""The one way to wait: try, else sleep in the kernel on a word that whoever lets go changes.

A holder that is killed changes no word, so a sleep ends after 100 ms and the next try finds the lock that the kernel freed.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import platform
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
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 98)
_WAIT, _WAKE = 0, 1
_EVERYBODY = 2**31 - 1


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = libc.syscall


class Words:
    """The futex words of a root: 1,024 of 4 bytes. Any process may bump and sleep; a read-only root sleeps without being woken."""

    def __init__(self, path: str | os.PathLike[str], *, writable: bool = True) -> None:
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            self._view = mappings.map_file(fd, COUNT * 4, writable=True, private=not writable)
        finally:
            os.close(fd)
        self._words = self._view.cast("I")
        self._address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._view))
        # Bumps of two processes must not store the same value: each goes on from a random number of its own.
        self._next = itertools.count(int.from_bytes(os.urandom(4), "little"))

    def value(self, index: int) -> int:
        return self._words[index]

    def bump(self, index: int) -> None:
        """Change the word and wake all who sleep on it."""
        self._words[index] = next(self._next) & 0xFFFFFFFF
        _syscall(_FUTEX, ctypes.c_void_p(self._address + 4 * index), _WAKE, _EVERYBODY, None, None, 0)

    def sleep(self, index: int, seconds: float, value: int | None = None) -> None:
        """Sleep until the word is no longer ``value`` (default: what it is now), at most ``seconds``."""
        expected = self._words[index] if value is None else value
        whole, part = divmod(max(seconds, 0.0), 1)
        limit = _Timespec(int(whole), int(part * 1e9))
        _syscall(_FUTEX, ctypes.c_void_p(self._address + 4 * index), _WAIT, ctypes.c_uint32(expected), ctypes.byref(limit), None, 0)


class _Wait:
    """One wait: how long it has taken, and when it speaks."""

    def __init__(self, what: Callable[[], tuple[str, str]], timeout: float | None, say_after: float) -> None:
        self._what, self._timeout = what, timeout
        self._began = time.monotonic()
        self._say_at = say_after

    def turn(self) -> float:
        """How long to sleep now. Says from time to time what for; raises `WaitTimeout` when the time is up."""
        waited = time.monotonic() - self._began
        if self._timeout is not None and waited >= self._timeout:
            what, holder = self._what()
            raise errors.WaitTimeout.of(what, waited, holder)
        if waited >= self._say_at:
            self._say_at = waited + SAY_EVERY
            what, holder = self._what()
            log.warning("waiting for %s since %.0f s, held by %s", what, waited, holder)
        return TURN if self._timeout is None else min(TURN, max(self._timeout - waited, 0.001))

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began


def wait_for(
    attempt: Callable[[], T | None], words: Words, index: int, *, what: Callable[[], tuple[str, str]], timeout: float | None = None,
    say_after: float = 5.0, on_turn: Callable[[float], None] | None = None,
) -> T:  # fmt: skip
    """What ``attempt`` gives, once it gives something. ``what``: for the log and the error, (what is waited for, who holds it).

    ``timeout`` in seconds: then `WaitTimeout`. ``on_turn`` is called with the seconds waited, about ten times a second."""
    wait = _Wait(what, timeout, say_after)
    while True:
        value = words.value(index)  # before the attempt: a bump that comes in between ends the sleep at once
        found = attempt()
        if found is not None:
            return found
        pause = wait.turn()
        if on_turn is not None:
            on_turn(wait.waited)
        words.sleep(index, pause, value)


async def wait_for_async(
    attempt: Callable[[], T | None], words: Words, index: int, *, what: Callable[[], tuple[str, str]], timeout: float | None = None,
    say_after: float = 5.0,
) -> T:  # fmt: skip
    """The same for a coroutine: the sleeping is done in a thread, the event loop goes on."""
    wait = _Wait(what, timeout, say_after)
    while True:
        value = words.value(index)
        found = attempt()
        if found is not None:
            return found
        await asyncio.to_thread(words.sleep, index, wait.turn(), value)
