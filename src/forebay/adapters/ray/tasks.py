"""Tasks of a Ray cluster: outputs of remote functions, stored on the head node for all drivers and workers.

``start()`` once in a driver; then ``task = remote(function)`` and ``task.remote(*args, tag="iter-3")``. The head is the node of the process
that calls `start`: the cache is on that node, and its processes read and write it through the mapping."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._logs import logger
from forebay.tasks import Tasks

try:
    from forebay.adapters.ray import sessions
    from forebay.adapters.ray.sessions import SPACE, CacheLocation, Context, Current, session_of
    from forebay.adapters.ray.task import READ_THROUGH, Task, make_task, mode_of
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.ray.tasks", "ray") from error

from forebay.cache import Cache, origin_of
from forebay.codecs import default_codec
from forebay.tasks.config import load

__all__ = ["RayTasks", "Task", "active", "remote", "start", "stop"]

log = logger("forebay.ray")

UNITS = {"B": 1, **{f"{letter}{tail}": 1024**power for power, letter in enumerate("KMGT", 1) for tail in ("B", "iB")}}


def start(
    size: float, cache_dir: str | os.PathLike[str], units: str = "B", config: Any = None, namespace: str | None = None,
    mode: str = READ_THROUGH,
) -> RayTasks:  # fmt: skip
    """The cache of the cluster: the running one, else a new one in ``cache_dir`` on this node, with at most ``size`` ``units``.

    ``units``: B, KB to TB or KiB to TiB, always powers of 1024. ``namespace``: for this whole module; default: the running task's, else
    ``forebay``. ``config``: a YAML file or a mapping; read in this process. ``mode``: ``read-through``, or ``replay``: outputs are stored,
    and read only by bypass. Callable by several drivers at once. A running cache stays as it is, with a warning if its settings differ.
    Raises `ConfigError` (a ValueError) and `RootRefused`."""
    requested = _location(size, cache_dir, units, config, mode_of(mode) or READ_THROUGH)
    session = session_of(namespace)
    _compare(session.namespace, requested, session.start(requested))
    return RayTasks(session.namespace)


def active(namespace: str | None = None) -> RayTasks | None:
    """The running cache, in any process of the cluster; None if none was started, or it is gone."""
    session = session_of(namespace)
    session.forget()
    return RayTasks(session.namespace) if session.handle() is not None else None


def stop(namespace: str | None = None) -> None:
    """End the cache's actor, for all drivers. Its contents stay in its directory, for the next `start`."""
    session_of(namespace).stop()


def remote(
    fn: Any = None, *, tag: str | Callable[..., str] | None = None, version: str | int | None = None, ignore: tuple[str, ...] | str = (),
    mode: str | None = None, namespace: str | None = None, **ray_options: Any,
) -> Any:  # fmt: skip
    """A `Task` of a function, of an actor handle's method, or of the result of ``ray.remote`` or ``cached``. Also a decorator.

    The cache may be started later: each call looks for it. ``tag``, ``version``, ``ignore``: as for `Tasks.cached`. ``mode``: default: that
    of `start`. ``ray_options``: those of ``ray.remote``."""
    make = functools.partial(
        make_task, tag=tag, version=version, ignore=ignore, mode=mode_of(mode), namespace=namespace, options=ray_options
    )
    return make if fn is None else make(fn)


class RayTasks(Tasks):
    """The cache of a cluster, in any of its processes. Returned by `start` and `active`; can be pickled, with its providers.

    Callable from any thread. Processes of the head node read and write through the mapping; those of other nodes get values through Ray's
    object store, and store a copy in their own node's cache."""

    def __init__(self, namespace: str | None = None) -> None:
        self.name = SPACE
        self._session = session_of(namespace)
        self._values = Current(self._session)  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (self._session.namespace, self._session.to_send())

    def __repr__(self) -> str:
        location = self._session.location()
        where = f"in {location.path!r} on node {location.node[:8]}" if location is not None else "which is not there"
        return f"<forebay RayTasks of {self._session.namespace!r}, {where}>"

    @property
    def namespace(self) -> str:
        """Ray's namespace of the actor."""
        return self._session.namespace

    @property
    def _config(self) -> Any:
        return self._session.config

    @property
    def _bypass(self) -> Any:
        return self._session.bypass

    @property
    def config(self) -> Any:
        """The configuration, parsed; None if there is none."""
        return self._session.config

    def remote(self, fn: Any = None, **how: Any) -> Any:
        """See `forebay.adapters.ray.tasks.remote`."""
        return remote(fn, namespace=self._session.namespace, **how)

    def set_provider(self, name: str, provider: Callable[..., Any]) -> None:
        """See `Tasks.set_provider`. It is sent with each call, so nested calls use it; other drivers set their own."""
        self._session.set_provider(name, provider)

    def set_condition(self, name: str, cond: Callable[..., bool]) -> None:
        """See `Tasks.set_condition`. It is called in the calling process."""
        self._session.set_condition(name, cond)


def size_in(size: float, units: str) -> int:
    """``size`` in bytes. Raises `ConfigError`."""
    known = {name.upper(): number for name, number in UNITS.items()}
    if not isinstance(units, str) or units.upper() not in known:
        raise errors.ConfigError(f"units={units!r} is not known: choose one of {', '.join(UNITS)}", name="units", value=units)
    number = int(size * known[units.upper()])
    if number < 0:
        raise errors.ConfigError(f"size={size} must not be negative", name="size", value=size)
    return number


def _location(size: float, cache_dir: str | os.PathLike[str], units: str, config: Any, mode: str) -> CacheLocation:
    """Open the cache in this process, so that its errors are raised here."""
    budget = size_in(size, units)
    parsed = load(config) if config is not None else None
    with Cache(Path(cache_dir).absolute()) as cache:
        root = sessions.root_of(str(cache.path))
        codec = default_codec(others_can_write=origin_of(cache).others_can_write).name
        return CacheLocation(str(cache.path), sessions.here(), root or 0, budget, os.getcwd(), parsed, mode, codec)


def _compare(namespace: str, requested: CacheLocation, running: CacheLocation) -> None:
    """Log a warning for each setting of a running cache that is not the requested one."""
    settings: Mapping[str, tuple[Any, Any]] = {
        "size": (requested.budget, running.budget), "cache_dir": (requested.path, running.path),
        "config": (requested.config, running.config), "mode": (requested.mode, running.mode),
    }  # fmt: skip
    other = [name if name == "config" else f"{name} {now!r}, not {asked!r}" for name, (asked, now) in settings.items() if asked != now]
    if other:
        log.warning("a cache runs already (%s), with another %s: it stays as it is; stop() ends it", namespace, ", ".join(other))
    if requested.node != running.node:
        log.warning("a cache runs already (%s), on another node (%s)", namespace, running.node[:8])


def _unpickle(namespace: str, context: Context | None) -> RayTasks:
    if context is not None:
        session_of(namespace).adopt(context)
    return RayTasks(namespace)
