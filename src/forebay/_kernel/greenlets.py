"""Greenlets in the place of threads, as gevent's ``monkey.patch_all()`` puts them: what would block all of them has to wait by their hub.

`threading` is used as it is patched: its threads and locks are then greenlets and their locks. Sleeps and polls follow it, whatever else
the program has left alone: a sleep of the system would stop the greenlet that it waits for."""

from __future__ import annotations

import importlib
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from forebay import errors


def are_threads() -> bool:
    """Whether gevent has put greenlets in the place of threads."""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched("threading"))


def identity() -> tuple[Callable[[], int], int | None]:
    """What gives the number of this greenlet, and that of the first one of the main thread; None: it is not this thread."""
    get_hub, get_ident = importlib.import_module("gevent.hub").get_hub, importlib.import_module("gevent.thread").get_ident
    is_main = threading.get_native_id() == os.getpid()  # of Linux
    return get_ident, get_ident(get_hub().parent) if is_main else None


def _refuse_half_a_patch() -> None:
    """Raises `ConfigError` where a wait of Forebay would stop the greenlet that it waits for."""
    patcher, monkey = sys.modules.get("eventlet.patcher"), sys.modules.get("gevent.monkey")
    patched = [name for name in ("thread", "select", "time", "os", "socket") if patcher is not None and patcher.is_monkey_patched(name)]
    if patched:
        message = f"eventlet has patched {', '.join(patched)}, with which Forebay does not work: use gevent, or threads"
        raise errors.ConfigError(message, name="eventlet", value=", ".join(patched))
    if monkey is not None and monkey.is_module_patched("select") and not are_threads():
        message = "gevent has patched select, but not thread: let monkey.patch_all() patch both"
        raise errors.ConfigError(message, name="gevent", value="thread=False")


def _original(module: Any, name: str) -> Any:
    """What the standard library calls so."""
    monkey = sys.modules.get("gevent.monkey")
    return getattr(module, name) if monkey is None else monkey.get_original(module.__name__, name)


def sleep(seconds: float) -> None:
    """`time.sleep`, of this thread or greenlet alone."""
    if "gevent.monkey" not in sys.modules:
        time.sleep(seconds)
    elif are_threads():
        sys.modules["gevent"].sleep(seconds)
    else:
        _original(time, "sleep")(seconds)


def poll_events(epoll: Any, seconds: float | None) -> list[tuple[int, int]]:
    """``epoll.poll(seconds)``, which stops this thread or greenlet alone. None: without an end."""
    if are_threads():
        green = importlib.import_module("gevent.select").poll()
        green.register(epoll.fileno(), select.POLLIN)
        green.poll(None if seconds is None else 1000 * seconds)
        seconds = 0
    events: list[tuple[int, int]] = epoll.poll(seconds)
    return events


def new_epoll() -> Any:
    """A `select.epoll`, which gevent and eventlet take away."""
    return _original(select, "epoll")()


def new_queue() -> queue.SimpleQueue[Any]:
    """A `queue.SimpleQueue`, whose `get` stops this thread or greenlet alone."""
    return queue._PySimpleQueue() if are_threads() else queue.SimpleQueue()  # type: ignore[attr-defined]


_renewals = list[Callable[[], object]]()
_has_followed = False


def when_patched(renew: Callable[[], object]) -> None:
    """Call ``renew`` when the first cache or claim is opened in a program that gevent has patched: locks and numbers of threads from before
    may be those of the system, which a greenlet must not wait for."""
    _renewals.append(renew)


def look() -> None:
    """Follow what the program has patched. Raises `ConfigError` for eventlet and half of gevent. Caller: opens a cache or a claim."""
    global _has_followed
    _refuse_half_a_patch()
    monkey = sys.modules.get("gevent.monkey")
    if monkey is not None and monkey.saved and not _has_followed:
        _has_followed = True
        for renew in _renewals:
            renew()
