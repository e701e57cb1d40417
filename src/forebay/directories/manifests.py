"""The files of a directory, each with a name that is valid on this host; a part of them, chosen by patterns; the files of a local directory
to upload."""

from __future__ import annotations

import errno
import fnmatch
import glob
import hashlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, TypeAlias

from forebay import errors
from forebay._engine.files.blobs import checksum_of
from forebay._kernel import greenlets, host, interrupts
from forebay._kernel.below import why_not_below
from forebay._model import Buffer, exact_str
from forebay.remote.local import is_unfinished

Patterns: TypeAlias = str | Iterable[str] | None

MARK = ".forebay.json"
"""The object in which an upload records the files of a directory, and whether all are there. Not part of the tree."""


class File(NamedTuple):
    """One file of a directory. ``size`` in bytes, None if unknown; ``modified``: seconds since 1970; ``digest``: its checksum in hex, if
    its upload recorded it and the file was not replaced since."""

    name: str
    size: int | None
    validator: str | None = None
    modified: float | None = None
    digest: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The files of a directory at one moment, in order of name. The remote gave the names: see `check`.

    ``folders``: the names of the directories in which no file lies; "" alone if the directory itself is empty."""

    files: tuple[File, ...]
    folders: tuple[str, ...] = ()

    @classmethod
    def of(cls, listed: Iterable[File]) -> Self:
        """The manifest of a listing, in any order."""
        files, folders = list[File](), set[str]()
        for file in interrupts.paced(listed):
            if is_folder(file.name, file.size):
                folders.add(file.name.removesuffix("/"))
            else:
                files.append(file)
        files.sort(key=lambda file: file.name)
        if folders:
            names = [file.name for file in interrupts.paced(files)]
            used = {above for name in interrupts.paced([*names, *folders]) for above in folders_above(name)}.union(names)
            used |= {""} if names or folders != {""} else set()
            folders = {name for name in folders - used if not name or not why_not_below(name)}
        return cls(tuple(files), tuple(sorted(folders)))

    @classmethod
    def parse(cls, data: Buffer) -> Self:
        """The manifest from its `encoded` form, which every process that may write to the root may have changed. Raises ValueError,
        TypeError or RecursionError for any other."""
        return cls.of(_checked_row(File(*row)) for row in interrupts.paced(json.loads(bytes(data))))

    def check(self, where: str) -> None:
        """Raises `BadListing` for names that files below one directory cannot have."""
        if self._bad_name:
            raise _bad(where, *self._bad_name)

    @host.cached_property
    def _bad_name(self) -> tuple[str, str] | None:
        return _find_bad([file.name for file in interrupts.paced(self.files)])

    @host.cached_property
    def encoded(self) -> bytes:
        return json.dumps([*self.files, *(File(f"{name}/", 0) for name in self.folders)], separators=(",", ":")).encode()

    @host.cached_property
    def version(self) -> str:
        """A hash of the names, sizes and validators of the files, and of the names of empty directories."""
        rows = [(file.name, file.size, file.validator or file.digest or file.modified) for file in interrupts.paced(self.files)]
        rows += [(f"{name}/", 0, None) for name in self.folders]
        return hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()

    @property
    def size(self) -> int:
        """Total bytes of the files whose size is known."""
        return sum(file.size or 0 for file in self.files)


@dataclass(frozen=True, slots=True)
class Part:
    """A selection of files of a directory: those that match one of ``include`` (all, if it is empty) and none of ``exclude``."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()

    @classmethod
    def of(cls, include: Patterns, exclude: Patterns) -> Self:
        """Raises `ConfigError` for invalid patterns."""
        return cls(_patterns(include, "include"), _patterns(exclude, "exclude"))

    def __str__(self) -> str:
        """The part of a key; "" for the whole directory."""
        fields = {"include": self.include, "exclude": self.exclude}
        return "&".join(f"{name}={json.dumps(patterns)}" for name, patterns in fields.items() if patterns)

    def choose(self, where: str, whole: Manifest) -> Manifest:
        """The selected files, and the selected directories without files. Raises `BadListing` for names that they cannot have."""
        if not self.include and not self.exclude:
            whole.check(where)
            return whole
        is_included, is_excluded = _matcher(self.include or ("*",)), _matcher(self.exclude)

        def is_chosen(name: str) -> bool:
            return bool(is_included(name) and not is_excluded(name))

        files = tuple(file for file in interrupts.paced(whole.files) if is_chosen(file.name))
        chosen = Manifest(files, tuple(name for name in whole.folders if is_chosen(f"{name}/")))
        chosen.check(where)
        return chosen


def _checked_row(file: File) -> File:
    """Raises ValueError for a row that `Manifest.encoded` never writes."""
    texts = all(type(text) in (str, type(None)) for text in (file.validator, file.digest))
    is_sized = file.size is None or (type(file.size) is int and 0 <= file.size < 1 << 63)
    is_dated = file.modified is None or (type(file.modified) in (int, float) and math.isfinite(file.modified))
    if not (type(file.name) is str and texts and is_sized and is_dated):
        raise ValueError(f"no file has this row: {str(file)[:200]}")
    return file


def _patterns(given: Patterns, name: str) -> tuple[str, ...]:
    several, patterns = (given,) if isinstance(given, str) else tuple(given or ()), set[str]()
    for pattern in several:
        text = exact_str(pattern)
        if not text:
            message = f"{name}={pattern!r} is no pattern: expected one such as 'model-*.safetensors' or 'weights/'"
            raise errors.ConfigError(message, name=name, value=repr(pattern))
        patterns.add(text)
    if given is not None and not several and name == "include":
        raise errors.ConfigError("include=[] selects no file: omit it to select all", name=name, value="[]")
    return tuple(sorted(patterns))


