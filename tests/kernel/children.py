"""Other processes for the tests of the kernel room: forked, led by a pipe, killed at will."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe
from typing import Any, Self

GUARD = 60.0
"""Seconds after which the other side is taken to hang: a guard, not a measure."""


class Line:
    """One end of the talk between a test and its child."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def say(self, what: object = None) -> None:
        self._pipe.send(what)

    def hear(self) -> Any:
        if not self._pipe.poll(GUARD):
            raise AssertionError("the other process says nothing")
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.close()


class Child(Line):
    """A process that runs one function, which talks through the `Line` that it is given."""

    def __init__(self, work: Callable[[Line], object], *, by: Callable[[], int] = os.fork) -> None:
        ours, its = Pipe()
        self.pid = by()
        if self.pid == 0:
            ours.close()
            _run(work, Line(its))
        its.close()
        super().__init__(ours)

    def hear(self) -> Any:
        """What the child says next. What it raised is raised here."""
        said = super().hear()
        if isinstance(said, _Raised):
            raise AssertionError(said.text)
        return said

    def kill(self) -> None:
        """Gone when this returns, whether it was alive or not."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait(self) -> int:
        """Its exit status, or the negative signal that ended it."""
        if self.pid == 0:
            return 0
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pid:
            self.kill()
        self.close()


class _Raised:
    def __init__(self, text: str) -> None:
        self.text = text


def _run(work: Callable[[Line], object], line: Line) -> None:
    try:
        work(line)
        code = 0
    except BaseException:
        with contextlib.suppress(OSError, pickle.PicklingError):
            line.say(_Raised(traceback.format_exc()))
        code = 1
    sys.stdout.flush()
    os._exit(code)


def in_child(work: Callable[[], object], *, by: Callable[[], int] = os.fork) -> Any:
    """What ``work`` gives in a child."""
    with Child(lambda line: line.say(work()), by=by) as child:
        return child.hear()


def fork_in_c() -> int:
    """A fork as a C library does it: no hook of Python's runs."""
    return int(ctypes.PyDLL(None).fork())


@contextlib.contextmanager
def orphan(
    work: Callable[[Line], object], *, parent: Callable[[], object], by: Callable[[], int] = os.fork
) -> Iterator[tuple[Child, Line]]:
    """A process that does ``parent`` and forks a child for ``work``; gives the first, to be killed, and a line to the second.

    The first waits; when it is killed the second goes on, and ends when its line closes."""
    ours, its = Pipe()

    def first(line: Line) -> None:
        ours.close()
        parent()
        if by() == 0:
            line.close()
            _run(work, Line(its))
        its.close()
        line.say("forked")
        line.hear()

    with Child(first) as child:
        its.close()
        second = Line(ours)
        child.hear()
        try:
            yield child, second
        finally:
            second.close()
