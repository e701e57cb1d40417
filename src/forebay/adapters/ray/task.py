"""A task, which ``remote`` returns for a function or a method of an actor; and one call of it: named and looked up in the calling process,
run and kept in the worker."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.actor import ActorClass, ActorMethod
from ray.remote_function import RemoteFunction

from forebay import errors
from forebay._logs import logger
from forebay.adapters.ray.sessions import Context, Session, running, session_of
from forebay.adapters.ray.values import Unreachable
from forebay.tasks import hashing
from forebay.tasks.cached import Cached
from forebay.tasks.code import identity_of
from forebay.tasks.config import Replay
from forebay.tasks.naming import BoundCall, Naming

log = logger("forebay.ray")

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
        self._takes_tag = "tag" in inspect.signature(function).parameters
        self._sent: dict[str, Any] = {}  # remote functions: Ray sends each of them to every worker once, and keeps it
        functools.update_wrapper(self, function)

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
        returns = self._returns()
        if not isinstance(returns, int) or returns < 1 or self._yields():
            self._warn_once("returns", f"{self._naming.identity} runs uncached: output in parts, or without a return, is not stored")
            return self._plain(args, kwargs)
        plan, value = make_plan(self._session(), self._naming, self._mode, tag, returns, args, kwargs, needs_tag=self._needs_tag())
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
        return bool(self._session().values().evict(self.tag_of(*args, **kwargs)))

    def _send(self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "task" not in self._sent:
            self._sent["task"] = ray.remote(trampoline(self._function, self._naming))
        name = f"replay of {self._naming.name}" if plan.replay is not None else self._naming.name
        return self._sent["task"].options(**{"name": name, **self._options}).remote(plan, *args, **kwargs)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "plain" not in self._sent:
            self._sent["plain"] = ray.remote(self._function)
        return self._sent["plain"].options(**self._options).remote(*args, **kwargs)

    def _returns(self) -> Any:
        number = self._options.get("num_returns")
        return 1 if number is None else number

    def _yields(self) -> bool:
        return inspect.isgeneratorfunction(self._function) or inspect.isasyncgenfunction(self._function)

    def _needs_tag(self) -> bool:
        return False

    def _session(self) -> Session:
        return session_of(self._namespace)

    def _warn_once(self, kind: str, message: str) -> None:
        if (self._naming.identity, kind) not in _warned:
            _warned.add((self._naming.identity, kind))
            log.warning("%s", message)


class ActorTask(Task):
    """A method of one actor. The state of the actor is not visible from outside, so only calls with a tag are kept."""

    def __init__(self, function: Any, naming: Naming, mode: str | None, namespace: str | None, options: dict[str, Any]) -> None:
        self._method: ActorMethod = function
        super().__init__(naming.function, naming, mode, namespace, options)
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        handle, name = self._method._actor, self._method._method_name
        return _actor_task, (handle, name, self._naming, self._mode, self._namespace, {"tag": self._tag, **self._options})

    def _send(self, plan: CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = self._session().config
        if plan.call is not None and not plan.call.tag.given and (config is None or config.caches(self._naming.name, plan.call.tag)):
            self._warn_once("tag", f"{self._naming.identity} runs uncached without a tag: it depends on the hidden state of its actor")
        if plan.is_plain:
            return self._method.options(**self._options).remote(*args, **kwargs)
        handle, name = self._method._actor, self._method._method_name
        names, flat = tuple(kwargs), (*args, *kwargs.values())  # Ray resolves references only in positional arguments
        if plan.replay is None and getattr(handle, "_ray_allow_out_of_order_execution", True):
            # The method may be a coroutine, which only Ray itself can run there.
            references = self._method.options(**self._options).remote(*args, **kwargs)
            results = references if isinstance(references, list) else [references]
            keeping = _keeping_task().options(num_cpus=0, num_returns=plan.returns, name=f"keep {self._naming.name}")
            if plan.call is not None:
                names, flat = (), ()
            return keeping.remote(self._naming, plan, names, *results, *flat)
        options = {"name": self._naming.name, "num_returns": plan.returns, **self._options}
        return handle.__ray_call__.options(**options).remote(in_actor, name, self._naming, plan, names, *flat)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._method.options(**self._options).remote(*args, **kwargs)

    def _returns(self) -> Any:
        number = self._options.get("num_returns")
        return self._method._num_returns if number is None else number

    def _yields(self) -> bool:
        return bool(self._method._is_generator)

    def _needs_tag(self) -> bool:
        return True


@functools.cache
def _keeping_task() -> Any:
    return ray.remote(keep_results)


def make_task(
    fn: Any, *, tag: Any, version: Any, ignore: Any, mode: str | None, namespace: str | None, options: dict[str, Any]
) -> Task:  # fmt: skip
    """See `forebay.adapters.ray.tasks.remote`. Raises `ConfigError`."""
    if isinstance(fn, ActorMethod):
        stub = _stub(fn)
        identity = identity_of(stub.__wrapped__) if hasattr(stub, "__wrapped__") else None
        return ActorTask(fn, Naming(stub, tag, version, ignore, identity), mode, namespace, options)
    naming: Naming | None = None
    if isinstance(fn, RemoteFunction):
        options = {**{name: value for name, value in fn._default_options.items() if value is not None}, **options}
        fn = fn._function
    elif isinstance(fn, Task):
        options = {"tag": fn._tag, **fn._options, **options}
        mode, namespace, naming, fn = mode or fn._mode, namespace or fn._namespace, fn._naming, fn._function
    elif isinstance(fn, Cached):
        naming, fn = fn._naming, fn.__wrapped__
    if not callable(fn) or inspect.isclass(fn) or isinstance(fn, ActorClass):
        raise errors.ConfigError(f"{fn!r} is neither a function nor a method of an actor's handle", name="fn", value=repr(fn))
    if inspect.iscoroutinefunction(fn):
        raise errors.ConfigError(f"{fn!r} is a coroutine, which Ray does not run as a task", name="fn", value=repr(fn))
    if naming is None:
        return Task(fn, Naming(fn, tag, version, ignore), mode, namespace, options)
    rule, mark = naming._rule if tag is None else tag, naming.version if version is None else version
    return Task(fn, Naming(fn, rule, mark, ignore or naming._ignore, naming.identity), mode, namespace, options)


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

READ_THROUGH, REPLAY = "read-through", "replay"

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
    kept = call is not None and _is_listed(config, naming.name, call.tag, tag_is_known=tag_is_known)
    if call is not None and not call.tag.given and (chosen == REPLAY or needs_tag):
        kept = False
    shown = call.tag if call is not None and (call.tag.given or chosen == READ_THROUGH) else None
    replay = session.bypass.choose(naming.name, shown, args, kwargs)
    if replay is not None:
        kept = kept and not replay.is_from_cache
        replay = dataclasses.replace(replay, provider=None)  # the worker has it from the context
    pin = kept and call is not None and config is not None and bool(config.pins(naming.name, call.tag))
    looks = kept and replay is None and chosen == READ_THROUGH and not met and location is not None
    value = session.values().look(call.tag.key, call.digest, label=naming.identity) if looks and call is not None else None
    if value is not None and not _fits(value[0], returns):
        value = None
    return CallPlan(session.context(), tag, None if met else call, replay, kept, pin, chosen, returns, looks), value


def _is_listed(config: Any, name: str, tag: str, *, tag_is_known: bool) -> bool:
    """Whether the output of a call is to be kept; if its tag is not known yet, whether it may be."""
    if config is None or tag_is_known:
        return config is None or bool(config.caches(name, tag))
    rule = config.cache.get(name)
    return rule is not None and bool(rule.on)


def _fits(value: Any, returns: int) -> bool:
    """Whether a value consists of that many returns."""
    return returns == 1 or (not isinstance(value, (str, bytes, Mapping)) and getattr(value, "__len__", lambda: -1)() == returns)


def work(function: Callable[..., Any], naming: Naming, plan: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """On the worker: run or replay the call, and keep its output."""
    session = session_of(plan.context.namespace).install(plan.context)

    def run() -> Any:
        session.counted["runs"] += 1
        return function(*args, **kwargs)

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
        kept = bool(config.caches(naming.name, call.tag))
        plan = dataclasses.replace(plan, kept=kept, pin=kept and bool(config.pins(naming.name, call.tag)))
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
        value = provider(plan.replay.tag, plan.replay.data_path, *args, **kwargs)
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


def keep_results(naming: Naming, plan: CallPlan, names: Sequence[str], *flat: Any) -> Any:
    """The task that Ray runs after a method that cannot be replaced by another function: ``flat`` has its results, then its arguments."""
    results, (args, kwargs) = flat[: plan.returns], _unflattened(names, flat[plan.returns :])
    session = session_of(plan.context.namespace).install(plan.context)
    plan, call = _named(session, naming, plan, args, kwargs)
    value = results[0] if plan.returns == 1 else results
    session.counted["runs"] += 1
    keep(session, naming, plan, call, value)
    return value


def _unflattened(names: Sequence[str], flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = len(flat) - len(names)
    return tuple(flat[:count]), dict(zip(names, flat[count:], strict=True))


def mode_of(mode: str | None) -> str | None:
    """Raises `ConfigError` for an unknown mode."""
    if mode not in (None, READ_THROUGH, REPLAY):
        raise errors.ConfigError(f"mode={mode!r} is unknown: choose {READ_THROUGH!r} or {REPLAY!r}", name="mode", value=mode)
    return mode