def _matcher(patterns: Sequence[str]) -> Any:
    """Whether a name matches one of them: ``*`` crosses ``/`` as in fnmatch; ``weights/`` matches everything below."""
    if not patterns:
        return lambda name: False
    several = (fnmatch.translate(pattern + "*" if pattern.endswith("/") else pattern) for pattern in patterns)
    return re.compile("|".join(several)).match


def is_folder(name: str, size: int | None) -> bool:
    """Whether this is the empty object that some tools write for a directory."""
    return (name == "" or name.endswith("/")) and not size


def check_names(where: str, names: Sequence[str]) -> None:
    """Raises `BadListing` unless all names can be files below one directory. ``names``: sorted."""
    if bad := _find_bad(names):
        raise _bad(where, *bad)


def _find_bad(names: Sequence[str]) -> tuple[str, str] | None:
    """The first of the sorted names that no file below the directory can have, and why."""
    folders: set[str] = set()
    for name in interrupts.paced(names):
        if why := why_not_below(name):
            return name, why
        folders.update(folders_above(name))
    for before, name in itertools.pairwise(names):
        if before == name:
            return name, "it is there twice"
    for name in names:
        if name in folders:
            return name, "it is a file and a directory"
    return None


def folders_above(name: str) -> Iterator[str]:
    """The directories above a name, the deepest first."""
    while name := name.rpartition("/")[0]:
        yield name


def _bad(where: str, name: str, wrong: str) -> errors.BadListing:
    message = f"{where} lists {name!r}, which no file below a directory can be called: {wrong}; nothing was written"
    todo = f"leave it out with the pattern exclude={glob.escape(name)!r}"
    return errors.BadListing(f"{message}; {todo}", url=where, name=name)


# -- the files of a local directory --------------------------------------------------------------------------------------

TICK = 0.02  # seconds: two changes of a file within this time may leave the same modification time


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file at the time of the scan. ``name``: relative to the directory. ``seen``: attributes that change when the file does."""

    name: str
    path: str
    size: int
    seen: tuple[int, ...]

    @classmethod
    def of(cls, name: str, path: str) -> LocalFile:
        status = os.stat(path)
        return cls(name, path, status.st_size, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))

    @classmethod
    def scanned(cls, name: str, path: str) -> LocalFile:
        """The file that a scan found. Raises `SourceChanged` if it was removed since."""
        try:
            return cls.of(name, path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise errors.SourceChanged.of(path) from error

    def check(self) -> None:
        """Raises `SourceChanged` if the file has changed since the scan."""
        try:
            same = LocalFile.of(self.name, self.path).seen == self.seen
        except (FileNotFoundError, NotADirectoryError):
            same = False
        if not same:
            raise errors.SourceChanged.of(self.path)

    def digest(self) -> str:
        """Its checksum in hex. Raises `SourceChanged`, OSError."""
        self.check()
        fd = host.open_fd(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            digest = checksum_of(fd).hex()
        finally:
            os.close(fd)
        self.check()
        return digest


def files_below(folder: str) -> list[LocalFile]:
    """All files of a directory, in order of name. Follows symbolic links to files.

    Raises `ConfigError` for what cannot be uploaded: a link to a directory or to nothing, a socket, a pipe, a device, a name that
    readers refuse, an empty directory; `SourceChanged` if a file is removed during the scan; `NotFound`, `NotADirectory` or
    `AccessDenied` for a directory that cannot be read."""
    if not os.path.isdir(folder):
        kind, what = (errors.NotADirectory, "this is a file") if os.path.exists(folder) else (errors.NotFound, "there is no such directory")
        raise kind(f"{folder} cannot be uploaded: {what}", url=folder)
    files = sorted((LocalFile.scanned(name, path) for name, path in interrupts.paced(_walk(folder, ""))), key=lambda file: file.name)
    if not files:
        raise _refused(folder, "it holds no file")
    try:
        check_names(folder, [file.name for file in files])
    except errors.BadListing as error:
        raise _refused(folder, f"{error.name!r} is a name that readers refuse") from error
    if max(file.seen[-1] for file in files) > time.time_ns() - TICK * 1e9:
        greenlets.sleep(TICK)
        return [LocalFile.scanned(file.name, file.path) for file in interrupts.paced(files)]
    return files


def _walk(folder: str, above: str) -> Iterator[tuple[str, str]]:
    try:
        scan = os.scandir(folder)
    except PermissionError as error:
        raise errors.AccessDenied(f"{folder} cannot be uploaded: {error.strerror}", url=folder) from error
    except (FileNotFoundError, NotADirectoryError) as error:  # it was removed since its parent was listed
        raise errors.SourceChanged.of(folder) from error
    with scan as entries:
        for entry in entries:
            name = above + entry.name
            if is_unfinished(entry.name) or name == MARK:
                continue
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, name + "/")
            elif not _is_file(entry):
                raise _refused(entry.path, _kind(entry))
            else:
                yield name, entry.path


def _is_file(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_file()
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return False  # a link that leads to itself


def _kind(entry: os.DirEntry[str]) -> str:
    if not entry.is_symlink():
        return "this is no file: a socket, a pipe or a device"
    return "a symbolic link to a directory is not followed" if os.path.isdir(entry.path) else "this symbolic link leads to no file"


def _refused(path: str, why: str) -> errors.ConfigError:
    return errors.ConfigError(f"{path} cannot be uploaded: {why}", name="local_dir", value=path)
