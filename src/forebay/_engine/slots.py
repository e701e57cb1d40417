"""The table of slots: for each entry its id, when it was last used and last validated, mapped by every process.

A chunk file holds 65,536 records of four aligned 8-byte words after one page of header. Chunks are allocated whole and never
shrink, so a mapping stays good as long as anybody holds it. Only whole words are stored: those do not tear.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from forebay._engine.layout import Root
from forebay._kernel import host, mappings
from forebay.errors import CacheFault

RECORDS = 65_536
ID, USED, VALIDATED = 0, 1, 2
_MAGIC = int.from_bytes(b"FBSLOTS1", "little")
_EVICTIONS, _INTENT, _INTENDED = 2, 3, 4  # in chunk 0, after the magic and the root's id
_HEADER = 4096 // 8
_WORDS = 4
_SIZE = 4096 + RECORDS * _WORDS * 8


class Slots:
    """The table of one root. Callable from any thread and, mappings being inherited, after a fork.

    A slot's words may be stored by any process at any time; who may store an id is said in `catalog`. Every method raises
    `CacheFault` where the table lacks the slot's chunk or is another root's, and OSError where the disk fails.
    """

    _chunks: dict[int, tuple[memoryview, int, int]]  # chunk -> its words, st_dev, st_ino; only grows

    def __init__(self, root: Root) -> None:
        self._root = root
        self._chunks = {}

    def ensure(self, slot: int) -> None:
        """Make the chunk of ``slot`` if there is none. By many processes at once; whole or not at all."""
        chunk = slot // RECORDS
        if chunk not in self._chunks:
            self._root.install(self._path(chunk), self._fill)
            self._words(chunk)

    def remove_foreign(self) -> None:
        """Remove the chunks that are not this root's: it lost its FORMAT, and got a new one. Caller: holds the writer lock."""
        for chunk in [int(name) for name in os.listdir(self._root.slots_dir) if name.isdigit()]:
            try:
                self._map(chunk)
            except CacheFault:
                host.unlink(self._path(chunk))

    def record(self, slot: int) -> tuple[memoryview, int]:
        """``(words, base)``: ``words[base + ID]``, ``words[base + USED]``, ``words[base + VALIDATED]`` are the slot's."""
        chunk, index = divmod(slot, RECORDS)
        return self._words(chunk), _HEADER + index * _WORDS

    def evictions(self) -> tuple[memoryview, int]:
        """``(words, index)``: ``words[index]`` changes with every eviction in the root."""
        return self._words(0), _EVICTIONS

    def bump_evictions(self) -> None:
        """Tell all processes that an entry is gone. Needs no lock: the clock gives each eviction a value of its own, where a count
        that two processes raise at once would come back to what a third one has seen."""
        host.set_word(self._words(0), _EVICTIONS, host.now_ns())

    def intent(self) -> range:
        """The ids of entries whose files are being written under the writer lock."""
        words = self._words(0)
        first = words[_INTENT]
        return range(first, first + words[_INTENDED]) if first else range(0)

    def set_intent(self, ids: range) -> None:
        """Caller: holds the writer lock."""
        words = self._words(0)
        if ids:
            host.set_word(words, _INTENDED, len(ids))  # first: the other word says that there is an intent
        host.set_word(words, _INTENT, ids.start if ids else 0)

    def id_of(self, slot: int) -> int:
        """The id of the entry that lives in ``slot``; 0: none."""
        return self._get(slot, ID)

    def set_id(self, slot: int, id: int) -> None:
        """Let the entry ``id`` live in ``slot``. Caller: holds the writer lock."""
        words, base = self.record(slot)
        host.set_word(words, base + ID, id)

    def settle(self, slot: int, id: int, ns: int) -> None:
        """Let the entry ``id``, used and validated at ``ns``, live in ``slot``. Caller: holds the writer lock."""
        self.ensure(slot)
        words, base = self.record(slot)
        words[base + USED] = words[base + VALIDATED] = ns
        host.set_word(words, base + ID, id)

    def clear(self, slot: int, id: int) -> bool:
        """Empty ``slot`` if the entry ``id`` lives there. Caller: holds the writer lock, so that nobody stores in between."""
        words, base = self.record(slot)
        if words[base + ID] != id:
            return False
        host.set_word(words, base + ID, 0)
        return True

    def used(self, slot: int) -> int:
        """When the slot's entry was last used, in ns since 1970."""
        return self._get(slot, USED)

    def touch(self, slot: int, ns: int) -> None:
        """Say that the slot's entry was used at ``ns``. Does nothing in a read-only root."""
        self._put(slot, USED, ns)

    def validated(self, slot: int) -> int:
        """When the slot's entry was last seen to be the remote's, in ns since 1970; 0: ask."""
        return self._get(slot, VALIDATED)

    def set_validated(self, slot: int, ns: int) -> None:
        """Say that the slot's entry was validated at ``ns``. Does nothing in a read-only root."""
        self._put(slot, VALIDATED, ns)

    def used_many(self, slots: Sequence[int]) -> list[int]:
        """`used` of each of ``slots``, fast for many."""
        columns: dict[int, Sequence[int]] = {}
        many = len(slots) > 1000  # a list of a chunk's ticks takes 1 ms, and is three times as fast to look into
        for chunk in {slot // RECORDS for slot in slots}:
            column = self._words(chunk)[_HEADER + USED :: _WORDS]
            columns[chunk] = column.tolist() if many else column
        return [columns[slot // RECORDS][slot % RECORDS] for slot in slots]

    def is_same(self) -> bool:
        """Whether the files that were mapped still lie in the root. Two system calls a chunk."""
        for chunk, (_, device, inode) in list(self._chunks.items()):
            try:
                found = self._path(chunk).lstat()
            except FileNotFoundError:
                return False
            if (found.st_dev, found.st_ino) != (device, inode):
                return False
        return True

    def _get(self, slot: int, word: int) -> int:
        words, base = self.record(slot)
        return int(words[base + word])

    def _put(self, slot: int, word: int, value: int) -> None:
        if not self._root.read_only:
            words, base = self.record(slot)
            words[base + word] = value  # a touch: no crash point, whatever it leaves is right

    def _path(self, chunk: int) -> Path:
        return self._root.slots_dir / f"{chunk:03d}"

    def _fill(self, fd: int) -> None:
        host.allocate(fd, 0, _SIZE)
        host.pwrite(fd, _MAGIC.to_bytes(8, "little") + self._root.id.to_bytes(8, "little"), 0)

    def _words(self, chunk: int) -> memoryview:
        try:
            return self._chunks[chunk][0]
        except KeyError:
            # Two threads may both map it: the first one's stays, and the other's is unmapped with its last view.
            return self._chunks.setdefault(chunk, self._map(chunk))[0]

    def _map(self, chunk: int) -> tuple[memoryview, int, int]:
        path, writable = self._path(chunk), not self._root.read_only
        try:
            fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise CacheFault(f"{path} is missing: the slots must be made anew", path=str(path)) from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != _SIZE:
                raise CacheFault(f"{path} has {found.st_size} bytes where {_SIZE} are right", path=str(path))
            words = mappings.words(mappings.map_file(fd, _SIZE, writable=writable))
        finally:
            os.close(fd)
        if (words[0], words[1]) != (_MAGIC, self._root.id):
            raise CacheFault(f"{path} belongs to another root", path=str(path))
        return words, found.st_dev, found.st_ino
