"""Named shared memory with the names and calls of Streaming: `SharedMemory`, and an array and a scalar in it.

A block is a file of /dev/shm. It gets its name when it is complete, so no process sees a part of it. Its memory is allocated by then, so
a full /dev/shm is an error at its creation, and kills no process later. No other library is changed, and no resource tracker warns.

Each block belongs to a claim, which is freed after its last process, however that ended: to that of its data set, or to one of its own.
"""

from __future__ import annotations

import contextlib
import errno
import math
import operator
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from forebay import claims, errors
from forebay._kernel import host, interrupts, locks, mappings
from forebay._kernel.interrupts import guarded, guarded_methods
from forebay._model import exact_str
from forebay.claims import claim_files, members
from forebay.claims.claim_files import MARKER
from forebay.claims.conflicts import Beside, ClaimRequest
from forebay.claims.processes import JobId
from forebay.claims.records import ExternalFiles
from forebay.claims.registry import Registry
from forebay.world import World

T = TypeVar("T")

SHM = "/dev/shm"
SIZE_TIMEOUT = 1.0
_PAUSE = 0.001

claimed: weakref.WeakKeyDictionary[claims.Claim, frozenset[str]] = weakref.WeakKeyDictionary()
"""Open claims of data sets with the blocks that belong to each. They are freed with the claim, not when one of its processes ends."""

on_unpickle: Callable[[], None] | None = None
"""Called in a process that unpickles one of our objects, if it is set in the pickling process: set by `install`."""


def path_of(name: str) -> str:
    """Return the file of a block. Raises FileNotFoundError, as the system call does, for an invalid name; TypeError for what is no text."""
    text = exact_str(name)
    if text is None:
        raise TypeError(f"{name!r} is not a name of shared memory: must be a str")
    bare = text.lstrip("/")
    if not bare or "/" in bare or "\0" in bare or len(os.fsencode(bare)) > 255:
        raise FileNotFoundError(errno.EINVAL, f"{name!r} is not a name of shared memory: must be one path component of at most 255 bytes")
    return f"{SHM}/{bare}"


