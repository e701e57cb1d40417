"""CHIA's cache and bypass, with CHIA's names and arguments: an actor on the node that starts it, and replays that a YAML file lists.

`install` makes CHIA itself use them: its ``@ChiaFunction`` imports its own modules, whatever a flow imports.

Values are stored in a Forebay root, in the tasks named ``chia``: ``forebay.Cache(directory).tasks("chia")``. A directory with CHIA's own
pickles is refused; `Tasks.import_chia` imports it. New code should use `forebay.adapters.ray.tasks`, which does more."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import forebay.cache
from forebay import errors
from forebay._logs import logger
from forebay.tasks.config import load

try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from forebay.adapters.ray import tasks as ray_tasks
    from forebay.adapters.ray.sessions import here
    from forebay.adapters.ray.tasks import size_in
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.chia", "ray") from error

__all__ = [
    "UNITS", "Bypass", "BypassFileServer", "Cache", "Handle", "get_active_bypass", "get_active_cache", "install", "is_cached",
    "start_cache", "stop_cache", "uninstall",
]  # fmt: skip

log = logger("forebay.chia")
_cache_log, _bypass_log = logger("chia.cache"), logger("chia.bypass")  # of CHIA's own lines
V = TypeVar("V")

NAME = "ChiaCacheStore"
"""The actor's name, which is CHIA's own: every process of the cluster finds the running cache by it, with or without `install`."""
SPACE = "chia"
UNITS = {name.upper(): number for name, number in ray_tasks.UNITS.items()}
"""Bytes per unit of `start_cache`, by the unit's name in capitals."""
_PICKLE = re.compile(r".*_[0-9a-f]{16}\.pkl")


class _Cache:
    """The actor: values by tag, within ``budget_bytes`` of their stored size; strictly the least recently used is evicted first.

    ``config``: returned by `get_config`. Calls of one caller are executed in order."""

    def __init__(self, cache_dir_path: str, budget_bytes: int, config: Mapping[str, Any] | None = None) -> None:
        _refuse_pickles(cache_dir_path)
        self._config = dict(config or {})
        cache = forebay.cache.Cache(cache_dir_path)
        self._root, self._tasks = str(cache.path), cache.tasks(SPACE, budget=int(budget_bytes))

    def write(self, tag: str, data: Any) -> bool:
        """Store a value. False if it exceeds the whole budget, or cannot be stored: the previous value then stays."""
        return self._tasks.write(tag, data)

    def read(self, tag: str) -> tuple[bool, Any]:
        """``(True, value)``, which is a use, or ``(False, None)``."""
        return self._tasks.read(tag)

    def has(self, tag: str) -> bool:
        """Whether there is a value under this tag."""
        return self._tasks.has(tag)

    def evict(self, tag: str) -> bool:
        """Remove a tag. False if there is no value."""
        return self._tasks.evict(tag)

    def flush(self) -> None:
        """Remove all values."""
        self._tasks.flush()

    def keys(self) -> list[str]:
        """All tags, from the least to the most recently used."""
        return self._tasks.keys()

    def size_bytes(self) -> int:
        """Bytes of the values, as stored."""
        return self._tasks.size_bytes()

    def root(self) -> str:
        """The path of the root in which the values are stored. CHIA's own actor has no such method."""
        return self._root

    def get_config(self) -> dict[str, Any]:
        """The section ``cache`` of the YAML file: True, or a list of patterns, by function."""
        return dict(self._config)


Cache: Any = ray.remote(num_cpus=0)(_Cache)
"""The class of the actor: ``Cache.options(...).remote(cache_dir_path, budget_bytes, config)``."""


class Handle:
    """The handle of the running cache: ``handle.read.remote(tag)`` returns an ObjectRef, as does ``handle.read.chia_remote(tag)``.

    ``actor``: Ray's own handle. Picklable, as that is."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("__") or name == "actor":
            raise AttributeError(name)
        return _Method(getattr(self.actor, name))

    def __reduce__(self) -> tuple[Any, ...]:
        return Handle, (self.actor,)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.actor == other.actor

    def __hash__(self) -> int:
        return hash(self.actor)


_handle: Callable[[Any], Any] = Handle
"""Wraps an actor for programs: in CHIA's own class, after `install`."""


