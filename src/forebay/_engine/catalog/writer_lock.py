"""The writer lock: of all threads and processes that share a root, one changes the catalog at a time.

A waiter tries again after some milliseconds, each time after twice as many, instead of being woken at each release. A process that goes
on writing has its code and SQLite's pages in the caches, while one that slept has neither: its first put takes twice the CPU or more. So
eight that write in long bursts need far less CPU than eight that take turns.
A process that has waited for `HUNGRY` seconds, or for half of its timeout, announces it; the next one that releases the lock then lets it
go first.

A holder that is stopped (Ctrl-Z, a debugger, a frozen container) holds the lock as long as it is stopped. A process that has waited for
`LONG` in vain does not wait again: it tries, and otherwise continues without the cache at once, until it gets the lock or sees that the
holder has changed. A shorter wait in vain says nothing of the holder."""

from __future__ import annotations

import os
import threading
import time
from types import TracebackType
from typing import ClassVar

from forebay import errors
from forebay._engine.files.root import Root
from forebay._kernel import greenlets, interrupts, locks, waits
from forebay._logs import logger
from forebay.errors import WriterBusy

log = logger("forebay.catalog")

LONGEST_WAIT = 10.0
GRACE = 0.2
"""For so long a call waits for the lock even where its timeout is used up: it may be released any moment."""
LONG = 0.25
"""A wait that tells that the holder is stopped: one that runs lets those go first that have announced that they wait. To find out who it is
takes a look at the descriptors of many processes."""
HUNGRY = 0.25
PAUSE, LONGEST_PAUSE = 0.002, 0.032
"""Seconds, at most, before the first try again, and before any."""
YIELD = 0.0003
WRITER_WORD, HUNGRY_WORD = 0, 2
_INTERRUPTED = "this thread is writing to the catalog already: a signal handler interrupted it"


