"""Which slot has this key: asked of mapped memory before the catalog, so that the first read of an entry in a process needs no statement.

``index/table``   a page of header, then buckets: 32 bits of a key's hash, and a slot. Open addressing, after Knuth, volume 3, 6.4
``index/NNN``     a page of header, then a record of eight words for each of 8,192 slots: whose entry it is, and how to read it
``index/values``  copies of small values: see `values`

All of it is a *hint that proves itself*. A record is believed if it has the whole hash of the key, if its words belong together, and if the
table of slots, where only the holder of the writer lock stores an id, still has its id. The hash is keyed with a secret of the table, since
it alone decides whose bytes are served. A bucket or a record that is stale, torn, full or missing sends the reader to the catalog, and the
reader writes it again: no protocol depends on it, so any process may store to it without a lock, and it can be deleted at any time.

A record also says that the entry was published or verified in this epoch: one process of the node verifies it, not each."""

from __future__ import annotations

import functools
import os
import struct
from _blake2 import blake2b  # of hashlib, which would load OpenSSL into every process
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import xxhash

from forebay._engine.files.blobs import mark_of, seal_of
from forebay._engine.files.layout import PAGE, Root, is_suffix
from forebay._engine.index.slots import ID, Slots
from forebay._engine.index.values import ValueCells
from forebay._kernel import host, locks, mappings
from forebay._logs import logger
from forebay._model import Entry
from forebay.errors import CacheFault

log = logger("forebay.index")

RECORDS = 8192
"""Records of one file."""
BUCKETS = 16_384
"""Buckets of the first table, and of the smallest."""
PROBES = 64
"""Buckets that are looked at for a key; the table has so many more, instead of continuing at its beginning."""

_TABLE_MAGIC, _RECORDS_MAGIC = (int.from_bytes(magic, "little") for magic in (b"FBKEYS01", b"FBRECS01"))
_MAGIC, _ROOT, _SIZE, _USED, _MOVED, _SECRET = 0, 1, 2, 3, 4, 8  # words of a table's header; the secret has four
_HEADER = PAGE // 8
_WORDS = 8
_HASH, _PROOF, _ID, _BYTES, _KIND, _SUFFIX, _SOUND = 0, 1, 2, 3, 4, 5, 7  # words of a record; the suffix has two
_RECORDS_SIZE = PAGE + RECORDS * _WORDS * 8
_MASK = (1 << 64) - 1
_LARGEST = 1 << 30
_KINDS = {"blob": 1, "value": 2}
_BLOB, _META = _KINDS["blob"], 4  # of the word of the kind; `_META`: the words of the suffix are the hash of the entry's meta instead

_halves = struct.Struct("<QQ").unpack
_record_in, _store_record = (struct.Struct(f"{_WORDS}Q").unpack_from, struct.Struct(f"{_WORDS}Q").pack_into)


EntryHint = tuple[memoryview, int, int, int, int, bool, int, str, tuple[int, int] | None]
"""What the index knows of an entry: the words of its record in the table of slots, and where they begin; its slot, id and size; whether it
is a file; the seal of the file, or the `mark_of` of the value; the suffix of the file; the `meta_hash`, if it has one and no suffix. No
named tuple: to make one takes a tenth of a look-up."""


class _Table(NamedTuple):
    """A table in use. ``keyed``: the hash, with its secret; ``spaces``: see `begun`."""

    words: memoryview
    mask: int
    keyed: blake2b
    spaces: dict[int, blake2b]

    def begun(self, space: int) -> blake2b:
        """The state of the hash after the number of a space."""
        keyed = self.keyed.copy()
        keyed.update(space.to_bytes(8, "little"))
        return self.spaces.setdefault(space, keyed)


