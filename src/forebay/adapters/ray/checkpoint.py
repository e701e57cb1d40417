"""Ray Train's checkpoints, read through this node's cache: ``checkpoint = forebay.adapters.ray.get_checkpoint()``."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from functools import cached_property
from typing import Any

from forebay import errors
from forebay.cache import Cache
from forebay.checkpoint import Checkpoint
from forebay.directories.manifests import Patterns

try:
    import ray.train
    from pyarrow import fs as arrow
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.ray.checkpoint", "ray") from error

__all__ = ["RayCheckpoint", "from_ray", "get_checkpoint", "report", "to_ray"]


class RayCheckpoint(ray.train.Checkpoint):  # type: ignore[misc]  # Ray is optional: to mypy it is Any
    """A checkpoint of Ray Train whose files come through the cache: each process of the node gets the one copy, which was fetched once.

    ``path``, ``filesystem``: as Ray's. ``cache``: an open `Cache`; without it the default one of the process, opened when it is needed.
    Goes wherever one of Ray's goes: ``isinstance`` says so, `ray.train.report` takes it. It pickles, with its cache as that one's place.
    Raises `ConfigError` (a ValueError) for a URL together with a filesystem."""

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None, cache: Cache | None = None) -> None:
        self._set(Checkpoint(path, filesystem, cache))

    def _set(self, ours: Checkpoint, its_uuid: uuid.UUID | None = None) -> None:
        # Ray's own __init__ would ask for the region of a bucket, which only its own ways to read need.
        self._ours, self._uuid = ours, its_uuid or uuid.uuid4()

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
    def as_directory(self, *, include: Patterns = None, exclude: Patterns = None, **how: Any) -> Iterator[str]:
        """See `Checkpoint.as_directory`: the tree is read-only, and stays in the cache after the block."""
        with self._ours.as_directory(include=include, exclude=exclude, **how) as path:
            yield path

    def to_directory(self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = True, **how: Any) -> str:
        """A private copy of its files, which may be written to; gives its path. `as_directory` costs no copy: take that one to read.

        As with Ray: files that stand in ``path`` are overwritten, others stay, and without a ``path`` each handle has one directory in the
        temporary directory, of all processes that got the handle; the caller removes it. ``overwrite=False``, ``how``, and what is raised:
        see `Checkpoint.to_directory`."""
        target = os.path.normpath(os.path.expanduser(os.fspath(path) if path is not None else self._get_temporary_checkpoint_dir()))
        if path is None:
            os.makedirs(target, mode=0o700, exist_ok=True)
        try:
            self._ours.to_directory(target, overwrite=overwrite, **how)
        except BaseException:
            if path is None:
                with contextlib.suppress(OSError):  # it is there, and of use, from an earlier call
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


def report(metrics: dict[str, Any], checkpoint: Any = None, checkpoint_dir_name: str | None = None, *more: Any, **how: Any) -> None:
    """`ray.train.report`, which also takes a `Checkpoint` of ours. ``more``, ``how``: whatever else Ray's takes, in its order. Ray copies
    the checkpoint to its storage."""
    theirs = to_ray(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint
    if more:
        ray.train.report(metrics, theirs, checkpoint_dir_name, *more, **how)
    else:
        ray.train.report(metrics, checkpoint=theirs, checkpoint_dir_name=checkpoint_dir_name, **how)
