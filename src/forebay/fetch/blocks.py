"""Parts of large objects as entries: one version of an object, cut into blocks of one size, each fetched when it is read."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from forebay import _config, errors
from forebay._kernel import waits
from forebay._kernel.threads import run_all
from forebay._logs import logger
from forebay._model import URLS, ObjectInfo, Span
from forebay.fetch.flight import get_or_make, get_or_make_free
from forebay.fetch.request import FetchOptions, Target, block_key, index_key

if TYPE_CHECKING:
    from forebay._engine.flight import KeyHold
    from forebay.fetch import Fetcher

log = logger("forebay.fetch")

AUTO, LEAST, MOST = 8 << 20, 64_000, 64 << 20
"""Bytes of a block: for ``block_size="auto"``, and the limits of other sizes. A block is in memory while it is fetched."""
RUN = 8 << 20
"""Maximum bytes of neighbouring blocks in one request; each larger block has its own request."""
ANY_AGE = 1 << 62
"""Nanoseconds. A block never changes its version, so it is served whatever its age."""


def parse_block_size(value: int | str) -> int:
    """Bytes of a block. Raises `ConfigError`."""
    size = AUTO if isinstance(value, str) and value == "auto" else _config.parse_size(value, name="block_size")
    if not LEAST <= size <= MOST:
        message = f"block_size={value!r}: a block has {LEAST:,} to {MOST:,} bytes"
        raise errors.ConfigError(message, name="block_size", value=value)
    return size


def index_meta(size: int, *, ranges: bool = True) -> str:
    """The metadata of an index: the object's size, and whether the server supports ranges."""
    return json.dumps({"size": size, "ranges": ranges})