class _Method:
    """A method of the actor, with both ways to call it."""

    def __init__(self, method: Any) -> None:
        self._method = method

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Call the method; returns an ObjectRef."""
        return self._method.remote(*args, **kwargs)

    chia_remote = remote

    def options(self, **ray_options: Any) -> _Method:
        """The same method with options of Ray."""
        return _Method(self._method.options(**ray_options))


def start_cache(
    size: float, cache_dir_path: str | os.PathLike[str], units: str = "B", yaml_path: str | os.PathLike[str] | None = None,
    namespace: str | None = None,
) -> Handle:  # fmt: skip
    """The running cache, else a new one on this node, with at most ``size`` ``units`` in ``cache_dir_path``.

    ``units``: B, KB to TB or KiB to TiB, always powers of 1024. ``yaml_path``: a file whose section ``cache`` lists what is cached.
    ``namespace``: Ray's namespace; default: this job's. Raises ValueError for other units and for errors in the file, `RootRefused`, and
    `ConfigError` if CHIA's own actor is running under the cache's name."""
    running = get_active_cache(namespace)
    if running is not None:
        if not hasattr(running.actor, "root"):
            message = f"CHIA's own cache runs in this cluster, as the actor {NAME!r}: end it with stop_cache() before another one starts"
            raise errors.ConfigError(message, name="namespace", value=str(namespace))
        return running
    budget = size_in(size, units)
    config = _load_cache_config(yaml_path) if yaml_path is not None else {}
    directory = Path(cache_dir_path).absolute()
    _refuse_pickles(directory)
    with forebay.cache.Cache(directory) as cache:  # raises its errors in this process
        options = {
            "name": NAME, "get_if_exists": True, "lifetime": "detached", "max_restarts": -1,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here(), soft=False),
            **({"namespace": namespace} if namespace else {}),
        }  # fmt: skip
        handle: Handle = _handle(Cache.options(**options).remote(str(cache.path), budget, config))
        ray.get(handle.size_bytes.remote())  # waits until it runs
    return handle


def stop_cache(namespace: str | None = None) -> None:
    """End the actor, if there is one. The values stay in its directory."""
    handle = get_active_cache(namespace)
    if handle is not None:
        ray.kill(handle.actor)


def get_active_cache(namespace: str | None = None) -> Handle | None:
    """The running cache, in any process of the cluster; None if there is none."""
    if not ray.is_initialized():
        return None
    try:
        handle: Handle = _handle(ray.get_actor(NAME, **({"namespace": namespace} if namespace else {})))
    except ValueError:
        return None
    return handle


def is_cached(func_name: str, tag: str | None = None) -> bool:
    """Whether the running cache stores the output of this call: its function is listed, and the tag matches a pattern, if any."""
    handle = get_active_cache()
    if handle is None:
        return False
    key = handle.actor._actor_id
    if key not in _configs:
        _configs.clear()
        _configs[key] = ray.get(handle.get_config.remote())  # constant during the life of an actor
    rule = _of(_configs[key], func_name)
    if isinstance(rule, list):
        return tag is not None and any(re.fullmatch(pattern, tag) for pattern in rule)
    return bool(rule)


_configs: dict[Any, dict[str, Any]] = {}


def _of(rules: Mapping[str, V], func_name: str) -> V | None:
    """The rule of a function: of its qualified name, which ``chialoops`` passes, else of its last part, which older CHIA passes."""
    return rules.get(func_name, rules.get(func_name.rpartition(".")[2]))


def _load_cache_config(yaml_path: str | os.PathLike[str]) -> dict[str, Any]:
    """The section ``cache`` of a YAML file, in the form that `is_cached` reads. Raises `ConfigError`."""
    config = load(yaml_path, shared=True).as_chia()
    for name, rule in config.items():
        _cache_log.info("Cache: %s tags=%s", name, rule if isinstance(rule, list) else None)
    return config


def _refuse_pickles(directory: str | os.PathLike[str]) -> None:
    """Raises `RootRefused` for a directory of CHIA's own cache: in a root, its files would be neither used nor counted."""
    path = Path(directory)
    if path.is_dir() and not (path / "FORMAT").exists() and any(_PICKLE.fullmatch(name) for name in os.listdir(path)):
        raise errors.RootRefused(
            f"{path} contains pickles of CHIA's cache: give another directory, and import them with "
            f"forebay.Cache(DIRECTORY).tasks({SPACE!r}).import_chia({str(path)!r}), which unpickles them",
            path=str(path),
        )


