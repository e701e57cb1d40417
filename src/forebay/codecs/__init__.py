"""Codecs: a value as the bytes of one payload, and back.

A payload begins at a multiple of 64 in its mapping, and arrays at multiples of 64 in the payload: `decode` returns views, not copies.
Codecs have no state of their own: callable from any thread, usable after a fork; a custom one can be pickled if its object can.
NumPy, PyTorch, PyArrow and cloudpickle are optional, and imported only where a value needs them.
"""

from __future__ import annotations

import functools
import io
import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, cast

from forebay import errors
from forebay._kernel.interrupts import unless_of_handler
from forebay._model import Buffer, as_bytes, exact_str
from forebay.codecs import arrays, by_value
from forebay.codecs.arrays import MAPPED_FROM as MAPPED_FROM
from forebay.codecs.base import ALIGNMENT as ALIGNMENT
from forebay.codecs.base import Codec as Codec
from forebay.codecs.base import Named
from forebay.codecs.base import damaged as _damaged
from forebay.codecs.plain import Arrow, Json, Pytree, fitting, needs_pyarrow


def codec(which: str | object) -> Codec:
    """The codec named ``raw``, ``numpy``, ``pytree``, ``arrow``, ``json`` or ``pickle``, or one over any object with ``encode(value)`` ->
    bytes-like and ``decode(memoryview)`` -> value. The name of the latter is its ``name`` if that is a str, else its class.
    Raises `ConfigError` for anything else, `MissingExtra` for ``numpy`` without NumPy and ``arrow`` without PyArrow."""
    if isinstance(which, (Named, _Custom)):
        return cast(Codec, which)
    name = exact_str(which)
    if name == "numpy":
        arrays.numpy()
    if name == "arrow":
        needs_pyarrow()
    if name in _NAMED:
        return _NAMED[name]
    methods = (getattr(which, "encode", None), getattr(which, "decode", None))
    if isinstance(which, (str, type, ModuleType)) or not all(map(callable, methods)):
        what = f"the {type(which).__name__} {which!r}"
        raise errors.ConfigError(
            f"{what} is no codec: give {', '.join(map(repr, _NAMED))}, or an object with the methods encode and decode",
            name="codec",
            value=what,
        )
    return _Custom(which)


def default_codec(*, others_can_write: bool) -> Codec:
    """``pickle``, which stores any value; ``pytree`` in a root that other users can write to: their pickles would run as this user."""
    return _NAMED["pytree" if others_can_write else "pickle"]


class _Raw(Named):
    name = "raw"

    def encode(self, value: Any) -> Sequence[Buffer]:
        try:
            return (value if type(value) is bytes else as_bytes(value),)
        except errors.ConfigError as error:
            raise _refused(f"codec='raw' stores bytes, and this {type(value).__name__} is not bytes-like", value) from error

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> memoryview:
        return data


