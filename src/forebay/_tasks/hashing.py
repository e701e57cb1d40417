"""A digest of values by what they are: the same in each process, whatever PYTHONHASHSEED, the directory and the user.

Each value is written down as bytes that only equal values of its type share. What has no content that stays (locks, files, generators,
connections) is `Unstable`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable
from typing import Any

import xxhash

from forebay._tasks import contents
from forebay._tasks.contents import register as register
from forebay._tasks.writing import QUICK, Writer, flat, kind_text
from forebay._tasks.writing import Unstable as Unstable


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
    return found


def kind_of(value: Any) -> bytes:
    """What stands for a value of which only the type counts."""
    kind: Any = type(value)
    return b"?" + kind_text(kind)


# -- functions whose calls are kept ------------------------------------------------------------------------------------


def as_own(function: Any) -> bytes:
    """What of a function its name does not tell: what it closes over, the code of a lambda, what a partial or an object that can be
    called brings. Not the code of a function with a name: that is what versions are for. Raises `Unstable`."""
    writer, out = Writer(contents.writer_of), b""
    while isinstance(function, functools.partial):
        out += writer.write((function.args, function.keywords))
        function = function.func
    if isinstance(function, types.FunctionType):
        return out + (contents.own_code(writer, function) if function.__name__ == "<lambda>" else contents.closure_of(writer, function))
    return out if isinstance(getattr(function, "__qualname__", None), str) else out + writer.write(function)
