"""``file://`` and paths."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from forebay import errors
from forebay._model import CloningSink, ObjectInfo, Sink, Span, Transfer
from forebay.remote.urls import canonical, local_path

BLOCK = 1 << 20
_KINDS: dict[int, type[errors.RemoteError]] = {
    errno.ENOENT: errors.NotFound, errno.ENOTDIR: errors.NotFound, errno.EACCES: errors.AccessDenied, errno.EPERM: errors.AccessDenied,
}  # fmt: skip


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

    def read(self, url: str, span: Span, *, validator: str | None = None) -> bytes:
        """See `Remote.read`."""
        fd = _open(url)
        try:
            data = b"".join(_blocks(fd, span))
            if validator is not None and _info(url, fd).validator != validator:
                raise _changed(url)
        finally:
            os.close(fd)
        return data

    def list(self, url: str) -> Iterator[ObjectInfo]:
        """All files whose path begins with that of ``url``, in order of path; symbolic links to directories are not followed."""
        prefix = _path(url) + ("/" if os.fspath(url).endswith("/") and _path(url) != "/" else "")
        yield from _walk(os.path.dirname(prefix), prefix)


def _path(url: str) -> str:
    path = local_path(url)
    if path is None:
        raise errors.ConfigError(f"{canonical(url)} is no local file", url=canonical(url))
    return path


def _open(url: str) -> int:
    """Raises `NotFound`, `AccessDenied`, or `RemoteError` for what is no regular file."""
    path = _path(url)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except OSError as error:
        kind = _KINDS.get(error.errno or 0, errors.RemoteError)
        raise kind(f"{canonical(url)}: {error.strerror}", url=canonical(url)) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise errors.RemoteError(f"{canonical(url)}: not a regular file", url=canonical(url))
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
        if not (name.startswith(prefix) or (name.endswith("/") and prefix.startswith(name))):
            continue
        if name.endswith("/"):
            yield from _walk(entry.path, prefix)
        elif entry.is_file():
            status = entry.stat()
            validator = f"{status.st_mtime_ns}-{status.st_size}-{status.st_ino}"
            yield ObjectInfo(canonical(entry.path), status.st_size, validator, strong=True, modified=status.st_mtime)


def _changed(url: str) -> errors.RemoteChanged:
    return errors.RemoteChanged(f"{canonical(url)} was written to while it was read", url=canonical(url))
