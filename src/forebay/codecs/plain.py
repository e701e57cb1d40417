"""Codecs whose payloads are data only, and run no code when they are read: JSON text, Arrow tables, and trees of arrays and values."""

from __future__ import annotations

import functools
import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forebay import errors
from forebay._kernel.interrupts import unless_of_handler
from forebay._model import Buffer, is_text
from forebay.codecs import arrays
from forebay.codecs.arrays import CannotEncode
from forebay.codecs.base import ALIGNMENT, Named, damaged

_JSON_LEAVES = frozenset({type(None), bool, int, float, str})


class Json(Named):
    """JSON text of values that it does not change: None, bool, int, float, str, lists of them, and dicts of them with keys of type str."""

    name = "json"

    def encode(self, value: Any) -> Sequence[Buffer]:
        changed = _changed_by_json(value, "the value")
        if changed:
            message = f"{changed}, which codec='json' would not give back as it is: use codec={fitting(value)!r}, or other values"
            raise errors.ConfigError(message, name="codec", value="json")
        return (json.dumps(value, separators=(",", ":")).encode(),)

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        try:
            return json.loads(bytes(data))
        except unless_of_handler(ValueError, RecursionError) as error:
            raise damaged(f"it is no JSON: {error}") from error


def _changed_by_json(value: Any, where: str) -> str:
    """The first part of a value that JSON would change, in words; empty if there is none."""
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
    return next(filter(None, (_changed_by_json(item, position) for item, position in inner)), "")


_HEADS = {kind: (b"fba1 " + kind).ljust(ALIGNMENT) for kind in (b"Table", b"RecordBatch")}


class Arrow(Named):
    """A head that names the class; the table, or record batch, as an Arrow IPC stream. Its columns are read without a copy."""

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
                value = reader.read_all() if head == _HEADS[b"Table"] else reader.read_next_batch()
            value.validate()
        except unless_of_handler(arrow.ArrowException, OSError, StopIteration) as error:
            raise damaged(f"it is no Arrow table: {error}") from error
        return value


class _Pieces:
    """A file, as far as Arrow needs one, that keeps what is written without a copy."""

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
        """Nothing is buffered."""

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


# -- trees -------------------------------------------------------------------------------------------------------------

_FRONT = struct.Struct("<4sI")  # mark, length of the structure
_MARK = b"fby1"
_SAME_IN_JSON = frozenset({type(None), bool, float})
_KEYS = frozenset({*_SAME_IN_JSON, int, str, bytes, complex, tuple})
_SMALL = 1 << 62
MAX_REPEATED = 1 << 21
"""Parts of lists, tuples and dicts that a value contains more than once, and that are written each time."""


class Pytree(Named):
    """Values of datasets: arrays, tensors and plain values in tuples, lists and dicts. Reading them runs no code.

    The front; the structure, as JSON in which a list with a mark stands for what JSON lacks; the memory of bytes, arrays and tensors
    in their order, each at a multiple of 64."""

    name = "pytree"

    def encode(self, value: Any) -> Sequence[Buffer]:
        memory: list[Buffer] = []
        try:
            text = json.dumps(_structure(value, _TreeWalk(memory)), separators=(",", ":")).encode()
        except CannotEncode as error:
            where = f"value{''.join(reversed(error.path))}" if error.path else "the value"
            raise _use_pickle(f"{where} is {error}") from error
        except RecursionError:
            raise _use_pickle("the value is nested too deep, or lies in itself") from None
        pieces: list[Buffer] = [_FRONT.pack(_MARK, len(text)), text]
        end = _FRONT.size + len(text)
        for part in memory:
            if len(part):
                gap = -end % ALIGNMENT
                pieces += (bytes(gap), part)
                end += gap + len(part)
        return pieces

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        try:
            mark, length = _FRONT.unpack_from(data)
            if mark != _MARK or _FRONT.size + length > len(data):
                raise ValueError("its front is not what encode writes")
            reader = _TreeReader(data, _FRONT.size + length, private)
            value = reader.value(json.loads(str(data[_FRONT.size : _FRONT.size + length], "ascii")))
            if reader.end != len(data):
                raise ValueError(f"a value of {reader.end:,} bytes has {len(data):,}")
        except (OSError, ImportError):  # of `private`, and of missing packages
            raise
        except unless_of_handler(Exception) as error:
            raise damaged(f"{type(error).__name__}: {error}") from error
        return value


def _use_pickle(what: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"codec='pytree' stores arrays, tensors and plain values in tuples, lists and dicts, and {what}: use codec='pickle', where you "
        "trust everybody who can write to the cache (what is unpickled runs code)",
        name="codec", value="pytree",
    )  # fmt: skip


class _TreeWalk:
    """The state of one walk through a value. ``memory``: receives the memory of its parts; None: only their types matter."""

    def __init__(self, memory: list[Buffer] | None) -> None:
        self.memory = memory
        self._seen: set[int] = set()  # ids of parts of the value, which live as long as it does
        self._repeated = 0

    def enter(self, part: Any) -> None:
        """Count a list, tuple or dict. Raises `CannotEncode` if parts repeat so often that a small value would fill the disk."""
        if id(part) not in self._seen:
            self._seen.add(id(part))
            return
        self._repeated += len(part)
        if self._repeated > MAX_REPEATED:
            raise CannotEncode(f"once more a {type(part).__name__} that lies in it many times, and is written out each time")

    def keep(self, memory: Buffer) -> None:
        if self.memory is not None:
            self.memory.append(memory)