class WriterLock:
    """The lock of one root. Callable from any thread; waits at most ``timeout`` seconds."""

    _stuck: ClassVar[dict[str, tuple[int, str]]] = {}
    """Locks that this process has waited for without success: the value of WRITER_WORD then, and the holder."""

    def __init__(self, root: Root, words: waits.Words) -> None:
        self._root, self._words = root, words
        self.file = locks.LockFile(root.lock("writer"), root.files.open, writable=not root.read_only)
        self._turn = threading.Lock()  # one thread of a process at a time asks the kernel
        self._thread = self._depth = 0  # the one that has the turn, and how deep it was in its calls when it took it
        self._fed = words.value(HUNGRY_WORD)
        self._path = os.fspath(root.lock("writer"))

    def holding(self, timeout: float | None = None) -> Holding:
        """The lock around a block. Entering it raises `WriterBusy` after ``timeout`` (default: what is left of the call's timeout), or
        at once where the holder is stuck; `ReadOnly` in a read-only root. A ``timeout`` of 0: only if it is free."""
        return Holding(self, timeout)

    def still(self) -> Holding:
        """Prevent changes of the catalog during a block. In a read-only root by a shared lock: a reader can have no other."""
        return Holding(self, None, looking=True)

    def take(self, timeout: float | None = None, *, looking: bool = False) -> None:
        """Caller: calls `release`, in any event."""
        if self._root.read_only and not looking:
            raise errors.ReadOnly.of(self._root.path)
        me = threading.get_ident()
        if not self._turn.acquire(blocking=False):
            if self._thread == me:
                raise WriterBusy(_INTERRUPTED, waited=0.0, holder="")
            self._wait_for_thread(_limited(timeout))
        self._thread, self._depth = me, interrupts.depth()
        try:
            if not self._try():
                timeout = _limited(timeout)
                if timeout <= 0:
                    raise WriterBusy("the catalog is busy: another process or thread is writing", waited=0.0, holder="")
                self._wait(timeout)
        except BaseException:
            self._let_go()
            raise
        if self._stuck:
            self._stuck.pop(self._path, None)

    def _wait_for_thread(self, timeout: float) -> None:
        began = time.monotonic()
        got = False
        for turn in interrupts.turns(timeout):
            if got := self._turn.acquire(timeout=turn):
                break
            # M takes the lock / a handler interrupts M, and reads several objects / T, which works for that, would wait for M.
            if interrupts.is_interrupted(self._thread, self._depth):
                raise WriterBusy(_INTERRUPTED, waited=time.monotonic() - began, holder="")
        waited = time.monotonic() - began
        waits.time_limit.spend(waited)
        if not got:
            message = f"the catalog is busy: other threads of this process have written for {waited:.1f} s"
            raise WriterBusy(message, waited=waited, holder=locks.describe_process(os.getpid()))

    def _wait(self, timeout: float) -> None:
        import random

        stuck = self._stuck.get(self._path)
        if stuck is not None:
            if self._ask_hungry():
                return
            word, holder = stuck
            if self._words.value(WRITER_WORD) == word:  # else it was released since: it is worth waiting for
                raise WriterBusy(f"the catalog is still busy, held by {holder}", waited=0.0, holder=holder)
            self._stuck.pop(self._path, None)
        began = time.monotonic()
        until = began + min(HUNGRY, timeout / 2)
        pause = PAUSE
        while time.monotonic() < until:
            greenlets.sleep(random.uniform(pause / 2, pause))
            interrupts.point()
            if self._try():
                waits.time_limit.spend(time.monotonic() - began)
                return
            pause = min(2 * pause, LONGEST_PAUSE)
        left = timeout - (time.monotonic() - began)
        late: errors.WaitTimeout | None = None
        with waits.time_limit(timeout, afresh=True):  # what is left of the call's may be less than the grace
            try:
                waits.wait_for(self._ask_hungry, self._words, WRITER_WORD, what=lambda: self._describe(began), timeout=left)
            except errors.WaitTimeout as error:
                late = error
        waits.time_limit.spend(time.monotonic() - began)
        if late is not None:
            waited = timeout - left + late.waited  # without the time it took to find the holder
            if waited < LONG:
                raise WriterBusy(f"the catalog is busy: waited {waited:.1f} s for its writer lock", waited=waited, holder="") from late
            self._stuck[self._path] = self._words.value(WRITER_WORD), late.holder
            message = f"the catalog is busy: waited {waited:.1f} s for {late.what}, held by {late.holder}: continue that process, or end it"
            raise WriterBusy(message, waited=waited, holder=late.holder) from late

    def _ask_hungry(self) -> bool | None:
        self._words.bump(HUNGRY_WORD)  # before the attempt: a release after it sees this
        return self._try() or None

    def _try(self) -> bool:
        return self.file.try_lock(0, exclusive=not self._root.read_only)

    def _describe(self, began: float) -> tuple[str, str]:
        is_long = time.monotonic() - began >= LONG
        return "the writer lock of the catalog", locks.describe_holders(self._root.lock("writer"), 0) if is_long else "another process"

    def release(self) -> None:
        try:
            self.file.unlock(0)
            hungry = self._words.value(HUNGRY_WORD)
            if hungry != self._fed:
                self._fed = hungry
                # Wakes the first sleeper. When that one releases the lock, it finds the word changed too, and wakes the next.
                self._words.bump(WRITER_WORD, 1)
                greenlets.sleep(YIELD)  # else this thread has the lock again before the woken one runs
        finally:
            self._let_go()

    def _let_go(self) -> None:
        self._thread = 0
        self._turn.release()

    def close(self) -> None:
        self.file.close()

    def after_fork_child(self) -> None:
        self._turn = threading.Lock()
        self.file.after_fork_child()


def _limited(timeout: float | None) -> float:
    """How long to wait: by default what is left of the call's timeout."""
    return min(LONGEST_WAIT, waits.time_limit.remaining(GRACE)) if timeout is None else timeout


class Holding:
    """A class and no generator: this is around every transaction."""

    __slots__ = ("_looking", "_timeout", "_writer")

    def __init__(self, writer: WriterLock, timeout: float | None, *, looking: bool = False) -> None:
        self._writer, self._timeout, self._looking = writer, timeout, looking

    def __enter__(self) -> None:
        self._writer.take(self._timeout, looking=self._looking)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.release()
