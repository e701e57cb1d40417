"""What the processes of a claim share: locks that have names, and memory.

A lock is a byte of one file, which the kernel lets go when its holder dies. Memory is a file of the claim's directory, mapped: it is
built under a name of its own and linked when it is whole, so it is there whole or not at all. Its blocks are taken at once: a hole
would kill, on a full file system, who stores into it.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import operator
import os
import struct
import threading
import urllib.parse
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, TypeVar, cast

from forebay import _config, errors
from forebay._kernel import host, locks, mappings, waits
from forebay._logs import logger
from forebay.claims import claim_files
from forebay.claims.claim_files import LOCKS, WORDS
from forebay.claims.members import ClaimContext, Member

if TYPE_CHECKING:
    import numpy

log = logger("forebay.claims")

Kind: TypeAlias = Literal["lock", "barrier", "memory"]
T = TypeVar("T")


class _Locks:
    """The locks of a claim in this process. A forked child holds none of its parent's.

    The handler of a signal may run in the middle of what is here, and must not wait for what its own thread was about to let go: it
    locks through a description of its own."""

    def __init__(self, directory: Path) -> None:
        self.file = locks.LockFile(directory / LOCKS, claim_files.opener)
        self.words = waits.Words(directory / WORDS, claim_files.opener)
        self.threads: dict[int, int] = {}  # offset -> the thread that holds it
        self._path = directory / LOCKS
        self._busy: set[int] = set()  # the threads that are in the middle of a call to `file`
        self._apart: dict[int, locks.LockFile] = {}  # offset -> where a handler has locked it
        self._retires = self._stands = False  # the latter: between the hooks of a fork
        host.at_fork(self)

    def try_lock(self, offset: int) -> Literal[True] | None:
        me = threading.get_ident()
        if me in self._busy:
            apart = locks.LockFile(self._path, claim_files.opener)
            if not apart.try_lock(offset, exclusive=True):
                return None
            self._apart[offset] = apart
        elif not self._alone(lambda: self.file.try_lock(offset, exclusive=True)):
            return None
        self.threads[offset] = me
        return True

    def unlock(self, offset: int) -> None:
        self.threads.pop(offset, None)
        apart = self._apart.pop(offset, None)
        if apart is not None:
            apart.close()
        elif threading.get_ident() in self._busy:
            self.file.unlock_soon(offset)
        else:
            self._alone(lambda: self.file.unlock(offset))
        self.words.bump(offset % waits.COUNT)

    def held(self, offset: int) -> bool:
        return offset in self._apart or self.file.held(offset)

    def retire(self) -> None:
        """Close the file: now, or when the last that is held is let go."""
        self._retires = True
        if threading.get_ident() not in self._busy:
            self.file.retire()

    def _alone(self, call: Callable[[], T]) -> T:
        me = threading.get_ident()
        self._busy.add(me)
        try:
            return call()
        finally:
            self._busy.discard(me)
            if self._retires:
                self.file.retire()

    def before_fork(self) -> None:
        if threading.get_ident() not in self._busy:
            self._busy.add(threading.get_ident())
            self.file.before_fork(keep=False)
            self._stands = True

    def after_fork_parent(self) -> None:
        if self._stands:
            self._stands = False
            self.file.after_fork_parent()
            self._busy.discard(threading.get_ident())

    def after_fork_child(self) -> None:
        self.file.after_fork_child(keep=False)
        for apart in self._apart.values():
            apart.after_fork_child(keep=False)
        self._apart, self._busy, self.threads, self._stands = {}, set(), {}, False


def _locks_of(house: ClaimContext) -> _Locks:
    found = house.parts.get(_Locks)
    if found is None:
        try:
            found = house.parts.setdefault(_Locks, _Locks(house.directory))
        except FileNotFoundError:
            raise house.lost() from None
    return cast(_Locks, found)


def words_of(house: ClaimContext) -> waits.Words:
    """The futex words of a claim."""
    return _locks_of(house).words


def number(kind: str, name: str) -> int:
    """62 bits that stand for a name."""
    digest = hashlib.blake2b(name.encode(errors="surrogatepass"), digest_size=8, person=kind.encode())
    return int.from_bytes(digest.digest(), "little") >> 2


def close(house: ClaimContext) -> None:
    """Close the file of the locks: now, or when the last that is held is let go."""
    found = house.parts.pop(_Locks, None)
    if found is not None:
        found.retire()


class NamedLock:
    """A lock of all processes of a claim, and of their threads: ``with claim.lock("index"): ...``.

    Entering waits, at most ``timeout`` seconds, then raises `WaitTimeout`, which names the holder. A holder that dies lets go: the
    next one enters within 0.1 s. A forked child does not hold what its parent holds. Not reentrant: a thread that enters a second time
    gets a `ConfigError` at once. Callable from any thread; who unpickles it has the same lock."""

    def __init__(self, house: ClaimContext, name: str, timeout: float | None = None, *, kind: Kind = "lock") -> None:
        if not isinstance(name, str):
            raise errors.ConfigError(f"name={name!r}: must be a str", name="name", value=repr(name))
        house.check()
        self.name, self.timeout = name, _config.parse_timeout(timeout)
        self._house, self._kind = house, kind
        self._known = _locks_of(house)
        self._offset = number(kind, name)

    def __repr__(self) -> str:
        return f"<{self._what()}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedLock, (self._house, self.name, self.timeout)

    def within(self, timeout: float | None) -> Self:
        """The same lock, waited for at most this long."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, timeout=timeout)
        return other

    def __enter__(self) -> Self:
        self._house.check()
        known, offset, me = self._known, self._offset, threading.get_ident()
        if known.threads.get(offset) == me:
            raise errors.ConfigError(f"{self._what()} is held by this very thread: it cannot be taken twice")
        try:
            if self._take() is None:
                waits.wait_for(self._try, known.words, offset % waits.COUNT, what=self._whose, timeout=self.timeout)
        except BaseException:
            # Ctrl-C after the kernel gave the lock, and before that was noted: nobody would ever let go.
            if known.held(offset) and known.threads.get(offset, me) == me:
                known.unlock(offset)
            raise
        return self

    def _try(self) -> Literal[True] | None:
        self._house.check()
        return self._take()

    def _take(self) -> Literal[True] | None:
        try:
            return self._known.try_lock(self._offset)
        except FileNotFoundError:
            raise self._house.lost() from None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._known.threads.get(self._offset) == threading.get_ident():  # else it is the parent's of this forked child
            self._known.unlock(self._offset)

    def _what(self) -> str:
        return f"the {self._kind} {self.name!r} of {self._house.name}"

    def _whose(self) -> tuple[str, str]:
        live = {member.pid: member for member in self._house.members.live()}
        found = locks.holders(self._house.directory / LOCKS, self._offset, among=live)
        return self._what(), ", ".join(with_state(live[pid]) for pid in found) or "an unknown process"


