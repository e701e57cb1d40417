"""Contents that others choose: nobody finds two that have one digest."""

from __future__ import annotations

import random
import struct

import pytest
import xxhash

import forebay
from forebay.tasks.hashing import LEAF, digest

SECRET = bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1c")
"""The beginning of the constant that xxh3 mixes its input with."""


def colliding() -> tuple[bytes, bytes]:
    """Two contents that xxh3 does not tell apart: of a word whose lower half equals that of the constant, xxh3 keeps only its sum with
    other words, and one of these can be less by as much as another is more."""
    found = []
    for more in (0, 1):
        data = bytearray(random.Random(1).randbytes(1024))
        for at, secret, high in ((0, SECRET[:8], 7 + more), (64, SECRET[8:], 9 - more)):
            word = struct.unpack("<Q", secret)[0] & 0xFFFFFFFF | high << 32
            data[at : at + 8] = struct.pack("<Q", word)
        found.append(bytes(data))
    return found[0], found[1]


def test_contents_that_xxh3_does_not_tell_apart_are_told_apart() -> None:
    one, other = colliding()
    assert one != other
    assert xxhash.xxh3_128_digest(one) == xxhash.xxh3_128_digest(other)
    assert digest(one) != digest(other)


@pytest.mark.parametrize("kind", ["bytes", "array", "list", "dict"])
def test_a_call_gets_no_output_of_another_call(cache: forebay.Cache, kind: str) -> None:
    numpy = pytest.importorskip("numpy")
    make = {
        "bytes": bytes,
        "array": lambda data: numpy.frombuffer(data, "u1"),
        "list": lambda data: list(struct.unpack(f"<{len(data) // 8}q", data)),
        "dict": lambda data: {"weights": bytearray(data)},
    }[kind]
    calls = []

    @cache.tasks("tasks").cached
    def total(value: object) -> int:
        calls.append(value)
        return len(calls)

    assert [total(make(data)) for data in (*colliding(), *colliding())] == [1, 2, 1, 2]


@pytest.mark.parametrize("size", [0, 1, 2 * LEAF, 2 * LEAF + 1, 3 * LEAF, 3 * LEAF + 5])
def test_a_digest_is_of_all_bytes_in_their_order(size: int) -> None:
    data = bytearray(random.Random(size).randbytes(size))
    first = digest(data)
    assert digest(bytes(data)) == digest(memoryview(data)) == first
    assert len(first) == 16
    for at in {0, size // 2, size - 1} & set(range(size)):
        data[at] ^= 1
        assert digest(data) != first
        data[at] ^= 1
    if size >= 3 * LEAF:
        assert digest(data[LEAF : 2 * LEAF] + data[:LEAF] + data[2 * LEAF :]) != first