def _structure(value: Any, walk: _TreeWalk) -> Any:
    kind = type(value)
    if kind in _SAME_IN_JSON:
        return value
    if kind is str:
        return value if is_text(value) else ["s", value.encode("utf-8", "surrogatepass").hex()]
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["i", hex(value)]
    if kind is tuple or kind is list:
        walk.enter(value)
        return ["(" if kind is tuple else "[", *_parts(((f"[{i}]", part) for i, part in enumerate(value)), walk)]
    if kind is dict:
        walk.enter(value)
        other = next((key for key in value if type(key) not in _KEYS and not _is_scalar(key)), None)
        if other is not None:
            raise CannotEncode(f"a dict with the {type(other).__name__} {other!r:.80} as a key")
        keys = _parts(((f" key {key!r:.80}", key) for key in value), walk)
        return ["{", [*keys], *_parts(((f"[{key!r:.80}]", part) for key, part in value.items()), walk)]
    if kind is bytes or kind is bytearray:
        walk.keep(value)
        return ["b" if kind is bytes else "B", len(value)]
    if kind is complex:
        return ["c", value.real, value.imag]
    return _array(value, walk)


def _parts(parts: Iterator[tuple[str, Any]], walk: _TreeWalk) -> Iterator[Any]:
    for where, part in parts:
        try:
            yield _structure(part, walk)
        except CannotEncode as error:
            error.path.append(where)
            raise


def _array(value: Any, walk: _TreeWalk) -> Any:
    """A value of a package implies that it is imported: nothing is imported here."""
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    kind = type(value)
    if np is not None and kind in (np.ndarray, np.memmap):
        if walk.memory is None:
            return ["a", arrays.head_of(value).decode()]
        head, content = arrays.split_array(value)
        walk.keep(content)
        return ["a", head.decode()]
    if _is_scalar(value):
        return ["n", value.dtype.str, value.tobytes().hex()]
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        split = arrays.split_tensor(value) if walk.memory is not None else None
        if split is None:
            if walk.memory is None and arrays.is_plain(value):
                return ["t"]
            raise CannotEncode(f"a tensor on {value.device} of layout {value.layout}")
        walk.keep(split[1])
        return ["t", len(split[1]), *split[0]]
    raise CannotEncode(f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))


def _is_scalar(value: Any) -> bool:
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.generic) and type(value) is value.dtype.type and _is_described_by_its_text(value.dtype)


@functools.lru_cache(1024)
def _is_described_by_its_text(dtype: Any) -> bool:
    """False for dtypes of other packages, which describe themselves as plain bytes."""
    return not (dtype.hasobject or dtype.kind == "V" or arrays.numpy().dtype(dtype.str) != dtype)


class _TreeReader:
    """``end``: the end of what was read."""

    def __init__(self, data: memoryview, end: int, private: Callable[[], memoryview]) -> None:
        self._data, self.end, self._private = data, end, private
        self._own: memoryview | None = None

    def value(self, part: Any) -> Any:
        if type(part) is not list:
            return part
        mark = part[0]
        if mark == "(":
            return tuple([self.value(item) for item in part[1:]])
        if mark == "[":
            return [self.value(item) for item in part[1:]]
        if mark == "{":
            keys = [self.value(key) for key in part[1]]
            return dict(zip(keys, [self.value(item) for item in part[2:]], strict=True))
        return self._leaf(mark, part)

    def _leaf(self, mark: str, part: list[Any]) -> Any:
        if mark == "a":
            ndarray, shape, dtype, order, size = arrays.parse_head(part[1].encode())
            return ndarray(shape, dtype, self._data, self._next(size), None, order)
        if mark == "n":
            dtype = arrays.numpy().dtype(part[1])
            if dtype.hasobject:
                raise ValueError("a scalar that is an object")
            return arrays.numpy().frombuffer(bytes.fromhex(part[2]), dtype, 1)[0] if dtype.itemsize else dtype.type()
        if mark == "t":
            return self._tensor(*part[1:])
        if mark in ("b", "B"):
            start = self._next(part[1])
            return (bytes if mark == "b" else bytearray)(self._data[start : self.end])
        if mark == "s":
            return bytes.fromhex(part[1]).decode("utf-8", "surrogatepass")
        if mark == "i":
            return int(part[1], 16)
        if mark == "c":
            return complex(part[1], part[2])
        raise ValueError(f"{mark!r:.80} is no mark")

    def _next(self, size: int) -> int:
        """The start of the next ``size`` bytes of memory."""
        start = (self.end + ALIGNMENT - 1) & -ALIGNMENT if size else self.end
        if type(size) is not int or size < 0 or start + size > len(self._data):
            raise ValueError(f"{size!r:.80} bytes at {start:,} of {len(self._data):,}")
        self.end = start + size
        return start

    def _tensor(self, size: int, dtype: str, shape: list[int], strides: list[int], requires_grad: bool, parameter: bool) -> Any:
        """Over writable memory: a tensor cannot be read-only."""
        start = self._next(size)
        memory: Buffer
        if not self._data.readonly:
            memory = self._data[start : self.end]
        elif size < arrays.MAPPED_FROM:
            memory = bytearray(self._data[start : self.end])
        else:
            self._own = self._private() if self._own is None else self._own
            memory = self._own[start : self.end]
        return arrays.tensor_of(memory, dtype, tuple(shape), tuple(strides), requires_grad, parameter)


def fitting(value: Any) -> str:
    """The name of a codec that stores ``value`` without pickle if there is one, else ``pickle``."""
    kind, np, arrow = type(value), sys.modules.get("numpy"), sys.modules.get("pyarrow")
    if kind in (bytes, bytearray, memoryview):
        return "raw"
    if arrow is not None and isinstance(value, (arrow.Table, arrow.RecordBatch)):
        return "arrow"
    try:
        _structure(value, _TreeWalk(None))
    except (CannotEncode, RecursionError):
        return "pickle"
    return "numpy" if np is not None and kind is np.ndarray else "pytree"
