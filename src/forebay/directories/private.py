"""A directory as a private copy on this host: from the node's tree of it, or straight from the remote where the cache has no room."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay import errors
from forebay._engine.files.trees import remove_whole
from forebay._engine.locks.leases import Lease
from forebay.directories import copying
from forebay.directories.manifests import File, Part, Patterns
from forebay.directories.place import RemoteDirectory, place_of
from forebay.directories.sinks import FileSink
from forebay.directories.trees import Directories
from forebay.origin import Origin
from forebay.origin.request import FetchOptions


def copy(
    origin: Origin, url: str | os.PathLike[str], filesystem: Any, include: Patterns, exclude: Patterns, ask: FetchOptions,
    path: str | os.PathLike[str] | None, *, overwrite: bool,
) -> str:  # fmt: skip
    """`to_directory`, of what a caller said; without a ``path``, `to_temporary`."""
    place, part = place_of(origin, url, filesystem), Part.of(include, exclude)
    if path is None:
        return to_temporary(origin, place, part, ask)
    return to_directory(origin, place, part, ask, path, overwrite=overwrite)


def to_directory(
    origin: Origin, place: RemoteDirectory, part: Part, ask: FetchOptions, path: str | os.PathLike[str], *, overwrite: bool
) -> str:
    """Let ``path`` have a writable copy of a part of a directory; gives its absolute path. Of all processes of the node one does it.

    Raises `Foreign`, `NoSpace` where the disk of ``path`` has no room, and what `Directories.lease` does but faults of the cache."""
    target = copying.target_of(path)
    with _alone(origin, target, ask):
        _bring(origin, place, part, ask, target, overwrite=overwrite)
    return str(target)


def to_temporary(origin: Origin, place: RemoteDirectory, part: Part, ask: FetchOptions) -> str:
    """The same in a new directory below the temporary one, which nobody else knows: it needs no lock. The caller removes it."""
    target = Path(tempfile.mkdtemp(prefix="forebay-checkpoint-"))
    try:
        _bring(origin, place, part, ask, target, overwrite=False)
    except BaseException:
        remove_whole(target)
        raise
    return str(target)


def _bring(origin: Origin, place: RemoteDirectory, part: Part, ask: FetchOptions, target: Path, *, overwrite: bool) -> None:
    directories = Directories(origin)
    tree = _tree(origin, directories, place, part, ask)
    if tree is None:
        _fetch(origin, place, directories.chosen(place, part, ask).files, target, ask, overwrite=overwrite)
        return
    with tree:
        copying.copy_tree(tree.path, directories.files_of(place, part, tree, ask), target, overwrite=overwrite)


def _alone(origin: Origin, target: Path, ask: FetchOptions) -> contextlib.AbstractContextManager[object]:
    store = origin.store
    if store.keeps and not store.root.read_only:
        return store.locks.named(f"copy to {target}", timeout=ask.timeout, on_wait=ask.on_wait)
    return copying.locked(target)


def _tree(origin: Origin, directories: Directories, place: RemoteDirectory, part: Part, ask: FetchOptions) -> Lease | None:
    try:
        return directories.lease(place, part, ask)
    except (errors.CacheFault, errors.WaitTimeout) as error:
        if ask.offline:
            raise
        origin.fall_back(error, place.key)
        return None


def _fetch(origin: Origin, place: RemoteDirectory, files: Sequence[File], target: Path, ask: FetchOptions, *, overwrite: bool) -> None:
    def fetch(file: File, sink: FileSink) -> None:
        origin.count(place.remote.fetch(place.object(file.name), sink))

    def told(done: int, total: int) -> None:
        if ask.on_progress is not None:
            ask.on_progress(done, total)

    copying.fetch_tree(files, target, fetch, overwrite=overwrite, budget=origin.store.usage().budget, on_progress=told)
