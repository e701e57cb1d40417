"""Codecs that read nothing but data: JSON text, and Arrow tables."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from forebay import errors
from forebay._model import Buffer
from forebay.codecs.base import ALIGNMENT, Named, damaged
from forebay.codecs.pytree import fitting

_JSON_LEAVES = frozenset({type(None), bool, int, float, str})


class Json(Named):
    """JSON text, of what comes back from it as it was: None, bool, int, float, str, lists of such, dicts of such by str."""

    name = "json"

    def encode(self, value: Any) -> Sequence[Buffer]:
        odd = _odd(value, "the value")
        if odd:
            message = f"{odd}, which codec='json' would not give back as it is: use codec={fitting(value)!r}, or other values"
            raise errors.ConfigError(message, name="codec", value="json")
        return (json.dumps(value, separators=(",", ":")).encode(),)

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        try:
            return json.loads(bytes(data))
        except (ValueError, RecursionError) as error:
            raise damaged(f"it is no JSON: {error}") from error


def _odd(value: Any, where: str) -> str:
    """The first thing in a value that JSON would change, in words; empty if there is none."""
    kind = type(value)
    if kind in _JSON_LEAVES:
        return ""
    if kind is list:
        inner = ((item, f"{where}[{i}]") for i, item in enumerate(value) if type(item) not in _JSON_LEAVES)
    elif kind is dict:
        for key in value:
            if type(key) is not str:
                return f"a key of {where} is the {type(key).__name__} {key!r:.80}"
        inner = ((item, f"{where}[{key!r}]") for key, item in value.items() if type(item) not in _JSON_LEAVES)
    else:
        return f"{where} is a {kind.__name__}"
    return next(filter(None, (_odd(item, place) for item, place in inner)), "")


_HEADS = {kind: (b"fba1 " + kind).ljust(ALIGNMENT) for kind in (b"Table", b"RecordBatch")}


class Arrow(Named):
    """A head that tells which of the two it is; the table, or record batch, as an Arrow IPC stream. It comes back over the mapping."""

    name = "arrow"

    def encode(self, value: Any) -> Sequence[Buffer]:
        arrow = needs_pyarrow()
        if not isinstance(value, (arrow.Table, arrow.RecordBatch)):
            message = (
                f"codec='arrow' stores a pyarrow.Table or RecordBatch, and this is a {type(value).__name__}: use codec={fitting(value)!r}"
            )
            raise errors.ConfigError(message, name="codec", value="arrow")
        sink = _Pieces([_HEADS[b"Table" if isinstance(value, arrow.Table) else b"RecordBatch"]])
        with arrow.PythonFile(sink, mode="w") as file, arrow.ipc.new_stream(file, value.schema) as writer:
            writer.write(value)
        return sink.pieces

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        arrow, head = needs_pyarrow(), bytes(data[:ALIGNMENT])
        if head not in _HEADS.values():
            raise damaged("it is no Arrow table")
        try:
            with arrow.ipc.open_stream(arrow.py_buffer(data[ALIGNMENT:])) as reader:
                found = reader.read_all() if head == _HEADS[b"Table"] else reader.read_next_batch()
            found.validate()
        except (arrow.ArrowException, OSError, StopIteration) as error:
            raise damaged(f"it is no Arrow table: {error}") from error
        return found


class _Pieces:
    """A file, as far as Arrow asks, that keeps what is written as it is given: buffers of columns are not copied."""

    closed = False

    def __init__(self, pieces: list[Buffer]) -> None:
        self.pieces, self._at = pieces, 0

    def write(self, data: Any) -> int:
        piece = memoryview(data).cast("B") if len(data) else memoryview(b"")
        if piece.nbytes:
            self.pieces.append(piece)
            self._at += piece.nbytes
        return piece.nbytes

    def tell(self) -> int:
        return self._at

    def flush(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        self.closed = True


@functools.cache
def needs_pyarrow() -> Any:
    """The package. Raises `MissingExtra`."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ModuleNotFoundError as error:
        raise errors.MissingExtra.of("codec='arrow'", "arrow") from error
    return pyarrow
