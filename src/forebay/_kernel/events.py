"""Events of a root in this process, for the functions that listen: called in the thread in which it happens."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from forebay._logs import logger

log = logger("forebay.events")

Kind = Literal["fetch", "wait", "evict", "fault"]


class Event(NamedTuple):
    """Something that a cache did in this process.

    ``kind``: ``fetch`` (``size`` bytes came from a remote), ``wait`` (for another process or thread), ``evict`` (``entries`` entries were
    removed), or ``fault`` (a call was served without the cache, or an entry was damaged). ``key``: the entry's, without secrets; empty for
    evictions. ``began``: seconds since 1970. ``seconds``: its duration. ``error``: why it failed, or the fault; else empty."""

    kind: Kind
    root: str
    key: str = ""
    size: int = 0
    entries: int = 1
    began: float = 0.0
    seconds: float = 0.0
    error: str = ""


OnEvent = Callable[[Event], object]
_listeners: dict[str, tuple[OnEvent, ...]] = {}  # replaced as a whole, so that no reader needs a lock
_failed: set[int] = set()  # those that have raised, as `id` names them


def listen(root: str | os.PathLike[str], function: OnEvent) -> Callable[[], None]:
    """Call ``function`` at each event of a root from now on; returns a function that ends this, which may be called again."""
    name = os.fspath(root)
    _listeners[name] = (*_listeners.get(name, ()), function)
    ended: list[bool] = []

    def remove() -> None:
        if ended:
            return
        ended.append(True)
        rest = list(_listeners.get(name, ()))
        if function in rest:
            rest.remove(function)
        _failed.discard(id(function))
        if rest:
            _listeners[name] = tuple(rest)
        else:
            _listeners.pop(name, None)

    return remove


def emit(
    kind: Kind, root: str | os.PathLike[str], key: str = "", *, size: int = 0, entries: int = 1, since: int | None = None,
    error: BaseException | str | None = None,
) -> None:  # fmt: skip
    """Tell the listeners of a root; ``since``: when it began, on the monotonic clock, in nanoseconds. What they raise is logged, once for
    each of them. Costs next to nothing while nobody listens."""
    if not _listeners:
        return
    functions = _listeners.get(os.fspath(root))
    if not functions:
        return
    seconds = (time.monotonic_ns() - since) / 1e9 if since is not None else 0.0
    event = Event(kind, os.fspath(root), key, size, entries, time.time() - seconds, seconds, str(error) if error is not None else "")
    for function in functions:
        try:
            function(event)
        except Exception:
            if id(function) not in _failed:
                _failed.add(id(function))
                log.exception("a function given to on_event failed, which is not logged again: %r", function)
