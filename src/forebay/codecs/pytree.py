"""What a dataset's ``__getitem__`` gives: arrays, tensors and plain values in tuples, lists and dicts. Nothing in it can run."""

from __future__ import annotations

import functools
import json
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from forebay import errors
from forebay._model import Buffer, is_text
from forebay.codecs import arrays
from forebay.codecs.arrays import Odd
from forebay.codecs.base import ALIGNMENT, Named, damaged

_FRONT = struct.Struct("<4sI")  # mark, length of the structure
_MARK = b"fby1"
_SAME_IN_JSON = frozenset({type(None), bool, float})
_KEYS = frozenset({*_SAME_IN_JSON, int, str, bytes, complex, tuple})
_SMALL = 1 << 62
MOST_AGAIN = 1 << 21
"""Parts of lists, tuples and dicts that lie in a value more than once, and are written out each time."""


class Pytree(Named):
    """The front; the structure, as JSON in which what JSON does not have is a list with a mark; the memory of bytes, arrays and tensors
    in their order, each at a multiple of 64."""

    name = "pytree"

    def encode(self, value: Any) -> Sequence[Buffer]:
        memory: list[Buffer] = []
        try:
            text = json.dumps(_structure(value, _TreeWalk(memory)), separators=(",", ":")).encode()
        except Odd as odd:
            where = f"value{''.join(reversed(odd.path))}" if odd.path else "the value"
            raise _use_pickle(f"{where} is {odd}") from odd
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
        except (OSError, ImportError):  # of who gives the memory, and of packages
            raise
        except Exception as error:
            raise damaged(f"{type(error).__name__}: {error}") from error
        return value


def _use_pickle(what: str) -> errors.ConfigError:
    return errors.ConfigError(
        f"codec='pytree' stores arrays, tensors and plain values in tuples, lists and dicts, and {what}: use codec='pickle', where you "
        "trust everybody who can write to the cache (what is unpickled runs code)",
        name="codec", value="pytree",
    )  # fmt: skip


# -- there -------------------------------------------------------------------------------------------------------------


class _TreeWalk:
    """Through one value. ``memory``: where that of its parts goes; None: it is only told what the parts are, and none is copied."""

    def __init__(self, memory: list[Buffer] | None) -> None:
        self.memory = memory
        self._seen: set[int] = set()  # ids of what lies in the value, and so lives as long
        self._again = 0

    def enter(self, part: Any) -> None:
        """A list, tuple or dict. Raises `Odd` where so many lie in it again that a small value would be written without end."""
        if id(part) not in self._seen:
            self._seen.add(id(part))
            return
        self._again += len(part)
        if self._again > MOST_AGAIN:
            raise Odd(f"once more a {type(part).__name__} that lies in it many times, and is written out each time")

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
        odd = next((key for key in value if type(key) not in _KEYS and not _is_scalar(key)), None)
        if odd is not None:
            raise Odd(f"a dict with the {type(odd).__name__} {odd!r:.80} as a key")
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
        except Odd as odd:
            odd.path.append(where)
            raise


def _array(value: Any, walk: _TreeWalk) -> Any:
    """Whoever has an array has imported its package: nothing is imported here."""
    np, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    kind = type(value)
    if np is not None and kind in (np.ndarray, np.memmap):
        if walk.memory is None:
            return ["a", arrays.head_of(value).decode()]
        head, content = arrays.taken_apart(value)
        walk.keep(content)
        return ["a", head.decode()]
    if _is_scalar(value):
        return ["n", value.dtype.str, value.tobytes().hex()]
    if torch is not None and kind in (torch.Tensor, torch.nn.Parameter):
        apart = arrays.tensor_apart(value) if walk.memory is not None else None
        if apart is None:
            if walk.memory is None and arrays.is_plain(value):
                return ["t"]
            raise Odd(f"a tensor on {value.device} of layout {value.layout}")
        walk.keep(apart[1])
        return ["t", len(apart[1]), *apart[0]]
    raise Odd(f"a {kind.__module__}.{kind.__qualname__}".replace("builtins.", ""))


def _is_scalar(value: Any) -> bool:
    np = sys.modules.get("numpy")
    return np is not None and isinstance(value, np.generic) and type(value) is value.dtype.type and _is_told_by_its_text(value.dtype)


@functools.lru_cache(1024)
def _is_told_by_its_text(dtype: Any) -> bool:
    """The dtypes of other packages tell themselves as plain bytes."""
    return not (dtype.hasobject or dtype.kind == "V" or arrays.numpy().dtype(dtype.str) != dtype)


# -- and back ----------------------------------------------------------------------------------------------------------


class _TreeReader:
    """``end``: where what was read ends."""

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
            ndarray, shape, dtype, order, size = arrays.parsed(part[1].encode())
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
        raise ValueError(f"{mark!r:.80} stands for nothing")

    def _next(self, size: int) -> int:
        """Where the memory begins of which so much is next."""
        start = (self.end + ALIGNMENT - 1) & -ALIGNMENT if size else self.end
        if type(size) is not int or size < 0 or start + size > len(self._data):
            raise ValueError(f"{size!r:.80} bytes at {start:,} of {len(self._data):,}")
        self.end = start + size
        return start

    def _tensor(self, size: int, dtype: str, shape: list[int], strides: list[int], requires_grad: bool, parameter: bool) -> Any:
        """Over memory of its own: a tensor cannot be read-only."""
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


# -- for whom ----------------------------------------------------------------------------------------------------------


def fitting(value: Any) -> str:
    """The name of the codec that takes a value and needs no pickle, if there is one."""
    kind, np, arrow = type(value), sys.modules.get("numpy"), sys.modules.get("pyarrow")
    if kind in (bytes, bytearray, memoryview):
        return "raw"
    if arrow is not None and isinstance(value, (arrow.Table, arrow.RecordBatch)):
        return "arrow"
    try:
        _structure(value, _TreeWalk(None))
    except (Odd, RecursionError):
        return "pickle"
    return "numpy" if np is not None and kind is np.ndarray else "pytree"