class KeyIndex:
    """The index of one root. Callable from any thread and, mappings being inherited, after a fork. Nothing in it is ever missed: a call
    that meets a fault of the disk does without."""

    def __init__(self, root: Root, slots: Slots, values: ValueCells) -> None:
        self._root, self._slots, self.values = root, slots, values
        self._table: _Table | None = None
        self._records: dict[int, memoryview] = {}
        self._suffixes: dict[tuple[int, int], str | None] = {(0, 0): ""}
        self._epoch = int(root.epoch.replace("-", "")[-15:], 16)

    def find(self, space: int, key: str) -> EntryHint | None:
        """What is known of the current entry of a key, if it is a file or a small value that was sound in this epoch."""
        table = self._table or self._open()
        if table is None:
            return None
        first, second = _hash(table, space, key)
        words, mask, _, _ = table
        tag, bucket = first >> 32, _HEADER + (first & mask)
        end = bucket + PROBES
        while bucket < end and (word := words[bucket]):
            if word >> 32 == tag:
                hint = self._read((word & 0xFFFFFFFF) - 1, first, second)
                if hint is not None:
                    return hint
            bucket += 1
        if not words[_MOVED]:
            return None
        self._forget()
        table = self._open()
        return self.find(space, key) if table is not None and not table.words[_MOVED] else None

    def note(self, space: int, entry: Entry, value: bytes | memoryview | None = None, *, is_new: bool = False) -> None:
        """Let `find` find an entry that was published or verified just now. Caller: its row is committed. ``value``: the bytes of a small
        value; ``is_new``: see `ValueCells.put`."""
        if self._root.read_only or entry.kind not in _KINDS or entry.size >> 60:
            return
        if value is not None:
            self.values.put(entry.slot, entry.id, value, is_new=is_new)
        try:
            self._note(space, entry)
        except (CacheFault, OSError) as error:
            log.debug("%s is not in the index: %s", entry.name, str(error))

    def note_new(self, space: int, several: Sequence[tuple[Entry, bytes | memoryview | None]]) -> None:
        """`note`, for entries of one space that were published just now, each with its bytes if it is a small value."""
        for entry, value in several:
            self.note(space, entry, value, is_new=True)

    def _note(self, space: int, entry: Entry) -> None:
        table = self._table
        if table is not None and table.words[_MOVED]:
            self._forget()
            table = None
        table = table or self._open() or self._create()
        id, slot, kind = entry.id, entry.slot, entry.kind
        first, second = _hash(table, space, entry.key)
        words = self._records.get(slot // RECORDS) or self._words_of(slot // RECORDS) or self._extend(slot // RECORDS)
        number, mark = _KINDS[kind], seal_of(entry.checksum) if kind == "blob" else mark_of(entry.checksum)
        if entry.meta and not entry.suffix:
            number, (suffix, more) = number | _META, meta_hash(entry.meta)
        else:
            suffix, more = _halves(entry.suffix.encode("ascii").ljust(16, b"\0")[:16]) if entry.suffix else (0, 0)
        content = id, entry.size, number | mark << 8, suffix, more
        record = (first, second ^ hash(content) & _MASK, *content, self._epoch ^ id)
        at = (_HEADER + slot % RECORDS * _WORDS) * 8
        if _record_in(words, at) != record:
            host.step("note", self._root.index_dir)
            _store_record(words, at, *record)  # word by word: whatever is left of it is not believed
        if self._place(table, first, slot):
            self._grow(table)

    def fullness(self) -> tuple[int, int] | None:
        """The number of buckets of the table, and how many are in use; None where there is no table that can be used."""
        table = self._open()
        return (table.mask + 1, table.words[_USED]) if table is not None else None

    # -- buckets ---------------------------------------------------------------------------------------------------

    def _read(self, slot: int, first: int, second: int) -> EntryHint | None:
        """What the record of a slot says, if it is of the key with this hash, and the slot still has its entry."""
        records = self._records.get(slot // RECORDS) or self._words_of(slot // RECORDS)
        if records is None:
            return None
        record = _record_in(records, (_HEADER + slot % RECORDS * _WORDS) * 8)
        whole, proof, id, size, kind, suffix, more, sound = record
        if whole != first or proof != second ^ hash(record[_ID:_SOUND]) & _MASK or sound != self._epoch ^ id or not id:
            return None
        try:
            words, base = self._slots.record(slot)
        except (CacheFault, OSError):
            return None
        if words[base + ID] != id:
            return None
        if kind & _META:
            return words, base, slot, id, size, kind & 0xFF == _BLOB | _META, kind >> 8, "", (suffix, more)
        try:
            name = self._suffixes[suffix, more]
        except KeyError:
            name = self._suffix(suffix, more)
        return (words, base, slot, id, size, kind & 0xFF == _BLOB, kind >> 8, name, None) if name is not None else None

    def _has(self, slot: int, id: int) -> bool:
        if not id:
            return False
        try:
            words, base = self._slots.record(slot)
        except (CacheFault, OSError, IndexError):
            return False
        return bool(words[base + ID] == id)

    def _place(self, table: _Table, first: int, slot: int) -> bool:
        """Let a bucket lead to a slot. Returns whether the table has become too full."""
        words, mask, _, _ = table
        bucket = at = _HEADER + (first & mask)
        ours, chosen = first >> 32 << 32 | slot + 1, -1
        while bucket < at + PROBES and (word := words[bucket]):
            if word == ours:
                return False
            if chosen < 0 and not self._leads_to(word):
                chosen = bucket
            bucket += 1
        if chosen < 0 and bucket < at + PROBES:
            chosen = bucket
            words[_USED] = min(words[_USED] + 1, _MASK)  # two processes may count one: it is corrected when the table is rebuilt
        host.set_word(words, chosen if chosen >= 0 else at, ours)
        return bool(words[_USED] > (mask + 1) * 5 // 8)

    def _leads_to(self, word: int) -> bool:
        """Whether a bucket's slot still has an entry with its hash."""
        slot = (word & 0xFFFFFFFF) - 1
        records = self._words_of(slot // RECORDS)
        if records is None:
            return False
        base = _HEADER + slot % RECORDS * _WORDS
        return records[base + _HASH] >> 32 == word >> 32 and self._has(slot, records[base + _ID])

    # -- files -----------------------------------------------------------------------------------------------------

    @property
    def _path(self) -> Path:
        return self._root.index_dir / "table"

    def _open(self) -> _Table | None:
        words = self._map(self._path, None, _TABLE_MAGIC)
        if words is None or words[_SIZE] & (words[_SIZE] - 1) or len(words) != _HEADER + words[_SIZE] + PROBES:
            return None
        secret = b"".join(word.to_bytes(8, "little") for word in words[_SECRET : _SECRET + 4])
        self._table = _Table(words, words[_SIZE] - 1, blake2b(key=secret, digest_size=16), {})
        return self._table

    def _create(self) -> _Table:
        self._root.files.mkdir(self._root.index_dir, self._root.dir_mode)
        self._root.install(self._path, lambda fd: host.pwrite(fd, self._content(BUCKETS, os.urandom(32), ()), 0))
        table = self._open()
        if table is None:
            self._root.files.make_way(self._path)
            raise CacheFault(f"{self._path} was no index: it is created again", path=str(self._path))
        return table

    def _content(self, size: int, secret: bytes, buckets: Iterator[tuple[int, int]] | tuple[()]) -> bytes:
        """A table of ``size`` buckets with these in it: hash and slot of each."""
        words = array("Q", bytes(8 * (_HEADER + size + PROBES)))
        words[_MAGIC], words[_ROOT], words[_SIZE] = _TABLE_MAGIC, self._root.id, size
        words[_SECRET : _SECRET + 4] = array("Q", secret)
        used = 0
        for first, slot in buckets:
            at = _HEADER + (first & size - 1)
            for bucket in range(at, at + PROBES):
                if not words[bucket]:
                    words[bucket] = first >> 32 << 32 | slot + 1
                    used += 1
                    break
        words[_USED] = used
        return words.tobytes()

    def _grow(self, table: _Table) -> None:
        """Replace the table by one that has the living entries only, and at least twice as many buckets as entries.

        One process does it; what others store into the old table meanwhile is not in the new one, until somebody reads it."""
        lock = locks.LockFile(self._path, self._root.files.open, writable=True)
        try:
            if not lock.try_lock(0, exclusive=True):
                return
            if not table.words[_MOVED]:
                living = list(self._living())
                size = max(BUCKETS, 1 << (4 * len(living)).bit_length() - 1)
                secret = b"".join(word.to_bytes(8, "little") for word in table.words[_SECRET : _SECRET + 4])
                self._root.replace(self._path, self._content(size, secret, iter(living)))
                host.set_word(table.words, _MOVED, 1)
            self._forget()
        finally:
            lock.close()

    def _living(self) -> Iterator[tuple[int, int]]:
        """Hash and slot of each entry that has a record."""
        for name in self._root.files.names_in(self._root.index_dir):
            number = int(name) if name.isdigit() else -1
            words = self._words_of(number) if number >= 0 else None
            if words is not None:
                hashes, ids = words[_HEADER + _HASH :: _WORDS].tolist(), words[_HEADER + _ID :: _WORDS].tolist()
                for slot, first, id in zip(range(number * RECORDS, (number + 1) * RECORDS), hashes, ids, strict=True):
                    if self._has(slot, id):
                        yield first, slot

    def _words_of(self, number: int) -> memoryview | None:
        """The records of a file; None if there is none."""
        try:
            return self._records[number]
        except KeyError:
            words = self._map(self._root.index_dir / f"{number:03d}", _RECORDS_SIZE, _RECORDS_MAGIC)
            return self._records.setdefault(number, words) if words is not None else None

    def _extend(self, number: int) -> memoryview:
        path = self._root.index_dir / f"{number:03d}"

        def fill(fd: int) -> None:
            host.allocate(fd, 0, _RECORDS_SIZE)
            host.pwrite(fd, _RECORDS_MAGIC.to_bytes(8, "little") + self._root.id.to_bytes(8, "little"), 0)

        self._root.install(path, fill)
        self._records.pop(number, None)
        words = self._words_of(number)
        if words is None:
            self._root.files.make_way(path)
            raise CacheFault(f"{path} was no part of an index: it is created again", path=str(path))
        return words

    def _map(self, path: Path, size: int | None, magic: int) -> memoryview | None:
        try:
            fd = self._root.files.open(path, os.O_RDONLY if self._root.read_only else os.O_RDWR)
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size
            if length < PAGE or length % 8 or length > _LARGEST or size not in (None, length):
                return None
            words = mappings.words(mappings.map_file(fd, length, writable=not self._root.read_only))
        except OSError:
            return None
        finally:
            os.close(fd)
        return words if (words[_MAGIC], words[_ROOT]) == (magic, self._root.id) else None

    def _forget(self) -> None:
        """Map everything again when it is next needed."""
        self._table = None
        self._records.clear()

    def _suffix(self, suffix: int, more: int) -> str | None:
        """The suffix in a record; None if no file of ours has it."""
        name = (suffix.to_bytes(8, "little") + more.to_bytes(8, "little")).rstrip(b"\0").decode("ascii", "replace")
        if len(self._suffixes) > 1000:
            self._suffixes = {(0, 0): ""}
        return self._suffixes.setdefault((suffix, more), name if is_suffix(name) else None)


@functools.lru_cache(256)
def meta_hash(meta: str) -> tuple[int, int]:
    """What a record keeps of the small text that an entry carries."""
    first, second = _halves(xxhash.xxh3_128_digest(meta.encode("utf-8", "surrogatepass")))
    return first, second


def _hash(table: _Table, space: int, key: str) -> tuple[int, int]:
    """128 bits of BLAKE2b with the table's secret as its key.

    Whoever makes a list of URLs chooses keys, and the hash alone decides whose bytes are served: neither record nor file has the key.
    A keyed BLAKE2b is a pseudo-random function: nobody who cannot read the table finds two keys with one hash, and users who can read it
    can read all entries. XXH3 with a secret seed takes half a microsecond less, and promises no such thing."""
    state = (table.spaces.get(space) or table.begun(space)).copy()
    state.update(key.encode("utf-8", "surrogatepass"))
    first, second = _halves(state.digest())
    return first, second
