"""One call of a task: on the caller's side, where it is named and looked up, and on the worker's, where it runs and its output is kept."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from forebay import errors
from forebay._logs import logger
from forebay.adapters.ray.sessions import Context, Session, running
from forebay.adapters.ray.values import NullValues, Unreachable
from forebay.tasks import hashing
from forebay.tasks.binding import BoundCall, Naming
from forebay.tasks.bypass import Replay

log = logger("forebay.ray")

READ_THROUGH, REPLAY = "read-through", "replay"

_calling = threading.local()  # ``met``: whether a reference came by while a call was named on the caller's side


def _content(reference: ray.ObjectRef) -> Any:
    """What counts of a reference: what is behind it. The caller of a task does not wait for that."""
    if getattr(_calling, "met", None) is None:
        return ray.get(reference)
    _calling.met = True
    return reference.hex()


hashing.register(ray.ObjectRef, _content)


@contextmanager
def _as_caller() -> Iterator[None]:
    before = getattr(_calling, "met", None)  # a rule for tags may call a task
    _calling.met = False
    try:
        yield
    finally:
        _calling.met = before


@dataclass(frozen=True, slots=True)
class CallPlan:
    """What is to be done for one call, as its worker is told. ``call``: None where the worker has to name it, ``tag`` being what was
    given. ``looked``: the caller has seen that it is not there."""

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
        """Whether nothing is to be kept."""
        return self.replay is None and not self.kept


def plan(
    session: Session, naming: Naming, mode: str | None, tag: str | None, returns: int, args: tuple[Any, ...], kwargs: Mapping[str, Any],
    *, needs_tag: bool = False,
) -> tuple[CallPlan, tuple[Any] | None]:  # fmt: skip
    """What is to be done for this call, and its value in a tuple where it is there already. ``needs_tag``: its arguments are not all
    that its output depends on."""
    if tag is not None and not isinstance(tag, str):
        raise errors.ConfigError(f"{naming.identity}: the tag {tag!r} is no str", name="tag", value=repr(tag))
    with _as_caller():
        call = naming.call(args, kwargs, tag)
        met = bool(_calling.met)
    values, place, config = session.values(), session.place(), session.config
    chosen = mode or (place.mode if place is not None else READ_THROUGH)
    sure = not met or tag is not None or (call is not None and not call.tag.given)
    kept = call is not None and _is_listed(config, naming.name, call.tag, sure=sure)
    if call is not None and not call.tag.given and (chosen == REPLAY or needs_tag):
        kept = False
    shown = call.tag if call is not None and (call.tag.given or chosen == READ_THROUGH) else None
    replay = session.bypass.choose(naming.name, shown, args, kwargs)
    if replay is not None:
        kept = kept and not replay.is_from_cache
        replay = dataclasses.replace(replay, provider=None)  # the worker has it by the context
    pin = kept and call is not None and config is not None and bool(config.pins(naming.name, call.tag))
    looks = kept and replay is None and chosen == READ_THROUGH and not met and not isinstance(values, NullValues)
    found = values.look(call.tag.key, call.digest, who=naming.identity) if looks and call is not None else None
    if found is not None and not _fits(found[0], returns):
        found = None
    named = None if met else call
    return CallPlan(session.context(), tag, named, replay, kept, pin, chosen, returns, looks), found


def _is_listed(config: Any, name: str, tag: str, *, sure: bool) -> bool:
    """Whether a call is to be kept; where its tag is not known yet, whether it may be."""
    if config is None or sure:
        return config is None or bool(config.caches(name, tag))
    rule = config.cache.get(name)
    return rule is not None and bool(rule.on)


def _fits(value: Any, returns: int) -> bool:
    """Whether a value is that of so many returns."""
    return returns == 1 or (not isinstance(value, (str, bytes, Mapping)) and getattr(value, "__len__", lambda: -1)() == returns)


def put(value: Any, returns: int) -> Any:
    """References to a value that is there, as the call would have given them."""
    return ray.put(value) if returns == 1 else [ray.put(part) for part in value]


def work(function: Callable[..., Any], naming: Naming, told: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """On the worker: run or replay the call, and keep what it gives."""
    session = told.context.install()
    with running(session):
        return _worked(session, function, naming, told, args, kwargs)


def _worked(
    session: Session, function: Callable[..., Any], naming: Naming, told: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:  # fmt: skip
    def run() -> Any:
        session.counted["runs"] += 1
        return function(*args, **kwargs)

    def run_to_keep() -> Any:
        value = run()
        if told.returns != 1 and isinstance(value, Iterator):
            value = tuple(value)
        if not _fits(value, told.returns):
            raise ValueError(f"{naming.identity} was to give {told.returns} values (num_returns), and gave {type(value).__name__}")
        return value

    if told.is_plain:
        return run()
    told, call = _named(session, naming, told, args, kwargs)
    if told.replay is not None:
        return _replayed(session, naming, told, call, run, args, kwargs)
    if call is None or not told.kept:
        return run()
    if told.mode == REPLAY:
        value = run_to_keep()
        keep(session, naming, told, call, value)
        return value
    naming.tell_if_changed(session.values().has_any)
    value = session.values().single(call.tag.key, call.digest, run_to_keep, pin=told.pin, who=naming.identity, looked=told.looked)
    return value if _fits(value, told.returns) else run()  # kept by a call that was asked for another number


def _named(
    session: Session, naming: Naming, told: CallPlan, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[CallPlan, BoundCall | None]:  # fmt: skip
    """The plan with what its caller could not know, as it has only references; and the call."""
    if told.call is not None:
        return told, told.call
    call, config = naming.call(args, kwargs, told.tag), session.config
    if call is None:
        return told, None
    if config is not None and told.kept:
        kept = bool(config.caches(naming.name, call.tag))
        told = dataclasses.replace(told, kept=kept, pin=kept and bool(config.pins(naming.name, call.tag)))
    if told.replay is not None and told.replay.tag is not None:
        told = dataclasses.replace(told, replay=dataclasses.replace(told.replay, tag=call.tag))
    return told, call


def keep(session: Session, naming: Naming, told: CallPlan, call: BoundCall | None, value: Any) -> None:
    """What a call gave, where it is to be kept."""
    if call is not None and told.kept and _fits(value, told.returns):
        session.values().keep(call.tag.key, value, digest=call.digest, pin=told.pin, who=naming.identity)


def _replayed(
    session: Session, naming: Naming, told: CallPlan, call: BoundCall | None, run: Callable[[], Any], args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:  # fmt: skip
    assert told.replay is not None
    provider = session.bypass.providers.get(told.replay.name)
    if provider is not None:
        value = provider(told.replay.tag, told.replay.data_path, *args, **kwargs)
    else:
        try:
            value = session.head.ask("text", told.replay.data_path)
        except Unreachable:
            return run()  # that was told
    session.counted["replays"] += 1
    keep(session, naming, told, call, value)
    return value


# -- how calls are sent ------------------------------------------------------------------------------------------------


def trampoline(function: Callable[..., Any], naming: Naming) -> Callable[..., Any]:
    """What Ray runs in place of a function, under its name. Made once a task: Ray sends it to each worker once."""

    def run(told: CallPlan, /, *args: Any, **kwargs: Any) -> Any:
        return work(function, naming, told, args, kwargs)

    run.__name__ = run.__qualname__ = naming.name
    return run


def in_actor(actor: Any, method: str, naming: Naming, told: CallPlan, names: Sequence[str], *flat: Any) -> Any:
    """What Ray runs in an actor in place of one of its methods. ``names``: of the last ones of ``flat``."""
    args, kwargs = _unflattened(names, flat)
    return work(getattr(actor, method), naming, told, args, kwargs)


def keep_results(naming: Naming, told: CallPlan, names: Sequence[str], *flat: Any) -> Any:
    """What Ray runs behind a method that cannot be run in another's place: the first of ``flat`` are its results, the arguments
    follow."""
    results, (args, kwargs) = flat[: told.returns], _unflattened(names, flat[told.returns :])
    session = told.context.install()
    told, call = _named(session, naming, told, args, kwargs)
    value = results[0] if told.returns == 1 else results
    session.counted["runs"] += 1
    keep(session, naming, told, call, value)
    return value


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Arguments one behind the other, where Ray resolves references in them, and the names of the last ones."""
    return tuple(kwargs), (*args, *kwargs.values())


def _unflattened(names: Sequence[str], flat: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    count = len(flat) - len(names)
    return tuple(flat[:count]), dict(zip(names, flat[count:], strict=True))


def mode_of(mode: str | None) -> str | None:
    """A mode that there is. Raises `ConfigError`."""
    if mode not in (None, READ_THROUGH, REPLAY):
        raise errors.ConfigError(f"mode={mode!r} is none: choose {READ_THROUGH!r} or {REPLAY!r}", name="mode", value=mode)
    return mode
