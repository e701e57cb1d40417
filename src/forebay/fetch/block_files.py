"""Objects that are read by blocks: finds their version; the file object, which reads ahead of a sequential reader."""

from __future__ import annotations

import contextlib
import io
import os
import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from forebay import errors
from forebay._engine.leases import Lease
from forebay._kernel import host
from forebay._kernel.interrupts import guarded_methods
from forebay._kernel.threads import DaemonThread
from forebay._logs import logger
from forebay._model import URLS, Entry, ObjectInfo, noted
from forebay.fetch.blocks import RUN, Blocks, index_meta, parse_block_size
from forebay.fetch.files import SeekableFile, opened, stream
from forebay.fetch.flight import get_or_make
from forebay.fetch.request import FetchOptions, Target, index_key, is_same_version

if TYPE_CHECKING:
    from forebay._engine.store import Store
    from forebay.fetch import Fetcher

log = logger("forebay.fetch")

WINDOW = 64 << 20
"""Bytes of a large read that are fetched at once, and kept in memory until the reader has a copy."""
AHEAD = 64 << 20
"""Maximum bytes to read ahead; at most an eighth of the budget."""
SEQUENTIAL = 2
"""Consecutive reads, each from where the last one ended, before reading ahead starts. Fewer may be two neighbouring columns."""
SHARE = 4
"""One block is read ahead for this many that were read in a row, so at most a quarter of what was read is fetched in vain."""
RECENT = 2
"""Blocks that a file object keeps. If the cache has no room, many small reads then fetch a block once."""
PEEK = 8 << 10


# -- opening ------------------------------------------------------------------------------------------------------------


def open_blocks(fetcher: Fetcher, target: Target, options: FetchOptions, block_size: int | str) -> BinaryIO:
    """A file object that fetches and stores only the blocks that are read. See `Cache.open`."""
    size = parse_block_size(block_size)
    for name in ("sha256", "pin"):
        if value := getattr(options, name):
            raise errors.ConfigError(f"{name} needs the whole object: open it without block_size", name=name, value=value)
    if options.bypass or (target.in_place and not options.force) or (fetcher.upstream and fetcher.upstream.entry(URLS, target.above)):
        return fetcher.open(target, options)
    version = _Opening(fetcher, target, options).version()
    if isinstance(version, Lease):
        try:
            return opened(version)
        except errors.CacheFault as error:
            fetcher.fall_back(error, target.key)
            return stream(fetcher, target, options)
    if not is_divisible(version) or (version.size or 0) <= size:
        return fetcher.open(target, options)
    return cast(BinaryIO, BlockFile(Blocks(fetcher, target, version, size, options)))


def is_divisible(info: ObjectInfo) -> bool:
    """Whether parts of an object can be fetched one by one, without mixing versions."""
    return info.strong and info.validator is not None and info.size is not None and not info.varies


def _info_of(index: Entry, url: str) -> ObjectInfo | None:
    """The version that an index describes; None if another program wrote it. Not ``strong`` if the server does not support ranges."""
    known = noted(index.meta, size=int, ranges=bool)
    return None if known is None else ObjectInfo(url, known["size"], index.validator, strong=known["ranges"])


