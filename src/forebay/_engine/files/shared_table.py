"""Files of words that all processes of a root have mapped."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from forebay._engine.files.layout import PAGE, Root
from forebay._kernel import host, mappings
from forebay.errors import CacheFault

HEADER = PAGE // 8
"""Words before the content: the magic number and the root's id, then what the table's owner has there."""
FREE = 2
"""The first word of the header that belongs to the table's owner."""


class SharedTable:
    """One such file. Callable from any thread and, mappings being inherited, after a fork.

    All of it is a hint: any process may store to any word without a lock, and a store may be lost with the machine, so a reader checks
    what it finds. The file may be deleted at any time. It is allocated whole when it is created: no store meets a full disk."""

    def __init__(self, root: Root, path: Path, magic: bytes, words: int) -> None:
        """``magic``: 8 bytes, others for each form of the content. ``words``: of the content."""
        self.path = path
        self._root = root
        self._header = magic + root.id.to_bytes(8, "little")
        self._size = -(-8 * (HEADER + words) // PAGE) * PAGE
        self._mapped: tuple[memoryview, int, int] | None = None  # the words, and which file they are

    def words(self) -> memoryview | None:
        """The whole file, with its header; None if there is none, or none of Forebay's. Others, once the file was replaced. Read-only in a
        read-only root."""
        try:
            status = os.stat(self.path)
        except OSError:
            self._mapped = None
            return None
        mapped = self._mapped
        if mapped is None or mapped[1:] != (status.st_dev, status.st_ino) or status.st_size != self._size:
            self._mapped = mapped = self._map()
        return mapped[0] if mapped is not None else None

    def create(self, fill: Callable[[memoryview], object] | None = None) -> memoryview:
        """`words`, of a new file if there is none, or none of Forebay's. ``fill`` stores the content of a new one. Raises OSError, and
        `CacheFault` in a read-only root, or where a directory with files has its name."""
        root = self._root
        for attempt in range(3):
            words = self.words()
            if words is not None:
                return words
            if root.read_only:
                break
            content = bytearray(self._header.ljust(self._size, b"\0"))
            if fill is not None:
                fill(memoryview(content).cast("Q"))
            if self.path.parent != root.path:
                root.files.mkdir(self.path.parent, root.dir_mode)
            if attempt:  # P1 finds none / P2 installs one / P1 must not remove it: so only what was there before goes
                root.files.make_way(self.path)
            root.install(self.path, lambda fd, content=content: host.pwrite(fd, content, 0))  # type: ignore[misc]
        raise CacheFault(f"{self.path} is not there, or not of this root", path=str(self.path))

    def identity(self) -> tuple[int, int]:
        """``st_dev`` and ``st_ino`` of the file that was mapped last."""
        assert self._mapped is not None, "it was not mapped"
        return self._mapped[1:]

    def _map(self) -> tuple[memoryview, int, int] | None:
        writable = not self._root.read_only
        try:
            fd = self._root.files.open(self.path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_NONBLOCK)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if status.st_size != self._size or os.pread(fd, len(self._header), 0) != self._header:
                return None
            return mappings.words(mappings.map_file(fd, self._size, writable=writable)), status.st_dev, status.st_ino
        except OSError:
            return None
        finally:
            os.close(fd)
