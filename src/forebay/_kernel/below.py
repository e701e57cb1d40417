"""Files below one directory, reached without following symbolic links.

One system call (``openat2``) does it where the kernel has it. Otherwise, and where that call meets a link, the path is walked from the
top: each directory is opened from the descriptor of its parent, and the file is named in the last one. No descriptor outlives its call: so
where it matters which directory the path of the top leads to, a call looks at the one that it opens (`Below.kept_to`)."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import stat
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import TracebackType
from typing import NamedTuple

from forebay._kernel import host
from forebay._kernel.host import Path
from forebay._logs import logger
from forebay.errors import CacheFault

log = logger("forebay.kernel")

_OPENAT2, _HERE, _NO_LINKS = 437, -100, 0x04  # the same numbers on all machines
_openat2 = ctypes.CDLL(None, use_errno=True).syscall
_openat2.restype = ctypes.c_long
_openat2.argtypes = [ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t]


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


@functools.cache
def _how(flags: int, mode: int = 0) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(bytes(_How(flags, mode, _NO_LINKS)), ctypes.sizeof(_How))


@functools.cache
def _knows_openat2() -> bool:
    """Whether the kernel has that call, and no sandbox forbids it."""
    fd: int = _openat2(_OPENAT2, _HERE, b"/", _how(os.O_PATH | os.O_CLOEXEC), ctypes.sizeof(_How))
    if fd >= 0:
        os.close(fd)
    return fd >= 0


def _open_at_once(top: str, names: Sequence[str], flags: int, mode: int = 0, at: int = _HERE) -> int:
    """Return a descriptor of what lies below the top, reached without symbolic links; negative where this call cannot tell. ``at``: a
    descriptor of the top, if it is open; else no link may lead to the top, either. Raises FileNotFoundError: no link was met before the
    missing component."""
    if not _knows_openat2():
        return -1
    path = "/".join(names if at != _HERE else (top.rstrip("/"), *names))
    fd: int = _openat2(_OPENAT2, at, os.fsencode(path), _how(flags, mode), ctypes.sizeof(_How))
    if fd < 0 and ctypes.get_errno() == errno.ENOENT:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/".join((top.rstrip("/"), *names)))
    return host.not_standard(fd)


# Of `open_quickly`. Arguments that are converted once, and a function that converts none: the call takes as long as `os.open`.
_READING = _how(os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
_openat2_converted = ctypes.CDLL(None)["syscall"]
_NUMBER, _FROM = ctypes.c_long.from_param(_OPENAT2), ctypes.c_int.from_param(_HERE)
_HOW, _HOW_SIZE = ctypes.byref(_READING), ctypes.c_size_t.from_param(ctypes.sizeof(_How))
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


def open_quickly(path: str) -> int:
    """A descriptor to read a file with; negative where there is none, or one system call cannot open it without following a link. Its
    caller checks that it is a plain file."""
    fd: int = _openat2_converted(_NUMBER, _FROM, path.encode(_ENCODING, _ERRORS), _HOW, _HOW_SIZE)
    return fd if fd > 2 else host.not_standard(fd)


_STEP = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_IN_THE_WAY = "a symbolic link, or a file, stands where a directory should be, and is not followed"
_NO_FILE = "it is not a plain file: remove it"
_LIST = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_LONGEST, _LONGEST_PART = 2048, 255  # bytes: the path of the top takes a part of PATH_MAX


def why_not_below(name: str) -> str:
    """Why no file below a directory can have this relative name; "" if one can."""
    if name.startswith("/"):
        return "it is absolute"
    parts = name.split("/")
    if ".." in parts or "." in parts:
        return "it has . or .. in it"
    if "" in parts:
        return "a part of it is empty"
    if _CONTROL.search(name):
        return "it has a control character in it"
    try:
        sizes = [len(part.encode("utf-8", "surrogateescape")) for part in parts]
    except UnicodeEncodeError:
        return "it has half a character in it"
    return "it is too long for a file" if max(sizes) > _LONGEST_PART or sum(sizes) + len(sizes) > _LONGEST else ""


class NoPlainFile(OSError):
    """A pipe, directory, socket or device stands where a file should."""


class LinkInTheWay(OSError):
    """A symbolic link, or a file, stands where a directory should: nothing below it is Forebay's."""


class TopReplaced(OSError):
    """Another directory has the path of the top by now, or none."""


class _Place(NamedTuple):
    """See `Below.kept_to`."""

    device: int
    inode: int
    error: type[TopReplaced]


