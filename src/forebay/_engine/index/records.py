"""What all processes know of the entries without the catalog: for each live entry one record, in mapped memory.

``shared/records-NNN``   a page of header, then a record of 16 words for each of 8,192 slots
``shared/keys``          a page of header, then buckets: 32 bits of a key's hash, and a slot. Open addressing, after Knuth, volume 3, 6.4

The catalog says what exists; a record is a copy of a row, with the times of use and of validation. Its id is stored after the commit,
last of its words, and cleared before the commit that ends the entry, under the writer lock. Any process may store the time of use, and that
the entry is sound, at any time: a store that comes late moves the rank of another entry, or costs one check.

A reader believes a record that *proves itself*: it has the whole hash of the key, and its words belong together. The hash is keyed with a
secret of the head, since it alone decides whose bytes are served. A bucket or a record that is stale, torn, full or missing sends the
reader to the catalog, and the reader mends it.

The proof is the same in each process, whatever its Python: an XXH3 of the words, since `hash` promises nothing. It does not cover the
three words that other processes store to. So that no reader takes the time of validation of another entry for that of this one, the words
lie between two fences when they are stored: after the id of the entry before is gone, and before that of the new one is there. A reader
loads the time of validation while the record has the id.

A record also says that the entry was published or verified in this epoch: one process of the node verifies it, not each."""

from __future__ import annotations

import functools
import os
import struct
import time
from _blake2 import blake2b  # of hashlib, which would load OpenSSL into every process
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from forebay._engine.files.blobs import mark_of, seal_of
from forebay._engine.files.layout import PAGE, Root, is_suffix
from forebay._engine.files.shared_table import HEADER, SharedTable
from forebay._engine.index.head import SharedBroken as SharedBroken
from forebay._engine.index.head import SharedHead, SharedReplaced
from forebay._engine.index.values import ValueCells
from forebay._kernel import fences, host, locks, mappings
from forebay._logs import logger
from forebay._model import Buffer, Entry
from forebay.errors import CacheFault

log = logger("forebay.index")

RECORDS = 8192
"""Records of one file."""
ID, USED, VALIDATED, SPACE = 0, 1, 2, 3
"""Words of a record, which `Memo` reads too; then the hash of the key, a proof, what the row has, and that it is sound."""
EXPIRED = 1 << 63
"""Makes the time of an invalidation one of the far future, which counts as never validated."""
BUCKETS = 16_384
"""Buckets of the first table of keys, and of the smallest."""
PROBES = 64
"""Buckets that are looked at for a key; the table has so many more, instead of continuing at its beginning."""
TICK = 100_000_000
"""Nanoseconds after which a file system gives another time, at the latest."""
_WORDS, _HASH, _PROOF, _SOUND = 16, 4, 5, 11
_KEYS_MAGIC = int.from_bytes(b"FBKEYS02", "little")
_MAGIC, _ROOT, _SIZE, _USED, _MOVED = range(5)  # words of the header of the table of keys
_LARGEST = 1 << 30
_KINDS = {"blob": 1, "value": 2, "tree": 3, "pack": 4, "session": 5}
_BLOB, _META = _KINDS["blob"], 16  # of the word of the kind; `_META`: the words of the suffix are the hash of the entry's meta instead
_FOUND = frozenset((1, 2, 1 | _META, 2 | _META))  # what a reader needs no row of

_halves = struct.Struct("<QQ").unpack
_read_record = struct.Struct("6Q40sQ").unpack_from
_times, _facts, _content = struct.Struct("3Q").pack_into, struct.Struct("8Q"), struct.Struct("5Q")
_proof_of = xxhash.xxh3_64_intdigest

EntryHint = tuple[memoryview, int, int, int, int, bool, int, str, tuple[int, int] | None]
"""What the index knows of an entry: the words of its record, and where they begin; its slot, id and size; whether it is a file; the seal
of the file, or the `mark_of` of the value; the suffix of the file; the `meta_hash`, if it has one and no suffix. No named tuple: to make
one takes a tenth of a look-up."""


class _Keys(NamedTuple):
    """A table of keys in use."""

    words: memoryview
    mask: int


