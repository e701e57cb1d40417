"""The cache of a cluster: the actor that serves it to other nodes, and the state of the cache in each process, sent with each call."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import ray
from ray import cloudpickle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from forebay import errors
from forebay._kernel import interrupts
from forebay._kernel.interrupts import of_program
from forebay._logs import logger
from forebay.adapters.ray.values import HeadValues, RemoteValues, Unreachable
from forebay.cache import Cache, fetcher_of
from forebay.codecs import codec
from forebay.tasks.config import Bypass
from forebay.tasks.values import COUNTED, Values

log = logger("forebay.ray")

NAME = "forebay-tasks"
NAMESPACE = "forebay"
SPACE = "ray"
ANSWER_TIMEOUT = 5.0  # seconds
PAUSE = 1.0  # seconds after which a silent head is asked again
SLOWEST = 10 << 20  # bytes a second of a transfer
START_TIMEOUT = 60.0  # seconds
THREADS = 16
LOOK_AGAIN = 0.1  # seconds for which the actor is assumed to be the same

_packing = threading.local()  # ``busy``: a context is being pickled
_sessions: dict[str, Session] = {}
_mutex = threading.Lock()  # guards the dict


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
        plain = Cache(location.path).tasks(SPACE, budget=location.budget, codec=location.codec)._values
        self._values = HeadValues(plain.fetcher, SPACE, plain.codec)

    def location(self) -> CacheLocation:
        """The location of the cache."""
        return self._location

    def text(self, path: str) -> str:
        """The content of a file of this node. A relative path is resolved in the directory of the process that started the cache."""
        return Path(self._location.folder, path).read_text(encoding="utf-8")

    def values(self, method: str, *args: Any) -> Any:
        """Call a method of `HeadValues`."""
        return getattr(self._values, method)(*args)


@dataclass(frozen=True, slots=True)
class Context:
    """The state that is sent with a call. ``content``: pickled."""

    namespace: str
    content: bytes


class Session:
    """The cache of one namespace, as this process knows it: its actor, location, configuration and providers. Callable from any thread.

    Only the first request waits for a silent actor. Later requests only check whether it has answered."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.counted = dict.fromkeys(COUNTED, 0)
        self._lost = False
        self._probe: tuple[Any, float] | None = None  # a request to an actor that was silent, and when to replace it by another
        self._mutex = threading.RLock()  # guards what follows
        self._actor: Any = None  # the id of the actor that sent `_location`
        self._location: CacheLocation | None = None
        self._nothing = Values(fetcher_of(Cache(enabled=False)), SPACE, codec("pickle"))
        self._nothing.counted = self.counted
        self._values: Values | None = None  # None: the actor does not answer
        self._good_until = 0.0
        self._bypass = Bypass()
        self._context: Context | None = None

    # -- the actor -------------------------------------------------------------------------------------------------

    def handle(self) -> Any:
        """The actor; None if there is none."""
        if not ray.is_initialized():
            return None
        try:
            return of_program(ray.get_actor)(NAME, namespace=self.namespace)
        except ValueError:
            return None
        except RayError as error:
            self._unreachable(error)
            return None

    def ask(self, method: str, *args: Any, size: int = 0) -> Any:
        """Call a method of the actor. ``size``: bytes of a transfer, which extend the timeout. Raises `Unreachable`, or what the method
        raises."""
        handle = self.handle()
        if handle is None:
            self._unreachable("there is none: forebay.adapters.ray.start() creates one")
            raise Unreachable
        if self._is_silent(handle):
            raise Unreachable
        try:
            answer = of_program(ray.get)(getattr(handle, method).remote(*args), timeout=ANSWER_TIMEOUT + size / SLOWEST)
        except RayTaskError as error:
            raise _cause(error) from None
        except RayError as error:
            self._probe = handle.location.remote(), time.monotonic() + PAUSE
            self._unreachable(error)
            raise Unreachable from error
        self._reached()
        return answer

    def _is_silent(self, handle: Any) -> bool:
        if self._probe is None:
            return False
        request, until = self._probe
        done, _ = of_program(ray.wait)([request], timeout=0)
        try:
            if done:
                of_program(ray.get)(request)
                self._reached()
                return False
        except RayError:
            log.debug("the cache of the cluster (%s) is still away", self.namespace)
        if time.monotonic() >= until:
            self._probe = handle.location.remote(), time.monotonic() + PAUSE
        return True

    def _unreachable(self, reason: object) -> None:
        """Log a warning once, until the actor is back."""
        if not self._lost:
            self._lost = True
            first, *_ = str(reason).splitlines() or [type(reason).__name__]
            log.warning("the cache of the cluster (%s) cannot be reached, calls run uncached until it is back: %s", self.namespace, first)

    def _reached(self) -> None:
        self._probe = None
        if self._lost:
            self._lost = False
            log.info("the cache of the cluster (%s) is back", self.namespace)

    def start(self, location: CacheLocation) -> CacheLocation:
        """Use the running actor, else a new one on this node; returns its location. Of concurrent callers, one creates it."""
        options = {
            "name": NAME, "namespace": self.namespace, "lifetime": "detached", "get_if_exists": True, "num_cpus": 0, "max_restarts": -1,
            "max_concurrency": THREADS, "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=location.node, soft=False),
        }  # fmt: skip
        for last in (False, True):
            handle = ray.remote(HeadActor).options(**options).remote(location)
            try:
                running: CacheLocation = of_program(ray.get)(handle.location.remote(), timeout=START_TIMEOUT)
                break
            except RayTaskError as error:
                raise _cause(error) from None
            except RayError:
                # Its node is lost and its name still taken, or it ended just now.
                if last:
                    raise
                self._kill(handle)
        self.attach(handle._actor_id, running)
        return running

    def stop(self) -> None:
        """End the actor, and forget the location of the cache and its configuration."""
        handle = self.handle()
        if handle is not None:
            self._kill(handle)
        with self._mutex:
            self._actor, self._location, self._values, self._good_until = None, None, None, 0.0
            self._make_bypass_locked(self._bypass.providers, self._bypass.conditions)

    def _kill(self, handle: Any) -> None:
        of_program(ray.kill)(handle)
        until = time.monotonic() + ANSWER_TIMEOUT
        while self.handle() is not None and time.monotonic() < until:
            interrupts.sleep(0.02)

    # -- the location of the cache ---------------------------------------------------------------------------------

    def values(self) -> Values:
        """The values that this process reads and writes; while the actor does not answer, there are none and none are stored."""
        if time.monotonic() >= self._good_until:
            with self._mutex:
                self._look_locked()
        values = self._values
        return self._nothing if values is None else values

    def location(self) -> CacheLocation | None:
        """The location of the cache; None if there is none, or its actor does not answer."""
        return None if self.values() is self._nothing else self._location

    @property
    def bypass(self) -> Bypass:
        """The bypass of the cache's configuration, with the providers and conditions of this process."""
        self.values()
        return self._bypass

    @property
    def config(self) -> Any:
        """The configuration; None if there is none: then the outputs of all tasks are kept."""
        self.values()
        return self._location.config if self._location is not None else None

    def forget(self) -> None:
        """Let the next call look for the actor again."""
        self._good_until = 0.0

    def _look_locked(self) -> None:
        handle = self.handle()
        if handle is None:
            self._unreachable("there is none: forebay.adapters.ray.start() creates one")
            self._values, self._actor = None, None
        elif handle._actor_id != self._actor:
            try:
                self.attach(handle._actor_id, self.ask("location"))
            except Unreachable:
                self._values = None
                return
        self._good_until = time.monotonic() + LOOK_AGAIN

    def attach(self, actor: Any, location: CacheLocation) -> None:
        """Use the actor with this id, and its location."""
        with self._mutex:
            changed = location != self._location
            self._actor, self._location = actor, location
            if changed:
                self._make_bypass_locked(self._bypass.providers, self._bypass.conditions)
            if changed or self._values is None:
                self._values = open_values(location, functools.partial(self.ask, "values"))
                self._values.counted = self.counted
            self._reached()
            self._good_until = time.monotonic() + LOOK_AGAIN

    # -- bypass ----------------------------------------------------------------------------------------------------

    def set_provider(self, name: str, provider: Callable[..., Any]) -> None:
        """See `Tasks.set_provider`."""
        with self._mutex:
            self._bypass.set_provider(name, provider)
            self._context = None

    def set_condition(self, name: str, cond: Callable[..., bool]) -> None:
        """See `Tasks.set_condition`."""
        with self._mutex:
            self._bypass.set_condition(name, cond)
            self._context = None

    def _make_bypass_locked(self, providers: dict[str, Callable[..., Any]], conditions: dict[str, Callable[..., bool]]) -> None:
        bypass = Bypass(self._location.config if self._location is not None else None)
        bypass.providers.update(providers)
        bypass.conditions.update(conditions)
        self._bypass, self._context = bypass, None

    # -- with calls ------------------------------------------------------------------------------------------------

    def context(self) -> Context:
        """The state to send with a call. Raises the pickling error of a provider that cannot be pickled."""
        self.values()
        with self._mutex:
            if self._context is None:
                _packing.busy = True
                try:
                    content = cloudpickle.dumps((self._actor, self._location, self._bypass.providers, self._bypass.conditions))
                finally:
                    _packing.busy = False
                self._context = Context(self.namespace, content)
            return self._context

    def to_send(self) -> Context | None:
        """The state to send with a handle that is pickled alone; None while a context is pickled, whose providers may hold handles."""
        return None if getattr(_packing, "busy", False) else self.context()

    def adopt(self, context: Context) -> None:
        """Use the state that came with a handle, unless this process has providers of its own."""
        with self._mutex:
            if not (self._bypass.providers or self._bypass.conditions):
                self.install(context)

    def install(self, context: Context) -> Self:
        """Use the state that came with a call, instead of that of an earlier call."""
        with self._mutex:
            if self._context == context:
                return self
            actor, location, providers, conditions = cloudpickle.loads(context.content)
            self._make_bypass_locked(providers, conditions)
            if location is not None:
                self.attach(actor, location)
                self._good_until = 0.0  # another one may have replaced it
            self._context = context
        return self


