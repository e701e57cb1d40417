"""A digest of values by what they are: the same in each process, whatever PYTHONHASHSEED, the directory and the user.

Each value is written down as bytes that only equal values of its type share; what is long is replaced by its own digest. Equal copies
count as the same object. What has no content that stays (locks, files, generators, connections) is `Unstable`.
"""

from __future__ import annotations

import contextlib
import copyreg
import dataclasses
import enum
import functools
import struct
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import xxhash

from forebay._tasks.naming import Tag, module_of, place_of

LONG = 256  # bytes; longer writings are replaced by their digest
MANY_CYCLES = 10_000
DEEPEST = 200

Write = Callable[[Any], bytes]


class Unstable(Exception):
    """A value that has no content to go by. ``what``: in words; ``index``: which of the values given to `digest_of`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.index = what, 0


def digest_of(*values: Any) -> str:
    """32 hex digits that equal values share. Raises `Unstable`."""
    return xxhash.xxh3_128_hexdigest(b"".join(written(values)))


def written(values: Iterable[Any]) -> list[bytes]:
    """Each value as the bytes that stand for it. Raises `Unstable`."""
    found = []
    for index, value in enumerate(values):
        quick = QUICK.get(type(value))
        try:
            found.append(quick(value) if quick is not None else _Writer().write(value))
        except Unstable as error:
            error.index = index
            raise
    return found


def kind_of(value: Any) -> bytes:
    """What stands for a value of which only the type counts."""
    return b"?" + _text(place_of(type(value)))


def register(kind: type, content: Callable[[Any], Any]) -> None:
    """Values of this class count as what ``content`` gives for them; it may raise `Unstable`. For adapters, once at import."""
    _REGISTERED[kind] = content


_REGISTERED: dict[type, Callable[[Any], Any]] = {}


# -- what has no parts -------------------------------------------------------------------------------------------------


def _sized(mark: bytes, data: Any) -> bytes:
    """Bytes with their length in front, or their digest."""
    length = len(data)
    if length > LONG:
        return b"%b#%x:%b" % (mark, length, xxhash.xxh3_128_digest(data))
    return b"%b%x:%b" % (mark, length, data)


def _text(value: str) -> bytes:
    return _sized(b"s", value.encode("utf-8", "surrogatepass"))


def _int(value: int) -> bytes:
    return _sized(b"i", b"%x" % value)


_pack_double = struct.Struct("<d").pack
_pack_doubles = struct.Struct("<dd").pack

QUICK: dict[type, Write] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _int,
    float: lambda value: b"f" + _pack_double(value),
    complex: lambda value: b"c" + _pack_doubles(value.real, value.imag),
    str: _text,
    Tag: lambda value: _text(str(value)),
    bytes: lambda value: _sized(b"b", value),
    bytearray: lambda value: _sized(b"B", value),
    type(Ellipsis): lambda value: b"E",
    type(NotImplemented): lambda value: b"e",
}


# -- what has parts ----------------------------------------------------------------------------------------------------


class _Writer:
    """Writes one value down. ``above``: the objects that it is inside of, by id, with their depth."""

    def __init__(self) -> None:
        self._above: dict[int, tuple[int, Any]] = {}
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the object, so that its id stays its own
        self._highest = sys.maxsize  # the smallest depth that what was written last points back to
        self._cyclic = 0

    def write(self, value: Any) -> bytes:
        quick = QUICK.get(type(value))
        if quick is not None:
            return quick(value)
        key = id(value)
        known = self._known.get(key)
        if known is not None:
            return known[1]
        depth = len(self._above)
        if key in self._above:
            # Told by how far up it is, so that copies of a circle are equal.
            self._highest = min(self._highest, self._above[key][0])
            return b"^%x;" % (depth - self._above[key][0])
        if depth >= DEEPEST:
            raise self._unstable(f"something nested more than {DEEPEST} deep")
        return self._enter(key, depth, value)

    def _enter(self, key: int, depth: int, value: Any) -> bytes:
        outer, self._highest = self._highest, sys.maxsize
        self._above[key] = depth, value
        try:
            data = self._whole(value)
        finally:
            del self._above[key]
        data = data if len(data) <= LONG else b"#" + xxhash.xxh3_128_digest(data)
        if self._highest >= depth:  # it stands for itself wherever it is met
            self._known[key] = value, data
        else:
            self._cyclic += 1
            if self._cyclic > MANY_CYCLES:
                raise self._unstable("objects that point at each other in too many ways")
        self._highest = min(outer, self._highest)
        return data

    def _whole(self, value: Any) -> bytes:
        kind = type(value)
        writer = _PARTS.get(kind) or _found_writer(kind)
        return writer(self, value) if writer is not None else self.reduced(value)

    def several(self, mark: bytes, values: Iterable[Any]) -> bytes:
        """Parts in their order."""
        out, count, quick_of, write = bytearray(), 0, QUICK.get, self.write
        for value in values:
            quick = quick_of(type(value))
            out += quick(value) if quick is not None else write(value)
            count += 1
        return b"%b%x:%b" % (mark, count, bytes(out))

    def unordered(self, mark: bytes, parts: Iterable[bytes]) -> bytes:
        """Parts whose order does not count."""
        found = sorted(parts)
        return b"%b%x:%b" % (mark, len(found), b"".join(found))

    def pairs(self, mark: bytes, items: Iterable[tuple[Any, Any]]) -> bytes:
        """Keys and values, in whatever order."""
        return self.unordered(mark, (self.write(key) + self.write(item) for key, item in items))

    def reduced(self, value: Any) -> bytes:
        """Any object, by what pickle would take it apart into."""
        parts = self._taken_apart(value)
        if isinstance(parts, str):
            return b"g" + _text(f"{module_of(value) if hasattr(value, '__module__') else place_of(type(value))}.{parts}")
        make, given, state, items, pairs = (*parts, None, None, None)[:5]
        out = b"o" + self.write(make) + self.write(tuple(given)) + self.write(state)
        if items is not None:
            out += self.several(b"l", items)
        if pairs is not None:
            ordered = isinstance(value, OrderedDict)
            out += self.several(b"p", pairs) if ordered else self.pairs(b"d", pairs)
        return out

    def _taken_apart(self, value: Any) -> Any:
        reduce = copyreg.dispatch_table.get(type(value))
        try:
            return reduce(value) if reduce is not None else value.__reduce_ex__(4)
        except Unstable:
            raise
        except Exception as error:
            raise self._unstable(f"a {place_of(type(value))}") from error

    def _unstable(self, what: str) -> Unstable:
        inside = [type(v) for _, v in self._above.values() if type(v) not in _PARTS]
        outer = f" in a {place_of(inside[0])}" if inside and f"a {place_of(inside[0])}" != what else ""
        return Unstable(what + outer)


def _function(writer: _Writer, value: Any) -> bytes:
    """By name; by its code and what it closes over where the name could be another's, too."""
    name = place_of(value)
    if "<" not in value.__qualname__:
        return b"A" + _text(name)
    return b"L" + _text(name) + own_code(writer, value)


