"""``file://`` and paths."""

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
from forebay._model import Buffer, CloningSink, Content, ObjectInfo, Sink, Span, Transfer
from forebay.remote.redaction import redacted
from forebay.remote.urls import canonical, local_path

log = logger("forebay.remote.local")

BLOCK = 1 << 20
UNFINISHED = ".forebay-part"
"""How the name of a file ends (and it begins with a dot) that is being written."""
STALE = 3600.0  # seconds
_KINDS: dict[int, type[errors.RemoteError]] = {
    errno.ENOENT: errors.NotFound, errno.ENOTDIR: errors.NotFound, errno.EACCES: errors.AccessDenied, errno.EPERM: errors.AccessDenied,
}  # fmt: skip


def is_unfinished(name: str) -> bool:
    """Whether a file is one that is being written, or was when its writer died."""
    return name.startswith(".") and name.endswith(UNFINISHED)


def sweep(folder: str) -> None:
    """Remove below a directory what writers left there that died: what nobody has written to for an hour, as far as the clock can tell,
    nor has locked."""
    old = time.time() - STALE
    for place, _, names in os.walk(folder):
        for path in (os.path.join(place, name) for name in names if is_unfinished(name)):
            try:
                found = os.lstat(path)
                if stat.S_ISREG(found.st_mode) and found.st_mtime < old and not _is_being_written(path):
                    os.unlink(path)
            except OSError as error:  # it is gone, or another's
                log.debug("%s is left alone: %s", path, error)


def _is_being_written(path: str) -> bool:
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
    """Remove the directories below ``folder`` that are empty, of those in which files of these names were."""
    for name in names:
        while name := os.path.dirname(name):
            try:
                os.rmdir(os.path.join(folder, name))
            except OSError:  # something is in it, or it is gone
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

    def fetch(self, url: str, sink: Sink) -> Transfer:
        """See `Remote.fetch`. Raises `RemoteChanged` if the file is written to meanwhile."""
        fd = _open(url)
        try:
            info = _info(url, fd)
            transfer = Transfer(info=info)
            spans = sink.begin(info)
            transfer.resumed = (info.size or 0) - sum(span.length for span in spans)
            if not (transfer.resumed == 0 and isinstance(sink, CloningSink) and sink.clone(fd)):
                buffer = memoryview(bytearray(BLOCK))
                for span in spans:
                    _copy(url, fd, span, buffer, sink, transfer)
            if _info(url, fd) != info:
                raise _changed(url)
        finally:
            os.close(fd)
        return transfer

    def read(self, url: str, span: Span, *, validator: str | None = None, info: ObjectInfo | None = None) -> bytes:
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
        """All files whose path begins with that of ``url``, in order of path; symbolic links to directories are not followed.

        What a writer has not finished is none of them."""
        prefix = _path(url) + ("/" if os.fspath(url).endswith("/") and _path(url) != "/" else "")
        yield from _walk(os.path.dirname(prefix), prefix)

    def write(
        self, url: str, source: Content, *, if_none_match: str | None = None, if_match: str | None = None,
        on_sent: Callable[[int], None] | None = None, resume: bool = False,
    ) -> ObjectInfo:  # fmt: skip
        """See `Remote.write`. Makes directories; the file is on the disk before it has its name.

        ``if_none_match`` holds whoever else writes. ``if_match`` does not quite: another writer may come between our look and the rename,
        which cannot compare. `Unsupported` where the file system has no hard links, for ``if_none_match`` only."""
        path = _path(url)
        with _reading(source) as origin, _told(url):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with _part(path) as (part, fd):
                _fill(fd, origin, on_sent)
                if origin.size != os.fstat(fd).st_size:
                    raise errors.SourceChanged.of(origin.name)
                os.fsync(fd)
                _give_name(url, part, path, if_none_match, if_match)
                return _info(url, fd)

    def delete(self, url: str) -> None:
        """See `Remote.delete`. The directory stays, though it be empty."""
        with _told(url), suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(_path(url))


def _path(url: str) -> str:
    path = local_path(url)
    if path is None:
        raise errors.ConfigError(f"{_shown(url)} is no local file", url=_shown(url))
    return path


def _shown(url: str) -> str:
    return redacted(canonical(url))


@contextmanager
def _told(url: str) -> Iterator[None]:
    """What the operating system says becomes a `RemoteError`, with its number."""
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
    """Raises `NotFound`, `AccessDenied`, or `RemoteError` for what is no regular file."""
    path = _path(url)
    with _told(url):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise errors.RemoteError(f"{_shown(url)}: not a regular file", url=_shown(url))
    return fd


def _info(url: str, fd: int) -> ObjectInfo:
    found = os.fstat(fd)
    return ObjectInfo(url, found.st_size, f"{found.st_mtime_ns}-{found.st_size}-{found.st_ino}", strong=True, modified=found.st_mtime)


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
            # a directory sorts as its files will: with the slash
            found = sorted((entry.path + "/" if entry.is_dir(follow_symlinks=False) else entry.path, entry) for entry in entries)
    except FileNotFoundError:
        return
    for name, entry in found:
        if is_unfinished(entry.name):
            continue
        if not (name.startswith(prefix) or (name.endswith("/") and prefix.startswith(name))):
            continue
        if name.endswith("/"):
            yield from _walk(entry.path, prefix)
        elif entry.is_file():
            status = entry.stat()
            validator = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
            yield ObjectInfo(canonical(entry.path), status.st_size, validator, strong=True, modified=status.st_mtime)


# -- writing -----------------------------------------------------------------------------------------------------------


@contextmanager
def _part(path: str) -> Iterator[tuple[str, int]]:
    """A new file beside ``path``, under a name that no listing shows, and its descriptor. The name is gone at the end."""
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


class _Origin(NamedTuple):
    """What is written. ``fd``: of the file ``name``; None: ``view`` has the bytes."""

    size: int
    name: str = ""
    fd: int | None = None
    view: memoryview = memoryview(b"")

    def block(self, at: int) -> Buffer:
        return self.view[at : at + BLOCK] if self.fd is None else os.pread(self.fd, BLOCK, at)


@contextmanager
def _reading(source: Content) -> Iterator[_Origin]:
    if not isinstance(source, (str, os.PathLike)):
        view = memoryview(source).cast("B")
        yield _Origin(len(view), view=view)
        return
    fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _Origin(os.fstat(fd).st_size, os.fspath(source), fd)
    finally:
        os.close(fd)


def _fill(fd: int, origin: _Origin, on_sent: Callable[[int], None] | None) -> None:
    at = origin.size if origin.fd is not None and host.clone(origin.fd, fd) else 0
    while block := origin.block(at):
        host.pwrite(fd, block, at)
        at += len(block)
        if on_sent is not None:
            on_sent(at)


def _give_name(url: str, part: str, path: str, if_none_match: str | None, if_match: str | None) -> None:
    """Give the finished file ``part`` its name, if that is as it should be. Raises `Conflict`."""
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
    return errors.Conflict(f"{canonical(url)}: it is there already, or another version of it: nothing was written", url=canonical(url))


def _changed(url: str) -> errors.RemoteChanged:
    return errors.RemoteChanged(f"{canonical(url)} was written to while it was read", url=canonical(url))
