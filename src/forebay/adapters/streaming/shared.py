"""Named pieces of shared memory with the names and calls of Streaming: `SharedMemory`, and an array and a scalar in it.

A piece is a file of /dev/shm. It gets its name when it is whole, so who finds the name finds all of it; its memory was taken from the
kernel by then, so a full /dev/shm is an error where it is made, and kills nobody later. No other library is touched, and there is no
resource tracker to warn.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import math
import operator
import os
import secrets
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from forebay import errors
from forebay._kernel import host, locks, mappings

SHM = "/dev/shm"
PATIENCE = 1.0
_MOMENT = 0.001

claimed: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Open claims, and with what the names begin that belong to each: these are freed with it, and not when one of its processes ends."""

on_arrival: Callable[[], None] | None = None
"""Called in a process that gets one of our objects by pickle, if it is set in the process that sends: set by `install`."""


def path_of(name: str) -> str:
    """The file of a piece. Raises FileNotFoundError, as the system call does, for what is no name; TypeError for what is no text."""
    if not isinstance(name, str):
        raise TypeError(f"{name!r} is no name of shared memory: a str is wanted")
    bare = name.lstrip("/")
    if not bare or "/" in bare or "\0" in bare or len(os.fsencode(bare)) > 255:
        raise FileNotFoundError(errno.EINVAL, f"{name!r} is no name of shared memory: one word is wanted, of at most 255 bytes")
    return f"{SHM}/{bare}"


