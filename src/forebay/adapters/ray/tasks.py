"""Tasks of a Ray cluster: outputs of remote functions, stored on the head node for all drivers and workers.

``start()`` once in a driver; then ``task = remote(function)`` and ``task.remote(*args, tag="iter-3")``. The head is the node of the process
that calls `start`: the cache is on that node, and its processes read and write it through the mapping.

The calling process names a call and looks it up; a worker runs it and keeps its output."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._kernel.interrupts import guarded, of_program
from forebay._logs import logger
from forebay.tasks import Tasks, hashing
from forebay.tasks.cached import Cached
from forebay.tasks.code import identity_of
from forebay.tasks.config import Replay, load
from forebay.tasks.naming import BoundCall, Naming

try:
    import ray
    from ray.actor import ActorClass, ActorMethod
    from ray.remote_function import RemoteFunction

    from forebay.adapters.ray import sessions
    from forebay.adapters.ray.sessions import SPACE, CacheLocation, Context, Current, Session, running, session_of
    from forebay.adapters.ray.values import Unreachable
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.ray.tasks", "ray") from error

from forebay.cache import Cache, fetcher_of
from forebay.codecs import default_codec

__all__ = ["RayTasks", "Task", "active", "remote", "start", "stop"]

log = logger("forebay.ray")

UNITS = {"B": 1, **{f"{letter}{tail}": 1024**power for power, letter in enumerate("KMGT", 1) for tail in ("B", "iB")}}
READ_THROUGH, REPLAY = "read-through", "replay"


@guarded
def start(
    size: float, cache_dir: str | os.PathLike[str], units: str = "B", config: Any = None, namespace: str | None = None,
    mode: str = READ_THROUGH,
) -> RayTasks:  # fmt: skip
    """The cache of the cluster: the running one, else a new one in ``cache_dir`` on this node, with at most ``size`` ``units``.

    ``units``: B, KB to TB or KiB to TiB, always powers of 1024. ``namespace``: for this whole module; default: the running task's, else
    ``forebay``. ``config``: a YAML file or a mapping; read in this process. ``mode``: ``read-through``, or ``replay``: outputs are stored,
    and read only by bypass. Callable by several drivers at once. A running cache stays as it is, with a warning if its settings differ.
    Raises `ConfigError` (a ValueError) and `RootRefused`."""
    _check_mode(mode)
    requested = _location(size, cache_dir, units, config, mode or READ_THROUGH)
    session = session_of(namespace)
    _compare(session.namespace, requested, session.start(requested))
    return RayTasks(session.namespace)


@guarded
def active(namespace: str | None = None) -> RayTasks | None:
    """The running cache, in any process of the cluster; None if none was started, or it is gone."""
    session = session_of(namespace)
    session.forget()
    return RayTasks(session.namespace) if session.handle() is not None else None


@guarded
def stop(namespace: str | None = None) -> None:
    """End the cache's actor, for all drivers. Its contents stay in its directory, for the next `start`."""
    session_of(namespace).stop()


def remote(
    fn: Any = None, *, tag: str | Callable[..., str] | None = None, version: str | int | None = None, ignore: tuple[str, ...] | str = (),
    mode: str | None = None, namespace: str | None = None, **ray_options: Any,
) -> Any:  # fmt: skip
    """A `Task` of a function, of an actor handle's method, or of the result of ``ray.remote`` or ``cached``. Also a decorator.

    The cache may be started later: each call looks for it. ``tag``, ``version``, ``ignore``: as for `Tasks.cached`. ``mode``: default: that
    of `start`. ``ray_options``: those of ``ray.remote``. Raises `ConfigError`."""
    _check_mode(mode)
    if fn is None:
        return functools.partial(remote, tag=tag, version=version, ignore=ignore, mode=mode, namespace=namespace, **ray_options)
    if isinstance(fn, ActorMethod):
        stub = _stub(fn)
        identity = identity_of(stub.__wrapped__) if hasattr(stub, "__wrapped__") else None
        return ActorTask(fn, Naming(stub, tag, version, ignore, identity), mode, namespace, ray_options)
    naming: Naming | None = None
    if isinstance(fn, RemoteFunction):
        ray_options = {**{name: value for name, value in fn._default_options.items() if value is not None}, **ray_options}
        fn = fn._function
    elif isinstance(fn, Task):
        ray_options = {"tag": fn._tag, **fn._options, **ray_options}
        mode, namespace, naming, fn = mode or fn._mode, namespace or fn._namespace, fn._naming, fn._function
    elif isinstance(fn, Cached):
        naming, fn = fn._naming, fn.__wrapped__
    if not callable(fn) or inspect.isclass(fn) or isinstance(fn, ActorClass):
        raise errors.ConfigError(f"{fn!r} is neither a function nor a method of an actor's handle", name="fn", value=repr(fn))
    if inspect.iscoroutinefunction(fn):
        raise errors.ConfigError(f"{fn!r} is a coroutine, which Ray does not run as a task", name="fn", value=repr(fn))
    if naming is None:
        return Task(fn, Naming(fn, tag, version, ignore), mode, namespace, ray_options)
    rule, mark = naming._rule if tag is None else tag, naming.version if version is None else version
    return Task(fn, Naming(fn, rule, mark, ignore or naming._ignore, naming.identity), mode, namespace, ray_options)


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


