"""Several ranges of one object at once. Knows no protocol: the work is a sequence of functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from forebay._kernel.threads import run_all
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
    """Do all of ``work`` in the calling thread and in up to ``threads`` more that end with this call.

    The first error ends the call (`Call.abort`) and is raised; so does an interrupt of the calling thread. This waits for every thread
    that may still write, and only a moment for one that is connecting, which nothing can wake: that one is left behind and does no more
    work."""
    try:
        run_all(
            work, threads + 1, name="range", inline=True, stop=call.abort, grace=GRACE,
            may_leave=lambda thread: thread in call.connecting,
        )  # fmt: skip
    except Stopped:
        return  # whoever aborted the call raises the reason
