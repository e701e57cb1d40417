"""The shared memory, barriers and prefixes of MosaicML Streaming, built on claims: same names, same calls.

`install` makes an installed Streaming use them. A killed job then blocks no directory and leaves nothing behind, a process that dies at a
barrier is an error for the others, and nothing polls. Jobs with an unmodified Streaming may run on the same node."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from forebay import errors
from forebay.adapters.streaming import barrier as streaming_barrier
from forebay.adapters.streaming import shared as streaming_shared
from forebay.adapters.streaming.barrier import SharedBarrier as SharedBarrier
from forebay.adapters.streaming.prefix import clean_stale_shared_memory as clean_stale_shared_memory
from forebay.adapters.streaming.prefix import get_shm_prefix as get_shm_prefix
from forebay.adapters.streaming.shared import SharedArray as SharedArray
from forebay.adapters.streaming.shared import SharedMemory as SharedMemory
from forebay.adapters.streaming.shared import SharedScalar as SharedScalar
from forebay.world import World as World

__all__ = [
    "SharedArray", "SharedBarrier", "SharedMemory", "SharedScalar", "World", "clean_stale_shared_memory", "get_shm_prefix", "install",
    "uninstall",
]  # fmt: skip

_OURS: dict[str, tuple[Any, ...]] = {
    "streaming.base.shared.memory": (SharedMemory,),
    "streaming.base.shared.array": (SharedArray,),
    "streaming.base.shared.scalar": (SharedScalar,),
    "streaming.base.shared.barrier": (SharedBarrier,),
    "streaming.base.shared.prefix": (get_shm_prefix,),
    "streaming.base.util": (clean_stale_shared_memory,),
    "streaming.base.world": (World,),
}
# Nothing else is in these modules, so they are replaced as a whole: a program that patches `SharedMemory` in the module of arrays
# means the one that our arrays use.
_WHOLE = {
    "streaming.base.shared.memory": streaming_shared,
    "streaming.base.shared.array": streaming_shared,
    "streaming.base.shared.scalar": streaming_shared,
    "streaming.base.shared.barrier": streaming_barrier,
}
_MISSING: Any = object()
_undo: list[tuple[ModuleType, str, Any]] = []  # modules, names and their former values


def install() -> None:
    """Make Streaming use this module, in this process and in those that receive one of its data sets from here. A second call does nothing.

    Call it at the start of the program in every rank, before or after importing Streaming, and before creating the first data set. Raises
    `MissingExtra` if Streaming is not installed."""
    if _undo:
        return
    try:
        importlib.import_module("streaming")
    except ModuleNotFoundError as error:
        if error.name != "streaming":
            raise
        raise errors.MissingExtra.of("adapters.streaming.install()", "streaming") from error
    replaced = {id(getattr(sys.modules[module], ours.__name__)): ours for module, all_ours in _OURS.items() for ours in all_ours}
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "streaming"]:
        for name, value in list(vars(module).items()):
            if id(value) in replaced:
                _replace(module, name, replaced[id(value)])
    for name, module in _WHOLE.items():
        _keep_names(sys.modules[name], module)
        above, _, last = name.rpartition(".")
        _replace(sys.modules[above], last, module)
        sys.modules[name] = module
    streaming_shared.on_unpickle = install


def uninstall() -> None:
    """Restore Streaming's own classes. Objects created in between stay as they are."""
    while _undo:
        module, name, value = _undo.pop()
        if value is _MISSING:
            delattr(module, name)
            continue
        setattr(module, name, value)
        if f"{module.__name__}.{name}" in _WHOLE:
            sys.modules[f"{module.__name__}.{name}"] = value
    streaming_shared.on_unpickle = None


def _keep_names(theirs: ModuleType, ours: ModuleType) -> None:
    """Keep the other names of Streaming's module (``TICK``, ``FileLock``...) available: programs import and patch them."""
    for name, value in vars(theirs).items():
        if not hasattr(ours, name):
            _undo.append((ours, name, _MISSING))
            setattr(ours, name, value)


def _replace(module: ModuleType, name: str, value: Any) -> None:
    _undo.append((module, name, getattr(module, name)))
    setattr(module, name, value)
