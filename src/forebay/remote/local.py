"""Files of this host: ``file://`` URLs and paths."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forebay import errors
from forebay._kernel import host, interrupts, locks
from forebay._logs import logger
from forebay._model import Buffer, Content, ObjectInfo, Sink, Span, Transfer, can_clone
from forebay.remote.urls import canonical, local_path, redacted

log = logger("forebay.remote.local")

BLOCK = 1 << 20
UNFINISHED = ".forebay-part"
"""The end of the name of a file that is being written; it begins with a dot."""
STALE = 3600.0  # seconds without a write, after which an unlocked unfinished file is removed
_KINDS: dict[int, type[errors.RemoteError]] = {
    errno.ENOENT: errors.NotFound, errno.ENOTDIR: errors.NotFound, errno.EACCES: errors.AccessDenied, errno.EPERM: errors.AccessDenied,
}  # fmt: skip
_NO_FILE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP})


def is_unfinished(name: str) -> bool:
    """Whether ``name`` is that of a file that is being written, or was when its writer died."""
    return name.startswith(".") and name.endswith(UNFINISHED)


def sweep(folder: str) -> None:
    """Remove the unfinished files below a directory whose writers died: those that no process has locked, and that have not been written
    to for an hour by this host's clock."""
    oldest = time.time() - STALE
    for directory, _, names in os.walk(folder):
        for path in (os.path.join(directory, name) for name in names if is_unfinished(name)):
            try:
                status = os.lstat(path)
                if stat.S_ISREG(status.st_mode) and status.st_mtime < oldest and not _is_locked(path):
                    os.unlink(path)
            except OSError as error:  # it is gone, or belongs to another user
                log.debug("%s is left alone: %s", path, error)


def _is_locked(path: str) -> bool:
    """Whether a living process of this host has the file locked: the clock may have jumped since it wrote last."""
    try:
        fd = host.open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return False
    try:
        return locks.locked_at(fd, 0) is not None
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(fd)


def prune(folder: str, names: Iterable[str]) -> None:
    """Remove the empty directories below ``folder`` among those that contained the files ``names`` (relative paths)."""
    for name in names:
        while name := os.path.dirname(name):
            try:
                os.rmdir(os.path.join(folder, name))
            except OSError:  # it is not empty, or it is gone
                break


