"""A pack that this process has open: records are read without a lock or a system call, and appended without waiting.

After its first use a record is known by two words of this process, where it begins and ends in the window; a record never changes, so
they stay valid as long as the pack is leased.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import operator
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from forebay import errors
from forebay._engine.files import pack_files
from forebay._engine.files.layout import FULL, faults
from forebay._engine.files.root import Root
from forebay._engine.index.counters import BYTES_HIT, BYTES_STORED, DAMAGED, HITS, MISSES, Counters
from forebay._engine.index.head import SharedHead
from forebay._engine.leases import Lease
from forebay._engine.packs.segments import GONE, MANY_HITS, NOTHING, Appender, Finder, Mapped, finder
from forebay._kernel import fences, host, interrupts, locks, mappings
from forebay._model import Buffer

MAPPED = 1 << 20
"""From this size on a private mapping costs less than a copy; pages are copied once they are written to."""
ASK_AGAIN = 2.0
"""Seconds after which a writer that got no space asks again, even if nothing was evicted."""


class Segments(Protocol):
    """Gives a pack the segments that it appends to: see `Packs`."""

    def take_segment(self, pack: int, space: str, words: memoryview, need: int) -> Appender: ...

    def leave_segment(self, pack: int, words: memoryview, appender: Appender) -> None: ...

    def notice(self, pack: Pack) -> None: ...


class Handles(Protocol):
    """What uses a pack, and opens another one in its place where its root is lost. A replacement has `Pack.present`, `find` and `put`."""

    def replacement(self, lost: Pack) -> Any:
        """Another pack, or what finds and stores nothing. Raises nothing because of the cache."""

    def take_up(self, pack: Any) -> None:
        """Use this one from now on."""


class Unencodable(Exception):
    """A codec could not encode a value; its cause is what the codec raised."""


class Pack:
    """One pack, leased until `close`. Callable from any thread, and usable in both processes after a fork."""

    def __init__(self, root: Root, segments: Segments, head: SharedHead, counters: Counters, lease: Lease, length: int, space: str) -> None:
        """Raises FileNotFoundError, `Damaged`, or OSError."""
        self.lease, self.id, self.length = lease, lease.entry.id, length
        self._segments, self._head, self._counters, self._space = segments, head, counters, space
        self._root, self._epoch, self._seed = root, root.epoch_tag, pack_files.seed_of(self.id)
        self._path = str(root.pack(self.id) / "index")
        self._file = locks.file_of(self._path)  # before it is mapped: another one by then is noticed, and the pack opened again
        words = pack_files.map_index(self._root, self.id, length, writable=not self._root.read_only)
        self._words, self._cells = words, pack_files.cells_of(words)
        self._hints = NOTHING if root.is_layered else pack_files.hints_of(words)  # a hint does not say whether the record is seen here
        self._hint_key = pack_files.hint_key(self._epoch, self.id)
        self._starts, self._ends = mappings.words_of_process(length), mappings.words_of_process(length)
        self._mapped = Mapped(root, self.id)
        self._view = self._mapped.view
        self._places: dict[int, tuple[int, int]] = {}
        self._finder: weakref.ref[Finder] | None = None
        self._hits = self._misses = self._bytes = self._stored = 0  # since the last `flush_counts`
        self._read_only = False
        self._refused = 0.0, 0, 0  # until when, how much, at which eviction
        self.handles: Handles | None = None
        self.closed = False
        self.is_lost = False
        """Whether the pack is in no root any more, or its catalog has forgotten it."""
        self._begin()
        host.at_fork(self)
        _flush_at_exit(self)

    def _begin(self) -> None:
        self._appending = threading.Lock()
        self._appender: Appender | None = None
        self._pid = os.getpid()

    def after_fork_child(self) -> None:
        """A put of another thread continues in the parent; the child takes a segment of its own, and new locks."""
        if self._appender is not None:
            self._appender.close()
        self._mapped.after_fork_child()
        self._begin()
        self.finder().take()
        self._hits = self._misses = self._bytes = self._stored = 0

    # -- roots that are lost ---------------------------------------------------------------------------------------

    def has_name(self) -> bool:
        """Whether other processes that open the pack find this one."""
        try:
            return pack_files.has_name(self._path, self._file)
        except OSError:  # the disk fails: nobody knows
            return True

    def lose(self) -> None:
        """Have `find` and `put` go on with what replaces this pack. Takes no lock."""
        self.is_lost = True
        self.finder().slow_down()

    def present(self) -> Any:
        """This pack; or, once it is lost, what its handles have opened in its place."""
        if not self.is_lost or self.closed:
            return self
        handles = self.handles
        if handles is None:
            raise errors.CacheFault(f"{self.lease.entry.name} is gone: its root was deleted, or lost its catalog", key=self.lease.entry.key)
        pack = vars(self).get("_replacement")
        if pack is None:
            made = handles.replacement(self)
            pack = vars(self).setdefault("_replacement", made)  # one step, and no thread waits for another
            if pack is not made:
                made.close()
            handles.take_up(pack)
            self.flush_counts()
            self.lease.close()
            if self.closed:  # T1 opens the other pack / T2 closes the handle, which has this one / T1 gives the handle the other pack
                pack.close()
        return pack.present()

    # -- reading ---------------------------------------------------------------------------------------------------

    def finder(self) -> Finder:
        """`find` as a function that is faster to call, and keeps the pack alive."""
        function = self._finder() if self._finder is not None else None
        if function is None:
            function = finder(
                self._cells, self._hints, self._hint_key, self._starts, self._ends, self._places, self._view,
                slowly=self._find_slowly, flush=self.flush_counts,
            )  # fmt: skip
            self._finder = weakref.ref(function)
            if self.closed:
                function.shut()
            elif self.is_lost:
                function.slow_down()
        return function

    def find(self, slot: int, copy: bool = False) -> memoryview | None:
        """The payload of a slot, read-only over the mapping, or a writable copy; None if it is empty. No lock, no system call.

        Raises IndexError, and `Closed`."""
        return self.finder()(slot, copy)

    @interrupts.guarded
    def _find_slowly(self, slot: int, copy: bool) -> memoryview | None:
        slot = self._checked(slot)
        is_there = not self.is_lost and (self._ends[slot] or self._locate(slot))
        if self.is_lost:
            found: memoryview | None = self.present().find(slot, copy)
            return found
        if not is_there:
            self._misses += 1
            return None
        self._hits += 1
        self._bytes += self._ends[slot] - self._starts[slot]
        if self._hits > MANY_HITS:
            self.flush_counts()
        return self.peek(slot, copy)

    def peek(self, slot: int, copy: bool = False) -> memoryview | None:
        """`find`, counted as neither a hit nor a miss."""
        slot = self._checked(slot)
        if not self._ends[slot] and not self._locate(slot):
            return None
        payload = self._view[self._starts[slot] : self._ends[slot]]
        if copy and len(payload) >= MAPPED:
            with contextlib.suppress(OSError):  # the process has as many mappings, or files, as it may have
                return self.private(slot, payload)
        return memoryview(bytearray(payload)) if copy else payload

    def has(self, slot: int) -> bool:
        """Whether a slot is filled. Counts nothing. Raises IndexError, and `Closed`."""
        return bool(self._cells[self._checked(slot)])

    def filled(self) -> list[int]:
        """All filled slots."""
        self._check_open()
        return list(itertools.compress(itertools.count(), self._cells.tolist()))

    def count(self) -> int:
        """How many slots are filled."""
        self._check_open()
        return self.length - int(self._cells.tolist().count(0))

    def private(self, slot: int, payload: memoryview) -> memoryview:
        """The payload of a slot, as `find` returned it, mapped privately: stores to it are not seen elsewhere, and never kept. Raises
        OSError."""
        if payload.obj is not self._view.obj:  # of the pack that this one replaces, say
            raise FileNotFoundError(f"sample {slot} was mapped elsewhere")
        number, offset = pack_files.place_of(self._cells[slot])
        begin, _ = self._mapped.where(number, offset) or (0, 0)
        if begin + offset + pack_files.HEADER != self._starts[slot]:  # it was damaged, and filled again
            raise FileNotFoundError(f"sample {slot} is another record by now")
        return self._mapped.private(number, offset + pack_files.HEADER, self._ends[slot] - self._starts[slot])

    def _locate(self, slot: int) -> bool:
        """Check a record at its first use in this process, and remember where it is. False: there is none, or it is damaged."""
        word = self._cells[slot]
        if not word:
            return False
        number, offset = pack_files.place_of(word)
        placed = self._mapped.where(number, offset)
        if placed is None:
            return False
        if self._view is not self._mapped.view:  # enlarged: set before the words that point into it
            self._view = self._mapped.view
            self.finder().show(self._view)
        begin, length = placed
        record = self._view[begin : begin + length], offset, self._seed, slot
        size = pack_files.length_of(*record, trusted=self._epoch) if length else None
        if size is None and length and self._root.is_layered:  # perhaps it was mapped before another process opened it to write
            self._mapped.look_again(number)
            size = pack_files.length_of(*record, trusted=self._epoch)
        if size is None:
            # Filled by another process, in a root that is gone. An array without a name is gone with it: no look-up makes the root anew.
            if not length and not self.lease.entry.key.startswith("~") and not self.has_name():
                with contextlib.suppress(errors.CacheFault):
                    self._segments.notice(self)
            else:
                self._empty(slot, word)
            return False
        self._places[number] = begin, begin + length  # after `show`: who sees it reads from the larger view
        self._note_length(slot, word, size)
        start = begin + offset + pack_files.HEADER
        self._starts[slot] = start
        self._ends[slot] = start + size  # last: a reader that sees it relies on the other
        return True

    def _note_length(self, slot: int, word: int, length: int) -> None:
        """Let other processes find a record without reading its header. Caller: has written it, or found it sound."""
        if self._hints and not self._root.read_only:
            self._hints[slot] = pack_files.length_hint(self._hint_key, word, length)

    def _empty(self, slot: int, word: int) -> None:
        """Empty the slot of a damaged record, so that it is not served and can be filled again."""
        self._counters.add(DAMAGED)
        if self._root.read_only or not self._can_append():
            return
        with contextlib.suppress(OSError):  # the root is gone, and the damaged record with it
            pack_files.empty_slot(self._root, self.id, self._cells, slot, word)

    # -- writing ---------------------------------------------------------------------------------------------------

    def put(self, slot: int, encode: Callable[[Any], Sequence[Buffer]], value: Any) -> bool:
        """Fill a slot with an encoded value. False if it is filled, the pack is frozen, or there was no space a moment ago.

        Raises IndexError, `Closed`, `Unencodable`, `NoSpace`, or another `CacheFault`."""
        try:
            word = self._cells[slot]
        except IndexError:
            word = 0
            self._checked(slot)
        if slot < 0 or self.closed:
            self._checked(slot)
        if word or self._read_only or self._words[pack_files.FROZEN] or not self._can_append():
            return False
        try:
            parts = encode(value)
        except errors.ConfigError:
            raise
        except Exception as error:
            raise Unencodable(f"{type(error).__name__}: {error}") from error
        length = len(parts[0]) if len(parts) == 1 else sum(map(len, parts))
        for turn in (1, 2):
            try:
                with self._appending:
                    if turn == 2:  # the job closed our descriptors
                        self._appender = None
                    return self._append_locked(slot, parts, length)
            except errors.CacheFault:
                if not self.is_lost:
                    raise
                break
            except OSError as error:
                with faults(f"sample {slot}", length):
                    if error.errno != errno.EBADF or turn == 2:
                        raise
        is_stored: bool = self.present().put(slot, encode, value)
        return is_stored

    def _append_locked(self, slot: int, parts: Sequence[Buffer], length: int) -> bool:
        self._check_open()  # another thread may have closed it
        need = pack_files.footprint(length)
        self._check_kept_locked(need)
        appender = self._appender
        if appender is None or appender.tail + need > appender.ready:
            appender = self._appender_for(need)
            if appender is None:
                return False
        tail, claims = appender.tail, appender.claims
        header = pack_files.header_of(self._epoch, self._seed, slot, parts, length)
        if length <= host.SLICE:
            host.pwritev(appender.fd, (header, *parts), pack_files.HEADER + length, tail)
        else:
            _write_large(appender.fd, (header, *parts), tail)
        # The record is written; the writer that has the slot's byte stores it. P1 sees it empty / P2 sees it empty, stores /
        # P1 has the byte: look again. A writer that finds the byte taken is second, and does not wait.
        if not claims.try_claim(slot):
            return False
        try:
            if self._cells[slot]:
                return False
            word = pack_files.word_of(appender.number, tail)
            fences.fence()  # readers load the record from a mapping, without a call
            self._note_length(slot, word, length)
            host.set_word(self._cells, slot, word)
        finally:
            claims.let_go(slot)
        appender.tail, appender.last = tail + need, slot
        self._stored += length
        return True

    def _check_kept_locked(self, need: int) -> None:
        """Raise `CacheFault` if the pack is lost. P1 appends / P2 deletes the root, or moves another one there / P1 puts: it would store
        where no other process looks. What is deleted after this look may take the record with it, as if it had been put before."""
        appender = self._appender
        if appender is not None and not self.is_lost and not appender.has_name(need):
            self._appender = None
            appender.close()
            self._segments.notice(self)
        if self.is_lost:
            raise errors.CacheFault(f"{self.lease.entry.name} is gone", key=self.lease.entry.key)

    def _appender_for(self, need: int) -> Appender | None:
        """The segment that takes ``need`` bytes: the present one with more blocks allocated, else another one. None if there was no space
        a moment ago."""
        appender = self._appender
        try:
            if appender is None or appender.tail + need > appender.capacity:
                if self._is_refused(need):
                    return None
                self.flush_counts()
                self._leave_locked()
                appender = self._appender = self._segments.take_segment(self.id, self._space, self._words, need)
            appender.make_ready(need)
        except OSError as error:
            if error.errno in FULL:  # of `NoSpace` too
                self._refuse(need)
                with contextlib.suppress(errors.CacheFault):  # otherwise a process that needs space reclaims it
                    self._leave_locked()
            raise
        return appender

    def _leave_locked(self) -> None:
        appender, self._appender = self._appender, None
        if appender is not None:
            try:
                self._segments.leave_segment(self.id, self._words, appender)
            finally:
                appender.close()

    def _refuse(self, need: int) -> None:
        words, index = self._head.evictions()
        self._refused = time.monotonic() + ASK_AGAIN, need, words[index]

    @property
    def admits(self) -> bool:
        """Whether a put may find space: the pack is not frozen, and none was refused a moment ago."""
        return not self.frozen and self._can_append() and not self._is_refused(0)

    def _is_refused(self, need: int) -> bool:
        until, refused, eviction = self._refused
        words, index = self._head.evictions()
        return (not need or need >= refused) and words[index] == eviction and time.monotonic() < until

    @property
    def quota(self) -> int:
        """See `set_quota`; 0: none."""
        return int(self._words[pack_files.QUOTA])

    def set_quota(self, quota: int) -> None:
        """Limit the pack to this total of bytes, for every writer."""
        if self._can_append():
            host.set_word(self._words, pack_files.QUOTA, quota)

    @property
    def only_reads(self) -> bool:
        """Whether this handle was told to refuse records."""
        return self._read_only

    @property
    def frozen(self) -> bool:
        """Whether the pack takes no more records."""
        return self._read_only or bool(self._words[pack_files.FROZEN])

    def freeze(self) -> None:
        """Refuse further records from any process, permanently."""
        self._check_open()
        if self._can_append():
            host.set_word(self._words, pack_files.FROZEN, 1)
        self._read_only = True

    def only_read(self) -> None:
        """Refuse records through this handle."""
        self._read_only = True

    def is_damaged(self, slot: int) -> bool:
        """Compare the record that `find` returned with its checksum; a damaged slot is emptied."""
        word = self._cells[slot]
        number, offset = pack_files.place_of(word)
        begin, length = self._mapped.where(number, offset) or (0, 0)
        if not word or pack_files.length_of(self._view[begin : begin + length], offset, self._seed, slot) is not None:
            return False
        self._ends[slot] = 0
        self._empty(slot, word)
        return True

    def bad_slots(self) -> list[int]:
        """Compare every record with its checksum; returns the damaged slots, which are emptied."""
        self._check_open()
        bad = pack_files.bad_slots(self._root, self.id, self._words)
        for slot in bad:
            self._empty(slot, self._cells[slot])
            self._ends[slot] = 0
        return bad

    def _can_append(self) -> bool:
        return not self._root.read_only and self._pid == os.getpid()  # in a child forked by C code the segment is its parent's

    # -- life ------------------------------------------------------------------------------------------------------

    def flush_counts(self) -> None:
        """Add hits, misses and stored bytes since the last call to the counters of the process."""
        hits, size = self.finder().take()
        counts = (HITS, self._hits + hits), (MISSES, self._misses), (BYTES_HIT, self._bytes + size), (BYTES_STORED, self._stored)
        self._hits = self._misses = self._bytes = self._stored = 0
        if any(count for _, count in counts):
            with contextlib.suppress(errors.CacheFault, OSError):  # what cannot be counted now is counted by the next call
                self._counters.claim()
            for name, count in counts:
                self._counters.add(name, count)

    def close(self) -> None:
        """Release the pack. Views that were handed out stay valid; any other call raises `Closed`."""
        if self.closed:
            return
        self.closed = True
        self.finder().shut()
        self.flush_counts()
        try:
            with self._appending, faults(f"pack {self.id:x}"):
                if self._can_append() and not self.is_lost:  # else its segment closes with this object
                    self._leave_locked()
        finally:  # what cannot be given back now is reclaimed by a process that needs space; the pack is released all the same
            self._mapped.close()
            self._view = GONE
            self.lease.close()

    def _checked(self, slot: int) -> int:
        index = operator.index(slot)
        self._check_open()
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} is outside 0..{self.length - 1}")
        return index

    def _check_open(self) -> None:
        if self.closed:
            raise errors.Closed.of("array of samples")


def _write_large(fd: int, parts: Sequence[Buffer], offset: int) -> None:
    """`host.pwritev`, with points."""
    for part in parts:
        view = memoryview(part).cast("B")
        for at in range(0, len(view), host.SLICE):
            host.pwrite(fd, view[at : at + host.SLICE], offset + at)
            interrupts.point()
        offset += len(view)


def _flush_at_exit(pack: Pack) -> None:
    """Write the counts of a worker of `multiprocessing`, which ends without Python's own exit; and of the processes that it forks."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(pack, _flush_counts, (weakref.ref(pack),), exitpriority=10)
        util.register_after_fork(pack, _flush_at_exit)


def _flush_counts(reference: weakref.ref[Pack]) -> None:
    pack = reference()
    if pack is not None and not pack.closed:
        pack.flush_counts()
