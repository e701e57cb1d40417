"""All public calls are guarded: signals wait while they run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import pytest

import forebay
from forebay._kernel import interrupts

HITS = {
    "forebay.Cache": {"read", "get", "get_or_put", "path", "offline", "closed"},
    "forebay.Space": {"get", "get_or_put"},
    "forebay.Samples": {"get", "get_or_put", "closed", "__len__"},
    "forebay.Lazy": {"get", "done", "source"},
    "forebay.adapters.pfio.Cache": {"get", "__len__", "multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.ReadOnlyFileCache": {"get"},
}
"""Calls that hold nothing in a hit, and are guarded in a miss."""
LOOKS = {
    "forebay.Lease": {"closed", "reopened_by"},
    "forebay.LocalFiles": {"leases", "__getitem__", "__len__"},
    "forebay.Claim": {"closed"},
    "forebay.Prefetcher": {"closed"},
    "forebay.Tasks": {"cached", "from_cache", "if_cached", "set_provider", "set_condition"},
    "forebay.World": {"__init__", "detect_workers", "copy", "replicate", "to_json"},
    "forebay.adapters.pfio.FileCache": {"multiprocess_safe", "multithread_safe"},
    "forebay.adapters.pfio.NaiveCache": {"__init__", "__len__", "get", "put", "multiprocess_safe", "multithread_safe"},
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


def unguarded(cls: type) -> set[str]:
    """The calls of a class that are not guarded."""
    found = set()
    for name, member in vars(cls).items():
        if name.startswith("_") and name not in interrupts.SPECIAL:
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
