"""Values as bytes: what has no parts, and the walk over what has.

What is long is replaced by its own digest. Equal copies are written as the same object is; objects that contain themselves are written
by how far up that is.
"""

from __future__ import annotations

import copyreg
import struct
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import xxhash

from forebay.tasks.naming import Tag, module_of, place_of

LONG = 256  # bytes; longer writings are replaced by their digest
MANY_CYCLES = 10_000
MANY = 32  # numbers of one type are written together from here on

Write = Callable[[Any], bytes]


class Unstable(Exception):
    """A value that has no content to go by. ``what``: in words; ``index``: which of the values given to `digest_of`."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what, self.index = what, 0


# -- what has no parts -------------------------------------------------------------------------------------------------


def sized(mark: bytes, data: Any) -> bytes:
    """Bytes with their length in front, or their digest."""
    length = len(data)
    if length > LONG:
        return b"%b#%x:%b" % (mark, length, xxhash.xxh3_128_digest(data))
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
    Tag: lambda value: text(str(value)),
    bytes: lambda value: sized(b"b", value),
    bytearray: lambda value: sized(b"B", value),
    type(Ellipsis): lambda value: b"E",
    type(NotImplemented): lambda value: b"e",
}


def kind_text(kind: Any) -> bytes:
    """A class by where it is found."""
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
    return data if len(data) <= LONG else b"#" + xxhash.xxh3_128_digest(data)


# -- what has parts ----------------------------------------------------------------------------------------------------


class DigestWriter:
    """Writes one value down. ``above``: the objects that it is inside of, by id, with their depth."""

    def __init__(self, writer_of: Callable[[Any], Callable[[DigestWriter, Any], bytes]]) -> None:
        self._writer_of = writer_of
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
            # Told by how far up it is, so that copies of a circle are equal.
            self._highest = min(self._highest, self._above[key][0])
            return b"^%x;" % (depth - self._above[key][0])
        return self._enter(key, depth, value)

    def _enter(self, key: int, depth: int, value: Any) -> bytes:
        outer, self._highest = self._highest, sys.maxsize
        self._above[key] = depth, value
        try:
            data = short(self._whole(value))
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

    def _whole(self, value: Any) -> bytes:
        try:
            return self._writer_of(type(value))(self, value)
        except (Unstable, RecursionError):
            raise
        except Exception as error:
            why = "" if str(error).startswith("cannot pickle") else f": {type(error).__name__}: {error}"
            raise self._unstable(f"a {place_of(type(value))}", why) from error

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
        reduce = copyreg.dispatch_table.get(type(value))
        parts: Any = reduce(value) if reduce is not None else value.__reduce_ex__(4)
        if isinstance(parts, str):
            return b"g" + text(f"{module_of(value) if hasattr(value, '__module__') else place_of(type(value))}.{parts}")
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
