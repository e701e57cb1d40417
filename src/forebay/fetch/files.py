"""File objects that the cache returns: over a cached copy, or over ranges of a remote."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from forebay import errors
from forebay._engine.files.layout import faults
from forebay._engine.leases import Lease
from forebay._kernel import host
from forebay._kernel.interrupts import finalizer, guarded_methods
from forebay._model import ObjectInfo, Span
from forebay.fetch.request import is_same_version

if TYPE_CHECKING:
    from forebay.fetch import Fetcher
    from forebay.fetch.request import FetchOptions, Target

RANGE = 4 << 20
"""Bytes of one read ahead where an object is not cached."""


_end = io.IOBase.__del__
_end_guarded = finalizer(_end)


def close_dropped(file: Any, is_finalizing: Any = sys.is_finalizing, end: Any = _end, end_guarded: Any = _end_guarded) -> None:
    """The finalizer of our files: that of `io` ignores what `close` raises, which would be a signal's."""
    if is_finalizing():
        end(file)
    elif not file.closed:
        end_guarded(file)


class BufferedFile(io.BufferedReader):
    """Over one of our files, which it closes."""

    __del__ = close_dropped


@guarded_methods("__del__")
class LeasedFile(io.FileIO):
    """The cached copy, open; closing the file closes its lease."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        super().__init__(os.fspath(lease), "rb")

    def close(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        super().close()
        if not is_finalizing():  # at exit the kernel releases the lease, whatever is left of the interpreter
            self._lease.close()

    __del__ = close_dropped

    def _dealloc_warn(self, source: object) -> None:
        """Nothing: as a lease, the file may be dropped instead. pyarrow never closes one that it has asked for its schema."""


def opened(lease: Lease) -> BinaryIO:
    """A buffered file object on a cached copy, which closes the lease. Raises `CacheFault` if the copy cannot be opened: the disk is dead,
    there are no descriptors left, or it is gone because the file system's locks do not work."""
    try:
        with faults(lease.entry.name):
            return cast(BinaryIO, BufferedFile(LeasedFile(lease)))
    except errors.CacheFault:
        lease.close()
        raise


class SeekableFile(io.IOBase):
    """A read-only file with a position. ``size``: in bytes."""

    size: int
    _at = 0
    __del__ = close_dropped

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._check_open()
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}
        if whence not in bases:
            raise ValueError(f"whence={whence}: it must be 0, 1 or 2")
        if bases[whence] + offset < 0:
            raise ValueError(f"cannot seek to {bases[whence] + offset}, before the beginning")
        self._at = bases[whence] + offset
        return self._at

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file")


@guarded_methods()
class RangeFile(SeekableFile, io.RawIOBase):
    """An object that is not cached: each read requests a range from the remote, of the version that was opened.

    ``fetcher`` counts each request. Raises `RemoteChanged` once the remote has another version."""

    def __init__(self, fetcher: Fetcher, target: Target, info: ObjectInfo) -> None:
        assert info.size is not None
        self._fetcher, self._target, self._info, self.size = fetcher, target, info, info.size

    def readall(self) -> bytes:
        return b"".join(iter(lambda: self.read(RANGE) or b"", b""))  # the default asks for 8 KiB at a time

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), self.size - self._at)
        if size <= 0:
            return 0
        key, read = self._target.key, self._target.remote.read
        data = self._fetcher.receive(key, partial(read, self._target.url, Span(self._at, size), info=self._info))
        if len(data) < size:
            raise errors.RemoteChanged(f"{key} is shorter than the {self.size:,} bytes that it had when it was opened", url=key)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def open_object(fetcher: Fetcher, target: Target, options: FetchOptions) -> BinaryIO:
    """See `Fetcher.open`, without blocks."""
    if target.in_place and not options.force and not options.bypass:
        if not os.access(target.in_place, os.R_OK):
            target.remote.stat(target.url)  # raises as `read` does
        from forebay.fetch.job import in_place_file

        return open(in_place_file(target, target.in_place), "rb", opener=host.open_fd)
    if options.bypass:
        return stream(fetcher, target, options)
    try:
        return opened(fetcher.lease(target, options))
    except (errors.CacheFault, errors.WaitTimeout) as error:
        fetcher.fall_back(error, target.key)
        return stream(fetcher, target, options)


def stream(fetcher: Fetcher, target: Target, options: FetchOptions) -> BinaryIO:
    """A file object that reads ranges of the remote on demand, bypassing the cache."""
    if options.sha256 is not None or (fetcher.upstream is not None and not options.bypass):
        return io.BytesIO(fetcher.direct(target, options))
    fetcher.refuse_offline(target, options)
    info = fetcher.stat(target, options)
    if info is not None and options.etag is not None and not is_same_version(info.validator, options.etag):
        raise errors.ChecksumMismatch.of(target.key, options.etag, info.validator or "no ETag", callers_own=True)
    if info is None or info.size is None:
        return io.BytesIO(fetcher.direct(target, options))
    return cast(BinaryIO, BufferedFile(RangeFile(fetcher, target, info), RANGE))
