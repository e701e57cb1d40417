"""Several ranges of one object at once. Knows no protocol: the work is a sequence of functions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator

from forebay._model import Span
from forebay.remote.base import Call, Stopped

Work = Callable[[], None]
GRACE = 0.3  # seconds


def parts(spans: Iterable[Span], size: int) -> Iterator[Span]:
    """The spans, cut at ``size`` bytes."""
    for span in spans:
        for start in range(span.start, span.end, size):
            yield Span(start, min(size, span.end - start))


def share(work: Iterator[Work], threads: int, call: Call) -> None:
    """Do all of ``work``: in the calling thread, which begins, and in up to ``threads`` more that end with this call.

    The first error ends the call (`Call.abort`) and is raised; so does an interrupt of the calling thread. A thread that is still
    connecting then is left behind: it does no more work."""
    crew = _RangeThreads(work, call)
    helpers = [threading.Thread(target=crew.work, name=f"forebay-range-{n}", daemon=True) for n in range(threads)]
    try:
        for helper in helpers:
            helper.start()
        crew.work()
        for helper in helpers:
            helper.join()
    except BaseException:
        call.abort()
        raise
    finally:
        crew.leave(helpers)
    if crew.error is not None:
        raise crew.error


class _RangeThreads:
    def __init__(self, work: Iterator[Work], call: Call) -> None:
        self._work, self._call = work, call
        self._lock = threading.Lock()  # guards _work and error
        self.error: BaseException | None = None

    def _next(self) -> Work | None:
        with self._lock:
            return None if self.error else next(self._work, None)

    def work(self) -> None:
        """Do one piece after the other. An error is noted for `share`, and ends the others' work too."""
        try:
            while (piece := self._next()) is not None:
                piece()
        except Stopped:
            return  # who stopped the call has the reason
        except Exception as error:  # noqa: BLE001 (raised by `share`, as it is)
            with self._lock:
                self.error = self.error or error
            self._call.abort()

    def leave(self, helpers: list[threading.Thread]) -> None:
        """Wait for all that may still write; a moment also for those that wait for an answer's head, which nobody can wake."""
        until = time.monotonic() + GRACE
        for helper in helpers:
            while helper.is_alive() and (helper not in self._call.connecting or time.monotonic() < until):
                helper.join(0.05)
