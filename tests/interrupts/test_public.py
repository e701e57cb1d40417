"""All public calls are guarded: signals wait while they run."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import forebay
from forebay._kernel import interrupts

HITS = {
    "forebay.Cache": {"read", "get", "get_or_put", "path", "offline", "closed", "__getitem__"},
    "forebay.Space": {"get", "get_or_put", "__getitem__"},
    "forebay.Samples": {"get", "get_or_put", "closed", "__len__"},
    "forebay.Lazy": {"get", "done", "source"},
    "forebay.adapters.pfio.Cache": {"get", "__len__", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.FileCache": {"get"},
    "forebay.adapters.pfio.MultiprocessFileCache": {"get"},
    "forebay.adapters.pfio.ReadOnlyFileCache": {"get"},
}
"""Calls that hold nothing in a hit, and are guarded in a miss."""
LOOKS = {
    "forebay.Cache": {"__bool__"},
    "forebay.Space": {"__bool__"},
    "forebay.Lease": {"closed", "reopened_by"},
    "forebay.LocalFiles": {"leases", "__getitem__", "__len__"},
    "forebay.Claim": {"closed"},
    "forebay.Prefetcher": {"closed"},
    "forebay.Tasks": {"from_cache", "if_cached", "set_provider", "set_condition"},
    "forebay.Lazy": {"__eq__"},
    "forebay.World": {"__init__", "__eq__", "__repr__", "detect_workers", "copy", "replicate", "to_json"},
    "forebay.adapters.pfio.FileCache": {"__len__", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.HTTPCache": {"__len__", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.MultiprocessFileCache": {"__len__", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.NaiveCache": {"__init__", "__len__", "get", "put", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.ReadOnlyFileCache": {"__len__", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.streaming.SharedArray": {"__init__", "numpy", "__len__", "__getitem__", "__setitem__"},
    "forebay.adapters.streaming.SharedScalar": {"__init__", "get", "set"},
    "forebay.adapters.streaming.SharedMemory": {"buf", "fix_register", "fix_unregister"},
    "forebay.adapters.streaming.SharedBarrier": {"num_enter", "num_exit", "flag"},
}
"""Calls that only look at the memory of the process, or set something in it."""


CALLERS = {
    "forebay.adapters.ray.RayTasks", "forebay.adapters.ray.from_ray", "forebay.adapters.ray.get_checkpoint", "forebay.adapters.ray.remote",
    "forebay.adapters.ray.report", "forebay.adapters.ray.to_ray", "forebay.adapters.streaming.install",
    "forebay.adapters.streaming.uninstall", "forebay.adapters.torch.CachedDataset", "forebay.adapters.torch.CheckpointReader",
    "forebay.adapters.torch.Lookahead", "forebay.adapters.torch.Shards", "forebay.adapters.torch.UrlDataset",
    "forebay.adapters.torch.tensor",
}  # fmt: skip
"""Functions and classes that hold nothing between the guarded calls that they make, or that wait in the code of a framework."""
QUIET = {"__await__", "__forebay_content__", "__fspath__", "__getattr__", "__hash__", "__str__"}
"""Special methods that only look, or return what is guarded itself."""
ITERATORS = {
    "forebay.Entries": {"__iter__", "by_name", "names", "facts", "sorted_by"},  # each page is read in a guarded call
    "forebay.Cache": {"__iter__"}, "forebay.Samples": {"__iter__"}, "forebay.Space": {"__iter__"},  # of a list, or of numbers
    "forebay.Prefetcher": {"stream"},  # `Steps`
}  # fmt: skip
"""Calls that return an iterator whose steps are not guarded: what holds something in a step is."""
VALUES = {
    "forebay.Codec", "forebay.Entry", "forebay.Event", "forebay.HistoryPoint", "forebay.Plan", "forebay.Problem", "forebay.Progress",
    "forebay.ReadOptions", "forebay.RemoteOptions", "forebay.Report", "forebay.Stats", "forebay.Victim", "forebay.WarmReport",
}  # fmt: skip
"""Values, which do nothing but for `Plan.execute`, which is guarded."""


def public() -> Iterator[tuple[str, Any]]:
    """The public functions and classes, each once, by the shortest name."""
    seen = set[int]()
    for name in ("forebay", *(info.name for info in pkgutil.walk_packages(forebay.__path__, "forebay.") if info.ispkg)):
        if any(part.startswith("_") for part in name.split(".")):
            continue
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", ()):
            thing = getattr(module, each)
            if id(thing) not in seen and isinstance(thing, (FunctionType, type)):
                seen.add(id(thing))
                yield f"{name}.{each}", thing


def members_of(cls: type) -> dict[str, Any]:
    """What a class of Forebay defines, itself or in a base."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("forebay")]
    return {name: member for base in reversed(bases) for name, member in vars(base).items()}


def unguarded(cls: type) -> set[str]:
    """The calls of a class that are not guarded."""
    found = set()
    for name, member in members_of(cls).items():
        if name.startswith("_") and (not name.startswith("__") or name in QUIET):
            continue
        call = getattr(member, "__func__", getattr(member, "fget", member))
        if isinstance(call, FunctionType) and not hasattr(getattr(call, "__wrapped__", call), "__wrapped__") and not is_guarded(call):
            found.add(name)
    return found


def is_guarded(call: Any) -> bool:
    return hasattr(call, "__forebay_guarded__")


@pytest.mark.frameworks
def test_all_public_calls_are_guarded() -> None:
    found = dict(public())
    assert {"forebay.Cache", "forebay.claim", "forebay.adapters.fsspec.ForebayFileSystem"} <= set(found)
    functions = {name for name, thing in found.items() if isinstance(thing, FunctionType)}
    assert {name for name in functions if not is_guarded(found[name])} == CALLERS & functions
    classes = {name: unguarded(thing) for name, thing in found.items() if isinstance(thing, type) and not issubclass(thing, Exception)}
    known = {name: HITS.get(name, set()) | LOOKS.get(name, set()) for name in {*HITS, *LOOKS}}
    assert {name: calls for name, calls in classes.items() if calls and name not in CALLERS | VALUES} == known


@pytest.mark.frameworks
def test_steps_of_all_public_iterators_are_guarded() -> None:
    known: dict[str, set[str]] = {}
    for name, thing in public():
        members = {} if name in CALLERS else members_of(thing) if isinstance(thing, type) else {"": thing}
        calls = {each: inspect.unwrap(getattr(member, "__func__", member)) for each, member in members.items() if public_name(each)}
        plain = {each for each, call in calls.items() if isinstance(call, FunctionType) and is_plain_iterator(call)}
        known |= {name: plain} if plain else {}
    assert known == ITERATORS


def public_name(name: str) -> bool:
    return name in interrupts.SPECIAL or not name.startswith("_")


def is_plain_iterator(call: FunctionType) -> bool:
    """Whether a function returns an iterator, and is no generator, whose steps `guarded` guards."""
    returned = str(call.__annotations__.get("return", ""))
    return returned.startswith(("Iterator", "Iterable", "Generator", "AsyncIterator")) and not call.__code__.co_flags & inspect.CO_GENERATOR
