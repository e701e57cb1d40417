"""Many jobs by one loop: looked up together, fetched in parallel, published together.

look      one query for a group of keys; what is there is delivered at once
hold      the locks of the missing keys, as far as they are free, and a second look: no other process fetches them now
start     small objects of HTTP and S3 by the one loop of the process; what needs more than one response, by threads
publish   what has arrived, in one transaction
wait      last, when this call holds no key: for the objects that other processes fetch
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from forebay import errors
from forebay._engine.leases import Lease
from forebay._kernel import greenlets, interrupts
from forebay._kernel.threads import Threads
from forebay._model import can_start, is_near
from forebay.fetch.job import AT_ONCE, NO_ENTRY, SMALL, Job, publish_singly, publish_together
from forebay.remote.base import CallAborted, sent_together

if TYPE_CHECKING:
    from forebay.fetch import Fetcher

TURN = 0.1  # seconds
QUIET_PERIOD = 0.002  # seconds
"""What has arrived is published when nothing more arrives for so long: responses to what was sent together come one after the other."""
STALE = 1.0
"""Seconds without a free reader after which jobs that were begun are left: other processes may need their keys."""
GROUP = 16
"""Objects that are looked up together, and published together at most."""
WINDOW = 2 * AT_ONCE
"""Bytes of larger collected objects under way at a time, where no network is waited for: more would come no sooner, and each into memory
that was not used before, which costs as much as to copy the bytes. With readers: half of what may be made and not published."""


class Pipeline:
    """Runs the jobs of one call. For one thread.

    ``side_by_side``: jobs under way at a time (default: as many as the process may have connections). ``waits``: for objects that other
    calls are fetching; else their jobs come back with ``is_busy``. ``on_turn`` is called about ten times a second, and at the end;
    ``meanwhile`` once, as soon as requests have been sent: what need not be done before. ``made`` returns jobs that other threads have
    fetched, to be published here; `wake` has it called. ``needed`` says, just before, whether to publish what was collected. ``readers``:
    all jobs are made by this many threads, which are to be kept busy: jobs are begun before one of them is free, one more thread publishes,
    and `most_in_memory` jobs are made and not published at most; of larger ones only one for each reader. ``name``: of the threads."""

    def __init__(
        self, fetcher: Fetcher, *, side_by_side: int | None = None, waits: bool = True, on_turn: Callable[[], None] | None = None,
        meanwhile: Callable[[], None] | None = None, made: Callable[[], Iterable[Job]] = tuple,
        needed: Callable[[Job], bool] = lambda job: True, readers: int = 0, name: str = "bulk",
    ) -> None:  # fmt: skip
        self._fetcher, self._store, self._waits, self._on_turn, self._meanwhile = fetcher, fetcher.store, waits, on_turn, meanwhile
        self._made, self._needed = made, needed
        self._most = fetcher.options.connections if side_by_side is None else max(side_by_side, 1)
        self._readers, self.most_in_memory = readers, 2 * readers
        self._threads = Threads(self._work_in_thread, readers + 1 if readers else self._most, name=name)
        self._together = max(readers // 2, 1) if readers else GROUP  # jobs that are published together
        self._publishing: Sequence[Job] = ()
        self._handed_at = time.monotonic()
        self._events: queue.SimpleQueue[Callable[[], Iterable[Job]]] = greenlets.new_queue()
        self._under_way: set[Job] = set()
        self._collected: list[Job] = []  # have arrived, and are to be published
        self._collected_bytes = self._largest = 0
        self._held_back: deque[Job] = deque()  # until the window has room
        self._window = 0  # bytes; with readers, the number of those that are busy
        self._waiting: list[Job] = []  # for other processes
        self._is_quiet = False  # nothing arrived for `QUIET_PERIOD`
        self._left: int | None = None  # jobs that were not taken yet; None: their number is not known
        self._given_up = False
        self._turn_at = 0.0
        self._waited_until: float | None = None  # when the time for all waits of this call is over

    def run(self, jobs: Iterable[Job]) -> Generator[Job, None, None]:
        """Yield each job when it has its result, in the order in which these arrive. Takes from ``jobs`` as places become free.

        Closing the iterator gives up what is under way, and does not wait for threads that still fetch."""
        self._left = len(jobs) if isinstance(jobs, Sized) else None
        yield from self.run_as_they_come(_taking(jobs))

    def run_as_they_come(self, take: Callable[[int], Sequence[Job] | None]) -> Iterator[Job]:
        """`run`, for jobs that ``take`` returns, a number of them at most: none while there are none, None after the last. `wake` has it
        called again."""
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
            left = {id(job) for job in self._threads.close()}
            for job in list(self._under_way):
                if id(job) in left or not job.by_thread:
                    job.give_up()

    def join(self) -> None:
        """Wait for the end of the threads. Caller: has all results."""
        self._threads.join()

    def wake(self) -> None:
        """There may be more jobs. Callable from any thread."""
        self._events.put(tuple)

    def stop(self) -> None:
        """Have `run_as_they_come` give up, and raise `CallAborted`. Callable from any thread."""
        self._events.put(_give_up)

    def _run(self, take: Callable[[int], Sequence[Job] | None]) -> Iterator[Job]:
        more = True
        while more or self._under_way or not self._events.empty():
            if len(self._collected) + len(self._publishing) < max(self.most_in_memory, 1):
                for job in self._made():
                    self._under_way.add(job)
                    yield from self._worked(job)
            while more and (places := self._places()):
                with self._store.locks.working():  # this call may hold keys: what gives the jobs must not wait for those of others
                    group = take(min(places, GROUP))
                more = group is not None
                if not group:
                    break
                if self._left is not None:
                    self._left = max(self._left - len(group), 0)
                for space in {job.target.space: None for job in group}:
                    yield from self._begin(space, [job for job in group if job.target.space == space])
            meanwhile, self._meanwhile = self._meanwhile, None
            if meanwhile is not None:
                with self._store.locks.working():
                    meanwhile()
            is_group_full = len(self._collected) >= self._together or self._collected_bytes >= AT_ONCE
            if self._collected and not self._publishing and (is_group_full or self._may_publish()):
                yield from self._publish()
            elif self._under_way or more or not self._events.empty():
                yield from self._next_event()
        self._turn()

    def _may_publish(self) -> bool:
        """Whether what was collected need not wait for more, which would be published with it."""
        return self._events.empty() and (self._is_quiet or not self._collected or len(self._collected) == len(self._under_way))

    def _turn(self) -> None:
        self._turn_at = time.monotonic() + TURN
        if self._readers and self._held_back and time.monotonic() - self._handed_at > STALE:
            self._leave_held_back()
        if self._on_turn is not None:
            with self._store.locks.working():
                self._on_turn()

    def _places(self) -> int:
        """How many jobs may be begun now. Several at once, for one query, as long as there is something else to do."""
        places = self._most - len(self._under_way) + len(self._collected) + len(self._publishing)
        enough = min(GROUP, max((self._readers or self._most) // 2, 1), self._left or GROUP)
        return places if places >= enough or (places > 0 and self._may_publish()) else 0

    def _next_event(self) -> Iterable[Job]:
        while True:  # in short turns: another thread may have got the signal of Ctrl-C, and nothing would wake this one
            try:
                event = self._events.get(timeout=QUIET_PERIOD if self._collected else TURN)
                self._is_quiet = False
            except queue.Empty:
                if self._collected:
                    self._is_quiet = True
                    return ()
                interrupts.point()
                self._turn()
                continue
            interrupts.point()
            if time.monotonic() >= self._turn_at:
                self._turn()
            return event()

    # -- look and hold ---------------------------------------------------------------------------------------------

    def _begin(self, space: str, group: Sequence[Job]) -> Iterator[Job]:
        wanted: dict[str, Job] = {}
        for job in group:
            if job.skips_cache:
                self._give_to_thread(job)
            elif wanted.setdefault(job.target.key, job) is not job:
                self._leave(job)  # it is a hit by then
        try:
            if not self._readers:  # else few of them are there
                yield from self._look(space, wanted)
            self._hold(wanted)
            # P1 and P2 see no entry / P1 holds the key, fetches, releases / P2 holds the key: without a second look it fetches again.
            for job in list(self._look(space, wanted)):
                yield from self._end(job)
            for job in self._failed_meanwhile(wanted.values()):
                yield from self._end(wanted.pop(job.target.key))
            began = self._store.now(exact=True) if wanted else 0
            may_resume = any(job.has_partial for job in wanted.values())
            partials = self._store.locks.with_remains(space, wanted) if may_resume else set()
        except (errors.CacheFault, errors.Closed) as error:
            for job in wanted.values():
                self._bypass(job, error)
            return
        with sent_together():
            for key, job in wanted.items():
                job.began, job.has_partial = began, key in partials
                if job.has_partial:  # what is requested depends on what is there
                    self._give_to_thread(job)
                else:
                    self._start(job)

    def _look(self, space: str, wanted: dict[str, Job]) -> Iterator[Job]:
        """Serve what is there, and take it out of ``wanted``."""
        leases = self._store.take_many(space, list(wanted)) if wanted else {}
        for job in wanted.values():
            job.has_entry = job.target.key in leases
        for key, lease in leases.items():
            job = wanted[key]
            if self._may_serve(job, lease) and job.serve(lease):
                self._store.count_hit(lease.entry.size)
                del wanted[key]
                yield job
            else:
                lease.close()
        for job in wanted.values():
            job.stamp = job.stamp or NO_ENTRY

    def _may_serve(self, job: Job, lease: Lease) -> bool:
        if (job.needs_file or job.options.sha256) and not (
            lease.entry.kind == "blob" and self._store.keeps and self._store.is_sound(lease)
        ):
            return False
        return job.may_serve(lease)

    def _hold(self, wanted: dict[str, Job]) -> None:
        """Lock the keys that are free; the others leave ``wanted``. To wait for another key while holding these could be to wait for ever:
        those come last."""
        for key, job in list(wanted.items()):
            job.hold = self._store.locks.try_hold(job.target.space, key)
            if job.hold is None:
                self._leave(wanted.pop(key))
            else:
                self._under_way.add(job)

    def _failed_meanwhile(self, jobs: Iterable[Job]) -> list[Job]:
        """Those that waited for a call that has failed since: they get its error."""
        waited = [job for job in jobs if job.since is not None and not job.options.refresh]
        for job in waited:
            job.error = self._store.locks.failure(job.target.space, job.target.key, job.since or 0, job.asker)
        return [job for job in waited if job.error is not None]

    def _leave(self, job: Job) -> None:
        job.since = time.monotonic_ns() if job.since is None else job.since
        if self._waits:
            self._waiting.append(job)
        else:
            job.is_busy = True
            self._events.put(partial(iter, (job,)))

    def _wait_for(self, job: Job) -> Job:
        """Get the object that another process is fetching."""
        if job.options.timeout is not None:  # all waits of a call share it
            self._waited_until = self._waited_until or time.monotonic() + job.options.timeout
            job.options = job.options._replace(timeout=max(self._waited_until - time.monotonic(), 0.0))
        job.has_partial, job.began = True, 0
        try:
            job.run()
        except Exception as error:  # noqa: BLE001 (the result of this job)
            job.error = error
        return job

    # -- fetch -----------------------------------------------------------------------------------------------------

    def _start(self, job: Job) -> None:
        """Request an object: by the loop of transfers where one response may be enough, else by a thread."""
        target, options = job.target, job.options
        if not job.has_entry and not options.offline and self._fetcher.upstream is None:
            try:
                remote = target.remote
                if can_start(remote):
                    with self._fetcher.reaching(options):
                        job.started = remote.start(target.url, partial(self._is_ready, job))
            except errors.ForebayError as error:
                job.error = error
                self._events.put(partial(self._end, job))
                return
        if job.started is None:
            self._give_to_thread(job)
        else:
            self._is_ready(job)

    def _is_ready(self, job: Job) -> None:
        """In any thread: the response of a request that was begun has ended, or is too large for memory.

        A thread goes on with a large one at once: the caller's own thread may wait for something that needs the connection."""
        if not job.ready.pop():
            if job.started is not None and job.started.is_here(SMALL):
                self._events.put(partial(self._work_here, job))
            else:
                self._hand_over(job)

    def _give_to_thread(self, job: Job) -> None:
        self._under_way.add(job)
        if self._readers:
            job.turn.append(True)
        share = self._share_of(job)
        if self._has_room(share):
            self._submit(job, share)
        else:
            self._held_back.append(job)

    def _submit(self, job: Job, share: int) -> None:
        if self._readers and not job.take_turn():
            return  # the caller that needs it has it
        self._window, job.window = self._window + share, job.window + share
        if share:  # else it takes no reader, as what is only stored, and says nothing about those that wait for one
            self._handed_at = time.monotonic()
        self._hand_over(job)

    def _share_of(self, job: Job) -> int:
        """How much of the window a job takes, beside what it has."""
        listed = job.options.listed
        size = (listed.size or 0) if listed is not None and not self._readers else 0
        is_near_and_large = SMALL < size <= AT_ONCE and is_near(job.target.remote, job.target.url)
        return (int(not job.is_here) if self._readers else size if is_near_and_large else 0) - job.window

    def _has_room(self, share: int) -> bool:
        if not self._readers or not share:
            return not share or not self._window or self._window + share <= WINDOW
        in_memory = self._window + len(self._collected) + len(self._publishing)
        is_small = (in_memory + 1) * self._largest <= 2 * WINDOW
        return self._window < self._readers and in_memory < (self.most_in_memory if is_small else min(self.most_in_memory, self._readers))

    def limit_memory(self, most: int) -> None:
        """Have at most so many jobs made and not published. Callable from any thread."""
        if most != self.most_in_memory:
            self.most_in_memory = most
            self._events.put(self._hand_out)

    def _leave_window(self, job: Job) -> None:
        self._window, job.window = self._window - job.window, 0
        self._hand_out()

    def _hand_out(self) -> Iterable[Job]:
        while self._held_back and self._has_room(share := self._share_of(self._held_back[0])):
            self._submit(self._held_back.popleft(), share)
        return ()

    def _leave_held_back(self) -> None:
        """All readers wait for a source that stalls: other processes may need these keys."""
        held_back, self._held_back = self._held_back, deque()
        for job in held_back:
            self.leave(job)

    def leave(self, job: Job) -> bool:
        """Give up a job that no reader has begun to make; it comes back with ``is_busy``. Callable from any thread."""
        is_left = job.take_turn()
        if is_left:
            job.is_busy = True
            self._events.put(partial(self._end, job))
        return is_left

    def work_now(self, job: Job) -> bool:
        """Make a job in the calling thread, if no reader has begun to. Callable from any thread."""
        if not job.take_turn():
            return False
        job.by_thread = True
        try:
            job.attempt()
        except BaseException:
            job.is_busy = True
            raise
        finally:
            self._made_by_thread(job)
        return True

    def _hand_over(self, job: Job) -> None:
        """Have a thread do it. Where none can be started the caller's own does, in turn."""
        job.by_thread = True
        if not self._threads.submit(job):
            job.by_thread = False  # before the look: the thread that gives up looks at it after it has said so
            if self._given_up:
                job.give_up()
            else:
                self._events.put(partial(self._work_here, job))

    def _work_in_thread(self, job: Job | list[Job]) -> None:
        if isinstance(job, list):
            self._events.put(partial(self._published, _published(job)))
            return
        try:
            job.attempt()
        except BaseException as error:  # noqa: BLE001 (SystemExit of a source: this thread goes on, and the caller raises it)
            job.fail(error)
        self._made_by_thread(job)

    def _made_by_thread(self, job: Job) -> None:
        if job.writing is None:
            job.release()
        else:
            job.by_thread = False
        self._events.put(partial(self._worked, job))
        if self._given_up:
            job.release()

    def _work_here(self, job: Job) -> Iterable[Job]:
        job.attempt()
        return self._worked(job)

    def _worked(self, job: Job) -> Iterable[Job]:
        if job.writing is None:
            return self._end(job)
        self._collected.append(job)
        self._collected_bytes += job.collected.total
        self._largest = max(self._largest, job.collected.total)
        if self._readers:
            self._leave_window(job)
        return ()

    def _bypass(self, job: Job, error: errors.ForebayError) -> None:
        """The cache cannot look for this object: no other process waits for this one."""
        self._under_way.add(job)
        job.give_up()
        if job.leased:
            job.error = error
            self._events.put(partial(self._end, job))
        else:
            self._fetcher.fall_back(error, job.target.key)
            self._give_to_thread(job)

    # -- publish ---------------------------------------------------------------------------------------------------

    def _publish(self) -> Iterator[Job]:
        collected, self._collected, self._collected_bytes, self._is_quiet = self._collected, [], 0, False
        group = [job for job in collected if self._needed(job)]
        for job in collected:
            if job not in group:
                job.writing = None
                yield from self._end(job)
        if not group:
            return
        if self._readers and self._threads.submit(group):
            self._publishing = group
            return
        yield from self._published(_published(group))

    def _published(self, results: Sequence[tuple[Sequence[Job], errors.CacheFault | None]]) -> Iterator[Job]:
        for jobs, fault in results:
            for job in publish_singly(jobs, fault):
                yield from self._end(job)
        self._publishing = ()
        self._hand_out()

    def _end(self, job: Job) -> Iterator[Job]:
        self._under_way.discard(job)
        job.release()
        yield job
        self._leave_window(job)  # only now: the bytes of one that was refused stay in memory


def _published(group: Sequence[Job]) -> list[tuple[Sequence[Job], errors.CacheFault | None]]:
    """Publish a group, the jobs of each space together."""
    spaces = {job.target.space: None for job in group}
    parts = [[job for job in group if job.target.space == space] for space in spaces]
    return [(jobs, publish_together(jobs)) for jobs in parts]


def _taking(jobs: Iterable[Job]) -> Callable[[int], Sequence[Job] | None]:
    remaining = iter(jobs)
    return lambda most: list(islice(remaining, most)) or None


def _give_up() -> Iterable[Job]:
    raise CallAborted
