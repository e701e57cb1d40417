"""What the processes of a claim share: named locks, and memory.

A lock is a byte of one file; the kernel releases it when its holder dies. Memory is a mapped file in the claim's directory. The file is
built under a temporary name and linked when it is complete, so no process ever sees a part of it. Its blocks are allocated at once:
storing into a hole would kill the process if the file system is full.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import operator
import os
import struct
import sys
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, cast

from forebay import _config, errors
from forebay._kernel import host, locks, mappings, waits
from forebay._kernel.interrupts import guarded, guarded_methods, shielded, undone_by
from forebay._logs import logger
from forebay._model import exact_str
from forebay.claims import claim_files
from forebay.claims.claim_files import LOCKS, WORDS
from forebay.claims.members import Members

if TYPE_CHECKING:
    import numpy

log = logger("forebay.claims")

Kind: TypeAlias = Literal["lock", "barrier", "memory"]
T = TypeVar("T")
PAGE = 4096
_START = struct.Struct("<8sQ")  # magic, where the data begin
_MAGIC = b"forebay1"
_LONGEST = 180


# -- locks -------------------------------------------------------------------------------------------------------------


class _ClaimLocks:
    """The locks of a claim in this process. A forked child holds none of its parent's."""

    def __init__(self, directory: Path) -> None:
        self.file = locks.LockFile(directory / LOCKS, claim_files.open_write)
        self.words = waits.Words(directory / WORDS, claim_files.open_write)
        self.threads: dict[int, int] = {}  # offset -> the thread that holds it
        host.at_fork(self)

    def before_fork(self) -> None:
        self.file.before_fork()

    def after_fork_parent(self) -> None:
        self.file.after_fork_parent()

    def after_fork_child(self) -> None:
        self.file.after_fork_child()
        self.threads = {}


class _HeldLock:
    """A named lock that this process holds, from before it is taken until it is released, or this object is dropped."""

    def __init__(self, claim_locks: _ClaimLocks, offset: int) -> None:
        self._locks, self._offset, self._thread = claim_locks, offset, 0

    def try_take(self) -> Literal[True] | None:
        if not self._locks.file.try_lock(self._offset, exclusive=True):
            return None
        self._thread = self._locks.threads[self._offset] = threading.get_ident()
        return True

    def release(self, *, soon: bool = False) -> None:
        if self._locks.threads.get(self._offset) == self._thread:  # else the parent of this forked child holds it
            del self._locks.threads[self._offset]
            (self._locks.file.unlock_soon if soon else self._locks.file.unlock)(self._offset)
            self._locks.words.bump(self._offset % waits.COUNT)
        self._thread = 0

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if self._thread and not is_finalizing():
            with shielded():
                self.release(soon=True)


def _locks_of(members: Members) -> _ClaimLocks:
    claim_locks = members.parts.get(_ClaimLocks)
    if claim_locks is None:
        try:
            claim_locks = members.parts.setdefault(_ClaimLocks, _ClaimLocks(members.directory))
        except FileNotFoundError:
            raise members.lost() from None
    return cast(_ClaimLocks, claim_locks)


def words_of(members: Members) -> waits.Words:
    """Return the futex words of a claim."""
    return _locks_of(members).words


def checked_name(name: object) -> str:
    """A name of what a claim shares, as an exact str. Raises `ConfigError`."""
    text = exact_str(name)
    if text is None:
        raise errors.ConfigError(f"name={name!r}: must be a str", name="name", value=repr(name))
    return text


def name_hash(kind: str, name: str) -> int:
    """Return 62 bits that stand for a name."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8, person=kind.encode())
    return int.from_bytes(digest.digest(), "little") >> 2


def close(members: Members) -> None:
    """Close the file of the locks: now, or when the last held lock is released."""
    claim_locks = members.parts.pop(_ClaimLocks, None)
    if claim_locks is not None:
        claim_locks.file.retire()


@guarded_methods("within")
class NamedLock:
    """A lock shared by all processes of a claim, and by their threads: ``with claim.lock("index"): ...``.

    Entering waits at most ``timeout`` seconds, then raises `WaitTimeout`, which names the holder. A holder that dies releases the lock:
    the next one enters within 0.1 s. A forked child does not hold what its parent holds. Not reentrant: a thread that enters a second
    time gets a `ConfigError` at once. Callable from any thread; unpickling gives the same lock."""

    _held: _HeldLock | None = None

    def __init__(self, members: Members, name: str, timeout: float | None = None, *, kind: Kind = "lock") -> None:
        name = checked_name(name)
        members.check()
        self.name, self.timeout = name, _config.parse_timeout(timeout)
        self._members, self._kind = members, kind
        self._locks = _locks_of(members)
        self._offset = name_hash(kind, name)

    def __repr__(self) -> str:
        return f"<{self._label()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedLock, (self._members, self.name, self.timeout)

    def within(self, timeout: float | None) -> Self:
        """Return the same lock with another timeout."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, timeout=timeout, _held=None)
        return other

    @undone_by(lambda entered: entered.__exit__(None, None, None))
    def __enter__(self) -> Self:
        self._members.check()
        claim_locks, offset = self._locks, self._offset
        if claim_locks.threads.get(offset) == threading.get_ident():
            raise errors.ConfigError(f"{self._label()} is already held by this thread, and is not reentrant")
        held = _HeldLock(claim_locks, offset)

        def attempt() -> Literal[True] | None:
            self._members.check()
            try:
                return held.try_take()
            except FileNotFoundError:
                raise self._members.lost() from None

        if attempt() is None:
            waits.wait_for(attempt, claim_locks.words, offset % waits.COUNT, what=self._describe_holder, timeout=self.timeout)
        self._held = held
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _label(self) -> str:
        return f"the {self._kind} {self.name!r} of {self._members.name}"

    def _describe_holder(self) -> tuple[str, str]:
        live = {member.pid: member for member in self._members.live()}
        pids = locks.holders(self._members.directory / LOCKS, self._offset, among=live)
        return self._label(), ", ".join(live[pid].describe_with_state() for pid in pids) or "an unknown process"


