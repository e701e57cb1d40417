"""The writer lock: of all threads and processes that share a root, one changes the catalog.

Who waits asks again every few milliseconds instead of being woken at each release. A process that goes on writing has SQLite's
pages in its cache, each other one must read them anew: eight that take turns need twice the CPU of eight that write in bursts.
Who has waited for `HUNGRY` seconds says so, and whoever lets go then makes way for him.
"""

from __future__ import annotations

import random
import threading
import time
from types import TracebackType

from forebay import errors
from forebay._engine.root import Root
from forebay._kernel import locks, waits

PATIENCE = 10.0
HUNGRY = 0.1
PAUSE = 0.001, 0.004
YIELD = 0.0003
WRITER_WORD, HUNGRY_WORD = 0, 2


class WriterBusy(errors.CacheFault):
    """The writer lock could not be had in time."""


class Writer:
    """The lock of one root. Callable from any thread; waits at most ``timeout`` seconds."""

    def __init__(self, root: Root, words: waits.Words) -> None:
        self._root, self._words = root, words
        self._file = locks.LockFile(root.lock("writer"), writable=not root.read_only)
        self._turn = threading.Lock()  # one thread of a process at a time asks the kernel
        self._fed = words.value(HUNGRY_WORD)

    def holding(self, timeout: float | None = None) -> Holding:
        """The lock around a block. Entering it raises `WriterBusy` after ``timeout``, `ReadOnly` in a read-only root."""
        return Holding(self, PATIENCE if timeout is None else timeout)

    def take(self, timeout: float) -> None:
        """Caller: calls `release`, in any event."""
        if self._root.read_only:
            raise errors.ReadOnly.of(self._root.path)
        if not self._turn.acquire(timeout=timeout):
            raise WriterBusy(f"the catalog is busy: other threads of this process have written for {timeout:.0f} s")
        try:
            if not self._file.try_lock(0, exclusive=True):
                self._wait(timeout)
        except BaseException:
            self._turn.release()
            raise

    def _wait(self, timeout: float) -> None:
        until = time.monotonic() + min(HUNGRY, timeout)
        while time.monotonic() < until:
            time.sleep(random.uniform(*PAUSE))
            if self._file.try_lock(0, exclusive=True):
                return
        try:
            waits.wait_for(self._ask_hungry, self._words, WRITER_WORD, what=self._describe, timeout=timeout)
        except errors.WaitTimeout as error:
            raise WriterBusy(f"the catalog is busy: {error}") from error

    def _ask_hungry(self) -> bool | None:
        self._words.bump(HUNGRY_WORD)  # before the attempt: who lets go after it has seen this
        return self._file.try_lock(0, exclusive=True) or None

    def _describe(self) -> tuple[str, str]:
        return "the writer lock of the catalog", locks.describe_holders(self._root.lock("writer"), 0)

    def release(self) -> None:
        self._file.unlock(0)
        hungry = self._words.value(HUNGRY_WORD)
        if hungry != self._fed:
            self._fed = hungry
            self._words.bump(WRITER_WORD, 1)  # who slept first; when he lets go, he finds the word changed too, and wakes the next
            time.sleep(YIELD)  # else this thread has the lock again before the woken one runs
        self._turn.release()

    def is_same(self) -> bool:
        """Whether this is still the lock that other processes take."""
        return self._file.is_same()

    def is_lost(self) -> bool:
        """Whether the job closed the lock's descriptor, and then others of ours too."""
        return self._file.is_lost()

    def close(self) -> None:
        self._file.close()

    def before_fork(self) -> None:
        self._file.before_fork(keep=False)

    def after_fork_parent(self) -> None:
        self._file.after_fork_parent()

    def after_fork_child(self) -> None:
        self._turn = threading.Lock()
        self._file.after_fork_child(keep=False)


class Holding:
    """A class and no generator: this is around every transaction."""

    __slots__ = ("_timeout", "_writer")

    def __init__(self, writer: Writer, timeout: float) -> None:
        self._writer, self._timeout = writer, timeout

    def __enter__(self) -> None:
        self._writer.take(self._timeout)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.release()
