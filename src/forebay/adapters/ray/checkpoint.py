"""Ray Train's checkpoints, read through this node's cache: ``checkpoint = forebay.adapters.ray.get_checkpoint()``."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any

from forebay import errors
from forebay._kernel import host
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay.cache import Cache
from forebay.checkpoint import Checkpoint
from forebay.directories.manifests import Patterns

try:
    import ray.train
    from pyarrow import fs as arrow
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.ray.checkpoint", "ray") from error

__all__ = ["RayCheckpoint", "from_ray", "get_checkpoint", "report", "to_ray"]


@guarded_methods()
class RayCheckpoint(ray.train.Checkpoint):  # type: ignore[misc]  # Ray is optional: to mypy it is Any
    """A checkpoint of Ray Train whose files are read through the cache: the processes of a node share one copy, which is fetched once.

    It is an instance of Ray's own class, and `ray.train.report` accepts it. It can be pickled, with the path of its cache. ``path``,
    ``filesystem``: as Ray's. ``cache``: an open `Cache`; default: the process's default cache, opened when needed. Raises `ConfigError` (a
    ValueError) for a URL together with a filesystem."""

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None, cache: Cache | None = None) -> None:
        self._set(Checkpoint(path, filesystem, cache))

    def _set(self, checkpoint: Checkpoint, its_uuid: uuid.UUID | None = None) -> None:
        # Ray's own __init__ would look up the region of a bucket, which only Ray's own methods need.
        self._ours, self._uuid = checkpoint, its_uuid or uuid.uuid4()

    @property
    def path(self) -> str:
        """The path on `filesystem`."""
        return self._ours.path

    @host.cached_property
    def filesystem(self) -> Any:
        """The pyarrow filesystem with which Ray itself copies and removes, perhaps wrapping an fsspec one. Created on first access."""
        filesystem = self._ours.filesystem
        if filesystem is None:
            import fsspec.core

            filesystem, _ = fsspec.core.url_to_fs(self._ours.url)
        return filesystem if isinstance(filesystem, arrow.FileSystem) else arrow.PyFileSystem(arrow.FSSpecHandler(filesystem))

    def __getstate__(self) -> tuple[Checkpoint, uuid.UUID]:
        return self._ours, self._uuid

    def __setstate__(self, state: tuple[Checkpoint, uuid.UUID]) -> None:
        self._set(*state)

    @property
    def url(self) -> str:
        """The whole URL; with a filesystem, the path on it."""
        return self._ours.url

    def __repr__(self) -> str:
        return f"Ray{self._ours!r}"

    @contextlib.contextmanager
    @guarded
    def as_directory(self, *, include: Patterns = None, exclude: Patterns = None, **options: Any) -> Iterator[str]:
        """See `Checkpoint.as_directory`: the tree is read-only, and stays in the cache after the block."""
        with self._ours.as_directory(include=include, exclude=exclude, **options) as path:
            yield path

    def to_directory(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = True, **options: Any) -> str:
        """Make a private, writable copy of its files, and return its path. To read only, use `as_directory`, which makes no copy.

        As with Ray, files of the same name in ``path`` are overwritten and others stay. Without a ``path``, all processes that got the
        handle share one directory in the temporary directory, which the caller removes. For ``overwrite=False``, ``options`` and errors see
        `Checkpoint.to_directory`."""
        target = os.path.normpath(os.path.expanduser(os.fspath(path) if path is not None else self._get_temporary_checkpoint_dir()))
        if path is None:
            os.makedirs(target, mode=0o700, exist_ok=True)
        try:
            self._ours.to_directory(target, overwrite=overwrite, **options)
        except BaseException:
            if path is None:
                with contextlib.suppress(OSError):  # it has files from an earlier call
                    os.rmdir(target)
            raise
        return target

    def get_metadata(self) -> dict[str, Any]:
        """See `Checkpoint.get_metadata`."""
        return self._ours.get_metadata()

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """See `Checkpoint.set_metadata`."""
        self._ours.set_metadata(metadata)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """See `Checkpoint.update_metadata`: no update of another process is lost."""
        self._ours.update_metadata(metadata)


def to_ray(checkpoint: Checkpoint) -> RayCheckpoint:
    """A Forebay checkpoint as one of Ray's, for the same directory and cache."""
    wrapped = RayCheckpoint.__new__(RayCheckpoint)
    wrapped._set(checkpoint)
    return wrapped


def from_ray(checkpoint: Any, cache: Cache | None = None) -> Checkpoint:
    """A Ray checkpoint, such as `ray.train.Result.checkpoint`, as one of Forebay. ``cache``: default: a `RayCheckpoint`'s, else the
    default."""
    if isinstance(checkpoint, RayCheckpoint) and cache is None:
        return checkpoint._ours
    return Checkpoint(checkpoint.path, checkpoint.filesystem, cache)


def get_checkpoint(cache: Cache | None = None) -> RayCheckpoint | None:
    """`ray.train.get_checkpoint`: the checkpoint that a worker resumes from, read through the cache; None in a new run."""
    checkpoint = ray.train.get_checkpoint()
    return None if checkpoint is None else to_ray(from_ray(checkpoint, cache))


def report(metrics: dict[str, Any], checkpoint: Any = None, checkpoint_dir_name: str | None = None, *more: Any, **options: Any) -> None:
    """`ray.train.report`, which also accepts a Forebay `Checkpoint`. Ray copies it to its storage. ``more``, ``options``: Ray's own."""
    wrapped = to_ray(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint
    if more:
        ray.train.report(metrics, wrapped, checkpoint_dir_name, *more, **options)
    else:
        ray.train.report(metrics, checkpoint=wrapped, checkpoint_dir_name=checkpoint_dir_name, **options)