class _Opening:
    """One call that opens an object: finds its version."""

    def __init__(self, fetcher: Fetcher, target: Target, options: FetchOptions) -> None:
        self._fetcher, self._target, self._options, self._store = fetcher, target, options, fetcher.store
        self._key = index_key(target.key)
        self._first_stamps: list[tuple[int, int]] | None = None  # of the entries that the first look saw
        self._began = 0
        self._is_stored = False  # whether the version that `_ask` returned is that of the index, or of the upstream root's

    def version(self) -> Lease | ObjectInfo:
        """A lease on the whole object, if it is cached in the remote's version; else a description of that version. The remote is asked
        once per ``max_age`` for all processes, whether the whole object or parts of it are cached."""
        timeout = self._options.timeout
        return get_or_make(
            self._fetcher, URLS, self._key, self._look, self._ask, self._keep, label=self._target.key, timeout=timeout,
            asker=self._fetcher.asker(self._target.options),
        )  # fmt: skip

    def _entries(self) -> tuple[Entry | None, Entry | None]:
        """The whole object and the index, as far as they exist and are of the version that the caller expects."""
        whole, index = self._store.entry(URLS, self._target.key), self._store.entry(URLS, self._key)
        if whole is not None and not self._is_expected(whole.validator):
            whole = None
        if index is not None and (_info_of(index, "") is None or not self._is_expected(index.validator)):
            index = None
        return whole, index

    def _is_expected(self, validator: str | None) -> bool:
        return self._options.etag is None or is_same_version(validator, self._options.etag)

    def _look(self) -> Lease | ObjectInfo | None:
        whole, index = self._entries()
        stamps = [self._store.stamp(entry) for entry in (whole, index) if entry is not None]
        if self._first_stamps is None:
            self._first_stamps = stamps
        if self._options.refresh and stamps == self._first_stamps:  # no other call has validated it meanwhile
            return None
        index = index if index is not None and self._fetcher.is_fresh(index, self._options) else None
        if whole is not None and (
            (index is not None and index.validator == whole.validator) or self._fetcher.is_fresh(whole, self._options)
        ):
            lease = self._lease(whole)
            if lease is not None:
                return lease
        if index is None:
            return None
        self._store.touch(index)
        return _info_of(index, self._target.url)

    def _lease(self, whole: Entry) -> Lease | None:
        """A lease on the whole object; None if it is gone, or has been replaced."""
        lease = self._store.lease(URLS, whole.key)
        if lease is not None and lease.entry.validator != whole.validator:
            lease.close()
            return None
        if lease is not None:
            self._store.count_hit(whole.size)
        return lease

    def _ask(self) -> Lease | ObjectInfo:
        """Ask the remote whether it still has the version that was validated last, else for its version."""
        fetcher, target, options = self._fetcher, self._target, self._options
        if (above := self._above()) is not None:
            self._is_stored = True
            return above
        if options.offline:
            raise errors.Offline.of(target.key)
        self._began = self._store.now(exact=True)
        whole = index = info = None
        with contextlib.suppress(errors.CacheFault):  # the first look has reported it
            whole, index = self._entries()
        known = max(filter(None, (whole, index)), key=self._store.validated, default=None)
        if known is not None:
            info = fetcher.validate(target, options, known)
            if info is None and known is whole:
                with contextlib.suppress(errors.CacheFault):
                    if (lease := self._lease(whole)) is not None:
                        return lease
            elif info is None:
                self._is_stored = True
                info = _info_of(known, target.url)
        info = info or fetcher.stat(target, options)
        assert info is not None, "without a known version the remote describes the one that it has"
        if not self._is_expected(info.validator):
            raise errors.ChecksumMismatch.of(target.key, options.etag or "", info.validator or "no ETag", callers_own=True)
        return info

    def _above(self) -> ObjectInfo | None:
        """The version of which the upstream root has blocks, if it was validated lately."""

        def look(above: Store) -> tuple[Entry, int] | None:
            index = above.entry(URLS, index_key(self._target.above))
            return None if index is None else (index, self._fetcher.validated(above, index))

        upstream = self._fetcher.upstream
        found = None if upstream is None else upstream.ask(look)
        if found is None or not self._is_expected(found[0].validator):
            return None
        is_fresh = self._options.offline or found[1] >= self._options.since
        return _info_of(found[0], self._target.url) if is_fresh else None

    def _keep(self, version: Lease | ObjectInfo) -> Lease | ObjectInfo:
        if isinstance(version, ObjectInfo) and is_divisible(version) and version.size is not None and not self._is_stored:
            note = index_meta(version.size)
            self._store.put(URLS, self._key, b"", meta=note, validator=version.validator, validated=self._began)
        return version


# -- reading ------------------------------------------------------------------------------------------------------------


