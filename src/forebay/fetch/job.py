"""One object of a call, from the first look into the cache to its bytes, a lease, or an error."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from forebay import _model, errors
from forebay._engine.files.layout import CatalogBroken
from forebay._engine.index.head import SharedBroken
from forebay._engine.leases import Lease, in_place
from forebay._kernel import waits
from forebay._model import URLS, Asker, Buffer, BufferSink, Entry, ObjectInfo, Partial, Sink, Span, Started, can_check, can_clone
from forebay.fetch.request import FetchOptions, Target, is_expected, is_same_version, sha256_of

if TYPE_CHECKING:
    from forebay._engine.files.stages import MemoryStage
    from forebay._engine.flight import KeyHold
    from forebay._engine.index.memo import Remembered
    from forebay._engine.null_store import NullStore
    from forebay._engine.publish import Writing
    from forebay._engine.store import Store
    from forebay.fetch import Fetcher

SMALL = 256 << 10
"""Bytes of an object that is collected in memory, and published with others."""
AT_ONCE = 16 * SMALL
"""Bytes up to which an object is collected in memory if only its file is wanted, and nobody could resume it: it then needs no reservation,
no map of its chunks, and no second name."""
REOPENED = CatalogBroken, SharedBroken
"""What work raises that runs once only: the root was deleted or replaced meanwhile, and is open again."""
NO_ENTRY = 0, 0
"""The stamp that a job has seen where there was no entry."""


@dataclass(slots=True, eq=False)
class Job:
    """One object of a call, and its result: ``data``, a ``lease``, or an ``error``. For one thread at a time.

    ``number``: the caller's own. ``leased``: the result is a lease on its file; else its bytes, also of an object for which the cache has
    no room. ``is_function``: a function of the caller's makes the bytes, no remote. ``in_memory``, of a leased one: without room for the
    file, its bytes are in ``data``, beside the error. ``stores``: whether to store an object that the cache does not have. ``is_busy``:
    another caller fetches it, and this job was not to wait; ``since``: the time since which it has waited, in nanoseconds of the monotonic
    clock."""

    fetcher: Fetcher
    target: Target
    options: FetchOptions
    number: int = 0
    leased: bool = False
    is_function: bool = False
    in_memory: bool = False
    stores: bool = True
    since: int | None = None
    is_busy: bool = False
    data: memoryview | None = None
    lease: Lease | None = None
    error: BaseException | None = None

    store: Store | NullStore = field(init=False)
    stamp: tuple[int, int] | None = None  # of the entry that the first look saw
    has_entry: bool = False  # there is one, which must be validated or replaced
    has_partial: bool = True  # a fetch whose process died may have left one
    began: int = 0  # when the remote was asked, on the clock of the store
    started: Started | None = None  # the request, if it is under way
    hold: KeyHold | None = None
    writing: Writing | None = None  # the whole object, in memory, to be published
    is_here: bool = False  # its bytes are in memory before it is made
    by_thread: bool = False  # a thread of a pipeline has it
    window: int = 0  # what it takes of the pipeline's window
    turn: list[bool] = field(default_factory=list)  # not empty while a thread may begin to make it
    ready: list[bool] = field(default_factory=lambda: [False, True])
    # Popped when the request was started, and when its response is ready: the second of them goes on.

    def __post_init__(self) -> None:
        self.store = self.fetcher.store

    @property
    def skips_cache(self) -> bool:
        """Whether it is neither looked for in the cache nor stored."""
        return (self.target.in_place is not None and not self.options.force) or (self.options.bypass and not self.leased)

    @property
    def asker(self) -> Asker:
        """See `Flight.note_failure`."""
        return self.fetcher.asker(self.target.options, runs_function=self.is_function)

    @property
    def needs_file(self) -> bool:
        """Whether a tiny value, which has no file, is not enough."""
        return self.leased and self.target.space == URLS

    @property
    def collected(self) -> MemoryStage:
        """The bytes of `writing`."""
        collected = self.writing.collected if self.writing is not None else None
        assert collected is not None, "what is published together is in memory"
        return collected

    # -- alone -----------------------------------------------------------------------------------------------------

    def run(self, *, publishes: bool = True) -> None:
        """Get the result in the calling thread, which waits for other callers that fetch the object. Raises what `attempt` notes.

        ``publishes=False``: leave a small object that was fetched in `writing`, and its key held."""
        options, key = self.options, self.target.key
        with waits.time_limit(options.timeout):
            if self.skips_cache:
                return self.skip_cache()
            try:
                # P1 and P2 see no entry / P1 holds the key, fetches, releases / P2 holds the key: without a second look it fetches again.
                if not self.look():
                    made = partial(self._made, publishes)
                    make_once = self.store.locks.make_once(
                        self.target.space, key, self.look, made, waits.wait_here, timeout=options.timeout, on_wait=options.on_wait,
                        asker=self.asker,
                    )  # fmt: skip
                    waits.run(make_once)
                if self.error is not None:
                    error, self.error = self.error, None
                    raise error
            except (errors.CacheFault, errors.WaitTimeout) as error:
                self.bypass(error)
                if self.error is not None:
                    self.error = None
                    raise

    async def _made(self, publishes: bool, hold: KeyHold) -> Job:
        self.hold = hold
        self.make()
        if self.writing is not None and publishes:
            if (fault := publish_together([self])) is not None:
                self.settle(fault)
        elif self.writing is not None:
            self.hold = hold.handed_over()
        return self

    # -- looking ---------------------------------------------------------------------------------------------------

    def look(self) -> Job | None:
        """Serve what the cache has, if it is what the caller asked for: then this job is returned. Raises `CacheFault`."""
        found = self._find()
        self.has_entry = found is not None
        if found is not None and self.may_serve(found):
            if not isinstance(found, Lease):
                self.store.touch(found.entry)
            self.store.count_hit(found.entry.size)
            return self if self.serve(found) else None
        if isinstance(found, Lease):
            found.close()
        self.stamp = self.stamp or NO_ENTRY
        return None

    def _find(self) -> Lease | Remembered | None:
        find = self.store.lease if self.needs_file else self.store.take if self.leased else self.store.view
        return find(self.target.space, self.target.key)

    def may_serve(self, found: Lease | Remembered) -> bool:
        """Whether this entry is fresh, and what the caller expects. A refresh takes only what another caller validated since its own first
        look."""
        stamp = self.store.stamp(found.entry)
        is_old = self.options.refresh and self.stamp in (None, stamp)
        self.stamp = self.stamp or stamp
        return not is_old and self.fetcher.is_fresh(found.entry, self.options) and is_expected(found, self.options)

    def serve(self, found: Lease | Remembered) -> bool:
        """Make this entry the result. False if its bytes are damaged or gone."""
        target, entry = self.target, found.entry
        if self.options.pin and entry.life != "pinned":
            self.store.set_life(target.space, target.key, "pinned")
        if isinstance(found, Lease):
            if self.leased:
                self.lease = found
                return True
            with found:
                mapped = self.store.view_leased(target.space, target.key, found)
            if mapped is None:
                return False
            found = mapped
        if target.space == URLS:
            self.store.alias(URLS, self.fetcher.alias(target.url, target.key), found)
        self.data = memoryview(found.view)
        return True

    # -- fetching, under the key's lock ----------------------------------------------------------------------------

    def attempt(self) -> None:
        """`make`, for a pipeline: an error becomes the result, and that of the callers that wait for the key."""
        try:
            with waits.time_limit(self.options.timeout):
                if self.hold is None:
                    self.skip_cache()
                else:
                    with self.store.locks.working():
                        self.make()
        except (errors.CacheFault, errors.WaitTimeout) as error:
            try:
                self.bypass(error)
            except Exception as other:  # noqa: BLE001 (the result of this job)
                self.error = other
        except Exception as error:  # noqa: BLE001 (the result of this job)
            self.fail(error)

    def make(self) -> None:
        """Validate the entry, else fetch the object. A small one is then in `writing`, and the caller publishes it.

        Caller: holds the key's lock, and has looked under it. Raises `RemoteError`, `CacheFault`, `ChecksumMismatch`, `Offline`."""
        known = self._known() if self.has_entry else None
        if known is not None and not self._checks():
            if self._is_current(known):
                return
            known = None
        if self.stores or self.has_entry or self.has_partial:
            self._fetch(known)
        else:
            self.store.count("misses")
            self.data = self.direct()

    def _known(self) -> Entry | None:
        """The entry, if the remote is to be asked whether it still has this version."""
        found = self._find()
        if isinstance(found, Lease):
            found.close()  # the version that replaces it may need its room
        if found is None or not is_expected(found, self.options):
            return None
        self.fetcher.refuse_offline(self.target, self.options)
        return found.entry

    def _checks(self) -> bool:
        """Whether one request compares the version and fetches another."""
        return self.fetcher.upstream is None and can_check(self.target.remote)

    def _is_current(self, known: Entry, sink: JobSink | None = None) -> bool:
        """Serve the entry, if the remote still has this version, or cannot be reached. ``sink``: see `Fetcher.validate`."""
        if self.fetcher.validate(self.target, self.options, known, sink) is not None:
            return False
        found = self._find()
        if found is None:
            return False  # evicted meanwhile
        self.store.count_hit(found.entry.size)
        is_served = self.serve(found)
        if isinstance(found, Lease) and self.lease is not found:
            found.close()
        return is_served

    def _fetch(self, known: Entry | None = None) -> None:
        """Fetch the object; or serve the ``known`` entry, if the remote still has this version."""
        fetcher, store, target, options = self.fetcher, self.store, self.target, self.options
        copy = fetcher.upstream_copy(target, options)
        validated = copy[1] if copy is not None else self.began or store.now(exact=True)
        is_in_memory_anyway = self.leased and (target.space != URLS or not self.in_memory)
        with store.writing(
            target.space, target.key, suffix=target.suffix, life="pinned" if options.pin else options.life, validated=validated,
            resume=self.has_partial, on_progress=options.on_progress, collect=AT_ONCE if is_in_memory_anyway else SMALL,
            ahead=options.ahead,
        ) as writing:  # fmt: skip
            writing.inline = target.space != URLS
            sink = JobSink(self, writing)
            if copy is not None:
                sink.begin(ObjectInfo(target.key, copy[0].size, copy[0].entry.validator, varies=copy[0].entry.varies))
                sink.write(0, copy[0].view)
            else:
                fetcher.refuse_offline(target, options)
                if known is not None and self._is_current(known, sink):
                    return
                store.count("misses")
                if sink.info is None:
                    fetcher.receive(target.key, self._ask(sink), options)
            if sink.fault is not None:
                self.data = self._checked(sink)
                raise sink.take_fault()
            facts: dict[str, object] = {}
            if digest := self._digest(writing.info, writing.sha256):
                facts["sha256"] = digest
            if writing.info is not None and writing.info.varies:
                facts["varies"] = True
                writing.set_validated(0)
            if facts:
                writing.set_meta(json.dumps(facts))
            if writing.info is not None and writing.info.note:
                writing.set_meta(writing.info.note)
            if writing.collected is not None:
                self.writing = writing
                return
            lease = writing.publish_leased(validator=writing.info.validator if writing.info else None)
        self._count_stored(lease.entry)
        if not self.serve(lease):
            raise errors.CacheFault(f"{target.key} cannot be mapped", key=target.key)

    def _count_stored(self, entry: Entry) -> None:
        self.store.count("fills")
        self.store.count("bytes_stored", entry.size)

    def _ask(self, sink: Sink) -> Callable[[], _model.Transfer]:
        """A function that has the remote, or the request that is under way, send the object to a sink."""
        target, started, self.started = self.target, self.started, None
        if started is not None:
            return lambda: started.into(sink)
        return lambda: target.remote.fetch(target.url, sink, listed=self.options.listed)

    def settle(self, published: Entry | Lease | errors.CacheFault) -> None:
        """Have what was collected published as this, or not."""
        collected, self.writing = self.collected, None
        if not self.leased or (self.in_memory and isinstance(published, errors.NoSpace)):
            self.data = memoryview(collected.data).toreadonly()
        if isinstance(published, errors.CacheFault):
            if self.leased:
                self.error = published
            else:
                self.fetcher.fall_back(published, self.target.key)
            return
        self._count_stored(published.entry if isinstance(published, Lease) else published)
        self.lease = published if isinstance(published, Lease) else None

    # -- without the cache -----------------------------------------------------------------------------------------

    def skip_cache(self) -> None:
        """Get the result without the cache: a local file as its own path, or the bytes from the remote."""
        if self.leased and self.target.in_place is not None:
            self.lease = in_place_file(self.target, self.target.in_place)
        else:
            self.data = self.direct()

    def bypass(self, error: errors.ForebayError) -> None:
        """The cache cannot serve or store it. The callers that wait for the key go on; this one gets the bytes, or the error if it wants a
        lease."""
        self.release()
        if self.leased:
            self.error = error.with_traceback(None)
            return
        self.fetcher.fall_back(error, self.target.key)
        if self.data is None:
            self.data = self.direct()

    def direct(self) -> memoryview:
        """The whole object, in memory or over the mapping of the upstream root. Raises `RemoteError`, `ChecksumMismatch`, `Offline`."""
        fetcher, target, options = self.fetcher, self.target, self.options
        copy = fetcher.upstream_copy(target, options) if not options.bypass else None
        if copy is not None and options.sha256 is None and options.etag is None:
            return memoryview(copy[0].view)
        sink = JobSink(self)
        if target.in_place is not None:
            self._ask(sink)()
        else:
            fetcher.refuse_offline(target, options)
            fetcher.receive(target.key, self._ask(sink), options)
        return self._checked(sink)

    def _checked(self, sink: JobSink) -> memoryview:
        self._digest(sink.info, lambda: sha256_of(sink.data))
        return memoryview(sink.data).toreadonly()

    def _digest(self, info: ObjectInfo | None, digest_of: Callable[[], str]) -> str | None:
        """The SHA-256 of the bytes, if the caller or the remote says what it must be. Raises `ChecksumMismatch`."""
        expected = {digest.lower() for digest in (self.options.sha256, info.sha256 if info is not None else None) if digest}
        if not expected:
            return None
        digest = digest_of()
        if expected != {digest}:
            is_own = info is None or not info.sha256 or info.sha256.lower() == digest
            wanted = f"sha256 {min(expected - {digest})}"
            raise errors.ChecksumMismatch.of(self.target.key, wanted, f"sha256 {digest}", callers_own=is_own)
        return digest

    # -- the end ---------------------------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Note an error: callers in other processes that wait for the key get one of the source too."""
        if self.hold is not None and isinstance(error, Exception):
            self.store.locks.note_failure(self.target.space, self.target.key, error, self.asker)
        self.error = error

    def release(self) -> None:
        """Let go of the key. Callable from any thread; idempotent."""
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.release()

    def take_turn(self) -> bool:
        """Whether the calling thread is the one that makes it. Callable from any thread."""
        with contextlib.suppress(IndexError):
            return self.turn.pop()
        return False

    def give_up(self) -> None:
        """Let go of the request and the key."""
        if self.started is not None:
            self.started.close()
        self.release()