class Block:
    """A piece of shared memory, with the attributes of ``multiprocessing.shared_memory.SharedMemory``: ``name``, ``size``, ``buf``.

    ``buf`` is None after `close`; what was made of it stays good as long as it is referred to. Whoever gets it by pickle has the same
    memory; a forked child has it too."""

    def __init__(self, name: str, view: memoryview, file: tuple[int, int] | None) -> None:
        self.name, self.size, self.file = name.lstrip("/"), len(view), file
        self.buf: memoryview | None = view

    @classmethod
    def create(cls, name: str, size: int) -> Block:
        """A new piece of zeros. Raises FileExistsError, `NoSpace`."""
        path = path_of(name)
        if os.path.lexists(path):  # before any memory is taken
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        fd = host.create_unnamed(Path(SHM), 0o600)  # until it is whole: whoever is killed in between leaves nothing
        try:
            _allocate(fd, name, size)
            view, file = mappings.map_file(fd, size, writable=True), locks.file_of(fd)
            host.give_name(fd, path)
        finally:
            os.close(fd)
        return cls(name, view, file)

    @classmethod
    def attach(cls, name: str, *, at: Path | None = None, private: bool = False) -> Block:
        """The piece of this name, whoever made it. ``at``: where it is to be found instead. ``private``: stores stay in this process.
        Raises FileNotFoundError, PermissionError; ValueError where it stays empty."""
        fd = os.open(at or path_of(name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return cls(name, mappings.map_file(fd, _size_of(fd, name), writable=True, private=private), locks.file_of(fd))
        finally:
            os.close(fd)

    def close(self) -> None:
        """Let go of the memory here."""
        self.buf = None

    def unlink(self) -> None:
        """Take the name away: the memory lasts as long as somebody has it. Raises FileNotFoundError."""
        if not host.unlink(path_of(self.name)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.name, on_arrival)

    def __repr__(self) -> str:
        return f"Block({self.name!r}, size={self.size})"


def _allocate(fd: int, name: str, size: int) -> None:
    try:
        host.allocate(fd, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        found = os.statvfs(SHM)
        free = found.f_bavail * found.f_frsize
        raise errors.NoSpace(
            f"no room in {SHM} for {name!r}: {size:,} bytes wanted, {free:,} free: see `forebay claims`, or make it larger",
            key=name, need=size, free=free, budget=found.f_blocks * found.f_frsize, hopeless=False, limit="disk",
        ) from error  # fmt: skip


def _size_of(fd: int, name: str) -> int:
    """Of a piece that another library makes we may see the name before the size."""
    until = time.monotonic() + PATIENCE
    while not (size := os.fstat(fd).st_size):
        if time.monotonic() >= until:
            raise ValueError(f"the shared memory {name!r} is empty: whoever made it did not get further")
        time.sleep(_MOMENT)
    return size


def _arrive(name: str, on_arrival: Callable[[], None] | None) -> Block:
    if on_arrival is not None:
        on_arrival()
    return Block.attach(name)


class SharedMemory:
    """Shared memory of this name: with ``create`` True a new one, with False one that is there, with None whichever it is.

    ``size`` in bytes is for a new one. ``auto_cleanup``: what was made here loses its name when this process ends. ``shm`` is the
    piece, ``buf`` its memory, ``created_shms`` or ``opened_shms`` a list of it.

    Raises FileExistsError, FileNotFoundError, PermissionError, ValueError for a new one without a size; `NoSpace`, TypeError."""

    def __init__(self, name: str | None = None, create: bool | None = None, size: int = 0, auto_cleanup: bool = True) -> None:
        self.created_shms: list[Block] = []
        self.opened_shms: list[Block] = []
        if create is False:
            if name is None:
                raise ValueError("a name is needed to open shared memory: only what is made can go without")
            self.shm = Block.attach(name)
            self.opened_shms.append(self.shm)
            return
        size = operator.index(size)
        if size <= 0:
            raise ValueError(f"size={size}: new shared memory needs a positive number of bytes")
        self.shm, is_new = _created(f"psm_{secrets.token_hex(4)}" if name is None else name, size, or_opened=create is not True)
        (self.created_shms if is_new else self.opened_shms).append(self.shm)
        if is_new and auto_cleanup:
            _unlink_at_exit(self.shm)

    @property
    def buf(self) -> Any:
        """The memory, a writable memoryview; None after `cleanup`."""
        return self.shm.buf

    def fix_register(self, name: str, rtype: str) -> None:
        """Register what is no shared memory with Python's resource tracker. Streaming puts it in the tracker's place; we do not."""
        if rtype != "shared_memory":
            resource_tracker._resource_tracker.register(name, rtype)

    def fix_unregister(self, name: str, rtype: str) -> None:
        """Undo `fix_register`."""
        if rtype != "shared_memory":
            resource_tracker._resource_tracker.unregister(name, rtype)

    def cleanup(self) -> None:
        """Let go of the memory here; what was made here loses its name. Nothing happens a second time."""
        for made in self.created_shms:
            made.close()
            _unlink(made)
        for opened in self.opened_shms:
            opened.close()


def _created(name: str, size: int, *, or_opened: bool) -> tuple[Block, bool]:
    """The piece, and whether it is new."""
    while True:
        try:
            return Block.create(name, size), True
        except FileExistsError:
            if not or_opened:
                raise
        with contextlib.suppress(FileNotFoundError):  # between the two somebody took the name away
            return Block.attach(name), False


class SharedArray:
    """An array in shared memory, of zeros if it is new. Index it, or take it whole with `numpy`. Picklable; threads may share it."""

    def __init__(self, shape: int | Iterable[int], dtype: Any, name: str) -> None:
        """Raises what `SharedMemory` raises; TypeError for objects, which only their own process can reach."""
        given = shape if isinstance(shape, Iterable) else (shape,)
        self.shape, self.dtype, self.name = tuple(operator.index(length) for length in given), dtype, name
        if min(self.shape, default=0) < 0:
            raise ValueError(f"shape={shape}: negative dimensions are not allowed")
        if np.dtype(dtype).hasobject:
            raise TypeError(f"dtype={dtype!r}: objects cannot be shared")
        self.shm = SharedMemory(name=name, size=math.prod(self.shape) * np.dtype(dtype).itemsize)

    def numpy(self) -> Any:
        """The array itself: what is stored into it all processes see. Raises TypeError where the memory is too small for it, ValueError
        after its `cleanup`."""
        if self.shm.buf is None:  # else NumPy would make an array of this process alone
            raise ValueError(f"the shared memory {self.name!r} was cleaned up here")
        return np.ndarray(self.shape, buffer=self.shm.buf, dtype=self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.numpy()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.numpy()[index] = value


class SharedScalar:
    """A number in shared memory, 0 if it is new."""

    def __init__(self, dtype: Any, name: str) -> None:
        """Raises what `SharedMemory` raises."""
        self.dtype, self.name = dtype, name
        self.arr = SharedArray(1, dtype, name)

    def get(self) -> Any:
        return self.arr[0]

    def set(self, value: Any) -> None:
        self.arr[0] = value


# -- the end of the process --------------------------------------------------------------------------------------------

_to_unlink: dict[tuple[int, int], Block] = {}  # by file, of the process _pid
_pid = -1


def _unlink_at_exit(made: Block) -> None:
    """By the process that made it alone: a forked child has its parent's memory, and may end before it."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _to_unlink.clear()
        _ask_multiprocessing()
    if made.file is not None:
        _to_unlink[made.file] = Block(made.name, memoryview(b""), made.file)  # not the memory: it goes with the last who refers to it


def _ask_multiprocessing() -> None:
    """Its forked children end without `atexit`."""
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, _unlink_all, exitpriority=0)


@atexit.register
def _unlink_all() -> None:
    if _pid == os.getpid():
        beginnings = tuple(claimed.values())
        for made in _to_unlink.values():
            if not made.name.startswith(beginnings):
                _unlink(made)
        _to_unlink.clear()


def _unlink(made: Block) -> None:
    """Take its name away, if the name is still of this piece."""
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path_of(made.name), follow_symlinks=False)
        if (found.st_dev, found.st_ino) == made.file:
            made.unlink()
