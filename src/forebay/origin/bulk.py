"""Many objects at once: looked up together, fetched side by side, published together.

look      one query for a group of keys; what is there is delivered at once
hold      the locks of the missing keys, as far as they are free, and a second look: no other process fetches them now
fetch     small objects of HTTP and S3 by the one loop of the process; what needs more than one response, by threads
publish   what has come meanwhile, in one transaction
wait      last, when this call holds no key: for the objects that other processes fetch
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from forebay import errors
from forebay._engine.locks.lease import Lease
from forebay._kernel import waits
from forebay._kernel.threads import Threads
from forebay._model import Entry, Started, can_start, is_near
from forebay.origin.request import FetchOptions, SpillingSink, Target, is_expected
from forebay.origin.spaces import URLS
from forebay.remote.base import CallAborted, sent_together

if TYPE_CHECKING:
    from forebay._engine.files.stages import MemoryStage
    from forebay._engine.flight import KeyHold
    from forebay._engine.write.writing import Writing
    from forebay.origin import Origin

TURN = 0.1  # seconds
LULL = 0.002  # seconds
"""What has come is published when nothing more came for so long: responses to what was sent together come one after the other."""
GROUP = 16
"""Objects that are looked up together, and published together at most."""
_NO_ENTRY = 0, 0
SMALL = 256 << 10
"""Bytes of an object that is collected in memory, and published with others."""
AT_ONCE = GROUP * SMALL
"""Bytes that are published as soon as they have come; so one transaction writes less than twice as many. A larger object that nobody could
resume, and of which only the file is wanted, is collected up to this size: it needs no reservation, no chunk map and no second name."""
WINDOW = 2 * AT_ONCE
"""Bytes of larger collected objects under way at a time, where no network is waited for: more would come no sooner, and each into memory
that was not used before, which costs as much as to copy the bytes."""


@dataclass(slots=True, eq=False)
class Wanted:
    """One object of many, and what became of it: ``data`` or a ``lease``, or an ``error``. ``leased``: a lease on its file is wanted; else
    its bytes, of an object without room in the cache too. ``spills``, of one that is to be leased: where the cache has no room for it, its
    bytes stand beside that error. ``stores``: an object that the cache does not have is stored there; else only its bytes are wanted.
    ``stamp``: of the entry that the first look saw. ``is_busy``: another call is fetching it; ``since``
    (nanoseconds of the monotonic clock) it has been waited for."""

    target: Target
    options: FetchOptions
    number: int = 0
    leased: bool = False
    spills: bool = False
    stores: bool = True
    stamp: tuple[int, int] | None = None
    is_busy: bool = False
    since: int | None = None
    lease: Lease | None = None
    data: memoryview | None = None
    error: Exception | None = None

    def get_alone(self, origin: Origin, options: FetchOptions) -> Wanted:
        """Have the result as a call for this object alone gets it, which waits for others."""
        try:
            if self.leased:
                self.lease = origin.local(self.target, options)
            else:
                self.data = origin.read(self.target, options)
        except Exception as error:  # noqa: BLE001 (the result of this request)
            self.error = error
        return self


class _Fetch:
    """A request under way, whose result comes by the loop of transfers, or by a thread.

    ``hold``: the lock of its key, unless the cache does not serve it. ``has_entry``: there is one, which has to be validated or replaced.
    ``has_remains``: a fetch that died left a part of it.
    ``began``: when it was asked for, on the clock of the store. ``by_thread``: a thread has it, and ends it."""

    __slots__ = ("began", "begun", "by_thread", "counted", "has_entry", "has_remains", "hold", "ready", "request", "writing")

    def __init__(self, request: Wanted, hold: KeyHold | None = None, *, has_entry: bool = False) -> None:
        self.request, self.hold, self.has_entry = request, hold, has_entry
        self.began, self.by_thread, self.has_remains = 0, False, False
        self.counted = 0  # bytes of the window that it takes
        self.ready = [False, True]  # taken by what begins the request, and by what is told that its response is ready: the second goes on
        self.begun: Started | None = None
        self.writing: Writing | None = None

    def release(self) -> None:
        hold, self.hold = self.hold, None
        if hold is not None:
            hold.release()

    def give_up(self) -> None:
        if self.begun is not None:
            self.begun.close()
        self.release()


class BulkFetch:
    """Fetches the objects of one call. For one thread.

    ``side_by_side``: objects under way at a time (default: as many as the process may have connections). ``waits``: for objects that other
    calls are fetching; else their requests come back with ``is_busy``. ``on_turn`` is called about ten times a second, and at the end;
    ``meanwhile`` once, as soon as requests have been sent: what need not be done before."""

    def __init__(
        self, origin: Origin, *, side_by_side: int | None = None, waits: bool = True, on_turn: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        self._origin, self._store, self._waits, self._on_turn, self._meanwhile = origin, origin.store, waits, on_turn, meanwhile
        self._most = origin.options.connections if side_by_side is None else max(side_by_side, 1)
        self._threads = Threads(self._fetch_in_thread, self._most, name="bulk")
        self._events: queue.SimpleQueue[Callable[[], Iterator[Wanted]]] = queue.SimpleQueue()
        self._under_way: set[_Fetch] = set()
        self._collected: list[_Fetch] = []  # have come, and are to be published
        self._collected_bytes = 0
        self._held_back: deque[_Fetch] = deque()  # until the window has room
        self._window = 0  # bytes
        self._waiting: list[Wanted] = []  # for other processes
        self._is_quiet = False  # nothing came for the time of a `LULL`
        self._left: int | None = None  # requests that were not taken yet; None: their number is not known
        self._given_up = False
        self._turn_at = 0.0
        self._waited_until: float | None = None  # when the time for all waits of this call is over

    def run(self, requests: Iterable[Wanted]) -> Generator[Wanted, None, None]:
        """Yield each request when it has its result, in the order in which these come. Takes from ``requests`` as places become free.

        Closing the iterator gives up what is under way, and does not wait for threads that still fetch."""
        self._left = len(requests) if isinstance(requests, Sized) else None
        yield from self.run_as_they_come(_taking(requests))

    def run_as_they_come(self, take: Callable[[int], Sequence[Wanted] | None]) -> Iterator[Wanted]:
        """`run`, for requests that ``take`` returns, a number of them at most: none while there are none, None after the last. `wake` has
        it called again."""
        try:
            yield from self._run(take)
            while self._waiting:
                again, self._waiting = self._waiting, []
                yield from self._run(_taking(again))
                # Others still have every key. This call has none, so no process can wait for this one while this one waits.
                if len(self._waiting) == len(again):
                    yield self._wait_for(self._waiting.pop(0))
        finally:
            self._given_up = True  # before anything is looked at: a thread that ends later releases its key itself
            left = set(self._threads.close())
            for fetch in list(self._under_way):
                if fetch in left or not fetch.by_thread:
                    fetch.give_up()

    def wake(self) -> None:
        """There may be more requests. Callable from any thread."""
        self._events.put(_nothing)

    def stop(self) -> None:
        """Have `run_as_they_come` give up, and raise `CallAborted`. Callable from any thread."""
        self._events.put(_give_up)

    def _run(self, take: Callable[[int], Sequence[Wanted] | None]) -> Iterator[Wanted]:
        more = True
        while more or self._under_way or not self._events.empty():
            while more and (places := self._places()):
                with self._store.locks.working():  # this call may hold keys: what gives the requests must not wait for those of others
                    group = take(min(places, GROUP))
                more = group is not None
                if not group:
                    break
                if self._left is not None:
                    self._left = max(self._left - len(group), 0)
                yield from self._begin(group)
            meanwhile, self._meanwhile = self._meanwhile, None
            if meanwhile is not None:
                with self._store.locks.working():
                    meanwhile()
            is_group_full = len(self._collected) >= GROUP or self._collected_bytes >= AT_ONCE
            if self._collected and (is_group_full or self._is_lull()):
                yield from self._publish()
            elif self._under_way or more or not self._events.empty():
                yield from self._next_event()
        self._turn()

    def _is_lull(self) -> bool:
        """Whether what was collected need not wait for more, which would be published with it."""
        return self._events.empty() and (self._is_quiet or not self._collected or len(self._collected) == len(self._under_way))

    def _turn(self) -> None:
        self._turn_at = time.monotonic() + TURN
        if self._on_turn is not None:
            with self._store.locks.working():
                self._on_turn()

    def _places(self) -> int:
        """How many objects may be begun now. Several at once, for one query, as long as there is something else to do."""
        places = self._most - len(self._under_way) + len(self._collected)
        enough = min(GROUP, max(self._most // 2, 1), self._left or GROUP)
        return places if places >= enough or (places > 0 and self._is_lull()) else 0

    def _next_event(self) -> Iterator[Wanted]:
        while True:  # in short turns: another thread may have got the signal of Ctrl-C, and nothing would wake this one
            try:
                event = self._events.get(timeout=LULL if self._collected else TURN)
                self._is_quiet = False
            except queue.Empty:
                if self._collected:
                    self._is_quiet = True
                    return _nothing()
                self._turn()
                continue
            if time.monotonic() >= self._turn_at:
                self._turn()
            return event()

    # -- look and hold ---------------------------------------------------------------------------------------------

    def _begin(self, group: Sequence[Wanted]) -> Iterator[Wanted]:
        wanted: dict[str, Wanted] = {}
        for request in group:
            if request.options.bypass or (request.target.in_place and not request.options.force):
                self._give_to_thread(_Fetch(request))
            elif wanted.setdefault(request.target.key, request) is not request:
                self._leave(request)  # it is a hit by then
        held: dict[str, _Fetch] = {}
        try:
            yield from self._look(wanted, stale := set[str]())
            self._hold(wanted, held)
            # P1 and P2 see no entry / P1 holds the key, fetches, releases / P2 holds the key: without a second look it fetches again.
            wanted = {key: fetch.request for key, fetch in held.items()}
            for request in self._look(wanted, stale):
                yield from self._end(held.pop(request.target.key))
            for request in self._failed_meanwhile(wanted.values()):
                yield from self._end(held.pop(request.target.key))
            began = self._store.now(exact=True) if held else 0
            started = self._store.locks.with_remains(URLS, held) if held else set()
        except (errors.CacheFault, errors.Closed) as error:
            for key, request in wanted.items():
                self._past_the_cache(held.get(key) or _Fetch(request), error)
            return
        with sent_together():
            for key, fetch in held.items():
                fetch.began, fetch.has_entry, fetch.has_remains = began, key in stale, key in started
                if fetch.has_remains:  # what is asked for depends on what is there
                    self._give_to_thread(fetch)
                else:
                    self._start(fetch)

    def _look(self, wanted: dict[str, Wanted], stale: set[str]) -> Iterator[Wanted]:
        """Serve what is there, and take it out of ``wanted``. ``stale`` gets the keys whose entries cannot be served as they are."""
        leases = self._store.take_many(URLS, list(wanted)) if wanted else {}
        for key, lease in leases.items():
            request = wanted[key]
            if self._is_usable(request, lease) and self._serve(request, lease):
                self._store.count_hit(lease.entry.size)
                del wanted[key]
                yield request
            else:
                lease.close()
                stale.add(key)
        for request in wanted.values():
            request.stamp = request.stamp or _NO_ENTRY

    def _is_usable(self, request: Wanted, lease: Lease) -> bool:
        options = request.options
        if options.refresh and not self._was_validated_meanwhile(request, lease):
            return False
        if (options.sha256 or request.leased) and not (lease.entry.kind == "blob" and self._store.keeps and self._store.is_sound(lease)):
            return False
        return self._origin.is_fresh(lease.entry, options) and is_expected(lease, options)

    def _was_validated_meanwhile(self, request: Wanted, lease: Lease) -> bool:
        """Whether another call has validated or fetched the object since this one first looked."""
        stamp = self._store.stamp(lease.entry)
        if request.stamp is None:
            request.stamp = stamp
        return stamp != request.stamp

    def _serve(self, request: Wanted, lease: Lease) -> bool:
        """Give a request the lease, or the bytes. False where these are damaged or gone."""
        if request.options.pin and lease.entry.life != "pinned":
            self._store.set_life(URLS, request.target.key, "pinned")
        if request.leased:
            request.lease = lease
            return True
        with lease:
            hit = self._store.view_leased(URLS, request.target.key, lease)
        if hit is not None:
            self._store.alias(URLS, self._origin.alias(request.target.url, request.target.key), hit)
            request.data = memoryview(hit.view)
        return hit is not None

    def _hold(self, wanted: dict[str, Wanted], held: dict[str, _Fetch]) -> None:
        """Lock the keys that are free. To wait for another key while holding these could be to wait for ever: those come last."""
        for key, request in list(wanted.items()):
            hold = self._store.locks.try_hold(URLS, key)
            if hold is None:
                self._leave(wanted.pop(key))
            else:
                held[key] = _Fetch(request, hold)
                self._under_way.add(held[key])

    def _failed_meanwhile(self, requests: Iterable[Wanted]) -> list[Wanted]:
        """Those that waited for a call that has failed since: they get its error."""
        failed: list[Wanted] = []
        for request in requests:
            if request.since is not None and not request.options.refresh:
                request.error = self._store.locks.failure(URLS, request.target.key, request.since)
                if request.error is not None:
                    failed.append(request)
        return failed

    def _leave(self, request: Wanted) -> None:
        request.since = time.monotonic_ns() if request.since is None else request.since
        if self._waits:
            self._waiting.append(request)
        else:
            request.is_busy = True
            self._events.put(partial(iter, (request,)))

    def _wait_for(self, request: Wanted) -> Wanted:
        """The object that another process is fetching."""
        options = request.options
        if options.timeout is not None:  # all waits of a call share it
            self._waited_until = self._waited_until or time.monotonic() + options.timeout
            options = options._replace(timeout=max(self._waited_until - time.monotonic(), 0.0))
        return request.get_alone(self._origin, options)

    # -- fetch -----------------------------------------------------------------------------------------------------

    def _start(self, fetch: _Fetch) -> None:
        """Ask for an object: by the loop of transfers where one response may be enough, else by a thread."""
        target, options = fetch.request.target, fetch.request.options
        if not fetch.has_entry and not options.offline and self._origin.upstream is None:
            try:
                remote = target.remote
                if can_start(remote):
                    with self._origin.reaching(options):
                        fetch.begun = remote.start(target.url, partial(self._is_ready, fetch))
            except errors.ForebayError as error:
                fetch.request.error = error
                self._events.put(partial(self._end, fetch))
                return
        if fetch.begun is None:
            self._give_to_thread(fetch)
        else:
            self._is_ready(fetch)

    def _is_ready(self, fetch: _Fetch) -> None:
        """In any thread: the response of a fetch that was begun has ended, or is too large for memory.

        A thread goes on with a large one at once: the caller's own thread may wait for something that needs the connection."""
        if not fetch.ready.pop():
            if fetch.begun is not None and fetch.begun.is_here(SMALL):
                self._events.put(partial(self._arrived, fetch))
            else:
                self._hand_over(fetch)

    def _hand_over(self, fetch: _Fetch) -> None:
        """Have a thread fetch an object. Where none can be started the caller's own does, in turn."""
        fetch.by_thread = True
        if not self._threads.submit(fetch):
            fetch.by_thread = False  # before the look: who gives up looks at it after it has said so
            if self._given_up:
                fetch.give_up()
            else:
                self._events.put(partial(self._fetch_here, fetch))

    def _fetch_here(self, fetch: _Fetch) -> Iterator[Wanted]:
        self._fetch_in_thread(fetch)
        yield from ()

    def _arrived(self, fetch: _Fetch) -> Iterator[Wanted]:
        """The whole object has come, and is small."""
        request, begun = fetch.request, fetch.begun
        try:
            with self._store.locks.working():
                if not request.stores:
                    self._store.count("misses")
                    request.data = self._origin.direct(request.target, request.options, begun)
                else:
                    fetched = self._origin.fetch(request.target, request.options, None, begun, fetch.began, resume=False, collect=SMALL)
                    assert not isinstance(fetched, Lease), "a small object is collected"
                    fetch.writing = fetched
                    self._collect(fetch)
        except errors.CacheFault as error:
            self._past_the_cache(fetch, error)
        except Exception as error:  # noqa: BLE001 (the result of this request)
            self._note_failure(fetch, error)
            yield from self._end(fetch)
        else:
            if not request.stores:
                yield from self._end(fetch)

    def _give_to_thread(self, fetch: _Fetch) -> None:
        self._under_way.add(fetch)
        size = _window_share(fetch.request) - fetch.counted
        if self._has_room(size):
            self._submit(fetch, size)
        else:
            self._held_back.append(fetch)

    def _submit(self, fetch: _Fetch, size: int) -> None:
        self._window += size
        fetch.counted += size
        self._hand_over(fetch)

    def _has_room(self, size: int) -> bool:
        return not size or not self._window or self._window + size <= WINDOW

    def _past_the_cache(self, fetch: _Fetch, error: Exception) -> None:
        """The cache cannot serve or store this object: another process need not wait for this one."""
        fetch.give_up()
        if fetch.request.leased:
            self._under_way.add(fetch)
            fetch.request.error = error
            self._events.put(partial(self._end, fetch))
        else:
            self._origin.fall_back(error, fetch.request.target.key)
            self._give_to_thread(fetch)

    def _fetch_in_thread(self, fetch: _Fetch) -> None:
        request = fetch.request
        try:
            with waits.time_limit(request.options.timeout):
                if fetch.hold is not None:
                    self._obtain(fetch)
                elif request.leased:
                    request.lease = self._origin.local(request.target, request.options)
                else:
                    request.data = self._origin.direct(request.target, request.options)
        except Exception as error:  # noqa: BLE001 (the result of this request)
            request.error = error
        finally:
            if fetch.writing is not None and request.error is None:
                fetch.by_thread = False
                self._events.put(partial(self._came_by_thread, fetch))
                if self._given_up:
                    fetch.release()
            else:
                fetch.release()
                self._events.put(partial(self._end, fetch))

    def _came_by_thread(self, fetch: _Fetch) -> Iterator[Wanted]:
        self._collect(fetch)
        return iter(())

    def _collect(self, fetch: _Fetch) -> None:
        self._collected.append(fetch)
        self._collected_bytes += _collected_in(fetch).total

    def _obtain(self, fetch: _Fetch) -> None:
        """Validate or fetch the object of a held key. A small one that is not published yet is in ``fetch.writing``."""
        request = fetch.request
        target, options = request.target, request.options
        spilling = SpillingSink(self._origin.most) if request.spills or not request.leased else None
        if spilling is not None and fetch.hold is not None:
            spilling.held_by(fetch.hold)
        try:
            with self._store.locks.working():
                if not (request.stores or fetch.has_entry or fetch.has_remains):
                    self._store.count("misses")
                    request.data = self._origin.direct(target, options, fetch.begun)
                    return
                if fetch.has_entry:
                    fetched: Lease | Writing = self._origin.obtain(target, options, spilling)
                else:
                    fetched = self._origin.fetch(
                        target, options, spilling, fetch.begun, fetch.began, resume=fetch.has_remains,
                        collect=AT_ONCE if request.leased and not request.spills else SMALL,
                    )  # fmt: skip
            if not isinstance(fetched, Lease):
                fetch.writing = fetched
            elif not self._serve(request, fetched):
                raise errors.CacheFault(f"{target.key} cannot be mapped", key=target.key)
        except (errors.CacheFault, errors.WaitTimeout) as error:
            if spilling is None:
                raise
            if request.leased:
                request.data, request.error = spilling.take(), error.with_traceback(None)
                return
            self._origin.fall_back(error, target.key)
            fetch.release()
            data = spilling.take()
            request.data = self._origin.direct(target, options) if data is None else data
        except Exception as error:
            self._note_failure(fetch, error)
            raise

    def _note_failure(self, fetch: _Fetch, error: Exception) -> None:
        """The processes that wait for this key get the same error."""
        self._store.locks.note_failure(URLS, fetch.request.target.key, error)
        fetch.request.error = error

    # -- publish ---------------------------------------------------------------------------------------------------

    def _publish(self) -> Iterator[Wanted]:
        group, self._collected, self._collected_bytes, self._is_quiet = self._collected, [], 0, False
        for fetch, published in zip(group, self._published(group), strict=True):
            request = fetch.request
            if not request.leased or (request.spills and isinstance(published, errors.NoSpace)):
                request.data = memoryview(_collected_in(fetch).data).toreadonly()
            if not isinstance(published, errors.CacheFault):
                self._store.count("fills")
                entry = published.entry if isinstance(published, Lease) else published
                self._store.count("bytes_stored", entry.size)
                request.lease = published if isinstance(published, Lease) else None
            elif request.leased:
                request.error = published
            else:
                self._origin.fall_back(published, request.target.key)
            yield from self._end(fetch)

    def _published(self, group: Sequence[_Fetch]) -> Iterator[Entry | Lease | errors.CacheFault]:
        """What each was published as; a lease where its file is wanted."""
        try:
            with waits.time_limit(group[0].request.options.timeout):
                writings = [fetch.writing for fetch in group if fetch.writing is not None]
                published = self._store.publish_collected(writings, [fetch.request.leased for fetch in group])
            yield from published
        except errors.CacheFault as error:
            if len(group) == 1:
                yield error
                return
            for fetch in group:  # there may be room for one, or one of them may be at fault
                yield from self._published([fetch])

    def _end(self, fetch: _Fetch) -> Iterator[Wanted]:
        self._under_way.discard(fetch)
        fetch.release()
        self._window, fetch.counted = self._window - fetch.counted, 0
        while self._held_back and self._has_room(size := _window_share(self._held_back[0].request)):
            self._submit(self._held_back.popleft(), size)
        yield fetch.request


def _window_share(request: Wanted) -> int:
    listed = request.options.listed
    size = (listed.size or 0) if listed is not None else 0
    return size if SMALL < size <= AT_ONCE and is_near(request.target.remote, request.target.url) else 0


def _collected_in(fetch: _Fetch) -> MemoryStage:
    collected = fetch.writing.collected if fetch.writing is not None else None
    assert collected is not None, "what is published together is in memory"
    return collected


def _taking(requests: Iterable[Wanted]) -> Callable[[int], Sequence[Wanted] | None]:
    remaining = iter(requests)
    return lambda most: list(islice(remaining, most)) or None


def _nothing() -> Iterator[Wanted]:
    return iter(())


def _give_up() -> Iterator[Wanted]:
    raise CallAborted
