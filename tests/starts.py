"""Which tests start a process or a server: read from their code. `make quick` leaves these out.

A test is one of them if its function, a fixture or a parameter of it, or a function of the tests that one of these names, names something
that starts one. What the code does not show is marked ``processes``; `refuse` tells of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

_MODULES = ("subprocess", "multiprocessing", "socketserver", "http.server", "tests.processes", "tests.servers", "forebay.testing")
_NAMES = {"fork", "forkpty", "posix_spawn", "subprocess", "multiprocessing"}
_EVENTS = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}


_known: dict[FunctionType, bool] = {}


def starts(item: pytest.Item) -> bool:
    """Whether a test starts a process or a server."""
    if item.get_closest_marker("processes") is not None:
        return True
    parameters = item.callspec.params.values() if hasattr(item, "callspec") else ()
    values = [getattr(item, "function", None), *parameters, *(_fixture(name, item) for name in getattr(item, "fixturenames", ()))]
    return any(_starts(value, item) for value in values if isinstance(value, FunctionType))


def _fixture(name: str, item: pytest.Item) -> Any:
    found = item.session._fixturemanager.getfixturedefs(name, item)
    return found[-1].func if found else None


def _starts(function: FunctionType, item: pytest.Item) -> bool:
    if function not in _known:
        _known[function] = False  # if it names itself
        _known[function] = any(_leads(function, name, item) for name in _names(function.__code__))
    return _known[function]


def _leads(function: FunctionType, name: str, item: pytest.Item) -> bool:
    """Whether a name in a function, or the fixture that a text in it names, starts one."""
    if name in _NAMES:
        return True
    value: Any = function.__globals__[name] if name in function.__globals__ else _fixture(name, item)
    module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    if module.startswith(_MODULES):
        return True
    members = vars(value).values() if isinstance(value, type) else [value]
    return module.startswith("tests") and any(_starts(one, item) for one in members if isinstance(one, FunctionType))


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str):
            yield constant


def refuse() -> None:
    """From now on a test that starts a process in this one fails."""

    def refusing(event: str, arguments: tuple[object, ...]) -> None:
        if event in _EVENTS and "PYTEST_CURRENT_TEST" in os.environ:
            raise AssertionError(f"{event}: a test that starts a process is marked with `processes`")

    sys.addaudithook(refusing)
