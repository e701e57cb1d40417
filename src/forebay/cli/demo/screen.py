"""How the demo looks while it runs: one bar per worker, and what the cache holds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from forebay._config import format_size
from forebay.cli.render import console, wants_bars


class Screen:
    """Bars where somebody watches, a line per event unless ``quiet``. Used by one thread."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._console = quiet, console(stderr=True)
        self._progress = self._new()
        self._workers: list[TaskID] = []
        self._all = TaskID(0)

    def _new(self) -> Progress:
        return Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=32), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[about]}"), console=self._console, disable=self._quiet or not wants_bars(), transient=True,
        )  # fmt: skip

    def say(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def begin(self, number: int, shards: Sequence[int]) -> None:
        self.say(f"epoch {number}: each worker reads all {shards[0]} shards, in an order of its own, and loads the next ones meanwhile")
        self._progress = self._new()
        self._workers = [self._progress.add_task(f"worker {n + 1}", total=total, about="") for n, total in enumerate(shards)]
        self._all = self._progress.add_task("all", total=sum(shards), about="")
        self._progress.start()

    def read(self, index: int, held: int, budget: int) -> None:
        self._progress.advance(self._workers[index])
        self._progress.update(self._all, advance=1, about=f"cache {format_size(held)} of {format_size(budget)}")

    def end(self, seconds: float) -> None:
        self._progress.stop()
        self.say(f"  done in {seconds:.1f} s")

    def close(self) -> None:
        """Whatever happened: leave the terminal as it was."""
        self._progress.stop()