def own_code(writer: _Writer, value: Any) -> bytes:
    """What a function does, as far as its code, defaults and closure tell."""
    return writer.write(value.__code__) + writer.write((value.__defaults__, value.__kwdefaults__)) + closure_of(writer, value)


def closure_of(writer: _Writer, value: Any) -> bytes:
    """What a function closes over."""
    found = []
    for cell in value.__closure__ or ():
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            found.append(cell.cell_contents)
    return writer.several(b"z", found)


def _code(writer: _Writer, value: types.CodeType) -> bytes:
    names = (value.co_names, value.co_varnames, value.co_freevars, value.co_argcount, value.co_kwonlyargcount, value.co_flags)
    return b"C" + _sized(b"b", value.co_code) + writer.write(value.co_consts) + writer.write(names)


def _dataclass(writer: _Writer, value: Any) -> bytes:
    """Its fields; what else lies in it (properties that it remembers) does not count."""
    fields = ((field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return b"D" + _text(place_of(type(value))) + writer.several(b"d", fields)


def _enum(writer: _Writer, value: enum.Enum) -> bytes:
    return b"M" + _text(place_of(type(value))) + writer.write(value.name if value.name is not None else value.value)


def _memory(writer: _Writer, value: memoryview) -> bytes:
    return b"m" + writer.write((value.format, value.shape)) + _sized(b"b", value.tobytes())


# -- arrays, whose packages are not imported here ----------------------------------------------------------------------


def _ndarray(writer: _Writer, value: Any) -> bytes:
    """Dtype, shape and content in the order of the indices, however it lies in memory."""
    head = b"a" + writer.write((str(value.dtype) if value.dtype.names is None else repr(value.dtype), value.shape))
    if value.dtype.hasobject:
        return head + writer.several(b"l", value.ravel().tolist())
    if not value.nbytes:
        return head
    return head + _sized(b"b", memoryview(value.ravel().view("u1")))


def _numpy_scalar(writer: _Writer, value: Any) -> bytes:
    return b"n" + writer.write(str(value.dtype)) + _sized(b"b", value.tobytes())


def _tensor(writer: _Writer, value: Any) -> bytes:
    torch = sys.modules["torch"]
    if str(value.layout) != "torch.strided" or value.is_quantized:
        return writer.reduced(value)
    if value.device.type == "meta":
        raise Unstable("a torch.Tensor without content (device meta)")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    content = memoryview(plain.view(torch.uint8).numpy()) if plain.numel() else b""
    told = (place_of(type(value)), str(value.dtype), tuple(value.shape), value.device.type, value.requires_grad)
    return b"t" + writer.write(told) + _sized(b"b", content)


_PARTS: dict[type, Callable[[_Writer, Any], bytes]] = {
    tuple: lambda writer, value: writer.several(b"(", value),
    list: lambda writer, value: writer.several(b"[", value),
    dict: lambda writer, value: writer.pairs(b"{", value.items()),
    set: lambda writer, value: writer.unordered(b"S", map(writer.write, value)),
    frozenset: lambda writer, value: writer.unordered(b"Z", map(writer.write, value)),
    types.FunctionType: _function,
    types.CodeType: _code,
    types.ModuleType: lambda writer, value: b"G" + _text(value.__name__),
    type: lambda writer, value: b"K" + _text(place_of(value)),
    memoryview: _memory,
}


def _found_writer(kind: type) -> Callable[[_Writer, Any], bytes] | None:
    """How values of a class that is not one of the plain ones are written; None: as pickle takes them apart."""
    for base in kind.__mro__:
        content = _REGISTERED.get(base)
        if content is not None:
            return lambda writer, value: b"r" + _text(place_of(base)) + writer.write(content(value))
    if issubclass(kind, type):
        return _PARTS[type]
    if issubclass(kind, enum.Enum):
        return _enum
    if dataclasses.is_dataclass(kind) and _is_plain(kind):
        return _dataclass
    return _array_writer(kind)


def _is_plain(kind: type) -> bool:
    """Whether a class leaves it to pickle how it is taken apart. Frozen dataclasses with slots are given ``__getstate__``."""
    state = getattr(kind, "__getstate__", None)
    if state is not getattr(object, "__getstate__", None) and getattr(state, "__module__", "") != "dataclasses":
        return False
    return all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))


def _array_writer(kind: type) -> Callable[[_Writer, Any], bytes] | None:
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        return _ndarray
    if numpy is not None and issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.object_, numpy.void)):
        return _numpy_scalar
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor
    return None


# -- functions whose calls are kept ------------------------------------------------------------------------------------


def as_own(function: Any) -> bytes:
    """What of a function its name does not tell: what it closes over, the code of a lambda, what a partial or an object that can be
    called brings. Not the code of a function with a name: that is what versions are for. Raises `Unstable`."""
    writer, out = _Writer(), b""
    while isinstance(function, functools.partial):
        out += writer.write((function.args, function.keywords))
        function = function.func
    if isinstance(function, types.FunctionType):
        return out + (own_code(writer, function) if function.__name__ == "<lambda>" else closure_of(writer, function))
    return out if isinstance(getattr(function, "__qualname__", None), str) else out + writer.write(function)
