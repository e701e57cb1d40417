"""What rotates: the crash points, tests and repetitions of which one run takes a part, and tomorrow's another one.

`make test` runs the part of today, `make test-all` everything, and so does pytest when it is called by hand."""

from __future__ import annotations

import time
import zlib

PARTS = 5
"""Neither a divisor nor a multiple of seven: tests that are run on some days of the week only still come to all parts."""

STRESS = 24
"""Parts of what takes minutes: about one such test a day."""

_day: int | None = None


def choose(name: str) -> str:
    """Take the part that the option ``--part`` names: ``today``, the number of a day, or ``all`` (the default). Gives what to print."""
    global _day
    if name in ("", "all"):
        _day = None
        return "everything that rotates"
    _day = int(time.time()) // 86_400 if name == "today" else int(name)
    return f"one part in {PARTS} of what rotates (--part {_day} repeats it, --part all runs everything)"


def takes(what: int | str, of: int = PARTS) -> bool:
    """Whether this run takes the crash point of this number, or the test of this name, with one part ``of`` so many."""
    return _day is None or (what if isinstance(what, int) else zlib.crc32(what.encode())) % of == _day % of


def share(count: int) -> int:
    """How many of ``count`` repetitions this run does."""
    return count if _day is None else -(-count // PARTS)
