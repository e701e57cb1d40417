"""Which functions are cached and which are replayed: the configuration, read from a YAML file, and what it makes of a call."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from forebay import errors
from forebay._logs import logger

log = logger("forebay.tasks")
T = TypeVar("T")

_MERGE = "tag:yaml.org,2002:merge"
SECTIONS = {"cache": ("cache", "tags", "pin"), "bypass": ("bypass", "tags", "data")}
"""The keys below the name of a function in each section; the first of them says whether it is on."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings of one function. ``tags``: patterns, one of which a tag must match as a whole; None: any call, with a tag or without.
    ``data``: path of the file that a replay is given, as written: relative to the working directory. ``pin``: never evicted."""

    name: str
    on: bool
    tags: tuple[re.Pattern[str], ...] | None = None
    data: str | None = None
    pin: bool = False

    def fits(self, tag: str | None) -> bool:
        """Whether the rule applies to a call with this tag."""
        if self.tags is None:
            return True
        return tag is not None and getattr(tag, "given", True) and any(pattern.fullmatch(tag) for pattern in self.tags)


@dataclass(frozen=True)
class Config:
    """The content of a configuration; functions by their ``__name__``. ``source``: the file. Equal if the content is equal; pickles."""

    cache: Mapping[str, Rule] = field(default_factory=dict)
    bypass: Mapping[str, Rule] = field(default_factory=dict)
    source: str = field(default="", compare=False)

    def caches(self, name: str, tag: str | None = None) -> bool:
        """Whether the output of this call of the function ``name`` is kept."""
        rule = self.cache.get(name)
        return rule is not None and rule.on and rule.fits(tag)

    def pins(self, name: str, tag: str | None = None) -> bool:
        """Whether it is pinned: never evicted."""
        return self.caches(name, tag) and self.cache[name].pin

    def as_chia(self) -> dict[str, bool | list[str]]:
        """The section ``cache`` as CHIA's ``get_config`` gives it: True, or the patterns of the tags, by function."""
        on = (rule for rule in self.cache.values() if rule.on)
        return {rule.name: True if rule.tags is None else [p.pattern for p in rule.tags] for rule in on}


def load(source: str | os.PathLike[str] | Mapping[str, Any] | Config, *, shared: bool = False) -> Config:
    """The configuration in a YAML file, or in a mapping that is built as such a file.

    ``shared``: the file may have sections of other programs, which are not even checked; one whose name looks like a mistake is logged.
    Raises a `ConfigError` that names the line, what it contains and what is allowed; if the file cannot be read, one that is an OSError
    too, and a FileNotFoundError if it does not exist; `MissingExtra` without PyYAML."""
    if isinstance(source, Config):
        return source
    if isinstance(source, Mapping):
        return _checked(_of_mapping(source, "config"))
    path = os.fspath(source)
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        kind = NoConfig if isinstance(error, FileNotFoundError) else UnreadableConfig
        facts = {"errno": error.errno, "filename": path}
        raise kind(f"the configuration {path!r} cannot be read: {error.strerror}", name="config", value=path, **facts) from error
    return _checked(_parsed(data, path, shared=shared))


class UnreadableConfig(errors.ConfigError, OSError):
    """The configuration file cannot be read."""


class NoConfig(UnreadableConfig, FileNotFoundError):
    """The configuration file does not exist."""


# -- replays -----------------------------------------------------------------------------------------------------------

Provider = Callable[..., Any]
"""Called as ``provider(tag, data_path, *args, **kwargs)``; its result replaces the function's output."""
Condition = Callable[..., bool]
"""Called as ``cond(tag, data_path, *args, **kwargs)``; false: the call runs."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The replacement of one call: called with the arguments of the call, it returns what replaces the output.

    ``provider``: None where there is only a file, whose text it returns then, read as UTF-8."""

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
        """Whether it returns what the cache has: there is no need to store that again."""
        return getattr(self.provider, "reads_cache", False)


