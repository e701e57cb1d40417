"""Ray Train's checkpoints, read through this node's cache: ``checkpoint = forebay.adapters.ray.get_checkpoint()``."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from forebay import errors
from forebay._directories.manifests import Patterns
from forebay.cache import Cache
from forebay.checkpoint import Checkpoint

try:
    import ray.train
    from pyarrow import fs as arrow
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.ray_checkpoint", "ray") from error

__all__ = ["RayCheckpoint", "from_ray", "get_checkpoint", "report", "to_ray"]


class RayCheckpoint(ray.train.Checkpoint):  # type: ignore[misc]  # Ray is optional: to mypy it is Any
    """A checkpoint of Ray Train whose files come through the cache: each process of the node gets the one copy, which was fetched once.

    ``path``, ``filesystem``: as Ray's. ``cache``: an open `Cache`; without it the default one of the process, opened when it is needed.
    Goes wherever one of Ray's goes: ``isinstance`` says so, `ray.train.report` takes it. It pickles, with its cache as that one's place.
    Raises `ConfigError` (a ValueError) for a URL together with a filesystem."""

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None, cache: Cache | None = None) -> None:
        self._set(Checkpoint(path, filesystem, cache))

    def _set(self, ours: Checkpoint) -> None:
        # Ray's own __init__ would ask for the region of a bucket, which only its own ways to read need.
        self._ours, self._uuid = ours, uuid.uuid4()

    @property
    def path(self) -> str:
        """The path on `filesystem`."""
        return self._ours.path

    @cached_property
    def filesystem(self) -> Any:
        """By what Ray itself copies and removes: pyarrow's filesystem, or that of fsspec in its clothes. Found when it is asked for."""
        found = self._ours.filesystem
        if found is None:
            import fsspec.core

            found, _ = fsspec.core.url_to_fs(self._ours.url)
        return found if isinstance(found, arrow.FileSystem) else arrow.PyFileSystem(arrow.FSSpecHandler(found))

    def __getstate__(self) -> Checkpoint:
        return self._ours

    def __setstate__(self, ours: Checkpoint) -> None:
        self._set(ours)

    @property
    def url(self) -> str:
        """The whole URL; with a filesystem, the path on it."""
        return self._ours.url

    def __repr__(self) -> str:
        return f"Ray{self._ours!r}"

    @contextlib.contextmanager
    def as_directory(self, *, include: Patterns = None, exclude: Patterns = None, **how: Any) -> Iterator[str]:
        """See `Checkpoint.as_directory`: the tree is read-only, and stays in the cache after the block."""
        with self._ours.as_directory(include=include, exclude=exclude, **how) as path:
            yield path

    def to_directory(self, path: str | os.PathLike[str] | None = None, **how: Any) -> str:
        """See `Checkpoint.to_directory`: with a ``path`` a private copy, which may be written to; without one the tree of the cache."""
        return self._ours.to_directory(path, **how)

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
    """A checkpoint of ours as one of Ray's: of the same directory, through the same cache."""
    found = RayCheckpoint.__new__(RayCheckpoint)
    found._set(checkpoint)
    return found


def from_ray(checkpoint: Any, cache: Cache | None = None) -> Checkpoint:
    """A checkpoint of Ray's, such as `ray.train.Result.checkpoint`, as one of ours. ``cache``: through which it is read, unless it is a
    `RayCheckpoint`, which has one."""
    if isinstance(checkpoint, RayCheckpoint) and cache is None:
        return checkpoint._ours
    return Checkpoint(checkpoint.path, checkpoint.filesystem, cache)


def get_checkpoint(cache: Cache | None = None) -> RayCheckpoint | None:
    """`ray.train.get_checkpoint`: what a worker is to go on from, None in a run that begins; read through the cache."""
    found = ray.train.get_checkpoint()
    return None if found is None else to_ray(from_ray(found, cache))


def report(metrics: dict[str, Any], checkpoint: Any = None, **how: Any) -> None:
    """`ray.train.report`, which also takes a `Checkpoint` of ours. ``how``: whatever else Ray's takes. Ray copies it to its storage."""
    ray.train.report(metrics, to_ray(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint, **how)