class LocalRemote:
    """A `Remote` for files of this host. Its validator is ``mtime_ns-size-inode``. Callable from any thread and after a fork."""

    def stat(self, url: str, *, known: str | None = None) -> ObjectInfo | None:
        """See `Remote.stat`."""
        with _reading(url) as fd:
            info = _info(url, os.fstat(fd))
        return None if info.validator == known else info

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`. Raises `RemoteChanged` if the file is written to while it is read."""
        with _reading(url) as fd:
            info = _info(url, os.fstat(fd))
            transfer = Transfer(info=info)
            spans = sink.begin(info)
            transfer.resumed = (info.size or 0) - sum(span.length for span in spans)
            if not (transfer.resumed == 0 and can_clone(sink) and sink.clone(fd)):
                buffer = memoryview(bytearray(BLOCK))
                for span in spans:
                    at = span.start
                    while at < span.end:
                        count = os.preadv(fd, [buffer[: span.end - at]], at)
                        if count == 0:
                            raise _changed(url)
                        sink.write(at, buffer[:count])
                        at += count
                        transfer.received += count
            if _info(url, os.fstat(fd)) != info:
                raise _changed(url)
        return transfer

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """See `Remote.read`."""
        validator = validator if info is None else info.validator
        with _reading(url) as fd:
            data = b""
            while len(data) < span.length and (block := os.pread(fd, span.length - len(data), span.start + len(data))):
                data += block
            if validator is not None and _info(url, os.fstat(fd)).validator != validator:
                raise _changed(url)
        return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All files whose path begins with that of ``url``, in order of path, without unfinished ones and those that are removed meanwhile;
        and the directories without any file or directory. Follows symbolic links, except those to a directory that they lie below. Raises
        `AccessDenied` or another `RemoteError`."""
        prefix = _path(url) + ("/" if os.fspath(url).endswith("/") and _path(url) != "/" else "")
        yield from _walk(os.path.dirname(prefix), prefix)

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. Creates directories; the file is on the disk before it gets its name.

        ``if_none_match`` holds against every other writer. ``if_match`` leaves a gap: another process may write between the check and the
        rename, which cannot compare. `Unsupported` where the file system has no hard links, for ``if_none_match`` only."""
        path = _path(url)
        with _opened(source) as (size, source_fd, block_at), _os_errors(url):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with staged(path) as (part, fd):
                at = size if source_fd is not None and host.clone(source_fd, fd) else 0
                while block := block_at(at):
                    interrupts.point()
                    host.pwrite(fd, block, at)
                    at += len(block)
                    if on_sent is not None:
                        on_sent(at)
                if size != os.fstat(fd).st_size:
                    raise errors.SourceChanged.of(source)
                os.fsync(fd)
                self._publish(url, part, path, if_none_match, if_match)
                return _info(url, os.fstat(fd))

    def _publish(self, url: str, part: str, path: str, if_none_match: str | None, if_match: str | None) -> None:
        """Give the finished file ``part`` its name, if the conditions hold. Raises `Conflict`."""
        if if_none_match is not None:
            try:
                os.link(part, path)
            except FileExistsError:
                raise errors.Conflict.of(canonical(url)) from None
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                    raise
                key = canonical(url)
                raise errors.Unsupported(f"{key}: its file system has no hard links: {error.strerror}", url=key) from error
            return
        try:
            is_other = if_match is not None and self.stat(url, known=if_match) is not None
        except errors.NotFound:
            is_other = True
        if is_other:
            raise errors.Conflict.of(canonical(url))
        os.rename(part, path)

    def delete(self, url: str) -> None:
        """See `Remote.delete`. The directory stays, even if it is empty."""
        with _os_errors(url), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(_path(url))


def _path(url: str) -> str:
    path = local_path(url)
    if path is None:
        raise errors.ConfigError(f"{_shown(url)} is not a local file", url=_shown(url))
    return path


def _shown(url: str) -> str:
    return redacted(canonical(url))


@contextmanager
def _os_errors(url: str) -> Iterator[None]:
    """Translate errors of the operating system to `RemoteError`, with their ``errno``."""
    try:
        yield
    except errors.ForebayError:
        raise
    except OSError as error:
        kind = _KINDS.get(error.errno or 0, errors.RemoteError)
        raised = kind(f"{_shown(url)}: {error.strerror}", url=_shown(url))
        raised.errno = error.errno
        raise raised from error


@contextmanager
def _reading(url: str) -> Iterator[int]:
    """A descriptor of the file. Raises `NotFound`, `AccessDenied`, or `RemoteError` if it is not a regular file."""
    path = _path(url)
    with _os_errors(url):
        fd = host.open_fd(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            found = "a directory, not a file (see Cache.directory)" if stat.S_ISDIR(mode) else "not a regular file"
            raise errors.RemoteError(f"{_shown(url)}: {found}", url=_shown(url))
        yield fd
    finally:
        os.close(fd)


def _info(url: str, status: os.stat_result) -> ObjectInfo:
    validator = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
    return ObjectInfo(url, status.st_size, validator, strong=True, modified=status.st_mtime)


def _walk(folder: str, prefix: str) -> Iterator[ObjectInfo]:
    try:
        with _os_errors(folder), os.scandir(folder) as entries:
            # a directory is sorted with a slash at its end, as its files are
            every = interrupts.paced(entries)
            known = (entry for entry in every if not is_unfinished(entry.name))
            paths = sorted((entry.path + "/" if _is_folder(entry) else entry.path, entry) for entry in known)
    except errors.NotFound:  # perhaps since its parent was listed
        return
    is_empty = f"{folder}/".startswith(prefix)
    for name, entry in paths:
        if not (name.startswith(prefix) or (name.endswith("/") and prefix.startswith(name))):
            continue
        if name.endswith("/"):
            is_empty = False
            yield from _walk(entry.path, prefix)
        elif (status := _status_of(entry)) is not None:
            is_empty = False
            yield _info(canonical(entry.path), status)
    if is_empty:
        yield ObjectInfo(canonical(folder) + "/", 0)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a directory, or a link to one that it does not lie below. Its files are listed under the name of the link."""
    if not entry.is_symlink():
        return entry.is_dir()
    try:
        target = os.stat(entry.path)
        above = (os.stat(path) for path in Path(entry.path).parents)
        return stat.S_ISDIR(target.st_mode) and not any(os.path.samestat(target, each) for each in above)
    except OSError:
        return False  # it leads to nothing


def _status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """None if it is no file, or was removed since its directory was read. Raises `AccessDenied`, `RemoteError`."""
    try:
        with _os_errors(entry.path):
            status = entry.stat()
    except errors.RemoteError as error:
        if error.errno in _NO_FILE:
            return None
        raise
    return status if stat.S_ISREG(status.st_mode) else None


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """A new file in the directory of ``path``, under a name that cannot be guessed and that no listing shows, and its descriptor. The
    caller gives the file the name ``path``; its first name is removed at the end."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
    fd = host.open_fd(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            locks.take(fd, 0)
        yield part, fd
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(part)


@contextmanager
def _opened(source: Content) -> Iterator[tuple[int, int | None, Callable[[int], Buffer]]]:
    """The size of a source, its descriptor (None: it is in memory), and a function that returns the block at an offset."""
    if not isinstance(source, (str, os.PathLike)):
        view = memoryview(source).cast("B")
        yield len(view), None, lambda at: view[at : at + BLOCK]
        return
    fd = host.open_fd(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield os.fstat(fd).st_size, fd, lambda at: os.pread(fd, BLOCK, at)
    finally:
        os.close(fd)


def _changed(url: str) -> errors.RemoteChanged:
    return errors.RemoteChanged(f"{canonical(url)} was written to while being read", url=canonical(url))
