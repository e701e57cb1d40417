"""Per-process index of mapped entries, so that a hit takes no lock and no system call.

A remembered entry is valid while its slot still holds its id. The memo drops evicted entries at the next call, at most once a second: a
mapping that stays would keep the bytes of an unlinked file on the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

from forebay._engine.index.adaptive import AdaptiveSpaces, Sample, charge_of
from forebay._engine.index.counters import BYTES_HIT, HITS, Counters
from forebay._engine.index.records import ID, USED, VALIDATED, EntryIndex
from forebay._kernel import mappings
from forebay._model import Entry

MAX_BYTES = 256 << 20
_READ = 1 << 16
"""How many entries a process knows that it has read: four times as many as it may have mapped on most machines, in half a megabyte."""
_NO_WINDOW = 0, 0, 0


class MappedEntry:
    """The bytes of an entry, and its record: all that a hit needs."""

    __slots__ = ("_sample", "due", "id", "names", "size", "slot", "view")

    def __init__(self, id: int, view: memoryview, slot: memoryview) -> None:
        self.id, self.size, self.view, self.slot = id, view.nbytes, view, slot
        self.names: list[tuple[str, str]] = []
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

    def hot_lookup(self, space: str, counters: Counters) -> Hit:
        """A function that serves one space's hits: ``hit(name, max_age)``, the age in nanoseconds; None: go the long way.

        No lock and no system call, and no attribute that a local can be: this is the path that is taken a million times a second."""
        known, now_ns, block = self._of(space), time.time_ns, counters.block

        def hit(name: str, max_age: int) -> memoryview | None:
            entry = known.get(name)
            if entry is None:
                return None
            now, slot = now_ns(), entry.slot
            since, until, skew = self.window
            if slot[ID] != entry.id or not since <= now < until:
                return None
            now += skew
            if not 0 <= now - slot[VALIDATED] < max_age:
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
        known, now_ns = self._of(space), time.time_ns

        def find(name: str) -> Remembered | None:
            entry = known.get(name)
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
        self._add(space, name, item)
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
        self._add(space, names[0], item)
        for name in names[1:]:
            self.alias(space, name, item)

    def _add(self, space: str, name: str, item: MappedEntry) -> None:
        if item.size > self._max_bytes // 2:
            return
        with self._mutex:
            self._forget_locked(self._of(space).get(name))
            while self._bytes + item.size > self._max_bytes or self._count >= self._max_count:
                self._forget_coldest_locked()
            self._of(space)[name] = item
            item.names.append((space, name))
            self._bytes += item.size
            self._count += 1

    def alias(self, space: str, name: str, item: MappedEntry) -> None:
        """Let another name lead to what is remembered."""
        with self._mutex:
            if item.names and name not in self._of(space):
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