# -- arrays, scalars, buffers ------------------------------------------------------------------------------------------


def array(members: Members, name: str, shape: int | Sequence[int], dtype: Any) -> numpy.ndarray[Any, Any]:
    """Return an array in memory that all processes of the claim share; zeros at first. Raises ClaimMismatch, ConfigError, NoSpace."""
    kind = _dtype(name, dtype)
    sizes = _shape(name, shape, kind)
    view = map_shared(members, "array", name, math.prod(sizes) * kind.itemsize, shape=list(sizes), dtype=repr(kind))
    shared_array: numpy.ndarray[Any, Any] = _numpy().ndarray(sizes, kind, buffer=view)
    return shared_array


@guarded
def scalar(members: Members, name: str, dtype: Any) -> Scalar:
    """Return one shared value; zero at first. Raises ClaimMismatch, ConfigError, NoSpace."""
    kind = _dtype(name, dtype)
    if kind.subdtype is not None:
        raise errors.ConfigError(f"{name!r}: a value of {kind!r} is an array, not one value")
    view = map_shared(members, "scalar", name := checked_name(name), kind.itemsize, dtype=repr(kind))
    return Scalar(members, name, _numpy().ndarray((1,), kind, buffer=view))


def buffer(members: Members, name: str, size: int) -> memoryview:
    """Return writable shared bytes; zeros at first. Raises ClaimMismatch, ConfigError, NoSpace."""
    return map_shared(members, "buffer", name, _length(name, size))


@guarded_methods()
class Scalar:
    """A value that all processes of a claim share.

    A value of at most 8 bytes is stored whole. If two processes read, add and write, one update is lost: use a lock.
    Unpickling gives the same value, whereas an array would be a copy."""

    def __init__(self, members: Members, name: str, cell: numpy.ndarray[Any, Any]) -> None:
        self.name, self._members, self._cell = name, members, cell
        self.dtype: numpy.dtype[Any] = cell.dtype

    def __repr__(self) -> str:
        return f"Scalar({self.name!r}, {self.dtype}, value={self.get()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return scalar, (self._members, self.name, self.dtype)

    def get(self) -> Any:
        """Return the value as plain Python."""
        return self._cell[0].item()

    def set(self, value: Any) -> None:
        """Store a value, as NumPy casts it."""
        self._cell[0] = value

    value = property(get, set)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise errors.MissingExtra("shared arrays need NumPy, which is not installed: pip install numpy", extra="numpy") from error
    return numpy


def _dtype(name: str, dtype: Any) -> numpy.dtype[Any]:
    try:
        kind = _numpy().dtype(dtype)
    except TypeError as error:
        raise errors.ConfigError(f"{name!r}: NumPy has no type {dtype!r}") from error
    if kind.hasobject or kind.kind == "T" or kind.itemsize == 0:
        raise errors.ConfigError(f"{name!r}: values of {kind!r} have no fixed number of bytes, so they cannot be shared")
    return cast("numpy.dtype[Any]", kind)


def _shape(name: str, shape: Any, kind: numpy.dtype[Any]) -> tuple[int, ...]:
    try:
        given = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    except TypeError:  # an array without a dimension
        given = (shape,)
    sizes = tuple(_length(name, size) for size in given)
    try:  # with an empty array, before a file is created
        _numpy().ndarray(sizes if 0 in sizes else (0,) * len(sizes), kind)
    except ValueError as error:
        raise errors.ConfigError(f"{name!r}: NumPy has no arrays of this shape: {error}") from error
    return sizes


