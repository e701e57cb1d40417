"""What the pickles of a cache and of its leases call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from forebay import _config

if TYPE_CHECKING:
    from forebay._engine.locks.lease import Lease

C = TypeVar("C")


def cache(cls: Callable[..., C], path: str, init_kwargs: dict[str, Any]) -> C:
    """Open a cache with these arguments, and leave the limits of its root as they are."""
    return _config.without_limits(cls, path, **init_kwargs)


def lease(
    cls: Callable[..., AbstractContextManager[Any]], init_args: tuple[str, dict[str, Any]], method: str, name: Any, options: dict[str, Any]
) -> Lease:  # fmt: skip
    """Repeat the call that gave a lease, on the same root. The lease outlives the cache that is opened here."""
    with cache(cls, *init_args) as opened:
        reopened: Lease = getattr(opened, method)(name, **options)
        return reopened
