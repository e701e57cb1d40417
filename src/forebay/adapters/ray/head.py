"""The head of the cluster's cache: a named actor that knows where the cache is; and how other processes talk to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay._logs import logger
from forebay.adapters.ray.values import HeadReply, HeadValues, Payload, Unreachable
from forebay.cache import Cache

log = logger("forebay.ray")

NAME = "forebay-tasks"
NAMESPACE = "forebay"
SPACE = "ray"
ANSWER_TIMEOUT = 5.0  # seconds
PAUSE = 1.0  # seconds after which a silent head is asked again
SLOWEST = 10 << 20  # bytes a second of a transfer
START_TIMEOUT = 60.0  # seconds
THREADS = 16


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """The location and the settings of a cache. ``node``: Ray's id of the head's node; ``root``: the id of the root; ``budget``: bytes;
    ``folder``: to which paths of data files are relative; ``config``: parsed; ``mode``: the default of tasks; ``codec``: its name."""

    path: str
    node: str
    root: int
    budget: int
    folder: str
    config: Any
    mode: str
    codec: str = "pickle"


class HeadActor:
    """Runs on the head's node. Values pass through it only to and from other nodes, in their stored form."""

    def __init__(self, location: CacheLocation) -> None:
        self._location = location
        self._cache = Cache(location.path)
        self._tasks = self._cache.tasks(SPACE, budget=location.budget, codec=location.codec)
        plain = self._tasks._values
        self._values = HeadValues(plain.origin, SPACE, plain.codec)

    def location(self) -> CacheLocation:
        """The location of the cache."""
        return self._location

    def give(self, key: str, meta: str, digested: bool, token: str) -> HeadReply | None:
        """See `HeadValues.give`."""
        return self._values.give(key, meta, digested, token)

    def send(self, key: str, token: str) -> Payload | None:
        """See `HeadValues.send`."""
        return self._values.send(key, token)

    def report_unreadable(self, key: str, token: str) -> bool:
        """See `HeadValues.report_unreadable`."""
        return self._values.report_unreadable(key, token)

    def take(self, key: str, payload: Payload, meta: str, pin: bool) -> str:
        """See `HeadValues.take`."""
        return self._values.take(key, payload, meta, pin)

    def has(self, key: str) -> bool:
        """See `Tasks.has`."""
        return self._values.has(key)

    def has_any(self, prefix: str) -> bool:
        """See `Values.has_any`."""
        return self._values.has_any(prefix)

    def evict(self, key: str) -> bool:
        """See `Tasks.evict`."""
        return self._values.evict(key)

    def flush(self) -> int:
        """See `Tasks.flush`."""
        return self._values.flush()

    def keys(self) -> list[str]:
        """See `Tasks.keys`."""
        return self._values.keys()

    def size(self) -> tuple[int, int]:
        """Stored bytes and number of the values."""
        return self._values.size()

    def budget(self) -> int | None:
        """See `Tasks.budget`."""
        return self._values.budget()

    def text(self, path: str) -> str:
        """The content of a file of this node. A relative path is resolved in the directory of the process that started the cache."""
        return Path(self._location.folder, path).read_text(encoding="utf-8")


class Head:
    """The connection of one process to the head of one namespace. Callable from any thread.

    Only the first call waits for a silent head: later ones only check whether it has answered meanwhile."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._lost = False
        self._probe: tuple[Any, float] | None = None  # a request to a head that was silent, and when to replace it by another

    def handle(self) -> Any:
        """The actor; None if there is none."""
        if not ray.is_initialized():
            return None
        try:
            return ray.get_actor(NAME, namespace=self.namespace)
        except ValueError:
            return None
        except RayError as error:
            self.unreachable(error)
            return None

    def ask(self, method: str, *args: Any, size: int = 0) -> Any:
        """Call a method of the head. ``size``: bytes of a transfer, which extend the timeout. Raises `Unreachable`, or what the method
        raises."""
        handle = self.handle()
        if handle is None:
            self.unreachable("there is none: forebay.adapters.ray.start() creates one")
            raise Unreachable
        if self._is_silent(handle):
            raise Unreachable
        try:
            answer = ray.get(getattr(handle, method).remote(*args), timeout=ANSWER_TIMEOUT + size / SLOWEST)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            self._probe = handle.location.remote(), time.monotonic() + PAUSE
            self.unreachable(error)
            raise Unreachable from error
        self.reached()
        return answer

    def _is_silent(self, handle: Any) -> bool:
        probe = self._probe
        if probe is None:
            return False
        request, until = probe
        done, _ = ray.wait([request], timeout=0)
        try:
            if done:
                ray.get(request)
                self.reached()
                return False
        except RayError:
            log.debug("the cache of the cluster (%s) is still away", self.namespace)
        if time.monotonic() >= until:
            self._probe = handle.location.remote(), time.monotonic() + PAUSE
        return True

    def unreachable(self, reason: object) -> None:
        """Log a warning once, until the head is back."""
        if not self._lost:
            self._lost = True
            first, *_ = str(reason).splitlines() or [type(reason).__name__]
            log.warning("the cache of the cluster (%s) cannot be reached, calls run uncached until it is back: %s", self.namespace, first)

    def reached(self) -> None:
        """Note that the head answers."""
        self._probe = None
        if self._lost:
            self._lost = False
            log.info("the cache of the cluster (%s) is back", self.namespace)


def _cause(error: RayTaskError) -> Exception:
    """The error that a method raised."""
    return error.cause if isinstance(error.cause, Exception) else error


def here() -> str:
    """Ray's id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def root_of(path: str) -> int | None:
    """The id of the root at ``path``; None if there is none."""
    try:
        words = Path(path, "FORMAT").read_text().split()
        return int(words[2], 16)
    except (OSError, ValueError, IndexError):
        return None


def start_head(namespace: str, location: CacheLocation) -> tuple[Any, CacheLocation]:
    """The actor and the location of its cache: the running one, else a new one on this node. Of concurrent callers, one creates it."""
    options = {
        "name": NAME, "namespace": namespace, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": -1,
        "max_concurrency": THREADS, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=location.node, soft=False),
    }  # fmt: skip
    for last in (False, True):
        handle = ray.remote(HeadActor).options(**options).remote(location)
        try:
            return handle, ray.get(handle.location.remote(), timeout=START_TIMEOUT)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError:
            # Its node is lost and its name still taken, or it ended just now.
            if last:
                raise
            ray.kill(handle)
            _wait_for_end(namespace)
    raise AssertionError("not reached")


def stop_head(namespace: str) -> bool:
    """End the actor. False if there is none."""
    handle = Head(namespace).handle()
    if handle is None:
        return False
    ray.kill(handle)
    _wait_for_end(namespace)
    return True


def _wait_for_end(namespace: str) -> None:
    head, until = Head(namespace), time.monotonic() + ANSWER_TIMEOUT
    while head.handle() is not None and time.monotonic() < until:
        time.sleep(0.02)
