"""Raises a signal at each line, or each opcode, of Forebay that a call executes: one process, one signal a call."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import forebay

OURS = str(Path(forebay.__file__).parent) + os.sep


class Interrupted(Exception):
    """What the handler raises where the code of a test runs, too: of a class that no library takes for an error of its own."""


class Interrupt(Interrupted, TimeoutError, KeyError, IndexError, ValueError, TypeError, RuntimeError):
    """What the handler raises: of many classes, so that code that takes it for an error of its own shows."""


class Missing(AttributeError, LookupError):
    """As `Interrupt`, of a class that Python cannot combine with the others."""


class NotImported(ImportError):
    """As `Missing`."""


KINDS = (Interrupt, Missing, NotImported)


class Handler:
    """The handler of the signals. ``ran``: how often. ``kind``: what it raises."""

    ran = 0
    kind: type[Exception] = Interrupt

    def __call__(self, *_: object) -> None:
        self.ran += 1
        raise self.kind


interrupt = Handler()


class Moments:
    """Counts the lines of a call, and raises a signal at one of them."""

    def __init__(self, *, opcodes: bool = False) -> None:
        self._opcodes = opcodes
        self.seen = self._at = 0
        self.where = ""

    def run(self, call: Callable[[], Any], at: int = 0) -> bool:
        """Make a call, with a signal at line ``at`` of it, if there is one. Returns whether the handler raised."""
        self.seen, self._at, self.where, ran = 0, at, "", interrupt.ran
        try:
            sys.settrace(self._trace)
            try:
                result = call()
            finally:
                sys.settrace(None)
            del result
            while self.where and interrupt.ran == ran:  # one that came during a finalizer is sent again
                time.sleep(0.001)
        except KINDS:
            return True
        return False

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes = self._opcodes
        frame.f_trace_lines = not self._opcodes
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event in ("line", "opcode"):
            self.seen += 1
            if self.seen == self._at:
                self.where = f"{frame.f_code.co_filename.removeprefix(OURS)}:{frame.f_lineno} {frame.f_code.co_name}"
                signal.raise_signal(signal.SIGUSR1)
        return self._line


def held_locks() -> list[str]:
    """The locks on files that this process holds, as the kernel says: the file and the range."""
    found = []
    for fd in os.listdir("/proc/self/fdinfo"):
        try:
            lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
            path = os.readlink(f"/proc/self/fd/{fd}")
        except OSError:
            continue
        found += [f"{path} {' '.join(line.split()[-2:])}" for line in lines if line.startswith("lock:")]
    return sorted(found)