def with_state(member: Member) -> str:
    """A member in words, and whether it stands still."""
    words = member.describe()
    if not member.is_stopped():
        return words
    return f"{words[:-1]}, stopped)" if words.endswith(")") else f"{words} (stopped)"


PAGE = 4096
_START = struct.Struct("<8sQ")  # magic, where the data begin
_MAGIC = b"forebay1"
_LONGEST = 180


def array(house: ClaimContext, name: str, shape: int | Sequence[int], dtype: Any) -> numpy.ndarray[Any, Any]:
    """An array over memory that all processes of the claim share; zeros at first. Raises ClaimMismatch, ConfigError, NoSpace."""
    sizes, kind = _shape(name, shape), _dtype(name, dtype)
    _check_shape(name, sizes, kind)
    view = share(house, "array", name, math.prod(sizes) * kind.itemsize, shape=list(sizes), dtype=repr(kind))
    made: numpy.ndarray[Any, Any] = _numpy().ndarray(sizes, kind, buffer=view)
    return made


def scalar(house: ClaimContext, name: str, dtype: Any) -> Scalar:
    """One shared value; zero at first. Raises ClaimMismatch, ConfigError, NoSpace."""
    kind = _dtype(name, dtype)
    if kind.subdtype is not None:
        raise errors.ConfigError(f"{name!r}: a value of {kind!r} is an array, not one value")
    view = share(house, "scalar", name, kind.itemsize, dtype=repr(kind))
    return Scalar(house, name, _numpy().ndarray((1,), kind, buffer=view))


