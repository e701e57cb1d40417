"""Functions whose outputs are stored."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, overload

from forebay import errors
from forebay._kernel import waits
from forebay._kernel.interrupts import guarded, guarded_methods, of_program, steps_of_program
from forebay.tasks.config import Bypass
from forebay.tasks.naming import Naming, TagRule
from forebay.tasks.values import CacheInfo, Values

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class TasksLike(Protocol):
    """The part of `forebay.tasks.Tasks` that is needed here."""

    _values: Values
    _bypass: Bypass


@guarded
def decorate(
    tasks: TasksLike, function: Any = None, tag: TagRule = None, version: object = None, ignore: str | tuple[str, ...] = (),
    copy: bool = False,
) -> Any:  # fmt: skip
    """See `Tasks.cached`. Without a function: a decorator."""
    again = functools.partial(decorate, tasks, tag=tag, version=version, ignore=ignore, copy=copy)
    if function is None:
        return again
    if isinstance(function, classmethod):
        return _OfClass(again(function.__func__))
    if isinstance(function, staticmethod):
        return staticmethod(again(function.__func__))
    if isinstance(function, types.MethodType):
        return Bound(again(function.__func__), function.__self__)
    if not callable(function):
        message = f"{function!r} cannot be cached: it is not a function. Options are given by name: @tasks.cached(tag=...)"
        raise errors.ConfigError(message, name="function", value=repr(function))
    naming = Naming(function, tag, version, ignore)
    if _is(function, inspect.isgeneratorfunction) or _is(function, inspect.isasyncgenfunction):
        message = f"{naming.identity} cannot be cached: it yields its output piece by piece. Let it return a list"
        raise errors.ConfigError(message, name="function", value=naming.identity)
    return _made(tasks, naming, copy)


class Decorator(Protocol):
    """What `Tasks.cached` returns if it is called without a function."""

    @overload
    def __call__(self, fn: Callable[P, R], /) -> Cached[P, R]: ...

    @overload
    def __call__(self, fn: classmethod[Any, Any, Any] | staticmethod[Any, Any], /) -> Any: ...


@guarded_methods("__call__", "tag_of", "call_uncached")
class Cached(Generic[P, R_co]):
    """A function whose output is stored: a call returns what the same arguments gave before, and runs the function if there is nothing.

    At most one process of the node runs a given call at a time; the others wait for its output, or for what it raises. Callable from any
    thread, and usable in both processes after a fork. Picklable if its function is. As an attribute of a class it is a method."""

    __name__: str
    __qualname__: str

    def __init__(self, tasks: TasksLike, naming: Naming, copy: bool) -> None:
        functools.update_wrapper(self, naming.function, updated=())
        if isinstance(naming.function, types.FunctionType):
            self.__dict__.update((name, value) for name, value in vars(naming.function).items() if not hasattr(Cached, name))
        self.__name__ = naming.name
        self.__qualname__ = naming.identity if not hasattr(naming.function, "__qualname__") else naming.function.__qualname__
        self.__wrapped__: Callable[..., Any] = naming.function
        self._tasks, self._naming, self._values, self._config, self._copy = tasks, naming, tasks._values, tasks._bypass.config, copy
        self._hits = self._misses = 0
        rule = self._config.cache.get(naming.name) if self._config is not None else None
        self._runs_only = self._config is not None and not (rule is not None and rule.on) and not tasks._bypass.concerns(naming.name)

    def __reduce__(self) -> tuple[Any, ...]:
        _make_reachable(self)
        return _made, (self._tasks, self._naming, self._copy)

    def __forebay_content__(self) -> Any:
        return self._naming.content()

    def __repr__(self) -> str:
        return f"<forebay cached function {self._naming.identity}>"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A built-in function is no method of its class either. A partial is none here on any Python; one of 3.13 and later has `__get__`.
        if isinstance(self.__wrapped__, functools.partial) or not hasattr(self.__wrapped__, "__get__"):
            return self
        return Bound(self, instance) if instance is not None else self.__dict__.setdefault("_plain", _dressed(self, self._as_function()))

    def _as_function(self) -> Callable[..., Any]:
        """What the class shows: a function, by which others (Ray's actors) recognize a method."""

        def method(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return method

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        value: R_co
        if self._config is not None:
            value = self._call_configured(args, kwargs)
            return value
        parts = self._naming.parts(args, kwargs)
        if parts is None:
            return self.call_uncached(*args, **kwargs)
        key, digest, _ = parts
        hit = self._values.hit(key, digest, copy=self._copy)
        if hit is None:
            return self._call_missed(key, digest, args, kwargs)  # type: ignore[no-any-return]
        self._hits += 1
        value = hit[0]
        return value

    @guarded
    def _call_configured(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return waits.run(self._call(args, kwargs))

    @guarded
    def _call_missed(self, key: str, digest: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hit = self._look(key, digest)
        if hit is not None:
            return hit[0]
        run, label = functools.partial(self.call_uncached, *args, **kwargs), self._naming.identity
        return self._values.single(key, digest, run, label=label, looked=True, copy=self._copy)

    async def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call. That of a function that is no coroutine function awaits no event loop: `waits.run` runs it."""
        run, label = functools.partial(self._run, args, kwargs), self._naming.identity
        if self._runs_only:
            return await run()
        call, name, config = self._naming.call(args, kwargs), self._naming.name, self._config
        tag = call.tag if call is not None else None
        replay = self._tasks._bypass.choose(name, tag, args, kwargs)
        pin = config is not None and config.pins(name, tag)
        if call is not None and config is not None and not config.caches(name, tag):
            call = None  # its output is not stored
        if replay is not None:
            value = await self._result(of_program(replay)(*args, **kwargs))
            self._values.counted["replays"] += 1
            if call is not None and not replay.is_from_cache:
                stored = self._values.kept(call.tag.key, value, digest=call.digest, pin=pin, label=label, copy=self._copy)
                value = value if stored is None else stored[0]
            return value
        if call is None:
            return await run()
        hit = self._look(call.tag.key, call.digest)
        if hit is not None:
            return hit[0]
        return await self._values.single_async(
            call.tag.key, call.digest, run, pin=pin, label=label, looked=True, copy=self._copy, wait=self._wait
        )

    _wait = staticmethod(waits.wait_here)

    async def _result(self, returned: Any) -> Any:
        """The output, of what the function or its replay returned."""
        return returned

    async def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._result(self.call_uncached(*args, **kwargs))

    def call_uncached(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Run the function, whatever is stored, and store nothing."""
        self._values.counted["runs"] += 1
        return of_program(self.__wrapped__)(*args, **kwargs)  # type: ignore[no-any-return]

    def tag_of(self, /, *args: P.args, **kwargs: P.kwargs) -> str:
        """The key under which the output of this call is stored, for `Tasks.read`. Raises `ConfigError` if there is none."""
        return self._naming.tag_of(args, kwargs).key

    def evict(self, /, *args: P.args, **kwargs: P.kwargs) -> bool:
        """Remove the output of this call. Returns False if there is none."""
        return self._values.evict(self.tag_of(*args, **kwargs))

    def cache_info(self) -> CacheInfo:
        """Counts of this function, under the names of `functools.lru_cache`. Counting the stored outputs lists all keys of the `Tasks`."""
        return CacheInfo(self._hits, self._misses, None, len(self._keys()))

    def cache_clear(self) -> None:
        """Remove all outputs of this function's present code, or version, for every process, pinned ones too; set the counts to zero."""
        for key in self._keys():
            self._values.evict(key)
        self._hits = self._misses = 0

    def _keys(self) -> list[str]:
        prefix = self._naming.key_prefix()
        return [] if prefix is None else list(filter(lambda key: key.startswith(prefix), self._values.keys()))

    def _look(self, key: str, digest: str) -> tuple[Any] | None:
        hit = self._values.look(key, digest, label=self._naming.identity, copy=self._copy)
        if hit is None:
            self._misses += 1
            self._naming.report_if_changed(self._values.has_any)
        else:
            self._hits += 1
        return hit


class AsyncCached(Cached[P, R_co]):
    """A cached coroutine function. The event loop goes on while another process or thread computes the value."""

    # What `inspect` asks of a function, to see that this is one, and of which kind.
    __code__ = property(lambda self: self.__wrapped__.__code__)
    __defaults__ = property(lambda self: self.__wrapped__.__defaults__)
    __kwdefaults__ = property(lambda self: self.__wrapped__.__kwdefaults__)

    def __init__(self, tasks: TasksLike, naming: Naming, copy: bool) -> None:
        super().__init__(tasks, naming, copy)
        mark = getattr(inspect, "markcoroutinefunction", None)
        if mark is not None:
            mark(self)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R_co:
        return self._call_guarded(args, kwargs)  # type: ignore[return-value]  # R_co is a coroutine

    @guarded
    async def _call_guarded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._call(args, kwargs)

    def _as_function(self) -> Callable[..., Any]:
        async def method(*args: Any, **kwargs: Any) -> Any:
            return await self._call_guarded(args, kwargs)

        return method

    _wait = staticmethod(waits.wait_for_async)

    async def _result(self, returned: Any) -> Any:
        return await steps_of_program(returned) if inspect.isawaitable(returned) else returned


class Bound:
    """A cached method of one object."""

    def __init__(self, cached: Cached[..., Any], instance: Any) -> None:
        self.__func__, self.__self__, self.__doc__ = cached, instance, cached.__doc__
        self.__wrapped__ = types.MethodType(cached.__wrapped__, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self.__func__(self.__self__, *args, **kwargs)

    def call_uncached(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run the method, whatever is stored, and store nothing."""
        return self.__func__.call_uncached(self.__self__, *args, **kwargs)

    def tag_of(self, /, *args: Any, **kwargs: Any) -> str:
        """The key under which the output of this call is stored."""
        return self.__func__.tag_of(self.__self__, *args, **kwargs)

    def evict(self, /, *args: Any, **kwargs: Any) -> bool:
        """Remove the output of this call. Returns False if there is none."""
        return self.__func__.evict(self.__self__, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in ("__func__", "__self__"):  # before it has any
            raise AttributeError(name)
        return getattr(self.__func__, name)

    def __forebay_content__(self) -> Any:
        return self.__func__, self.__self__

    def __reduce__(self) -> tuple[Any, ...]:
        return Bound, (self.__func__, self.__self__)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Bound) and self.__func__ is other.__func__ and self.__self__ is other.__self__

    def __hash__(self) -> int:
        return hash((id(self.__func__), id(self.__self__)))

    def __repr__(self) -> str:
        return f"<forebay cached method {self.__func__._naming.identity} of {self.__self__!r}>"


class _OfClass:
    """A cached class method."""

    def __init__(self, cached: Cached[..., Any]) -> None:
        self.__func__ = cached

    def __get__(self, instance: Any, owner: type | None = None) -> Bound:
        return Bound(self.__func__, owner if owner is not None else type(instance))


def _dressed(cached: Cached[..., Any], method: Any) -> Any:
    """Give a function the name and the calls of a cached one."""
    functools.update_wrapper(method, cached, updated=())
    method.tag_of, method.evict, method.call_uncached = cached.tag_of, cached.evict, cached.call_uncached
    method.cache_info, method.cache_clear = cached.cache_info, cached.cache_clear
    return method


def _made(tasks: TasksLike, naming: Naming, copy: bool = False) -> Cached[..., Any]:
    kind = AsyncCached if _is(naming.function, inspect.iscoroutinefunction) else Cached
    return kind(tasks, naming, copy)


def _is(function: Any, question: Callable[[Any], bool]) -> bool:
    """Ask `inspect` about a function, or about what runs when an object is called."""
    while isinstance(function, functools.partial):
        function = function.func
    return question(function) or (not inspect.isroutine(function) and not inspect.isclass(function) and question(type(function).__call__))


def _make_reachable(cached: Cached[..., Any]) -> None:
    """Let pickle find the function: its own name leads to the wrapper now, if this was a decorator."""
    function, name = cached.__wrapped__, cached.__qualname__
    target: Any = sys.modules.get(getattr(function, "__module__", None) or "")
    for part in name.split("."):
        target = getattr(target, part, None)
    while target is not None and target is not function:
        step = "__func__" if isinstance(target, (Bound, types.MethodType)) else "__wrapped__"
        name, target = f"{name}.{step}", getattr(target, step, None)
    if target is function and isinstance(function, types.FunctionType):
        function.__qualname__ = name  # tracebacks go by that of its code
