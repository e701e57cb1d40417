"""The format of one sample in a segment, and of the index word that points to it. Pure functions.

    index word   segment << 40 | offset / 16, one aligned 8-byte store; 0: the slot is empty
    length hint  40 bits that prove it, length of the payload; of no use for longer payloads, and in another boot of the machine
    record       header of 32 bytes, payload
    header       slot, length, xxh3-64 of the payload (8 bytes each), boot tag, CRC-32 of all before it (4 bytes each)

A record is accepted only if its header's checksum is right, it names this slot of this pack, and it ends within the segment. Its writer,
and whoever accepts it, stores a length hint: other processes believe the hint, and touch no page of the record.
Payloads start at multiples of 64, so that arrays in them are aligned."""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Sequence

import xxhash

from forebay._kernel import host
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


def hint_key(pack: int) -> int:
    """What the hints of a pack are mixed with: those of another pack, and of another boot, prove nothing."""
    return boot_tag() << 32 | seed_of(pack)


def length_hint(key: int, word: int, length: int) -> int:
    """A word that says how long the record is that an index word names; 0 for a length that does not fit. ``key``: see `hint_key`.

    It is a hint that proves itself: `hash` mixes numbers, in the same way in each process."""
    return 0 if length > HINTED else (hash((key, word, length)) & PROOFS) << HINT_BITS | length


def footprint(length: int) -> int:
    """Bytes from the start of a record of ``length`` bytes to the start of the next one."""
    return -(-(HEADER + length) // ALIGN) * ALIGN


@functools.cache
def boot_tag() -> int:
    """Which boot of the machine this is, in 32 bits: what was written before it may be less than what was stored."""
    return xxhash.xxh32_intdigest(host.boot_id().encode())


def seed_of(pack: int) -> int:
    """The initial value of the checksums of a pack's headers: a header of another pack does not match."""
    return zlib.crc32(pack.to_bytes(8, "little"))


def header_of(seed: int, slot: int, parts: Sequence[Buffer], length: int) -> bytes:
    """The header of the record of ``slot``, whose payload is ``parts``, of ``length`` bytes together."""
    if len(parts) == 1:
        digest = xxhash.xxh3_64_intdigest(parts[0])
    else:
        whole = xxhash.xxh3_64()
        for part in parts:
            whole.update(part)
        digest = whole.intdigest()
    body = _BODY.pack(slot, length, digest, boot_tag())
    return body + zlib.crc32(body, seed).to_bytes(4, "little")


def length_of(segment: memoryview, offset: int, seed: int, slot: int, *, verify: bool = False) -> int | None:
    """The length of the payload, which starts `HEADER` bytes after ``offset``; None if there is no sound record of this slot.

    The payload is compared with its checksum if ``verify``, and always if it was written in another boot of the machine."""
    start = offset + HEADER
    if start > len(segment):
        return None
    owner, length, digest, boot, check = _HEADER.unpack_from(segment, offset)
    if owner != slot or start + length > len(segment) or check != zlib.crc32(segment[offset : offset + _BODY.size], seed):
        return None
    if (verify or boot != boot_tag()) and xxhash.xxh3_64_intdigest(segment[start : start + length]) != digest:
        return None
    return int(length)


def is_header(head: bytes, seed: int, slot: int) -> bool:
    """Whether these bytes are the header of a record of this slot."""
    if len(head) < HEADER:
        return False
    owner, _, _, _, check = _HEADER.unpack(head)
    return bool(owner == slot and check == zlib.crc32(head[: _BODY.size], seed))