def buffer(house: ClaimContext, name: str, size: int) -> memoryview:
    """Shared bytes that can be written; zeros at first. Raises ClaimMismatch, ConfigError, NoSpace."""
    return share(house, "buffer", name, _length(name, size))


class Scalar:
    """A value that all processes of a claim share.

    What has at most 8 bytes is never seen half written. Two processes that read, add and write lose one of the two: use a lock.
    Who unpickles it has the same value; an array would be a copy there."""

    def __init__(self, house: ClaimContext, name: str, cell: numpy.ndarray[Any, Any]) -> None:
        self.name, self._house, self._cell = name, house, cell
        self.dtype: numpy.dtype[Any] = cell.dtype

    def __repr__(self) -> str:
        return f"Scalar({self.name!r}, {self.dtype}, value={self.get()!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return scalar, (self._house, self.name, self.dtype)

    def get(self) -> Any:
        """The value now, as plain Python."""
        return self._cell[0].item()

    def set(self, value: Any) -> None:
        """Store a value, as numpy casts it."""
        self._cell[0] = value

    value = property(get, set)


# -- what is asked for -------------------------------------------------------------------------------------------------


def _numpy() -> Any:
    try:
        import numpy
    except ImportError as error:
        raise errors.MissingExtra("shared arrays need NumPy, which is not installed: pip install numpy", extra="numpy") from error
    return numpy


def _dtype(name: str, dtype: Any) -> numpy.dtype[Any]:
    try:
        found = _numpy().dtype(dtype)
    except TypeError as error:
        raise errors.ConfigError(f"{name!r}: numpy knows no type {dtype!r}") from error
    if found.hasobject or found.kind == "T" or found.itemsize == 0:
        raise errors.ConfigError(f"{name!r}: values of {found!r} have no fixed number of bytes, so they cannot be shared")
    return cast("numpy.dtype[Any]", found)


