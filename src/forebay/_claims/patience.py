"""Waiting for what no word in memory tells of: short sleeps, that become longer, and never in silence."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from forebay import errors

log = logging.getLogger("forebay.wait")

_SHORTEST = 0.0002
_SAY_AFTER, _SAY_EVERY = 5.0, 60.0


class Patience:
    """One wait, of at most ``timeout`` seconds (None: as long as it takes)."""

    def __init__(self, timeout: float | None, longest: float) -> None:
        self._began, self._longest = time.monotonic(), longest
        self.timeout = math.inf if timeout is None else timeout
        self._pause, self._say_at = _SHORTEST, _SAY_AFTER

    @property
    def waited(self) -> float:
        return time.monotonic() - self._began

    def turn(self, what: Callable[[], tuple[str, str]]) -> None:
        """Sleep a little. ``what``: what is waited for, and who has it. Raises `WaitTimeout` when the time is up."""
        waited = self.waited
        if waited >= self.timeout:
            wanted, holder = what()
            raise errors.WaitTimeout.of(wanted, waited, holder)
        if waited >= self._say_at:
            self._say_at = waited + _SAY_EVERY
            log.warning("waiting %.0f s for %s, held by %s", waited, *what())
        time.sleep(min(self._pause, max(self.timeout - waited, _SHORTEST)))
        self._pause = min(2 * self._pause, self._longest)
