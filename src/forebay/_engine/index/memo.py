"""Per-process index of mapped entries, so that a hit takes no lock and no system call.

A remembered entry is valid while its slot still holds its id. The memo drops evicted entries at the next call, at most once a second: a
mapping that stays would keep the bytes of an unlinked file on the disk.

**Hits.** What a process reads of a key for the first time, it reads by the index: without a lock, mostly without a statement."""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable, Iterator

from forebay._engine.files import blobs
from forebay._engine.files.root import Root
from forebay._engine.files.silent_hosts import SilentHosts
from forebay._engine.index.adaptive import AdaptiveSpaces, Sample, charge_of
from forebay._engine.index.counters import BYTES_HIT, HITS, Counters, History
from forebay._engine.index.head import SharedHead
from forebay._engine.index.records import ID, SPACE, USED, VALIDATED, EntryIndex, meta_hash
from forebay._engine.index.settings import RootLimits, SharedSettings
from forebay._kernel import host, locks, mappings
from forebay._kernel.below import open_quickly
from forebay._model import Entry, Problem

MAX_BYTES = 256 << 20
_READ = 1 << 16
"""How many entries a process knows that it has read: four times as many as it may have mapped on most machines, in half a megabyte."""
_NO_WINDOW = 0, 0, 0


class MappedEntry:
    """The bytes of an entry, and its record: all that a hit needs."""

    __slots__ = ("_sample", "by_key", "due", "id", "names", "size", "slot", "view")

    def __init__(self, id: int, view: memoryview, slot: memoryview) -> None:
        self.id, self.size, self.view, self.slot = id, view.nbytes, view, slot
        self.names: list[tuple[str, str]] = []
        self.by_key = False  # whether only its key leads to it, see `Memo.alias`
        self._sample: Sample | None = None
        self.due: int | None = None  # the time of the next hit that its space wants to know of

    def is_current(self) -> bool:
        return bool(self.slot[ID] == self.id)

    def tell(self, sample: Sample | None) -> None:
        """Let hits be noted in a sample of the space's keys, if there is one."""
        if sample is not None:
            self._sample, self.due = sample, 0

    def note_use(self, now: int) -> None:
        """Note a hit that is due."""
        self.due = self._sample.use(now) if self._sample is not None else None

    def touch(self, now: int) -> None:
        """Record its use. Caller: has just checked that it is current; the root is writable."""
        self.slot[USED] = now


