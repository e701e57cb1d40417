"""Opens a root; one that cannot be used yet is opened later."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from forebay import _config, errors
from forebay._engine.files.layout import faults
from forebay._engine.store import Settings, Store
from forebay._kernel import host, waits
from forebay._kernel.below import LinkInTheWay
from forebay._logs import logger

if TYPE_CHECKING:
    from forebay._engine.null_store import NullStore

NO_LIMIT = 1 << 50
"""A budget of so much means none."""
_REFUSALS = FileNotFoundError, NotADirectoryError, PermissionError, LinkInTheWay

log = logger("forebay.cache")


def is_network(path: Path) -> bool:
    return not host.is_local(host.fs_kind(path))


def no_store(why: str = "the cache is switched off") -> NullStore:
    """What stands for the store where there is none."""
    from forebay._engine.null_store import NullStore  # imported late: most programs have a store

    return NullStore(why)


def in_memory() -> int:
    """The limit where there is no budget, in bytes: half of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class CacheHandle(Protocol):
    """An object that a front returns, and closes with its origin."""

    def close(self) -> None: ...


class RootOptions(NamedTuple):
    """A root directory, and the options with which `Cache` opens it. ``budget``, ``min_free``: as the user wrote them. ``first_budget``:
    for a root that has none yet."""

    path: Path
    budget: int | str | None = None
    min_free: int | str | None = None
    max_entries: int | None = None
    max_rate: int | None = None
    max_connections: int | None = None
    shared: bool = False
    read_only: bool = False
    first_budget: _config.GivenSetting | None = None

    @classmethod
    def of(
        cls, environment: _config.EnvironmentSettings, first_budget: _config.GivenSetting | None, root: str | os.PathLike[str] | None,
        budget: int | str | None, min_free: int | str | None, max_entries: int | None, max_rate: int | str | None,
        max_connections: int | None, shared: bool | None, read_only: bool,
    ) -> Self:  # fmt: skip
        """The caller's options; where they are None, those of the environment, whose budget is for a root that has none yet.
        Raises `ConfigError`."""
        if root is not None and not os.fspath(root):
            raise errors.ConfigError("root must not be empty (use '.' for the current directory)", name="root", value="")
        if max_entries is not None and max_entries < 0:
            raise errors.ConfigError(f"max_entries={max_entries}: it must not be negative", name="max_entries", value=max_entries)
        path = Path(root) if root is not None else environment.home or _config.default_root(is_network=is_network)
        return cls(
            path, budget, environment.min_free if min_free is None else min_free, max_entries,
            environment.max_rate if max_rate is None else _config.parse_rate(max_rate),
            environment.max_connections if max_connections is None else _config.parse_connections(max_connections),
            environment.shared if shared is None else shared, read_only, first_budget if budget is None else None,
        )  # fmt: skip

    def open(self) -> Store:
        """The store. Raises `RootRefused`, `NewerFormat`, `ConfigError`, and `CacheFault` where the root cannot be used for now."""
        with faults(str(self.path)):
            try:
                return self._open()
            except OSError as error:
                if isinstance(error, errors.ForebayError) or not (isinstance(error, _REFUSALS) or error.errno == errno.EROFS):
                    raise
                expected, problem = "a directory that can be created and written to", error.strerror or type(error).__name__
                message = f"{self.path}: expected {expected}, found '{problem}': choose another directory"
                raise errors.RootRefused(message, path=str(self.path), wanted=expected, found=problem) from error

    def _open(self) -> Store:
        total = None
        if self.budget is not None or isinstance(self.min_free, str) or self.first_budget is not None:
            existing = next(p for p in (self.path, *self.path.absolute().parents) if p.exists())
            total = host.disk(existing).total
        first = _config.parse_budget(self.first_budget.text, total=total, name=self.first_budget.name) if self.first_budget else None
        settings = Settings(
            _config.parse_budget(self.budget, total=total) if self.budget is not None else None,
            _config.parse_size(self.min_free, total=total, name="min_free") if self.min_free is not None else None,
            self.max_entries,
            self.max_rate,
            self.max_connections,
            first,
        )
        store = Store.open(self.path, settings, shared=self.shared, read_only=self.read_only)
        if total is not None and settings.budget is not None and NO_LIMIT > settings.budget > total:
            _config.warn_once(_config.budget_beyond_disk(store.root.path, settings.budget, total))
        if self.first_budget is not None and not self.read_only:
            there = store.spaces.root_limits()["budget"]
            if there is not None and there != first:
                _config.warn_once(_config.unused_budget(self.first_budget, store.root.path, there))
        return store

    def open_or_pass(self) -> Store | NullStore:
        """The store, or a `NullStore` where the root cannot be used for now. Raises for a root that can never be used."""
        try:
            return self.open()
        except errors.CacheFault as error:
            # as text: the error itself would keep its frames
            log.warning("the cache in %s cannot be used, reading past it: %s", self.path, str(error))
            return no_store(str(error))


class Reopening:
    """A root that could not be used when it was opened, because the disk was full or its catalog was busy: a later call opens it.

    An attempt takes a fraction of a second. Callable from any thread and after a fork."""

    def __init__(self, root: RootOptions) -> None:
        self._root = root
        self.others_may_write = root.shared or root.read_only  # whether they can is unknown until it is open
        self._turn = waits.Turn()

    def attempt(self) -> Store | None:
        """The store, once it can be opened: returned only once."""
        return self._turn.attempt(self._open)

    def _open(self) -> Store | None:
        try:
            store = self._root.open()
        except (errors.ForebayError, OSError) as error:  # whatever happened to the root: the cache worked without it until now
            log.info("the cache in %s still cannot be used: %s", self._root.path, str(error))
            return None
        log.warning("the cache in %s can be used again", self._root.path)
        return store


def others_can_write(store: Store) -> bool:
    """Whether anyone but this user and the superuser can write to this root."""
    try:
        status = os.stat(store.root.path)
    except OSError:
        return store.root.shared
    return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