# -- bypass ------------------------------------------------------------------------------------------------------------


class _FileServer:
    """Serves files of its node to any process of the cluster."""

    def get_text(self, path: str) -> str:
        """The content, as UTF-8."""
        return Path(path).read_text(encoding="utf-8")

    def get_bytes(self, path: str) -> bytes:
        """The content."""
        return Path(path).read_bytes()

    def exists(self, path: str) -> bool:
        """Whether there is such a file."""
        return Path(path).is_file()


BypassFileServer: Any = ray.remote(num_cpus=0)(_FileServer)
"""The class of the actor behind `Bypass.file_server`."""


class Bypass:
    """The calls that are replayed, and from what. The last one created is the active one of its process.

    ``yaml_path``: a file with a section ``bypass``; without it, nothing is bypassed. Raises ValueError, with the line, for errors in it."""

    def __init__(self, yaml_path: str | os.PathLike[str] | None = None) -> None:
        # By the name of a function. Programs are known to assign to these attributes.
        rules = load(yaml_path, shared=True).bypass.values() if yaml_path is not None else ()
        self._bypass = {rule.name: rule.on for rule in rules}
        self._data_paths = {rule.name: rule.data for rule in rules if rule.on and rule.data is not None}
        self._tag_patterns = {rule.name: [p.pattern for p in rule.tags] for rule in rules if rule.on and rule.tags is not None}
        for name in (rule.name for rule in rules if rule.on):
            _bypass_log.info("Bypass: %s data=%s tags=%s", name, self._data_paths.get(name), self._tag_patterns.get(name))
        self._providers: dict[str, Callable[..., Any]] = {}
        self._conds: dict[str, Callable[..., Any]] = {}
        self._file_server: Any = None
        self._warned: set[str] = set()
        if self._data_paths and ray.is_initialized():
            self.file_server()
        _active[0] = self
        if "chia.base.ChiaFunction" in sys.modules:  # a worker that received this class with a function, without `install`
            with contextlib.suppress(ModuleNotFoundError):
                vars(importlib.import_module("chia.base.bypass"))["_active_bypass"] = self

    def set_provider(self, func_name: str, provider: Callable[..., Any]) -> None:
        """Run ``provider(tag, data_path, *args, **kwargs)`` instead of a function."""
        self._providers[func_name] = provider

    def set_cond(self, func_name: str, cond: Callable[..., Any]) -> None:
        """Replay a call only if ``cond(tag, data_path, *args, **kwargs)`` is true; it is called last."""
        self._conds[func_name] = cond

    @property
    def active(self) -> bool:
        """Whether any function is listed."""
        return bool(self._bypass)

    def is_bypassed(self, func_name: str, tag: str | None = None, *args: Any, **kwargs: Any) -> bool:
        """Whether this call is replayed: the function is listed, has a provider or data, the tag matches, and the condition holds."""
        if not _of(self._bypass, func_name):
            return False
        data = _of(self._data_paths, func_name)
        if data is None and _of(self._providers, func_name) is None:
            if func_name not in self._warned:
                self._warned.add(func_name)
                log.warning("%s is to be bypassed, but has neither a provider nor data: it runs", func_name)
            return False
        patterns, cond = _of(self._tag_patterns, func_name), _of(self._conds, func_name)
        if patterns is not None and (tag is None or not any(re.fullmatch(pattern, tag) for pattern in patterns)):
            return False
        return cond is None or bool(cond(tag, data, *args, **kwargs))

    def get_provider_info(self, func_name: str) -> tuple[Callable[..., Any], str | None]:
        """The provider of a function, and the path of its data. Raises KeyError if it has neither."""
        provider, data = _of(self._providers, func_name), _of(self._data_paths, func_name)
        _bypass_log.info("BYPASS %s (data=%s, provider=%s)", func_name, data, provider is not None)
        if provider is None and data is None:
            raise KeyError(f"{func_name!r} has neither a provider nor data: set_provider({func_name!r}, ...), or `data:` in the YAML file")
        return provider or _default_file_provider, data

    def file_server(self) -> Any:
        """The actor that serves files of the node on which this was created: ``get_text``, ``get_bytes``, ``exists``."""
        if self._file_server is None:
            pinned = NodeAffinitySchedulingStrategy(node_id=here(), soft=False)
            self._file_server = BypassFileServer.options(scheduling_strategy=pinned).remote()
            _bypass_log.info("Bypass: started file server pinned to node %s", here())
        return self._file_server

    def get_state(self) -> dict[str, Any]:
        """The state as a dict, which can be pickled if providers and conditions can. Unpickling it calls `install` if this process did."""
        state: dict[str, Any] = {name: dict(getattr(self, f"_{name}")) for name in _STATE}
        return {**state, "file_server": self._file_server, **({"forebay": _Installed()} if _undo else {})}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Add the result of another object's `get_state`."""
        for name in _STATE:
            getattr(self, f"_{name}").update(state.get(name, {}))
        self._file_server = state.get("file_server") or self._file_server


