"""A digest of values by their content: the same in each process, whatever PYTHONHASHSEED, the directory and the user.

Each value is encoded as bytes that only equal values of its type share; long encodings are replaced by their own digest. Equal copies are
encoded as the same object is. An object that contains itself is encoded by how far up that is. A value without lasting content (a lock, a
file, a generator, a connection) is `Unstable`.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import functools
import itertools
import os
import pathlib
import struct
import sys
import types
import weakref
from _blake2 import blake2b  # of hashlib, which would load OpenSSL into every process
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from forebay._kernel import interrupts
from forebay._kernel.threads import run_all
from forebay._model import Buffer
from forebay.tasks.code import cells_of, definition_of, functions_of, is_installed, module_of, place_of, shape_of, steps_of

LONG = 256  # bytes; longer writings are replaced by their digest
MANY_CYCLES = 10_000
MANY = 32  # numbers of one type are written together from here on
LEAF = 2 << 20  # bytes that one thread digests at a time: of more, the digest is that of the digests of the leaves
_JOBS = 8

Write = Callable[[Any], bytes]


class Unstable(Exception):
    """A value without lasting content. ``what``: in words; ``index``: which of the values given to `digest_of`."""

    def __init__(self, what: str, index: int = 0) -> None:
        super().__init__(what)
        self.what, self.index = what, index


def digest(data: Buffer) -> bytes:
    """16 bytes that only equal contents share: BLAKE2b (RFC 7693), since a quick hash lets whoever makes the contents find two that share
    them, and a call would get the output of another one. Large contents take several threads."""
    return blake2b(data, digest_size=16).digest() if len(data) <= 2 * LEAF else _digest_by_leaves(data)


@interrupts.guarded
def _digest_by_leaves(data: Buffer) -> bytes:
    view = memoryview(data)
    digests = [b""] * -(-len(view) // LEAF)

    def one(number: int) -> None:
        digests[number] = blake2b(view[number * LEAF : (number + 1) * LEAF], digest_size=16).digest()

    jobs = min(_JOBS, len(os.sched_getaffinity(0)))
    run_all([functools.partial(one, number) for number in range(len(digests))], jobs, name="digest", inline=True)
    return blake2b(b"".join(digests), digest_size=16, person=b"leaves").digest()


# -- what has no parts -------------------------------------------------------------------------------------------------


def sized(mark: bytes, data: Any) -> bytes:
    """Bytes with their length in front, or their digest."""
    length = len(data)
    if length > LONG:
        return b"%b#%x:%b" % (mark, length, digest(data))
    return b"%b%x:%b" % (mark, length, data)


def text(value: str) -> bytes:
    return sized(b"s", value.encode("utf-8", "surrogatepass"))


_pack_double = struct.Struct("<d").pack
_pack_doubles = struct.Struct("<dd").pack

QUICK: dict[type, Write] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: lambda value: b"i%x;" % value,
    float: lambda value: b"f" + _pack_double(value),
    complex: lambda value: b"c" + _pack_doubles(value.real, value.imag),
    str: text,
    bytes: lambda value: sized(b"b", value),
    bytearray: lambda value: sized(b"B", value),
    type(Ellipsis): lambda value: b"E",
    type(NotImplemented): lambda value: b"e",
}


def kind_text(kind: Any) -> bytes:
    """A class, by its module and qualified name."""
    return _places.get(kind) or _places.setdefault(kind, text(place_of(kind)))


_places: weakref.WeakKeyDictionary[Any, bytes] = weakref.WeakKeyDictionary()  # a class of a function goes with it


EMPTY: dict[type, bytes] = {tuple: b"(0:", list: b"[0:", dict: b"{0:"}


def flat(value: Any) -> bytes:
    """A plain container of what has no parts, without the care that circles need; nothing for any other value."""
    kind, quick_of = type(value), QUICK.get
    empty = EMPTY.get(kind)
    if empty is None or not value:
        return empty or b""
    if kind is not dict:
        if len(value) >= MANY and (packed := _packed(value)):
            return empty[:1] + packed
        out = bytearray()
        for item in value:
            quick = quick_of(type(item))
            if quick is None:
                return b""
            out += quick(item)
    else:
        pairs = []
        for key, item in value.items():
            first, second = quick_of(type(key)), quick_of(type(item))
            if first is None or second is None:
                return b""
            pairs.append(first(key) + second(item))
        out = bytearray().join(sorted(pairs))
    return short(b"%b%x:%b" % (empty[:1], len(value), bytes(out)))


def _packed(values: Any) -> bytes:
    """Many numbers of one type at once; nothing for others."""
    kinds = set(map(type, values))
    letter = "d" if kinds == {float} else "q" if kinds == {int} else ""
    try:
        return sized(letter.upper().encode(), struct.pack(f"<{len(values)}{letter}", *values)) if letter else b""
    except struct.error:  # an int of more than 64 bits
        return b""


def short(data: bytes) -> bytes:
    return data if len(data) <= LONG else b"#" + digest(data)


# -- what has parts ----------------------------------------------------------------------------------------------------


class DigestWriter:
    """Encodes one value. ``_above``: the objects that contain what is being written, by id, with their depth."""

    def __init__(self) -> None:
        self._above: dict[int, tuple[int, Any]] = {}
        self._known: dict[int, tuple[Any, bytes]] = {}  # with the object, so that its id stays its own
        self._highest = sys.maxsize  # the smallest depth that what was written last points back to
        self._cyclic = 0

    def write(self, value: Any) -> bytes:
        quick = QUICK.get(type(value))
        if quick is not None:
            return quick(value)
        if plain := flat(value):
            return plain
        key = id(value)
        known = self._known.get(key)
        if known is not None:
            return known[1]
        depth = len(self._above)
        if key in self._above:
            # Written as how far up it is, so that copies of a circle are equal.
            self._highest = min(self._highest, self._above[key][0])
            return b"^%x;" % (depth - self._above[key][0])
        return self._enter(key, depth, value)

    def _enter(self, key: int, depth: int, value: Any) -> bytes:
        interrupts.point()
        outer, self._highest = self._highest, sys.maxsize
        self._above[key] = depth, value
        try:
            data = short(writer_of(type(value))(self, value))
        except (Unstable, RecursionError):
            raise
        except interrupts.unless_of_handler(Exception) as error:
            why = "" if str(error).startswith("cannot pickle") else f": {type(error).__name__}: {error}"
            raise self._unstable(f"a {place_of(type(value))}", why) from error
        finally:
            del self._above[key]
        if self._highest >= depth:  # it stands for itself wherever it is met
            self._known[key] = value, data
        else:
            self._cyclic += 1
            if self._cyclic > MANY_CYCLES:
                raise self._unstable("objects that point at each other in too many ways")
        self._highest = min(outer, self._highest)
        return data

    def several(self, mark: bytes, values: Iterable[Any]) -> bytes:
        """Parts in their order."""
        out, count, quick_of, write = bytearray(), 0, QUICK.get, self.write
        for value in values:
            quick = quick_of(type(value))
            out += quick(value) if quick is not None else write(value)
            count += 1
            if not count % interrupts.PORTION:
                interrupts.point()
        return b"%b%x:%b" % (mark, count, bytes(out))

    def unordered(self, mark: bytes, parts: Iterable[bytes]) -> bytes:
        """Parts whose order does not count."""
        ordered = sorted(interrupts.paced(parts))
        return b"%b%x:%b" % (mark, len(ordered), b"".join(ordered))

    def pairs(self, mark: bytes, items: Iterable[tuple[Any, Any]]) -> bytes:
        """Keys and values, in whatever order."""
        return self.unordered(mark, (self.write(key) + self.write(item) for key, item in items))

    def reduced(self, value: Any) -> bytes:
        """Any object, by what pickle would take it apart into."""
        reduce = copyreg.dispatch_table.get(type(value))
        parts: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(parts, str):
            wrapped = getattr(value, "__wrapped__", None)  # of an `lru_cache`, which pickles by its name
            inside = self.write(wrapped) if type(wrapped) is types.FunctionType else b""
            if not inside and not all(name.isidentifier() for name in parts.split(".")):  # such as a ufunc of `numpy.frompyfunc`
                raise self._unstable(f"a {place_of(type(value))} whose name leads to nothing")
            return b"g" + text(f"{module_of(value) if hasattr(value, '__module__') else place_of(type(value))}.{parts}") + inside
        make, given, state, items, pairs = (*parts, None, None, None)[:5]
        out = b"o" + self.write(make) + self.write(tuple(given)) + self.write(state)
        if items is not None:
            out += self.several(b"l", items)
        if pairs is not None:
            ordered = isinstance(value, OrderedDict)
            out += self.several(b"p", pairs) if ordered else self.pairs(b"d", pairs)
        return out

    def _unstable(self, what: str, why: str = "") -> Unstable:
        inside = [type(v) for _, v in self._above.values() if type(v).__module__ not in ("builtins", "types")]
        outer = f" in a {place_of(inside[0])}" if inside and f"a {place_of(inside[0])}" != what else ""
        return Unstable(what + outer + why)


# -- each kind of value ------------------------------------------------------------------------------------------------

Part = Callable[[DigestWriter, Any], bytes]


def _function(writer: DigestWriter, value: Any) -> bytes:
    """By name, and by its code and defaults unless it is of an installed package. With what it closes over: all of it if it has no name of
    its own, else what cannot change, since a wrapper has the name of what it wraps."""
    name = place_of(value)
    if "<" in value.__qualname__:
        closure = writer.several(b"z", (content for _, content in cells_of(value)))
        return b"L" + text(name) + definition_of(value).code + writer.write((value.__defaults__, value.__kwdefaults__)) + closure
    own = [one for one in functions_of(value) if not is_installed(one.__code__.co_filename)]
    return b"A" + text(name) + (b"".join(definition_of(one).code for one in own) + brought(value, True) if own else b"")


def _path(writer: DigestWriter, value: Any) -> bytes:
    """As text: versions of Python take it apart in several ways."""
    return b"p" + kind_text(type(value)) + text(str(value))


def _dataclass(writer: DigestWriter, value: Any) -> bytes:
    """Its fields, and what else lies in it."""
    kind: Any = type(value)
    names = [field.name for field in dataclasses.fields(value)]
    fields = writer.several(b"d", (*names, *(getattr(value, name, None) for name in names)))
    others = _other_attributes(value, names)
    return b"D" + kind_text(kind) + fields + (writer.write(others) if others else b"")


def _other_attributes(value: Any, but: Iterable[str] = ()) -> dict[str, Any]:
    """The attributes of an object ``but`` for these, and without the properties that it remembers."""
    state = object.__getstate__(value)
    found: dict[str, Any] = {}
    for part in state if isinstance(state, tuple) else (state,):
        found |= part or {}
    for name in but:
        found.pop(name, None)
    kinds = type(value).__mro__
    remembered = (name for name in found if any(type(vars(kind).get(name)) is functools.cached_property for kind in kinds))
    for name in list(remembered):
        del found[name]
    return found


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
    header = (place_of(type(value)), str(value.dtype), tuple(value.shape), value.device.type, value.requires_grad)
    others = _other_attributes(value)
    return b"t" + writer.write(header) + sized(b"b", content) + (writer.write(others) if others else b"")


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


def _own_content(writer: DigestWriter, value: Any) -> bytes:
    return b"r" + kind_text(type(value)) + writer.write(value.__forebay_content__())


def _replaced(base: type, content: Callable[[Any], Any], writer: DigestWriter, value: Any) -> bytes:
    return b"r" + kind_text(base) + writer.write(content(value))


_REGISTERED: dict[type, Callable[[Any], Any]] = {}


def writer_of(kind: Any) -> Part:
    """Return the function that encodes values of this class."""
    part = _PARTS.get(kind)
    if part is None and (part := _others.get(kind)) is None:
        part = _others[kind] = _writer_of_other(kind)
    return part


_others: weakref.WeakKeyDictionary[Any, Part] = weakref.WeakKeyDictionary()


def _writer_of_other(kind: Any) -> Part:
    if hasattr(kind, "__forebay_content__"):
        return _own_content
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
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and kind in (numpy.ndarray, numpy.memmap):
        return _ndarray
    if numpy is not None and issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.object_, numpy.void)):
        return _numpy_scalar
    if torch is not None and issubclass(kind, torch.Tensor):
        return _tensor
    return DigestWriter.reduced


def _is_plain(kind: Any) -> bool:
    """Whether a class leaves it to pickle how it is taken apart, and holds nothing but attributes. Frozen dataclasses with slots are given
    ``__getstate__``."""
    state = getattr(kind, "__getstate__", None)
    if state is not getattr(object, "__getstate__", None) and getattr(state, "__module__", "") != "dataclasses":
        return False
    if issubclass(kind, (list, dict)) or hasattr(kind, "__getnewargs__") or hasattr(kind, "__getnewargs_ex__"):
        return False
    return all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))


def register(kind: type, content: Callable[[Any], Any]) -> None:
    """Encode values of this class as what ``content`` returns for them; it may raise `Unstable`. For adapters, once at import."""
    _REGISTERED[kind] = content
    _others.clear()


# -- digests -----------------------------------------------------------------------------------------------------------

LASTING = frozenset(
    {"datetime.date", "datetime.datetime", "datetime.time", "datetime.timedelta", "decimal.Decimal", "uuid.UUID"}
    | {"pathlib.Path", "pathlib.PosixPath", "pathlib.PurePath", "pathlib.PurePosixPath", "builtins.range", "builtins.slice"}
)
"""Classes of immutable values, beside the plain ones and containers of them."""


def digest_of(*values: Any) -> str:
    """32 hex digits that equal values share. Raises `Unstable`."""
    return digest(b"".join(encoded(values))).hex()


def encoded(values: Iterable[Any]) -> list[bytes]:
    """Each value as the bytes that stand for it. Raises `Unstable`."""
    parts = []
    for index, value in enumerate(values):
        quick = QUICK.get(type(value))
        if quick is not None:
            parts.append(quick(value))
            continue
        try:
            parts.append(flat(value) or DigestWriter().write(value))
        except Unstable as error:
            error.index = index
            raise
        except RecursionError as error:
            raise Unstable(f"a {type(value).__name__} that is nested too deep", index) from error
    return parts


# -- functions whose calls are kept ------------------------------------------------------------------------------------


def as_own(function: Any) -> bytes:
    """What neither the name nor the code of a function tells: what it closes over, and what a partial or an object that can be called
    brings. Of a lambda the code, since a version does not tell it from another. Raises `Unstable`.

    Of what it closes over only values that cannot change count: lists, counters and clients are what it works with, not what it is."""
    constants, out = ConstantWriter(), b""
    while isinstance(function, functools.partial):
        out += constants.writer.write((function.args, function.keywords))
        function = function.func
    if isinstance(function, types.FunctionType):
        return out + constants.closure(function)
    return out if isinstance(getattr(function, "__qualname__", None), str) else out + constants.writer.write(function)


def brought(function: types.FunctionType, by_source: bool) -> bytes:
    """What a function that another one uses has beside its code, of values that cannot change: what it closes over, and its defaults,
    where they are constants. ``by_source``: see `ConstantWriter`."""
    constants = ConstantWriter(by_source)
    constants.seen.add(id(function))
    return constants.defaults(function) + constants.closure(function)


class ConstantWriter:
    """Encodes values that cannot change: nothing for any other. ``by_source``: functions by their code, else by their bytecode. ``seen``:
    functions that were met, by id."""

    def __init__(self, by_source: bool = True) -> None:
        self.by_source, self.writer, self.seen = by_source, DigestWriter(), set[int]()

    def write(self, value: Any) -> bytes:
        kind: Any = type(value)
        is_plain = kind in QUICK and kind is not bytearray
        if is_plain or issubclass(kind, (type, enum.Enum)) or place_of(kind) in LASTING:
            return self.writer.write(value)
        if kind is tuple or kind is frozenset:
            parts = [self.write(item) for item in value]
            return b"(" + b"".join(parts if kind is tuple else sorted(parts)) + b")" if all(parts) else b""
        if kind is types.FunctionType:
            known = id(value) in self.seen
            self.seen.add(id(value))
            return b"A" + text(place_of(value)) + (b"" if known else self._beside_its_name(value))
        if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
            names = [field.name for field in dataclasses.fields(value)]
            others = sorted(_other_attributes(value, names).items())
            fields = self.write(tuple(getattr(value, name, None) for name in names))
            return kind_text(kind) + fields + (self.write(tuple(others)) if others else b"")
        return b""

    def write_container(self, value: Any) -> bytes:
        """A dict, list, set or tuple, each in its order, of values that cannot change; nothing if another one is in it."""
        kind = type(value)
        if kind not in (dict, list, set, tuple):
            self.seen = set()
            return self.write(value)
        if kind in (list, tuple) and (plain := flat(value)):
            return plain
        parts = [self.write_container(part) for part in (itertools.chain(*value.items()) if kind is dict else value)]
        if not all(parts):
            return b""
        return b"%b%x:%b" % (text(kind.__name__), len(parts), b"".join(sorted(parts) if kind is set else parts))

    def closure(self, function: types.FunctionType) -> bytes:
        """What a function closes over; of a lambda its code, too."""
        out = b"" if function.__name__ != "<lambda>" else self._code(function)
        if function.__closure__:
            self.seen.add(id(function))
            rebound = _rebound(function.__code__)
            for name, content in cells_of(function):
                if name not in rebound:
                    out += self.writer.write(name) + self.write(content)
        return out

    def defaults(self, function: types.FunctionType) -> bytes:
        defaults = (*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items()))
        if not defaults or is_installed(function.__code__.co_filename):
            return b""
        # The defaults of an inner function belong to the function that creates it, as what it closes over does.
        if self.by_source and "<" not in function.__code__.co_qualname and not definition_of(function).defaults:
            return b""
        return b"".join(b"d" + self.write(value) for value in defaults)

    def _code(self, function: types.FunctionType) -> bytes:
        return definition_of(function).code if self.by_source else shape_of(function.__code__)

    def _beside_its_name(self, function: types.FunctionType) -> bytes:
        """Of a function that another one closes over: its defaults; of an inner function its code and what it closes over, too."""
        out = self.defaults(function)
        # By the name in its code: a wrapper has the qualified name of what it wraps.
        if function.__closure__ or "<" in function.__code__.co_qualname:
            if not is_installed(function.__code__.co_filename):
                out += self._code(function)
            out += self.closure(function)
        return out


def _rebound(code: types.CodeType) -> set[str]:
    """The variables of enclosing functions that a function, or one within it, assigns or deletes."""
    names = {argument for name, argument in steps_of(code) if name in ("STORE_DEREF", "DELETE_DEREF")}
    return names.union(*(_rebound(part) for part in code.co_consts if isinstance(part, types.CodeType)))
