"""Ctrl-C that comes where it hurts: while the main thread waits for others, or within a finalizer."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest

LATE = 10.0
"""Seconds after which a signal that was not delivered is late."""


@contextlib.contextmanager
def interrupted(at: str, release: Callable[[], object]) -> Iterator[None]:
    """Ctrl-C comes once the main thread is in a function of the name ``at``. It must be raised while the function waits: ``release`` ends
    what that waits for, and is called afterwards, or if the signal is late."""
    main, over, late = threading.main_thread().ident or 0, threading.Event(), list[str]()

    def strike() -> None:
        while not over.is_set() and not _is_in(main, at):
            time.sleep(0.001)
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)
        if not over.wait(LATE):
            late.append(at)
            release()

    thread = threading.Thread(target=strike)
    take_ctrl_c()
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()
        release()
    assert not late


def take_ctrl_c() -> None:
    """A framework that another test has loaded may have put a function of C in front of Python's, which is then left alone."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_in(thread: int, name: str) -> bool:
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_name != name:
        frame = frame.f_back
    return frame is not None


@contextlib.contextmanager
def soon() -> Iterator[None]:
    """Ctrl-C comes within, from a signal that a finalizer was struck by, and not by way of what Python ignores."""
    with pytest.raises(KeyboardInterrupt):
        yield
        threading.Event().wait(LATE)


def strike_once(monkeypatch: pytest.MonkeyPatch, cls: type, name: str) -> None:
    """Ctrl-C comes when the main thread next calls a method, before what that does."""
    method = getattr(cls, name)

    def struck(self: object, *args: object, **options: object) -> object:
        if threading.current_thread() is threading.main_thread():
            setattr(cls, name, method)
            signal.raise_signal(signal.SIGINT)
        return method(self, *args, **options)

    take_ctrl_c()
    monkeypatch.setattr(cls, name, struck)
