"""What a function is, beside its name: its code, and the functions and constants of its module that it uses."""

from __future__ import annotations

import ast
import functools
import importlib.util
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import xxhash

from forebay._tasks import contents
from forebay._tasks.code import is_installed, names_read_by, shape_of, tree_of, written
from forebay._tasks.hashing import lasting
from forebay._tasks.writing import Writer, text

_MANY = 100
"""Functions that make up another one, at most."""

Use = tuple[dict[str, Any], str, Any]
"""A module's variables, the name of one, and its value."""


@dataclass(frozen=True, slots=True)
class Code:
    """``digest``: of the code, the same on every version of Python where there are sources; empty where there is no code.
    ``mark``: of the bytecode and constants, by which a process of the same version knows that it has the same code. ``names``: what was
    looked at in the modules."""

    digest: str
    mark: str
    names: frozenset[str]


def code_of(function: Any, sent: Code | None = None) -> tuple[Code, tuple[Use, ...]]:
    """The code of a function, and what it uses of its module: while each is the same object, so is the code.

    What is wrapped counts, and functions that it closes over; functions of installed packages only where there is nothing else.
    ``sent``: what the process found that sent the function here. It is right if the same runs here, and that one may have had the
    source."""
    functions = _functions_of(function)
    if not functions:
        return Code("", "", frozenset()), ()
    uses = [use for one in functions for use in _uses_of(one, sent.names if sent is not None else None)]
    mark = _digest([_MAGIC, *(shape_of(one.__code__) for one in functions), *_used(uses, _shape, {})])
    if sent is not None and sent.mark == mark:
        return sent, tuple(uses)
    literals: dict[int, dict[str, ast.expr]] = {}
    for one in functions:
        literals.setdefault(id(one.__globals__), {}).update(written(one).literals)
    digest = _digest([*(written(one).code for one in functions), *_used(uses, _tree, literals)])
    return Code(digest, mark, frozenset(name for _, name, _ in uses)), tuple(uses)


def _shape(function: types.FunctionType) -> bytes:
    return shape_of(function.__code__)


def _tree(function: types.FunctionType) -> bytes:
    return written(function).code


_MAGIC = importlib.util.MAGIC_NUMBER


def _digest(parts: list[bytes]) -> str:
    return xxhash.xxh3_64_hexdigest(b"".join(b"%x:%b" % (len(part), part) for part in parts))


# -- which functions ---------------------------------------------------------------------------------------------------


def _functions_of(function: Any) -> list[types.FunctionType]:
    """Those whose code makes up a function: itself, what it wraps and what it closes over."""
    found: list[types.FunctionType] = []
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MANY:
        one = _unpacked(waiting.pop(0))
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) is types.FunctionType:
            found.append(one)
            waiting += [content for _, content in contents.cells_of(one) if _is_function(content)]
        elif issubclass(type(one), type):
            waiting += [vars(one)[name] for name in ("__new__", "__init__") if isinstance(vars(one).get(name), types.FunctionType)]
        elif not _is_function(one):  # an object that can be called
            waiting.append(getattr(type(one).__call__, "__wrapped__", type(one).__call__))
        waiting.append(_wrapped(one))
    own = [one for one in found if not is_installed(one.__code__.co_filename)]
    return own or found[:1]


def _unpacked(function: Any) -> Any:
    """What a partial or a bound method stands for."""
    while issubclass(type(function), (functools.partial, types.MethodType)):
        function = function.func if issubclass(type(function), functools.partial) else function.__func__
    return function


def _wrapped(value: Any) -> Any:
    """What any object, of whatever package, says that it wraps."""
    try:
        return getattr(value, "__wrapped__", None)
    except Exception:  # noqa: BLE001  # such as of a proxy for what is not there now
        return None


def _is_function(value: Any) -> bool:
    value = _unpacked(value)
    return type(value) in (types.FunctionType, types.BuiltinFunctionType) or type(_wrapped(value)) is types.FunctionType


# -- what they use -----------------------------------------------------------------------------------------------------


def _uses_of(function: types.FunctionType, names: frozenset[str] | None) -> list[Use]:
    """The functions and constants of its module that a function names, in the order of their names."""
    lived_in, how = function.__globals__, written(function)
    found: list[Use] = []
    for name in sorted(names_read_by(function.__code__)):
        value = lived_in.get(name)
        counts = name in names if names is not None else how.constants is None or name in how.constants or name in how.literals
        is_own = any(one.__globals__ is lived_in for one in _chain(value))
        if name in lived_in and (is_own or (counts and not issubclass(type(value), (types.ModuleType, type)))):
            found.append((lived_in, name, value))
    return found


def _used(uses: list[Use], write: Callable[[types.FunctionType], bytes], literals: dict[int, dict[str, ast.expr]]) -> Iterator[bytes]:
    """What stands for each use: the code of a function, the value of a constant, what a variable was given where that is still so."""
    for lived_in, name, value in uses:
        own = [one for one in _chain(value) if one.__globals__ is lived_in]
        node = literals.get(id(lived_in), {}).get(name)
        if own:
            version = getattr(getattr(value, "_naming", None), "version", None)
            yield text(name) + (text(str(version)) if version is not None else b"".join(map(write, own)))
        elif constant := _constant(value):
            yield text(name) + constant
        elif node is not None and type(value) in (dict, list, set) and value and _is_as_written(node, value):
            yield text(name) + tree_of(node)


def _chain(value: Any) -> Iterator[types.FunctionType]:
    """A function and what it wraps."""
    for _ in range(_MANY):  # some wrap another object at each look
        value = _unpacked(value)
        if value is None:
            return
        if type(value) is types.FunctionType:
            yield value
        value = _wrapped(value)


def _constant(value: Any) -> bytes:
    try:
        return lasting(Writer(contents.writer_of), value, set())
    except Exception:  # noqa: BLE001  # of whatever object it is: then it is no constant
        return b""


def _is_as_written(node: ast.expr, value: Any) -> bool:
    try:
        return bool(ast.literal_eval(node) == value)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return False
