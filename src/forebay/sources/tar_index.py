"""An index of the members of a tar: built by reading its headers only, and searched in its stored form, without parsing it."""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping

from forebay import errors
from forebay._logs import logger
from forebay._model import Buffer, Span

log = logger("forebay.sources.tar")

BLOCK = 512
LONGEST_HEADER = 16 << 20
"""Maximum bytes of the names and records before a member: they are read into memory, and more is not a tar."""

NO_HEADER = "no header where one should be: damaged, or no tar"
COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7", b"\x28\xb5")  # gzip, bzip2, xz, zstd
MAGIC = b"fbtarix2"
_HEAD = struct.Struct("=8sQQ")  # magic, members, bytes of names

Read = Callable[[Span], bytes | memoryview]
"""Reads bytes of the tar: fewer than requested only at its end."""


class Index:
    """The members of one tar: names and spans, in the order of the tar. Searches the bytes that `build` returned by
    bisection, without copying them. Raises ValueError for other bytes."""

    def __init__(self, data: Buffer) -> None:
        view = memoryview(data).toreadonly()
        if len(view) < _HEAD.size:
            raise ValueError("cut short")
        magic, count, length = _HEAD.unpack_from(view)
        if magic != MAGIC or len(view) != _HEAD.size + 40 * count + length:
            raise ValueError("no index of a tar")
        words = view[_HEAD.size : _HEAD.size + 40 * count].cast("Q")
        self.data, self._names = view, view[_HEAD.size + 40 * count :]
        self._hashes, self._ranks, self._starts, self._sizes, self._ends = (words[i * count : (i + 1) * count] for i in range(5))

    def __len__(self) -> int:
        return len(self._hashes)

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of the tar."""
        return (_text(self._name(i)) for i in range(len(self)))

    def get(self, name: str) -> Span | None:
        """The span of a member."""
        encoded = name.encode("utf-8", "surrogateescape")
        digest = _hash(encoded)
        for at in range(bisect.bisect_left(self._hashes, digest), len(self)):
            if self._hashes[at] != digest:
                break
            i = self._ranks[at]
            if self._name(i) == encoded:
                return Span(self._starts[i], self._sizes[i])
        return None

    def _name(self, i: int) -> bytes:
        return bytes(self._names[self._ends[i - 1] if i else 0 : self._ends[i]])


def packed(members: Mapping[bytes, Span]) -> bytes:
    """The members in the form that `Index` reads."""
    hashes = sorted((_hash(name), i) for i, name in enumerate(members))
    ends, end = [], 0
    for name in members:
        end += len(name)
        ends.append(end)
    starts, sizes = [span.start for span in members.values()], [span.length for span in members.values()]
    words = [*(digest for digest, _ in hashes), *(i for _, i in hashes), *starts, *sizes, *ends]
    return _HEAD.pack(MAGIC, len(members), end) + struct.pack(f"={len(words)}Q", *words) + b"".join(members)


def _hash(name: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "surrogateescape")


def build(read: Read, size: int | None, name: str, *, window: int, most: int, jump: int) -> bytes:
    """The packed index of a tar. ``name``: for errors. Raises `BadArchive`, and what ``read`` raises.

    Headers are read in windows of ``window`` bytes, doubled up to ``most`` while members are small; if the next header lies ``jump``
    bytes or more after a window, the bytes between are skipped, and the next window is small."""
    return packed(_HeaderWalk(_Ahead(read, size, name, window, most, jump)).members())


def typical_size(start: bytes, size: int) -> int:
    """The mean size of the members whose headers are in the first bytes of a tar of ``size`` bytes; 0 if there is none, or it is no tar."""
    ends: list[int] = []

    def read(span: Span) -> bytes:
        if span.start >= len(start):
            raise _Ended
        return start[span.start : span.end]

    walk = _HeaderWalk(_Ahead(read, size, "", len(start), len(start), 1 << 62))
    with contextlib.suppress(_Ended, errors.BadArchive):
        walk.members(on_member=ends.append)
    return ends[-1] // len(ends) if ends else 0


class _Ended(Exception):
    """What is to be read lies behind the bytes that are there."""


def members(data: memoryview, name: str) -> dict[bytes, Span]:
    """The regular files of a tar in memory, in its order. ``name``: for errors. Raises `BadArchive`."""
    return _HeaderWalk(_Ahead(lambda span: data[span.start : span.end], len(data), name, len(data), len(data), len(data))).members()


class _Ahead:
    """The bytes of a tar, read in windows."""

    def __init__(self, read: Read, size: int | None, name: str, window: int, most: int, jump: int) -> None:
        self._read, self.size, self.name = read, size, name
        self._window, self._most, self._jump, self._next = window, most, jump, window
        self._at, self._data = 0, memoryview(b"")

    def bytes_at(self, at: int, count: int) -> memoryview:
        """``count`` bytes from ``at``; fewer at the end of the tar."""
        if at < self._at or at + count > self._at + len(self._data):
            self._fill(at, count)
        return self._data[at - self._at : at - self._at + count]

    def _fill(self, at: int, count: int) -> None:
        behind = at - self._at - len(self._data)
        if behind >= self._jump:
            self._next, length = self._window, min(self._window, 8192)
        else:
            length, self._next = self._next, min(2 * self._next, self._most)
        left = None if self.size is None else max(0, self.size - at)
        length = max(length, count) if left is None else min(max(length, count), left)
        self._at, self._data = at, memoryview(self._read(Span(at, length)) if length else b"")

    def reaches(self, end: int) -> bool:
        """Whether the tar has all bytes before ``end``."""
        if self.size is not None:
            return end <= self.size
        return end == 0 or end <= self._at + len(self._data) or len(self._read(Span(end - 1, 1))) == 1

    def bad(self, at: int, why: str) -> errors.BadArchive:
        return errors.BadArchive(f"{self.name}: {why}, at byte {at:,}", url=self.name, offset=at)


class _HeaderWalk:
    """Walks from header to header. Supports ustar, GNU's long names and large numbers, and the records of pax."""

    def __init__(self, tar: _Ahead) -> None:
        self._tar = tar
        self._standing: dict[str, bytes] = {}  # records of pax for all following members
        self._records: dict[str, bytes] = {}  # for the next one
        self._found: dict[bytes, Span] = {}
        self._left_out = False

    def members(self, on_member: Callable[[int], object] | None = None) -> dict[bytes, Span]:
        """All regular files; of several with the same name the last. ``on_member`` is called with the end of each header's member."""
        at = 0
        while (head := bytes(self._tar.bytes_at(at, BLOCK))) and head.strip(b"\0"):
            if len(head) < BLOCK:
                raise self._tar.bad(at, "cut short within a header")
            at = self._member(at, head)
            if on_member is not None:
                on_member(at)
        if not head and at == 0:
            raise self._tar.bad(at, "empty: no tar")
        if not head:
            log.warning("%s has no mark at its end: it may have been cut short between two members", self._tar.name)
        return self._found

    def _member(self, at: int, head: bytes) -> int:
        """Read the member at ``at``; return the position of the next header."""
        if at == 0 and head[:2] in COMPRESSED:
            raise self._tar.bad(at, "compressed: members can be read out of plain tars only")
        if _checksum(head) != self._number(at, head[148:156]):
            raise self._tar.bad(at, NO_HEADER)
        kind, size, start = head[156:157], self._number(at, head[124:136]), at + BLOCK
        if kind in b"LKxXg":
            return self._extended(at, kind, start, size)
        records, self._records = {**self._standing, **self._records}, {}
        if kind == b"S":
            start = self._past_sparse(head, start)
        name = records.get("path", _name_in(head))
        if "size" in records:
            size = self._decimal(at, records["size"])
        if kind in b"123456":
            self._linked(kind, name, records.get("linkpath", _cut(head[157:257])))
            return start
        self._file(at, kind, name, Span(start, size), "GNU.sparse.major" in records or "GNU.sparse.size" in records)
        return start + size + -size % BLOCK

    def _file(self, at: int, kind: bytes, name: bytes, span: Span, sparse: bool) -> None:
        if not self._tar.reaches(span.end):
            raise self._tar.bad(at, f"cut short within {_text(name)!r}, of {span.length:,} bytes")
        if sparse or kind == b"S":
            log.warning("%s: %s has holes, which are not supported; it is skipped", self._tar.name, _text(name))
        elif kind in (b"\0", b"0", b"7") and not name.endswith(b"/"):  # the first tars marked directories like that
            self._enter(_plain(name), span)

    def _enter(self, name: bytes, span: Span) -> None:
        """Add a member, unless its name leads out of the directory to which it may be unpacked: then warn, once per tar."""
        if name and b"\0" not in name and b".." not in name.split(b"/"):
            self._found[name] = span
            return
        if not self._left_out:
            log.warning("%s: %r is not the name of a file below a directory; such members are skipped", self._tar.name, _text(name))
        self._left_out = True

    def _linked(self, kind: bytes, name: bytes, target: bytes) -> None:
        """Add a hard link as another name of an earlier member; symbolic links, directories and devices have no bytes."""
        if kind == b"1" and _plain(target) in self._found:
            self._enter(_plain(name), self._found[_plain(target)])

    def _extended(self, at: int, kind: bytes, start: int, size: int) -> int:
        """Read a header that describes the next member, or all following ones."""
        if size > LONGEST_HEADER:
            raise self._tar.bad(at, f"a header of {size:,} bytes")
        data = bytes(self._tar.bytes_at(start, size)) if size else b""
        if len(data) < size:
            raise self._tar.bad(at, "cut short within a header")
        if kind in b"LK":
            self._records["path" if kind == b"L" else "linkpath"] = data.partition(b"\0")[0]
        elif kind == b"g":
            self._standing |= self._pax(at, data)
        else:
            self._records |= self._pax(at, data)
        return start + size + -size % BLOCK

    def _pax(self, at: int, data: bytes) -> dict[str, bytes]:
        """The records of pax: lines of ``length name=value``."""
        records, rest = {}, data
        while rest.strip(b"\0"):
            digits, blank, _ = rest.partition(b" ")
            length = self._decimal(at, digits)
            name, equals, value = rest[len(digits) + 1 : length - 1].partition(b"=")
            if not blank or not equals or length > len(rest) or rest[length - 1 : length] != b"\n":
                raise self._tar.bad(at, "a record of pax that is none")
            records[_text(name)] = value
            rest = rest[length:]
        return records

    def _past_sparse(self, head: bytes, start: int) -> int:
        """The start of the bytes of an old GNU sparse file: its map may continue in further blocks."""
        more = head[482]
        while more:
            block = self._tar.bytes_at(start, BLOCK)
            more, start = (block[504] if len(block) == BLOCK else 0), start + BLOCK
        return start

    def _number(self, at: int, field: bytes) -> int:
        """A number in octal digits, or in GNU's binary form for larger numbers."""
        if field[0] == 0x80:
            return self._bounded(at, int.from_bytes(field[1:], "big"))
        digits = _cut(field).strip()
        if digits.strip(b"01234567"):
            raise self._tar.bad(at, NO_HEADER)
        return int(digits or b"0", 8)

    def _decimal(self, at: int, digits: bytes) -> int:
        if not digits.isdigit() or len(digits) > 20:
            raise self._tar.bad(at, "a record of pax that is none")
        return self._bounded(at, int(digits))

    def _bounded(self, at: int, number: int) -> int:
        if number >= 1 << 62:
            raise self._tar.bad(at, "a number that no file has")
        return number


def _checksum(head: bytes) -> int:
    """The sum of the bytes of a header, with blanks in place of the sum itself."""
    return 256 + sum(head) - sum(head[148:156])


def _cut(field: bytes) -> bytes:
    return field.partition(b"\0")[0]


def _name_in(head: bytes) -> bytes:
    """The name in the header itself. GNU uses the field of ustar's directories for other data."""
    name, folder = _cut(head[:100]), _cut(head[345:500]) if head[257:263] == b"ustar\0" else b""
    return folder + b"/" + name if folder else name


def _plain(name: bytes) -> bytes:
    """The name without the prefix that ``tar cf x.tar .`` writes."""
    while name.startswith((b"./", b"/")):
        name = name.partition(b"/")[2]
    return name