def _check_mode(mode: str | None) -> None:
    """Raises `ConfigError` for an unknown mode."""
    if mode not in (None, READ_THROUGH, REPLAY):
        raise errors.ConfigError(f"mode={mode!r} is unknown: choose {READ_THROUGH!r} or {REPLAY!r}", name="mode", value=mode)


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
        codec = default_codec(others_can_write=fetcher_of(cache).others_can_write).name
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


@guarded
def _unpickle(namespace: str, context: Context | None) -> RayTasks:
    if context is not None:
        session_of(namespace).adopt(context)
    return RayTasks(namespace)


# -- tasks -------------------------------------------------------------------------------------------------------------

_warned: set[tuple[str, str]] = set()


class Task:
    """A function that Ray runs unless its output is cached. Returned by `remote`; pickled as Ray's own are.

    ``remote(*args, tag=None, **kwargs)`` returns an ObjectRef (a list, for several returns): of the cached output, else of a call with the
    task's options. This ``tag`` replaces the rule's tag; if the function has a parameter ``tag``, it is passed to the function instead:
    then use ``options(tag=...)``."""

    def __init__(
        self, function: Callable[..., Any], naming: Naming, mode: str | None, namespace: str | None, options: dict[str, Any]
    ) -> None:
        self._function, self._naming, self._mode, self._namespace = function, naming, mode, namespace
        self._tag: str | None = options.get("tag")
        self._options = {name: value for name, value in options.items() if name != "tag"}
        self._takes_tag = "tag" in inspect.signature(naming.function).parameters
        self._sent: dict[str, Any] = {}  # remote functions: Ray sends each of them to every worker once, and keeps it
        functools.update_wrapper(self, naming.function)

    def __reduce__(self) -> tuple[Any, ...] | str:
        module, name = self._function.__module__, str(self._function.__qualname__)
        if self._naming.function.__module__ not in ("__main__", "__mp_main__") and _by_name(module, name) is self:
            return name
        return type(self), (self._function, self._naming, self._mode, self._namespace, {"tag": self._tag, **self._options})

    def __repr__(self) -> str:
        return f"<forebay Task {self._naming.identity}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function in this process: nothing is looked up or kept."""
        return self._function(*args, **kwargs)

    def options(self, **ray_options: Any) -> Task:
        """The same task with other options for Ray; ``tag``: of its calls."""
        options = {"tag": self._tag, **self._options, **ray_options}
        task = type(self)(self._function, self._naming, self._mode, self._namespace, options)
        task._sent = self._sent
        return task

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """A reference to the output, cached or still to be computed."""
        tag = self._tag if self._takes_tag else kwargs.pop("tag", self._tag)
        returns = self._options.get("num_returns")
        if returns is None:
            returns = getattr(self._function, "_num_returns", 1)  # of a method of an actor
        if not isinstance(returns, int) or returns < 1 or self._yields():
            self._warn_once("returns", f"{self._naming.identity} runs uncached: output in parts, or without a return, is not stored")
            return self._plain(args, kwargs)
        plan, value = make_plan(
            session_of(self._namespace), self._naming, self._mode, tag, returns, args, kwargs, needs_tag=isinstance(self, ActorTask)
        )
        if value is not None:
            return ray.put(value[0]) if returns == 1 else [ray.put(part) for part in value[0]]
        return self._send(plan, args, kwargs)

    def tag_of(self, *args: Any, **kwargs: Any) -> str:
        """The tag under which the output of this call is kept, for `RayTasks.read` and others. ``tag``: as for `remote`.

        Waits for the references among the arguments."""
        tag = self._tag if self._takes_tag else kwargs.pop("tag", self._tag)
        args, kwargs = tuple(map(_resolved, args)), {name: _resolved(value) for name, value in kwargs.items()}
        call = self._naming.call(args, kwargs, tag) if tag is not None else None
        return call.tag.key if call is not None else self._naming.tag_of(args, kwargs).key

    def evict(self, *args: Any, **kwargs: Any) -> bool:
        """Remove the output of this call. False if there is none."""
        return bool(session_of(self._namespace).values().evict(self.tag_of(*args, **kwargs)))

    def _send(self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "task" not in self._sent:
            self._sent["task"] = ray.remote(trampoline(self._function, self._naming))
        name = f"replay of {self._naming.name}" if plan.replay is not None else self._naming.name
        return self._sent["task"].options(**{"name": name, **self._options}).remote(plan, *args, **kwargs)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "plain" not in self._sent:
            self._sent["plain"] = ray.remote(self._function)
        return self._sent["plain"].options(**self._options).remote(*args, **kwargs)

    def _yields(self) -> bool:
        return inspect.isgeneratorfunction(self._function) or inspect.isasyncgenfunction(self._function)

    def _warn_once(self, kind: str, message: str) -> None:
        if (self._naming.identity, kind) not in _warned:
            _warned.add((self._naming.identity, kind))
            log.warning("%s", message)


class ActorTask(Task):
    """A method of one actor. The state of the actor is not visible from outside, so only calls with a tag are kept."""

    _function: ActorMethod

    def __reduce__(self) -> tuple[Any, ...]:
        handle, name = self._function._actor, self._function._method_name
        return _actor_task, (handle, name, self._naming, self._mode, self._namespace, {"tag": self._tag, **self._options})

    def _send(self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = session_of(self._namespace).config
        if plan.call is not None and not plan.call.tag.given and (config is None or config.caches(self._naming.name, plan.call.tag)):
            self._warn_once("tag", f"{self._naming.identity} runs uncached without a tag: it depends on the hidden state of its actor")
        if plan.is_plain:
            return self._plain(args, kwargs)
        handle, name = self._function._actor, self._function._method_name
        names, flat = tuple(kwargs), (*args, *kwargs.values())  # Ray resolves references only in positional arguments
        if plan.replay is None and getattr(handle, "_ray_allow_out_of_order_execution", True):
            # The method may be a coroutine, which only Ray itself can run there.
            references = self._plain(args, kwargs)
            results = references if isinstance(references, list) else [references]
            if plan.call is not None:
                names, flat = (), ()
            keeping = _keep_results.options(num_returns=plan.returns, name=f"keep {self._naming.name}")
            return keeping.remote(self._naming, plan, names, *results, *flat)
        options = {"name": self._naming.name, "num_returns": plan.returns, **self._options}
        return handle.__ray_call__.options(**options).remote(in_actor, name, self._naming, plan, names, *flat)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._function.options(**self._options).remote(*args, **kwargs)

    def _yields(self) -> bool:
        return bool(self._function._is_generator)


hashing.register(Task, lambda task: task._naming.content())


def _resolved(argument: Any) -> Any:
    """An argument as the function gets it."""
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument


def _by_name(module: str, qualname: str) -> Any:
    """The object with this module and qualified name; None if this process does not have it."""
    value: Any = sys.modules.get(module)
    for name in qualname.split("."):
        value = getattr(value, name, None)
    return value


def _stub(method: ActorMethod) -> Callable[..., Any]:
    """A function with the name and the parameters of a method of an actor. It wraps the method itself if this process has the class: then
    its code counts."""

    def stub(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    handle, name = method._actor, method._method_name
    where = handle._ray_function_descriptor[name]
    stub.__name__, stub.__qualname__, stub.__module__ = name, f"{where.class_name}.{name}", where.module_name
    stub.__signature__ = inspect.Signature(handle._ray_method_signatures[name])  # type: ignore[attr-defined]
    kind = _by_name(where.module_name, where.class_name)
    original = getattr(getattr(getattr(kind, "__ray_metadata__", None), "modified_class", kind), name, None)
    if isinstance(original, types.FunctionType):
        stub.__wrapped__ = original  # type: ignore[attr-defined]
    return stub


def _actor_task(handle: Any, name: str, naming: Naming, mode: str | None, namespace: str | None, options: dict[str, Any]) -> ActorTask:
    return ActorTask(getattr(handle, name), naming, mode, namespace, options)


# -- one call ----------------------------------------------------------------------------------------------------------

_calling = threading.local()  # ``met``: whether hashing met a reference while the caller named a call


def _content(reference: ray.ObjectRef) -> Any:
    """The content of a reference, for hashing: its value. The caller of a task does not wait for that."""
    if getattr(_calling, "met", None) is None:
        return ray.get(reference)
    _calling.met = True
    return reference.hex()


hashing.register(ray.ObjectRef, _content)


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What the worker of one call has to do. ``call``: None if the worker has to name it, ``tag`` being the one that was given.
    ``looked``: the caller has seen that there is no value."""

    context: Context
    tag: str | None
    call: BoundCall | None
    replay: Replay | None
    kept: bool
    pin: bool
    mode: str
    returns: int
    looked: bool

    @property
    def is_plain(self) -> bool:
        """Whether the call only runs."""
        return self.replay is None and not self.kept


@guarded
def make_plan(
    session: Session, naming: Naming, mode: str | None, tag: str | None, returns: int, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    *, needs_tag: bool = False,
) -> tuple[CallPlan, tuple[Any] | None]:  # fmt: skip
    """The plan of a call, and its value in a tuple if it is cached already. ``needs_tag``: its output depends on more than its
    arguments."""
    if tag is not None and not isinstance(tag, str):
        raise errors.ConfigError(f"{naming.identity}: the tag {tag!r} is not a str", name="tag", value=repr(tag))
    previous, _calling.met = getattr(_calling, "met", None), False  # a rule for tags may call a task
    try:
        call, met = naming.call(args, kwargs, tag), bool(_calling.met)
    finally:
        _calling.met = previous
    location, config = session.location(), session.config
    chosen = mode or (location.mode if location is not None else READ_THROUGH)
    tag_is_known = not met or tag is not None or (call is not None and not call.tag.given)
    kept = call is not None and (call.tag.given or (chosen != REPLAY and not needs_tag))
    if call is not None and config is not None and tag_is_known:
        kept = kept and config.caches(naming.name, call.tag)
    elif config is not None:
        rule = config.cache.get(naming.name)
        kept = kept and rule is not None and rule.on
    shown = call.tag if call is not None and (call.tag.given or chosen == READ_THROUGH) else None
    replay = session.bypass.choose(naming.name, shown, args, kwargs)
    if replay is not None:
        kept = kept and not replay.is_from_cache
        replay = dataclasses.replace(replay, provider=None)  # the worker has it from the context
    pin = kept and call is not None and config is not None and config.pins(naming.name, call.tag)
    looks = kept and replay is None and chosen == READ_THROUGH and not met and location is not None
    value = session.values().look(call.tag.key, call.digest, label=naming.identity) if looks and call is not None else None
    if value is not None and not _fits(value[0], returns):
        value = None
    return CallPlan(session.context(), tag, None if met else call, replay, kept, pin, chosen, returns, looks), value


def _fits(value: Any, returns: int) -> bool:
    """Whether a value consists of that many returns."""
    return returns == 1 or (not isinstance(value, (str, bytes, Mapping)) and getattr(value, "__len__", lambda: -1)() == returns)


@guarded
def work(function: Callable[..., Any], naming: Naming, plan: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """On the worker: run or replay the call, and keep its output."""
    session = session_of(plan.context.namespace).install(plan.context)

    def run() -> Any:
        session.counted["runs"] += 1
        return of_program(function)(*args, **kwargs)

    def run_to_keep() -> Any:
        value = run()
        if plan.returns != 1 and isinstance(value, Iterator):
            value = tuple(value)
        if not _fits(value, plan.returns):
            raise ValueError(f"{naming.identity} was to return {plan.returns} values (num_returns), and returned {type(value).__name__}")
        return value

    with running(session):
        if plan.is_plain:
            return run()
        plan, call = _named(session, naming, plan, args, kwargs)
        if plan.replay is not None:
            return _replayed(session, naming, plan, call, run, args, kwargs)
        if call is None or not plan.kept:
            return run()
        if plan.mode == REPLAY:
            value = run_to_keep()
            keep(session, naming, plan, call, value)
            return value
        naming.report_if_changed(session.values().has_any)
        value = session.values().single(call.tag.key, call.digest, run_to_keep, pin=plan.pin, label=naming.identity, looked=plan.looked)
        return value if _fits(value, plan.returns) else run()  # kept by a call with another number of returns


def _named(
    session: Session, naming: Naming, plan: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[CallPlan, BoundCall | None]:  # fmt: skip
    """The plan, completed with what its caller could not know from references; and the call."""
    if plan.call is not None:
        return plan, plan.call
    call, config = naming.call(args, kwargs, plan.tag), session.config
    if call is None:
        return plan, None
    if config is not None and plan.kept:
        plan = dataclasses.replace(plan, kept=config.caches(naming.name, call.tag), pin=config.pins(naming.name, call.tag))
    if plan.replay is not None and plan.replay.tag is not None:
        plan = dataclasses.replace(plan, replay=dataclasses.replace(plan.replay, tag=call.tag))
    return plan, call


def keep(session: Session, naming: Naming, plan: CallPlan, call: BoundCall | None, value: Any) -> None:
    """Keep the output of a call, if the plan says so."""
    if call is not None and plan.kept and _fits(value, plan.returns):
        session.values().keep(call.tag.key, value, digest=call.digest, pin=plan.pin, label=naming.identity)


def _replayed(
    session: Session, naming: Naming, plan: CallPlan, call: BoundCall | None, run: Callable[[], Any], args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    assert plan.replay is not None
    provider = session.bypass.providers.get(plan.replay.name)
    if provider is not None:
        value = of_program(provider)(plan.replay.tag, plan.replay.data_path, *args, **kwargs)
    else:
        try:
            value = session.ask("text", plan.replay.data_path)
        except Unreachable:
            return run()  # the session has logged it
    session.counted["replays"] += 1
    keep(session, naming, plan, call, value)
    return value


# -- how calls are sent ------------------------------------------------------------------------------------------------


def trampoline(function: Callable[..., Any], naming: Naming) -> Callable[..., Any]:
    """The function that Ray runs instead of ``function``, under its name. Created once a task: Ray sends it to each worker once."""

    def run(plan: CallPlan, /, *args: Any, **kwargs: Any) -> Any:
        return work(function, naming, plan, args, kwargs)

    run.__name__ = run.__qualname__ = naming.name
    return run


def in_actor(actor: Any, method: str, naming: Naming, plan: CallPlan, names: Sequence[str], *flat: Any) -> Any:
    """The function that Ray runs in an actor instead of one of its methods. ``names``: of the last arguments in ``flat``."""
    args, kwargs = _unflattened(names, flat)
    return work(getattr(actor, method), naming, plan, args, kwargs)


@guarded
def keep_results(naming: Naming, plan: CallPlan, names: Sequence[str], *flat: Any) -> Any:
    """The task that Ray runs after a method that cannot be replaced by another function: ``flat`` has its results, then its arguments."""
    results, (args, kwargs) = flat[: plan.returns], _unflattened(names, flat[plan.returns :])
    session = session_of(plan.context.namespace).install(plan.context)
    plan, call = _named(session, naming, plan, args, kwargs)
    value = results[0] if plan.returns == 1 else results
    session.counted["runs"] += 1
    keep(session, naming, plan, call, value)
    return value


_keep_results = ray.remote(num_cpus=0)(keep_results)


def _unflattened(names: Sequence[str], flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = len(flat) - len(names)
    return tuple(flat[:count]), dict(zip(names, flat[count:], strict=True))