def in_place_file(target: Target, path: str) -> Lease:
    """A lease on a local file, which is its own copy. Raises `NotFound`, and `RemoteError` as `read` does for what is no file: to open a
    pipe would be to wait for ever."""
    lease = in_place(path)
    if lease.entry.kind != "file":
        target.remote.stat(target.url)
    return lease


def publish_together(jobs: Sequence[Job]) -> errors.CacheFault | None:
    """Publish in one transaction what these jobs of one space have collected, and settle them. Returns why they are not published, if they
    are not. Caller: holds their keys."""
    try:
        with waits.time_limit(jobs[0].options.timeout):
            writings = [job.writing for job in jobs if job.writing is not None]
            published = jobs[0].store.publish_collected(writings, [job.leased for job in jobs])
    except errors.CacheFault as error:
        return error.with_traceback(None)
    for job, result in zip(jobs, published, strict=True):
        job.settle(result)
    return None


def publish_singly(jobs: Sequence[Job], fault: errors.CacheFault | None) -> Iterator[Job]:
    """After `publish_together`: publish one by one what this did not, where there may be room for some, or one may be at fault. Yields each
    job as it is settled: a lease that the caller closes makes room for the next."""
    if fault is not None and len(jobs) > 1:
        for job in jobs:
            yield from publish_singly([job], publish_together([job]))
        return
    for job in jobs:
        if fault is not None:
            job.settle(fault)
        yield job


