"""Ray Train's checkpoints, read through this node's cache: ``checkpoint = forebay.adapters.ray.get_checkpoint()``."""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterator
from typing import Any

from forebay import errors, remote
from forebay._kernel import host
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay.adapters.ray import copies
from forebay.cache import Cache
from forebay.checkpoint import Checkpoint, state_without
from forebay.directories.manifests import Patterns

try:
    import ray.train
    from pyarrow import fs as arrow
except ModuleNotFoundError as error:
    raise errors.MissingExtra.of("forebay.adapters.ray.checkpoint", "ray") from error

__all__ = ["DamagedMetadata", "RayCheckpoint", "from_ray", "get_checkpoint", "report", "to_ray"]


class DamagedMetadata(errors.RemoteProtocolError, json.JSONDecodeError):
    """The metadata of a checkpoint is not a JSON object. It is a `json.JSONDecodeError`, too, which Ray raises."""


@contextlib.contextmanager
def _as_ray_raises() -> Iterator[None]:
    try:
        yield
    except errors.RemoteProtocolError as error:
        cause = error.__cause__
        if not isinstance(cause, ValueError):
            raise
        where = {name: getattr(cause, name, default) for name, default in (("pos", 0), ("lineno", 1), ("colno", 1))}
        raise DamagedMetadata(str(error), msg=str(cause), doc="", **where, **error.facts) from cause


@guarded_methods()
class RayCheckpoint(ray.train.Checkpoint):  # type: ignore[misc]  # Ray is optional: to mypy it is Any
    """A checkpoint of Ray Train whose files are read through the cache: the processes of a node share one copy, which is fetched once.

    It is an instance of Ray's own class, and `ray.train.report` accepts it. It can be pickled, with the path of its cache. ``path``,
    ``filesystem``: as Ray's; both can be set. ``cache``: an open `Cache`; default: the process's default cache, opened when needed. A
    handle equals its copies in all processes: what was unpickled from it, and what `get_checkpoint` returns for the same checkpoint of
    Ray. Raises `ConfigError` (a ValueError) for a URL together with a filesystem."""

    def __init__(self, path: str | os.PathLike[str], filesystem: Any = None, cache: Cache | None = None) -> None:
        # Ray's own __init__ would look up the region of a bucket, which only Ray's own methods need.
        self._ours, self._uuid = Checkpoint(path, filesystem, cache), uuid.uuid4()

    @property
    def path(self) -> str:
        """The path on `filesystem`."""
        return self._ours.path

    @path.setter
    def path(self, path: str | os.PathLike[str]) -> None:
        self._move(path, self.filesystem)

    @property
    def filesystem(self) -> Any:
        """The pyarrow filesystem with which Ray itself copies and removes, perhaps wrapping an fsspec one. Created on first access."""
        return self._arrow

    @filesystem.setter
    def filesystem(self, filesystem: Any) -> None:
        self._move(self.path, filesystem)

    @host.cached_property
    def _arrow(self) -> Any:
        filesystem = self._ours.filesystem
        if filesystem is None:
            import fsspec.core

            filesystem, _ = fsspec.core.url_to_fs(self._ours.url)
        return filesystem if isinstance(filesystem, arrow.FileSystem) else arrow.PyFileSystem(arrow.FSSpecHandler(filesystem))

    def _move(self, path: str | os.PathLike[str], filesystem: Any) -> None:
        self._ours = Checkpoint(path, filesystem, self._ours._cache)
        self.__dict__.pop("_arrow", None)

    def __getstate__(self) -> Any:
        return state_without(self, "_arrow")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RayCheckpoint):
            return NotImplemented
        return self._uuid == other._uuid and self._ours == other._ours

    def __hash__(self) -> int:
        return hash(self._uuid)

    @property
    def url(self) -> str:
        """The whole URL; with a filesystem, the path on it."""
        return self._ours.url

    def __repr__(self) -> str:
        return f"Ray{self._ours!r}"

    @contextlib.contextmanager
    @guarded
    def as_directory(
        self, *, include: Patterns = None, exclude: Patterns = None, max_age: float | str | None = 0, **options: Any
    ) -> Iterator[str]:  # fmt: skip
        """See `Checkpoint.as_directory`: the tree is read-only, and stays in the cache after the block.

        Each call asks the remote whether the files are current, as Ray does, unless ``max_age`` accepts an older answer."""
        with self._ours.as_directory(include=include, exclude=exclude, max_age=max_age, **options) as path:
            yield path

    def to_directory(
        self, path: str | os.PathLike[str] | None = None, *, overwrite: bool = True, max_age: float | str | None = 0, **options: Any
    ) -> str:  # fmt: skip
        """Make a private, writable copy of its files, and return its path. To read only, use `as_directory`, which makes no copy.

        As with Ray, files of the same name in ``path`` are overwritten and others stay. Without a ``path``, all processes of the node
        that got the handle share one directory in the temporary directory, which is removed when the last of them has ended. Each call
        asks the remote whether the files are current, unless ``max_age`` accepts an older answer. For ``overwrite=False``, ``options``
        and errors see `Checkpoint.to_directory`."""
        if path is not None:
            target = os.path.normpath(remote.expand_user(os.fspath(path)))
            self._ours.to_directory(target, overwrite=overwrite, max_age=max_age, **options)
            return target
        shared = copies.hold(self._uuid.hex)
        try:
            return self._ours.to_directory(shared / copies.CONTENT, overwrite=overwrite, max_age=max_age, **options)
        finally:
            copies.settle(shared)

    def get_metadata(self) -> dict[str, Any]:
        """See `Checkpoint.get_metadata`. Raises `DamagedMetadata` if it is not JSON."""
        with _as_ray_raises():
            return self._ours.get_metadata()

    def set_metadata(self, metadata: dict[str, Any]) -> None:
        """See `Checkpoint.set_metadata`."""
        self._ours.set_metadata(metadata)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        """See `Checkpoint.update_metadata`: no update of another process is lost. Raises `DamagedMetadata` if the present one is not
        JSON."""
        with _as_ray_raises():
            self._ours.update_metadata(metadata)


