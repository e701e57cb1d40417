"""What one process knows of one cluster's cache: where it is, the configuration, providers; sent along with each call to its worker."""

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
from forebay.tasks.bypass import Bypass
from forebay.tasks.values import COUNTED, Values

log = logger("forebay.ray")

LOOK_AGAIN = 0.1  # seconds for which the actor is taken to be the one it was

_packing = threading.local()  # ``busy``: a context is being pickled
_sessions: dict[str, Session] = {}
_mutex = threading.Lock()  # guards the dict


@dataclass(frozen=True, slots=True)
class Context:
    """What travels with a call. ``mark``: another one for another content; ``content``: pickled."""

    namespace: str
    mark: str
    content: bytes

    def install(self) -> Session:
        """Have it in this process, in place of what an earlier call brought."""
        session = session_of(self.namespace)
        session.install(self)
        return session


class Session:
    """One a process and namespace. Callable from any thread."""

    def __init__(self, namespace: str) -> None:
        self.namespace, self.head = namespace, Head(namespace)
        self.counted = dict.fromkeys(COUNTED, 0)
        self._mutex = threading.RLock()  # guards what follows
        self._actor: Any = None  # the id of the actor that `_place` came from
        self._place: CacheLocation | None = None
        self._values: Values | NullValues = NullValues(self.counted)
        self._good_until = 0.0
        self._bypass = Bypass()
        self._context: Context | None = None

    # -- where the cache is ----------------------------------------------------------------------------------------

    def values(self) -> Values | NullValues:
        """What this process reads and writes; with no head, one that keeps nothing."""
        if time.monotonic() < self._good_until:
            return self._values
        with self._mutex:
            self._look_locked()
            return self._values

    def place(self) -> CacheLocation | None:
        """Where the cache is; None where there is none, or it cannot be asked."""
        values = self.values()
        return None if isinstance(values, NullValues) else self._place

    @property
    def bypass(self) -> Bypass:
        """By the configuration of the cache, with the providers and conditions of this process."""
        self.values()
        return self._bypass

    @property
    def config(self) -> Any:
        """The configuration; None if there is none: then all tasks are kept."""
        self.values()
        return self._place.config if self._place is not None else None

    def attach(self, actor: Any, place: CacheLocation) -> None:
        """Take this actor and place for true."""
        with self._mutex:
            self._attach_locked(actor._actor_id, place)

    def forget(self) -> None:
        """Let the next call look anew."""
        self._good_until = 0.0

    def end(self) -> None:
        """Forget where the cache was, and its configuration: it was stopped on purpose."""
        with self._mutex:
            self._actor, self._place, self._values, self._good_until = None, None, NullValues(self.counted), 0.0
            self._make_bypass_locked(self._bypass.providers, self._bypass.conditions)

    def _look_locked(self) -> None:
        handle = self.head.handle()
        if handle is None:
            self.head.lost("there is none: forebay.adapters.ray.start() makes one")
            self._values, self._actor = NullValues(self.counted), None
        elif handle._actor_id != self._actor:
            try:
                self._attach_locked(handle._actor_id, self.head.ask("place"))
            except Unreachable:
                self._values = NullValues(self.counted)
                return
        self._good_until = time.monotonic() + LOOK_AGAIN

    def _attach_locked(self, actor: Any, place: CacheLocation) -> None:
        changed = place != self._place
        self._actor, self._place = actor, place
        if changed:
            self._make_bypass_locked(self._bypass.providers, self._bypass.conditions)
        if changed or isinstance(self._values, NullValues):
            self._values = _open(place, self.head)
            self._values.counted = self.counted
        self.head.found()
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
        made = Bypass(self._place.config if self._place is not None else None)
        made.providers.update(providers)
        made.conditions.update(conditions)
        self._bypass, self._context = made, None

    # -- with calls ------------------------------------------------------------------------------------------------

    def context(self) -> Context:
        """What a call takes along. Raises what a provider raises that cannot be pickled."""
        self.values()
        with self._mutex:
            if self._context is None:
                _packing.busy = True
                try:
                    content = cloudpickle.dumps((self._actor, self._place, self._bypass.providers, self._bypass.conditions))
                finally:
                    _packing.busy = False
                self._context = Context(self.namespace, hashlib.blake2b(content, digest_size=16).hexdigest(), content)
            return self._context

    def to_send(self) -> Context | None:
        """What a handle takes along that is pickled by itself; None within a context, of which the handle of a provider is a part."""
        return None if getattr(_packing, "busy", False) else self.context()

    def adopt(self, context: Context) -> None:
        """What a handle brought: nothing new to a process that has providers of its own."""
        with self._mutex:
            if not (self._bypass.providers or self._bypass.conditions):
                self.install(context)

    def install(self, context: Context) -> None:
        """What a call brought."""
        with self._mutex:
            if self._context is not None and self._context.mark == context.mark:
                return
            actor, place, providers, conditions = cloudpickle.loads(context.content)
            self._make_bypass_locked(providers, conditions)
            if place is not None:
                self._attach_locked(actor, place)
                self._good_until = 0.0  # it may be another one since
            self._context = context


class Current:
    """The values of a session, whatever they are at each call."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session.values(), name)


_running: ContextVar[str] = ContextVar("forebay_ray_namespace", default=NAMESPACE)


@contextmanager
def running(session: Session) -> Iterator[None]:
    """Within it calls that name no namespace are of this one's."""
    token = _running.set(session.namespace)
    try:
        yield
    finally:
        _running.reset(token)


def session_of(namespace: str | None) -> Session:
    """That of this process; without a namespace that of the call that runs, else the default one."""
    name = _running.get() if namespace is None else namespace
    with _mutex:
        return _sessions.setdefault(name, Session(name))


def _open(place: CacheLocation, head: Head) -> Values | NullValues:
    """What a process of this node reads and writes."""
    # Of another root with this path, in a container perhaps, it would be somebody else's.
    if place.node == here() and root_of(place.path) == place.root:
        try:
            values: Values = Cache(place.path).tasks(SPACE, codec=place.codec)._values
            return values
        except errors.ForebayError as error:
            log.warning("the cache in %s cannot be opened here, values come by Ray: %s", place.path, str(error))
    try:
        cache = Cache()
    except errors.ForebayError as error:
        log.warning("this node has no cache of its own for copies: %s", str(error))
        cache = Cache(enabled=False)
    if place.codec == "pickle" and origin_of(cache).others_can_write:
        log.warning("others can write to %s: no values are copied to it, they come by Ray", cache.path)
        cache.close()
        cache = Cache(enabled=False)
    plain = cache.tasks(f"{SPACE}@{place.root:016x}", codec=place.codec)._values
    return RemoteValues(plain.origin, plain.space, plain.codec, head)
