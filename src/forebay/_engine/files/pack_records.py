"""The format of one sample in a segment, and of the index word that points to it. Pure functions.

    index word   segment << 40 | offset / 16, one aligned 8-byte store; 0: the slot is empty
    length hint  40 bits that prove it, length of the payload; of no use for longer payloads, and in another epoch of the root
    record       header of 32 bytes, payload
    header       slot, length, xxh3-64 of the payload (8 bytes each), tag of the epoch, CRC-32 of all before it (4 bytes each)

A record is accepted only if its header's checksum is right, it names this slot of this pack, and it ends within the segment. Its writer,
and whoever accepts it, stores a length hint: other processes believe the hint, and touch no page of the record.
Payloads start at multiples of 64, so that arrays in them are aligned."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import xxhash

from forebay._model import Buffer

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

    It is a hint that proves itself: `hash` mixes numbers, in the same way in each process."""
    return 0 if length > HINTED else (hash((key, word, length)) & PROOFS) << HINT_BITS | length


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
