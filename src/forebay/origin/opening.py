"""From what a user says of a root to its store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forebay import _config, errors
from forebay._engine.files.faults import FULL
from forebay._engine.passthrough import PassThrough
from forebay._engine.store import Settings, Store
from forebay._kernel import host, waits
from forebay._kernel.below import LinkInTheWay
from forebay._logs import logger

log = logger("forebay.cache")


def is_network(path: Path) -> bool:
    return not host.is_local(host.fs_kind(path))


def open_store(
    place: Path, budget: int | str | None, min_free: int | str | None, max_entries: int | None, shared: bool, read_only: bool
) -> Store | PassThrough:  # fmt: skip
    """The store, or `PassThrough` where the root cannot be used for now; a place that is wrong is an error."""
    try:
        return _open(place, budget, min_free, max_entries, shared, read_only)
    except (errors.CacheFault, OSError) as error:
        if isinstance(error, errors.RootError) or not (isinstance(error, errors.CacheFault) or error.errno in FULL):
            raise
        log.warning("the cache in %s cannot be used, reading past it: %s", place, str(error))  # the error itself would keep its frames
        return PassThrough(str(error))


def _open(
    place: Path, budget: int | str | None, min_free: int | str | None, max_entries: int | None, shared: bool, read_only: bool
) -> Store:
    total = None
    if isinstance(budget, str) or isinstance(min_free, str):
        there = next(p for p in (place, *place.absolute().parents) if p.exists())
        total = host.disk(there).total
    settings = Settings(
        _config.parse_budget(budget, total=total) if budget is not None else None,
        _config.parse_size(min_free, total=total, name="min_free") if min_free is not None else None,
        max_entries,
    )
    try:
        return Store.open(place, settings, shared=shared, read_only=read_only)
    except (FileNotFoundError, NotADirectoryError, PermissionError, LinkInTheWay) as error:
        wanted, found = "a directory that can be made and written to", error.strerror or type(error).__name__
        message = f"{place}: expected {wanted}, found '{found}': choose another directory"
        raise errors.RootRefused(message, path=str(place), wanted=wanted, found=found) from error


class Reopening:
    """A root that could not be used when it was opened, because the disk was full or its catalog busy: opened again by a later call.

    A try takes a fraction of a second. Callable from any thread and after a fork."""

    def __init__(self, *how: Any) -> None:
        """``how``: what `open_store` was given."""
        self._how = how
        self.others_may_write = bool(how[4] or how[5])  # shared, or read-only: whether they can is not known before it is open
        self._turn = waits.Turn()

    def attempt(self) -> Store | None:
        """The store, once it can be opened: given once."""
        if not self._turn.take():
            return None
        found = None
        try:
            with waits.patience(0):
                found = _open(*self._how)
        except (errors.ForebayError, OSError) as error:  # whatever became of the place: the cache was working without it until now
            log.info("the cache in %s still cannot be used: %s", self._how[0], str(error))
            return None
        finally:
            if found is None:
                self._turn.give_back()
        log.warning("the cache in %s can be used again", self._how[0])
        return found
