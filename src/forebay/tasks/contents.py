"""What of each kind of value counts: functions, dataclasses, enumerations, arrays. Others go as pickle takes them apart."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import pathlib
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from forebay.tasks.code import is_installed, shape_of, written
from forebay.tasks.naming import place_of
from forebay.tasks.writing import DigestWriter, Unstable, kind_text, sized, text

Part = Callable[[DigestWriter, Any], bytes]


def _function(writer: DigestWriter, value: Any) -> bytes:
    """By name, and by its code unless it is of an installed package; with what it closes over where it has no name of its own."""
    name = place_of(value)
    if "<" in value.__qualname__:
        return (
            b"L" + text(name) + written(value).code + writer.write((value.__defaults__, value.__kwdefaults__)) + closure_of(writer, value)
        )
    return b"A" + text(name) + (b"" if is_installed(value.__code__.co_filename) else written(value).code)


def closure_of(writer: DigestWriter, value: Any) -> bytes:
    """What a function closes over."""
    return writer.several(b"z", (content for _, content in cells_of(value)))


def cells_of(function: Any) -> Iterator[tuple[str, Any]]:
    """The variables that a function closes over, as far as they have a value yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents


def _path(writer: DigestWriter, value: Any) -> bytes:
    """As text: versions of Python take it apart in several ways."""
    return b"p" + kind_text(type(value)) + text(str(value))


def _dataclass(writer: DigestWriter, value: Any) -> bytes:
    """Its fields; what else lies in it (properties that it remembers) does not count."""
    kind: Any = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    return b"D" + kind_text(kind) + writer.several(b"d", (*names, *(getattr(value, name, None) for name in names)))


def _enum(writer: DigestWriter, value: enum.Enum) -> bytes:
    return b"M" + kind_text(type(value)) + writer.write(value.name if value.name is not None else value.value)


def _memory(writer: DigestWriter, value: memoryview) -> bytes:
    return b"m" + writer.write((value.format, value.shape)) + sized(b"b", value.tobytes())


# -- arrays, whose packages are not imported here ----------------------------------------------------------------------


def _ndarray(writer: DigestWriter, value: Any) -> bytes:
    """Dtype, shape and content in the order of the indices, however it lies in memory."""
    dtype = value.dtype
    head = b"a" + _dtype(dtype) + writer.write(value.shape)
    if dtype.hasobject:
        return head + writer.several(b"l", value.ravel().tolist())
    if not value.nbytes:
        return head
    return head + sized(b"b", memoryview(value.ravel().view("u1")))


@functools.lru_cache(1024)
def _dtype(dtype: Any) -> bytes:
    return text(str(dtype) if dtype.names is None else repr(dtype))


def _numpy_scalar(writer: DigestWriter, value: Any) -> bytes:
    return b"n" + _dtype(value.dtype) + sized(b"b", value.tobytes())


def _tensor(writer: DigestWriter, value: Any) -> bytes:
    torch = sys.modules["torch"]
    if str(value.layout) != "torch.strided" or value.is_quantized:
        return writer.reduced(value)
    if value.device.type == "meta":
        raise Unstable("a torch.Tensor without content (device meta)")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    told = (place_of(type(value)), str(value.dtype), tuple(value.shape), value.device.type, value.requires_grad)
    return b"t" + writer.write(told) + sized(b"b", content)


_PARTS: dict[type, Part] = {
    tuple: lambda writer, value: writer.several(b"(", value),
    list: lambda writer, value: writer.several(b"[", value),
    dict: lambda writer, value: writer.pairs(b"{", value.items()),
    set: lambda writer, value: writer.unordered(b"S", map(writer.write, value)),
    frozenset: lambda writer, value: writer.unordered(b"Z", map(writer.write, value)),
    types.FunctionType: _function,
    types.CodeType: lambda writer, value: b"C" + sized(b"b", shape_of(value)),
    pathlib.PosixPath: _path,
    pathlib.PurePosixPath: _path,
    types.ModuleType: lambda writer, value: b"G" + text(value.__name__),
    type: lambda writer, value: b"K" + text(place_of(value)),
    memoryview: _memory,
}


def _told_by_itself(writer: DigestWriter, value: Any) -> bytes:
    return b"r" + kind_text(type(value)) + writer.write(value.__forebay_content__())


def _replaced(base: type, content: Callable[[Any], Any], writer: DigestWriter, value: Any) -> bytes:
    return b"r" + kind_text(base) + writer.write(content(value))


_REGISTERED: dict[type, Callable[[Any], Any]] = {}


def writer_of(kind: Any) -> Part:
    """How values of this class are written."""
    found = _PARTS.get(kind)
    if found is None and (found := _others.get(kind)) is None:
        found = _others[kind] = _writer_of_other(kind)
    return found


_others: weakref.WeakKeyDictionary[Any, Part] = weakref.WeakKeyDictionary()


def _writer_of_other(kind: Any) -> Part:
    if hasattr(kind, "__forebay_content__"):
        return _told_by_itself
    for base in kind.__mro__:
        content = _REGISTERED.get(base)
        if content is not None:
            return functools.partial(_replaced, base, content)
    if issubclass(kind, type):
        return _PARTS[type]
    if issubclass(kind, enum.Enum):
        return _enum
    if dataclasses.is_dataclass(kind) and _is_plain(kind):
        return _dataclass
    return _array_writer(kind)


def _is_plain(kind: Any) -> bool:
    """Whether a class leaves it to pickle how it is taken apart. Frozen dataclasses with slots are given ``__getstate__``."""
    state = getattr(kind, "__getstate__", None)
    if state is not getattr(object, "__getstate__", None) and getattr(state, "__module__", "") != "dataclasses":
        return False
    return all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))


def _array_writer(kind: Any) -> Part:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        return _ndarray
    if numpy is not None and issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.object_, numpy.void)):
        return _numpy_scalar
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor
    return DigestWriter.reduced


def register(kind: type, content: Callable[[Any], Any]) -> None:
    """Values of this class count as what ``content`` gives for them; it may raise `Unstable`. For adapters, once at import."""
    _REGISTERED[kind] = content
    _others.clear()
