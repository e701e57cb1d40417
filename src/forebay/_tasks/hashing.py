"""A digest of values by what they are: the same in each process, whatever PYTHONHASHSEED, the directory and the user.

Each value is written down as bytes that only equal values of its type share. What has no content that stays (locks, files, generators,
connections) is `Unstable`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Iterable
from typing import Any

import xxhash

from forebay._tasks import contents
from forebay._tasks.code import written as written_code
from forebay._tasks.contents import register as register
from forebay._tasks.naming import place_of
from forebay._tasks.writing import QUICK, Writer, flat, kind_text, text
from forebay._tasks.writing import Unstable as Unstable

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
            found.append(flat(value) or Writer(contents.writer_of).write(value))
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
    writer, out = Writer(contents.writer_of), b""
    while isinstance(function, functools.partial):
        out += writer.write((function.args, function.keywords))
        function = function.func
    if isinstance(function, types.FunctionType):
        return out + _own(writer, function, set())
    return out if isinstance(getattr(function, "__qualname__", None), str) else out + writer.write(function)


def _own(writer: Writer, function: Any, seen: set[int]) -> bytes:
    out = b"" if function.__name__ != "<lambda>" else written_code(function).code
    if function.__closure__:
        seen.add(id(function))
        rebound = _rebound(function.__code__)
        for name, content in contents.cells_of(function):
            if name not in rebound:
                out += writer.write(name) + lasting(writer, content, seen)
    return out


def lasting(writer: Writer, value: Any, seen: set[int]) -> bytes:
    """A value that cannot change; nothing for any other."""
    kind: Any = type(value)
    is_plain = kind in QUICK and kind is not bytearray
    if is_plain or issubclass(kind, (type, enum.Enum)) or place_of(kind) in LASTING:
        return writer.write(value)
    if kind is tuple or kind is frozenset:
        parts = [lasting(writer, item, seen) for item in value]
        return b"(" + b"".join(parts if kind is tuple else sorted(parts)) + b")" if all(parts) else b""
    if kind is types.FunctionType and id(value) not in seen:
        local = written_code(value).code + _own(writer, value, seen) if "<" in value.__qualname__ else b""
        return b"A" + text(place_of(value)) + local
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return kind_text(kind) + lasting(writer, tuple(getattr(value, f.name, None) for f in dataclasses.fields(value)), seen)
    return b""


def _rebound(code: types.CodeType) -> set[str]:
    """The variables of others that a function, or one within it, gives other values."""
    import dis

    found = {str(step.argval) for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
    return found.union(*(_rebound(part) for part in code.co_consts if isinstance(part, types.CodeType)))
