"""Classes and functions that pickle cannot refer to by name: those of the running program, and those that functions define."""

from __future__ import annotations

import functools
import operator
import pickle
import sys
import types
import weakref
from typing import Any

from forebay._kernel.interrupts import unless_of_handler

MAINS = frozenset({"__main__", "__mp_main__"})  # the second is what children of multiprocessing call the first
_MAX_CODE = 64 << 10
"""Bytes of a class or function that are stored with each value that needs it."""

_codes: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


@functools.cache
def cloudpickle() -> Any:
    """The package; None if it is not installed."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return None
    return cloudpickle


def of_the_program(value: Any) -> bool:
    """Whether ``value`` is a class or function of the running program, or of the one that sent it: another may have none of its name."""
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ not in MAINS or "<" in value.__qualname__:
        return False
    return _in_main(value.__qualname__) in (value, None)


def reduce(value: Any) -> tuple[Any, ...]:
    """For pickle: the reader uses its own object of this name if it has one, else the code."""
    return by_name, (value.__qualname__, _code_of(value))


def by_name(name: str, code: bytes) -> Any:
    """Named in stored pickles: neither the name nor the arguments may change."""
    value = _in_main(name)
    if value is None and code:
        return pickle.loads(code)
    if value is None:
        raise AttributeError(f"this program has no {name!r}, but the program that stored the value had it")
    return value


def _in_main(name: str) -> Any:
    try:
        return operator.attrgetter(name)(sys.modules["__main__"])
    except unless_of_handler(AttributeError, KeyError):
        return None


def _code_of(value: Any) -> bytes:
    """Empty if there is none, or it would be large: the code of a function includes the globals that it uses."""
    code = _codes.get(value)
    if code is None:
        cloud = cloudpickle()
        try:
            code = cloud.dumps(value, 5) if cloud is not None and value.__module__ == "__main__" else b""
        except Exception:  # noqa: BLE001  # raised by anything the function refers to: then only its name is stored
            code = b""
        code = code if len(code) <= _MAX_CODE else b""
        _codes[value] = code
    return code
