"""From what a user says of a root to its store."""

from __future__ import annotations

import logging
from pathlib import Path

from forebay import _config, errors
from forebay._engine.faults import FULL
from forebay._engine.passthrough import PassThrough
from forebay._engine.store import Settings, Store
from forebay._kernel import host

log = logging.getLogger("forebay.cache")


def is_network(path: Path) -> bool:
    return not host.is_local(host.fs_kind(path))


def open_store(
    place: Path, budget: int | str | None, min_free: int | str | None, max_entries: int | None, shared: bool, read_only: bool
) -> Store | PassThrough:  # fmt: skip
    """The store, or `PassThrough` where the root cannot be used for now; a place that is wrong is an error."""
    total = None
    if isinstance(budget, str) or isinstance(min_free, str):
        there = next(p for p in (place, *place.absolute().parents) if p.exists())
        total = host.disk(there).total
    settings = Settings(
        _config.parse_size(budget, total=total, name="budget") if budget is not None else None,
        _config.parse_size(min_free, total=total, name="min_free") if min_free is not None else None,
        max_entries,
    )
    try:
        return Store.open(place, settings, shared=shared, read_only=read_only)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
        wanted, found = "a directory that can be made and written to", error.strerror or type(error).__name__
        message = f"{place}: {wanted} was wanted, but found was '{found}': choose another place"
        raise errors.RootRefused(message, path=str(place), wanted=wanted, found=found) from error
    except (errors.CacheFault, OSError) as error:
        if isinstance(error, errors.RootError) or not (isinstance(error, errors.CacheFault) or error.errno in FULL):
            raise
        log.warning("the cache in %s cannot be used, reading past it: %s", place, str(error))  # the error itself would keep its frames
        return PassThrough(str(error))
