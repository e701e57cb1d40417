"""What pickle cannot say by a name: functions made in functions, and what the program that runs has defined itself."""

from __future__ import annotations

import functools
import operator
import pickle
import sys
import types
import weakref
from typing import Any

MAINS = frozenset({"__main__", "__mp_main__"})  # the second is the first, as children of multiprocessing call it
_MOST = 64 << 10
"""Bytes of a class or function that are stored with each value that needs it."""

_known: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()


@functools.cache
def cloudpickle() -> Any:
    """The package, or None where it is not installed."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return None
    return cloudpickle


def of_the_program(value: Any) -> bool:
    """Whether this is a class or function of the program that runs, or of the one that sent it here: another may have none of its name."""
    if not isinstance(value, (type, types.FunctionType)) or value.__module__ not in MAINS or "<" in value.__qualname__:
        return False
    return _named(value.__qualname__) in (value, None)


def reduce(value: Any) -> tuple[Any, ...]:
    """For pickle: by name where the reader has one of this name, else by its code."""
    return by_name, (value.__qualname__, _code_of(value))


def by_name(name: str, code: bytes) -> Any:
    """Named in stored pickles: neither the name nor the arguments may change."""
    found = _named(name)
    if found is None and code:
        return pickle.loads(code)
    if found is None:
        raise AttributeError(f"this program has no {name!r}, which the program that stored the value had")
    return found


def _named(name: str) -> Any:
    try:
        return operator.attrgetter(name)(sys.modules["__main__"])
    except (AttributeError, KeyError):
        return None


def _code_of(value: Any) -> bytes:
    """Empty where there is none, or it would be large: a function brings the globals that it uses."""
    code = _known.get(value)
    if code is None:
        cloud = cloudpickle()
        try:
            code = cloud.dumps(value, 5) if cloud is not None and value.__module__ == "__main__" else b""
        except Exception:  # noqa: BLE001  # of whatever the function refers to: then there is its name
            code = b""
        code = code if len(code) <= _MOST else b""
        _known[value] = code
    return code
