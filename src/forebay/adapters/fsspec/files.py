"""The file objects of the filesystem: over the mapped bytes of an object, and over a file of the source that is being written."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from forebay.fetch.files import SeekableFile, close_dropped

PEEK = 8 << 10


class MappedFile(SeekableFile, io.BufferedIOBase):
    """A read-only, seekable binary file over the mapped bytes of an object, which stay valid after an eviction. Not for several threads at
    a time.

    ``path``: on its filesystem; ``size``: in bytes."""

    mode = "rb"

    def __init__(self, view: memoryview, path: str) -> None:
        self.path, self.size = path, len(view)
        self._view = view

    def read(self, size: int | None = -1, /) -> bytes:
        return bytes(self._take(size))

    def read1(self, size: int = -1, /) -> bytes:
        return bytes(self._take(size))

    def read_buffer(self, size: int | None = -1, /) -> memoryview:
        """`read` without a copy, for pyarrow."""
        return self._take(size)

    def readinto(self, buffer: Any, /) -> int:
        into = memoryview(buffer).cast("B")
        data = self._take(len(into))
        into[: len(data)] = data
        return len(data)

    readinto1 = readinto

    def peek(self, size: int = 0, /) -> bytes:
        """The next bytes, at least one but at the end, without moving."""
        self._check_open()
        return bytes(self._view[self._at : self._at + PEEK])

    def close(self) -> None:
        self._view = memoryview(b"")
        super().close()

    def _take(self, size: int | None) -> memoryview:
        self._check_open()
        at = self._at
        end = self.size if size is None or size < 0 else min(at + size, self.size)
        self._at = max(at, end)
        return self._view[at:end]


class WrittenFile(io.BufferedIOBase):
    """A file of the source that is being written; ``on_written`` is called when it is closed, or committed."""

    def __init__(self, file: Any, on_written: Callable[[], None]) -> None:
        self._file, self._on_written = file, on_written

    __del__ = close_dropped

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def readable(self) -> bool:
        return bool(self._file.readable())

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._file.seekable())

    def read(self, size: int | None = -1, /) -> bytes:
        return self._file.read(-1 if size is None else size)  # type: ignore[no-any-return]

    def write(self, data: Any, /) -> int:
        written = self._file.write(data)
        return memoryview(data).nbytes if written is None else written

    def tell(self) -> int:
        return int(self._file.tell())

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        return int(self._file.seek(offset, whence))

    def truncate(self, size: int | None = None, /) -> int:
        return int(self._file.truncate(size))

    def flush(self) -> None:
        if not self.closed and not self._file.closed:
            self._file.flush()

    def close(self) -> None:
        if not self.closed:
            try:
                self._file.close()
            finally:
                super().close()
                self._on_written()

    def commit(self) -> None:
        """Make a file of a transaction visible."""
        self._file.commit()
        self._on_written()
