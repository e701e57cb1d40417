"""Live progress of fetches: one bar per object and a total; also the progress of another process that this one waits for."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from forebay._config import format_age, format_size
from forebay.cli.output import LOG_LINES, console, plain, shown_name, wants_bars

if TYPE_CHECKING:
    from forebay import reports

SHOWN = 12
"""Finished bars that stay on the screen; older ones count only in the total."""


class Bars:
    """Draws the progress of ``objects`` fetches, which any thread may report; draws nothing without a terminal.

    A context manager. Call `finished` once for each object.
    """

    _lock: threading.Lock  # guards all below
    _tasks: dict[str, TaskID]  # the bars on the screen, by URL
    _ended: deque[str]  # finished ones of them, oldest first
    _over: set[str]  # all finished URLs
    _done: dict[str, int]  # bytes by URL
    _sizes: dict[str, int]  # sizes by URL, where known

    def __init__(self, objects: int, *, quiet: bool = False) -> None:
        self._console = console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.fields[label]}", markup=False), BarColumn(bar_width=20), _Amount(table_column=Column(no_wrap=True)), _Rate(),
            _State(table_column=Column(no_wrap=True, overflow="ellipsis")),
            console=self._console, disable=quiet or not wants_bars(),
        )  # fmt: skip
        self._lock, self._tasks, self._ended, self._over, self._done, self._sizes = threading.Lock(), {}, deque(), set(), {}, {}
        self._objects, self._failed, self._bytes, self._known = objects, 0, 0, 0
        self._total = self._progress.add_task("", label="total", total=None, empty=False, visible=objects > 1, state=f"0 of {objects}")

    def __enter__(self) -> Self:
        self._progress.start()
        LOG_LINES.target = self._console
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        LOG_LINES.target = None
        self._progress.stop()

    def update(self, step: reports.Progress) -> None:
        """Report progress; `Cache.pull` and `Cache.warm` call this."""
        with self._lock:
            if step.url not in self._over:
                self._count(step.url, step.done, step.total)
                self._progress.update(self._bar(step.url), completed=step.done, total=step.total, state=_state(step))

    def finished(self, url: str, outcome: str) -> None:
        """Report the end of an object; ``outcome``: one or two words."""
        with self._lock:
            self._over.add(url)
            failed = outcome == "failed"
            self._failed += failed
            done = 0 if failed else self._done.get(url, 0)
            self._count(url, done, done)
            bar = self._bar(url)
            self._progress.update(bar, completed=0 if failed else done or 1, total=done or 1, state=outcome, empty=not done)
            self._ended.append(url)
            while len(self._ended) > SHOWN:
                self._progress.remove_task(self._tasks.pop(self._ended.popleft()))

    def _bar(self, url: str) -> TaskID:
        if url not in self._tasks:
            self._tasks[url] = self._progress.add_task("", label=_label(url), total=None, state="connecting", empty=False)
        return self._tasks[url]

    def _count(self, url: str, done: int, size: int | None) -> None:
        self._bytes += done - self._done.get(url, 0)
        self._done[url] = done
        if size is not None:
            self._known += size - self._sizes.get(url, 0)
            self._sizes[url] = size
        known = self._known if len(self._sizes) == self._objects else None
        state = f"{len(self._over) - self._failed} of {self._objects}" + (f", {self._failed} failed" if self._failed else "")
        self._progress.update(self._total, completed=self._bytes, total=known, state=state)


def _label(url: str, width: int = 24) -> str:
    url = shown_name(url)
    name = plain(url.rstrip("/").rsplit("/", 1)[-1] or url)
    return name if len(name) <= width else name[: width - 12] + "…" + name[-11:]


def _state(step: reports.Progress) -> str:
    if step.state == "waiting":
        return f"waits {format_age(step.waited)} for {plain(step.holder or 'another process')}"
    return {"fetching": "", "sending": "", "direct": "no room: not kept"}.get(step.state, step.state)


class _Amount(ProgressColumn):
    def render(self, task: Task) -> Text:
        total = f" / {format_size(task.total)}" if task.total is not None and not (task.finished or task.fields["empty"]) else ""
        return Text(format_size(0 if task.fields["empty"] else task.completed) + total)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        waits = str(task.fields.get("state")).startswith("waits")  # it would be the other process's speed: leave room for its name
        return Text(f"{format_size(speed)}/s" if speed and not waits else "")


class _State(ProgressColumn):
    def render(self, task: Task) -> Text:
        state = str(task.fields.get("state", ""))
        return Text(state, style="yellow" if state.startswith("waits") else "")