class Bypass:
    """Providers and conditions by the name of a function, and the configuration of replays.

    Callable from any thread; pickles if the providers and conditions do."""

    def __init__(self, config: Config | None = None) -> None:
        self.config = config
        self.providers: dict[str, Provider] = {}
        self.conditions: dict[str, Condition] = {}
        self._reported: set[str] = set()

    def set_provider(self, name: str, provider: Provider) -> None:
        """Set what replaces the function ``name`` where the configuration replays it."""
        self.providers[name] = _callable(provider, f"the provider of {name!r}")

    def set_condition(self, name: str, cond: Condition) -> None:
        """Set the condition that is asked last, with the arguments of the call, whether the call is replayed."""
        self.conditions[name] = _callable(cond, f"the condition of {name!r}")

    def concerns(self, name: str) -> bool:
        """Whether any call of this function may be replayed."""
        rule = self.config.bypass.get(name) if self.config is not None else None
        return rule is not None and rule.on

    def choose(self, name: str, tag: str | None, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> Replay | None:
        """The replay of this call; None: it is to run. Asked in this order: is the function listed, is there a provider or a file (if
        not, one warning says so), does the tag match, does the condition hold.

        ``tag``: None, or one that was not given: such a call matches no list of tags. Raises what the condition raises."""
        if self.config is None or not self.concerns(name):
            return None
        rule, provider = self.config.bypass[name], self.providers.get(name)
        if provider is None and rule.data is None:
            if name not in self._reported:
                self._reported.add(name)
                log.warning("%s is to be bypassed, but has neither a provider nor data: it runs", name)
            return None
        if not rule.fits(tag):
            return None
        cond = self.conditions.get(name)
        if cond is not None and not cond(tag, rule.data, *args, **(kwargs or {})):
            return None
        return Replay(name, tag, provider, rule.data)


def reads_cache(provider: Callable[..., T]) -> Callable[..., T]:
    """Mark a provider whose values come from the cache itself."""
    provider.reads_cache = True  # type: ignore[attr-defined]
    return provider


def _callable(given: Any, what: str) -> Any:
    if not callable(given):
        raise errors.ConfigError(f"{what} is not a function: {given!r}", name="provider", value=repr(given))
    return given


# -- text to values with their lines -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _At:
    """A value and its line in a file; None: it came from a mapping. ``value``: of a mapping by key, with the line of the key."""

    value: Any
    path: str
    line: int | None = None

    def fault(self, message: str) -> errors.ConfigError:
        where = f"{self.path}, line {self.line}" if self.line is not None else self.path
        return errors.ConfigError(f"{where}: {message}", name="config", value=self.path, line=self.line)

    def __str__(self) -> str:
        kinds = {dict: "a mapping", list: "a list", type(None): "nothing", str: "the text", bool: "the truth value", int: "the number"}
        kind = kinds.get(type(self.value), f"the {type(self.value).__name__}")
        return kind if isinstance(self.value, (dict, list, type(None))) else f"{kind} {self.value!r}"


def _parsed(data: bytes, path: str, *, shared: bool) -> _At:
    try:
        import yaml
    except ModuleNotFoundError as error:
        raise errors.MissingExtra.of("a configuration in YAML", "tasks") from error
    try:
        loader = yaml.SafeLoader(data)
        node = loader.get_single_node()
        if shared and isinstance(node, yaml.MappingNode):
            merges = any(key.tag == _MERGE for key, _ in node.value)
            loader.flatten_mapping(node)  # what `<<` brings comes first
            sections = [(key, value) for key, value in node.value if _is_ours(key, path)]
            node.value = list({key.value: (key, value) for key, value in sections}.values()) if merges else sections
        return _YamlReader(loader, path).read(node) if node is not None else _At({}, path, 1)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        why = ", ".join(filter(None, (error.context, error.problem)))
        raise _At(None, path, mark.line + 1 if mark else None).fault(f"this is no YAML: {why}") from error
    except RecursionError as error:
        raise _At(None, path).fault("it is nested too deep") from error
    except errors.ConfigError:
        raise
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise _At(None, path).fault(f"this is no YAML: {error}") from error


def _is_ours(key: Any, path: str) -> bool:
    """Whether a section is one of ours."""
    if key.id != "scalar" or key.value not in SECTIONS:
        if isinstance(key.value, str) and _near(key.value, SECTIONS):
            log.warning(
                "%s, line %d: the section %r is ignored: %s",
                path,
                key.start_mark.line + 1,
                key.value,
                _unknown("section", key.value, SECTIONS),
            )
        return False
    return True


class _YamlReader:
    """Turns PyYAML's nodes into values. Reads each node once, however many aliases it has."""

    def __init__(self, loader: Any, path: str) -> None:
        self._loader, self._path = loader, path
        self._known: dict[int, _At | None] = {}  # None: it is being read

    def read(self, node: Any) -> _At:
        line = node.start_mark.line + 1
        if id(node) in self._known:
            known = self._known[id(node)]
            if known is None:
                raise _At(None, self._path, line).fault("an alias of what it stands in")
            return known
        self._known[id(node)] = None
        if node.id == "sequence":
            value: Any = [self.read(item) for item in node.value]
        else:
            value = self._loader.construct_object(node) if node.id == "scalar" else self._mapping(node)
        entry = self._known[id(node)] = _At(value, self._path, line)
        return entry

    def _mapping(self, node: Any) -> dict[str, _At]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if key.id == "scalar" and key.tag != _MERGE:
                line = key.start_mark.line + 1
                if key.value in lines:
                    message = f"{key.value!r} stands here a second time; the first is in line {lines[key.value]}"
                    raise _At(None, self._path, line).fault(message)
                lines[key.value] = line
        self._loader.flatten_mapping(node)  # what `<<` brings comes first
        entry = {}
        for key, item in node.value:
            name = self.read(key)
            if not isinstance(name.value, str):
                raise name.fault(f"{name.value!r} ({type(name.value).__name__}) is no name: put it in quotes if it is one")
            entry[name.value] = _At(self.read(item), self._path, name.line)
        return entry


def _of_mapping(value: Any, path: str) -> _At:
    if isinstance(value, Mapping):
        value = {key: _At(_of_mapping(item, path), path) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        value = [_of_mapping(item, path) for item in value]
    return _At(value, path)


# -- values to rules ---------------------------------------------------------------------------------------------------


def _checked(root: _At) -> Config:
    rules: dict[str, dict[str, Rule]] = {"cache": {}, "bypass": {}}
    if not isinstance(root.value, dict | None):
        raise root.fault(f"{root} stands where the sections {_any_of(SECTIONS)} are expected")
    for section, entry in (root.value or {}).items():
        if section not in SECTIONS:
            raise entry.fault(_unknown("section", section, SECTIONS))
        body = entry.value
        if not isinstance(body.value, dict | None):
            raise body.fault(f"{section}: {body} stands where functions are expected: `name: true`")
        for name, spec in (body.value or {}).items():
            if not isinstance(name, str):
                raise spec.fault(f"{section}: {name!r} is no name of a function")
            rules[section][name] = _rule(section, name, spec.value)
    return Config(rules["cache"], rules["bypass"], root.path)


def _rule(section: str, name: str, spec: _At) -> Rule:
    subject = f"{section}: {name}"
    if isinstance(spec.value, bool):
        return Rule(name, spec.value)
    if not isinstance(spec.value, dict):
        raise spec.fault(f"{subject}: {spec} stands where true, false or the keys {_any_of(SECTIONS[section])} are expected")
    for key, entry in spec.value.items():
        if key not in SECTIONS[section]:
            raise entry.fault(f"{subject}: {_unknown('key', key, SECTIONS[section])}")
    options = {key: entry.value for key, entry in spec.value.items()}
    for key in (section, "pin"):
        if key in options and not isinstance(options[key].value, bool):
            raise options[key].fault(f"{subject}: {key} is {options[key]}, where true or false is expected")
    on, pin = (key in options and options[key].value for key in (section, "pin"))
    nothing = _At(None, spec.path)
    tags, data = options.get("tags", nothing), options.get("data", nothing)
    if data.value is not None and not (isinstance(data.value, str) and data.value):
        raise data.fault(f"{subject}: data is {data}, where the path of a file is expected")
    return Rule(name, on, None if tags.value is None else _patterns(subject, tags), data.value, pin)


def _patterns(subject: str, entry: _At) -> tuple[re.Pattern[str], ...]:
    patterns = []
    for one in entry.value if isinstance(entry.value, list) else [entry]:
        if not isinstance(one.value, str):
            raise one.fault(f"{subject}: tags: {one} stands where a regular expression is expected, or a list of them")
        try:
            patterns.append(re.compile(one.value))
        except (re.error, RecursionError, OverflowError) as error:
            raise one.fault(f"{subject}: tags: {one.value!r} is no regular expression: {error}") from error
    return tuple(patterns)


def _near(entry: str, known: Any) -> list[str]:
    import difflib  # takes longer to load than the rest of this, and is needed only here

    return difflib.get_close_matches(entry, list(known), 1)


def _unknown(what: str, entry: object, known: Any) -> str:
    near = _near(str(entry), known)
    return f"there is no {what} {str(entry)!r}{f': is {near[0]!r} meant?' if near else '.'} It may be {_any_of(known)}"


def _any_of(known: Any) -> str:
    names = [repr(name) for name in known]
    return f"{', '.join(names[:-1])} or {names[-1]}"
