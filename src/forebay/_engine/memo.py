"""What this process remembers of entries, so that a hit costs no lock and no system call.

A remembered entry is good while its slot still holds its id. The memo lets go of evicted entries at the next call, at most once
a second: a mapping that stays would keep the bytes of an unlinked file on the disk.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

from forebay._engine.slots import Slots
from forebay._kernel import mappings
from forebay._model import Entry

MAX_BYTES = 256 << 20
LOOK_AGAIN = 1_000_000_000


class Remembered:
    """An entry and its bytes. ``words[base]`` is the slot's id, ``+1`` last used, ``+2`` validated (nanoseconds since 1970)."""

    __slots__ = ("base", "entry", "id", "names", "size", "view", "words")

    def __init__(self, entry: Entry, view: memoryview, words: memoryview, base: int) -> None:
        self.entry, self.view, self.words, self.base = entry, view, words, base
        self.id, self.size = entry.id, entry.size
        self.names: list[tuple[str, str]] = []

    def is_current(self) -> bool:
        return bool(self.words[self.base] == self.id)


class Memo:
    """Per process: (space, name) to `Remembered`. Several names may lead to one entry: a URL as written, and its key."""

    def __init__(self, slots: Slots, max_bytes: int = MAX_BYTES, max_count: int | None = None) -> None:
        self._slots, self._max_bytes = slots, max_bytes
        self._max_count = max_count or max(mappings.max_maps() // 4, 64)
        self._mutex = threading.Lock()  # guards what follows; the hit path reads `known` without it
        self.known: dict[tuple[str, str], Remembered] = {}
        self._bytes = 0
        self._count = 0
        self._evictions = -1
        self._looked = 0

    def get(self, space: str, name: str) -> Remembered | None:
        """What is remembered under this name, while it is current."""
        found = self.known.get((space, name))
        return found if found is not None and found.words[found.base] == found.id else None

    def add(self, space: str, name: str, entry: Entry, view: memoryview) -> Remembered:
        """Remember an entry; one too large for the memo is given back without being kept."""
        words, base = self._slots.record(entry.slot)
        found = Remembered(entry, view, words, base)
        if found.size > self._max_bytes // 4:
            return found
        with self._mutex:
            self._forget_locked(self.known.get((space, name)))
            if self._bytes + found.size > self._max_bytes or self._count >= self._max_count:
                self._shrink_locked()
            self.known[space, name] = found
            found.names.append((space, name))
            self._bytes += found.size
            self._count += 1
        return found

    def alias(self, space: str, name: str, found: Remembered) -> None:
        """Let another name lead to what is remembered."""
        with self._mutex:
            if found.names and (space, name) not in self.known:
                self.known[space, name] = found
                found.names.append((space, name))

    def forget(self, space: str, name: str) -> None:
        """Let go of what this name leads to."""
        with self._mutex:
            self._forget_locked(self.known.get((space, name)))

    def let_go(self, now: int) -> None:
        """Drop what was evicted meanwhile, if anything was, at most once a second."""
        if now - self._looked < LOOK_AGAIN:
            return
        self._looked = now
        words, index = self._slots.evictions()
        evictions = words[index]
        if evictions == self._evictions:
            return
        with self._mutex:
            self._evictions = evictions
            for found in [f for f in self._all_locked() if not f.is_current()]:
                self._forget_locked(found)

    def restart(self, slots: Slots) -> None:
        """Forget everything; go on with another table of slots. `known` stays the same object: the hit path holds it."""
        with self._mutex:
            for found in self.known.values():
                found.names = []
            self.known.clear()
            self._slots, self._bytes, self._count, self._evictions = slots, 0, 0, -1

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()

    def _all_locked(self) -> Iterator[Remembered]:
        return iter({id(found): found for found in self.known.values()}.values())

    def _forget_locked(self, found: Remembered | None) -> None:
        if found is None or not found.names:
            return
        for name in found.names:
            self.known.pop(name, None)
        found.names = []
        self._bytes -= found.size
        self._count -= 1

    def _shrink_locked(self) -> None:
        """Down to three quarters: first what is dead, then what was used longest ago by anybody."""
        every = sorted(self._all_locked(), key=lambda f: f.words[f.base + 1] if f.is_current() else 0)
        for found in every:
            if self._bytes <= self._max_bytes * 3 // 4 and self._count <= self._max_count * 3 // 4 and found.is_current():
                break
            self._forget_locked(found)