def _length(name: str, size: Any) -> int:
    try:
        length = operator.index(size)
    except TypeError:
        length = -1
    if length < 0 or isinstance(size, bool):
        raise errors.ConfigError(f"{name!r}: {size!r} is not a number of items")
    return length


# -- mapped files ------------------------------------------------------------------------------------------------------


def map_shared(members: Members, kind: str, name: str, size: int, **facts: Any) -> memoryview:
    """Return ``size`` writable bytes, aligned to a page; zeros at first. Raises `ClaimMismatch` if another process asked for something
    else under this name.

    The view stays valid after the claim is closed, and in forked children."""
    lock = NamedLock(members, name, kind="memory")
    name = lock.name
    header = {"kind": kind, "name": name, "size": size, **facts}
    path = os.path.join(members.directory, f"{'barrier' if kind == 'barrier' else 'memory'}.{_quoted(name)}")
    view = _open(path, header, members)
    if view is None:
        with lock:  # two processes that build it at once would need twice the blocks
            view = _open(path, header, members)
            return view if view is not None else _make(path, header, members)
    return view


def _quoted(name: str) -> str:
    raw = name.encode(errors="surrogatepass")
    quoted = urllib.parse.quote_from_bytes(raw, safe="")
    return quoted if len(quoted) <= _LONGEST else f"{quoted[:_LONGEST]}.{hashlib.blake2b(raw, digest_size=16).hexdigest()}"


def _open(path: str, header: dict[str, Any], members: Members) -> memoryview | None:
    try:
        fd = claim_files.open_write(path)
    except FileNotFoundError:
        return None  # `_make` notices if the claim itself is gone
    try:
        start, stored = _read_header(fd, path)
        if stored != header:
            what, requested = _described(stored), _described(header)
            raise errors.ClaimMismatch(f"{header['name']!r} of {members.name} was created as {what}, and is requested here as {requested}")
        return mappings.map_file(fd, start + stored["size"], writable=True)[start:]
    finally:
        os.close(fd)


def _read_header(fd: int, path: str) -> tuple[int, dict[str, Any]]:
    """Return where the data begin, and the description of the data. Raises `Damaged`."""
    try:
        length, (magic, start) = os.fstat(fd).st_size, _START.unpack(os.pread(fd, _START.size, 0))
        header = json.loads(os.pread(fd, min(start, length) - _START.size, _START.size).rstrip(b"\0"))
        if magic == _MAGIC and length == start + header["size"]:
            return start, header
    except (struct.error, ValueError, TypeError, KeyError) as error:
        log.debug("%s: %r", path, error)
    raise errors.Damaged(f"{path} is damaged: end the job's processes, and it is removed with their claim", key=path)


def _described(header: dict[str, Any]) -> str:
    parts = [f"{name} {header[name]}" for name in ("shape", "dtype") if name in header]
    return f"{header['kind']} of {', '.join(parts) or format(header['size'], ',') + ' bytes'}"


def _make(path: str, header: dict[str, Any], members: Members) -> memoryview:
    """Build and map the file. The caller holds the lock of this name."""
    text = json.dumps(header).encode()
    start = -(-(_START.size + len(text)) // PAGE) * PAGE
    size, temporary = start + header["size"], f"{path}+new"  # a quoted name has no plus sign
    try:
        if size > host.free_bytes(members.directory):
            raise _no_space(header, members, size)  # before a file that fills the file system disturbs other processes
        with claim_files.inside(members.directory) as directory:
            host.unlink(temporary, directory)  # left by a killed process
            fd = host.create(temporary, 0o600, directory=directory)
            try:
                host.store_in_place(fd)
                host.allocate(fd, 0, size)
                host.pwrite(fd, _START.pack(_MAGIC, start) + text, 0)
                host.link(temporary, path, directory, directory)
                return mappings.map_file(fd, size, writable=True)[start:]
            finally:
                os.close(fd)
                host.unlink(temporary, directory)
    except FileNotFoundError:
        raise members.lost() from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_space(header, members, size) from error
        raise


def _no_space(header: dict[str, Any], members: Members, need: int) -> errors.NoSpace:
    disk, registry = host.disk(members.directory), members.directory.parent
    inodes = ", but no more files can be created there" if disk.free >= need and disk.inodes_free < 2 else ""
    return errors.NoSpace(
        f"no room for {header['name']!r} of {members.name}: {need:,} bytes needed, {disk.free:,} of {disk.total:,} are free in {registry}"
        f"{inodes}: `forebay claims` lists what is held there; enlarge it (docker run --shm-size), or set FOREBAY_CLAIMS to a larger "
        "directory", key=header["name"], need=need, free=disk.free, budget=disk.total, hopeless=need > disk.total, limit="disk",
    )  # fmt: skip