class Block:
    """A block of shared memory with the attributes of ``multiprocessing.shared_memory.SharedMemory``: ``name``, ``size``, ``buf``.

    ``buf`` is None after `close`; arrays and slices made from it stay valid. Unpickling gives the same memory; a forked child has it
    too."""

    def __init__(self, name: str, view: memoryview, file: tuple[int, int] | None) -> None:
        self.name, self.size, self.file = str.lstrip(name, "/"), len(view), file
        self.buf: memoryview | None = view
        self._claim: claims.Claim | None = None  # of this block alone

    @classmethod
    def create(cls, name: str, size: int) -> Block:
        """Create a block of zeros. Raises FileExistsError, `NoSpace`."""
        path = path_of(name)
        if _is_taken(name):  # before memory is allocated
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name)
        fd = host.create_unnamed(Path(SHM), 0o600)  # until it is complete: a process that is killed in between leaves nothing
        try:
            _allocate(fd, name, size)
            block = cls(name, mappings.map_file(fd, size, writable=True), locks.file_of(fd))
            if _is_of_data_set(name):
                host.give_name(fd, path)
            else:
                block._use(_registered(name, fd))
        finally:
            os.close(fd)
        return block

    @classmethod
    def attach(cls, name: str, *, at: Path | None = None, private: bool = False) -> Block:
        """Open the block of this name, whichever library created it. ``at``: its path, if it is another. ``private``: stores stay in this
        process. Raises FileNotFoundError, PermissionError; ValueError if it stays empty."""
        path = at or path_of(name)
        claim = None if at is not None or _is_of_data_set(name) else _joined(name)  # before it is opened: it may be a dead process's
        fd = host.open_fd(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            block = cls(name, mappings.map_file(fd, _size_of(fd, name), writable=True, private=private), locks.file_of(fd))
            block._use(claim)
            return block
        finally:
            os.close(fd)

    def _use(self, claim: claims.Claim | None) -> None:
        self._claim = claim
        if claim is not None:
            _blocks.setdefault(claim, weakref.WeakSet()).add(self)

    def close(self) -> None:
        """Drop the memory in this process."""
        self.buf, claim, self._claim = None, self._claim, None
        if claim is not None:
            _blocks[claim].discard(self)
            if not _blocks[claim]:
                claim.close()

    def unlink(self) -> None:
        """Remove the name: the memory lasts as long as any process has it. Raises FileNotFoundError."""
        if not host.unlink(path_of(self.name)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.name)

    def __reduce__(self) -> tuple[Any, ...]:
        return unpickle, (on_unpickle, Block.attach, self.name)

    def __repr__(self) -> str:
        return f"Block({self.name!r}, size={self.size})"


# -- claims of blocks --------------------------------------------------------------------------------------------------

_blocks: weakref.WeakKeyDictionary[claims.Claim, weakref.WeakSet[Block]] = weakref.WeakKeyDictionary()
"""The open blocks of each claim that has one block alone."""


class _Named:
    """The block of a claim, as its `Beside`. ``fd``: of the file without a name."""

    def __init__(self, fd: int, path: str) -> None:
        self._fd, self._path = fd, path

    def check(self) -> None:
        """No directory can be in use."""

    def is_free(self, prefix: int) -> bool:
        return True

    def files(self, prefix: int) -> ExternalFiles:
        return ExternalFiles((self._path,), self._path)

    def create_marker(self, prefix: int, directory: int) -> None:
        """The marker first: a process that is killed in between leaves nothing that nobody knows."""
        try:
            try:
                host.give_name(self._fd, f"/proc/self/fd/{directory}/{MARKER}")
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                data = claim_files.identity(os.fstat(self._fd))
                claim_files.make_file(directory, MARKER, len(data), data)
                host.give_name(self._fd, self._path)
            else:
                host.link(MARKER, self._path, directory)
        except FileExistsError:
            raise FileExistsError(f"{self._path} exists") from None  # without a number: another claim's number would not help


def request_of(what: str, name: str, beside: Beside | None = None) -> ClaimRequest:
    """Return the request for the claim that all processes of this user have for one thing of this name."""
    return ClaimRequest(JobId(f"{what} of Streaming", "all who have it", "their names"), name, (), beside=beside)


def opened(registry: Registry, joined: members.Members) -> claims.Claim:
    return claims.opened(registry, joined, World(1, 1, 1, 0))


def _is_of_data_set(name: str) -> bool:
    return any(str.lstrip(name, "/") in names for names in claimed.values())


def _request(name: str, beside: Beside | None = None) -> ClaimRequest:
    return request_of("memory", str.lstrip(name, "/"), beside)


def _is_taken(name: str) -> bool:
    """Whether there is a block of this name. What ended processes left of one is removed."""
    path = path_of(name)
    if not os.path.lexists(path) or _is_of_data_set(name):
        return os.path.lexists(path)
    joined = Registry().join_if_live(_request(name))
    if joined is not None:
        joined.leave()
    return os.path.lexists(path)


def _joined(name: str) -> claims.Claim | None:
    """Join the claim of a block; None if another library created it. What ended processes left of it is removed."""
    registry = Registry()
    joined = registry.join_if_live(_request(name))
    return None if joined is None else opened(registry, joined)


def _registered(name: str, fd: int) -> claims.Claim:
    """Give a file its name, with a claim. Raises FileExistsError."""
    registry, request = Registry(), _request(name, _Named(fd, path_of(name)))
    try:
        return opened(registry, registry.create(request))
    except FileExistsError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), name) from error