def _shape(name: str, shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(shape) if isinstance(shape, Iterable) else (shape,)
    except TypeError:  # an array without a dimension
        sizes = (shape,)
    return tuple(_length(name, size) for size in sizes)


def _check_shape(name: str, sizes: tuple[int, ...], kind: numpy.dtype[Any]) -> None:
    """By an empty array, before a file is made."""
    try:
        _numpy().ndarray(sizes if 0 in sizes else (0,) * len(sizes), kind)
    except ValueError as error:
        raise errors.ConfigError(f"{name!r}: numpy has no arrays of this shape: {error}") from error


def _length(name: str, size: Any) -> int:
    try:
        found = operator.index(size)
    except TypeError:
        raise errors.ConfigError(f"{name!r}: {size!r} is no number of items") from None
    if found < 0 or isinstance(size, bool):
        raise errors.ConfigError(f"{name!r}: {size!r} is no number of items")
    return found


# -- files -------------------------------------------------------------------------------------------------------------


def share(house: ClaimContext, kind: str, name: str, size: int, **facts: Any) -> memoryview:
    """``size`` bytes that can be written, on a boundary of a page; zeros at first. Whoever comes later must say the same.

    The view stays good after the claim is left, and in forked children."""
    lock = NamedLock(house, name, kind="memory")
    told = {"kind": kind, "name": name, "size": size, **facts}
    path = os.path.join(house.directory, f"{'barrier' if kind == 'barrier' else 'memory'}.{_quoted(name)}")
    found = _open(path, told, house)
    if found is None:
        with lock:  # two who make it at once would take the blocks twice
            found = _open(path, told, house)
            return found if found is not None else _make(path, told, house)
    return found


def _quoted(name: str) -> str:
    raw = name.encode(errors="surrogatepass")
    quoted = urllib.parse.quote_from_bytes(raw, safe="")
    return quoted if len(quoted) <= _LONGEST else f"{quoted[:_LONGEST]}.{hashlib.blake2b(raw, digest_size=16).hexdigest()}"


def _open(path: str, told: dict[str, Any], house: ClaimContext) -> memoryview | None:
    try:
        fd = claim_files.open_write(house.directory, os.path.basename(path))
    except FileNotFoundError:
        return None  # `_make` tells it where the claim itself is gone
    try:
        start, known = _header(fd, path)
        if known != told:
            first, here = _described(known), _described(told)
            raise errors.ClaimMismatch(f"{told['name']!r} of {house.name} is {first}, as who came first made it; here it is to be {here}")
        return mappings.map_file(fd, start + known["size"], writable=True)[start:]
    finally:
        os.close(fd)


def _header(fd: int, path: str) -> tuple[int, dict[str, Any]]:
    """Where the data begin, and what the file says of them."""
    try:
        length, (magic, start) = os.fstat(fd).st_size, _START.unpack(os.pread(fd, _START.size, 0))
        known = json.loads(os.pread(fd, min(start, length) - _START.size, _START.size).rstrip(b"\0"))
        if magic == _MAGIC and length == start + known["size"]:
            return start, known
    except (struct.error, ValueError, TypeError, KeyError) as error:
        log.debug("%s: %r", path, error)
    raise errors.Damaged(f"{path} is damaged: end the job's processes, and it goes with their claim", key=path)


def _described(told: dict[str, Any]) -> str:
    parts = [f"{name} {told[name]}" for name in ("shape", "dtype") if name in told]
    return f"{told['kind']} of {', '.join(parts) or format(told['size'], ',') + ' bytes'}"


def _make(path: str, told: dict[str, Any], house: ClaimContext) -> memoryview:
    """Caller: holds the lock of this name."""
    text = json.dumps(told).encode()
    start = -(-(_START.size + len(text)) // PAGE) * PAGE
    whole, temporary = start + told["size"], f"{path}+new"  # a quoted name has no plus sign
    try:
        if whole > host.free_bytes(house.directory):
            raise _no_room(told, house, whole)  # before others feel it, whom a file that grows until nothing is left would disturb
        with claim_files.inside(house.directory) as directory:
            host.unlink(temporary, directory)  # of one who was killed here
            return _build(path, temporary, _START.pack(_MAGIC, start) + text, whole, directory)[start:]
    except FileNotFoundError:
        raise house.lost() from None
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _no_room(told, house, whole) from error
        raise


def _build(path: str, temporary: str, head: bytes, whole: int, directory: int) -> memoryview:
    fd = host.create(temporary, 0o600, directory=directory)
    try:
        host.allocate(fd, 0, whole)
        host.pwrite(fd, head, 0)
        host.link(temporary, path, directory, directory)
        return mappings.map_file(fd, whole, writable=True)
    finally:
        os.close(fd)
        host.unlink(temporary, directory)


def _no_room(told: dict[str, Any], house: ClaimContext, need: int) -> errors.NoSpace:
    disk, place = host.disk(house.directory), house.directory.parent
    files = ", but no more files can be made there" if disk.free >= need and disk.inodes_free < 2 else ""
    return errors.NoSpace(
        f"no room for {told['name']!r} of {house.name}: {need:,} bytes wanted, {disk.free:,} of {disk.total:,} are free in {place}{files}: "
        "see `forebay claims` for what is held there, enlarge it (docker run --shm-size), or set FOREBAY_CLAIMS to a larger directory",
        key=told["name"], need=need, free=disk.free, budget=disk.total, hopeless=need > disk.total, limit="disk",
    )  # fmt: skip
