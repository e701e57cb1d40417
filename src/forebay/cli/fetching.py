"""Many fetches at once, by threads that never hold up the end of the command. What `pull` and `warm` share."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import typer

from forebay._logs import logger
from forebay.cli.bars import Bars
from forebay.cli.hints import OK, is_expected, shared_code
from forebay.cli.render import Output, note, say_error, shown_name
from forebay.errors import NoSpace

if TYPE_CHECKING:
    from forebay._model import Entry
    from forebay.reports import OnProgress, Progress

Fetch = Callable[[str, "OnProgress"], "Entry | None"]


log = logger("forebay.cli")
_SAID = {"past": "read, but not kept: no room", "fetched": "fetched", "kept": "it is in the cache already"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one URL ended. ``state``: ``fetched``, ``kept`` (it was there already), ``past`` (no room: not kept) or ``failed``."""

    url: str
    state: str
    size: int | None = None
    seconds: float = 0.0
    error: Exception | None = None


def fetch_all(urls: Sequence[str], fetch: Fetch, *, jobs: int, quiet: bool) -> list[Outcome]:
    """Fetch every URL, ``jobs`` at a time, with bars unless ``quiet``; what failed is said at once and does not stop the rest.

    Ctrl-C ends the call at once; the threads are daemons and end with the process.
    """
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    results: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    for url in urls:
        todo.put(url)
    outcomes = []
    try:
        with Bars(len(urls), quiet=quiet) as bars:
            for _ in range(min(jobs, len(urls))):
                threading.Thread(target=_work, args=(todo, results, fetch, bars), daemon=True).start()
            for _ in urls:
                outcome = _next(results)
                bars.finished(outcome.url, outcome.state)
                outcomes.append(outcome)
    except KeyboardInterrupt:
        note("what came is kept: the same command goes on from there")
        raise
    return outcomes


def _next(results: queue.SimpleQueue[Outcome]) -> Outcome:
    """Waits in short turns: a thread that starts another one may be the one that takes the signal of Ctrl-C, and then nothing wakes us."""
    while True:
        try:
            return results.get(timeout=0.1)
        except queue.Empty:
            continue


def _work(todo: queue.SimpleQueue[str], results: queue.SimpleQueue[Outcome], fetch: Fetch, bars: Bars) -> None:
    while True:
        try:
            url = todo.get_nowait()
        except queue.Empty:
            return
        results.put(_fetch(url, fetch, bars))


def _fetch(url: str, fetch: Fetch, bars: Bars) -> Outcome:
    moved, began = False, time.monotonic()

    def told(step: Progress) -> None:
        nonlocal moved
        moved = moved or step.state == "fetching"
        bars.update(replace(step, url=url))  # the URL as it was given, not as it is kept: the bar's name

    log.debug("%s: looking whether the cache has it", shown_name(url))
    try:
        entry = fetch(url, told)
    except Exception as error:
        log.debug("%s: failed", shown_name(url), exc_info=None if is_expected(error) else error)
        return Outcome(url, "failed", seconds=time.monotonic() - began, error=error)
    seconds = time.monotonic() - began
    state = "past" if entry is None else "fetched" if moved else "kept"
    log.debug("%s: %s after %.3f s", shown_name(url), _SAID[state], seconds)
    return Outcome(url, state, None if entry is None else entry.size, seconds)


def conclude(outcomes: Sequence[Outcome], output: Output, *, past_is_failure: bool = True) -> None:
    """Print the outcomes as JSON if asked for, name what failed, and exit with its code if anything did."""
    output.document([replace(outcome, url=shown_name(outcome.url)) for outcome in outcomes])
    bad = ("failed", "past") if past_is_failure else ("failed",)
    failed = [(o.url, o.error or NoSpace("no room in the cache")) for o in outcomes if o.state in bad]
    for url, error in failed:
        say_error(error, about=shown_name(url))
    code = shared_code([error for _, error in failed])
    if code != OK:
        raise typer.Exit(code)
