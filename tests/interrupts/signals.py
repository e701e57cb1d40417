"""A signal whose handler raises, sent from inside a function of Forebay."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NUMBER = signal.SIGUSR1


@contextlib.contextmanager
def handler_that_raises(kind: type[BaseException] = TimeoutError, *, once: bool = False) -> Iterator[None]:
    """The program's handler raises this: by default an OSError, which code may take for a fault of the disk."""

    def handler(*_: object) -> None:
        if once:
            signal.signal(NUMBER, signal.SIG_DFL)
        raise kind("of the handler")

    before = signal.signal(NUMBER, handler)
    try:
        yield
    finally:
        signal.signal(NUMBER, before)


def interrupted_after(patch: pytest.MonkeyPatch, owner: Any, name: str, *, at: int = 1) -> Callable[[], int]:
    """Have a signal come as the ``at``-th call of a function is about to return. Returns what counts the calls."""
    real, calls = getattr(owner, name), list[None]()

    def function(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        calls.append(None)
        if len(calls) == at:
            signal.raise_signal(NUMBER)
        return result

    patch.setattr(owner, name, function)
    return calls.__len__
