"""Waiting for what no word in memory tells of: short sleeps, that become longer, and never in silence."""

from __future__ import annotations

import time
from collections.abc import Callable

from forebay._kernel.waits import Wait

_SHORTEST = 0.0002


class Patience(Wait):
    """One wait, of at most ``timeout`` seconds (None: as long as it takes)."""

    def __init__(self, timeout: float | None, longest: float) -> None:
        super().__init__(timeout)
        self._longest, self._pause = longest, _SHORTEST

    def sleep(self, what: Callable[[], tuple[str, str]]) -> None:
        """Sleep a little. ``what``: what is waited for, and who has it. Raises `WaitTimeout` when the time is up."""
        time.sleep(min(self._pause, self.turn(what)))
        self._pause = min(2 * self._pause, self._longest)
