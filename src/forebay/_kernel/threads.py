"""Threads: one that starts or does not, `DaemonThread`; one whose result a coroutine awaits, `in_thread`; several that live as long as one
call, `run_all` for a whole and `Threads` for items that turn up meanwhile."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from forebay._kernel import greenlets, interrupts

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")

TURN = 0.1  # seconds
GRACE = 1.0  # seconds
START = 2.0
"""Seconds after which a thread that has not begun is given up."""


class _Begun:
    """A `threading.Event` that is set once a thread runs. `threading.Thread.start` waits for it; a thread that ends before, for lack of
    memory, never sets it."""

    def __init__(self, event: threading.Event) -> None:
        self._event = event

    def wait(self, timeout: float | None = None) -> bool:
        return self._event.wait(START if timeout is None else timeout)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)


class DaemonThread:
    """A daemon thread, which is started by `begin`. It has a `threading.Thread` and is none: gevent may put another class in its place."""

    def __init__(self, target: Callable[[], object], *, name: str) -> None:
        self._target = target
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread._started = self._begun = _Begun(threading.Event())  # type: ignore[attr-defined]
        self._may_run = [True]  # popped by the thread that begins, or by the one that gives it up
        self.join, self.is_alive = self._thread.join, self._thread.is_alive

    def begin(self) -> bool:
        """Start the thread. False where that is not possible: the process has as many as it may have, or no memory, or it ends. Then
        ``target`` is never called, and the caller does the work itself, or does without."""
        try:
            self._thread.start()
        except (RuntimeError, MemoryError):
            self._take()
            return False
        except BaseException:
            self._take()
            raise
        return bool(self._begun.is_set()) or not self._take()

    @property
    def ident(self) -> int | None:
        return self._thread.ident

    def _run(self) -> None:
        if self._take():
            target, self._target = self._target, _nothing  # what it refers to ends with the call
            target()

    def _take(self) -> bool:
        with contextlib.suppress(IndexError):
            return self._may_run.pop()
        return False


def _nothing() -> None:
    """Stands for the target of a thread that has begun."""


async def in_thread(call: Callable[..., T], *arguments: Any) -> T:
    """The result of a call in a thread of its own: those of the event loop's executor may all wait for what this call does. If no thread
    can be started, the event loop waits for the call."""
    import asyncio  # loaded by any caller that awaits this

    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    @functools.partial(interrupts.guarded, always=True)
    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))

    def run() -> None:
        result, failed = None, cast(BaseException | None, None)
        try:
            result = call(*arguments)
        except StopIteration as error:  # no future takes it
            failed = RuntimeError(f"{call!r} raised StopIteration")
            failed.__cause__ = error
        except BaseException as error:  # noqa: BLE001 (raised where it is awaited)
            failed = error
        with contextlib.suppress(RuntimeError):  # the event loop was closed
            call_in_loop(loop, settle, result, failed)

    if not DaemonThread(functools.partial(contextvars.copy_context().run, run), name="forebay-call").begin():
        run()
    return await future


def call_in_loop(loop: asyncio.AbstractEventLoop, callback: Callable[..., object], *arguments: Any) -> None:
    """Have an event loop call ``callback``, which is `guarded`, and does nothing when it is called again. Callable from any thread. Raises
    RuntimeError if the loop was closed.

    It is called twice: if a handler raises before the guard begins, the event loop logs the exception, and the call is lost."""
    loop.call_soon_threadsafe(callback, *arguments)
    with contextlib.suppress(RuntimeError):  # the loop was closed after the first call
        loop.call_soon_threadsafe(callback, *arguments)


def run_all(
    work: Iterable[Callable[[], object]], jobs: int, *, name: str, inline: bool = False, on_turn: Callable[[], None] | None = None,
    stop: Callable[[], None] | None = None, grace: float = GRACE,
) -> None:  # fmt: skip
    """Call every function of ``work``, up to ``jobs`` at a time, in daemon threads called ``forebay-<name>-<n>``.

    A thread takes the next function only when it is free, and one thread takes at a time: ``work`` may be lazy, endless, or block until
    something else has ended. With ``inline`` the calling thread is one of the ``jobs``; without, it waits and calls ``on_turn`` about ten
    times a second, and once at the end.

    The first error, in a function, ``work`` or ``on_turn``, or an interrupt of the calling thread, ends the call: nothing more is taken,
    and ``stop`` is called, perhaps more than once and from any thread, to make what still runs raise soon. The call waits for all threads
    and raises that error as it is. A thread that has not ended ``grace`` seconds later is left behind: it takes nothing more, and does not
    keep the process alive. Where fewer threads can be started, these do all; where none can, the calling thread does."""
    if isinstance(work, (list, tuple)):
        jobs = min(jobs, len(work))
    run = _Run(work, stop)
    threads = [DaemonThread(run.work, name=f"forebay-{name}-{n}") for n in range(jobs - inline)]
    try:
        begun = 0
        while begun < len(threads) and threads[begun].begin():  # where one cannot be started, the next ones cannot either
            begun += 1
        if inline or (threads and not begun):
            run.work()
        _join(run, threads, on_turn)
        if on_turn is not None:
            on_turn()
        if run.errors:
            raise run.first_error()
    except BaseException:
        run.end()
        until = time.monotonic() + grace
        for thread in threads:
            while thread.is_alive() and time.monotonic() < until:
                thread.join(0.05)
        raise


def _join(run: _Run, threads: Iterable[DaemonThread], on_turn: Callable[[], None] | None) -> None:
    """Wait until all threads have ended, or one failed. In short turns: the thread that starts another one may be the one that gets the
    signal of Ctrl-C, and nothing would wake this one."""
    for thread in threads:
        while thread.is_alive() and not run.errors:
            thread.join(TURN)
            interrupts.point()
            if on_turn is not None and thread.is_alive():
                on_turn()


def join(thread: DaemonThread, seconds: float | None = None) -> bool:
    """Wait for the end of a thread, at most so long, with points. Returns whether it has ended."""
    for turn in interrupts.turns(seconds):
        thread.join(turn)
        if not thread.is_alive():
            return True
    return False


class Threads(Generic[T]):
    """Up to ``most`` daemon threads, started as they are needed, which call ``work`` with each submitted item. Callable from any thread."""

    def __init__(self, work: Callable[[T], None], most: int, *, name: str) -> None:
        """``work`` must not raise. A thread is called ``forebay-<name>-<n>``."""
        self._work, self._most, self._name = work, most, name
        self._items: queue.SimpleQueue[T | None] = greenlets.new_queue()
        self._idle = threading.Semaphore(0)
        self._lock = threading.Lock()  # guards what follows
        self._threads: list[DaemonThread] = []
        self._closed = False

    def submit(self, item: T) -> bool:
        """Have a thread work on an item, in the order of these calls. False after `close`, and where there is no thread and none can be
        started, as at the exit of the interpreter."""
        with self._lock:
            if self._closed:
                return False
            if not self._idle.acquire(blocking=False) and len(self._threads) < self._most:
                thread = DaemonThread(self._run, name=f"forebay-{self._name}-{len(self._threads)}")
                if thread.begin():
                    self._threads.append(thread)
                elif not self._threads:
                    return False
            self._items.put(item)
            return True

    def close(self) -> list[T]:
        """Begin no more work. Returns at once, with the items that no thread has begun to work on."""
        left: list[T] = []
        with self._lock:
            self._closed = True
            with contextlib.suppress(queue.Empty):
                while True:
                    item = self._items.get_nowait()
                    if item is not None:
                        left.append(item)
            for _ in self._threads:
                self._items.put(None)
        return left

    def join(self) -> None:
        """After `close`: wait for the threads, which are at work no more."""
        for thread in self._threads:
            join(thread, GRACE)

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            self._work(item)
            del item  # else it would live as long as this thread has nothing else to do
            self._idle.release()


class _Run:
    """The state of one `run_all`."""

    errors: list[BaseException]  # in the order in which they came; appended to without the lock
    _ended: bool

    def __init__(self, work: Iterable[Callable[[], object]], stop: Callable[[], None] | None) -> None:
        self._work, self._stop = iter(work), stop
        self._lock = threading.Lock()  # held while the next function is taken
        self.errors, self._ended = [], False

    def work(self) -> None:
        try:
            while (call := self._next()) is not None:
                interrupts.point()
                call()
        except interrupts.Delivered:  # before what a thread has raised
            raise
        except BaseException as error:  # noqa: BLE001 (raised by `run_all`, as it is)
            self.errors.append(error)
            self.end()

    def _next(self) -> Callable[[], object] | None:
        with self._lock:
            call = None if self._ended else next(self._work, None)
            return None if self._ended else call

    def end(self) -> None:
        self._ended = True
        if self._stop is not None:
            self._stop()

    def first_error(self) -> BaseException:
        """Take the errors out: an error that its own frames hold would stay in memory until a garbage collection."""
        first = self.errors[0]
        self.errors.clear()
        return first
