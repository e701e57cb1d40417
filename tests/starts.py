"""Which tests start a process or a server: read from their code, and held against what they do.

`make quick` leaves these out. A test is one of them if its function, a fixture of it, or a function of the tests that one of these names,
names something that starts one. What the code does not show is marked ``processes``."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

_MODULES = ("subprocess", "multiprocessing", "socketserver", "http.server", "tests.processes", "tests.servers", "forebay.testing")
_NAMES = {"fork", "forkpty", "posix_spawn", "subprocess", "multiprocessing"}
_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen", "socket.bind"}


def one(item: pytest.Item) -> bool:
    """Whether a test starts a process or a server."""
    if item.get_closest_marker("processes") is not None:
        return True
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    functions = [getattr(item, "function", None), *(found[-1].func for found in fixtures)]
    return any(_starts(function) for function in functions if isinstance(function, FunctionType))


@functools.cache
def _starts(function: FunctionType) -> bool:
    seen, left = set(), [function]
    while left:
        current = left.pop()
        if current in seen:
            continue
        seen.add(current)
        for name in _names(current.__code__):
            if name in _NAMES:
                return True
            value: Any = current.__globals__.get(name)
            module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
            if module.startswith(_MODULES):
                return True
            if module.startswith("tests"):
                members = vars(value).values() if isinstance(value, type) else [value]
                left += [one for one in members if isinstance(one, FunctionType)]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def refuse() -> None:
    """From now on a test that starts a process or a server in this process fails."""

    def refusing(event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and "PYTEST_CURRENT_TEST" in os.environ:
            raise AssertionError(f"{event}: a test that starts a process or a server is marked with `processes`")

    sys.addaudithook(refusing)