_STATE = ("bypass", "data_paths", "tag_patterns", "providers", "conds")
_active: list[Bypass | None] = [None]


def get_active_bypass() -> Bypass | None:
    """The last `Bypass` created in this process; None if there is none."""
    return _active[0]


def _default_file_provider(tag: str | None, data_path: str | None, *args: Any, **kwargs: Any) -> str:
    """The provider of a function that has only data: the text of that file, from the node on which the bypass was created."""
    active = get_active_bypass()
    if active is None or data_path is None:
        raise RuntimeError(f"no bypass is active in this process to read {data_path!r} from")
    return str(ray.get(active.file_server().get_text.remote(data_path)))


# -- replacing CHIA's own ----------------------------------------------------------------------------------------------

_OURS: dict[str, dict[str, Any]] = {
    "chia.base.cache": {
        "Cache": Cache, "UNITS": UNITS, "start_cache": start_cache, "stop_cache": stop_cache, "get_active_cache": get_active_cache,
        "is_cached": is_cached, "_load_cache_config": _load_cache_config,
    },
    "chia.base.bypass": {
        "Bypass": Bypass, "BypassFileServer": BypassFileServer, "get_active_bypass": get_active_bypass,
        "_default_file_provider": _default_file_provider,
    },
}  # fmt: skip
_undo: list[tuple[ModuleType, str, Any]] = []  # (module, name, original value)


def install() -> None:
    """Make CHIA use this module, in this process and in the workers that a bypass reaches. Idempotent.

    Call it at the start of the program, before a cache is started or a `Bypass` created. The order of imports does not matter: names that
    modules have already bound are replaced too. Workers in which nothing calls it find the running cache by its name. Raises `MissingExtra`
    if CHIA is not installed."""
    global _handle
    if _undo:
        return
    try:
        originals = {name: importlib.import_module(name) for name in _OURS}
        wrap = importlib.import_module("chia.base.ChiaFunction").chia_actor
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "chia":
            raise
        message = (
            f"adapters.chia.install() needs CHIA, and {error.name} is not installed: pip install chialoops, or add its source to "
            "PYTHONPATH (the packages called chia are other projects)"
        )
        raise errors.MissingExtra(message, extra="chia") from error
    replaced = {
        id(vars(originals[module])[name]): ours
        for module, names in _OURS.items()
        for name, ours in names.items()
        if name in vars(originals[module])
    }
    for module in [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]:
        for name, value in list(vars(module).items()):
            if id(value) in replaced and replaced[id(value)] is not value:
                _undo.append((module, name, value))
                setattr(module, name, replaced[id(value)])
    _handle = wrap


def uninstall() -> None:
    """Restore CHIA's own modules. Objects created in between stay as they are."""
    global _handle
    while _undo:
        module, name, value = _undo.pop()
        setattr(module, name, value)
    _handle = Handle


class _Installed:
    """A part of the state of a bypass: unpickling it calls `install`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return install, ()
