"""Forebay under Ray: cached outputs of tasks, and Ray Train's checkpoints. Each half is imported at its first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.adapters.ray.checkpoint import DamagedMetadata as DamagedMetadata
    from forebay.adapters.ray.checkpoint import RayCheckpoint as RayCheckpoint
    from forebay.adapters.ray.checkpoint import from_ray as from_ray
    from forebay.adapters.ray.checkpoint import get_checkpoint as get_checkpoint
    from forebay.adapters.ray.checkpoint import report as report
    from forebay.adapters.ray.checkpoint import to_ray as to_ray
    from forebay.adapters.ray.tasks import RayTasks as RayTasks
    from forebay.adapters.ray.tasks import active as active
    from forebay.adapters.ray.tasks import remote as remote
    from forebay.adapters.ray.tasks import start as start
    from forebay.adapters.ray.tasks import stop as stop

_CHECKPOINT = ("DamagedMetadata", "RayCheckpoint", "from_ray", "get_checkpoint", "report", "to_ray")
_TASKS = ("RayTasks", "active", "remote", "start", "stop")
__all__ = [*_CHECKPOINT, *_TASKS]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    half = "checkpoint" if name in _CHECKPOINT else "tasks" if name in _TASKS else None
    if half is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"forebay.adapters.ray.{half}"), name)
