"""What a function is, beside its name: its code, and the functions and constants of its module that it uses."""

from __future__ import annotations

import functools
import importlib.util
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forebay.tasks.code import codes_in, definition_of, is_installed, names_read_by, shape_of
from forebay.tasks.hashing import ConstantWriter, brought, cells_of, digest, text

_MANY = 100
"""Functions that make up another one, at most."""

Use = tuple[dict[str, Any], str, Any]
"""A module's variables, the name of one, and its value."""


@dataclass(frozen=True, slots=True)
class Code:
    """``digest``: of the code, the same on every version of Python where there are sources; empty where there is no code.
    ``mark``: of the bytecode, constants and literals, by which a process of the same version knows that it has the same code. ``names``:
    what counts in the modules."""

    digest: str
    mark: str
    names: frozenset[str]


def code_of(function: Any, sent: Code | None = None) -> tuple[Code, tuple[Use, ...]]:
    """The code of a function, and what it uses of its module: while each is the same object, so is the code.

    What it wraps counts, and functions that it closes over; functions of installed packages only where there is nothing else.
    ``sent``: the code as computed by the process that sent the function here. It is valid if the same bytecode runs here, and that process
    may have had the source."""
    functions = _functions_of(function)
    if not functions:
        return Code("", "", frozenset()), ()
    if sent is not None:
        uses = [use for one in functions for use in _uses_of(one, sent.names)]
        if _mark(functions, uses, sent.names) == sent.mark:
            return sent, tuple(uses)
    uses = [use for one in functions for use in _uses_of(one, None)]
    literals: dict[int, dict[str, types.CodeType]] = {}
    for one in functions:
        literals.setdefault(id(one.__globals__), {}).update(definition_of(one).literals)
    parts, names, known = [definition_of(one).code for one in functions], set(), dict[tuple[int, str], bytes]()
    for lived_in, name, value in uses:
        content = _content(lived_in, value, True)
        if not content and type(value) in _DISPLAYS and value:  # what is empty is filled later
            content = _as_written(literals.get(id(lived_in), {}), lived_in, name, known)
        if content:
            parts.append(text(name) + content)
            names.add(name)
    counted = frozenset(names)
    return Code(_digest(parts), _mark(functions, uses, counted), counted), tuple(uses)


def _mark(functions: list[types.FunctionType], uses: list[Use], names: frozenset[str]) -> str:
    """By the bytecode. ``names``: of what counts, as it is now; functions always do."""
    parts = [_MAGIC, *(shape_of(one.__code__) for one in functions)]
    for lived_in, name, value in uses:
        content = _content(lived_in, value, False)
        if name in names or content:
            parts.append(text(name) + (content or _constant(value, False, within=True)))
    return _digest(parts)


_MAGIC = importlib.util.MAGIC_NUMBER


def _digest(parts: list[bytes]) -> str:
    return digest(b"".join(b"%x:%b" % (len(part), part) for part in parts)).hex()[:16]


# -- which functions ---------------------------------------------------------------------------------------------------


def _functions_of(function: Any) -> list[types.FunctionType]:
    """Those whose code makes up a function: itself, what it wraps and what it closes over."""
    functions: list[types.FunctionType] = []
    waiting: list[Any] = [function]
    seen: set[int] = set()
    while waiting and len(seen) < _MANY:
        one = _unpacked(waiting.pop(0))
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if type(one) is types.FunctionType:
            functions.append(one)
            waiting += [content for _, content in cells_of(one) if _is_function(content)]
        elif issubclass(type(one), type):
            waiting += [vars(one)[name] for name in ("__new__", "__init__") if isinstance(vars(one).get(name), types.FunctionType)]
        elif not _is_function(one):  # an object that can be called
            waiting.append(getattr(type(one).__call__, "__wrapped__", type(one).__call__))
        waiting.append(_wrapped(one))
    own = [one for one in functions if not is_installed(one.__code__.co_filename)]
    return own or functions[:1]


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
    lived_in, uses = function.__globals__, list[Use]()
    if names is None:
        names = definition_of(function).constants
    for name in sorted(names_read_by(function.__code__)):
        value = lived_in.get(name)
        counts = names is None or name in names
        is_own = any(one.__globals__ is lived_in for one in _chain(value))
        if name in lived_in and (is_own or (counts and not issubclass(type(value), (types.ModuleType, type)))):
            uses.append((lived_in, name, value))
    return uses


def _content(lived_in: dict[str, Any], value: Any, by_source: bool) -> bytes:
    """What stands for the value of a module's variable: of a function its code and what it brings, of a constant the value; nothing for
    any other. ``by_source``: the code of functions, else their bytecode."""
    chain = list(_chain(value))
    own = [one for one in chain if one.__globals__ is lived_in]
    if not own:
        return _constant(value, by_source)
    version = getattr(getattr(value, "_naming", None), "version", None)
    if version is not None:
        return text(str(version))
    code = (definition_of(one).code if by_source else shape_of(one.__code__) for one in own)
    return b"".join((*code, *(brought(one, by_source) for one in chain)))


def _chain(value: Any) -> Iterator[types.FunctionType]:
    """A function and what it wraps."""
    for _ in range(_MANY):  # some wrap another object at each look
        value = _unpacked(value)
        if value is None:
            return
        if type(value) is types.FunctionType:
            yield value
        value = _wrapped(value)


def _constant(value: Any, by_source: bool = True, *, within: bool = False) -> bytes:
    """A value that cannot change; nothing for any other. ``within``: or a container of such values."""
    writer = ConstantWriter(by_source)
    try:
        return writer.write_container(value) if within else writer.write(value)
    except Exception:  # noqa: BLE001  # of whatever object it is: then it is no constant
        return b""


_DISPLAYS = (dict, list, set, tuple)


def _as_written(literals: dict[str, types.CodeType], lived_in: dict[str, Any], name: str, known: dict[tuple[int, str], bytes]) -> bytes:
    """A dict, list or set as long as it is what the module writes, of literals, of constants, and of others that are as written; else
    nothing. ``known``: of which this was asked already."""
    key, expression, value = (id(lived_in), name), literals.get(name), lived_in.get(name)
    if key in known or expression is None or type(value) not in _DISPLAYS:
        return known.get(key, b"")
    known[key] = b""  # of a circle
    names = {one for part in codes_in(expression) for one in part.co_names if one in lived_in}
    namespace = {one: lived_in[one] for one in names if _constant(lived_in[one]) or _as_written(literals, lived_in, one, known)}
    content = _constant(value, within=True)
    try:
        at_first = eval(expression, {"__builtins__": {}, **namespace}) if content else None  # it calls nothing
    except Exception:  # noqa: BLE001  # such as a name that is no constant
        return b""
    if content and _constant(at_first, within=True) == content:
        known[key] = content
    return known[key]
