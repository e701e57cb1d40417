"""What is right in a space that many processes use at once: which version of each key may be served."""

from __future__ import annotations

import mmap

import forebay

SIZES = (100, 3_000, 20_000, 60_000, 400_000)


def version(key: int, number: int) -> bytes:
    head = f"{key}:{number:08d}:".encode()
    return head + bytes([number % 251]) * SIZES[key % len(SIZES)]


class Versions:
    """What forked processes know of so many keys, whoever is killed: which version of each was begun, and which one is stored for sure.
    One thread at a time writes a key; all of them read it."""

    def __init__(self, keys: int) -> None:
        self._words = memoryview(mmap.mmap(-1, 16 * keys)).cast("Q")

    def put(self, space: forebay.Space, key: int) -> None:
        begun = self._words[2 * key] + 1
        self._words[2 * key] = begun
        if space.put(str(key), version(key, begun)):
            self._words[2 * key + 1] = begun

    def get(self, space: forebay.Space, key: int, seen: dict[int, int] | None = None) -> None:
        """None, for what is evicted or lost, or a whole version: none that is older than what was stored when this call began, or than
        what was ``seen``. With None as ``seen``: any version."""
        least = max(seen.get(key, 0), self._words[2 * key + 1]) if seen is not None else 0
        data = space.get(str(key))
        if data is None:
            return
        found = int(bytes(data).split(b":", 2)[1])
        assert bytes(data) == version(key, found)
        assert least <= found <= self._words[2 * key], f"version {found} of {key}, of {least} to {self._words[2 * key]}"
        if seen is not None:
            seen[key] = found