def _allocate(fd: int, name: str, size: int) -> None:
    try:
        host.allocate(fd, 0, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        disk = host.disk(Path(SHM))
        raise errors.NoSpace(
            f"no room in {SHM} for {name!r}: {size:,} bytes needed, {disk.free:,} free: see `forebay claims`, or make it larger",
            key=name, need=size, free=disk.free, budget=disk.total, hopeless=False, limit="disk",
        ) from error  # fmt: skip


def _size_of(fd: int, name: str) -> int:
    """Return the size of a block. Another library may create the name before it sets the size."""
    until = time.monotonic() + SIZE_TIMEOUT
    while not (size := os.fstat(fd).st_size):
        if time.monotonic() >= until:
            raise ValueError(f"the shared memory {name!r} is empty: its creator did not finish it")
        interrupts.sleep(_PAUSE)
    return size


@guarded
def unpickle(before: Callable[[], None] | None, make: Callable[..., T], *args: Any) -> T:
    """What ``make`` returns; calls `on_unpickle` of the pickling process before."""
    if before is not None:
        before()
    return make(*args)


@guarded_methods("buf", "fix_register", "fix_unregister")
class SharedMemory:
    """Shared memory of this name: a new block if ``create`` is True, an existing one if False, either if None.

    ``size``: bytes of a new block. ``auto_cleanup``: a block created here loses its name when this process ends; without it, when the last
    process ends that has it, as do blocks whose names begin with the number of a data set. ``shm`` is the block, ``buf`` its memory,
    ``created_shms`` or ``opened_shms`` a list of it. What killed processes left is removed with the next claim or block.

    Raises FileExistsError, FileNotFoundError, PermissionError, ValueError for a new block without a size; `NoSpace`, TypeError,
    `RootRefused`, `WaitTimeout`."""

    def __init__(self, name: str | None = None, create: bool | None = None, size: int = 0, auto_cleanup: bool = True) -> None:
        self.created_shms: list[Block] = []
        self.opened_shms: list[Block] = []
        if create is False:
            if name is None:
                raise ValueError("a name is required to open shared memory: only a new block may have none")
            self.shm = Block.attach(name)
            self.opened_shms.append(self.shm)
            return
        size = operator.index(size)
        if size <= 0:
            raise ValueError(f"size={size}: new shared memory needs a positive number of bytes")
        self.shm, is_new = _create_or_open(f"psm_{secrets.token_hex(4)}" if name is None else name, size, may_open=create is not True)
        (self.created_shms if is_new else self.opened_shms).append(self.shm)
        if is_new and auto_cleanup:
            _unlink_at_exit(self.shm)

    @property
    def buf(self) -> Any:
        """The memory as a writable memoryview; None after `cleanup`."""
        return self.shm.buf

    def fix_register(self, name: str, rtype: str) -> None:
        """Register a resource other than shared memory with Python's resource tracker, as Streaming's replacement of the tracker does."""
        if rtype != "shared_memory":
            resource_tracker._resource_tracker.register(name, rtype)

    def fix_unregister(self, name: str, rtype: str) -> None:
        """Undo `fix_register`."""
        if rtype != "shared_memory":
            resource_tracker._resource_tracker.unregister(name, rtype)

    def cleanup(self) -> None:
        """Drop the memory in this process; blocks created here lose their names. Does nothing the second time."""
        for created in self.created_shms:
            created.close()
            _unlink(created)
        for opened in self.opened_shms:
            opened.close()


def _create_or_open(name: str, size: int, *, may_open: bool) -> tuple[Block, bool]:
    """Return the block, and whether it is new."""
    while True:
        try:
            return Block.create(name, size), True
        except FileExistsError:
            if not may_open:
                raise
        with contextlib.suppress(FileNotFoundError):  # the name was removed between the two calls
            return Block.attach(name), False


class SharedArray:
    """An array in shared memory; zeros if it is new. Index it, or get it whole with `numpy`. Picklable; threads may share it."""

    def __init__(self, shape: int | Iterable[int], dtype: Any, name: str) -> None:
        """Raises what `SharedMemory` raises; TypeError for a dtype of Python objects."""
        lengths = shape if isinstance(shape, Iterable) else (shape,)
        self.shape, self.dtype, self.name = tuple(operator.index(length) for length in lengths), dtype, name
        if min(self.shape, default=0) < 0:
            raise ValueError(f"shape={shape}: negative dimensions are not allowed")
        if np.dtype(dtype).hasobject:
            raise TypeError(f"dtype={dtype!r}: objects cannot be shared")
        self.shm = SharedMemory(name=name, size=math.prod(self.shape) * np.dtype(dtype).itemsize)

    def numpy(self) -> Any:
        """Return the array itself, which all processes share. Raises TypeError if the memory is too small for it, ValueError after
        `cleanup`."""
        if self.shm.buf is None:  # else NumPy would create a private array
            raise ValueError(f"the shared memory {self.name!r} was cleaned up in this process")
        return np.ndarray(self.shape, buffer=self.shm.buf, dtype=self.dtype)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> Any:
        return self.numpy()[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.numpy()[index] = value


class SharedScalar:
    """A number in shared memory; 0 if it is new."""

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


def _unlink_at_exit(block: Block) -> None:
    """Remove the name when this process ends; a forked child, which may end before its parent, removes no inherited names."""
    global _pid
    if _pid != os.getpid():
        _pid = os.getpid()
        _to_unlink.clear()
        members.leave_at_exit()
    if block.file is not None:
        _to_unlink[block.file] = Block(block.name, memoryview(b""), block.file)  # keeps no reference to the memory


def _unlink_all() -> None:
    if _pid == os.getpid():
        prefixes = tuple(f"{claim.prefix:06}_" for claim in claimed)  # others that have the claim may open these later
        for block in _to_unlink.values():
            if not block.name.startswith(prefixes):
                _unlink(block)
        _to_unlink.clear()


members.exit_hooks.append(_unlink_all)


def _unlink(block: Block) -> None:
    """Remove the name of a block if the name still belongs to it."""
    with contextlib.suppress(FileNotFoundError):
        status = os.stat(path_of(block.name), follow_symlinks=False)
        if (status.st_dev, status.st_ino) == block.file:
            block.unlink()
