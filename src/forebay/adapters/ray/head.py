"""The head of the cluster's cache: a named actor that knows where the cache is, and how the other processes speak with it."""

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
PATIENCE = 5.0  # seconds for an answer
PAUSE = 1.0  # seconds after which one that gave none is asked again
SLOWEST = 10 << 20  # bytes a second, of a value on its way
START = 60.0  # seconds for the actor to come up
THREADS = 16


@dataclass(frozen=True, slots=True)
class CacheLocation:
    """Where a cache is, and what was asked of it. ``node``: Ray's id of the head's node; ``root``: the id of the root; ``budget``: bytes;
    ``folder``: in which relative paths of data files lie; ``config``: parsed; ``mode``: of tasks that do not say; ``codec``: by name."""

    path: str
    node: str
    root: int
    budget: int
    folder: str
    config: Any
    mode: str
    codec: str = "pickle"


class HeadActor:
    """Runs on the head's node. No value of that node's processes comes by here; those of other nodes do, as they are stored."""

    def __init__(self, place: CacheLocation) -> None:
        self._place = place
        self._cache = Cache(place.path)
        self._tasks = self._cache.tasks(SPACE, budget=place.budget, codec=place.codec)
        plain = self._tasks._values
        self._values = HeadValues(plain.origin, SPACE, plain.codec)

    def place(self) -> CacheLocation:
        """Where it is."""
        return self._place

    def give(self, key: str, meta: str, digested: bool, token: str) -> HeadReply | None:
        """See `HeadValues.give`."""
        return self._values.give(key, meta, digested, token)

    def send(self, key: str, token: str) -> Payload | None:
        """See `HeadValues.send`."""
        return self._values.send(key, token)

    def doubt(self, key: str, token: str) -> bool:
        """See `HeadValues.doubt`."""
        return self._values.doubt(key, token)

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
        """The content of a file of this node; a relative path is one of the process that started the cache."""
        return Path(self._place.folder, path).read_text(encoding="utf-8")


class Head:
    """How one process speaks with the head of one namespace. Callable from any thread.

    Only the first call waits for one that gives no answer: later ones look whether it has answered meanwhile."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self._lost = False
        self._probe: tuple[Any, float] | None = None  # a question to one that was silent, and until when it may be answered

    def handle(self) -> Any:
        """The actor; None if there is none."""
        if not ray.is_initialized():
            return None
        try:
            return ray.get_actor(NAME, namespace=self.namespace)
        except ValueError:
            return None
        except RayError as error:
            self.lost(error)
            return None

    def ask(self, method: str, *args: Any, size: int = 0) -> Any:
        """What a method of the head gives. ``size``: bytes that go with it, for which it has time. Raises `Unreachable`, or what the
        method raises."""
        handle = self.handle()
        if handle is None:
            self.lost("there is none: forebay.adapters.ray.start() makes one")
            raise Unreachable
        if self._is_silent(handle):
            raise Unreachable
        try:
            answer = ray.get(getattr(handle, method).remote(*args), timeout=PATIENCE + size / SLOWEST)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            self._probe = handle.place.remote(), time.monotonic() + PAUSE
            self.lost(error)
            raise Unreachable from error
        self.found()
        return answer

    def _is_silent(self, handle: Any) -> bool:
        probe = self._probe
        if probe is None:
            return False
        question, until = probe
        done, _ = ray.wait([question], timeout=0)
        try:
            if done:
                ray.get(question)
                self.found()
                return False
        except RayError:
            log.debug("the cache of the cluster (%s) is still away", self.namespace)
        if time.monotonic() >= until:
            self._probe = handle.place.remote(), time.monotonic() + PAUSE
        return True

    def lost(self, why: object) -> None:
        """Said once, until it is back."""
        if not self._lost:
            self._lost = True
            first, *_ = str(why).splitlines() or [type(why).__name__]
            log.warning("the cache of the cluster (%s) cannot be reached, calls run uncached until it is back: %s", self.namespace, first)

    def found(self) -> None:
        """It is there."""
        self._probe = None
        if self._lost:
            self._lost = False
            log.info("the cache of the cluster (%s) is back", self.namespace)


def _cause(error: RayTaskError) -> Exception:
    """What a method raised."""
    return error.cause if isinstance(error.cause, Exception) else error


def here() -> str:
    """Ray's id of this process's node."""
    return str(ray.get_runtime_context().get_node_id())


def root_of(path: str) -> int | None:
    """The id of the root that lies there, without making one; None if there is none."""
    try:
        words = Path(path, "FORMAT").read_text().split()
        return int(words[2], 16)
    except (OSError, ValueError, IndexError):
        return None


def start_head(namespace: str, place: CacheLocation) -> tuple[Any, CacheLocation]:
    """The actor and where its cache is: the running one, else a new one on this node. Of several callers at once one makes it."""
    options = {
        "name": NAME, "namespace": namespace, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": -1,
        "max_concurrency": THREADS, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=place.node, soft=False),
    }  # fmt: skip
    for last in (False, True):
        handle = ray.remote(HeadActor).options(**options).remote(place)
        try:
            return handle, ray.get(handle.place.remote(), timeout=START)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError:
            # Its node is gone for good, and the name is still taken; or it ended just now.
            if last:
                raise
            ray.kill(handle)
            _wait_until_gone(namespace)
    raise AssertionError("not reached")


def stop_head(namespace: str) -> bool:
    """End the actor. False if there is none."""
    handle = Head(namespace).handle()
    if handle is None:
        return False
    ray.kill(handle)
    _wait_until_gone(namespace)
    return True


def _wait_until_gone(namespace: str) -> None:
    head, until = Head(namespace), time.monotonic() + PATIENCE
    while head.handle() is not None and time.monotonic() < until:
        time.sleep(0.02)
