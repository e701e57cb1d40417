"""Progress of fetches in notebooks: a bar below the cell, once a fetch has taken more than a second."""

from __future__ import annotations

import html
import os
import threading
import time
from typing import TYPE_CHECKING, Any

from forebay._config import EnvironmentSettings, format_age, format_size
from forebay.fetch.request import FetchOptions

if TYPE_CHECKING:
    from forebay._engine.flight import Waiting

AFTER = 1.0
EVERY = 0.2
"""Seconds until a bar is shown, and between its updates."""


def with_bar(options: FetchOptions) -> FetchOptions:
    """The options of a call in a notebook's main thread: its fetch shows a bar, unless the caller watches it or ``FOREBAY_PROGRESS=0``."""
    if options.on_progress is not None or threading.current_thread() is not threading.main_thread():
        return options
    if EnvironmentSettings.with_faults(limits=False)[0].progress is False:
        return options
    bar = _Bar()
    return options._replace(on_progress=bar.fetching, on_wait=bar.waiting)


class _Bar:
    """The bar of one call. Any thread may report. Calls at the same time, such as awaited ones, show one bar, one after the other."""

    _lock = threading.Lock()  # guards all below
    _shown: _Bar | None = None
    _place: tuple[Any, float] = None, 0.0  # where a bar was last drawn, and when

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._due = self._began + AFTER
        self._handle: Any = None

    def fetching(self, done: int, total: int | None) -> None:
        """Report the bytes that have arrived."""
        seconds = time.monotonic() - self._began
        self._show(done, total, f"{format_size(done / seconds)}/s")

    def waiting(self, waiting: Waiting) -> None:
        """Report the progress of the process that this one waits for."""
        self._show(waiting.done, waiting.total, f"waiting {format_age(waiting.since)} for {waiting.holder}")

    def _show(self, done: int, total: int | None, state: str) -> None:
        now = time.monotonic()
        with _Bar._lock:
            other, ends = _Bar._shown, done == total
            if self._handle is None and (ends or (other is not None and now < other._due + AFTER)):
                return
            if now < self._due and not ends:
                return
            if self._handle is None and _Bar._place[1] > self._began:
                self._handle = _Bar._place[0]
            self._due = now + EVERY
            from IPython.display import HTML, display

            amount = format_size(done) + (f" of {format_size(total)}" if total else "")
            value = f'value="{done}" max="{total}"' if total else ""
            content = HTML(f"<progress {value}></progress> {amount}, {html.escape(state)}")
            if self._handle is None:
                self._handle = display(content, display_id=True)
            else:
                self._handle.update(content)
            _Bar._shown, _Bar._place = None if ends else self, (self._handle, now)


# A thread that draws a bar does not exist in a child.
os.register_at_fork(after_in_child=lambda: setattr(_Bar, "_lock", threading.Lock()))
