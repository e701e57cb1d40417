"""Files of this host: ``file://`` URLs and paths."""

from __future__ import annotations

import errno
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from forebay import errors
from forebay._kernel import host, locks
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


def is_unfinished(name: str) -> bool:
    """Whether ``name`` is that of a file that is being written, or was when its writer died."""
    return name.startswith(".") and name.endswith(UNFINISHED)


def sweep(folder: str) -> None:
    """Remove the unfinished files below a directory whose writers died: those that nothing has locked, and nothing has written to for an
    hour by this host's clock."""
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
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
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
        fd = _open(url)
        try:
            info = _info(url, fd)
        finally:
            os.close(fd)
        return None if info.validator == known else info

    def fetch(self, url: str, sink: Sink, *, listed: ObjectInfo | None = None) -> Transfer:
        """See `Remote.fetch`. Raises `RemoteChanged` if the file is written to meanwhile."""
        fd = _open(url)
        try:
            info = _info(url, fd)
            transfer = Transfer(info=info)
            spans = sink.begin(info)
            transfer.resumed = (info.size or 0) - sum(span.length for span in spans)
            if not (transfer.resumed == 0 and can_clone(sink) and sink.clone(fd)):
                buffer = memoryview(bytearray(BLOCK))
                for span in spans:
                    _copy(url, fd, span, buffer, sink, transfer)
            if _info(url, fd) != info:
                raise _changed(url)
        finally:
            os.close(fd)
        return transfer

    def read(
        self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None, exact: bool = False
    ) -> bytes:  # fmt: skip
        """See `Remote.read`."""
        validator = validator if info is None else info.validator
        fd = _open(url)
        try:
            data = b"".join(_blocks(fd, span))
            if validator is not None and _info(url, fd).validator != validator:
                raise _changed(url)
        finally:
            os.close(fd)
        return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All files whose path begins with that of ``url``, in order of path, without unfinished ones. Symbolic links to directories are
        not followed."""
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
        with _opened(source) as content, _os_errors(url):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with staged(path) as (part, fd):
                _copy_to(fd, content, on_sent)
                if content.size != os.fstat(fd).st_size:
                    raise errors.SourceChanged.of(content.name)
                os.fsync(fd)
                _publish(url, part, path, if_none_match, if_match)
                return _info(url, fd)

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


def _open(url: str) -> int:
    """Raises `NotFound`, `AccessDenied`, or `RemoteError` if it is no regular file."""
    path = _path(url)
    with _os_errors(url):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise errors.RemoteError(f"{_shown(url)}: not a regular file", url=_shown(url))
    return fd


def _info(url: str, fd: int) -> ObjectInfo:
    return _info_of(url, os.fstat(fd))


def _info_of(url: str, status: os.stat_result) -> ObjectInfo:
    validator = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
    return ObjectInfo(url, status.st_size, validator, strong=True, modified=status.st_mtime)


def _copy(url: str, fd: int, span: Span, buffer: memoryview, sink: Sink, transfer: Transfer) -> None:
    at = span.start
    while at < span.end:
        count = os.preadv(fd, [buffer[: span.end - at]], at)
        if count == 0:
            raise _changed(url)
        sink.write(at, buffer[:count])
        at += count
        transfer.received += count


def _blocks(fd: int, span: Span) -> Iterator[bytes]:
    at = span.start
    while at < span.end and (block := os.pread(fd, span.end - at, at)):
        at += len(block)
        yield block


def _walk(folder: str, prefix: str) -> Iterator[ObjectInfo]:
    try:
        with os.scandir(folder) as entries:
            # a directory is sorted with a slash at its end, as its files are
            paths = sorted((entry.path + "/" if entry.is_dir(follow_symlinks=False) else entry.path, entry) for entry in entries)
    except FileNotFoundError:
        return
    for name, entry in paths:
        if is_unfinished(entry.name):
            continue
        if not (name.startswith(prefix) or (name.endswith("/") and prefix.startswith(name))):
            continue
        if name.endswith("/"):
            yield from _walk(entry.path, prefix)
        elif entry.is_file():
            yield _info_of(canonical(entry.path), entry.stat())


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def staged(path: str | os.PathLike[str]) -> Iterator[tuple[str, int]]:
    """A new file in the directory of ``path``, under a name that nobody can guess and no listing shows, and its descriptor. The caller
    gives the file the name ``path``; its first name is removed at the end."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}{UNFINISHED}")
    fd = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            locks.take(fd, 0)
        yield part, fd
    finally:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(part)


class _OpenContent(NamedTuple):
    """Content to be written. ``fd``: of the file ``name``; None: ``view`` holds the bytes."""

    size: int
    name: str = ""
    fd: int | None = None
    view: memoryview = memoryview(b"")

    def block(self, at: int) -> Buffer:
        return self.view[at : at + BLOCK] if self.fd is None else os.pread(self.fd, BLOCK, at)


@contextmanager
def _opened(source: Content) -> Iterator[_OpenContent]:
    if not isinstance(source, (str, os.PathLike)):
        view = memoryview(source).cast("B")
        yield _OpenContent(len(view), view=view)
        return
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _OpenContent(os.fstat(fd).st_size, os.fspath(source), fd)
    finally:
        os.close(fd)


def _copy_to(fd: int, content: _OpenContent, on_sent: Callable[[int], None] | None) -> None:
    at = content.size if content.fd is not None and host.clone(content.fd, fd) else 0
    while block := content.block(at):
        host.pwrite(fd, block, at)
        at += len(block)
        if on_sent is not None:
            on_sent(at)


def _publish(url: str, part: str, path: str, if_none_match: str | None, if_match: str | None) -> None:
    """Give the finished file ``part`` its name, if the conditions hold. Raises `Conflict`."""
    if if_none_match is not None:
        try:
            os.link(part, path)
        except FileExistsError:
            raise _conflict(url) from None
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
                raise
            key = canonical(url)
            raise errors.Unsupported(f"{key}: its file system has no hard links: {error.strerror}", url=key) from error
        return
    if if_match is not None and _validator(url) != if_match:
        raise _conflict(url)
    os.rename(part, path)


def _validator(url: str) -> str | None:
    try:
        fd = _open(url)
    except errors.NotFound:
        return None
    try:
        return _info(url, fd).validator
    finally:
        os.close(fd)


def _conflict(url: str) -> errors.Conflict:
    return errors.Conflict(f"{canonical(url)}: it, or another version of it, already exists: nothing was written", url=canonical(url))


def _changed(url: str) -> errors.RemoteChanged:
    return errors.RemoteChanged(f"{canonical(url)} was written to while being read", url=canonical(url))