class Current:
    """The values of a session, looked up at each call."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session.values(), name)


_running: ContextVar[str] = ContextVar("forebay_ray_namespace", default=NAMESPACE)


@contextmanager
def running(session: Session) -> Iterator[None]:
    """Inside of the block, calls without a namespace belong to this session."""
    token = _running.set(session.namespace)
    try:
        yield
    finally:
        _running.reset(token)


def session_of(namespace: str | None) -> Session:
    """The session of this process; without a namespace, that of the running call, else the default one."""
    name = _running.get() if namespace is None else namespace
    with _mutex:
        if name not in _sessions:
            _sessions[name] = Session(name)
        return _sessions[name]


def here() -> str:
    """Ray's id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def root_of(path: str) -> int | None:
    """The id of the root at ``path``; None if there is none."""
    try:
        return int(Path(path, "FORMAT").read_text().split()[2], 16)
    except (OSError, ValueError, IndexError):
        return None


def _cause(error: RayTaskError) -> Exception:
    """The error that a method raised."""
    return error.cause if isinstance(error.cause, Exception) else error


def open_values(location: CacheLocation, ask: Callable[..., Any]) -> Values:
    """The values that a process of this node reads and writes. ``ask``: see `RemoteValues`."""
    # The same path may lead to another root, as in a container.
    if location.node == here() and root_of(location.path) == location.root:
        try:
            values: Values = Cache(location.path).tasks(SPACE, codec=location.codec)._values
            return values
        except errors.ForebayError as error:
            log.warning("the cache in %s cannot be opened here, values come by Ray: %s", location.path, str(error))
    try:
        cache = Cache()
    except errors.ForebayError as error:
        log.warning("this node has no cache of its own for copies: %s", str(error))
        cache = Cache(enabled=False)
    if location.codec == "pickle" and fetcher_of(cache).others_can_write:
        log.warning("others can write to %s: no values are copied to it, they come by Ray", cache.path)
        cache.close()
        cache = Cache(enabled=False)
    plain = cache.tasks(f"{SPACE}@{location.root:016x}", codec=location.codec)._values
    return RemoteValues(plain.fetcher, plain.space, plain.codec, ask)
