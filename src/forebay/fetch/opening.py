"""The options of a cache, and how its root is opened."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from forebay import _config, errors, remote
from forebay._engine.files.layout import faults
from forebay._engine.files.root import ANOTHER
from forebay._engine.store import Settings, Store
from forebay._kernel import greenlets, host
from forebay._kernel.below import LinkInTheWay
from forebay._logs import logger

if TYPE_CHECKING:
    from forebay._engine.null_store import NullStore

NO_LIMIT = 1 << 50
"""A budget of at least this many bytes means none."""
_REFUSALS = FileNotFoundError, NotADirectoryError, PermissionError, LinkInTheWay

log = logger("forebay.cache")


def in_memory() -> int:
    """The limit in bytes if there is no budget: half of the machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


class CacheHandle(Protocol):
    """An object that a front returns, and closes with its fetcher."""

    def close(self) -> None: ...


class CacheOptions(NamedTuple):
    """The arguments of `Cache`, as the user wrote them. None: the setting of the environment; see `resolved`. ``first_budget``: for a root
    that has none yet."""

    root: str | os.PathLike[str] | None = None
    budget: int | str | None = None
    shared: bool | None = None
    read_only: bool = False
    min_free: int | str | None = None
    max_entries: int | None = None
    max_rate: int | str | None = None
    max_connections: int | None = None
    upstream: str | os.PathLike[str] | None = None
    offline: bool | None = None
    max_age: float | str | None = None
    timeout: float | None = None
    remote_options: remote.RemoteOptions | None = None
    enabled: bool = True
    first_budget: _config.GivenSetting | None = None

    def resolved(self) -> Self:
        """These options, checked; where they are None, those of the environment, whose budget is for a root that has none yet.
        Raises `ConfigError`."""
        environment = _config.EnvironmentSettings.from_environment()
        given, _ = _config.given_settings()
        given_root, upstream = (None if path is None else remote.as_text(path) for path in (self.root, self.upstream))
        if given_root == "":
            raise errors.ConfigError("root must not be empty (use '.' for the current directory)", name="root", value="")
        given_root, upstream = (
            None if path is None else _config.expand_user(path, name) for name, path in (("root", given_root), ("upstream", upstream))
        )
        for name, path in (("root", given_root), ("upstream", upstream)):
            if path is not None and not _is_path(path):
                raise errors.ConfigError(f"{name}={path!r} cannot be the path of a directory", name=name, value=repr(path))
        if self.max_entries is not None:
            _config.parse_count(self.max_entries, name="max_entries", least=0)
        unset = [
            name for name in ("shared", "min_free", "max_rate", "max_connections", "offline", "max_age") if getattr(self, name) is None
        ]
        options = self._replace(**{name: getattr(environment, name) for name in unset})
        names_remote = any(name.lower() in given for name in _config.REMOTE)
        root = given_root or environment.home or _config.default_root(is_network=lambda path: not host.is_local(host.fs_kind(path)))
        return options._replace(
            # Absolute: what is opened again, in this process or another, may be opened in another working directory.
            root=_absolute(root),
            upstream=None if upstream is None else _absolute(upstream),
            max_rate=None if options.max_rate is None else _config.parse_rate(options.max_rate),
            max_connections=None if options.max_connections is None else _config.parse_connections(options.max_connections),
            max_age=None if options.max_age is None else _config.parse_age(options.max_age, name="max_age"),
            timeout=_config.parse_timeout(self.timeout),
            remote_options=self.remote_options or (remote.RemoteOptions.from_environment() if names_remote else None),
            first_budget=given["budget"] if self.budget is None and environment.budget is not None else None,
        )

    @property
    def path(self) -> Path:
        """The root directory. Caller: has resolved the options."""
        return Path(self.root or "")

    def open(self) -> Store:
        """The store. Raises `RootRefused`, `NewerFormat`, `ConfigError`, and `CacheFault` if the root cannot be used for now."""
        with faults(str(self.path)):
            try:
                return self._open()
            except OSError as error:
                if isinstance(error, errors.ForebayError) or not (isinstance(error, _REFUSALS) or error.errno == errno.EROFS):
                    raise
                expected, problem = "a directory that can be created and written to", error.strerror or type(error).__name__
                message = f"{self.path}: expected {expected}, found '{problem}': {ANOTHER}"
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
            _config.parse_rate(self.max_rate) if self.max_rate is not None else None,
            self.max_connections,
            first,
        )
        store = Store.open(self.path, settings, shared=bool(self.shared), read_only=self.read_only)
        try:
            self._warn_of(store, settings, total)
        except BaseException:
            store.close()
            raise
        return store

    def _warn_of(self, store: Store, settings: Settings, total: int | None) -> None:
        """Log if a budget is larger than the disk, or that of the environment is not used."""
        if total is not None and settings.budget is not None and NO_LIMIT > settings.budget > total:
            _config.warn_once(_config.budget_beyond_disk(store.root.path, settings.budget, total))
        if self.first_budget is not None and not self.read_only:
            there = store.spaces.root_limits()["budget"]
            if there is not None and there != settings.first_budget:
                _config.warn_once(_config.unused_budget(self.first_budget, store.root.path, there))

    def open_or_pass(self) -> Store | NullStore:
        """The store; a `NullStore` if the cache is disabled, or if its root cannot be used for now. Raises for a root that can never be
        used."""
        greenlets.look()
        why: str = "the cache is switched off"
        fault: type[errors.CacheFault] = errors.NoSpace
        if self.enabled:
            try:
                return self.open()
            except errors.CacheFault as error:
                why = str(error)  # the error itself would keep its frames
                fault = next((kind for kind in (errors.NoSpace, errors.NoLocks) if isinstance(error, kind)), errors.CacheFault)
                log.warning("the cache in %s cannot be used, reading past it: %s", self.path, why)
        from forebay._engine.null_store import NullStore  # imported late: most programs have a store

        return NullStore(why, fault)

    def open_again(self) -> Store | None:
        """The store; None if its root still cannot be used."""
        try:
            store = self.open()
        except (errors.ForebayError, OSError) as error:  # whatever happened to the root: the cache worked without it until now
            log.info("the cache in %s still cannot be used: %s", self.path, str(error))
            return None
        log.warning("the cache in %s can be used again", self.path)
        return store


NO_OPTIONS = CacheOptions()


def _absolute(path: str | Path) -> Path:
    try:
        return Path(path).absolute()
    except OSError:  # the working directory was deleted: whoever opens the path refuses it
        return Path(path)


def _is_path(path: str) -> bool:
    """Whether there can be a file of this name."""
    try:
        return b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        return False


def others_can_write(store: Store) -> bool:
    """Whether anyone but this user and the superuser can write to this root."""
    try:
        status = os.stat(store.root.path)
    except OSError:
        return store.root.shared
    return status.st_uid not in (os.geteuid(), 0) or bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