class Blocks:
    """One version of one object, cut into blocks of ``size`` bytes, each of which is an entry. Callable from any thread and after a fork.

    ``length``: bytes of the object. ``count``: its number of blocks. ``are_kept``: False once a block could not be stored. ``misses``: the
    number of blocks that `obtain` did not find in the cache."""

    def __init__(self, fetcher: Fetcher, target: Target, info: ObjectInfo, size: int, options: FetchOptions) -> None:
        assert info.size is not None, "the object is divisible"
        self.fetcher, self.target, self.info, self.size = fetcher, target, info, size
        self.length, self.count = info.size, -(-info.size // size)
        self.are_kept, self.misses = True, 0
        self._offline, self._timeout = options.offline, options.timeout
        self._hit = fetcher.store.hot_lookup(URLS)

    def span(self, number: int) -> Span:
        start = number * self.size
        return Span(start, min(self.size, self.length - start))

    def _key(self, number: int) -> str:
        return block_key(self.target.key, number, self.size, self.info.validator)

    def obtain(self, numbers: Sequence[int]) -> dict[int, memoryview]:
        """The bytes of these blocks. Missing blocks are fetched in parallel, each by one process of the node.

        Raises `RemoteChanged` if a block is missing and the remote now has another version; `Unsupported` if the remote cannot send a part
        of the object; `Offline`, or another `RemoteError`."""
        blocks = {number: data for number in numbers if (data := self._cached(number)) is not None}
        missing = [number for number in numbers if number not in blocks]
        self.misses += len(missing)
        if len(missing) > 1:
            blocks |= self._fetch_free(missing)
        for number in missing:
            if number not in blocks:
                blocks[number] = self._fetch_one(number)
        return blocks

    def fetch_missing(self, numbers: Sequence[int]) -> Collection[int]:
        """Fetch the missing blocks that no other thread or process is fetching. Returns their numbers."""
        missing = [number for number in numbers if self.fetcher.store.entry(URLS, self._key(number)) is None]
        return self._fetch_free(missing, ahead=True)

    def open_whole(self) -> BinaryIO:
        """A file object on the whole object, which is fetched if it is missing. Raises `RemoteChanged` if it is another version."""
        wait = None if self._timeout is None else waits.SharedLimit(self._timeout)
        options = FetchOptions(-1, self._offline, etag=self.info.validator, timeout=self._timeout, force=True, wait=wait)
        try:
            return self.fetcher.open(self.target, options)
        except errors.ChecksumMismatch as error:
            raise errors.RemoteChanged(f"{self.target.key} has changed since it was opened", url=self.target.key) from error

    def _cached(self, number: int) -> memoryview | None:
        key, store = self._key(number), self.fetcher.store
        try:
            data = self._hit(key, ANY_AGE)
            if data is None:
                data = store.first_touch(URLS, key, ANY_AGE, maps=True)
            if data is None and (remembered := store.view(URLS, key)) is not None:
                store.touch(remembered.entry)
                store.count_hit(remembered.size)
                data = memoryview(remembered.view)
            upstream = self.fetcher.upstream
            if data is None and upstream is not None:
                above = upstream.view(URLS, block_key(self.target.above, number, self.size, self.info.validator))
                data = None if above is None else memoryview(above.view)
        except (errors.CacheFault, errors.Closed) as error:
            log.debug("%s: %s", key, str(error))
            return None
        return data if data is not None and len(data) == self.span(number).length else None

    def _fetch_one(self, number: int) -> memoryview:
        """A missing block: fetched, or, if another process is fetching it, as that process stores it."""
        began = 0

        def make() -> memoryview:
            nonlocal began
            began = self.fetcher.store.now(exact=True)
            return self._request(self.span(number))

        def keep(data: memoryview) -> memoryview:
            self._put({key: data}, began)
            return data

        look, key, label = partial(self._cached, number), self._key(number), self.target.key
        return get_or_make(
            self.fetcher, URLS, key, look, make, keep, label=label, timeout=self._timeout, counts_miss=True, looked=True,
            asker=self.fetcher.asker(self.target.options),
        )  # fmt: skip

    def _fetch_free(self, numbers: Sequence[int], *, ahead: bool = False) -> dict[int, memoryview]:
        """The bytes of the blocks that no other call is fetching, by one request for each run of neighbours. ``ahead``: the blocks are for
        later reads."""
        keys = {self._key(number): number for number in numbers}

        def make(missing: Sequence[str], holds: Mapping[str, KeyHold]) -> dict[str, memoryview]:
            blocks: dict[str, memoryview] = {}
            if not holds:
                self.are_kept = False
                if ahead:
                    return blocks
            fetches = [partial(self._fetch_run, run, holds, blocks, ahead) for run in self._runs([keys[key] for key in missing])]
            run_all(fetches, self.fetcher.options.streams, name="blocks", inline=True)
            return blocks

        found = get_or_make_free(
            self.fetcher, URLS, list(keys), lambda key: self._cached(keys[key]), make, label=self.target.key
        )  # fmt: skip
        return {keys[key]: data for key, data in found.items()}

    def _runs(self, numbers: Sequence[int]) -> Iterator[list[int]]:
        """The numbers in groups of neighbours, each of at most `RUN` bytes."""
        run: list[int] = []
        for number in numbers:
            if run and (number != run[-1] + 1 or (len(run) + 1) * self.size > RUN):
                yield run
                run = []
            run.append(number)
        if run:
            yield run

    def _fetch_run(self, run: Sequence[int], holds: Mapping[str, KeyHold], blocks: dict[str, memoryview], ahead: bool) -> None:
        """Fetch neighbouring blocks by one request; if their keys are held, store them and release the keys."""
        store, first, last = self.fetcher.store, self.span(run[0]), self.span(run[-1])
        store.count("misses", len(run))
        began = store.now(exact=True)
        try:
            with store.locks.working():
                data = self._request(Span(first.start, last.end - first.start))
        except Exception as error:
            for number in run if holds else ():
                store.locks.note_failure(URLS, self._key(number), error, self.fetcher.asker(self.target.options))
            raise
        spans = {self._key(number): self.span(number) for number in run}
        came = {key: data[span.start - first.start : span.end - first.start] for key, span in spans.items()}
        blocks |= came
        if not holds:
            return
        try:
            self._put(came, began, ahead=ahead)
        except (errors.CacheFault, errors.Closed) as error:
            self.fetcher.fall_back(error, self.target.key)
        for key in came:
            holds[key].release()

    def _request(self, span: Span) -> memoryview:
        """Bytes of this version, from the remote."""
        fetcher, target = self.fetcher, self.target
        if self._offline:
            raise errors.Offline.of(target.key)
        wait = None if self._timeout is None else waits.SharedLimit(self._timeout)
        try:
            ask = partial(target.remote.read, target.url, span, info=self.info, exact=True)
            data = fetcher.receive(target.key, ask, FetchOptions(wait=wait))
            if len(data) != span.length:
                raise errors.RemoteChanged(f"{target.key} is shorter than the {self.length:,} bytes that it had", url=target.key)
        except (errors.RemoteChanged, errors.Unsupported) as error:
            self._note_in_index(error)
            raise
        return memoryview(data)

    def _note_in_index(self, error: errors.RemoteError) -> None:
        """Make the next call that opens the object ask the remote for its new version, or fetch the object whole."""
        store, key = self.fetcher.store, index_key(self.target.key)
        try:
            index = store.entry(URLS, key)
            if index is None or index.validator != self.info.validator:
                return
            if isinstance(error, errors.RemoteChanged):
                store.invalidate([index])
            else:
                note, at = index_meta(self.length, ranges=False), store.validated(index)
                store.put(URLS, key, b"", meta=note, validator=index.validator, validated=at)
        except (errors.CacheFault, errors.Closed) as fault:
            log.debug("%s: %s", key, str(fault))

    def _put(self, blocks: Mapping[str, memoryview], began: int, *, ahead: bool = False) -> None:
        store = self.fetcher.store
        try:
            store.put_many(URLS, list(blocks.items()), validator=self.info.validator, validated=began, ahead=ahead)
        except (errors.CacheFault, errors.Closed):
            self.are_kept = False
            raise
        store.count("fills", len(blocks))