class _Walk:
    """A descriptor of a directory below the top, for the length of a ``with``."""

    __slots__ = ("_fd", "_flags", "_kept", "_names", "_top")

    def __init__(self, top: str, names: list[str], flags: int, kept: _Place | None = None) -> None:
        self._top, self._names, self._flags, self._kept, self._fd = top, names, flags, kept, -1

    def __enter__(self) -> int:
        if self._kept is not None:
            self._fd = self._from_top(self._kept)
        elif not self._names:  # the top itself may be reached through links: its owner chose it
            self._fd = host.open_fd(self._top, self._flags & ~os.O_NOFOLLOW)
        else:
            self._fd = _open_at_once(self._top, self._names, self._flags)
            if self._fd < 0:
                self._fd = self._step_by_step(-1)
        return self._fd

    def _from_top(self, kept: _Place) -> int:
        try:
            top = host.open_fd(self._top, (_STEP if self._names else self._flags) & ~os.O_NOFOLLOW)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise kept.error(f"{self._top} was deleted or moved: {error.strerror}") from None
        try:
            there = os.fstat(top)
            if (there.st_dev, there.st_ino) != kept[:2]:
                raise kept.error(f"{self._top} was replaced: another directory has its path")
            if not self._names:
                top, fd = -1, top
                return fd
            fd = _open_at_once(self._top, self._names, self._flags, at=top)
            return fd if fd >= 0 else self._step_by_step(top)
        finally:
            if top >= 0:
                os.close(top)

    def _step_by_step(self, top: int) -> int:
        """``top``: a descriptor of the top, if it is open."""
        fd, path, left = -1, self._top.rstrip("/"), len(self._names)
        for name in self._names:
            above, path, left = fd, f"{path}/{name}", left - 1
            try:
                flags = self._flags if not left else _STEP
                if above >= 0 or top >= 0:
                    fd = host.open_fd(name, flags, dir_fd=above if above >= 0 else top)
                else:
                    fd = host.open_fd(path, flags)
            except NotADirectoryError:
                raise LinkInTheWay(errno.ELOOP, f"{_IN_THE_WAY}: remove it", path) from None
            finally:
                if above >= 0:
                    os.close(above)
        return fd

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.close(self._fd)