class EntryIndex:
    """The records of one root. Callable from any thread and, mappings being inherited, after a fork. Methods raise `SharedBroken` where a
    file is lost, or none of Forebay's, and OSError where the disk fails; `find` and `note` do without."""

    def __init__(self, root: Root, head: SharedHead, budget: Callable[[], int]) -> None:
        """``budget``: returns the budget of the root."""
        self._root, self.head, self.cells = root, head, ValueCells(root, self.id_of, budget)
        self._files: dict[int, memoryview] = {}
        self._identities: dict[str, tuple[int, int]] = {}  # by path, st_dev and st_ino of each
        self._keys: _Keys | None = None
        self._hashes: dict[str, blake2b] = {}  # the state of the hash after the name of a space
        self._last: tuple[str, str, tuple[int, int], dict[str, blake2b]] = "", "", (0, 0), {}
        self._suffixes: dict[tuple[int, int], str | None] = {(0, 0): ""}
        self._epoch = head.number_of(root.epoch)
        self._free: dict[int, None] = {}  # slots that seemed free, each once: looked at again under the writer lock
        self._changed = 0  # when the directory was changed, as of the last check
        self._place = str(root.shared_dir)
        self._none = memoryview(bytearray(8 * _WORDS)).cast("Q")  # the record of a slot that there is not

    # -- looking up ------------------------------------------------------------------------------------------------

    def find(self, space: str, key: str) -> EntryHint | None:
        """What is known of the current entry of a key, if it is a file or a small value that was sound in this epoch."""
        keys = self._keys or self._open_keys()
        if keys is None:
            return None
        try:
            first, second = self._hash(space, key)
        except (CacheFault, OSError):
            return None
        words, mask = keys
        tag, bucket = first >> 32, HEADER + (first & mask)
        end = bucket + PROBES
        while bucket < end and (word := words[bucket]):
            if word >> 32 == tag:
                hint = self._read((word & 0xFFFFFFFF) - 1, first, second)
                if hint is not None:
                    return hint
            bucket += 1
        if not words[_MOVED]:
            return None
        self._keys = None
        keys = self._open_keys()
        return self.find(space, key) if keys is not None and not keys.words[_MOVED] else None

    def _read(self, slot: int, first: int, second: int) -> EntryHint | None:
        """What the record of a slot says, if it is of the key with this hash."""
        try:
            words, base = self.record(slot)
        except (CacheFault, OSError):
            return None
        id, _, _, _, whole, proof, content, sound = _read_record(words, 8 * base)
        if whole != first or proof != second ^ _proof_of(content, id) or sound != self._epoch ^ id or not id:
            return None
        size, _, kind, suffix, more = _content.unpack(content)
        form = kind & 0xFF
        if form not in _FOUND:
            return None
        if form & _META:
            return words, base, slot, id, size, form == _BLOB | _META, kind >> 8, "", (suffix, more)
        try:
            name = self._suffixes[suffix, more]
        except KeyError:
            name = self._suffix(suffix, more)
        return (words, base, slot, id, size, form == _BLOB, kind >> 8, name, None) if name is not None else None

    def _suffix(self, suffix: int, more: int) -> str | None:
        """The suffix in a record; None if no file of ours has it."""
        name = (suffix.to_bytes(8, "little") + more.to_bytes(8, "little")).rstrip(b"\0").decode("ascii", "replace")
        if len(self._suffixes) > 1000:
            self._suffixes = {(0, 0): ""}
        return self._suffixes.setdefault((suffix, more), name if is_suffix(name) else None)

    def _hash(self, space: str, key: str) -> tuple[int, int]:
        """128 bits of BLAKE2b with the root's secret as its key.

        Whoever makes a list of URLs chooses keys, and the hash alone decides whose bytes are served: a record does not have the key. A
        keyed BLAKE2b is a pseudo-random function: nobody who cannot read the root finds two keys with one hash, and users who can read it
        can read all entries. XXH3 with a secret seed takes half a microsecond less, and promises no such thing."""
        # T1 reads the secret / T2 recovers a deleted root, which has another one / T1 notes what it made: only in what was replaced.
        hashes, last = self._hashes, self._last  # each one value, since threads replace them at any time
        if last[0] == key and last[1] == space and last[3] is hashes:
            return last[2]
        state = (hashes.get(space) or self._begun(space, hashes)).copy()
        state.update(key.encode("utf-8", "surrogatepass"))
        first, second = _halves(state.digest())
        self._last = key, space, (first, second), hashes
        return first, second

    def _begun(self, space: str, hashes: dict[str, blake2b]) -> blake2b:
        keyed = blake2b(space.encode("utf-8", "surrogatepass") + b"\0", key=self.head.secret(), digest_size=16)
        return hashes.setdefault(space, keyed)

    def record(self, slot: int) -> tuple[memoryview, int]:
        """``(words, base)``: ``words[base + ID]``, ``words[base + USED]``, ``words[base + VALIDATED]`` are the slot's; of a slot that there
        is not, words that no other process sees."""
        number = slot // RECORDS
        words = self._files.get(number)
        if words is None:
            words = self._file(number)
        return (words, HEADER + slot % RECORDS * _WORDS) if words is not None else (self._none, 0)

    # -- storing ---------------------------------------------------------------------------------------------------

    def store(self, space: int, entry: Entry, used: int, validated: int, *, is_sound: bool = True) -> None:
        """Let the entry's slot have its record. Caller: holds the writer lock, has noted the intent and committed the row; the slot is
        free, or has this entry already."""
        words, base = self.record(entry.slot)
        fences.fence()  # who sees what follows sees that the entry before is gone
        _times(words, 8 * (base + USED), used, validated, space)
        host.step("store", self._root.shared_dir)
        _facts.pack_into(words, 8 * (base + _HASH), *self._facts_of(entry, is_sound=is_sound))
        fences.fence()  # who sees the id sees all of it
        host.set_word(words, base + ID, entry.id)

    def restore(self, space: int, entry: Entry) -> None:
        """`store`, of an entry whose record may be lost, torn, or of another entry: what it says of this one is kept. An entry of which it
        says nothing counts as used now, and as never validated. Caller: as of `store`, and knows that no live entry has the slot."""
        words, base = self.record(entry.slot)
        before = _facts.unpack_from(words, 8 * (base + _HASH))
        is_sound = entry.boot == self._root.epoch or before[-1] == self._epoch ^ entry.id
        used, validated = words[base + USED], words[base + VALIDATED]
        if before[:-1] != self._facts_of(entry, is_sound=is_sound)[:-1]:
            used, validated = self.head.clock.now(), 0
        self.store(space, entry, used, validated, is_sound=is_sound)
        self._lead_to(entry)

    def note(self, entry: Entry, value: bytes | memoryview | None = None) -> None:
        """Let `find` find an entry that was verified just now, while it has its record. ``value``: the bytes of a small value. Needs no
        lock."""
        if self._root.read_only or entry.kind not in ("blob", "value"):
            return
        if value is not None:
            self.cells.put(entry.slot, entry.id, value, is_new=False)
        try:
            words, base = self.record(entry.slot)
            if words[base + ID] == entry.id:
                # P1 looks at the id / P2 evicts, and publishes another entry here / P1 stores: that one proves nothing until it is noted.
                facts, at = self._facts_of(entry, is_sound=True), 8 * (base + _HASH)
                if _facts.unpack_from(words, at) != facts:
                    host.step("note", self._root.shared_dir)
                    _facts.pack_into(words, at, *facts)  # word by word: whatever is left of it is not believed
                self._lead_to(entry)
        except (CacheFault, OSError) as error:
            log.debug("%s is not in the index: %s", entry.name, str(error))

    def note_new(self, several: Sequence[tuple[Entry, bytes | memoryview | None]]) -> None:
        """`note`, for entries whose records were stored just now, each with its bytes if it is a small value."""
        for entry, value in several:
            if value is not None:
                self.cells.put(entry.slot, entry.id, value, is_new=True)
            try:
                self._lead_to(entry)
            except (CacheFault, OSError):
                continue  # a look-up asks the catalog

    def _facts_of(self, entry: Entry, *, is_sound: bool) -> tuple[int, ...]:
        """What a record has of a row, from the hash of its key on."""
        first, second = self._hash(entry.space, entry.key)
        form, mark = _KINDS[entry.kind], 0
        if entry.kind == "blob":
            mark = seal_of(entry.checksum)
        elif entry.kind == "value":
            mark = mark_of(entry.checksum)
        suffix = more = 0
        if entry.suffix:
            suffix, more = _halves(entry.suffix.encode("ascii").ljust(16, b"\0")[:16])
        elif entry.meta:
            form, (suffix, more) = form | _META, meta_hash(entry.meta)
        content = entry.size, entry.charge, form | mark << 8, suffix, more
        proof = second ^ _proof_of(_content.pack(*content), entry.id)
        return first, proof, *content, self._epoch ^ entry.id if is_sound else 0

    def clear(self, slot: int, id: int) -> bool:
        """Empty ``slot`` if it has the entry ``id``; False if it has not. Caller: holds the writer lock, so that no process stores in
        between, and ends the entry in a transaction."""
        if self.id_of(slot) != id:
            return False
        self.head.intend([(id, slot)])
        self.empty(slot, id)
        return True

    def empty(self, slot: int, id: int) -> None:
        """`clear`, of what the intent names already."""
        words, base = self.record(slot)
        if words[base + ID] == id:
            host.set_word(words, base + ID, 0)
            self._free[slot] = None
            self.head.note_free(slot)

    def others(self, entry: Entry) -> list[tuple[int, int]]:
        """Slot and id of the records of other entries to which the key of ``entry`` leads."""
        keys = self._keys or self._open_keys()
        if keys is None or entry.kind not in ("blob", "value"):
            return []
        first, bucket = self._hash(entry.space, entry.key)[0], HEADER
        words, mask = keys
        bucket += first & mask
        end, found = bucket + PROBES, list[tuple[int, int]]()
        while bucket < end and (word := words[bucket]):
            if word >> 32 == first >> 32:
                slot = (word & 0xFFFFFFFF) - 1
                there, base = self.record(slot)
                if there[base + ID] not in (0, entry.id) and there[base + _HASH] == first:
                    found.append((slot, there[base + ID]))
            bucket += 1
        return found

    # -- one record ------------------------------------------------------------------------------------------------

    def id_of(self, slot: int) -> int:
        """The id of the entry that has ``slot``; 0: none."""
        return self._get(slot, ID)

    def used(self, slot: int) -> int:
        """When the slot's entry was last used, in ns of the root's clock. What is of the future was damaged: 0, as if it never had been."""
        return self._if_past(slot, USED)

    def touch(self, slot: int, ns: int) -> None:
        """Record that the slot's entry was used at ``ns`` of the root's clock. Does nothing in a read-only root."""
        self._put(slot, USED, ns)

    def validated(self, slot: int) -> int:
        """When the remote last confirmed the slot's entry as current, in ns of the root's clock; 0: never. A time in the future counts as
        never."""
        return self._if_past(slot, VALIDATED)

    def stamp(self, slot: int) -> int:
        """The stored time of the last validation, valid or not: another value means another validation."""
        return self._get(slot, VALIDATED)

    def set_validated(self, entry: Entry, at: int, began: int) -> None:
        """Record that an entry was validated at that time of the root's clock, by a request that ``began`` then: not if it was invalidated
        since, or has no record any more. An invalidation has `EXPIRED` in its time, and begins last of all.

        Caller: holds the writer lock, under which records get other entries. Without it an invalidation may be undone by a process that
        validates, and the next entry that has the record may be validated once more than needed."""
        words, base = self.record(entry.slot)
        expired = words[base + VALIDATED] ^ EXPIRED  # when it was invalidated, if it was
        if words[base + ID] == entry.id and not began <= expired <= self.head.clock.look():
            words[base + VALIDATED] = at

    def space(self, slot: int) -> int:
        """The id of the space of the slot's entry."""
        return self._get(slot, SPACE)

    def with_times(self, entry: Entry) -> Entry:
        """The entry with its times, in seconds since 1970 as the wall clock now counts them."""
        wall = self.head.clock.wall
        return entry._replace(used=wall(self.used(entry.slot)), validated=wall(self.validated(entry.slot)))

    def _get(self, slot: int, word: int) -> int:
        words, base = self.record(slot)
        return int(words[base + word])

    def _if_past(self, slot: int, word: int) -> int:
        moment = self._get(slot, word)
        return moment if self.head.clock.is_past(moment) else 0

    def _put(self, slot: int, word: int, value: int) -> None:
        if not self._root.read_only:
            words, base = self.record(slot)
            words[base + word] = value  # a touch: no crash point, whatever it leaves is right

    # -- many records ----------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        """How many slots there are."""
        return self.head.files * RECORDS

    def ids(self, number: int) -> list[int]:
        """`id_of` each slot of a file."""
        words = self._file(number)
        return words[HEADER + ID :: _WORDS].tolist() if words is not None else []

    def stripe(self, number: int, stripes: int) -> Iterator[tuple[range, list[int], list[int]]]:
        """Each ``stripes``-th slot, its entry's id, and when it was last used: an even sample of the table, fast for many."""
        for file in range(self.head.files):
            first, end = file * RECORDS, (file + 1) * RECORDS
            first += (number - first) % stripes
            words = self._file(file)
            if first < end and words is not None:
                base, step = HEADER + first % RECORDS * _WORDS, _WORDS * stripes
                yield range(first, end, stripes), words[base + ID :: step].tolist(), words[base + USED :: step].tolist()

    def times(self, slots: Sequence[int]) -> list[tuple[int, int]]:
        """`used` and `validated` of each of ``slots``, fast for many."""
        places = [self.record(slot) for slot in slots]
        times = [(words[base + USED], words[base + VALIDATED]) for words, base in places]
        now = self.head.clock.look()  # after the words: a use in between must not look like the future
        return [(used if used <= now else 0, validated if validated <= now else 0) for used, validated in times]

    def used_many(self, slots: Sequence[int]) -> list[int]:
        """`used` of each of ``slots``."""
        return [used for used, _ in self.times(slots)]

    # -- free slots ------------------------------------------------------------------------------------------------

    def take(self, ids: Sequence[int]) -> list[int]:
        """A free slot for each of some new entries, noted in the intent. Caller: holds the writer lock, and inserts their rows in the
        transaction that runs."""
        slots: list[int] = []
        for _ in ids:
            slot = -1
            while slot < 0:
                if not self._free:
                    self._look_for_free(slots)
                slot = self._free.popitem()[0]
                words, base = self.record(slot)
                if words is self._none or words[base + ID]:
                    slot = -1  # another process has used it
            slots.append(slot)
        self.head.intend(list(zip(ids, slots, strict=True)))
        return slots

    def _look_for_free(self, taken: Sequence[int]) -> None:
        """Find free slots: those that became free lately, else those of the last file, else all; or make a new file. ``taken``: free, but
        not for long, as are those of the intent."""
        head = self.head
        not_free = {*taken, *(slot for _, slot in head.intent())}
        self._free |= {slot: None for slot in set(head.freed()) - not_free if slot < self.slots and not self.id_of(slot)}
        for number in range(head.files - 1, -1, -1):
            if self._free:
                return
            first = number * RECORDS
            free = [slot for slot, id in enumerate(self.ids(number), first) if not id and slot not in not_free]
            self._free |= dict.fromkeys(reversed(free))  # the lowest is taken first
        if not self._free:
            self._create_file(head.files)
            self._free |= dict.fromkeys(range(self.slots - 1, self.slots - RECORDS - 1, -1))

    # -- files -----------------------------------------------------------------------------------------------------

    def create(self) -> None:
        """Have a head, and each file of records, also where some are lost or none of Forebay's. Caller: holds the writer lock. Raises
        `CacheFault` where a directory with files has the name of one."""
        self.forget()
        self.head.create()
        names = (name.removeprefix("records-") for name in self._root.files.names_in(self._root.shared_dir) if name.startswith("records-"))
        files = 1
        for number in sorted(int(name) for name in names if name.isdigit()):
            if number < 2 * files + 8 and self._table_of(number).words() is not None:  # a file far away is none of Forebay's
                files = max(files, number + 1)
        for number in range(files):
            self._table_of(number).create()
        self.head.files = files  # last: others go on meanwhile

    def empty_lost(self) -> None:
        """Empty the records of mapped files that no longer lie in the root.

        P1 reads by a file that is deleted then / P2 replaces an entry, and clears its id in the new file / P1 finds the old id in its
        mapping, until it looks for the files again."""
        for number, words in self._files.items():
            path = str(self._path(number))
            try:
                status = os.stat(path)
            except FileNotFoundError:
                status = None
            if status is None or (status.st_dev, status.st_ino) != self._identities.get(path):
                for base in range(HEADER, len(words), _WORDS):
                    words[base + ID] = 0

    def lost(self) -> list[Path]:
        """The files that are lost, or none of Forebay's."""
        try:
            files = self.head.files
        except SharedBroken:
            return [self.head.table.path]
        return [self._path(number) for number in range(files) if self._table_of(number).words() is None]

    def check_same(self) -> None:
        """Raises `SharedReplaced` unless `is_same`; for each transaction: it looks closely only if the directory's names have changed."""
        try:
            changed = os.stat(self._place).st_mtime_ns
        except FileNotFoundError:
            changed = -1
        if changed == self._changed:
            return
        if changed < 0 or not self.is_same():
            raise SharedReplaced(f"files in {self._place} were replaced", path=self._place)
        if time.time_ns() - changed > TICK:  # else another change may have the same time
            self._changed = changed

    def is_same(self) -> bool:
        """Whether the files that were mapped still lie in the root. A system call for each."""
        if not self.head.is_same():
            return False
        for path, identity in list(self._identities.items()):
            try:
                status = os.stat(path)
            except FileNotFoundError:
                return False
            if (status.st_dev, status.st_ino) != identity:
                return False
        return True

    def forget(self) -> None:
        """Map everything again when it is next needed. Existing views keep showing the old files."""
        self.head.forget()
        self._files.clear()
        self._identities.clear()
        self._free.clear()
        self._keys = None
        self._hashes = {}

    def _path(self, number: int) -> Path:
        return self._root.shared_dir / f"records-{number:03d}"

    def _table_of(self, number: int) -> SharedTable:
        return SharedTable(self._root, self._path(number), b"FBRECS02", RECORDS * _WORDS)

    def _file(self, number: int) -> memoryview | None:
        """The words of a file; None if there never was one. Raises `SharedBroken` where it is lost."""
        words = self._files.get(number)
        if words is not None or not 0 <= number < self.head.files:
            return words
        table = self._table_of(number)
        words = table.words()
        if words is None:
            raise SharedBroken(f"{table.path} is lost or damaged", path=str(table.path))
        # Two threads may both map it: the first one's stays, and the other's is unmapped with its last view.
        self._identities.setdefault(str(table.path), table.identity())
        return self._files.setdefault(number, words)

    def _create_file(self, number: int) -> None:
        self._table_of(number).create()
        if number >= self.head.files:
            self.head.files = number + 1

    # -- buckets ---------------------------------------------------------------------------------------------------

    def fullness(self) -> tuple[int, int] | None:
        """The number of buckets of the table of keys, and how many are in use; None where there is no table that can be used."""
        keys = self._open_keys()
        return (keys.mask + 1, keys.words[_USED]) if keys is not None else None

    def _lead_to(self, entry: Entry) -> None:
        """Have a bucket that leads to the record of a file or a small value."""
        if entry.kind not in ("blob", "value"):
            return
        keys = self._keys
        if keys is None or keys.words[_MOVED]:
            keys = self._open_keys() or self._create_keys()
        first, (words, mask) = self._hash(entry.space, entry.key)[0], keys
        bucket = at = HEADER + (first & mask)
        ours, chosen = first >> 32 << 32 | entry.slot + 1, -1
        while bucket < at + PROBES and (word := words[bucket]):
            if word == ours:
                return
            if chosen < 0 and not self._leads(word):
                chosen = bucket
            bucket += 1
        if chosen < 0 and bucket < at + PROBES:
            chosen = bucket
            words[_USED] = min(words[_USED] + 1, _LARGEST)  # two processes may count one: it is corrected when the table is rebuilt
        host.set_word(words, chosen if chosen >= 0 else at, ours)
        if words[_USED] > (mask + 1) * 5 // 8:
            self._grow(keys)

    def _leads(self, word: int) -> bool:
        """Whether a bucket's slot still has an entry with its hash."""
        try:
            words, base = self.record((word & 0xFFFFFFFF) - 1)
        except (CacheFault, OSError):
            return False
        return bool(words[base + ID] and words[base + _HASH] >> 32 == word >> 32)

    @property
    def _keys_path(self) -> Path:
        return self._root.shared_dir / "keys"

    def _open_keys(self) -> _Keys | None:
        words = self._map_keys()
        if words is None or words[_SIZE] & (words[_SIZE] - 1) or len(words) != HEADER + words[_SIZE] + PROBES:
            return None
        self._keys = _Keys(words, words[_SIZE] - 1)
        return self._keys

    def _create_keys(self) -> _Keys:
        for _ in range(2):  # what a power cut left may be no table
            self._root.install(self._keys_path, lambda fd: host.pwrite(fd, self._keys_content(), 0))
            if (keys := self._open_keys()) is not None:
                return keys
            self._root.files.make_way(self._keys_path)
        raise CacheFault(f"{self._keys_path} is no table of keys, though it was just created", path=str(self._keys_path))

    def _keys_content(self) -> Buffer:
        """A table of all entries that have a record, with at least four times as many buckets."""
        living = sum(len(ids) - ids.count(0) for ids in map(self.ids, range(self.head.files)))
        size = max(BUCKETS, 1 << (4 * living).bit_length() >> 1)
        words = array("Q", [0]) * (HEADER + size + PROBES)
        words[_MAGIC], words[_ROOT], words[_SIZE] = _KEYS_MAGIC, self._root.id, size
        for first, slot in self._living():  # a list of them would take more memory than the table, and leave some of it behind
            at = HEADER + (first & size - 1)
            for bucket in range(at, at + PROBES):
                if not words[bucket]:
                    words[bucket] = first >> 32 << 32 | slot + 1
                    words[_USED] += 1
                    break
        return memoryview(words)

    def _living(self) -> Iterator[tuple[int, int]]:
        """Hash and slot of each entry that has a record."""
        for number in range(self.head.files):
            words = self._file(number)
            if words is not None:
                hashes, ids = words[HEADER + _HASH :: _WORDS].tolist(), words[HEADER + ID :: _WORDS].tolist()
                first_slot = number * RECORDS
                yield from ((first, slot) for slot, (first, id) in enumerate(zip(hashes, ids, strict=True), first_slot) if id)

    def _grow(self, keys: _Keys) -> None:
        """Replace the table of keys by one that leads to the living entries only, and has room.

        One process does it; what others store into the old table meanwhile is not in the new one, until somebody reads it."""
        lock = locks.LockFile(self._keys_path, self._root.files.open, writable=True)
        try:
            if not lock.try_lock(0, exclusive=True):
                return
            if not keys.words[_MOVED]:
                self._root.replace(self._keys_path, self._keys_content())
                host.set_word(keys.words, _MOVED, 1)
            self._keys = None
        finally:
            lock.close()

    def _map_keys(self) -> memoryview | None:
        try:
            fd = self._root.files.open(self._keys_path, os.O_RDONLY if self._root.read_only else os.O_RDWR)
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size
            if length < PAGE or length % 8 or length > _LARGEST:
                return None
            words = mappings.words(mappings.map_file(fd, length, writable=not self._root.read_only))
        except OSError:
            return None
        finally:
            os.close(fd)
        return words if (words[_MAGIC], words[_ROOT]) == (_KEYS_MAGIC, self._root.id) else None


@functools.lru_cache(256)
def meta_hash(meta: str) -> tuple[int, int]:
    """What a record keeps of the small text that an entry carries."""
    first, second = _halves(xxhash.xxh3_128_digest(meta.encode("utf-8", "surrogatepass")))
    return first, second
