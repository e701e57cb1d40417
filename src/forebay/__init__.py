"""Forebay, the local cache of a training node: one directory, one byte budget, any number of processes, each object fetched once.

Importing this package loads the standard library only; the engine comes with the first `Cache`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from forebay import errors as errors

if TYPE_CHECKING:
    from forebay._engine.leases import Lease as Lease
    from forebay._kernel.events import Event as Event
    from forebay._model import Codec as Codec
    from forebay._model import Entry as Entry
    from forebay._model import Problem as Problem
    from forebay._model import Report as Report
    from forebay._model import Victim as Victim
    from forebay.cache import Cache as Cache
    from forebay.cache.aio import AsyncLocal as AsyncLocal
    from forebay.cache.entries import Entries as Entries
    from forebay.cache.many import LocalFiles as LocalFiles
    from forebay.cache.space import Space as Space
    from forebay.checkpoint import Checkpoint as Checkpoint
    from forebay.claims import Claim as Claim
    from forebay.claims import claim as claim
    from forebay.claims import list_claims as list_claims
    from forebay.claims import prune_claims as prune_claims
    from forebay.errors import ForebayError as ForebayError
    from forebay.fetch.request import ReadOptions as ReadOptions
    from forebay.prefetch import Prefetcher as Prefetcher
    from forebay.prefetch.lazies import Lazy as Lazy
    from forebay.remote import RemoteOptions as RemoteOptions
    from forebay.reports import HistoryPoint as HistoryPoint
    from forebay.reports import Plan as Plan
    from forebay.reports import Progress as Progress
    from forebay.reports import Stats as Stats
    from forebay.reports import WarmReport as WarmReport
    from forebay.samples import Samples as Samples
    from forebay.tasks import Tasks as Tasks
    from forebay.world import World as World

__version__ = "0.1.0"
__all__ = [
    "AsyncLocal", "Cache", "Checkpoint", "Claim", "Codec", "Entries", "Entry", "Event", "ForebayError", "HistoryPoint", "Lazy", "Lease",
    "LocalFiles", "Plan", "Prefetcher", "Problem", "Progress", "ReadOptions", "RemoteOptions", "Report", "Samples", "Space", "Stats",
    "Tasks", "Victim", "WarmReport", "World", "__version__", "claim", "errors", "list_claims", "prune_claims",
]  # fmt: skip

_MODULES = {
    "forebay._engine.leases": ("Lease",),
    "forebay._kernel.events": ("Event",),
    "forebay._model": ("Codec", "Entry", "Problem", "Report", "Victim"),
    "forebay.cache": ("Cache",),
    "forebay.cache.aio": ("AsyncLocal",),
    "forebay.cache.entries": ("Entries",),
    "forebay.cache.many": ("LocalFiles",),
    "forebay.cache.space": ("Space",),
    "forebay.checkpoint": ("Checkpoint",),
    "forebay.claims": ("Claim", "claim", "list_claims", "prune_claims"),
    "forebay.errors": ("ForebayError",),
    "forebay.fetch.request": ("ReadOptions",),
    "forebay.prefetch": ("Prefetcher",),
    "forebay.prefetch.lazies": ("Lazy",),
    "forebay.remote": ("RemoteOptions",),
    "forebay.reports": ("HistoryPoint", "Plan", "Progress", "Stats", "WarmReport"),
    "forebay.samples": ("Samples",),
    "forebay.tasks": ("Tasks",),
    "forebay.world": ("World",),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    __import__(_PLACES[name])  # `importlib` would take as long as three modules of this package
    return getattr(sys.modules[_PLACES[name]], name)
