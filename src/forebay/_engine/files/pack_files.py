"""The files of a pack, an array of samples: one index of fixed length, and segments that writers append records to.

``packs/<id>/index``: a page of header (magic, root, pack, length, frozen, quota, number), then a word for each slot, then another one for
each slot, a hint of the length of its record: see `length_hint`. Allocated completely.
``packs/<id>/<number>``: a segment, of one writer; blocks are allocated before they are written, and the rest is punched at the end.

**Records.** The format of one sample in a segment, and of the index word that points to it. Pure functions.

    index word   segment << 40 | offset / 16, one aligned 8-byte store; 0: the slot is empty
    length hint  40 bits that prove it, length of the payload; of no use for longer payloads, and in another epoch of the root
    record       header of 32 bytes, payload
    header       slot, length, xxh3-64 of the payload (8 bytes each), tag of the epoch, CRC-32 of all before it (4 bytes each)

A record is accepted only if its header's checksum is right, it names this slot of this pack, and it ends within the segment. Its writer,
and whoever accepts it, stores a length hint: other processes believe the hint, and touch no page of the record.
Payloads start at multiples of 64, so that arrays in them are aligned."""

from __future__ import annotations

import itertools
import os
import stat
import struct
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from forebay._engine.files.layout import PAGE, Root
from forebay._kernel import host, interrupts, locks, mappings
from forebay._kernel.below import NoPlainFile
from forebay._model import Buffer
from forebay.errors import Damaged

HEADER_WORDS = PAGE // 8
_MAGIC = int.from_bytes(b"FBPACK01", "little")
_LENGTH, FROZEN, QUOTA, _NUMBER = 3, 4, 5, 6
"""Words of the header. Three may change: whether the pack is closed to new records; the most bytes it may have, 0 for no limit; the tag of
the epoch and the number of the last segment that was begun in it. The last word of the page is reserved for the caller."""
_LAST, _LASTS = 256, 128
"""More words of the header, by the segment's number: the tag of the epoch, and the slot of the last record of a segment. Hints."""