class Below:
    """The files below ``top``. Holds no descriptor: picklable, usable after a fork and from any thread.

    Methods raise `LinkInTheWay` where a link or a file stands where a directory should be, ValueError for a path that is not below
    ``top``, and OSError."""

    def __init__(self, top: Path, kept: _Place | None = None) -> None:
        self.top, self._kept = os.fspath(top), kept
        self._head = "" if self.top == "." else self.top if self.top.endswith("/") else f"{self.top}/"

    def _names(self, path: Path) -> list[str]:
        text = os.fspath(path)
        if text == self.top:
            return []
        names = text.removeprefix(self._head).split("/")
        if not text.startswith(self._head) or ".." in names or "" in names or "." in names:
            raise ValueError(f"{text!r} does not lie below {self.top}")
        return names

    def kept_to(self, directory: os.stat_result, error: type[TopReplaced]) -> Below:
        """The same files, in this directory only: where the path of the top leads to another one, or to none, all methods raise ``error``,
        except `open` for reading, whose callers prove what they find. ``directory``: the state of the top."""
        return Below(self.top, _Place(directory.st_dev, directory.st_ino, error))

    def has_place_of(self, other: Below) -> bool:
        """Whether both are kept to the same directory, or neither to any."""
        return self._kept == other._kept

    def directory(self, path: Path) -> _Walk:
        """A descriptor of a directory, to name files in: ``with files.directory(path) as fd``."""
        return _Walk(self.top, self._names(path), _STEP, self._kept)

    def listing(self, path: Path) -> _Walk:
        """`directory`, for `os.listdir` and `os.scandir`."""
        return _Walk(self.top, self._names(path), _LIST, self._kept)

    def _parent(self, path: Path) -> _Walk:
        return _Walk(self.top, self._names(path)[:-1], _STEP, self._kept)

    # -- looking ---------------------------------------------------------------------------------------------------

    def open(self, path: Path, flags: int = os.O_RDONLY) -> int:
        """Return a descriptor of an existing file; opening never blocks. Raises `NoPlainFile` if it is not a plain file."""
        try:
            fd = self._open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in (errno.EISDIR, errno.ENXIO):  # a directory, a socket
                raise NoPlainFile(errno.EINVAL, _NO_FILE, os.fspath(path)) from None
            raise
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise NoPlainFile(errno.EINVAL, _NO_FILE, os.fspath(path))
        return fd

    def _open(self, path: Path, flags: int, mode: int = 0) -> int:
        names, kept = self._names(path), self._kept if flags & os.O_ACCMODE else None
        if kept is None:
            fd = _open_at_once(self.top, names, flags, mode)
        else:
            with _Walk(self.top, [], _STEP, kept) as top:
                fd = _open_at_once(self.top, names, flags, mode, at=top)
        if fd >= 0:
            return fd
        with _Walk(self.top, names[:-1], _STEP, kept) as directory:
            return host.open_fd(names[-1], flags, mode, dir_fd=directory)

    def lstat(self, path: Path) -> os.stat_result:
        with self._parent(path) as fd:
            return os.stat(os.path.basename(path), dir_fd=fd, follow_symlinks=False)

    def names_in(self, path: Path) -> list[str]:
        """The names in a directory; none where there is no directory."""
        try:
            with self.listing(path) as fd:
                return os.listdir(fd)
        except (FileNotFoundError, LinkInTheWay):
            return []

    def is_directory(self, path: Path) -> bool:
        """Whether this is a directory, reached through directories only."""
        try:
            with self.directory(path):
                return True
        except (FileNotFoundError, LinkInTheWay):
            return False

    # -- changing --------------------------------------------------------------------------------------------------

    def create(self, path: Path, mode: int, *, masked: bool = False) -> int:
        """See `host.create`."""
        host.step("create", path)
        fd = self._open(path, host.CREATE, mode)
        return fd if masked else host.with_mode(fd, mode)

    def open_write(self, path: Path) -> int:
        """See `host.open_write`."""
        with self._parent(path) as fd:
            return host.open_write(path, fd)

    def mkdir(self, path: Path, mode: int) -> bool:
        """See `host.mkdir`."""
        with self._parent(path) as fd:
            return host.mkdir(path, mode, fd)

    def chmod(self, path: Path, mode: int) -> None:
        """See `host.chmod`."""
        with self._parent(path) as fd:
            host.chmod(path, mode, fd)

    def rename(self, old: Path, new: Path) -> None:
        """See `host.rename`."""
        with self._parent(old) as old_directory, self._parent(new) as new_directory:
            host.rename(old, new, old_directory, new_directory)

    def link(self, old: Path, new: Path, directory: int | None = None) -> None:
        """See `host.link`. ``directory``: a descriptor of that of ``new``, if it is open."""
        with self._parent(old) as above, nullcontext(directory) if directory is not None else self._parent(new) as new_directory:
            host.link(old, new, above, new_directory)

    def unlink(self, path: Path) -> bool:
        """Remove a name. Returns False if it was missing, or if a link is in the way: the file behind the link is not Forebay's."""
        try:
            with self._parent(path) as fd:
                return host.unlink(path, fd)
        except FileNotFoundError:
            return False
        except LinkInTheWay as error:
            log.warning("%s", str(error))
            return False

    def make_way(self, path: Path) -> None:
        """Remove a file, pipe, link or empty directory that stands where one of our files should be. Raises `CacheFault` where a directory
        is not empty: another program keeps files there."""
        try:
            self.unlink(path)
        except IsADirectoryError:
            try:
                self.rmdir(path)
            except FileNotFoundError:
                return  # another process was first
            except TopReplaced:
                raise
            except OSError as error:
                raise CacheFault(f"{os.fspath(path)}: a directory is in the way: remove it ({error.strerror})") from error

    def rmdir(self, path: Path) -> None:
        """See `host.rmdir`."""
        with self._parent(path) as fd:
            host.rmdir(path, fd)

    def remove_whole(self, path: Path) -> bool:
        """Remove a file, or a directory with all that is in it, however deep; False if it was missing, as in `unlink`."""
        try:
            with self._parent(path) as fd:
                status = os.stat(os.path.basename(path), dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except LinkInTheWay as error:
            log.warning("%s", str(error))
            return False
        if not stat.S_ISDIR(status.st_mode):
            return self.unlink(path)
        left = [(os.fspath(path), False)]
        while left:
            directory, is_empty = left.pop()
            if not is_empty and (below := self._empty(directory)):
                left += [(directory, True), *((name, False) for name in below)]
                continue
            with self._parent(directory) as fd:
                host.rmdir(directory, fd)
        return True

    def _empty(self, directory: str) -> list[str]:
        """Remove the files of a directory; returns the names of its directories."""
        status = self.lstat(directory)
        if status.st_mode & stat.S_IRWXU != stat.S_IRWXU and status.st_uid == os.geteuid():
            self.chmod(directory, 0o700)
        below = []
        with self.listing(directory) as fd, os.scandir(fd) as entries:
            for entry in list(entries):
                if entry.is_dir(follow_symlinks=False):
                    below.append(f"{directory}/{entry.name}")
                else:
                    host.unlink(f"{directory}/{entry.name}", fd)
        return below
