"""Replay in place of a run: which call, by what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from forebay import errors
from forebay._logs import logger

if TYPE_CHECKING:
    from forebay.tasks.config import Config, Rule

log = logger("forebay.tasks")

Provider = Callable[..., Any]
"""Called as ``provider(tag, data_path, *args, **kwargs)``; what it gives takes the place of the function's output."""
Condition = Callable[..., bool]
"""Called as ``cond(tag, data_path, *args, **kwargs)``; false: the call runs."""


class TaskStore(Protocol):
    """What the ready-made providers need."""

    def read(self, tag: str) -> tuple[bool, Any]: ...

    def has(self, tag: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Replay:
    """What stands in for one call: called with its arguments, it gives what takes the place of the output.

    ``provider``: None where there is only a file, whose text it gives then, read as UTF-8."""

    name: str
    tag: str | None
    provider: Provider | None
    data_path: str | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.provider is not None:
            return self.provider(self.tag, self.data_path, *args, **kwargs)
        return Path(str(self.data_path)).read_text(encoding="utf-8")

    @property
    def is_from_cache(self) -> bool:
        """Whether it gives what the cache has: there is no need to keep that again."""
        return getattr(self.provider, "__func__", self.provider) in _READERS


class Bypass:
    """Providers and conditions by the name of a function, and what a configuration says of it.

    Callable from any thread; pickles as far as providers and conditions do."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config
        self.providers: dict[str, Provider] = {}
        self.conditions: dict[str, Condition] = {}
        self._told: set[str] = set()

    def set_provider(self, name: str, provider: Provider) -> None:
        """What takes the place of the function ``name`` where the configuration replays it."""
        self.providers[name] = _callable(provider, f"the provider of {name!r}")

    def set_condition(self, name: str, cond: Condition) -> None:
        """Asked last, with the arguments of the call, whether it is replayed."""
        self.conditions[name] = _callable(cond, f"the condition of {name!r}")

    def concerns(self, name: str) -> bool:
        """Whether any call of this function may be replayed."""
        return self._rule(name) is not None

    def _rule(self, name: str) -> Rule | None:
        rule = self.config.bypass.get(name) if self.config is not None else None
        return rule if rule is not None and rule.on else None

    def choose(self, name: str, tag: str | None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Replay | None:
        """The replay of this call; None: it is to run. Asked in this order: is the function listed, is there a provider or a file (if
        not, one warning says so), does the tag match, does the condition hold.

        ``tag``: None, or one that was not given: such a call matches no list of tags. Raises what the condition raises."""
        rule = self._rule(name)
        if rule is None:
            return None
        provider = self.providers.get(name)
        if provider is None and rule.data is None:
            if name not in self._told:
                self._told.add(name)
                log.warning("%s is to be bypassed, but has neither a provider nor data: it runs", name)
            return None
        if not rule.fits(tag):
            return None
        cond = self.conditions.get(name)
        if cond is not None and not cond(tag, rule.data, *args, **(kwargs or {})):
            return None
        return Replay(name, tag, provider, rule.data)


def from_cache(store: TaskStore, tag: str | None, data_path: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """A provider, once ``store`` is given: what the cache has under the tag, whatever the arguments. Raises `NotCached`."""
    hit, value = store.read(tag) if tag is not None else (False, None)
    if not hit:
        key = getattr(tag, "key", tag)
        raise errors.NotCached(f"there is nothing to replay under the tag {tag!r}: {key!r} is not in the cache", key=key)
    return value


def if_cached(store: TaskStore, tag: str | None, data_path: str | None = None, *args: Any, **kwargs: Any) -> bool:
    """A condition, once ``store`` is given: whether the cache has something under the tag."""
    return tag is not None and store.has(tag)


_READERS: set[Any] = {from_cache}


def reads_cache(method: Callable[..., Any]) -> Callable[..., Any]:
    """Marks a provider whose values come from the cache itself."""
    _READERS.add(method)
    return method


def _callable(given: Any, what: str) -> Any:
    if not callable(given):
        raise errors.ConfigError(f"{what} is no function: {given!r}", name="provider", value=repr(given))
    return given
