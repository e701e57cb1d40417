"""The files of a local directory that is to be uploaded."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

from forebay import errors
from forebay._engine.files.blobs import checksum_of
from forebay.directories.manifests import MARK, check_names
from forebay.remote.local import is_unfinished

TICK = 0.02  # seconds: two changes of a file that are closer may leave it with one and the same time


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file as it was when it was found. ``name``: relative to the directory. ``seen``: what changes when the file does."""

    name: str
    path: str
    size: int
    seen: tuple[int, ...]

    @classmethod
    def of(cls, name: str, path: str) -> LocalFile:
        found = os.stat(path)
        return cls(name, path, found.st_size, (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns))

    def check(self) -> None:
        """Raises `SourceChanged` if it is not what was found."""
        try:
            same = LocalFile.of(self.name, self.path).seen == self.seen
        except FileNotFoundError:
            same = False
        if not same:
            raise errors.SourceChanged.of(self.path)

    def digest(self) -> str:
        """Its checksum in hex. Raises `SourceChanged`, OSError."""
        self.check()
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = checksum_of(fd).hex()
        finally:
            os.close(fd)
        self.check()
        return found


def files_below(folder: str) -> list[LocalFile]:
    """All files of a directory, in order of name. Symbolic links to files are followed.

    Raises `ConfigError` for what cannot be uploaded: a link to a directory or to nothing, a socket, a pipe, a device, a name that no reader
    would take, nothing at all; `NotFound`, `NotADirectory` or `AccessDenied` for a directory that cannot be read."""
    if not os.path.isdir(folder):
        kind, what = (errors.NotADirectory, "this is a file") if os.path.exists(folder) else (errors.NotFound, "there is no such directory")
        raise kind(f"{folder} cannot be uploaded: {what}", url=folder)
    files = sorted((LocalFile.of(name, path) for name, path in _walk(folder, "")), key=lambda file: file.name)
    if not files:
        raise _refused(folder, "it holds no file")
    try:
        check_names(folder, [file.name for file in files])
    except errors.BadListing as error:
        raise _refused(folder, f"{error.name!r} is a name that readers refuse") from error
    if max(file.seen[-1] for file in files) > time.time_ns() - TICK * 1e9:
        time.sleep(TICK)
        return [LocalFile.of(file.name, file.path) for file in files]
    return files


def _walk(folder: str, above: str) -> Iterator[tuple[str, str]]:
    try:
        found = os.scandir(folder)
    except PermissionError as error:
        raise errors.AccessDenied(f"{folder} cannot be uploaded: {error.strerror}", url=folder) from error
    with found as entries:
        for entry in entries:
            name = above + entry.name
            if is_unfinished(entry.name) or name == MARK:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, name + "/")
            elif not entry.is_file():
                raise _refused(entry.path, _kind(entry))
            else:
                yield name, entry.path


def _kind(entry: os.DirEntry[str]) -> str:
    if not entry.is_symlink():
        return "this is no file: a socket, a pipe or a device"
    return "a symbolic link to a directory is not followed" if entry.is_dir() else "this symbolic link leads to no file"


def _refused(path: str, why: str) -> errors.ConfigError:
    return errors.ConfigError(f"{path} cannot be uploaded: {why}", name="local_dir", value=path)
