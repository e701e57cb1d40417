"""A digest of values by what they are: the same in each process, whatever PYTHONHASHSEED, the directory and the user.

Each value is written down as bytes that only equal values of its type share. What has no content that stays (locks, files, generators,
connections) is `Unstable`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import types
from collections.abc import Iterable
from typing import Any

import xxhash

from forebay.tasks import contents
from forebay.tasks.code import is_installed, shape_of, steps_of
from forebay.tasks.code import written as written_code
from forebay.tasks.contents import register as register
from forebay.tasks.naming import place_of
from forebay.tasks.writing import QUICK, DigestWriter, flat, kind_text, text
from forebay.tasks.writing import Unstable as Unstable

LASTING = frozenset(
    {"datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "decimal.Decimal", "uuid.UUID"}
    | {"pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath", "builtins.range", "builtins.slice"}
)
"""Classes of values that cannot change, beside the plainest ones and those that are made of such."""


def digest_of(*values: Any) -> str:
    """32 hex digits that equal values share. Raises `Unstable`."""
    return xxhash.xxh3_128_hexdigest(b"".join(written(values)))


def written(values: Iterable[Any]) -> list[bytes]:
    """Each value as the bytes that stand for it. Raises `Unstable`."""
    found = []
    for index, value in enumerate(values):
        quick = QUICK.get(type(value))
        if quick is not None:
            found.append(quick(value))
            continue
        try:
            found.append(flat(value) or DigestWriter(contents.writer_of).write(value))
        except Unstable as error:
            error.index = index
            raise
        except RecursionError as error:
            deep = Unstable(f"a {type(value).__name__} that is nested too deep")
            deep.index = index
            raise deep from error
    return found


def kind_of(value: Any) -> bytes:
    """What stands for a value of which only the type counts."""
    kind: Any = type(value)
    return b"?" + kind_text(kind)


# -- functions whose calls are kept ------------------------------------------------------------------------------------


def as_own(function: Any) -> bytes:
    """What neither the name nor the code of a function tells: what it closes over, what a partial or an object that can be called
    brings. Of a lambda the code, since a version does not tell it from another. Raises `Unstable`.

    Of what it closes over only values that cannot change count: lists, counters and clients are what it works with, not what it is."""
    writer, out = DigestWriter(contents.writer_of), b""
    while isinstance(function, functools.partial):
        out += writer.write((function.args, function.keywords))
        function = function.func
    if isinstance(function, types.FunctionType):
        return out + _own(writer, function, set())
    return out if isinstance(getattr(function, "__qualname__", None), str) else out + writer.write(function)


def _own(writer: DigestWriter, function: Any, seen: set[int], by_source: bool = True) -> bytes:
    out = b"" if function.__name__ != "<lambda>" else _code(function, by_source)
    if function.__closure__:
        seen.add(id(function))
        rebound = _rebound(function.__code__)
        for name, content in contents.cells_of(function):
            if name not in rebound:
                out += writer.write(name) + lasting(writer, content, seen, by_source)
    return out


def _code(function: types.FunctionType, by_source: bool) -> bytes:
    return written_code(function).code if by_source else shape_of(function.__code__)


def brought(function: types.FunctionType, by_source: bool) -> bytes:
    """What a function that another one uses has beside its code, of values that cannot change: what it closes over, and its defaults,
    where they are constants. ``by_source``: see `lasting`."""
    writer, seen = DigestWriter(contents.writer_of), {id(function)}
    return _defaults(writer, function, seen, by_source) + _own(writer, function, seen, by_source)


def _defaults(writer: DigestWriter, function: types.FunctionType, seen: set[int], by_source: bool) -> bytes:
    given = (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()))
    if not given or is_installed(function.__code__.co_filename):
        return b""
    # Those of a function that is made in a function are of the one that made it, as what it closes over is.
    if by_source and "<" not in function.__code__.co_qualname and not written_code(function).defaults:
        return b""
    return b"".join(b"d" + lasting(writer, value, seen, by_source) for value in given)


def lasting(writer: DigestWriter, value: Any, seen: set[int] | None = None, by_source: bool = True) -> bytes:
    """A value that cannot change; nothing for any other. ``by_source``: the code of functions, else their bytecode."""
    kind: Any = type(value)
    seen = set() if seen is None else seen
    is_plain = kind in QUICK and kind is not bytearray
    if is_plain or issubclass(kind, (type, enum.Enum)) or place_of(kind) in LASTING:
        return writer.write(value)
    if kind is tuple or kind is frozenset:
        parts = [lasting(writer, item, seen, by_source) for item in value]
        return b"(" + b"".join(parts if kind is tuple else sorted(parts)) + b")" if all(parts) else b""
    if kind is types.FunctionType:
        known = id(value) in seen
        seen.add(id(value))
        return b"A" + text(place_of(value)) + (b"" if known else _beside_its_name(writer, value, seen, by_source))
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return kind_text(kind) + lasting(writer, tuple(getattr(value, f.name, None) for f in dataclasses.fields(value)), seen, by_source)
    return b""


def _beside_its_name(writer: DigestWriter, function: types.FunctionType, seen: set[int], by_source: bool) -> bytes:
    """Of a function that another one closes over: the code of one that is made in a function, what that closes over, its defaults."""
    out = _defaults(writer, function, seen, by_source)
    # By the name in its code: a wrapper has the qualified name of what it wraps.
    if function.__closure__ or "<" in function.__code__.co_qualname:
        if not is_installed(function.__code__.co_filename):
            out += _code(function, by_source)
        out += _own(writer, function, seen, by_source)
    return out


def lasting_within(writer: DigestWriter, value: Any, by_source: bool = True) -> bytes:
    """A dict, list, set or tuple, each in its order, of values that cannot change; nothing where another one is in it."""
    kind = type(value)
    if kind not in (dict, list, set, tuple):
        return lasting(writer, value, None, by_source)
    if kind in (list, tuple) and (plain := flat(value)):
        return plain
    parts = [lasting_within(writer, part, by_source) for part in (itertools.chain(*value.items()) if kind is dict else value)]
    if not all(parts):
        return b""
    return b"%b%x:%b" % (text(kind.__name__), len(parts), b"".join(sorted(parts) if kind is set else parts))


def _rebound(code: types.CodeType) -> set[str]:
    """The variables of others that a function, or one within it, gives other values."""
    found = {argument for name, argument in steps_of(code) if name in ("STORE_DEREF", "DELETE_DEREF")}
    return found.union(*(_rebound(part) for part in code.co_consts if isinstance(part, types.CodeType)))