class JobSink:
    """Receives the bytes of a job: into the cache as far as this accepts them, else into memory, so that nothing is requested again. The
    key is released as soon as it is known that nothing will be stored. Refuses any version but the expected one before its first byte."""

    def __init__(self, job: Job, writing: Writing | None = None) -> None:
        """``writing``: None to keep the bytes in memory."""
        self._job, self._writing = job, writing
        self.partial: Partial | None = None if writing is None else writing.partial
        may_hold = writing is None or ((job.in_memory or not job.leased) and writing.partial is None)
        self.most = job.fetcher.most if may_hold else None  # see `BufferSink`
        self._memory = BufferSink(job.fetcher.most) if may_hold else None
        if writing is not None and may_hold:
            writing.spills = True
        self.info: ObjectInfo | None = None
        self.fault: errors.CacheFault | None = None
        """Why the bytes are in memory."""

    @property
    def data(self) -> bytearray:
        assert self._memory is not None
        return self._memory.data

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`."""
        etag = self._job.options.etag
        if etag and not is_same_version(info.validator, etag):
            raise errors.ChecksumMismatch.of(self._job.target.key, etag, info.validator or "no ETag", callers_own=True)
        self.info = info
        if self._writing is not None:
            try:
                return self._writing.begin(info)
            except errors.CacheFault as error:
                self._stop_storing(error)
        assert self._memory is not None
        return self._memory.begin(info)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        writing, memory = self._writing, self._memory
        if writing is not None:
            try:
                writing.write(offset, data)
                return
            except errors.NoSpace as error:
                if memory is None or self.info is None or self.info.size is not None:
                    raise  # parts may come from several threads
                memory.begin(self.info)
                writing.move_to(memory)
                self._stop_storing(error)
        assert memory is not None
        memory.write(offset, data)

    def take_fault(self) -> errors.CacheFault:
        """`fault`, once: a sink that refers to the error that is raised, whose frames refer to the sink, would stay in memory."""
        fault, self.fault = self.fault, None
        assert fault is not None
        return fault

    def _stop_storing(self, error: errors.CacheFault) -> None:
        if self._memory is None:
            raise error
        self.fault, self._writing = error.with_traceback(None), None  # its frames refer to what they have mapped
        self._job.release()

    def clone(self, fd: int) -> bool:
        """See `CloningSink.clone`."""
        return self._writing is not None and can_clone(self._writing) and self._writing.clone(fd)