def index_size(length: int) -> int:
    """Bytes of an index of ``length`` slots."""
    return PAGE + -(-length * 16 // PAGE) * PAGE


def size_of_index(root: Root, id: int) -> int | None:
    """The bytes that count for the index of a pack and its directory; None if the pack is lost, or being removed."""
    try:
        return PAGE + root.files.lstat(root.pack(id) / "index").st_size
    except FileNotFoundError:
        return None


def cells_of(words: memoryview) -> memoryview:
    """The words of the slots, of an index."""
    return words[HEADER_WORDS : HEADER_WORDS + words[_LENGTH]]


def hints_of(words: memoryview) -> memoryview:
    """The hints of lengths, of an index."""
    return words[HEADER_WORDS + words[_LENGTH] : HEADER_WORDS + 2 * words[_LENGTH]]


def build(root: Root, id: int, length: int, *, keyhash: int = 0) -> None:
    """Make the pack ``id`` with an empty index; it has its name only when it is whole.

    Raises what the disk raises; then nothing is left. Caller: holds the pack's key, as ``keyhash``."""
    staged = root.tmp(keyhash, id, ".pack")
    try:
        root.files.mkdir(staged, root.dir_mode)
        root.files.chmod(staged, root.dir_mode)
        fd = root.files.create(staged / "index", root.file_mode)
        try:
            host.store_in_place(fd)
            host.allocate(fd, 0, index_size(length))
            host.pwrite(fd, b"".join(word.to_bytes(8, "little") for word in (_MAGIC, root.id, id, length)), 0)
        finally:
            os.close(fd)
        root.files.rename(staged, root.pack(id))
    except BaseException:
        root.files.remove_whole(staged)
        raise


def remove(root: Root, id: int, *, keyhash: int = 0) -> bool:
    """Remove the pack ``id``, and what a killed `build` of it left; False if nothing was there. May be repeated after a crash.

    Caller: holds the lock of ``id`` exclusively."""
    return root.files.remove_whole(root.pack(id)) | root.files.remove_whole(root.tmp(keyhash, id, ".pack"))


def map_index(root: Root, id: int, length: int | None, *, writable: bool) -> memoryview:
    """Return the words of an index, its header included: see `cells_of`, `hints_of`. Raises FileNotFoundError, or `Damaged` if it
    is not the index of this pack.

    ``length``: the expected number of slots; None: whatever the header says."""
    path = root.pack(id) / "index"
    fd = _open(root, path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        if length is None:
            length = int.from_bytes(os.pread(fd, 8, 24), "little")
        size = os.fstat(fd).st_size
        if size != index_size(length):
            raise Damaged(f"{path} has {size} bytes where {index_size(length)} are right", key=str(path))
        words = mappings.words(mappings.map_file(fd, size, writable=writable))
    finally:
        os.close(fd)
    if tuple(words[:4]) != (_MAGIC, root.id, id, length):
        raise Damaged(f"{path} is not the index of this array", key=str(path))
    return words


def has_name(path: str, file: tuple[int, int] | None) -> bool:
    """Whether a path leads to this file, given as `locks.file_of` does. Raises OSError."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (status.st_dev, status.st_ino) == file


def segment_path(root: Root, id: int, number: int) -> Path:
    return root.pack(id) / f"{number:08d}"


def list_segments(root: Root, id: int) -> list[int]:
    """The numbers of the segments of a pack that are there."""
    names = root.files.names_in(root.pack(id))
    numbers = {f"{int(name):08d}": int(name) for name in names if name.isdecimal()}
    return [numbers[name] for name in names if 0 < numbers.get(name, 0) <= MAX_SEGMENT]


def last_number(root: Root, id: int, words: memoryview) -> int:
    """The highest number that a segment has or had, as far as the files tell: a crash of the machine may have lost rows. Looks at all
    names, and at all words of the index, at the first call in an epoch. Caller: is inside a transaction."""
    epoch, number = divmod(words[_NUMBER], 1 << 24)
    if epoch == root.epoch_tag:
        return number
    named = max(list_segments(root, id), default=0)
    cells = cells_of(words)
    parts = (cells[at : at + PAGE].tolist() for at in range(0, len(cells), PAGE))  # all at once would take four times the index
    return max(named, number, max(map(max, parts), default=0) >> 40)


def note_number(root: Root, words: memoryview, number: int) -> None:
    """Have `last_number` return this in the present epoch. Caller: is inside the transaction that begins the segment."""
    host.set_word(words, _NUMBER, root.epoch_tag << 24 | number)


def claims(root: Root, id: int) -> locks.Claims:
    """For the locks on the bytes of an index: one for each slot, and see `byte_of`. Raises OSError."""
    return locks.Claims(root.pack(id) / "index", root.files.open)


def byte_of(number: int) -> int:
    """The byte of the index, far beyond its end, that the writer of a segment holds."""
    return 1 << 40 | number


def unlocked(root: Root, id: int, numbers: Sequence[int]) -> list[int]:
    """Those of some segments, in order, that no process holds: see `byte_of`. None where the index is gone or cannot be opened now."""
    index = locks.LockFile(root.pack(id) / "index", root.files.open, writable=False)
    try:
        locked = index.locked_among([byte_of(number) for number in numbers])
    except OSError:
        return []
    finally:
        index.close()
    return [number for number in numbers if byte_of(number) not in locked]


def empty_slot(root: Root, id: int, cells: memoryview, slot: int, word: int) -> None:
    """Empty a slot whose record is damaged, if it still has this word, so that it can be filled again. Does nothing while another
    process fills it. Raises OSError."""
    mine = claims(root, id)
    try:
        if mine.try_claim(slot) and cells[slot] == word:
            host.set_word(cells, slot, 0)
    finally:
        mine.close()


def segment_length(root: Root, id: int, number: int) -> int:
    """The length of a segment's file, which never shrinks; 0: there is none."""
    try:
        status = root.files.lstat(segment_path(root, id, number))
    except FileNotFoundError:
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else 0


def open_segment(root: Root, id: int, number: int) -> int:
    """Return a descriptor to read a segment. Raises FileNotFoundError, or `Damaged` if it is not a plain file."""
    return _open(root, segment_path(root, id, number), os.O_RDONLY)


def _open(root: Root, path: Path, flags: int) -> int:
    try:
        return root.files.open(path, flags)
    except NoPlainFile as error:
        raise Damaged(f"{path} is not a file", key=str(path)) from error


def make_segment(root: Root, id: int, number: int, capacity: int) -> int:
    """A descriptor to append with, of a segment that is new, or was half made, or left. Nothing of it is allocated here; its length
    never changes, so that it can be mapped. Raises what the disk raises. Caller: is its one writer."""
    path = segment_path(root, id, number)
    try:
        fd = root.files.create(path, root.file_mode)
    except FileExistsError:
        fd = root.files.open_write(path)
    try:
        if os.fstat(fd).st_size < capacity:
            host.truncate(fd, capacity)
    except BaseException:
        os.close(fd)
        raise
    return host.out_of_the_way(fd)


def punch_segment(root: Root, id: int, number: int, tail: int) -> int:
    """Free the blocks after ``tail``, or remove a segment without records; returns the bytes that stay. Caller: holds its byte."""
    path = segment_path(root, id, number)
    if tail <= START:
        root.files.unlink(path)
        return 0
    try:
        fd = root.files.open_write(path)
    except FileNotFoundError:
        return 0
    try:
        length = os.fstat(fd).st_size
        kept = min(-(-tail // PAGE) * PAGE, length)
        if kept < length:
            host.punch(fd, kept, length - kept)
        return kept
    finally:
        os.close(fd)


class SegmentEnd(NamedTuple):
    """Where the records of a segment end. Not ``is_sound``: the last word leads to no record, so nothing may be appended. ``is_blank``:
    nothing was written behind it."""

    tail: int
    is_sound: bool
    is_blank: bool = False


def find_ends(root: Root, id: int, numbers: Iterable[int], words: memoryview) -> dict[int, SegmentEnd]:
    """The ends of segments, as the index and their records have them. ``words``: of the index. Reads all words. Caller: holds the bytes of
    the segments."""
    last, slots, cells = dict.fromkeys(numbers, 0), dict.fromkeys(numbers, 0), cells_of(words)
    for first in range(0, len(cells), PAGE):  # all at once would take four times the index
        for slot, word in enumerate(cells[first : first + PAGE].tolist(), first):
            if word >> 40 in last and word > last[word >> 40]:
                last[word >> 40], slots[word >> 40] = word, slot
    return {number: _end_of(root, id, last[number], slots[number]) for number in last}


def find_end(root: Root, id: int, number: int, words: memoryview) -> SegmentEnd:
    """`find_ends` of one segment, by the hint of who left it, if it proves itself: nothing was written behind that record."""
    epoch, slot = divmod(words[_LAST + number % _LASTS], 1 << 32)
    if epoch == root.epoch_tag and slot < words[_LENGTH] and (word := cells_of(words)[slot]) >> 40 == number:
        end = _end_of(root, id, word, slot)
        if end.is_sound and end.is_blank:
            return end
    return find_ends(root, id, (number,), words)[number]


def note_last(root: Root, words: memoryview, number: int, slot: int) -> None:
    """Tell `find_end` the slot of the last record. Caller: holds the segment's byte, and has found or written the record."""
    if slot < 1 << 32:
        host.set_word(words, _LAST + number % _LASTS, root.epoch_tag << 32 | slot)


def _end_of(root: Root, id: int, word: int, slot: int) -> SegmentEnd:
    """The end of the record that the last word of a segment leads to; 0: there is none."""
    if not word:
        return SegmentEnd(START, True)
    number, offset = place_of(word)
    try:
        fd = open_segment(root, id, number)
    except FileNotFoundError:
        return SegmentEnd(START, False)
    try:
        length = length_in(os.pread(fd, HEADER, offset), seed_of(id), slot)
        if length is None:  # a crash of the machine lost it, and readers empty its slot; what lies before it stays
            return SegmentEnd(offset, False)
        tail = offset + footprint(length)
        return SegmentEnd(tail, True, not any(os.pread(fd, HEADER, tail)))
    finally:
        os.close(fd)


def bad_slots(root: Root, id: int, words: memoryview) -> list[int]:
    """Every slot whose record differs from what was stored. Reads all bytes."""
    bad: list[int] = []
    by_segment: dict[int, list[tuple[int, int]]] = {}
    cells = cells_of(words).tolist()
    for slot in interrupts.paced(itertools.compress(itertools.count(), cells)):
        number, offset = place_of(cells[slot])
        by_segment.setdefault(number, []).append((offset, slot))
    for number, places in by_segment.items():
        view, seed = _map_whole(root, id, number), seed_of(id)
        for offset, slot in sorted(places):
            interrupts.point()
            if length_of(view, offset, seed, slot) is None:
                bad.append(slot)
    return sorted(bad)


def _map_whole(root: Root, id: int, number: int) -> memoryview:
    try:
        fd = open_segment(root, id, number)
    except (FileNotFoundError, Damaged):
        return memoryview(b"")
    try:
        return mappings.map_file(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


HEADER = 32
ALIGN = 64
START = ALIGN - HEADER
"""The offset of the first record of a segment; every record starts this far above a multiple of `ALIGN`."""
MAX_SEGMENT = (1 << 24) - 1

HINT_BITS = 24
HINTED, PROOFS = (1 << HINT_BITS) - 1, (1 << 64 - HINT_BITS) - 1
SIXTEENTHS = (1 << 40) - 1
"""The part of an index word that is the offset, in units of 16 bytes."""

_BODY = struct.Struct("<QQQI")
_HEADER = struct.Struct("<QQQII")
hint_facts, hint_proof = struct.Struct("<QQ").pack, xxhash.xxh3_64_intdigest
"""The proof of a hint is the second of the first, of the index word and the length, with the key as its seed."""


def word_of(segment: int, offset: int) -> int:
    """The index word of the record at ``offset`` of segment ``segment`` (from 1 on)."""
    return segment << 40 | offset >> 4


def place_of(word: int) -> tuple[int, int]:
    """The segment and the offset that a word names."""
    return word >> 40, (word & SIXTEENTHS) << 4


def hint_key(epoch: int, pack: int) -> int:
    """What the hints of a pack are mixed with: those of another pack, and of another epoch, prove nothing. ``epoch``: its tag."""
    return epoch << 32 | seed_of(pack)


def length_hint(key: int, word: int, length: int) -> int:
    """A word that says how long the record is that an index word names; 0 for a length that does not fit. ``key``: see `hint_key`.

    It is a hint that proves itself, in each process, whatever its Python."""
    return 0 if length > HINTED else (hint_proof(hint_facts(word, length), key) & PROOFS) << HINT_BITS | length


def footprint(length: int) -> int:
    """Bytes from the start of a record of ``length`` bytes to the start of the next one."""
    return -(-(HEADER + length) // ALIGN) * ALIGN


def seed_of(pack: int) -> int:
    """The initial value of the checksums of a pack's headers: a header of another pack does not match."""
    return zlib.crc32(pack.to_bytes(8, "little"))


def header_of(epoch: int, seed: int, slot: int, parts: Sequence[Buffer], length: int) -> bytes:
    """The header of the record of ``slot``, whose payload is ``parts``, of ``length`` bytes together."""
    if len(parts) == 1:
        digest = xxhash.xxh3_64_intdigest(parts[0])
    else:
        whole = xxhash.xxh3_64()
        for part in parts:
            whole.update(part)
        digest = whole.intdigest()
    body = _BODY.pack(slot, length, digest, epoch)
    return body + zlib.crc32(body, seed).to_bytes(4, "little")


def length_of(segment: memoryview, offset: int, seed: int, slot: int, *, trusted: int | None = None) -> int | None:
    """The length of the payload, which starts `HEADER` bytes after ``offset``; None if there is no sound record of this slot.

    The payload is compared with its checksum unless it was written in the epoch with the tag ``trusted``."""
    start = offset + HEADER
    if start > len(segment):
        return None
    length = length_in(bytes(segment[offset:start]), seed, slot)
    if length is None or start + length > len(segment):
        return None
    _, _, digest, epoch, _ = _HEADER.unpack_from(segment, offset)
    if epoch != trusted and xxhash.xxh3_64_intdigest(segment[start : start + length]) != digest:
        return None
    return length


def length_in(header: bytes, seed: int, slot: int) -> int | None:
    """The length of the payload as a header has it; None if these bytes are no header of this slot."""
    if len(header) < HEADER:
        return None
    owner, length, _, _, check = _HEADER.unpack(header)
    return int(length) if owner == slot and check == zlib.crc32(header[: _BODY.size], seed) else None
