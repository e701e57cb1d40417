"""What the pickles of a cache and of its leases call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from forebay import _config

if TYPE_CHECKING:
    from forebay._engine.locks.leases import Lease
    from forebay.cache import Cache


def cache(path: str, init_kwargs: dict[str, Any]) -> Cache:
    """Open a cache with these arguments, and leave the limits of its root as they are."""
    from forebay.cache import Cache

    return _config.without_limits(Cache, path, **init_kwargs)


def lease(init_args: tuple[str, dict[str, Any]], method: str, name: Any, options: dict[str, Any]) -> Lease:
    """Repeat the call that gave a lease, on the same root. The lease outlives the cache that is opened here."""
    with cache(*init_args) as opened:
        reopened: Lease = getattr(opened, method)(name, **options)
        return reopened
