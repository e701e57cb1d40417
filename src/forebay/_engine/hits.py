"""What hits of one root need. What a process reads of a key for the first time, it reads by the index: without a lock, mostly without a
statement."""

from __future__ import annotations

import os
import stat
import threading
import time

from forebay._engine.files import blobs
from forebay._engine.files.root import Root
from forebay._engine.files.table import SilentHosts
from forebay._engine.index.adaptive import AdaptiveSpaces, charge_of
from forebay._engine.index.counters import BYTES_HIT, HITS, Counters, History
from forebay._engine.index.head import SharedHead
from forebay._engine.index.memo import Memo
from forebay._engine.index.records import ID, SPACE, USED, VALIDATED, EntryIndex, meta_hash
from forebay._engine.index.settings import RootLimits, SharedSettings
from forebay._kernel import host, locks, mappings
from forebay._kernel.below import open_quickly
from forebay._model import Entry, Problem

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
        if data is None or words[base + ID] != id:  # the last look: what was read of the slot was of this entry
            return None
        if again:
            memo.add_mapped(space, (key, alias) if alias != key else (key,), slot, id, data, is_file=is_file)
        if not self.root.read_only:
            words[base + USED] = now
            self.adaptive.hit(space, words[base + SPACE], key, charge_of(size, is_file=is_file), now)
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
            view = mappings.map_file(fd, size)
            if size:
                mappings.note_file(view, path, status)
            return view
        except OSError:  # no memory, or no mapping, is left
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
        if view is None or words[base + ID] != id:  # the last look: what was read of the slot was of this entry
            return None
        if not self.root.read_only:
            words[base + USED] = now
            self.adaptive.hit(space, words[base + SPACE], key, charge_of(size, is_file=is_file), now)
        return view