@guarded_methods()
class BlockFile(SeekableFile, io.BufferedIOBase):
    """A read-only, seekable binary file over the blocks of one version of an object. For one thread at a time; after a fork, parent and
    child each have their own position.

    Reading raises `RemoteChanged` if a block is not cached and the remote now has another version, and other errors as `Blocks.obtain`.
    If the server turns out not to support ranges, the whole object is fetched instead."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._ahead = blocks, ReadAhead(blocks)
        self._block_size, self.size = blocks.size, blocks.length
        self._recent: dict[int, memoryview] = {}  # replaced, never changed
        self._whole: BinaryIO | None = None
        self._last = -2  # the block where the last read ended
        self._streak = 0  # reads in a row that went on from there
        self._first = 0  # the block where the first of them began

    def read(self, size: int | None = -1, /) -> bytes:
        self._check_open()
        at = self._at
        end = self.size if size is None or size < 0 else min(at + size, self.size)
        block = self._recent.get(at // self._block_size)
        start = at % self._block_size
        if block is not None and 0 < end - at <= len(block) - start:
            self._at = end
            return bytes(block[start : start + end - at])
        if end - at <= WINDOW:
            return b"".join(self._parts(at, end))
        data = io.BytesIO()  # gives its bytes away without a copy
        for part in self._parts(at, end):
            data.write(part)
        return data.getvalue()

    def read1(self, size: int = -1, /) -> bytes:
        """Bytes up to the end of the current block."""
        left = self._block_size - self._at % self._block_size
        return self.read(left if size < 0 else min(size, left))

    def readinto(self, buffer: Any, /) -> int:
        self._check_open()
        view, done = memoryview(buffer).cast("B"), 0
        for part in self._parts(self._at, min(self._at + len(view), self.size)):
            view[done : done + len(part)] = part
            done += len(part)
        return done

    def readinto1(self, buffer: Any, /) -> int:
        left = self._block_size - self._at % self._block_size
        return self.readinto(memoryview(buffer).cast("B")[:left])

    def peek(self, size: int = 0, /) -> bytes:
        """The next bytes, at least one except at the end, without moving."""
        at = self._at
        try:
            return self.read1(PEEK)
        finally:
            self._at = at

    def readline(self, size: int | None = -1, /) -> bytes:
        at, line = self.tell(), super().readline(size)
        if size is not None and 0 <= size < len(line):  # Python starts to count again behind a `peek` that ended with its block
            line, self._at = line[:size], at + size
        return line

    def close(self) -> None:
        if not self.closed:
            self._ahead.close()
            self._recent = {}
            if self._whole is not None:
                self._whole.close()
        super().close()

    def _parts(self, at: int, end: int) -> Iterator[memoryview]:
        """The bytes from ``at`` to ``end``, block by block; moves the position behind each."""
        if at >= end:
            return
        size, last = self._block_size, (end - 1) // self._block_size
        if at // size in (self._last, self._last + 1):
            self._streak += 1
        else:
            self._streak, self._first = 0, at // size
        self._last = last
        while at < end:
            first = at // size
            numbers = range(first, min(last, first + max(WINDOW // size, 1) - 1) + 1)
            blocks = self._obtain(numbers)
            for number in numbers:
                part = blocks[number][at - number * size : end - number * size]
                yield part
                self._at = at = at + len(part)

    def _obtain(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        found = {number: block for number in numbers if (block := self._recent.get(number)) is not None}
        missing = [number for number in numbers if number not in found]
        if missing and self._whole is None:
            try:
                found |= self._fetch(missing)
            except errors.Unsupported as error:
                log.info("%s: the whole object is fetched: %s", self._blocks.target.key, str(error))
                self._whole = self._blocks.open_whole()
        if self._whole is not None:
            for number in missing:
                span = self._blocks.span(number)
                self._whole.seek(span.start)
                found[number] = memoryview(self._whole.read(span.length))
        last = {number: found[number] for number in numbers[-RECENT:]}
        older = [pair for pair in self._recent.items() if pair[0] not in last]
        self._recent = dict([*older, *last.items()][-RECENT:])
        return found

    def _fetch(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        misses, were_fetched = self._blocks.misses, self._ahead.has_fetched(numbers)
        found = self._blocks.obtain(numbers)
        has_missed = self._blocks.misses > misses
        if has_missed and were_fetched:
            self._ahead.close()  # they were evicted before they were read: what is read ahead would be fetched twice
        # P1 waits for a block that is read ahead / P2 has fetched it, and ends: by then it says so.
        if self._streak >= SEQUENTIAL and (has_missed or self._ahead.is_running or self._ahead.has_fetched(numbers)):
            self._ahead.extend(numbers[-1] + 1, max((numbers[-1] + 1 - self._first) // SHARE, 1))
        return found


class ReadAhead:
    """Fetches the next blocks for a sequential reader, in a thread that lives while there are blocks to fetch.

    A forked child starts its own thread when it reads on."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._is_closed = False
        self._begin()

    def _begin(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._pid = os.getpid()
        self._next = self._end = 0  # the blocks that are still to be fetched
        self._fetched: set[int] = set()
        self.is_running = False

    def extend(self, first: int, count: int) -> None:
        """Fetch ``count`` blocks from ``first`` on, except those that were requested before. Returns at once."""
        if os.getpid() != self._pid:
            self._begin()  # another thread of the parent may have had the lock
        if not self._is_useful():
            return
        end = min(first + min(count, self._most), self._blocks.count)
        with self._lock:
            self._next = self._next if first <= self._next <= end else first
            self._end = end
            self._fetched = {number for number in self._fetched if number >= first}
            if self.is_running or self._next >= end:
                return
            self.is_running = True
        if not DaemonThread(self._run, name="forebay-ahead").begin():
            log.debug("%s is not read ahead: no thread can be started", self._blocks.target.key)
            self.is_running = False

    def has_fetched(self, numbers: Sequence[int]) -> bool:
        """Whether one of these blocks was fetched ahead, and not read yet."""
        return not self._fetched.isdisjoint(numbers)

    def close(self) -> None:
        """Request nothing more. Does not wait for a request that was sent; its blocks are stored."""
        self._is_closed = True

    def _is_useful(self) -> bool:
        """Whether the file is open, and the cache stores what is fetched."""
        return self._blocks.are_kept and not self._is_closed

    @host.cached_property
    def _most(self) -> int:
        """Maximum number of blocks to read ahead."""
        return min(AHEAD, self._blocks.fetcher.most() // 8) // self._blocks.size

    def _take(self) -> range:
        with self._lock:
            most = max(self._blocks.fetcher.options.streams * RUN // self._blocks.size, 1)
            numbers = range(self._next, min(self._next + most, self._end))
            self._next = numbers.stop
            self.is_running = bool(numbers) and self._is_useful()
            return numbers if self.is_running else range(0)

    def _run(self) -> None:
        try:
            while numbers := self._take():
                fetched = self._blocks.fetch_missing(numbers)
                if not fetched:
                    break  # the next blocks are cached, or another process fetches them
                with self._lock:
                    self._fetched = self._fetched.union(fetched)
        except Exception as error:  # noqa: BLE001 (the reader gets it too, if it reads on)
            log.debug("%s is not read ahead: %s", self._blocks.target.key, str(error))
        finally:
            with self._lock:
                self.is_running = False
