"""What a worker of a prefetcher does: it reads what is ready, asks for sizes, and waits for what other processes are at."""

from __future__ import annotations

import contextlib

from forebay import errors
from forebay._engine.locks.leases import Lease
from forebay._logs import logger
from forebay.prefetch.load_queue import LoadQueue, PrefetchConfig
from forebay.prefetch.loads import Load, Prepared, State
from forebay.prefetch.steps import Steps

log = logger("forebay.prefetch")

TURN = 0.1


class Worker:
    """One object for all threads of a prefetcher; each calls `run`."""

    def __init__(self, job: PrefetchConfig, desk: LoadQueue, steps: Steps) -> None:
        self._job, self._desk, self._steps = job, desk, steps

    def run(self) -> None:
        """Until the prefetcher is closed."""
        while self._turn():
            pass

    def _turn(self) -> bool:
        """One load, or one sleep. What is worked on is known to this call alone: a thread that sleeps keeps no load alive."""
        desk = self._desk
        with desk.lock:
            if desk.closing:
                return False
            ready = desk.next_ready()
            unsized = desk.next_queued(desk.unsized) if ready is None else None
            if ready is None and unsized is None:
                if not desk.elsewhere or desk.watched:
                    desk.work.wait()
                    return True
                desk.watched = True
        if ready is not None:
            self._read(ready)
        elif unsized is not None:
            self._size(unsized)
        else:
            self._watch()
        return True

    def _read(self, prepared: Prepared) -> None:
        """Read an item for which there is room, and whose key is held."""
        brought, mark = False, prepared.mark
        try:
            linked = self._steps.link(mark)
            if isinstance(linked, Lease):
                self._steps.linked(mark, linked)
                return
            data = self._steps.read(mark) if linked is None else linked
            self._steps.bring(mark, data, prepared.hold, prepared.need, prepared.epoch)
            brought = True
        except errors.CacheFault as fault:
            self._steps.past(mark)
            self._job.tell(fault, mark.key)
        except BaseException as error:  # noqa: BLE001  # SystemExit of a source too: this thread goes on; who wants the item raises it
            self._steps.fail(mark, error)
        finally:
            if not brought:
                with self._desk.lock:
                    self._desk.settle_room(prepared.need, prepared.epoch, None)
                    self._desk.news.put(None)
                prepared.hold.release()

    def _size(self, load: Load) -> None:
        size: int | None = None
        try:
            size = self._job.size_of(load.key) if self._job.size_of is not None else None
        except Exception as error:  # noqa: BLE001  # the source's own: its read will tell
            log.debug("the size of %s is not known: %s", load.key, str(error))
        with self._desk.lock:
            load.size = size
            if load.state is State.QUEUED and load.mark is not None:
                self._desk.asked.append(load.mark)
                self._desk.news.put(None)

    def _watch(self) -> None:
        """Sleep until another process may have done one of those that we want too: one thread does this for all."""
        desk = self._desk
        with desk.lock:
            first = next((load for mark in desk.elsewhere if (load := mark()) is not None and load.state is State.QUEUED), None)
            desk.elsewhere = [mark for mark in desk.elsewhere if (load := mark()) is not None and load.state is State.QUEUED]
            load = None
        with contextlib.suppress(errors.CacheFault):
            if first is not None:
                self._job.store.locks.wait_turn(self._job.space, first.name, TURN)
        with desk.lock:
            desk.watched, desk.look_elsewhere = False, True
            desk.news.put(None)
