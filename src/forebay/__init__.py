"""Forebay, the local cache of a training node: one directory, one byte budget, any number of processes, each object fetched once.

A module imports only from those to its left:

    errors _model | _kernel/ _engine/ (private) _config remote/ | origin | spaces samples _tasks/ sources
    | prefetch tasks _directories/ _claims/ world claims | cache | checkpoint | adapters/ cli/

Importing this package loads the standard library only; the engine comes with the first `Cache`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay import errors as errors

if TYPE_CHECKING:
    from forebay.cache import Cache as Cache
    from forebay.checkpoint import Checkpoint as Checkpoint
    from forebay.claims import Claim as Claim
    from forebay.claims import claim as claim
    from forebay.claims import list_claims as list_claims
    from forebay.claims import prune_claims as prune_claims
    from forebay.errors import ForebayError as ForebayError
    from forebay.prefetch import Prefetcher as Prefetcher
    from forebay.remote import RemoteOptions as RemoteOptions
    from forebay.samples import Samples as Samples
    from forebay.tasks import Tasks as Tasks
    from forebay.world import World as World

__version__ = "0.1.0"
__all__ = [
    "Cache", "Checkpoint", "Claim", "ForebayError", "Prefetcher", "RemoteOptions", "Samples", "Tasks", "World", "__version__", "claim",
    "errors", "list_claims", "prune_claims",
]  # fmt: skip

_PLACES = {
    "Cache": "forebay.cache",
    "Checkpoint": "forebay.checkpoint",
    "Claim": "forebay.claims",
    "ForebayError": "forebay.errors",
    "Prefetcher": "forebay.prefetch",
    "RemoteOptions": "forebay.remote",
    "Samples": "forebay.cache",  # which `Samples.import_pfio` needs, to open the default one
    "Tasks": "forebay.tasks",
    "World": "forebay.world",
    "claim": "forebay.claims",
    "list_claims": "forebay.claims",
    "prune_claims": "forebay.claims",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'forebay' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PLACES[name]), name)