def to_ray(checkpoint: Checkpoint) -> RayCheckpoint:
    """A Forebay checkpoint as one of Ray's, for the same directory and cache."""
    wrapped = RayCheckpoint.__new__(RayCheckpoint)
    wrapped._ours, wrapped._uuid = checkpoint, uuid.uuid4()
    return wrapped


def from_ray(checkpoint: Any, cache: Cache | None = None) -> Checkpoint:
    """A Ray checkpoint, such as `ray.train.Result.checkpoint`, as one of Forebay. ``cache``: default: a `RayCheckpoint`'s, else the
    default."""
    if isinstance(checkpoint, RayCheckpoint) and cache is None:
        return checkpoint._ours
    return Checkpoint(checkpoint.path, checkpoint.filesystem, cache)


def get_checkpoint(cache: Cache | None = None) -> RayCheckpoint | None:
    """`ray.train.get_checkpoint`, or that of `ray.tune` in a function of a `Tuner`: the checkpoint that a worker resumes from, read
    through the cache; None in a new run. As long as Ray returns the same checkpoint, the results are equal. Attributes that it was given
    are kept."""
    try:
        checkpoint = ray.train.get_checkpoint()
    except DeprecationWarning as refusal:
        checkpoint = _tune_instead(refusal).get_checkpoint()
    if checkpoint is None or (isinstance(checkpoint, RayCheckpoint) and cache is None):
        return checkpoint
    wrapped = to_ray(from_ray(checkpoint, cache))
    given = vars(checkpoint).items()
    wrapped.__dict__.update((name, value) for name, value in given if name not in ("path", "filesystem", "_ours", "_arrow"))
    return wrapped


def report(metrics: dict[str, Any], checkpoint: Any = None, checkpoint_dir_name: str | None = None, *more: Any, **options: Any) -> None:
    """`ray.train.report`, or that of `ray.tune` in a function of a `Tuner`, which also accepts a Forebay `Checkpoint`. Ray copies it to
    its storage. ``more``, ``options``: Ray's own."""
    wrapped = to_ray(checkpoint) if isinstance(checkpoint, Checkpoint) else checkpoint
    try:
        if more:
            ray.train.report(metrics, wrapped, checkpoint_dir_name, *more, **options)
        else:
            ray.train.report(metrics, checkpoint=wrapped, checkpoint_dir_name=checkpoint_dir_name, **options)
    except DeprecationWarning as refusal:
        tune = _tune_instead(refusal)
        if checkpoint_dir_name is not None or more:
            message = "in a function of a Tuner Ray names the directory: omit checkpoint_dir_name and what follows it"
            raise errors.ConfigError(message, name="checkpoint_dir_name", value=checkpoint_dir_name) from None
        tuned = wrapped if wrapped is None or isinstance(wrapped, tune.Checkpoint) else tune.Checkpoint(wrapped.path, wrapped.filesystem)
        tune.report(metrics, checkpoint=tuned, **options)


def _tune_instead(refusal: DeprecationWarning) -> Any:
    """`ray.tune`, if this is a function of a `Tuner`, where `ray.train` refuses its calls; else raises the refusal."""
    import ray.tune

    if ray.tune.get_context().get_trial_id() is None:
        raise refusal
    return ray.tune
