"""The state of one cluster's cache in one process: its location, configuration and providers; sent to the worker with each call."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ray import cloudpickle

from forebay import errors
from forebay._logs import logger
from forebay.adapters.ray.head import NAMESPACE, SPACE, CacheLocation, Head, here, root_of
from forebay.adapters.ray.values import NullValues, RemoteValues, Unreachable
from forebay.cache import Cache, origin_of
from forebay.tasks.config import Bypass
from forebay.tasks.values import COUNTED, Values

log = logger("forebay.ray")

LOOK_AGAIN = 0.1  # seconds for which the actor is assumed to be the same

_packing = threading.local()  # ``busy``: a context is being pickled
_sessions: dict[str, Session] = {}
_mutex = threading.Lock()  # guards the dict


@dataclass(frozen=True, slots=True)
class Context:
    """The state that is sent with a call. ``mark``: identifies the content; ``content``: pickled."""

    namespace: str
    mark: str
    content: bytes

    def install(self) -> Session:
        """Use it in this process, instead of that of an earlier call."""
        session = session_of(self.namespace)
        session.install(self)
        return session


class Session:
    """One for each process and namespace. Callable from any thread."""

    def __init__(self, namespace: str) -> None:
        self.namespace, self.head = namespace, Head(namespace)
        self.counted = dict.fromkeys(COUNTED, 0)
        self._mutex = threading.RLock()  # guards what follows
        self._actor: Any = None  # the id of the actor that sent `_location`
        self._location: CacheLocation | None = None
        self._values: Values | NullValues = NullValues(self.counted)
        self._good_until = 0.0
        self._bypass = Bypass()
        self._context: Context | None = None

    # -- the location of the cache ---------------------------------------------------------------------------------

    def values(self) -> Values | NullValues:
        """The values that this process reads and writes; without a head, `NullValues`."""
        if time.monotonic() < self._good_until:
            return self._values
        with self._mutex:
            self._look_locked()
            return self._values

    def location(self) -> CacheLocation | None:
        """The location of the cache; None if there is none, or its head does not answer."""
        values = self.values()
        return None if isinstance(values, NullValues) else self._location

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

    def attach(self, actor: Any, location: CacheLocation) -> None:
        """Use this actor and location."""
        with self._mutex:
            self._attach_locked(actor._actor_id, location)

    def forget(self) -> None:
        """Let the next call look for the actor again."""
        self._good_until = 0.0

    def end(self) -> None:
        """Forget the location of the cache and its configuration: it was stopped."""
        with self._mutex:
            self._actor, self._location, self._values, self._good_until = None, None, NullValues(self.counted), 0.0
            self._make_bypass_locked(self._bypass.providers, self._bypass.conditions)

    def _look_locked(self) -> None:
        handle = self.head.handle()
        if handle is None:
            self.head.unreachable("there is none: forebay.adapters.ray.start() creates one")
            self._values, self._actor = NullValues(self.counted), None
        elif handle._actor_id != self._actor:
            try:
                self._attach_locked(handle._actor_id, self.head.ask("location"))
            except Unreachable:
                self._values = NullValues(self.counted)
                return
        self._good_until = time.monotonic() + LOOK_AGAIN

    def _attach_locked(self, actor: Any, location: CacheLocation) -> None:
        changed = location != self._location
        self._actor, self._location = actor, location
        if changed:
            self._make_bypass_locked(self._bypass.providers, self._bypass.conditions)
        if changed or isinstance(self._values, NullValues):
            self._values = _open(location, self.head)
            self._values.counted = self.counted
        self.head.reached()
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
                self._context = Context(self.namespace, hashlib.blake2b(content, digest_size=16).hexdigest(), content)
            return self._context

    def to_send(self) -> Context | None:
        """The state to send with a handle that is pickled alone; None while a context is pickled, whose providers may hold handles."""
        return None if getattr(_packing, "busy", False) else self.context()

    def adopt(self, context: Context) -> None:
        """Use the state that came with a handle, unless this process has providers of its own."""
        with self._mutex:
            if not (self._bypass.providers or self._bypass.conditions):
                self.install(context)

    def install(self, context: Context) -> None:
        """Use the state that came with a call."""
        with self._mutex:
            if self._context is not None and self._context.mark == context.mark:
                return
            actor, location, providers, conditions = cloudpickle.loads(context.content)
            self._make_bypass_locked(providers, conditions)
            if location is not None:
                self._attach_locked(actor, location)
                self._good_until = 0.0  # another one may have replaced it
            self._context = context


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
        return _sessions.setdefault(name, Session(name))


def _open(location: CacheLocation, head: Head) -> Values | NullValues:
    """The values that a process of this node reads and writes."""
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
    if location.codec == "pickle" and origin_of(cache).others_can_write:
        log.warning("others can write to %s: no values are copied to it, they come by Ray", cache.path)
        cache.close()
        cache = Cache(enabled=False)
    plain = cache.tasks(f"{SPACE}@{location.root:016x}", codec=location.codec)._values
    return RemoteValues(plain.origin, plain.space, plain.codec, head)
