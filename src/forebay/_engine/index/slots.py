"""The table of slots: for each entry its id, its times of last use and validation, and its space; mapped by every process.

A chunk file holds 65,536 records of four aligned 8-byte words after one page of header. Chunks are allocated whole and never shrink, so a
mapping stays valid as long as it exists. Only whole words are stored, so readers never see half of one."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from forebay._engine.files.layout import SLOTS_MAGIC, Root
from forebay._engine.index.clock import Clock
from forebay._kernel import host, mappings
from forebay._kernel.below import LinkInTheWay, NoPlainFile
from forebay.errors import CacheFault

RECORDS = 65_536
ID, USED, VALIDATED, SPACE = 0, 1, 2, 3
# in chunk 0, after the magic and the root's id; of the clock three words, of the limits four
_EVICTIONS, _INTENT, _INTENDED, _CLOCK, _LIMITS = 2, 3, 4, 5, 8
_NO_LIMITS = 0, 0
_LIMITS_MARK = int.from_bytes(b"FBLIMITS", "little")
_MOST_INTENDED, _NOTHING_INTENDED = 1 << 16, range(0)
_HEADER = 4096 // 8
_WORDS = 4
_SIZE = 4096 + RECORDS * _WORDS * 8


class SlotsBroken(CacheFault):
    """A part of the table is lost or damaged: it can be recreated from the catalog."""


class SlotsReplaced(SlotsBroken):
    """The table in the root is not the one that was mapped, or is missing: stores to the mapped one reach no other process."""


class Slots:
    """The table of one root. Callable from any thread and, mappings being inherited, after a fork.

    Any process may store to a slot's words at any time; `catalog` defines which one may store an id. Every method raises `SlotsBroken`
    where the slot's chunk is missing or another root's, and OSError where the disk fails."""

    _chunks: dict[int, tuple[memoryview, int, int]]  # chunk -> its words, st_dev, st_ino

    def __init__(self, root: Root) -> None:
        self._root = root
        self._chunks = {}
        self._changed = 0  # when the directory was changed, as of the last check
        self._place = str(root.slots_dir)
        self.clock = Clock(self, writable=not root.read_only)

    def clock_words(self) -> tuple[memoryview, int]:
        """See `clock.Table`."""
        return self._words(0), _CLOCK

    def ensure(self, slot: int) -> None:
        """Make the chunk of ``slot`` if there is none. By many processes at once; whole or not at all."""
        chunk = slot // RECORDS
        if chunk not in self._chunks:
            self._root.install(self._path(chunk), self._fill)
            self._words(chunk)

    def is_there(self, chunk: int) -> bool:
        """Whether anything has the name of this chunk."""
        return os.path.lexists(self._path(chunk))

    def is_whole(self, chunk: int) -> bool:
        """Whether this chunk is there, and this root's."""
        try:
            self._words(chunk)
        except SlotsBroken:
            return False
        return True

    def remake(self, chunk: int, live: Iterable[tuple[int, int, int]]) -> None:
        """Recreate a lost or damaged chunk: ``live`` are the slots in it, each with its entry's id and space. Times of use are lost.

        Caller: holds the writer lock. Raises `CacheFault` where a non-empty directory has its name."""
        now = self.clock.now()

        def fill(fd: int) -> None:
            self._fill(fd)
            for slot, id, space in live:
                record = b"".join(word.to_bytes(8, "little") for word in (id, now, 0, space))
                host.pwrite(fd, record, 4096 + (slot - chunk * RECORDS) * _WORDS * 8)

        self._chunks.pop(chunk, None)
        self._root.files.mkdir(self._root.slots_dir, self._root.dir_mode)
        self._root.files.make_way(self._path(chunk))
        self._root.install(self._path(chunk), fill)
        self._words(chunk)

    def record(self, slot: int) -> tuple[memoryview, int]:
        """``(words, base)``: ``words[base + ID]``, ``words[base + USED]``, ``words[base + VALIDATED]`` are the slot's."""
        mapped = self._chunks.get(slot // RECORDS)
        words = mapped[0] if mapped is not None else self._words(slot // RECORDS)
        return words, _HEADER + slot % RECORDS * _WORDS

    def evictions(self) -> tuple[memoryview, int]:
        """``(words, index)``: ``words[index]`` changes with every eviction in the root."""
        return self._words(0), _EVICTIONS

    def bump_evictions(self) -> None:
        """Tell all processes that an entry is gone. Needs no lock: the clock gives each eviction a value of its own, while a counter
        that two processes increment at once could return to a value that a third one has seen."""
        host.set_word(self._words(0), _EVICTIONS, time.monotonic_ns())

    def intent(self) -> range:
        """The ids of entries whose files are being written under the writer lock."""
        words = self._words(0)
        first = words[_INTENT]
        if not first:
            return _NOTHING_INTENDED
        count = words[_INTENDED]  # no transaction writes more: a larger count is not Forebay's
        return range(first, first + count) if count <= _MOST_INTENDED else _NOTHING_INTENDED

    def set_intent(self, ids: range) -> None:
        """Caller: holds the writer lock."""
        words = self._words(0)
        if ids:
            host.set_word(words, _INTENDED, len(ids))  # first: the other word says that there is an intent
        host.set_word(words, _INTENT, ids.start if ids else 0)

    def limits(self) -> tuple[int, int] | None:
        """The limits on transfers, for all processes: bytes a second from remotes, and connections to a host; 0: no limit. None where the
        words are damaged, or one of them is being changed."""
        words = self._words(0)
        packed = words[_LIMITS]
        if not packed:
            return _NO_LIMITS
        if words[_LIMITS + 1] != packed ^ _LIMITS_MARK:
            return None
        return packed >> 16, packed & 0xFFFF

    def set_limits(self, rate: int, connections: int) -> None:
        """Set what `limits` returns. Caller: holds the writer lock."""
        words, packed = self._words(0), rate << 16 | connections
        if words[_LIMITS] != packed or (packed and words[_LIMITS + 1] != packed ^ _LIMITS_MARK):
            host.set_word(words, _LIMITS + 1, packed ^ _LIMITS_MARK)
            host.set_word(words, _LIMITS, packed)

    def limit_words(self) -> tuple[memoryview, int]:
        """``(words, index)``: two words that processes store to without a lock, see `limits.NodeLimits`."""
        return self._words(0), _LIMITS + 2

    def id_of(self, slot: int) -> int:
        """The id of the entry that lives in ``slot``; 0: none."""
        return self._get(slot, ID)

    def ids(self, chunk: int) -> list[int]:
        """`id_of` each slot of a chunk."""
        ids: list[int] = self._words(chunk)[_HEADER + ID :: _WORDS].tolist()
        return ids

    def set_id(self, slot: int, id: int) -> None:
        """Let the entry ``id`` live in ``slot``. Caller: holds the writer lock."""
        words, base = self.record(slot)
        host.set_word(words, base + ID, id)

    def settle(self, slot: int, id: int, used: int, validated: int, space: int) -> None:
        """Let the entry ``id`` of a space, used and validated then, live in ``slot``. Caller: holds the writer lock."""
        if slot // RECORDS not in self._chunks:
            self.ensure(slot)
        words, base = self.record(slot)
        words[base + USED], words[base + VALIDATED], words[base + SPACE] = used, validated, space
        host.set_word(words, base + ID, id)

    def clear(self, slot: int, id: int) -> bool:
        """Empty ``slot`` if it holds the entry ``id``. Caller: holds the writer lock, so that no process stores in between."""
        words, base = self.record(slot)
        if words[base + ID] != id:
            return False
        host.set_word(words, base + ID, 0)
        return True

    def used(self, slot: int) -> int:
        """When the slot's entry was last used, in ns of the `clock`. What is of the future was damaged: 0, as if it never had been."""
        return self._if_past(slot, USED)

    def touch(self, slot: int, ns: int) -> None:
        """Record that the slot's entry was used at ``ns`` of the `clock`. Does nothing in a read-only root."""
        self._put(slot, USED, ns)

    def validated(self, slot: int) -> int:
        """When the remote last confirmed the slot's entry as current, in ns of the `clock`; 0: never. A time in the future counts as
        never."""
        return self._if_past(slot, VALIDATED)

    def stamp(self, slot: int) -> int:
        """The stored time of the last validation, valid or not: another value means another validation."""
        return self._get(slot, VALIDATED)

    def set_validated(self, slot: int, ns: int) -> None:
        """Record that the slot's entry was validated at ``ns`` of the `clock`. Does nothing in a read-only root."""
        self._put(slot, VALIDATED, ns)

    def space(self, slot: int) -> int:
        """The id of the space of the slot's entry; 0: written by a version that did not store it."""
        return self._get(slot, SPACE)

    def set_space(self, slot: int, space: int) -> None:
        """Set the space of the slot's next entry. Caller: holds the writer lock."""
        self._put(slot, SPACE, space)

    def stripe(self, number: int, stripes: int, top: int) -> Iterator[tuple[range, list[int]]]:
        """Each ``stripes``-th slot below ``top``, and when it was last used: an even sample of the table, fast for many."""
        for chunk in range(-(-top // RECORDS)):
            first, end = chunk * RECORDS, min((chunk + 1) * RECORDS, top)
            first += (number - first) % stripes
            if first < end:
                base = _HEADER + first % RECORDS * _WORDS + USED
                stop = _HEADER + (end - chunk * RECORDS) * _WORDS
                yield range(first, end, stripes), self._words(chunk)[base : stop : _WORDS * stripes].tolist()

    def times(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """`used` and `validated` of each of ``slots``, fast for many."""
        chunks = {chunk: self._words(chunk) for chunk in {slot // RECORDS for slot in slots}}
        places = ((chunks[slot // RECORDS], _HEADER + slot % RECORDS * _WORDS) for slot in slots)
        times = [(words[base + USED], words[base + VALIDATED]) for words, base in places]
        now = self.clock.look()  # after the words: a use in between must not look like the future
        return [(used if used <= now else 0, validated if validated <= now else 0) for used, validated in times]

    def used_many(self, slots: Sequence[int]) -> list[int]:
        """`used` of each of ``slots``, fast for many."""
        columns: dict[int, Sequence[int]] = {}
        many = len(slots) > 1000  # making a list of a chunk's ticks takes 1 ms, and makes each access three times as fast
        for chunk in {slot // RECORDS for slot in slots}:
            column = self._words(chunk)[_HEADER + USED :: _WORDS]
            columns[chunk] = column.tolist() if many else column
        ticks = [columns[slot // RECORDS][slot % RECORDS] for slot in slots]
        now = self.clock.look()  # after the ticks: a later one is not valid
        return [tick if tick <= now else 0 for tick in ticks]

    def are_same(self) -> bool:
        """`is_same`, for each transaction: checks closely only if the directory's names changed since the last check."""
        try:
            changed = os.stat(self._place).st_mtime_ns
        except FileNotFoundError:
            return False
        if changed == self._changed:
            return True
        if not self.is_same():
            return False
        self._changed = changed
        return True

    def check_same(self) -> None:
        """Raises `SlotsReplaced` unless `are_same`."""
        if not self.are_same():
            raise SlotsReplaced(f"the table of slots in {self._root.slots_dir} was replaced", path=str(self._root.slots_dir))

    def forget(self) -> None:
        """Map the table again when it is next needed. Existing views keep showing the old one."""
        self._chunks.clear()

    def is_same(self) -> bool:
        """Whether the files that were mapped still lie in the root. Two system calls a chunk."""
        for chunk, (_, device, inode) in list(self._chunks.items()):
            try:
                status = self._root.files.lstat(self._path(chunk))
            except FileNotFoundError:
                return False
            if (status.st_dev, status.st_ino) != (device, inode):
                return False
        return True

    def _get(self, slot: int, word: int) -> int:
        words, base = self.record(slot)
        return int(words[base + word])

    def _if_past(self, slot: int, word: int) -> int:
        moment = self._get(slot, word)
        return moment if self.clock.is_past(moment) else 0

    def _put(self, slot: int, word: int, value: int) -> None:
        if not self._root.read_only:
            words, base = self.record(slot)
            words[base + word] = value  # a touch: no crash point, whatever it leaves is right

    def _path(self, chunk: int) -> Path:
        return self._root.slots_dir / f"{chunk:03d}"

    def _fill(self, fd: int) -> None:
        host.allocate(fd, 0, _SIZE)
        host.pwrite(fd, SLOTS_MAGIC.to_bytes(8, "little") + self._root.id.to_bytes(8, "little"), 0)

    def _words(self, chunk: int) -> memoryview:
        try:
            return self._chunks[chunk][0]
        except KeyError:
            # Two threads may both map it: the first one's stays, and the other's is unmapped with its last view.
            return self._chunks.setdefault(chunk, self._map(chunk))[0]

    def _map(self, chunk: int) -> tuple[memoryview, int, int]:
        path, writable = self._path(chunk), not self._root.read_only
        try:
            fd = self._root.files.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except FileNotFoundError as error:
            raise SlotsBroken(f"{path} is missing", path=str(path)) from error
        except (NoPlainFile, LinkInTheWay) as error:
            raise SlotsBroken(f"{path} is not a plain file", path=str(path)) from error
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise SlotsBroken(f"{path} is a symbolic link", path=str(path)) from error
        try:
            status = os.fstat(fd)
            if status.st_size != _SIZE:
                raise SlotsBroken(f"{path} has {status.st_size} bytes where {_SIZE} are right", path=str(path))
            words = mappings.words(mappings.map_file(fd, _SIZE, writable=writable))
        finally:
            os.close(fd)
        if (words[0], words[1]) != (SLOTS_MAGIC, self._root.id):
            raise SlotsBroken(f"{path} belongs to another root", path=str(path))
        return words, status.st_dev, status.st_ino