class _Custom:
    def __init__(self, inner: Any) -> None:
        self._inner, kind = inner, type(inner)
        name = exact_str(getattr(inner, "name", None))
        self.name = name if name is not None else f"{kind.__module__}.{kind.__qualname__}"
        if self.name in _NAMED or not self.name:
            raise errors.ConfigError(f"a codec of your own cannot have the name {self.name!r}", name="codec", value=self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return codec, (self._inner,)

    def __repr__(self) -> str:
        return f"<forebay codec {self.name}>"

    def encode(self, value: Any) -> Sequence[Buffer]:
        return (as_bytes(self._inner.encode(value)),)

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        return self._inner.decode(data)


# -- arrays ------------------------------------------------------------------------------------------------------------


_BLOCK = struct.Struct("64s")


class _Numpy(Named):
    """One byte: the head's length in blocks; the head, padded with spaces; the array's memory."""

    name = "numpy"

    def encode(self, value: Any) -> Sequence[Buffer]:
        np = arrays.numpy()
        if type(value) not in (np.ndarray, np.memmap):
            kind = f"a {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
            raise _refused(f"codec='numpy' stores one numpy.ndarray, and the value is {kind}", value)
        try:
            head, memory = arrays.split_array(value)
        except arrays.CannotEncode as error:
            raise _refused(f"codec='numpy' cannot store {error}", value) from error
        blocks = -(-(1 + len(head)) // _BLOCK.size)
        if blocks > 255:
            what = f"an array whose dtype and shape take {len(head):,} bytes to describe"
            raise errors.ConfigError(f"codec='numpy' cannot store {what}: use codec='pickle'", name="codec", value="numpy")
        return bytes((blocks,)) + head.ljust(blocks * _BLOCK.size - 1), memory

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        try:
            (block,) = _BLOCK.unpack_from(data)
        except struct.error as error:
            raise _damaged("it has no head") from error
        length = len(block) * block[0]
        ndarray, shape, dtype, order, size = arrays.parse_head(block[1:] if block[0] == 1 else bytes(data[1:length]))
        if len(data) != length + size:
            raise _damaged(f"an array of {size:,} bytes has {len(data) - length:,}")
        return ndarray(shape, dtype, data, length, None, order)


def _refused(reason: str, value: Any) -> errors.ConfigError:
    return errors.ConfigError(f"{reason}: use codec={fitting(value)!r}", name="codec", value=type(value).__name__)


# -- objects -----------------------------------------------------------------------------------------------------------


_WITHOUT_BUFFERS = frozenset({type(None), bool, int, float, str, bytes})
_FRONT = struct.Struct("<4sIQ")  # mark, number of buffers, length of the pickle
_MARK = b"fbp1"


def framed(stream: Buffer) -> bytes:
    """The payload that the codec ``pickle`` writes for an object whose pickle, without buffers, is ``stream``. Unpickles nothing."""
    return _FRONT.pack(_MARK, 0, len(stream)) + stream


class _Pickle(Named):
    """The front; for each buffer 8 bytes with twice its length, plus one if its readers may write into it; the pickle; the buffers, each
    at a multiple of 64."""

    name = "pickle"

    def encode(self, value: Any) -> Sequence[Buffer]:
        if type(value) in _WITHOUT_BUFFERS:
            plain = pickle.dumps(value, 5)
            return _FRONT.pack(_MARK, 0, len(plain)), plain
        stream, pickler = _pickled(value)
        buffers = pickler.buffers()
        table = struct.pack(f"<{len(buffers)}Q", *(2 * memory.nbytes + private for memory, private in buffers))
        plain = stream.getvalue()
        pieces: list[Buffer] = [_FRONT.pack(_MARK, len(buffers), len(plain)) + table, plain]
        end = len(pieces[0]) + len(plain)
        for memory, _ in buffers:
            if gap := -end % ALIGNMENT:
                pieces.append(bytes(gap))
            pieces.append(memory)
            end += gap + memory.nbytes
        return pieces

    def decode(self, data: memoryview, private: Callable[[], memoryview]) -> Any:
        try:
            mark, count, length = _FRONT.unpack_from(data)
            table = struct.unpack_from(f"<{count}Q", data, _FRONT.size) if count else ()
        except struct.error as error:
            raise _damaged("its front is cut short") from error
        begin = _FRONT.size + 8 * count
        end = begin + length
        stream, buffers, own = data[begin:end], [], None
        for entry in table:
            start = (end + ALIGNMENT - 1) & -ALIGNMENT
            end = start + (entry >> 1)
            part: Buffer = data[start:end]
            if entry & 1 and end - start < MAPPED_FROM:
                part = bytearray(part)
            elif entry & 1:
                own = private() if own is None else own
                part = own[start:end]
            buffers.append(part)
        if mark != _MARK or end != len(data):
            raise _damaged(f"an object of {end:,} bytes has {len(data):,}")
        if count == 1 and length <= _LONGEST_HEAD and (array := _array_in(bytes(stream))) is not None:
            ndarray, shape, dtype, order, _ = array
            return ndarray(shape, dtype, buffers[0], 0, None, order)
        try:
            return pickle.loads(stream, buffers=buffers)
        except unless_of_handler(pickle.UnpicklingError, EOFError) as error:
            raise _damaged(str(error)) from error


class _Pickler(pickle.Pickler):
    """Puts the memory of arrays and tensors out of band.

    The pickle gets an empty buffer instead of each: it would record that a buffer is read-only, and no copy of it would be writable."""

    def __init__(self, stream: io.BytesIO) -> None:
        self._buffers: list[pickle.PickleBuffer] = []
        self._memory: dict[int, tuple[memoryview, bool]] = {}  # by the id of the empty buffer, which _buffers keeps alive
        self._reducers = _reducers()
        super().__init__(stream, 5, buffer_callback=self._buffers.append)

    def buffers(self) -> list[tuple[memoryview, bool]]:
        """The memory that is out of band, in order; with each, whether its readers may write into it."""
        return [self._memory.get(id(b)) or (b.raw(), False) for b in self._buffers]

    def out_of_band(self, memory: memoryview, *, private: bool) -> pickle.PickleBuffer:
        buffer = pickle.PickleBuffer(bytearray())
        self._memory[id(buffer)] = memory, private
        return buffer

    def reducer_override(self, value: Any) -> Any:
        reduce = self._reducers.get(type(value))
        if reduce is not None:
            return reduce(self, value)
        return by_value.reduce(value) if by_value.of_the_program(value) else NotImplemented


def _pickled(value: Any) -> tuple[io.BytesIO, _Pickler]:
    """The pickle of a value, and the pickler that holds its buffers; by cloudpickle where pickle fails. Raises what pickle raises."""
    stream = io.BytesIO()
    pickler = _Pickler(stream)
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        if by_value.cloudpickle() is None:
            raise
        stream = io.BytesIO()
        pickler = _cloud_pickler()(stream)
        pickler.dump(value)
    return stream, pickler


@functools.cache
def _cloud_pickler() -> type[_Pickler]:
    class CloudPickler(_Pickler, by_value.cloudpickle().Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if isinstance(value, io.TextIOBase):  # cloudpickle would turn it into a text in memory
                raise TypeError(f"cannot pickle {type(value).__name__!r} object")
            reduced = _Pickler.reducer_override(self, value)
            return super(_Pickler, self).reducer_override(value) if reduced is NotImplemented else reduced

    return CloudPickler


_Reduce = Callable[[_Pickler, Any], Any]


def _reducers() -> dict[type, _Reduce]:
    """The reducers by type. A value of a package implies that it is imported, perhaps only in part: nothing is imported here."""
    numpy, torch, ray = sys.modules.get("numpy"), sys.modules.get("torch"), sys.modules.get("ray")
    parameter = getattr(getattr(torch, "nn", None), "Parameter", None)
    tensors = getattr(torch, "Tensor", None), parameter
    ray_types = getattr(ray, "ObjectRef", None), getattr(getattr(ray, "actor", None), "ActorHandle", None)
    return _reducers_of(getattr(numpy, "ndarray", None), tensors, ray_types)


@functools.lru_cache(8)
def _reducers_of(array: type | None, tensors: tuple[type | None, ...], ray_types: tuple[type | None, ...]) -> dict[type, _Reduce]:
    reducers = {array: _reduce_array, **dict.fromkeys(tensors, _reduce_tensor)} if array else {}
    return {kind: reducer for kind, reducer in (reducers | dict.fromkeys(ray_types, _refuse)).items() if kind}


def _refuse(pickler: _Pickler, value: Any) -> Any:
    raise pickle.PicklingError(f"{type(value).__name__} of Ray leads to what ends with the program, or before it")


def _reduce_array(pickler: _Pickler, array: Any) -> Any:
    if array.dtype.metadata:
        return NotImplemented
    try:
        head, memory = arrays.split_array(array)
    except arrays.CannotEncode:
        return NotImplemented  # a dtype that NumPy pickles better
    return _array, (head, pickler.out_of_band(memory, private=False))


def _array(head: bytes, memory: Any) -> Any:
    """Named in stored pickles: neither the name nor the arguments may change."""
    ndarray, shape, dtype, order, _ = arrays.parse_head(head)
    return ndarray(shape, dtype, memory, 0, None, order)


class _OfArray:
    """What pickles as an array with this head does."""

    def __init__(self, head: bytes) -> None:
        self._head = head

    def __reduce__(self) -> tuple[Any, ...]:
        return _array, (self._head, pickle.PickleBuffer(bytearray()))


def _stream_of(head: bytes) -> bytes:
    """The pickle, without buffers, of an array."""
    return pickle.dumps(_OfArray(head), 5, buffer_callback=lambda _: False)


_LONGEST_HEAD = 256


@functools.lru_cache(256)
def _array_in(stream: bytes) -> tuple[Any, tuple[int, ...], Any, str, int] | None:
    """The `arrays.parse_head` of a pickle that is one array; None if it is anything else. Cached: to unpickle takes ten times the rest."""
    at = _stream_of(b"").index(b"C\0") + 2
    head = stream[at : at + stream[at - 1]] if len(stream) > at else b""
    return arrays.parse_head(head) if stream == _stream_of(head) else None


def _reduce_tensor(pickler: _Pickler, tensor: Any) -> Any:
    split = arrays.split_tensor(tensor)
    return NotImplemented if split is None else (_tensor, (pickler.out_of_band(split[1], private=True), *split[0]))


def _tensor(memory: Any, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], requires_grad: bool, parameter: bool) -> Any:
    """Named in stored pickles: neither the name nor the arguments may change."""
    return arrays.tensor_of(memory, dtype, shape, strides, requires_grad, parameter)


_NAMED: dict[str, Codec] = {c.name: c for c in (_Raw(), _Numpy(), Pytree(), Arrow(), Json(), _Pickle())}
