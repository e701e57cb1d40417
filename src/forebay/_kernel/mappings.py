"""Mappings that hold no descriptor, and live exactly as long as a view of them does.

CPython's ``mmap`` keeps a descriptor for each mapping (until 3.13): a job with many would run into its limit.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from typing import Any, cast

from forebay._kernel import fences, host
from forebay._kernel.host import libc

_map = libc.mmap
_map.restype = ctypes.c_void_p
_map.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_unmap = libc.munmap
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.restype = None
_untrack.argtypes = [ctypes.py_object]
_FAILED = ctypes.c_void_p(-1).value
_ANOTHER = frozenset((errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO))  # nothing is there, or a link or socket
_FIXED, _NORESERVE, _PROT_NONE = 0x10, 0x4000, 0  # of Linux on all its machines that matter here; Python's module has them not


@functools.cache
def _array_type(size: int) -> Any:
    return type("Mapped", (ctypes.c_ubyte * size,), {"__slots__": ("__del__", "file")})


def _anchor(address: int, length: int) -> Any:
    """The object that all views of a mapping refer to. When the last view is gone, C code alone unmaps the memory: a signal handler cannot
    run inside, where Python would ignore what it raises."""
    # ctypes makes a type per length and keeps it: with lengths rounded up to a power of two there are few.
    anchor = _array_type(1 << (length - 1).bit_length()).from_address(address)
    anchor.__del__ = functools.partial(_unmap, address, length)
    # The garbage collector calls all finalizers of a cycle before it drops any reference, and one of them may read a view. It never calls
    # that of an object that it does not track: this one ends with the last reference.
    _untrack(anchor)
    return anchor


def _mapped(address: int) -> int:
    if address == _FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def map_file(fd: int, length: int, *, offset: int = 0, writable: bool = False, private: bool = False) -> memoryview:
    """Map ``length`` bytes of a file from ``offset`` (a multiple of the page size); returns a view, read-only unless ``writable``.

    ``private``: stores stay in this process. The descriptor may be closed at once. Unmapped with the last view; a forked child has the
    mapping too. Raises OSError. The file must not shrink while it is mapped: reading the lost part kills the process."""
    if length == 0:
        return memoryview((ctypes.c_ubyte * 1)()).cast("B")[:0].toreadonly()
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    address = _mapped(_map(None, length, protection, mmap.MAP_PRIVATE if private else mmap.MAP_SHARED, fd, offset))
    view = memoryview(_anchor(address, length)).cast("B")[:length]
    return view if writable else view.toreadonly()


def read_or_map(fd: int, length: int) -> tuple[memoryview, bool]:
    """The first ``length`` bytes of a file, mapped, or copied if this process has as many mappings as it may have; and whether they are
    mapped. Raises OSError; EOFError if the file was cut."""
    try:
        return map_file(fd, length), True
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
    copy = bytearray(length)
    at = 0
    while at < length:
        count = os.preadv(fd, [memoryview(copy)[at:]], at)
        if not count:
            raise EOFError
        at += count
    return memoryview(copy).toreadonly(), False


def note_file(view: memoryview, name: str, file: os.stat_result) -> None:
    """Let `private` know what file a view of `map_file` shows. Caller: names of such files are used once."""
    cast(Any, view.obj).file = name, file.st_dev, file.st_ino


def private(view: memoryview, of: object) -> memoryview:
    """The same bytes, writable; only the returned view shows what is stored in it. It is a mapping, of which a page is copied when it is
    first written to; or a copy, where ``view`` is not a part of a file that `note_file` knows and that still exists, or the process has as
    many mappings or files as it may have.

    ``view``: contiguous, of bytes. ``of``: the ``obj`` of the view that it is a part of."""
    try:
        own = _mapped_again(view, of)
    except OSError:
        own = None
    return memoryview(bytearray(view)) if own is None else own


def _mapped_again(view: memoryview, of: object) -> memoryview | None:
    known = getattr(of, "file", None)
    if known is None:
        return None
    at = _begins_at(view) - ctypes.addressof(cast(Any, of))
    before = at % mmap.PAGESIZE
    try:
        fd = host.open_fd(known[0], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in _ANOTHER:
            return None
        raise
    try:
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != known[1:] or status.st_size < at + view.nbytes:
            return None
        return map_file(fd, before + view.nbytes, offset=at - before, writable=True, private=True)[before:]
    finally:
        os.close(fd)


class _Buffer(ctypes.Structure):
    """``Py_buffer``."""

    _fields_ = (
        ("buf", ctypes.c_void_p), ("obj", ctypes.c_void_p), ("len", ctypes.c_ssize_t), ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int), ("ndim", ctypes.c_int), ("format", ctypes.c_void_p), ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p), ("suboffsets", ctypes.c_void_p), ("internal", ctypes.c_void_p),
    )  # fmt: skip


def _begins_at(view: memoryview) -> int:
    """The address of the first byte; ctypes itself returns that of writable buffers only."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))
    return int(buffer.buf or 0)


def words_of_process(count: int) -> memoryview:
    """``count`` words of zeros of this process alone, which a forked child has as they were. Memory is taken as they are stored to."""
    return memoryview(mmap.mmap(-1, max(count, 1) * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)).cast("Q")


class Window:
    """A range of addresses into which files are mapped one after the other, so that one view shows them all.

    ``view``: all of it, read-only; reading a part into which no file was mapped yet kills the process.
    Unmapped with the last view. Not for several threads at once; a forked child has what was mapped before, and may continue on its own."""

    def __init__(self, length: int) -> None:
        """Takes addresses only, no memory. Raises OSError where the process may not have so many."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
        self._address = _mapped(_map(None, length, _PROT_NONE, flags, -1, 0))
        self.view = memoryview(_anchor(self._address, length)).cast("B")[:length].toreadonly()
        self.length = length

    def map_at(self, fd: int, length: int, at: int) -> None:
        """Map ``length`` bytes of a file, read-only, at ``at``, a multiple of the page size. Raises OSError."""
        if at + length > self.length:
            raise ValueError(f"{length} bytes at {at} are outside a window of {self.length}")
        _mapped(_map(self._address + at, length, mmap.PROT_READ, mmap.MAP_SHARED | _FIXED, fd, 0))


def address(view: memoryview) -> int:
    """The address of the mapping that this view, or a slice of it, shows."""
    return ctypes.addressof(cast(Any, view.obj))


def words(view: memoryview) -> memoryview:
    """The mapping as aligned 8-byte words, which are loaded and stored whole. See `fences` for their order."""
    fences.join()
    return view.cast("Q")


@functools.cache
def max_maps() -> int:
    """How many mappings the kernel allows a process."""
    try:
        with open("/proc/sys/vm/max_map_count") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65_530
