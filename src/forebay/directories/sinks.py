"""One file of a private copy: a sink that a remote, or another file, is copied into; and the time by which it tells its version."""

from __future__ import annotations

import hashlib
import os
import threading
from pathlib import Path

from forebay import errors, remote
from forebay._kernel import host
from forebay._model import Buffer, ObjectInfo, Partial, Span
from forebay.directories.manifests import File
from forebay.origin.request import is_same_version

BLOCK = 16 << 20
_SECOND = 1_000_000_000


class CopyStopped(Exception):
    """The copy that this file is for is being given up."""


def stamp(file: File) -> int | None:
    """The time that a copy gets, in nanoseconds: the second is the remote's, what is below it tells the version. None: it has none.

    S3 tells whole seconds, in which two versions of one size can be written."""
    if file.validator is None and file.modified is None:
        return None
    second = min(max(int(file.modified or 0), 0), 1 << 32)
    digest = hashlib.blake2b(f"{file.validator}\0{file.modified}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return second * _SECOND + int.from_bytes(digest, "little") % _SECOND


def has_stamp(found: int, wanted: int | None) -> bool:
    """Whether a file's time is the one it was given: some file systems keep whole microseconds or seconds only."""
    if wanted is None:
        return False
    unit = next(unit for unit in (_SECOND, 1_000_000, 1000, 100, 1) if found % unit == 0)
    return found == wanted - wanted % unit


class Gate:
    """Once it is shut nothing is made any more, so that all can be removed; whoever writes on gives up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards shut: files are made under it
        self._shut = False

    def shut(self) -> None:
        with self._lock:
            self._shut = True

    def check(self) -> None:
        if self._shut:
            raise CopyStopped

    def create(self, path: Path) -> int:
        with self._lock:
            self.check()
            return host.create(path, 0o666, masked=True)


class FileSink:
    """A `CloningSink` that is a file of a copy in the making. `write` from several threads at once."""

    def __init__(self, path: Path, file: File, gate: Gate) -> None:
        self.partial: Partial | None = None
        self._path, self._file, self._gate = path, file, gate
        self._fd: int | None = None
        self._lock = threading.Lock()  # guards done
        self.done = 0

    def begin(self, info: ObjectInfo) -> tuple[Span, ...]:
        """See `Sink.begin`. Raises `RemoteChanged` for another version than was listed."""
        file = self._file
        other = file.validator is not None and info.validator is not None and not is_same_version(info.validator, file.validator)
        if other or (info.size is not None and file.size not in (info.size, None)):
            raise errors.RemoteChanged(f"{file.name} is another one now than when the directory was listed", url=remote.shown(info.url))
        if self._fd is None:
            self._fd = self._gate.create(self._path)
        else:
            host.truncate(self._fd, 0)
        with self._lock:
            self.done = 0
        return () if info.size == 0 else (Span(0, -1 if info.size is None else info.size),)

    def write(self, offset: int, data: Buffer) -> None:
        """See `Sink.write`."""
        self._gate.check()
        host.pwrite(self._descriptor, data, offset)
        self._add(memoryview(data).nbytes)

    def clone(self, fd: int) -> bool:
        """See `CloningSink.clone`."""
        self._gate.check()
        if not host.clone(fd, self._descriptor):
            return False
        self._add(os.fstat(fd).st_size)
        return True

    def copy(self, fd: int) -> None:
        """Take all bytes of another open file of this host, by the kernel where it can."""
        at, size = 0, os.fstat(fd).st_size
        while at < size:
            self._gate.check()
            count = host.copy_range(fd, self._descriptor, at, min(BLOCK, size - at))
            if count == 0:
                break
            self._add(count)
            at += count
        while block := os.pread(fd, 1 << 20, at):
            self.write(at, block)
            at += len(block)

    def finish(self, ns: int | None) -> None:
        """All bytes have come. Raises `RemoteChanged` where they are fewer, or more, than was listed."""
        size, wanted = os.fstat(self._descriptor).st_size, self._file.size
        if wanted not in (size, None) or self.done < size:
            message = f"{min(self.done, size):,} bytes of {self._file.name} came, and {wanted or size:,} are wanted"
            raise errors.RemoteChanged(message, url=self._file.name)
        if ns is not None:
            host.set_mtime(self._descriptor, ns)

    def close(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @property
    def _descriptor(self) -> int:
        if self._fd is None:
            raise CopyStopped
        return self._fd

    def _add(self, count: int) -> None:
        with self._lock:
            self.done += count
