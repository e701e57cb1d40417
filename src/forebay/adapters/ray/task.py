"""A task: what ``remote`` gives for a function, or for a method of an actor."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorClass, ActorMethod
from ray.remote_function import RemoteFunction

from forebay import errors
from forebay._logs import logger
from forebay.adapters.ray import calls as ray_calls
from forebay.adapters.ray.sessions import Session, session_of
from forebay.tasks import hashing
from forebay.tasks.binding import Naming
from forebay.tasks.cached import Cached
from forebay.tasks.naming import identity_of

log = logger("forebay.ray")

_told: set[tuple[str, str]] = set()


class Task:
    """A function that Ray runs unless its output is there. Given by `remote`; pickles as Ray's own do.

    ``remote(*args, tag=None, **kwargs)`` gives an ObjectRef (a list, for several returns): of what is kept, else of a call with the
    options given. ``tag``: takes the place of what the rule gives; to a function that has a parameter of this name it is an argument:
    then use ``options(tag=...)``."""

    def __init__(
        self, function: Callable[..., Any], naming: Naming, mode: str | None, namespace: str | None, options: dict[str, Any]
    ) -> None:
        self._function, self._naming, self._mode, self._namespace = function, naming, mode, namespace
        self._tag: str | None = options.get("tag")
        self._options = {name: value for name, value in options.items() if name != "tag"}
        self._takes_tag = "tag" in inspect.signature(function).parameters
        self._sent: dict[str, Any] = {}  # what Ray was given: each of them is sent to every worker once, and kept for good
        functools.update_wrapper(self, function)

    def __reduce__(self) -> tuple[Any, ...] | str:
        if self._naming.function.__module__ not in ("__main__", "__mp_main__") and _named(self._function) is self:
            return str(self._function.__qualname__)
        return type(self), (self._function, self._naming, self._mode, self._namespace, {"tag": self._tag, **self._options})

    def __repr__(self) -> str:
        return f"<forebay Task {self._naming.identity}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, here and now: nothing is looked up or kept."""
        return self._function(*args, **kwargs)

    def options(self, **ray_options: Any) -> Task:
        """The same task with other options of Ray's; ``tag``: of the calls."""
        options = {"tag": self._tag, **self._options, **ray_options}
        made = type(self)(self._function, self._naming, self._mode, self._namespace, options)
        made._sent = self._sent
        return made

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """A reference to the output: kept, or to come."""
        tag = self._tag if self._takes_tag else kwargs.pop("tag", self._tag)
        returns = self._returns()
        if not isinstance(returns, int) or returns < 1 or self._yields():
            self._say("returns", f"{self._naming.identity} runs uncached: what it gives in parts, or not at all, is not kept")
            return self._plain(args, kwargs)
        told, found = ray_calls.plan(self._session(), self._naming, self._mode, tag, returns, args, kwargs, needs_tag=self._needs_tag())
        if found is not None:
            return ray_calls.put(found[0], returns)
        return self._send(told, args, kwargs)

    def tag_of(self, *args: Any, **kwargs: Any) -> str:
        """Under what the output of this call is kept: what `RayTasks.read` and the others take. ``tag``: as for `remote`.

        Waits for the references among the arguments."""
        tag = self._tag if self._takes_tag else kwargs.pop("tag", self._tag)
        args, kwargs = tuple(map(_resolved, args)), {name: _resolved(value) for name, value in kwargs.items()}
        call = self._naming.call(args, kwargs, tag) if tag is not None else None
        return call.tag.key if call is not None else self._naming.tag_of(args, kwargs).key

    def evict(self, *args: Any, **kwargs: Any) -> bool:
        """Remove the output of this call. False if there is none."""
        return bool(self._session().values().evict(self.tag_of(*args, **kwargs)))

    def _send(self, told: ray_calls.CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "task" not in self._sent:
            self._sent["task"] = ray.remote(ray_calls.trampoline(self._function, self._naming))
        name = f"replay of {self._naming.name}" if told.replay is not None else self._naming.name
        return self._sent["task"].options(**{"name": name, **self._options}).remote(told, *args, **kwargs)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "plain" not in self._sent:
            self._sent["plain"] = ray.remote(self._function)
        return self._sent["plain"].options(**self._options).remote(*args, **kwargs)

    def _returns(self) -> Any:
        given = self._options.get("num_returns")
        return 1 if given is None else given

    def _yields(self) -> bool:
        return inspect.isgeneratorfunction(self._function) or inspect.isasyncgenfunction(self._function)

    def _needs_tag(self) -> bool:
        return False

    def _session(self) -> Session:
        return session_of(self._namespace)

    def _say(self, what: str, message: str) -> None:
        if (self._naming.identity, what) not in _told:
            _told.add((self._naming.identity, what))
            log.warning("%s", message)


class ActorTask(Task):
    """A method of one actor. What the actor holds cannot be seen from outside: only calls with a tag are kept."""

    def __init__(self, function: Any, naming: Naming, mode: str | None, namespace: str | None, options: dict[str, Any]) -> None:
        self._method: ActorMethod = function
        super().__init__(naming.function, naming, mode, namespace, options)
        self._function = function

    def __reduce__(self) -> tuple[Any, ...]:
        handle, name = self._method._actor, self._method._method_name
        return _actor_task, (handle, name, self._naming, self._mode, self._namespace, {"tag": self._tag, **self._options})

    def _send(self, told: ray_calls.CallPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        config = self._session().config
        if told.call is not None and not told.call.tag.given and (config is None or config.caches(self._naming.name, told.call.tag)):
            self._say("tag", f"{self._naming.identity} runs uncached without a tag: what its actor holds counts, and cannot be seen")
        if told.is_plain:
            return self._method.options(**self._options).remote(*args, **kwargs)
        handle, name = self._method._actor, self._method._method_name
        names, flat = ray_calls.flattened(args, kwargs)
        if told.replay is None and getattr(handle, "_ray_allow_out_of_order_execution", True):
            # Perhaps a coroutine, which only Ray itself can run there.
            made = self._method.options(**self._options).remote(*args, **kwargs)
            results = made if isinstance(made, list) else [made]
            keeper = _keeper().options(num_cpus=0, num_returns=told.returns, name=f"keep {self._naming.name}")
            if told.call is not None:
                names, flat = (), ()
            return keeper.remote(self._naming, told, names, *results, *flat)
        options = {"name": self._naming.name, "num_returns": told.returns, **self._options}
        return handle.__ray_call__.options(**options).remote(ray_calls.in_actor, name, self._naming, told, names, *flat)

    def _plain(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._method.options(**self._options).remote(*args, **kwargs)

    def _returns(self) -> Any:
        given = self._options.get("num_returns")
        return self._method._num_returns if given is None else given

    def _yields(self) -> bool:
        return bool(self._method._is_generator)

    def _needs_tag(self) -> bool:
        return True


@functools.cache
def _keeper() -> Any:
    return ray.remote(ray_calls.keep_results)


def make_task(
    fn: Any, *, tag: Any, version: Any, ignore: Any, mode: str | None, namespace: str | None, options: dict[str, Any]
) -> Task:  # fmt: skip
    """See `forebay.adapters.ray.tasks.remote`. Raises `ConfigError`."""
    if isinstance(fn, ActorMethod):
        stub = _stub(fn)
        identity = identity_of(stub.__wrapped__) if hasattr(stub, "__wrapped__") else None
        return ActorTask(fn, Naming(stub, tag, version, ignore, identity), mode, namespace, options)
    there: Naming | None = None
    if isinstance(fn, RemoteFunction):
        options = {**{name: value for name, value in fn._default_options.items() if value is not None}, **options}
        fn = fn._function
    elif isinstance(fn, Task):
        options = {"tag": fn._tag, **fn._options, **options}
        mode, namespace, there, fn = mode or fn._mode, namespace or fn._namespace, fn._naming, fn._function
    elif isinstance(fn, Cached):
        there, fn = fn._naming, fn.__wrapped__
    if not callable(fn) or inspect.isclass(fn) or isinstance(fn, ActorClass):
        raise errors.ConfigError(f"{fn!r} is no function, nor a method of an actor's handle", name="fn", value=repr(fn))
    if inspect.iscoroutinefunction(fn):
        raise errors.ConfigError(f"{fn!r} is a coroutine, which Ray does not run as a task", name="fn", value=repr(fn))
    if there is None:
        return Task(fn, Naming(fn, tag, version, ignore), mode, namespace, options)
    rule, mark = there._rule if tag is None else tag, there.version if version is None else version
    return Task(fn, Naming(fn, rule, mark, ignore or there._ignore, there.identity), mode, namespace, options)


hashing.register(Task, lambda task: task._naming.content())


def _resolved(argument: Any) -> Any:
    """As the function gets it."""
    return ray.get(argument) if isinstance(argument, ray.ObjectRef) else argument


def _named(function: Any) -> Any:
    """What stands where a function says that it stands."""
    found: Any = sys.modules.get(function.__module__)
    for name in function.__qualname__.split("."):
        found = getattr(found, name, None)
    return found


def _stub(method: ActorMethod) -> Callable[..., Any]:
    """A function with the name and the parameters of a method that lies elsewhere. It wraps the method itself where this process has the
    class: then its code counts."""

    def stub(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    handle, name = method._actor, method._method_name
    where = handle._ray_function_descriptor[name]
    stub.__name__, stub.__qualname__, stub.__module__ = name, f"{where.class_name}.{name}", where.module_name
    stub.__signature__ = inspect.Signature(handle._ray_method_signatures[name])  # type: ignore[attr-defined]
    found: Any = sys.modules.get(where.module_name)
    for part in where.class_name.split("."):
        found = getattr(found, part, None)
    method_of = getattr(getattr(getattr(found, "__ray_metadata__", None), "modified_class", found), name, None)
    if isinstance(method_of, types.FunctionType):
        stub.__wrapped__ = method_of  # type: ignore[attr-defined]
    return stub


def _actor_task(handle: Any, name: str, naming: Naming, mode: str | None, namespace: str | None, options: dict[str, Any]) -> ActorTask:
    return ActorTask(getattr(handle, name), naming, mode, namespace, options)