class Remembered(MappedEntry):
    """An entry with its row, and its bytes."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry, view: memoryview, slot: memoryview) -> None:
        super().__init__(entry.id, view, slot)
        self.entry = entry


Hit = Callable[[str, int], memoryview | None]


def no_hit(name: str, max_age: int) -> memoryview | None:
    """The `Hit` of a store that remembers nothing."""
    return None


Find = Callable[[str], Remembered | None]


def finds_nothing(name: str) -> Remembered | None:
    """The `Find` of a store that remembers nothing."""
    return None


class Memo:
    """Per process: (space, name) to `MappedEntry`. Several names may lead to one entry: a URL as written, and its key.

    It keeps two things apart: which entries the process has read lately, a word each; and their mappings, ``max_bytes`` of them."""

    def __init__(
        self, index: EntryIndex, adaptive: AdaptiveSpaces, max_bytes: int = MAX_BYTES, max_count: int | None = None, *,
        on_look: Callable[[int], None] | None = None,
    ) -> None:  # fmt: skip
        """``on_look``: called with the time whenever `let_go` looks for evictions."""
        self._adaptive, self._on_look = adaptive, on_look
        self._index, self._max_bytes = index, max_bytes
        self._max_count = max_count or max(mappings.max_maps() // 4, 64)
        self._mutex = threading.Lock()  # guards what follows; the hit path reads the dicts without it
        self._known: dict[str, dict[str, MappedEntry]] = {}
        self._coldest: list[tuple[int, str, str]] = []
        self._read = mappings.words_of_process(_READ)
        self._passed = 0
        self._bytes = 0
        self._count = 0
        self._evictions = -1
        # While the wall clock is between the first two, the root's is ahead of it by the third; outside, a call takes the slow path.
        self.window = _NO_WINDOW

    def get(self, space: str, name: str) -> Remembered | None:
        """What is remembered under this name, while it is current."""
        known = self._of(space).get(name)
        return known if isinstance(known, Remembered) and known.is_current() else None

    def _of(self, space: str) -> dict[str, MappedEntry]:
        return self._known.setdefault(space, {})

    def hot_lookup(self, space: str, counters: Counters, *, as_written: bool = False) -> Hit:
        """A function that serves one space's hits: ``hit(name, max_age)``, the age in nanoseconds; None: go the long way. ``as_written``:
        names are what users wrote, not keys, see `alias`.

        No lock and no system call, and no attribute that a local can be: this is the path that is taken a million times a second."""
        get, now_ns, block = self._of(space).get, time.time_ns, counters.block

        def hit(name: str, max_age: int) -> memoryview | None:
            entry = get(name)
            if entry is None or (as_written and entry.by_key):
                return None
            now, slot = now_ns(), entry.slot
            since, until, skew = self.window
            if not since <= now < until:
                return None
            now += skew
            if not 0 <= now - slot[VALIDATED] < max_age or slot[ID] != entry.id:  # in this order: so it was this entry's time
                return None
            slot[USED] = now
            due = entry.due
            if due is not None and now >= due:
                entry.note_use(now)
            counts, at = block()
            counts[at + HITS] += 1
            counts[at + BYTES_HIT] += entry.size
            return memoryview(entry.view)

        return hit

    def finder(self, space: str) -> Find:
        """Return a function that returns the current item of a key of the space; None: take the slow path. It records no use and counts
        nothing: its caller knows whether the item is a hit. No lock and no system call."""
        get, now_ns = self._of(space).get, time.time_ns

        def find(name: str) -> Remembered | None:
            entry = get(name)
            if not isinstance(entry, Remembered) or entry.slot[ID] != entry.id:
                return None
            since, until, _ = self.window
            return entry if since <= now_ns() < until else None

        return find

    def add(self, space: str, name: str, entry: Entry, view: memoryview) -> Remembered:
        """Remember an entry; one too large for the memo is given back without being kept."""
        words, base = self._index.record(entry.slot)
        item = Remembered(entry, view, words[base : base + 4])
        item.tell(self._adaptive.sample(space, entry.key, entry.charge))
        self._add(space, name, item, entry.slot, words)
        return item

    def is_again(self, id: int, size: int) -> bool:
        """Whether a file that this process reads should now be mapped and remembered: it was read before, and there is room.

        Where there is none, one in 64 takes the place of the coldest: of more than fits, a part stays, instead of each being dropped
        before it is needed again, and mapping costs no more than a fiftieth of the reads."""
        if self._read[id % _READ] != id:
            self._read[id % _READ] = id
            return False
        if self._bytes + size <= self._max_bytes and self._count < self._max_count:
            return True
        self._passed += 1
        return self._passed % 64 == 0

    def add_mapped(self, space: str, names: tuple[str, ...], slot: int, id: int, view: memoryview, *, is_file: bool) -> None:
        """Remember the bytes of an entry whose row was not read, under its key and other ``names``."""
        words, base = self._index.record(slot)
        item = MappedEntry(id, view, words[base : base + 4])
        item.tell(self._adaptive.sample(space, names[0], charge_of(item.size, is_file=is_file)))
        self._add(space, names[0], item, slot, words)
        for name in names[1:]:
            self.alias(space, name, item)

    def _add(self, space: str, name: str, item: MappedEntry, slot: int, words: memoryview) -> None:
        """Remember an item with the record of a slot, which is in ``words``."""
        if item.size > self._max_bytes // 2:
            return
        with self._mutex:
            # T1 reads the record / T2 recovers a deleted root, and `restart`s / T1: nobody changes a record in the deleted file any more.
            if self._index.record(slot)[0] is not words:
                return
            self._forget_locked(self._of(space).get(name))
            while self._bytes + item.size > self._max_bytes or self._count >= self._max_count:
                self._forget_coldest_locked()
            item.by_key = "#" in name or "@" in name or name.startswith("file:")  # before a hit path can see it
            self._of(space)[name] = item
            item.names.append((space, name))
            self._bytes += item.size
            self._count += 1

    def alias(self, space: str, name: str, item: MappedEntry) -> None:
        """Let another name, which a user wrote, lead to what is remembered.

        No other name leads to an entry whose key has a ``#`` or ``@``, or is that of a local file: in a call with another filesystem, other
        headers, no ``force=True`` or another working directory, the same text names something else."""
        with self._mutex:
            if item.names and not item.by_key and name not in self._of(space):
                self._of(space)[name] = item
                item.names.append((space, name))

    def forget(self, space: str, name: str) -> None:
        """Drop the item that this name leads to."""
        with self._mutex:
            self._forget_locked(self._of(space).get(name))

    def let_go(self) -> int:
        """Drop entries that were evicted meanwhile, if any were, at most once a second; or where the wall clock jumped. Returns the time of
        the root's clock.

        Raises `SharedReplaced`: otherwise this process would never notice that a remembered entry was replaced or evicted."""
        wall = time.time_ns()
        since, until, skew = self.window
        if since <= wall < until:
            return wall + skew
        self._index.check_same()
        now = self._index.head.clock.look()
        self.window = self._index.head.clock.window
        words, index = self._index.head.evictions()
        evictions = words[index]
        if evictions != self._evictions:
            with self._mutex:
                self._evictions = evictions
            self.drop_dead()
        if self._on_look is not None:
            self._on_look(now)
        return now

    def drop_dead(self) -> None:
        """Drop what was evicted now: the disk is short, and gets no block of an unlinked file back while it is mapped."""
        with self._mutex:
            for item in [f for f in self._all_locked() if not f.is_current()]:
                self._forget_locked(item)

    def restart(self, index: EntryIndex) -> None:
        """Forget everything; go on with another index. The dicts stay the same objects: hit paths hold them."""
        with self._mutex:
            for known in list(self._known.values()):
                for item in known.values():
                    item.names = []
                known.clear()
            self._coldest.clear()
            self._index, self._bytes, self._count, self._evictions = index, 0, 0, -1

    def after_fork_child(self) -> None:
        self._mutex = threading.Lock()
        self.window = _NO_WINDOW  # the first hit takes the slow path

    def _all_locked(self) -> Iterator[MappedEntry]:
        every = list(self._known.values())  # in one step: a thread that asks for another space adds it without the mutex
        return iter({id(item): item for known in every for item in known.values()}.values())

    def _forget_locked(self, item: MappedEntry | None) -> None:
        if item is None or not item.names:
            return
        for space, name in item.names:
            self._of(space).pop(name, None)
        item.names = []
        self._bytes -= item.size
        self._count -= 1

    def _forget_coldest_locked(self) -> None:
        """Forget an evicted item, or the least recently used one, by any process. Forgets none where that one was used again meanwhile.

        The order is made once for a quarter of the items, and has their names only: the items would keep their mappings."""
        if not self._coldest:
            every = sorted((item.slot[USED] if item.is_current() else 0, *item.names[0]) for item in self._all_locked())
            self._coldest = every[len(every) // 4 :: -1]
        used, space, name = self._coldest.pop()
        item = self._of(space).get(name)
        if item is not None and (item.slot[USED] == used or not item.is_current()):
            self._forget_locked(item)


COPIED = 1 << 19
"""Files up to this size are copied when a process reads them for the first time: below it that takes less time than a mapping whose pages
are all read, as measured."""


class Hits:
    """One root in one process, as far as a hit needs it: the files that processes share, and what this process remembers."""

    def __init__(self, root: Root) -> None:
        self.making = threading.RLock()
        """Held while a part is created, and over a fork: a child has each part as it was prepared for it, or makes its own."""
        self.recovered: list[Problem] = []
        """What was recovered so that the root could be opened, until `Store.repair` has reported it."""
        self.adaptive = AdaptiveSpaces(lambda name: self.settings.limits().policy_of(name))
        # The hit paths keep the memo and the counters, whatever is recreated.
        self.counters = Counters(root)
        self.history = History(root, self.counters)
        self.memo = Memo(self._index_of(root), self.adaptive, on_look=self.history.note)
        self.connect(root, RootLimits())
        self.forget()

    def connect(self, root: Root, before: RootLimits) -> None:
        """Go on with this root. ``before``: what was in force for this process, for a root that was recreated meanwhile."""
        self.root, self.hosts, self.index = root, SilentHosts(root), self._index_of(root)
        self.format = locks.LockFile(root.path / "FORMAT", root.files.open, writable=not root.read_only, keep=True)
        if not root.read_only:
            self.format.try_lock(0, exclusive=False)  # a later version migrates a root only when nobody holds this
        self.settings = SharedSettings(root, self.index.head, self.format, before)
        self.counters.detach()
        self.history.restart(root)

    def forget(self) -> None:
        """Forget what was read: after a recovery spaces may have other ids."""
        self.adaptive.restart(self.root, self.index)
        self.memo.restart(self.index)

    def budget(self) -> int:
        """Bytes that the root may have; 0: not known."""
        return self.settings.limits().budget or 0

    def _index_of(self, root: Root) -> EntryIndex:
        return EntryIndex(root, SharedHead(root), self.budget)

    def payload(self, id: int) -> bytes | None:
        """The bytes of a small value, where the index has no copy of it."""
        raise NotImplementedError

    def touch(self, entry: Entry) -> None:
        """Note that an entry is used now."""
        words, base = self.index.record(entry.slot)
        if words[base + ID] == entry.id and not self.root.read_only:
            words[base + USED] = now = self.index.head.clock.now()
            self.adaptive.hit(entry.space, words[base + SPACE], entry.key, entry.charge, now)

    def first_touch(self, space: str, key: str, max_age: int, alias: str, maps: bool = False) -> memoryview | None:
        """The bytes of a key that was validated in the last ``max_age`` nanoseconds, by the index: without a statement if it is a file.
        None where the index does not know it, or anything about it is not as it should be: then `view` tells. A hit: touched and counted.

        ``alias``: another name under which the next call will ask. ``maps``: a file is mapped however small it is, for a caller that wants
        a part of it, or a copy of its own. Raises `SharedReplaced`."""
        memo, now = self.memo, self._now()
        hint = self.index.find(space, key) if now else None
        if hint is None:
            return None
        words, base, slot, id, size, is_file, mark, suffix, _ = hint
        if not 0 <= now - words[base + VALIDATED] < max_age:
            return None
        again = memo.is_again(id, size)
        if again and host.forked_unseen():
            return None
        maps = maps or again or size > COPIED
        data = self._file_of(id, suffix, size, mark, maps=maps) if is_file else self._value_of(slot, id, size, mark)
        number = words[base + SPACE]
        if data is None or words[base + ID] != id:  # the last look: what was read of the slot was of this entry
            return None
        if again:
            memo.add_mapped(space, (key, alias) if alias != key else (key,), slot, id, data, is_file=is_file)
        if not self.root.read_only:
            words[base + USED] = now
            self.adaptive.hit(space, number, key, charge_of(size, is_file=is_file), now)
        counts, at = self.counters.block()
        counts[at + HITS] += 1
        counts[at + BYTES_HIT] += size
        return data

    def _now(self) -> int:
        """The time of the root's clock, if it was compared with that of the other processes lately; else what `Memo.let_go` returns. 0 in a
        process that was forked by C code, where that could wait for ever."""
        wall = time.time_ns()
        since, until, skew = self.memo.window
        if since <= wall < until:
            return wall + skew
        return 0 if host.forked_unseen() else self.memo.let_go()

    def _file_of(self, id: int, suffix: str, size: int, seal: int, *, maps: bool) -> memoryview | None:
        """The bytes of a file, mapped or copied. None where the file is gone, or is not as it was published."""
        path = self.root.blob_name(id, suffix)
        fd = open_quickly(path)
        if fd < 0:
            return None
        try:
            status = os.fstat(fd)
            if status.st_size != size or status.st_mtime_ns % blobs.SECOND != seal or not stat.S_ISREG(status.st_mode):
                return None
            if not maps:
                data = os.read(fd, size)
                return memoryview(data) if len(data) == size else None
            view, is_mapped = mappings.read_or_map(fd, size)
            if size and is_mapped:
                mappings.note_file(view, path, status)
            return view
        except (OSError, EOFError):  # no file descriptor is left, or the file was cut
            return None
        finally:
            os.close(fd)

    def _value_of(self, slot: int, id: int, size: int, mark: int) -> memoryview | None:
        """The bytes of a small value, by its cell, else by one statement; None where it is gone, or damaged."""
        cells = self.index.cells
        value = cells.get(slot, size, mark)
        if value is None:
            value = self.payload(id) if not host.forked_unseen() else None
            if value is None or len(value) != size or blobs.mark_of(blobs.checksum_of(value)) != mark:
                return None
            cells.put(slot, id, value, is_new=False)
        return memoryview(value)

    def expect(self, space: str, key: str, max_age: int) -> int | None:
        """The size of an entry that was validated in the last ``max_age`` nanoseconds, if the index knows one. It is touched: its
        reader comes soon, and what is colder is evicted first; but nothing is held: it may be gone by then. Raises `SharedReplaced`."""
        now, hint = self.memo.let_go(), self.index.find(space, key)
        if hint is None or not 0 <= now - hint[0][hint[1] + VALIDATED] < max_age:
            return None
        words, base, _, _, size, *_ = hint
        if not self.root.read_only:
            words[base + USED] = now
        return size

    def first_value(self, space: str, key: str, meta: str) -> memoryview | None:
        """What a process reads of a key for the first time, by the index: a file is mapped. None where its entry carries another
        text than ``meta``; where the process has read it before, so that `view` remembers it; where the index does not know it; or where
        anything is not as it should be. It is touched; its reader counts the hit. Raises `SharedReplaced`."""
        now = self._now()
        hint = self.index.find(space, key) if now else None
        if hint is None:
            return None
        words, base, slot, id, size, is_file, mark, suffix, noted_meta = hint
        if noted_meta != meta_hash(meta) or self.memo.is_again(id, size):
            return None
        view = self._file_of(id, suffix, size, mark, maps=True) if is_file else self._value_of(slot, id, size, mark)
        number = words[base + SPACE]
        if view is None or words[base + ID] != id:  # the last look: what was read of the slot was of this entry
            return None
        if not self.root.read_only:
            words[base + USED] = now
            self.adaptive.hit(space, number, key, charge_of(size, is_file=is_file), now)
        return view
